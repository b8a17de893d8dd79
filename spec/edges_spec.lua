-- Values and gradients where formulas have edges: zeros, infinities, small numbers, cropping. Wanted
-- values are PyTorch 2's.
local mf = require 'moonflow'
local inf, nan = math.huge, 0 / 0

local function near(want, have, what)
  assert.equal(#want, have:numel())
  for k, v in ipairs(have:reshape(-1):tolist()) do
    local w = want[k]
    local same = w == v or (w ~= w and v ~= v) or math.abs(w - v) <= 1e-6 * math.abs(w)
    assert(same, ('%s [%d]: %.9g, should be %.9g'):format(what or 'value', k, v, w))
  end
end

-- The sign of a zero counts.
local function exact(want, have)
  for k, v in ipairs(have:reshape(-1):tolist()) do
    local w = want[k]
    assert((w ~= w and v ~= v) or (w == v and 1 / w == 1 / v), ('[%d]: %g, should be %g'):format(k, v, w))
  end
end

describe('cosine_similarity', function()
  it('broadcasts before it takes norms', function()
    near({ 0.8944272, 0.9486833 },
      mf.cosine_similarity(mf.tensor { { 1, 2 }, { 3, 4 } }, mf.tensor { { 1, 1 } }, { dim = 0 }))
    local a, b = mf.rand(2, 3, 4), mf.rand(3, 4)
    local y = mf.cosine_similarity(a, b, { dim = -3 })
    assert.same({ 3, 4 }, { unpack(y.shape) })
    near({ (a[0][1][2] + a[1][1][2]):item() / (a[{ {}, 1, 2 }]:norm():item() * math.sqrt(2)) }, y[1][2]:reshape(1))
  end)

  it('has finite gradients at zero, and those of the norm below eps', function()
    for _, case in ipairs {
      { { 0, 0 }, { 0, 0 }, { 0, 0 }, { 0, 0 } },
      { { 0, 0 }, { 1, 2 }, { 44721360, 89442720 }, { 0, 0 } },
      { { 3, 4 }, { 0, 0 }, { 0, 0 }, { 6e7, 8e7 } },
    } do
      local a, b = mf.tensor(case[1]):requires_grad_(), mf.tensor(case[2]):requires_grad_()
      local y = mf.cosine_similarity(a, b, { dim = 0 })
      y:backward()
      assert.equal(0, y:item())
      near(case[3], a.grad, 'a')
      near(case[4], b.grad, 'b')
    end
    local a = mf.tensor({ { 1e-10, 0 }, { 3, 4 } }, { dtype = mf.float64 }):requires_grad_()
    local y = mf.cosine_similarity(a, mf.tensor({ { 1, 1 }, { 1, 2 } }, { dtype = mf.float64 }))
    y:sum():backward()
    near({ 0.0070710678118655, 0.98386991009991 }, y)
    near({ 70003571.3374682, 70710678.118654, -0.0286216701119974, 0.021466252583998 }, a.grad)
  end)
end)

describe('rms_norm without eps', function()
  it('takes that of the dtype it computes in', function()
    for dtype, case in pairs {
      float16 = { { 1e-3, 2e-3 }, { 0.61767578125, 1.2353515625 }, { 499.75, -235.875 } },
      bfloat16 = { { 1e-2, 2e-2 }, { 0.6328125, 1.265625 }, { 50.5, -25.25 } },
      float32 = { { 1e-4, 2e-4 }, { 0.26333186, 0.52666372 }, { 2542.0166, -182.60397 } },
      float64 = { { 1e-9, 2e-9 }, { 0.066734235188924, 0.13346847037785 }, { 66585636.127256, -297198.12333591 } },
    } do
      local x = mf.tensor({ case[1] }, { dtype = mf[dtype] }):requires_grad_()
      local y = mf.rms_norm(x, { 2 })
      y[0][0]:backward()
      near(case[2], y, dtype)
      near(case[3], x.grad, dtype)
      local layer = mf.nn.RMSNorm(2):to(mf[dtype])
      near(case[2], layer(x), dtype)
    end
  end)

  it('has second gradients of the same eps', function()
    local x = mf.tensor({ { 0.01, 0.02 } }, { dtype = mf.bfloat16 }):requires_grad_()
    local g = mf.grad(mf.rms_norm(x, { 2 })[0][0], { x }, { create_graph = true })[1]
    g[0][0]:backward()
    local want = mf.tensor({ { 0.01, 0.02 } }, { dtype = mf.bfloat16 }):double():requires_grad_()
    local h = mf.grad(mf.rms_norm(want, { 2 }, { eps = 2 ^ -23 })[0][0], { want }, { create_graph = true })[1]
    h[0][0]:backward()
    local a, b = x.grad:double(), want.grad
    assert((a - b):norm():item() < 0.05 * b:norm():item(), tostring(a) .. tostring(b))
  end)
end)

describe('floor_divide', function()
  it('is the floor of the exact quotient, also at infinities', function()
    for _, dtype in ipairs { mf.float32, mf.float64, mf.float16 } do
      local function t(...) return mf.tensor({ ... }, { dtype = dtype }) end
      exact({ -1, -1, 0, 0, nan, nan, nan, inf, -inf, nan }, mf.floor_divide(
        t(-0.5, 5, 0.5, -0.5, inf, -inf, inf, 3, 3, 0), t(inf, -inf, inf, -inf, 1, 2, -inf, 0, -0.0, 0)))
      exact({ -0.0, 0, -0.0, 0 }, mf.floor_divide(t(-0.0, 0, 0, -0.0), t(3, 3, -3, -3)))
      exact({ 3, -4, -4, 3, 2 }, mf.floor_divide(t(7, -7, 7, -7, 5), t(2, 2, -2, -2, 2)))
    end
    exact({ 59, 69, 9, 3, 8 }, mf.floor_divide(mf.tensor { 6, 7, 1, 0.3, 2.7 }, mf.tensor { 0.1, 0.1, 0.1, 0.1, 0.3 }))
  end)

  it('goes with remainder and its gradient', function()
    exact({ -0.0, -0.0, 0, inf }, mf.remainder(mf.tensor { -5, -2, 5, -5 }, mf.tensor { -5, 1, -1, inf }))
    local y = mf.tensor { 0.1, 2, -1.7 }:requires_grad_()
    mf.remainder(mf.tensor { 7, -7, 5.3 }, y):sum():backward()
    exact({ -69, 4, 4 }, y.grad)
  end)
end)

describe('kl_div', function()
  it('divides by the batch that there is', function()
    local none = mf.zeros(0, 3)
    near({ nan }, mf.kl_div(none, none, { reduction = 'batchmean' }))
    near({ nan }, mf.kl_div(none, none, { reduction = 'batchmean', log_target = true }))
    near({ -1 }, mf.kl_div(mf.tensor(1), mf.tensor(1), { reduction = 'batchmean' }))
  end)
end)

describe('pad with a negative amount', function()
  local cases = { -- of 1, 2, 3, 4: values and gradients
    reflect = {
      { { -1, 2 }, { 2, 3, 4, 3, 2 }, { 0, 2, 2, 1 } },
      { { 2, -1 }, { 3, 2, 1, 2, 3 }, { 1, 2, 2, 0 } },
      { { -1, -1 }, { 2, 3 }, { 0, 1, 1, 0 } },
      { { 3, -2 }, { 4, 3, 2, 1, 2 }, { 1, 2, 1, 1 } },
      { { -5, 3 }, { 2, 1 }, { 1, 1, 0, 0 } },
    },
    replicate = {
      { { -1, 2 }, { 2, 3, 4, 4, 4 }, { 0, 1, 1, 3 } },
      { { 4, -3 }, { 1, 1, 1, 1, 1 }, { 5, 0, 0, 0 } },
      { { 3, -5 }, { 1, 1 }, { 2, 0, 0, 0 } },
    },
    circular = {
      { { -1, 2 }, { 2, 3, 4, 2, 3 }, { 0, 2, 2, 1 } },
      { { 2, -1 }, { 2, 3, 1, 2, 3 }, { 1, 2, 2, 0 } },
      { { -1, 3 }, { 2, 3, 4, 2, 3, 4 }, { 0, 2, 2, 2 } },
      { { -3, -1 }, {}, { 0, 0, 0, 0 } },
    },
  }
  for mode, list in pairs(cases) do
    it('crops: ' .. mode, function()
      for _, case in ipairs(list) do
        local x = mf.tensor { { { 1, 2, 3, 4 } } }:requires_grad_()
        local y = mf.pad(x, case[1], { mode = mode })
        y:sum():backward()
        exact(case[2], y)
        assert.equal(#case[2], y:numel())
        exact(case[3], x.grad)
      end
    end)
  end

  it('crops in two dims', function()
    local x = mf.arange(1, 17):float():reshape(1, 1, 4, 4)
    exact({ 6, 7, 8, 7, 6, 2, 3, 4, 3, 2, 6, 7, 8, 7, 6 }, mf.pad(x, { -1, 2, 1, -2 }, { mode = 'reflect' }))
    exact({ 2, 3, 4, 4, 4, 2, 3, 4, 4, 4, 6, 7, 8, 8, 8 }, mf.pad(x, { -1, 2, 1, -2 }, { mode = 'replicate' }))
    exact({ 6, 7, 8, 6, 7, 2, 3, 4, 2, 3, 6, 7, 8, 6, 7 }, mf.pad(x, { -1, 2, 1, -2 }, { mode = 'circular' }))
  end)

  it('has its limits', function()
    for text, case in pairs {
      ['circular needs at most the size that is left'] = { { -2, 3 }, 'circular' },
      ['reflect needs less than the size'] = { { -1, 4 }, 'reflect' },
      ['leaves less than nothing'] = { { -5, 0 }, 'replicate' },
      ['pad (-5, 3) leaves less than nothing'] = { { -5, 3 }, 'circular' },
      ['pad (3, -5) leaves less than nothing'] = { { 3, -5 }, 'constant' },
    } do
      local ok, err = pcall(mf.pad, mf.ones(1, 1, 4), case[1], { mode = case[2] })
      assert.is_false(ok)
      assert.truthy(tostring(err):find(text, 1, true), tostring(err))
    end
  end)
end)
