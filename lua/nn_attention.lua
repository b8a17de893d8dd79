-- Attention layers, as torch.nn's: MultiheadAttention and the encoder layer built on it.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local init = require 'moonflow.nn_init'
local options = require 'moonflow.options'
local count, fail = options.count, options.fail
local Module, Parameter = nn.Module, nn.Parameter

-- -- MultiheadAttention ---------------------------------------------------------------------------

-- Attention with several heads. Inputs are (L, N, E), or (N, L, E) with {batch_first = true}; a
-- single sequence may come without N.
nn.MultiheadAttention = Module:extend 'MultiheadAttention'

local function projection(...) return Parameter(init.xavier_uniform_(mf.empty(...))) end

function nn.MultiheadAttention:init(embed_dim, num_heads, ...)
  local name = 'MultiheadAttention'
  local o = options.arguments(name, { 'dropout', 'bias' }, { dropout = 0, bias = true,
    kdim = options.number, vdim = options.number, batch_first = false }, ...)
  count(name, 'embed_dim', embed_dim, 1)
  count(name, 'num_heads', num_heads, 1)
  if embed_dim % num_heads ~= 0 then
    fail('%s: embed_dim %d is not divisible by num_heads %d', name, embed_dim, num_heads)
  end
  self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim / num_heads
  self.dropout, self.batch_first = o.dropout, o.batch_first
  local kdim, vdim = o.kdim or embed_dim, o.vdim or embed_dim
  if kdim == embed_dim and vdim == embed_dim then
    self.in_proj_weight = projection(3 * embed_dim, embed_dim)
  else
    self.q_proj_weight = projection(embed_dim, embed_dim)
    self.k_proj_weight = projection(embed_dim, kdim)
    self.v_proj_weight = projection(embed_dim, vdim)
  end
  if o.bias then self.in_proj_bias = Parameter(mf.zeros(3 * embed_dim)) end
  self.out_proj = nn.Linear(embed_dim, embed_dim, { bias = o.bias })
  if o.bias then init.zeros_(self.out_proj.bias) end
end

-- The projected query, key and value, each (N, L, E); `same`: they are one tensor.
local function project(self, query, key, value, same)
  local packed, bias = self.in_proj_weight, self.in_proj_bias
  if packed and same then return unpack(mf.linear(query, packed, bias):chunk(3, { dim = -1 })) end
  local wq, wk, wv = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
  if packed then wq, wk, wv = unpack(packed:chunk(3)) end
  local bq, bk, bv
  if bias then bq, bk, bv = unpack(bias:chunk(3)) end
  return mf.linear(query, wq, bq), mf.linear(key, wk, bk), mf.linear(value, wv, bv)
end

-- A bool mask (true: not to be seen) as an additive float mask; float masks stay.
local function additive(mask, dtype)
  if mask.dtype ~= mf.bool then return mask end
  return mf.zeros(mask.shape, mf._beside(mask, { dtype = dtype })):masked_fill(mask, -math.huge)
end

-- The masks as one additive mask that broadcasts over (N, heads, L, S), or nil.
local function joined_mask(self, o, n, dtype)
  local mask, padding = o.attn_mask, o.key_padding_mask
  if mask then
    mask = additive(mask, dtype)
    if mask.ndim == 3 then mask = mask:view(n, self.num_heads, mask:size(1), mask:size(2)) end
  end
  if not padding then return mask end
  padding = additive(padding, dtype)
  padding = padding:view(padding.ndim == 1 and 1 or n, 1, 1, padding:size(-1))
  return mask and mask + padding or padding
end

-- Attention over (N, heads, L, head_dim), and the weights (N, heads, L, S).
local function attend_with_weights(q, k, v, mask, p)
  local scores = (q * (1 / math.sqrt(q:size(-1)))):matmul(k:transpose(-2, -1))
  local weights = mf.softmax(mask and scores + mask or scores, { dim = -1 })
  if p > 0 then weights = mf.dropout(weights, p) end
  return weights:matmul(v), weights
end

local call_defaults = { key_padding_mask = options.userdata, need_weights = true,
  attn_mask = options.userdata, average_attn_weights = true, is_causal = false }

-- Returns the output and, unless {need_weights = false}, the attention weights averaged over the
-- heads, (N, L, S). Where a bool mask is true, a key is not seen; float masks are added to scores.
function nn.MultiheadAttention:forward(query, key, value, o)
  o = options('MultiheadAttention', o, call_defaults)
  if o.is_causal and not o.attn_mask then
    fail 'MultiheadAttention: is_causal is a hint about attn_mask, which is missing'
  end
  local batched, same = query.ndim == 3, query == key and key == value
  local function arranged(x)
    if not batched then return x:unsqueeze(0) end
    return self.batch_first and x or x:transpose(0, 1)
  end
  local x = arranged(query)
  local q, k, v = project(self, x, same and x or arranged(key), same and x or arranged(value), same)
  local n, l = q:size(0), q:size(1)
  local function heads(y) return y:view(n, y:size(1), self.num_heads, -1):transpose(1, 2) end
  q, k, v = heads(q), heads(k), heads(v)
  local mask, p = joined_mask(self, o, n, query.dtype), self.training and self.dropout or 0
  local y, weights
  if o.need_weights then
    y, weights = attend_with_weights(q, k, v, mask, p)
    if o.average_attn_weights then weights = weights:mean(1) end
  else
    y = mf.scaled_dot_product_attention(q, k, v, { attn_mask = mask, dropout_p = p })
  end
  y = self.out_proj(y:transpose(1, 2):reshape(n, l, self.embed_dim))
  if not batched then return y:squeeze(0), weights and weights:squeeze(0) end
  return self.batch_first and y or y:transpose(0, 1), weights
end

-- -- TransformerEncoderLayer ----------------------------------------------------------------------

-- Attention and a network of two layers, each with a residual and a norm.
nn.TransformerEncoderLayer = Module:extend 'TransformerEncoderLayer'

function nn.TransformerEncoderLayer:init(d_model, nhead, ...)
  local o = options.arguments('TransformerEncoderLayer',
    { 'dim_feedforward', 'dropout', 'activation', 'layer_norm_eps', 'batch_first', 'norm_first' },
    { dim_feedforward = 2048, dropout = 0.1, activation = 'relu', layer_norm_eps = 1e-5,
      batch_first = false, norm_first = false }, ...)
  options.choice('TransformerEncoderLayer', 'activation', o.activation, { 'relu', 'gelu' })
  self.norm_first, self.activation = o.norm_first, mf[o.activation]
  self.self_attn = nn.MultiheadAttention(d_model, nhead,
    { dropout = o.dropout, batch_first = o.batch_first })
  self.linear1 = nn.Linear(d_model, o.dim_feedforward)
  self.dropout = nn.Dropout(o.dropout)
  self.linear2 = nn.Linear(o.dim_feedforward, d_model)
  self.norm1 = nn.LayerNorm(d_model, { eps = o.layer_norm_eps })
  self.norm2 = nn.LayerNorm(d_model, { eps = o.layer_norm_eps })
  self.dropout1 = nn.Dropout(o.dropout)
  self.dropout2 = nn.Dropout(o.dropout)
end

function nn.TransformerEncoderLayer:attend(x, o)
  return self.dropout1((self.self_attn(x, x, x,
    { attn_mask = o.src_mask, key_padding_mask = o.src_key_padding_mask, need_weights = false })))
end

function nn.TransformerEncoderLayer:feed(x)
  return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))
end

function nn.TransformerEncoderLayer:forward(x, o)
  o = options('TransformerEncoderLayer', o, { src_mask = options.userdata,
    src_key_padding_mask = options.userdata, is_causal = false })
  if self.norm_first then
    x = x + self:attend(self.norm1(x), o)
    return x + self:feed(self.norm2(x))
  end
  x = self.norm1(x + self:attend(x, o))
  return self.norm2(x + self:feed(x))
end
