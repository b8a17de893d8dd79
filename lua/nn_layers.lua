-- Layers: linear, pooling, normalisation, dropout, embedding. What follows required
-- arguments can be given by position or in a last table.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local init = require 'moonflow.nn_init'
local options = require 'moonflow.options'
local arguments, count, fail, none = options.arguments, options.count, options.fail, options.none
local Module, Parameter = nn.Module, nn.Parameter

-- As Python prints it.
local function show(v)
  if type(v) == 'table' then return ('(%s)'):format(table.concat(v, ', ')) end
  if type(v) == 'boolean' then return v and 'True' or 'False' end
  return v == nil and 'None' or tostring(v)
end

-- -- Linear ---------------------------------------------------------------------------------------

-- y = x W^T + b; weight (out_features, in_features).
nn.Linear = Module:extend 'Linear'
function nn.Linear:init(in_features, out_features, ...)
  local o = arguments('Linear', { 'bias' }, { bias = true }, ...)
  self.in_features = count('Linear', 'in_features', in_features)
  self.out_features = count('Linear', 'out_features', out_features)
  self.weight = Parameter(init.kaiming_uniform_(mf.empty(out_features, in_features), { a = math.sqrt(5) }))
  if not o.bias then return end
  local bound = in_features > 0 and 1 / math.sqrt(in_features) or 0
  self.bias = Parameter(init.uniform_(mf.empty(out_features), -bound, bound))
end
function nn.Linear:forward(x) return mf.linear(x, self.weight, self.bias) end
function nn.Linear:extra_repr()
  return ('in_features=%d, out_features=%d, bias=%s'):format(self.in_features, self.out_features,
    show(self.bias ~= nil))
end

-- -- Pooling --------------------------------------------------------------------------------------

-- The largest element of each window of x (N, C, H, W); stride is kernel_size unless given.
nn.MaxPool2d = Module:extend 'MaxPool2d'
function nn.MaxPool2d:init(kernel_size, ...)
  self.kernel_size = kernel_size
  self.options = arguments('MaxPool2d', { 'stride', 'padding', 'dilation' },
    { stride = none, padding = 0, dilation = 1, ceil_mode = false }, ...)
  self.options.stride = self.options.stride or kernel_size
end
function nn.MaxPool2d:forward(x) return mf.max_pool2d(x, self.kernel_size, self.options) end
function nn.MaxPool2d:extra_repr()
  local o = self.options
  return ('kernel_size=%s, stride=%s, padding=%s, dilation=%s, ceil_mode=%s'):format(
    show(self.kernel_size), show(o.stride), show(o.padding), show(o.dilation), show(o.ceil_mode))
end

-- The mean of each window of x (N, C, H, W); stride is kernel_size unless given.
nn.AvgPool2d = Module:extend 'AvgPool2d'
function nn.AvgPool2d:init(kernel_size, ...)
  self.kernel_size = kernel_size
  self.options = arguments('AvgPool2d', { 'stride', 'padding', 'ceil_mode', 'count_include_pad' },
    { stride = none, padding = 0, ceil_mode = false, count_include_pad = true }, ...)
  self.options.stride = self.options.stride or kernel_size
end
function nn.AvgPool2d:forward(x) return mf.avg_pool2d(x, self.kernel_size, self.options) end
function nn.AvgPool2d:extra_repr()
  return ('kernel_size=%s, stride=%s, padding=%s'):format(show(self.kernel_size),
    show(self.options.stride), show(self.options.padding))
end

-- The mean over windows that divide (N, C, H, W) into output_size parts.
nn.AdaptiveAvgPool2d = Module:extend 'AdaptiveAvgPool2d'
function nn.AdaptiveAvgPool2d:init(output_size) self.output_size = output_size end
function nn.AdaptiveAvgPool2d:forward(x) return mf.adaptive_avg_pool2d(x, self.output_size) end
function nn.AdaptiveAvgPool2d:extra_repr() return 'output_size=' .. show(self.output_size) end

-- -- Normalisation --------------------------------------------------------------------------------

local function add_affine(self, shape, bias)
  self.weight = Parameter(mf.ones(shape))
  if bias then self.bias = Parameter(mf.zeros(shape)) end
end

-- Plain averages over all batches while a step is compiled, where their number is none of Lua's: what this
-- batch has goes into tensors of its own first.
local function batch_norm_average(self, x)
  local mean, var = mf.zeros_like(self.running_mean), mf.zeros_like(self.running_var)
  local y = mf.batch_norm(x, mean, var, self.weight, self.bias, { training = true, momentum = 1, eps = self.eps })
  mf.no_grad(function()
    local part = 1 / self.num_batches_tracked:to(mean.dtype)
    self.running_mean:copy_(self.running_mean * (1 - part) + mean * part)
    self.running_var:copy_(self.running_var * (1 - part) + var * part)
  end)
  return y
end

local function batch_norm_forward(self, x)
  if not self.ndims[x.ndim] then
    fail('%s: x has shape %s; it must have %s dims', self._name, tostring(x.shape), self.ndims.text)
  end
  local training = self.training or not self.running_mean
  local momentum, tracked = self.momentum, self.training and self.num_batches_tracked
  if tracked then tracked:add_(1) end
  if tracked and not momentum and mf._tracing() then return batch_norm_average(self, x) end
  if not momentum then momentum = tracked and 1 / tracked:item() or 0 end
  return mf.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias,
    { training = training, momentum = momentum, eps = self.eps })
end

-- A class for inputs (N, C, ...) with a number of dims among `ndims`.
local function batch_norm(name, ndims)
  local class = Module:extend(name)
  class.ndims, class.forward = ndims, batch_norm_forward
  function class:init(num_features, ...)
    local o = arguments(name, { 'eps', 'momentum', 'affine', 'track_running_stats' },
      { eps = 1e-5, momentum = none, affine = true, track_running_stats = true }, ...)
    if o.momentum == nil then o.momentum = 0.1 end
    if o.momentum and type(o.momentum) ~= 'number' then
      fail('%s: momentum must be a number, or false for plain averages, is %s', name,
        options.describe(o.momentum))
    end
    self.num_features = count(name, 'num_features', num_features, 1)
    self.eps, self.momentum, self.affine = o.eps, o.momentum, o.affine
    self.track_running_stats = o.track_running_stats
    if o.affine then add_affine(self, { num_features }, true) end
    if o.track_running_stats then
      self:register_buffer('running_mean', mf.zeros(num_features))
      self:register_buffer('running_var', mf.ones(num_features))
      self:register_buffer('num_batches_tracked', mf.zeros({}, { dtype = mf.int64 }))
    end
  end
  function class:extra_repr()
    local momentum = self.momentum and ('%g'):format(self.momentum) or 'None'
    return ('%d, eps=%g, momentum=%s, affine=%s, track_running_stats=%s'):format(self.num_features,
      self.eps, momentum, show(self.affine), show(self.track_running_stats))
  end
  return class
end
nn.BatchNorm1d = batch_norm('BatchNorm1d', { [2] = true, [3] = true, text = '2 or 3' })
nn.BatchNorm2d = batch_norm('BatchNorm2d', { [4] = true, text = '4' })
nn.BatchNorm3d = batch_norm('BatchNorm3d', { [5] = true, text = '5' })

-- A shape as PyTorch prints it; one size is (n,).
local function show_shape(shape)
  return #shape == 1 and ('(%d,)'):format(shape[1]) or show(shape)
end

-- Normalises over the last dims, those of normalized_shape.
nn.LayerNorm = Module:extend 'LayerNorm'
function nn.LayerNorm:init(normalized_shape, ...)
  local o = arguments('LayerNorm', { 'eps', 'elementwise_affine', 'bias' },
    { eps = 1e-5, elementwise_affine = true, bias = true }, ...)
  if type(normalized_shape) == 'number' then normalized_shape = { normalized_shape } end
  self.normalized_shape, self.options = normalized_shape, { eps = o.eps }
  if o.elementwise_affine then add_affine(self, normalized_shape, o.bias) end
end
function nn.LayerNorm:forward(x)
  return mf.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.options)
end
function nn.LayerNorm:extra_repr()
  return ('%s, eps=%g, elementwise_affine=%s'):format(show_shape(self.normalized_shape),
    self.options.eps, show(self.weight ~= nil))
end

-- Divides by the root mean square over the last dims, those of normalized_shape.
nn.RMSNorm = Module:extend 'RMSNorm'
function nn.RMSNorm:init(normalized_shape, ...)
  local o = arguments('RMSNorm', { 'eps', 'elementwise_affine' },
    { eps = options.number, elementwise_affine = true }, ...)
  if type(normalized_shape) == 'number' then normalized_shape = { normalized_shape } end
  self.normalized_shape, self.options = normalized_shape, { eps = o.eps }
  if o.elementwise_affine then add_affine(self, normalized_shape, false) end
end
function nn.RMSNorm:forward(x)
  return mf.rms_norm(x, self.normalized_shape, self.weight, self.options)
end
function nn.RMSNorm:extra_repr()
  return ('%s, eps=%s, elementwise_affine=%s'):format(show_shape(self.normalized_shape),
    show(self.options.eps), show(self.weight ~= nil))
end

-- Normalises groups of channels of x (N, C, ...), each sample by itself.
nn.GroupNorm = Module:extend 'GroupNorm'
function nn.GroupNorm:init(num_groups, num_channels, ...)
  local o = arguments('GroupNorm', { 'eps', 'affine' }, { eps = 1e-5, affine = true }, ...)
  self.num_groups = count('GroupNorm', 'num_groups', num_groups, 1)
  self.num_channels = count('GroupNorm', 'num_channels', num_channels, 1)
  if num_channels % num_groups ~= 0 then
    fail('GroupNorm: num_channels %d is not divisible by num_groups %d', num_channels, num_groups)
  end
  self.options = { eps = o.eps }
  if o.affine then add_affine(self, { num_channels }, true) end
end
function nn.GroupNorm:forward(x)
  return mf.group_norm(x, self.num_groups, self.weight, self.bias, self.options)
end
function nn.GroupNorm:extra_repr()
  return ('%d, %d, eps=%g, affine=%s'):format(self.num_groups, self.num_channels, self.options.eps,
    show(self.weight ~= nil))
end

-- -- Dropout, embedding, shapes -------------------------------------------------------------------

-- A class whose forward is mf[op] in training.
local function dropout(name, op)
  local class = Module:extend(name)
  function class:init(...)
    local o = arguments(name, { 'p', 'inplace' }, { p = 0.5, inplace = false }, ...)
    self.p, self.inplace = o.p, o.inplace
    if not (self.p >= 0 and self.p <= 1) then
      fail('%s: p must be from 0 to 1, is %s', name, tostring(self.p))
    end
  end
  function class:forward(x)
    if not self.training or self.p == 0 then return x end
    local y = mf[op](x, self.p)
    return self.inplace and x:copy_(y) or y
  end
  function class:extra_repr() return ('p=%g, inplace=%s'):format(self.p, show(self.inplace)) end
  return class
end
-- In training, zeros with probability p; what stays is scaled by 1 / (1 - p).
nn.Dropout = dropout('Dropout', 'dropout')
-- In training, whole channels of (N, C, L) become zeros with probability p.
nn.Dropout1d = dropout('Dropout1d', 'dropout1d')
-- In training, whole channels of (N, C, H, W) become zeros with probability p.
nn.Dropout2d = dropout('Dropout2d', 'dropout2d')
-- In training, whole channels of (N, C, D, H, W) become zeros with probability p.
nn.Dropout3d = dropout('Dropout3d', 'dropout3d')

-- Rows of a table by ids of any shape. The row padding_idx is zero at first and gets no gradient;
-- {sparse = true} gives the table a row-sparse gradient.
nn.Embedding = Module:extend 'Embedding'
function nn.Embedding:init(num_embeddings, embedding_dim, ...)
  local o = arguments('Embedding', { 'padding_idx' },
    { padding_idx = options.number, sparse = false }, ...)
  local n = count('Embedding', 'num_embeddings', num_embeddings)
  self.num_embeddings = n
  self.embedding_dim = count('Embedding', 'embedding_dim', embedding_dim)
  self.weight = Parameter(init.normal_(mf.empty(n, embedding_dim)))
  if o.padding_idx then
    if o.padding_idx < -n or o.padding_idx >= n then
      fail('Embedding: padding_idx %g is out of range for %d rows', o.padding_idx, n)
    end
    if o.padding_idx < 0 then o.padding_idx = o.padding_idx + n end
    init.zeros_(self.weight.data:select(0, o.padding_idx))
  end
  self.options, self.sparse = o, o.sparse
end
-- An embedding of the rows of a tensor, which are not trained unless {freeze = false}.
function nn.Embedding.from_pretrained(weight, o)
  o = options('from_pretrained', o, { freeze = true, padding_idx = options.number, sparse = false })
  if not mf.is_tensor(weight) or weight.ndim ~= 2 then
    fail 'from_pretrained: a tensor of two dims is needed'
  end
  local e = mf.device('meta', function()
    return nn.Embedding(weight:size(0), weight:size(1), { padding_idx = o.padding_idx, sparse = o.sparse })
  end)
  e.weight.data = weight:detach()
  e.weight:requires_grad_(not o.freeze)
  return e
end
function nn.Embedding:forward(ids) return mf.embedding(ids, self.weight, self.options) end
function nn.Embedding:extra_repr()
  local o = self.options
  local text = ('%d, %d'):format(self.num_embeddings, self.embedding_dim)
  if o.padding_idx then text = text .. ', padding_idx=' .. o.padding_idx end
  return o.sparse and text .. ', sparse=True' or text
end

-- Gives back what it gets.
nn.Identity = Module:extend 'Identity'
function nn.Identity:forward(x) return x end

-- The dims start_dim to end_dim as one.
nn.Flatten = Module:extend 'Flatten'
function nn.Flatten:init(...)
  local o = arguments('Flatten', { 'start_dim', 'end_dim' }, { start_dim = 1, end_dim = -1 }, ...)
  self.start_dim, self.end_dim = o.start_dim, o.end_dim
end
function nn.Flatten:forward(x) return x:flatten(self.start_dim, self.end_dim) end
function nn.Flatten:extra_repr()
  return ('start_dim=%d, end_dim=%d'):format(self.start_dim, self.end_dim)
end
