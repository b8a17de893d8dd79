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
  if prefix == 'M' then return { ('^function M%%.%s%%('):format(name), ('^local function %s%%('):format(name) } end
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

-- The table of defaults that the text of a function hands to options.
local function defaults_in(body)
  body = body:sub(1, math.min(body:find '\n%S' or #body, body:find '\n\n' or #body))
  local variable = body:match 'options%([^\n{]*, ([%w_]+)%)'
  for _, module in ipairs(variable and mf._source() or {}) do
    local found = sources[module]:match('\nlocal ' .. variable .. ' = (%b{})')
    if found and found ~= '{}' then return found end
  end
  return body:match 'arguments%([^\n{]*%b{},%s*(%b{})' or body:match 'options%([^\n{]*(%b{})'
    or body:match 'defaults = (%b{})' or body:match '^loss%([^{]*(%b{})' or body:match '^%l+%([^{]*%b{},%s*(%b{})'
end

-- The names of options in the text of a function, in its order, and the texts of their defaults.
local function options_in(body)
  local names, values = {}, {}
  local inner = (defaults_in(body) or '{}'):sub(2, -2):gsub('%b{}', function(list) return (list:gsub(',', '\1')) end)
  for entry in inner:gmatch '[^,]+' do
    local name, value = entry:gsub('\1', ','):match '^%s*([%w_]+) = (.-)%s*$'
    if name then
      local unset = value == 'none' or value == 'number' or value == 'tensor' or value:match '^options'
      names[#names + 1], values[name] = name, unset and '' or ' ' .. value
    end
  end
  return names, values
end

local function shown_value(value)
  if type(value) == 'string' then return ("'%s'"):format(value) end
  if type(value) == 'table' then
    local list = {}
    for i, v in ipairs(value) do list[i] = shown_value(v) end
    return '{' .. table.concat(list, ', ') .. '}'
  end
  if type(value) == 'number' and value ~= math.floor(value) and 1 / value == math.floor(1 / value)
    and #tostring(value) > 8 then
    return ('1 / %d'):format(1 / value)
  end
  return (tostring(value):gsub('e%-0', 'e-'))
end

-- 'name = default' of the options that a function or the constructor of a class reads: asked for, or
-- where it first wants another argument, by its text.
local function options_of(value, body)
  local defaults, order = options.read_by(value)
  for _, first in ipairs(type(value) == 'function' and { mf.ones(2, 2), { _name = '' } } or {}) do
    if not defaults then defaults, order = options.read_by(value, first) end
  end
  local names, values = options_in(body)
  local list, listed = {}, {}
  local function add(name)
    if listed[name] or (defaults and defaults[name] == nil) then return end
    listed[name] = true
    local text = not defaults and values[name] or options.is_unset(defaults[name]) and ''
    list[#list + 1] = name .. ' =' .. (text or ' ' .. shown_value(defaults[name]))
  end
  for _, name in ipairs(order) do add(name) end
  for _, name in ipairs(names) do add(name) end
  local rest = {}
  for name in pairs(defaults or {}) do rest[#rest + 1] = name end
  table.sort(rest)
  for _, name in ipairs(rest) do add(name) end
  return list
end

-- 'self, x, ...' as a list without self and, where there are options, without what they come in.
local function positional_of(text, is_method, has_options)
  local list = {}
  for name in (text or ''):gmatch '[%w_.]+' do
    local carries_options = name == 'o' or name == '...'
    if name ~= 'self' and not (has_options and carries_options) then list[#list + 1] = name end
  end
  if is_method then table.remove(list, 1) end
  return list
end

-- The value is what the source calls PREFIX.NAME: a function or a class.
local function lua_text(prefix, name, shown, module, value)
  local line, comment, body = definition(prefix, name, module)
  if not line then return end
  local arguments = line:match '^%s*function [%w_.:]+%((.-)%)' or line:match '^local function [%w_]+%((.-)%)'
  if not arguments then
    local init, _, init_body = definition(prefix .. '%.' .. name, 'init', module)
    if init then arguments, body = init:match '%((.-)%)', init_body
    else arguments = line:match 'function%((.-)%)' or '' end
  end
  local op = line:match "^%l+%('[%w_]+', '([%w_]+)'"
  if comment == '' and op then comment = ('The function mf.%s as a module.'):format(op) end
  if comment == '' and prefix == 'M' then -- all that the file is about
    comment = ('\n' .. sources['moonflow.' .. module]):match '^(.-)\n[^-]':gsub('\n%-%- ?', '\n'):sub(2)
  end
  if comment == '' then -- another name of something documented
    local other = line:match '=%s*[%w_]+%.([%w_]+)%s*$'
    if other and other ~= name then return shown .. ': see ' .. other end
  end
  -- A function that takes no options is not called: who knows what it does.
  local made = type(value) == 'function' and not line:find 'function'
  local reads = made or type(value) == 'table' or (arguments .. ','):find '%f[%w_.]o,' or arguments:find '%.%.%.'
    or body:sub(1, body:find '\n%S' or -1):find 'options%('
  local named = reads and options_of(value, body) or {}
  local positional = positional_of(arguments, prefix == 'Tensor', #named > 0)
  if made and (prefix == 'mf' or prefix == 'Tensor') then positional = { prefix == 'mf' and 'x' or nil } end
  if module == 'optim' or module == 'sched' then
    table.insert(positional, 1, module == 'optim' and 'params' or 'optimizer')
  end
  return ('%s(%s)\n\n%s'):format(shown, arguments_text(positional, named),
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
  ['nn.parallel'] = { 'parallel', 'nn_parallel', function() return mf.nn.parallel end },
  optim = { 'optim', 'optim', function() return mf.optim end },
  ['optim.lr_scheduler'] = { 'sched', 'sched', function() return mf.optim.lr_scheduler end },
  data = { 'data', 'data', function() return mf.data end },
  comm = { 'comm', 'comm', function() return mf.comm end },
  utils = { 'utils', 'utils', function() return mf.utils end },
  amp = { 'amp', 'amp', function() return mf.amp end },
}
local order = { 'nn', 'optim', 'optim.lr_scheduler', 'data', 'nn.init', 'nn.utils', 'nn.parallel', 'comm', 'utils',
  'amp' }

-- -- Classes and their methods --------------------------------------------------------------------

-- By the name of the class in a script: { the class, what the source calls it }. In the order in
-- which a bare name of a method is looked for.
local classes, class_order = nil, {}
local function known_classes()
  if classes then return classes end
  classes = {}
  local function add(name, class, source)
    classes[name] = { class, source }
    class_order[#class_order + 1] = name
  end
  add('nn.Module', mf.nn.Module, 'Module')
  add('nn.Graph', mf.nn.Graph, 'Graph')
  add('optim.Optimizer', mf.optim.Optimizer, 'Optimizer')
  add('optim.lr_scheduler.LRScheduler', getmetatable(mf.optim.lr_scheduler.StepLR).__index, 'Scheduler')
  add('data.DataLoader', mf.data._Loader, 'Loader')
  add('data.Dataset', mf.data.Dataset, 'Dataset')
  add('data.Sampler', mf.data.Sampler, 'Sampler')
  add('Function', mf.Function, 'Function')
  add('amp.GradScaler', mf.amp._GradScaler, 'GradScaler')
  for _, where in ipairs(order) do
    local names = {}
    for name, value in pairs(modules[where][3]()) do
      if type(value) == 'table' and getmetatable(value) and not classes[where .. '.' .. name] then
        names[#names + 1] = name
      end
    end
    table.sort(names)
    for _, name in ipairs(names) do
      add(where .. '.' .. name, modules[where][3]()[name], modules[where][1] .. '%.' .. name)
    end
  end
  return classes
end

local function class_named(name)
  if known_classes()[name] then return name end
  for _, where in ipairs(order) do
    if classes[where .. '.' .. name] then return where .. '.' .. name end
  end
end

local function parent_of(class)
  local meta = getmetatable(class)
  local parent = meta and rawget(meta, '__index')
  return type(parent) == 'table' and parent or nil
end

-- The name of a class, or of the nearest known one that it extends.
local function class_name(class)
  while class do
    for name, known in pairs(known_classes()) do
      if rawequal(known[1], class) then return name end
    end
    class = parent_of(class)
  end
end

-- Methods of the class itself that are for scripts. Those of an optimiser or scheduler that its base
-- lacks are what it hands to the base.
local internal = { materialize = true, materialize_from = true, init = true, forward = true, extra_repr = true }
local function own_methods(name)
  local class, list = known_classes()[name][1], {}
  local base = name:match '^optim' and parent_of(class)
  for key, value in pairs(class) do
    local public = type(value) == 'function' and type(key) == 'string' and key:sub(1, 1) ~= '_'
    local shown = base and base[key] or not base and (not internal[key] or name == 'nn.Module' or name == 'nn.Graph')
    if public and shown then list[#list + 1] = key end
  end
  table.sort(list)
  return list
end

-- The text of a method: the first that documents it, of the class or of those above.
local function method_text(name, method)
  local class, text = known_classes()[name][1], nil
  while class do
    local value = rawget(class, method)
    local owner = class_name(class)
    local shown, source = owner .. ':' .. method, classes[owner][2]
    text = best_of(text, texts[shown])
    if type(value) == 'function' then
      text = best_of(text, lua_text(source, method, shown, nil, value),
        lua_text(source:match '[%w_]+$', method, shown, nil, value))
    end
    class = parent_of(class)
  end
  return text
end

-- The classes that define a method.
local function owners_of(method)
  local list = {}
  known_classes()
  for _, name in ipairs(class_order) do
    for _, own in ipairs(own_methods(name)) do
      if own == method then list[#list + 1] = name end
    end
  end
  return list
end

-- Names, sorted, as lines of at most 100 columns.
local function wrapped(label, names)
  if #names == 0 then return '' end
  table.sort(names)
  local lines, line = {}, ('%-10s'):format(label)
  for i, name in ipairs(names) do
    local word = name .. (i < #names and ', ' or '')
    if #line + #word > 100 then
      lines[#lines + 1] = line:sub(1, -2)
      line = (' '):rep(10)
    end
    line = line .. word
  end
  lines[#lines + 1] = line
  return '\n' .. table.concat(lines, '\n')
end

local function with_methods(name, text)
  if not known_classes()[name] or not text then return text end
  local parent = class_name(parent_of(classes[name][1]))
  local own = own_methods(name)
  if parent then parent = #own > 0 and '\nand those of ' .. parent or '\nmethods   those of ' .. parent end
  return text .. '\n' .. wrapped('methods', own) .. (parent or '')
end

-- What is in a module.
local function module_text(where)
  local names = { classes = {}, functions = {}, modules = {} }
  for name in pairs(modules[where][3]()) do
    if type(name) == 'string' and name:sub(1, 1) ~= '_' then
      local is_module = modules[where .. '.' .. name] or name == 'functional'
      local is_class = known_classes()[where .. '.' .. name]
      local kind = is_module and 'modules' or is_class and 'classes' or 'functions'
      table.insert(names[kind], name)
    end
  end
  return texts[where] .. '\n' .. wrapped('classes', names.classes) .. wrapped('functions', names.functions)
    .. wrapped('modules', names.modules)
end

-- -- By name --------------------------------------------------------------------------------------

local function text_of(where, name)
  local op = op_named(name) or op_named((name:gsub('_$', ''))) or op_named((name:gsub('^_', '')))
  if where == 'x' then
    if texts['x:' .. name] then return texts['x:' .. name] end
    local value = mf.Tensor[name]
    if value == nil then return end
    return best_of(op_named(name) and op_text(op), lua_text('Tensor', name, 'x:' .. name, nil, value),
      lua_text('mf', name, 'mf.' .. name, nil, value), op and op_text(op))
  elseif where == 'mf' then
    if modules[name] then return module_text(name) end
    if texts[name] then return with_methods(name, texts[name]) end
    local value = mf[name]
    if value == nil then return end
    local part = mf._parts[name] and mf._parts[name]:match '%.(.*)'
    return best_of(op_named(name) and mf._op_of(value) and op_text(op), lua_text('mf', name, 'mf.' .. name, nil, value),
      part and lua_text('M', name, 'mf.' .. name, part, value), lua_text('Tensor', name, 'x:' .. name, nil, value),
      op and op_text(op))
  end
  local path = where .. '.' .. name
  if modules[path] then return module_text(path) end
  if texts[path] then return with_methods(path, texts[path]) end
  local module = modules[where]
  local value = module[3]()[name]
  if value == nil then return end
  if value == mf[name] then return text_of('mf', name) end
  return with_methods(path, lua_text(module[1], name, path, module[2], value))
end

-- A bare name, looked for everywhere; methods of classes that have it, too, are named.
local function find_bare(name)
  local text = text_of('mf', name) or text_of('x', name)
  for _, module in ipairs(order) do text = text or text_of(module, name) end
  local owners = owners_of(name)
  local list, listed = { text }, {}
  for _, owner in ipairs(owners) do
    local more = text and ('see also %s:%s'):format(owner, name) or method_text(owner, name)
    if more and not listed[more] then list[#list + 1] = more end
    listed[more or ''] = true
  end
  if #list > 0 then return table.concat(list, '\n\n') end
end

-- 'x:add_' and 'mf.add' as where and name; a bare name is looked for everywhere.
local function find(what)
  local where, name = what:match '^(.-)[.:]?([%w_]+)$'
  if not name then return end
  where = where:gsub('^mf%.', '')
  if where == 'Tensor' or where == 'a' then where = 'x' end
  if where == 'F' or where == 'nn.functional' then where = 'mf' end
  if where == '' then return find_bare(name) end
  if where == 'mf' or where == 'x' or modules[where] then return text_of(where, name) end
  local class = class_named(where)
  return class and method_text(class, name)
end

-- The name of the class that a table is, or is an instance of.
local function name_of_table(value)
  local meta = getmetatable(value)
  local own = class_name(value)
  if own or not meta then return own end
  for name, known in pairs(known_classes()) do
    if rawget(known[1], '_meta') == meta then return name end
  end
  if mf.nn.is_module(value) then return class_name(value.super) end
  local index = rawget(meta, '__index')
  return class_name(meta) or type(index) == 'table' and class_name(index) or meta._class and class_name(meta._class)
end

-- The name under which a function, class or module is bound.
local function name_of(value)
  local op, in_place = mf._op_of(value)
  if op and in_place then return 'x:' .. op .. '_' end
  if op then return mf[op] == nil and mf['_' .. op] and 'mf._' .. op or op end
  for _, name in ipairs(order) do
    if rawequal(modules[name][3](), value) then return name end
  end
  local places = { { 'mf', mf }, { 'x', mf.Tensor } }
  for _, name in ipairs(order) do places[#places + 1] = { name, modules[name][3]() } end
  for _, place in ipairs(places) do
    for name, other in pairs(place[2]) do
      if rawequal(other, value) and type(name) == 'string' then
        return place[1] .. (place[1] == 'x' and ':' or '.') .. name
      end
    end
  end
  if type(value) == 'table' then return name_of_table(value) end
  for name, known in pairs(known_classes()) do
    for method, other in pairs(known[1]) do
      if rawequal(other, value) and type(method) == 'string' then return name .. ':' .. method end
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
  add('', mf._parts)
  add('', mf.Tensor)
  for _, name in ipairs(order) do
    add(name .. '.', modules[name][3]())
    if not what:find '[.:]' then add('', modules[name][3]()) end
  end
  for name in pairs(known_classes()) do
    for _, method in ipairs(own_methods(name)) do
      known[name .. ':' .. method] = true
      if not what:find '[.:]' then known[method] = true end
    end
  end
  return options.suggest(what:gsub('^x:', ''):gsub('^mf%.', ''), known)
end

local overview = [[
help 'softmax', help(mf.softmax), help 'x:add_', help 'nn.Linear', help 'optim.AdamW:step'

tensors    mf.tensor, mf.zeros, mf.arange, mf.randn, ...; x.shape, x.dtype, x.grad; x[0], x[{ {}, {1, 3} }]
training   x:backward(), mf.grad, mf.no_grad(f), mf.Function, mf.amp.GradScaler
layers     mf.nn: help 'nn' lists them
compiling  mf.compile, mf.scalar, mf.nn.Graph
optimisers mf.optim, mf.optim.lr_scheduler: help 'optim'
data       mf.data: help 'data'
ranks      moonflow -n 4 script.lua; mf.rank, mf.world_size, mf.comm: help 'comm'
files      mf.save, mf.load
programs   mf.cli, mf.progress
all        help 'Tensor' lists the methods of tensors, help 'mf' the functions]]

local is_dtype = {}
for _, name in ipairs(texts.dtypes) do is_dtype[mf[name]] = true end

-- Names of mf, or of tensors, without those that write in place.
local function listing(t, more)
  local names, listed = {}, {}
  for _, source in ipairs { t, more } do
    for name, value in pairs(source) do
      if type(name) == 'string' and name:match '^%a[%w_]*[%w]$' and not listed[name] and not is_dtype[value] then
        listed[name] = true
        names[#names + 1] = name
      end
    end
  end
  return names
end

local function help(...)
  local what = ...
  if select('#', ...) == 0 or rawequal(what, mf) then return overview end
  if what == 'mf' then return overview .. '\n' .. wrapped('mf', listing(mf, mf._parts)) end
  local name = type(what) == 'string' and what or nil
  if type(what) == 'function' or type(what) == 'table' then name = name_of(what) end
  if mf.is_tensor(what) or rawequal(what, mf.Tensor) or name == 'mf.Tensor' then name = 'Tensor' end
  if is_dtype[what] then name = tostring(what) end
  if not name then
    options.fail('help: nothing is known of %s; give a name, a function or a class', options.describe(what))
  end
  if name == 'Tensor' then return texts.Tensor .. '\n' .. wrapped('x:', listing(mf.Tensor, {})) end
  local text = find(name)
  if text then return text end
  local near = suggestion(name)
  local hint = near and near ~= name and ("; did you mean '%s'?"):format(near) or ''
  return options.fail("help: there is nothing called '%s'%s", name, hint)
end

return help
