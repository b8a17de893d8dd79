-- The pass dce: what nobody needs goes.
local mf = require 'moonflow'

local function dce(text) return (mf._graph_pass(text, 'dce')) end

describe('dce', function()
  it('takes what leads to no result and no write', function()
    assert.equal([[
graph step cells 1
%0 = input x: float32[2]
%1 = input unused: float32[2]
%2 = capture c: float32[2]
%3 = capture also_unused: float32[2]
%4 = exp(%0): float32[2]
%5, %6 = max_dim(%4, dim=0): float32[], int64[]
%7 = neg(%2): float32[2]
write %2 = %7
return %5
]], dce [[
graph step cells 1
%0 = input x: float32[2]
%1 = input unused: float32[2]
%2 = capture c: float32[2]
%3 = capture also_unused: float32[2]
%4 = number @0(1): int64
%5 = exp(%0): float32[2]
%6 = add(%5, %4): float32[2]
%7 = dropout(%6, generator=0): float32[2]
%8, %9 = max_dim(%5, dim=0): float32[], int64[]
%10 = fill_(%2, value=0): float32[2]
%11 = neg(%2): float32[2]
write %2 = %11
return %8
]])
  end)

  it('takes writes of what is there', function()
    assert.equal([[
graph step
%0 = capture c: float32[2]
%1 = capture d: float32[2]
write %1 = %0
return
]], dce [[
graph step
%0 = capture c: float32[2]
%1 = capture d: float32[2]
write %0 = %0
write %1 = %0
return
]])
  end)
end)
