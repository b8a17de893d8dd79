-- Input values for the oracle: repeatable, the same numbers for every dtype, far from the points
-- where functions jump or bend.
--
-- Numbers are odd multiples of a power of two with 8 significant bits, so that bfloat16 holds them
-- exactly; they are never whole, a half or 0, and within one tensor no two are equal while there
-- are enough of them (order and maxima have no ties).
local mf = require 'moonflow'
local Values = {}
Values.__index = Values

-- dtype: of float tensors. B: the size of batch dims. L: a factor of the sizes that may be large.
function Values.new(o)
  o = o or {}
  return setmetatable({ dtype = o.dtype or mf.float64, B = o.B or 4, L = o.L or 1, state = o.seed or 12345 }, Values)
end

-- A whole number in 0 .. n - 1.
function Values:random(n)
  self.state = (self.state * 16807) % 2147483647
  return math.floor(self.state / 2147483647 * n)
end

local function numel(sizes)
  local n = 1
  for _, s in ipairs(sizes) do n = n * s end
  return n
end

function Values:make(list, sizes, dtype)
  if #list == 0 then return mf.zeros(sizes, { dtype = dtype }) end
  return mf.tensor(list, { dtype = mf.float64 }):view(sizes):to(dtype)
end

-- The odd multiples of 1 / denominator between low and high, shuffled.
function Values:grid(low, high)
  local limit, denominator = math.max(math.abs(low), math.abs(high)), 128
  while limit * denominator > 256 do denominator = denominator / 2 end
  local list = {}
  for k = math.ceil((low * denominator - 1) / 2), math.floor((high * denominator - 1) / 2) do
    list[#list + 1] = (2 * k + 1) / denominator
  end
  for i = #list, 2, -1 do
    local j = self:random(i) + 1
    list[i], list[j] = list[j], list[i]
  end
  return list
end

-- Floats between low and high.
function Values:u(low, high, ...)
  local grid, list, sizes = self:grid(low, high), {}, { ... }
  for i = 1, numel(sizes) do list[i] = grid[(i - 1) % #grid + 1] end
  return self:make(list, sizes, self.dtype)
end

-- Floats between -2 and 2.
function Values:n(...) return self:u(-2, 2, ...) end

-- Whole numbers low .. high - 1.
function Values:i(low, high, ...)
  local list, sizes = {}, { ... }
  for i = 1, numel(sizes) do list[i] = low + self:random(high - low) end
  return self:make(list, sizes, mf.int64)
end

-- true and false, at least one of each where there are two.
function Values:b(...)
  local list, sizes = {}, { ... }
  for i = 1, numel(sizes) do list[i] = i == 1 and 1 or i == 2 and 0 or self:random(2) end
  return self:make(list, sizes, mf.bool)
end

-- Different whole numbers 0 .. n - 1, the first m of them in some order.
function Values:p(n, m)
  local list = {}
  for i = 1, n do list[i] = i - 1 end
  for i = n, 2, -1 do
    local j = self:random(i) + 1
    list[i], list[j] = list[j], list[i]
  end
  for i = n, (m or n) + 1, -1 do list[i] = nil end
  return self:make(list, { m or n }, mf.int64)
end

-- The elements in row-major order, as numbers.
function Values.flat(t)
  local list = t:detach():contiguous():view(-1):tolist()
  for i, v in ipairs(list) do
    if type(v) == 'boolean' then list[i] = v and 1 or 0 end
  end
  return list
end

-- nil, or how two tensors differ. Shapes and dtypes must be equal unless `loose`; a difference is
-- measured against `scale`, the largest magnitude in want, so that sums that cancel are judged by
-- their terms.
function Values.difference(got, want, rtol, atol, loose)
  if not mf.is_tensor(got) then return ('is a %s'):format(type(got)) end
  if got.shape ~= want.shape then return ('has shape %s, not %s'):format(tostring(got.shape), tostring(want.shape)) end
  if not loose and tostring(got.dtype) ~= tostring(want.dtype) then
    return ('has dtype %s, not %s'):format(tostring(got.dtype), tostring(want.dtype))
  end
  local a, b, scale = Values.flat(got), Values.flat(want), 0
  for i = 1, #b do
    local v = math.abs(b[i])
    if v < math.huge and v > scale then scale = v end
  end
  for i = 1, #b do
    local x, y = a[i], b[i]
    local both_nan = x ~= x and y ~= y
    if not both_nan and x ~= y and not (math.abs(x - y) <= atol + rtol * scale) then
      return ('element %d is %.12g, not %.12g'):format(i - 1, x, y)
    end
  end
end

return Values
