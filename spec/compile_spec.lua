-- mf.compile: what a compiled step does equals, bit for bit, what the function does by itself.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

-- Passes whose essays say that they may change the last bits.
local exact = { passes = { layout = false, fuse_act = false } }

-- Two equal models and optimisers; the second's steps are compiled.
local function pair(build, optimiser, step)
  local sides = {}
  for k = 1, 2 do
    mf.manual_seed(3)
    local model = build()
    local opt = optimiser(model:parameters())
    local run = step(model, opt)
    sides[k] = { model = model, opt = opt, run = k == 2 and mf.compile(run, exact) or run }
  end
  return sides[1], sides[2]
end

local function train(model, opt)
  return function(x, y)
    opt:zero_grad()
    local loss = mf.cross_entropy(model(x), y)
    loss:backward()
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    opt:step()
    return loss
  end
end

local function same_states(a, b)
  for name, t in pairs(a:state_dict()) do
    assert(mf.equal(t, b:state_dict()[name]), name)
  end
end

local function cnn()
  return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
    nn.Flatten(), nn.Linear(4 * 7 * 7, 10))
end

local function batch() return mf.randn(6, 1, 16, 16), mf.randint(0, 10, { 6 }) end

-- Both sides on the same batches, drawing the same numbers.
local function equal_losses(a, b, n)
  for i = 1, n do
    local x, y = batch()
    local state = mf.get_rng_state()
    local want = a.run(x, y):item()
    local after = mf.get_rng_state():tolist()
    mf.set_rng_state(state)
    assert.equal(want, b.run(x, y):item(), 'loss ' .. i)
    assert.same(after, mf.get_rng_state():tolist())
  end
  same_states(a.model, b.model)
end

describe('mf.compile', function()
  for name, optimiser in pairs {
    SGD = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, dampening = 0.1, weight_decay = 1e-4 }) end,
    nesterov = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, nesterov = true }) end,
    Adam = function(p) return optim.Adam(p, { lr = 0.01, amsgrad = true }) end,
    AdamW = function(p) return optim.AdamW(p, { lr = 0.01 }) end,
    RMSprop = function(p) return optim.RMSprop(p, { lr = 0.01, momentum = 0.5, centered = true }) end,
    Adagrad = function(p) return optim.Adagrad(p, { lr = 0.05, lr_decay = 0.1 }) end,
    Adadelta = function(p) return optim.Adadelta(p) end,
    Adamax = function(p) return optim.Adamax(p, { lr = 0.01 }) end,
  } do
    it('trains as the function does: ' .. name, function()
      local a, b = pair(cnn, optimiser, train)
      equal_losses(a, b, 5)
      assert.equal(1, b.run.misses)
    end)
  end

  it('follows schedulers', function()
    local a, b = pair(cnn, function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9 }) end, train)
    local schedules = {}
    for _, side in ipairs { a, b } do
      schedules[#schedules + 1] = optim.lr_scheduler.OneCycleLR(side.opt, 0.1, 20)
    end
    for _ = 1, 4 do
      equal_losses(a, b, 1)
      for _, s in ipairs(schedules) do s:step() end
    end
  end)

  it('goes on with an optimiser that has taken steps', function()
    local a, b = pair(cnn, function(p) return optim.AdamW(p, { lr = 0.01 }) end, train)
    local compiled = b.run
    b.run = compiled.f
    equal_losses(a, b, 2)
    b.run = compiled
    equal_losses(a, b, 2)
    b.run = compiled.f
    equal_losses(a, b, 2)
  end)

  it('tells training from evaluation', function()
    mf.manual_seed(1)
    local model = cnn()
    local run = mf.compile(function(x) return mf.no_grad(function() return model(x) end) end)
    local x = batch()
    model:eval()
    local want = model(x)
    assert(mf.equal(want, run(x)))
    model:train()
    assert(not mf.equal(want, run(x)))
    model:eval()
    run(x)
    assert.equal(2, run.misses)
  end)

  it('sees new contents of captured tensors', function()
    local w = mf.ones(3)
    local f = mf.compile(function(x) return x * w end)
    assert.same({ 1, 2, 3 }, f(mf.tensor { 1, 2, 3 }):tolist())
    w:fill_(2)
    assert.same({ 2, 4, 6 }, f(mf.tensor { 1, 2, 3 }):tolist())
  end)

  it('writes captured tensors, also through views', function()
    local w, v = mf.zeros(2, 3), mf.zeros(3)
    local f = mf.compile(function(x)
      w[1]:add_(x)
      w:t()[0]:fill_(7)
      v:copy_(w[1])
      w:mul_(2)
      return w:sum()
    end)
    assert.equal(2 * (7 + 7 + 2 + 3), f(mf.tensor { 1, 2, 3 }):item())
    assert.same({ { 14, 0, 0 }, { 14, 4, 6 } }, w:tolist())
    assert.same({ 7, 2, 3 }, v:tolist())
    f(mf.tensor { 1, 1, 1 })
    assert.same({ { 14, 0, 0 }, { 14, 10, 14 } }, w:tolist())
  end)

  it('exchanges captured tensors', function()
    local a, b = mf.tensor { 1, 2 }, mf.tensor { 3, 4 }
    local f = mf.compile(function()
      local old = a:clone()
      a:copy_(b)
      b:copy_(old)
    end)
    f()
    assert.same({ 3, 4 }, a:tolist())
    assert.same({ 1, 2 }, b:tolist())
    f()
    assert.same({ 1, 2 }, a:tolist())
  end)

  it('writes its arguments, also through views', function()
    local f = mf.compile(function(x, y)
      x[1]:add_(y)
      y:mul_(10)
      return x:sum() + y:sum()
    end)
    for _ = 1, 2 do
      local whole = mf.ones(3, 4)
      local x, y = whole:narrow(1, 1, 2), mf.tensor { 1, 2 }
      local version = x._version
      assert.equal(6 + 3 + 30, f(x, y):item())
      assert.same({ { 1, 1, 1, 1 }, { 1, 2, 3, 1 }, { 1, 1, 1, 1 } }, whole:tolist())
      assert.same({ 10, 20 }, y:tolist())
      assert(x._version > version)
    end
    assert.equal(1, f.misses)
  end)

  it('leaves what is written through a part where it lies', function()
    local function step(x)
      local part = x:narrow(2, 0, 2)
      part:mul_(2)
      return part:transpose(0, 1):exp()
    end
    local a, b = step(mf.ones(2, 2, 3)), mf.compile(step)(mf.ones(2, 2, 3))
    assert.same(a:tolist(), b:tolist())
    assert.same(a:stride(), b:stride())
  end)

  it('refuses arguments that share memory with what it writes', function()
    local w = mf.ones(2)
    local f = mf.compile(function(x)
      w:add_(1)
      return x * 2
    end)
    local g = mf.compile(function(x, y)
      x:add_(y)
      return w + x
    end)
    local function fails(h, ...)
      local ok, text = pcall(h, ...)
      assert(not ok and text:find('shares memory', 1, true), text)
    end
    fails(f, w)
    fails(f, w[{ { 0, 1 } }])
    local x = mf.ones(2)
    fails(g, x, x)
    fails(g, w, x)
    assert.same({ 1, 1, 1, 1 }, mf.cat { w, x }:tolist())
    g(x, w)
    assert.same({ 2, 2 }, x:tolist())
    f(x)
    assert.same({ 2, 2 }, w:tolist())
  end)

  it('refuses arguments that require a gradient', function()
    local f = mf.compile(function(x) return x * 2 end)
    local x = mf.ones(2):requires_grad_()
    local ok, text = pcall(f, x)
    assert(not ok and text:find('requires a gradient', 1, true), text)
    assert.same({ 2, 2 }, f(x:detach()):tolist())
    assert.same({ 2, 2 }, mf.no_grad(function() return f(x) end):tolist())
  end)

  it('returns tables, numbers and captured tensors', function()
    local w = mf.ones(2)
    local f = mf.compile(function(x, n) return { sum = x:sum(), list = { x + n, 'text' } }, n, w, nil end)
    local r, n, same = f(mf.tensor { 1, 2 }, 5)
    assert.equal(3, r.sum:item())
    assert.same({ 6, 7 }, r.list[1]:tolist())
    assert.equal('text', r.list[2])
    assert.equal(5, n)
    assert.equal(w, same)
    assert.equal(4, select('#', f(mf.tensor { 1, 2 }, 5)))
  end)

  it('returns tensors of their own', function()
    local f = mf.compile(function(x) return x * 2, x:t() end)
    local x = mf.tensor { { 1, 2 }, { 3, 4 } }
    local a, view = f(x)
    local b = f(x:add(1))
    assert.same({ { 2, 4 }, { 6, 8 } }, a:tolist())
    assert.same({ { 4, 6 }, { 8, 10 } }, b:tolist())
    x:fill_(0)
    assert.same({ { 1, 3 }, { 2, 4 } }, view:tolist())
  end)

  it('compiles anew for other forms, a bounded number of times', function()
    local f = mf.compile(function(x, n) return x * n end, { cache_size = 2 })
    for _, n in ipairs { 2, 3, 2, 3 } do assert.same({ n }, f(mf.ones(1), n):tolist()) end
    assert.equal(2, f.misses)
    f(mf.ones(2), 2)
    f(mf.ones(1), 3)
    assert.equal(3, f.misses)
    f(mf.ones(1), 2)
    assert.equal(4, f.misses)
    f(mf.ones(1, { dtype = mf.float64 }), 2)
    f(mf.ones(2, 2):t(), 2)
    assert.equal(6, f.misses)
  end)

  it('reads scalars anew', function()
    local s, calls = mf.scalar(2), 0
    local d = mf.scalar(function() calls = calls + 1 return s.value * 10 end)
    local f = mf.compile(function(x) return x * s + d, mf.clamp(x, { min = d }) end)
    local a, b = f(mf.ones(1))
    assert.same({ { 22 }, { 20 } }, { a:tolist(), b:tolist() })
    s.value = 3
    a, b = f(mf.ones(1))
    assert.same({ { 33 }, { 30 } }, { a:tolist(), b:tolist() })
    assert.equal(3, calls)
    assert.equal(1, f.misses)
    assert.same({ 3 }, (mf.ones(1) * s):tolist())
    local t = mf.scalar(1)
    local g = mf.compile(function(x, k) return x * t, k * t end)
    local k = mf.ones({ 1 }, { dtype = mf.int64 })
    for _, value in ipairs { 1, 0.5 } do
      t.value = value
      local c, e = g(mf.ones(1), k)
      assert.same({ { value }, { value } }, { c:tolist(), e:tolist() })
      assert.equal((k * t).dtype, e.dtype)
    end
    assert.has_error(function() s.value = 'x' end)
    assert.has_error(function() d.value = 1 end)
    assert.has_error(function() mf.scalar {} end)
  end)

  it('keeps nothing of a scalar whose function fails', function()
    local ok = pcall(mf.scalar, function() error 'no value' end)
    local later = setmetatable({}, { __mode = 'v' })
    later[1] = mf.scalar(1)
    assert(not ok and later[1].value == 1) -- a read that no function makes
    collectgarbage()
    collectgarbage()
    assert.is_nil(later[1])
  end)

  it('refuses to read what has no value yet, and recovers', function()
    local w = mf.ones(2)
    local function fails(text, f)
      local ok, message = pcall(mf.compile(f), mf.ones(2))
      assert(not ok)
      assert(message:find(text, 1, true), message)
    end
    fails('item: the tensor belongs to a step', function(x) return x:sum():item() end)
    fails('belongs to a step', function(x) return x:tolist() end)
    fails('depends on data', function(x) return x:nonzero() end)
    fails('depends on data', function(x) return x[x:gt(0)] end)
    fails('depends on data', function() return w:nonzero() end)
    fails('boom', function() error 'boom' end)
    fails('belongs to a step', function() w:mul_(2) return w:sum():item() end)
    fails('item: the tensor belongs to a step', function() w:mul_(2) return w[0]:item() end)
    assert.same({ 1, 1 }, w:tolist())
    local kept
    mf.compile(function(x) kept = x * 2 return x end)(mf.ones(2))
    local ok, message = pcall(function() return kept + 1 end)
    assert(not ok and message:find('belongs to a step', 1, true), message)
    assert.equal(3, mf.compile(function(x) return x + w end)(mf.full({ 2 }, 2))[0]:item())
  end)

  it('refuses to carry a gradient into the next call', function()
    local w, state = mf.ones(2):requires_grad_(), mf.zeros(2)
    local function f(x)
      state:add_(w * x)
      local loss = state:sum()
      loss:backward()
      return loss
    end
    local ok, text = pcall(mf.compile(f), mf.ones(2))
    assert(not ok and text:find('no gradient leaves a step', 1, true), text)
    assert(text:find 'compile_spec.lua:%d+: ', text)
    assert.is_false(state.requires_grad)
    assert.is_nil(w.grad)
    assert.same({ 0, 0 }, state:tolist())
    local g = mf.compile(function(x)
      local next_state = state + w * x
      next_state:sum():backward()
      state:copy_(next_state:detach())
      return w.grad
    end)
    for i = 1, 2 do
      assert.same({ 2, 2 }, g(mf.full({ 2 }, 2)):tolist())
      assert.same({ 2 * i, 2 * i }, state:tolist())
    end
  end)

  it('refuses to give a captured tensor other memory', function()
    local c = mf.ones(2)
    local ok, text = pcall(mf.compile(function(x) c.data = x * 2 end), mf.ones(2))
    assert(not ok and text:find('x:copy_(data)', 1, true), text)
    assert.same({ 1, 1 }, c:tolist())
    assert.same({ 3, 3 }, mf.compile(function(x)
      local y = x * 1
      y.data = x * 2
      return y + 1
    end)(mf.ones(2)):tolist())
  end)

  it('refuses captured tensors that got other memory', function()
    local w = mf.ones(2)
    local f = mf.compile(function(x) return x + w end)
    f(mf.ones(2))
    w.data = mf.zeros(2)
    local ok, message = pcall(f, mf.ones(2))
    assert(not ok and message:find('.data', 1, true), message)
    local v = mf.ones(2)
    local g = mf.compile(function(x) return x + v end)
    g(mf.ones(2))
    v:free()
    ok, message = pcall(g, mf.ones(2))
    assert(not ok and message:find('freed', 1, true), message)
  end)

  it('leaves gradients as it found them', function()
    local w = nn.Parameter(mf.ones(2))
    local f = mf.compile(function(x)
      local loss = (x * w):sum()
      loss:backward()
      return loss
    end)
    f(mf.ones(2))
    assert.is_nil(w.grad)
    w.grad = mf.zeros(2)
    local g = mf.compile(function(x)
      (x * w):sum():backward()
    end)
    g(mf.ones(2))
    g(mf.ones(2))
    assert.same({ 2, 2 }, w.grad:tolist())
  end)
end)
