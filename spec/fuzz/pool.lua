-- Values that no function should trip over, made anew for each use: the functions under test may change them.
local ffi = require 'ffi'
local mf = require 'moonflow'

local function self_containing()
  local t = { 1 }
  t[2] = t
  return t
end

local function self_named()
  local t = {}
  t.self = t
  return t
end

local function deep()
  local t = { 1 }
  for _ = 1, 300 do t = { t } end
  return t
end

local function freed()
  local t = mf.ones(2, 3)
  t:free()
  return t
end

local function released()
  local t
  mf.scope(function() t = mf.ones(2, 3) end)
  return t
end

local function view_of_freed()
  local t = mf.ones(2, 3)
  local v = t:t()
  t:free()
  return v
end

local function row_sparse()
  local w = mf.ones(4, 3):requires_grad_()
  mf.embedding(mf.tensor({ 0, 2 }):long(), w):sum():backward()
  return w.grad
end

local pool = {
  { 'nil', function() return nil end },
  { 'true', function() return true end },
  { 'a word', function() return 'no such thing' end },
  { 'an empty string', function() return '' end },
  { 'a long string', function() return ('x'):rep(5000) end },
  { 'a string with zeros', function() return 'mean\0sum' end },
  { 'NaN', function() return 0 / 0 end },
  { 'inf', function() return math.huge end },
  { '-inf', function() return -math.huge end },
  { '1.5', function() return 1.5 end },
  { '-1', function() return -1 end },
  { '-2', function() return -2 end },
  { '0', function() return 0 end },
  { '1', function() return 1 end },
  { '7', function() return 7 end },
  { '2^31', function() return 2 ^ 31 end },
  { '2^40', function() return 2 ^ 40 end },
  { '2^53', function() return 2 ^ 53 end },
  { '-2^53', function() return -2 ^ 53 end },
  { '2^60', function() return 2 ^ 60 end },
  { '1e308', function() return 1e308 end },
  { 'an int64', function() return ffi.new('int64_t', 3) end },
  { 'the largest int64', function() return 0x7fffffffffffffffLL end },
  { 'the smallest int64', function() return -0x7fffffffffffffffLL - 1 end },
  { 'a cdata', function() return ffi.new 'char[4]' end },
  { 'a function', function() return function() end end },
  { 'a failing function', function() return function() error 'from inside' end end },
  { 'a coroutine', function() return coroutine.create(function() end) end },
  { 'a file', function() return io.stdout end },
  { 'a dtype', function() return mf.int16 end },
  { 'a generator', function() return mf.Generator() end },
  { 'an empty table', function() return {} end },
  { 'a table of numbers', function() return { 1, 2 } end },
  { 'a table of huge numbers', function() return { 2 ^ 31, 2 ^ 31, 2 ^ 31 } end },
  { 'a table of negative numbers', function() return { -1, -5 } end },
  { 'a table of 40 ones', function()
    local t = {}
    for k = 1, 40 do t[k] = 1 end
    return t
  end },
  { 'a table of fractions', function() return { 0.5, 0 / 0 } end },
  { 'a table of words', function() return { 'a', 'b' } end },
  { 'a table with a hole', function() return { 1, nil, 3 } end },
  { 'an unknown option', function() return { no_such_option = 1 } end },
  { 'options and values', function() return { 1, 2, dim = 1 } end },
  { 'a table that contains itself', self_containing },
  { 'a table that names itself', self_named },
  { 'a deep table', deep },
  { 'a ragged table', function() return { { 1, 2 }, { 3 } } end },
  { 'a table with a metatable', function()
    return setmetatable({}, { __index = function() error 'from __index' end,
      __len = function() error 'from __len' end })
  end },
  { 'a 0-d tensor', function() return mf.tensor(1.5) end },
  { 'a tensor without elements', function() return mf.zeros(0, 3) end },
  { 'a matrix', function() return mf.ones(2, 3) end },
  { 'a vector', function() return mf.ones(7) end },
  { 'a tensor of 12 dims', function() return mf.ones(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2) end },
  { 'a tensor of 4 dims', function() return mf.ones(2, 3, 4, 4) end },
  { 'a tensor of NaN', function() return mf.full({ 2, 3 }, 0 / 0) end },
  { 'whole numbers', function() return mf.ones({ 2, 3 }, { dtype = mf.int64 }) end },
  { 'negative whole numbers', function() return mf.full({ 3 }, -5, { dtype = mf.int64 }) end },
  { 'huge whole numbers', function() return mf.full({ 3 }, 2 ^ 53, { dtype = mf.int64 }) end },
  { 'bytes', function() return mf.ones({ 2, 3 }, { dtype = mf.uint8 }) end },
  { 'booleans', function() return mf.ones({ 2, 3 }, { dtype = mf.bool }) end },
  { 'halves', function() return mf.ones({ 2, 3 }, { dtype = mf.float16 }) end },
  { 'brain floats', function() return mf.ones({ 2, 3 }, { dtype = mf.bfloat16 }) end },
  { 'doubles', function() return mf.ones({ 2, 3 }, { dtype = mf.float64 }) end },
  { 'a meta tensor', function() return mf.empty(2, 3, { device = 'meta' }) end },
  { 'a huge meta tensor', function() return mf.empty({ 2 ^ 20, 2 ^ 20 }, { device = 'meta' }) end },
  { 'a transposed tensor', function() return mf.ones(3, 2):t() end },
  { 'an expanded tensor', function() return mf.ones(1, 3):expand(2, 3) end },
  { 'a long expanded tensor', function() return mf.ones(1):expand(2 ^ 20) end },
  { 'a leaf', function() return mf.ones(2, 3):requires_grad_() end },
  { 'a result with a gradient', function() return mf.ones(2, 3):requires_grad_() * 2 end },
  { 'a freed tensor', freed },
  { 'a view of a freed tensor', view_of_freed },
  { 'a released tensor', released },
  { 'a row-sparse tensor', row_sparse },
  { 'a table of tensors', function() return { mf.ones(2, 3), mf.ones(2, 3) } end },
  { 'a table of unlike tensors', function() return { mf.ones(2, 3), mf.ones(4), 'x' } end },
  { 'a table with a freed tensor', function() return { mf.ones(2, 3), freed() } end },
}

return pool
