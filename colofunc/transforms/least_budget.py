"""The least budget that can be given: what an error names where no plan is found.

Problem: how much is sent at once, what is copied and which shardings are looked at go by the budget, so the peak of the leanest plan
that one search tried is not yet a budget that another search keeps to. Idea: begin with one byte and ask for one byte less than was
counted last, until nothing holds less. This depends on no budget that was given, so every error names the same bytes; and whoever
gives at least them, and whose search finds nothing, is given the plan that was counted.

    given 1,000 B: nothing.  asked for 1 B: a plan of 728 B, 727 B: one of 696 B, 695 B: nothing below    696 B are named
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import attrs

from colofunc.planner.fitted import Fitted
from colofunc.transforms.decide import Decided

MAX_DESCENTS, MAX_DESCENTS_LARGE = 12, 2
"""At most this many searches below the least peak so far; the second for large programs, whose searches take long."""
MAX_RAISES, RAISE_PART = 16, 8
"""Where another tier is short, the device's budget is raised by 1/RAISE_PART at a time, at most this many times."""
GIB_FROM_BYTES = 1 << 27
"""Budgets from here on are written in GiB with two decimals, smaller ones in bytes."""


@attrs.frozen(eq=False)
class Tried:
    """A plan that was completed and counted, and the budget that it was made for."""

    decided: Decided
    done: Fitted
    budget_bytes: int

    @property
    def least_bytes(self) -> int:
        """The budget that it keeps to, as it is said."""
        return said_bytes(self.done.peak_bytes)


def least_budget(leanest: Callable[[int], Tried], large: bool) -> Tried:
    """The leanest plan found. `leanest(bytes)`: of a search within so many the first plan that fits, or else the leanest."""
    best = leanest(1)
    for _ in range(MAX_RAISES if best.done.short else 0):
        asked_bytes = max(best.done.peak_bytes, best.budget_bytes + max(1, best.budget_bytes // RAISE_PART))
        best = leanest(asked_bytes)
        if not best.done.short:
            break
    for _ in range(MAX_DESCENTS_LARGE if large else MAX_DESCENTS):
        less = leanest(_below(best.least_bytes))
        if less.done.short or less.done.peak_bytes >= best.done.peak_bytes:
            break
        best = less
    return best


def said(nbytes: int) -> str:
    """Rounded up: whoever gives it as a budget has enough."""
    return f"{_hundredths(nbytes) / 100:.2f} GiB" if nbytes >= GIB_FROM_BYTES else f"{nbytes:,} B"


def said_bytes(nbytes: int) -> int:
    """The bytes that a budget has which is given as `said` says it."""
    return int(_hundredths(nbytes) / 100 * 2**30) if nbytes >= GIB_FROM_BYTES else nbytes


def _below(nbytes: int) -> int:
    """The next smaller amount that is said in other words."""
    return int((_hundredths(nbytes) - 1) / 100 * 2**30) if nbytes > GIB_FROM_BYTES else nbytes - 1


def _hundredths(nbytes: int) -> int:
    return ceil(nbytes / 2**30 * 100)
