-- Initialisation of parameters, as torch.nn.init: each function fills a tensor in place and returns it.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local init = {}

local function filler(f)
  return function(t, ...)
    if not mf.is_tensor(t) then error('nn.init: a tensor is needed, this is a ' .. type(t), 2) end
    mf.no_grad(f, t, ...)
    return t
  end
end

init.uniform_ = filler(function(t, a, b) t:uniform_(a or 0, b or 1) end)
init.normal_ = filler(function(t, mean, std) t:normal_(mean or 0, std or 1) end)
init.constant_ = filler(function(t, value) t:fill_(value) end)
init.zeros_ = filler(function(t) t:fill_(0) end)
init.ones_ = filler(function(t) t:fill_(1) end)
init.eye_ = filler(function(t) t:copy_(mf.eye(t:size(0), t:size(1))) end)

-- Inputs and outputs of one unit: for a convolution both times the size of its window.
local function fans(t)
  if t.ndim < 2 then error('nn.init: fan in and fan out need at least 2 dims, shape is ' .. tostring(t.shape), 4) end
  local window = 1
  for d = 2, t.ndim - 1 do window = window * t:size(d) end
  return t:size(1) * window, t:size(0) * window
end

local gains = { linear = 1, conv2d = 1, sigmoid = 1, tanh = 5 / 3, relu = math.sqrt(2), selu = 3 / 4 }

-- The gain recommended for a nonlinearity; `param` is leaky_relu's negative slope.
function init.calculate_gain(nonlinearity, param)
  if nonlinearity == 'leaky_relu' then return math.sqrt(2 / (1 + (param or 0.01) ^ 2)) end
  return gains[nonlinearity] or error('calculate_gain: unknown nonlinearity ' .. tostring(nonlinearity), 2)
end

init.xavier_uniform_ = filler(function(t, o)
  o = options('xavier_uniform_', o, { gain = 1 })
  local fan_in, fan_out = fans(t)
  local bound = o.gain * math.sqrt(6 / (fan_in + fan_out))
  t:uniform_(-bound, bound)
end)

init.xavier_normal_ = filler(function(t, o)
  o = options('xavier_normal_', o, { gain = 1 })
  local fan_in, fan_out = fans(t)
  t:normal_(0, o.gain * math.sqrt(2 / (fan_in + fan_out)))
end)

local function kaiming_std(where, t, o)
  o = options(where, o, { a = 0, mode = 'fan_in', nonlinearity = 'leaky_relu' }, 4)
  local fan_in, fan_out = fans(t)
  return init.calculate_gain(o.nonlinearity, o.a) / math.sqrt(o.mode == 'fan_out' and fan_out or fan_in)
end

init.kaiming_uniform_ = filler(function(t, o)
  local bound = math.sqrt(3) * kaiming_std('kaiming_uniform_', t, o)
  t:uniform_(-bound, bound)
end)
init.kaiming_normal_ = filler(function(t, o) t:normal_(0, kaiming_std('kaiming_normal_', t, o)) end)

-- A normal distribution cut off at a and b: what falls outside is drawn again.
init.trunc_normal_ = filler(function(t, o)
  o = options('trunc_normal_', o, { mean = 0, std = 1, a = -2, b = 2 })
  t:normal_(o.mean, o.std)
  for _ = 1, 100 do
    local outside = mf.logical_or(t:lt(o.a), t:gt(o.b))
    if outside:any():item() == false then return end
    t:copy_(mf.where(outside, mf.randn_like(t) * o.std + o.mean, t))
  end
  t:clamp_(o.a, o.b)
end)

return init
