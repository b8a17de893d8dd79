-- Takes the pointwise lines out of a file of src/op, for the CUDA kernels that are made of the same
-- text: luajit kernels/pointwise.lua OUT src/op/pointwise.c
--
-- Copied as they are: #defines, calls of PW_..., POINTWISE... and LOSS macros, inline functions, and the
-- functions NAME_choose. Each call stands under PW_WANTED(N), N counting the ops: a file that compiles a part
-- of them says which; a choice under PW_RECORDS. Of a record OP(name, ...) its kernels and its choice become
-- PW_RECORD_CHOOSE(name, 0, 0, 0, 0, 0, choice, kernels).
local out, path = arg[1], arg[2]
local f = assert(io.open(path, 'rb'))
local text = f:read '*a'
f:close()

local lines, found = {}, {}
for line in text:gmatch '(.-)\n' do lines[#lines + 1] = line end

-- The lines from i on to the first one at which `ends` holds.
local function take(i, ends)
  local last = i
  while not ends(lines[last], table.concat(lines, '\n', i, last)) do last = last + 1 end
  return table.concat(lines, '\n', i, last), last
end

local function balanced(_, all)
  local bare = all:gsub('"[^"\n]*"', '')
  local _, opened = bare:gsub('%(', '')
  local _, closed = bare:gsub('%)', '')
  return opened > 0 and opened == closed
end

local function record(call)
  local name = call:match '^OP%(([%w_]+)'
  local kernels = call:match '%.pointwise%s*=%s*{(.-)}'
  if not kernels then return end
  local _, commas = kernels:gsub(',', '')
  return ('PW_RECORD_CHOOSE(%s, 0, 0, 0, 0, 0, %s, %s)'):format(name,
    call:match '%.choose%s*=%s*([%w_]+)' or 'NULL', kernels .. (', NULL'):rep(2 - commas))
end

local i, count = 1, 0
local function wanted(piece) return ('#if PW_WANTED(%d)\n%s\n#endif'):format(count, piece) end
while lines[i] do
  local line, piece = lines[i], nil
  if line:match '^#define [%w_]+LOSS' or line:match '^#define LOSS' then
    i = select(2, take(i, function(l) return not l:match '\\$' end)) -- the cpu's own
  elseif line:match '^#define' then
    piece, i = take(i, function(l) return not l:match '\\$' end)
  elseif line:match '^PW_[%w_]+%(' or line:match '^POINTWISE[%w_]*%(' or line:match '^LOSS%(' then
    piece, i = take(i, balanced)
    piece = wanted(piece)
    if not line:match '^PW_' then count = count + 1 end
  elseif line:match '^OP%(' then
    piece, i = take(i, balanced)
    piece = record(piece)
    if piece then
      piece = wanted(piece)
      count = count + 1
    end
  elseif line:match '^static inline' or line:match '^static void [%w_]+_choose%(' then
    piece, i = take(i, function(l) return l:match '^}' end)
    piece = line:match '_choose%(' and '#ifdef PW_RECORDS\n' .. piece .. '\n#endif'
      or piece:gsub('^static inline', 'static inline __host__ __device__')
  end
  found[#found + 1] = piece
  i = i + 1
end

f = assert(io.open(out, 'wb'))
f:write('/* Made by kernels/pointwise.lua of ', path, '. */\n', table.concat(found, '\n'), '\n')
f:close()
