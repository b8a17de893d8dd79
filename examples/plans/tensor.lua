-- Two ranks, each with half of the heads, of the hidden numbers and of the letters.
return {
  mesh = { tensor = 2 },
  split = {
    ['blocks.*.qkv'] = 'column', ['blocks.*.out'] = 'row', ['blocks.*.mlp.0'] = 'column', ['blocks.*.mlp.2'] = 'row',
    letter = 'vocabulary', head = 'column',
  },
}
