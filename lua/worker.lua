-- Workers of the DataLoader: values cross between Lua states as a string and a list of tensors.
--
-- What may cross: nil, booleans, numbers, strings; tensors, by shared storage; tables by copy, with their metatables and with shared and cyclic
-- parts kept; what a loaded module holds (mf.relu, a class of a required module) by name; other Lua functions by their code, with upvalues under
-- the same rules. Anything else is an error that says where it was found.
local mf = require 'moonflow.core'
local worker = {}

-- -- Packing ------------------------------------------------------------------------------------------------------------------------

-- Modules and what lies directly in them: value -> { module, key }.
local function known_values()
  local known = {}
  for name, module in pairs(package.loaded) do
    if type(module) == 'table' and name ~= '_G' then
      known[module] = known[module] or { name }
      for key, value in pairs(module) do
        if (type(value) == 'table' or type(value) == 'function') and type(key) == 'string' then known[value] = known[value] or { name, key } end
      end
    end
  end
  for key, value in pairs(_G) do
    if type(value) == 'function' or type(value) == 'table' then known[value] = known[value] or { '_G', key } end
  end
  return known
end

local pack_value

local function put(out, ...)
  for i = 1, select('#', ...) do out[#out + 1] = select(i, ...) end
end

local function put_string(out, s) put(out, #s, ':', s) end

local function pack_table(out, t, path)
  put(out, 't')
  for key, value in pairs(t) do
    local at = path .. '.' .. tostring(key)
    pack_value(out, key, at .. ' (its key)')
    pack_value(out, value, at)
  end
  put(out, 'e')
  pack_value(out, getmetatable(t), path .. ' (its metatable)')
end

local function pack_function(out, f, path)
  local ok, code = pcall(string.dump, f)
  if not ok then error(('%s is a C function, which cannot cross to a worker'):format(path), 0) end
  put(out, 'f')
  put_string(out, code)
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

function pack_value(out, value, path)
  local kind = type(value)
  if value == nil then put(out, 'n')
  elseif kind == 'boolean' then put(out, value and 'T' or 'F')
  elseif kind == 'number' then
    put(out, 'd')
    put_string(out, ('%.17g'):format(value))
  elseif kind == 'string' then
    put(out, 's')
    put_string(out, value)
  elseif mf.is_tensor(value) then
    out.tensors[#out.tensors + 1] = value
    put(out, 'x')
    put_string(out, tostring(#out.tensors))
  elseif out.seen[value] then
    put(out, 'r')
    put_string(out, tostring(out.seen[value]))
  else
    out.n = out.n + 1
    out.seen[value] = out.n
    local name = out.known[value]
    if name then
      put(out, name[2] and 'k' or 'm')
      put_string(out, name[1])
      if name[2] then put_string(out, name[2]) end
    elseif kind == 'table' then pack_table(out, value, path)
    elseif kind == 'function' then pack_function(out, value, path)
    else error(('%s is a %s, which cannot cross to a worker'):format(path, kind), 0) end
  end
end

-- A value as a string and a table of tensors; `what` names it in errors.
function worker.pack(value, what)
  local out = { tensors = {}, seen = {}, known = known_values(), n = 0 }
  pack_value(out, value, what or 'value')
  return table.concat(out), out.tensors
end

local function get_string(r)
  local n, at = r.text:match('^(%d+):()', r.at)
  r.at = at + n
  return r.text:sub(at, at + n - 1)
end

local function get_char(r)
  local c = r.text:sub(r.at, r.at)
  r.at = r.at + 1
  return c
end

local function fetch_known(module, key)
  local t = module == '_G' and _G or package.loaded[module] or require(module)
  if key == nil then return t end
  return t[key]
end

local unpack_value

local function unpack_table(r)
  local t = {}
  r.seen[#r.seen + 1] = t
  while r.text:sub(r.at, r.at) ~= 'e' do
    local key = unpack_value(r)
    rawset(t, key, (unpack_value(r)))
  end
  r.at = r.at + 1
  return setmetatable(t, unpack_value(r))
end

local function unpack_function(r)
  local f = assert(loadstring(get_string(r)))
  r.seen[#r.seen + 1] = f
  local i = 1
  while get_char(r) == 'u' do
    debug.setupvalue(f, i, (unpack_value(r)))
    i = i + 1
  end
  return f
end

function unpack_value(r)
  local c = get_char(r)
  if c == 'n' then return nil
  elseif c == 'T' then return true
  elseif c == 'F' then return false
  elseif c == 'd' then return tonumber(get_string(r))
  elseif c == 's' then return get_string(r)
  elseif c == 'x' then return r.tensors[tonumber(get_string(r))]
  elseif c == 'r' then return r.seen[tonumber(get_string(r))]
  elseif c == 't' then return unpack_table(r)
  elseif c == 'f' then return unpack_function(r)
  end
  local module = get_string(r)
  local key
  if c == 'k' then key = get_string(r) end
  local value = fetch_known(module, key)
  r.seen[#r.seen + 1] = value
  return value
end

function worker.unpack(text, tensors)
  return unpack_value { text = text, at = 1, tensors = tensors, seen = {} }
end

-- -- The worker's side -----------------------------------------------------------------------------------------------------------------

-- What a worker thread runs: the first message is the job, each later one a table of indices.
function worker.serve(link)
  local job
  local function answer(text, tensors)
    local message = worker.unpack(text, tensors)
    if not job then
      job = message
      package.path, package.cpath = job.path, job.cpath
      mf.set_num_threads(1)
      mf.manual_seed(job.seed)
      return nil
    end
    local values = { require 'moonflow.data'.fetch(job.dataset, message, job.collate) }
    return worker.pack({ values = values, n = select('#', unpack(values)) }, 'the batch')
  end
  while true do
    local text, tensors = link:receive()
    if not text then return end
    local ok, bytes, out = xpcall(answer, debug.traceback, text, tensors)
    if not ok then bytes, out = worker.pack { error = tostring(bytes) } end
    if bytes and not link:send(bytes, out) then return end
  end
end

-- -- The loader's side -------------------------------------------------------------------------------------------------------------------

-- Iterates over batches made by loader.num_workers workers, each at most loader.prefetch ahead; in the order of next_batch.
function worker.iterate(loader, next_batch)
  local links, first, last = {}, 0, -1
  local seed = mf.randint(0, 2 ^ 31, { 1 }):item()
  for k = 1, loader.num_workers do
    local job = { dataset = loader.dataset, collate = loader.collate, seed = seed + k, path = package.path, cpath = package.cpath }
    local ok, text, tensors = pcall(worker.pack, job, 'loader')
    if not ok then error(('DataLoader: %s'):format(text), 3) end
    links[k] = mf._worker_start()
    links[k]:send(text, tensors)
  end
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
    for _, link in ipairs(links) do link:close() end
    links = {}
  end
  feed()
  return function()
    if first > last then
      close()
      return nil
    end
    local text, tensors = link_of(first):receive()
    local number = first % #links + 1
    local answer = text and worker.unpack(text, tensors)
    if not answer or answer.error then
      close()
      error(('DataLoader worker %d: %s'):format(number, answer and answer.error or 'ended without an answer'), 2)
    end
    first = first + 1
    feed()
    return unpack(answer.values, 1, answer.n)
  end
end

return worker
