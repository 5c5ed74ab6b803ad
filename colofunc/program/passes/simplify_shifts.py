"""Shifts: a pad and a slice, or slices put into a tensor of fill, are one operator (`colofunc.ops.shift`).

    constant_pad_nd(x, (0, 1), c)[:, 1:]                   ->   shift(x, 1, -1, c)       labels of a causal model
    full(c); out[:, 1:] = x[:, :-1]                        ->   shift(x, 1, 1, c)        inputs of a decoder
    shift(x, 1, 1, c); out[:, 0] = e                       ->   shift(x, 1, 1, e)
    cat([full(c), x[:, :-1]], 1)                           ->   shift(x, 1, 1, c)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from colofunc.ops.shift import shift
from colofunc.program.ir import Node, Ref, Value

Makers = Mapping[int, Node]
Values = Mapping[int, Value]
SLICE, FULL = "aten.slice.Tensor", "aten.full.default"


def shifted(node: Node, makers: Makers, values: Values) -> Node | None:
    """The node as a shift; None where it is none."""
    find = FORMS.get(node.target)
    found = find(node, makers, values) if find is not None else None
    if found is None:
        return None
    x, dim, by, fill = found
    out = values[node.outs[0]] if node.outs[0] is not None else None
    if out is None or (values[x.id].shape, values[x.id].dtype) != (out.shape, out.dtype):
        return None
    return attrs.evolve(node, target=shift.name, args=(x, dim, by, fill), kwargs=())


Found = tuple[Ref, int, int, Any]


def _made(arg: Any, makers: Makers, target: str) -> Node | None:
    node = makers.get(arg.id) if type(arg) is Ref else None
    return node if node is not None and node.target == target else None


def _slice(node: Node, makers: Makers, values: Values) -> Found | None:
    """A pad at one end, cut at the other."""
    pad = _made(node.args[0], makers, "aten.constant_pad_nd.default")
    if pad is None:
        return None
    source, dim, low, high = _cut(node, values)
    rank, widths = len(values[source.id].shape), tuple(pad.args[1])
    pairs = {rank - 1 - k // 2: widths[k : k + 2] for k in range(0, len(widths), 2) if any(widths[k : k + 2])}
    if list(pairs) != [dim] or min(pairs[dim]) < 0:
        return None
    (before, behind), n = pairs[dim], values[pad.args[0].id].shape[dim]
    fill = pad.args[2] if len(pad.args) > 2 else 0
    if (before and behind) or high - low != n:
        return None
    return pad.args[0], dim, before - low, fill


def _cut(node: Node, values: Values) -> tuple[Ref, int, int, int]:
    """(operand, dim, start, end) of a slice; end < start where it has a step."""
    args = (*node.args, *(0, None, None, 1)[len(node.args) - 1 :])
    shape = values[args[0].id].shape
    dim = args[1] % len(shape)
    low, high, step = slice(args[2], args[3], args[4]).indices(shape[dim])
    return args[0], dim, low, high if step == 1 else -1


def _first_rows(arg: Any, dim: int, makers: Makers, values: Values) -> tuple[Ref, int] | None:
    """(x, how many rows are left out) where the operand is x without its last rows along `dim`."""
    node = _made(arg, makers, SLICE)
    if node is None:
        return None
    source, along, low, high = _cut(node, values)
    left = values[source.id].shape[along] - high
    return (source, left) if along == dim and low == 0 and high > 0 and left > 0 else None


def _number(arg: Any, makers: Makers) -> Any:
    """The value of a tensor that is full of it; None where it is not."""
    node = _made(arg, makers, FULL)
    return None if node is None else node.args[1]


def _slice_scatter(node: Node, makers: Makers, values: Values) -> Found | None:
    """All but the last rows, put behind the first rows of a tensor of fill."""
    base, part, *rest = node.args
    args = (*rest, *(0, None, None, 1)[len(rest) :])
    shape = values[base.id].shape
    dim = args[0] % len(shape)
    source, fill = _first_rows(part, dim, makers, values), _number(base, makers)
    low, high, step = slice(*args[1:]).indices(shape[dim])
    if source is None or fill is None or step != 1 or high != shape[dim] or low != source[1]:
        return None
    return source[0], dim, low, fill


def _select_scatter(node: Node, makers: Makers, values: Values) -> Found | None:
    """A shift by one row, whose first row is set."""
    base, part, dim, index = node.args
    inner, fill = _made(base, makers, shift.name), _number(part, makers)
    if inner is None or fill is None or index != 0:
        return None
    x, along, by, _ = inner.args
    return (x, along, by, fill) if along == dim % len(values[x.id].shape) and by == 1 else None


def _cat(node: Node, makers: Makers, values: Values) -> Found | None:
    """Rows of fill, and all but the last rows."""
    parts = node.args[0]
    if len(parts) != 2 or not values[parts[0].id].shape:
        return None
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(values[parts[0].id].shape)
    source, fill = _first_rows(parts[1], dim, makers, values), _number(parts[0], makers)
    if source is None or fill is None or values[parts[0].id].shape[dim] != source[1]:
        return None
    return source[0], dim, source[1], fill


FORMS: dict[str, Callable[[Node, Makers, Values], Found | None]] = {
    SLICE: _slice,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.cat.default": _cat,
}
