-- Ops that the library's own Lua calls with what it has checked itself are reachable by anyone as
-- mf._NAME: they refuse what would lead their kernels out of memory, and say who and what.
local mf = require 'moonflow'

local function refused(name, what, ...)
  local ok, text = pcall(mf['_' .. name] or mf[name] or mf.Tensor[name], ...)
  assert.is_false(ok, name .. ' accepts a wrong ' .. what)
  assert.truthy(text:find(name .. ': ', 1, true), text)
  assert.truthy(text:find(what, 1, true), text)
end

local function ids(...) return mf.tensor({ ... }):long() end
local x, long = mf.ones(2, 3), mf.ones(1):expand(2 ^ 20)

describe('ops refuse', function()
  it('a gradient of another shape', function()
    local deep = mf.ones(1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2)
    for _, g in ipairs { long, mf.ones(3), mf.ones(2, 3, 1), mf.ones(2, 4), deep } do
      refused('softmax_backward', 'y', g, x, -1)
      refused('log_softmax_backward', 'y', g, x, 0)
      refused('cumprod_backward', 'g', g, x, 0)
      refused('layer_norm_backward', 'g', g, x, { 3 }, nil, true, 1e-5)
      refused('rms_norm_backward', 'g', g, x, { 3 }, nil, true, 1e-5)
      refused('group_norm_backward', 'g', g, x, 1, nil, true, 1e-5)
      refused('batch_norm_backward', 'g', g, x, mf.ones(3), mf.ones(3), nil, true, true)
      refused('gather_backward', 'g', g, mf.zeros({ 2, 3 }, { dtype = mf.int64 }), { 2, 3 }, 1)
      refused('index_backward', 'g', g, { ids(0, 1) }, { 2, 3 }, { 0 })
      refused('slice_backward', g.ndim == 2 and 'g' or 'size', g, { 4, 3 }, 0, 1, 1)
      refused('diagonal_backward', 'g', g, { 2, 3 }, 0, 0, 1)
      refused('pad_backward', g.ndim == 2 and 'g' or 'size', g, { 2, 3 }, { 1, 1 }, 'reflect')
      refused('embedding_backward', 'g', g, mf.zeros({ 2, 2 }, { dtype = mf.int64 }), 5)
    end
    local q = mf.ones(1, 2, 3, 4)
    refused('attention_backward', 'g', q, q, q, mf.ones(1, 2, 3, 1), q, mf.ones(1, 2, 3), nil, { scale = 1 })
    refused('attention_backward', 'lse', q, q, q, q, q, mf.ones(1, 2, 2), nil, { scale = 1 })
  end)

  it('values of channels that do not fit', function()
    for _, v in ipairs { mf.ones(2), mf.ones(1, 3), mf.ones({ 3 }, { dtype = mf.int64 }) } do
      refused('batch_norm_backward', 'mean', x, x, v, mf.ones(3), nil, true, true)
      refused('batch_norm_backward', 'rstd', x, x, mf.ones(3), v, nil, true, true)
      refused('batch_norm_backward', 'weight', x, x, mf.ones(3), mf.ones(3), v, true, true)
    end
  end)

  it('dims and places outside', function()
    refused('slice_backward', 'dim', x, { 4, 3 }, 2, 0, 1)
    refused('slice_backward', 'start', x, { 4, 3 }, 0, -1, 1)
    refused('slice_backward', 'start', x, { 4, 3 }, 0, 5, 1)
    refused('slice_backward', 'size', x, { 4, 3 }, 0, 0, 4)
    refused('slice_backward', 'size', x, { 4, 3 }, 0, 0, 2 ^ 53)
    refused('diagonal_backward', 'dim1', mf.ones(2), { 2, 3 }, 0, 2 ^ 31, 1)
    refused('diagonal_backward', 'dim1', mf.ones(2), { 2, 3 }, 0, 1, 1)
    refused('index_backward', 'dims', x, { ids(0, 1) }, { 2, 3 }, { 2 })
    refused('index_backward', 'indices', x, { ids(0, 1) }, { 2, 3 }, { 0, 1 })
    refused('index_select_backward', 'dim', x, ids(0, 1), { 2, 3 }, 2)
    refused('index_select_backward', 'index', x, ids(0, 2), { 2, 3 }, 0)
    refused('index_select_backward', 'g', x, ids(0, 1, 1), { 2, 3 }, 0)
    refused('embedding_backward', 'padding_idx', x, ids(0, 1), 5, { padding_idx = 2 ^ 31 })
    refused('embedding_backward', 'num', x, ids(0, 1), -1)
    refused('pad_backward', 'mode', x, { 2, 3 }, { 0, 0 }, 'constant')
    refused('masked_select_backward', 'mask', mf.ones(3), mf.ones({ 2, 2, 3 }, { dtype = mf.bool }), { 2, 3 })
    refused('sum_to', 'size', x, { 2, 2 })
    refused('sum_to', 'size', x, { 1, 2, 3 })
    refused('spread', 'x', x, { 4, 4, 3 }, { 0 }, false)
    refused('spread', 'x', x, { 9, 3 }, { 0 }, true)
    refused('dropout_backward', 'p', x, 1.5)
    refused('index_fill', 'value', mf.ones(3), 0, ids(0), mf.ones(1, 1, 1))
  end)

  it('memory that there is not', function()
    refused('slice_base', 'base_stride', x, { 3 }, { 2 }, { 1 }, 0)
    refused('slice_base', 'base_stride', x, { 6, 1 }, { 2 }, { 1 }, 0)
    refused('slice_base', 'size', x, { 3, 1 }, { 2, 2 }, { 1 }, 0)
    refused('slice_base', 'stride', x, { 3, 1 }, { 2 }, { 1 }, 5)
    refused('slice_base', 'stride', x, { 3, 1 }, { 2 }, { -1 }, 0)
    refused('slice_base', 'stride', x, { 3, 1 }, { 3 }, { 2 ^ 53 }, 0)
    refused('scatter_base', 'src', x, mf.ones(3), { 3, 1 }, { 2 }, { 1 }, 0)
    refused('scatter_base', 'stride', x, mf.ones(2), { 3, 1 }, { 2 }, { 9 }, 0)
    refused('strided_add', 'stride', x, { 2 }, { -2 ^ 53 }, 0, { 3, 1 }, 0, 1)
    refused('strided_add', 'g_stride', x, { 2 }, { 1 }, 0, { 3 }, 0, 1)
    refused('strided_add', 'g_stride', x, { 2 }, { 1 }, 0, { -3, 1 }, 0, 1)
    refused('strided_add', 'stride', x, { 2 }, { 1 }, -5, { 3, 1 }, 0, 1)
  end)

  it('scratch above the limit', function()
    mf.set_memory_limit(2 ^ 28)
    local ok, text = pcall(mf._strided_add, x, { 2 }, { 2 ^ 32 }, 0, { 3, 1 }, 0, 1)
    mf.set_memory_limit(0)
    assert.is_false(ok)
    assert.truthy(text:find('strided_add: out of memory', 1, true), text)
  end)

  it('more elements or views than can be counted', function()
    refused('expand', 'too large', mf.ones(1), { 2 ^ 53, 2 })
    refused('reshape', 'too large', mf.ones(0, 3), { 0, 2 ^ 40, 2 ^ 40 })
    refused('unbind', 'at most', mf.ones(1):expand(2 ^ 40), 0)
    refused('split', 'at most', mf.ones(1):expand(2 ^ 40), 1)
    refused('chunk', 'at most', mf.ones(0), 2 ^ 40)
    local many = mf.ones(1):expand(30000):unbind()
    assert.are.equal(30000, #many)
  end)

  it('counts that would be loops without end', function()
    refused('tensordot', 'dims', x, x:t(), 2 ^ 60)
    refused('tensordot', 'dims', x, x:t(), -1)
    refused('tensordot', 'dims', x, x:t(), 'all')
    local n = mf.full({ 3 }, 2 ^ 53, { dtype = mf.int64 })
    refused('repeat_interleave', 'repeats', mf.ones(3), n)
    assert.are.same({ 1, 1, 3, 3, 3 }, mf.tensor({ 1, 2, 3 }):repeat_interleave(ids(2, 0, 3)):tolist())
    assert.are.same({ 1, 1, 2, 2 }, mf.tensor({ 1, 2 }):repeat_interleave(ids(2)):tolist())
    assert.are.same({}, mf.tensor({ 1, 2 }):repeat_interleave(ids(0, 0)):tolist())
  end)

  it('calls without what they need', function()
    mf._zero_all_ {} -- nothing to do
    for _ = 1, 20 do
      assert.is_false(pcall(mf._with_gradients, {}))
      assert.is_false(pcall(mf._with_gradients, {}, 1))
      assert.is_false(pcall(mf._untraced))
    end
    for _, name in ipairs { 'merge_ids', 'merge_ids_padded' } do
      local ok, text = pcall(mf['_' .. name], ids(1, -5))
      assert.is_false(ok)
      assert.truthy(text:find(name .. ': x[1] is -5', 1, true), text)
    end
  end)

  -- Windows between whose elements the image is: no element is there to choose. PyTorch has -inf.
  it('nothing of a window that lies in the padding', function()
    local image = mf.ones(1, 1, 4, 4):requires_grad_()
    local y = mf.max_pool2d(image, { kernel_size = 2, stride = 1, padding = 1, dilation = 5 })
    assert.are.equal(-math.huge, y:item())
    y:sum():backward()
    assert.are.equal(0, image.grad:abs():sum():item())
  end)
end)

-- A build for some instruction sets alone: kernels find their own record where the table has it.
describe('collect.lua', function()
  local function read(path)
    local f = assert(io.open(path))
    local text = f:read '*a'
    f:close()
    return text
  end
  it('counts the places of instruction sets in the order given', function()
    local dir = os.tmpname()
    os.remove(dir)
    for list, want in pairs { ['v3'] = { v3 = 0 }, ['v2,v4'] = { v2 = 0, v4 = 1 }, ['base'] = { base = 0 } } do
      local command = 'mkdir -p %s/op %s/bind && luajit src/op/collect.lua %s --isas %s src/op/softmax.c 2>&1'
      local pipe = io.popen(command:format(dir, dir, dir, list))
      local text = pipe:read '*a'
      pipe:close()
      assert.are.equal('', text)
      local ids_h, table_c = read(dir .. '/op/op_ids.h'), read(dir .. '/op/op_table.c')
      for isa, place in pairs(want) do
        assert.truthy(ids_h:find(('OP_INDEX_%s = %d'):format(isa, place), 1, true), ids_h)
        assert.truthy(table_c:find('&op_softmax__' .. isa, 1, true))
      end
    end
    os.execute('rm -r ' .. dir)
  end)
end)
