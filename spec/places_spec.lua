-- Views, joins, padding, indexing and assignment: results and gradients are PyTorch's
-- (goldens/places.py). All but products are affine, which gives the second gradients: with y =
-- f(x), that of sum(w y^2) times v is the gradient of 2 w (f(v) - f(0)) through f.
local mf = require 'moonflow'

local function made(shape, offset)
  local n = 1
  for _, s in ipairs(shape) do n = n * s end
  return (((mf.arange(n) + (offset or 0)) * 7919):remainder(1009):double() / 8 - 50):view(shape)
end

local function weight(t)
  return ((mf.arange(t:numel()) * 31):remainder(17) - 8):double():view(t.shape)
end

local function compile(case)
  local names = { 'mf' }
  for _, input in ipairs(case[2]) do names[#names + 1] = input[1] end
  return assert(loadstring(('local %s = ... %s return %s'):format(table.concat(names, ', '), case[5] or '', case[1]),
    '=' .. case[1]))
end

local function flat(t)
  return t:detach():reshape(-1):tolist()
end

local function is_float(t)
  return t:is_floating_point()
end

local function loss_of(ys, f)
  local loss
  for k, y in ipairs(ys) do
    if is_float(y) then
      local part = (f and f(y, k) or y * weight(y)):sum():double()
      loss = loss and loss + part or part
    end
  end
  return loss
end

local function close(want, got)
  assert.are.equal(#want, #got)
  for i = 1, #want do
    if type(want[i]) == 'number' then
      assert.is_true(math.abs(want[i] - got[i]) <= 1e-9 * (1 + math.abs(want[i])),
        ('element %d is %.17g, not %.17g'):format(i - 1, got[i], want[i]))
    else
      assert.are.equal(want[i], got[i])
    end
  end
end

local function check_first(case, f)
  local xs = {}
  for k, input in ipairs(case[2]) do xs[k] = made(input[2]):requires_grad_() end
  local ys = { f(mf, unpack(xs)) }
  assert.are.equal(#case[3], #ys)
  for k, want in ipairs(case[3]) do
    assert.are.equal(want[1], tostring(ys[k].dtype))
    assert.are.same(want[2], setmetatable(ys[k].shape, nil))
    close(want[3], flat(ys[k]))
  end
  local loss = loss_of(ys)
  if not (loss and loss.requires_grad) then return false end
  local grads = mf.grad(loss, xs, { allow_unused = true })
  for k, input in ipairs(case[2]) do
    local g = grads[k] or mf.zeros_like(xs[k])
    assert.are.equal(g.shape, xs[k].shape)
    close(case[4][input[1]], flat(g))
  end
  return true
end

local function check_second(case, f)
  local xs, vs, zeros = {}, {}, {}
  for k, input in ipairs(case[2]) do
    xs[k] = made(input[2]):requires_grad_()
    vs[k] = made(input[2], 5)
    zeros[k] = mf.zeros_like(vs[k])
  end
  local first = mf.grad(loss_of({ f(mf, unpack(xs)) }, function(y) return y * y * weight(y) end), xs,
    { create_graph = true, allow_unused = true })
  local h = mf.zeros({}, { dtype = mf.float64 })
  for k, g in pairs(first) do h = h + (g * vs[k]):sum() end
  local second = h.requires_grad and mf.grad(h, xs, { allow_unused = true }) or {}
  local at_v, at_0 = { f(mf, unpack(vs)) }, { f(mf, unpack(zeros)) }
  local sum = loss_of({ f(mf, unpack(xs)) }, function(y, k) return y * ((at_v[k] - at_0[k]) * weight(y) * 2) end)
  local want = mf.grad(sum, xs, { allow_unused = true })
  for k = 1, #xs do
    close(flat(want[k] or zeros[k]), flat(second[k] or zeros[k]))
  end
end

describe('places', function()
  for i, case in ipairs(dofile 'spec/goldens/places.lua') do
    it(('%d: %s'):format(i, case[1]), function()
      local f = compile(case)
      if check_first(case, f) and not (case[1]:find 'einsum' and #case[2] > 1) and not case[1]:find ':float' then
        check_second(case, f)
      end
    end)
  end
end)
