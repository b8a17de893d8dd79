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
  end)
end)
