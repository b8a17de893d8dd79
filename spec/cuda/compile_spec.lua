-- Compiled steps on cuda devices: what the function does there by itself.
local mf = require 'moonflow'
local second = require 'spec.cuda.second'
local on_two = second and it or pending
local nn = mf.nn

local Block = nn.Module:extend 'Block'
function Block:init(width, heads)
  self.heads = heads
  self.norm = nn.LayerNorm(width)
  self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
  self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * width, width))
end
function Block:forward(x)
  local b, t, c = x:size(0), x:size(1), x:size(2)
  local q = self.qkv(self.norm(x)):view(b, t, 3, self.heads, c / self.heads):permute(2, 0, 3, 1, 4)
  local y = nn.functional.scaled_dot_product_attention(q[0], q[1], q[2], { is_causal = true })
  x = x + self.out(y:transpose(1, 2):reshape(b, t, c))
  return x + self.mlp(x)
end

local models = {
  layers = function()
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.LayerNorm(9), nn.Dropout(0.2), nn.Linear(9, 3)),
      mf.randn(10, 6), mf.randint(0, 3, { 10 })
  end,
  images = function()
    return nn.Sequential(nn.Conv2d(3, 5, 3, { padding = 1, bias = false }), nn.BatchNorm2d(5), nn.ReLU(),
      nn.MaxPool2d(2), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)),
      mf.randn(4, 3, 9, 9), mf.randint(0, 3, { 4 })
  end,
  attention = function()
    return nn.Sequential(nn.Embedding(11, 8), Block(8, 2), nn.Linear(8, 11)),
      mf.randint(0, 11, { 3, 7 }), mf.randint(0, 11, { 3, 7 })
  end,
}

-- The losses of some steps, and what the parameters are then.
local function train(make, device, compile, optimiser)
  mf.manual_seed(4)
  local model, x, y = make()
  model:to(device)
  x, y = x:to(device), y:to(device)
  local opt = mf.optim[optimiser](model:parameters(), { lr = 0.05 })
  local schedule = mf.optim.lr_scheduler.StepLR(opt, 2, { gamma = 0.5 })
  local function step(input, target)
    opt:zero_grad()
    local out = model(input)
    local loss = mf.cross_entropy(out:reshape(-1, out:size(-1)), target:reshape(-1))
    loss:backward()
    opt:step()
    return loss
  end
  if compile then step = mf.compile(step) end
  local losses = {}
  for k = 1, 5 do
    losses[k] = step(x, y):item()
    schedule:step()
  end
  return losses, model
end

local function near(want, got, limit)
  for k = 1, #want do assert(math.abs(want[k] - got[k]) <= limit, ('%g is not %g'):format(got[k], want[k])) end
end

describe('a step compiled for a cuda device', function()
  for name, make in pairs(models) do
    for _, optimiser in ipairs { 'AdamW', 'SGD' } do
      it(('trains as eager calls do: %s with %s'):format(name, optimiser), function()
        local cpu = train(make, 'cpu', false, optimiser)
        local eager, a = train(make, 'cuda', false, optimiser)
        local compiled, b = train(make, 'cuda', true, optimiser)
        assert(cpu[5] < cpu[1])
        near(cpu, eager, 2e-4)
        near(eager, compiled, 2e-5)
        local p, q = a:parameters(), b:parameters()
        for k = 1, #p do
          assert.equal('cuda:0', q[k].device)
          assert(mf.allclose(p[k], q[k], { rtol = 1e-4, atol = 1e-5 }), 'parameter ' .. k)
        end
      end)
    end
  end

  it('gives the same bits where nothing is fused', function()
    local function f(x, w) return (x:matmul(w) + 1):relu():softmax(1), x:sum(0) * 3 end
    local x, w = mf.randn(5, 7, { device = 'cuda' }), mf.randn(7, 4, { device = 'cuda' })
    local step = mf.compile(f)
    for _ = 1, 3 do
      local a, b = f(x, w)
      local c, d = step(x, w)
      assert.same(a:tolist(), c:tolist())
      assert.same(b:tolist(), d:tolist())
      assert.equal('cuda:0', c.device)
    end
  end)

  it('is compiled anew for another device, and works there', function()
    local step = mf.compile(function(x) return x * 2 + 1 end)
    for _, device in ipairs { 'cpu', 'cuda', second or 'cpu', 'cuda' } do
      local y = step(mf.ones(3, { device = device }))
      assert.equal(device == 'cuda' and 'cuda:0' or device, y.device)
      assert.same({ 3, 3, 3 }, y:tolist())
    end
  end)

  it('draws what eager calls draw', function()
    local function f(x) return mf.dropout(x, 0.5, true) + mf.randn(4, 5, { device = 'cuda' }) end
    local x = mf.ones(4, 5, { device = 'cuda' })
    mf.manual_seed(9)
    local want = { f(x):tolist(), f(x):tolist() }
    mf.manual_seed(9)
    local step = mf.compile(f)
    assert.same(want, { step(x):tolist(), step(x):tolist() })
  end)

  it('reports an index out of range when it is waited for', function()
    local step = mf.compile(function(x, i) return mf.index_select(x, 0, i) * 2 end)
    local x = mf.arange(5, { device = 'cuda' }):to(mf.float32)
    local function at(k) return step(x, mf.tensor({ 0, k }, { dtype = mf.int64, device = 'cuda' })):tolist() end
    assert.same({ 0, 8 }, at(4))
    local ok, text = pcall(at, 5)
    assert(not ok and text:find('index_select: index at position 1 is 5; legal are 0 to 4', 1, true), text)
    assert.same({ 0, 6 }, at(3))
  end)

  it('may look at meta tensors', function()
    local step = mf.compile(function(x) return x * mf.zeros(3, { device = 'meta' }):size(0) end)
    assert.same({ 3, 3 }, step(mf.ones(2, { device = 'cuda' })):tolist())
  end)

  it('works on one device alone', function()
    local x = mf.ones(3, { device = 'cuda' })
    local ok, text = pcall(mf.compile(function(a) return a:cpu() * 2 end), x)
    assert(not ok and text:find('a compiled step works on one device', 1, true), text)
  end)

  on_two('refuses tensors of two devices', function()
    local x = mf.ones(3, { device = 'cuda' })
    local ok, text = pcall(mf.compile(function(a, b) return a * 2, b * 2 end), x, x:to 'cuda:1')
    assert(not ok and text:find('a compiled step works on one device', 1, true), text)
    ok, text = pcall(mf.compile(function(a, b) return a + b end), x, x:to 'cuda:1')
    assert(not ok and text:find('tensors are on cuda:0 and cuda:1', 1, true), text)
  end)
end)
