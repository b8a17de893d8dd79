-- What is run again and again while one request fails after the other: each entry is a name and a
-- function that builds what it needs, does its work and returns tensors or numbers, which are the same
-- in each run. What a scenario keeps from run to run is made outside of the function.
local mf = require 'moonflow'
local nn, optim, data = mf.nn, mf.optim, mf.data

local scenarios = {}
local function scenario(name, f) scenarios[#scenarios + 1] = { name = name, f = f } end

local function net()
  mf.manual_seed(3)
  return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
end

local function batch() return mf.randn(5, 6), mf.randint(0, 4, { 5 }) end

local function values(model)
  local list = {}
  for _, p in ipairs(model:parameters()) do list[#list + 1] = p:detach():clone() end
  return list
end

-- A step of training on a model and an optimiser.
local function trainer(model, opt)
  return function(x, y)
    opt:zero_grad()
    local loss = mf.cross_entropy(model(x), y)
    loss:backward()
    opt:step()
    return loss:detach()
  end
end

scenario('eager step', function()
  local model = net()
  local step, x, y = trainer(model, optim.AdamW(model:parameters(), { lr = 0.01 })), batch()
  step(x, y)
  return values(model)
end)

scenario('backward', function()
  mf.manual_seed(4)
  local x = mf.randn(3, 4):requires_grad_()
  local y = (x:exp() * x:t():matmul(x):sum()):tanh():sum(0)
  local g = mf.grad(y:sum(), { x }, { create_graph = true })[1]
  local second = mf.grad((g * g):sum(), { x }, { retain_graph = true })[1]
  y:sum():backward()
  return { y:detach(), g:detach(), second, x.grad }
end)

local folder
do
  local p = io.popen 'mktemp -d'
  folder = p:read '*l'
  p:close()
end
scenarios.folder = folder

scenario('save', function()
  local model = net()
  local path = folder .. '/saved.safetensors'
  mf.save(model:state_dict(), path)
  return { mf.load(path)['0.weight'] }
end)

mf.save(net():state_dict(), folder .. '/net.safetensors')
mf.save({ a = mf.arange(5), b = { c = mf.ones(2, 2), d = 3 } }, folder .. '/nested.safetensors')
scenario('load', function()
  local model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
  model:load_state_dict(mf.load(folder .. '/net.safetensors'))
  local nested = mf.load(folder .. '/nested.safetensors')
  local list = values(model)
  list[#list + 1] = nested.a
  list[#list + 1] = nested.b.c
  return list
end)

scenario('data loader', function()
  local set = data.TensorDataset(mf.arange(12):reshape(6, 2), mf.arange(6))
  local list = {}
  for x, y in data.DataLoader(set, { batch_size = 2 })() do
    list[#list + 1] = x + y:unsqueeze(1)
  end
  return list
end)

scenario('data loader with workers', function()
  local set = data.TensorDataset(mf.arange(12):reshape(6, 2), mf.arange(6))
  local list = {}
  for x, y in data.DataLoader(set, { batch_size = 2, num_workers = 2 })() do
    list[#list + 1] = x + y:unsqueeze(1)
  end
  return list
end)

scenario('compile', function()
  local model = net()
  local step = mf.compile(trainer(model, optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })))
  local x, y = batch()
  return { step(x, y), values(model)[1] }
end)

do
  local model = net()
  local state, x, y = model:state_dict(), batch()
  local saved = {}
  for k, v in pairs(state) do saved[k] = v:detach():clone() end
  for _, tasks in ipairs { false, true } do
    local step = mf.compile(trainer(model, optim.SGD(model:parameters(), { lr = 0.1 })), { one_op_tasks = tasks })
    step(x, y)
    scenario(tasks and 'compiled step of many tasks' or 'compiled step', function()
      model:load_state_dict(saved)
      local a, b = step(x, y), step(x, y)
      return { a, b, unpack(values(model)) }
    end)
  end
end

-- Three streams: two tasks side by side, and one that joins them.
local streams = [[
plan "streams", block 384, results 1, cells 0, draws 0
r0 input 0, 24 bytes
r1 block, 24 bytes +0, buffers 2, task 0 to 1 2
r2 block, 24 bytes +128, task 1 to 3
r3 block, 24 bytes +192, buffers 3, task 2 to 3
r4 result 0, 24 bytes
t0 r0 float32(2, 3)
t1 r1 float32(2, 3)
t2 r2 float32(2, 3)
t3 r3 float32(2, 3)
t4 r4 float32(2, 3)
input "x0" t0
result t4
stream cpu "main"
stream cpu "left"
stream cpu "right"
task stream 0, steps 1
task stream 1, steps 1
task stream 2, steps 1
task stream 0, steps 1
step t1 = mul(t0, t0)
step t2 = exp(t1)
step t3 = neg(t1)
step t4 = add(t2, t3)
]]
scenarios.streams = streams

do
  local x = mf.arange(6, { dtype = mf.float32 }):reshape(2, 3)
  local kept = mf._plan(streams, {}, {})
  scenario('run on several streams', function()
    return { kept:run(x), kept:run(x * 0.5) }
  end)
  scenario('start of several streams', function()
    local job = mf._plan(streams, {}, {})
    return { job:run(x), job:run(x * 0.5) }
  end)
end

for _, workers in ipairs { 0, 1 } do
  scenario(('step over a loader, %d workers'):format(workers), function()
    local model = net()
    local step = mf.compile(trainer(model, optim.SGD(model:parameters(), { lr = 0.1 })))
    local set = data.TensorDataset(mf.arange(24, { dtype = mf.float32 }):reshape(4, 6), mf.arange(4))
    local list = {}
    for loss in step:over(data.DataLoader(set, { batch_size = 2, num_workers = workers })) do
      list[#list + 1] = loss:clone()
    end
    list[#list + 1] = values(model)[1]
    return list
  end)
end

scenario('nn.Graph', function()
  local model = net()
  local G = nn.Graph:extend 'G'
  function G:init()
    self.model = model
    self:add_optimizer(optim.SGD(model:parameters(), { lr = 0.1 }))
  end
  function G:build(x, y)
    local loss = mf.cross_entropy(self.model(x), y)
    loss:backward()
    return loss
  end
  local g = G()
  return { g(batch()), values(model)[1] }
end)

scenario('profile', function()
  local x = mf.ones(3, 3)
  local p = mf.profile(function() return (x:exp() + x):sum() end)
  mf.check_nan(true)
  local ok, y = pcall(function() return (x + 1):log() end)
  mf.check_nan(false)
  if not ok then error(y, 0) end
  -- events for which memory did not suffice are said to be lost
  return { p.lost == 0 and p:sums('op')[1].calls or 1, p:table():find 'kernels' and 1 or 0, y }
end)

scenario('optimisers', function()
  local list = {}
  for _, name in ipairs { 'SGD', 'Adam', 'RMSprop', 'Adagrad' } do
    mf.manual_seed(1)
    local p = nn.Parameter(mf.randn(4))
    local opt = optim[name]({ p }, { lr = 0.1 })
    for _ = 1, 2 do
      opt:zero_grad()
      ;(p * p):sum():backward()
      opt:step()
    end
    local copy = optim[name]({ p }, { lr = 0.5 })
    copy:load_state_dict(opt:state_dict())
    list[#list + 1] = p:detach():clone()
  end
  return list
end)

scenario('indexing', function()
  local x = mf.arange(24, { dtype = mf.float32 }):reshape(4, 6)
  local picked = x[x:gt(7)]
  local rows = x[{ mf.tensor({ 0, 2 }, { dtype = mf.int64 }), {} }]
  x[{ {}, { 1, 3 } }] = 5
  x[1] = mf.ones(6)
  return { picked, rows, x, x:gather(1, mf.zeros(4, 2, { dtype = mf.int64 })), (x:nonzero()) }
end)

scenario('print', function()
  local text = tostring(mf.arange(30, { dtype = mf.float32 }):reshape(5, 6) / 3) .. tostring(net())
  return { #text, #tostring(mf.tensor { { 1, 2 }, { 3, 4 } }:tolist()[2]) > 0 and 1 or 0 }
end)

scenario('convolutions', function()
  mf.manual_seed(5)
  local model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(16, 3))
  local y = model(mf.randn(3, 2, 6, 6))
  y:pow(2):sum():backward()
  local list = { y:detach() }
  for _, p in ipairs(model:parameters()) do list[#list + 1] = p.grad end
  return list
end)

scenario('attention', function()
  mf.manual_seed(6)
  local q = mf.randn(2, 2, 4, 8):requires_grad_()
  local y = mf.scaled_dot_product_attention(q, q, q, { is_causal = true })
  local z = mf.layer_norm(y, { 8 }):softmax(-1)
  z[0]:sum():backward()
  return { z:detach(), q.grad }
end)

scenario('sparse gradients', function()
  mf.manual_seed(7)
  local table_ = nn.Embedding(10, 3, { sparse = true })
  local opt = optim.SGD(table_:parameters(), { lr = 0.1 })
  local ids = mf.tensor({ 1, 4, 1 }, { dtype = mf.int64 })
  table_(ids):sum():backward()
  opt:step()
  return values(table_)
end)

scenario('random numbers', function()
  mf.manual_seed(8)
  local g = mf.Generator():manual_seed(2)
  local a, b = mf.randn(5), mf.rand(3, { generator = g })
  return { a, b, mf.dropout(mf.ones(20), 0.5), mf.randperm(6), mf.multinomial(mf.ones(5), 3) }
end)

scenario('hooks and functions', function()
  local Double = mf.Function:extend 'Double'
  function Double.forward(_, x) return x * 2 end
  function Double.backward(_, g) return g * 2 end
  local x, seen = mf.ones(3):requires_grad_(), nil
  local y = Double.apply(x)
  y:register_hook(function(g) seen = g:detach():clone() end)
  y:sum():backward()
  return { x.grad, seen }
end)

scenario('values', function()
  local t = mf.tensor { { 1, 2, 3 }, { 4, 5, 6.5 } }
  local list = t:tolist()
  return { t, list[2][3], t:sum():item(), mf.stack { t, t }, mf.cat({ t, t }, 1), mf.einsum('ij,kj->ik', t, t) }
end)

scenario('scope', function()
  local kept = mf.scope(function()
    local x = mf.ones(4, 4)
    for _ = 1, 5 do x = x + x end
    return x:sum()
  end)
  local y = mf.ones(100)
  y:free()
  return { kept }
end)

scenario('passes', function()
  local text = tostring(mf.compile(function(a) return ((a + 0) * 1 + a:exp() + a:exp()):sum() end))
  local f = mf.compile(function(a) return ((a + 0) * 1 + a:exp() + a:exp()):sum() end)
  local y = f(mf.ones(3))
  return { y, #text, #mf._graph_pass(f.age[1].job:text(), 'dce,cse'), #f.age[1].job:plan(), #f.age[1].job:memory(),
    #f.age[1].job:dot() }
end)

scenario('clipping and schedules', function()
  local model = net()
  local opt = optim.SGD(model:parameters(), { lr = 0.1 })
  local sched = mf.sched and mf.sched.StepLR and mf.sched.StepLR(opt, 1)
  local x, y = batch()
  mf.cross_entropy(model(x), y):backward()
  local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.5)
  opt:step()
  if sched then sched:step() end
  return { norm, unpack(values(model)) }
end)

return scenarios
