-- The same values in other memory, other dtypes, no memory, and written in place: what must not change a result.
local mf = require 'moonflow'
local Values = require 'spec.oracle.values'
local Run = require 'spec.oracle.run'
local Gradient = require 'spec.oracle.gradient'
local Layout = {}

local function fail(op, text, ...) error(op.name .. ': ' .. text:format(...), 0) end

local function compare(op, args, got, want, rtol, atol, how, loose)
  if #got ~= #want then fail(op, '%s: %d results, not %d', how, #got, #want) end
  for k = 1, #want do
    local wrong = Values.difference(got[k], want[k], rtol, atol, loose)
    if wrong then fail(op, '%s: %s %s', how, Run.result_name(op, args, k), wrong) end
  end
end

local function compare_gradients(op, args, changed, exempt, rtol, atol, how, loose)
  local want, slots = Gradient.compute(op, args, exempt)
  local got = Gradient.compute(op, changed, exempt)
  for i, k in ipairs(slots) do
    if want[i] or got[i] then
      local some = want[i] or got[i]
      local wrong = Values.difference(got[i] or mf.zeros_like(some), want[i] or mf.zeros_like(some), rtol, atol, loose)
      if wrong then fail(op, '%s: the gradient by %s %s', how, Run.slot_name(Run.tensors(op, args)[k]), wrong) end
    end
  end
end

-- -- Memory ---------------------------------------------------------------------------------------

local function reversed(t)
  local dims = {}
  for d = t.ndim - 1, 0, -1 do dims[#dims + 1] = d end
  return #dims > 1 and t:permute(dims):contiguous():permute(dims) or t
end

-- Every other element of a wider tensor, not beginning at its first.
local function spaced(t)
  local sizes = {}
  for d = 1, t.ndim do sizes[d] = t.shape[d] end
  sizes[#sizes + 1] = 2
  local wide = mf.zeros(sizes, { dtype = t.dtype })
  wide:select(-1, 1):copy_(t)
  return wide:select(-1, 1)
end

local function channels_last(t) return t.ndim == 4 and t:clone { memory_format = 'channels_last' } or t end

-- By name, a function that gives a tensor's values in other memory.
local memories = { reversed = reversed, spaced = spaced, channels_last = channels_last }
Layout.memories = memories

-- mode: a key of `memories`. Written tensors are made anew for each run, so that they keep the layout.
function Layout.check_memory(op, make, mode)
  local f = memories[mode]
  for k = 1, #make() do
    local args = make()[k]
    local function changed() return Run.map(op, make()[k], f) end
    compare(op, args, Run.call(op, changed(), true), Run.call(op, args), 1e-12, 1e-12, mode .. ' memory')
  end
end

function Layout.check_memory_gradients(op, make, exempt)
  for k = 1, #make() do
    local args = make()[k]
    for mode, f in pairs(memories) do
      compare_gradients(op, args, Run.map(op, args, f), exempt, 1e-12, 1e-12, mode .. ' memory')
    end
  end
end

-- Inputs that repeat their first row without memory for the others, against the same rows written out.
function Layout.check_expanded(op, make)
  for k = 1, #make() do
    local function row(t, _, slot)
      if t.ndim == 0 or t.shape[1] == 0 or slot.param.mutated then return t end
      return t:narrow(0, 0, 1):expand(t.shape)
    end
    local expanded = Run.map(op, make()[k], row)
    local dense = Run.map(op, expanded, function(t) return t:clone { memory_format = 'contiguous' } end)
    compare(op, dense, Run.call(op, expanded), Run.call(op, dense), 1e-12, 1e-12, 'expanded memory')
  end
end

-- -- Dtypes ---------------------------------------------------------------------------------------

local function to_dtype(dtype)
  return function(t) return t:is_floating_point() and t:to(dtype) or t end
end

function Layout.with_dtype(op, args, dtype)
  local new = Run.map(op, args, to_dtype(dtype))
  for _, p in ipairs(op.params) do
    if p.kind == 'dtype' and args[p.name] == mf.float64 then new[p.name] = dtype end
  end
  return new
end

-- float64 against `dtype`; results are of that dtype wherever they are float64 for float64.
function Layout.check_dtype(op, make, dtype, rtol, exempt)
  for k = 1, #make() do
    local args = make()[k]
    local narrow = Layout.with_dtype(op, args, dtype)
    local want, got = Run.call(op, args), Run.call(op, narrow)
    compare(op, args, got, want, rtol, rtol, tostring(dtype), true)
    for i = 1, #want do
      local expected = tostring(want[i].dtype) == 'float64' and dtype or want[i].dtype
      local pinned = args.dtype ~= nil and #Run.tensors(op, args) > 0 -- a conversion says itself
      pinned = pinned or (exempt or {})[Run.result_name(op, args, i)] -- statistics are kept in float32
      if tostring(got[i].dtype) ~= tostring(expected) and not pinned then
        fail(op, '%s: %s is %s', tostring(dtype), Run.result_name(op, args, i), tostring(got[i].dtype))
      end
    end
    if exempt then compare_gradients(op, args, narrow, exempt, rtol * 4, rtol * 4, tostring(dtype), true) end
  end
end

-- Whole numbers: int64 against the other integer dtypes on small values. False when the op takes no whole numbers.
function Layout.check_integers(op, make)
  local taken = false
  for k = 1, #make() do
    local function small(dtype)
      local function f(t) return t:is_floating_point() and (t * 3):abs():long():to(dtype) or t end
      local args = Run.map(op, make()[k], f)
      for _, p in ipairs(op.params) do
        if p.number and type(args[p.name]) == 'number' then args[p.name] = math.ceil(args[p.name]) end
      end
      return args
    end
    local args = small(mf.int64)
    local ok, want = pcall(Run.call, op, args)
    if not ok then
      want = tostring(want)
      if not want:find(op.name, 1, true) then fail(op, 'refuses int64 with: %s', want) end
    else
      taken = true
      for _, name in ipairs { 'int32', 'int16', 'int8', 'uint8' } do
        local got, wrapped = Run.call(op, small(mf[name])), {}
        for i, t in ipairs(got) do wrapped[i] = t:is_floating_point() and want[i] or want[i]:to(t.dtype) end
        compare(op, args, got, wrapped, 1e-5, 1e-5, name, true)
      end
    end
  end
  return taken
end

-- -- In place -------------------------------------------------------------------------------------

-- NAME_ gives what NAME gives, in the same tensor, with the same gradient; or refuses where the
-- result does not fit. Returns how many calls were compared.
function Layout.check_in_place(op, make, exempt)
  local compared, first = 0, op.params[1]
  for k = 1, #make() do
    local args = make()[k]
    local x = args[first.name]
    local want = mf.is_tensor(x) and Run.call(op, args)[1]
    if want and want.shape == x.shape and tostring(want.dtype) == tostring(x.dtype) then
      for mode, f in pairs { contiguous = function(t) return t:clone() end, reversed = reversed, spaced = spaced } do
        local y
        local into = Run.map(op, make()[k], function(t, _, slot) return slot.param == first and f(t) or t end)
        local got = Run.apply(op, function(a)
          y = a[first.name]
          return op.call_(a)
        end, into, true)
        if got[1] ~= y then fail(op, 'in place: the result is another tensor') end
        compare(op, args, { y }, { want }, 1e-12, 1e-12, 'in place, ' .. mode)
      end
      local in_place = setmetatable({ call = function(a)
        local b = {}
        for name, value in pairs(a) do b[name] = value end
        b[first.name] = a[first.name]:clone()
        return op.call_(b)
      end }, { __index = op })
      local want_grads, slots = Gradient.compute(op, args, exempt)
      local got_grads = Gradient.compute(in_place, args, exempt)
      for i = 1, #slots do
        if want_grads[i] or got_grads[i] then
          local some = want_grads[i] or got_grads[i]
          local wrong = Values.difference(got_grads[i] or mf.zeros_like(some), want_grads[i] or mf.zeros_like(some),
            1e-12, 1e-12)
          if wrong then
            fail(op, 'in place: the gradient by %s %s', Run.slot_name(Run.tensors(op, args)[slots[i]]), wrong)
          end
        end
      end
      compared = compared + 1
    end
  end
  return compared
end

-- -- Shapes without data --------------------------------------------------------------------------

local function on_meta(t)
  local m = mf.empty(t.shape, { dtype = t.dtype, device = 'meta' })
  local order, sizes = {}, {}
  for d = 1, t.ndim do order[d] = d end
  table.sort(order, function(a, b)
    local p, q = t:stride(a - 1), t:stride(b - 1)
    return p > q or (p == q and a < b)
  end)
  local back = {}
  for i, d in ipairs(order) do
    sizes[i] = t.shape[d]
    back[d] = i - 1
  end
  if #sizes < 2 then return m end
  return mf.empty(sizes, { dtype = t.dtype, device = 'meta' }):permute(back)
end

local function description(t)
  return ('%s %s strides %s'):format(tostring(t.shape), tostring(t.dtype), tostring(t:stride()))
end

-- Inference alone agrees with the run: shape, dtype, strides.
function Layout.check_meta(op, make, any_memory)
  for k = 1, #make() do
    for _, f in ipairs { function(t) return t end, any_memory and reversed or nil } do
      local args = Run.map(op, make()[k], f)
      local meta = Run.map(op, args, on_meta)
      for _, p in ipairs(op.params) do
        if p.kind == 'device' then meta[p.name] = 'meta' end
      end
      if op.flags.data then
        local ok, text = pcall(Run.call, op, meta, true)
        if ok or not tostring(text):find 'data' then
          fail(op, 'on meta tensors: %s', ok and 'no error' or tostring(text))
        end
      else
        local want, got = Run.call(op, args), Run.call(op, meta, true)
        if #got ~= #want then fail(op, 'on meta tensors: %d results, not %d', #got, #want) end
        for i = 1, #want do
          if got[i].device ~= 'meta' then fail(op, 'on meta tensors: a result on %s', got[i].device) end
          if description(got[i]) ~= description(want[i]) then
            fail(op, 'on meta tensors: %s is %s, not %s', Run.result_name(op, args, i), description(got[i]),
              description(want[i]))
          end
        end
      end
    end
  end
end

-- Without elements in the batch dims: runs, gives finite numbers, and so do gradients, which have their inputs' shapes.
function Layout.check_empty(op, make, exempt)
  local function finite(t, what)
    for _, x in ipairs(Values.flat(t)) do
      if x ~= x then fail(op, 'without elements: %s holds NaN', what) end
    end
  end
  for k = 1, #make() do
    local args = make()[k]
    for i, t in ipairs(Run.call(op, args)) do finite(t, Run.result_name(op, args, i)) end
    local grads, slots, leaves = Gradient.compute(op, args, exempt)
    for i = 1, #slots do
      if grads[i] then
        finite(grads[i], 'a gradient')
        if grads[i].shape ~= leaves[i].shape then
          fail(op, 'without elements: a gradient of shape %s', tostring(grads[i].shape))
        end
      end
    end
  end
end

-- 0-d inputs of a pointwise op against 1-d ones of one element.
function Layout.check_0d(op, make)
  for k = 1, #make() do
    local function first(t) return t.ndim == 0 and t or t:contiguous():view(-1):narrow(0, 0, 1) end
    local one = Run.map(op, make()[k], first)
    local zero = Run.map(op, one, function(t) return t.ndim == 0 and t or t:select(0, 0) end)
    local want, got = Run.call(op, one)[1], Run.call(op, zero)[1]
    if got.ndim ~= 0 then fail(op, '0-d inputs give shape %s', tostring(got.shape)) end
    compare(op, one, { got:view(1) }, { want }, 1e-12, 1e-12, '0-d')
  end
end

-- The numbers of threads, on inputs large enough to be shared out.
function Layout.check_threads(op, make)
  local before = mf.get_num_threads()
  local ok, text = pcall(function()
    for k = 1, #make() do
      local args = make()[k]
      mf.set_num_threads(1)
      local want = Run.call(op, args)
      for n = 2, 3 do
        mf.set_num_threads(n)
        compare(op, args, Run.call(op, args), want, 1e-12, 1e-12, n .. ' threads')
      end
    end
  end)
  mf.set_num_threads(before)
  if not ok then error(text, 0) end
end

return Layout
