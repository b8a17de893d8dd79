-- nn.utils: clipping of gradients, parameters as one vector.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local utils = {}

local function gradients_of(parameters)
  if mf.is_tensor(parameters) then parameters = { parameters } end
  local list = {}
  for _, p in ipairs(parameters) do
    local g = p.grad
    if g then list[#list + 1] = g end
  end
  return list
end

-- Scales the gradients so that their common norm is at most max_norm; returns the norm before, a 0-d tensor.
function utils.clip_grad_norm_(parameters, max_norm, o)
  o = options('clip_grad_norm_', o, { norm_type = 2, error_if_nonfinite = false })
  local gradients = gradients_of(parameters)
  if #gradients == 0 then return mf.zeros(1):reshape {} end
  return mf.no_grad(function()
    local dense = {}
    for i, g in ipairs(gradients) do dense[i] = g.is_rows and g:coalesce().values or g end
    local total
    if o.norm_type == 2 then
      total = mf.total_norm(dense)
    else
      local norms = {}
      for i, g in ipairs(dense) do norms[i] = g:norm { p = o.norm_type } end
      total = mf.stack(norms):norm { p = o.norm_type }
    end
    if o.error_if_nonfinite then
      local value = total:item()
      if value ~= value or value == math.huge then
        error(('clip_grad_norm_: the norm of the gradients is %s'):format(tostring(value)), 0)
      end
    end
    local scale = (max_norm / (total + 1e-6)):clamp { max = 1 }
    for _, g in ipairs(gradients) do
      if g.is_rows then g.values:mul_(scale) else g:mul_(scale) end
    end
    return total
  end)
end

-- Clips every gradient to [-clip_value, clip_value].
function utils.clip_grad_value_(parameters, clip_value)
  mf.no_grad(function()
    for _, g in ipairs(gradients_of(parameters)) do g:clamp_(-clip_value, clip_value) end
  end)
end

-- All parameters behind one another as one 1-d tensor, and back.
function utils.parameters_to_vector(parameters)
  local flat = {}
  for i, p in ipairs(parameters) do flat[i] = p:reshape(-1) end
  return mf.cat(flat)
end

function utils.vector_to_parameters(vector, parameters)
  local at = 0
  for _, p in ipairs(parameters) do
    local n = p:numel()
    p.data = vector:narrow(0, at, n):reshape(p.shape):clone()
    at = at + n
  end
end

return utils
