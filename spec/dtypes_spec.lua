-- Dtypes of results, and what whole numbers outside of a dtype mean, as PyTorch 2 has them.
local mf = require 'moonflow'

local function is(t, dtype, values)
  assert.equal(dtype, tostring(t.dtype))
  assert.same(values, t:tolist())
end

local function fails(text, f, ...)
  local ok, err = pcall(f, ...)
  assert(not ok, 'no error; expected: ' .. text)
  assert(tostring(err):find(text, 1, true), tostring(err))
end

local function whole(dtype, ...) return mf.tensor({ ... }, { dtype = mf[dtype] }) end

describe('the dtype', function()
  it('of copysign is a float', function()
    is(mf.copysign(whole('int8', 1, -2), -1), 'float32', { -1, -2 })
    is(mf.copysign(whole('int32', 1, -2), whole('int32', 1, -1)), 'float32', { 1, -2 })
    is(mf.copysign(mf.tensor { true, false }, mf.tensor(-1.5)), 'float32', { -1, -0 })
    is(mf.copysign(whole('int8', -128), 1), 'float32', { 128 })
    is(mf.copysign(whole('int64', 1, 2), whole('float64', -1, 1)), 'float64', { -1, 2 })
    is(mf.copysign(whole('float16', 1, 2), whole('float32', -1, 1)), 'float32', { -1, 2 })
    is(mf.copysign(whole('float16', 1, 2), mf.tensor(-1)), 'float16', { -1, -2 })
    is(mf.copysign(whole('float16', 1, 2), whole('int64', 1, -1)), 'float16', { 1, -2 })
    assert.equal(-math.huge, 1 / mf.copysign(whole('int8', 0), -1):item())
  end)

  it('of arithmetic with bool is a whole number', function()
    local b = mf.tensor { true, false }
    is(b:square(), 'int64', { 1LL, 0LL })
    is(b:clamp(0, 1), 'int64', { 1LL, 0LL })
    is(b:clamp { min = 2 }, 'int64', { 2LL, 2LL })
    is(b:clamp(0.5, 1), 'float32', { 1, 0.5 })
    assert.has_error(function() b:clone():square_() end)
    assert.has_error(function() b:clone():clamp_(0, 1) end)
  end)

  it('of einsum is that of matmul', function()
    local a, b = whole('int32', 1, 2, 3, 4):reshape(2, 2), whole('int32', 1, 0, 2, 1):reshape(2, 2)
    is(mf.einsum('ij,jk->ik', a, b), 'int32', { { 5, 2 }, { 11, 4 } })
    is(mf.einsum('ij,ij->i', a, b), 'int32', { 1, 10 })
    is(mf.einsum('i,i,i->', a[0], b[0], b[1]), 'int32', 2)
    is(mf.einsum('ij->i', a), 'int64', { 3LL, 7LL })
    is(mf.einsum('i,i->', whole('uint8', 100, 100), whole('uint8', 1, 2)), 'uint8', 44)
  end)

  it('of baddbmm and addmv stays, with the whole parts of beta and alpha', function()
    local c, a, b = whole('int8', 1, 1, 1, 1):reshape(1, 2, 2), whole('int8', 1, 2):reshape(1, 2, 1),
      whole('int8', 1, 3):reshape(1, 1, 2)
    is(c:baddbmm(a, b, { beta = 2, alpha = 3 }), 'int8', { { { 5, 11 }, { 8, 20 } } })
    is(c:baddbmm(a, b, { beta = 0.5, alpha = 1.5 }), 'int8', { { { 1, 3 }, { 2, 6 } } })
    is(c:baddbmm(a, b, { beta = -1.5, alpha = -2.5 }), 'int8', { { { -3, -7 }, { -5, -13 } } })
    is(a[0]:squeeze(1):addmv(c[0], b[0][0], { beta = 0.5, alpha = 2.5 }), 'int8', { 8, 8 })
  end)

  it('of addcmul may be one of whole numbers', function()
    local a, b, c = whole('int32', 1, 2), whole('int32', 3, 4), whole('int32', 5, -6)
    is(mf.addcmul(a, b, c), 'int32', { 16, -22 })
    is(mf.addcmul(a, b, c, { value = -2 }), 'int32', { -29, 50 })
    is(mf.addcmul(a, b, c, { value = 1.5 }), 'int32', { 16, -22 })
    is(whole('uint8', 250):addcmul_(whole('uint8', 2), whole('uint8', 5)), 'uint8', { 4 })
  end)
end)

describe('a whole number outside of a dtype', function()
  local u, i = whole('uint8', 4, 200), whole('int8', 4, -100)
  for _, kind in ipairs { '0-d', 'plain' } do
    local function number(v) return kind == '0-d' and mf.tensor(v, { dtype = mf.int64 }) or v end
    it('takes part as a number of that dtype: ' .. kind, function()
      is(mf.maximum(u, number(-3)), 'uint8', { 253, 253 })
      is(mf.minimum(u, number(-3)), 'uint8', { 4, 200 })
      is(mf.floor_divide(u, number(300)), 'uint8', { 0, 4 })
      is(mf.floor_divide(number(-3), u), 'uint8', { 63, 1 })
      is(mf.remainder(i, number(200)), 'int8', { -52, -44 })
      is(mf.fmod(i, number(-200)), 'int8', { 4, -44 })
      is(mf.fmax(i, mf.tensor(200, { dtype = mf.int64 })), 'int8', { 4, -56 })
      is(u:lt(number(-3)), 'bool', { true, true })
      is(u:ge(number(300)), 'bool', { false, true })
      is(i:lt(number(200)), 'bool', { false, true })
      is(u + number(300), 'uint8', { 48, 244 })
      is(mf.div(u, number(-4)), 'float32', { -1, -50 }) -- floats know no such bounds
    end)
  end
  it('takes part as it is among wider ones', function()
    is(mf.maximum(whole('int16', 4, 200), mf.tensor(-3, { dtype = mf.int64 })), 'int16', { 4, 200 })
    is(mf.maximum(u, whole('int64', -3, 300)), 'int64', { 4LL, 300LL })
    local long = mf.arange(0, 1000):to(mf.uint8) -- several blocks
    is(mf.maximum(long, mf.tensor(-3, { dtype = mf.int64 })):lt(253):any(), 'bool', false)
  end)
  it('as an exponent stays', function()
    is(mf.pow(whole('uint8', 1, 3), -1), 'uint8', { 1, 0 })
    is(mf.pow(whole('uint8', 1, 3), 260), 'uint8', { 1, 3 ^ 4 })
  end)
  it('is no bound', function()
    fails('clamp: min is 300, which uint8 cannot hold', u.clamp, u, { min = 300 })
    fails('clamp: max is -3, which uint8 cannot hold', u.clamp, u, { max = -3 })
    fails('clamp: max is -129, which int8 cannot hold', i.clamp, i, { max = -129 })
    is(u:clamp(-3, 300), 'uint8', { 4, 200 })
    is(u:clamp { max = 100 }, 'uint8', { 4, 100 })
    is(i:clamp(-128, 127), 'int8', { 4, -100 })
  end)
end)
