#!/usr/bin/env python3
"""Layers and losses of PyTorch as cases for spec/nn_values_spec.lua, and the parameters that its
optimisers leave after each of 20 steps for spec/optim_values_spec.lua.

    python3 spec/nn/generate.py       writes layers, more, optim and later .lua and .safetensors

A case of layers: how the module is made in Lua and in Python, its state before (NAME/state/KEY), inputs
(NAME/in/K; those of float dtype get a gradient), outputs of each of its calls (NAME/out/K), gradients of
(out * cos(0.5 k)).sum() by inputs and parameters (NAME/grad/...), and the buffers after (NAME/after/KEY).
Needs: pip install torch numpy safetensors.
"""
import os
import torch
import torch.nn as nn
from safetensors.torch import save_file

here = os.path.dirname(os.path.abspath(__file__))
torch.manual_seed(1)
torch.set_num_threads(1)
tensors, lines = {}, []


def put(name, t):
    tensors[name] = t.detach().clone().contiguous()


def weighed(out):
    k = torch.arange(out.numel(), dtype=torch.float32)
    return (out * torch.cos(0.5 * k).to(out.dtype).view(out.shape)).sum()


def randn(*size):
    return torch.randn(*size)


def labels(high, *size):
    return torch.randint(0, high, size)


def layer(name, lua, module, inputs, eval_mode=False, calls=1, kwargs=None, lua_options='', train_dropout=False,
          call=None, lua_call=None):
    kwargs = kwargs or {}
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1 or p.abs().sum() == 0:
                p.add_(torch.randn_like(p) * 0.3)
    module.eval() if eval_mode else module.train()
    for key, value in module.state_dict().items():
        put(f'{name}/state/{key}', value)
    named = []
    for k, x in enumerate(inputs):
        put(f'{name}/in/{k}', x)
        if x.is_floating_point() and x.requires_grad is False:
            x.requires_grad_()
    for key, value in kwargs.items():
        if torch.is_tensor(value):
            put(f'{name}/in/{key}', value)
            named.append(key)
    outs = []
    for _ in range(calls):
        out = call(module, *inputs) if call else module(*inputs, **kwargs)
        outs = [o for o in (out if isinstance(out, tuple) else (out,)) if o is not None]
    for k, o in enumerate(outs):
        put(f'{name}/out/{k}', o)
    loss = sum(weighed(o) for o in outs)
    loss.backward()
    grads = []
    for k, x in enumerate(inputs):
        if x.is_floating_point() and x.grad is not None:
            put(f'{name}/grad/in/{k}', x.grad)
            grads.append(k)
    for key, p in module.named_parameters():
        if p.grad is not None:
            put(f'{name}/grad/{key}', p.grad.to_dense())
    for key, b in module.named_buffers():
        put(f'{name}/after/{key}', b)
    text = (f"  {{ name = [==[{name}]==], lua = [==[{lua}]==], inputs = {len(inputs)}, outs = {len(outs)}, calls = {calls}, "
            f"eval = {'true' if eval_mode else 'false'}, options = [==[{lua_options}]==], "
            f"named = {{ {', '.join(repr(n) for n in named)} }},"
            + (f" call = [==[{lua_call}]==]," if lua_call else '') + f"\n    text = [==[{module}]==] }},")
    lines.append(text)


layer('linear', 'nn.Linear(3, 4)', nn.Linear(3, 4), [randn(2, 3)])
layer('linear-no-bias', 'nn.Linear(3, 4, {bias = false})', nn.Linear(3, 4, bias=False), [randn(2, 5, 3)])
layer('conv2d', 'nn.Conv2d(2, 4, 3)', nn.Conv2d(2, 4, 3), [randn(2, 2, 6, 5)])
layer('conv2d-positional', 'nn.Conv2d(4, 6, {3, 2}, {2, 1}, {1, 0}, 1, 2, false)',
      nn.Conv2d(4, 6, (3, 2), (2, 1), (1, 0), 1, 2, False), [randn(1, 4, 6, 5)])
layer('conv2d-same', "nn.Conv2d(2, 3, {4, 3}, {padding = 'same', dilation = {1, 2}})",
      nn.Conv2d(2, 3, (4, 3), padding='same', dilation=(1, 2)), [randn(2, 2, 6, 7)])
layer('conv2d-valid', "nn.Conv2d(2, 3, 2, {padding = 'valid', stride = 2})",
      nn.Conv2d(2, 3, 2, padding='valid', stride=2), [randn(2, 2, 6, 7)])
for mode in 'reflect', 'replicate', 'circular':
    layer('conv2d-' + mode, "nn.Conv2d(2, 2, 3, {padding = {1, 2}, padding_mode = '%s', stride = {1, 2}})" % mode,
          nn.Conv2d(2, 2, 3, padding=(1, 2), padding_mode=mode, stride=(1, 2)), [randn(1, 2, 5, 6)])
layer('conv2d-depthwise', 'nn.Conv2d(4, 8, 3, {groups = 4, padding = 1})', nn.Conv2d(4, 8, 3, groups=4, padding=1),
      [randn(2, 4, 5, 5)])
layer('max_pool2d', 'nn.MaxPool2d(3, {stride = 2, padding = 1})', nn.MaxPool2d(3, stride=2, padding=1), [randn(2, 2, 7, 6)])
layer('max_pool2d-more', 'nn.MaxPool2d(2, {dilation = 2, ceil_mode = true})', nn.MaxPool2d(2, dilation=2, ceil_mode=True),
      [randn(1, 2, 7, 6)])
layer('avg_pool2d', 'nn.AvgPool2d(2)', nn.AvgPool2d(2), [randn(2, 2, 5, 6)])
layer('avg_pool2d-more', 'nn.AvgPool2d({3, 2}, {stride = 2, padding = 1, ceil_mode = true, count_include_pad = false})',
      nn.AvgPool2d((3, 2), stride=2, padding=1, ceil_mode=True, count_include_pad=False), [randn(1, 2, 6, 5)])
layer('adaptive', 'nn.AdaptiveAvgPool2d({3, 2})', nn.AdaptiveAvgPool2d((3, 2)), [randn(2, 2, 7, 5)])
layer('adaptive-1', 'nn.AdaptiveAvgPool2d(1)', nn.AdaptiveAvgPool2d(1), [randn(2, 2, 7, 5)])
for n, size in (1, (5, 3)), (1, (4, 3, 2)), (2, (3, 3, 2, 2)), (3, (2, 3, 2, 2, 2)):
    cls = getattr(nn, f'BatchNorm{n}d')
    tag = f'batch_norm{n}d-{len(size)}'
    layer(tag, f'nn.BatchNorm{n}d(3)', cls(3), [randn(*size)], calls=3)
    layer(tag + '-eval', f'nn.BatchNorm{n}d(3)', cls(3), [randn(*size)], eval_mode=True)
b = nn.BatchNorm2d(3, eps=0.1, momentum=0.3)
b.running_mean.uniform_(-1, 1)
b.running_var.uniform_(0.5, 2)
layer('batch_norm-options', 'nn.BatchNorm2d(3, {eps = 0.1, momentum = 0.3})', b, [randn(2, 3, 2, 2)], calls=2)
layer('batch_norm-average', 'nn.BatchNorm2d(3, {momentum = false})', nn.BatchNorm2d(3, momentum=None), [randn(2, 3, 2, 2)],
      calls=4)
layer('batch_norm-plain', 'nn.BatchNorm2d(3, {affine = false, track_running_stats = false})',
      nn.BatchNorm2d(3, affine=False, track_running_stats=False), [randn(2, 3, 2, 2)], eval_mode=True)
layer('layer_norm', 'nn.LayerNorm({3, 4})', nn.LayerNorm([3, 4]), [randn(2, 3, 4)])
layer('layer_norm-number', 'nn.LayerNorm(4, {eps = 0.1, bias = false})', nn.LayerNorm(4, eps=0.1, bias=False), [randn(2, 4)])
layer('layer_norm-plain', 'nn.LayerNorm(4, {elementwise_affine = false})', nn.LayerNorm(4, elementwise_affine=False),
      [randn(2, 4)])
layer('group_norm', 'nn.GroupNorm(2, 6)', nn.GroupNorm(2, 6), [randn(2, 6, 3)])
layer('group_norm-options', 'nn.GroupNorm(3, 6, 0.01, false)', nn.GroupNorm(3, 6, 0.01, False), [randn(2, 6, 2, 2)])
layer('rms_norm', 'nn.RMSNorm(4)', nn.RMSNorm(4), [randn(3, 4)])
layer('rms_norm-eps', 'nn.RMSNorm({2, 4}, {eps = 0.1})', nn.RMSNorm([2, 4], eps=0.1), [randn(3, 2, 4)])
layer('dropout-eval', 'nn.Dropout(0.5)', nn.Dropout(0.5), [randn(3, 4)], eval_mode=True)
layer('embedding', 'nn.Embedding(5, 3)', nn.Embedding(5, 3), [labels(5, 2, 4)])
layer('embedding-padding', 'nn.Embedding(5, 3, {padding_idx = -2})', nn.Embedding(5, 3, padding_idx=-2), [labels(5, 3, 4)])
layer('embedding-sparse', 'nn.Embedding(5, 3, {sparse = true})', nn.Embedding(5, 3, sparse=True), [labels(5, 7)])
layer('flatten', 'nn.Flatten()', nn.Flatten(), [randn(2, 3, 4)])
layer('flatten-dims', 'nn.Flatten(0, 1)', nn.Flatten(0, 1), [randn(2, 3, 4)])
layer('identity', 'nn.Identity()', nn.Identity(), [randn(2)])
layer('sequential', "nn.Sequential(nn.Linear(3, 4), nn.GELU('tanh'), nn.Linear(4, 2))",
      nn.Sequential(nn.Linear(3, 4), nn.GELU('tanh'), nn.Linear(4, 2)), [randn(2, 3)])

for lua, module in [
        ('nn.ReLU()', nn.ReLU()), ('nn.ReLU6()', nn.ReLU6()), ('nn.Sigmoid()', nn.Sigmoid()), ('nn.Tanh()', nn.Tanh()),
        ('nn.SiLU()', nn.SiLU()), ('nn.Mish()', nn.Mish()), ('nn.Softsign()', nn.Softsign()),
        ('nn.Hardswish()', nn.Hardswish()), ('nn.Hardsigmoid()', nn.Hardsigmoid()), ('nn.LogSigmoid()', nn.LogSigmoid()),
        ('nn.SELU()', nn.SELU()), ('nn.Tanhshrink()', nn.Tanhshrink()), ('nn.ELU(0.7)', nn.ELU(0.7)),
        ('nn.CELU(0.7)', nn.CELU(0.7)), ('nn.GELU()', nn.GELU()), ("nn.GELU({approximate = 'tanh'})", nn.GELU('tanh')),
        ('nn.LeakyReLU(0.2)', nn.LeakyReLU(0.2)), ('nn.Softplus(2, 1)', nn.Softplus(2, 1)),
        ('nn.Softshrink(0.3)', nn.Softshrink(0.3)), ('nn.Hardshrink(0.3)', nn.Hardshrink(0.3)),
        ('nn.Hardtanh(-0.5, 0.7)', nn.Hardtanh(-0.5, 0.7)), ('nn.Threshold(0.1, 20)', nn.Threshold(0.1, 20)),
        ('nn.Softmax(1)', nn.Softmax(1)), ('nn.Softmax(0)', nn.Softmax(0)), ('nn.LogSoftmax(1)', nn.LogSoftmax(1)),
        ('nn.GLU(1)', nn.GLU(1)), ('nn.PReLU()', nn.PReLU()), ('nn.PReLU(4)', nn.PReLU(4)), ('nn.Softmin(1)', nn.Softmin(1))]:
    layer(lua.replace('nn.', 'activation '), lua, module, [randn(3, 4, 2) if '(4)' in lua else randn(3, 4)])

for n in 1, 2, 3:
    x = randn(2, 3, *(4,) * n)
    k = tuple(range(1, 2 * n + 1))
    amounts = '{' + ', '.join(str(i % 3) for i in k) + '}'
    some = tuple(i % 3 for i in k)
    for kind in 'ZeroPad', 'ReflectionPad', 'ReplicationPad', 'CircularPad':
        cls = getattr(nn, f'{kind}{n}d')
        layer(f'{kind}{n}d', f'nn.{kind}{n}d({amounts})', cls(some), [x.clone()])
        layer(f'{kind}{n}d-number', f'nn.{kind}{n}d(2)', cls(2), [x.clone()])
    cls = getattr(nn, f'ConstantPad{n}d')
    layer(f'ConstantPad{n}d', f'nn.ConstantPad{n}d({amounts}, 3.5)', cls(some, 3.5), [x.clone()])
layer('unflatten', 'nn.Unflatten(1, {2, 3})', nn.Unflatten(1, (2, 3)), [randn(2, 6)])
layer('softmax2d', 'nn.Softmax2d()', nn.Softmax2d(), [randn(2, 3, 2, 2)])
layer('pairwise', 'nn.PairwiseDistance(1, 0.1, true)', nn.PairwiseDistance(1, 0.1, True), [randn(2, 3), randn(2, 3)])

# Attention
E, H, L, S, N = 6, 2, 3, 4, 2
causal = torch.triu(torch.ones(L, L, dtype=torch.bool), 1)
padding = torch.tensor([[False, False, True], [False, False, False]])
for name, options, kwargs, lua in [
        ('mha', {}, {}, ''),
        ('mha-no-weights', {}, {'need_weights': False}, 'need_weights = false'),
        ('mha-each-head', {}, {'average_attn_weights': False}, 'average_attn_weights = false'),
        ('mha-no-bias', {'bias': False}, {}, ''),
        ('mha-mask', {}, {'attn_mask': causal}, ''),
        ('mha-mask-no-weights', {}, {'attn_mask': causal, 'need_weights': False}, 'need_weights = false'),
        ('mha-float-mask', {}, {'attn_mask': randn(L, L)}, ''),
        ('mha-mask-3d', {}, {'attn_mask': randn(N * H, L, L), 'need_weights': False}, 'need_weights = false'),
        ('mha-padding', {}, {'key_padding_mask': padding}, ''),
        ('mha-both', {}, {'key_padding_mask': padding, 'attn_mask': causal}, ''),
        ('mha-causal', {}, {'attn_mask': causal, 'is_causal': True, 'need_weights': False},
         'need_weights = false, is_causal = true')]:
    for first in False, True:
        m = nn.MultiheadAttention(E, H, batch_first=first, **options)
        make = 'nn.MultiheadAttention(6, 2, {batch_first = %s%s})' % (str(first).lower(), ', bias = false' if options else '')
        x = randn(N, L, E) if first else randn(L, N, E)
        layer(name + ('-first' if first else ''), make, m, [x, x.clone(), x.clone()], kwargs=dict(kwargs), lua_options=lua)
layer('mha-cross', 'nn.MultiheadAttention(6, 2, {kdim = 5, vdim = 3, batch_first = true})',
      nn.MultiheadAttention(E, H, kdim=5, vdim=3, batch_first=True), [randn(N, L, E), randn(N, S, 5), randn(N, S, 3)])
layer('mha-unbatched', 'nn.MultiheadAttention(6, 2)', nn.MultiheadAttention(E, H), [randn(L, E), randn(S, E), randn(S, E)])
for norm_first in False, True:
    layer(f'encoder-{norm_first}', "nn.TransformerEncoderLayer(6, 2, {dim_feedforward = 8, dropout = 0, activation = 'gelu', "
          "batch_first = true, norm_first = %s})" % str(norm_first).lower(),
          nn.TransformerEncoderLayer(6, 2, 8, 0.0, 'gelu', batch_first=True, norm_first=norm_first), [randn(N, L, E)],
          kwargs={'src_mask': causal, 'src_key_padding_mask': padding})

# Losses
def loss(name, lua, module, inputs):
    for reduction in 'mean', 'sum', 'none':
        module.reduction = reduction
        made = lua.replace('REDUCTION', f"reduction = '{reduction}'")
        layer(f'{name}-{reduction}', made, module, [i.detach().clone() for i in inputs])

w5 = torch.rand(5) + 0.5
put('w5', w5)
loss('cross_entropy', 'nn.CrossEntropyLoss {REDUCTION}', nn.CrossEntropyLoss(), [randn(4, 5), labels(5, 4)])
loss('cross_entropy-weight', 'nn.CrossEntropyLoss {weight = tensors.w5, ignore_index = 1, label_smoothing = 0.1, REDUCTION}',
     nn.CrossEntropyLoss(weight=w5, ignore_index=1, label_smoothing=0.1), [randn(4, 5, 3), labels(5, 4, 3)])
loss('cross_entropy-soft', 'nn.CrossEntropyLoss {weight = tensors.w5, label_smoothing = 0.2, REDUCTION}',
     nn.CrossEntropyLoss(weight=w5, label_smoothing=0.2), [randn(4, 5), torch.softmax(randn(4, 5), 1)])
loss('nll', 'nn.NLLLoss {weight = tensors.w5, ignore_index = 2, REDUCTION}', nn.NLLLoss(weight=w5, ignore_index=2),
     [torch.log_softmax(randn(4, 5), 1), labels(5, 4)])
loss('nll-2d', 'nn.NLLLoss {REDUCTION}', nn.NLLLoss(), [torch.log_softmax(randn(2, 5, 2, 3), 1), labels(5, 2, 2, 3)])
loss('mse', 'nn.MSELoss {REDUCTION}', nn.MSELoss(), [randn(3, 4), randn(3, 4)])
loss('l1', 'nn.L1Loss {REDUCTION}', nn.L1Loss(), [randn(3, 4), randn(3, 4)])
loss('smooth_l1', 'nn.SmoothL1Loss {beta = 0.5, REDUCTION}', nn.SmoothL1Loss(beta=0.5), [randn(3, 4), randn(3, 4)])
loss('huber', 'nn.HuberLoss {delta = 0.5, REDUCTION}', nn.HuberLoss(delta=0.5), [randn(3, 4), randn(3, 4)])
w4 = torch.rand(4) + 0.5
put('w4', w4)
loss('bce', 'nn.BCELoss {weight = tensors.w4, REDUCTION}', nn.BCELoss(weight=w4), [torch.rand(3, 4), torch.rand(3, 4)])
loss('bce_logits', 'nn.BCEWithLogitsLoss {weight = tensors.w4, pos_weight = tensors.w4, REDUCTION}',
     nn.BCEWithLogitsLoss(weight=w4, pos_weight=w4), [randn(3, 4), torch.rand(3, 4)])
loss('kl_div', 'nn.KLDivLoss {REDUCTION}', nn.KLDivLoss(), [torch.log_softmax(randn(3, 4), 1), torch.softmax(randn(3, 4), 1)])
loss('kl_div-log', 'nn.KLDivLoss {log_target = true, REDUCTION}', nn.KLDivLoss(log_target=True),
     [torch.log_softmax(randn(3, 4), 1), torch.log_softmax(randn(3, 4), 1)])
layer('kl_div-batchmean', "nn.KLDivLoss {reduction = 'batchmean'}", nn.KLDivLoss(reduction='batchmean'),
      [torch.log_softmax(randn(3, 4), 1), torch.softmax(randn(3, 4), 1)])
layer('cosine', 'nn.CosineSimilarity(1, 0.1)', nn.CosineSimilarity(1, 0.1), [randn(3, 4), randn(3, 4)])

save_file(tensors, os.path.join(here, 'layers.safetensors'))
with open(os.path.join(here, 'layers.lua'), 'w') as f:
    f.write('return {\n' + '\n'.join(lines) + '\n}\n')

# -- Composed functions of lua/ops_more.lua --------------------------------------------------------------
tensors, lines = {}, []
more = []


def case(lua, f, *inputs):
    name = f'{len(more)}'
    more.append(name)
    inputs = [i.clone() for i in inputs]
    for k, x in enumerate(inputs):
        put(f'{name}/in/{k}', x)
        if x.is_floating_point():
            x.requires_grad_()
    out = f(*inputs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    loss = None
    for k, o in enumerate(outs):
        put(f'{name}/out/{k}', o)
        if o.requires_grad:
            loss = weighed(o) if loss is None else loss + weighed(o)
    if loss is not None:
        loss.backward()
        for k, x in enumerate(inputs):
            if x.grad is not None:
                put(f'{name}/grad/{k}', x.grad)
    lines.append(f"  {{ '{name}', [==[{lua}]==], {len(inputs)}, {len(outs)} }},")


T = torch.tensor
inf, nan = float('inf'), float('nan')
m34, v4, m43 = randn(3, 4), randn(4), randn(4, 3)
odd = T([nan, inf, -inf, 2.0, -0.0])
case('mf.nan_to_num(a)', torch.nan_to_num, odd)
case('a:nan_to_num(1, {posinf = 5, neginf = -6})', lambda a: torch.nan_to_num(a, 1, 5, -6), odd)
for name in 'frac', 'deg2rad', 'rad2deg', 'sinc', 'fliplr', 'flipud', 'median', 'nansum', 'nanmean', 'diff':
    case(f'mf.{name}(a)', getattr(torch, name), m34)
case('mf.sinc(a)', torch.sinc, T([0.0, 1, 0.5]))
case('mf.nansum(a, 1)', lambda a: torch.nansum(a, 1), T([[1.0, nan], [nan, nan]]))
case('a:nanmean(0, {keepdim = true})', lambda a: torch.nanmean(a, 0, keepdim=True), T([[1.0, nan], [3, 5]]))
case('mf.logit(a)', torch.logit, torch.rand(4))
case('mf.logit(a, 0.3)', lambda a: torch.logit(a, 0.3), torch.rand(6))
case('mf.xlogy(a, b)', torch.xlogy, T([0.0, 1, 2]), T([0.5, 2, 3]))
case('mf.xlogy(a, b)', lambda a, b: torch.xlogy(a, b).detach(), T([0.0, 0]), T([0.0, inf]))
case('mf.hypot(a, b)', torch.hypot, m34, randn(4))
case('mf.hypot(a, b)', lambda a, b: torch.hypot(a, b).detach(), T([3e30, 0, inf]), T([4e30, 0, 1]))
case('mf.logaddexp(a, b)', torch.logaddexp, m34, randn(4))
case('mf.logaddexp(a, b)', lambda a, b: torch.logaddexp(a, b).detach(), T([1e3, -inf, inf, -inf]), T([1e3, -inf, 1, 2]))
case('mf.fmax(a, b)', lambda a, b: torch.fmax(a, b).detach(), T([1.0, nan, nan, 4]), T([2.0, 1, nan, nan]))
case('mf.fmin(a, b)', lambda a, b: torch.fmin(a, b).detach(), T([1.0, nan, nan, 4]), T([2.0, 1, nan, nan]))
case('mf.copysign(a, b)', torch.copysign, T([1.0, -2, 3, -4]), T([-0.0, 0.0, -5, 5]))
case('mf.std_mean(a, 1)', lambda a: torch.std_mean(a, 1), m34)
case('mf.var_mean(a, 0, {keepdim = true})', lambda a: torch.var_mean(a, 0, keepdim=True), m34)
case('mf.aminmax(a)', lambda a: torch.aminmax(a), m34)
case('mf.aminmax(a, {dim = 1, keepdim = true})', lambda a: torch.aminmax(a, dim=1, keepdim=True), m34)
case('mf.kthvalue(a, 2)', lambda a: torch.kthvalue(a, 2), m34)
case('a:kthvalue(3, 0, true)', lambda a: torch.kthvalue(a, 3, 0, True), m34)
case('a:kthvalue(1)', lambda a: torch.kthvalue(a, 1), T(2.5))
case('mf.median(a, 1)', lambda a: torch.median(a, 1), m34)
case('mf.median(a, {dim = 0, keepdim = true})', lambda a: torch.median(a, 0, keepdim=True), m34)
case('mf.median(a)', torch.median, T([3, 1, 2, 2]))
case('mf.median(a, 1)', lambda a: [o.detach() for o in torch.median(a, 1)], T([[1.0, nan, 2], [3, 1, 2]]))
case('mf.dist(a, b)', torch.dist, m34, randn(3, 4))
case('mf.dist(a, b, 1)', lambda a, b: torch.dist(a, b, 1), m34, randn(3, 4))
case('mf.trace(a)', torch.trace, m34)
for d in -2, 0, 1:
    case(f'mf.diag(a, {d})', lambda a: torch.diag(a, d), v4)
    case(f'mf.diag(a, {d})', lambda a: torch.diag(a, d), m34)
case('mf.inner(a, b)', torch.inner, m34, randn(2, 4))
case('mf.inner(a, b)', torch.inner, v4, randn(4))
case('mf.vdot(a, b)', torch.vdot, v4, randn(4))
case('mf.baddbmm(a, b, c, {beta = 0.5, alpha = 2})', lambda a, b, c: torch.baddbmm(a, b, c, beta=0.5, alpha=2),
     randn(2, 3, 5), randn(2, 3, 4), randn(2, 4, 5))
case('mf.addmv(a, b, c, {beta = 0.5, alpha = 2})', lambda a, b, c: torch.addmv(a, b, c, beta=0.5, alpha=2),
     randn(3), m34, v4)
case('mf.kron(a, b)', torch.kron, randn(2, 3), randn(2, 2))
case('mf.kron(a, b)', torch.kron, randn(2), randn(3, 2, 2))
case('mf.tensordot(a, b)', torch.tensordot, randn(2, 3, 4), randn(3, 4, 2))
case('mf.tensordot(a, b, {dims = 1})', lambda a, b: torch.tensordot(a, b, 1), randn(2, 3), randn(3, 4, 2))
case('mf.tensordot(a, b, {dims = {{0, -1}, {2, 1}}})', lambda a, b: torch.tensordot(a, b, ([0, -1], [2, 1])),
     randn(2, 3, 4), randn(5, 4, 2))
for name in 'hstack', 'vstack', 'column_stack':
    case(f'mf.{name}({{a, b}})', lambda *a: getattr(torch, name)(a), v4, randn(4))
    case(f'mf.{name}(a, b)', lambda *a: getattr(torch, name)(a), m34, randn(3, 4))
for k in range(-1, 4):
    case(f'mf.rot90(a, {k})', lambda a: torch.rot90(a, k), m34)
case('mf.rot90(a, 1, {1, 2})', lambda a: torch.rot90(a, 1, (1, 2)), randn(2, 3, 4))
case('mf.diff(a, 2, 0)', lambda a: torch.diff(a, 2, 0), m34)
case('mf.tril_indices(3, 4, 1)', lambda: torch.tril_indices(3, 4, 1))
case('mf.triu_indices(4, 3)', lambda: torch.triu_indices(4, 3))
case('mf.isin(a, b)', torch.isin, labels(5, 3, 4), labels(5, 2))
case('mf.cdist(a, b)', torch.cdist, randn(2, 3, 4), randn(2, 5, 4))
case('mf.cdist(a, b, 1)', lambda a, b: torch.cdist(a, b, 1), m34, randn(2, 4))
case('mf.pairwise_distance(a, b, {p = 1, keepdim = true})',
     lambda a, b: torch.nn.functional.pairwise_distance(a, b, 1, keepdim=True), m34, randn(3, 4))
case('mf.softmin(a, 0)', lambda a: torch.nn.functional.softmin(a, 0), m34)
steps = (torch.arange(60) * 37 % 23 - 5).view(3, 20)
for right in False, True:
    o = f'{{right = {str(right).lower()}}}'
    case(f'mf.searchsorted(a, b, {o})', lambda a, b: torch.searchsorted(a, b, right=right), steps.sort()[0],
         (torch.arange(15) * 5 % 31 - 6).view(3, 5))
    case(f'mf.bucketize(a, b, {o})', lambda a, b: torch.bucketize(a, b, right=right), steps / 2,
         torch.arange(-2.0, 7.0))
case('mf.isin(a, b)', torch.isin, steps, torch.arange(3, 90, 3) * 2 % 17)
case('mf.isin(a, b)', torch.isin, steps / 4, torch.cat((torch.full((9,), torch.nan), torch.arange(8) / 2)))

save_file(tensors, os.path.join(here, 'more.safetensors'))
with open(os.path.join(here, 'more.lua'), 'w') as f:
    f.write('return {\n' + '\n'.join(lines) + '\n}\n')

# -- Optimisers: 20 steps of two parameters, the gradient a fixed function of the step ------------------
tensors, lines = {}, []
STEPS = 20
start = [torch.randn(2, 3), torch.randn(4)]
grads = [[torch.randn(2, 3), torch.randn(4)] for _ in range(STEPS)]
for k, p in enumerate(start):
    put(f'start/{k}', p)
for i, step in enumerate(grads):
    for k, g in enumerate(step):
        put(f'grad/{i}/{k}', g)


def lua_of(v):
    if isinstance(v, bool):
        return str(v).lower()
    if isinstance(v, tuple):
        return '{ ' + ', '.join(lua_of(e) for e in v) + ' }'
    return repr(v)


def optimiser(cls, **options):
    params = [p.clone().requires_grad_() for p in start]
    o = cls(params, **options)
    name = cls.__name__ + ''.join(f' {k}={v}' for k, v in options.items())
    for step in grads:
        for p, g in zip(params, step):
            p.grad = g.clone()
        o.step()
    for k, p in enumerate(params):
        put(f'{name}/{k}', p)
    text = ', '.join(f'{k} = {lua_of(v)}' for k, v in options.items())
    lines.append(f"  {{ '{name}', '{cls.__name__}', {{ {text} }} }},")


O = torch.optim
optimiser(O.SGD)
for options in [{}, {'momentum': 0.9}, {'momentum': 0.9, 'dampening': 0.2}, {'momentum': 0.9, 'nesterov': True},
                {'weight_decay': 0.1}, {'maximize': True}, {'momentum': 0.5, 'weight_decay': 0.1, 'maximize': True},
                {'momentum': 0.9, 'nesterov': True, 'weight_decay': 0.1}]:
    optimiser(O.SGD, lr=0.1, **options)
for cls in O.Adam, O.AdamW:
    for options in [{}, {'lr': 0.1}, {'lr': 0.1, 'betas': (0.5, 0.8)}, {'lr': 0.1, 'eps': 0.1}, {'lr': 0.1, 'weight_decay': 0.2},
                    {'lr': 0.1, 'amsgrad': True}, {'lr': 0.1, 'maximize': True},
                    {'lr': 0.1, 'amsgrad': True, 'weight_decay': 0.1, 'maximize': True, 'betas': (0.7, 0.9)}]:
        optimiser(cls, **options)
for options in [{}, {'lr': 0.05}, {'lr': 0.05, 'alpha': 0.8}, {'lr': 0.05, 'eps': 0.1}, {'lr': 0.05, 'weight_decay': 0.1},
                {'lr': 0.05, 'momentum': 0.8}, {'lr': 0.05, 'centered': True}, {'lr': 0.05, 'maximize': True},
                {'lr': 0.05, 'momentum': 0.8, 'centered': True, 'weight_decay': 0.1, 'maximize': True}]:
    optimiser(O.RMSprop, **options)
for options in [{}, {'lr': 0.1}, {'lr': 0.1, 'lr_decay': 0.1}, {'lr': 0.1, 'weight_decay': 0.1},
                {'lr': 0.1, 'initial_accumulator_value': 0.5}, {'lr': 0.1, 'eps': 0.1}, {'lr': 0.1, 'maximize': True}]:
    optimiser(O.Adagrad, **options)
for options in [{}, {'lr': 0.5}, {'rho': 0.5}, {'eps': 0.01}, {'weight_decay': 0.1}, {'maximize': True}]:
    optimiser(O.Adadelta, **options)
for options in [{}, {'lr': 0.1}, {'lr': 0.1, 'betas': (0.5, 0.8)}, {'lr': 0.1, 'eps': 0.1}, {'lr': 0.1, 'weight_decay': 0.1},
                {'lr': 0.1, 'maximize': True}]:
    optimiser(O.Adamax, **options)

save_file(tensors, os.path.join(here, 'optim.safetensors'))
with open(os.path.join(here, 'optim.lua'), 'w') as f:
    f.write('return {\n' + '\n'.join(lines) + '\n}\n')

# -- Layers that came later, with a random stream of their own ------------------------------------------
tensors, lines = {}, []
torch.manual_seed(2)


def flat(out):
    return tuple(t for o in out for t in (flat(o) if isinstance(o, tuple) else (o,))) if isinstance(out, tuple) else (out,)


layer('conv1d', 'nn.Conv1d(2, 4, 3)', nn.Conv1d(2, 4, 3), [randn(2, 2, 7)])
layer('conv1d-more', "nn.Conv1d(4, 6, 3, {stride = 2, padding = {2}, dilation = 2, groups = 2, bias = false})",
      nn.Conv1d(4, 6, 3, 2, 2, 2, 2, False), [randn(3, 4, 9)])
layer('conv1d-same', "nn.Conv1d(2, 3, 4, {padding = 'same', padding_mode = 'reflect'})",
      nn.Conv1d(2, 3, 4, padding='same', padding_mode='reflect'), [randn(2, 2, 7)])
layer('conv1d-unbatched', 'nn.Conv1d(2, 3, 2)', nn.Conv1d(2, 3, 2), [randn(2, 5)])
layer('conv2d-unbatched', 'nn.Conv2d(2, 3, 2)', nn.Conv2d(2, 3, 2), [randn(2, 5, 4)])
layer('conv_transpose2d', 'nn.ConvTranspose2d(3, 4, 3)', nn.ConvTranspose2d(3, 4, 3), [randn(2, 3, 4, 5)])
layer('conv_transpose2d-more',
      'nn.ConvTranspose2d(4, 6, {3, 2}, {stride = {2, 3}, padding = {1, 0}, output_padding = {1, 2}, groups = 2, bias = false})',
      nn.ConvTranspose2d(4, 6, (3, 2), (2, 3), (1, 0), (1, 2), 2, False), [randn(2, 4, 3, 4)])
layer('conv_transpose2d-dilation', 'nn.ConvTranspose2d(2, 3, 3, 2, 1, 1, 1, true, 2)',
      nn.ConvTranspose2d(2, 3, 3, 2, 1, 1, 1, True, 2), [randn(2, 3, 4)])
layer('conv_transpose2d-size', 'nn.ConvTranspose2d(2, 3, 3, {stride = 2, padding = 1})',
      nn.ConvTranspose2d(2, 3, 3, stride=2, padding=1), [randn(2, 2, 3, 4)],
      call=lambda m, x: m(x, output_size=[6, 7]), lua_call='m(a, {6, 7})')
layer('conv_transpose1d', 'nn.ConvTranspose1d(4, 6, 3, {stride = 2, padding = 1, output_padding = 1, groups = 2})',
      nn.ConvTranspose1d(4, 6, 3, 2, 1, 1, 2), [randn(2, 4, 5)])
for name in 'RNN', 'GRU', 'LSTM':
    cls = getattr(nn, name)
    lstm = name == 'LSTM'
    state = lambda *size: [randn(*size) for _ in range(2 if lstm else 1)]
    with_state = lambda m, x, *h: flat(m(x, h if lstm else h[0]))
    lua_state = 'm(a, {b, c})' if lstm else 'm(a, b)'
    without = dict(call=lambda m, x: flat(m(x)), lua_call='m(a)')
    given = dict(call=with_state, lua_call=lua_state)
    layer(name, f'nn.{name}(3, 4)', cls(3, 4), [randn(5, 2, 3)], **without)
    layer(name + '-state', f'nn.{name}(3, 4)', cls(3, 4), [randn(5, 2, 3)] + state(1, 2, 4), **given)
    layer(name + '-more', f'nn.{name}(3, 4, {{num_layers = 2, bidirectional = true, batch_first = true, bias = false}})',
          cls(3, 4, 2, bidirectional=True, batch_first=True, bias=False), [randn(2, 5, 3)] + state(4, 2, 4), **given)
    layer(name + '-unbatched', f'nn.{name}(3, 4, 2)', cls(3, 4, 2), [randn(5, 3)] + state(2, 4), **given)
    layer(name + '-eval', f'nn.{name}(3, 4, {{num_layers = 2, dropout = 0.5}})', cls(3, 4, 2, dropout=0.5),
          [randn(5, 2, 3)], eval_mode=True, **without)
    cell = getattr(nn, name + 'Cell')
    layer(name + 'Cell', f'nn.{name}Cell(3, 4)', cell(3, 4), [randn(2, 3)], **without)
    layer(name + 'Cell-state', f'nn.{name}Cell(3, 4, false)', cell(3, 4, False), [randn(2, 3)] + state(2, 4), **given)
    layer(name + 'Cell-unbatched', f'nn.{name}Cell(3, 4)', cell(3, 4), [randn(3)] + state(4), **given)
layer('RNN-relu', "nn.RNN(3, 4, {nonlinearity = 'relu'})", nn.RNN(3, 4, nonlinearity='relu'), [randn(5, 2, 3)],
      call=lambda m, x: flat(m(x)), lua_call='m(a)')
layer('RNNCell-relu', "nn.RNNCell(3, 4, {nonlinearity = 'relu'})", nn.RNNCell(3, 4, nonlinearity='relu'), [randn(2, 3)])
layer('LSTM-projected', 'nn.LSTM(3, 5, {num_layers = 2, bidirectional = true, proj_size = 2})',
      nn.LSTM(3, 5, 2, bidirectional=True, proj_size=2), [randn(4, 2, 3), randn(4, 2, 2), randn(4, 2, 5)],
      call=lambda m, x, h, c: flat(m(x, (h, c))), lua_call='m(a, {b, c})')

save_file(tensors, os.path.join(here, 'later.safetensors'))
with open(os.path.join(here, 'later.lua'), 'w') as f:
    f.write('return {\n' + '\n'.join(lines) + '\n}\n')
