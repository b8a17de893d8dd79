-- mf.parallelize(model, plan): a model trains on many ranks as it would on one, by a plan that is kept apart from it.
--
--   local run = mf.parallelize(model, {
--     mesh = { pipeline = 2, data = 2, tensor = 2 },            -- their product is the number of ranks
--     split = { ['blocks.*.qkv'] = 'column', ['blocks.*.out'] = 'row', ['letter'] = 'vocabulary' },
--     stages = { { 'letter', 'blocks.0' }, { 'blocks.1', 'head' } },
--     micro_batches = 4, zero = 1, remat = { 'blocks.*' } })
--   print(run)                                                  -- what each rank holds
--   local step = run:compile(function(x, y) ... end)            -- as mf.compile
--
-- Parameters become global in place: before an optimiser is made. Names are those of named_parameters and
-- named_modules; '*' is any part of a name. `split` says how a parameter lies along the tensor axis ('S0', 'S1',
-- 'B'), or of a module what its layer is: 'column' (a Linear of which each rank has outputs), 'row' (inputs),
-- 'vocabulary' (an Embedding by rows). Everything else is on all ranks of its stage. Inputs of the model are
-- local tensors that are whole and equal on all ranks: each takes its rows, by the data axis.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local M = {}

local AXES = { 'pipeline', 'data', 'tensor' }
local LAYERS = {
  column = { weight = 'S0', bias = 'S0' }, row = { weight = 'S1', bias = 'B' }, vocabulary = { weight = 'S0' },
}

local Run = {}
local run_mt = { __index = Run }

-- -- Names ----------------------------------------------------------------------------------------

-- 'blocks.*.qkv' as a pattern of whole names.
local function pattern_of(glob)
  return '^' .. glob:gsub('[%^%$%(%)%%%.%[%]%+%-%?]', '%%%0'):gsub('%*', '.*') .. '$'
end

local function sorted(t)
  local keys = {}
  for k in pairs(t) do keys[#keys + 1] = k end
  table.sort(keys)
  return keys
end

local function names_of(model)
  local modules, parameters, list = {}, {}, {}
  for name, module in model:named_modules() do
    if name ~= '' then modules[#modules + 1], list[name] = name, module end
  end
  for name, p in model:named_parameters() do parameters[#parameters + 1], list[name] = name, p end
  return modules, parameters, list
end

local function unknown(what, glob, names)
  local known = {}
  for _, name in ipairs(names) do known[name] = true end
  local like = options.suggest(glob, known)
  fail("parallelize: %s '%s' is the name of nothing in the model%s", what, glob,
    like and (", did you mean '%s'?"):format(like) or '')
end

-- -- The mesh -------------------------------------------------------------------------------------

local function read_mesh(given)
  local mesh, product, parts = {}, 1, {}
  for key in pairs(given) do
    if not ({ pipeline = true, data = true, tensor = true })[key] then
      fail("parallelize: there is no mesh axis '%s'; there are pipeline, data and tensor", tostring(key))
    end
  end
  for _, axis in ipairs(AXES) do
    mesh[axis] = given[axis] or 1
    options.count('parallelize', 'mesh.' .. axis, mesh[axis], 1)
    product = product * mesh[axis]
    parts[#parts + 1] = ('%s %d'):format(axis, mesh[axis])
  end
  if product ~= mf.world_size() then
    fail('parallelize: the mesh (%s) is for %d ranks, and there are %d', table.concat(parts, ', '), product,
      mf.world_size())
  end
  return mesh
end

-- The ranks of a stage as a grid: data by tensor.
local function placement_of(mesh, stage)
  local grid, rank = {}, stage * mesh.data * mesh.tensor
  for d = 1, mesh.data do
    grid[d] = {}
    for t = 1, mesh.tensor do
      grid[d][t] = rank
      rank = rank + 1
    end
  end
  return mf.placement('cpu', grid)
end

-- -- What lies where ------------------------------------------------------------------------------

-- Heads that are made of a layer's outputs must be whole on each rank.
local function check_heads(list, name, mesh)
  local owner = list[name:match '^(.*)%.[^.]*$' or '']
  local heads = type(owner) == 'table' and (rawget(owner, 'heads') or rawget(owner, 'num_heads')) or nil
  if type(heads) == 'number' and heads % mesh.tensor ~= 0 then
    fail('parallelize: %s has %d heads, which %d ranks of the tensor axis cannot share: one would be cut in two', name,
      heads, mesh.tensor)
  end
end

-- By parameter: its SBP along the tensor axis.
local function read_split(split, mesh, modules, parameters, list)
  local sbp, by = {}, {}
  local function put(name, value, glob)
    if sbp[name] and sbp[name] ~= value then
      fail("parallelize: '%s' and '%s' say different things of %s", by[name], glob, name)
    end
    sbp[name], by[name] = value, glob
  end
  for _, glob in ipairs(sorted(split)) do
    local how, pattern, found = split[glob], pattern_of(glob), false
    local layer = LAYERS[how]
    if not layer and not tostring(how):match '^S%d$' and how ~= 'B' then
      fail("parallelize: split['%s'] must be 'column', 'row', 'vocabulary', 'S0', 'S1' or 'B', is %s", glob,
        options.describe(how))
    end
    for _, name in ipairs(layer and modules or parameters) do
      if name:match(pattern) then
        found = true
        if not layer then put(name, how, glob) end
        if how == 'column' then check_heads(list, name, mesh) end
        for field, value in pairs(layer or {}) do
          if list[name .. '.' .. field] then put(name .. '.' .. field, value, glob) end
        end
      end
    end
    if not found then unknown('split', glob, layer and modules or parameters) end
  end
  return sbp
end

local function check_size(name, p, sbp, ranks, axis, uneven)
  local d = tonumber(sbp:match '^S(%d)$')
  if not d or ranks == 1 then return end
  if d >= p.ndim then fail('parallelize: %s has %d dims, and is to be split along dim %d', name, p.ndim, d) end
  local size = p:size(d)
  if size < ranks then
    fail('parallelize: dim %d of %s has size %d, less than the %d ranks of the %s axis', d, name, size, ranks, axis)
  end
  if size % ranks ~= 0 then
    uneven[#uneven + 1] = ('dim %d of %s, of size %d, over %d ranks'):format(d, name, size, ranks)
  end
end

-- By module name: its stage, from 0, that of the parts of a module being the module's.
local function read_stages(stages, mesh, modules)
  if mesh.pipeline == 1 and not stages then return nil end
  if not stages then fail('parallelize: the mesh has %d stages, and stages says nothing of them', mesh.pipeline) end
  if #stages ~= mesh.pipeline then
    fail('parallelize: stages lists %d, the mesh has %d', #stages, mesh.pipeline)
  end
  local of, first = {}, {}
  for s, globs in ipairs(stages) do
    if type(globs) ~= 'table' or #globs == 0 then fail('parallelize: stage %d has no module', s - 1) end
    for _, glob in ipairs(globs) do
      local pattern, found = pattern_of(glob), false
      for _, name in ipairs(modules) do
        if name:match(pattern) then
          found = true
          if of[name] and of[name] ~= s - 1 then
            fail('parallelize: %s is in stages %d and %d', name, of[name], s - 1)
          end
          of[name] = s - 1
          first[#first + 1] = name
        end
      end
      if not found then unknown('a stage has', glob, modules) end
    end
  end
  return of, first
end

local function stage_of(of, name)
  while of and name do
    if of[name] then return of[name] end
    name = name:match '^(.*)%.[^.]*$'
  end
  return nil
end

-- -- Inputs ---------------------------------------------------------------------------------------

-- x on the ranks of a placement; a local one by rows along its first axis where there are as many, or (rows nil)
-- as it is.
local function on_stage(x, p, rows)
  if not mf.is_tensor(x) or not (rows or x.is_global) then return x end
  if x.is_global then
    if x.placement == p then return x end
    local sbp = {}
    for axis, s in ipairs(x.sbp) do sbp[axis] = s:sub(1, 1) == 'P' and 'B' or s end
    return x:to_global(p, sbp)
  end
  if x.ndim == 0 or x:size(0) < rows then return x end
  return mf.distribute(x, p, { rows > 1 and 'S0' or 'B', 'B' })
end

local function entering(p, rows)
  return function(...)
    local args = { ... }
    for i = 1, select('#', ...) do args[i] = on_stage(args[i], p, rows) end
    return unpack(args, 1, select('#', ...))
  end
end

-- -- The plan -------------------------------------------------------------------------------------

local function lay_out(self, parameters, list, split, of)
  local held = {}
  for _, name in ipairs(parameters) do
    local p, stage = list[name], of and stage_of(of, name) or 0
    if of and not stage_of(of, name) then fail('parallelize: %s is in no stage', name) end
    local sbp = { 'B', split[name] or 'B' }
    check_size(name, p, sbp[2], self.mesh.tensor, 'tensor', self.uneven)
    local parts = self.mesh.data * (sbp[2] == 'S0' and self.mesh.tensor or 1)
    held[#held + 1] = { name = name, stage = stage, sbp = sbp, shape = tostring(p.shape), sizes = { unpack(p.shape) },
      shared = self.mesh.data > 1 and p.ndim > 0 and p:size(0) >= parts and p:numel() >= self.min_size }
    mf.no_grad(function() p.data = mf.distribute(p:detach(), self.placements[stage + 1], sbp) end)
  end
  return held
end

local function move_buffers(self, model, of)
  mf.no_grad(function()
    for name, b in model:named_buffers() do
      local p = self.placements[(of and stage_of(of, name) or 0) + 1]
      b.data = mf.distribute(b:detach(), p, mf._whole(p))
    end
  end)
end

-- A model whose parameters lie on the ranks as `plan` says; see the head of this file. plan: {mesh, split, stages,
-- micro_batches = 1, zero = 0, zero_min_size = 1024, remat}.
function M.parallelize(model, plan)
  local o = options('parallelize', plan, { mesh = options.table, split = options.table, stages = options.table,
    micro_batches = 1, zero = 0, zero_min_size = 1024, remat = options.table })
  options.count('parallelize', 'micro_batches', o.micro_batches, 1)
  if o.zero ~= 0 and o.zero ~= 1 and o.zero ~= 2 and o.zero ~= 3 then
    fail('parallelize: zero must be 0, 1, 2 or 3, is %s', options.describe(o.zero))
  end
  local self = setmetatable({ model = model, mesh = read_mesh(o.mesh or { data = mf.world_size() }), uneven = {},
    placements = {}, micro_batches = o.micro_batches, zero = o.zero, min_size = o.zero_min_size }, run_mt)
  local modules, parameters, list = names_of(model)
  local split = read_split(o.split or {}, self.mesh, modules, parameters, list)
  local of, first = read_stages(o.stages, self.mesh, modules)
  for s = 1, self.mesh.pipeline do self.placements[s] = placement_of(self.mesh, s - 1) end
  for _, glob in ipairs(o.remat or {}) do
    local pattern, found = pattern_of(glob), false
    for _, name in ipairs(modules) do
      if name:match(pattern) then list[name].activation_checkpointing, found = true, true end
    end
    if not found then unknown('remat', glob, modules) end
  end
  self.held = lay_out(self, parameters, list, split, of)
  move_buffers(self, model, of)
  rawset(model, '_enter', entering(self.placements[1], self.mesh.data))
  for _, name in ipairs(first or {}) do
    rawset(list[name], '_enter', entering(self.placements[of[name] + 1]))
  end
  return self
end

-- -- Running --------------------------------------------------------------------------------------

local function whole(f)
  return function(...)
    local before = mf._local_is_whole(true)
    local function back(ok, ...)
      mf._local_is_whole(before)
      if not ok then error((...), 0) end
      return ...
    end
    return back(pcall(f, ...))
  end
end

-- Single numbers that f returns are on all ranks, also where only the last stage computes them.
local function told_to_all(self, f)
  if self.mesh.pipeline == 1 then return f end
  local all = mf.placement 'cpu'
  local function told(...)
    local results = { ... }
    for i = 1, select('#', ...) do
      local x = results[i]
      if mf.is_tensor(x) and x.is_global and x.ndim == 0 then results[i] = x:detach():to_global(all, 'B') end
    end
    return unpack(results, 1, select('#', ...))
  end
  return function(...) return told(f(...)) end
end

-- f(...) eagerly under the plan: tensors of all ranks that meet those of the model are whole.
function Run:call(f, ...) return whole(told_to_all(self, f))(...) end

-- A function like f whose calls run as one compiled step under the plan, with its micro-batches; as mf.compile.
function Run:compile(f, o)
  local given = {}
  for k, v in pairs(o or {}) do given[k] = v end
  given.gradient_accumulation_steps = given.gradient_accumulation_steps or self.micro_batches
  given.zero, given.zero_min_size = given.zero or self.zero, given.zero_min_size or self.min_size
  local step = mf.compile(told_to_all(self, f), given)
  self.step = step
  return whole(function(...) return step(...) end)
end

-- Elements of the first rank's part, the largest, along with its data axis or not.
local function part(h, mesh, shared)
  local sizes, numel = { unpack(h.sizes) }, 1
  local d = tonumber(h.sbp[2]:match '^S(%d)$')
  if shared then sizes[1] = math.ceil(sizes[1] / mesh.data) end
  if d then sizes[d + 1] = math.ceil(sizes[d + 1] / mesh.tensor) end
  for _, size in ipairs(sizes) do numel = numel * size end
  return numel
end

local function describe(self)
  local m, lines = self.mesh, {}
  lines[1] = ('mesh: pipeline %d, data %d, tensor %d; micro-batches %d, zero %d'):format(m.pipeline, m.data, m.tensor,
    self.micro_batches, self.zero)
  for _, h in ipairs(self.held) do
    lines[#lines + 1] = ('  %s %s: stage %d, data %s, tensor %s'):format(h.name, h.shape, h.stage, h.sbp[1], h.sbp[2])
  end
  for stage = 0, m.pipeline - 1 do
    local numel, states = 0, 0
    for _, h in ipairs(self.held) do
      if h.stage == stage then
        local own, shared = part(h, m, false), part(h, m, h.shared)
        numel = numel + (self.zero == 3 and shared or own)
        states = states + (self.zero > 0 and shared or own)
      end
    end
    local from = stage * m.data * m.tensor
    lines[#lines + 1] = ('ranks %d to %d: up to %d parameters each, and the states of an optimiser for %d'):format(from,
      from + m.data * m.tensor - 1, numel, states)
  end
  for _, text in ipairs(self.uneven) do lines[#lines + 1] = 'uneven: ' .. text end
  return table.concat(lines, '\n')
end
run_mt.__tostring = describe

return M
