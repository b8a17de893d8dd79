-- Gradients of softmax and the normalisations; see grad.lua for the form.
local mf = require 'moonflow.core'
local grad = {}

grad.softmax = { x = function(g, y, o) return mf._softmax_backward(g, y, o.dim) end }
grad.softmax_backward = {
  g = function(v, _, o) return mf._softmax_backward(v, o.y, o.dim) end,
  y = function(v, _, o)
    local g, y, dim = o.g, o.y, o.dim
    return v * (g - (g * y):sum(dim, true)) - g * (v * y):sum(dim, true)
  end,
}
grad.log_softmax = { x = function(g, y, o) return mf._log_softmax_backward(g, y, o.dim) end }
grad.log_softmax_backward = {
  g = function(v, _, o) return v - (v * o.y:exp()):sum(o.dim, true) end,
  y = function(v, _, o) return -v * o.y:exp() * o.g:sum(o.dim, true) end,
}

-- Second gradients, from which all further ones follow. With xh the normalised x, r = 1 / sqrt(var
-- + eps), h = g w and the projection P(v) = v - mean(v) - xh mean(v xh), the first gradients are gx
-- = r P(h), gw = sum g xh, gb = sum g. Given the gradients G, Gw, Gb of those (nil: none), returns
-- the gradients for g, x and w (the last not yet summed). `mean` takes the mean over what is
-- normalised; w is broadcast against x.
local function second(G, Gw, Gb, g, x, w, mean, eps, centre)
  local xc = centre and x - mean(x) or x
  local r = (mean(xc:square()) + eps):rsqrt()
  local xh = xc * r
  local function project(v)
    local p = v - xh * mean(v * xh)
    return centre and p - mean(v) or p
  end
  local dg, dx, dw
  local function add(a, b) return a and a + b or b end
  if G then
    local h = w and g * w or g
    local p, mG, mh = project(G), mean(G * xh), mean(h * xh)
    local all = mean(G * h) - mG * mh
    if centre then all = all - mean(G) * mean(h) end
    local dh = p * r
    dx = -(r * r) * (xh * all + p * mh + project(h) * mG)
    dg, dw = w and dh * w or dh, w and dh * g
  end
  if Gw then
    dg, dx = add(dg, Gw * xh), add(dx, project(Gw * g) * r)
  end
  if Gb then dg = add(dg, Gb + mf.zeros_like(g)) end
  return dg, dx, dw
end

-- The mean over the last n dims.
local function mean_last(n)
  local dims = {}
  for k = 1, n do dims[k] = -k end
  return function(v) return v:mean(dims, true) end
end

grad.layer_norm = {
  ['x,weight,bias'] = function(g, need, _, o)
    local params = need.weight or need.bias or false
    local gx, gw, gb = mf._layer_norm_backward(g, o.x, o.normalized_shape, o.weight, params, o.eps)
    return gx, need.weight and gw or nil, need.bias and gb or nil
  end,
}
grad.layer_norm_backward = {
  ['g,x,weight'] = function(v, _, _, o)
    return second(v.x, o.params and v.weight, o.params and v.bias, o.g, o.x, o.weight,
      mean_last(#o.normalized_shape), o.eps, true)
  end,
}
grad.rms_norm = {
  ['x,weight'] = function(g, need, _, o)
    local gx, gw = mf._rms_norm_backward(g, o.x, o.normalized_shape, o.weight, need.weight or false, o.eps)
    return gx, need.weight and gw or nil
  end,
}
grad.rms_norm_backward = {
  ['g,x,weight'] = function(v, _, _, o)
    local eps = o.eps or (o.x.dtype == mf.float64 and 2 ^ -52 or 2 ^ -23)
    return second(v.x, o.params and v.weight, nil, o.g, o.x, o.weight, mean_last(#o.normalized_shape), eps, false)
  end,
}

grad.group_norm = {
  ['x,weight,bias'] = function(g, need, _, o)
    local params = need.weight or need.bias or false
    local gx, gw, gb = mf._group_norm_backward(g, o.x, o.num_groups, o.weight, params, o.eps)
    return gx, need.weight and gw or nil, need.bias and gb or nil
  end,
}
grad.group_norm_backward = {
  ['g,x,weight'] = function(v, _, _, o)
    local x, groups = o.x, o.num_groups
    local n, channels = x.shape[1], x.shape[2]
    local inner = 1
    for d = 3, #x.shape do inner = inner * x.shape[d] end
    local function grouped(t) return t and t:reshape(n, groups, channels / groups, inner) end
    local function channel(t) return t and t:reshape(1, groups, channels / groups, 1) end
    local dg, dx, dw = second(grouped(v.x), channel(o.params and v.weight or nil),
      channel(o.params and v.bias or nil), grouped(o.g), grouped(x), channel(o.weight), mean_last(2), o.eps, true)
    return dg and dg:reshape(x.shape), dx and dx:reshape(x.shape), dw and dw:sum({ 0, 3 }):reshape(channels)
  end,
}

grad.batch_norm = {
  ['x,weight,bias'] = function(g, need, y, o)
    local params = need.weight or need.bias or false
    local gx, gw, gb = mf._batch_norm_backward(g.y, o.x, y.mean, y.rstd, o.weight, o.training, params)
    return gx, need.weight and gw or nil, need.bias and gb or nil
  end,
}
grad.batch_norm_backward = {
  ['g,x,mean,rstd,weight'] = function(v, _, _, o)
    local x, w, r = o.x, o.weight, o.rstd
    local shape, others = {}, {}
    for d = 1, #x.shape do shape[d] = d == 2 and x.shape[2] or 1 end
    for d = 0, #x.shape - 1 do if d ~= 1 then others[#others + 1] = d end end
    local function channel(t) return t and t:reshape(shape) end
    local Gw, Gb = channel(o.params and v.weight or nil), channel(o.params and v.bias or nil)
    local dg, dx, dw
    if o.training then -- as functions of x alone: mean and rstd are made of it
      local function mean(t) return t:mean(others, true) end
      local m, c = mean(x), channel(r)
      local eps = mf.no_grad(function() return c:square():reciprocal() - mean((x - m):square()) end)
      dg, dx, dw = second(v.x, Gw, Gb, o.g, x, channel(w), mean, eps, true)
    else
      local c = channel(r)
      local xh = (x - channel(o.mean)) * c
      if v.x then
        dg = w and v.x * (channel(w) * c) or v.x * c
        dw = w and v.x * o.g * c
      end
      if Gw then
        dg, dx = dg and dg + Gw * xh or Gw * xh, Gw * o.g * c
      end
      if Gb then dg = dg and dg + Gb or Gb + mf.zeros_like(o.g) end
    end
    return dg, dx, nil, nil, dw and dw:sum(others)
  end,
}

return grad
