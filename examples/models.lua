-- The models of bench.lua and resnet50.lua, as functions of their sizes: `dofile(path)` gives a table of
-- classes. Names of modules and parameters are those of peer.py.
local mf = require 'moonflow'
local nn = mf.nn
local models = {}

-- v1.5: the stride sits on the 3x3 convolution.
local Bottleneck = nn.Module:extend 'Bottleneck'
function Bottleneck:init(cin, width, stride)
  local cout = width * 4
  self.c1, self.b1 = nn.Conv2d(cin, width, 1, { bias = false }), nn.BatchNorm2d(width)
  self.c2, self.b2 = nn.Conv2d(width, width, 3, { stride = stride, padding = 1, bias = false }), nn.BatchNorm2d(width)
  self.c3, self.b3 = nn.Conv2d(width, cout, 1, { bias = false }), nn.BatchNorm2d(cout)
  if stride ~= 1 or cin ~= cout then
    self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, { stride = stride, bias = false }), nn.BatchNorm2d(cout))
  end
end
function Bottleneck:forward(x)
  local y = mf.relu(self.b1(self.c1(x)))
  y = mf.relu(self.b2(self.c2(y)))
  y = self.b3(self.c3(y))
  return mf.relu(y + (self.down and self.down(x) or x))
end

local ResNet50 = nn.Module:extend 'ResNet50'
models.ResNet50 = ResNet50
function ResNet50:init(classes, width, blocks)
  self.stem = nn.Sequential(nn.Conv2d(3, width, 7, { stride = 2, padding = 3, bias = false }), nn.BatchNorm2d(width),
    nn.ReLU(), nn.MaxPool2d(3, { stride = 2, padding = 1 }))
  self.body = nn.Sequential()
  local cin = width
  for stage, n in ipairs(blocks) do
    for i = 1, n do
      self.body:append(Bottleneck(cin, width, i == 1 and stage > 1 and 2 or 1))
      cin = width * 4
    end
    width = width * 2
  end
  self.fc = nn.Linear(cin, classes)
end
function ResNet50:forward(x) return self.fc(self.body(self.stem(x)):mean { 2, 3 }) end

-- A transformer block; pre-norm and causal for GPT, post-norm for BERT.
local Block = nn.Module:extend 'Block'
function Block:init(d, heads, causal)
  self.h, self.causal = heads, causal
  self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
  self.qkv, self.o = nn.Linear(d, 3 * d), nn.Linear(d, d)
  self.f1, self.f2 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
end
function Block:attend(x)
  local B, N, D = unpack(x.shape)
  local q, k, v = unpack(self.qkv(x):reshape(B, N, 3, self.h, D / self.h):permute(2, 0, 3, 1, 4):unbind(0))
  local y = mf.scaled_dot_product_attention(q, k, v, { is_causal = self.causal })
  return self.o(y:transpose(1, 2):reshape(B, N, D))
end
function Block:forward(x)
  if self.causal then
    x = x + self:attend(self.n1(x))
    return x + self.f2(mf.gelu(self.f1(self.n2(x))))
  end
  x = self.n1(x + self:attend(x))
  return self.n2(x + self.f2(mf.gelu(self.f1(x))))
end

local Transformer = nn.Module:extend 'Transformer'
models.Transformer = Transformer
function Transformer:init(vocab, n, d, heads, layers, causal, head_on)
  self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(n, d)
  self.blocks = nn.Sequential()
  for _ = 1, layers do self.blocks:append(Block(d, heads, causal)) end
  self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, { bias = false })
  self:register_buffer('ids', mf.arange(n))
  self.head_on = head_on
end
function Transformer:forward(x)
  x = self.tok(x) + self.pos(self.ids)
  x = self.norm(self.blocks(x))
  if self.head_on then x = x[{ {}, { 0, self.head_on } }] end -- masked-LM head on the first positions
  return self.head(x)
end

local MLP = nn.Module:extend 'MLP'
models.MLP = MLP
function MLP:init(a, b, c)
  self.l = nn.Sequential(nn.Linear(a, b), nn.ReLU(), nn.Linear(b, c), nn.ReLU(), nn.Linear(c, 10))
end
function MLP:forward(x) return self.l(x) end

local CNN = nn.Module:extend 'CNN'
models.CNN = CNN
function CNN:init(width, size, hidden) -- images of size x size
  self.f = nn.Sequential(nn.Conv2d(1, width, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(width, 2 * width, 3, { padding = 1 }), nn.ReLU(), nn.MaxPool2d(2))
  self.l = nn.Sequential(nn.Linear(2 * width * (size / 4) ^ 2, hidden), nn.ReLU(), nn.Linear(hidden, 10))
end
function CNN:forward(x)
  x = self.f(x)
  return self.l(x:reshape(x:size(0), -1))
end

-- 26 categorical fields in one table, 13 numeric fields.
local WideDeep = nn.Module:extend 'WideDeep'
models.WideDeep = WideDeep
function WideDeep:init(rows, d, hidden)
  self.deep, self.wide = nn.Embedding(rows, d, { sparse = true }), nn.Embedding(rows, 1, { sparse = true })
  self.mlp = nn.Sequential(nn.Linear(26 * d + 13, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
    nn.Linear(hidden, 1))
end
function WideDeep:forward(ids, dense)
  local e = self.deep(ids):reshape(ids:size(0), -1)
  return (self.mlp(mf.cat({ e, dense }, { dim = 1 })) + self.wide(ids):sum(1)):squeeze(1)
end

return models
