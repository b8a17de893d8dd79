-- Matrix products, convolutions and attention, composed.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local Tensor = mf.Tensor

local function want_tensor(op, name, x)
  if not mf.is_tensor(x) then fail('%s: %s must be a tensor, is a %s', op, name, type(x)) end
end

-- -- Products -------------------------------------------------------------------------------------

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

-- -- Convolutions ---------------------------------------------------------------------------------

local numbers = options.counts

local function want_dims(op, name, x, low, high)
  want_tensor(op, name, x)
  if x:dim() >= low and x:dim() <= high then return end
  fail('%s: %s must have %s dims, has %d', op, name, low == high and low or low .. ' or ' .. high, x:dim())
end

-- As images of height 1.
local function flat(t) return t:unsqueeze(-2) end

-- Cross-correlation of x (N, C, L) or (C, L) with w (O, C / groups, k), plus b (O).
function mf.conv1d(x, w, b, o)
  o = options('conv1d', o, { stride = 1, padding = 0, dilation = 1, groups = 1 })
  want_dims('conv1d', 'x', x, 2, 3)
  want_dims('conv1d', 'w', w, 3, 3)
  return mf.conv2d(flat(x), flat(w), b, {
    stride = { 1, numbers('conv1d', 'stride', o.stride, 1, 1)[1] },
    padding = { 0, numbers('conv1d', 'padding', o.padding, 1)[1] },
    dilation = { 1, numbers('conv1d', 'dilation', o.dilation, 1, 1)[1] }, groups = o.groups }):squeeze(-2)
end

-- What conv2d's x is to the gradient of its result, as a layer of its own.
local function transpose2d(op, x, w, b, stride, padding, output_padding, dilation, groups)
  local size = {}
  for d = 1, 2 do
    if output_padding[d] >= math.max(stride[d], dilation[d]) then
      fail('%s: output_padding must be smaller than stride or dilation, is %d', op, output_padding[d])
    end
    size[d] = (x:size(d - 3) - 1) * stride[d] - 2 * padding[d] + dilation[d] * (w:size(d + 1) - 1)
      + output_padding[d] + 1
    if size[d] < 0 then fail('%s: the result would have a size of %d', op, size[d]) end
  end
  if x.dtype ~= w.dtype then
    fail('%s: x and w must have one dtype, are %s and %s', op, tostring(x.dtype), tostring(w.dtype))
  end
  if w:size(0) % options.count(op, 'groups', groups, 1) ~= 0 then
    fail('%s: groups is %d; it must divide the %d input channels', op, groups, w:size(0))
  end
  if x:size(-3) ~= w:size(0) then
    fail('%s: x has %d channels, but w (in, out / groups, ...) takes %d', op, x:size(-3), w:size(0))
  end
  local y = mf._conv2d_input(x, w, { size = size, stride = stride, padding = padding, dilation = dilation,
    groups = groups })
  if not b then return y end
  want_dims(op, 'b', b, 1, 1)
  if b:size(0) ~= y:size(-3) then fail('%s: b has %d numbers for %d channels', op, b:size(0), y:size(-3)) end
  return y + b:reshape(-1, 1, 1)
end

local transpose_options = { stride = 1, padding = 0, output_padding = 0, groups = 1, dilation = 1 }

-- The transpose of conv2d: x (N, C, H, W) or (C, H, W), w (C, O / groups, kh, kw), b (O). H becomes
-- (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1.
function mf.conv_transpose2d(x, w, b, o)
  local op = 'conv_transpose2d'
  o = options(op, o, transpose_options)
  want_dims(op, 'x', x, 3, 4)
  want_dims(op, 'w', w, 4, 4)
  return transpose2d(op, x, w, b, numbers(op, 'stride', o.stride, 2, 1), numbers(op, 'padding', o.padding, 2),
    numbers(op, 'output_padding', o.output_padding, 2), numbers(op, 'dilation', o.dilation, 2, 1), o.groups)
end

-- The transpose of conv1d, as conv_transpose2d.
function mf.conv_transpose1d(x, w, b, o)
  local op = 'conv_transpose1d'
  o = options(op, o, transpose_options)
  want_dims(op, 'x', x, 2, 3)
  want_dims(op, 'w', w, 3, 3)
  return transpose2d(op, flat(x), flat(w), b, { 1, numbers(op, 'stride', o.stride, 1, 1)[1] },
    { 0, numbers(op, 'padding', o.padding, 1)[1] }, { 0, numbers(op, 'output_padding', o.output_padding, 1)[1] },
    { 1, numbers(op, 'dilation', o.dilation, 1, 1)[1] }, o.groups):squeeze(-2)
end

-- -- Attention ------------------------------------------------------------------------------------

-- The weights of attention as one matrix: softmax of scale q k' with a mask, bool (true: seen) or
-- float (added). Rows that see nothing are 0.
function mf._attention_weights(q, k, mask, is_causal, scale)
  local s = q:matmul(k:transpose(-2, -1)) * scale
  local seen
  if is_causal then seen = mf.ones(s:size(-2), s:size(-1), mf._beside(q, { dtype = mf.bool })):tril() end
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
