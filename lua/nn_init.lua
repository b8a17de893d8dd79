-- Initialisation of parameters, as torch.nn.init: each function fills a tensor in place, whether or
-- not it requires a gradient, and returns it.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local init = {}

-- init[name] as f(t, ...) without gradients.
local function filler(name, f)
  init[name] = function(t, ...)
    if not mf.is_tensor(t) then
      fail('%s: the first argument must be a tensor, is %s', name, options.describe(t))
    end
    mf.no_grad(f, t, ...)
    return t
  end
end

filler('uniform_', function(t, a, b) t:uniform_(a or 0, b or 1) end)
filler('normal_', function(t, mean, std) t:normal_(mean or 0, std or 1) end)
filler('constant_', function(t, value) t:fill_(value) end)
filler('zeros_', function(t) t:fill_(0) end)
filler('ones_', function(t) t:fill_(1) end)
filler('eye_', function(t) t:copy_(mf.eye(t:size(0), t:size(1), mf._beside(t))) end)

-- -- By fan in and fan out ------------------------------------------------------------------------

-- Inputs and outputs of one unit: for a convolution both times the size of its window.
local function fans(name, t)
  if t.ndim < 2 then
    fail('%s: fan in and fan out need at least 2 dims, the shape is %s', name, tostring(t.shape))
  end
  local window = 1
  for d = 2, t.ndim - 1 do window = window * t:size(d) end
  return t:size(1) * window, t:size(0) * window
end

local gains = { linear = 1, conv1d = 1, conv2d = 1, conv3d = 1, sigmoid = 1, tanh = 5 / 3,
  relu = math.sqrt(2), selu = 3 / 4 }

-- The gain recommended for a nonlinearity; `param` is leaky_relu's negative slope.
function init.calculate_gain(nonlinearity, param)
  if nonlinearity == 'leaky_relu' then return math.sqrt(2 / (1 + (param or 0.01) ^ 2)) end
  return gains[nonlinearity] or fail('calculate_gain: there is no gain for the nonlinearity %s',
    options.describe(nonlinearity))
end

local function xavier_std(name, t, ...)
  local gain = options.arguments(name, { 'gain' }, { gain = 1 }, ...).gain
  local fan_in, fan_out = fans(name, t)
  return gain * math.sqrt(2 / (fan_in + fan_out))
end

-- Uniform numbers of variance gain^2 * 2 / (fan_in + fan_out) (Glorot and Bengio, 2010): {gain = 1}.
filler('xavier_uniform_', function(t, ...)
  local bound = math.sqrt(3) * xavier_std('xavier_uniform_', t, ...)
  t:uniform_(-bound, bound)
end)
-- Normal numbers of variance gain^2 * 2 / (fan_in + fan_out): {gain = 1}.
filler('xavier_normal_', function(t, ...) t:normal_(0, xavier_std('xavier_normal_', t, ...)) end)

local function kaiming_std(name, t, ...)
  local o = options.arguments(name, { 'a', 'mode', 'nonlinearity' },
    { a = 0, mode = 'fan_in', nonlinearity = 'leaky_relu' }, ...)
  options.choice(name, 'mode', o.mode, { 'fan_in', 'fan_out' })
  local fan_in, fan_out = fans(name, t)
  local fan = o.mode == 'fan_out' and fan_out or fan_in
  return fan == 0 and 0 or init.calculate_gain(o.nonlinearity, o.a) / math.sqrt(fan)
end

-- Uniform numbers of variance gain^2 / fan (He and others, 2015): {a = 0, mode = 'fan_in', nonlinearity =}.
filler('kaiming_uniform_', function(t, ...)
  local bound = math.sqrt(3) * kaiming_std('kaiming_uniform_', t, ...)
  t:uniform_(-bound, bound)
end)
-- Normal numbers of variance gain^2 / fan: {a = 0, mode = 'fan_in', nonlinearity =}.
filler('kaiming_normal_', function(t, ...) t:normal_(0, kaiming_std('kaiming_normal_', t, ...)) end)

-- -- Others ---------------------------------------------------------------------------------------

-- A normal distribution cut off at a and b: what falls outside is drawn again.
filler('trunc_normal_', function(t, ...)
  local o = options.arguments('trunc_normal_', { 'mean', 'std', 'a', 'b' },
    { mean = 0, std = 1, a = -2, b = 2 }, ...)
  if o.a >= o.b then fail('trunc_normal_: a must be below b, they are %g and %g', o.a, o.b) end
  t:normal_(o.mean, o.std)
  for _ = 1, 100 do
    local outside = mf.logical_or(t:lt(o.a), t:gt(o.b))
    if not outside:any():item() then return end
    t:copy_(mf.where(outside, mf.randn_like(t) * o.std + o.mean, t))
  end
  t:clamp_(o.a, o.b)
end)

-- Rows (or columns, where they are fewer) of unit length at right angles to each other, times gain:
-- those of a normal matrix, made so one by one; twice, against rounding.
filler('orthogonal_', function(t, ...)
  local gain = options.arguments('orthogonal_', { 'gain' }, { gain = 1 }, ...).gain
  if t.ndim < 2 then
    fail('orthogonal_: at least 2 dims are needed, the shape is %s', tostring(t.shape))
  end
  if t:numel() == 0 then return end
  local rows = t:size(0)
  local columns = t:numel() / rows
  local n = math.min(rows, columns)
  local q = mf.randn(n, math.max(rows, columns), mf._beside(t, { dtype = mf.float64 }))
  for i = 0, n - 1 do
    local row = q[i]
    for _ = 1, 2 do
      if i > 0 then
        local before = q:narrow(0, 0, i)
        row:sub_(before:t():matmul(before:matmul(row)))
      end
      row:div_(row:norm())
    end
  end
  t:copy_((rows > columns and q:t() or q):mul(gain):reshape(t.shape))
end)

return init
