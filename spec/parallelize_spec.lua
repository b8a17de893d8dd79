-- mf.parallelize: plans for a small transformer, checked and printed; losses of one rank under data, tensor,
-- pipeline, several axes, micro-batches, remat and ZeRO, compiled and eager; what is sharded.
local mf = require 'moonflow'
local comm = mf.comm

local function on(n, f, o)
  o = o or {}
  o.timeout = o.timeout or 60
  return comm._spawn(n, f, o)
end

-- Losses of a small GPT under plan number `which`; what the plans are stands within, since ranks are states of
-- their own.
local function train(which, steps, eager)
  return function()
    local m = require 'moonflow'
    local nn = m.nn
    local plans = {
      data = { mesh = { data = 2 } },
      tensor = { mesh = { tensor = 2 }, split = { ['blocks.*.qkv'] = 'column', ['blocks.*.out'] = 'row',
        ['blocks.*.up'] = 'column', ['blocks.*.down'] = 'row', letter = 'vocabulary', head = 'column' } },
      both = { mesh = { data = 2, tensor = 2 }, split = { ['blocks.*.qkv'] = 'column', ['blocks.*.out'] = 'row',
        ['blocks.*.up'] = 'column', ['blocks.*.down'] = 'row' }, micro_batches = 2 },
      pipeline = { mesh = { pipeline = 2 }, micro_batches = 2, remat = { 'blocks.1' },
        stages = { { 'letter', 'place', 'blocks.0' }, { 'blocks.1', 'norm', 'head' } } },
      deep = { mesh = { pipeline = 4 }, micro_batches = 4,
        stages = { { 'letter', 'place' }, { 'blocks.0' }, { 'blocks.1' }, { 'norm', 'head' } } },
      wide = { mesh = { pipeline = 2, data = 2 }, micro_batches = 2, zero = 2, zero_min_size = 16,
        stages = { { 'letter', 'place', 'blocks.0' }, { 'blocks.1', 'norm', 'head' } } },
      all = { mesh = { pipeline = 2, data = 2, tensor = 2 }, micro_batches = 2, zero = 1, zero_min_size = 16,
        split = { ['blocks.*.qkv'] = 'column', ['blocks.*.out'] = 'row' },
        stages = { { 'letter', 'place', 'blocks.0' }, { 'blocks.1', 'norm', 'head' } } },
      zero1 = { mesh = { data = 2 }, zero = 1, zero_min_size = 16 },
      zero2 = { mesh = { data = 4 }, zero = 2, zero_min_size = 16 },
      zero3 = { mesh = { data = 2 }, zero = 3, zero_min_size = 16 },
    }
    local Block = nn.Module:extend 'Block'
    function Block:init()
      self.heads = 2
      self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
      self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
      self.up, self.down, self.drop = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)
    end
    function Block:forward(x)
      local n, length = x:size(0), x:size(1)
      local parts = self.qkv(self.norm1(x)):view(n, length, 2, 3, 4):permute(3, 0, 2, 1, 4)
      local y = m.scaled_dot_product_attention(parts[0], parts[1], parts[2], { is_causal = true })
      x = x + self.drop(self.out(y:transpose(1, 2):reshape(n, length, 8)))
      return x + self.drop(self.down(m.gelu(self.up(self.norm2(x)))))
    end
    local Net = nn.Module:extend 'Net'
    function Net:init()
      self.letter, self.place = nn.Embedding(12, 8), nn.Embedding(5, 8)
      self.blocks = nn.Sequential(Block(), Block())
      self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 12)
    end
    function Net:forward(ids)
      return self.head(self.norm(self.blocks(self.letter(ids) + self.place(m.arange(ids:size(1))))))
    end
    m.manual_seed(2)
    local model = Net():double()
    local run = plans[which] and m.parallelize(model, plans[which])
    local opt = m.optim.AdamW(model:parameters(), { lr = 0.01, weight_decay = 0.1 })
    local function f(ids, labels)
      local logits = model(ids)
      local loss = m.cross_entropy(logits:flatten(0, 1), labels:flatten())
      opt:zero_grad()
      loss:backward()
      opt:step()
      return loss
    end
    local step = run and not eager and run:compile(f) or function(...) return run and run:call(f, ...) or f(...) end
    local losses = {}
    for k = 1, steps do
      local ids = m.randint(0, 12, { 4, 6 })
      local loss = step(ids[{ {}, { 0, -1 } }]:clone(), ids[{ {}, { 1 } }]:clone())
      losses[k] = loss:item()
    end
    local state = 0
    for _, p in ipairs(model:parameters()) do
      local s = opt.state and opt.state[p]
      if s and s.exp_avg and s.exp_avg.is_global then state = state + s.exp_avg:to_local():numel() end
    end
    local held = 0
    for _, p in ipairs(model:parameters()) do
      held = held + (p.is_global and p:to_local() or p):numel()
    end
    return { losses, state, held, run and tostring(run) or '', run and run.step and run.step:plan() or '' }
  end
end

local function close(a, b, where)
  for k = 1, #b do
    assert(math.abs(a[k] - b[k]) <= 1e-9 * (1 + math.abs(b[k])), ('%s, step %d: %.15g, not %.15g'):format(where, k,
      a[k], b[k]))
  end
end

describe('parallelize', function()
  local want, all
  local function one()
    if not want then
      local got = on(1, train('none', 50))[1]
      want, all = got[1], got[3]
    end
    return want
  end

  for _, case in ipairs { { 'data', 2 }, { 'tensor', 2 }, { 'both', 4 }, { 'pipeline', 2 }, { 'deep', 4 },
    { 'wide', 4 }, { 'all', 8 },
    { 'zero1', 2 }, { 'zero2', 4 }, { 'zero3', 2 } } do
    it('gives the losses of one rank: ' .. case[1], function()
      local got = on(case[2], train(case[1], case[1] == 'all' and 10 or 50))
      for r = 1, case[2] do
        local list = got[r][1]
        close(list, { unpack(one(), 1, #list) }, case[1])
      end
      if case[1] == 'deep' then -- the first stage has as many under way as there are, and threads for each way
        assert(got[1][5]:find('buffers 4', 1, true) and got[1][5]:find('stream cpu "stage"', 1, true), got[1][5])
      end
      if case[1] == 'zero1' then -- states are halves, parameters whole
        assert(got[1][3] == all and got[1][2] < 0.6 * all and got[1][2] > 0, got[1][2])
      elseif case[1] == 'zero3' then
        assert(got[1][3] < 0.6 * all, got[1][3])
      end
      local held = tonumber(got[1][4]:match 'ranks 0 to %d: up to (%d+) parameters')
      if case[1] ~= 'all' and case[1] ~= 'wide' then assert.equal(got[1][3], held) end
    end)
  end

  it('gives them eagerly too', function()
    for _, case in ipairs { { 'data', 2 }, { 'both', 4 } } do
      local got = on(case[2], train(case[1], 4, true))
      close(got[1][1], { unpack(one(), 1, 4) }, case[1])
    end
  end)

  it('ends on all ranks when one stage fails', function()
    for _, bad in ipairs { 0, 1 } do
      local begun = os.time()
      local function failing(stage)
        return function()
          local m = require 'moonflow'
          local nn = m.nn
          local Net = nn.Module:extend 'Net'
          function Net:init() self.first, self.last = nn.Embedding(4, 3), nn.Embedding(4, 3) end
          local model = Net()
          local run = m.parallelize(model, { mesh = { pipeline = 2 }, micro_batches = 2,
            stages = { { 'first' }, { 'last' } } })
          local step = run:compile(function(x, y)
            return (m.embedding(x, model.first.weight):sum(1):to_global(run.placements[2], { 'S0', 'B' })
              + m.embedding(y, model.last.weight):sum(1)):sum()
          end)
          local good = m.tensor({ 0, 1, 2, 3 }, { dtype = m.int64 })
          local wrong = m.tensor({ 0, 1, 9, 3 }, { dtype = m.int64 })
          step(good, good)
          return step(stage == 0 and wrong or good, stage == 1 and wrong or good):item()
        end
      end
      local _, errors = on(2, failing(bad), { catch = true })
      for r = 1, 2 do assert(tostring(errors[r]):find 'embedding.*9', tostring(errors[r])) end
      assert(os.time() - begun < 10)
    end
  end)

  it('names what is wrong with a plan', function()
    local got = on(2, function()
      local m = require 'moonflow'
      local nn = m.nn
      local texts = {}
      local function try(plan)
        local Attention = nn.Module:extend 'Attention'
        function Attention:init()
          self.heads, self.qkv = 3, nn.Linear(6, 18)
        end
        local model = nn.Sequential(Attention(), nn.Linear(6, 5), nn.Linear(5, 1))
        local ok, run = pcall(m.parallelize, model, plan)
        texts[#texts + 1] = tostring(run)
        return ok
      end
      try { mesh = { data = 3 } }
      try { mesh = { rows = 2 } }
      try { mesh = { tensor = 2 }, split = { ['0.qvk'] = 'column' } }
      try { mesh = { tensor = 2 }, split = { ['0.qkv'] = 'column' } }
      try { mesh = { tensor = 2 }, split = { ['2'] = 'column' } }
      try { mesh = { tensor = 2 }, split = { ['0.qkv'] = 'diagonal' } }
      try { mesh = { pipeline = 2 }, stages = { { '0' }, {} } }
      try { mesh = { pipeline = 2 }, stages = { { '0' } } }
      try { mesh = { pipeline = 2 }, stages = { { '0' }, { '2' } } }
      try { mesh = { pipeline = 2 } }
      try { mesh = { data = 2 }, zero = 4 }
      try { mesh = { data = 2 }, remat = { '7' } }
      try { mesh = { data = 2 }, zeor = 1 }
      try { mesh = { tensor = 2 }, split = { ['1'] = 'column' } }
      return texts
    end)
    local expected = { 'the mesh %(pipeline 1, data 3, tensor 1%) is for 3 ranks, and there are 2',
      "no mesh axis 'rows'", "split '0.qvk' is the name of nothing.*0.qkv", '0.qkv has 3 heads.*cut in two',
      'dim 0 of 2.weight has size 1, less than the 2 ranks of the tensor axis', "must be 'column'",
      'stage 1 has no module', 'stages lists 1, the mesh has 2', '1.weight is in no stage', 'stages says nothing',
      'zero must be 0, 1, 2 or 3', "remat '7' is the name of nothing", "no option 'zeor'",
      'uneven: dim 0 of 1.bias, of size 5, over 2 ranks' }
    for i, pattern in ipairs(expected) do
      assert(got[1][i]:find(pattern), ('%d: %s, not "%s"'):format(i, got[1][i], pattern))
    end
  end)
end)
