-- Gradients of views, joins, indexing, masks and random ops; see grad.lua for the form.
local mf = require 'moonflow.core'
local grad = {}

-- Views. Sizes and dims in o are settled: no -1, no negative dim.
grad.view = { x = function(g, _, o) return g:reshape(o.shape.x) end }
grad.reshape = { x = function(g, _, o) return g:reshape(o.shape.x) end }
grad.flatten = { x = function(g, _, o) return g:reshape(o.shape.x) end }
grad.unflatten = { x = function(g, _, o) return g:reshape(o.shape.x) end }
grad.squeeze = { x = function(g, _, o) return g:reshape(o.shape.x) end }
grad.unsqueeze = { x = function(g, _, o) return g:reshape(o.shape.x) end }
grad.permute = {
  x = function(g, _, o)
    local back = {}
    for i, d in ipairs(o.dims) do back[d + 1] = i - 1 end
    return g:permute(back)
  end,
}
grad.transpose = { x = function(g, _, o) return g:transpose(o.dim0, o.dim1) end }
grad.t = { x = function(g) return g:t() end }
grad.movedim = { x = function(g, _, o) return g:movedim(o.destination, o.source) end }
grad.expand = { x = function(g) return g end }
grad.broadcast_to = { x = function(g) return g end }

-- Parts: zeros with g in its place.
grad.narrow = { x = function(g, _, o) return mf._slice_backward(g, o.shape.x, o.dim, o.start, 1) end }
grad.slice = { x = function(g, _, o) return mf._slice_backward(g, o.shape.x, o.dim, o.start, o.step) end }
grad.select = { x = function(g, _, o) return mf._slice_backward(g:unsqueeze(o.dim), o.shape.x, o.dim, o.index, 1) end }
grad.slice_backward = {
  g = function(g, _, o)
    local n = o.shape.g[o.dim + 1]
    if n == 0 then return g:narrow(o.dim, 0, 0) end
    return g:slice(o.dim, o.start, o.start + (n - 1) * o.step + 1, o.step)
  end,
}
grad.diagonal = { x = function(g, _, o) return mf._diagonal_backward(g, o.shape.x, o.offset, o.dim1, o.dim2) end }
grad.diagonal_backward = { g = function(g, _, o) return g:diagonal(o.offset, o.dim1, o.dim2) end }
grad.as_strided = {
  x = function(g, _, o)
    local shape, copies = o.shape.x, 1
    for d, size in ipairs(shape) do
      if o.x_stride[d] == 0 then copies = copies * size end
    end
    return mf._strided_add(g, shape, o.x_stride, 0, o.stride, o.storage_offset - o.x_offset, copies)
  end,
}
grad.strided_add = { g = function(g, _, o)
  return mf._strided_add(g, o.shape.g, o.g_stride, o.g_offset, o.stride, o.offset, o.copies)
end }
-- What the tape makes of a write through a view.
local function nothing(g, shape)
  return g:new_zeros({}):expand(shape)
end
grad.slice_base = { -- elements of the view that are one place of the base add up
  x = function(g, _, o) return mf._strided_add(g, o.shape.x, o.base_stride, 0, o.stride, o.offset, 1) end,
}
grad.scatter_base = {
  x = function(g, _, o)
    return mf._scatter_base(g, nothing(g, o.src_size), o.base_stride, o.src_size, o.stride, o.offset)
  end,
  src = function(g, _, o) return mf._slice_base(g, o.base_stride, o.src_size, o.stride, o.offset) end,
}

-- Several parts: their gradients joined; parts that were not used count as zeros.
local function join(g, shape, dim, size_of)
  local some
  for _, part in pairs(g) do some = part end
  local parts, k, at = {}, 1, 0
  while at < shape[dim + 1] do
    local size = size_of(k)
    parts[k] = g[k]
    if not parts[k] then
      local lacking = {}
      for d = 1, #shape do lacking[d] = shape[d] end
      lacking[dim + 1] = math.min(size, shape[dim + 1] - at)
      parts[k] = nothing(some, lacking)
    end
    k, at = k + 1, at + size
  end
  if #parts == 0 then return some:reshape(shape) end
  return mf.cat(parts, dim)
end
grad.split = {
  x = function(g, _, o)
    local sizes = o.split_size
    return join(g, o.shape.x, o.dim, function(k) return #sizes == 1 and sizes[1] or sizes[k] end)
  end,
}
grad.chunk = {
  x = function(g, _, o)
    local shape = o.shape.x
    local size = math.ceil(shape[o.dim + 1] / o.chunks)
    return join(g, shape, o.dim, function() return size end)
  end,
}
grad.unbind = {
  x = function(g, _, o)
    local shape, parts, some = o.shape.x, {}, nil
    for _, part in pairs(g) do some = part end
    for k = 1, shape[o.dim + 1] do
      parts[k] = g[k] or nothing(some, some.shape)
    end
    return mf.stack(parts, o.dim)
  end,
}

-- Joins
grad.cat = {
  xs = function(g, _, o)
    local shapes, sizes, parts = o.shape.xs, {}, {}
    for k, shape in ipairs(shapes) do sizes[k] = shape[o.dim + 1] or 0 end
    local at = 0
    for k, size in ipairs(sizes) do
      parts[k] = #shapes[k] == g:dim() and g:narrow(o.dim, at, size) or g:new_zeros(shapes[k])
      if #shapes[k] == g:dim() then at = at + size end
    end
    return parts
  end,
}
grad.stack = { xs = function(g, _, o) return g:unbind(o.dim) end }
grad.flip = { x = function(g, _, o) return g:flip(o.dims) end }
grad.roll = {
  x = function(g, _, o)
    local back = {}
    for k, shift in ipairs(o.shifts) do back[k] = -shift end
    return g:roll(back, o.dims)
  end,
}
grad.pad = {
  x = function(g, _, o)
    local shape, pad = o.shape.x, o.pad
    if o.mode ~= 'constant' then return mf._pad_backward(g, shape, pad, o.mode) end
    local back, crop = {}, true
    for k, n in ipairs(pad) do
      back[k] = -n
      crop = crop and n >= 0
    end
    if not crop then return mf.pad(g, back) end
    for k = 1, #pad, 2 do -- a view
      local d = #shape - (k + 1) / 2
      if pad[k] > 0 or pad[k + 1] > 0 then g = g:narrow(d, pad[k], shape[d + 1]) end
    end
    return g
  end,
}
grad.pad_backward = { g = function(g, _, o) return mf.pad(g, o.pad, { mode = o.mode }) end }
grad.tril = { x = function(g, _, o) return g:tril(o.diagonal) end }
grad.triu = { x = function(g, _, o) return g:triu(o.diagonal) end }

-- Indexing
grad.index = { x = function(g, _, o) return mf._index_backward(g, o.indices, o.shape.x, o.dims) end }
grad.index_backward = { g = function(g, _, o) return mf._index(g, o.indices, o.dims) end }
grad.index_put = {
  x = function(g, _, o) return o.accumulate and g or mf._index_put(g, 0, o.indices, o.dims) end,
  value = function(g, _, o) return mf._index(g, o.indices, o.dims) end,
}
grad.index_select = { x = function(g, _, o) return mf._index_select_backward(g, o.index, o.shape.x, o.dim) end }
grad.index_select_backward = { g = function(g, _, o) return g:index_select(o.dim, o.index) end }
grad.index_add = {
  x = function(g) return g end,
  source = function(g, _, o) return g:index_select(o.dim, o.index):reshape(o.shape.source) end,
}
grad.index_copy = {
  x = function(g, _, o) return g:index_fill(o.dim, o.index, 0) end,
  source = function(g, _, o) return g:index_select(o.dim, o.index):reshape(o.shape.source) end,
}
grad.index_fill = {
  x = function(g, _, o) return g:index_fill(o.dim, o.index, 0) end,
  value = function(g, _, o) return g:index_select(o.dim, o.index):sum() end,
}
grad.embedding = {
  w = function(g, _, o)
    local padding = o.padding_idx
    if o.sparse and not g.is_global then -- a global gradient is dense
      local ids, size = o.ids:reshape(-1):to(mf.int64), o.shape.w
      local values = g:reshape(ids:numel(), size[2])
      if padding then
        local kept = mf.nonzero(ids:ne(padding)):flatten()
        ids, values = ids:index_select(0, kept), values:index_select(0, kept)
      end
      return mf.rows(ids, values, size[1])
    end
    return mf._embedding_backward(g, o.ids, o.shape.w[1], padding and { padding_idx = padding })
  end,
}
grad.embedding_backward = {
  g = function(g, _, o)
    local padding = o.padding_idx
    if padding then g = g:index_fill(0, mf.tensor({ padding }, mf._beside(g, { dtype = mf.int64 })), 0) end
    return mf.embedding(o.ids, g)
  end,
}
grad.gather = { x = function(g, _, o) return mf._gather_backward(g, o.index, o.shape.x, o.dim) end }
grad.gather_backward = { g = function(g, _, o) return g:gather(o.dim, o.index) end }

-- The gradient of a source that is larger than the index: zeros where it was not read.
local function from_index(g, index, dim, shape)
  local y, pad, larger = g:gather(dim, index), {}, false
  for d = #shape, 1, -1 do
    local more = shape[d] - y:size(d - 1)
    pad[#pad + 1], pad[#pad + 2] = 0, more
    larger = larger or more > 0
  end
  return larger and mf.pad(y, pad) or y
end
grad.scatter = {
  x = function(g, _, o) return g:scatter(o.dim, o.index, 0) end,
  src = function(g, _, o) return from_index(g, o.index, o.dim, o.shape.src) end,
}
grad.scatter_add = {
  x = function(g) return g end,
  src = function(g, _, o) return from_index(g, o.index, o.dim, o.shape.src) end,
}

-- Masks
grad.masked_select = {
  x = function(g, _, o)
    local shape = mf._broadcast_shape(o.shape.x, o.mask.shape)
    return mf._masked_select_backward(g, o.mask, shape)
  end,
}
grad.masked_select_backward = { g = function(g, _, o) return g:masked_select(o.mask) end }
grad.masked_scatter = {
  x = function(g, _, o) return g:masked_fill(o.mask, 0) end,
  source = function(g, _, o)
    local taken, n = g:masked_select(o.mask), 1
    for _, size in ipairs(o.shape.source) do n = n * size end
    return mf.pad(taken, { 0, n - taken:numel() }):reshape(o.shape.source)
  end,
}

-- Writes in place: what was there before has no influence. A leaf then has the gradient zero, not none.
grad.copy_ = {
  x = function(g) return mf.zeros_like(g) end,
  src = function(g) return g end,
}
grad.fill_ = { x = function(g) return mf.zeros_like(g) end }
grad.uniform_ = { x = function() return nil end }
grad.normal_ = { x = function() return nil end }
grad.bernoulli_ = { x = function() return nil end }
grad.random_ = { x = function() return nil end }

-- Random numbers
grad.dropout = { x = function(g, _, o) return mf._dropout_backward(g, o.p, { generator = o.generator }) end }
grad.dropout_backward = { g = function(g, _, o) return mf._dropout_backward(g, o.p, { generator = o.generator }) end }

return grad
