-- Views and in-place writes: random programs whose gradients PyTorch gave (inplace/programs.txt), and
-- what PyTorch refuses though it has a meaning.
local mf = require 'moonflow'

local function close(a, b)
  return a == b or math.abs(a - b) <= 1e-5 * (1 + math.abs(b)) or (a ~= a and b ~= b)
end

local env = {
  no_grad = mf.no_grad,
  data = function(values, ...) return mf.tensor(values):view(...):clone() end,
}
function env.leaf(...) return env.data(...):requires_grad_() end
function env.loss(...)
  local sum = 0
  for i = 1, select('#', ...) do sum = sum + (select(i, ...) * i):sum() end
  sum:backward()
end

local function read_programs()
  local programs, p = {}, nil
  for line in io.lines 'spec/inplace/programs.txt' do
    local number = line:match '^%-%- (%d+)$'
    local name, values = line:match '^%-%- (%w+) (.*)$'
    if number then
      p = { name = 'program ' .. number, code = {}, grads = {} }
      programs[#programs + 1] = p
    elseif line == '-- error' then
      p.refused = true
    elseif p and line:match '^%-%- %+' then
      p.grads[p.last] = p.grads[p.last] .. line:sub(5)
    elseif p and name then
      p.grads[name], p.last = values, name
    elseif p then
      p.code[#p.code + 1] = line
    end
  end
  return programs
end

local function run(p)
  local vars = setmetatable({}, { __index = env })
  local f = assert(loadstring(table.concat(p.code, '\n'), '=' .. p.name))
  return vars, pcall(setfenv(f, vars))
end

local function check(p)
  local vars, ok, err = run(p)
  if p.refused then
    assert.is_false(ok)
    return
  end
  assert(ok, err)
  for name, text in pairs(p.grads) do
    local g = vars[name].grad
    assert.are.equal(text == 'nil', g == nil, name .. '.grad')
    local have, i = g and g:flatten():tolist(), 0
    for want in (g and text or ''):gmatch '%S+' do
      i = i + 1
      assert(close(have[i], tonumber(want)), ('%s[%d] is %g, not %s'):format(name, i, have[i], want))
    end
  end
end

describe('in-place writes', function()
  for _, p in ipairs(read_programs()) do
    it(p.name, function() check(p) end)
  end

  it('compute in the dtype of all operands, then round once', function()
    local a, b = mf.randn(1000), mf.randn({ 1000 }, { dtype = mf.float64 })
    local want = { add_ = (a:double() + b):float(), mul_ = (a:double() * b):float() }
    assert.is_false(mf.equal(want.mul_, a * b:float()))
    for name, y in pairs(want) do
      local x = a:clone()
      x[name](x, b)
      assert.is_true(mf.equal(y, x))
      local f = mf.compile(function(s, t)
        s[name](s, t)
        return s + 0
      end)
      assert.is_true(mf.equal(y, f(a:clone(), b)))
    end
    local x, c = a:clone(), b[0]:clone()
    assert.is_true(mf.equal(a * c:float(), x:mul_(c))) -- a 0-d one does not count
  end)

  it('read what they overwrite', function()
    local x = mf.tensor({ 2, 3 }, { requires_grad = true })
    local y = x * 1
    y:mul_(y)
    y:sum():backward()
    assert.are.same({ 4, 6 }, x.grad:tolist())
  end)

  it('refuse memory that several elements share', function()
    local x = mf.zeros(1):expand(3)
    assert.has_error(function() x:add_(1) end, nil, 'add_: several elements')
  end)

  it('that touch no element count as writes all the same', function()
    local x = mf.ones(2):requires_grad_()
    local v = (x * 1):expand(3, 2)
    v[{ {}, { 0, 0 } }] = 5
    v:sum():backward()
    assert.are.same({ 3, 3 }, x.grad:tolist())
  end)

  it('on a quotient leave its gradient possible', function()
    local a, b = mf.tensor({ 1, -2 }, { requires_grad = true }), mf.tensor({ 2, 4 }, { requires_grad = true })
    local c = a / b
    c:relu_()
    c:sum():backward()
    assert.are.same({ 0.5, 0 }, a.grad:tolist())
    assert.are.same({ -0.25, 0 }, b.grad:tolist())
  end)

  it('under an expanded view have second gradients', function()
    local x = mf.tensor({ 1, 2 }, { requires_grad = true })
    local base = x * x
    local v = base:expand(4, 2)
    base:mul_(x)
    local g = mf.grad((v * v):sum(), { x }, { create_graph = true })[1] -- of 4 x^6
    assert.are.same({ 24, 768 }, g:tolist())
    assert.are.same({ 120, 1920 }, mf.grad(g:sum(), { x })[1]:tolist())
  end)

  it('name both ops when a saved tensor was written', function()
    local x = mf.tensor({ 1, 2 }, { requires_grad = true })
    local y = x:exp()
    local z = (y * y):sum()
    y:detach():add_(1)
    local ok, err = pcall(z.backward, z)
    assert.is_false(ok)
    assert.truthy(err:find('a tensor that mul needs for its gradient was changed in place since by add_', 1, true))
  end)

  it('through .data are not counted', function()
    local x = mf.tensor({ 1, 2 }, { requires_grad = true })
    local z = (x * x):sum()
    x.data:mul_(2)
    z:backward()
    assert.are.same({ 4, 8 }, x.grad:tolist())
  end)

  it('refuse a view made while nothing was recorded', function()
    local x = mf.tensor({ 1, 2 }, { requires_grad = true }) * 1
    local v = mf.no_grad(function() return x[0] end)
    local ok, err = pcall(v.mul_, v, x[1])
    assert.is_false(ok)
    assert.truthy(err:find('mul_: a is a view made inside mf.no_grad', 1, true))
  end)

  it('refuse a view made while nothing was recorded also when the operand has no gradient', function()
    local y = mf.tensor({ 1, 2 }, { requires_grad = true }) * 1
    local v = mf.no_grad(function() return y[0] end)
    local ok, err = pcall(v.mul_, v, 2)
    assert.is_false(ok)
    assert.truthy(err:find('mul_: a is a view made inside mf.no_grad', 1, true))
    mf.no_grad(v.mul_, v, 2)
    assert.are.same({ 2, 2 }, y:tolist())
  end)

  it('by a detached self are by a constant', function()
    local x = mf.tensor({ 2, 3 }, { requires_grad = true })
    local y = x * x
    y:mul_(y:detach()) -- the gradient is 2 x c, c = x^2
    local g = mf.grad(y:sum(), { x }, { create_graph = true })[1]
    assert.are.same({ 16, 54 }, g:tolist())
    assert.are.same({ 8, 18 }, mf.grad(g:sum(), { x })[1]:tolist())
  end)

  it('know views from memory that is no longer theirs', function()
    local function refused(f, text)
      local ok, err = pcall(f)
      assert.is_false(ok)
      assert.truthy(err:find(text, 1, true), err)
    end
    local w = mf.ones(2):requires_grad_()
    refused(function() mf.zeros(4)[{ { 2, 4 } }].data = mf.zeros(100) end, 'a view cannot get other data')
    local base = mf.zeros(4)
    local v = base[{ { 2, 4 } }]
    base.data = mf.zeros(1)
    refused(function() v:mul_(w) end, 'got other memory')
    base = mf.zeros(4)
    base[{ { 2, 4 } }] = w
    base.data = mf.zeros(1)
    refused(function() base:sum():backward() end, 'does not lie in what is now its base')
  end)

  it('move the gradient that a tensor keeps', function()
    local x = mf.tensor({ 1, 2 }, { requires_grad = true })
    local y = x * 2
    y:retain_grad()
    y:mul_(3)
    y:sum():backward()
    assert.are.same({ 1, 1 }, y.grad:tolist())
    assert.are.same({ 6, 6 }, x.grad:tolist())
  end)
end)
