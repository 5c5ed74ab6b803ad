"""One search: which updates run on the host, and for each such split what is copied when.

    found = search_splits(ground, policy, placed, limit, like)     # splits of the updates -> copies for each -> the best
    found.rank, found.hint                                  # bytes over the limit, then seconds; what to try for a similar program
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

import attrs

from colofunc.planner.offload.host_operators import with_operators
from colofunc.planner.offload.policies import MemoryPolicy
from colofunc.planner.offload.residency import SKETCH, Point, Residency, ResidencySearch, Trace, least_budget
from colofunc.planner.offload.trace import Ground, trace_of_ground
from colofunc.planner.offload.updates import splits

CLOSER = 3
"""At most this many rounds of trying shares of the updates half way between the best and its neighbours."""
BEST = 2
"""Of a large program, linear programs are asked for so many splits, the best without them."""


@attrs.frozen
class Hint:
    """What was best for a program: the share of the updates on the host, where the search for copies ended, and the
    part of what is copied that it took to come from disk. ranks: that of each, where each was searched for itself."""

    share: float
    point: Point | None
    below: float = 0.0
    ranks: tuple[Hint, ...] = ()

    def of_rank(self, number: int) -> Hint:
        """What was best for one of the ranks that differ, or for what does the work of all."""
        return self.ranks[number] if number < len(self.ranks) else self


NO_HINT = Hint(0.0, None)


@attrs.frozen(eq=False)
class OffloadCandidate:
    """One candidate: `over`: bytes by which its peak exceeds the limit. ranks: what it is made of, where each rank does
    its own.
    """

    over: int
    ground: Ground
    on_host: frozenset[int]
    items: Sequence[int]
    trace: Trace
    found: Residency
    share: float
    point: Point | None
    below: float = 0.0
    least_bytes: int = 0  # nothing copies less, where that was asked for
    gave_up: bool = False  # found without a linear program that took too long
    ranks: tuple[OffloadCandidate, ...] = ()

    @property
    def hint(self) -> Hint:
        return Hint(self.share, self.point, self.below, tuple(one.hint for one in self.ranks))

    @property
    def rank(self) -> tuple[int, float]:
        return self.over, self.found.seconds


@attrs.frozen(eq=False)
class _Try:
    """A split of the updates, and what was searched for it so far."""

    over: int
    on_host: frozenset[int]
    items: Sequence[int]
    share: float
    search: ResidencySearch

    @property
    def rank(self) -> tuple[int, float]:
        return self.over, self.search.fastest_s


def search_splits(
    ground: Ground, policy: MemoryPolicy, placed: Mapping[int, str | None], limit: int, like: Hint | None
) -> OffloadCandidate:
    """The fastest of the splits of the updates."""
    tries = list[_Try]()
    slack = policy.slack if like is None else 0.0
    points = _points(like, slack)
    seen = set[frozenset[int]]()
    share = like.share if like is not None else None
    near = splits(ground, policy.update, placed, limit, share, (), seen)
    for _ in range(1 + CLOSER):
        for part, on_host in with_operators(ground, policy.where, policy.update, placed, limit, near):
            items, trace = trace_of_ground(ground, on_host, placed, limit, policy.activations)
            least, position = least_budget(trace)
            search = ResidencySearch(trace, max(limit, least), ground.links, (least, position))
            if search.small and like is None and least <= limit:  # of what does not fit nobody asks how long it takes
                search.run()
            else:
                search.sketch(points)
            tries.append(_Try(max(0, least - limit), on_host, items, part, search))
            if search.still is not None:
                break
        tries = _best_first(tries, slack)
        if like is not None or tries[0].search.still is not None:
            break
        near = splits(ground, policy.update, placed, limit, share, [one.share for one in tries], seen)
    if like is None:
        for each in _best_first(tries, slack)[:BEST]:
            each.search.sketch([point for point in SKETCH if point not in each.search.tried])
    one, most_s = _best_first(tries, slack)[0], _most_s(tries, slack)
    bound = min(each.search.least_bytes() for each in tries) if slack == inf else 0
    found = one.search.leanest_within(most_s)
    gave_up = any(each.search.gave_up for each in tries)
    return OffloadCandidate(
        one.over,
        ground,
        one.on_host,
        one.items,
        one.search.trace,
        found,
        one.share,
        one.search.where,
        least_bytes=bound,
        gave_up=gave_up,
    )


def _points(like: Hint | None, slack: float) -> Sequence[Point]:
    """What is tried of each split of a large program. Who asks for fewest bytes wants linear programs for each."""
    if like is not None and like.point is not None:
        return like.point, SKETCH[0]
    return SKETCH if slack else [point for point in SKETCH if not point.least_traffic]


def _best_first(tries: Sequence[_Try], slack: float) -> list[_Try]:
    """By what is copied, where that is asked for, of those that are nearly as fast as the fastest; the others behind
    them.
    """
    least, most_s = min(one.over for one in tries), _most_s(tries, slack)

    def rank(one: _Try) -> tuple[bool, int, tuple[int, float]]:
        late = one.over > least or one.search.fastest_s > most_s
        return late, 0 if late else one.search.moved_bytes(most_s), one.rank

    return sorted(tries, key=rank)


def _most_s(tries: Sequence[_Try], slack: float) -> float:
    """Seconds of the fastest that fits, and so much longer."""
    return inf if slack == inf else min(tries, key=lambda one: one.rank).search.fastest_s * (1 + slack)
