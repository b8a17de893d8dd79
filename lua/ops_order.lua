-- max, min, argmax, argmin, argsort over the ops of src/op/order.c.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local Tensor = mf.Tensor
local none = options.none

-- (dim, {keepdim}) or ({dim=, keepdim=}).
local function read(name, dim, o)
  if type(dim) == 'table' then dim, o = nil, dim end
  o = options(name, o, { dim = none, keepdim = false }, 3)
  if dim == nil then dim = o.dim end
  return dim, o.keepdim
end

-- max(x): the largest element; max(x, dim, {keepdim=}): values and indices along dim; max(x, y):
-- the larger of each pair.
local function extreme(name, whole, along, pairwise)
  return function(x, dim, o)
    if mf.is_tensor(dim) then return pairwise(x, dim) end
    local keepdim
    dim, keepdim = read(name, dim, o)
    if dim == nil then return whole(x) end
    return along(x, dim, keepdim)
  end
end
mf.max = extreme('max', mf.amax, mf._max_dim, mf.maximum)
mf.min = extreme('min', mf.amin, mf._min_dim, mf.minimum)

-- The place of the largest (smallest) element along dim, or in the flattened tensor.
local function place(name, along)
  return function(x, dim, o)
    local keepdim
    dim, keepdim = read(name, dim, o)
    if dim == nil then
      local _, index = along(x:reshape(-1), 0)
      return index
    end
    local _, index = along(x, dim, keepdim)
    return index
  end
end
mf.argmax = place('argmax', mf._max_dim)
mf.argmin = place('argmin', mf._min_dim)

-- The places of the elements along dim in order.
function mf.argsort(x, dim, o)
  if type(dim) == 'table' then dim, o = nil, dim end
  o = options('argsort', o, { dim = -1, descending = false, stable = true })
  local _, index = mf.sort(x, dim or o.dim, o.descending)
  return index
end

Tensor.max, Tensor.min, Tensor.argmax, Tensor.argmin, Tensor.argsort = mf.max, mf.min, mf.argmax, mf.argmin, mf.argsort
return mf
