-- Losses, as torch.nn.functional's: reduction 'mean', 'sum' or 'none'.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local none = options.none

local reductions = { mean = true, sum = true, none = true }

local function reduce(where, loss, reduction)
  if reduction == 'mean' then return loss:mean() end
  if reduction == 'sum' then return loss:sum() end
  if reduction == 'none' then return loss end
  error(("%s: reduction must be one of mean, none, sum, is '%s'"):format(where, tostring(reduction)), 3)
end

local function check_reduction(where, reduction)
  if not reductions[reduction] then error(("%s: reduction must be one of mean, none, sum, is '%s'"):format(where, tostring(reduction)), 3) end
end

local function check_tensor(where, name, t)
  if not mf.is_tensor(t) then error(('%s: %s must be a tensor, is a %s'):format(where, name, type(t)), 3) end
end

local function check_same_shape(where, x, y)
  check_tensor(where, 'x', x)
  check_tensor(where, 'target', y)
  if x.shape ~= y.shape then
    error(('%s: x has shape %s, target %s; they must be equal'):format(where, tostring(x.shape), tostring(y.shape)), 3)
  end
end

-- -- Classes ------------------------------------------------------------------------------------------------------------------------

-- Probabilities as targets: of x's shape.
local function cross_entropy_soft(x, target, o)
  local dim = x.ndim > 1 and 1 or 0
  local classes = x:size(dim)
  if o.label_smoothing > 0 then target = target * (1 - o.label_smoothing) + o.label_smoothing / classes end
  local logp = mf.log_softmax(x, { dim = dim })
  if o.weight then
    local shape = {}
    for d = 0, x.ndim - 1 do shape[d + 1] = d == dim and classes or 1 end
    logp = logp * o.weight:reshape(shape)
  end
  local loss = -(logp * target):sum(dim)
  if o.reduction == 'mean' then return loss:sum() / math.max(loss:numel(), 1) end
  return reduce('cross_entropy', loss, o.reduction)
end

-- x of shape (C), (N, C) or (N, C, d1, ...) and labels without the C as rows (n, C) and (n), contiguous; and the shape of the labels.
local function as_rows(where, x, target)
  if x.ndim == 0 then error(where .. ': x needs a dim of classes', 4) end
  local want, classes = {}, x:size(x.ndim > 1 and 1 or 0)
  for d = 0, x.ndim - 1 do
    if d ~= (x.ndim > 1 and 1 or 0) then want[#want + 1] = x:size(d) end
  end
  local fits = target.ndim == #want
  for d = 1, #want do fits = fits and target:size(d - 1) == want[d] end
  if not fits then
    error(('%s: x has shape %s, so target must have shape (%s), has %s'):format(where, tostring(x.shape), table.concat(want, ', '),
      tostring(target.shape)), 4)
  end
  if x.ndim > 2 then x = x:movedim(1, -1) end
  return x:reshape(-1, classes):contiguous(), target:reshape(-1):long():contiguous(), want
end

-- Cross entropy of logits x (N, C, d1, ...) and labels (N, d1, ...), or probabilities of x's shape.
function mf.cross_entropy(x, target, o)
  o = options('cross_entropy', o, { weight = none, reduction = 'mean', ignore_index = -100, label_smoothing = 0 })
  check_tensor('cross_entropy', 'x', x)
  check_tensor('cross_entropy', 'target', target)
  check_reduction('cross_entropy', o.reduction)
  if target:is_floating_point() then
    check_same_shape('cross_entropy', x, target)
    return cross_entropy_soft(x, target, o)
  end
  local dtype = x.dtype
  if dtype ~= mf.float64 then x = x:float() end
  local rows, labels, shape = as_rows('cross_entropy', x, target)
  local weight = o.weight and o.weight:to(rows.dtype):contiguous()
  local loss, _, row_weight = mf._cross_entropy_rows(rows, labels, weight, { ignore_index = o.ignore_index, label_smoothing = o.label_smoothing })
  if o.reduction == 'mean' then
    loss = loss:sum() / row_weight:sum()
  elseif o.reduction == 'sum' then loss = loss:sum()
  else loss = loss:reshape(shape) end
  return dtype == mf.float16 and loss:half() or dtype == mf.bfloat16 and loss:bfloat16() or loss
end

-- The negative log likelihood of log-probabilities x (N, C, d1, ...) under labels (N, d1, ...).
function mf.nll_loss(x, target, o)
  o = options('nll_loss', o, { weight = none, reduction = 'mean', ignore_index = -100 })
  check_tensor('nll_loss', 'x', x)
  check_tensor('nll_loss', 'target', target)
  check_reduction('nll_loss', o.reduction)
  local rows, labels, shape = as_rows('nll_loss', x, target)
  local valid = labels:ne(o.ignore_index)
  local label = mf.where(valid, labels, 0)
  local w = valid:to(x.dtype)
  if o.weight then w = w * o.weight:index_select(0, label) end
  local loss = -(rows:gather(1, label:unsqueeze(1)):squeeze(1) * w)
  if o.reduction == 'mean' then return loss:sum() / w:sum() end
  return reduce('nll_loss', o.reduction == 'none' and loss:reshape(shape) or loss, o.reduction)
end

-- -- Distances ------------------------------------------------------------------------------------------------------------------------

-- (x - target)^2.
function mf.mse_loss(x, target, o)
  o = options('mse_loss', o, { reduction = 'mean' })
  check_tensor('mse_loss', 'x', x)
  return reduce('mse_loss', (x - target):square(), o.reduction)
end

-- |x - target|.
function mf.l1_loss(x, target, o)
  o = options('l1_loss', o, { reduction = 'mean' })
  check_tensor('l1_loss', 'x', x)
  return reduce('l1_loss', (x - target):abs(), o.reduction)
end

-- 0.5 d^2 / beta where d = |x - target| is below beta, else d - 0.5 beta.
function mf.smooth_l1_loss(x, target, o)
  o = options('smooth_l1_loss', o, { reduction = 'mean', beta = 1 })
  check_tensor('smooth_l1_loss', 'x', x)
  if o.beta < 0 then error('smooth_l1_loss: beta must not be negative', 2) end
  local d = (x - target):abs()
  if o.beta == 0 then return reduce('smooth_l1_loss', d, o.reduction) end
  return reduce('smooth_l1_loss', mf.where(d:lt(o.beta), d:square() * (0.5 / o.beta), d - 0.5 * o.beta), o.reduction)
end

-- 0.5 d^2 where d = |x - target| is at most delta, else delta (d - 0.5 delta).
function mf.huber_loss(x, target, o)
  o = options('huber_loss', o, { reduction = 'mean', delta = 1 })
  check_tensor('huber_loss', 'x', x)
  if o.delta <= 0 then error('huber_loss: delta must be above 0', 2) end
  local d = (x - target):abs()
  return reduce('huber_loss', mf.where(d:le(o.delta), d:square() * 0.5, (d - 0.5 * o.delta) * o.delta), o.reduction)
end

-- -- Probabilities ------------------------------------------------------------------------------------------------------------------------

-- -(t log x + (1 - t) log(1 - x)) for probabilities x; logarithms are cut at -100, as PyTorch does.
function mf.binary_cross_entropy(x, target, o)
  o = options('binary_cross_entropy', o, { weight = none, reduction = 'mean' })
  check_same_shape('binary_cross_entropy', x, target)
  local loss = -(target * x:log():clamp { min = -100 } + (1 - target) * (1 - x):log():clamp { min = -100 })
  return reduce('binary_cross_entropy', o.weight and loss * o.weight or loss, o.reduction)
end

-- The same for logits x, without overflow: (1 - t) x - (1 + (pos_weight - 1) t) log(sigmoid(x)).
function mf.binary_cross_entropy_with_logits(x, target, o)
  o = options('binary_cross_entropy_with_logits', o, { weight = none, pos_weight = none, reduction = 'mean' })
  check_same_shape('binary_cross_entropy_with_logits', x, target)
  local log = mf.logsigmoid(x)
  if o.pos_weight then log = log * ((o.pos_weight - 1) * target + 1) end
  local loss = (1 - target) * x - log
  return reduce('binary_cross_entropy_with_logits', o.weight and loss * o.weight or loss, o.reduction)
end

-- t (log t - x) for log-probabilities x; reduction also 'batchmean'.
function mf.kl_div(x, target, o)
  o = options('kl_div', o, { reduction = 'mean', log_target = false })
  check_tensor('kl_div', 'x', x)
  check_tensor('kl_div', 'target', target)
  local loss
  if o.log_target then
    loss = target:exp() * (target - x)
  else
    local positive = target:gt(0)
    loss = mf.where(positive, target * (mf.where(positive, target, 1):log() - x), 0)
  end
  if o.reduction == 'batchmean' then return loss:sum() / math.max(x:size(0), 1) end
  return reduce('kl_div', loss, o.reduction)
end

-- The cosine of the angle between a and b along a dim.
function mf.cosine_similarity(a, b, o)
  o = options('cosine_similarity', o, { dim = 1, eps = 1e-8 })
  check_tensor('cosine_similarity', 'a', a)
  check_tensor('cosine_similarity', 'b', b)
  local function unit(x) return x / x:square():sum(o.dim, { keepdim = true }):sqrt():clamp { min = o.eps } end
  return (unit(a) * unit(b)):sum(o.dim)
end

return mf
