-- Runs scenarios of one name while each request of some kinds fails in turn, once, and it and all after
-- it: build/fault/moonflow spec/fault/one.lua NAME KINDS [LIMIT [STRIDE]]
--
-- Whatever failed, the run says so or has the right results, nothing of what it took is left, and the
-- next run is right. The last line says how many requests there were; the exit code is 1 when anything
-- was wrong.
local mf = require 'moonflow'
local name, kinds, limit, stride = arg[1], tonumber(arg[2]), tonumber(arg[3] or 2000), tonumber(arg[4] or 1)
local MANY = 2 ^ 52

local scenarios = dofile 'spec/fault/scenarios.lua'
local f
for _, s in ipairs(scenarios) do
  if s.name == name then f = s.f end
end
if not f then error(('there is no scenario %s'):format(name)) end

local reasons = { 'out of memory', 'not enough memory', 'could not be launched', 'no thread', 'no more threads',
  'worker ended', 'a worker' }

local function is_reason(why)
  for _, reason in ipairs(reasons) do
    if tostring(why):find(reason, 1, true) then return true end
  end
end

local function disarm() mf._fault(0, 0, 0) end

local function collect()
  for _ = 1, 3 do collectgarbage() end
end

local function held()
  collect()
  local stats, _, blocks = mf.memory_stats(), mf._fault_counts()
  return { blocks = blocks, bytes = stats.in_use, tensors = stats.tensors }
end

-- Exact copies of what a run returned.
local function copy(results)
  local list = {}
  for i, r in ipairs(results) do list[i] = mf.is_tensor(r) and r:detach():clone() or r end
  return list
end

local function differs(want, got)
  if #want ~= #got then return ('%d results instead of %d'):format(#got, #want) end
  for i, w in ipairs(want) do
    local same
    if mf.is_tensor(w) then same = mf.is_tensor(got[i]) and mf.equal(w, got[i]) else same = w == got[i] end
    if not same then return ('result %d is %s instead of %s'):format(i, tostring(got[i]), tostring(w)) end
  end
end

local findings = 0
local function finding(...)
  findings = findings + 1
  print(('%s: %s'):format(name, string.format(...)))
  io.stdout:flush()
  if findings >= 20 then os.exit(1) end
end

local want = copy(f())
for _ = 1, 3 do
  local got = f()
  local wrong = differs(want, got)
  if wrong then finding('two runs differ: %s', wrong) end
end
held()
f()
local before = held()
mf._fault(kinds, 0, 0)
f()
local calls = mf._fault_counts()
disarm()

-- More than before, again and again, is a leak; once it may be a cache that grew.
local function check_held(what)
  local now = held()
  for _, key in ipairs { 'blocks', 'bytes', 'tensors' } do
    if now[key] > before[key] then
      for _ = 1, 2 do pcall(f) end
      now = held()
    end
    if now[key] > before[key] then
      finding('%s: %d %s more', what, now[key] - before[key], key)
      before[key] = now[key]
    end
  end
end

local n, fired, failures = 1, true, 0
while fired and n <= limit do
  for _, count in ipairs { 1, MANY } do
    local what = ('%s %d %s'):format('request', n, count == 1 and 'fails' or 'and all after it fail')
    mf._fault(kinds, n, count)
    local ok, result = pcall(f)
    local made = mf._fault_counts()
    disarm()
    fired = made >= n
    if not ok then failures = failures + 1 end
    if ok then
      local wrong = differs(want, result)
      if wrong then finding('%s: %s', what, wrong) end
    elseif not is_reason(result) then
      finding('%s: the error is: %s', what, tostring(result))
    end
    result = nil -- luacheck: ignore
    collect()
    local again, after = pcall(f)
    local wrong = again and differs(want, after) or not again and tostring(after)
    if wrong then finding('%s: the next run: %s', what, wrong) end
    after = nil -- luacheck: ignore
    check_held(what)
  end
  n = n + stride
end
os.execute('rm -rf ' .. scenarios.folder)
print(('%s: %d requests, %d runs failed, %d findings'):format(name, calls, failures, findings))
os.exit(findings == 0 and 0 or 1)
