"""Among orders of work whose copies have to be searched for, the fastest: few are searched in full.

Problem: what is made again saves copies, and what is copied saves making again, so each of hundreds of orders has to be
scored with the copies that it needs, and one search for these takes seconds. Idea: two things are known for little.
What an order makes again is a bound, because copies cannot give it back; and the choices that were best for another
order (which updates run on the host, how much stays) give a sketch of its time. Sketches lead to the order around which
time is least, and only the best of them are searched in full.

    orders     0    1    2 ... 40 ... 80 ... 244          made again: 0 %, .1 %, .1 % ... 30 %
    bound      all from 97 on make more again than copies cost where nothing is made again: never looked at
    sketches   0, 24, 48, 72, 96; 30, 36, ... 66; 46, 48, 50
    in full    48, 46

A sketch is off by about as much for one order as for the next, so those that were searched in full, of which the whole
is one, say what to expect of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

import attrs

from colofunc.planner.candidate import Finish, FinishedProgram
from colofunc.program.ir import Program
from colofunc.program.passes.recompute import Replay

FULL, MOST = 2, 4
"""At most FULL orders that fit are searched in full, where a sketch promises to be faster; MOST with those that turn
out not to fit."""
FINE = 6e-3
"""Where copies are searched for, orders whose time differs by a smaller part of the step's work are not told apart."""


@attrs.frozen(eq=False)
class Order:
    """An order of work that was proposed; a call makes the program.

    `given_bytes`: the memory that it was found for. The peak is something else, but from order to order the two go
    alike. `at_most_s`: seconds of its work; what nobody reads may be left out when the program is made. `replayed`: the
    order of nodes, where there is no loop: it says what the program does again, for less than writing it.
    """

    make: Callable[[], Program]
    given_bytes: int
    at_most_s: float
    replayed: Callable[[], Replay] | None = None

    def __call__(self) -> Program:
        return self.make()


Orders = Sequence[Order]
AgainS = Callable[[Program | Order], float]
"""Seconds of what an order makes again."""


def fastest(
    orders: Orders,
    again_s: AgainS,
    tried: Finish,
    whole: FinishedProgram,
    budget: int,
    work_s: float,
    below_s: float = inf,
) -> list[FinishedProgram]:
    """Those that were searched in full; the fastest that fits is among them where one does, else the leanest.

    Orders go from fast to lean. again_s: what a program makes again, of `work_s` seconds. `whole`: where nothing is.
    below_s: what costs as many seconds more is of no use.
    """
    return _Among(orders, again_s, tried, whole, budget, work_s, below_s).run() if orders else []


class _Among:
    def __init__(
        self, orders: Orders, again_s: AgainS, tried: Finish, whole: FinishedProgram, budget: int, work_s: float,
        below_s: float,
    ) -> None:  # fmt: skip
        self.orders, self.tried, self.whole, self.budget, self.work_s = orders, tried, whole, budget, work_s
        self.below_s = below_s
        self.again_of = again_s
        self.again: dict[int, float] = {}
        self.sketches: dict[int, FinishedProgram] = {}

    def run(self) -> list[FinishedProgram]:
        last = len(self.orders) - 1
        low = 0 if self.whole.fits(self.budget) else self._first(0, last, self._fits)
        if low > last:
            return [self.tried(self.orders[last]())] if self.below_s == inf else []
        most_s = min(self.below_s, self.whole.more_s) if self.whole.fits(self.budget) else self.below_s
        high = self._first(low, last, lambda k: self.again_s(k) >= most_s) - 1
        # From where copies are hidden, less is faster.
        if low <= high and self._hides(low):
            high = low
        # What was searched in full gains this beyond its sketch, or loses it: first as the whole does.
        gain_s = -self._excess_s()
        if -gain_s >= most_s:
            return []  # an order that hides all copies would come to more, too
        if low < high and self._hides(high):
            high = self._first(low, high, self._hides, FINE * self.work_s)
        self._search(low, high)
        found = list[FinishedProgram]()
        for k in sorted(self.sketches, key=self._rank)[:MOST]:
            fits = [fit for fit in found if fit.fits(self.budget)]
            best_s = min([most_s, *(fit.more_s for fit in fits)])
            if best_s < inf and (len(fits) >= FULL or self.sketches[k].more_s - gain_s >= best_s):
                break
            if 0 < self.again_s(k) < best_s:  # one that makes nothing again is the whole, which was searched in full
                found.append(self.tried(self.orders[k]()))
                gain_s = max(gain_s, self.sketches[k].more_s - found[-1].more_s)
        return found

    def _excess_s(self) -> float:
        """By how much the whole, searched in full, takes longer than its own sketch says."""
        if 0 not in self.sketches or self.again_s(0) > 0:
            return 0.0
        return max(0.0, self.whole.more_s - self.sketches[0].more_s)

    def _search(self, low: int, high: int) -> None:
        """Sketches: some that lie apart, then those half way between the best and its neighbours."""
        for k in range(low, high + 1, max(1, (high - low) // 4)):
            if self.sketches and self.again_s(k) >= self._best_s():
                break
            self.sketch(k)
        while middles := [k for k in self._middles(low, high) if self.again_s(k) < self._best_s()]:
            for k in middles:
                self.sketch(k)

    def _middles(self, low: int, high: int) -> list[int]:
        """Half way between the best sketch and the nearest ones on either side, where they are told apart."""
        best = min(self.sketches, key=self._rank, default=low)
        below = max((k for k in self.sketches if k < best), default=max(low - 1, -1))
        above = min((k for k in self.sketches if k > best), default=high + 1)
        middles = list[int]()
        for one, other in ((below, best), (best, above)):
            middle = (one + other) // 2
            apart_s = self.again_s(min(other, high)) - self.again_s(max(one, low))
            if one < middle < other and low <= middle <= high and apart_s >= FINE * self.work_s:
                middles.append(middle)
        return middles

    def _best_s(self) -> float:
        """Of the best sketch, if it fits."""
        best = self.sketches[min(self.sketches, key=self._rank)]
        return best.more_s if best.fits(self.budget) else inf

    def _first(self, low: int, high: int, holds: Callable[[int], bool], alike_s: float = 0.0) -> int:
        """The first of low..high for which something holds that holds for all behind it; high + 1 where for none.

        alike_s: an order that makes at most so much more again does as well.
        """
        last, high = high, high + 1
        while low < high and (high > last or self.again_s(high) - self.again_s(low) > alike_s):
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    def sketch(self, k: int) -> FinishedProgram:
        if k not in self.sketches:
            self.sketches[k] = self.tried(self.orders[k](), self.whole)
        return self.sketches[k]

    def _fits(self, k: int) -> bool:
        return self.sketch(k).fits(self.budget)

    def _hides(self, k: int) -> bool:
        """Whether an order fits and takes no more time than what it makes again."""
        return self._fits(k) and self.sketch(k).more_s <= self.again_s(k)

    def again_s(self, k: int) -> float:
        if k not in self.again:
            self.again[k] = self.again_of(self.orders[k])
        return self.again[k]

    def _rank(self, k: int) -> tuple[bool, float, int]:
        return not self.sketches[k].fits(self.budget), self.sketches[k].more_s, k
