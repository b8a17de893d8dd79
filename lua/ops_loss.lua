-- Losses, as torch.nn.functional's: reduction 'mean', 'sum' or 'none'. mse_loss, l1_loss,
-- smooth_l1_loss and huber_loss are ops.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local none = options.none

local reductions = { mean = true, sum = true, none = true }

local function check_reduction(where, reduction)
  if not reductions[reduction] then
    fail("%s: reduction must be one of mean, none, sum, is '%s'", where, tostring(reduction))
  end
end

local function reduce(loss, reduction)
  if reduction == 'mean' then return loss:mean() end
  return reduction == 'sum' and loss:sum() or loss
end

local function check_tensor(where, name, t)
  if not mf.is_tensor(t) then fail('%s: %s must be a tensor, is a %s', where, name, type(t)) end
end

local function check_same_shape(where, x, y)
  check_tensor(where, 'x', x)
  check_tensor(where, 'target', y)
  if x.shape ~= y.shape then
    fail('%s: x has shape %s, target %s; they must be equal', where, tostring(x.shape), tostring(y.shape))
  end
end

-- Ops that broadcast x and target. Where that is not meant, a wrong loss comes of it: (N, 1) and (N)
-- give (N, N).
for _, name in ipairs { 'mse_loss', 'l1_loss', 'smooth_l1_loss', 'huber_loss' } do
  local op = mf[name]
  local function f(x, target, ...)
    if mf.is_tensor(x) and mf.is_tensor(target) and x.shape ~= target.shape then
      options.warn('%s: x has shape %s, target %s: they are broadcast; should they be the same?', name,
        tostring(x.shape), tostring(target.shape))
    end
    return op(x, target, ...)
  end
  mf[name], mf.Tensor[name] = f, f
end

-- -- Classes --------------------------------------------------------------------------------------

-- Probabilities as targets: of x's shape.
local function cross_entropy_soft(x, target, o)
  o = options('cross_entropy', o, { weight = none, reduction = 'mean', ignore_index = -100, label_smoothing = 0 })
  check_tensor('cross_entropy', 'x', x)
  if x.shape ~= target.shape then
    local labels = target.ndim < x.ndim and ('; a %s target holds probabilities, labels are target:long() or '
      .. 'mf.tensor({...}, { dtype = mf.int64 })'):format(tostring(target.dtype)) or ''
    fail('cross_entropy: x has shape %s, target %s; they must be equal%s', tostring(x.shape), tostring(target.shape),
      labels)
  end
  check_reduction('cross_entropy', o.reduction)
  local dim = x.ndim > 1 and 1 or 0
  local classes = x:size(dim)
  if o.label_smoothing > 0 then target = target * (1 - o.label_smoothing) + o.label_smoothing / classes end
  local logp = mf.log_softmax(x, dim)
  if o.weight then
    local shape = {}
    for d = 0, x.ndim - 1 do shape[d + 1] = d == dim and classes or 1 end
    logp = logp * o.weight:reshape(shape)
  end
  return reduce(-(logp * target):sum(dim), o.reduction)
end

-- Of global logits whose classes are split, which stay so: each rank looks at its own classes, and only what is
-- as large as target goes round.
local function cross_entropy_by_class(x, target, o, dim, split)
  local classes, shape, dtype = x:size(dim), {}, x.dtype
  for d = 0, x.ndim - 1 do shape[d + 1] = d == dim and classes or 1 end
  local function along(t) return t:reshape(shape) end
  local top = mf._settled(x:detach():amax(dim, true))
  local lse = mf._settled((x - top):exp():sum(dim, true)):log() + top
  local valid = target:ne(o.ignore_index)
  local label = mf.where(valid, target, 0):unsqueeze(dim)
  local mine = along(mf.arange(classes, { placement = x.placement, sbp = split })):eq(label)
  local w = valid:to(dtype)
  if o.weight then w = w * o.weight:index_select(0, label:reshape(-1)):reshape(target.shape) end
  local loss = (lse - mf._settled(mf.where(mine, x, 0):sum(dim, true))):squeeze(dim) * w
  if o.label_smoothing > 0 then
    local by = o.weight and along(o.weight) or mf.ones(shape, mf._beside(x, { dtype = dtype }))
    local all = mf._settled(((lse - x) * by):sum(dim))
    loss = loss * (1 - o.label_smoothing) + all * valid:to(dtype) * (o.label_smoothing / classes)
  end
  if o.reduction == 'mean' then return loss:sum() / w:sum() end
  return reduce(loss, o.reduction)
end

-- Of global logits: the sum of parts is a part of the sum, which the mean of parts is not.
local function cross_entropy_global(x, target, ...)
  local o = options.arguments('cross_entropy', { 'weight' },
    { weight = none, reduction = 'mean', ignore_index = -100, label_smoothing = 0 }, ...)
  check_reduction('cross_entropy', o.reduction)
  local dim, split, by_class = x.ndim > 1 and 1 or 0, {}, false
  for axis, sbp in ipairs(x.sbp) do
    split[axis] = sbp == 'S' .. dim and 'S0' or 'B'
    by_class = by_class or split[axis] == 'S0'
  end
  if by_class and target.ndim == x.ndim - 1 then return cross_entropy_by_class(x, target, o, dim, split) end
  local how = { reduction = o.reduction, ignore_index = o.ignore_index, label_smoothing = o.label_smoothing }
  if o.reduction ~= 'mean' then return (mf._cross_entropy(x, target, o.weight, how)) end
  how.reduction = 'sum'
  local loss, _, total = mf._cross_entropy(x, target, o.weight, how)
  return loss / total
end

-- Cross entropy of logits x (N, C, d1, ...) and labels (N, d1, ...), or probabilities of x's shape.
-- Options: weight, reduction, ignore_index, label_smoothing.
function mf.cross_entropy(x, target, ...)
  if mf.is_tensor(x) and mf.is_tensor(target) then
    if target:is_floating_point() then return cross_entropy_soft(x, target, ...) end
    if x.is_global then return cross_entropy_global(x, target, ...) end
  end
  return (mf._cross_entropy(x, target, ...))
end

-- x (N, C, d1, ...) and labels (N, d1, ...) as rows (n, C) and (n), and the shape of the labels.
local function as_rows(where, x, target)
  if x.ndim == 0 then fail('%s', where .. ': x needs a dim of classes') end
  local dim, want = x.ndim > 1 and 1 or 0, {}
  for d = 0, x.ndim - 1 do
    if d ~= dim then want[#want + 1] = x:size(d) end
  end
  local fits = target.ndim == #want
  for d = 1, #want do fits = fits and target:size(d - 1) == want[d] end
  if not fits then
    fail('%s: x has shape %s, so target must have shape (%s), has %s', where, tostring(x.shape),
      table.concat(want, ', '), tostring(target.shape))
  end
  local classes = x:size(dim)
  if x.ndim > 2 then x = x:movedim(1, -1) end
  return x:reshape(-1, classes), target:reshape(-1):long(), want
end

-- The negative log likelihood of log-probabilities x (N, C, d1, ...) under labels (N, d1, ...).
-- Options: weight, reduction, ignore_index.
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
  local loss = mf.where(valid, -rows:gather(1, label:unsqueeze(1)):squeeze(1), 0) * w
  if o.reduction == 'mean' then return loss:sum() / w:sum() end
  return reduce(o.reduction == 'none' and loss:reshape(shape) or loss, o.reduction)
end

-- -- Probabilities --------------------------------------------------------------------------------

-- What lies outside of [0, 1] makes the loss NaN: only then are the inputs looked at. In a compiled
-- step the NaN remains.
local function check_probabilities(where, loss, inputs)
  if loss.device == 'meta' or mf._tracing() then return end
  local sum = mf.no_grad(function() return loss:sum():item() end)
  if sum == sum then return end
  for name, t in pairs(inputs) do
    local outside = mf.no_grad(function() return t:detach()[t:ge(0):logical_and(t:le(1)):logical_not()] end)
    if outside:numel() > 0 then
      local text = '%s: %s holds %g; probabilities are from 0 to 1, and %s_with_logits takes logits'
      options.fail(text, where, name, outside[0]:item(), where)
    end
  end
end

-- -(t log x + (1 - t) log(1 - x)) for probabilities x; logarithms are cut at -100, as PyTorch does.
-- Options: weight, reduction.
function mf.binary_cross_entropy(x, target, o)
  o = options('binary_cross_entropy', o, { weight = none, reduction = 'mean' })
  check_same_shape('binary_cross_entropy', x, target)
  check_reduction('binary_cross_entropy', o.reduction)
  local loss = mf._bce_loss(x, target, { reduction = o.weight and 'none' or o.reduction })
  check_probabilities('binary_cross_entropy', loss, { x = x, target = target })
  return o.weight and reduce(loss * o.weight, o.reduction) or loss
end

-- The same for logits x, without overflow: (1 - t) x - (1 + (pos_weight - 1) t) log(sigmoid(x)).
-- Options: weight, pos_weight, reduction.
function mf.binary_cross_entropy_with_logits(x, target, o)
  o = options('binary_cross_entropy_with_logits', o, { weight = none, pos_weight = none, reduction = 'mean' })
  check_same_shape('binary_cross_entropy_with_logits', x, target)
  check_reduction('binary_cross_entropy_with_logits', o.reduction)
  if not (o.weight or o.pos_weight) then return mf._bce_logits_loss(x, target, { reduction = o.reduction }) end
  local log = mf.logsigmoid(x)
  if o.pos_weight then log = log * ((o.pos_weight - 1) * target + 1) end
  local loss = (1 - target) * x - log
  return reduce(o.weight and loss * o.weight or loss, o.reduction)
end

-- t (log t - x) for log-probabilities x; reduction also 'batchmean'. Options: reduction, log_target.
function mf.kl_div(x, target, o)
  o = options('kl_div', o, { reduction = 'mean', log_target = false })
  check_tensor('kl_div', 'x', x)
  check_tensor('kl_div', 'target', target)
  local batch = o.reduction == 'batchmean'
  local reduction = batch and 'sum' or o.reduction
  if not reductions[reduction] then
    fail("kl_div: reduction must be one of batchmean, mean, none, sum, is '%s'", tostring(reduction))
  end
  local loss
  if o.log_target then loss = reduce(target:exp() * (target - x), reduction)
  else loss = mf._kl_loss(x, target, { reduction = reduction }) end
  return batch and x.ndim > 0 and loss / x:size(0) or loss
end

-- The cosine of the angle between a and b, which are broadcast, along a dim. Norms count as eps at
-- least, with the gradient that they have as they are.
function mf.cosine_similarity(a, b, o)
  o = options('cosine_similarity', o, { dim = 1, eps = 1e-8 })
  check_tensor('cosine_similarity', 'a', a)
  check_tensor('cosine_similarity', 'b', b)
  local dtype = a.dtype == b.dtype and a.dtype or (a:new_zeros(0) + b:new_zeros(0)).dtype
  a, b = unpack(mf.broadcast_tensors(a:to(dtype), b:to(dtype)))
  local function unit(x)
    local norm = x:norm { dim = o.dim, keepdim = true }
    local below = (o.eps - norm:detach()):clamp { min = 0 }
    return x / (norm + below)
  end
  return (unit(a) * unit(b)):sum(o.dim)
end

return mf
