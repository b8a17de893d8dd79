-- Gradients of reductions, scans and sorting; see grad.lua for the form. A result over dims is
-- brought back to the shape of what was reduced by mf._spread, which is a view.
local mf = require 'moonflow.core'
local grad = {}

-- How many elements of `shape` go into one result over `dims`.
local function count(shape, dims)
  local n = 1
  for i = 1, #dims do n = n * shape[dims[i] + 1] end
  return n
end

grad.sum = { x = function(g, _, o) return mf._spread(g, o.shape.x, o.dim, o.keepdim) end }
grad.mean = { x = function(g, _, o) return mf._spread(g / count(o.shape.x, o.dim), o.shape.x, o.dim, o.keepdim) end }
grad.spread = { x = function(g, _, o) return g:sum(o.dim, o.keepdim) end }
grad.sum_to = {
  x = function(g, _, o)
    local shape, dims = o.shape.x, {}
    local shift = #shape - #o.size
    for d = 1, #shape do
      if d > shift and shape[d] ~= o.size[d - shift] then dims[#dims + 1] = d - 1 end
    end
    if shift == 0 then return mf._spread(g, shape, dims, true) end
    return g:expand(shape)
  end,
}

-- The products of all other elements along the last dim: those before it times those behind it, so
-- that zeros do no harm.
local function others(x)
  local n = x.shape[#x.shape]
  local one = mf.ones_like(x:narrow(-1, 0, 1))
  local before = mf.cat({ one, x:narrow(-1, 0, n - 1) }, -1):cumprod(-1)
  local behind = mf.cat({ one, x:flip(-1):narrow(-1, 0, n - 1) }, -1):cumprod(-1):flip(-1)
  return before * behind
end

grad.prod = {
  x = function(g, _, o)
    local x, shape, dims = o.x, o.shape.x, o.dim
    local G = mf._spread(g, shape, dims, o.keepdim)
    if x:numel() == 0 or #shape == 0 then return G end
    local reduced, order, back, kept = {}, {}, {}, {}
    for i = 1, #dims do reduced[dims[i]] = true end
    for d = 0, #shape - 1 do
      if not reduced[d] then
        order[#order + 1] = d
        kept[#kept + 1] = shape[d + 1]
      end
    end
    for d = 0, #shape - 1 do if reduced[d] then order[#order + 1] = d end end
    for i, d in ipairs(order) do back[d + 1] = i - 1 end
    kept[#kept + 1] = count(shape, dims)
    local moved = x:permute(order)
    return G * others(moved:reshape(kept)):reshape(moved.shape):permute(back)
  end,
}

-- The gradient goes to the elements equal to the result, in equal parts.
local function to_equal(g, y, x, shape, dims, keepdim)
  local equal = mf._cast(x:eq(mf._spread(y, shape, dims, keepdim)), g.dtype)
  return equal * mf._spread(g / equal:sum(dims, keepdim), shape, dims, keepdim)
end
grad.amax = { x = function(g, y, o) return to_equal(g, y, o.x, o.shape.x, o.dim, o.keepdim) end }
grad.amin = { x = function(g, y, o) return to_equal(g, y, o.x, o.shape.x, o.dim, o.keepdim) end }

grad.norm = {
  x = function(g, y, o)
    local x, p, shape, dims = o.x, o.p, o.shape.x, o.dim
    if p == 0 then return mf.zeros_like(x) end
    if p == 1 then return x:sign() * mf._spread(g, shape, dims, o.keepdim) end
    if p == math.huge or p == -math.huge then return x:sign() * to_equal(g, y, x:abs(), shape, dims, o.keepdim) end
    if p == 2 then return x * mf._spread(mf.where(y:eq(0), 0, g / y), shape, dims, o.keepdim) end
    local scale = mf._spread(mf.where(y:eq(0), 0, g * y ^ (1 - p)), shape, dims, o.keepdim)
    return mf.where(x:eq(0), 0, x:sign() * x:abs() ^ (p - 1)) * scale
  end,
}

-- Twice the deviations from the mean, over the divisor.
local function spread_variance(g, x, dims, keepdim, unbiased, correction)
  local shape = x.shape
  local divisor = count(shape, dims) - (correction or (unbiased and 1 or 0))
  return (x - x:mean(dims, true)) * mf._spread(g * (2 / divisor), shape, dims, keepdim)
end
grad.var = { x = function(g, _, o) return spread_variance(g, o.x, o.dim, o.keepdim, o.unbiased, o.correction) end }
grad.std = {
  x = function(g, y, o)
    return spread_variance(mf.where(y:eq(0), 0, g / (y * 2)), o.x, o.dim, o.keepdim, o.unbiased, o.correction)
  end,
}
grad.logsumexp = {
  x = function(g, y, o)
    local shape = o.shape.x
    local top = mf._spread(mf.where(y:eq(-math.huge), 0, y), shape, o.dim, o.keepdim)
    return (o.x - top):exp() * mf._spread(g, shape, o.dim, o.keepdim)
  end,
}

return grad
