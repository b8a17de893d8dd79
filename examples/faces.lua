-- Face recognition with more classes than one rank would want to hold.
--
--   moonflow examples/faces.lua [--classes N] [--steps N] [--batch N] [--dim N] [--margin X] [--scale X] [--lr X]
--                               [--seed N] [--save FOLDER] [--resume FOLDER]
--   moonflow -n 4 examples/faces.lua ...    the same on 4 ranks, with the same losses
--
-- The network that makes features of images is whole on each rank, and each takes its part of the images. The last
-- layer has a row for each person and is split by rows: of p ranks each holds 1/p of it, of its gradient and of the
-- optimiser's state, and computes 1/p of the logits. Features go to all ranks; logits stay where they are, since
-- cross entropy over split classes exchanges one maximum, one sum and one logit for each image. The loss is CosFace's
-- (Wang et al. 2018, arXiv:1801.09414): logits are scaled cosines, and the true one is made smaller by a margin.
-- Images are synthetic: each person is a picture of random numbers, of which an image shows a copy in noise.
local mf = require 'moonflow'
local nn, optim = mf.nn, mf.optim

local o = mf.cli(arg, 'Trains a classifier of many classes, split over the ranks.', {
  { 'classes', 1000, 'people' },
  { 'steps', 500, 'training steps' },
  { 'batch', 64, 'images a step' },
  { 'dim', 128, 'features of an image' },
  { 'margin', 0.2, 'by which the true cosine is made smaller' },
  { 'scale', 16, 'of the logits' },
  { 'lr', 0.002, 'for AdamW' },
  { 'seed', 1, 'of weights and images' },
  { 'save', '', 'folder for a checkpoint at the end' },
  { 'resume', '', 'folder to go on from' },
})
io.stdout:setvbuf 'line'
mf.manual_seed(o.seed)
local all = mf.placement 'cpu'
local first_rank = mf.rank() == 0

-- -- Images ---------------------------------------------------------------------------------------

local SIZE = 16

-- Images (N, 1, 16, 16) and labels (N), the same on all ranks.
local function batch()
  local labels, images = mf.randint(0, o.classes, { o.batch }), mf.randn(o.batch, 1, SIZE, SIZE) * 0.5
  for i = 0, o.batch - 1 do
    local person = mf.Generator():manual_seed(labels[i]:item())
    images[i]:add_(mf.randn({ 1, SIZE, SIZE }, { generator = person }))
  end
  return mf.distribute(images, all, 'S0'), mf.distribute(labels, all, 'S0')
end

-- -- The model ------------------------------------------------------------------------------------

local Faces = nn.Module:extend 'Faces'

function Faces:init(classes, dim)
  self.body = nn.Sequential(nn.Conv2d(1, 16, 3, { padding = 1 }), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, { padding = 1 }), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    nn.Linear(32 * 4 * 4, dim))
  self.people = nn.Parameter(mf.randn(classes, dim))
end

-- Cosines (N, classes) between images and people, split by people.
function Faces:forward(x)
  local features = mf.normalize(self.body(x)):to_global { sbp = 'B' }
  return features:matmul(mf.normalize(self.people):t())
end

local model = Faces(o.classes, o.dim):to_global(all, function(name) return name == 'people' and 'S0' or 'B' end)
local opt = optim.AdamW(model:parameters(), { lr = o.lr })
local class = mf.arange(o.classes, { placement = all, sbp = 'S0' })

-- The loss, and the share of images whose person has the largest cosine.
local function step(x, y)
  opt:zero_grad()
  local label = y:to_global { sbp = 'B' }
  local cosine, is_true = model(x), class:eq(label:unsqueeze(1))
  local loss = mf.cross_entropy((cosine - is_true:float() * o.margin) * o.scale, label)
  loss:backward()
  opt:step()
  cosine = cosine:detach()
  local best, own = cosine:amax(1), mf.where(is_true, cosine, 0):sum(1)
  return loss:item(), own:ge(best):float():mean():item()
end

-- -- Training -------------------------------------------------------------------------------------

local first = 1
if o.resume ~= '' then
  local state = mf.load(o.resume, { placement = all })
  model:load_state_dict(state.model)
  opt:load_state_dict(state.optim)
  first = state.step + 1
end
if first_rank then
  print(('%d people, %d features; this rank holds %d rows of them'):format(o.classes, o.dim,
    model.people:to_local():size(0)))
end
local begin, n, losses, right = mf.time(), 0, 0, 0
for i = first, o.steps do
  mf.manual_seed(o.seed + i)
  local loss, accuracy = step(batch())
  n, losses, right = n + 1, losses + loss, right + accuracy
  if n == 10 or i == o.steps then
    if first_rank then
      print(('step %d  loss %.4f  accuracy %.3f  %.1f images/s'):format(i, losses / n, right / n,
        n * o.batch / (mf.time() - begin)))
    end
    begin, n, losses, right = mf.time(), 0, 0, 0
  end
end
if o.save ~= '' then
  local state = { step = math.max(o.steps, first - 1), model = model:state_dict(), optim = opt:state_dict() }
  mf.save(state, o.save, { sharded = true })
  if first_rank then print('saved to ' .. o.save) end
end
