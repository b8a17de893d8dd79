-- Runs before each spec file. With MF_SPEC_STRESS=N the collector never rests: cycle follows cycle
-- without pause, and every N instructions a whole one runs, so that what is held by nothing goes at once.
local instructions = tonumber(os.getenv 'MF_SPEC_STRESS')
if instructions then
  jit.off() -- hooks are not called in compiled code
  collectgarbage('setpause', 0)
  collectgarbage('setstepmul', 400)
  debug.sethook(function() collectgarbage() end, '', instructions)
end
