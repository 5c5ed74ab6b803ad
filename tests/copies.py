"""Plans of copies, checked and drawn: what lies where, replayed by a state machine that shares no arithmetic with the planner.

    check(trace, residency, budget_bytes=100)    # raises ProgramError at the first use without a valid copy
    simulate(trace, residency.moves, residency.residents, links).device    # what runs when, by lane and engine
"""

from collections.abc import Iterable, Sequence

import attrs

from colofunc.errors import ProgramError
from colofunc.planner.offload.timeline import (
    Links,
    Residency,
    ScheduledCopy,
    Trace,
    TraceLanes,
    bytes_by_position,
    device_uses,
    play,
)


@attrs.frozen
class Interval:
    start_s: float
    end_s: float
    index: int  # position on the lanes "device" and "host", index of the move on the two engines


@attrs.frozen
class Timeline:
    device: tuple[Interval, ...]
    host: tuple[Interval, ...]
    to_device: tuple[Interval, ...]
    to_host: tuple[Interval, ...]
    makespan_s: float
    device_bytes: tuple[int, ...]  # at each position


def simulate(trace: Trace, moves: Sequence[ScheduledCopy], residents: Iterable[int], links: Links) -> Timeline:
    """Play the plan: intervals of every lane and engine, and the device bytes at each position."""
    lanes = TraceLanes(trace)
    played = play(lanes, moves, links)
    halves: dict[bool, list[Interval]] = {True: [], False: []}
    for p, (start, end) in enumerate(zip(played.start, played.end, strict=True)):
        halves[lanes.on_host[p]].append(Interval(start, end, p))
    engines: dict[str, list[Interval]] = {"fetch": [], "store": []}
    for index in sorted(range(len(moves)), key=lambda index: (played.move_start[index], index)):
        engines[moves[index].kind].append(Interval(played.move_start[index], played.move_end[index], index))
    return Timeline(
        tuple(halves[False]), tuple(halves[True]), tuple(engines["fetch"]), tuple(engines["store"]), played.makespan,
        tuple(bytes_by_position(trace, moves, residents)),
    )  # fmt: skip


def check(trace: Trace, residency: Residency, budget_bytes: int) -> None:
    """Replay what lies where, independently of the planner. Raises ProgramError at the first use without a valid copy."""
    replay = _Replay(trace, residency)
    peak = 0
    for p in range(len(trace.seconds) + 1):
        replay.arrive(p)
        if p < len(trace.seconds):
            replay.use(p)
            held = trace.base[p] + sum(trace.items[i].nbytes for i in replay.device)
            peak = max(peak, held)
            if held > budget_bytes:
                raise ProgramError(f"position {p} holds {held} bytes on the device, above {budget_bytes}: items {sorted(replay.device)}")
            replay.drop(p)
    replay.finish()
    if peak != residency.peak_bytes:
        raise ProgramError(f"the plan says a peak of {residency.peak_bytes} bytes, the replay finds {peak}")


class _Replay:
    """Which items have a copy on the device and where the newest value lies, one position after the other."""

    def __init__(self, trace: Trace, residency: Residency) -> None:
        self.trace, self.moves, self.residents = trace, residency.moves, residency.residents
        self.device: set[int] = set(residency.residents)  # a buffer is there
        self.good: set[int] = set(residency.residents)  # and holds the newest value
        self.host = {i for i, item in enumerate(trace.items) if item.home and i not in residency.residents}
        self.flying: dict[int, ScheduledCopy] = {}
        self.holding: dict[int, ScheduledCopy] = {}  # stores whose bytes the device still counts
        if any(not trace.items[i].home for i in self.residents):
            raise ProgramError("a resident is an item that exists before and after the step")
        if list(self.moves) != sorted(self.moves, key=lambda m: m.start):
            raise ProgramError("moves are ordered by start")

    def arrive(self, p: int) -> None:
        starting = [m for m in self.moves if m.start == p]
        for move in starting:
            if not p <= move.done <= move.free <= len(self.trace.seconds) or move.item in self.residents:
                raise ProgramError(f"{move} goes backwards, or moves a resident")
        for move in [m for m in starting if m.kind == "store"]:
            self._issue(move, move.item in self.good)
            self.holding[move.item] = move
        self._land(p, "store")
        for item in [i for i, m in self.holding.items() if m.free == p]:
            del self.holding[item]
            self._release(item, p)
        for move in [m for m in starting if m.kind == "fetch"]:
            self._issue(move, move.item in self.host and move.item not in self.device)
            self.device.add(move.item)
        self._land(p, "fetch")

    def _issue(self, move: ScheduledCopy, valid: bool) -> None:
        if not valid or move.item in self.flying or move.item in self.holding:
            raise ProgramError(f"{move} starts without a valid copy to read, over a copy in flight, or onto one that is there")
        self.flying[move.item] = move

    def _land(self, p: int, kind: str) -> None:
        for item in [i for i, m in self.flying.items() if m.done == p and m.kind == kind]:
            del self.flying[item]
            (self.host if kind == "store" else self.good).add(item)

    def use(self, p: int) -> None:
        for i, item in enumerate(self.trace.items):
            if i not in self.good and any(begin < p < end for begin, end in item.held):
                raise ProgramError(f"item {i} is not on the device at position {p}, where something in flight needs it")
            if p not in item.uses:
                continue
            here, there = (self.host, self.good) if p in item.host_uses else (self.good, self.host)
            made = not item.home and p == item.uses[0]
            if made and here is self.good:
                self.device.add(i)
            elif not made and i not in here:
                tier = "host" if here is self.host else "device"
                raise ProgramError(f"position {p} uses item {i} on the {tier}, which has no valid copy")
            if made or p in item.writes:
                if i in self.flying or (here is self.good and i in self.holding):
                    raise ProgramError(f"position {p} changes item {i} while {self.flying.get(i) or self.holding[i]} reads it")
                here.add(i)
                there.discard(i)

    def drop(self, p: int) -> None:
        for item in sorted(self.device):
            self._release(item, p + 1)

    def _release(self, item: int, p: int) -> None:
        """Give the bytes back if no use before the next fetch needs them from position p on."""
        flying = self.flying.get(item)
        if item in self.residents or item in self.holding or item not in self.device or (flying and flying.kind == "fetch"):
            return
        fetch = min((m.start for m in self.moves if m.item == item and m.kind == "fetch" and m.start >= p), default=len(self.trace.seconds))
        if any(p <= u < fetch for u in device_uses(self.trace.items[item])):
            return
        later = [m for m in self.moves if m.item == item and m.kind == "store" and p <= m.start <= fetch]
        if later and item not in self.host:
            return
        self.device.discard(item)
        self.good.discard(item)

    def finish(self) -> None:
        for i, item in enumerate(self.trace.items):
            if item.home and i not in self.residents and i not in self.host:
                raise ProgramError(f"item {i} was changed on the device and never stored")
            if item.fixed and item.home and i not in self.residents:
                raise ProgramError(f"item {i} is fixed on the device and no resident")
        if self.flying:
            raise ProgramError(f"{sorted(self.flying)} are still being copied at the end")
