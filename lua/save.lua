-- mf.save and mf.load: tables of tensors as safetensors files.
--
-- A file holds tensors by name. What it cannot hold - nesting, keys that are no strings, numbers,
-- strings and booleans - is written beside them as metadata: the tree, a JSON text under the key
-- 'moonflow', from which load builds what save was given. In it a table is an object; a list is an
-- array; any other table is {"#keys": [[key, value], ...]}; a tensor is {"#tensor": "its name"}; a
-- number that JSON lacks is {"#number": "inf"}.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local shards = require 'moonflow.shards'
local fail, describe = options.fail, options.describe
local M = {}

local TREE = 'moonflow'
local DEPTH_MAX = 64 -- of the JSON reader

-- -- Saving ---------------------------------------------------------------------------------------

local quote = shards.quote

-- Whether the keys are 1 .. n, with n > 0.
local function is_list(t)
  local n = 0
  for _ in pairs(t) do n = n + 1 end
  return n > 0 and n == #t
end

-- The keys, sorted: numbers first; whether they can be those of an object.
local function sorted_keys(t)
  local keys, plain = {}, true
  for key in pairs(t) do
    keys[#keys + 1] = key
    plain = plain and type(key) == 'string' and key:sub(1, 1) ~= '#'
  end
  table.sort(keys, function(a, b)
    if type(a) ~= type(b) then return type(a) == 'number' end
    return a < b
  end)
  return keys, plain
end

local encode

-- What tables in Lua are written as; `out` collects names and tensors.
local function encode_table(t, path, out, depth)
  if out.seen[t] then fail('save: the table contains itself at %s', path) end
  out.seen[t] = true
  for key in pairs(t) do
    if type(key) ~= 'string' and (type(key) ~= 'number' or math.abs(key) == math.huge) then
      fail('save: %s has a key that is %s; keys are strings or numbers', path == '' and 'the table' or path,
        describe(key))
    end
  end
  local parts = {}
  local function entry(key, deeper)
    local name = path == '' and tostring(key) or path .. '.' .. tostring(key)
    return encode(t[key], name, out, depth + deeper)
  end
  local text
  if is_list(t) then
    for i = 1, #t do parts[i] = entry(i, 1) end
    text = '[' .. table.concat(parts, ', ') .. ']'
    out.needs_tree = true
  else
    local keys, plain = sorted_keys(t)
    for i, key in ipairs(keys) do
      local shown = type(key) == 'string' and quote(key) or ('%.17g'):format(key)
      parts[i] = plain and shown .. ': ' .. entry(key, 1) or '[' .. shown .. ', ' .. entry(key, 3) .. ']'
    end
    text = (plain and '{%s}' or '{"#keys": [%s]}'):format(table.concat(parts, ', '))
    out.needs_tree = out.needs_tree or path ~= '' or not plain
  end
  out.seen[t] = nil
  return text
end

function encode(value, path, out, depth)
  if depth >= DEPTH_MAX then fail('save: %s lies in too many tables', path) end
  local kind = type(value)
  if mf.is_tensor(value) then
    out.names[#out.names + 1], out.tensors[#out.tensors + 1] = path, value
    return '{"#tensor": ' .. quote(path) .. '}'
  elseif kind == 'table' then
    if type(value.state_dict) == 'function' then
      fail("save: %s is a %s; save its :state_dict()", path == '' and 'this' or path, value._name or 'class')
    end
    return encode_table(value, path, out, depth)
  end
  out.needs_tree = true
  if kind == 'number' then
    if value - value ~= 0 then return '{"#number": "' .. tostring(value) .. '"}' end
    return ('%.17g'):format(value)
  elseif kind == 'boolean' then return tostring(value)
  elseif kind == 'string' then
    if value:find '%z' then fail('save: %s holds a zero byte', path) end
    return quote(value)
  end
  return fail('save: %s is a %s; a file holds tensors, numbers, strings and booleans', path, kind)
end

local function check_path(where, path)
  if type(path) ~= 'string' then
    fail('%s: the path must be a string, is %s', where, describe(path))
  end
end

-- Global tensors become local and whole, one after another, on the rank that is to write; whether it is this.
local function gather(list, rank)
  local here = not rank or mf.rank() == rank
  for i, t in ipairs(list) do
    if t.is_global then
      if not rank then
        fail('save: a tensor is global; with { global_dst_rank = 0 }, called on all ranks, rank 0 writes the whole')
      end
      local writer = mf.placement(t.placement.device, { rank })
      local whole = t:detach():to_global(writer, 'B')
      list[i] = here and whole:to_local() or nil
    end
  end
  return here
end

-- Writes a table of tensors, such as a state dict, to a .safetensors file; load gives it back. It
-- may hold numbers, strings, booleans and further tables; tensors in those get dotted names.
-- { metadata = { key = 'text' } } is kept beside them. The file appears whole or not at all. With global tensors
-- one of two options is needed, and all ranks of the job call save: { global_dst_rank = 0 }, and that rank writes
-- the tensors whole; or { sharded = true }, and path is a folder, into which each rank writes the parts that it has.
function M.save(value, path, o)
  o = options('save', o, { metadata = options.table, global_dst_rank = options.number, sharded = false })
  check_path('save', path)
  if mf.is_tensor(value) or type(value) ~= 'table' then
    fail('save: a table of tensors by name is needed, this is a %s', mf.is_tensor(value) and 'tensor' or type(value))
  end
  if o.sharded and (o.metadata or o.global_dst_rank) then
    fail 'save: { sharded = true } goes with neither metadata nor global_dst_rank; put what is needed into the table'
  end
  if not o.sharded and not path:match '%.safetensors$' then
    fail('save: %s: the name must end in .safetensors', path)
  end
  local out = { names = {}, tensors = {}, seen = {} }
  local tree = encode(value, '', out, 0)
  if o.sharded then return shards.save(path, out.needs_tree and tree or nil, out.names, out.tensors) end
  local metadata = o.metadata
  if metadata and metadata[TREE] ~= nil then fail("save: the metadata key '%s' is taken", TREE) end
  if out.needs_tree then
    metadata = { [TREE] = tree }
    for key, text in pairs(o.metadata or {}) do metadata[key] = text end
  end
  if gather(out.tensors, o.global_dst_rank) then
    mf._safetensors_save(path, out.names, out.tensors, metadata)
  end
  if o.global_dst_rank then mf.comm.barrier() end -- so that the file is there on return
end

-- -- Loading --------------------------------------------------------------------------------------

local special = {
  ['#tensor'] = function(name, from)
    return type(name) == 'string' and from.tensors[name] or error('it has no such tensor: ' .. tostring(name), 0)
  end,
  ['#number'] = function(text)
    local number = ({ inf = math.huge, ['-inf'] = -math.huge, nan = 0 / 0, ['-nan'] = 0 / 0 })[text]
    return number or error('no number: ' .. tostring(text), 0)
  end,
}

-- Sets t[key] to what `node` stands for. `order` gets the names of tensors.
local function decode(node, from)
  if type(node) ~= 'table' then return node end
  local word, inner = next(node)
  if special[word] then return special[word](inner, from) end
  local value, order = {}, {}
  local function put(key, entry)
    if (type(key) ~= 'string' and type(key) ~= 'number') or key ~= key then error('a key is ' .. describe(key), 0) end
    value[key] = decode(entry, from)
    if mf.is_tensor(value[key]) then order[#order + 1] = key end
  end
  if word == '#keys' then
    for _, pair in ipairs(inner) do put(pair[1], pair[2]) end
  else
    for key, entry in pairs(node) do put(key, entry) end
  end
  if #order == 0 then return value end
  table.sort(order, function(a, b) return (from.place[value[a]] or 0) < (from.place[value[b]] or 0) end)
  return setmetatable(value, { order = order })
end

-- The tensors in the tables that save was given.
local function nested(path, tree, tensors, names)
  local from = { tensors = tensors, place = {} }
  for i, name in ipairs(names) do from.place[tensors[name]] = i end
  local ok, value = pcall(function() return decode(type(tree) == 'string' and mf._json_read(tree) or tree, from) end)
  if not ok or type(value) ~= 'table' then
    fail("load: %s: the metadata '%s' is damaged: %s", path, TREE, tostring(value))
  end
  return value
end

-- Tensors by name, names in order, metadata.
local function read(path, o)
  if o.sbp ~= nil and not o.placement then fail "load: sbp goes with a placement" end
  if o.placement and not mf._is_placement(o.placement) then
    fail('load: placement must be a placement (mf.placement), is %s', describe(o.placement))
  end
  if shards.is_folder(path) then return shards.load(path, o) end
  if o.placement then return shards.load_file(path, o) end
  return mf._safetensors_load(path, o.device)
end

-- What save wrote, to a file or a folder, or the tensors of any .safetensors file by name, with the order of
-- names in the metatable. { prefix = 'model.' } takes only the names that begin so, and drops that part;
-- { nested = false } all by their dotted names. { metadata = true } gives the metadata as a second
-- result. { placement = p } gives global tensors, of which each rank reads its part alone: under 'S0' on each axis,
-- or under { sbp = ... }, for all or a function of name and shape. load_state_dict brings them where they belong.
function M.load(path, o)
  o = options('load', o, { device = 'cpu', prefix = '', nested = true, metadata = false, placement = options.none,
    sbp = options.none })
  check_path('load', path)
  local all, names, metadata = read(path, o)
  local tree = metadata[TREE]
  metadata[TREE] = nil
  local function results(value)
    if o.metadata then return value, metadata end
    return value
  end
  if o.prefix == '' then
    if tree and o.nested then return results(nested(path, tree, all, names)) end
    return results(setmetatable(all, { order = names }))
  end
  local some, order = {}, {}
  for _, name in ipairs(names) do
    if name:sub(1, #o.prefix) == o.prefix then
      local rest = name:sub(#o.prefix + 1)
      some[rest] = all[name]
      order[#order + 1] = rest
    end
  end
  return results(setmetatable(some, { order = order }))
end

return M
