-- The passes sbp, boxing and part: how a graph of whole tensors becomes that of one rank.
local mf = require 'moonflow'

local function pass(text, names, rank) return (mf._graph_pass(text, names, nil, nil, nil, nil, rank)) end

-- Rows of x over the first axis, columns of w over the second; the sum of a product over what is split.
local step = [[
graph step
placement 0 {{0, 1}, {2, 3}}
%0 = input x0: float32[8, 6] on 0 (S0, B)
%1 = capture w: float32[6, 4] on 0 (B, S1)
%2 = matmul(%0, %1): float32[8, 4]
%3 = sum(%2): float32[]
%4 = linear_weight(%2, %0): float32[4, 6]
%5 = t(%4): float32[6, 4]
%6 = box(%5): float32[6, 4] on 0 (B, S1)
%7 = box(%3): float32[] on 0 (B, B)
write %1 = %6
return %7
]]

describe('sbp', function()
  it('gives each value a layout and each op those that it wants', function()
    assert.equal([[
graph step
placement 0 {{0, 1}, {2, 3}}
%0 = input x0: float32[8, 6] on 0 (S0, B)
%1 = capture w: float32[6, 4] on 0 (B, S1)
%2 = matmul(%0, %1): float32[8, 4] on 0 (S0, S1) from (S0, B), (B, S1)
%3 = sum(%2, dim=[0, 1]): float32[] on 0 (P, P) from (S0, S1)
%4 = linear_weight(%2, %0): float32[4, 6] on 0 (P, S0) from (S0, S1), (S0, B)
%5 = t(%4): float32[6, 4] on 0 (P, S1) from (P, S0)
%6 = box(%5): float32[6, 4] on 0 (B, S1)
%7 = box(%3): float32[] on 0 (B, B)
write %1 = %6
return %7
]], pass(step, 'sbp'))
  end)
end)

describe('boxing', function()
  it('converts what lies otherwise than it is wanted, once, and drops what converts nothing', function()
    local text = [[
graph step
placement 0 {0, 1}
%0 = input x0: float32[8, 6] on 0 S0
%1 = input x1: float32[8, 6] on 0 S1
%2 = box(%0): float32[8, 6] on 0 S0
%3 = add(%2, %1): float32[8, 6]
%4 = mul(%2, %1): float32[8, 6]
%5 = box(%3): float32[8, 6] on 0 S0
return %5, %4
]]
    assert.equal([[
graph step
placement 0 {0, 1}
%0 = input x0: float32[8, 6] on 0 S0
%1 = input x1: float32[8, 6] on 0 S1
%2 = box(%1): float32[8, 6] on 0 S0
%3 = add(%0, %2): float32[8, 6] on 0 S0 from S0, S0
%4 = mul(%0, %2): float32[8, 6] on 0 S0 from S0, S0
return %3, %4
]], pass(text, 'sbp,boxing'))
  end)
end)

describe('part', function()
  it('leaves what one rank computes and communicates', function()
    assert.equal([[
graph step
placement 0 {{0, 1}, {2, 3}}
group 0 {2, 3}
group 1 {1, 3}
%0 = input x0: float32[4, 6] of [8, 6] at [4, 0]
%1 = capture w: float32[6, 2] of [6, 4] at [0, 2]
%2 = matmul(%0, %1): float32[4, 2] of [8, 4] at [4, 2]
%3 = sum(%2, dim=[0, 1]): float32[]
%4 = all_reduce(%3, group=0): float32[]
%5 = all_reduce(%4, %4, group=1): float32[]
%6 = linear_weight(%2, %0): float32[2, 6] of [4, 6] at [2, 0]
%7 = t(%6): float32[6, 2] of [6, 4] at [0, 2]
%8 = all_reduce(%7, %5, group=1): float32[6, 2] of [6, 4] at [0, 2]
write %1 = %8
return %5
]], pass(step, 'sbp,boxing,part', 3))
  end)

  it('goes between placements, and leaves out what a rank has no part in', function()
    local text = [[
graph step
placement 0 {0}
placement 1 {1}
%0 = input x0: float32[4] on 0 B
%1 = exp(%0): float32[4] on 0 B from B
%2 = box(%1): float32[4] on 1 B
%3 = tanh(%2): float32[4] on 1 B from B
return %3
]]
    assert.equal([[
graph step
placement 0 {0}
placement 1 {1}
layout 0 on 0 B
layout 1 on 1 B
%0 = input x0: float32[4]
%1 = exp(%0): float32[4]
%2 = exchange(%1, from=0, to=1, whole=[4], size=[0], dtype=float32): float32[0]
%3 = zeros(size=[0], dtype=float32): float32[0]
return %3
]], pass(text, 'part', 0))
    assert.equal([[
graph step
placement 0 {0}
placement 1 {1}
layout 0 on 0 B
layout 1 on 1 B
%0 = input x0: float32[0]
%1 = exchange(from=0, to=1, whole=[4], size=[4], dtype=float32): float32[4]
%2 = tanh(%1): float32[4]
return %2
]], pass(text, 'part', 1))
  end)

  it('is read back as it was printed, and what is no graph of ranks is refused', function()
    for _, names in ipairs { '', 'sbp', 'sbp,boxing', 'sbp,boxing,part' } do
      local text = pass(step, names, 2)
      assert.equal(text, pass(text, ''))
    end
    for _, case in ipairs { { 'on 0 %(B, S1%)', 'on 1 (B, S1)', 'the placement' }, { '%(B, S1%)', '(B, S2)', 'S2' },
      { '{2, 3}', '{2, 1}', '' }, { '{2, 3}', '{2}', 'no grid' }, { '%(S0, B%)', 'S0', '' } } do
      local ok, message = pcall(mf._graph_pass, (step:gsub(case[1], case[2], 1)), '')
      assert(not ok and tostring(message):find(case[3]), tostring(message))
    end
  end)
end)

describe('buckets', function()
  it('form sums together that come one after the other, where the last of them stands', function()
    local text = [[
graph step
group 0 {0, 1}
%0 = input x0: float32[4]
%1 = input x1: float32[2]
%2 = all_reduce(%0, group=0): float32[4]
%3 = exp(%1): float32[2]
%4 = all_reduce(%3, %2, group=0): float32[2]
%5 = all_reduce(%3, %4, group=0, reduce=max): float32[2]
%6 = tanh(%2): float32[4]
%7 = all_reduce(%6, %5, group=0): float32[4]
%8 = all_reduce(%7, %7, group=0): float32[4]
return %4, %6, %8
]]
    assert.equal([[
graph step
group 0 {0, 1}
%0 = input x0: float32[4]
%1 = input x1: float32[2]
%2 = exp(%1): float32[2]
%3, %4 = reduce_bucket(none, [%0, %2], group=0): float32[4], float32[2]
%5 = all_reduce(%2, %4, group=0, reduce=max): float32[2]
%6 = tanh(%3): float32[4]
%7 = all_reduce(%6, %5, group=0): float32[4]
%8 = all_reduce(%7, %7, group=0): float32[4]
return %4, %6, %8
]], pass(text, 'buckets'))
  end)
end)

describe('zero', function()
  local text = [[
graph step
placement 0 {0, 1}
%0 = input x0: float32[4] on 0 P
%1 = capture p: float32[4] on 0 B
%2 = capture m: float32[4] on 0 B
%3 = capture v: float32[4] on 0 B
%4 = box(%0): float32[4] on 0 B
%5, %6, %7 = adam_([%1], [%4], [%2], [%3], [], lr=0.1, beta1=0.9, beta2=0.99, eps=0.1, weight_decay=0, step=1): WHAT
%8 = box(%5): float32[4] on 0 B
%9 = box(%6): float32[4] on 0 B
%10 = box(%7): float32[4] on 0 B
write %1 = %8
write %2 = %9
write %3 = %10
return
]]
  text = text:gsub('WHAT', 'float32[4], float32[4], float32[4]')

  local function zero(stage, names, rank)
    return (mf._graph_pass(text, names, nil, nil, nil, nil, rank, stage))
  end

  it('splits states, and with stage 3 parameters, over the first axis', function()
    for stage, want in pairs { [0] = 'BBB', 'BSS', 'BSS', 'SSS' } do
      local got, kinds = zero(stage, 'zero'), ''
      for _, name in ipairs { 'p', 'm', 'v' } do
        kinds = kinds .. got:match('capture ' .. name .. ': float32%[4%] on 0 (.)')
      end
      assert.equal(want, kinds, got)
    end
  end)

  it('leads to parts of gradients, and parameters that are whole again', function()
    assert.equal([[
graph step
placement 0 {0, 1}
group 0 {0, 1}
%0 = input x0: float32[4]
%1 = capture p: float32[4]
%2 = capture m: float32[2] of [4] at [2]
%3 = capture v: float32[2] of [4] at [2]
%4 = narrow(%1, dim=0, start=2, length=2): float32[2] of [4] at [2]
%5 = reduce_scatter(%0, group=0, dim=0, size=[2]): float32[2] of [4] at [2]
%6, %7, %8 = adam_([%4], [%5], [%2], [%3], [], lr=0.1, beta1=0.9, beta2=0.99, eps=0.1, weight_decay=0, step=1): ]]
      .. [[float32[2] of [4] at [2], float32[2] of [4] at [2], float32[2] of [4] at [2]
%9 = all_gather(%6, %5, group=0, dim=0, size=[4]): float32[4]
write %1 = %9
write %2 = %7
write %3 = %8
return
]], zero(1, 'zero,sbp,boxing,part', 1))
  end)
end)
