-- Reading tables of options: unknown names are errors with a suggestion.
--
--   local o = options('Conv2d', given, { stride = 1, padding = 0, bias = true })
--
-- gives a new table with the defaults filled in. A default of options.none stands for "nil unless given".
local options = { none = setmetatable({}, { __tostring = function() return 'nil' end }) }

-- The edit distance of two names.
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local best = diagonal + (a:byte(i) == b:byte(j) and 0 or 1)
      diagonal = row[j]
      row[j] = math.min(best, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#b]
end

-- The name of `known` nearest to `name`, or nil when none is near.
function options.suggest(name, known)
  local best, least = nil, 4
  for other in pairs(known) do
    local d = distance(tostring(name), other)
    if d < least or (d == least and best and other < best) then best, least = other, d end
  end
  return best
end

-- Raises for a name that is not in `known`; `level` as error's.
function options.unknown(where, name, known, level)
  local near = options.suggest(name, known)
  if near then error(("%s: there is no option '%s'; did you mean '%s'?"):format(where, tostring(name), near), level) end
  local names = {}
  for other in pairs(known) do names[#names + 1] = other end
  table.sort(names)
  error(("%s: there is no option '%s'; there are %s"):format(where, tostring(name), table.concat(names, ', ')), level)
end

return setmetatable(options, {
  __call = function(_, where, given, defaults, level)
    level = (level or 2) + 1
    if given ~= nil and type(given) ~= 'table' then
      error(('%s: options must be a table, are a %s'):format(where, type(given)), level)
    end
    local o = {}
    for name, value in pairs(defaults) do
      if value ~= options.none then o[name] = value end
    end
    for name, value in pairs(given or {}) do
      local default = defaults[name]
      if default == nil then options.unknown(where, name, defaults, level) end
      local sizes = type(default) == 'number' and type(value) == 'table' -- one number for all dims, or one a dim
      if default ~= options.none and type(value) ~= type(default) and type(default) ~= 'table' and not sizes then
        error(('%s: %s must be a %s, is a %s'):format(where, name, type(default), type(value)), level)
      end
      o[name] = value
    end
    return o
  end,
})
