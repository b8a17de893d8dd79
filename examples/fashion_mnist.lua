-- Trains a small convolutional network on Fashion-MNIST (Debian package dataset-fashion-mnist).
--
--   moonflow examples/fashion_mnist.lua [--epochs N] [--lr X] [--batch N] [--data DIR] [--resume FILE] [--seed N]
--
-- After each epoch the weights and the optimiser's state are saved; --resume goes on from there. The same seed gives the same weights.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local o = mf.cli(arg, 'Trains a small convolutional network on Fashion-MNIST.', {
  { 'epochs', 4, 'passes over the training images' },
  { 'lr', 2e-3, 'peak learning rate of the one-cycle schedule' },
  { 'batch', 128, 'images a step' },
  { 'data', '/usr/share/datasets/fashion-mnist', 'folder of the idx files' },
  { 'save', 'fashion_mnist.safetensors', 'file for the weights' },
  { 'resume', '', 'file to go on from' },
  { 'seed', 1, 'of weights, order and dropout' },
})

local function read(name)
  for _, ending in ipairs { '.gz', '' } do
    local path = o.data .. '/' .. name .. ending
    local file = io.open(path, 'rb')
    if file then
      file:close()
      return mf.data.load_idx(path)
    end
  end
  io.stderr:write(('there is no %s in %s: install the Debian package dataset-fashion-mnist, or name the folder with --data\n')
    :format(name, o.data))
  os.exit(1)
end

-- Images as (N, 1, 28, 28) floats of mean 0 and variance 1, labels as int64.
local function load(part)
  local images = read(part .. '-images-idx3-ubyte'):float():unsqueeze(1)
  return mf.data.TensorDataset((images / 255 - 0.2860) / 0.3530, read(part .. '-labels-idx1-ubyte'):long())
end

local Net = nn.Module:extend 'Net'
function Net:init()
  self.features = nn.Sequential(
    nn.Conv2d(1, 32, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2))
  self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 7 * 7, 128), nn.ReLU(), nn.Linear(128, 10))
end
function Net:forward(x) return self.head(self.features(x)) end

local function accuracy(model, set)
  model:eval()
  local right = 0
  mf.no_grad(function()
    for x, y in mf.data.DataLoader(set, { batch_size = 500 })() do
      right = right + model(x):argmax(1):eq(y):sum():item()
    end
  end)
  model:train()
  return right / set:len()
end

mf.manual_seed(o.seed)
local train, test = load 'train', load 't10k'
local model = Net()
local opt = optim.AdamW(model:parameters(), { lr = o.lr })
local loader = mf.data.DataLoader(train, { batch_size = o.batch, shuffle = true, drop_last = true })
local schedule = optim.lr_scheduler.OneCycleLR(opt, o.lr, { total_steps = o.epochs * loader:len() + 1 })

-- One file holds everything that training needs to go on: weights, averages of the optimiser, and how many epochs are done.
local function save(epoch)
  local state = { model = model:state_dict(), adam = {} }
  for k, s in pairs(opt:state_dict().state) do state.adam[k] = { m = s.exp_avg, v = s.exp_avg_sq } end
  mf.save(state, o.save, { metadata = { epoch = tostring(epoch) } })
end

local function resume(path)
  local saved, metadata = mf.load(path)
  local weights, epoch = {}, tonumber(metadata.epoch)
  for name, t in pairs(saved) do
    if name:match '^model%.' then weights[name:sub(7)] = t end
  end
  model:load_state_dict(weights)
  local dict = opt:state_dict()
  for k in pairs(model:parameters()) do
    local m, v = saved['adam.' .. k - 1 .. '.m'], saved['adam.' .. k - 1 .. '.v']
    if m then dict.state[k - 1] = { step = epoch * loader:len(), exp_avg = m, exp_avg_sq = v } end
  end
  opt:load_state_dict(dict)
  schedule:step(epoch * loader:len())
  return epoch
end

local function train_epoch(epoch)
  local bar = mf.progress(loader:len(), { label = ('epoch %d'):format(epoch) })
  mf.manual_seed(o.seed + epoch) -- so that a resumed run draws what an uninterrupted one would
  for x, y in loader() do
    opt:zero_grad()
    local loss = mf.cross_entropy(model(x), y)
    loss:backward()
    opt:step()
    schedule:step()
    bar:step { loss = loss:item() }
  end
  return bar:finish()
end

local first, score = 1, 0
if o.resume ~= '' then first = resume(o.resume) + 1 end
print(model)
for epoch = first, o.epochs do
  local ok, err = pcall(train_epoch, epoch)
  if not ok then
    if not tostring(err):match 'interrupted' then error(err, 0) end
    save(epoch - 1)
    print(('\ninterrupted; go on with:  moonflow %s --resume %s'):format(arg[0], o.save))
    os.exit(130)
  end
  score = accuracy(model, test)
  save(epoch)
  print(('epoch %d: %.0f s, test accuracy %.4f, saved to %s'):format(epoch, err, score, o.save))
end
if score == 0 then score = accuracy(model, test) end
print(('test accuracy %.4f'):format(score))
