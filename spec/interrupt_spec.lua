-- Ctrl-C while a compiled step runs: an error, after which model, step and context are as good as before.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

-- Calls f again and again until an interrupt, which comes after a while, ends it, with the text `where` of
-- a kernel's line in the error: between two calls is not in mid-step. The program leaves for good when a
-- second one comes within a second.
local function interrupted(where, f)
  for _ = 1, 10 do
    local killer = io.popen 'sleep 0.3; kill -INT $PPID' -- os.execute would ignore it meanwhile
    local stop = mf.time() + 60
    local ok, why = pcall(function()
      while mf.time() < stop do f() end
    end)
    killer:close()
    assert(not ok and tostring(why):find('interrupted', 1, true), 'another error: ' .. tostring(why))
    local rest = mf.time() + 1.1
    while mf.time() < rest do mf.relu(mf.ones(1000)) end
    if why:find(where) then return end
  end
  error 'no interrupt came in mid-step'
end

describe('an interrupt', function()
  local x, y = mf.randn(64, 64), mf.randint(0, 8, { 64 })

  -- A model with its training step, which takes long enough to be hit, and its state at the start.
  local function training(o)
    mf.manual_seed(5)
    local layers = {}
    for i = 1, 12 do
      layers[2 * i - 1], layers[2 * i] = nn.Linear(64, 64), nn.Tanh()
    end
    layers[#layers + 1] = nn.Linear(64, 8)
    local model = nn.Sequential(unpack(layers))
    local opt = optim.AdamW(model:parameters(), { lr = 0.01 })
    local function step(a, b)
      opt:zero_grad()
      local loss = mf.cross_entropy(model(a), b)
      loss:backward()
      opt:step()
      return loss:detach()
    end
    return model, opt, o == 'eager' and step or mf.compile(step, { one_op_tasks = o })
  end

  local function copy(state)
    local t = {}
    for k, v in pairs(state) do
      t[k] = mf.is_tensor(v) and v:detach():clone() or type(v) == 'table' and copy(v) or v
    end
    return t
  end

  for _, mode in ipairs { 'eager', false, true } do
    it(('leaves a model usable: one_op_tasks = %s'):format(tostring(mode)), function()
      local model, opt, step = training(mode)
      step(x, y)
      local state, steps = copy(model:state_dict()), copy(opt:state_dict())
      local want = {}
      for i = 1, 3 do want[i] = step(x, y):item() end
      interrupted(mode == 'eager' and '' or 'spec%.lua:%d+: .*spec%.lua:%d+: ', function() step(x, y) end)
      model:load_state_dict(state)
      opt:load_state_dict(steps)
      for i = 1, 3 do assert.equal(want[i], step(x, y):item()) end
    end)
  end

  it('stops all streams of a step', function()
    local job = mf._plan([[
plan "streams", block 4194304, results 1, cells 0, draws 0
r0 input 0, 1048576 bytes
r1 block, 1048576 bytes +0, task 0 to 1 2
r2 block, 1048576 bytes +1048576, task 1 to 3
r3 block, 1048576 bytes +2097152, buffers 2, task 2 to 3
r4 result 0, 1048576 bytes
t0 r0 float32(512, 512)
t1 r1 float32(512, 512)
t2 r2 float32(512, 512)
t3 r3 float32(512, 512)
t4 r4 float32(512, 512)
input "x0" t0
result t4
stream cpu "main"
stream cpu "left"
stream cpu "right"
task stream 0, steps 1
task stream 1, steps 1
task stream 2, steps 1
task stream 0, steps 1
step t1 = matmul(t0, t0) "main:1"
step t2 = matmul(t1, t1) "left:1"
step t3 = matmul(t1, t0) "right:1"
step t4 = add(t2, t3) "main:2"
]], {}, {})
    local a = mf.randn(512, 512) * 0.05
    local want = job:run(a)
    assert.is_true(mf.equal(want, a:matmul(a):matmul(a:matmul(a)) + a:matmul(a):matmul(a)))
    for _ = 1, 2 do
      interrupted(':%d: interrupted$', function() job:run(a) end)
      for _ = 1, 3 do assert.is_true(mf.equal(want, job:run(a))) end
    end
  end)
end)
