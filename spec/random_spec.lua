-- Random numbers: the generator's known answers, the same bits for any number of threads and
-- instruction set, moments and frequencies of every distribution, seeds and states.
-- A statistic may be off by five standard deviations; seeds are fixed, so it passes always or never.
local mf = require 'moonflow'
local bit = require 'bit'

before_each(function() mf.manual_seed(7) end)

local function fails(text, f, ...)
  local ok, err = pcall(f, ...)
  assert.is_false(ok)
  assert(tostring(err):find(text, 1, true), err)
end

-- -- Philox4x32-10 --------------------------------------------------------------------------------

-- High and low word of a product of two 32-bit words.
local function product(a, b)
  local a0, a1 = a % 65536, math.floor(a / 65536)
  local low = a0 * b
  local high = a1 * b + math.floor(low / 65536)
  return math.floor(high / 65536), (high % 65536) * 65536 + low % 65536
end
local function xor(a, b, c) return bit.bxor(a, b, c) % 2 ^ 32 end

-- Salmon and others, 2011; counter and key are lists of words.
local function philox(counter, key)
  local c0, c1, c2, c3 = unpack(counter)
  local k0, k1 = unpack(key)
  for _ = 1, 10 do
    local h0, l0 = product(0xD2511F53, c0)
    local h1, l1 = product(0xCD9E8D57, c2)
    c0, c1, c2, c3 = xor(h1, c1, k0), l1, xor(h0, c3, k1), l0
    k0, k1 = (k0 + 0x9E3779B9) % 2 ^ 32, (k1 + 0xBB67AE85) % 2 ^ 32
  end
  return { c0, c1, c2, c3 }
end

-- Word `w` of block `block` of a stream under a seed.
local function word(seed, stream, block, w)
  local function split(n) return n % 2 ^ 32, math.floor(n / 2 ^ 32) end
  local b0, b1 = split(block)
  local s0, s1 = split(stream)
  return philox({ b0, b1, s0, s1 }, { split(seed) })[w + 1]
end

local function generator(seed, stream)
  return mf.Generator():set_state(mf.tensor({ seed, stream }, { dtype = mf.int64 }))
end

describe('Philox', function()
  it("gives Random123's known answers", function()
    local f = 0xffffffff
    assert.same({ 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8 }, philox({ 0, 0, 0, 0 }, { 0, 0 }))
    assert.same({ 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd }, philox({ f, f, f, f }, { f, f }))
    assert.same({ 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1 },
      philox({ 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344 }, { 0xa4093822, 0x299f31d0 }))
  end)

  -- Element 64 g + 16 w + l is word w of block 16 g + l.
  it('is what float32 numbers are made of', function()
    for _, case in ipairs { { 0, 0 }, { 1, 0 }, { 2 ^ 40 + 3, 5 }, { 12345, 2 ^ 33 + 1 } } do
      local x = mf.rand(200, { generator = generator(case[1], case[2]) })
      for _, i in ipairs { 0, 1, 15, 16, 33, 63, 64, 100, 191, 199 } do
        local g, w, l = math.floor(i / 64), math.floor(i / 16) % 4, i % 16
        local want = math.floor(word(case[1], case[2], 16 * g + l, w) / 256) / 2 ^ 24
        assert.equal(want, x[i]:item())
      end
    end
  end)

  -- Element 32 g + 16 h + l is made of words 2 h and 2 h + 1 of block 16 g + l.
  it('is what float64 numbers are made of', function()
    local x = mf.rand(100, { generator = generator(9, 4), dtype = mf.float64 })
    for _, i in ipairs { 0, 1, 16, 31, 32, 63, 99 } do
      local g, h, l = math.floor(i / 32), math.floor(i / 16) % 2, i % 16
      local low, high = word(9, 4, 16 * g + l, 2 * h), word(9, 4, 16 * g + l, 2 * h + 1)
      local want = (high * 2 ^ 21 + math.floor(low / 2 ^ 11)) / 2 ^ 53
      assert.equal(want, x[i]:item())
    end
  end)

  -- Box and Muller: sqrt(-2 log u0) cos(2 pi u1) and sin, side by side in words 0, 1 and 2, 3.
  it('is what normal numbers are made of', function()
    local x = mf.randn(64, { generator = generator(3, 8) })
    for l = 0, 15 do
      local w = {}
      for k = 0, 3 do w[k] = word(3, 8, l, k) end
      for k = 0, 2, 2 do
        local r, angle = math.sqrt(-2 * math.log(bit.bor(w[k], 1) % 2 ^ 32 / 2 ^ 32)), 2 * math.pi * w[k + 1] / 2 ^ 32
        assert.near(r * math.cos(angle), x[16 * k + l]:item(), 1e-5)
        assert.near(r * math.sin(angle), x[16 * (k + 1) + l]:item(), 1e-5)
      end
    end
  end)
end)

-- -- The same bits everywhere ---------------------------------------------------------------------

local draws = [[
  local mf = require 'moonflow'
  mf.set_num_threads(THREADS)
  mf.manual_seed(99)
  local n = 100003
  local list = { mf.rand(n), mf.rand(n, { dtype = mf.float64 }), mf.randn(n), mf.randn(n, { dtype = mf.float64 }),
    mf.randint(-5, 1000003, { n }), mf.rand(n, { dtype = mf.bfloat16 }):float(),
    mf.randn(n, { dtype = mf.float16 }):float(),
    mf.randperm(n), mf.bernoulli(mf.full({ n }, 0.3)), mf.empty(n):uniform_(-3, 5), mf.empty(n):normal_(2, 3),
    mf.empty(n):bernoulli_(0.9), mf.dropout(mf.ones(n), 0.4), mf.multinomial(mf.rand(1000), 500),
    mf.multinomial(mf.rand(7, 50), 90, { replacement = true }),
    mf.normal(mf.arange(n):float(), 0.5), mf.empty(n):random_(0, 77) }
  local marks = mf.randint(1, 1000003, { n }, { generator = mf.Generator():manual_seed(1) })
  for i, x in ipairs(list) do -- a sum of whole numbers, in which every bit of every element counts
    local bits = x:double():flatten()
    local whole = (bits * 2 ^ 24):floor()
    local rest = ((bits * 2 ^ 24 - whole) * 2 ^ 29):floor()
    local m = marks[{ { 0, bits:numel() } }]
    local function mark(t) return (t:long():remainder(1000003) * m):sum():remainder(2 ^ 40):item() end
    print(i, ('%.0f %.0f'):format(mark(whole), mark(rest)))
  end
]]

describe('random numbers', function()
  it('are the same for any number of threads and instruction set', function()
    local i = 0
    while arg[i - 1] do i = i - 1 end
    local program, path, first = arg[i], os.tmpname(), nil
    finally(function() os.remove(path) end)
    for _, isa in ipairs { 'v2', 'v3', 'v4', '' } do
      for _, threads in ipairs { 1, 2, 5 } do
        local f = io.open(path, 'w')
        f:write((draws:gsub('THREADS', threads)))
        f:close()
        local p = io.popen(("MF_ISA='%s' '%s' %s"):format(isa, program, path))
        local out = p:read '*a'
        p:close()
        assert.equal(17, select(2, out:gsub('\n', '\n')), out)
        first = first or out
        assert.equal(first, out)
      end
    end
  end)

  it('of a view or a transposed tensor go by index, not by memory', function()
    local a = mf.empty(5, 7):uniform_(0, 1, { generator = generator(1, 1) })
    local b = mf.empty(7, 5):t():uniform_(0, 1, { generator = generator(1, 1) })
    local c = mf.zeros(5, 14)[{ {}, { 0, 14, 2 } }]:uniform_(0, 1, { generator = generator(1, 1) })
    assert.is_true(mf.equal(a, b))
    assert.is_true(mf.equal(a, c))
  end)

  it('of one call do not depend on the size of the call before', function()
    mf.manual_seed(3)
    mf.rand(10)
    local a = mf.rand(5)
    mf.manual_seed(3)
    mf.rand(100000)
    assert.is_true(mf.equal(a, mf.rand(5)))
  end)
end)

-- -- Distributions --------------------------------------------------------------------------------

-- The mean of x is `mean` and its variance `variance`, n elements, fourth central moment m4.
local function moments(x, mean, variance, m4)
  x = x:double():flatten()
  local n, m = x:numel(), x:mean():item()
  assert.near(mean, m, 5 * math.sqrt(variance / n))
  local second = (x - mean):square():mean():item()
  assert.near(variance, second, 5 * math.sqrt((m4 - variance ^ 2) / n) + 1e-9)
end

-- Counts of the values 0 .. k-1 in x against probabilities (all equal without): the chi-square
-- statistic has mean k - 1 and variance 2 (k - 1).
local function frequencies(x, k, p)
  local n, chi = x:numel(), 0
  for v = 0, k - 1 do
    local count, want = x:eq(v):sum():item(), n * (p and p[v + 1] or 1 / k)
    if want == 0 then assert.equal(0, count) else chi = chi + (count - want) ^ 2 / want end
  end
  assert.near(k - 1, chi, 5 * math.sqrt(2 * (k - 1)) + 3)
end

local N = 200000

describe('distributions:', function()
  for _, dtype in ipairs { 'float32', 'float64', 'float16', 'bfloat16' } do
    it('rand of ' .. dtype, function()
      local x = mf.rand(N, { dtype = mf[dtype] })
      assert.equal(mf[dtype], x.dtype)
      local slack = dtype == 'bfloat16' and 1 / 512 or 0 -- the grid of bfloat16: numbers are rounded down
      assert(x:min():item() >= 0 and x:max():item() < 1)
      moments(x:double() + slack, 0.5, 1 / 12, 1 / 80)
      frequencies((x:double() * 16):floor(), 16)
    end)
    it('randn of ' .. dtype, function()
      local x = mf.randn(N, { dtype = mf[dtype] })
      moments(x, 0, 1, 3)
      x = x:double()
      assert.near(0, x:pow(3):mean():item(), 5 * math.sqrt(15 / N))
      assert.near(3, x:pow(4):mean():item(), 5 * math.sqrt(96 / N))
      for z, p in pairs { [1] = 0.317310508, [2] = 0.0455002639, [3] = 0.00269979606, [4] = 6.33424837e-5 } do
        assert.near(p, x:abs():gt(z):double():mean():item(), 5 * math.sqrt(p / N) + (dtype:find '16' and 2e-3 or 0))
      end
    end)
  end

  it('neighbours do not depend on each other', function()
    for _, x in ipairs { mf.randn(N), mf.rand(N) * 12 ^ 0.5 - 3 ^ 0.5 } do
      for _, lag in ipairs { 1, 2, 16, 64 } do
        local r = (x[{ { lag, N } }] * x[{ { 0, N - lag } }]):mean():item()
        assert.near(0, r, 5 / math.sqrt(N))
      end
    end
  end)

  it('randint', function()
    frequencies(mf.randint(0, 10, { N }), 10)
    frequencies(mf.randint(7, { N }), 7)
    frequencies(mf.randint(-3, 4, { N }) + 3, 7)
    local x = mf.randint(-5, 3 * 2 ^ 50, { N }):double() / (3 * 2 ^ 50)
    moments(x, 0.5, 1 / 12, 1 / 80)
    assert.equal(mf.int64, mf.randint(3, { 1 }).dtype)
    assert.equal(mf.int32, mf.randint(0, 3, { 1 }, { dtype = mf.int32 }).dtype)
    assert.same({ 4, 4 }, mf.randint(4, 5, { 2 }):tolist())
    fails('randint', mf.randint, 5, 5, { 1 })
    fails('randint', mf.randint, 0, 300, { 1 }, { dtype = mf.uint8 })
  end)

  it('random_', function()
    frequencies(mf.empty(N, { dtype = mf.int64 }):random_(2, 9) - 2, 7)
    frequencies(mf.empty(N, { dtype = mf.uint8 }):random_():long(), 256)
    frequencies(mf.empty(N, { dtype = mf.bool }):random_():long(), 2)
  end)

  it('uniform_ and normal_', function()
    local x = mf.empty(N):uniform_(-2, 6)
    assert(x:min():item() >= -2 and x:max():item() < 6)
    moments(x, 2, 64 / 12, 4096 / 80)
    moments(mf.empty(N):normal_(3, 0.5), 3, 0.25, 3 / 16)
    fails('normal_: std', mf.empty(3).normal_, mf.empty(3), 0, -1)
    fails('uniform_', mf.empty(3).uniform_, mf.empty(3), 2, 1)
  end)

  it('normal of tensors', function()
    local mean, std = mf.arange(4):float(), mf.tensor { 1, 2, 3, 0 }
    local x = mf.normal(mean:expand(N / 10, 4), std)
    for i = 0, 2 do moments(x[{ {}, i }], i, (i + 1) ^ 2, 3 * (i + 1) ^ 4) end
    assert.equal(3, x[{ {}, 3 }]:max():item())
    assert.equal(3, x[{ {}, 3 }]:min():item())
    moments(mf.normal(5, 2, { N }), 5, 4, 48)
    fails('normal', mf.normal, 0, -1, { 3 })
  end)

  it('bernoulli', function()
    local p = mf.tensor { 0, 0.25, 0.5, 1 }
    local x = mf.bernoulli(p:expand(N / 4, 4)):double():mean(0):tolist()
    for i, want in ipairs { 0, 0.25, 0.5, 1 } do
      assert.near(want, x[i], 5 * math.sqrt(want * (1 - want) * 4 / N))
    end
    moments(mf.empty(N):bernoulli_(0.125), 0.125, 0.109375, 0.109375 * (1 - 3 * 0.109375) + 2 * 0.109375 ^ 2)
    assert.equal(1, mf.empty(N):bernoulli_(1):min():item())
    assert.equal(0, mf.empty(N):bernoulli_(0):max():item())
    fails('bernoulli_: p', mf.empty(3).bernoulli_, mf.empty(3), 1.5)
    fails('bernoulli_: p', mf.empty(3).bernoulli_, mf.empty(3), 0 / 0)
  end)

  it('dropout', function()
    local y = mf.dropout(mf.ones(N), 0.3)
    assert.near(0.7, y:ne(0):double():mean():item(), 5 * math.sqrt(0.21 / N))
    assert.near(1 / 0.7, y:max():item(), 1e-6)
    assert.equal(0, mf.dropout(mf.ones(10), 1):sum():item())
    local x = mf.ones(1000):requires_grad_()
    y = mf.dropout(x, 0.5)
    y:sum():backward()
    assert.is_true(mf.equal(y:detach(), x.grad))
  end)

  it('randperm', function()
    for _, n in ipairs { 0, 1, 2, 100, 70000 } do
      local x = mf.randperm(n)
      assert.equal(mf.int64, x.dtype)
      assert.is_true(n == 0 or mf.equal(x:sort(), mf.arange(n)))
    end
    assert.is_false(mf.equal(mf.randperm(100), mf.arange(100)))
    local first, orders = {}, {}
    for i = 1, 3000 do
      local p = mf.randperm(4):tolist()
      first[i] = p[1]
      orders[table.concat(p)] = true
    end
    frequencies(mf.tensor(first), 4)
    local n = 0
    for _ in pairs(orders) do n = n + 1 end
    assert.equal(24, n)
    fails('randperm', mf.randperm, -1)
  end)

  it('multinomial with replacement', function()
    local w = mf.tensor { 1, 0, 3, 4, 0, 8 }
    frequencies(mf.multinomial(w, N, { replacement = true }), 6, { 1 / 16, 0, 3 / 16, 4 / 16, 0, 8 / 16 })
    local rows = mf.multinomial(mf.tensor { { 1, 1, 0 }, { 0, 1, 3 } }, N / 2, { replacement = true })
    assert.same({ 2, N / 2 }, { unpack(rows.shape) })
    frequencies(rows[0], 3, { 0.5, 0.5, 0 })
    frequencies(rows[1], 3, { 0, 0.25, 0.75 })
  end)

  it('multinomial without replacement', function()
    local w = mf.tensor { 1, 0, 3, 4, 8 }
    local x = mf.multinomial(w:expand(N / 10, 5), 4)
    assert.is_true(mf.equal(x:sort(1), mf.tensor({ 0, 2, 3, 4 }, { dtype = mf.int64 }):expand(N / 10, 4)))
    frequencies(x[{ {}, 0 }], 5, { 1 / 16, 0, 3 / 16, 4 / 16, 8 / 16 }) -- the first draw goes by weight
    -- the second by what the first left: sum over i of w_i / 16 * w_j / (16 - w_i)
    local weights, second = { 1, 0, 3, 4, 8 }, {}
    for j = 1, 5 do
      second[j] = 0
      for i = 1, 5 do
        if i ~= j then second[j] = second[j] + weights[i] / 16 * weights[j] / (16 - weights[i]) end
      end
    end
    frequencies(x[{ {}, 1 }], 5, second)
    fails('multinomial', mf.multinomial, w, 5)
    fails('multinomial', mf.multinomial, mf.tensor { 1, -1 }, 1)
    fails('multinomial', mf.multinomial, mf.tensor { 0, 0 }, 1)
    fails('multinomial', mf.multinomial, mf.tensor { 1, 0 / 0 }, 1)
    fails('multinomial', mf.multinomial, mf.tensor { 1, 1 / 0 }, 1)
  end)
end)

-- -- Generators -----------------------------------------------------------------------------------

describe('generators', function()
  it('begin again from a seed', function()
    mf.manual_seed(5)
    local a, b = mf.rand(3), mf.randn(3)
    assert.is_false(mf.equal(a, mf.rand(3)))
    mf.manual_seed(5)
    assert.is_true(mf.equal(a, mf.rand(3)))
    assert.is_true(mf.equal(b, mf.randn(3)))
    assert.equal(5, mf.initial_seed())
    mf.manual_seed(6)
    assert.is_false(mf.equal(a, mf.rand(3)))
  end)

  it('go on from a saved state', function()
    mf.rand(3)
    local state = mf.get_rng_state()
    local a = mf.rand(4)
    local b = mf.randperm(9)
    mf.set_rng_state(state)
    assert.is_true(mf.equal(a, mf.rand(4)))
    assert.is_true(mf.equal(b, mf.randperm(9)))
    fails('set_rng_state', mf.set_rng_state, mf.ones(2))
    fails('set_rng_state', mf.set_rng_state, 5)
  end)

  it('of their own leave the default one alone', function()
    local g, h = mf.Generator():manual_seed(1), mf.Generator(1)
    mf.manual_seed(2)
    local a = mf.rand(3)
    mf.manual_seed(2)
    local x = mf.rand(5, { generator = g })
    assert.is_true(mf.equal(a, mf.rand(3)))
    assert.is_true(mf.equal(x, mf.rand(5, { generator = h })))
    assert.equal(1, g:initial_seed())
    local state = g:get_state()
    local y = mf.randn(3, { generator = g })
    assert.is_true(mf.equal(y, mf.randn(3, { generator = h:set_state(state) })))
    for _, draw in ipairs {
      function(o) return mf.randint(0, 9, { 20 }, o) end, function(o) return mf.randperm(20, o) end,
      function(o) return mf.normal(0, 1, { 20 }, o) end, function(o) return mf.bernoulli(mf.full({ 20 }, 0.5), o) end,
      function(o) return mf.multinomial(mf.ones(20), 20, o) end, function(o) return mf.empty(20):uniform_(0, 1, o) end,
      function(o) return mf.empty(20):normal_(0, 1, o) end, function(o) return mf.empty(20):bernoulli_(0.5, o) end,
      function(o) return mf.empty(20):random_(0, 9, o) end,
      function(o) return mf.dropout(mf.ones(20), 0.5, o) end,
    } do
      g:manual_seed(4)
      local first, next_one = draw { generator = g }, draw { generator = g }
      g:manual_seed(4)
      assert.is_true(mf.equal(first, draw { generator = g }))
      assert.is_false(mf.equal(first, next_one))
    end
  end)

  it('refuse what they cannot use', function()
    fails('manual_seed', mf.manual_seed, 'x')
    fails('manual_seed', mf.manual_seed, 1.5)
    fails('generator', mf.rand, 3, { generator = 5 })
    fails('generator', mf.Generator().manual_seed, 5)
  end)
end)
