-- Backward passes: accumulation, gradients of gradients, what is kept, what is refused.
local mf = require 'moonflow'

local function leaf(t) return mf.tensor(t, { requires_grad = true }) end
local function refused(f, text)
  local ok, err = pcall(f)
  assert.is_false(ok)
  assert.truthy(tostring(err):find(text, 1, true), err)
end

describe('backward', function()
  it('adds to the gradients there are, in place', function()
    local x = leaf { 1, 2 }
    local function loss() return (x * x):sum() end
    loss():backward()
    local g = x.grad
    assert.is_true(rawequal(g, x.grad))
    loss():backward()
    assert.is_true(rawequal(g, x.grad))
    assert.are.same({ 4, 8 }, g:tolist())
    x.grad = nil
    assert.is_nil(x.grad)
    x.grad = mf.ones(2)
    loss():backward()
    assert.are.same({ 3, 5 }, x.grad:tolist())
  end)

  it('sums a broadcast gradient to its input and casts it', function()
    local x, y = leaf { 1, 2, 3 }, mf.tensor({ 2 }, { requires_grad = true, dtype = mf.float64 })
    local z = (x:reshape(3, 1) * mf.ones(1, 4) * y):sum()
    z:backward()
    assert.are.same({ 8, 8, 8 }, x.grad:tolist())
    assert.are.same({ 24 }, y.grad:tolist())
    assert.are.equal(mf.float64, y.grad.dtype)
  end)

  it('takes a gradient for more than one element', function()
    local x = leaf { 1, 2 }
    local y = x * x
    refused(function() y:backward() end, 'a tensor of shape (2,) needs a gradient of that shape')
    refused(function() y:backward(mf.ones(3)) end, 'has not the shape (2,)')
    y:backward(mf.tensor { 1, 10 })
    assert.are.same({ 2, 40 }, x.grad:tolist())
  end)

  it('frees the graph unless it is told to retain it', function()
    local x = leaf { 2 }
    local y = x:exp()
    y:backward { retain_graph = true }
    y:backward()
    refused(function() y:backward() end, 'the graph was freed by an earlier backward pass at exp')
    local z = x + 1 -- keeps nothing, so there is nothing to free
    z:backward()
    z:backward()
  end)

  it('accumulates into the inputs given alone', function()
    local x, y = leaf { 2 }, leaf { 3 };
    (x * y):backward { inputs = { x } }
    assert.are.same({ 3 }, x.grad:tolist())
    assert.is_nil(y.grad)
  end)

  it('refuses what has no graph, and unknown options', function()
    refused(function() mf.ones(1):backward() end, 'does not require a gradient')
    refused(function() leaf { 1 }:backward { retain = true } end, "there is no option 'retain'")
    refused(function() leaf { 1 }:backward { retain_graph = 1 } end, 'retain_graph must be true or false')
    refused(function() leaf { 1 }:backward(1) end, 'gradient must be a tensor, is the number 1')
  end)

  it('runs inside coroutines', function()
    local co = coroutine.wrap(function()
      local x = leaf { 3 }
      x:register_hook(function(g)
        coroutine.wrap(function() return mf.ones(1) + 1 end)()
        return g * 2
      end)
      coroutine.yield();
      (x * x):backward()
      return x.grad:item()
    end)
    co()
    assert.are.equal(12, co())
  end)

  it('walks and frees a million ops', function()
    local x = leaf { 1 }
    local y = x
    for _ = 1, 1000000 do y = y + 1 end
    y:backward()
    assert.are.same({ 1 }, x.grad:tolist())
    y = nil -- luacheck: ignore
    collectgarbage()
    collectgarbage()
  end)

  it('takes a diamond in one visit a node', function()
    local x, count = leaf { 1 }, 0
    local y = x * 1
    y:register_hook(function() count = count + 1 end)
    local z = y
    for _ = 1, 30 do z = z + z * 0.5 + y * 0 end
    z:backward()
    assert.are.equal(1, count)
    assert.is_true(math.abs(x.grad:item() / 1.5 ^ 30 - 1) < 1e-5)
  end)
end)

describe('mf.grad', function()
  it('returns gradients and leaves .grad alone', function()
    local x, y = leaf { 2 }, leaf { 5 }
    local mid = x * y
    local g = mf.grad(mid * mid, { x, mid })
    assert.are.same({ 100 }, g[1]:tolist())
    assert.are.same({ 20 }, g[2]:tolist())
    assert.is_nil(x.grad)
    assert.are.same({ 7 }, mf.grad({ x * 3, x * 4 }, x)[1]:tolist())
    assert.are.same({ 6 }, mf.grad(x * 3, x, { grad_outputs = mf.tensor { 2 } })[1]:tolist())
  end)

  it('refuses inputs that were not used, unless that is allowed', function()
    local x, y = leaf { 2 }, leaf { 5 }
    refused(function() mf.grad(x * 2, { x, y }) end, 'grad: inputs[2] was not used')
    local g = mf.grad(x * 2, { x, y }, { allow_unused = true })
    assert.is_nil(g[2])
    refused(function() mf.grad(x * 2, { mf.ones(1) }) end, 'inputs[1] does not require a gradient')
    refused(function() mf.grad(x * 2, {}) end, 'there are no inputs')
  end)

  it('gives derivatives of any order', function()
    local x = mf.tensor({ 0.7 }, { dtype = mf.float64, requires_grad = true })
    local d = x:sin():mul(x):exp() -- f = exp(x sin x)
    local values = { d:item() }
    for k = 2, 4 do
      d = mf.grad(d, x, { create_graph = true })[1]
      values[k] = d:item()
    end
    local s, c, v = math.sin(0.7), math.cos(0.7), 0.7
    local u1, u2, u3 = s + v * c, 2 * c - v * s, -3 * s - v * c
    local f = math.exp(v * s)
    local want = { f, f * u1, f * (u1 ^ 2 + u2), f * (u1 ^ 3 + 3 * u1 * u2 + u3) }
    for k = 1, 4 do assert.is_true(math.abs(values[k] - want[k]) < 1e-12, k) end
  end)

  it('of a gradient that accumulated', function()
    local x = leaf { 3 };
    (x * x * x):backward { create_graph = true }
    assert.are.same({ 27 }, x.grad:tolist())
    assert.are.same({ 18 }, mf.grad(x.grad, x)[1]:tolist())
  end)
end)

describe('modes', function()
  it('are restored, also on errors', function()
    local x = leaf { 1 }
    assert.is_false(mf.no_grad(function() return (x * 2).requires_grad end))
    assert.is_true(mf.no_grad(function() return mf.enable_grad(function() return x * 2 end) end).requires_grad)
    refused(function() mf.no_grad(error, 'out') end, 'out')
    assert.is_true(mf.is_grad_enabled())
    assert.are.same({ 1, 2, 3 }, { mf.no_grad(function(...) return ... end, 1, 2, 3) })
    refused(function() mf.no_grad(5) end, 'no_grad: the first argument must be a function')
  end)

  it('gives each leaf a gradient of its own', function()
    for _, create_graph in ipairs { false, true } do
      local a, b, g = leaf { 1, 1 }, leaf { 1, 1 }, mf.tensor { 1, 2 };
      (a + b):backward(g, { create_graph = create_graph })
      mf.no_grad(function() a.grad:mul_(10) end)
      assert.are.same({ 10, 20 }, a.grad:tolist())
      assert.are.same({ 1, 2 }, b.grad:tolist())
      assert.are.same({ 1, 2 }, g:tolist())
    end
  end)

  it('keeps its inputs while hooks change the caller\'s table', function()
    local x = leaf { 1, 2 }
    local y, inputs = x * 2, { x }
    y:register_hook(function()
      inputs[1], x = nil, nil
      collectgarbage()
      collectgarbage()
    end)
    y:sum():backward { inputs = inputs }
    assert.is_nil(x)
  end)

  it('anomaly names the op and the line of its forward call', function()
    mf.detect_anomaly(function()
      local x = leaf { 0 }
      local y = x:sqrt() -- this line
      local line = debug.getinfo(1, 'l').currentline - 1
      local loss = (y * 0):sum()
      local ok, err = pcall(loss.backward, loss)
      assert.is_false(ok)
      local text = 'the gradient of x of sqrt (forward at spec/backward_spec.lua:%d) has a NaN'
      assert.truthy(err:find(text:format(line), 1, true), err)
      local z = x:exp()
      line = debug.getinfo(1, 'l').currentline - 1
      z:add_(1)
      ok, err = pcall(z.backward, z)
      assert.is_false(ok)
      assert.truthy(err:find('exp (forward at spec/backward_spec.lua:' .. line .. ')', 1, true), err)
      assert.truthy(err:find('changed in place since by add_', 1, true), err)
    end)
    assert.is_false(mf.set_detect_anomaly(false))
  end)
end)
