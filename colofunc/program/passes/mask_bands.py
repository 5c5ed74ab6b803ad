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
from itertools import permutations, product
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.ops.targets import overload, resolve
from colofunc.program.ir import Node, Ref, map_refs
from colofunc.program.passes.repeated import compact, computed, plain

# Values up to this many elements, those that repeat counted once, are computed as they are: vectors per row and column
# of a batch, and small masks.
MAX_REAL = 1 << 22
# Elements of a dense mask that are looked at in one go.
MAX_BLOCK = 1 << 22
# Integers of positions are exact in every sum of two.
MAX_POSITION = 1 << 40


class NoBand(Exception):
    """A value is not of the form that bands can say; never leaves this module."""


@attrs.frozen(eq=False)
class Band:
    """A tensor `shape` (..., rows, columns): `inside` in columns lo:hi of each row, `outside` elsewhere.

    `lo`, `hi`: int64, of the dims but the last, where sizes of 1 are broadcast. `inside`, `outside`: (1,).
    """

    shape: tuple[int, ...]
    lo: Tensor
    hi: Tensor
    inside: Tensor
    outside: Tensor

    def rows_of(self, x: Tensor) -> Tensor:
        """`lo` or `hi` for every row."""
        return x.expand(self.shape[:-1])

    def with_runs(self, shape: tuple[int, ...], lo: Tensor, hi: Tensor) -> Band:
        return attrs.evolve(self, shape=shape, lo=lo, hi=hi)


@attrs.frozen(eq=False)
class Sum:
    """Integers row[..., i, 0] + column[..., 0, j] of a tensor `shape` (..., rows, columns)."""

    shape: tuple[int, ...]
    row: Tensor
    column: Tensor


Known = Tensor | Band | Sum
Shapes = Callable[[int], tuple[int, ...]]


def band_of(
    vid: int, columns: int, chain: Sequence[Node], constants: Mapping[int, Tensor], shapes: Shapes
) -> Band | None:
    """The value as a band of so many columns; None where it is no band.

    `chain`: the nodes that make it from the constants, in order. A value of one column is the same in all.
    """
    known: dict[int, Known] = dict(constants)
    try:
        for node in chain:
            known.update(_results(node, known, shapes))
        value = known[vid]
        if isinstance(value, Tensor):
            return _as_band(value, (*value.shape[:-1], columns))
        return value if isinstance(value, Band) else None
    except NoBand:
        return None


def runs_of(visible: Tensor) -> tuple[Tensor, Tensor] | None:
    """(lo, hi), each (..., rows), of the columns of a bool tensor (..., rows, columns) that are True.

    None if one row has two runs.
    """
    columns = visible.shape[-1]
    flat = visible.reshape(-1, columns)
    step = max(1, MAX_BLOCK // max(1, columns))
    starts, ends = [], []
    for first in range(0, flat.shape[0], step):
        block = flat[first : first + step].to(torch.uint8)
        count = block.sum(1)
        start = block.argmax(1)
        last = columns - 1 - block.flip(1).argmax(1)
        if not torch.equal(count, torch.where(count > 0, last - start + 1, 0)):
            return None
        starts.append(start)
        ends.append(start + count)
    shape = visible.shape[:-1]
    return torch.cat(starts).reshape(shape), torch.cat(ends).reshape(shape)


# ---- one node ----


def _results(node: Node, known: Mapping[int, Known], shapes: Shapes) -> dict[int, Known]:
    """What a node makes: tensors where all that it reads and makes is small, else its one result as a band or a sum."""
    outs, tensors = node.results, _tensors(node, known)
    if tensors is not None and len(node.outs) == 1 and len(outs) == 1:
        result = computed(node, tensors, shapes(outs[0]), _is_pointwise(node.target), MAX_REAL)
        if result is not None:
            return {outs[0]: result}
    whole: dict[int, Tensor] | None = None
    if tensors is not None and all(_numel(shapes(out)) <= MAX_REAL for out in outs):
        whole = _made_whole(tensors)
    if whole is not None:
        args, kwargs = map_refs((node.args, node.kwargs), whole.__getitem__)
        result = resolve(node.target)(*args, **dict(kwargs))
        results = result if isinstance(result, (list, tuple)) else [result]
        return {out: tensor for out, tensor in zip(node.outs, results, strict=True) if out is not None}
    if len(outs) != 1:
        raise NoBand
    return {outs[0]: _large(node, known, shapes(outs[0]))}


def _tensors(node: Node, known: Mapping[int, Known]) -> dict[int, Tensor] | None:
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
        written_out = plain(tensor, MAX_REAL)
        if written_out is None:
            return None
        whole[ref] = written_out
    return whole


def _large(node: Node, known: Mapping[int, Known], shape: tuple[int, ...]) -> Known:
    """The result of a node that is too large to be made."""
    if node.target in FACTORIES:
        return _constant(node, shape)
    if node.target in VIEWS:
        return _viewed(node, known[node.refs[0]], shape)
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


def _numel(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


# ---- a number per row against a sorted number per column ----

# name -> the same with its operands exchanged
COMPARE = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}
# name -> signs of its operands
SIGNS = {"add": (1, 1), "sub": (1, -1), "rsub": (-1, 1)}


@attrs.frozen(eq=False)
class Term:
    """An operand of two: a number per row (or for all), a number per column, or the sum of both, all of one dtype."""

    row: Tensor | None
    column: Tensor | None


def _terms(node: Node, known: Mapping[int, Known], shape: tuple[int, ...]) -> tuple[Term, Term] | None:
    """The operands of a node that has two, in the dtype in which they meet; None where one is another kind of value."""
    if len(node.args) != 2 or node.kwargs:
        return None
    left, right = (known[arg.id] if isinstance(arg, Ref) else arg for arg in node.args)
    if isinstance(left, Band) or isinstance(right, Band):
        return None
    if isinstance(left, Sum) or isinstance(right, Sum):
        dtype = torch.int64
    else:
        dtype = torch.result_type(left, right)
    left_term, right_term = _term(left, dtype, shape), _term(right, dtype, shape)
    if left_term is None or right_term is None:
        return None
    return left_term, right_term


def _term(x: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Term | None:
    if isinstance(x, Sum):
        return Term(x.row, x.column)
    tensor = compact(torch.as_tensor(x))
    if not torch.can_cast(tensor.dtype, dtype):
        return None
    tensor = tensor.to(dtype)
    if tensor.dim() == 0 or tensor.shape[-1] == 1:
        return Term(tensor, None)
    if tensor.shape[-1] == shape[-1] and (tensor.dim() == 1 or tensor.shape[-2] == 1):
        return Term(None, tensor)
    return None


def _compared(name: str, left: Term, right: Term, shape: tuple[int, ...]) -> Band:
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
        return Band(shape, lo, hi, no, yes)
    return Band(shape, lo, hi, yes, no)


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


def _summed(name: str, left: Term, right: Term, shape: tuple[int, ...]) -> Sum:
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


def _as_band(x: Tensor, shape: tuple[int, ...]) -> Band:
    """A tensor of at most two values that broadcasts to `shape`; NoBand for any other."""
    x = compact(x[(None,) * (len(shape) - x.dim())])
    inside = x.reshape(-1)[:1]
    same = _equal(x, inside)
    others = x[~same]
    outside = inside if others.numel() == 0 else others[:1]
    if not bool(_equal(others, outside).all()):
        raise NoBand
    if x.shape[-1] == 1:
        hi = torch.where(same[..., 0], shape[-1], 0)
        return Band(shape, torch.zeros_like(hi), hi, inside, outside)
    for chosen, first, second in ((same, inside, outside), (~same, outside, inside)):
        runs = runs_of(chosen)
        if runs is not None:
            return Band(shape, *runs, first, second)
    raise NoBand


def _equal(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise, where a NaN equals a NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def _joined(node: Node, known: Mapping[int, Known], shape: tuple[int, ...]) -> Band:
    """A pointwise operator on bands: its value for each choice of inside and outside, then runs of equal values."""
    bands: dict[int, Band] = {}
    for ref in dict.fromkeys(node.refs):
        value = known[ref]
        if isinstance(value, Sum):
            raise NoBand
        if isinstance(value, Tensor) and value.numel() != 1:
            value = _as_band(value, shape)
        if isinstance(value, Band):
            bands[ref] = value
    if not bands:
        raise NoBand
    results = []
    for choice in product((False, True), repeat=len(bands)):
        results.append(_chosen(node, known, dict(zip(bands, choice, strict=True)), bands))
    return _runs_of_equal(list(bands.values()), results, shape)


def _chosen(node: Node, known: Mapping[int, Known], inside: Mapping[int, bool], bands: Mapping[int, Band]) -> Tensor:
    """The operator's result (1,) where each band has its value inside, or outside."""

    def value(ref: int) -> Any:
        if ref not in bands:
            return known[ref]
        return bands[ref].inside if inside[ref] else bands[ref].outside

    args, kwargs = map_refs((node.args, node.kwargs), value)
    result: Tensor = resolve(node.target)(*args, **dict(kwargs))
    return result.reshape(1)


def _runs_of_equal(bands: Sequence[Band], results: Sequence[Tensor], shape: tuple[int, ...]) -> Band:
    """The band whose value is results[k] where the bands are inside as the k-th choice says.

    NoBand if it has no such form. Choices are all of (outside, inside) for each band, those of the last band varying first.
    """
    values: list[Tensor] = []  # the different ones
    kinds: list[int] = []  # of each result, which of them it is
    for result in results:
        kind = 0
        while kind < len(values) and not bool(_equal(values[kind], result)):
            kind += 1
        if kind == len(values):
            values.append(result)
        kinds.append(kind)
    # Every row is cut where any band begins or ends; within a segment all bands are constant.
    ends: list[Tensor] = []
    for band in bands:
        for end in (band.lo, band.hi):
            ends.append(end[(None,) * (len(shape) - 1 - end.dim())])
    lead = torch.broadcast_shapes(*(end.shape for end in ends))
    cuts = torch.stack([end.expand(lead) for end in ends], -1).sort(-1).values
    first, last = torch.zeros_like(cuts[..., :1]), torch.full_like(cuts[..., :1], shape[-1])
    starts, stops = torch.cat([first, cuts], -1), torch.cat([cuts, last], -1)
    kind_of = torch.tensor(kinds)
    code = torch.zeros_like(starts)
    for band_lo, band_hi in zip(ends[::2], ends[1::2], strict=True):
        here = (starts >= band_lo.unsqueeze(-1)) & (stops <= band_hi.unsqueeze(-1))
        code = code * 2 + here
    kind_at = torch.where(starts < stops, kind_of[code], -1)
    present = [kind for kind in range(len(values)) if bool((kind_at == kind).any())]
    if len(present) == 1:
        whole = torch.zeros((1,) * (len(shape) - 1), dtype=torch.int64)
        return Band(shape, whole, whole + shape[-1], values[present[0]], values[present[0]])
    if len(present) != 2:
        raise NoBand
    for inside, outside in permutations(present):
        chosen = kind_at == inside
        lo = torch.where(chosen, starts, shape[-1]).amin(-1)
        hi = torch.where(chosen, stops, 0).amax(-1)
        length = torch.where(chosen, stops - starts, 0).sum(-1)
        if torch.equal(length, (hi - lo).clamp(min=0)):
            return Band(shape, lo, torch.maximum(lo, hi), values[inside], values[outside])
    raise NoBand


# ---- operators ----


FACTORIES = {"aten.full.default", "aten.zeros.default", "aten.ones.default"}


def _constant(node: Node, shape: tuple[int, ...]) -> Band:
    value = resolve(node.target)((1,), *node.args[1:], **dict(node.kwargs))
    whole = torch.zeros((1,) * (len(shape) - 1), dtype=torch.int64)
    return Band(shape, whole, whole + shape[-1], value, value)


def _viewed(node: Node, source: Known, shape: tuple[int, ...]) -> Band:
    """A view, or a triangle, of a band or of a tensor that is no larger than what comes out or lies there already."""
    if isinstance(source, Tensor):
        source = _as_band(source, shape if node.target == "aten.expand.default" else tuple(source.shape))
    if not isinstance(source, Band):
        raise NoBand
    return VIEWS[node.target](source, node.args[1:], shape)


def _reshaped(band: Band, args: tuple[Any, ...], shape: tuple[int, ...]) -> Band:
    """Any view that leaves the columns as they are."""
    if shape[-1] != band.shape[-1] or _numel(shape) != _numel(band.shape):
        raise NoBand
    lo, hi = (band.rows_of(end).reshape(shape[:-1]) for end in (band.lo, band.hi))
    return band.with_runs(shape, lo, hi)


def _expanded(band: Band, args: tuple[Any, ...], shape: tuple[int, ...]) -> Band:
    if shape[-1] != band.shape[-1]:
        raise NoBand
    return band.with_runs(shape, band.lo, band.hi)


def _sliced(band: Band, args: tuple[Any, ...], shape: tuple[int, ...]) -> Band:
    given: list[Any] = [0, None, None, 1]
    given[: len(args)] = args
    dim, start, stop, step = given
    dim %= len(band.shape)
    first, last, stride = slice(start, stop, step).indices(band.shape[dim])
    if dim < len(band.shape) - 1:
        rows = (slice(None),) * dim + (slice(first, last, stride),)
        return band.with_runs(shape, band.rows_of(band.lo)[rows], band.rows_of(band.hi)[rows])
    if stride != 1:
        raise NoBand
    lo, hi = ((end - first).clamp(0, last - first) for end in (band.lo, band.hi))
    return band.with_runs(shape, lo, hi)


def _selected(band: Band, args: tuple[Any, ...], shape: tuple[int, ...]) -> Band:
    dim = args[0] % len(band.shape)
    if dim == len(band.shape) - 1:
        raise NoBand
    lo, hi = (band.rows_of(end).select(dim, args[1]) for end in (band.lo, band.hi))
    return band.with_runs(shape, lo, hi)


def _triangle(lower: bool) -> Callable[[Band, tuple[Any, ...], tuple[int, ...]], Band]:
    """tril keeps columns up to i + diagonal, triu those from there on; the others are zero."""

    def apply(band: Band, args: tuple[Any, ...], shape: tuple[int, ...]) -> Band:
        diagonal = args[0] if args else 0
        here = torch.arange(shape[-2]) + diagonal
        columns = shape[-1]
        if lower:
            lo, hi = torch.zeros_like(here), (here + 1).clamp(0, columns)
        else:
            lo, hi = here.clamp(0, columns), torch.full_like(here, columns)
        kept = Band(shape, lo, hi, band.inside, band.inside)
        zero = torch.zeros_like(band.inside)
        results = []
        for inside, keep in product((False, True), repeat=2):
            value = band.inside if inside else band.outside
            results.append(value if keep else zero)
        return _runs_of_equal([band, kept], results, shape)

    return apply


VIEWS: Mapping[str, Callable[[Band, tuple[Any, ...], tuple[int, ...]], Band]] = {
    "aten.view.default": _reshaped,
    "aten._unsafe_view.default": _reshaped,
    "aten.reshape.default": _reshaped,
    "aten.unsqueeze.default": _reshaped,
    "aten.squeeze.default": _reshaped,
    "aten.squeeze.dim": _reshaped,
    "aten.squeeze.dims": _reshaped,
    "aten.expand.default": _expanded,
    "aten.slice.Tensor": _sliced,
    "aten.select.int": _selected,
    "aten.tril.default": _triangle(lower=True),
    "aten.triu.default": _triangle(lower=False),
}
# Pointwise, without torch's tag.
POINTWISE = {
    "aten._to_copy.default", "aten.alias.default", "aten.detach.default", "aten.lift_fresh_copy.default",
    "aten.masked_fill.Tensor", "aten.where.Scalar", "aten.where.ScalarOther", "aten.where.ScalarSelf",
    "aten.zeros_like.default", "aten.ones_like.default", "aten.full_like.default",
}  # fmt: skip
