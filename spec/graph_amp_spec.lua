-- The pass amp: products in bfloat16, the rest in float32.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

describe('amp', function()
  it('casts around products, once, and not between them', function()
    assert.equal([[
graph step
%0 = input x: float32[6, 4]
%1 = capture w: float32[4, 4]
%2 = cast(%0, dtype=bfloat16): bfloat16[6, 4]
%3 = cast(%1, dtype=bfloat16): bfloat16[4, 4]
%4 = linear(%2, %3): bfloat16[6, 4]
%5 = cast(%4, dtype=float32): float32[6, 4]
%6 = matmul(%4, %3): bfloat16[6, 4]
%7 = cast(%6, dtype=float32): float32[6, 4]
%8 = exp(%5): float32[6, 4]
%9 = transpose(%6, dim0=0, dim1=1): bfloat16[4, 6]
%10 = matmul(%9, %2): bfloat16[4, 4]
%11 = cast(%10, dtype=float32): float32[4, 4]
%12 = add(%1, %11): float32[4, 4]
write %1 = %12
return %8, %7
]], (mf._graph_pass([[
graph step
%0 = input x: float32[6, 4]
%1 = capture w: float32[4, 4]
%2 = linear(%0, %1): float32[6, 4]
%3 = matmul(%2, %1): float32[6, 4]
%4 = exp(%2): float32[6, 4]
%5 = transpose(%3, dim0=0, dim1=1): float32[4, 6]
%6 = matmul(%5, %0): float32[4, 4]
%7 = add(%1, %6): float32[4, 4]
write %1 = %7
return %4, %3
]], 'amp,dce', 'bfloat16')))
  end)

  it('leaves other dtypes, and everything when not asked', function()
    for dtype, amp in pairs { float64 = 'bfloat16', float16 = 'bfloat16', int64 = 'float16', float32 = false } do
      local text = 'graph step\n%0 = input x: T[2, 2]\n%1 = matmul(%0, %0): T[2, 2]\nreturn %1\n'
      text = text:gsub('T', dtype)
      assert.equal(text, (mf._graph_pass(text, 'amp', amp or nil)))
    end
  end)

  it('computes what casts by hand compute', function()
    mf.manual_seed(1)
    local x, w, b = mf.randn(5, 8), mf.randn(3, 8), mf.randn(3)
    local function half(t) return t:to(mf.bfloat16) end
    local want = mf.linear(half(x), half(w), half(b)):to(mf.float32):exp()
    local got = mf.compile(function(t) return mf.linear(t, w, b):exp() end, { amp = 'bfloat16', amp_force = true })(x)
    assert.equal(mf.float32, got.dtype)
    assert(mf.equal(want, got))
    assert(not mf.equal(got, mf.linear(x, w, b):exp()))
  end)

  for _, dtype in ipairs { 'bfloat16', 'float16' } do
    it('trains as float32 does, within its digits: ' .. dtype, function()
      local losses = {}
      for k = 1, 2 do
        mf.manual_seed(3)
        local model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
          nn.Linear(8 * 36, 16), nn.GELU(), nn.Linear(16, 4))
        local opt = optim.AdamW(model:parameters(), { lr = 0.003 })
        local step = mf.compile(function(x, y)
          opt:zero_grad()
          local loss = mf.cross_entropy(model(x), y)
          loss:backward()
          opt:step()
          return loss
        end, k == 2 and { amp = dtype, amp_force = true } or nil)
        losses[k] = {}
        local x, y = mf.randn(16, 1, 8, 8), mf.randint(0, 4, { 16 })
        for i = 1, 10 do losses[k][i] = step(x, y):item() end
        for _, p in ipairs(model:parameters()) do assert.equal(mf.float32, p.dtype) end
      end
      for i = 1, 10 do
        local a, b = losses[1][i], losses[2][i]
        assert(math.abs(a - b) <= 0.03 * losses[1][1], ('%d: %g and %g'):format(i, a, b))
      end
      assert.truthy(losses[2][10] < 0.5 * losses[2][1])
      assert.are_not.same(losses[1], losses[2])
    end)
  end

  it('says once where the CPU lacks it, and keeps float32', function()
    local i, name = 0, os.tmpname()
    while arg[i - 1] do i = i - 1 end
    local f = assert(io.open(name, 'w'))
    f:write [[
local mf = require 'moonflow'
local x = mf.randn(4, 4)
local function square(t) return t:matmul(t) end
for _ = 1, 3 do
  local y = mf.compile(square, { amp = 'bfloat16' })(x)
  io.stderr:write(tostring(mf.equal(y, square(x))), ' ')
end]]
    f:close()
    local pipe = io.popen(('MF_ISA=v3 %s %s 2>&1'):format(arg[i], name))
    local text = pipe:read '*a'
    pipe:close()
    os.remove(name)
    assert.equal(name .. ':5: warning: compile: this CPU does not multiply bfloat16; float32 stays '
      .. '(amp_force = true has it done)\ntrue true true ', text)
  end)

  it('refuses other dtypes', function()
    local ok, message = pcall(mf.compile, function() end, { amp = 'float64' })
    assert(not ok and message:find('amp must be one of bfloat16, float16', 1, true), message)
  end)
end)
