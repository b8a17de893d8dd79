-- Gradients of matrix products, convolution, pooling and attention; see grad.lua for the form.
local mf = require 'moonflow.core'
local grad = {}

-- Matrix products. 1-d operands: a row for a, a column for b.
grad.matmul = {
  a = function(g, _, o)
    local b = o.b
    if b:dim() == 1 then return g:unsqueeze(-1) * b end
    if #o.shape.a == 1 then return b:matmul(g:unsqueeze(-1)):squeeze(-1) end
    return g:matmul(b:transpose(-2, -1))
  end,
  b = function(g, _, o)
    local a, n = o.a, #o.shape.b
    if a:dim() == 1 then return n == 1 and g * a or a:unsqueeze(-1) * g:unsqueeze(-2) end
    if n == 1 then return mf._linear_weight(g:unsqueeze(-1), a):squeeze(0) end
    if n == 2 then return mf._linear_weight(a, g) end
    return a:transpose(-2, -1):matmul(g)
  end,
}
grad.bmm = {
  a = function(g, _, o) return g:bmm(o.b:transpose(1, 2)) end,
  b = function(g, _, o) return o.a:transpose(1, 2):bmm(g) end,
}
grad.addmm = {
  c = function(g, _, o) return g * o.beta end,
  a = function(g, _, o) return g:matmul(o.b:t()) * o.alpha end,
  b = function(g, _, o) return o.a:t():matmul(g) * o.alpha end,
}
grad.linear = {
  x = function(g, _, o) return g:matmul(o.w) end,
  w = function(g, _, o) return mf._linear_weight(g, o.x) end,
  b = function(g) return g end,
}
grad.linear_weight = {
  g = function(g, _, o) return mf.linear(o.x, g) end,
  x = function(g, _, o) return o.g:matmul(g) end,
}

-- Convolution: each of the three is linear in both operands, and the gradient of each is made of the others.
grad.conv2d = {
  x = function(g, _, o)
    local s = o.shape.x
    return mf._conv2d_input(g, o.w, { size = { s[#s - 1], s[#s] }, stride = o.stride, padding = o.padding,
      dilation = o.dilation, groups = o.groups })
  end,
  ['w,b'] = function(g, need, _, o)
    local how = { stride = o.stride, padding = o.padding, dilation = o.dilation, groups = o.groups }
    if not need.b then return mf._conv2d_weight(g, o.x, o.w, how) end
    return mf._conv2d_weight_bias(g, o.x, o.w, how)
  end,
}
grad.conv2d_input = {
  g = function(g, _, o)
    return mf.conv2d(g, o.w, nil, { stride = o.stride, padding = o.padding, dilation = o.dilation, groups = o.groups })
  end,
  w = function(g, _, o)
    return mf._conv2d_weight(o.g, g, o.w, { stride = o.stride, padding = o.padding, dilation = o.dilation,
      groups = o.groups })
  end,
}
grad.conv2d_weight = {
  g = function(g, _, o)
    return mf.conv2d(o.x, g, nil, { stride = o.stride, padding = o.padding, dilation = o.dilation, groups = o.groups })
  end,
  x = function(g, _, o)
    local s = o.shape.x
    return mf._conv2d_input(o.g, g, { size = { s[#s - 1], s[#s] }, stride = o.stride, padding = o.padding,
      dilation = o.dilation, groups = o.groups })
  end,
  w = function() return nil end,
}
grad.conv2d_weight_bias = {
  g = function(g, _, o)
    if not g.w then return g.b:view(-1, 1, 1):expand(o.shape.g) end
    return mf.conv2d(o.x, g.w, g.b, { stride = o.stride, padding = o.padding, dilation = o.dilation,
      groups = o.groups })
  end,
  x = function(g, _, o)
    local s = o.shape.x
    if not g.w then return nil end
    return mf._conv2d_input(o.g, g.w, { size = { s[#s - 1], s[#s] }, stride = o.stride, padding = o.padding,
      dilation = o.dilation, groups = o.groups })
  end,
  w = function() return nil end,
}

-- Pooling
grad.max_pool2d = {
  x = function(g, _, o)
    return mf._max_pool2d_backward(g, o.x, o.kernel_size, o.stride, o.padding, o.dilation, o.ceil_mode)
  end,
}
grad.max_pool2d_backward = {
  g = function(g, _, o)
    return mf._max_pool2d_pick(g, o.x, o.kernel_size, o.stride, o.padding, o.dilation, o.ceil_mode)
  end,
  x = function() return nil end, -- where the maximum is does not change by a little
}
grad.max_pool2d_pick = {
  v = function(g, _, o)
    return mf._max_pool2d_backward(g, o.x, o.kernel_size, o.stride, o.padding, o.dilation, o.ceil_mode)
  end,
  x = function() return nil end,
}
grad.avg_pool2d = {
  x = function(g, _, o)
    local s = o.shape.x
    return mf._avg_pool2d_backward(g, { s[#s - 1], s[#s] }, o.kernel_size, o.stride, o.padding, o.ceil_mode,
      o.count_include_pad, o.divisor_override)
  end,
}
grad.avg_pool2d_backward = {
  g = function(g, _, o)
    return mf.avg_pool2d(g, o.kernel_size, o.stride, o.padding, o.ceil_mode, o.count_include_pad, o.divisor_override)
  end,
}
grad.adaptive_avg_pool2d = {
  x = function(g, _, o)
    local s = o.shape.x
    return mf._adaptive_avg_pool2d_backward(g, { s[#s - 1], s[#s] })
  end,
}
grad.adaptive_avg_pool2d_backward = {
  g = function(g, _, o)
    local s = o.shape.g
    return mf.adaptive_avg_pool2d(g, { s[#s - 1], s[#s] })
  end,
}

-- Attention. What its second gradient needs of the first pass is computed anew, with the whole matrix of weights.
grad.attention = {
  ['q,k,v'] = function(g, _, y, o)
    if not g.y then return nil end
    return mf._attention_backward(o.q, o.k, o.v, g.y, y.y, y.lse, o.mask, { is_causal = o.is_causal, scale = o.scale })
  end,
}
grad.attention_backward = {
  ['q,k,v,g,y,lse'] = function(c, _, _, o) -- y and lse are functions of q, k, v: all that is due goes there
    local q, k, v, g, s = o.q, o.k, o.v, o.g, o.scale
    local function t(x) return x:transpose(-2, -1) end
    local function total(x) return x:sum(-1, { keepdim = true }) end
    local p = mf._attention_weights(q, k, o.mask, o.is_causal, s)
    local dp = g:matmul(t(v))
    local centred = dp - total(p * dp)
    local ds = p * centred
    local a, b = c.q or mf.zeros_like(q), c.k or mf.zeros_like(k)
    local gds = (a:matmul(t(k)) + q:matmul(t(b))) * s
    local r = total(p * gds)
    local gdp, gp = p * (gds - r), gds * centred - r * dp
    if c.v then gp = gp + g:matmul(t(c.v)) end
    local gs = p * (gp - total(p * gp))
    local gq, gk = (gs:matmul(k) + ds:matmul(b)) * s, (t(gs):matmul(q) + t(ds):matmul(a)) * s
    local gg = gdp:matmul(v)
    if c.v then gg = gg + p:matmul(c.v) end
    return gq, gk, t(gdp):matmul(g), gg
  end,
}

return grad
