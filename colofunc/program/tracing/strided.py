"""`as_strided` in words that a program can keep: view, slice, permute, expand.

Problem: strides speak of memory, and a value of a program has none: its layout is decided later. Idea: what torch asks
for with strides is nearly always a permutation, a broadcast or a range of a tensor that is contiguous in memory; say
that instead. Anything else (overlapping windows) keeps `as_strided`, on the contiguous tensor.

>>> explain((2, 3), (3, 2), (1, 3), 0)
[('aten.view.default', ((2, 3),)), ('aten.permute.default', ((1, 0),))]
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from colofunc.errors import TraceError
from colofunc.program.ir import Ref
from colofunc.program.tracing.infer import Meta, contiguous
from colofunc.program.tracing.meta import user_line
from colofunc.program.tracing.record import Cell, Recorder

ViewStep = tuple[str, tuple[Any, ...]]


def as_strided(rec: Recorder, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The view is taken from the root, brought into the order of its memory."""
    return rec.tensor(strided_cell(rec, *args, **kwargs))


def strided_cell(rec: Recorder, tensor: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Cell:
    cell = rec.cell(tensor)
    if cell.storage.scattered:
        raise TraceError(
            f"as_strided at {user_line()} reads the memory of input {cell.storage.name!r}, which is not contiguous, "
            "and a step takes its inputs as values without memory; pass it as .contiguous() and give the strides of "
            "that"
        )
    base = _in_dtype(rec, _memory_order(rec, cell.storage.root), cell.meta.dtype)
    offset = cell.meta.offset if storage_offset is None else storage_offset
    meta = Meta(tuple(size), tuple(stride), cell.meta.dtype, offset)
    steps = explain(base.meta.shape, meta.shape, meta.strides, offset)
    if steps is None:
        steps = [("aten.as_strided.default", (meta.shape, meta.strides, offset))]
    for target, rest in steps:
        base = _step(rec, base, target, rest)
    base.meta, base.key = meta, meta[:3]
    return base


def explain(
    base: tuple[int, ...], size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> list[ViewStep] | None:
    """Steps that make the strided view from a contiguous tensor of shape `base`; None if there are none."""
    total = prod(base)
    order = sorted((d for d in range(len(size)) if size[d] != 1 and stride[d] != 0), key=lambda d: -stride[d])
    sizes = [size[d] for d in order]
    if any(stride[d] != prod(sizes[place + 1 :]) for place, d in enumerate(order)) or 0 in size:
        return None
    count = prod(sizes)
    if offset < 0 or offset + count > total:
        return None
    steps: list[ViewStep] = []
    if count != total:
        steps += [("aten.view.default", ((total,),)), ("aten.slice.Tensor", (0, offset, offset + count, 1))]
    steps.append(("aten.view.default", (tuple(sizes),)))
    ranked = sorted(order)
    if ranked != order:
        steps.append(("aten.permute.default", (tuple(order.index(d) for d in ranked),)))
    with_ones = tuple(1 if stride[d] == 0 else size[d] for d in range(len(size)))
    if with_ones != tuple(size[d] for d in ranked):
        steps.append(("aten.view.default", (with_ones,)))
    if with_ones != size:
        steps.append(("aten.expand.default", (size,)))
    return steps


def _step(rec: Recorder, cell: Cell, target: str, rest: tuple[Any, ...]) -> Cell:
    """The child of `cell` by one view call."""
    shape = cell.meta.shape
    if target == "aten.slice.Tensor":
        shape = (rest[2] - rest[1],)
    elif target == "aten.permute.default":
        shape = tuple(shape[d] for d in rest[0])
    else:
        shape = rest[0]
    if target == "aten.view.default" and shape == cell.meta.shape:
        return cell.child(rec.read(cell), cell.meta, "", (), ())
    vid = rec.emit1(target, (Ref(rec.read(cell)), *rest), shape, cell.meta.dtype)
    return cell.child(vid, contiguous(shape, cell.meta.dtype), target, (Ref(-1), *rest), ())


def _in_dtype(rec: Recorder, base: Cell, dtype: torch.dtype) -> Cell:
    """The same memory as elements of `dtype`; strides and offsets count these."""
    if base.meta.dtype == dtype:
        return base
    if base.meta.dtype.is_complex or dtype.is_complex:
        raise TraceError(
            f"as_strided at {user_line()} on a view of {dtype} of a tensor of {base.meta.dtype}; clone the view first"
        )
    if not base.meta.shape:
        base = _step(rec, base, "aten.view.default", ((1,),))
    shape = (*base.meta.shape[:-1], base.meta.shape[-1] * base.meta.dtype.itemsize // dtype.itemsize)
    vid = rec.emit1("aten.view.dtype", (Ref(rec.read(base)), dtype), shape, dtype)
    return base.child(vid, contiguous(shape, dtype), "aten.view.dtype", (Ref(-1), dtype), ())


def _memory_order(rec: Recorder, root: Cell) -> Cell:
    """`root`, or its permutation that is contiguous in memory."""
    shape, strides, dtype, _ = root.meta
    if strides == contiguous(shape, dtype).strides or 0 in shape or not shape:
        return root
    order = tuple(sorted(range(len(shape)), key=lambda d: (-strides[d], shape[d] == 1, d)))
    meta = contiguous([shape[d] for d in order], dtype)
    vid = rec.emit1("aten.permute.default", (Ref(rec.read(root)), order), meta.shape, dtype)
    return root.child(vid, meta, "aten.permute.default", (Ref(-1), order), ())
