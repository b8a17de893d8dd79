-- Activations and losses as modules: classes that keep the options of a function and call it.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local options = require 'moonflow.options'
local arguments = options.arguments
local Module, Parameter = nn.Module, nn.Parameter

-- -- Activations ----------------------------------------------------------------------------------

-- As PyTorch prints an option.
local function show(value)
  if type(value) == 'boolean' then return value and 'True' or 'False' end
  if type(value) == 'string' then return ("'%s'"):format(value) end
  return tostring(value)
end

-- nn[name], whose forward is mf[op](x, options): `order` names the options by position, `defaults`
-- has their values; `bare`: it prints them without names.
local function activation(name, op, order, defaults, bare)
  local class = Module:extend(name)
  order, defaults = order or {}, defaults or {}
  function class:init(...) self.options = arguments(name, order, defaults, ...) end
  function class:forward(x) return mf[op](x, self.options) end
  function class:extra_repr()
    local parts = {}
    for i, key in ipairs(order) do
      parts[i] = (bare and '' or key .. '=') .. show(self.options[key])
    end
    return table.concat(parts, ', ')
  end
  nn[name] = class
end

activation('Sigmoid', 'sigmoid')
activation('Tanh', 'tanh')
activation('ReLU6', 'relu6')
activation('SiLU', 'silu')
activation('Mish', 'mish')
activation('Softsign', 'softsign')
activation('Hardswish', 'hardswish')
activation('Hardsigmoid', 'hardsigmoid')
activation('LogSigmoid', 'logsigmoid')
activation('SELU', 'selu')
activation('Tanhshrink', 'tanhshrink')
activation('ELU', 'elu', { 'alpha' }, { alpha = 1 })
activation('CELU', 'celu', { 'alpha' }, { alpha = 1 })
activation('GELU', 'gelu', { 'approximate' }, { approximate = 'none' })
activation('LeakyReLU', 'leaky_relu', { 'negative_slope' }, { negative_slope = 0.01 })
activation('Softplus', 'softplus', { 'beta', 'threshold' }, { beta = 1, threshold = 20 })
activation('Softshrink', 'softshrink', { 'lambd' }, { lambd = 0.5 }, true)
activation('Hardshrink', 'hardshrink', { 'lambd' }, { lambd = 0.5 }, true)
activation('Hardtanh', 'hardtanh', { 'min_val', 'max_val' }, { min_val = -1, max_val = 1 })
activation('Softmax', 'softmax', { 'dim' }, { dim = -1 })
activation('Softmin', 'softmin', { 'dim' }, { dim = -1 })
activation('LogSoftmax', 'log_softmax', { 'dim' }, { dim = -1 })
activation('GLU', 'glu', { 'dim' }, { dim = -1 })

-- max(x, 0); in place with {inplace = true}.
nn.ReLU = Module:extend 'ReLU'
function nn.ReLU:init(...)
  self.inplace = arguments('ReLU', { 'inplace' }, { inplace = false }, ...).inplace
end
function nn.ReLU:forward(x) return self.inplace and x:relu_() or mf.relu(x) end
function nn.ReLU:extra_repr() return self.inplace and 'inplace=True' or '' end

-- x where x > threshold, else value.
nn.Threshold = Module:extend 'Threshold'
function nn.Threshold:init(threshold, value) self.threshold, self.value = threshold, value end
function nn.Threshold:forward(x) return mf.threshold(x, self.threshold, self.value) end
function nn.Threshold:extra_repr()
  return ('threshold=%g, value=%g'):format(self.threshold, self.value)
end

-- x where positive, else weight * x; the weight is learned, one or one for each channel.
nn.PReLU = Module:extend 'PReLU'
function nn.PReLU:init(...)
  local o = arguments('PReLU', { 'num_parameters', 'init' },
    { num_parameters = 1, init = 0.25 }, ...)
  self.num_parameters = o.num_parameters
  self.weight = Parameter(mf.full({ o.num_parameters }, o.init))
end
function nn.PReLU:forward(x) return mf.prelu(x, self.weight) end
function nn.PReLU:extra_repr() return 'num_parameters=' .. self.num_parameters end

-- -- Losses ---------------------------------------------------------------------------------------

-- nn[name], whose forward is mf[op](input, target, options); options named in `buffers` are
-- tensors, which move with the module.
local function loss(name, op, defaults, buffers)
  local class = Module:extend(name)
  defaults.reduction = 'mean'
  function class:init(o)
    o = options(name, o, defaults)
    options.choice(name, 'reduction', o.reduction, { 'none', 'mean', 'sum', 'batchmean' })
    for _, key in ipairs(buffers or {}) do
      self:register_buffer(key, o[key])
      o[key] = nil
    end
    self.options = o
  end
  function class:forward(input, target)
    local o = self.options
    for _, key in ipairs(buffers or {}) do o[key] = self[key] end
    return mf[op](input, target, o)
  end
  nn[name] = class
end

local tensor = options.userdata
loss('CrossEntropyLoss', 'cross_entropy',
  { weight = tensor, ignore_index = -100, label_smoothing = 0 }, { 'weight' })
loss('NLLLoss', 'nll_loss', { weight = tensor, ignore_index = -100 }, { 'weight' })
loss('MSELoss', 'mse_loss', {})
loss('L1Loss', 'l1_loss', {})
loss('SmoothL1Loss', 'smooth_l1_loss', { beta = 1 })
loss('HuberLoss', 'huber_loss', { delta = 1 })
loss('BCELoss', 'binary_cross_entropy', { weight = tensor }, { 'weight' })
loss('BCEWithLogitsLoss', 'binary_cross_entropy_with_logits',
  { weight = tensor, pos_weight = tensor }, { 'weight', 'pos_weight' })
loss('KLDivLoss', 'kl_div', { log_target = false })

-- The cosine of the angle between a and b along dim.
nn.CosineSimilarity = Module:extend 'CosineSimilarity'
function nn.CosineSimilarity:init(...)
  self.options = arguments('CosineSimilarity', { 'dim', 'eps' }, { dim = 1, eps = 1e-8 }, ...)
end
function nn.CosineSimilarity:forward(a, b) return mf.cosine_similarity(a, b, self.options) end
