-- mf.utils.checkpoint(f, ...): activation checkpointing. The results of f on these arguments, while
-- nothing that f computes in between is kept for the backward, which computes it anew.
--
--   local y = mf.utils.checkpoint(block, x)      -- a module or a function
--   block.activation_checkpointing = true        -- a module: each of its calls
--
-- Results and gradients are the same bits, dropout included: the second time the random ops draw
-- what they drew the first time. In a compiled step the marked ops are computed anew by the pass
-- `remat`. In eager calls it is an mf.Function: parameters of a module are among its arguments, so that
-- all that asks for gradients works; what a plain function captures gets its gradient by an own backward,
-- in its .grad, and mf.grad does not see it. A module's buffers (statistics of BatchNorm) are written once.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local utils = {}

local function pack(...) return { n = select('#', ...), ... } end

-- -- In a compiled step ---------------------------------------------------------------------------

local function keep_all(...)
  for k = 1, select('#', ...) do
    local value = select(k, ...)
    if mf.is_tensor(value) then mf._segment_keep(value)
    elseif type(value) == 'table' and getmetatable(value) == nil then
      for _, v in pairs(value) do keep_all(v) end
    end
  end
end

local function traced(f, ...)
  local outer = mf._segment()
  local results = pack(f(...))
  mf._segment(outer)
  keep_all(unpack(results, 1, results.n))
  return unpack(results, 1, results.n)
end

-- -- Eagerly --------------------------------------------------------------------------------------

local function parameters_of(module)
  local needed = {}
  for _, p in ipairs(module and module:parameters() or {}) do
    if p.requires_grad then needed[#needed + 1] = p end
  end
  return needed, module and module:buffers() or {}
end

-- f on leaves of their own in the place of the arguments, with what it drew the first time.
local function again(run)
  local args, saved = {}, {}
  for i = 1, run.n do
    local x = run.args[i]
    if mf.is_tensor(x) then
      args[i] = x:detach()
      if x.requires_grad then args[i]:requires_grad_(true) end
    else
      args[i] = x
    end
  end
  for i, b in ipairs(run.buffers) do saved[i] = b:clone() end
  local state = mf.get_rng_state()
  mf.set_rng_state(run.state)
  local results = pack(pcall(mf.enable_grad, function() return run.f(unpack(args, 1, run.n)) end))
  mf.set_rng_state(state)
  mf.no_grad(function()
    for i, b in ipairs(run.buffers) do b:copy_(saved[i]) end
  end)
  if not results[1] then error(results[2], 0) end
  return args, results
end

local Checkpoint = mf.Function:extend 'checkpoint'

-- The arguments behind `run`: n of f, then the parameters.
function Checkpoint.forward(ctx, run, ...)
  ctx.run = run
  ctx:save_for_backward(...)
  return run.f(unpack(run.args, 1, run.n))
end

local function gradients_of_module(run, outputs, grads, args)
  local inputs = {}
  for i = 1, run.n do
    if mf.is_tensor(args[i]) and args[i].requires_grad then inputs[#inputs + 1] = args[i] end
  end
  for _, p in ipairs(run.parameters) do inputs[#inputs + 1] = p end
  return mf.grad(outputs, inputs, { grad_outputs = grads, allow_unused = true }), inputs
end

-- What the function captures gets its gradients here.
local function run_backward(outputs, grads)
  if #outputs == 1 then return outputs[1]:backward(grads[1]) end
  mf.enable_grad(function() -- several in one pass: gradients are summed in the order that they would have been
    local sum = 0
    for k, y in ipairs(outputs) do sum = (y * grads[k]):sum() + sum end
    sum:backward()
  end)
end

function Checkpoint.backward(ctx, ...)
  local run, grads, outputs, given, result = ctx.run, { ... }, {}, {}, {}
  ctx:saved_tensors() -- an error when they have changed since
  local args, results = again(run)
  for k = 2, results.n do
    local y = results[k]
    if mf.is_tensor(y) and y.requires_grad and grads[k - 1] then
      outputs[#outputs + 1], given[#given + 1] = y, grads[k - 1]
    end
  end
  local found = {}
  if #outputs > 0 and run.is_module then
    local g, inputs = gradients_of_module(run, outputs, given, args)
    for k, x in ipairs(inputs) do found[x] = g[k] end
  elseif #outputs > 0 then
    run_backward(outputs, given)
  end
  for i = 1, run.n do
    local x = args[i]
    if mf.is_tensor(x) and x.requires_grad then result[i + 1] = found[x] or x.grad end
  end
  local n = run.n + 1
  for k, p in ipairs(run.parameters) do result[n + k] = found[p] end
  return unpack(result, 1, n + #run.parameters)
end

local function wants_gradient(args, n)
  for i = 1, n do
    if mf.is_tensor(args[i]) and args[i].requires_grad then return true end
  end
  return false
end

local function eager(module, f, ...)
  local run = { f = f, n = select('#', ...), args = { ... }, state = mf.get_rng_state(), is_module = module ~= nil }
  run.parameters, run.buffers = parameters_of(module)
  if not module and not wants_gradient(run.args, run.n) then -- but what f captures may: that the results say so
    run.parameters[1] = mf.zeros(0):requires_grad_(true)
  end
  local inputs, n = {}, run.n
  for i = 1, n do inputs[i] = run.args[i] end
  for k, p in ipairs(run.parameters) do inputs[n + k] = p end
  return Checkpoint(run, unpack(inputs, 1, n + #run.parameters))
end

-- f(...), which calls `module` (nil: it is a function of its own).
function utils._checkpoint(module, f, ...)
  if not mf.is_grad_enabled() then return f(...) end
  if mf._tracing() then return traced(f, ...) end
  return eager(module, f, ...)
end

-- The results of f(...), a module or function, which the backward computes anew instead of keeping what
-- they are made of; module.activation_checkpointing = true says so for all calls of a module.
function utils.checkpoint(f, ...)
  if not options.is_callable(f) then
    fail('checkpoint: the first argument must be a function or a module, is %s', options.describe(f))
  end
  local is_module = mf.nn.is_module(f)
  if is_module and f.activation_checkpointing then return f(...) end -- does it itself
  return utils._checkpoint(is_module and f or nil, f, ...)
end

return utils
