-- Kernels that divide the work otherwise when there is more of it, or meet values that are rare: beside the cpu's.
local mf = require 'moonflow'

local function same(want, got, limit, what)
  if type(want) == 'table' then
    for k = 1, #want do same(want[k], got[k], limit, what .. ' ' .. k) end
    return
  end
  assert.equal(want.dtype, got.dtype)
  assert(mf.allclose(got:cpu(), want, { rtol = limit, atol = limit, equal_nan = true }), what .. ' differs')
end

-- f of the tensors on the cpu, and of the same ones on a device.
local function both(f, limit, what, ...)
  local here, there = { ... }, { ... }
  for k, t in ipairs(there) do there[k] = t:to 'cuda' end
  same({ f(unpack(here)) }, { f(unpack(there)) }, limit, what)
end

describe('a cuda kernel', function()
  before_each(function() mf.manual_seed(3) end)

  it('adds up a channel in parts, in either order of memory', function()
    for _, shape in ipairs { { 9, 3, 23, 31 }, { 40, 70, 9, 5 }, { 3000, 5 } } do
      local x = mf.randn(unpack(shape)) * 3 + 50
      local g, c = mf.randn(unpack(shape)), shape[2]
      for _, last in ipairs { false, true } do
        if last and #shape == 4 then
          x = x:contiguous { memory_format = 'channels_last' }
          g = g:contiguous { memory_format = 'channels_last' }
        end
        both(function(t, w, b, mean, var)
          local y, m, r = mf._batch_norm(t, mean, var, w, b, true)
          return y, m, r, mean, var
        end, 2e-5, 'batch_norm', x, mf.randn(c), mf.randn(c), mf.zeros(c), mf.ones(c))
        both(function(h, t, w, b)
          local y, m, r = mf._batch_norm(t, nil, nil, w, b, true)
          local a = { mf._batch_norm_backward(h, t, m, r, w, true, true) }
          local gated = h:clone()
          local d = { mf._batch_norm_act_backward(gated, y, t, m, r, w, b, h, true, true, true) }
          return a[1], a[2], a[3], d[1], d[2], d[3], gated
        end, 2e-3, 'batch_norm_backward', g, x, mf.randn(c), mf.randn(c))
      end
    end
  end)

  it('sorts long lines, also with NaN, infinities and equal values', function()
    local x = mf.randint(0, 50, { 3, 3001 }):to(mf.float32)
    x[{ 0, { 5, 9 } }] = 0 / 0
    x[{ 1, 77 }], x[{ 1, 78 }], x[{ 2, 3000 }] = math.huge, -math.huge, 0 / 0
    for _, down in ipairs { false, true } do
      both(function(t) return t:sort(1, down) end, 0, 'sort', x)
      both(function(t) return t:sort(0, down) end, 0, 'sort of columns', x)
      both(function(t) return t:topk(100, 1, down) end, 0, 'topk', x)
    end
    both(function(t) return t:max(1) end, 0, 'max', x)
    both(function(t) return t:min(0) end, 0, 'min', x)
    both(function(t) return t:sort(1) end, 0, 'sort of whole numbers', mf.randint(-2 ^ 40, 2 ^ 40, { 2, 2000 }))
  end)

  it('carries running sums and products along long lines', function()
    local x = mf.randn(5, 3001)
    both(function(t) return t:cumsum(1), t:cumsum(0) end, 1e-5, 'cumsum', x)
    both(function(t) return t:cumprod(1) end, 1e-5, 'cumprod', x * 0.1 + 1)
    both(function(g, t) return mf._cumprod_backward(g, t, 1) end, 1e-4, 'cumprod_backward', mf.randn(5, 3001),
      (x * 0.05 + 1) * x:gt(-3):to(mf.float32))
    both(function(t) return t:cumsum(1) end, 0, 'cumsum of whole numbers', mf.randint(-9, 9, { 2, 2049 }))
  end)

  it('draws and masks as many as there are', function()
    local w = mf.rand(7, 1500)
    w[{ {}, { 0, 400 } }] = 0
    for _, again in ipairs { true, false } do
      mf.manual_seed(5)
      local want = mf.multinomial(w, 600, again)
      mf.manual_seed(5)
      assert.same(want:tolist(), mf.multinomial(w:to 'cuda', 600, again):tolist())
    end
    mf.manual_seed(6)
    local want = mf.randperm(3000)
    mf.manual_seed(6)
    assert.same(want:tolist(), mf.randperm(3000, { device = 'cuda' }):tolist())
    local x = mf.randn(30, 41)
    both(function(t) return mf.nonzero(t:gt(0.5)), t:masked_select(t:lt(0)) end, 0, 'masks', x)
  end)

  it('says what is wrong with its data at the next wait', function()
    local function fails(text, f)
      local ok, why = pcall(function()
        local y = f()
        return y.tolist and y:tolist() or y
      end)
      assert(not ok and why:find(text, 1, true), why)
    end
    local x = mf.tensor({ 1, 2, -3, 0 }):to 'cuda'
    fails('multinomial: x holds -3; weights are finite and not negative', function() return mf.multinomial(x, 2) end)
    fails('multinomial: all weights in row 0 of x are 0', function() return mf.multinomial(x * 0, 2, true) end)
    fails('multinomial: 3 samples without replacement, but only 2 weights of row 0 are above 0',
      function() return mf.multinomial(x:clamp(0), 3) end)
    fails('masked_scatter: the mask selects 4 elements, source has 2', function()
      return mf._masked_scatter(x, x:eq(x), mf.ones(2, { device = 'cuda' }))
    end)
    fails('adam_rows_: ids at position 1 is 9; legal are 0 to 3', function()
      local p = mf.ones(4, 2):to 'cuda'
      local ids = mf.tensor({ 1, 9 }, { dtype = mf.int64, device = 'cuda' })
      mf._adam_rows_(p, ids, p:narrow(0, 0, 2):clone(), p:clone(), p:clone(),
        { lr = 1, beta1 = 0.9, beta2 = 0.9, eps = 1, weight_decay = 0, step = 1 })
      return p
    end)
    assert.same({ 1, 2, -3, 0 }, x:tolist())
  end)
end)
