"""Sharding, and what is made again or moved, decided together under one budget.

Problem: which sharding is best depends on what it costs to fit it into memory, and that is known only once recomputation and
copies have been searched for, which takes too long for every sharding there is. Idea: memory has a price, the seconds that a
byte at the peak costs. A finished plan tells it: what its next byte costs to be made again, or what making again and copying cost
over the bytes that they saved. The search for a sharding pays it, its plan is finished and tells another one, a few times; of small
programs so do two plans that cost the same at some price, because a third one may be better at it. The fastest is tried, and plans
for a budget that sharding alone meets, unless the searches at prices say that none of these can be faster; every one is scored as
it would run, and the fastest that fits is taken. So none of the separate choices (the fastest and make again, or move; less by
sharding alone) is better.

    fastest: 1.00 s, 12 GB; within 8 GB 1.80 s               -> .2 s a GB
    at .2 s a GB: 1.15 s, 9 GB; within 8 GB 1.20 s           taken
    sharding alone within 8 GB: 1.45 s

Source: Lagrangian duality; the prices are those of Everett, Operations Research 11 (1963).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice, pairwise, takewhile
from math import inf
from typing import Generic, TypeVar

import attrs

from colofunc.errors import PlanError
from colofunc.planner.candidate import Fitted

P = TypeVar("P")

DEARER = 4.0
"""The highest price tried, as a multiple of the one that a plan tells: that is an average, and the next byte may cost more."""
SEARCHES = 6
"""At most this many searches with a price of memory."""
SEARCHES_FIT = 3
"""At most this many of a program that is not small, once something fits."""
LESS = 0.9
"""Where a plan fits only with help, the next budget for sharding alone is at most this part of the last."""
NEARBY = 2
"""At most this many searches with a price of memory, where a sharding is known that met a budget of a like step."""
FINE = 1e-3
"""A plan within this relative distance of the fastest sharding is not improved further."""
FAR, FEW = 2, 2
"""Where the leanest plan needs more than FAR times the budget, at most FEW searches are at a price of memory."""
FRONTIER, FRONTIER_LARGE = 8, 2
"""At most this many searches at prices between the fastest sharding and the leanest, where no plan tells a price; the second for large
programs."""
LOOK, LITTLE = 256, 0.01
"""At most LOOK shardings to which no price leads are looked at, and only those whose relative gain may exceed LITTLE."""


@attrs.frozen(eq=False)
class Proposed(Generic[P]):
    """A plan of a sharding: its seconds and estimated peak without help, and what makes it differ from others."""

    plan: P
    cost_s: float
    peak_bytes: int
    key: object


@attrs.frozen(eq=False)
class Scored(Generic[P]):
    """A plan, finished."""

    proposed: Proposed[P]
    done: Fitted

    @property
    def total_s(self) -> float:
        return self.proposed.cost_s + self.done.more_s


Propose = Callable[[int | None, float], Proposed[P]]  # (bytes to keep to, seconds a byte at the peak) -> the cheapest then
Complete = Callable[[P, float], Fitted]  # (plan, seconds more from which on it is of no use) -> finished
EndS = Callable[[Fitted], float]
Every = Callable[[float | None], Iterable[Proposed[P]]]  # (seconds a byte costs; None: nothing fits so far) -> others, cheapest first


def together(
    propose: Propose[P],
    finish: Complete[P],
    budget: int,
    parts: int = 1,
    tries: int = 4,
    searches: int = SEARCHES,
    every: Every[P] = lambda price_s: (),
    most: int = LOOK,
    least: Callable[[], int] = lambda: 0,
    end_s: EndS | None = None,
    small: bool = True,
) -> tuple[Scored[P] | None, Scored[P]]:
    """(the fastest plan found that fits or None, the leanest that was tried).

    A step in `parts` microbatches may hold so many times less than is estimated. `every`: of a step that is small enough
    to have few shardings all, of others some to which no price leads; where nothing fits some that may, in any order. At most `most`
    of them are finished. `least`: bytes that every plan needs, asked for when one was finished; where these are too many, nothing else is.
    `end_s`: seconds of a finished step by the clock, which has the last word among those that fit. `small`: searches take little, so more
    prices are tried. Raises PlanError where nothing can be proposed.
    """
    search = _Together(propose, finish, budget, budget * parts, small)
    best, leanest = search.run(tries, searches, every, most, least)
    return (best if end_s is None else search.soonest(end_s)), leanest


def nearby(
    known: Proposed[P], propose: Propose[P], finish: Complete[P], budget: int, parts: int = 1, searches: int = NEARBY,
    end_s: EndS | None = None, small: bool = True,
) -> Scored[P] | None:  # fmt: skip
    """The fastest plan that fits of `known`, the fastest sharding, and a few at prices of memory; None where none of them does.

    `known` met a budget of a like step. `propose` is expected to search from there. `small`: as of `together`.
    """
    search = _Together(propose, finish, budget, budget * parts, small)
    best = search.run_nearby(known, searches)
    return best if end_s is None else search.soonest(end_s)


def frontier(propose: Propose[P], most: int) -> list[Proposed[P]]:
    """Shardings from the fastest to the leanest, whatever is done with them afterwards: the two, and those at prices between.

    `propose` gives the leanest where nothing keeps to the bytes asked for. Where neighbours are furthest apart is looked first.
    """
    found, asked = [propose(None, 0.0), propose(1, 0.0)], list[float]()
    for _ in range(most):
        line = _line((one.peak_bytes, one.cost_s) for one in found)
        apart = sorted(pairwise(line), key=lambda pair: pair[0][0] - pair[1][0])
        price_s = next((p for p in map(_price_between, apart) if not _near_any(p, asked)), None)
        if price_s is None:
            break
        asked.append(price_s)
        found.append(propose(None, price_s))
    different = list[Proposed[P]]()
    for one in sorted(found, key=lambda one: one.cost_s):
        if all(one.key != other.key for other in different):
            different.append(one)
    return different


def _line(points: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of (bytes, seconds) those that no other beats in both, from lean to fast."""
    line = list[tuple[int, float]]()
    for nbytes, cost_s in sorted(points):
        if not line or cost_s < line[-1][1]:
            line.append((nbytes, cost_s))
    return line


def _price_between(pair: tuple[tuple[int, float], tuple[int, float]]) -> float:
    """Seconds a byte at which a lean plan and a fast one cost the same."""
    lean, fast = pair
    return (lean[1] - fast[1]) / (fast[0] - lean[0])


def _near_any(price_s: float, asked: Iterable[float]) -> bool:
    return any(0.9 < price_s / other < 1.1 for other in asked)


class _Together(Generic[P]):
    def __init__(self, propose: Propose[P], finish: Complete[P], budget: int, aim: int, small: bool) -> None:
        self.propose, self.finish, self.budget, self.aim, self.small = propose, finish, budget, aim, small
        self.scored: list[Scored[P]] = []
        self.seen: set[tuple[int, float]] = set()  # (bytes, seconds) of all that was proposed
        self.best: Scored[P] | None = None
        self.alone_at_least_s = 0.0  # of what keeps to the budget without help, as far as searches at prices find what is cheapest

    def run(
        self, tries: int, searches: int, every: Every[P], most: int, least: Callable[[], int]
    ) -> tuple[Scored[P] | None, Scored[P]]:
        first = self.score(self.propose(None, 0.0))
        if first is not None and not self.near(first) and not (self.best is None and least() > self.aim):
            fits = self.best is not None
            if not fits:
                self.for_less(tries)
            self.priced(first, min(searches, FEW) if self.far() else searches)
            if fits and self.best is not None and self.alone_at_least_s < self.best.total_s * (1 - FINE):
                self.for_less(tries)
            if self.best is None:
                self.all_of(every(None), most)
                if self.best is not None:
                    self.priced(first, searches // 2)
            if self.best is None or self.best.total_s > first.proposed.cost_s * (1 + LITTLE):
                self.all_of(every(self.price_s(self.best or first)), most)
        return self.best, self.leanest()

    def run_nearby(self, known: Proposed[P], searches: int) -> Scored[P] | None:
        fastest = self.score(self.propose(None, 0.0))
        if fastest is not None and not self.near(fastest):
            if self.promises(known):
                self.score(known)
            if self.best is not None:
                self.priced(fastest, searches)
        return self.best

    def leanest(self) -> Scored[P]:
        return min(self.scored, key=lambda one: one.done.peak_bytes)

    def soonest(self, end_s: EndS) -> Scored[P] | None:
        """Of all that were finished and fit, the one that the clock says is the fastest."""
        fits = [one for one in self.scored if one.done.fits(self.budget)]
        return fits[0] if len(fits) == 1 else min(fits, key=lambda one: end_s(one.done), default=None)

    def far(self) -> bool:
        """Whether all that was tried holds far too much."""
        return self.best is None and self.leanest().done.peak_bytes > FAR * self.budget

    def score(self, proposed: Proposed[P]) -> Scored[P] | None:
        """The plan finished, if it may be the best: it was not before, and is not slower without help than the best with it."""
        self.seen.add((proposed.peak_bytes, proposed.cost_s))
        if any(proposed.key == one.proposed.key for one in self.scored) or (self.best and proposed.cost_s >= self.best.total_s):
            return None
        below_s = inf if self.best is None else self.best.total_s - proposed.cost_s
        one = Scored(proposed, self.finish(proposed.plan, below_s))
        self.scored.append(one)
        if one.done.fits(self.budget) and (self.best is None or one.total_s < self.best.total_s):
            self.best = one
        return one

    def near(self, first: Scored[P]) -> bool:
        """Whether the best is as fast as the fastest sharding is without a budget."""
        return self.best is not None and self.best.total_s <= (first.proposed.cost_s + first.done.asked_s) * (1 + FINE)

    def for_less(self, tries: int) -> None:
        """Sharding alone: for the budget, then for less, until no help is needed or even so it is slower.

        Without it one of 20 steps of two layers (`bench jointly`, as of a larger step) takes 28 % longer.
        """
        aim = self.aim
        for _ in range(tries):
            try:
                proposed = self.propose(aim, 0.0)
            except PlanError:  # nothing is that lean
                return
            if self.best is not None and proposed.cost_s >= self.best.total_s:
                return
            one = self.score(proposed)
            if one is not None and one.done.fits(self.budget) and one.done.more_s <= 0:
                return
            over = 1.0 if one is None else one.done.peak_bytes / self.budget
            aim = int(min(aim, proposed.peak_bytes) * min(LESS, 0.99 / over))

    def priced(self, first: Scored[P], searches: int) -> None:
        """Sharding at prices of memory: those that the fastest plan and each new best one tell.

        Where nothing fits, and of small programs, a dearer one and those between plans as well.
        """
        begin = self.next_price_s(first)
        ahead, asked = [begin], list[float]()
        for number in range(searches):
            if number >= SEARCHES_FIT and not self.small and self.best is not None:
                return
            others = [DEARER * begin, *self.between()] if self.small or self.best is None else []
            new = (p for p in (*ahead, *others) if not _near_any(p, asked))
            price_s = next(new, None)
            if price_s is None:
                return
            asked.append(price_s)
            proposed = self.propose(None, price_s)
            # Whatever keeps to the bytes costs no less at this price than what is cheapest at it, and the price of those bytes is known.
            at_least_s = proposed.cost_s + price_s * (proposed.peak_bytes - self.aim)
            self.alone_at_least_s = max(self.alone_at_least_s, at_least_s)
            if not self.promises(proposed):
                continue
            before, one = self.best, self.score(proposed)
            if not self.small and self.best is not None and self.best.total_s <= at_least_s:
                return  # where bytes beyond the budget cost this price, nothing is faster
            if one is not None and self.best is not before and one.done.more_s > 0:
                ahead.insert(0, self.next_price_s(one))

    def all_of(self, every: Iterable[Proposed[P]], most: int) -> None:
        """Of whatever may still be faster by more than a little what promises most: its seconds, and what the best pays a byte."""
        known = None if self.best is None else self.price_s(self.best)
        fast = takewhile(lambda p: self.best is None or p.cost_s * (1 + LITTLE) < self.best.total_s, every)

        def promise(p: Proposed[P]) -> float:
            return p.peak_bytes if known is None else p.cost_s + known * max(0, p.peak_bytes - self.aim)

        for proposed in sorted(islice(fast, LOOK), key=promise)[:most]:
            if self.best is None or (proposed.cost_s * (1 + LITTLE) < self.best.total_s and self.promises(proposed)):
                self.score(proposed)

    def promises(self, proposed: Proposed[P]) -> bool:
        """Whether a plan would be faster than the best if bytes beyond the budget cost it what they cost the best.

        Of a small program every plan may be: what one operator alone holds is not told by a price.
        """
        if self.small or self.best is None:
            return True
        over = max(0, proposed.peak_bytes - self.aim)
        return proposed.cost_s + self.price_s(self.best) * over < self.best.total_s * (1 - FINE)

    def between(self) -> list[float]:
        """Prices at which two plans that are next to each other cost the same; a third may beat both there. Nearest the best first."""
        line = _line(self.seen)
        best = self.best.proposed.peak_bytes if self.best is not None else self.aim
        pairs = sorted(pairwise(line), key=lambda pair: min(abs(pair[0][0] - best), abs(pair[1][0] - best)))
        return [_price_between(pair) for pair in pairs]

    def next_price_s(self, one: Scored[P]) -> float:
        """Seconds that the next byte costs a plan where it is known, otherwise what all that it has too much cost in the mean.

        Of the next one sharding has to be as cheap as making again is: there neither can take over bytes of the other for less.
        """
        return one.done.byte_s or self.price_s(one)

    def price_s(self, one: Scored[P]) -> float:
        """Seconds that a byte costs that a plan has too much, as the best does away with them."""
        total_s = one.total_s if self.best is None else min(one.total_s, self.best.total_s)
        over = max(one.proposed.peak_bytes - self.aim, self.aim // 50, 1)
        return max(total_s - one.proposed.cost_s, FINE * one.proposed.cost_s) / over
