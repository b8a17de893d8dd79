-- Composed ops of shape, index and random numbers; see also the ops of src/op. Each is a function
-- of the module and, where its first argument is a tensor, a method.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local Tensor = mf.Tensor
local none = options.none

local function is_options(t)
  return type(t) == 'table' and next(t) ~= nil and type(next(t)) == 'string'
end

local function check_tensor(where, name, t)
  if mf.is_tensor(t) then return end
  fail('%s: %s must be a tensor, is %s', where, name, t == nil and 'nil' or 'a ' .. type(t))
end

local function is_int(n)
  return type(n) == 'number' and n == math.floor(n) and math.abs(n) <= 2 ^ 53
end

local function check_int(where, name, n)
  if is_int(n) then return end
  local what = type(n) == 'number' and tostring(n) or 'a ' .. type(n)
  fail('%s: %s must be a whole number, is %s', where, name, what)
end

-- dim made non-negative; `where` names the function for the error.
local function check_dim(where, dim, ndim)
  check_int(where, 'dim', dim)
  local n = math.max(ndim, 1)
  if dim < -n or dim >= n then
    fail('%s: dim %d is out of range for %d dims; legal are %d to %d', where, dim, ndim, -n, n - 1)
  end
  return dim < 0 and dim + n or dim
end

-- The list at `first` of the arguments: one table, or the numbers that follow.
local function list_of(first, ...)
  if type(first) == 'table' then return first end
  return { first, ... }
end

-- -- Views ----------------------------------------------------------------------------------------

Tensor.swapaxes, Tensor.swapdims, Tensor.moveaxis, Tensor.ravel = Tensor.transpose, Tensor.transpose, Tensor.movedim,
  Tensor.flatten
mf.swapaxes, mf.swapdims, mf.moveaxis, mf.ravel = mf.transpose, mf.transpose, mf.movedim, mf.flatten

function Tensor.view_as(x, other)
  check_tensor('view_as', 'other', other)
  return x:view(other.shape)
end

function Tensor.reshape_as(x, other)
  check_tensor('reshape_as', 'other', other)
  return x:reshape(other.shape)
end

function Tensor.expand_as(x, other)
  check_tensor('expand_as', 'other', other)
  return x:expand(other.shape)
end

-- The shape to which shapes broadcast.
function mf._broadcast_shape(...)
  local shapes, n = { ... }, 0
  for _, s in ipairs(shapes) do n = math.max(n, #s) end
  local out = {}
  for d = 1, n do
    out[d] = 1
    for _, s in ipairs(shapes) do
      local size = s[d - n + #s]
      if size and size ~= 1 then out[d] = size end
    end
  end
  return out
end

-- The tensors, each broadcast to their common shape.
function mf.broadcast_tensors(...)
  local xs = mf.is_tensor((...)) and { ... } or ...
  local shapes, out = {}, {}
  for k = 1, mf.is_tensor((...)) and select('#', ...) or #xs do
    check_tensor('broadcast_tensors', 'xs[' .. k .. ']', xs[k])
    shapes[k] = xs[k].shape
  end
  local shape = mf._broadcast_shape(unpack(shapes))
  for k, x in ipairs(xs) do out[k] = x:broadcast_to(shape) end
  return out
end

-- mf.meshgrid(a, b, {indexing = 'ij'}): a table of views of one shape, one dim for each vector;
-- 'xy' exchanges the first two.
function mf.meshgrid(...)
  local xs, n = { ... }, select('#', ...)
  local o
  if is_options(xs[n]) then o, xs[n], n = xs[n], nil, n - 1 end
  o = options('meshgrid', o, { indexing = 'ij' })
  if type(xs[1]) == 'table' then xs, n = xs[1], #xs[1] end
  if o.indexing ~= 'ij' and o.indexing ~= 'xy' then
    fail("meshgrid: indexing must be 'ij' or 'xy', is '%s'", o.indexing)
  end
  if n == 0 then fail('meshgrid: at least one tensor is needed') end
  local sizes, out = {}, {}
  local function place(k) return o.indexing == 'xy' and n > 1 and k <= 2 and 3 - k or k end
  for k = 1, n do
    local x = xs[k]
    check_tensor('meshgrid', 'xs[' .. k .. ']', x)
    if x:dim() > 1 then
      fail('meshgrid: xs[%d] must have 0 or 1 dims, has shape %s', k, tostring(x.shape))
    end
    sizes[place(k)] = x:numel()
  end
  for k, x in ipairs(xs) do
    local shape = {}
    for d = 1, n do shape[d] = d == place(k) and sizes[d] or 1 end
    out[k] = x:reshape(shape):expand(sizes)
  end
  return out
end

-- -- Repetition -----------------------------------------------------------------------------------

-- x:tile(2, 3): x repeated so often in its last dims; more numbers than dims make new leading dims.
function Tensor.tile(x, ...)
  check_tensor('tile', 'x', x)
  local dims = list_of(...)
  local n, ndim = math.max(#dims, x:dim()), x:dim()
  local split, wide, joined = {}, {}, {}
  for d = 1, n do
    local times, size = dims[d - n + #dims] or 1, x.shape[d - n + ndim] or 1
    check_int('tile', 'dims[' .. d .. ']', times)
    if times < 0 then fail('tile: dims[%d] is %d, which is negative', d, times) end
    if times ~= 1 then
      split[#split + 1], wide[#wide + 1] = 1, times
    end
    split[#split + 1], wide[#wide + 1] = size, size
    joined[d] = times * size
  end
  if #wide == n and n == ndim then return x:clone() end
  return x:reshape(split):expand(wide):clone({ memory_format = 'contiguous' }):reshape(joined)
end

-- Places that repeat each entry as often as the 1-d tensor of counts says.
local function repeated(counts, n)
  if counts:dim() > 1 or counts:is_floating_point() then
    fail('repeat_interleave: repeats must be a number or a 1-d tensor of whole numbers')
  end
  local list, total = counts:reshape(-1):tolist(), 0
  if #list ~= n and #list ~= 1 then
    fail('repeat_interleave: repeats has %d entries, the dim has %d', #list, n)
  end
  for i = 1, n do
    local times = #list == 1 and list[1] or list[i]
    if times < 0 then fail('repeat_interleave: repeats holds %d, which is negative', times) end
    total = total + times
  end
  if total > 2 ^ 53 then fail('repeat_interleave: repeats asks for too many entries') end
  if n == 0 then return mf.zeros({ 0 }, mf._beside(counts, { dtype = mf.int64 })) end
  -- 1 where an entry gives way to the next; sums of these are the entries' numbers
  local ends = counts:reshape(-1):long():expand(n):cumsum(0):narrow(0, 0, n - 1)
  local steps = mf.zeros({ total + 1 }, mf._beside(counts, { dtype = mf.int64 }))
  return steps:index_add(0, ends, mf.ones_like(ends)):cumsum(0):narrow(0, 0, total)
end

-- Each entry of dim repeated in its place; repeats is a number or a tensor with one for each entry.
-- Without dim, of all elements as one row.
function Tensor.repeat_interleave(x, repeats, o)
  check_tensor('repeat_interleave', 'x', x)
  if is_int(o) then o = { dim = o } end
  o = options('repeat_interleave', o, { dim = none })
  local dim = o.dim
  if not dim then
    x, dim = x:reshape(-1), 0
  elseif x:dim() == 0 then
    x = x:reshape(1)
  end
  dim = check_dim('repeat_interleave', dim, x:dim())
  if mf.is_tensor(repeats) then return x:index_select(dim, repeated(repeats, x:size(dim), 2)) end
  check_int('repeat_interleave', 'repeats', repeats)
  if repeats < 0 then fail('repeat_interleave: repeats is %d, which is negative', repeats) end
  local shape = {}
  for d = 0, x:dim() - 1 do
    shape[#shape + 1] = x:size(d)
    if d == dim then shape[#shape + 1] = repeats end
  end
  return x:unsqueeze(dim + 1):expand(shape):clone({ memory_format = 'contiguous' }):flatten(dim, dim + 1)
end

mf.tile, mf.repeat_interleave = Tensor.tile, Tensor.repeat_interleave

-- -- Indexing -------------------------------------------------------------------------------------

-- A new last dim of num_classes (else one more than the largest): int64, 1 where x points, 0 elsewhere.
function Tensor.one_hot(x, num_classes)
  check_tensor('one_hot', 'x', x)
  if is_options(num_classes) then num_classes = options('one_hot', num_classes, { num_classes = -1 }).num_classes end
  if num_classes == nil or num_classes == -1 then
    if x:numel() == 0 then fail('one_hot: without elements, num_classes is needed') end
    num_classes = x:max():item() + 1
  end
  return mf._one_hot(x, num_classes)
end
mf.one_hot = Tensor.one_hot

-- The elements of x that indices names along dim; other dims broadcast. Without dim, of all elements as one row.
function Tensor.take_along_dim(x, indices, o)
  check_tensor('take_along_dim', 'x', x)
  check_tensor('take_along_dim', 'indices', indices)
  if is_int(o) then o = { dim = o } end
  o = options('take_along_dim', o, { dim = none })
  if not o.dim then return x:reshape(-1):gather(0, indices:reshape(-1)) end
  local dim = check_dim('take_along_dim', o.dim, x:dim())
  if x:dim() ~= indices:dim() then
    fail('take_along_dim: x has %d dims, indices has %d; they must be equal', x:dim(), indices:dim())
  end
  local a, b = x.shape, indices.shape
  a[dim + 1], b[dim + 1] = 1, 1
  local wide, narrow = mf._broadcast_shape(a, b), {}
  for d = 1, #wide do narrow[d] = wide[d] end
  wide[dim + 1], narrow[dim + 1] = x:size(dim), indices:size(dim)
  return x:broadcast_to(wide):gather(dim, indices:broadcast_to(narrow))
end
mf.take_along_dim = Tensor.take_along_dim

-- The elements of x, as one row, at these places; the shape of index.
function Tensor.take(x, index)
  check_tensor('take', 'x', x)
  check_tensor('take', 'index', index)
  return x:reshape(-1)[index]
end
mf.take = Tensor.take

-- With { as_tuple = true }, a table of one tensor a dim, as subscripts take them.
local nonzero = mf.nonzero
function Tensor.nonzero(x, o)
  if o == nil then return nonzero(x) end
  o = options('nonzero', o, { as_tuple = false })
  if not o.as_tuple then return nonzero(x) end
  return nonzero(x:dim() == 0 and x:reshape(1) or x):unbind(1)
end
mf.nonzero, mf.argwhere, Tensor.argwhere = Tensor.nonzero, nonzero, nonzero

-- { alpha = 2 } scales what is added.
for _, name in ipairs { 'index_add', 'index_add_' } do
  local add = Tensor[name]
  local function with_alpha(x, dim, index, source, o)
    if o == nil then return add(x, dim, index, source) end
    local alpha = options(name, o, { alpha = 1 }).alpha
    check_tensor(name, 'source', source)
    return add(x, dim, index, alpha == 1 and source or (source * alpha):to(source.dtype))
  end
  Tensor[name] = with_alpha
  if mf[name] then mf[name] = with_alpha end
end

-- index_put: a new tensor; see index_put_.
function Tensor.index_put(x, key, value, o)
  check_tensor('index_put', 'x', x)
  return x:clone():index_put_(key, value, o)
end
mf.index_put = Tensor.index_put

-- x with the elements of source, one by one, where mask is true.
function Tensor.masked_scatter(x, mask, source)
  check_tensor('masked_scatter', 'x', x)
  return mf._masked_scatter(x, mask, source)
end
mf.masked_scatter = Tensor.masked_scatter

-- The same in place.
function Tensor.masked_scatter_(x, mask, source)
  check_tensor('masked_scatter_', 'x', x)
  return x:copy_(mf._masked_scatter(x, mask, source))
end

-- -- Factories like a tensor ----------------------------------------------------------------------

-- The arguments with the dtype and device of x where none are given; on its placement, where it has one.
local function like(x, ...)
  local n, given, o = select('#', ...), { ... }, mf._beside(x, { dtype = x.dtype, device = x.device })
  if is_options(given[n]) then
    for k, v in pairs(given[n]) do o[k] = v end
    n = n - 1
  end
  given[n + 1] = o
  return unpack(given, 1, n + 1)
end

for _, name in ipairs { 'zeros', 'ones', 'empty', 'full' } do
  local make = mf[name]
  Tensor['new_' .. name] = function(x, ...)
    check_tensor('new_' .. name, 'x', x)
    return make(like(x, ...))
  end
end

function Tensor.new_tensor(x, ...)
  check_tensor('new_tensor', 'x', x)
  return mf.tensor(like(x, ...))
end

for _, name in ipairs { 'rand', 'randn' } do
  mf[name .. '_like'] = function(x, o)
    check_tensor(name .. '_like', 'x', x)
    o = mf._laid_out_as(x, like(x, o), o)
    local y = mf[name](x.shape, o)
    if x:is_contiguous() then return y end
    return mf.no_grad(function() return mf.empty_like(x, o):copy_(y) end)
  end
end

local randint = mf._randint
-- mf.randint(high, size) or mf.randint(low, high, size): whole numbers from low (0) to high - 1.
function mf.randint(low, high, ...)
  if type(high) == 'number' and select('#', ...) > 0 and not is_options((...)) then return randint(low, high, ...) end
  return randint(0, low, high, ...)
end

-- mf.randint_like(x, high) or (x, low, high): with the shape, dtype and device of x.
function mf.randint_like(x, low, high, o)
  check_tensor('randint_like', 'x', x)
  if type(high) ~= 'number' then low, high, o = 0, low, high end
  return randint(low, high, x.shape, mf._laid_out_as(x, like(x, o), o))
end

-- -- dropout --------------------------------------------------------------------------------------

-- mf.dropout(x, p, training) or mf.dropout(x, p, {training=, generator=}): zeros with probability
-- p, and scales what stays by 1 / (1 - p).
local function dropout_options(name, x, p, o)
  check_tensor(name, 'x', x)
  if is_options(p) then p, o = nil, p end
  if type(o) == 'boolean' then o = { training = o } end
  o = options(name, o, { p = none, training = true, generator = none })
  p = p or o.p or 0.5
  if type(p) ~= 'number' or not (p >= 0 and p <= 1) then
    fail('%s: p must be from 0 to 1, is %s', name, tostring(p))
  end
  return p, o
end

function Tensor.dropout(x, p, o)
  p, o = dropout_options('dropout', x, p, o)
  if not o.training or p == 0 then return x end
  return mf._dropout(x, p, { generator = o.generator })
end
mf.dropout = Tensor.dropout

-- Whole channels (N, C, ...) or (C, ...) of the sizes in `keep` are dropped together.
local function drop_channels(name, spatial)
  mf[name] = function(x, p, o)
    p, o = dropout_options(name, x, p, o)
    if not o.training or p == 0 then return x end
    local shape = x.shape
    for d = #shape - spatial + 1, #shape do shape[d] = 1 end
    local ones = mf.ones(shape, mf._beside(x, { dtype = x.dtype, device = x.device }))
    return x * mf._dropout(ones, p, { generator = o.generator })
  end
  Tensor[name] = mf[name]
end
drop_channels('dropout1d', 1)
drop_channels('dropout2d', 2)
drop_channels('dropout3d', 3)

return mf
