-- Clipping of gradients, with norms as PyTorch's definition has them; parameters as one vector.
local mf = require 'moonflow'
local utils = mf.nn.utils

-- Parameters with these gradients.
local function params(...)
  local list = {}
  for k, g in ipairs { ... } do
    list[k] = mf.zeros_like(g):requires_grad_()
    list[k].grad = g
  end
  return list
end

local function near(want, t)
  assert.is_true(mf.allclose(t, mf.tensor(want, { dtype = t.dtype }), { rtol = 1e-5, atol = 1e-6 }), tostring(t))
end

local function fails(text, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert(tostring(err):find(text, 1, true), err)
end

describe('clip_grad_norm_', function()
  it('takes norms of any order', function()
    for p, norm in pairs { [2] = 5, [1] = 7, [math.huge] = 4, [3] = 91 ^ (1 / 3) } do
      local list = params(mf.tensor { 3, 0 }, mf.tensor { { -4 } })
      near(norm, utils.clip_grad_norm_(list, 2, p))
      local factor = 2 / (norm + 1e-6)
      near({ 3 * factor, 0 }, list[1].grad)
      near({ { -4 * factor } }, list[2].grad)
    end
  end)

  it('leaves what is small enough as it is', function()
    local list = params(mf.tensor { 0.3, 0.4 })
    near(0.5, utils.clip_grad_norm_(list, 1))
    assert.is_true(mf.equal(mf.tensor { 0.3, 0.4 }, list[1].grad))
    near(0, utils.clip_grad_norm_({ mf.ones(2):requires_grad_() }, 1))
    near(0, utils.clip_grad_norm_({}, 1))
  end)

  it('takes one tensor, gradients in any memory, float16 and row-sparse ones', function()
    local p = params(mf.tensor({ { 3, 0 }, { 0, 4 } }):t())[1]
    near(5, utils.clip_grad_norm_(p, 1))
    near({ { 0.6, 0 }, { 0, 0.8 } }, p.grad)
    local half = params(mf.tensor({ 3, 4 }, { dtype = mf.float16 }))
    utils.clip_grad_norm_(half, 1)
    assert.near(0.6, half[1].grad[0]:item(), 1e-3)
    local e = mf.nn.Embedding(5, 2, { sparse = true })
    e(mf.tensor({ 1, 1, 3 }, { dtype = mf.int64 })):sum():backward()
    near(math.sqrt(10), utils.clip_grad_norm_(e:parameters(), 1))
    local dense = e.weight.grad:to_dense()
    near(1, dense:norm())
  end)

  it('refuses norms that are not finite when asked to', function()
    local list = params(mf.tensor { math.huge })
    fails('clip_grad_norm_: the norm of the gradients is inf', utils.clip_grad_norm_, list, 1,
      { error_if_nonfinite = true })
    assert.equal(math.huge, utils.clip_grad_norm_(list, 1):item())
    fails('clip_grad_norm_: a table of tensors is needed', utils.clip_grad_norm_, 5, 1)
    fails('clip_grad_norm_: parameters[2] must be a tensor', utils.clip_grad_norm_, { mf.ones(1), 5 }, 1)
  end)
end)

describe('clip_grad_value_', function()
  it('cuts every element', function()
    local list = params(mf.tensor { 3, -0.25 }, mf.tensor { { -4, 0.5 } })
    utils.clip_grad_value_(list, 0.5)
    near({ 0.5, -0.25 }, list[1].grad)
    near({ { -0.5, 0.5 } }, list[2].grad)
  end)
end)

describe('parameters as a vector', function()
  it('there and back', function()
    local a, b = mf.nn.Linear(3, 2), mf.nn.Linear(3, 2)
    local v = utils.parameters_to_vector(a:parameters())
    assert.equal(8, v:numel())
    utils.vector_to_parameters(v, b:parameters())
    assert.is_true(mf.equal(a.weight, b.weight))
    assert.is_true(mf.equal(a.bias, b.bias))
    assert.is_true(b.weight.requires_grad)
  end)
end)
