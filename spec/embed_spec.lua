-- An installed moonflow: embedded in a C program that pkg-config compiles, and required by a LuaJIT
-- that is not ours.

describe('an installed tree', function()
  local folder, ready

  local function run(command)
    local p = io.popen('(' .. command .. ') 2>&1; echo "exit $?"')
    local text = p:read '*a'
    p:close()
    local output, code = text:match '^(.-)exit (%d+)\n$'
    return output, tonumber(code)
  end

  -- Make's variables come through the environment when it runs this. A sanitized library cannot be
  -- linked into a plain program.
  setup(function()
    folder = run('mktemp -d'):match '[^\n]+'
    if (os.getenv 'MAKEFLAGS' or ''):find 'SAN=' then return end
    local output, code = run('make install PREFIX=' .. folder .. ' DESTDIR=')
    assert.equal(0, code, output)
    assert.truthy(output:find('does not search ' .. folder .. '/lib', 1, true), output)
    ready = true
  end)
  teardown(function() run('rm -rf ' .. folder) end)

  local function environment()
    return ('PKG_CONFIG_PATH=%s/lib/pkgconfig LD_LIBRARY_PATH=%s/lib '):format(folder, folder)
  end

  it('compiles and runs examples/embed.c through pkg-config', function()
    if not ready then return pending 'needs a build without sanitizers' end
    local output, code = run('export ' .. environment() .. '; cc -std=c11 -Wall -Wextra -Werror examples/embed.c '
      .. '$(pkg-config --cflags --libs moonflow) -o ' .. folder .. '/embed && ' .. folder .. '/embed')
    assert.equal(0, code, output)
    local loss = tonumber(output:match 'loss ([%d.]+)')
    assert.truthy(loss and loss < 0.05, output)
    local answers = {}
    for x in output:gmatch '= ([%d.-]+)' do answers[#answers + 1] = math.floor(tonumber(x) + 0.5) end
    assert.same({ 0, 1, 1, 0 }, answers)
  end)

  it('has a header that compiles alone and a library that exports only mf_ names', function()
    if not ready then return pending 'needs a build without sanitizers' end
    local output, code = run('cc -std=c11 -Wall -Wextra -pedantic -Werror -fsyntax-only -x c '
      .. folder .. '/include/moonflow.h')
    assert.equal(0, code, output)
    output, code = run(('nm -D --defined-only %s/lib/libmoonflow.so'):format(folder))
    assert.equal(0, code, output)
    local n = 0
    for name in output:gmatch ' T ([^\n]+)' do
      n = n + 1
      assert.truthy(name:find '^mf_' or name:find '^luaopen_moonflow', name)
    end
    assert.is_true(n > 20)
    local declared = 0
    local header = io.open('src/api/moonflow.h'):read '*a':gsub('/%*.-%*/', ''):gsub('#[^\n]*', '')
    for name in header:gmatch 'MF_API[^;]-([%w_]+)%(' do
      declared = declared + 1
      assert.truthy(output:find(' T ' .. name .. '\n', 1, true), name .. ' is declared and not there')
    end
    assert.equal(n, declared)
  end)

  it('is required by another LuaJIT', function()
    if not ready then return pending 'needs a build without sanitizers' end
    local script = [[local mf = require "moonflow"; print((mf.tensor { 1, 2 } + 1):sum():item(), rawget(_G, "mf"))]]
    local command = "%s LUA_CPATH='%s/lib/lua/5.1/?.so' luajit -e '%s'"
    local output, code = run(command:format(environment(), folder, script))
    assert.equal(0, code, output)
    assert.equal('5\tnil\n', output)
  end)
end)
