-- What gpt.lua and bert.lua share: a text as numbers, and the training of a model on it.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim
local language = {}

-- -- The King James Bible -------------------------------------------------------------------------

local BIBLE = '/usr/lib/bible.data'

-- The LZW code of compress(1): codes of 9 to 16 bits, the low bits first, in groups of eight.
local function decompress(data)
  local words, n, bits, out = {}, 257, 9, {}
  for i = 0, 255 do words[i] = string.char(i) end
  local at, group, last = 0, 0, nil -- bits from the start; where codes of this width begin
  local function next_group() at = group + math.ceil((at - group) / (8 * bits)) * 8 * bits group = at end
  while at + bits <= 8 * #data do
    local a, b, c = data:byte(math.floor(at / 8) + 1, math.floor(at / 8) + 3)
    local code = math.floor((a + 256 * (b or 0) + 65536 * (c or 0)) / 2 ^ (at % 8)) % 2 ^ bits
    at = at + bits
    if code == 256 then -- begins anew
      next_group()
      n, bits, last = 257, 9, nil
    else
      local word = code < n and words[code] or last .. last:sub(1, 1)
      if last and n < 65536 then
        words[n], n = last .. word:sub(1, 1), n + 1
        if n == 2 ^ bits and bits < 16 then
          next_group()
          bits = bits + 1
        end
      end
      out[#out + 1], last = word, word
    end
  end
  return table.concat(out)
end

-- The file has a head, big-endian: at 84 the size of a window, how many there are, where each begins.
local function bible(data)
  local function number(at)
    local a, b, c, d = data:byte(at + 1, at + 4)
    return ((a * 256 + b) * 256 + c) * 256 + d
  end
  local parts = {}
  for i = 1, number(88) do parts[i] = decompress(data:sub(number(88 + 4 * i) + 1, number(92 + 4 * i))) end
  local text = table.concat(parts):gsub('^[^\n]*', '') -- the first line is a title
  return (text:gsub('\n%w+:%d+ ', '\n'):sub(2)) -- without "Ge1:1 "
end

-- One letter in UTF-8.
language.LETTER = '[%z\1-\127\194-\244][\128-\191]*'

-- The text of a file, which may be of the Bible's form; without a name it is that, a line per verse.
function language.read(path)
  local given = path ~= ''
  local file = io.open(given and path or BIBLE, 'rb')
  if not file then
    io.stderr:write(given and ('cannot read %s\n'):format(path) or ('%s is missing; install the Debian package '
      .. 'bible-kjv-text, or name a text with --data FILE\n'):format(BIBLE))
    os.exit(1, true)
  end
  local text = file:read '*a'
  file:close()
  if text:sub(1, 4) == 'EC02' then return bible(text) end
  local rest = text
  for _, letter in ipairs { '[\240-\244]' .. ('[\128-\191]'):rep(3), '[\224-\239]' .. ('[\128-\191]'):rep(2),
    '[\194-\223][\128-\191]' } do rest = rest:gsub(letter, ' ') end
  if rest:find '[\128-\255]' then
    io.stderr:write(('%s is not a text in UTF-8\n'):format(path))
    os.exit(1, true)
  end
  return text
end

-- -- Symbols --------------------------------------------------------------------------------------

-- The `most` commonest of the pieces of a text that `pattern` finds, the commonest first; and the
-- other way round, which number each has, from `first` on.
function language.symbols(text, pattern, most, first)
  local counts, list = {}, {}
  for piece in text:gmatch(pattern) do counts[piece] = (counts[piece] or 0) + 1 end
  for piece in pairs(counts) do list[#list + 1] = piece end
  table.sort(list, function(a, b)
    if counts[a] ~= counts[b] then return counts[a] > counts[b] end
    return a < b
  end)
  for i = #list, most + 1, -1 do list[i] = nil end
  return list, language.numbers(list, first)
end

function language.numbers(list, first)
  local number = {}
  for i, piece in ipairs(list) do number[piece] = first + i - 1 end
  return number
end

-- The text as numbers; pieces without one are `unknown`.
function language.encode(text, pattern, number, unknown)
  local ids = {}
  for piece in text:gmatch(pattern) do ids[#ids + 1] = number[piece] or unknown end
  return ids
end

-- Nine tenths of the numbers to learn from, the rest to be measured by.
function language.split(ids)
  local all = mf.tensor(ids, { dtype = mf.int64 })
  local n = math.floor(#ids * 0.9)
  return { train = all[{ { 0, n } }], valid = all[{ { n, #ids } }] }
end

-- n pieces of the given length, from anywhere.
function language.pieces(ids, n, length)
  local starts = mf.randint(0, ids:size(0) - length + 1, { n, 1 })
  return ids[starts + mf.arange(length)]
end

-- -- Training -------------------------------------------------------------------------------------

language.options = {
  { 'data', '', 'a text file (without: the King James Bible)' },
  { 'steps', 2000, 'training steps, those before --resume included' },
  { 'lr', 1e-3, 'peak of the learning rate' },
  { 'warmup', 100, 'steps in which it rises to that; then it falls along a cosine' },
  { 'eval', 250, 'steps between two measurements, after which the model is saved' },
  { 'save', '', 'file to save to' },
  { 'resume', '', 'file to go on from' },
  { 'seed', 1, 'of weights, batches and dropout' },
  { 'eager', false, 'run steps op by op' },
  { 'bf16', false, 'multiply in bfloat16' },
}

-- The options of a program: its own, then those of all.
function language.cli(title, entries)
  for _, entry in ipairs(language.options) do entries[#entries + 1] = entry end
  io.stdout:setvbuf 'line'
  return mf.cli(arg, title, entries)
end

-- Trains `model` to make loss(batch 'train') small; `kept` is saved with the model, and `state`, if
-- there is one, is what an earlier run saved. Ctrl-C saves too. Each step draws from a seed of its
-- own, so that a run that was resumed ends as one that was not. `parallel`: of mf.parallelize, if several ranks
-- share the work.
function language.train(o, model, loss_of, batch, kept, state, parallel)
  local opt = optim.AdamW(model:parameters(), { lr = o.lr, betas = { 0.9, 0.98 }, weight_decay = 0.01 })
  local falling = optim.lr_scheduler.CosineAnnealingLR(opt, math.max(1, o.steps - o.warmup), { eta_min = o.lr / 10 })
  local schedule = o.warmup < 1 and falling
    or optim.lr_scheduler.WarmupLR(opt, falling, { warmup_iters = o.warmup, start_factor = 1 / o.warmup })
  local done = 0
  if state then
    opt:load_state_dict(state.optim)
    done = state.step
  end

  local first = not parallel or mf.rank() == 0

  local function compiled(f)
    local how = { amp = o.bf16 and 'bfloat16' or nil }
    if o.eager then return parallel and function(...) return parallel:call(f, ...) end or f end
    return parallel and parallel:compile(f, how) or mf.compile(f, how)
  end

  local step = compiled(function(...)
    opt:zero_grad()
    local loss = loss_of(...)
    loss:backward()
    nn.utils.clip_grad_norm_(model:parameters(), 1)
    opt:step()
    return loss
  end)

  local measure = compiled(function(...) return mf.no_grad(loss_of, ...) end)

  local function validate()
    mf.manual_seed(o.seed)
    model:eval()
    local sum, n = 0, 10
    for _ = 1, n do sum = sum + measure(batch 'valid'):item() end
    model:train()
    return sum / n
  end

  local function save()
    if o.save == '' then return end
    local optimiser = opt:state_dict()
    mf.save({ model = model:state_dict(), optim = optimiser, kept = kept,
      step = optimiser.state[0] and optimiser.state[0].step:item() or 0 }, o.save,
      { global_dst_rank = parallel and 0 or nil })
  end

  local function run()
    local bar = first and mf.progress(math.max(0, o.steps - done), { label = 'training' })
    while done < o.steps do
      mf.manual_seed(o.seed + done)
      schedule:step(done)
      local loss = step(batch 'train'):item()
      done = done + 1
      if bar then bar:step { loss = loss, lr = opt.param_groups[1].lr } end
      if done % o.eval == 0 or done == o.steps then
        local measured = validate()
        if first then print(('step %d  loss %.4f  validation %.4f'):format(done, loss, measured)) end
        save()
      end
    end
    if bar then bar:finish() end
  end

  model:train()
  local ok, why = pcall(run)
  if ok then return end
  if not tostring(why):find 'interrupt' then error(why, 0) end
  save()
  print(o.save == '' and '\ninterrupted; --save FILE would have kept the model'
    or ('\ninterrupted; --resume %s goes on'):format(o.save))
  os.exit(130, true)
end

return language
