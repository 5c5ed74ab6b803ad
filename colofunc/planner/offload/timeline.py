"""What a plan of copies costs: compute, host and two copy engines as lanes.

Problem: a plan that moves state between host and device is worth what it leaves exposed, and is right only if every
position finds a valid copy where it looks for one. Idea: positions run in program order on two lanes (device, host);
each copy direction is one engine that works first in, first out. Right before position p: stores that start there are
issued, stores whose bytes are needed from here are waited for, fetches that start there are issued, and fetches that
are due are waited for. `play` does this forward.

    trace = Trace(seconds=(1.0, 1.0), host=frozenset(), base=(0, 0), items=(OffloadItem(4, home=True, uses=(1,)),))
    play(TraceLanes(trace), (ScheduledCopy(0, "fetch", start=0, done=1),), Links(4.0, 4.0, 0.0)).makespan    # 2.0: hidden
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Literal

import attrs


def _frozen(positions: Iterable[int]) -> frozenset[int]:
    return frozenset(positions)


@attrs.frozen
class OffloadItem:
    """Bytes that may lie on the device or on the host: a chunk of state (`home`), or a value made in the step."""

    nbytes: int
    home: bool  # lies on the host before and after the step; else made on its first use and dead after its last
    uses: tuple[int, ...] = ()  # ascending positions that need it
    # uses that change it (all read it too)
    writes: frozenset[int] = attrs.field(default=frozenset(), converter=_frozen)
    # uses that need it on the host instead
    host_uses: frozenset[int] = attrs.field(default=frozenset(), converter=_frozen)
    fixed: bool = False  # stays on the device all the time
    stays: bool = True  # of a home item: whether it may be a resident
    # (use, later use) between which it stays on the device: something in flight needs it
    held: tuple[tuple[int, int], ...] = ()


@attrs.frozen
class Trace:
    """Positions in program order, what they take and need."""

    seconds: tuple[float, ...]
    host: frozenset[int] = attrs.field(converter=_frozen)  # positions of the host's lane
    base: tuple[int, ...]  # device bytes at each position that cannot move, items not counted
    items: tuple[OffloadItem, ...]
    waits: tuple[tuple[int, int], ...] = ()  # (position, earlier position of the other lane that must have ended)


@attrs.frozen
class Links:
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    latency_s: float
    one_queue: bool = False  # copies of both directions wait for one another

    def fetch_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.to_device_bytes_per_s

    def store_s(self, nbytes: int) -> float:
        return self.latency_s + nbytes / self.to_host_bytes_per_s


@attrs.frozen
class ScheduledCopy:
    """One copy: issued right before position `start` runs, waited for right before position `done` runs.

    A store may be needed by the host before the device needs its bytes back: then `done` is where the host waits and
    `free`, never earlier, is where the device does. A stored item counts on the device up to `free`. The host's lane
    waits only where it uses the item, so a `done` at one of its positions does not hold up others of its positions.
    """

    item: int
    kind: Literal["fetch", "store"]
    start: int
    done: int
    free: int = attrs.field(default=attrs.Factory(lambda self: self.done, takes_self=True))


@attrs.frozen
class Residency:
    moves: tuple[ScheduledCopy, ...]  # ordered by start
    residents: frozenset[int]  # home items that never leave the device
    peak_bytes: int
    seconds: float
    moved_bytes: tuple[int, int]  # to the device, to the host


def device_uses(item: OffloadItem) -> list[int]:
    return [p for p in item.uses if p not in item.host_uses]


def needed(item: OffloadItem) -> list[tuple[int, int]]:
    """Stretches of positions, their ends not among them, at which the item lies on the device in any case."""
    held_to = dict(item.held)
    stretches = list[tuple[int, int]]()
    for use in device_uses(item):
        end = max(use, held_to.get(use, use)) + 1
        if stretches and use <= stretches[-1][1]:
            begin, before = stretches.pop()
            stretches.append((begin, max(before, end)))
        else:
            stretches.append((use, end))
    return stretches


def uses_that_change(item: OffloadItem) -> frozenset[int]:
    """Uses after which the item's other copies are worthless: its writes, and what makes it."""
    return item.writes if item.home else item.writes.union(item.uses[:1])


class TraceLanes:
    """What a simulation reads of a trace, made once: who waits for whom, which items a host position reads or writes."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.size = len(trace.seconds)
        self.seconds = list(trace.seconds)
        self.on_host = [p in trace.host for p in range(self.size)]
        self.nbytes = [item.nbytes for item in trace.items]
        self.waits: dict[int, list[int]] = {}
        self.host_uses: dict[int, list[int]] = {}  # position -> items that it needs on the host
        self.joins: set[int] = set()  # positions of the host's lane that hold an item on the device
        for later, earlier in trace.waits:
            self.waits.setdefault(later, []).append(earlier)
        for index, item in enumerate(trace.items):
            self._add(index, item)

    def _add(self, index: int, item: OffloadItem) -> None:
        """Uses of one copy by different lanes: after its last writer; a writer after everybody since then."""
        for p in sorted(item.host_uses):
            self.host_uses.setdefault(p, []).append(index)
        if not item.uses or not self.trace.host:
            return
        self.joins.update(p for p in item.uses if self.on_host[p] and p not in item.host_uses)
        writes = uses_that_change(item)
        for tier in (True, False):
            since: list[int] = []  # the last writer and its readers
            for p in item.uses:
                if (p in item.host_uses) is not tier:
                    continue
                before = since
                if p not in writes:  # who reads waits for who wrote
                    before = since[:1] if since and since[0] in writes else []
                other = [q for q in before if self.on_host[q] != self.on_host[p]]
                if other:
                    self.waits.setdefault(p, []).extend(other)
                if p in writes:
                    since = [p]
                else:
                    since.append(p)  # in place: thousands of updates read one learning rate


class SimulatedTimes:
    """Times of one simulation, in plain lists: by position, and by move in the order given."""

    def __init__(self, positions: int, moves: int) -> None:
        self.start = [0.0] * positions
        self.end = [0.0] * positions
        self.control = [0.0] * (positions + 1)  # when the device's lane is through with everything before this position
        self.move_start = [0.0] * moves
        self.move_end = [0.0] * moves
        self.makespan = 0.0


def play(lanes: TraceLanes, moves: Sequence[ScheduledCopy], links: Links) -> SimulatedTimes:
    """Run positions and moves forward. Moves of one direction are issued by `start`, then in the order given."""
    return _Play(lanes, moves, links).run()


class _Play:
    def __init__(self, lanes: TraceLanes, moves: Sequence[ScheduledCopy], links: Links) -> None:
        self.lanes, self.moves, self.links = lanes, moves, links
        self.out = SimulatedTimes(lanes.size, len(moves))
        self.stores: dict[int, list[int]] = {}
        self.fetches: dict[int, list[int]] = {}
        self.free: dict[int, list[int]] = {}
        self.due: dict[int, list[int]] = {}
        for index, move in enumerate(moves):
            if move.kind == "store":
                self.stores.setdefault(move.start, []).append(index)
                self.free.setdefault(move.free, []).append(index)
            else:
                self.fetches.setdefault(move.start, []).append(index)
                self.due.setdefault(move.done, []).append(index)
        self.control = self.host_clock = self.up = self.down = 0.0
        self.ready: dict[int, float] = {}  # item -> when its copy on the host is complete
        self.read: dict[int, float] = {}  # item -> when the host is through with its copy
        self.touched = {p for table in (self.stores, self.fetches, self.free, self.due) for p in table}
        self.touched |= set(lanes.waits) | set(lanes.host_uses) | lanes.trace.host

    def run(self) -> SimulatedTimes:
        out, seconds, touched = self.out, self.lanes.seconds, self.touched
        for p in range(self.lanes.size):
            out.control[p] = self.control
            if p in touched:
                self._position(p)
            else:
                out.start[p] = self.control
                self.control = out.end[p] = self.control + seconds[p]
        out.control[-1] = self.control
        self._issue(self.lanes.size)
        out.makespan = max(self.control, self.host_clock, self.up, self.down)
        return out

    def _issue(self, p: int) -> None:
        """Start the moves at p and await those that the device awaits there."""
        end = self.out.move_end
        for index in self.stores.get(p, ()):
            item = self.moves[index].item
            self.out.move_start[index] = begin = max(self.down, self.control, self.read.get(item, 0.0))
            self.down = end[index] = self.ready[item] = begin + self.links.store_s(self.lanes.nbytes[item])
            self.up = self.down if self.links.one_queue else self.up
        for index in self.free.get(p, ()):
            self.control = max(self.control, end[index])
        for index in self.fetches.get(p, ()):
            item = self.moves[index].item
            self.out.move_start[index] = begin = max(self.up, self.control, self.ready.get(item, 0.0))
            self.up = end[index] = begin + self.links.fetch_s(self.lanes.nbytes[item])
            self.down = self.up if self.links.one_queue else self.down
        for index in self.due.get(p, ()):
            self.control = max(self.control, end[index])

    def _position(self, p: int) -> None:
        lanes, out = self.lanes, self.out
        self._issue(p)
        begin = 0.0
        for q in lanes.waits.get(p, ()):
            begin = max(begin, out.end[q])
        for item in lanes.host_uses.get(p, ()):
            begin = max(begin, self.ready.get(item, 0.0))
        if lanes.on_host[p]:
            begin = max(begin, self.host_clock, self.control if p in lanes.joins else 0.0)
            self.host_clock = end = begin + lanes.seconds[p]
            if p in lanes.joins:
                self.control = end
        else:
            begin = max(begin, self.control)
            self.control = end = begin + lanes.seconds[p]
        out.start[p], out.end[p] = begin, end
        for item in lanes.host_uses.get(p, ()):
            self.read[item] = end
            if p in uses_that_change(lanes.trace.items[item]):
                self.ready[item] = end


def bytes_by_position(trace: Trace, moves: Sequence[ScheduledCopy], residents: Iterable[int]) -> list[int]:
    """Device bytes at each position: from each fetch (or making) to the last use before the next one, or the store's
    end.
    """
    change = [0] * (len(trace.seconds) + 1)
    kept = set(residents)
    fetches: dict[int, list[int]] = {}
    frees: dict[int, list[int]] = {}
    for move in moves:
        (fetches if move.kind == "fetch" else frees).setdefault(move.item, []).append(
            move.start if move.kind == "fetch" else move.free
        )
    for index, item in enumerate(trace.items):
        uses = device_uses(item)
        starts = sorted(fetches.get(index, []))
        if index in kept:
            starts, uses = [0], [len(trace.seconds) - 1]
        elif uses and not item.home and uses[0] == item.uses[0]:
            starts = [uses[0], *starts]
        for begin, end in zip(starts, [*starts[1:], len(trace.seconds) + 1], strict=False):
            inside = [u + 1 for u in uses[bisect_left(uses, begin) : bisect_left(uses, end)]]
            last = max([*inside[-1:], *(f for f in frees.get(index, ()) if begin < f <= end)], default=begin)
            change[begin] += item.nbytes
            change[last] -= item.nbytes
    total, out = 0, []
    for p, base in enumerate(trace.base):
        total += change[p]
        out.append(base + total)
    return out
