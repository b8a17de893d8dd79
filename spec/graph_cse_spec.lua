-- The pass cse: what is equal is computed once.
local mf = require 'moonflow'

local function cse(text) return (mf._graph_pass(text, 'cse')) end

describe('cse', function()
  it('merges equal ops and numbers, and what becomes equal by it', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 3]
%1 = number 2: int64
%2 = mul(%0, %1): float32[2, 3]
%3 = sum(%2, dim=[1]): float32[2]
%4 = zeros(size=[2]): float32[2]
%5, %6 = max_dim(%0, dim=1): float32[2], int64[2]
%7 = add(%3, %3): float32[2]
return %7, %3, %6, %4
]], cse [[
graph step
%0 = input x: float32[2, 3]
%1 = number 2: int64
%2 = number 2: int64
%3 = mul(%0, %1): float32[2, 3]
%4 = mul(%0, %2): float32[2, 3]
%5 = sum(%3, dim=[1]): float32[2]
%6 = sum(%4, dim=[1]): float32[2]
%7 = zeros(size=[2]): float32[2]
%8 = zeros(size=[2], requires_grad=true): float32[2]
%9, %10 = max_dim(%0, dim=1): float32[2], int64[2]
%11, %12 = max_dim(%0, dim=1): float32[2], int64[2]
%13 = add(%5, %6): float32[2]
return %13, %6, %12, %8
]])
  end)

  it('keeps results in memory of their own, but for views', function()
    assert.equal([[
graph step
%0 = input x: float32[2]
%1 = exp(%0): float32[2]
%2 = unsqueeze(%1, dim=0): float32[1, 2]
%3 = clone(%1): float32[2]
return %1, %2, %1, %3
]], cse [[
graph step
%0 = input x: float32[2]
%1 = exp(%0): float32[2]
%2 = exp(%0): float32[2]
%3 = unsqueeze(%1, dim=0): float32[1, 2]
return %1, %3, %1, %2
]])
    local a, b, c = mf.compile(function(x)
      local y = x * 2
      return y, x * 2, y[0]
    end)(mf.ones(1))
    a:fill_(7)
    assert.same({ { 7 }, { 2 }, 7 }, { a:tolist(), b:tolist(), c:item() })
  end)

  -- Each of these has two nodes that differ, or must not be merged though they are equal.
  for what, body in pairs {
    inputs = '%1 = input x: float32[2]\n%2 = exp(%0): float32[2]\n%3 = exp(%1): float32[2]\n',
    order = '%1 = capture c: float32[2]\n%2 = sub(%0, %1): float32[2]\n%3 = sub(%1, %0): float32[2]\n',
    arguments = '%1 = sum(%0, dim=[0]): float32[]\n%2 = sum(%0, dim=[0], keepdim=true): float32[1]\n'
      .. '%3 = exp(%1): float32[]\n',
    ['optional arguments'] = '%1 = clamp(%0, max=0): float32[2]\n%2 = clamp(%0, min=0): float32[2]\n'
      .. '%3 = clamp(%0, min=0, max=0): float32[2]\n',
    lists = '%1 = reshape(%0, size=[2, 1]): float32[2, 1]\n%2 = reshape(%0, size=[1, 2]): float32[1, 2]\n'
      .. '%3 = reshape(%0, size=[1, 2, 1]): float32[1, 2, 1]\n',
    cells = '%1 = clamp(%0, max=@0(1)): float32[2]\n%2 = clamp(%0, max=@1(1)): float32[2]\n'
      .. '%3 = clamp(%0, max=1): float32[2]\n',
    numbers = '%1 = number 0: float64\n%2 = number -0: float64\n%3 = number 0: int64\n',
    ['numbers of cells'] = '%1 = number @0(0): float64\n%2 = number @1(0): float64\n%3 = number 0: float64\n',
    dtypes = '%1 = cast(%0, dtype=float64): float64[2]\n%2 = cast(%0, dtype=int64): int64[2]\n'
      .. '%3 = cast(%0, dtype=int32): int32[2]\n',
    ['random ops'] = '%1 = dropout(%0, generator=0): float32[2]\n%2 = dropout(%0, generator=0): float32[2]\n'
      .. '%3 = randn(size=[2], generator=0): float32[2]\n',
    ['redone draws'] = '%1 = dropout_backward(%0, p=0.5, generator=0): float32[2]\n'
      .. '%2 = dropout_backward(%0, p=0.5, generator=1): float32[2]\n%3 = exp(%0): float32[2]\n',
  } do
    it('keeps apart: ' .. what, function()
      local text = 'graph step cells 2\n%0 = input x: float32[2]\n' .. body .. 'return %1, %2, %3\n'
      assert.equal(text, cse(text))
    end)
  end

  it('merges a draw redone twice', function()
    assert.truthy(cse [[
graph step
%0 = input x: float32[2]
%1 = dropout_backward(%0, p=0.5, generator=3): float32[2]
%2 = dropout_backward(%0, p=0.5, generator=3): float32[2]
%3 = add(%1, %2): float32[2]
return %3
]]:find 'add%(%%1, %%1%)')
  end)
end)
