-- mf.profile and mf.check_nan, in eager calls and in compiled steps.
local mf = require 'moonflow'

local function rows(p)
  local by = {}
  for _, row in ipairs(p:sums 'op') do by[row.key] = row end
  return by
end

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok and message:find(text, 1, true), tostring(message))
end

describe('mf.profile', function()
  local x = mf.randn(8, 16)

  it('counts calls, FLOPs and bytes', function()
    local w = mf.randn(4, 16)
    local function step(a) return mf.linear(a, w):relu() end
    for _, f in ipairs { step, mf.compile(step, { passes = { fuse_act = false } }) } do
      f(x)
      local by = rows(mf.profile(function() f(x) f(x) end))
      assert.equal(2, by.linear.calls)
      assert.equal(2 * 2 * 8 * 16 * 4, by.linear.flops)
      assert.equal(2 * 4 * (8 * 16 + 4 * 16 + 8 * 4), by.linear.bytes)
      assert.equal(2, by.relu.calls)
      assert.equal(2 * 8 * 4, by.relu.flops)
    end
    local f = mf.compile(function(a) return ((a * 2):exp() + a):sin() end)
    f(x)
    local fused = rows(mf.profile(f, x)).fused
    assert.equal(4 * 8 * 16, fused.flops) -- one per op and element
    assert.equal(4 * 2 * 8 * 16 + 8, fused.bytes) -- and the number
    local acted = mf.compile(step)
    acted(x)
    assert.equal(2 * 8 * 16 * 4, rows(mf.profile(acted, x)).linear_act.flops)
  end)

  it('knows the FLOPs of products, convolutions and attention', function()
    local image, kernel = mf.randn(2, 3, 8, 8):requires_grad_(true), mf.randn(5, 3, 3, 3):requires_grad_(true)
    local q = mf.randn(1, 2, 6, 4)
    local by = rows(mf.profile(function()
      mf.matmul(x, mf.randn(16, 3))
      mf.bmm(mf.randn(2, 3, 4), mf.randn(2, 4, 5))
      mf.addmm(mf.zeros(8, 3), x, mf.randn(16, 3))
      mf.conv2d(image, kernel):sum():backward()
      mf.scaled_dot_product_attention(q, q, q)
    end))
    local conv = 2 * (2 * 5 * 6 * 6) * 3 * 9
    assert.equal(2 * 8 * 3 * 16, by.matmul.flops)
    assert.equal(2 * 2 * 3 * 5 * 4, by.bmm.flops)
    assert.equal(2 * 8 * 3 * 16, by.addmm.flops)
    assert.equal(conv, by.conv2d.flops)
    assert.equal(conv, by.conv2d_input.flops)
    assert.equal(conv, by.conv2d_weight.flops)
    assert.equal(2 * 2 * (2 * 6 * 6 * 4), by.attention.flops)
  end)

  it('names lines', function()
    local here = debug.getinfo(1, 'l').currentline
    local p = mf.profile(function() mf.relu(x) end)
    assert(p:sums('line')[1].key:find(('profile_spec.lua:%d'):format(here + 1), 1, true))
    local f = mf.compile(function(a) local y = a:relu() return y end) -- a tail call would hide the line
    f(x)
    p = mf.profile(f, x)
    assert(p:sums('line')[1].key:find(('profile_spec.lua:%d'):format(here + 3), 1, true))
  end)

  it('gives gradients the line of their forward call', function()
    local w = mf.randn(16, 3):requires_grad_(true)
    local line
    local function step(a)
      line = debug.getinfo(1, 'l').currentline + 1
      local y = mf.matmul(a, w):sum()
      return y, mf.grad(y, { w })[1]
    end
    for _, f in ipairs { step, mf.compile(step, { passes = { fuse_act = false } }) } do
      f(x)
      local p, found = mf.profile(f, x), 0
      for _, e in ipairs(p.events) do
        if e.where:find(('profile_spec.lua:%d'):format(line), 1, true) then found = found + 1 end
      end
      assert(found >= 3, p:table { by = 'line' }) -- the product, the sum, and a gradient
    end
  end)

  it('prints a table', function()
    local p = mf.profile(function() for _ = 1, 3 do x:relu():sum() end end)
    local text = p:table { rows = 1 }
    assert(text:find('rest', 1, true) and text:find('GFLOP/s', 1, true), text)
    assert.equal(tostring(p), p:table())
    fails("did you mean 'rows'", p.table, p, { row = 1 })
    fails('op, line', p.table, p, { by = 'opp' })
  end)

  it('writes a Chrome trace', function()
    local path = os.tmpname()
    mf.profile(function() x:relu() end):save_trace(path)
    local text = io.open(path):read '*a'
    os.remove(path)
    assert(text:find '"traceEvents":%[\n{"ph":"M".*"name":"main".*{"ph":"X".*"name":"relu".*%]}\n$', text)
    fails('save_trace', function() mf.profile(function() end):save_trace '/nowhere/x.json' end)
  end)

  local function shows_streams(n)
    local f = mf.compile(function(a) return (a * 2):sum() end, { gradient_accumulation_steps = n })
    local k = 0
    local function run()
      for sum in f:over(function()
        k = k + 1
        if k % 6 > 0 then return mf.full({ 4 }, k) end
      end) do sum:item() end
    end
    run()
    local p = mf.profile(run)
    local path = os.tmpname()
    p:save_trace(path)
    local text = io.open(path):read '*a'
    os.remove(path)
    local lanes, acts, sent, received = {}, {}, {}, {}
    for row, name in text:gmatch '"ph":"M","pid":0,"tid":(%d+),"name":"thread_name","args":{"name":"([%w ]+)"}}' do
      lanes[name] = row
    end
    for _, name in ipairs { 'data', 'copy', 'compute', 'results' } do assert(lanes[name], name) end
    for row, name in text:gmatch '"ph":"X","pid":0,"tid":(%d+),"ts":[%d.]+,"dur":[%d.]+,"name":"([%w]+)","cat":"act"' do
      acts[name] = (acts[name] or 0) + 1
      assert.equal(lanes[name == 'step' and 'compute' or name], row)
    end
    assert.same({ data = 5, copy = 5, step = 5 * n, results = 5 }, acts)
    for id in text:gmatch '"ph":"s",[^}]-"id":("[^"]+")' do sent[id] = true end
    local arrows = 0
    for row, id in text:gmatch '"ph":"f","bp":"e","pid":0,"tid":(%d+),[^}]-"id":("[^"]+")' do
      assert(sent[id] and row ~= lanes.data, id)
      received[id] = true
      arrows = arrows + 1
    end
    for id in pairs(sent) do assert(received[id], id) end
    -- data to copy; an input and the order to the step; a result and the order to results: five each
    assert.equal(5 * 5, arrows)
    -- the ops lie in the row of the step
    for row in text:gmatch '"tid":(%d+),"ts":[%d.]+,"dur":[%d.]+,"name":"fused","cat":"op"' do
      assert.equal(lanes.compute, row)
    end
  end

  it('has a row for each stream and arrows between actors', function() shows_streams(1) end)

  it('has the act of each micro-batch, and arrows for the rounds', function() shows_streams(2) end)

  it('comes and goes while other threads launch kernels', function()
    local Set = mf.data.Dataset:extend 'Set'
    function Set:len() return 400 end
    function Set:get(i) return (mf.ones(8) * i):exp():log():sum() end
    local noted, batches = 0, 0
    for _ in mf.data.DataLoader(Set(), { batch_size = 4, num_workers = 2 })() do
      local p = mf.profile(function() x:relu() end)
      mf.check_nan(batches % 2 == 0)
      batches = batches + 1
      assert(rows(p).relu.calls == 1 and p.lost == 0)
      noted = noted + #p.events
    end
    mf.check_nan(false)
    assert(batches == 100 and noted >= 100)
  end)

  it('ends with an error of f, and does not nest', function()
    fails('boom', mf.profile, function() error 'boom' end)
    fails('one runs already', mf.profile, function() mf.profile(function() end) end)
    fails('function', mf.profile, 3)
    assert.equal(1, #mf.profile(function() x:relu() end).events)
  end)
end)

describe('mf.check_nan', function()
  it('names op and line, in both modes', function()
    local f = mf.compile(function(a) return a:sqrt() end)
    assert(f(mf.tensor { -1 }):isnan():item())
    local one = mf.zeros(1)
    mf.check_nan(true)
    local ok, message = pcall(function() return mf.tensor({ -1 }):sqrt() end)
    local traced, traced_message = pcall(f, mf.tensor { -1 })
    local added, added_message = pcall(function() return one:add_(0 / 0) end)
    local sum = f(mf.tensor { 4 }):item()
    mf.check_nan(false)
    for _, case in ipairs { { ok, message }, { traced, traced_message } } do
      assert(not case[1] and case[2]:find('sqrt: result 0 has a NaN (', 1, true), tostring(case[2]))
      assert(case[2]:find('profile_spec.lua:%d+%)'), case[2])
    end
    assert(not added and added_message:find('has a NaN', 1, true))
    assert.equal(2, sum)
    assert(mf.tensor({ -1 }):sqrt():isnan():item())
    fails('true or false', mf.check_nan, 1)
  end)
end)
