"""Among orders of work whose copies have to be searched for, the fastest: few are searched in full.

Problem: what is made again saves copies, and what is copied saves making again, so each of hundreds of orders has to be
scored with the copies that it needs, and one search for these takes seconds. Idea: the choices that were best for
another order (which updates run on the host, how much stays) give a sketch of an order's time for little. From order to
order more is made again and copies take less, until they take what they take for the leanest: from there on making more
again only costs. So the best order is about the first that is as good as the leanest in this. It is looked for where it
is expected, because what copies take goes with the memory that an order was found for, and only the best sketches are
searched in full.

    orders         0 ...  101 ...  150 ...  170 ...  256 ...  870
    made again     0 %    2.7 %    3.8 %    4.3 %    6.3 %    29 %
    copies        36 %    9.7 %    1.5 %   -1.3 %   -1.3 %    -1.3 %       less than nothing: the host takes work off
    sketched              870, 256, 101, 150, 165, 169, 170
    in full               170

A sketch is off by about as much for one order as for the next, so those that were searched in full say what to expect of
the others.
"""

from __future__ import annotations

from bisect import bisect_left
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
        if whole.fits(budget) and not self.again_s(0):
            self.sketches[0] = whole
        self.least_s = 0.0  # of what copies take, where nothing more can be saved

    def run(self) -> list[FinishedProgram]:
        last = len(self.orders) - 1
        low = 0 if self.whole.fits(self.budget) else self._first(0, last, self._fits)
        if low > last:
            return [self.tried(self.orders[last]())] if self.below_s == inf else []
        most_s = min(self.below_s, self.whole.more_s) if self.whole.fits(self.budget) else self.below_s
        # The leanest order has the least to copy: of no other one do copies take less.
        self.least_s = self._copying_s(last)
        if self.again_s(low) + self.least_s >= most_s:
            return []
        self._search(low, last, most_s)
        found = list[FinishedProgram]()
        gains_s = list[float]()  # of those that were searched in full, beyond their sketches
        for k in sorted(self.sketches, key=self._rank)[:MOST]:
            fits = [fit for fit in found if fit.fits(self.budget)]
            best_s = min([most_s, *(fit.more_s for fit in fits)])
            expected_s = self.sketches[k].more_s - max(gains_s, default=0.0)
            if best_s < inf and (len(fits) >= FULL or expected_s >= best_s):
                break
            if self.again_s(k) > 0:  # one that makes nothing again is the whole, which was searched in full
                found.append(self.tried(self.orders[k]()))
                gains_s.append(self.sketches[k].more_s - found[-1].more_s)
        return found

    def _search(self, low: int, last: int, most_s: float) -> None:
        """Sketches around the first order whose copies take no longer than those of the leanest, then half way between
        the best and its neighbours.
        """
        before, behind = low, last
        while self.again_s(behind) - self.again_s(before) > FINE * self.work_s:
            k = self._expected(low, before, behind)
            if k == before:
                break
            hides = self._at_least_s(k) >= self._best_s(most_s) or self._copying_s(k) <= self._hidden_s
            before, behind = (before, k) if hides else (k, behind)
        while middles := self._middles(low, last, most_s):
            for k in middles:
                self.sketch(k)

    def _expected(self, low: int, before: int, behind: int) -> int:
        """Between an order whose copies show and one that hides them, the one that is expected to hide them just so:
        what they take goes with the memory that an order was found for.
        """
        given_bytes = self.orders[before].given_bytes
        expected_bytes = (given_bytes + self.orders[behind].given_bytes) / 2
        earlier = max((k for k in self.sketches if low <= k < before), default=None)
        if earlier is not None:
            saved_s = self._copying_s(earlier) - self._copying_s(before)
            freed_bytes = self.orders[earlier].given_bytes - given_bytes
            if saved_s > 0:
                left_s = self._copying_s(before) - self._hidden_s
                expected_bytes = max(expected_bytes, given_bytes - left_s * freed_bytes / saved_s)
        k = bisect_left(range(behind), True, lo=before + 1, key=lambda k: self.orders[k].given_bytes <= expected_bytes)
        return min(k, behind - 1)

    def _middles(self, low: int, last: int, most_s: float) -> list[int]:
        """Half way between the best sketch and the nearest ones on either side, where they are told apart and may be
        better.
        """
        best = min(self.sketches, key=self._rank, default=low)
        below = max((k for k in self.sketches if k < best), default=max(low - 1, -1))
        above = min((k for k in self.sketches if k > best), default=last + 1)
        middles = list[int]()
        for one, other in ((below, best), (best, above)):
            middle = (one + other) // 2
            apart_s = self.again_s(min(other, last)) - self.again_s(max(one, low))
            is_between = one < middle < other and low <= middle <= last
            if is_between and apart_s >= FINE * self.work_s and self._at_least_s(middle) < self._best_s(most_s):
                middles.append(middle)
        return middles

    def _copying_s(self, k: int) -> float:
        """By how much an order takes longer than what it makes again."""
        return self.sketch(k).more_s - self.again_s(k)

    @property
    def _hidden_s(self) -> float:
        return self.least_s + FINE * self.work_s

    def _at_least_s(self, k: int) -> float:
        """What an order takes longer at least."""
        return self.again_s(k) + self.least_s

    def _best_s(self, most_s: float) -> float:
        """Of the best sketch, if it fits."""
        best = self.sketches[min(self.sketches, key=self._rank)]
        return min(best.more_s, most_s) if best.fits(self.budget) else most_s

    def _first(self, low: int, high: int, holds: Callable[[int], bool]) -> int:
        """The first of low..high for which something holds that holds for all behind it; high + 1 where for none."""
        return bisect_left(range(high + 1), True, lo=low, key=holds)

    def sketch(self, k: int) -> FinishedProgram:
        if k not in self.sketches:
            self.sketches[k] = self.tried(self.orders[k](), self.whole)
        return self.sketches[k]

    def _fits(self, k: int) -> bool:
        return self.sketch(k).fits(self.budget)

    def again_s(self, k: int) -> float:
        if k not in self.again:
            self.again[k] = self.again_of(self.orders[k])
        return self.again[k]

    def _rank(self, k: int) -> tuple[bool, float, int]:
        return not self.sketches[k].fits(self.budget), self.sketches[k].more_s, k
