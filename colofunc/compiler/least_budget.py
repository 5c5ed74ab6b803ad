"""The least budget that a step keeps to: what an error names where nothing fits, and what anybody then can give.

Problem: how much is sent at once, what is copied and which shardings are compared depend on the budget, so the peak of
the leanest plan that one search tried is not yet a budget that another search keeps to. Idea: begin with one byte and
ask for one byte less than was counted last, until nothing holds less. This depends on no budget that was given, so
every error names the same bytes (but for a `glance` where a budget is far too small, which may name more); and whoever
gives at least them, and whose search finds nothing, is given the plan that was counted.

    given 1,000 B: nothing.  asked for 1 B: a plan of 728 B, 727 B: one of 696 B, 695 B: nothing below    696 B are named

A search for one byte tries little (`planner/joint.py` gives up early where a budget is far too small), and one that
asks for a byte less ends with the first plan that fits. So where a byte less was found once, half is asked for next:
nothing is far too small there, and the leanest of all that such a search tries is what many small steps would come to.

On several ranks the shardings that a search tries depend on what making values again costs, so one under a named policy
tries others than a free one. Therefore a pool of shardings from the fastest to the leanest, which depends on the
program alone, is completed as well: the same ones under each policy, and a free step counts every named policy in each
of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil

import attrs

from colofunc import progress
from colofunc.compiler.decisions import Decisions
from colofunc.planner.candidate import FinishedProgram

MAX_DESCENTS, MAX_DESCENTS_LARGE = 12, 2
"""At most this many searches below the least peak so far; the second for large programs, whose searches take long."""
MAX_RAISES, RAISE_PART = 16, 8
"""Where another tier is short, the device's budget is raised by 1/RAISE_PART at a time, at most this many times."""
DESCENTS_IN_POOL = 2
"""This many of the pool, the leanest, are asked for less than they were counted with."""
GIB_FROM_BYTES = 1 << 27
"""Budgets from here on are written in GiB with two decimals, smaller ones in bytes."""


@attrs.frozen(eq=False)
class Trial:
    """A plan that was completed and counted, and the budget that it was made for."""

    decided: Decisions
    done: FinishedProgram
    budget_bytes: int

    @property
    def least_bytes(self) -> int:
        """The budget that it keeps to, as an error writes it."""
        return rounded_bytes(self.done.peak_bytes)


SearchBudget = Callable[[int], Trial]
"""A budget in bytes -> the first plan that fits, or else the leanest that the search tried."""


def least_budget(search: SearchBudget, large: bool, pool: Sequence[SearchBudget] = ()) -> Trial:
    """The leanest plan found.

    pool: shardings that are tried whatever is asked for, each completed for so many bytes.
    """
    best = _leanest_of_pool(pool, search(1))
    if best.done.short:
        best = _with_more_device_memory(search, best)
    return _descend(search, best, MAX_DESCENTS_LARGE if large else MAX_DESCENTS)


def glance(pool: Sequence[SearchBudget]) -> Trial:
    """The leanest of some shardings when little is asked for, with no second search: enough where a budget is far below
    it.
    """
    return min((complete(1) for complete in pool), key=_rank)


def _leanest_of_pool(pool: Sequence[SearchBudget], best: Trial) -> Trial:
    """The leanest of `best` and the pool: all are asked for one byte, the leanest few for less than they came to."""
    trials = [(complete(1), complete) for complete in pool]
    trials.sort(key=lambda pair: _rank(pair[0]))
    for trial, complete in trials[:DESCENTS_IN_POOL]:
        best = min(best, _descend(complete, trial, MAX_DESCENTS), key=_rank)
    return best


def _with_more_device_memory(search: SearchBudget, best: Trial) -> Trial:
    """Of a plan that lacks memory of another tier: the first for more bytes of the device that lacks none."""
    for _ in range(MAX_RAISES):
        raised_bytes = best.budget_bytes + max(1, best.budget_bytes // RAISE_PART)
        best = search(max(best.done.peak_bytes, raised_bytes))
        if not best.done.short:
            break
    return best


def _descend(search: SearchBudget, best: Trial, max_searches: int) -> Trial:
    """The leanest plan that one search comes to when it is asked for less than `best` holds, again and again."""
    ask_for_half = False  # this is worth a search only once a byte less was found
    for _ in progress.over("least budget searches", range(max_searches)):
        if ask_for_half:
            asked_bytes = max(1, best.least_bytes // 2)
        else:
            asked_bytes = _next_below(best.least_bytes)
        trial = search(asked_bytes)
        if not trial.done.short and trial.done.peak_bytes < best.done.peak_bytes:
            best = trial
            ask_for_half = not ask_for_half
        elif ask_for_half:
            ask_for_half = False
        else:
            break
    return best


def _rank(trial: Trial) -> tuple[bool, int]:
    """Plans for which every other tier has room come first, the leanest of them first."""
    return bool(trial.done.short), trial.done.peak_bytes


# ---- how budgets are written ----


def budget_text(nbytes: int) -> str:
    """Rounded up: whoever gives it as a budget has enough."""
    if nbytes >= GIB_FROM_BYTES:
        return f"{_hundredths_of_gib(nbytes) / 100:.2f} GiB"
    return f"{nbytes:,} B"


def rounded_bytes(nbytes: int) -> int:
    """The bytes of a budget that is given as `budget_text` writes it."""
    if nbytes >= GIB_FROM_BYTES:
        return int(_hundredths_of_gib(nbytes) / 100 * 2**30)
    return nbytes


def _next_below(nbytes: int) -> int:
    """The next smaller budget that is written in another way."""
    if nbytes > GIB_FROM_BYTES:
        return int((_hundredths_of_gib(nbytes) - 1) / 100 * 2**30)
    return nbytes - 1


def _hundredths_of_gib(nbytes: int) -> int:
    return ceil(nbytes / 2**30 * 100)
