-- The pass fuse_norm: batch_norm, a sum and relu in one op.
local mf = require 'moonflow'
local nn = mf.nn

-- The text of f compiled with and without the pass, on the same tensors; equal results and buffers.
local function both(build, ...)
  local texts, results = {}, {}
  for k, on in ipairs { true, false } do
    mf.manual_seed(5)
    local f, buffers = build()
    local compiled = mf.compile(f, { passes = { fuse_norm = on } })
    results[k] = { compiled(...) }
    for _, b in ipairs(buffers) do table.insert(results[k], b) end
    texts[k] = tostring(compiled)
  end
  for i, t in ipairs(results[1]) do
    assert(mf.allclose(t, results[2][i], { rtol = 0, atol = 0, equal_nan = true }), 'result ' .. i)
  end
  assert.is_nil(texts[2]:find('batch_norm_act', 1, true))
  local _, n = texts[1]:gsub('batch_norm_act%(', '')
  return n, texts[1]
end

local function norm(channels)
  local bn = nn.BatchNorm2d(channels)
  mf.no_grad(function() bn.weight:uniform_(-1, 1) bn.bias:uniform_(-1, 1) end)
  return bn
end

describe('fuse_norm', function()
  local function inputs(o) return mf.randn(2, 5, 6, 7, o), mf.randn(2, 5, 6, 7, o) end

  for name, o in pairs { float32 = {}, float64 = { dtype = mf.float64 } } do
    it('takes sums and relus, bit for bit: ' .. name, function()
      local x, r = inputs(o)
      for label, f in pairs {
        sum = function(bn, a, b) return bn(a) + b end,
        ['sum the other way'] = function(bn, a, b) return b + bn(a) end,
        relu = function(bn, a) return bn(a):relu() end,
        all = function(bn, a, b) return (bn(a) + b):relu() end,
      } do
        for _, last in ipairs { false, true } do
          local format = { memory_format = last and 'channels_last' or 'contiguous' }
          local n, text = both(function()
            local bn = norm(5):to(x.dtype)
            return function(a, b) return f(bn, a, b) end, { bn.running_mean, bn.running_var }
          end, x:contiguous(format), r)
          assert.equal(1, n, label .. text)
        end
      end
    end)
  end

  it('keeps NaN and infinities', function()
    local x = mf.tensor { { 0, 1 }, { -1, 2 }, { 3, -4 } }
    local r = mf.tensor { { 0 / 0, math.huge }, { -math.huge, -0.0 }, { 0, 1 } }
    local n = both(function()
      local bn = nn.BatchNorm1d(2)
      return function(a, b) return (bn(a) + b):relu() end, {}
    end, x, r)
    assert.equal(1, n)
  end)

  it('takes one of two norms that are added, and a chain of chains', function()
    local x, r = inputs {}
    local n = both(function()
      local a, b, c = norm(5), norm(5), norm(5)
      return function(u, v)
        local y = (a(u) + b(v)):relu()
        return (c(y) + y):relu()
      end, { a.running_mean, b.running_mean, c.running_var }
    end, x, r)
    assert.equal(2, n)
  end)

  it('leaves alone what others read, broadcast sums and sums with a factor', function()
    local x, r = inputs {}
    local row = mf.randn(5, 1, 1)
    for _, f in ipairs {
      function(bn, a) local y = bn(a) return y:relu(), y end,
      function(bn, a) return bn(a) + row end,
      function(bn, a, b) return mf.add(bn(a), b, { alpha = 2 }) end,
      function(bn, a) local y = bn(a) return y + y end,
    } do
      local n = both(function()
        local bn = norm(5)
        return function(a, b) return f(bn, a, b) end, {}
      end, x, r)
      assert.equal(0, n)
    end
  end)

  it('trains the same', function()
    local x, r = inputs {}
    local n = both(function()
      local bn = norm(5)
      return function(a, b)
        local loss = (bn(a) + b):relu():sum()
        return loss, unpack(mf.grad(loss, { bn.weight, bn.bias }))
      end, { bn.running_mean }
    end, x, r)
    assert.equal(1, n)
  end)
end)
