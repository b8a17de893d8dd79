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

  it('names a wrong option', function()
    assert.has_error(function() sched.StepLR(sgd(), 2, { gama = 1 }) end)
    local ok, text = pcall(sched.StepLR, sgd(), 2, { gama = 1 })
    assert.is_false(ok)
    assert.truthy(text:find("did you mean 'gamma'", 1, true))
  end)
end)
