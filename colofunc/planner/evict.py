"""Which items leave the device and when their copies run: Belady's evictions, then copies spread over the compute.

Problem: under a budget some values must lie on the host between two uses. Evicting the wrong one copies more bytes;
copying at the wrong moment shows every byte.
Idea: next uses are known, so `evict` walks the positions and drops what is needed farthest ahead (Belady 1966: the least
fetches for clean items of one size). That leaves *segments*: stretches over which an item stays. `spread` gives each
evicted value one store, started right after its last change and awaited when the engine is through with it, and each
segment one fetch, started as early as its engine and the budget allow, in order of need.

    facts = Facts(trace)                          # uses by position, next uses, versions: once per trace
    stays = evict(facts, room_bytes, residents)   # item 0 stays over [0, 4], item 1 over [1, 1] and [5, 6], ...
    moves = spread(facts, stays, residents, budget_bytes, clock, links)

Times inside `spread` are an estimate; the timeline has the last word.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from heapq import heappop, heappush
from itertools import pairwise

import attrs
import numpy as np

from colofunc.planner.timeline import Lanes, Links, Move, Trace, changes, device_uses


@attrs.frozen
class Version:
    """A value that a device use writes, until it is overwritten."""

    written: int
    end: int  # the write that replaces it, or the number of positions
    overwritten_here: bool  # by a use on the device
    host_read: int  # first use on the host (-1: none)
    outlives: bool  # the last value of an item that exists after the step


@attrs.frozen(eq=False)
class Stay:
    item: int
    first: int
    last: int
    made: bool  # its first use makes it: no fetch
    after: int  # where the item was last needed before (0 if never): its fetch starts no earlier


class Facts:
    """What the planner reads of a trace, made once."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.size = trace, len(trace.seconds)
        self.lanes = Lanes(trace)
        self.nbytes = self.lanes.nbytes
        self.never = self.size + 1
        self.uses = [device_uses(item) for item in trace.items]
        self.needs: list[list[int]] = [[] for _ in range(self.size)]
        self.next_use: list[list[int]] = []  # of each device use: the next one, `never` if a host write comes before
        self.versions: list[list[Version]] = []
        for index, item in enumerate(trace.items):
            for p in self.uses[index]:
                self.needs[p].append(index)
            self._add(index, sorted(changes(item)), sorted(item.host_uses))
        self.base = np.asarray(trace.base, dtype=np.int64)
        self.needed = np.asarray([sum(self.nbytes[i] for i in needs) for needs in self.needs], dtype=np.int64)

    def _add(self, index: int, writes: list[int], on_host: list[int]) -> None:
        item, uses = self.trace.items[index], self.uses[index]
        host_writes = [w for w in writes if w in item.host_uses]
        ahead = [b if bisect_right(host_writes, a) == bisect_right(host_writes, b) else self.never for a, b in pairwise(uses)]
        self.next_use.append([*ahead, self.never] if uses else [])
        versions = []
        for w, end in zip(writes, [*writes[1:], self.size], strict=False):
            if w not in item.host_uses:
                read = bisect_right(on_host, w)
                host_read = on_host[read] if read < len(on_host) and on_host[read] <= end else -1
                last = w == writes[-1]
                versions.append(Version(w, end, not last and end not in item.host_uses, host_read, item.home and last))
        self.versions.append(versions)


def evict(facts: Facts, room_bytes: int, residents: Collection[int]) -> list[list[Stay]]:
    """Stays of every item that moves, with at most `room_bytes` on the device wherever a position does not need more."""
    return _Belady(facts, room_bytes, residents).run()


class _Belady:
    def __init__(self, facts: Facts, room_bytes: int, residents: Collection[int]) -> None:
        self.facts = facts
        count = len(facts.nbytes)
        self.resident = [False] * count
        for item in residents:
            self.resident[item] = True
        taken = sum(facts.nbytes[i] for i in residents)
        self.room = (room_bytes - taken - facts.base).tolist()
        self.seen = [0] * count  # device uses so far
        self.next = [-1] * count  # next device use of an item that is on the device, else -1
        self.since = [0] * count  # where its stay began
        self.before = [0] * count
        self.stored = [-1] * count  # the version that an eviction has stored
        self.stays: list[list[Stay]] = [[] for _ in range(count)]
        self.held = 0
        self.far: list[tuple[int, bool, int, int]] = []  # (-next use, dirty, -bytes, item)
        self.dead: list[int] = []

    def run(self) -> list[list[Stay]]:
        nbytes, resident = self.facts.nbytes, self.resident
        for p, needs in enumerate(self.facts.needs):
            for item in self.dead:
                self._close(item, p - 1)
            self.dead.clear()
            mine = [item for item in needs if not resident[item]]
            for item in mine:
                if self.next[item] < 0:
                    self.since[item] = p
                    self.held += nbytes[item]
                self.next[item] = p
            if self.held > self.room[p]:
                self._make_room(p, sum(nbytes[item] for item in mine))
            for item in mine:
                self._look_ahead(item)
        for item in self.dead:
            self._close(item, self.facts.size - 1)
        return self.stays

    def _look_ahead(self, item: int) -> None:
        ahead = self.facts.next_use[item][self.seen[item]]
        self.seen[item] += 1
        self.next[item] = ahead
        if ahead == self.facts.never:
            self.dead.append(item)
        elif not self.facts.trace.items[item].fixed:
            heappush(self.far, (-ahead, self._dirty(item), -self.facts.nbytes[item], item))

    def _dirty(self, item: int) -> bool:
        """Would evicting it now cost a store that nothing else asks for?"""
        versions = self.facts.versions[item]
        if not versions:
            return False
        at = bisect_right(versions, self.facts.uses[item][self.seen[item] - 1], key=lambda v: v.written) - 1
        return at >= 0 and versions[at].host_read < 0 and not versions[at].outlives and self.stored[item] != at

    def _make_room(self, p: int, need: int) -> None:
        room, gone = max(self.room[p], need), []
        while self.held > room and self.far:
            ahead, dirty, minus, item = heappop(self.far)
            if self.next[item] != -ahead or -ahead <= p:
                continue
            self.held += minus
            gone.append((ahead, dirty, minus, item))
        for entry in reversed(gone):  # a small one that left for nothing comes back, the nearest next use first
            if self.held - entry[2] <= room:
                self.held -= entry[2]
                heappush(self.far, entry)
            else:
                item = entry[3]
                self.held -= entry[2]  # _close takes it off again
                if entry[1]:
                    self.stored[item] = len([v for v in self.facts.versions[item] if v.written < p]) - 1
                self._close(item, self.facts.uses[item][self.seen[item] - 1])

    def _close(self, item: int, last: int) -> None:
        facts = self.facts
        spec = facts.trace.items[item]
        first = self.since[item]
        made = not spec.home and first == spec.uses[0]
        self.stays[item].append(Stay(item, first, last, made, self.before[item]))
        self.before[item] = last + 1
        self.held -= facts.nbytes[item]
        self.next[item] = -1


@attrs.frozen(eq=False)
class _Store:
    item: int
    start: int
    host: int  # where the host awaits it (-1: nowhere)
    last: int  # last position of its stay
    limit: int  # where the device awaits it at the latest


def _stores(facts: Facts, stays: list[list[Stay]]) -> list[_Store]:
    """One store for every version that the host reads, that outlives the step, or that an eviction must keep."""
    out = []
    for item, mine in enumerate(stays):
        for version in facts.versions[item] if mine else ():
            at = bisect_right(mine, version.written, key=lambda s: s.first) - 1
            following = mine[at + 1].first if at + 1 < len(mine) else facts.never
            if version.host_read >= 0 or version.outlives or following <= version.end:
                limit = min(version.end if version.overwritten_here else facts.size, following, facts.size)
                out.append(_Store(item, version.written + 1, version.host_read, mine[at].last, limit))
    return sorted(out, key=lambda s: (s.start, s.limit, s.item))


def spread(
    facts: Facts, stays: list[list[Stay]], residents: Collection[int], budget_bytes: int, clock: list[float], links: Links,
    fetch_first: bool = False,
) -> list[Move]:  # fmt: skip
    """Moves of these stays: `clock[p]` is when the device is about to reach position p, without these copies or nearly so."""
    plan = _Spread(facts, stays, residents, budget_bytes, clock, links)
    stores = _stores(facts, stays)
    fetches = sorted((s for mine in stays for s in mine if not s.made), key=lambda s: (s.first, s.last, s.item))
    if fetch_first:
        plan.fetch(fetches)
        plan.clock = np.asarray(clock)
        plan.store(stores)
    else:
        plan.store(stores)
        plan.fetch(fetches)
    return plan.ordered()


class _Spread:
    def __init__(
        self, facts: Facts, stays: list[list[Stay]], residents: Collection[int], budget_bytes: int, clock: list[float], links: Links
    ) -> None:
        self.facts, self.budget, self.links = facts, budget_bytes, links
        self.clock = np.asarray(clock)
        change = [0] * (facts.size + 1)
        for item, mine in enumerate(stays):
            for stay in mine:
                change[stay.first] += facts.nbytes[item]
                change[stay.last + 1] -= facts.nbytes[item]
        taken = sum(facts.nbytes[i] for i in residents)
        self.bytes = facts.base + np.cumsum(np.asarray(change[:-1], dtype=np.int64)) + taken
        self.host_write = [sorted(changes(item) & item.host_uses) if item.host_uses else [] for item in facts.trace.items]
        self.freed: dict[int, list[int]] = {}  # item -> where its stores end, ascending
        self.fetched: dict[int, list[int]] = {}
        self.moves: list[Move] = []

    def store(self, stores: list[_Store]) -> None:
        engine, nbytes = 0.0, self.facts.nbytes
        for s in stores:
            size = nbytes[s.item]
            engine = max(engine, float(self.clock[s.start])) + self.links.store_s(size)
            starts = self.fetched.get(s.item, [])
            at = bisect_left(starts, s.start)
            limit = min(s.limit, starts[at]) if at < len(starts) else s.limit
            low = max(s.last + 1, s.start)
            if low >= limit:
                free = limit
            else:
                free = min(max(int(self.clock.searchsorted(engine)), low), limit)
                over = self.bytes[low:free] > self.budget - size
                if over.any():
                    free = low + int(over.argmax())
                self.bytes[low:free] += size
            self._stall(free, engine)
            done = free if s.host < 0 else min(s.host, free)
            self.moves.append(Move(s.item, "store", s.start, done, free))
            self.freed.setdefault(s.item, []).append(free)

    def fetch(self, fetches: list[Stay]) -> None:
        engine, before, nbytes = 0.0, 0, self.facts.nbytes
        for stay in fetches:
            item, need = stay.item, stay.first
            size = nbytes[item]
            idle = int(self.clock.searchsorted(engine, side="right")) - 1
            low = max(before, idle, self._earliest(stay))
            start = min(low, need)
            if start < need:
                over = self.bytes[start:need] > self.budget - size
                if over.any():
                    start = need - int(over[::-1].argmax())
                self.bytes[start:need] += size
            engine = max(engine, float(self.clock[start])) + self.links.fetch_s(size)
            self._stall(need, engine)
            before = start
            self.moves.append(Move(item, "fetch", start, need))
            self.fetched.setdefault(item, []).append(start)

    def _earliest(self, stay: Stay) -> int:
        low = stay.after
        freed = self.freed.get(stay.item, [])
        if at := bisect_right(freed, stay.first):
            low = max(low, freed[at - 1])
        writes = self.host_write[stay.item]
        if at := bisect_left(writes, stay.first):
            low = max(low, writes[at - 1] + 1)
        return low

    def _stall(self, p: int, until: float) -> None:
        late = until - float(self.clock[p])
        if late > 0:
            self.clock[p:] += late

    def ordered(self) -> list[Move]:
        return sorted(self.moves, key=lambda m: (m.start, m.kind == "fetch", m.free, m.item))
