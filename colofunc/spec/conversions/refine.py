"""The common refinement of two layouts: what a conversion is, as a puzzle with few pieces.

Problem: layouts cut dims in different places. Idea: cut every dim at the boundaries of both, and every axis where a
boundary falls inside it. Then both layouts put the same *parts* of axes into the same *slots*, and a conversion moves
parts between slots, copies (R) and pending sums. With dp=2, tp=2, from `(dp tp b) d` to `(tp b) (dp d)`:

    slots of dim 0: 2, 2, rest  ·  dim 1: 2, rest       dp: slot 0 -> slot 3 · tp: slot 1 -> slot 0

Each part also has a scratch slot of its own where a local factor has room: a place to be in between.
Dims whose boundaries do not nest, and dims padded to different sizes, have no refinement and go through a whole dim.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import prod

import attrs

from colofunc.mesh import Mesh
from colofunc.spec.layout import Dim, Layout

COPY = -1  # a part of the mesh that holds a copy
PENDING = {"sum": -2, "max": -3, "min": -4}  # sums are inside maxima inside minima: the larger is reduced first
HOW = {code: how for how, code in PENDING.items()}

Locations = tuple[int, ...]  # per part: a slot (0 and up), COPY or a value of PENDING


@attrs.frozen
class AxisPart:
    """A mesh axis or a part of one: index (i // stride) % size at index i of the axis."""

    axis: str
    stride: int
    size: int
    name: str


@attrs.frozen(eq=False)
class Puzzle:
    """Parts to move. `dims`: slots of each dim, major first; `sizes`: of slots; `scratch`: own slot per part, or -1."""

    parts: tuple[AxisPart, ...]
    sizes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]
    start: Locations
    goal: Locations
    scratch: tuple[int, ...]


@lru_cache(maxsize=1 << 14)
def refine(src: Layout, dst: Layout, mesh: Mesh, apart: str | None = None) -> Puzzle | frozenset[int]:
    """The puzzle, or the dims that must be whole in between. apart: an axis that holds no copies, so that it cannot
    help to reduce.
    """
    dim_cuts, axis_cuts, bad = _cuts(src, dst)
    if bad:
        return bad
    parts = _parts(src, dst, mesh, apart, axis_cuts)
    index = {(p.axis, p.stride): k for k, p in enumerate(parts)}
    start, goal = [COPY] * len(parts), [COPY] * len(parts)
    sizes: list[int] = []
    dims: list[list[int]] = []
    for d, cuts in enumerate(dim_cuts):
        order = sorted(cuts, reverse=True)
        at = {low: len(sizes) + k for k, low in enumerate(order[1:])}
        sizes += [high // low for high, low in pairwise(order)]
        dims.append(list(at.values()))
        for layout, where in ((src, start), (dst, goal)):
            for base, size, axis in _walk(layout.dims[d]):
                for low in at:
                    if axis is not None and base <= low < base * size:
                        where[index[axis, low // base]] = at[low]
    for layout, where in ((src, start), (dst, goal)):
        for axis, how in layout.pending:
            for k, part in enumerate(parts):
                if part.axis == axis:
                    where[k] = PENDING[how]
    scratch = _add_scratch(parts, sizes, dims, start, goal)
    return Puzzle(parts, tuple(sizes), tuple(map(tuple, dims)), tuple(start), tuple(goal), scratch)


def _walk(dim: Dim) -> list[tuple[int, int, str | None]]:
    """(stride, size, axis) of the atoms of a dim."""
    out, base = [], 1
    for size, axis in reversed(dim):
        out.append((base, size, axis))
        base *= size
    return out


def _cuts(src: Layout, dst: Layout) -> tuple[list[set[int]], dict[str, set[int]], frozenset[int]]:
    """Strides where dims are cut, strides where axes are cut, and the dims for which that does not nest."""
    axis_cuts: dict[str, set[int]] = {}
    dim_cuts: list[set[int]] = [{1} for _ in src.dims]
    padded, bad = dst.padded_shape, set()
    for d, size in enumerate(src.padded_shape):
        if size != padded[d]:
            bad.add(d)
    if bad:
        return dim_cuts, axis_cuts, frozenset(bad)
    changed = True
    while changed:
        changed = False
        for layout in (src, dst):
            for d, dim in enumerate(layout.dims):
                cuts = dim_cuts[d]
                for base, size, axis in _walk(dim):
                    top = base * size
                    new = {base, top}
                    if axis is not None:
                        inner = axis_cuts.setdefault(axis, set())
                        for low in cuts:
                            if base < low < top and low // base not in inner:
                                if low % base or top % low:
                                    bad.add(d)
                                else:
                                    inner.add(low // base)
                                    changed = True
                        new |= {base * low for low in inner}
                    if not new <= cuts:
                        cuts |= new
                        changed = True
        if bad:
            return dim_cuts, axis_cuts, frozenset(bad)
    for d, cuts in enumerate(dim_cuts):
        if any(high % low for low, high in pairwise(sorted(cuts))):
            bad.add(d)
    return dim_cuts, axis_cuts, frozenset(bad)


def _parts(src: Layout, dst: Layout, mesh: Mesh, apart: str | None, cuts: dict[str, set[int]]) -> tuple[AxisPart, ...]:
    """Parts of all axes, in the mesh's order, major first. Axes that hold copies on both sides only help to reduce."""
    used = {*src.axes, *dst.axes, *(a for a, _ in src.pending), *(a for a, _ in dst.pending)}
    reduces = bool(set(src.pending) - set(dst.pending))
    out = []
    for axis, size in mesh.axes:
        if size == 1 or (axis not in used and (axis == apart or not reduces)):
            continue
        marks = sorted({1, size, *cuts.get(axis, ())}, reverse=True)
        for high, low in pairwise(marks):
            whole = (low, high) == (1, size)
            out.append(AxisPart(axis, low, high // low, axis if whole else f"{axis}[{low}:{high // low}]"))
    return tuple(out)


def _add_scratch(
    parts: tuple[AxisPart, ...], sizes: list[int], dims: list[list[int]], start: list[int], goal: list[int]
) -> tuple[int, ...]:
    """Cut a slot for each part out of the factors that are local on both sides; -1 where none has room."""
    taken = {*start, *goal}
    free = [slot for dim in dims for slot in dim if slot not in taken]
    home = {slot: dim for dim in dims for slot in dim}
    scratch = [-1] * len(parts)
    for k in sorted(range(len(parts)), key=lambda k: start[k] == goal[k]):  # those that move come first
        size = parts[k].size
        room = next((slot for slot in free if sizes[slot] % size == 0), None)
        if room is not None:
            sizes[room] //= size
            home[room].insert(home[room].index(room), len(sizes))  # major of what is left
            scratch[k] = len(sizes)
            sizes.append(size)
    return tuple(scratch)


def local_numel(puzzle: Puzzle, where: Locations) -> int:
    """Elements of one rank's part (padding included) with the parts at these locations."""
    return prod(puzzle.sizes) // prod(p.size for p, loc in zip(puzzle.parts, where, strict=True) if loc >= 0)
