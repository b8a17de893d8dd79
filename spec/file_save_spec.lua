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
    local t, metadata = mf.load(path(), { device = 'meta', metadata = true })
    assert.same({ step = '12', note = 'a "b"\n' }, metadata)
    assert.equal('(2,)', tostring(t.a.shape))
    fails(function() mf.load(path(), { device = 'tpu' }) end, 'load', 'tpu')
  end)

  it('of a state dict can be handed on at once, whatever their metadata', function()
    local nn = mf.nn
    local from, to = nn.Linear(2, 3), nn.Linear(2, 3)
    mf.save(from:state_dict(), path(), { metadata = { epoch = '1', strict = 'false' } })
    to:load_state_dict(mf.load(path()))
    assert.is_true(mf.equal(from.weight, to.weight))
    assert.equal(1, select('#', mf.load(path())))
  end)

  it('give back nested tables with numbers, strings and booleans', function()
    local value = { n = 1.5, big = 2 ^ 53, huge = math.huge, low = -math.huge, tenth = 0.1, yes = true, no = false,
      text = 'a "b"\\\n\127\1 \195\164', [0] = 'zero', [7] = { [1] = 1, [3] = 3 }, list = { 1, { 'x', {} }, false },
      ['#tensor'] = 'no tensor', deep = { ['#keys'] = 1, ['a.b'] = { c = 2 } }, [1.5] = 'half' }
    mf.save(value, path())
    assert.same(value, mf.load(path()))
    mf.save({ nan = 0 / 0 }, path())
    local nan = mf.load(path()).nan
    assert.is_true(nan ~= nan)
    mf.save({ step = 3, model = { b = mf.tensor { 1, 2 }, a = mf.tensor { 3 } }, ['x.y'] = mf.tensor(4) }, path(),
      { metadata = { k = 'v' } })
    local t, metadata = mf.load(path(), { metadata = true })
    assert.same({ { 1, 2 }, { 3 }, 4, 3 }, { t.model.b:tolist(), t.model.a:tolist(), t['x.y']:item(), t.step })
    assert.same({ k = 'v' }, metadata)
    local names = {}
    for name in pairs(mf.load(path(), { nested = false })) do names[#names + 1] = name end
    table.sort(names)
    assert.same({ 'model.a', 'model.b', 'x.y' }, names)
    assert.same({ 3 }, mf.load(path(), { prefix = 'model.' }).a:tolist())
  end)

  it('take the state of an optimiser and a scheduler whole', function()
    local function made()
      mf.manual_seed(1)
      local model = mf.nn.Linear(2, 2)
      local opt = mf.optim.AdamW(model:parameters(), { lr = 0.1 })
      return model, opt, mf.optim.lr_scheduler.StepLR(opt, 2)
    end
    local function train(model, opt, schedule, n)
      for i = 1, n do
        opt:zero_grad()
        model(mf.ones(3, 2) * i):square():sum():backward()
        opt:step()
        schedule:step()
      end
    end
    local model, opt, schedule = made()
    train(model, opt, schedule, 3)
    mf.save({ model = model:state_dict(), opt = opt:state_dict(), schedule = schedule:state_dict() }, path())
    train(model, opt, schedule, 3)
    local again, opt2, schedule2 = made()
    local saved = mf.load(path())
    again:load_state_dict(saved.model)
    opt2:load_state_dict(saved.opt)
    schedule2:load_state_dict(saved.schedule)
    train(again, opt2, schedule2, 3)
    assert.is_true(mf.equal(model.weight, again.weight))
    assert.equal(opt.param_groups[1].lr, opt2.param_groups[1].lr)
    mf.save(opt:state_dict(), path())
    opt2:load_state_dict(mf.load(path()))
    fails(function() mf.save(model, path()) end, 'this is a Linear; save its :state_dict()')
    fails(function() mf.save({ opt = opt }, path()) end, 'opt is a AdamW; save its :state_dict()')
  end)

  it('whose tree is hostile give an error', function()
    for _, tree in ipairs { '', '{', '5', '{"a": {"#tensor": "b"}}', '{"a": {"#tensor": 1}}', '{"#keys": 5}',
      '{"#keys": [5]}', '{"#keys": [[true, 1]]}', '{"#keys": [[null, 1]]}', '{"#keys": [[{"#number": "nan"}, 1]]}',
      '{"#number": "x"}', '{} {}', ('['):rep(100), '{"#number": {}}' } do
      local quoted = tree:gsub('"', '\\"')
      safetensors(('{"__metadata__":{"moonflow":"%s"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'):format(
        quoted), 'x')
      fails(function() mf.load(path()) end, 'load: ' .. path(), "'moonflow' is damaged")
      assert.equal(120, mf.load(path(), { nested = false }).a:item())
    end
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
    fails(function() mf.save({ a = print }, path()) end, 'save', 'a is a function')
    fails(function() mf.save({ a = { b = mf.float32 } }, path()) end, 'save', 'a.b is a userdata')
    fails(function() mf.save({ [true] = mf.tensor { 1 } }, path()) end, 'save', 'a key that is true')
    fails(function() mf.save({ a = 'x\0y' }, path()) end, 'save', 'a holds a zero byte')
    fails(function() mf.save({ a = 1 }, path(), { metadata = { moonflow = '' } }) end, 'save', "'moonflow' is taken")
    local loop = { b = {} }
    loop.b.c = loop
    fails(function() mf.save(loop, path()) end, 'save', 'contains itself at b.c')
    local deep = {}
    for _ = 1, 100 do deep = { a = deep } end
    fails(function() mf.save(deep, path()) end, 'save', 'too many tables')
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
