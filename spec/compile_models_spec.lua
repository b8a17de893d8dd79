-- Compiled training equals eager training, bit for bit, on the models of examples/bench.lua at small sizes, and
-- with what a training loop does besides.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim
local models = dofile 'examples/models.lua'

local function randn(...) return mf.randn({ ... }, { dtype = mf.float64 }) end
local function ids(high, ...) return mf.randint(0, high, { ... }) end

local function cross_entropy(y, target) return mf.cross_entropy(y:reshape(-1, y:size(-1)), target:reshape(-1)) end

-- By workload: a model; a batch, inputs and target; the loss.
local workloads = {
  mlp = { function() return models.MLP(12, 16, 8) end, function() return { randn(6, 12) }, ids(10, 6) end },
  cnn = { function() return models.CNN(3, 12, 8) end, function() return { randn(4, 1, 12, 12) }, ids(10, 4) end },
  widedeep = { function() return models.WideDeep(50, 4, 16) end,
    function() return { ids(50, 5, 26), randn(5, 13) }, mf.rand({ 5 }, { dtype = mf.float64 }) end,
    mf.binary_cross_entropy_with_logits },
  ['gpt-mini'] = { function() return models.Transformer(11, 8, 12, 3, 2, true) end,
    function() return { ids(11, 3, 8) }, ids(11, 3, 8) end },
  gpt2 = { function() return models.Transformer(31, 6, 16, 4, 3, true) end,
    function() return { ids(31, 2, 6) }, ids(31, 2, 6) end },
  bert = { function() return models.Transformer(29, 10, 16, 4, 3, false, 4) end,
    function() return { ids(29, 2, 10) }, ids(29, 2, 4) end },
  resnet50 = { function() return models.ResNet50(7, 4, { 2, 1, 1, 1 }) end,
    function() return { randn(3, 3, 32, 32) }, ids(7, 3) end },
}

local optimisers = {
  SGD = function(p) return optim.SGD(p, { lr = 0.05, momentum = 0.9, weight_decay = 1e-3 }) end,
  AdamW = function(p) return optim.AdamW(p, { lr = 0.01 }) end,
}

-- A model and an optimiser, the same each time.
local function build(make, optimiser)
  mf.manual_seed(3)
  local model = make():double()
  return { model = model, opt = optimiser(model:parameters()) }
end

-- Bit for bit, or within a difference.
local function same(a, b, path, within)
  if mf.is_tensor(a) then
    local by = mf.is_tensor(b) and a.shape == b.shape and a:numel() > 0 and (a - b):abs():max():item()
    return assert(by and by <= (within or 0) or mf.equal(a, b), ('%s differs by %s'):format(path, tostring(by)))
  end
  if type(a) ~= 'table' then return assert.equal(a, b, path) end
  for key, value in pairs(a) do same(value, b[key], path .. '.' .. tostring(key), within) end
  for key in pairs(b) do assert(a[key] ~= nil, path .. '.' .. tostring(key) .. ' is there in one alone') end
end

-- What a training leaves: weights, buffers, the optimiser's state and rates.
local function same_sides(a, b, within)
  same(a.model:state_dict(), b.model:state_dict(), 'model', within)
  same(a.opt:state_dict(), b.opt:state_dict(), 'optimiser', within)
end

-- f on side a as it is and compiled on side b, on the same batches and with the same random numbers.
-- `between(side, i)` is called on both after each step.
local function train(a, b, f, batch, n, between, within)
  local plain, compiled = f(a), mf.compile(f(b))
  for i = 1, n do
    local inputs, target = batch()
    local args = { unpack(inputs) }
    args[#args + 1] = target
    local generator = mf.get_rng_state()
    local want = plain(unpack(args))
    local after = mf.get_rng_state()
    mf.set_rng_state(generator)
    local got = compiled(unpack(args))
    same(want, got, 'loss ' .. i, within)
    assert(mf.equal(after, mf.get_rng_state()), 'another number of draws')
    if between then
      between(a, i)
      between(b, i)
    end
  end
  same_sides(a, b, within)
  return compiled
end

local function last(...)
  local n = select('#', ...)
  local list = { ... }
  return { unpack(list, 1, n - 1) }, list[n]
end

local function step_of(loss)
  loss = loss or cross_entropy
  return function(side)
    return function(...)
      local inputs, target = last(...)
      side.opt:zero_grad()
      local l = loss(side.model(unpack(inputs)), target)
      l:backward()
      side.opt:step()
      return l
    end
  end
end

describe('compiled training equals eager training', function()
  for name, w in pairs(workloads) do
    for kind, optimiser in pairs(optimisers) do
      it(name .. ' with ' .. kind, function()
        local a, b = build(w[1], optimiser), build(w[1], optimiser)
        local compiled = train(a, b, step_of(w[3]), w[2], 20)
        assert.equal(1, compiled.misses)
      end)
    end
  end
end)

-- -- What a training loop does besides ------------------------------------------------------------

local function net()
  return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 5))
end
local function small_batch() return { randn(4, 6) }, ids(5, 4) end

local function pair(make, optimiser) return build(make or net, optimiser), build(make or net, optimiser) end

describe('a compiled step', function()
  for kind, optimiser in pairs(optimisers) do
    local function check(what, f, o)
      it(what .. ' (' .. kind .. ')', function()
        o = o or {}
        local a, b = pair(o.make, optimiser)
        if o.before then
          o.before(a)
          o.before(b)
        end
        train(a, b, f, o.batch or small_batch, o.n or 6, o.between, o.within)
        if o.after then o.after(a, b) end
      end)
    end

    check('accumulates gradients of two backward calls', function(side)
      return function(x, y)
        side.opt:zero_grad()
        local first = cross_entropy(side.model(x), y)
        first:backward()
        local second = cross_entropy(side.model(x * 2), y)
        second:backward()
        side.opt:step()
        return first + second
      end
    end)

    check('goes on with gradients that there are', function(side)
      return function(x, y)
        local l = cross_entropy(side.model(x), y)
        l:backward()
        side.opt:step()
        return l
      end
    end, {
      before = function(side)
        for _, p in ipairs(side.model:parameters()) do p.grad = mf.full_like(p, 0.01) end
      end,
      after = function(a, b)
        for k, p in ipairs(a.model:parameters()) do same(p.grad, b.model:parameters()[k].grad, 'gradient ' .. k) end
      end,
    })

    check('fills gradients that there are with zeros', function(side)
      return function(x, y)
        side.opt:zero_grad { set_to_none = false }
        local l = cross_entropy(side.model(x), y)
        l:backward()
        side.opt:step()
        return l
      end
    end, {
      before = function(side)
        for _, p in ipairs(side.model:parameters()) do p.grad = mf.full_like(p, 0.01) end
      end,
      after = function(a, b)
        for k, p in ipairs(a.model:parameters()) do same(p.grad, b.model:parameters()[k].grad, 'gradient ' .. k) end
      end,
    })

    for _, norm in ipairs { 1, 2, math.huge } do
      check('clips by the norm of order ' .. norm, function(side)
        return function(x, y)
          side.opt:zero_grad()
          local l = cross_entropy(side.model(x), y)
          l:backward()
          local total = nn.utils.clip_grad_norm_(side.model:parameters(), 0.05, { norm_type = norm })
          side.opt:step()
          return { l, total }
        end
      end)
    end

    check('goes twice through a graph', function(side)
      return function(x, y)
        side.opt:zero_grad()
        local l = cross_entropy(side.model(x), y)
        l:backward { retain_graph = true }
        l:backward()
        side.opt:step()
        return l
      end
    end)

    check('clips by value', function(side)
      return function(x, y)
        side.opt:zero_grad()
        local l = cross_entropy(side.model(x), y)
        l:backward()
        nn.utils.clip_grad_value_(side.model:parameters(), 0.01)
        side.opt:step()
        return l
      end
    end)

    -- The norm is summed over other blocks, since rows are merged into as many as there were.
    check('clips row-sparse gradients', function(side)
      return function(i, x, y)
        side.opt:zero_grad()
        local l = mf.binary_cross_entropy_with_logits(side.model(i, x), y)
        l:backward()
        nn.utils.clip_grad_norm_(side.model:parameters(), 0.05)
        nn.utils.clip_grad_value_(side.model:parameters(), 0.01)
        side.opt:step()
        return l
      end
    end, { make = workloads.widedeep[1], batch = workloads.widedeep[2], within = 1e-12 })

    check('accumulates row-sparse gradients', function(side)
      return function(i, x, y)
        side.opt:zero_grad()
        local l = mf.binary_cross_entropy_with_logits(side.model(i, x), y)
        l:backward()
        mf.binary_cross_entropy_with_logits(side.model(i + 1, x), y):backward()
        side.opt:step()
        return l
      end
    end, { make = workloads.widedeep[1],
      batch = function() return { ids(49, 5, 26), randn(5, 13) }, mf.rand({ 5 }, { dtype = mf.float64 }) end })

    check('calls hooks of tensors and modules', function(side)
      side.model:get(0).weight:register_hook(function(g) return g * 0.5 end)
      side.model:get(4):register_forward_hook(function(_, y) y:mul_(2) end)
      return function(x, y)
        side.opt:zero_grad()
        x = x * 1
        x:requires_grad_()
        local seen
        x:register_hook(function(g) seen = g:sum() end)
        local l = cross_entropy(side.model(x), y)
        l:backward()
        side.opt:step()
        return { l, seen, x.grad }
      end
    end)

    check('calls functions with gradients of their own', function(side)
      local Cube = mf.Function:extend 'Cube'
      function Cube.forward(ctx, x)
        ctx:save_for_backward(x)
        return x * x * x
      end
      function Cube.backward(ctx, g)
        local x = ctx:saved_tensors()
        return g * 3 * x * x
      end
      return function(x, y)
        side.opt:zero_grad()
        local l = cross_entropy(Cube(side.model(x)), y)
        l:backward()
        side.opt:step()
        return l
      end
    end)

    check('differentiates gradients', function(side)
      return function(x, y)
        side.opt:zero_grad()
        local l = cross_entropy(side.model(x), y)
        local g = mf.grad({ l }, side.model:parameters(), { create_graph = true })
        local penalty = 0
        for _, t in ipairs(g) do penalty = penalty + (t * t):sum() end
        local total = l + penalty * 0.1
        total:backward()
        side.opt:step()
        return { l, penalty }
      end
    end)

    check('takes the gradients of some parameters', function(side)
      return function(x, y)
        side.opt:zero_grad()
        local l = cross_entropy(side.model(x), y)
        local p = side.model:get(4).weight
        p.grad = mf.grad({ l }, { p })[1]
        side.opt:step()
        return l
      end
    end)

    check('updates several times', function(side)
      return function(x, y)
        local first, l
        for _ = 1, 3 do
          side.opt:zero_grad()
          l = cross_entropy(side.model(x), y)
          first = first or l
          l:backward()
          side.opt:step()
        end
        return { first, l }
      end
    end)

    check('is followed by evaluation', step_of(), {
      between = function(side, i)
        side.model:eval()
        local x = mf.full({ 2, 6 }, i, { dtype = mf.float64 })
        side.seen = side.seen or {}
        side.seen[i] = mf.no_grad(function() return side.model(x) end)
        side.model:train()
      end,
      after = function(a, b) same(a.seen, b.seen, 'evaluation') end,
    })

    for name, schedule in pairs {
      StepLR = function(o) return optim.lr_scheduler.StepLR(o, 2, { gamma = 0.5 }) end,
      OneCycleLR = function(o) return optim.lr_scheduler.OneCycleLR(o, 0.1, { total_steps = 12 }) end,
      CosineAnnealingLR = function(o) return optim.lr_scheduler.CosineAnnealingLR(o, 5) end,
      WarmupLR = function(o)
        return optim.lr_scheduler.WarmupLR(o, optim.lr_scheduler.ExponentialLR(o, 0.5), { warmup_iters = 3 })
      end,
    } do
      check('follows ' .. name, step_of(), {
        before = function(side) side.schedule = schedule(side.opt) end,
        between = function(side) side.schedule:step() end,
      })
    end

    it('goes on from a state that was saved (' .. kind .. ')', function()
      local name = os.tmpname()
      local path = name .. '.safetensors'
      local a, b = pair(nil, optimiser)
      train(a, b, step_of(), small_batch, 3)
      mf.save({ model = b.model:state_dict(), optim = b.opt:state_dict().state }, path)
      mf.manual_seed(9)
      local c = { model = net():double() }
      c.opt = optimiser(c.model:parameters())
      local compiled = mf.compile(step_of()(c))
      compiled(randn(4, 6), ids(5, 4)) -- compiled before it is loaded
      c.model:load_state_dict(mf.load(path, { prefix = 'model.' }))
      c.opt:load_state_dict { state = mf.load(path, { prefix = 'optim.' }) }
      os.remove(path)
      os.remove(name)
      local plain = step_of()(a)
      for i = 1, 4 do
        local x, y, generator = randn(4, 6), ids(5, 4), mf.get_rng_state()
        local want = plain(x, y)
        mf.set_rng_state(generator)
        same(want, compiled(x, y), 'loss ' .. i)
      end
      same_sides(a, c)
    end)
  end

  it('follows groups of parameters with options of their own', function()
    local function optimiser(p)
      return optim.SGD { { params = { p[1], p[2] }, lr = 0.1 },
        { params = { unpack(p, 3) }, lr = 0.01, momentum = 0.5 } }
    end
    local a, b = pair(nil, optimiser)
    train(a, b, step_of(), small_batch, 6, function(side, i)
      side.opt.param_groups[1].lr = 0.1 / i
      side.opt.param_groups[2].weight_decay = 0
    end)
  end)

  it('leaves parameters without a gradient alone', function()
    local function make()
      local model = net()
      model:get(0):requires_grad_(false)
      return model
    end
    local a, b = pair(make, function(p) return optim.AdamW(p, { lr = 0.01 }) end)
    train(a, b, step_of(), small_batch, 6)
  end)

  local function sgd(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9 }) end

  it('follows parameters that are frozen and thawed', function()
    local a, b = pair(nil, sgd)
    local compiled = train(a, b, step_of(), small_batch, 6, function(side, i)
      side.model:get(0):requires_grad_(i % 2 == 0)
    end)
    assert.equal(3, compiled.misses) -- with all, without some, with all at two different steps
  end)

  it('follows groups of parameters that are added', function()
    local function optimiser(p) return optim.SGD({ unpack(p, 3) }, { lr = 0.1, momentum = 0.9 }) end
    local a, b = pair(nil, optimiser)
    train(a, b, step_of(), small_batch, 4, function(side, i)
      if i == 2 then side.opt:add_param_group { params = side.model:get(0):parameters(), lr = 0.01 } end
    end)
  end)

  it('follows options that decide what there is to compute', function()
    local a, b = pair(nil, function(p) return optim.SGD(p, { lr = 0.1 }) end)
    train(a, b, step_of(), small_batch, 5, function(side, i)
      if i == 2 then side.opt.param_groups[1].weight_decay = 0.1 end
      if i == 4 then side.opt.param_groups[1].maximize = true end
    end)
  end)

  it('adds to gradients that come and go between its calls', function()
    local a, b = pair(nil, sgd)
    local function backward(side)
      return function(x, y) cross_entropy(side.model(x), y):backward() end
    end
    local plain, compiled = backward(a), mf.compile(backward(b))
    for i = 1, 6 do
      for _, side in ipairs { a, b } do -- none in the first call and the fourth, another one in the sixth
        for _, p in ipairs(side.model:parameters()) do
          if i % 3 == 1 then p.grad = nil
          elseif i % 3 == 2 or i == 6 then p.grad = mf.full_like(p, i) end
        end
      end
      local x, y, generator = randn(4, 6), ids(5, 4), mf.get_rng_state()
      plain(x, y)
      mf.set_rng_state(generator)
      compiled(x, y)
      for k, p in ipairs(a.model:parameters()) do
        local g = b.model:parameters()[k].grad
        if i % 3 == 1 then assert.is_nil(g) else same(p.grad, g, ('call %d, gradient %d'):format(i, k)) end
      end
    end
  end)

  it('puts a gradient that it makes anew where the one before it was', function()
    local function side()
      local w = mf.ones({ 3 }, { dtype = mf.float64 }):requires_grad_()
      w.grad = mf.full({ 3 }, 2, { dtype = mf.float64 })
      return w, function(x) (w * w * x):sum():backward { create_graph = true } end
    end
    local w, plain = side()
    local v, f = side()
    local grad, compiled = v.grad, mf.compile(f)
    for i = 1, 3 do
      plain(mf.full({ 3 }, i, { dtype = mf.float64 }))
      compiled(mf.full({ 3 }, i, { dtype = mf.float64 }))
      same(w.grad:detach(), v.grad, 'gradient')
    end
    assert.equal(grad, v.grad)
  end)

  it('refuses to add to row-sparse gradients that there are, which would grow', function()
    local table_ = nn.Embedding(5, 2, { sparse = true })
    local function f(x) table_(x):sum():backward() end
    f(mf.tensor({ 1, 2 }, { dtype = mf.int64 }))
    local grad = table_.weight.grad
    local ok, text = pcall(mf.compile(f), mf.tensor({ 1, 2 }, { dtype = mf.int64 }))
    assert(not ok and text:find('row-sparse gradient', 1, true), text)
    assert.equal(grad, table_.weight.grad)
  end)

  it('takes a step back that failed', function()
    local a, b = pair(nil, function(p) return optim.AdamW(p, { lr = 0.1 }) end)
    local compiled = mf.compile(step_of()(b))
    local plain = step_of()(a)
    for i = 1, 3 do
      local x, y, generator = randn(4, 6), ids(5, 4), mf.get_rng_state()
      plain(x, y)
      mf.set_rng_state(generator)
      compiled(x, y)
      local ok, text = pcall(compiled, x, ids(5, 4) + 5)
      assert(not ok and text:find('out of range', 1, true), text)
      assert.equal(i, b.opt.state[b.opt.param_groups[1].params[1]].step)
    end
    for name, t in pairs(a.model:state_dict()) do
      if not name:find 'running' and not name:find 'num_batches' then same(t, b.model:state_dict()[name], name) end
    end
  end)

  it('gives gradients back when the function fails', function()
    local w = mf.ones(3):requires_grad_()
    w.grad = mf.full({ 3 }, 2)
    local grad = w.grad
    local f = mf.compile(function(x)
      w.grad = nil
      (w * x):sum():backward()
      error 'boom'
    end)
    assert.is_false(pcall(f, mf.ones(3)))
    assert.equal(grad, w.grad)
    assert.same({ 2, 2, 2 }, grad:tolist())
  end)
end)
