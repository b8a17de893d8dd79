-- nn.Module, the class of all layers: `Module:extend 'Name'` makes a class, and calling the class
-- makes a layer. Parameters, state dicts, containers.
--
-- A module keeps its fields as they are assigned, and remembers the order in which names were first
-- assigned: parameters, buffers and submodules are listed in that order. These are its members, kept
-- apart from other fields, so that each assignment to one is seen: what would take a member off the
-- lists unnoticed is refused.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail, describe_value, none = options.fail, options.describe, options.none
local nn = {}

-- -- Parameters -----------------------------------------------------------------------------------

local parameters = setmetatable({}, { __mode = 'k' }) -- the tensors that are parameters

-- A tensor that modules list as a parameter; requires a gradient unless {requires_grad = false}.
function nn.Parameter(t, o)
  if not mf.is_tensor(t) then fail('Parameter: must be a tensor, is %s', describe_value(t)) end
  o = options('Parameter', o, { requires_grad = true })
  local p = t:detach()
  if o.requires_grad then p:requires_grad_() end
  parameters[p] = true
  return p
end

function nn.is_parameter(t) return parameters[t] or false end

-- -- Module ---------------------------------------------------------------------------------------

local Module = { _name = 'Module' }
nn.Module = Module

local function is_module(v) return type(v) == 'table' and rawget(v, '_keys') ~= nil end
nn.is_module = is_module

local function is_buffer(self, key, value) return rawget(self, '_buffers')[key] ~= nil and mf.is_tensor(value) end

-- Refuses to put in the place of a member, which is listed, what would not be.
local function check_member(self, key, member, value)
  local kind, hint = 'buffer', 'assign a tensor'
  if parameters[member] then kind, hint = 'parameter', 'assign nn.Parameter(t), or use :copy_(t) inside mf.no_grad'
  elseif is_module(member) then kind, hint = 'module', 'assign a module'
  end
  if parameters[value] or kind ~= 'parameter' and is_module(value) then return end
  if kind == 'buffer' and mf.is_tensor(value) then return end
  local what = mf.is_tensor(value) and 'a plain tensor' or is_module(value) and 'a module' or describe_value(value)
  fail('%s: %s is a %s and cannot become %s; %s; nil removes it', self._name, tostring(key), kind, what, hint)
end

-- Every assignment but to plain fields that are there.
local function record(self, key, value)
  local members = rawget(self, '_members')
  local listed = parameters[value] or is_module(value)
  if members[key] == nil then
    local keys = rawget(self, '_keys')
    keys[#keys + 1] = key
    if not listed and not is_buffer(self, key, value) then return rawset(self, key, value) end
  elseif value ~= nil then
    check_member(self, key, members[key], value)
  end
  if listed then rawget(self, '_buffers')[key] = nil end
  members[key] = value
  rawset(self, '_changes', self._changes + 1)
end

local function index_of(class)
  return function(self, key)
    local member = rawget(self, '_members')[key]
    if member == nil then return class[key] end
    return member
  end
end

local noted = mf._trace

local plain_call

-- With arguments as a plan has them; see parallelize.lua.
local function enter(self, ...)
  local function run(...) return plain_call(self, true, ...) end
  return run(rawget(self, '_enter')(...))
end

function plain_call(self, entered, ...)
  if not entered and rawget(self, '_enter') then return enter(self, ...) end
  local before, after = rawget(self, '_forward_pre_hooks'), rawget(self, '_forward_hooks')
  if before then
    for _, hook in ipairs(before) do hook(self, ...) end
  end
  if not after then return self:forward(...) end
  local function run(...)
    for _, hook in ipairs(after) do hook(self, ...) end
    return ...
  end
  return run(self:forward(...))
end

local function call(self, ...)
  if noted.modes then noted.modes[self], noted.members[self] = self.training, self._changes end
  if not rawget(self, 'activation_checkpointing') then return plain_call(self, false, ...) end
  return mf.utils._checkpoint(self, function(...) return plain_call(self, false, ...) end, ...)
end

local function describe(self)
  local lines = {}
  for name, child in self:named_children() do
    lines[#lines + 1] = ('  (%s): %s'):format(name, (tostring(child):gsub('\n', '\n  ')))
  end
  local extra = self:extra_repr()
  if #lines == 0 then return ('%s(%s)'):format(self._name, extra) end
  if extra ~= '' then table.insert(lines, 1, '  ' .. extra) end
  return ('%s(\n%s\n)'):format(self._name, table.concat(lines, '\n'))
end

local function construct(class, ...)
  local self = setmetatable({ _keys = {}, _members = {}, _buffers = {}, _changes = 0, training = true }, class._meta)
  self:init(...)
  return self
end

-- A class derived from this one; its instances print with this name.
function Module:extend(name)
  if type(name) ~= 'string' then
    fail("extend: a name is needed, as in nn.Module:extend 'Net'; given is %s", describe_value(name))
  end
  local class = setmetatable({ _name = name, super = self }, {
    __index = self,
    __call = construct,
    __tostring = function() return 'class ' .. name end,
  })
  class._meta = { __index = index_of(class), __newindex = record, __call = call, __tostring = describe }
  return class
end
setmetatable(Module, { __call = construct })
Module._meta = { __index = index_of(Module), __newindex = record, __call = call, __tostring = describe }

function Module:init() end

function Module:forward() fail('%s has no forward', self._name) end

function Module:extra_repr() return '' end

-- Iterates over (key, value) in order of assignment; a key assigned again keeps its place.
local function fields(self)
  local keys, i, seen = self._keys, 0, {}
  return function()
    while true do
      i = i + 1
      local key = keys[i]
      if key == nil then return nil end
      local value = self._members[key]
      if value == nil then value = rawget(self, key) end
      if value ~= nil and not seen[key] then
        seen[key] = true
        return key, value
      end
    end
  end
end

-- Names and submodules, in order.
function Module:named_children()
  local next_field = fields(self)
  return function()
    for key, value in next_field do
      if is_module(value) then return tostring(key), value end
    end
  end
end

function Module:children()
  local list = {}
  for _, child in self:named_children() do list[#list + 1] = child end
  return list
end

-- Lists this module and those below; a shared one once, or under `all` at each of its places.
local function walk(self, prefix, list, seen, all)
  if seen[self] then return list end
  seen[self] = true
  list[#list + 1] = { prefix, self }
  for name, child in self:named_children() do
    walk(child, prefix == '' and name or prefix .. '.' .. name, list, seen, all)
  end
  if all then seen[self] = nil end
  return list
end

local function iterate(list)
  local i = 0
  return function()
    i = i + 1
    if list[i] then return list[i][1], list[i][2] end
  end
end

local function values(iterator)
  local list = {}
  for _, value in iterator do list[#list + 1] = value end
  return list
end

-- This module and all below it, with dotted names ('' for itself).
function Module:named_modules() return iterate(walk(self, '', {}, {})) end
function Module:modules() return values(self:named_modules()) end

-- Tensors of all modules for which `wanted(module, key, value)`; each tensor once, or under `all` by
-- each of its names.
local function tensors(self, wanted, all)
  local list, seen = {}, {}
  for name, module in iterate(walk(self, '', {}, {}, all)) do
    for key, value in fields(module) do
      if mf.is_tensor(value) and wanted(module, key, value) and (all or not seen[value]) then
        seen[value] = true
        list[#list + 1] = { name == '' and tostring(key) or name .. '.' .. key, value }
      end
    end
  end
  return list
end

local function wants_parameter(_, _, value) return parameters[value] end
local function wants_buffer(module, key) return module._buffers[key] ~= nil end

function Module:named_parameters() return iterate(tensors(self, wants_parameter)) end
function Module:parameters() return values(self:named_parameters()) end
function Module:named_buffers() return iterate(tensors(self, wants_buffer)) end
function Module:buffers() return values(self:named_buffers()) end

function Module:register_parameter(name, p)
  if p ~= nil and not parameters[p] then fail('register_parameter: %s is not a Parameter', name) end
  self[name] = p
end

function Module:add_module(name, module)
  if not is_module(module) then
    fail('add_module: %s must be a module, is %s', name, describe_value(module))
  end
  self[name] = module
end

-- A tensor that is saved and moved with the module but not trained; with {persistent = false} it is
-- not saved.
function Module:register_buffer(name, t, o)
  o = options('register_buffer', o, { persistent = true })
  if t ~= nil and not mf.is_tensor(t) then
    fail('register_buffer: %s must be a tensor, is %s', name, describe_value(t))
  end
  self._buffers[name] = o.persistent and 'saved' or 'kept'
  self[name] = t
end

function Module:apply(f)
  for _, child in self:named_children() do child:apply(f) end
  f(self)
  return self
end

function Module:train(on)
  if on == nil then on = true end
  for _, module in self:named_modules() do rawset(module, 'training', on) end
  return self
end

function Module:eval() return self:train(false) end

function Module:requires_grad_(on)
  for _, p in self:named_parameters() do p:requires_grad_(on) end
  return self
end

-- Drops the gradients, or fills them with zeros under {set_to_none = false}.
function Module:zero_grad(o)
  o = options('zero_grad', o, { set_to_none = true })
  for _, p in self:named_parameters() do
    if not o.set_to_none and p.grad then p.grad:zero_() else p.grad = nil end
  end
end

-- Moves or converts parameters and buffers in place: to a device, to a float dtype (integers stay),
-- or by { device =, dtype =, memory_format = }; the memory format is for tensors of four dims.
function Module:to(target)
  local o = options('Module:to', mf._to_target(target), { dtype = none, device = none, memory_format = none })
  if o.device then mf._to_device('Module:to', o.device) end
  o.dtype = mf._to_dtype('Module:to', o.dtype)
  if o.dtype and not mf.zeros({ 0 }, { dtype = o.dtype }):is_floating_point() then
    fail('Module:to: the dtype must be a float dtype, is %s', tostring(o.dtype))
  end
  local function converted(t)
    return t:detach():to {
      device = o.device,
      dtype = t:is_floating_point() and o.dtype or nil,
      memory_format = t.ndim == 4 and o.memory_format or nil,
    }
  end
  local function convert(t)
    local g = t.grad
    t.grad = nil
    t.data = converted(t)
    if g then t.grad = converted(g) end
  end
  mf.no_grad(function()
    for _, p in self:named_parameters() do convert(p) end
    for _, b in self:named_buffers() do convert(b) end
  end)
  return self
end

-- Makes parameters and buffers global, in place: local ones are whole and equal on all ranks, of which each
-- keeps its part; global ones are converted. `sbp` is that of all, or a function of a name and a tensor that
-- gives it. What has no dims is everywhere.
function Module:to_global(...)
  local o = options.arguments('Module:to_global', { 'placement', 'sbp' }, { placement = none, sbp = none }, ...)
  local function converted(t, sbp) return mf.distribute(t:detach(), o.placement, sbp) end
  local function convert(name, t)
    local sbp = o.sbp
    if type(sbp) == 'function' then sbp = sbp(name, t) elseif t.ndim == 0 then sbp = mf._whole(o.placement) end
    local g = t.grad
    t.grad = nil
    t.data = converted(t, sbp)
    if g then t.grad = converted(g, sbp) end
  end
  mf.no_grad(function()
    for name, p in self:named_parameters() do convert(name, p) end
    for name, b in self:named_buffers() do convert(name, b) end
  end)
  return self
end

-- Gives parameters and buffers new memory on a device, which is not set: for a module that was made
-- on the meta device.
function Module:to_empty(device)
  if type(device) == 'table' then device = options('to_empty', device, { device = 'cpu' }).device end
  mf._to_device('to_empty', device)
  local function renew(t)
    t.grad = nil
    t.data = mf.empty_like(t, { device = device })
  end
  mf.no_grad(function()
    for _, p in self:named_parameters() do renew(p) end
    for _, b in self:named_buffers() do renew(b) end
  end)
  return self
end

function Module:float() return self:to(mf.float32) end
function Module:double() return self:to(mf.float64) end
function Module:half() return self:to(mf.float16) end
function Module:bfloat16() return self:to(mf.bfloat16) end

local function add_hook(self, list, f)
  if not rawget(self, list) then rawset(self, list, {}) end
  local hooks = self[list]
  hooks[#hooks + 1] = f
  return {
    remove = function()
      for i, hook in ipairs(hooks) do
        if hook == f then table.remove(hooks, i) return end
      end
    end,
  }
end

-- Calls f(module, ...) before forward with its arguments, or after it with its results; remove() of
-- what it returns ends that.
function Module:register_forward_pre_hook(f) return add_hook(self, '_forward_pre_hooks', f) end
function Module:register_forward_hook(f) return add_hook(self, '_forward_hooks', f) end

-- -- State dicts ----------------------------------------------------------------------------------

local function wants_state(module, key, value)
  return parameters[value] or module._buffers[key] == 'saved'
end

-- Names to tensors (sharing memory with the module), with the order of names in the metatable.
function Module:state_dict()
  local dict, order = {}, {}
  for _, entry in ipairs(tensors(self, wants_state, true)) do
    dict[entry[1]] = entry[2]:detach()
    order[#order + 1] = entry[1]
  end
  return setmetatable(dict, { order = order })
end

local function quoted(names)
  local list = {}
  for i, name in ipairs(names) do list[i] = '"' .. name .. '"' end
  return table.concat(list, ', ')
end

local mismatch = 'size mismatch for %s: copying a param with shape %s from checkpoint, '
  .. 'the shape in current model is %s.'

-- What keeps `source` from being copied into the tensor t of that name, or assigned to it; or nil.
local function obstacle(name, t, source, assign)
  if not mf.is_tensor(source) then
    return ('%s is a %s and not a tensor'):format(name, type(source))
  end
  if source.shape ~= t.shape then
    return mismatch:format(name, tostring(source.shape), tostring(t.shape))
  end
  if t.device == 'meta' and not assign then
    return ('%s is on the meta device, where nothing can be copied to; {assign = true} takes the '
      .. 'tensor of the dict in its place, to_empty gives the module memory'):format(name)
  end
  if source.device == 'meta' and not assign then
    return ('%s is on the meta device in the dict and has no data'):format(name)
  end
end

-- Copies a state dict into parameters and buffers. Missing and unexpected keys are errors unless
-- {strict = false}; sizes must always agree. With {assign = true} the module gets the dict's tensors
-- themselves, with their dtype and device. Nothing is done when there is an error. Returns
-- { missing_keys = {...}, unexpected_keys = {...} }.
function Module:load_state_dict(dict, o)
  o = options('load_state_dict', o, { strict = true, assign = false })
  if type(dict) ~= 'table' then
    fail('load_state_dict: a table of tensors by name is needed, this is %s', describe_value(dict))
  end
  for name, module in self:named_modules() do -- lazy layers
    if module._arguments and module.materialize_from then
      module:materialize_from(dict, name == '' and name or name .. '.')
    end
  end
  local missing, unexpected, problems, copies, known = {}, {}, {}, {}, {}
  for _, entry in ipairs(tensors(self, wants_state, true)) do
    local name, t = entry[1], entry[2]
    local source = dict[name]
    known[name] = true
    if source == nil then missing[#missing + 1] = name
    else
      problems[#problems + 1] = obstacle(name, t, source, o.assign)
      copies[#copies + 1] = { t, source }
    end
  end
  for name in pairs(dict) do
    if not known[name] then unexpected[#unexpected + 1] = tostring(name) end
  end
  table.sort(unexpected)
  if o.strict and #unexpected > 0 then
    local line = 'Unexpected key(s) in state_dict: %s.'
    table.insert(problems, 1, line:format(quoted(unexpected)))
  end
  if o.strict and #missing > 0 then
    table.insert(problems, 1, ('Missing key(s) in state_dict: %s.'):format(quoted(missing)))
  end
  if #problems > 0 then
    local list = table.concat(problems, '\n\t')
    fail('%s', ('Error(s) in loading state_dict for %s:\n\t%s'):format(self._name, list))
  end
  mf.no_grad(function()
    for _, copy in ipairs(copies) do
      local source = mf._as_laid_out(copy[2], copy[1]) -- of a global one a local source is the whole
      if o.assign then copy[1].data = source:detach() else copy[1]:copy_(source) end
    end
  end)
  return { missing_keys = missing, unexpected_keys = unexpected }
end

options.methods(Module, 'module')

-- -- Containers -----------------------------------------------------------------------------------

-- Applies modules one after the other. seq[i] and seq:get(i) count from 0.
nn.Sequential = Module:extend 'Sequential'
function nn.Sequential:init(...)
  rawset(self, 'n', 0)
  for i = 1, select('#', ...) do self:append((select(i, ...))) end
end

local function append(self, module)
  if not is_module(module) then
    fail('%s: entry %d must be a module, is %s', self._name, self.n, describe_value(module))
  end
  self[tostring(self.n)] = module
  rawset(self, 'n', self.n + 1)
  return self
end

local function get(self, i)
  if type(i) ~= 'number' or i < -self.n or i >= self.n or i % 1 ~= 0 then
    fail('%s: index %s is out of range; it has %d entries', self._name, describe_value(i), self.n)
  end
  return rawget(self, '_members')[tostring(i < 0 and i + self.n or i)]
end

-- Containers find seq[0] by number as well.
local function index_by_number(class)
  local index = class._meta.__index
  class._meta.__index = function(self, key)
    if type(key) == 'number' then return get(self, key) end
    return index(self, key)
  end
end

function nn.Sequential:append(module) return append(self, module) end
function nn.Sequential:len() return self.n end
function nn.Sequential:get(i) return get(self, i) end
function nn.Sequential:forward(x)
  local members = rawget(self, '_members')
  for i = 0, self.n - 1 do x = members[tostring(i)](x) end
  return x
end
index_by_number(nn.Sequential)

-- A list of modules whose order is that of the table given.
nn.ModuleList = Module:extend 'ModuleList'
function nn.ModuleList:init(list)
  rawset(self, 'n', 0)
  for _, module in ipairs(list or {}) do append(self, module) end
end
function nn.ModuleList:append(module) return append(self, module) end
function nn.ModuleList:len() return self.n end
function nn.ModuleList:get(i) return get(self, i) end
-- for i, module in list:iter() do
function nn.ModuleList:iter()
  local i = -1
  return function()
    i = i + 1
    if i < self.n then return i, get(self, i) end
  end
end
index_by_number(nn.ModuleList)

-- Modules by name, made of pairs {name, module}, so that they have an order; dict.name and
-- dict:get(name).
nn.ModuleDict = Module:extend 'ModuleDict'
function nn.ModuleDict:init(list)
  for _, entry in ipairs(list or {}) do self:set(entry[1], entry[2]) end
end
function nn.ModuleDict:set(name, module)
  if not is_module(module) then
    fail('ModuleDict: %s must be a module, is %s', tostring(name), describe_value(module))
  end
  self[name] = module
end
function nn.ModuleDict:get(name) return rawget(self, '_members')[name] end

-- A list of parameters.
nn.ParameterList = Module:extend 'ParameterList'
function nn.ParameterList:init(list)
  rawset(self, 'n', 0)
  for _, p in ipairs(list or {}) do self:append(p) end
end
function nn.ParameterList:append(p)
  self[tostring(self.n)] = parameters[p] and p or nn.Parameter(p)
  rawset(self, 'n', self.n + 1)
  return self
end
function nn.ParameterList:len() return self.n end
function nn.ParameterList:get(i) return get(self, i) end
index_by_number(nn.ParameterList)

return nn
