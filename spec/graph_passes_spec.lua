-- The table of passes: switches, MF_DUMP, and that a step does the same with each pass alone, with
-- none and with all, bit for bit but for the passes whose essays say otherwise.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function program()
  local i = 0
  while arg[i - 1] do i = i - 1 end
  return arg[i]
end

local function step_of(model, opt)
  return function(x, y)
    opt:zero_grad()
    local loss = mf.cross_entropy(model(x), y)
    loss:backward()
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    opt:step()
    return loss
  end
end

local Block = nn.Module:extend 'Block'
function Block:init()
  self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
  self.wide, self.back, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
end
function Block:forward(x)
  local parts = {}
  for k, part in ipairs(self.qkv(self.norm(x)):chunk(3, -1)) do
    parts[k] = part:unflatten(-1, { 2, 4 }):transpose(1, 2)
  end
  local y = mf.scaled_dot_product_attention(parts[1], parts[2], parts[3], { is_causal = true })
  x = x + mf.dropout(self.out(y:transpose(1, 2):flatten(2)), 0.1)
  x = x + self.back(mf.gelu(self.wide(x)))
  return self.head(x:mean(1))
end

local workloads = {
  mlp = {
    function() return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 4)) end,
    function(p) return optim.SGD(p, { lr = 0.1, momentum = 0.9, weight_decay = 1e-3 }) end,
    function() return mf.randn(5, 6) end,
  },
  cnn = {
    function()
      return nn.Sequential(nn.Conv2d(1, 4, 3, { bias = false }), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(36, 4))
    end,
    function(p) return optim.AdamW(p, { lr = 0.01 }) end,
    function() return mf.randn(5, 1, 8, 8) end,
  },
  transformer = { Block, function(p) return optim.Adam(p, { lr = 0.01, amsgrad = true }) end,
    function() return mf.randn(5, 3, 8) end },
}

-- Losses of 4 steps and the parameters after them, under these switches (nil: not compiled).
local function run(workload, passes)
  mf.manual_seed(5)
  local model = workload[1]()
  local step = step_of(model, workload[2](model:parameters()))
  if passes then step = mf.compile(step, { passes = passes }) end
  local values = {}
  for k = 1, 4 do
    local x, y = workload[3](), mf.randint(0, 4, { 5 })
    values[k] = step(x, y)
  end
  for _, p in ipairs(model:parameters()) do values[#values + 1] = p:detach():clone() end
  return values
end

local function switches(only)
  local off = {}
  for _, name in ipairs(mf._passes()) do off[name] = only == name end
  return off
end

local inexact = { layout = true, fuse_act = true, all = true }

describe('passes', function()
  for name, workload in pairs(workloads) do
    local cases = { all = {}, none = switches() }
    for _, pass in ipairs(mf._passes()) do cases['only ' .. pass] = switches(pass) end
    for case, passes in pairs(cases) do
      it('change nothing: ' .. name .. ', ' .. case, function()
        local want, got = run(workload), run(workload, passes)
        local within = name ~= 'transformer' and inexact[case:match '%S+$'] and 1e-4 or 0
        for k = 1, #want do
          assert(mf.allclose(want[k], got[k], { rtol = within, atol = within, equal_nan = true }), 'value ' .. k)
        end
      end)
    end
  end

  it('keep apart what a captured tensor held and holds', function()
    local w, v = mf.ones(2), mf.full({ 2 }, 5)
    local f = mf.compile(function()
      local old, before = w * 1, v:clone()
      w:add_(1)
      v:copy_(old)
      return old, before, v
    end)
    for k = 1, 3 do
      local old, before, now = f()
      assert.same({ k, k }, old:tolist())
      assert.same(k == 1 and { 5, 5 } or { k - 1, k - 1 }, before:tolist())
      assert.same({ k + 1, k + 1 }, w:tolist())
      assert.same({ k, k }, v:tolist())
      assert.same({ k, k }, now:tolist())
    end
  end)

  it('keep the dtype of what is computed in place', function()
    local function f(x, y)
      local z = x * 3
      z:mul_(y):add_(1):div_(y)
      return z
    end
    local x, y = mf.full({ 4 }, 1 / 3), mf.full({ 4 }, 0.1, { dtype = mf.float64 })
    local z = mf.compile(f)(x, y)
    assert.equal(mf.float32, z.dtype)
    assert(mf.equal(f(x, y), z))
  end)

  it('have switches', function()
    local function f(x) return mf.cat { x * 2, x * 2 } end
    local function count(step)
      step(mf.ones(2))
      return select(2, tostring(step):gsub('= mul', ''))
    end
    assert.equal(1, count(mf.compile(f)))
    assert.equal(2, count(mf.compile(f, { passes = { cse = false } })))
    assert.equal(1, count(mf.compile(f, { passes = { cse = true, dce = false } })))
    for passes, why in pairs {
      [{ cze = false }] = "there is no option 'cze'; did you mean 'cse'?",
      [{ cse = 1 }] = 'cse must be a boolean, is 1',
    } do
      local ok, message = pcall(mf.compile, f, { passes = passes })
      assert(not ok and message:find(why, 1, true), message)
    end
    local ok, message = pcall(mf._graph_pass, 'graph g\nreturn\n', 'dce,cze')
    assert(not ok and message:find('there is no pass cze', 1, true), message)
  end)

  it('are shown by MF_DUMP', function()
    local function stages(list)
      local path = os.tmpname()
      local f = assert(io.open(path, 'w'))
      f:write "local mf = require 'moonflow'\nmf.compile(function(x) return x + 1, x + 1 end)(mf.ones(1))\n"
      f:close()
      local pipe = io.popen(("MF_DUMP=%s '%s' %s 2>&1"):format(list, program(), path))
      local text, names = pipe:read '*a', {}
      pipe:close()
      os.remove(path)
      for name in text:gmatch '%-%- ([^\n]*)\n[gp]%w+ "?step' do names[#names + 1] = name end
      return table.concat(names, ',')
    end
    local all = 'pass ' .. table.concat(mf._passes(), ',pass ')
    assert.equal('graph', stages 'graph')
    assert.equal(all, stages 'pass')
    assert.equal('graph,' .. all, stages 'graph,pass')
    assert.equal('plan', stages 'plan')
    assert.equal('graph,' .. all .. ',plan', stages 'graph,pass,plan')
    assert.equal('', stages 'gra')
  end)
end)
