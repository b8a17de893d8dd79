-- The prompt: reads, evaluates, prints. Only `run` does input; the rest is called with text, so
-- that specs need no terminal.
--
-- An input is tried as an expression first, whose values are printed, then as a statement. It is
-- incomplete, and another line is asked for, when either attempt fails only because the text ends.
-- Typed chunks are not compiled to machine code, so that Ctrl-C reaches every loop in them; modules
-- they call are.
local prompt = {}

local FIRST, NEXT = '> ', '>> '
local EXPECTED_EQUAL = "'=' expected near '<eof>'" -- a typo such as `x = y z`: no further line would help
local UNFINISHED_STRING = '^[^\n]*unfinished string'

local function ends_early(message, text)
  if message:sub(-7) ~= "'<eof>'" then return false end
  if message:sub(-#EXPECTED_EQUAL) == EXPECTED_EQUAL then return false end
  return not message:find(UNFINISHED_STRING) or text:sub(-1) == '\\'
end

-- Returns a function; or nil and true when the text needs another line; or nil, false and the
-- message.
function prompt.compile(text, name)
  name = name or '=stdin'
  text = text:gsub('^%s*=', '', 1)
  local expression, why = loadstring('return ' .. text, name)
  if expression then return expression end
  local statement, message = loadstring(text, name)
  if statement then return statement end
  if ends_early(message, text) or ends_early(why, text) then return nil, true end
  return nil, false, message
end

-- An error in a chunk with its traceback, without the frames of this file; where there is nothing
-- between the text typed and the library, the error alone.
local function explain(message)
  if type(message) ~= 'string' and not (getmetatable(message) or {}).__tostring then
    return '(error object is a ' .. type(message) .. ' value)'
  end
  local text = debug.traceback('', 2):gsub("\n%s*%[C%]: in function 'xpcall'.*", '')
  local frames = 0
  for line in text:gmatch '\n\t([^\n]+)' do
    if not (line:find '^moonflow%.' or line:find '^%[C%]:' or line:find '^%(%.%.%.tail' or line:find '^%[builtin') then
      frames = frames + 1
    end
  end
  return tostring(message) .. (frames > 1 and text or '')
end

local function show(...)
  for i = 1, select('#', ...) do
    io.write(i > 1 and '\t' or '', tostring((select(i, ...))))
  end
  if select('#', ...) > 0 then io.write('\n') end
end

local function finish(silent, ok, ...)
  if not ok then return false, (...) end
  if silent then return true end
  local shown, message = xpcall(show, explain, ...) -- a __tostring may fail
  return shown, message
end

-- Runs a compiled input and prints its values, unless the text ends in ';'. Returns false and the
-- text of an error.
function prompt.evaluate(chunk, text)
  if jit then jit.off(chunk, true) end
  return finish(text:find(';%s*$') ~= nil, xpcall(chunk, explain))
end

-- What ranks of a job wait for in the same input does not come any more.
local function tell_ranks(message)
  local mf = package.loaded.moonflow
  if mf then mf._comm_fail(tostring(message):match '^[^\n]*') end
end

local function complain(message)
  io.stdout:flush()
  io.stderr:write(message, '\n')
  collectgarbage()
end

-- Reads one whole input. `read` is as prompt.run's. Returns a chunk and its text; nil at the end;
-- false when there is nothing to run.
local function input(read)
  local text
  while true do
    local line = read(text and NEXT or FIRST)
    if line == false then return false end
    if line == nil and not text then return nil end
    text = text and text .. '\n' .. (line or '') or line
    local chunk, incomplete, message = prompt.compile(text)
    if chunk then return chunk, text end
    if not incomplete or line == nil then
      complain(message or 'the input ends too early')
      return false
    end
  end
end

-- The loop. Of a job's ranks all run it, with the same lines. read(prompt) returns a line, nil at the end,
-- or false when the user wants to drop the input so far. There are globals `help`, `quit` and `exit`, unless
-- the user has them.
function prompt.run(read)
  local warned = false
  if rawget(_G, 'help') == nil then
    rawset(_G, 'help', function(...) return require 'moonflow'.help(...) end)
  end
  local left = false
  local leave = setmetatable({}, {
    __call = function() left = true end,
    __tostring = function() return 'quit() or Ctrl-D leaves' end,
  })
  for _, name in ipairs { 'quit', 'exit' } do
    if rawget(_G, name) == nil then rawset(_G, name, leave) end
  end
  while not left do
    local chunk, text = input(read)
    if chunk == nil then break end
    if chunk then
      local ok, message = prompt.evaluate(chunk, text)
      if not ok then
        tell_ranks(message)
        complain(message)
      end
      if ok and not warned and text:find '^%s*local%s' then
        warned = true
        complain "a local lasts for one input only; without 'local' the value is kept"
      end
    end
  end
end

return prompt
