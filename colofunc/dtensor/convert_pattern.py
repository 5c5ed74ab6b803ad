"""Seconds of many conversions at once: tensors that differ only in size share one answer.

A planner asks for the cost of converting every layout of a tensor to every other, for hundreds of shapes. Where axes
are major factors and sizes divide well, the cost depends only on which axes lie together on a dim, what is pending, and
the bytes of a rank's part: `(dp b) s -> b (dp s)` of 4 MiB costs the same whatever b and s are, and as much as
`k (dp b) s -> k b (dp s)`.

Each way to convert costs alpha + beta bytes, so the cheapest costs a minimum of lines, which is concave: where one line
is the cheapest at two sizes, it is the cheapest at every size between. So a pattern is solved at the ends, on a small
stand-in tensor, and once more wherever two neighbouring answers differ.

    bytes      64 B ----------------- 1 MiB ------------------------- 64 GiB
    cheapest   all_reduce             reduce_scatter + all_gather     the same: nothing to ask in between
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from math import prod

from colofunc.dtensor.convert import conversion_line, conversion_s, is_free
from colofunc.dtensor.layout import Dim, Layout, make_layout
from colofunc.mesh import Mesh

Axes = tuple[str, ...]
Pending = tuple[tuple[str, str], ...]
Pattern = tuple[tuple[tuple[Axes, int], ...], Pending]  # per dim: its axes and its size, 0 for one with ample room
Key = tuple[tuple[tuple[Axes, Axes, int], ...], tuple[int, ...], bool, Pending, Pending]

LARGEST = 1 << 36
"""Bytes of an element of the stand-in at the far end: more than any tensor."""


def pattern_s(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> float:
    """`conversion_s`, asked a few times per pattern."""
    return 0.0 if src is dst else _patterns(mesh).seconds(src, dst, itemsize)


class _Curve:
    """Seconds over bytes of one pattern: sizes that were solved, in order, with the line that was cheapest there."""

    __slots__ = ("lines", "sizes")

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.lines: list[tuple[float, float]] = []

    def at(self, nbytes: int) -> float | None:
        """None where it has to be solved."""
        k = bisect_left(self.sizes, nbytes)
        if k == len(self.sizes):
            return None
        alpha_s, beta_s = self.lines[k]
        if self.sizes[k] != nbytes and (k == 0 or not _same(self.lines[k - 1], self.lines[k])):
            return None
        return alpha_s + beta_s * nbytes

    def put(self, nbytes: int, line: tuple[float, float]) -> None:
        k = bisect_left(self.sizes, nbytes)
        if k == len(self.sizes) or self.sizes[k] != nbytes:
            self.sizes.insert(k, nbytes)
            self.lines.insert(k, line)


def _same(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return all(abs(x - y) <= 1e-9 * abs(x) for x, y in zip(a, b, strict=True))


class _Patterns:
    """What is known on one mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.free = is_free(mesh)
        self._of: dict[Layout, Pattern | None] = {}
        self._curves: dict[tuple[Pattern, Pattern], _Curve] = {}
        self._shared: dict[Key, _Curve] = {}

    def seconds(self, src: Layout, dst: Layout, itemsize: int) -> float:
        if self.free:
            return 0.0
        a, b = self._pattern(src), self._pattern(dst)
        if a is None or b is None or src.shape != dst.shape:
            return conversion_s(src, dst, self.mesh, itemsize)
        curve = self._curves.get((a, b))
        if curve is None:
            curve = self._curves[a, b] = self._curve(a, b)
        nbytes = src.local_numel * itemsize
        found = curve.at(nbytes)
        if found is None:
            curve.put(nbytes, conversion_line(src, dst, self.mesh, itemsize))
            found = curve.at(nbytes)
            assert found is not None
        return found

    def _pattern(self, layout: Layout) -> Pattern | None:
        if layout not in self._of:
            self._of[layout] = _pattern(layout, self.mesh.size)
        return self._of[layout]

    def _curve(self, a: Pattern, b: Pattern) -> _Curve:
        key = _key(a, b)
        if key not in self._shared:
            curve = self._shared[key] = _Curve()
            src, dst = _stand_in(key, self.mesh)
            for itemsize in (1, LARGEST):
                curve.put(src.local_numel * itemsize, conversion_line(src, dst, self.mesh, itemsize))
        return self._shared[key]


@lru_cache(maxsize=64)
def _patterns(mesh: Mesh) -> _Patterns:
    return _Patterns(mesh)


def _pattern(layout: Layout, ranks: int) -> Pattern | None:
    """None for layouts that are padded, striped or empty. Dims of size 1 do not count."""
    if layout.is_padded or 0 in layout.shape:
        return None
    dims = []
    for dim, size in zip(layout.dims, layout.shape, strict=True):
        axes = tuple(axis for _, axis in dim if axis is not None)
        if any(axis is None for _, axis in dim[: len(axes)]):
            return None
        if size > 1:  # a layout names an axis once, so there is room for all of them at once
            dims.append((axes, size if size % ranks else 0))
    return tuple(dims), layout.pending


def _key(a: Pattern, b: Pattern) -> Key:
    """What matters of two patterns: dims in no order; those that no axis touches are only room."""
    dims = [(x, y, size) for (x, size), (y, _) in zip(a[0], b[0], strict=True)]
    touched = tuple(sorted(d for d in dims if d[0] or d[1]))
    roomy = any(not size for _, _, size in dims)
    tight = () if roomy else tuple(sorted(size for x, y, size in dims if not (x or y)))
    return touched, tight, roomy, a[1], b[1]


def _stand_in(key: Key, mesh: Mesh) -> tuple[Layout, Layout]:
    touched, tight, roomy, before, after = key
    room = mesh.size**2
    shape = (*(size or room for _, _, size in touched), *tight, *((room,) if roomy else ()))

    def layout(side: int, pending: Pending) -> Layout:
        dims = [_major(shape[k], d[side], mesh) for k, d in enumerate(touched)]  # type: ignore[arg-type]
        return make_layout((*dims, *(((n, None),) for n in shape[len(dims) :])), shape, pending)

    return layout(0, before), layout(1, after)


def _major(size: int, axes: Axes, mesh: Mesh) -> Dim:
    sizes = [mesh.axis_size(a) for a in axes]
    return (*zip(sizes, axes, strict=True), (size // prod(sizes), None))
