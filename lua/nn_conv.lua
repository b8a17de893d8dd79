-- Convolutions over sequences and images, and their transposes. What follows required arguments can be
-- given by position or in a last table.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local init = require 'moonflow.nn_init'
local options = require 'moonflow.options'
local arguments, count, sizes = options.arguments, options.count, options.counts
local fail, none = options.fail, options.none
local Module, Parameter = nn.Module, nn.Parameter

-- As Python prints it.
local function show(v)
  if type(v) ~= 'table' then return tostring(v) end
  return ('(%s%s)'):format(table.concat(v, ', '), #v == 1 and ',' or '')
end

local function is_all(list, value)
  for _, v in ipairs(list) do
    if v ~= value then return false end
  end
  return true
end

-- What all have; `transposed` says which way the weights' channels go.
local function set_up(self, n, transposed, in_channels, out_channels, kernel_size, o)
  local name = self._name
  self.in_channels = count(name, 'in_channels', in_channels, 1)
  self.out_channels = count(name, 'out_channels', out_channels, 1)
  self.groups = count(name, 'groups', o.groups, 1)
  if in_channels % o.groups ~= 0 or out_channels % o.groups ~= 0 then
    fail('%s: in_channels %d and out_channels %d must be divisible by groups %d', name, in_channels, out_channels,
      o.groups)
  end
  self.kernel_size = sizes(name, 'kernel_size', kernel_size, n, 1)
  self.stride = sizes(name, 'stride', o.stride, n, 1)
  self.dilation = sizes(name, 'dilation', o.dilation, n, 1)
  self.padding_mode = o.padding_mode
  local first, second = out_channels, in_channels / o.groups
  if transposed then first, second = in_channels, out_channels / o.groups end
  local fan_in = second
  for _, k in ipairs(self.kernel_size) do fan_in = fan_in * k end
  local empty = mf.empty(first, second, unpack(self.kernel_size))
  self.weight = Parameter(init.kaiming_uniform_(empty, { a = math.sqrt(5) }))
  if o.bias then
    local bound = 1 / math.sqrt(fan_in)
    self.bias = Parameter(init.uniform_(mf.empty(out_channels), -bound, bound))
  end
end

local function repr(self)
  local text = ('%d, %d, kernel_size=%s, stride=%s'):format(self.in_channels, self.out_channels,
    show(self.kernel_size), show(self.stride))
  local function add(name, usual)
    local value = self[name]
    if type(value) == 'table' and is_all(value, usual) or value == usual then return end
    text = ('%s, %s=%s'):format(text, name, show(value))
  end
  add('padding', 0)
  add('dilation', 1)
  if self.output_padding then add('output_padding', 0) end
  add('groups', 1)
  if not self.bias then text = text .. ', bias=False' end
  add('padding_mode', 'zeros')
  return text
end

-- -- Convolution ----------------------------------------------------------------------------------

local modes = { reflect = 'reflect', replicate = 'replicate', circular = 'circular', zeros = 'constant' }

-- What a convolution with `padding` (a number, a table, 'same' or 'valid') adds: a list for mf.pad where
-- it has to be added before, and else the amounts by dim.
local function padding_of(self, n)
  local before, after, list, even = {}, {}, {}, true
  for d = 1, n do
    before[d], after[d] = 0, 0
    if self.padding == 'same' then
      if self.stride[d] ~= 1 then fail("%s: padding 'same' needs a stride of 1", self._name) end
      local total = self.dilation[d] * (self.kernel_size[d] - 1)
      before[d] = math.floor(total / 2)
      after[d] = total - before[d]
    elseif self.padding ~= 'valid' then
      before[d], after[d] = self.padding[d], self.padding[d]
    end
    even = even and before[d] == after[d]
    list[2 * (n - d) + 1], list[2 * (n - d) + 2] = before[d], after[d]
  end
  if self.padding_mode == 'zeros' and even then return nil, before end
  return list, 0
end

local function convolution(name, n, f)
  local class = Module:extend(name)
  function class:init(in_channels, out_channels, kernel_size, ...)
    local o = arguments(name, { 'stride', 'padding', 'dilation', 'groups', 'bias', 'padding_mode' },
      { stride = 1, padding = none, dilation = 1, groups = 1, bias = true, padding_mode = 'zeros' }, ...)
    options.choice(name, 'padding_mode', o.padding_mode, { 'zeros', 'reflect', 'replicate', 'circular' })
    set_up(self, n, false, in_channels, out_channels, kernel_size, o)
    self.padding = o.padding
    if o.padding ~= 'same' and o.padding ~= 'valid' then self.padding = sizes(name, 'padding', o.padding or 0, n) end
    local pad, amounts = padding_of(self, n)
    self.pad_first = pad
    self.options = { stride = self.stride, padding = amounts, dilation = self.dilation, groups = self.groups }
  end
  function class:forward(x)
    if self.pad_first then x = mf.pad(x, self.pad_first, { mode = modes[self.padding_mode] }) end
    return f(x, self.weight, self.bias, self.options)
  end
  class.extra_repr = repr
  return class
end

-- Convolution over images (N, C, H, W) or (C, H, W); weight (out_channels, in_channels / groups, kh, kw).
-- padding may be 'same' or 'valid'; padding_mode is 'zeros', 'reflect', 'replicate' or 'circular'.
nn.Conv2d = convolution('Conv2d', 2, mf.conv2d)

-- Convolution over sequences (N, C, L) or (C, L); weight (out_channels, in_channels / groups, k). The rest
-- as Conv2d.
nn.Conv1d = convolution('Conv1d', 1, mf.conv1d)

-- -- Its transpose --------------------------------------------------------------------------------

-- The output_padding that makes the result as large as asked for.
local function output_padding_for(self, n, x, output_size)
  local list, asked = {}, sizes(self._name, 'output_size', output_size, n)
  for d = 1, n do
    local least = (x:size(d - 1 - n) - 1) * self.stride[d] - 2 * self.padding[d]
      + self.dilation[d] * (self.kernel_size[d] - 1) + 1
    list[d] = asked[d] - least
    if list[d] < 0 or list[d] >= self.stride[d] then
      fail('%s: output_size must be %d to %d in dim %d, is %d', self._name, least, least + self.stride[d] - 1, d - 1,
        asked[d])
    end
  end
  return list
end

local function transposed(name, n, f)
  local class = Module:extend(name)
  function class:init(in_channels, out_channels, kernel_size, ...)
    local o = arguments(name, { 'stride', 'padding', 'output_padding', 'groups', 'bias', 'dilation', 'padding_mode' },
      { stride = 1, padding = 0, output_padding = 0, groups = 1, bias = true, dilation = 1, padding_mode = 'zeros' },
      ...)
    options.choice(name, 'padding_mode', o.padding_mode, { 'zeros' })
    set_up(self, n, true, in_channels, out_channels, kernel_size, o)
    self.padding = sizes(name, 'padding', o.padding, n)
    self.output_padding = sizes(name, 'output_padding', o.output_padding, n)
    self.options = { stride = self.stride, padding = self.padding, output_padding = self.output_padding,
      groups = self.groups, dilation = self.dilation }
  end
  function class:forward(x, output_size)
    local o = self.options
    if output_size then
      o = { output_padding = output_padding_for(self, n, x, output_size) }
      for key, value in pairs(self.options) do o[key] = o[key] or value end
    end
    return f(x, self.weight, self.bias, o)
  end
  class.extra_repr = repr
  return class
end

-- Transposed convolution over images (N, C, H, W): what gives a Conv2d's input its gradient; weight
-- (in_channels, out_channels / groups, kh, kw). H becomes (H - 1) stride - 2 padding + dilation (kh - 1)
-- + output_padding + 1; m(x, output_size) chooses the output_padding.
nn.ConvTranspose2d = transposed('ConvTranspose2d', 2, mf.conv_transpose2d)

-- Transposed convolution over sequences (N, C, L), as ConvTranspose2d.
nn.ConvTranspose1d = transposed('ConvTranspose1d', 1, mf.conv_transpose1d)

return nn
