-- The pass fuse_sum_norm, and the ops that it makes.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function fuse(text) return (mf._graph_pass(text, 'fuse_sum_norm,dce')) end

describe('fuse_sum_norm', function()
  it('takes a sum that others read too, with the normalisation behind it', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 8]
%1 = input r: float32[2, 8]
%2 = capture w: float32[8]
%3 = capture b: float32[8]
%4, %5 = add_norm(%0, %1, %2, %3, normalized_shape=[8], centre=true, eps=1e-05): float32[2, 8], float32[2, 8]
%6, %7 = add_norm(%4, %5, %2, normalized_shape=[8], centre=false, eps=0.01): float32[2, 8], float32[2, 8]
return %5, %6, %7
]], fuse [[
graph step
%0 = input x: float32[2, 8]
%1 = input r: float32[2, 8]
%2 = capture w: float32[8]
%3 = capture b: float32[8]
%4 = add(%0, %1): float32[2, 8]
%5 = layer_norm(%4, %2, %3, normalized_shape=[8]): float32[2, 8]
%6 = add(%5, %4): float32[2, 8]
%7 = rms_norm(%6, %2, normalized_shape=[8], eps=0.01): float32[2, 8]
return %4, %7, %6
]])
  end)

  it('takes the sums before and behind a gradient', function()
    local alone = [[
graph step
%0 = input g: float32[2, 8]
%1 = input x: float32[2, 8]
%2 = input h: float32[2, 8]
%3 = add(%0, %2): float32[2, 8]
%4, %5 = rms_norm_backward(%3, %1, none, normalized_shape=[8], params=false, eps=1e-05): float32[2, 8], float32[0]
return %4
]]
    assert.equal([[
graph step
%0 = input g: float32[2, 8]
%1 = input x: float32[2, 8]
%2 = input h: float32[2, 8]
%3, %4, %5 = norm_add_backward(%0, %1, none, %2, normalized_shape=[8], centre=false, params=false, ]] ..
      [[eps=1e-05): float32[2, 8], float32[0], float32[0]
return %3
]], fuse(alone))
    assert.equal([[
graph step
%0 = input g: float32[2, 8]
%1 = input x: float32[2, 8]
%2 = input h: float32[2, 8]
%3 = capture w: float32[8]
%4, %5, %6 = norm_add_backward(%0, %1, %1, %2, %3, normalized_shape=[8], centre=true, params=true, eps=1e-05): ]] ..
      [[float32[2, 8], float32[8], float32[8]
return %4, %5, %6
]], fuse([[
graph step
%0 = input g: float32[2, 8]
%1 = input x: float32[2, 8]
%2 = input h: float32[2, 8]
%3 = capture w: float32[8]
%4 = add(%0, %2): float32[2, 8]
%5, %6, %7 = layer_norm_backward(%4, %1, %3, normalized_shape=[8], params=true, eps=1e-05): ]] ..
      [[float32[2, 8], float32[8], float32[8]
%8 = add(%1, %5): float32[2, 8]
return %8, %6, %7
]]))
  end)

  it('leaves sums that are of other forms, or far away, or gradients that others read', function()
    local forward = [[
graph step
%%0 = input x: float32[2, 8]
%%1 = input r: float32[%s8]
%%2 = add(%%0, %%1%s): float32[2, 8]
%%3 = layer_norm(%%2, normalized_shape=[8]): float32[2, 8]
return %%3
]]
    local backward = [[
graph step
%0 = input g: float32[2, 8]
%1 = input x: float32[2, 8]
%2 = add(%0, %1): float32[2, 8]
%3, %4 = rms_norm_backward(%2, %1, none, normalized_shape=[8], params=false, eps=1e-05): float32[2, 8], float32[0]
%5 = add(%1, %3): float32[2, 8]
return %5, %3, %2
]]
    for _, text in ipairs { forward:format('', ''), forward:format('2, ', ', alpha=2'),
      (forward:format('2, ', ''):gsub('float32', 'bfloat16')), backward } do
      assert.equal((mf._graph_pass(text, 'dce')), fuse(text))
    end
    assert.truthy(fuse(forward:format('2, ', '')):find('add_norm', 1, true))
  end)
end)

-- -- Steps ----------------------------------------------------------------------------------------

-- Losses and parameters of some steps of blocks that normalise `first` or behind.
local function train(make, first, dtype, options)
  mf.manual_seed(4)
  local norms, layers = {}, {}
  for i = 1, 3 do norms[i], layers[i] = make(), nn.Linear(24, 24):to(dtype) end
  local list = {}
  for i = 1, 3 do
    norms[i]:to(dtype)
    for _, m in ipairs { norms[i], layers[i] } do
      for _, p in ipairs(m:parameters()) do list[#list + 1] = p end
    end
  end
  local opt = optim.SGD(list, { lr = 0.1, momentum = 0.9 })
  local function step(x)
    opt:zero_grad()
    for i = 1, 3 do
      if first then x = x + layers[i](norms[i](x)):tanh()
      else x = norms[i](x + layers[i](x):tanh()) end
    end
    local loss = x:square():mean()
    loss:backward()
    opt:step()
    return loss
  end
  local run, results = options and mf.compile(step, options) or step, {}
  for i = 1, 4 do
    mf.manual_seed(i)
    results[i] = run(mf.randn({ 5, 9, 24 }, { dtype = dtype })):detach():clone()
  end
  for _, p in ipairs(list) do results[#results + 1] = p:detach() end
  return results, options and tostring(run)
end

describe('a step of sums and normalisations', function()
  local kinds = {
    LayerNorm = function() return nn.LayerNorm(24) end,
    RMSNorm = function() return nn.RMSNorm(24) end,
  }
  for name, make in pairs(kinds) do
    for order, first in pairs { before = true, behind = false } do
      for _, dtype in ipairs { mf.float32, mf.float64 } do
        it(('gives the same bits: %s %s layers, %s'):format(name, order, tostring(dtype)), function()
          local want = train(make, first, dtype)
          local got, text = train(make, first, dtype, { passes = { fuse_sum_norm = true } })
          for i = 1, #want do assert(mf.equal(want[i], got[i]), i) end
          assert.truthy(text:find('add_norm(', 1, true), text)
          assert.truthy(text:find('norm_add_backward(', 1, true), text)
        end)
      end
    end
  end
end)
