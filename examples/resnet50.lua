-- Trains ResNet-50 on images of 224 x 224 in many classes.
--
--   moonflow examples/resnet50.lua [--steps N] [--batch N] [--lr X] [--classes N] [--size N] [--amp]
--                                  [--channels-last] [--eager] [--seed N] [--save FILE] [--resume FILE]
--   moonflow -n 2 examples/resnet50.lua ...    ranks that share each batch
--
-- The images are synthetic: no free set of photographs is packaged for Debian. Each class has a
-- picture of its own, coarse patches of colour, of which each image shows a shifted copy in noise;
-- so the loss tells whether training works, but the accuracy says nothing about photographs. Steps
-- are compiled; with --eager, or on several ranks, they are not. With --amp products are computed in bfloat16 where the
-- CPU can. The rate rises over a tenth of the steps, then falls as a cosine.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local o = mf.cli(arg, 'Trains ResNet-50 on synthetic images.', {
  { 'steps', 200, 'training steps' },
  { 'batch', 16, 'images a step' },
  { 'lr', 0.05, 'highest learning rate, for SGD with momentum' },
  { 'classes', 10, 'how many there are' },
  { 'size', 224, 'height and width of images' },
  { 'width', 64, 'channels of the first layer' },
  { 'amp', false, 'products in bfloat16 where the CPU can' },
  { 'channels-last', false, 'images and weights in NHWC order from the start' },
  { 'eager', false, 'run steps op by op' },
  { 'seed', 1, 'of weights and images' },
  { 'threads', 0, 'threads (0: all cores)' },
  { 'save', 'resnet50.safetensors', 'file to save to at the end' },
  { 'resume', '', 'file to go on from' },
})
io.stdout:setvbuf 'line'
local rank, ranks = mf.rank(), mf.world_size()
local first_rank = rank == 0 -- it alone prints and saves
o.eager = o.eager or ranks > 1
if o.batch % ranks ~= 0 then error(('--batch %d cannot be shared by %d ranks'):format(o.batch, ranks), 0) end
if o.threads > 0 then mf.set_num_threads(o.threads) end
mf.manual_seed(o.seed)

-- -- Images ---------------------------------------------------------------------------------------

local COARSE = 8 -- patches a side
local patch = math.max(math.ceil(o.size / COARSE), 1)
local pictures = mf.randn(o.classes, 3, COARSE, COARSE)

-- A batch: images (N, 3, size, size), labels (N); of several ranks this one's part.
local function batch()
  local labels = mf.randint(0, o.classes, { o.batch })
  local coarse = pictures:index_select(0, labels):roll(math.random(0, 2), 3)
  local images = coarse:repeat_interleave(patch, 2):repeat_interleave(patch, 3)
  images = images:narrow(2, 0, o.size):narrow(3, 0, o.size) + mf.randn(o.batch, 3, o.size, o.size)
  local n = o.batch / ranks
  images, labels = images:narrow(0, rank * n, n), labels:narrow(0, rank * n, n)
  if o['channels-last'] then images = images:contiguous { memory_format = 'channels_last' } end
  return images, labels
end

-- -- Training -------------------------------------------------------------------------------------

local ResNet50 = dofile((arg[0]:match '^(.*/)' or '') .. 'models.lua').ResNet50
local model = ResNet50(o.classes, o.width, { 3, 4, 6, 3 })
-- The last norm of each block begins at zero, so that blocks begin as the identity.
for _, block in ipairs(model.body:children()) do nn.init.zeros_(block.b3.weight) end
if o['channels-last'] then model:to { memory_format = 'channels_last' } end
local ranks_model = ranks > 1 and nn.parallel.DistributedDataParallel(model) or model

-- Weights of norms and biases do not decay.
local decay, plain = {}, {}
for _, p in ipairs(model:parameters()) do table.insert(p.ndim > 1 and decay or plain, p) end
local opt = optim.SGD({ { params = decay, weight_decay = 1e-4 }, { params = plain } }, { lr = o.lr, momentum = 0.9 })
local rise = math.max(math.floor(o.steps / 10), 1)
local schedule = optim.lr_scheduler.LambdaLR(opt, function(i)
  if i < rise then return (i + 1) / rise end
  return 0.5 * (1 + math.cos(math.pi * (i - rise) / math.max(o.steps - rise, 1)))
end)

local step = function(x, y)
  opt:zero_grad()
  local out = ranks_model(x)
  local loss = mf.cross_entropy(out, y)
  loss:backward()
  opt:step()
  return loss, out:detach():argmax(1):eq(y):float():mean()
end
if not o.eager then step = mf.compile(step, { name = 'resnet50', amp = o.amp and 'bfloat16' or nil }) end

local first = 1
if o.resume ~= '' then
  local state = mf.load(o.resume)
  model:load_state_dict(state.model)
  opt:load_state_dict(state.optim)
  schedule:step(state.step)
  first = state.step + 1
end

local total = 0
for _, p in ipairs(model:parameters()) do total = total + p:numel() end
if first_rank then
  print(('ResNet-50: %.1f million parameters; synthetic images (%d, 3, %d, %d) in %d classes; %s'):format(total / 1e6,
    o.batch, o.size, o.size, o.classes, ranks > 1 and ranks .. ' ranks' or o.eager and 'op by op' or 'compiled'))
end

-- The mean over the ranks.
local function average(t)
  t = t:detach()
  return ranks > 1 and mf.comm.all_reduce(t, 'avg') or t
end

local bar = first_rank and mf.progress(o.steps - first + 1, { label = 'training' })
local begin, n, losses, right = mf.time(), 0, 0, 0
for i = first, o.steps do
  mf.manual_seed(o.seed + i)
  math.randomseed(o.seed + i)
  local loss, accuracy = step(batch())
  n, losses, right = n + 1, losses + average(loss):item(), right + average(accuracy):item()
  schedule:step()
  if bar then bar:step { loss = losses / n } end
  if first_rank and (n == 20 or i == o.steps) then
    local seconds = mf.time() - begin
    print(('step %d  loss %.4f  accuracy %.3f  %.1f images/s'):format(i, losses / n, right / n, n * o.batch / seconds))
    begin, n, losses, right = mf.time(), 0, 0, 0
  end
end
if bar then bar:finish() end
if o.save ~= '' and first_rank then
  mf.save({ step = math.max(o.steps, first - 1), model = model:state_dict(), optim = opt:state_dict() }, o.save)
  print('saved to ' .. o.save)
end
