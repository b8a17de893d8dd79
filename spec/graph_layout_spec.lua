-- The pass layout: images of convolutions with channels innermost.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function layout(text) return (mf._graph_pass(text, 'layout')) end

local function count(text, what) return select(2, text:gsub(what, '')) end

describe('layout', function()
  it('reorders what comes into a region of convolutions', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = clone(%0, memory_format=channels_last): float32[2, 8, 12, 12]
%3 = conv2d(%2, %1): float32[2, 8, 10, 10]
%4 = relu(%3): float32[2, 8, 10, 10]
%5 = conv2d(%4, %1): float32[2, 8, 8, 8]
%6 = conv2d(%2, %1, stride=[2, 2]): float32[2, 8, 5, 5]
%7 = sum(%5, dim=[0, 1, 2, 3]): float32[]
%8 = sum(%6, dim=[0, 1, 2, 3]): float32[]
return %7, %8
]], layout [[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
%3 = relu(%2): float32[2, 8, 10, 10]
%4 = conv2d(%3, %1): float32[2, 8, 8, 8]
%5 = conv2d(%0, %1, stride=[2, 2]): float32[2, 8, 5, 5]
%6 = sum(%4, dim=[0, 1, 2, 3]): float32[]
%7 = sum(%5, dim=[0, 1, 2, 3]): float32[]
return %6, %7
]])
  end)

  it('gives results the order that they had', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = clone(%0, memory_format=channels_last): float32[2, 8, 12, 12]
%3 = conv2d(%2, %1): float32[2, 8, 10, 10]
%4 = conv2d(%3, %1): float32[2, 8, 8, 8]
%5 = clone(%4, memory_format=contiguous): float32[2, 8, 8, 8]
return %5, %5
]], layout [[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
%3 = conv2d(%2, %1): float32[2, 8, 8, 8]
return %3, %3
]])
  end)

  it('leaves alone what would move as much, results that share memory, float64 and as_strided', function()
    for _, text in ipairs { [[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
return %2
]], [[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
%3 = conv2d(%2, %1): float32[2, 8, 8, 8]
%4 = conv2d(%3, %1): float32[2, 8, 6, 6]
%5 = select(%4, dim=0, index=1): float32[8, 6, 6]
return %4, %5
]], [[
graph step
%0 = input x: float64[2, 8, 12, 12]
%1 = capture w: float64[8, 8, 3, 3]
%2 = conv2d(%0, %1): float64[2, 8, 10, 10]
%3 = conv2d(%2, %1): float64[2, 8, 8, 8]
%4 = sum(%3, dim=[0, 1, 2, 3]): float64[]
return %4
]], [[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
%3 = conv2d(%2, %1): float32[2, 8, 8, 8]
%4 = as_strided(%3, size=[4], stride=[1], storage_offset=0, x_stride=[512, 64, 8, 1]): float32[4]
return %4
]] } do
      assert.equal(text, layout(text))
    end
  end)

  it('counts what views copy', function()
    local text = [[
graph step
%0 = input x: float32[2, 8, 12, 12]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
%3 = reshape(%2, size=[2, 800]): float32[2, 800]
%4 = sum(%3, dim=[0, 1]): float32[]
return %4
]]
    assert.equal(text, layout(text))
  end)

  local function net()
    return nn.Sequential(nn.Conv2d(1, 8, 3, { padding = 1 }), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
      nn.Conv2d(8, 16, 3, { padding = 1 }), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 16, 3, { groups = 4 }),
      nn.ReLU(), nn.Conv2d(16, 24, 1), nn.Flatten(), nn.Linear(24 * 9, 5))
  end

  local function train(passes)
    mf.manual_seed(3)
    local model, losses = net(), {}
    local opt = optim.SGD(model:parameters(), { lr = 0.05, momentum = 0.9 })
    local step = function(x, y)
      opt:zero_grad()
      local loss = mf.cross_entropy(model(x), y)
      loss:backward()
      opt:step()
      return loss
    end
    local run = passes and mf.compile(step, { passes = passes }) or step
    for k = 1, 5 do
      losses[k] = run(mf.randn(6, 1, 20, 20), mf.randint(0, 5, { 6 })):item()
    end
    return losses, passes and tostring(run) or '', model
  end

  it('trains as eager does', function()
    local want, _, a = train()
    local got, text, b = train {}
    assert.is_true(count(text, 'channels_last') > 0)
    for k = 1, 5 do assert.is_true(math.abs(want[k] - got[k]) < 1e-4 * want[k], 'loss ' .. k) end
    for name, t in pairs(a:state_dict()) do
      local other = b:state_dict()[name]
      assert(mf.allclose(t, other, { rtol = 1e-3, atol = 1e-4 }), name)
      assert.same(t:stride(), other:stride())
    end
    local _, off = train { layout = false }
    assert.equal(0, count(off, 'channels_last'))
  end)

  it('adds nothing where images are channels_last already', function()
    local text = [[
graph step
%0 = input x: float32[2, 8, 12, 12] strides [1152, 1, 96, 8]
%1 = capture w: float32[8, 8, 3, 3]
%2 = conv2d(%0, %1): float32[2, 8, 10, 10]
%3 = conv2d(%2, %1): float32[2, 8, 8, 8]
return %3
]]
    assert.equal(text, layout(text))
  end)

  it('keeps the strides of results, in either order', function()
    local a, b = nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3)
    local function f(x)
      local y = a(x):relu()
      local z = b(y)
      return y, z, z:tanh(), z:permute(0, 2, 3, 1):tanh()
    end
    local x = mf.randn(2, 4, 12, 12)
    local want, got = { f(x) }, { mf.compile(f)(x) }
    for k = 1, #want do
      assert.same(want[k]:stride(), got[k]:stride())
      assert(mf.allclose(want[k], got[k], { rtol = 1e-4, atol = 1e-5 }), 'result ' .. k)
    end
  end)
end)
