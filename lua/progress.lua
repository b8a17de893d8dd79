-- A progress bar: rate, time left and values on a terminal; elsewhere a plain line now and then.
--
--   local bar = progress(#batches, { label = 'epoch 1' })
--   for ... do bar:step { loss = 0.31 } end
--   bar:finish()
local options = require 'moonflow.options'

local Bar = {}
Bar.__index = Bar

local function clock_text(seconds)
  if seconds >= 3600 then return ('%d:%02d:%02d'):format(seconds / 3600, seconds / 60 % 60, seconds % 60) end
  return ('%d:%02d'):format(seconds / 60, seconds % 60)
end

local function values_text(values)
  local parts = {}
  for name, value in pairs(values or {}) do
    parts[#parts + 1] = ('%s %s'):format(name, type(value) == 'number' and ('%.4g'):format(value) or tostring(value))
  end
  table.sort(parts)
  return table.concat(parts, '  ')
end

function Bar:line()
  local elapsed = self.now() - self.start
  local rate = elapsed > 0 and self.done / elapsed or 0
  local left = rate > 0 and (self.total - self.done) / rate or 0
  local text = ('%s %d/%d  %.1f/s  %s left'):format(self.label, self.done, self.total, rate, clock_text(left))
  local values = values_text(self.values)
  if values ~= '' then text = text .. '  ' .. values end
  if not self.terminal then return text end
  local width = 20
  local full = math.floor(width * self.done / math.max(self.total, 1))
  return ('\r%s [%s%s]\27[K'):format(text, ('#'):rep(full), ('.'):rep(width - full))
end

-- n more are done (1 when not given); values are shown behind.
function Bar:step(values, n)
  self.done = self.done + (n or 1)
  self.values = values or self.values
  local now = self.now()
  if now < self.next then return end
  self.next = now + (self.terminal and 0.1 or self.interval)
  self.out:write(self:line(), self.terminal and '' or '\n')
  self.out:flush()
end

function Bar:finish()
  if self.terminal then
    self.out:write(self:line(), '\n')
    self.out:flush()
  end
  return self.now() - self.start
end

return function(mf)
  return function(total, o)
    o = options('progress', o, { label = '', interval = 10, out = options.none, terminal = options.none })
    local out = o.out or io.stderr
    local terminal = o.terminal
    if terminal == nil then terminal = not o.out and mf._is_terminal and mf._is_terminal(2) or false end
    local now = mf.time or os.time
    return setmetatable({ total = total, done = 0, label = o.label, interval = o.interval, out = out, terminal = terminal, now = now,
      start = now(), next = now() + (terminal and 0 or o.interval) }, Bar)
  end
end
