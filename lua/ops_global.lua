-- Global tensors: placements, SBP, and conversion; see src/bind/global.c for what is below.
--
--   local p = mf.placement('cpu', { 0, 1 })
--   local x = mf.randn(8, 4, { placement = p, sbp = 'S0' })   -- each rank has half of the rows
--   local y = x:to_global { sbp = 'B' }                       -- each rank has all
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local Tensor = mf.Tensor
local fail, none = options.fail, options.none

-- What a library call raises is told at the user's line.
local function call(f, ...)
  local ok, result = pcall(f, ...)
  if not ok then
    if type(result) ~= 'string' then error(result, 0) end
    fail('%s', (result:gsub('^[^:\n]+:%d+: ', '')))
  end
  return result
end

-- -- Placements and SBP ---------------------------------------------------------------------------

-- mf.placement(device, ranks): the ranks on which a global tensor lies, all when none are given; a nested table
-- makes a grid, of which each axis has an SBP of its own: mf.placement('cpu', {{0, 1}, {2, 3}}).
function mf.placement(device, ranks)
  if ranks == nil then
    ranks = {}
    for rank = 0, mf.world_size() - 1 do ranks[rank + 1] = rank end
  end
  return call(mf._placement, device, ranks)
end

-- mf.sbp: how a tensor lies along one axis of a placement: split(dim), broadcast, partial_sum. Values are
-- strings, which can be written as well: 'S0', 'B', 'P', 'Pmax', 'Pmin'.
mf.sbp = {
  broadcast = 'B', partial_sum = 'P', partial_max = 'Pmax', partial_min = 'Pmin',
  split = function(dim) return 'S' .. options.count('sbp.split', 'dim', dim) end,
}

-- The SBP under which every rank of a placement has the whole.
function mf._whole(placement)
  local list = {}
  for axis = 1, #placement.hierarchy do list[axis] = 'B' end
  return list
end

-- -- Conversion -----------------------------------------------------------------------------------

-- x:to_global(placement, sbp, { grad_sbp = nil, check_meta = true }): a global x in another layout, what is not
-- given staying as it is; or a global tensor of which the local x is this rank's part: then all ranks of the
-- job call it, and with 'B' their values must agree. The gradient comes back in x's layout, or in grad_sbp.
function Tensor.to_global(x, ...)
  if not mf.is_tensor(x) then fail('to_global: x must be a tensor, is %s', options.describe(x)) end
  local o = options.arguments('to_global', { 'placement', 'sbp' },
    { placement = none, sbp = none, grad_sbp = none, check_meta = true }, ...)
  return call(mf._to_global, x, o.placement, o.sbp, o.grad_sbp, o.check_meta)
end

-- mf.distribute(x, placement, sbp): a global tensor of the value x, which is whole and equal on all ranks, or
-- global already; each rank keeps its part. All ranks of the job call it.
function mf.distribute(x, ...)
  if not mf.is_tensor(x) then fail('distribute: x must be a tensor, is %s', options.describe(x)) end
  local o = options.arguments('distribute', { 'placement', 'sbp' }, { placement = none, sbp = none }, ...)
  if x.is_global then return x:to_global(o.placement, o.sbp) end
  if not mf._is_placement(o.placement) then
    fail('distribute: placement must be a placement (mf.placement), is %s', options.describe(o.placement))
  end
  local whole = call(mf._to_global, x, o.placement, mf._whole(o.placement), nil, true)
  return call(mf._to_global, whole, o.placement, o.sbp)
end

-- -- For the library's own parts -----------------------------------------------------------------

-- t with its sums, maxima and minima formed.
function mf._settled(t)
  local sbps, partial = {}, false
  for axis, sbp in ipairs(t.sbp) do
    sbps[axis] = sbp:sub(1, 1) == 'P' and 'B' or sbp
    partial = partial or sbps[axis] ~= sbp
  end
  return partial and t:to_global { sbp = sbps } or t
end

-- Options for a factory whose result meets x: where x is global, everywhere on its placement.
function mf._beside(x, o)
  if not x.is_global then return o end
  o = o or {}
  o.placement, o.sbp = x.placement, mf._whole(x.placement)
  return o
end

-- The same for a result that lies as x does, unless the caller's options say where.
function mf._laid_out_as(x, o, given)
  if not x.is_global or (type(given) == 'table' and given.placement) then return o end
  o.sbp = {}
  for axis, sbp in ipairs(x.sbp) do o.sbp[axis] = sbp:sub(1, 1) == 'P' and 'B' or sbp end
  return o
end

-- What tensors of one layout have in common; '' for local ones.
function mf._layout_key(t)
  return t.is_global and tostring(t.placement) .. tostring(t.sbp) or ''
end

-- A list as lists of tensors that lie alike, in order of appearance.
function mf._by_layout(list)
  local groups, known = {}, {}
  for _, t in ipairs(list) do
    local key = mf._layout_key(t)
    local group = known[key]
    if not group then
      group = {}
      known[key] = group
      groups[#groups + 1] = group
    end
    group[#group + 1] = t
  end
  return groups
end

-- The value t, whole where it is local, as t's counterpart `like` lies.
function mf._as_laid_out(t, like)
  if like.is_global then return mf.distribute(t:detach(), like.placement, like.sbp) end
  return t.is_global and t:detach():to_global { sbp = mf._whole(t.placement) }:to_local() or t
end

return mf
