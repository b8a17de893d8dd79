-- Collects the op records: luajit collect.lua OUT_DIR --isas v2,v3,v4 src/op/*.c lua/grad.lua
--
-- A record begins at a line `OP(name,` or `POINTWISE...(name, "signature", ...`; the first string
-- literal (after `.signature =` in an OP) is its signature, and the comment right above it its
-- documentation. From all of them come
--   op/op_ids.h    enum OP_name
--   op/op_args.h   struct name_args
--   op/op_table.c  parameter tables, defaults, gradients' masks, op_table
--   moonflow.lua   stubs for language servers, with the documentation
--   bind/help.c    the texts of help()
-- A file is rewritten only when its content changes, so that nothing is compiled in vain.

local out, isas, sources = arg[1], {}, {}
do
  local i = 2
  while arg[i] do
    if arg[i] == '--isas' then
      for isa in arg[i + 1]:gmatch '[^,]+' do isas[#isas + 1] = isa end
      i = i + 1
    else
      sources[#sources + 1] = arg[i]
    end
    i = i + 1
  end
end

local function read(path)
  local f = assert(io.open(path, 'rb'))
  local text = f:read '*a'
  f:close()
  return text
end

local function write(path, text)
  local f = io.open(path, 'rb')
  if f then
    local old = f:read '*a'
    f:close()
    if old == text then return end
  end
  f = assert(io.open(path, 'wb'))
  f:write(text)
  f:close()
end

local function fail(where, ...)
  io.stderr:write(where, ': ', string.format(...), '\n')
  os.exit(1)
end

-- -- Signatures -----------------------------------------------------------------------------------

local value_types = {
  int = 'PARAM_INT', float = 'PARAM_FLOAT', bool = 'PARAM_BOOL', dim = 'PARAM_DIM', dtype = 'PARAM_DTYPE',
  device = 'PARAM_DEVICE', Generator = 'PARAM_GENERATOR', program = 'PARAM_PROGRAM',
}

-- Splits at commas outside of brackets.
local function split(text)
  local parts, depth, from = {}, 0, 1
  for i = 1, #text do
    local c = text:sub(i, i)
    if c:match '[%(%[{]' then depth = depth + 1
    elseif c:match '[%)%]}]' then depth = depth - 1
    elseif c == ',' and depth == 0 then
      parts[#parts + 1] = text:sub(from, i - 1)
      from = i + 1
    end
  end
  if text:sub(from):match '%S' then parts[#parts + 1] = text:sub(from) end
  for i, p in ipairs(parts) do parts[i] = p:match '^%s*(.-)%s*$' end
  return parts
end

local function parse_param(where, text, keyword_only)
  local left, default = text:match '^(.-)=(.*)$'
  local type, name = (left or text):match '^(%S+)%s+([%a_][%w_]*)%s*$'
  if not type then fail(where, 'parameter %q is not TYPE NAME', text) end
  local p = { name = name, default = default and default:match '^%s*(.-)%s*$', keyword_only = keyword_only }
  if type:match '?$' then p.optional, type = true, type:sub(1, -2) end
  if type:match '!$' then p.mutated, type = true, type:sub(1, -2) end
  if type:match '^Tensor' then
    p.kind = 'PARAM_TENSOR'
    p.list = type == 'Tensor[]'
    p.number = type == 'Tensor|number'
    if not (type == 'Tensor' or p.list or p.number) then fail(where, 'unknown type %s', type) end
  elseif type:match '^str%(' then
    p.kind, p.choices = 'PARAM_CHOICE', type:match '^str%((.*)%)$'
  elseif type:match '^int%[' then
    p.kind, p.fixed = 'PARAM_INTS', tonumber(type:match '%[(%d*)%]') or 0
  else
    p.kind = value_types[type] or fail(where, 'unknown type %s', type)
  end
  if p.optional and not p.default then p.default = 'None' end
  return p
end

local function parse_signature(where, text)
  local name, inside, result = text:match '^([%a_][%w_]*)%((.*)%)%s*%->%s*(.-)%s*$'
  if not name then fail(where, 'bad signature %q', text) end
  local op = { name = name, params = {}, text = text }
  local keyword_only = false
  for _, part in ipairs(split(inside)) do
    if part == '*' then keyword_only = true
    else op.params[#op.params + 1] = parse_param(where, part, keyword_only) end
  end
  if result == 'Tensor[]' then op.n_outputs = -1
  elseif result == 'Tensor' then op.n_outputs = 1
  else
    op.outputs = {}
    for _, part in ipairs(split(result:match '^%((.*)%)$' or fail(where, 'bad result %q', result))) do
      op.outputs[#op.outputs + 1] = part:match '^Tensor%s+([%w_]+)$' or fail(where, 'results are named: %q', part)
    end
    op.n_outputs = #op.outputs
  end
  return op
end

local ops, by_name = {}, {}

local function comment_above(lines, i)
  local last = i - 1
  if not (lines[last] and lines[last]:match '%*/%s*$') then return '' end
  local first = last
  while first > 0 and not lines[first]:match '^%s*/%*' do first = first - 1 end
  local text = table.concat(lines, '\n', first, last)
  text = text:gsub('^%s*/%*+%s?', ''):gsub('%s*%*/%s*$', ''):gsub('\n%s*%*? ?', '\n')
  return text
end

for _, path in ipairs(sources) do
  if path:match '%.c$' then
    local lines, text = {}, read(path)
    for line in (text .. '\n'):gmatch '(.-)\n' do lines[#lines + 1] = line end
    for i, line in ipairs(lines) do
      if line:match '^OP%(' or line:match '^POINTWISE[%w_]*%(' then
        local record = table.concat(lines, '\n', i, math.min(i + 12, #lines))
        local name = record:match '^[%w_]+%(([%w_]+)' or fail(path .. ':' .. i, 'no name')
        local from = line:match '^OP%(' and record:find('.signature', 1, true) or 1
        local signature, at = '', record:find('"', from, true)
        while at do -- adjacent literals are one
          local body, stop = record:match('^"([^"]*)"()', at)
          signature = signature .. body
          at = record:match('^%s*()"', stop)
        end
        local op = parse_signature(path .. ':' .. i, signature)
        if op.name ~= name then fail(path .. ':' .. i, 'record %s has the signature of %s', name, op.name) end
        if by_name[name] then fail(path .. ':' .. i, '%s is declared twice', name) end
        op.doc, op.grads = comment_above(lines, i), {}
        by_name[name] = op
        ops[#ops + 1] = op
      end
    end
  end
end
table.sort(ops, function(a, b) return a.name < b.name end)

-- -- Gradients: what each line of grad.lua reads --------------------------------------------------

-- The tokens of Lua that matter here: names, numbers, strings, punctuation; comments are dropped.
local function tokens_of(text)
  local tokens, i = {}, 1
  while i <= #text do
    local stop = text:match('^%s+()', i) or text:match('^%-%-%[%[.-%]%]()', i) or text:match('^%-%-[^\n]*()', i)
    if stop then
      i = stop
    else
      local token
      token, stop = text:match('^([%a_][%w_]*)()', i)
      if not token then token, stop = text:match('^(%d[%w_.]*)()', i) end
      if not token then token, stop = text:match("^('[^'\n]*')()", i) end
      if not token then token, stop = text:match('^("[^"\n]*")()', i) end
      if not token then token, stop = text:sub(i, i), i + 1 end
      tokens[#tokens + 1] = token
      i = stop
    end
  end
  return tokens
end

local openers = { ['function'] = true, ['do'] = true, ['if'] = true, ['repeat'] = true }
local closers = { ['end'] = true, ['until'] = true }

-- The index just behind the `end` of the function whose `function` is tokens[i].
local function function_end(tokens, i)
  local depth = 0
  repeat
    if openers[tokens[i]] then depth = depth + 1 elseif closers[tokens[i]] then depth = depth - 1 end
    i = i + 1
  until depth == 0 or not tokens[i]
  return i
end

local function bit_of(list, name, filter)
  local position = 0
  for _, p in ipairs(list) do
    if not filter or p.kind == filter then
      if (p.name or p) == name then return 2 ^ position end
      position = position + 1
    end
  end
end

local function grad_line(where, op, keys, tokens, from, to)
  local grad = { serves = 0, ins = {}, outs = {}, shapes = {} }
  for key in keys:gmatch '[%w_]+' do
    grad.serves = grad.serves + (bit_of(op.params, key, 'PARAM_TENSOR')
      or fail(where, 'gradient of %s: no tensor %s', op.name, key))
  end
  local params, i = {}, from + 2 -- behind `function (`
  while tokens[i] ~= ')' do
    if tokens[i] ~= ',' then params[#params + 1] = tokens[i] end
    i = i + 1
  end
  local several = keys:find(',', 1, true)
  local y, o = params[several and 3 or 2], params[several and 4 or 3]
  for k = i + 1, to - 1 do
    local dotted = tokens[k - 1] == '.'
    if tokens[k] == y and not dotted and y ~= '_' then
      if not op.outputs then grad.outs[1] = true
      elseif tokens[k + 1] == '.' then
        grad.outs[bit_of(op.outputs, tokens[k + 2]) or fail(where, '%s: no output %s', op.name, tokens[k + 2])] = true
      else fail(where, 'gradient of %s: the outputs are read as %s.NAME', op.name, y) end
    elseif tokens[k] == o and not dotted and o ~= '_' then
      local field = tokens[k + 2]
      if field == 'shape' or field == 'dtype' then
        local bit = tokens[k + 3] == '.' and bit_of(op.params, tokens[k + 4], 'PARAM_TENSOR')
        if bit then grad.shapes[bit] = true end
      elseif tokens[k + 1] == '.' then
        local bit = bit_of(op.params, field, 'PARAM_TENSOR')
        if bit then grad.ins[bit] = true
        elseif not bit_of(op.params, field) then
          fail(where, 'gradient of %s reads o.%s, which it has not', op.name, field)
        end
      else
        fail(where, 'gradient of %s: o is only read as o.NAME', op.name)
      end
    end
  end
  for _, set in ipairs { 'ins', 'outs', 'shapes' } do
    local mask = 0
    for bit in pairs(grad[set]) do mask = mask + bit end
    grad[set] = mask
  end
  op.grads[#op.grads + 1] = grad
end

for _, path in ipairs(sources) do
  if path:match 'grad[%w_]*%.lua$' then
    local tokens = tokens_of(read(path))
    local i = 1
    while tokens[i] do
      if tokens[i] == 'grad' and tokens[i + 1] == '.' and tokens[i + 3] == '=' and tokens[i + 4] == '{' then
        local op = by_name[tokens[i + 2]] or fail(path, 'a gradient for %s, which is no op', tokens[i + 2])
        if #op.grads > 0 then fail(path, 'two gradients for %s', op.name) end
        i = i + 5
        while tokens[i] ~= '}' do
          local keys
          if tokens[i] == '[' then keys, i = tokens[i + 1]:sub(2, -2), i + 4
          else keys, i = tokens[i], i + 2 end
          if tokens[i] ~= 'function' then fail(path, 'gradient of %s: a function is written out here', op.name) end
          local stop = function_end(tokens, i)
          grad_line(path, op, keys, tokens, i, stop)
          i = stop
          if tokens[i] == ',' then i = i + 1 end
        end
      end
      i = i + 1
    end
  end
end

-- -- Output ---------------------------------------------------------------------------------------

local function choice_index(p)
  local k = 0
  for choice in p.choices:gmatch '[^|]+' do
    if choice == p.default then return k end
    k = k + 1
  end
  error('default of ' .. p.name .. ' is no choice')
end

-- The members of the args struct for a param, and their initialiser.
local function members(p)
  local n, d = p.name, p.default
  local none = d == nil or d == 'None'
  if p.kind == 'PARAM_TENSOR' then
    return p.list and ('int64_t n_%s;'):format(n) or nil
  elseif p.kind == 'PARAM_INTS' and p.fixed > 0 then
    local init = not none and ('.%s = {%s}'):format(n, d:match '^%[(.*)%]$' or (d .. ', '):rep(p.fixed):sub(1, -3))
      or nil
    return ('int64_t %s[%d];'):format(n, p.fixed) .. (p.optional and (' bool has_%s;'):format(n) or ''), init
  elseif p.kind == 'PARAM_INTS' then
    local init
    if not none then
      local inside = d:match '^%[(.*)%]$' or d
      local _, commas = inside:gsub(',', '')
      init = ('.%s = {%d, {%s}}'):format(n, inside == '' and 0 or commas + 1, inside == '' and '0' or inside)
    end
    return ('IntList %s;'):format(n) .. (p.optional and (' bool has_%s;'):format(n) or ''), init
  elseif p.kind == 'PARAM_GENERATOR' then
    return ('RngKey %s;'):format(n)
  elseif p.kind == 'PARAM_PROGRAM' then
    return ('Program *%s;'):format(n)
  elseif p.kind == 'PARAM_DTYPE' then
    return ('int64_t %s;'):format(n),
      ('.%s = %s'):format(n, none and 'DTYPE_NONE' or ({ float32 = 'F32', int64 = 'I64' })[d])
  elseif p.kind == 'PARAM_DEVICE' then
    return ('int64_t %s;'):format(n), ('.%s = %s'):format(n, none and '-1' or d)
  elseif p.kind == 'PARAM_CHOICE' then
    return ('int64_t %s;'):format(n), not none and ('.%s = %d'):format(n, choice_index(p)) or nil
  end
  local ctype = ({ PARAM_INT = 'int64_t', PARAM_DIM = 'int64_t', PARAM_FLOAT = 'double', PARAM_BOOL = 'bool' })[p.kind]
  local value = not none and ((d == 'True' and 'true') or (d == 'False' and 'false') or (d == 'inf' and 'INFINITY')
    or (d == '-inf' and '-INFINITY') or d) or nil
  return ('%s %s;'):format(ctype, n) .. (p.optional and (' bool has_%s;'):format(n) or ''),
    value and ('.%s = %s%s'):format(n, value, p.optional and (', .has_%s = true'):format(n) or '') or nil
end

local function c_string(s)
  return '"' .. s:gsub('[\\"]', '\\%0'):gsub('\n', '\\n') .. '"'
end

local ids = { '/* Made by collect.lua. */\n#ifndef MF_OP_IDS_H\n#define MF_OP_IDS_H\ntypedef enum OpId {' }
local structs = { '/* Made by collect.lua. */\n#ifndef MF_OP_ARGS_H\n#define MF_OP_ARGS_H\n#include "op.h"\n' }
local tables = { '/* Made by collect.lua. */\n#include <math.h>\n#include <stddef.h>\n#include "op.h"\n'
  .. '#include "op_args.h"\n#include "op_ids.h"\n' }
local rows = {}
local hash = 5381
for index, op in ipairs(ops) do
  local name = op.name
  for k = 1, #op.text do hash = (hash * 33 + op.text:byte(k)) % 2 ^ 48 end
  ids[#ids + 1] = ('  OP_%s = %d,'):format(name, index - 1)
  local body, inits, params, n_tensors, n_mutated, n_lists = {}, {}, {}, 0, 0, 0
  local requires_grad = '-1'
  for _, p in ipairs(op.params) do
    local member, init = members(p)
    if member then body[#body + 1] = '  ' .. member end
    if init then inits[#inits + 1] = init end
    local value = p.kind ~= 'PARAM_TENSOR' and p.name or (p.list and 'n_' .. p.name)
    local where = value and ('offsetof(struct %s_args, %s)'):format(name, value) or '0'
    local has = p.optional and p.kind ~= 'PARAM_TENSOR' and p.kind ~= 'PARAM_DTYPE' and p.kind ~= 'PARAM_DEVICE'
      and p.kind ~= 'PARAM_GENERATOR'
      and ('offsetof(struct %s_args, has_%s)'):format(name, p.name) or '0'
    params[#params + 1] = ('  {"%s", %s, %s, %s, %d, %s, %s, %s, %s, %s, %s, %s},'):format(p.name,
      p.choices and c_string(p.choices) or 'NULL', p.default and c_string(p.default) or 'NULL', p.kind,
      p.fixed or 0, p.optional or false, p.list or false, p.number or false,
      p.mutated or false, p.keyword_only, where, has)
    if p.kind == 'PARAM_TENSOR' then
      n_tensors = n_tensors + 1
      if p.mutated then n_mutated = n_mutated + 1 end
      if p.list then n_lists = n_lists + 1 end
    end
    if p.name == 'requires_grad' then requires_grad = where end
  end
  if #body == 0 then body[1] = '  char unused;' end
  structs[#structs + 1] = ('struct %s_args {\n%s\n};'):format(name, table.concat(body, '\n'))
  local t = tables
  if #params > 0 then
    t[#t + 1] = ('static const Param %s_params[] = {\n%s\n};'):format(name, table.concat(params, '\n'))
  end
  t[#t + 1] = ('static const struct %s_args %s_defaults = {%s};'):format(name, name,
    #inits > 0 and table.concat(inits, ', ') or '0')
  if op.outputs and #op.outputs > 0 then
    t[#t + 1] = ('static const char *const %s_outputs[] = {"%s"};'):format(name, table.concat(op.outputs, '", "'))
  end
  if #op.grads > 0 then
    local g = {}
    for _, grad in ipairs(op.grads) do
      g[#g + 1] = ('{%d, %d, %d, %d}'):format(grad.serves, grad.ins, grad.outs, grad.shapes)
    end
    t[#t + 1] = ('static const OpGrad %s_grads[] = {%s};'):format(name, table.concat(g, ', '))
  end
  local specs = {}
  for _, isa in ipairs(isas) do
    t[#t + 1] = ('extern const OpSpec op_%s__%s;'):format(name, isa)
    specs[#specs + 1] = ('&op_%s__%s'):format(name, isa)
  end
  local row = '  {"%s", %d, {%s}, %s, %d, %d, %d, %d, %d, %s, sizeof(struct %s_args), %s, &%s_defaults,'
    .. ' %s, %d,\n   %s},'
  rows[#rows + 1] = row:format(name, index - 1, table.concat(specs, ', '),
    #params > 0 and name .. '_params' or 'NULL', #params, n_tensors, n_mutated, n_lists, op.n_outputs,
    op.outputs and #op.outputs > 0 and name .. '_outputs' or 'NULL', name, requires_grad, name,
    #op.grads > 0 and name .. '_grads' or 'NULL', #op.grads, c_string(op.doc))
end
ids[#ids + 1] = ('  OP_COUNT = %d\n} OpId;\n#endif\n'):format(#ops)
structs[#structs + 1] = '#endif\n'
tables[#tables + 1] = ('const Op op_table[] = {\n%s\n};\nconst int op_count = %d;'):format(
  table.concat(rows, '\n'), #ops)
tables[#tables + 1] = ('const uint64_t op_table_hash = %.0fu;'):format(hash)
-- The last set that the CPU has: sets ascend, and "base" is for every CPU.
local levels, places = {}, {}
for i, isa in ipairs(isas) do
  levels[i] = isa:match '^v(%d)$' or 0
  places[i] = ('OP_INDEX_%s = %d'):format(isa, i - 1)
end
ids[#ids] = ids[#ids]:gsub('#endif', ('#define MF_OP_HASH UINT64_C(%.0f)\nenum { '):format(hash)
  .. table.concat(places, ', ') .. ' };\n%0')
tables[#tables + 1] = ([[
int op_isa_index(int level) {
  static const int levels[] = {%s};
  int index = 0;
  for (int i = 1; i < %d; i++)
    if (levels[i] <= level) index = i;
  return index;
}
]]):format(table.concat(levels, ', '), #isas)

-- Stubs for language servers: the signature's types as LuaLS writes them.
local stub_types = {
  PARAM_TENSOR = 'Tensor', PARAM_INT = 'integer', PARAM_FLOAT = 'number', PARAM_BOOL = 'boolean', PARAM_DIM = 'integer',
  PARAM_INTS = 'integer[]|integer', PARAM_CHOICE = 'string', PARAM_DTYPE = 'dtype', PARAM_DEVICE = 'string',
  PARAM_GENERATOR = 'Generator', PARAM_PROGRAM = 'string',
}
local stubs = { '---@meta moonflow\n\n---@class Tensor\nlocal Tensor = {}\n\n---@class moonflow\nlocal mf = {}\n' }
for _, op in ipairs(ops) do
  local lines, names = {}, {}
  for line in (op.doc .. '\n'):gmatch '(.-)\n' do
    if line ~= '' then lines[#lines + 1] = '--- ' .. line end
  end
  lines[#lines + 1] = '--- `' .. op.text .. '`'
  for _, p in ipairs(op.params) do
    local type = stub_types[p.kind] .. (p.list and '[]' or '') .. (p.number and '|number' or '')
    local name = p.name == 'end' and 'end_' or p.name -- a word of Lua
    lines[#lines + 1] = ('---@param %s%s %s'):format(name, p.default and '?' or '', type)
    names[#names + 1] = name
  end
  local results = {}
  for _ = 1, math.max(op.n_outputs, 0) do results[#results + 1] = 'Tensor' end
  lines[#lines + 1] = '---@return '
    .. (op.n_outputs == -1 and 'Tensor[]' or #results > 0 and table.concat(results, ', ') or 'Tensor')
  lines[#lines + 1] = ('function mf.%s(%s) end\n'):format(op.name, table.concat(names, ', '))
  stubs[#stubs + 1] = table.concat(lines, '\n')
  if op.params[1] and op.params[1].kind == 'PARAM_TENSOR' and not op.params[1].list then
    stubs[#stubs + 1] = ('---@type fun(self: Tensor, ...): any\nTensor.%s = nil\n'):format(op.name)
  end
end
stubs[#stubs + 1] = 'return mf\n'

write(out .. '/op/op_ids.h', table.concat(ids, '\n'))
write(out .. '/op/op_args.h', table.concat(structs, '\n'))
write(out .. '/op/op_table.c', table.concat(tables, '\n'))
write(out .. '/moonflow.lua', table.concat(stubs, '\n'))
