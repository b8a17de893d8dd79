-- The module `mf`: what the C binding made (moonflow.core), with the Lua parts on top. nn, optim
-- and data are loaded on first use, so that a short script starts fast.
local mf = require 'moonflow.core'

if not mf._ready then
  mf._ready = true
  mf._trace = {} -- see compile.lua
  local parts = {} -- ops.lua and every ops_FAMILY.lua
  for name in pairs(package.preload) do
    if name:match '^moonflow%.ops' then parts[#parts + 1] = name end
  end
  table.sort(parts)
  for _, name in ipairs(parts) do require(name) end
  mf._set_gradients(require 'moonflow.grad')
  local lazy = { nn = 'moonflow.nn', optim = 'moonflow.optim', data = 'moonflow.data',
    Function = 'moonflow.function', cli = 'moonflow.cli', progress = 'moonflow.progress', save = 'moonflow.save',
    load = 'moonflow.save', help = 'moonflow.help', compile = 'moonflow.compile',
    scalar = 'moonflow.compile', profile = 'moonflow.profile', comm = 'moonflow.comm',
    utils = 'moonflow.utils', amp = 'moonflow.amp', parallelize = 'moonflow.parallelize' }
  local several = { save = true, load = true, compile = true, scalar = true, parallelize = true } -- fields of their module
  mf._parts = lazy
  -- Gets the texts of warnings; a program may put its own function here.
  function mf.warn(text) io.stderr:write(text, '\n') end
  setmetatable(mf, {
    __index = function(_, key)
      local name = lazy[key]
      if not name then return nil end
      local loaded = require(name)
      if several[key] then loaded = loaded[key] end
      rawset(mf, key, loaded)
      return loaded
    end,
  })
end

return mf
