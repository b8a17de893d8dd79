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

  -- relu_backward and batch_norm_backward, and what the kernel that does both gives.
  local function backward(x, y, g, h, o)
    local mean, rstd = mf.randn({ x.shape[2] }, { dtype = o.dtype }), mf.rand({ x.shape[2] }, { dtype = o.dtype }) + 0.5
    local w, b = mf.randn_like(mean), mf.randn_like(mean)
    if not y then
      local c = { 1, x.shape[2] }
      for d = 3, x.ndim do c[d] = 1 end
      y = ((x - mean:reshape(c)) * (rstd * w):reshape(c) + b:reshape(c)):relu()
    end
    local gated = mf._relu_backward(h and g + h or g, y)
    local want = { mf._batch_norm_backward(gated, x, mean, rstd, w, o.training, true) }
    local kept = g:clone()
    local got = { mf._batch_norm_act_backward(kept, o.y and y or nil, x, mean, rstd, w, b, h, o.training, true,
      o.residual or false) }
    want[4], got[4] = o.residual and gated or nil, o.residual and kept or nil
    for k = 1, #want do assert(mf.equal(want[k], got[k]), ('result %d of (%s)'):format(k, tostring(x.shape))) end
  end

  for name, dtype in pairs { float32 = mf.float32, float64 = mf.float64 } do
    it('has a kernel for the backward that gives the same bits: ' .. name, function()
      for _, shape in ipairs { { 9, 5 }, { 3, 70, 6, 7 }, { 2, 3, 50, 50 }, { 40, 130, 3, 3 } } do
        for _, last in ipairs { false, true } do
          local function make()
            local t = mf.randn(shape, { dtype = dtype })
            return #shape == 4 and last and t:contiguous { memory_format = 'channels_last' } or t
          end
          for _, training in ipairs { true, false } do
            backward(make(), make(), make(), nil, { y = true, training = training, dtype = dtype })
            backward(make(), make(), make(), nil, { y = true, residual = true, training = training, dtype = dtype })
            backward(make(), make(), make(), make(), { y = true, residual = true, training = training, dtype = dtype })
          end
        end
      end
    end)
  end

  -- Every value is away from where the relu begins, so that rounding does not decide.
  it('has a kernel for the backward that needs no y', function()
    for _, shape in ipairs { { 9, 5 }, { 3, 70, 6, 7 }, { 2, 3, 50, 50 } } do
      local x, g = mf.randn(shape):double(), mf.randn(shape):double()
      backward(x, nil, g, nil, { training = true, dtype = mf.float64 })
      if #shape == 4 then
        backward(x:contiguous { memory_format = 'channels_last' }, nil, g, nil, { training = true, dtype = mf.float64 })
      end
    end
  end)

  it('takes the backward of blocks with and without a residual', function()
    local text = mf._graph_pass([[
graph step
%0 = input x: float32[2, 3, 4]
%1 = input g: float32[2, 3, 4]
%2 = input more: float32[2, 3, 4]
%3 = capture w: float32[3]
%4 = capture b: float32[3]
%5, %6, %7 = batch_norm(%0, none, none, %3, %4, training=true): float32[2, 3, 4], float32[3], float32[3]
%8 = relu(%5): float32[2, 3, 4]
%9, %10, %11 = batch_norm(%8, none, none, %3, %4, training=true): float32[2, 3, 4], float32[3], float32[3]
%12 = add(%9, %0): float32[2, 3, 4]
%13 = relu(%12): float32[2, 3, 4]
%14 = exp(%1): float32[2, 3, 4]
%15 = add(%2, %14): float32[2, 3, 4]
%16 = relu_backward(%15, %13): float32[2, 3, 4]
%17, %18, %19 = batch_norm_backward(%16, %8, %10, %11, %3, training=true, params=true): ]] .. [[
float32[2, 3, 4], float32[3], float32[3]
%20 = relu_backward(%17, %8): float32[2, 3, 4]
%21, %22, %23 = batch_norm_backward(%20, %0, %6, %7, %3, training=true, params=true): ]] .. [[
float32[2, 3, 4], float32[3], float32[3]
%24 = add(%21, %16): float32[2, 3, 4]
return %24, %18, %19, %22, %23
]], 'fuse_norm')
    assert.equal([[
graph step
%0 = input x: float32[2, 3, 4]
%1 = input g: float32[2, 3, 4]
%2 = input more: float32[2, 3, 4]
%3 = capture w: float32[3]
%4 = capture b: float32[3]
%5, %6, %7 = batch_norm_act(%0, none, none, %3, %4, training=true, relu=true): float32[2, 3, 4], float32[3], float32[3]
%8, %9, %10 = batch_norm_act(%5, none, none, %3, %4, %0, training=true, relu=true): ]] .. [[
float32[2, 3, 4], float32[3], float32[3]
%11 = exp(%1): float32[2, 3, 4]
%12, %13, %14, %15 = batch_norm_act_backward(%11, %8, %5, %9, %10, %3, %4, %2, training=true, params=true, ]] .. [[
residual=true): float32[2, 3, 4], float32[3], float32[3], float32[2, 3, 4]
%16, %17, %18, %19 = batch_norm_act_backward(%12, none, %0, %6, %7, %3, %4, training=true, params=true, ]] .. [[
residual=false): float32[2, 3, 4], float32[3], float32[3], float32[2, 3, 4]
%20 = add(%16, %15): float32[2, 3, 4]
return %20, %13, %14, %17, %18
]], text)
  end)
end)
