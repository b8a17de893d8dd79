-- Every option of every optimiser over 20 steps against PyTorch (spec/nn/generate.py).
local mf = require 'moonflow'
local cases = dofile 'spec/nn/optim.lua'
local tensors = mf.load 'spec/nn/optim.safetensors'

local function run(case, params)
  local o = mf.optim[case[2]](params, case[3])
  for step = 0, 19 do
    for k, p in ipairs(params) do p.grad = tensors[('grad/%d/%d'):format(step, k - 1)]:clone() end
    o:step()
  end
end

local function check(case, params)
  for k, p in ipairs(params) do
    local want = tensors[('%s/%d'):format(case[1], k - 1)]
    assert(mf.allclose(p:detach(), want, { rtol = 2e-5, atol = 2e-6 }), tostring(p:detach() - want))
  end
end

describe('after 20 steps as PyTorch:', function()
  for _, case in ipairs(cases) do
    it(case[1], function()
      local params = {}
      for k = 0, 1 do params[k + 1] = tensors['start/' .. k]:clone():requires_grad_() end
      run(case, params)
      check(case, params)
    end)

    it(case[1] .. ', other memory', function() -- a transposed parameter, and a view with a step
      local a = tensors['start/0']:t():contiguous():t():requires_grad_()
      local b = mf.zeros(8)[{ { 0, 8, 2 } }]:copy_(tensors['start/1']):requires_grad_()
      run(case, { a, b })
      check(case, { a, b })
    end)
  end
end)
