-- Trains a small convolutional network on Fashion-MNIST: 60,000 grey images of clothes in 10 classes.
--
--   moonflow examples/fashion_mnist.lua [--epochs N] [--lr X] [--batch N] [--data DIR] [--seed N]
--                                       [--save FILE] [--resume FILE] [--eager]
--
-- Weights and the optimiser's state are saved after each epoch; --resume goes on from there. The same
-- seed gives the same weights, also when a run was ended by Ctrl-C and resumed. Steps are compiled;
-- with --eager they are not.
local mf = require 'moonflow'
local nn, optim, data = mf.nn, mf.optim, mf.data

local entries = {
  { 'epochs', 5, 'passes over the training images' },
  { 'lr', 2e-3, 'peak of the learning rate, which rises and falls once' },
  { 'batch', 128, 'images a step' },
  { 'data', '/usr/share/datasets/fashion-mnist', 'folder of the idx files' },
  { 'save', 'fashion_mnist.safetensors', 'file to save to' },
  { 'resume', '', 'file to go on from' },
  { 'seed', 1, 'of weights, order and dropout' },
  { 'eager', false, 'run steps op by op' },
}
local o = mf.cli(arg, 'Trains a small convolutional network on Fashion-MNIST.', entries)
io.stdout:setvbuf 'line' -- each epoch's line is there when the epoch ends, also in a file

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

local saved = o.resume -- the file that holds the last epoch that was finished

local function save(epoch)
  mf.save({ epoch = epoch, model = model:state_dict(), optim = opt:state_dict() }, o.save)
  saved = o.save
end

-- Takes over what `save` wrote; returns how many epochs were done.
local function resume(path)
  local state = mf.load(path)
  model:load_state_dict(state.model)
  opt:load_state_dict(state.optim)
  schedule:step(state.epoch * loader:len())
  return state.epoch
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

local function run()
  print(model)
  local done = o.resume == '' and 0 or resume(o.resume)
  local score = done >= o.epochs and accuracy()
  for epoch = done + 1, o.epochs do
    local seconds = train_epoch(epoch)
    save(epoch)
    score = accuracy()
    print(('epoch %d  %.0f s  test accuracy %.4f'):format(epoch, seconds, score))
  end
  print(('test accuracy %.4f'):format(score))
end

-- The command that goes on from a file: this one, with each option once.
local function command(file)
  local first = 0
  while arg[first - 1] do first = first - 1 end
  local words = { table.concat(arg, ' ', first, 0) }
  o.resume = file
  for _, entry in ipairs(entries) do
    local name, value = entry[1], tostring(o[entry[1]])
    if o[name] ~= entry[2] then
      if value:find '[^%w%./_-]' then value = ("'%s'"):format(value) end
      words[#words + 1] = '--' .. name .. (entry[2] == false and '' or ' ' .. value)
    end
  end
  return table.concat(words, ' ')
end

local ok, why = pcall(run)
if not ok then
  if not tostring(why):find 'interrupt' then error(why, 0) end
  print(saved == '' and '\nno epoch was finished, nothing is saved'
    or ('\n%s holds the last finished epoch; to go on:\n  %s'):format(saved, command(saved)))
  os.exit(130, true)
end
