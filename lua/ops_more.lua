-- Functions that PyTorch has besides, as compositions of ops; and its second names of others.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local Tensor = mf.Tensor
local fail = options.fail

local function check_tensor(where, name, t)
  if not mf.is_tensor(t) then fail('%s: %s must be a tensor, is %s', where, name, options.describe(t)) end
end

-- A function of the module and a method.
local function both(name, f)
  mf[name] = function(x, ...)
    check_tensor(name, 'x', x)
    return f(x, ...)
  end
  Tensor[name] = mf[name]
end

-- -- Second names ---------------------------------------------------------------------------------

local names = { absolute = 'abs', negative = 'neg', multiply = 'mul', subtract = 'sub', divide = 'div',
  true_divide = 'div', greater = 'gt', greater_equal = 'ge', less = 'lt', less_equal = 'le', not_equal = 'ne',
  clip = 'clamp', fix = 'trunc', arccos = 'acos', arcsin = 'asin', arctan = 'atan', arctan2 = 'atan2',
  arccosh = 'acosh', arcsinh = 'asinh', arctanh = 'atanh' }
for name, other in pairs(names) do
  mf[name], Tensor[name] = mf[other], Tensor[other]
  if Tensor[other .. '_'] then Tensor[name .. '_'] = Tensor[other .. '_'] end
end
mf.concat, mf.concatenate = mf.cat, mf.cat
Tensor.ndimension, Tensor.nelement = Tensor.dim, Tensor.numel
mf.numel, mf.is_floating_point, mf.detach = Tensor.numel, Tensor.is_floating_point, Tensor.detach
mf.ger, Tensor.ger = mf.outer, Tensor.outer

-- -- Element by element ---------------------------------------------------------------------------

-- x with NaN, inf and -inf replaced: { nan = 0, posinf = the largest number, neginf = the smallest }.
both('nan_to_num', function(x, ...)
  local number = options.number
  local o = options.arguments('nan_to_num', { 'nan', 'posinf', 'neginf' },
    { nan = 0, posinf = number, neginf = number }, ...)
  if not x:is_floating_point() then return x:clone() end
  local most = ({ float16 = 65504, bfloat16 = 255 * 2 ^ 120, float32 = (2 - 2 ^ -23) * 2 ^ 127,
    float64 = (2 - 2 ^ -52) * 2 ^ 1023 })[tostring(x.dtype)]
  x = x:masked_fill(x:isnan(), o.nan)
  x = x:masked_fill(x:eq(math.huge), o.posinf or most)
  return x:masked_fill(x:eq(-math.huge), o.neginf or -most)
end)
-- The fraction: x - trunc(x).
both('frac', function(x) return x - x:trunc() end)
-- log(x / (1 - x)); with eps, x is clamped to [eps, 1 - eps] before.
both('logit', function(x, eps)
  if type(eps) == 'table' then eps = options('logit', eps, { eps = options.number }).eps end
  if eps then x = x:clamp(eps, 1 - eps) end
  return x:log() - (-x):log1p()
end)
-- Degrees as radians.
both('deg2rad', function(x) return x * (math.pi / 180) end)
-- Radians as degrees.
both('rad2deg', function(x) return x * (180 / math.pi) end)
-- sin(pi x) / (pi x), 1 at 0.
both('sinc', function(x)
  local t = x * math.pi
  local near = t:abs():lt(0.1) -- there by its series, whose derivatives are good, too
  local far, q = t:masked_fill(near, 1), t:masked_fill(near:logical_not(), 0):square()
  local series = 1 - q * (1 - q * (1 - q * (1 - q / 72) / 42) / 20) / 6
  return mf.where(near, series, far:sin() / far)
end)
-- x log y, 0 where x is 0.
both('xlogy', function(x, y)
  local none = x:eq(0):logical_and(y:le(0):logical_or(y:eq(math.huge)))
  return (x * mf.where(none, 1, y):log()):masked_fill(none, 0)
end)
-- sqrt(x^2 + y^2) without overflow.
both('hypot', function(x, y)
  local a, b = x:abs(), y:abs()
  local first = a:ge(b):logical_or(a:eq(math.huge)) -- a choice, not maximum and minimum, which have kinks
  local large, small = mf.where(first, x, y), mf.where(first, y, x)
  local none = large:eq(0):logical_or(large:isinf())
  local ratio = (small / large:masked_fill(none, 1)):masked_fill(none, 0)
  return large:abs() * (ratio:square() + 1):sqrt()
end)
-- log(exp(x) + exp(y)) without overflow.
both('logaddexp', function(x, y)
  local first = x:ge(y):logical_or(x:isnan())
  local large, small = mf.where(first, x, y), mf.where(first, y, x)
  return large + (small - large):masked_fill(large:isinf(), -math.huge):softplus()
end)
-- The larger of both; of a number and a NaN, the number.
both('fmax', function(x, y) return mf.where(y:isnan(), x, mf.where(x:isnan(), y, mf.maximum(x, y))) end)
-- The smaller of both; of a number and a NaN, the number.
both('fmin', function(x, y) return mf.where(y:isnan(), x, mf.where(x:isnan(), y, mf.minimum(x, y))) end)
-- x where y has its sign, else -x; as floats.
both('copysign', function(x, y)
  if type(y) == 'number' then y = mf.tensor(y, mf._beside(x)) end
  local float = y:is_floating_point() and y.dtype or x:is_floating_point() and x.dtype or mf.float32
  if not x:is_floating_point() then x = x:to(float) end
  local negative = y:lt(0):logical_or(y:eq(0):logical_and(y:reciprocal():lt(0)))
  return x:abs() * mf.where(negative, -1, 1):to(float)
end)

-- -- Reductions -----------------------------------------------------------------------------------

-- Sums without NaN; dims and options as sum.
both('nansum', function(x, ...) return x:masked_fill(x:isnan(), 0):sum(...) end)
-- Means of what is not NaN; dims and options as mean.
both('nanmean', function(x, ...)
  return x:nansum(...) / x:isnan():logical_not():to(x.dtype):sum(...)
end)
-- spread, 'std' or 'var', and mean over the same dims; (dim, unbiased, keepdim) as std has them.
local function with_mean(name, spread)
  return function(x, ...)
    local o = options.arguments(name, { 'dim', 'unbiased', 'keepdim' }, { dim = options.none, unbiased = true,
      keepdim = false, correction = options.number }, ...)
    check_tensor(name, 'x', x)
    local dims = type(o.dim) == 'number' and { o.dim } or o.dim or {}
    return x[spread](x, dims, { unbiased = o.unbiased, keepdim = o.keepdim, correction = o.correction }),
      x:mean(dims, { keepdim = o.keepdim })
  end
end
-- std and mean: std_mean(x, dim, unbiased, keepdim), or by name.
mf.std_mean = with_mean('std_mean', 'std')
-- var and mean: var_mean(x, dim, unbiased, keepdim), or by name.
mf.var_mean = with_mean('var_mean', 'var')
-- The smallest and the largest element, over all or one dim.
both('aminmax', function(x, o)
  o = options('aminmax', o, { dim = options.none, keepdim = false })
  local dims = o.dim and { o.dim } or {}
  return x:amin(dims, { keepdim = o.keepdim }), x:amax(dims, { keepdim = o.keepdim })
end)

-- The k-th smallest element along dim, k from 1, and where it stands: values and indices.
both('kthvalue', function(x, k, ...)
  local o = options.arguments('kthvalue', { 'dim', 'keepdim' }, { dim = -1, keepdim = false }, ...)
  local n = x:dim() == 0 and 1 or x:size(o.dim)
  if options.count('kthvalue', 'k', k, 1) > n then fail('kthvalue: k is %d, dim %d has %d entries', k, o.dim, n) end
  if x:dim() == 0 then return x:clone(), mf.zeros({}, mf._beside(x, { dtype = mf.int64 })) end
  local values, indices = x:sort(o.dim)
  values, indices = values:narrow(o.dim, k - 1, 1), indices:narrow(o.dim, k - 1, 1)
  if o.keepdim then return values, indices end
  return values:squeeze(o.dim), indices:squeeze(o.dim)
end)

-- The 0-d value of an element of x, with a gradient that goes to all elements equal to it, in equal parts.
local function shared(x, value)
  local v, finite = value:detach(), x:isfinite()
  local equal = x:eq(v):logical_or(x:isnan():logical_and(v:isnan()))
  local share = equal:to(x.dtype) / equal:sum()
  local known = x:masked_fill(finite:logical_not(), 0)
  local zero = ((known - known:detach()) * share):sum()
  return mf.where(v:isfinite(), v + zero, (mf.where(equal, x, 0) * share):sum())
end

-- Values and indices of the lower median along dim; of all elements, the value alone. NaN where there is one.
both('median', function(x, ...)
  local o = options.arguments('median', { 'dim', 'keepdim' }, { dim = options.number, keepdim = false }, ...)
  local dim = o.dim
  if not dim then
    if x:numel() == 0 then return mf.full({}, 0 / 0, mf._beside(x, { dtype = x.dtype })) end
    x, dim = x:reshape(-1), 0
  end
  local n = x:dim() == 0 and 1 or x:size(dim)
  if n == 0 then fail('median: dim %d has no entries', dim) end
  local values, indices = mf.kthvalue(x, math.floor((n + 1) / 2), dim, true)
  if x:is_floating_point() and x:dim() > 0 then
    local bad, at = mf._max_dim(x:isnan():long(), dim, true)
    indices = mf.where(bad:ne(0), at, indices)
    values = x:gather(dim, indices)
  end
  if x:dim() > 0 and (not o.dim or not o.keepdim) then
    values, indices = values:squeeze(dim), indices:squeeze(dim)
  end
  if not o.dim then return x.requires_grad and shared(x, values) or values end
  return values, indices
end)

-- The p-norm of x - y.
both('dist', function(x, y, p) return (x - y):norm { p = p or 2 } end)

-- -- Matrices -------------------------------------------------------------------------------------

-- The sum of the main diagonal of a matrix.
both('trace', function(x)
  if x:dim() ~= 2 then fail('trace: x must be a matrix, has shape %s', tostring(x.shape)) end
  return x:diagonal():sum()
end)
-- A matrix with the elements of a vector on its diagonal; of a matrix, its diagonal.
both('diag', function(x, diagonal)
  if type(diagonal) == 'table' then diagonal = options('diag', diagonal, { diagonal = 0 }).diagonal end
  diagonal = diagonal or 0
  if x:dim() == 2 then return x:diagonal(diagonal):clone() end
  if x:dim() ~= 1 then fail('diag: x must have 1 or 2 dims, has shape %s', tostring(x.shape)) end
  local before, after = math.max(diagonal, 0), math.max(-diagonal, 0)
  local square = mf.eye(x:numel(), mf._beside(x, { dtype = x.dtype, device = x.device })) * x
  return mf.pad(square, { before, after, after, before })
end)
-- Sums of products over the last dims of x and the last of y.
both('inner', function(x, y)
  if x:dim() == 0 or y:dim() == 0 then return x * y end
  return mf.tensordot(x, y, { dims = { { -1 }, { -1 } } })
end)
-- The product of two vectors.
both('vdot', function(x, y) return x:dot(y) end)
-- beta c + alpha product; among whole numbers only the whole parts of beta and alpha count.
local function combined(c, beta, product, alpha)
  if not product:is_floating_point() and not c:is_floating_point() then
    beta, alpha = beta - math.fmod(beta, 1), alpha - math.fmod(alpha, 1)
  end
  if alpha ~= 1 then product = product * alpha end
  return beta == 0 and product or c * beta + product
end
-- beta c + alpha (a b) for batches of matrices.
both('baddbmm', function(c, a, b, o)
  o = options('baddbmm', o, { beta = 1, alpha = 1 })
  return combined(c, o.beta, a:bmm(b), o.alpha)
end)
-- beta c + alpha (a b) for a matrix a and a vector b.
both('addmv', function(c, a, b, o)
  o = options('addmv', o, { beta = 1, alpha = 1 })
  return combined(c, o.beta, a:mv(b), o.alpha)
end)
-- The Kronecker product.
both('kron', function(x, y)
  local n = math.max(x:dim(), y:dim())
  local a, b, out = {}, {}, {}
  for d = 1, n do
    local s, t = x.shape[d - n + x:dim()] or 1, y.shape[d - n + y:dim()] or 1
    a[2 * d - 1], a[2 * d], b[2 * d - 1], b[2 * d], out[d] = s, 1, 1, t, s * t
  end
  return (x:reshape(a) * y:reshape(b)):reshape(out)
end)
-- Sums of products over the last `dims` of x and the first of y, or over lists of dims of each:
-- {dims = 2} or {dims = { {0, 1}, {1, 0} }}.
function mf.tensordot(x, y, ...)
  check_tensor('tensordot', 'x', x)
  check_tensor('tensordot', 'y', y)
  local dims = ...
  if type(dims) == 'table' and dims.dims then dims = dims.dims end
  local a, b = {}, {}
  if type(dims or 2) == 'number' then
    local n, most = dims or 2, math.min(x:dim(), y:dim())
    if not (n >= 0 and n <= most and n == math.floor(n)) then
      fail('tensordot: dims must be a whole number from 0 to %d, is %s', most, tostring(n))
    end
    for k = 1, n do a[k], b[k] = x:dim() - n + k - 1, k - 1 end
  else
    if type(dims) ~= 'table' or type(dims[1]) ~= 'table' or type(dims[2]) ~= 'table' then
      fail('tensordot: dims must be a number or two tables of dims, is a %s', type(dims))
    end
    for k, d in ipairs(dims[1]) do a[k] = d % x:dim() end
    for k, d in ipairs(dims[2]) do b[k] = d % y:dim() end
  end
  if #a ~= #b then fail('tensordot: %d dims of x, %d of y', #a, #b) end
  local function split(t, summed)
    local is, kept, sizes, n = {}, {}, {}, 1
    for _, d in ipairs(summed) do
      is[d] = true
      n = n * t:size(d)
    end
    for d = 0, t:dim() - 1 do
      if not is[d] then kept[#kept + 1], sizes[#sizes + 1] = d, t:size(d) end
    end
    return kept, sizes, n
  end
  for k = 1, #a do
    if x:size(a[k]) ~= y:size(b[k]) then
      fail('tensordot: dim %d of x has size %d, dim %d of y %d', a[k], x:size(a[k]), b[k], y:size(b[k]))
    end
  end
  local kept_x, sizes, n = split(x, a)
  local kept_y, more = split(y, b)
  local order_x, order_y = { unpack(kept_x) }, { unpack(b) }
  for _, d in ipairs(a) do order_x[#order_x + 1] = d end
  for _, d in ipairs(kept_y) do order_y[#order_y + 1] = d end
  local rows, columns = 1, 1
  for _, s in ipairs(sizes) do rows = rows * s end
  for _, s in ipairs(more) do
    columns = columns * s
    sizes[#sizes + 1] = s
  end
  return x:permute(order_x):reshape(rows, n):matmul(y:permute(order_y):reshape(n, columns)):reshape(sizes)
end

-- -- Shapes ---------------------------------------------------------------------------------------

local function list_of(where, ...)
  local list = mf.is_tensor((...)) and { ... } or ...
  if type(list) ~= 'table' or #list == 0 then fail('%s: a table of tensors is needed', where) end
  for k, x in ipairs(list) do check_tensor(where, ('xs[%d]'):format(k), x) end
  return list
end
local function at_least(x, n)
  if n == 1 then return x:dim() == 0 and x:reshape(1) or x end
  if x:dim() == 0 then return x:reshape(1, 1) end
  return x:dim() == 1 and x:unsqueeze(0) or x
end
-- Tensors side by side: along dim 1, vectors along dim 0.
function mf.hstack(...)
  local list = list_of('hstack', ...)
  for k, x in ipairs(list) do list[k] = at_least(x, 1) end
  return mf.cat(list, { dim = list[1]:dim() == 1 and 0 or 1 })
end
-- Tensors one below the other: along dim 0, vectors as rows.
function mf.vstack(...)
  local list = list_of('vstack', ...)
  for k, x in ipairs(list) do list[k] = at_least(x, 2) end
  return mf.cat(list, { dim = 0 })
end
-- Columns side by side, vectors as columns.
function mf.column_stack(...)
  local list = list_of('column_stack', ...)
  for k, x in ipairs(list) do list[k] = x:dim() <= 1 and x:reshape(-1, 1) or x end
  return mf.cat(list, { dim = 1 })
end
-- Columns in reverse order.
both('fliplr', function(x) return x:flip(1) end)
-- Rows in reverse order.
both('flipud', function(x) return x:flip(0) end)
-- A quarter turn k times, from the first of dims toward the second.
both('rot90', function(x, k, dims)
  k, dims = (k or 1) % 4, dims or { 0, 1 }
  if k == 0 then return x:clone() end
  if k == 2 then return x:flip(dims) end
  return k == 1 and x:flip(dims[2]):transpose(dims[1], dims[2]) or x:transpose(dims[1], dims[2]):flip(dims[2])
end)
-- Differences of neighbours along dim, n times.
both('diff', function(x, ...)
  local o = options.arguments('diff', { 'n', 'dim' }, { n = 1, dim = -1 }, ...)
  local n, size = options.count('diff', 'n', o.n), x:size(o.dim)
  if n == 0 then return x:clone() end
  if n >= size then return x:narrow(o.dim, 0, 0) end
  for k = size - 1, size - n, -1 do x = x:narrow(o.dim, 1, k) - x:narrow(o.dim, 0, k) end
  return x
end)
-- Places (2, n) of the lower triangle of a matrix, row by row.
function mf.tril_indices(row, col, offset)
  return mf.ones({ row, col }, { dtype = mf.bool }):tril(offset or 0):nonzero():t():contiguous()
end
-- Places (2, n) of the upper triangle of a matrix, row by row.
function mf.triu_indices(row, col, offset)
  return mf.ones({ row, col }, { dtype = mf.bool }):triu(offset or 0):nonzero():t():contiguous()
end
-- Counts the elements of the last dim of a, ascending, that stand before each v: those less than it
-- or, with right, no greater. NaN is the greatest. A bisection: the count grows by falling powers of two.
local function bisect(a, v, right)
  local n, last = a:size(-1), v:ne(v)
  local count, step = mf.zeros(v.shape, { dtype = mf.int64, device = v.device }), 1
  while step * 2 <= n do step = step * 2 end
  while step >= 1 and n > 0 do
    local at = (count + (step - 1)):clamp(nil, n - 1)
    local element = a:dim() == 1 and a[at] or a:gather(-1, at)
    local before = (right and element:le(v) or not right and element:lt(v)):logical_or(last)
    count = count + before:logical_and(count:le(n - step)) * step
    step = math.floor(step / 2)
  end
  return count
end

-- Where v (..., m) would be inserted into a (..., n), ascending along its last dim, to keep the order:
-- int64 of v's shape, the first such place or, with right = true, the last. a of one dim serves v of
-- any shape; otherwise all dims but the last must agree.
function mf.searchsorted(a, v, o)
  o = options('searchsorted', o, { right = false })
  check_tensor('searchsorted', 'a', a)
  if type(v) == 'number' then v = mf.tensor(v, { dtype = a.dtype, device = a.device }) end
  check_tensor('searchsorted', 'v', v)
  local same = a:dim() == v:dim()
  for d = 0, a:dim() - 2 do same = same and a:size(d) == v:size(d) end
  if a:dim() == 0 or a:dim() > 1 and not same then
    fail('searchsorted: the dims of a before the last must be those of v; a is %s, v is %s', a.shape, v.shape)
  end
  return bisect(a:detach(), v:detach(), o.right)
end
-- The index of the bucket of each element of x between boundaries (n), ascending: searchsorted's places.
both('bucketize', function(x, boundaries, o)
  o = options('bucketize', o, { right = false })
  check_tensor('bucketize', 'boundaries', boundaries)
  if boundaries:dim() ~= 1 then fail('bucketize: boundaries must have one dim, has %s', boundaries.shape) end
  return bisect(boundaries:detach(), x:detach(), o.right)
end)
-- Whether each element of x is among those of y: all compared with all where y is short, else y is sorted.
both('isin', function(x, y)
  check_tensor('isin', 'y', y)
  x, y = x:detach(), y:detach():reshape(-1)
  if y:numel() <= 16 then return x:unsqueeze(-1):eq(y):any(-1) end
  y = y:sort()
  return y[bisect(y, x):clamp(nil, y:numel() - 1)]:eq(x)
end)
-- Distances (..., n, m) of the rows of x (..., n, d) and y (..., m, d) by the p-norm.
both('cdist', function(x, y, p)
  if type(p) == 'table' then p = options('cdist', p, { p = 2 }).p end
  return (x:unsqueeze(-2) - y:unsqueeze(-3)):norm { p = p or 2, dim = -1 }
end)
-- The p-norm of x - y + eps along the last dim.
function mf.pairwise_distance(x, y, o)
  o = options('pairwise_distance', o, { p = 2, eps = 1e-6, keepdim = false })
  return (x - y + o.eps):norm { p = o.p, dim = -1, keepdim = o.keepdim }
end
-- The value of a tensor of one element as a boolean.
function Tensor.is_nonzero(x) return x:item() ~= 0 and x:item() ~= false end

return mf
