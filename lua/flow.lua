-- step:over(loader): a compiled step over all batches of a loader.
--
--   for loss in step:over(loader) do ... end
--
-- does what `for x, y in loader() do local loss = step(x, y) ... end` does, and sees the same numbers,
-- but the loop does not wait for the step: while it runs, its body goes on, the next batches are
-- decoded and copied in, and the results of the steps before it are fetched, on threads of their own.
-- Whoever reads a result, a parameter or anything else that the step uses waits for it. What the
-- loop's body changes (a learning rate, a parameter) holds for the steps behind it, and a loop that is
-- left has run the steps that it has seen.
--
-- The batches are ahead of the step: those of workers as far as their prefetch_factor, without workers
-- by one, which is made before the body runs. A batch of another form (often the last) and a module
-- whose mode changed begin anew with the step that fits.
local mf = require 'moonflow.core'
local options = require 'moonflow.options'
local worker = require 'moonflow.worker'
local fail = options.fail
local flow = {}

-- -- Batches --------------------------------------------------------------------------------------

-- Batches that are made here, one call of `next_batch` each.
local function local_source(next_batch)
  local source = { feed = mf._feed {}, made = 0 }
  local function push(...)
    if (...) == nil then
      source.ended = true
      return source.feed:push('.', {})
    end
    source.feed:push('', worker.tensors(...))
  end
  -- Sees to it that batch number n, from 1, is on its way, or the end. What fails is raised when it is
  -- needed.
  function source.provide(n, ahead)
    if source.error and not ahead then error(source.error, 0) end
    while source.made < n and not source.ended and not source.error do
      local ok, why = pcall(function() push(next_batch()) end)
      source.made = source.made + 1
      if not ok then
        source.error = why
        if not ahead then error(why, 0) end
      end
    end
  end
  function source.close() end
  return source
end

local function source_of(loader)
  local data = require 'moonflow.data'
  if type(loader) == 'function' then return local_source(loader) end
  if getmetatable(loader) ~= data._Loader then
    fail('over: a DataLoader, or a function that returns the next batch, is needed, this is %s',
      options.describe(loader))
  end
  if loader.num_workers == 0 then return local_source(loader()) end
  local feed, pump, close = worker.feed(loader, loader.batches:iter())
  return { feed = feed, provide = pump, close = close }
end

-- -- The loop -------------------------------------------------------------------------------------

local function check_first(entry)
  local form = entry.forms[1]
  if entry.n == 0 or (form.constant == nil and not form.place and not form.fields) then
    fail 'over: the step returns nothing, which would end the loop; return the loss'
  end
end

-- What lua/compile.lua gives: how to find the entry for arguments, whether it is still right, the
-- renewal of its scalars, and its results from those of its job.
function flow.over(step, how, loader, o)
  o = options('over', o, { buffers = 2 })
  options.count('over', 'buffers', o.buffers, 1)
  if o.buffers > 16 then fail 'over: at most 16 buffers' end
  if mf._tracing() then fail 'over: not inside of a step that is being compiled' end
  local self = { source = source_of(loader), given = 0 }

  -- Ends what runs. Steps that failed did not count. `silently`: no op is called, as by the collector.
  local function close(steps, silently)
    local entry = self.entry
    self.entry = nil
    if not entry or entry.flow ~= self then return end
    entry.flow = nil
    local ok, why = pcall(entry.job.close, entry.job)
    for _ = 1, steps or 0 do
      for _, undo in ipairs(entry.undo) do undo() end
    end
    for _, after in ipairs(silently and {} or entry.after) do
      local fine, reason = pcall(after)
      if ok then ok, why = fine, reason end
    end
    if not ok then error(why, 0) end
  end
  self.close = close

  local function open()
    local first = self.source.feed:peek()
    if not first then return nil end
    local entry = how.entry_of(step, unpack(first))
    check_first(entry)
    if entry.flow then entry.flow.close() end
    entry.job:open(self.source.feed, o.buffers)
    entry.flow, self.entry, self.posted = self, entry, 0
    return entry
  end

  local function ended(entry, ok, more, ...)
    if ok and more then return ... end
    local message = more
    local _, _, fetched = entry.job:counts()
    local failed = ok and 1 or self.posted - fetched + 1 -- this one was not asked for, or all behind failed
    pcall(close, failed)
    if not ok then
      self.source.close()
      error(message, 0)
    end
  end

  local function next_results()
    while true do
      local entry = self.entry
      if entry and entry.flow ~= self then entry, self.entry = nil, nil end
      if entry and not how.is_right(entry) then
        close()
        entry = nil
      end
      entry = entry or open()
      if not entry then return nil end
      how.renew(entry)
      local n, results = 0, nil
      local function pack(...)
        n, results = select('#', ...), { ... }
      end
      pack(ended(entry, pcall(entry.job.next, entry.job)))
      if self.entry then
        self.posted = self.posted + 1
        return entry, n, results
      end
    end
  end

  -- A loop that is left by break leaves its threads to the collector.
  self.guard = newproxy(true)
  getmetatable(self.guard).__gc = function() pcall(close, nil, true) end
  return function()
    local _ = self.guard
    self.source.provide(self.given + 1)
    local entry, n, results = next_results()
    if not entry then
      self.source.close()
      return nil
    end
    self.given = self.given + 1
    self.source.provide(self.given + 1, true)
    return how.finish(entry, unpack(results, 1, n))
  end
end

return flow
