-- Runs before each spec file. With MF_SPEC_STRESS the collector never rests: cycle follows cycle without
-- pause, and every 499 instructions a whole one runs, so that what is held by nothing goes at once.
if os.getenv 'MF_SPEC_STRESS' then
  jit.off() -- hooks are not called in compiled code
  collectgarbage('setpause', 0)
  collectgarbage('setstepmul', 400)
  debug.sethook(function() collectgarbage() end, '', 499)
end
