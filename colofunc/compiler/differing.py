"""Copies of a value that differ from what is expected, and the ranks that hold them.

Problem: a value lies in parts, some of them several times, and one wrong copy is enough to spoil a step. Idea: the
ranks that hold one whole tensor between them are joined and compared; what is pending is reduced first.

    worst, ranks = differing(shards, layout, mesh, expected, 1e-10)      # ranks: those of the copies that are off

What a copy may be off by is a share of max(1, max|expected|), or an absolute difference for each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product

import torch

from colofunc.mesh import Mesh
from colofunc.program.closeness import absolute_difference, scaled_difference
from colofunc.spec.layout import Layout
from colofunc.spec.parts import join


def differing(
    shards: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, expected: torch.Tensor, allowed: float | torch.Tensor
) -> tuple[float, tuple[int, ...]]:
    """(largest scaled difference, ranks of the copies that are further off than `allowed`; () if all are within)."""
    worst = 0.0
    wrong: list[int] = []
    # Ranks of a simulated mesh share equal parts, so a copy is compared once for all who hold the same tensors.
    judged_before: dict[tuple[int, ...], tuple[float, bool]] = {}
    for ranks, sources in whole_copies(layout, mesh):
        parts = [shards[rank] for rank in sources]
        key = tuple(id(part) for part in parts)
        if key not in judged_before:
            judged_before[key] = judged(join(parts, layout, mesh).cpu(), expected, allowed)
        difference, is_allowed = judged_before[key]
        worst = max(worst, difference)
        if not is_allowed:
            wrong += ranks
    return worst, tuple(sorted(wrong))


def judged(found: torch.Tensor, expected: torch.Tensor, allowed: float | torch.Tensor) -> tuple[float, bool]:
    """(scaled difference, whether it is allowed)."""
    difference = distance(found, expected)
    if isinstance(allowed, float | int):
        return difference, difference <= allowed
    is_near = (absolute_difference(found, expected) <= allowed)[torch.isfinite(expected)]
    return difference, math.isfinite(difference) and bool(is_near.all())


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The scaled difference of numbers with fractions; of others how many elements differ."""
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        return scaled_difference(found.to(expected.dtype), expected)
    return float((found != expected).sum())


@lru_cache(maxsize=1 << 12)
def whole_copies(layout: Layout, mesh: Mesh) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The whole tensors that a layout holds: (ranks that hold one, per rank: whose part stands for its own)."""
    tied = {*layout.axes, *(axis for axis, _ in layout.pending)}
    free: dict[str, Sequence[int]] = {}
    for axis in mesh.axis_names:
        if axis not in tied:
            free[axis] = range(mesh.axis_size(axis))
    if layout.at is not None:
        free[layout.at[0]] = layout.at[1]
    return tuple(_copies(free, mesh))


def _copies(free: Mapping[str, Sequence[int]], mesh: Mesh) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    for indices in product(*free.values()):
        here = dict(zip(free, indices, strict=True))
        members, sources = list[int](), list[int]()
        for rank in range(mesh.size):
            there = {**mesh.coordinates(rank), **here}
            source = mesh.rank_at(there)
            sources.append(source)
            if source == rank:
                members.append(rank)
        yield tuple(members), tuple(sources)
