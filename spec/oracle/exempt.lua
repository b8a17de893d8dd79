-- What the oracle does not check, by name and with the reason.
local index = 'needs the global index: what an element gets depends on where it stands in the whole'
local draws = index .. ', by which random numbers are drawn'
local memory = 'is about memory: strides of the whole mean nothing in a part'
local data = 'the shape depends on data, which differs from part to part'
local size = 'the shape depends on data, and all memory is planned before there is any'
local selects = 'its gradient selects elements, and how many depends on data'
local compiled = 'made by the compiler for parts, which are local'
local micro = 'made by the compiler, between a step and its micro-batches, when gradients are ops already'
local step = 'an optimiser step is not recorded'
local ranks = 'a record of what moves between ranks, which the runtime does'

return {
  no_kernel = {
    box = ranks, box_parts = ranks, box_part = ranks, all_reduce = ranks, reduce_bucket = ranks, reduce_scatter = ranks,
    all_gather = ranks, all_to_all = ranks, exchange = ranks,
  },
  -- Ops with float inputs and no gradient.
  no_gradient = {
    ['adadelta_'] = step, ['adagrad_'] = step, ['adagrad_rows_'] = step, ['adam_'] = step, ['adam_rows_'] = step,
    ['adamax_'] = step, ['rmsprop_'] = step, ['sgd_'] = step, ['sgd_rows_'] = step,
    ['scale_all_'] = 'writes into gradients, which have none',
    ['zero_all_'] = 'writes into gradients, which have none',
    micro_unpack = micro, micro_repeat = micro, micro_mean = micro, micro_pack = micro, micro_last = micro,
  },
  -- Inputs of ops that have a gradient, which are not served: OP.PARAM.
  no_input_gradient = {
    ['batch_norm.running_mean'] = 'running statistics are not trained',
    ['batch_norm.running_var'] = 'running statistics are not trained',
    ['attention.mask'] = 'scaled_dot_product_attention takes another way when a mask wants one',
    ['attention_backward.mask'] = 'scaled_dot_product_attention takes another way when a mask wants one',
    ['cross_entropy.weight'] = 'PyTorch has none for class weights either',
    ['cross_entropy_backward.weight'] = 'PyTorch has none for class weights either',
  },
  -- Results that the library's own Lua does not differentiate by, by op.
  no_output_gradient = {
    cross_entropy = { lse = true, total = true },
    attention = { lse = true }, plain_attention = { lse = true }, drop_attention = { lse = true },
    batch_norm = { mean = true, rstd = true, running_mean = true, running_var = true },
    batch_norm_act = { mean = true, rstd = true, running_mean = true, running_var = true },
  },
  -- The line gives total derivatives: some inputs are made from others, which a difference does not
  -- know. Covered by the second gradients of the op whose gradient it is.
  total_gradient = {
    attention_backward = 'y and lse are made from q, k and v', batch_norm_backward = 'mean and rstd are made from x',
  },
  -- Only "all B" is legal.
  no_sbp = {
    randperm = draws, multinomial = draws, drop_attention = draws, drop_attention_backward = draws,
    masked_select = data, masked_select_backward = data, masked_scatter = data, nonzero = data,
    slice_base = memory, scatter_base = memory, as_strided = memory, strided_add = memory,
    fused = 'made when the splits are chosen already: it runs on parts',
    total_norm = 'a root of a sum of squares: the optimiser adds up the parts before the root',
  },
  -- Not called on global tensors.
  no_global = {
    micro_unpack = micro, micro_repeat = micro, micro_mean = micro, micro_pack = micro, micro_last = micro,
    fused = compiled,
  },
  -- Results that are not determined by the inputs.
  undefined = { empty = 'holds whatever was in memory', empty_like = 'holds whatever was in memory' },
  -- Inputs with other strides are refused, or mean something else.
  needs_memory = {
    as_strided = 'reads memory by strides of its own', view = 'never copies: other strides are refused',
    ['adadelta_'] = 'parameters are dense', ['adagrad_'] = 'parameters are dense', ['adam_'] = 'parameters are dense',
    ['adamax_'] = 'parameters are dense', ['rmsprop_'] = 'parameters are dense', ['sgd_'] = 'parameters are dense',
    ['scale_all_'] = 'gradients are dense', ['zero_all_'] = 'gradients are dense',
    ['adagrad_rows_'] = 'parameters are contiguous', ['adam_rows_'] = 'parameters are contiguous',
    ['sgd_rows_'] = 'parameters are contiguous',
  },
  -- Rows cannot all be the first one.
  no_expanded = { masked_select_backward = 'the number of selected elements is given by g' },
  -- No run without elements.
  no_empty = {
    amax = 'nothing has no largest element', amin = 'nothing has no smallest element',
    mean = 'the mean of nothing is NaN', var = 'the mean of nothing is NaN', std = 'the mean of nothing is NaN',
    cross_entropy = 'the mean of nothing is NaN', linear_cross_entropy = 'the mean of nothing is NaN',
    mse_loss = 'the mean of nothing is NaN',
    l1_loss = 'the mean of nothing is NaN', smooth_l1_loss = 'the mean of nothing is NaN',
    huber_loss = 'the mean of nothing is NaN', bce_loss = 'the mean of nothing is NaN',
    bce_logits_loss = 'the mean of nothing is NaN', kl_loss = 'the mean of nothing is NaN',
  },
  -- Not in a compiled step.
  no_graph = {
    masked_select = size, nonzero = size, merge_ids = size,
  },
  -- The same of the gradient alone.
  no_graph_gradient = { masked_scatter = selects, masked_select_backward = selects },
  -- No 16-bit floats.
  no_half = { linear_cross_entropy = 'made by compiled steps of layers in float32 and float64' },
}
