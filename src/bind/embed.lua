-- Writes the files of lua/ as one C file of byte arrays: luajit embed.lua OUT.c lua/*.lua
local out = { '/* Made by embed.lua. */\n#include "embed.h"\n' }
local rows = {}
for i = 2, #arg do
  local f = assert(io.open(arg[i], 'rb'))
  local text = f:read '*a'
  f:close()
  local name = arg[i]:match '([%w_]+)%.lua$'
  local bytes = { ('static const char %s_text[] = {'):format(name) }
  for at = 1, #text, 32 do bytes[#bytes + 1] = table.concat({ text:byte(at, at + 31) }, ',') .. ',' end
  bytes[#bytes + 1] = '0};\n'
  out[#out + 1] = table.concat(bytes, '\n')
  rows[#rows + 1] = ('  {"%s", %s_text, %d},'):format(name == 'init' and 'moonflow' or 'moonflow.' .. name, name, #text)
end
out[#out + 1] = 'const EmbedModule embed_modules[] = {\n' .. table.concat(rows, '\n') .. '\n  {0, 0, 0}};\n'
local f = assert(io.open(arg[1], 'wb'))
f:write(table.concat(out, '\n'))
f:close()
