-- Ranks that are stopped, and hosts that are cut off from each other: all ranks end within ten seconds, with a
-- message that names rank, host, and what it waited for. `make test-dist` runs it.

local shell = require 'spec.shell'
local sh = shell.run

-- Rank `who` does `what` after a while of work; each rank says when it ended, on the clock of the system.
local work = [[
  local mf = require 'moonflow'
  local who, what = tonumber(arg[1]), arg[2]
  local t = mf.ones(50000)
  for step = 1, 1e9 do
    mf.comm.all_reduce(t, 'avg')
    if step == 50 and mf.rank() == who then
      io.stderr:write('now ', os.time(), '\n')
      os.execute(what)
    end
  end
]]

local function ranks_end(err, ranks, pattern)
  for _, rank in ipairs(ranks) do
    local text
    for line in err:gmatch '[^\n]+' do
      if line:find(('[rank %d] moonflow: '):format(rank), 1, true) and line:find 'all_reduce:' then text = line end
    end
    assert.truthy(text and text:find(pattern), ('rank %d: %s'):format(rank, text or err))
  end
end

describe('ranks #dist', function()
  setup(function()
    shell.open()
    shell.file('work.lua', work)
  end)
  teardown(shell.close)

  for _, n in ipairs { 2, 4 } do
    for who = 0, 1 do
      it(('end when rank %d of %d is killed'):format(who, n), function()
        local start = os.time()
        local _, err, rc = sh(("$M -n %d $D/work.lua %d 'kill -9 $PPID'"):format(n, who))
        assert.equal(137, rc, err)
        assert.is_true(os.time() - start < 12)
        local others = {}
        for r = 0, n - 1 do
          if r ~= who then others[#others + 1] = r end
        end
        ranks_end(err, others, ('rank %d on host %%S+ has died'):format(who))
      end)

      it(('end when rank %d of %d is stopped'):format(who, n), function()
        local start = os.time()
        local _, err, rc = sh(("$M -n %d $D/work.lua %d 'kill -STOP $PPID'"):format(n, who))
        assert.truthy(rc ~= 0, err)
        assert.is_true(os.time() - start < 20)
        local others = {}
        for r = 0, n - 1 do
          if r ~= who then others[#others + 1] = r end
        end
        ranks_end(err, others, ('rank %d on host %%S+ has given no sign of life for 5.*waited for rank'):format(who))
      end)
    end
  end

  it('end when memory runs out on one', function()
    local _, err, rc = sh [[$M -n 3 -e "
      local mf = require 'moonflow'
      if mf.rank() == 2 then mf.set_memory_limit(1e6) end
      local t = mf.ones(10)
      mf.comm.all_reduce(t)
      t = mf.ones(1e6)
      mf.comm.all_reduce(t)"]]
    assert.equal(1, rc)
    ranks_end(err, { 0, 1 }, 'rank 2 on host %S+ raised an error: .*out of memory')
  end)

  -- Two network namespaces joined by a pair of interfaces.
  local function namespaces(script)
    return sh([[
      ip netns add mfa && ip netns add mfb || exit 77
      trap 'ip netns del mfa; ip netns del mfb' EXIT
      ip link add mfva netns mfa type veth peer name mfvb netns mfb
      ip -n mfa addr add 10.77.0.1/24 dev mfva; ip -n mfa link set mfva up; ip -n mfa link set lo up
      ip -n mfb addr add 10.77.0.2/24 dev mfvb; ip -n mfb link set mfvb up; ip -n mfb link set lo up
      export MOONFLOW_KEY_FILE=$D/key MOONFLOW_HOST
      rm -f $D/key; $M --make-key $D/key
      node() { ip netns exec $1 env MOONFLOW_HOST=$1 $M -n 2 --nnodes 2 --node-rank $2 --master 10.77.0.1:29680 $3; }
    ]] .. script)
  end

  it('of two network namespaces work together, and end when they are cut off', function()
    local out, err, rc = namespaces [[
      echo "local mf = require 'moonflow'
            local t = mf.comm.all_reduce(mf.full({ 300000 }, mf.rank() + 1))
            print(t:sum():item())" > $D/sum.lua
      node mfb 1 $D/sum.lua & node mfa 0 $D/sum.lua; wait]]
    if rc == 77 then return pending 'network namespaces are not permitted here' end
    assert.equal(4, select(2, out:gsub('3000000', '')), err)
    local start = os.time()
    err = select(2, namespaces [[
      node mfb 1 "$D/work.lua 9 true" & node mfa 0 "$D/work.lua 9 true" &
      sleep 3; ip -n mfa link set mfva down; wait]])
    assert.is_true(os.time() - start < 20)
    ranks_end(err, { 0, 1 }, 'rank [23] on host mfb has given no sign of life')
    ranks_end(err, { 2, 3 }, 'rank 0 on host mfa has given no sign of life')
  end)
end)
