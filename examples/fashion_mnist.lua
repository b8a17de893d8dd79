-- Trains a small convolutional network on Fashion-MNIST: 60,000 grey images of clothes in 10 classes.
--
--   moonflow examples/fashion_mnist.lua [--epochs N] [--lr X] [--batch N] [--data DIR] [--seed N]
--                                       [--save FILE] [--resume FILE] [--eager]
--
-- Weights and the optimiser's state are saved after each epoch, and at Ctrl-C; --resume goes on from
-- there. The same seed gives the same weights. Steps are compiled; with --eager they are not.
local mf = require 'moonflow'
local nn, optim, data = mf.nn, mf.optim, mf.data

local o = mf.cli(arg, 'Trains a small convolutional network on Fashion-MNIST.', {
  { 'epochs', 5, 'passes over the training images' },
  { 'lr', 2e-3, 'peak of the learning rate, which rises and falls once' },
  { 'batch', 128, 'images a step' },
  { 'data', '/usr/share/datasets/fashion-mnist', 'folder of the idx files' },
  { 'save', 'fashion_mnist.safetensors', 'file to save to' },
  { 'resume', '', 'file to go on from' },
  { 'seed', 1, 'of weights, order and dropout' },
  { 'eager', false, 'run steps op by op' },
})

-- -- Data -----------------------------------------------------------------------------------------

local function read(name)
  for _, path in ipairs { o.data .. '/' .. name .. '.gz', o.data .. '/' .. name } do
    local file = io.open(path)
    if file then
      file:close()
      return data.load_idx(path)
    end
  end
  io.stderr:write(('%s has no %s.gz; install the Debian package dataset-fashion-mnist, or name the '
    .. 'folder of these files with --data\n'):format(o.data, name))
  os.exit(1, true)
end

-- Images as (N, 1, 28, 28) of mean 0 and variance 1; labels as int64.
local function dataset(part)
  local images = read(part .. '-images-idx3-ubyte'):float():unsqueeze(1)
  local labels = read(part .. '-labels-idx1-ubyte'):long()
  return data.TensorDataset((images / 255 - 0.2860) / 0.3530, labels)
end

-- -- Model ----------------------------------------------------------------------------------------

local Net = nn.Module:extend 'Net'
function Net:init()
  self.features = nn.Sequential(
    nn.Conv2d(1, 32, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2))
  self.classifier = nn.Sequential(
    nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))
end
function Net:forward(x) return self.classifier(self.features(x)) end

-- -- Training -------------------------------------------------------------------------------------

local train, test = dataset 'train', dataset 't10k'
mf.manual_seed(o.seed)
local model = Net()
local opt = optim.AdamW(model:parameters(), { lr = o.lr })
local loader = data.DataLoader(train, { batch_size = o.batch, shuffle = true })
local schedule = optim.lr_scheduler.OneCycleLR(opt, o.lr,
  { epochs = o.epochs, steps_per_epoch = loader:len() })
print(model)

local function compiled(f) return o.eager and f or mf.compile(f) end

local step = compiled(function(x, y)
  opt:zero_grad()
  local loss = mf.cross_entropy(model(x), y)
  loss:backward()
  opt:step()
  return loss
end)

local count_right = compiled(function(x, y)
  return mf.no_grad(function() return model(x):argmax(1):eq(y):sum() end)
end)

local function accuracy()
  model:eval()
  local right = 0
  for x, y in data.DataLoader(test, { batch_size = 500 })() do right = right + count_right(x, y):item() end
  model:train()
  return right / test:len()
end

local function save(epochs)
  local state = { model = model:state_dict(), optim = opt:state_dict().state }
  mf.save(state, o.save, { metadata = { epochs = tostring(epochs) } })
end

-- Takes over what `save` wrote; returns how many epochs were done.
local function resume(path)
  local weights, metadata = mf.load(path, { prefix = 'model.' })
  local epochs = tonumber(metadata.epochs)
  model:load_state_dict(weights)
  opt:load_state_dict { state = mf.load(path, { prefix = 'optim.' }) }
  schedule:step(epochs * loader:len())
  return epochs
end

local function train_epoch(epoch)
  mf.manual_seed(o.seed + epoch) -- a resumed run draws what an uninterrupted one would
  local bar = mf.progress(loader:len(), { label = 'epoch ' .. epoch })
  for x, y in loader() do
    local loss = step(x, y)
    schedule:step()
    bar:step { loss = loss:item() }
  end
  return bar:finish()
end

local done = o.resume == '' and 0 or resume(o.resume)
local score = done >= o.epochs and accuracy()
for epoch = done + 1, o.epochs do
  local ok, result = pcall(train_epoch, epoch)
  if not ok then
    if not tostring(result):find 'interrupt' then error(result, 0) end
    save(epoch - 1)
    print(('\nsaved; epoch %d begins again with\n  %s --resume %s'):format(epoch,
      table.concat(arg, ' ', -1), o.save))
    os.exit(130, true)
  end
  score = accuracy()
  save(epoch)
  print(('epoch %d  %.0f s  test accuracy %.4f'):format(epoch, result, score))
end
print(('test accuracy %.4f'):format(score))
