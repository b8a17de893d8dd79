-- Options of a script's command line.
--
--   local o = mf.cli(arg, 'Trains a network.', {
--     { 'lr', 0.1, 'learning rate' },
--     { 'resume', '', 'file to go on from' },
--   })
--
-- An entry is {name, default, help}; its type is that of the default (false: a flag). --help prints
-- them; an unknown name is an error. What is no option is left in o[1], o[2], ...
local options = require 'moonflow.options'

local function usage(title, entries)
  local lines = { title, '' }
  for _, e in ipairs(entries) do
    local default = (e[2] == false or e[2] == '') and '' or (' (%s)'):format(tostring(e[2]))
    local name = e[1] .. (e[2] == false and '' or ' X')
    lines[#lines + 1] = ('  --%-14s %s%s'):format(name, e[3], default)
  end
  return table.concat(lines, '\n')
end

local function fail(text)
  io.stderr:write(text, '; --help lists the options\n')
  os.exit(2, true)
end

return function(argv, title, entries)
  local o, known = {}, { help = true }
  for _, e in ipairs(entries) do
    o[e[1]] = e[2]
    known[e[1]] = e
  end
  local i = 1
  while argv[i] do
    local name, inline = argv[i]:match '^%-%-([%w%-]+)=?(.*)$'
    if not name then
      o[#o + 1] = argv[i]
    elseif name == 'help' then
      print(usage(title, entries))
      os.exit(0, true)
    elseif not known[name] then
      local near = options.suggest(name, known)
      local hint = near and (', did you mean --%s?'):format(near) or ''
      fail(('unknown option --%s%s'):format(name, hint))
    elseif known[name][2] == false then
      o[name] = true
    else
      local value = inline
      if not argv[i]:find('=', 1, true) then
        i = i + 1
        value = argv[i]
      end
      if value == nil then fail(('--%s needs a value'):format(name)) end
      if type(known[name][2]) == 'number' then
        value = tonumber(value) or fail(('--%s needs a number'):format(name))
      end
      o[name] = value
    end
    i = i + 1
  end
  return o
end
