"""Seconds of many conversions at once: tensors that differ only in size share one answer.

A planner asks for the cost of converting every layout of a tensor to every other, for hundreds of shapes. Where axes
are major factors and sizes divide well, the cost depends only on which axes lie together on a dim, what is pending, and
the bytes of a rank's part: `(dp b) s -> b (dp s)` of 4 MiB costs the same whatever b and s are, and as much as
`k (dp b) s -> k b (dp s)`. Where they are not (`(dp b sp s)` of a view), dims that are split alike are alike.

So a pair of layouts has a key without sizes, and a key has a curve, seconds over bytes (`normal`), that is asked of
a small stand-in tensor.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from colofunc.mesh import Mesh
from colofunc.spec.conversions.conversion import conversion_curve, conversion_s
from colofunc.spec.conversions.normal import Curve, is_free
from colofunc.spec.layout import Dim, Layout, make_layout

AxisGroup = tuple[str, ...]
PendingAxes = tuple[tuple[str, str], ...]
DimPattern = tuple[AxisGroup | None, int, Dim]  # of one dim: axes if they are major, size (0: ample room), atoms
Pattern = tuple[tuple[DimPattern, ...], PendingAxes]  # of the dims that are longer than 1
Major = tuple[AxisGroup, AxisGroup, int]  # of a dim that axes touch: before, after, size
Odd = tuple[Dim, Dim, int]
PatternKey = tuple[tuple[Major, ...], tuple[Odd, ...], tuple[int, ...], bool, PendingAxes, PendingAxes]


def pattern_s(src: Layout, dst: Layout, mesh: Mesh, itemsize: int, apart: str | None = None) -> float:
    """`conversion_s`, asked a few times per pattern."""
    return 0.0 if src is dst else _patterns(mesh, apart).seconds(src, dst, itemsize)


class _Patterns:
    """What is known on one mesh, where the indices of one axis may be `apart`."""

    def __init__(self, mesh: Mesh, apart: str | None) -> None:
        self.mesh, self.apart = mesh, apart
        self.free = is_free(mesh)
        self._of: dict[Layout, Pattern | None] = {}
        self._curves: dict[tuple[Layout, Layout], Curve | None] = {}
        self._shared: dict[PatternKey, Curve | None] = {}

    def seconds(self, src: Layout, dst: Layout, itemsize: int) -> float:
        if self.free:
            return 0.0
        try:
            curve = self._curves[src, dst]
        except KeyError:
            curve = self._curves[src, dst] = self._curve(src, dst)
        if curve is None:
            return conversion_s(src, dst, self.mesh, itemsize, self.apart)
        return curve.seconds(src.local_numel * itemsize)

    def _curve(self, src: Layout, dst: Layout) -> Curve | None:
        a, b = self._pattern(src), self._pattern(dst)
        if a is None or b is None or src.shape != dst.shape:
            return None
        key = _key(a, b)
        if key not in self._shared:
            self._shared[key] = conversion_curve(*_stand_in(key, self.mesh), self.mesh, self.apart)
        return self._shared[key]

    def _pattern(self, layout: Layout) -> Pattern | None:
        if layout not in self._of:
            self._of[layout] = _pattern(layout, self.mesh.size)
        return self._of[layout]


@lru_cache(maxsize=64)
def _patterns(mesh: Mesh, apart: str | None) -> _Patterns:
    return _Patterns(mesh, apart)


def _pattern(layout: Layout, ranks: int) -> Pattern | None:
    """None for layouts that are padded or empty. Dims of size 1 do not count."""
    if layout.is_padded or 0 in layout.shape:
        return None
    dims: list[DimPattern] = []
    for dim, size in zip(layout.dims, layout.shape, strict=True):
        axes = tuple(axis for _, axis in dim if axis is not None)
        major = all(axis is not None for _, axis in dim[: len(axes)])
        if size > 1:  # a layout names an axis once, so there is room for all of them at once
            dims.append((axes if major else None, size if size % ranks or not major else 0, dim))
    return tuple(dims), layout.pending


def _key(a: Pattern, b: Pattern) -> PatternKey:
    """What matters of two patterns: dims in no order; those that no axis touches are only room."""
    plain: list[Major] = []
    odd: list[Odd] = []
    tight: list[int] = []
    roomy = False
    for (x, size, xs), (y, other, ys) in zip(a[0], b[0], strict=True):
        if x is None or y is None:
            odd.append((xs, ys, size or other))
            continue
        if x or y:
            plain.append((x, y, size))
        elif size:
            tight.append(size)
        roomy |= not size
    plain.sort()
    odd.sort(key=repr)
    return tuple(plain), tuple(odd), () if roomy else tuple(sorted(tight)), roomy, a[1], b[1]


def _stand_in(key: PatternKey, mesh: Mesh) -> tuple[Layout, Layout]:
    plain, odd, tight, roomy, before, after = key
    room = mesh.size**2
    shape = (
        *(size or room for _, _, size in plain),
        *(size for _, _, size in odd),
        *tight,
        *((room,) if roomy else ()),
    )
    more = tuple(((n, None),) for n in shape[len(plain) + len(odd) :])

    def layout(side: int, pending: PendingAxes) -> Layout:
        ones = [_major(n, (x, y)[side], mesh) for n, (x, y, _) in zip(shape, plain)]
        others = [(x, y)[side] for x, y, _ in odd]
        return make_layout((*ones, *others, *more), shape, pending)

    return layout(0, before), layout(1, after)


def _major(size: int, axes: AxisGroup, mesh: Mesh) -> Dim:
    sizes = [mesh.axis_size(a) for a in axes]
    return (*zip(sizes, axes, strict=True), (size // prod(sizes), None))
