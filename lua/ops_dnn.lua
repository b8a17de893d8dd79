-- Matrix products and attention, composed.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local Tensor = mf.Tensor

local function want_tensor(op, name, x)
  if not mf.is_tensor(x) then fail('%s: %s must be a tensor, is a %s', op, name, type(x)) end
end

-- Products of operands of a fixed number of dims: matmul that refuses others.
local function product(name, a_dims, b_dims)
  local function f(a, b)
    want_tensor(name, 'a', a)
    want_tensor(name, 'b', b)
    if a:dim() ~= a_dims or b:dim() ~= b_dims then
      fail('%s: a must have %d dims and b %d, they have %d and %d', name, a_dims, b_dims, a:dim(), b:dim())
    end
    return a:matmul(b)
  end
  mf[name], Tensor[name] = f, f
end
product('mm', 2, 2)
product('mv', 2, 1)
product('dot', 1, 1)

-- a (n) times b (m), each with each: (n, m).
function mf.outer(a, b)
  want_tensor('outer', 'a', a)
  want_tensor('outer', 'b', b)
  if a:dim() ~= 1 or b:dim() ~= 1 then
    fail('outer: a and b must have 1 dim, they have %d and %d', a:dim(), b:dim())
  end
  return a:unsqueeze(1) * b
end
Tensor.outer = mf.outer

-- The weights of attention as one matrix: softmax of scale q k' with a mask, bool (true: seen) or
-- float (added). Rows that see nothing are 0.
function mf._attention_weights(q, k, mask, is_causal, scale)
  local s = q:matmul(k:transpose(-2, -1)) * scale
  local seen
  if is_causal then seen = mf.ones(s:size(-2), s:size(-1), { dtype = mf.bool }):tril() end
  if mask and mask.dtype == mf.bool then seen = seen and mf.logical_and(mask, seen) or mask
  elseif mask then s = s + mask end
  if seen then s = s:masked_fill(seen:logical_not(), -math.huge) end
  local dead = s:eq(-math.huge):all(-1, { keepdim = true })
  return s:softmax(-1):masked_fill(dead, 0)
end

-- softmax(q k' / sqrt(d) + attn_mask) v with PyTorch's arguments: attn_mask (bool: true is seen;
-- float: added), dropout_p, is_causal, scale, enable_gqa (q has a multiple of k's heads). Without
-- the matrix of scores, unless there is dropout or a mask that wants a gradient.
function mf.scaled_dot_product_attention(q, k, v, o)
  o = options('scaled_dot_product_attention', o, { attn_mask = options.none, dropout_p = 0, is_causal = false,
    scale = options.none, enable_gqa = false })
  for name, t in pairs { q = q, k = k, v = v, attn_mask = o.attn_mask or q } do
    if not mf.is_tensor(t) then
      fail('scaled_dot_product_attention: %s must be a tensor, is a %s', name, type(t))
    end
  end
  if q:dim() < 2 or k:dim() < 2 then fail('scaled_dot_product_attention: q and k must have at least 2 dims') end
  if o.enable_gqa and k:size(-3) ~= q:size(-3) then
    k = k:repeat_interleave(q:size(-3) / k:size(-3), { dim = -3 })
    v = v:repeat_interleave(q:size(-3) / v:size(-3), { dim = -3 })
  end
  local scale = o.scale or 1 / math.sqrt(math.max(q:size(-1), 1))
  local mask = o.attn_mask
  if o.dropout_p > 0 or (mask and mask.requires_grad and mf.is_grad_enabled()) then
    local p = mf._attention_weights(q, k, mask, o.is_causal, scale)
    if o.dropout_p > 0 then p = mf.dropout(p, o.dropout_p) end
    return p:matmul(v)
  end
  local y = mf._attention(q, k, v, mask, { is_causal = o.is_causal, scale = scale })
  return y
end

return mf
