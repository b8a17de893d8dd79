-- Runs everything with requests that fail: luajit spec/fault/run.lua BUILD [TEXT]
--
-- First the scenarios of scenarios.lua, each by one.lua: memory, devices, launches and threads, then
-- Lua's heap. LuaJIT's machine code cannot unwind from an allocation that fails inside of it, so there
-- the JIT compiler is off. Then the suite: 200 times a spec in which one request fails, both chosen by
-- a seed. There a failing test is expected; but the spec has to come to its end, and one of the tests
-- that fail has to say that memory ran out or the like. TEXT: only those whose name has it.
local build, only = arg[1], arg[2] or ''
local SEEDS, LIMIT = 200, 2000
local LIBRARY, LUA = 15, 16 -- kinds of base/fault.h
local busted = '/usr/bin/busted'
local reasons = { 'out of memory', 'not enough memory', 'could not be launched', 'no thread', 'no more threads' }
-- Specs of programs, texts and timing, and those of which everything is long.
local left_out = { program = true, examples = true, layers = true, embed = true, help = true, oracle = true,
  interrupt = true, isa = true, fuzz = true }

local function lines_of(command)
  local list, pipe = {}, io.popen(command)
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

local sanitizers = 'ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1 '
  .. 'LSAN_OPTIONS=suppressions=spec/tools/leaks.txt:print_suppressions=0 '
  .. 'UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=suppressions=spec/tools/races.txt:halt_on_error=1 '
local folder = build .. '/fault.logs'

-- Runs commands, as many at once as there are processors; the code and the output of each.
local function run_all(jobs, limit)
  os.execute(('rm -rf %s && mkdir -p %s'):format(folder, folder))
  local list = io.open(folder .. '/list', 'w')
  for i, job in ipairs(jobs) do
    local f = io.open(('%s/%d.sh'):format(folder, i), 'w')
    f:write(('env %s%s timeout -k 10 %d %s > %s/%d.log 2>&1\necho %d $?\n'):format(sanitizers,
      job.environment or '', limit, job.command, folder, i, i))
    f:close()
    list:write(i, '\n')
  end
  list:close()
  local pipe = io.popen(('xargs -P $(nproc) -I@ sh %s/@.sh < %s/list'):format(folder, folder))
  for line in pipe:lines() do
    local i, code = line:match '^(%d+) (%d+)$'
    local f = io.open(('%s/%d.log'):format(folder, i), 'rb')
    local job = jobs[tonumber(i)]
    job.code, job.text = tonumber(code), f:read '*a'
    f:close()
    if job.done then job.done(job) end
  end
  pipe:close()
end

local findings = 0
local function finding(job, why)
  findings = findings + 1
  print(('%s: %s\n  | %s'):format(job.name, why, job.text:sub(-3000):gsub('\n', '\n  | ')))
  io.stdout:flush()
end

-- -- Scenarios ------------------------------------------------------------------------------------

local function report_scenario(job)
  if job.code == 124 or job.code == 137 then return finding(job, 'it hangs') end
  if job.code ~= 0 then return finding(job, ('exit code %d'):format(job.code)) end
  print(('%-10s %s'):format(job.what, job.text:match '([^\n]*)\n$'))
  io.stdout:flush()
end

local function scenarios()
  local jobs = {}
  local names = lines_of(([[%s/moonflow -e 'local list = dofile "spec/fault/scenarios.lua"
    for _, s in ipairs(list) do print(s.name) end os.execute("rm -rf " .. list.folder)']]):format(build))
  for _, kinds in ipairs { LIBRARY, LUA } do
    for _, name in ipairs(names) do
      if name:find(only, 1, true) then
        jobs[#jobs + 1] = { name = name, what = kinds == LUA and 'Lua heap' or 'library', done = report_scenario,
          command = ("%s/moonflow %s spec/fault/one.lua '%s' %d %d"):format(build, kinds == LUA and '-joff' or '',
            name, kinds, LIMIT) }
      end
    end
  end
  run_all(jobs, 900)
end

-- -- The suite ------------------------------------------------------------------------------------

local function spec_job(path, n, done)
  return { name = n > 0 and ('%s, request %d'):format(path, n) or path, path = path, n = n, done = done,
    environment = ('MF_SPEC_FAULT=%d '):format(n),
    command = ('%s/moonflow %s --output=plainTerminal --exclude-tags=long %s'):format(build, busted, path) }
end

local function has_reason(text)
  for _, reason in ipairs(reasons) do
    if text:find(reason, 1, true) then return true end
  end
end

local ended = 0
local function report_spec(job)
  local failures, errors = job.text:match '(%d+) failures? / (%d+) errors?'
  if job.code == 124 or job.code == 137 then return finding(job, 'it hangs') end
  -- a file that cannot be loaded has no result
  if not failures and not has_reason(job.text) then return finding(job, ('exit code %d'):format(job.code)) end
  if job.text:find('ERROR: ', 1, true) and job.text:find('Sanitizer', 1, true) then
    return finding(job, 'a sanitizer stopped it')
  end
  if failures and failures + errors > 0 and not has_reason(job.text) then
    return finding(job, 'a test fails for another reason')
  end
  ended = ended + 1
end

local function suite()
  local counting, jobs = {}, {}
  for _, path in ipairs(lines_of "find spec -maxdepth 1 -name '*_spec.lua' | sort") do
    if path:find(only, 1, true) and not left_out[path:match '([%w_]+)_spec%.lua$'] then
      counting[#counting + 1] = spec_job(path, 0)
    end
  end
  run_all(counting, 600)
  local usable = {}
  for _, job in ipairs(counting) do
    job.calls = tonumber(job.text:match 'requests: (%d+)')
    if job.code ~= 0 or not job.calls then finding(job, ('exit code %d'):format(job.code))
    elseif job.calls > 0 then usable[#usable + 1] = job end
  end
  math.randomseed(1)
  for seed = 1, #usable > 0 and SEEDS or 0 do
    local of = usable[(seed - 1) % #usable + 1]
    jobs[seed] = spec_job(of.path, math.random(of.calls), report_spec)
  end
  run_all(jobs, 600)
  print(('suite      %d of %d runs with a request that failed came to a right end'):format(ended, #jobs))
end

-- A host in C.
local function host()
  if not ('host'):find(only, 1, true) then return end
  local job = { name = 'host', what = 'C host', command = build .. '/spec/fault_spec', done = report_scenario }
  run_all({ job }, 900)
end

host()
scenarios()
suite()
print(('fault: %d findings'):format(findings))
os.exit(findings == 0 and 0 or 1)
