#!/usr/bin/env python3
"""Views, joins, padding, indexing and assignment as PyTorch computes them: places.py > places.lua

A case is an expression over inputs in Lua and in Python; inputs of shape s hold ((i * 7919) % 1009) / 8 - 50 in double
precision. Stored are dtype, shape and elements of the result, and the gradient of sum(result * weight) for
each float input, where weight is ((i * 31) % 17) - 8. Needs: pip install torch.
"""
import random
import torch
import torch.nn.functional as F
from torch import tensor

rng = random.Random(5)
cases = []


def made(shape):
    n = 1
    for s in shape: n *= s
    return ((torch.arange(n) * 7919) % 1009).double().div(8).sub(50).reshape(shape)


def weight(n, shape): return ((torch.arange(n) * 31) % 17 - 8).double().reshape(shape)


def lua(v):
    if isinstance(v, bool): return 'true' if v else 'false'
    if isinstance(v, torch.Tensor): return lua(v.tolist())
    if isinstance(v, (list, tuple)): return '{' + ', '.join(map(lua, v)) + '}'
    if isinstance(v, float) and v == int(v): return str(int(v))
    return repr(v)


def case(lua_text, python, inputs, more=(), extra={}):
    """inputs: name -> shape; extra: names of other tensors; more: Lua text that makes them."""
    xs = {k: made(s).requires_grad_() for k, s in inputs.items()}
    y = python(**xs, **extra) if callable(python) else eval(python, globals(), dict(xs, **extra))
    ys = [y] if isinstance(y, torch.Tensor) else list(y)
    loss = sum((t * weight(t.numel(), t.shape)).sum() for t in ys if t.is_floating_point())
    grads = [None] * len(xs)
    if isinstance(loss, torch.Tensor) and loss.requires_grad:
        grads = torch.autograd.grad(loss, list(xs.values()), allow_unused=True)
    outs = ', '.join("{'%s', %s, %s}" % (str(t.dtype)[6:], lua(list(t.shape)), lua(t.detach().reshape(-1).tolist())) for t in ys)
    gs = ', '.join('%s = %s' % (k, lua((torch.zeros_like(x) if g is None else g).reshape(-1).tolist())) for (k, x), g in zip(xs.items(), grads))
    shapes = ', '.join('{"%s", %s}' % (k, lua(list(s))) for k, s in inputs.items())
    cases.append('  { [==[%s]==], {%s}, {%s}, {%s}, %s },' % (lua_text, shapes, outs, gs, '[==[' + ' '.join(more) + ']==]' if more else 'nil'))


def op(lua_text, python, **inputs): case(lua_text, python, inputs)


# -- Views
for l, p, s in (
        ('x:view(-1)', 'x.view(-1)', (2, 3)), ('x:view(3, -1)', 'x.view(3, -1)', (2, 6)), ('x:reshape(6)', 'x.reshape(6)', (2, 3)),
        ('x:t():reshape(6)', 'x.t().reshape(6)', (2, 3)), ('x:view(2, 1, 3, 1)', 'x.view(2, 1, 3, 1)', (2, 3)), ('x:view({})', 'x.view(())', (1, 1)),
        ('x:reshape(0, 4)', 'x.reshape(0, 4)', (3, 0)), ('x:permute(1, 0, 2):view(3, 2, 2, 2)', 'x.permute(1, 0, 2).view(3, 2, 2, 2)', (2, 3, 4)),
        ('x:flatten()', 'x.flatten()', (2, 3, 4)), ('x:flatten(1, 2)', 'x.flatten(1, 2)', (2, 3, 4, 2)), ('x:flatten()', 'x.flatten()', ()),
        ('x:permute(2, 0, 1):flatten(0, 1)', 'x.permute(2, 0, 1).flatten(0, 1)', (2, 3, 4)), ('x:unflatten(1, {2, -1})', 'x.unflatten(1, (2, -1))', (3, 8)),
        ('x:permute(-1, 0, 1)', 'x.permute(-1, 0, 1)', (2, 3, 4)), ('x:transpose(1, -1)', 'x.transpose(1, -1)', (2, 3, 4)), ('x:t()', 'x.t()', (3,)),
        ('x:transpose(0, 0)', 'x.transpose(0, 0)', ()), ('x:movedim(1, -1)', 'x.movedim(1, -1)', (2, 3, 4)), ('x:movedim({0, 2}, {2, 1})', 'x.movedim((0, 2), (2, 1))', (2, 3, 4)),
        ('x:swapaxes(0, 2)', 'x.swapaxes(0, 2)', (2, 3, 4)), ('x:squeeze()', 'x.squeeze()', (1, 3, 1, 2)), ('x:squeeze(0)', 'x.squeeze(0)', (1, 3, 1)),
        ('x:squeeze(1)', 'x.squeeze(1)', (1, 3, 1)), ('x:squeeze({0, -1})', 'x.squeeze((0, -1))', (1, 3, 1, 1)), ('x:squeeze()', 'x.squeeze()', ()),
        ('x:unsqueeze(0)', 'x.unsqueeze(0)', (2, 3)), ('x:unsqueeze(-1)', 'x.unsqueeze(-1)', (2, 3)), ('x:unsqueeze(-2)', 'x.unsqueeze(-2)', (2, 3)), ('x:unsqueeze(0)', 'x.unsqueeze(0)', ()),
        ('x:expand(4, 3)', 'x.expand(4, 3)', (1, 3)), ('x:expand(2, -1, 3)', 'x.expand(2, -1, 3)', (4, 1)), ('x:expand(0, 3)', 'x.expand(0, 3)', (1, 3)), ('x:expand(2, 2)', 'x.expand(2, 2)', ()),
        ('x:broadcast_to(2, 3, 4)', 'x.broadcast_to(2, 3, 4)', (3, 1)), ('x:narrow(-1, 1, 2)', 'x.narrow(-1, 1, 2)', (2, 4)), ('x:narrow(0, -2, 2)', 'x.narrow(0, -2, 2)', (4, 2)),
        ('x:narrow(1, 4, 0)', 'x.narrow(1, 4, 0)', (2, 4)), ('x:select(0, 1)', 'x.select(0, 1)', (2, 4)), ('x:select(-1, -2)', 'x.select(-1, -2)', (2, 4)),
        ('x:slice(0, 1)', 'x[1:]', (4, 2)), ('x:slice(1, 0, 5, 2)', 'x[:, 0:5:2]', (2, 6)), ('x:slice(1, -3, -1)', 'x[:, -3:-1]', (2, 6)), ('x:slice(0, 3, 1)', 'x[3:1]', (4, 2)),
        ('x:slice(1, 1, 100, 3)', 'x[:, 1:100:3]', (2, 6)), ('x:slice(0, -100, 2)', 'x[-100:2]', (4, 2)), ('x:diagonal()', 'x.diagonal()', (3, 4)),
        ('x:diagonal(1)', 'x.diagonal(1)', (3, 4)), ('x:diagonal(-2)', 'x.diagonal(-2)', (4, 3)), ('x:diagonal(9)', 'x.diagonal(9)', (3, 4)),
        ('x:diagonal(0, 1, 2)', 'x.diagonal(0, 1, 2)', (2, 3, 4)), ('x:diagonal(-1, 2, 0)', 'x.diagonal(-1, 2, 0)', (3, 2, 4)),
        ('x:as_strided({2, 2}, {3, 1})', 'x.as_strided((2, 2), (3, 1))', (3, 3)), ('x:as_strided({3, 2}, {1, 1}, 1)', 'x.as_strided((3, 2), (1, 1), 1)', (6,)),
        ('x:t():as_strided({4, 2}, {1, 2})', 'x.t().as_strided((4, 2), (1, 2))', (2, 4)), ('x:as_strided({2, 3}, {0, 1})', 'x.as_strided((2, 3), (0, 1))', (4,)),
        ('unpack(x:split(2))', 'x.split(2)', (5, 2)), ('unpack(x:split({1, 0, 3}, 1))', 'x.split((1, 0, 3), 1)', (2, 4)), ('unpack(x:split(3, {dim = -1}))', 'x.split(3, -1)', (2, 3)),
        ('x:split(2)[2]', 'x.split(2)[1]', (5, 2)), ('x:chunk(4, {dim = 0})[3]', 'x.chunk(4, 0)[2]', (5, 2)), ('unpack(x:chunk(3))', 'x.chunk(3)', (7,)), ('unpack(x:chunk(2))', 'x.chunk(2)', (1, 2)),
        ('unpack(x:unbind(1))', 'x.unbind(1)', (2, 3)), ('x:unbind(-1)[1]', 'x.unbind(-1)[0]', (2, 3)), ('x:view_as(x:t())', 'x.view_as(x.t())', (2, 6)),
        ('x:expand_as(mf.zeros(2, 3))', 'x.expand_as(torch.zeros(2, 3))', (3,)), ('x:contiguous()', 'x.contiguous()', (2, 3)), ('x:t():contiguous()', 'x.t().contiguous()', (2, 3)),
        ('unpack(mf.broadcast_tensors(x, x:t()))', 'torch.broadcast_tensors(x, x.t())', (1, 3))):
    op(l, p, x=s)

# -- Repetition, order, padding
for l, p, s in (
        ('x:tile(2)', 'x.tile(2)', (2, 3)), ('x:tile(2, 1, 3)', 'x.tile(2, 1, 3)', (2, 2)), ('x:tile(0, 2)', 'x.tile(0, 2)', (2, 2)), ('x:tile(3)', 'x.tile(3)', ()), ('x:tile(1, 1)', 'x.tile(1, 1)', (2, 2)),
        ('x:repeat_interleave(2)', 'x.repeat_interleave(2)', (2, 2)), ('x:repeat_interleave(3, {dim = -1})', 'x.repeat_interleave(3, dim=-1)', (2, 2)),
        ('x:repeat_interleave(mf.tensor({1, 0, 2}, {dtype = mf.int64}), {dim = 1})', 'x.repeat_interleave(tensor([1, 0, 2]), dim=1)', (2, 3)), ('x:repeat_interleave(0, {dim = 0})', 'x.repeat_interleave(0, dim=0)', (2, 2)),
        ('x:flip(0)', 'x.flip(0)', (3, 2)), ('x:flip({0, 2})', 'x.flip((0, 2))', (2, 3, 4)), ('x:t():flip({-1})', 'x.t().flip((-1,))', (2, 3)), ('x:flip(0)', 'x.flip(0)', (0, 3)),
        ('x:roll(1, 0)', 'x.roll(1, 0)', (3, 2)), ('x:roll(-2)', 'x.roll(-2)', (2, 3)), ('x:roll({1, -1}, {0, 1})', 'x.roll((1, -1), (0, 1))', (3, 4)), ('x:t():roll(2)', 'x.t().roll(2)', (2, 3)),
        ('x:roll(7, {dims = 1})', 'x.roll(7, 1)', (2, 3)), ('x:roll({1, 2}, {0, 0})', 'x.roll((1, 2), (0, 0))', (4, 2)), ('x:roll(1, 0)', 'x.roll(1, 0)', (0, 2)),
        ('x:tril()', 'x.tril()', (3, 4)), ('x:tril(-1)', 'x.tril(-1)', (2, 3, 3)), ('x:triu(1)', 'x.triu(1)', (4, 3)), ('x:t():triu()', 'x.t().triu()', (4, 3)), ('x:triu(-9)', 'x.triu(-9)', (2, 2)), ('x:tril(0)', 'x.tril(0)', (0, 3)),
        ('mf.pad(x, {1, 2})', 'F.pad(x, (1, 2))', (2, 3)), ('mf.pad(x, {0, 0, 2, 1}, {value = 5})', 'F.pad(x, (0, 0, 2, 1), value=5)', (2, 3)), ('mf.pad(x, {-1, 2})', 'F.pad(x, (-1, 2))', (2, 3)),
        ('mf.pad(x, {-1, -1, 1, 0})', 'F.pad(x, (-1, -1, 1, 0))', (2, 3)), ('mf.pad(x, {1, 1, 1, 1, 1, 1})', 'F.pad(x, (1,) * 6)', (1, 2, 2)), ('mf.pad(x:t(), {1, 0})', 'F.pad(x.t(), (1, 0))', (2, 3)),
        ("mf.pad(x, {2, 1}, {mode = 'reflect'})", "F.pad(x, (2, 1), mode='reflect')", (2, 3)), ("mf.pad(x, {1, 2, 2, 1}, {mode = 'reflect'})", "F.pad(x, (1, 2, 2, 1), mode='reflect')", (1, 2, 3, 4)),
        ("mf.pad(x, {3, 1}, {mode = 'replicate'})", "F.pad(x, (3, 1), mode='replicate')", (2, 3)), ("mf.pad(x, {1, 2, 0, 1}, {mode = 'replicate'})", "F.pad(x, (1, 2, 0, 1), mode='replicate')", (2, 3, 2)),
        ("mf.pad(x, {2, 1}, {mode = 'circular'})", "F.pad(x, (2, 1), mode='circular')", (2, 3)), ("mf.pad(x, {1, 1, 2, 1}, {mode = 'circular'})", "F.pad(x, (1, 1, 2, 1), mode='circular')", (1, 2, 3, 4)),
        ("mf.pad(x:permute(0, 2, 1), {1, 1}, {mode = 'reflect'})", "F.pad(x.permute(0, 2, 1), (1, 1), mode='reflect')", (2, 3, 4)), ('mf.pad(x, {2, 0})', 'F.pad(x, (2, 0))', (2, 0))):
    op(l, p, x=s)

# -- Joins
for l, p, a, b in (
        ('mf.cat({a, b})', 'torch.cat([a, b])', (2, 3), (1, 3)), ('mf.cat({a, b}, -1)', 'torch.cat([a, b], -1)', (2, 3), (2, 1)), ('mf.cat({a, b, a}, {dim = 1})', 'torch.cat([a, b, a], 1)', (2, 3), (2, 0)),
        ('mf.cat({a, b:t()})', 'torch.cat([a, b.t()])', (2, 3), (3, 4)), ('mf.cat({a, mf.zeros(0):double(), b})', 'torch.cat([a, torch.zeros(0).double(), b])', (2, 3), (1, 3)),
        ('mf.cat({a, b:float()})', 'torch.cat([a, b.float()])', (2, 3), (1, 3)), ('mf.cat({a, b}, 2)', 'torch.cat([a, b], 2)', (2, 3, 2), (2, 3, 3)), ('mf.stack({a, b})', 'torch.stack([a, b])', (2, 3), (2, 3)),
        ('mf.stack({a, b}, -1)', 'torch.stack([a, b], -1)', (2, 3), (2, 3)), ('mf.stack({a, b:t()}, 1)', 'torch.stack([a, b.t()], 1)', (2, 3), (3, 2)), ('mf.stack({a, b})', 'torch.stack([a, b])', (), ()),
        ('unpack(mf.meshgrid(a, b))', "torch.meshgrid(a, b, indexing='ij')", (3,), (2,)), ("unpack(mf.meshgrid({a, b}, {indexing = 'xy'}))", "torch.meshgrid(a, b, indexing='xy')", (3,), (2,))):
    op(l, p, a=a, b=b)

# -- einsum
for eq, shapes in (('ij,jk->ik', ((2, 3), (3, 4))), ('ij,jk', ((2, 3), (3, 4))), ('ij->ji', ((2, 3),)), ('ij', ((2, 3),)), ('ba', ((2, 3),)), ('ij->', ((2, 3),)), ('ij->j', ((2, 3),)), ('ii->i', ((3, 3),)), ('ii', ((3, 3),)),
                   ('iji->j', ((2, 3, 2),)), ('i,j->ij', ((2,), (3,))), ('i,i->', ((3,), (3,))), ('i,i->i', ((3,), (3,))), ('bij,bjk->bik', ((2, 3, 4), (2, 4, 5))), ('...ij,...jk->...ik', ((2, 2, 3), (2, 3, 2))),
                   ('...ij,...jk', ((2, 3), (2, 3, 2))), ('i...,i->...', ((2, 3, 2), (2,))), ('bhqd,bhkd->bhqk', ((2, 2, 3, 4), (2, 2, 2, 4))), ('ij,ij,ij->ij', ((2, 3),) * 3), ('ij,jk,kl->il', ((2, 3), (3, 2), (2, 4))),
                   ('ij,jk,ki->', ((2, 3), (3, 2), (2, 2))), ('ab,cd->abcd', ((2, 2), (2, 3))), ('ab,bc->ac', ((2, 1), (3, 2))), ('bn,anm,bm->ba', ((2, 3), (2, 3, 2), (2, 2))), ('ij,k->ik', ((2, 3), (2,))),
                   ('...->...', ((2, 3),)), ('a...b->b...', ((2, 3, 4),)), ('ij,jk->ki', ((0, 3), (3, 2))), ('ij,jk->ik', ((2, 0), (0, 2))), ('ijk,ilm,njm,nlk,abc->', ((2, 3, 2), (2, 2, 2), (2, 3, 2), (2, 2, 2), (1, 2, 1)))):
    names = 'abcde'[:len(shapes)]
    case("mf.einsum('%s', %s)" % (eq, ', '.join(names)), (lambda eq: lambda **k: torch.einsum(eq, *k.values()))(eq), dict(zip(names, shapes)))

# -- Indexing by functions
K = lambda v: 'mf.tensor(%s, {dtype = mf.int64})' % lua(v)
for l, p, k in (
        ('x:index_select(0, k)', 'x.index_select(0, k)', [2, 0, 2]), ('x:index_select(-1, k)', 'x.index_select(-1, k)', [3]), ('x:index_select(1, k)', 'x.index_select(1, k)', []),
        ('x:t():index_select(0, k)', 'x.t().index_select(0, k)', [3, 3, 1]), ('x:index_select(0, k:int())', 'x.index_select(0, k.int())', [1, 1]),
        ('x:gather(0, k)', 'x.gather(0, k)', [[0, 2, 1, 1], [2, 2, 0, 0]]), ('x:gather(1, k)', 'x.gather(1, k)', [[3, 3], [0, 1]]), ('x:t():gather(1, k)', 'x.t().gather(1, k)', [[2, 0, 2, 1], [1, 1, 1, 1]]),
        ('x:take(k)', 'x.take(k)', [[0, 11], [5, 5]]), ('x:take_along_dim(k, {dim = 1})', 'x.take_along_dim(k, 1)', [[0], [3], [1]]), ('x:take_along_dim(k)', 'x.take_along_dim(k)', [[0], [3], [1]]),
        ('x:take_along_dim(k, 0)', 'x.take_along_dim(k, 0)', [[2, 1, 0, 2]]), ('x:index_fill(1, k, 7)', 'x.index_fill(1, k, 7.)', [0, 2]), ('x:index_fill(0, k, -1.5)', 'x.index_fill(0, k, -1.5)', []),
        ('x:scatter(1, k, 9)', 'x.scatter(1, k, 9.)', [[0, 2], [1, 1]]), ('x:scatter(0, k, -1)', 'x.scatter(0, k, -1.)', [[0, 2, 1, 1]]), ('mf.embedding(k, x)', 'F.embedding(k, x)', [[0, 2], [1, 1]]),
        ('mf.embedding(k, x, {padding_idx = -1})', 'F.embedding(k, x, padding_idx=-1)', [0, 2, 2, 1]), ('mf.embedding(k, x:t())', 'F.embedding(k, x.t())', [3]), ('mf.one_hot(k)', 'F.one_hot(k)', [0, 2, 1]),
        ('mf.one_hot(k, 4)', 'F.one_hot(k, 4)', [[0], [3]]), ('mf.nonzero(k)', 'k.nonzero()', [[0, 2], [1, 0]]), ('unpack(mf.nonzero(k, {as_tuple = true}))', 'k.nonzero(as_tuple=True)', [[0, 2], [1, 0]]), ('k:nonzero()', 'k.nonzero()', 5), ('k:nonzero()', 'k.nonzero()', 0)):
    case(l, p, {'x': (3, 4)}, ['local k = ' + K(k)], {'k': tensor(k, dtype=torch.int64)})
for l, p, k, s in (
        ('x:scatter(1, k, s)', 'x.scatter(1, k, s)', [[0, 3], [1, 2]], (2, 2)), ('x:scatter(0, k, s)', 'x.scatter(0, k, s)', [[0, 2, 1]], (1, 3)),
        ('x:scatter_add(0, k, s)', 'x.scatter_add(0, k, s)', [[0, 0, 1, 2], [0, 2, 2, 2], [1, 1, 0, 0]], (3, 4)), ('x:scatter_add(1, k, s)', 'x.scatter_add(1, k, s)', [[1, 1, 1, 1, 1]], (1, 5)),
        ('x:t():scatter_add(0, k, s)', 'x.t().scatter_add(0, k, s)', [[0, 0, 1], [3, 2, 2]], (2, 3)), ('x:index_add(1, k, s)', 'x.index_add(1, k, s)', [0, 3, 0], (3, 3)),
        ('x:index_add(0, k, s, {alpha = -2})', 'x.index_add(0, k, s, alpha=-2)', [1, 1], (2, 4)), ('x:index_copy(0, k, s)', 'x.index_copy(0, k, s)', [2, 0], (2, 4)), ('x:t():index_copy(1, k, s)', 'x.t().index_copy(1, k, s)', [1], (4, 1)),
        ('x:clone():index_put_({k}, s)', 'x.clone().index_put_((k,), s)', [2, 0], (2, 4)), ('x:clone():index_put_({k}, s, {accumulate = true})', 'x.clone().index_put_((k,), s, accumulate=True)', [2, 0, 2, 2], (4,)),
        ('x:index_put({{}, k}, s, {accumulate = true})', 'torch.zeros(3, 4).double().index_put((torch.arange(3)[:, None], k[None]), s, accumulate=True) + x', [1, 1, 0], (3, 3)),
        ('x:clone():index_put_({k, k}, s, {accumulate = true})', 'x.clone().index_put_((k, k), s, accumulate=True)', [1, 1, 0], (3,)),
        ('x:masked_scatter(k:gt(0), s)', 'x.masked_scatter(k > 0, s)', [[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]], (3, 3)), ('x:masked_scatter(k:gt(0), s)', 'x.masked_scatter(k > 0, s)', [1, 0, 1, 0], (6,))):
    case(l, p, {'x': (3, 4), 's': s}, ['local k = ' + K(k)], {'k': tensor(k, dtype=torch.int64)})
for l, p, m in (('x:masked_select(m)', 'x.masked_select(m)', [[True, False, True, True]] * 3), ('x:masked_select(m)', 'x.masked_select(m)', [True, False, False, True]), ('x:masked_select(m)', 'x.masked_select(m)', [[False]] * 3),
                ('x:t():masked_select(m)', 'x.t().masked_select(m)', [True, False, True]), ('x[0]:masked_select(m)', 'x[0].masked_select(m)', [[True, False, True, True]] * 2), ('x:masked_fill(m, 3)', 'x.masked_fill(m, 3)', [True, False, True, True])):
    case(l, p, {'x': (3, 4)}, ['local m = mf.tensor(%s)' % lua(m)], {'m': tensor(m)})


# -- Subscripts at random
def subscript(shape, tensors_max):
    """Items as (lua, python) and the tensors they need."""
    items, d, tensors, common = [], 0, [], rng.choice([[2], [3], [2, 2], [1], []])
    rest_used = False
    while d < len(shape):
        n = shape[d]
        kind = rng.choice(['number', 'range', 'range', 'all', 'new', 'tensor', 'tensor', 'mask', 'rest', 'stop'])
        if kind == 'number' and n:
            i = rng.randrange(-n, n)
            items.append((str(i), i)); d += 1
        elif kind == 'range':
            a, b, c = rng.randrange(-n - 1, n + 2), rng.randrange(-n - 1, n + 2), rng.choice([1, 1, 2, 3])
            form = rng.choice([1, 2, 3])
            items.append(('{%s}' % ', '.join(map(str, (a, b, c)[:form])), slice(a, b if form > 1 else None, c if form > 2 else None))); d += 1
        elif kind == 'all': items.append(('{}', slice(None))); d += 1
        elif kind == 'new' and len(shape) < 4: items.append(('mf.newaxis', None))
        elif kind == 'tensor' and n and len(tensors) < tensors_max:
            size = rng.choice([common, common[-1:], [1] * len(common)])
            total = 1
            for s in size: total *= s
            t = tensor([rng.randrange(-n, n) for _ in range(total)], dtype=torch.int64).reshape(size)
            tensors.append(t); items.append(('t%d' % len(tensors), t)); d += 1
        elif kind == 'mask' and len(tensors) < tensors_max and not any(t.dtype == torch.int64 and t.numel() > 1 for t in tensors) and not any(t.dtype == torch.bool for t in tensors):
            dims = rng.choice([1, 1, 2])
            if d + dims > len(shape): continue
            total = 1
            for s in shape[d:d + dims]: total *= s
            t = tensor([rng.random() < .5 for _ in range(total)], dtype=torch.bool).reshape(shape[d:d + dims])
            tensors.append(t); items.append(('t%d' % len(tensors), t)); d += dims
            common = [1]
        elif kind == 'rest' and not rest_used:
            rest_used = True
            skip = rng.randrange(0, len(shape) - d + 1)
            items.append(("'...'", Ellipsis)); d += skip
            while d < len(shape): items.append(('{}', slice(None))); d += 1
        elif kind == 'stop': break
    return items, tensors


def tensor_lua(t):
    if t.dtype == torch.bool: return 'mf.tensor(%s, {dtype = mf.bool}):view({%s})' % (lua(t.reshape(-1)), ', '.join(map(str, t.shape)))
    return 'mf.tensor(%s, {dtype = mf.int64}):view({%s})' % (lua(t.reshape(-1)), ', '.join(map(str, t.shape)))


def key_text(items):
    return '{ ' + ', '.join(l for l, _ in items) + ' }' if items else '{}'


made_cases = 0
while made_cases < 260:
    shape = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.choice([1, 2, 2, 3, 3, 4])))
    items, tensors = subscript(shape, 3)
    key = tuple(p for _, p in items)
    more = ['local t%d = %s;' % (k + 1, tensor_lua(t)) for k, t in enumerate(tensors)]
    turned = rng.random() < .25 and len(shape) > 1
    base, lbase = (lambda x: x.transpose(0, -1)) if turned else (lambda x: x), 'x:transpose(0, -1)' if turned else 'x'
    full = shape if not turned else (shape[-1],) + shape[1:-1] + (shape[0],)
    try:
        case('%s[%s]' % (lbase, key_text(items)), lambda x: base(x)[key], {'x': full}, more)
    except IndexError: continue
    made_cases += 1

made_cases = 0
while made_cases < 160:
    shape = tuple(rng.choice([1, 2, 3, 4]) for _ in range(rng.choice([1, 2, 2, 3])))
    items, tensors = subscript(shape, 2)
    key = tuple(p for _, p in items)
    more = ['local t%d = %s;' % (k + 1, tensor_lua(t)) for k, t in enumerate(tensors)]
    # repeated places have no defined order in PyTorch
    try: target = torch.arange(made(shape).numel()).reshape(shape)[key]
    except IndexError: continue
    if target.unique().numel() != target.numel(): continue
    how = rng.choice(['number', 'same', 'broadcast', 'leading'])
    vshape = tuple(target.shape)
    if how == 'broadcast': vshape = tuple(rng.choice([1, s]) for s in vshape[rng.randrange(len(vshape) + 1):])
    if how == 'leading': vshape = (1,) + vshape

    def put(x, v=3.25):
        y = x.clone(); y[key] = v
        return y
    text = '(function() local y = x:clone(); y[%s] = %s; return y end)()' % (key_text(items), '3.25' if how == 'number' else 'v')
    try: case(text, put, {'x': shape} if how == 'number' else {'x': shape, 'v': vshape}, more)
    except (IndexError, RuntimeError): continue
    made_cases += 1

print('-- Made by places.py: expression, inputs, results, gradients, text before.\nreturn {')
print('\n'.join(cases))
print('}')
