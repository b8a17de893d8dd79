-- One training step of a standard model, timed; the mirror of peer.py: same models, module names,
-- options and JSON keys; the models are in models.lua.
--
--   moonflow examples/bench.lua WORKLOAD [--mode eager|graph] [--dtype fp32|bf16]
--     [--channels-last] [--batch N] [--steps N] [--warmup N] [--threads N]
--            [--device cpu|cuda] [--loss] [--load FILE]
--   moonflow -n N examples/bench.lua ...       N ranks, which share batch and threads
--
-- WORKLOAD: resnet50 bert gpt2 gpt-mini mlp cnn widedeep dispatch. --load takes weights and data
-- from a file that `peer.py --export` wrote. Prints one line of JSON; gflops are those of the whole
-- step, gemm_gflops those of a large float32 product on this machine. With bf16 a compiled step
-- multiplies in bfloat16 and keeps the rest in float32; in eager steps model and data are bfloat16.
local start = os.clock()
local mf = require 'moonflow'
local optim = mf.optim
local import_s = os.clock() - start

local a = mf.cli(arg, 'Times one training step: resnet50 bert gpt2 gpt-mini mlp cnn widedeep dispatch.', {
  { 'mode', 'eager', 'how steps run: eager, or graph: compiled' },
  { 'dtype', 'fp32', 'of what is multiplied: fp32, or bf16' },
  { 'channels-last', false, 'images and convolutions in NHWC order' },
  { 'batch', 0, 'samples a step (0: the workload\'s own)' },
  { 'steps', 10, 'timed steps' },
  { 'warmup', 3, 'steps before them' },
  { 'threads', 2, 'threads' },
  { 'device', 'cpu', 'where: cpu, cuda, cuda:1' },
  { 'loss', false, 'print the losses of all steps' },
  { 'load', '', 'safetensors file with weights, input.K and target' },
})
local workload = a[1] or error('which workload? --help lists them', 0)
if a.mode ~= 'eager' and a.mode ~= 'graph' then error('--mode ' .. a.mode .. ': eager and graph are there', 0) end
if a.dtype ~= 'fp32' and a.dtype ~= 'bf16' then error('--dtype ' .. a.dtype .. ': fp32 and bf16 are there', 0) end
local ranks = mf.world_size()
mf.set_num_threads(math.max(1, math.floor(a.threads / ranks)))
mf.manual_seed(mf.rank())
local models = dofile((arg[0]:match '^(.*/)' or '') .. 'models.lua')

-- -- Workloads: batch, then what makes model, inputs and target; the optimiser --------------------

local function randn(...) return mf.randn(...) end
local function ids(high, ...) return mf.randint(0, high, { ... }) end

local workloads = {
  resnet50 = { 16, function(b)
    return models.ResNet50(1000, 64, { 3, 4, 6, 3 }), { randn(b, 3, 224, 224) }, ids(1000, b)
  end, 'sgd' },
  bert = { 8, function(b)
    return models.Transformer(30522, 128, 768, 12, 12, false, 20), { ids(30522, b, 128) }, ids(30522, b, 20)
  end, 'adam' },
  gpt2 = { 4, function(b)
    return models.Transformer(50257, 64, 768, 12, 12, true), { ids(50257, b, 64) }, ids(50257, b, 64)
  end, 'adam' },
  ['gpt-mini'] = { 16, function(b)
    return models.Transformer(256, 256, 384, 6, 6, true), { ids(256, b, 256) }, ids(256, b, 256)
  end, 'adam' },
  mlp = { 64, function(b) return models.MLP(784, 512, 256), { randn(b, 784) }, ids(10, b) end, 'sgd' },
  cnn = { 64, function(b) return models.CNN(32, 28, 128), { randn(b, 1, 28, 28) }, ids(10, b) end, 'sgd' },
  widedeep = { 2048, function(b)
    return models.WideDeep(1000000, 16, 1024), { ids(1000000, b, 26), randn(b, 13) }, mf.rand(b)
  end, 'sgd' },
}

-- -- JSON -----------------------------------------------------------------------------------------

local function round(v, digits) return tonumber(('%.' .. digits .. 'f'):format(v)) end

local function json(value)
  if type(value) == 'table' and value[1] then
    local parts = {}
    for i, v in ipairs(value) do parts[i] = json(v) end
    return '[' .. table.concat(parts, ', ') .. ']'
  end
  return type(value) == 'string' and ('"%s"'):format(value) or tostring(value)
end

local function print_json(pairs_in_order)
  local parts = {}
  for i, pair in ipairs(pairs_in_order) do parts[i] = ('"%s": %s'):format(pair[1], json(pair[2])) end
  print('{' .. table.concat(parts, ', ') .. '}')
end

-- -- dispatch: microseconds an op on tiny tensors -------------------------------------------------

local function dispatch()
  local x, y, g, m = mf.ones(4), mf.ones(4), mf.ones(4):requires_grad_(), mf.ones(4, 4)
  local function per(f, n)
    n = n or 20000
    for _ = 1, 500 do f() end
    local best = math.huge
    for _ = 1, 5 do
      local t = mf.time()
      for _ = 1, n do f() end
      best = math.min(best, (mf.time() - t) / n)
    end
    return round(best * 1e6, 3)
  end
  local out = { { 'framework', 'moonflow' }, { 'workload', 'dispatch' }, { 'import_s', round(import_s, 2) } }
  mf.no_grad(function()
    out[#out + 1] = { 'add_us', per(function() return x + y end) }
    out[#out + 1] = { 'mul_scalar_us', per(function() return x * 2.0 end) }
    out[#out + 1] = { 'add__us', per(function() return x:add_(0.0) end) }
    out[#out + 1] = { 'view_us', per(function() return x:view(2, 2) end) }
    out[#out + 1] = { 'matmul4_us', per(function() return mf.matmul(m, m) end) }
  end)
  out[#out + 1] = { 'add_grad_us', per(function() return g + y end) }
  out[#out + 1] = { 'mul_sum_backward_us', per(function() (g * y):sum():backward() end, 3000) }
  print_json(out)
end

-- -- One workload ---------------------------------------------------------------------------------

local function load_export(path, model, inputs)
  local saved, weights = mf.load(path), {}
  for name, t in pairs(saved) do
    if name:match '^input%.' then inputs[tonumber(name:sub(7)) + 1] = t
    elseif name ~= 'target' then weights[name] = t end
  end
  model:load_state_dict(weights)
  return saved.target
end

-- GFLOP/s of a product of square float32 matrices: what a step's rate is measured by.
local function gemm_rate()
  local n, best = 1536, math.huge
  local x, y = mf.randn(n, n):to(a.device), mf.randn(n, n):to(a.device)
  for _ = 1, 8 do
    local t = mf.time()
    local z = x:matmul(y)
    if a.device ~= 'cpu' then z[0][0]:item() end
    best = math.min(best, mf.time() - t)
  end
  return 2 * n ^ 3 / best / 1e9
end

-- The FLOPs of one call of f.
local function flops_of(f)
  local sum = 0
  for _, row in ipairs(mf.profile(f):sums 'op') do sum = sum + row.flops end
  return sum
end

local function run()
  local w = workloads[workload] or error('unknown workload ' .. workload, 0)
  local batch = a.batch > 0 and a.batch or w[1]
  local model, inputs, target = w[2](math.floor(batch / ranks))
  if a.load ~= '' then target = load_export(a.load, model, inputs) end
  model:to(a.device)
  target = target:to(a.device)
  for i, x in ipairs(inputs) do inputs[i] = x:to(a.device) end
  if a['channels-last'] then
    model:to { memory_format = 'channels_last' }
    for i, x in ipairs(inputs) do
      if x.ndim == 4 then inputs[i] = x:to { memory_format = 'channels_last' } end
    end
  end
  local eager_bf16 = a.dtype == 'bf16' and a.mode == 'eager'
  if eager_bf16 and a.device == 'cpu' and not mf._has_bf16() then
    io.stderr:write 'this CPU does not multiply bfloat16; float32 stays\n'
    eager_bf16 = false
  end
  if eager_bf16 then
    model:to(mf.bfloat16)
    for i, x in ipairs(inputs) do inputs[i] = x.dtype == mf.float32 and x:to(mf.bfloat16) or x end
  end
  if ranks > 1 then model = mf.nn.parallel.DistributedDataParallel(model) end
  local params = model:parameters()
  local opt = w[3] == 'sgd' and optim.SGD(params, { lr = 0.01, momentum = 0.9 }) or optim.AdamW(params, { lr = 1e-4 })
  local function step(labels, ...)
    opt:zero_grad()
    local y = model(...)
    if eager_bf16 then y = y:float() end
    local loss
    if workload == 'widedeep' then
      loss = mf.binary_cross_entropy_with_logits(y, labels)
    else
      loss = mf.cross_entropy(y:reshape(-1, y:size(-1)), labels:reshape(-1))
    end
    loss:backward()
    opt:step()
    return loss
  end
  local run_step = a.mode == 'graph' and mf.compile(step, { amp = a.dtype == 'bf16' and 'bfloat16' or nil }) or step

  local base_mib, times, losses, first = mf._memory_usage(), {}, {}, nil
  for i = 1, a.warmup + a.steps do
    local t = mf.time()
    losses[i] = round(run_step(target, unpack(inputs)):item(), 5)
    t = mf.time() - t
    first = first or t
    if i > a.warmup then times[#times + 1] = t end
  end
  table.sort(times)
  local median = (times[math.floor((#times + 1) / 2)] + times[math.ceil((#times + 1) / 2)]) / 2
  local out = {
    { 'framework', 'moonflow' }, { 'version', mf.version or '' }, { 'workload', workload }, { 'mode', a.mode },
      { 'dtype', a.dtype },
    { 'channels_last', a['channels-last'] }, { 'batch', batch }, { 'threads', a.threads }, { 'ranks', ranks },
    { 'import_s', round(import_s, 2) }, { 'first_step_s', round(first, 2) }, { 'step_s', round(median, 5) },
    { 'samples_per_s', round(batch / median, 2) }, { 'base_mib', base_mib }, { 'peak_mib', mf._memory_usage() },
  }
  local rate = flops_of(function() run_step(target, unpack(inputs)):item() end) / median / 1e9
  out[#out + 1] = { 'gflops', round(rate * ranks, 1) }
  out[#out + 1] = { 'gemm_gflops', round(gemm_rate() * ranks, 1) }
  if a.loss then out[#out + 1] = { 'losses', losses } end
  if mf.rank() == 0 then print_json(out) end
end

if workload == 'dispatch' then dispatch() else run() end
