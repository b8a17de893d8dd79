-- Every op on global tensors against one rank: the inputs lie on the ranks in every way there is, the op runs,
-- and its results, what it wrote, and the gradients must be those of the same call on local tensors. Runs in
-- each rank of a job.
local mf = require 'moonflow'
local Cases = require 'spec.oracle.cases'
local Run = require 'spec.oracle.run'
local Values = require 'spec.oracle.values'
local exempt = require 'spec.oracle.exempt'
local Global = {}

-- What the op table's call may not be given, or means something else, in parts.
local no_gradient_check = exempt.no_graph_gradient

-- Balanced: start and length of part r (from 0) of n.
local function part_of(size, n, r)
  local each, more = math.floor(size / n), size % n
  return r * each + math.min(r, more), each + (r < more and 1 or 0)
end

-- This rank's factor along an axis of n: 2, -1, 3, -3, ... with the sum 1.
local function factor(n, r)
  if n % 2 == 1 then
    if r == n - 1 then return 1 end
    return r % 2 == 0 and r + 2 or -(r + 1)
  end
  if r == 0 then return 2 end
  if r == 1 then return -1 end
  return r % 2 == 0 and r + 1 or -r
end
-- A global tensor of the value t, made of parts by hand: `grid` = { placement, sizes, coordinates of this rank }.
local function lay_out(t, grid, sbps)
  local part = t:detach()
  for a, n in ipairs(grid.sizes) do
    local sbp, r = sbps[a], grid.at[a]
    local dim = sbp:match '^S(%d+)$'
    if dim then
      local start, length = part_of(part.shape[dim + 1], n, r)
      part = part:narrow(tonumber(dim), start, length)
    elseif sbp == 'P' then
      if part.dtype == mf.bool then part = r == 0 and part or mf.zeros_like(part)
      else part = part * factor(n, r) end
    end
  end
  return part:contiguous():clone():to_global(grid.placement, sbps)
end

-- All SBP that one axis may have for t.
local function choices(t)
  local list = { 'B', 'P' }
  for d = 0, t.ndim - 1 do list[#list + 1] = 'S' .. d end
  return list
end

-- Combinations of one SBP list for each tensor: all, or `most` of them picked evenly.
local function combinations(tensors, n_axes, most)
  local per = {}
  for k, t in ipairs(tensors) do
    local one, all = choices(t), { {} }
    for _ = 1, n_axes do
      local longer = {}
      for _, have in ipairs(all) do
        for _, sbp in ipairs(one) do
          local list = { unpack(have) }
          list[#list + 1] = sbp
          longer[#longer + 1] = list
        end
      end
      all = longer
    end
    per[k] = all
  end
  local total = 1
  for k = 1, #per do total = total * #per[k] end
  local list, n = {}, math.min(total, most)
  for i = 0, n - 1 do
    local index, row = math.floor(i * total / n + (n < total and i * 7 % (total / n) or 0)) % total, {}
    for k = 1, #per do
      row[k] = per[k][index % #per[k] + 1]
      index = math.floor(index / #per[k])
    end
    list[#list + 1] = row
  end
  return list
end

local function text_of(row)
  local words = {}
  for k, sbps in ipairs(row) do words[k] = '(' .. table.concat(sbps, ', ') .. ')' end
  return table.concat(words, ' ')
end

-- -- Values ---------------------------------------------------------------------------------------

local function gathered(t)
  if not t.is_global then error('a result is local', 0) end
  local sbps = {}
  for a = 1, #t.placement.hierarchy do sbps[a] = 'B' end
  return t:detach():to_global { sbp = sbps }:to_local()
end

local precision = { float32 = 1e-5, float16 = 1e-2, bfloat16 = 6e-2 }

local function compare(got, want, what)
  local tolerance = precision[tostring(want.dtype)] or 1e-9
  local wrong = Values.difference(gathered(got), want, tolerance, tolerance)
  if wrong then error(('%s %s'):format(what, wrong), 0) end
end

local function check_values(op, args, pieces, want)
  local got = Run.call(op, Run.map(op, args, function(_, k) return pieces[k] end))
  if #got ~= #want then error('another number of results', 0) end
  if exempt.undefined[op.name] then return end
  for k, t in ipairs(want) do compare(got[k], t, Run.result_name(op, args, k)) end
end

-- -- Gradients ------------------------------------------------------------------------------------

local function weights_like(t, phase)
  local list = {}
  for k = 1, t:numel() do list[k] = math.cos(0.5 * (k - 1) + phase) end
  return #list == 0 and mf.zeros(t.shape, { dtype = t.dtype })
    or mf.tensor(list, { dtype = mf.float64 }):view(t.shape):to(t.dtype)
end

-- Gradients of the slots under the loss sum(result * weight); `lay` makes weights as the results are.
local function gradients(op, args, slots, outputs, lay)
  local leaves = {}
  args = Run.map(op, args, function(t, k)
    if not slots[k] then return t end
    leaves[k] = t:detach():requires_grad_()
    return leaves[k]
  end)
  local loss
  for k, t in ipairs(Run.call(op, args)) do
    if t:is_floating_point() and t.requires_grad and not outputs[Run.result_name(op, args, k)] then
      local one = (t * lay(weights_like(t, k))):sum()
      loss = loss and loss + one or one
    end
  end
  if not loss then return nil end
  loss:backward()
  local list = {}
  for k, leaf in pairs(leaves) do list[k] = leaf.grad or false end
  return list, leaves
end

local function gradient_slots(op, args)
  local slots = {}
  for k, slot in ipairs(Run.tensors(op, args)) do
    if op.gradient[slot.param.name] and slot.tensor:is_floating_point() then slots[k] = true end
  end
  return slots
end

local function sbp_of_gradient(t)
  return (table.concat(t.sbp, ' '):gsub('P%a*', 'B'))
end

local function check_gradients(op, args, pieces, grid, want, outputs)
  local whole = {}
  for a = 1, #grid.sizes do whole[a] = 'B' end
  local got, leaves = gradients(op, Run.map(op, args, function(_, k) return pieces[k] end), gradient_slots(op, args),
    outputs, function(w) return lay_out(w, grid, whole) end)
  for k, g in pairs(want) do
    if g then
      if not got or not got[k] then error('there is no gradient for slot ' .. k, 0) end
      compare(got[k], g, 'the gradient of slot ' .. k)
      local have, sbp = table.concat(got[k].sbp, ' '), sbp_of_gradient(leaves[k])
      if have ~= sbp then error(('the gradient of slot %d lies as %s, not %s'):format(k, have, sbp), 0) end
    end
  end
end

-- -- In place -------------------------------------------------------------------------------------

-- The NAME_ form writes into a clone of the first tensor, which keeps its layout. nil: it does not fit there.
local function in_place(op, args)
  args = Run.map(op, args, function(t, k) return k == 1 and t:detach():clone() or t end)
  local first = args[op.params[1].name]
  if not mf.is_tensor(first) then return nil end
  local sbp = first.is_global and table.concat(first.sbp, ' ')
  local ok = pcall(op.call_, args)
  return ok and first or nil, sbp
end

local function check_in_place(op, args, pieces, want)
  local got, sbp = in_place(op, Run.map(op, args, function(_, k) return pieces[k] end))
  if not got then error(op.name .. '_ does not run', 0) end
  compare(got, want, op.name .. '_')
  local have = table.concat(got.sbp, ' ')
  if have ~= sbp then error(('%s_ lies as %s, not %s'):format(op.name, have, sbp), 0) end
end

-- -- One op ---------------------------------------------------------------------------------------

local function tensors_of(op, args)
  local list = {}
  for k, slot in ipairs(Run.tensors(op, args)) do list[k] = slot.tensor end
  return list
end

-- A factory under every SBP of its output.
local function check_factory(op, args, grid, most)
  local want = Run.call(op, args)[1]
  local count = 0
  for _, row in ipairs(combinations({ want }, #grid.sizes, most)) do
    local ok, text = pcall(function()
      local given = Run.prepare(op, args)
      given.placement, given.sbp = grid.placement, row[1]
      local got = op.call(given)
      if table.concat(got.sbp, ' ') ~= table.concat(row[1], ' ') then error('lies as ' .. tostring(got.sbp), 0) end
      if not exempt.undefined[op.name] then compare(got, want, 'the result') end
    end)
    if not ok then error(('%s as %s: %s'):format(op.name, text_of(row), tostring(text)), 0) end
    count = count + 1
  end
  return count
end

-- Checks all cases of an op over the ranks of `grid`, `most` combinations of a case; returns how many.
function Global.check(op, grid, most)
  local count = 0
  local slope = next(op.gradient) and not exempt.total_gradient[op.name] and not no_gradient_check[op.name]
  local outputs = exempt.no_output_gradient[op.name] or {}
  for _, args in ipairs(Cases.list(op, { B = 4 })) do
    local tensors = tensors_of(op, args)
    if #tensors == 0 then
      count = count + check_factory(op, args, grid, most)
    else
      local want = Run.call(op, args)
      local written = op.call_ and not exempt.undefined[op.name] and not op.flags.random and in_place(op, args)
      local slopes = slope and gradients(op, args, gradient_slots(op, args), outputs, function(w) return w end)
      for _, row in ipairs(combinations(tensors, #grid.sizes, most)) do
        local function pieces()
          local list = {}
          for k, t in ipairs(tensors) do list[k] = lay_out(t, grid, row[k]) end
          return list
        end
        local ok, text = xpcall(function()
          check_values(op, args, pieces(), want)
          if written then check_in_place(op, args, pieces(), written) end
          if slopes then check_gradients(op, args, pieces(), grid, slopes, outputs) end
        end, function(e) return type(e) == 'string' and e or tostring(e) end)
        if not ok then error(('%s with %s: %s'):format(op.name, text_of(row), tostring(text)), 0) end
        count = count + 1
      end
    end
  end
  return count
end

-- In a rank: the ops of these names over a grid of these sizes; what went wrong by op, '' when all is well.
function Global.run(names, sizes, rank, most)
  local at, n = {}, 0
  local function build(axis)
    local list = {}
    for i = 1, sizes[axis] do
      if axis == #sizes then
        list[i] = n
        n = n + 1
      else
        list[i] = build(axis + 1)
      end
    end
    return list
  end
  local ranks = build(1)
  local rest = rank
  for a = #sizes, 1, -1 do
    at[a] = rest % sizes[a]
    rest = math.floor(rest / sizes[a])
  end
  local grid = { placement = mf.placement('cpu', ranks), sizes = sizes, at = at }
  local by_name, results = {}, {}
  for _, op in ipairs(Run.ops) do by_name[op.name] = op end
  for _, name in ipairs(names) do
    local ok, result = pcall(Global.check, by_name[name], grid, most)
    results[name] = ok and result or tostring(result)
    if not ok then break end
  end
  return results
end

return Global
