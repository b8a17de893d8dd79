-- Reductions at the end of groups of pointwise ops: which the pass fuse_pointwise takes in, and that the results
-- are those of the ops alone.
local mf = require 'moonflow'

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok and tostring(message):find(text, 1, true), tostring(message))
end

local function fuse(text) return (mf._graph_pass(text, 'fuse_pointwise')) end

describe('fuse_pointwise', function()
  it('takes in a reduction over all elements, with what else the group gives', function()
    assert.equal([[
graph step
%0 = input x: float32[4, 8]
%1 = input y: float32[4, 8]
%2, %3 = fused([%0, %1], body={t0 = sub(x0, x1): float32; t1 = square(t0): float32; ]] ..
      [[t2 = mean(t1, dim=[0, 1]): float32; t0, t2}): float32[4, 8], float32[]
%4 = spread(%3, size=[4, 8], dim=[0, 1], keepdim=false): float32[4, 8]
%5 = mul(%2, %4): float32[4, 8]
return %5
]], fuse [[
graph step
%0 = input x: float32[4, 8]
%1 = input y: float32[4, 8]
%2 = sub(%0, %1): float32[4, 8]
%3 = square(%2): float32[4, 8]
%4 = mean(%3, dim=[0, 1]): float32[]
%5 = spread(%4, size=[4, 8], dim=[0, 1], keepdim=false): float32[4, 8]
%6 = mul(%2, %5): float32[4, 8]
return %6
]])
  end)

  it('takes in several over the last dims, and puts who reads what they make behind', function()
    assert.equal([[
graph step
%0 = input x: float32[4, 20]
%1, %2, %3 = fused([%0], body={t0 = exp(x0): float32; t1 = sum(t0, dim=[1], keepdim=true): float32; ]] ..
      [[t2 = amax(t0, dim=[1], keepdim=true): float32; t0, t1, t2}): float32[4, 20], float32[4, 1], float32[4, 1]
%4 = add(%2, %3): float32[4, 1]
%5 = div(%1, %4): float32[4, 20]
return %5
]], fuse [[
graph step
%0 = input x: float32[4, 20]
%1 = exp(%0): float32[4, 20]
%2 = sum(%1, dim=[1], keepdim=true): float32[4, 1]
%3 = amax(%1, dim=[1], keepdim=true): float32[4, 1]
%4 = add(%2, %3): float32[4, 1]
%5 = div(%1, %4): float32[4, 20]
return %5
]])
  end)

  it('leaves those over the first dims, over few elements, of what is no group, and over other dims', function()
    for _, reduction in ipairs { 'sum(%1, dim=[0]): float32[40]', 'sum(%0, dim=[0, 1]): float32[]' } do
      local text = ([[
graph step
%%0 = input x: float32[4, 40]
%%1 = exp(%%0): float32[4, 40]
%%2 = %s
return %%1, %%2
]]):format(reduction)
      assert.equal(text, fuse(text))
    end
    local few = [[
graph step
%0 = input x: float32[40, 15]
%1 = exp(%0): float32[40, 15]
%2 = sum(%1, dim=[1]): float32[40]
return %2
]]
    assert.equal(few, fuse(few))
    local two = fuse [[
graph step
%0 = input x: float32[4, 40]
%1 = exp(%0): float32[4, 40]
%2 = sum(%1, dim=[1]): float32[4]
%3 = sum(%1, dim=[0, 1]): float32[]
return %2, %3
]]
    assert.truthy(two:find('t1 = sum(t0, dim=[1]): float32; t0, t1}', 1, true), two)
    assert.truthy(two:find('= sum(%1, dim=[0, 1])', 1, true), two)
  end)

  it('says what is wrong with a program', function()
    local function program(body)
      return mf._graph_pass(('graph step\n%%0 = input x: float32[4, 40]\n%%1 = fused([%%0], body={%s}): '
        .. 'float32[4]\nreturn %%1\n'):format(body), '')
    end
    program 't0 = exp(x0): float32; t1 = sum(t0, dim=[1]): float32; t1'
    fails('behind a reduction', program,
      't0 = exp(x0): float32; t1 = sum(t0, dim=[1]): float32; t2 = exp(t0): float32; t1')
    fails('not of what a pointwise step makes', program, 't0 = exp(x0): float32; t1 = sum(x0, dim=[1]): float32; t1')
    fails('reduces other dims', program, 't0 = exp(x0): float32; t1 = sum(t0, dim=[1]): float32; '
      .. 't2 = sum(t0, dim=[0]): float32; t1, t2')
    fails('1 reductions and 0 results', program, 't0 = exp(x0): float32; t1 = sum(t0, dim=[1]): float32; t0')
  end)
end)

-- -- What the kernel computes ------------------------------------------------------------------------

-- Reductions of what two pointwise ops make of x and y.
local reductions = {
  sum = function(t, dim) return t:sum(dim) end,
  mean = function(t, dim) return t:mean(dim) end,
  prod = function(t, dim) return t:prod(dim) end,
  amax = function(t, dim) return t:amax(dim) end,
  amin = function(t, dim) return t:amin(dim, { keepdim = true }) end,
  norm = function(t, dim) return t:norm(2, dim) end,
  norm1 = function(t, dim) return t:norm(1, dim) end,
  var = function(t, dim) return t:var(dim) end,
  std = function(t, dim) return t:std(dim, { keepdim = true }) end,
  logsumexp = function(t, dim) return t:logsumexp(dim) end,
  any = function(t, dim) return t:gt(1):any(dim) end,
  all = function(t, dim) return t:gt(-1):all(dim) end,
  count = function(t, dim) return t:gt(0):count_nonzero(dim) end,
}

local shapes = {
  { { 17 }, { 0 } }, { { 3, 5, 16 }, { 2 } }, { { 3, 5, 16 }, { 1, 2 } }, { { 2, 3000 }, { 1 } },
  { { 40, 41 }, { 0, 1 } }, { { 300, 701 }, { 0, 1 } }, { { 7, 40001 }, { 1 } }, { { 20, 33000 }, { 1 } },
  { { 130, 769 }, { 1 } },
}

local dtypes = { mf.float32, mf.float64, mf.bfloat16, mf.float16 }

local function fused(f, ...)
  local step = mf.compile(f, { passes = { algebra = false, fold = false } })
  local out = { step(...) }
  return out, tostring(step)
end

for name, reduce in pairs(reductions) do
  describe('fused with ' .. name, function()
    it('gives the same bits', function()
      for _, case in ipairs(shapes) do
        for _, dtype in ipairs(dtypes) do
          local shape, dim = unpack(case)
          mf.manual_seed(#shape)
          local x = mf.rand(shape):mul(0.5):add(0.75):to(dtype)
          local y = mf.rand { shape[#shape] }:to(dtype)
          local function f(a, b)
            local t = a * b
            return reduce(t, dim), t + 1
          end
          local got, text = fused(f, x, y)
          assert.truthy(text:find 'fused%(', text)
          assert.is_nil(text:match '\n%%%d+ = [%w_]+%(%%%d+, dim=[^\n]*')
          local want = { f(x, y) }
          for k = 1, 2 do
            assert(mf.equal(want[k], got[k]), ('%s of %s, %s'):format(name, tostring(dtype), table.concat(shape, 'x')))
          end
          assert(mf.equal(f(x, y), (fused(function(a, b) return (f(a, b)) end, x, y))[1]))
        end
      end
    end)
  end)
end

describe('fused with reductions', function()
  it('takes what is broadcast, has gaps, or lies in another order', function()
    mf.manual_seed(3)
    local x, y = mf.randn(6, 40, 5, 7), mf.randn(40, 1, 1)
    local forms = {
      x, x:to { memory_format = mf.channels_last }, x:transpose(1, 3), x:narrow(3, 1, 5), x:narrow(1, 3, 30),
      mf.randn(6, 1, 1, 1):expand(6, 40, 5, 7),
    }
    for k, form in ipairs(forms) do
      local other = form:size(1) == y:size(0) and y or mf.randn(form:size(1), 1, 1)
      for _, dim in ipairs { { 0, 1, 2, 3 }, { 2, 3 }, { 1, 2, 3 } } do
        local function f(a, b)
          local t = (a + b):tanh()
          return t:sum(dim), (t * t):sum(dim, { keepdim = true }), t:amax(dim)
        end
        local got = fused(f, form, other)
        for i, want in ipairs { f(form, other) } do
          assert(mf.allclose(want, got[i], { rtol = 1e-5, atol = 1e-5 }), ('%d, %d'):format(k, i))
        end
      end
    end
  end)

  it('takes nothing', function()
    local function f(a)
      local t = a * 2
      return t:sum(), t:sum { 1 }, t:gt(0):all()
    end
    for _, shape in ipairs { { 0, 20 }, { 3, 0 } } do
      local x = mf.zeros(shape)
      local text = ([[
graph step
%%0 = input x: float32[%d, %d]
%%1 = fused([%%0], body={t0 = exp(x0): float32; t1 = sum(t0, dim=[1]): float32; t1}): float32[%d]
return %%1
]]):format(shape[1], shape[2], shape[1])
      assert.equal(text, (mf._graph_pass(text, '')))
      local got = fused(f, x)
      for i, want in ipairs { f(x) } do assert(mf.equal(want, got[i])) end
    end
  end)

  -- The result has the shape, dtype and size of an input that is read row by row until the end.
  it('writes no input before its last reader', function()
    mf.manual_seed(2)
    local x, b = mf.randn(300, 300), mf.randn(300)
    local function f(a, c)
      local d = c:exp() -- of the step's own, and dead behind
      return (a:mm(a) * d):sum { 1 }
    end
    local got = fused(f, x, b)
    assert(mf.equal(f(x, b), got[1]))
  end)

  it('gives gradients as eager ones', function()
    mf.manual_seed(2)
    local x, w, t = mf.randn(64, 50), mf.randn(50, 30), mf.randn(64, 30)
    local function f(a)
      local p = w:clone():requires_grad_(true)
      local loss = ((a:mm(p) - t):square():mean() + p:abs():sum() * 0.01)
      loss:backward()
      return loss, p.grad
    end
    local got, text = fused(f, x)
    assert.truthy(text:find('= mean(t', 1, true), text)
    for i, want in ipairs { f(x) } do assert(mf.equal(want:detach(), got[i])) end
  end)
end)
