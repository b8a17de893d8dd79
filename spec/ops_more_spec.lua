-- Composed functions and second names against PyTorch (spec/nn/generate.py), with gradients.
local mf = require 'moonflow'
local cases = dofile 'spec/nn/more.lua'
local tensors = mf.load 'spec/nn/more.safetensors'

local function close(what, got, want)
  assert(mf.is_tensor(got), what .. ' is no tensor')
  assert.equal(tostring(want.dtype), tostring(got.dtype), what)
  assert.equal(tostring(want.shape), tostring(got.shape), what)
  assert(mf.allclose(got:detach():double(), want:double(), { rtol = 1e-4, atol = 2e-5, equal_nan = true }),
    ('%s: %s, should be %s'):format(what, tostring(got), tostring(want)))
end

local function weighed(out)
  return (out * (mf.arange(out:numel()):float() * 0.5):cos():view(out.shape)):sum()
end

local function check(case)
  local name, inputs = case[1], {}
  for k = 1, case[3] do
    local x = tensors[('%s/in/%d'):format(name, k - 1)]:clone()
    inputs[k] = x:is_floating_point() and x:requires_grad_() or x
  end
  local outs = { assert(loadstring('local mf, a, b, c = ... return ' .. case[2]))(mf, unpack(inputs)) }
  if type(outs[1]) == 'table' then outs = outs[1] end
  assert.equal(case[4], #outs)
  local loss, any = mf.zeros {}, false
  for k, out in ipairs(outs) do
    close('output ' .. k - 1, out, tensors[('%s/out/%d'):format(name, k - 1)])
    if out.requires_grad then loss, any = loss + weighed(out), true end
  end
  local wanted = false
  for k = 1, #inputs do wanted = wanted or tensors[('%s/grad/%d'):format(name, k - 1)] ~= nil end
  if not (any and wanted) then return assert.is_false(wanted) end
  loss:backward()
  for k, x in ipairs(inputs) do
    local want = tensors[('%s/grad/%d'):format(name, k - 1)]
    if want then close('the gradient by input ' .. k - 1, x.grad or mf.zeros_like(x), want) end
  end
end

describe('as PyTorch:', function()
  for _, case in ipairs(cases) do
    it(case[2], function() check(case) end)
  end
end)

local function leaf(x) return mf.tensor(x, { dtype = mf.float32 }):requires_grad_() end

describe('gradients at the seams', function()
  -- what f(x, y) gives, its two first derivatives, and those of gx + 2 gy
  local function slopes(f, x, y)
    local a, b = leaf(x), leaf(y)
    local z = f(a, b)
    local g = mf.grad(z, { a, b }, { create_graph = true })
    local h = mf.grad(g[1] + g[2] * 2, { a, b }, { allow_unused = true })
    return { z:item(), g[1]:item(), g[2]:item(), h[1] and h[1]:item() or 0, h[2] and h[2]:item() or 0 }
  end
  local function same(want, got)
    for k, w in ipairs(want) do assert.near(w, got[k], 2e-6 * (1 + math.abs(w)), k) end
  end

  it('of hypot and logaddexp, where the arguments or one and zero are equal', function()
    same({ 2, 0, 1, 0.5, 0 }, slopes(mf.hypot, 0, 2))
    same({ 2, -1, 0, 0, 1 }, slopes(mf.hypot, -2, 0))
    same({ 1.4142135, 0.7071068, 0.7071068, -0.3535534, 0.3535534 }, slopes(mf.hypot, 1, 1))
    same({ 1.4142135, 0.7071068, -0.7071068, 1.0606602, 1.0606602 }, slopes(mf.hypot, 1, -1))
    same({ 5, 0.6, -0.8, 0.32, 0.24 }, slopes(mf.hypot, 3, -4))
    same({ 0, 0, 0 }, slopes(mf.hypot, 0, 0))
    same({ 1.6931472, 0.5, 0.5, -0.25, 0.25 }, slopes(mf.logaddexp, 1, 1))
    same({ 2.1269281, 0.1192029, 0.8807970, -0.1049936, 0.1049936 }, slopes(mf.logaddexp, 0, 2))
    same({ math.log(2), 0.5, 0.5, -0.25, 0.25 }, slopes(mf.logaddexp, 0, 0))
    same({ 0, 1, 0, 0, 0 }, slopes(mf.logaddexp, 0, -math.huge))
    assert.equal(math.huge, mf.hypot(mf.tensor(0 / 0), mf.tensor(-math.huge)):item())
    local tiny = mf.logaddexp(mf.tensor(0), mf.tensor(-18)):item()
    assert.near(math.exp(-18), tiny, 1e-14)
  end)

  -- what f(x) gives, and its first two derivatives
  local function curve(f, x)
    local a = leaf(x)
    local y = f(a)
    local g = mf.grad(y, { a }, { create_graph = true })[1]
    return { y:item(), g:item(), g.requires_grad and mf.grad(g, { a })[1]:item() or 0 }
  end

  it('of sinc, pow, logit and hardswish', function()
    same({ 1, 0, -math.pi ^ 2 / 3 }, curve(mf.sinc, 0))
    same({ 1, -math.pi ^ 2 * 3e-5 / 3, -math.pi ^ 2 / 3 }, curve(mf.sinc, 3e-5))
    same({ 0.6366198, -1.2732395, -1.1902271 }, curve(mf.sinc, 0.5))
    same({ 1, 0, 0 }, curve(function(x) return x ^ 0 end, 0))
    assert.equal(math.huge, curve(mf.logit, 0)[2])
    assert.equal(math.huge, curve(mf.logit, 1)[2])
    same({ 3, 1 }, curve(mf.hardswish, 3))
    same({ 0, 0 }, curve(mf.hardswish, -3))
  end)

  it('of logsumexp go to what is infinite', function()
    local x = leaf { math.huge, 1, 2 }
    x:logsumexp(0):backward()
    assert.same({ 0, 0 }, x.grad[{ { 1, 3 } }]:tolist())
  end)

  it('of atan2 at the origin are zero', function()
    local a, b = leaf { 0, 0, 0 }, leaf { 0, 1, -2 }
    mf.atan2(a, b):sum():backward()
    assert.same({ 0, 1, -0.5 }, a.grad:tolist())
    assert.same({ 0, 0, 0 }, b.grad:abs():tolist())
  end)

  it('of the median of all elements go to all that equal it', function()
    local function shares(...)
      local x = leaf { ... }
      local y = x:median()
      y:backward()
      return { y:item(), unpack(x.grad:tolist()) }
    end
    assert.same({ 1, 0.5, 0.5, 0 }, shares(1, 1, 2))
    assert.same({ 2, 0.25, 0.25, 0.25, 0.25 }, shares(2, 2, 2, 2))
    assert.same({ 2, 0, 1, 0, 0 }, shares(1, 2, 3, 4))
    assert.same({ 3, 0, 0, 1 }, shares(-math.huge, math.huge, 3))
    assert.same({ math.huge, 0, 0.5, 0.5 }, shares(1, math.huge, math.huge))
    assert.same({ 0, 0.5, 0.5 }, { 0, unpack(shares(1, 0 / 0, 0 / 0), 3) })
    local x = leaf { { 1, 1 }, { 2, 2 } }
    x:median(0):sum():backward()
    assert.same({ { 1, 1 }, { 0, 0 } }, x.grad:tolist())
  end)

  it('of cosine_similarity are finite for a vector of zeros', function()
    local a, b = leaf { { 0, 0 }, { 3, 4 } }, leaf { { 1, 2 } }
    mf.cosine_similarity(a, b):sum():backward()
    local g, h = a.grad:tolist(), b.grad:tolist()
    assert.near(44721360, g[1][1], 10)
    assert.near(89442720, g[1][2], 20)
    assert.near(-0.0286217, g[2][1], 1e-6)
    assert.near(0.0214663, g[2][2], 1e-6)
    assert.near(0.0715542, h[1][1], 1e-6)
    assert.near(-0.0357771, h[1][2], 1e-6)
  end)
end)

describe('cosine_similarity', function()
  it('broadcasts before it takes norms', function()
    local a, b = mf.tensor { { 1, 2 }, { 3, 4 } }, mf.tensor { { 1, 1 } }
    local y = mf.cosine_similarity(a, b, { dim = 0 })
    assert.near(0.8944272, y[0]:item(), 1e-6)
    assert.near(0.9486833, y[1]:item(), 1e-6)
    assert.same({ 3, 4 }, { mf.cosine_similarity(mf.ones(2, 3, 4), mf.ones(3, 4), { dim = -3 }).shape[1],
      mf.cosine_similarity(mf.ones(2, 3, 4), mf.ones(3, 4), { dim = -3 }).shape[2] })
    assert.equal(mf.float32, mf.cosine_similarity(mf.ones(1, 2):half(), mf.ones(1, 2)).dtype)
  end)
end)

describe('diff', function()
  it('has nothing left after as many rounds as there are elements, however many more are asked for', function()
    local x = mf.ones(2, 100000):requires_grad_()
    local start = os.clock()
    for _, n in ipairs { 100000, 2 ^ 53, math.huge } do
      assert.equal('(2, 0)', tostring(x:diff(n).shape))
      assert.equal('(0, 100000)', tostring(x:diff(n, 0).shape))
    end
    assert(os.clock() - start < 5)
    x:diff(200000):sum():backward()
    assert.equal(0, x.grad:abs():sum():item())
    for _, n in ipairs { 1.5, -1, 0 / 0 } do
      local ok, text = pcall(x.diff, x, n)
      assert(not ok and text:find('diff: n must be a whole number', 1, true), text)
    end
  end)
end)

describe('what changes nothing', function()
  it('gives memory of its own', function()
    local x = mf.tensor { 1, 2 }
    local whole, one = mf.tensor({ 1, 2 }, { dtype = mf.int64 }), mf.ones(1, 3)
    x:repeat_interleave(1):zero_()
    x:diff(0):zero_()
    whole:nan_to_num():zero_()
    assert.same({ 1, 2 }, x:tolist())
    assert.same({ 1, 2 }, whole:tolist())
    assert.same({ { 2, 2, 2 }, { 2, 2, 2 } }, one:repeat_interleave(2, { dim = 0 }):add_(1):tolist())
    assert.same({ { 1, 1, 1 } }, one:tolist())
  end)
end)

describe('second names', function()
  it('are the same functions', function()
    for name, other in pairs { multiply = 'mul', subtract = 'sub', divide = 'div', negative = 'neg', absolute = 'abs',
      greater = 'gt', less_equal = 'le', not_equal = 'ne', clip = 'clamp', arctan2 = 'atan2', fix = 'trunc' } do
      assert.equal(mf[other], mf[name])
      assert.equal(mf.Tensor[other], mf.Tensor[name])
    end
    assert.equal(mf.cat, mf.concat)
    assert.same({ 1, 1 }, mf.tensor({ 3, -4 }):clip_(1, 1):tolist())
    assert.equal(2, mf.ones(2, 3):ndimension())
    assert.is_true(mf.tensor(2):is_nonzero())
    assert.is_false(mf.tensor(false):is_nonzero())
  end)
end)

describe('wrong arguments', function()
  local function fails(text, f, ...)
    local ok, err = pcall(f, ...)
    assert(not ok, text)
    assert(tostring(err):find(text, 1, true), err)
  end
  it('are named', function()
    fails('kthvalue: k is 4, dim -1 has 3 entries', mf.kthvalue, mf.ones(3), 4)
    fails('kthvalue: k must be a whole number of at least 1', mf.kthvalue, mf.ones(3), 0)
    fails('kthvalue: x must be a tensor, is 5', mf.kthvalue, 5, 1)
    fails('trace: x must be a matrix', mf.trace, mf.ones(3))
    fails('diag: x must have 1 or 2 dims', mf.diag, mf.ones(1, 1, 1))
    fails('tensordot: dim 1 of x has size 3, dim 0 of y 2', mf.tensordot, mf.ones(2, 3), mf.ones(2, 3), { dims = 1 })
    fails('hstack: a table of tensors is needed', mf.hstack, {})
    fails('median: dim 0 has no entries', mf.median, mf.ones(0), 0)
    fails('broadcast_tensors: xs[2] must be a tensor, is nil', mf.broadcast_tensors, mf.ones(1), nil, mf.ones(2))
    fails('meshgrid: xs[2] must be a tensor, is nil', mf.meshgrid, mf.ones(1), nil, mf.ones(2))
  end)
end)
