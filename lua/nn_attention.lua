-- Attention layers, as torch.nn's: MultiheadAttention and the encoder layer built on it.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local none = options.none

return function(nn)
  local Module, Parameter, init = nn.Module, nn.Parameter, nn.init

  -- A bool mask (true: not to be seen) as an additive float mask; float masks stay.
  local function additive(mask, dtype)
    if mask.dtype ~= mf.bool then return mask end
    return mf.zeros(mask.shape, { dtype = dtype }):masked_fill(mask, -math.huge)
  end

  -- Attention with several heads. Inputs (L, N, E), or (N, L, E) with {batch_first = true}, or without N.
  nn.MultiheadAttention = Module:extend 'MultiheadAttention'
  function nn.MultiheadAttention:init(embed_dim, num_heads, o)
    o = options('MultiheadAttention', o, { dropout = 0, bias = true, kdim = none, vdim = none, batch_first = false })
    if embed_dim % num_heads ~= 0 then
      error(('MultiheadAttention: embed_dim %d is not divisible by num_heads %d'):format(embed_dim, num_heads), 3)
    end
    self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, o.dropout, o.batch_first
    self.packed = (o.kdim or embed_dim) == embed_dim and (o.vdim or embed_dim) == embed_dim
    if self.packed then
      self.in_proj_weight = Parameter(init.xavier_uniform_(mf.empty(3 * embed_dim, embed_dim)))
    else
      self.q_proj_weight = Parameter(init.xavier_uniform_(mf.empty(embed_dim, embed_dim)))
      self.k_proj_weight = Parameter(init.xavier_uniform_(mf.empty(embed_dim, o.kdim or embed_dim)))
      self.v_proj_weight = Parameter(init.xavier_uniform_(mf.empty(embed_dim, o.vdim or embed_dim)))
    end
    if o.bias then self.in_proj_bias = Parameter(mf.zeros(3 * embed_dim)) end
    self.out_proj = nn.Linear(embed_dim, embed_dim, { bias = o.bias })
    if o.bias then init.zeros_(self.out_proj.bias) end
  end

  -- The projected query, key and value, each (N, L, E).
  local function project(self, query, key, value)
    if self.packed and query == key and key == value then
      return unpack(mf.linear(query, self.in_proj_weight, self.in_proj_bias):chunk(3, { dim = -1 }))
    end
    local weights
    if self.packed then weights = self.in_proj_weight:chunk(3)
    else weights = { self.q_proj_weight, self.k_proj_weight, self.v_proj_weight } end
    local biases = self.in_proj_bias and self.in_proj_bias:chunk(3) or {}
    return mf.linear(query, weights[1], biases[1]), mf.linear(key, weights[2], biases[2]), mf.linear(value, weights[3], biases[3])
  end

  -- The masks as one additive mask that broadcasts over (N, heads, L, S), or nil.
  local function joined_mask(self, o, n, dtype)
    local mask
    if o.attn_mask then
      mask = additive(o.attn_mask, dtype)
      if mask.ndim == 3 then mask = mask:view(n, self.num_heads, mask:size(1), mask:size(2)) end
    end
    if o.key_padding_mask then
      local padding = additive(o.key_padding_mask, dtype)
      padding = padding.ndim == 1 and padding:view(1, 1, 1, -1) or padding:unsqueeze(1):unsqueeze(1)
      mask = mask and mask + padding or padding
    end
    return mask
  end

  -- Returns the output and, unless {need_weights = false}, the attention weights averaged over heads (N, L, S).
  function nn.MultiheadAttention:forward(query, key, value, o)
    o = options('MultiheadAttention', o, {
      key_padding_mask = none, need_weights = true, attn_mask = none, average_attn_weights = true, is_causal = false }, 3)
    if o.is_causal and not o.attn_mask then error('MultiheadAttention: is_causal is a hint about attn_mask, which is missing', 3) end
    local batched = query.ndim == 3
    local function arrange(x)
      if not batched then return x:unsqueeze(0) end
      return self.batch_first and x or x:transpose(0, 1)
    end
    local same = query == key and key == value
    local q0 = arrange(query)
    local q, k, v = project(self, q0, same and q0 or arrange(key), same and q0 or arrange(value))
    local n, l, e = q:size(0), q:size(1), self.embed_dim
    local function heads(x) return x:view(n, x:size(1), self.num_heads, e / self.num_heads):transpose(1, 2) end
    q, k, v = heads(q), heads(k), heads(v)
    local mask, p = joined_mask(self, o, n, query.dtype), self.training and self.dropout or 0
    local y, weights
    if o.need_weights then
      local scores = (q * (1 / math.sqrt(e / self.num_heads))):matmul(k:transpose(-2, -1))
      weights = mf.softmax(mask and scores + mask or scores, { dim = -1 })
      if p > 0 then weights = mf.dropout(weights, p) end
      y = weights:matmul(v)
      if o.average_attn_weights then weights = weights:mean(1) end
    else
      y = mf.scaled_dot_product_attention(q, k, v, { attn_mask = mask, dropout_p = p })
    end
    y = self.out_proj(y:transpose(1, 2):reshape(n, l, e))
    if not batched then return y:squeeze(0), weights and weights:squeeze(0) end
    return self.batch_first and y or y:transpose(0, 1), weights
  end

  -- A block of a transformer's encoder: attention and a two-layer network, each with a residual and a norm.
  nn.TransformerEncoderLayer = Module:extend 'TransformerEncoderLayer'
  function nn.TransformerEncoderLayer:init(d_model, nhead, o)
    o = options('TransformerEncoderLayer', o, { dim_feedforward = 2048, dropout = 0.1, activation = 'relu', layer_norm_eps = 1e-5,
      batch_first = false, norm_first = false })
    self.norm_first, self.activation = o.norm_first, mf[o.activation] or error('TransformerEncoderLayer: no activation ' .. o.activation, 3)
    self.self_attn = nn.MultiheadAttention(d_model, nhead, { dropout = o.dropout, batch_first = o.batch_first })
    self.linear1 = nn.Linear(d_model, o.dim_feedforward)
    self.dropout = nn.Dropout(o.dropout)
    self.linear2 = nn.Linear(o.dim_feedforward, d_model)
    self.norm1 = nn.LayerNorm(d_model, { eps = o.layer_norm_eps })
    self.norm2 = nn.LayerNorm(d_model, { eps = o.layer_norm_eps })
    self.dropout1 = nn.Dropout(o.dropout)
    self.dropout2 = nn.Dropout(o.dropout)
  end

  function nn.TransformerEncoderLayer:forward(x, o)
    o = options('TransformerEncoderLayer', o, { src_mask = none, src_key_padding_mask = none, is_causal = false }, 3)
    local function attend(y)
      local z = self.self_attn(y, y, y, { attn_mask = o.src_mask, key_padding_mask = o.src_key_padding_mask, need_weights = false })
      return self.dropout1(z)
    end
    local function feed(y) return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(y))))) end
    if self.norm_first then
      x = x + attend(self.norm1(x))
      return x + feed(self.norm2(x))
    end
    x = self.norm1(x + attend(x))
    return self.norm2(x + feed(x))
  end
end
