-- Conversions of dtype, device and order in memory, and comparison of tensors.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local Tensor = mf.Tensor
local none = options.none

-- x with its elements in row-major order (or another memory_format); x itself where it lies so already.
function Tensor.contiguous(x, o)
  local format = type(o) == 'table' and options('contiguous', o, { memory_format = 'contiguous' }).memory_format
    or 'contiguous'
  if format == 'preserve' or x:is_contiguous(format) then return x end
  return x:clone { memory_format = format }
end

local formats = { contiguous = true, channels_last = true, preserve = true }
local dtype_of, dtype_names = {}, {} -- by its name, and by itself
for _, name in ipairs { 'bool', 'uint8', 'int8', 'int16', 'int32', 'int64', 'float16', 'bfloat16', 'float32',
  'float64' } do
  dtype_of[name], dtype_of[mf[name]], dtype_names[name] = mf[name], mf[name], true
end

-- A table of options for to(target), where target may be a dtype, its name, or a device.
function mf._to_target(target)
  if target and dtype_of[target] then return { dtype = dtype_of[target] } end
  return type(target) == 'string' and { device = target } or target
end

-- Raises in the name of `where` unless there is such a device.
function mf._to_device(where, device)
  local ok, text = pcall(mf.empty, { 0 }, { device = device })
  if not ok then
    local near = type(device) == 'string' and options.suggest(device, dtype_names)
    fail('%s: %s%s', where, text:match 'empty: (.*)' or text, near and ("; did you mean '%s'?"):format(near) or '')
  end
end

-- A dtype, given as itself or by its name; nil stays nil.
function mf._to_dtype(where, dtype)
  if dtype == nil or dtype_of[dtype] then return dtype and dtype_of[dtype] end
  local near = type(dtype) == 'string' and options.suggest(dtype, dtype_names)
  local hint = near and ("; did you mean '%s'?"):format(near) or ''
  return fail('%s: dtype must be a dtype such as mf.float32, is %s%s', where, options.describe(dtype), hint)
end

-- A tensor on another device; to the meta device only the shape goes.
local function to_device(x, device)
  mf._to_device('to', device)
  device = mf.device(device)
  if device == x.device then return x end
  if x.device == 'meta' then
    local text = "to: a tensor on the meta device has no data to bring to '%s'; modules have to_empty"
    fail(text, device)
  end
  if device == 'meta' then return mf.empty_like(x, { device = device }) end
  return mf._transfer(x, device)
end

-- With one channel or one pixel a dense tensor lies in both formats; is it marked as channels_last
-- by its strides, which ops go by?
local function marked_last(x)
  local _, c, _, w = unpack(x.shape)
  return x:stride(1) == 1 and x:stride(2) == w * c and x:stride(3) == c
end

-- x:to(dtype), x:to(device), x:to(other tensor), x:to{dtype=, device=, memory_format=, copy=}, and
-- mixtures; x itself where nothing changes.
function Tensor.to(x, ...)
  local dtype, device, o = nil, nil, {}
  for i = 1, select('#', ...) do
    local a = select(i, ...)
    if mf.is_tensor(a) then dtype, device = a.dtype, a.device
    elseif a ~= nil and dtype_of[a] then dtype = dtype_of[a]
    elseif type(a) == 'string' then device = a
    elseif type(a) == 'table' then
      o = options('to', a, { dtype = none, device = none, memory_format = 'preserve', copy = false })
      dtype, device = mf._to_dtype('to', o.dtype) or dtype, o.device or device
    elseif a ~= nil then
      fail('to: argument %d must be a dtype, a device or a tensor, is a %s', i, type(a))
    end
  end
  if o.memory_format and not formats[o.memory_format] then
    local text = "to: memory_format must be one of contiguous, channels_last, preserve, is '%s'"
    fail(text, tostring(o.memory_format))
  end
  local y = x
  if dtype and dtype ~= y.dtype then y = mf._cast(y, dtype) end
  if device and device ~= y.device then y = to_device(y, device) end
  if o.memory_format and o.memory_format ~= 'preserve' then
    y = y:contiguous { memory_format = o.memory_format }
    if o.memory_format == 'channels_last' and not marked_last(y) then
      y = y:clone { memory_format = 'channels_last' }
    end
  end
  if o.copy and y == x then y = y:clone() end
  return y
end

for name, dtype in pairs { float = 'float32', double = 'float64', half = 'float16', bfloat16 = 'bfloat16',
  long = 'int64', int = 'int32', short = 'int16', char = 'int8', byte = 'uint8', bool = 'bool' } do
  Tensor[name] = function(x) return x.dtype == mf[dtype] and x or mf._cast(x, mf[dtype]) end
end

function Tensor.type_as(x, other) return x:to(other.dtype) end
function Tensor.cpu(x) return x:to 'cpu' end

-- |a - b| <= atol + rtol |b| everywhere; equal infinities are close, NaNs only under {equal_nan = true}.
function mf.isclose(a, b, o)
  o = options('isclose', o, { rtol = 1e-5, atol = 1e-8, equal_nan = false })
  local close = a:eq(b)
  local near = (a - b):abs():le(b:abs() * o.rtol + o.atol)
  close = mf.logical_or(close, mf.logical_and(near, mf.isfinite(b)))
  if o.equal_nan then close = mf.logical_or(close, mf.logical_and(mf.isnan(a), mf.isnan(b))) end
  return close
end

function mf.allclose(a, b, o)
  return mf.no_grad(function() return mf.isclose(a, b, o):all():item() end)
end

-- The same shape and the same elements.
function mf.equal(a, b)
  return a.shape == b.shape and mf.no_grad(function() return a:eq(b):all():item() end)
end

Tensor.isclose, Tensor.allclose, Tensor.equal = mf.isclose, mf.allclose, mf.equal
return mf
