-- Gradients of the losses (src/op/loss.c, src/op/cross_entropy.c); see grad.lua for the form.
local mf = require 'moonflow.core'
local grad = {}

-- An incoming gradient on its way to each of n elements.
local function share(g, reduction, n) return reduction == 'mean' and g / n or g end

-- What a gradient that was spread out comes back as.
local function total(v, reduction) return reduction == 'none' and v or v:sum() end

grad.mse_loss = {
  ['x,target'] = function(g, need, _, o)
    local gx = mf._mse_loss_backward(g, o.x, o.target, { reduction = o.reduction })
    return gx, need.target and -gx or nil
  end,
}
grad.mse_loss_backward = {
  g = function(v, _, o)
    return total(v * mf._mse_loss_backward(mf.ones_like(o.g), o.x, o.target, { reduction = o.reduction }), o.reduction)
  end,
  ['x,target'] = function(v, need, _, o)
    local gx = v * share(o.g * 2, o.reduction, v:numel())
    return gx, need.target and -gx or nil
  end,
}

grad.l1_loss = {
  ['x,target'] = function(g, need, _, o)
    local gx = mf._l1_loss_backward(g, o.x, o.target, { reduction = o.reduction })
    return gx, need.target and -gx or nil
  end,
}
grad.l1_loss_backward = {
  g = function(v, _, o)
    return total(v * mf._l1_loss_backward(mf.ones_like(o.g), o.x, o.target, { reduction = o.reduction }), o.reduction)
  end,
  ['x,target'] = function() end,
}

grad.smooth_l1_loss = {
  ['x,target'] = function(g, need, _, o)
    local gx = mf._smooth_l1_loss_backward(g, o.x, o.target, { reduction = o.reduction, beta = o.beta })
    return gx, need.target and -gx or nil
  end,
}
grad.smooth_l1_loss_backward = {
  g = function(v, _, o)
    local one = mf.ones_like(o.g)
    return total(v * mf._smooth_l1_loss_backward(one, o.x, o.target, { reduction = o.reduction, beta = o.beta }),
      o.reduction)
  end,
  ['x,target'] = function(v, need, _, o)
    local near = (o.x - o.target):abs():lt(o.beta)
    local gx = mf.where(near, v * share(o.g / o.beta, o.reduction, v:numel()), 0)
    return gx, need.target and -gx or nil
  end,
}

grad.huber_loss = {
  ['x,target'] = function(g, need, _, o)
    local gx = mf._huber_loss_backward(g, o.x, o.target, { reduction = o.reduction, delta = o.delta })
    return gx, need.target and -gx or nil
  end,
}
grad.huber_loss_backward = {
  g = function(v, _, o)
    local one = mf.ones_like(o.g)
    return total(v * mf._huber_loss_backward(one, o.x, o.target, { reduction = o.reduction, delta = o.delta }),
      o.reduction)
  end,
  ['x,target'] = function(v, need, _, o)
    local near = (o.x - o.target):abs():le(o.delta)
    local gx = mf.where(near, v * share(o.g, o.reduction, v:numel()), 0)
    return gx, need.target and -gx or nil
  end,
}

-- Logarithms are cut at -100, where they have no gradient.
local function cut_log(x) return x:log():clamp { min = -100 } end

grad.bce_loss = {
  ['x,target'] = function(g, need, _, o)
    local x, gx = o.x, mf._bce_loss_backward(g, o.x, o.target, { reduction = o.reduction })
    return gx, need.target and share(g, o.reduction, gx:numel()) * (cut_log(1 - x) - cut_log(x)) or nil
  end,
}
grad.bce_loss_backward = {
  g = function(v, _, o)
    return total(v * mf._bce_loss_backward(mf.ones_like(o.g), o.x, o.target, { reduction = o.reduction }), o.reduction)
  end,
  ['x,target'] = function(v, need, _, o)
    local x, t = o.x, o.target
    local d = (x * (1 - x)):clamp { min = 1e-12 }
    local h = v * share(o.g, o.reduction, v:numel()) / d
    return h * (1 - (x - t) * (1 - x * 2) / d), need.target and -h or nil
  end,
}

grad.bce_logits_loss = {
  ['x,target'] = function(g, need, _, o)
    local gx = mf._bce_logits_loss_backward(g, o.x, o.target, { reduction = o.reduction })
    return gx, need.target and -(share(g, o.reduction, gx:numel()) * o.x) or nil
  end,
}
grad.bce_logits_loss_backward = {
  g = function(v, _, o)
    return total(v * mf._bce_logits_loss_backward(mf.ones_like(o.g), o.x, o.target, { reduction = o.reduction }),
      o.reduction)
  end,
  ['x,target'] = function(v, need, _, o)
    local s, h = o.x:sigmoid(), v * share(o.g, o.reduction, v:numel())
    return h * s * (1 - s), need.target and -h or nil
  end,
}

grad.kl_loss = {
  ['x,target'] = function(g, need, _, o)
    local gx = mf._kl_loss_backward(g, o.x, o.target, { reduction = o.reduction })
    if not need.target then return gx end
    local t = o.target
    local some = t:gt(0)
    return gx, mf.where(some, share(g, o.reduction, gx:numel()) * (mf.where(some, t, 1):log() + 1 - o.x), 0)
  end,
}
grad.kl_loss_backward = {
  g = function(v, _, o)
    return total(v * mf._kl_loss_backward(mf.ones_like(o.g), o.x, o.target, { reduction = o.reduction }), o.reduction)
  end,
  ['x,target'] = function(v, need, _, o)
    return nil, need.target and -(v * share(o.g, o.reduction, v:numel())) or nil
  end,
}

-- Cross entropy. Its log-sum-exp has the gradient softmax(x).

local function class_dim(shape) return #shape > 1 and 1 or 0 end

grad.cross_entropy = {
  x = function(g, y, o)
    local gx
    if g.loss then
      gx = mf._cross_entropy_backward(g.loss, o.x, o.target, y.lse, y.total, o.weight,
        { ignore_index = o.ignore_index, reduction = o.reduction, label_smoothing = o.label_smoothing })
    end
    if g.lse then
      local dim = class_dim(o.x.shape)
      local through = (o.x - y.lse:unsqueeze(dim)):exp() * g.lse:unsqueeze(dim)
      gx = gx and gx + through or through
    end
    return gx
  end,
}
-- The gradient is a exp(x - lse) - b, and is -b alone where lse is infinite.
grad.cross_entropy_backward = {
  ['g,x,lse,total'] = function(v, need, y, o)
    local dim = class_dim(o.x.shape)
    local how = { ignore_index = o.ignore_index, reduction = o.reduction, label_smoothing = o.label_smoothing }
    local gg, gx, glse, gtotal
    if need.g then
      local one = v * mf._cross_entropy_backward(mf.ones_like(o.g), o.x, o.target, o.lse, o.total, o.weight, how)
      gg = o.reduction == 'none' and one:sum(dim) or one:sum()
    end
    if need.x or need.lse then
      local never = o.lse:new_full(o.lse.shape, math.huge)
      gx = v * (y - mf._cross_entropy_backward(o.g, o.x, o.target, never, o.total, o.weight, how))
      glse = -gx:sum(dim)
    end
    if need.total and o.reduction == 'mean' then gtotal = -(v * y):sum() / o.total end
    return gg, need.x and gx or nil, need.lse and glse or nil, gtotal
  end,
}

return grad
