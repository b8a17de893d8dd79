-- Lua values into tensors and back: mf.tensor, item, tolist; and what subscripts and assignments say
-- when they cannot be.
local mf = require 'moonflow'

local function fails(text, f, ...)
  local ok, err = pcall(f, ...)
  assert(not ok, 'no error; expected: ' .. text)
  assert(tostring(err):find(text, 1, true), tostring(err))
end

local function is(t, dtype, shape, values)
  assert.equal(mf[dtype], t.dtype)
  assert.same(shape, { unpack(t.shape) })
  assert.same(values, t:tolist())
end

describe('mf.tensor', function()
  it('takes numbers, booleans and nested tables', function()
    is(mf.tensor(3), 'float32', {}, 3)
    is(mf.tensor(true), 'bool', {}, true)
    is(mf.tensor { 1, 2 }, 'float32', { 2 }, { 1, 2 })
    is(mf.tensor { { 1, 2, 3 }, { 4, 5, 6 } }, 'float32', { 2, 3 }, { { 1, 2, 3 }, { 4, 5, 6 } })
    is(mf.tensor { { true, false } }, 'bool', { 1, 2 }, { { true, false } })
    is(mf.tensor { { { 1 } }, { { 2 } } }, 'float32', { 2, 1, 1 }, { { { 1 } }, { { 2 } } })
    is(mf.tensor(mf.tensor { 1 }.shape), 'float32', { 1 }, { 1 })
  end)

  it('makes numbers of booleans beside numbers', function()
    is(mf.tensor { true, 2 }, 'float32', { 2 }, { 1, 2 })
    is(mf.tensor { 2, false }, 'float32', { 2 }, { 2, 0 })
    is(mf.tensor({ 0, 2, -1 }, { dtype = mf.bool }), 'bool', { 3 }, { false, true, true })
    is(mf.tensor({ true, false }, { dtype = mf.int64 }), 'int64', { 2 }, { 1, 0 })
  end)

  it('keeps empty dims', function()
    is(mf.tensor {}, 'float32', { 0 }, {})
    is(mf.tensor { {}, {} }, 'float32', { 2, 0 }, { {}, {} })
    is(mf.tensor({ { {} } }, { dtype = mf.int64 }), 'int64', { 1, 1, 0 }, { { {} } })
  end)

  it('takes tensors of one element, and copies tensors', function()
    is(mf.tensor { mf.tensor(1), mf.tensor { 2 } }, 'float32', { 2 }, { 1, 2 })
    is(mf.tensor({ mf.tensor(3), 4 }, { dtype = mf.int32 }), 'int32', { 2 }, { 3, 4 })
    local x = mf.ones(2):requires_grad_()
    local y = mf.tensor(x * 2)
    assert.is_false(y.requires_grad)
    y:zero_()
    assert.same({ 1, 1 }, x:tolist())
    is(mf.tensor(x, { dtype = mf.int64 }), 'int64', { 2 }, { 1, 1 })
  end)

  it('rounds as the dtype does', function()
    assert.equal(0.1, mf.tensor({ 0.1 }, { dtype = mf.float64 }):item())
    assert.equal(13421773 / 2 ^ 27, mf.tensor(0.1):item())
    assert.equal(0.0999755859375, mf.tensor(0.1, { dtype = mf.float16 }):item())
    assert.equal(0.10009765625, mf.tensor(0.1, { dtype = mf.bfloat16 }):item())
    assert.equal(math.huge, mf.tensor(1e39):item())
    is(mf.tensor({ 1.9, -1.9 }, { dtype = mf.int64 }), 'int64', { 2 }, { 1, -1 })
    is(mf.tensor({ 255.9, 0 }, { dtype = mf.uint8 }), 'uint8', { 2 }, { 255, 0 })
    local nan = mf.tensor { 0 / 0, 1 / 0, -1 / 0 }:tolist()
    assert(nan[1] ~= nan[1] and nan[2] == math.huge and nan[3] == -math.huge)
  end)

  it('refuses what a whole number cannot be', function()
    for dtype, range in pairs { uint8 = { 0, 255 }, int8 = { -128, 127 }, int16 = { -32768, 32767 },
      int32 = { -2 ^ 31, 2 ^ 31 - 1 } } do
      local o = { dtype = mf[dtype] }
      is(mf.tensor(range, o), dtype, { 2 }, range)
      fails(('tensor: data[1][2] is %d, which %s cannot hold'):format(range[2] + 1, dtype), mf.tensor,
        { { 0, range[2] + 1 } }, o)
      fails('cannot hold', mf.tensor, range[1] - 1, o)
      fails('cannot hold', mf.tensor, 0 / 0, o)
      fails('cannot hold', mf.tensor, math.huge, o)
    end
    fails('tensor: data is 9.2233720368547758e+18, which int64 cannot hold', mf.tensor, 2 ^ 63, { dtype = mf.int64 })
    assert.equal(-2 ^ 63, mf.tensor(-2 ^ 63, { dtype = mf.int64 }):double():item())
  end)

  it('is exact with int64 cdata', function()
    local x = mf.tensor { 9007199254740993LL, -2LL }
    assert.equal(mf.int64, x.dtype)
    assert.equal(9007199254740993LL, x[0]:item 'int64')
    assert.equal(-2, x[1]:item())
    assert.equal(9223372036854775807LL, mf.tensor { 9223372036854775807ULL }:item 'int64')
    fails('above 2^63 - 1', mf.tensor, { 9223372036854775808ULL })
    fails('cannot hold', mf.tensor, { 300LL }, { dtype = mf.uint8 })
    fails('item: 9007199254740993 is above 2^53', x[0].item, x[0])
    fails('tolist: 9007199254740993 is above 2^53', x.tolist, x)
    assert.equal(2 ^ 53, mf.tensor({ 2 ^ 53 }, { dtype = mf.int64 }):item())
    assert.same({ -2 ^ 53 }, mf.tensor({ -2 ^ 53 }, { dtype = mf.int64 }):tolist())
  end)

  it('names the place where rows differ', function()
    fails('tensor: data[2] has 1 entries, others in its place have 2', mf.tensor, { { 1, 2 }, { 3 } })
    fails('tensor: data[2] has 3 entries', mf.tensor, { { 1, 2 }, { 3, 4, 5 } })
    fails('tensor: data[2] is a number where others are tables', mf.tensor, { { 1 }, 2 })
    fails('tensor: data[2] is a table where others are numbers', mf.tensor, { 1, { 2 } })
    fails('tensor: data[1][2] has 0 entries, others in its place have 1', mf.tensor, { { { 1 }, {} } })
    fails('tensor: data[2] has 1 entries, others in its place have 0', mf.tensor, { {}, { 1 } })
  end)

  it('refuses other values, and tables with other keys', function()
    fails("tensor: data is the string '1'", mf.tensor, '1')
    fails("tensor: data[1][2] is the string 'a'", mf.tensor, { { 1, 'a' } })
    fails('tensor: data is nil', mf.tensor)
    fails('tensor: data is a function', mf.tensor, print)
    fails('tensor: data[1] is a tensor (2,) of float32', mf.tensor, { mf.ones(2) })
    for _, t in ipairs { { a = 1 }, { 1, 2, a = 3 }, { 1, nil, 3 }, { 1, [0] = 2 }, { 1, [1.5] = 2 }, { [2] = 1 } } do
      fails('tensor: data has keys other than 1, 2, ..., or holes', mf.tensor, t)
    end
    fails('tensor: data[2] has keys', mf.tensor, { { 1 }, { 1, dtype = mf.int64 } })
    local long = {}
    for i = 1, 1000 do long[i] = i end
    assert.equal(1000, mf.tensor(long):numel())
    long.x = 1
    fails('tensor: data has keys', mf.tensor, long)
    local downward = {}
    for i = 1000, 1, -1 do downward[i] = i end
    assert.is_true(mf.equal(mf.tensor(downward), mf.arange(1, 1001):float()))
  end)

  it('ends at tables that contain themselves', function()
    local t = {}
    t[1] = t
    fails('does a table contain itself?', mf.tensor, t)
    local u = { { 1 } }
    u[2] = u
    fails('tensor: data[2]', mf.tensor, u)
    local deep = 1
    for _ = 1, 5000 do deep = { deep } end
    fails('nested deeper than', mf.tensor, deep)
  end)

  it('is not confused by a tostring that changes the data', function()
    local ffi, global = require 'ffi', tostring
    local function mislead(data, change)
      _G.tostring = function(v)
        change(data)
        return global(v)
      end
      local ok, err = pcall(mf.tensor, data)
      _G.tostring = global
      assert.is_false(ok)
      assert.truthy(err:find('data[2] is', 1, true), err)
    end
    local one = ffi.new('int64_t', 1)
    mislead({ one, one, one }, function(data) data[2] = { 1 } end)
    mislead({ { one }, { one } }, function(data) data[2] = 5 end)
  end)

  it('clamped by a fraction are floats, as whole numbers with a fraction added are', function()
    local x = mf.tensor({ 1, 5 }, { dtype = mf.int64 })
    local y = x:clamp { min = 1.5 }
    assert.are.equal(mf.float32, y.dtype)
    assert.are.same({ 1.5, 5 }, y:tolist())
    assert.are.equal(mf.float32, x:clamp { max = math.huge }.dtype)
    assert.are.equal(mf.int64, x:clamp { min = 2 }.dtype)
    assert.has_error(function() x:clamp_ { min = 1.5 } end)
  end)

  it('reads its options', function()
    is(mf.tensor({ 1 }, { dtype = 'int64' }), 'int64', { 1 }, { 1 })
    assert.is_true(mf.tensor({ 1 }, { requires_grad = true }).requires_grad)
    assert.equal('meta', mf.tensor({ 1 }, { device = 'meta' }).device)
    fails("tensor: there is no option 'dtyp'", mf.tensor, { 1 }, { dtyp = mf.int64 })
    fails('tensor: only float tensors have gradients, this is int64', mf.tensor, 1,
      { dtype = mf.int64, requires_grad = true })
    fails('tensor: only float tensors have gradients, this is bool', mf.tensor, true, { requires_grad = true })
    fails('tensor: the second argument must be a table of options', mf.tensor, { 1 }, mf.int64)
    fails('tensor: the second argument must be a table of options', mf.tensor, 1, 2)
    fails("tensor: there is no device 'tpu'", mf.tensor, 1, { device = 'tpu' })
    fails('tensor: two arguments are possible', mf.tensor, 1, {}, 2)
    fails('tensor: dtype must be a dtype', mf.tensor, 1, { dtype = 'int65' })
  end)
end)

describe('an empty table of options', function()
  it('says nothing', function()
    local x = mf.arange(6):float():reshape(2, 3)
    assert.is_true(mf.equal(x:softmax(-1), mf.softmax(x, {})))
    assert.is_true(mf.equal(mf.rms_norm(x, 3), mf.rms_norm(x, 3, {})))
    assert.is_true(mf.equal(x:sum(), x:sum {}))
    assert.is_true(mf.equal(x:cumsum(0), x:cumsum(0, {})))
    assert.is_true(mf.equal(x:clamp(1), x:clamp(1, {})))
    fails('dim', x.cumsum, x, {})
  end)
end)

describe('item and tolist', function()
  it('give numbers and booleans', function()
    assert.equal(2.5, mf.tensor { { 2.5 } }:item())
    assert.equal(true, mf.tensor { true }:item())
    assert.equal(7, mf.tensor({ 7 }, { dtype = mf.uint8 }):item())
    assert.same({ { 1, 3 }, { 2, 4 } }, mf.tensor { { 1, 2 }, { 3, 4 } }:t():tolist())
    assert.same({ { 3, 2, 1 } }, mf.tensor { { 1, 2, 3 } }:flip(1):tolist())
    assert.same({ { 5, 5 }, { 5, 5 } }, mf.tensor(5):expand(2, 2):tolist())
  end)

  it('say what they need', function()
    fails('item: a tensor of one element is needed, this has shape (2,)', mf.ones(2).item, mf.ones(2))
    fails('item: a tensor of one element is needed, this has shape (0,)', mf.ones(0).item, mf.ones(0))
    local meta = mf.empty({ 1 }, { device = 'meta' })
    fails('item', meta.item, meta)
    fails('tolist: a tensor on the meta device has no data', meta.tolist, meta)
    fails("item: the only option is 'int64'", meta.item, mf.ones(1), 'int32')
    fails('item: the first argument must be a tensor', meta.item, 5)
  end)
end)

describe('a subscript', function()
  local x = mf.arange(12):reshape(3, 4)
  local function at(key) return function() return x[key] end end
  local function long(...) return mf.tensor({ ... }, { dtype = mf.int64 }) end

  it('out of range is an error with what is legal', function()
    fails('index: 3 is out of range for dim 0 of size 3; legal are -3 to 2', at(3))
    fails('index: -4 is out of range for dim 0 of size 3; legal are -3 to 2', at(-4))
    fails('index: 4 is out of range for dim 1 of size 4; legal are -4 to 3', at { 0, 4 })
    fails('index: 9007199254740992 is out of range', at(2 ^ 53))
    fails('index: indices[1] holds 9 at position (1,); legal are -3 to 2', at { long(0, 9) })
    fails('legal are -4 to 3', at { {}, long(-5) })
    fails('out of range', function() return mf.ones(0)[0] end)
  end)

  it('of the wrong kind is an error', function()
    fails('index: a subscript must be a whole number up to 2^53, is 1.5', at(1.5))
    fails('index: a subscript must be a whole number', at { 0, 0 / 0 })
    fails('index: a subscript must be a whole number', at(1 / 0))
    for _, key in ipairs { true, print, { print }, { 'a' }, { false } } do
      fails("index: a subscript is a number, a range {start, stop, step}, a tensor, '...' or mf.newaxis", at(key))
    end
    fails('index: subscripts for 3 dims, the tensor has 2: (3, 4)', at { 0, 0, 0 })
    fails('index: subscripts for 3 dims', at { {}, {}, {} })
    fails('subscripts for 1 dims, the tensor has 0', function() return mf.tensor(1)[0] end)
    fails("index: '...' can stand once", at { '...', '...' })
    fails('index: a tensor subscript must hold whole numbers or be bool, is float32', at(mf.ones(2)))
    fails('index: step must be at least 1, is 0; :flip() reverses', at { { 0, 3, 0 } })
    fails('index: step must be at least 1, is -1', at { { 0, 3, -1 } })
    fails('index: a range is {start, stop, step}, this has 4 entries; for a list of places use a tensor',
      at { { 1, 2, 3, 4 } })
    fails('index: the mask has shape (2,), the dims it is for have (3,)', at(mf.tensor { true, false }))
    fails('index: index tensors do not broadcast: indices[2] is (3,), the others are (2,)',
      at { long(0, 1), long(0, 1, 2) })
  end)

  it('of a name that a tensor has not is nil', function()
    assert.is_nil(x.no_such_field)
    assert.is_nil(x['1'])
  end)
end)

describe('an assignment', function()
  local x
  before_each(function() x = mf.arange(12):reshape(3, 4) end)

  it('that cannot be names the reason and changes nothing', function()
    local function put(key, value) return function() x[key] = value end end
    fails('src of shape (3,) does not broadcast to (4,)', put(0, mf.ones(3)))
    fails('src of shape (2,) does not broadcast to (4,)', put(0, { 1, 2 }))
    fails('does not broadcast', put({ {}, 0 }, mf.ones(4)))
    fails("is the string 'a'", put(0, 'a'))
    fails('is nil', put(0, nil))
    fails('data[2] has 0 entries', put({}, { { 1 }, {} }))
    fails('index: 5 is out of range for dim 0 of size 3', put(5, 1))
    fails('index: a subscript must be a whole number', put(0.5, 1))
    fails('index: subscripts for 3 dims', put({ 0, 0, 0 }, 1))
    fails('legal are -3 to 2', put({ mf.tensor({ 0, 3 }, { dtype = mf.int64 }) }, 1))
    fails('the mask has shape (4,)', put(mf.ones({ 4 }, { dtype = mf.bool }), 1))
    assert.is_true(mf.equal(x, mf.arange(12):reshape(3, 4)))
  end)

  it('converts as copy_ does', function()
    x[0] = 1.9
    x[1] = true
    x[2] = { 4, 3, 2, 1 }
    assert.same({ { 1, 1, 1, 1 }, { 1, 1, 1, 1 }, { 4, 3, 2, 1 } }, x:tolist())
  end)

  it('to a field is for data, grad and requires_grad', function()
    fails("a tensor has no field 'foo' to set; data, grad and requires_grad can be set", function() x.foo = 1 end)
    fails("a tensor has no field 'shape' to set", function() x.shape = { 1 } end)
    local y = mf.ones(2)
    y.requires_grad = true
    y.grad = mf.ones(2)
    fails('grad', function() y.grad = mf.ones(3) end)
    fails('grad', function() y.grad = 5 end)
    y.grad = nil
    assert.is_nil(y.grad)
    fails('leaf', function() (y * 2).requires_grad = false end)
  end)

  it('by what lies in the same memory reads it first', function()
    local function places(t) return mf.tensor(t, { dtype = mf.int64 }) end
    local z = mf.arange(0, 4)
    z[places { 3, 2, 1, 0 }] = z
    assert.are.same({ 3, 2, 1, 0 }, z:tolist())
    z = places { 2, 0, 1 }
    z[z] = z
    assert.are.same({ 0, 1, 2 }, z:tolist())
    assert.are.same({ 2, 1, 3 }, (function() z = places { 2, 0, 1 } return z:index_add_(0, z, z) end)():tolist())
    assert.are.same({ 2, 1, 3 }, (function() z = places { 2, 0, 1 } return z:scatter_add_(0, z, z) end)():tolist())
    assert.are.same({ 0, 1, 2 }, (function() z = places { 2, 0, 1 } return z:index_copy_(0, z, z) end)():tolist())
  end)

  it('mf.newaxis may stand alone', function()
    assert.are.same({ 1, 2 }, { unpack(mf.ones(2)[mf.newaxis].shape) })
    local z = mf.zeros(2)
    z[mf.newaxis] = mf.tensor { { 3, 4 } }
    assert.are.same({ 3, 4 }, z:tolist())
  end)

  it('into a view of expanded memory, or to a leaf, is an error', function()
    fails('expanded', function() mf.ones(1):expand(3)[{}] = mf.ones(3) end)
    fails('leaf', function() mf.ones(2):requires_grad_()[0] = 2 end)
  end)
end)

describe('mf.device', function()
  it('is where tensors are made for the time of a function', function()
    local a, b, c = mf.device('meta', function(n)
      assert.equal('meta', mf.get_default_device())
      return mf.ones(n, n), mf.tensor { 1, 2 }, mf.rand(2, { device = 'cpu' })
    end, 3)
    assert.same({ 'meta', 'meta', 'cpu' }, { a.device, b.device, c.device })
    assert.equal('cpu', mf.zeros(1).device)
    assert.equal('cpu', mf.device('meta', function() return c * 2 end).device)
    assert.equal('meta', mf.device 'meta')
  end)

  it('comes back after errors', function()
    fails('broken', mf.device, 'meta', function() error 'broken' end)
    assert.equal('cpu', mf.get_default_device())
    fails("there is no device 'tpu'", mf.device, 'tpu', print)
    fails('the second argument must be a function', mf.device, 'meta', 5)
  end)

  it('can be set', function()
    assert.equal('cpu', mf.set_default_device 'meta')
    finally(function() mf.set_default_device 'cpu' end)
    assert.equal('meta', mf.arange(3).device)
    assert.equal('meta', mf.randperm(3).device)
    assert.equal('cpu', mf.set_default_device 'cpu' == 'meta' and mf.eye(2).device)
  end)
end)
