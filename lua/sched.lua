-- Learning-rate schedulers, as torch.optim.lr_scheduler: made over an optimiser; :step() after each
-- epoch or batch. They set lr in the optimiser's groups; `initial_lr` there is the first one.
local options = require 'moonflow.options'
local arguments, count, fail = options.arguments, options.count, options.fail
local sched = {}

-- -- The common part ------------------------------------------------------------------------------

local Scheduler = {}
Scheduler.__index = Scheduler
sched.LRScheduler = Scheduler

local function check_optimizer(name, optimizer)
  if type(optimizer) ~= 'table' or not optimizer.param_groups then
    fail('%s: the first argument must be an optimiser, is %s', name, options.describe(optimizer))
  end
end

-- The arguments, with those of `names`, which come first, taken out of a last table of options where
-- they are given by name.
local function in_order(name, names, ...)
  local n = select('#', ...)
  local last = n > 0 and select(n, ...)
  if type(last) ~= 'table' or getmetatable(last) or next(last) == nil or not options.is_options(last) then
    return ...
  end
  local list, rest = { ... }, {}
  for key, value in pairs(last) do rest[key] = value end
  list[n], n = nil, n - 1
  for i, key in ipairs(names) do
    if rest[key] ~= nil and i <= n then fail('%s: %s is given twice', name, key) end
    if i > n then list[i], rest[key] = rest[key], nil end
  end
  n = math.max(n, #names)
  list[n + 1] = rest
  return unpack(list, 1, n + 1)
end

-- A class of schedulers whose rate is a closed form: `init(self, ...)` reads the arguments, of which
-- the first are called `names`, and `rate(self, base, epoch, i)` is the learning rate of group i in
-- that epoch, base being the first.
local function class(name, names, init, rate)
  local methods = { _name = name, rate = rate }
  methods.__index = methods
  sched[name] = setmetatable(methods, {
    __index = Scheduler,
    __call = function(_, optimizer, ...)
      check_optimizer(name, optimizer)
      local self = setmetatable({ optimizer = optimizer, last_epoch = -1, base_lrs = {} }, methods)
      for i, group in ipairs(optimizer.param_groups) do
        group.initial_lr = group.initial_lr or group.lr
        self.base_lrs[i] = group.initial_lr
      end
      init(self, in_order(name, names, ...))
      self:step()
      return self
    end,
  })
end

-- The rate of group i in this epoch. A scheduler with a function `chain` starts from the rate in force
-- when that is another than its own of the epoch before, because the caller or a further scheduler has
-- set it: chain(self, lr, base, epoch, i).
local function next_rate(self, epoch, i, lr)
  local base = self.base_lrs[i]
  if self.chain and lr ~= (epoch > 0 and self:rate(base, epoch - 1, i) or base) then
    return self:chain(lr, base, epoch, i)
  end
  return self:rate(base, epoch, i)
end

-- Sets the learning rates of the next epoch, or of the one given.
function Scheduler:step(epoch)
  self.last_epoch = epoch or self.last_epoch + 1
  for i, group in ipairs(self.optimizer.param_groups) do
    group.lr = epoch and self:rate(self.base_lrs[i], epoch, i) or next_rate(self, self.last_epoch, i, group.lr)
  end
end

-- The learning rates in force, by group.
function Scheduler:get_last_lr()
  local list = {}
  for i, group in ipairs(self.optimizer.param_groups) do list[i] = group.lr end
  return list
end

-- Everything but the optimiser and functions; and the learning rates in force.
function Scheduler:state_dict()
  local dict = { last_lr = self:get_last_lr() }
  for key, value in pairs(self) do
    if key ~= 'optimizer' and key ~= 'schedulers' and type(value) ~= 'function' then
      dict[key] = value
    end
  end
  if self.schedulers then
    dict.schedulers = {}
    for i, s in ipairs(self.schedulers) do dict.schedulers[i] = s:state_dict() end
  end
  return dict
end

function Scheduler:load_state_dict(dict)
  for key, value in pairs(dict) do
    if key ~= 'schedulers' and key ~= 'last_lr' then self[key] = value end
  end
  for i, lr in ipairs(dict.last_lr or {}) do self.optimizer.param_groups[i].lr = lr end
  for i, saved in ipairs(dict.schedulers or {}) do self.schedulers[i]:load_state_dict(saved) end
end

Scheduler._name = 'LRScheduler'
options.methods(Scheduler, 'schedule')

-- -- One formula each -----------------------------------------------------------------------------

-- The rate times gamma every step_size epochs.
class('StepLR', { 'step_size' }, function(self, step_size, ...)
  self.step_size = count('StepLR', 'step_size', step_size, 1)
  self.gamma = arguments('StepLR', { 'gamma' }, { gamma = 0.1 }, ...).gamma
end, function(self, base, epoch) return base * self.gamma ^ math.floor(epoch / self.step_size) end)

-- The rate times gamma at each of the epochs in milestones.
class('MultiStepLR', { 'milestones' }, function(self, milestones, ...)
  if type(milestones) ~= 'table' then fail 'MultiStepLR: milestones must be a table of epochs' end
  self.milestones = milestones
  self.gamma = arguments('MultiStepLR', { 'gamma' }, { gamma = 0.1 }, ...).gamma
end, function(self, base, epoch)
  local passed = 0
  for _, m in ipairs(self.milestones) do
    if epoch >= m then passed = passed + 1 end
  end
  return base * self.gamma ^ passed
end)

-- The rate times gamma each epoch.
class('ExponentialLR', {}, function(self, ...)
  self.gamma = arguments('ExponentialLR', { 'gamma' }, { gamma = options.number }, ...).gamma
    or fail 'ExponentialLR: gamma is needed'
end, function(self, base, epoch) return base * self.gamma ^ epoch end)

-- The rate times factor for total_iters epochs, then the rate itself.
class('ConstantLR', {}, function(self, ...)
  local o = arguments('ConstantLR', { 'factor', 'total_iters' },
    { factor = 1 / 3, total_iters = 5 }, ...)
  self.factor, self.total_iters = o.factor, o.total_iters
end, function(self, base, epoch) return epoch < self.total_iters and base * self.factor or base end)

-- From start_factor to end_factor times the rate, in equal steps over total_iters epochs.
class('LinearLR', {}, function(self, ...)
  local o = arguments('LinearLR', { 'start_factor', 'end_factor', 'total_iters' },
    { start_factor = 1 / 3, end_factor = 1, total_iters = 5 }, ...)
  self.start_factor, self.end_factor, self.total_iters = o.start_factor, o.end_factor, o.total_iters
end, function(self, base, epoch)
  local t = math.min(epoch, self.total_iters) / self.total_iters
  return base * (self.start_factor + (self.end_factor - self.start_factor) * t)
end)

-- From the rate to 0 over total_iters epochs, as (1 - t) ^ power.
class('PolynomialLR', {}, function(self, ...)
  local o = arguments('PolynomialLR', { 'total_iters', 'power' },
    { total_iters = 5, power = 1 }, ...)
  self.total_iters, self.power = o.total_iters, o.power
end, function(self, base, epoch)
  return base * (1 - math.min(epoch, self.total_iters) / self.total_iters) ^ self.power
end)

local function cosine(from, to, t) return to + (from - to) * (1 + math.cos(math.pi * t)) / 2 end

-- From the rate to eta_min over T_max epochs along half a cosine, and back.
class('CosineAnnealingLR', { 'T_max' }, function(self, T_max, ...)
  self.T_max = count('CosineAnnealingLR', 'T_max', T_max, 1)
  self.eta_min = arguments('CosineAnnealingLR', { 'eta_min' }, { eta_min = 0 }, ...).eta_min
end, function(self, base, epoch) return cosine(base, self.eta_min, epoch / self.T_max) end)

-- Along half a cosine to eta_min in T_0 epochs, then anew; each time T_mult times as long.
class('CosineAnnealingWarmRestarts', { 'T_0' }, function(self, T_0, ...)
  local o = arguments('CosineAnnealingWarmRestarts', { 'T_mult', 'eta_min' },
    { T_mult = 1, eta_min = 0 }, ...)
  self.T_0 = count('CosineAnnealingWarmRestarts', 'T_0', T_0, 1)
  self.T_mult = count('CosineAnnealingWarmRestarts', 'T_mult', o.T_mult, 1)
  self.eta_min = o.eta_min
end, function(self, base, epoch)
  local length, at = self.T_0, epoch
  while at >= length do
    at = at - length
    length = length * self.T_mult
  end
  return cosine(base, self.eta_min, at / length)
end)

-- By the factor of this epoch to the one before.
local function chain_factor(self, lr, _, epoch, i)
  local before = epoch > 0 and self:rate(1, epoch - 1, i) or 1
  return before ~= 0 and lr * self:rate(1, epoch, i) / before or lr
end
for _, name in ipairs { 'StepLR', 'MultiStepLR', 'ExponentialLR', 'ConstantLR', 'LinearLR', 'PolynomialLR' } do
  sched[name].chain = chain_factor
end

-- The distance to eta_min by the factor of this epoch; up from the bottom by the step itself.
function sched.CosineAnnealingLR:chain(lr, base, epoch)
  if epoch == 0 then return lr end
  if (epoch - 1 - self.T_max) % (2 * self.T_max) == 0 then
    return lr + (base - self.eta_min) * (1 - math.cos(math.pi / self.T_max)) / 2
  end
  local function height(e) return 1 + math.cos(math.pi * e / self.T_max) end
  return self.eta_min + (lr - self.eta_min) * height(epoch) / height(epoch - 1)
end

-- The first rate times f(epoch); a table of functions has one for each group.
class('LambdaLR', { 'lr_lambda' }, function(self, lr_lambda, ...)
  arguments('LambdaLR', {}, {}, ...)
  for i = 1, #self.optimizer.param_groups do
    local f = type(lr_lambda) == 'table' and lr_lambda[i] or lr_lambda
    if type(f) ~= 'function' then
      fail('LambdaLR: a function of the epoch is needed, this is %s', options.describe(f))
    end
  end
  self.f = lr_lambda
end, function(self, base, epoch, i)
  local f = type(self.f) == 'table' and self.f[i] or self.f
  return base * f(epoch)
end)

-- -- OneCycleLR -----------------------------------------------------------------------------------

-- The phases of a cycle as { last step, from, to, momentum: -1 falls, 1 rises, 0 stays }.
local function one_cycle_phases(self, group)
  local low, top, bottom, last = group.initial_lr, group.max_lr, group.min_lr, self.total_steps - 1
  local up = self.pct_start * self.total_steps - 1
  if not self.three_phase then return { { up, low, top, -1 }, { last, top, bottom, 1 } } end
  return { { up, low, top, -1 }, { 2 * up, top, low, 1 }, { last, low, bottom, 0 } }
end

local function set_momentum(group, m)
  if group.betas then group.betas = { m, group.betas[2] }
  elseif group.momentum then group.momentum = m end
end

-- One-cycle policy (Smith and Topin, 2017): up to max_lr (a number, or one for each group) and down
-- again, momentum the other way; as long as total_steps, or epochs times steps_per_epoch.
class('OneCycleLR', { 'max_lr' }, function(self, max_lr, ...)
  local number = options.number
  local o = arguments('OneCycleLR', { 'total_steps', 'epochs', 'steps_per_epoch', 'pct_start', 'anneal_strategy',
    'cycle_momentum', 'base_momentum', 'max_momentum', 'div_factor', 'final_div_factor', 'three_phase' }, {
    total_steps = number, epochs = number, steps_per_epoch = number, pct_start = 0.3,
    anneal_strategy = 'cos', cycle_momentum = true, base_momentum = 0.85, max_momentum = 0.95,
    div_factor = 25, final_div_factor = 1e4, three_phase = false }, ...)
  options.choice('OneCycleLR', 'anneal_strategy', o.anneal_strategy, { 'cos', 'linear' })
  for key, value in pairs(o) do self[key] = value end
  self.total_steps = o.total_steps or (o.epochs or 0) * (o.steps_per_epoch or 0)
  if self.total_steps < 1 then
    fail 'OneCycleLR: total_steps, or epochs and steps_per_epoch, are needed'
  end
  for i, group in ipairs(self.optimizer.param_groups) do
    group.max_lr = type(max_lr) == 'table' and max_lr[i] or max_lr
    if type(group.max_lr) ~= 'number' then fail 'OneCycleLR: max_lr must be a number' end
    group.initial_lr = group.max_lr / o.div_factor
    group.min_lr = group.initial_lr / o.final_div_factor
    self.base_lrs[i] = group.initial_lr
  end
end, function(self, _, epoch, i)
  if epoch > self.total_steps then
    fail('OneCycleLR: this is step %d of %d', epoch, self.total_steps)
  end
  local group, from = self.optimizer.param_groups[i], 0
  local phases = one_cycle_phases(self, group)
  local n = 1
  while n < #phases and epoch > phases[n][1] do
    from = phases[n][1]
    n = n + 1
  end
  local last, start, stop, momentum = unpack(phases[n])
  local t = (epoch - from) / (last - from)
  local function anneal(a, b)
    return self.anneal_strategy == 'cos' and cosine(a, b, t) or (b - a) * t + a
  end
  if self.cycle_momentum then
    local low, high = self.base_momentum, self.max_momentum
    if momentum == 0 then low = high end
    set_momentum(group, momentum == 1 and anneal(low, high) or anneal(high, low))
  end
  return anneal(start, stop)
end)

-- -- Of several schedulers ------------------------------------------------------------------------

local function rate_of(scheduler, epoch, i)
  scheduler.last_epoch = epoch
  return scheduler:rate(scheduler.base_lrs[i], epoch, i)
end

local function check_schedulers(name, list)
  if type(list) ~= 'table' or #list == 0 then fail('%s: a table of schedulers is needed', name) end
  for k, s in ipairs(list) do
    if type(s) ~= 'table' or not s.rate then fail('%s: entry %d is no scheduler', name, k) end
  end
  return list
end

-- Linear from start_factor to 1 times the first rate over warmup_iters steps; then what `after`, a
-- scheduler over the same optimiser, says.
class('WarmupLR', { 'after' }, function(self, after, ...)
  local o = arguments('WarmupLR', { 'warmup_iters', 'start_factor' },
    { warmup_iters = 5, start_factor = 1 / 3 }, ...)
  self.warmup_iters = count('WarmupLR', 'warmup_iters', o.warmup_iters, 1)
  self.start_factor = o.start_factor
  self.schedulers = after and check_schedulers('WarmupLR', { after }) or {}
end, function(self, base, epoch, i)
  local after, at = self.schedulers[1], epoch / self.warmup_iters
  if at >= 1 then return after and rate_of(after, epoch - self.warmup_iters, i) or base end
  return base * (self.start_factor + (1 - self.start_factor) * at)
end)

-- Which of the schedulers of a SequentialLR it is, and its first epoch.
local function in_force(self, epoch)
  local k, from = 1, 0
  for m, milestone in ipairs(self.milestones) do
    if epoch >= milestone then k, from = m + 1, milestone end
  end
  return self.schedulers[k], from
end

-- Each scheduler from its milestone on, the first from the start.
class('SequentialLR', { 'schedulers' }, function(self, schedulers, ...)
  self.schedulers = check_schedulers('SequentialLR', schedulers)
  self.milestones = arguments('SequentialLR', { 'milestones' }, { milestones = {} }, ...).milestones
  if #self.milestones ~= #schedulers - 1 then
    fail('SequentialLR: %d schedulers need %d milestones, there are %d', #schedulers,
      #schedulers - 1, #self.milestones)
  end
end, function(self, _, epoch, i)
  local s, from = in_force(self, epoch)
  return rate_of(s, epoch - from, i)
end)

function sched.SequentialLR:chain(lr, _, epoch, i)
  local s, from = in_force(self, epoch)
  if epoch == from or not s.chain then return rate_of(s, epoch - from, i) end
  s.last_epoch = epoch - from
  return s:chain(lr, s.base_lrs[i], epoch - from, i)
end

-- All at once: their factors on the first rate are multiplied.
class('ChainedScheduler', { 'schedulers' }, function(self, schedulers, ...)
  arguments('ChainedScheduler', {}, {}, ...)
  self.schedulers = check_schedulers('ChainedScheduler', schedulers)
end, function(self, base, epoch, i)
  local lr = base
  for _, s in ipairs(self.schedulers) do
    if base ~= 0 then lr = lr * rate_of(s, epoch, i) / base end
  end
  return lr
end)

-- Each starts from the rate that the one before it leaves; when this is made, all have done so.
function sched.ChainedScheduler:step(epoch)
  if epoch then return Scheduler.step(self, epoch) end
  self.last_epoch = self.last_epoch + 1
  if self.last_epoch == 0 then return end
  for _, s in ipairs(self.schedulers) do s:step() end
end

-- As PyTorch has it, (schedulers, optimizer) and (schedulers); also (optimizer, schedulers).
local chained = getmetatable(sched.ChainedScheduler)
local chain = chained.__call
function chained.__call(methods, first, second, ...)
  if type(first) == 'table' and not first.param_groups then
    local optimizer = check_schedulers('ChainedScheduler', first)[1].optimizer
    if type(second) == 'table' and not second.param_groups then second = second.optimizer end
    first, second = second or optimizer, first
  end
  local self = chain(methods, first, second, ...)
  for k, s in ipairs(self.schedulers) do
    if s.optimizer ~= self.optimizer then
      fail('ChainedScheduler: scheduler %d is of another optimiser', k)
    end
  end
  return self
end

-- -- ReduceLROnPlateau ----------------------------------------------------------------------------

local Plateau = { _name = 'ReduceLROnPlateau' }
Plateau.__index = Plateau
-- Lowers the rate when a value has not become better for `patience` epochs: step(value).
sched.ReduceLROnPlateau = setmetatable(Plateau, {
  __index = Scheduler,
  __call = function(_, optimizer, ...)
    local name = 'ReduceLROnPlateau'
    check_optimizer(name, optimizer)
    local self = arguments(name, { 'mode', 'factor', 'patience', 'threshold', 'threshold_mode', 'cooldown',
      'min_lr', 'eps' }, { mode = 'min', factor = 0.1,
      patience = 10, threshold = 1e-4, threshold_mode = 'rel', cooldown = 0, min_lr = 0,
      eps = 1e-8 }, ...)
    options.choice(name, 'mode', self.mode, { 'min', 'max' })
    options.choice(name, 'threshold_mode', self.threshold_mode, { 'rel', 'abs' })
    if self.factor >= 1 then fail('%s: factor must be below 1, is %g', name, self.factor) end
    self.optimizer, self.last_epoch, self.num_bad_epochs, self.cooldown_counter = optimizer, 0, 0, 0
    self.best = self.mode == 'min' and math.huge or -math.huge
    return setmetatable(self, Plateau)
  end,
})

function Plateau:is_better(value)
  local max, best = self.mode == 'max', self.best
  local margin = max and self.threshold or -self.threshold
  local edge = self.threshold_mode == 'rel' and best * (1 + margin) or best + margin
  if max then return value > edge end
  return value < edge
end

function Plateau:step(value)
  if type(value) ~= 'number' then value = value:item() end
  self.last_epoch = self.last_epoch + 1
  if self:is_better(value) then self.best, self.num_bad_epochs = value, 0
  else self.num_bad_epochs = self.num_bad_epochs + 1 end
  if self.cooldown_counter > 0 then
    self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
  end
  if self.num_bad_epochs <= self.patience then return end
  for _, group in ipairs(self.optimizer.param_groups) do
    local lr = math.max(group.lr * self.factor, self.min_lr)
    if group.lr - lr > self.eps then group.lr = lr end
  end
  self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
end

options.methods(Plateau, 'schedule')

return sched
