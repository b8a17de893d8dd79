-- The pass fold: what depends on nothing is computed when the step is compiled.
local mf = require 'moonflow'

local function fold(text, passes) return (mf._graph_pass(text, passes or 'fold,dce')) end

describe('fold', function()
  it('computes with the kernels', function()
    assert.equal([[
graph step
%0 = full(size=[], fill_value=5, dtype=float32): float32[]
%1 = full(size=[2, 3], fill_value=0.5, dtype=float32): float32[2, 3]
%2 = full(size=[3], fill_value=6, dtype=int64): int64[3]
%3 = full(size=[], fill_value=3, dtype=float32): float32[]
%4 = full(size=[2], fill_value=1, dtype=bool): bool[2]
%5 = full(size=[2], fill_value=-inf, dtype=float64): float64[2]
return %0, %1, %2, %3, %4, %5
]], fold [[
graph step
%0 = number 2: int64
%1 = number 3: int64
%2 = ones(size=[]): float32[]
%3 = mul(%2, %0): float32[]
%4 = add(%3, %1): float32[]
%5 = ones(size=[3]): float32[3]
%6 = div(%5, %0): float32[3]
%7 = expand(%6, size=[2, 3]): float32[2, 3]
%8 = clamp(%7, min=0.1): float32[2, 3]
%9 = full(size=[3], fill_value=3, dtype=int64): int64[3]
%10 = add(%9, %9): int64[3]
%11 = sum(%5): float32[]
%12 = full(size=[2], fill_value=7): float32[2]
%13 = gt(%12, %1): bool[2]
%14 = zeros(size=[2], dtype=float64): float64[2]
%15 = log(%14): float64[2]
return %4, %8, %10, %11, %13, %15
]])
  end)

  it('needs of a tensor whose shape alone counts no value', function()
    assert.equal([[
graph step
%0 = input x: float32[2]
%1 = full(size=[2], fill_value=1, dtype=float32): float32[2]
return %1
]], fold [[
graph step
%0 = input x: float32[2]
%1 = exp(%0): float32[2]
%2 = ones_like(%1): float32[2]
return %2
]])
  end)

  -- None of these is a constant, or can be said by `full`.
  for what, body in pairs {
    captures = '%0 = capture c: float32[2]\n%1 = exp(%0): float32[2]\n',
    inputs = '%0 = input c: float32[2]\n%1 = exp(%0): float32[2]\n',
    cells = '%0 = number @0(2): int64\n%1 = zeros(size=[2]): float32[2]\n%2 = add(%1, %0): float32[2]\n',
    ['arguments that are cells'] = '%0 = zeros(size=[2]): float32[2]\n%1 = clamp(%0, min=@0(2)): float32[2]\n',
    ['random numbers'] = '%0 = ones(size=[2]): float32[2]\n%1 = dropout(%0, generator=0): float32[2]\n',
    ['redone draws'] = '%0 = ones(size=[2]): float32[2]\n%1 = dropout_backward(%0, p=0.5, generator=0): float32[2]\n',
    ['different elements'] = '%0 = ones(size=[3]): float32[3]\n%1 = cumsum(%0, dim=0): float32[3]\n',
    sequences = '%0 = arange(start=0, end=3): int64[3]\n%1 = neg(%0): int64[3]\n',
    ['what is large'] = '%0 = ones(size=[30, 40]): float32[30, 40]\n%1 = sum(%0, dim=[0, 1]): float32[]\n',
    ['what is empty'] = '%0 = ones(size=[0]): float32[0]\n%1 = exp(%0): float32[0]\n',
    ['writes in place'] = '%0 = capture c: float32[2]\n%1 = fill_(%0, value=3): float32[2]\n',
    ['what may lie in another order'] = '%0 = input x: float32[2, 3]\n%1 = ones_like(%0): float32[2, 3]\n',
    ['another order'] = '%0 = ones(size=[2, 3]): float32[2, 3]\n%1 = t(%0): float32[3, 2]\n'
      .. '%2 = exp(%1): float32[3, 2]\n',
    views = '%0 = ones(size=[1]): float32[1]\n%1 = expand(%0, size=[9, 1]): float32[9, 1]\n',
    ['what a double does not hold'] = '%0 = full(size=[2], fill_value=9007199254740991, dtype=int64): int64[2]\n'
      .. '%1 = number 2: int64\n%2 = add(%0, %1): int64[2]\n',
    ['order in memory'] = '%0 = ones(size=[2]): float32[2]\n%1 = exp(%0): float32[2]\n'
      .. '%2 = as_strided(%1, size=[1], stride=[1], storage_offset=0, x_stride=[1]): float32[1]\n',
    ['what fails when it runs'] = '%0 = full(size=[1], fill_value=9, dtype=int64): int64[1]\n'
      .. '%1 = one_hot(%0, num_classes=2): int64[1, 2]\n',
  } do
    it('leaves: ' .. what, function()
      local last = 0
      for k in body:gmatch '%%(%d+) =' do last = k end
      local text = 'graph step cells 1\n' .. body .. ('return %%%d\n'):format(last)
      assert.equal(text, fold(text))
    end)
  end

  it('folds on what it folded, by the bits', function()
    local text = fold [[
graph step
%0 = number 0.1: float64
%1 = ones(size=[], dtype=float16): float16[]
%2 = mul(%1, %0): float16[]
%3 = add(%2, %2): float16[]
%4 = cast(%3, dtype=float64): float64[]
return %4
]]
    -- 0.1 as float16 is 1638.5 / 2^14 rounded to 1638 / 2^14; twice that is exact
    assert.truthy(text:find('full(size=[], fill_value=0.199951171875, dtype=float64)', 1, true), text)
    assert.equal(0.199951171875, 2 * 1638 / 2 ^ 14)
  end)

  it('is right in a step', function()
    local function f(x) return x * (mf.ones(3) * 2 + 1) / mf.zeros(3):cos(), mf.zeros_like(x):sub(0.5):exp() end
    local x = mf.tensor { 1, -2, 0 }
    local a, b = f(x)
    local c, d = mf.compile(f)(x)
    assert(mf.equal(a, c) and mf.equal(b, d))
  end)
end)
