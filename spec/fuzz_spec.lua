-- Bad input: every function that is bound gets values it cannot use. It succeeds, or raises a text
-- that names the function and the argument; the process lives, nothing leaks, nothing takes long,
-- and memory stays under the limit.
local mf = require 'moonflow'
local Cases = require 'spec.oracle.cases'
local Run = require 'spec.oracle.run'
local pool = require 'spec.fuzz.pool'
local shell = require 'spec.shell'

local limit, slow = 2 ^ 28, shell.program:find '/thread' and 30 or 5 -- bytes; seconds, more where races are sought
local tensors = {} -- the part of the pool that holds tensors
for _, entry in ipairs(pool) do
  if mf.is_tensor(entry[2]()) then tensors[#tensors + 1] = entry end
end

-- What pcall says of one call, and the seconds that it computed.
local function attempt(f, ...)
  local start = os.clock()
  local ok, text = pcall(f, ...)
  return ok, text, os.clock() - start
end

-- Traces go too: one that inlined a closure holds the tensors that the closure's upvalues name.
local function in_use()
  jit.flush()
  for _ = 1, 4 do collectgarbage() end
  return mf.memory_stats().in_use
end

-- Runs f under the memory limit and checks that it leaves no memory behind.
local function contained(f)
  return function()
    mf.no_grad(function() mf.ones(2, 3):add(1) end) -- whatever is made once
    local before = in_use()
    mf.set_memory_limit(before + limit)
    local ok, text = pcall(f)
    mf.set_memory_limit(0)
    if not ok then error(text, 0) end
    local after = in_use()
    if after > before then error(('%d bytes are still in use'):format(after - before), 0) end
  end
end

-- -- One argument at a time, for every op ---------------------------------------------------------

-- Error texts name the op and one of its parameters, an input by number, or the device.
local function names_culprit(op, text)
  if not text:find(op.name .. '_?: ') then return false end
  for _, p in ipairs(op.params) do
    if text:find('%f[%w_]' .. p.name .. '%f[^%w_]') then return true end
  end
  for _, word in ipairs { 'input %d', 'out of memory', 'argument %d', 'tensors? ', 'works on', 'option', 'shape',
    'dims' } do
    if text:find(word) then return true end
  end
  return false
end

local function check_text(op, what, ok, text)
  if ok then return end
  if type(text) ~= 'string' then error(('%s with %s raises a %s'):format(op.name, what, type(text)), 0) end
  if not names_culprit(op, text) then
    error(('%s with %s: the error does not say who and what: %s'):format(op.name, what, text), 0)
  end
  if text:find('%.c:%d') then error(('%s with %s: names a C file: %s'):format(op.name, what, text), 0) end
end

describe('fuzz #long, one argument', function()
  for _, op in ipairs(Run.ops) do
    it(op.name, contained(function()
      for _, param in ipairs(op.params) do
        for _, entry in ipairs(pool) do
          local args = Run.prepare(op, Cases.list(op, { B = 2 })[1])
          args[param.name] = entry[2]()
          local what = param.name .. ' = ' .. entry[1]
          local ok, text, seconds = attempt(op.call, args)
          check_text(op, what, ok, text)
          if seconds > slow then error(('%s with %s takes %.1f s'):format(op.name, what, seconds), 0) end
          if op.call_ then check_text(op, 'in place, ' .. what, attempt(op.call_, args)) end
        end
      end
    end))
  end
end)

describe('fuzz #long, counts of arguments', function()
  for _, op in ipairs(Run.ops) do
    it(op.name, contained(function()
      check_text(op, 'nothing', attempt(op.call))
      check_text(op, 'an empty table', attempt(op.call, {}))
      check_text(op, 'an unknown option', attempt(op.call, { no_such_option = 1 }))
      local many = {}
      for k = 1, 60 do many[k] = k % 2 == 0 and k or mf.ones(2) end
      check_text(op, 'sixty arguments', attempt(op.call, unpack(many)))
      local args = Run.prepare(op, Cases.list(op, { B = 2 })[1])
      args.no_such_option = 1
      local ok, text = pcall(op.call, args)
      assert(not ok and text:find 'no_such_option', 'an unknown option is accepted')
    end))
  end
end)

-- -- Anything with anything -----------------------------------------------------------------------

-- Functions that do what no test wants: end the test's own state, write files, start threads, wait.
local left_out = {}
for name in ([[set_memory_limit set_num_threads _set_gradients _set_hook _worker_start _safetensors_save save
  set_grad_enabled enable_grad no_grad scope manual_seed data_ptr _memory_usage help _call_part _signatures sleep
  _sleep check_nan]]):gmatch '%S+' do
  left_out[name] = true
end

local function functions()
  local list, seen = {}, {}
  local function take(prefix, t)
    local names = {}
    for name in pairs(t) do names[#names + 1] = tostring(name) end
    table.sort(names)
    for _, name in ipairs(names) do
      local f = t[name]
      if type(f) == 'function' and not left_out[name] and not seen[f] then
        seen[f] = true
        list[#list + 1] = { prefix .. name, f }
      end
    end
  end
  take('mf.', mf)
  take('x:', mf.Tensor)
  take('nn.init.', mf.nn.init or {})
  return list
end

local function random_calls(seed, count)
  math.randomseed(seed)
  local all = functions()
  for _ = 1, count do
    local f = all[math.random(#all)]
    local args, words, n = {}, {}, math.random(0, 5)
    for k = 1, n do
      local entry = pool[math.random(#pool)]
      if k == 1 and math.random() < 0.6 then entry = tensors[math.random(#tensors)] end
      args[k], words[k] = entry[2](), entry[1]
    end
    local ok, text, seconds = attempt(f[2], unpack(args, 1, n))
    local call = ('%s(%s)'):format(f[1], table.concat(words, ', '))
    if not ok and type(text) ~= 'string' then error(call .. ' raises a ' .. type(text), 0) end
    if seconds > slow then error(('%s takes %.1f s'):format(call, seconds), 0) end
  end
end

describe('fuzz #long, anything with anything', function()
  it('3,000 calls', contained(function() random_calls(1, 3000) end))
  for seed = 2, 9 do
    it('50,000 calls, seed ' .. seed .. ' #long', contained(function() random_calls(seed, 50000) end))
  end
end)

-- -- Operators, subscripts, fields ----------------------------------------------------------------

describe('fuzz #long, operators and fields', function()
  local operators = {
    add = function(a, b) return a + b end, sub = function(a, b) return a - b end, mul = function(a, b) return a * b end,
    div = function(a, b) return a / b end, pow = function(a, b) return a ^ b end, mod = function(a, b) return a % b end,
    unm = function(a) return -a end, eq = function(a, b) return a == b end, len = function(a) return #a end,
    text = function(a) return tostring(a) end, concat = function(a, b) return a .. b end,
    less = function(a, b) return a < b end,
    get = function(a, b) return a[b] end, get_list = function(a, b) return a[{ b, {} }] end,
    set = function(a, b) a[b] = 1 end, set_value = function(a, b) a[0] = b end,
    set_list = function(a, b) a[{ {}, b }] = b end,
    set_data = function(a, b) a.data = b end, set_grad = function(a, b) a.grad = b end,
    set_requires_grad = function(a, b) a.requires_grad = b end, call = function(a, b) return a(b) end,
    field = function(a, b) return a[tostring(b)] end, set_field = function(a, b) a[tostring(b)] = b end,
    tensor = function(_, b) return mf.tensor(b) end, tensor_nested = function(_, b) return mf.tensor { b, b } end,
    backward = function(a, b) return (a * 1):backward(b) end, grad = function(a, b) return mf.grad(a, b) end,
    ['pairs'] = function(a) for _ in pairs(a) do end end,
  }
  local names = {}
  for name in pairs(operators) do names[#names + 1] = name end
  table.sort(names)
  for _, name in ipairs(names) do
    it(name, contained(function()
      for _, left in ipairs(pool) do
        for _, right in ipairs(pool) do
          local a, b = left[2](), right[2]()
          if mf.is_tensor(a) or (mf.is_tensor(b) and name ~= 'set_field') then
            local ok, text = pcall(operators[name], a, b)
            if not ok and type(text) ~= 'string' then
              error(('%s and %s raise a %s'):format(left[1], right[1], type(text)), 0)
            end
          end
        end
      end
    end))
  end
end)

describe('fuzz #long, sizes', function()
  local functions_of_size = { zeros = mf.zeros, ones = mf.ones, empty = mf.empty, rand = mf.rand, randn = mf.randn }
  for name, f in pairs(functions_of_size) do
    it(name .. ' refuses what does not fit', contained(function()
      for _, size in ipairs { { 2 ^ 53 }, { 2 ^ 31, 2 ^ 31 }, { 2 ^ 62 }, { -1 }, { 2 ^ 40 }, { 1 / 0 }, { 0 / 0 },
        { 1.5 }, { 3, -2 } } do
        local ok, text = pcall(f, size)
        assert(not ok, 'a size is accepted')
        assert(text:find(name .. ': '), text)
      end
      for _ = 1, 100 do pcall(f, { 2 ^ 25 + 1, 2 }) end -- just above the limit, again and again
    end))
  end
  it('a limit that is reached says what is in use', contained(function()
    local ok, text = pcall(mf.zeros, 2 ^ 29)
    assert.is_false(ok)
    for _, word in ipairs { 'out of memory', 'limit', 'in use' } do assert(text:find(word), text) end
  end))
end)
