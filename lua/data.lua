-- Datasets, samplers and the loader. Indices count from 0.
--
-- A dataset is a table with :get(i) and :len(). A sampler is a table with :iter(), which gives a function that returns the next index, and :len().
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local none = options.none
local data = {}

-- -- Datasets --------------------------------------------------------------------------------------------------------------------

local Dataset = {}
data.Dataset = Dataset

-- A class of datasets; its instances run init when made.
function Dataset:extend(name)
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
function Dataset:get() error((self._name or 'Dataset') .. ': has no get', 2) end
function Dataset:len() error((self._name or 'Dataset') .. ': has no len', 2) end

-- Tensors of one first size: entry i is row i of each.
data.TensorDataset = Dataset:extend 'TensorDataset'
function data.TensorDataset:init(...)
  self.tensors = { ... }
  if #self.tensors == 0 then error('TensorDataset: needs a tensor', 3) end
  for k, t in ipairs(self.tensors) do
    if not mf.is_tensor(t) or t.ndim == 0 then error(('TensorDataset: argument %d must be a tensor of at least one dim'):format(k), 3) end
    if t:size(0) ~= self.tensors[1]:size(0) then
      error(('TensorDataset: argument %d has %d rows, the first has %d'):format(k, t:size(0), self.tensors[1]:size(0)), 3)
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

-- The entries `indices` (a table) of a dataset.
data.Subset = Dataset:extend 'Subset'
function data.Subset:init(dataset, indices)
  self.dataset, self.indices = dataset, indices
  if dataset.gather then
    self.gather = function(_, list)
      local mapped = {}
      for k, i in ipairs(list) do mapped[k] = indices[i + 1] end
      return dataset:gather(mapped)
    end
  end
end
function data.Subset:len() return #self.indices end
function data.Subset:get(i) return self.dataset:get(self.indices[i + 1]) end

-- Datasets one behind the other.
data.ConcatDataset = Dataset:extend 'ConcatDataset'
function data.ConcatDataset:init(datasets) self.datasets = datasets end
function data.ConcatDataset:len()
  local n = 0
  for _, d in ipairs(self.datasets) do n = n + d:len() end
  return n
end
function data.ConcatDataset:get(i)
  for _, d in ipairs(self.datasets) do
    if i < d:len() then return d:get(i) end
    i = i - d:len()
  end
  error('ConcatDataset: index out of range', 2)
end

-- A permutation of 0 .. n-1 as a table.
local function permutation(n, generator)
  return mf.randperm(n, { generator = generator }):tolist()
end

-- Splits a dataset into parts of the given lengths, or fractions that sum to 1.
function data.random_split(dataset, lengths, o)
  o = options('random_split', o, { generator = none })
  local n, sum, whole = dataset:len(), 0, {}
  for _, l in ipairs(lengths) do sum = sum + l end
  if math.abs(sum - 1) < 1e-6 and sum <= n then
    local total = 0
    for k, l in ipairs(lengths) do
      whole[k] = math.floor(n * l)
      total = total + whole[k]
    end
    for k = 1, n - total do whole[(k - 1) % #whole + 1] = whole[(k - 1) % #whole + 1] + 1 end
  else
    if sum ~= n then error(('random_split: lengths sum to %g, the dataset has %d entries'):format(sum, n), 2) end
    whole = lengths
  end
  local order, parts, at = permutation(n, o.generator), {}, 0
  for k, l in ipairs(whole) do
    local indices = {}
    for i = 1, l do indices[i] = order[at + i] end
    parts[k] = data.Subset(dataset, indices)
    at = at + l
  end
  return unpack(parts)
end

-- The array of an idx file (plain or .gz), as the MNIST sets have them.
function data.load_idx(path) return mf._idx_load(path) end

-- -- Samplers --------------------------------------------------------------------------------------------------------------------

local function list_iterator(list)
  local i = 0
  return function()
    i = i + 1
    return list[i]
  end
end

local Sampler = Dataset:extend 'Sampler'
data.Sampler = Sampler

data.SequentialSampler = Sampler:extend 'SequentialSampler'
function data.SequentialSampler:init(dataset) self.n = type(dataset) == 'number' and dataset or dataset:len() end
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
function data.RandomSampler:init(dataset, o)
  o = options('RandomSampler', o, { replacement = false, num_samples = none, generator = none })
  self.n = type(dataset) == 'number' and dataset or dataset:len()
  self.replacement, self.num_samples, self.generator = o.replacement, o.num_samples or self.n, o.generator
end
function data.RandomSampler:len() return self.num_samples end
function data.RandomSampler:iter()
  if self.replacement then
    return list_iterator(mf.randint(0, self.n, { self.num_samples }, { generator = self.generator }):tolist())
  end
  local list = permutation(self.n, self.generator)
  for i = self.num_samples + 1, #list do list[i] = nil end
  return list_iterator(list)
end

-- Draws by weight.
data.WeightedRandomSampler = Sampler:extend 'WeightedRandomSampler'
function data.WeightedRandomSampler:init(weights, num_samples, o)
  o = options('WeightedRandomSampler', o, { replacement = true, generator = none })
  self.weights = mf.is_tensor(weights) and weights or mf.tensor(weights)
  self.num_samples, self.replacement, self.generator = num_samples, o.replacement, o.generator
end
function data.WeightedRandomSampler:len() return self.num_samples end
function data.WeightedRandomSampler:iter()
  return list_iterator(mf.multinomial(self.weights, self.num_samples, { replacement = self.replacement, generator = self.generator }):tolist())
end

-- The share of one of `num_replicas` ranks, in an order that depends on seed and epoch alone.
data.DistributedSampler = Sampler:extend 'DistributedSampler'
function data.DistributedSampler:init(dataset, o)
  o = options('DistributedSampler', o, { num_replicas = 1, rank = 0, shuffle = true, seed = 0, drop_last = false })
  for key, value in pairs(o) do self[key] = value end
  self.n, self.epoch = type(dataset) == 'number' and dataset or dataset:len(), 0
end
function data.DistributedSampler:set_epoch(epoch) self.epoch = epoch end
function data.DistributedSampler:len()
  return self.drop_last and math.floor(self.n / self.num_replicas) or math.ceil(self.n / self.num_replicas)
end
function data.DistributedSampler:iter()
  local order = {}
  if self.shuffle then order = permutation(self.n, mf.Generator():manual_seed(self.seed + self.epoch))
  else for i = 0, self.n - 1 do order[i + 1] = i end end
  local list = {}
  for k = 0, self:len() - 1 do list[k + 1] = order[(k * self.num_replicas + self.rank) % self.n + 1] end
  return list_iterator(list)
end

-- Tables of up to batch_size indices.
data.BatchSampler = Sampler:extend 'BatchSampler'
function data.BatchSampler:init(sampler, batch_size, drop_last)
  self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last or false
end
function data.BatchSampler:len()
  local n = self.sampler:len() / self.batch_size
  return self.drop_last and math.floor(n) or math.ceil(n)
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

-- -- The loader -------------------------------------------------------------------------------------------------------------------

-- Entries of one place in a batch as one value: tensors are stacked, numbers become a tensor, strings stay a table, tables go by field.
local function stack(list, path)
  local first = list[1]
  if mf.is_tensor(first) then return mf.stack(list) end
  if type(first) == 'number' then
    for _, v in ipairs(list) do
      if v ~= math.floor(v) then return mf.tensor(list) end
    end
    return mf.tensor(list, { dtype = mf.int64 })
  end
  if type(first) == 'boolean' then return mf.tensor(list) end
  if type(first) == 'table' then
    local out = {}
    for key in pairs(first) do
      local field = {}
      for k, entry in ipairs(list) do field[k] = entry[key] end
      out[key] = stack(field, path .. '.' .. tostring(key))
    end
    return out
  end
  if type(first) == 'string' then return list end
  error(('collate: cannot batch a %s (%s)'):format(type(first), path), 0)
end

-- A list of entries, each a table of an entry's values, as the values of the batch.
function data.default_collate(entries)
  local out = {}
  for k = 1, #entries[1] do
    local list = {}
    for i, entry in ipairs(entries) do list[i] = entry[k] end
    out[k] = stack(list, 'value ' .. k)
  end
  return unpack(out)
end

-- The values of one batch of indices; what a worker runs as well.
function data.fetch(dataset, indices, collate)
  if dataset.gather and not collate then return dataset:gather(indices) end
  local entries = {}
  for k, i in ipairs(indices) do entries[k] = { dataset:get(i) } end
  return (collate or data.default_collate)(entries)
end

-- for x, y in loader() do ... end. Options: batch_size, shuffle, sampler, batch_sampler, drop_last, num_workers, prefetch (batches a worker
-- is ahead), collate, generator. Workers are threads with Lua states of their own; batches come in the order of the sampler.
local Loader = {}
Loader.__index = Loader

function data.DataLoader(dataset, o)
  o = options('DataLoader', o, { batch_size = 1, shuffle = false, sampler = none, batch_sampler = none, drop_last = false, num_workers = 0,
    prefetch = 2, collate = none, generator = none })
  if type(dataset) ~= 'table' or not dataset.get then error('DataLoader: the dataset needs :get(i) and :len()', 2) end
  if o.batch_size < 1 or o.batch_size ~= math.floor(o.batch_size) then
    error('DataLoader: batch_size must be a positive whole number, is ' .. tostring(o.batch_size), 2)
  end
  if o.sampler and o.shuffle then error('DataLoader: sampler and shuffle exclude each other', 2) end
  if o.batch_sampler and (o.sampler or o.shuffle or o.drop_last) then
    error('DataLoader: batch_sampler excludes sampler, shuffle and drop_last', 2)
  end
  local sampler = o.sampler or (o.shuffle and data.RandomSampler(dataset, { generator = o.generator }) or data.SequentialSampler(dataset))
  return setmetatable({ dataset = dataset, collate = o.collate, num_workers = o.num_workers, prefetch = o.prefetch,
    batches = o.batch_sampler or data.BatchSampler(sampler, o.batch_size, o.drop_last) }, Loader)
end

-- The number of batches.
function Loader:len() return self.batches:len() end

-- A pass over the data: a function that returns the values of the next batch.
function Loader:__call()
  local next_batch = self.batches:iter()
  if self.num_workers > 0 then return require 'moonflow.worker'.iterate(self, next_batch) end
  return function()
    local indices = next_batch()
    if indices then return data.fetch(self.dataset, indices, self.collate) end
  end
end

return data
