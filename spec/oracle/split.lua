-- Every SBP signature replayed on one machine: the inputs are cut as it says, the op runs on each
-- part, and the parts' outputs are joined as it says. The result must be that of the whole. For two
-- axes each part is replayed again by itself.
local mf = require 'moonflow'
local exempt = require 'spec.oracle.exempt'
local Values = require 'spec.oracle.values'
local Run = require 'spec.oracle.run'
local Split = {}

-- Balanced: start and length of part r (from 0) of n.
local function part_of(size, n, r)
  local each, more = math.floor(size / n), size % n
  return r * each + math.min(r, more), each + (r < more and 1 or 0)
end

-- Summands of t as whole numbers and fractions that add up without rounding.
local function summands(t, n)
  local parts, rest = {}, t
  for r = 1, n - 1 do
    parts[r] = (t * (r + 1)):detach()
    rest = rest - parts[r]
  end
  parts[n] = rest
  return parts
end

-- Parts 1 .. n of a tensor under one SBP; `own`: in memory of their own, which some ops insist on.
local function cut(t, sbp, n, own)
  local parts = {}
  if sbp == 'P' then return summands(t, n) end
  local dim = sbp:match '^S(%d+)$'
  for r = 1, n do
    if dim then
      local start, length = part_of(t.shape[dim + 1], n, r - 1)
      parts[r] = t:narrow(tonumber(dim), start, length)
      if own then parts[r] = parts[r]:contiguous() end
    elseif sbp == 'B' then
      parts[r] = t
    else
      error('cannot cut as ' .. sbp, 0)
    end
  end
  return parts
end

local function join(parts, sbp)
  local whole = parts[1]
  if sbp:match '^S' then return mf.cat(parts, { dim = tonumber(sbp:sub(2)) }) end
  for r = 2, #parts do
    local t = parts[r]
    if sbp == 'P' then whole = whole + t
    elseif sbp == 'Pmax' or sbp == 'Pmin' then
      local wide = whole.dtype == mf.bool and mf.uint8 or whole.dtype
      whole = (sbp == 'Pmax' and mf.maximum or mf.minimum)(whole:to(wide), t:to(wide)):to(whole.dtype)
    else
      local wrong = Values.difference(t, whole, 1e-12, 1e-12)
      if wrong then error('parts that should be equal differ: part ' .. r .. ' ' .. wrong, 0) end
    end
  end
  return whole
end

-- 'S0 B -> P'
local function text_of(op, args, signature)
  local words = {}
  for _, slot in ipairs(Run.tensors(op, args)) do
    local sbp = signature.inputs[slot.param.name]
    words[#words + 1] = slot.index and sbp[slot.index] or sbp
  end
  return table.concat(words, ' ') .. ' -> ' .. table.concat(signature.outputs, ' ')
end

local function local_shape(t, sbp, n, r)
  local shape = {}
  for d = 1, t.ndim do shape[d] = t.shape[d] end
  local dim = sbp:match '^S(%d+)$'
  if dim then local _; _, shape[dim + 1] = part_of(t.shape[dim + 1], n, r) end
  return shape
end

-- The SBP of each result: outputs, then what was written.
local function result_sbps(op, args, signature)
  local list = { unpack(signature.outputs) }
  for _, slot in ipairs(Run.tensors(op, args)) do
    if slot.param.mutated then
      local sbp = signature.inputs[slot.param.name]
      list[#list + 1] = slot.index and sbp[slot.index] or sbp
    end
  end
  return list
end

-- Parts of sums are rounded each by itself.
local precision = { float32 = 1e-5, float16 = 1e-2, bfloat16 = 6e-2 }

-- Replays one signature; returns the arguments of each part.
local function replay(op, args, n, signature, whole)
  local pieces = {}
  for k, slot in ipairs(Run.tensors(op, args)) do
    local sbp = signature.inputs[slot.param.name]
    pieces[k] = cut(slot.tensor, slot.index and sbp[slot.index] or sbp, n, exempt.needs_memory[op.name])
  end
  local results, calls = {}, {}
  for r = 1, n do
    local part = Run.map(op, args, function(_, k) return pieces[k][r] end)
    local shape = whole[1] and signature.outputs[1] and local_shape(whole[1], signature.outputs[1], n, r - 1) or {}
    results[r] = Run.apply(op, function(a) return mf._call_part(op.name, shape, a) end, part)
    if part.size ~= nil and signature.outputs[1] then
      for _, p in ipairs(op.params) do
        if p.name == 'size' and p.kind == 'ints' and p.fixed == 0 then part.size = shape end
      end
    end
    calls[r] = part
  end
  local sbps = result_sbps(op, args, signature)
  for k = 1, #whole do
    local parts = {}
    for r = 1, n do parts[r] = results[r][k] end
    local tolerance = precision[tostring(whole[k].dtype)] or 1e-10
    local wrong = Values.difference(join(parts, sbps[k]), whole[k], tolerance, tolerance)
    if wrong then error(('%s %s'):format(Run.result_name(op, args, k), wrong), 0) end
  end
  return calls
end

-- Replays every signature of a call over n ranks, and where depth > 1 each part's over n again.
-- Returns how many there were beside "all B".
function Split.check(op, args, n, depth, trail)
  local whole = Run.call(op, args)
  local count = 0
  for _, signature in ipairs(mf._signatures(op.name, n, Run.prepare(op, args))) do
    local text = text_of(op, args, signature)
    local ok, result = pcall(replay, op, args, n, signature, whole)
    if not ok then error(('%s over %d: %s%s: %s'):format(op.name, n, trail or '', text, result), 0) end
    local trivial = not text:find '[SP]'
    if not trivial then count = count + 1 end
    if not trivial and depth > 1 then
      Split.check(op, result[1], n, depth - 1, text .. ', then ')
      Split.check(op, result[n], n, depth - 1, text .. ', then ')
    end
  end
  return count
end

return Split
