"""What a causal mask or a window shows, where the host knows the positions: a band, and how a kernel of torch is told.

Problem: a rank's rows and the block of keys that it looks at stand anywhere in the sequence, and kernels count rows and
columns from their own beginning or end. Idea: whatever the offsets or stripes, row i sees the columns j with
`low <= j - i <= high`. Rows that see nothing and columns that nobody sees are cut off; in what is left every row sees
something, and the band is the window of a flash kernel, which it counts from the last column of the last row:

    (t - s) - left <= j - i <= (t - s) + right                    left, right: -1 where there is no bound

    causal, s == t                    left = -1, right = 0        a block of a ring on the diagonal
    causal, all keys before all rows  left = right = -1           all see all: a block behind
    causal, all rows before all keys  None                        nothing to do

Rows that stand n apart (a stripe) over all columns are no band; over every n-th column they are: n calls, whose results
are merged.

Source of the convention: flash-attention 2.1 (Dao 2023), "causal and window are aligned to the bottom right corner".
"""

from __future__ import annotations

from functools import lru_cache

import attrs

from colofunc.ops.kernels import HostRange

# Stripes of more ranks are computed with a mask: so many calls are no longer quicker.
MAX_COMBS = 16


@attrs.frozen
class Band:
    """Row i sees column j where low <= j - i <= high; None is no bound."""

    low: int | None = None
    high: int | None = None


@attrs.frozen
class BandBlock:
    """Rows i0:i1 and columns j0:j1 of a band that is not empty, and its window there, as flash kernels count it."""

    i0: int
    i1: int
    j0: int
    j1: int
    left: int
    right: int

    @property
    def whole(self) -> bool:
        """Every row of the cut sees every column of it."""
        return self.left < 0 and self.right < 0

    @property
    def causal(self) -> bool:
        """Aligned to the bottom right corner."""
        return self.left < 0 and self.right == 0

    @property
    def top_left(self) -> bool:
        """Causal, and the first row sees just the first column."""
        return self.left < 0 and self.right >= 0 and (self.j1 - self.j0) - (self.i1 - self.i0) + self.right == 0


def known_band(causal: bool, window: int, rows: HostRange | None, columns: HostRange | None) -> Band | None:
    """The band of positions that the host knows; None where they do not lie at equal steps.

    A step of 0: a single row or column.
    """
    if not causal and window <= 0:
        return Band()
    if rows is None or columns is None:
        return None
    (first_row, row_step), (first_column, column_step) = rows, columns
    step = row_step or column_step or 1
    if step < 0 or row_step not in (0, step) or column_step not in (0, step):
        return None
    ahead = first_row - first_column
    high = ahead // step if causal else None
    low = (ahead - window) // step + 1 if window > 0 else None
    return Band(low, high)


def cut(band: Band, s: int, t: int) -> BandBlock | None:
    """The part of s rows and t columns where the band shows something; None where it shows nothing."""
    low, high = band.low, band.high
    i0 = 0 if high is None else max(0, -high)
    i1 = s if low is None else min(s, t - low)
    j0 = 0 if low is None else max(0, i0 + low)
    j1 = t if high is None else min(t, i1 + high)
    if i0 >= i1 or j0 >= j1 or (low is not None and high is not None and low > high):
        return None
    shift = (j1 - j0) - (i1 - i0)
    left = -1 if low is None else shift - (low + i0 - j0)
    right = -1 if high is None else high + i0 - j0 - shift
    # A bound that takes nothing away is none: the last row sees the first column, the first row the last.
    left = -1 if left >= j1 - j0 - 1 else left
    right = -1 if right + shift >= j1 - j0 - 1 else right
    return BandBlock(i0, i1, j0, j1, left, right)


@attrs.frozen
class Comb:
    """The columns first, first + step, ..., and what of them the rows see."""

    first: int
    step: int
    cut: BandBlock


@lru_cache(maxsize=4096)
def combs(
    causal: bool, window: int, rows: HostRange | None, columns: HostRange | None, s: int, t: int
) -> tuple[Comb, ...] | None:
    """The calls that make up attention of s rows over t columns, mostly one; () where nobody sees anything.

    None where positions are not known, or lie so that they make no bands.
    """
    band = known_band(causal, window, rows, columns)
    if band is not None:
        part = cut(band, s, t)
        return () if part is None else (Comb(0, 1, part),)
    if rows is None or columns is None or columns[1] not in (0, 1) or not 1 < rows[1] <= MAX_COMBS:
        return None
    found, step = [], rows[1]
    for first in range(min(step, t)):
        band = known_band(causal, window, rows, (columns[0] + first, step))
        part = None if band is None else cut(band, s, len(range(first, t, step)))
        found += [] if part is None else [Comb(first, step, part)]
    return tuple(found)


def visible_pairs(cut_: BandBlock) -> int:
    """How many pairs of a row and a column it shows."""
    s, t = cut_.i1 - cut_.i0, cut_.j1 - cut_.j0
    shift = t - s
    last = t - 1 if cut_.right < 0 else shift + cut_.right  # what the first row sees last
    first = -(s + t) if cut_.left < 0 else shift - cut_.left  # and what it sees first, which may lie before column 0
    return _ramp(s, t, last + 1) - _ramp(s, t, max(first, -s))


def _ramp(s: int, t: int, start: int) -> int:
    """Sum over i < s of clamp(start + i, 0, t)."""
    rising = max(0, min(s, t - start) - max(0, -start))  # rows where it lies between 0 and t
    begin = max(0, -start)
    full = max(0, s - max(0, t - start)) * t
    return rising * (start + begin) + rising * (rising - 1) // 2 + full
