"""The least budget that can be given: what an error names where no plan is found.

Problem: how much is sent at once, what is copied and which shardings are looked at go by the budget, so the peak of the leanest plan
that one search tried is not yet a budget that another search keeps to. Idea: begin with one byte and ask for one byte less than was
counted last, until nothing holds less. This depends on no budget that was given, so every error names the same bytes (but for a `glance`
where a budget is far too small, which may name more); and whoever gives at least them, and whose search finds nothing, is given the
plan that was counted.

    given 1,000 B: nothing.  asked for 1 B: a plan of 728 B, 727 B: one of 696 B, 695 B: nothing below    696 B are named

A search for one byte looks at little (`planner/joint.py` gives up early where a budget is far too small), and one that asks for a
byte less ends with the first plan that fits. So where a byte less was found once, half is asked for next: nothing is far too small
there, and the leanest of all that such a search looks at is what many small steps would come to.

On several ranks which shardings a search looks at goes by what making values again costs, so one under a named policy looks at others
than a free one. Therefore a pool of shardings from the fastest to the leanest, which depends on the program alone, is completed as well:
the same ones under each policy, and a free step counts every named policy in each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import attrs

from colofunc.compiler.decisions import Decided
from colofunc.planner.candidate import Fitted

MAX_DESCENTS, MAX_DESCENTS_LARGE = 12, 2
"""At most this many searches below the least peak so far; the second for large programs, whose searches take long."""
MAX_RAISES, RAISE_PART = 16, 8
"""Where another tier is short, the device's budget is raised by 1/RAISE_PART at a time, at most this many times."""
FINISHERS = 2
"""Of the pool so many, the leanest, are asked for less than they were counted with."""
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


Leanest = Callable[[int], Tried]
"""Bytes -> of a search within so many the first plan that fits, or else the leanest."""


def least_budget(search: Leanest, large: bool, pool: Sequence[Leanest] = ()) -> Tried:
    """The leanest plan found. pool: shardings that are looked at whatever is asked for, each completed for so many bytes."""
    best = _raised(search, _less_of(pool, search(1)))
    return _descended(search, best, MAX_DESCENTS_LARGE if large else MAX_DESCENTS)


def glance(pool: Sequence[Leanest]) -> Tried:
    """The leanest of some shardings when little is asked for, with no second look: where a budget is far below it, that is enough."""
    return min((complete(1) for complete in pool), key=_rank)


def _less_of(pool: Sequence[Leanest], best: Tried) -> Tried:
    """The leanest of the pool and what was found: all are asked for little, the best few for less than that."""
    tried = sorted(((complete(1), complete) for complete in pool), key=lambda one: _rank(one[0]))
    for one, complete in tried[:FINISHERS]:
        best = min(best, _descended(complete, one, MAX_DESCENTS), key=_rank)
    return best


def _raised(search: Leanest, best: Tried) -> Tried:
    """Where another tier is short, the first plan for more bytes of the device where none is."""
    for _ in range(MAX_RAISES if best.done.short else 0):
        asked_bytes = max(best.done.peak_bytes, best.budget_bytes + max(1, best.budget_bytes // RAISE_PART))
        best = search(asked_bytes)
        if not best.done.short:
            break
    return best


def _descended(search: Leanest, best: Tried, searches: int) -> Tried:
    """The leanest plan that one search leads to, from one that was found."""
    halved = True  # not worth a search unless a byte less is found
    for _ in range(searches):
        less = search(_below(best.least_bytes) if halved else max(1, best.least_bytes // 2))
        if not less.done.short and less.done.peak_bytes < best.done.peak_bytes:
            best, halved = less, not halved
        elif halved:
            break
        else:
            halved = True
    return best


def _rank(one: Tried) -> tuple[bool, int]:
    return bool(one.done.short), one.done.peak_bytes


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
