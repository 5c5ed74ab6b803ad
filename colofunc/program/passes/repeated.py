"""Tensors that repeat: what is the same along a dim is computed and kept once.

Problem: a model expands the positions of one sequence to every sequence of the batch before it compares them. For 512
sequences of 8,192 tokens these are 4 million equal numbers, and more than is computed while tracing, though one
sequence says it all. Idea: an expanded tensor has stride 0 along the dims that repeat. An operator whose operands
repeat along a dim runs on one index of that dim, and its result is expanded again.

    positions (512, 8192), strides (0, 1)   - 1         ->  computed as (1, 8192), expanded to (512, 8192)
    cat((512, 1), (512, 8192), dim=-1)                  ->  computed as (1, 8193)
    positions[arange(512)[:, None], rows[None]]         ->  which of equal sequences is read does not matter
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.targets import resolve
from colofunc.program.ir import Node, map_refs

# These give views of whatever they are given, with its strides.
VIEWS = frozenset(
    {"aten.expand.default", "aten.unsqueeze.default", "aten.slice.Tensor", "aten.select.int", "aten.alias.default"}
)
# target -> position of the dim along which it works; along the others it does the same for every index.
ALONG_A_DIM = {"aten.cat.default": 1, "aten.cumsum.default": 1}


def compact(x: Tensor) -> Tensor:
    """`x` with a size of 1 where it repeats."""
    for dim in range(x.dim()):
        if x.stride(dim) == 0 and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def without_repeats(x: Tensor, most: int) -> Tensor | None:
    """`x` without repeated dims; None where that takes more than so many elements."""
    if compact(x).shape == x.shape:
        return x
    return x.contiguous() if x.numel() <= most else None


def computed(
    node: Node, operands: dict[int, Tensor], shape: tuple[int, ...], is_pointwise: bool, most: int
) -> Tensor | None:
    """The one result of a node, of `shape`, expanded where it repeats.

    None: it has too many elements, or is no operator for this.
    """
    if node.target in VIEWS:
        return _run(node, operands)
    if node.target in ALONG_A_DIM:
        return _along_a_dim(node, operands, shape, most)
    if node.target == "aten.index.Tensor":
        return _indexed(node, operands, shape, most)
    if not is_pointwise or not operands:
        return None
    operands = {ref: compact(x) for ref, x in operands.items()}
    if prod(torch.broadcast_shapes(*(x.shape for x in operands.values()))) > most:
        return None
    return _expanded(_run(node, operands), shape)


def _run(node: Node, operands: dict[int, Tensor]) -> Tensor:
    args, kwargs = map_refs((node.args, node.kwargs), operands.__getitem__)
    result: Tensor = resolve(node.target)(*args, **dict(kwargs))
    return result


def _expanded(result: Tensor, shape: tuple[int, ...]) -> Tensor:
    return result if tuple(result.shape) == shape else result.expand(shape)


def _along_a_dim(node: Node, operands: dict[int, Tensor], shape: tuple[int, ...], most: int) -> Tensor | None:
    """All operands have the dims of the result.

    Those that repeat in all of them, but the one along which it works, are taken once.
    """
    at = ALONG_A_DIM[node.target]
    along = (node.args[at] if len(node.args) > at else 0) % len(shape)
    if any(x.dim() != len(shape) for x in operands.values()):
        return None
    sizes = list(shape)
    for dim in range(len(shape)):
        if dim != along and all(x.stride(dim) == 0 for x in operands.values()):
            operands = {ref: x.narrow(dim, 0, 1) for ref, x in operands.items()}
            sizes[dim] = 1
    return _expanded(_run(node, operands), shape) if prod(sizes) <= most else None


def _indexed(node: Node, operands: dict[int, Tensor], shape: tuple[int, ...], most: int) -> Tensor | None:
    """x[i, j, ..] with integers for every dim of x."""
    x, indices = operands[node.args[0].id], [None if index is None else operands[index.id] for index in node.args[1]]
    if len(indices) != x.dim():
        return None
    small: list[Tensor] = []
    for dim, index in enumerate(indices):
        if index is None or index.dtype != torch.int64:
            return None
        repeats = x.stride(dim) == 0
        small.append(torch.zeros_like(index[(slice(0, 1),) * index.dim()]) if repeats else compact(index))
    if 0 in shape or prod(_broadcast(small)) > most:
        return None
    return _expanded(compact(x)[tuple(small)], shape)


def _broadcast(tensors: Sequence[Any]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*(x.shape for x in tensors)))
