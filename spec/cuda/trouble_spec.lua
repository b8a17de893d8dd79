-- What goes wrong with devices, and what is said then.
local mf = require 'moonflow'
local second = require 'spec.cuda.second'

local shell = require 'spec.shell'

-- What a program of its own says that runs this text, with MF_CUDA as given.
local function says(cuda, text)
  local out, err = shell.run(('MF_CUDA=%s $M -e %s 2>&1'):format(cuda, shell.quote(text)))
  return out .. err
end

describe('a cuda device in trouble', function()
  setup(shell.open)
  teardown(shell.close)

  local emulated = (os.getenv 'MF_CUDA' or ''):find '^emulate'
  local on_emulated = emulated and it or pending
  on_emulated('of an architecture without kernels is refused', function()
    local text = says('emulate,foreign', "require 'moonflow'.ones(2, { device = 'cuda' })")
    assert(text:find('cuda:0 is of compute capability 6.0, for which the library has no kernels', 1, true), text)
    assert(text:find('make cuda CUDA_ARCH=60', 1, true), text)
  end)

  it('moves large tensors in pieces, also while the stream is busy', function()
    local x = mf.randn(3, 1100000)
    for _ = 1, 3 do
      local y = x:to 'cuda'
      local z = (y * 2 + y):to 'cpu'
      assert(mf.allclose(z, x * 3))
      x = x + 1
    end
    local there = x:to('cuda'):to(second or 'cuda'):cpu()
    assert.same(x[2]:narrow(0, 1099990, 10):tolist(), there[2]:narrow(0, 1099990, 10):tolist())
  end)

  it('without memory says how much there is, and works on', function()
    local ok, text = pcall(mf.zeros, 300000, 1000, 1000, { device = 'cuda' })
    assert(not ok and text:find('out of memory on cuda:0', 1, true), text)
    mf.set_memory_limit(2 ^ 20, 'cuda')
    ok, text = pcall(mf.zeros, 1000, 1000, { device = 'cuda' })
    mf.set_memory_limit(0, 'cuda')
    assert(not ok and text:find('out of memory on cuda:0', 1, true), text)
    assert.same({ 1, 1 }, mf.ones(2, { device = 'cuda' }):tolist())
  end)

  it('refuses what the cpu has and it has not', function()
    local x = mf.ones(2, { device = 'cuda' })
    local ok, text = pcall(mf.matmul, x:reshape(1, 2):to(mf.int64), x:reshape(2, 1):to(mf.int64))
    assert(not ok and text:find('matmul: has no kernel for int64 on cuda:0', 1, true), text)
    ok, text = pcall(mf.where, x:gt(0), x, mf.ones(2))
    assert(not ok and text:find('tensors are on cuda:0 and cpu', 1, true), text)
  end)
end)
