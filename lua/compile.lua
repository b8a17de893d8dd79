-- mf.compile(f): a function like f whose calls run as one compiled step.
--
-- The first call with arguments of a new form (shapes, dtypes, memory order; the values of plain
-- numbers, strings and booleans) runs f once on tensors without values; what it does to tensors,
-- gradients and optimisers included, becomes a plan, which this call and later ones of the form
-- run. What f does besides (printing, counting) happens that once. Captured tensors are read anew in
-- each call; a captured number is a constant, unless it is an mf.scalar.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail, describe = options.fail, options.describe
local M = {}

-- -- mf.scalar ------------------------------------------------------------------------------------

-- Of scalars whose value is a function's: the function; the scalars that it reads; their order.
local refresh, reads, order = setmetatable({}, { __mode = 'k' }), setmetatable({}, { __mode = 'k' }),
  setmetatable({}, { __mode = 'k' })
local serial, reading = 0, nil

-- A number that compiled steps read before each call: mf.scalar(0.1), then s.value = 0.05; or the
-- result of a function, which is called now (with true) and before each call of a step that uses it.
-- It goes where an op takes a number, and counts as a fraction there whatever its value.
function M.scalar(value)
  local of, outer, read = value, reading, {}
  if type(value) == 'function' then
    local ok
    reading = read
    ok, of = pcall(value, true)
    reading = outer
    if not ok then error(of, 0) end
  end
  if type(of) == 'boolean' then of = of and 1 or 0 end
  if type(of) ~= 'number' then fail('scalar: a number or a function is needed, this is %s', describe(of)) end
  local s = mf._scalar(of)
  serial = serial + 1
  order[s] = serial
  if type(value) == 'function' then refresh[s], reads[s] = value, read end
  return s
end

do
  local mt = mf._scalar_mt
  function mt.__index(s, key)
    if key == 'value' then
      if reading then reading[s] = true end
      return mf._scalar_get(s)
    end
    fail("scalar: there is no field '%s'; there is value", tostring(key))
  end
  function mt.__newindex(s, key, value)
    if key ~= 'value' then fail("scalar: there is no field '%s'; there is value", tostring(key)) end
    if refresh[s] then fail 'scalar: its value is that of its function' end
    mf._scalar_set(s, value)
  end
  function mt.__tostring(s) return ('scalar(%.14g)'):format(mf._scalar_get(s)) end
end

-- The scalars to refresh before a call that uses `used`, those that others read first.
local function refreshed(used)
  local list, known = {}, {}
  local function add(s)
    if known[s] or not refresh[s] then return end
    known[s], list[#list + 1] = true, s
    for other in pairs(reads[s]) do add(other) end
  end
  for s in pairs(used) do add(s) end
  table.sort(list, function(a, b) return order[a] < order[b] end)
  return list
end

-- -- Results --------------------------------------------------------------------------------------

-- Turns what f returned into a form: traced tensors are put into `list`, and their places known.
local function form_of(value, list, seen)
  if mf._is_traced(value) then
    list[#list + 1] = value
    return { place = #list }
  end
  if type(value) == 'table' and not mf.is_tensor(value) and getmetatable(value) == nil then
    if seen[value] then fail 'compile: the result is a table that contains itself' end
    seen[value] = true
    local fields = {}
    for k, v in pairs(value) do fields[k] = form_of(v, list, seen) end
    seen[value] = nil
    return { fields = fields }
  end
  return { constant = value }
end

local function fill(form, results)
  if form.place then return results[form.place] end
  if not form.fields then return form.constant end
  local t = {}
  for k, f in pairs(form.fields) do t[k] = fill(f, results) end
  return t
end

-- -- Steps ----------------------------------------------------------------------------------------

local step_mt = {}

-- What the library's Lua tells the step that is being traced, nil while there is none: fits are
-- functions that say before each of its calls whether all is as it was; for each module that was called,
-- modes has whether it was training and members how often one of its parameters, buffers or modules was
-- assigned. Where they do not agree, the call needs another step. undo are functions that take back, when a
-- call has failed, what scalars counted before it; after, what is called behind each call that has not, or
-- behind several; used has the scalars that are refreshed before each call, also those that no op takes.
local noted = mf._trace

-- Whether argument i is shared out to the micro-batches.
local function check_shared_out(self, i, x)
  if self.times == 1 or self.repeated[i] or x.ndim == 0 or x.shape[1] % self.times == 0 then return end
  fail('compile: argument %d has shape %s, whose first size is not a multiple of gradient_accumulation_steps = %d; '
    .. 'what does not hold samples goes into repeated = { %d }', i, tostring(x.shape), self.times, i)
end

-- A compiled form: its job, how results are made of the job's, what is refreshed before a call, and
-- under which modes of modules it is right.
local function trace(self, ...)
  local n, args, tensors, at, whole = select('#', ...), { ... }, {}, {}, {}
  for i = 1, n do
    if mf.is_tensor(args[i]) then
      tensors[#tensors + 1] = args[i]
      at[#at + 1] = i
      check_shared_out(self, i, args[i])
      if self.repeated[i] then whole[#whole + 1] = #tensors end
    end
  end
  local entry, used = { forms = {}, all = true, modes = {}, fits = {}, undo = {}, after = {}, members = {} }, {}
  noted.fits, noted.modes, noted.undo, noted.after = entry.fits, entry.modes, entry.undo, entry.after
  noted.members, noted.used = entry.members, used
  local ok, job = pcall(mf._compile, self.name, function(...)
    for k, i in ipairs(at) do args[i] = (select(k, ...)) end
    local function pack(...)
      local list = {}
      for i = 1, select('#', ...) do
        entry.forms[i] = form_of((select(i, ...)), list, {})
        entry.all = entry.all and entry.forms[i].place == i
      end
      entry.n = select('#', ...)
      return list
    end
    return pack(self.f(unpack(args, 1, n)))
  end, tensors, used, self.passes, self.amp, self.one_op_tasks, self.memory_budget, self.times, whole, self.zero,
    self.zero_min_size, self.overlap == nil and 0 or self.overlap and 1 or -1)
  noted.fits, noted.modes, noted.undo, noted.after = nil, nil, nil, nil
  if not ok then error(job, 0) end
  entry.job, entry.only_tensors = job, #tensors == n
  entry.scalars = used -- alive as long as the job, which reads them
  entry.cells = refreshed(used)
  return entry
end

local function is_right(entry)
  for module, training in pairs(entry.modes) do
    if module.training ~= training or module._changes ~= entry.members[module] then return false end
  end
  for _, fits in ipairs(entry.fits) do
    if not fits() then return false end
  end
  return entry.job:fits()
end

-- The entry for these arguments, traced when there is none.
local function entry_of(self, ...)
  local key = mf._form(...)
  local list = self.cache[key]
  for _, entry in ipairs(list or {}) do
    if is_right(entry) then return entry end
  end
  local entry = trace(self, ...)
  self.misses = self.misses + 1
  self.forms[self.misses] = key
  entry.key = key
  self.cache[key] = self.cache[key] or {}
  table.insert(self.cache[key], entry)
  self.age[#self.age + 1] = entry
  if #self.age > self.cache_size then
    local oldest = table.remove(self.age, 1)
    local same = self.cache[oldest.key]
    for i = #same, 1, -1 do if same[i] == oldest then table.remove(same, i) end end
    if #same == 0 then self.cache[oldest.key] = nil end
  end
  return entry
end

local function tensors_of(...)
  local list = {}
  for i = 1, select('#', ...) do
    local x = select(i, ...)
    if mf.is_tensor(x) then list[#list + 1] = x end
  end
  return unpack(list)
end

local function finish(entry, ...)
  if entry.all then return ... end
  local results, out = { ... }, {}
  for i, form in ipairs(entry.forms) do out[i] = fill(form, results) end
  return unpack(out, 1, entry.n)
end

local function ended(entry, ok, ...)
  if ok then
    for _, after in ipairs(entry.after) do after() end
    return finish(entry, ...)
  end
  for _, undo in ipairs(entry.undo) do undo() end
  error((...), 0)
end

local function renew(entry)
  for _, s in ipairs(entry.cells) do mf._scalar_set(s, refresh[s]()) end
end

function step_mt.__call(self, ...)
  if mf._tracing() then return self.f(...) end -- inside of another step: part of it
  local entry = entry_of(self, ...)
  renew(entry)
  if entry.only_tensors then return ended(entry, pcall(entry.job.run, entry.job, ...)) end
  return ended(entry, pcall(entry.job.run, entry.job, tensors_of(...)))
end

local Step = {}
step_mt.__index = Step

-- for loss in step:over(loader) do ... end: the step's results for each batch of a DataLoader, or of a
-- function that returns the next batch. The numbers are those of a loop that calls the step; but the loop
-- does not wait for it: while it runs, the loop's body goes on, the next batches are decoded and copied in,
-- and results are fetched. Reading a result, or a tensor that the step uses, waits. {buffers = how many
-- batches are copied in ahead, at most}.
function Step:over(loader, o)
  return require 'moonflow.flow'.over(self, { entry_of = entry_of, is_right = is_right, renew = renew,
    finish = finish }, loader, o)
end

-- What there is of all compiled forms: a method of their jobs.
local function of_all(method)
  return function(self)
    local parts = {}
    for i, entry in ipairs(self.age) do parts[i] = entry.job[method](entry.job) end
    return table.concat(parts, '\n')
  end
end

-- The graphs for Graphviz: io.open('step.dot', 'w'):write(step:dot()), then `dot -Tsvg step.dot`.
Step.dot = of_all 'dot'
-- The plans as text: registers, tasks, steps.
Step.plan = of_all 'plan'
-- What the plans' memory is taken by, at its peak, by tensor, op and line.
Step.memory = of_all 'memory'

step_mt.__tostring = of_all 'text'

-- The name of the dtype of products, nil for that of their inputs. Where the CPU does not multiply it
-- natively it would only be slower, so that is said and float32 kept.
local function precision(o)
  if not o.amp then return nil end
  local name = tostring(o.amp):match '[^.]*$'
  options.choice('compile', 'amp', name, { 'bfloat16', 'float16' })
  if o.amp_force or (name == 'bfloat16' and mf._has_bf16()) then return name end
  options.warn('compile: this CPU does not multiply %s; float32 stays (amp_force = true has it done)', name)
  return nil
end

-- Checks what is said of micro-batches; the places of repeated arguments as a set.
local function micro_batches(o)
  local n, places = o.gradient_accumulation_steps, {}
  if n < 1 or n % 1 ~= 0 or n > 32767 then
    fail('compile: gradient_accumulation_steps must be a whole number from 1 to 32767, is %s', describe(n))
  end
  if n > 1 and o.passes and o.passes.time == false then
    fail 'compile: the pass time cannot be left out of a step with gradient_accumulation_steps'
  end
  for _, k in ipairs(o.repeated or {}) do
    if type(k) ~= 'number' or k < 1 or k % 1 ~= 0 then
      fail('compile: repeated lists places of arguments, counted from 1; there is %s', describe(k))
    end
    places[k] = true
  end
  return places
end

-- A function like f whose calls run as one compiled step: the first call with arguments of a new form
-- (shapes, dtypes; values of plain numbers, strings and booleans) runs f once on tensors without values,
-- and makes a plan of what it does to tensors, gradients and optimisers, which this call and later ones run.
-- {name = what texts call it, cache_size = how many forms are kept, passes = {cse = false}: which rewrites
-- are left out, one_op_tasks = each op is a task of the runtime}. The result has `misses`, how many forms were
-- compiled, and `forms`, which they were; print shows their graphs. With amp = 'bfloat16' matrix products and
-- convolutions are computed in bfloat16, while parameters, gradients and the rest stay float32 (where the CPU
-- does not have that arithmetic nothing changes, unless amp_force = true). With memory_budget = bytes the
-- backward computes anew what does not fit into so much memory, beside arguments and captured tensors;
-- numbers do not change. The environment's MF_DUMP=graph,pass,plan shows the stages of compiling. A module
-- that was called and has another parameter, buffer or child since, or another mode, needs a new form, as
-- other shapes do.
--
-- With gradient_accumulation_steps = n the step consists of n micro-batches, on each of which f is computed in
-- turn, in the memory of one: tensor arguments are shared out along dim 0, but for single numbers and those whose
-- places `repeated` lists; f sees a micro-batch. What backward leaves in .grad is the mean over all of them, and
-- what is computed of that (clipping, optimisers) is computed once. Results that are 0-d floats, such as losses,
-- are means too, others are put one behind the other along dim 0, single whole numbers as a list. Captured
-- tensors that f writes before backward, such as running statistics, are written by each micro-batch in turn.
-- Dropout draws as it would for the whole.
--
-- Steps on global tensors are compiled by all ranks of the job, which must trace the same. With zero = 1 or 2, what
-- an optimiser keeps of parameters that are on all ranks of their placement's first axis is split over that axis,
-- and gradients are where nothing else reads them; with 3 the parameters are too. Tensors of less than
-- zero_min_size elements stay. What the ranks send each other has a thread of its own, so that it goes on while
-- the rest is computed, where it is large; overlap = true or false says so.
function M.compile(f, o)
  o = options('compile', o, { name = 'step', cache_size = 16, passes = options.table, amp = options.none,
    amp_force = false, one_op_tasks = false, memory_budget = options.number, gradient_accumulation_steps = 1,
    repeated = options.table, zero = 0, zero_min_size = 1024,
    overlap = options.none })
  if o.memory_budget then options.count('compile', 'memory_budget', o.memory_budget, 1) end
  local switches = {}
  for _, name in ipairs(mf._passes()) do switches[name] = true end
  local places = micro_batches(o)
  if not options.is_callable(f) then
    fail('compile: the first argument must be a function or a module, is %s', describe(f))
  end
  return setmetatable({ f = f, name = o.name, cache_size = o.cache_size, cache = {}, age = {},
    misses = 0, forms = {}, passes = options('compile: passes', o.passes, switches),
    amp = precision(o), one_op_tasks = o.one_op_tasks, memory_budget = o.memory_budget,
    times = o.gradient_accumulation_steps, repeated = places, zero = o.zero, zero_min_size = o.zero_min_size,
    overlap = o.overlap }, step_mt)
end

return M
