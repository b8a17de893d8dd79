-- Cases computed by PyTorch (spec/goldens/generate.py): results and gradients of ops, parameters under optimisers.
-- MF_GOLDENS names another folder of cases, made with another seed.
local mf = require 'moonflow'
local folder = os.getenv 'MF_GOLDENS' or 'spec/goldens'

local later = {} -- not asked for yet
for line in io.lines 'spec/goldens/later.txt' do later[line] = true end

-- The elements of a tensor in row-major order as one list of numbers.
local function flat(t)
  local list = t:detach():contiguous():view(-1):tolist()
  for i, v in ipairs(list) do
    if type(v) == 'boolean' then list[i] = v and 1 or 0 end
  end
  return list
end

local function close(a, b, rtol, atol)
  if a ~= a or b ~= b then return a ~= a and b ~= b end
  return a == b or math.abs(a - b) <= atol + rtol * math.abs(b)
end

local function compare(what, got, want, case)
  if not mf.is_tensor(got) then error(('%s is a %s'):format(what, type(got)), 0) end
  if tostring(got.dtype) ~= tostring(want.dtype) then
    error(('%s has dtype %s, not %s'):format(what, tostring(got.dtype), tostring(want.dtype)), 0)
  end
  if got.shape ~= want.shape then
    error(('%s has shape %s, not %s'):format(what, tostring(got.shape), tostring(want.shape)), 0)
  end
  local a, b = flat(got), flat(want)
  for i = 1, #b do
    if not close(a[i], b[i], case.rtol, case.atol) then
      error(('%s: element %d is %.9g, not %.9g'):format(what, i - 1, a[i], b[i]), 0)
    end
  end
  assert.are.equal(#b, #a)
end

-- (out * cos(0.5 k)):sum(), k being the element's place.
local function loss_of(out)
  local weights = {}
  for k = 1, out:numel() do weights[k] = math.cos(0.5 * (k - 1)) end
  local w = #weights == 0 and mf.zeros(out.shape) or mf.tensor(weights):view(out.shape)
  return (out * w):sum()
end

local function compile(case)
  local names = { 'mf', 'optim' }
  for _, name in ipairs(case.inputs) do names[#names + 1] = name end
  return assert(loadstring(('local %s = ...\nreturn %s'):format(table.concat(names, ', '), case.lua), '=' .. case.name))
end

local function run_op(case, tensors)
  local inputs, values = {}, {}
  for k, name in ipairs(case.inputs) do
    inputs[name] = assert(tensors[case.name .. '/in/' .. name])
    values[k] = inputs[name]
  end
  for _, name in ipairs(case.grads) do inputs[name]:requires_grad_() end
  local outs = { compile(case)(mf, nil, unpack(values)) }
  assert.are.equal(case.outs, #outs)
  local loss
  for k, out in ipairs(outs) do
    compare('output ' .. k - 1, out, tensors[('%s/out/%d'):format(case.name, k - 1)], case)
    if out:is_floating_point() then loss = loss and loss + loss_of(out) or loss_of(out) end
  end
  if #case.grads == 0 then return end
  local wanted = {}
  for k, name in ipairs(case.grads) do wanted[k] = inputs[name] end
  local grads = mf.grad(loss, wanted, { allow_unused = true })
  for k, name in ipairs(case.grads) do
    local want = tensors[case.name .. '/grad/' .. name]
    compare('gradient of ' .. name, grads[k] or mf.zeros_like(want), want, case)
  end
end

-- The same cases as compiled steps, forward and backward. What cannot be: by case, a part of the error.
local refused = { mask = 'depends on data', masked_select = 'depends on data', nonzero = 'depends on data' }

local function run_op_compiled(case, tensors)
  local values, place = {}, {}
  for k, name in ipairs(case.inputs) do
    values[k] = assert(tensors[case.name .. '/in/' .. name]):detach()
    place[name] = k
  end
  local step = mf.compile(function(...)
    local list, wanted, loss = { ... }, {}, nil
    for k, name in ipairs(case.grads) do wanted[k] = list[place[name]]:requires_grad_() end
    local outs = { compile(case)(mf, nil, unpack(list)) }
    if #wanted == 0 then return outs, {} end
    for _, out in ipairs(outs) do
      if out:is_floating_point() then loss = loss and loss + loss_of(out) or loss_of(out) end
    end
    local grads = mf.grad(loss, wanted, { allow_unused = true })
    for k, x in ipairs(wanted) do grads[k] = grads[k] or mf.zeros_like(x) end
    return outs, grads
  end)
  local outs, grads = step(unpack(values))
  assert.are.equal(case.outs, #outs)
  for k, out in ipairs(outs) do
    compare('output ' .. k - 1, out, tensors[('%s/out/%d'):format(case.name, k - 1)], case)
  end
  for k, name in ipairs(case.grads) do
    compare('gradient of ' .. name, grads[k], tensors[case.name .. '/grad/' .. name], case)
  end
end

local function check_refused(case, tensors)
  local ok, text = pcall(run_op_compiled, case, tensors)
  assert(not ok and tostring(text):find(refused[case.name], 1, true), text)
end

local function run_optimizer_compiled(case, tensors)
  local p, g = tensors[case.name .. '/in/p']:clone(), tensors[case.name .. '/in/g']
  p:requires_grad_()
  local optimizer = compile(case)(mf, mf.optim, p, g)
  local step = mf.compile(function(gradient)
    p.grad = gradient + p:detach() * 0.1
    optimizer:step()
  end)
  for k = 0, case.outs - 1 do
    step(g * math.cos(k))
    compare('parameter after step ' .. k, p, tensors[('%s/out/%d'):format(case.name, k)], case)
  end
  assert.are.equal(1, step.misses)
end

local function run_optimizer(case, tensors)
  local p, g = tensors[case.name .. '/in/p'], tensors[case.name .. '/in/g']
  p:requires_grad_()
  local optimizer = compile(case)(mf, mf.optim, p, g)
  for k = 0, case.outs - 1 do
    p.grad = g * math.cos(k) + p:detach() * 0.1
    optimizer:step()
    compare('parameter after step ' .. k, p, tensors[('%s/out/%d'):format(case.name, k)], case)
  end
end

for _, family in ipairs { 'pointwise', 'binary', 'reduce', 'shape', 'index', 'matmul', 'norm', 'conv', 'loss',
  'optim' } do
  describe('golden ' .. family, function()
    local tensors
    setup(function() tensors = mf.load(('%s/%s.safetensors'):format(folder, family)) end)
    for _, case in ipairs(dofile(('%s/%s.lua'):format(folder, family))) do
      if not later[family .. '/' .. case.name] then
        local compiled = refused[case.name] and check_refused or run_op_compiled
        it(case.name .. ', compiled', function()
          (family == 'optim' and run_optimizer_compiled or compiled)(case, tensors)
        end)
        it(case.name, function() (family == 'optim' and run_optimizer or run_op)(case, tensors) end)
      end
    end
  end)
end
