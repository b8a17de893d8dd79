-- The layers of src/: what each folder's files may include, as the compiler sees it under the
-- Makefile's own flags; headers compile alone; README names all folders, lowest layer first.

-- Folder: what it may include besides itself.
local may = {
  base = '',
  tensor = 'base',
  device = 'base',
  comm = 'base tensor device',
  launch = 'base comm',
  op = 'base tensor device',
  file = 'base tensor device',
  eager = 'base tensor device comm op',
  graph = 'base tensor op',
  plan = 'base tensor op graph',
  pass = 'base tensor device op graph',
  runtime = 'base tensor device comm op plan',
  job = 'base tensor device comm op eager graph pass plan runtime',
  api = 'base tensor device comm launch op file eager graph pass plan runtime job',
  bind = 'base tensor device comm launch op file eager graph pass plan runtime job api',
}

local function lines_of(command)
  local list, pipe = {}, io.popen(command)
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

local function words(text)
  local set = {}
  for word in text:gmatch '%S+' do set[word] = true end
  return set
end

-- Compiles text as a file of the folder. Returns whether it did, and what the compiler said.
local function try(folder, text)
  local path = os.tmpname()
  os.rename(path, path .. '.c')
  path = path .. '.c'
  local f = assert(io.open(path, 'w'))
  f:write(text, '\n')
  f:close()
  local status = os.execute(('make -s try AS=%s TRY=%s > %s.log 2>&1'):format(folder, path, path))
  f = assert(io.open(path .. '.log'))
  local said = f:read '*a'
  f:close()
  os.remove(path)
  os.remove(path .. '.log')
  return status == 0, said
end

-- A header of each folder that has one: names differ, so one proves the folder's place.
local function headers()
  local list = {}
  for _, path in ipairs(lines_of 'ls src/*/*.h') do
    local folder, name = path:match '^src/(%w+)/(.*)$'
    list[folder] = list[folder] or name
  end
  return list
end

describe('layers', function()
  it('do not compile with a forbidden include', function()
    local ok, said = try('tensor', '#include "device.h"')
    assert.is_false(ok)
    assert.truthy(said:find('device.h: No such file', 1, true) or said:find("'device.h' file not found", 1, true), said)
    ok, said = try('tensor', '#include "err.h"\nint x;')
    assert.is_true(ok, said)
  end)

  for _, folder in ipairs(lines_of "find src -mindepth 1 -maxdepth 1 -type d -printf '%f\\n' | sort") do
    it('let src/' .. folder .. ' see just what is below', function()
      assert.is_truthy(may[folder], 'a folder without a place')
      local allowed, text = words(may[folder] .. ' ' .. folder), {}
      for other, header in pairs(headers()) do
        text[#text + 1] = ('#if %s__has_include("%s")\n#error %s\n#endif'):format(allowed[other] and '!' or '', header,
          (allowed[other] and 'lacks ' or 'sees ') .. other)
      end
      local ok, said = try(folder, table.concat(text, '\n') .. '\nint x;')
      assert.is_true(ok, said)
    end)
  end

  it('keep LuaJIT to src/bind', function()
    for folder in pairs(may) do
      local ok, said = try(folder, '#include <lua.h>\nint x;')
      assert.equal(folder == 'bind', ok, folder .. ': ' .. said)
    end
  end)

  it('have headers that compile alone', function()
    local log = lines_of 'make -s headers 2>&1; echo $?'
    assert.equal('0', log[#log], table.concat(log, '\n'))
  end)

  it('are described in README, lowest first, in the order of the Makefile', function()
    local layers, f = nil, assert(io.open 'Makefile')
    for line in f:lines() do layers = layers or line:match '^LAYERS := (.*)' end
    f:close()
    f = assert(io.open 'README.md')
    local described = {}
    for line in f:lines() do described[#described + 1] = line:match '^%*%*`src/(%w+)/`%*%*' end
    f:close()
    assert.equal(layers, table.concat(described, ' '))
  end)

  it('include only what comes before in that order', function()
    local seen = {}
    for line in io.lines 'Makefile' do
      for folder in (line:match '^LAYERS := (.*)' or ''):gmatch '%w+' do
        for below in pairs(words(may[folder])) do assert.is_true(seen[below], folder .. ' before ' .. below) end
        seen[folder] = true
      end
    end
    for folder in pairs(may) do assert.is_true(seen[folder], folder) end
  end)
end)
