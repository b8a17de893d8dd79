-- A training step over a loader whose entries take time to decode: as a plain loop that calls the step, and
-- as step:over(loader), with and without workers; and how long decoding and steps take by themselves. The
-- decoding waits as a disk does (--wait) or works in Lua (--work). --trace writes a Chrome trace of one epoch.
--
--   moonflow examples/bench_over.lua [--threads N] [--batches N] [--wait MS] [--work MS] [--trace FILE]
local mf = require 'moonflow'
local nn, data = mf.nn, mf.data

local o = mf.cli(arg, 'Measures a step over a loader.', {
  { 'threads', 1, 'threads of kernels' }, { 'batches', 40, 'batches an epoch' }, { 'batch', 64, 'images a batch' },
  { 'wait', 0, 'milliseconds that a batch waits' }, { 'work', 8, 'milliseconds of Lua that a batch takes' },
  { 'trace', '', 'where to write a trace' }, { 'rounds', 5, 'timed epochs of each, in turn' },
})
mf.set_num_threads(o.threads)

local Images = data.Dataset:extend 'Images'
function Images:init(options) self.o = options end
function Images:len() return self.o.batches * self.o.batch end
function Images:gather(indices)
  local m = require 'moonflow'
  local until_ = m.time() + self.o.work / 1e3
  if self.o.wait > 0 then
    require 'ffi'.cdef 'int usleep(unsigned);'
    require 'ffi'.C.usleep(self.o.wait * 1e3)
  end
  while m.time() < until_ do end
  return m.full({ #indices, 1, 28, 28 }, indices[1] % 7), m.zeros(#indices, { dtype = m.int64 })
end

local model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(),
  nn.Linear(16 * 24 * 24, 10))
local opt = mf.optim.SGD(model:parameters(), { lr = 0.001 })
local step = mf.compile(function(x, y)
  opt:zero_grad()
  local loss = mf.cross_entropy(model(x), y)
  loss:backward()
  opt:step()
  return loss
end)

local function loader(workers)
  return data.DataLoader(Images { batches = o.batches, batch = o.batch, wait = o.wait, work = o.work },
    { batch_size = o.batch, num_workers = workers })
end
local x, y = mf.randn(o.batch, 1, 28, 28), mf.zeros(o.batch, { dtype = mf.int64 })
local last
local ways = {
  { 'steps alone', function() for _ = 1, o.batches do last = step(x, y) end end },
  { 'decoding alone', function() for a in loader(0)() do last = a end end },
  { 'loop, no worker', function() for a, b in loader(0)() do last = step(a, b) end end },
  { 'over, no worker', function() for loss in step:over(loader(0)) do last = loss end end },
  { 'loop, 1 worker', function() for a, b in loader(1)() do last = step(a, b) end end },
  { 'over, 1 worker', function() for loss in step:over(loader(1)) do last = loss end end },
}
local best = {}
step(x, y)
for _ = 1, o.rounds do
  for k, way in ipairs(ways) do
    local begin = mf.time()
    way[2]()
    last:sum():item()
    best[k] = math.min(best[k] or math.huge, mf.time() - begin)
  end
end
for k, way in ipairs(ways) do print(('%-16s %8.2f ms a batch'):format(way[1], best[k] / o.batches * 1e3)) end
if o.trace ~= '' then mf.profile(ways[6][2]):save_trace(o.trace) end
