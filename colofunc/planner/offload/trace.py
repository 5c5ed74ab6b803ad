"""A program as a trace of uses: what may be copied between tiers, when it is needed where, and the program with the
copies.

Problem: residency is decided on items and positions, a program has values, views and memory that they share. Idea: the
storage is the item. Whatever reads or writes a value in it uses it; a view is no use, because it is taken again from
where the storage lies; what has no value that covers it, leaves the program, or is small stays where it is and counts
as ground.

    ground = ground_of(program, mesh, node_s)
    items, trace = trace_of(ground, on_host, states, limit_bytes)     # item k of the trace is storage items[k]
    write(ground, on_host, items, trace, reside(trace, limit_bytes, ground.links))
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import attrs
import numpy as np

from colofunc.mesh import Mesh
from colofunc.ops.updates import IN_PLACE
from colofunc.planner.offload.residency import Item, Links, Move, Residency, Trace
from colofunc.planner.offload.timeline import Lanes, play
from colofunc.program.facts import is_copy, is_pointwise, is_wire, kind_of, written
from colofunc.program.ir import Node, Program
from colofunc.program.lanes import played
from colofunc.program.memory import Lies, Storage, lies, sent_copies
from colofunc.program.passes.narrow_gradients import droppable_casts
from colofunc.program.passes.tiered import TIERS, Tiered, Tiers, is_view, readers

NodeS = Callable[[Node, Mapping[int, Any]], float]
SMALL, LITTLE = 1000, 50
"""A storage of less than a 1000th of the budget stays where it is, as long as all such together are less than a 50th of
it."""
WORK = 2.0
"""An operator that takes so many times longer than the memory that it touches is bound by its arithmetic."""
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
    lies: Lies
    held: tuple[int, ...]
    uses: Mapping[int, list[int]]
    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    links: Links
    given: Mapping[int, str] = attrs.field(factory=dict)
    host_reads: Mapping[int, frozenset[int]] = attrs.field(factory=dict)
    tiers: Tiers = TIERS
    stay: frozenset[int] = frozenset()


def ground_of(program: Program, mesh: Mesh, node_s: NodeS, given: Mapping[int, str] | None = None) -> Ground:
    """The ground of a whole program. given: position of an input -> tier."""
    found = lies(program)
    tiers = {found.home[program.inputs[k]]: tier for k, tier in (given or {}).items()}
    storages = *found.storages, *sent_copies(program, found.metas)
    return of_lies(program, found, _held(storages, max(1, len(program.nodes))), mesh, node_s, tiers)


def _held(storages: Iterable[Storage], count: int) -> list[int]:
    """Bytes of device memory at each node, as the accountant counts them."""
    change = np.zeros(count + 1, dtype=np.int64)
    for s in storages:
        if s.tier == "device":
            change[max(0, s.born)] += s.nbytes
            change[min(s.dies, count - 1) + 1] -= s.nbytes
    held: list[int] = np.cumsum(change[:-1]).tolist()
    return held


def of_lies(
    program: Program, found: Lies, held: Sequence[int], mesh: Mesh, node_s: NodeS, given: Mapping[int, str]
) -> Ground:
    alone_s = tuple(node_s(node, program.values) for node in program.nodes)
    host_s = [_host_s(node, program, mesh, seconds) for node, seconds in zip(program.nodes, alone_s, strict=True)]
    for update, cast in droppable_casts(program).items():
        wide, narrow = program.nodes[cast].results[0], program.nodes[cast].refs[0]
        widened = program.values[wide].nbytes - program.values[narrow].nbytes
        host_s[cast], host_s[update] = 0.0, mesh.host_s(_touched(program.nodes[update], program) - widened)
    device_s = _held_up_s(program, mesh, node_s) if any(map(_is_started, program.nodes)) else alone_s
    return Ground(program, found, tuple(held), readers(program, found), device_s, tuple(host_s), links_of(mesh), given)


def _held_up_s(program: Program, mesh: Mesh, node_s: NodeS) -> tuple[float, ...]:
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


BAG = "colofunc.embedding_bag"
GATHERS = frozenset({"aten.embedding.default", "aten.index_select.default", "aten.index.Tensor", BAG})
"""Operators that read few rows of their first operand."""


def _touched(node: Node, program: Program) -> int:
    """Bytes that a node reads and writes."""
    values, outs = program.values, node.results
    if node.target not in GATHERS:
        return sum(values[i].nbytes for i in (*node.refs, *written(node), *outs))
    moved = sum(values[i].nbytes for i in (*node.refs[1:], *outs))
    if node.target == BAG:  # reads a row for each index, and writes one for each bag
        table, index = values[node.refs[0]], values[node.refs[1]]
        return moved + prod(index.shape) * table.shape[1] * table.dtype.itemsize
    return moved + sum(values[i].nbytes for i in outs)


def _host_s(node: Node, program: Program, mesh: Mesh, device_s: float) -> float:
    """Seconds of a node on the host, where the time of its arithmetic is to that of its memory as it is on the
    device."""
    touched, device = _touched(node, program), mesh.topology.device
    # Bound by memory, however slow it was measured on the device.
    if node.target in IN_PLACE or is_pointwise(node.target):
        return mesh.host_s(touched)
    moved_s = touched / device.memory_bytes_per_s
    work_s = device_s - device.launch_s
    # Of gathers the device's seconds count the whole table, and copies between tiers have none of their own.
    bound_by_work = work_s > WORK * moved_s > 0 and node.target not in GATHERS and kind_of(node) is None
    return mesh.host_s(touched) * (work_s / moved_s if bound_by_work else 1.0)


def trace_of(
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
    changed: dict[int, set[int]] = {}
    for k, node in enumerate(program.nodes):
        for i in written(node):
            changed.setdefault(ground.lies.home[i], set()).add(k)
    busy = _in_flight(ground, changed)
    base = np.asarray(ground.held[:count], dtype=np.int64).copy()
    floor, shared = _floor(ground, limit), _shared(ground.lies)
    outputs = {ground.lies.home[o] for o in program.outputs}
    items, chosen = [], []
    for s in dict.fromkeys(ground.lies.home.values()):
        storage, value = storages[s], program.values[storages[s].value]
        uses, home, tier = ground.uses.get(s, []), s in states, states.get(s)
        there = {k for k in uses if k in on_host or s in ground.host_reads.get(k, ())}
        if s in leave:
            there.add(count)
        if storage.tier != near or value.id in program.constants or (s in ground.stay and not there):
            continue
        if s in shared or storage.nbytes not in (value.nbytes, 0):
            continue
        if not home and (storage.born < 0 or ((s in outputs or not activations) and not there)):
            continue  # what the caller holds stays; a copy of it that the host needs is one more
        if value.nbytes < floor and tier != far and not there:
            continue
        if home and tier == near and not there:
            continue
        if not home and value.nbytes < min(floor, FEW) and there:
            # A scalar that the host reads: counted as if it stayed.
            base[min(storage.dies, count - 1) + 1 :] += storage.nbytes
            continue
        begin, end = (0, count) if home else (storage.born, min(storage.dies, count - 1) + 1)
        base[begin:end] -= storage.nbytes
        held = _merged(busy.get(s, ()))
        uses = sorted({*uses, *(end for span in held for end in span), *there})
        writes = frozenset(changed.get(s, set()) | ({storage.born} if not home else set()))
        items.append(
            Item(value.nbytes, home, tuple(uses), writes & set(uses), frozenset(there), stays=tier != far, held=held)
        )
        chosen.append(s)
    seconds = tuple(ground.host_s[k] if k in on_host else ground.device_s[k] for k in range(count))
    if leave:
        seconds, on_host, base = (*seconds, 0.0), on_host | {count}, np.append(base, 0)
    return chosen, Trace(seconds, on_host, tuple(int(b) for b in base), tuple(items))


def _floor(ground: Ground, limit: int) -> int:
    """Bytes below which a storage is not worth a copy."""
    sizes = sorted(s.nbytes for s in ground.lies.storages if s.tier == ground.tiers[0] and s.inside is None)
    total = 0
    for nbytes in sizes:
        total += nbytes
        if total > limit // LITTLE or nbytes >= limit // SMALL:
            return min(nbytes, limit // SMALL)
    return limit // SMALL


def _shared(found: Lies) -> set[int]:
    """Storages in which two results of one operator lie side by side: no value has all of it."""
    return {s for i, s in found.home.items() if i not in found.within and found.storages[s].value != i}


def _in_flight(ground: Ground, changed: dict[int, set[int]]) -> dict[int, list[tuple[int, int]]]:
    """Storage -> from where to where a started collective or copy reads or fills it; its result is `changed` where it
    is waited for.

    Only the two ends are uses: a collective may run beside thousands of operators, and so many collectives may there
    be.
    """
    program, started = ground.program, dict[int, int]()
    busy: dict[int, list[tuple[int, int]]] = {}
    for k, node in enumerate(program.nodes):
        if (is_wire(node) or is_copy(node)) and node.target.endswith("_start"):
            started.update(dict.fromkeys(node.results, k))
        elif kind_of(node) == ("wait", False) and node.refs[0] in started:
            begin = started[node.refs[0]]
            changed.setdefault(ground.lies.home[node.refs[0]], set()).add(k)
            for i in (node.refs[0], *program.nodes[begin].refs):
                busy.setdefault(ground.lies.home[i], []).append((begin, k))
    return busy


def _merged(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans from position to position, in order; those that overlap are one."""
    merged = list[tuple[int, int]]()
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return tuple(merged)


def write(
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
    home = {s for k, s in enumerate(items) if trace.items[k].home and k not in found.residents}
    home |= {s for s, tier in ground.given.items() if tier != ground.tiers[0]}
    tiered = Tiered(ground.program, ground.lies, home, on_host, ground.tiers, gathered=stay)
    out = _Writer(ground, on_host, items, tiered, _ended(trace, found, ground.links) if late else {})
    starts: dict[int, list[Move]] = {}
    waits: dict[int, list[Move]] = {}
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


def _awaited(move: Move) -> int:
    """Where the device waits for it: the host may want what is stored before."""
    return move.done if move.kind == "fetch" else move.free


def _ended(trace: Trace, found: Residency, links: Links) -> dict[int, int]:
    """Position on the host -> the first one that the device comes to when it has ended."""
    if not trace.host:
        return {}
    played = play(Lanes(trace), found.moves, links)
    return {k: bisect_left(played.control, played.end[k] * (1 - 1e-9)) for k in trace.host}


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
        self.copy(s for s in self.soon if ground.lies.storages[s].born < 0)
        # Nodes of the host that have not been written down, what they read and write.
        self.late: list[tuple[int, set[int], set[int]]] = []

    def start(self, move: Move) -> None:
        storage = self.items[move.item]
        self.drain({storage}, {storage})
        if _awaited(move) > move.start:
            self.tiered.start(storage, move.kind)
            if move.kind == "store":
                self.flying.add(storage)
        else:
            (self.tiered.fetch if move.kind == "fetch" else self.tiered.store)(storage)

    def wait(self, move: Move) -> None:
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
        for i, (_, mine, made) in enumerate(self.late):
            if touched is None or made & set(touched) or mine & set(changed):
                end = i + 1
        late, self.late = self.late[:end], self.late[end:]
        for k, mine, _ in late:
            self._stored(mine)
            self.tiered.run(k)

    def _small(self) -> set[int]:
        """Storages of the device that are whole once they are made, small, and read on the host, without being
        items."""
        program, found = self.ground.program, self.ground.lies
        read = set[int]()
        for node in (program.nodes[k] for k in self.on_host):
            if not is_view(node, found):
                read |= {found.home[i] for i in node.refs}
        later = {found.home[i] for node in program.nodes for i in written(node)} | _shared(found)
        made = {s: found.storages[s].born for s in read if found.storages[s].born >= 0}
        later |= {s for s, k in made.items() if k in self.on_host or program.nodes[k].target.endswith("_start")}
        later |= {s for s, k in made.items() if s in self.ground.host_reads.get(k, ())}  # by a loop, on the host
        later |= {*self.items, *self.tiered.home}
        small = {s for s in read - later if found.storages[s].nbytes < FEW}
        return {s for s in small if found.storages[s].tier == self.tiered.near}

    def _touches(self, k: int) -> tuple[set[int], set[int]]:
        """Storages that a node reads or writes, and those that it writes or makes."""
        node, home = self.ground.program.nodes[k], self.ground.lies.home
        if is_view(node, self.ground.lies):
            return set(), set()
        changed = {home[i] for i in (*written(node), *node.results)}
        return changed | {home[i] for i in node.refs}, changed

    def _planned(self, k: int) -> bool:
        """Whether all that a node of the host reads is there or on its way: what nobody plans would be held until it is
        copied."""
        far, home = self.tiered.have[self.ground.tiers[1]], self.ground.lies.home
        made = set().union(*(changed for _, _, changed in self.late))
        program, near = self.ground.program, self.ground.tiers[0]
        refs = {home[i] for i in program.nodes[k].refs if program.values[i].tier == near}
        return all(s in far or s in self.flying or s in made for s in refs)
