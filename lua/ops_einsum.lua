-- einsum: sums of products named by letters, from permute, reshape and bmm.
--
-- Operands are joined from the left, two at a time. A letter of both that nothing later needs is
-- summed by the product, one that is needed later is a batch dim. Letters of one operand alone are
-- kept, or summed first where nothing needs them. '...' stands for dims that are aligned at the
-- last and broadcast.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local Tensor = mf.Tensor

local function fail(text, ...) options.fail('einsum: ' .. text, ...) end

-- The labels of one side: letters, and for '...' as many of the labels -n .. -1 as the operand has
-- more dims than letters.
local function labels_of(text, ndim, k)
  local labels, rest = {}, nil
  local before, after = text:match '^(.-)%.%.%.(.*)$'
  local letters = (before or text) .. (after or '')
  if not letters:match '^%a*$' then fail("'%s' has other characters than letters and '...'", text) end
  local more = ndim - #letters
  if more < 0 or (more > 0 and not before) then
    fail("operand %d has %d dims, '%s' names %d", k, ndim, text, #letters)
  end
  for c in (before or text):gmatch '.' do labels[#labels + 1] = c end
  if before then
    rest = more
    for d = -more, -1 do labels[#labels + 1] = d end
    for c in after:gmatch '.' do labels[#labels + 1] = c end
  end
  return labels, rest
end

local function parse(equation)
  local text = equation:gsub('%s', '')
  local left, right = text:match '^(.-)%->(.*)$'
  local terms = {}
  for term in ((left or text) .. ','):gmatch '(.-),' do terms[#terms + 1] = term end
  return terms, right
end

-- Without '->': the dims of '...', then the letters that occur once, by alphabet.
local function implied_output(all, rest)
  local count, out = {}, {}
  for _, labels in ipairs(all) do
    for _, c in ipairs(labels) do count[c] = (count[c] or 0) + 1 end
  end
  local letters = {}
  for c, n in pairs(count) do
    if type(c) == 'string' and n == 1 then letters[#letters + 1] = c end
  end
  table.sort(letters)
  for d = -rest, -1 do out[#out + 1] = d end
  for _, c in ipairs(letters) do out[#out + 1] = c end
  return out
end

-- A letter twice in one operand: its diagonal.
local function without_repeats(x, labels)
  local k = 1
  while k <= #labels do
    for j = k + 1, #labels do
      if labels[j] == labels[k] then
        local c = labels[k]
        if x:size(j - 1) ~= x:size(k - 1) then
          fail("'%s' is %d and %d in one operand", c, x:size(k - 1), x:size(j - 1))
        end
        x = x:diagonal(0, k - 1, j - 1)
        table.remove(labels, j)
        table.remove(labels, k)
        labels[#labels + 1] = c
        k = 0
        break
      end
    end
    k = k + 1
  end
  return x, labels
end

local function index_of(labels)
  local at = {}
  for k, c in ipairs(labels) do at[c] = k end
  return at
end

-- Sums the dims whose label is not in `needed`.
local function sum_others(x, labels, needed)
  local dims, kept = {}, {}
  for k, c in ipairs(labels) do
    if needed[c] then kept[#kept + 1] = c else dims[#dims + 1] = k - 1 end
  end
  if #dims > 0 then x = x:sum(dims) end
  return x, kept
end

-- x with its dims in the order of `order`, missing ones of size 1.
local function arranged(x, at, order)
  local dims, shape, k = {}, {}, 0
  for _, c in ipairs(order) do
    if at[c] then
      dims[#dims + 1] = at[c] - 1
      k = k + 1
      shape[#shape + 1] = x:size(at[c] - 1)
    else
      shape[#shape + 1] = 1
    end
  end
  return x:permute(dims):reshape(shape), shape
end

local function concat(...)
  local out = {}
  for _, list in ipairs { ... } do
    for _, c in ipairs(list) do out[#out + 1] = c end
  end
  return out
end

local function product(sizes)
  local n = 1
  for _, s in ipairs(sizes) do n = n * s end
  return n
end

-- Two operands as one. `needed`: labels of the output and of later operands.
local function join(a, la, b, lb, needed, size)
  local ib, both = index_of(lb), {}
  for _, c in ipairs(la) do both[c] = ib[c] ~= nil end
  local keep = setmetatable({}, { __index = function(_, c) return needed[c] or both[c] end })
  a, la = sum_others(a, la, keep)
  b, lb = sum_others(b, lb, keep)
  local ia = index_of(la)
  ib = index_of(lb)
  local batch, left, right, summed = {}, {}, {}, {}
  for _, c in ipairs(la) do
    local list = not ib[c] and left or (needed[c] and batch or summed)
    list[#list + 1] = c
  end
  for _, c in ipairs(lb) do
    if not ia[c] then right[#right + 1] = c end
  end
  if #summed == 0 or a.dtype == mf.bool or a.dtype ~= b.dtype then -- a product that broadcasts
    local order = concat(batch, left, right, summed)
    local y = arranged(a, ia, order) * arranged(b, ib, order)
    return sum_others(y, order, needed)
  end
  local function sizes(list)
    local s = {}
    for k, c in ipairs(list) do s[k] = size[c] end
    return s
  end
  local function matrix(x, at, first, second)
    local order = concat(batch, first, second)
    x = arranged(x, at, order):expand(sizes(order))
    return x:reshape(product(sizes(batch)), product(sizes(first)), product(sizes(second)))
  end
  local y = mf.bmm(matrix(a, ia, left, summed), matrix(b, ib, summed, right))
  local order = concat(batch, left, right)
  return y:reshape(sizes(order)), order
end

local function run(equation, xs)
  local terms, right = parse(equation)
  if #terms ~= #xs then fail("'%s' names %d operands, %d are given", equation, #terms, #xs) end
  local all, written, rest, size = {}, {}, 0, {}
  xs = { unpack(xs) }
  for k, term in ipairs(terms) do
    local labels, more = labels_of(term, xs[k]:dim(), k)
    rest = math.max(rest, more or 0)
    written[k] = { unpack(labels) }
    xs[k], all[k] = without_repeats(xs[k], labels)
    for d, c in ipairs(all[k]) do
      local s, was = xs[k]:size(d - 1), size[c]
      if was and was ~= 1 and s ~= 1 and s ~= was then fail("'%s' is %d in operand %d and %d before", c, s, k, was) end
      if not was or was == 1 then size[c] = s end
    end
  end
  local output
  if right then
    local has_rest = right:find('...', 1, true)
    output = labels_of(right, #right - (has_rest and 3 or 0) + (has_rest and rest or 0), #xs + 1)
    local seen = {}
    for _, c in ipairs(output) do
      if seen[c] then fail("'%s' stands twice in the output", c) end
      if not size[c] then fail("'%s' of the output is in no operand", c) end
      seen[c] = true
    end
  else
    output = implied_output(written, rest)
  end
  local needed = {}
  local function need(labels, by)
    for _, c in ipairs(labels) do needed[c] = (needed[c] or 0) + by end
  end
  need(output, 1)
  for k = 2, #xs do need(all[k], 1) end
  local is_needed = setmetatable({}, { __index = function(_, c) return (needed[c] or 0) > 0 end })
  local y, labels = sum_others(xs[1], all[1], is_needed)
  for k = 2, #xs do
    need(all[k], -1)
    y, labels = join(y, labels, xs[k], all[k], is_needed, size)
  end
  y, labels = sum_others(y, labels, index_of(output))
  return (arranged(y, index_of(labels), output))
end

-- mf.einsum('bij,bkj->ik', a, b): operands as arguments or as one table.
function mf.einsum(equation, ...)
  if type(equation) ~= 'string' then
    fail("the first argument must be an equation such as 'ij,jk->ik'")
  end
  local xs = { ... }
  if #xs == 1 and type(xs[1]) == 'table' then xs = xs[1] end
  for k, x in ipairs(xs) do
    if not mf.is_tensor(x) then fail('operand %d must be a tensor, is a %s', k, type(x)) end
  end
  return run(equation, xs)
end

return Tensor
