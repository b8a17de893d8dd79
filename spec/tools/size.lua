-- Prints how long functions and files are, folder by folder, and fails above the limits below.
--
-- A function is what lies between a line that begins in column one and ends with `{`, and the next
-- line that begins with `}`; both count. A macro of several lines may not hide a longer one.
local limits = {
  median = 12, p90 = 40, longest = 80, kernel = 120,
  c = 900, h = 250, cu = 500, lua = 900, Makefile = 250,
}

local failures = {}
local function fail(...) failures[#failures + 1] = string.format(...) end

local function lines_of(path)
  local list = {}
  for line in io.lines(path) do list[#list + 1] = line end
  return list
end

local function files(pattern)
  local list, pipe = {}, io.popen('ls -d ' .. pattern .. ' 2>/dev/null')
  for path in pipe:lines() do list[#list + 1] = path end
  pipe:close()
  return list
end

-- Calls found(name, first line, length, is_macro) for each.
local function each_function(lines, found)
  local from, name
  local macro, macro_name
  for i, line in ipairs(lines) do
    if not macro and line:match '^#define' and line:match '\\$' then
      macro, macro_name = i, line:match '^#define%s+([%w_]+)'
    end
    if macro then
      if not line:match '\\$' then
        found(macro_name, macro, i - macro + 1, true)
        macro = nil
      end
    elseif from then
      if line:match '^}' then
        if name then found(name, from, i - from + 1, false) end
        from = nil
      end
    elseif line:match '^[%a_]' and not line:match ';%s*$' then
      local k = i -- a head may take several lines
      while lines[k] and not lines[k]:match '[{;]%s*$' and lines[k]:match '%S' do k = k + 1 end
      if lines[k] and lines[k]:match '{%s*$' then
        local head = table.concat(lines, ' ', i, k)
        from = i
        name = not head:match '=[^=]' and not head:match '^typedef' and head:match '([%w_]+)%s*%('
      end
    end
  end
end

local function quantile(sorted, q) return sorted[math.max(1, math.ceil(q * #sorted))] or 0 end

local function row(name, n_files, n_lines, lengths)
  table.sort(lengths)
  print(('%-16s %5d %7d %9d %7d %5d %5d'):format(name, n_files, n_lines, #lengths,
    quantile(lengths, 0.5), quantile(lengths, 0.9), lengths[#lengths] or 0))
end

local all, total_files, total_lines = {}, 0, 0
print(('%-16s %5s %7s %9s %7s %5s %5s'):format('folder', 'files', 'lines', 'functions', 'median', 'p90', 'max'))
for _, folder in ipairs(files 'src/*/ kernels/') do
  local lengths, n_lines = {}, 0
  local longest = (folder:match 'src/op/' or folder:match '^kernels') and limits.kernel or limits.longest
  local list = files(folder .. '*.[ch] ' .. folder .. '*.cu ' .. folder .. '*.cuh')
  for _, path in ipairs(list) do
    local lines = lines_of(path)
    local limit = limits[path:match '%.(%a+)$'] or limits.h
    n_lines = n_lines + #lines
    if #lines > limit then fail('%s has %d lines; the limit is %d', path, #lines, limit) end
    each_function(lines, function(name, at, length, is_macro)
      if not is_macro then lengths[#lengths + 1] = length end
      if length > longest then
        fail('%s:%d: %s has %d lines; the limit is %d', path, at, name, length, longest)
      end
    end)
  end
  if #list > 0 then row(folder:gsub('/$', ''), #list, n_lines, lengths) end
  for _, n in ipairs(lengths) do all[#all + 1] = n end
  total_files, total_lines = total_files + #list, total_lines + n_lines
end
row('all', total_files, total_lines, all)
if quantile(all, 0.5) > limits.median then
  fail('median of functions: %d, the limit is %d', quantile(all, 0.5), limits.median)
end
if quantile(all, 0.9) > limits.p90 then
  fail('p90 of functions: %d, the limit is %d', quantile(all, 0.9), limits.p90)
end

local n_lua = 0
local lua = files 'lua/*.lua src/*/*.lua'
for _, path in ipairs(lua) do
  local n = #lines_of(path)
  n_lua = n_lua + n
  if n > limits.lua then fail('%s has %d lines; the limit is %d', path, n, limits.lua) end
end
print(('%-16s %5d %7d'):format('lua', #lua, n_lua))
local makefile = #lines_of 'Makefile'
print(('%-16s %5d %7d'):format('Makefile', 1, makefile))
if makefile > limits.Makefile then fail('Makefile has %d lines; the limit is %d', makefile, limits.Makefile) end

for _, text in ipairs(failures) do print(text) end
os.exit(#failures == 0 and 0 or 1)
