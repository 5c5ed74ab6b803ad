"""Views of bands, and the factories of constant ones: what operators that move columns or rows make of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.targets import KEEP_ORDER, resolve
from colofunc.program.ir import Node
from colofunc.program.passes.bands import BandedTensor, NoBand, as_band, runs_of_equal


def numel(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    return torch.Size(shape).numel()


FACTORIES = {"aten.full.default", "aten.zeros.default", "aten.ones.default"}


def constant(node: Node, shape: tuple[int, ...]) -> BandedTensor:
    value = resolve(node.target)((1,), *node.args[1:], **dict(node.kwargs))
    whole = torch.zeros((1,) * (len(shape) - 1), dtype=torch.int64)
    return BandedTensor(shape, whole, whole + shape[-1], value, value)


def viewed(node: Node, source: Any, shape: tuple[int, ...]) -> BandedTensor:
    """A view, or a triangle, of a band or of a tensor that is no larger than what comes out or lies there already."""
    if isinstance(source, Tensor):
        source = as_band(source, shape if node.target == "aten.expand.default" else tuple(source.shape))
    if not isinstance(source, BandedTensor):
        raise NoBand
    return VIEWS[node.target](source, node.args[1:], shape)


def _reshaped(band: BandedTensor, args: tuple[Any, ...], shape: tuple[int, ...]) -> BandedTensor:
    """Any view that leaves the columns as they are."""
    if shape[-1] != band.shape[-1] or numel(shape) != numel(band.shape):
        raise NoBand
    lo, hi = (band.rows_of(end).reshape(shape[:-1]) for end in (band.lo, band.hi))
    return band.with_runs(shape, lo, hi)


def _expanded(band: BandedTensor, args: tuple[Any, ...], shape: tuple[int, ...]) -> BandedTensor:
    if shape[-1] != band.shape[-1]:
        raise NoBand
    return band.with_runs(shape, band.lo, band.hi)


def _sliced(band: BandedTensor, args: tuple[Any, ...], shape: tuple[int, ...]) -> BandedTensor:
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


def _selected(band: BandedTensor, args: tuple[Any, ...], shape: tuple[int, ...]) -> BandedTensor:
    dim = args[0] % len(band.shape)
    if dim == len(band.shape) - 1:
        raise NoBand
    lo, hi = (band.rows_of(end).select(dim, args[1]) for end in (band.lo, band.hi))
    return band.with_runs(shape, lo, hi)


def _triangle(lower: bool) -> Callable[[BandedTensor, tuple[Any, ...], tuple[int, ...]], BandedTensor]:
    """tril keeps columns up to i + diagonal, triu those from there on; the others are zero."""

    def apply(band: BandedTensor, args: tuple[Any, ...], shape: tuple[int, ...]) -> BandedTensor:
        diagonal = args[0] if args else 0
        here = torch.arange(shape[-2]) + diagonal
        columns = shape[-1]
        if lower:
            lo, hi = torch.zeros_like(here), (here + 1).clamp(0, columns)
        else:
            lo, hi = here.clamp(0, columns), torch.full_like(here, columns)
        kept = BandedTensor(shape, lo, hi, band.inside, band.inside)
        zero = torch.zeros_like(band.inside)
        results = []
        for inside, keep in product((False, True), repeat=2):
            value = band.inside if inside else band.outside
            results.append(value if keep else zero)
        return runs_of_equal([band, kept], results, shape)

    return apply


VIEWS: Mapping[str, Callable[[BandedTensor, tuple[Any, ...], tuple[int, ...]], BandedTensor]] = {
    **dict.fromkeys(KEEP_ORDER, _reshaped),
    "aten.expand.default": _expanded,
    "aten.slice.Tensor": _sliced,
    "aten.select.int": _selected,
    "aten.tril.default": _triangle(lower=True),
    "aten.triu.default": _triangle(lower=False),
}
