-- mf.help(what): the documentation of an op, a function, a method or a class, as text. `what` is a
-- name ('softmax', 'x:add_', 'nn.Linear') or the thing itself. Ops are described by their records;
-- what is written in Lua by the comment above it and the options that its source reads; functions
-- of the C binding, and what the source makes in loops, by help_texts.lua.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'

local texts = require 'moonflow.help_texts'

local records
local function op_named(name)
  if not records then
    records = {}
    for _, op in ipairs(mf._ops()) do records[op.name] = op end
  end
  return records[name]
end

-- -- Ops ------------------------------------------------------------------------------------------

-- 'a, b, {c = 1}'.
local function arguments_text(positional, named)
  local list = { unpack(positional) }
  if #named > 0 then list[#list + 1] = '{' .. table.concat(named, ', ') .. '}' end
  return table.concat(list, ', ')
end

-- How it is called from Lua: positional arguments, then what goes by name; as a function, as a
-- method, and in place.
local function calls_of(op)
  local positional, named = {}, {}
  for _, p in ipairs(op.params) do
    local default = p.default
    if default == 'None' or not default then default = ''
    else default = ' ' .. default:gsub('True', 'true'):gsub('False', 'false') end
    if not p.keyword_only and not p.default then positional[#positional + 1] = p.name
    else named[#named + 1] = p.name .. ' =' .. default end
  end
  local lines, first, flags = {}, op.params[1], op.flags
  if not flags.method_only then
    local name = (flags.hidden and 'mf._' or 'mf.') .. op.name
    lines[1] = ('%s(%s)'):format(name, arguments_text(positional, named))
  end
  if first and first.kind == 'tensor' and not first.list and not flags.function_only and not flags.hidden then
    local others = arguments_text({ unpack(positional, 2) }, named)
    lines[#lines + 1] = ('%s:%s(%s)'):format(first.name, op.name, others)
    if op.call_ then
      lines[#lines + 1] = ('%s:%s_(%s)   writes into %s'):format(first.name, op.name, others, first.name)
    end
  end
  return table.concat(lines, '\n')
end

local function op_text(op)
  local text = { calls_of(op), '', op.doc ~= '' and op.doc or '(not documented)', '', op.signature }
  local served = {}
  for _, p in ipairs(op.params) do
    if op.gradient[p.name] then served[#served + 1] = p.name end
  end
  if #served > 0 then text[#text + 1] = 'differentiable by ' .. table.concat(served, ', ') end
  return table.concat(text, '\n')
end

-- -- What is written in Lua -----------------------------------------------------------------------

-- Where PREFIX.NAME is defined, best first: patterns of the line.
local function patterns_of(prefix, name)
  return {
    ('^%%s*function %s[.:]%s%%('):format(prefix, name),
    ('^%%s*%s%%.%s ='):format(prefix, name),
    ("^filler%%('%s'"):format(name),
    ("^both%%('%s'"):format(name),
    ("^%%l+%%('%s'"):format(name), -- a maker of classes: activation('GELU', 'gelu', ...)
    ("^product%%('%s'"):format(name),
    ('^%%s*%s%%.%s, '):format(prefix, name),
    ('^%%s*[%%w_., ]*, %s%%.%s[, ][%%w_., ]*='):format(prefix, name),
  }
end

-- The line of a module's text that defines it, the comment above, the text from there on, and how
-- good the match is.
local function definition_in(text, name, patterns)
  local comment, best, rank = {}, nil, #patterns + 1
  local at = 1
  for line, behind in (text .. '\n'):gmatch '(.-)\n()' do
    local words = line:match '^%s*%-%- ?(.*)'
    if words then comment[#comment + 1] = words
    else
      for k, pattern in ipairs(line:find(name, 1, true) and patterns or {}) do
        if k <= rank and line:match(pattern) and (k < rank or (#best[2] == 0 and #comment > 0)) then
          best, rank = { line, comment, text:sub(at) }, k
        end
      end
      comment = {}
    end
    at = behind
  end
  return best, rank
end

local sources = setmetatable({}, {
  __index = function(t, module)
    t[module] = mf._source(module)
    return t[module]
  end,
})

-- The same among all modules, or in one.
local function definition(prefix, name, module)
  local patterns = patterns_of(prefix, name)
  local best, rank = nil, #patterns + 1
  local word = name:match '[%w_]+$'
  for _, other in ipairs(mf._source()) do
    local text = sources[other]
    if (not module or other:match('^moonflow%.' .. module)) and text:find(word, 1, true) then
      local found, k = definition_in(text, word, patterns)
      if found and (k < rank or (k == rank and #best[2] == 0)) then best, rank = found, k end
    end
  end
  if best then return best[1], table.concat(best[2], '\n'), best[3] end
end

-- The names and defaults that a call of options(...) or options.arguments(...) in the source reads.
local function options_text(body)
  body = body:sub(1, math.min(body:find '\n%S' or #body, body:find '\n\n' or #body))
  local defaults = body:match 'arguments%([^\n{]*%b{},%s*(%b{})' or body:match 'options%([^\n{]*(%b{})'
    or body:match 'defaults = (%b{})' or body:match '^loss%([^{]*(%b{})' or body:match '^%l+%([^{]*%b{},%s*(%b{})'
  if not defaults then return end
  local named = {}
  local inner = defaults:sub(2, -2):gsub('%b{}', function(list) return (list:gsub(',', '\1')) end)
  for entry in inner:gmatch '[^,]+' do
    local name, value = entry:gsub('\1', ','):match '^%s*([%w_]+) = (.-)%s*$'
    if name then
      local unset = value == 'none' or value == 'number' or value == 'tensor' or value:match '^options'
      named[#named + 1] = name .. ' =' .. (unset and '' or ' ' .. value)
    end
  end
  return named
end

-- 'self, x, ...' as a list without self and what options come in.
local function positional_of(text, is_method)
  local list = {}
  for name in (text or ''):gmatch '[%w_.]+' do
    if name ~= 'self' and name ~= '...' and name ~= 'o' then list[#list + 1] = name end
  end
  if is_method then table.remove(list, 1) end
  return list
end

local function lua_text(prefix, name, shown, module)
  local line, comment, body = definition(prefix, name, module)
  if not line then return end
  local named, arguments = options_text(body), line:match '^%s*function [%w_.:]+%((.-)%)'
  if not arguments then
    local init, _, init_body = definition(prefix .. '%.' .. name, 'init', module)
    if init then
      arguments, named = init:match '%((.-)%)', options_text(init_body)
    else
      arguments = line:match 'function%((.-)%)' or ''
    end
  end
  local op = line:match "^%l+%('[%w_]+', '([%w_]+)'"
  if comment == '' and op then comment = ('The function mf.%s as a module.'):format(op) end
  if comment == '' then -- another name of something documented
    local other = line:match '=%s*[%w_]+%.([%w_]+)%s*$'
    if other and other ~= name then return shown .. ': see ' .. other end
  end
  local positional = positional_of(arguments, prefix == 'Tensor')
  if module == 'optim' or module == 'sched' then
    table.insert(positional, 1, module == 'optim' and 'params' or 'optimizer')
  end
  return ('%s(%s)\n\n%s'):format(shown, arguments_text(positional, named or {}),
    comment ~= '' and comment or '(not documented)')
end

-- The first of several texts that documents something, else the first there is.
local function best_of(...)
  local any
  for i = 1, select('#', ...) do
    local text = select(i, ...)
    if text and not text:find('(not documented)', 1, true) then return text end
    any = any or text
  end
  return any
end

-- -- Finding --------------------------------------------------------------------------------------

-- By the name in a script: the name that the source has, the file, the table.
local modules = {
  nn = { 'nn', 'nn', function() return mf.nn end },
  ['nn.init'] = { 'init', 'nn_init', function() return mf.nn.init end },
  ['nn.utils'] = { 'utils', 'nn_utils', function() return mf.nn.utils end },
  optim = { 'optim', 'optim', function() return mf.optim end },
  ['optim.lr_scheduler'] = { 'sched', 'sched', function() return mf.optim.lr_scheduler end },
  data = { 'data', 'data', function() return mf.data end },
}
local order = { 'nn', 'optim', 'optim.lr_scheduler', 'data', 'nn.init', 'nn.utils' }

local function text_of(where, name)
  local op = op_named(name) or op_named((name:gsub('_$', ''))) or op_named((name:gsub('^_', '')))
  if where == 'x' then
    if texts['x:' .. name] then return texts['x:' .. name] end
    if mf.Tensor[name] == nil then return end
    return best_of(op_named(name) and op_text(op), lua_text('Tensor', name, 'x:' .. name),
      lua_text('mf', name, 'mf.' .. name), op and op_text(op))
  elseif where == 'mf' then
    if texts[name] then return texts[name] end
    if mf[name] == nil then return end
    return best_of(op_named(name) and mf._op_of(mf[name]) and op_text(op), lua_text('mf', name, 'mf.' .. name),
      lua_text('M', name, 'mf.' .. name), lua_text('Tensor', name, 'x:' .. name), op and op_text(op))
  end
  local module, known = modules[where], texts[where .. '.' .. name]
  if known then return known end
  if module[3]()[name] == nil then return end
  if module[3]()[name] == mf[name] then return text_of('mf', name) end
  return lua_text(module[1], name, where .. '.' .. name, module[2])
end

-- 'x:add_' and 'mf.add' as where and name; a bare name is looked for everywhere.
local function find(what)
  local where, name = what:match '^(.-)[.:]?([%w_]+)$'
  if not name then return end
  where = where:gsub('^mf%.', '')
  if where == 'Tensor' or where == 'a' then where = 'x' end
  if where == 'F' or where == 'nn.functional' then where = 'mf' end
  if where ~= '' then
    return (where == 'mf' or where == 'x' or modules[where]) and text_of(where, name)
  end
  local text = text_of('mf', name) or text_of('x', name)
  for _, module in ipairs(order) do text = text or text_of(module, name) end
  return text
end

-- The name under which a function or class is bound.
local function name_of(value)
  local op, in_place = mf._op_of(value)
  if op and in_place then return 'x:' .. op .. '_' end
  if op then return mf[op] == nil and mf['_' .. op] and 'mf._' .. op or op end
  local places = { { 'mf', mf }, { 'x', mf.Tensor } }
  for _, name in ipairs(order) do places[#places + 1] = { name, modules[name][3]() } end
  for _, place in ipairs(places) do
    for name, other in pairs(place[2]) do
      if rawequal(other, value) and type(name) == 'string' then
        return place[1] .. (place[1] == 'x' and ':' or '.') .. name
      end
    end
  end
end

-- The nearest names there are.
local function suggestion(what)
  local known = {}
  local function add(prefix, t)
    for key in pairs(t) do
      if type(key) == 'string' and key:sub(1, 1) ~= '_' then known[prefix .. key] = true end
    end
  end
  add('', mf)
  add('', mf.Tensor)
  for _, name in ipairs(order) do
    add(name .. '.', modules[name][3]())
    if not what:find '[.:]' then add('', modules[name][3]()) end
  end
  return options.suggest(what:gsub('^x:', ''):gsub('^mf%.', ''), known)
end

local overview = [[
help 'softmax', help(mf.softmax), help 'x:add_', help 'nn.Linear', help 'optim.AdamW'

tensors    mf.tensor, mf.zeros, mf.arange, mf.randn, ...; x.shape, x.dtype, x.grad; x[0], x[{ {}, {1, 3} }]
training   x:backward(), mf.grad, mf.no_grad(f)
layers     mf.nn
compiling  mf.compile, mf.scalar, mf.nn.Graph
optimisers mf.optim, mf.optim.lr_scheduler
data       mf.data
files      mf.save, mf.load]]

local function help(...)
  local what = ...
  if select('#', ...) == 0 or rawequal(what, mf) then return overview end
  local name = type(what) == 'string' and what or nil
  if type(what) == 'function' or type(what) == 'table' then name = name_of(what) end
  if mf.is_tensor(what) then name = 'Tensor' end
  if not name then
    options.fail('help: nothing is known of %s; give a name, a function or a class', options.describe(what))
  end
  local text = name == 'Tensor' and texts.Tensor or find(name)
  if text then return text end
  local near = suggestion(name)
  local hint = near and ("; did you mean '%s'?"):format(near) or ''
  return options.fail("help: there is nothing called '%s'%s", name, hint)
end

return help
