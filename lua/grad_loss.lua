-- Gradients of src/op/loss.c.
local mf = require 'moonflow.core'
local grad = {}

grad.cross_entropy_rows = {
  x = function(g, y, o)
    if not g.loss then return nil end -- lse and row_weight have no gradient of their own: they are not handed out
    return mf._cross_entropy_backward(g.loss:contiguous(), o.x, o.target, y.lse, o.weight,
      { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing })
  end,
}

grad.cross_entropy_backward = {
  g = function(v, _, o)
    local one = mf._cross_entropy_backward(mf.ones_like(o.g), o.x, o.target, o.lse, o.weight,
      { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing })
    return (v * one):sum(1)
  end,
  -- The gradient is g (A p - constants) with p = softmax(x) and A = (1 - s) w_t + s sum(w) / C; that of p . v is p (v - p . v).
  x = function(v, _, o)
    local classes, s, valid = o.x:size(1), o.label_smoothing, o.target:ne(o.ignore_index)
    local label = mf.where(valid, o.target, 0)
    local a = o.weight and o.weight:index_select(0, label) * (1 - s) + o.weight:sum() * (s / classes) or 1
    local p = mf.softmax(o.x, { dim = 1 })
    local scale = (o.g * valid * a):unsqueeze(1)
    return scale * p * (v - (p * v):sum(1, { keepdim = true }))
  end,
}

return grad
