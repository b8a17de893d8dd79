-- Two ranks, each with half of the batch: moonflow -n 2 examples/gpt.lua --plan examples/plans/data.lua
return { mesh = { data = 2 } }
