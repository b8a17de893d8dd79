-- What mf.help says of functions that have no comment of their own in Lua: those of the C binding,
-- those made in loops, and second names. By name: of the module, x:NAME of tensors.
local texts = {
  tensor = 'tensor(value, {dtype=, device=, requires_grad=}): a new tensor from a number, a boolean '
    .. 'or nested tables. Numbers give float32.',
  sbp = "sbp: how a global tensor lies along one axis of its placement: sbp.split(dim) or 'S0', sbp.broadcast or 'B', "
    .. "sbp.partial_sum or 'P', 'Pmax', 'Pmin'.",
  device = "device(name, f, ...): f's results; tensors made inside without others are on that device. "
    .. 'Without f, the name.',
  get_default_device = 'get_default_device(): where tensors are made.',
  set_default_device = 'set_default_device(name): where tensors are made from now on; returns what it was.',
  is_tensor = 'is_tensor(value): whether it is a tensor.',
  no_grad = "no_grad(f, ...): f's results; nothing inside is recorded for gradients.",
  enable_grad = "enable_grad(f, ...): f's results, recorded even inside no_grad.",
  set_grad_enabled = 'set_grad_enabled(on): switches recording; returns whether it was on.',
  is_grad_enabled = 'is_grad_enabled(): whether operations are recorded for gradients.',
  detect_anomaly = "detect_anomaly(f, ...): f's results; backward passes inside report the first NaN "
    .. 'and the line of the forward pass that it comes from.',
  set_detect_anomaly = 'set_detect_anomaly(on): switches the search for NaN in backward passes.',
  grad = 'grad(outputs, inputs, {grad_outputs=, create_graph=, retain_graph=, allow_unused=}): the '
    .. 'gradients of the outputs by the inputs, as a table.',
  scope = "scope(f, ...): f's results; every other tensor that f made is released, except what the "
    .. 'tape keeps.',
  memory_stats = 'memory_stats(device): bytes in use, at the peak and cached, the limit, the number '
    .. 'of tensors and of allocations.',
  empty_cache = 'empty_cache(device): gives cached memory back to the system.',
  check_nan = 'check_nan(on): while it is on, a NaN in the result of an op is an error that names the op and the line.',
  reset_peak_memory = 'reset_peak_memory(device): the peak counts from now on.',
  set_memory_limit = 'set_memory_limit(bytes, device): allocations beyond it fail; 0 for none.',
  get_num_threads = 'get_num_threads(): how many threads an op uses.',
  set_num_threads = 'set_num_threads(n): how many threads ops called from this thread use.',
  manual_seed = 'manual_seed(n): seeds the default generator, and returns it.',
  default_generator = 'default_generator: what draws random numbers when no generator is given.',
  Generator = 'Generator(): a generator of random numbers with a state of its own; '
    .. 'g:manual_seed(n), g:seed(), g:get_state(), g:set_state(state).',
  time = 'time(): seconds on a clock that only goes forward.',
  initial_seed = 'initial_seed(): the last seed of the default generator.',
  get_rng_state = 'get_rng_state(): the state of the default generator, for set_rng_state.',
  set_rng_state = 'set_rng_state(state): the default generator goes on from there.',
  set_printoptions = 'set_printoptions {precision =, threshold =, edgeitems =, linewidth =, '
    .. "sci_mode =, profile = 'default'}: how tensors are printed.",
  get_printoptions = 'get_printoptions(): the options as a table for set_printoptions.',
  rand_like = 'rand_like(x, {dtype =, device =}): uniform numbers in [0, 1) in the shape of x.',
  randn_like = 'randn_like(x, {dtype =, device =}): normal numbers in the shape of x.',
  warn = 'mf.warn(text): gets warnings, once for each line of yours; writes to stderr. mf.warn = f puts your own '
    .. 'function in its place.',
  rank = 'rank(): which rank of the job this is, from 0; see mf.comm.',
  world_size = 'world_size(): how many ranks the job has; 1 without a launcher.',
  rows = 'rows(ids, values, n): a row-sparse gradient: values[i] belongs to row ids[i].',
  help = 'help(what): this text.',
  Tensor = 'Tensor: the methods of tensors, as x:NAME. A function added here is a method of all. Fields: '
    .. 'x.shape, x.dtype, x.device, x.ndim, x.grad, x.requires_grad, x.is_leaf, x.grad_fn, x.data.\n\n'
    .. 'x + y, x - y, x * y, x / y, x % y, x ^ y and -x work by element; comparisons are methods: x:eq(y), x:ne(y), '
    .. 'x:lt(0), x:le, x:gt, x:ge. x == y asks in Lua whether they are the same tensor. #x is the first size.',
  progress = "mf.progress(total, {label = '', interval = 10, out =, terminal =, clock =})\n\n"
    .. 'A bar on a terminal, elsewhere a line every `interval` seconds, with rate, time left and values:\n'
    .. "local bar = mf.progress(loader:len(), { label = 'epoch 1' }); bar:step { loss = 0.3 } for each batch;\n"
    .. 'local seconds = bar:finish().',
  cli = "mf.cli(argv, title, {{name, default, help}, ...})\n\n"
    .. "Reads a script's command line: local o = mf.cli(arg, 'Trains.', { { 'lr', 0.1, 'learning rate' } }) gives\n"
    .. 'o.lr; --lr 0.2 and --lr=0.2 set it, a default of false makes a flag, --help prints all. What is no option\n'
    .. 'is in o[1], o[2], ...',
  Function = "mf.Function: an op of your own, with its gradient. local Cube = mf.Function:extend 'Cube'; then\n\n"
    .. 'function Cube.forward(ctx, x) ctx:save_for_backward(x) return x * x * x end\n'
    .. 'function Cube.backward(ctx, g) local x = ctx:saved_tensors() return g * 3 * x * x end\n\n'
    .. 'Cube(x) calls it. backward gets one gradient a result and returns one for each argument of forward, nil\n'
    .. 'where there is none; ctx.needs_input_grad[i] tells whether it is wanted. ctx:save_for_backward keeps\n'
    .. 'arguments and results, ctx:mark_non_differentiable(...) says which results have no gradient; other values\n'
    .. 'may be kept as fields of ctx.',
  ['Function:extend'] = "Function:extend(name): a class for forward and backward; see Function",
  nn = "nn: layers, containers and losses, with PyTorch's names, arguments and defaults; help 'nn.Linear' tells "
    .. 'of one.',
  optim = "optim: optimisers. local opt = optim.AdamW(model:parameters(), { lr = 1e-3 }); then for each batch\n"
    .. 'opt:zero_grad(), loss:backward(), opt:step().',
  data = "data: datasets, samplers and the loader. A dataset is a table with :len() and :get(i), which gives the\n"
    .. 'values of entry i = 0, 1, ...: a tensor of features and a label, say. Extend data.Dataset, or give\n'
    .. 'data.TensorDataset tensors. for x, y in data.DataLoader(set, { batch_size = 32 })() do ... end.\n'
    .. 'Lua knows no length of them: #loader is 0 and ipairs(loader) ends at once; use :len().',
  ['nn.Module'] = "nn.Module: what networks extend. local Net = nn.Module:extend 'Net'; function "
    .. 'Net:init(...) assigns layers and parameters to self; function Net:forward(x) computes; Net(...) '
    .. 'makes one, net(x) calls it.\n\nThey are listed in the order of assignment; a, b = f(), g() assigns b first, '
    .. 'so give each a line of its own.',
  ['nn.Module:extend'] = "nn.Module:extend(name): a class of modules that print with this name.",
  ['nn.Module:init'] = 'nn.Module:init(...): gets the arguments of Net(...); yours to write.',
  ['nn.Module:forward'] = 'nn.Module:forward(...): what net(...) computes; yours to write.',
  ['nn.Module:extra_repr'] = 'nn.Module:extra_repr(): what print shows in the brackets, a string; yours to write.',
  ['nn.Module:children'] = 'nn.Module:children(): the submodules as a list.',
  ['nn.Module:modules'] = 'nn.Module:modules(): this module and all below it as a list.',
  ['nn.Module:named_parameters'] = 'nn.Module:named_parameters(): for name, p in net:named_parameters() do: '
    .. 'those of all modules below, each once.',
  ['nn.Module:parameters'] = 'nn.Module:parameters(): the parameters of all modules below as a list, each once.',
  ['nn.Module:named_buffers'] = 'nn.Module:named_buffers(): for name, t in net:named_buffers() do.',
  ['nn.Module:buffers'] = 'nn.Module:buffers(): the buffers of all modules below as a list.',
  ['nn.Module:register_parameter'] =
    'nn.Module:register_parameter(name, p): self[name] = p, which must be a Parameter.',
  ['nn.Module:add_module'] = 'nn.Module:add_module(name, module): self[name] = module.',
  ['nn.Module:apply'] = 'nn.Module:apply(f): f(module) for all modules below, then this; returns it.',
  ['nn.Module:train'] = 'nn.Module:train(on = true): sets .training of all modules, which dropout and batch norm '
    .. 'go by; returns the module.',
  ['nn.Module:eval'] = 'nn.Module:eval(): train(false): for use rather than training.',
  ['nn.Module:requires_grad_'] = 'nn.Module:requires_grad_(on = true): for all parameters; returns the module.',
  ['nn.Module:register_forward_hook'] = 'nn.Module:register_forward_hook(f): f(module, results...) is called after '
    .. 'each forward; remove() of what this returns ends that.',
  ['nn.TransformerEncoderLayer:attend'] = 'nn.TransformerEncoderLayer:attend(x, o): the half with the attention.',
  ['nn.TransformerEncoderLayer:feed'] = 'nn.TransformerEncoderLayer:feed(x): the half behind the attention.',
  ['nn.Graph:extend'] = "nn.Graph:extend(name): a class of compiled steps.",
  ['nn.Graph:init'] = 'nn.Graph:init(...): gets the arguments; assigns modules, calls add_optimizer; yours to write.',
  ['nn.Graph:build'] = 'nn.Graph:build(...): what a call computes; yours to write.',
  ['nn.ModuleList:iter'] = 'nn.ModuleList:iter(): for i, module in list:iter() do, from 0.',
  ['nn.ModuleDict:set'] = 'nn.ModuleDict:set(name, module): adds or replaces one.',
  ['nn.ModuleDict:get'] = 'nn.ModuleDict:get(name): the module of that name, or nil.',
  ['optim.lr_scheduler.LRScheduler:load_state_dict'] = 'optim.lr_scheduler.LRScheduler:load_state_dict(dict): takes '
    .. 'over a state_dict.',
  ['optim.lr_scheduler.LRScheduler'] = 'optim.lr_scheduler.LRScheduler: what all schedulers have.',
  ['optim.lr_scheduler.ReduceLROnPlateau:step'] = 'optim.lr_scheduler.ReduceLROnPlateau:step(metric): the metric of '
    .. 'the last epoch.',
  ['data.Dataset:extend'] = 'data.Dataset:extend(name): a class of datasets; calling it makes one and runs its init.',
  ['data.Dataset:init'] = 'data.Dataset:init(...): gets the arguments; yours to write.',
  ['data.Dataset:get'] = 'data.Dataset:get(i): the values of entry i = 0, 1, ...; yours to write.',
  ['data.Dataset:len'] = 'data.Dataset:len(): the number of entries; yours to write.',
  ['data.Sampler'] = "data.Sampler: what samplers extend. local S = data.Sampler:extend 'S'; with function "
    .. 'S:init(...); S:iter(), which gives a function that returns the next index, then nil; and S:len().',
  ['data.ConcatDataset:get'] = 'data.ConcatDataset:get(i): entry i of them all.',
  ['data.DistributedSampler:set_epoch'] = 'data.DistributedSampler:set_epoch(epoch): call it before each epoch, so '
    .. 'that the order changes.',
  newaxis = 'mf.newaxis: in a subscript, x[{ {}, mf.newaxis }]: a new dim of size 1.',
  dtype = "x.dtype == mf.float32 compares dtypes; arguments may also name them: x:to 'float32'. A dtype is no "
    .. "string: x.dtype == 'float32' is false, tostring(x.dtype) == 'float32' is true.",
  ['nn.is_module'] = 'nn.is_module(value): whether it is a module.',
  ['nn.is_parameter'] = 'nn.is_parameter(value): whether it is a parameter.',
  amp = 'amp: training in float16: amp.GradScaler keeps small gradients from becoming zero.',
  ['nn.init'] = 'nn.init: functions that fill tensors in place, as torch.nn.init.',
  ['nn.functional'] = 'nn.functional: the functions of mf under the name that PyTorch has for them.',
  comm = "comm: communication between the ranks of a job, with OneFlow's names: moonflow -n 4 script.lua runs a\n"
    .. 'script as four. Every rank of the group calls the same functions in the same order; a group is a table of\n'
    .. 'ranks, and without one it is all. Sums are formed in the order of the ranks. A rank that fails, or calls\n'
    .. 'something else, is an error on all.',
  ['nn.parallel'] = 'nn.parallel: DistributedDataParallel trains a module with the batch cut over ranks.',
  ['nn.utils'] = 'nn.utils: clipping of gradients, parameters as one vector.',
  ['optim.Optimizer'] = 'optim.Optimizer: what all optimisers have. opt.param_groups are its groups of parameters: '
    .. 'tables with params, lr and the other options, which may be changed.',
  utils = 'utils: what helps a training run; checkpoint computes activations anew instead of keeping them.',
  ['optim.lr_scheduler'] = 'optim.lr_scheduler: schedulers of the learning rate, made over an optimiser; :step() '
    .. 'after each epoch, or batch.',
  ['data.Dataset'] = "data.Dataset: what data sets extend. local D = data.Dataset:extend 'D'; with function "
    .. 'D:init(...); D:get(i), which returns the values of entry i = 0, 1, ...; and D:len().',
  ['x:detach'] = 'x:detach(): the same memory, outside of the tape.',
  ['x:requires_grad_'] = 'x:requires_grad_(on = true): whether gradients by x are wanted; returns x.',
  ['x:retain_grad'] = 'x:retain_grad(): keeps the gradient of a result in x.grad; returns x.',
  ['x:backward'] = 'x:backward(gradient, {retain_graph=, create_graph=}): adds the gradients of x to '
    .. '.grad of the leaves.',
  ['x:register_hook'] = "x:register_hook(f): f gets x's gradient when it is known, and may return "
    .. 'another; remove() of what this returns ends that.',
  ['x:numel'] = 'x:numel(): the number of elements.',
  ['x:to_local'] = "x:to_local(): this rank's part of a global tensor, in the same memory, as a local one.",
  ['x:dim'] = 'x:dim(): the number of dims.',
  ['x:size'] = 'x:size(d): the size of dim d, counted from 0; all sizes without d.',
  ['x:stride'] = 'x:stride(d): the step of dim d in memory, in elements; all steps without d.',
  ['x:storage_offset'] = 'x:storage_offset(): where the first element lies in its memory, in elements.',
  ['x:is_contiguous'] = 'x:is_contiguous(format): whether the elements lie in row-major order, or as '
    .. "'channels_last'.",
  ['x:is_floating_point'] = 'x:is_floating_point(): whether the dtype is a float.',
  ['x:element_size'] = 'x:element_size(): the bytes of one element.',
  ['x:data_ptr'] = 'x:data_ptr(): the address of the first element as light userdata, valid while '
    .. 'the tensor lives.',
  ['x:is_set_to'] = 'x:is_set_to(other): whether both are the same view of the same memory.',
  ['x:free'] = 'x:free(): gives the memory back at once, for all views of it; later use is an error.',
  ['x:item'] = 'x:item(): the value of a tensor of one element as a number or a boolean.',
  ['x:tolist'] = 'x:tolist(): the elements as nested tables.',
  ['x:new_tensor'] = "x:new_tensor(value): as mf.tensor, with x's dtype and device.",
  ['x:view_as'] = 'x:view_as(other): x with the shape of other; see view',
  ['x:reshape_as'] = 'x:reshape_as(other): x with the shape of other; see reshape',
  ['x:expand_as'] = 'x:expand_as(other): x expanded to the shape of other; see expand',
  ['x:type_as'] = 'x:type_as(other): x in the dtype of other.',
  ['x:cpu'] = 'x:cpu(): x in the memory of the CPU.',
  ['x:to_dense'] = 'x:to_dense(): a row-sparse tensor as a dense one.',
  ['x:coalesce'] = 'x:coalesce(): a row-sparse tensor with each row there once, in order.',
  ['x:zero_'] = 'x:zero_(): writes zeros into x; returns x.',
  ['x:index_put_'] = 'x:index_put_(indices, values): x[indices] = values; returns x.',
}

texts.dtypes = { 'bool', 'uint8', 'int8', 'int16', 'int32', 'int64', 'float16', 'bfloat16', 'float32', 'float64' }
for _, name in ipairs(texts.dtypes) do
  texts[name] = ("mf.%s: a dtype: mf.zeros(2, { dtype = mf.%s }), x:to(mf.%s); see dtype"):format(name, name, name)
end
for name, what in pairs { Sequential = 'module', ModuleList = 'module', ParameterList = 'parameter' } do
  local path = 'nn.' .. name
  texts[path .. ':append'] = ('%s:append(%s): adds one at the end; returns the list.'):format(path, what)
  texts[path .. ':get'] = ('%s:get(i): %s i, from 0, or from the end where i < 0; also list[i].'):format(path, what)
  texts[path .. ':len'] = path .. ':len(): how many there are.'
end
texts['data.Sampler:iter'] = 'data.Sampler:iter(): a function that returns the next index, then nil; yours to write.'
texts['data.Subset:gather'] = 'data.Subset:gather(indices): the batch of these entries.'
for name, dtype in pairs { float = 'float32', double = 'float64', half = 'float16', bfloat16 = 'bfloat16' } do
  texts['nn.Module:' .. name] = ('nn.Module:%s(): to(mf.%s).'):format(name, dtype)
end
for name, what in pairs { shape = 'the sizes, x.shape[1] the first; compares with ==, prints as (2, 3)',
  dtype = 'the kind of number; see dtype', device = "where it lies: 'cpu', or 'meta' without data",
  ndim = 'the number of dims', grad = 'the gradient that backward has added up, or nil',
  requires_grad = 'whether gradients by x are wanted; may be set', is_leaf = 'whether no op made it on the tape',
  grad_fn = 'the name of the op that made it, or nil', data = 'the same memory outside of the tape; may be set',
  is_rows = 'whether it is row-sparse', is_global = 'whether it lies on several ranks; see placement',
  placement = 'of a global tensor: on which ranks it lies',
  sbp = "of a global tensor: how it lies there, a list with an SBP for each axis of the placement; see sbp" } do
  texts['x:' .. name] = ('x.%s: %s.'):format(name, what)
end

-- Second names.
for name, other in pairs { absolute = 'abs', negative = 'neg', multiply = 'mul', subtract = 'sub',
  divide = 'div', true_divide = 'div', greater = 'gt', greater_equal = 'ge', less = 'lt', less_equal = 'le',
  not_equal = 'ne', clip = 'clamp', fix = 'trunc', arccos = 'acos', arcsin = 'asin', arctan = 'atan',
  arctan2 = 'atan2', arccosh = 'acosh', arcsinh = 'asinh', arctanh = 'atanh', ger = 'outer' } do
  for _, suffix in ipairs { '', '_' } do
    texts['x:' .. name .. suffix] = ('x:%s%s(...): see %s%s'):format(name, suffix, other, suffix)
  end
  texts[name] = ('mf.%s(...): see %s'):format(name, other)
end
for name, other in pairs { concat = 'cat', concatenate = 'cat', numel = 'x:numel', detach = 'x:detach',
  is_floating_point = 'x:is_floating_point' } do
  texts[name] = ('mf.%s(...): see %s'):format(name, other)
end
texts['x:ndimension'] = 'x:ndimension(): see dim'
texts['x:nelement'] = 'x:nelement(): see numel'

-- Pairs of names and texts of both mf.NAME(x, ...) and x:NAME(...).
local both = {
  argmax = 'argmax(dim, {keepdim = false}): the place of the largest element along dim, or in the '
    .. 'flattened tensor; the first of equals.',
  argmin = 'argmin(dim, {keepdim = false}): the place of the smallest element along dim, or in the '
    .. 'flattened tensor; the first of equals.',
  max = 'max(): the largest element; max(dim, {keepdim = false}): values and indices along dim; '
    .. 'max(other): the larger of each pair.',
  min = 'min(): the smallest element; min(dim, {keepdim = false}): values and indices along dim; '
    .. 'min(other): the smaller of each pair.',
  argwhere = 'argwhere(): the places of the elements that are not zero, int64 (n, dims).',
  swapaxes = 'swapaxes(dim0, dim1): see transpose',
  swapdims = 'swapdims(dim0, dim1): see transpose',
  moveaxis = 'moveaxis(source, destination): see movedim',
  ravel = 'ravel(): see flatten',
  mm = 'mm(other): the product of two matrices, (m, k) by (k, n).',
  mv = 'mv(vector): a matrix times a vector, (m, k) by (k).',
  dot = 'dot(other): the sum of the products of two vectors of one length.',
  allclose = 'allclose(other, {rtol = 1e-5, atol = 1e-8, equal_nan = false}): whether isclose says yes '
    .. 'everywhere, as a boolean.',
  dropout1d = 'dropout1d(p = 0.5, {training = true}): dropout of whole channels of (N, C, L).',
  dropout2d = 'dropout2d(p = 0.5, {training = true}): dropout of whole channels of (N, C, H, W).',
  dropout3d = 'dropout3d(p = 0.5, {training = true}): dropout of whole channels of (N, C, D, H, W).',
}
for name, text in pairs(both) do
  texts['x:' .. name] = 'x:' .. text
  texts[name] = 'mf.' .. text:gsub('%(%)', '(x)', 1):gsub('%(([^x)])', '(x, %1', 1)
end

for name, dtype in pairs { float = 'float32', double = 'float64', half = 'float16',
  bfloat16 = 'bfloat16', long = 'int64', int = 'int32', short = 'int16', char = 'int8', byte = 'uint8',
  bool = 'bool' } do
  texts['x:' .. name] = ('x:%s(): x as %s; x itself where it is that already.'):format(name, dtype)
end
for _, name in ipairs { 'zeros', 'ones', 'empty', 'full' } do
  texts['x:new_' .. name] = ("x:new_%s(...): as mf.%s, with x's dtype and device."):format(name, name)
end
for name, what in pairs { uniform_ = 'uniform numbers in [a, b)', normal_ = 'normal numbers',
  constant_ = 'one number', zeros_ = 'zeros', ones_ = 'ones', eye_ = 'ones on the diagonal, else zeros' } do
  local arguments = { uniform_ = ', a = 0, b = 1', normal_ = ', mean = 0, std = 1', constant_ = ', value' }
  texts['nn.init.' .. name] = ('nn.init.%s(t%s): fills t with %s; returns it.'):format(name,
    arguments[name] or '', what)
end
for name, dims in pairs { BatchNorm1d = '(N, C) or (N, C, L)', BatchNorm2d = '(N, C, H, W)',
  BatchNorm3d = '(N, C, D, H, W)' } do
  texts['nn.' .. name] = ('nn.%s(num_features, {eps = 1e-5, momentum = 0.1, affine = true, '):format(name)
    .. ('track_running_stats = true})\n\nNormalises each channel of x %s over the batch; '):format(dims)
    .. 'keeps running statistics, which eval() uses. With {momentum = false} they are plain averages.'
end
for n = 1, 3 do
  for kind, what in pairs { Zero = 'zeros', Reflection = 'entries reflected at the edge',
    Replication = 'the entry at the edge', Circular = 'entries from the other end' } do
    local name = ('nn.%sPad%dd'):format(kind, n)
    texts[name] = ('%s(padding)\n\nAdds %s around the last %d dims: a number, or (before, after) '):format(name,
      what, n) .. 'from the last dim on.'
  end
  texts[('nn.ConstantPad%dd'):format(n)] = ('nn.ConstantPad%dd(padding, value)\n\nAs ZeroPad%dd, with a value.'):format(
    n, n)
  local name = ('BatchNorm%dd'):format(n)
  texts['nn.Lazy' .. name] = ('nn.Lazy%s({eps =, momentum =, affine =, track_running_stats =}): a %s '):format(name,
    name) .. 'that takes its size from its first input.'
end
texts['nn.LazyLinear'] = 'nn.LazyLinear(out_features, {bias = true}): a Linear that takes in_features from its '
  .. 'first input.'
for n, over in pairs { 'sequences (N, C, L) or (C, L)', 'images (N, C, H, W) or (C, H, W)' } do
  local name, image = ('Conv%dd'):format(n), n == 2
  texts['nn.Lazy' .. name] = ('nn.Lazy%s(out_channels, kernel_size, {stride =, padding =, ...}): a %s that '):format(
    name, name) .. 'takes in_channels from its first input.'
  texts['nn.' .. name] = ('nn.%s(in_channels, out_channels, kernel_size, {stride = 1, padding = 0, dilation = 1, '
    .. "groups = 1, bias = true, padding_mode = 'zeros'})\n\nConvolution over %s; weight (out_channels, in_channels / "
    .. "groups, %s). padding may be 'same' or 'valid'; padding_mode is 'zeros', 'reflect', 'replicate' or "
    .. "'circular'."):format(name, over, image and 'kh, kw' or 'k')
  name = ('ConvTranspose%dd'):format(n)
  texts['nn.' .. name] = ('nn.%s(in_channels, out_channels, kernel_size, {stride = 1, padding = 0, output_padding = 0, '
    .. 'groups = 1, bias = true, dilation = 1, padding_mode = \'zeros\'})\n\nTransposed convolution over %s: '
    .. 'what gives the input of a Conv%dd its gradient; weight (in_channels, out_channels / groups, %s). '
    .. '%s becomes (%s - 1) stride - 2 padding + dilation (k - 1) + output_padding + 1; '
    .. 'm(x, output_size) chooses the output_padding.'):format(name, over, n,
    image and 'kh, kw' or 'k', image and 'H' or 'L', image and 'H' or 'L')
end
local adam = 'optim.%s(params, {lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = %s, '
  .. 'amsgrad = false, maximize = false})\n\n%s'
texts['optim.Adam'] = adam:format('Adam', '0', 'Adam (Kingma and Ba, 2014).')
texts['optim.AdamW'] = adam:format('AdamW', '0.01',
  'Adam with weight decay that does not go through the averages (Loshchilov and Hutter, 2017).')

return texts
