-- mf.amp: scaling of losses, for training in float16, whose smallest gradients would become zero.
--
--   local scaler = mf.amp.GradScaler()
--   scaler:scale(loss):backward()
--   scaler:step(opt)            -- unless a gradient is infinite or NaN
--   scaler:update()
--
-- Names, defaults and semantics are PyTorch's. The scale, the count of good steps and what was found are
-- tensors, and all of this is made of ops: in a compiled step (mf.compile, nn.Graph) the decision is taken
-- inside, without a look at a number from Lua.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail, describe = options.fail, options.describe
local amp = {}

local GradScaler = { _name = 'GradScaler' }
GradScaler.__index = GradScaler

local function check(what, value, legal, range)
  if not legal then fail('GradScaler: %s must be %s, is %s', what, range, describe(value)) end
end

-- mf.amp.GradScaler({init_scale = 65536, growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000,
-- enabled = true}): multiplies losses by a scale, takes it out of the gradients again, leaves a step out whose
-- gradients are not finite, and makes the scale smaller then and larger after growth_interval good steps:
-- scaler:scale(loss):backward(); scaler:step(opt); scaler:update(). scaler:unscale_(opt) before clipping.
function amp.GradScaler(o)
  o = options('GradScaler', o, { init_scale = 65536, growth_factor = 2, backoff_factor = 0.5,
    growth_interval = 2000, enabled = true })
  check('init_scale', o.init_scale, o.init_scale > 0, 'more than 0')
  check('growth_factor', o.growth_factor, o.growth_factor > 1, 'more than 1')
  check('backoff_factor', o.backoff_factor, o.backoff_factor > 0 and o.backoff_factor < 1, 'between 0 and 1')
  check('growth_interval', o.growth_interval, o.growth_interval >= 1 and o.growth_interval % 1 == 0,
    'a whole number from 1')
  o._scale = mf.full({}, o.init_scale)
  o._tracker = mf.zeros({}, { dtype = mf.int32 })
  o._opts = setmetatable({}, { __mode = 'k' }) -- by optimiser: found, 0 or 1, and where in the protocol it is
  return setmetatable(o, GradScaler)
end

-- Whether it does anything.
function GradScaler:is_enabled() return self.enabled end

-- The scale as a number.
function GradScaler:get_scale() return self.enabled and self._scale:item() or 1 end

-- The loss times the scale; tables of losses too.
function GradScaler:scale(loss)
  if not self.enabled then return loss end
  if type(loss) == 'table' and not mf.is_tensor(loss) then
    local scaled = {}
    for key, value in pairs(loss) do scaled[key] = self:scale(value) end
    return scaled
  end
  if not mf.is_tensor(loss) then fail('GradScaler: scale: loss must be a tensor, is %s', describe(loss)) end
  self._scaled = true
  return loss * self._scale:to(loss.dtype)
end

local function entry_of(self, opt)
  if type(opt) ~= 'table' or not opt.param_groups then
    fail('GradScaler: an optimiser is needed, this is %s', describe(opt))
  end
  local entry = self._opts[opt]
  if not entry then
    entry = { found = mf._keep(mf._untraced(mf.zeros, {})) }
    self._opts[opt] = entry
  end
  return entry
end

local function gradients(opt)
  local list = {}
  for _, group in ipairs(opt.param_groups) do
    for _, p in ipairs(group.params) do
      local g = p.grad
      if g then list[#list + 1] = g.is_rows and g.values or g end
    end
  end
  return list
end

local function unscale(self, opt, entry)
  local inverse, found, together = 1 / self._scale:double(), nil, {}
  for _, g in ipairs(gradients(opt)) do
    local bad = g:isfinite():logical_not():any()
    found = found and found:logical_or(bad) or bad
    if g.is_global or not g:is_contiguous() then g:mul_(inverse:to(g.dtype)) else together[#together + 1] = g end
  end
  for _, alike in ipairs(mf._by_layout(together)) do mf._scale_all_(inverse:to(alike[1].dtype), alike) end
  if not found then fail 'GradScaler: the optimiser has no gradients; call backward before' end
  entry.found:copy_(found)
end

-- Divides the optimiser's gradients by the scale, which step does otherwise: for clipping between the two.
function GradScaler:unscale_(opt)
  if not self.enabled then return end
  local entry = entry_of(self, opt)
  if entry.state then
    fail('GradScaler: unscale_ was called already since the last update%s', entry.state == 'stepped'
      and ', and the step taken' or '')
  end
  if not self._scaled then fail 'GradScaler: no loss was scaled since the last update; scale(loss):backward()' end
  mf.no_grad(unscale, self, opt, entry)
  entry.state = 'unscaled'
end

-- The update by ops that look at `found` themselves.
local function step_unless(opt, found, left)
  opt._skip = mf.stack { found, left }
  local ok, why = pcall(opt.step, opt)
  opt._skip = nil
  if not ok then error(why, 0) end
end

-- In a compiled step. The optimiser counts its steps in Lua, those that are left out as well; how many these
-- are is added up in a tensor, by which the ops correct that number, until `settle` takes them back.
local function traced_step(opt, entry)
  local undo, first, counted = mf._trace.undo, #mf._trace.undo, {}
  entry.left = entry.left or mf._keep(mf._untraced(mf.zeros, {}, { dtype = mf.float64 }))
  mf.no_grad(function()
    local found = entry.found:double()
    step_unless(opt, found, entry.left)
    entry.left:add_(found)
  end)
  for i = first + 1, #undo do counted[#counted + 1] = undo[i] end
  local function settle()
    local n = entry.left:item()
    for _ = 1, n do
      for _, f in ipairs(counted) do f() end
    end
    if n > 0 then mf.no_grad(entry.left.zero_, entry.left) end
  end
  opt._settle = settle
  table.insert(mf._trace.after, settle)
end

-- opt:step(), unless a gradient is infinite or NaN.
function GradScaler:step(opt)
  if not self.enabled then return opt:step() end
  local entry = entry_of(self, opt)
  if entry.state == 'stepped' then fail 'GradScaler: step was called already since the last update' end
  if not entry.state then self:unscale_(opt) end
  entry.state = 'stepped'
  if mf._tracing() then traced_step(opt, entry)
  elseif entry.found:item() == 0 then opt:step() end
end

local numbers = { 'growth_factor', 'backoff_factor', 'growth_interval' }

-- While a step is compiled these are constants.
local function fix_numbers(self)
  local values = {}
  for _, name in ipairs(numbers) do values[name] = self[name] end
  table.insert(mf._trace.fits, function()
    for name, value in pairs(values) do if self[name] ~= value then return false end end
    return true
  end)
end

local function update(self)
  local found
  if mf._tracing() then fix_numbers(self) end
  for _, entry in pairs(self._opts) do
    if entry.state then found = found and mf.maximum(found, entry.found) or entry.found end
  end
  if not found then fail 'GradScaler: update: no gradients were unscaled since the last one' end
  local bad, more = found:ne(0), self._tracker + 1
  local full, larger = more:ge(self.growth_interval), self._scale * self.growth_factor
  local grown = mf.where(full:logical_and(larger:isfinite()), larger, self._scale)
  self._scale:copy_(mf.where(bad, self._scale * self.backoff_factor, grown))
  self._tracker:copy_(mf.where(bad:logical_or(full), mf.zeros_like(more), more))
end

-- Makes the scale smaller if a gradient was not finite, and larger after growth_interval steps without; or sets
-- it to `scale`.
function GradScaler:update(scale)
  if not self.enabled then return end
  mf.no_grad(function()
    if scale == nil then update(self)
    else self._scale:copy_(mf.is_tensor(scale) and scale or mf.full({}, scale)) end
  end)
  for _, entry in pairs(self._opts) do entry.state = nil end
  self._scaled = false
end

-- What a checkpoint needs, tensors and numbers.
function GradScaler:state_dict()
  if not self.enabled then return {} end
  return { scale = self._scale:clone(), growth_factor = self.growth_factor, backoff_factor = self.backoff_factor,
    growth_interval = self.growth_interval, growth_tracker = self._tracker:clone() }
end

-- Takes over what state_dict gave, where it is used already, compiled steps included.
function GradScaler:load_state_dict(dict)
  if not self.enabled then return end
  if type(dict) ~= 'table' or not mf.is_tensor(dict.scale) or not mf.is_tensor(dict.growth_tracker) then
    fail 'GradScaler: load_state_dict: this is not what state_dict of an enabled one gave'
  end
  for _, name in ipairs(numbers) do
    if dict[name] then self[name] = dict[name] end
  end
  mf.no_grad(function()
    self._scale:copy_(dict.scale)
    self._tracker:copy_(dict.growth_tracker)
  end)
end

function GradScaler:__tostring()
  return ('GradScaler(scale=%g, growth_factor=%g, backoff_factor=%g, growth_interval=%g%s)'):format(
    self:get_scale(), self.growth_factor, self.backoff_factor, self.growth_interval,
    self.enabled and '' or ', disabled')
end

amp._GradScaler = GradScaler -- for help
return amp
