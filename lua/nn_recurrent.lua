-- Recurrent layers: RNN, LSTM, GRU and their cells. Parameters, their order, names and gates are PyTorch's.
--
-- All inputs of a layer go through one matrix product; then a step at a time. A step is written with the
-- usual ops, so that it may be compiled, with the length of the sequence as part of the graph.
local mf = require 'moonflow.core'
local nn = require 'moonflow.nn_module'
local init = require 'moonflow.nn_init'
local options = require 'moonflow.options'
local arguments, count, fail = options.arguments, options.count, options.fail
local Module, Parameter = nn.Module, nn.Parameter

-- -- Steps ----------------------------------------------------------------------------------------

-- A step gets what the inputs and the state h give its gates (N, gates * H), and the state; it returns
-- the state after it.
local steps = {}

function steps.tanh(x, h) return (x + h):tanh() end
function steps.relu(x, h) return (x + h):relu() end

function steps.lstm(x, h, state)
  local i, f, g, o = unpack((x + h):chunk(4, { dim = -1 }))
  local c = f:sigmoid() * state[2] + i:sigmoid() * g:tanh()
  return o:sigmoid() * c:tanh(), c
end

function steps.gru(x, h, state)
  local xr, xz, xn = unpack(x:chunk(3, { dim = -1 }))
  local hr, hz, hn = unpack(h:chunk(3, { dim = -1 }))
  local r, z = (xr + hr):sigmoid(), (xz + hz):sigmoid()
  local n = (xn + r * hn):tanh()
  return n + z * (state[1] - n)
end

local gates = { tanh = 1, relu = 1, lstm = 4, gru = 3 }

local function add_parameters(self, suffix, n_gates, input_size, hidden_size, bias, proj_size)
  local out = proj_size > 0 and proj_size or hidden_size
  local bound = hidden_size > 0 and 1 / math.sqrt(hidden_size) or 0
  local function add(name, ...) self[name .. suffix] = Parameter(init.uniform_(mf.empty(...), -bound, bound)) end
  add('weight_ih', n_gates * hidden_size, input_size)
  add('weight_hh', n_gates * hidden_size, out)
  if bias then
    add('bias_ih', n_gates * hidden_size)
    add('bias_hh', n_gates * hidden_size)
  end
  if proj_size > 0 then add('weight_hr', proj_size, hidden_size) end
end

local function want_tensor(name, what, x)
  if not mf.is_tensor(x) then fail('%s: %s must be a tensor, is %s', name, what, options.describe(x)) end
end

local function want_shape(name, what, x, shape)
  want_tensor(name, what, x)
  local same = x:dim() == #shape
  for d = 1, #shape do same = same and x:size(d - 1) == shape[d] end
  if not same then
    fail('%s: %s must have the shape (%s), has %s', name, what, table.concat(shape, ', '),
      tostring(x.shape))
  end
end

-- -- Layers ---------------------------------------------------------------------------------------

-- One direction of one layer over the list xs of inputs' gates: the outputs in order and the last state.
local function run(self, step, suffix, xs, state, reverse)
  local w, b, project = self['weight_hh' .. suffix], self['bias_hh' .. suffix], self['weight_hr' .. suffix]
  local ys = {}
  for k = 1, #xs do
    local t = reverse and #xs + 1 - k or k
    local h, c = step(xs[t], mf.linear(state[1], w, b), state)
    if project then h = mf.linear(h, project) end
    state = { h, c }
    ys[t] = h
  end
  return ys, state
end

-- The states at the beginning by layer and direction, from what was given.
local function first_states(self, given, n, like)
  local slices = self.num_layers * (self.bidirectional and 2 or 1)
  local list = {}
  for s, size in ipairs(self._state_sizes) do
    local t = given and given[s] or mf.zeros({ slices, n, size }, { dtype = like.dtype, device = like.device })
    want_shape(self._name, s == 1 and 'h' or 'c', t, { slices, n, size })
    list[s] = t:unbind(0)
  end
  return list
end

-- What was given as the first state as a list, with a batch.
local function read_state(self, given, batched)
  if given == nil then return nil end
  local list = given
  if #self._state_sizes == 1 then list = { given } end
  if type(list) ~= 'table' or #list ~= #self._state_sizes then
    fail('%s: the state must be {h, c}, is %s', self._name, options.describe(given))
  end
  local out = {}
  for k, t in ipairs(list) do
    want_tensor(self._name, 'the state', t)
    out[k] = batched and t or t:unsqueeze(1)
  end
  return out
end

local function forward(self, x, given)
  want_tensor(self._name, 'the input', x)
  local batched, step = x:dim() == 3, steps[self._step]
  if not batched and x:dim() ~= 2 then fail('%s: the input must have 2 or 3 dims, has %d', self._name, x:dim()) end
  if x:size(-1) ~= self.input_size then
    fail('%s: the input has %d features, input_size is %d', self._name, x:size(-1), self.input_size)
  end
  if not batched then x = x:unsqueeze(1)
  elseif self.batch_first then x = x:transpose(0, 1) end
  if x:size(0) == 0 then fail('%s: the input is a sequence of length 0', self._name) end
  local first = first_states(self, read_state(self, given, batched), x:size(1), x)
  local last, slice = {}, 0
  for s = 1, #self._state_sizes do last[s] = {} end
  for layer = 0, self.num_layers - 1 do
    local parts = {}
    for direction = 1, self.bidirectional and 2 or 1 do
      local suffix = ('_l%d%s'):format(layer, direction == 2 and '_reverse' or '')
      local xs = mf.linear(x, self['weight_ih' .. suffix], self['bias_ih' .. suffix]):unbind(0)
      slice = slice + 1
      local state = {}
      for s = 1, #first do state[s] = first[s][slice] end
      local ys
      ys, state = run(self, step, suffix, xs, state, direction == 2)
      for s = 1, #first do last[s][slice] = state[s] end
      parts[direction] = mf.stack(ys)
    end
    x = #parts == 1 and parts[1] or mf.cat(parts, { dim = -1 })
    if self.dropout > 0 and self.training and layer < self.num_layers - 1 then x = mf.dropout(x, self.dropout) end
  end
  for s = 1, #last do
    last[s] = mf.stack(last[s])
    if not batched then last[s] = last[s]:squeeze(1) end
  end
  if not batched then x = x:squeeze(1)
  elseif self.batch_first then x = x:transpose(0, 1) end
  return x, #last == 1 and last[1] or last
end

local order = { 'num_layers', 'bias', 'batch_first', 'dropout', 'bidirectional' }

local function set_up(self, step, input_size, hidden_size, o)
  local name = self._name
  self.input_size = count(name, 'input_size', input_size)
  self.hidden_size = count(name, 'hidden_size', hidden_size, 1)
  self.num_layers = count(name, 'num_layers', o.num_layers, 1)
  if type(o.dropout) ~= 'number' or not (o.dropout >= 0 and o.dropout <= 1) then
    fail('%s: dropout must be a number from 0 to 1, is %s', name, options.describe(o.dropout))
  end
  self.bias, self.batch_first, self.dropout, self.bidirectional = o.bias, o.batch_first, o.dropout, o.bidirectional
  self.proj_size = count(name, 'proj_size', o.proj_size or 0)
  if self.proj_size >= hidden_size then fail('%s: proj_size must be smaller than hidden_size', name) end
  self._step = step
  local out = self.proj_size > 0 and self.proj_size or hidden_size
  self._state_sizes = step == 'lstm' and { out, hidden_size } or { out }
  local size = input_size
  for layer = 0, o.num_layers - 1 do
    for direction = 1, o.bidirectional and 2 or 1 do
      local suffix = ('_l%d%s'):format(layer, direction == 2 and '_reverse' or '')
      add_parameters(self, suffix, gates[step], size, hidden_size, o.bias, self.proj_size)
    end
    size = out * (o.bidirectional and 2 or 1)
  end
end

local function repr(self)
  local text = ('%d, %d'):format(self.input_size, self.hidden_size)
  if self.proj_size > 0 then text = text .. ', proj_size=' .. self.proj_size end
  if self.num_layers ~= 1 then text = text .. ', num_layers=' .. self.num_layers end
  if not self.bias then text = text .. ', bias=False' end
  if self.batch_first then text = text .. ', batch_first=True' end
  if self.dropout ~= 0 then text = text .. ', dropout=' .. self.dropout end
  if self.bidirectional then text = text .. ', bidirectional=True' end
  return text
end

-- LSTM layers (Hochreiter and Schmidhuber, 1997) over x (T, N, input_size), (N, T, input_size) with
-- batch_first, or (T, input_size); with proj_size, h goes through a matrix (Sak et al., 2014).
-- m(x, {h, c}) returns the last layer's outputs, and {h, c} behind the last input, each (num_layers *
-- directions, N, size); without a state it begins with zeros. dropout is between layers.
nn.LSTM = Module:extend 'LSTM'
function nn.LSTM:init(input_size, hidden_size, ...)
  local o = arguments('LSTM', { order[1], order[2], order[3], order[4], order[5], 'proj_size' }, { num_layers = 1,
    bias = true, batch_first = false, dropout = 0, bidirectional = false, proj_size = 0 }, ...)
  set_up(self, 'lstm', input_size, hidden_size, o)
end
nn.LSTM.forward, nn.LSTM.extra_repr = forward, repr

-- GRU layers (Cho et al., 2014), with the reset gate behind the matrix, as cuDNN has it. As LSTM, but the
-- state is one tensor.
nn.GRU = Module:extend 'GRU'
function nn.GRU:init(input_size, hidden_size, ...)
  set_up(self, 'gru', input_size, hidden_size, arguments('GRU', order, { num_layers = 1, bias = true,
    batch_first = false, dropout = 0, bidirectional = false }, ...))
end
nn.GRU.forward, nn.GRU.extra_repr = forward, repr

-- Layers of h' = nonlinearity(W x + b + U h + c) (Elman, 1990); nonlinearity is 'tanh' or 'relu'. As GRU.
nn.RNN = Module:extend 'RNN'
function nn.RNN:init(input_size, hidden_size, ...)
  local o = arguments('RNN', { order[1], 'nonlinearity', order[2], order[3], order[4], order[5] }, { num_layers = 1,
    nonlinearity = 'tanh', bias = true, batch_first = false, dropout = 0, bidirectional = false }, ...)
  self.nonlinearity = options.choice('RNN', 'nonlinearity', o.nonlinearity, { 'tanh', 'relu' })
  set_up(self, o.nonlinearity, input_size, hidden_size, o)
end
nn.RNN.forward, nn.RNN.extra_repr = forward, repr

-- -- Cells ----------------------------------------------------------------------------------------

local function set_up_cell(self, step, input_size, hidden_size, bias)
  self.input_size = count(self._name, 'input_size', input_size)
  self.hidden_size = count(self._name, 'hidden_size', hidden_size, 1)
  self.bias, self._step = bias, step
  add_parameters(self, '', gates[step], input_size, hidden_size, bias, 0)
end

-- One step from the states in the list `given`, each (N, hidden_size) or (hidden_size).
local function cell(self, x, given, n_states)
  want_tensor(self._name, 'the input', x)
  if x:dim() ~= 1 and x:dim() ~= 2 then fail('%s: the input must have 1 or 2 dims, has %d', self._name, x:dim()) end
  local batched, state = x:dim() == 2, {}
  if not batched then x = x:unsqueeze(0) end
  want_shape(self._name, 'the input', x, { x:size(0), self.input_size })
  for s = 1, n_states do
    local t = given and given[s]
    if t == nil then t = mf.zeros({ x:size(0), self.hidden_size }, { dtype = x.dtype, device = x.device })
    elseif not batched then
      want_tensor(self._name, 'the state', t)
      t = t:unsqueeze(0)
    end
    want_shape(self._name, 'the state', t, { x:size(0), self.hidden_size })
    state[s] = t
  end
  local h, c = steps[self._step](mf.linear(x, self.weight_ih, self.bias_ih),
    mf.linear(state[1], self.weight_hh, self.bias_hh), state)
  if batched then return h, c end
  return h:squeeze(0), c and c:squeeze(0)
end

local function cell_repr(self)
  local text = ('%d, %d'):format(self.input_size, self.hidden_size)
  if not self.bias then text = text .. ', bias=False' end
  if self.nonlinearity and self.nonlinearity ~= 'tanh' then text = text .. ', nonlinearity=' .. self.nonlinearity end
  return text
end

-- One step of an LSTM: m(x, {h, c}) returns h and c, (N, hidden_size) or (hidden_size).
nn.LSTMCell = Module:extend 'LSTMCell'
function nn.LSTMCell:init(input_size, hidden_size, ...)
  set_up_cell(self, 'lstm', input_size, hidden_size, arguments('LSTMCell', { 'bias' }, { bias = true }, ...).bias)
end
function nn.LSTMCell:forward(x, state)
  if state ~= nil and (type(state) ~= 'table' or #state ~= 2) then
    fail('LSTMCell: the state must be {h, c}, is %s', options.describe(state))
  end
  return cell(self, x, state, 2)
end
nn.LSTMCell.extra_repr = cell_repr

-- One step of a GRU: m(x, h) returns h, (N, hidden_size) or (hidden_size).
nn.GRUCell = Module:extend 'GRUCell'
function nn.GRUCell:init(input_size, hidden_size, ...)
  set_up_cell(self, 'gru', input_size, hidden_size, arguments('GRUCell', { 'bias' }, { bias = true }, ...).bias)
end
function nn.GRUCell:forward(x, h) return (cell(self, x, { h }, 1)) end
nn.GRUCell.extra_repr = cell_repr

-- One step of an RNN: m(x, h) returns h, (N, hidden_size) or (hidden_size).
nn.RNNCell = Module:extend 'RNNCell'
function nn.RNNCell:init(input_size, hidden_size, ...)
  local o = arguments('RNNCell', { 'bias', 'nonlinearity' }, { bias = true, nonlinearity = 'tanh' }, ...)
  self.nonlinearity = options.choice('RNNCell', 'nonlinearity', o.nonlinearity, { 'tanh', 'relu' })
  set_up_cell(self, o.nonlinearity, input_size, hidden_size, o.bias)
end
function nn.RNNCell:forward(x, h) return (cell(self, x, { h }, 1)) end
nn.RNNCell.extra_repr = cell_repr

return nn
