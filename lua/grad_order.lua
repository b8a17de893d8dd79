-- Gradients of src/op/order.c: of values chosen or sorted, the gradient goes back to where they stood.
local mf = require 'moonflow.core'
local grad = {}

-- g (whose dim was dropped unless keepdim) at the places `indices` of a tensor of this shape, zeros elsewhere.
local function put_back(g, indices, shape, dim, dropped)
  if #shape == 0 then return g end
  if dropped then g, indices = g:unsqueeze(dim), indices:unsqueeze(dim) end
  return g:new_zeros(shape):scatter(dim, indices, g)
end

grad.max_dim = { x = function(g, y, o)
  return g.values and put_back(g.values, y.indices, o.shape.x, o.dim, not o.keepdim)
end }
grad.min_dim = { x = function(g, y, o)
  return g.values and put_back(g.values, y.indices, o.shape.x, o.dim, not o.keepdim)
end }
grad.sort = { x = function(g, y, o) return g.values and put_back(g.values, y.indices, o.shape.x, o.dim) end }
grad.topk = { x = function(g, y, o) return g.values and put_back(g.values, y.indices, o.shape.x, o.dim) end }

local function reversed_cumsum(g, dim)
  if g.ndim == 0 then return g end
  return g:flip { dim }:cumsum(dim):flip { dim }
end

grad.cumsum = { x = function(g, _, o) return reversed_cumsum(g, o.dim) end }
grad.cumprod = { x = function(g, _, o) return mf._cumprod_backward(g, o.x, o.dim) end }
-- dx = before * s(g, x): linear in g, whose gradient is that of the running product along v.
grad.cumprod_backward = {
  ['g,x'] = function(v, need, _, o)
    local x, dim, n = o.x, o.dim, o.x.ndim == 0 and 1 or o.x:size(o.dim)
    if n <= 1 then return need.g and v or nil, need.x and mf.zeros_like(x) or nil end
    local gg, gx
    local shape, places = {}, mf.arange(n, mf._beside(x))
    for d = 0, x.ndim - 1 do shape[d + 1] = d == dim and n or 1 end
    places = places:reshape(shape)
    -- Written out by places, O(n) ops of size n: d^2 y_i / dx_k dx_l is the product of the others.
    for k = 0, n - 1 do
      local one = mf.where(places:eq(k), 1, x)
      local vk = v:narrow(dim, k, 1)
      local without = one:cumprod(dim) -- y_i / x_k for i >= k
      local mask = places:ge(k):to(x.dtype)
      if need.g then gg = gg and gg + without * mask * vk or without * mask * vk end
      if need.x then
        local part = mf._cumprod_backward(o.g * mask * vk, one, dim)
        part = part * places:ne(k):to(x.dtype)
        gx = gx and gx + part or part
      end
    end
    return gg, gx
  end,
}

return grad
