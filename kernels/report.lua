-- What ptxas says of each kernel, one a line, and what of that is bad:
--
--   luajit kernels/report.lua BUILD cuobjdump
--
-- Registers, bytes of shared memory and of stack, spills, the blocks and the part of a multiprocessor's threads
-- that are there at once (of BLOCK threads a block, which all launches have), and the widest load from memory.
-- Exits with 1 where a kernel spills.
local build, cuobjdump = arg[1], arg[2] or 'cuobjdump'
local BLOCK = 256

-- Of a multiprocessor, by architecture: threads, registers, blocks, bytes of shared memory.
local machines = {
  [75] = { 1024, 65536, 16, 65536 }, [80] = { 2048, 65536, 32, 167936 }, [86] = { 1536, 65536, 16, 102400 },
  [89] = { 1536, 65536, 24, 102400 }, [90] = { 2048, 65536, 32, 233472 }, [100] = { 2048, 65536, 32, 233472 },
}

local function lines_of(command)
  local pipe = assert(io.popen(command))
  local lines = {}
  for line in pipe:lines() do lines[#lines + 1] = line end
  pipe:close()
  return lines
end

-- name .. arch -> { name, arch, registers, shared, stack, spills }, and their order
local kernels, order = {}, {}
for _, path in ipairs(lines_of(('ls %s/cuda/*.ptxas'):format(build))) do
  local now
  for line in io.lines(path) do
    local name, arch = line:match "Compiling entry function '([^']+)' for 'sm_(%d+)"
    if name then
      now = { name = name, arch = tonumber(arch), shared = 0, stack = 0, spills = 0, registers = 0, load = 0 }
      kernels[name .. arch] = now
      order[#order + 1] = now
    elseif now and line:find 'spill stores' then
      local stack, out, back = line:match '(%d+) bytes stack frame, (%d+) bytes spill stores, (%d+) bytes spill loads'
      now.stack, now.spills = tonumber(stack), out + back
    elseif now and line:find 'Used %d+ registers' then
      now.registers = tonumber(line:match 'Used (%d+) registers')
      now.shared = tonumber(line:match '(%d+) bytes smem') or 0
    end
  end
end

local function widths()
  local now, arch
  for _, line in ipairs(lines_of(('%s -sass %s/libmoonflow_cuda.so 2>/dev/null'):format(cuobjdump, build))) do
    arch = line:match 'arch = sm_(%d+)' or arch
    local name = line:match 'Function : (%S+)'
    if name then now = kernels[name .. (arch or '')] end
    if now and line:find 'LDG' then
      local bits = tonumber(line:match 'LDG%.E[%w%.]*%.(128)' or line:match 'LDG%.E[%w%.]*%.(64)')
        or (line:find 'LDG%.E[%w%.]*%.[US]8' and 8) or (line:find 'LDG%.E[%w%.]*%.[US]16' and 16) or 32
      if bits > now.load then now.load = bits end
    end
  end
end

-- How many blocks are there at once.
local function blocks_of(k)
  local m = machines[k.arch]
  if not m then return 0, 0 end
  local registers = math.max(1, math.ceil(k.registers / 8) * 8) * BLOCK
  local n = math.min(math.floor(m[1] / BLOCK), m[3], math.floor(m[2] / registers))
  if k.shared > 0 then n = math.min(n, math.floor(m[4] / (k.shared + 1024))) end
  return n, n * BLOCK / m[1]
end

local function readable(names)
  local path = os.tmpname()
  local f = io.open(path, 'w')
  for _, k in ipairs(names) do f:write(k.name, '\n') end
  f:close()
  for i, line in ipairs(lines_of('c++filt < ' .. path)) do names[i].text = line:gsub('%(.*', ''):gsub('^void ', '') end
  os.remove(path)
end

widths()
readable(order)
table.sort(order, function(a, b)
  return a.arch < b.arch or a.arch == b.arch and a.text < b.text
end)
print(('%-72s %4s %5s %6s %6s %6s %6s %5s %5s'):format('kernel', 'arch', 'regs', 'shared', 'stack', 'spills', 'blocks',
  'full', 'load'))
local spilling, low = 0, 0
for _, k in ipairs(order) do
  local n, part = blocks_of(k)
  print(('%-72s %4d %5d %6d %6d %6d %6d %4.0f%% %5d'):format(k.text:sub(1, 72), k.arch, k.registers, k.shared, k.stack,
    k.spills, n, 100 * part, k.load))
  if k.spills > 0 then spilling = spilling + 1 end
  if part < 0.5 then low = low + 1 end
end
print(('%d kernels; %d spill; of %d less than half of the threads are there at once; blocks of %d threads'):format(
  #order, spilling, low, BLOCK))
os.exit(spilling == 0 and #order > 0 and 0 or 1)
