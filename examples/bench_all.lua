-- What `make bench` runs: every workload of bench.lua and, where the environment's PEER_PYTHON
-- names a Python with PyTorch, of peer.py, in turn on the same machine; prints ratios beside the
-- machine's own GEMM rate and memory bandwidth. Our steps run eagerly and compiled.
--
--   [PEER_PYTHON=python3] [BENCH_CONV=program] moonflow examples/bench_all.lua [--only NAME,...]
--     [--steps N] [--threads N]
--
-- Where BENCH_CONV names the program that is made of bench_conv.c, a compiled step of resnet50 is
-- compared with the sum of its convolutions alone, timed before and after it.
local mf = require 'moonflow'

local o = mf.cli(arg, 'Measures all workloads, beside PyTorch when PEER_PYTHON is set.', {
  { 'only', '', 'workloads, separated by commas' },
  { 'steps', 10, 'timed steps of each' },
  { 'threads', 2, 'threads' },
})
local here = arg[0]:match '^(.*)/[^/]*$' or '.'
local program, python = arg[-1] or 'moonflow', os.getenv 'PEER_PYTHON'

local function read(command)
  local pipe = io.popen(command)
  local text = pipe:read '*a'
  pipe:close()
  return text:match '{.*}'
end

local function number(text, key) return text and tonumber(text:match('"' .. key .. '": ([%d%.e%-]+)')) end

local function ours(name, flags)
  return read(('%s %s/bench.lua %s --steps %d --threads %d %s'):format(program, here, name, o.steps, o.threads, flags))
end

local function theirs(name, flags)
  if not python or python == '' then return nil end
  return read(('%s %s/peer.py torch %s --steps %d --threads %d %s 2>/dev/null'):format(python, here, name, o.steps,
    o.threads, flags))
end

-- Best of several times of f, in seconds.
local function best(f)
  local least = math.huge
  for _ = 1, 5 do
    local t = mf.time()
    f()
    least = math.min(least, mf.time() - t)
  end
  return least
end

local function machine()
  mf.set_num_threads(o.threads)
  local n = 2048
  local a, b = mf.randn(n, n), mf.randn(n, n)
  local gemm = best(function() mf.matmul(a, b) end)
  local x = mf.zeros(64 * 1024 * 1024)
  local y = mf.zeros(64 * 1024 * 1024)
  local copy = best(function() y:copy_(x) end)
  print(('machine: GEMM %.0f GFLOP/s (%d x %d float32), memory %.1f GB/s (copy of 256 MB), %d threads'):format(
    2 * n ^ 3 / gemm / 1e9, n, n, 2 * x:numel() * 4 / copy / 1e9, o.threads))
end

local function dispatch()
  local mine, peer = ours('dispatch', ''), theirs('dispatch', '')
  for _, key in ipairs { 'add_us', 'mul_scalar_us', 'add__us', 'view_us', 'matmul4_us', 'add_grad_us',
    'mul_sum_backward_us' } do
    local a, b = number(mine, key), number(peer, key)
    print(('%-10s %-22s %10.3f us %s'):format('dispatch', key, a or 0 / 0,
      b and ('%10.3f us  %5.2fx'):format(b, b / a) or ''))
  end
end

-- The convolutions of resnet50 as lines for bench_conv: those that its modules are called with.
local function convolutions(batch)
  local models = dofile(here .. '/models.lua')
  local model, times, order = models.ResNet50(10, 64, { 3, 4, 6, 3 }):eval(), {}, {}
  for _, m in model:named_modules() do
    if getmetatable(m) == mf.nn.Conv2d._meta then
      m:register_forward_pre_hook(function(_, x)
        local w, s = m.weight.shape, m.options
        local line = ('%d %d %d %d %d %d %d %d %d %d'):format(batch, w[2], x.shape[3], x.shape[4], w[1], w[3], w[4],
          s.stride[1], s.padding[1], w[2] > 3 and 1 or 0)
        if not times[line] then order[#order + 1] = line end
        times[line] = (times[line] or 0) + 1
      end)
    end
  end
  mf.no_grad(function() model(mf.zeros(1, 3, 224, 224)) end)
  for k, line in ipairs(order) do order[k] = line .. ' ' .. times[line] end
  return table.concat(order, '\n')
end

-- Seconds that these take alone, in a step; nil without the program.
local function alone()
  local conv = os.getenv 'BENCH_CONV'
  if not conv or conv == '' then return nil end
  local path = os.tmpname()
  local f = assert(io.open(path, 'w'))
  f:write(convolutions(16), '\n')
  f:close()
  local text = read(('%s %d < %s'):format(conv, o.threads, path))
  os.remove(path)
  return number(text, 'step_s')
end

-- The faster of both memory formats, for ours and for the peer's.
local function better(run, name)
  local plain = run(name, '')
  if name ~= 'resnet50' and name ~= 'cnn' then return plain end
  local last = run(name, '--channels-last')
  local a, b = number(plain, 'step_s'), number(last, 'step_s')
  return (b and (not a or b < a)) and last or plain
end

local function in_mode(mode)
  return function(name, flags) return ours(name, '--mode ' .. mode .. ' ' .. flags) end
end

local function workload(name)
  local bound = name == 'resnet50' and alone()
  local eager, graph, peer = better(in_mode 'eager', name), better(in_mode 'graph', name), better(theirs, name)
  local e, g, p = number(eager, 'step_s'), number(graph, 'step_s'), number(peer, 'step_s')
  local text = ('%-10s'):format(name)
  for _, run in ipairs { { 'eager', eager }, { 'graph', graph } } do
    local time = number(run[2], 'step_s')
    text = text .. (time and ('  %s %9.2f ms %6.0f MiB'):format(run[1], time * 1e3, number(run[2], 'peak_mib'))
      or ('  %s failed'):format(run[1]))
  end
  if e and g then text = text .. ('  %5.2fx'):format(e / g) end
  if p then
    local least = math.min(e or math.huge, g or math.huge)
    text = text .. ('   torch %9.2f ms %6.0f MiB  %5.2fx'):format(p * 1e3, number(peer, 'peak_mib'), p / least)
  end
  print(text)
  if bound and g then
    bound = math.min(bound, alone())
    print(('%-10s  its convolutions alone %9.2f ms; a compiled step takes %.2f times that'):format('', bound * 1e3,
      g / bound))
  end
end

local names = { 'dispatch', 'chain', 'mlp', 'cnn', 'widedeep', 'gpt-mini', 'gpt2', 'bert', 'resnet50' }
for name in o.only:gmatch '[^,]+' do
  if not (',' .. table.concat(names, ',') .. ','):find(',' .. name .. ',', 1, true) then
    io.stderr:write(("--only: there is no workload '%s'; there are %s\n"):format(name, table.concat(names, ', ')))
    os.exit(2, true)
  end
end
machine()
for _, name in ipairs(names) do
  if o.only == '' or (',' .. o.only .. ','):find(',' .. name .. ',', 1, true) then
    if name == 'dispatch' then dispatch()
    elseif name == 'chain' then
      io.stdout:flush()
      os.execute(('%s %s/bench_chain.lua --threads %d'):format(program, here, o.threads))
    else workload(name) end
    io.stdout:flush()
  end
end
