"""Bernoulli draws, eight from one word of random bits.

Problem: dropout needs one yes or no per element, and a word of 64 bits for each costs more than torch's whole dropout.
Idea: element i of the global tensor owns byte `i % 8` (little-endian) of word `i // 8`. The byte decides alone unless
it equals the threshold's first byte; then, once in 256, 31 further bits of the element's own decide. So probabilities
are exact to 2^-39, and a part of the tensor still needs nothing but its indices.

    for rows, columns, keep in keep_tiles(Index(...), q=0.9, key=key): ...   # keep[r, c] is True with probability q

Where columns are a run of consecutive indices (all but striped layouts), words are made once for their eight elements;
elsewhere, and on devices that are not the CPU, each element makes its word. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colofunc.ops import draws
from colofunc.ops.draws import Threshold
from colofunc.ops.seeds import GAMMA, ROUNDS, signed

# Elements of a tile: on the CPU what stays in the second-level cache, elsewhere what bounds the memory.
TILE = {"cpu": 1 << 18}
OTHER_TILE = 1 << 24
RowIndex = slice | Tensor
Tile = tuple[RowIndex, slice, Tensor]
RandomWords = np.ndarray[Any, np.dtype[np.uint64]]
WORD_ROUNDS = [(np.uint64(shift), None if factor is None else np.uint64(factor)) for shift, factor in ROUNDS]


def mix_(z: Tensor, spare: Tensor, top_only: bool = False) -> Tensor:
    """SplitMix64's mix in place. `top_only`: the top 31 bits alone are right."""
    if z.device.type == "cpu":
        mix_words(z.numpy().view(np.uint64), spare.numpy().view(np.uint64), top_only)
        return z
    return z.copy_(draws.mixed(z, top_only))


def mix_words(z: RandomWords, spare: RandomWords, top_only: bool = False) -> None:
    """The same for NumPy's unsigned words, whose loops take half the time of torch's on int64: there is no sign to mask
    off, and products are faster.
    """
    for shift, factor in WORD_ROUNDS[:-1] if top_only else WORD_ROUNDS:
        np.right_shift(z, shift, out=spare)
        np.bitwise_xor(z, spare, out=z)
        if factor is not None:
            np.multiply(z, factor, out=z)


def keep_tiles(
    rows: Tensor, columns: Tensor | int, q: float, key: Tensor | int, dtype: torch.dtype = torch.bool
) -> Iterator[Tile]:
    """(rows, columns, one with probability q, else zero) tile by tile.

    Element (r, c) has the global index rows[r] + columns[c].

    `columns`: their number where they are consecutive (columns[c] == c). A tile is a buffer that the next one
    overwrites.
    """
    bound = Threshold.of(q)
    if isinstance(columns, int) and rows.device.type == "cpu":
        yield from _from_words(rows, columns, bound, key, dtype)
    else:
        if isinstance(columns, int):
            columns = torch.arange(columns, device=rows.device)
        for r, c, keep in _from_elements(rows, columns, bound, key):
            yield r, c, keep.to(dtype)


# ---- one word for eight elements ----


def _from_words(rows: Tensor, m: int, bound: Threshold, key: Tensor | int, dtype: torch.dtype) -> Iterator[Tile]:
    starts = rows & 7
    if rows.numel() == 0 or m == 0:
        return
    if bool((starts == starts[0]).all()):
        for r, c, keep in _aligned(rows >> 3, int(starts[0]), m, bound, key, dtype):
            yield r, c, keep
        return
    for start in range(8):
        mine = (starts == start).nonzero().flatten()
        if mine.numel():
            for r, c, keep in _aligned(rows[mine] >> 3, start, m, bound, key, dtype):
                yield mine[r], c, keep


def _aligned(
    words: Tensor, start: int, m: int, bound: Threshold, key: Tensor | int, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tiles of rows that all begin at byte `start` of their first word, `words` (n,)."""
    n, per_row = words.numel(), (start + m + 7) // 8
    tile = TILE["cpu"] // 8
    width = min(per_row, tile)
    height = min(n, max(1, tile // width))
    z_buffer, spare_buffer = torch.empty((2, height * width), dtype=torch.int64)
    # Comparing bytes into bytes is twenty times faster than into bools.
    stored = torch.uint8 if dtype == torch.bool else dtype
    keep_buffer = torch.empty(height * width * 8, dtype=stored)
    equal_buffer = torch.empty(height * width * 8, dtype=torch.uint8)
    scaled = words * signed(GAMMA) + key
    columns = torch.arange(width) * signed(GAMMA)
    for r in range(0, n, height):
        for w in range(0, per_row, width):
            h, k = min(height, n - r), min(width, per_row - w)
            z, spare = z_buffer[: h * k].view(h, k), spare_buffer[: h * k].view(h, k)
            torch.add(scaled[r : r + h].unsqueeze(1) + signed(w * GAMMA), columns[:k], out=z)
            found = mix_(z, spare).view(torch.uint8)
            keep = keep_buffer[: h * k * 8].view(h, k * 8)
            _decide(found, keep, equal_buffer[: h * k * 8].view(h, k * 8), words[r : r + h], w, bound, key)
            first, last = max(0, w * 8 - start), min(m, (w + k) * 8 - start)
            part = keep[:, first + start - w * 8 : last + start - w * 8]
            yield slice(r, r + h), slice(first, last), part.view(torch.bool) if dtype == torch.bool else part


def _decide(
    found: Tensor, keep: Tensor, equal: Tensor, words: Tensor, w: int, bound: Threshold, key: Tensor | int
) -> None:
    """Fill `keep` (h, 8 k) from the bytes of words `words[r] + w ...`."""
    if bound.byte > 255:
        keep.fill_(1)
        return
    torch.lt(found, bound.byte, out=keep)
    if bound.rest == 0:
        return
    torch.eq(found, bound.byte, out=equal)
    # Words in which some byte is equal, then the bytes themselves: eight times fewer to look at.
    some = equal.view(torch.int64).flatten().nonzero().flatten()
    inside = equal.view(-1, 8)[some].nonzero()
    at, byte = some[inside[:, 0]], inside[:, 1]
    k = keep.shape[1] // 8
    index = ((words[at.div(k, rounding_mode="floor")] + at.remainder(k) + w) << 3) + byte
    keep.view(-1)[at * 8 + byte] = _second(index, bound, key).to(keep.dtype)


def _second(index: Tensor, threshold: Threshold, key: Tensor | int) -> Tensor:
    """Whether the further bits of the elements are below the threshold's."""
    if threshold.bound is None:
        return torch.ones_like(index, dtype=torch.bool)
    z = index * signed(GAMMA) + (key ^ draws.SECOND)
    return mix_(z, torch.empty_like(z), top_only=True) < threshold.bound


# ---- one word for one element ----


def _from_elements(rows: Tensor, columns: Tensor, bound: Threshold, key: Tensor | int) -> Iterator[Tile]:
    n, m = rows.numel(), columns.numel()
    tile = TILE.get(rows.device.type, OTHER_TILE)
    width = max(1, min(m, tile))
    height = max(1, tile // width)
    for r in range(0, n, height):
        for c in range(0, m, width):
            index = rows[r : r + height].unsqueeze(1) + columns[c : c + width]
            z = (index >> 3).mul_(signed(GAMMA)).add_(key)
            found = (mix_(z, torch.empty_like(z)) >> ((index & 7) << 3)) & 255
            keep = found < bound.byte
            if bound.rest and bound.byte < 256:
                keep |= (found == bound.byte) & _second(index, bound, key)
            yield slice(r, r + height), slice(c, c + width), keep
