"""Regions: which elements of a global tensor a stored piece or a rank's part holds.

Problem: a tensor that was saved on one mesh is loaded onto another, with other axes, sizes, stripes and padding. Idea:
a layout treats every dim by itself, so a part is a product of index sets, one per dim; the overlap of two parts is the
product of the overlaps. An index set is a start and nested strides, which says stripes and blocks as well as slices.

>>> IndexSpan(2, ((3, 1),)).indices()        # elements 2, 3, 4
array([2, 3, 4])
>>> common(Region((IndexSpan(0, ((4, 1),)),)), Region((IndexSpan(1, ((4, 2),)),)))   # 0-3 beside 1, 3, 5, 7
((slice(1, 4, 2),), (slice(0, 2, 1),))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import attrs
import numpy as np
import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Dim, Layout
from colofunc.spec.parts import holds

Pick = slice | np.ndarray  # positions along one dim


@attrs.frozen
class IndexSpan:
    """Indices `start + i*a + j*b + ...` for loops ((size of i, a), (size of j, b), ...), below `limit` if there is one.
    """

    start: int
    loops: tuple[tuple[int, int], ...]
    limit: int | None = None

    def indices(self) -> np.ndarray:
        """The indices in the order in which they lie in memory."""
        indices = np.array([self.start])
        for size, stride in self.loops:
            indices = (indices[:, None] + np.arange(size) * stride).reshape(-1)
        return indices if self.limit is None else indices[indices < self.limit]

    @property
    def bounds(self) -> tuple[int, int] | None:
        """(first, last + 1) where this is one run, else None."""
        if len(self.loops) > 1:
            return None
        size, stride = self.loops[0] if self.loops else (1, 1)
        # the stride of a loop of one says nothing
        if stride != 1 and size > 1:
            return None
        stop = self.start + size
        if self.limit is not None:
            stop = min(stop, self.limit)
        return min(self.start, stop), stop

    @property
    def size(self) -> int:
        bounds = self.bounds
        return bounds[1] - bounds[0] if bounds is not None else len(self.indices())

    def to_json(self) -> list[Any]:
        return [self.start, [list(loop) for loop in self.loops], self.limit]

    @staticmethod
    def from_json(data: Sequence[Any]) -> IndexSpan:
        start, loops, limit = data
        return IndexSpan(start, tuple((size, stride) for size, stride in loops), limit)


@attrs.frozen
class Region:
    """One span per dim."""

    spans: tuple[IndexSpan, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(span.size for span in self.spans)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_box(self) -> bool:
        return all(span.bounds is not None for span in self.spans)

    def text(self) -> str:
        """`[0:4, 8:16]`, or stripes as `start/size x stride`."""
        words = []
        for span in self.spans:
            bounds = span.bounds
            if bounds is not None:
                words.append(f"{bounds[0]}:{bounds[1]}")
                continue
            loops = " ".join(f"{size}x{stride}" for size, stride in span.loops)
            words.append(f"{span.start}/{loops}")
        return f"[{', '.join(words)}]"

    def to_json(self) -> list[Any]:
        return [span.to_json() for span in self.spans]

    @staticmethod
    def from_json(data: Sequence[Any]) -> Region:
        return Region(tuple(IndexSpan.from_json(span) for span in data))

    @staticmethod
    def whole(shape: Sequence[int]) -> Region:
        return Region(tuple(IndexSpan(0, ((size, 1),)) for size in shape))

    @staticmethod
    def box(starts: Sequence[int], sizes: Sequence[int]) -> Region:
        return Region(tuple(IndexSpan(start, ((size, 1),)) for start, size in zip(starts, sizes, strict=True)))


def region_of(layout: Layout, mesh: Mesh, rank: int) -> Region:
    """The elements that a rank's part holds, without padding."""
    return _region(layout, tuple(sorted(mesh.coordinates(rank).items())))


@lru_cache(maxsize=1 << 14)
def _region(layout: Layout, where: tuple[tuple[str, int], ...]) -> Region:
    coordinates = dict(where)
    spans = [_span(dim, size, coordinates) for dim, size in zip(layout.dims, layout.shape, strict=True)]
    return Region(tuple(spans))


def _span(dim: Dim, size: int, where: Mapping[str, int]) -> IndexSpan:
    """The indices of one dim that a rank holds: mesh axes move the start, local atoms are loops."""
    start = 0
    loops: list[tuple[int, int]] = []
    stride = prod(atom_size for atom_size, _ in dim)
    padded = stride > size
    for atom_size, axis in dim:
        stride = stride // atom_size if atom_size else 0
        if axis is None:
            loops.append((atom_size, stride))
        else:
            start += where[axis] * stride
    return IndexSpan(start, tuple(loops), size if padded else None)


def owners(layout: Layout, mesh: Mesh) -> dict[Region, list[int]]:
    """Distinct parts that hold something -> the ranks that hold each of them, in rank order."""
    found: dict[Region, list[int]] = {}
    for rank in range(mesh.size):
        if not holds(layout.at, mesh, rank):
            continue
        found.setdefault(region_of(layout, mesh, rank), []).append(rank)
    return {region: ranks for region, ranks in found.items() if region.numel or layout.shape.count(0)}


def positions(layout: Layout, mesh: Mesh, rank: int) -> tuple[Pick, ...]:
    """Where the elements of `region_of` lie in the rank's padded part."""
    found: list[Pick] = []
    for dim, size in zip(layout.dims, layout.shape, strict=True):
        # with its padding, which lies behind the dim's size
        span = attrs.evolve(_span(dim, size, mesh.coordinates(rank)), limit=None)
        found.append(_pick(np.flatnonzero(span.indices() < size)))
    return tuple(found)


def common(one: Region, other: Region) -> tuple[tuple[Pick, ...], tuple[Pick, ...]] | None:
    """Positions in `one` and in `other` of the elements that both hold, dim by dim; None where there are none."""
    in_one: list[Pick] = []
    in_other: list[Pick] = []
    for span, other_span in zip(one.spans, other.spans, strict=True):
        bounds, other_bounds = span.bounds, other_span.bounds
        # Of two runs the overlap is a run, and nothing is listed.
        if bounds is not None and other_bounds is not None:
            low, high = max(bounds[0], other_bounds[0]), min(bounds[1], other_bounds[1])
            if low >= high:
                return None
            in_one.append(slice(low - bounds[0], high - bounds[0], 1))
            in_other.append(slice(low - other_bounds[0], high - other_bounds[0], 1))
            continue
        _, here, there = np.intersect1d(span.indices(), other_span.indices(), assume_unique=True, return_indices=True)
        if not len(here):
            return None
        in_one.append(_pick(here))
        in_other.append(_pick(there))
    return tuple(in_one), tuple(in_other)


def cut(whole: torch.Tensor, region: Region) -> torch.Tensor:
    """The elements of a region of a tensor; a view where each dim of them is evenly spaced, else a copy."""
    runs = [span.bounds for span in region.spans]
    if None not in runs:
        return whole[tuple(slice(*run) for run in runs if run is not None)]
    sizes: list[int] = []
    strides: list[int] = []
    first = whole.storage_offset()
    for dim, (span, run) in enumerate(zip(region.spans, runs, strict=True)):
        if run is None and span.limit is not None:
            # stripes of which the last are shorter
            short = take(whole.movedim(dim, 0), [_pick(span.indices())]).movedim(0, dim)
            held = (*region.spans[:dim], IndexSpan(0, ((span.size, 1),)), *region.spans[dim + 1 :])
            return cut(short, Region(held))
        start, loops = (span.start, span.loops) if run is None else (run[0], ((run[1] - run[0], 1),))
        first += start * whole.stride(dim)
        sizes += [size for size, _ in loops]
        strides += [stride * whole.stride(dim) for _, stride in loops]
    return whole.as_strided(sizes, strides, first).reshape(region.shape)


def unpadded(x: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """The elements of `region_of` in a rank's part; a view where they are evenly spaced."""
    if not layout.is_padded or not holds(layout.at, mesh, rank):
        return x
    return take(x, positions(layout, mesh, rank))


def padded(value: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's part from the elements of `region_of`: zeros where it is padded."""
    if tuple(value.shape) == layout.local_shape:
        return value
    out = value.new_zeros(layout.local_shape)
    if value.numel():
        put(carrier(out), positions(layout, mesh, rank), carrier(value.resolve_conj().resolve_neg()))
    return out


def carrier(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: not every dtype can be indexed."""
    size = x.dtype.itemsize
    if size > 8:
        return x
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])


def _pick(at: np.ndarray) -> Pick:
    """A slice where the positions are evenly spaced, which costs no copy."""
    if not len(at):
        return slice(0, 0, 1)
    steps = np.diff(at)
    step = int(steps[0]) if len(steps) else 1
    if step > 0 and (steps == step).all():
        return slice(int(at[0]), int(at[-1]) + 1, step)
    return at


def take(x: torch.Tensor, picks: Sequence[Pick]) -> torch.Tensor:
    """`x` at these positions of each dim; a view where all are slices."""
    # Slices first: they are views, so that less is copied afterwards.
    x = x[tuple(pick if isinstance(pick, slice) else slice(None) for pick in picks)]
    for dim, pick in enumerate(picks):
        if not isinstance(pick, slice):
            x = x.index_select(dim, torch.from_numpy(pick).to(x.device))
    return x


def put(target: torch.Tensor, picks: Sequence[Pick], value: torch.Tensor) -> None:
    """Write `value` to these positions of `target`."""
    # All slices: one copy, without index tensors.
    if all(isinstance(pick, slice) for pick in picks):
        target[tuple(picks)].copy_(value)
        return
    # Indices that broadcast against one another, each along its own dim.
    grids = []
    for dim, pick in enumerate(picks):
        indices = torch.from_numpy(np.arange(target.shape[dim])[pick])
        shape = [1] * len(picks)
        shape[dim] = -1
        grids.append(indices.reshape(shape))
    target[tuple(grids)] = value


def count(pick: Pick) -> int:
    """How many positions."""
    return len(range(pick.start, pick.stop, pick.step)) if isinstance(pick, slice) else len(pick)


def extent(pick: Pick) -> tuple[int, int]:
    """(first, last + 1) of positions."""
    if isinstance(pick, slice):
        return pick.start, pick.stop
    return int(pick.min()), int(pick.max()) + 1
