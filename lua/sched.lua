-- Learning-rate schedulers, as torch.optim.lr_scheduler: made over an optimiser, :step() after each epoch or batch. They set lr in the
-- optimiser's groups; `initial_lr` there is what it was at the start.
local options = require 'moonflow.options'
local none = options.none
local sched = {}

local Scheduler = {}
Scheduler.__index = Scheduler

-- A class whose learning rate is a closed form: rate(self, base, epoch) for one group.
local function class(name, init, rate)
  local methods = setmetatable({ _name = name, rate = rate }, Scheduler)
  methods.__index = methods
  sched[name] = setmetatable(methods, {
    __index = Scheduler,
    __call = function(_, optimizer, ...)
      if type(optimizer) ~= 'table' or not optimizer.param_groups then error(name .. ': the first argument must be an optimiser', 2) end
      local self = setmetatable({ optimizer = optimizer, last_epoch = -1, base_lrs = {} }, methods)
      for i, group in ipairs(optimizer.param_groups) do
        group.initial_lr = group.initial_lr or group.lr
        self.base_lrs[i] = group.initial_lr
      end
      init(self, ...)
      self:step()
      return self
    end,
  })
end

-- Sets the learning rates of the next epoch, or of the one given.
function Scheduler:step(epoch)
  self.last_epoch = epoch or self.last_epoch + 1
  for i, group in ipairs(self.optimizer.param_groups) do
    group.lr = self:rate(self.base_lrs[i], self.last_epoch, i)
  end
end

-- The learning rates in force, by group.
function Scheduler:get_last_lr()
  local list = {}
  for i, group in ipairs(self.optimizer.param_groups) do list[i] = group.lr end
  return list
end

function Scheduler:state_dict()
  local dict = {}
  for key, value in pairs(self) do
    if key ~= 'optimizer' and type(value) ~= 'function' and key ~= 'schedulers' then dict[key] = value end
  end
  if self.schedulers then
    dict.schedulers = {}
    for i, s in ipairs(self.schedulers) do dict.schedulers[i] = s:state_dict() end
  end
  return dict
end

function Scheduler:load_state_dict(dict)
  for key, value in pairs(dict) do
    if key == 'schedulers' then
      for i, saved in ipairs(value) do self.schedulers[i]:load_state_dict(saved) end
    else
      self[key] = value
    end
  end
end

class('StepLR', function(self, step_size, o)
  self.step_size, self.gamma = step_size, options('StepLR', o, { gamma = 0.1 }).gamma
end, function(self, base, epoch) return base * self.gamma ^ math.floor(epoch / self.step_size) end)

class('MultiStepLR', function(self, milestones, o)
  self.milestones, self.gamma = milestones, options('MultiStepLR', o, { gamma = 0.1 }).gamma
end, function(self, base, epoch)
  local passed = 0
  for _, m in ipairs(self.milestones) do
    if epoch >= m then passed = passed + 1 end
  end
  return base * self.gamma ^ passed
end)

class('ExponentialLR', function(self, gamma) self.gamma = gamma end,
  function(self, base, epoch) return base * self.gamma ^ epoch end)

class('ConstantLR', function(self, o)
  o = options('ConstantLR', o, { factor = 1 / 3, total_iters = 5 })
  self.factor, self.total_iters = o.factor, o.total_iters
end, function(self, base, epoch) return epoch < self.total_iters and base * self.factor or base end)

class('LinearLR', function(self, o)
  o = options('LinearLR', o, { start_factor = 1 / 3, end_factor = 1, total_iters = 5 })
  self.start_factor, self.end_factor, self.total_iters = o.start_factor, o.end_factor, o.total_iters
end, function(self, base, epoch)
  local t = math.min(epoch, self.total_iters) / self.total_iters
  return base * (self.start_factor + (self.end_factor - self.start_factor) * t)
end)

class('PolynomialLR', function(self, o)
  o = options('PolynomialLR', o, { total_iters = 5, power = 1 })
  self.total_iters, self.power = o.total_iters, o.power
end, function(self, base, epoch) return base * (1 - math.min(epoch, self.total_iters) / self.total_iters) ^ self.power end)

class('CosineAnnealingLR', function(self, T_max, o)
  self.T_max, self.eta_min = T_max, options('CosineAnnealingLR', o, { eta_min = 0 }).eta_min
end, function(self, base, epoch)
  return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * epoch / self.T_max)) / 2
end)

class('CosineAnnealingWarmRestarts', function(self, T_0, o)
  o = options('CosineAnnealingWarmRestarts', o, { T_mult = 1, eta_min = 0 })
  self.T_0, self.T_mult, self.eta_min = T_0, o.T_mult, o.eta_min
end, function(self, base, epoch)
  local length, at = self.T_0, epoch
  while at >= length do
    at = at - length
    length = length * self.T_mult
  end
  return self.eta_min + (base - self.eta_min) * (1 + math.cos(math.pi * at / length)) / 2
end)

class('LambdaLR', function(self, f) self.f = f end, function(self, base, epoch, i)
  local f = type(self.f) == 'table' and self.f[i] or self.f
  return base * f(epoch)
end)

-- Linear from start_factor to 1 over warmup_iters steps, then what `after` (a scheduler over the same optimiser) says.
class('WarmupLR', function(self, after, o)
  o = options('WarmupLR', o, { warmup_iters = 5, start_factor = 1 / 3 })
  self.warmup_iters, self.start_factor = o.warmup_iters, o.start_factor
  self.schedulers = after and { after } or {}
end, function(self, base, epoch, i)
  local factor = math.min(1, self.start_factor + (1 - self.start_factor) * epoch / self.warmup_iters)
  local after = self.schedulers[1]
  if epoch < self.warmup_iters or not after then return base * factor end
  after.last_epoch = epoch - self.warmup_iters
  return after:rate(after.base_lrs[i], after.last_epoch, i)
end)

-- One-cycle policy (Smith and Topin, 2017); max_lr a number or one a group; the number of steps by total_steps, or epochs and steps_per_epoch.
class('OneCycleLR', function(self, max_lr, o)
  o = options('OneCycleLR', o, { total_steps = none, epochs = none, steps_per_epoch = none, pct_start = 0.3, anneal_strategy = 'cos',
    cycle_momentum = true, base_momentum = 0.85, max_momentum = 0.95, div_factor = 25, final_div_factor = 1e4, three_phase = false }, 4)
  local total = o.total_steps or (o.epochs and o.steps_per_epoch and o.epochs * o.steps_per_epoch)
    or error('OneCycleLR: total_steps, or epochs and steps_per_epoch, are needed', 4)
  for key, value in pairs(o) do self[key] = value end
  self.total_steps = total
  for i, group in ipairs(self.optimizer.param_groups) do
    local top = type(max_lr) == 'table' and max_lr[i] or max_lr
    group.max_lr, group.initial_lr = top, top / o.div_factor
    group.min_lr = group.initial_lr / o.final_div_factor
    self.base_lrs[i] = group.initial_lr
  end
end, function(self, base, epoch, i)
  if epoch > self.total_steps then
    error(('OneCycleLR: step %d of %d'):format(epoch, self.total_steps), 3)
  end
  local group = self.optimizer.param_groups[i]
  local top, bottom, up = group.max_lr, group.min_lr, self.pct_start * self.total_steps - 1
  local phases = self.three_phase
    and { { up, base, top, 1 }, { 2 * up, top, base, -1 }, { self.total_steps - 1, base, bottom, 0 } }
    or { { up, base, top, 1 }, { self.total_steps - 1, top, bottom, -1 } }
  local from = 0
  for k, phase in ipairs(phases) do
    if epoch <= phase[1] or k == #phases then
      local t = (epoch - from) / (phase[1] - from)
      local function anneal(a, b)
        if self.anneal_strategy == 'linear' then return a + (b - a) * t end
        return b + (a - b) / 2 * (1 + math.cos(math.pi * t))
      end
      if self.cycle_momentum then
        local low, high = self.base_momentum, self.max_momentum
        local m = phase[4] == 1 and anneal(high, low) or phase[4] == -1 and anneal(low, high) or high
        if group.betas then group.betas = { m, group.betas[2] } elseif group.momentum then group.momentum = m end
      end
      return anneal(phase[2], phase[3])
    end
    from = phase[1]
  end
end)

-- Several schedulers, each from its milestone on.
class('SequentialLR', function(self, schedulers, o)
  self.schedulers, self.milestones = schedulers, options('SequentialLR', o, { milestones = {} }).milestones
end, function(self, _, epoch, i)
  local k, from = 1, 0
  for m, milestone in ipairs(self.milestones) do
    if epoch >= milestone then k, from = m + 1, milestone end
  end
  local s = self.schedulers[k]
  s.last_epoch = epoch - from
  return s:rate(s.base_lrs[i], s.last_epoch, i)
end)

-- Several schedulers at once: their factors on the initial rate are multiplied.
class('ChainedScheduler', function(self, schedulers) self.schedulers = schedulers end, function(self, base, epoch, i)
  local lr = base
  for _, s in ipairs(self.schedulers) do
    s.last_epoch = epoch
    if base ~= 0 then lr = lr * s:rate(base, epoch, i) / base end
  end
  return lr
end)

-- Lowers the rate when a value has not become better for `patience` epochs: step(value).
local Plateau = setmetatable({ _name = 'ReduceLROnPlateau' }, Scheduler)
Plateau.__index = Plateau
sched.ReduceLROnPlateau = setmetatable(Plateau, {
  __index = Scheduler,
  __call = function(_, optimizer, o)
    o = options('ReduceLROnPlateau', o, { mode = 'min', factor = 0.1, patience = 10, threshold = 1e-4, threshold_mode = 'rel',
      cooldown = 0, min_lr = 0, eps = 1e-8 })
    if o.factor >= 1 then error('ReduceLROnPlateau: factor must be below 1', 2) end
    o.optimizer, o.last_epoch, o.num_bad_epochs, o.cooldown_counter = optimizer, 0, 0, 0
    o.best = o.mode == 'min' and math.huge or -math.huge
    return setmetatable(o, Plateau)
  end,
})

function Plateau:is_better(value)
  local edge = self.threshold_mode == 'rel' and self.best * (1 + (self.mode == 'min' and -self.threshold or self.threshold))
    or self.best + (self.mode == 'min' and -self.threshold or self.threshold)
  if self.best == math.huge or self.best == -math.huge then return value ~= self.best and value == value end
  if self.mode == 'min' then return value < edge end
  return value > edge
end

function Plateau:step(value)
  if type(value) ~= 'number' then value = value:item() end
  self.last_epoch = self.last_epoch + 1
  if self:is_better(value) then
    self.best, self.num_bad_epochs = value, 0
  else
    self.num_bad_epochs = self.num_bad_epochs + 1
  end
  if self.cooldown_counter > 0 then
    self.cooldown_counter, self.num_bad_epochs = self.cooldown_counter - 1, 0
  end
  if self.num_bad_epochs > self.patience then
    for _, group in ipairs(self.optimizer.param_groups) do
      local lr = math.max(group.lr * self.factor, self.min_lr)
      if group.lr - lr > self.eps then group.lr = lr end
    end
    self.cooldown_counter, self.num_bad_epochs = self.cooldown, 0
  end
end

return sched
