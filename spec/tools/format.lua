-- Brings C into its form: section marks (/* -- Name --- */) end at column 100, the rest is clang-format's.
local list = {}
for path in io.popen('ls src/*.c src/*/*.[ch] examples/*.c spec/c/*.[ch] 2>/dev/null'):lines() do
  list[#list + 1] = path
  local f = assert(io.open(path, 'rb'))
  local text = f:read '*a'
  f:close()
  local marked = ('\n' .. text):gsub('\n/%* %-%- (.-) %-%-%-+ ?%*/', function(name)
    if name:find '\n' then return nil end
    return ('\n/* -- %s %s */'):format(name, ('-'):rep(math.max(3, 90 - #name)))
  end):sub(2)
  if marked ~= text then
    f = assert(io.open(path, 'wb'))
    f:write(marked)
    f:close()
  end
end
os.exit(os.execute('clang-format -i ' .. table.concat(list, ' ')) == 0 and 0 or 1)
