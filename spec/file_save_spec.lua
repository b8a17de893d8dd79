-- mf.save, mf.load and idx files as Lua sees them. What hostile files do in detail is in spec/c/file_*_spec.c.
local mf = require 'moonflow'

describe('files', function()
  local folder

  setup(function()
    local p = io.popen 'mktemp -d'
    folder = p:read '*l'
    p:close()
  end)
  teardown(function() os.execute('rm -rf ' .. folder) end)

  local function path(name) return folder .. '/' .. (name or 'x.safetensors') end

  local function put(name, bytes)
    local f = assert(io.open(path(name), 'wb'))
    f:write(bytes)
    f:close()
    return path(name)
  end

  -- A file with this header and data.
  local function safetensors(header, data)
    local n, size = #header, ''
    for _ = 1, 8 do
      size = size .. string.char(n % 256)
      n = math.floor(n / 256)
    end
    return put('x.safetensors', size .. header .. data)
  end

  -- f fails, and the error has all these texts.
  local function fails(f, ...)
    local ok, message = pcall(f)
    assert.is_false(ok)
    for i = 1, select('#', ...) do
      local text = select(i, ...)
      assert.truthy(message:find(text, 1, true), message .. '\nlacks ' .. text)
    end
  end

  local DTYPES = { 'float32', 'float64', 'float16', 'bfloat16', 'int8', 'uint8', 'int16', 'int32', 'int64', 'bool' }

  it('give back every dtype, shape and value', function()
    local saved = {}
    for _, name in ipairs(DTYPES) do
      local values = { { 1, 2, 3 }, { 4, 0, 127 } }
      if name == 'bool' then values = { { true, false, true }, { false, false, true } } end
      saved[name] = mf.tensor(values, { dtype = mf[name] })
    end
    saved.scalar = mf.tensor(2.5)
    saved.empty = mf.tensor({}, { dtype = mf.int64 })
    mf.save(saved, path())
    local loaded = mf.load(path())
    local n = 0
    for name, t in pairs(loaded) do
      n = n + 1
      assert.equal(saved[name].dtype, t.dtype, name)
      assert.same(tostring(saved[name].shape), tostring(t.shape), name)
      assert.same(saved[name]:tolist(), t:tolist(), name)
    end
    assert.equal(12, n)
  end)

  it('hold the bytes that the format prescribes', function()
    local w, i = mf.tensor { { 1, 2 }, { 3, 4 } }, mf.tensor({ 7 }, { dtype = mf.int16 })
    mf.save({ w = w, i = i }, path(), { metadata = { k = 'v' } })
    local f = io.open(path(), 'rb')
    local bytes = f:read '*a'
    f:close()
    local header = '{"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},'
      .. '"i":{"dtype":"I16","shape":[1],"data_offsets":[16,18]}}'
    local padding = (' '):rep(-#header % 8)
    local n = #header + #padding
    assert.equal(string.char(n) .. ('\0'):rep(7) .. header .. padding, bytes:sub(1, 8 + n))
    assert.equal('\0\0\128\63\0\0\0\64\0\0\64\64\0\0\128\64\7\0', bytes:sub(9 + n))
  end)

  it('store views row by row, and record no gradient', function()
    local x = mf.tensor({ { 1, 2, 3 }, { 4, 5, 6 } }, { requires_grad = true })
    mf.save({ t = x:t(), row = x[1], column = x[{ {}, 1 }] }, path())
    local y = mf.load(path())
    assert.same({ { 1, 4 }, { 2, 5 }, { 3, 6 } }, y.t:tolist())
    assert.same({ 4, 5, 6 }, y.row:tolist())
    assert.same({ 2, 5 }, y.column:tolist())
    assert.is_false(y.t.requires_grad)
  end)

  it('keep metadata and can be loaded without data', function()
    mf.save({ a = mf.tensor { 1, 2 } }, path(), { metadata = { step = '12', note = 'a "b"\n' } })
    local t, metadata = mf.load(path(), { device = 'meta' })
    assert.same({ step = '12', note = 'a "b"\n' }, metadata)
    assert.equal('(2,)', tostring(t.a.shape))
    fails(function() mf.load(path(), { device = 'tpu' }) end, 'load', 'tpu')
  end)

  it('are the same bytes for the same tensors', function()
    local function bytes(order)
      local t = {}
      for _, k in ipairs(order) do t[k] = mf.tensor { #k } end
      mf.save(t, path(), { metadata = { [order[1]] = '', [order[2]] = '' } })
      local f = io.open(path(), 'rb')
      local text = f:read '*a'
      f:close()
      return text
    end
    local a = bytes { 'a', 'bb', 'ccc', 'd', 'e', 'f' }
    mf.save({}, path())
    assert.equal(a, bytes { 'bb', 'a', 'f', 'e', 'ccc', 'd' })
  end)

  it('refuse what cannot be saved, naming it, and leave the old file', function()
    mf.save({ a = mf.tensor { 1 } }, path())
    local freed = mf.tensor { 1, 2 }
    freed:free()
    fails(function() mf.save({ a = freed }, path()) end, 'save', "'a'", 'freed')
    fails(function() mf.save({ ['\255'] = mf.tensor { 1 } }, path()) end, 'save', path(), 'UTF-8')
    fails(function() mf.save({ ['a\0b'] = mf.tensor { 1 } }, path()) end, 'save', 'zero byte')
    fails(function() mf.save({ __metadata__ = mf.tensor { 1 } }, path()) end, 'save', path(), '__metadata__')
    fails(function() mf.save({ a = mf.tensor { 1 } }, path(), { metadata = { k = 1 } }) end, 'save', 'metadata')
    fails(function() mf.save({ a = 1 }, path()) end, 'save', 'a is a number')
    local nowhere = '/nowhere/x.safetensors'
    fails(function() mf.save({ a = mf.tensor { 1 } }, nowhere) end, 'save: ' .. nowhere, 'No such file')
    assert.same({ 1 }, mf.load(path()).a:tolist())
    local p = io.popen('ls -A ' .. folder)
    assert.equal('x.safetensors\n', p:read '*a')
    p:close()
  end)

  it('that are hostile give an error with file and reason', function()
    local function entry(dtype, shape, offsets)
      return ('{"dtype":"%s","shape":%s,"data_offsets":%s}'):format(dtype, shape, offsets)
    end
    local function refused(why, header, data)
      safetensors(header, data or '')
      fails(function() mf.load(path()) end, 'load: ' .. path(), why)
    end
    refused('truncated', '{"a":' .. entry('F32', '[2]', '[0,8]') .. '}', '1234')
    refused('dtype', '{"a":' .. entry('F31', '[1]', '[0,4]') .. '}', '1234')
    refused('negative', '{"a":' .. entry('F32', '[-1]', '[0,4]') .. '}', '1234')
    refused('overflows', '{"a":' .. entry('F32', '[4611686018427387904,4]', '[0,0]') .. '}')
    refused('twice', '{"a":' .. entry('U8', '[1]', '[0,1]') .. ',"a":' .. entry('U8', '[1]', '[1,2]') .. '}', '12')
    refused('overlaps', '{"a":' .. entry('U8', '[2]', '[0,2]') .. ',"b":' .. entry('U8', '[2]', '[1,3]') .. '}', '123')
    refused('bool', '{"a":' .. entry('BOOL', '[1]', '[0,1]') .. '}', '2')
    refused('JSON', '{"a":', '')
    put('x.safetensors', ('\255'):rep(8) .. '{}')
    fails(function() mf.load(path()) end, 'load: ' .. path(), 'header')
    fails(function() mf.load '/nowhere/x.safetensors' end, 'load: /nowhere/x.safetensors', 'No such file')
  end)

  it('of the idx kind are read, plain and compressed', function()
    local images = '\0\0\8\3\0\0\0\2\0\0\0\1\0\0\0\3abcdef'
    local t = mf._idx_load(put('i', images))
    assert.equal(mf.uint8, t.dtype)
    assert.same({ { { 97, 98, 99 } }, { { 100, 101, 102 } } }, t:tolist())
    os.execute('gzip -f ' .. path 'i')
    assert.same(t:tolist(), mf._idx_load(path 'i.gz'):tolist())
    local big = mf._idx_load(put('b', '\0\0\12\1\0\0\0\2\255\255\255\254\0\0\1\2'))
    assert.equal(mf.int32, big.dtype)
    assert.same({ -2, 258 }, big:tolist())
    fails(function() mf._idx_load(put('s', images:sub(1, -2))) end, 'load: ' .. path 's', '5 follow')
    fails(function() mf._idx_load(put('m', 'hello')) end, 'load: ' .. path 'm', 'idx')
    fails(function() mf._idx_load '/nowhere' end, 'load: /nowhere', 'No such file')
  end)
end)
