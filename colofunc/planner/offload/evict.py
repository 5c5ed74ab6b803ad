"""Which items leave the device and when their copies run: Belady's evictions, then copies spread over the compute.

Problem: under a budget some values must lie on the host between two uses. Evicting the wrong one copies more bytes;
copying at the wrong moment shows every byte. Idea: next uses are known, so `evict` walks the positions and drops what
is needed farthest ahead (Belady 1966: the least fetches for clean items of one size). That leaves *segments*: stretches
over which an item stays. `spread` gives each evicted value one store, started right after its last change and awaited
when the engine is through with it, and each segment one fetch, started as early as its engine and the budget allow, in
order of need.

    facts = TraceFacts(trace)                          # uses by position, next uses, versions: once per trace
    stays = evict(facts, room_bytes, residents)   # item 0 stays over [0, 4], item 1 over [1, 1] and [5, 6], ...
    seconds, copies = spread(facts, stays, residents, budget_bytes, links)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import attrs
import numpy as np

from colofunc.planner.offload.timeline import (
    Links,
    ScheduledCopy,
    Trace,
    TraceLanes,
    device_uses,
    needed,
    uses_that_change,
)


@attrs.frozen
class Version:
    """A value that a device use writes, until it is overwritten."""

    written: int
    end: int  # the write that replaces it, or the number of positions
    overwritten_here: bool  # by a use on the device
    host_read: int  # first use on the host (-1: none)
    outlives: bool  # the last value of an item that exists after the step


class Stay(NamedTuple):
    """An item is on the device from its first to its last position of this stretch."""

    first: int
    last: int
    item: int
    made: bool  # its first use makes it: no fetch
    after: int  # where the item was last needed before (0 if never): its fetch starts no earlier


class TraceFacts:
    """What the planner reads of a trace, made once."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.size = trace, len(trace.seconds)
        self.lanes = TraceLanes(trace)
        self.nbytes = self.lanes.nbytes
        self.never = self.size + 1
        self.uses = [device_uses(item) for item in trace.items]
        self.stretches = [needed(item) for item in trace.items]
        self.needs: list[list[int]] = [[] for _ in range(self.size)]
        self.next_use: list[list[int]] = []  # of each device use: the next one, `never` if a host write comes before
        self.held: list[list[bool]] = []  # of each device use: whether the item may not leave before the next one
        self.versions: list[list[Version]] = []
        # at each device use: the version that an eviction behind it has to store, or -1
        self.unsaved: list[list[int]] = []
        self.fixed = [item.fixed for item in trace.items]
        for index, item in enumerate(trace.items):
            for position in self.uses[index]:
                self.needs[position].append(index)
            self._add(index, sorted(uses_that_change(item)), sorted(item.host_uses))
        self.base = np.asarray(trace.base, dtype=np.int64)
        self.needed = needed_bytes(zip(self.nbytes, self.stretches, strict=True), self.size)

    def _add(self, index: int, writes: list[int], on_host: list[int]) -> None:
        item, uses = self.trace.items[index], self.uses[index]
        host_writes = [write for write in writes if write in item.host_uses]
        # What the host writes between two uses makes the device's copy worthless: the next use is then a new one.
        next_uses: list[int] = []
        for use, ahead in pairwise(uses):
            same_value = bisect_right(host_writes, use) == bisect_right(host_writes, ahead)
            next_uses.append(ahead if same_value else self.never)
        if uses:
            next_uses.append(self.never)
        self.next_use.append(next_uses)
        self.held.append(_held(uses, self.stretches[index]))

        versions: list[Version] = []
        for write, end in zip(writes, [*writes[1:], self.size], strict=False):
            if write in item.host_uses:
                continue
            read = bisect_right(on_host, write)
            host_read = -1
            if read < len(on_host) and on_host[read] <= end:
                host_read = on_host[read]
            last = write == writes[-1]
            overwritten_here = not last and end not in item.host_uses
            versions.append(Version(write, end, overwritten_here, host_read, item.home and last))
        self.versions.append(versions)
        self.unsaved.append([_unsaved(versions, use) for use in uses])


def needed_bytes(items: Iterable[tuple[int, Sequence[tuple[int, int]]]], positions: int) -> np.ndarray:
    """At each position the bytes of items, each with the stretches at which it lies on the device in any case."""
    change = [0] * (positions + 1)
    for nbytes, stretches in items:
        for begin, end in stretches:
            change[begin] += nbytes
            change[end] -= nbytes
    return np.cumsum(np.asarray(change[:-1], dtype=np.int64))


def _held(uses: Sequence[int], stretches: Sequence[tuple[int, int]]) -> list[bool]:
    """Of each use whether the item may not leave before the next one."""
    if not uses:
        return []
    held: list[bool] = []
    number = 0
    for later in uses[1:]:
        while stretches[number][1] <= later:
            number += 1
        held.append(stretches[number][0] < later)
    return [*held, False]


def _unsaved(versions: list[Version], use: int) -> int:
    """The version that is on the device behind a use, where nothing else asks for it to be stored; else -1."""
    number = bisect_right(versions, use, key=lambda version: version.written) - 1
    if number < 0 or versions[number].host_read >= 0 or versions[number].outlives:
        return -1
    return number


def evict(facts: TraceFacts, room_bytes: int, residents: Collection[int]) -> list[list[Stay]]:
    """Stays of every item that moves, with at most `room_bytes` on the device wherever a position does not need more."""
    return _Belady(facts, room_bytes, residents).run()


class _Belady:
    def __init__(self, facts: TraceFacts, room_bytes: int, residents: Collection[int]) -> None:
        self.facts = facts
        count = len(facts.nbytes)
        self.resident = [False] * count
        for item in residents:
            self.resident[item] = True
        taken = sum(facts.nbytes[item] for item in residents)
        resident_stretches = [(facts.nbytes[item], facts.stretches[item]) for item in residents]
        needed = facts.needed - needed_bytes(resident_stretches, facts.size)
        self.room = np.maximum(room_bytes - taken - facts.base, needed).tolist()
        self.seen = [0] * count  # device uses so far
        self.next = [-1] * count  # next device use of an item that is on the device, else -1
        self.since = [0] * count  # where its stay began
        self.before = [0] * count
        self.stored = [-1] * count  # the version that an eviction has stored
        self.stays: list[list[Stay]] = [[] for _ in range(count)]
        self.held = 0
        self.far: list[tuple[int, bool, int, int]] = []  # (-next use, dirty, bytes, item)
        self.dead: list[int] = []

    def run(self) -> list[list[Stay]]:
        """Thousands of positions for each of hundreds of candidates pass here, so what is read often has a name of its
        own.
        """
        facts, resident, seen, following, room = self.facts, self.resident, self.seen, self.next, self.room
        nbytes, next_use, never, unsaved, fixed = facts.nbytes, facts.next_use, facts.never, facts.unsaved, facts.fixed
        held = facts.held
        for position, needs in enumerate(facts.needs):
            # Items that are not read again leave as soon as their last use is over.
            for item in self.dead:
                self._close(item, position - 1)
            self.dead.clear()
            moving = [item for item in needs if not resident[item]]
            for item in moving:
                if following[item] < 0:
                    self.since[item] = position
                    self.held += nbytes[item]
                following[item] = position
            # What is needed here is on the device now; others may have to leave for it.
            if self.held > room[position]:
                self._make_room(position)
            for item in moving:
                use = seen[item]
                seen[item] += 1
                following[item] = ahead = next_use[item][use]
                if ahead == never:
                    self.dead.append(item)
                elif not fixed[item] and not held[item][use]:
                    version = unsaved[item][use]
                    dirty = version >= 0 and self.stored[item] != version
                    heappush(self.far, (-ahead, dirty, nbytes[item], item))
        for item in self.dead:
            self._close(item, facts.size - 1)
        return self.stays

    def _make_room(self, position: int) -> None:
        while self.held > self.room[position] and self.far:
            ahead, dirty, _, item = heappop(self.far)
            # An entry is out of date where the item has left or has another next use since; what is needed here stays.
            if self.next[item] != -ahead or -ahead <= position:
                continue
            if dirty:
                written = [version for version in self.facts.versions[item] if version.written < position]
                self.stored[item] = len(written) - 1
            self._close(item, self.facts.uses[item][self.seen[item] - 1])

    def _close(self, item: int, last: int) -> None:
        facts = self.facts
        spec = facts.trace.items[item]
        first = self.since[item]
        made = not spec.home and first == spec.uses[0]
        self.stays[item].append(Stay(first, last, item, made, self.before[item]))
        self.before[item] = last + 1
        self.held -= facts.nbytes[item]
        self.next[item] = -1


@attrs.define(eq=False)
class _Store:
    item: int
    start: int
    host: int  # where the host awaits it (-1: nowhere)
    low: int  # from here on its bytes are kept for the copy alone
    limit: int  # where the device awaits it at the latest
    end: float = 0.0
    free: int = -1


def _stores(facts: TraceFacts, stays: list[list[Stay]]) -> list[_Store]:
    """One store for every version that the host reads, that outlives the step, or that an eviction must keep."""
    stores: list[_Store] = []
    for item, item_stays in enumerate(stays):
        if not item_stays:
            continue
        for version in facts.versions[item]:
            number = bisect_right(item_stays, version.written, key=lambda stay: stay.first) - 1
            following = item_stays[number + 1].first if number + 1 < len(item_stays) else facts.never
            if version.host_read < 0 and not version.outlives and following > version.end:
                continue
            start = version.written + 1
            low = max(item_stays[number].last + 1, start)
            overwritten = version.end if version.overwritten_here else facts.size
            limit = min(overwritten, following, facts.size)
            stores.append(_Store(item, start, version.host_read, low, limit))
    return sorted(stores, key=lambda store: (store.start, store.low, store.limit, store.item))


class Copy(NamedTuple):
    """A `ScheduledCopy` as it is found, thousands at a time."""

    start: int
    fetch: bool
    item: int
    done: int
    free: int

    def move(self) -> ScheduledCopy:
        return ScheduledCopy(self.item, "fetch" if self.fetch else "store", self.start, self.done, self.free)


def spread(
    facts: TraceFacts, stays: list[list[Stay]], residents: Collection[int], budget_bytes: int, links: Links
) -> tuple[float, list[Copy]]:
    """(makespan, copies) of these stays, in order of issue: at most `budget_bytes` on the device at any position."""
    return _Spread(facts, stays, residents, budget_bytes, links).run()


class _Spread:
    """Walks the positions with both engines' clocks and starts what fits.

    A store keeps its bytes until it has ended, or until a position needs them and so has to wait. A fetch starts where
    its engine would be idle otherwise, if its bytes fit from there to its need; those that do not fit start at their
    need.
    """

    def __init__(
        self, facts: TraceFacts, stays: list[list[Stay]], residents: Collection[int], budget_bytes: int, links: Links
    ) -> None:
        self.facts, self.budget, self.links = facts, budget_bytes, links
        change = [0] * (facts.size + 1)
        fetched: list[Stay] = []
        for item, item_stays in enumerate(stays):
            fetched += [stay for stay in item_stays if not stay.made]
            for stay in item_stays:
                change[stay.first] += facts.nbytes[item]
                change[stay.last + 1] -= facts.nbytes[item]
        taken = sum(facts.nbytes[item] for item in residents)
        self.bytes = facts.base + np.cumsum(np.asarray(change[:-1], dtype=np.int64)) + taken
        self.queue = sorted(fetched)
        self.started = [False] * len(self.queue)
        self.head = 0
        # no start before this position: something else needs the bytes up to there
        self.blocked = [0] * len(self.queue)
        self.due: dict[int, list[int]] = {}
        for index, stay in enumerate(self.queue):
            self.due.setdefault(stay.first, []).append(index)
        self.stores: dict[int, list[_Store]] = {}
        self.lows: dict[int, list[_Store]] = {}
        self.limits: dict[int, list[_Store]] = {}
        for store in _stores(facts, stays):
            self.stores.setdefault(store.start, []).append(store)
            if store.limit <= store.low:
                self.limits.setdefault(store.limit, []).append(store)
            else:
                self.lows.setdefault(store.low, []).append(store)
        # positions at which something happens to a store
        self.store_positions = {*self.stores, *self.lows, *self.limits}
        self.storing: dict[int, _Store] = {}  # item -> its store that the device has not awaited yet
        self.kept: list[_Store] = []  # those whose bytes nothing else needs
        self.extra = 0
        self.now = self.up = self.down = self.host = 0.0
        self.ready: dict[int, float] = {}  # item -> when its copy on the host is complete
        self.read: dict[int, float] = {}
        self.end = [0.0] * facts.size
        self.landing: dict[int, float] = {}  # position -> when the fetches due there have ended
        self.copies: list[Copy] = []

    def run(self) -> tuple[float, list[Copy]]:
        """Hot: every position of every candidate passes here."""
        lanes, landing, end = self.facts.lanes, self.landing, self.end
        for position, seconds in enumerate(lanes.seconds):
            if self.kept or position in self.store_positions:
                self._store(position)
            if position in self.due:
                late = [index for index in self.due[position] if not self.started[index]]
                for index in sorted(late, key=lambda index: self.ready.get(self.queue[index].item, 0.0)):
                    self._fetch(index, position)
            on_host = lanes.on_host[position]
            take = 0.0 if on_host else seconds
            soon = max(self.now, landing.get(position, 0.0)) + take
            if self.head < len(self.queue) and (self.up < soon or self.up <= self.now):
                self._hoist(position, soon)
            self.now = max(self.now, landing.get(position, 0.0))
            if on_host:
                self._host(position)
                continue
            begin = self.now
            if position in lanes.waits:
                for awaited in lanes.waits[position]:
                    begin = max(begin, end[awaited])
            if position in lanes.host_uses:
                for item in lanes.host_uses[position]:
                    begin = max(begin, self.ready.get(item, 0.0))
            self.now = end[position] = begin + take
        self._store(self.facts.size)
        for store in list(self.storing.values()):
            self._await(store, store.limit)
        makespan = max(self.now, self.host, self.up, self.down)
        for issued in self.stores.values():
            for store in issued:
                done = store.free if store.host < 0 else min(store.free, store.host)
                self.copies.append(Copy(store.start, False, store.item, done, store.free))
        return makespan, sorted(self.copies, key=itemgetter(0, 1))

    def _host(self, position: int) -> None:
        lanes = self.facts.lanes
        begin = max(self.host, self.now if position in lanes.joins else 0.0)
        for awaited in lanes.waits.get(position, ()):
            begin = max(begin, self.end[awaited])
        items = lanes.host_uses.get(position, ())
        for item in items:
            begin = max(begin, self.ready.get(item, 0.0))
        self.host = self.end[position] = begin + lanes.seconds[position]
        if position in lanes.joins:
            self.now = self.host
        for item in items:
            self.read[item] = self.host
            if position in uses_that_change(self.facts.trace.items[item]):
                self.ready[item] = self.host

    # ---- stores ----

    def _store(self, position: int) -> None:
        for store in self.stores.get(position, ()):
            begin = max(self.down, self.now, self.read.get(store.item, 0.0))
            self.down = store.end = self.ready[store.item] = begin + self.links.store_s(self.facts.nbytes[store.item])
            if self.links.one_queue:
                self.up = self.down
            self.storing[store.item] = store
        for store in self.limits.get(position, ()):
            self._await(store, position)
        for store in self.lows.get(position, ()):
            if store.free < 0:
                self.kept.append(store)
                self.extra += self.facts.nbytes[store.item]
        if self.kept:
            over = int(self.bytes[position]) - self.budget if position < self.facts.size else 0
            for store in list(self.kept):
                # Its bytes are free once the copy has ended, or as soon as something has to have them.
                if store.end <= self.now or store.limit <= position or over + self.extra > 0:
                    self._await(store, position)

    def _await(self, store: _Store, position: int) -> None:
        if store.free >= 0:
            return
        store.free = position
        self.now = max(self.now, store.end)
        del self.storing[store.item]
        if store in self.kept:
            self.kept.remove(store)
            self.extra -= self.facts.nbytes[store.item]

    # ---- fetches ----

    def _fetch(self, index: int, position: int) -> None:
        stay = self.queue[index]
        size = self.facts.nbytes[stay.item]
        begin = max(self.up, self.now, self.ready.get(stay.item, 0.0))
        self.up = begin + self.links.fetch_s(size)
        if self.links.one_queue:
            self.down = self.up
        self.landing[stay.first] = self.up
        self.bytes[position : stay.first] += size
        self.started[index] = True
        self.copies.append(Copy(position, True, stay.item, stay.first, stay.first))

    def _hoist(self, position: int, soon: float) -> None:
        """Starts what fits, until the engine is busy up to where this position ends.

        Where only the first may start, and not one of the 7 behind it, OPT-13B within 40 GB (`bench moved`) takes 11 %
        longer.
        """
        while self.head < len(self.queue) and self.started[self.head]:
            self.head += 1
        for index in range(self.head, min(self.head + 8, len(self.queue))):
            if self.up >= soon and self.up > self.now:
                return
            if self.started[index] or not self._may_start(index, position, soon):
                continue
            # In order of need: what is behind may not take the room of the one in front.
            if self.blocked[index] > position or not self._fits(index, position):
                return
            self._fetch(index, position)

    def _may_start(self, index: int, position: int, soon: float) -> bool:
        """Is the stay before over, and the copy on the host complete by then?"""
        stay = self.queue[index]
        if stay.after > position:
            return False
        item = self.facts.trace.items[stay.item]
        if item.host_uses and any(position <= write < stay.first for write in item.host_uses & uses_that_change(item)):
            return False
        store = self.storing.get(stay.item)
        if store is not None:
            if store.end > self.now:
                return False
            self._await(store, position)
        return self.ready.get(stay.item, 0.0) <= max(self.now, soon)

    def _fits(self, index: int, position: int) -> bool:
        stay = self.queue[index]
        room = self.budget - self.facts.nbytes[stay.item]
        ahead = self.bytes[position : stay.first]
        if np.maximum.reduce(ahead) > room:
            self.blocked[index] = stay.first - int((ahead[::-1] > room).argmax())
            return False
        return int(self.bytes[position]) + self.extra <= room
