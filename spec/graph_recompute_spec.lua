-- The pass recompute: what is cheap is computed again near where it is needed again.
local mf = require 'moonflow'
local models = dofile 'examples/models.lua'

-- The graph of `first`, whose last value is %3, of a chain of 40 ops, and of `last`, which begins
-- with %45, after the pass, without the chain.
local function recompute(first, last)
  local lines = { 'graph step', '%0 = input x: float32[512, 1024]', first,
    '%4 = full(size=[3], fill_value=1, dtype=float32): float32[3]' }
  for k = 5, 44 do lines[#lines + 1] = ('%%%d = tanh(%%%d): float32[3]'):format(k, k - 1) end
  lines[#lines + 1] = last
  local text = mf._graph_pass(table.concat(lines, '\n') .. '\n', 'recompute')
  return (text:gsub('%%%d+ = tanh[^\n]*\n', ''))
end

describe('recompute', function()
  it('computes again what is read far apart', function()
    assert.equal([[
graph step
%0 = input x: float32[512, 1024]
%1 = exp(%0): float32[512, 1024]
%2 = gelu(%1): float32[512, 1024]
%3 = sum(%2, dim=[0, 1]): float32[]
%4 = full(size=[3], fill_value=1, dtype=float32): float32[3]
%45 = gelu(%1): float32[512, 1024]
%46 = linear_weight(%45, %45): float32[1024, 1024]
%47 = gelu_backward(%45, %1): float32[512, 1024]
return %3, %46, %47
]], recompute([[
%1 = exp(%0): float32[512, 1024]
%2 = gelu(%1): float32[512, 1024]
%3 = sum(%2, dim=[0, 1]): float32[] ]], [[
%45 = linear_weight(%2, %2): float32[1024, 1024]
%46 = gelu_backward(%2, %1): float32[512, 1024]
return %3, %45, %46]]))
  end)

  it('keeps what is made of what is not there any more', function()
    local text = recompute([[
%1 = exp(%0): float32[512, 1024]
%2 = gelu(%1): float32[512, 1024]
%3 = sum(%2, dim=[0, 1]): float32[] ]], '%45 = linear_weight(%2, %2): float32[1024, 1024]\nreturn %3, %45')
    assert.is_truthy(text:find('linear_weight(%2, %2)', 1, true))
  end)

  it('keeps what a view of it shows, small values, and results', function()
    local viewed = recompute([[
%1 = gelu(%0): float32[512, 1024]
%2 = reshape(%1, size=[1024, 512]): float32[1024, 512]
%3 = sum(%1, dim=[0, 1]): float32[] ]], [[
%45 = linear_weight(%1, %0): float32[1024, 1024]
%46 = exp(%2): float32[1024, 512]
return %3, %45, %46]])
    assert.is_truthy(viewed:find('linear_weight(%1, %0)', 1, true))
    local returned = recompute([[
%1 = gelu(%0): float32[512, 1024]
%2 = sum(%0, dim=[0, 1]): float32[]
%3 = sum(%1, dim=[0, 1]): float32[] ]], '%45 = linear_weight(%1, %0): float32[1024, 1024]\nreturn %3, %45, %1')
    assert.is_truthy(returned:find('linear_weight(%1, %0)', 1, true))
    local small = recompute([[
%1 = slice(%0, dim=0, start=0, stop=9): float32[9, 1024]
%2 = gelu(%1): float32[9, 1024]
%3 = sum(%2, dim=[0, 1]): float32[] ]], '%45 = linear_weight(%2, %1): float32[1024, 1024]\nreturn %3, %45')
    assert.is_truthy(small:find('linear_weight(%2, %1)', 1, true))
  end)

  it('computes what a BatchNorm gave from the statistics that it used', function()
    local lines = { 'graph step', '%0 = input x: float32[512, 1024]',
      '%1, %2, %3 = batch_norm_act(%0, none, none, none, none, none, training=true, relu=true): '
        .. 'float32[512, 1024], float32[1024], float32[1024]', '%4 = sum(%1): float32[]' }
    for k = 5, 44 do lines[#lines + 1] = ('%%%d = tanh(%%%d): float32[]'):format(k, k - 1) end
    lines[#lines + 1] = '%45 = linear_weight(%1, %1): float32[1024, 1024]'
    lines[#lines + 1] = '%46, %47, %48 = batch_norm_backward(%0, %0, %2, %3, none, training=true, params=false): '
      .. 'float32[512, 1024], float32[0], float32[0]'
    lines[#lines + 1] = 'return %44, %45, %46'
    local text = mf._graph_pass(table.concat(lines, '\n') .. '\n', 'recompute')
    assert.equal([[
%45 = batch_norm_again(%0, %2, %3, relu=true): float32[512, 1024]
%46 = linear_weight(%45, %45): float32[1024, 1024]
]], text:match '(%%45.-\n.-\n)')
    lines[#lines - 1] = '%46 = exp(%2): float32[1024]' -- now x is not kept for anybody
    text = mf._graph_pass(table.concat(lines, '\n') .. '\n', 'recompute')
    assert.is_nil(text:find('batch_norm_again', 1, true))
  end)

  it('changes no bit of a network of convolutions, and takes less memory', function()
    local function train(on)
      mf.manual_seed(3)
      local model, c = mf.nn.Sequential(), 3
      for k = 1, 12 do
        model:append(mf.nn.Conv2d(c, 16, 3, { padding = 1 })):append(mf.nn.BatchNorm2d(16))
        if k ~= 3 then model:append(mf.nn.ReLU()) end
        c = 16
      end
      local opt = mf.optim.SGD(model:parameters(), { lr = 0.01 })
      local x = mf.randn(4, 3, 64, 64)
      local step = mf.compile(function()
        opt:zero_grad()
        local loss = model(x):square():mean()
        loss:backward()
        opt:step()
        return loss
      end, { passes = { recompute = on } })
      local losses = {}
      for i = 1, 2 do losses[i] = step():item() end
      local _, again = tostring(step):gsub('batch_norm_again%(', '')
      return losses, model:state_dict(), again, tonumber(step:memory():match 'block (%d+)')
    end
    local losses_a, a, again_a, bytes_a = train(true)
    local losses_b, b, again_b, bytes_b = train(false)
    assert.same(losses_b, losses_a)
    for key, value in pairs(a) do assert(mf.equal(value, b[key]), key) end
    assert.is_true(again_a > 1)
    assert.equal(0, again_b)
    assert.is_true(bytes_a < bytes_b)
  end)

  it('changes no bit of a transformer', function()
    local function train(on)
      mf.manual_seed(3)
      local model = models.Transformer(50, 64, 192, 4, 3, true)
      local opt = mf.optim.AdamW(model:parameters(), { lr = 0.01 })
      local x, y = mf.randint(0, 50, { 6, 64 }), mf.randint(0, 50, { 384 })
      local step = mf.compile(function()
        opt:zero_grad()
        local loss = mf.cross_entropy(model(x):flatten(0, 1), y)
        loss:backward()
        opt:step()
        return loss
      end, { passes = { recompute = on } })
      local losses = {}
      for i = 1, 2 do losses[i] = step():item() end
      return losses, model:state_dict(), select(2, tostring(step):gsub('gelu%(', ''))
    end
    local losses_a, a, gelus_a = train(true)
    local losses_b, b, gelus_b = train(false)
    assert.same(losses_b, losses_a)
    for key, value in pairs(a) do assert(mf.equal(value, b[key]), key) end
    assert.is_true(gelus_a > gelus_b)
  end)
end)
