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
        local _, err, rc = sh(("$M -n %d $D/work.lua %d 'kill -9 $PPID'"):format(n, who))
        assert.equal(137, rc, err)
        assert.is_true(os.time() - tonumber(err:match 'now (%d+)') <= 11, err)
        local others = {}
        for r = 0, n - 1 do
          if r ~= who then others[#others + 1] = r end
        end
        ranks_end(err, others, ('rank %d on host %%S+ has died'):format(who))
      end)

      it(('end when rank %d of %d is stopped'):format(who, n), function()
        local _, err, rc = sh(("$M -n %d $D/work.lua %d 'kill -STOP $PPID'"):format(n, who))
        assert.truthy(rc ~= 0, err)
        assert.is_true(os.time() - tonumber(err:match 'now (%d+)') <= 11, err)
        local others = {}
        for r = 0, n - 1 do
          if r ~= who then others[#others + 1] = r end
        end
        ranks_end(err, others, ('rank %d on host %%S+ has given no sign of life for 5.*waited for rank'):format(who))
      end)
    end
  end

  -- What happens to rank `who`, and at which point of its life.
  local points = [[
    local mf = require 'moonflow'
    local who, what, where = tonumber(arg[1]), arg[2], arg[3]
    local rank = tonumber(os.getenv 'RANK')
    local function happen()
      if rank ~= who then return end
      local f = io.open(arg[4], 'w')
      f:write(os.time())
      f:close()
      if what == 'error' then error 'no luck' end
      os.execute('kill -' .. what .. ' $PPID')
    end
    if where == 'start' then happen() end
    mf.comm.barrier()
    if where == 'collective' then
      local t = mf.ones(3e6)
      for step = 1, 1e9 do
        if step == 5 and rank == who then
          local pid = io.open('/proc/self/stat'):read '*n'
          os.execute(('(sleep 0.3; date +%%s > %s; kill -%s %d) &'):format(arg[4], what, pid))
        end
        mf.comm.all_reduce(t)
      end
    elseif where == 'compute' then
      happen()
      local t = mf.ones(1000)
      while rank % 2 == 0 do t = t * 1 end
      local k = 0
      while true do k = k + 1 end
    end
    mf.comm.barrier()
    happen()
  ]]
  local seen = {
    ['9'] = 'moonflow: rank %d on host %%S+ was killed by signal 9',
    STOP = 'moonflow: rank %d on host %%S+ has been stopped for 7',
    error = '%%[rank %d%%] moonflow: [^\n]*no luck',
  }

  for _, where in ipairs { 'start', 'collective', 'compute', 'close' } do
    for _, what in ipairs { '9', 'STOP', 'error' } do
      for who = 0, 1 do
        if where ~= 'collective' or what ~= 'error' then
          it(('end when rank %d comes to %s at the point %s'):format(who, what, where), function()
            shell.file('points.lua', points)
            local out, err, rc = sh(([[rm -f $D/when; $M -n 3 $D/points.lua %d %s %s $D/when; rc=$?
              echo $(($(date +%%s) - $(cat $D/when))); exit $rc]]):format(who, what, where))
            assert.truthy(rc ~= 0, err)
            assert.is_true(tonumber(out:match '(%d+)\n$') <= 10, out .. err)
            -- Who hears of it by communication may end first, with the reason.
            local told = err:find(seen[what]:format(who)) or where == 'collective'
              or where == 'compute' and what == 'STOP'
            assert.truthy(told, err)
            if where == 'start' then
              assert.truthy(err:find('not there: rank', 1, true) or err:find('for rank 0 at', 1, true), err)
            elseif where ~= 'close' then
              local why = what == 'error' and 'raised an error: [^\n]*no luck' or what == '9' and 'has died'
                or 'has given no sign of life'
              assert.truthy(err:find(('%%[rank 2%%] [^\n]*rank %d on host %%S+ %s'):format(who, why)), err)
            end
          end)
        end
      end
    end
  end

  it('go on from the last checkpoint when they are started again', function()
    shell.file('restart.lua', [[
      local mf = require 'moonflow'
      local nn, optim = mf.nn, mf.optim
      local path, dies = arg[1], arg[2] == 'dies' and os.getenv 'MOONFLOW_RESTARTS' == '0'
      mf.manual_seed(1)
      local net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
      local opt, first = optim.AdamW(net:parameters(), { lr = 0.05 }), 1
      local f = io.open(path)
      if f then
        f:close()
        local state = mf.load(path)
        net:load_state_dict(state.net)
        opt:load_state_dict(state.opt)
        first = state.step + 1
      end
      local model = nn.parallel.DistributedDataParallel(net)
      for step = first, 20 do
        mf.manual_seed(100 * step + mf.rank())
        opt:zero_grad()
        local loss = model(mf.randn(3, 4)):square():mean()
        loss:backward()
        opt:step()
        if step % 5 == 0 and mf.rank() == 0 then
          mf.save({ step = step, net = net:state_dict(), opt = opt:state_dict() }, path)
        end
        if step == 12 and dies and mf.rank() == 1 then os.execute 'kill -9 $PPID' end
        if step == 20 then print(('%d %.9g'):format(first, loss:item())) end
      end
    ]])
    local out, err, rc = sh [[$M -n 2 $D/restart.lua $D/a.safetensors | sort
      $M -n 2 --max-restarts 1 $D/restart.lua $D/b.safetensors dies | sort]]
    assert.equal(0, rc, err)
    local whole, resumed = out:match '^(%[rank 0%] 1 .-)(%[rank 0%] 11 .*)$'
    assert.truthy(whole and err:find('restart 1 of 1', 1, true), out .. err)
    assert.equal(whole, (resumed:gsub('%] 11 ', '] 1 ')))
  end)

  it('are started by mpirun and torchrun', function()
    shell.file('sum.lua', [[
      local mf = require 'moonflow'
      print(mf.rank(), mf.comm.all_reduce(mf.full({ 1000 }, mf.rank() + 1)):sum():item())
    ]])
    for _, launcher in ipairs {
      'mpirun --allow-run-as-root --oversubscribe -n 2', 'torchrun --nproc-per-node 2 --no-python',
    } do
      local out, err, rc = sh(('command -v %s >/dev/null || exit 77; %s $M $D/sum.lua'):format(launcher:match '%S+',
        launcher))
      if rc ~= 77 then
        assert.equal(0, rc, err)
        assert.truthy(out:find '0%s+3000\n' and out:find '1%s+3000\n', out .. err)
      end
    end
  end)

  it('train ResNet50 together', function()
    local out, err, rc = sh [[$M -n 2 examples/resnet50.lua --size 32 --width 8 --batch 8 --classes 3 --steps 60 \
      --save $D/r.safetensors]]
    assert.equal(0, rc, err)
    local first, last = out:match 'step 20  loss ([%d%.]+)', out:match 'step 60  loss ([%d%.]+)'
    assert.truthy(first and last and tonumber(last) < 0.7 * tonumber(first), out)
    assert.is_nil(out:find('[rank 1]', 1, true))
  end)

  it('split a layer over classes, with the losses of one rank, and go on as more from a checkpoint', function()
    local function train(n, options)
      local out, err, rc = sh('$M -n ' .. n .. ' examples/faces.lua --classes 20 --batch 30 --dim 32 ' .. options)
      assert.equal(0, rc, err)
      local losses = {}
      for loss in out:gmatch 'loss ([%d%.]+)' do losses[#losses + 1] = tonumber(loss) end
      return losses, out
    end
    local one, two = train(1, '--steps 40'), train(2, '--steps 20 --save $D/faces')
    local three, out = train(3, '--steps 40 --resume $D/faces')
    assert.truthy(out:find('holds 7 rows', 1, true), out)
    assert.same({ 4, 2, 2 }, { #one, #two, #three })
    for i, loss in ipairs { two[1], two[2], three[1], three[2] } do
      assert(math.abs(loss - one[i]) < 2e-3 * one[i], ('part %d: %g, of one rank %g'):format(i, loss, one[i]))
    end
    assert(one[4] < 0.5 * one[1])
  end)

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
