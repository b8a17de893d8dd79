-- mf.save and mf.load: tables of tensors as safetensors files.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local M = {}

-- Adds the tensors in nested tables to `names` and `tensors`: { a = { b = t } } gives 'a.b'.
local function flatten(value, prefix, names, tensors, seen)
  if seen[value] then fail('save: the table contains itself at %s', prefix) end
  seen[value] = true
  for key, entry in pairs(value) do
    local name = prefix == '' and tostring(key) or prefix .. '.' .. tostring(key)
    if mf.is_tensor(entry) then
      names[#names + 1], tensors[#tensors + 1] = name, entry
    elseif type(entry) == 'table' then
      flatten(entry, name, names, tensors, seen)
    else
      fail('save: %s is a %s; a safetensors file holds tensors', name, type(entry))
    end
  end
  seen[value] = nil
end

local function check_path(where, path)
  if type(path) ~= 'string' then
    fail('%s: the path must be a string, is %s', where, options.describe(path))
  end
end

-- Writes a table of tensors by name, such as a state dict, to a .safetensors file; nested tables
-- get dotted names. { metadata = { key = 'text' } } is kept beside them. The file appears whole or
-- not at all.
function M.save(value, path, o)
  o = options('save', o, { metadata = options.table })
  check_path('save', path)
  if mf.is_tensor(value) or type(value) ~= 'table' then
    fail('save: a table of tensors by name is needed, this is a %s', type(value))
  end
  if not path:match '%.safetensors$' then
    fail('save: %s: the name must end in .safetensors', path)
  end
  local names, tensors = {}, {}
  flatten(value, '', names, tensors, {})
  mf._safetensors_save(path, names, tensors, o.metadata)
end

-- Reads a .safetensors file: a table of tensors by name, with the order of names in its metatable,
-- and the metadata. { prefix = 'model.' } takes only the names that begin so, and drops that part.
function M.load(path, o)
  o = options('load', o, { device = 'cpu', prefix = '' })
  check_path('load', path)
  local all, names, metadata = mf._safetensors_load(path, o.device)
  if o.prefix == '' then return setmetatable(all, { order = names }), metadata end
  local some, order = {}, {}
  for _, name in ipairs(names) do
    if name:sub(1, #o.prefix) == o.prefix then
      local rest = name:sub(#o.prefix + 1)
      some[rest] = all[name]
      order[#order + 1] = rest
    end
  end
  return setmetatable(some, { order = order }), metadata
end

return M
