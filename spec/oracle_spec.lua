-- The oracle: walks the op table and checks every op against what must hold for all of them. A new
-- op is checked without a line here: see spec/oracle/cases.lua for its inputs where the signature
-- does not tell them, and spec/oracle/exempt.lua for what it is excused from.
local mf = require 'moonflow'
local Cases = require 'spec.oracle.cases'
local Compiled = require 'spec.oracle.compiled'
local Gradient = require 'spec.oracle.gradient'
local Layout = require 'spec.oracle.layout'
local Run = require 'spec.oracle.run'
local Split = require 'spec.oracle.split'
local exempt = require 'spec.oracle.exempt'

local none = {}

local function maker(op, options)
  return function() return Cases.list(op, options) end
end

local function each(what, f, filter)
  describe('oracle #long, ' .. what, function()
    for _, op in ipairs(Run.ops) do
      if not filter or filter(op) then it(op.name, function() f(op, exempt.no_output_gradient[op.name] or none) end) end
    end
  end)
end

local function is_defined(op) return not exempt.undefined[op.name] end
local function is_determined(op) return is_defined(op) and not op.flags.random end
local function has_gradient(op) return next(op.gradient) ~= nil end
local function has_slope(op) return has_gradient(op) and not exempt.total_gradient[op.name] end

each('runs', function(op)
  for k, args in ipairs(Cases.list(op)) do
    local ok, text = pcall(Run.call, op, args)
    if not ok then error(('case %d: %s'):format(k, tostring(text)), 0) end
  end
end)

each('gradients', function(op, outputs)
  local checked = 0
  local list, smooth = Cases.list(op, { B = 2 })
  for k, args in ipairs(list) do
    if smooth[k] then checked = checked + Gradient.check_first(op, args, outputs) end
  end
  assert(checked > 0, 'no case has a float input that the gradient serves')
end, has_slope)

each('second gradients', function(op, outputs)
  local list, smooth = Cases.list(op, { B = 2 })
  for k, args in ipairs(list) do
    if smooth[k] then Gradient.check_second(op, args, outputs) end
  end
end, has_slope)

describe('oracle #long, without gradient', function()
  local function float_params(op)
    local names = {}
    for _, args in ipairs(Cases.list(op, { B = 2 })) do
      for _, slot in ipairs(Run.tensors(op, args)) do
        if slot.tensor:is_floating_point() then names[slot.param.name] = true end
      end
    end
    return names
  end
  for _, op in ipairs(Run.ops) do
    it(op.name, function()
      local names = float_params(op)
      if op.flags.no_grad then
        assert.is_false(has_gradient(op))
      elseif not has_gradient(op) then
        assert(not next(names) or exempt.no_gradient[op.name],
          'takes floats, has no gradient and is not listed in exempt.no_gradient')
      else
        for name in pairs(names) do
          assert(op.gradient[name] or exempt.no_input_gradient[op.name .. '.' .. name],
            ('%s has no gradient and is not listed in exempt.no_input_gradient'):format(name))
        end
      end
    end)
  end
end)

local function takes_any_memory(op) return is_determined(op) and not exempt.needs_memory[op.name] end
for _, mode in ipairs { 'reversed', 'spaced', 'channels_last' } do
  each(mode .. ' memory', function(op) Layout.check_memory(op, maker(op), mode) end, takes_any_memory)
end
each('gradients in other memory', function(op, outputs)
  Layout.check_memory_gradients(op, maker(op, { B = 2 }), outputs)
end,
  function(op) return has_gradient(op) and takes_any_memory(op) end)
each('expanded memory', function(op) Layout.check_expanded(op, maker(op)) end, function(op)
  return takes_any_memory(op) and not exempt.no_expanded[op.name]
end)

each('float32 against float64', function(op, outputs) Layout.check_dtype(op, maker(op), mf.float32, 2e-6, outputs) end,
  is_determined)
for _, dtype in ipairs { 'float16', 'bfloat16' } do
  each(dtype .. ' against float64', function(op, outputs)
    Layout.check_dtype(op, maker(op), mf[dtype], dtype == 'float16' and 2e-3 or 1.6e-2, outputs)
  end, function(op) return is_determined(op) and not exempt.no_half[op.name] end)
end
each('whole numbers', function(op) Layout.check_integers(op, maker(op)) end, is_defined)

each('in place', function(op, outputs)
  local compared = Layout.check_in_place(op, maker(op, { B = 2 }), outputs)
  assert(compared > 0, 'no case of its result fits into its input')
end, function(op) return op.call_ ~= nil and is_defined(op) end)

each('on meta tensors', function(op) Layout.check_meta(op, maker(op), not exempt.needs_memory[op.name]) end)
each('without elements', function(op, outputs) Layout.check_empty(op, maker(op, { B = 0 }), outputs) end,
  function(op) return not exempt.no_empty[op.name] end)
each('0-d', function(op) Layout.check_0d(op, maker(op)) end, function(op) return op.pointwise end)
each('threads', function(op) Layout.check_threads(op, maker(op, { L = 3001 })) end, is_defined)

local function is_planned(op) return is_defined(op) and not op.flags.data end

local function check_compiled(op, list, outputs, how)
  local slopes = 0
  local slope = has_gradient(op) and not exempt.no_graph_gradient[op.name]
  for _, args in ipairs(list) do
    Compiled.check_forward(op, args, how)
    if slope then slopes = slopes + Compiled.check_backward(op, args, outputs, how) end
  end
  assert(slopes > 0 or not slope, 'no case has a gradient')
end
each('compiled', function(op, outputs) check_compiled(op, Cases.list(op), outputs) end, is_planned)
each('compiled in float32', function(op, outputs)
  local list = Cases.list(op)
  for k, args in ipairs(list) do list[k] = Layout.with_dtype(op, args, mf.float32) end
  check_compiled(op, list, outputs, { passes = { layout = false } })
  check_compiled(op, list, outputs, { near = 1e-5 })
end, is_planned)
for _, mode in ipairs { 'reversed', 'spaced', 'channels_last' } do
  each('compiled in ' .. mode .. ' memory', function(op, outputs)
    check_compiled(op, Cases.list(op), outputs, { memory = Layout.memories[mode] })
  end, function(op) return is_planned(op) and not exempt.needs_memory[op.name] end)
end
each('compiled without elements', function(op)
  for _, args in ipairs(Cases.list(op, { B = 0 })) do Compiled.check_forward(op, args) end
end, function(op) return is_planned(op) and not exempt.no_empty[op.name] end)
each('refused by the compiler', function(op)
  assert(exempt.no_graph[op.name], 'has the flag OP_DATA and is not listed in exempt.no_graph')
  local ok, text = pcall(Compiled.check_forward, op, Cases.list(op)[1])
  assert(not ok and tostring(text):find('depends on data', 1, true), text)
end, function(op) return op.flags.data end)
each('gradient refused by the compiler', function(op, outputs)
  local ok, text = pcall(Compiled.check_backward, op, Cases.list(op)[1], outputs)
  assert(not ok and tostring(text):find('depends on data', 1, true), text)
end, function(op) return exempt.no_graph_gradient[op.name] end)

for _, n in ipairs { 2, 3 } do
  each(('split over %d and over %d times %d'):format(n, n, n), function(op)
    if op.flags.indexed then return end -- parts of it know where they begin: see oracle_global_spec.lua
    local declared = op.sbp or op.linear or op.sbp_rule or op.flags.view
    if not declared then
      return assert(exempt.no_sbp[op.name], 'declares no SBP rule and is not listed in exempt.no_sbp')
    end
    local count = 0
    for _, args in ipairs(Cases.list(op)) do count = count + Split.check(op, args, n, 2) end
    if op.sbp ~= 'B' and not exempt.no_sbp[op.name] then assert(count > 0, 'has a rule that never splits') end
  end, is_defined)
end

describe('oracle #long, lists', function()
  local by_name = {}
  for _, op in ipairs(Run.ops) do by_name[op.name] = op end
  for list, entries in pairs(exempt) do
    it('exempt.' .. list .. ' names ops, with reasons', function()
      for name, reason in pairs(entries) do
        assert(by_name[name:match '^[^.]+'], name .. ' is no op')
        assert(type(reason) == 'table' or #reason > 10, name .. ' has no reason')
      end
    end)
  end
  it('every entry of cases.lua names an op', function()
    for name in pairs(Cases.entries) do assert(by_name[name], name .. ' is no op') end
    for name in pairs(Cases.domain) do assert(by_name[name], name .. ' is no op') end
  end)
  it('no op with a gradient is exempt from having one', function()
    for name in pairs(exempt.no_gradient) do assert(not has_gradient(by_name[name]), name) end
    for name in pairs(exempt.no_input_gradient) do
      local op, param = name:match '^(.-)%.(.+)$'
      assert(not by_name[op].gradient[param], name)
    end
  end)
end)
