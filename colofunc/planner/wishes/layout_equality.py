"""Whether two layouts place the same axes alike, whatever other axes do.

    alike("(tp o) i", "(tp dp o) i", tp)        yes: dp splits what tp has left
    alike("(8 tp s) d", "(dp 4 tp s) d", tp)    yes: dp splits a part of what stands before tp
    alike("(3 tp o) i", "(tp o) i", tp)         no: stripes of three parts are not plain blocks

Problem: a wish speaks for its axes alone, and a strategy lays all of them at once. Idea: of each dim compare the order of
the wish's axes, and into how many parts stands what is before each.
"""

from __future__ import annotations

from math import prod

from colofunc.mesh import Mesh
from colofunc.spec.layout import Dim, Layout, is_major


def orders(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], tuple[object, ...]]:
    """Per dim the order of `axes` among its factors, and what is pending over them."""
    dims = tuple(tuple(a for _, a in dim if a is not None and a in axes) for dim in layout.dims)
    return dims, tuple(p for p in layout.pending if p[0] in axes)


def usual(layout: Layout, mesh: Mesh) -> bool:
    """Whether enumeration has it: axes are major, and in the mesh's order."""
    order = mesh.axis_names.index
    some = [[order(a) for _, a in dim if a is not None] for dim in layout.dims]
    return is_major(layout) and all(dim == sorted(dim) for dim in some)


def alike(want: Layout | None, layout: Layout | None, axes: tuple[str, ...]) -> bool:
    """Whether `axes` lie in a layout as in one that has no others: per dim in that order, behind as many parts (stripes).

    What stands before an axis may be split over others itself: `(8 tp s)` is met by `(dp 4 tp s)`, `(tp o)` by `(dp tp o)`.
    """
    if want is None or layout is None or want is layout:
        return want is layout
    if orders(want, axes) != orders(layout, axes):
        return False
    for mine, theirs in zip(want.dims, layout.dims, strict=True):
        for axis in (a for _, a in mine if a in axes):
            whole = prod(size for size, a in _before(mine, axis) if a is None)  # axes of its own that are not decided yet do not count
            before = [(size, a) for size, a in _before(theirs, axis) if a not in axes]
            parts = {prod(size for size, a in before if a is None)}
            for size in (size for size, a in before if a is not None):  # it splits a part of what stands before, or of the axis's own
                parts |= {size * n for n in parts}
            if whole not in parts:
                return False
    return True


def _before(dim: Dim, axis: str | None) -> Dim:
    return dim[: next(k for k, (_, a) in enumerate(dim) if a == axis)]
