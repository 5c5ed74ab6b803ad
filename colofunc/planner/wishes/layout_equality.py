"""Whether two layouts place the same axes alike, whatever other axes do.

    lies_alike("(tp o) i", "(tp dp o) i", tp)        yes: dp splits what tp has left
    lies_alike("(8 tp s) d", "(dp 4 tp s) d", tp)    yes: dp splits a part of what stands before tp
    lies_alike("(3 tp o) i", "(tp o) i", tp)         no: stripes of three parts are not plain blocks

Problem: a wish speaks for its axes alone, and a strategy lays all of them at once. Idea: of each dim compare the order
of the wish's axes, and into how many parts stands what is before each.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from colofunc.spec.layout import Dim, Layout, axes_of, is_major


@lru_cache(maxsize=1 << 16)
def orders(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], tuple[object, ...]]:
    """Per dim the order of `axes` among its factors, and what is pending over them."""
    dims = []
    for dim in layout.dims:
        dims.append(tuple(axis for axis in axes_of(dim) if axis in axes))
    pending = [(axis, how) for axis, how in layout.pending if axis in axes]
    return tuple(dims), tuple(pending)


@lru_cache(maxsize=1 << 16)
def is_enumerated(layout: Layout, axis_names: tuple[str, ...]) -> bool:
    """Whether enumeration has it: axes are major, and in the mesh's order."""
    if not is_major(layout):
        return False
    for dim in layout.dims:
        positions = [axis_names.index(axis) for axis in axes_of(dim)]
        if positions != sorted(positions):
            return False
    return True


def lies_alike(want: Layout | None, layout: Layout | None, axes: tuple[str, ...]) -> bool:
    """Whether `axes` lie in a layout as in one that has no others: per dim in that order, behind as many parts
    (stripes).

    What stands before an axis may be split over others itself: `(8 tp s)` is met by `(dp 4 tp s)`, `(tp o)` by
    `(dp tp o)`.
    """
    if want is None or layout is None or want is layout:
        return want is layout
    if orders(want, axes) != orders(layout, axes):
        return False
    for wanted_dim, dim in zip(want.dims, layout.dims, strict=True):
        for axis in axes_of(wanted_dim):
            if axis in axes and _parts_before(wanted_dim, axis) not in _possible_parts_before(dim, axis, axes):
                return False
    return True


def _parts_before(dim: Dim, axis: str) -> int:
    """Into how many parts (stripes) stands what is before an axis.

    Axes of its own that are not decided yet do not count.
    """
    return prod(size for size, other in _before(dim, axis) if other is None)


def _possible_parts_before(dim: Dim, axis: str, axes: tuple[str, ...]) -> set[int]:
    """The same, where each of the other axes splits a part of what stands before, or of the axis's own."""
    parts = {_parts_before(dim, axis)}
    for size, other in _before(dim, axis):
        if other is not None and other not in axes:
            parts |= {size * count for count in parts}
    return parts


def _before(dim: Dim, axis: str) -> Dim:
    for place, (_, other) in enumerate(dim):
        if other == axis:
            return dim[:place]
    raise AssertionError(f"axis {axis} is not on this dim")
