-- Reading arguments and tables of options: names, defaults, types, and errors that help.
--
--   local o = options('StepLR', given, { gamma = 0.1 })
--
-- gives a new table with the defaults filled in; an unknown name is an error with a suggestion. A
-- default of options.none stands for "nil unless given"; options.number, .string, .boolean, .table,
-- ['function'] and .userdata for the same, of that type.
--
--   local o = options.arguments('Pool', { 'stride', 'padding' }, { stride = 1, padding = 0 }, ...)
--
-- reads positional arguments in that order and a last table of options, as layers do. A table is
-- taken for options when it has a string key, or nothing in it.
--
-- Errors are raised at the innermost line that is not the library's own.
local options = {}

-- -- Errors ---------------------------------------------------------------------------------------

-- 'script.lua:12: ', the user's line that is running, or ''.
local function place()
  local level = 3
  while true do
    local frame = debug.getinfo(level, 'Sl')
    if not frame then return '' end
    if frame.currentline > 0 and not frame.source:find '^=moonflow' then
      return ('%s:%d: '):format(frame.short_src, frame.currentline)
    end
    level = level + 1
  end
end

-- Raises string.format(...) with the place of the user's line.
function options.fail(...) error(place() .. string.format(...), 0) end
local fail = options.fail

local warned = {}

-- Hands a text with its place to mf.warn, once for each place.
function options.warn(...)
  local text = place() .. 'warning: ' .. string.format(...)
  if warned[text] then return end
  warned[text] = true
  require 'moonflow.core'.warn(text)
end

-- Methods check that they were called with a colon, on what has a _name.
function options.methods(class, object)
  for name, f in pairs(class) do
    if type(f) == 'function' and type(name) == 'string' and name:sub(1, 1) ~= '_' then
      class[name] = function(self, ...)
        if type(self) ~= 'table' or not self._name then
          fail('%s.%s is a method; call it with a colon: %s:%s(...)', object, name, object, name)
        end
        return f(self, ...)
      end
    end
  end
end

-- "a string", "nil", "an empty table": what a value is, for error texts.
function options.describe(value)
  if value == nil then return 'nil' end
  if type(value) == 'number' or type(value) == 'boolean' then return tostring(value) end
  if type(value) == 'string' then return ("'%s'"):format(value) end
  if type(value) == 'userdata' and require 'moonflow.core'.is_tensor(value) then return 'a tensor' end
  return 'a ' .. type(value)
end
local describe = options.describe

-- -- Suggestions ----------------------------------------------------------------------------------

-- The edit distance of two names.
local function distance(a, b)
  local row = {}
  for j = 0, #b do row[j] = j end
  for i = 1, #a do
    local diagonal = row[0]
    row[0] = i
    for j = 1, #b do
      local x, y = a:sub(i, i), b:sub(j, j)
      local best = diagonal + (x == y and 0 or x:lower() == y:lower() and 0.5 or 1)
      diagonal = row[j]
      row[j] = math.min(best, row[j] + 1, row[j - 1] + 1)
    end
  end
  return row[#b]
end

-- The name of `known` (its keys) nearest to `name`, or nil when none is near.
function options.suggest(name, known)
  name = tostring(name)
  local best, least = nil, math.min(4, math.max(2, #name))
  for other in pairs(known) do
    local d = distance(name, other)
    if d < least or (d == least and best and other < best) then best, least = other, d end
  end
  return best
end

-- Raises for a name that is not among the keys of `known`.
function options.unknown(where, name, known)
  local near = options.suggest(name, known)
  if near then
    fail("%s: there is no option '%s'; did you mean '%s'?", where, tostring(name), near)
  end
  local names = {}
  for other in pairs(known) do names[#names + 1] = other end
  table.sort(names)
  local list = #names == 0 and 'there are none' or 'there are ' .. table.concat(names, ', ')
  fail("%s: there is no option '%s'; %s", where, tostring(name), list)
end

-- -- Single values --------------------------------------------------------------------------------

-- A whole number of at least `least` (0 when not given).
function options.count(where, name, value, least)
  least = least or 0
  if type(value) == 'number' and value >= least and value == math.floor(value) then return value end
  local what = describe(value)
  return fail('%s: %s must be a whole number of at least %d, is %s', where, name, least, what)
end

-- One number, or a table of n, as n whole numbers of at least `least`.
function options.counts(where, name, value, n, least)
  local list, is_table = {}, type(value) == 'table'
  if is_table and #value ~= n then fail('%s: %s must have %d numbers, has %d', where, name, n, #value) end
  for d = 1, n do list[d] = options.count(where, name, is_table and value[d] or value, least) end
  return list
end

-- Whether a value can be called.
function options.is_callable(f)
  return type(f) == 'function' or type(f) == 'table' and (getmetatable(f) or {}).__call ~= nil
end

-- One of a list of strings.
function options.choice(where, name, value, list)
  for _, allowed in ipairs(list) do
    if value == allowed then return value end
  end
  local all = table.concat(list, ', ')
  return fail('%s: %s must be one of %s, is %s', where, name, all, describe(value))
end

-- -- Tables ---------------------------------------------------------------------------------------

local optional = {}
options.none = setmetatable({}, { __tostring = function() return 'nil' end })
for _, kind in ipairs { 'number', 'string', 'boolean', 'table', 'function', 'userdata' } do
  options[kind] = {}
  optional[options[kind]] = kind
end

local function check(where, name, value, default)
  if default == options.none then return end
  local kind = optional[default] or type(default)
  if type(value) == kind then return end
  -- one number for all dims, or one for each
  if kind == 'number' and type(value) == 'table' and not optional[default] then return end
  fail('%s: %s must be a %s, is %s', where, name, kind, describe(value))
end

-- For the documentation: the defaults that f(...) hands to options or options.arguments, and the
-- order of those that go by position; nil when it reads none. f is left there.
local probe
function options.read_by(f, ...)
  local found = {}
  probe = found
  pcall(f, ...)
  probe = nil
  return found.defaults, found.order or {}
end

-- Whether a default stands for no value.
function options.is_unset(default) return default == options.none or optional[default] ~= nil end

local function read(_, where, given, defaults)
  if probe then
    probe.defaults = defaults
    error 'probed'
  end
  if given ~= nil and type(given) ~= 'table' then
    fail('%s: options must be a table, are %s', where, describe(given))
  end
  local o = {}
  for name, value in pairs(defaults) do
    if value ~= options.none and not optional[value] then o[name] = value end
  end
  for name, value in pairs(given or {}) do
    if defaults[name] == nil then options.unknown(where, name, defaults) end
    check(where, name, value, defaults[name])
    o[name] = value
  end
  return o
end

-- Is this a table of options, and not a value?
function options.is_options(value)
  if type(value) ~= 'table' then return false end
  if next(value) == nil then return true end
  for key in pairs(value) do
    if type(key) == 'string' then return true end
  end
  return false
end

function options.arguments(where, order, defaults, ...)
  local n, given, named = select('#', ...), {}, nil
  if probe then
    probe.order = order
    return options(where, nil, defaults)
  end
  if n > 0 and options.is_options((select(n, ...))) then
    n, named = n - 1, (select(n, ...))
  end
  if n > #order then fail('%s: %d arguments too many', where, n - #order) end
  for i = 1, n do given[order[i]] = (select(i, ...)) end
  for name, value in pairs(named or {}) do
    if given[name] ~= nil then fail('%s: %s is given twice', where, tostring(name)) end
    given[name] = value
  end
  return options(where, given, defaults)
end

return setmetatable(options, { __call = read })
