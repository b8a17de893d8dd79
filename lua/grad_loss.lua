-- Gradients of src/op/loss.c.
local mf = require 'moonflow.core'
local grad = {}

grad.cross_entropy_rows = {
  x = function(g, y, o)
    local gx = g.loss and mf._cross_entropy_backward(g.loss:contiguous(), o.x, o.target, y.lse, o.weight,
      { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing })
    if not g.lse then return gx end -- asked for by the gradient of the gradient
    local through = g.lse:unsqueeze(1) * mf.softmax(o.x, { dim = 1 })
    return gx and gx + through or through
  end,
}

-- The op is g (A p - constants) with p = exp(x - lse) and A = (1 - s) w_t + s sum(w) / C; rows to be ignored are 0.
local function scaled(v, g, x, target, lse, weight, ignore_index, s)
  local valid = target:ne(ignore_index)
  local a = 1
  if weight then a = weight:index_select(0, mf.where(valid, target, 0)) * (1 - s) + weight:sum() * (s / x:size(1)) end
  return (g * valid:to(x.dtype) * a):unsqueeze(1) * (x - lse:unsqueeze(1)):exp() * v
end

grad.cross_entropy_backward = {
  g = function(v, _, o)
    local one = mf._cross_entropy_backward(mf.ones_like(o.g), o.x, o.target, o.lse, o.weight,
      { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing })
    return (v * one):sum(1)
  end,
  x = function(v, _, o) return scaled(v, o.g, o.x, o.target, o.lse, o.weight, o.ignore_index, o.label_smoothing) end,
  lse = function(v, _, o) return -scaled(v, o.g, o.x, o.target, o.lse, o.weight, o.ignore_index, o.label_smoothing):sum(1) end,
}

return grad
