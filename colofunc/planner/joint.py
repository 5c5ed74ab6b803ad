"""Sharding, and what is made again or moved, decided together under one budget.

Problem: which sharding is best depends on what it costs to fit it into memory, and that is known only once
recomputation and copies have been searched for, which takes too long for every sharding there is. Idea: memory has a
price, the seconds that a byte at the peak costs. A finished plan tells it: what its next byte costs to be made again,
or what making again and copying cost over the bytes that they saved. The search for a sharding pays it, its plan is
finished and tells another one, a few times; of small programs so do two plans that cost the same at some price, because
a third one may be better at it. The fastest is tried, and plans for a budget that sharding alone meets, unless the
searches at prices say that none of these can be faster; every one is counted as it would run, and the fastest that fits
is taken. So none of the separate choices (the fastest and make again, or move; less by sharding alone) is better.

    fastest: 1.00 s, 12 GB; within 8 GB 1.80 s               -> .2 s a GB
    at .2 s a GB: 1.15 s, 9 GB; within 8 GB 1.20 s           taken
    sharding alone within 8 GB: 1.45 s

Source: Lagrangian duality; the prices are those of Everett, Operations Research 11 (1963).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import inf
from typing import Generic, TypeVar

import attrs

from colofunc import progress
from colofunc.errors import PlanError
from colofunc.planner.candidate import FinishedProgram

P = TypeVar("P")
"""A plan of a sharding, as whoever proposes it writes it."""

HIGHEST_PRICE = 4.0
"""The highest price tried, as a multiple of the one that a plan tells: that is an average, and the next byte may cost
more. It and its square are what is asked before sharding alone, which they may rule out."""
MAX_PRICES = 6
"""At most this many searches at a price of memory."""
MAX_PRICES_ONCE_ONE_FITS = 3
"""At most this many, in a program that is not small, once a plan fits."""
MAX_PRICES_FROM_KNOWN = 2
"""At most this many where a sharding is known that met a budget of a like step."""
FAR_OVER, MAX_PRICES_FAR_OVER = 2, 2
"""Where the leanest plan holds more than FAR_OVER times the budget, at most MAX_PRICES_FAR_OVER searches at a price of
memory."""
NEXT_BUDGET_PART = 0.9
"""Where a plan fits only with help, the next budget for sharding alone is at most this part of the last."""
TOLERANCE = 1e-3
"""A plan within this relative distance of the fastest sharding is not improved further."""
FRONTIER_PRICES, FRONTIER_PRICES_LARGE = 8, 2
"""At most this many searches at prices between the fastest sharding and the leanest, where no plan tells a price; the
second for large programs."""
MAX_OTHERS, LEAST_GAIN = 256, 0.01
"""At most MAX_OTHERS shardings to which no price leads are compared, and only those whose relative gain may exceed
LEAST_GAIN."""


@attrs.frozen(eq=False)
class Proposal(Generic[P]):
    """A plan of a sharding: its seconds and estimated peak without help, and what makes it differ from others."""

    plan: P
    cost_s: float
    peak_bytes: int
    key: object


@attrs.frozen(eq=False)
class CountedProposal(Generic[P]):
    """A proposal whose program is completed and counted."""

    proposal: Proposal[P]
    done: FinishedProgram

    @property
    def total_s(self) -> float:
        """Seconds of a step, with what keeping to the budget costs."""
        return self.proposal.cost_s + self.done.more_s


Propose = Callable[[int | None, float], Proposal[P]]
"""(bytes to keep to, seconds that a byte at the peak costs) -> the cheapest sharding then."""
FinishSharding = Callable[[P, float], FinishedProgram]
"""(plan, seconds more from which on it is of no use) -> the finished program."""
EndS = Callable[[FinishedProgram], float]
"""A finished program -> seconds of a step by the clock."""
Others = Callable[[float | None], Iterable[Proposal[P]]]
"""Seconds that a byte costs (None: nothing fits so far) -> further shardings, the cheapest first."""
TradeOff = tuple[int, float]
"""Bytes at the peak and seconds of one sharding."""


def decide_jointly(
    propose: Propose[P],
    finish: FinishSharding[P],
    budget_bytes: int,
    parts: int = 1,
    tries: int = 4,
    max_prices: int = MAX_PRICES,
    others: Others[P] = lambda price_s: (),
    max_others: int = MAX_OTHERS,
    lower_bound: Callable[[], int] = lambda: 0,
    end_s: EndS | None = None,
    small: bool = True,
) -> tuple[CountedProposal[P] | None, CountedProposal[P]]:
    """(the fastest plan found that fits or None, the leanest that was tried).

    A step in `parts` microbatches may hold so many times less than is estimated. `others`: of a step that is small
    enough to have few shardings all, of others some to which no price leads; where nothing fits some that may, in any
    order. At most `max_others` of them are finished. `lower_bound`: bytes that every plan needs, asked for when one was
    finished; where these are too many, no other plan is tried. `end_s`: seconds of a finished step by the clock, which
    has the last word among those that fit. `small`: searches take little, so more prices are tried. Raises PlanError
    where nothing can be proposed.
    """
    search = _JointSearch(propose, finish, budget_bytes, budget_bytes * parts, small)
    search.run(tries, max_prices, others, max_others, lower_bound)
    best = search.best if end_s is None else search.fastest_by_clock(end_s)
    return best, search.leanest()


def decide_from_known(
    known: Proposal[P],
    propose: Propose[P],
    finish: FinishSharding[P],
    budget_bytes: int,
    parts: int = 1,
    end_s: EndS | None = None,
    small: bool = True,
) -> CountedProposal[P] | None:
    """The fastest plan that fits of `known`, the fastest sharding, and a few at prices of memory; None where none of
    them does.

    `known` met a budget of a like step. `propose` is expected to search from there. `small`: as of `decide_jointly`.
    """
    search = _JointSearch(propose, finish, budget_bytes, budget_bytes * parts, small)
    search.run_from_known(known)
    return search.best if end_s is None else search.fastest_by_clock(end_s)


def frontier(propose: Propose[P], max_prices: int) -> list[Proposal[P]]:
    """Different shardings from the fastest to the leanest, whatever is done with them afterwards: the two, and those at
    prices between.

    `propose` gives the leanest where nothing keeps to the bytes asked for. The widest gaps in memory are searched
    first.
    """
    fastest, leanest = propose(None, 0.0), propose(1, 0.0)
    proposals = [fastest, leanest]
    asked_s = list[float]()
    for _ in range(max_prices):
        neighbours = pairwise(_pareto_line((proposal.peak_bytes, proposal.cost_s) for proposal in proposals))
        widest_first = sorted(neighbours, key=lambda pair: pair[0][0] - pair[1][0])
        price_s = _first_new([_price_between(lean, fast) for lean, fast in widest_first], asked_s)
        if price_s is None:
            break
        asked_s.append(price_s)
        proposals.append(propose(None, price_s))

    different = list[Proposal[P]]()
    for proposal in sorted(proposals, key=lambda proposal: proposal.cost_s):
        if all(proposal.key != other.key for other in different):
            different.append(proposal)
    return different


def _pareto_line(points: Iterable[TradeOff]) -> list[TradeOff]:
    """The points that no other beats in both bytes and seconds, from the leanest to the fastest."""
    line = list[TradeOff]()
    for peak_bytes, cost_s in sorted(points):
        if not line or cost_s < line[-1][1]:
            line.append((peak_bytes, cost_s))
    return line


def _price_between(lean: TradeOff, fast: TradeOff) -> float:
    """Seconds a byte at which a lean plan and a fast one cost the same."""
    (lean_bytes, lean_s), (fast_bytes, fast_s) = lean, fast
    return (lean_s - fast_s) / (fast_bytes - lean_bytes)


def _first_new(prices_s: Iterable[float], asked_s: Sequence[float]) -> float | None:
    """The first price that is not within a tenth of one that was asked before."""
    for price_s in prices_s:
        if not any(0.9 < price_s / other_s < 1.1 for other_s in asked_s):
            return price_s
    return None


class _JointSearch(Generic[P]):
    """What one search has proposed and finished so far, and the steps that it is made of."""

    def __init__(
        self, propose: Propose[P], finish: FinishSharding[P], budget_bytes: int, aim_bytes: int, small: bool
    ) -> None:
        self.propose = propose
        self.finish = finish
        self.budget_bytes = budget_bytes
        self.aim_bytes = aim_bytes  # the budget in terms of the estimate, which knows nothing of microbatches
        self.small = small
        self.finished: list[CountedProposal[P]] = []
        self.proposed: set[TradeOff] = set()  # of all proposals, finished or not
        self.best: CountedProposal[P] | None = None
        # Seconds of whatever keeps to the budget without help, at least: as far as searches at prices find what is
        # cheapest.
        self.unaided_at_least_s = 0.0
        self.asked_s: list[float] = []  # prices that were searched at

    def run(
        self, tries: int, max_prices: int, others: Others[P], max_others: int, lower_bound: Callable[[], int]
    ) -> None:
        fastest = self.try_proposal(self.proposal(None, 0.0))
        if fastest is None or self.costs_nothing(fastest):
            return
        if self.best is None and lower_bound() > self.aim_bytes:
            return

        # Where a plan fits already, sharding alone is tried last, and only if searches at prices leave open that it is
        # faster.
        fits_with_help = self.best is not None
        if not fits_with_help:
            self.shard_for_less(tries)
        self.search_at_prices(fastest, min(max_prices, MAX_PRICES_FAR_OVER) if self.is_far_over() else max_prices)
        if fits_with_help and self.may_do_without_help(fastest):
            self.shard_for_less(tries)

        if self.best is None:
            self.try_others(others(None), max_others)
            if self.best is not None:
                self.search_at_prices(fastest, max_prices // 2)
        if self.best is None or self.best.total_s > fastest.proposal.cost_s * (1 + LEAST_GAIN):
            self.try_others(others(self.mean_price_s(self.best or fastest)), max_others)

    def run_from_known(self, known: Proposal[P]) -> None:
        fastest = self.try_proposal(self.proposal(None, 0.0))
        if fastest is None or self.costs_nothing(fastest):
            return
        if self.may_be_faster(known):
            self.try_proposal(known)
        if self.best is not None:
            self.search_at_prices(fastest, MAX_PRICES_FROM_KNOWN)

    def proposal(self, aim_bytes: int | None, price_s: float) -> Proposal[P]:
        progress.at("sharding", len(self.proposed) + 1)
        return self.propose(aim_bytes, price_s)

    def leanest(self) -> CountedProposal[P]:
        return min(self.finished, key=lambda finished: finished.done.peak_bytes)

    def fastest_by_clock(self, end_s: EndS) -> CountedProposal[P] | None:
        """Of all that were finished and fit, the one that the clock says is the fastest."""
        fitting = [finished for finished in self.finished if finished.done.fits(self.budget_bytes)]
        if len(fitting) == 1:  # the clock, which takes a while, is not asked
            return fitting[0]
        return min(fitting, key=lambda finished: end_s(finished.done), default=None)

    def is_far_over(self) -> bool:
        """Whether everything that was tried holds far too much."""
        return self.best is None and self.leanest().done.peak_bytes > FAR_OVER * self.budget_bytes

    def costs_nothing(self, fastest: CountedProposal[P]) -> bool:
        """Whether the best is as fast as the fastest sharding is without a budget."""
        if self.best is None:
            return False
        without_budget_s = fastest.proposal.cost_s + fastest.done.asked_s
        return self.best.total_s <= without_budget_s * (1 + TOLERANCE)

    def try_proposal(self, proposal: Proposal[P]) -> CountedProposal[P] | None:
        """The proposal finished, if it may be the best: it was not before, and is not slower without help than the best
        with it.
        """
        self.proposed.add((proposal.peak_bytes, proposal.cost_s))
        if any(proposal.key == earlier.proposal.key for earlier in self.finished):
            return None
        below_s = inf
        if self.best is not None:
            if proposal.cost_s >= self.best.total_s:
                return None
            below_s = self.best.total_s - proposal.cost_s
        finished = CountedProposal(proposal, self.finish(proposal.plan, below_s))
        self.finished.append(finished)
        if finished.done.fits(self.budget_bytes) and (self.best is None or finished.total_s < self.best.total_s):
            self.best = finished
        return finished

    def shard_for_less(self, tries: int) -> None:
        """Sharding alone: for the budget, then for less, until no help is needed or even so it is slower.

        Without it one of 20 steps of two layers (`bench jointly`, as of a larger step) takes 28 % longer.
        """
        aim_bytes = self.aim_bytes
        for _ in range(tries):
            try:
                proposal = self.proposal(aim_bytes, 0.0)
            except PlanError:  # nothing is that lean
                return
            if self.best is not None and proposal.cost_s >= self.best.total_s:
                return
            finished = self.try_proposal(proposal)
            if finished is not None and finished.done.fits(self.budget_bytes) and finished.done.more_s <= 0:
                return
            # The next aim is less by what the plan held too much, and a little more.
            over = 1.0 if finished is None else finished.done.peak_bytes / self.budget_bytes
            aim_bytes = int(min(aim_bytes, proposal.peak_bytes) * min(NEXT_BUDGET_PART, 0.99 / over))

    def may_do_without_help(self, fastest: CountedProposal[P]) -> bool:
        """Whether searches at prices, dearer ones too where that is not told yet, leave open that a sharding which keeps
        to the budget by itself is faster than the best.
        """
        price_s = self.next_price_s(fastest)
        for dearer_s in (HIGHEST_PRICE * price_s, HIGHEST_PRICE**2 * price_s):
            if self.unaided_may_be_faster() and _first_new([dearer_s], self.asked_s) is not None:
                self.propose_at_price(dearer_s)
        return self.unaided_may_be_faster()

    def unaided_may_be_faster(self) -> bool:
        return self.best is not None and self.unaided_at_least_s < self.best.total_s * (1 - TOLERANCE)

    def propose_at_price(self, price_s: float) -> tuple[Proposal[P], float]:
        """(the cheapest sharding at a price of memory, the seconds that whatever keeps to the bytes takes at least).

        It costs no less at this price than what is cheapest at it, and the price of those bytes is known.
        """
        self.asked_s.append(price_s)
        proposal = self.proposal(None, price_s)
        at_least_s = proposal.cost_s + price_s * (proposal.peak_bytes - self.aim_bytes)
        self.unaided_at_least_s = max(self.unaided_at_least_s, at_least_s)
        return proposal, at_least_s

    def search_at_prices(self, fastest: CountedProposal[P], max_prices: int) -> None:
        """Sharding at prices of memory: those that the fastest plan and each new best one tell.

        Where nothing fits, and of small programs, a dearer one and those between plans as well.
        """
        first_s = self.next_price_s(fastest)
        told_s = [first_s]  # by the best plans, the latest first
        for number in range(max_prices):
            if self.best is not None and not self.small and number >= MAX_PRICES_ONCE_ONE_FITS:
                return
            prices_s = [*told_s]
            if self.small or self.best is None:
                prices_s += [HIGHEST_PRICE * first_s, *self.prices_between_s()]
            price_s = _first_new(prices_s, self.asked_s)
            if price_s is None:
                return
            proposal, at_least_s = self.propose_at_price(price_s)
            if not self.may_be_faster(proposal):
                continue
            best_before = self.best
            finished = self.try_proposal(proposal)
            if self.best is not None and not self.small and self.best.total_s <= at_least_s:
                return  # where bytes beyond the budget cost this price, nothing is faster
            if finished is not None and self.best is not best_before and finished.done.more_s > 0:
                told_s.insert(0, self.next_price_s(finished))

    def try_others(self, others: Iterable[Proposal[P]], max_others: int) -> None:
        """Finish those that promise most: by their seconds, and what the best plan pays for each byte that they hold
        too much.
        """
        price_s = None if self.best is None else self.mean_price_s(self.best)
        compared = list[Proposal[P]]()
        for proposal in others:
            if not self.gains_enough(proposal):  # nor do those behind it, which cost more
                break
            compared.append(proposal)
            if len(compared) == MAX_OTHERS:
                break

        def promised(proposal: Proposal[P]) -> float:
            if price_s is None:
                return proposal.peak_bytes
            return proposal.cost_s + price_s * max(0, proposal.peak_bytes - self.aim_bytes)

        for proposal in sorted(compared, key=promised)[:max_others]:
            if self.gains_enough(proposal) and self.may_be_faster(proposal):
                self.try_proposal(proposal)

    def gains_enough(self, proposal: Proposal[P]) -> bool:
        """Whether a plan would be faster than the best by more than a little if it needed no help."""
        return self.best is None or proposal.cost_s * (1 + LEAST_GAIN) < self.best.total_s

    def may_be_faster(self, proposal: Proposal[P]) -> bool:
        """Whether a plan would be faster than the best if bytes beyond the budget cost it what they cost the best.

        Of a small program every plan may be: what one operator alone holds is not told by a price.
        """
        if self.small or self.best is None:
            return True
        over_bytes = max(0, proposal.peak_bytes - self.aim_bytes)
        return proposal.cost_s + self.mean_price_s(self.best) * over_bytes < self.best.total_s * (1 - TOLERANCE)

    def prices_between_s(self) -> list[float]:
        """Prices at which two neighbouring plans cost the same, where a third may beat both.

        Those nearest to the best come first.
        """
        best_bytes = self.aim_bytes if self.best is None else self.best.proposal.peak_bytes

        def distance_bytes(neighbours: tuple[TradeOff, TradeOff]) -> int:
            (lean_bytes, _), (fast_bytes, _) = neighbours
            return min(abs(lean_bytes - best_bytes), abs(fast_bytes - best_bytes))

        nearest_first = sorted(pairwise(_pareto_line(self.proposed)), key=distance_bytes)
        return [_price_between(lean, fast) for lean, fast in nearest_first]

    def next_price_s(self, finished: CountedProposal[P]) -> float:
        """Seconds that a plan's next byte costs where they are known, otherwise the mean over all bytes that it has too
        much.

        Of the next one sharding has to be as cheap as making again is: there neither can take over bytes of the other
        for less.
        """
        return finished.done.byte_s or self.mean_price_s(finished)

    def mean_price_s(self, finished: CountedProposal[P]) -> float:
        """Seconds that each byte costs that a plan has too much, as the best plan does away with them."""
        total_s = finished.total_s
        if self.best is not None:
            total_s = min(total_s, self.best.total_s)
        cost_s = finished.proposal.cost_s
        over_bytes = max(finished.proposal.peak_bytes - self.aim_bytes, self.aim_bytes // 50, 1)
        return max(total_s - cost_s, TOLERANCE * cost_s) / over_bytes
