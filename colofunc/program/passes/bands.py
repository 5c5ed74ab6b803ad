"""Bands: tensors of two values, with the first of them in one run of columns of every row.

    positions[j] <= positions[i]          ->  columns 0 : i + 1          of row i

What is made of bands is a band where its runs of equal values are two in a row at most; all else is `NoBand`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import attrs
import torch
from torch import Tensor

from colofunc.program.passes.repeated import compact

# Elements of a dense mask that are looked at in one go.
MAX_BLOCK = 1 << 22


class NoBand(Exception):
    """A value is not of the form that bands can say; nobody outside of these modules sees it."""


@attrs.frozen(eq=False)
class BandedTensor:
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

    def with_runs(self, shape: tuple[int, ...], lo: Tensor, hi: Tensor) -> BandedTensor:
        return attrs.evolve(self, shape=shape, lo=lo, hi=hi)


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


def as_band(x: Tensor, shape: tuple[int, ...]) -> BandedTensor:
    """A tensor of at most two values that broadcasts to `shape`; NoBand for any other."""
    x = compact(x[(None,) * (len(shape) - x.dim())])
    inside = x.reshape(-1)[:1]
    same = equal(x, inside)
    others = x[~same]
    outside = inside if others.numel() == 0 else others[:1]
    if not bool(equal(others, outside).all()):
        raise NoBand
    if x.shape[-1] == 1:
        hi = torch.where(same[..., 0], shape[-1], 0)
        return BandedTensor(shape, torch.zeros_like(hi), hi, inside, outside)
    for chosen, first, second in ((same, inside, outside), (~same, outside, inside)):
        runs = runs_of(chosen)
        if runs is not None:
            return BandedTensor(shape, *runs, first, second)
    raise NoBand


def equal(x: Tensor, y: Tensor) -> Tensor:
    """Elementwise, where a NaN equals a NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def runs_of_equal(bands: Sequence[BandedTensor], results: Sequence[Tensor], shape: tuple[int, ...]) -> BandedTensor:
    """The band whose value is results[k] where the bands are inside as the k-th choice says.

    NoBand if it has no such form. Choices are all of (outside, inside) for each band, those of the last band varying first.
    """
    values: list[Tensor] = []  # the different ones
    kinds: list[int] = []  # of each result, which of them it is
    for result in results:
        kind = 0
        while kind < len(values) and not bool(equal(values[kind], result)):
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
        return BandedTensor(shape, whole, whole + shape[-1], values[present[0]], values[present[0]])
    if len(present) != 2:
        raise NoBand
    for inside, outside in permutations(present):
        chosen = kind_at == inside
        lo = torch.where(chosen, starts, shape[-1]).amin(-1)
        hi = torch.where(chosen, stops, 0).amax(-1)
        length = torch.where(chosen, stops - starts, 0).sum(-1)
        if torch.equal(length, (hi - lo).clamp(min=0)):
            return BandedTensor(shape, lo, torch.maximum(lo, hi), values[inside], values[outside])
    raise NoBand
