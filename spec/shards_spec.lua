-- Checkpoints of many ranks: what was saved under one placement is loaded under others, whole, and again under
-- the first; what goes wrong on one rank is told on all and leaves the checkpoint before as it was; an index
-- from elsewhere is read with care.
local mf = require 'moonflow'
local comm = mf.comm

local folder

local function files()
  local list = {}
  for name in io.popen('ls ' .. folder):lines() do list[#list + 1] = name end
  return table.concat(list, ' ')
end

local function read(name)
  local f = assert(io.open(folder .. '/' .. name, 'rb'))
  local text = f:read '*a'
  f:close()
  return text
end

local function write(name, text)
  local f = assert(io.open(folder .. '/' .. name, 'wb'))
  f:write(text)
  f:close()
end

-- Runs f(rank, folder) on n ranks.
local function on(n, f, o)
  o = o or {}
  o.timeout = 20
  local at = folder
  return comm._spawn(n, function(r) return f(r, at) end, o)
end

-- A state of 4 ranks in a grid, split in all ways.
local function save_grid(_, at)
  local m = require 'moonflow'
  local grid = m.placement('cpu', { { 0, 1 }, { 2, 3 } })
  local function lay(sbp, ...)
    local n = 1
    for _, size in ipairs { ... } do n = n * size end
    return m.distribute(m.arange(n):view(...):to(m.float64), grid, sbp)
  end
  local state = { model = { rows = lay({ 'S0', 'S0' }, 7, 3), cells = lay({ 'S1', 'S0' }, 5, 6),
    all = lay({ 'B', 'B' }, 4), half = lay({ 'B', 'S1' }, 3, 4), few = lay({ 'S0', 'S0' }, 2, 2),
    none = lay({ 'S0', 'B' }, 0, 3),
    sum = m.ones(3):to_global(grid, { 'P', 'B' }), scalar = lay({ 'B', 'B' }, 1):reshape {},
    flags = lay({ 'S0', 'B' }, 6):gt(2) } }
  state.step, state.note, state.losses, state.own = 7, 'say "so"', { 3.5, 2.25 }, m.tensor { 1, 2 }
  m.save(state, at, { sharded = true })
end

local function arange(...)
  local n = 1
  for _, size in ipairs { ... } do n = n * size end
  return mf.arange(n):view(...):to(mf.float64):tolist()
end

local function expected()
  return { rows = arange(7, 3), cells = arange(5, 6), all = arange(4), half = arange(3, 4), few = arange(2, 2),
    none = {}, sum = { 2, 2, 2 }, scalar = 0, flags = { false, false, false, true, true, true } }
end

local function lists(model)
  local t = {}
  for name, x in pairs(model) do t[name] = x:tolist() end
  return t
end

describe('a checkpoint in a folder', function()
  before_each(function()
    folder = os.tmpname()
    os.remove(folder)
  end)
  after_each(function() os.execute('chmod -R u+w ' .. folder .. ' 2>/dev/null; rm -rf ' .. folder) end)

  it('is written by the ranks that own the parts, and read whole by one', function()
    on(4, save_grid)
    assert.equal('1-00000.safetensors 1-00001.safetensors 1-00002.safetensors 1-00003.safetensors index.json', files())
    local c = mf.load(folder)
    assert.same(expected(), lists(c.model))
    assert.same({ 7, 'say "so"', { 3.5, 2.25 }, { 1, 2 } }, { c.step, c.note, c.losses, c.own:tolist() })
    assert.equal('(0, 3)', tostring(c.model.none.shape))
    assert.equal(mf.bool, c.model.flags.dtype)
    local names = mf.load(folder, { prefix = 'model.' })
    assert.same(expected(), lists(names))
    local total = 0
    for r = 0, 3 do
      local parts = mf._safetensors_load(('%s/1-%05d.safetensors'):format(folder, r))
      for _, t in pairs(parts) do total = total + t:numel() end
    end
    assert.equal(21 + 30 + 4 + 12 + 4 + 3 + 1 + 6 + 2, total) -- nothing twice
  end)

  it('is read under other placements, each rank its part', function()
    on(4, save_grid)
    for n = 1, 3 do
      local got = on(n, function(_, at)
        local m = require 'moonflow'
        local p = m.placement 'cpu'
        local c = m.load(at, { placement = p })
        local back, parts = {}, {}
        for _, name in ipairs(getmetatable(c.model).order) do -- in one order on all ranks, since reading is together
          local x = c.model[name]
          back[name], parts[name] = x:tolist(), tostring(x:to_local().shape)
        end
        local columns = m.load(at, { placement = p, sbp = function(name, shape)
          return #shape == 2 and name ~= 'model.none' and 'S1' or 'B'
        end })
        local other = {}
        for _, name in ipairs(getmetatable(columns.model).order) do other[name] = columns.model[name]:tolist() end
        return { back, parts.rows, other, tostring(columns.model.cells.sbp), c.step }
      end)
      for r = 1, n do
        local rows = ({ { 7 }, { 4, 3 }, { 3, 2, 2 } })[n][r]
        assert.same({ expected(), ('(%d, 3)'):format(rows), expected(), '(S1)', 7 }, got[r])
      end
    end
  end)

  it('goes on with model and optimiser under another plan, and to one file and back', function()
    local function train(n, from, to, steps, layout)
      local got = on(n, function(_, at)
        local m = require 'moonflow'
        local p = m.placement 'cpu'
        m.manual_seed(3)
        local net = m.nn.Sequential(m.nn.Linear(6, 5), m.nn.Tanh(), m.nn.Linear(5, 2)):to(m.float64)
        net:to_global(p, function(name) return name:find 'weight' and layout or 'B' end)
        local opt = m.optim.AdamW(net:parameters(), { lr = 0.05 })
        if from then
          local c = m.load(from == 'folder' and at or at .. '/' .. from, { placement = p })
          net:load_state_dict(c.net)
          opt:load_state_dict(c.opt)
        end
        local x = m.distribute(m.arange(24):view(4, 6):to(m.float64) / 10, p, 'B')
        local losses = {}
        for i = 1, steps do
          opt:zero_grad()
          local loss = net(x):square():mean()
          loss:backward()
          opt:step()
          losses[i] = loss:item()
        end
        local state = { net = net:state_dict(), opt = opt:state_dict() }
        if to == 'folder' then m.save(state, at, { sharded = true })
        elseif to then m.save(state, at .. '/' .. to, { global_dst_rank = 0 }) end
        return losses
      end)
      return got[1]
    end
    os.execute('mkdir ' .. folder)
    local straight = train(1, nil, nil, 9, 'B')
    local parts = { train(4, nil, 'folder', 3, 'S0'), train(2, 'folder', 'one.safetensors', 3, 'S1'),
      train(3, 'one.safetensors', nil, 3, 'S0') }
    for k = 0, 8 do
      local loss = parts[math.floor(k / 3) + 1][k % 3 + 1]
      assert(math.abs(loss - straight[k + 1]) < 1e-12, ('step %d: %.17g, %.17g'):format(k, loss, straight[k + 1]))
    end
  end)

  it('takes the place of the one before, at one moment', function()
    on(4, save_grid)
    on(2, function(_, at)
      local m = require 'moonflow'
      m.save({ x = m.distribute(m.arange(4), m.placement 'cpu', 'S0') }, at, { sharded = true })
    end)
    assert.equal('2-00000.safetensors 2-00001.safetensors index.json', files())
    assert.same({ 0, 1, 2, 3 }, mf.load(folder).x:tolist())
  end)

  it('stays as it was where a rank cannot write', function()
    on(4, save_grid)
    os.execute('mkdir ' .. folder .. '/2-00002.safetensors') -- where rank 2 is to write
    local _, errors = on(4, save_grid, { catch = true })
    for r = 1, 4 do assert.truthy(errors[r]:find 'save: rank 2: .*2%-00002', errors[r]) end
    assert.same(expected(), lists(mf.load(folder).model))
    os.execute('rmdir ' .. folder .. '/2-00002.safetensors')
    on(4, save_grid)
    assert.same(expected(), lists(mf.load(folder).model))
  end)

  it('is refused where it could not be read again, and the one before stays', function()
    mf.save({ x = mf.arange(2) }, folder, { sharded = true })
    for text, bad in pairs { ['UTF%-8'] = { x = mf.ones(2), note = 'caf\233' }, ['occurs twice'] =
      { a = { b = mf.ones(2) }, ['a.b'] = mf.ones(2) } } do
      local ok, why = pcall(mf.save, bad, folder, { sharded = true })
      assert(not ok and why:find(text), tostring(why))
      assert.same({ 0, 1 }, mf.load(folder).x:tolist())
    end
  end)

  it('is saved beside one whose index is damaged, which is put aside', function()
    mf.save({ x = mf.arange(2) }, folder, { sharded = true })
    write('index.json', 'no index')
    mf.save({ x = mf.arange(3) }, folder, { sharded = true })
    assert.same({ 0, 1, 2 }, mf.load(folder).x:tolist())
    assert.equal('no index', read 'index.json.damaged')
    assert.truthy(files():find('1-00000.safetensors', 1, true))
    mf.save({ x = mf.arange(4) }, folder, { sharded = true })
    assert.same({ 0, 1, 2, 3 }, mf.load(folder).x:tolist())
  end)

  it('is refused where ranks would save different things', function()
    local _, errors = on(2, function(r, at)
      local m = require 'moonflow'
      m.save({ x = m.zeros(2 + r) }, at, { sharded = true })
    end, { catch = true })
    for r = 1, 2 do assert.truthy(errors[r]:find 'the ranks would save different things', errors[r]) end
  end)

  it('has an index that is read with care', function()
    mf.save({ a = mf.arange(6):view(2, 3), b = mf.ones(2) }, folder, { sharded = true })
    local good = read 'index.json'
    local a = '"shape": [2, 3], "parts": [{"file": "1-00000.safetensors", "start": [0, 0], "size": [2, 3]}]'
    local function swapped(from, to) return (good:gsub((from:gsub('%p', '%%%0')), (to:gsub('%%', '%%%%')))) end
    local function with(text) return swapped(a, text) end
    local function parts(...)
      local list = {}
      for i, box in ipairs { ... } do
        list[i] = ('{"file": "1-00000.safetensors", "start": [%s], "size": [%s]}'):format(box[1], box[2])
      end
      return with('"shape": [2, 3], "parts": [' .. table.concat(list, ', ') .. ']')
    end
    local cases = {
      { '', 'damaged' },
      { '[1]', 'damaged' },
      { good:sub(1, -5), 'damaged' },
      { swapped('"version": 1', '"version": 9'), 'version is 9' },
      { swapped('"save": 1', '"save": -1'), 'no checkpoint' },
      { swapped('"tree": null', '"tree": "x"'), 'no object' },
      { swapped('int64', 'int65'), 'dtype' },
      { swapped('int64', 'ones'), 'dtype' },
      { swapped('int64', 'int32'), 'not the tensor' },
      { swapped('"name": "a"', '"name": 5'), 'no name' },
      { swapped('"name": "a"', '"name": "c"'), "no tensor 'c'" },
      { swapped('1-00000', '../1-00000'), 'none of a checkpoint' },
      { swapped('1-00000', '7-00000'), 'cannot open' },
      { with '"shape": [3, 3], "parts": []', 'do not cover' },
      { with '"shape": [2, -3], "parts": []', 'no count' },
      { with '"shape": [2.5, 3], "parts": []', 'no count' },
      { with '"shape": 6, "parts": []', 'no shape' },
      { with '"shape": [2, 3]', 'no parts' },
      { parts { '0, 0', '2, 2' }, 'do not cover' },
      { parts { '0', '2' }, 'other dims' },
      { parts { '1, 0', '2, 3' }, 'outside' },
      { parts { '0, -1', '2, 3' }, 'outside' },
      { parts { '0, 0', '2, 1e300' }, 'outside' },
      { parts({ '0, 0', '1, 3' }, { '0, 0', '1, 3' }), 'overlap' },
      { parts({ '0, 0', '1, 3' }, { '1, 0', '1, 3' }), 'not the tensor' },
    }
    for _, case in ipairs(cases) do
      assert(case[1] ~= good, 'the case changes nothing: ' .. case[2])
      write('index.json', case[1])
      local ok, text = pcall(mf.load, folder)
      assert(not ok and text:find(case[2], 1, true), case[2] .. ': ' .. tostring(text))
    end
    write('index.json', good)
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 } }, mf.load(folder).a:tolist())
    local f = read '1-00000.safetensors'
    write('1-00000.safetensors', f:sub(1, -2))
    assert.has_error(function() mf.load(folder) end)
  end)

  it('wants its options right', function()
    local function fails(pattern, f, ...)
      local ok, text = pcall(f, ...)
      assert(not ok and text:find(pattern, 1, true), tostring(text))
    end
    local x = { x = mf.ones(2) }
    fails('goes with neither', mf.save, x, folder, { sharded = true, metadata = {} })
    fails('goes with neither', mf.save, x, folder, { sharded = true, global_dst_rank = 0 })
    fails('must end in .safetensors', mf.save, x, folder)
    fails('is a file, not a folder', mf.save, x, '/dev/null', { sharded = true })
    fails('cannot make the folder', mf.save, x, folder .. '/no/such', { sharded = true })
    fails('sbp goes with a placement', mf.load, folder, { sbp = 'B' })
    fails('placement must be a placement', mf.load, folder, { placement = 'cpu' })
    fails('cannot open', mf.load, folder)
  end)
end)
