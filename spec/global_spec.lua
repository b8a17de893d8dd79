-- Global tensors on ranks that are threads: placements and layouts, conversion between every pair on one and two
-- axes and between placements, gradients through conversions, factories, views and writes, printing, files, modules
-- and optimisers, errors, and ranks that differ. What is expected is what one rank computes.
local mf = require 'moonflow'
local comm = mf.comm

local function on(n, f, o)
  o = o or {}
  o.timeout = o.timeout or 20
  return comm._spawn(n, f, o)
end

local function fails(n, f, pattern)
  local _, errors = on(n, f, { catch = true })
  for r = 1, n do
    assert(errors[r] and errors[r]:find(pattern), ('rank %d: %s'):format(r - 1, tostring(errors[r])))
  end
end

describe('global tensors', function()
  it('have a placement, SBP and the whole shape', function()
    local got = on(4, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { { 0, 1 }, { 2, 3 } })
      local x = m.zeros(6, 5, { placement = p, sbp = { 'S0', 'S(1)' } })
      assert(x.is_global and x.placement == p and not m.zeros(1).is_global)
      assert(m.placement('cpu', { 0, 1 }) ~= p and m.placement('cpu', { { 0, 1 }, { 2, 3 } }) == p)
      return { tostring(p), tostring(x.shape), tostring(x.sbp), x.sbp[2], tostring(x:to_local().shape),
        tostring(p.hierarchy), p.ranks, p.device, m.sbp.split(2) .. m.sbp.broadcast .. m.sbp.partial_sum,
        tostring(m.placement 'cpu'), x:numel(), x.ndim }
    end)
    local parts = { '(3, 3)', '(3, 2)', '(3, 3)', '(3, 2)' }
    for r = 1, 4 do
      assert.same({ "placement('cpu', {{0, 1}, {2, 3}})", '(6, 5)', '(S0, S1)', 'S1', parts[r], '(2, 2)',
        { { 0, 1 }, { 2, 3 } }, 'cpu', 'S2BP', "placement('cpu', {0, 1, 2, 3})", 30, 2 }, got[r])
    end
  end)

  it('come from parts, and parts come back', function()
    local got = on(3, function(r)
      local m = require 'moonflow'
      local p = m.placement('cpu', { 2, 0, 1 }) -- rank 2 has the first part
      local at = ({ [0] = 1, 2, 0 })[r]
      local part = m.arange(7):to(m.float64):narrow(0, ({ 0, 3, 5 })[at + 1], ({ 3, 2, 2 })[at + 1])
      local x = part:to_global(p, 'S0')
      local sum = m.full({ 2 }, r + 1):to_global(p, 'P')
      local top = m.full({ 2 }, r + 1):to_global(p, 'Pmax')
      local low = m.full({ 2 }, r + 1):to_global(p, 'Pmin')
      return { x:tolist(), x:to_local():tolist(), sum:tolist(), top:tolist(), low:tolist(), tostring(x.shape) }
    end)
    local parts = { { 3, 4 }, { 5, 6 }, { 0, 1, 2 } }
    for r = 1, 3 do
      assert.same({ { 0, 1, 2, 3, 4, 5, 6 }, parts[r], { 6, 6 }, { 3, 3 }, { 1, 1 }, '(7,)' }, got[r])
    end
  end)

  it('have empty parts where there are fewer rows than ranks', function()
    local got = on(4, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1, 2, 3 })
      local x = m.distribute(m.tensor { { 1, 2 }, { 3, 4 } }, p, 'S0'):requires_grad_()
      local y = (x * 2 + 1):relu()
      y:sum():backward()
      local z = m.zeros(0, 3, { placement = p, sbp = 'S0' })
      return { tostring(x:to_local().shape), y:tolist(), x.grad:tolist(), tostring(x.grad:to_local().shape),
        z:sum():item(), tostring((z + 1).shape), x:to_global { sbp = 'S1' }:to_global { sbp = 'P' }:tolist() }
    end)
    for r = 1, 4 do
      local shape = r <= 2 and '(1, 2)' or '(0, 2)'
      assert.same({ shape, { { 3, 5 }, { 7, 9 } }, { { 2, 2 }, { 2, 2 } }, shape, 0, '(0, 3)', { { 1, 2 }, { 3, 4 } } },
        got[r])
    end
  end)
end)

describe('conversion', function()
  local function every_pair(sizes)
    local n = 1
    for _, k in ipairs(sizes) do n = n * k end
    local got = on(n, function()
      local m = require 'moonflow'
      local at = 0
      local function grid(axis)
        local list = {}
        for i = 1, sizes[axis] do
          if axis == #sizes then
            list[i], at = at, at + 1
          else
            list[i] = grid(axis + 1)
          end
        end
        return list
      end
      local p = m.placement('cpu', grid(1))
      local kinds, lists = { 'B', 'P', 'S0', 'S1', 'Pmax' }, { {} }
      for _ = 1, #sizes do
        local longer = {}
        for _, list in ipairs(lists) do
          for _, kind in ipairs(kinds) do
            local new = { unpack(list) }
            new[#new + 1] = kind
            longer[#longer + 1] = new
          end
        end
        lists = longer
      end
      local whole = (m.arange(35):reshape(7, 5) - 11):to(m.float64)
      local wrong, count = {}, 0
      for _, from in ipairs(lists) do
        local x = m.distribute(whole, p, from)
        for _, to in ipairs(lists) do
          local y = x:to_global { sbp = to }
          count = count + 1
          local fits = tostring(y.sbp) == tostring(m.zeros(7, 5, { placement = p, sbp = to }).sbp)
          local back = y:to_global { sbp = m._whole(p) }:to_local()
          if not fits or not back:eq(whole):all():item() then
            wrong[#wrong + 1] = table.concat(from, ',') .. ' to ' .. table.concat(to, ',')
          end
        end
      end
      return { wrong, count }
    end, { timeout = 60 })
    local pairs_ = (5 ^ #sizes) ^ 2
    for r = 1, n do assert.same({ {}, pairs_ }, got[r]) end
  end

  it('works for every pair on one axis', function()
    for _, n in ipairs { 1, 2, 3, 4 } do every_pair { n } end
  end)
  it('works for every pair on two axes', function()
    every_pair { 2, 2 }
    every_pair { 2, 3 }
  end)
  it('works for a sample of pairs on three axes', function()
    local got = on(8, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { { { 0, 1 }, { 2, 3 } }, { { 4, 5 }, { 6, 7 } } })
      local whole = m.arange(9 * 10):reshape(9, 10):to(m.float64)
      local lists = { { 'S0', 'S0', 'S0' }, { 'S1', 'P', 'S0' }, { 'B', 'S0', 'S1' }, { 'P', 'P', 'P' },
        { 'S0', 'S1', 'S0' }, { 'S1', 'S1', 'B' } }
      local ok = true
      for _, from in ipairs(lists) do
        for _, to in ipairs(lists) do
          local y = m.distribute(whole, p, from):to_global { sbp = to }
          ok = ok and y:to_global { sbp = { 'B', 'B', 'B' } }:to_local():eq(whole):all():item()
        end
      end
      return ok
    end, { timeout = 60 })
    for r = 1, 8 do assert.is_true(got[r]) end
  end)

  it('works between placements that are equal, overlap, or share no rank', function()
    local got = on(5, function()
      local m = require 'moonflow'
      local places = { m.placement('cpu', { 0, 1 }), m.placement('cpu', { 1, 2, 3 }), m.placement('cpu', { 4 }),
        m.placement('cpu', { { 3, 1 }, { 0, 2 } }), m.placement('cpu', { 1, 0 }) }
      local one, two = { 'B', 'P', 'S0', 'S1', 'Pmax' }, { { 'S0', 'S0' }, { 'B', 'S1' }, { 'P', 'S0' }, { 'S1', 'P' } }
      local whole = (m.arange(21):reshape(7, 3) - 9):to(m.float64)
      local wrong, count = {}, 0
      for _, a in ipairs(places) do
        for _, b in ipairs(places) do
          for _, from in ipairs(#a.hierarchy == 1 and one or two) do
            local x = m.distribute(whole, a, from)
            for _, to in ipairs(#b.hierarchy == 1 and one or two) do
              local y = x:to_global(b, to)
              count = count + 1
              local here = y:to_global { sbp = m._whole(b) }:to_local()
              if here:numel() > 0 and not here:eq(whole):all():item() then
                wrong[#wrong + 1] = ('%s to %s'):format(tostring(x.sbp), tostring(y.sbp))
              end
            end
          end
        end
      end
      return { wrong, count }
    end, { timeout = 60 })
    for r = 1, 5 do assert.same({}, got[r][1]) end
    assert(got[1][2] == 24 * 24, got[1][2])
  end)

  it('keeps what is exact: dtypes, and values that are not summed', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local ok = true
      for _, name in ipairs { 'uint8', 'int8', 'int16', 'int32', 'int64', 'float16', 'bfloat16', 'float32', 'bool' } do
        local whole = m.tensor({ { 1, 0, 1 }, { 0, 1, 1 }, { 1, 1, 0 } }, { dtype = m[name] })
        for _, from in ipairs { 'B', 'S0', 'S1', 'P' } do
          for _, to in ipairs { 'B', 'S0', 'S1', 'P' } do
            local y = m.distribute(whole, p, from):to_global { sbp = to }
            ok = ok and y.dtype == whole.dtype and y:to_global { sbp = 'B' }:to_local():eq(whole):all():item()
          end
        end
      end
      return ok
    end)
    assert.same({ true, true }, got)
  end)
end)

describe('gradients', function()
  it('come back through conversions in the layout of the input', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local whole, w = m.arange(8):reshape(4, 2):to(m.float64), m.arange(8):reshape(4, 2):to(m.float64) + 1
      local out = {}
      for _, from in ipairs { 'B', 'S0', 'S1', 'P' } do
        for _, to in ipairs { 'B', 'S0', 'S1', 'P' } do
          local x = m.distribute(whole, p, from):requires_grad_()
          local y = x:to_global { sbp = to };
          (y * m.distribute(w, p, 'B')):sum():backward()
          out[#out + 1] = { from, x.grad.sbp[1], x.grad:tolist() }
        end
      end
      local x = m.distribute(whole, p, 'S0'):requires_grad_()
      local y = (x * 2):to_global { sbp = 'B', grad_sbp = 'S1' }
      local g = m.grad({ y:square():sum() }, { x }, { create_graph = true })[1]
      local gg = m.grad({ g:square():sum() }, { x })[1]
      out[#out + 1] = { g:tolist(), gg:tolist() }
      return out
    end)
    local weights = { { 1, 2 }, { 3, 4 }, { 5, 6 }, { 7, 8 } }
    for r = 1, 2 do
      for i = 1, 16 do
        local from = got[r][i][1]
        assert.same({ from, from == 'P' and 'B' or from, weights }, got[r][i])
      end
      local g, gg = {}, {}
      for i = 0, 3 do
        g[i + 1], gg[i + 1] = { 16 * i, 16 * i + 8 }, { 256 * i, 256 * i + 128 }
      end
      assert.same({ g, gg }, got[r][17])
    end
  end)

  -- d(sum over ranks of loss_r): the gradient of a copy is this rank's alone, and all together are a sum.
  it('of parts made global, and of a global tensor\'s parts, are dual', function()
    local got = on(2, function(r)
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local out = {}
      local w = m.distribute(m.tensor { 1, 2, 3, 4 }, p, 'B')
      for _, sbp in ipairs { 'S0', 'B', 'P' } do
        local part = m.full({ sbp == 'S0' and 2 or 4 }, sbp == 'P' and r or 1):requires_grad_()
        local x = part:to_global(p, sbp);
        (x * w):sum():backward()
        out[#out + 1] = part.grad:tolist()
      end
      for _, sbp in ipairs { 'S0', 'B', 'P' } do
        local x = m.distribute(m.ones(4), p, sbp):requires_grad_()
        local part = x:to_local();
        (part * (sbp == 'P' and 3 or r + 1)):sum():backward()
        out[#out + 1] = { x.grad.sbp[1], x.grad:tolist() }
      end
      return out
    end)
    local all = { 1, 2, 3, 4 }
    for r = 1, 2 do
      local n = r - 1
      assert.same({ r == 1 and { 1, 2 } or { 3, 4 }, n == 0 and all or { 0, 0, 0, 0 }, all,
        { 'S0', { 1, 1, 2, 2 } }, { 'B', { 3, 3, 3, 3 } }, { 'B', { 3, 3, 3, 3 } } }, got[r])
    end
  end)
end)

describe('training on global tensors', function()
  -- Losses and parameters of a small net, of one rank or under a plan.
  local function train(plan)
    return function(r, n)
      local m = require 'moonflow'
      local nn, optim = m.nn, m.optim
      m.manual_seed(3)
      local model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Dropout(0.25), nn.Linear(8, 5))
      model:double()
      local p, batch = nil, 'B'
      if plan == 'data' then
        p, batch = m.placement 'cpu', 'S0'
        model:to_global(p, 'B')
      elseif plan == 'tensor' then
        p = m.placement 'cpu'
        model:to_global(p, function(name)
          if name:find '^0' then return 'S0' end
          return name == '4.weight' and 'S1' or 'B'
        end)
      elseif plan == 'both' then
        p, batch = m.placement('cpu', { { 0, 1 }, { 2, 3 } }), { 'S0', 'B' }
        model:to_global(p, function(name)
          if name:find '^0' then return { 'B', 'S0' } end
          return name == '4.weight' and { 'B', 'S1' } or { 'B', 'B' }
        end)
      elseif plan == 'sharded' then -- parameters and states split where they can be
        p, batch = m.placement 'cpu', 'S0'
        model:to_global(p, 'S0')
      end
      local opt = optim.AdamW(model:parameters(), { lr = 0.02, weight_decay = 0.1 })
      local losses = {}
      for step = 1, 6 do
        local x, y = m.randn(12, 6, { dtype = m.float64 }), m.randint(0, 5, { 12 })
        if p then x, y = m.distribute(x, p, batch), m.distribute(y, p, batch) end
        local logits = model(x)
        local loss = m.cross_entropy(logits, y)
        opt:zero_grad { set_to_none = step % 2 == 0 }
        loss:backward()
        losses[#losses + 1] = nn.utils.clip_grad_norm_(model:parameters(), 0.5):item()
        opt:step()
        losses[#losses + 1] = loss:item()
      end
      local w = {}
      for name, t in model:named_parameters() do w[name] = t:tolist() end
      local sbp = p and tostring(model:parameters()[1].sbp) .. tostring(model:parameters()[1].grad.sbp)
      return { losses, w, sbp or '', n, r }
    end
  end

  local function close(a, b, where)
    if type(a) == 'table' then
      for k in pairs(a) do close(a[k], b[k], where .. '.' .. k) end
    else
      assert(math.abs(a - b) <= 1e-10 * (1 + math.abs(b)), ('%s: %.15g, not %.15g'):format(where, a, b))
    end
  end

  it('gives the losses and parameters of one rank under every plan', function()
    local want = on(1, train 'none')[1]
    for _, case in ipairs { { 'data', 2, '(B)(B)' }, { 'data', 3, '(B)(B)' }, { 'tensor', 2, '(S0)(S0)' },
      { 'tensor', 4, '(S0)(S0)' }, { 'both', 4, '(B, S0)(B, S0)' }, { 'sharded', 2, '(S0)(S0)' },
      { 'sharded', 3, '(S0)(S0)' } } do
      local plan, n = case[1], case[2]
      local got = on(n, train(plan))
      for r = 1, n do
        close(got[r][1], want[1], plan .. n .. ' losses')
        close(got[r][2], want[2], plan .. n)
        assert.equal(case[3], got[r][3])
      end
    end
  end)

  it('has statistics of the whole batch in BatchNorm, and keeps split classes split in cross entropy', function()
    local function run(sbps)
      return function()
        local m = require 'moonflow'
        m.manual_seed(5)
        local bn = m.nn.BatchNorm2d(4):double()
        local x, w = m.randn(6, 4, 3, 2, { dtype = m.float64 }), m.randn(6, 4, 3, 2, { dtype = m.float64 })
        local logits, labels = m.randn(7, 9, { dtype = m.float64 }), m.randint(0, 9, { 7 })
        labels[2] = -100
        local weight = m.rand(9, { dtype = m.float64 }) + 0.5
        local p = sbps and m.placement 'cpu'
        if p then
          bn:to_global(p, 'B')
          x, w = m.distribute(x, p, sbps[1]), m.distribute(w, p, sbps[1])
          logits, labels, weight = m.distribute(logits, p, sbps[2]), m.distribute(labels, p, 'B'),
            m.distribute(weight, p, 'B')
        end
        x:requires_grad_()
        local y = bn(x);
        (y * w):sum():backward()
        local out = { y:tolist(), x.grad:tolist(), bn.weight.grad:tolist(), bn.running_mean:tolist(),
          bn.running_var:tolist(), bn:eval()(x):tolist() }
        for _, o in ipairs { {}, { reduction = 'sum' }, { reduction = 'none' }, { weight = weight },
          { label_smoothing = 0.1 }, { weight = weight, label_smoothing = 0.2, reduction = 'sum' } } do
          local z = logits:detach():requires_grad_()
          local loss = m.cross_entropy(z, labels, o)
          loss:sum():backward()
          out[#out + 1] = { loss:tolist(), z.grad:tolist() }
        end
        return out
      end
    end
    local want = on(1, run())[1]
    for _, case in ipairs { { 'S0', 'S1', 2 }, { 'S0', 'S0', 3 }, { 'S1', 'S1', 4 }, { 'S2', 'P', 2 },
      { 'P', 'B', 2 } } do
      local got = on(case[3], run(case))
      for r = 1, case[3] do close(got[r], want, case[1] .. case[2]) end
    end
  end)

  it('saves whole tensors and loads them under another layout', function()
    local path = os.tmpname() .. '.safetensors'
    local got = on(2, function(r)
      local m = require 'moonflow'
      m.manual_seed(1)
      local p = m.placement 'cpu'
      local a = m.nn.Linear(4, 6):double():to_global(p, 'S0')
      local ok, text = pcall(m.save, a:state_dict(), path)
      m.save(a:state_dict(), path, { global_dst_rank = 0 })
      local back = m.load(path)
      local b = m.nn.Linear(4, 6):double():to_global(p, function(_, t) return t.ndim == 2 and 'S1' or 'B' end)
      b:load_state_dict(back)
      return { ok, text, back.weight.is_global, tostring(b.weight.sbp),
        (b.weight - a.weight):abs():amax():item() + (b.bias - a.bias):abs():amax():item(), r }
    end)
    os.remove(path)
    for r = 1, 2 do
      assert.is_false(got[r][1])
      assert(got[r][2]:find('global_dst_rank', 1, true), got[r][2])
      assert.same({ false, '(S1)', 0 }, { got[r][3], got[r][4], got[r][5] })
    end
  end)
end)

describe('errors of global tensors', function()
  it('name what is wrong', function()
    local got = on(2, function(r)
      local m = require 'moonflow'
      local p, q = m.placement('cpu', { 0, 1 }), m.placement('cpu', { 1 })
      local x = m.zeros(4, 2, { placement = p, sbp = 'S0' })
      local texts = {}
      local function try(f, ...)
        local ok, text = pcall(f, ...)
        texts[#texts + 1] = ok and 'ok' or tostring(text)
      end
      try(function() return x + m.zeros(4, 2) end)
      try(function() return x + m.zeros(4, 2, { placement = q, sbp = 'B' }) end)
      try(function() return x:to_global { sbp = 'S2' } end)
      try(function() return x:to_global { sbp = { 'S0', 'B' } } end)
      try(function() return x:to_global { sbp = 'Q' } end)
      try(function() return m.placement('cpu', { 0, 2 }) end)
      try(function() return m.placement('cpu', { { 0, 1 }, { 2 } }) end)
      try(function() return m.placement('cpu', { 0, 0 }) end)
      try(function() return m.zeros(4, { placement = p }) end)
      try(function() return m.zeros(4, { plaecment = p, sbp = 'B' }) end)
      try(function() return x:data_ptr() end)
      try(function() return m.comm.all_reduce(x) end)
      try(function() return m.zeros(2, 2):to_local() end)
      try(function() return m.zeros(r + 1, 2):to_global(p, 'B') end)
      try(function() return m.full({ 2 }, r):to_global(p, 'B') end)
      try(function() return m.zeros(1 + 2 * r, 2):to_global(p, 'S0') end)
      try(function() return m.zeros(2, 2):to_global('cpu', 'B') end)
      try(function() x:sum():backward() end)
      return texts
    end)
    local want = { 'b is local and others are global', 'a is on ranks {0, 1}, b on {1}', 'S2 splits a dim',
      '2 SBP for a', "'Q' is none", 'there is no rank 2', 'of one length', 'rank 0 is there twice', 'sbp must be',
      "there is no option 'plaecment'", 'is global', 'is global', 'local already', 'its part has',
      'must have equal values', 'its part has', 'must be a placement', 'does not require a gradient' }
    for r = 1, 2 do
      for i, text in ipairs(want) do
        assert(got[r][i]:find(text, 1, true), ('%d: %s, not "%s"'):format(i, got[r][i], text))
      end
    end
  end)

  it('end all ranks when they call different things', function()
    fails(2, function(r)
      local m = require 'moonflow'
      local p = m.placement 'cpu'
      local x = m.zeros(4, 2, { placement = p, sbp = 'S0' })
      local y = r == 0 and x + 1 or x * 1
      return y:sum():item()
    end, 'call different things.*rank 0.*add.*rank 1.*mul')
    fails(4, function(r)
      local m = require 'moonflow'
      local p = m.placement('cpu', { { 0, 1 }, { 2, 3 } })
      local x = m.zeros(4, 4, { placement = p, sbp = { 'S0', 'S1' } })
      if r == 3 then x = x:sum(0) else x = x:sum(1) end
      return x:sum():item()
    end, 'call different things')
    fails(2, function(r) -- one has drawn a number more: what is random would differ
      local m = require 'moonflow'
      if r == 1 then m.rand(1) end
      return m.rand(4, { placement = m.placement 'cpu', sbp = 'B' }):to_global { sbp = 'P' }:sum():item()
    end, 'call different things.*rand')
    fails(2, function(r) -- between placements
      local m = require 'moonflow'
      local x = m.ones(4, { placement = m.placement('cpu', { 0 }), sbp = 'B' })
      if r == 0 then return x:to_global(m.placement('cpu', { 1 }), 'B'):sum() end
      return x:to_global(m.placement('cpu', { 0, 1 }), 'B'):sum():item()
    end, 'different things')
  end)

  it('are not looked for when the check is off', function()
    local got = on(2, function(r)
      local m = require 'moonflow'
      local x = m.ones(4, { placement = m.placement 'cpu', sbp = 'S0' })
      local y = r == 0 and x + 1 or x * 2
      return y:sum():item()
    end, { check = false })
    assert.same({ 8, 8 }, got)
  end)
end)

describe('ops on global tensors', function()
  it('lie where it costs least, and say so', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local function t(sbp, ...) return m.randn(..., { placement = p, sbp = sbp }) end
      local a, b = t('S0', { 4, 6 }), t('B', { 6, 4 })
      local out = {}
      local function say(x) out[#out + 1] = tostring(x.sbp) end
      say(a:matmul(b)) -- rows
      say(t('B', { 4, 6 }):matmul(t('S1', { 6, 4 }))) -- columns
      say(t('S1', { 4, 6 }):matmul(t('S0', { 6, 4 }))) -- inner
      say(a:sum()) -- a sum over what is split
      say(a:sum(1))
      say(a:sum() + a:sum()) -- partial sums add up
      say(a:sum() * 2)
      say(t('P', { 4, 6 }):relu()) -- a sum must be whole before it bends: P to S costs less than P to B
      say(a:amax(0))
      say(a:amin(0))
      say(a:t())
      say(a:reshape(2, 2, 6))
      say(a + b:t())
      say(m.zeros_like(t('P', { 4, 6 })))
      local ids = m.distribute(m.tensor({ 1, 3, 0 }, { dtype = m.int64 }), p, 'B')
      say(m.embedding(ids, t('S0', { 4, 6 }))) -- by vocabulary: each rank finds its own rows
      return out
    end)
    for r = 1, 2 do
      assert.same({ '(S0)', '(S1)', '(P)', '(P)', '(S0)', '(P)', '(P)', '(S0)', '(Pmax)', '(Pmin)', '(S1)', '(S0)',
        '(S0)', '(B)', '(P)' }, got[r])
    end
  end)

  it('draw the same numbers under every layout', function()
    local function draws()
      return function(_, n)
        local m = require 'moonflow'
        local list = { { 'B' }, { 'S0' }, { 'S1' } }
        local p = m.placement 'cpu'
        if n == 4 then
          p = m.placement('cpu', { { 0, 1 }, { 2, 3 } })
          list = { { 'S0', 'S0' }, { 'S1', 'S0' }, { 'B', 'S1' } }
        end
        local out = {}
        for i, sbp in ipairs(list) do
          m.manual_seed(7)
          local o = { placement = p, sbp = sbp, dtype = m.float64 }
          local x = m.randn(13, 37, o)
          local u, k = m.rand(13, 37, o), m.randint(0, 1000, { 13, 37 }, { placement = p, sbp = sbp })
          local d = m.dropout(x, 0.5)
          local e = m.empty(13, 37, o)
          e:normal_(1, 2)
          local q = m.randperm(50, { placement = p, sbp = m._whole(p) })
          out[i] = { x:tolist(), u:tolist(), k:tolist(), d:tolist(), e:tolist(), q:tolist() }
        end
        return out
      end
    end
    local one = on(1, draws())[1]
    local text = require 'moonflow.worker'.pack
    local want = text(one[1])
    for _, n in ipairs { 2, 4 } do
      local got = on(n, draws())
      for r = 1, n do
        for i = 1, 3 do assert(text(got[r][i]) == want, ('%d ranks, layout %d'):format(n, i)) end
      end
    end
  end)

  it('views show their base, or say that they do not', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local x = m.zeros(4, 3, { placement = p, sbp = 'S0' })
      x:narrow(1, 1, 2):fill_(1) -- columns are whole
      x[{ {}, 0 }] = 5
      x[1] = m.distribute(m.tensor { 7, 8, 9 }, p, 'B') -- a row is on one rank
      x[{ { 2, 4 }, 2 }] = -1
      local y = x[3]
      local ok, text = pcall(y.fill_, y, 0)
      local row = x[0]:clone()
      row:fill_(2)
      local mask = x:lt(0)
      x[mask] = 4
      local base = m.distribute(m.arange(6):reshape(3, 2):to(m.float64), p, 'S0'):requires_grad_()
      local z = base * 1
      z[1] = z[0] * 10;
      (z * z):sum():backward()
      return { x:tolist(), ok, text, row:tolist(), y:tolist(), x:t():tolist()[1], base.grad:tolist(),
        x[x:gt(6)]:tolist(), x:narrow(0, 1, 2):sum():item() }
    end)
    for r = 1, 2 do
      local g = got[r]
      assert.same({ { 5, 1, 1 }, { 7, 8, 9 }, { 5, 1, 4 }, { 5, 1, 4 } }, g[1])
      assert.is_false(g[2])
      assert(g[3]:find('memory of its own', 1, true), g[3])
      assert.same({ 2, 2, 2 }, g[4])
      assert.same({ 5, 1, -1 }, g[5]) -- a copy, of before
      assert.same({ 5, 7, 5, 5 }, g[6])
      -- z = (b0, 10 b0, b2): d/db0 = 2 b0 + 200 b0, d/db1 = 0, d/db2 = 2 b2
      assert.same({ { 0, 202 }, { 0, 0 }, { 8, 10 } }, g[7])
      assert.same({ 7, 8, 9 }, g[8])
      assert.equal(24 + 10, g[9])
    end
  end)
end)

describe('global tensors in use', function()
  it('print this rank\'s part without talking, and where it lies', function()
    local got = on(2, function(r)
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local x = m.arange(4, { placement = p, sbp = 'S0' })
      local y = m.zeros(2, 2, { placement = p, sbp = 'P', requires_grad = true })
      if r == 1 then return { tostring(x) } end -- no other rank prints
      return { tostring(x), tostring(y) }
    end)
    assert.equal("tensor([0, 1], placement=placement('cpu', {0, 1}), sbp=S0, size=(4,))", got[1][1])
    assert.equal("tensor([2, 3], placement=placement('cpu', {0, 1}), sbp=S0, size=(4,))", got[2][1])
    assert(got[1][2]:find("sbp=P, size=(2, 2)", 1, true) and got[1][2]:find('requires_grad', 1, true), got[1][2])
  end)

  it('take data and gradients, and count what is written', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local p = m.placement('cpu', { 0, 1 })
      local w = m.distribute(m.tensor { 1, 2, 3, 4 }, p, 'B'):requires_grad_()
      w.data = m.distribute(m.tensor { 5, 6, 7, 8 }, p, 'S0')
      local out = { tostring(w.sbp), w.requires_grad }
      w.grad = m.distribute(m.ones(4), p, 'B')
      m.optim.SGD({ w }, { lr = 1 }):step()
      out[3], out[4] = w:tolist(), tostring(w.sbp)
      w.data:mul_(2)
      out[5] = w:tolist()
      local y = w:square()
      m.no_grad(function() w:add_(1) end)
      local ok, text = pcall(function() y:sum():backward() end)
      out[6], out[7] = ok, text
      local z = w:detach():requires_grad_()
      local v = z:sum()
      z.data:add_(1) -- not counted
      v:backward()
      out[8] = z.grad:tolist()
      local local_one = m.zeros(4):requires_grad_()
      out[9] = pcall(function() local_one.grad = w.grad end)
      return out
    end)
    for r = 1, 2 do
      assert.same({ '(S0)', true, { 4, 5, 6, 7 }, '(S0)', { 8, 10, 12, 14 }, false }, { unpack(got[r], 1, 6) })
      assert(got[r][7]:find('changed in place', 1, true), got[r][7])
      assert.same({ { 1, 1, 1, 1 }, false }, { got[r][8], got[r][9] })
    end
  end)

  -- y = relu(x w1) on rank 0, then on to rank 1: loss = sum(y w2).
  it('go from stage to stage, each on ranks of its own, and gradients come back', function()
    local function values(m)
      m.manual_seed(11)
      local o = { dtype = m.float64 }
      return m.randn(3, 4, o), m.randn(4, 5, o), m.randn(5, 2, o)
    end
    local m = mf
    local x, w1, w2 = values(m)
    w1:requires_grad_()
    w2:requires_grad_()
    local loss = x:matmul(w1):relu():matmul(w2):sum()
    loss:backward()
    local want = { loss:item(), w1.grad:tolist(), w2.grad:tolist() }
    local got = on(3, function(r)
      local m = require 'moonflow' -- luacheck: ignore
      m.manual_seed(11)
      local o = { dtype = m.float64 }
      local x, w1, w2 = m.randn(3, 4, o), m.randn(4, 5, o), m.randn(5, 2, o) -- luacheck: ignore
      local first, second = m.placement('cpu', { 0 }), m.placement('cpu', { 1, 2 })
      x, w1 = m.distribute(x, first, 'B'), m.distribute(w1, first, 'B'):requires_grad_()
      w2 = m.distribute(w2, second, 'S0'):requires_grad_()
      local y = x:matmul(w1):relu():to_global(second, 'S1')
      local loss = y:matmul(w2):sum() -- luacheck: ignore
      loss:backward()
      local out = { tostring(y.shape), y:to_local():numel() }
      if r > 0 then out[3], out[4] = loss:item(), w2.grad:tolist() else out[5] = w1.grad:tolist() end
      out[6] = r == 0 and select(2, pcall(loss.item, loss)) or ''
      return out
    end)
    assert.same({ '(3, 5)', 0 }, { got[1][1], got[1][2] })
    assert.same(want[2], got[1][5])
    assert(got[1][6]:find('not on this rank', 1, true), got[1][6])
    for r = 2, 3 do
      assert.near(want[1], got[r][3], 1e-12)
      for i, row in ipairs(want[3]) do
        for k, v in ipairs(row) do assert.near(v, got[r][4][i][k], 1e-12) end
      end
    end
  end)

  it('work between processes and between hosts', function()
    for _, member in ipairs { 'zmq', 'hosts' } do
      local got = on(4, function()
        local m = require 'moonflow'
        local p = m.placement('cpu', { { 0, 1 }, { 2, 3 } })
        local whole = m.arange(35):reshape(7, 5):to(m.float64)
        local ok = true
        local lists = { { 'S0', 'S1' }, { 'P', 'S0' }, { 'S0', 'S0' }, { 'B', 'P' } }
        for _, from in ipairs(lists) do
          for _, to in ipairs(lists) do
            local y = m.distribute(whole, p, from):to_global { sbp = to }
            ok = ok and y:to_global { sbp = { 'B', 'B' } }:to_local():eq(whole):all():item()
          end
        end
        local q = m.placement('cpu', { 3, 1 })
        return ok and m.distribute(whole, p, { 'S0', 'S1' }):to_global(q, 'S1'):to_global(p, { 'B', 'B' }):sum():item()
      end, { member = member })
      assert.same({ 595, 595, 595, 595 }, got)
    end
  end)
end)
