-- Communication between the ranks of a job; names and arguments are OneFlow's.
--
-- Every function takes CPU tensors of any strides and any dtype, works on their values (nothing is recorded
-- for gradients), and is called by all ranks of the group, in the same order. A group is the table of its
-- ranks; without one it is all ranks. Sums are formed in the order of the ranks: the bits are the same on
-- all of them and from run to run.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local comm = {}

-- -- Reading arguments ----------------------------------------------------------------------------

local function check_tensor(where, name, t)
  if mf.is_tensor(t) then return t end
  options.fail('%s: %s must be a tensor, is %s', where, name, options.describe(t))
end

local function check_list(where, name, list, n)
  if type(list) ~= 'table' then
    options.fail('%s: %s must be a table of tensors, is %s', where, name, options.describe(list))
  end
  if #list ~= n then
    options.fail('%s: %s has %d tensors, but the group has %d ranks', where, name, #list, n)
  end
  for i, t in ipairs(list) do check_tensor(where, ('%s[%d]'):format(name, i), t) end
end

local reduces = { 'sum', 'max', 'min', 'avg' }

-- The options of one call; its group as a table of ranks, or nil, and how many they are.
local function read(where, order, defaults, ...)
  defaults.group = options.none
  order[#order + 1] = 'group'
  local o = options.arguments(where, order, defaults, ...)
  if o.op then options.choice(where, 'op', o.op, reduces) end
  if o.group ~= nil and type(o.group) ~= 'table' then
    options.fail('%s: group must be a table of ranks, is %s', where, options.describe(o.group))
  end
  o.n = o.group and #o.group or mf.world_size()
  return o
end

-- What a library call raises is told at the user's line.
local function call(where, ...)
  local ok, text = pcall(mf._comm_call, where, ...)
  if not ok then options.fail('%s', (tostring(text):gsub('^[^:]+:%d+: ', ''))) end
end

-- -- Memory ---------------------------------------------------------------------------------------

-- The values of t in one piece: t's own memory when they lie so.
local function packed(t)
  t = t:detach()
  return t:is_contiguous() and t or t:contiguous()
end

-- Puts back what was done to packed(t).
local function put_back(t, values)
  if not t:is_contiguous() then t:detach():copy_(values) end
end

local function counts_of(list)
  local counts = {}
  for i, t in ipairs(list) do counts[i] = t:numel() end
  return counts
end

-- All values of a list, one after another.
local function join(list)
  local flat = {}
  for i, t in ipairs(list) do flat[i] = t:detach():reshape(-1) end
  return mf.cat(flat, 0)
end

-- The parts of a flat tensor into the tensors of a list.
local function part(flat, list)
  local at = 0
  for _, t in ipairs(list) do
    local n = t:numel()
    t:detach():copy_(flat:narrow(0, at, n):reshape(t.shape))
    at = at + n
  end
end

local function room(list)
  local n = 0
  for _, t in ipairs(list) do n = n + t:numel() end
  return mf.empty({ n }, { dtype = list[1].dtype })
end

-- -- What a tensor is, as a tensor ----------------------------------------------------------------

local dtypes = { 'bool', 'uint8', 'int8', 'int16', 'int32', 'int64', 'float16', 'bfloat16', 'float32', 'float64' }
local meta_size = 14 -- number of the dtype, number of dims, up to 12 sizes

local function meta_of(t)
  local m = { 0, #t.shape }
  for i, name in ipairs(dtypes) do
    if mf[name] == t.dtype then m[1] = i end
  end
  for i = 1, meta_size - 2 do m[i + 2] = t.shape[i] or 0 end
  return mf.tensor(m, { dtype = mf.int64 })
end

local function from_meta(m)
  local shape = {}
  for i = 1, m[2] do shape[i] = m[i + 2] end
  return mf.empty(shape, { dtype = mf[dtypes[m[1]]] })
end

local function repeated(value, n)
  local list = {}
  for i = 1, n do list[i] = value end
  return list
end

-- -- Collectives ----------------------------------------------------------------------------------

-- all_reduce(t, op = 'sum', group): t becomes the sum over the ranks ('max', 'min', 'avg' too); returns t.
function comm.all_reduce(t, ...)
  check_tensor('all_reduce', 'tensor', t)
  local o = read('all_reduce', { 'op' }, { op = 'sum' }, ...)
  local values = packed(t)
  call('all_reduce', o.group, o.op, nil, values, values)
  put_back(t, values)
  return t
end

-- reduce(t, dst = 0, op = 'sum', group): on rank dst, t becomes the sum over the ranks; returns t.
function comm.reduce(t, ...)
  check_tensor('reduce', 'tensor', t)
  local o = read('reduce', { 'dst', 'op' }, { dst = 0, op = 'sum' }, ...)
  local values = packed(t)
  local here = mf.rank() == o.dst
  call('reduce', o.group, o.op, o.dst, values, here and values or nil)
  if here then put_back(t, values) end
  return t
end

-- broadcast(t, src = 0, group): t becomes that of rank src; returns t.
function comm.broadcast(t, ...)
  check_tensor('broadcast', 'tensor', t)
  local o = read('broadcast', { 'src' }, { src = 0 }, ...)
  local values = packed(t)
  call('broadcast', o.group, nil, o.src, values, values)
  put_back(t, values)
  return t
end

-- all_gather(list, t, group): every rank's t, in the order of the ranks, as a table. The tensors in `list`
-- take the values; an empty list is filled with new ones, of whatever shape they are. Returns list.
function comm.all_gather(list, t, ...)
  check_tensor('all_gather', 'tensor', t)
  local o = read('all_gather', {}, {}, ...)
  if type(list) ~= 'table' then
    options.fail('all_gather: tensor_list must be a table, is %s', options.describe(list))
  end
  if #list == 0 then
    local metas = mf.empty({ o.n, meta_size }, { dtype = mf.int64 })
    call('all_gather', o.group, nil, nil, meta_of(t), metas, repeated(meta_size, o.n))
    for i, m in ipairs(metas:tolist()) do list[i] = from_meta(m) end
  else
    check_list('all_gather', 'tensor_list', list, o.n)
  end
  local flat = room(list)
  call('all_gather', o.group, nil, nil, packed(t), flat, counts_of(list))
  part(flat, list)
  return list
end

local function even(where, whole, n)
  if whole:numel() % n == 0 then return repeated(whole:numel() / n, n) end
  options.fail('%s: %d elements cannot be cut into %d equal parts', where, whole:numel(), n)
end

-- all_gather_into_tensor(out, t, group): the ranks' t, all of one size, one after another in out.
function comm.all_gather_into_tensor(out, t, ...)
  check_tensor('all_gather_into_tensor', 'output_tensor', out)
  check_tensor('all_gather_into_tensor', 'input_tensor', t)
  local o = read('all_gather_into_tensor', {}, {}, ...)
  local values = packed(out)
  call('all_gather', o.group, nil, nil, packed(t), values, even('all_gather_into_tensor', out, o.n))
  put_back(out, values)
  return out
end

local function scatter_sums(out, whole, counts, o)
  local values = packed(out)
  call('reduce_scatter', o.group, o.op, nil, whole, values, counts)
  put_back(out, values)
  return out
end

-- reduce_scatter(out, list, op = 'sum', group): out becomes the sum over the ranks of the tensor that their
-- lists hold for this rank. Sizes may differ from rank to rank. Returns out.
function comm.reduce_scatter(out, list, ...)
  check_tensor('reduce_scatter', 'output', out)
  local o = read('reduce_scatter', { 'op' }, { op = 'sum' }, ...)
  check_list('reduce_scatter', 'input_list', list, o.n)
  return scatter_sums(out, join(list), counts_of(list), o)
end

-- reduce_scatter_tensor(out, whole, op = 'sum', group): the same with a list that is one tensor.
function comm.reduce_scatter_tensor(out, whole, ...)
  check_tensor('reduce_scatter_tensor', 'output', out)
  check_tensor('reduce_scatter_tensor', 'input', whole)
  local o = read('reduce_scatter_tensor', { 'op' }, { op = 'sum' }, ...)
  return scatter_sums(out, packed(whole), even('reduce_scatter_tensor', whole, o.n), o)
end

-- all_to_all(outs, ins, group): ins[i] goes to the i-th rank of the group, outs[i] comes from it.
function comm.all_to_all(outs, ins, ...)
  local o = read('all_to_all', {}, {}, ...)
  check_list('all_to_all', 'output_tensor_list', outs, o.n)
  check_list('all_to_all', 'input_tensor_list', ins, o.n)
  local flat = room(outs)
  call('all_to_all', o.group, nil, nil, join(ins), flat, counts_of(ins), counts_of(outs))
  part(flat, outs)
  return outs
end

-- gather(t, list, dst = 0, group): on rank dst, list holds every rank's t, as all_gather has it on all.
-- The tensors must be of one size. Returns list.
function comm.gather(t, list, ...)
  check_tensor('gather', 'tensor', t)
  local o = read('gather', { 'dst' }, { dst = 0 }, ...)
  local counts, flat = repeated(t:numel(), o.n), nil
  if mf.rank() == o.dst then
    list = list or {}
    if #list == 0 then
      for i = 1, o.n do list[i] = mf.empty(t.shape, { dtype = t.dtype }) end
    end
    check_list('gather', 'gather_list', list, o.n)
    flat = room(list)
  end
  call('gather', o.group, nil, o.dst, packed(t), flat, counts)
  if flat then part(flat, list) end
  return list
end

-- scatter(t, list, src = 0, group): t becomes the tensor that rank src has for this rank in its list. All are
-- of one size. Returns t.
function comm.scatter(t, list, ...)
  check_tensor('scatter', 'tensor', t)
  local o = read('scatter', { 'src' }, { src = 0 }, ...)
  local flat
  if mf.rank() == o.src then
    check_list('scatter', 'scatter_list', list, o.n)
    flat = join(list)
  end
  local values = packed(t)
  call('scatter', o.group, nil, o.src, flat, values, repeated(t:numel(), o.n))
  put_back(t, values)
  return t
end

-- barrier(group): returns when all ranks have called it.
function comm.barrier(...)
  local o = read('barrier', {}, {}, ...)
  call('barrier', o.group)
end

-- new_group(ranks): the group of these ranks, sorted; a table that every function here takes as `group`.
function comm.new_group(ranks)
  if type(ranks) ~= 'table' or #ranks == 0 then
    options.fail('new_group: ranks must be a table of ranks, is %s', options.describe(ranks))
  end
  local group = {}
  for i, rank in ipairs(ranks) do group[i] = options.count('new_group', 'a rank', rank) end
  table.sort(group)
  for i, rank in ipairs(group) do
    if rank >= mf.world_size() then
      options.fail('new_group: there is no rank %d; ranks are 0 to %d', rank, mf.world_size() - 1)
    end
    if rank == group[i - 1] then options.fail('new_group: rank %d is there twice', rank) end
  end
  return group
end

-- -- Messages -------------------------------------------------------------------------------------

local function message(f, where, ...)
  local ok, text = pcall(f, ...)
  if not ok then options.fail('%s', (tostring(text):gsub('^[^:]+:%d+: ', ''))) end
  return where
end

-- send(t, dst, { tag = 0, send_meta = true }): to rank dst, which calls recv. Without send_meta the receiver
-- must know shape and dtype.
function comm.send(t, dst, given)
  check_tensor('send', 'tensor', t)
  local o = options('send', given, { tag = 0, send_meta = true })
  if o.send_meta then message(mf._comm_send, 'send', meta_of(t), dst, o.tag) end
  message(mf._comm_send, 'send', packed(t), dst, o.tag)
end

-- recv(src, { tag = 0, shape =, dtype =, out = }): the tensor that rank src sent. With shape, or out, no meta
-- data is expected: the sender sets send_meta = false.
function comm.recv(src, given)
  local o = options('recv', given, { tag = 0, shape = options.none, dtype = options.none, out = options.none })
  local t = o.out
  if t then check_tensor('recv', 'out', t)
  elseif o.shape then t = mf.empty(o.shape, { dtype = o.dtype })
  else
    local m = mf.empty({ meta_size }, { dtype = mf.int64 })
    message(mf._comm_recv, 'recv', m, src, o.tag)
    t = from_meta(m:tolist())
  end
  local values = packed(t)
  message(mf._comm_recv, 'recv', values, src, o.tag)
  put_back(t, values)
  return t
end

-- stats(): bytes sent and received, and how many connections and messages were refused.
function comm.stats() return mf._comm_stats() end

-- host(rank): the name of the host on which a rank runs.
function comm.host(rank) return mf._comm_host(rank) end

-- -- Ranks as threads -----------------------------------------------------------------------------

-- Tensors cross as lists of numbers: ranks share no memory that one of them could free.
local function pack(value, what, names)
  local worker = require 'moonflow.worker'
  local text, tensors = worker.pack(value, what, names)
  local list = {}
  for i, t in ipairs(tensors) do
    list[i] = { meta = meta_of(t):tolist(), values = t:numel() > 0 and t:detach():reshape(-1):tolist() or nil }
  end
  return (worker.pack({ text = text, tensors = list }))
end

local function unpack_text(text)
  local worker = require 'moonflow.worker'
  local outer, tensors = worker.unpack(text, {}), {}
  for i, t in ipairs(outer.tensors) do
    local empty = from_meta(t.meta)
    tensors[i] = t.values and mf.tensor(t.values, { dtype = empty.dtype }):reshape(empty.shape) or empty
  end
  return worker.unpack(outer.text, tensors)
end

-- In a rank: whether its function went well, and its result or the error, as texts.
function comm._serve(text)
  local _, answer = xpcall(function()
    local job = unpack_text(text)
    package.path, package.cpath = job.path, job.cpath
    mf.set_num_threads(job.threads)
    local ok, result = xpcall(job.f, function(e) return debug.traceback(tostring(e), 2) end, job.rank, job.n)
    if not ok then return { false, result } end
    return { true, pack({ result }, 'the result') }
  end, function(e) return { false, tostring(e) } end)
  return answer[1], answer[2]
end

-- _spawn(n, f, { member = 'local', timeout = 60, check = true, catch = false }): runs f(rank, n) as n ranks in
-- threads of this process, which share nothing: f and its upvalues are copied. Returns a table of what each
-- returned, and raises the first error; with catch a second table has the errors. member: 'local', 'zmq', or
-- 'hosts', which is zmq as between hosts.
function comm._spawn(n, f, given)
  local o = options('_spawn', given, { member = 'local', timeout = 60, check = true, catch = false })
  local texts = {}
  for rank = 0, n - 1 do
    texts[rank + 1] = pack({ f = f, rank = rank, n = n, threads = math.max(1, math.floor(mf.get_num_threads() / n)),
      path = package.path, cpath = package.cpath }, 'the function', true)
  end
  local answers, errors = mf._ranks(texts, o)
  local results = {}
  for i = 1, n do
    if errors[i] and not o.catch then error(('rank %d: %s'):format(i - 1, errors[i]), 0) end
    if answers[i] then results[i] = unpack_text(answers[i])[1] end
  end
  return results, errors
end

return comm
