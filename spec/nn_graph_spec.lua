-- nn.Graph: a step as a class. What it does equals the loop that it stands for.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function net() return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)) end

local Training = nn.Graph:extend 'Training'
function Training:init(model, opt, schedule)
  self.model = model
  self:add_optimizer(opt, { lr_sch = schedule })
end
function Training:build(x, y)
  local loss = mf.cross_entropy(self.model(x), y)
  loss:backward()
  return loss
end

local function parts()
  mf.manual_seed(2)
  local model = net()
  local opt = optim.AdamW(model:parameters(), { lr = 0.05 })
  return model, opt, optim.lr_scheduler.StepLR(opt, 2, { gamma = 0.5 })
end

local function batch(i)
  mf.manual_seed(10 + i)
  return mf.randn(5, 4), mf.randint(0, 3, { 5 })
end

-- Losses of the loop written out, from batch `from` on.
local function loop(model, opt, schedule, from, to)
  local losses = {}
  for i = from, to do
    local x, y = batch(i)
    opt:zero_grad()
    local loss = mf.cross_entropy(model(x), y)
    loss:backward()
    opt:step()
    schedule:step()
    losses[#losses + 1] = loss:item()
  end
  return losses
end

local function calls(g, from, to)
  local losses = {}
  for i = from, to do losses[#losses + 1] = g(batch(i)):item() end
  return losses
end

local function same(a, b)
  for name, t in pairs(a) do assert(mf.equal(t, b[name]), name) end
end

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok, 'no error: ' .. text)
  assert(tostring(message):find(text, 1, true), message)
end

describe('nn.Graph', function()
  it('trains as the loop does, and steps schedulers once a call', function()
    local model, opt, schedule = parts()
    local want = loop(model, opt, schedule, 1, 7)
    local other, opt2, schedule2 = parts()
    local g = Training(other, opt2, schedule2)
    assert.same(want, calls(g, 1, 7))
    same(model:state_dict(), other:state_dict())
    assert.equal(opt.param_groups[1].lr, opt2.param_groups[1].lr)
    assert.equal(0.05 / 8, opt2.param_groups[1].lr)
    assert.equal(7, schedule2.last_epoch)
  end)

  it('goes on from its state, also after it was compiled', function()
    local g = Training(parts())
    calls(g, 1, 3)
    local model, opt, schedule = parts()
    loop(model, opt, schedule, 1, 3)
    local want = loop(model, opt, schedule, 4, 5)
    for _, before in ipairs { 0, 2 } do
      local m = net()
      local o = optim.AdamW(m:parameters())
      local h = Training(m, o, optim.lr_scheduler.StepLR(o, 5))
      calls(h, 1, before)
      h:load_state_dict(g:state_dict())
      assert.same(want, calls(h, 4, 5))
      same(model:state_dict(), m:state_dict())
    end
  end)

  it('evaluates without an optimiser, under another mode of its modules', function()
    local Evaluation = nn.Graph:extend 'Evaluation'
    function Evaluation:init(model) self.model = model end
    function Evaluation:build(x) return self.model(x), { best = self.model(x):argmax(1) } end
    local model = net()
    local g, x = Evaluation(model), mf.randn(5, 4)
    model:eval()
    local y, r = g(x)
    assert(mf.equal(model(x), y))
    assert(mf.equal(model(x):argmax(1), r.best))
    assert.same({ optimizers = {}, schedulers = {} }, (function(d) d.model = nil return d end)(g:state_dict()))
  end)

  it('takes several optimisers, clips in build', function()
    local Two = nn.Graph:extend 'Two'
    function Two:init()
      self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
      self:add_optimizer(optim.SGD(self.a:parameters(), { lr = 0.1 }))
      self:add_optimizer(optim.SGD(self.b:parameters(), { lr = 0.2 }))
    end
    function Two:build(x)
      local loss = self.b(self.a(x)):square():sum()
      loss:backward()
      return loss, nn.utils.clip_grad_norm_(self.a:parameters(), 0)
    end
    local g = Two()
    local a, b = g.a.weight:clone(), g.b.weight:clone()
    local _, norm = g(mf.ones(3, 2))
    assert(norm:item() > 0)
    assert(mf.equal(a, g.a.weight))
    assert(not mf.equal(b, g.b.weight))
  end)

  it('prints its modules, optimisers and graphs', function()
    local g = Training(parts())
    local text = tostring(g)
    assert(text:find '^Training%(\n  %(model%): Sequential%(\n    %(0%): Linear', text)
    assert(text:find('AdamW', 1, true), text)
    assert(not text:find('cross_entropy', 1, true))
    g(batch(1))
    text = tostring(g)
    assert(text:find('cross_entropy', 1, true) and text:find('Training', 1, true), text)
    assert.equal('class Training', tostring(Training))
  end)

  it('computes products in bfloat16 when told so', function()
    local G = nn.Graph:extend 'G'
    function G:init(on) self.config:enable_amp(on) end
    function G:build(x) return x:matmul(x) end
    local x = mf.full({ 2, 2 }, 1 + 2 ^ -9) -- which bfloat16 does not have
    local whole, half = G(false)(x), G(true)(x)
    assert.equal(2 * (1 + 2 ^ -9) ^ 2, whole[0][0]:item())
    assert.equal(mf._has_bf16() and 2 or whole[0][0]:item(), half[0][0]:item())
  end)

  it('switches passes, and says what is not there', function()
    local G = nn.Graph:extend 'G'
    function G:init(f) f(self.config) end
    function G:build(x) return x + x, (x + 1) * (x + 1), (x + 1):relu():tanh() end
    local function nodes(f)
      local g = G(f)
      local y = { g(mf.ones(2)) }
      assert.same({ 2, 2 }, y[1]:tolist())
      assert.same({ 4, 4 }, y[2]:tolist())
      local _, n = tostring(g):gsub('add', '')
      return n
    end
    local with = nodes(function(c) c:allow_fuse(false) end)
    local without = nodes(function(c)
      c:allow_fuse(false)
      c:set_pass('cse', false)
    end)
    assert(with < without, with .. ' ' .. without)
    for name, text in pairs { enable_zero = 'sharding' } do
      fails(text .. ' ', G, function(c) c[name](c) end)
      G(function(c) c[name](c, false) end)
    end
    fails("there is no option 'enable_map'; did you mean 'enable_amp'", G, function(c) c:enable_map() end)
    fails('is called, not set', G, function(c) c.enable_amp = true end)
    fails('no option', G, function(c) c.amp = true end)
    fails("no option 'cze'; did you mean 'cse'", G, function(c) c:set_pass 'cze' end)
  end)

  it('refuses what it cannot do', function()
    local model, opt, schedule = parts()
    fails('is extended', nn.Graph)
    fails('has no build', nn.Graph:extend 'Empty'(), mf.ones(1))
    local function adding(...)
      local args, n = { ... }, select('#', ...)
      local A = nn.Graph:extend 'A'
      function A:init() self:add_optimizer(unpack(args, 1, n)) end
      A()
    end
    fails('an optimiser is needed', adding, model)
    fails('a scheduler over this optimiser', adding, opt, { lr_sch = optim.SGD(model:parameters()) })
    local _, other = parts()
    fails('a scheduler over this optimiser', adding, other, { lr_sch = schedule })
    fails('steps by a value', adding, opt, { lr_sch = optim.lr_scheduler.ReduceLROnPlateau(opt) })
    fails("did you mean 'lr_sch'", adding, opt, { lr_sh = schedule })
    local g = Training(model, opt, schedule)
    fails('there already', g.add_optimizer, g, opt)
    g(batch(1))
    fails('before the first call', g.add_optimizer, g, other)
    fails('before the first call', g.config.set_pass, g.config, 'cse', false)
    fails('there is no model', g.load_state_dict, g, { optimizers = {}, schedulers = {} })
    fails('a table is needed', g.load_state_dict, g, 3)
    local state = g:state_dict()
    state.optimizers = {}
    fails('it has 0 optimizers, the graph 1', g.load_state_dict, g, state)
    state.modle = {}
    fails("did you mean 'model'", g.load_state_dict, g, state)
  end)
end)
