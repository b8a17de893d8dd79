-- Data: datasets, samplers, batches, the loader alone and with workers.
local mf = require 'moonflow'
local data = mf.data

local function fails(text, f, ...)
  local ok, err = pcall(f, ...)
  assert(not ok, 'no error; expected: ' .. text)
  assert(tostring(err):find(text, 1, true), tostring(err))
  return tostring(err)
end

-- The values of an iterator, as tables.
local function all(iterator)
  local list = {}
  while true do
    local v = iterator()
    if v == nil then return list end
    list[#list + 1] = mf.is_tensor(v) and v:tolist() or v
  end
end

-- Entry i is 10 i; made one by one.
local Tens = data.Dataset:extend 'Tens'
function Tens:init(n) self.n = n end
function Tens:len() return self.n end
function Tens:get(i) return 10 * i end

local function sorted(list)
  table.sort(list)
  return list
end

local function count_to(n)
  local list = {}
  for i = 0, n - 1 do list[i + 1] = i end
  return list
end

-- The entries of a loader's batches in one list.
local function flat(loader)
  local list = {}
  for x in loader() do
    for _, v in ipairs(x:tolist()) do list[#list + 1] = v end
  end
  return list
end

describe('datasets', function()
  it('of tensors give rows', function()
    local d = data.TensorDataset(mf.arange(6):reshape(3, 2), mf.tensor { 7, 8, 9 })
    assert.equal(3, d:len())
    local x, y = d:get(1)
    assert.same({ 2, 3 }, x:tolist())
    assert.equal(8, y:item())
    x, y = d:gather { 2, 0 }
    assert.same({ { 4, 5 }, { 0, 1 } }, x:tolist())
    assert.same({ 9, 7 }, y:tolist())
    fails('TensorDataset: argument 2 has 4 rows, the first has 3', data.TensorDataset, mf.ones(3), mf.ones(4))
    fails('TensorDataset: a tensor is needed', data.TensorDataset)
    fails('TensorDataset: argument 1 must be a tensor', data.TensorDataset, 5)
  end)

  it('and loaders raise where they are read like lists or their methods called with a dot', function()
    local set = data.TensorDataset(mf.ones(4))
    local loader = data.DataLoader(set)
    for _, d in ipairs { set, data.Subset(set, { 0 }), data.ConcatDataset { set } } do
      fails(d._name .. ': there is no [1]; entries are read by :get(i)', function() return d[1] end)
    end
    fails('DataLoader: there is no [1]; a pass over it is', function() return loader[1] end)
    fails('loader.len is a method; call it with a colon', function() return loader.len() end)
    fails('extend is a method', function() return data.Dataset.extend 'D' end)
    local Cached = data.Dataset:extend 'Cached' -- the user's own may keep entries in itself
    assert.is_nil(Cached()[1])
  end)

  it('are parts of others, and joined', function()
    local s = data.Subset(Tens(9), { 8, 0, 3 })
    assert.same({ 3, 80, 30 }, { s:len(), s:get(0), s:get(2) })
    fails('Subset: index 3 is out of range for 3 entries', s.get, s, 3)
    fails('Subset: index 3 is out of range', s.gather, s, { 0, 3, 1 })
    local c = data.ConcatDataset { Tens(2), data.Subset(Tens(9), { 7 }), Tens(1) }
    assert.equal(4, c:len())
    assert.same({ 0, 10, 70, 0 }, { c:get(0), c:get(1), c:get(2), c:get(3) })
    fails('ConcatDataset: index 4 is out of range', c.get, c, 4)
    fails('Subset: a dataset with :get(i) and :len() is needed', data.Subset, {}, {})
    fails('Half has no get', function()
      local Half = data.Dataset:extend 'Half'
      Half():get(0)
    end)
  end)

  it('are split at random, by lengths or fractions', function()
    mf.manual_seed(1)
    local a, b, c = data.random_split(Tens(10), { 0.55, 0.25, 0.2 })
    assert.same({ 6, 2, 2 }, { a:len(), b:len(), c:len() })
    a, b = data.random_split(Tens(10), { 7, 3 })
    local seen = {}
    for _, part in ipairs { a, b } do
      for i = 0, part:len() - 1 do seen[#seen + 1] = part:get(i) / 10 end
    end
    assert.are_not.same(count_to(10), seen)
    assert.same(count_to(10), sorted(seen))
    local function first(seed)
      return data.random_split(Tens(10), { 7, 3 }, { generator = mf.Generator():manual_seed(seed) }).indices
    end
    assert.same(first(3), first(3))
    assert.are_not.same(first(3), first(4))
    fails('random_split: the lengths sum to 9, the dataset has 10 entries', data.random_split, Tens(10), { 5, 4 })
  end)
end)

describe('samplers', function()
  it('give indices in order or at random', function()
    assert.same({ 0, 1, 2 }, all(data.SequentialSampler(3):iter()))
    assert.same({ 0, 1 }, all(data.SequentialSampler(Tens(2)):iter()))
    mf.manual_seed(2)
    local s = data.RandomSampler(Tens(20))
    local a, b = all(s:iter()), all(s:iter())
    assert.are_not.same(a, b)
    assert.same(count_to(20), sorted(a))
    assert.same(count_to(20), sorted(b))
    assert.equal(5, #all(data.RandomSampler(20, { num_samples = 5 }):iter()))
    local many = all(data.RandomSampler(3, { replacement = true, num_samples = 50 }):iter())
    assert.equal(50, #many)
    for _, i in ipairs(many) do assert(i >= 0 and i < 3) end
    fails('RandomSampler: 21 samples of 20 entries need replacement', data.RandomSampler, 20, { num_samples = 21 })
  end)

  it('draw by weight', function()
    mf.manual_seed(3)
    local s = data.WeightedRandomSampler({ 0, 1, 3 }, 4000)
    local n = { [0] = 0, 0, 0 }
    for i in s:iter() do n[i] = n[i] + 1 end
    assert.equal(0, n[0])
    assert.near(3000, n[2], 5 * math.sqrt(4000 * 0.75 * 0.25))
    assert.same({ 1, 2 }, sorted(all(data.WeightedRandomSampler({ 0, 1, 3 }, 2, { replacement = false }):iter())))
  end)

  it('share the entries out to ranks', function()
    local seen = {}
    for rank = 0, 2 do
      local s = data.DistributedSampler(Tens(10), { num_replicas = 3, rank = rank, seed = 5 })
      assert.equal(4, s:len())
      for i in s:iter() do seen[#seen + 1] = i end
    end
    assert.equal(12, #seen)
    local distinct = {}
    for _, i in ipairs(seen) do distinct[i] = true end
    for i = 0, 9 do assert.is_true(distinct[i]) end
    local s = data.DistributedSampler(Tens(10), { num_replicas = 3, rank = 1, drop_last = true, shuffle = false })
    assert.same({ 1, 4, 7 }, all(s:iter()))
    local t = data.DistributedSampler(Tens(100), { num_replicas = 2, rank = 0 })
    local first = all(t:iter())
    assert.same(first, all(t:iter()))
    t:set_epoch(1)
    assert.are_not.same(first, all(t:iter()))
    local here = data.DistributedSampler(Tens(10), { shuffle = false }) -- this job's one rank
    assert.equal(10, here:len())
    local got = require 'moonflow'.comm._spawn(2, function()
      local d, list = require 'moonflow'.data, {}
      for i in d.DistributedSampler(5, { shuffle = false }):iter() do list[#list + 1] = i end
      return list
    end)
    assert.same({ { 0, 2, 4 }, { 1, 3, 0 } }, got)
    fails('DistributedSampler: rank 3 is out of range', data.DistributedSampler, 10, { num_replicas = 3, rank = 3 })
  end)

  it('are cut into batches', function()
    local s = data.SequentialSampler(7)
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 }, { 6 } }, all(data.BatchSampler(s, 3):iter()))
    assert.same({ { 0, 1, 2 }, { 3, 4, 5 } }, all(data.BatchSampler(s, 3, true):iter()))
    assert.same({ 3, 2 }, { data.BatchSampler(s, 3):len(), data.BatchSampler(s, 3, true):len() })
    assert.same({}, all(data.BatchSampler(data.SequentialSampler(0), 3):iter()))
  end)
end)

describe('default_collate', function()
  it('makes floats of infinite and other large numbers', function()
    for _, v in ipairs { math.huge, -math.huge, 0 / 0, 2 ^ 63, 1e30 } do
      local x, t = data.default_collate { { 1, { a = v } }, { v, { a = 1 } } }
      assert.equal(mf.float32, x.dtype)
      assert.equal(mf.float32, t.a.dtype)
      assert(mf.allclose(x, mf.tensor { 1, v }, { equal_nan = true }))
    end
    assert.equal(mf.int64, data.default_collate({ { 2 ^ 53 }, { -2 ^ 62 } }).dtype)
  end)

  it('stacks tensors, numbers and booleans, and goes into tables', function()
    local x, n, f, b, s, t = data.default_collate {
      { mf.ones(2), 1, 0.5, true, 'a', { k = mf.zeros(1), list = { 1, 'x' } } },
      { mf.zeros(2), 2, 1, false, 'b', { k = mf.ones(1), list = { 2, 'y' } } },
    }
    assert.same({ { 1, 1 }, { 0, 0 } }, x:tolist())
    assert.same({ mf.int64, mf.float32, mf.bool }, { n.dtype, f.dtype, b.dtype })
    assert.same({ 1, 2 }, n:tolist())
    assert.same({ 0.5, 1 }, f:tolist())
    assert.same({ true, false }, b:tolist())
    assert.same({ 'a', 'b' }, s)
    assert.same({ { 0 }, { 1 } }, t.k:tolist())
    assert.same({ 1, 2 }, t.list[1]:tolist())
    assert.same({ 'x', 'y' }, t.list[2])
    fails('collate: there is no batch of values like value 1, a function', data.default_collate, { { print } })
  end)

  it('leaves nothing out where entries differ', function()
    local collate = data.default_collate
    fails('collate: entry 1 of the batch has 1 values, entry 0 has 2', collate, { { 1, 2 }, { 3 } })
    fails('collate: entry 1 of the batch has no value 1.b', collate, { { { a = 1, b = 2 } }, { { a = 1 } } })
    fails('collate: value 1 of entry 1 is a table of length 1, of entry 0 a table of length 2', collate,
      { { { 1, 2 } }, { { 3 } } })
    fails('collate: value 1 of entry 1 is 3, of entry 0 a table of length 1', collate, { { { 1 } }, { 3 } })
    fails('collate: the batch has no entries', collate, {})
  end)
end)

for _, workers in ipairs { 0, 1, 3 } do
  local label = workers == 0 and 'DataLoader' or ('DataLoader with %d workers'):format(workers)
  local function loader(dataset, o)
    o = o or {}
    o.num_workers = workers
    return data.DataLoader(dataset, o)
  end

  describe(label, function()
    it('keeps the order, over several epochs', function()
      local l = loader(Tens(11), { batch_size = 3 })
      assert.equal(4, l:len())
      for _ = 1, 3 do
        assert.same({ { 0, 10, 20 }, { 30, 40, 50 }, { 60, 70, 80 }, { 90, 100 } }, all(l()))
      end
      assert.same({ { 0, 10 }, { 20, 30 } }, all(loader(Tens(5), { batch_size = 2, drop_last = true })()))
      assert.same({}, all(loader(Tens(0), { batch_size = 2 })()))
      assert.same({ { 0 }, { 10 } }, all(loader(Tens(2))()))
    end)

    it('shuffles by seed, anew each epoch, the same for any number of workers', function()
      local l = loader(Tens(40), { batch_size = 7, shuffle = true, seed = 4 })
      local a, b = flat(l), flat(l)
      assert.are_not.same(a, b)
      local c = data.DataLoader(Tens(40), { batch_size = 7, shuffle = true, seed = 4 })
      assert.same(a, flat(c))
      table.sort(a)
      for i = 1, 40 do assert.equal(10 * (i - 1), a[i]) end
      local g = mf.Generator():manual_seed(4)
      assert.same(flat(loader(Tens(40), { shuffle = true, generator = g })),
        flat(loader(Tens(40), { shuffle = true, seed = 4 })))
    end)

    it('takes samplers', function()
      local s = data.SequentialSampler(4)
      assert.same({ { 0, 10 }, { 20, 30 } }, all(loader(Tens(9), { sampler = s, batch_size = 2 })()))
      local batches = { iter = function() return data.BatchSampler(s, 3):iter() end, len = function() return 2 end }
      assert.same({ { 0, 10, 20 }, { 30 } }, all(loader(Tens(9), { batch_sampler = batches })()))
      fails('sampler and shuffle exclude each other', loader, Tens(3), { sampler = s, shuffle = true })
      fails('batch_sampler excludes', loader, Tens(3), { batch_sampler = batches, drop_last = true })
      fails("did you mean 'shuffle'", loader, Tens(3), { shufle = true })
      fails('batch_size must be a whole number of at least 1', loader, Tens(3), { batch_size = 0 })
      fails('DataLoader: a dataset', loader, {})
    end)

    it('gathers rows of tensors', function()
      local x = mf.arange(20):reshape(10, 2)
      local l = loader(data.TensorDataset(x, x:sum(1)), { batch_size = 4 })
      local at = 0
      for a, b in l() do
        local n = a:size(0)
        assert.is_true(mf.equal(x[{ { at, at + n } }], a))
        assert.is_true(mf.equal(a:sum(1), b))
        at = at + n
      end
      assert.equal(10, at)
      assert.same(x:tolist(), all(loader(data.TensorDataset(x), { batch_size = 10 })())[1])
      local subset = data.Subset(data.TensorDataset(x), { 9, 1 })
      assert.same({ { 18, 19 }, { 2, 3 } }, all(loader(subset, { batch_size = 2 })())[1])
    end)

    it('carries strings, tables and many values', function()
      local Mixed = data.Dataset:extend 'Mixed'
      function Mixed:len() return 4 end
      function Mixed:get(i)
        return { image = mf.full({ 2 }, i), name = 'n' .. i, boxes = { { i, i + 0.5 } } }, i % 2 == 0, nil
      end
      local n = 0
      for t, even in loader(Mixed(), { batch_size = 2 })() do
        assert.same({ { 2 * n, 2 * n }, { 2 * n + 1, 2 * n + 1 } }, t.image:tolist())
        assert.same({ 'n' .. 2 * n, 'n' .. 2 * n + 1 }, t.name)
        assert.same({ 2 * n + 0.5, 2 * n + 1.5 }, t.boxes[1][2]:tolist())
        assert.same({ true, false }, even:tolist())
        n = n + 1
      end
      assert.equal(2, n)
    end)

    it('calls a collate_fn', function()
      local l = loader(Tens(5), { batch_size = 2, collate_fn = function(entries)
        local sum = 0
        for _, e in ipairs(entries) do sum = sum + e[1] end
        return { sum = sum, n = #entries }, 'text'
      end })
      local list = {}
      for t, text in l() do
        list[#list + 1] = t.sum
        assert.equal('text', text)
      end
      assert.same({ 10, 50, 40 }, list)
    end)

    it('can be left midway, and begun again', function()
      local l = loader(Tens(100), { batch_size = 2 })
      for _ = 1, 5 do
        local n = 0
        for x in l() do
          n = n + 1
          assert.same({ 20 * (n - 1), 20 * n - 10 }, x:tolist())
          if n == 3 then break end
        end
        collectgarbage()
      end
      assert.equal(50, #all(l()))
    end)

    it('passes errors on with the place they come from', function()
      local Bad = data.Dataset:extend 'Bad'
      function Bad:len() return 9 end
      function Bad:get(i)
        if i == 5 then error 'entry five is broken' end
        return i
      end
      local l = loader(Bad(), { batch_size = 2 })
      for _ = 1, 2 do
        local seen = 0
        local err = fails('entry five is broken', function()
          for _ in l() do seen = seen + 1 end
        end)
        assert.equal(2, seen)
        assert(err:find 'data_spec.lua:%d+: entry five')
        if workers > 0 then
          assert(err:find('DataLoader: worker ' .. 2 % workers, 1, true), err)
          assert(err:find('stack traceback', 1, true), err)
          assert(err:find("in function 'get'", 1, true) or err:find('data_spec.lua', 1, true), err)
        end
      end
      fails('there is no batch of values like', function()
        local None = data.Dataset:extend 'None'
        function None:len() return 1 end
        function None:get() return print end
        for _ in loader(None())() do error 'not reached' end
      end)
    end)

    it('does not take an entry that is missing for the end', function()
      local Gap = data.Dataset:extend 'Gap'
      function Gap:len() return 6 end
      function Gap:get(i) if i ~= 2 then return i end end
      for _, size in ipairs { 1, 4 } do
        fails('Gap:get(2) returned nothing', function() all(loader(Gap(), { batch_size = size })()) end)
      end
      fails('the batch that begins with index 3 is nil', function()
        all(loader(Tens(6), { batch_size = 3, collate_fn = function(entries)
          if entries[1][1] == 0 then return 1 end
        end })())
      end)
      local l = loader(Gap(), { batch_size = 4, collate_fn = function(entries) -- which may choose
        local kept = {}
        for _, e in ipairs(entries) do kept[#kept + 1] = e[1] end
        return mf.tensor(kept)
      end })
      assert.same({ { 0, 1, 3 }, { 4, 5 } }, all(l()))
    end)

    it('says what is wrong with a length', function()
      local D = data.Dataset:extend 'D'
      function D:len() return 'six' end
      fails("what len() returns must be a whole number of at least 0, is 'six'", function() all(loader(D())()) end)
      fails("RandomSampler: what len() returns must be a whole number of at least 0, is 'six'", loader, D(),
        { shuffle = true })
    end)

    it('gives the end once, and again', function()
      local next_batch = loader(Tens(2), { batch_size = 2 })()
      assert.truthy(next_batch())
      assert.is_nil((next_batch()))
      assert.is_nil((next_batch()))
    end)
  end)
end

describe('workers', function()
  it('draw by seeds of their own, the same in each run', function()
    local Noise = data.Dataset:extend 'Noise'
    function Noise:len() return 8 end
    function Noise:get() return mf.rand(2) end
    local function run(seed)
      local l = data.DataLoader(Noise(), { batch_size = 2, num_workers = 2, seed = seed })
      return all(l())
    end
    local a = run(1)
    assert.same(a, run(1))
    assert.are_not.same(a, run(2))
    local seen = {}
    for _, batch in ipairs(a) do
      for _, x in ipairs(batch) do
        assert.is_nil(seen[x[1]])
        seen[x[1]] = true
      end
    end
  end)

  it('tell of errors that are no strings', function()
    local value
    local D = data.Dataset:extend 'D'
    function D:len() return 1 end
    function D:get() error(value) end
    local function raises(v, text)
      value = v
      local err = fails(text, function() all(data.DataLoader(D(), { num_workers = 1 })()) end)
      assert(err:find('data_spec.lua', 1, true), err)
    end
    raises({ code = 3, what = 'no' }, "worker 0: an error that is a table, { code = 3, what = 'no' }")
    raises(nil, 'worker 0: an error that is nil')
    raises(setmetatable({}, { __tostring = function() return 'I am' end }), 'worker 0: I am')
  end)

  it('share the memory of tensors, and take upvalues along', function()
    local table_of = mf.arange(1000000):float()
    local factor = 3
    local Rows = data.Dataset:extend 'Rows'
    function Rows:len() return 4 end
    function Rows:get(i) return table_of[i * 1000] * factor end
    local before = mf.memory_stats().in_use
    local l = data.DataLoader(Rows(), { batch_size = 4, num_workers = 2 })
    local next_batch = l()
    assert.same({ 0, 3000, 6000, 9000 }, next_batch():tolist())
    assert(mf.memory_stats().in_use - before < 1e6)
  end)

  it('refuse what cannot cross', function()
    local D = data.Dataset:extend 'D'
    function D:len() return 1 end
    function D:get() return 1 end
    local d = D()
    d.thread = coroutine.create(print)
    fails('DataLoader: loader.dataset.thread is a thread, which cannot cross to a worker',
      data.DataLoader(d, { num_workers = 1 }))
    d.thread = nil
    d.file = io.tmpfile()
    fails('DataLoader: loader.dataset.file is a userdata, which cannot cross to a worker',
      data.DataLoader(d, { num_workers = 1 }))
    d.file = io.stdout -- by its name
    assert.same({ { 1 } }, all(data.DataLoader(d, { num_workers = 1 })()))
  end)

  it('say that the loader must be called', function()
    local l = data.DataLoader(data.TensorDataset(mf.ones(4)), { batch_size = 2 })
    fails('for x, y in loader() do', function()
      for _ in l do error 'endless' end
    end)
  end)

  it('are at most prefetch_factor batches ahead', function()
    -- The count is read while the worker writes it.
    local program = 0
    while arg[program - 1] do program = program - 1 end
    if arg[program]:find '/thread' then return pending 'not with the thread sanitizer' end
    local made = mf.zeros({ 1 }, { dtype = mf.int64 })
    local Count = data.Dataset:extend 'Count'
    function Count:len() return 100 end
    function Count:get(i)
      made:add_(1)
      return i
    end
    local l = data.DataLoader(Count(), { num_workers = 1, prefetch_factor = 3 })
    local next_batch = l()
    for k = 1, 10 do
      next_batch()
      assert(made:item() <= k + 3, made:item())
    end
  end)
end)

describe('idx files', function()
  local path
  before_each(function() path = os.tmpname() end)
  after_each(function() os.remove(path) end)

  it('become tensors', function()
    local f = io.open(path, 'wb')
    f:write '\0\0\8\2\0\0\0\2\0\0\0\3\1\2\3\4\5\255'
    f:close()
    local t = data.load_idx(path)
    assert.equal(mf.uint8, t.dtype)
    assert.same({ { 1, 2, 3 }, { 4, 5, 255 } }, t:tolist())
    fails('/nowhere', data.load_idx, '/nowhere')
  end)
end)
