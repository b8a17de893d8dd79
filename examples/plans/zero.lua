-- Two ranks, each with half of the batch, of the optimiser's states, of gradients and of parameters.
return { mesh = { data = 2 }, zero = 3 }
