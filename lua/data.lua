-- Datasets, samplers and the loader. Indices count from 0.
--
-- A dataset is a table with :get(i), which returns the values of entry i, and :len(). A sampler is
-- a table with :iter(), which gives a function that returns the next index, and :len().
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local arguments, count, fail, none = options.arguments, options.count, options.fail, options.none
local data = {}

-- -- Datasets -------------------------------------------------------------------------------------

local Dataset = {}
data.Dataset = Dataset

-- A class of datasets, or of samplers; calling it makes one and runs its init.
function Dataset:extend(name)
  if type(self) ~= 'table' then fail("extend is a method; call it with a colon: data.Dataset:extend 'Name'") end
  local class = setmetatable({ _name = name }, {
    __index = self,
    __call = function(class, ...)
      local dataset = setmetatable({}, class)
      dataset:init(...)
      return dataset
    end,
  })
  class.__index = class
  return class
end
function Dataset:init() end
function Dataset:get() fail('%s has no get', self._name or 'Dataset') end
function Dataset:len() fail('%s has no len', self._name or 'Dataset') end

local function check_dataset(name, dataset)
  if type(dataset) == 'table' and dataset.get and dataset.len then return dataset end
  return fail('%s: a dataset with :get(i) and :len() is needed, this is %s', name,
    options.describe(dataset))
end

-- What a dataset or sampler says of its length.
local function length(name, of) return count(name, 'what len() returns', of:len()) end

-- Objects of the class raise where they are read like a list, which would give nil.
local function refuse_numbers(class, hint)
  class.__index = function(_, key)
    if type(key) == 'number' then fail('%s: there is no [%s]; %s', class._name, tostring(key), hint) end
    return class[key]
  end
end
local by_get = 'entries are read by :get(i), from 0, and counted by :len()'

-- Tensors of one first size, TensorDataset(x, y, ...): entry i is row i of each.
data.TensorDataset = Dataset:extend 'TensorDataset'
refuse_numbers(data.TensorDataset, by_get)
function data.TensorDataset:init(...)
  self.tensors = { ... }
  if select('#', ...) == 0 then fail 'TensorDataset: a tensor is needed' end
  for k = 1, select('#', ...) do
    local t = self.tensors[k]
    if not mf.is_tensor(t) or t.ndim == 0 then
      fail('TensorDataset: argument %d must be a tensor of at least one dim', k)
    end
    local n, first = t:size(0), self.tensors[1]:size(0)
    if n ~= first then
      fail('TensorDataset: argument %d has %d rows, the first has %d', k, n, first)
    end
  end
end
function data.TensorDataset:len() return self.tensors[1]:size(0) end
function data.TensorDataset:get(i)
  local row = {}
  for k, t in ipairs(self.tensors) do row[k] = t:select(0, i) end
  return unpack(row)
end
-- Many rows at once, which the loader prefers over single ones.
function data.TensorDataset:gather(indices)
  local ids, rows = mf.tensor(indices, { dtype = mf.int64 }), {}
  for k, t in ipairs(self.tensors) do rows[k] = t:index_select(0, ids) end
  return unpack(rows)
end

-- The entries of a dataset whose indices are in a table.
data.Subset = Dataset:extend 'Subset'
refuse_numbers(data.Subset, by_get)
function data.Subset:init(dataset, indices)
  self.dataset, self.indices = check_dataset('Subset', dataset), indices
end
function data.Subset:len() return #self.indices end
local function index_of(subset, i)
  return subset.indices[i + 1]
    or fail('Subset: index %s is out of range for %d entries', tostring(i), #subset.indices)
end
function data.Subset:get(i) return self.dataset:get(index_of(self, i)) end
function data.Subset:gather(list)
  local mapped = {}
  for k, i in ipairs(list) do mapped[k] = index_of(self, i) end
  return data.fetch(self.dataset, mapped)
end

-- Datasets one behind the other.
data.ConcatDataset = Dataset:extend 'ConcatDataset'
refuse_numbers(data.ConcatDataset, by_get)
function data.ConcatDataset:init(datasets)
  for _, dataset in ipairs(datasets) do check_dataset('ConcatDataset', dataset) end
  self.datasets = datasets
end
function data.ConcatDataset:len()
  local n = 0
  for _, dataset in ipairs(self.datasets) do n = n + length('ConcatDataset', dataset) end
  return n
end
function data.ConcatDataset:get(i)
  local at = i
  for _, dataset in ipairs(self.datasets) do
    local n = length('ConcatDataset', dataset)
    if at < n then return dataset:get(at) end
    at = at - n
  end
  return fail('ConcatDataset: index %d is out of range for %d entries', i, self:len())
end

-- A permutation of 0 .. n-1 as a table.
local function permutation(n, generator)
  return mf.randperm(n, { generator = generator }):tolist()
end

-- Whole lengths that sum to n, of fractions that sum to 1; what is left over goes to the first.
local function lengths_of_fractions(fractions, n)
  local lengths, left = {}, n
  for k, f in ipairs(fractions) do
    lengths[k] = math.floor(n * f)
    left = left - lengths[k]
  end
  for k = 0, left - 1 do
    local at = k % #lengths + 1
    lengths[at] = lengths[at] + 1
  end
  return lengths
end

-- Splits a dataset at random into parts of the given lengths, or of fractions that sum to 1, and
-- returns them: local train, test = data.random_split(set, { 0.8, 0.2 }).
function data.random_split(dataset, lengths, ...)
  local o = arguments('random_split', { 'generator' }, { generator = none }, ...)
  local n, sum = length('random_split', check_dataset('random_split', dataset)), 0
  for _, l in ipairs(lengths) do sum = sum + l end
  if math.abs(sum - 1) < 1e-6 then lengths = lengths_of_fractions(lengths, n)
  elseif sum ~= n then
    fail('random_split: the lengths sum to %g, the dataset has %d entries', sum, n)
  end
  local order, parts, at = permutation(n, o.generator), {}, 0
  for k, l in ipairs(lengths) do
    local indices = {}
    for i = 1, l do indices[i] = order[at + i] end
    parts[k] = data.Subset(dataset, indices)
    at = at + l
  end
  return unpack(parts)
end

-- The array of an idx file (plain or .gz), as the MNIST sets have them.
function data.load_idx(path) return mf._idx_load(path) end

-- -- Samplers -------------------------------------------------------------------------------------

local function list_iterator(list)
  local i = 0
  return function()
    i = i + 1
    return list[i]
  end
end

-- The number of entries of a dataset, or the number given in its place.
local function length_of(name, dataset)
  if type(dataset) == 'number' then return count(name, 'the number of entries', dataset) end
  return length(name, check_dataset(name, dataset))
end

-- What samplers extend: init, iter and len.
data.Sampler = Dataset:extend 'Sampler'
local Sampler = data.Sampler

-- All indices in order, of a dataset or of so many entries.
data.SequentialSampler = Sampler:extend 'SequentialSampler'
function data.SequentialSampler:init(dataset) self.n = length_of('SequentialSampler', dataset) end
function data.SequentialSampler:len() return self.n end
function data.SequentialSampler:iter()
  local i = -1
  return function()
    i = i + 1
    if i < self.n then return i end
  end
end

-- All entries in random order; with {replacement = true} num_samples draws.
data.RandomSampler = Sampler:extend 'RandomSampler'
function data.RandomSampler:init(dataset, ...)
  local o = arguments('RandomSampler', { 'replacement', 'num_samples' },
    { replacement = false, num_samples = options.number, generator = none }, ...)
  self.n, self.generator = length_of('RandomSampler', dataset), o.generator
  self.replacement, self.num_samples = o.replacement, o.num_samples or self.n
  if not o.replacement and self.num_samples > self.n then
    fail('RandomSampler: %d samples of %d entries need replacement', self.num_samples, self.n)
  end
end
function data.RandomSampler:len() return self.num_samples end
function data.RandomSampler:iter()
  local o = { generator = self.generator }
  if self.replacement then
    return list_iterator(mf.randint(0, self.n, { self.num_samples }, o):tolist())
  end
  local list = permutation(self.n, self.generator)
  for i = self.num_samples + 1, self.n do list[i] = nil end
  return list_iterator(list)
end

-- Draws by weight.
data.WeightedRandomSampler = Sampler:extend 'WeightedRandomSampler'
function data.WeightedRandomSampler:init(weights, num_samples, ...)
  local o = arguments('WeightedRandomSampler', { 'replacement' },
    { replacement = true, generator = none }, ...)
  self.weights = mf.is_tensor(weights) and weights or mf.tensor(weights)
  self.num_samples = count('WeightedRandomSampler', 'num_samples', num_samples, 1)
  self.options = { replacement = o.replacement, generator = o.generator }
end
function data.WeightedRandomSampler:len() return self.num_samples end
function data.WeightedRandomSampler:iter()
  return list_iterator(mf.multinomial(self.weights, self.num_samples, self.options):tolist())
end

-- The share of one of num_replicas ranks (this job's), in an order that depends on seed and epoch alone. The
-- last round is filled up with the first entries, or with {drop_last = true} left out.
data.DistributedSampler = Sampler:extend 'DistributedSampler'
function data.DistributedSampler:init(dataset, ...)
  local o = arguments('DistributedSampler', { 'num_replicas', 'rank' },
    { num_replicas = options.number, rank = options.number, shuffle = true, seed = 0, drop_last = false }, ...)
  o.num_replicas, o.rank = o.num_replicas or mf.world_size(), o.rank or mf.rank()
  count('DistributedSampler', 'num_replicas', o.num_replicas, 1)
  if o.rank < 0 or o.rank >= o.num_replicas then
    fail('DistributedSampler: rank %g is out of range for %g replicas', o.rank, o.num_replicas)
  end
  for key, value in pairs(o) do self[key] = value end
  self.n, self.epoch = length_of('DistributedSampler', dataset), 0
end
function data.DistributedSampler:set_epoch(epoch) self.epoch = epoch end
function data.DistributedSampler:len()
  return (self.drop_last and math.floor or math.ceil)(self.n / self.num_replicas)
end
function data.DistributedSampler:iter()
  local order, list = {}, {}
  if self.shuffle then
    order = permutation(self.n, mf.Generator():manual_seed(self.seed + self.epoch))
  else
    for i = 0, self.n - 1 do order[i + 1] = i end
  end
  for k = 0, self:len() - 1 do
    list[k + 1] = order[(k * self.num_replicas + self.rank) % self.n + 1]
  end
  return list_iterator(list)
end

-- Tables of batch_size indices; the last may be shorter, or is left out under drop_last.
data.BatchSampler = Sampler:extend 'BatchSampler'
function data.BatchSampler:init(sampler, batch_size, drop_last)
  self.sampler, self.drop_last = sampler, drop_last or false
  self.batch_size = count('BatchSampler', 'batch_size', batch_size, 1)
end
function data.BatchSampler:len()
  local n = length('BatchSampler', self.sampler)
  return (self.drop_last and math.floor or math.ceil)(n / self.batch_size)
end
function data.BatchSampler:iter()
  local next_index = self.sampler:iter()
  return function()
    local batch = {}
    while #batch < self.batch_size do
      local i = next_index()
      if i == nil then break end
      batch[#batch + 1] = i
    end
    if #batch == self.batch_size or (#batch > 0 and not self.drop_last) then return batch end
  end
end

-- -- Batches --------------------------------------------------------------------------------------

-- What stands at a key of all entries.
local function column(entries, key, path)
  local list = {}
  for k, entry in ipairs(entries) do
    list[k] = entry[key]
    if list[k] == nil then fail('collate: entry %d of the batch has no %s', k - 1, path) end
  end
  return list
end

-- The values at one place of all entries as one value: tensors are stacked; numbers and booleans
-- become a tensor, whole numbers an int64 one; strings stay a table; tables go by field.
local function stack(list, path)
  local first = list[1]
  local kind = mf.is_tensor(first) and 'tensor' or type(first)
  if kind == 'tensor' then return mf.stack(list) end
  if kind == 'boolean' then return mf.tensor(list) end
  if kind == 'string' then return list end
  if kind == 'number' then
    local whole = true
    for _, v in ipairs(list) do whole = whole and v == math.floor(v) and math.abs(v) < 2 ^ 63 end
    return mf.tensor(list, { dtype = whole and mf.int64 or mf.float32 })
  end
  if kind ~= 'table' then fail('collate: there is no batch of values like %s, a %s', path, kind) end
  for k, entry in ipairs(list) do
    if type(entry) ~= 'table' or #entry ~= #first then
      local n = type(entry) == 'table' and ('a table of length %d'):format(#entry)
      fail('collate: %s of entry %d is %s, of entry 0 a table of length %d', path, k - 1,
        n or options.describe(entry), #first)
    end
  end
  local out = {}
  for key in pairs(first) do
    local name = path .. '.' .. tostring(key)
    out[key] = stack(column(list, key, name), name)
  end
  return out
end

-- A list of entries, each a table of an entry's values, as the values of the batch.
function data.default_collate(entries)
  if #entries == 0 then fail 'collate: the batch has no entries' end
  local out = {}
  for k, entry in ipairs(entries) do
    if #entry ~= #entries[1] then
      fail('collate: entry %d of the batch has %d values, entry 0 has %d', k - 1, #entry, #entries[1])
    end
  end
  for k = 1, #entries[1] do
    local name = 'value ' .. k
    out[k] = stack(column(entries, k, name), name)
  end
  return unpack(out)
end

-- The values of the batch of these indices.
function data.fetch(dataset, indices, collate)
  if dataset.gather and not collate then return dataset:gather(indices) end
  local entries = {}
  for k, i in ipairs(indices) do
    entries[k] = { dataset:get(i) }
    if entries[k][1] == nil and not collate then
      fail('DataLoader: %s:get(%s) returned nothing', dataset._name or 'the dataset', tostring(i))
    end
  end
  return (collate or data.default_collate)(entries)
end

local function not_nil(indices, ...)
  if (...) == nil then
    fail('DataLoader: the batch that begins with index %s is nil, which would end the loop',
      tostring(indices[1]))
  end
  return ...
end

-- The same for the loop over a loader, or for a worker's job, which has the same fields.
function data.batch(loader, indices)
  return not_nil(indices, data.fetch(loader.dataset, indices, loader.collate))
end

-- -- The loader -----------------------------------------------------------------------------------

local Loader = { _name = 'DataLoader' }
refuse_numbers(Loader, 'a pass over it is `for x, y in loader() do`, the number of batches :len()')
data._Loader = Loader -- for the documentation

local loader_defaults = { batch_size = 1, shuffle = false, sampler = none, batch_sampler = none,
  drop_last = false, num_workers = 0, prefetch_factor = 2, collate_fn = options['function'],
  generator = none, seed = options.number }

-- for x, y in loader() do ... end. Options: batch_size, shuffle, drop_last; sampler, batch_sampler
-- in their place; collate_fn, a function like default_collate; num_workers, threads with Lua states
-- of their own, each prefetch_factor batches ahead; generator, or the seed of a new one, for the
-- order. The batches come in the order of the sampler.
function data.DataLoader(dataset, o)
  o = options('DataLoader', o, loader_defaults)
  check_dataset('DataLoader', dataset)
  count('DataLoader', 'batch_size', o.batch_size, 1)
  count('DataLoader', 'num_workers', o.num_workers)
  count('DataLoader', 'prefetch_factor', o.prefetch_factor, 1)
  if o.sampler and o.shuffle then fail 'DataLoader: sampler and shuffle exclude each other' end
  if o.batch_sampler and (o.sampler or o.shuffle or o.drop_last) then
    fail 'DataLoader: batch_sampler excludes sampler, shuffle and drop_last'
  end
  local generator = o.generator or o.seed and mf.Generator():manual_seed(o.seed)
  local sampler = o.sampler or o.shuffle and data.RandomSampler(dataset, { generator = generator })
    or data.SequentialSampler(dataset)
  return setmetatable({ dataset = dataset, collate = o.collate_fn, num_workers = o.num_workers,
    prefetch = o.prefetch_factor, generator = generator,
    batches = o.batch_sampler or data.BatchSampler(sampler, o.batch_size, o.drop_last) }, Loader)
end

-- The number of batches.
function Loader:len() return length('DataLoader', self.batches) end
options.methods(Loader, 'loader')

-- A pass over the data: a function that returns the values of the next batch.
function Loader:__call(...)
  if select('#', ...) > 0 then fail 'DataLoader: call it, as in `for x, y in loader() do`' end
  local next_batch = self.batches:iter()
  if self.num_workers > 0 then return require 'moonflow.worker'.iterate(self, next_batch) end
  return function()
    local indices = next_batch()
    if indices then return data.batch(self, indices) end
  end
end

return data
