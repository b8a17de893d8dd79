-- Runs before each spec file. With MF_SPEC_STRESS=N the collector never rests: cycle follows cycle
-- without pause, and every N instructions a whole one runs, so that what is held by nothing goes at once.
local instructions = tonumber(os.getenv 'MF_SPEC_STRESS')
if instructions then
  jit.off() -- hooks are not called in compiled code
  collectgarbage('setpause', 0)
  collectgarbage('setstepmul', 400)
  debug.sethook(function() collectgarbage() end, '', instructions)
end

-- In a build for faults, MF_SPEC_FAULT=N makes the N-th request of the file fail (0: none), and how many
-- there were is said at the end.
local request = tonumber(os.getenv 'MF_SPEC_FAULT')
if request then
  local mf = require 'moonflow'
  require 'busted'.subscribe({ 'suite', 'end' }, function()
    local calls = mf._fault_counts()
    mf._fault(0, 0, 0)
    io.stderr:write(('requests: %d\n'):format(calls))
    return nil, true
  end)
  mf._fault(15, request, 1)
end
