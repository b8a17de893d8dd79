-- Calling ops by their records: arguments by name, results as one list.
local mf = require 'moonflow'
local Run = {}

-- Those that have kernels; what only moves between ranks is covered by spec/compile_global_spec.lua.
Run.ops = {}
for _, op in ipairs(mf._ops()) do
  if not require 'spec.oracle.exempt'.no_kernel[op.name] then Run.ops[#Run.ops + 1] = op end
end

-- Every tensor of a call: { param, index (in a list) or nil, tensor }.
function Run.tensors(op, args)
  local slots = {}
  for _, p in ipairs(op.params) do
    local value = args[p.name]
    if p.kind == 'tensor' and type(value) == 'table' then
      for i, t in ipairs(value) do slots[#slots + 1] = { param = p, index = i, tensor = t } end
    elseif p.kind == 'tensor' and mf.is_tensor(value) then
      slots[#slots + 1] = { param = p, tensor = value }
    end
  end
  return slots
end

function Run.slot_name(slot) return slot.index and ('%s[%d]'):format(slot.param.name, slot.index) or slot.param.name end

-- The same call with f(tensor, slot number, slot) in the place of each tensor.
function Run.map(op, args, f)
  local new = {}
  for name, value in pairs(args) do new[name] = value end
  for k, slot in ipairs(Run.tensors(op, args)) do
    local t = f(slot.tensor, k, slot)
    if slot.index then
      if new[slot.param.name] == args[slot.param.name] then
        new[slot.param.name] = { unpack(args[slot.param.name]) }
      end
      new[slot.param.name][slot.index] = t
    else
      new[slot.param.name] = t
    end
  end
  return new
end

-- Arguments for one call: what is to be written is cloned, unless `raw`, and generators begin at one seed.
function Run.prepare(op, args, raw)
  args = Run.map(op, args, function(t, _, slot)
    if slot.param.mutated and not raw then return t:clone() end
    return t
  end)
  for _, p in ipairs(op.params) do
    if p.kind == 'generator' then args[p.name] = mf.Generator():manual_seed(7) end
  end
  return args
end

-- Results of f(args) as a list: outputs (those of a Tensor[] one by one), then the tensors that the
-- call has written into.
function Run.apply(op, f, args, raw)
  args = Run.prepare(op, args, raw)
  local results
  if op.n_outputs == 0 then f(args); results = {}
  elseif op.n_outputs == -1 then results = f(args)
  else results = { f(args) } end
  assert(op.n_outputs < 1 or #results == op.n_outputs, 'a wrong number of results')
  for _, slot in ipairs(Run.tensors(op, args)) do
    if slot.param.mutated then results[#results + 1] = slot.tensor end
  end
  return results
end

function Run.call(op, args, raw) return Run.apply(op, op.call, args, raw) end

-- The name of result k, for reports and exemptions.
function Run.result_name(op, args, k)
  local outputs = op.n_outputs
  if outputs == -1 then return 'output ' .. k - 1 end
  if k <= outputs then return op.outputs[k] or 'output' end
  for _, slot in ipairs(Run.tensors(op, args)) do
    if slot.param.mutated then
      outputs = outputs + 1
      if outputs == k then return Run.slot_name(slot) end
    end
  end
end

return Run
