-- Random programs, eager and compiled: results, arguments, captured tensors and gradients after each of several
-- calls are the same, bit for bit, with all passes of the compiler, with none and with each alone. A failure
-- prints the seed and the program; MF_SPEC_SEED=N runs that one alone.
local mf = require 'moonflow'
local Values = require 'spec.oracle.values'

local function generator(seed)
  local state = seed * 7919 % 2147483647 + 1
  local function below(n)
    state = state * 16807 % 2147483647
    return math.floor(state / 16) % n
  end
  return below, function(list) return list[below(#list) + 1] end
end

-- -- The world of a program -----------------------------------------------------------------------

local shapes = { { 2, 3 }, { 3, 2 }, { 3 }, { 2, 3, 2 }, { 1, 3 }, { 4, 3 }, {}, { 2, 1, 3 } }

-- What a program finds: r, tensors by number. First two arguments, then captured ones, of which those that
-- `wants` lists require a gradient; s, a scalar; n, a plain number.
local function world(seed, dtype)
  local _, pick = generator(seed)
  mf.manual_seed(seed)
  local w = { captured = {}, leaves = {}, s = mf.scalar(0.5), n = 1, dtype = dtype }
  w.shapes = { pick(shapes), pick(shapes) }
  for k = 1, 4 do
    local t = mf.randn(pick(shapes), { dtype = dtype })
    if k > 2 then
      t:requires_grad_()
      w.leaves[#w.leaves + 1] = t
    end
    w.captured[k] = t
  end
  return w
end

local function begin(w, x, y, n)
  w.r = { x, y, unpack(w.captured) }
  w.n = n
end

local function arguments_of(w, call)
  mf.manual_seed(100 + call)
  local x, y = mf.randn(w.shapes[1], { dtype = w.dtype }), mf.randn(w.shapes[2], { dtype = w.dtype })
  if call == 2 and x.ndim == 2 then x = x:t():contiguous():t() end -- the same values in other memory
  return x, y
end

-- -- Instructions: a text and a function of the world that returns new tensors ---------------------

local makers = {}
local function add(weight, f)
  for _ = 1, weight do makers[#makers + 1] = f end
end

local function any(w, below) return below(#w.r) + 1 end

local function unary(names)
  return function(w, below, pick)
    local name, a = pick(names), any(w, below)
    return ('r%d:%s()'):format(a, name), function(v) return v.r[a][name](v.r[a]) end
  end
end

local function binary(names)
  return function(w, below, pick)
    local name, a, b = pick(names), any(w, below), any(w, below)
    return ('r%d:%s(r%d)'):format(a, name, b), function(v) return v.r[a][name](v.r[a], v.r[b]) end
  end
end

add(4, unary { 'tanh', 'sigmoid', 'relu', 'neg', 'abs', 'sin', 'gelu', 'exp', 'square', 'sign', 'round' })
add(6, binary { 'add', 'sub', 'mul', 'maximum', 'atan2' })
add(1, binary { 'gt', 'eq', 'le' })
add(3, function(w, below, pick) -- reductions and what goes along a dim
  local name = pick { 'sum', 'mean', 'softmax', 'cumsum', 'flip', 'var', 'argmax', 'logsumexp', 'max', 'sort', 'topk' }
  local a, d = any(w, below), below(3) - 1
  return ('r%d:%s(%d)'):format(a, name, d), function(v)
    local x = v.r[a]
    if name == 'softmax' then return x:softmax { dim = d } end
    if name == 'flip' then return x:flip { d } end
    if name == 'var' then return x:var { d, unbiased = false } end
    if name == 'topk' then return x:topk(1, { dim = d }) end
    return x[name](x, d)
  end
end)
add(6, function(w, below, pick) -- views
  local a, d, e, n = any(w, below), below(3), below(3), 1 + below(2)
  local name, f = unpack(pick {
    { 'transpose', function(x) return x:transpose(d, e) end },
    { 'select', function(x) return x:select(d, e) end },
    { 'narrow', function(x) return x:narrow(d, e, n) end },
    { 'unsqueeze', function(x) return x:unsqueeze(d) end },
    { 'squeeze', function(x) return x:squeeze() end },
    { 'flatten', function(x) return x:flatten() end },
    { 'view', function(x) return x:view(-1) end },
    { 'reshape', function(x) return x:reshape(-1, 3) end },
    { 'expand', function(x) return x:expand(2, unpack(x.shape)) end },
    { 'slice', function(x) return x[{ {}, { 0, 2 } }] end },
    { 'step', function(x) return x[{ { 0, 4, 2 } }] end },
    { 'index', function(x) return x[-1] end },
    { 'detach', function(x) return x:detach() end },
    { 'contiguous', function(x) return x:contiguous() end },
    { 'clone', function(x) return x:clone() end },
    { 'diagonal', function(x) return x:diagonal() end },
    { 'unfold', function(x) return x:unfold(d, 2, 1) end },
  })
  return ('r%d %s %d %d %d'):format(a, name, d, e, n), function(v) return f(v.r[a]) end
end)
add(2, function(w, below, pick) -- several outputs
  local a, d, name = any(w, below), below(2), pick { 'unbind', 'chunk', 'split' }
  return ('r%d:%s over %d'):format(a, name, d), function(v)
    local x = v.r[a]
    return unpack(name == 'unbind' and x:unbind(d) or name == 'chunk' and x:chunk(2, d) or x:split(1, d))
  end
end)
add(2, function(w, below, pick)
  local name, a, b = pick { 'cat', 'stack', 'matmul', 'where' }, any(w, below), any(w, below)
  return ('%s(r%d, r%d)'):format(name, a, b), function(v)
    local x, y = v.r[a], v.r[b]
    if name == 'matmul' then return mf.matmul(x, y:transpose(-1, -2)) end
    if name == 'where' then return mf.where(x:gt(0), x, y) end
    return mf[name]({ x, y }, { dim = 0 })
  end
end)
add(2, function(w, below, pick) -- numbers, the scalar, random numbers
  local a, what = any(w, below), pick { 'scalar', 'number', 'constant', 'dropout', 'rand_like', 'clamp', 'arange' }
  return ('%s of r%d'):format(what, a), function(v)
    local x = v.r[a]
    if what == 'scalar' then return x * v.s end
    if what == 'number' then return x * v.n end
    if what == 'constant' then return 0.25 - x end
    if what == 'dropout' then return mf.dropout(x, { p = 0.5 }) end
    if what == 'rand_like' then return mf.rand_like(x) + x end
    if what == 'clamp' then return x:clamp { min = -0.5, max = 0.5 } end
    return mf.arange(3, { dtype = v.dtype }) * x
  end
end)
add(1, function(w, below) -- by index
  local a, b = any(w, below), below(3)
  return ('gather from r%d'):format(a), function(v)
    local x = v.r[a]
    local i = x:argmax(0)
    if b == 0 then return x:index_select(0, i:flatten()) end
    if b == 1 then return x:gather(0, i:unsqueeze(0)) end
    return x[i]
  end
end)

-- Writes, of what may be a view of an argument, of a captured tensor or of a result; outside of the tape where
-- `outside`.
add(8, function(w, below, pick)
  local a, b, outside, d = any(w, below), any(w, below), below(2) == 0, below(2)
  local name = pick { 'add_', 'mul_', 'copy_', 'fill_', 'tanh_', 'zero_', 'relu_', 'masked_fill_', 'index', 'slice',
    'clamp_', 'scalar', 'index_add_', 'uniform_', 'scatter_' }
  local function write(v)
    local x, y = v.r[a], v.r[b]
    if name == 'add_' or name == 'copy_' then x[name](x, y)
    elseif name == 'mul_' then x:mul_(y:tanh())
    elseif name == 'fill_' then x:fill_(0.75)
    elseif name == 'masked_fill_' then x:masked_fill_(x:gt(0.5), -0.25)
    elseif name == 'index' then x[d] = y
    elseif name == 'slice' then x[{ {}, { 0, 1 } }] = y
    elseif name == 'clamp_' then x:clamp_(-1, 1)
    elseif name == 'scalar' then x:mul_(v.s)
    elseif name == 'index_add_' then x:index_add_(0, mf.zeros({ 2 }, { dtype = mf.int64 }), y)
    elseif name == 'uniform_' then x:uniform_()
    elseif name == 'scatter_' then x:scatter_(0, y:long():clamp(0, 0), y)
    else x[name](x) end
  end
  return ('%sr%d:%s by r%d, %d'):format(outside and 'outside: ' or '', a, name, b, d), function(v)
    if outside then mf.no_grad(write, v) else write(v) end
  end
end)

local function append(w, ...)
  for i = 1, select('#', ...) do
    local t = select(i, ...)
    if mf.is_tensor(t) then w.r[#w.r + 1] = t
    elseif type(t) == 'table' then append(w, unpack(t)) end
  end
end

-- -- Programs -------------------------------------------------------------------------------------

-- Instructions that can be run one after the other, found by running them.
local function generate(seed, length, dtype)
  local below, pick = generator(seed)
  local w, program, tries = world(seed, dtype), {}, 0
  local x, y = arguments_of(w, 1)
  begin(w, x, y, 1)
  while #program < length and tries < length * 30 do
    tries = tries + 1
    local text, f = pick(makers)(w, below, pick)
    local n = #w.r
    local ok = pcall(function() append(w, f(w)) end)
    local small = true
    for k = n + 1, #w.r do small = small and w.r[k]:numel() <= 200 end
    if ok and small then program[#program + 1] = { text = text, f = f }
    else for k = #w.r, n + 1, -1 do w.r[k] = nil end end
  end
  return program
end

local function texts(program, n)
  local list = {}
  for k, i in ipairs(program) do list[k] = ('%3d  %s'):format(k, i.text) end
  return ('%d tensors at the beginning\n%s'):format(n, table.concat(list, '\n'))
end

-- The program as a step: the last tensors, a loss of them, its gradients, by which the leaves are moved.
local function step_of(program, w)
  return function(x, y, n)
    begin(w, x, y, n)
    for _, i in ipairs(program) do append(w, i.f(w)) end
    local list, loss = {}, nil
    for k = math.max(1, #w.r - 12), #w.r do
      local t = w.r[k]
      list[#list + 1] = t
      if t:is_floating_point() and t.requires_grad then
        local squashed = t:tanh()
        list['y' .. k] = squashed
        local part = squashed:sum()
        loss = loss and loss + part or part
      end
    end
    if not loss then return list end
    loss:backward()
    list.loss = loss
    for k, p in ipairs(w.leaves) do
      if p.grad then
        list['g' .. k] = p.grad
        mf.no_grad(function() p:sub_(p.grad * 0.1) end)
        p.grad = nil
      end
    end
    return list
  end
end

local function compare(want, got, what)
  local wrong = Values.difference(got, want, 0, 0)
  if wrong then error(what .. ' ' .. wrong, 0) end
  if want.ndim > 1 and want:is_floating_point() then -- what is made of it has the same order in memory
    local a, b = want:tanh(), got:tanh()
    if table.concat(a:stride(), ' ') ~= table.concat(b:stride(), ' ') then
      error(('%s lies in memory as (%s), not as (%s)'):format(what, table.concat(b:stride(), ', '),
        table.concat(a:stride(), ', ')), 0)
    end
  end
end

-- By turns: all passes, none, one alone.
local function passes_of(seed)
  local names, on = mf._passes(), {}
  local turn = seed % (#names + 2)
  for k, name in ipairs(names) do on[name] = on[name] or turn == 0 or turn == k + 1 end
  return on
end

local function check(seed, length, dtype)
  local program = generate(seed, length, dtype)
  local a, b = world(seed, dtype), world(seed, dtype)
  local plain, compiled = step_of(program, a), mf.compile(step_of(program, b), { passes = passes_of(seed) })
  for call = 1, 4 do
    a.s.value, b.s.value = call / 2, call / 2
    local n = call == 3 and 2 or 1
    local x, y = arguments_of(a, call)
    local u, v = arguments_of(b, call)
    mf.manual_seed(call)
    local ok, want = pcall(plain, x, y, n)
    local after = mf.get_rng_state()
    mf.manual_seed(call)
    local also, got = pcall(compiled, u, v, n)
    if not ok then -- such as a gradient through what was written since
      if also then error('eager fails, compiled does not: ' .. tostring(want), 0) end
      return 'fails'
    end
    if not also then
      if tostring(got):find('no gradient leaves a step', 1, true) then return 'refused' end
      error(tostring(got), 0)
    end
    for key, t in pairs(want) do compare(t, got[key], ('call %d: result %s'):format(call, key)) end
    for key in pairs(got) do assert(want[key], 'a result too many') end
    compare(x, u, ('call %d: argument 1'):format(call))
    compare(y, v, ('call %d: argument 2'):format(call))
    for k = 1, 4 do compare(a.captured[k], b.captured[k], ('call %d: captured %d'):format(call, k)) end
    assert(mf.equal(after, mf.get_rng_state()), 'another number of draws')
  end
  return nil
end

-- -- In micro-batches -----------------------------------------------------------------------------

local MICRO = 2

-- The program and its gradients, and then the update by what the gradients are on average.
local function micro_steps(program, w)
  local function compute(x, y)
    begin(w, x, y, 1)
    for _, i in ipairs(program) do append(w, i.f(w)) end
    local list, loss = {}, nil
    for k = math.max(1, #w.r - 12), #w.r do
      local t = w.r[k]
      list[#list + 1] = t:detach():clone() -- as it is before the update
      if t:is_floating_point() and t.requires_grad then loss = (loss or 0) + t:tanh():sum() end
    end
    if loss then loss:backward() end
    list.loss = loss
    return list
  end
  local function update(scale)
    for _, p in ipairs(w.leaves) do
      if p.grad then mf.no_grad(function() p:sub_(p.grad * scale * 0.5) end) end
      p.grad = nil
    end
  end
  return compute, update
end

-- A result is what all micro-batches have, put together; or the last value of what outlives them.
local function check_together(parts, got, key)
  local list, last = {}, parts[MICRO][key]
  for m = 1, MICRO do list[m] = parts[m][key]:detach() end
  local function is(want) return want.shape == got.shape and not Values.difference(got, want, 0, 0) end
  if is(last) then return end
  if last.ndim == 0 and last:is_floating_point() and is((list[1] + list[2]) * 0.5) then return end
  if is(last.ndim == 0 and mf.stack(list) or mf.cat(list)) then return end
  error(('result %s is %s, of the parts %s and %s'):format(key, tostring(got), tostring(list[1]), tostring(list[2])), 0)
end

-- Eager, one micro-batch after the other, and compiled. Programs that draw are left out, and those that write
-- arguments that are whole in each, or the leaves, which the update writes too.
local function check_micro(seed, length, dtype)
  local program = generate(seed, length, dtype)
  local a, b = world(seed, dtype), world(seed, dtype)
  local compute, update = micro_steps(program, a)
  local compute_b, update_b = micro_steps(program, b)
  local passes = passes_of(seed)
  passes.time = true
  local compiled = mf.compile(function(x, y)
    local list = compute_b(x, y)
    update_b(1)
    return list
  end, { passes = passes, gradient_accumulation_steps = MICRO, one_op_tasks = seed % 3 == 0 })
  for call = 1, 3 do
    local args = {}
    for side = 1, 2 do
      mf.manual_seed(100 + call)
      args[side] = {}
      for k, shape in ipairs(a.shapes) do
        local whole = { unpack(shape) }
        if whole[1] then whole[1] = whole[1] * MICRO end
        args[side][k] = mf.randn(whole, { dtype = dtype })
      end
    end
    local before, kept = mf.get_rng_state(), {} -- what micro-batches share is read alone
    for k, t in ipairs { a.leaves[1], a.leaves[2], args[1][1], args[1][2] } do
      kept[k] = { t, t:detach():clone(), k <= 2 or t.ndim == 0 }
    end
    local parts = {}
    for m = 1, MICRO do
      local function part(x)
        if x.ndim == 0 then return x end
        local rows = x.shape[1] / MICRO
        return x:detach():narrow(0, (m - 1) * rows, rows)
      end
      local ok, list = pcall(compute, part(args[1][1]), part(args[1][2]))
      if not ok then return 'fails' end
      parts[m] = {}
      for key, t in pairs(list) do parts[m][key] = t:detach():clone() end
    end
    local written = false
    for _, t in ipairs(kept) do written = written or t[3] and not mf.equal(t[1], t[2]) end
    if written or not mf.equal(before, mf.get_rng_state()) then return 'not compared' end
    update(1 / MICRO)
    local ok, got = pcall(compiled, unpack(args[2]))
    if not ok then
      if tostring(got):find('no gradient leaves a step', 1, true) then return 'refused' end
      if tostring(got):find('reads what one micro-batch has', 1, true) then return 'refused' end
      error(tostring(got), 0)
    end
    for key in pairs(parts[1]) do check_together(parts, got[key], key) end
    for k = 1, 2 do compare(args[1][k], args[2][k], ('call %d: argument %d'):format(call, k)) end
    for k = 1, 4 do compare(a.captured[k], b.captured[k], ('call %d: captured %d'):format(call, k)) end
  end
  return nil
end

-- -- Running --------------------------------------------------------------------------------------

local only = tonumber(os.getenv 'MF_SPEC_SEED')

local function run(from, to, length, dtype, how)
  local failed = 0
  for seed = only or from, only or to do
    local ok, text = pcall(how or check, seed, length, dtype)
    if not ok then
      error(('seed %d, length %d, %s: %s\n%s'):format(seed, length, tostring(dtype), tostring(text),
        texts(generate(seed, length, dtype), 6)), 0)
    end
    if text then failed = failed + 1 end -- or is refused
  end
  assert(only or failed < (to - from + 1) * 2 / 3, 'too many programs fail eagerly or are refused: ' .. failed)
end

describe('a random program does the same compiled', function()
  it('of a few instructions', function() run(1, 60, 4, mf.float64) end)
  it('of some instructions', function() run(101, 140, 12, mf.float64) end)
  it('in float32', function() run(201, 220, 12, mf.float32) end)
  it('in micro-batches', function() run(301, 400, 5, mf.float64, check_micro) end)
  it('in micro-batches, thousands #long', function() run(11000, 14000, 7, mf.float64, check_micro) end)
  it('of a few instructions, thousands #long', function() run(1000, 4000, 4, mf.float64) end)
  it('of some instructions, thousands #long', function() run(5000, 7000, 12, mf.float64) end)
  it('of many instructions, hundreds #long', function() run(8000, 8400, 60, mf.float64) end)
  it('in float32, thousands #long', function() run(9000, 10000, 12, mf.float32) end)
end)
