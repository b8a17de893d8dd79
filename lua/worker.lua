-- Workers of the DataLoader: threads with Lua states of their own (src/bind/worker.c). Values cross
-- between states as a string and a list of tensors.
--
-- What may cross: nil, booleans, numbers, strings; tensors, by shared storage; tables by copy, with
-- their metatables, with shared and cyclic parts kept; what a loaded module or a library of Lua's
-- holds (mf.relu, mf.float32, a class of a required module) by name; other Lua functions by their
-- code, with upvalues under the same rules. Anything else is an error that says where it was found.
-- Globals that the program has set do not cross.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local worker = {}

-- -- Packing --------------------------------------------------------------------------------------

-- A packed value is a letter and what follows: n nil, T true, F false, d number, s string,
-- x tensor, r seen before, m module, k key of a module, t table, f function. A string has its length
-- in front.

local libraries = { '_G', 'bit', 'coroutine', 'debug', 'io', 'jit', 'math', 'os', 'package',
  'string', 'table' }

local by_name = { table = true, ['function'] = true, userdata = true }

-- Names of modules and of what lies directly in them: value -> { module, key }.
local function known_values()
  local known, standard = {}, {}
  for _, name in ipairs(libraries) do standard[name] = true end
  local function add(name, module)
    known[module] = known[module] or { name }
    for key, value in pairs(module) do
      local fits = type(key) == 'string' and by_name[type(value)] and not mf.is_tensor(value)
      if fits and not known[value] then known[value] = { name, key } end
    end
  end
  for _, name in ipairs(libraries) do
    if name ~= '_G' then add(name, package.loaded[name]) end
  end
  for key, value in pairs(_G) do -- the program's own globals are not there in a worker
    local native = type(value) == 'function' and debug.getinfo(value, 'S').what == 'C'
    if native then known[value] = known[value] or { '_G', key } end
  end
  known[_G] = { '_G' }
  for name, module in pairs(package.loaded) do
    if type(module) == 'table' and not standard[name] then add(name, module) end
  end
  return known
end

local pack_value

local function put(out, ...)
  for i = 1, select('#', ...) do out[#out + 1] = (select(i, ...)) end
end

local function put_string(out, letter, s) put(out, letter, #s, ':', s) end

local function pack_table(out, t, path)
  put(out, 't')
  for key, value in next, t do
    local at = path .. '.' .. tostring(key)
    pack_value(out, key, at .. ' (its key)')
    pack_value(out, value, at)
  end
  put(out, 'e')
  pack_value(out, debug.getmetatable(t), path .. ' (its metatable)')
end

local function pack_function(out, f, path)
  local ok, code = pcall(string.dump, f)
  if not ok then error(path .. ' is a C function, which cannot cross to a worker', 0) end
  put_string(out, 'f', code)
  local i = 1
  while true do
    local name, value = debug.getupvalue(f, i)
    if not name then break end
    put(out, 'u')
    pack_value(out, value, ('%s (upvalue %s)'):format(path, name))
    i = i + 1
  end
  put(out, 'e')
end

local function pack_object(out, value, path)
  out.n = out.n + 1
  out.seen[value] = out.n
  local name = out.known[value]
  if name then
    put_string(out, name[2] and 'k' or 'm', name[1])
    if name[2] then put_string(out, '', name[2]) end
  elseif type(value) == 'table' then pack_table(out, value, path)
  elseif type(value) == 'function' then pack_function(out, value, path)
  else error(('%s is a %s, which cannot cross to a worker'):format(path, type(value)), 0) end
end

function pack_value(out, value, path)
  local kind = type(value)
  if value == nil then put(out, 'n')
  elseif kind == 'boolean' then put(out, value and 'T' or 'F')
  elseif kind == 'number' then put_string(out, 'd', ('%.17g'):format(value))
  elseif kind == 'string' then put_string(out, 's', value)
  elseif mf.is_tensor(value) then
    out.tensors[#out.tensors + 1] = value
    put_string(out, 'x', tostring(#out.tensors))
  elseif out.seen[value] then put_string(out, 'r', tostring(out.seen[value]))
  else pack_object(out, value, path) end
end

-- A value as a string and a table of tensors; `what` names it in errors. Only under `names` is
-- looked for what modules hold.
function worker.pack(value, what, names)
  local out = { tensors = {}, seen = {}, known = names and known_values() or {}, n = 0 }
  pack_value(out, value, what or 'value')
  return table.concat(out), out.tensors
end

-- -- Unpacking ------------------------------------------------------------------------------------

local function get_letter(r)
  r.at = r.at + 1
  return r.text:sub(r.at - 1, r.at - 1)
end

local function get_string(r)
  local n, at = r.text:match('^(%d+):()', r.at)
  r.at = at + n
  return r.text:sub(at, at + n - 1)
end

-- The next object as the next number to which 'r' may refer.
local function remember(r, value)
  r.seen[#r.seen + 1] = value
  return value
end

local get = {} -- by letter

local function unpack_value(r)
  return get[get_letter(r)](r)
end

function get.n() return nil end
function get.T() return true end
function get.F() return false end
function get.d(r)
  local text = get_string(r)
  if text:find 'nan' then return 0 / 0 end
  if text:find 'inf' then return text:sub(1, 1) == '-' and -math.huge or math.huge end
  return tonumber(text)
end
function get.s(r) return get_string(r) end
function get.x(r) return r.tensors[tonumber(get_string(r))] end
function get.r(r) return r.seen[tonumber(get_string(r))] end
function get.m(r) return remember(r, require(get_string(r))) end

function get.k(r)
  local module, key = get_string(r), get_string(r)
  local value = require(module)[key]
  if value == nil then
    error(("in the worker the module '%s' holds no '%s', as it did here"):format(module, key), 0)
  end
  return remember(r, value)
end

function get.t(r)
  local t = remember(r, {})
  while r.text:sub(r.at, r.at) ~= 'e' do
    local key = unpack_value(r)
    rawset(t, key, (unpack_value(r)))
  end
  r.at = r.at + 1
  return setmetatable(t, unpack_value(r))
end

function get.f(r)
  local f = remember(r, assert(loadstring(get_string(r))))
  local i = 1
  while get_letter(r) == 'u' do
    debug.setupvalue(f, i, (unpack_value(r)))
    i = i + 1
  end
  return f
end

function worker.unpack(text, tensors)
  return unpack_value { text = text, at = 1, tensors = tensors, seen = {} }
end

-- -- The worker's side ----------------------------------------------------------------------------

local function begin(job)
  package.path, package.cpath = job.path, job.cpath
  mf.set_num_threads(1)
  mf.manual_seed(job.seed)
  return job
end

local function as_table(...) return { n = select('#', ...), values = { ... } } end

local function make_batch(job, indices)
  local data = require 'moonflow.data'
  return worker.pack(as_table(data.batch(job, indices)), 'the batch')
end

-- The values of a batch for a compiled step: a table of tensors.
function worker.tensors(...)
  for k = 1, select('#', ...) do
    local value = select(k, ...)
    if not mf.is_tensor(value) then
      options.fail('over: value %d of a batch is %s; a step over a loader takes batches of tensors', k,
        options.describe(value))
    end
  end
  return { ... }
end

-- The same as a message for it; no indices: there is no more.
local function make_feed(job, indices)
  if not indices then return '.', {} end
  return '', worker.tensors(require 'moonflow.data'.batch(job, indices))
end

-- What an error says, and where it was raised.
local function text_of(err)
  local meta = type(err) == 'table' and getmetatable(err)
  if type(err) == 'table' and not (meta and meta.__tostring) then
    local fields = {}
    for key, value in pairs(err) do
      fields[#fields + 1] = ('%s = %s'):format(tostring(key), options.describe(value))
    end
    table.sort(fields)
    err = ('an error that is a table, { %s }'):format(table.concat(fields, ', '))
  elseif err == nil then
    err = 'an error that is nil'
  end
  return debug.traceback(tostring(err), 2)
end

-- What a worker thread runs: the first message says how it is to be set up, the second is the job,
-- and each later one a table of indices. The answers are packed, or under setup.feed what a feed takes
-- (src/bind/feed.c).
function worker.serve(link)
  local setup, job
  local function answer(text, tensors)
    if not setup then setup = begin(worker.unpack(text, tensors))
    elseif not job then job = worker.unpack(text, tensors)
    else return (setup.feed and make_feed or make_batch)(job, worker.unpack(text, tensors)) end
  end
  while true do
    local text, tensors = link:receive()
    if not text then return end
    local ok, bytes, list = xpcall(answer, text_of, text, tensors)
    if not ok and setup and setup.feed then
      bytes, list = ('EDataLoader: worker %d: %s'):format(setup.number, tostring(bytes)), {}
    elseif not ok then bytes, list = worker.pack { error = tostring(bytes) } end
    if bytes and not link:send(bytes, list) then return end
  end
end

-- -- The loader's side ----------------------------------------------------------------------------

-- The workers of a loader, set up and given their job.
local function start(loader, feed)
  local job = { dataset = loader.dataset, collate = loader.collate }
  local ok, text, tensors = pcall(worker.pack, job, 'loader', true)
  if not ok then options.fail('DataLoader: %s', text) end
  local seed = mf.randint(0, 2 ^ 31, { 1 }, { generator = loader.generator }):item()
  local links = {}
  for k = 1, loader.num_workers do
    local link = mf._worker_start()
    link:send(worker.pack { path = package.path, cpath = package.cpath, seed = seed + k, feed = feed,
      number = k - 1 })
    link:send(text, tensors)
    links[k] = link
  end
  return links
end

-- Iterates over batches made by loader.num_workers workers, each at most loader.prefetch ahead; in
-- the order of next_batch.
function worker.iterate(loader, next_batch)
  local links = start(loader)
  local first, last = 0, -1 -- batches that are under way
  local function link_of(batch) return links[batch % #links + 1] end
  local function feed()
    while next_batch and last - first + 1 < #links * loader.prefetch do
      local indices = next_batch()
      if not indices then
        next_batch = nil
        return
      end
      last = last + 1
      link_of(last):send(worker.pack(indices))
    end
  end
  local function close()
    next_batch, first, last = nil, 0, -1
    for _, link in ipairs(links) do link:close() end
  end
  feed()
  return function()
    if first > last then return close() end
    local text, tensors, why = link_of(first):receive()
    local answer = text and worker.unpack(text, tensors)
      or { error = 'ended without an answer' .. (why and ': ' .. why or '') }
    if answer.error then
      local number = first % #links
      close()
      options.fail('DataLoader: worker %d: %s', number, answer.error)
    end
    first = first + 1
    feed()
    return unpack(answer.values, 1, answer.n)
  end
end

-- The same batches for a compiled step: a feed, and a function that sends the workers on, to be called
-- now and then; and one that ends them.
function worker.feed(loader, next_batch)
  local links, sent, ended = start(loader, true), 0, false
  local feed = mf._feed(links)
  local function pump()
    while not ended and sent - feed:taken() < #links * loader.prefetch do
      local indices = next_batch()
      ended = not indices
      links[sent % #links + 1]:send(worker.pack(indices))
      sent = sent + 1
    end
  end
  local function close()
    for _, link in ipairs(links) do link:close() end
  end
  return feed, pump, close
end

return worker
