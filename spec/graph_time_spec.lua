-- The pass `time`: a graph of one micro-batch becomes one of all of them.
local mf = require 'moonflow'

local function time(text, times, repeated) return (mf._graph_pass(text, 'time', nil, nil, times, repeated)) end

local function refused(text, part)
  local ok, message = pcall(mf._graph_pass, text, '')
  assert(not ok, 'is accepted')
  assert(tostring(message):find(part, 1, true), tostring(message))
end

describe('time', function()
  it('shares arguments out, averages gradients and losses, and leaves the update once', function()
    assert.equal([[
graph step times 4
%0 = input x0: float32[8, 3]
%1 = capture c0: float32[3]
%2 = micro_unpack(%0, n=4): 4 x float32[2, 3]
%3 = micro_repeat(%1): 4 x float32[3]
%4 = mul(%2, %3): 4 x float32[2, 3]
%5 = sum(%4, dim=[0, 1]): 4 x float32[]
%6 = micro_mean(%5, n=4): float32[]
%7 = sum_to(%2, size=[3]): 4 x float32[3]
%8 = micro_mean(%7, n=4): float32[3]
%9 = sub(%1, %8): float32[3]
write %1 = %9
return %6
]], time([[
graph step
%0 = input x0: float32[2, 3]
%1 = capture c0: float32[3]
%2 = mul(%0, %1): float32[2, 3]
%3 = sum(%2): float32[]
%4 = sum_to(%0, size=[3]): float32[3]
%5 = micro_mean(%4, n=4): float32[3]
%6 = sub(%1, %5): float32[3]
write %1 = %6
return %3
]], 4))
  end)

  it('packs results, repeats what is to be whole, and single numbers', function()
    assert.equal([[
graph step times 2
%0 = input x0: float32[4, 3]
%1 = input x1: float32[3]
%2 = input x2: float32[]
%3 = micro_unpack(%0, n=2): 2 x float32[2, 3]
%4 = micro_repeat(%1): 2 x float32[3]
%5 = micro_repeat(%2): 2 x float32[]
%6 = mul(%3, %4): 2 x float32[2, 3]
%7 = micro_pack(%6, n=2): float32[4, 3]
%8 = mul(%6, %5): 2 x float32[2, 3]
%9 = cast(%8, dtype=int64): 2 x int64[2, 3]
%10 = sum(%9, dim=[0, 1]): 2 x int64[]
%11 = micro_pack(%10, n=2): int64[2]
%12 = neg(%1): float32[3]
return %7, %11, %12, %0
]], time([[
graph step
%0 = input x0: float32[2, 3]
%1 = input x1: float32[3]
%2 = input x2: float32[]
%3 = mul(%0, %1): float32[2, 3]
%4 = mul(%3, %2): float32[2, 3]
%5 = cast(%4, dtype=int64): int64[2, 3]
%6 = sum(%5): int64[]
%7 = neg(%1): float32[3]
return %3, %6, %7, %0
]], 2, { 2 }))
  end)

  it('carries captures that micro-batches write, and counters of the forward part', function()
    assert.equal([[
graph step times 2
%0 = input x0: float32[4]
%1 = capture c0: 2 x float32[]
%2 = capture c1: 2 x int64[]
%3 = capture c2: float32[]
%4 = micro_unpack(%0, n=2): 2 x float32[2]
%5 = number 1: int64
%6 = add(%2, %5): 2 x int64[]
%7 = sum(%4, dim=[0]): 2 x float32[]
%8 = micro_mean(%7, n=2): float32[]
%9 = add(%1, %7): 2 x float32[]
%10 = micro_last(%9): float32[]
%11 = add(%3, %5): float32[]
write %1 = %9
write %2 = %6
write %3 = %11
return %10, %8
]], time([[
graph step
%0 = input x0: float32[2]
%1 = capture c0: float32[]
%2 = capture c1: int64[]
%3 = capture c2: float32[]
%4 = number 1: int64
%5 = add(%2, %4): int64[]
%6 = sum(%0): float32[]
%7 = add(%1, %6): float32[]
%8 = micro_mean(%6, n=2): float32[]
%9 = add(%3, %4): float32[]
write %1 = %7
write %2 = %5
write %3 = %9
return %7, %8
]], 2))
  end)

  it('says along which dim samples lie', function()
    assert.equal([[
graph step times 2
%0 = input x0: float32[4, 3, 5]
%1 = micro_unpack(%0, n=2): 2 x float32[2, 3, 5]
%2 = transpose(%1, dim0=0, dim1=1): 2 x float32[3, 2, 5]
%3 = dropout(%2, generator=0 along 1): 2 x float32[3, 2, 5]
%4 = permute(%3, dims=[2, 0, 1]): 2 x float32[5, 3, 2]
%5 = dropout(%4, generator=1 along 2): 2 x float32[5, 3, 2]
%6 = dropout_backward(%2, p=0.5, generator=0 along 1): 2 x float32[3, 2, 5]
%7 = rand(size=[2, 7], generator=2 along 0): 2 x float32[2, 7]
%8 = micro_pack(%7, n=2): float32[4, 7]
%9 = rand(size=[3, 7], generator=3): float32[3, 7]
%10 = sum(%5, dim=[0, 1, 2]): 2 x float32[]
%11 = micro_mean(%10, n=2): float32[]
%12 = sum(%6, dim=[0, 1, 2]): 2 x float32[]
%13 = micro_mean(%12, n=2): float32[]
return %11, %13, %8, %9
]], time([[
graph step
%0 = input x0: float32[2, 3, 5]
%1 = transpose(%0, dim0=0, dim1=1): float32[3, 2, 5]
%2 = dropout(%1, generator=0): float32[3, 2, 5]
%3 = permute(%2, dims=[2, 0, 1]): float32[5, 3, 2]
%4 = dropout(%3, generator=1): float32[5, 3, 2]
%5 = dropout_backward(%1, p=0.5, generator=0): float32[3, 2, 5]
%6 = rand(size=[2, 7], generator=2): float32[2, 7]
%7 = rand(size=[3, 7], generator=3): float32[3, 7]
%8 = sum(%4): float32[]
%9 = sum(%5): float32[]
return %8, %9, %6, %7
]], 2))
  end)

  it('takes a gradient that is the same in each micro-batch as it is', function()
    assert.equal([[
graph step times 2
%0 = input x0: float32[4]
%1 = capture c0: float32[2]
%2 = mul(%1, %1): float32[2]
return %2
]], time([[
graph step
%0 = input x0: float32[2]
%1 = capture c0: float32[2]
%2 = mul(%1, %1): float32[2]
%3 = micro_mean(%2, n=2): float32[2]
return %3
]], 2):gsub('%%2 = micro_unpack[^\n]*\n', ''):gsub('%%3', '%%2'))
  end)

  it('refuses what reads a micro-batch late, with the line', function()
    local ok, message = pcall(time, [[
graph step
%0 = input x0: float32[2]
%1 = sum_to(%0, size=[1]): float32[1]
%2 = micro_mean(%1, n=2): float32[1]
%3 = mul(%0, %2): float32[2]  # train.lua:7
return %3
]], 2)
    assert(not ok and tostring(message):find('train.lua:7: mul', 1, true), tostring(message))
  end)
end)

describe('a graph whose time is wrong is refused:', function()
  local head = 'graph step times 2\n%0 = input x0: float32[4]\n%1 = capture c0: float32[4]\n'

  it('what is of a micro-batch read once', function()
    refused(head .. '%2 = micro_unpack(%0, n=2): 2 x float32[2]\n%3 = neg(%2): float32[2]\nreturn %3\n',
      'input 0 is made 2 times, it is read 1 times')
  end)
  it('what is of the step read by a micro-batch', function()
    refused(head .. '%2 = neg(%0): 2 x float32[4]\nreturn %1\n', 'input 0 is made 1 times, it is read 2 times')
  end)
  it('a result of each micro-batch', function()
    refused(head .. '%2 = micro_unpack(%0, n=2): 2 x float32[2]\nreturn %2\n', 'result 1 is of each micro-batch')
  end)
  it('other numbers of micro-batches', function()
    refused(head .. '%2 = micro_unpack(%0, n=4): 2 x float32[1]\nreturn %1\n',
      'n is not the number of micro-batches, 2')
    refused(head .. '%2 = zeros(size=[2]): 3 x float32[2]\nreturn %1\n', 'is computed 3 times')
    refused('graph step times 0\n%0 = input x0: float32[4]\nreturn\n', 'there are 0 micro-batches')
  end)
  it('a way back to the micro-batches', function()
    refused(head .. '%2 = micro_unpack(%0, n=2): 2 x float32[2]\n%3 = micro_mean(%2, n=2): float32[2]\n'
      .. '%4 = micro_repeat(%3): 2 x float32[2]\n%5 = micro_mean(%4, n=2): float32[2]\nreturn %5\n',
      'leads from what the micro-batches left back to them')
  end)
  it('a write of each micro-batch to a capture of the step', function()
    refused(head .. '%2 = micro_repeat(%1): 2 x float32[4]\nwrite %1 = %2\nreturn\n', 'it is read 1 times')
  end)
  it('a draw along a dim that there is not', function()
    refused(head .. '%2 = rand(size=[2], generator=0 along 1): 2 x float32[2]\nreturn %1\n', 'draws along dim 1 of 1')
  end)
end)
