-- Gradients of the pointwise ops; see grad.lua for the form. A NAME_backward op has lines of its
-- own, so that second gradients follow.
local mf = require 'moonflow.core'
local grad = {}

-- Arithmetic

grad.add = {
  a = function(g) return g end,
  b = function(g, _, o) return o.alpha == 1 and g or g * o.alpha end,
}
grad.sub = {
  a = function(g) return g end,
  b = function(g, _, o) return g * -o.alpha end,
}
grad.mul = {
  a = function(g, _, o) return g * o.b end,
  b = function(g, _, o) return g * o.a end,
}
grad.div = {
  a = function(g, _, o) return g / o.b end,
  b = function(g, _, o) return -(g * (o.a / o.b) / o.b) end, -- not of y, so that it may be written in place
}
grad.remainder = {
  a = function(g) return g end,
  b = function(g, _, o) return -(g * mf.floor_divide(o.a, o.b)) end,
}
grad.fmod = {
  a = function(g) return g end,
  b = function(g, _, o) return -(g * mf.trunc(o.a / o.b)) end,
}
grad.square = { x = function(g, _, o) return g * (o.x * 2) end }
grad.neg = { x = function(g) return -g end }

-- b - 1 in the precision of the gradient.
local function less(b, g) return mf._cast(b, g.dtype) - 1 end

grad.pow = {
  a = function(g, _, o) return mf._pow_backward_a(g, o.a, o.b) end,
  b = function(g, _, o) return mf._pow_backward_b(g, o.a, o.b) end,
}
grad.pow_backward_a = {
  x = function(g, _, o) return mf._pow_backward_a(g, o.a, o.b) end,
  a = function(g, _, o)
    return (mf._pow_backward_a(g * o.x, o.a, less(o.b, g)) * o.b):masked_fill(o.b:eq(0), 0)
  end,
  b = function(g, _, o)
    local v, e = g * o.x, less(o.b, g)
    return v * o.a ^ e + o.b * mf._pow_backward_b(v, o.a, e)
  end,
}
grad.pow_backward_b = {
  x = function(g, _, o) return mf._pow_backward_b(g, o.a, o.b) end,
  a = function(g, _, o)
    local v, e = g * o.x, less(o.b, g)
    return v * o.a ^ e + o.b * mf._pow_backward_b(v, o.a, e)
  end,
  b = function(g, _, o) return mf._pow_backward_b(g * o.x, o.a, o.b) * mf.where(o.a:eq(0), 0, o.a:log()) end,
}
grad.maximum = {
  a = function(g, _, o) return mf._maximum_backward(g, o.a, o.b) end,
  b = function(g, _, o) return mf._maximum_backward(g, o.b, o.a) end,
}
grad.minimum = {
  a = function(g, _, o) return mf._maximum_backward(g, o.b, o.a) end,
  b = function(g, _, o) return mf._maximum_backward(g, o.a, o.b) end,
}
grad.maximum_backward = {
  x = function(g, _, o) return mf._maximum_backward(g, o.a, o.b) end,
  a = function() end,
  b = function() end,
}
-- The square of the distance from the origin; at the origin, where atan2 has no slope, 1.
local function distance2(a, b)
  local r = a:square() + b:square()
  return r:masked_fill(r:eq(0), 1)
end
grad.atan2 = {
  a = function(g, _, o) return g * o.b / distance2(o.a, o.b) end,
  b = function(g, _, o) return -(g * o.a) / distance2(o.a, o.b) end,
}
grad.lerp = {
  a = function(g, _, o) return g * (1 - o.weight) end,
  b = function(g, _, o) return g * o.weight end,
}
grad.addcmul = {
  x = function(g) return g end,
  a = function(g, _, o) return g * o.b * o.value end,
  b = function(g, _, o) return g * o.a * o.value end,
}
grad.addcdiv = {
  x = function(g) return g end,
  a = function(g, _, o) return g / o.b * o.value end,
  b = function(g, _, o) return g * o.a / o.b:square() * -o.value end,
}

-- Unary

grad.abs = { x = function(g, _, o) return g * o.x:sign() end }
grad.sign = { x = function(g) return mf.zeros_like(g) end }
grad.floor = { x = function(g) return mf.zeros_like(g) end }
grad.ceil = { x = function(g) return mf.zeros_like(g) end }
grad.trunc = { x = function(g) return mf.zeros_like(g) end }
grad.round = { x = function(g) return mf.zeros_like(g) end }
grad.exp = { x = function(g, y) return g * y end }
grad.exp2 = { x = function(g, y) return g * y * math.log(2) end }
grad.expm1 = { x = function(g, y) return g * (y + 1) end }
grad.log = { x = function(g, _, o) return g / o.x end }
grad.log2 = { x = function(g, _, o) return g / (o.x * math.log(2)) end }
grad.log10 = { x = function(g, _, o) return g / (o.x * math.log(10)) end }
grad.log1p = { x = function(g, _, o) return g / (o.x + 1) end }
grad.sqrt = { x = function(g, y) return g / (y * 2) end }
grad.rsqrt = { x = function(g, y) return g * y ^ 3 * -0.5 end }
grad.reciprocal = { x = function(g, y) return -g * y:square() end }
grad.sin = { x = function(g, _, o) return g * o.x:cos() end }
grad.cos = { x = function(g, _, o) return -g * o.x:sin() end }
grad.tan = { x = function(g, y) return g * (y:square() + 1) end }
grad.asin = { x = function(g, _, o) return g * (1 - o.x:square()):rsqrt() end }
grad.acos = { x = function(g, _, o) return -g * (1 - o.x:square()):rsqrt() end }
grad.atan = { x = function(g, _, o) return g / (o.x:square() + 1) end }
grad.sinh = { x = function(g, _, o) return g * o.x:cosh() end }
grad.cosh = { x = function(g, _, o) return g * o.x:sinh() end }
grad.tanh = { x = function(g, y) return mf._tanh_backward(g, y) end }
grad.tanh_backward = {
  a = function(g, _, o) return mf._tanh_backward(g, o.b) end,
  b = function(g, _, o) return g * o.a * o.b * -2 end,
}
grad.asinh = { x = function(g, _, o) return g * (o.x:square() + 1):rsqrt() end }
grad.acosh = { x = function(g, _, o) return g * (o.x:square() - 1):rsqrt() end }
grad.atanh = { x = function(g, _, o) return g / (1 - o.x:square()) end }
grad.erf = { x = function(g, _, o) return g * (-o.x:square()):exp() * (2 / math.sqrt(math.pi)) end }
grad.erfc = { x = function(g, _, o) return g * (-o.x:square()):exp() * (-2 / math.sqrt(math.pi)) end }

-- Activations. In the NAME_backward ops a is the incoming gradient, b the activation's input (its
-- output for relu, sigmoid, tanh).

grad.relu = { x = function(g, y) return mf._relu_backward(g, y) end }
grad.relu_backward = {
  a = function(g, _, o) return mf._relu_backward(g, o.b) end,
  b = function() end,
}
grad.sigmoid = { x = function(g, y) return mf._sigmoid_backward(g, y) end }
grad.sigmoid_backward = {
  a = function(g, _, o) return mf._sigmoid_backward(g, o.b) end,
  b = function(g, _, o) return g * o.a * (1 - o.b * 2) end,
}
grad.silu = { x = function(g, _, o) return mf._silu_backward(g, o.x) end }
grad.silu_backward = {
  a = function(g, _, o) return mf._silu_backward(g, o.b) end,
  b = function(g, _, o)
    local s = o.b:sigmoid()
    return g * o.a * s * (1 - s) * (o.b * (1 - s * 2) + 2)
  end,
}
grad.gelu = { x = function(g, _, o) return mf._gelu_backward(g, o.x, { approximate = o.approximate }) end }
grad.gelu_backward = {
  a = function(g, _, o) return mf._gelu_backward(g, o.b, { approximate = o.approximate }) end,
  b = function(g, _, o)
    local b, b2, v = o.b, o.b:square(), g * o.a
    if o.approximate == 'none' then return v * (2 - b2) * (b2 * -0.5):exp() * (1 / math.sqrt(2 * math.pi)) end
    local k, c = math.sqrt(2 / math.pi), 0.044715
    local t = ((b + b2 * b * c) * k):tanh()
    local w, u1, u2 = 1 - t:square(), (b2 * (3 * c) + 1) * k, b * (6 * k * c)
    return v * (w * u1 + b * 0.5 * w * (u2 - t * u1:square() * 2))
  end,
}
grad.softplus = { x = function(g, _, o)
  return mf._softplus_backward(g, o.x, { beta = o.beta, threshold = o.threshold })
end }
grad.softplus_backward = {
  a = function(g, _, o) return mf._softplus_backward(g, o.b, { beta = o.beta, threshold = o.threshold }) end,
  b = function(g, _, o)
    local v = o.b * o.beta
    local s = v:sigmoid()
    return mf.where(v:gt(o.threshold), 0, g * o.a * s * (1 - s) * o.beta)
  end,
}
grad.leaky_relu = { x = function(g, _, o) return mf._leaky_relu_backward(g, o.x, o.negative_slope) end }
grad.leaky_relu_backward = {
  a = function(g, _, o) return mf._leaky_relu_backward(g, o.b, o.negative_slope) end,
  b = function() end,
}
grad.prelu_kernel = {
  a = function(g, _, o) return mf._prelu_backward(g, o.a, o.b) end,
  b = function(g, _, o) return mf._prelu_weight_backward(g, o.a) end,
}
grad.prelu_backward = {
  x = function(g, _, o) return mf._prelu_backward(g, o.a, o.b) end,
  a = function() end,
  b = function(g, _, o) return mf.where(o.a:gt(0), 0, g * o.x) end,
}
grad.prelu_weight_backward = {
  a = function(g, _, o) return mf._prelu_weight_backward(g, o.b) end,
  b = function(g, _, o) return mf.where(o.b:gt(0), 0, g * o.a) end,
}
local selu = { alpha = 1.6732632423543772848170429916717, scale = 1.0507009873554804934193349852946 }
grad.elu = { x = function(g, _, o) return mf._elu_backward(g, o.x, { alpha = o.alpha }) end }
grad.celu = { x = function(g, _, o) return mf._elu_backward(g, o.x, { alpha = o.alpha, beta = 1 / o.alpha }) end }
grad.selu = { x = function(g, _, o) return mf._elu_backward(g, o.x, selu) end }
grad.elu_backward = {
  a = function(g, _, o) return mf._elu_backward(g, o.b, { alpha = o.alpha, beta = o.beta, scale = o.scale }) end,
  b = function(g, _, o)
    return mf.where(o.b:gt(0), 0, g * o.a * (o.b * o.beta):exp() * (o.scale * o.alpha * o.beta * o.beta))
  end,
}
grad.mish = { x = function(g, _, o) return mf._mish_backward(g, o.x) end }
grad.mish_backward = {
  a = function(g, _, o) return mf._mish_backward(g, o.b) end,
  b = function(g, _, o)
    local t, s = o.b:softplus():tanh(), o.b:sigmoid()
    return g * o.a * (1 - t:square()) * s * (o.b * (1 - s - t * s * 2) + 2)
  end,
}
grad.clamp = { x = function(g, _, o) return mf._clamp_backward(g, o.x, { min = o.min, max = o.max }) end }
grad.clamp_backward = {
  a = function(g, _, o) return mf._clamp_backward(g, o.b, { min = o.min, max = o.max }) end,
  b = function() end,
}
grad.threshold = { x = function(g, _, o) return mf._inside_backward(g, o.x, { min = o.threshold }) end }
grad.hardtanh = { x = function(g, _, o) return mf._inside_backward(g, o.x, { min = o.min_val, max = o.max_val }) end }
grad.relu6 = { x = function(g, _, o) return mf._inside_backward(g, o.x, { min = 0, max = 6 }) end }
grad.hardsigmoid = { x = function(g, _, o) return mf._inside_backward(g / 6, o.x, { min = -3, max = 3 }) end }
grad.inside_backward = {
  a = function(g, _, o) return mf._inside_backward(g, o.b, { min = o.min, max = o.max }) end,
  b = function() end,
}
grad.softshrink = { x = function(g, _, o) return mf._shrink_backward(g, o.x, o.lambd) end }
grad.hardshrink = { x = function(g, _, o) return mf._shrink_backward(g, o.x, o.lambd) end }
grad.shrink_backward = {
  a = function(g, _, o) return mf._shrink_backward(g, o.b, o.lambd) end,
  b = function() end,
}
grad.logsigmoid = { x = function(g, _, o) return mf._logsigmoid_backward(g, o.x) end }
grad.logsigmoid_backward = {
  a = function(g, _, o) return mf._logsigmoid_backward(g, o.b) end,
  b = function(g, _, o)
    local s = o.b:sigmoid()
    return g * o.a * s * (s - 1)
  end,
}
grad.hardswish = { x = function(g, _, o) return mf._hardswish_backward(g, o.x) end }
grad.hardswish_backward = {
  a = function(g, _, o) return mf._hardswish_backward(g, o.b) end,
  b = function(g, _, o) return mf._inside_backward(g * o.a / 3, o.b, { min = -3, max = 3 }) end,
}
grad.softsign = { x = function(g, _, o) return mf._softsign_backward(g, o.x) end }
grad.softsign_backward = {
  a = function(g, _, o) return mf._softsign_backward(g, o.b) end,
  b = function(g, _, o) return g * o.a * o.b:sign() * -2 / (o.b:abs() + 1) ^ 3 end,
}
grad.tanhshrink = { x = function(g, _, o) return g * o.x:tanh():square() end }

-- Choices

grad.where = {
  a = function(g, _, o) return mf.where(o.c, g, 0) end,
  b = function(g, _, o) return mf.where(o.c, 0, g) end,
}
grad.masked_fill = {
  x = function(g, _, o) return g:masked_fill(o.mask, 0) end,
  value = function(g, _, o) return mf.where(o.mask, g, 0) end,
}

return grad
