-- mf.save and mf.load: tables of tensors as safetensors files.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local M = {}

-- Nested tables as flat names: { a = { b = t } } gives 'a.b'.
local function flatten(value, prefix, names, tensors, seen)
  if seen[value] then error(('save: the table contains itself at %s'):format(prefix), 0) end
  seen[value] = true
  for key, entry in pairs(value) do
    local name = prefix == '' and tostring(key) or prefix .. '.' .. tostring(key)
    if mf.is_tensor(entry) then
      names[#names + 1], tensors[#tensors + 1] = name, entry
    elseif type(entry) == 'table' then
      flatten(entry, name, names, tensors, seen)
    else
      error(('save: %s is a %s; a safetensors file holds tensors'):format(name, type(entry)), 0)
    end
  end
  seen[value] = nil
end

-- Writes a table of tensors (a state dict; nested tables get dotted names) to a .safetensors file. The file appears whole or not at all.
-- {metadata = {key = 'text'}} is kept beside them.
function M.save(tensors_by_name, path, o)
  o = options('save', o, { metadata = options.none })
  if type(path) ~= 'string' then error('save: the path must be a string, is a ' .. type(path), 2) end
  if mf.is_tensor(tensors_by_name) or type(tensors_by_name) ~= 'table' then
    error('save: a table of tensors by name is needed, this is a ' .. type(tensors_by_name), 2)
  end
  if not path:match '%.safetensors$' then error(('save: %s: the name must end in .safetensors'):format(path), 2) end
  local names, tensors = {}, {}
  local ok, text = pcall(flatten, tensors_by_name, '', names, tensors, {})
  if not ok then error(text, 2) end
  mf._safetensors_save(path, names, tensors, o.metadata)
end

-- Reads a .safetensors file: a table name -> tensor with the order of names in its metatable, and the metadata.
function M.load(path, o)
  o = options('load', o, { device = 'cpu' })
  if type(path) ~= 'string' then error('load: the path must be a string, is a ' .. type(path), 2) end
  local tensors, names, metadata = mf._safetensors_load(path, o.device)
  return setmetatable(tensors, { order = names }), metadata
end

return M
