-- Micro-batches: a compiled step that works on parts of its batch in turn is the step on the whole batch.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim
local models = dofile 'examples/models.lua'

local f64 = mf.float64
local function randn(...) return mf.randn({ ... }, { dtype = f64 }) end

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok, 'no error: ' .. text)
  assert(tostring(message):find(text, 1, true), tostring(message))
end

local function near(want, got, within, what)
  local by = (want:double() - got:double()):abs():max():item()
  assert(by <= within, ('%s differs by %g'):format(what, by))
end

local function steps(n, o)
  o = o or {}
  o.gradient_accumulation_steps = n
  return o
end

-- Trains `make()` = {model =, opt =, loss =, batch =, after =} three times five steps: eagerly, compiled on the
-- whole batch and in micro-batches; parameters, states and losses agree.
local function same_training(make, counts, within)
  local function train(options)
    mf.manual_seed(3)
    local side = make()
    local function f(...)
      side.opt:zero_grad()
      local loss = side.loss(...)
      loss:backward()
      if side.clip then nn.utils.clip_grad_norm_(side.model:parameters(), side.clip) end
      side.opt:step()
      return loss
    end
    local step, losses = options and mf.compile(f, options) or f, {}
    for k = 1, 5 do
      mf.manual_seed(50 + k)
      losses[k] = step(side.batch())
      if side.schedule then side.schedule:step() end
    end
    return side, mf.stack(losses):detach(), step
  end
  local want, want_losses = train()
  for _, n in ipairs(counts) do
    for _, one in ipairs { false, true } do
      local got, losses, step = train(steps(n, { one_op_tasks = one }))
      near(want_losses, losses, within, n .. ' micro-batches: the loss')
      for name, p in want.model:named_parameters() do
        local q = got.model:state_dict()[name]
        near(p:detach(), q, within, n .. ' micro-batches: ' .. name)
      end
      assert.equal(1, step.misses)
    end
  end
end

describe('micro-batches are the whole batch', function()
  it('for an mlp with dropout, clipping, AdamW and a schedule', function()
    same_training(function()
      local m = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)):double()
      local opt = optim.AdamW(m:parameters(), { lr = 0.01 })
      return { model = m, opt = opt, clip = 0.1, schedule = optim.lr_scheduler.CosineAnnealingLR(opt, 10),
        loss = function(x, y) return mf.cross_entropy(m(x), y) end,
        batch = function() return randn(8, 5), mf.randint(0, 3, { 8 }) end }
    end, { 2, 4, 8 }, 1e-12)
  end)

  it('for a transformer with dropout everywhere', function()
    same_training(function()
      local m = nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoderLayer(8, 2, { dim_feedforward = 16,
        dropout = 0.2, batch_first = true }), nn.Linear(8, 11)):double()
      return { model = m, opt = optim.SGD(m:parameters(), { lr = 0.1, momentum = 0.9 }), clip = 1,
        loss = function(x, y) return mf.cross_entropy(m(x):reshape(-1, 11), y:reshape(-1)) end,
        batch = function() return mf.randint(0, 11, { 6, 4 }), mf.randint(0, 11, { 6, 4 }) end }
    end, { 2, 3 }, 1e-12)
  end)

  it('where the batch is the second dim, by the dims that the ops keep', function()
    same_training(function()
      local m = nn.Sequential(nn.Linear(5, 6), nn.Tanh()):double()
      return { model = m, opt = optim.SGD(m:parameters(), { lr = 0.1 }),
        loss = function(x)
          local y = mf.dropout(m(x:transpose(0, 1)), { p = 0.4 }) -- (T, B, C)
          return mf.dropout(y:permute(2, 0, 1), { p = 0.2 }):square():mean()
        end,
        batch = function() return randn(8, 3, 5) end }
    end, { 2, 4 }, 1e-12)
  end)

  it('for sparse gradients of an embedding', function()
    for _, make in ipairs { function(p) return optim.SGD(p, { lr = 0.1 }) end,
      function(p) return optim.SparseAdam and optim.SparseAdam(p) or optim.Adagrad(p, { lr = 0.1 }) end } do
      same_training(function()
        local m = nn.Embedding(20, 4, { sparse = true }):double()
        return { model = m, opt = make(m:parameters()),
          loss = function(i) return m(i):square():sum(1):mean() end,
          batch = function() return mf.randint(0, 20, { 8, 3 }) end }
      end, { 2, 4 }, 1e-12)
    end
  end)

  it('for the models of the benchmarks', function()
    same_training(function()
      local m = models.Transformer(11, 8, 12, 3, 2, true):double()
      return { model = m, opt = optim.SGD(m:parameters(), { lr = 0.05, momentum = 0.9 }),
        loss = function(x, y) return mf.cross_entropy(m(x):reshape(-1, 11), y:reshape(-1)) end,
        batch = function() return mf.randint(0, 11, { 4, 8 }), mf.randint(0, 11, { 4, 8 }) end }
    end, { 2 }, 1e-12)
  end)

  it('for convolutions whose images lie with channels innermost', function()
    local x, y = mf.randn { 8, 8, 12, 12 }, mf.randint(0, 3, { 8 })
    local function train(o, mark)
      mf.manual_seed(1)
      local body = nn.Sequential(nn.Conv2d(8, 8, 3, { padding = 1 }), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
      local m = nn.Sequential(body, nn.Flatten(), nn.Linear(800, 3))
      body.activation_checkpointing = mark
      local opt = optim.SGD(m:parameters(), { lr = 0.05, momentum = 0.9 })
      local function f(a, b)
        opt:zero_grad()
        local images = body(a)
        local loss = mf.cross_entropy(m[2](images:flatten(1)), b)
        loss:backward()
        opt:step()
        return loss, images
      end
      local step, losses, images = o and mf.compile(f, o) or f, {}, nil
      for k = 1, 4 do losses[k], images = step(x, y) end
      return mf.stack(losses):detach(), images:detach(), step
    end
    local want, want_images = train()
    for _, n in ipairs { 2, 4 } do
      for _, mark in ipairs { false, true } do
        local losses, images, step = train(steps(n), mark)
        assert(tostring(step):find(('clone%%([^)]*channels_last%%): %d x'):format(n)), tostring(step))
        near(want, losses, 1e-5, n .. ' micro-batches: the losses')
        near(want_images, images, 1e-5, n .. ' micro-batches: images')
        assert.same(want_images:stride(), images:stride())
      end
    end
  end)

  it('bit for bit where sums are exact', function()
    local function train(n)
      local w = mf.arange(12, { dtype = f64 }):reshape(3, 4):requires_grad_()
      local step = mf.compile(function(x)
        w.grad = nil
        local y = mf.dropout(x:matmul(w), { p = 0.5 })
        y:sum(1):mean():backward()
        mf.no_grad(function() w:sub_(w.grad * 0.5) end)
        return y
      end, steps(n))
      mf.manual_seed(9)
      local y
      for _ = 1, 3 do y = step((mf.randn { 8, 3 } * 4):round():double()) end
      return w:detach(), y:detach()
    end
    local w, y = train(1)
    for _, n in ipairs { 2, 4, 8 } do
      local v, z = train(n)
      assert(mf.equal(w, v) and mf.equal(y, z), n)
    end
  end)
end)

describe('with micro-batches', function()
  it('each of them updates running statistics in turn, as when PyTorch accumulates', function()
    local function build()
      mf.manual_seed(1)
      local m = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2)):double()
      return m, optim.SGD(m:parameters(), { lr = 0.1 })
    end
    local a, opt_a = build()
    local b, opt_b = build()
    local step = mf.compile(function(x, y)
      opt_b:zero_grad()
      local loss = mf.cross_entropy(b(x), y)
      loss:backward()
      opt_b:step()
      return loss
    end, steps(3))
    for k = 1, 3 do
      mf.manual_seed(k)
      local x, y, loss = randn(6, 2, 6, 6), mf.randint(0, 2, { 6 }), 0
      opt_a:zero_grad()
      for m = 0, 2 do
        local part = mf.cross_entropy(a(x:narrow(0, 2 * m, 2)), y:narrow(0, 2 * m, 2)) / 3
        part:backward()
        loss = loss + part:detach()
      end
      opt_a:step()
      near(loss, step(x, y), 1e-12, 'the loss')
      local want, got = a:state_dict(), b:state_dict()
      for name in pairs(want) do near(want[name]:detach(), got[name]:detach(), 1e-12, name) end
    end
    assert.equal(9, b:state_dict()['1.num_batches_tracked']:item())
  end)

  it('BatchNorm without momentum averages over all micro-batches', function()
    for _, n in ipairs { 1, 2 } do
      local a, b = nn.BatchNorm1d(3, { momentum = false }):double(), nn.BatchNorm1d(3, { momentum = false }):double()
      local step = mf.compile(function(x) return b(x) end, steps(n))
      for k = 1, 3 do
        mf.manual_seed(k)
        local x = randn(8, 3)
        local parts = x:chunk(n)
        for i, part in ipairs(parts) do parts[i] = a(part) end
        near(mf.cat(parts):detach(), step(x):detach(), 1e-12, 'the output')
        for name, want in pairs(a:state_dict()) do
          near(want:detach(), b:state_dict()[name]:detach(), 1e-12, name)
        end
      end
    end
  end)

  it('results are means, are put one behind the other, or are of the step', function()
    local total, w = mf.zeros({}, { dtype = f64 }), mf.ones({ 3 }, { dtype = f64, requires_grad = true })
    local step = mf.compile(function(x, i, s, n)
      w.grad = nil
      local y = x * w * s
      mf.no_grad(function() total:add_(x:sum()) end)
      y:mean():backward()
      return { loss = y:mean(), rows = y, each = y:sum(1), count = (i:gt(1)):sum(), all = x, sum = total,
        grad = w.grad, norm = w.grad:norm(), number = n, table = { i + 1 } }
    end, steps(2))
    local x, i = mf.arange(12, { dtype = f64 }):reshape(4, 3), mf.tensor { 0, 1, 2, 3 }
    local s = mf.tensor(2, { dtype = f64 })
    local r = step(x, i, s, 7)
    assert.same((x * 2):mean():item(), r.loss:item())
    assert.same((x * 2):tolist(), r.rows:tolist())
    assert.same((x * 2):sum(1):tolist(), r.each:tolist())
    assert.same({ 0, 2 }, r.count:tolist())
    assert.same(x:tolist(), r.all:tolist())
    assert.equal(66, r.sum:item())
    assert.equal(66, total:item())
    near((x * 2):sum(0) / 12, r.grad, 1e-15, 'the gradient')
    near(r.grad:norm(), r.norm, 1e-15, 'its norm')
    assert.equal(7, r.number)
    assert.same({ 1, 2, 3, 4 }, r.table[1]:tolist())
    assert.equal(132, step(x, i, s, 7).sum:item())
  end)

  it('what is returned without gradients is that of the whole batch', function()
    mf.manual_seed(2)
    local m = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 2)):double()
    local x = randn(8, 4)
    local function plain(y) return mf.no_grad(function() return m(y) end) end
    near(plain(x), mf.compile(plain, steps(4))(x), 1e-15, 'the output')
  end)

  it('arguments can be whole in each, and be written', function()
    local step = mf.compile(function(x, table, y)
      y:add_(x)
      return x:matmul(table)
    end, steps(2, { repeated = { 2 } }))
    local x, t, y = randn(4, 3), randn(3, 5), randn(4, 3)
    local want = x + y
    near(x:matmul(t), step(x, t, y), 1e-15, 'the product')
    near(want, y, 0, 'the argument')
  end)

  it('noise for each sample differs from sample to sample, and masks of weights do not', function()
    local w = mf.ones({ 3 }, { dtype = f64 })
    local step = mf.compile(function(x)
      return x + mf.randn({ x:size(0), 3 }, { dtype = f64 }), mf.dropout(w, { p = 0.5 }) * x
    end, steps(4))
    local whole = mf.compile(function(x)
      return x + mf.randn({ x:size(0), 3 }, { dtype = f64 }), mf.dropout(w, { p = 0.5 }) * x
    end)
    local x = mf.ones({ 8, 3 }, { dtype = f64 })
    mf.manual_seed(4)
    local a, b = step(x)
    mf.manual_seed(4)
    local c, d = whole(x)
    assert(mf.equal(a, c) and mf.equal(b, d))
  end)

  it('a scalar is read once a step, and a gradient that was there is added to', function()
    local s, w = mf.scalar(2), mf.ones({ 2 }, { dtype = f64, requires_grad = true })
    w.grad = mf.ones({ 2 }, { dtype = f64 })
    local step = mf.compile(function(x) (x * w * s):sum(1):mean():backward() end, steps(2))
    step(mf.ones({ 4, 2 }, { dtype = f64 }))
    assert.same({ 3, 3 }, w.grad:tolist())
    s.value = 3
    step(mf.ones({ 4, 2 }, { dtype = f64 }))
    assert.same({ 6, 6 }, w.grad:tolist())
  end)

  it('mf.grad by captured tensors is the mean, by others it is of each', function()
    local w = mf.ones({ 2 }, { dtype = f64, requires_grad = true })
    local step = mf.compile(function(x)
      local z = x:detach():requires_grad_()
      local loss = (z * z * w):sum(1):mean()
      local g = mf.grad(loss, { w, z })
      return g[1], g[2]
    end, steps(2))
    local x = mf.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 }, { 7, 8 } }, { dtype = f64 })
    local by_w, by_x = step(x)
    assert.same((x * x):mean(0):tolist(), by_w:tolist())
    assert.same(x:tolist(), by_x:tolist()) -- 2 x / 2 samples of a micro-batch
  end)

  it('memory is that of one', function()
    local function block(n)
      mf.manual_seed(1)
      local m = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
      local opt = optim.SGD(m:parameters(), { lr = 0.1 })
      local step = mf.compile(function(x)
        opt:zero_grad()
        m(x):square():mean():backward()
        opt:step()
      end, steps(n))
      step(mf.randn { 4096, 8 })
      return tonumber(step.age[1].job:memory():match 'block (%d+) bytes')
    end
    local whole, parts = block(1), block(8)
    assert(parts < whole / 6, parts .. ' of ' .. whole)
  end)

  it('the graph and the plan read back', function()
    mf.manual_seed(1)
    local m = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2)):double()
    local opt = optim.AdamW(m:parameters(), { lr = 0.1 })
    for _, one in ipairs { false, true } do
      local step = mf.compile(function(x)
        opt:zero_grad()
        local loss = m(x):square():mean()
        loss:backward()
        opt:step()
        return loss
      end, steps(2, { one_op_tasks = one }))
      local x = randn(6, 4)
      step(x)
      local text, job = tostring(step), step.age[1].job
      assert.equal(text, (mf._graph_pass(text, '')))
      local captures, before = {}, {}
      for k, c in ipairs(job:captures()) do captures[k], before[k] = c.tensor, c.tensor:detach():clone() end
      local again = mf._plan(job:plan(), captures, job:cells())
      assert.equal(job:plan(), again:plan())
      mf.manual_seed(5)
      local want = job:run(x):item()
      mf.no_grad(function() for k, t in ipairs(captures) do t:copy_(before[k]) end end)
      mf.manual_seed(5)
      assert.equal(want, again:run(x):item())
    end
  end)

  it('bad input says what is wrong', function()
    local w = mf.ones({ 2, 2 }, { requires_grad = true })
    local function step(n, o) return mf.compile(function(x, y) return x + y end, steps(n, o)) end
    fails('argument 2 has shape (5, 2), whose first size is not a multiple of gradient_accumulation_steps = 4',
      step(4), mf.ones { 4, 2 }, mf.ones { 5, 2 })
    fails('whole number from 1', step, 1.5)
    fails('whole number from 1', step, 0)
    fails('counted from 1; there is', step, 2, { repeated = { 'x' } })
    fails("did you mean 'repeated'", step, 2, { repeat_ = {} })
    fails('time cannot be left out', step, 2, { passes = { time = false } })
    local mixed = mf.compile(function(x)
      x:matmul(w):mean():backward()
      mf.no_grad(function() w:sub_(w.grad * x) end)
      w.grad = nil
    end, steps(2))
    fails('what one micro-batch has', mixed, mf.ones { 4, 2 })
    fails('compile_micro_spec.lua', mixed, mf.ones { 4, 2 })
    local again = mf.compile(function(x)
      local g = mf.grad(x:matmul(w):square():mean(), { w }, { create_graph = true })[1]
      g:square():sum():backward()
    end, steps(2))
    fails('micro_mean has no gradient', again, mf.ones { 4, 2 })
  end)

  it('a loss that reads a mean of the batch late gets it as a mean', function()
    local w = mf.ones({ 2 }, { dtype = f64, requires_grad = true })
    local step = mf.compile(function(x)
      w.grad = nil
      local loss = (x * w):sum(1):mean()
      loss:backward()
      mf.no_grad(function() w:sub_(w.grad * loss.data) end)
    end, steps(2))
    step(mf.tensor({ { 1, 0 }, { 3, 0 } }, { dtype = f64 }))
    assert.same({ 1 - 2 * 2, 1 }, w:tolist())
  end)

  it('a step over a loader is the same as called for each batch', function()
    local function train(over, one)
      mf.manual_seed(1)
      local m = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 2)):double()
      local opt = optim.AdamW(m:parameters(), { lr = 0.1 })
      local step = mf.compile(function(x)
        opt:zero_grad()
        local y = m(x)
        y:square():mean():backward()
        opt:step()
        return y
      end, steps(2, { one_op_tasks = one }))
      local loader = mf.data.DataLoader(mf.data.TensorDataset(randn(40, 4)), { batch_size = 8 })
      local list = {}
      mf.manual_seed(2)
      if over then for y in step:over(loader) do list[#list + 1] = y:detach():clone() end
      else for x in loader() do list[#list + 1] = step(x) end end
      return mf.stack(list), m:state_dict()['0.weight']
    end
    local want, w = train(false)
    assert.same({ 5, 8, 2 }, { unpack(want.shape) })
    for _, one in ipairs { false, true } do
      local got, v = train(true, one)
      assert(mf.equal(want, got) and mf.equal(w, v))
    end
  end)

  it('nothing is allocated from the third step on', function()
    mf.manual_seed(1)
    local m = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.2), nn.Linear(6, 2))
    local opt = optim.AdamW(m:parameters(), { lr = 0.1 })
    local step = mf.compile(function(x)
      opt:zero_grad()
      m(x):square():mean():backward()
      opt:step()
    end, steps(2))
    local x = mf.randn { 6, 4 }
    for _ = 1, 3 do step(x) end
    local before = mf.memory_stats().allocations
    for _ = 1, 10 do step(x) end
    assert.equal(before, mf.memory_stats().allocations)
  end)
end)

describe('a compiled step', function()
  it('is made anew when a module got another parameter, buffer or child', function()
    local m = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)):eval()
    local step = mf.compile(function(x) return m(x) end)
    local x = mf.ones { 1, 2 }
    local function same(misses)
      near(m(x):detach(), step(x):detach(), 1e-6, 'the output')
      assert.equal(misses, step.misses)
    end
    same(1)
    same(1)
    m[0].weight = nn.Parameter(mf.full({ 2, 2 }, 5))
    same(2)
    same(2)
    m[1].running_mean = mf.ones(2)
    same(3)
    m[1] = nn.Identity()
    same(4)
    mf.no_grad(function() m[0].weight:zero_() end)
    same(4)
  end)
end)

describe('a failure in a micro-batch', function()
  it('of a step over a loader loses no results before, and the step goes on', function()
    local table = randn(4, 2)
    for _, one in ipairs { false, true } do
      local step = mf.compile(function(i) return mf.embedding(i, table):sum() end, steps(3, { one_op_tasks = one }))
      local function over(bad)
        local k, sums = 0, {}
        local ok, message = pcall(function()
          for y in step:over(function()
            k = k + 1
            if k < 8 then return mf.tensor { 0, 1, 2, k == 5 and bad or 3, k % 4, 2 }:long() end
          end) do sums[#sums + 1] = y:item() end
        end)
        return sums, ok, message
      end
      local want, ok, message = over(1)
      assert(ok and #want == 7, message)
      for _ = 1, 3 do
        local sums, failed = over(9)
        assert(not failed)
        assert.same({ unpack(want, 1, 4) }, sums)
        assert.same(want, (over(1)))
      end
    end
  end)
end)

describe('nn.Graph', function()
  it('takes one step for several micro-batches', function()
    local function train(n)
      mf.manual_seed(1)
      local G = nn.Graph:extend 'G'
      function G:init()
        self.model = nn.Linear(3, 2):double()
        self:add_optimizer(optim.AdamW(self.model:parameters(), { lr = 0.1 }))
        self.config:set_gradient_accumulation_steps(n)
      end
      function G:build(x, y)
        local loss = mf.mse_loss(self.model(x), y)
        loss:backward()
        return loss
      end
      local g, losses = G(), {}
      mf.manual_seed(2)
      for k = 1, 4 do losses[k] = g(randn(6, 3), randn(6, 2)) end
      return mf.stack(losses)
    end
    near(train(1), train(3), 1e-12, 'the loss')
    near(train(1), train(6), 1e-12, 'the loss')
  end)
end)

-- -- Computed anew in each ------------------------------------------------------------------------

describe('micro-batches that are computed anew', function()
  local Block = nn.Module:extend 'Block'
  function Block:init(drop)
    self.one, self.norm, self.two = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)
    self.drop = nn.Dropout(drop)
  end
  function Block:forward(x) return x + self.drop(self.two(self.norm(self.one(x)):tanh())) end

  -- Four steps, eager without o, the first `mark` of five blocks being checkpoints; parameters as one tensor,
  -- losses, the job and the step.
  local function train(o, mark, drop)
    mf.manual_seed(3)
    local list = {}
    for k = 1, 5 do list[k] = Block(drop or 0.3) end
    list[6] = nn.Linear(8, 2)
    local m = nn.Sequential(unpack(list)):double()
    for k = 0, (mark or 0) - 1 do m[k].activation_checkpointing = true end
    local opt = optim.AdamW(m:parameters(), { lr = 0.01 })
    local function f(x, y)
      opt:zero_grad()
      local loss = mf.cross_entropy(m(x), y)
      loss:backward()
      nn.utils.clip_grad_norm_(m:parameters(), 0.5)
      opt:step()
      return loss
    end
    local step, losses = o and mf.compile(f, o) or f, {}
    for k = 1, 4 do
      mf.manual_seed(50 + k)
      losses[k] = step(randn(128, 8), mf.randint(0, 2, { 128 }))
    end
    local all = {}
    for k, p in ipairs(m:parameters()) do all[k] = p:detach():reshape(-1) end
    return mf.cat(all), mf.stack(losses):detach(), o and step.age[1].job, step
  end

  local function bytes(job) return tonumber(job:memory():match 'block (%d+) bytes') end

  local function agree(want, want_losses, got, losses, what)
    near(want, got, 1e-12, what .. ': parameters')
    near(want_losses, losses, 1e-12, what .. ': losses')
  end

  it('where checkpoints say so, are the whole batch in less memory', function()
    local want, want_losses = train()
    for _, n in ipairs { 2, 4 } do
      for _, one in ipairs { false, true } do
        local what = ('%d, one_op_tasks %s'):format(n, tostring(one))
        local kept, kept_losses, plain = train(steps(n, { one_op_tasks = one }))
        local got, losses, job = train(steps(n, { one_op_tasks = one }), 5)
        agree(want, want_losses, got, losses, what)
        assert(mf.equal(kept, got) and mf.equal(kept_losses, losses), what .. ': other bits than when kept')
        assert(bytes(job) < 0.8 * bytes(plain), ('%s: %d of %d'):format(what, bytes(job), bytes(plain)))
      end
    end
  end)

  it('where a budget asks for it, are the whole batch within that', function()
    local want, want_losses = train()
    for _, n in ipairs { 2, 4 } do
      local kept, kept_losses, plain = train(steps(n))
      for _, part in ipairs { 1.5, 0.85, 0.7 } do
        local what, budget = ('%d, %g of the memory'):format(n, part), math.floor(part * bytes(plain))
        for _, one in ipairs { false, true } do
          local got, losses, job = train(steps(n, { memory_budget = budget, one_op_tasks = one }))
          agree(want, want_losses, got, losses, what)
          assert(mf.equal(kept, got) and mf.equal(kept_losses, losses), what .. ': other bits than when kept')
          if not one then assert(bytes(job) <= budget, ('%s: %d'):format(what, bytes(job))) end
        end
      end
      local ok, message = pcall(train, steps(n, { memory_budget = 3000 }))
      local least = tonumber(message:match 'at least (%d+) beside')
      assert(not ok and least and least < bytes(plain), message)
      local got, losses = train(steps(n, { memory_budget = least }))
      agree(want, want_losses, got, losses, 'with the least')
      fails('at least', train, steps(n, { memory_budget = least - 1 }))
    end
  end)

  it('not what is made once for all of them, and in the order of the plan', function()
    local text = [[
graph step times 2
%0 = input x: float32[128, 16]
%1 = capture w: float32[16, 16]
%2 = capture b: float32[64, 16]
%3 = exp(%2): float32[64, 16]
%4 = neg(%1): float32[16, 16]
%5 = exp(%4): float32[16, 16]
%6 = neg(%5): float32[16, 16]
%7 = exp(%6): float32[16, 16]
%8 = tanh(%3): float32[64, 16]
%9 = micro_repeat(%8): 2 x float32[64, 16]
%10 = micro_repeat(%7): 2 x float32[16, 16]
%11 = micro_unpack(%0, n=2): 2 x float32[64, 16]
%12 = add(%11, %9): 2 x float32[64, 16]
%13 = matmul(%12, %10): 2 x float32[64, 16]
%14 = gelu(%13): 2 x float32[64, 16]
%15 = matmul(%14, %10): 2 x float32[64, 16]
%16 = gelu(%15): 2 x float32[64, 16]
%17 = matmul(%16, %10): 2 x float32[64, 16]
%18 = sum(%17, dim=[0, 1]): 2 x float32[]
%19 = micro_mean(%18, n=2): float32[]
%20 = spread(%18, size=[64, 16], dim=[0, 1], keepdim=false): 2 x float32[64, 16]
%21 = linear_weight(%20, %16): 2 x float32[16, 16]
%22 = micro_mean(%21, n=2): float32[16, 16]
%23 = neg(%22): float32[16, 16]
%24 = matmul(%20, %10): 2 x float32[64, 16]
%25 = gelu_backward(%24, %15): 2 x float32[64, 16]
%26 = linear_weight(%25, %14): 2 x float32[16, 16]
%27 = micro_mean(%26, n=2): float32[16, 16]
%28 = matmul(%25, %10): 2 x float32[64, 16]
%29 = gelu_backward(%28, %13): 2 x float32[64, 16]
%30 = mul(%29, %9): 2 x float32[64, 16]
%31 = linear_weight(%30, %12): 2 x float32[16, 16]
%32 = micro_mean(%31, n=2): float32[16, 16]
return %19, %23, %27, %32
]]
    local function count(of, what) return select(2, of:gsub(what, '')) end
    local ok, message = pcall(mf._graph_pass, text, 'remat_budget', nil, 1000)
    local least = tonumber(message:match 'at least (%d+) beside')
    assert(not ok and least, message)
    for budget = least, least + 6000, 500 do
      local out = mf._graph_pass(text, 'remat_budget,dce', nil, budget)
      assert.equal(4, count(out, '= neg%b(): float32') + count(out, '= tanh%b(): float32'))
      for line in out:match('= micro_repeat.*'):gmatch '[^\n]+' do
        assert(not line:find('= exp', 1, true) and not line:find('= tanh', 1, true), out)
      end
      assert(out:find('= neg[^\n]*\nreturn'), out)
      if budget == least then assert(count(out, '= gelu%(') + count(out, '= add%(') > 3, out) end
    end
  end)

  it('both, and their graphs read back', function()
    local want, want_losses = train()
    local _, _, two = train(steps(4), 2)
    local _, _, all = train(steps(4), 5)
    local budget = math.floor((bytes(two) + bytes(all)) / 2)
    local got, losses, job, step = train(steps(4, { memory_budget = budget }), 2)
    agree(want, want_losses, got, losses, 'both')
    assert(bytes(job) <= budget)
    local text = tostring(step)
    assert.equal(text, (mf._graph_pass(text, '')))
  end)

  it('write running statistics once each', function()
    local function statistics(mark)
      mf.manual_seed(1)
      local m = nn.Sequential(nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU()), nn.Linear(6, 2)):double()
      if mark then m[0].activation_checkpointing = true end
      local opt = optim.SGD(m:parameters(), { lr = 0.1 })
      local step = mf.compile(function(x)
        opt:zero_grad()
        m(x):square():mean():backward()
        opt:step()
      end, steps(3))
      mf.manual_seed(2)
      for _ = 1, 3 do step(randn(12, 3)) end
      return m:state_dict()
    end
    local want, got = statistics(), statistics(true)
    for name, t in pairs(want) do assert(mf.equal(t:detach(), got[name]:detach()), name) end
    assert.equal(9, got['0.1.num_batches_tracked']:item())
  end)

  it('take what is computed once a step as it is, and draw as the first time', function()
    local head = 'graph step times 2\n'
    local text = head .. [[
%0 = input x: float32[8, 4]
%1 = capture w: float32[4]
%2 = micro_unpack(%0, n=2): 2 x float32[4, 4]
%3 = exp(%1): float32[4] {remat 1}
%4 = micro_repeat(%3): 2 x float32[4] {remat 1}
%5 = mul(%2, %4): 2 x float32[4, 4] {remat 1}
%6 = dropout(%5, generator=0 along 0): 2 x float32[4, 4] {remat 1}
%7 = neg(%6): 2 x float32[4, 4] {remat 1, kept}
%8 = mul(%7, %6): 2 x float32[4, 4]
%9 = micro_pack(%8, n=2): float32[8, 4]
return %9
]]
    assert.equal(head .. [[
%0 = input x: float32[8, 4]
%1 = capture w: float32[4]
%2 = micro_unpack(%0, n=2): 2 x float32[4, 4]
%3 = exp(%1): float32[4]
%4 = micro_repeat(%3): 2 x float32[4]
%5 = mul(%2, %4): 2 x float32[4, 4]
%6 = dropout(%5, generator=0 along 0): 2 x float32[4, 4]
%7 = neg(%6): 2 x float32[4, 4]
%8 = mul(%2, %4): 2 x float32[4, 4]
%9 = dropout(%8, generator=0 along 0): 2 x float32[4, 4]
%10 = mul(%7, %9): 2 x float32[4, 4]
%11 = micro_pack(%10, n=2): float32[8, 4]
return %11
]], (mf._graph_pass(text, 'remat')))
  end)
end)
