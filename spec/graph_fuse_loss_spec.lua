-- The pass fuse_loss, and the op linear_cross_entropy that it makes.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function near(a, b, what)
  assert(a.shape == b.shape, what)
  assert(mf.allclose(a, b, { rtol = 1e-9, atol = 1e-12 }), what)
end

describe('linear_cross_entropy', function()
  -- What it gives against the layer and the loss as they are, on more than one chunk.
  local function check(x, w, b, target, o, what)
    local g = mf.tensor(0.7, { dtype = x.dtype })
    local loss, gx, gw, gb = mf._linear_cross_entropy(g, x, w, b, target, o)
    local leaves = { x:detach():requires_grad_(), w:detach():requires_grad_(), b and b:detach():requires_grad_() }
    local y = nn.functional.linear(leaves[1], leaves[2], leaves[3])
    local want = mf.cross_entropy(y:reshape(-1, y:size(-1)), target:reshape(-1), o)
    want:backward(g)
    near(loss, want:detach(), what .. ': loss')
    near(gx, leaves[1].grad, what .. ': x')
    near(gw, leaves[2].grad, what .. ': w')
    if b then near(gb, leaves[3].grad, what .. ': b') else assert.equal(0, gb:numel()) end
  end

  local function randn(...) return mf.randn({ ... }, { dtype = mf.float64 }) end

  it('gives loss and gradients of a layer and cross_entropy', function()
    mf.manual_seed(1)
    local w, b = randn(8000, 5), randn(8000)
    local x, target = randn(300, 5), mf.randint(0, 8000, { 300 })
    check(x, w, nil, target, {}, 'plain')
    check(x, w, b, target, { reduction = 'sum', label_smoothing = 0.2 }, 'smooth')
    check(x:reshape(3, 100, 5), w, b, target:reshape(3, 100), { ignore_index = target[7]:item() }, 'ignored')
    check(randn(5, 300):transpose(0, 1), w[{ { 0, 70 } }], nil, mf.randint(0, 70, { 300 }), {}, 'strided')
    check(randn(300, 10)[{ {}, { 2, 7 } }], randn(5, 90):transpose(0, 1), nil, mf.randint(0, 90, { 300 }):int(), {},
      'int32')
  end)

  it('has the loss of nothing', function()
    local loss, gx, gw = mf._linear_cross_entropy(mf.tensor(1), mf.zeros(0, 3), mf.ones(4, 3), nil,
      mf.zeros({ 0 }, { dtype = mf.int64 }))
    assert.is_true(loss:item() ~= loss:item() and gx:numel() == 0 and mf.equal(gw, mf.zeros(4, 3)))
  end)

  it('names wrong labels', function()
    local ok, why = pcall(mf._linear_cross_entropy, mf.tensor(1), mf.ones(2, 3), mf.ones(4, 3), nil,
      mf.tensor({ 1, 4 }, { dtype = mf.int64 }))
    assert.is_false(ok)
    assert.truthy(why:find('target 4 at (1,) is out of range; legal are 0 to 3, or ignore_index -100', 1, true),
      tostring(why))
  end)
end)

describe('fuse_loss', function()
  local function fuse(text) return (mf._graph_pass(text, 'fuse_loss,dce')) end

  local before = [[
graph step
%%0 = input x: float32[2, 300, 64]
%%1 = input t: int64[600]
%%2 = capture w: float32[9000, 64]
%%3 = linear(%%0, %%2): float32[2, 300, 9000]
%%4 = reshape(%%3, size=[600, 9000]): float32[600, 9000]
%%5, %%6, %%7 = cross_entropy(%%4, %%1%s): float32[], float32[600], float32[]
%%8 = full(size=[], fill_value=1, dtype=float32): float32[]
%%9 = cross_entropy_backward(%%8, %%4, %%1, %%6, %%7%s): float32[600, 9000]
%%10 = reshape(%%9, size=[2, 300, 9000]): float32[2, 300, 9000]
%%11 = matmul(%%10, %%2): float32[2, 300, 64]
%%12 = linear_weight(%%10, %%0): float32[9000, 64]
return %%5, %%11, %%12%s
]]

  it('takes layer, loss and gradients', function()
    assert.equal([[
graph step
%0 = input x: float32[2, 300, 64]
%1 = input t: int64[600]
%2 = capture w: float32[9000, 64]
%3 = full(size=[], fill_value=1, dtype=float32): float32[]
%4, %5, %6, %7 = linear_cross_entropy(%3, %0, %2, none, %1, label_smoothing=0.5): float32[], float32[2, 300, 64], ]] ..
      [[float32[9000, 64], float32[0]
return %4, %5, %6
]], fuse(before:format(', label_smoothing=0.5', ', label_smoothing=0.5', '')))
  end)

  it('leaves logits that others read, and losses that differ from their gradient', function()
    for _, text in ipairs {
      before:format('', '', ', %4'), before:format('', '', ', %9'), before:format('', '', ', %6'),
      before:format(', ignore_index=3', '', ''),
      (before:format('', '', ''):gsub('%[9000, 64%]', '[9000, 640]'):gsub('%[2, 300, 64%]', '[2, 300, 640]'):gsub(
        '600', '620'):gsub('300', '310'):gsub('9000', '7000')),
    } do
      assert.is_nil(fuse(text):find('linear_cross_entropy', 1, true), text)
    end
  end)

  for name, bias in pairs { ['without a bias'] = false, ['with one'] = true } do
    it('trains as eager steps do, in float64, ' .. name, function()
      local function train(compiled)
        mf.manual_seed(4)
        local model = nn.Sequential(nn.Embedding(50, 6), nn.Linear(6, 6), nn.GELU(),
          nn.Linear(6, 8000, { bias = bias })):double()
        local opt = optim.AdamW(model:parameters(), { lr = 0.01 })
        local function step(x, y)
          opt:zero_grad()
          local logits = model(x)
          local loss = mf.cross_entropy(logits:reshape(-1, 8000), y:reshape(-1))
          loss:backward()
          opt:step()
          return loss
        end
        local run, losses = compiled and mf.compile(step) or step, {}
        for i = 1, 20 do
          mf.manual_seed(i)
          losses[i] = run(mf.randint(0, 50, { 3, 100 }), mf.randint(0, 8000, { 3, 100 })):item()
        end
        return losses, compiled and tostring(run)
      end
      local want = train(false)
      local got, text = train(true)
      assert.truthy(text:find('linear_cross_entropy', 1, true), text)
      for i = 1, 20 do assert(math.abs(want[i] - got[i]) <= 1e-9 * want[i], i) end
      assert(want[20] < want[1])
    end)
  end
end)
