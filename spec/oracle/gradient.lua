-- Gradients against central finite differences in float64, of the loss sum(out * w) over float
-- results, w being fixed weights. For second gradients the weights are inputs too, so that the path
-- through the incoming gradient is covered.
local mf = require 'moonflow'
local Values = require 'spec.oracle.values'
local Run = require 'spec.oracle.run'
local Gradient = {}

local step = 1e-5

local function weights_like(t, phase)
  local list = {}
  for k = 1, t:numel() do list[k] = math.cos(0.5 * (k - 1) + phase) end
  return #list == 0 and mf.zeros_like(t:detach()) or mf.tensor(list, { dtype = mf.float64 }):view(t.shape):to(t.dtype)
end

-- Which results count: floats as wide as the inputs, but not those whose gradient is exempt.
local function counted(op, args, results, exempt)
  local list, wide = {}, 0
  for _, slot in ipairs(Run.tensors(op, args)) do
    if slot.tensor:is_floating_point() then wide = math.max(wide, slot.tensor:element_size()) end
  end
  for k, t in ipairs(results) do
    local fits = t:is_floating_point() and t:element_size() >= wide
    if fits and not exempt[Run.result_name(op, args, k)] then list[#list + 1] = t end
  end
  return list
end

-- Tensors that the op's gradient serves, as slot numbers.
function Gradient.slots(op, args)
  local list = {}
  for k, slot in ipairs(Run.tensors(op, args)) do
    if op.gradient[slot.param.name] and slot.tensor:is_floating_point() then list[#list + 1] = k end
  end
  return list
end

local function with_tensors(op, args, replaced)
  return Run.map(op, args, function(t, k) return replaced[k] or t end)
end

-- (f(x + h) - f(x - h)) / 2h for each element of t, as a tensor; f takes a changed copy of t.
local function differences(t, f)
  local list, out = Values.flat(t), {}
  local function at(i, value)
    local old = list[i]
    list[i] = value
    local y = f(mf.tensor(list, { dtype = mf.float64 }):view(t.shape))
    list[i] = old
    return y
  end
  for i = 1, #list do out[i] = (at(i, list[i] + step) - at(i, list[i] - step)) / (2 * step) end
  return #out == 0 and mf.zeros_like(t) or mf.tensor(out, { dtype = mf.float64 }):view(t.shape)
end

local function loss_of(op, args, weights, exempt)
  local outs, loss = counted(op, args, Run.call(op, args), exempt), nil
  for k, t in ipairs(outs) do
    weights[k] = weights[k] or weights_like(t, k)
    local term = (t * weights[k]):sum()
    loss = loss and loss + term or term
  end
  return loss
end

-- The loss on these arguments; nil where no result counts.
function Gradient.loss(op, args, exempt) return loss_of(op, args, {}, exempt) end

-- The leaves to differentiate by: fresh copies of the served inputs.
local function leaves_of(op, args)
  local leaves, slots = {}, Gradient.slots(op, args)
  for i, k in ipairs(slots) do leaves[i] = Run.tensors(op, args)[k].tensor:detach():clone():requires_grad_() end
  return leaves, slots
end

local function place(slots, leaves)
  local replaced = {}
  for i, k in ipairs(slots) do replaced[k] = leaves[i] end
  return replaced
end

local function check(op, args, slots, extra, got, want, what)
  for i = 1, #want do
    local name = slots[i] and Run.slot_name(Run.tensors(op, args)[slots[i]]) or 'the incoming gradient ' .. i - #slots
    local wrong = Values.difference(got[i] or mf.zeros_like(want[i]), want[i], 1e-6, 1e-7)
    if wrong then error(('%s: the %s by %s %s%s'):format(op.name, what, name, wrong, extra), 0) end
  end
end

-- The gradients of a call in its own dtype, as a list by served slot; exempt: results that do not count.
function Gradient.compute(op, args, exempt)
  local leaves, slots = leaves_of(op, args)
  if #leaves == 0 then return {}, slots, leaves end
  local loss = loss_of(op, with_tensors(op, args, place(slots, leaves)), {}, exempt)
  if not loss then return {}, {}, {} end
  return mf.grad(loss, leaves, { allow_unused = true }), slots, leaves
end

function Gradient.check_first(op, args, exempt)
  local got, slots, leaves = Gradient.compute(op, args, exempt)
  local want, weights = {}, {}
  for i = 1, #slots do
    want[i] = differences(leaves[i], function(changed)
      local replaced = place(slots, leaves)
      replaced[slots[i]] = changed
      return mf.no_grad(loss_of, op, with_tensors(op, args, replaced), weights, exempt):item()
    end)
  end
  check(op, args, slots, '', got, want, 'gradient')
  return #slots
end

-- sum(gradient * v) over all leaves and incoming weights, as a function of both.
local function slope(op, args, slots, leaves, weights, exempt, create_graph)
  local loss = loss_of(op, with_tensors(op, args, place(slots, leaves)), weights, exempt)
  local grads = mf.grad(loss, leaves, { allow_unused = true, create_graph = create_graph })
  local sum
  for i, g in ipairs(leaves) do
    if grads[i] then
      local term = (grads[i] * weights_like(g, 0.3 * i)):sum()
      sum = sum and sum + term or term
    end
  end
  return sum
end

function Gradient.check_second(op, args, exempt)
  local leaves, slots = leaves_of(op, args)
  if #leaves == 0 then return end
  local weights = {}
  if not loss_of(op, with_tensors(op, args, place(slots, leaves)), weights, exempt) then return end
  for k, w in ipairs(weights) do weights[k] = w:clone():requires_grad_() end
  local sum = slope(op, args, slots, leaves, weights, exempt, true)
  local all = { unpack(leaves) }
  for _, w in ipairs(weights) do all[#all + 1] = w end
  local got = sum and sum.requires_grad and mf.grad(sum, all, { allow_unused = true }) or {}
  local want = {}
  for i = 1, #all do
    want[i] = differences(all[i], function(changed)
      local l, w = {}, {}
      for k, t in ipairs(all) do
        local x = (k == i and changed or t:detach():clone()):requires_grad_()
        if k <= #leaves then l[k] = x else w[k - #leaves] = x end
      end
      local s = slope(op, args, slots, l, w, exempt, false)
      return s and s:item() or 0
    end)
  end
  check(op, args, slots, '', got, want, 'second gradient')
end

return Gradient
