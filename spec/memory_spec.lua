-- Memory: scopes, freeing, limits, what the collector is told, and that errors lose nothing.
local mf = require 'moonflow'

local MB = 2 ^ 20
local function megabytes(n) return mf.empty(n * MB / 4) end
local function collect()
  for _ = 1, 3 do collectgarbage() end
end
local function refused(text, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert.truthy(tostring(err):find(text, 1, true), err)
end

describe('mf.scope', function()
  it('returns what its function returns and releases the rest', function()
    local other
    local a, n, list = mf.scope(function(k)
      local x = mf.ones(2)
      other = x * k
      return x + 1, k, { inner = { x * 3 } }
    end, 5)
    assert.are.same({ 2, 2 }, a:tolist())
    assert.are.equal(5, n)
    assert.are.same({ 3, 3 }, list.inner[1]:tolist())
    refused('a tensor that was released at the end of its scope', function() return other + 1 end)
    assert.are.equal('tensor(released at the end of its scope)', tostring(other))
  end)

  it('nests, and hands results on to the scope around', function()
    local middle
    local a = mf.scope(function()
      middle = mf.scope(function() return mf.ones(2) end)
      return middle * 2
    end)
    assert.are.same({ 2, 2 }, a:tolist())
    refused('released', function() return middle + 1 end)
  end)

  it('keeps what the tape needs', function()
    local x = mf.tensor({ 2 }, { requires_grad = true })
    local y = mf.scope(function() return (x * x):exp() end)
    y:backward()
    assert.is_true(math.abs(x.grad:item() - 4 * math.exp(4)) < 1e-3)
  end)

  it('ends also on errors', function()
    local kept
    refused('out', mf.scope, function()
      kept = mf.ones(1)
      error 'out'
    end)
    refused('released', function() return kept + 1 end)
    assert.are.same({ 1 }, mf.ones(1):tolist())
    refused('scope: the first argument must be a function', mf.scope, 5)
  end)
end)

describe('free', function()
  it('gives memory back at once, for all views', function()
    collect()
    local before = mf.memory_stats().in_use
    local x = megabytes(8)
    local v = x:view(2, -1)
    x:free()
    x:free()
    assert.are.equal(before, mf.memory_stats().in_use)
    refused('mul: a was freed', function() return v * 2 end)
    refused('select: x was freed', function() return v[0] end)
    assert.are.equal('tensor(freed)', tostring(x))
  end)

  it('of what the tape saved is an error of backward', function()
    local x = mf.tensor({ 2 }, { requires_grad = true })
    local y = mf.tensor { 3 }
    local z = x * y
    y:free()
    refused('a tensor that mul needs for its gradient was freed', z.backward, z)
  end)
end)

describe('memory', function()
  after_each(function()
    mf.set_memory_limit(0)
    mf.empty_cache()
  end)

  it('is counted', function()
    collect()
    local s = mf.memory_stats()
    local x = megabytes(4)
    local t = mf.memory_stats()
    assert.are.equal(4 * MB, t.in_use - s.in_use)
    assert.are.equal(1, t.tensors - s.tensors)
    assert.is_true(t.peak >= t.in_use and t.allocations > s.allocations)
    x:free()
    assert.is_true(mf.memory_stats().cached >= 4 * MB)
    mf.empty_cache()
    assert.are.equal(0, mf.memory_stats().cached)
  end)

  it('held by garbage is found when the limit is reached', function()
    collect()
    mf.set_memory_limit(mf.memory_stats().in_use + 50 * MB)
    for _ = 1, 40 do megabytes(20) end
  end)

  it('that is not there is an error with figures, after which all goes on', function()
    collect()
    local limit = mf.memory_stats().in_use + 50 * MB
    mf.set_memory_limit(limit)
    local keep = {}
    refused(('out of memory on cpu: requested %d bytes, in use %d, cached 0, limit %d'):format(20 * MB,
      limit - 10 * MB, limit), function()
        for i = 1, 5 do keep[i] = megabytes(20) end
      end)
    assert.are.equal(2, #keep)
    keep = nil -- luacheck: ignore
    assert.are.same({ 20 * MB / 4 }, { unpack(megabytes(20).shape) })
    refused('set_memory_limit: bytes must not be negative', mf.set_memory_limit, -1)
  end)

  it('of garbage stays bounded, also beside a large Lua heap', function()
    local heap = {}
    for i = 1, 1500000 do heap[i] = { i } end
    collect()
    mf.reset_peak_memory()
    local before, room = mf.memory_stats().in_use, collectgarbage 'count' * 1024
    for _ = 1, 2000 do megabytes(1) end
    assert.is_true(mf.memory_stats().peak - before < 2 * math.max(64 * MB, room) + 16 * MB)
    assert.are.equal(1500000, #heap)
  end)

  it('is not lost by errors', function()
    local x, y = mf.ones(2, 3), mf.ones(4):requires_grad_()
    local calls = {
      function() return x + y end, function() return x:add(y, { alhpa = 1 }) end, function() return x:mul('a') end,
      function() return mf.cat({ x, 5 }) end, function() return mf.cat({ x, y }) end, function() return x:mul_(y) end,
      function() return y:mul_(2) end, function() return x:view(5) end, function() return (y * y):backward() end,
      function() return mf.tensor { { 1 }, { 2, 3 } } end, function() return mf.grad(y * y, y) end,
      function() return mf.grad((y * y):sum(), { y, mf.ones(1) }) end, function() return x[5] end,
      function() x[0] = mf.ones(7) end, function() return x:sum(9) end, function() return x:matmul(y) end,
      function() return mf.no_grad(function() return x * 2 + y end) end,
      function()
        y:register_hook(function(g) return g:view(9) end)
        return (y * y):sum():backward()
      end,
    }
    local function all()
      for i, call in ipairs(calls) do assert.is_false((pcall(call)), 'call ' .. i) end
      y = mf.ones(4):requires_grad_()
      collect()
    end
    all()
    local before = mf.memory_stats()
    for _ = 1, 5 do all() end
    local after = mf.memory_stats()
    assert.are.equal(before.tensors, after.tensors)
    assert.are.equal(before.in_use, after.in_use)
  end)
end)

describe('the memory of gradients', function()
  local optim = require 'moonflow.optim'
  local utils = require 'moonflow.nn_utils'

  it('is free once they are dropped, before any collection', function()
    local w = mf.zeros(MB):requires_grad_()
    local opt = optim.SGD({ w }, { lr = 1, momentum = 0.5 })
    local function step()
      w:backward(mf.ones(MB))
      utils.clip_grad_norm_({ w }, 1e9)
      utils.clip_grad_value_({ w }, 2)
      opt:step()
      opt:zero_grad()
    end
    step()
    collect()
    local before = mf.memory_stats().in_use
    collectgarbage 'stop'
    mf.scope(step)
    collectgarbage 'restart'
    assert.are.equal(before, mf.memory_stats().in_use)
    assert.are.equal(-2.5, w[0]:item())
  end)

  it('stays while somebody holds them', function()
    local w = mf.zeros(4):requires_grad_()
    w:backward(mf.ones(4))
    local held = w.grad
    optim.SGD({ w }, { lr = 1 }):step()
    w.grad = nil
    assert.are.same({ 1, 1, 1, 1 }, held:tolist())
  end)
end)
