-- Two ranks, each with half of the blocks; four micro-batches, and what is between blocks is computed anew.
return {
  mesh = { pipeline = 2 }, micro_batches = 4, remat = { 'blocks.*' },
  stages = { { 'letter', 'place', 'blocks.0', 'blocks.1' }, { 'blocks.2', 'blocks.3', 'norm', 'head' } },
}
