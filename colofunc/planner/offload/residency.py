"""Residency: what stays on the device, what is copied in and out and when, under a budget that always holds.

Problem: state and activations exceed the device. Copying everything around every use is slow; keeping the wrong things
is no better; a plan that exceeds its budget once is none.
Idea: a plan is three decisions. *Residents*, home items that never move, save their traffic in every step. Of the rest,
Belady's rule evicts (`evict`), in a room that may be smaller than the budget so that copies in flight find place; or both
are chosen by a linear program that copies fewest bytes in that room (`fewest`). Copies are spread over the compute
(`spread`). Each candidate (which order of residents, how many, how much room) is scored by playing it on the timeline; the
fastest wins, ties go to the one that moves less. Where some *slack* is given, of all candidates that take at most that part
longer than the fastest the one that moves least wins.

    trace = Trace(seconds=(1.0,) * 4, host=(), base=(0,) * 4, items=(Item(4, True, (0, 2)), Item(4, True, (1, 3))))
    reside(trace, 8, links).residents            # {0, 1}: everything fits, no moves
    reside(trace, 4, links).moves                # one at a time: four fetches
    reside(trace, 3, links)                      # PlanError: position 0 needs 4 bytes

Source: L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966; Elixir (2212.05339) replays a
step the same way to count moves.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from math import inf
from operator import itemgetter
from typing import Any, NamedTuple

import attrs
import numpy as np

from colofunc.errors import PlanError
from colofunc.planner.offload.evict import Copy, Facts, Stay, evict, spread
from colofunc.planner.offload.timeline import (
    Item,
    Links,
    Move,
    Residency,
    Timeline,
    Trace,
    bytes_by_position,
    changes,
    check,
    play,
    simulate,
)  # fmt: skip

__all__ = ["Item", "Links", "Move", "Residency", "Search", "Timeline", "Trace", "check", "least_budget", "reside", "simulate"]

WORK = 150_000  # positions and uses that one call may walk through, over all candidates


class Point(NamedTuple):
    """What one candidate does with the budget. Parts are of what is left when the one before has its own."""

    order: int  # of those in which home items may stay
    stay: float  # part of that order's bytes that stays
    filled: float  # part of the rest that Belady fills; copies in flight may have all
    spent: float = 1.0  # part of the budget that is used at all
    fewest: bool = False  # residents and evictions by bytes: `order` says nothing, `stay` is a part of the state

    def around(self, step: float, orders: int, solve: bool) -> Iterator[Point]:
        for field in ("filled", "stay", "spent"):
            for change in (step, -step):
                yield self._replace(**{field: min(1.0, max(0.0, getattr(self, field) + change))})
        if solve:
            yield self._replace(fewest=not self.fewest)
        yield from (self._replace(order=other) for other in range(orders) if other != self.order)


STARTS = (
    Point(0, 0.0, 1.0),
    Point(0, 1.0, 1.0),
    Point(0, 0.0, 0.9),
    Point(0, 0.5, 0.8),
    Point(0, 0.9, 0.9),
    Point(0, 0.25, 0.5),
    Point(1, 0.5, 0.9),
    Point(0, 0.5, 1.0, fewest=True),
)
SLACK = 0.03
"""Plans of a large trace whose time differs by less than this part count as equally fast. Seconds are a model, and it does not know that
copies take from the bandwidth of the host's memory, which updates there need."""
MANY_FROM = 200  # candidates from which on a call tries all that there is to try
FEWEST = Point(0, 1.0, 1.0, fewest=True)
SKETCH = (STARTS[1], FEWEST, STARTS[7])  # where little may be tried


def least_budget(trace: Trace) -> tuple[int, int]:
    """(bytes, position): the least budget for which a plan exists, and the position that asks for it."""
    needed = [0] * (len(trace.seconds) + 1)
    for item in trace.items:
        spans = [(p, p + 1) for p in item.uses if p not in item.host_uses]
        if item.fixed and item.home:
            spans = [(0, len(trace.seconds))]
        elif item.fixed and spans:
            spans = [(spans[0][0], spans[-1][1])]
        for begin, end in spans:
            needed[begin] += item.nbytes
            needed[end] -= item.nbytes
    total = np.cumsum(np.asarray(needed[:-1], dtype=np.int64)) + np.asarray(trace.base, dtype=np.int64)
    if not total.size:
        return 0, 0
    return int(total.max()), int(total.argmax())


def reside(trace: Trace, budget_bytes: int, links: Links, slack: float | None = 0.0) -> Residency:
    """The fastest plan found whose device bytes never exceed `budget_bytes`. Raises PlanError naming the least budget.

    slack: of those that take at most this part longer, the one that copies fewest bytes; None: a little of a large trace, else
    nothing.
    """
    search = Search(trace, budget_bytes, links, slack)
    search.run()
    return search.within(search.fastest_s * (1 + search.slack))


def _check_trace(trace: Trace) -> None:
    if len(trace.base) != len(trace.seconds):
        raise PlanError(f"{len(trace.seconds)} positions have {len(trace.base)} figures of base bytes; give one for each")
    for index, item in enumerate(trace.items):
        uses = item.uses
        if list(uses) != sorted(set(uses)) or (uses and not 0 <= uses[0] <= uses[-1] < len(trace.seconds)):
            raise PlanError(f"item {index} has uses {uses}; give ascending positions below {len(trace.seconds)}")
        if not item.writes <= set(uses) or not item.host_uses <= set(uses):
            raise PlanError(f"item {index} has writes or host_uses that are none of its uses {uses}")
        if item.fixed and item.host_uses:
            raise PlanError(f"item {index} is fixed on the device and needed on the host at {sorted(item.host_uses)}; choose one")


@attrs.frozen(eq=False)
class _Found:
    seconds: float
    moved: int
    copies: list[Copy]
    residents: tuple[int, ...]
    room: int
    spent: int

    @property
    def rank(self) -> tuple[float, int]:
        return self.seconds, self.moved


class Search:
    """Candidates of one call, scored by the timeline. Deterministic: the work is counted, not timed."""

    def __init__(self, trace: Trace, budget: int, links: Links, slack: float | None = 0.0) -> None:
        _check_trace(trace)
        least, position = least_budget(trace)
        if budget < least:
            raise PlanError(
                f"a budget of {budget} bytes is below the least possible, {least} bytes: position {position} holds "
                f"{trace.base[position]} bytes that cannot move and needs {least - trace.base[position]} more of items at once. "
                f"Try: a budget of at least {least}, or smaller items"
            )
        self.trace, self.budget, self.links = trace, budget, links
        self.facts = Facts(trace)
        self.alone = play(self.facts.lanes, (), links)
        self.fixed = [i for i, item in enumerate(trace.items) if item.fixed and item.home]
        self.known: dict[tuple[object, int, int], tuple[float, int]] = {}
        self.spreads: dict[tuple[object, ...], tuple[float, list[Copy]]] = {}
        self.gave_up = False  # a linear program took too many iterations, and this is found without it
        self.best: _Found | None = None
        self.front: list[_Found] = []  # those that nothing beats in seconds and bytes
        self.where: Point | None = None  # what gave the best
        uses = sum(len(u) for u in self.facts.uses)
        self.left = min(500, max(9, WORK // (len(trace.seconds) + 2 * uses + 10)))
        if slack is None:
            slack = 0.0 if self.many else SLACK
        self.slack = slack
        self.still = self._everything()  # where nothing has to move there is nothing to search

    @property
    def many(self) -> bool:
        """Whether the trace is small enough to try all there is to try."""
        return self.left > MANY_FROM

    def sketch(self, points: Sequence[Point] = SKETCH) -> None:
        """Try a few candidates."""
        for point in points if self.still is None else ():
            if point.order < len(self.orders):
                self._at(point)

    def run(self) -> None:
        """Try all that the work allows."""
        if self.still is None:
            self._search()

    @property
    def fastest_s(self) -> float:
        if self.still is not None:
            return self.still.seconds
        assert self.best is not None, "something was tried"
        return self.best.seconds

    def within(self, most_s: float) -> Residency:
        """Of what was tried and takes at most so long, what moves fewest bytes; the fastest where nothing does."""
        return self.still if self.still is not None else self._result(self._leanest(most_s))

    def moved_bytes(self, most_s: float) -> int:
        """Bytes that `within` so long are copied, both ways."""
        return 0 if self.still is not None else self._leanest(most_s).moved

    def least_bytes(self) -> int:
        """Bytes that nothing within the budget copies less than, both ways; 0 where that is not known."""
        return 0 if self.still is not None else int(self.programs.least_bytes(self.budget))

    def _leanest(self, most_s: float) -> _Found:
        assert self.best is not None, "something was tried"
        return min((one for one in self.front if one.seconds <= most_s), key=lambda one: one.moved, default=self.best)

    def _everything(self) -> Residency | None:
        """No moves where every item fits as it is and none is needed on the host."""
        home = [i for i, item in enumerate(self.trace.items) if item.home and item.stays and not item.host_uses]
        if any(item.home and not item.stays and item.uses for item in self.trace.items):
            return None
        if any(item.host_uses and (item.home or self.facts.uses[i]) and self.facts.uses[i] for i, item in enumerate(self.trace.items)):
            return None
        held = bytes_by_position(self.trace, (), home)
        if max(held, default=0) > self.budget:
            return None
        return Residency((), frozenset(home), max(held, default=0), self.alone.makespan, 0.0, (0, 0))

    @property
    def open(self) -> bool:
        """Is there work left, and something to gain?"""
        return self.left > 0 and (self.best is None or self.slack > 0 or self.best.seconds > self.alone.makespan)

    # ---- one candidate ----

    def score(self, residents: Sequence[int], room: int, spent: int) -> tuple[float, int]:
        """(seconds, bytes moved) with these residents, where Belady fills `room` and all fill `spent` bytes."""
        kept = tuple(sorted(residents))
        return self._scored((kept, room, spent), lambda: (kept, evict(self.facts, room, kept)))

    def least(self, stay: float, room: int, spent: int) -> tuple[float, int]:
        """(seconds, bytes moved) with about the fewest bytes moved where that part of the state may stay."""
        key, found = (stay, room, spent), self.programs.at(room, stay)
        self.gave_up |= found is None
        same = (inf, 0) if found is None else self.known.get((found.asked, room, spent))
        if key not in self.known and same is not None:
            self.left -= 1
            self.known[key] = same
        return self._scored(key, lambda: (tuple(found.residents), found.stays))

    def _scored(
        self, key: tuple[object, int, int], chosen: Callable[[], tuple[tuple[int, ...], list[list[Stay]]]]
    ) -> tuple[float, int]:
        if key not in self.known:
            self.left -= 1
            residents, stays = chosen()
            seconds, copies = self._spread(tuple(residents), stays, key[2])
            rank = self.known[key] = seconds, sum(self.facts.nbytes[c.item] for c in copies)
            found = _Found(*rank, copies, residents, key[1], key[2])
            if self.best is None or rank < self.best.rank:
                self.best = found
            if all(one.seconds > rank[0] or one.moved > rank[1] for one in self.front):
                self.front = [found, *(one for one in self.front if one.seconds < rank[0] or one.moved < rank[1])]
        return self.known[key]

    def _spread(self, residents: tuple[int, ...], stays: list[list[Stay]], spent: int) -> tuple[float, list[Copy]]:
        """Rooms that are nearly alike evict the same, so more than half of the candidates have been spread before."""
        asked = residents, tuple(map(tuple, stays)), spent
        if asked not in self.spreads:
            self.spreads[asked] = spread(self.facts, stays, residents, spent, self.links)
        return self.spreads[asked]

    def _result(self, best: _Found) -> Residency:
        nbytes = self.facts.nbytes
        moves = tuple(copy.move() for copy in best.copies)
        up = sum(nbytes[m.item] for m in moves if m.kind == "fetch")
        peak = max(bytes_by_position(self.trace, moves, best.residents), default=0)
        seconds = play(self.facts.lanes, moves, self.links).makespan
        exposed = max(0.0, seconds - self.alone.makespan)
        return Residency(moves, frozenset(best.residents), peak, seconds, exposed, (up, best.moved - up))

    # ---- which residents ----

    def _orders(self) -> Iterator[list[int]]:
        """Home items that may stay, the ones to keep first: by copies saved per byte, by both ends."""
        items, uses = self.trace.items, self.facts.uses
        able = [i for i, item in enumerate(items) if item.home and item.stays and not item.host_uses and uses[i] and not item.fixed]
        last_write = {i: max(changes(items[i]), default=-1) for i in able}
        keys: list[Callable[[int], tuple[float, ...]]] = [
            lambda i: (-(last_write[i] >= 0), -uses[i][-1], i),
            lambda i: (min(uses[i][0], self.facts.size - 1 - uses[i][-1]), -(last_write[i] >= 0), i),
        ]
        for key in keys:
            yield sorted(able, key=key)

    def _fitting(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of the order that may stay together, and the least budget with the first 0, 1, 2, ... of them."""
        held = self.facts.base + self.facts.needed + self._fixed_bytes()
        out: list[int] = []
        least = [int(held.max())]
        for i in order:
            more = held + self.facts.nbytes[i]
            more[self.facts.uses[i]] -= self.facts.nbytes[i]
            if int(more.max()) <= self.budget:
                held = more
                out.append(i)
                least.append(int(more.max()))
        return out, least

    def _fixed_bytes(self) -> np.ndarray:
        held = np.zeros(self.facts.size, dtype=np.int64)
        for i, item in enumerate(self.trace.items):
            uses = self.facts.uses[i]
            if item.fixed and (uses or item.home):
                held[slice(None) if item.home else slice(uses[0], uses[-1] + 1)] += item.nbytes
                held[uses] -= item.nbytes
        return held

    # ---- which of them ----

    @cached_property
    def programs(self) -> Any:
        """Linear programs for fewest bytes; with their solver only where they are used."""
        return importlib.import_module("colofunc.planner.offload.least_traffic").Programs(self.facts)

    @cached_property
    def orders(self) -> list[tuple[list[int], list[int], np.ndarray]]:
        """Distinct orders of home items that may stay; with the least budget, and the bytes, of the first 0, 1, 2, ... of them."""
        found: dict[tuple[int, ...], tuple[list[int], list[int], np.ndarray]] = {}
        for order in self._orders():
            fitting, least = self._fitting(order)
            held = np.concatenate(([0], np.cumsum([self.facts.nbytes[i] for i in fitting], dtype=np.int64)))
            found.setdefault(tuple(fitting), (fitting, least, held))
        return list(found.values())

    def _at(self, point: Point) -> tuple[float, int]:
        """What a point of the search costs."""
        before = self.best
        found = self._by_bytes(point) if point.fewest else self._by_order(point)
        self.where = point if self.best is not before else self.where
        return found

    def _by_bytes(self, point: Point) -> tuple[float, int]:
        least = self.orders[0][1][0]
        room, spent = (least + int((self.budget - least) * part) for part in (point.filled, point.spent))
        return self.least(point.stay, min(room, spent), max(room, spent))

    def _by_order(self, point: Point) -> tuple[float, int]:
        order, floors, held = self.orders[point.order]
        count = int(np.searchsorted(held, point.stay * float(held[-1]), side="right")) - 1
        least, taken = floors[count], int(held[count])
        spent = least + int((self.budget - least) * point.spent)
        return self.score([*self.fixed, *order[:count]], taken + int((spent - taken) * point.filled), spent)

    def _search(self) -> None:
        """Pattern search from STARTS with a step that shrinks."""
        if self.links.one_queue and not self.many and self._busy():
            return
        starts = [point for point in STARTS if point.order < len(self.orders)]
        solve = not self.many or self.slack > 0  # of a small trace everything is tried for what a linear program takes
        starts += [point for point in (FEWEST, self.where) if point is not None and point not in starts and (solve or not point.fewest)]
        for best, where in sorted(((self._at(point), point) for point in starts), key=itemgetter(0))[:3]:
            step = 0.2
            while self.open and step > 0.01:
                before = best
                for point in where.around(step, len(self.orders), solve):
                    if self.open and (found := self._at(point)) < best:
                        best, where = found, point
                if best == before:
                    step /= 2

    def _busy(self) -> bool:
        """Whether what copies fewest bytes keeps the one queue that there is busy nearly all the time: nothing else is faster then."""
        self.sketch((FEWEST, STARTS[-1]))
        if self.best is None:
            return False
        sizes = ((copy.fetch, self.facts.nbytes[copy.item]) for copy in self.best.copies)
        busy_s = sum(self.links.fetch_s(nbytes) if fetch else self.links.store_s(nbytes) for fetch, nbytes in sizes)
        return self.best.seconds <= (1 + SLACK) * busy_s
