-- Random networks of layers and what is written between them, eager and compiled: losses and parameters after each
-- of several steps are the same with all passes of the compiler, with none and with each alone; bit for bit but for
-- passes that say what they may change. A failure prints the seed and the layers; MF_SPEC_SEED=N runs that one.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local B, T, D, DTYPE = 3, 6, 8, mf.float64
local CLASSES = 8200 -- so many that the loss of a step is worth a pass

-- What may change the last bits.
local changes = { fuse_attention = true, fuse_loss = true, fuse_act = true, layout = true, algebra = true }

local function generator(seed)
  local state = seed * 7919 % 2147483647 + 1
  local function below(n)
    state = state * 16807 % 2147483647
    return math.floor(state / 16) % n
  end
  return below, function(list) return list[below(#list) + 1] end
end

-- -- Layers: a text, the modules, and a function of x (B, T, D) ------------------------------------

local function activation(pick)
  local name = pick { 'relu', 'gelu', 'tanh', 'sigmoid' }
  return name, function(x) return x[name](x) end
end

local function normalisation(pick)
  local name = pick { 'LayerNorm', 'RMSNorm' }
  return name, nn[name](D)
end

-- Attention as people write it.
local function attention(pick)
  local scale, mask, p = pick { 'before', 'behind', 'divided' }, pick { 'none', 'fill', 'where', 'added', 'causal' },
    pick { 0, 0.2 }
  local qkv = nn.Linear(D, 3 * D)
  local seen = mf.ones({ T, T }, { dtype = DTYPE }):tril()
  return ('attention, scale %s, mask %s, dropout %g'):format(scale, mask, p), { qkv }, function(x)
    local parts = {}
    for i, t in ipairs(qkv(x):chunk(3, -1)) do parts[i] = t:view(x:size(0), T, 2, D / 2):transpose(1, 2) end
    local q, k, v = unpack(parts)
    if scale == 'before' then q = q * 0.5 end
    local s = mf.matmul(q, k:transpose(-2, -1))
    if scale == 'behind' then s = s * 0.5 elseif scale == 'divided' then s = s / 2 end
    if mask == 'fill' then s = s:masked_fill(seen:eq(0), -math.huge)
    elseif mask == 'where' then s = mf.where(seen:gt(0), s, -1e9)
    elseif mask == 'added' then s = s + (1 - seen) * -1e4
    elseif mask == 'causal' then
      s = s:masked_fill(mf.ones(T, T, { dtype = mf.bool }):tril():logical_not(), -math.huge)
    end
    s = s:softmax(-1)
    if p > 0 then s = mf.dropout(s, p) end
    return s:matmul(v):transpose(1, 2):reshape(x:size(0), T, D)
  end
end

local function convolution(pick)
  local conv, norm = nn.Conv2d(D, D, { 3, 1 }, { padding = { 1, 0 }, bias = false }), nn.BatchNorm2d(D)
  local residual = pick { true, false }
  return 'conv, BatchNorm, relu' .. (residual and ' with a residual' or ''), { conv, norm }, function(x)
    local image = x:transpose(1, 2):unsqueeze(-1)
    local y = norm(conv(image))
    if residual then y = y + image end
    return y:relu():squeeze(-1):transpose(1, 2)
  end
end

local makers = {
  function(pick)
    local linear = nn.Linear(D, D)
    local name, f = activation(pick)
    return 'linear, ' .. name, { linear }, function(x) return f(linear(x)) end
  end,
  function(pick)
    local name, f = activation(pick)
    return 'x * ' .. name, {}, function(x) return x * f(x) end
  end,
  function() return 'dropout', {}, function(x) return mf.dropout(x, 0.1) end end,
  attention, attention, convolution,
}

local function layer(below, pick)
  local text, modules, f = pick(makers)(pick)
  local how = below(5)
  if how == 0 then return text, modules, f end
  if how == 1 then
    return text .. ', checkpointed', modules, function(x) return mf.utils.checkpoint(f, x) end
  end
  local name, norm = normalisation(pick)
  modules[#modules + 1] = norm
  if how < 4 then return text .. ' behind ' .. name, modules, function(x) return x + f(norm(x)) end end
  return text .. ' before ' .. name, modules, function(x) return norm(x + f(x)) end
end

-- -- Networks -------------------------------------------------------------------------------------

local function optimiser(pick, parameters)
  local name = pick { 'SGD', 'AdamW', 'RMSprop', 'Adagrad' }
  return name, optim[name](parameters, { lr = 0.01 })
end

-- A step, what it trains, and its text. `classes`: of the layer at the end; nil: there is none.
local function network(seed, classes)
  local below, pick = generator(seed)
  mf.manual_seed(seed)
  local texts, layers, parameters = {}, {}, {}
  local function add(modules)
    for _, m in ipairs(modules) do
      m:to(DTYPE)
      for _, p in ipairs(m:parameters()) do parameters[#parameters + 1] = p end
    end
  end
  for k = 1, 1 + below(4) do
    local text, modules, f = layer(below, pick)
    texts[k], layers[k] = text, f
    add(modules)
  end
  local head = classes and nn.Linear(D, classes, { bias = pick { true, false } }) or nn.Linear(D, D)
  add { head }
  local clip, opt_name, opt = pick { true, false }, optimiser(pick, parameters)
  texts[#texts + 1] = opt_name .. (clip and ', clipped' or '')
  return function(x, target)
    opt:zero_grad()
    for _, f in ipairs(layers) do x = f(x) end
    local y = head(x)
    local loss = classes and mf.cross_entropy(y:reshape(-1, classes), target:reshape(-1)) or (y * y):mean()
    loss:backward()
    if clip then nn.utils.clip_grad_norm_(parameters, 0.1) end
    opt:step()
    return loss
  end, parameters, table.concat(texts, '; ')
end

local function check(seed)
  local names, passes, exact = mf._passes(), {}, true
  local turn = seed % (#names + 2)
  for k, name in ipairs(names) do
    passes[name] = passes[name] or turn == 0 or turn == k + 1
    if passes[name] and changes[name] then exact = false end
  end
  local classes = passes.fuse_loss and CLASSES or nil
  local batch = classes and 50 or B
  local plain, a, text = network(seed, classes)
  local other, b = network(seed, classes)
  local compiled = mf.compile(other, { passes = passes })
  local function same(x, y, what)
    local ok = exact and mf.equal(x, y) or not exact and mf.allclose(x, y, { rtol = 1e-7, atol = 1e-10 })
    if not ok then error(('seed %d: %s: %s is %s, not %s'):format(seed, text, what, tostring(y), tostring(x)), 0) end
  end
  for call = 1, 3 do
    local results = {}
    for i, f in ipairs { plain, compiled } do
      mf.manual_seed(call)
      local x = mf.randn({ batch, T, D }, { dtype = DTYPE })
      results[i] = f(x, mf.randint(0, classes or 2, { batch, T }))
    end
    same(results[1], results[2], ('loss %d'):format(call))
    for k = 1, #a do same(a[k]:detach(), b[k]:detach(), ('parameter %d after call %d'):format(k, call)) end
  end
end

local only = tonumber(os.getenv 'MF_SPEC_SEED')
local function run(from, to)
  for seed = only or from, only or to do check(seed) end
end

describe('a random network', function()
  it('trains the same compiled', function() run(1, 2 * (#mf._passes() + 2)) end)
  it('trains the same compiled, hundreds #long', function() run(1000, 1600) end)
end)
