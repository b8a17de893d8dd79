-- 100 chained pointwise ops on 1 MB of float32: compiled, eagerly, as one loop of C with the same
-- arithmetic (compiled here by cc), and, where the environment's PEER_PYTHON names a Python with
-- PyTorch, there.
--
--   [PEER_PYTHON=python3] moonflow examples/bench_chain.lua [--threads N] [--ops N] [--elements N]
local mf = require 'moonflow'
local ffi = require 'ffi'

local o = mf.cli(arg, 'Measures a chain of pointwise ops.', {
  { 'threads', 2, 'threads' }, { 'ops', 100, 'ops in the chain' }, { 'elements', 262144, 'float32 numbers' },
  { 'runs', 41, 'timed runs of each, in turn' },
})
mf.set_num_threads(o.threads)

-- Every op is one step of x; c differs from step to step.
local kinds = {
  { c = 'x * %.3ff', py = 'x * %.3f', f = function(x, _, c) return x * c end },
  { c = 'x + y', py = 'x + y', f = function(x, y) return x + y end },
  { c = 'x < 0 ? 0 : x', py = 'torch.relu(x)', f = function(x) return x:relu() end },
  { c = 'x - %.3ff', py = 'x - %.3f', f = function(x, _, c) return x - c end },
  { c = 'fabsf(x)', py = 'torch.abs(x)', f = function(x) return x:abs() end },
}
local function step(k) return kinds[(k - 1) % #kinds + 1], 0.9 + k / 1000 end

local function chain(x, y)
  for k = 1, o.ops do
    local kind, c = step(k)
    x = kind.f(x, y, c)
  end
  return x
end

local function lines(key, format)
  local list = {}
  for k = 1, o.ops do
    local kind, c = step(k)
    list[k] = format:format(kind[key]:find '%%' and kind[key]:format(c) or kind[key])
  end
  return table.concat(list, '\n')
end

-- The loop, on the same numbers.
local function loop(x, y)
  local name = os.tmpname()
  local f = assert(io.open(name .. '.c', 'w'))
  f:write(([[
#include <math.h>
void chain(long n, const float *restrict x_, const float *restrict y_, float *restrict out) {
#pragma omp parallel for simd num_threads(%d)
  for (long i = 0; i < n; i++) {
    float x = x_[i], y = y_[i];
%s
    out[i] = x;
  }
}
]]):format(o.threads, lines('c', '    x = %s;')))
  f:close()
  local built = os.execute(('cc -O3 -march=native -fopenmp -shared -fPIC -o %s.so %s.c'):format(name, name)) == 0
  if not built then return nil end
  ffi.cdef 'void chain(long n, const float *x, const float *y, float *out);'
  local library = ffi.load(name .. '.so')
  for _, suffix in ipairs { '', '.c', '.so' } do os.remove(name .. suffix) end
  local function array(t)
    local list = t:tolist()
    return ffi.new('float[?]', #list, list)
  end
  local a, b, out = array(x), array(y), ffi.new('float[?]', o.elements)
  return function()
    library.chain(o.elements, a, b, out)
    return out
  end
end

local function torch()
  local python = os.getenv 'PEER_PYTHON'
  if not python or python == '' then return nil end
  local name = os.tmpname()
  local f = assert(io.open(name, 'w'))
  f:write(([[
import time, torch
torch.set_num_threads(%d)
def chain(x, y):
%s
    return x
x, y, times = torch.randn(%d), torch.randn(%d), []
with torch.no_grad():
    for k in range(%d):
        t = time.perf_counter(); chain(x, y); times.append(time.perf_counter() - t)
print(sorted(times)[len(times) // 2])
]]):format(o.threads, lines('py', '    x = %s'), o.elements, o.elements, o.runs))
  f:close()
  local pipe = io.popen(python .. ' ' .. name)
  local seconds = tonumber(pipe:read '*a')
  pipe:close()
  os.remove(name)
  return seconds
end

local x, y = mf.randn(o.elements), mf.randn(o.elements)
local runs = { compiled = mf.compile(chain), eager = chain, loop = loop(x, y) }
local times = { compiled = {}, eager = {}, loop = {} }
mf.no_grad(function()
  for k = -2, o.runs do
    for name, f in pairs(runs) do
      local t = mf.time()
      f(x, y)
      if k > 0 then times[name][k] = mf.time() - t end
    end
  end
  if runs.loop then -- it is the same arithmetic
    local want, got = runs.loop(), runs.compiled(x, y):tolist()
    for k = 1, o.elements do
      local difference = math.abs(want[k - 1] - got[k])
      assert(difference <= 1e-4 * math.max(1, math.abs(got[k])), 'the loop computes something else')
    end
  end
end)
local function median(list)
  table.sort(list)
  return list[math.ceil(#list / 2)]
end
local compiled, peer = median(times.compiled), torch()
print(('%d ops on %d float32, %d threads, ms: compiled %.3f, eager %.3f'):format(o.ops, o.elements, o.threads,
  compiled * 1e3, median(times.eager) * 1e3))
if runs.loop then
  local bound = median(times.loop)
  print(('one loop of C %.3f: compiled takes %.2f of it'):format(bound * 1e3, compiled / bound))
end
if peer then print(('PyTorch eager %.3f: %.1f times compiled'):format(peer * 1e3, peer / compiled)) end
