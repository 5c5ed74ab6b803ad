"""A program as a trace of uses: what may be copied between tiers, when it is needed where, and the program with the
copies.

Problem: residency is decided on items and positions, a program has values, views and memory that they share. Idea: the
storage is the item. Whatever reads or writes a value in it uses it; a view is no use, because it is taken again from
where the storage lies; what has no value that covers it, leaves the program, or is small stays where it is and counts
as ground.

    ground = ground_of(program, mesh, node_s)
    items, trace = trace_of_ground(ground, on_host, states, limit_bytes)     # item k of the trace is storage items[k]
    write_copies(ground, on_host, items, trace, reside(trace, limit_bytes, ground.links))
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import attrs
import numpy as np

from colofunc.mesh import Mesh
from colofunc.planner.offload.residency import Links, OffloadItem, Residency, ScheduledCopy, Trace
from colofunc.planner.offload.timeline import TraceLanes, play
from colofunc.program.cost import NodeSeconds
from colofunc.program.facts import is_copy, is_wire, kind_of, written
from colofunc.program.host_seconds import host_seconds, touched_bytes
from colofunc.program.ir import Node, Program, kept_with
from colofunc.program.lanes import played
from colofunc.program.memory import Storage, StorageMap, lies, sent_copies
from colofunc.program.passes.narrow_gradients import droppable_casts
from colofunc.program.passes.tiered import TIERS, Tiered, Tiers, looks_only, readers

SMALL, LITTLE = 1000, 50
"""A storage of less than a 1000th of the budget stays where it is, as long as all such together are less than a 50th of
it."""
FEW = 1 << 12
"""Of what one tier makes and the other reads, so many bytes are copied right before they are read, which nobody
plans."""


@attrs.frozen(eq=False)
class Ground:
    """What does not change from candidate to candidate. `held`: bytes of the near tier at each node, everything in
    place.

    given: storage of an input -> the tier that it is given in. host_reads: position of a loop -> the storages that its
    body takes or makes on the host. stay: storages that nobody may move.
    """

    program: Program
    lies: StorageMap
    held: tuple[int, ...]
    uses: Mapping[int, list[int]]
    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    links: Links
    given: Mapping[int, str] = attrs.field(factory=dict)
    host_reads: Mapping[int, frozenset[int]] = attrs.field(factory=dict)
    tiers: Tiers = TIERS
    stay: frozenset[int] = frozenset()


def ground_of(program: Program, mesh: Mesh, node_s: NodeSeconds, given: Mapping[int, str] | None = None) -> Ground:
    """The ground of a whole program. given: position of an input -> tier."""
    found = lies(program)
    tiers = {found.home[program.inputs[position]]: tier for position, tier in (given or {}).items()}
    storages = *found.storages, *sent_copies(program, found.metas)
    return of_lies(program, found, _held(storages, max(1, len(program.nodes))), mesh, node_s, tiers)


def _held(storages: Iterable[Storage], count: int) -> list[int]:
    """Bytes of device memory at each node, as the accountant counts them."""
    change = np.zeros(count + 1, dtype=np.int64)
    for storage in storages:
        if storage.tier == "device":
            change[max(0, storage.born)] += storage.nbytes
            change[min(storage.dies, count - 1) + 1] -= storage.nbytes
    held: list[int] = np.cumsum(change[:-1]).tolist()
    return held


def of_lies(
    program: Program, found: StorageMap, held: Sequence[int], mesh: Mesh, node_s: NodeSeconds, given: Mapping[int, str]
) -> Ground:
    alone_s = tuple(node_s(node, program.values) for node in program.nodes)
    host_s = [
        host_seconds(node, program.values, mesh, seconds) for node, seconds in zip(program.nodes, alone_s, strict=True)
    ]
    for update, cast in droppable_casts(program).items():
        wide, narrow = program.nodes[cast].results[0], program.nodes[cast].refs[0]
        widened = program.values[wide].nbytes - program.values[narrow].nbytes
        host_s[cast], host_s[update] = 0.0, mesh.host_s(touched_bytes(program.nodes[update], program.values) - widened)
    device_s = _held_up_s(program, mesh, node_s) if any(map(_is_started, program.nodes)) else alone_s
    return Ground(program, found, tuple(held), readers(program, found), device_s, tuple(host_s), links_of(mesh), given)


def _held_up_s(program: Program, mesh: Mesh, node_s: NodeSeconds) -> tuple[float, ...]:
    """Seconds that the device spends at each node, where collectives run beside it: they hide no copies, the work
    beside them does."""
    lanes = played(program, mesh, node_s)
    return tuple(later - now for now, later in pairwise((*lanes.starts_s, lanes.end_s)))


def _is_started(node: Node) -> bool:
    return is_wire(node) and node.target.endswith("_start")


def links_of(mesh: Mesh, tiers: Tiers = TIERS) -> Links:
    """Bandwidths and latency between two tiers, as every rank has them at once. A disk has one queue for both
    directions."""
    near, far = tiers
    up, down = mesh.copy_s(1 << 30, far, near), mesh.copy_s(1 << 30, near, far)
    latency = min(mesh.copy_s(1, far, near), up)
    return Links((1 << 30) / max(up - latency, 1e-12), (1 << 30) / max(down - latency, 1e-12), latency, far == "disk")


def trace_of_ground(
    ground: Ground,
    on_host: frozenset[int],
    states: Mapping[int, str | None],
    limit: int,
    activations: bool = True,
    leave: frozenset[int] = frozenset(),
) -> tuple[list[int], Trace]:
    """(storages that may move, the trace with an item for each). states: of inputs that last -> their tier, where it is
    said.

    leave: storages of results that are wanted on the host; the trace has one more position then, behind all, which
    reads them there.
    """
    program, storages, (near, far) = ground.program, ground.lies.storages, ground.tiers
    count = len(program.nodes)
    changed, busy = kept_with(program, (_use_of_storages, ground.lies), partial(_use_of_storages, ground))
    base = np.asarray(ground.held[:count], dtype=np.int64).copy()
    floor = floor_bytes(ground, limit)
    shared = kept_with(program, (_shared, ground.lies), partial(_shared, ground.lies))
    outputs = {ground.lies.home[out] for out in program.outputs}
    items: list[OffloadItem] = []
    chosen: list[int] = []
    for number in dict.fromkeys(ground.lies.home.values()):
        storage, value = storages[number], program.values[storages[number].value]
        uses, home, tier = ground.uses.get(number, []), number in states, states.get(number)
        host_uses = {k for k in uses if k in on_host or number in ground.host_reads.get(k, ())}
        if number in leave:
            host_uses.add(count)
        # What lies elsewhere, is a constant, may not move, or is covered by no value, is no item.
        if storage.tier != near or value.id in program.constants:
            continue
        if number in ground.stay and not host_uses:
            continue
        if number in shared or storage.nbytes not in (value.nbytes, 0):
            continue
        if not home:
            # What the caller holds stays; a copy of it that the host needs is one more.
            if storage.born < 0:
                continue
            if (number in outputs or not activations) and not host_uses:
                continue
        if not host_uses and ((value.nbytes < floor and tier != far) or (home and tier == near)):
            continue
        if not home and value.nbytes < min(floor, FEW) and host_uses:
            # A scalar that the host reads: counted as if it stayed.
            base[min(storage.dies, count - 1) + 1 :] += storage.nbytes
            continue

        begin, end = (0, count) if home else (storage.born, min(storage.dies, count - 1) + 1)
        spans, used = list(busy.get(number, ())), {*uses, *host_uses}
        if number in outputs and number not in leave and not home and begin not in on_host:
            end = _stays_as_result(begin, end, on_host, changed.get(number, ()), spans, used)
        base[begin:end] -= storage.nbytes
        held = _merged(spans)
        for span in held:
            used.update(span)
        writes = set(changed.get(number, ()))
        if not home:
            writes.add(storage.born)
        item = OffloadItem(
            value.nbytes,
            home,
            tuple(sorted(used)),
            frozenset(writes & used),
            frozenset(host_uses),
            stays=tier != far,
            held=held,
        )
        items.append(item)
        chosen.append(number)
    seconds = tuple(ground.host_s[k] if k in on_host else ground.device_s[k] for k in range(count))
    if leave:
        seconds, on_host, base = (*seconds, 0.0), on_host | {count}, np.append(base, 0)
    return chosen, Trace(seconds, on_host, tuple(base.tolist()), tuple(items))


def _stays_as_result(
    begin: int,
    end: int,
    on_host: frozenset[int],
    changed: Collection[int],
    spans: list[tuple[int, int]],
    used: set[int],
) -> int:
    """Where a result that the device makes at `begin` and the host reads ends to be an item: it is on the device in the
    end, held from the begin (`spans`), or, where the host changes it, fetched for its last use (`used`).
    """
    last = max(k for k in range(begin, end) if k not in on_host)
    changed_there = max(on_host.intersection(changed), default=-1)
    if changed_there >= 0:
        if changed_there < last:
            used.add(last)
    elif begin < last:
        spans.append((begin, last))
    return last + 1


def floor_bytes(ground: Ground, limit: int) -> int:
    """Bytes below which a storage is not worth a copy."""
    sizes = sorted(
        storage.nbytes for storage in ground.lies.storages if storage.tier == ground.tiers[0] and storage.inside is None
    )
    total = 0
    for nbytes in sizes:
        total += nbytes
        if total > limit // LITTLE or nbytes >= limit // SMALL:
            return min(nbytes, limit // SMALL)
    return limit // SMALL


def _shared(found: StorageMap) -> set[int]:
    """Storages in which two results of one operator lie side by side: no value has all of it."""
    shared: set[int] = set()
    for id, storage in found.home.items():
        if id not in found.base_of and found.storages[storage].value != id:
            shared.add(storage)
    return shared


def _use_of_storages(ground: Ground) -> tuple[Mapping[int, Collection[int]], Mapping[int, Sequence[tuple[int, int]]]]:
    """(storage -> the nodes that write to it, storage -> from where to where a started collective or copy reads or
    fills it).

    What is started has its result where it is waited for. Only the two ends are uses: a collective may run beside
    thousands of operators, and so many collectives may there be.
    """
    program, home = ground.program, ground.lies.home
    changed: dict[int, set[int]] = {}
    started: dict[int, int] = {}  # result -> the node that started it
    busy: dict[int, list[tuple[int, int]]] = {}
    for k, node in enumerate(program.nodes):
        for id in written(node):
            changed.setdefault(home[id], set()).add(k)
        if (is_wire(node) or is_copy(node)) and node.target.endswith("_start"):
            started.update(dict.fromkeys(node.results, k))
        elif kind_of(node) == ("wait", False) and node.refs[0] in started:
            result = node.refs[0]
            begin = started[result]
            changed.setdefault(home[result], set()).add(k)
            for id in (result, *program.nodes[begin].refs):
                busy.setdefault(home[id], []).append((begin, k))
    return changed, busy


def _merged(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans from position to position, in order; those that overlap are one."""
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return tuple(merged)


def write_copies(
    ground: Ground,
    on_host: frozenset[int],
    items: Sequence[int],
    trace: Trace,
    found: Residency,
    stay: bool = False,
    leave: frozenset[int] = frozenset(),
    late: bool = True,
) -> Program:
    """The program with the copies in it. stay: what the host made stays there where it is a result; so do results that
    `leave`.

    late: what the host does comes where it has ended, and copies are begun before others are waited for, so that nobody
    waits, and the host holds more meanwhile.
    """
    # Storages that lie on the far tier when the step begins.
    home = {storage for storage, tier in ground.given.items() if tier != ground.tiers[0]}
    for number, storage in enumerate(items):
        if trace.items[number].home and number not in found.residents:
            home.add(storage)
    tiered = Tiered(ground.program, ground.lies, home, on_host, ground.tiers, gathered=stay)
    ended = _ended(trace, found, ground.links) if late else {}
    out = _Writer(ground, on_host, items, tiered, ended)
    starts: dict[int, list[ScheduledCopy]] = {}
    waits: dict[int, list[ScheduledCopy]] = {}
    for move in found.moves:
        starts.setdefault(move.start, []).append(move)
        if _awaited(move) > move.start:
            waits.setdefault(_awaited(move), []).append(move)
    count = len(ground.program.nodes)
    for k in range(len(trace.seconds) + 1):
        # What is fetched lies where something was, and waits for nothing that was not begun; but then both lie on the
        # host as well.
        store_starts, store_waits = (starts, out.start, "store"), (waits, out.wait, "store")
        fetch_starts, fetch_waits = (starts, out.start, "fetch"), (waits, out.wait, "fetch")
        due = (store_waits, fetch_waits, store_starts, fetch_starts)
        if late:
            due = (store_starts, store_waits, fetch_starts, fetch_waits)
        for moves, step, kind in due:
            for move in moves.get(k, ()):
                if move.kind == kind:
                    step(move)
        out.flush(k)
        if k < count:
            out.run(k)
    out.drain()
    return out.tiered.finish(stay, leave)


def _awaited(move: ScheduledCopy) -> int:
    """Where the device waits for it: the host may want what is stored before."""
    return move.done if move.kind == "fetch" else move.free


def _ended(trace: Trace, found: Residency, links: Links) -> dict[int, int]:
    """Position on the host -> the first one that the device comes to when it has ended."""
    if not trace.host:
        return {}
    played = play(TraceLanes(trace), found.moves, links)
    positions: dict[int, int] = {}
    for k in trace.host:
        # a little before, so that rounding does not make it one position later
        positions[k] = bisect_left(played.control, played.end[k] * (1 - 1e-9))
    return positions


class _Writer:
    """Nodes in their order, but those of the host, which come where the device is when they have ended.

    The thread that hands work to the device does the host's, and what comes behind it waits for both: for a copy that
    is behind all others of its engine, and for the host.
    """

    def __init__(
        self, ground: Ground, on_host: frozenset[int], items: Sequence[int], tiered: Tiered, ended: Mapping[int, int]
    ) -> None:
        self.ground, self.on_host, self.items, self.tiered, self.ended = ground, on_host, items, tiered, ended
        self.flying = set[int]()  # storages that are being stored
        self.soon = self._small()  # storages that nobody plans: stored when they are made
        self.copy(storage for storage in self.soon if ground.lies.storages[storage].born < 0)
        # Nodes of the host that have not been written down, what they read and write.
        self.late: list[tuple[int, set[int], set[int]]] = []

    def start(self, move: ScheduledCopy) -> None:
        storage = self.items[move.item]
        # What is fetched leaves the copy on the host as it is, for those who only read it there.
        self.drain({storage}, {storage} if move.kind == "store" else ())
        if _awaited(move) > move.start:
            self.tiered.start(storage, move.kind)
            if move.kind == "store":
                self.flying.add(storage)
        elif move.kind == "fetch":
            self.tiered.fetch(storage)
        else:
            self.tiered.store(storage)

    def wait(self, move: ScheduledCopy) -> None:
        if move.kind == "fetch":
            self.tiered.wait(self.items[move.item], "fetch")
        else:
            self._stored({self.items[move.item]})

    def _stored(self, storages: Collection[int]) -> None:
        """Behind their copies."""
        for storage in sorted(self.flying.intersection(storages)):
            self.flying.remove(storage)
            self.tiered.wait(storage, "store")

    def flush(self, position: int) -> None:
        """Write down what of the host has ended when the device comes to a position."""
        while self.late:
            k, touched, _ = self.late[0]
            if (touched & self.flying) - self.soon or self.ended.get(k, 0) > position:
                break
            self.late.pop(0)
            self._stored(touched)
            self.tiered.run(k)

    def run(self, k: int) -> None:
        touched, changed = self._touches(k)
        if k in self.on_host and self._planned(k):
            self.late.append((k, touched, changed))
            self.flush(k)
            return
        self.drain(touched, changed)
        self._stored(touched if k in self.on_host else ())
        self.tiered.run(k)
        self.copy(changed)

    def copy(self, made: Iterable[int]) -> None:
        """Begin to store what is small and read on the host."""
        for storage in sorted(self.soon.intersection(made)):
            self.tiered.start(storage, "store")
            self.flying.add(storage)

    def drain(self, touched: Collection[int] | None = None, changed: Collection[int] = ()) -> None:
        """Write down what is late, behind the copies that it reads: all, or as much as has to come before who touches
        these."""
        end = 0
        for number, (_, late_touched, late_changed) in enumerate(self.late, 1):
            if touched is None or late_changed & set(touched) or late_touched & set(changed):
                end = number
        # Nodes of the host keep their order: all up to the last that has to come.
        late, self.late = self.late[:end], self.late[end:]
        for k, late_touched, _ in late:
            self._stored(late_touched)
            self.tiered.run(k)

    def _small(self) -> set[int]:
        """Storages of the device that are whole once they are made, small, and read on the host, without being
        items."""
        program, found = self.ground.program, self.ground.lies
        read: set[int] = set()
        for k in self.on_host:
            node = program.nodes[k]
            if not looks_only(node, found):
                read.update(found.home[ref] for ref in node.refs)
        # Storages that are written later, in part, or by what plans its copies itself.
        not_whole = _shared(found)
        for node in program.nodes:
            not_whole.update(found.home[id] for id in written(node))
        planned = {*self.items, *self.tiered.home}
        small: set[int] = set()
        for number in read - not_whole - planned:
            storage = found.storages[number]
            if storage.nbytes < FEW and storage.tier == self.tiered.near and not self._made_late(number):
                small.add(number)
        return small

    def _made_late(self, storage: int) -> bool:
        """Whether a storage is there only behind the node that makes it: on the host, or by what is waited for."""
        maker = self.ground.lies.storages[storage].born
        if maker < 0:
            return False
        if maker in self.on_host or self.ground.program.nodes[maker].target.endswith("_start"):
            return True
        return storage in self.ground.host_reads.get(maker, ())  # a loop makes it there

    def _touches(self, k: int) -> tuple[set[int], set[int]]:
        """Storages that a node reads or writes, and those that it writes or makes."""
        node, home = self.ground.program.nodes[k], self.ground.lies.home
        if looks_only(node, self.ground.lies):
            return set(), set()
        changed = {home[id] for id in (*written(node), *node.results)}
        return changed | {home[id] for id in node.refs}, changed

    def _planned(self, k: int) -> bool:
        """Whether all that a node of the host reads is there or on its way: what nobody plans would be held until it is
        copied."""
        near, far = self.ground.tiers
        program, home = self.ground.program, self.ground.lies.home
        far_copies = self.tiered.have[far]
        made: set[int] = set()
        for _, _, changed in self.late:
            made |= changed
        for ref in program.nodes[k].refs:
            storage = home[ref]
            if program.values[ref].tier == near and not (
                storage in far_copies or storage in self.flying or storage in made
            ):
                return False
        return True
