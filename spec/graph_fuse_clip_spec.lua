-- The pass fuse_clip, and updates with a factor of their gradients.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function fuse(text) return (mf._graph_pass(text, 'fuse_clip,dce')) end

local before = [[
graph step
%%0 = input s: float32[]
%%1 = capture g: float32[3]
%%2 = capture h: float32[2]
%%3 = capture p: float32[3]
%%4 = capture q: float32[2]
%%5, %%6 = scale_all_(%%0, [%%1, %%2]): float32[3], float32[2]
%%7, %%8 = sgd_([%%3, %%4], [%%5, %%6], [], none, none, lr=0.1): float32[3], float32[2]
write %%3 = %%7
write %%4 = %%8
return%s
]]

describe('fuse_clip', function()
  it('gives an update the factor of its gradients', function()
    assert.equal([[
graph step
%0 = input s: float32[]
%1 = capture g: float32[3]
%2 = capture h: float32[2]
%3 = capture p: float32[3]
%4 = capture q: float32[2]
%5, %6 = sgd_([%3, %4], [%1, %2], [], %0, lr=0.1): float32[3], float32[2]
write %3 = %5
write %4 = %6
return
]], fuse(before:format ''))
  end)

  it('leaves gradients that others read, and updates of which not all are scaled', function()
    for _, text in ipairs { before:format ' %5', (before:format '':gsub('%[%%5, %%6%]', '[%%5, %%2]')) } do
      assert.equal((mf._graph_pass(text, 'dce')), fuse(text))
    end
  end)
end)

describe('a step that clips', function()
  local makers = {
    sgd = function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, weight_decay = 0.01 }) end,
    adam = function(p) return optim.AdamW(p, { lr = 0.01, amsgrad = true }) end,
    rmsprop = function(p) return optim.RMSprop(p, { lr = 0.01, centered = true, momentum = 0.5 }) end,
    adagrad = function(p) return optim.Adagrad(p, { lr = 0.1 }) end,
    adadelta = function(p) return optim.Adadelta(p) end,
    adamax = function(p) return optim.Adamax(p, { lr = 0.01 }) end,
  }
  -- Norms and parameters of some steps.
  local function train(make, dtype, options)
    mf.manual_seed(5)
    local model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7)):to(dtype)
    local opt = make(model:parameters())
    local function step(x)
      opt:zero_grad()
      local loss = model(x):square():sum()
      loss:backward()
      local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.5)
      opt:step()
      return norm
    end
    local run, results = options and mf.compile(step, options) or step, {}
    for i = 1, 4 do
      mf.manual_seed(i)
      results[i] = run(mf.randn({ 20, 30 }, { dtype = dtype })):detach():clone()
    end
    assert(results[1]:item() > 0.5)
    for _, p in ipairs(model:parameters()) do results[#results + 1] = p:detach() end
    return results, options and tostring(run)
  end
  -- With a scaler, micro-batches, halves or all of it.
  for name, how in pairs {
    scaled = { scaled = true }, ['in micro-batches'] = { times = 2 },
    ['scaled, in micro-batches'] = { scaled = true, times = 2 },
    ['with products in bfloat16'] = { amp = 'bfloat16' },
    ['scaled, with products in bfloat16, in micro-batches'] = { scaled = true, amp = 'bfloat16', times = 2 },
  } do
    it('is the same with the pass and without: ' .. name, function()
      local function run(fused)
        mf.manual_seed(5)
        local model = nn.Sequential(nn.Linear(30, 50), nn.Tanh(), nn.Linear(50, 7))
        local opt = optim.AdamW(model:parameters(), { lr = 0.01 })
        local scaler = mf.amp.GradScaler { init_scale = 8, enabled = how.scaled or false }
        local step = mf.compile(function(x)
          opt:zero_grad()
          scaler:scale(model(x):square():sum()):backward()
          scaler:unscale_(opt)
          local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.5)
          scaler:step(opt)
          scaler:update()
          return norm
        end, { passes = { fuse_clip = fused },
          gradient_accumulation_steps = how.times, amp = how.amp, amp_force = how.amp and true })
        local results = {}
        for i = 1, 4 do
          mf.manual_seed(i)
          local x = mf.randn { 20, 30 }
          if i == 2 and how.scaled then x = x * math.huge end
          results[i] = step(x):detach():clone()
        end
        assert(how.scaled or results[1]:item() > 0.5)
        for _, p in ipairs(model:parameters()) do results[#results + 1] = p:detach() end
        return results, tostring(step)
      end
      local want, plain = run(false)
      local got, text = run(true)
      -- what a scaler multiplies with has others who read it: the norm
      local left = how.scaled and 1 or 0
      assert.equal(left + 1, select(2, plain:gsub('scale_all_', '')))
      assert.equal(left, select(2, text:gsub('scale_all_', '')))
      for i = 1, #want do
        assert(mf.equal(want[i], got[i]) or want[i]:isnan():all():item() and got[i]:isnan():all():item(), i)
      end
    end)
  end
  it('takes what a scaler multiplies with, where nothing else reads that', function()
    local function run(how)
      local w = mf.tensor({ 1, 2, 3 }, { requires_grad = true })
      local opt, scaler = optim.AdamW({ w }, { lr = 0.1 }), mf.amp.GradScaler { init_scale = 3 }
      local function f(x)
        opt:zero_grad()
        scaler:scale((w * x):square():sum()):backward()
        scaler:step(opt)
        scaler:update()
        return w:clone()
      end
      local step, results = how and mf.compile(f, how) or f, {}
      for k, by in ipairs { 0.1, math.huge, 0.3, 0.7 } do
        results[k] = step(mf.tensor { by, by / 2, by / 3 }):detach():clone()
      end
      return results, how and tostring(step)
    end
    local want = run()
    local got, text = run { passes = { algebra = false, fold = false } }
    assert.is_nil(text:find('scale_all_', 1, true), text)
    for k = 1, 4 do assert(mf.equal(want[k], got[k]), k) end
  end)
  for name, make in pairs(makers) do
    for _, dtype in ipairs { mf.float32, mf.float64 } do
      it(('gives the same bits: %s, %s'):format(name, tostring(dtype)), function()
        local want = train(make, dtype)
        local got, text = train(make, dtype, { passes = { fuse_clip = true, dce = true } })
        for i = 1, #want do assert(mf.equal(want[i], got[i]), i) end
        assert.is_nil(text:find('scale_all_', 1, true), text)
      end)
    end
  end
end)
