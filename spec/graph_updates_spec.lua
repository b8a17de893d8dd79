-- The pass updates: an optimiser's op in parts, where gradients are made.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function updates(text) return (mf._graph_pass(text, 'updates')) end

describe('updates', function()
  it('updates what nothing reads any more, small ones with the next large one', function()
    assert.equal([[
graph step
%0 = capture a: float32[1024, 1024]
%1 = capture b: float32[8]
%2 = capture c: float32[1024, 1024]
%3 = input x: float32[1024, 1024]
%4 = input y: float32[8]
%5 = matmul(%3, %0): float32[1024, 1024]
%6 = relu(%4): float32[8]
%7 = matmul(%5, %0): float32[1024, 1024]
%8, %9 = sgd_([%1, %0], [%6, %5], [], lr=0.1): float32[8], float32[1024, 1024]
%10 = matmul(%7, %7): float32[1024, 1024]
%11 = add(%2, %2): float32[1024, 1024]
%12 = sgd_([%2], [%7], [], lr=0.1): float32[1024, 1024]
write %0 = %9
write %1 = %8
write %2 = %12
return %10, %11
]], updates [[
graph step
%0 = capture a: float32[1024, 1024]
%1 = capture b: float32[8]
%2 = capture c: float32[1024, 1024]
%3 = input x: float32[1024, 1024]
%4 = input y: float32[8]
%5 = matmul(%3, %0): float32[1024, 1024]
%6 = relu(%4): float32[8]
%7 = matmul(%5, %0): float32[1024, 1024]
%8 = matmul(%7, %7): float32[1024, 1024]
%9 = add(%2, %2): float32[1024, 1024]
%10, %11, %12 = sgd_([%0, %1, %2], [%5, %6, %7], [], lr=0.1): float32[1024, 1024], float32[8], float32[1024, 1024]
write %0 = %10
write %1 = %11
write %2 = %12
return %8, %9
]])
  end)

  it('makes a gradient last that is large, and larger than what it is made of', function()
    assert.equal([[
graph step
%0 = capture a: float32[2048, 2048]
%1 = capture b: float32[2048]
%2 = input g: float32[8, 2048]
%3 = input x: float32[8, 2048]
%4 = exp(%2): float32[8, 2048]
%5 = exp(%3): float32[8, 2048]
%6 = sum_to(%4, size=[2048]): float32[2048]
%7 = relu(%4): float32[8, 2048]
%8 = linear_weight(%4, %5): float32[2048, 2048]
%9, %10 = sgd_([%0, %1], [%8, %6], [], lr=0.1): float32[2048, 2048], float32[2048]
write %0 = %9
write %1 = %10
return %7
]], updates [[
graph step
%0 = capture a: float32[2048, 2048]
%1 = capture b: float32[2048]
%2 = input g: float32[8, 2048]
%3 = input x: float32[8, 2048]
%4 = exp(%2): float32[8, 2048]
%5 = exp(%3): float32[8, 2048]
%6 = linear_weight(%4, %5): float32[2048, 2048]
%7 = sum_to(%4, size=[2048]): float32[2048]
%8 = relu(%4): float32[8, 2048]
%9, %10 = sgd_([%0, %1], [%6, %7], [], lr=0.1): float32[2048, 2048], float32[2048]
write %0 = %9
write %1 = %10
return %8
]])
  end)

  it('leaves an update whole whose gradients come together', function()
    local text = [[
graph step
%0 = capture a: float32[1024, 1024]
%1 = capture b: float32[1024, 1024]
%2 = input x: float32[1024, 1024]
%3 = input s: float32[]
%4 = exp(%2): float32[1024, 1024]
%5 = relu(%2): float32[1024, 1024]
%6, %7 = scale_all_(%3, [%4, %5]): float32[1024, 1024], float32[1024, 1024]
%8, %9 = sgd_([%0, %1], [%6, %7], [], lr=0.1): float32[1024, 1024], float32[1024, 1024]
write %0 = %8
write %1 = %9
return
]]
    assert.equal(text, updates(text))
  end)

  -- Layers with gradients of 4 MB and more, so that there are parts.
  for name, optimiser in pairs {
    SGD = function(p) return optim.SGD(p, { lr = 0.01, momentum = 0.9, nesterov = true }) end,
    AdamW = function(p) return optim.AdamW(p, { lr = 0.01, amsgrad = true }) end,
    RMSprop = function(p) return optim.RMSprop(p, { lr = 0.01, centered = true }) end,
  } do
    it('changes no bit: ' .. name, function()
      local function train(on)
        mf.manual_seed(3)
        local model = nn.Sequential(nn.Linear(9, 1031), nn.ReLU(), nn.Linear(1031, 1033), nn.ReLU(),
          nn.Linear(1033, 1050))
        local opt = optimiser(model:parameters())
        local x, y = mf.randn(4, 9), mf.randint(0, 1050, { 4 })
        local step = mf.compile(function()
          opt:zero_grad()
          local loss = mf.cross_entropy(model(x), y)
          loss:backward()
          opt:step()
          return loss
        end, { passes = { updates = on } })
        local losses = {}
        for i = 1, 3 do losses[i] = step():item() end
        return model:state_dict(), losses, tostring(step)
      end
      local a, losses_a, text_a = train(true)
      local b, losses_b, text_b = train(false)
      assert.same(losses_b, losses_a)
      for key, value in pairs(a) do assert(mf.equal(value, b[key]), key) end
      local op = '= ' .. name:lower():gsub('adamw', 'adam') .. '_%('
      assert.is_true(select(2, text_a:gsub(op, '')) > 1)
      assert.equal(1, (select(2, text_b:gsub(op, ''))))
    end)
  end
end)
