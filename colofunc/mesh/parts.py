"""Parts of axes, and the groups of ranks along axes and parts.

Problem: two layouts may cut one axis in different places, so that a conversion moves data along half an axis. Idea: a
*part* has a name of its own, "dp[stride:size]", and everything that takes atomic axes takes parts.

>>> groups((("dp", 4),), ("dp[2:2]",))        # the major half of the index: ranks that differ in i // 2
((0, 2), (1, 3))

Note [Parts of axes]. "dp[stride:size]" is the part of axis dp with index (i // stride) % size at index i of dp: an axis
of 4 is "dp[2:2]" (major) by "dp[1:2]" (minor).
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import product

from colofunc.errors import MeshError

SizedAxes = tuple[tuple[str, int], ...]
RankGroups = tuple[tuple[int, ...], ...]

_PART = re.compile(r"(\w+)\[(\d+):(\d+)\]\Z")


@lru_cache(maxsize=4096)
def axis_part(name: str) -> tuple[str, int, int]:
    """(axis, stride, size) of a name; size 0 stands for a whole axis. See Note [Parts of axes]."""
    if "[" not in name:
        return name, 1, 0
    found = _PART.match(name)
    if found is None or not int(found[2]) or not int(found[3]):
        raise MeshError(f"{name!r} is no axis and no part of one; write axis[stride:size] such as 'dp[2:2]'")
    return found[1], int(found[2]), int(found[3])


def other_parts(axes: SizedAxes, chosen: tuple[str, ...]) -> tuple[str, ...]:
    """What of each axis the chosen names leave, in the mesh's order, major first."""
    rest: list[str] = []
    for name, axis_size in axes:
        taken = sorted((stride, size or axis_size) for axis, stride, size in map(axis_part, chosen) if axis == name)
        left, done = [], 1
        for stride, size in [*taken, (axis_size, 1)]:
            if stride % done:
                raise MeshError(f"parts of axis {name!r} overlap in {chosen}; cut it in nested parts")
            if stride > done:
                left.append(name if (done, stride) == (1, axis_size) else f"{name}[{done}:{stride // done}]")
            done = stride * size
        rest += reversed(left)
    return tuple(rest)


@lru_cache(maxsize=1024)
def offsets(axes: SizedAxes, chosen: tuple[str, ...]) -> tuple[int, ...]:
    """Rank offsets of all indices along the chosen axes (or parts), row-major by the chosen order."""
    sizes, strides, stride = dict(axes), {}, 1
    for name, size in reversed(axes):
        strides[name], stride = stride, stride * size
    steps = []
    for axis, inner, size in map(axis_part, chosen):
        step = strides[axis] * inner
        steps.append(range(0, (size or sizes[axis]) * step, step))
    return tuple(sum(offset) for offset in product(*steps))


@lru_cache(maxsize=1024)
def groups(axes: SizedAxes, chosen: tuple[str, ...]) -> RankGroups:
    """All groups of ranks that differ only in the chosen axes (or parts); order as in `Mesh.groups`."""
    inside = offsets(axes, chosen)
    found = []
    for base in offsets(axes, other_parts(axes, chosen)):
        found.append(tuple(base + offset for offset in inside))
    return tuple(found)
