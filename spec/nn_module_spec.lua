-- nn.Module: order of parameters, names, state dicts and their reports, modes, conversion, printing.
local mf = require 'moonflow'
local nn = mf.nn

local Net = nn.Module:extend 'Net'
function Net:init()
  self.zeta = nn.Linear(2, 3)
  self.alpha = nn.Sequential(nn.Linear(3, 3, { bias = false }), nn.ReLU(), nn.BatchNorm1d(3))
  self.scale = nn.Parameter(mf.ones(1))
  self.note = 'text'
end
function Net:forward(x) return self.alpha(self.zeta(x)) * self.scale end

local function names(iterator)
  local list = {}
  for name in iterator do list[#list + 1] = name end
  return list
end

describe('nn.Module', function()
  it('lists parameters, buffers and modules in order of assignment', function()
    local net = Net()
    assert.same({ 'scale', 'zeta.weight', 'zeta.bias', 'alpha.0.weight', 'alpha.2.weight', 'alpha.2.bias' },
      names(net:named_parameters()))
    assert.same({ 'alpha.2.running_mean', 'alpha.2.running_var', 'alpha.2.num_batches_tracked' },
      names(net:named_buffers()))
    assert.same({ '', 'zeta', 'alpha', 'alpha.0', 'alpha.1', 'alpha.2' }, names(net:named_modules()))
    assert.equal(6, #net:parameters())
  end)

  it('lists a shared parameter once, but saves it under both names', function()
    local net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    assert.equal(3, #net:parameters())
    assert.truthy(net:state_dict()['0.weight'])
    assert.truthy(net:state_dict()['1.weight'])
  end)

  it('refuses what would take a parameter, module or buffer off its lists unnoticed', function()
    local function refused(module, key, value, text)
      local was = module[key]
      local ok, err = pcall(function() module[key] = value end)
      assert.is_false(ok)
      assert(tostring(err):find(text, 1, true), err)
      assert.equal(was, module[key])
    end
    local l, net = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    refused(l, 'weight', mf.ones(2, 2):requires_grad_(),
      'Linear: weight is a parameter and cannot become a plain tensor')
    refused(l, 'bias', 5, 'Linear: bias is a parameter and cannot become 5')
    refused(l, 'bias', nn.ReLU(), 'Linear: bias is a parameter and cannot become a module')
    refused(net, '0', mf.ones(2), 'Sequential: 0 is a module and cannot become a plain tensor')
    refused(net[1], 'running_mean', 5, 'BatchNorm1d: running_mean is a buffer and cannot become 5')
    local p = nn.Parameter(mf.zeros(2, 2))
    l.weight = p
    assert.equal(p, l:parameters()[1])
    l.bias = nil
    assert.equal(1, #l:parameters())
    l.bias = mf.ones(2) -- a plain field now
    assert.same({ { 1, 1 } }, l(mf.ones(1, 2)):tolist())
    assert.equal(1, #l:parameters())
    net['0'] = nn.Linear(2, 3)
    assert.equal(3, net[0].out_features)
    net[1].running_mean = mf.ones(2)
    assert.same({ 1, 1 }, net:state_dict()['1.running_mean']:tolist())
    net[1].running_mean = nn.Parameter(mf.ones(2))
    assert.equal(5, #net:parameters())
    assert.equal(2, #net:buffers())
  end)

  it('saves a shared module under both names, and loads that', function()
    local Twice = nn.Module:extend 'Twice'
    function Twice:init()
      self.a = nn.BatchNorm1d(2)
      self.b = nn.Sequential(self.a, nn.Linear(2, 2, { bias = false }), self.a)
      self.c = self.b
    end
    local net = Twice()
    local order, want = getmetatable(net:state_dict()).order, {}
    for _, module in ipairs { 'a', 'b.0', 'b.1', 'b.2', 'c.0', 'c.1', 'c.2' } do
      local linear = module:match '1$'
      for _, key in ipairs(linear and { 'weight' } or { 'weight', 'bias', 'running_mean', 'running_var',
        'num_batches_tracked' }) do
        want[#want + 1] = module .. '.' .. key
      end
    end
    assert.same(want, order)
    assert.equal(3, #net:parameters())
    assert.equal(3, #net:buffers())
    local other = Twice()
    other.a.weight.data:fill_(5)
    net:load_state_dict(other:state_dict())
    assert.same({ 5, 5 }, net.c[0].weight:tolist())
    local part = other:state_dict()
    part['c.2.weight'] = nil
    assert.has_error(function() net:load_state_dict(part) end)
  end)

  it('prints as PyTorch does', function()
    assert.equal([[Net(
  (zeta): Linear(in_features=2, out_features=3, bias=True)
  (alpha): Sequential(
    (0): Linear(in_features=3, out_features=3, bias=False)
    (1): ReLU()
    (2): BatchNorm1d(3, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
  )
)]], tostring(Net()))
  end)

  it('loads what it saved', function()
    local a, b = Net(), Net()
    b:load_state_dict(a:state_dict())
    for name, p in a:named_parameters() do
      local q = b:state_dict()[name]
      assert.is_true(mf.allclose(p, q), name)
    end
  end)

  it('reports missing and unexpected keys and sizes together', function()
    local net = Net()
    local dict = net:state_dict()
    dict['zeta.bias'] = nil
    dict.extra = mf.zeros(1)
    dict['zeta.weight'] = mf.zeros(5, 2)
    local before = net.alpha[0].weight:tolist()
    dict['alpha.0.weight'] = mf.zeros(3, 3)
    local ok, text = pcall(net.load_state_dict, net, dict)
    assert.is_false(ok)
    for _, part in ipairs { 'Error(s) in loading state_dict for Net', 'Missing key(s) in state_dict: "zeta.bias".',
      'Unexpected key(s) in state_dict: "extra".',
      'size mismatch for zeta.weight: copying a param with shape (5, 2)' } do
      assert(text:find(part, 1, true), text)
    end
    assert.same(before, net.alpha[0].weight:tolist()) -- nothing was copied
    dict['zeta.weight'] = nil
    local report = net:load_state_dict(dict, { strict = false })
    assert.same({ 'zeta.weight', 'zeta.bias' }, report.missing_keys)
    assert.same({ 'extra' }, report.unexpected_keys)
  end)

  it('switches modes of all modules', function()
    local net = Net():eval()
    assert.is_false(net.alpha[2].training)
    assert.is_true(net:train().alpha[2].training)
  end)

  it('converts parameters and float buffers in place', function()
    local net = Net()
    local weight = net.zeta.weight
    net:double()
    assert.equal(weight, net.zeta.weight)
    assert.equal(mf.float64, weight.dtype)
    assert.equal(mf.float64, net.alpha[2].running_mean.dtype)
    assert.equal(mf.int64, net.alpha[2].num_batches_tracked.dtype)
  end)

  it('calls hooks until they are removed', function()
    local net, calls = nn.Identity(), 0
    local hook = net:register_forward_hook(function() calls = calls + 1 end)
    net(mf.zeros(1))
    hook.remove()
    net(mf.zeros(1))
    assert.equal(1, calls)
  end)

  it('freezes and drops gradients', function()
    local net = nn.Linear(2, 1)
    net(mf.ones(1, 2)):sum():backward()
    assert.truthy(net.weight.grad)
    net:zero_grad()
    assert.is_nil(net.weight.grad)
    net:requires_grad_(false)
    assert.is_false(net.weight.requires_grad)
  end)

  it('is made without memory on the meta device', function()
    local before = mf.memory_stats().allocations
    local net = mf.device('meta', function() return nn.Sequential(nn.Linear(1e5, 1e6), nn.BatchNorm1d(4)) end)
    assert.equal(before, mf.memory_stats().allocations)
    for _, t in pairs(net:state_dict()) do assert.equal('meta', t.device) end
    assert.is_true(net[0].weight.requires_grad)
    local ok, text = pcall(net.to, net, 'cpu')
    assert(not ok and text:find 'to_empty', text)
    local small = mf.device('meta', function() return Net() end)
    local weight = small.zeta.weight
    small:to_empty 'cpu'
    assert.same({ weight, 'cpu' }, { small.zeta.weight, weight.device })
    local full = Net()
    small:load_state_dict(full:state_dict())
    assert.is_true(mf.equal(full.zeta.weight, small.zeta.weight))
    small(mf.ones(2, 2)):sum():backward()
    assert.truthy(weight.grad)
  end)

  it('takes the tensors of a dict themselves with {assign = true}', function()
    local net, full = mf.device('meta', function() return Net() end), Net()
    local ok, text = pcall(net.load_state_dict, net, full:state_dict())
    assert(not ok and text:find('zeta.weight is on the meta device', 1, true), text)
    local dict = full:double():state_dict()
    net:load_state_dict(dict, { assign = true })
    assert.equal(mf.float64, net.zeta.weight.dtype)
    assert.is_true(net.zeta.weight.requires_grad)
    dict['zeta.bias']:fill_(3)
    assert.same({ 3, 3, 3 }, net.zeta.bias:tolist())
    assert.equal(6, #net:parameters())
    net:eval()
    net(mf.ones(1, 2):double())
    dict['zeta.weight'] = mf.ones(1)
    assert.is_false((pcall(net.load_state_dict, net, dict, { assign = true })))
    local meta = mf.device('meta', function() return Net() end):state_dict()
    ok, text = pcall(full.load_state_dict, full, meta)
    assert(not ok and text:find('has no data', 1, true), text)
  end)

  it('says what is wrong', function()
    assert.has_error(function() nn.Sequential(nn.ReLU(), 3) end)
    assert.has_error(function() return nn.Sequential(nn.ReLU())[1] end)
    assert.has_error(function() nn.Linear(2, 2, { biass = false }) end)
    assert.has_error(function() nn.GroupNorm(3, 4) end)
    assert.has_error(function() nn.MultiheadAttention(5, 2) end)
  end)
end)

describe('a method', function()
  local net = mf.nn.Linear(1, 1)
  local opt = mf.optim.SGD(net:parameters(), { lr = 0.1 })
  local schedule = mf.optim.lr_scheduler.StepLR(opt, 1)
  local plateau = mf.optim.lr_scheduler.ReduceLROnPlateau(opt)

  it('called with a dot is an error that says so, at the line that calls', function()
    local n = 0
    for object, name in pairs { [net] = 'module', [opt] = 'opt', [schedule] = 'schedule', [plateau] = 'schedule' } do
      for _, method in ipairs { 'state_dict', 'load_state_dict', 'step', 'zero_grad', 'parameters', 'eval' } do
        if object[method] then
          for _, argument in ipairs { false, net:state_dict(), print } do
            local ok, text = pcall(function() object[method](argument or nil) end)
            assert.is_false(ok)
            local expected = ('%s.%s is a method; call it with a colon: %s:%s(...)'):format(name, method, name, method)
            assert(text:find('nn_module_spec.lua:%d+: ') and text:find(expected, 1, true), text)
            n = n + 1
          end
        end
      end
    end
    assert(n >= 30)
  end)

  it('extend wants a name', function()
    for _, name in ipairs { false, 5, {} } do
      local ok, text = pcall(function() return mf.nn.Module:extend(name or nil) end)
      assert.is_false(ok)
      assert(text:find("extend: a name is needed, as in nn.Module:extend 'Net'", 1, true), text)
    end
  end)

  it('to takes a dtype by its name, and speaks in its own name', function()
    assert.equal(mf.float64, mf.nn.Linear(1, 1):to('float64').weight.dtype)
    assert.equal(mf.float16, mf.nn.Linear(1, 1):to({ dtype = 'float16' }).weight.dtype)
    local x = mf.ones(2)
    assert.equal(mf.int64, x:to('int64').dtype)
    assert.equal(mf.int64, x:to({ dtype = 'int64' }).dtype)
    assert.equal(x, x:to 'float32')
    for text, f in pairs {
      [": to: there is no device 'cuda'"] = function() x:to 'cuda' end,
      [": to: there is no device 'flaot32'; there are 'cpu', 'meta' and 'cuda'; did you mean 'float32'?"] = function()
        x:to 'flaot32'
      end,
      [": to: dtype must be a dtype such as mf.float32, is 'itn64'; did you mean 'int64'?"] = function()
        x:to { dtype = 'itn64' }
      end,
      [": Module:to: there is no device 'cuda'"] = function() net:to 'cuda' end,
      [": Module:to: dtype must be a dtype such as mf.float32, is 5"] = function() net:to { dtype = 5 } end,
      [": to_empty: there is no device 'tpu'"] = function() net:to_empty 'tpu' end,
    } do
      local ok, message = pcall(f)
      assert.is_false(ok)
      assert(message:find(text, 1, true) and message:find '^spec/nn_module_spec.lua:%d+: ', message)
    end
  end)
end)

describe('what Lua lets pass unseen', function()
  it('is an error where it can be one', function()
    local x, y = mf.ones(2), mf.ones(2)
    for _, f in ipairs { function() return x < y end, function() return x >= y end } do
      local ok, text = pcall(f)
      assert.is_false(ok)
      assert(text:find('x:lt(y)', 1, true) and text:find 'nn_module_spec.lua:%d+: ', text)
    end
    local ok, text = pcall(function() return mf.cross_entropy(mf.ones(2, 3), mf.tensor { 1, 2 }), 1 end)
    assert.is_false(ok)
    assert(text:find 'nn_module_spec.lua:%d+: cross_entropy' and text:find('target:long()', 1, true)
      and text:find('{ dtype = mf.int64 }', 1, true), text)
  end)

  it('is a warning where a loss broadcasts, once for each line', function()
    local warn, texts = mf.warn, {}
    mf.warn = function(text) texts[#texts + 1] = text end
    for _ = 1, 3 do
      for _, name in ipairs { 'mse_loss', 'l1_loss', 'smooth_l1_loss', 'huber_loss' } do
        mf[name](mf.ones(3, 1), mf.ones(3))
        mf.ones(3)[name](mf.ones(3), mf.ones(3))
      end
      mf.nn.MSELoss()(mf.ones(3, 1), mf.ones(3))
    end
    mf.warn = warn
    assert.equal(5, #texts)
    assert(texts[1]:find 'nn_module_spec.lua:%d+: warning: mse_loss: x has shape %(3, 1%), target %(3,%)', texts[1])
  end)
end)
