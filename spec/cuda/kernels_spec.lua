-- Every kernel of a cuda device against the cpu's, over the cases of the oracle: in float64, float32 and
-- the halves, in several layouts of memory, with sizes that fill blocks and leave a rest.
local mf = require 'moonflow'
local Cases = require 'spec.oracle.cases'
local Layout = require 'spec.oracle.layout'
local Run = require 'spec.oracle.run'
local Values = require 'spec.oracle.values'
local exempt = require 'spec.oracle.exempt'
local missing = require 'spec.cuda.missing'

local function with_cuda(f) return mf.device('cuda', f) end

-- Moved as it is, or laid out anew there.
local function moved(args, op, memory)
  return Run.map(op, args, function(t)
    local there = t:to 'cuda'
    return memory and with_cuda(function() return memory(there) end) or there
  end)
end

-- The results of the same call on both, or nil where there is no kernel.
local function both(op, args, memory)
  local want = Run.call(op, args)
  local ok, got = pcall(with_cuda, function() return Run.call(op, moved(args, op, memory), memory ~= nil) end)
  if ok then return want, got end
  if tostring(got):find('has no kernel on cuda', 1, true) then return nil end
  error(got, 0)
end

-- Random draws are equal bit for bit; of others, sums may be added in another order.
local sums = { drop_attention = true } -- of them the draws are inside
local tolerance = { float64 = 1e-12, float32 = 4e-6, float16 = 2e-3, bfloat16 = 1.6e-2 }

-- Whether there is a kernel.
local function compare(op, args, dtype, memory, what)
  local want, got = both(op, args, memory)
  if not want then return false end
  assert(#want == #got, what .. ': another number of results')
  for i = 1, #want do
    local limit = op.flags.random and not sums[op.name] and 0 or tolerance[dtype]
    local wrong = Values.difference(got[i]:to 'cpu', want[i], limit, limit)
    if wrong then error(('%s: %s %s'):format(what, Run.result_name(op, args, i), wrong), 0) end
  end
  return true
end

local function check(op, dtype, options, memory)
  options.dtype = mf.float64
  for k, args in ipairs(Cases.list(op, options)) do
    if dtype ~= 'float64' then args = Layout.with_dtype(op, args, mf[dtype]) end
    if not compare(op, args, dtype, memory, ('case %d in %s'):format(k, dtype)) then return false end
  end
  return true
end

local function each(what, filter, f)
  describe('cuda, ' .. what, function()
    for _, op in ipairs(Run.ops) do
      if not op.flags.view and not exempt.undefined[op.name] and not missing[op.name] and filter(op) then
        it(op.name, function() f(op) end)
      end
    end
  end)
end
local function always() return true end

for _, dtype in ipairs { 'float64', 'float32', 'float16', 'bfloat16' } do
  each(dtype, function(op) return dtype == 'float64' or not exempt.no_half[op.name] end,
    function(op) assert(check(op, dtype, {}), 'has no kernel, and is not listed in spec/cuda/missing.lua') end)
end
each('long', always, function(op) check(op, 'float32', { L = 301 }) end)
each('without elements', function(op) return not exempt.no_empty[op.name] end, function(op)
  check(op, 'float32', { B = 0 })
end)
for _, mode in ipairs { 'reversed', 'spaced', 'channels_last' } do
  each(mode .. ' memory', function(op) return not exempt.needs_memory[op.name] end, function(op)
    check(op, 'float32', {}, Layout.memories[mode])
  end)
end
each('whole numbers', function(op) return op.pointwise end, function(op)
  for _, dtype in ipairs { 'int64', 'int32', 'int16', 'uint8', 'bool' } do
    for k, args in ipairs(Cases.list(op)) do
      args = Run.map(op, args, function(t) return t:is_floating_point() and t:abs():ceil():to(mf[dtype]) or t end)
      local ok, want = pcall(Run.call, op, args)
      if ok and #want > 0 then compare(op, args, 'float32', nil, ('case %d of %s'):format(k, dtype)) end
    end
  end
end)

describe('cuda, list of missing kernels', function()
  local by_name = {}
  for _, op in ipairs(Run.ops) do by_name[op.name] = op end
  for name in pairs(missing) do
    it(name, function()
      local op = assert(by_name[name], 'is no op')
      local args = Cases.list(op)[1]
      assert(both(op, args) == nil, 'has a kernel now')
    end)
  end
end)
