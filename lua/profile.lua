-- mf.profile(f, ...): what f's ops cost, in eager calls and in compiled steps.
--
--   local p = mf.profile(function() for _ = 1, 3 do step(x, y) end end)
--   print(p)                     -- a line per op: calls, time, share, GFLOP/s, GB/s
--   print(p:table { by = 'line' })
--   p:save_trace 'trace.json'    -- for chrome://tracing or ui.perfetto.dev
--
-- Every kernel that runs meanwhile in any thread of the context is noted. FLOPs are those of the
-- mathematics (two per multiplication and addition), bytes those of the operands, each read or
-- written once. The trace has a row for each stream: of compiled steps the acts of actors with the ops
-- in them, and arrows from who made a buffer to who read it.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail

local Profile = {}
Profile.__index = Profile

local function profile(f, ...)
  if not options.is_callable(f) then
    fail('profile: the first argument must be a function, is %s', options.describe(f))
  end
  local begin = mf.time()
  mf._profile_start()
  local ok, message = pcall(f, ...)
  local events, lost, acts = mf._profile_stop()
  if not ok then error(message, 0) end
  return setmetatable({ events = events, lost = lost, acts = acts, seconds = mf.time() - begin }, Profile)
end

-- Sums over events of one key, the longest first: { key, calls, us, flops, bytes }.
function Profile:sums(by)
  options.choice('profile', 'by', by, { 'op', 'line' })
  local rows, at = {}, {}
  for _, e in ipairs(self.events) do
    local key = by == 'op' and e.name or (e.where ~= '' and e.where or '?') .. '  ' .. e.name
    local row = at[key]
    if not row then
      row = { key = key, calls = 0, us = 0, flops = 0, bytes = 0 }
      at[key], rows[#rows + 1] = row, row
    end
    row.calls, row.us = row.calls + 1, row.us + e.us
    row.flops, row.bytes = row.flops + e.flops, row.bytes + e.bytes
  end
  table.sort(rows, function(a, b)
    if a.us ~= b.us then return a.us > b.us end
    return a.key < b.key
  end)
  return rows
end

-- The sums as text; {by = 'op' or 'line', rows = how many}.
function Profile:table(o)
  o = options('profile', o, { by = 'op', rows = 30 })
  local rows, total, width = self:sums(o.by), 0, 4
  for i, row in ipairs(rows) do
    total = total + row.us
    if i <= o.rows then width = math.max(width, #row.key) end
  end
  local lines = { ('%-' .. width .. 's %8s %12s %7s %10s %8s'):format(o.by, 'calls', 'ms', '%', 'GFLOP/s',
    'GB/s') }
  local function add(row)
    local ns = math.max(row.us * 1e3, 1)
    lines[#lines + 1] = ('%-' .. width .. 's %8d %12.3f %7.1f %10.2f %8.2f'):format(row.key, row.calls,
      row.us / 1e3, total > 0 and 100 * row.us / total or 0, row.flops / ns, row.bytes / ns)
  end
  local rest = { key = 'rest', calls = 0, us = 0, flops = 0, bytes = 0 }
  for i, row in ipairs(rows) do
    if i <= o.rows then add(row)
    else
      for _, k in ipairs { 'calls', 'us', 'flops', 'bytes' } do rest[k] = rest[k] + row[k] end
    end
  end
  if rest.calls > 0 then add(rest) end
  lines[#lines + 1] = ('kernels %.3f ms of %.3f ms'):format(total / 1e3, self.seconds * 1e3)
  if self.lost > 0 then lines[#lines + 1] = ('%d events were lost: out of memory'):format(self.lost) end
  return table.concat(lines, '\n')
end

function Profile:__tostring() return self:table() end

local function json(text)
  return '"' .. text:gsub('[%c"\\]', function(c) return ('\\u%04x'):format(c:byte()) end) .. '"'
end

-- Numbers of rows by track, in order of appearance, and their names: a stream's that acts named, else 'main',
-- and 'thread 2' and so on.
local function rows_of(self)
  local rows, names = {}, {}
  for _, list in ipairs { self.events, self.acts } do
    for _, e in ipairs(list) do
      if not rows[e.track] then
        names[#names + 1] = #names == 0 and 'main' or ('thread %d'):format(#names + 1)
        rows[e.track] = #names
      end
      if e.kind == 'act' and e.where ~= '' then names[rows[e.track]] = e.where end
    end
  end
  return rows, names
end

local formats = {
  op = '{"ph":"X","pid":0,"tid":%d,"ts":%.3f,"dur":%.3f,"name":%s,"cat":"op",'
    .. '"args":{"where":%s,"flops":%.0f,"bytes":%.0f}}',
  act = '{"ph":"X","pid":0,"tid":%d,"ts":%.3f,"dur":%.3f,"name":%s,"cat":"act","args":{"act":%d}}',
  send = '{"ph":"s","pid":0,"tid":%d,"ts":%.3f,"id":%s,"name":"register","cat":"register"}',
  receive = '{"ph":"f","bp":"e","pid":0,"tid":%d,"ts":%.3f,"id":%s,"name":"register","cat":"register"}',
  name = '{"ph":"M","pid":0,"tid":%d,"name":"thread_name","args":{"name":%s}}',
}

-- What is sent before the profile began, or read behind its end, has no arrow. An arrow leaves its act's last
-- moment.
local function arrows_of(self)
  local ends, both = {}, {}
  for _, e in ipairs(self.acts) do
    if e.id then ends[e.id] = (ends[e.id] or 0) + (e.kind == 'send' and 1 or 1e6) end
  end
  for id, n in pairs(ends) do both[id] = n > 1e6 and n % 1e6 == 1 or nil end
  return both
end

-- Writes the events as a Chrome trace.
function Profile:save_trace(path)
  local f, why = io.open(path, 'w')
  if not f then fail('save_trace: %s', why) end
  local rows, names = rows_of(self)
  local lines, arrows = {}, arrows_of(self)
  local function add(format, ...) lines[#lines + 1] = format:format(...) end
  for k, name in ipairs(names) do add(formats.name, k, json(name)) end
  for _, e in ipairs(self.acts) do
    local row = rows[e.track]
    if e.kind == 'act' then add(formats.act, row, e.begin_us, e.us, json(e.name), e.act)
    elseif arrows[e.id] then add(formats[e.kind], row, e.begin_us, json(e.id)) end
  end
  for _, e in ipairs(self.events) do
    add(formats.op, rows[e.track], e.begin_us, e.us, json(e.name), json(e.where), e.flops, e.bytes)
  end
  f:write('{"displayTimeUnit":"ms","traceEvents":[\n', table.concat(lines, ',\n'), '\n]}\n')
  if not f:close() then fail('save_trace: %s could not be written', path) end
end

return profile
