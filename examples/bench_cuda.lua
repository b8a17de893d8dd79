-- Kernels of a cuda device, timed: products against the peak that is given, and kernels that memory bounds
-- against the rate of a copy on the same device.
--
--   moonflow examples/bench_cuda.lua [--device cuda] [--mib 256] [--peak TFLOPS] [--seconds 0.2]
--
-- A line a kernel: microseconds, and GB/s or TFLOP/s, and what part that is. Bytes are those that each kernel says
-- it moves: its operands once.
local mf = require 'moonflow'

local a = mf.cli(arg, 'Times the kernels of a cuda device.', {
  { 'device', 'cuda', 'which one' },
  { 'mib', 256, 'bytes of a tensor of float32' },
  { 'peak', 989, 'TFLOP/s of bfloat16 products that the device can do' },
  { 'seconds', 0.2, 'for each kernel' },
})

local function there(t) return t:to(a.device) end

-- Seconds a call of f, whose result is waited for by one element of a tensor.
local function time(f, probe)
  local function wait() return probe:item() end
  for _ = 1, 2 do f() end
  wait()
  local n, best = 1, math.huge
  repeat
    local t = mf.time()
    for _ = 1, n do f() end
    wait()
    t = mf.time() - t
    best = math.min(best, t / n)
    n = n * 2
  until t > a.seconds or n > 4096
  return best
end

local function main()
  local n = math.floor(a.mib * 2 ^ 20 / 4)
  local width = 1024
  local rows = math.max(1, math.floor(n / width))
  local probe = there(mf.ones(1))
  local x, y = there(mf.randn(rows, width)), there(mf.randn(rows, width))
  local h = x:to(mf.bfloat16)
  local w, b = there(mf.randn(width)), there(mf.randn(width))
  local size, half = rows * width * 4, rows * width * 2
  local copy
  local function bounded(name, bytes, f)
    local t = time(f, probe)
    local rate = bytes / t / 1e9
    copy = copy or rate
    print(('%-28s %10.1f us %9.1f GB/s %4.0f%% of a copy'):format(name, t * 1e6, rate, 100 * rate / copy))
  end
  bounded('copy', 2 * size, function() y:copy_(x) end)
  bounded('fill', size, function() y:fill_(1) end)
  bounded('add', 3 * size, function() return x + y end)
  bounded('add bfloat16', 3 * half, function() return h + h end)
  bounded('gelu', 2 * size, function() return mf.gelu(x) end)
  bounded('gelu bfloat16', 2 * half, function() return mf.gelu(h) end)
  bounded('cast to bfloat16', size + half, function() return x:to(mf.bfloat16) end)
  bounded('sum', size, function() return x:sum() end)
  bounded('sum of rows', size, function() return x:sum(1) end)
  bounded('sum of columns', size, function() return x:sum(0) end)
  bounded('softmax', 2 * size, function() return x:softmax(1) end)
  bounded('layer_norm', 2 * size, function() return mf.layer_norm(x, { width }, w, b) end)
  bounded('layer_norm bfloat16', 2 * half, function()
    return mf.layer_norm(h, { width }, w:to(mf.bfloat16), b:to(mf.bfloat16))
  end)
  bounded('dropout', 2 * size, function() return mf.dropout(x, 0.1, true) end)
  bounded('transpose', 2 * size, function() return x:t():contiguous() end)
  local image = x:reshape(-1, 64, 16, 16)
  bounded('batch_norm', 3 * size, function() return mf._batch_norm(image, nil, nil, nil, nil, true) end)
  bounded('max_pool2d', size * 1.25, function() return mf.max_pool2d(image, 2) end)
  local ids = there(mf.randint(0, rows, { rows }))
  bounded('index_select', 2 * size, function() return mf.index_select(x, 0, ids) end)
  bounded('cross_entropy', size, function() return mf.cross_entropy(x, ids:remainder(width)) end)

  for _, side in ipairs { 1024, 4096, 8192 } do
    if side * side * 2 * 3 < 4 * a.mib * 2 ^ 20 then
      local p, q = there(mf.randn(side, side)):to(mf.bfloat16), there(mf.randn(side, side)):to(mf.bfloat16)
      local t = time(function() return p:matmul(q) end, probe)
      local rate = 2 * side ^ 3 / t / 1e12
      print(('%-28s %10.1f us %9.1f TFLOP/s %3.0f%% of the peak'):format('matmul bfloat16 ' .. side, t * 1e6, rate,
        100 * rate / a.peak))
    end
  end
end

mf.no_grad(main)
