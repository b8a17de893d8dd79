-- Processes of this host: all-reduce of moonflow, Open MPI and PyTorch's gloo, and training steps of two ranks
-- of one thread, beside one rank of two threads and PyTorch's DistributedDataParallel over gloo, in one run.
--
--   make bench-dist [PEER_PYTHON=python] [ARGS='--sizes 4096,100000000 --ranks 2,4 --train bert']
--
-- Times of an all-reduce are those of one call among many in a row, in place on float32: the median of several
-- rows. Steps are those of bench.lua and peer.py, run in turn several times: the median of the runs. Open MPI and
-- PyTorch take part where they are installed.
local mf = require 'moonflow'

local o = mf.cli(arg, 'All-reduce and data-parallel training by processes of this host.', {
  { 'sizes', '4096,65536,1000000,100000000', 'bytes; empty: no all-reduce' },
  { 'ranks', '2,4', 'how many processes' },
  { 'train', 'resnet50,bert', 'workloads of bench.lua; empty: none' },
  { 'steps', 4, 'timed steps of a run' },
  { 'runs', 3, 'runs of each' },
  { 'child', false, 'be one of the ranks' },
})

local function numbers(list)
  local out = {}
  for n in list:gmatch '%d+' do out[#out + 1] = tonumber(n) end
  return out
end

-- How many calls a row has, and how many rows there are.
local rows = 9
local function calls(bytes) return math.max(1, math.min(500, math.floor(2e7 / bytes))) end

local function child()
  for _, bytes in ipairs(numbers(o.sizes)) do
    local t, times = mf.ones(bytes / 4), {}
    for i = 1, rows do
      mf.comm.barrier()
      local start = mf.time()
      for _ = 1, calls(bytes) do mf.comm.all_reduce(t, 'max') end
      times[i] = (mf.time() - start) / calls(bytes)
    end
    table.sort(times)
    if mf.rank() == 0 then print(('time %d %.9g'):format(bytes, times[(rows + 1) / 2])) end
  end
end

local mpi_source = [[
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}
int main(int argc, char **argv) {
  MPI_Init(&argc, &argv);
  int rank;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  for (int k = 1; k + 1 < argc; k += 2) {
    long bytes = atol(argv[k]);
    int calls = atoi(argv[k + 1]), n = 9;
    float *v = calloc(bytes, 1);
    double *t = malloc(n * sizeof *t);
    for (int i = 0; i < n; i++) {
      MPI_Barrier(MPI_COMM_WORLD);
      double start = MPI_Wtime();
      for (int j = 0; j < calls; j++)
        MPI_Allreduce(MPI_IN_PLACE, v, bytes / 4, MPI_FLOAT, MPI_MAX, MPI_COMM_WORLD);
      t[i] = (MPI_Wtime() - start) / calls;
    }
    qsort(t, n, sizeof *t, by_value);
    if (rank == 0) printf("time %ld %.9g\n", bytes, t[n / 2]);
    free(v);
    free(t);
  }
  MPI_Finalize();
}
]]

local gloo_source = [=[
import sys, time, torch, torch.distributed as dist
import torch.multiprocessing as mp
def rank(r, n, port, sizes):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', init_method=f'tcp://127.0.0.1:{port}', rank=r, world_size=n)
    for bytes, calls in sizes:
        t, times = torch.ones(bytes // 4), []
        for _ in range(9):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls): dist.all_reduce(t, dist.ReduceOp.MAX)
            times.append((time.perf_counter() - start) / calls)
        times.sort()
        if r == 0: print('time', bytes, times[len(times) // 2], flush=True)
if __name__ == '__main__':
    a = [int(x) for x in sys.argv[1:]]
    sizes = list(zip(a[2::2], a[3::2]))
    mp.start_processes(rank, (a[0], a[1], sizes), nprocs=a[0], start_method='fork')
]=]

local function temporary(name, text)
  local path = os.tmpname() .. name
  local f = assert(io.open(path, 'w'))
  f:write(text)
  f:close()
  return path
end

-- The times that a command prints, by bytes; nil when it does not run.
local function measure(command)
  local pipe, times, any = io.popen(command .. ' 2>/dev/null'), {}, false
  for line in pipe:lines() do
    local bytes, seconds = line:match 'time (%d+) (%S+)'
    if bytes then
      times[tonumber(bytes)] = tonumber(seconds)
      any = true
    end
  end
  pipe:close()
  return any and times or nil
end

local function program()
  local i = 0
  while arg[i - 1] do i = i - 1 end
  return arg[i]
end

local function succeeds(command) return os.execute(command .. ' >/dev/null 2>&1') == 0 end

local function all_reduces()
  local sizes, pairs_of = numbers(o.sizes), {}
  for i, bytes in ipairs(sizes) do pairs_of[i] = bytes .. ' ' .. calls(bytes) end
  local pairs_text = table.concat(pairs_of, ' ')
  local mpi = temporary('.c', mpi_source)
  if not succeeds(('mpicc -O2 -o %s.run %s'):format(mpi, mpi)) then
    print 'Open MPI is not installed (openmpi-bin, libopenmpi-dev)'
    mpi = nil
  end
  local python, gloo = os.getenv 'PEER_PYTHON', temporary('.py', gloo_source)
  if not python or python == '' then print 'no PEER_PYTHON with PyTorch' end
  print(('%5s %12s %12s %12s %12s %9s %9s'):format('ranks', 'bytes', 'moonflow us', 'Open MPI us', 'gloo us',
    'to MPI', 'to gloo'))
  for _, n in ipairs(numbers(o.ranks)) do
    local ours = measure(('%s -n %d %s --child --sizes %s'):format(program(), n, arg[0], o.sizes)) or {}
    local theirs = mpi and measure(('OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe '
      .. '-n %d %s.run %s'):format(n, mpi, pairs_text)) or {}
    local peer = python and python ~= ''
      and measure(('%s %s %d %d %s'):format(python, gloo, n, 29800 + n, pairs_text)) or {}
    for _, bytes in ipairs(sizes) do
      local function us(t) return t[bytes] and ('%.1f'):format(t[bytes] * 1e6) or '-' end
      local function ratio(t) return ours[bytes] and t[bytes] and ('%.2f'):format(ours[bytes] / t[bytes]) or '-' end
      print(('%5d %12d %12s %12s %12s %9s %9s'):format(n, bytes, us(ours), us(theirs), us(peer), ratio(theirs),
        ratio(peer)))
    end
  end
  os.execute(('rm -f %s* %s'):format(mpi or '/nonexistent', gloo))
end

-- Seconds of a step that a command prints; nil when it does not run.
local function step_of(command)
  local pipe = io.popen(command .. ' 2>/dev/null')
  local text = pipe:read '*a'
  pipe:close()
  return tonumber(text:match '"step_s": ([%d%.e%-]+)')
end

local function median(list)
  table.sort(list)
  return list[math.floor((#list + 1) / 2)]
end

local function training()
  local python, here = os.getenv 'PEER_PYTHON', arg[0]:match '^(.*)/[^/]*$' or '.'
  print(('%-10s %14s %14s %14s %12s %12s'):format('step', '1 x 2 threads', '2 ranks x 1', 'torch DDP x 1', 'to 1 x 2',
    'to torch'))
  for name in o.train:gmatch '[^,]+' do
    local flags = ('%s --steps %d%s'):format(name, o.steps, name == 'resnet50' and ' --channels-last' or '')
    local commands = { ('%s %s/bench.lua %s'):format(program(), here, flags),
      ('%s -n 2 %s/bench.lua %s'):format(program(), here, flags),
      python and python ~= '' and ('%s %s/peer.py torch %s --ranks 2'):format(python, here, flags) or nil }
    local times = { {}, {}, {} }
    for _ = 1, o.runs do
      for k, command in ipairs(commands) do table.insert(times[k], step_of(command)) end
    end
    local one, two, torch = median(times[1]), median(times[2]), median(times[3])
    local function ms(t) return t and ('%.1f ms'):format(t * 1e3) or '-' end
    local function ratio(t) return t and two and ('%.3fx'):format(t / two) or '-' end
    print(('%-10s %14s %14s %14s %12s %12s'):format(name, ms(one), ms(two), ms(torch), ratio(one), ratio(torch)))
    io.stdout:flush()
  end
end

if o.child then child()
else
  if o.sizes ~= '' then all_reduces() end
  if o.train ~= '' then training() end
end
