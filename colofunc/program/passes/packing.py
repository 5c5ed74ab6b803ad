"""Packing: parameters in the order of their use, in equal-sized flat buffers.

Problem: a collective or a copy per parameter pays a latency for every bias. Idea: fill buffers of one size (*chunks*)
in the order in which the program reads the parameters; a parameter that does not fit any more begins the next chunk,
and what it leaves empty is waste. The size is searched for the least waste.

>>> pack_chunks([5, 3, 4, 20, 1], 8)                # 20 is larger than a chunk and has one of its own
((0, 1), (2,), (3,), (4,))
>>> wasted([5, 3, 4, 1], 8)                  # 0 + 3
3
>>> chunk_size([5, 3, 4, 1], reach=8, step=1)
13

Source: Fang et al., PatrickStar (2108.05818): chunks; Colossal-AI's Gemini: the search, which leaves out parameters
above mean + 3 standard deviations, begins at the largest of the others and takes the first minimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev

from colofunc.errors import PlanError

REACH = 1 << 20
"""Elements above the largest tensor, up to which sizes of chunks are tried."""
STEP = 128
"""Elements between two sizes that are tried."""


def pack_chunks(sizes: Sequence[int], chunk: int) -> tuple[tuple[int, ...], ...]:
    """Positions of the tensors in each chunk, in order. One that is larger than a chunk has one of its own."""
    _check(chunk)
    out: list[list[int]] = []
    left = 0
    for position, size in enumerate(sizes):
        if size > left or not out:
            out.append([])
            left = chunk
        out[-1].append(position)
        left = max(0, left - size)
    return tuple(map(tuple, out))


def wasted(sizes: Sequence[int], chunk: int) -> int:
    """Elements that chunks of this size leave empty; a tensor that is larger than a chunk fills its own."""
    _check(chunk)
    waste = left = 0
    for size in sizes:
        if size > chunk:
            waste, left = waste + left, 0
            continue
        if size > left:
            waste, left = waste + left, chunk
        left -= size
    return waste + left


def usual_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes without those above mean + 3 standard deviations (embeddings), in order."""
    limit = round(fmean(sizes) + 3 * pstdev(sizes)) if sizes else 0
    return [size for size in sizes if size <= limit]


def chunk_size(*groups: Sequence[int], least: int = 0, reach: int = REACH, step: int = STEP) -> int:
    """The size between the largest usual tensor (or `least`) and `reach` more that wastes fewest elements.

    The first of equals.

    groups: sizes of tensors that are packed apart (other dtypes or axes) in chunks of one size. The search looks at
    multiples of `step`.
    """
    if min(least, reach) < 0 or step < 1:
        raise PlanError(
            f"chunks of at least {least} elements, up to {reach} more, in steps of {step}: use 0 or more, in steps of "
            "1 up"
        )
    every = [size for group in groups for size in group]
    if not every:
        return max(least, step)
    limit = max(usual_sizes(every))
    kept: list[list[int]] = []
    for group in groups:
        kept.append([size for size in group if size <= limit])
    start = -(-max(limit, least, 1) // step) * step
    enough = -(-max(map(sum, kept)) // step) * step  # one chunk holds a whole group: a larger one only wastes more
    last = min(start + reach, max(start, enough))
    return min(range(start, last + 1, step), key=lambda size: sum(wasted(group, size) for group in kept))


def _check(chunk: int) -> None:
    if chunk < 1:
        raise PlanError(f"a chunk of {chunk} elements holds nothing; give 1 or more")
