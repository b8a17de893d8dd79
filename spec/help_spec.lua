-- Documentation: every op, function, method and class has it, mf.help finds it, and the stubs for
-- language servers are Lua.
local mf = require 'moonflow'

-- The tables of the module that are named in scripts.
local places = {
  { 'mf.', mf }, { 'x:', mf.Tensor }, { 'nn.', mf.nn }, { 'nn.init.', mf.nn.init }, { 'nn.utils.', mf.nn.utils },
  { 'optim.', mf.optim }, { 'optim.lr_scheduler.', mf.optim.lr_scheduler }, { 'data.', mf.data },
}

-- All classes by their name in a script, and those that only their objects show.
local classes = { ['optim.Optimizer'] = mf.optim.Optimizer, ['data.Dataset'] = mf.data.Dataset,
  ['nn.Module'] = mf.nn.Module, Function = mf.Function,
  ['data.DataLoader'] = getmetatable(mf.data.DataLoader(mf.data.TensorDataset(mf.ones(1)))) }
for _, place in ipairs(places) do
  for name, value in pairs(place[2]) do
    if type(value) == 'table' and (getmetatable(value) or {}).__call then classes[place[1] .. name] = value end
  end
end

describe('documentation', function()
  it('is above the record of every op, a sentence', function()
    for _, op in ipairs(mf._ops()) do
      assert(#op.doc >= 3, op.name .. ' has no comment')
      assert(op.doc:match '[.:]%s*$' or op.doc:match '%)$', op.name .. ': the comment is no sentence: ' .. op.doc)
      local text = mf.help(op.call)
      assert(text:find(op.signature, 1, true) or text:find(op.name, 1, true), op.name)
    end
  end)

  for _, place in ipairs(places) do
    it('is there for all of ' .. place[1], function()
      local _, _, n = mf.save, { mf.compile, mf.scalar }, 0
      for name, value in pairs(place[2]) do
        local callable = type(value) == 'function' or (type(value) == 'table' and getmetatable(value) ~= nil)
        if callable and type(name) == 'string' and name:sub(1, 1) ~= '_' then
          local text = mf.help(place[1] .. name)
          assert(#text > 10 and text:find(name, 1, true), text)
          assert(not text:find('(not documented)', 1, true), text)
          n = n + 1
        end
      end
      assert(n > 3)
    end)
  end
end)

describe('documentation of classes', function()
  it('has their methods', function()
    local n = 0
    for name, class in pairs(classes) do
      for method, value in pairs(class) do
        local hidden = type(method) ~= 'string' or method:sub(1, 1) == '_' or type(value) ~= 'function'
        -- what a class of optimisers or schedulers hands to the common part
        local inner = name:find '^optim' and not mf.optim.Optimizer[method] and method ~= 'step'
        if not hidden and not inner and method ~= 'rate' and not method:find '^materialize' then
          local text = mf.help(name .. ':' .. method)
          assert(text:find(':' .. method .. '(', 1, true) and not text:find('(not documented)', 1, true), text)
          n = n + 1
        end
      end
    end
    assert(n > 100, n)
  end)

  -- What an unknown option's error lists, given these arguments first.
  local function options_by_error(name, value, ...)
    local arguments = { ... }
    arguments[#arguments + 1] = { zzqqzzqqzz = 1 }
    local ok, text = pcall(value, unpack(arguments))
    if ok then return end
    local list = tostring(text):match(name .. ": there is no option 'zzqqzzqqzz'; there are ([%w_, ]+)")
    return list and (list .. ', '):find '%f[%w_]x, ' == nil and list ~= 'none' and list or nil -- x: those of an op
  end

  it('and functions shows every option, and no fewer arguments than are needed', function()
    local opt = mf.optim.SGD({ mf.ones(1) })
    local set = mf.data.TensorDataset(mf.ones(4))
    local tries = { {}, { 1 }, { 1, 1 }, { 1, 1, 1 }, { opt }, { opt, 1 }, { opt, {} }, { opt, { 1 } }, { set },
      { set, { 4 } }, { mf.ones(2, 2) }, { mf.ones(2, 2), 1 }, { { mf.ones(1) } }, { 1, mf.ones(1) },
      { opt, { mf.optim.lr_scheduler.StepLR(opt, 1) } }, { opt, mf.optim.lr_scheduler.StepLR(opt, 1) } }
    local n = 0
    for _, place in ipairs(places) do
      for name, value in pairs(place[2]) do
        local is_class = classes[place[1] .. name]
        if place[1] ~= 'mf.' and place[1] ~= 'x:' and (is_class or type(value) == 'function') then
          local text = mf.help(place[1] .. name)
          local signature, list = text:match '^[^\n]*', nil
          for _, arguments in ipairs(tries) do list = list or options_by_error(name, value, unpack(arguments)) end
          for option in (list or ''):gmatch '[%w_]+' do
            assert(signature:find('%f[%w_]' .. option .. ' ='), signature .. ' lacks ' .. option)
            n = n + 1
          end
          if not list and signature:find(name .. '()', 1, true) and name ~= 'Graph' then
            assert(pcall(value), signature .. ' needs arguments')
          end
        end
      end
    end
    assert(n > 150, n)
  end)

  it('is found by object, class, method and bare name', function()
    local net = mf.nn.Linear(1, 1)
    assert.equal(mf.help 'nn.Module:load_state_dict', mf.help(mf.nn.Module.load_state_dict))
    assert.equal(mf.help 'nn.Module:load_state_dict', mf.help(net.load_state_dict))
    assert.equal(mf.help 'nn.Module:load_state_dict', mf.help 'Linear:load_state_dict')
    assert.equal(mf.help 'optim.Optimizer:step', mf.help 'optim.AdamW:step')
    assert.equal(mf.help 'nn.Linear', mf.help(net))
    assert.equal(mf.help 'nn.Sequential', mf.help(mf.nn.Sequential(net)))
    assert.equal(mf.help 'nn.Module', mf.help(mf.nn.Module:extend 'Net'()))
    assert.equal(mf.help 'optim.AdamW', mf.help(mf.optim.AdamW(net:parameters())))
    assert.equal(mf.help 'data.DataLoader', mf.help(mf.data.DataLoader(mf.data.TensorDataset(mf.ones(1)))))
    local text = mf.help 'load_state_dict'
    for _, class in ipairs { 'nn.Module', 'optim.Optimizer', 'LRScheduler' } do
      assert(text:find(class .. ':load_state_dict(', 1, true), text)
    end
    assert(mf.help 'to':find('see also nn.Module:to', 1, true))
  end)
end)

describe('help', function()
  it('lists what is in a module', function()
    for name, module in pairs { nn = mf.nn, optim = mf.optim, data = mf.data, ['nn.init'] = mf.nn.init,
      ['nn.utils'] = mf.nn.utils, ['optim.lr_scheduler'] = mf.optim.lr_scheduler } do
      local text = mf.help(name)
      assert.equal(text, mf.help(module))
      assert.equal(text, mf.help('mf.' .. name))
      for member in pairs(module) do
        assert(member:sub(1, 1) == '_' or text:find('%f[%w_]' .. member .. '%f[^%w_]'), name .. ' lacks ' .. member)
      end
    end
    for name in pairs(mf.abs and mf) do
      local shown = type(name) == 'string' and name:match '^%a%w+$' and not tostring(mf[name]):find '^%l+%d+$'
      assert(not shown or name == 'bool' or mf.help 'mf':find('%f[%w_]' .. name .. '%f[^%w_]'), name)
    end
    assert(mf.help(mf.Tensor):find('softmax,', 1, true) and mf.help 'Tensor':find('x:lt', 1, true))
  end)

  it('knows all that init.lua loads on demand', function()
    local n = 0
    for name in io.open 'lua/init.lua':read '*a':match 'lazy = (%b{})':gmatch '([%w_]+) = ' do
      local text = mf.help(name)
      assert(#text > 20 and not text:find('(not documented)', 1, true), text)
      assert.equal(text, mf.help('mf.' .. name))
      assert.equal(text, mf.help(mf[name]))
      n = n + 1
    end
    assert(n >= 10)
  end)

  it('knows fields and dtypes', function()
    assert(mf.help 'x.shape':find('sizes', 1, true))
    assert.equal(mf.help 'float32', mf.help(mf.float32))
    assert(mf.help 'dtype':find("tostring(x.dtype) == 'float32'", 1, true))
    assert(mf.help 'data.Dataset':find('D:len()', 1, true))
  end)

  it('says how an op is called, its shapes and its gradient', function()
    local text = mf.help 'softmax'
    assert(text:find('mf.softmax(x, {dim = -1})', 1, true), text)
    assert(text:find('differentiable by x', 1, true), text)
    text = mf.help 'conv2d'
    assert(text:find('x (N, C, H, W)', 1, true), text)
    assert(text:find('stride = 1, padding = 0, dilation = 1, groups = 1', 1, true), text)
  end)

  it('takes the thing itself', function()
    assert.equal(mf.help 'conv2d', mf.help(mf.conv2d))
    assert.equal(mf.help 'relu', mf.help(mf.relu))
    assert(mf.help(mf.Tensor.add_):find('a:add_', 1, true))
    assert(mf.help 'x:add_':find('writes into a', 1, true))
    assert.equal(mf.help 'nn.Linear', mf.help(mf.nn.Linear))
    assert.equal(mf.help 'optim.SGD', mf.help(mf.optim.SGD))
    assert.equal(mf.help 'StepLR', mf.help(mf.optim.lr_scheduler.StepLR))
    assert.equal(mf.help 'data.DataLoader', mf.help(mf.data.DataLoader))
    assert.equal(mf.help 'max', mf.help(mf.max))
  end)

  it('finds what is written in Lua, with its options', function()
    assert(mf.help(mf.cross_entropy):find '^mf.cross_entropy%(x, target')
    assert(mf.help 'nn.Linear':find('nn.Linear(in_features, out_features, {bias = true})', 1, true))
    assert(mf.help 'nn.Linear':find('y = x W^T + b', 1, true))
    assert(mf.help 'Conv2d':find 'groups = 1')
    assert(mf.help 'optim.AdamW':find 'weight_decay = 0.01')
    assert(mf.help 'optim.SGD':find 'nesterov = false')
    assert(mf.help 'StepLR':find('optim.lr_scheduler.StepLR(optimizer, step_size, {gamma = 0.1})', 1, true))
    assert(mf.help 'nn.CrossEntropyLoss':find 'label_smoothing = 0')
    assert.equal(mf.help 'relu', mf.help 'nn.functional.relu')
    assert.equal(mf.help 'relu', mf.help 'F.relu')
    assert.equal(mf.help 'relu', mf.help 'mf.relu')
    assert.equal(mf.help 'nn.Linear', mf.help 'mf.nn.Linear')
  end)

  it('knows what compiles', function()
    assert(mf.help(mf.compile):find('mf.compile(f, {name = ', 1, true), mf.help 'compile')
    assert(mf.help 'mf.scalar':find('mf.scalar(value)', 1, true))
    assert(mf.help 'nn.Graph':find('add_optimizer', 1, true))
    assert.equal(mf.help 'nn.Graph', mf.help(mf.nn.Graph))
  end)

  it('gives an overview', function()
    assert(mf.help():find 'mf.nn')
    assert.equal(mf.help(), mf.help(mf))
    assert(mf.help(mf.ones(2)):find 'Tensor')
  end)

  it('suggests a name', function()
    for wrong, right in pairs { sofmax = 'softmax', ['nn.Linaer'] = 'nn.Linear', Conv2D = 'Conv2d', ['x:ad'] = 'add',
      ['optim.Adamw'] = 'optim.AdamW' } do
      local ok, text = pcall(mf.help, wrong)
      assert.is_false(ok)
      assert(text:find(("nothing called '%s'; did you mean '%s'?"):format(wrong, right), 1, true), text)
    end
  end)

  it('refuses what has no name', function()
    for _, value in ipairs { 1, true, print, {}, '', 'zzzzzzzzzz', '%', 'nn.', 'foo.bar' } do
      local ok, text = pcall(mf.help, value)
      assert.is_false(ok)
      assert(text:find 'help: ', text)
    end
    assert.is_false((pcall(mf.help, nil)))
  end)
end)

describe('stubs for language servers', function()
  local folder

  setup(function()
    local p = io.popen 'mktemp -d'
    folder = p:read '*l'
    p:close()
    os.execute(('mkdir %s/op %s/bind && luajit src/op/collect.lua %s --isas v2 src/op/*.c lua/grad*.lua'):format(folder,
      folder, folder))
  end)
  teardown(function() os.execute('rm -r ' .. folder) end)

  it('are Lua, and have every op that is bound', function()
    local f = assert(io.open(folder .. '/moonflow.lua'))
    local text = f:read '*a'
    f:close()
    assert(loadstring(text, '=stubs'))
    for _, op in ipairs(mf._ops()) do
      assert(op.flags.hidden or text:find('mf.' .. op.name .. '(', 1, true), op.name)
    end
  end)
end)
