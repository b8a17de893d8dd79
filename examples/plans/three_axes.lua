-- Eight ranks: two stages, each of halves of the batch by halves of the layers.
local folder = debug.getinfo(1).source:match '@(.*/)' or ''
local plan, stages = dofile(folder .. 'tensor.lua'), dofile(folder .. 'pipeline.lua')
plan.mesh = { pipeline = 2, data = 2, tensor = 2 }
plan.stages, plan.micro_batches = stages.stages, stages.micro_batches
return plan
