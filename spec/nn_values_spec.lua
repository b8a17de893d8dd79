-- Layers and losses against PyTorch (spec/nn/generate.py): names of the state, results, gradients by
-- inputs and parameters, buffers after the call, and how modules print. Then what no fixture can hold:
-- initial values, dropout, errors.
local mf = require 'moonflow'
local nn = mf.nn
local cases, tensors = {}, {}
for _, file in ipairs { 'spec/nn/layers', 'spec/nn/later' } do
  for _, case in ipairs(dofile(file .. '.lua')) do cases[#cases + 1] = case end
  for key, t in pairs(mf.load(file .. '.safetensors')) do tensors[key] = t end
end

local function close(what, got, want)
  assert(got, what .. ' is missing')
  assert.equal(tostring(want.dtype), tostring(got.dtype), what)
  assert.equal(tostring(want.shape), tostring(got.shape), what)
  got, want = got:detach():double(), want:double()
  local off = (got - want):abs() - (want:abs() * 1e-4 + 2e-5)
  local same = got:eq(want):logical_or(off:le(0)):logical_or(got:isnan():logical_and(want:isnan()))
  assert(same:all():item(), ('%s: %s, should be %s'):format(what, tostring(got), tostring(want)))
end

-- (out * cos(0.5 k)):sum(), k being the element's place.
local function weighed(out)
  return (out * (mf.arange(out:numel()):float() * 0.5):cos():view(out.shape)):sum()
end

-- What the file has under NAME/PART/, by the rest of the name.
local function part(name, what)
  local found, prefix = {}, name .. '/' .. what .. '/'
  for key, t in pairs(tensors) do
    if key:sub(1, #prefix) == prefix then found[key:sub(#prefix + 1)] = t end
  end
  return found
end

local function make(case)
  local m = assert(loadstring('local nn, tensors = ... return ' .. case.lua, '=' .. case.name))(nn, tensors)
  m:load_state_dict(part(case.name, 'state'))
  return m:train(not case.eval)
end

local function inputs_of(case)
  local list = {}
  for k = 0, case.inputs - 1 do
    local x = tensors[('%s/in/%d'):format(case.name, k)]:clone()
    list[k + 1] = x:is_floating_point() and x:requires_grad_() or x
  end
  local o = loadstring('return {' .. case.options .. '}')()
  for _, key in ipairs(case.named) do o[key] = tensors[case.name .. '/in/' .. key] end
  if next(o) then list[#list + 1] = o end
  return list
end

-- What a call returns, with what is in tables.
local function flat(...)
  local list = {}
  for k = 1, select('#', ...) do
    local value = select(k, ...)
    if mf.is_tensor(value) then list[#list + 1] = value
    else
      for _, t in ipairs(value) do list[#list + 1] = t end
    end
  end
  return list
end

local function call_of(case)
  return assert(loadstring('local m, a, b, c = ... return ' .. case.call, '=' .. case.name))
end

local function check(case)
  local m, inputs, outs = make(case), inputs_of(case), nil
  for _ = 1, case.calls do outs = case.call and flat(call_of(case)(m, unpack(inputs))) or { m(unpack(inputs)) } end
  assert.equal(case.outs, #outs)
  local loss
  for k, out in ipairs(outs) do
    close('output ' .. k - 1, out, tensors[('%s/out/%d'):format(case.name, k - 1)])
    loss = loss and loss + weighed(out) or weighed(out)
  end
  if loss.requires_grad then loss:backward() end
  local wanted = part(case.name, 'grad')
  for k, x in ipairs(inputs) do
    local want = wanted['in/' .. k - 1]
    if want then close('the gradient by input ' .. k - 1, x.grad, want) end
  end
  for name, p in m:named_parameters() do
    local g = p.grad
    if wanted[name] then close('the gradient by ' .. name, g and g.is_rows and g:to_dense() or g, wanted[name]) end
  end
  local after = part(case.name, 'after')
  for name, b in m:named_buffers() do
    close('the buffer ' .. name, b, after[name])
    after[name] = nil
  end
  assert.is_nil((next(after)))
end

describe('as PyTorch:', function()
  for _, case in ipairs(cases) do
    it(case.name, function()
      check(case)
      -- where versions of PyTorch differ, and numbers of Python and Lua
      local text = case.text:gsub('NonDynamicallyQuantizableLinear', 'Linear'):gsub('(%d)%.0([,)])', '%1%2')
      text = text:gsub('(affine=%a+)(,?[^)\n]*), bias=%a+', '%1%2'):gsub('(affine=%a+), bias=%a+', '%1')
      assert.equal(text, tostring(make(case)))
    end)
  end
end)

-- -- Initial values -------------------------------------------------------------------------------

-- Uniform in [-bound, bound]: it comes near the bounds, never beyond, and has their variance.
local function uniform(t, bound)
  local n, most = t:numel(), t:abs():max():item()
  assert(most <= bound and most > bound * (1 - 20 / n), most)
  local variance = t:detach():double():square():mean():item()
  assert.near(bound ^ 2 / 3, variance, 5 * bound ^ 2 * math.sqrt(4 / 45 / n))
end

local function normal(t, std)
  local n = t:numel()
  t = t:detach():double()
  assert.near(0, t:mean():item(), 5 * std / math.sqrt(n))
  assert.near(std ^ 2, t:square():mean():item(), 5 * std ^ 2 * math.sqrt(2 / n))
end

describe('initial values', function()
  before_each(function() mf.manual_seed(11) end)

  it('of layers are as PyTorch has them', function()
    local linear = nn.Linear(100, 300)
    uniform(linear.weight, 1 / 10)
    uniform(linear.bias, 1 / 10)
    local conv = nn.Conv2d(8, 200, { 3, 5 }, { groups = 2 })
    uniform(conv.weight, 1 / math.sqrt(4 * 15))
    uniform(conv.bias, 1 / math.sqrt(4 * 15))
    local transposed = nn.ConvTranspose1d(8, 200, 5, { groups = 2 })
    uniform(transposed.weight, 1 / math.sqrt(100 * 5))
    uniform(transposed.bias, 1 / math.sqrt(100 * 5))
    for _, p in ipairs(nn.LSTM(50, 25):parameters()) do uniform(p, 1 / 5) end
    normal(nn.Embedding(100, 50).weight, 1)
    local padded = nn.Embedding(10, 4, { padding_idx = 3 })
    assert.same({ 0, 0, 0, 0 }, padded.weight[3]:tolist())
    local mha = nn.MultiheadAttention(64, 4)
    uniform(mha.in_proj_weight, math.sqrt(6 / (64 + 192)))
    uniform(mha.out_proj.weight, 1 / 8)
    assert.equal(0, mha.in_proj_bias:abs():max():item())
    assert.equal(0, mha.out_proj.bias:abs():max():item())
    local cross = nn.MultiheadAttention(64, 4, { kdim = 100, vdim = 50 })
    uniform(cross.k_proj_weight, math.sqrt(6 / 164))
    uniform(cross.v_proj_weight, math.sqrt(6 / 114))
    for _, norm in ipairs { nn.BatchNorm2d(5), nn.LayerNorm(5), nn.GroupNorm(1, 5), nn.RMSNorm(5) } do
      assert.same({ 1, 1, 1, 1, 1 }, norm.weight:tolist())
      if norm.bias then assert.same({ 0, 0, 0, 0, 0 }, norm.bias:tolist()) end
    end
    local bn = nn.BatchNorm1d(2)
    assert.same({ { 0, 0 }, { 1, 1 }, 0 },
      { bn.running_mean:tolist(), bn.running_var:tolist(), bn.num_batches_tracked:item() })
    assert.equal(0.25, nn.PReLU().weight:item())
  end)

  it('of nn.init', function()
    local t = mf.empty(200, 50)
    uniform(nn.init.uniform_(t, -2, 2), 2)
    normal(nn.init.normal_(t, 0, 3), 3)
    uniform(nn.init.xavier_uniform_(t), math.sqrt(6 / 250))
    uniform(nn.init.xavier_uniform_(t, 2), 2 * math.sqrt(6 / 250))
    normal(nn.init.xavier_normal_(t, { gain = 0.5 }), 0.5 * math.sqrt(2 / 250))
    uniform(nn.init.kaiming_uniform_(t), math.sqrt(2) * math.sqrt(3 / 50))
    uniform(nn.init.kaiming_uniform_(t, { a = math.sqrt(5) }), math.sqrt(1 / 50))
    normal(nn.init.kaiming_normal_(t, { mode = 'fan_out', nonlinearity = 'relu' }), math.sqrt(2 / 200))
    assert.same({ { 1, 0, 0 }, { 0, 1, 0 } }, nn.init.eye_(mf.empty(2, 3)):tolist())
    assert.same({ 7, 7 }, nn.init.constant_(mf.empty(2), 7):tolist())
    local cut = nn.init.trunc_normal_(t, { std = 1, a = -0.5, b = 1 })
    assert(cut:min():item() >= -0.5 and cut:max():item() <= 1)
    for _, shape in ipairs { { 20, 30 }, { 30, 20 }, { 10, 4, 5 } } do
      local q = nn.init.orthogonal_(mf.empty(shape), 2):flatten(1)
      local gram = shape[1] <= q:size(1) and q:matmul(q:t()) or q:t():matmul(q)
      assert.is_true(mf.allclose(gram, mf.eye(gram:size(0)) * 4, { atol = 1e-5 }))
    end
    assert.equal(5 / 3, nn.init.calculate_gain 'tanh')
    assert.near(math.sqrt(2 / 1.04), nn.init.calculate_gain('leaky_relu', 0.2), 1e-12)
    local conv = mf.empty(100, 20, 3, 3)
    uniform(nn.init.xavier_uniform_(conv), math.sqrt(6 / (9 * 120)))
    local p = nn.Parameter(mf.ones(2))
    assert.equal(p, nn.init.zeros_(p))
    assert.is_true(p.requires_grad)
    assert.has_error(function() nn.init.xavier_uniform_(mf.empty(3)) end)
    assert.has_error(function() nn.init.zeros_(3) end)
  end)
end)

describe('lazy layers', function()
  it('learn their sizes from the first input', function()
    mf.manual_seed(2)
    local net = nn.Sequential(nn.LazyConv2d(4, 3, { groups = 2 }), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(5))
    assert.equal('LazyLinear(in_features=0, out_features=5, bias=True)', tostring(net[3]))
    assert.equal(6, #net:parameters())
    local optimizer = mf.optim.SGD(net:parameters(), { lr = 0.1 })
    local y = net(mf.randn(2, 6, 5, 5))
    assert.same({ 2, 5 }, { unpack(y.shape) })
    assert.equal('Linear(in_features=36, out_features=5, bias=True)', tostring(net[3]))
    assert.same({ 4, 3, 3, 3 }, { unpack(net[0].weight.shape) })
    assert.same({ 4 }, { unpack(net[1].running_mean.shape) })
    uniform(net[3].weight, 1 / 6)
    y:square():sum():backward()
    local before = net[3].bias:clone()
    optimizer:step()
    assert.is_false(mf.equal(before, net[3].bias))
  end)

  it('or from a state dict', function()
    local full = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    local net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()):eval()
    net:load_state_dict(full:state_dict())
    local x = mf.randn(2, 3)
    assert.is_true(mf.equal(full:eval()(x), net:eval()(x)))
    local double = nn.LazyLinear(2, { bias = false }):double()
    assert.equal(mf.float64, double(mf.ones(1, 3):double()).dtype)
    assert.equal(1, #double:parameters())
  end)
end)

describe('Dropout', function()
  it('drops in training alone, and scales what stays', function()
    mf.manual_seed(1)
    local m, x = nn.Dropout(0.25), mf.ones(100000)
    local y = m(x)
    assert.near(0.75, y:ne(0):double():mean():item(), 5 * math.sqrt(0.1875 / 1e5))
    assert.near(1 / 0.75, y:max():item(), 1e-6)
    assert.is_true(mf.equal(x, m:eval()(x)))
    assert.is_true(mf.equal(x, nn.Dropout(0)(x)))
    assert.equal(0, nn.Dropout(1)(x):sum():item())
    assert.has_error(function() nn.Dropout(1.5) end)
    local z = nn.Dropout2d(0.5)(mf.ones(50, 40, 2, 2))
    assert.is_true(mf.equal(z:amax({ 2, 3 }), z:amin({ 2, 3 })))
    assert.near(0.5, z:ne(0):double():mean():item(), 5 * math.sqrt(0.25 / 2000))
  end)
end)

describe('Embedding', function()
  it('of pretrained rows', function()
    local rows = mf.rand(4, 3)
    local e = nn.Embedding.from_pretrained(rows)
    assert.is_true(mf.equal(rows, e.weight))
    assert.is_false(e.weight.requires_grad)
    assert.is_true(nn.Embedding.from_pretrained(rows, { freeze = false }).weight.requires_grad)
    assert.is_true(mf.equal(rows[2], e(mf.tensor(2, { dtype = mf.int64 }))))
    assert.has_error(function() e(mf.tensor({ 4 }, { dtype = mf.int64 })) end)
    assert.has_error(function() e(mf.tensor { 1 }) end)
  end)
end)

describe('MultiheadAttention', function()
  it('is the same for one tensor as for three equal ones', function()
    local m, x = nn.MultiheadAttention(6, 2), mf.randn(3, 2, 6)
    local y, w = m(x, x, x)
    local z, v = m(x, x:clone(), x:clone())
    assert.is_true(mf.allclose(y, z, { atol = 1e-6 }))
    assert.is_true(mf.allclose(w, v, { atol = 1e-6 }))
  end)
end)

describe('wrong arguments', function()
  local function fails(text, f, ...)
    local ok, err = pcall(f, ...)
    assert(not ok, text)
    assert(tostring(err):find(text, 1, true), err)
    assert(tostring(err):find('nn_values_spec.lua:', 1, true), err)
  end

  it('are named, at the line of the call', function()
    fails('Linear: in_features must be a whole number', function() nn.Linear('a', 2) end)
    fails("Linear: there is no option 'bais'; did you mean 'bias'?", function() nn.Linear(1, 2, { bais = true }) end)
    fails('Conv2d: in_channels 3 and out_channels 4 must be divisible by groups 2',
      function() nn.Conv2d(3, 4, 3, { groups = 2 }) end)
    fails("Conv2d: padding 'same' needs a stride of 1",
      function() nn.Conv2d(1, 1, 3, { padding = 'same', stride = 2 }) end)
    fails('Conv2d: padding_mode must be one of zeros', function() nn.Conv2d(1, 1, 3, { padding_mode = 'mirror' }) end)
    fails('Conv2d: padding must be a whole number', function() nn.Conv2d(1, 1, 3, { padding = 'sam' }) end)
    fails('conv1d: x must have 2 or 3 dims, has 4', function() nn.Conv1d(2, 3, 2)(mf.ones(1, 2, 4, 4)) end)
    fails('Conv1d: kernel_size must have 1 numbers, has 2', function() nn.Conv1d(2, 3, { 1, 2 }) end)
    local up = nn.ConvTranspose2d(2, 3, 3, { stride = 2 })
    fails('ConvTranspose2d: output_size must be 9 to 10 in dim 1, is 12',
      function() up(mf.ones(2, 4, 4), { 9, 12 }) end)
    fails('conv_transpose2d: x has 3 channels, but w (in, out / groups, ...) takes 2',
      function() up(mf.ones(3, 4, 4)) end)
    fails('conv_transpose2d: x and w must have one dtype', function() up(mf.ones(2, 4, 4):double()) end)
    fails('conv_transpose2d: output_padding must be smaller than stride or dilation, is 1',
      function() nn.ConvTranspose2d(2, 3, 3, { output_padding = 1 })(mf.ones(2, 4, 4)) end)
    local lstm = nn.LSTM(3, 4)
    fails('LSTM: the input has 4 features, input_size is 3', function() lstm(mf.ones(5, 2, 4)) end)
    fails('LSTM: the state must be {h, c}, is a tensor', function() lstm(mf.ones(5, 2, 3), mf.ones(1, 2, 4)) end)
    fails('LSTM: c must have the shape (1, 2, 4), has (1, 3, 4)',
      function() lstm(mf.ones(5, 2, 3), { mf.ones(1, 2, 4), mf.ones(1, 3, 4) }) end)
    fails('LSTM: the input is a sequence of length 0', function() lstm(mf.ones(0, 2, 3)) end)
    fails("GRU: there is no option 'proj_size'", function() nn.GRU(3, 4, { proj_size = 2 }) end)
    fails('BatchNorm2d: x has shape (2, 3); it must have 4 dims', function() nn.BatchNorm2d(3)(mf.ones(2, 3)) end)
    fails('BatchNorm2d: momentum must be a number', function() nn.BatchNorm2d(3, { momentum = 'x' }) end)
    fails('GroupNorm: num_channels 5 is not divisible by num_groups 2', function() nn.GroupNorm(2, 5) end)
    fails('Embedding: padding_idx 5 is out of range for 5 rows', function() nn.Embedding(5, 2, { padding_idx = 5 }) end)
    fails('MultiheadAttention: embed_dim 5 is not divisible by num_heads 2', function() nn.MultiheadAttention(5, 2) end)
    for _, o in ipairs { {}, { reduction = 'sum' }, { reduction = 'none' }, { weight = mf.ones(2) } } do
      local text = 'probabilities are from 0 to 1, and binary_cross_entropy_with_logits takes logits'
      local function bce(x, t)
        return function() return mf.binary_cross_entropy(mf.tensor(x), mf.tensor(t), o) end
      end
      fails('binary_cross_entropy: x holds 1.5; ' .. text, bce({ 0.5, 1.5 }, { 1, 0 }))
      fails('binary_cross_entropy: x holds -0.25; ' .. text, bce({ -0.25, 0.5 }, { 0, 1 }))
      fails('binary_cross_entropy: x holds ', bce({ 0 / 0, 0.5 }, { 0, 1 }))
      assert.truthy(bce({ 0, 1 }, { 1, 0 })())
    end
    fails('CrossEntropyLoss: reduction must be one of', function() nn.CrossEntropyLoss { reduction = 'avg' } end)
    fails('batch_norm', function() nn.BatchNorm1d(3)(mf.ones(1, 3)) end)
  end)
end)
