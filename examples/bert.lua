-- Trains a BERT on the King James Bible, word by word: some words of a piece are hidden, and the
-- model has to tell them from those around. Then it fills the blanks of a sentence.
--
--   moonflow examples/bert.lua --save bert.safetensors
--   moonflow examples/bert.lua --resume bert.safetensors --fill 'And God said, Let there be _: and there was light.'
--   moonflow examples/bert.lua --layers 12 --width 768 --heads 12      # BERT-base
--
-- --help lists the options. The text comes from Debian's package bible-kjv-text, or from --data FILE.
-- Steps are compiled; with --eager they are not. What they share with gpt.lua is in language.lua.
local mf = require 'moonflow'
local nn = mf.nn
local language = dofile((arg[0]:match '^(.*/)' or '') .. 'language.lua')

local o = language.cli('Trains a BERT on masked words, and lets it fill blanks.', {
  { 'batch', 16, 'pieces of text a step' },
  { 'context', 64, 'words of a piece' },
  { 'layers', 4, 'encoder layers' },
  { 'width', 256, 'numbers a word' },
  { 'heads', 4, 'of attention' },
  { 'dropout', 0, 'share of activations that are dropped' },
  { 'words', 8000, 'how many different ones there are; rarer ones look alike' },
  { 'mask', 0.15, 'share of words that are to be told' },
  { 'fill', 'In the beginning _ created the heaven and the _.', 'a sentence with blanks' },
})

local PIECES = "[%a\128-\255']+[^%s%a\128-\255]?" -- words, each with the sign behind it
local MASK, UNKNOWN, FIRST = 0, 1, 2 -- the first word's number is FIRST
local IGNORED = -100 -- the label of words that are not to be told

-- -- Model ----------------------------------------------------------------------------------------

local BERT = nn.Module:extend 'BERT'
function BERT:init(s)
  self.word, self.place = nn.Embedding(s.words, s.width), nn.Embedding(s.context, s.width)
  self.norm = nn.LayerNorm(s.width)
  self.layers = nn.Sequential()
  for _ = 1, s.layers do
    self.layers:append(nn.TransformerEncoderLayer(s.width, s.heads,
      { dim_feedforward = 4 * s.width, activation = 'gelu', dropout = s.dropout, batch_first = true }))
  end
  self.head = nn.Sequential(nn.Linear(s.width, s.width), nn.GELU(), nn.LayerNorm(s.width), nn.Linear(s.width, s.words))
  for _, p in ipairs(self:parameters()) do
    if p.ndim == 2 then nn.init.normal_(p, 0, 0.02) end
  end
end
function BERT:forward(ids) -- (N, length) -> (N, length, words)
  return self.head(self.layers(self.norm(self.word(ids) + self.place(mf.arange(ids:size(1))))))
end

-- -- Training -------------------------------------------------------------------------------------

local state = o.resume ~= '' and mf.load(o.resume) or nil
local text = not (state and state.step >= o.steps) and language.read(o.data)
local words = state and state.kept.words or language.symbols(text, PIECES, o.words, FIRST)
local sizes = state and state.kept.sizes or { words = #words + FIRST, context = o.context, layers = o.layers,
  width = o.width, heads = o.heads, dropout = o.dropout }
local number = language.numbers(words, FIRST)

mf.manual_seed(o.seed)
local model = BERT(sizes)
if state then model:load_state_dict(state.model) end

-- Of the words that are to be told eight in ten are hidden, one is another word, and one is left, so
-- that the model has to look at words that it sees, too.
local function hide(ids)
  local told, dice = mf.rand(ids.shape):lt(o.mask), mf.rand(ids.shape)
  local others = mf.randint(FIRST, sizes.words, ids.shape)
  local shown = mf.where(told:logical_and(dice:lt(0.9)), others, ids)
  shown = shown:masked_fill(told:logical_and(dice:lt(0.8)), MASK)
  return shown, ids:masked_fill(told:logical_not(), IGNORED)
end

local function loss_of(shown, labels)
  return mf.cross_entropy(model(shown):flatten(0, 1), labels:flatten(), { ignore_index = IGNORED })
end

if text then
  local parts = language.split(language.encode(text, PIECES, number, UNKNOWN))
  local function batch(part) return hide(language.pieces(parts[part], o.batch, sizes.context)) end
  language.train(o, model, loss_of, batch, { words = words, sizes = sizes }, state)
end

-- -- Filling blanks -------------------------------------------------------------------------------

local blanks, ids = {}, {}
for piece in o.fill:gmatch '%S+' do
  local blank = piece:match '^_'
  ids[#ids + 1] = blank and MASK or number[piece:match(PIECES)] or UNKNOWN
  if blank then blanks[#blanks + 1] = #ids - 1 end
end
if #ids == 0 or #ids > sizes.context then error('--fill must have 1 to ' .. sizes.context .. ' words', 0) end

model:eval()
print('\n' .. o.fill)
local chances = mf.no_grad(function() return model(mf.tensor({ ids }, { dtype = mf.int64 })):softmax(-1)[0] end)
for _, at in ipairs(blanks) do
  local best, which = chances[{ at, { FIRST } }]:topk(math.min(5, #words))
  local guesses = {}
  for i, id in ipairs(which:tolist()) do guesses[i] = ('%s %.0f%%'):format(words[id + 1], 100 * best[i - 1]:item()) end
  print('  ' .. table.concat(guesses, ', '))
end
