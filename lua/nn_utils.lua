-- nn.utils: clipping of gradients, parameters as one vector.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local utils = {}

-- f(list), all handles inside ended with it: the gradients there are, of one tensor or a table of
-- them; a row-sparse one by its values, with each row there once.
local function with_gradients(name, parameters, f)
  if mf.is_tensor(parameters) then parameters = { parameters } end
  if type(parameters) ~= 'table' then
    fail('%s: a table of tensors is needed, this is %s', name, options.describe(parameters))
  end
  for i, p in ipairs(parameters) do
    if not mf.is_tensor(p) then
      fail('%s: parameters[%d] must be a tensor, is %s', name, i, options.describe(p))
    end
  end
  return mf.no_grad(mf.scope, mf._with_gradients, parameters, function(gradients)
    local list = {}
    for i, p in ipairs(parameters) do
      local g = gradients[i]
      if g and g.is_rows then
        g = g:coalesce()
        p.grad = g
        g = g.values
      end
      list[#list + 1] = g or nil
    end
    return f(list)
  end)
end

-- The sum of |g|^p over gradients that lie on one placement, or the largest |g|; 0-d and global.
local function power_sum(gradients, p)
  local total
  for _, g in ipairs(gradients) do
    local one = g:abs()
    if p == math.huge then one = one:amax() else one = (p == 2 and one:square() or one:pow(p)):sum() end
    if not total then total = one
    elseif p == math.huge then total = mf.maximum(total, one)
    else total = total + one end
  end
  return total
end

-- Of global gradients: what each placement has is made whole, and brought to the first.
local function global_norm(gradients, p)
  local by_place, order = {}, {}
  for _, g in ipairs(gradients) do
    local key = tostring(g.placement)
    if not by_place[key] then
      by_place[key] = {}
      order[#order + 1] = key
    end
    table.insert(by_place[key], g)
  end
  local total
  for _, key in ipairs(order) do
    local list = by_place[key]
    local one = power_sum(list, p)
    local first = by_place[order[1]][1]
    one = one:to_global { placement = first.placement, sbp = mf._whole(first.placement) }
    if not total then total = one
    elseif p == math.huge then total = mf.maximum(total, one)
    else total = total + one end
  end
  return p == math.huge and total or p == 2 and total:sqrt() or total:pow(1 / p)
end

local function total_norm(gradients, p)
  if gradients[1].is_global then return global_norm(gradients, p) end
  if p == 2 then return mf.total_norm(gradients) end
  local norms = {}
  for i, g in ipairs(gradients) do norms[i] = g:norm { p = p } end
  return mf.stack(norms):norm { p = p }
end

-- All gradients times a 0-d tensor: in one op where they are contiguous.
local function scale(gradients, by)
  local runs = {}
  local function factor(g)
    if not g.is_global or g.placement == by.placement then return by end
    return by:to_global { placement = g.placement, sbp = mf._whole(g.placement) }
  end
  for _, g in ipairs(gradients) do
    if g:is_contiguous() then runs[#runs + 1] = g else g:mul_(factor(g)) end
  end
  for _, alike in ipairs(mf._by_layout(runs)) do mf._scale_all_(factor(alike[1]), alike) end
end

-- Scales the gradients so that their common norm is at most max_norm; returns the norm before, as a
-- 0-d tensor.
function utils.clip_grad_norm_(parameters, max_norm, ...)
  local o = options.arguments('clip_grad_norm_', { 'norm_type', 'error_if_nonfinite' },
    { norm_type = 2, error_if_nonfinite = false }, ...)
  return with_gradients('clip_grad_norm_', parameters, function(gradients)
    if #gradients == 0 then return mf.zeros {} end
    local norm = total_norm(gradients, o.norm_type)
    if o.error_if_nonfinite then
      local value = norm:item()
      if value ~= value or value == math.huge then
        fail('clip_grad_norm_: the norm of the gradients is %s', tostring(value))
      end
    end
    scale(gradients, (max_norm / (norm + 1e-6)):clamp { max = 1 })
    return norm
  end)
end

-- Clips every element of the gradients to [-clip_value, clip_value].
function utils.clip_grad_value_(parameters, clip_value)
  with_gradients('clip_grad_value_', parameters, function(gradients)
    for _, g in ipairs(gradients) do g:clamp_(-clip_value, clip_value) end
  end)
end

-- All parameters one behind the other as one 1-d tensor, and back.
function utils.parameters_to_vector(parameters)
  local flat = {}
  for i, p in ipairs(parameters) do flat[i] = p:reshape(-1) end
  return mf.cat(flat)
end

-- Writes the elements of a 1-d tensor into the parameters, in order.
function utils.vector_to_parameters(vector, parameters)
  local at = 0
  for _, p in ipairs(parameters) do
    local n = p:numel()
    p.data = vector:narrow(0, at, n):reshape(p.shape):clone()
    at = at + n
  end
end

return utils
