-- The pass fuse_pointwise: which ops become one, and that what a compiled step then makes equals,
-- bit for bit, what the ops make one after another.
local mf = require 'moonflow'

local function fuse(text) return (mf._graph_pass(text, 'fuse_pointwise')) end

describe('fuse_pointwise', function()
  it('makes one op of a chain, with the results that others read', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 3]
%1 = input y: float32[3]
%2 = number 2: int64
%3, %4 = fused([%0, %1, %2], body={t0 = mul(x0, x1): float32; t1 = add(t0, x2, alpha=3): float32; ]] .. [[
t2 = relu(t1): float32; t3 = sub(t2, t0): float32; t1, t3}): float32[2, 3], float32[2, 3]
%5 = sum(%3, dim=[0, 1]): float32[]
return %5, %4
]], fuse [[
graph step
%0 = input x: float32[2, 3]
%1 = input y: float32[3]
%2 = number 2: int64
%3 = mul(%0, %1): float32[2, 3]
%4 = add(%3, %2, alpha=3): float32[2, 3]
%5 = sum(%4, dim=[0, 1]): float32[]
%6 = relu(%4): float32[2, 3]
%7 = sub(%6, %3): float32[2, 3]
return %5, %7
]])
  end)

  it('joins what comes from several sides', function()
    assert.equal([[
graph step
%0 = input x: float32[4]
%1 = capture c: int32[4]
%2 = fused([%0, %1], body={t0 = exp(x0): float32; t1 = gt(x1, x0): bool; t2 = neg(x1): int32; ]] .. [[
t3 = where(t1, t0, t2): float32; t3}): float32[4]
write %1 = %1
return %2
]], fuse [[
graph step
%0 = input x: float32[4]
%1 = capture c: int32[4]
%2 = exp(%0): float32[4]
%3 = gt(%1, %0): bool[4]
%4 = neg(%1): int32[4]
%5 = where(%3, %2, %4): float32[4]
write %1 = %1
return %5
]])
  end)

  it('joins ops that read the same tensor', function()
    assert.equal([[
graph step
%0 = input x: float32[4]
%1 = input y: float32[4]
%2, %3, %4 = fused([%0, %1], body={t0 = mul(x0, x1): float32; t1 = exp(x0): float32; ]] .. [[
t2 = neg(t1): float32; t3 = relu(x1): float32; t0, t2, t3}): float32[4], float32[4], float32[4]
%5 = cumsum(%2, dim=0): float32[4]
%6 = cumsum(%3, dim=0): float32[4]
return %5, %6, %4
]], fuse [[
graph step
%0 = input x: float32[4]
%1 = input y: float32[4]
%2 = mul(%0, %1): float32[4]
%3 = cumsum(%2, dim=0): float32[4]
%4 = exp(%0): float32[4]
%5 = neg(%4): float32[4]
%6 = relu(%1): float32[4]
%7 = cumsum(%5, dim=0): float32[4]
return %3, %7, %6
]])
  end)

  it('makes no cycles among those that read the same', function()
    assert.equal([[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4]
%2 = cumsum(%1, dim=0): float32[4]
%3, %4 = fused([%0, %2], body={t0 = mul(x0, x1): float32; t1 = neg(x0): float32; t0, t1}): float32[4], float32[4]
return %3, %4
]], fuse [[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4]
%2 = cumsum(%1, dim=0): float32[4]
%3 = mul(%0, %2): float32[4]
%4 = neg(%0): float32[4]
return %3, %4
]])
  end)

  it('makes no cycles: what depends on a sum stands behind it', function()
    assert.equal([[
graph step
%0 = input x: float32[4]
%1, %2 = fused([%0], body={t0 = exp(x0): float32; t1 = abs(t0): float32; t0, t1}): float32[4], float32[4]
%3 = sum(%1, dim=[0]): float32[]
%4 = fused([%1, %3, %2], body={t0 = div(x0, x1): float32; t1 = mul(t0, x2): float32; t1}): float32[4]
return %4
]], fuse [[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4]
%2 = sum(%1, dim=[0]): float32[]
%3 = div(%1, %2): float32[4]
%4 = abs(%1): float32[4]
%5 = mul(%3, %4): float32[4]
return %5
]])
  end)

  local function far_apart(n)
    local lines = { '%1 = exp(%0): float32[2]' }
    for k = 2, n do lines[k] = ('%%%d = cumsum(%%%d, dim=0): float32[2]'):format(k, k == 2 and 0 or k - 1) end
    lines[n + 1] = ('%%%d = add(%%1, %%0): float32[2]'):format(n + 1)
    lines[n + 2] = ('return %%%d, %%%d\n'):format(n + 1, n)
    return table.concat(lines, '\n')
  end

  for what, text in pairs {
    ['ops of other shapes'] = [[
%1 = input y: float32[3, 2]
%2 = exp(%0): float32[2]
%3 = mul(%1, %2): float32[3, 2]
return %3
]],
    ['ops with other kinds between'] = [[
%1 = exp(%0): float32[2]
%2 = cumsum(%1, dim=0): float32[2]
%3 = exp(%2): float32[2]
return %3
]],
    ['arguments that change between calls'] = [[
%1 = clamp(%0, max=@0(1)): float32[2]
%2 = clamp(%1, max=@0(1)): float32[2]
return %2
]],
    ['a single op'] = '%1 = exp(%0): float32[2]\nreturn %1, %1\n',
    ['ops that are far apart'] = far_apart(70),
  } do
    it('leaves alone: ' .. what, function()
      text = 'graph step cells 1\n%0 = input x: float32[2]\n' .. text
      assert.equal(text, fuse(text))
    end)
  end

  it('has a switch', function()
    local function f(x) return (x * 2 + 1):exp() end
    local x = mf.randn(3)
    local with, without = mf.compile(f), mf.compile(f, { passes = { fuse_pointwise = false } })
    assert(mf.equal(with(x), without(x)))
    assert(tostring(with):find 'fused' and not tostring(without):find 'fused')
  end)

  it('takes time in proportion to the graph', function()
    local function graph(n)
      local lines = { 'graph step', '%0 = input x: float32[2]', '%1 = input y: float32[2]' }
      for k = 2, n do
        lines[#lines + 1] = ('%%%d = add(%%%d, %%%d): float32[2]'):format(k, k - 1, math.floor(k / 2))
      end
      lines[#lines + 1] = 'return %' .. n
      return table.concat(lines, '\n') .. '\n'
    end
    local function time(n)
      local text, least = graph(n), math.huge
      for _ = 1, 3 do
        local t = os.clock()
        fuse(text)
        least = math.min(least, os.clock() - t)
      end
      return least
    end
    time(1000)
    assert(time(16000) < 40 * time(1000)) -- 16 if linear, 256 if quadratic
  end)
end)

-- Every bit, NaN included, and the same dtype and strides.
local function same(a, b, what)
  assert.equal(tostring(a.dtype), tostring(b.dtype), what)
  assert.same(a:stride(), b:stride(), what)
  assert(mf.allclose(a, b, { rtol = 0, atol = 0, equal_nan = true }), what)
  if a:is_floating_point() then -- the signs of zeros
    local x, y = a:double():reciprocal(), b:double():reciprocal()
    assert(mf.allclose(x, y, { rtol = 0, atol = 0, equal_nan = true }), what)
  end
end

local function check(f, what, ...)
  local want = { f(...) }
  local step = mf.compile(f)
  for _ = 1, 2 do
    local got = { step(...) }
    assert.equal(#want, #got)
    for k = 1, #want do same(want[k], got[k], ('%s, result %d'):format(what, k)) end
  end
end

local special = { 0, -0.0, 1, -1, 0 / 0, 1 / 0, -1 / 0, 1e-40, 3e38, 0.5, -2.5, 7, 65504, 1e-5 }

-- A tensor of n elements with some special ones among them.
local function values(dtype, ...)
  local x = mf.randn(...) * 3
  local n = x:numel()
  if n > 20 then
    local flat = x:reshape(n)
    for k, v in ipairs(special) do flat[(k * 7) % n] = v end
    x = flat:reshape(...)
  end
  if dtype == mf.bool then return x:gt(0) end
  if not (dtype == mf.float32 or dtype == mf.float64 or dtype == mf.float16 or dtype == mf.bfloat16) then
    x = mf.where(x:isfinite(), x, 0):clamp(-100, 100)
    if dtype == mf.uint8 then x = x:abs() end
  end
  return x:to(dtype)
end

local floats = { mf.float32, mf.float64, mf.float16, mf.bfloat16 }
local all = { mf.float32, mf.float64, mf.float16, mf.bfloat16, mf.int64, mf.int32, mf.int16, mf.int8, mf.uint8,
  mf.bool }

describe('fused pointwise ops', function()
  it('of every dtype', function()
    for _, dtype in ipairs(all) do
      local x, y = values(dtype, 3, 700), values(dtype, 3, 700)
      check(function(a, b)
        local c = a * b
        local d = (c + a):gt(b)
        return c:abs():square() + 2, mf.where(d, c, b), (c / 3 + 0.25):exp(), d:logical_not()
      end, tostring(dtype), x, y)
    end
  end)

  it('that convert on the way', function()
    for _, p in ipairs(all) do
      for _, q in ipairs(all) do
        check(function(a, b) return ((a + b) * 2):gt(a * 1.5), (a * b):square() + b end,
          tostring(p) .. ' ' .. tostring(q), values(p, 531), values(q, 531))
      end
    end
  end)

  it('with conversions among them', function()
    for _, p in ipairs(all) do
      for _, q in ipairs(all) do
        check(function(a)
          local b = a:to(q)
          return b:to(mf.float32) * 2, (b + 1):to(p), (a * 2):to(q):eq(b)
        end, tostring(p) .. ' ' .. tostring(q), values(p, 531))
      end
    end
  end)

  it('of any number of elements', function()
    for _, n in ipairs { 0, 1, 2, 15, 16, 17, 31, 511, 512, 513, 2047, 2048, 2049, 65536 + 5, 300001 } do
      check(function(a, b) return (a * b + a):tanh() - b:relu() end, n .. ' elements', values(mf.float32, n),
        values(mf.float32, n))
    end
  end)

  it('of one element', function()
    check(function(a, b) return (a * b + 1):exp(), (a - b):abs() ^ 3 end, '0-d', mf.tensor(0.3), mf.tensor(-2.5))
    check(function(a, b) return (a * b + 1):exp(), (a - b):abs() ^ 3 end, '(1, 1)', mf.randn(1, 1), mf.randn(1, 1))
    check(function(a, b) return ((a * 2) ^ (b + 1)) * 3 end, 'an exponent that is made', mf.tensor(1.5), mf.tensor(1))
  end)

  it('with broadcast inputs', function()
    for _, dtype in ipairs(floats) do
      check(function(x, row, column, one)
        local y = (x + row) * column
        return y:relu() - one, y * row
      end, tostring(dtype), values(dtype, 5, 130), values(dtype, 130), values(dtype, 5, 1), values(dtype, 1))
      check(function(x, c) return (x * c + x):sigmoid() end, 'channels', values(dtype, 2, 3, 33, 5),
        values(dtype, 3, 1, 1))
    end
  end)

  it('with inputs in other memory', function()
    local x = values(mf.float32, 40, 70)
    check(function(a, b) return (a * b + 1):exp() - a end, 'both transposed', x:t(), values(mf.float32, 40, 70):t())
    check(function(a, b) return (a * b + 1):exp() - a end, 'one transposed', x:t(), values(mf.float32, 70, 40))
    check(function(a, b) return (a * b + 1):exp() - a end, 'sliced', x[{ {}, { 3, 60 } }], values(mf.float32, 40, 57))
    check(function(a, b) return (a * b + 1):exp() - a end, 'expanded', x[0]:expand(40, 70), x)
    check(function(a, b) return (a * b + 1):exp() - a end, 'one element expanded',
      x[{ { 1, 2 }, { 5, 6 } }]:expand(40, 70), x)
    local image = values(mf.float32, 2, 3, 8, 9):contiguous { memory_format = 'channels_last' }
    check(function(a, b) return (a * b + 1):exp() - a, a + b end, 'channels_last', image,
      values(mf.float32, 2, 3, 8, 9))
  end)

  it('whose kernel depends on arguments', function()
    local x = values(mf.float32, 777)
    check(function(a)
      local b = a * 1.5
      return b ^ 2, b ^ 3, b:abs() ^ 0.5, b ^ -1, b ^ 1.7, mf.gelu(b), mf.gelu(b, { approximate = 'tanh' })
    end, 'pow and gelu', x)
    check(function(a)
      local b = a:gt(0)
      return b:bitwise_not():logical_and(b), a:int():bitwise_not() * 2
    end, 'bitwise_not', x)
    check(function(a)
      return mf.add(a * 2, a, { alpha = 0.3 }):clamp(-1, 2), mf.sub(a, a * 3, { alpha = 3 })
    end, 'alpha', x)
  end)

  it('in runs that stay in registers', function()
    local function f(x, y, c)
      local a = ((x + y) * 1.5 - c):relu() -- numbers, and a 0-d tensor, are single elements
      local b = (y - (x * y):abs():neg()) / 3
      local d = (c / (y / (b:square() - x))):maximum(y)
      local e = (2 - mf.minimum(d * d, x) + d) * y -- d is wanted later
      return a, b, d, (e - a) / b, mf._relu_backward(x + y, y) - 1, mf._relu_backward(y, x + y)
    end
    for _, n in ipairs { 1, 15, 16, 48, 64, 113, 128, 144, 1000, 4096 + 32 } do
      check(f, n .. ' elements', values(mf.float32, n), values(mf.float32, n), mf.tensor(0.7))
    end
    local x, y = mf.randn(300), mf.randn(300)
    for k, v in ipairs(special) do -- each with each
      for l, w in ipairs(special) do
        x[k * #special + l], y[k * #special + l] = v, w
      end
    end
    check(f, 'special values', x, y, mf.tensor(0.7))
    check(function(p, q)
      return p:relu():neg(), p:neg():relu(), p:neg():abs(), mf.maximum(p, q):neg(), mf.minimum(p, q):neg(),
        p:square():neg(), mf._relu_backward(p, q):neg(), (p - q):neg(), (p + q):neg(), (p * q):neg(), (p / q):neg(),
        (p:neg() - q), (q - p:neg()), (q / p:neg()), (1 / p:neg())
    end, 'pairs', x, y)
    check(f, 'broadcast', x:reshape(3, 100), y:reshape(3, 100)[1], mf.tensor(-1))
  end)

  it('that are read in between', function()
    check(function(x, w)
      local a = x * 2 + 1
      local s = (a:exp() * 0.01):sum(1, true) -- the rest depends on it
      local b = a / s
      local c = (b - a):matmul(w):tanh() + b
      return a, c:sum(), (a + 1) * s
    end, 'sums', mf.randn(6, 6), mf.randn(6, 6))
  end)

  it('that are many', function()
    check(function(x, y)
      local list = {}
      for k = 1, 300 do
        x = (x * 0.999 + y * (k % 7)):sin()
        if k % 10 == 0 then list[#list + 1] = x end
      end
      return unpack(list)
    end, '1200 ops', mf.randn(500), mf.randn(500))
  end)

  it('with many inputs', function()
    local inputs = {}
    for k = 1, 30 do inputs[k] = mf.randn(100) end
    check(function(...)
      local sum = 0
      for k = 1, 90 do sum = sum + (select((k - 1) % 30 + 1, ...)) * k end
      return sum:exp()
    end, '30 inputs', unpack(inputs))
  end)

  it('in the memory of inputs that die', function()
    local function f(a, b)
      local c, d, e = a:cumsum(0), b:cumsum(0), (a - b):cumsum(0)
      local first = (c * 2 + d) * d -- c is read later
      local second = (c - d):relu() + first
      return first:cumsum(0), second:cumsum(0), (e * e):exp():cumsum(0), (e * 2 - 1):cumsum(0)
    end
    for _, n in ipairs { 1, 15, 17, 500, 4096 + 7, 70001 } do
      for _, dtype in ipairs { mf.float32, mf.bfloat16, mf.float64 } do
        check(f, n .. ' elements of ' .. tostring(dtype), (mf.randn(n) / n):to(dtype), (mf.randn(n) / n):to(dtype))
      end
    end
    check(f, 'transposed', mf.randn(30, 40):t(), mf.randn(30, 40):t())
  end)

  it('have outputs where inputs were', function()
    local i, file = 0, os.tmpname()
    while arg[i - 1] do i = i - 1 end
    local out = assert(io.open(file, 'w'))
    out:write [[
local mf = require 'moonflow'
local f = mf.compile(function(a, b)
  local c, d = a:cumsum(0), b:cumsum(0)
  return ((c * 2 + d) * d):cumsum(0), (c - d):cumsum(0)
end)
f(mf.randn(1000), mf.randn(1000))
]]
    out:close()
    local pipe = io.popen(('MF_DUMP=plan %s %s 2>&1'):format(arg[i], file))
    local text = pipe:read '*a'
    pipe:close()
    os.remove(file)
    local y, z, c, d = text:match 'step t(%d+), t(%d+) = fused%(t(%d+), t%d+, t(%d+);'
    local function register(t) return text:match('\nt' .. t .. ' (r%d+) ') end
    assert.equal(register(c), register(y))
    assert.equal(register(d), register(z))
    assert.not_equal(register(c), register(d))
  end)

  it('that write into a tensor', function()
    local a = mf.randn(1000)
    local b = a:clone()
    local x = mf.randn(1000)
    local function update(p)
      return function(g)
        local old = p * 2
        p:mul_(0.9):add_(g * 0.5)
        p:sub_((p * old):tanh())
        return p + old
      end
    end
    local plain, step = update(a), mf.compile(update(b))
    for _ = 1, 4 do
      local want, got = plain(x), step(x)
      same(want, got, 'the result')
      same(a, b, 'the tensor')
    end
  end)

  it('of random programs', function()
    local unary = { 'neg', 'abs', 'relu', 'square', 'sigmoid', 'tanh', 'exp', 'sin', 'sign', 'floor', 'silu', 'round' }
    local binary = { 'add', 'sub', 'mul', 'div', 'maximum', 'minimum' }
    local compare = { 'gt', 'le', 'eq' }
    for seed = 1, 40 do
      math.randomseed(seed)
      local plan = {}
      for k = 1, 25 do plan[k] = { math.random(), math.random(1000), math.random(1000), math.random(1000) } end
      local dtypes = {}
      for k = 1, 4 do dtypes[k] = all[math.random(#all)] end
      local shapes = { { 7, 11 }, { 11 }, { 7, 1 }, { 7, 11 } }
      local inputs = {}
      for k = 1, 4 do inputs[k] = values(dtypes[k], unpack(shapes[k])) end
      check(function(...)
        local live = { ... }
        local results = {}
        for _, p in ipairs(plan) do
          local a, b = live[p[2] % #live + 1], live[p[3] % #live + 1]
          local y
          if p[1] < 0.3 then y = mf[unary[p[4] % #unary + 1]](a:float())
          elseif p[1] < 0.4 then y = mf[compare[p[4] % #compare + 1]](a, b)
          elseif p[1] < 0.5 then y = mf.where(a:gt(0), b, a)
          elseif p[1] < 0.6 then y = a * (p[4] / 500)
          elseif p[1] < 0.65 then y = a:sum(-1, true)
          else y = mf[binary[p[4] % #binary + 1]](a, b) end
          live[#live + 1] = y
          if p[4] % 4 == 0 then results[#results + 1] = y end
        end
        results[#results + 1] = live[#live]
        return unpack(results)
      end, 'seed ' .. seed, unpack(inputs))
    end
  end)
end)
