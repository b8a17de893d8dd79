-- The oracle over ranks: every op on global tensors, under every way in which its inputs can lie on 2 and 4
-- ranks and on grids of them, gives the values and gradients of one rank. See spec/oracle/global.lua.
local mf = require 'moonflow'
local Run = require 'spec.oracle.run'
local exempt = require 'spec.oracle.exempt'

-- Ops are run in groups, so that ranks need not be started for each; a failure ends its group.
local GROUP = 12

local function each(what, sizes, most, pick)
  local n, ops, results = 1, {}, {}
  for _, k in ipairs(sizes) do n = n * k end
  for i, op in ipairs(Run.ops) do
    if not exempt.no_global[op.name] and (not pick or pick(i, op)) then ops[#ops + 1] = op.name end
  end
  local function run_group(first)
    local names = {}
    for i = first, math.min(first + GROUP - 1, #ops) do names[#names + 1] = ops[i] end
    local got, errors = mf.comm._spawn(n, function(rank)
      return require 'spec.oracle.global'.run(names, sizes, rank, most)
    end, { timeout = 60, catch = true })
    for _, name in ipairs(names) do
      for r = 1, n do
        local result = got[r] and got[r][name] or errors[r] or 'was not reached'
        if type(result) ~= 'number' or not results[name] then results[name] = result end
        if type(result) ~= 'number' then break end
      end
    end
  end
  describe(what, function()
    for i, name in ipairs(ops) do
      it(name, function()
        if not results[name] then run_group(i - (i - 1) % GROUP) end
        if type(results[name]) ~= 'number' then error(results[name], 0) end
        assert(results[name] > 0, 'nothing was checked')
      end)
    end
  end)
end

each('global oracle, 2 ranks', { 2 }, 3)
each('global oracle, 2 times 2 ranks', { 2, 2 }, 2, function(i) return i % 4 == 0 end)
each('global oracle #long, 2 ranks', { 2 }, 60)
each('global oracle #long, 4 ranks', { 4 }, 16)
each('global oracle #long, 3 ranks', { 3 }, 16)
each('global oracle #long, 2 times 2 ranks', { 2, 2 }, 24)
each('global oracle #long, 3 times 2 ranks', { 3, 2 }, 8)
