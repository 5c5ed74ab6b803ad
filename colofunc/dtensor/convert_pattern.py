"""Seconds of many conversions at once: tensors that differ only in size share one answer.

A planner asks for the cost of converting every layout of a tensor to every other, for hundreds of shapes. Where axes
are major factors and all sizes divide, the cost depends only on which axes lie on which dim, what is pending, and the
bytes of a rank's part: `(dp b) s -> b (dp s)` of 4 MiB costs the same whatever b and s are.
"""

from __future__ import annotations

from functools import lru_cache

from colofunc.dtensor.convert import conversion_s
from colofunc.dtensor.layout import Layout
from colofunc.mesh import Mesh

_SECONDS: dict[tuple[object, ...], float] = {}


def pattern_s(src: Layout, dst: Layout, mesh: Mesh, itemsize: int) -> float:
    """`conversion_s`, asked once per pattern and size in bytes."""
    if src is dst:
        return 0.0
    a, b = _pattern(src, mesh.size), _pattern(dst, mesh.size)
    if a is None or b is None:
        return conversion_s(src, dst, mesh, itemsize)
    key = (a, b, src.local_numel * itemsize, mesh)
    found = _SECONDS.get(key)
    if found is None:
        found = _SECONDS[key] = conversion_s(src, dst, mesh, itemsize)
    return found


@lru_cache(maxsize=1 << 16)
def _pattern(layout: Layout, ranks: int) -> tuple[object, ...] | None:
    """Axes per dim (with the size of a dim that not every axis divides) and pending axes; None for other layouts."""
    if layout.is_padded or 0 in layout.shape:
        return None
    dims: list[object] = []
    for dim, size in zip(layout.dims, layout.shape, strict=True):
        axes = tuple(axis for _, axis in dim if axis is not None)
        if dim[: len(axes)] != tuple(atom for atom in dim if atom[1] is not None):
            return None
        if size == 1:
            continue
        dims.append(axes if size % ranks == 0 else (axes, size))
    return tuple(dims), layout.pending
