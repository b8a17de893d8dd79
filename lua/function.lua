-- mf.Function: an op of the user's own, with its gradient.
--
--   local Cube = mf.Function:extend 'Cube'
--   function Cube.forward(ctx, x)
--     ctx:save_for_backward(x)
--     return x * x * x
--   end
--   function Cube.backward(ctx, g)
--     local x = ctx:saved_tensors()
--     return g * 3 * x * x
--   end
--   local y = Cube(x)
--
-- forward runs without a tape. backward gets one gradient a result and returns one for each argument
-- of forward (nil where there is none); ctx.needs_input_grad[i] tells whether that of argument i is
-- wanted. Further fields of ctx are the function's own. Gradients of gradients work when backward is
-- written with ops.
local mf = require 'moonflow.core'
local fail = require 'moonflow.options'.fail

local Context = {}
Context.__index = Context

-- Keeps tensors for backward; only arguments and results of forward may be kept so.
function Context:save_for_backward(...)
  local saved = { n = select('#', ...), ... }
  for i = 1, saved.n do
    if saved[i] ~= nil and not mf.is_tensor(saved[i]) then
      fail('save_for_backward: argument %d must be a tensor, is a %s', i, type(saved[i]))
    end
  end
  rawset(self, '_saved', saved)
end

-- What save_for_backward was given; an error when one was changed in place since.
function Context:saved_tensors()
  local saved = rawget(self, '_saved')
  if not saved then return end
  if saved.freed then
    fail('backward: the graph was freed by an earlier backward pass at %s; pass '
      .. '{retain_graph = true} to the earlier one', self._name)
  end
  for i = 1, saved.n do
    if saved[i] then mf._check_saved(saved[i], saved.versions[i], self._name) end
  end
  return unpack(saved, 1, saved.n)
end

-- These results of forward have no gradient.
function Context:mark_non_differentiable(...)
  for i = 1, select('#', ...) do self._constants[select(i, ...)] = true end
end

local Function = { name = 'Function' }
Function.__index = Function

local function apply(class, ...)
  local n, args = select('#', ...), { ... }
  local ctx = setmetatable({ needs_input_grad = {}, _constants = {}, _places = {} }, Context)
  ctx._name, ctx._class, ctx._n = class.name, class, n
  local inputs = {}
  for i = 1, n do
    if mf.is_tensor(args[i]) then
      inputs[#inputs + 1] = args[i]
      ctx._places[#inputs] = i
      ctx.needs_input_grad[i] = args[i].requires_grad
    else
      ctx.needs_input_grad[i] = false
    end
  end
  if not class.forward then fail('%s', class.name .. ': has no forward') end
  local outputs = { mf.no_grad(class.forward, ctx, ...) }
  local saved = rawget(ctx, '_saved')
  if saved then
    saved.versions = {}
    for i = 1, saved.n do saved.versions[i] = saved[i] and saved[i]._version end
  end
  mf._function_record(ctx, inputs, outputs, ctx._constants)
  return unpack(outputs)
end

-- Refuses gradients that nothing could take.
local function check_gradients(ctx, n, given)
  local is_tensor = {}
  for _, place in ipairs(ctx._places) do is_tensor[place] = true end
  for i = 1, n do
    if given[i] ~= nil and i > ctx._n then
      fail('%s: backward returned %d gradients, forward had %d arguments', ctx._name, n, ctx._n)
    elseif given[i] ~= nil and not is_tensor[i] then
      fail('%s: backward returned a gradient for argument %d, which is not a tensor', ctx._name, i)
    end
  end
end

local function pack(...) return select('#', ...), { ... } end

-- Called by the tape: the gradients of the inputs, in their order.
local function run_backward(ctx, gradients, _, retain)
  local class, result = ctx._class, {}
  if not class.backward then fail('%s', class.name .. ': has no backward') end
  local n, given = pack(class.backward(ctx, unpack(gradients, 1, gradients.n)))
  check_gradients(ctx, n, given)
  for k, place in ipairs(ctx._places) do
    local g = given[place]
    if g ~= nil and not mf.is_tensor(g) then
      fail('%s: backward must return a tensor or nil for argument %d, returned a %s', class.name, place, type(g))
    end
    result[k] = g
  end
  local saved = rawget(ctx, '_saved')
  if saved and not retain then
    for i = 1, saved.n do saved[i] = nil end
    saved.freed = true
  end
  return result
end

mf._set_function(run_backward)

-- A class; calling it, or its apply, calls the function.
function Function:extend(name)
  local class = setmetatable({ name = name or self.name }, { __index = self, __call = apply })
  class.apply = function(...) return apply(class, ...) end
  return class
end

return Function
