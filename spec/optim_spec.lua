-- Optimisers beyond the golden cases: groups, state, bad arguments, gradients of another order in memory.
local mf = require 'moonflow'
local optim = mf.optim

local function param(...)
  return mf.nn.Parameter(mf.tensor { ... })
end

local function fails(pattern, f, ...)
  local ok, text = pcall(f, ...)
  assert.is_false(ok)
  assert(tostring(text):find(pattern, 1, true), tostring(text))
end

describe('optim', function()
  it('gives each group its own options', function()
    local a, b = param(1), param(1)
    local o = optim.SGD({ { params = { a }, lr = 0.5 }, { params = b } }, { lr = 0.25 })
    a.grad, b.grad = mf.tensor { 1 }, mf.tensor { 1 }
    o:step()
    assert.equal(0.5, a:item())
    assert.equal(0.75, b:item())
  end)

  it('leaves parameters without a gradient alone', function()
    local a, b = param(1), param(1)
    local o = optim.AdamW({ a, b }, { lr = 0.5 })
    a.grad = mf.tensor { 1 }
    o:step()
    assert.equal(1, b:item())
    assert.is_nil(o.state[b])
  end)

  it('takes a transposed gradient as what it is', function()
    local p = mf.nn.Parameter(mf.zeros(2, 3))
    p.grad = mf.tensor({ { 1, 2 }, { 3, 4 }, { 5, 6 } }):t()
    optim.SGD({ p }, { lr = 1 }):step()
    assert.same({ { -1, -3, -5 }, { -2, -4, -6 } }, p:tolist())
  end)

  it('computes float16 parameters in float32', function()
    local p = mf.nn.Parameter(mf.tensor({ 1, 2 }, { dtype = mf.float16 }))
    p.grad = mf.tensor({ 0.5, 0.25 }, { dtype = mf.float16 })
    optim.SGD({ p }, { lr = 1 }):step()
    assert.same({ 0.5, 1.75 }, p:tolist())
  end)

  it('goes on from a saved state', function()
    local function steps(o, p, from, to)
      for k = from, to do
        p.grad = mf.tensor { math.cos(k), math.sin(k) }
        o:step()
      end
    end
    local a, b = param(1, 2), param(1, 2)
    local whole = optim.Adam({ a }, { lr = 0.1 })
    steps(whole, a, 1, 6)
    local first = optim.Adam({ b }, { lr = 0.1 })
    steps(first, b, 1, 3)
    local second = optim.Adam({ b }, { lr = 0.9 })
    second:load_state_dict(first:state_dict())
    steps(second, b, 4, 6)
    assert.same(a:tolist(), b:tolist())
  end)

  -- PyTorch's results; of Adam and RMSprop with the missing states as zeros.
  local late = {
    { 'SGD', { momentum = 0.9, dampening = 0.5 }, -0.057999998 },
    { 'RMSprop', { momentum = 0.9, centered = true }, -3.4582469 },
    { 'Adam', { amsgrad = true }, 0.63636529 },
  }
  for _, case in ipairs(late) do
    local name, options, want = unpack(case)
    local function run(o, p, from, to, compiled)
      local function step(g)
        o:zero_grad();
        (p * g):sum():backward()
        o:step()
      end
      if compiled then step = mf.compile(step) end
      for k = from, to do step(mf.tensor { k == 2 and 3 or 1 }) end
    end
    local function switch(o)
      for key, value in pairs(options) do o.param_groups[1][key] = value end
    end
    local function first_step()
      local p = param(1)
      local o = optim[name]({ p }, { lr = 0.1 })
      run(o, p, 1, 1)
      switch(o)
      return o, p
    end

    it('takes up an option that is switched on late: ' .. name, function()
      local o, p = first_step()
      run(o, p, 2, 4)
      assert.near(want, p:item(), 1e-6)
    end)

    it('takes it up in a compiled step, and from a saved state: ' .. name, function()
      local o, p = first_step()
      local first, q = first_step()
      local loaded = optim[name]({ q }, { lr = 0.1 })
      loaded:load_state_dict(first:state_dict())
      run(o, p, 2, 4, true)
      assert.near(want, p:item(), 1e-6)
      run(loaded, q, 2, 4)
      assert.near(want, q:item(), 1e-6)
    end)
  end

  it('lets the momentum rest and goes on with it', function()
    local p = param(1)
    local o = optim.SGD({ p }, { lr = 0.1, momentum = 0.9 })
    for _, momentum in ipairs { 0.9, 0, 0.9 } do -- buffer 1, 1, then 0.9 * 1 + 1
      o.param_groups[1].momentum = momentum
      p.grad = mf.tensor { 1 }
      local again = optim.SGD({ p }, { lr = 0.1 })
      again:load_state_dict(o:state_dict())
      o = again
      o:step()
    end
    assert.near(1 - 0.1 * (1 + 1 + 1.9), p:item(), 1e-6)
  end)

  it('takes it up in a step that was compiled before', function()
    local p = param(1)
    local o = optim.SGD({ p }, { lr = 0.1 })
    local step = mf.compile(function(g)
      o:zero_grad();
      (p * g):sum():backward()
      o:step()
    end)
    for k = 1, 3 do
      if k == 2 then o.param_groups[1].momentum = 0.9 end
      step(mf.tensor { 1 })
    end
    assert.near(0.61, p:item(), 1e-6)
    o.param_groups[1].momentum = 0
    step(mf.tensor { 1 })
    assert.near(0.51, p:item(), 1e-6)
  end)

  it('updates rows by a momentum that is switched on late', function()
    local p = mf.ones(2, 1):requires_grad_()
    local o = optim.SGD({ p }, { lr = 0.1 })
    for k = 1, 3 do
      if k == 2 then o.param_groups[1].momentum, o.param_groups[1].dampening = 0.9, 0.5 end
      o:zero_grad()
      mf.nn.functional.embedding(mf.tensor({ 1 }, { dtype = mf.int64 }), p, { sparse = true }):sum():backward()
      o:step()
    end
    local want = 1 - 0.1 * (1 + 1 + 0.9 + 0.5)
    assert.equal(1, p[0]:item())
    assert.near(want, p[1]:item(), 1e-6)
  end)

  it('zero_grad drops gradients, or keeps them as zeros', function()
    local a = param(1, 2)
    local o = optim.SGD({ a })
    a.grad = mf.tensor { 1, 1 }
    o:zero_grad { set_to_none = false }
    assert.same({ 0, 0 }, a.grad:tolist())
    o:zero_grad()
    assert.is_nil(a.grad)
  end)

  it('calls a closure with gradients on and returns its loss', function()
    local a = param(3)
    local o = optim.SGD({ a }, { lr = 0.5 })
    local loss = o:step(function()
      o:zero_grad()
      local l = a:square():sum()
      l:backward()
      return l
    end)
    assert.equal(9, loss:item())
    assert.equal(0, a:item())
  end)

  it('keeps its state beyond the scope of a step', function()
    local made = {}
    for _, name in ipairs { 'SGD', 'Adam', 'AdamW', 'RMSprop', 'Adagrad', 'Adadelta', 'Adamax' } do
      local o = { lr = 0.1, momentum = (name == 'SGD' or name == 'RMSprop') and 0.9 or nil }
      local w, v = param(1, 2), param(1, 2)
      local scoped, plain = optim[name]({ w }, o), optim[name]({ v }, o)
      for _ = 1, 3 do
        mf.scope(function()
          scoped:zero_grad();
          (w * w):sum():backward()
          scoped:step()
        end)
        plain:zero_grad();
        (v * v):sum():backward()
        plain:step()
      end
      assert.are.same(v:tolist(), w:tolist())
      mf.scope(function() scoped:load_state_dict(plain:state_dict()) end)
      scoped:step()
      made[#made + 1] = scoped
    end
    assert.are.equal(7, #made)
  end)

  it('says what is wrong with its arguments', function()
    fails("the list of parameters is empty", optim.SGD, {})
    fails("did you mean 'momentum'", optim.SGD, { param(1) }, { momentun = 0.9 })
    fails('lr must be at least 0', optim.Adam, { param(1) }, { lr = -1 })
    fails('betas[2] must be in [0, 1)', optim.Adam, { param(1) }, { betas = { 0.9, 1 } })
    fails('nesterov needs a momentum', optim.SGD, { param(1) }, { nesterov = true })
    fails('params[1] must be a tensor, is 1', optim.SGD, { { params = { 1 } } })
    local p = param(1)
    fails("is there twice", optim.SGD, { { params = { p } }, { params = { p } } })
    fails('not a leaf', optim.SGD, { p * 2 })
  end)

  it('clips gradients by norm and by value', function()
    local a, b = param(0, 0), param(0)
    a.grad, b.grad = mf.tensor { 3, 0 }, mf.tensor { 4 }
    local norm = mf.nn.utils.clip_grad_norm_({ a, b }, 1)
    assert.near(5, norm:item(), 1e-6)
    assert.near(0.6, a.grad:tolist()[1], 1e-5)
    assert.near(0.8, b.grad:item(), 1e-5)
    mf.nn.utils.clip_grad_value_({ a, b }, 0.7)
    assert.near(0.7, b.grad:item(), 1e-6)
    assert.near(0.6, a.grad:tolist()[1], 1e-5)
  end)
end)
