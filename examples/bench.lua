-- One training step of a standard model, timed; the mirror of peer.py: same models, module names,
-- options and JSON keys.
--
--   moonflow examples/bench.lua WORKLOAD [--mode eager] [--dtype fp32] [--channels-last]
--     [--batch N] [--steps N] [--warmup N] [--threads N]
--            [--loss] [--load FILE]
--
-- WORKLOAD: resnet50 bert gpt2 gpt-mini mlp cnn widedeep dispatch. --load takes weights and data
-- from a file that `peer.py --export` wrote. Prints one line of JSON.
local start = os.clock()
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim
local import_s = os.clock() - start

local a = mf.cli(arg, 'Times one training step: resnet50 bert gpt2 gpt-mini mlp cnn widedeep dispatch.', {
  { 'mode', 'eager', 'how steps run: eager' },
  { 'dtype', 'fp32', 'of weights and activations: fp32' },
  { 'channels-last', false, 'images and convolutions in NHWC order' },
  { 'batch', 0, 'samples a step (0: the workload\'s own)' },
  { 'steps', 10, 'timed steps' },
  { 'warmup', 3, 'steps before them' },
  { 'threads', 2, 'threads' },
  { 'loss', false, 'print the losses of all steps' },
  { 'load', '', 'safetensors file with weights, input.K and target' },
})
local workload = a[1] or error('which workload? --help lists them', 0)
if a.mode ~= 'eager' then error('--mode ' .. a.mode .. ': only eager is there', 0) end
if a.dtype ~= 'fp32' then error('--dtype ' .. a.dtype .. ': only fp32 is there', 0) end
mf.set_num_threads(a.threads)
mf.manual_seed(0)

-- -- Models ---------------------------------------------------------------------------------------

-- v1.5: the stride sits on the 3x3 convolution.
local Bottleneck = nn.Module:extend 'Bottleneck'
function Bottleneck:init(cin, width, stride)
  local cout = width * 4
  self.c1, self.b1 = nn.Conv2d(cin, width, 1, { bias = false }), nn.BatchNorm2d(width)
  self.c2, self.b2 = nn.Conv2d(width, width, 3, { stride = stride, padding = 1, bias = false }), nn.BatchNorm2d(width)
  self.c3, self.b3 = nn.Conv2d(width, cout, 1, { bias = false }), nn.BatchNorm2d(cout)
  if stride ~= 1 or cin ~= cout then
    self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, { stride = stride, bias = false }), nn.BatchNorm2d(cout))
  end
end
function Bottleneck:forward(x)
  local y = mf.relu(self.b1(self.c1(x)))
  y = mf.relu(self.b2(self.c2(y)))
  y = self.b3(self.c3(y))
  return mf.relu(y + (self.down and self.down(x) or x))
end

local ResNet50 = nn.Module:extend 'ResNet50'
function ResNet50:init(classes)
  self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, { stride = 2, padding = 3, bias = false }), nn.BatchNorm2d(64),
    nn.ReLU(), nn.MaxPool2d(3, { stride = 2, padding = 1 }))
  self.body = nn.Sequential()
  local cin = 64
  for _, stage in ipairs { { 64, 3, 1 }, { 128, 4, 2 }, { 256, 6, 2 }, { 512, 3, 2 } } do
    local width, n, stride = unpack(stage)
    for i = 1, n do
      self.body:append(Bottleneck(cin, width, i == 1 and stride or 1))
      cin = width * 4
    end
  end
  self.fc = nn.Linear(2048, classes or 1000)
end
function ResNet50:forward(x) return self.fc(self.body(self.stem(x)):mean { 2, 3 }) end

-- A transformer block; pre-norm and causal for GPT, post-norm for BERT.
local Block = nn.Module:extend 'Block'
function Block:init(d, heads, causal)
  self.h, self.causal = heads, causal
  self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
  self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
  self.f1, self.f2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
end
function Block:attend(x)
  local B, N, D = unpack(x.shape)
  local q, k, v = unpack(self.qkv(x):reshape(B, N, 3, self.h, D / self.h):permute(2, 0, 3, 1, 4):unbind(0))
  local y = mf.scaled_dot_product_attention(q, k, v, { is_causal = self.causal })
  return self.o(y:transpose(1, 2):reshape(B, N, D))
end
function Block:forward(x)
  if self.causal then
    x = x + self:attend(self.n1(x))
    return x + self.f2(mf.gelu(self.f1(self.n2(x))))
  end
  x = self.n1(x + self:attend(x))
  return self.n2(x + self.f2(mf.gelu(self.f1(x))))
end

local Transformer = nn.Module:extend 'Transformer'
function Transformer:init(vocab, n, d, heads, layers, causal)
  self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(n, d)
  self.blocks = nn.Sequential()
  for _ = 1, layers do self.blocks:append(Block(d, heads, causal)) end
  self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, { bias = false })
  self:register_buffer('ids', mf.arange(n))
  self.causal = causal
end
function Transformer:forward(x)
  x = self.tok(x) + self.pos(self.ids)
  x = self.norm(self.blocks(x))
  if not self.causal then x = x[{ {}, { 0, 20 } }] end -- masked-LM head on 20 positions a sequence
  return self.head(x)
end

local MLP = nn.Module:extend 'MLP'
function MLP:init()
  self.l = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
end
function MLP:forward(x) return self.l(x) end

local CNN = nn.Module:extend 'CNN'
function CNN:init()
  self.f = nn.Sequential(nn.Conv2d(1, 32, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2))
  self.l = nn.Sequential(nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10))
end
function CNN:forward(x)
  x = self.f(x)
  return self.l(x:reshape(x:size(0), -1))
end

-- 26 categorical fields in one table of 1M rows, 13 numeric fields.
local WideDeep = nn.Module:extend 'WideDeep'
function WideDeep:init(rows, d)
  self.deep, self.wide = nn.Embedding(rows, d, { sparse = true }), nn.Embedding(rows, 1, { sparse = true })
  self.mlp = nn.Sequential(nn.Linear(26 * d + 13, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(),
    nn.Linear(1024, 1))
end
function WideDeep:forward(ids, dense)
  local e = self.deep(ids):reshape(ids:size(0), -1)
  return (self.mlp(mf.cat({ e, dense }, { dim = 1 })) + self.wide(ids):sum(1)):squeeze(1)
end

-- -- Workloads: batch, then what makes model, inputs and target; the optimiser --------------------

local function randn(...) return mf.randn(...) end
local function ids(high, ...) return mf.randint(0, high, { ... }) end

local workloads = {
  resnet50 = { 16, function(b) return ResNet50(), { randn(b, 3, 224, 224) }, ids(1000, b) end, 'sgd' },
  bert = { 8, function(b)
    return Transformer(30522, 128, 768, 12, 12, false), { ids(30522, b, 128) }, ids(30522, b, 20)
  end, 'adam' },
  gpt2 = { 4, function(b)
    return Transformer(50257, 64, 768, 12, 12, true), { ids(50257, b, 64) }, ids(50257, b, 64)
  end, 'adam' },
  ['gpt-mini'] = { 16, function(b)
    return Transformer(256, 256, 384, 6, 6, true), { ids(256, b, 256) }, ids(256, b, 256)
  end, 'adam' },
  mlp = { 64, function(b) return MLP(), { randn(b, 784) }, ids(10, b) end, 'sgd' },
  cnn = { 64, function(b) return CNN(), { randn(b, 1, 28, 28) }, ids(10, b) end, 'sgd' },
  widedeep = { 2048, function(b)
    return WideDeep(1000000, 16), { ids(1000000, b, 26), randn(b, 13) }, mf.rand(b)
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

local function run()
  local w = workloads[workload] or error('unknown workload ' .. workload, 0)
  local batch = a.batch > 0 and a.batch or w[1]
  local model, inputs, target = w[2](batch)
  if a.load ~= '' then target = load_export(a.load, model, inputs) end
  if a['channels-last'] then
    model:to { memory_format = 'channels_last' }
    for i, x in ipairs(inputs) do
      if x.ndim == 4 then inputs[i] = x:to { memory_format = 'channels_last' } end
    end
  end
  local params = model:parameters()
  local opt = w[3] == 'sgd' and optim.SGD(params, { lr = 0.01, momentum = 0.9 }) or optim.AdamW(params, { lr = 1e-4 })
  local function step()
    opt:zero_grad()
    local y = model(unpack(inputs))
    local loss
    if workload == 'widedeep' then
      loss = mf.binary_cross_entropy_with_logits(y, target)
    else
      loss = mf.cross_entropy(y:reshape(-1, y:size(-1)), target:reshape(-1))
    end
    loss:backward()
    opt:step()
    return loss:item()
  end

  local base_mib, times, losses, first = mf._memory_usage(), {}, {}, nil
  for i = 1, a.warmup + a.steps do
    local t = mf.time()
    losses[i] = round(step(), 5)
    t = mf.time() - t
    first = first or t
    if i > a.warmup then times[#times + 1] = t end
  end
  table.sort(times)
  local median = (times[math.floor((#times + 1) / 2)] + times[math.ceil((#times + 1) / 2)]) / 2
  local out = {
    { 'framework', 'moonflow' }, { 'version', mf.version or '' }, { 'workload', workload }, { 'mode', a.mode },
      { 'dtype', a.dtype },
    { 'channels_last', a['channels-last'] }, { 'batch', batch }, { 'threads', a.threads }, { 'ranks', 1 },
    { 'import_s', round(import_s, 2) }, { 'first_step_s', round(first, 2) }, { 'step_s', round(median, 5) },
    { 'samples_per_s', round(batch / median, 2) }, { 'base_mib', base_mib }, { 'peak_mib', mf._memory_usage() },
  }
  if a.loss then out[#out + 1] = { 'losses', losses } end
  print_json(out)
end

if workload == 'dispatch' then dispatch() else run() end
