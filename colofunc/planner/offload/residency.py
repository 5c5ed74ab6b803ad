"""Residency: what stays on the device, what is copied in and out and when, under a budget that always holds.

Problem: state and activations exceed the device. Copying everything around every use is slow; keeping the wrong things
is no better; a plan that exceeds its budget once is none. Idea: a plan is three decisions. *Residents*, home items that
never move, save their traffic in every step. Of the rest, Belady's rule evicts (`evict`), in a room that may be smaller
than the budget so that copies in flight find place; or both are chosen by a linear program that copies fewest bytes in
that room (`least_traffic`). Copies are spread over the compute (`spread`). Each candidate (how many residents, how much
room) is scored by playing it on the timeline; the fastest wins, ties go to the one that moves less. Where some *slack*
is given, of all candidates that take at most that part longer than the fastest the one that moves least wins.

    trace = Trace(seconds=(1.0,) * 4, host=(), base=(0,) * 4, items=(OffloadItem(4, True, (0, 2)), OffloadItem(4, True, (1, 3))))
    reside(trace, 8, links).residents            # {0, 1}: everything fits, no moves
    reside(trace, 4, links).moves                # one at a time: four fetches
    reside(trace, 3, links)                      # PlanError: position 0 needs 4 bytes

Source: L. Belady, "A study of replacement algorithms for a virtual-storage computer", 1966; Elixir (2212.05339) replays
a step the same way to count moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import numpy as np

from colofunc.errors import PlanError
from colofunc.planner.offload.evict import Copy, Stay, TraceFacts, evict, needed_bytes, spread
from colofunc.planner.offload.least_traffic import Programs
from colofunc.planner.offload.timeline import (
    Links,
    OffloadItem,
    Residency,
    ScheduledCopy,
    Trace,
    bytes_by_position,
    device_uses,
    needed,
    play,
    uses_that_change,
)  # fmt: skip

__all__ = ["Links", "OffloadItem", "Residency", "ResidencySearch", "ScheduledCopy", "Trace", "least_budget", "reside"]


class Point(NamedTuple):
    """What one candidate does with the budget. `filled` is a part of what is left when what stays has its own."""

    # part that stays: of the bytes of home items that may, in order; or of the state, where `least_traffic`
    stay: float
    filled: float  # part of the rest that Belady fills; copies in flight may have all
    order: int = 0  # of those in which home items may stay
    least_traffic: bool = False  # residents and evictions by a linear program for fewest bytes: `order` says nothing


POINTS = (
    Point(0.0, 1.0),
    Point(1.0, 1.0),
    Point(0.0, 0.9),
    Point(0.5, 0.8),
    Point(0.9, 0.9),
    Point(0.25, 0.5),
    Point(0.5, 0.9, order=1),
    Point(0.5, 1.0, least_traffic=True),
    Point(1.0, 1.0, least_traffic=True),
)
"""What is tried. A search from the best of them for better parts found nothing faster on any row of
`bench memory_plans`, `moved` and `jointly`; the parts below 1 hide copies that these alone do not
(`tests/test_residency.py`: 1.9 % of a step of 40 layers)."""
SMALL = 740
"""Positions, and twice the uses, of the largest trace of which everything is tried."""
SKETCH = (POINTS[1], POINTS[8], POINTS[7], POINTS[0])
"""What is tried of a large trace."""


def least_budget(trace: Trace) -> tuple[int, int]:
    """(bytes, position): the least budget for which a plan exists, and the position that asks for it."""
    items = list[tuple[int, list[tuple[int, int]]]]()
    for item in trace.items:
        stretches = needed(item)
        if item.fixed and item.home:
            stretches = [(0, len(trace.seconds))]
        elif item.fixed and stretches:
            stretches = [(stretches[0][0], stretches[-1][1])]
        items.append((item.nbytes, stretches))
    total = needed_bytes(items, len(trace.seconds)) + np.asarray(trace.base, dtype=np.int64)
    if not total.size:
        return 0, 0
    return int(total.max()), int(total.argmax())


def reside(trace: Trace, budget_bytes: int, links: Links, slack: float = 0.0) -> Residency:
    """The fastest plan found whose device bytes never exceed `budget_bytes`. Raises PlanError naming the least budget.

    slack: of those that take at most this part longer, the one that copies fewest bytes.
    """
    search = ResidencySearch(trace, budget_bytes, links)
    search.run()
    return search.leanest_within(search.fastest_s * (1 + slack))


def _check_trace(trace: Trace) -> None:
    if len(trace.base) != len(trace.seconds):
        raise PlanError(
            f"{len(trace.seconds)} positions have {len(trace.base)} figures of base bytes; give one for each"
        )
    for index, item in enumerate(trace.items):
        uses = item.uses
        if list(uses) != sorted(set(uses)) or (uses and not 0 <= uses[0] <= uses[-1] < len(trace.seconds)):
            raise PlanError(f"item {index} has uses {uses}; give ascending positions below {len(trace.seconds)}")
        if not item.writes <= set(uses) or not item.host_uses <= set(uses):
            raise PlanError(f"item {index} has writes or host_uses that are none of its uses {uses}")
        on_device = frozenset(device_uses(item))
        if any(begin not in on_device or end not in on_device or begin >= end for begin, end in item.held):
            raise PlanError(
                f"item {index} is held over {item.held}; give ascending pairs of its uses on the device "
                f"{sorted(on_device)}"
            )
        if item.fixed and item.host_uses:
            raise PlanError(
                f"item {index} is fixed on the device and needed on the host at {sorted(item.host_uses)}; choose one"
            )


@attrs.frozen(eq=False)
class _Found:
    seconds: float
    moved: int
    copies: list[Copy]
    residents: tuple[int, ...]

    @property
    def rank(self) -> tuple[float, int]:
        return self.seconds, self.moved


class ResidencySearch:
    """Candidates of one call, scored by the timeline. Deterministic: the work is counted, not timed.

    least: what `least_budget` says of the trace, where that is known.
    """

    def __init__(self, trace: Trace, budget: int, links: Links, least: tuple[int, int] | None = None) -> None:
        _check_trace(trace)
        least_bytes, position = least_budget(trace) if least is None else least
        if budget < least_bytes:
            raise PlanError(
                f"a budget of {budget} bytes is below the least possible, {least_bytes} bytes: position {position} "
                f"holds {trace.base[position]} bytes that cannot move and needs {least_bytes - trace.base[position]} "
                "more of items at once. "
                f"Try: a budget of at least {least_bytes}, or smaller items"
            )
        self.trace, self.budget, self.floor, self.links = trace, budget, least_bytes, links
        self.facts = TraceFacts(trace)
        self.alone = play(self.facts.lanes, (), links)
        self.fixed = [i for i, item in enumerate(trace.items) if item.fixed and item.home]
        self.gave_up = False  # a linear program took too many iterations, and this is found without it
        self.best: _Found | None = None
        self.front: list[_Found] = []  # those that nothing beats in seconds and bytes
        self.where: Point | None = None  # what gave the best
        self.tried = set[Point]()
        uses = sum(len(u) for u in self.facts.uses)
        self.small = len(trace.seconds) + 2 * uses < SMALL
        self.still = self._everything()  # where nothing has to move there is nothing to search

    def sketch(self, points: Sequence[Point] = SKETCH) -> None:
        """Try a few candidates."""
        for point in points if self.still is None else ():
            self._at(point)

    def run(self) -> None:
        """Try all of them."""
        self.sketch(POINTS)

    @property
    def fastest_s(self) -> float:
        if self.still is not None:
            return self.still.seconds
        assert self.best is not None, "something was tried"
        return self.best.seconds

    def leanest_within(self, most_s: float) -> Residency:
        """Of what was tried and takes at most so long, what moves fewest bytes; the fastest where nothing does."""
        return self.still if self.still is not None else self._result(self._leanest(most_s))

    def moved_bytes(self, most_s: float) -> int:
        """Bytes that `leanest_within` copies, both ways."""
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
        if any(
            item.host_uses and (item.home or self.facts.uses[i]) and self.facts.uses[i]
            for i, item in enumerate(self.trace.items)
        ):
            return None
        held = bytes_by_position(self.trace, (), home)
        if max(held, default=0) > self.budget:
            return None
        return Residency((), frozenset(home), max(held, default=0), self.alone.makespan, (0, 0))

    # ---- one candidate ----

    def score(self, residents: Sequence[int], room: int) -> None:
        """With these residents, where Belady fills `room` bytes."""
        kept = tuple(sorted(residents))
        self._add(kept, evict(self.facts, room, kept))

    def least(self, stay: float, room: int) -> None:
        """With about the fewest bytes moved where that part of the state may stay."""
        found = self.programs.at(room, stay)
        if found is None:
            self.gave_up = True
        else:
            self._add(tuple(found.residents), found.stays)

    def _add(self, residents: tuple[int, ...], stays: list[list[Stay]]) -> None:
        seconds, copies = spread(self.facts, stays, residents, self.budget, self.links)
        found = _Found(seconds, sum(self.facts.nbytes[copy.item] for copy in copies), copies, residents)
        if self.best is None or found.rank < self.best.rank:
            self.best = found
        if all(one.seconds > found.seconds or one.moved > found.moved for one in self.front):
            self.front = [found, *(one for one in self.front if one.seconds < found.seconds or one.moved < found.moved)]

    def _result(self, best: _Found) -> Residency:
        nbytes = self.facts.nbytes
        moves = tuple(copy.move() for copy in best.copies)
        up = sum(nbytes[m.item] for m in moves if m.kind == "fetch")
        peak = max(bytes_by_position(self.trace, moves, best.residents), default=0)
        seconds = play(self.facts.lanes, moves, self.links).makespan
        return Residency(moves, frozenset(best.residents), peak, seconds, (up, best.moved - up))

    # ---- which residents ----

    @cached_property
    def orders(self) -> list[list[int]]:
        """Home items that may stay together, the ones to keep first: those that change and are used last, which leave
        no store at the end; and those that are used nearest either end, which are fetched or stored where nothing hides
        it."""
        items, uses, size = self.trace.items, self.facts.uses, self.facts.size
        able = [
            i
            for i, item in enumerate(items)
            if item.home and item.stays and not item.host_uses and uses[i] and not item.fixed
        ]
        stored_last = sorted(able, key=lambda i: (not uses_that_change(items[i]), -uses[i][-1], i))
        at_an_end = sorted(
            able, key=lambda i: (min(uses[i][0], size - 1 - uses[i][-1]), not uses_that_change(items[i]), i)
        )
        return [self._fitting(stored_last), self._fitting(at_an_end)]

    def _fitting(self, order: Sequence[int]) -> list[int]:
        """Those of the order that may stay together."""
        held = self.facts.base + self.facts.needed + self._fixed_bytes()
        out: list[int] = []
        for i in order:
            more = held + self.facts.nbytes[i]
            for begin, end in self.facts.stretches[i]:
                more[begin:end] -= self.facts.nbytes[i]
            if int(more.max()) <= self.budget:
                held = more
                out.append(i)
        return out

    def _fixed_bytes(self) -> np.ndarray:
        held = np.zeros(self.facts.size, dtype=np.int64)
        for i, item in enumerate(self.trace.items):
            uses = self.facts.uses[i]
            if item.fixed and (uses or item.home):
                held[slice(None) if item.home else slice(uses[0], uses[-1] + 1)] += item.nbytes
                for begin, end in self.facts.stretches[i]:
                    held[begin:end] -= item.nbytes
        return held

    @cached_property
    def programs(self) -> Programs:
        """Linear programs for fewest bytes."""
        return Programs(self.facts)

    def _at(self, point: Point) -> None:
        self.tried.add(point)
        before = self.best
        if point.least_traffic:
            self.least(point.stay, self.floor + int((self.budget - self.floor) * point.filled))
        else:
            order = self.orders[point.order]
            held = np.concatenate(([0], np.cumsum([self.facts.nbytes[i] for i in order], dtype=np.int64)))
            count = int(np.searchsorted(held, point.stay * float(held[-1]), side="right")) - 1
            taken = int(held[count])
            self.score([*self.fixed, *order[:count]], taken + int((self.budget - taken) * point.filled))
        self.where = point if self.best is not before else self.where
