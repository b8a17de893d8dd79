-- Optimisers: names, arguments, defaults and formulas are PyTorch's. Each step is a few multi-tensor ops (src/op/optim.c): one for all
-- tensors of a group that are at the same step and of one dtype.
--
-- Row-sparse gradients (nn.Embedding with {sparse = true}) update only the rows that were looked up, momentum and averages included.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local optim = {}

-- -- The common part -----------------------------------------------------------------------------------------------------------

local Optimizer = {}
Optimizer.__index = Optimizer
optim.Optimizer = Optimizer

-- A class of optimisers. `defaults` are the options of a group, `check` raises for bad ones; `states(group)` names the tensors kept per
-- parameter, and `update(group, step, params, grads, states)` runs the op; `rows` does so for one row-sparse gradient.
local function class(name, spec)
  local methods = setmetatable({ _name = name, spec = spec }, Optimizer)
  methods.__index = methods
  methods.__tostring = Optimizer.__tostring
  optim[name] = setmetatable(methods, {
    __index = Optimizer,
    __call = function(_, params, given)
      local self = setmetatable({ param_groups = {}, state = {} }, methods)
      self.defaults = options(name, given, spec.defaults)
      for option, value in pairs(self.defaults) do
        if value == nil then self.defaults[option] = nil end
      end
      if type(params) ~= 'table' then
        error(('%s: parameters must be a table of tensors or of groups, are a %s'):format(name, type(params)), 2)
      end
      if #params == 0 then error(('%s: got an empty list of parameters'):format(name), 2) end
      if mf.is_tensor(params[1]) then params = { { params = params } } end
      for _, group in ipairs(params) do self:add_param_group(group) end
      return self
    end,
  })
end

local function check_range(self, group, option, low, high)
  local v = group[option]
  if v == nil then return end
  if type(v) ~= 'number' or not (v >= low) or (high and not (v < high)) then
    error(('%s: %s must be %s, is %s'):format(self._name, option,
      high and ('in [%g, %g)'):format(low, high) or ('at least %g'):format(low), tostring(v)), 4)
  end
end

-- Adds { params = {...}, lr = ..., ... }; options that are missing come from the optimiser's.
function Optimizer:add_param_group(group)
  if type(group) ~= 'table' or group.params == nil then error(self._name .. ': a group needs params', 3) end
  local params = mf.is_tensor(group.params) and { group.params } or group.params
  local new = { params = params }
  for option, default in pairs(self.defaults) do new[option] = default end
  for option, value in pairs(group) do
    if option ~= 'params' then
      if self.spec.defaults[option] == nil and option ~= 'initial_lr' then options.unknown(self._name, option, self.spec.defaults, 3) end
      new[option] = value
    end
  end
  for i, p in ipairs(params) do
    if not mf.is_tensor(p) then error(('%s: params[%d] is a %s and not a tensor'):format(self._name, i, type(p)), 3) end
    if not p.is_leaf then error(('%s: params[%d] is not a leaf; only leaves can be optimised'):format(self._name, i), 3) end
    for _, other in ipairs(self.param_groups) do
      for _, q in ipairs(other.params) do
        if q == p then error(('%s: params[%d] is in another group already'):format(self._name, i), 3) end
      end
    end
  end
  check_range(self, new, 'lr', 0)
  check_range(self, new, 'weight_decay', 0)
  check_range(self, new, 'momentum', 0)
  check_range(self, new, 'eps', 0)
  if new.betas then
    if type(new.betas) ~= 'table' or #new.betas ~= 2 then error(self._name .. ': betas must be a table of two numbers', 3) end
    for i = 1, 2 do check_range(self, { ['betas[' .. i .. ']'] = new.betas[i] }, 'betas[' .. i .. ']', 0, 1) end
  end
  if self.spec.check then self.spec.check(self, new) end
  self.param_groups[#self.param_groups + 1] = new
end

-- Drops the gradients, or fills them with zeros under {set_to_none = false}.
function Optimizer:zero_grad(o)
  o = options('zero_grad', o, { set_to_none = true })
  for _, group in ipairs(self.param_groups) do
    for _, p in ipairs(group.params) do
      if o.set_to_none then p.grad = nil
      elseif p.grad then p.grad:fill_(0) end
    end
  end
end

-- The state of a parameter, made at its first step.
local function state_of(self, group, p)
  local s = self.state[p]
  if not s then
    s = { step = 0 }
    for _, name in ipairs(self.spec.states(group)) do
      s[name] = self.spec.initial and self.spec.initial(group, p, name) or mf.zeros_like(p)
    end
    self.state[p] = s
  end
  s.step = s.step + 1
  return s
end

-- Parameters with dense gradients, sorted into runs of one step and dtype.
local function collect(self, group)
  local runs, order = {}, {}
  for _, p in ipairs(group.params) do
    local g = p.grad
    if g then
      local s = state_of(self, group, p)
      if g.is_rows then
        if not self.spec.rows then error(('%s: takes no row-sparse gradients'):format(self._name), 3) end
        local merged = g:coalesce()
        self.spec.rows(group, s.step, p, merged.ids, merged.values, s)
      else
        local key = s.step .. tostring(p.dtype)
        local run = runs[key]
        if not run then
          run = { step = s.step, params = {}, grads = {}, states = {} }
          runs[key] = run
          order[#order + 1] = run
        end
        local n = #run.params + 1
        run.params[n], run.grads[n] = p, g
        for _, name in ipairs(self.spec.states(group)) do
          run.states[name] = run.states[name] or {}
          run.states[name][n] = s[name]
        end
      end
    end
  end
  return order
end

-- One update. closure, where given, recomputes the loss (with gradients) before it; its result is returned.
function Optimizer:step(closure)
  local loss
  if closure then loss = mf.enable_grad(closure) end
  mf.no_grad(function()
    for _, group in ipairs(self.param_groups) do
      for _, run in ipairs(collect(self, group)) do
        local function state(name) return run.states[name] or {} end
        self.spec.update(group, run.step, run.params, run.grads, state)
      end
    end
  end)
  return loss
end

-- Parameters by number in order of groups; tensors of the state share memory with the optimiser.
function Optimizer:state_dict()
  local dict, n = { state = {}, param_groups = {} }, 0
  for i, group in ipairs(self.param_groups) do
    local saved = { params = {} }
    for option, value in pairs(group) do
      if option ~= 'params' then saved[option] = value end
    end
    for k, p in ipairs(group.params) do
      saved.params[k] = n
      dict.state[n] = self.state[p]
      n = n + 1
    end
    dict.param_groups[i] = saved
  end
  return dict
end

function Optimizer:load_state_dict(dict)
  if #dict.param_groups ~= #self.param_groups then
    error(('%s: the state has %d groups, the optimiser %d'):format(self._name, #dict.param_groups, #self.param_groups), 2)
  end
  for i, saved in ipairs(dict.param_groups) do
    if #saved.params ~= #self.param_groups[i].params then
      error(('%s: group %d of the state has %d parameters, the optimiser %d'):format(self._name, i, #saved.params,
        #self.param_groups[i].params), 2)
    end
  end
  for i, saved in ipairs(dict.param_groups) do
    local group = self.param_groups[i]
    for option, value in pairs(saved) do
      if option ~= 'params' then group[option] = value end
    end
    for k, p in ipairs(group.params) do
      local s = dict.state[saved.params[k]]
      self.state[p] = nil
      if s then
        local copy = {}
        for name, value in pairs(s) do copy[name] = mf.is_tensor(value) and value:detach():clone() or value end
        self.state[p] = copy
      end
    end
  end
end

function Optimizer:__tostring()
  local lines = {}
  for i, group in ipairs(self.param_groups) do
    local parts = {}
    for option, value in pairs(group) do
      if option ~= 'params' then
        if type(value) == 'table' then value = '(' .. table.concat(value, ', ') .. ')' end
        parts[#parts + 1] = ('    %s: %s'):format(option, tostring(value))
      end
    end
    table.sort(parts)
    lines[#lines + 1] = ('Parameter Group %d\n%s'):format(i - 1, table.concat(parts, '\n'))
  end
  return ('%s (\n%s\n)'):format(self._name, table.concat(lines, '\n'))
end

-- -- The optimisers --------------------------------------------------------------------------------------------------------------

class('SGD', {
  defaults = { lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0, nesterov = false, maximize = false },
  check = function(self, g)
    if g.nesterov and (g.momentum <= 0 or g.dampening ~= 0) then
      error(self._name .. ': nesterov needs a momentum and no dampening', 4)
    end
  end,
  states = function(g) return g.momentum ~= 0 and { 'momentum_buffer' } or {} end,
  update = function(g, step, params, grads, state)
    mf._sgd_(params, grads, state 'momentum_buffer', { lr = g.lr, momentum = g.momentum, dampening = g.dampening,
      weight_decay = g.weight_decay, nesterov = g.nesterov, maximize = g.maximize, first = step == 1 })
  end,
  rows = function(g, step, p, ids, values, s)
    mf._sgd_rows_(p, ids, values, s.momentum_buffer, { lr = g.lr, momentum = g.momentum, dampening = step == 1 and 0 or g.dampening,
      weight_decay = g.weight_decay, nesterov = g.nesterov, maximize = g.maximize })
  end,
})

local function adam(name, weight_decay, decoupled)
  class(name, {
    defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay, amsgrad = false, maximize = false },
    states = function(g)
      return g.amsgrad and { 'exp_avg', 'exp_avg_sq', 'max_exp_avg_sq' } or { 'exp_avg', 'exp_avg_sq' }
    end,
    update = function(g, step, params, grads, state)
      mf._adam_(params, grads, state 'exp_avg', state 'exp_avg_sq', state 'max_exp_avg_sq', { lr = g.lr, beta1 = g.betas[1],
        beta2 = g.betas[2], eps = g.eps, weight_decay = g.weight_decay, step = step, decoupled = decoupled, maximize = g.maximize })
    end,
    rows = function(g, step, p, ids, values, s)
      mf._adam_rows_(p, ids, values, s.exp_avg, s.exp_avg_sq, { lr = g.lr, beta1 = g.betas[1], beta2 = g.betas[2], eps = g.eps,
        weight_decay = g.weight_decay, step = step, decoupled = decoupled, maximize = g.maximize })
    end,
  })
end
adam('Adam', 0, false)
adam('AdamW', 0.01, true)

class('RMSprop', {
  defaults = { lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0, centered = false, maximize = false },
  states = function(g)
    local names = { 'square_avg' }
    if g.centered then names[#names + 1] = 'grad_avg' end
    if g.momentum > 0 then names[#names + 1] = 'momentum_buffer' end
    return names
  end,
  update = function(g, _, params, grads, state)
    mf._rmsprop_(params, grads, state 'square_avg', state 'grad_avg', state 'momentum_buffer', { lr = g.lr, alpha = g.alpha,
      eps = g.eps, weight_decay = g.weight_decay, momentum = g.momentum, maximize = g.maximize })
  end,
})

class('Adagrad', {
  defaults = { lr = 0.01, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0, eps = 1e-10, maximize = false },
  states = function() return { 'sum' } end,
  initial = function(g, p) return mf.full_like(p, g.initial_accumulator_value) end,
  update = function(g, step, params, grads, state)
    mf._adagrad_(params, grads, state 'sum', { lr = g.lr, lr_decay = g.lr_decay, weight_decay = g.weight_decay, eps = g.eps,
      step = step, maximize = g.maximize })
  end,
  rows = function(g, step, p, ids, values, s)
    if g.weight_decay ~= 0 then error('Adagrad: weight_decay does not go with row-sparse gradients', 0) end
    mf._adagrad_rows_(p, ids, values, s.sum, { lr = g.lr, lr_decay = g.lr_decay, eps = g.eps, step = step, maximize = g.maximize })
  end,
})

class('Adadelta', {
  defaults = { lr = 1, rho = 0.9, eps = 1e-6, weight_decay = 0, maximize = false },
  states = function() return { 'square_avg', 'acc_delta' } end,
  update = function(g, _, params, grads, state)
    mf._adadelta_(params, grads, state 'square_avg', state 'acc_delta', { lr = g.lr, rho = g.rho, eps = g.eps,
      weight_decay = g.weight_decay, maximize = g.maximize })
  end,
})

class('Adamax', {
  defaults = { lr = 2e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, maximize = false },
  states = function() return { 'exp_avg', 'exp_inf' } end,
  update = function(g, step, params, grads, state)
    mf._adamax_(params, grads, state 'exp_avg', state 'exp_inf', { lr = g.lr, beta1 = g.betas[1], beta2 = g.betas[2], eps = g.eps,
      weight_decay = g.weight_decay, step = step, maximize = g.maximize })
  end,
})

optim.lr_scheduler = require 'moonflow.sched'
return optim
