#!/usr/bin/env python3
"""Texts of tensors as PyTorch prints them: print.py > print.lua

A case is an expression in Lua and the same in Python. "torch." before dtypes is left out, before lines are
broken. Needs: pip install torch.
"""
import torch
from torch import tensor, arange, zeros, ones, float64, float16, bfloat16, int8, uint8, int16, int32, int64
import torch._tensor_str as printing

add = printing._add_suffixes
printing._add_suffixes = lambda text, suffixes, *a, **k: add(text, [s.replace('torch.', '') for s in suffixes], *a, **k)

nan, inf = float('nan'), float('inf')
cases = []


def numbers(values):
    def one(v):
        if isinstance(v, list): return '{' + ', '.join(map(one, v)) + '}'
        if v is True or v is False: return 'true' if v else 'false'
        if v != v: return '0/0'
        if v in (inf, -inf): return 'math.huge' if v > 0 else '-math.huge'
        return repr(v)
    return one(values)


def case(lua, python, options=None):
    cases.append((lua, str(eval(python)) if isinstance(python, str) else str(python), options))


def values(v, dtype=None):
    lua = 'mf.tensor(%s%s)' % (numbers(v), ', {dtype = mf.%s}' % str(dtype)[6:] if dtype else '')
    t = tensor(v, dtype=dtype or (torch.bool if isinstance(flat(v), bool) else torch.float32))
    case(lua, t)


def flat(v):
    while isinstance(v, list) and v: v = v[0]
    return v


# Numbers alone and in rows; whole ones, fractions, zeros, signs
for v in (0.0, 1.0, -1.0, 3.14159265, 0.1, 1e-5, 123456789.0, 1e10, 1e-10, nan, inf, -inf, 0.5, 100000.5, 99999.99995):
    values(v)
for v in ([], [0.0], [0.0, 0.0], [1.0, 2.0, 3.0], [1.5, 2.25, -3.0], [-1.0, 0.0, 1.0], [1000.0, 1.0], [1001.0, 1.0], [0.001, 1.0],
          [0.0009, 1.0], [1e8, 1.0], [1.1e8, 2e8], [1e-4, 1e-4], [9.9e-5, 1e-4], [1e-8], [12345.678, 0.01], [nan, 1.0], [nan, 1.5],
          [inf, 1.0, -inf], [inf, 1.5, nan, -2.5], [nan, nan], [inf, 0.0], [0.0, 1e-20], [1e20, -1e20], [1e38, 1e-38], [-0.0, 1.0], [-0.0, 0.5],
          [0.99999, 0.5], [123456.0, 654321.0], [1234567.0, 0.0], [1.0, 1000.0], [0.1, 100.0], [0.1, 100.1], [5e-324 * 0 + 1e-45, 1.0],
          [-123.456, 0.001234], [1e5, 1e-1], [3e7], [16777216.0, 0.5]):
    values(v)
values([[1.0, 2.0], [3.0, 4.0]])
values([[1.5], [-2.5]])
values([[[1.0, -2.0], [3.5, 4.0]], [[5.0, 6.0], [7.0, 8.25]]])
values([[[[1.0, 2.0]], [[3.0, 4.0]]], [[[5.0, 6.0]], [[7.0, 8.0]]]])
values([[[[[1.0]]]]])
# Bool and whole numbers
values(True)
values([True, False])
values([[True, True], [False, True]])
values([False])
for dtype in (int64, int32, int16, int8, uint8):
    values([1, 2, 3], dtype)
    values(7, dtype)
values([[-100, 5], [12, 1234567]], int64)
values([0, -1], int64)
values([-9007199254740992, 1], int64)
values([], int64)
values([], int32)
# Other floats
for dtype in (float64, float16, bfloat16):
    values([1.5, 2.25, -3.0], dtype)
    values([1.0, 2.0], dtype)
    values(0.1, dtype)
    values([1000.0, 0.25], dtype)
    values([[1.0, nan], [inf, 2.5]], dtype)
values([1e-300, 1e300], float64)
values([1 / 3, 2 / 3], float64)
values([65504.0, 6e-8], float16)
# Rows that are broken
case('mf.arange(30)', 'arange(30)')
case('mf.arange(100):float() / 7', 'arange(100).float() / 7')
case('mf.arange(60):view(2, 30)', 'arange(60).view(2, 30)')
case('mf.arange(60):view(2, 30):float() * 1.5', 'arange(60).view(2, 30).float() * 1.5')
case('mf.arange(120):view(2, 2, 30):double() / 3', 'arange(120).view(2, 2, 30).double() / 3')
case('mf.arange(40) * 123456789', 'arange(40) * 123456789')
case('mf.arange(40):gt(20)', 'arange(40) > 20')
case('mf.arange(1000)', 'arange(1000)')
# Summaries
case('mf.arange(1001)', 'arange(1001)')
case('mf.arange(10000):view(100, 100)', 'arange(10000).view(100, 100)')
case('mf.arange(10000):view(100, 100):float() / 3', 'arange(10000).view(100, 100).float() / 3')
case('mf.arange(2000):view(2, 1000)', 'arange(2000).view(2, 1000)')
case('mf.arange(2000):view(1000, 2):float()', 'arange(2000).view(1000, 2).float()')
case('mf.arange(2048):view(8, 16, 16)', 'arange(2048).view(8, 16, 16)')
case('mf.arange(2048):view(4, 8, 8, 8):double()', 'arange(2048).view(4, 8, 8, 8).double()')
case('mf.arange(1200):view(6, 200)', 'arange(1200).view(6, 200)')
case('mf.arange(1400):view(7, 200)', 'arange(1400).view(7, 200)')
case('mf.arange(5000):view(50, 100):t()', 'arange(5000).view(50, 100).t()')
case('mf.zeros(2000)', 'zeros(2000)')
case('mf.arange(3000):remainder(2):eq(0)', '(arange(3000) % 2) == 0')
# Sizes of zero, views
case('mf.zeros(0, 3)', 'zeros(0, 3)')
case('mf.zeros(2, 0, dict_int64)', 'zeros(2, 0, dtype=int64)')
case('mf.zeros(0)', 'zeros(0)')
case('mf.zeros(3, 0, 2):bool()', 'zeros(3, 0, 2).bool()')
case('mf.arange(6):view(2, 3):t()', 'arange(6).view(2, 3).t()')
case('mf.ones(1):expand(2, 3)', 'ones(1).expand(2, 3)')
case('mf.arange(10):float()[{ {0, 10, 3} }]', 'arange(10).float()[0:10:3]')
# Devices, gradients
case("mf.zeros(2, 3, {device = 'meta'})", "zeros(2, 3, device='meta')")
case("mf.zeros(2, 3, {device = 'meta', dtype = mf.int64})", "zeros(2, 3, device='meta', dtype=int64)")
case('mf.ones(2, {requires_grad = true})', 'ones(2, requires_grad=True)')
case('mf.ones(2, {requires_grad = true, dtype = mf.float64})', 'ones(2, requires_grad=True, dtype=float64)')
case('mf.ones(2, {requires_grad = true}) * 2', 'ones(2, requires_grad=True) * 2')
case('mf.ones(2, 2, {requires_grad = true}) + 1.5', 'ones(2, 2, requires_grad=True) + 1.5')
case('mf.ones(2, {requires_grad = true}):sum()', 'ones(2, requires_grad=True).sum()')
case('mf.ones(2, 2, {requires_grad = true}):t()', 'ones(2, 2, requires_grad=True).t()')
case('mf.ones(4, {requires_grad = true}):view(2, 2)', 'ones(4, requires_grad=True).view(2, 2)')
case('mf.ones(4, {requires_grad = true})[1]', 'ones(4, requires_grad=True)[1]')
case('mf.ones(20, {requires_grad = true}) / 3', 'ones(20, requires_grad=True) / 3')
case('mf.ones(13, {requires_grad = true, dtype = mf.float64}) * 3.5', 'ones(13, requires_grad=True, dtype=float64) * 3.5')

# Options
for lua, python, options in (
        ('mf.arange(6):float() / 7', 'arange(6).float() / 7', dict(precision=2)),
        ('mf.arange(6):float() / 7', 'arange(6).float() / 7', dict(precision=10)),
        ('mf.arange(6):float() * 1.5', 'arange(6).float() * 1.5', dict(sci_mode=True)),
        ('mf.arange(6):float()', 'arange(6).float()', dict(sci_mode=True)),
        ('mf.tensor({1e-9, 1.5})', 'tensor([1e-9, 1.5])', dict(sci_mode=False)),
        ('mf.arange(30)', 'arange(30)', dict(linewidth=30)),
        ('mf.arange(30):view(3, 10):float() / 3', 'arange(30).view(3, 10).float() / 3', dict(linewidth=20)),
        ('mf.arange(30)', 'arange(30)', dict(threshold=10)),
        ('mf.arange(100):view(10, 10)', 'arange(100).view(10, 10)', dict(threshold=10, edgeitems=1)),
        ('mf.arange(100):view(10, 10)', 'arange(100).view(10, 10)', dict(threshold=10, edgeitems=5)),
        ('mf.arange(100):view(10, 10)', 'arange(100).view(10, 10)', dict(threshold=10, edgeitems=0)),
        ('mf.arange(100)', 'arange(100)', dict(threshold=10, edgeitems=0)),
        ('mf.arange(100):float() / 7', 'arange(100).float() / 7', dict(profile='short')),
        ('mf.arange(3000)', 'arange(3000)', dict(profile='short')),
        ('mf.arange(1500):view(30, 50)', 'arange(1500).view(30, 50)', dict(profile='full'))):
    torch.set_printoptions(profile='default')
    torch.set_printoptions(**options)
    text = '{' + ', '.join('%s = %s' % (k, repr(v).lower() if isinstance(v, bool) else repr(v)) for k, v in options.items()) + '}'
    case(lua, python, text)
    torch.set_printoptions(profile='default')

print('-- Made by print.py: expression, what PyTorch prints, options.\nreturn {')
for lua, text, options in cases:
    assert ']==]' not in text
    print('  { %s, [==[\n%s]==]%s },' % ('[==[' + lua.replace('dict_int64', '{dtype = mf.int64}') + ']==]', text, ', ' + options if options else ''))
print('}')
