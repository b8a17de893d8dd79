-- Plans: their text reads back, also in another process; lowering keeps apart what must not share memory.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function program()
  local i = 0
  while arg[i - 1] do i = i - 1 end
  return arg[i]
end

-- The only form's job of a compiled function.
local function job_of(f) return f.age[1].job end

-- A job made of j's text, on the captured tensors that it has.
local function again(j)
  local captures = {}
  for k, c in ipairs(j:captures()) do captures[k] = c.tensor end
  return mf._plan(j:plan(), captures, j:cells())
end

-- The first run of f, compiled, equals f's results and what it leaves in the tensors of `state`; so
-- does a second run, by a plan that was read back, and so do tasks of one op.
local function same(f, state, ...)
  local function copies() local c = {} for k, t in ipairs(state) do c[k] = t:clone() end return c end
  local function restore(c) mf.no_grad(function() for k, t in ipairs(state) do t:copy_(c[k]) end end) end
  local function equal(a, b, what)
    assert(mf.allclose(a, b, { rtol = 0, atol = 0, equal_nan = true }), what .. ': ' .. tostring(a) .. tostring(b))
  end
  local before = copies()
  local rng = mf.get_rng_state()
  local want = { f(...) }
  local left = copies()
  local function check(run, what, ...)
    restore(before)
    mf.set_rng_state(rng)
    local got = { run(...) }
    for k, w in ipairs(want) do equal(w, got[k], what .. ', result ' .. k) end
    for k, w in ipairs(left) do equal(w, state[k], what .. ', tensor ' .. k) end
  end
  for _, one_op_tasks in ipairs { false, true } do
    restore(before)
    mf.set_rng_state(rng)
    local compiled = mf.compile(f, { one_op_tasks = one_op_tasks })
    check(compiled, 'compiled', ...)
    check(compiled, 'second run', ...)
    local j = again(job_of(compiled))
    check(function(...) return j:run(...) end, 'read back', ...)
    assert.equal(job_of(compiled):plan(), j:plan())
  end
end

describe('a plan', function()
  it('keeps views of captured tensors as they were when they were read', function()
    local w, v = mf.randn(3, 4), mf.randn(4, 3)
    same(function(x)
      local row, turned = w[1] * 1, w:t()
      local seen = turned * x
      w:mul_(2)
      v:copy_(w:t())
      w[0]:add_(row)
      return seen, w:t() + 0, v[{ {}, 1 }] * 1
    end, { w, v }, mf.randn(4, 3))
  end)

  it('exchanges what captured tensors hold, in rings and through views', function()
    local a, b, c = mf.randn(3), mf.randn(3), mf.randn(2, 3)
    same(function()
      local old = a:clone()
      a:copy_(b)
      b:copy_(c[1])
      c[1]:copy_(old)
      c[0]:copy_(a)
    end, { a, b, c })
    local m = mf.randn(3, 3)
    same(function() m:copy_(m:t():clone()) end, { m })
    same(function() m:copy_(m:t() * 1) return m:t() * 1 end, { m })
  end)

  it('takes no memory that somebody still looks at', function()
    local w = mf.randn(4, 4)
    same(function(x)
      local a = x:exp()
      local top, all = a[0], a:relu()
      local b = a:neg():abs()
      local lower = top + b[1]
      a:add_(1)
      return a, all, top * 1, lower, b:sqrt():exp()
    end, {}, mf.randn(4, 4))
    same(function(x)
      local before = w:relu()
      w:add_(x)
      local y = w:exp()
      w:copy_(y:neg())
      return before, y, w:relu()
    end, { w }, mf.randn(4, 4))
  end)

  it('writes nothing that was expanded', function()
    local b = mf.randn(3)
    same(function(x)
      local wide = b:expand(4, 3):clone()
      wide:add_(x)
      local line = x[0]:expand(4, 3) * 1
      line[1]:fill_(5)
      return wide, line, b:expand(4, 3) + wide
    end, { b }, mf.randn(4, 3))
  end)

  it('an op that reads what it writes reads the old value', function()
    local w = mf.randn(5)
    same(function()
      w:mul_(w)
      w:copy_(w)
      w:sub_(w * 0.5)
      w:addcmul_(w, w)
      return w * w
    end, { w })
    local m = mf.randn(3, 3)
    same(function() m:add_(m:t() * 1) m[0]:mul_(m[1] * 1) end, { m })
  end)

  it('returns results that share memory, arguments and captured tensors', function()
    local w = mf.randn(2, 3)
    local function f(x)
      local y = x * 2
      w:add_(1)
      return y, y:t(), y[0], y, x, x:t(), w * 1, w:t() * 1
    end
    same(f, { w }, mf.randn(2, 3))
    local y, turned, row, twice = mf.compile(f)(mf.ones(2, 3))
    y:fill_(7)
    assert.same({ { 7, 7 }, { 7, 7 }, { 7, 7 } }, turned:tolist())
    assert.same({ 7, 7, 7 }, row:tolist())
    assert.same({ { 7, 7, 7 }, { 7, 7, 7 } }, twice:tolist())
  end)

  it('reads arguments with strides, of no elements, of no dims', function()
    same(function(x) return x * 2, x:t():exp() end, {}, mf.randn(4, 6)[{ {}, { 1, 4 } }]:t())
    same(function(x) return x * 2, x:sum(), mf.cat { x, x } end, {}, mf.zeros(0, 3))
    same(function(x) return x:neg():exp() end, {}, mf.tensor(3))
  end)

  it('refuses an argument that it writes as a captured tensor', function()
    local w = mf.ones(3)
    local f = mf.compile(function(x) w:add_(1) return x * w end)
    assert.same({ 4, 4, 4 }, f(mf.full({ 3 }, 2)):tolist())
    local ok, message = pcall(f, w)
    assert(not ok and message:find('argument 1 shares memory with another tensor', 1, true), message)
    assert.same({ 2, 2, 2 }, w:tolist())
    local g = mf.compile(function(x) return x * w end)
    assert.same({ 4, 4, 4 }, g(w):tolist())
  end)

  it('reports its memory', function()
    local f = mf.compile(function(x) return ((x * 2):mm(x) + x:sum(0)):sum() end)
    f(mf.randn(64, 64))
    local text = job_of(f):memory()
    local block, bound = text:match 'block (%d+) bytes, lower bound (%d+)'
    assert(tonumber(block) >= tonumber(bound) and tonumber(bound) >= 64 * 64 * 4, text)
    assert(text:find('inputs 16384 bytes, captured 0, results 4\n', 1, true), text)
    assert(text:match 'peak at step %d+ of %d+' and text:find('plan_spec.lua', 1, true), text)
  end)

  it('is refused when its text is not right', function()
    local passes = {}
    for _, name in ipairs(mf._passes()) do passes[name] = false end
    local f = mf.compile(function(x) return ((x * 2):exp() + 1):sum(0) end, { passes = passes })
    f(mf.ones(2, 3))
    local text = job_of(f):plan()
    local function fails(pattern, with, want)
      local bad, n = text:gsub(pattern, with, 1)
      assert(n == 1, pattern .. '\n' .. text)
      local ok, message = pcall(mf._plan, bad, {}, {})
      assert(not ok and message:find(want, 1, true), tostring(message))
    end
    mf._plan(text, {}, {})
    fails('= exp', '= expp', "there is no op 'expp'; did you mean 'exp'")
    fails('step t', 'step t9', 't9')
    fails('float32%(2, 3%)', 'float32(2, 4)', 'bytes')
    fails('float32%(2, 3%)', 'float64(2, 3)', 'bytes')
    fails('\nresult t%d+', '\nresult t0', 'lies elsewhere')
    if not text:find '\ntask .*\ntask ' then -- in a hard build each op is one
      fails('task stream 0, steps %d', 'task stream 0, steps 1', 'the tasks do not have')
    end
    fails('stream 0', 'stream 1', 'the stream is 1')
    fails('%+0', '+64', 'does not lie in the block')
    fails('step [^\n]*\n', '', 'tasks')
    fails('draws 0', 'draws 0 0', 'the end of the line')
    fails('\nstep t(%d+) = mul%(t(%d+)', '\nstep t%1 = mul(t%1', 'reads')
  end)

  it('gives the same loss in another process', function()
    mf.manual_seed(5)
    local model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.2),
      nn.Flatten(), nn.Linear(4 * 7 * 7, 10))
    local opt = optim.AdamW(model:parameters(), { lr = 0.01 })
    local step = mf.compile(function(x, y)
      opt:zero_grad()
      local loss = mf.cross_entropy(model(x), y)
      loss:backward()
      nn.utils.clip_grad_norm_(model:parameters(), 1)
      opt:step()
      return loss
    end)
    local x, y = mf.randn(6, 1, 16, 16), mf.randint(0, 10, { 6 })
    step(x, y)
    local j, dir = job_of(step), os.tmpname()
    os.remove(dir)
    assert(os.execute('mkdir ' .. dir) == 0)
    local tensors = { x = x, y = y, rng = mf.get_rng_state() }
    for _, c in ipairs(j:captures()) do tensors['captured.' .. c.name] = c.tensor:detach():clone() end
    mf.save(tensors, dir .. '/tensors.safetensors')
    local function write(name, text)
      local f = assert(io.open(dir .. '/' .. name, 'wb'))
      f:write(text)
      f:close()
    end
    write('plan.txt', j:plan())
    step(x, y) -- refreshes the cells; its loss is what the other process is to say
    tensors.x = nil
    local cells = j:cells()
    for k, v in ipairs(cells) do cells[k] = ('%.17g'):format(v) end
    write('run.lua', ([[
      local mf = require 'moonflow'
      local t = mf.load(%q)
      local text, captures = io.open(%q, 'rb'):read '*a', {}
      for name in text:gmatch '\ncapture "([^"]*)"' do captures[#captures + 1] = t['captured.' .. name] end
      mf.set_rng_state(t.rng)
      local j = mf._plan(text, captures, { %s })
      print(('%%.17g'):format(j:run(t.x, t.y):item()))
      print(('%%.17g'):format(j:run(t.x, t.y):item()))
    ]]):format(dir .. '/tensors.safetensors', dir .. '/plan.txt', table.concat(cells, ', ')))
    -- once more from the same state, here
    for _, c in ipairs(j:captures()) do
      mf.no_grad(function() c.tensor:copy_(mf.load(dir .. '/tensors.safetensors')['captured.' .. c.name]) end)
    end
    mf.set_rng_state(tensors.rng)
    local want = { ('%.17g'):format(j:run(x, y):item()), ('%.17g'):format(j:run(x, y):item()) }
    local pipe = io.popen(('%s %s/run.lua 2>&1'):format(program(), dir))
    local got = {}
    for line in pipe:lines() do got[#got + 1] = line end
    pipe:close()
    os.execute('rm -r ' .. dir)
    assert.same(want, got)
  end)
end)
