-- mf.Function: ops of the user's own.
local mf = require 'moonflow'

local function leaf(t) return mf.tensor(t, { requires_grad = true }) end

local Cube = mf.Function:extend 'Cube'
function Cube.forward(ctx, x, k)
  ctx:save_for_backward(x)
  ctx.k = k
  return x * x * x * k
end
function Cube.backward(ctx, g)
  local x = ctx:saved_tensors()
  return g * x * x * (3 * ctx.k)
end

describe('mf.Function', function()
  it('has the gradient that its backward gives', function()
    local x = leaf { 1, 2 }
    local y = Cube(x, 2)
    assert.are.same({ 2, 16 }, y:tolist())
    assert.is_true(y.requires_grad)
    y:sum():backward()
    assert.are.same({ 6, 24 }, x.grad:tolist())
    assert.is_false(mf.no_grad(Cube.apply, x, 2).requires_grad)
    assert.is_false(Cube(mf.ones(2), 1).requires_grad)
  end)

  it('has gradients of gradients', function()
    local x = leaf { 1, 2 }
    local g = mf.grad(Cube(x, 1):sum(), { x }, { create_graph = true })[1]
    assert.are.same({ 6, 12 }, mf.grad(g:sum(), { x })[1]:tolist())
  end)

  it('tells which gradients are wanted, and takes several inputs and results', function()
    local needs
    local Pair = mf.Function:extend 'Pair'
    function Pair.forward(ctx, a, n, b)
      ctx:save_for_backward(a, b)
      return a * b * n, a + b
    end
    function Pair.backward(ctx, g, h)
      needs = ctx.needs_input_grad
      local a, b = ctx:saved_tensors()
      return g * b * 2 + h, nil, g * a * 2 + h
    end
    local a, b = leaf { 3 }, mf.tensor { 5 }
    local p, s = Pair(a, 2, b);
    (p + s * 10):backward()
    assert.are.same({ 20 }, a.grad:tolist())
    assert.are.same({ true, false, false }, needs)
    a.grad = nil
    p, s = Pair(a, 2, b)
    s:backward() -- the other result's gradient is zeros
    assert.are.same({ 1 }, a.grad:tolist())
    assert.is_true(p.requires_grad)
  end)

  it('may return an input, and results without gradient', function()
    local Split = mf.Function:extend 'Split'
    function Split.forward(ctx, x)
      local whole = x:floor()
      ctx:mark_non_differentiable(whole)
      return x, whole, x:gt(1)
    end
    function Split.backward(_, g) return g * 2 end
    local x = leaf { 1.5, 0.5 }
    local same, whole, mask = Split(x)
    assert.is_false(rawequal(same, x))
    assert.is_false(whole.requires_grad)
    assert.is_false(mask.requires_grad)
    same:sum():backward()
    assert.are.same({ 2, 2 }, x.grad:tolist())
  end)

  it('is collected with what it saved', function()
    local Exp = mf.Function:extend 'Exp'
    function Exp.forward(ctx, x)
      local y = x:exp()
      ctx:save_for_backward(y)
      ctx.seen = y
      return y
    end
    function Exp.backward(ctx, g) return g * ctx:saved_tensors() end
    local weak = setmetatable({}, { __mode = 'v' })
    local function build()
      local x = leaf { 0 }
      weak[1], weak[2] = x, Exp(x)
      weak[2]:backward()
      assert.are.same({ 1 }, x.grad:tolist())
    end
    build()
    for _ = 1, 3 do collectgarbage() end
    assert.is_nil(next(weak))
  end)

  it('may be subscripted', function()
    local x = leaf { 1, 2 }
    local y = Cube(x, 1)
    y[1]:backward()
    assert.are.same({ 0, 12 }, x.grad:tolist())
  end)

  it('that gives its argument or a view of it does not let others write there', function()
    local Part = mf.Function:extend 'Part'
    function Part.forward(_, x) return x[{ { 0, 1 } }] end
    function Part.backward(_, g) return mf.cat { g, g * 0 } end
    local x = leaf { 1, 2 }
    local y = Part(x)
    local ok, err = pcall(y.mul_, y, 3)
    assert.is_false(ok)
    assert.truthy(err:find('the gradient would be lost', 1, true), err)
    assert.are.same({ 1, 2 }, x:tolist());
    (y * 3):sum():backward()
    assert.are.same({ 3, 0 }, x.grad:tolist())
  end)

  it('refuses what changed, what is gone and what is no gradient', function()
    local function refused(f, text)
      local ok, err = pcall(f)
      assert.is_false(ok)
      assert.truthy(err:find(text, 1, true), err)
    end
    local x = leaf { 1, 2 }
    local y = x * 1
    local z = Cube(y, 1)
    y:detach():add_(1)
    refused(function() z:sum():backward() end,
      'a tensor that Cube needs for its gradient was changed in place since by add_')
    local w = Cube(x, 1):sum()
    w:backward()
    refused(function() w:backward() end, 'the graph was freed by an earlier backward pass at Cube')
    local Bad = mf.Function:extend 'Bad'
    function Bad.forward(_, a) return a * 1 end
    function Bad.backward() return 'x' end
    refused(function() Bad(x):sum():backward() end,
      'Bad: backward must return a tensor or nil for argument 1, returned a string')
    function Bad.backward() return mf.ones(3) end
    refused(function() Bad(x):sum():backward() end,
      'the gradient of input 1 of a function has shape (3,), the input has (2,)')
    function Bad.backward(_, g) return g, nil, nil end
    Bad(x):sum():backward()
    function Bad.backward(_, g) return g, nil, g end
    refused(function() Bad(x):sum():backward() end, 'Bad: backward returned 3 gradients, forward had 1 arguments')
    function Bad.backward(_, g) return g, g end
    refused(function() Bad(x, 'text'):sum():backward() end,
      'Bad: backward returned a gradient for argument 2, which is not a tensor')
    function Bad.backward() error 'boom' end
    refused(function() Bad(x):sum():backward() end, 'boom')
    refused(function() mf.Function:extend 'None'(x) end, 'None: has no forward')
  end)
end)
