-- nn.Graph: a step as a class, as OneFlow has it; its calls are compiled (compile.lua).
--
--   local Training = nn.Graph:extend 'Training'
--   function Training:init(model, opt, schedule)
--     self.model = model
--     self:add_optimizer(opt, { lr_sch = schedule })
--   end
--   function Training:build(x, y)
--     local loss = mf.cross_entropy(self.model(x), y)
--     loss:backward()
--     return loss
--   end
--   local train = Training(model, opt, schedule)
--   for x, y in loader() do train(x, y) end
--
-- A call drops the gradients, runs build, and takes a step of each optimiser, in one compiled step;
-- then the schedulers take theirs. A graph without optimisers computes what build says.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local options = require 'moonflow.options'
local fail, describe = options.fail, options.describe

-- -- Configuration --------------------------------------------------------------------------------

local Config = {}

local function check_open(self, what)
  if self._closed then fail('nn.Graph: %s must come before the first call, which compiles', what) end
end

-- A switch that may be off, and not yet on.
local function absent(name, what, off)
  Config[name] = function(_, on)
    if on == nil then on = true end
    if on ~= off then fail('nn.Graph: config:%s(%s): %s is not there yet', name, tostring(on), what) end
  end
end
absent('enable_zero', 'sharding of optimiser states', false)

-- Each call works on n micro-batches in turn and takes one step; see mf.compile, whose `repeated` is the second
-- argument.
function Config:set_gradient_accumulation_steps(n, repeated)
  check_open(self, 'config')
  rawset(self, '_times', n)
  rawset(self, '_repeated', repeated)
end

-- Products in bfloat16, or in another dtype, the rest in float32; see mf.compile. For float16 there is
-- set_grad_scaler.
function Config:enable_amp(on, dtype)
  check_open(self, 'config')
  rawset(self, '_amp', on ~= false and (dtype or 'bfloat16') or nil)
end

-- How many bytes a call may take, beside arguments and parameters; see mf.compile.
function Config:memory_budget(bytes)
  check_open(self, 'config')
  rawset(self, '_budget', options.count('nn.Graph: config:memory_budget', 'bytes', bytes, 1))
end

-- Whether what these modules compute is kept for the backward, or computed anew in it; see
-- mf.utils.checkpoint.
function Config:activation_checkpointing(...)
  check_open(self, 'config')
  for k = 1, select('#', ...) do
    local module = select(k, ...)
    if not nn.is_module(module) then
      fail('nn.Graph: config:activation_checkpointing takes modules; argument %d is %s', k, describe(module))
    end
    module.activation_checkpointing = true
  end
end

-- Switches a pass of the compiler; mf.compile lists their names in its error texts.
function Config:set_pass(name, on)
  check_open(self, 'config')
  local known = {}
  for _, pass in ipairs(mf._passes()) do known[pass] = true end
  if not known[name] then options.unknown('nn.Graph: config:set_pass', name, known) end
  self._passes[name] = on ~= false
end

-- Switches all passes that join several ops into one.
function Config:allow_fuse(on)
  for _, pass in ipairs(mf._passes()) do
    if pass:find '^fuse' then self:set_pass(pass, on) end
  end
end

local config_mt = {
  __index = function(_, key)
    return Config[key] or options.unknown('nn.Graph: config', key, Config)
  end,
  __newindex = function(_, key)
    if Config[key] then fail('nn.Graph: config:%s(...) is called, not set', key) end
    options.unknown('nn.Graph: config', key, Config)
  end,
}

-- -- The class ------------------------------------------------------------------------------------

-- What compiled steps are written as: local G = nn.Graph:extend 'G', with function G:init(...),
-- which assigns modules to self and names optimisers by self:add_optimizer(opt, {lr_sch = scheduler}),
-- and function G:build(...), which computes, calls backward and returns. g = G(...) makes one, g(x, y)
-- runs it: gradients are dropped, build runs, optimisers and then schedulers take a step.
-- self.config has set_pass, allow_fuse, enable_amp, set_gradient_accumulation_steps; print(g) shows modules and
-- compiled graphs.
nn.Graph = { _name = 'Graph' }
local Graph = nn.Graph

local function compiled(self)
  if not self._step then
    rawset(self.config, '_closed', true)
    rawset(self, '_step', mf.compile(function(...)
      for _, opt in ipairs(self._optimizers) do opt:zero_grad() end
      local scaler = self._scaler
      local function finish(...)
        for _, opt in ipairs(self._optimizers) do
          if scaler then scaler:step(opt) else opt:step() end
        end
        if scaler and #self._optimizers > 0 then scaler:update() end
        return ...
      end
      return finish(self:build(...))
    end, { name = self._name, passes = self.config._passes, amp = rawget(self.config, '_amp'),
      memory_budget = rawget(self.config, '_budget'),
      gradient_accumulation_steps = rawget(self.config, '_times') or 1,
      repeated = rawget(self.config, '_repeated') }))
  end
  return self._step
end

-- The schedulers take their steps.
local function finish(self, ...)
  for _, scheduler in ipairs(self._schedulers) do scheduler:step() end
  return ...
end

local function call(self, ...) return finish(self, compiled(self)(...)) end

local function text(self)
  local lines = { self._name .. '(' }
  for _, key in ipairs(self._keys) do
    if nn.is_module(rawget(self, key)) then
      lines[#lines + 1] = ('  (%s): %s'):format(key, (tostring(self[key]):gsub('\n', '\n  ')))
    end
  end
  for _, opt in ipairs(self._optimizers) do lines[#lines + 1] = '  ' .. (tostring(opt):gsub('\n', '\n  ')) end
  lines[#lines + 1] = ')'
  if self._step then lines[#lines + 1] = tostring(self._step) end
  return table.concat(lines, '\n')
end

local function construct(class, ...)
  local self = setmetatable({}, class._meta)
  rawset(self, '_keys', {})
  rawset(self, '_optimizers', {})
  rawset(self, '_schedulers', {})
  rawset(self, '_scaler', false)
  rawset(self, 'config', setmetatable({ _passes = {}, _closed = false }, config_mt))
  self:init(...)
  return self
end

local function record(self, key, value)
  self._keys[#self._keys + 1] = key
  rawset(self, key, value)
end

-- A class derived from this one.
function Graph:extend(name)
  local class = setmetatable({ _name = name, super = self }, {
    __index = self,
    __call = construct,
    __tostring = function() return 'class ' .. name end,
  })
  class._meta = { __index = class, __newindex = record, __call = call, __tostring = text }
  return class
end

setmetatable(Graph, { __call = function() return fail 'nn.Graph: is extended, not called: nn.Graph:extend "Name"' end })

function Graph:init() end

function Graph:build() fail('%s has no build', self._name) end

-- for loss in graph:over(loader) do ... end: a call for each batch, as mf.compile's step:over does it: the
-- loop does not wait for the step, but who reads a result or a parameter does.
function Graph:over(loader, o)
  local next_results = compiled(self):over(loader, o)
  local function checked(...)
    if (...) == nil then return nil end
    return finish(self, ...)
  end
  return function() return checked(next_results()) end
end

-- The optimiser takes a step in each call; lr_sch, a scheduler over it, one after each call.
function Graph:add_optimizer(opt, o)
  o = options('add_optimizer', o, { lr_sch = options.none })
  check_open(self.config, 'add_optimizer')
  if type(opt) ~= 'table' or not opt.param_groups or not opt.step then
    fail('add_optimizer: an optimiser is needed, this is %s', describe(opt))
  end
  for _, other in ipairs(self._optimizers) do
    if other == opt then fail 'add_optimizer: the optimiser is there already' end
  end
  local scheduler = o.lr_sch
  if scheduler ~= nil and (type(scheduler) ~= 'table' or scheduler.optimizer ~= opt or not scheduler.step) then
    fail('add_optimizer: lr_sch must be a scheduler over this optimiser, is %s', describe(scheduler))
  end
  if scheduler and not scheduler.rate then
    fail('add_optimizer: %s steps by a value; call its step yourself', scheduler._name)
  end
  self._optimizers[#self._optimizers + 1] = opt
  self._schedulers[#self._schedulers + 1] = scheduler
end

-- The loss is scaled by this mf.amp.GradScaler, in build: self:scale(loss):backward(). The optimisers' steps
-- and the scale's follow from what the gradients are, inside of the compiled step.
function Graph:set_grad_scaler(scaler)
  check_open(self.config, 'set_grad_scaler')
  if type(scaler) ~= 'table' or scaler._name ~= 'GradScaler' then
    fail('set_grad_scaler: an mf.amp.GradScaler is needed, this is %s', describe(scaler))
  end
  rawset(self, '_scaler', scaler)
end

-- The loss, scaled by what set_grad_scaler was given, if it was.
function Graph:scale(loss)
  return self._scaler and self._scaler:scale(loss) or loss
end

-- -- State ----------------------------------------------------------------------------------------

local function modules_of(self)
  local list = {}
  for _, key in ipairs(self._keys) do
    if nn.is_module(rawget(self, key)) then list[#list + 1] = key end
  end
  return list
end

-- The state dicts of the modules by the names of their fields, lists of those of optimizers and
-- schedulers, and that of the scaler.
function Graph:state_dict()
  local dict = { optimizers = {}, schedulers = {} }
  for _, key in ipairs(modules_of(self)) do
    if dict[key] then fail("state_dict: a module of a graph cannot be called '%s'", key) end
    dict[key] = self[key]:state_dict()
  end
  for i, opt in ipairs(self._optimizers) do dict.optimizers[i] = opt:state_dict() end
  for i, scheduler in ipairs(self._schedulers) do dict.schedulers[i] = scheduler:state_dict() end
  dict.grad_scaler = self._scaler and self._scaler:state_dict() or nil
  return dict
end

-- Takes over what state_dict gave.
function Graph:load_state_dict(dict)
  if type(dict) ~= 'table' then fail('load_state_dict: a table is needed, this is %s', describe(dict)) end
  local known = { optimizers = true, schedulers = true, grad_scaler = self._scaler and true or nil }
  for _, key in ipairs(modules_of(self)) do known[key] = true end
  for key in pairs(dict) do
    if not known[key] then options.unknown('load_state_dict', key, known) end
  end
  for key in pairs(known) do
    if type(dict[key]) ~= 'table' then fail('load_state_dict: there is no %s in it', key) end
  end
  for name, list in pairs { optimizers = self._optimizers, schedulers = self._schedulers } do
    if #dict[name] ~= #list then
      fail('load_state_dict: it has %d %s, the graph %d', #dict[name], name, #list)
    end
  end
  for _, key in ipairs(modules_of(self)) do self[key]:load_state_dict(dict[key]) end
  for i, opt in ipairs(self._optimizers) do opt:load_state_dict(dict.optimizers[i]) end
  for i, scheduler in ipairs(self._schedulers) do scheduler:load_state_dict(dict.schedulers[i]) end
  if self._scaler then self._scaler:load_state_dict(dict.grad_scaler) end
end

return nn
