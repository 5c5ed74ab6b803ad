"""Writing through views: the value of a parent after one of its views was given a new value.

Problem: `x[1:].add_(1)` changes `x`. Idea: every view has a scatter form that puts a new part into a copy of the
whole; views that only rename or reorder dims have an inverse. Anything else goes through the flat positions of the
elements that the view shows.

    slice -> slice_scatter      select -> select_scatter      view, permute, t -> their inverse
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import torch

from colofunc.errors import TraceError
from colofunc.program.ir import Ref, map_refs

if TYPE_CHECKING:
    from colofunc.program.tracing.record import Cell, Recorder

_RESHAPES = {
    "aten.view.default", "aten._unsafe_view.default", "aten._reshape_alias.default", "aten.unsqueeze.default",
    "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
}  # fmt: skip
_SCATTERS = {
    "aten.slice.Tensor": "aten.slice_scatter.default",
    "aten.select.int": "aten.select_scatter.default",
    "aten.diagonal.default": "aten.diagonal_scatter.default",
}
_INVOLUTIONS = {"aten.t.default", "aten.transpose.int", "aten._conj.default", "aten._neg_view.default"}
_INVERSES = {
    "aten.view_as_real.default": "aten.view_as_complex.default",
    "aten.view_as_complex.default": "aten.view_as_real.default",
}


def write_back(rec: Recorder, cell: Cell, parent: int, new: int) -> int:
    """The parent's value with the part that `cell` shows replaced by value `new`."""
    whole, part = rec.values[parent], rec.values[new]
    target = cell.target
    if target == "":
        return new
    if target in _RESHAPES or (target == "aten.expand.default" and prod(whole.shape) == prod(part.shape)):
        return rec.emit1("aten.view.default", (Ref(new), whole.shape), whole.shape, whole.dtype)
    if target in _INVOLUTIONS:
        return rec.emit1(target, (Ref(new), *cell.args[1:]), whole.shape, whole.dtype)
    if target == "aten.permute.default":
        order = [d % len(cell.args[1]) for d in cell.args[1]]
        inverse = tuple(order.index(d) for d in range(len(order)))
        return rec.emit1(target, (Ref(new), inverse), whole.shape, whole.dtype)
    if target in _SCATTERS:
        return rec.emit1(_SCATTERS[target], (Ref(parent), Ref(new), *cell.args[1:]), whole.shape, whole.dtype)
    if target in _INVERSES:
        return rec.emit1(_INVERSES[target], (Ref(new),), whole.shape, whole.dtype)
    if target == "aten.view.dtype":
        return rec.emit1(target, (Ref(new), whole.dtype), whole.shape, whole.dtype)
    if target == "aten.expand.default":
        raise TraceError("an in-place write to an expanded tensor, whose elements share memory; clone it first")
    return _by_position(rec, cell, parent, new)


def _by_position(rec: Recorder, cell: Cell, parent: int, new: int) -> int:
    """Any other view: look up which flat positions of the parent it shows, and put the new elements there."""
    whole, part = rec.values[parent], rec.values[new]
    numel = prod(whole.shape)
    flat = rec.emit1("aten.arange.default", (numel,), (numel,), torch.int64)
    grid = rec.emit1("aten.view.default", (Ref(flat), whole.shape), whole.shape, torch.int64)
    args = map_refs(cell.args, lambda i: Ref(grid) if i == -1 else Ref(i))
    shown = rec.emit(cell.target, args, cell.kwargs, [(part.shape, torch.int64)])[0]
    count = (prod(part.shape),)
    where = rec.emit1("aten.view.default", (Ref(shown), count), count, torch.int64)
    what = rec.emit1("aten.view.default", (Ref(new), count), count, part.dtype)
    source = rec.emit1("aten.view.default", (Ref(parent), (numel,)), (numel,), whole.dtype)
    put = rec.emit1("aten.index_put.default", (Ref(source), (Ref(where),), Ref(what)), (numel,), whole.dtype)
    return rec.emit1("aten.view.default", (Ref(put), whole.shape), whole.shape, whole.dtype)


def view_calls(
    target: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...], shapes: list[tuple[int, ...]]
) -> list[tuple[str, tuple[Any, ...]]]:
    """One call per result of a view operator, with `Ref(-1)` for the viewed tensor; split and unbind become slices."""
    here = Ref(-1)
    rest = args[1:]
    named = dict(kwargs)
    if target == "aten.unbind.int":
        dim = rest[0] if rest else named.get("dim", 0)
        return [("aten.select.int", (here, dim, i)) for i in range(len(shapes))]
    if target in ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default"):
        dim = rest[1] if len(rest) > 1 else named.get("dim", 0)
        calls, start = [], 0
        for shape in shapes:
            size = shape[dim]
            calls.append(("aten.slice.Tensor", (here, dim, start, start + size)))
            start += size
        return calls
    return [(target, (here, *rest))]
