-- Optimisers: names, arguments, defaults and formulas are PyTorch's. A step is one multi-tensor op
-- (src/op/optim.c) for all tensors of a group that are at the same step and of one dtype.
--
-- Row-sparse gradients (nn.Embedding with {sparse = true}) update only the rows that were looked
-- up, momentum and averages included.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail, describe = options.fail, options.describe
local optim = {}

-- -- The common part ------------------------------------------------------------------------------

local Optimizer = {}
Optimizer.__index = Optimizer
optim.Optimizer = Optimizer

-- The parameters of a group as a table; checks that they can be optimised and are nowhere else.
local function check_params(self, params)
  params = mf.is_tensor(params) and { params } or params
  if type(params) ~= 'table' then
    fail('%s: params must be a table of tensors, is %s', self._name, describe(params))
  end
  local used = {}
  for _, group in ipairs(self.param_groups) do
    for _, p in ipairs(group.params) do used[p] = true end
  end
  for i, p in ipairs(params) do
    if not mf.is_tensor(p) then
      fail('%s: params[%d] must be a tensor, is %s', self._name, i, describe(p))
    end
    if not p.is_leaf then
      fail('%s: params[%d] is not a leaf; only leaves can be optimised', self._name, i)
    end
    if used[p] then fail('%s: params[%d] is there twice', self._name, i) end
    used[p] = true
  end
  return params
end

local function check_range(self, what, value, below)
  if value == nil or type(value) == 'number' and value >= 0 and not (below and value >= below) then
    return
  end
  local range = below and ('in [0, %g)'):format(below) or 'at least 0'
  fail('%s: %s must be %s, is %s', self._name, what, range, describe(value))
end

local function check_group(self, group)
  for _, name in ipairs { 'lr', 'weight_decay', 'momentum', 'eps', 'rho', 'alpha', 'lr_decay' } do
    check_range(self, name, group[name])
  end
  if group.betas then
    if #group.betas ~= 2 then fail('%s: betas must be a table of two numbers', self._name) end
    check_range(self, 'betas[1]', group.betas[1], 1)
    check_range(self, 'betas[2]', group.betas[2], 1)
  end
  if self.check then self:check(group) end
end

-- Adds { params = {...}, lr = ..., ... }; options that are missing are the optimiser's.
function Optimizer:add_param_group(group)
  if type(group) ~= 'table' or group.params == nil then
    fail('%s: a group is a table with params and options', self._name)
  end
  local given, initial_lr = {}, group.initial_lr
  for name, value in pairs(group) do
    if name ~= 'params' and name ~= 'initial_lr' then given[name] = value end
  end
  local new = options(self._name, given, self.defaults)
  new.params, new.initial_lr = check_params(self, group.params), initial_lr
  check_group(self, new)
  self.param_groups[#self.param_groups + 1] = new
end

-- A class of optimisers: optim[name](params, options) makes one. `spec` has
--   defaults                                      the options of a group
--   states(group)                                 names of the tensors kept for each parameter
--   update(group, step, params, grads, state, born)  runs the op on lists; state(name) is such a list
-- and may have
--   initial(group, p)                             the first value of a state, else zeros
--   rows(group, step, p, ids, values, states)     the update by one row-sparse gradient
-- `born`, which update has as well and rows finds in states, is the step that made the newest of the states: an
-- option that is switched on late brings its state with it.
--   check(self, group)                            raises for options that do not go together
local function class(name, spec)
  local methods = spec
  methods._name, methods.__index, methods.__tostring = name, spec, Optimizer.__tostring
  optim[name] = setmetatable(methods, {
    __index = Optimizer,
    __call = function(_, params, given)
      local self = setmetatable({ param_groups = {}, state = {} }, methods)
      self.defaults = options(name, given, spec.defaults)
      if mf.is_tensor(params) or type(params) ~= 'table' then
        fail('%s: a table of tensors or of groups is needed, this is a %s', name, type(params))
      end
      if #params == 0 then
        local hint = params.parameters and '; a module gives its own by :parameters()' or ''
        fail('%s: the list of parameters is empty%s', name, hint)
      end
      local is_list = mf.is_tensor(params[1]) or type(params[1]) ~= 'table'
      for _, group in ipairs(is_list and { { params = params } } or params) do
        self:add_param_group(group)
      end
      return self
    end,
  })
end

-- Drops the gradients, or fills them with zeros under {set_to_none = false}.
function Optimizer:zero_grad(o)
  local set_to_none = options('zero_grad', o, { set_to_none = true }).set_to_none
  local dense = {}
  for _, group in ipairs(self.param_groups) do
    for _, p in ipairs(group.params) do
      local g = not set_to_none and p.grad
      if not g or g.is_rows then p.grad = nil
      elseif g:is_contiguous() then dense[#dense + 1] = g
      else g:zero_() end
    end
  end
  for _, alike in ipairs(mf._by_layout(dense)) do mf._zero_all_(alike) end
end

-- -- A step ---------------------------------------------------------------------------------------

-- The state of a parameter, made at its first step; what an option needs that is on since, now.
local function state_of(self, group, p)
  local s = self.state[p] or { step = 0, born = 1 }
  for _, name in ipairs(self.states(group)) do
    if not s[name] then
      s[name] = mf._keep(mf._untraced(function()
        return self.initial and self.initial(group, p) or mf.zeros_like(p)
      end))
      s.born = s.step + 1
    end
  end
  self.state[p] = s
  if not mf._tracing() then s.step = s.step + 1 end
  return s
end

-- While a step is compiled: the group with its numbers as scalars, so that each call reads them
-- anew. What decides which tensors there are is fixed. `skip` is for the ops, see amp.lua.
local function traced_group(group, skip)
  local traced, fixed = setmetatable({}, { __index = group }), {}
  for name, value in pairs(group) do
    local decides = value == 0 and (name == 'momentum' or name == 'weight_decay')
    if name == 'betas' then
      local function beta(i) return mf.scalar(function() return group.betas[i] end) end
      traced.betas = { beta(1), beta(2) }
    elseif type(value) == 'number' and not decides then
      traced[name] = mf.scalar(function() return group[name] end)
    elseif decides or type(value) == 'boolean' then
      fixed[name] = value
    end
  end
  traced._skip = skip
  local n = #group.params
  table.insert(mf._trace.fits, function()
    for name, value in pairs(fixed) do
      if group[name] ~= value then return false end
    end
    return #group.params == n
  end)
  return traced
end

-- The step of parameters whose states are `states`, counted up before each call of the step that is
-- compiled; which is right as long as they are all at the same one.
local function traced_step(states)
  table.insert(mf._trace.fits, function()
    local step = states[1].step
    for _, s in ipairs(states) do
      if s.step ~= step then return false end
    end
    return true
  end)
  table.insert(mf._trace.undo, function()
    for _, s in ipairs(states) do s.step = s.step - 1 end
  end)
  local scalar = mf.scalar(function(first) -- `first`: the call that makes the scalar
    local step = states[1].step
    if not first then
      for _, s in ipairs(states) do s.step = step + 1 end
    end
    return step + 1
  end)
  mf._trace.used[scalar] = true -- it counts whether or not the update takes it
  return scalar
end

-- How many steps there were since the one that made the states; of a compiled one, before each call.
local function since(step, born)
  if type(step) == 'number' then return step - born end
  return mf.scalar(function() return step.value - born end)
end

-- Whether no element lies between those of p.
local function is_dense(p)
  if p:is_contiguous() then return true end
  local have, dense = p:stride(), mf.empty_like(p, { device = 'meta' }):stride()
  for d, step in ipairs(have) do
    if step ~= dense[d] and p.shape[d] > 1 then return false end
  end
  return true
end

-- A parameter with gaps is updated in a copy.
local function add_to(run, p, g, s)
  local n = #run.params + 1
  local place = is_dense(p) and p or p:contiguous()
  if place ~= p then run.copies[#run.copies + 1] = { p, place } end
  run.params[n], run.grads[n], run.states[n] = place, g, s
end

-- A compiled step uses the states there were: not after load_state_dict.
local function keep_states(self, used)
  table.insert(mf._trace.fits, function()
    for p, s in pairs(used) do
      if self.state[p] ~= s then return false end
    end
    return true
  end)
end

-- Updates by row-sparse gradients at once; sorts the others into runs of one step, dtype and layout.
local function collect(self, group, grads)
  local runs, last, used = {}, nil, {}
  for i, p in ipairs(group.params) do
    local g = grads[i]
    if g then
      local s = state_of(self, group, p)
      used[p] = s
      if g.is_rows then
        if not self.rows then fail('%s takes no row-sparse gradients', self._name) end
        local step = mf._tracing() and traced_step { s } or s.step
        mf.scope(self.rows, group, step, p, g.ids, g.values, s)
      else
        local layout = mf._layout_key(p)
        if not last or last.step ~= s.step or last.born ~= s.born or last.dtype ~= p.dtype
          or last.layout ~= layout then
          last = { step = s.step, born = s.born, dtype = p.dtype, layout = layout,
            params = {}, grads = {}, states = {}, copies = {} }
          runs[#runs + 1] = last
        end
        add_to(last, p, g, s)
      end
    end
  end
  if mf._tracing() then keep_states(self, used) end
  return runs
end

local function update_group(grads, self, group)
  for _, run in ipairs(collect(self, group, grads)) do
    local step = mf._tracing() and traced_step(run.states) or run.step
    self.update(group, step, run.params, run.grads, function(name)
      local list = {}
      for i, s in ipairs(run.states) do list[i] = s[name] end
      return list
    end, run.born)
    for _, copy in ipairs(run.copies) do copy[1]:copy_(copy[2]) end
  end
end

local function update(self)
  if mf._tracing() then
    local n = #self.param_groups
    table.insert(mf._trace.fits, function() return #self.param_groups == n end)
  end
  for _, group in ipairs(self.param_groups) do
    if mf._tracing() then group = traced_group(group, self._skip) end
    mf._with_gradients(group.params, update_group, self, group)
  end
end

-- Steps of compiled steps that a GradScaler left out do not count; what of them is counted so far is taken
-- back.
local function settle(self)
  if self._settle and not mf._tracing() then self._settle() end
end

-- One update. `closure`, where given, computes the loss anew, with gradients, before it; its result
-- is returned.
function Optimizer:step(closure)
  local loss
  settle(self)
  if closure then loss = mf.enable_grad(closure) end
  mf.no_grad(update, self)
  return loss
end

-- -- State dicts ----------------------------------------------------------------------------------

-- { state, param_groups }: parameters are numbered from 0 in order of groups. What is in `state`
-- shares memory with the optimiser; all of it are tensors, so that mf.save can write it.
function Optimizer:state_dict()
  settle(self)
  local dict, n = { state = {}, param_groups = {} }, 0
  for i, group in ipairs(self.param_groups) do
    local saved = { params = {} }
    for name, value in pairs(group) do
      if name ~= 'params' then saved[name] = value end
    end
    for k, p in ipairs(group.params) do
      saved.params[k] = n
      local s = self.state[p]
      if s then
        dict.state[n] = {}
        for name, value in pairs(s) do
          if name ~= 'born' then dict.state[n][name] = value end
        end
        dict.state[n].step = mf.tensor(s.step, { dtype = mf.int64 })
      end
      n = n + 1
    end
    dict.param_groups[i] = saved
  end
  return dict
end

-- Options that bring a state with them, on and off.
local all_on, all_off = { momentum = 1, centered = true, amsgrad = true }, { momentum = 0 }

-- The state of parameter n: nested as state_dict has it, or from flat names '0.step' as mf.load
-- gives them.
local function saved_state(self, state, n)
  if state[n] then return state[n] end
  if not state[n .. '.step'] then return nil end
  local s = { step = state[n .. '.step'] }
  for _, name in ipairs(self.states(all_on)) do s[name] = state[n .. '.' .. name] end
  return s
end

-- States of options may be missing: they are made at the next step.
local function load_state(self, p, s, n)
  local copy, required = { step = mf.is_tensor(s.step) and s.step:item() or s.step, born = 1 }, {}
  for _, name in ipairs(self.states(all_off)) do required[name] = true end
  for _, name in ipairs(self.states(all_on)) do
    local t = s[name]
    if t == nil and not required[name] then goto continue end
    if not mf.is_tensor(t) or t.shape ~= p.shape then
      local have = mf.is_tensor(t) and 'shape ' .. tostring(t.shape) or describe(t)
      fail('%s: %s of parameter %d must be a tensor of shape %s, is %s', self._name, name, n,
        tostring(p.shape), have)
    end
    copy[name] = mf._keep(mf.empty_like(p):copy_(mf._as_laid_out(t, p)))
    ::continue::
  end
  return copy
end

local function load_options(self, groups)
  if #groups ~= #self.param_groups then
    fail('%s: the state has %d groups, the optimiser %d', self._name, #groups, #self.param_groups)
  end
  for i, saved in ipairs(groups) do
    local group = self.param_groups[i]
    if #saved.params ~= #group.params then
      fail('%s: group %d of the state has %d parameters, the optimiser %d', self._name, i - 1,
        #saved.params, #group.params)
    end
    for name, value in pairs(saved) do
      if name ~= 'params' then group[name] = value end
    end
  end
end

-- Takes over a state_dict. Without param_groups in it the options stay. `state` may have flat names
-- ('0.exp_avg'), as mf.load(path, { prefix = 'optim.' }) gives them.
function Optimizer:load_state_dict(dict)
  settle(self)
  if type(dict) ~= 'table' or type(dict.state) ~= 'table' then
    fail('%s: a table with state (and param_groups) is needed', self._name)
  end
  if dict.param_groups then load_options(self, dict.param_groups) end
  mf.no_grad(function()
    local loaded, n = {}, 0
    for _, group in ipairs(self.param_groups) do
      for _, p in ipairs(group.params) do
        local s = saved_state(self, dict.state, n)
        if s then loaded[p] = load_state(self, p, s, n) end
        n = n + 1
      end
    end
    self.state = loaded
  end)
end

function Optimizer:__tostring()
  local lines = {}
  for i, group in ipairs(self.param_groups) do
    local parts = {}
    for name, value in pairs(group) do
      if name ~= 'params' then
        if type(value) == 'table' then value = '(' .. table.concat(value, ', ') .. ')' end
        parts[#parts + 1] = ('    %s: %s'):format(name, tostring(value))
      end
    end
    table.sort(parts)
    lines[i] = ('Parameter Group %d\n%s'):format(i - 1, table.concat(parts, '\n'))
  end
  return ('%s (\n%s\n)'):format(self._name, table.concat(lines, '\n'))
end

options.methods(Optimizer, 'opt')

-- -- The optimisers -------------------------------------------------------------------------------

-- Stochastic gradient descent, with momentum, also Nesterov's.
class('SGD', {
  defaults = { lr = 1e-3, momentum = 0, dampening = 0, weight_decay = 0, nesterov = false,
    maximize = false },
  check = function(self, g)
    if g.nesterov and (g.momentum <= 0 or g.dampening ~= 0) then
      fail('%s: nesterov needs a momentum and no dampening', self._name)
    end
  end,
  states = function(g) return g.momentum ~= 0 and { 'momentum_buffer' } or {} end,
  update = function(g, step, params, grads, state, born)
    local buffers = g.momentum ~= 0 and state 'momentum_buffer' or {}
    mf._sgd_(params, grads, buffers, { lr = g.lr, momentum = g.momentum, dampening = g.dampening,
      weight_decay = g.weight_decay, nesterov = g.nesterov, maximize = g.maximize, skip = g._skip,
      since = since(step, born) })
  end,
  rows = function(g, step, p, ids, values, s)
    mf._sgd_rows_(p, ids, values, g.momentum ~= 0 and s.momentum_buffer or nil, { lr = g.lr, momentum = g.momentum,
      dampening = g.dampening, weight_decay = g.weight_decay, nesterov = g.nesterov, maximize = g.maximize,
      skip = g._skip, since = since(step, s.born) })
  end,
})

-- Adam and AdamW differ in what weight_decay means: with AdamW it does not go through the averages.
local function adam(name, weight_decay, decoupled)
  local function coefficients(g, step)
    return { lr = g.lr, beta1 = g.betas[1], beta2 = g.betas[2], eps = g.eps,
      weight_decay = g.weight_decay, step = step, decoupled = decoupled, maximize = g.maximize,
      skip = g._skip }
  end
  class(name, {
    defaults = { lr = 1e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = weight_decay,
      amsgrad = false, maximize = false },
    states = function(g)
      return { 'exp_avg', 'exp_avg_sq', g.amsgrad and 'max_exp_avg_sq' or nil }
    end,
    update = function(g, step, params, grads, state)
      mf._adam_(params, grads, state 'exp_avg', state 'exp_avg_sq',
        g.amsgrad and state 'max_exp_avg_sq' or {}, coefficients(g, step))
    end,
    rows = function(g, step, p, ids, values, s)
      if g.amsgrad then fail('%s: amsgrad takes no row-sparse gradients', name) end
      mf._adam_rows_(p, ids, values, s.exp_avg, s.exp_avg_sq, coefficients(g, step))
    end,
  })
end
adam('Adam', 0, false)
adam('AdamW', 0.01, true)

-- RMSprop (Hinton, 2012).
class('RMSprop', {
  defaults = { lr = 0.01, alpha = 0.99, eps = 1e-8, weight_decay = 0, momentum = 0,
    centered = false, maximize = false },
  states = function(g)
    local names = { 'square_avg' }
    if g.centered then names[#names + 1] = 'grad_avg' end
    if g.momentum ~= 0 then names[#names + 1] = 'momentum_buffer' end
    return names
  end,
  update = function(g, _, params, grads, state)
    mf._rmsprop_(params, grads, state 'square_avg', g.centered and state 'grad_avg' or {},
      g.momentum ~= 0 and state 'momentum_buffer' or {}, { lr = g.lr, alpha = g.alpha, eps = g.eps,
        weight_decay = g.weight_decay, momentum = g.momentum, maximize = g.maximize, skip = g._skip })
  end,
})

-- Adagrad (Duchi and others, 2011).
class('Adagrad', {
  defaults = { lr = 0.01, lr_decay = 0, weight_decay = 0, initial_accumulator_value = 0,
    eps = 1e-10, maximize = false },
  states = function() return { 'sum' } end,
  initial = function(g, p) return mf.full_like(p, g.initial_accumulator_value) end,
  update = function(g, step, params, grads, state)
    mf._adagrad_(params, grads, state 'sum', { lr = g.lr, lr_decay = g.lr_decay, eps = g.eps,
      weight_decay = g.weight_decay, step = step, maximize = g.maximize, skip = g._skip })
  end,
  rows = function(g, step, p, ids, values, s)
    if g.weight_decay ~= 0 then
      fail 'Adagrad: weight_decay does not go with row-sparse gradients'
    end
    mf._adagrad_rows_(p, ids, values, s.sum,
      { lr = g.lr, lr_decay = g.lr_decay, eps = g.eps, step = step, maximize = g.maximize, skip = g._skip })
  end,
})

-- Adadelta (Zeiler, 2012).
class('Adadelta', {
  defaults = { lr = 1, rho = 0.9, eps = 1e-6, weight_decay = 0, maximize = false },
  check = function(self, g) check_range(self, 'rho', g.rho, 1) end,
  states = function() return { 'square_avg', 'acc_delta' } end,
  update = function(g, _, params, grads, state)
    mf._adadelta_(params, grads, state 'square_avg', state 'acc_delta', { lr = g.lr, rho = g.rho,
      eps = g.eps, weight_decay = g.weight_decay, maximize = g.maximize, skip = g._skip })
  end,
})

-- Adamax (Kingma and Ba, 2014).
class('Adamax', {
  defaults = { lr = 2e-3, betas = { 0.9, 0.999 }, eps = 1e-8, weight_decay = 0, maximize = false },
  states = function() return { 'exp_avg', 'exp_inf' } end,
  update = function(g, step, params, grads, state)
    mf._adamax_(params, grads, state 'exp_avg', state 'exp_inf', { lr = g.lr, beta1 = g.betas[1],
      beta2 = g.betas[2], eps = g.eps, weight_decay = g.weight_decay, step = step,
      maximize = g.maximize, skip = g._skip })
  end,
})

optim.lr_scheduler = require 'moonflow.sched'
return optim
