-- The layers of nn but for attention: names, arguments, defaults and initial values are PyTorch's.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local none = options.none

return function(nn)
  local Module, Parameter, init = nn.Module, nn.Parameter, nn.init

  -- One number or a pair of them as a pair.
  local function pair(v)
    if type(v) == 'table' then return v end
    return { v, v }
  end

  local function show(v)
    if type(v) ~= 'table' then return tostring(v) end
    return ('(%s)'):format(table.concat(v, ', '))
  end

  -- -- Linear and convolution -----------------------------------------------------------------------------------------------

  -- The bias of a layer whose units have `fan_in` inputs.
  local function new_bias(n, fan_in)
    local bound = fan_in > 0 and 1 / math.sqrt(fan_in) or 0
    return Parameter(init.uniform_(mf.empty(n), -bound, bound))
  end

  -- y = x W^T + b; weight (out_features, in_features).
  nn.Linear = Module:extend 'Linear'
  function nn.Linear:init(in_features, out_features, o)
    o = options('Linear', o, { bias = true })
    self.in_features, self.out_features = in_features, out_features
    self.weight = Parameter(init.kaiming_uniform_(mf.empty(out_features, in_features), { a = math.sqrt(5) }))
    if o.bias then self.bias = new_bias(out_features, in_features) end
  end
  function nn.Linear:forward(x) return mf.linear(x, self.weight, self.bias) end
  function nn.Linear:extra_repr()
    return ('in_features=%d, out_features=%d, bias=%s'):format(self.in_features, self.out_features, self.bias and 'True' or 'False')
  end

  -- Convolution over images (N, C, H, W); weight (out_channels, in_channels / groups, kh, kw).
  nn.Conv2d = Module:extend 'Conv2d'
  function nn.Conv2d:init(in_channels, out_channels, kernel_size, o)
    if type(o) == 'number' then o = { stride = o } end
    o = options('Conv2d', o, { stride = 1, padding = 0, dilation = 1, groups = 1, bias = true })
    if in_channels % o.groups ~= 0 or out_channels % o.groups ~= 0 then
      error(('Conv2d: in_channels %d and out_channels %d must be divisible by groups %d'):format(in_channels, out_channels, o.groups), 3)
    end
    self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, pair(kernel_size)
    self.stride, self.padding, self.dilation, self.groups = pair(o.stride), pair(o.padding), pair(o.dilation), o.groups
    local kh, kw = self.kernel_size[1], self.kernel_size[2]
    self.weight = Parameter(init.kaiming_uniform_(mf.empty(out_channels, in_channels / o.groups, kh, kw), { a = math.sqrt(5) }))
    if o.bias then self.bias = new_bias(out_channels, in_channels / o.groups * kh * kw) end
    rawset(self, 'options', { stride = self.stride, padding = self.padding, dilation = self.dilation, groups = self.groups })
  end
  function nn.Conv2d:forward(x) return mf.conv2d(x, self.weight, self.bias, self.options) end
  function nn.Conv2d:extra_repr()
    local text = ('%d, %d, kernel_size=%s, stride=%s'):format(self.in_channels, self.out_channels, show(self.kernel_size), show(self.stride))
    if self.padding[1] ~= 0 or self.padding[2] ~= 0 then text = text .. ', padding=' .. show(self.padding) end
    if self.dilation[1] ~= 1 or self.dilation[2] ~= 1 then text = text .. ', dilation=' .. show(self.dilation) end
    if self.groups ~= 1 then text = text .. ', groups=' .. self.groups end
    return self.bias and text or text .. ', bias=False'
  end

  -- -- Pooling ----------------------------------------------------------------------------------------------------------------

  nn.MaxPool2d = Module:extend 'MaxPool2d'
  function nn.MaxPool2d:init(kernel_size, o)
    if type(o) == 'number' then o = { stride = o } end
    o = options('MaxPool2d', o, { stride = none, padding = 0, dilation = 1, ceil_mode = false })
    self.kernel_size = kernel_size
    rawset(self, 'options', { stride = o.stride or kernel_size, padding = o.padding, dilation = o.dilation, ceil_mode = o.ceil_mode })
  end
  function nn.MaxPool2d:forward(x) return mf.max_pool2d(x, self.kernel_size, self.options) end
  function nn.MaxPool2d:extra_repr()
    local o = self.options
    return ('kernel_size=%s, stride=%s, padding=%s, dilation=%s, ceil_mode=%s'):format(show(self.kernel_size), show(o.stride),
      show(o.padding), show(o.dilation), o.ceil_mode and 'True' or 'False')
  end

  nn.AvgPool2d = Module:extend 'AvgPool2d'
  function nn.AvgPool2d:init(kernel_size, o)
    if type(o) == 'number' then o = { stride = o } end
    o = options('AvgPool2d', o, { stride = none, padding = 0, ceil_mode = false, count_include_pad = true })
    self.kernel_size = kernel_size
    rawset(self, 'options', {
      stride = o.stride or kernel_size, padding = o.padding, ceil_mode = o.ceil_mode, count_include_pad = o.count_include_pad })
  end
  function nn.AvgPool2d:forward(x) return mf.avg_pool2d(x, self.kernel_size, self.options) end
  function nn.AvgPool2d:extra_repr()
    return ('kernel_size=%s, stride=%s, padding=%s'):format(show(self.kernel_size), show(self.options.stride), show(self.options.padding))
  end

  nn.AdaptiveAvgPool2d = Module:extend 'AdaptiveAvgPool2d'
  function nn.AdaptiveAvgPool2d:init(output_size) self.output_size = output_size end
  function nn.AdaptiveAvgPool2d:forward(x) return mf.adaptive_avg_pool2d(x, self.output_size) end
  function nn.AdaptiveAvgPool2d:extra_repr() return 'output_size=' .. show(self.output_size) end

  -- -- Normalisation ------------------------------------------------------------------------------------------------------------

  local function batch_norm(name, ndims)
    local class = Module:extend(name)
    function class:init(num_features, o)
      o = options(name, o, { eps = 1e-5, momentum = 0.1, affine = true, track_running_stats = true })
      self.num_features, self.eps, self.momentum = num_features, o.eps, o.momentum
      self.track_running_stats = o.track_running_stats
      if o.affine then
        self.weight = Parameter(mf.ones(num_features))
        self.bias = Parameter(mf.zeros(num_features))
      end
      if o.track_running_stats then
        self:register_buffer('running_mean', mf.zeros(num_features))
        self:register_buffer('running_var', mf.ones(num_features))
        self:register_buffer('num_batches_tracked', mf.zeros({}, { dtype = mf.int64 }))
      end
    end
    function class:forward(x)
      if not ndims[x.ndim] then error(('%s: an input of shape %s has the wrong number of dims'):format(name, tostring(x.shape)), 3) end
      local training = self.training or not self.running_mean
      if self.training and self.num_batches_tracked then self.num_batches_tracked:add_(1) end
      return mf.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias,
        { training = training, momentum = self.momentum, eps = self.eps })
    end
    function class:extra_repr()
      return ('%d, eps=%g, momentum=%g, affine=%s, track_running_stats=%s'):format(self.num_features, self.eps, self.momentum,
        self.weight and 'True' or 'False', self.track_running_stats and 'True' or 'False')
    end
    return class
  end
  nn.BatchNorm1d = batch_norm('BatchNorm1d', { [2] = true, [3] = true })
  nn.BatchNorm2d = batch_norm('BatchNorm2d', { [4] = true })
  nn.BatchNorm3d = batch_norm('BatchNorm3d', { [5] = true })

  local function shape_list(v)
    return type(v) == 'number' and { v } or v
  end

  nn.LayerNorm = Module:extend 'LayerNorm'
  function nn.LayerNorm:init(normalized_shape, o)
    o = options('LayerNorm', o, { eps = 1e-5, elementwise_affine = true, bias = true })
    self.normalized_shape, self.eps = shape_list(normalized_shape), o.eps
    if o.elementwise_affine then
      self.weight = Parameter(mf.ones(self.normalized_shape))
      if o.bias then self.bias = Parameter(mf.zeros(self.normalized_shape)) end
    end
  end
  function nn.LayerNorm:forward(x) return mf.layer_norm(x, self.normalized_shape, self.weight, self.bias, { eps = self.eps }) end
  function nn.LayerNorm:extra_repr()
    local shape = #self.normalized_shape == 1 and ('(%d,)'):format(self.normalized_shape[1]) or show(self.normalized_shape)
    return ('%s, eps=%g, elementwise_affine=%s'):format(shape, self.eps, self.weight and 'True' or 'False')
  end

  nn.RMSNorm = Module:extend 'RMSNorm'
  function nn.RMSNorm:init(normalized_shape, o)
    o = options('RMSNorm', o, { eps = none, elementwise_affine = true })
    self.normalized_shape, self.eps = shape_list(normalized_shape), o.eps
    if o.elementwise_affine then self.weight = Parameter(mf.ones(self.normalized_shape)) end
  end
  function nn.RMSNorm:forward(x) return mf.rms_norm(x, self.normalized_shape, self.weight, { eps = self.eps }) end
  function nn.RMSNorm:extra_repr()
    return ('%s, eps=%s, elementwise_affine=%s'):format(show(self.normalized_shape), self.eps or 'None', self.weight and 'True' or 'False')
  end

  nn.GroupNorm = Module:extend 'GroupNorm'
  function nn.GroupNorm:init(num_groups, num_channels, o)
    o = options('GroupNorm', o, { eps = 1e-5, affine = true })
    if num_channels % num_groups ~= 0 then
      error(('GroupNorm: num_channels %d is not divisible by num_groups %d'):format(num_channels, num_groups), 3)
    end
    self.num_groups, self.num_channels, self.eps = num_groups, num_channels, o.eps
    if o.affine then
      self.weight = Parameter(mf.ones(num_channels))
      self.bias = Parameter(mf.zeros(num_channels))
    end
  end
  function nn.GroupNorm:forward(x) return mf.group_norm(x, self.num_groups, self.weight, self.bias, { eps = self.eps }) end
  function nn.GroupNorm:extra_repr()
    return ('%d, %d, eps=%g, affine=%s'):format(self.num_groups, self.num_channels, self.eps, self.weight and 'True' or 'False')
  end

  -- -- Dropout, embedding, shapes ---------------------------------------------------------------------------------------------------

  nn.Dropout = Module:extend 'Dropout'
  function nn.Dropout:init(p)
    p = p or 0.5
    if type(p) ~= 'number' or p < 0 or p > 1 then error('Dropout: p must be between 0 and 1, is ' .. tostring(p), 3) end
    self.p = p
  end
  function nn.Dropout:forward(x)
    if not self.training or self.p == 0 then return x end
    return mf.dropout(x, self.p)
  end
  function nn.Dropout:extra_repr() return ('p=%g'):format(self.p) end

  -- Rows of a table by ids of any shape; {sparse = true} gives the table a row-sparse gradient.
  nn.Embedding = Module:extend 'Embedding'
  function nn.Embedding:init(num_embeddings, embedding_dim, o)
    o = options('Embedding', o, { padding_idx = none, sparse = false })
    self.num_embeddings, self.embedding_dim, self.padding_idx, self.sparse = num_embeddings, embedding_dim, o.padding_idx, o.sparse
    local weight = init.normal_(mf.empty(num_embeddings, embedding_dim))
    if o.padding_idx then
      if o.padding_idx < -num_embeddings or o.padding_idx >= num_embeddings then
        error(('Embedding: padding_idx %d is out of range for %d rows'):format(o.padding_idx, num_embeddings), 3)
      end
      if o.padding_idx < 0 then self.padding_idx = o.padding_idx + num_embeddings end
      mf.no_grad(function() weight:select(0, self.padding_idx):fill_(0) end)
    end
    self.weight = Parameter(weight)
    rawset(self, 'options', { padding_idx = self.padding_idx, sparse = self.sparse })
  end
  function nn.Embedding:forward(ids) return mf.embedding(ids, self.weight, self.options) end
  function nn.Embedding:extra_repr()
    local text = ('%d, %d'):format(self.num_embeddings, self.embedding_dim)
    if self.padding_idx then text = text .. ', padding_idx=' .. self.padding_idx end
    return self.sparse and text .. ', sparse=True' or text
  end

  nn.Identity = Module:extend 'Identity'
  function nn.Identity:forward(x) return x end -- luacheck: ignore 212

  nn.Flatten = Module:extend 'Flatten'
  function nn.Flatten:init(start_dim, end_dim) self.start_dim, self.end_dim = start_dim or 1, end_dim or -1 end
  function nn.Flatten:forward(x) return x:flatten(self.start_dim, self.end_dim) end
  function nn.Flatten:extra_repr() return ('start_dim=%d, end_dim=%d'):format(self.start_dim, self.end_dim) end

  -- -- Activations: a class whose forward is mf.NAME with the options given ------------------------------------------------------------

  local function activation(name, op, defaults, first)
    local class = Module:extend(name)
    function class:init(o)
      if first and o ~= nil and type(o) ~= 'table' then o = { [first] = o } end
      rawset(self, 'options', options(name, o, defaults or {}, 3))
    end
    function class:forward(x) return mf[op](x, self.options) end
    function class:extra_repr()
      local parts = {}
      for key, value in pairs(self.options) do parts[#parts + 1] = ('%s=%s'):format(key, tostring(value)) end
      table.sort(parts)
      return table.concat(parts, ', ')
    end
    nn[name] = class
  end
  for name, op in pairs { Sigmoid = 'sigmoid', Tanh = 'tanh', ReLU6 = 'relu6', SiLU = 'silu', Mish = 'mish', Softsign = 'softsign',
    Hardswish = 'hardswish', Hardsigmoid = 'hardsigmoid', LogSigmoid = 'logsigmoid', SELU = 'selu', Tanhshrink = 'tanhshrink' } do
    activation(name, op)
  end
  activation('ELU', 'elu', { alpha = 1 }, 'alpha')
  activation('CELU', 'celu', { alpha = 1 }, 'alpha')
  activation('GELU', 'gelu', { approximate = 'none' })
  activation('LeakyReLU', 'leaky_relu', { negative_slope = 0.01 }, 'negative_slope')
  activation('Softplus', 'softplus', { beta = 1, threshold = 20 })
  activation('Softshrink', 'softshrink', { lambd = 0.5 }, 'lambd')
  activation('Hardshrink', 'hardshrink', { lambd = 0.5 }, 'lambd')
  activation('Hardtanh', 'hardtanh', { min_val = -1, max_val = 1 })
  activation('Softmax', 'softmax', { dim = -1 })
  activation('LogSoftmax', 'log_softmax', { dim = -1 })
  activation('GLU', 'glu', { dim = -1 })

  nn.ReLU = Module:extend 'ReLU'
  function nn.ReLU:init(o)
    self.inplace = options('ReLU', o, { inplace = false }).inplace
  end
  function nn.ReLU:forward(x) return self.inplace and x:relu_() or mf.relu(x) end

  nn.Threshold = Module:extend 'Threshold'
  function nn.Threshold:init(threshold, value) self.threshold, self.value = threshold, value end
  function nn.Threshold:forward(x) return mf.threshold(x, self.threshold, self.value) end

  nn.PReLU = Module:extend 'PReLU'
  function nn.PReLU:init(o)
    o = options('PReLU', o, { num_parameters = 1, init = 0.25 })
    self.num_parameters = o.num_parameters
    self.weight = Parameter(mf.full(o.num_parameters, o.init))
  end
  function nn.PReLU:forward(x) return mf.prelu(x, self.weight) end
  function nn.PReLU:extra_repr() return 'num_parameters=' .. self.num_parameters end

  -- -- Losses: a class whose forward is mf.NAME(input, target, options) -----------------------------------------------------------------

  local function loss(name, op, defaults, tensors)
    local class = Module:extend(name)
    defaults.reduction = 'mean'
    function class:init(o)
      local read = options(name, o, defaults, 3)
      for _, key in ipairs(tensors or {}) do
        if read[key] then self:register_buffer(key, read[key]) end
        read[key] = nil
      end
      rawset(self, 'options', read)
      rawset(self, 'tensors', tensors)
    end
    function class:forward(input, target)
      local o = self.options
      if self.tensors then
        o = {}
        for key, value in pairs(self.options) do o[key] = value end
        for _, key in ipairs(self.tensors) do o[key] = rawget(self, key) end
      end
      return mf[op](input, target, o)
    end
    nn[name] = class
  end
  loss('CrossEntropyLoss', 'cross_entropy', { weight = none, ignore_index = -100, label_smoothing = 0 }, { 'weight' })
  loss('NLLLoss', 'nll_loss', { weight = none, ignore_index = -100 }, { 'weight' })
  loss('MSELoss', 'mse_loss', {})
  loss('L1Loss', 'l1_loss', {})
  loss('SmoothL1Loss', 'smooth_l1_loss', { beta = 1 })
  loss('HuberLoss', 'huber_loss', { delta = 1 })
  loss('BCELoss', 'binary_cross_entropy', { weight = none }, { 'weight' })
  loss('BCEWithLogitsLoss', 'binary_cross_entropy_with_logits', { weight = none, pos_weight = none }, { 'weight', 'pos_weight' })
  loss('KLDivLoss', 'kl_div', { log_target = false })

  nn.CosineSimilarity = Module:extend 'CosineSimilarity'
  function nn.CosineSimilarity:init(o)
    rawset(self, 'options', options('CosineSimilarity', o, { dim = 1, eps = 1e-8 }))
  end
  function nn.CosineSimilarity:forward(a, b) return mf.cosine_similarity(a, b, self.options) end
end
