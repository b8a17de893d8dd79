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

return grad
