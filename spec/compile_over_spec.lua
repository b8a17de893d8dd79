-- step:over(loader): the numbers of a plain loop, while batches are decoded and copied in, and results
-- fetched, on other threads. That these overlap with a step, and how far they go ahead, is shown by
-- spec/c/runtime_spec.c on a plan of the same form.
local mf = require 'moonflow'
local nn, data = mf.nn, mf.data

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok and tostring(message):find(text, 1, true), tostring(message))
end

-- A model with statistics, a scheduler, a last batch that is smaller, and with o.dropout, where its draws are
-- not mixed with another's, dropout.
local function new(o)
  mf.manual_seed(3)
  local t = { x = mf.randn(52, 6), y = mf.randint(0, 5, { 52 }) }
  t.model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(o and o.dropout or 0),
    nn.Linear(16, 5))
  t.opt = mf.optim.AdamW(t.model:parameters(), { lr = 0.05 })
  t.sched = mf.optim.lr_scheduler.StepLR(t.opt, 3, { gamma = 0.5 })
  t.step = mf.compile(function(a, b)
    t.opt:zero_grad()
    local loss = mf.cross_entropy(t.model(a), b)
    loss:backward()
    t.opt:step()
    return loss
  end, { one_op_tasks = o and o.one_op_tasks })
  t.loader = data.DataLoader(data.TensorDataset(t.x, t.y),
    { batch_size = 8, shuffle = true, num_workers = o and o.workers or 0, seed = 1 })
  return t
end

local function same_state(a, b)
  local other = b.model:state_dict()
  for name, value in pairs(a.model:state_dict()) do assert(mf.equal(value, other[name]), name) end
end

local Squares = data.Dataset:extend 'Squares'
function Squares:init(n, bad) self.n, self.bad = n, bad end
function Squares:len() return self.n end
function Squares:get(i)
  if i == self.bad then error 'cannot decode' end
  return require 'moonflow'.full({ 3 }, i * i)
end

describe('step:over', function()
  for _, workers in ipairs { 0, 1, 3 } do
    it(('has the numbers of a plain loop, with %d workers'):format(workers), function()
      local function run(losses)
        local t = new { dropout = 0.3, workers = workers }
        t.losses = {}
        for _ = 1, 3 do
          for loss in losses(t) do
            t.losses[#t.losses + 1] = loss
            t.sched:step()
          end
        end
        return t
      end
      local plain = run(function(t)
        local next_batch = t.loader()
        return function()
          local a, b = next_batch()
          if a then return t.step(a, b) end
        end
      end)
      local over = run(function(t) return t.step:over(t.loader) end)
      assert.equal(21, #plain.losses)
      assert.equal(21, #over.losses)
      for k = 1, 21 do assert.equal(plain.losses[k]:item(), over.losses[k]:item()) end
      same_state(plain, over)
      assert.equal(2, over.step.misses)
    end)
  end

  it('waits for whoever reads a result or a parameter', function()
    local plain, over = new(), new()
    local next_batch = plain.loader()
    for loss in over.step:over(over.loader) do
      local want = plain.step(next_batch())
      assert.equal(want:item(), loss:item())
      same_state(plain, over)
      mf.no_grad(function() -- what the body writes holds for the next step
        for _, t in ipairs { plain, over } do t.model[0].weight:mul_(0.5) end
      end)
    end
    assert.equal(nil, (next_batch()))
  end)

  it('has run the steps that were seen when the loop is left', function()
    local plain, over = new(), new()
    for k = 1, 2 do
      local a, b = plain.loader(), 0
      for _ = 1, 3 do plain.step(a()) end
      for _ in over.step:over(over.loader) do
        b = b + 1
        if b == 3 then break end
      end
      same_state(plain, over)
      assert(k)
    end
    collectgarbage()
    collectgarbage()
    same_state(plain, over)
  end)

  it('takes calls of the step in between, and other loops', function()
    local plain, over = new(), new()
    local next_batch = plain.loader()
    for loss in over.step:over(over.loader, { buffers = 1 }) do
      local a, b = next_batch()
      assert.equal(plain.step(a, b):item(), loss:item())
      assert.equal(plain.step(a, b):item(), over.step(a, b):item())
      local inner = over.step:over(function()
        local x = a
        a = nil
        if x then return x, b end
      end)
      local want = plain.step(a, b)
      assert.equal(want:item(), inner():item())
      assert.equal(nil, (inner()))
    end
    same_state(plain, over)
  end)

  it('goes over to another step when a module changes its mode', function()
    local plain, over = new(), new()
    local k, next_batch = 0, plain.loader()
    for loss in over.step:over(over.loader) do
      assert.equal(plain.step(next_batch()):item(), loss:item())
      k = k + 1
      for _, t in ipairs { plain, over } do t.model:train(k % 2 == 0) end
    end
    assert.equal(nil, (next_batch()))
    same_state(plain, over)
  end)

  it('runs at most two buffers ahead', function()
    local made = 0
    local f = mf.compile(function(x) return x:sum() end)
    local loop = f:over(function()
      made = made + 1
      if made < 50 then return mf.full({ 2 }, made) end
    end)
    for k = 1, 49 do
      assert.equal(2 * k, loop():item())
      assert.equal(k + 1, made) -- and one batch that is made while the step runs
    end
    assert.equal(nil, (loop()))
    local taken = 0
    for x in f:over(data.DataLoader(Squares(200), { num_workers = 2, prefetch_factor = 40 })) do
      assert.equal(3 * taken ^ 2, x:item())
      taken = taken + 1
      local counts = { f.age[2].job:counts() }
      assert(counts[1] <= taken + 4 and counts[2] <= taken + 2 and counts[3] == taken, table.concat(counts, ' '))
    end
    assert.equal(200, taken)
  end)

  it('ends with the one error of a worker, with its traceback, behind the steps before it', function()
    local f = mf.compile(function(x) return x:sum() end)
    for _, workers in ipairs { 0, 2 } do
      local got = {}
      local loader = data.DataLoader(Squares(40, 20), { batch_size = 4, num_workers = workers })
      local ok, message = pcall(function()
        for x in f:over(loader) do got[#got + 1] = x end
      end)
      assert(not ok and message:find('cannot decode', 1, true), message)
      if workers > 0 then
        assert(message:find('DataLoader: worker 1:', 1, true) and message:find('stack traceback', 1, true), message)
      end
      assert.equal(5, #got)
      assert.equal(3 * (16 ^ 2 + 17 ^ 2 + 18 ^ 2 + 19 ^ 2), got[5]:item())
    end
  end)

  it('ends with the error of a step; what that would have made cannot be read', function()
    local f = mf.compile(function(a, i) return mf.embedding(i, a):sum() end)
    local k, got = 0, {}
    local loop = f:over(function()
      k = k + 1
      if k < 6 then return mf.ones(3, 2), mf.tensor({ k == 3 and 7 or 1 }, { dtype = mf.int64 }) end
    end)
    fails('embedding: ids holds 7 at position (0,)', function()
      for x in loop do got[#got + 1] = x end
    end)
    assert.equal(2, got[1]:item())
    assert.equal(2, got[2]:item())
    fails('embedding: ids holds 7', function()
      for x in f:over(function() return mf.ones(3, 2), mf.tensor({ 7 }, { dtype = mf.int64 }) end) do x:item() end
    end)
    if got[3] then fails('is a result of a step that failed', function() got[3]:item() end) end
    assert.equal(2, f(mf.ones(3, 2), mf.tensor({ 1 }, { dtype = mf.int64 })):item())
  end)

  it('ends with the error of its last step, which nobody waited for', function()
    local f = mf.compile(function(a, i) return mf.embedding(i, a:matmul(a):matmul(a)):sum() end)
    local a = mf.ones(500, 500)
    for _ = 1, 5 do
      local k = 0
      local function batch()
        k = k + 1
        if k < 3 then return a, mf.tensor({ k == 2 and 700 or 1 }, { dtype = mf.int64 }) end
      end
      fails('embedding: ids holds 700 at position (0,)', function()
        for _ in f:over(batch) do k = k + 0 end
      end)
    end
  end)

  it('says what it cannot run over', function()
    local f = mf.compile(function(x) return x:sum() end)
    fails('a DataLoader, or a function', f.over, f, 3)
    fails("did you mean 'buffers'", f.over, f, function() end, { bufers = 2 })
    fails('at most 16', f.over, f, function() end, { buffers = 17 })
    fails('value 1 of a batch is 3', function() f:over(function() return 3 end)() end)
    fails('returns nothing', function()
      mf.compile(function(x) x:sum() end):over(function() return mf.ones(2) end)()
    end)
    assert.equal(nil, (f:over(function() end)()))
  end)

  it('is there for tasks of one op', function()
    local plain, over = new(), new { one_op_tasks = true }
    local next_batch = plain.loader()
    for loss in over.step:over(over.loader) do assert.equal(plain.step(next_batch()):item(), loss:item()) end
    same_state(plain, over)
  end)

  it('is there for nn.Graph, whose schedulers take their steps', function()
    local Train = nn.Graph:extend 'Train'
    function Train:init(t)
      self.model = t.model
      self:add_optimizer(t.opt, { lr_sch = t.sched })
    end
    function Train:build(a, b)
      local loss = mf.cross_entropy(self.model(a), b)
      loss:backward()
      return loss
    end
    local plain, over = new(), new()
    local one, other = Train(plain), Train(over)
    local next_batch = plain.loader()
    for loss in other:over(over.loader) do assert.equal(one(next_batch()):item(), loss:item()) end
    same_state(plain, over)
  end)
end)
