-- The same call as a compiled step, forward and backward: bit for bit what it gives by itself, or where
-- passes may change the order of sums, `near` (relative). Tensors are arguments of the step; those that the
-- op writes are captured, so that both ways in are covered. `how`: {memory = a function that puts a tensor
-- into other memory, passes = of mf.compile, near = }; nil: none of these.
local mf = require 'moonflow'
local Gradient = require 'spec.oracle.gradient'
local Run = require 'spec.oracle.run'
local Values = require 'spec.oracle.values'
local Compiled = {}

-- The op without its generator, which a compiled step does not take: the default one begins at a seed.
local function without_generator(op)
  local params = {}
  for _, p in ipairs(op.params) do
    if p.kind ~= 'generator' then params[#params + 1] = p end
  end
  return setmetatable({ params = params }, { __index = op })
end

local function call(op, args)
  if op.n_outputs == 0 then
    op.call(args)
    return {}
  end
  if op.n_outputs == -1 then return op.call(args) end
  return { op.call(args) }
end

-- Results of f(tensors) compiled, with those in `captured` (by slot) not arguments.
local function compile_and_run(tensors, captured, passes, f)
  local at, given = {}, {}
  for k, t in ipairs(tensors) do
    if not captured[k] then
      at[#at + 1] = k
      given[#given + 1] = t
    end
  end
  local step = mf.compile(function(...)
    local all = { unpack(tensors) }
    for i, k in ipairs(at) do all[k] = (select(i, ...)) end
    return f(all)
  end, { passes = passes })
  return step(unpack(given))
end

local function compare(op, args, got, want, what, near)
  if #got ~= #want then error(('%s: %s: %d results, not %d'):format(op.name, what, #got, #want), 0) end
  for k = 1, #want do
    local wrong = Values.difference(got[k], want[k], near, near)
    if wrong then
      error(('%s: %s: %s %s'):format(op.name, what, Run.result_name(op, args, k) or 'result ' .. k, wrong), 0)
    end
  end
end

local function as_it_is(t) return t end

-- Outputs, then what was written, of one case.
function Compiled.check_forward(op, args, how)
  how = how or {}
  local memory = how.memory or as_it_is
  op = without_generator(op)
  local slots = Run.tensors(op, args)
  local function sides()
    local tensors, written = {}, {}
    for k, slot in ipairs(slots) do
      tensors[k] = memory(slot.param.mutated and slot.tensor:clone() or slot.tensor)
      written[k] = slot.param.mutated or nil
    end
    return tensors, written
  end
  local function results(outputs, tensors, written)
    local list = {}
    for _, t in ipairs(outputs) do list[#list + 1] = t end
    for k, t in ipairs(tensors) do
      if written[k] then list[#list + 1] = t end
    end
    return list
  end
  local function on(tensors) return Run.map(op, args, function(_, k) return tensors[k] end) end
  local tensors, written = sides()
  mf.manual_seed(7)
  local want = results(call(op, on(tensors)), tensors, written)
  tensors, written = sides()
  mf.manual_seed(7)
  local outputs = compile_and_run(tensors, written, how.passes, function(all) return call(op, on(all)) end)
  compare(op, args, results(outputs, tensors, written), want, 'compiled', how.near or 0)
end

-- Gradients by the float inputs that the op's gradient serves.
function Compiled.check_backward(op, args, exempt, how)
  how = how or {}
  local memory = how.memory or as_it_is
  op = without_generator(op)
  local slots, served, leaves = Run.tensors(op, args), {}, {}
  for _, k in ipairs(Gradient.slots(op, args)) do
    served[k] = true
    leaves[#leaves + 1] = k
  end
  if #leaves == 0 then return 0 end
  local function gradients(tensors)
    local all, list = {}, {}
    for k, t in ipairs(tensors) do all[k] = served[k] and t:detach():requires_grad_() or t end
    local loss = Gradient.loss(op, Run.map(op, args, function(_, k) return all[k] end), exempt)
    if not loss or not loss.requires_grad then return {} end
    for i, k in ipairs(leaves) do list[i] = all[k] end
    local grads = mf.grad({ loss }, list, { allow_unused = true })
    for i = 1, #list do grads[i] = grads[i] or mf.zeros_like(list[i]) end
    grads[#list + 1] = loss:detach()
    return grads
  end
  local tensors = {}
  for k, slot in ipairs(slots) do tensors[k] = memory(slot.tensor:detach()) end
  mf.manual_seed(7)
  local want = gradients(tensors)
  mf.manual_seed(7)
  local got = compile_and_run(tensors, {}, how.passes, gradients)
  compare({ name = op.name, n_outputs = -1 }, args, got, want, 'gradients, compiled', how.near or 0)
  return #want > 0 and 1 or 0
end

return Compiled
