"""Writing through views: the value of a parent after one of its views was given a new value.

Problem: `x[1:].add_(1)` changes `x`. Idea: every view has a scatter form that puts a new part into a copy of the
whole; views that only rename or reorder dims have an inverse. Anything else goes through the flat positions of the
elements that the view shows.

    slice -> slice_scatter      select -> select_scatter      view, permute, t -> their inverse

A view that shows an element twice (`expand`, overlapping `unfold`) has a value whose parts must stay equal. What is
written to a part of it is put where that part lies in the nearest tensor above that has every element once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from colofunc.errors import TraceError
from colofunc.ops.targets import keeps_order
from colofunc.program.ir import Ref, map_refs
from colofunc.program.tracing.infer import Meta
from colofunc.program.tracing.meta import user_line

if TYPE_CHECKING:
    from colofunc.program.tracing.record import Cell, Recorder

# Elements of a tensor with odd strides whose places are compared one by one.
MOST_COUNTED = 1 << 16
_SCATTERS = {
    "aten.slice.Tensor": "aten.slice_scatter.default",
    "aten.select.int": "aten.select_scatter.default",
    "aten.diagonal.default": "aten.diagonal_scatter.default",
}
_OTHER_VALUES = {"aten._conj_physical.default", "aten.neg.default"}
_INVOLUTIONS = {"aten.t.default", "aten.transpose.int", *_OTHER_VALUES}
SPLITS = (
    "aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.unsafe_split.Tensor",
    "aten.unsafe_split_with_sizes.default",
)  # fmt: skip
_INVERSES = {
    "aten.view_as_real.default": "aten.view_as_complex.default",
    "aten.view_as_complex.default": "aten.view_as_real.default",
}


def path_to_write(cell: Cell) -> list[Cell]:
    """The views from the tensor that a write to `cell` gives a new value, outermost first; the last one is `cell`.

    That tensor is the parent of the first. Mostly it is the parent of `cell`; see above for where it is further up.
    """
    path = [cell]
    above = cell.parent
    found = path
    while above is not None and above.parent is not None:
        path = [above, *path]
        if repeats(above.meta):
            found = path
        above = above.parent
    return found


def repeats(meta: Meta) -> bool:
    """Whether strides lead to one element twice; also said of large tensors whose strides are too odd to tell."""
    reach = 0
    odd = False
    for stride, size in sorted(
        (stride, size) for size, stride in zip(meta.shape, meta.strides, strict=True) if size > 1
    ):
        if stride == 0:
            return True
        odd = odd or stride <= reach
        reach += (size - 1) * stride
    if not odd or prod(meta.shape) > MOST_COUNTED:
        return odd
    places = [0]
    for stride, size in zip(meta.strides, meta.shape, strict=True):
        places = [place + i * stride for place in places for i in range(size)]
    return len(set(places)) < len(places)


def write_back(rec: Recorder, path: Sequence[Cell], parent: int, new: int) -> int:
    """The value `parent` with the part that the views of `path` show of it replaced by value `new`."""
    cell = path[-1]
    if repeats(cell.meta) and cell.target != "":
        raise TraceError(
            f"an in-place write at {user_line()} to a tensor of shape {cell.meta.shape} whose elements share memory "
            "(expand, overlapping windows); clone it first"
        )
    if len(path) > 1:
        return _by_position(rec, path, parent, new)
    whole, part = rec.values[parent], rec.values[new]
    target = cell.target
    if target == "":
        return new
    if keeps_order(target) or (target == "aten.expand.default" and prod(whole.shape) == prod(part.shape)):
        return rec.emit1("aten.view.default", (Ref(new), whole.shape), whole.shape, whole.dtype)
    if target in _INVOLUTIONS:
        return rec.emit1(target, (Ref(new), *cell.args[1:]), whole.shape, whole.dtype)
    if target == "aten.permute.default":
        order = [dim % len(cell.args[1]) for dim in cell.args[1]]
        inverse = tuple(order.index(d) for d in range(len(order)))
        return rec.emit1(target, (Ref(new), inverse), whole.shape, whole.dtype)
    if target in _SCATTERS:
        return rec.emit1(_SCATTERS[target], (Ref(parent), Ref(new), *cell.args[1:]), whole.shape, whole.dtype)
    if target in _INVERSES:
        return rec.emit1(_INVERSES[target], (Ref(new),), whole.shape, whole.dtype)
    if target == "aten.view.dtype":
        return rec.emit1(target, (Ref(new), whole.dtype), whole.shape, whole.dtype)
    return _by_position(rec, path, parent, new)


def _by_position(rec: Recorder, path: Sequence[Cell], parent: int, new: int) -> int:
    """Any other view: look up which flat positions of the parent it shows, and put the new elements there."""
    whole, part = rec.values[parent], rec.values[new]
    if any(cell.meta.dtype != whole.dtype or cell.target in _OTHER_VALUES for cell in path):
        raise TraceError(
            f"an in-place write at {user_line()} to a part of a tensor whose elements share memory, through a view "
            f"that shows them conjugated, negated or as another dtype than {whole.dtype}; clone it first"
        )
    numel = prod(whole.shape)
    flat = rec.emit1("aten.arange.default", (numel,), (numel,), torch.int64)
    grid = rec.emit1("aten.view.default", (Ref(flat), whole.shape), whole.shape, torch.int64)
    shown = grid
    for cell in path:
        if cell.target:
            args = on_parent(cell.args, shown)
            shown = rec.emit(cell.target, args, cell.kwargs, [(cell.meta.shape, torch.int64)])[0]
    count = (prod(part.shape),)
    where = rec.emit1("aten.view.default", (Ref(shown), count), count, torch.int64)
    what = rec.emit1("aten.view.default", (Ref(new), count), count, part.dtype)
    source = rec.emit1("aten.view.default", (Ref(parent), (numel,)), (numel,), whole.dtype)
    put = rec.emit1("aten.index_put.default", (Ref(source), (Ref(where),), Ref(what)), (numel,), whole.dtype)
    return rec.emit1("aten.view.default", (Ref(put), whole.shape), whole.shape, whole.dtype)


def on_parent(args: tuple[Any, ...], viewed: int) -> Any:
    """The arguments of a view with `viewed` in the place of its parent."""
    return map_refs(args, lambda i: Ref(viewed) if i == -1 else Ref(i))


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
    if target in SPLITS:
        dim = rest[1] if len(rest) > 1 else named.get("dim", 0)
        calls, start = [], 0
        for shape in shapes:
            size = shape[dim]
            calls.append(("aten.slice.Tensor", (here, dim, start, start + size)))
            start += size
        return calls
    return [(target, (here, *rest))]
