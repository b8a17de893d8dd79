-- Learning-rate schedulers against the rates that PyTorch 2 gives (SGD with lr 0.5, one step an epoch).
local mf = require 'moonflow'
local optim = mf.optim
local sched = optim.lr_scheduler

local function sgd(lr)
  return optim.SGD({ mf.zeros(1):requires_grad_() }, { lr = lr or 0.5, momentum = 0.9 })
end

local function near(want, have, what)
  assert(math.abs(want - have) <= 1e-9 + 1e-8 * math.abs(want), ('%s: %.12g, should be %.12g'):format(what, have, want))
end

local cases = {
  { 'StepLR', function(o) return sched.StepLR(o, 3, { gamma = 0.5 }) end,
    { 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.0625, 0.0625, 0.0625 } },
  { 'MultiStepLR', function(o) return sched.MultiStepLR(o, { 2, 5 }, { gamma = 0.1 }) end,
    { 0.5, 0.5, 0.05, 0.05, 0.05, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005, 0.005 } },
  { 'ExponentialLR', function(o) return sched.ExponentialLR(o, 0.9) end,
    { 0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245, 0.2657205, 0.23914845, 0.215233605, 0.1937102445, 0.1743392201,
      0.156905298 } },
  { 'ConstantLR', function(o) return sched.ConstantLR(o, { factor = 0.25, total_iters = 4 }) end,
    { 0.125, 0.125, 0.125, 0.125, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5 } },
  { 'LinearLR', function(o) return sched.LinearLR(o, { start_factor = 0.1, end_factor = 0.8, total_iters = 6 }) end,
    { 0.05, 0.1083333333, 0.1666666667, 0.225, 0.2833333333, 0.3416666667, 0.4, 0.4, 0.4, 0.4, 0.4, 0.4 } },
  { 'PolynomialLR', function(o) return sched.PolynomialLR(o, { total_iters = 8, power = 2 }) end,
    { 0.5, 0.3828125, 0.28125, 0.1953125, 0.125, 0.0703125, 0.03125, 0.0078125, 0, 0, 0, 0 } },
  { 'CosineAnnealingLR', function(o) return sched.CosineAnnealingLR(o, 7, { eta_min = 0.1 }) end,
    { 0.5, 0.4801937736, 0.4246979604, 0.3445041868, 0.2554958132, 0.1753020396, 0.1198062264, 0.1, 0.1198062264,
      0.1753020396, 0.2554958132, 0.3445041868 } },
  { 'CosineAnnealingWarmRestarts', function(o)
    return sched.CosineAnnealingWarmRestarts(o, 3, { T_mult = 2, eta_min = 0.05 })
  end,
    { 0.5, 0.3875, 0.1625, 0.5, 0.4698557159, 0.3875, 0.275, 0.1625, 0.08014428415, 0.5, 0.4923333109, 0.4698557159 } },
  { 'LambdaLR', function(o) return sched.LambdaLR(o, function(e) return 1 / (1 + e) end) end,
    { 0.5, 0.25, 0.1666666667, 0.125, 0.1, 0.08333333333, 0.07142857143, 0.0625, 0.05555555556, 0.05, 0.04545454545,
      0.04166666667 } },
  { 'OneCycleLR', function(o) return sched.OneCycleLR(o, 1, { total_steps = 12 }) end,
    { 0.04, 0.3497896542, 0.8792851591, 0.9944154355, 0.9330129698, 0.8117456539, 0.6473789977, 0.4626371027,
      0.2830609982, 0.1334775302, 0.03456698743, 4e-06 } },
  { 'OneCycleLR linear', function(o)
    return sched.OneCycleLR(o, 1, { epochs = 4, steps_per_epoch = 3, pct_start = 0.25, anneal_strategy = 'linear',
      div_factor = 10, final_div_factor = 100 })
  end,
    { 0.1, 0.55, 1, 0.889, 0.778, 0.667, 0.556, 0.445, 0.334, 0.223, 0.112, 0.001 } },
  { 'OneCycleLR three phases', function(o) return sched.OneCycleLR(o, 1, { total_steps = 12, three_phase = true }) end,
    { 0.04, 0.3497896542, 0.8792851591, 0.9450188923, 0.4621423935, 0.05394792764, 0.03815169324, 0.03122461893,
      0.02108466989, 0.010634768, 0.002866570191, 4e-06 } },
  { 'SequentialLR', function(o)
    return sched.SequentialLR(o, { sched.ConstantLR(o, { factor = 0.1, total_iters = 20 }),
      sched.ExponentialLR(o, 0.9) }, { milestones = { 4 } })
  end,
    { 0.05, 0.05, 0.05, 0.05, 0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245, 0.2657205, 0.23914845 } },
  { 'ChainedScheduler', function(o)
    return sched.ChainedScheduler(o, { sched.ConstantLR(o, { factor = 0.1, total_iters = 3 }),
      sched.ExponentialLR(o, 0.9) })
  end,
    { 0.05, 0.045, 0.0405, 0.3645, 0.32805, 0.295245, 0.2657205, 0.23914845, 0.215233605, 0.1937102445, 0.1743392201,
      0.156905298 } },
}

describe('lr_scheduler', function()
  for _, case in ipairs(cases) do
    it(case[1], function()
      local o = sgd()
      local s = case[2](o)
      for k, want in ipairs(case[3]) do
        near(want, o.param_groups[1].lr, 'epoch ' .. k - 1)
        if k < #case[3] then s:step() end
      end
    end)
  end

  -- Chains, and rates that the caller sets in between, as PyTorch has them: made by its schedulers.
  local function run(s, o, n, set)
    local list = {}
    for k = 0, n - 1 do
      list[k + 1] = o.param_groups[1].lr
      if set and set[k] then o.param_groups[1].lr = set[k] end
      for _, one in ipairs(s.optimizer and { s } or s) do one:step() end
    end
    return list
  end
  local function same(want, have)
    for k, lr in ipairs(want) do near(lr, have[k], 'epoch ' .. k - 1) end
  end
  local make = {
    CosineAnnealingLR = function(o) return sched.CosineAnnealingLR(o, 5, { eta_min = 0.01 }) end,
    ExponentialLR = function(o) return sched.ExponentialLR(o, 0.9) end,
    StepLR = function(o) return sched.StepLR(o, 3, { gamma = 0.5 }) end,
    MultiStepLR = function(o) return sched.MultiStepLR(o, { 2, 5 }, { gamma = 0.1 }) end,
    ConstantLR = function(o) return sched.ConstantLR(o, { factor = 0.25, total_iters = 4 }) end,
    LinearLR = function(o) return sched.LinearLR(o, { start_factor = 0.1, end_factor = 0.8, total_iters = 6 }) end,
    PolynomialLR = function(o) return sched.PolynomialLR(o, { total_iters = 8, power = 2 }) end,
    LambdaLR = function(o) return sched.LambdaLR(o, function(e) return 1 / (1 + e) end) end,
    SequentialLR = function(o)
      return sched.SequentialLR(o, { sched.LinearLR(o, { start_factor = 0.1, total_iters = 3 }),
        sched.ExponentialLR(o, 0.8) }, { milestones = { 4 } })
    end,
  }
  local chains = {
    { 'CosineAnnealingLR', 'ExponentialLR',
      { 0.5, 0.4078882473, 0.2681231764, 0.1316285496, 0.03925557388, 0.009, 0.05021175274, 0.1399387393,
        0.2305435329, 0.2833052998, 0.2809430172, 0.2295632352 } },
    { 'ExponentialLR', 'CosineAnnealingLR',
      { 0.5, 0.4079837388, 0.2684617581, 0.1322615381, 0.04013663903, 0.01, 0.05579083638, 0.1554874882,
        0.256159481, 0.3147836664, 0.312158908, 0.2550702613 } },
    { 'LinearLR', 'StepLR',
      { 0.05, 0.1083333333, 0.1666666667, 0.1125, 0.1416666667, 0.1708333333, 0.1, 0.1, 0.1, 0.05, 0.05,
        0.05 } },
    { 'PolynomialLR', 'MultiStepLR',
      { 0.5, 0.3828125, 0.028125, 0.01953125, 0.0125, 0.000703125, 0.0003125, 7.8125e-05, 0, 0, 0, 0 } },
    { 'ConstantLR', 'CosineAnnealingLR',
      { 0.125, 0.1140184772, 0.08526847718, 0.04973152282, 0.06221788736, 0.01, 0.05679083638, 0.1792908364,
        0.3307091636, 0.4532091636, 0.5, 0.4532091636 } },
    { 'LambdaLR', 'ExponentialLR',
      { 0.5, 0.225, 0.15, 0.1125, 0.09, 0.075, 0.06428571429, 0.05625, 0.05, 0.045, 0.04090909091, 0.0375 } },
    { 'SequentialLR', 'CosineAnnealingLR',
      { 0.05, 0.1818566145, 0.2330511263, 0.1804632313, 0.1454326691, 0.01, 0.05479083638, 0.1324077467,
        0.1917251967, 0.2081465041, 0.1830411641, 0.1334047456 } },
    { 'CosineAnnealingLR', nil,
      { 0.5, 0.4532091636, 0.3307091636, 0.1792908364, 0.06251470843, 0.01, 0.05679083638, 0.1792908364,
        1.317154762, 1.816443452, 2.007154762, 1.816443452 } },
    { 'ExponentialLR', nil,
      { 0.5, 0.45, 0.405, 0.3645, 0.18, 0.162, 0.1458, 0.13122, 0.63, 0.567, 0.5103, 0.45927 } },
    { 'StepLR', nil,
      { 0.5, 0.5, 0.5, 0.25, 0.2, 0.2, 0.1, 0.1, 0.7, 0.35, 0.35, 0.35 } },
    { 'MultiStepLR', nil,
      { 0.5, 0.5, 0.05, 0.05, 0.2, 0.02, 0.02, 0.02, 0.7, 0.7, 0.7, 0.7 } },
    { 'ConstantLR', nil,
      { 0.125, 0.125, 0.125, 0.125, 0.8, 0.8, 0.8, 0.8, 0.7, 0.7, 0.7, 0.7 } },
    { 'LinearLR', nil,
      { 0.05, 0.1083333333, 0.1666666667, 0.225, 0.2518518519, 0.3037037037, 0.3555555556, 0.3555555556, 0.7,
        0.7, 0.7, 0.7 } },
    { 'PolynomialLR', nil,
      { 0.5, 0.3828125, 0.28125, 0.1953125, 0.128, 0.072, 0.032, 0.008, 0, 0, 0, 0 } },
    { 'LambdaLR', nil,
      { 0.5, 0.25, 0.1666666667, 0.125, 0.1, 0.08333333333, 0.07142857143, 0.0625, 0.05555555556, 0.05,
        0.04545454545, 0.04166666667 } },
    { 'SequentialLR', nil,
      { 0.05, 0.2, 0.35, 0.5, 0.5, 0.4, 0.32, 0.256, 0.56, 0.448, 0.3584, 0.28672 } },
  }
  for _, case in ipairs(chains) do
    it('goes on from the rate in force: ' .. case[1] .. (case[2] and ' and ' .. case[2] or ''), function()
      local o = sgd()
      local s = make[case[1]](o)
      if not case[2] then return same(case[3], run(s, o, 12, { [3] = 0.2, [7] = 0.7 })) end
      same(case[3], run(sched.ChainedScheduler { s, make[case[2]](o) }, o, 12))
      local p = sgd()
      same(case[3], run({ make[case[1]](p), make[case[2]](p) }, p, 12))
    end)
  end

  it('ChainedScheduler takes schedulers alone, before and behind the optimiser', function()
    local function list(o) return { make.CosineAnnealingLR(o), make.ExponentialLR(o) } end
    local want = chains[1][3]
    for _, build in ipairs {
      function(o) return sched.ChainedScheduler(list(o)) end,
      function(o) return sched.ChainedScheduler(list(o), o) end,
      function(o) return sched.ChainedScheduler(list(o), { optimizer = o }) end,
      function(o) return sched.ChainedScheduler(o, list(o)) end,
    } do
      local o = sgd()
      same(want, run(build(o), o, 12))
    end
    local ok, text = pcall(sched.ChainedScheduler, { make.StepLR(sgd()), make.StepLR(sgd()) })
    assert.is_false(ok)
    assert.truthy(text:find('scheduler 2 is of another optimiser', 1, true), text)
    assert.has_error(function() sched.ChainedScheduler {} end)
  end)

  it('a chain goes on from its state', function()
    local function chain(o) return sched.ChainedScheduler { make.CosineAnnealingLR(o), make.LinearLR(o) } end
    local o, p = sgd(), sgd()
    local s, t = chain(o), chain(p)
    for _ = 1, 3 do s:step() end
    t:load_state_dict(s:state_dict())
    for _ = 1, 4 do
      near(o.param_groups[1].lr, p.param_groups[1].lr, 'after loading')
      s:step()
      t:step()
    end
  end)

  it('ReduceLROnPlateau lowers the rate when a value stays', function()
    local o = sgd(1)
    local s = sched.ReduceLROnPlateau(o, { factor = 0.5, patience = 1, cooldown = 1, min_lr = 0.1 })
    local values = { 5, 4, 4, 4, 4, 4, 4, 3, 3, 3, 3, 3, 3, 3 }
    local rates = { 1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.1, 0.1 }
    for k, v in ipairs(values) do
      s:step(v)
      near(rates[k], o.param_groups[1].lr, 'value ' .. k)
    end
  end)

  it('OneCycleLR moves the momentum the other way', function()
    local o = sgd(1)
    local s = sched.OneCycleLR(o, 1, { total_steps = 6 })
    for k, want in ipairs { 0.95, 0.8505584587, 0.8688255099, 0.9037365047, 0.9366525936, 0.95 } do
      near(want, o.param_groups[1].momentum, 'step ' .. k - 1)
      if k < 6 then s:step() end
    end
    assert.has_error(function()
      s:step()
      s:step()
    end)
  end)

  it('WarmupLR rises, then follows another', function()
    local o = sgd(1)
    local s = sched.WarmupLR(o, sched.ExponentialLR(o, 0.5), { warmup_iters = 4, start_factor = 0 })
    for k, want in ipairs { 0, 0.25, 0.5, 0.75, 1, 0.5, 0.25 } do
      near(want, o.param_groups[1].lr, 'epoch ' .. k - 1)
      s:step()
    end
  end)

  it('goes on from its state', function()
    local o = sgd()
    local s = sched.StepLR(o, 2, { gamma = 0.5 })
    for _ = 1, 3 do s:step() end
    local saved = s:state_dict()
    local p = sgd()
    local t = sched.StepLR(p, 2, { gamma = 0.5 })
    t:load_state_dict(saved)
    s:step()
    t:step()
    near(o.param_groups[1].lr, p.param_groups[1].lr, 'after loading')
  end)

  -- What is given in order, and the same by name.
  for name, given in pairs {
    StepLR = { { 2, 0.5 }, { step_size = 2, gamma = 0.5 } },
    MultiStepLR = { { { 1, 3 }, 0.5 }, { milestones = { 1, 3 }, gamma = 0.5 } },
    ExponentialLR = { { 0.5 }, { gamma = 0.5 } },
    ConstantLR = { { 0.5, 2 }, { factor = 0.5, total_iters = 2 } },
    LinearLR = { { 0.5, 0.75, 3 }, { start_factor = 0.5, end_factor = 0.75, total_iters = 3 } },
    PolynomialLR = { { 4, 2 }, { total_iters = 4, power = 2 } },
    CosineAnnealingLR = { { 4, 0.1 }, { T_max = 4, eta_min = 0.1 } },
    CosineAnnealingWarmRestarts = { { 2, 2, 0.1 }, { T_0 = 2, T_mult = 2, eta_min = 0.1 } },
    LambdaLR = { { function(e) return e / 4 end }, { lr_lambda = function(e) return e / 4 end } },
    OneCycleLR = { { 1, 6, nil, nil, 0.5, 'linear', false, 0.8, 0.9, 10, 100, true },
      { max_lr = 1, total_steps = 6, pct_start = 0.5, anneal_strategy = 'linear', cycle_momentum = false,
        base_momentum = 0.8, max_momentum = 0.9, div_factor = 10, final_div_factor = 100, three_phase = true } },
  } do
    it(name .. ' takes all arguments by name', function()
      local a, b = sgd(), sgd()
      local s, t = sched[name](a, unpack(given[1], 1, table.maxn(given[1]))), sched[name](b, given[2])
      local different
      for epoch = 0, 4 do
        assert.equal(a.param_groups[1].lr, b.param_groups[1].lr, 'epoch ' .. epoch)
        different = different or a.param_groups[1].lr ~= 0.5
        s:step()
        t:step()
      end
      assert.is_true(different)
      given[2].gama = 1
      assert.is_false(pcall(sched[name], sgd(), given[2]))
    end)
  end

  it('schedulers of schedulers take all arguments by name', function()
    local a, b = sgd(), sgd()
    local function parts(o) return { sched.ConstantLR(o, 0.1, 20), sched.ExponentialLR(o, { gamma = 0.9 }) } end
    for _, pair in ipairs {
      { sched.SequentialLR(a, parts(a), { 2 }), sched.SequentialLR(b, { schedulers = parts(b), milestones = { 2 } }) },
      { sched.ChainedScheduler(a, parts(a)), sched.ChainedScheduler(b, { schedulers = parts(b) }) },
      { sched.WarmupLR(a, parts(a)[2], 3, 0.5),
        sched.WarmupLR(b, { after = parts(b)[2], warmup_iters = 3, start_factor = 0.5 }) },
      { sched.WarmupLR(a, parts(a)[2]), sched.WarmupLR(b, { after = parts(b)[2] }) },
      { sched.ReduceLROnPlateau(a, 'max', 0.5, 0, 1e-3, 'abs', 1, 0.01, 0),
        sched.ReduceLROnPlateau(b, { mode = 'max', factor = 0.5, patience = 0, threshold = 1e-3,
          threshold_mode = 'abs', cooldown = 1, min_lr = 0.01, eps = 0 }) },
    } do
      for epoch = 0, 4 do
        assert.equal(a.param_groups[1].lr, b.param_groups[1].lr, 'epoch ' .. epoch)
        pair[1]:step(pair[1].num_bad_epochs and 1)
        pair[2]:step(pair[2].num_bad_epochs and 1)
      end
    end
  end)

  it('takes an argument once, and misses what it needs', function()
    for _, case in ipairs {
      { 'StepLR: step_size is given twice', sched.StepLR, 2, { step_size = 3 } },
      { 'StepLR: gamma is given twice', sched.StepLR, 2, 0.5, { gamma = 0.5 } },
      { 'OneCycleLR: max_lr is given twice', sched.OneCycleLR, 1, { max_lr = 1, total_steps = 5 } },
      { 'StepLR: step_size must be', sched.StepLR, { gamma = 0.5 } },
      { 'MultiStepLR: milestones must be', sched.MultiStepLR, { gamma = 0.5 } },
      { 'OneCycleLR: max_lr must be', sched.OneCycleLR, { total_steps = 5 } },
      { 'LambdaLR: a function', sched.LambdaLR, {} },
      { "LambdaLR: there is no option 'f'", sched.LambdaLR, { f = math.sin, lr_lambda = math.sin } },
    } do
      local ok, text = pcall(case[2], sgd(), unpack(case, 3))
      assert.is_false(ok)
      assert(text:find(case[1], 1, true), text)
    end
  end)

  it('names a wrong option', function()
    assert.has_error(function() sched.StepLR(sgd(), 2, { gama = 1 }) end)
    local ok, text = pcall(sched.StepLR, sgd(), 2, { gama = 1 })
    assert.is_false(ok)
    assert.truthy(text:find("did you mean 'gamma'", 1, true))
  end)
end)
