-- cuda devices as such: names, moving, memory, errors; on emulated ones.
local mf = require 'moonflow'
local second = require 'spec.cuda.second'
local on_two = second and it or pending

describe('a cuda device', function()
  it('has names, and tensors show theirs', function()
    assert.equal('cuda:0', mf.ones(2, { device = 'cuda' }).device)
    assert.equal("tensor([1., 1.], device='cuda:0')", tostring(mf.ones(2, { device = 'cuda:0' })))
    local ok, text = pcall(mf.ones, 2, { device = 'cuda:13' })
    assert(not ok and text:find("there is no device 'cuda:13'; the last is 'cuda:", 1, true), text)
  end)

  on_two('may be the second of several', function()
    assert.equal('cuda:1', mf.ones(2, { device = 'cuda:1' }).device)
    assert.equal("tensor([1., 1.], device='cuda:1')", tostring(mf.ones(2, { device = 'cuda:1' })))
  end)

  it('takes tensors and gives them back, whatever their strides are', function()
    local x = mf.arange(24):reshape(2, 3, 4):to(mf.float32)
    for _, y in ipairs { x, x:permute(2, 0, 1), x:select(1, 1), x:narrow(2, 1, 2) } do
      local there = y:to 'cuda'
      assert.equal('cuda:0', there.device)
      assert.same(y:tolist(), there:cpu():tolist())
      if second then assert.same(y:tolist(), there:to(second):tolist()) end
    end
    local there = x:to 'cuda'
    assert.equal(there, there:to 'cuda')
    assert.equal(there, there:to 'cuda:0')
  end)

  it('gives a moved tensor its gradient where it was', function()
    local x = mf.tensor({ 1, 2, 3 }, { requires_grad = true })
    local y = x:to 'cuda' * 3
    y:sum():backward()
    assert.equal('cpu', x.grad.device)
    assert.same({ 3, 3, 3 }, x.grad:tolist())
  end)

  on_two('refuses operands of two devices, but for numbers and 0-d tensors of the cpu', function()
    local a, b = mf.ones(2, { device = 'cuda' }), mf.ones(2, { device = 'cuda:1' })
    local ok, text = pcall(mf.add, a, b)
    assert(not ok and text:find('add: tensors are on cuda:0 and cuda:1; move one with :to()', 1, true), text)
    assert.same({ 4, 4 }, (a + mf.tensor(3)):tolist())
    assert.same({ 4, 4 }, (3 + a):tolist())
  end)

  it('reports an index out of range at the next wait, and works on', function()
    local x = mf.arange(5, { device = 'cuda' })
    local i = mf.tensor({ 1, 7 }, { dtype = mf.int64, device = 'cuda' })
    local y = mf.index_select(x, 0, i)
    local ok, text = pcall(y.tolist, y)
    assert(not ok and text:find('index_select: index at position 1 is 7; legal are 0 to 4', 1, true), text)
    assert.same({ 0, 1, 2, 3, 4 }, x:tolist())
  end)

  it('counts its memory, keeps it for later, and keeps to a limit', function()
    local before = mf.memory_stats('cuda').in_use
    local x = mf.zeros(1000, 1000, { device = 'cuda' })
    assert(mf.memory_stats('cuda').in_use - before >= 4e6)
    x:free()
    assert(mf.memory_stats('cuda').cached >= 4e6)
    mf.empty_cache 'cuda'
    assert.equal(0, mf.memory_stats('cuda').cached)
    local ok, text = pcall(mf.zeros, 1000000, 1000, { device = 'cuda' })
    assert(not ok and text:find('out of memory on cuda:0', 1, true), text)
  end)

  it('trains as the cpu does', function()
    local function train(device)
      mf.manual_seed(1)
      local model = mf.nn.Sequential(mf.nn.Linear(6, 8), mf.nn.ReLU(), mf.nn.LayerNorm(8), mf.nn.Linear(8, 3))
      local x, y = mf.randn(20, 6), mf.randint(0, 3, { 20 })
      model:to(device)
      x, y = x:to(device), y:to(device)
      local opt = mf.optim.AdamW(model:parameters(), { lr = 0.01 })
      local losses = {}
      for step = 1, 5 do
        opt:zero_grad()
        local loss = mf.cross_entropy(model(x), y)
        loss:backward()
        opt:step()
        losses[step] = loss:item()
      end
      return losses
    end
    local want, got = train 'cpu', train 'cuda'
    assert(want[5] < want[1])
    for k = 1, 5 do assert(math.abs(got[k] - want[k]) < 1e-5, got[k] .. ' is not ' .. want[k]) end
  end)
end)
