-- The programs of examples/, on data made here: ten classes of images that differ by one bright row.
local mf = require 'moonflow'

local program = 0
while arg[program - 1] do program = program - 1 end
local MOONFLOW = arg[program]

describe('examples', function()
  local folder

  local function run(command)
    local p = io.popen(MOONFLOW .. ' examples/' .. command .. ' 2>&1; echo "exit $?"')
    local text = p:read '*a'
    p:close()
    local output, code = text:match '^(.-)exit (%d+)\n$'
    return output, tonumber(code)
  end

  local function write(name, text)
    local f = assert(io.open(folder .. '/' .. name, 'wb'))
    f:write(text)
    f:close()
  end

  local function contents(name)
    local f = assert(io.open(folder .. '/' .. name, 'rb'))
    local text = f:read '*a'
    f:close()
    return text
  end

  setup(function()
    local p = io.popen 'mktemp -d'
    folder = p:read '*l'
    p:close()
    local dark, bright = ('\0'):rep(28), ('\200'):rep(28)
    for part, n in pairs { train = 400, t10k = 100 } do
      local images, labels = {}, {}
      for i = 0, n - 1 do
        labels[i + 1] = string.char(i % 10)
        images[i + 1] = dark:rep(i % 10 * 2 + 4) .. bright .. dark:rep(23 - i % 10 * 2)
      end
      local size = string.char(0, 0, math.floor(n / 256), n % 256)
      write(part .. '-images-idx3-ubyte', '\0\0\8\3' .. size .. '\0\0\0\28\0\0\0\28' .. table.concat(images))
      write(part .. '-labels-idx1-ubyte', '\0\0\8\1' .. size .. table.concat(labels))
    end
  end)
  teardown(function() os.execute('rm -rf ' .. folder) end)

  local function train(more)
    return run(('fashion_mnist.lua --data %s --batch 48 %s'):format(folder, more))
  end

  it('fashion_mnist.lua learns, and the same seed gives the same weights', function()
    for _, name in ipairs { 'a', 'b' } do
      local output, code = train(('--epochs 3 --save %s/%s.safetensors'):format(folder, name))
      assert.equal(0, code, output)
      local accuracy = tonumber(output:match 'test accuracy (%d%.%d%d%d%d)\n$')
      assert.truthy(accuracy and accuracy > 0.8, output)
      assert.truthy(output:find 'epoch 3 .-test accuracy', output)
    end
    assert.is_true(contents 'a.safetensors' == contents 'b.safetensors')
  end)

  it('fashion_mnist.lua --eager learns the same', function()
    local output, code = train(('--epochs 3 --eager --save %s/e.safetensors'):format(folder))
    assert.equal(0, code, output)
    local compiled = mf.load(folder .. '/a.safetensors', { nested = false })
    local eager = mf.load(folder .. '/e.safetensors', { nested = false })
    local n = 0
    for name, t in pairs(eager) do
      assert(mf.allclose(t, compiled[name], { rtol = 1e-3, atol = 1e-3 }), name)
      n = n + 1
    end
    assert(n > 10)
  end)

  it('fashion_mnist.lua goes on from what it saved', function()
    local output, code = train(('--epochs 3 --resume %s/a.safetensors --save %s/c.safetensors'):format(folder, folder))
    assert.equal(0, code, output)
    assert.is_nil(output:find 'epoch %d+  ', output)
    assert.truthy(output:find 'test accuracy', output)
    output, code = train(('--epochs 4 --resume %s/a.safetensors --save %s/c.safetensors'):format(folder, folder))
    assert.equal(0, code, output)
    assert.truthy(output:find 'epoch 4 ' and not output:find 'epoch 3 ', output)
  end)

  -- Starts a training whose output goes to a file, and interrupts it once `text` is there. Returns the
  -- output and the exit code.
  local function interrupted(text, more)
    write('interrupt.sh', ([[
      : > $2/output # what an earlier run left there would be taken for this one's
      $1 examples/fashion_mnist.lua --data $2 %s > $2/output 2> $2/bar &
      pid=$!
      for i in $(seq 2400); do grep -q '%s' $2/output && break; sleep 0.05; done
      kill -INT $pid
      wait $pid
      echo "exit $?" >> $2/output]]):format(more, text))
    os.execute(('sh %s/interrupt.sh %s %s'):format(folder, MOONFLOW, folder))
    local output, code = contents 'output':match '^(.-)exit (%d+)\n$'
    return output, tonumber(code)
  end

  it('fashion_mnist.lua, interrupted and resumed, gives what it would have given', function()
    local whole, part = folder .. '/whole.safetensors', folder .. '/part.safetensors'
    local output, code = train('--epochs 30 --save ' .. whole)
    assert.equal(0, code, output)
    local once = '--save %s --batch 48 --epochs 30 '
    output, code = interrupted('^epoch 1 ', ('--save nowhere --batch 48 ' .. once):format(part))
    assert.equal(130, code, output)
    local command = output:match '\n  ([^\n]*%-%-resume [^\n]*)\n$'
    assert.truthy(output:find(part .. ' holds the last finished epoch', 1, true) and command, output)
    for _, name in ipairs { 'save', 'batch', 'epochs', 'resume' } do
      assert.equal(1, select(2, command:gsub('%-%-' .. name, '')), command)
    end
    local p = io.popen(command .. ' 2>&1')
    output = p:read '*a'
    p:close()
    assert.is_nil(output:find 'epoch 1 ', output)
    assert.is_true(contents 'whole.safetensors' == contents 'part.safetensors', output)
  end)

  it('fashion_mnist.lua, interrupted in its first epoch, leaves the file of an earlier run', function()
    write('old.safetensors', 'old')
    local output, code = interrupted('^Net', '--batch 1 --save ' .. folder .. '/old.safetensors')
    assert.equal(130, code, output)
    assert.truthy(output:find 'no epoch was finished, nothing is saved\n$', output)
    assert.equal('old', contents 'old.safetensors')
  end)

  it('resnet50.lua learns its synthetic images, says so, and goes on from what it saved', function()
    local small = 'resnet50.lua --size 32 --width 8 --batch 8 --classes 3 '
    local output, code = run(small .. ('--steps 60 --save %s/r.safetensors'):format(folder))
    assert.equal(0, code, output)
    assert.truthy(output:find('synthetic', 1, true), output)
    local first, last = output:match 'step 20  loss ([%d%.]+)', output:match 'step 60  loss ([%d%.]+)'
    assert.truthy(first and last and tonumber(last) < 0.7 * tonumber(first), output)
    output, code = run(small .. ('--steps 62 --resume %s/r.safetensors --save %s/s.safetensors'):format(folder, folder))
    assert.equal(0, code, output)
    assert.truthy(output:find 'step 62' and not output:find 'step 60', output)
    for _, flag in ipairs { '--eager', '--channels-last', '--amp' } do
      output, code = run(small .. ('--steps 2 --save %s/t.safetensors %s'):format(folder, flag))
      assert.equal(0, code, output)
    end
  end)

  it('say what they take, and what is missing', function()
    for _, name in ipairs { 'fashion_mnist.lua', 'resnet50.lua', 'bench.lua', 'bench_all.lua', 'bench_chain.lua' } do
      local output, code = run(name .. ' --help')
      assert.equal(0, code, output)
      assert.truthy(output:find '%-%-%l+', output)
    end
    local output, code = run 'fashion_mnist.lua --data /nowhere'
    assert.equal(1, code)
    assert.truthy(output:find('dataset-fashion-mnist', 1, true) and output:find('--data', 1, true), output)
  end)

  it('bench_chain.lua compares the chain with the same arithmetic in one loop', function()
    local output, code = run 'bench_chain.lua --ops 100 --elements 1000 --runs 1'
    assert.equal(0, code, output)
    assert.truthy(output:find('100 ops on 1000 float32', 1, true), output)
  end)

  it('bench_all.lua refuses an unknown workload', function()
    local output, code = run 'bench_all.lua --only mlp,nosuch'
    assert.equal(2, code)
    assert.truthy(output:find("no workload 'nosuch'; there are dispatch, ", 1, true), output)
  end)

  it('bench.lua multiplies in bfloat16 in both modes, or says that the CPU does not', function()
    local function losses(more)
      local output, code = run('bench.lua mlp --steps 2 --warmup 0 --loss ' .. more)
      assert.equal(0, code, output)
      local first, second = output:match '"losses": %[([%d.]+), ([%d.]+)%]'
      assert.truthy(output:find '"gflops": %d' and output:find '"gemm_gflops": %d', output)
      return tonumber(first), tonumber(second), output
    end
    local first, second = losses ''
    for _, mode in ipairs { 'eager', 'graph' } do
      local a, b, output = losses('--dtype bf16 --mode ' .. mode)
      assert.near(first, a, 0.02)
      assert.near(second, b, 0.02)
      assert.equal(mf._has_bf16() and 0 or 1, select(2, output:gsub('this CPU does not multiply bfloat16', '')), output)
      assert.equal(mf._has_bf16(), first ~= a, output)
    end
    local output, code = run 'bench.lua mlp --dtype fp8'
    assert.truthy(code ~= 0 and output:find('fp32 and bf16 are there', 1, true), output)
  end)

  it('bench.lua prints one line of JSON, with the same losses in both modes', function()
    local losses = {}
    for _, mode in ipairs { 'eager', 'graph' } do
      local output, code = run('bench.lua mlp --steps 2 --warmup 0 --loss --mode ' .. mode)
      assert.equal(0, code, output)
      losses[mode] = output:match '^{"framework": "moonflow", .*"losses": %[(%d%.%d+, %d%.%d+)%]}\n$'
      assert.truthy(losses[mode] and output:find('"mode": "' .. mode .. '"', 1, true), output)
    end
    assert.equal(losses.eager, losses.graph)
    local output, code = run 'bench.lua mlp --mode lazy'
    assert(code ~= 0 and output:find('eager and graph', 1, true), output)
  end)

  it('gpt.lua trains under each plan as on one rank', function()
    write('text.txt', ('In the beginning God created the heaven and the earth. And it was without form. '):rep(40))
    local options = (' examples/gpt.lua --data %s/text.txt --steps 3 --eval 3 --batch 4 --context 16 --width 24'
      .. ' --heads 2 '):format(folder)
    local function losses(command)
      local p = io.popen(MOONFLOW .. command .. ' 2>&1')
      local text = p:read '*a'
      p:close()
      return text:match 'step 3  (loss %d%.%d+  validation %d%.%d+)', text
    end
    local want = losses(options .. '--length 1')
    assert.truthy(want)
    for plan, n in pairs { data = 2, tensor = 2, pipeline = 2, two_axes = 4, zero = 2 } do
      local got, text = losses((' -n %d'):format(n) .. options .. '--plan examples/plans/' .. plan .. '.lua')
      assert(got == want, plan .. ': ' .. tostring(text))
    end
  end)
end)
