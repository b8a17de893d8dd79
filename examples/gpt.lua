-- Trains a small GPT on the King James Bible, letter by letter, and lets it write.
--
--   moonflow examples/gpt.lua --save gpt.safetensors
--   moonflow examples/gpt.lua --resume gpt.safetensors --prompt 'And God said' --temperature 0.7
--   moonflow -n 4 examples/gpt.lua --plan examples/plans/two_axes.lua --save gpt.safetensors
--
-- --help lists the options. The text comes from Debian's package bible-kjv-text, or from --data FILE.
-- Steps are compiled; with --eager they are not. What they share with bert.lua is in language.lua.
local mf = require 'moonflow'
local nn = mf.nn
local language = dofile((arg[0]:match '^(.*/)' or '') .. 'language.lua')

local o = language.cli('Trains a small GPT, letter by letter, and lets it write.', {
  { 'batch', 16, 'pieces of text a step' },
  { 'context', 128, 'letters that are seen at once' },
  { 'layers', 4, 'blocks' },
  { 'width', 192, 'numbers a letter' },
  { 'heads', 6, 'of attention' },
  { 'dropout', 0.1, 'share of activations that are dropped' },
  { 'plan', '', 'a file that says how several ranks share the work' },
  { 'prompt', 'In the beginning', 'what the sample begins with' },
  { 'length', 400, 'letters of the sample' },
  { 'temperature', 0.8, 'below 1: likelier letters; above: bolder ones' },
  { 'top-k', 40, 'choose among so many (0: all)' },
})

-- -- Model ----------------------------------------------------------------------------------------

local Block = nn.Module:extend 'Block'
function Block:init(s)
  self.heads = s.heads
  self.norm1, self.norm2 = nn.LayerNorm(s.width), nn.LayerNorm(s.width)
  self.qkv, self.out = nn.Linear(s.width, 3 * s.width), nn.Linear(s.width, s.width)
  self.mlp = nn.Sequential(nn.Linear(s.width, 4 * s.width), nn.GELU(), nn.Linear(4 * s.width, s.width))
  self.drop = nn.Dropout(s.dropout)
end
function Block:attend(x)
  local n, length, width = unpack(x.shape)
  local parts = self.qkv(x):view(n, length, self.heads, 3, -1):permute(3, 0, 2, 1, 4)
  local y = mf.scaled_dot_product_attention(parts[0], parts[1], parts[2], { is_causal = true })
  return self.out(y:transpose(1, 2):reshape(n, length, width))
end
function Block:forward(x)
  x = x + self.drop(self:attend(self.norm1(x)))
  return x + self.drop(self.mlp(self.norm2(x)))
end

local GPT = nn.Module:extend 'GPT'
function GPT:init(s)
  self.letter, self.place = nn.Embedding(s.letters, s.width), nn.Embedding(s.context, s.width)
  self.blocks = nn.Sequential()
  for _ = 1, s.layers do self.blocks:append(Block(s)) end
  self.norm, self.head = nn.LayerNorm(s.width), nn.Linear(s.width, s.letters)
  for _, p in ipairs(self:parameters()) do
    if p.ndim == 2 then nn.init.normal_(p, 0, 0.02) end
  end
end
function GPT:forward(ids) -- (N, length) -> (N, length, letters)
  return self.head(self.norm(self.blocks(self.letter(ids) + self.place(mf.arange(ids:size(1))))))
end

-- -- Training -------------------------------------------------------------------------------------

local state = o.resume ~= '' and mf.load(o.resume) or nil
local text = not (state and state.step >= o.steps) and language.read(o.data)
local letters = state and state.kept.letters or language.symbols(text, language.LETTER, math.huge, 0)
local sizes = state and state.kept.sizes or { letters = #letters, context = o.context, layers = o.layers,
  width = o.width, heads = o.heads, dropout = o.dropout }
local number = language.numbers(letters, 0)

mf.manual_seed(o.seed)
local model = GPT(sizes)
if state then model:load_state_dict(state.model) end

local run = o.plan ~= '' and mf.parallelize(model, dofile(o.plan)) or nil
if run and mf.rank() == 0 then print(run) end

local function loss_of(ids) -- (N, context + 1): each letter is to be told from those before
  local logits = model(ids[{ {}, { 0, -1 } }])
  return mf.cross_entropy(logits:flatten(0, 1), ids[{ {}, { 1 } }]:flatten())
end

if text then
  local parts = language.split(language.encode(text, language.LETTER, number))
  local function batch(part) return language.pieces(parts[part], o.batch, sizes.context + 1) end
  language.train(o, model, loss_of, batch, { letters = letters, sizes = sizes }, state, run)
end
if run then return end -- one rank writes, from what they saved

-- -- Sampling -------------------------------------------------------------------------------------

local function next_letter(ids)
  local seen = { unpack(ids, math.max(1, #ids - sizes.context + 1)) }
  local logits = model(mf.tensor({ seen }, { dtype = mf.int64 }))[{ 0, -1 }] / o.temperature
  if o['top-k'] > 0 and o['top-k'] < #letters then
    local best = logits:topk(o['top-k'])
    logits = logits:masked_fill(logits:lt(best[-1]), -math.huge)
  end
  return mf.multinomial(logits:softmax(0), 1):item()
end

local ids = language.encode(o.prompt, language.LETTER, number, number[' '])
if #ids == 0 then error('--prompt must not be empty', 0) end
io.stdout:setvbuf 'no'
io.write('\n', o.prompt)
model:eval()
mf.manual_seed(o.seed)
mf.no_grad(function()
  for _ = 1, o.length do
    ids[#ids + 1] = next_letter(ids)
    io.write(letters[ids[#ids] + 1])
  end
end)
print()
