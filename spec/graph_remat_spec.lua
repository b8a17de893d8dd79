-- The passes remat and remat_budget: what the backward needs is computed anew in it, where the user marked it
-- or to a memory budget, and nothing else changes. mf.utils.checkpoint in eager calls.
local mf = require 'moonflow'
local nn = mf.nn

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok and tostring(message):find(text, 1, true), tostring(message))
end

local function remat(text) return (mf._graph_pass(text, 'remat,dce')) end

describe('remat', function()
  it('computes marked segments anew before those who use them from outside', function()
    assert.equal([[
graph step
%0 = input x: float32[4, 3]
%1 = capture w: float32[3, 3]
%2 = matmul(%0, %1): float32[4, 3]
%3 = tanh(%2): float32[4, 3]
%4 = dropout(%3, generator=7): float32[4, 3]
%5 = sum(%4, dim=[0, 1]): float32[]
%6 = spread(%5, size=[4, 3], dim=[0, 1], keepdim=false): float32[4, 3]
%7 = dropout_backward(%6, p=0.5, generator=7): float32[4, 3]
%8 = matmul(%0, %1): float32[4, 3]
%9 = tanh(%8): float32[4, 3]
%10 = tanh_backward(%7, %9): float32[4, 3]
%11 = mul(%10, %8): float32[4, 3]
return %5, %11
]], remat [[
graph step
%0 = input x: float32[4, 3]
%1 = capture w: float32[3, 3]
%2 = matmul(%0, %1): float32[4, 3] {remat 1}
%3 = tanh(%2): float32[4, 3] {remat 1}
%4 = dropout(%3, p=0.5, generator=7): float32[4, 3] {remat 1, kept}
%5 = sum(%4, dim=[0, 1]): float32[]
%6 = spread(%5, size=[4, 3], dim=[0, 1], keepdim=false): float32[4, 3]
%7 = dropout_backward(%6, p=0.5, generator=7): float32[4, 3]
%8 = tanh_backward(%7, %3): float32[4, 3]
%9 = mul(%8, %2): float32[4, 3]
return %5, %9
]])
  end)

  it('draws again what was drawn, and goes back to what is kept', function()
    assert.equal([[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4]
%2 = dropout(%1, generator=3): float32[4]
%3 = neg(%2): float32[4]
%4 = sin(%3): float32[4]
%5 = exp(%0): float32[4]
%6 = dropout(%5, generator=3): float32[4]
%7 = add(%4, %6): float32[4]
%8 = cos(%3): float32[4]
%9 = mul(%7, %8): float32[4]
return %9
]], remat [[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4] {remat 1}
%2 = dropout(%1, generator=3): float32[4] {remat 1}
%3 = neg(%2): float32[4] {remat 1, kept}
%4 = cos(%3): float32[4] {remat 2}
%5 = sin(%3): float32[4] {remat 2, kept}
%6 = add(%5, %2): float32[4]
%7 = mul(%6, %4): float32[4]
return %7
]])
  end)

  it('writes statistics once', function()
    local types = 'float32[4, 2], float32[2], float32[2], float32[2], float32[2]'
    local out = remat(([[
graph step
%0 = input x: float32[4, 2]
%1 = capture mean: float32[2]
%2 = capture var: float32[2]
%3, %4, %5, %6, %7 = batch_norm(%0, %1, %2, training=true): TYPES {remat 1}
%8 = relu(%3): float32[4, 2] {remat 1, kept}
%9 = mul(%8, %3): float32[4, 2]
write %1 = %6
write %2 = %7
return %9
]]):gsub('TYPES', types))
    assert.equal(2, select(2, out:gsub('batch_norm', '')))
    assert(out:find('write %1 = %6\nwrite %2 = %7\n', 1, true), out)
  end)

  it('has marks that read back, and says what is wrong with one', function()
    local text = 'graph step\n%0 = input x: float32[4]\n%1 = exp(%0): float32[4] {remat 2, kept}  # a.lua:1\n'
      .. 'return %1\n'
    assert.equal(text, (mf._graph_pass(text, '')))
    fails('line 3', mf._graph_pass, text:gsub('remat 2', 'remat 0'), '')
    fails('line 3', mf._graph_pass, text:gsub('remat', 'remit'), '')
    fails('line 2', mf._graph_pass, text:gsub('x: float32%[4%]', '%0 {remat 1}'), '')
  end)

  it('keeps what the passes before it make of a marked op', function()
    local out = mf._graph_pass([[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4]
%2 = exp(%0): float32[4] {remat 1}
%3 = exp(%0): float32[4] {remat 2}
%4 = neg(%2): float32[4] {remat 1, kept}
%5 = neg(%3): float32[4] {remat 2, kept}
%6 = add(%1, %4): float32[4]
%7 = add(%6, %5): float32[4]
return %7
]], 'cse')
    assert.equal([[
graph step
%0 = input x: float32[4]
%1 = exp(%0): float32[4]
%2 = neg(%1): float32[4] {remat 1, kept}
%3 = add(%1, %2): float32[4]
%4 = add(%3, %2): float32[4]
return %4
]], out)
  end)
end)

-- -- Whole steps ----------------------------------------------------------------------------------

local Block = nn.Module:extend 'Block'
function Block:init()
  self.norm, self.one, self.two = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)
  self.drop, self.act = nn.Dropout(0.2), nn.GELU()
end
function Block:forward(x) return x + self.drop(self.two(self.act(self.one(self.norm(x))))) end

local Conv = nn.Module:extend 'Conv'
function Conv:init(n) self.conv, self.norm = nn.Conv2d(n, 8, 3, { padding = 1 }), nn.BatchNorm2d(8) end
function Conv:forward(x) return self.norm(self.conv(x)):relu() end

-- The same with the normalisation behind.
local Behind = Block:extend 'Behind'
function Behind:forward(x) return self.norm(x + self.drop(self.two(self.act(self.one(x))))) end

local models = {
  ['blocks that normalise behind'] = function()
    local list = {}
    for k = 1, 6 do list[k] = Behind() end
    list[7] = nn.Linear(16, 3)
    return nn.Sequential(unpack(list)), mf.randn(32, 16)
  end,
  blocks = function()
    local list = {}
    for k = 1, 6 do list[k] = Block() end
    list[7] = nn.Linear(16, 3)
    return nn.Sequential(unpack(list)), mf.randn(32, 16)
  end,
  convolutions = function()
    local list = { Conv(3) }
    for k = 2, 6 do list[k] = Conv(8) end
    list[7], list[8] = nn.Flatten(), nn.Linear(8 * 64, 3)
    return nn.Sequential(unpack(list)), mf.randn(6, 3, 8, 8)
  end,
}

-- Three steps; o: options of compile, `mark` says how the model is marked, `eager` does without compile. The
-- losses, parameters and statistics as a text, and the bytes of the block.
local function run(name, o)
  mf.manual_seed(4)
  local model, x = models[name]()
  local y = mf.randint(0, 3, { x:size(0) })
  local opt = mf.optim.SGD(model:parameters(), { lr = 0.01, momentum = 0.9 })
  if o.mark then o.mark(model) end
  local function f(a, b)
    opt:zero_grad()
    local loss = mf.cross_entropy(model(a), b)
    loss:backward()
    opt:step()
    return loss
  end
  local step = o.eager and f or mf.compile(f, { memory_budget = o.budget, passes = o.passes })
  local out = {}
  for k = 1, 3 do out[k] = ('%.17g'):format(step(x, y):item()) end
  for key, t in pairs(model:state_dict()) do out[#out + 1] = key .. ('%.17g'):format(t:double():sum():item()) end
  table.sort(out)
  local report = not o.eager and step.age[1].job:memory() or ''
  return table.concat(out, ' '), tonumber(report:match 'block (%d+)'), step
end

local function mark_blocks(model)
  for k = 0, 5 do model[k].activation_checkpointing = true end
end

describe('checkpoints', function()
  for name in pairs(models) do
    it(('leave the numbers as they are, and take less memory: %s'):format(name), function()
      -- in a segment gelu's input is kept for no gradient, so that fuse_act, which changes last bits, takes it
      local exact = { fuse_act = false }
      local want, bytes = run(name, { passes = exact })
      local got, less, step = run(name, { mark = mark_blocks, passes = exact })
      assert.equal(want, got)
      assert(less < 0.8 * bytes, ('%d of %d'):format(less, bytes))
      assert(not step.age[1].job:text():find('{remat', 1, true))
      local plain = { passes = {} }
      for _, pass in ipairs(mf._passes()) do plain.passes[pass] = false end
      assert.equal((run(name, { eager = true })), (run(name, plain)))
      plain.passes.remat, plain.passes.dce, plain.mark = true, true, mark_blocks
      assert.equal((run(name, plain)), (run(name, { eager = true, mark = mark_blocks })))
      assert.equal((run(name, plain)), (run(name, { eager = true })))
    end)
  end

  it('have a switch', function()
    local _, bytes = run('blocks', {})
    local _, same = run('blocks', { mark = mark_blocks, passes = { remat = false } })
    assert.equal(bytes, same)
  end)

  it('are there for functions and nn.Graph', function()
    local block, x = Block(), mf.randn(3, 16):requires_grad_(true)
    local function gradients(f)
      mf.manual_seed(8)
      block:zero_grad()
      x.grad = nil
      local y, z = f(x)
      ;(z and y:exp() + z or y:exp()):sum():backward()
      return { x.grad, block.one.weight.grad, block.norm.bias.grad }
    end
    local function f(v) return block(v), v * 2 end
    for _, inner in ipairs { f, block } do
      local want, got = gradients(inner), gradients(function(v) return mf.utils.checkpoint(inner, v) end)
      for k, g in ipairs(want) do assert(mf.equal(g, got[k]), tostring(k)) end
    end
    x:requires_grad_(false) -- what the function captures has gradients all the same
    for _, inner in ipairs { f, block } do
      local want, got = gradients(inner), gradients(function(v) return mf.utils.checkpoint(inner, v) end)
      assert.is_nil(got[1])
      for k = 2, 3 do assert(mf.equal(want[k], got[k]), tostring(k)) end
    end
    mf.utils.checkpoint(function(v) return v * 2 end, x):sum():backward() -- with nothing that has one
    local Train = nn.Graph:extend 'Train'
    function Train:init(model)
      self.model = model
      self.config:activation_checkpointing(model)
      self.config:memory_budget(1e9)
    end
    function Train:build(v) return self.model(v):sum() end
    mf.manual_seed(8)
    local sum = Train(block)(x:detach())
    assert.equal(true, block.activation_checkpointing)
    block.activation_checkpointing = nil
    mf.manual_seed(8)
    local want = block(x):sum():item()
    assert(math.abs(want - sum:item()) < 1e-5 * math.abs(want)) -- gelu behind linear is oneDNN's there
  end)

  it('leave gradients of parameters to mf.grad, and say what changed in between', function()
    local block, x = Block(), mf.randn(3, 16)
    mf.manual_seed(8)
    local want = mf.grad(block(x):sum(), block:parameters())
    mf.manual_seed(8)
    local got = mf.grad(mf.utils.checkpoint(block, x):sum(), block:parameters())
    for k, g in ipairs(want) do assert(mf.equal(g, got[k])) end
    local loss = mf.utils.checkpoint(block, x):sum()
    mf.no_grad(function() block.one.bias:add_(1) end)
    fails('checkpoint', function() loss:backward() end)
    fails('function or a module', mf.utils.checkpoint, 3)
    fails('is 3', function()
      local G = nn.Graph:extend 'G'
      function G:init() self.config:activation_checkpointing(3) end
      G()
    end)
  end)

  it('hold no more than their arguments', function()
    local function held(mark)
      mf.manual_seed(1)
      local model, x = models.blocks()
      if mark then mark_blocks(model) end
      collectgarbage()
      collectgarbage()
      local before = mf.memory_stats().in_use
      local y = model(mf.cat { x, x, x, x, x, x, x, x })
      collectgarbage()
      collectgarbage()
      return mf.memory_stats().in_use - before, y
    end
    assert(held(true) < 0.5 * held(false))
  end)
end)

describe('remat_budget', function()
  it('drops what is cheap, and leaves products', function()
    local text = [[
graph step
%0 = input x: float32[64, 16]
%1 = capture w: float32[16, 16]
%2 = matmul(%0, %1): float32[64, 16]
%3 = gelu(%2): float32[64, 16]
%4 = matmul(%3, %1): float32[64, 16]
%5 = gelu(%4): float32[64, 16]
%6 = matmul(%5, %1): float32[64, 16]
%7 = sum(%6, dim=[0, 1]): float32[]
%8 = spread(%7, size=[64, 16], dim=[0, 1], keepdim=false): float32[64, 16]
%9 = linear_weight(%8, %5): float32[16, 16]
%10 = matmul(%8, %1): float32[64, 16]
%11 = gelu_backward(%10, %4): float32[64, 16]
%12 = linear_weight(%11, %3): float32[16, 16]
%13 = matmul(%11, %1): float32[64, 16]
%14 = gelu_backward(%13, %2): float32[64, 16]
%15 = linear_weight(%14, %0): float32[16, 16]
return %7, %9, %12, %15
]]
    local pass = 'remat_budget,dce'
    assert.equal(text, (mf._graph_pass(text, pass, nil, 1e6)))
    assert.equal([[
graph step
%0 = input x: float32[64, 16]
%1 = capture w: float32[16, 16]
%2 = matmul(%0, %1): float32[64, 16]
%3 = gelu(%2): float32[64, 16]
%4 = matmul(%3, %1): float32[64, 16]
%5 = gelu(%4): float32[64, 16]
%6 = matmul(%5, %1): float32[64, 16]
%7 = sum(%6, dim=[0, 1]): float32[]
%8 = spread(%7, size=[64, 16], dim=[0, 1], keepdim=false): float32[64, 16]
%9 = linear_weight(%8, %5): float32[16, 16]
%10 = matmul(%8, %1): float32[64, 16]
%11 = gelu_backward(%10, %4): float32[64, 16]
%12 = gelu(%2): float32[64, 16]
%13 = linear_weight(%11, %12): float32[16, 16]
%14 = matmul(%11, %1): float32[64, 16]
%15 = gelu_backward(%14, %2): float32[64, 16]
%16 = linear_weight(%15, %0): float32[16, 16]
return %7, %9, %13, %16
]], (mf._graph_pass(text, pass, nil, 20000)))
    fails('at least', mf._graph_pass, text, pass, nil, 1000)
  end)

  it('makes a normalisation again from the sum that it is of', function()
    assert.equal([[
graph step
%0 = input x: float32[64, 16]
%1 = capture w: float32[16, 16]
%2 = matmul(%0, %1): float32[64, 16]
%3, %4 = add_norm(%0, %2, normalized_shape=[16], centre=true, eps=0.01): float32[64, 16], float32[64, 16]
%5 = matmul(%3, %1): float32[64, 16]
%6 = gelu(%5): float32[64, 16]
%7 = matmul(%6, %1): float32[64, 16]
%8 = gelu(%7): float32[64, 16]
%9 = matmul(%8, %1): float32[64, 16]
%10 = layer_norm(%4, normalized_shape=[16], eps=0.01): float32[64, 16]
%11 = mul(%9, %10): float32[64, 16]
%12 = mul(%11, %4): float32[64, 16]
return %12
]], (mf._graph_pass([[
graph step
%0 = input x: float32[64, 16]
%1 = capture w: float32[16, 16]
%2 = matmul(%0, %1): float32[64, 16]
%3, %4 = add_norm(%0, %2, normalized_shape=[16], centre=true, eps=0.01): float32[64, 16], float32[64, 16]
%5 = matmul(%3, %1): float32[64, 16]
%6 = gelu(%5): float32[64, 16]
%7 = matmul(%6, %1): float32[64, 16]
%8 = gelu(%7): float32[64, 16]
%9 = matmul(%8, %1): float32[64, 16]
%10 = mul(%9, %3): float32[64, 16]
%11 = mul(%10, %4): float32[64, 16]
return %11
]], 'remat_budget,dce', nil, 17000)))
  end)

  for name in pairs(models) do
    it(('keeps the budget and the numbers, or says the least: %s'):format(name), function()
      local want, bytes = run(name, {})
      local least
      for _, part in ipairs { 1.5, 0.9, 0.75, 0.66 } do
        local budget = math.floor(bytes * part)
        local got, less = run(name, { budget = budget })
        assert.equal(want, got)
        assert(less <= budget, ('%d of %d'):format(less, budget))
        least = less
      end
      local ok, message = pcall(run, name, { budget = 2000 })
      local possible = tonumber(message:match 'memory_budget is 2000 bytes; .* at least (%d+) beside')
      assert(not ok and possible and possible <= least + 64, message)
      assert.equal(want, (run(name, { budget = possible })))
      fails('at least', run, name, { budget = possible - 1 })
    end)
  end

  it('takes a number of bytes', function()
    fails('memory_budget', mf.compile, function() end, { memory_budget = -1 })
  end)
end)
