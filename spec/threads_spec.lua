-- Results do not depend on the number of threads, nor on where an element stands.
local mf = require 'moonflow'
local shell = require 'spec.shell'

local function same(name, f)
  it(name, function()
    local before = mf.get_num_threads()
    mf.set_num_threads(1)
    local want = f()
    for _, n in ipairs { 2, 3, 7 } do
      mf.set_num_threads(n)
      for k, t in ipairs(f()) do assert.is_true(mf.equal(want[k], t), ('output %d with %d threads'):format(k, n)) end
    end
    mf.set_num_threads(before)
  end)
end

local function leaf(...)
  local x = mf.randn(...)
  x.requires_grad = true
  return x
end

describe('any number of threads gives the same', function()
  mf.manual_seed(0)
  local x = mf.randn(4000, 300)
  same('sums, moments and extremes of columns', function() return { x:sum(0), x:var(0), x:amax(0), x:logsumexp(0) } end)
  same('sums of rows and of all', function() return { x:sum(1), x:sum(), x:norm(), x:var() } end)
  local w, b = leaf(300), leaf(300)
  same('gradients of layer_norm', function()
    local y = mf.layer_norm(x, { 300 }, w, b)
    return mf.grad((y * x):sum(), { w, b })
  end)
  local image, scale, shift = mf.randn(16, 24, 40, 40), leaf(24), leaf(24)
  for _, format in ipairs { 'contiguous', 'channels_last' } do
    local laid = image:contiguous { memory_format = format }
    same('batch_norm, ' .. format, function()
      local y = mf.batch_norm(laid, nil, nil, scale, shift, true)
      local g = mf.grad((y * laid):sum(), { scale, shift })
      return { y, g[1], g[2] }
    end)
    same('group_norm, ' .. format, function()
      local y = mf.group_norm(laid, 4, scale, shift)
      local g = mf.grad((y * laid):sum(), { scale, shift })
      return { y, g[1], g[2] }
    end)
  end
end)

-- oneDNN waits for all threads that OpenMP seems to promise.
describe('what the environment asks of OpenMP', function()
  setup(shell.open)
  teardown(shell.close)
  for _, setting in ipairs { 'OMP_DYNAMIC=true', 'OMP_THREAD_LIMIT=1', 'OMP_MAX_ACTIVE_LEVELS=0',
    'OMP_NUM_THREADS=50' } do
    it('is followed or put aside: ' .. setting, function()
      local out, err, rc = shell.run(setting .. [[ timeout 60 $M -e 'local mf = require "moonflow"
        mf.set_num_threads(2)
        local x = mf.ones(8, 3, 20, 20):requires_grad_()
        x:conv2d(mf.ones(16, 3, 3, 3)):sum():backward()
        print(x.grad:sum():item(), mf.ones(300, 300):matmul(mf.ones(300, 300)):sum():item(), mf.get_num_threads())']])
      assert.equal(0, rc, err)
      local before = mf.get_num_threads()
      mf.set_num_threads(2)
      local threads = setting == 'OMP_THREAD_LIMIT=1' and 1 or mf.get_num_threads()
      mf.set_num_threads(before)
      assert.equal(('%d\t%d\t%d\n'):format(8 * 3 * 16 * 9 * 18 * 18, 300 ^ 3, threads), out)
    end)
  end
end)

describe('an element is computed alike wherever it stands', function()
  local x = mf.randn(1000):clamp(-0.99)
  for _, op in ipairs { 'exp', 'sigmoid', 'silu', 'gelu', 'log1p', 'tanh', 'elu' } do
    it(op, function()
      local y = mf[op](x)
      for _, at in ipairs { 1, 3, 15, 500, 999 } do
        local part = mf[op](x:narrow(0, at, 1000 - at))
        assert.is_true(mf.equal(part, y:narrow(0, at, 1000 - at)))
      end
    end)
  end
end)
