-- nn.parallel.DistributedDataParallel: training with the batch cut over ranks, op by op.
--
--   local model = nn.parallel.DistributedDataParallel(Net())     -- on each rank
--   for x, y in loader() do                                      -- each rank's part of the data
--     opt:zero_grad()
--     mf.cross_entropy(model(x), y):backward()                   -- gradients are averages over the ranks
--     opt:step()
--   end
--
-- Parameters and buffers begin as rank 0's. While backward goes on, gradients that are there travel in buckets
-- (eager/buckets.c), in the order in which they came in the first step.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local options = require 'moonflow.options'
local fail = options.fail
local parallel = {}

local first_bucket = 2 ^ 20 -- bytes: the first one travels early
local broadcast_size = 2 ^ 25 -- bytes that are broadcast as one

-- -- Being equal on all ranks ---------------------------------------------------------------------

-- A text as a tensor of bytes, and back.
local function bytes_of(text)
  local list = {}
  for i = 1, #text do list[i] = text:byte(i) end
  return mf.tensor(list, { dtype = mf.uint8 })
end

local function text_of(bytes)
  local list = bytes:tolist()
  for i, byte in ipairs(list) do list[i] = string.char(byte) end
  return table.concat(list)
end

local function lines_of(text)
  local list = {}
  for line in text:gmatch '[^\n]+' do list[#list + 1] = line end
  return list
end

-- A line for each tensor that takes part: name, dtype, shape, and what else must be equal.
local function describe(entries)
  local lines = {}
  for i, e in ipairs(entries) do
    local strides = {}
    for d = 0, e.tensor.ndim - 1 do strides[d + 1] = e.tensor:stride(d) end
    lines[i] = ('%s: %s of %s, strides (%s)%s%s'):format(e.name, tostring(e.tensor.shape), tostring(e.tensor.dtype),
      table.concat(strides, ', '), e.kind == 'parameter' and not e.tensor.requires_grad and ', frozen' or '',
      e.sparse and ', sparse gradient' or '')
  end
  return table.concat(lines, '\n') .. '\n'
end

local function check_equal(entries, group, ranks)
  local own = describe(entries)
  local texts = mf.comm.all_gather({}, bytes_of(own), { group = group })
  for i, t in ipairs(texts) do
    local text = text_of(t)
    if text ~= own then
      local mine, theirs, k = lines_of(own), lines_of(text), 1
      while mine[k] == theirs[k] do k = k + 1 end
      fail('DistributedDataParallel: the modules differ: rank %d has %s; rank %d has %s', mf.rank(),
        mine[k] or 'nothing more', ranks[i], theirs[k] or 'nothing more')
    end
  end
end

-- One message for several tensors of a dtype.
local function broadcast_together(list, src, group)
  if #list == 1 then return mf.comm.broadcast(list[1], src, { group = group }) end
  local flat = {}
  for i, t in ipairs(list) do flat[i] = t:detach():reshape(-1) end
  local all, at = mf.cat(flat, 0), 0
  mf.comm.broadcast(all, src, { group = group })
  if mf.rank() == src then return end
  for _, t in ipairs(list) do
    t:detach():copy_(all:narrow(0, at, t:numel()):reshape(t.shape))
    at = at + t:numel()
  end
end

-- The tensors become those of rank src.
local function broadcast_all(tensors, src, group)
  mf.no_grad(function()
    local waiting, order = {}, {}
    for _, t in ipairs(tensors) do
      local key = tostring(t.dtype)
      local w = waiting[key]
      if not w then
        w = { bytes = 0 }
        waiting[key], order[#order + 1] = w, w
      end
      w[#w + 1], w.bytes = t, w.bytes + t:numel() * t:element_size()
      if w.bytes >= broadcast_size then
        broadcast_together(w, src, group)
        waiting[key] = nil
        w.sent = true
      end
    end
    for _, w in ipairs(order) do
      if not w.sent then broadcast_together(w, src, group) end
    end
  end)
end

-- -- Buckets --------------------------------------------------------------------------------------

-- Cuts leaves, numbers in the order in which gradients are expected, into buckets of one dtype each and at most
-- `cap` bytes, more for a larger leaf; the first of a dtype is small. A sparse one is alone.
local function cut(leaves, order, cap)
  local buckets, open, count = {}, {}, {}
  for _, i in ipairs(order) do
    local leaf = leaves[i]
    local key = tostring(leaf.tensor.dtype)
    local bucket = not leaf.sparse and open[key] or nil
    if not bucket then
      bucket = { bytes = 0 }
      buckets[#buckets + 1] = bucket
    end
    bucket[#bucket + 1] = i
    bucket.bytes = bucket.bytes + leaf.tensor:numel() * leaf.tensor:element_size()
    if not leaf.sparse then
      local full = bucket.bytes >= (count[key] and cap or math.min(first_bucket, cap))
      if full then count[key] = true end
      open[key] = not full and bucket or nil
    end
  end
  return buckets
end

-- A bucket can go when its last gradient is there, and all before it have gone.
local function in_order_of_end(buckets, order)
  local place = {}
  for k, i in ipairs(order) do place[i] = k end
  for _, bucket in ipairs(buckets) do
    bucket.last = 0
    for _, i in ipairs(bucket) do bucket.last = math.max(bucket.last, place[i]) end
  end
  table.sort(buckets, function(a, b) return a.last < b.last end)
  return buckets
end

-- -- The module -----------------------------------------------------------------------------------

-- A module whose gradients are averaged over the ranks. Options: process_group, a table of ranks (all);
-- bucket_cap_mb (25), how much travels as one; find_unused_parameters, for modules of which a call may leave
-- some parameters without a gradient; broadcast_buffers (true): before a call in training, buffers become those
-- of the first rank; gradient_as_bucket_view, which changes nothing: gradients are averaged where they lie;
-- init_sync (true): parameters and buffers begin as those of the first rank. Results of a call are tensors or
-- tables of them, and one backward of them follows each call. Fields that it has not are the module's.
parallel.DistributedDataParallel = nn.Module:extend 'DistributedDataParallel'
local DDP = parallel.DistributedDataParallel

-- What is no field of it is looked for in the module.
local own_field = DDP._meta.__index
function DDP._meta.__index(self, key)
  local value = own_field(self, key)
  if value ~= nil or key == 'module' then return value end
  local module = own_field(self, 'module')
  return module and module[key]
end

local function sparse_weights(module)
  local sparse = {}
  for _, m in module:named_modules() do
    if rawget(m, 'sparse') == true and mf.is_tensor(m.weight) then sparse[m.weight] = true end
  end
  return sparse
end

-- Parameters and buffers, with their names.
local function entries_of(module)
  local entries, sparse = {}, sparse_weights(module)
  for name, m in module:named_modules() do
    if rawget(m, '_arguments') and m.materialize_from then
      fail('DistributedDataParallel: %s does not know its sizes yet; pass a batch through the module before',
        name == '' and tostring(m) or name)
    end
  end
  for name, p in module:named_parameters() do
    entries[#entries + 1] = { name = name, tensor = p, kind = 'parameter', sparse = sparse[p] }
  end
  for _, e in ipairs(entries) do
    if e.tensor.is_global then
      fail('DistributedDataParallel: %s is a global tensor, whose gradient needs no averaging', e.name)
    end
  end
  for name, b in module:named_buffers() do entries[#entries + 1] = { name = name, tensor = b, kind = 'buffer' } end
  return entries
end

local function select_entries(entries, wanted)
  local list = {}
  for _, e in ipairs(entries) do
    if wanted(e) then list[#list + 1] = e end
  end
  return list
end

local function column(entries, key)
  local list = {}
  for i, e in ipairs(entries) do list[i] = e[key] or false end
  return list
end

-- How many there were of the same ranks, so that each has messages of its own.
local made = {}
local function next_tag(ranks)
  local key = table.concat(ranks, ',')
  made[key] = (made[key] or 0) + 1
  return made[key]
end

local function arrange(self, order)
  local s = self._state
  s.reducer:arrange(in_order_of_end(cut(s.leaves, order, s.cap), order))
end

function parallel.DistributedDataParallel:init(module, o)
  if not nn.is_module(module) then
    fail('DistributedDataParallel: the first argument must be a module, is %s', options.describe(module))
  end
  o = options('DistributedDataParallel', o, { process_group = options.table, bucket_cap_mb = 25,
    find_unused_parameters = false, broadcast_buffers = true, gradient_as_bucket_view = false, init_sync = true })
  if o.bucket_cap_mb <= 0 then fail('DistributedDataParallel: bucket_cap_mb must be positive') end
  local ranks = o.process_group and mf.comm.new_group(o.process_group) or {}
  for r = 0, not o.process_group and mf.world_size() - 1 or -1 do ranks[r + 1] = r end
  local entries = entries_of(module)
  local leaves = select_entries(entries, function(e) return e.kind == 'parameter' and e.tensor.requires_grad end)
  if #leaves == 0 then
    fail 'DistributedDataParallel: no parameter of the module requires a gradient, so there is nothing to average'
  end
  check_equal(entries, ranks, ranks)
  if o.init_sync then broadcast_all(column(entries, 'tensor'), ranks[1], ranks) end
  collectgarbage() -- an earlier one of the same module may be garbage
  rawset(self, '_state', {
    ranks = ranks, leaves = leaves, cap = o.bucket_cap_mb * 2 ^ 20, sync = true, buffers_due = true,
    find_unused = o.find_unused_parameters, broadcasts = o.broadcast_buffers,
    reducer = mf._buckets(ranks, next_tag(ranks), column(leaves, 'tensor'), column(leaves, 'name'),
      column(leaves, 'sparse'), o.find_unused_parameters),
  })
  self.module = module
  local order = {}
  for i = #leaves, 1, -1 do order[#order + 1] = i end
  arrange(self, order)
end

-- After the first step: the order in which rank 0 got its gradients.
local function arrange_anew(self)
  local s = self._state
  local order = not s.arranged and not s.find_unused and s.reducer:order()
  if not order then return end
  s.arranged = true
  local t = mf.tensor(order, { dtype = mf.int64 })
  mf.comm.broadcast(t, s.ranks[1], { group = s.ranks })
  arrange(self, t:tolist())
end

local function find_tensors(value, list, seen)
  if mf.is_tensor(value) then
    if value.requires_grad then list[#list + 1] = value end
  elseif type(value) == 'table' and not seen[value] then
    seen[value] = true
    for _, v in pairs(value) do find_tensors(v, list, seen) end
  end
  return list
end

local function after(self, ...)
  local s = self._state
  local sync = mf.is_grad_enabled() and s.sync
  s.buffers_due = sync
  if sync then s.reducer:begin(s.find_unused and find_tensors({ ... }, {}, {}) or {})
  elseif mf.is_grad_enabled() then s.reducer:begin_local() end
  return ...
end

-- The module's own forward.
function parallel.DistributedDataParallel:forward(...)
  local s = self._state
  if mf._tracing() then
    fail('DistributedDataParallel: it is for eager calls and cannot be part of a compiled step')
  end
  if mf.is_grad_enabled() and s.sync then arrange_anew(self) end
  if s.broadcasts and s.buffers_due then
    local buffers = self.module:buffers()
    if #buffers > 0 then broadcast_all(buffers, s.ranks[1], s.ranks) end
  end
  return after(self, self.module(...))
end

-- f's results. Backward passes of calls inside of f leave each rank's gradients as they are, so that several
-- batches add up; the next pass outside averages the sums.
function parallel.DistributedDataParallel:no_sync(f, ...)
  if not options.is_callable(f) then fail('no_sync: f must be a function, is %s', options.describe(f)) end
  local s = self._state
  local was = s.sync
  s.sync = false
  local function finish(ok, ...)
    s.sync = was
    if not ok then error((...), 0) end
    return ...
  end
  return finish(pcall(f, ...))
end

return parallel
