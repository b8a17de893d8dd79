-- Bad input beyond single ops: damaged files, values in tables, subscripts and assignments,
-- optimiser steps, layers. Each attempt succeeds or raises a text; nothing leaks.
local mf = require 'moonflow'
local pool = require 'spec.fuzz.pool'

local function any() return pool[math.random(#pool)][2]() end

local function nested(depth)
  if depth == 0 or math.random(3) == 1 then return any() end
  local t = {}
  for k = 1, math.random(0, 4) do t[k] = nested(depth - 1) end
  return t
end

-- The tables that can be called, in one order.
local function callables(t)
  local names, list = {}, {}
  for name, v in pairs(t) do
    if type(v) == 'table' and name ~= 'Module' then names[#names + 1] = name end
  end
  table.sort(names)
  for k, name in ipairs(names) do list[k] = t[name] end
  return list
end

local function in_use() -- without the traces, which hold what inlined closures name
  jit.flush()
  for _ = 1, 4 do collectgarbage() end
  return mf.memory_stats().in_use
end

-- f is tried `count` times under a memory limit; other errors than texts are errors of ours.
local function tried(count, f)
  math.randomseed(1)
  local before = in_use()
  mf.set_memory_limit(before + 2 ^ 28)
  local kind
  for _ = 1, count do
    local ok, text = pcall(f)
    if not ok and type(text) ~= 'string' then kind = type(text) end
  end
  mf.set_memory_limit(0)
  assert.is_nil(kind)
  assert.is_true(in_use() <= before)
end

describe('fuzz #long, files', function()
  local path = os.tmpname() .. '.safetensors'
  local numbers = { '-1', '99999999999999999999', '1.5', '0', '9223372036854775807', '2' }
  local marks = { '{', '}', '[', ']', '"', ',', ':', '\\', 'null' }
  local damages = {
    function(b, at) return b:sub(1, at - 1) end,
    function(b, at) return b:sub(1, at - 1) .. string.char(math.random(0, 255)) .. b:sub(at + 1) end,
    function(b, at) return b:sub(1, at) .. b:sub(math.random(1, #b)) end,
    function(b) return b .. string.char(math.random(0, 255)):rep(math.random(1, 9)) end,
    function(b) return (b:gsub('%d+', function(d) return math.random(3) == 1 and numbers[math.random(6)] or d end)) end,
    function(b, at) return b:sub(1, at - 1) .. marks[math.random(9)] .. b:sub(at + 1) end,
  }
  it('that are damaged: the error names the file', function()
    mf.save({ a = mf.ones(2, 3), b = mf.zeros({ 4 }, { dtype = mf.int64 }),
      c = mf.ones({ 0, 3 }, { dtype = mf.bfloat16 }) }, path)
    local f = io.open(path, 'rb')
    local good = f:read '*a'
    f:close()
    local nameless
    tried(3000, function()
      local b = good
      for _ = 1, math.random(1, 4) do
        b = damages[math.random(#damages)](b, math.random(1, #b))
        if #b == 0 then b = '\0' end
      end
      f = io.open(path, 'wb')
      f:write(b)
      f:close()
      local ok, read = pcall(mf.load, path)
      if ok then
        for _, t in pairs(read) do tostring(t) end
      elseif not tostring(read):find(path, 1, true) then
        nameless = read
      end
    end)
    os.remove(path)
    assert.is_nil(nameless)
  end)
end)

describe('fuzz #long, values', function()
  it('of mf.tensor', function()
    tried(5000, function() mf.tensor(nested(3), math.random(2) == 1 and { dtype = any() } or nil) end)
  end)
  it('in subscripts', function() tried(5000, function() return mf.ones(3, 4, 2)[nested(1)] end) end)
  it('in assignments', function()
    tried(5000, function()
      local x = mf.ones(3, 4, 2):requires_grad_() * 1
      x[nested(1)] = nested(1)
      x:sum():backward()
    end)
  end)
  it('of optimisers', function()
    local optimisers = callables(mf.optim)
    tried(3000, function()
      local w = mf.ones(3, 4):requires_grad_()
      local o = optimisers[math.random(#optimisers)]({ w }, { lr = any(), momentum = any(), weight_decay = any() })
      w.grad = any()
      o:step()
      o:load_state_dict(nested(2))
      o:step()
    end)
  end)
  it('of layers', function()
    local layers = callables(mf.nn)
    tried(3000, function() return layers[math.random(#layers)](any(), any(), any())(any(), any()) end)
    tried(1000, function() mf.nn.Linear(3, 4):load_state_dict(nested(2)) end)
  end)
end)
