-- Ranks as processes: moonflow -n, its output, exit statuses, environment and ends, and other launchers'
-- variables. What takes seconds by its nature is in dist_spec.lua.

local shell = require 'spec.shell'
local sh, file = shell.run, shell.file

local function sorted(text)
  local lines = {}
  for line in text:gmatch '[^\n]+' do lines[#lines + 1] = line end
  table.sort(lines)
  return table.concat(lines, '\n')
end

describe('the launcher', function()
  setup(function()
    shell.open()
    file('sum.lua', [[
      local mf = require 'moonflow'
      local t = mf.comm.all_reduce(mf.full({ 1000 }, mf.rank() + 1))
      print(mf.rank(), mf.world_size(), t:sum():item(), arg[1])
    ]])
  end)
  teardown(shell.close)

  it('runs a script as ranks, and says whose each line is', function()
    local out, err, rc = sh '$M -n 3 $D/sum.lua x'
    assert.equal('[rank 0] 0\t3\t6000\tx\n[rank 1] 1\t3\t6000\tx\n[rank 2] 2\t3\t6000\tx', sorted(out), err)
    assert.equal(0, rc)
    assert.equal('', err)
  end)

  it('passes options of the program on', function()
    local out, err = sh [[$M -n 2 -e "n = require 'moonflow'.world_size()" -e 'print(n)']]
    assert.equal('[rank 0] 2\n[rank 1] 2', sorted(out), err)
  end)

  it('keeps long lines, lines without an end, and both streams', function()
    local out, err = sh [[$M -n 2 -e 'io.write(("x"):rep(40000)) io.stderr:write "no end"']]
    assert.equal(2 * 40000, select(2, out:gsub('x', '')))
    assert.equal('[rank 0] no end\n[rank 1] no end', sorted(err))
  end)

  it('writes files', function()
    local out = sh '$M -n 2 --log-dir $D/log $D/sum.lua; cat $D/log/rank-0.log $D/log/rank-1.log'
    assert.equal('0\t2\t3000\tnil\n1\t2\t3000\tnil\n', out)
  end)

  it('gives each rank its share of the processors', function()
    local out = sh [[taskset -c 0,1 $M -n 2 -e 'print(require "moonflow".get_num_threads())
      for l in io.lines "/proc/self/status" do print(l:match "^Cpus_allowed_list:%s*(.*)") end' | grep -v nil]]
    assert.equal('[rank 0] 0\n[rank 0] 1\n[rank 1] 1\n[rank 1] 1', sorted(out))
  end)

  it('ends all when one fails, with its status and its error', function()
    file('fail.lua', [[
      local mf = require 'moonflow'
      mf.comm.barrier()
      if mf.rank() == 1 then error 'no data' end
      mf.comm.barrier()
    ]])
    local _, err, rc = sh '$M -n 3 $D/fail.lua'
    assert.equal(1, rc)
    assert.truthy(err:find('%[rank 1%] moonflow: %S*fail.lua:3: no data'), err)
    for _, rank in ipairs { 0, 2 } do
      local text = '%%[rank %d%%] moonflow: [^\n]*barrier: rank 1 on host %%S+ raised an error: [^\n]*no data'
      assert.truthy(err:find(text:format(rank)), err)
    end
    assert.truthy(err:find 'moonflow: rank %d on host %S+ ended with exit status 1', err)
    _, err, rc = sh "$M -n 2 -e 'if os.getenv \"RANK\" == \"1\" then os.exit(7) end'"
    assert.equal(7, rc)
    assert.truthy(err:find 'rank 1 on host %S+ ended with exit status 7', err)
  end)

  it('ends all when one is killed', function()
    file('kill.lua', [[
      local mf = require 'moonflow'
      mf.comm.barrier()
      if mf.rank() == 1 then os.execute 'kill -9 $PPID' end
      mf.comm.barrier()
    ]])
    local _, err, rc = sh '$M -n 3 $D/kill.lua'
    assert.equal(128 + 9, rc)
    assert.truthy(err:find 'rank 1 on host %S+ was killed by signal 9', err)
    assert.truthy(err:find('%[rank 0%] [^\n]*barrier: rank 1 on host %S+ has died.* waited for rank 1'), err)
    assert.truthy(err:find('%[rank 2%] [^\n]*barrier: rank 1 on host %S+ has died'), err)
  end)

  it('lets a script end by os.exit', function() -- which leaves Lua's state open
    local out, err, rc = sh [[ASAN_OPTIONS=detect_leaks=0 $M -n 3 -e "
      local mf = require 'moonflow'
      mf.comm.barrier()
      if mf.rank() < 2 then os.exit(0) end
      os.execute 'sleep 0.5'
      print(mf.comm.host(0) == mf.comm.host(2))"]]
    assert.equal('[rank 2] true\n', out, err)
    assert.same({ 0, '' }, { rc, err })
    err, rc = select(2, sh [[ASAN_OPTIONS=detect_leaks=0 $M -n 2 -e "
      local mf = require 'moonflow'
      mf.comm.barrier()
      if mf.rank() == 1 then os.exit(3) end
      mf.comm.barrier()"]])
    assert.equal(3, rc)
    assert.truthy(err:find 'barrier: rank 1 on host %S+ raised an error: it ended with status 3', err)
  end)

  it('ends all on Ctrl-C', function()
    file('wait.lua', [[
      local mf = require 'moonflow'
      mf.comm.barrier()
      print 'ready'
      mf.comm.recv(1 - mf.rank())
    ]])
    local _, err, rc = sh [[
      $M -n 2 $D/wait.lua > $D/lines 2> $D/errors & p=$!
      while [ "$(grep -c ready $D/lines 2>/dev/null)" != 2 ]; do sleep 0.05; done
      kill -INT $p; wait $p; code=$?
      cat $D/errors >&2; exit $code]]
    assert.equal(130, rc, err)
    assert.truthy(err:find 'interrupted', err)
  end)

  it('starts again after a failure', function()
    file('again.lua', [[
      local mf, k = require 'moonflow', os.getenv 'MOONFLOW_RESTARTS'
      mf.comm.barrier()
      if mf.rank() == 1 and k ~= '2' then error('attempt ' .. k) end
      mf.comm.barrier()
      print('done', k)
    ]])
    local out, err, rc = sh '$M -n 2 --max-restarts 3 $D/again.lua'
    assert.equal(0, rc, err)
    assert.equal('[rank 0] done\t2\n[rank 1] done\t2', sorted(out))
    assert.truthy(err:find('restart 2 of 3', 1, true), err)
    assert.equal(1, (select(3, sh '$M -n 2 --max-restarts 1 $D/again.lua')))
  end)

  it('joins two nodes, which need a key when they are not loopback', function()
    local out, err, rc = sh [[
      $M --make-key $D/key; export MOONFLOW_KEY_FILE=$D/key
      for node in 0 1; do
        MOONFLOW_HOST=node$node $M -n 2 --nnodes 2 --node-rank $node --master 127.0.0.1:$P $D/sum.lua &
      done; wait]]
    assert.equal(0, rc, err)
    assert.equal('[rank 0] 0\t4\t10000\tnil\n[rank 1] 1\t4\t10000\tnil\n[rank 2] 2\t4\t10000\tnil\n'
      .. '[rank 3] 3\t4\t10000\tnil', sorted(out))
    err = select(2, sh 'RANK=0 WORLD_SIZE=2 MASTER_ADDR=10.9.8.7 MASTER_PORT=$P $M $D/sum.lua')
    assert.truthy(err:find('is not loopback, so the ranks need a key', 1, true), err)
    err = select(2, sh 'chmod 644 $D/key; MOONFLOW_KEY_FILE=$D/key RANK=0 WORLD_SIZE=2 MASTER_PORT=$P $M $D/sum.lua')
    assert.truthy(err:find('others can read the key file', 1, true), err)
    err, rc = select(2, sh '$M --make-key $D/key')
    assert.equal(1, rc)
    assert.truthy(err:find('cannot write the new file', 1, true), err)
  end)

  it('understands other launchers', function()
    local function as(variables)
      return sh(([[for r in 0 1; do env %s $M $D/sum.lua & done; wait]]):format(variables:gsub('%%', '$r')))
    end
    for _, variables in ipairs {
      'RANK=% WORLD_SIZE=2 LOCAL_RANK=% MASTER_ADDR=127.0.0.1 MASTER_PORT=$P',
      'RANK=% WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=$P TORCHELASTIC_USE_AGENT_STORE=True',
      'OMPI_COMM_WORLD_RANK=% OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=$$',
      'PMI_RANK=% PMI_SIZE=2 MPI_LOCALNRANKS=2 PMI_FD=$$',
      'SLURM_PROCID=% SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=% SLURM_JOB_ID=$$ SLURM_STEP_ID=3',
    } do
      local out, err = as(variables)
      assert.equal('0\t2\t3000\tnil\n1\t2\t3000\tnil', sorted(out), variables .. '\n' .. err)
    end
    local _, err = sh 'RANK=2 WORLD_SIZE=2 $M $D/sum.lua'
    assert.truthy(err:find('the environment says rank 2 of 2', 1, true), err)
    _, err = sh 'RANK=x WORLD_SIZE=2 $M $D/sum.lua'
    assert.truthy(err:find("RANK must be a whole number from 0, is 'x'", 1, true), err)
  end)

  -- What ranks show, without the first line and the prompts; by rank and as it came.
  local function prompt(input, options)
    file('input', input)
    local out, err, rc = sh(('$M -n 2 -i %s < $D/input'):format(options or ''))
    return (out:gsub('^moonflow[^\n]*\n', ''):gsub('>+ ', '')), err, rc
  end

  it('has a prompt whose lines run on all ranks', function()
    local out, err, rc = prompt [[
x = mf.comm.all_reduce(mf.ones(2) * (mf.rank() + 1))
x:sum():item()
for i = 1, 2 do
  print(i)
end
if mf.rank() == 0 then io.write 'no end' end
mf.world_size();
quit()
print 'not reached']]
    assert.same({ '', 0 }, { err, rc })
    assert.equal('[rank 0] 1\n[rank 0] 2\n[rank 0] 6\n[rank 0] no end\n[rank 1] 1\n[rank 1] 2\n[rank 1] 6', sorted(out))
    out = prompt('print(n)\n', [[-e "n = require 'moonflow'.rank()"]])
    assert.equal('[rank 0] 0\n[rank 1] 1', sorted(out))
    file('set.lua', 'n = arg[1]')
    out = prompt('n', '$D/set.lua a')
    assert.equal('[rank 0] a\n[rank 1] a', sorted(out))
    out, err, rc = sh "echo 'print(...)' | $M -n 2 - b; echo 'print(2)' | $M -n 2; $M -n 2 < /dev/null"
    assert.equal('[rank 0] 2\n[rank 0] b\n[rank 1] 2\n[rank 1] b', sorted(out))
    assert.same({ '', 0 }, { err, rc })
    err = select(2, sh '$M -n 1 --nnodes 2 --node-rank 0 --master h:1 -i < /dev/null')
    assert.equal('moonflow: a prompt is for the ranks of one node\n', err)
  end)

  it('keeps ranks at the prompt in step when lines fail on one', function()
    local out, err, rc = prompt [[
t = mf.ones(1)
if mf.rank() == 1 then error 'of one' end
if mf.rank() == 1 then error 'before' end; mf.comm.all_reduce(t)
mf.comm.all_reduce(t):item()
if mf.rank() == 0 then mf.comm.barrier() else mf.comm.all_reduce(t) end
model = mf.nn.parallel.DistributedDataParallel(mf.nn.Linear(1, 1))
model(mf.full({ 1, 1 }, mf.rank())):sum():backward()
model.module.weight.grad:item()
x = y z
mf.comm.all_reduce(t):item()
]]
    assert.equal(0, rc)
    assert.equal('[rank 0] 0.5\n[rank 0] 2\n[rank 0] 4\n[rank 1] 0.5\n[rank 1] 2\n[rank 1] 4', sorted(out))
    assert.equal(1, select(2, err:gsub('stdin:1: of one', '')))
    assert.truthy(err:find('%[rank 0%] [^\n]*all_reduce: rank 1 on host %S+ raised an error: stdin:1: before'), err)
    assert.equal(2, select(2, err:gsub('call different things', '')))
    assert.equal(2, select(2, err:gsub("'=' expected near", '')))
  end)

  it('interrupts a line at the prompt on Ctrl-C, which twice leaves', function()
    local out, err, rc = sh [[
      mkfifo $D/keys; $M -n 2 -i < $D/keys > $D/shown 2> $D/errors & p=$!
      exec 3> $D/keys
      has() { for i in $(seq 200); do [ "$(grep -c "$1" $D/shown)" -ge $2 ] && return; sleep 0.05; done; }
      echo 'mf.comm.barrier() print "in"; if mf.rank() == 0 then mf.comm.recv(1) end; while true do end' >&3
      has in 2; kill -INT $p; sleep 1.2
      echo 'mf.comm.all_reduce(mf.ones(1)):item()' >&3
      has '\] 2' 2
      echo 'f(' >&3; sleep 0.5; kill -INT $p; sleep 0.2 # drops what was begun
      echo '7' >&3; has '\] 7' 2
      echo 'print "again" while true do pcall(function() while true do end end) end' >&3; has again 2
      kill -INT $p; sleep 0.3; kill -INT $p
      wait $p; rc=$?
      exec 3>&-
      cat $D/shown; cat $D/errors >&2; exit $rc]]
    assert.equal(2, select(2, out:gsub('%] 2\n', '')), out .. err)
    assert.equal(2, select(2, out:gsub('%] 7\n', '')), out .. err)
    assert.equal(2, select(2, err:gsub('%] [^\n]*interrupted', '')), out .. err)
    assert.equal(130, rc)
  end)

  it('refuses wrong options', function()
    for _, options in ipairs { '-n 0', '-n x', '-n', '--nnodes 2', '--nnodes 2 --node-rank 2 --master a:1',
      '--log-dir=' } do
      local _, err, rc = sh('$M ' .. options)
      assert.equal(2, rc, options)
      assert.truthy(err:find 'unknown option or missing argument: %-', err)
    end
  end)
end)
