-- Hooks on tensors, and gradients that are kept.
local mf = require 'moonflow'

local function leaf(t) return mf.tensor(t, { requires_grad = true }) end
local function collect()
  for _ = 1, 3 do collectgarbage() end
end

describe('hooks', function()
  it('see the whole gradient once and may replace it', function()
    local x, seen = leaf { 1, 2 }, {}
    x:register_hook(function(g)
      seen[#seen + 1] = g:tolist()
      return g * 10
    end);
    (x * x + x * 3):sum():backward()
    assert.are.same({ { 5, 7 } }, seen)
    assert.are.same({ 50, 70 }, x.grad:tolist())
  end)

  it('run in order, each with what the one before returned', function()
    local x = leaf { 1 }
    x:register_hook(function(g) return g + 1 end)
    x:register_hook(function() end)
    x:register_hook(function(g) return g * 2 end);
    (x * 3):backward()
    assert.are.same({ 8 }, x.grad:tolist())
  end)

  it('can be removed', function()
    local x = leaf { 1 }
    local h = x:register_hook(function() error 'not called' end)
    h:remove()
    h:remove();
    (x * 3):backward()
    assert.are.same({ 3 }, x.grad:tolist())
  end)

  it('on a tensor that was dropped still run', function()
    local x, ran = leaf { 1, 2 }, false
    local function build()
      local y = x * 3
      y:register_hook(function(g)
        ran = true
        return g * 2
      end)
      return ((y + 1) * 2):sum()
    end
    local loss = build()
    collect()
    loss:backward()
    assert.is_true(ran)
    assert.are.same({ 12, 12 }, x.grad:tolist())
  end)

  it('and their tensors are collected together', function()
    local weak = setmetatable({}, { __mode = 'v' })
    local function build()
      local x = leaf { 1 }
      x:register_hook(function() return x end)
      local y = x * 2
      y:register_hook(function() return y, x end)
      local z = y + x
      weak[1], weak[2], weak[3] = x, y, z
    end
    build()
    collect()
    assert.is_nil(next(weak))
  end)

  it('before an in-place write see the gradient of what was', function()
    local x, old, new = leaf { 2 }, nil, nil
    local y = x * 1
    y:register_hook(function(g) old = g:item() end)
    y:mul_(5)
    y:register_hook(function(g) new = g:item() end)
    y:backward()
    assert.are.equal(5, old)
    assert.are.equal(1, new)
  end)

  it('reach a base that is written through a view', function()
    local w, ran = leaf { 5 }, false
    w:register_hook(function() ran = true end)
    local base = mf.zeros(3)
    local view = base:narrow(0, 1, 1)
    view:copy_(w)
    local loss = base:sum()
    base, view = nil, nil -- luacheck: ignore
    collect()
    loss:backward()
    assert.is_true(ran)
    assert.are.same({ 1 }, w.grad:tolist())
  end)

  it('reach what subscripts take, and where they are assigned', function()
    local places = mf.tensor({ 0, 2 }, { dtype = mf.int64 })
    for _, take in ipairs { function(y) return y[1] end, function(y) return y[{ { 0, 2 } }] end,
      function(y) return y[places] end, function(y) return y[y:gt(2)] end } do
      local y, ran = leaf { 1, 2, 3 } * 1, 0
      y:register_hook(function() ran = ran + 1 end)
      local part = take(y)
      y = nil -- luacheck: ignore
      collect()
      part:sum():backward()
      assert.are.equal(1, ran)
    end
    for _, put in ipairs { function(z, y) z[{ { 0, 2 } }] = y end, function(z, y) z[places] = y end,
      function(z, y) z:index_put_({ places }, y, { accumulate = true }) end } do
      local x, z, ran = leaf { 1, 2 }, mf.zeros(3), 0
      x:register_hook(function() ran = ran + 1 end)
      put(z, x * 1)
      collect()
      z:sum():backward()
      assert.are.equal(1, ran)
    end
  end)

  it('end with a tensor that C kept, also after the coroutine that made it', function()
    for _ = 1, 20 do
      do
        local w, base = leaf { 1, 1 }, mf.zeros(4) * 1
        w:register_hook(print)
        local view = base[{ { 0, 2 } }]
        view:add_(w) -- the base is pinned
      end
      coroutine.wrap(function() mf.ones(1) end)()
      collect()
      for _ = 1, 50 do coroutine.create(print) end
    end
  end)

  it('run again in gradients of gradients', function()
    local x, count = leaf { 3 }, 0
    x:register_hook(function() count = count + 1 end)
    local g = mf.grad((x * x * x):sum(), { x }, { create_graph = true })[1]
    g:sum():backward()
    assert.are.equal(2, count)
    assert.are.same({ 18 }, x.grad:tolist())
  end)

  it('may run a pass of their own', function()
    local x, other = leaf { 2 }, leaf { 3 }
    x:register_hook(function() mf.enable_grad(function() (other * other):backward() end) end);
    (x * x * other):sum():backward()
    assert.are.same({ 12 }, x.grad:tolist())
    assert.are.same({ 10 }, other.grad:tolist())
  end)

  it('raise what they raise, and leave the rest usable', function()
    local x = leaf { 1 }
    local h = x:register_hook(function() error 'boom' end)
    local ok, err = pcall(function() (x * 2):backward() end)
    assert.is_false(ok)
    assert.truthy(err:find('boom\nstack traceback:\n.*hooks_spec.lua'))
    h:remove()
    h = x:register_hook(function() error { code = 7 } end)
    ok, err = pcall(function() (x * 2):backward() end)
    assert.is_false(ok)
    assert.are.same({ code = 7 }, err)
    h:remove()
    h = x:register_hook(function() return 5 end)
    ok, err = pcall(function() (x * 2):backward() end)
    assert.truthy(not ok and err:find('a hook returned the number 5', 1, true))
    h:remove();
    (x * 2):backward()
    assert.are.same({ 2 }, x.grad:tolist())
  end)

  it('are refused where no gradient comes', function()
    assert.has_error(function() mf.ones(2):register_hook(print) end)
    assert.has_error(function() leaf { 1 }:register_hook(5) end)
  end)
end)

describe('retain_grad', function()
  it('keeps the gradient of what is no leaf, and adds up', function()
    local x = leaf { 1, 2 }
    local y = x * 2
    y:retain_grad();
    (y * y):sum():backward { retain_graph = true }
    assert.are.same({ 4, 8 }, y.grad:tolist())
    y:sum():backward()
    assert.are.same({ 5, 9 }, y.grad:tolist())
  end)

  it('sees what hooks made of it', function()
    local y = leaf { 1 } * 2
    y:retain_grad()
    y:register_hook(function(g) return g * 3 end)
    y:backward()
    assert.are.same({ 3 }, y.grad:tolist())
  end)

  it('ends with its tensor', function()
    local x = leaf { 1 }
    local function build()
      local y = x * 2
      y:retain_grad()
      return y * 3
    end
    local z = build()
    collect()
    z:backward()
    assert.are.same({ 6 }, x.grad:tolist())
  end)
end)
