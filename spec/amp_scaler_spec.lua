-- mf.amp.GradScaler: PyTorch's rules, eagerly and inside of a compiled step.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local function fails(text, f, ...)
  local ok, message = pcall(f, ...)
  assert(not ok, 'no error: ' .. text)
  assert(tostring(message):find(text, 1, true), tostring(message))
end

-- A parameter whose gradient is the input, and a step with a scaler.
local function rig(make, options, how)
  local w = mf.tensor({ 1, 2 }, { requires_grad = true })
  local opt = make { w }
  local scaler = mf.amp.GradScaler(options)
  local function f(x)
    opt:zero_grad()
    scaler:scale((w * x):sum(1):mean()):backward()
    scaler:step(opt)
    scaler:update()
    return w:clone()
  end
  return { w = w, opt = opt, scaler = scaler, step = how and mf.compile(f, how) or f }
end

local function sgd(p) return optim.SGD(p, { lr = 0.5 }) end
local function adam(p) return optim.AdamW(p, { lr = 0.25 }) end

local inf = math.huge
local ways = { eager = false, compiled = {}, ['compiled, in micro-batches'] = { gradient_accumulation_steps = 2 } }

for name, how in pairs(ways) do
  describe('GradScaler, ' .. name, function()
    it('takes the scale out of gradients, and leaves steps out that are not finite', function()
      local r = rig(sgd, { init_scale = 8, growth_interval = 2 }, how)
      local good, bad = mf.tensor { { 1, 2 }, { 3, 2 } }, mf.tensor { { 1, inf }, { 3, 2 } }
      -- the scale and the count of good steps after each call: by hand, as PyTorch's update does
      r.step(good)
      assert.same({ 1 - 0.5 * 2, 2 - 0.5 * 2 }, r.w:tolist())
      assert.equal(8, r.scaler:get_scale())
      r.step(good)
      assert.equal(16, r.scaler:get_scale()) -- two good ones
      assert.same({ -1, 0 }, r.w:tolist())
      r.step(bad)
      assert.same({ -1, 0 }, r.w:tolist())
      assert.equal(8, r.scaler:get_scale())
      r.step(good)
      assert.equal(8, r.scaler:get_scale()) -- it counts anew
      r.step(mf.tensor { { 0 / 0, 1 }, { 1, 1 } })
      assert.equal(4, r.scaler:get_scale())
      assert.same({ -2, -1 }, r.w:tolist())
    end)

    it('a step that was left out is not counted, and leaves the optimiser as it was', function()
      local a, b = rig(adam, { init_scale = 4 }, how), rig(adam, { init_scale = 4 }, how)
      local good, other = mf.tensor { { 1, 2 }, { 3, 2 } }, mf.tensor { { 2, -1 }, { 1, 1 } }
      a.step(good)
      b.step(good)
      a.step(mf.full({ 2, 2 }, inf))
      a.step(other)
      b.step(other)
      assert(mf.equal(a.w:detach(), b.w:detach()))
      local s, t = a.opt:state_dict().state[0], b.opt:state_dict().state[0]
      assert.equal(2, s.step:item())
      for key in pairs(t) do assert(mf.equal(t[key], s[key]), key) end
    end)

    it('a first step that is left out leaves nothing behind', function()
      local a, b = rig(adam, { init_scale = 4 }, how), rig(adam, { init_scale = 4 }, how)
      a.step(mf.full({ 2, 2 }, inf))
      a.step(mf.ones { 2, 2 })
      b.step(mf.ones { 2, 2 })
      assert(mf.equal(a.w:detach(), b.w:detach()))
    end)

    it('resumes from a state dict', function()
      local a = rig(sgd, { init_scale = 8, growth_interval = 3 }, how)
      for _ = 1, 2 do a.step(mf.ones { 2, 2 }) end
      local b = rig(sgd, { init_scale = 2 }, how)
      b.step(mf.ones { 2, 2 })
      b.scaler:load_state_dict(a.scaler:state_dict())
      b.step(mf.ones { 2, 2 })
      assert.equal(16, b.scaler:get_scale())
    end)
  end)
end

-- Parameters and scale after each batch, the second and fourth of which are not finite, as torch.amp.GradScaler
-- ('cpu', init_scale 8, growth_interval 2) and torch.optim leave them.
local batches = { { { 1, 2 }, { 3, 2 } }, { { 1, inf }, { 3, 2 } }, { { 2, -1 }, { 1, 1 } }, { { 0 / 0, 1 }, { 1, 1 } },
  { { 0.5, 1 }, { 1, 3 } } }
local scales = { 8, 4, 4, 2, 2 }
local torch = {
  { 'SGD', { lr = 0.5, momentum = 0.9, dampening = 0.5 },
    { { 0, 1 }, { 0, 1 }, { -1.275, 0.1 }, { -1.275, 0.1 }, { -2.61, -1.21 } } },
  { 'Adam', { lr = 0.25, amsgrad = true },
    { { 0.75, 1.75 }, { 0.75, 1.75 }, { 0.504356, 1.582569 }, { 0.504356, 1.582569 }, { 0.276568, 1.378069 } } },
  { 'AdamW', { lr = 0.25 },
    { { 0.7475, 1.745 }, { 0.7475, 1.745 }, { 0.499988, 1.573123 }, { 0.499988, 1.573123 }, { 0.27095, 1.364689 } } },
  { 'RMSprop', { lr = 0.1, momentum = 0.5, centered = true }, { { -0.005038, 0.994962 }, { -0.005038, 0.994962 },
    { -1.115442, 0.492443 }, { -1.115442, 0.492443 }, { -1.964043, -0.476609 } } },
  { 'Adagrad', { lr = 0.5, lr_decay = 0.1 },
    { { 0.5, 1.5 }, { 0.5, 1.5 }, { 0.227273, 1.5 }, { 0.227273, 1.5 }, { 0.107544, 1.205372 } } },
  { 'Adadelta', { lr = 1 },
    { { 0.996838, 1.996838 }, { 0.996838, 1.996838 }, { 0.994064, 1.996838 }, { 0.994064, 1.996838 },
      { 0.992459, 1.993598 } } },
  { 'Adamax', { lr = 0.25 },
    { { 0.75, 1.75 }, { 0.75, 1.75 }, { 0.532677, 1.63146 }, { 0.532677, 1.63146 }, { 0.360747, 1.464486 } } },
}

-- What is left after each batch.
local function calls(r)
  return function(xs)
    local results = {}
    for i, x in ipairs(xs) do results[i] = r.step(x) end
    return results
  end
end
local function loop(r)
  return function(xs)
    local results, i = {}, 0
    for w in r.step:over(function() i = i + 1 return xs[i] end) do results[#results + 1] = w end
    return results
  end
end

local how_called = { eager = { false, calls }, compiled = { {}, calls },
  ['in a loop that does not wait'] = { {}, loop } }
for name, way in pairs(how_called) do
  describe('GradScaler with torch.optim, ' .. name, function()
    for _, case in ipairs(torch) do
      it(case[1], function()
        for before = 0, 1 do
          local r = rig(function(p) return optim[case[1]](p, case[2]) end, { init_scale = 8, growth_interval = 2 },
            way[1])
          local xs = {}
          for _ = 1, before do xs[1] = mf.full({ 2, 2 }, inf) end
          for _, x in ipairs(batches) do xs[#xs + 1] = mf.tensor(x) end
          local results = way[2](r)(xs)
          assert.equal(#xs, #results)
          for i, want in ipairs(case[3]) do
            local got = results[i + before]:detach()
            assert(mf.allclose(got, mf.tensor(want), { rtol = 1e-5, atol = 2e-6 }), ('%d: %s'):format(i, tostring(got)))
          end
          if before == 0 then assert.equal(scales[#scales], r.scaler:get_scale()) end
          assert.equal(3, r.opt:state_dict().state[0].step:item())
        end
      end)
    end
  end)
end

describe('GradScaler', function()
  it('copies nothing in a compiled step', function()
    local r = rig(adam, {}, {})
    r.step(mf.ones { 2, 2 })
    local text = tostring(r.step)
    assert.is_truthy(text:find('adam_(', 1, true))
    assert.is_nil(text:match 'clone%([^\n]*float32%[2%][^\n]*amp.lua')
    local _, wheres = text:gsub('where%(', '')
    assert.equal(3, wheres) -- of scale and tracker
  end)

  local sparse = {
    SGD = function(p) return optim.SGD(p, { lr = 0.5 }) end,
    ['SGD with momentum'] = function(p) return optim.SGD(p, { lr = 0.5, momentum = 0.9, dampening = 0.3 }) end,
    Adam = function(p) return optim.Adam(p, { lr = 0.25 }) end,
    Adagrad = function(p) return optim.Adagrad(p, { lr = 0.25, lr_decay = 0.1 }) end,
  }
  for name, make in pairs(sparse) do
    it('leaves steps with row-sparse gradients out, in a loop too: ' .. name, function()
      -- the factors of six steps: bad first, amid and last
      local function run(way)
        mf.manual_seed(3)
        local table = nn.Embedding(9, 4, { sparse = true })
        local opt, scaler = make(table:parameters()), mf.amp.GradScaler { init_scale = 4 }
        local function f(ids, scale)
          opt:zero_grad()
          scaler:scale((table(ids):square() * scale):sum()):backward()
          scaler:step(opt)
          scaler:update()
          return table.weight:sum()
        end
        local step = way == 'eager' and f or mf.compile(f)
        local n, factors = 0, { inf, 1, 2, inf, 0.5, 1, inf }
        local function batch()
          n = n + 1
          if n > #factors then return nil end
          return mf.tensor({ n % 9, 2 * n % 9, 2 }, { dtype = mf.int64 }), mf.full({}, factors[n])
        end
        if way == 'loop' then
          for w in step:over(batch) do assert.truthy(w) end
        else
          for ids, factor in batch do step(ids, factor) end
        end
        local list = { table.weight:detach() }
        for _, t in pairs(opt:state_dict().state[0] or {}) do list[#list + 1] = t end
        return list, scaler:get_scale(), way ~= 'eager' and tostring(step)
      end
      local want, scale = run 'eager'
      for _, way in ipairs { 'compiled', 'loop' } do
        local got, also, text = run(way)
        assert.equal(scale, also)
        assert.equal(#want, #got)
        assert.equal(0.5, scale)
        for k = 1, #want do assert(mf.equal(want[k], got[k]), way .. k) end
        assert.is_nil(text:find('clone', 1, true), text) -- nothing is kept to be put back
      end
    end)
  end

  it('clips what was unscaled', function()
    for _, how in ipairs { false, true } do
      local w = mf.tensor({ 0, 0 }, { requires_grad = true })
      local opt, scaler = optim.SGD({ w }, { lr = 1 }), mf.amp.GradScaler()
      local function f(x)
        opt:zero_grad()
        scaler:scale((w * x):sum()):backward()
        scaler:unscale_(opt)
        nn.utils.clip_grad_norm_({ w }, 1)
        scaler:step(opt)
        scaler:update()
      end
      local step = how and mf.compile(f) or f
      step(mf.tensor { 30, 40 })
      assert(mf.allclose(w:detach(), mf.tensor { -0.6, -0.8 }, { rtol = 1e-6 }), tostring(w))
    end
  end)

  it('trains in float16, where gradients would become zero otherwise', function()
    local function train(scaler)
      local w = mf.ones({ 4, 4 }, { requires_grad = true })
      local opt = optim.SGD({ w }, { lr = 1e8 })
      local step = mf.compile(function(x)
        opt:zero_grad()
        local loss = x:matmul(w):mean() * 1e-8
        scaler:scale(loss):backward()
        scaler:step(opt)
        scaler:update()
      end, { amp = 'float16', amp_force = true })
      step(mf.ones { 2, 4 })
      return w:detach()
    end
    assert.same(mf.ones { 4, 4 }:tolist(), train(mf.amp.GradScaler { enabled = false }):tolist())
    local w = train(mf.amp.GradScaler())
    assert(mf.allclose(w, mf.full({ 4, 4 }, 1 - 0.25), { rtol = 2e-2 }), tostring(w))
  end)

  it('is left out when it is not enabled', function()
    local w = mf.tensor({ 1 }, { requires_grad = true })
    local opt, scaler = optim.SGD({ w }, { lr = 1 }), mf.amp.GradScaler { enabled = false }
    scaler:scale(w * 2):backward()
    scaler:step(opt)
    scaler:update()
    assert.equal(-1, w:item())
    assert.equal(1, scaler:get_scale())
  end)

  it('says what is wrong', function()
    local w = mf.tensor({ 1 }, { requires_grad = true })
    local opt, scaler = optim.SGD({ w }, { lr = 1 }), mf.amp.GradScaler()
    fails('growth_factor must be more than 1', mf.amp.GradScaler, { growth_factor = 1 })
    fails('backoff_factor must be between 0 and 1', mf.amp.GradScaler, { backoff_factor = 1 })
    fails("did you mean 'init_scale'", mf.amp.GradScaler, { init_scal = 1 })
    fails('no loss was scaled', scaler.step, scaler, opt)
    fails('no gradients were unscaled', scaler.update, scaler)
    scaler:scale(w * 1):backward()
    scaler:step(opt)
    fails('step was called already', scaler.step, scaler, opt)
    fails('unscale_ was called already', scaler.unscale_, scaler, opt)
    fails('loss must be a tensor', scaler.scale, scaler, 1)
    fails('an optimiser is needed', scaler.step, scaler, {})
  end)

  it('is for nn.Graph', function()
    local function train(bad)
      mf.manual_seed(1)
      local G = nn.Graph:extend 'G'
      function G:init()
        self.model = nn.Linear(2, 1)
        self:add_optimizer(optim.AdamW(self.model:parameters(), { lr = 0.1 }))
        self.scaler = mf.amp.GradScaler { init_scale = 16 }
        self:set_grad_scaler(self.scaler)
      end
      function G:build(x)
        local loss = self.model(x):square():mean()
        self:scale(loss):backward()
        return loss
      end
      local g = G()
      g(mf.ones { 2, 2 })
      if bad then g(mf.full({ 2, 2 }, inf)) end
      g(mf.tensor { { 1, 2 }, { 3, 4 } })
      return g
    end
    local a, b = train(true), train(false)
    assert(mf.equal(a.model.weight:detach(), b.model.weight:detach()))
    assert.equal(8, a.scaler:get_scale())
    assert.equal(16, b.scaler:get_scale())
    b:load_state_dict(a:state_dict())
    assert.equal(8, b.scaler:get_scale())
    local G = nn.Graph:extend 'G'
    function G:init() self:set_grad_scaler(1) end
    fails('an mf.amp.GradScaler is needed', G)
  end)
end)
