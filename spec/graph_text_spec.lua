-- Graphs as text: what they look like, that they read back, that what is no graph is refused.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

-- The text of what the compiled f did with these arguments, without passes when `plain`.
local function text_of(f, plain, ...)
  local off = {}
  for _, name in ipairs(mf._passes()) do off[name] = not plain end
  local step = mf.compile(f, { passes = off })
  step(...)
  return tostring(step)
end

local function without_lines(text) return (text:gsub('  # [^\n]*', '')) end

local function train(model, opt)
  return function(x, y)
    opt:zero_grad()
    local loss = mf.cross_entropy(model(x), y)
    loss:backward()
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    opt:step()
    return loss
  end
end

local models = {
  mlp = function()
    local model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 4))
    return train(model, optim.SGD(model:parameters(), { lr = 0.1, momentum = 0.9 })), mf.randn(5, 6),
      mf.randint(0, 4, { 5 })
  end,
  cnn = function()
    local model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
      nn.Linear(36, 4))
    return train(model, optim.AdamW(model:parameters(), { lr = 0.1 })), mf.randn(2, 1, 8, 8), mf.randint(0, 4, { 2 })
  end,
  transformer = function()
    local norm, qkv, out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
    local wide, back, head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 4)
    local model = nn.Sequential(norm, qkv, out, wide, back, head)
    local opt = optim.Adam(model:parameters(), { lr = 0.1 })
    local function forward(x)
      local parts = {}
      for k, part in ipairs(qkv(norm(x)):chunk(3, -1)) do parts[k] = part:unflatten(-1, { 2, 4 }):transpose(1, 2) end
      local y = mf.scaled_dot_product_attention(parts[1], parts[2], parts[3], { is_causal = true })
      x = x + out(y:transpose(1, 2):flatten(2))
      x = x + back(mf.gelu(wide(x)))
      return head(x:mean(1))
    end
    return function(x, y)
      opt:zero_grad()
      local loss = mf.cross_entropy(forward(x), y)
      loss:backward()
      opt:step()
      return loss
    end, mf.randn(2, 5, 8), mf.randint(0, 4, { 2 })
  end,
}

describe('graph text', function()
  it('shows ports, numbers, cells, lists, writes and results', function()
    local w, v, s = mf.ones(2, 3), mf.ones(4)[{ { 0, 4, 2 } }], mf.scalar(0.25)
    local text = text_of(function(x, y)
      local a, b = unpack((x * s + 2):split({ 1, 1 }))
      w:fill_(0.5)
      w:add_(mf.clamp(x:t(), { max = s }):t())
      return mf.cat { a, b, w }, (y + v):to(mf.float64), y:sum(0, { keepdim = true })
    end, true, mf.zeros(2, 3), mf.ones(2, 2):t()[1])
    assert.equal([[
graph step cells 1
%0 = input x0: float32[2, 3]
%1 = input x1: float32[2] strides [2]
%2 = capture c0: float32[2, 3]
%3 = capture c1: float32[4]
%4 = number @0(0.25): float64
%5 = mul(%0, %4): float32[2, 3]
%6 = number 2: int64
%7 = add(%5, %6): float32[2, 3]
%8, %9 = split(%7, split_size=[1, 1]): float32[1, 3], float32[1, 3]
%10 = fill_(%2, value=0.5): float32[2, 3]
%11 = t(%0): float32[3, 2]
%12 = clamp(%11, max=@0(0.25)): float32[3, 2]
%13 = t(%12): float32[2, 3]
%14 = add(%10, %13): float32[2, 3]
%15 = cat([%8, %9, %14]): float32[4, 3]
%16 = slice_base(%3, base_stride=[1], size=[2], stride=[2], offset=0): float32[2]
%17 = add(%1, %16): float32[2]
%18 = cast(%17, dtype=float64): float64[2]
%19 = sum(%1, dim=[0], keepdim=true): float32[1]
write %2 = %14
return %15, %18, %19
]], without_lines(text))
  end)

  it('names the line of each op', function()
    local line = debug.getinfo(1, 'l').currentline + 1
    local text = text_of(function(x) local y = x:exp() return y end, true, mf.ones(1))
    local want = ('%%1 = exp(%%0): float32[1]  # spec/graph_text_spec.lua:%d\n'):format(line)
    assert.truthy(text:find(want, 1, true), text)
  end)

  for name, make in pairs(models) do
    it('reads back: ' .. name, function()
      for _, plain in ipairs { true, false } do
        mf.manual_seed(1)
        local step, x, y = make()
        local text = text_of(step, plain, x, y)
        assert.truthy(#text > 1000)
        assert.equal(text, (mf._graph_pass(text, '')))
        local _, _, dot = mf._graph_pass(text, '')
        assert.truthy(dot:find('digraph "step" {', 1, true) and dot:find('label="cross_entropy"', 1, true))
      end
    end)
  end

  -- Texts that are right as they stand.
  for _, body in ipairs {
    'graph step\nreturn\n',
    'graph "a b\\"\\\\\\n" cells 3 generators 2\nreturn\n',
    'graph step\n%0 = input "x y": float32[]\nreturn %0, %0\n',
    'graph step\n%0 = number nan: float64\n%1 = number -inf: float64\n%2 = number -0: float64\nreturn\n',
    'graph step\n%0 = number 0.1: float64\nreturn\n',
    'graph step\n%0 = number 9007199254740992: int64\n%1 = number 1e-300: float64\nreturn\n',
    'graph step\n%0 = input x: float32[0, 3]@meta\n%1 = sum(%0, dim=[0, 1]): float32[]@meta\nreturn %1\n',
    'graph step\n%0 = input x: float32[2, 3] strides [1, 2]\nreturn\n',
    'graph step\n%0 = input x: float32[2]\n%1 = dropout(%0, generator=7): float32[2]  # a b:1\nreturn %1\n',
    'graph step generators 2\n%0 = input x: float32[2]\n%1 = dropout(%0, generator=1:7): float32[2]\nreturn %1\n',
    'graph step\n%0 = zeros(size=[2], dtype=int8): int8[2]  # "a\tb"\nreturn %0\n',
    'graph step\n%0 = input x: float32[6]\n%1 = layer_norm(%0, none, %0, normalized_shape=[6]): float32[6]\nreturn\n',
  } do
    it('reads back: ' .. body:gsub('%s+', ' '), function() assert.equal(body, (mf._graph_pass(body, ''))) end)
  end

  it('settles arguments as a trace does', function()
    assert.equal('graph g\n%0 = input x: float32[2, 3]\n%1 = sum(%0, dim=[1]): float32[2]\nreturn %1\n',
      (mf._graph_pass('graph g\n%0 = input x: float32[2, 3]\n%1 = sum(%0, dim=[-1]): float32[2]\nreturn %1', '')))
  end)

  -- What is wrong, and what the error says of it.
  local x = 'graph step cells 1\n%0 = input x: float32[2, 3]\n'
  for text, why in pairs {
    [''] = "line 1: 'graph' is expected, not the end of the line",
    ['graph'] = 'line 1: a name is expected',
    ['graph step'] = "line 1: 'return' is missing",
    ['graph step cells 99999999999'] = 'line 1: cells 99999999999; legal are',
    ['graph step\n%1 = input x: float32[]\nreturn'] = 'line 2: %1 is made where %0 should be',
    [x .. '%1 = nothing(%0): float32[2, 3]\nreturn'] = 'line 3: there is no op nothing',
    [x .. '%1 = exp(%1): float32[2, 3]\nreturn'] = 'line 3: %1 is not made above',
    [x .. '%1 = exp(%99999999999999999999): float32[2, 3]\nreturn'] = 'line 3: a whole number is too large',
    [x .. '%1 = exp(%0): float32[2, 4]\nreturn'] =
      'line 3: output 0 is float32 (2, 4), inference says float32 (2, 3)',
    [x .. '%1 = exp(%0): float64[2, 3]\nreturn'] = 'inference says float32',
    [x .. '%1, %2 = exp(%0): float32[2, 3], float32[2, 3]\nreturn'] = 'has 2 outputs, inference says 1',
    [x .. '%1 = exp(): float32[2, 3]\nreturn'] = 'line 3: x is missing',
    [x .. '%1 = exp(%0, %0): float32[2, 3]\nreturn'] = 'line 3: exp has not so many inputs',
    [x .. '%1 = exp(%0) float32[2, 3]\nreturn'] = "line 3: ':' is expected, not 'float32[2, 3]'",
    [x .. '%1 = exp(%0): float31[2, 3]\nreturn'] = 'float31 is no dtype',
    [x .. '%1 = exp(%0): float32[2, 3] more\nreturn'] = "the line should end before 'more'",
    [x .. '%1 = exp(%0, y=1): float32[2, 3]\nreturn'] = 'exp has no argument y',
    [x .. '%1 = sum(%0, dim=[0], dim=[0]): float32[3]\nreturn'] = 'dim is given twice',
    [x .. '%1 = sum(%0, dim=[7]): float32[3]\nreturn'] = 'sum: dim 7 is out of range',
    [x .. '%1 = sum(%0, dim=[' .. ('0, '):rep(99) .. '0]): float32[3]\nreturn'] = 'a list of more than 24 numbers',
    [x .. '%1 = sum(%0, x=%0): float32[]\nreturn'] = 'x stands among the inputs, without a name',
    [x .. '%1 = transpose(%0, dim0=0): float32[3, 2]\nreturn'] = 'transpose needs dim1',
    [x .. '%1 = gelu(%0, approximate=well): float32[2, 3]\nreturn'] = "'well' is none of none|tanh",
    [x .. '%1 = cat([%0, none]): float32[2, 3]\nreturn'] = 'xs is missing',
    [x .. '%1 = cat([]): float32[2, 3]\nreturn'] = 'line 3: cat',
    [x .. '%1 = clamp(%0, max=@1(2)): float32[2, 3]\nreturn'] = 'cell 1; legal are 0 to 0',
    [x .. '%1 = cast(%0, dtype=@0(float64)): float64[2, 3]\nreturn'] = 'dtype cannot be a cell',
    [x .. '%1 = nonzero(%0): int64[2, 3]\nreturn'] = 'depends on data',
    [x .. '%1 = number 2: int64[]\nreturn'] = 'is no number',
    [x .. '%1 = exp(%0): float32\nreturn'] = 'output 0 cannot be a plain number',
    [x .. '%1 = dropout(%0, generator=-1): float32[2, 3]\nreturn'] = 'stream numbers are not negative',
    [x .. '%1 = dropout(%0, generator=9:1): float32[2, 3]\nreturn'] = 'there is no generator 9',
    [x .. '%1 = fill_(%0, value=x): float32[2, 3]\nreturn'] = "a number is expected, not 'x)",
    [x .. '%1 = fill_(%0, value=1): float32[3]\nreturn'] = 'the new value of x has another shape or dtype',
    [x .. 'fill_(%0, value=1)\nreturn'] = 'writes too much',
    [x .. 'write %0 = %0\nreturn'] = 'only captures can be written',
    [x .. '%1 = capture c: float32[3]\nwrite %1 = %0\nreturn'] = 'what is written has another shape',
    [x .. '%1 = capture c: float32[2, 3]\nwrite %1 = %0\nwrite %1 = %1\nreturn'] = 'the capture is written twice',
    [x .. '%1 = capture c: float32[2, 3]\nwrite %1 = %0\n%2 = exp(%0): float32[2, 3]\nreturn'] = 'writes last',
    [x .. '%1 = exp(%0): float32[2, 3]\n%2 = input y: float32[]\nreturn'] = 'inputs and captures come first',
    [x .. '%1 = input y: float32[2] strides [1, 2]\nreturn'] = 'there are 1 dims, and not as many strides',
    [x .. '%1 = input y: float32[2] strides [-1]\nreturn'] = 'strides lead too far',
    [x .. '%1 = input y: float32[9] strides [9223372036854775807]\nreturn'] = 'strides lead too far',
    [x .. '%1 = input y: float32[-2]\nreturn'] = 'size -2 in dim 0 is negative',
    [x .. '%1 = input y: float32[9999999999, 9999999999]\nreturn'] = 'is too large',
    [x .. '%1 = input "y: float32[]\nreturn'] = 'a quoted text does not end',
    [x .. '%1 = input "\\y": float32[]\nreturn'] = 'an escape that there is not',
    [x .. 'return %1'] = '%1 is not made above',
    [x .. 'return %0\nreturn'] = "'return' ends a graph, but there is 'return'",
  } do
    it('is refused: ' .. why, function()
      local ok, message = pcall(mf._graph_pass, text, '')
      assert.is_false(ok)
      assert.truthy(message:find(why, 1, true), message)
    end)
  end

  it('survives damage', function()
    local random, step, x0, y0 = 7, models.transformer()
    local text = text_of(step, true, x0, y0)
    local function draw(n)
      random = (random * 1103515245 + 12345) % 2 ^ 31
      return math.floor(random / 2 ^ 31 * n)
    end
    local pieces = { '%', '[', ']', '(', ')', ',', '=', '-', '0', '99999999999999999999', '-1', 'none', '"', '\n',
      '@0(', 'nan', '#', ' ', 'float64', 'bool', '\\x', '1e999', '[0, 0, 0]', '%3', '%0' }
    local read = 0
    for _ = 1, 3000 do
      local damaged = text
      for _ = 0, draw(3) do
        local at = draw(#damaged)
        local piece = draw(4) > 0 and pieces[draw(#pieces) + 1] or ''
        damaged = damaged:sub(1, at) .. piece .. damaged:sub(at + 1 + draw(4))
      end
      local ok, again = pcall(mf._graph_pass, damaged, '')
      if ok then
        read = read + 1
        assert.equal(again, (mf._graph_pass(again, '')))
      else
        assert.truthy(again:find('graph', 1, true), again)
      end
    end
    assert.truthy(read > 50 and read < 2900, read)
  end)
end)
