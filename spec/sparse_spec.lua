-- Row-sparse tensors, as gradients of tables.
local mf = require 'moonflow'

local function rows(ids, values, n)
  return mf.rows(mf.tensor(ids, { dtype = mf.int64 }), mf.tensor(values), n)
end

-- sum(embedding(ids, w) * weight), whose gradient by w is known.
local function lookup(w, ids, weight, options)
  local o = { sparse = true }
  for k, v in pairs(options or {}) do o[k] = v end
  return (mf.embedding(mf.tensor(ids, { dtype = mf.int64 }), w, o) * mf.tensor(weight)):sum()
end

describe('row-sparse tensors', function()
  local r
  before_each(function() r = rows({ 2, 0, 2 }, { { 1, 2 }, { 3, 4 }, { 5, 6 } }, 4) end)

  it('have the whole shape, ids and values', function()
    assert.are.same({ 4, 2 }, { unpack(r.shape) })
    assert.is_true(r.is_rows)
    assert.are.same({ 2, 0, 2 }, r.ids:tolist())
    assert.are.same({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, r.values:tolist())
  end)

  it('become dense, equal ids adding up', function()
    assert.are.same({ { 3, 4 }, { 0, 0 }, { 6, 8 }, { 0, 0 } }, r:to_dense():tolist())
  end)

  it('merge equal ids, sorted', function()
    local c = r:coalesce()
    assert.are.same({ 0, 2 }, c.ids:tolist())
    assert.are.same({ { 3, 4 }, { 6, 8 } }, c.values:tolist())
    assert.is_true(rawequal(c, c:coalesce()))
    assert.are.same({ { 1, 2 }, { 3, 4 }, { 5, 6 } }, r.values:tolist())
  end)

  it('merge equal ids into as many rows in a compiled step', function()
    local f = mf.compile(function(ids, values)
      local c = mf.rows(ids, values, 4):coalesce()
      return c.ids, c.values
    end)
    local ids, values = f(mf.tensor({ 2, 0, 2, 0 }, { dtype = mf.int64 }), mf.tensor { { 1 }, { 2 }, { 3 }, { 5 } })
    assert.are.same({ 0, 2, 2, 2 }, ids:tolist())
    assert.are.same({ { 7 }, { 4 }, { 0 }, { 0 } }, values:tolist())
    ids, values = f(mf.tensor({ 3, 1, 0, 2 }, { dtype = mf.int64 }), mf.tensor { { 1 }, { 2 }, { 3 }, { 5 } })
    assert.are.same({ 0, 1, 2, 3 }, ids:tolist())
    assert.are.same({ { 3 }, { 2 }, { 5 }, { 1 } }, values:tolist())
    ids = f(mf.zeros({ 0 }, { dtype = mf.int64 }), mf.zeros(0, 1))
    assert.are.same({}, ids:tolist())
  end)

  it('merge many ids as a dense sum does', function()
    local ids = mf.randint(0, 100000, { 5000 }, { dtype = mf.int64 })
    local values = mf.randn(5000, 3)
    local g = mf.rows(ids, values, 100000)
    local want = mf.zeros(100000, 3):index_add(0, ids, values)
    assert.is_true(mf.allclose(want, g:coalesce():to_dense()))
    local merged = g:coalesce().ids:tolist()
    for i = 2, #merged do assert.is_true(merged[i - 1] < merged[i]) end
  end)

  it('add, scale, copy and empty themselves', function()
    local dense = r:to_dense()
    assert.are.same((dense + dense):tolist(), (r + r):to_dense():tolist())
    assert.is_true((r + r).is_rows)
    assert.are.same((dense + 1):tolist(), (r + mf.ones(4, 2)):tolist())
    assert.are.same((dense * 2):tolist(), (r * 2):to_dense():tolist())
    assert.are.same((dense * 0.5):tolist(), (r / 2):to_dense():tolist())
    assert.are.same((dense * -1):tolist(), (dense - r - r):tolist())
    assert.are.same((dense * 3):tolist(), mf.add(r, r, { alpha = 2 }):to_dense():tolist())
    assert.are.same((dense * 0):tolist(), (r - r):to_dense():tolist())
    assert.are.same((dense * 2):tolist(), r:clone():add_(r):to_dense():tolist())
    assert.are.same((-dense):tolist(), (-r):to_dense():tolist())
    local copy = r:clone()
    copy:mul_(3)
    assert.are.same((dense * 3):tolist(), copy:to_dense():tolist())
    assert.are.same(dense:tolist(), r:to_dense():tolist())
    assert.are.same((dense * 0):tolist(), copy:zero_():to_dense():tolist())
    assert.are.same((dense + 1):tolist(), mf.ones(4, 2):add_(r):tolist())
  end)

  it('say that their ids or values were freed', function()
    for _, part in ipairs { 'ids', 'values' } do
      local t = rows({ 1, 1 }, { { 1 }, { 2 } }, 3)
      t[part]:free()
      assert.are.equal('tensor(freed)', tostring(t))
      assert.has_error(function() t:coalesce() end)
      assert.has_error(function() t:to_dense() end)
    end
  end)

  it('neither have data nor can be that of another', function()
    local t = rows({ 0, 1 }, { { 1 }, { 2 } }, 3)
    assert.has_error(function() t.data = mf.ones(3, 1) end)
    assert.has_error(function() mf.ones(3, 1).data = t end)
    assert.are.same({ { 1 }, { 2 }, { 0 } }, t:to_dense():tolist())
  end)

  it('refuse what they cannot do', function()
    local function refused(f, text)
      local ok, err = pcall(f)
      assert.is_false(ok)
      assert.truthy(err:find(text, 1, true), err)
    end
    refused(function() return r + 1 end, 'row-sparse')
    refused(function() return r:exp() end, 'exp: takes no row-sparse tensor')
    refused(function() return r + mf.ones(3, 2) end, 'does not broadcast')
    refused(function() return rows({ 4 }, { { 1, 2 } }, 4) end, 'rows: ids[0] is 4; legal are 0 to 3')
    refused(function() return rows({ -1 }, { { 1, 2 } }, 4) end, 'rows: ids[0] is -1')
    refused(function() return rows({ 1, 2 }, { { 1, 2 } }, 4) end, 'there are 2 ids')
    refused(function() return r:item() end, 'item')
    refused(function() return r:tolist() end, 'row-sparse')
  end)
end)

describe('row-sparse gradients', function()
  local w
  before_each(function() w = mf.ones(5, 2):requires_grad_() end)

  it('come from embeddings', function()
    lookup(w, { 1, 3, 1 }, { { 1, 2 }, { 3, 4 }, { 5, 6 } }):backward()
    assert.is_true(w.grad.is_rows)
    assert.are.same({ { 0, 0 }, { 6, 8 }, { 0, 0 }, { 3, 4 }, { 0, 0 } }, w.grad:to_dense():tolist())
  end)

  it('leave padding out', function()
    lookup(w, { 1, 3, 1 }, { { 1, 2 }, { 3, 4 }, { 5, 6 } }, { padding_idx = 1 }):backward()
    assert.are.same({ 3 }, w.grad.ids:tolist())
  end)

  it('accumulate with rows and with dense ones', function()
    lookup(w, { 0 }, { { 1, 1 } }):backward()
    lookup(w, { 0, 4 }, { { 1, 1 }, { 2, 2 } }):backward()
    assert.is_true(w.grad.is_rows)
    assert.are.same({ { 2, 2 }, { 0, 0 }, { 0, 0 }, { 0, 0 }, { 2, 2 } }, w.grad:to_dense():tolist())
    w:sum():backward()
    assert.is_false(w.grad.is_rows)
    lookup(w, { 1 }, { { 7, 7 } }):backward()
    assert.are.same({ { 3, 3 }, { 8, 8 }, { 1, 1 }, { 1, 1 }, { 3, 3 } }, w.grad:tolist())
  end)

  it('meet dense ones within one pass', function()
    (lookup(w, { 0 }, { { 1, 1 } }) + w:sum()):backward()
    assert.are.same({ { 2, 2 }, { 1, 1 }, { 1, 1 }, { 1, 1 }, { 1, 1 } }, w.grad:tolist())
  end)

  it('pass through ops and hooks', function()
    local seen
    w:register_hook(function(g)
      seen = g.is_rows
      return g * 10
    end)
    lookup(w, { 2 }, { { 1, 2 } }):backward()
    assert.is_true(seen)
    assert.are.same({ 10, 20 }, w.grad:to_dense():tolist()[3])
    w.grad = nil
    lookup(w * 3, { 2 }, { { 1, 2 } }):backward()
    assert.are.same({ 30, 60 }, w.grad:tolist()[3])
  end)

  it('belong to their leaf alone, with their ids', function()
    local leaf, ids, seen = mf.zeros(5, 2):requires_grad_(), mf.tensor({ 1, 3 }, { dtype = mf.int64 }), nil
    leaf:register_hook(function(g) seen = g end)
    mf.embedding(ids, leaf, { sparse = true }):sum():backward()
    leaf.grad:mul_(10)
    ids:fill_(4)
    assert.are.same({ 1, 3 }, leaf.grad.ids:tolist())
    assert.are.same({ { 10, 10 }, { 10, 10 } }, leaf.grad.values:tolist())
    assert.are.same({ { 1, 1 }, { 1, 1 } }, seen.values:tolist())
  end)

  it('are clipped by their norm, and train', function()
    lookup(w, { 1, 1 }, { { 3, 0 }, { 0, 4 } }):backward()
    local norm = mf.nn.utils.clip_grad_norm_({ w }, 1)
    assert.is_true(math.abs(norm:item() - 5) < 1e-5)
    mf.optim.SGD({ w }, { lr = 1 }):step()
    assert.is_true(mf.allclose(mf.tensor { 1 - 0.6, 1 - 0.8 }, w:detach()[1], { atol = 1e-5 }))
    assert.are.same({ 1, 1 }, w:tolist()[1])
  end)
end)
