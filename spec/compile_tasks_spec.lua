-- What spec/compile_spec.lua says of compiled steps holds when each op is a task of the runtime.
local mf = require 'moonflow'
local compile = mf.compile

local function one_op_tasks(f, o)
  local options = { one_op_tasks = true }
  for k, v in pairs(o or {}) do options[k] = v end
  return compile(f, options)
end

describe('tasks of one op', function()
  setup(function() mf.compile = one_op_tasks end)
  teardown(function() mf.compile = compile end)
  it('are as many as ops', function()
    local f = mf.compile(function(x) return (x:matmul(x) + 1):sum() end)
    f(mf.ones(2, 2))
    local _, tasks = f.age[1].job:plan():gsub('\ntask ', '')
    local _, steps = f.age[1].job:plan():gsub('\nstep ', '')
    assert(tasks == steps and steps > 1)
  end)
  setfenv(assert(loadfile 'spec/compile_spec.lua'), getfenv(1))()
end)
