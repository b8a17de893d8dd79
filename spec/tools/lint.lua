-- The rules of this tree that no compiler checks: luajit spec/tools/lint.lua BUILD LAYER...
-- `make lint` has compiled everything before, and each header alone.
local build = arg[1]
local layers = { unpack(arg, 2) }

local n_findings = 0
local function finding(...)
  n_findings = n_findings + 1
  print(string.format(...))
end

local function lines_of(command)
  local list, pipe = {}, io.popen(command)
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

local function read(path)
  local f = assert(io.open(path, 'rb'))
  local text = f:read '*a'
  f:close()
  return text
end

local sources = lines_of "ls src/*.c src/*/*.[ch] 2>/dev/null"
local own = lines_of "ls examples/*.c spec/c/*.[ch] 2>/dev/null"

-- Text without comments, strings kept, line numbers kept.
local function code_of(text)
  return (text:gsub('/%*.-%*/', function(comment) return (comment:gsub('[^\n]', '')) end):gsub('//[^\n]*', ''))
end

local function each_line(text, found)
  local n = 0
  for line in (text .. '\n'):gmatch '(.-)\n' do
    n = n + 1
    found(n, line)
  end
end

-- Headers have one name in all folders, and are included by it.
local function check_includes()
  local folder_of = {}
  for _, path in ipairs(sources) do
    local folder, name = path:match '^src/(%w+)/([^/]+%.h)$'
    if name and folder_of[name] then
      finding('%s: src/%s has a header of that name too', path, folder_of[name])
    end
    if name then folder_of[name] = folder end
    each_line(read(path), function(n, line)
      local what = line:match '^%s*#%s*include%s+"([^"]*)"'
      if what and what:find '/' then finding('%s:%d: included by path, not by bare name: %s', path, n, what) end
    end)
  end
end

-- What only some files may do.
local rules = {
  { 'case%s+OP_%l', 'a test for one op belongs into the op\'s own file', { 'src/op/', 'src/pass/' } },
  { '==%s*OP_%l', 'a test for one op belongs into the op\'s own file', { 'src/op/', 'src/pass/' } },
  { '%f[%w_]f?printf%s*%(', 'the library never prints', { 'src/main.c', 'src/bind/program.c', 'src/base/err.c' } },
  { '%f[%w_]f?puts%s*%(', 'the library never prints', { 'src/main.c', 'src/bind/program.c', 'src/base/err.c' } },
  { '%f[%w_]_?exit%s*%(', 'the library never exits', { 'src/main.c', 'src/launch/launch.c' } },
  { '%f[%w_]abort%s*%(', 'the library aborts in one place', { 'src/base/err.c' } },
  { '%f[%w_]setlocale%s*%(', 'the locale is the host\'s', {} },
  { '%f[%w_]signal%s*%(', 'signals are the program\'s', { 'src/main.c' } },
  { '%f[%w_]sigaction%s*%(', 'signals are the program\'s', { 'src/main.c' } },
  { '#%s*pragma omp', 'only mf_parallel knows OpenMP', { 'src/base/thread.c' } },
}

local function check_rules()
  for _, path in ipairs(sources) do
    local code = code_of(read(path)):gsub('"[^"\n]*"', '""')
    for _, rule in ipairs(rules) do
      local free = false
      for _, place in ipairs(rule[3]) do free = free or path:sub(1, #place) == place end
      if not free then
        each_line(code, function(n, line)
          if line:find(rule[1]) then finding('%s:%d: %s: %s', path, n, rule[2], line:match '^%s*(.-)%s*$') end
        end)
      end
    end
  end
end

-- Modules spread over files of other names.
local modules = { tensor = { 'shape' }, device = { 'stream', 'meta' }, op = { 'sbp' }, eager = { 'call' } }

-- A global symbol's name begins with its folder, a file of its folder, a module of it, or mf_; and no
-- variable is writable that several threads share.
local function check_symbols()
  for _, folder in ipairs(layers) do
    local prefixes = { folder, 'mf', 'luaopen', unpack(modules[folder] or {}) }
    for _, path in ipairs(sources) do
      prefixes[#prefixes + 1] = path:match('^src/' .. folder .. '/([%w_]+)%.[ch]$')
    end
    for _, object in ipairs(lines_of(('ls %s/obj/%s/*.o 2>/dev/null'):format(build, folder))) do
      for _, line in ipairs(lines_of('nm -f sysv --defined-only ' .. object)) do
        local name, class, kind, section = line:match '^(%S+)%s*|[^|]*|%s*(%a)%s*|%s*(%w+)|[^|]*|[^|]*|(%S*)'
        local global = class and class:match '[TDBRVC]' and not name:match '^_'
        local known = not global
        for _, prefix in ipairs(prefixes) do known = known or name:match('^' .. prefix .. '_') end
        if not known then finding('%s: the global %s names no module of src/%s', object, name, folder) end
        if kind == 'OBJECT' and section:match '^%.[bd]' and not section:match '%.rel%.ro' then
          finding('%s: %s is a variable of the whole process', object, name)
        end
      end
    end
  end
end

local function check_tools()
  local c = table.concat(sources, ' ') .. ' ' .. table.concat(own, ' ')
  local quiet = ' >' .. build .. '/lint.log 2>&1'
  local tools = {
    { 'clang-format --dry-run -Werror ' .. c, 'clang-format (`make format` repairs)', ': error: ' },
    { 'luacheck -q --no-color . spec/run', 'luacheck', '^%s+%S+:%d+:%d+' },
    { 'cppcheck -q --std=c11 --enable=warning,portability --inline-suppr --suppressions-list=spec/tools/cppcheck.txt'
      .. ' --error-exitcode=1 --template="{file}:{line}: {id}: {message}" -D__x86_64__ -DMF_ISA=v2 -I' .. build
        .. '/gen/op'
      .. ' src', 'cppcheck', ': ' },
  }
  for _, tool in ipairs(tools) do
    if os.execute(tool[1] .. quiet) ~= 0 then
      local shown, more = 0, 0
      each_line(read(build .. '/lint.log'), function(_, line)
        if line:find(tool[3]) then
          if shown < 40 then print(line) else more = more + 1 end
          shown = shown + 1
        end
      end)
      if more > 0 then print(('... and %d more'):format(more)) end
      finding('%s: %d findings', tool[2], shown)
    end
  end
end

check_includes()
check_rules()
check_symbols()
check_tools()
print(n_findings == 0 and 'lint: clean' or ('lint: %d findings'):format(n_findings))
os.exit(n_findings == 0 and 0 or 1)
