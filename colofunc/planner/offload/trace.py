"""A program as a trace of uses: what may be copied between tiers, when it is needed where, and the program with the copies.

Problem: residency is decided on items and positions, a program has values, views and memory that they share. Idea: the
storage is the item. Whatever reads or writes a value in it uses it; a view is no use, because it is taken again from where
the storage lies; what has no value that covers it, leaves the program, or is small stays where it is and counts as ground.

    ground = ground_of(program, mesh, node_s)
    items, trace = trace_of(ground, on_host, states, limit_bytes)     # item k of the trace is storage items[k]
    write(ground, on_host, items, trace, reside(trace, limit_bytes, ground.links))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from colofunc.mesh import Mesh
from colofunc.planner.offload.residency import Item, Links, Move, Residency, Trace
from colofunc.program.facts import is_copy, is_wire, kind_of, written
from colofunc.program.ir import Node, Program
from colofunc.program.memory import Lies, lies
from colofunc.program.passes.tiered import TIERS, Tiered, Tiers, is_view, readers

NodeS = Callable[[Node, Mapping[int, Any]], float]
SMALL, LITTLE = 1000, 50
"""A storage of less than a 1000th of the budget stays where it is, as long as all such together are less than a 50th of it."""
FEW = 1 << 12
"""Of what one tier makes and the other reads, so many bytes are copied right before they are read, which nobody plans."""


@attrs.frozen(eq=False)
class Ground:
    """What does not change from candidate to candidate. `held`: bytes of the near tier at each node, everything in place.

    given: storage of an input -> the tier that it is given in. host_reads: position of a loop -> the storages that its body
    takes or makes on the host.
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


def ground_of(program: Program, mesh: Mesh, node_s: NodeS, given: Mapping[int, str] | None = None) -> Ground:
    """The ground of a whole program. given: position of an input -> tier."""
    found = lies(program)
    tiers = {found.home[program.inputs[k]]: tier for k, tier in (given or {}).items()}
    return of_lies(program, found, _held(found, max(1, len(program.nodes))), mesh, node_s, tiers)


def _held(found: Lies, count: int) -> list[int]:
    """Bytes of device memory at each node, as the accountant counts them."""
    change = np.zeros(count + 1, dtype=np.int64)
    for s in found.storages:
        if s.tier == "device":
            change[max(0, s.born)] += s.nbytes
            change[min(s.dies, count - 1) + 1] -= s.nbytes
    held: list[int] = np.cumsum(change[:-1]).tolist()
    return held


def of_lies(program: Program, found: Lies, held: Sequence[int], mesh: Mesh, node_s: NodeS, given: Mapping[int, str]) -> Ground:
    device_s = tuple(node_s(node, program.values) for node in program.nodes)
    host_s = tuple(mesh.host_s(_touched(node, program)) for node in program.nodes)
    return Ground(program, found, tuple(held), readers(program, found), device_s, host_s, links_of(mesh), given)


def links_of(mesh: Mesh, tiers: Tiers = TIERS) -> Links:
    """Bandwidths and latency between two tiers, as every rank has them at once. A disk has one queue for both directions."""
    near, far = tiers
    up, down = mesh.copy_s(1 << 30, far, near), mesh.copy_s(1 << 30, near, far)
    latency = min(mesh.copy_s(1, far, near), up)
    return Links((1 << 30) / max(up - latency, 1e-12), (1 << 30) / max(down - latency, 1e-12), latency, far == "disk")


GATHERS = frozenset({"aten.embedding.default", "aten.index_select.default", "aten.index.Tensor"})
"""Operators that read few rows of their first operand."""


def _touched(node: Node, program: Program) -> int:
    """Bytes that a node reads and writes."""
    outs = tuple(o for o in node.outs if o is not None)
    ids = (*node.refs[1:], *outs, *outs) if node.target in GATHERS else (*node.refs, *written(node), *outs)
    return sum(program.values[i].nbytes for i in ids)


def trace_of(
    ground: Ground,
    on_host: frozenset[int],
    states: Mapping[int, str | None],
    limit: int,
    activations: bool = True,
    leave: frozenset[int] = frozenset(),
) -> tuple[list[int], Trace]:
    """(storages that may move, the trace with an item for each). states: of inputs that last -> their tier, where it is said.

    leave: storages of results that are wanted on the host; the trace has one more position then, behind all, which reads them there.
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
        there = {k for k in uses if k in on_host or s in ground.host_reads.get(k, ())} | ({count} if s in leave else set())
        if storage.tier != near or value.id in program.constants or s in shared or storage.nbytes not in (value.nbytes, 0):
            continue
        if not home and (storage.born < 0 or ((s in outputs or not activations) and not there)):
            continue  # what the caller holds stays; a copy of it that the host needs is one more
        if value.nbytes < floor and tier != far and not there:
            continue
        if home and tier == near and not there:
            continue
        if not home and value.nbytes < min(floor, FEW) and there:
            continue  # a scalar that the host reads: counted as if it stayed
        begin, end = (0, count) if home else (storage.born, min(storage.dies, count - 1) + 1)
        base[begin:end] -= storage.nbytes
        uses = sorted({*uses, *busy.get(s, ()), *there})
        writes = frozenset(changed.get(s, set()) | ({storage.born} if not home else set()))
        items.append(Item(value.nbytes, home, tuple(uses), writes & set(uses), frozenset(there), stays=tier != far))
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


def _in_flight(ground: Ground, changed: dict[int, set[int]]) -> dict[int, set[int]]:
    """Storage -> positions at which a started collective or copy reads or fills it; its result is `changed` where it is waited for."""
    program, busy, started = ground.program, dict[int, set[int]](), dict[int, int]()
    for k, node in enumerate(program.nodes):
        if (is_wire(node) or is_copy(node)) and node.target.endswith("_start"):
            started.update({o: k for o in node.outs if o is not None})
        elif kind_of(node) == ("wait", False) and node.refs[0] in started:
            begin = started[node.refs[0]]
            changed.setdefault(ground.lies.home[node.refs[0]], set()).add(k)
            for i in (node.refs[0], *program.nodes[begin].refs):
                busy.setdefault(ground.lies.home[i], set()).update(range(begin, k + 1))
    return busy


def write(
    ground: Ground,
    on_host: frozenset[int],
    items: Sequence[int],
    trace: Trace,
    found: Residency,
    stay: bool = False,
    leave: frozenset[int] = frozenset(),
) -> Program:
    """The program with the copies in it. stay: what the host made stays there where it is a result; so do results that `leave`."""
    home = {s for k, s in enumerate(items) if trace.items[k].home and k not in found.residents}
    home |= {s for s, tier in ground.given.items() if tier != ground.tiers[0]}
    out = _Writer(ground, on_host, items, Tiered(ground.program, ground.lies, home, on_host, ground.tiers, gathered=stay))
    starts: dict[int, list[Move]] = {}
    waits: dict[int, list[Move]] = {}
    for move in found.moves:
        starts.setdefault(move.start, []).append(move)
        if _awaited(move) > move.start:
            waits.setdefault(_awaited(move), []).append(move)
    count = len(ground.program.nodes)
    for k in range(len(trace.seconds) + 1):
        for kind in ("store", "fetch"):
            for move in waits.get(k, ()):
                if move.kind == kind:
                    out.wait(move)
        for move in sorted(starts.get(k, ()), key=lambda m: m.kind == "fetch"):
            out.start(move)
        if k < count:
            out.run(k)
    out.drain()
    return out.tiered.finish(stay, leave)


def _awaited(move: Move) -> int:
    """Where the device waits for it: the host may want what is stored before."""
    return move.done if move.kind == "fetch" else move.free


class _Writer:
    """Nodes in their order, but those of the host that read what is still being stored, which come when the device has waited.

    In the order of the program the device would wait as long as the host does, for a copy behind all others of its engine.
    """

    def __init__(self, ground: Ground, on_host: frozenset[int], items: Sequence[int], tiered: Tiered) -> None:
        self.ground, self.on_host, self.items, self.tiered = ground, on_host, items, tiered
        self.flying: dict[int, Move] = {}  # storage -> its store
        self.late: list[tuple[int, set[int], set[int]]] = []  # nodes of the host that have not been written down, what they read and write

    def start(self, move: Move) -> None:
        storage = self.items[move.item]
        if any(storage in touched for _, touched, _ in self.late):
            self.drain()
        if _awaited(move) > move.start:
            self.tiered.start(storage, move.kind)
            if move.kind == "store":
                self.flying[storage] = move
        else:
            (self.tiered.fetch if move.kind == "fetch" else self.tiered.store)(storage)

    def wait(self, move: Move) -> None:
        storage = self.items[move.item]
        if move.kind == "fetch":
            self.tiered.wait(storage, "fetch")
        elif self.flying.pop(storage, None) is not None:
            self.tiered.wait(storage, "store")
            while self.late and not self.late[0][1] & self.flying.keys():
                self.tiered.run(self.late.pop(0)[0])

    def run(self, k: int) -> None:
        touched, changed = self._touches(k)
        behind = any(touched & theirs or changed & others for _, others, theirs in self.late)
        if k in self.on_host and (behind or touched & self.flying.keys()) and self._planned(k):
            self.late.append((k, touched, changed))
            return
        if behind:
            self.drain()
        for storage in touched & self.flying.keys() if k in self.on_host else ():
            self.wait(self.flying[storage])
        self.tiered.run(k)

    def drain(self) -> None:
        """Write down all that is late, behind the copies that it reads."""
        late, self.late = self.late, []
        for k, touched, _ in late:
            for storage in sorted(touched & self.flying.keys()):
                self.wait(self.flying[storage])
            self.tiered.run(k)

    def _touches(self, k: int) -> tuple[set[int], set[int]]:
        """Storages that a node reads or writes, and those that it writes or makes."""
        node, home = self.ground.program.nodes[k], self.ground.lies.home
        if is_view(node, self.ground.lies):
            return set(), set()
        changed = {home[i] for i in (*written(node), *(o for o in node.outs if o is not None))}
        return changed | {home[i] for i in node.refs}, changed

    def _planned(self, k: int) -> bool:
        """Whether all that a node of the host reads is there or on its way: what nobody plans would be held until it is copied."""
        far, home = self.tiered.have[self.ground.tiers[1]], self.ground.lies.home
        made = set().union(*(changed for _, _, changed in self.late))
        refs = {home[i] for i in self.ground.program.nodes[k].refs if self.ground.program.values[i].tier == self.ground.tiers[0]}
        return all(s in far or s in self.flying or s in made for s in refs)
