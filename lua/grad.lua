-- Gradients, one entry per op: for each input (or several at once) a function of
--   g  the gradient of the output (several outputs: a table by name, where some may be nil)
--   y  the output (several: by name)
--   o  the inputs and arguments by name; o.shape.NAME and o.dtype.NAME where those suffice
-- written with ops, so that gradients of gradients follow. The build reads which of y and o.NAME a line uses; only those are kept for it.
-- A gradient of a broadcast input is summed to its shape by the tape.
local mf = require 'moonflow.core'
local grad = {}

-- Arithmetic
grad.add = {
  a = function(g) return g end,
  b = function(g, _, o) return o.alpha == 1 and g or g * o.alpha end,
}
grad.sub = {
  a = function(g) return g end,
  b = function(g, _, o) return g * -o.alpha end,
}
grad.mul = {
  a = function(g, _, o) return g * o.b end,
  b = function(g, _, o) return g * o.a end,
}
grad.square = { x = function(g, _, o) return g * (o.x * 2) end }
grad.neg = { x = function(g) return -g end }

-- Copies
grad.clone = { x = function(g) return g end }
grad.cast = { x = function(g) return g end }

-- Matrix products. 1-d operands: a row for a, a column for b.
grad.matmul = {
  a = function(g, _, o)
    local b = o.b
    if b:dim() == 1 then return g:unsqueeze(-1) * b end
    if #o.shape.a == 1 then return b:matmul(g:unsqueeze(-1)):squeeze(-1) end
    return g:matmul(b:transpose(-2, -1))
  end,
  b = function(g, _, o)
    local a, n = o.a, #o.shape.b
    if a:dim() == 1 then return n == 1 and g * a or a:unsqueeze(-1) * g:unsqueeze(-2) end
    if n == 1 then return mf._linear_weight(g:unsqueeze(-1), a):squeeze(0) end
    if n == 2 then return mf._linear_weight(a, g) end
    return a:transpose(-2, -1):matmul(g)
  end,
}
grad.bmm = {
  a = function(g, _, o) return g:bmm(o.b:transpose(1, 2)) end,
  b = function(g, _, o) return o.a:transpose(1, 2):bmm(g) end,
}
grad.addmm = {
  c = function(g, _, o) return g * o.beta end,
  a = function(g, _, o) return g:matmul(o.b:t()) * o.alpha end,
  b = function(g, _, o) return o.a:t():matmul(g) * o.alpha end,
}
grad.linear = {
  x = function(g, _, o) return g:matmul(o.w) end,
  w = function(g, _, o) return mf._linear_weight(g, o.x) end,
  b = function(g) return g end,
}
grad.linear_weight = {
  g = function(g, _, o) return mf.linear(o.x, g) end,
  x = function(g, _, o) return o.g:matmul(g) end,
}

return grad
