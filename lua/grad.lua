-- Gradients, one entry per op: for each input (or several at once) a function of
--   g  the gradient of the output (several outputs: a table by name, where some may be nil)
--   y  the output (several: by name)
--   o  the inputs and arguments by name; o.shape.NAME and o.dtype.NAME where those suffice
-- written with ops, so that gradients of gradients follow. The build reads which of y and o.NAME a
-- line uses; only those are kept for it. A gradient of a broadcast input is summed to its shape by
-- the tape.
local grad = {}

-- The other parts of this table: every lua/grad_FAMILY.lua, which the library embeds.
for name in pairs(package.preload) do
  if name:match '^moonflow%.grad_' then
    for op, lines in pairs(require(name)) do grad[op] = lines end
  end
end

-- Copies
grad.transfer = { x = function(g) return g end }
grad.clone = { x = function(g) return g end }
grad.cast = { x = function(g) return g end }

return grad
