-- The pass fuse_act: convolution or linear and an activation in one op.
local mf = require 'moonflow'
local nn = mf.nn

local function fuse(text) return (mf._graph_pass(text, 'fuse_act')) end

describe('fuse_act', function()
  it('takes relu behind conv2d, relu and gelu behind linear', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 3, 8, 8]
%1 = input u: float32[4, 6]
%2 = capture w: float32[5, 3, 3, 3]
%3 = capture b: float32[5]
%4 = capture v: float32[7, 6]
%5 = conv2d_act(%0, %2, %3, stride=[2, 2]): float32[2, 5, 3, 3]
%6 = linear_act(%1, %4): float32[4, 7]
%7 = linear_act(%1, %4, act=gelu): float32[4, 7]
%8 = linear_act(%1, %4, act=gelu_tanh): float32[4, 7]
return %5, %6, %7, %8
]], fuse [[
graph step
%0 = input x: float32[2, 3, 8, 8]
%1 = input u: float32[4, 6]
%2 = capture w: float32[5, 3, 3, 3]
%3 = capture b: float32[5]
%4 = capture v: float32[7, 6]
%5 = conv2d(%0, %2, %3, stride=[2, 2]): float32[2, 5, 3, 3]
%6 = relu(%5): float32[2, 5, 3, 3]
%7 = linear(%1, %4): float32[4, 7]
%8 = relu(%7): float32[4, 7]
%9 = linear(%1, %4): float32[4, 7]
%10 = gelu(%9): float32[4, 7]
%11 = linear(%1, %4): float32[4, 7]
%12 = gelu(%11, approximate=tanh): float32[4, 7]
return %6, %8, %10, %12
]])
  end)

  it('leaves alone what others read, float64 and other activations', function()
    local text = [[
graph step
%0 = input u: float32[4, 6]
%1 = capture v: float32[7, 6]
%2 = input z: float64[4, 6]
%3 = capture q: float64[7, 6]
%4 = linear(%0, %1): float32[4, 7]
%5 = gelu(%4): float32[4, 7]
%6 = gelu_backward(%5, %4): float32[4, 7]
%7 = linear(%2, %3): float64[4, 7]
%8 = relu(%7): float64[4, 7]
%9 = linear(%6, %6): float32[4, 4]
%10 = tanh(%9): float32[4, 4]
%11 = linear(%10, %10): float32[4, 4]
%12 = relu(%11): float32[4, 4]
return %5, %8, %11, %12
]]
    assert.equal(text, fuse(text))
  end)

  local function net()
    return nn.Sequential(nn.Conv2d(3, 8, 3, { padding = 1 }), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Flatten(),
      nn.Linear(8 * 36, 20), nn.ReLU(), nn.Linear(20, 20), nn.GELU(), nn.Linear(20, 4))
  end

  local function train(passes)
    mf.manual_seed(2)
    local model, losses = net(), {}
    local opt = mf.optim.SGD(model:parameters(), { lr = 0.05 })
    local step = function(x, y)
      opt:zero_grad()
      local loss = mf.cross_entropy(model(x), y)
      loss:backward()
      opt:step()
      return loss
    end
    local run = passes and mf.compile(step, { passes = passes }) or step
    for k = 1, 5 do losses[k] = run(mf.randn(6, 3, 6, 6), mf.randint(0, 4, { 6 })):item() end
    return losses, passes and tostring(run), model
  end

  it('trains as eager does, and serves evaluation', function()
    local want, _, a = train()
    local got, text, b = train { layout = false }
    assert.equal(2, select(2, text:gsub('conv2d_act%(', '')))
    assert.equal(1, select(2, text:gsub('linear_act%(', ''))) -- gelu's gradient reads its input
    for k = 1, 5 do assert.is_true(math.abs(want[k] - got[k]) < 1e-5 * want[k], 'loss ' .. k) end
    for name, t in pairs(a:state_dict()) do
      assert(mf.allclose(t, b:state_dict()[name], { rtol = 1e-4, atol = 1e-5 }), name)
    end
    local x = mf.randn(6, 3, 6, 6)
    local run = mf.compile(function(v) return mf.no_grad(function() return a(v) end) end)
    assert(mf.allclose(a(x), run(x), { rtol = 1e-4, atol = 1e-5 }))
    assert.equal(2, select(2, tostring(run):gsub('linear_act%(', '')))
  end)

  it('has kernels for what oneDNN does not take', function()
    for _, dtype in ipairs { mf.float64, mf.float32, mf.bfloat16 } do
      for _, act in ipairs { 'relu', 'gelu', 'gelu_tanh' } do
        local f = ({ relu = mf.relu, gelu = mf.gelu,
          gelu_tanh = function(t) return mf.gelu(t, { approximate = 'tanh' }) end })[act]
        local within = dtype == mf.float64 and 1e-12 or dtype == mf.float32 and 1e-5 or 2e-2
        for _, k in ipairs { 0, 3, 40 } do
          local x, w, b = mf.randn(2, 9, k):to(dtype), mf.randn(30, k):to(dtype), mf.randn(30):to(dtype)
          assert(mf.allclose(f(mf.linear(x, w, b)), mf._linear_act(x, w, b, { act = act }),
            { rtol = within, atol = within }), act)
        end
      end
      local x, b = mf.randn(2, 3, 7, 6):to(dtype), mf.randn(4):to(dtype)
      local within = dtype == mf.bfloat16 and 2e-2 or 1e-5
      for _, w in ipairs { mf.randn(4, 3, 3, 3):to(dtype), mf.zeros({ 4, 3, 3, 3 }, { dtype = dtype }) } do
        assert(mf.allclose(mf.conv2d(x, w, b):relu(), mf._conv2d_act(x, w, b), { rtol = within, atol = within }))
      end
      local o = { dtype = dtype }
      local none = mf._conv2d_act(mf.zeros({ 2, 0, 7, 6 }, o), mf.zeros({ 4, 0, 3, 3 }, o), b)
      assert(mf.equal(none, b:relu():reshape(1, 4, 1, 1):expand(2, 4, 5, 4)))
    end
  end)
end)
