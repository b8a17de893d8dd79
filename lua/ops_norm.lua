-- batch_norm without the statistics that its op keeps for the gradient.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'

-- Of a global x whose samples are split: statistics are those of all, formed from sums of the parts.
local function batch_norm_split(x, o)
  local dims, shape, n = {}, {}, 1
  for d = 0, x.ndim - 1 do
    shape[d + 1] = d == 1 and x:size(1) or 1
    if d ~= 1 then
      dims[#dims + 1] = d
      n = n * x:size(d)
    end
  end
  local function channel(t) return t:reshape(shape) end
  local mean = mf._settled(x:mean(dims, true))
  local xc = x - mean
  local var = mf._settled(xc:square():mean(dims, true))
  if o.running_mean then
    mf.no_grad(function()
      local m = o.momentum
      o.running_mean:mul_(1 - m):add_(mean:reshape(-1), { alpha = m })
      o.running_var:mul_(1 - m):add_(var:reshape(-1), { alpha = m * n / math.max(n - 1, 1) })
    end)
  end
  local y = xc * (var + o.eps):rsqrt()
  if o.weight then y = y * channel(o.weight) end
  if o.bias then y = y + channel(o.bias) end
  return y
end

local function splits_samples(x)
  for _, sbp in ipairs(x.sbp) do
    if sbp ~= 'B' and sbp ~= 'S1' then return true end
  end
  return false
end

-- mf.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps), the last three also as options.
function mf.batch_norm(...)
  local x = ...
  if mf.is_tensor(x) and x.is_global and x.ndim > 1 and splits_samples(x) then
    local o = options.arguments('batch_norm',
      { 'running_mean', 'running_var', 'weight', 'bias', 'training', 'momentum', 'eps' },
      { running_mean = options.none, running_var = options.none, weight = options.none, bias = options.none,
        training = false, momentum = 0.1, eps = 1e-5 }, select(2, ...))
    if o.training then return batch_norm_split(x, o) end
  end
  return (mf._batch_norm(...))
end
mf.Tensor.batch_norm = mf.batch_norm

return mf
