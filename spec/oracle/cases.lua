-- Calls of every op for the oracle. An op without an entry gets cases made from its signature:
-- float tensors of one shape, broadcast shapes for pointwise ops, every choice of a choice. Where
-- that does not run, an entry is missing and the oracle fails.
--
-- An entry is a function of Values `v` and `add`; add{...} takes the arguments of a call by name.
-- Sizes v.B may be 0 and v.L large. A field `smooth = false` marks a call whose gradient is not its
-- slope, by definition of the op.
local mf = require 'moonflow'
local Values = require 'spec.oracle.values'
local cases, domain = {}, {}

-- Where functions are defined, or stay small enough for finite differences.
for name, range in pairs {
  log = { .1, 4 }, log2 = { .1, 4 }, log10 = { .1, 4 }, log1p = { -.5, 3 }, sqrt = { .1, 4 }, rsqrt = { .1, 4 },
  reciprocal = { .3, 3 }, asin = { -.9, .9 }, acos = { -.9, .9 }, atanh = { -.9, .9 }, acosh = { 1.1, 4 },
    tan = { -1, 1 },
} do
  domain[name] = range
end

-- -- Pointwise ------------------------------------------------------------------------------------

-- Two operands where the second stays away from 0.
local function division(v, add)
  add { a = v:n(v.B, 5 * v.L), b = v:u(.5, 2, v.B, 5 * v.L) }
  add { a = v:n(v.B, 1, 3), b = v:u(.5, 2, 2, 1) }
  add { a = v:n(v.B, 3), b = 1.5 }
  add { a = 2.25, b = v:u(.5, 2, v.B, 3) }
end
cases.div, cases.remainder, cases.fmod = division, division, division
function cases.floor_divide(v, add) -- a fraction of doubles may be whole in floats
  add { a = v:n(v.B, 5), b = v:u(.5, 2, v.B, 5) }
  add { a = v:i(-9, 9, v.B, 5), b = v:i(1, 5, 5) }
end
function cases.pow(v, add)
  add { a = v:u(.3, 2, v.B, 4 * v.L), b = v:n(v.B, 4 * v.L) }
  add { a = v:u(.3, 2, v.B, 1, 3), b = v:n(2, 1) }
  add { a = v:n(v.B, 3), b = 2 }
  add { a = v:n(v.B, 3), b = 3 }
  add { a = v:u(.3, 2, v.B, 3), b = 0.5 }
  add { a = v:u(.3, 2, v.B, 3), b = -1 }
  add { a = 2, b = v:n(v.B, 3) }
end
local function pow_backward(v, add)
  add { x = v:n(v.B, 4), a = v:u(.3, 2, v.B, 4), b = v:n(v.B, 4) }
  add { x = v:n(v.B, 2, 3), a = v:u(.3, 2, 2, 1), b = v:n(3) }
end
cases.pow_backward_a, cases.pow_backward_b = pow_backward, pow_backward
function cases.addcdiv(v, add)
  add { x = v:n(v.B, 4), a = v:n(v.B, 4), b = v:u(.5, 2, v.B, 4) }
  add { x = v:n(3), a = v:n(v.B, 2, 3), b = v:u(.5, 2, 2, 1), value = 0.5 }
end
function cases.addcmul(v, add)
  add { x = v:n(v.B, 4), a = v:n(v.B, 4), b = v:n(v.B, 4) }
  add { x = v:n(3), a = v:n(v.B, 2, 3), b = v:n(2, 1), value = 0.5 }
end
function cases.add(v, add)
  add { a = v:n(v.B, 5 * v.L), b = v:n(v.B, 5 * v.L) }
  add { a = v:n(v.B, 1, 3), b = v:n(2, 1), alpha = 0.3 }
  add { a = v:n(v.B, 3), b = 1.25 }
  add { a = 1.25, b = v:n(v.B, 3), alpha = 3 }
end
cases.sub = cases.add
function cases.lerp(v, add)
  add { a = v:n(v.B, 4), b = v:n(v.B, 4), weight = 0.3 }
  add { a = v:n(v.B, 1, 3), b = v:n(2, 1), weight = 1.5 }
end
function cases.atan2(v, add)
  add { a = v:n(v.B, 4), b = v:n(v.B, 4) }
  add { a = v:n(v.B, 1, 3), b = v:n(2, 1) }
end
function cases.clamp(v, add)
  add { x = v:n(v.B, 5 * v.L), min = -0.5, max = 0.75 }
  add { x = v:n(v.B, 5), min = 0.25 }
  add { x = v:n(v.B, 5), max = 0.25 }
  add { x = v:n(v.B, 5), min = 0.75, max = -0.5 }
end
function cases.clamp_backward(v, add)
  add { a = v:n(v.B, 5), b = v:n(v.B, 5), min = -0.5, max = 0.75 }
  add { a = v:n(v.B, 5), b = v:n(v.B, 5), min = 0.25 }
end
function cases.inside_backward(v, add) add { a = v:n(v.B, 5), b = v:n(v.B, 5), min = -0.5, max = 0.75 } end
function cases.threshold(v, add) add { x = v:n(v.B, 5), threshold = 0.25, value = 3 } end
function cases.hardtanh(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(v.B, 5), min_val = -0.25, max_val = 1.25 }
end
cases.relu6 = function(v, add) add { x = v:u(-8, 8, v.B, 5) } end
cases.hardsigmoid = function(v, add) add { x = v:u(-4, 4, v.B, 5) } end
cases.hardswish, cases.logsigmoid = cases.hardsigmoid, cases.relu6
cases.hardswish_backward = function(v, add) add { a = v:n(v.B, 5), b = v:u(-4, 4, v.B, 5) } end
cases.mish = cases.relu6
function cases.softplus(v, add)
  add { x = v:n(v.B, 5 * v.L) }
  add { x = v:u(-8, 8, v.B, 5), beta = 2, threshold = 5 }
end
function cases.softplus_backward(v, add)
  add { a = v:n(v.B, 5), b = v:n(v.B, 5) }
  add { a = v:n(v.B, 5), b = v:u(-8, 8, v.B, 5), beta = 2, threshold = 5 }
end
function cases.leaky_relu(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(v.B, 5), negative_slope = 0.2 }
end
function cases.leaky_relu_backward(v, add) add { a = v:n(v.B, 5), b = v:n(v.B, 5), negative_slope = 0.2 } end
function cases.elu(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(v.B, 5), alpha = 0.7 }
end
cases.celu = cases.elu
function cases.elu_backward(v, add)
  add { a = v:n(v.B, 5), b = v:n(v.B, 5) }
  add { a = v:n(v.B, 5), b = v:n(v.B, 5), alpha = 0.7, beta = 1.5, scale = 1.25 }
end
function cases.softshrink(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(v.B, 5), lambd = 0.25 }
end
cases.hardshrink = cases.softshrink
function cases.shrink_backward(v, add) add { a = v:n(v.B, 5), b = v:n(v.B, 5), lambd = 0.25 } end
function cases.prelu_kernel(v, add)
  add { a = v:n(v.B, 3, 2), b = v:u(.1, .5, 3, 1) }
end
function cases.prelu_backward(v, add) add { x = v:n(v.B, 3), a = v:n(v.B, 3), b = v:u(.1, .5, 3) } end
function cases.where(v, add)
  add { c = v:b(v.B, 5), a = v:n(v.B, 5), b = v:n(v.B, 5) }
  add { c = v:b(2, 1), a = v:n(v.B, 1, 3), b = v:n(3) }
  add { c = v:b(v.B, 3), a = 1.5, b = v:n(v.B, 3) }
end
function cases.masked_fill(v, add)
  add { x = v:n(v.B, 5), mask = v:b(v.B, 5), value = 1.5 }
  add { x = v:n(v.B, 2, 3), mask = v:b(2, 1), value = v:u(0, 1) }
end
local function whole(v, add)
  add { a = v:i(0, 64, v.B, 5), b = v:i(0, 64, v.B, 5) }
  add { a = v:i(0, 64, v.B, 1, 3), b = v:i(0, 64, 2, 1) }
  add { a = v:b(v.B, 5), b = v:b(5) }
  add { a = v:i(0, 64, v.B, 5), b = 21 }
end
cases.bitwise_and, cases.bitwise_or, cases.bitwise_xor = whole, whole, whole
function cases.bitwise_not(v, add)
  add { x = v:i(-9, 9, v.B, 5) }
  add { x = v:b(v.B, 5) }
end
local function comparison(v, add)
  add { a = v:i(0, 3, v.B, 5), b = v:i(0, 3, v.B, 5) }
  add { a = v:n(v.B, 1, 3), b = v:n(2, 1) }
  add { a = v:i(0, 3, v.B, 5), b = 1 }
  add { a = v:b(v.B, 5), b = v:b(5) }
end
for _, name in ipairs { 'eq', 'ne', 'lt', 'le', 'gt', 'ge', 'logical_and', 'logical_or', 'logical_xor' } do
  cases[name] = comparison
end

-- -- Copies, factories ----------------------------------------------------------------------------

function cases.clone(v, add)
  add { x = v:n(v.B, 3, 2 * v.L) }
  add { x = v:n(v.B, 3):t(), memory_format = 'contiguous' }
  add { x = v:n(v.B, 3, 2, 2), memory_format = 'channels_last' }
end
function cases.cast(v, add)
  for _, dtype in ipairs { 'float32', 'float64', 'float16', 'bfloat16', 'int64', 'int32', 'int16', 'int8', 'uint8',
    'bool' } do
    add { x = dtype == 'uint8' and v:u(0, 8, v.B, 5) or v:u(-8, 8, v.B, 5), dtype = dtype }
  end
  add { x = v:i(-9, 9, v.B, 5), dtype = 'float32' }
  add { x = v:b(v.B, 5), dtype = 'int8' }
end
cases['copy_'] = function(v, add)
  add { x = v:n(v.B, 3), src = v:n(v.B, 3) }
  add { x = v:n(v.B, 2, 3), src = v:n(2, 1) }
  add { x = v:n(v.B, 3), src = v:i(0, 9, 3) }
  add { x = v:n(v.B, 3), src = 2.5 }
end
cases['fill_'] = function(v, add) add { x = v:n(v.B, 3), value = 2.5 } end
local function sized(v, add)
  add { size = { v.B, 3 }, dtype = v.dtype }
  add { size = {} }
end
cases.zeros, cases.ones, cases.empty = sized, sized, sized
function cases.full(v, add) add { size = { v.B, 3 }, fill_value = 2.5, dtype = v.dtype } end
function cases.full_like(v, add) add { x = v:n(v.B, 3), fill_value = 2.5 } end
function cases.arange(v, add)
  add { start = 5 }
  add { start = -1, ['end'] = 2.5, step = 0.5, dtype = v.dtype }
end
function cases.linspace(v, add) add { start = -1, ['end'] = 3, steps = 7, dtype = v.dtype } end
function cases.logspace(v, add) add { start = -1, ['end'] = 1, steps = 5, base = 2, dtype = v.dtype } end
function cases.eye(v, add)
  add { n = 3, dtype = v.dtype }
  add { n = 3, m = 5 }
end
function cases.merge_ids(v, add)
  add { x = v:i(0, 4, v.B * v.L) }
  add { x = v:i(0, 5000, 7) }
end
cases.merge_ids_padded = cases.merge_ids
function cases.slice_base(v, add)
  add { x = v:n(4, 3), base_stride = { 3, 1 }, size = { 2, 3 }, stride = { 6, 1 }, offset = 3 }
  add { x = v:n(4, 3), base_stride = { 1, 4 }, size = { 2, 3 }, stride = { 2, 4 }, offset = 1 }
  add { x = v:n(4, 3), base_stride = { 3, 1 }, size = { 3, 2, 2 }, stride = { 0, 3, 1 }, offset = 2 }
end
function cases.scatter_base(v, add)
  add { x = v:n(4, 3), src = v:n(2, 3), base_stride = { 3, 1 }, src_size = { 2, 3 }, stride = { 6, 1 }, offset = 3 }
end

-- Of one micro-batch, or of the first: what the others add is a matter of the compiler's specs.
function cases.micro_mean(v, add)
  add { x = v:n(v.B, 3), n = 1 }
  add { x = v:n(v.B, 3), n = 4, at = 0 }
end
function cases.micro_pack(v, add)
  add { x = v:n(v.B, 3), n = 1 }
  add { x = v:n(), n = 1 }
end
function cases.micro_unpack(v, add)
  add { x = v:n(4, 3), n = 2, at = 1 }
  add { x = v:n(6), n = 3 }
end

-- -- Views ----------------------------------------------------------------------------------------

local function reshaped(v, add)
  add { x = v:n(v.B, 4, 6), size = { v.B, 24 } }
  add { x = v:n(v.B, 4, 6), size = { v.B, 4, 2, 3 } }
  add { x = v:n(4, 6), size = { -1 } }
  add { x = v:n(v.B, 1, 5), size = { 1, v.B, 5 } }
end
cases.view, cases.reshape = reshaped, reshaped
function cases.flatten(v, add)
  add { x = v:n(v.B, 4, 3) }
  add { x = v:n(v.B, 4, 3), start_dim = 1 }
  add { x = v:n(v.B, 4, 3, 2), start_dim = 0, end_dim = 1 }
end
function cases.unflatten(v, add) add { x = v:n(v.B, 6, 5), dim = 1, sizes = { 2, -1 } } end
function cases.squeeze(v, add)
  add { x = v:n(v.B, 1, 5, 1) }
  add { x = v:n(v.B, 1, 5, 1), dim = 1 }
  add { x = v:n(v.B, 1, 5, 1), dim = { 0, 1, -1 } }
end
function cases.unsqueeze(v, add)
  add { x = v:n(v.B, 5), dim = 0 }
  add { x = v:n(v.B, 5), dim = -1 }
end
function cases.permute(v, add) add { x = v:n(v.B, 3, 5), dims = { 2, 0, 1 } } end
function cases.transpose(v, add) add { x = v:n(v.B, 3, 5), dim0 = 0, dim1 = -1 } end
function cases.t(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(5) }
end
function cases.movedim(v, add)
  add { x = v:n(v.B, 3, 5), source = 0, destination = 2 }
  add { x = v:n(v.B, 3, 5), source = { 0, 1 }, destination = { -1, 0 } }
end
function cases.expand(v, add)
  add { x = v:n(v.B, 1, 5), size = { 2, v.B, 3, -1 } }
  add { x = v:n(v.B, 5), size = { v.B, 5 } }
end
function cases.broadcast_to(v, add) add { x = v:n(v.B, 1, 5), size = { 2, v.B, 3, 5 } } end
function cases.narrow(v, add)
  add { x = v:n(v.B, 6), dim = 1, start = 1, length = 3 }
  add { x = v:n(v.B, 6), dim = -1, start = 0, length = 6 }
end
function cases.slice(v, add)
  add { x = v:n(v.B, 7), dim = 1, start = 1, stop = 6, step = 2 }
  add { x = v:n(v.B, 7), dim = -1, start = -3 }
end
function cases.slice_backward(v, add) add { g = v:n(v.B, 3), size = { v.B, 7 }, dim = 1, start = 1, step = 2 } end
function cases.select(v, add)
  add { x = v:n(v.B, 3, 5), dim = 1, index = -1 }
  add { x = v:n(3, v.B), dim = 0, index = 1 }
end
function cases.diagonal(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(v.B, 4, 5), offset = 1, dim1 = 1, dim2 = 2 }
  add { x = v:n(4, v.B, 5), offset = -1, dim1 = -1, dim2 = 0 }
end
function cases.diagonal_backward(v, add)
  add { g = v:n(v.B, 4), size = { v.B, 4, 5 }, offset = 1, dim1 = 1, dim2 = 2 }
end
function cases.split(v, add)
  add { x = v:n(v.B, 7), split_size = 3, dim = 1 }
  add { x = v:n(v.B, 7), split_size = { 2, 5 }, dim = -1 }
end
function cases.chunk(v, add) add { x = v:n(v.B, 7), chunks = 3, dim = 1 } end
function cases.unbind(v, add)
  add { x = v:n(v.B, 3), dim = 1 }
  add { x = v:n(3, v.B) }
end
function cases.as_strided(v, add)
  add { x = v:n(4, 6), size = { 3, 2 }, stride = { 6, 2 }, storage_offset = 1 }
  add { x = v:n(4, 6), size = { 3, 4 }, stride = { 2, 1 } }
end
function cases.strided_add(v, add)
  add { g = v:n(3, 4), size = { 4, 6 }, stride = { 6, 1 }, offset = 0, g_stride = { 2, 1 }, g_offset = 1, copies = 1 }
  add { g = v:n(2, 3), size = { 3, 4 }, stride = { 0, 1 }, offset = 0, g_stride = { 1, 1 }, g_offset = 0, copies = 3 }
end
function cases.spread(v, add)
  add { x = v:n(v.B, 5), size = { v.B, 3, 5 }, dim = 1, keepdim = false }
  add { x = v:n(v.B, 1, 5), size = { v.B, 3, 5 }, dim = 1, keepdim = true }
end

-- -- Joins ----------------------------------------------------------------------------------------

function cases.cat(v, add)
  add { xs = { v:n(v.B, 3), v:n(v.B, 1), v:n(v.B, 2) }, dim = 1 }
  add { xs = { v:n(v.B, 3), v:n(2, 3) } }
  add { xs = { v:n(v.B, 3) }, dim = -1 }
end
function cases.fused(v, add)
  add { xs = { v:n(v.B, 3 * v.L), v:n(v.B, 3 * v.L) },
    body = '{t0 = mul(x0, x1); t1 = add(t0, x1, alpha=0.5); t2 = tanh(t1); t3 = gt(t0, t2); '
      .. 't4 = where(t3, t2, x0); t1, t4}' }
  add { xs = { v:n(v.B, 1, 3), v:n(2, 1), v:n(1) }, body = '{t0 = mul(x0, x1); t1 = add(t0, x2); t2 = abs(t1); t2}' }
  add { xs = { v:n(v.B, 9 * v.L), v:n(9 * v.L) },
    body = '{t0 = mul(x0, x1); t1 = exp(t0); t2 = gt(t1, x1); t3 = sum(t1, dim=[1]); t4 = amax(t0, dim=[1], '
      .. 'keepdim=true); t5 = any(t2, dim=[1]); t3, t1, t4, t5}' }
  add { xs = { v:n(v.B, 5 * v.L) }, body = '{t0 = neg(x0); t1 = sum(t0); t2 = norm(t0, p=3); t1, t2}' }
end
function cases.stack(v, add)
  add { xs = { v:n(v.B, 3), v:n(v.B, 3) }, dim = 1 }
  add { xs = { v:n(v.B, 3), v:n(v.B, 3), v:n(v.B, 3) } }
end
function cases.flip(v, add)
  add { x = v:n(v.B, 3, 5), dims = { 0, 2 } }
  add { x = v:n(v.B, 3, 5), dims = 1 }
end
function cases.roll(v, add)
  add { x = v:n(v.B, 5), shifts = 2, dims = 1 }
  add { x = v:n(v.B, 3, 5), shifts = { 1, -2 }, dims = { 1, 2 } }
  add { x = v:n(v.B, 5), shifts = 3 }
end
local function triangle(v, add)
  add { x = v:n(v.B, 4, 5) }
  add { x = v:n(v.B, 4, 5), diagonal = 1 }
  add { x = v:n(5, 4), diagonal = -2 }
end
cases.tril, cases.triu = triangle, triangle
function cases.one_hot(v, add) add { x = v:i(0, 5, v.B, 2), num_classes = 5 } end
function cases.pad(v, add)
  add { x = v:n(v.B, 3), pad = { 1, 2 }, value = 1.5 }
  add { x = v:n(v.B, 3, 4), pad = { 1, 0, 0, 2 } }
  add { x = v:n(v.B, 3, 5), pad = { -1, -2 } }
  for _, mode in ipairs { 'reflect', 'replicate', 'circular' } do
    add { x = v:n(v.B, 3, 5), pad = { 1, 2 }, mode = mode }
    add { x = v:n(v.B, 2, 4, 5), pad = { 2, 1, 0, 1 }, mode = mode }
  end
end
function cases.pad_backward(v, add)
  for _, mode in ipairs { 'reflect', 'replicate', 'circular' } do
    add { g = v:n(v.B, 3, 8), size = { v.B, 3, 5 }, pad = { 1, 2 }, mode = mode }
  end
end

-- -- Reductions -----------------------------------------------------------------------------------

local function reduction(v, add)
  add { x = v:n(v.B, 5 * v.L) }
  add { x = v:n(v.B, 3, 5 * v.L), dim = 1 }
  add { x = v:n(3 * v.L, v.B, 5), dim = 0 }
  add { x = v:n(3, v.B, 5), dim = { 0, -1 }, keepdim = true }
end
for _, name in ipairs { 'sum', 'mean', 'norm', 'amax', 'amin' } do cases[name] = reduction end
function cases.norm(v, add)
  reduction(v, add)
  add { x = v:n(v.B, 5), p = 1, dim = 1 }
  add { x = v:n(v.B, 5), p = 3, dim = 1 }
  add { x = v:n(v.B, 5), p = math.huge, dim = 1 }
  add { x = v:n(v.B, 5), p = 0, dim = 1 }
end
function cases.prod(v, add)
  add { x = v:u(.5, 1.5, v.B, 5) }
  add { x = v:u(.5, 1.5, v.B, 3, 5), dim = 1 }
  add { x = v:u(.5, 1.5, 3, v.B, 5), dim = { 0, -1 }, keepdim = true }
end
local function truth(v, add)
  add { x = v:b(v.B, 5) }
  add { x = v:b(v.B, 2, 5), dim = 1 }
  add { x = v:i(0, 2, 2, v.B, 3), dim = { 0, -1 }, keepdim = true }
  add { x = v:n(v.B, 5), dim = 1 }
end
cases.any, cases.all, cases.count_nonzero = truth, truth, truth
local function moments(v, add)
  add { x = v:n(v.B, 5 * v.L) }
  add { x = v:n(v.B, 3, 5 * v.L), dim = -1, unbiased = false }
  add { x = v:n(3 * v.L, v.B, 5), dim = { 0, 2 }, keepdim = true }
  add { x = v:n(v.B, 5), dim = 1, correction = 2 }
end
cases.var, cases.std = moments, moments
function cases.logsumexp(v, add)
  add { x = v:n(v.B, 5 * v.L), dim = 1 }
  add { x = v:u(-8, 8, 3, v.B, 5), dim = { 0, 2 }, keepdim = true }
end
function cases.sum_to(v, add)
  add { x = v:n(v.B, 3, 5), size = { 3, 1 } }
  add { x = v:n(v.B, 3, 5), size = { v.B, 1, 5 } }
end
function cases.total_norm(v, add) add { xs = { v:n(v.B, 3), v:n(5), v:n(2, 2) } } end
local function placed(v, add)
  add { x = v:n(v.B, 5), dim = 1 }
  add { x = v:n(5, v.B), dim = 0, keepdim = true }
end
cases.max_dim, cases.min_dim = placed, placed
function cases.sort(v, add)
  add { x = v:n(v.B, 6 * v.L) }
  add { x = v:n(6, v.B), dim = 0, descending = true }
end
function cases.topk(v, add)
  add { x = v:n(v.B, 7), k = 3 }
  add { x = v:n(7, v.B), k = 2, dim = 0, largest = false }
end
function cases.cumsum(v, add)
  add { x = v:n(v.B, 5 * v.L), dim = 1 }
  add { x = v:n(5, v.B, 2), dim = 0 }
end
function cases.cumprod(v, add)
  add { x = v:u(.5, 1.5, v.B, 5), dim = 1 }
  add { x = v:u(.5, 1.5, 5, v.B, 2), dim = 0 }
end
function cases.cumprod_backward(v, add) add { g = v:n(v.B, 5), x = v:u(.5, 1.5, v.B, 5), dim = 1 } end

-- -- Indexing -------------------------------------------------------------------------------------

function cases.index(v, add)
  add { x = v:n(4, v.B), indices = { v:i(0, 4, 5) }, dims = { 0 } }
  add { x = v:n(v.B, 4, 3), indices = { v:i(0, 4, 5), v:i(-3, 3, 2, 1) }, dims = { 1, 2 } }
  add { x = v:n(4, v.B, 3), indices = { v:i(0, 4, 5), v:i(0, 3, 5) }, dims = { 0, 2 } }
end
function cases.index_backward(v, add)
  add { g = v:n(5, v.B), indices = { v:i(0, 4, 5) }, size = { 4, v.B }, dims = { 0 } }
  add { g = v:n(v.B, 2, 5), indices = { v:i(0, 4, 5), v:i(-3, 3, 2, 1) }, size = { v.B, 4, 3 }, dims = { 1, 2 } }
end
function cases.index_put(v, add)
  add { x = v:n(6, v.B), value = v:n(4, v.B), indices = { v:p(6, 4) }, dims = { 0 } }
  add { x = v:n(4, v.B), value = v:n(v.B), indices = { v:i(0, 4, 6) }, dims = { 0 }, accumulate = true }
  add { x = v:n(v.B, 5), value = 2.5, indices = { v:i(0, 5, 3) }, dims = { 1 } }
end
function cases.index_select(v, add)
  add { x = v:n(v.B, 4), dim = 1, index = v:i(0, 4, 6) }
  add { x = v:n(4, v.B), dim = 0, index = v:i(0, 4, 3) }
end
function cases.index_select_backward(v, add)
  add { g = v:n(v.B, 6), index = v:i(0, 4, 6), size = { v.B, 4 }, dim = 1 }
end
function cases.index_add(v, add)
  add { x = v:n(v.B, 4), dim = 1, index = v:i(0, 4, 6), source = v:n(v.B, 6) }
  add { x = v:n(4, v.B), dim = 0, index = v:i(0, 4, 5), source = v:n(5, v.B) }
end
function cases.index_copy(v, add) add { x = v:n(v.B, 5), dim = 1, index = v:p(5, 3), source = v:n(v.B, 3) } end
function cases.index_fill(v, add)
  add { x = v:n(v.B, 5), dim = 1, index = v:p(5, 2), value = 1.5 }
  add { x = v:n(5, v.B), dim = 0, index = v:p(5, 2), value = v:u(0, 1) }
end
function cases.embedding(v, add)
  add { ids = v:i(0, 6, v.B, 3), w = v:n(6, 5) }
  add { ids = v:i(0, 6, v.B, 3), w = v:n(6, 5), padding_idx = 2, smooth = false }
end
function cases.embedding_backward(v, add)
  add { g = v:n(v.B, 3, 5), ids = v:i(0, 6, v.B, 3), num = 6 }
  add { g = v:n(v.B, 3, 5), ids = v:i(0, 6, v.B, 3), num = 6, padding_idx = 2 }
end
function cases.masked_select(v, add)
  add { x = v:n(v.B, 5), mask = v:b(v.B, 5) }
  add { x = v:n(v.B, 2, 3), mask = v:b(2, 1) }
end
function cases.masked_select_backward(v, add) add { g = v:n(2), mask = v:p(4):lt(2):view(1, 4), size = { 1, 4 } } end
function cases.masked_scatter(v, add) add { x = v:n(v.B, 5), mask = v:b(v.B, 5), source = v:n(40) } end
function cases.nonzero(v, add)
  add { x = v:i(0, 2, v.B, 5) }
  add { x = v:b(v.B, 2, 3) }
end
function cases.gather(v, add)
  add { x = v:n(v.B, 5), dim = 1, index = v:i(0, 5, v.B, 3) }
  add { x = v:n(5, v.B), dim = 0, index = v:i(0, 5, 2, v.B) }
  add { x = v:n(4, 5), dim = 1, index = v:i(0, 5, 2, 3) }
end
function cases.gather_backward(v, add)
  add { g = v:n(v.B, 3), index = v:i(0, 5, v.B, 3), size = { v.B, 5 }, dim = 1 }
end
function cases.scatter(v, add)
  local rows = {}
  for k = 1, v.B do rows[k] = v:p(5, 3) end
  local index = v.B > 0 and mf.stack(rows) or mf.zeros(0, 3):long()
  add { x = v:n(v.B, 5), dim = 1, index = index, src = v:n(v.B, 3) }
  add { x = v:n(v.B, 5), dim = 1, index = index, src = 2.5 }
end
function cases.scatter_add(v, add)
  add { x = v:n(v.B, 4), dim = 1, index = v:i(0, 4, v.B, 6), src = v:n(v.B, 6) }
  add { x = v:n(4, v.B), dim = 0, index = v:i(0, 4, 5, v.B), src = v:n(5, v.B) }
end

-- -- Products -------------------------------------------------------------------------------------

function cases.matmul(v, add)
  add { a = v:n(v.B, 3 * v.L), b = v:n(3 * v.L, 5) }
  add { a = v:n(v.B, 3, 4), b = v:n(4, 5) }
  add { a = v:n(2, 1, 3, 4), b = v:n(v.B, 4, 5) }
  add { a = v:n(5), b = v:n(5) }
  add { a = v:n(v.B, 5), b = v:n(5) }
  add { a = v:n(5), b = v:n(5, v.B) }
  add { a = v:n(5), b = v:n(v.B, 5, 2) }
  add { a = v:n(v.B, 2, 5), b = v:n(5) }
  add { a = v:n(3, v.B), b = v:n(v.B, 4) }
end
function cases.bmm(v, add) add { a = v:n(v.B, 3, 4), b = v:n(v.B, 4, 5) } end
function cases.addmm(v, add)
  add { c = v:n(v.B, 5), a = v:n(v.B, 3 * v.L), b = v:n(3 * v.L, 5) }
  add { c = v:n(5), a = v:n(v.B, 4), b = v:n(4, 5), beta = 0.5, alpha = 2 }
  add { c = v:n(v.B, 1), a = v:n(v.B, 4), b = v:n(4, 5), beta = 2 }
end
function cases.linear(v, add)
  add { x = v:n(v.B, 3 * v.L), w = v:n(5, 3 * v.L) }
  add { x = v:n(v.B, 2, 3), w = v:n(5, 3), b = v:n(5) }
  add { x = v:n(3), w = v:n(5, 3), b = v:n(5) }
end
function cases.linear_act(v, add)
  add { x = v:n(v.B, 3 * v.L), w = v:n(5, 3 * v.L), act = 'relu' }
  add { x = v:n(v.B, 2, 3), w = v:n(5, 3), b = v:n(5), act = 'gelu' }
  add { x = v:n(v.B, 3), w = v:n(5, 3), b = v:n(5), act = 'gelu_tanh' }
end
function cases.linear_weight(v, add)
  add { g = v:n(v.B, 5), x = v:n(v.B, 3) }
  add { g = v:n(v.B, 2, 5), x = v:n(v.B, 2, 3) }
end

-- -- Images ---------------------------------------------------------------------------------------

function cases.conv2d(v, add)
  add { x = v:n(v.B, 2, 5, 4), w = v:n(3, 2, 3, 2) }
  add { x = v:n(v.B, 2, 6, 5), w = v:n(4, 2, 3, 3), b = v:n(4), stride = 2, padding = { 1, 0 } }
  add { x = v:n(v.B, 4, 5, 5), w = v:n(4, 2, 2, 2), b = v:n(4), groups = 2, dilation = 2 }
  add { x = v:n(v.B, 3, 3, 3), w = v:n(3, 1, 3, 3), groups = 3, padding = 1 }
  add { x = v:n(v.B, 3, 4, 4), w = v:n(5, 3, 1, 1) }
end
function cases.conv2d_act(v, add)
  add { x = v:n(v.B, 2, 5, 4), w = v:n(3, 2, 3, 2) }
  add { x = v:n(v.B, 4, 5, 5), w = v:n(4, 2, 2, 2), b = v:n(4), groups = 2, dilation = 2 }
end
function cases.conv2d_input(v, add)
  add { g = v:n(v.B, 3, 3, 3), w = v:n(3, 2, 3, 2), size = { 5, 4 } }
  add { g = v:n(v.B, 4, 3, 2), w = v:n(4, 2, 3, 3), size = { 6, 5 }, stride = 2, padding = { 1, 0 } }
  add { g = v:n(v.B, 4, 3, 3), w = v:n(4, 2, 2, 2), size = { 5, 5 }, groups = 2, dilation = 2 }
end
local function conv_weight(v, add)
  add { g = v:n(v.B, 3, 3, 3), x = v:n(v.B, 2, 5, 4), w = v:n(3, 2, 3, 2) }
  add { g = v:n(v.B, 4, 3, 2), x = v:n(v.B, 2, 6, 5), w = v:n(4, 2, 3, 3), stride = 2, padding = { 1, 0 } }
  add { g = v:n(v.B, 4, 3, 3), x = v:n(v.B, 4, 5, 5), w = v:n(4, 2, 2, 2), groups = 2, dilation = 2 }
end
cases.conv2d_weight, cases.conv2d_weight_bias = conv_weight, conv_weight
function cases.max_pool2d(v, add)
  add { x = v:n(v.B, 2, 4, 6), kernel_size = 2 }
  add { x = v:n(v.B, 2, 5, 5), kernel_size = { 3, 2 }, stride = 2, padding = 1, ceil_mode = true }
  add { x = v:n(v.B, 2, 5, 5), kernel_size = 2, stride = 1, dilation = 2 }
  add { x = v:n(2, 4, 4), kernel_size = 2 }
end
function cases.max_pool2d_backward(v, add)
  add { g = v:n(v.B, 2, 2, 3), x = v:n(v.B, 2, 4, 6), kernel_size = 2 }
  add { g = v:n(v.B, 2, 3, 3), x = v:n(v.B, 2, 5, 5), kernel_size = 3, stride = 2, padding = 1 }
end
function cases.max_pool2d_pick(v, add)
  add { v = v:n(v.B, 2, 4, 6), x = v:n(v.B, 2, 4, 6), kernel_size = 2 }
  add { v = v:n(v.B, 2, 5, 5), x = v:n(v.B, 2, 5, 5), kernel_size = 3, stride = 2, padding = 1 }
end
function cases.avg_pool2d(v, add)
  add { x = v:n(v.B, 2, 4, 6), kernel_size = 2 }
  add { x = v:n(v.B, 2, 5, 5), kernel_size = { 3, 2 }, stride = 2, padding = 1, ceil_mode = true,
    count_include_pad = false }
  add { x = v:n(v.B, 2, 5, 5), kernel_size = 3, stride = 1, padding = 1, divisor_override = 5 }
end
function cases.avg_pool2d_backward(v, add)
  add { g = v:n(v.B, 2, 2, 3), size = { 4, 6 }, kernel_size = 2 }
  add { g = v:n(v.B, 2, 3, 3), size = { 5, 5 }, kernel_size = 3, stride = 2, padding = 1, count_include_pad = false }
end
function cases.adaptive_avg_pool2d(v, add)
  add { x = v:n(v.B, 2, 5, 7), output_size = { 2, 3 } }
  add { x = v:n(v.B, 2, 4, 4), output_size = 1 }
end
function cases.adaptive_avg_pool2d_backward(v, add) add { g = v:n(v.B, 2, 2, 3), size = { 5, 7 } } end

-- -- Normalisation, attention, losses -------------------------------------------------------------

local function along(v, add)
  add { x = v:n(v.B, 5 * v.L) }
  add { x = v:u(-8, 8, 5, v.B, 2), dim = 0 }
  add { x = v:n(v.B, 5, 2), dim = 1 }
end
cases.softmax, cases.log_softmax = along, along
function cases.softmax_backward(v, add)
  add { g = v:n(v.B, 5), y = v:u(.1, .5, v.B, 5), dim = 1 }
  add { g = v:n(5, v.B, 2), y = v:u(.1, .5, 5, v.B, 2), dim = 0 }
end
function cases.log_softmax_backward(v, add)
  add { g = v:n(v.B, 5), y = v:u(-2, -.5, v.B, 5), dim = 1 }
  add { g = v:n(5, v.B, 2), y = v:u(-2, -.5, 5, v.B, 2), dim = 0 }
end
function cases.layer_norm(v, add)
  add { x = v:n(v.B, 5 * v.L), normalized_shape = 5 * v.L }
  add { x = v:n(v.B, 5), normalized_shape = 5, weight = v:n(5), bias = v:n(5) }
  add { x = v:n(v.B, 2, 3), normalized_shape = { 2, 3 }, weight = v:n(2, 3), bias = v:n(2, 3), eps = 0.01 }
end
function cases.layer_norm_backward(v, add)
  add { g = v:n(v.B, 5), x = v:n(v.B, 5), normalized_shape = 5, params = false, eps = 0.01 }
  add { g = v:n(v.B, 2, 3), x = v:n(v.B, 2, 3), normalized_shape = { 2, 3 }, weight = v:n(2, 3), params = true,
    eps = 1e-5 }
end
function cases.add_norm(v, add)
  add { x = v:n(v.B, 5 * v.L), r = v:n(v.B, 5 * v.L), normalized_shape = 5 * v.L, centre = true, eps = 1e-5 }
  add { x = v:n(v.B, 5), r = v:n(v.B, 5), weight = v:n(5), bias = v:n(5), normalized_shape = 5, centre = true,
    eps = 1e-5 }
  add { x = v:n(v.B, 2, 3), r = v:n(v.B, 2, 3), weight = v:n(2, 3), normalized_shape = { 2, 3 }, centre = false,
    eps = 0.01 }
end
function cases.norm_add_backward(v, add)
  add { g = v:n(v.B, 5), x = v:n(v.B, 5), h = v:n(v.B, 5), normalized_shape = 5, centre = true, params = false,
    eps = 0.01 }
  add { g = v:n(v.B, 5), x = v:n(v.B, 5), more = v:n(v.B, 5), weight = v:n(5), normalized_shape = 5, centre = true,
    params = true, eps = 0.01 }
  add { g = v:n(v.B, 5), x = v:n(v.B, 5), h = v:n(v.B, 5), more = v:n(v.B, 5), normalized_shape = 5,
    centre = false, params = true, eps = 0.01 }
  add { g = v:n(v.B, 2, 3), x = v:n(v.B, 2, 3), h = v:n(v.B, 2, 3), weight = v:n(2, 3), normalized_shape = { 2, 3 },
    centre = true, params = true, eps = 1e-5 }
  add { g = v:n(v.B, 5), x = v:n(v.B, 5), h = v:n(v.B, 5), weight = v:n(5),
    normalized_shape = 5, centre = false, params = true, eps = 1e-5 }
end
function cases.rms_norm(v, add)
  add { x = v:n(v.B, 5 * v.L), normalized_shape = 5 * v.L, eps = 1e-5 }
  add { x = v:n(v.B, 2, 3), normalized_shape = { 2, 3 }, weight = v:n(2, 3), eps = 0.01 }
end
function cases.rms_norm_backward(v, add)
  add { g = v:n(v.B, 5), x = v:n(v.B, 5), normalized_shape = 5, params = false, eps = 0.01 }
  add { g = v:n(v.B, 2, 3), x = v:n(v.B, 2, 3), normalized_shape = { 2, 3 }, weight = v:n(2, 3), params = true,
    eps = 1e-5 }
end
function cases.group_norm(v, add)
  add { x = v:n(v.B, 4, 3, 2), num_groups = 2 }
  add { x = v:n(v.B, 6, 3), num_groups = 3, weight = v:n(6), bias = v:n(6), eps = 0.01 }
end
function cases.group_norm_backward(v, add)
  add { g = v:n(v.B, 4, 3), x = v:n(v.B, 4, 3), num_groups = 2, params = false, eps = 0.01 }
  add { g = v:n(v.B, 6, 3), x = v:n(v.B, 6, 3), num_groups = 3, weight = v:n(6), params = true, eps = 1e-5 }
end
function cases.batch_norm(v, add)
  add { x = v:n(v.B, 3), training = true }
  add { x = v:n(v.B, 3, 2, 2), running_mean = v:n(3), running_var = v:u(.5, 2, 3), weight = v:n(3), bias = v:n(3),
    training = true, momentum = 0.3 }
  add { x = v:n(v.B, 3, 5), running_mean = v:n(3), running_var = v:u(.5, 2, 3), weight = v:n(3), bias = v:n(3),
    eps = 0.01 }
end
function cases.batch_norm_act(v, add)
  add { x = v:n(v.B, 3), training = true, relu = true }
  add { x = v:n(v.B, 3, 2, 2), running_mean = v:n(3), running_var = v:u(.5, 2, 3), weight = v:n(3), bias = v:n(3),
    residual = v:n(v.B, 3, 2, 2), training = true, momentum = 0.3, relu = true }
  add { x = v:n(v.B, 3, 5), running_mean = v:n(3), running_var = v:u(.5, 2, 3), weight = v:n(3), bias = v:n(3),
    residual = v:n(v.B, 3, 5), eps = 0.01 }
end
function cases.batch_norm_again(v, add)
  add { x = v:n(v.B, 3), mean = v:n(3), rstd = v:u(.5, 2, 3), relu = true }
  add { x = v:n(v.B, 3, 2), mean = v:n(3), rstd = v:u(.5, 2, 3), weight = v:n(3), bias = v:n(3) }
end
function cases.batch_norm_backward(v, add)
  add { g = v:n(v.B, 3), x = v:n(v.B, 3), mean = v:n(3), rstd = v:u(.5, 2, 3), training = false, params = false }
  add { g = v:n(v.B, 3, 2), x = v:n(v.B, 3, 2), mean = v:n(3), rstd = v:u(.5, 2, 3), weight = v:n(3),
    training = true, params = true }
end
function cases.batch_norm_act_backward(v, add)
  add { g = v:n(v.B, 3), x = v:n(v.B, 3), mean = v:n(3), rstd = v:u(.5, 2, 3), training = true, params = false,
    residual = false }
  add { g = v:n(v.B, 3, 2), x = v:n(v.B, 3, 2), mean = v:n(3), rstd = v:u(.5, 2, 3), weight = v:n(3), bias = v:n(3),
    training = true, params = true, residual = false }
  add { g = v:n(v.B, 3, 2), y = v:n(v.B, 3, 2), x = v:n(v.B, 3, 2), mean = v:n(3), rstd = v:u(.5, 2, 3),
    weight = v:n(3), training = false, params = true, residual = false }
  add { g = v:n(v.B, 3, 2), y = v:n(v.B, 3, 2), x = v:n(v.B, 3, 2), mean = v:n(3), rstd = v:u(.5, 2, 3),
    h = v:n(v.B, 3, 2), training = true, params = true, residual = true }
end
function cases.attention(v, add)
  add { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), scale = 0.5 }
  add { q = v:n(v.B, 2, 4, 4), k = v:n(v.B, 2, 4, 4), v = v:n(v.B, 2, 4, 4), is_causal = true, scale = 0.5 }
  add { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), mask = v:n(3, 5), scale = 0.5 }
  add { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), mask = v:b(v.B, 1, 3, 5), scale = 0.5 }
end
function cases.attention_backward(v, add)
  local function one(args, d)
    local options = { is_causal = args.is_causal, scale = args.scale }
    args.y, args.lse = mf._attention(args.q, args.k, args.v, args.mask, options)
    args.g = v:n(v.B, 2, args.q.shape[3], d)
    add(args)
  end
  one({ q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 6), scale = 0.5 }, 6)
  one({ q = v:n(v.B, 2, 4, 4), k = v:n(v.B, 2, 4, 4), v = v:n(v.B, 2, 4, 4), is_causal = true, scale = 0.5 }, 4)
  one({ q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), mask = v:n(3, 5), scale = 0.5 }, 4)
  one({ q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), mask = v:b(v.B, 1, 3, 5), scale = 0.5 }, 4)
end
-- Attention as programs write it out, with and without dropout: the forward ops, and the backward ones on what
-- these give.
local function written_out(v, each)
  each { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 6), scale = 0.5, fill = -1e9 }
  each { q = v:n(v.B, 2, 4, 4), k = v:n(v.B, 2, 4, 4), v = v:n(v.B, 2, 4, 4), is_causal = true, scale = 0.5,
    fill = -math.huge }
  each { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), mask = v:n(3, 5), scale = 0.5,
    fill = -math.huge }
  each { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), mask = v:b(v.B, 1, 3, 5), scale = 0.5,
    fill = -2 }
end
local function backwards(name, more)
  return function(v, add)
    written_out(v, function(args)
      local options = { is_causal = args.is_causal, scale = args.scale, fill = args.fill }
      for key, value in pairs(more) do args[key], options[key] = value, value end
      if more.p then options.generator = mf.Generator():manual_seed(7) end
      args.y, args.lse = mf[name](args.q, args.k, args.v, args.mask, options)
      args.g = v:n(v.B, 2, args.q.shape[3], args.v.shape[4])
      add(args)
    end)
  end
end
cases.plain_attention = written_out
cases.plain_attention_backward = backwards('_plain_attention', {})
function cases.drop_attention(v, add)
  written_out(v, function(args)
    args.p = 0.3
    add(args)
  end)
  add { q = v:n(v.B, 2, 3, 4), k = v:n(v.B, 2, 5, 4), v = v:n(v.B, 2, 5, 4), scale = 0.5, p = 0.3 }
end
cases.drop_attention_backward = backwards('_drop_attention', { p = 0.3 })
function cases.cross_entropy(v, add)
  add { x = v:n(v.B, 5 * v.L), target = v:i(0, 5, v.B) }
  add { x = v:n(v.B, 5), target = v:i(0, 5, v.B), weight = v:u(.5, 2, 5), label_smoothing = 0.1 }
  add { x = v:n(v.B, 5, 2), target = v:i(0, 5, v.B, 2), reduction = 'sum', label_smoothing = 0.1 }
  add { x = v:n(v.B, 5, 2, 3), target = v:i(0, 5, v.B, 2, 3), reduction = 'none', weight = v:u(.5, 2, 5),
    ignore_index = 2 }
  add { x = v:n(5), target = v:i(0, 5), reduction = 'sum' }
end
function cases.cross_entropy_backward(v, add)
  local x, y = v:n(v.B, 5), v:n(v.B, 5, 3)
  add { g = v:n(), x = x, target = v:i(0, 5, v.B), lse = x:logsumexp(1), total = v:u(2, 3) }
  add { g = v:n(), x = x, target = v:i(0, 5, v.B), lse = x:logsumexp(1), total = v:u(2, 3), weight = v:u(.5, 2, 5),
    label_smoothing = 0.1, reduction = 'sum' }
  add { g = v:n(v.B, 3), x = y, target = v:i(0, 5, v.B, 3), lse = y:logsumexp(1), total = v:u(2, 3),
    ignore_index = 2, reduction = 'none' }
end
function cases.linear_cross_entropy(v, add)
  add { g = v:n(), x = v:n(v.B, 3), w = v:n(5, 3), target = v:i(0, 5, v.B) }
  add { g = v:n(), x = v:n(v.B, 2, 3), w = v:n(5, 3), b = v:n(5), target = v:i(0, 5, v.B, 2), reduction = 'sum',
    ignore_index = 2, label_smoothing = 0.1 }
end
-- The target stays away from x, where there are corners.
local function losses(v, add, more)
  for _, by in ipairs { 'mean', 'sum', 'none' } do
    local args = { x = v:u(.1, .45, v.B, 5 * v.L), target = v:u(.55, .9, v.B, 5 * v.L), reduction = by }
    for key, value in pairs(more or {}) do args[key] = value end
    add(args)
  end
end
local function loss_gradients(v, add, more)
  for _, by in ipairs { 'mean', 'sum', 'none' } do
    local args = { g = by == 'none' and v:n(v.B, 5) or v:n(), x = v:u(.1, .45, v.B, 5),
      target = v:u(.55, .9, v.B, 5), reduction = by }
    for key, value in pairs(more or {}) do args[key] = value end
    add(args)
  end
end
for _, name in ipairs { 'mse_loss', 'l1_loss', 'smooth_l1_loss', 'huber_loss', 'bce_loss', 'bce_logits_loss',
  'kl_loss' } do
  cases[name], cases[name .. '_backward'] = losses, loss_gradients
end
function cases.smooth_l1_loss(v, add) losses(v, add, { beta = 0.3 }) end
function cases.smooth_l1_loss_backward(v, add) loss_gradients(v, add, { beta = 0.3 }) end
function cases.huber_loss(v, add) losses(v, add, { delta = 0.3 }) end
function cases.huber_loss_backward(v, add) loss_gradients(v, add, { delta = 0.3 }) end

-- -- Random numbers -------------------------------------------------------------------------------

local function random_sized(v, add) add { size = { v.B, 5 }, dtype = v.dtype } end
cases.rand, cases.randn = random_sized, random_sized
function cases.randint(v, add) add { low = -3, high = 9, size = { v.B, 5 } } end
function cases.randperm(_, add) add { n = 7 } end
for _, name in ipairs { 'uniform_', 'normal_', 'bernoulli_' } do
  cases[name] = function(v, add) add { x = v:n(v.B, 5) } end
end
cases['random_'] = function(v, add)
  add { x = v:n(v.B, 5), low = 2, high = 9 }
  add { x = v:i(0, 3, v.B, 5), low = 0, high = 100 }
end
function cases.normal(v, add)
  add { mean = v:n(v.B, 5), std = v:u(.5, 2, 5) }
  add { mean = v:n(v.B, 5), std = 1.5 }
  add { mean = 0, std = 1.5, size = { v.B, 5 }, dtype = v.dtype }
end
function cases.bernoulli(v, add) add { x = v:u(.1, .9, v.B, 5) } end
function cases.dropout(v, add)
  add { x = v:n(v.B, 5) }
  add { x = v:n(v.B, 5), p = 0.2 }
end
function cases.dropout_backward(v, add) add { g = v:n(v.B, 5), p = 0.3 } end
function cases.multinomial(v, add)
  add { x = v:u(.1, .9, v.B, 5), num_samples = 3 }
  add { x = v:u(.1, .9, 5), num_samples = 8, replacement = true }
end

-- -- Optimisers -----------------------------------------------------------------------------------

-- Lists of as many tensors of equal shapes for each name.
local function lists(v, names, options)
  for _, name in ipairs(names) do options[name] = { v:u(.1, 2, v.B, 3), v:u(.1, 2, 5) } end
  return options
end
cases['sgd_'] = function(v, add)
  add(lists(v, { 'params', 'grads' }, { bufs = {}, lr = 0.1 }))
  add(lists(v, { 'params', 'grads', 'bufs' }, { lr = 0.1, momentum = 0.9, weight_decay = 0.01, nesterov = true }))
  add(lists(v, { 'params', 'grads', 'bufs' }, { lr = 0.1, momentum = 0.9, dampening = 0.1, maximize = true,
    since = 0 }))
end
cases['scale_all_'] = function(v, add)
  add { scale = v:u(.5, 2), xs = { v:n(v.B, 3 * v.L), v:n(5) } }
  add { scale = v:u(.5, 2), xs = {} }
end
cases['zero_all_'] = function(v, add) add { xs = { v:n(v.B, 3 * v.L), v:n(5) } } end
local adam = { lr = 0.1, beta1 = 0.8, beta2 = 0.95, eps = 1e-8, weight_decay = 0.1, step = 3 }
local function with(options, more)
  local o = {}
  for k, x in pairs(options) do o[k] = x end
  for k, x in pairs(more) do o[k] = x end
  return o
end
cases['adam_'] = function(v, add)
  add(lists(v, { 'params', 'grads', 'exp_avgs', 'exp_avg_sqs' }, with(adam, { max_exp_avg_sqs = {} })))
  add(lists(v, { 'params', 'grads', 'exp_avgs', 'exp_avg_sqs', 'max_exp_avg_sqs' }, with(adam, { decoupled = true })))
end
cases['adamax_'] = function(v, add) add(lists(v, { 'params', 'grads', 'exp_avgs', 'exp_infs' }, with(adam, {}))) end
cases['adagrad_'] = function(v, add)
  add(lists(v, { 'params', 'grads', 'sums' }, { lr = 0.1, lr_decay = 0.1, weight_decay = 0.01, step = 3 }))
end
cases['adadelta_'] = function(v, add)
  add(lists(v, { 'params', 'grads', 'square_avgs', 'acc_deltas' }, { lr = 0.5, weight_decay = 0.01 }))
end
cases['rmsprop_'] = function(v, add)
  add(lists(v, { 'params', 'grads', 'square_avgs' }, { grad_avgs = {}, bufs = {}, lr = 0.1 }))
  add(lists(v, { 'params', 'grads', 'square_avgs', 'bufs' },
    { grad_avgs = {}, lr = 0.1, momentum = 0.5, weight_decay = 0.01 }))
end
local function rows(v, names, options)
  options.param, options.ids, options.values = v:n(6, 3), v:p(6, 4), v:n(4, 3)
  for _, name in ipairs(names) do options[name] = v:u(.1, 2, 6, 3) end
  return options
end
for _, name in ipairs { 'sgd_', 'adam_', 'adagrad_', 'rmsprop_', 'adadelta_', 'adamax_' } do
  local plain = cases[name]
  cases[name] = function(v, add)
    plain(v, add)
    plain(v, function(args)
      args.factor = v:u(.5, 2)
      add(args)
    end)
  end
end
cases['sgd_rows_'] = function(v, add)
  add(rows(v, {}, { lr = 0.1 }))
  add(rows(v, { 'buf' }, { lr = 0.1, momentum = 0.9 }))
end
cases['adam_rows_'] = function(v, add) add(rows(v, { 'exp_avg', 'exp_avg_sq' }, with(adam, { weight_decay = 0 }))) end
cases['adagrad_rows_'] = function(v, add) add(rows(v, { 'sum' }, { lr = 0.1, step = 3 })) end

-- -- From the signature ---------------------------------------------------------------------------

local function tensor_of(op, v, ...)
  if op.flags.int_only then return v:i(0, 64, ...) end
  local range = domain[op.name] or { -2, 2 }
  return v:u(range[1], range[2], ...)
end

local function generic_one(op, v, shape_of)
  local args, k = {}, 0
  for _, p in ipairs(op.params) do
    if p.kind == 'tensor' and not p.optional then
      k = k + 1
      local shape = shape_of(k)
      args[p.name] = p.list and { tensor_of(op, v, unpack(shape)), tensor_of(op, v, unpack(shape)) }
        or tensor_of(op, v, unpack(shape))
    end
  end
  return args
end

local function generic(op, v, add)
  add(generic_one(op, v, function() return { v.B, 5 * v.L } end))
  local tensors = 0
  for _, p in ipairs(op.params) do
    if p.kind == 'tensor' and not p.optional then tensors = tensors + 1 end
    if p.kind == 'choice' then
      for choice in p.choices:gmatch '[^|]+' do
        local args = generic_one(op, v, function() return { v.B, 5 } end)
        args[p.name] = choice
        add(args)
      end
    end
  end
  if op.pointwise and tensors > 1 then
    add(generic_one(op, v, function(k) return ({ { v.B, 1, 3 }, { 2, 1 }, { 3 } })[k] or { 1 } end))
    for _, p in ipairs(op.params) do
      if p.number then
        local args = generic_one(op, v, function() return { v.B, 3 } end)
        args[p.name] = 1.25
        add(args)
      end
    end
  end
end

-- The list of calls of an op, fresh tensors each time; o as for Values.new.
local function list(op, o)
  local v, all, smooth = Values.new(o), {}, {}
  local function add(args)
    all[#all + 1], smooth[#all + 1] = args, args.smooth ~= false
    args.smooth = nil
  end
  if cases[op.name] then cases[op.name](v, add) else generic(op, v, add) end
  return all, smooth
end

return { list = list, entries = cases, domain = domain }
