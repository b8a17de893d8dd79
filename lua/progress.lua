-- A progress bar: rate, time left and values on a terminal; elsewhere a plain line now and then.
--
--   local bar = mf.progress(#batches, { label = 'epoch 1' })
--   for ... do bar:step { loss = 0.31 } end
--   local seconds = bar:finish()
local mf = require 'moonflow.core'
local options = require 'moonflow.options'

local Bar = {}
Bar.__index = Bar

local WIDTH = 24 -- of the bar alone

local function clock(seconds)
  local s = math.floor(seconds + 0.5)
  local h, m = math.floor(s / 3600), math.floor(s / 60) % 60
  if h > 0 then return ('%d:%02d:%02d'):format(h, m, s % 60) end
  return ('%d:%02d'):format(m, s % 60)
end

local function values_text(values)
  local parts = {}
  for name, value in pairs(values) do
    local text = type(value) == 'number' and ('%.4g'):format(value) or tostring(value)
    parts[#parts + 1] = name .. ' ' .. text
  end
  table.sort(parts)
  return table.concat(parts, '  ')
end

-- "epoch 1  120/468  31.2/s  0:11 left  loss 0.4812"; at the end the time it took.
function Bar:text()
  local elapsed = self.now() - self.start
  local rate = elapsed > 0 and self.done / elapsed or 0
  local parts = { ('%d/%d'):format(self.done, self.total), ('%.1f/s'):format(rate) }
  if self.label ~= '' then table.insert(parts, 1, self.label) end
  if self.done >= self.total then parts[#parts + 1] = clock(elapsed)
  elseif rate > 0 then parts[#parts + 1] = clock((self.total - self.done) / rate) .. ' left' end
  if next(self.values) then parts[#parts + 1] = values_text(self.values) end
  return table.concat(parts, '  ')
end

function Bar:draw(last)
  if not self.terminal then
    self.out:write(self:text(), '\n')
  else
    local full = math.floor(WIDTH * math.min(1, self.done / math.max(self.total, 1)))
    local bar = ('#'):rep(full) .. ('.'):rep(WIDTH - full)
    self.out:write('\r[', bar, '] ', self:text(), '\27[K', last and '\n' or '')
  end
  self.out:flush()
end

-- n more are done (1 when not given); `values` are shown behind.
function Bar:step(values, n)
  self.done = self.done + (n or 1)
  self.values = values or self.values
  local now = self.now()
  if now < self.due then return end
  self.due = now + (self.terminal and 0.1 or self.interval)
  self:draw()
end

-- Ends the line on a terminal; returns the seconds since the start.
function Bar:finish()
  if self.terminal then self:draw(true) end
  return self.now() - self.start
end

-- A bar for `total` steps. Options: label; interval, the seconds between two lines where there is
-- no terminal; out, a file (stderr); terminal, whether `out` is one; clock, what tells the seconds.
return function(total, o)
  options.count('progress', 'total', total)
  o = options('progress', o, { label = '', interval = 10, out = options.userdata,
    terminal = options.boolean, clock = options['function'] })
  local terminal = o.terminal
  if terminal == nil then terminal = not o.out and mf._is_terminal(2) end
  local now = o.clock or mf.time
  return setmetatable({ total = total, done = 0, values = {}, label = o.label, now = now,
    interval = o.interval, out = o.out or io.stderr, terminal = terminal, start = now(),
    due = now() + (terminal and 0 or o.interval) }, Bar)
end
