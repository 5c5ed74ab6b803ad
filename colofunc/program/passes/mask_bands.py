"""Attention masks as bands: two values, and for every row the run of columns that has the first of them.

Problem: a mask of 131,072 rows and columns has 17 billion elements; making it, to see that it says "causal", takes
longer than the step and does not fit. Idea: the masks that models make are comparisons of a number per row with a
sorted number per column, joined by and, or, not, where. A comparison with sorted columns holds for one run of columns,
found by bisection, and the joins act on the ends of runs. So a mask is known exactly from vectors, in time s log s.

    positions[j] <= positions[i]          ->  columns 0 : i + 1          of row i
    positions[j] > positions[i] - w       ->  columns i - w + 1 : t
    both                                  ->  columns i - w + 1 : i + 1

What is not of this form (unsorted columns, two runs in a row, an operator that is not known here) is `None`: the caller
looks at it another way, or leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.ops.targets import overload, resolve
from colofunc.program.ir import Node, Ref, map_refs
from colofunc.program.passes.band_views import FACTORIES, VIEWS, constant, numel, viewed
from colofunc.program.passes.bands import BandedTensor, NoBand, as_band, runs_of_equal
from colofunc.program.passes.repeated import compact, computed, without_repeats

# Values up to this many elements, those that repeat counted once, are computed as they are: vectors per row and column
# of a batch, and small masks.
MAX_REAL = 1 << 22
# Integers of positions are exact in every sum of two.
MAX_POSITION = 1 << 40


@attrs.frozen(eq=False)
class Sum:
    """Integers row[..., i, 0] + column[..., 0, j] of a tensor `shape` (..., rows, columns)."""

    shape: tuple[int, ...]
    row: Tensor
    column: Tensor


KnownMask = Tensor | BandedTensor | Sum
Shapes = Callable[[int], tuple[int, ...]]


def band_of(
    vid: int, columns: int, chain: Sequence[Node], constants: Mapping[int, Tensor], shapes: Shapes
) -> BandedTensor | None:
    """The value as a band of so many columns; None where it is no band.

    `chain`: the nodes that make it from the constants, in order. A value of one column is the same in all.
    """
    known: dict[int, KnownMask] = dict(constants)
    try:
        for node in chain:
            known.update(_results(node, known, shapes))
        value = known[vid]
        if isinstance(value, Tensor):
            return as_band(value, (*value.shape[:-1], columns))
        return value if isinstance(value, BandedTensor) else None
    except NoBand:
        return None


# ---- one node ----


def _results(node: Node, known: Mapping[int, KnownMask], shapes: Shapes) -> dict[int, KnownMask]:
    """What a node makes: tensors where all that it reads and makes is small, else its one result as a band or a sum."""
    outs, tensors = node.results, _tensors(node, known)
    if tensors is not None and len(node.outs) == 1 and len(outs) == 1:
        result = computed(node, tensors, shapes(outs[0]), _is_pointwise(node.target), MAX_REAL)
        if result is not None:
            return {outs[0]: result}
    whole: dict[int, Tensor] | None = None
    if tensors is not None and all(numel(shapes(out)) <= MAX_REAL for out in outs):
        whole = _made_whole(tensors)
    if whole is not None:
        args, kwargs = map_refs((node.args, node.kwargs), whole.__getitem__)
        result = resolve(node.target)(*args, **dict(kwargs))
        results = result if isinstance(result, (list, tuple)) else [result]
        return {out: tensor for out, tensor in zip(node.outs, results, strict=True) if out is not None}
    if len(outs) != 1:
        raise NoBand
    return {outs[0]: _large(node, known, shapes(outs[0]))}


def _tensors(node: Node, known: Mapping[int, KnownMask]) -> dict[int, Tensor] | None:
    """The operands of a node; None where one is no tensor."""
    tensors: dict[int, Tensor] = {}
    for ref in node.refs:
        value = known[ref]
        if not isinstance(value, Tensor):
            return None
        tensors[ref] = value
    return tensors


def _made_whole(tensors: Mapping[int, Tensor]) -> dict[int, Tensor] | None:
    """Tensors with what repeats in them written out; None where one is too large for that."""
    whole: dict[int, Tensor] = {}
    for ref, tensor in tensors.items():
        written_out = without_repeats(tensor, MAX_REAL)
        if written_out is None:
            return None
        whole[ref] = written_out
    return whole


def _large(node: Node, known: Mapping[int, KnownMask], shape: tuple[int, ...]) -> KnownMask:
    """The result of a node that is too large to be made."""
    if node.target in FACTORIES:
        return constant(node, shape)
    if node.target in VIEWS:
        return viewed(node, known[node.refs[0]], shape)
    if not _is_pointwise(node.target):
        raise NoBand
    name = node.target.split(".")[1]
    terms = _terms(node, known, shape)
    if terms is not None and name in COMPARE:
        return _compared(name, *terms, shape)
    if terms is not None and name in SIGNS:
        return _summed(name, *terms, shape)
    return _joined(node, known, shape)


def _is_pointwise(target: str) -> bool:
    if target in POINTWISE:
        return True
    tags = overload(target).tags
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


# ---- a number per row against a sorted number per column ----

# name -> the same with its operands exchanged
COMPARE = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
# name -> signs of its operands
SIGNS = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}


@attrs.frozen(eq=False)
class MaskTerm:
    """An operand of two: a number per row (or for all), a number per column, or the sum of both, all of one dtype."""

    row: Tensor | None
    column: Tensor | None


def _terms(node: Node, known: Mapping[int, KnownMask], shape: tuple[int, ...]) -> tuple[MaskTerm, MaskTerm] | None:
    """The operands of a node that has two, in the dtype in which they meet; None where one is another kind of value."""
    if len(node.args) != 2 or node.kwargs:
        return None
    left, right = (known[arg.id] if isinstance(arg, Ref) else arg for arg in node.args)
    if isinstance(left, BandedTensor) or isinstance(right, BandedTensor):
        return None
    if isinstance(left, Sum) or isinstance(right, Sum):
        dtype = torch.int64
    else:
        dtype = torch.result_type(left, right)
    left_term, right_term = _term(left, dtype, shape), _term(right, dtype, shape)
    if left_term is None or right_term is None:
        return None
    return left_term, right_term


def _term(x: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> MaskTerm | None:
    if isinstance(x, Sum):
        return MaskTerm(x.row, x.column)
    tensor = compact(torch.as_tensor(x))
    if not torch.can_cast(tensor.dtype, dtype):
        return None
    tensor = tensor.to(dtype)
    if tensor.dim() == 0 or tensor.shape[-1] == 1:
        return MaskTerm(tensor, None)
    if tensor.shape[-1] == shape[-1] and (tensor.dim() == 1 or tensor.shape[-2] == 1):
        return MaskTerm(None, tensor)
    return None


def _compared(name: str, left: MaskTerm, right: MaskTerm, shape: tuple[int, ...]) -> BandedTensor:
    """`left < right` and its like as a band of True."""
    if left.column is None:
        name, left, right = COMPARE[name], right, left
    if left.column is None or right.row is None or right.column is not None:
        raise NoBand
    row = right.row
    if left.row is not None:
        # row + column < other: column < other - row, exact for the integers of a Sum.
        row = _position(right.row) - left.row
    lo, hi = _bisect(name, left.column, row, shape)
    yes, no = torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    if name == "ne":  # the run is of those that are equal
        return BandedTensor(shape, lo, hi, no, yes)
    return BandedTensor(shape, lo, hi, yes, no)


def _bisect(name: str, column: Tensor, row: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(lo, hi) of the columns c with `c name row`; of `ne` those that are equal."""
    wide = torch.float64 if row.is_floating_point() else torch.int64
    column = column[(None,) * (len(shape) - column.dim())].to(wide)
    row = row[(None,) * (len(shape) - row.dim())].to(wide)
    lead = torch.broadcast_shapes(column.shape[:-2], row.shape[:-2])
    columns = column[..., 0, :].expand(*lead, shape[-1]).contiguous()
    rows = row[..., 0].expand(*lead, row.shape[-2]).contiguous()
    if bool(columns.isnan().any()) or bool(rows.isnan().any()):
        raise NoBand
    steps = columns.diff()
    falling = bool((steps < 0).any())
    if falling and bool((steps > 0).any()):
        raise NoBand
    if falling:
        columns = columns.flip(-1)
    before = torch.searchsorted(columns, rows)
    upto = torch.searchsorted(columns, rows, right=True)
    none, every = torch.zeros_like(before), torch.full_like(before, shape[-1])
    runs = {"lt": (none, before), "le": (none, upto), "gt": (upto, every), "ge": (before, every)}
    lo, hi = runs.get(name, (before, upto))
    if falling:
        return shape[-1] - hi, shape[-1] - lo
    return lo, hi


def _summed(name: str, left: MaskTerm, right: MaskTerm, shape: tuple[int, ...]) -> Sum:
    """`left + right`, `left - right` or `right - left` of positions."""
    row = column = torch.zeros(1, 1, dtype=torch.int64)
    for sign, term in zip(SIGNS[name], (left, right), strict=True):
        if term.row is not None:
            row = row + sign * _position(term.row)
        if term.column is not None:
            column = column + sign * _position(term.column)
    return Sum(shape, row, column)


def _position(x: Tensor) -> Tensor:
    """`x` if it is of int64 and no sum of two such can wrap; NoBand for other numbers."""
    if x.dtype != torch.int64 or (x.numel() and int(x.abs().max()) > MAX_POSITION):
        raise NoBand
    return x


# ---- joins ----


def _joined(node: Node, known: Mapping[int, KnownMask], shape: tuple[int, ...]) -> BandedTensor:
    """A pointwise operator on bands: its value for each choice of inside and outside, then runs of equal values."""
    bands: dict[int, BandedTensor] = {}
    for ref in dict.fromkeys(node.refs):
        value = known[ref]
        if isinstance(value, Sum):
            raise NoBand
        if isinstance(value, Tensor) and value.numel() != 1:
            value = as_band(value, shape)
        if isinstance(value, BandedTensor):
            bands[ref] = value
    if not bands:
        raise NoBand
    results = []
    for choice in product((False, True), repeat=len(bands)):
        results.append(_chosen(node, known, dict(zip(bands, choice, strict=True)), bands))
    return runs_of_equal(list(bands.values()), results, shape)


def _chosen(
    node: Node, known: Mapping[int, KnownMask], inside: Mapping[int, bool], bands: Mapping[int, BandedTensor]
) -> Tensor:
    """The operator's result (1,) where each band has its value inside, or outside."""

    def value(ref: int) -> Any:
        if ref not in bands:
            return known[ref]
        return bands[ref].inside if inside[ref] else bands[ref].outside

    args, kwargs = map_refs((node.args, node.kwargs), value)
    result: Tensor = resolve(node.target)(*args, **dict(kwargs))
    return result.reshape(1)


# Pointwise, without torch's tag.
POINTWISE = {
    "aten._to_copy.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default",
    "aten.masked_fill.Tensor", "aten.where.Scalar", "aten.where.ScalarOther", "aten.where.ScalarSelf",
    "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default",
}  # fmt: skip
