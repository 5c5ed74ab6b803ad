"""Where copies of a value differ: every copy that a layout holds on a mesh, against the whole tensor.

Problem: a value lies in parts, some of them several times, and one wrong copy is enough to spoil a step. Idea: the ranks
that hold one whole tensor between them are joined and compared; what is pending is reduced first.

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
from colofunc.program.closeness import apart, scaled_difference
from colofunc.spec.layout import Layout
from colofunc.spec.parts import join


def differing(
    shards: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, expected: torch.Tensor, allowed: float | torch.Tensor
) -> tuple[float, tuple[int, ...]]:
    """(largest scaled difference, ranks of the copies that are further off than `allowed`; () if all are within)."""
    worst = 0.0
    wrong: list[int] = []
    seen: dict[tuple[int, ...], tuple[float, bool]] = {}
    for ranks, order in copies_of(layout, mesh):
        mine = [shards[r] for r in order]
        key = tuple(id(x) for x in mine)
        if key not in seen:
            seen[key] = judged(join(mine, layout, mesh).cpu(), expected, allowed)
        worst = max(worst, seen[key][0])
        if not seen[key][1]:
            wrong += ranks
    return worst, tuple(sorted(wrong))


def judged(a: torch.Tensor, b: torch.Tensor, allowed: float | torch.Tensor) -> tuple[float, bool]:
    """(scaled difference, whether it is allowed)."""
    far = distance(a, b)
    if isinstance(allowed, float | int):
        return far, far <= allowed
    return far, math.isfinite(far) and bool((apart(a, b) <= allowed)[torch.isfinite(b)].all())


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if b.dtype.is_floating_point or b.dtype.is_complex:
        return scaled_difference(a.to(b.dtype), b)
    return float((a != b).sum())


@lru_cache(maxsize=1 << 12)
def copies_of(layout: Layout, mesh: Mesh) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """The whole tensors that a layout holds: (ranks that hold one, per rank: whose part stands for its own)."""
    tied = {*layout.axes, *(a for a, _ in layout.pending)}
    free: dict[str, Sequence[int]] = {a: range(mesh.axis_size(a)) for a in mesh.axis_names if a not in tied}
    if layout.at is not None:
        free[layout.at[0]] = layout.at[1]
    return tuple(_copies(free, mesh))


def _copies(free: Mapping[str, Sequence[int]], mesh: Mesh) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    everyone = range(mesh.size)
    for index in product(*free.values()):
        here = dict(zip(free, index, strict=True))
        members = tuple(r for r in everyone if all(mesh.coordinates(r)[a] == i for a, i in here.items()))
        yield members, tuple(mesh.rank_at({**mesh.coordinates(r), **here}) for r in everyone)
