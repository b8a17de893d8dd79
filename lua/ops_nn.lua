-- Composed functions of layers: prelu, glu, normalize, softmin.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local Tensor = mf.Tensor

-- x where positive, else w x; w has one element, or one a channel (dim 1).
function mf.prelu(x, w)
  if w:numel() ~= 1 then
    if x.ndim < 2 or w.ndim ~= 1 or w:size(0) ~= x:size(1) then
      local text = 'prelu: w must have one element, or one for each of the channels of x %s; has shape %s'
      fail(text, tostring(x.shape), tostring(w.shape))
    end
    local shape = {}
    for d = 0, x.ndim - 1 do shape[d + 1] = d == 1 and w:size(0) or 1 end
    w = w:reshape(shape)
  elseif w.ndim > x.ndim then w = w:reshape {} end
  return mf._prelu_kernel(x, w)
end

-- The first half of x along dim times the sigmoid of the second.
function mf.glu(x, dim)
  if type(dim) == 'table' then dim = options('glu', dim, { dim = -1 }).dim end
  dim = dim or -1
  local n = x:size(dim)
  if n % 2 ~= 0 then fail('glu: dim %d of x %s must have an even size', dim, tostring(x.shape)) end
  return x:narrow(dim, 0, n / 2) * x:narrow(dim, n / 2, n / 2):sigmoid()
end

-- x divided by its p-norm along dim, which counts as eps at least.
function mf.normalize(x, o)
  o = options('normalize', o, { p = 2, dim = 1, eps = 1e-12 })
  return x / x:norm({ p = o.p, dim = o.dim, keepdim = true }):clamp { min = o.eps }
end

-- softmax of -x.
function mf.softmin(x, dim)
  if type(dim) == 'table' then dim = options('softmin', dim, { dim = -1 }).dim end
  return mf.softmax(-x, dim or -1)
end

Tensor.prelu, Tensor.glu, Tensor.normalize, Tensor.softmin = mf.prelu, mf.glu, mf.normalize, mf.softmin
return mf
