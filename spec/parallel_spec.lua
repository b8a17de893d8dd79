-- nn.parallel.DistributedDataParallel on ranks as threads: a step of n ranks, each with its part of the batch, is
-- that of one rank with all of it. Expectations are those of the module alone, and PyTorch's rules.

local mf = require 'moonflow'
local comm = mf.comm

-- Everything that ranks use: trains, and returns the losses, the mean over the ranks, of the last step's gradients
-- and parameters. o: seed of the weights by rank, options of the module, what to do in a step.
local function train(rank, n, o)
  local m = require 'moonflow'
  local nn, optim = m.nn, m.optim
  m.manual_seed(3)
  local x, y = m.randn(5, 8, 6, { dtype = m.float64 }), m.randint(0, 3, { 5, 8 })
  m.manual_seed(7 + (o.same and 0 or rank))
  local net = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.LayerNorm(9), nn.Linear(9, 5), nn.GELU(), nn.Linear(5, 3))
  net:double()
  local model = n > 1 and nn.parallel.DistributedDataParallel(net, o.options) or net
  local opt = optim.SGD(model:parameters(), { lr = 0.2, momentum = 0.9 })
  local per, losses = 8 / n, {}
  for step = 0, 4 do
    opt:zero_grad()
    local loss = m.cross_entropy(model(x[step]:narrow(0, rank * per, per)), y[step]:narrow(0, rank * per, per))
    loss:backward()
    opt:step()
    local mean = loss:detach():clone()
    if n > 1 then m.comm.all_reduce(mean, 'avg') end
    losses[step + 1] = mean:item()
  end
  local grads, weights = {}, {}
  for i, p in ipairs(net:parameters()) do grads[i], weights[i] = p.grad:tolist(), p:tolist() end
  return { losses = losses, grads = grads, weights = weights }
end

local function close(a, b, path)
  path = path or 'result'
  if type(a) == 'table' then
    assert.equal(#a, #b, path)
    for k, v in pairs(a) do close(v, b[k], path .. '.' .. k) end
  else
    assert.is_true(math.abs(a - b) <= 1e-9 * math.max(1, math.abs(a)), ('%s: %.17g and %.17g'):format(path, a, b))
  end
end

describe('DistributedDataParallel', function()
  for _, o in ipairs {
    { name = 'by default' },
    { name = 'in one bucket', bucket_cap_mb = 1000 },
    { name = 'in a bucket for each', bucket_cap_mb = 1e-6 },
    { name = 'with gradients in buckets', gradient_as_bucket_view = true, bucket_cap_mb = 0.0002 },
    { name = 'looking for unused ones', find_unused_parameters = true, bucket_cap_mb = 0.0002 },
  } do
    local name = o.name
    o.name = nil
    it('trains as one rank does, ' .. name, function()
      local one = train(0, 1, {})
      for _, n in ipairs { 2, 4 } do
        for _, r in ipairs(comm._spawn(n, function(rank) return train(rank, n, { options = o }) end)) do
          close(one, r)
        end
      end
    end)
  end

  -- One process more to a rank: builds a module by `make`, wraps it, runs f(model, module, rank).
  local function run(n, make, o, f, spawn)
    return comm._spawn(n, function(rank)
      local m = require 'moonflow'
      m.manual_seed(5 + rank)
      local module = make(m)
      return f(m.nn.parallel.DistributedDataParallel(module, o), module, rank, m)
    end, spawn)
  end
  local function linear(m) return m.nn.Linear(3, 2):double() end

  it('begins with the values of the first rank', function()
    local got = run(3, function(m) return m.nn.Sequential(m.nn.Linear(2, 3), m.nn.BatchNorm1d(3)) end, nil,
      function(model, module, rank)
        module[1].running_mean:fill_(rank)
        local list = {}
        for i, p in ipairs(model:parameters()) do list[i] = p:tolist() end
        return list
      end)
    assert.same(got[1], got[2])
    assert.same(got[1], got[3])
    got = run(2, linear, { init_sync = false }, function(_, module) return module.weight:tolist() end)
    assert.is_not.same(got[1], got[2])
  end)

  it('has the names of PyTorch, and the fields of the module', function()
    local got = run(1, function(m)
      local net = m.nn.Sequential(m.nn.Linear(3, 2), m.nn.BatchNorm1d(2))
      rawset(net, 'width', 3)
      return net
    end, nil, function(model, module, _, m)
      local names = {}
      for name in model:named_parameters() do names[#names + 1] = name end
      model:eval()
      assert(not module.training and not module[1].training)
      model:train()
      local other = m.nn.parallel.DistributedDataParallel(m.nn.Sequential(m.nn.Linear(3, 2), m.nn.BatchNorm1d(2)))
      other:load_state_dict(model:state_dict())
      assert(m.allclose(other.module[0].weight, module[0].weight))
      return { names, getmetatable(model:state_dict()).order, model.width, model[0] == module[0],
        tostring(model):match '^[^\n]*', model.nothing == nil }
    end)[1]
    local order = { 'module.0.weight', 'module.0.bias', 'module.1.weight', 'module.1.bias' }
    assert.same(order, got[1])
    for _, name in ipairs { 'running_mean', 'running_var', 'num_batches_tracked' } do
      order[#order + 1] = 'module.1.' .. name
    end
    assert.same(order, got[2])
    assert.same({ 3, true, 'DistributedDataParallel(', true }, { got[3], got[4], got[5], got[6] })
  end)

  it('gives buffers of the first rank before each call in training', function()
    for _, on in ipairs { true, false } do
      local got = run(2, function(m) return m.nn.BatchNorm1d(2, { momentum = 0.5 }) end, { broadcast_buffers = on },
        function(model, module, rank, m)
          local seen = {}
          module:register_forward_pre_hook(function() seen[#seen + 1] = module.running_mean:tolist() end)
          for _ = 1, 2 do model(m.full({ 4, 2 }, rank + 1)):sum():backward() end
          m.no_grad(function() model(m.zeros(4, 2)) end) -- once more, as after each call with gradients
          m.no_grad(function() model(m.zeros(4, 2)) end)
          return seen
        end)
      assert.same({ { 0, 0 }, { 0.5, 0.5 }, { 0.75, 0.75 }, { 0.375, 0.375 } }, got[1])
      assert.same(on and { { 0, 0 }, { 0.5, 0.5 }, { 0.75, 0.75 }, { 0.375, 0.375 } }
        or { { 0, 0 }, { 1, 1 }, { 1.5, 1.5 }, { 0.75, 0.75 } }, got[2])
    end
  end)

  it('leaves gradients alone in no_sync, and averages their sums afterwards', function()
    for _, view in ipairs { false, true } do
      local got = run(2, linear, { gradient_as_bucket_view = view }, function(model, module, rank, m)
        local function pass(k) return model(m.full({ 1, 3 }, k, { dtype = m.float64 })):sum():backward() end
        local list = {}
        list[1] = model:no_sync(function()
          pass(rank + 1)
          pass(10 * (rank + 1))
          return module.weight.grad:tolist()
        end)
        assert(not pcall(model.no_sync, model, error, 'out'))
        pass(100 * (rank + 1))
        local kept = module.weight.grad
        list[2] = kept:tolist()
        pass(1000) -- onto what is there
        list[3] = module.weight.grad:tolist()
        list[4] = kept:tolist() -- who holds a gradient sees what becomes of it
        return list
      end)
      local function rows(v) return { { v, v, v }, { v, v, v } } end
      assert.same({ rows(11), rows(111 * 1.5), rows(1166.5), rows(1166.5) }, got[1])
      assert.same({ rows(22), rows(111 * 1.5), rows(1166.5), rows(1166.5) }, got[2])
    end
  end)

  it('gathers row-sparse gradients', function()
    local got = run(2, function(m)
      return m.nn.Sequential(m.nn.Embedding(5, 2, { sparse = true }), m.nn.Linear(2, 1)):double()
    end, nil, function(model, module, rank, m)
      m.no_grad(function() module[1].weight:fill_(1) end)
      model(m.tensor(rank == 0 and { 1, 3, 3 } or { 3 }, { dtype = m.int64 })):sum():backward()
      local g = module[0].weight.grad
      return { g.is_rows, g:to_dense():tolist(), module[1].bias.grad:tolist() }
    end)
    for r = 1, 2 do
      assert.same({ true, { { 0, 0 }, { 0.5, 0.5 }, { 0, 0 }, { 1.5, 1.5 }, { 0, 0 } }, { 2 } }, got[r])
    end
  end)

  -- Of PyTorch: a parameter that some rank used has the average with zeros, one that none used keeps what it had.
  it('finds parameters that are not used', function()
    for _, view in ipairs { false, true } do
      local got = run(2, function(m)
        local Net = m.nn.Module:extend 'Net'
        function Net:init() self.a, self.b, self.c = linear(m), linear(m), linear(m) end
        function Net:forward(x, which) return { y = which == 'a' and self.a(x) or self.b(x) } end
        return Net()
      end, { find_unused_parameters = true, gradient_as_bucket_view = view }, function(model, module, rank, m)
        local x = m.ones(1, 3, { dtype = m.float64 })
        model(x, rank == 0 and 'a' or 'b').y:sum():backward()
        local first = { module.a.bias.grad:tolist(), module.b.bias.grad:tolist(), module.c.bias.grad == nil }
        model(x, 'b').y:sum():backward()
        return { first, module.a.bias.grad:tolist(), module.b.bias.grad:tolist(), module.c.bias.grad == nil }
      end)
      for r = 1, 2 do
        assert.same({ { { 0.5, 0.5 }, { 0.5, 0.5 }, true }, { 0.5, 0.5 }, { 1.5, 1.5 }, true }, got[r])
      end
    end
  end)

  it('works over a part of the ranks', function()
    local got = comm._spawn(4, function(rank)
      local m = require 'moonflow'
      local group = rank < 2 and { 0, 1 } or { 2, 3 }
      local model = m.nn.parallel.DistributedDataParallel(m.nn.Linear(1, 1), { process_group = group })
      model(m.full({ 1, 1 }, rank)):sum():backward()
      return model.module.weight.grad:item()
    end)
    assert.same({ 0.5, 0.5, 2.5, 2.5 }, got)
  end)

  it('averages halves with one rounding', function()
    for _, name in ipairs { 'float16', 'bfloat16' } do
      local got = run(3, function(m) return m.nn.Linear(1, 1):to(m[name]) end, nil, function(model, module, rank, m)
        model(m.full({ 1, 1 }, rank == 0 and 60000 or 1, { dtype = m[name] })):sum():backward()
        return module.weight.grad:item()
      end)
      local whole = mf.tensor { 60000 }:to(mf[name]):to(mf.float64):item() + 2
      assert.equal(mf.tensor { whole / 3 }:to(mf[name]):item(), got[3])
    end
  end)

  it('communicates while backward goes on', function()
    local got = run(2, function(m)
      local layers = {}
      for i = 1, 12 do layers[i] = m.nn.Linear(256, 256) end
      return m.nn.Sequential(unpack(layers))
    end, { bucket_cap_mb = 0.25 }, function(model, _, rank, m)
      local x = m.randn(256, 256)
      model(x):sum():backward()
      local before = m.comm.stats().received -- in mid-backward, wait for what the others send meanwhile
      model.module[2].weight:register_hook(function()
        local start = m.time()
        while m.comm.stats().received < before + 2 ^ 18 and m.time() - start < 30 do m.ones(10) end
      end)
      local p = m.profile(function() model(x):sum():backward() end)
      local last, early, path = 0, 0, os.tmpname()
      for _, e in ipairs(p.events) do last = math.max(last, e.begin_us) end
      for _, e in ipairs(p.acts) do
        if e.kind == 'act' and e.name:find '^all_reduce of bucket' and e.begin_us < last then early = early + 1 end
      end
      p:save_trace(path)
      local text = io.open(path):read '*a'
      os.remove(path)
      return { early, text:find('"communication"', 1, true) ~= nil, #p.acts, rank }
    end)
    for r = 1, 2 do
      assert.is_true(got[r][1] >= 1, ('%d of %d'):format(got[r][1], got[r][3]))
      assert.is_true(got[r][2])
    end
  end)

  local function errors_of(n, make, o, f)
    return select(2, run(n, make, o, f or function() end, { catch = true, timeout = 20 }))
  end

  it('refuses modules that differ', function()
    local errors = select(2, comm._spawn(2, function(rank)
      local m = require 'moonflow'
      local net = m.nn.Sequential(m.nn.Linear(3, 4), m.nn.Linear(4, 2 + rank))
      m.nn.parallel.DistributedDataParallel(net)
    end, { catch = true }))
    for r = 1, 2 do
      assert.truthy(errors[r]:find('the modules differ: rank', 1, true), errors[r])
      assert.truthy(errors[r]:find('rank 0 has 1.weight: (2, 4) of float32', 1, true), errors[r])
      assert.truthy(errors[r]:find('rank 1 has 1.weight: (3, 4) of float32', 1, true), errors[r])
    end
  end)

  it('tells what was called wrongly', function()
    local function ones(m, ...) return m.ones(..., { dtype = m.float64 }) end
    local cases = {
      { 'in the last backward 2 of 4 parameters got no gradient on rank 0: 1.weight, 1.bias; find_unused',
        function(model, module, m)
          module[0](ones(m, { 1, 3 })):sum():backward()
          model(ones(m, { 1, 3 }))
        end, armed = true },
      { '.bias got a gradient, but the module was not called since the last backward',
        function(_, module, m) module(ones(m, { 1, 3 })):sum():backward() end },
      { 'got a second gradient since the module was called', function(model, module, m)
        local y = model(ones(m, { 1, 3 }))
        module[0](ones(m, { 1, 3 })):sum():backward()
        y:sum():backward()
      end },
      { 'is of float32 now and was of float64', function(_, module, m)
        module[0]:float()
        module[0](m.ones(1, 3)):sum():backward()
      end, armed = true },
      { 'cannot be part of a compiled step', function(model, _, m)
        m.compile(function(x) return model(x) end)(ones(m, { 1, 3 }))
      end },
      { 'belongs to another DistributedDataParallel', function(_, module, m)
        m.nn.parallel.DistributedDataParallel(module)
      end },
    }
    for _, case in ipairs(cases) do
      local text = case[1]
      local errors = errors_of(1, function(m) return m.nn.Sequential(linear(m), m.nn.Linear(2, 2):double()) end, nil,
        function(model, module, _, m)
          if case.armed then model(m.ones({ 1, 3 }, { dtype = m.float64 })) end
          case[2](model, module, m)
          return tostring(model)
        end)
      assert.truthy(errors[1] and errors[1]:find(text, 1, true), text .. '\n' .. tostring(errors[1]))
    end
    local function refuses(text, module, o)
      local ok, err = pcall(mf.nn.parallel.DistributedDataParallel, module, o)
      assert.truthy(not ok and err:find(text, 1, true), tostring(err))
    end
    refuses('the first argument must be a module, is 3', 3)
    refuses('no parameter of the module requires a gradient', mf.nn.ReLU())
    refuses('1 does not know its sizes yet', mf.nn.Sequential(mf.nn.Linear(1, 1), mf.nn.LazyLinear(2)))
    refuses("there is no option 'bucket_cap'; did you mean 'bucket_cap_mb'", mf.nn.Linear(1, 1), { bucket_cap = 3 })
    refuses('bucket_cap_mb must be positive', mf.nn.Linear(1, 1), { bucket_cap_mb = 0 })
  end)

  it('ends all ranks when one leaves gradients out', function()
    local errors = errors_of(2, function(m) return m.nn.Sequential(linear(m), m.nn.Linear(2, 2):double()) end, nil,
      function(model, module, rank, m)
        local x = m.ones({ 1, 3 }, { dtype = m.float64 })
        local y = model(x)
        if rank == 1 then y = module[0](x) end
        y:sum():backward()
        model(x)
      end)
    assert.truthy(errors[2]:find('got no gradient on rank 1: 1.weight, 1.bias', 1, true), errors[2])
    assert.truthy(errors[1]:find('rank 1 on host %S+ raised an error'), errors[1])
  end)

  it('is collected with its thread', function()
    run(2, linear, nil, function(_, module, rank, m)
      for _ = 1, 20 do
        collectgarbage()
        local model = m.nn.parallel.DistributedDataParallel(m.nn.Linear(3, 2))
        model(m.ones(1, 3)):sum():backward()
      end
      return tostring(module) .. rank
    end)
  end)
end)
