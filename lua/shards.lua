-- Checkpoints of many ranks: a folder that mf.save writes with { sharded = true } and mf.load reads.
--
-- Each part of a global tensor is written by one rank that has it, local tensors by rank 0, a file
-- 'G-RANK.safetensors' for each rank that has something to write. index.json tells what there is: the tree
-- (see save.lua), and for each tensor the dtype, the shape, and its parts: in which file, where they begin,
-- how large they are. G counts the saves into this folder: the files of the last one are not touched before
-- the new index, which is replaced at one moment, says that all of the new ones are there. So a save that is
-- cut off leaves the checkpoint before it as it was, on a file system that all ranks share.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local fail = options.fail
local M = {}

local VERSION, ERROR_MAX = 1, 500

local function index_of(folder) return folder .. '/index.json' end

function M.is_folder(path)
  local f = io.open(index_of(path))
  if f then f:close() end
  return f ~= nil
end

-- -- The index ------------------------------------------------------------------------------------

-- A text as JSON.
local function quote(text)
  return '"' .. text:gsub('[%c"\\]', function(c) return ('\\u%04x'):format(c:byte()) end) .. '"'
end

M.quote = quote

local function numbers(list) return '[' .. table.concat(list, ', ') .. ']' end

local function index_text(generation, tree, order, entries)
  local lines = {}
  for i, name in ipairs(order) do
    local e, parts = entries[name], {}
    for k, p in ipairs(e.parts) do
      parts[k] = ('{"file": %s, "start": %s, "size": %s}'):format(quote(p.file), numbers(p.start), numbers(p.size))
    end
    lines[i] = ('{"name": %s, "dtype": %s, "shape": %s, "parts": [%s]}'):format(quote(name), quote(e.dtype),
      numbers(e.shape), table.concat(parts, ', '))
  end
  return ('{"version": %d, "save": %d, "tree": %s,\n"tensors": [\n%s]}\n'):format(VERSION, generation,
    tree or 'null', table.concat(lines, ',\n'))
end

-- Where the whole of a tensor of n dims begins.
local function origin(n)
  local start = {}
  for d = 1, n do start[d] = 0 end
  return start
end

local function is_count(v) return type(v) == 'number' and v >= 0 and v < 2 ^ 53 and v == math.floor(v) end

local function volume(list)
  local n = 1
  for _, size in ipairs(list) do n = n * size end
  return n
end

local function apart(a, b)
  for d, start in ipairs(a.start) do
    if start + a.size[d] <= b.start[d] or b.start[d] + b.size[d] <= start then return true end
  end
  return false
end

-- What is wrong with a tensor's entry, which comes from a file: nil or a text.
local function entry_fault(e)
  if type(e) ~= 'table' or type(e.name) ~= 'string' then return 'a tensor has no name' end
  local what = ("tensor '%.80s' "):format(e.name)
  if not mf[e.dtype] or tostring(mf[e.dtype]) ~= e.dtype then return what .. 'has no known dtype' end
  if type(e.shape) ~= 'table' or type(e.parts) ~= 'table' then return what .. 'has no shape or no parts' end
  for _, size in ipairs(e.shape) do
    if not is_count(size) then return what .. 'has a size that is no count' end
  end
  local n = 0
  for k, p in ipairs(e.parts) do
    if type(p) ~= 'table' or type(p.file) ~= 'string' or not p.file:match '^%d+%-%d+%.safetensors$' then
      return what .. 'lies in a file whose name is none of a checkpoint'
    end
    for _, list in ipairs { p.start or false, p.size or false } do
      if type(list) ~= 'table' or #list ~= #e.shape then return what .. 'has a part of other dims' end
      for d, v in ipairs(list) do
        if not is_count(v) or v > e.shape[d] then return what .. 'has a part outside of it' end
      end
    end
    if not p.start or not p.size then return what .. 'has a part of other dims' end
    for d, start in ipairs(p.start) do
      if start + p.size[d] > e.shape[d] then return what .. 'has a part outside of it' end
    end
    for before = 1, k - 1 do
      if volume(p.size) > 0 and volume(e.parts[before].size) > 0 and not apart(p, e.parts[before]) then
        return what .. 'has parts that overlap'
      end
    end
    n = n + volume(p.size)
  end
  if n ~= volume(e.shape) then return what .. 'has parts that do not cover it' end
end

local function read_index(where, folder)
  local f, why = io.open(index_of(folder), 'rb')
  if not f then fail('%s: %s', where, why) end
  local text = f:read '*a'
  f:close()
  local ok, index = pcall(mf._json_read, text or '')
  local bad = not ok and tostring(index)
    or (type(index) ~= 'table' or not is_count(index.save) or type(index.tensors) ~= 'table') and 'it is no checkpoint'
    or index.version ~= VERSION and ('its version is %s, not %d'):format(tostring(index.version), VERSION)
    or index.tree ~= nil and type(index.tree) ~= 'table' and 'its tree is no object'
  for i = 1, bad and 0 or #index.tensors do bad = bad or entry_fault(index.tensors[i]) end
  if bad then fail('%s: %s is damaged: %s', where, index_of(folder), bad) end
  return index
end

-- -- Saving ---------------------------------------------------------------------------------------

-- Raises on all ranks what one raised: none goes on where another failed.
local function together(ok, text)
  if mf.world_size() == 1 then return ok or error(text, 0) end
  local failed = mf.tensor { ok and -1 or mf.rank() }
  mf.comm.all_reduce(failed, { op = 'max' })
  if failed:item() < 0 then return end
  local bytes = mf.zeros(ERROR_MAX, { dtype = mf.uint8 })
  if failed:item() == mf.rank() then
    text = tostring(text):gsub('^[^\n]-:%d+: ', ''):sub(1, ERROR_MAX)
    bytes:narrow(0, 0, #text):copy_(mf.tensor({ text:byte(1, -1) }, { dtype = mf.uint8 }))
  end
  mf.comm.broadcast(bytes, failed:item())
  local told = string.char(unpack(bytes:tolist())):match '^%Z*'
  fail('save: rank %d: %s', failed:item(), (told:gsub('^save: ', '')))
end

-- A number of the text that tells two apart, for comparing what ranks are about to save.
local function hash(text)
  local h = 5381
  for i = 1, #text do h = (h * 33 + text:byte(i)) % 2 ^ 40 end
  return h
end

local function check_alike(names, tensors)
  if mf.world_size() == 1 then return end
  local parts = {}
  for i, t in ipairs(tensors) do
    parts[i] = names[i] .. ' ' .. tostring(t.dtype) .. tostring(t.shape) .. mf._layout_key(t)
  end
  local h = hash(table.concat(parts, '\n'))
  local ends = mf.tensor({ h, -h }, { dtype = mf.float64 })
  mf.comm.all_reduce(ends, { op = 'max' })
  if ends[0]:item() ~= -ends[1]:item() then
    fail 'save: the ranks would save different things: the names, dtypes, shapes and layouts must be the same on all'
  end
end

-- Who writes what of a tensor: a list of { rank, start, size }. Of several ranks that have a part it is the one
-- with the least to write so far; `load` counts, alike on all ranks.
local function parts_of(t, load)
  if not t.is_global then
    load[0] = (load[0] or 0) + t:numel() * t:element_size()
    return { { rank = 0, start = origin(t:dim()), size = t.shape } }
  end
  local list, known = {}, {}
  for rank = 0, mf.world_size() - 1 do
    local start, size = mf._global_part(t, rank)
    if start and volume(size) > 0 then
      local key = table.concat(start, ',')
      local part = known[key]
      if not part then
        part = { rank = rank, start = start, size = size }
        known[key], list[#list + 1] = part, part
      elseif (load[rank] or 0) < (load[part.rank] or 0) then part.rank = rank
      end
    end
  end
  for _, p in ipairs(list) do load[p.rank] = (load[p.rank] or 0) + volume(p.size) * t:element_size() end
  return list
end

-- The number of the save into this folder that begins, and the index of the one before. An index that cannot be
-- read is put aside, so that no file of its checkpoint, whichever those are, is lost to the new one.
local function next_save(folder)
  mf._make_folder(folder)
  if not M.is_folder(folder) then return 1 end
  local ok, old = pcall(read_index, 'save', folder)
  if ok then return old.save + 1, old end
  os.rename(index_of(folder), index_of(folder) .. '.damaged')
  return os.time()
end

-- The same on all ranks, the index on rank 0 alone.
local function begin(folder)
  local n, ok, old = 0, true, nil
  if mf.rank() == 0 then
    ok, n, old = pcall(next_save, folder)
  end
  together(ok, n)
  local number = mf.tensor({ n }, { dtype = mf.int64 })
  if mf.world_size() > 1 then mf.comm.broadcast(number, 0) end
  return number:item(), old
end

local function remove_files(folder, old, kept)
  local files = {}
  for _, e in ipairs(old and old.tensors or {}) do
    for _, p in ipairs(e.parts) do files[p.file] = true end
  end
  for file in pairs(files) do
    if not kept[file] then os.remove(folder .. '/' .. file) end
  end
end

-- Writes tensors, by the names of one list, and the text of their tree, or nil. All ranks of the job call it.
function M.save(folder, tree, names, tensors)
  check_alike(names, tensors)
  local n, old = begin(folder)
  local rank, entries, mine, kept, load = mf.rank(), {}, { names = {}, tensors = {} }, {}, {}
  local function file_of(r) return ('%d-%05d.safetensors'):format(n, r) end
  for i, t in ipairs(tensors) do
    if entries[names[i]] then fail("save: the name '%s' occurs twice", names[i]) end
    if t.is_global then t = mf._settled(t:detach()) end
    local parts = parts_of(t, load)
    entries[names[i]] = { dtype = tostring(t.dtype), shape = t.shape, parts = parts }
    for _, p in ipairs(parts) do
      p.file = file_of(p.rank)
      kept[p.file] = true
      if p.rank == rank then
        mine.names[#mine.names + 1] = names[i]
        mine.tensors[#mine.tensors + 1] = t.is_global and t:to_local() or t
      end
    end
  end
  local index = index_text(n, tree, names, entries)
  together(pcall(function()
    local ok, why = pcall(mf._json_read, index) -- before anything is written
    if not ok then fail('save: a name or a text cannot be kept: %s', tostring(why)) end
    if #mine.names > 0 then
      mf._safetensors_save(folder .. '/' .. file_of(rank), mine.names, mine.tensors)
    end
  end))
  together(pcall(function()
    if rank > 0 then return end
    mf._write_text(index_of(folder), index)
    remove_files(folder, old, kept)
  end))
end

-- -- Loading --------------------------------------------------------------------------------------

-- Where [start, start + size) and the part p meet: where in the tensor, and how much; nil where nowhere.
local function meet(p, start, size)
  local from, count = {}, {}
  for d = 1, #start do
    from[d] = math.max(start[d], p.start[d])
    count[d] = math.min(start[d] + size[d], p.start[d] + p.size[d]) - from[d]
    if count[d] <= 0 then return nil end
  end
  return from, count
end

local function cut(t, first, from, count)
  for d = first, #count do t = t:narrow(d - 1, from[d], count[d]) end
  return t
end

local function minus(a, b)
  local c = {}
  for d = 1, #a do c[d] = a[d] - b[d] end
  return c
end

-- Fills wanted tensors, a list of { tensor (contiguous, on the host), start, entry }, each file read once
-- and of each part only the rows that are wanted.
local function fill(folder, wanted)
  local files, order = {}, {}
  for _, w in ipairs(wanted) do
    for _, p in ipairs(w.entry.parts) do
      local from, count = meet(p, w.start, w.tensor.shape)
      if from then
        if not files[p.file] then
          files[p.file] = {}
          order[#order + 1] = p.file
        end
        table.insert(files[p.file], { w = w, p = p, from = from, count = count })
      end
    end
  end
  for _, file in ipairs(order) do
    local path, rows = folder .. '/' .. file, {}
    for _, pick in ipairs(files[file]) do
      local at = minus(pick.from, pick.p.start)
      rows[pick.w.entry.name] = { pick.p.size, tostring(pick.w.entry.dtype), at[1] or 0, pick.count[1] or 1 }
    end
    local read = mf._safetensors_rows(path, rows)
    for _, pick in ipairs(files[file]) do
      local piece = cut(read[pick.w.entry.name], 2, minus(pick.from, pick.p.start), pick.count)
      cut(pick.w.tensor, 1, minus(pick.from, pick.w.start), pick.count):copy_(piece)
      read[pick.w.entry.name] = nil
    end
  end
end

-- An empty tensor for an entry, and what of it is wanted here. Without a placement all of it is.
local function room(e, o)
  if not o.placement then
    local t = mf.empty(e.shape, { dtype = mf[e.dtype] }) -- on the host
    return t, t:numel() > 0 and { tensor = t, start = origin(#e.shape), entry = e } or nil
  end
  local sbp = o.sbp
  if type(sbp) == 'function' then sbp = sbp(e.name, e.shape) end
  if sbp == nil then
    sbp = {}
    for axis = 1, #o.placement.hierarchy do sbp[axis] = #e.shape > 0 and 'S0' or 'B' end
  end
  local t = mf.empty(e.shape, { dtype = mf[e.dtype], placement = o.placement, sbp = sbp })
  local start = mf._global_part(t, mf.rank())
  local part = start and t:to_local()
  return t, part and part:numel() > 0 and { tensor = part, start = start, entry = e } or nil
end

-- Tensors by name, and the names in the order of saving.
local function read_all(folder, entries, o)
  local all, order, wanted = {}, {}, {}
  mf.no_grad(function()
    for i, e in ipairs(entries) do
      all[e.name], wanted[#wanted + 1] = room(e, o)
      order[i] = e.name
    end
    fill(folder, wanted)
    for name, t in pairs(o.placement and {} or all) do all[name] = t:to(o.device) end
  end)
  return all, order
end

-- Tensors by name, the names in order, and metadata: the text of the tree under 'moonflow'.
function M.load(folder, o)
  local index = read_index('load', folder)
  local all, order = read_all(folder, index.tensors, o)
  return all, order, { moonflow = index.tree }
end

-- The same of one file: its tensors lie on a placement, of which each rank reads its own part.
function M.load_file(path, o)
  local folder, file = path:match '^(.*)/([^/]*)$'
  if not folder then folder, file = '.', path end
  local entries, metadata = mf._safetensors_entries(path)
  for _, e in ipairs(entries) do
    e.parts = { { file = file, start = origin(#e.shape), size = e.shape } }
  end
  local all, order = read_all(folder, entries, o)
  return all, order, metadata
end

return M
