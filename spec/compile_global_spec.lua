-- Compiled steps on global tensors, on ranks that are threads: the losses of one rank and of eager global tensors
-- under data, tensor and two-axis plans, with dropout, clipping, micro-batches and writes; results and conversions
-- inside of steps; ranks that compile different steps.
local mf = require 'moonflow'
local comm = mf.comm

local function on(n, f, o)
  o = o or {}
  o.timeout = o.timeout or 60
  return comm._spawn(n, f, o)
end

local function close(a, b, where)
  if type(a) == 'table' then
    for k in pairs(a) do close(a[k], b[k], where .. '.' .. k) end
  else
    assert(math.abs(a - b) <= 1e-9 * (1 + math.abs(b)), ('%s: %.15g, not %.15g'):format(where, a, b))
  end
end

-- Losses, norms and parameters of a small net under a plan; how: 'eager' or 'compiled'.
local function train(plan, how, steps, micro, overlap)
  return function(_, n)
    local m = require 'moonflow'
    local nn, optim = m.nn, m.optim
    m.manual_seed(3)
    local model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.25),
      nn.Linear(8, 5)):double()
    local p, batch = nil, 'B'
    if plan == 'data' then
      p, batch = m.placement 'cpu', 'S0'
      model:to_global(p, 'B')
    elseif plan == 'tensor' then
      p = m.placement 'cpu'
      model:to_global(p, function(name)
        if name:find '^[01]' then return 'S0' end
        return name == '5.weight' and 'S1' or 'B'
      end)
    elseif plan == 'both' then
      p, batch = m.placement('cpu', { { 0, 1 }, { 2, 3 } }), { 'S0', 'B' }
      model:to_global(p, function(name)
        if name:find '^1' then return { 'B', 'S0' } end
        return name == '5.weight' and { 'B', 'S1' } or { 'B', 'B' }
      end)
    elseif plan == 'sharded' then
      p, batch = m.placement 'cpu', 'S0'
      model:to_global(p, 'S0')
    end
    local opt = optim.AdamW(model:parameters(), { lr = 0.02, weight_decay = 0.1 })
    local function step(x, y)
      local loss = m.cross_entropy(model(x), y)
      opt:zero_grad()
      loss:backward()
      local norm = nn.utils.clip_grad_norm_(model:parameters(), 0.5)
      opt:step()
      return loss, norm
    end
    local compiled = how == 'compiled' and m.compile(step, { gradient_accumulation_steps = micro or 1,
      overlap = overlap, passes = overlap and { buckets = false } or nil })
    step = compiled or step
    local losses = {}
    for k = 1, steps do
      local x, y = m.randint(0, 7, { 12 }), m.randint(0, 5, { 12 })
      if p then x, y = m.distribute(x, p, batch), m.distribute(y, p, batch) end
      local loss, norm = step(x, y)
      losses[2 * k - 1], losses[2 * k] = loss:item(), norm:item()
    end
    local w = {}
    for name, t in model:named_parameters() do w[name] = t:tolist() end
    return { losses, w, n, compiled and compiled:plan() or '' }
  end
end

describe('compiled steps on global tensors', function()
  it('give the losses and parameters of one rank under every plan', function()
    local want = on(1, train('none', 'eager', 50))[1]
    for _, case in ipairs { { 'data', 2 }, { 'tensor', 2 }, { 'both', 4 }, { 'sharded', 2 }, { 'data', 4 },
      { 'tensor', 4 }, { 'data', 3 } } do
      local plan, n = case[1], case[2]
      local got = on(n, train(plan, 'compiled', 50))
      for r = 1, n do
        close(got[r][1], want[1], plan .. n .. ' losses')
        close(got[r][2], want[2], plan .. n)
      end
    end
  end)

  it('communicate on a thread of their own while they compute', function()
    local want = on(1, train('none', 'eager', 20))[1]
    for _, case in ipairs { { 'data', 2 }, { 'both', 4 }, { 'sharded', 2 }, { 'data', 2, 3 } } do
      local plan, n, micro = unpack(case)
      for _, overlap in ipairs { true, false } do
        local got = on(n, train(plan, 'compiled', micro and 8 or 20, micro, overlap))
        for r = 1, n do
          close(got[r][1], { unpack(want[1], 1, #got[r][1]) }, plan .. n .. ' losses')
          local first = got[r][4]:match 'task stream 1, steps 1' ~= nil
          assert.equal(overlap, first and got[r][4]:find('stream cpu "comm"', 1, true) ~= nil)
        end
      end
    end
  end)

  it('average micro-batches to the step of the whole batch, with its dropout', function()
    local want = on(1, train('none', 'eager', 8))[1]
    for _, case in ipairs { { 'data', 2 }, { 'tensor', 2 }, { 'both', 4 } } do
      local got = on(case[2], train(case[1], 'compiled', 8, 3))
      for r = 1, case[2] do close(got[r][1], want[1], case[1] .. ' micro') end
    end
  end)

  it('convert inside, give parts, take parts and local wholes, and leave what was asked for', function()
    local function run(compiled)
      return function(r)
        local m = require 'moonflow'
        local p = m.placement 'cpu'
        local w = m.distribute(m.arange(12):to(m.float64):reshape(4, 3), p, 'S0'):requires_grad_()
        local count = m.zeros(2, { placement = p, sbp = 'B' })
        local function f(x, own)
          local y = (x:to_global { sbp = 'S1' } * w):to_global { sbp = 'B', grad_sbp = 'P' }
          local part = w:to_local() * 3
          local whole = part:to_global(p, 'S0')
          local mine = own:to_global(p, 'S0') -- parts of one
          local z = m.full({ 4, 3 }, 2, { placement = p, sbp = 'S0', dtype = m.float64 }) + whole
          local loss = y:exp():mean() + (z * z):sum() + mine:sum() * w:sum()
          w.grad = nil
          loss:backward()
          m.no_grad(function()
            count:add_(1)
            w:sub_(w.grad * 1e-4)
          end)
          return loss, y, z, w.grad * 1, part * 1
        end
        if compiled then f = m.compile(f) end
        local out = {}
        for k = 1, 3 do
          local x = m.distribute(m.ones(4, 3, { dtype = m.float64 }) * (k * 0.1), p, 'S0')
          local got = { f(x, m.full({ 2, 2 }, r + k, { dtype = m.float64 })) }
          for i, t in ipairs(got) do out[#out + 1] = { t:tolist(), i < 5 and tostring(t.sbp) or '' } end
        end
        out[#out + 1] = { w:tolist(), count:tolist() }
        return out
      end
    end
    local want, got = on(2, run(false)), on(2, run(true))
    local text = require 'moonflow.worker'.pack
    for r = 1, 2 do
      for i, t in ipairs(want[r]) do
        if type(t[2]) == 'string' then assert.equal(t[2], got[r][i][2]) end
        close(got[r][i][1], t[1], 'value ' .. i)
      end
      assert(text(got[r][#want[r]][2]) == text(want[r][#want[r]][2]))
    end
  end)

  it('keep statistics, means and draws of the whole, whatever is fused', function()
    local function run(compiled)
      return function(_, n)
        local m = require 'moonflow'
        local nn = m.nn
        m.manual_seed(4)
        local model = nn.Sequential(nn.Conv2d(3, 4, 3, { padding = 1 }), nn.BatchNorm2d(4), nn.ReLU(),
          nn.Conv2d(4, 6, 3, { stride = 2 }), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
          nn.Dropout(0.1), nn.Linear(6, 5)):double()
        local p = n > 1 and m.placement 'cpu'
        if p then model:to_global(p, 'B') end
        local opt = m.optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })
        local function step(x, y)
          local z = model(x)
          local loss = m.cross_entropy(z, y) + (z * 2):square():mean() + m.mse_loss(z:tanh(), z:detach())
          opt:zero_grad()
          loss:backward()
          opt:step()
          return loss
        end
        if compiled then step = m.compile(step) end
        local out = {}
        for k = 1, 5 do
          local x, y = m.randn(9, 3, 8, 8):double(), m.randint(0, 5, { 9 })
          if p then x, y = m.distribute(x, p, 'S0'), m.distribute(y, p, 'S0') end
          out[k] = step(x, y):item()
        end
        for _, b in model:named_buffers() do out[#out + 1] = b:double():sum():item() end
        return out
      end
    end
    local want = on(1, run(false))[1]
    for _, n in ipairs { 2, 4 } do
      local got = on(n, run(true))
      for r = 1, n do close(got[r], want, n .. ' ranks') end
    end
  end)

  it('have plans that read back, and run over no loader', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p, q = m.placement 'cpu', m.placement('cpu', { 1, 0 })
      local w = m.distribute(m.arange(6):to(m.float64), p, 'B')
      local step = m.compile(function(x)
        return (m.dropout(x, 0.5) * w):sum():to_global { sbp = 'B' }, (x * 2):to_global(q, 'S0')
      end)
      local x = m.distribute(m.ones(6, { dtype = m.float64 }), p, 'S0')
      m.manual_seed(1)
      local a = step(x):item()
      local text = step:plan()
      m.manual_seed(1)
      local job = m._plan(text, { w:to_local() }, {})
      local b = job:run(x:to_local()):item()
      local ok, message = pcall(function() step:over(function() return x end)() end)
      return { a, b, job:plan() == text, ok, tostring(message) }
    end)
    for r = 1, 2 do
      assert(got[r][1] == got[r][2] and got[r][3], got[r][1] .. ' ' .. got[r][2])
      assert(not got[r][4] and got[r][5]:find('global', 1, true), got[r][5])
    end
  end)

  it('go from stage to stage, and gradients come back', function()
    local function run(compiled)
      return function()
        local m = require 'moonflow'
        m.manual_seed(1)
        local a, b = m.nn.Linear(4, 6):double(), m.nn.Linear(6, 2):double()
        local first, second = m.placement('cpu', { 0, 1 }), m.placement('cpu', { 2, 3 })
        a:to_global(first, 'B')
        b:to_global(second, 'B')
        local opt = m.optim.SGD({ a.weight, a.bias, b.weight, b.bias }, { lr = 0.1 })
        local function step(x)
          local y = b(a(x):tanh():to_global(second, 'S0'))
          local loss = (y * y):mean()
          opt:zero_grad()
          loss:backward()
          opt:step()
          return loss:to_global(m.placement 'cpu', 'B')
        end
        if compiled then step = m.compile(step) end
        local losses = {}
        for k = 1, 5 do
          losses[k] = step(m.distribute(m.randn(6, 4, { dtype = m.float64 }), first, 'S0')):item()
        end
        return losses
      end
    end
    local want, got = on(4, run(false)), on(4, run(true))
    for r = 1, 4 do close(got[r], want[1], 'stages') end
  end)

  it('must be the same on all ranks, else the first line that differs is told', function()
    local _, errors = on(2, function(r)
      local m = require 'moonflow'
      local x = m.ones(4, { placement = m.placement 'cpu', sbp = 'S0' })
      return m.compile(function(y) return r == 0 and y:exp() or y:tanh() end)(x):sum():item()
    end, { catch = true })
    for r = 1, 2 do
      assert(tostring(errors[r]):find('ranks 0 and 1 compiled different steps.*rank 0: %%1 = exp.*rank 1: %%1 = tanh'),
        tostring(errors[r]))
    end
  end)

  it('stop all ranks when they fail on one', function()
    local function failing(overlap)
      return function(r)
        local m = require 'moonflow'
        local p = m.placement 'cpu'
        local w = m.ones(4, 2, { placement = p, sbp = 'B' })
        local f = m.compile(function(ids, k)
          local sum = (w * k):sum():to_global { sbp = 'P' }:to_global { sbp = 'B' } -- goes round at once
          return m.embedding(ids, w):sum():to_global { sbp = 'B' } + sum
        end, { overlap = overlap })
        local ids = m.tensor({ 0, r == 1 and 9 or 1 }, { dtype = m.int64 })
        return f(ids:to_global(p, 'S0'), 2):item()
      end
    end
    for _, overlap in ipairs { true, false } do
      local begun = os.time()
      local _, errors = on(2, failing(overlap), { catch = true })
      for r = 1, 2 do assert(tostring(errors[r]):find 'embedding.*9', tostring(errors[r])) end
      assert(tostring(errors[1]):find 'rank 1', tostring(errors[1]))
      assert(os.time() - begun < 10)
    end
  end)

  it('have no values outside, and say so', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p, kept = m.placement 'cpu', nil
      local w = m.ones(4, 2, { placement = p, sbp = 'S0' })
      local texts = {}
      m.compile(function(x)
        kept = { x + 1, w:t() }
        local ok, message = pcall(function() return (x * 2):sum():item() end)
        texts[1] = not ok and tostring(message)
        return x * 2
      end)(w)
      for k = 1, 2 do
        local ok, message = pcall(function() return (kept[k] * 2):sum():item() end)
        texts[k + 1] = not ok and tostring(message)
      end
      return texts
    end)
    for r = 1, 2 do
      assert(got[r][1]:find('is being compiled', 1, true), got[r][1])
      for k = 2, 3 do assert(got[r][k]:find('belongs to a step that was compiled', 1, true), got[r][k]) end
    end
  end)
end)
