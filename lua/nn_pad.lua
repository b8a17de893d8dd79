-- Padding and changes of shape as layers.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local options = require 'moonflow.options'
local fail = options.fail
local Module = nn.Module

-- nn[name]: a number, or amounts (left, right, top, bottom, ...), of the last n dims; with a value for
-- constant padding.
local function padding(name, n, mode, has_value)
  local class = Module:extend(name)
  function class:init(amounts, value)
    if type(amounts) == 'number' then
      local list = {}
      for k = 1, 2 * n do list[k] = amounts end
      amounts = list
    end
    if type(amounts) ~= 'table' or #amounts ~= 2 * n then
      fail('%s: padding must be a number or a table of %d, is %s', name, 2 * n, options.describe(amounts))
    end
    if has_value and type(value) ~= 'number' then
      fail('%s: value must be a number, is %s', name, options.describe(value))
    end
    self.padding, self.value = amounts, value or 0
  end
  function class:forward(x) return mf.pad(x, self.padding, { mode = mode, value = self.value }) end
  function class:extra_repr()
    local list = ('(%s)'):format(table.concat(self.padding, ', '))
    return has_value and ('padding=%s, value=%g'):format(list, self.value) or list
  end
  nn[name] = class
end

for n = 1, 3 do
  padding(('ZeroPad%dd'):format(n), n, 'constant')
  padding(('ConstantPad%dd'):format(n), n, 'constant', true)
  padding(('ReflectionPad%dd'):format(n), n, 'reflect')
  padding(('ReplicationPad%dd'):format(n), n, 'replicate')
  padding(('CircularPad%dd'):format(n), n, 'circular')
end

-- Dim `dim` as several dims of these sizes.
nn.Unflatten = Module:extend 'Unflatten'
function nn.Unflatten:init(dim, sizes) self.dim, self.sizes = dim, sizes end
function nn.Unflatten:forward(x) return x:unflatten(self.dim, self.sizes) end
function nn.Unflatten:extra_repr()
  return ('dim=%d, unflattened_size=(%s)'):format(self.dim, table.concat(self.sizes, ', '))
end

-- softmax over the channels of images (N, C, H, W) or (C, H, W).
nn.Softmax2d = Module:extend 'Softmax2d'
function nn.Softmax2d:forward(x) return mf.softmax(x, -3) end

-- The p-norm of x - y + eps along the last dim.
nn.PairwiseDistance = Module:extend 'PairwiseDistance'
function nn.PairwiseDistance:init(...)
  self.options = options.arguments('PairwiseDistance', { 'p', 'eps', 'keepdim' },
    { p = 2, eps = 1e-6, keepdim = false }, ...)
end
function nn.PairwiseDistance:forward(x, y) return mf.pairwise_distance(x, y, self.options) end

return nn
