-- Layers that learn the size of their input from the first call, or from a state dict, as
-- torch.nn.LazyLinear. Until then parameters and buffers are empty; the tensors stay the same ones, so
-- that an optimiser may have them before. Afterwards the layer is one of the usual class.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local options = require 'moonflow.options'

-- nn[name] for a class whose init takes the size first; `field` is where it is kept. size(x) is the
-- size in an input, from_weight(self, w) the one in a weight; some(...) one that the arguments allow.
local function lazy(name, class, field, size, from_weight, some)
  local Lazy = class:extend(name)
  nn[name] = Lazy

  function Lazy:init(...)
    local arguments = { n = select('#', ...), ... }
    mf.device('meta', function() class.init(self, some(arguments), unpack(arguments, 1, arguments.n)) end)
    rawset(self, '_arguments', arguments)
    rawset(self, field, 0)
    for _, key in ipairs(self._keys) do
      local t = self[key]
      if mf.is_tensor(t) then t.data = mf.empty({ 0 }, { dtype = t.dtype }) end
    end
  end

  -- Becomes a layer for inputs of size n.
  function Lazy:materialize(n)
    local full = class(n, unpack(self._arguments, 1, self._arguments.n))
    for _, key in ipairs(full._keys) do
      local have, value = self[key], full[key]
      if mf.is_tensor(value) then
        have.data = value:detach():to { dtype = value:is_floating_point() and have.dtype or nil,
          device = have.device }
      else
        rawset(self, key, value)
      end
    end
    rawset(self, '_arguments', nil)
    setmetatable(self, class._meta)
  end

  -- The same for the tensors of a state dict whose names begin with prefix.
  function Lazy:materialize_from(dict, prefix)
    local w = dict[prefix .. 'weight'] or dict[prefix .. 'running_mean']
    if mf.is_tensor(w) and w.ndim > 0 then self:materialize(from_weight(self, w)) end
  end

  function Lazy:forward(x)
    if not mf.is_tensor(x) then
      options.fail('%s: the input must be a tensor, is %s', name, options.describe(x))
    end
    self:materialize(size(x))
    return self:forward(x)
  end
end

local function one() return 1 end
local function channels(x) return x:size(1) end

lazy('LazyLinear', nn.Linear, 'in_features', function(x) return x:size(-1) end,
  function(_, w) return w:size(1) end, one)
for n = 1, 2 do
  lazy(('LazyConv%dd'):format(n), nn[('Conv%dd'):format(n)], 'in_channels', function(x) return x:size(-1 - n) end,
    function(self, w) return w:size(1) * self.groups end, function(arguments) return arguments[1] end)
end
for _, name in ipairs { 'BatchNorm1d', 'BatchNorm2d', 'BatchNorm3d' } do
  lazy('Lazy' .. name, nn[name], 'num_features', channels, function(_, w) return w:size(0) end, one)
end

return nn
