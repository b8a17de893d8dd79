-- The pass fuse_attention, and the ops that it makes, against attention that is written out.
local mf = require 'moonflow'

local function near(a, b, what)
  assert(a.shape == b.shape, what)
  assert(mf.allclose(a, b, { rtol = 1e-9, atol = 1e-12, equal_nan = true }), what)
end

describe('fuse_attention', function()
  local function fuse(text) return (mf._graph_pass(text, 'fuse_attention,dce')) end

  it('takes products, scale, mask, softmax and dropout, forward and backward', function()
    assert.equal([[
graph step
%0 = input q: float32[2, 3, 8, 4]
%1 = input k: float32[2, 3, 8, 4]
%2 = input v: float32[2, 3, 8, 4]
%3 = input g: float32[2, 3, 8, 4]
%4 = input m: bool[8, 8]
%5 = logical_not(%4): bool[8, 8]
%6, %7 = drop_attention(%0, %1, %2, %5, p=0.1, scale=0.5, fill=-inf, generator=0): float32[2, 3, 8, 4], ]] ..
      [[float32[2, 3, 8, 2]
%8, %9, %10 = drop_attention_backward(%0, %1, %2, %3, %6, %7, %5, p=0.1, scale=0.5, fill=-inf, generator=0): ]] ..
      [[float32[2, 3, 8, 4], float32[2, 3, 8, 4], float32[2, 3, 8, 4]
%11 = transpose(%9, dim0=2, dim1=3): float32[2, 3, 4, 8]
%12 = transpose(%11, dim0=2, dim1=3): float32[2, 3, 8, 4]
return %6, %8, %12, %10
]], fuse [[
graph step
%0 = input q: float32[2, 3, 8, 4]
%1 = input k: float32[2, 3, 8, 4]
%2 = input v: float32[2, 3, 8, 4]
%3 = input g: float32[2, 3, 8, 4]
%4 = input m: bool[8, 8]
%5 = transpose(%1, dim0=2, dim1=3): float32[2, 3, 4, 8]
%6 = matmul(%0, %5): float32[2, 3, 8, 8]
%7 = number 2: int64
%8 = div(%6, %7): float32[2, 3, 8, 8]
%9 = number -inf: float64
%10 = masked_fill(%8, %4, %9): float32[2, 3, 8, 8]
%11 = softmax(%10, dim=3): float32[2, 3, 8, 8]
%12 = dropout(%11, p=0.1, generator=0): float32[2, 3, 8, 8]
%13 = matmul(%12, %2): float32[2, 3, 8, 4]
%14 = transpose(%2, dim0=2, dim1=3): float32[2, 3, 4, 8]
%15 = matmul(%3, %14): float32[2, 3, 8, 8]
%16 = transpose(%12, dim0=2, dim1=3): float32[2, 3, 8, 8]
%17 = matmul(%16, %3): float32[2, 3, 8, 4]
%18 = dropout_backward(%15, p=0.1, generator=0): float32[2, 3, 8, 8]
%19 = softmax_backward(%18, %11, dim=3): float32[2, 3, 8, 8]
%20 = number 0: int64
%21 = masked_fill(%19, %4, %20): float32[2, 3, 8, 8]
%22 = div(%21, %7): float32[2, 3, 8, 8]
%23 = transpose(%5, dim0=2, dim1=3): float32[2, 3, 8, 4]
%24 = matmul(%22, %23): float32[2, 3, 8, 4]
%25 = transpose(%0, dim0=2, dim1=3): float32[2, 3, 4, 8]
%26 = matmul(%25, %22): float32[2, 3, 4, 8]
%27 = transpose(%26, dim0=2, dim1=3): float32[2, 3, 8, 4]
return %13, %24, %27, %17
]])
  end)

  local forward = [[
graph step
%%0 = input q: float32[6, 8, 4]
%%1 = input k: float32[6, 4, 8]
%%2 = input v: float32[6, 8, 4]
%%3 = input m: float32[8, 8]
%%4 = matmul(%%0, %%1): float32[6, 8, 8]
%%5 = add(%%3, %%4): float32[6, 8, 8]
%%6 = softmax(%%5, dim=%d): float32[6, 8, 8]
%%7 = matmul(%%6, %%2): float32[6, 8, 4]
return %%7%s
]]
  it('takes heads in one dim, with a mask that is added first', function()
    assert.equal([[
graph step
%0 = input q: float32[6, 8, 4]
%1 = input k: float32[6, 4, 8]
%2 = input v: float32[6, 8, 4]
%3 = input m: float32[8, 8]
%4 = transpose(%1, dim0=1, dim1=2): float32[6, 8, 4]
%5, %6 = plain_attention(%0, %4, %2, %3, scale=1, fill=-inf): float32[6, 8, 4], float32[6, 8, 2]
return %5
]], fuse(forward:format(2, '')))
  end)

  local twice = [[
graph step
%0 = input q: float32[6, 8, 4]
%1 = input k: float32[6, 4, 8]
%2 = input v: float32[6, 8, 4]
%3 = input m: float32[8, 8]
%4 = matmul(%0, %1): float32[6, 8, 8]
%5 = add(%4, %3): float32[6, 8, 8]
%6 = add(%5, %3): float32[6, 8, 8]
%7 = softmax(%6, dim=2): float32[6, 8, 8]
%8 = matmul(%7, %2): float32[6, 8, 4]
return %8
]]
  it('leaves weights that others read, softmax along other dims, and two masks', function()
    for _, text in ipairs { forward:format(2, ', %6'), forward:format(1, ''), forward:format(2, ', %4'),
      twice } do
      assert.equal((mf._graph_pass(text, 'dce')), fuse(text))
    end
  end)
end)

-- -- Programs -------------------------------------------------------------------------------------

local function scores(q, k) return mf.matmul(q, k:transpose(-2, -1)) end

-- The spellings: a function of q, k, v and a mask of ones where something is seen.
local spellings = {
  ['scaled behind'] = function(q, k, v) return mf.softmax(scores(q, k) * 0.5, { dim = -1 }):matmul(v) end,
  ['scaled before'] = function(q, k, v) return mf.softmax(scores(q * 0.5, k), { dim = -1 }):matmul(v) end,
  ['by permuted heads'] = function(q, k, v)
    if q.ndim == 3 then return mf.softmax(mf.matmul(q, k:permute(0, 2, 1)) / 2, { dim = -1 }):matmul(v) end
    local turned = k:transpose(1, 2):permute(0, 2, 3, 1) -- from the heads as they lie
    return mf.softmax(mf.matmul(q, turned) / 2, { dim = -1 }):matmul(v)
  end,
  divided = function(q, k, v) return mf.softmax(scores(q, k) / 2, { dim = -1 }):matmul(v) end,
  ['masked_fill'] = function(q, k, v, m)
    return mf.softmax((scores(q, k) / 2):masked_fill(m:eq(0), -1e9), { dim = -1 }):matmul(v)
  end,
  ['masked_fill by -inf'] = function(q, k, v, m)
    return mf.softmax((scores(q, k) / 2):masked_fill(m:eq(0), -math.huge), { dim = -1 }):matmul(v)
  end,
  where = function(q, k, v, m)
    return mf.softmax(mf.where(m:gt(0), scores(q, k) / 2, -3), { dim = -1 }):matmul(v)
  end,
  ['where hidden'] = function(q, k, v, m)
    return mf.softmax(mf.where(m:eq(0), -1e4, scores(q, k) / 2), { dim = -1 }):matmul(v)
  end,
  added = function(q, k, v, m) return mf.softmax(scores(q, k) * 0.5 + (1 - m) * -1e9, { dim = -1 }):matmul(v) end,
  dropped = function(q, k, v, m)
    return mf.dropout(mf.softmax(scores(q, k) * 0.5 + m, { dim = -1 }), 0.3):matmul(v)
  end,
  ['dropped and causal'] = function(q, k, v)
    local hidden = mf.ones(q:size(-2), k:size(-2), { dtype = mf.bool }):triu(1)
    return mf.dropout(mf.softmax((scores(q, k) * 0.5):masked_fill(hidden, -math.huge), { dim = -1 }), 0.3):matmul(v)
  end,
  causal = function(q, k, v)
    local seen = mf.ones(q:size(-2), k:size(-2), { dtype = q.dtype }):tril()
    return mf.softmax((scores(q, k) * 0.5):masked_fill(seen:eq(0), -math.huge), { dim = -1 }):matmul(v)
  end,
  ['of the library, with dropout'] = function(q, k, v, m)
    return mf.scaled_dot_product_attention(q, k, v, { attn_mask = m:gt(0), dropout_p = 0.3 })
  end,
  ['of the library, causal, with dropout'] = function(q, k, v)
    return mf.scaled_dot_product_attention(q, k, v, { is_causal = true, dropout_p = 0.3 })
  end,
}

-- Results and gradients of two calls, eager or compiled.
local function results(f, mask, shape, options)
  mf.manual_seed(3)
  local w = mf.randn({ 12, 12 }, { dtype = mf.float64 }):requires_grad_()
  local function step(x)
    local parts = {}
    for i, t in ipairs(x:matmul(w):chunk(3, -1)) do
      parts[i] = #shape == 3 and t or t:view(shape[1], shape[2], 2, 2):transpose(1, 2)
    end
    local y = f(parts[1], parts[2], parts[3], mask)
    local loss = (y * y:detach():cos()):sum()
    loss:backward()
    local g = w.grad
    w.grad = nil
    return loss, y, g
  end
  local run, list = options and mf.compile(step, options) or step, {}
  for call = 1, 2 do
    mf.manual_seed(call)
    local x = mf.randn({ shape[1], shape[2], 12 }, { dtype = mf.float64 })
    for _, t in ipairs { run(x) } do list[#list + 1] = t:detach() end
    list[#list + 1] = mf.get_rng_state()
  end
  return list, options and tostring(run)
end

describe('attention that is written out', function()
  for name, f in pairs(spellings) do
    it('is one op, as eager steps compute it: ' .. name, function()
      for _, shape in ipairs { { 2, 70, 4 }, { 2, 5 } } do
        local n = shape[2]
        local mask = mf.ones({ n, n }, { dtype = mf.float64 }):tril()
        mask[1] = 0 -- a row of which nothing is seen
        local want = results(f, mask, shape)
        for _, passes in ipairs { 'all', 'alone' } do
          local got, text = results(f, mask, shape, passes == 'all' and {} or { passes = { fuse_attention = true } })
          for i = 1, #want do near(want[i], got[i], name .. ', ' .. passes .. ', ' .. i) end
          assert.truthy(text:find('attention_backward', 1, true), text)
          assert.equal(name:find 'causal' ~= nil, text:find('is_causal=true', 1, true) ~= nil, text)
        end
      end
    end)
  end

  it('is left alone when its mask wants a gradient', function()
    local bias = mf.zeros(4, 4):requires_grad_()
    local run = mf.compile(function(q)
      local y = mf.softmax(scores(q, q) + bias, { dim = -1 }):matmul(q):sum()
      y:backward()
      local g = bias.grad
      bias.grad = nil
      return g
    end)
    run(mf.randn(2, 4, 3))
    assert.is_nil(tostring(run):find('attention(', 1, true))
  end)

  it('draws by the place in the whole batch', function()
    local function step(x)
      return mf.dropout(mf.softmax(scores(x, x), { dim = -1 }), 0.5):matmul(x)
    end
    local x = mf.randn({ 4, 2, 6, 3 }, { dtype = mf.float64 })
    mf.manual_seed(9)
    local want = step(x)
    mf.manual_seed(9)
    local run = mf.compile(step, { gradient_accumulation_steps = 2 })
    near(want, run(x), 'in micro-batches')
    assert.truthy(tostring(run):find('drop_attention', 1, true))
  end)
end)
