-- What passes cost a node, in graphs of 1,000 and of 50,000 nodes:
--
--   build/moonflow spec/tools/pass_bench.lua [most times as much]
--
-- The graphs are chains of blocks in which every pass finds work. The best of several runs counts.
-- Fails when a pass costs more than 1.5 times as much a node in the large graph as in the small one.
local mf = require 'moonflow'
local limit = tonumber(arg[1] or 1.5)

-- One block of 16 nodes on the value `x` (float32[8, 16]), whose first node has the number `k`.
local block = [[
%0 = linear(%x, %w): float32[8, 16]
%1 = number 1: int64
%2 = mul(%0, %1): float32[8, 16]
%3 = clone(%2): float32[8, 16]
%4 = t(%3): float32[16, 8]
%5 = t(%4): float32[8, 16]
%6 = view(%5, size=[128]): float32[128]
%7 = reshape(%6, size=[8, 16]): float32[8, 16]
%8 = relu(%7): float32[8, 16]
%9 = relu(%7): float32[8, 16]
%10 = ones_like(%8): float32[8, 16]
%11 = mul(%8, %10): float32[8, 16]
%12 = add(%11, %9): float32[8, 16]
%13 = sum(%12, dim=[0]): float32[16]
%14 = exp(%13): float32[16]
%15 = tanh(%12): float32[8, 16]
]]

local function graph(nodes)
  local lines, last = { 'graph bench\n%0 = input x: float32[8, 16]\n%1 = capture w: float32[16, 16]\n' }, 0
  local next_id = 2
  while next_id + 16 <= nodes do
    local from, x = next_id, last
    lines[#lines + 1] = block:gsub('%%(%w+)', function(name)
      if name == 'x' then return '%' .. x end
      if name == 'w' then return '%1' end
      return '%' .. from + tonumber(name)
    end)
    next_id, last = from + 16, from + 15
  end
  lines[#lines + 1] = ('return %%%d\n'):format(last)
  return table.concat(lines), next_id
end

-- The seconds that a call takes a node, at best.
local function cost(text, nodes, names, runs)
  local best = math.huge
  for _ = 1, runs do best = math.min(best, (select(2, mf._graph_pass(text, names)))) end
  return best / nodes
end

local failed = false
local small, n_small = graph(1000)
local large, n_large = graph(50000)
local passes, seen, all = {}, {}, table.concat(mf._passes(), ',')
for _, name in ipairs(mf._passes()) do
  if not seen[name] then passes[#passes + 1] = name end
  seen[name] = true
end
passes[#passes + 1] = all
print(('%-28s %12s %12s %8s'):format('passes', n_small .. ' nodes', n_large .. ' nodes', 'ratio'))
for _, names in ipairs(passes) do
  local a, b = cost(small, n_small, names, 40), cost(large, n_large, names, 5)
  local ratio = b / a
  print(('%-28s %9.3f us %9.3f us %8.2f'):format(names, a * 1e6, b * 1e6, ratio))
  failed = failed or ratio > limit
end
os.exit(failed and 1 or 0)
