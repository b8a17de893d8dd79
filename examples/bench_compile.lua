-- What the first call of a compiled step costs beside running it: tracing, passes, plan. Time per op for
-- programs of 1,000 ops and more: a chain, a fan (many branches, added up), products of random earlier values,
-- and training steps of a convolutional network and of a transformer with many small layers.
--
--   moonflow examples/bench_compile.lua [--only NAME,...] [--sizes N,...]
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local o = mf.cli(arg, 'Measures what compiling costs.', {
  { 'only', '', 'programs, separated by commas' },
  { 'sizes', '1000,10000,50000', 'ops that the function calls, about' },
  { 'rounds', 5, 'of which the best counts; sizes from 20,000 on: a third of them' },
})
mf.set_num_threads(1)
local models = dofile((arg[0]:match '^(.*/)' or '') .. 'models.lua')
local programs, order = {}, {}
local function program(name, make)
  programs[name] = make
  order[#order + 1] = name
end

program('chain', function(n)
  local w = mf.eye(4)
  return function(x)
    for _ = 1, n / 2 do x = (x * 1.001):matmul(w) end
    return x
  end, { mf.randn(4, 4) }
end)

program('fan', function(n)
  local w = mf.eye(4)
  return function(x)
    local sum
    for k = 1, n / 3 do
      local y = (x * k):matmul(w)
      sum = sum and sum + y or y
    end
    return sum
  end, { mf.randn(4, 4) }
end)

program('random', function(n)
  return function(x)
    local values, r = { x }, 12345
    for k = 1, n do
      r = (r * 1103515245 + 12345) % 2147483648
      local a, b = values[math.max(1, #values - math.floor(r / 65536) % 100)], values[#values]
      values[#values + 1] = k % 3 == 0 and a:matmul(b) or k % 3 == 1 and (a + b):softmax(0) or a + b
    end
    return values[#values]
  end, { mf.randn(8, 8) }
end)

local function training(opt, loss_of)
  return function(...)
    opt:zero_grad()
    local loss = loss_of(...)
    loss:backward()
    opt:step()
    return loss
  end
end

program('convolutions', function(n)
  local model = nn.Sequential()
  for _ = 1, math.max(1, n / 30) do
    model:append(nn.Conv2d(4, 4, 3, { padding = 1, bias = false })):append(nn.BatchNorm2d(4)):append(nn.ReLU())
  end
  local opt = optim.SGD(model:parameters(), { lr = 1e-3, momentum = 0.9 })
  return training(opt, function(x) return model(x):mean() end), { mf.randn(2, 4, 4, 4) }
end)

program('transformer', function(n)
  local model = models.Transformer(100, 8, 16, 1, math.max(1, math.floor(n / 110)), true)
  local opt = optim.AdamW(model:parameters(), { lr = 1e-3 })
  return training(opt, function(x, y) return mf.cross_entropy(model(x):flatten(0, 1), y) end),
    { mf.randint(0, 100, { 2, 8 }), mf.randint(0, 100, { 16 }) }
end)

-- Seconds that the first call takes, and a later one at best; how many lines the graph has in the end.
local function measure(f, args)
  local step, later = mf.compile(f), math.huge
  collectgarbage()
  local begin = mf.time()
  step(unpack(args))
  local first = mf.time() - begin
  for _ = 1, 3 do
    begin = mf.time()
    step(unpack(args))
    later = math.min(later, mf.time() - begin)
  end
  local _, nodes = tostring(step):gsub('\n', '')
  return first, later, nodes
end

local chosen = {}
for name in o.only:gmatch '[^,]+' do
  if not programs[name] then error('there is no program ' .. name, 0) end
  chosen[name] = true
end
for _, name in ipairs(order) do
  local least
  for size in (o.only == '' or chosen[name]) and o.sizes:gmatch '%d+' or function() end do
    local n, first, later, nodes = tonumber(size), math.huge, math.huge, nil
    local f, args = programs[name](n)
    for _ = 1, math.ceil(n < 20000 and o.rounds or o.rounds / 3) do
      local a, b
      a, b, nodes = measure(f, args)
      first, later = math.min(first, a), math.min(later, b)
    end
    local best = first - later
    least = least or best / n
    print(('%-13s %6d ops, %6d nodes at the end: %8.2f ms, %6.2f us an op, %.2f times that of the first size')
      :format(name, n, nodes, best * 1e3, best / n * 1e6, best / n / least))
  end
end
