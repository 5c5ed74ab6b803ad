"""Offload: which nodes run on the host, and what is copied when, so that the device's peak is within a budget.

Problem: parameters, gradients, optimizer state and activations compete for one memory, each with uses that are known. Idea:
a finished program is a trace of uses; storages that may move are its items (`residency` says when each is copied), and where
an update runs is one more thing to choose: on the device, which state has to travel to, or on the host, which only gradients
do. Every choice is scored by the same timeline of compute, host and copy engines; the fastest is written down (`Tiered`).

    program -> items, uses, seconds -> reside() per split of the updates -> the fastest -> program with copies

The last parameters' updates stay on the device where that hides the tail: how many is found by trying. What is small is not
worth a copy and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np

from colofunc.errors import CapacityError, PlanError
from colofunc.mesh import Mesh
from colofunc.ops.update import IN_PLACE
from colofunc.planner.residency import Item, Links, Residency, Trace, least_budget, reside
from colofunc.program.facts import is_wire, kind_of, written
from colofunc.program.ir import Node, Program
from colofunc.program.memory import Lies, MemoryReport, lies, memory
from colofunc.program.tiered import Tiered, readers

NodeS = Callable[[Node, Mapping[int, object]], float]
SMALL = 1000
"""A storage of less than this part of the budget stays where it is, unless that alone exceeds the budget."""
SPLITS = (0.0, 1.0, 0.75, 0.9, 0.5)
"""Shares of the updates, by bytes, that are tried on the host."""
UPDATES = frozenset(target for target, _ in IN_PLACE.values())
CAST = "aten._to_copy.default"
LIGHT = frozenset({CAST, "aten.mul.Tensor", "aten.mul.Scalar", "aten.div.Tensor", "aten.div.Scalar", "aten.add.Tensor"})


@attrs.frozen
class State:
    """One input leaf that lasts from step to step, as a policy sees it: in order of first use, bytes of one rank."""

    name: str
    role: str  # "param", "frozen", "state", "buffer"
    nbytes: int


@attrs.frozen
class Room:
    """What a policy knows of the machine: bytes of device memory a rank (None: no limit), the peak of all that is no state, and
    the ranks that share a host."""

    budget_bytes: int | None
    other_bytes: int
    ranks: int


Place = Callable[[Sequence[State], Room], Sequence[str | None]]


@attrs.frozen
class MemoryPolicy:
    """Which tier state lies in, and where it is updated; None leaves a choice to cost.

    place: the tier of each state between steps ("device", "host" or None), given all of them. update: "device", "host" or None.
    activations: whether what forward keeps for backward may be copied to the host.
    """

    name: str
    place: Place = attrs.field(default=lambda states, room: [None] * len(states), repr=False)
    update: str | None = None
    activations: bool = True


SCALAR = 8  # bytes of a step count, which goes with nobody
AUTO = MemoryPolicy("auto")
DEVICE = MemoryPolicy("device", lambda states, room: ["device"] * len(states), "device", activations=False)
HOST = MemoryPolicy("host", lambda states, room: ["host" if s.nbytes > SCALAR else None for s in states], activations=False)


@attrs.frozen(eq=False)
class Offloaded:
    """A program with copies in it. `seconds`: of its timeline; `exposed_s`: what copies add to it."""

    program: Program
    peak_bytes: int
    seconds: float
    exposed_s: float
    words: tuple[str, ...] = ()


@attrs.frozen(eq=False)
class Ground:
    """What does not change from candidate to candidate."""

    program: Program
    lies: Lies
    report: MemoryReport
    uses: Mapping[int, list[int]]
    device_s: tuple[float, ...]
    host_s: tuple[float, ...]
    links: Links
    given: Mapping[int, str]  # storage of an input -> the tier that it is given in


def offload(
    program: Program,
    mesh: Mesh,
    node_s: NodeS,
    budget_bytes: int | None,
    policy: MemoryPolicy = AUTO,
    given: Mapping[int, str] | None = None,
) -> Offloaded:
    """The fastest way found to run a finished program of one rank within `budget_bytes` of device memory.

    given: position of an input -> the tier that it lies in already. Where nothing fits, the leanest program: its peak is the
    least budget. Raises CapacityError where the host cannot hold what does not stay.
    """
    ground = _ground(program, mesh, node_s, given or {})
    states = _states(ground)
    room = Room(budget_bytes, _other_bytes(ground, states), mesh.node_ranks)
    placed = dict(zip(states, _checked(policy, [_state(ground, s) for s in states], room), strict=True))
    placed |= ground.given
    limit = budget_bytes if budget_bytes is not None else max(ground.report.timeline["device"], default=0)
    best: tuple[tuple[int, float], frozenset[int], list[int], Trace, Residency] | None = None
    for on_host in _splits(ground, policy.update, placed):
        items, trace = _trace(ground, on_host, placed, limit, policy)
        least = least_budget(trace)[0]
        found = reside(trace, max(limit, least), ground.links)
        rank = max(0, least - limit), found.seconds
        if best is None or rank < best[0]:
            best = rank, on_host, items, trace, found
        if not found.moves:
            break
    assert best is not None, "at least one split is tried"
    (_, seconds), on_host, items, trace, found = best
    done = _write(ground, on_host, items, trace, found)
    _check_host(done, mesh)
    words = tuple(_words(ground, on_host, items, trace, found))
    return Offloaded(done, memory(done).peak_bytes["device"], seconds, found.exposed_s, words)


def _checked(policy: MemoryPolicy, states: Sequence[State], room: Room) -> Sequence[str | None]:
    """What the policy says, or an error that says what is wrong with it."""
    found = list(policy.place(states, room))
    wrong = [tier for tier in found if tier not in ("device", "host", None)]
    if len(found) != len(states) or wrong:
        said = f"{wrong[0]!r}" if wrong else f"{len(found)} tiers for {len(states)} states"
        raise PlanError(f"memory policy {policy.name!r} says {said}; its place() gives 'device', 'host' or None for each state")
    return found


def _other_bytes(ground: Ground, states: Sequence[int]) -> int:
    """The peak of all that is no state."""
    state = sum(ground.lies.storages[s].nbytes for s in states)
    return max(ground.report.timeline["device"], default=0) - state


def _ground(program: Program, mesh: Mesh, node_s: NodeS, given: Mapping[int, str]) -> Ground:
    found = lies(program)
    device_s = tuple(node_s(node, program.values) for node in program.nodes)
    host_s = tuple(mesh.host_s(_touched(node, program)) for node in program.nodes)
    up, down = mesh.copy_s(1 << 30, "host", "device"), mesh.copy_s(1 << 30, "device", "host")
    latency = min(mesh.copy_s(1, "host", "device"), up)
    links = Links((1 << 30) / max(up - latency, 1e-12), (1 << 30) / max(down - latency, 1e-12), latency)
    tiers = {found.home[program.inputs[k]]: tier for k, tier in given.items()}
    return Ground(program, found, memory(program), readers(program, found), device_s, host_s, links, tiers)


def _touched(node: Node, program: Program) -> int:
    """Bytes that a node reads and writes."""
    ids = (*node.refs, *written(node), *(o for o in node.outs if o is not None))
    return sum(program.values[i].nbytes for i in ids)


def _states(ground: Ground) -> list[int]:
    """Storages of inputs that last from step to step, in order of first use."""
    program, donated = ground.program, {into for _, into in ground.program.aliases}
    found = []
    for k, i in enumerate(program.inputs):
        lasting = k in donated or program.values[i].role in ("frozen", "param", "state", "buffer")
        lasting |= ground.given.get(ground.lies.home[i], "device") != "device"
        if lasting and i not in program.constants:
            found.append(ground.lies.home[i])
    return sorted(found, key=lambda s: (ground.uses.get(s, [len(program.nodes)])[0], s))


def _state(ground: Ground, storage: int) -> State:
    value = ground.program.values[ground.lies.storages[storage].value]
    return State(value.name, value.role, value.nbytes)


# ---- where updates run ----


def _splits(ground: Ground, update: str | None, placed: Mapping[int, str | None]) -> Iterator[frozenset[int]]:
    """Sets of nodes that run on the host: all updates but the last few, with the light work that only they read."""
    updates = [k for k, node in enumerate(ground.program.nodes) if node.target in UPDATES]
    weigh = [sum(ground.program.values[i].nbytes for i in written(ground.program.nodes[k])) for k in updates]
    total, seen = sum(weigh), set[frozenset[int]]()
    shares = SPLITS if update is None else (0.0,) if update == "device" else (1.0,)
    for share in shares:
        chosen, so_far = [], 0
        for k, n in zip(updates, weigh, strict=True):
            stays = any(placed.get(ground.lies.home[i]) == "device" for i in written(ground.program.nodes[k]))
            if so_far + n <= share * total and not stays:
                chosen.append(k)
                so_far += n
        found = _with_light(ground, frozenset(chosen)) | _narrowed(ground, chosen)
        if found not in seen:
            seen.add(found)
            yield found


def _with_light(ground: Ground, chosen: frozenset[int]) -> frozenset[int]:
    """`chosen` and the elementwise work whose results nobody else reads, where it makes a gradient wider before it travels."""
    if not chosen:
        return chosen
    program, found = ground.program, set(chosen)
    read: dict[int, set[int]] = {}
    for k, node in enumerate(program.nodes):
        for i in node.refs:
            read.setdefault(i, set()).add(k)
    kept = set(program.outputs)
    for k in reversed(range(len(program.nodes))):
        node = program.nodes[k]
        if node.target not in LIGHT or len(node.outs) != 1 or node.outs[0] is None or node.outs[0] in kept:
            continue
        readers_ = read.get(node.outs[0], set())
        big = max((program.values[i].nbytes for i in node.refs), default=0)
        if readers_ and readers_ <= found and program.values[node.outs[0]].nbytes >= big:
            found.add(k)
    return frozenset(found)


def _narrowed(ground: Ground, chosen: Sequence[int]) -> frozenset[int]:
    """Casts of what is updated on the host to a narrower dtype: the narrow copy travels."""
    program, mine = ground.program, {ground.lies.home[i] for k in chosen for i in written(ground.program.nodes[k])}
    return frozenset(
        k
        for k, node in enumerate(program.nodes)
        if node.target == CAST
        and node.outs[0] is not None
        and ground.lies.home[node.refs[0]] in mine
        and program.values[node.outs[0]].nbytes < program.values[node.refs[0]].nbytes
        and not (chosen and k > min(chosen))  # an update may have changed it by then
    )


# ---- the trace of a candidate ----


def _trace(
    ground: Ground, on_host: frozenset[int], placed: Mapping[int, str | None], limit: int, policy: MemoryPolicy
) -> tuple[list[int], Trace]:
    """(storages that may move, the trace with an item for each)."""
    program, storages = ground.program, ground.lies.storages
    count = len(program.nodes)
    changed: dict[int, set[int]] = {}
    for k, node in enumerate(program.nodes):
        for i in written(node):
            changed.setdefault(ground.lies.home[i], set()).add(k)
    busy = _in_flight(ground, changed)
    base = np.asarray(ground.report.timeline["device"][:count], dtype=np.int64).copy()
    states, floor = set(_states(ground)), limit // SMALL
    outputs = {ground.lies.home[o] for o in program.outputs}
    shared = _shared(ground.lies)
    items, chosen = [], []
    for s, storage in enumerate(storages[: max(ground.lies.home.values(), default=-1) + 1]):
        uses = ground.uses.get(s, [])
        value = program.values[storage.value]
        home, tier = s in states, placed.get(s)
        there = {k for k in uses if k in on_host}
        if storage.tier != "device" or value.id in program.constants or storage.nbytes != value.nbytes or s in shared:
            continue
        if not home and (s in outputs or storage.born < 0 or not policy.activations) and not there:
            continue
        if storage.nbytes < floor and tier != "host" and not there:
            continue
        if home and tier == "device" and not there:
            continue
        begin, end = (0, count) if home else (storage.born, min(storage.dies, count - 1) + 1)
        base[begin:end] -= storage.nbytes
        if not home and storage.nbytes < floor and there:
            continue  # a scalar that the host reads
        uses = sorted({*uses, *busy.get(s, ())})
        writes = frozenset(changed.get(s, set()) | ({storage.born} if not home else set()))
        items.append(Item(storage.nbytes, home, tuple(uses), writes & set(uses), frozenset(there), stays=tier != "host"))
        chosen.append(s)
    seconds = tuple(ground.host_s[k] if k in on_host else ground.device_s[k] for k in range(count))
    return chosen, Trace(seconds, on_host, tuple(int(b) for b in base), tuple(items))


def _shared(found: Lies) -> set[int]:
    """Storages in which two results of one operator lie side by side: no value has all of it."""
    return {s for i, s in found.home.items() if i not in found.within and found.storages[s].value != i}


def _in_flight(ground: Ground, changed: dict[int, set[int]]) -> dict[int, set[int]]:
    """Storage -> positions at which a started collective reads or fills it; its result is `changed` where it is waited for."""
    program, busy, started = ground.program, dict[int, set[int]](), dict[int, int]()
    for k, node in enumerate(program.nodes):
        if is_wire(node) and node.target.endswith("_start"):
            started.update({o: k for o in node.outs if o is not None})
        elif kind_of(node) == ("wait", False) and node.refs[0] in started:
            begin = started[node.refs[0]]
            changed.setdefault(ground.lies.home[node.refs[0]], set()).add(k)
            for i in (node.refs[0], *program.nodes[begin].refs):
                busy.setdefault(ground.lies.home[i], set()).update(range(begin, k + 1))
    return busy


# ---- writing it down ----


def _write(ground: Ground, on_host: frozenset[int], items: Sequence[int], trace: Trace, found: Residency) -> Program:
    home = {s for k, s in enumerate(items) if trace.items[k].home and k not in found.residents}
    home |= {s for s, tier in ground.given.items() if tier != "device"}
    out = Tiered(ground.program, ground.lies, home, on_host)
    starts: dict[int, list[int]] = {}
    waits: dict[int, list[int]] = {}
    for m, move in enumerate(found.moves):
        starts.setdefault(move.start, []).append(m)
        if move.done > move.start:
            waits.setdefault(move.done, []).append(m)
    order = {"store": 0, "fetch": 1}
    count = len(ground.program.nodes)
    for k in range(count + 1):
        for kind in order:
            for m in waits.get(k, ()):
                if found.moves[m].kind == kind:
                    out.wait(items[found.moves[m].item], kind)
        for m in sorted(starts.get(k, ()), key=lambda m: (order[found.moves[m].kind], m)):
            move = found.moves[m]
            if move.done > move.start:
                out.start(items[move.item], move.kind)
            else:
                (out.fetch if move.kind == "fetch" else out.store)(items[move.item])
        if k < count:
            out.run(k)
    return out.finish()


def _check_host(program: Program, mesh: Mesh) -> None:
    peak, most = memory(program).peak_bytes.get("host", 0), mesh.capacity_bytes("host")
    if most is not None and peak > most:
        raise CapacityError(
            f"what does not stay on the device takes {peak:,} B of host memory a rank, the topology has {most:,} B; use more ranks, "
            "a larger budget, cf.checkpoint, or a topology with more host memory"
        )


def _words(
    ground: Ground, on_host: frozenset[int], items: Sequence[int], trace: Trace, found: Residency
) -> Iterator[str]:
    """What was decided, for people."""
    home = [k for k, item in enumerate(trace.items) if item.home and k not in found.residents]
    if not home and not found.moves:
        yield "everything stays on the device"
        return
    by_role: dict[str, int] = {}
    for k in home:
        role = _state(ground, items[k]).role
        by_role[role] = by_role.get(role, 0) + trace.items[k].nbytes
    kept = ", ".join(f"{n / 2**30:.3g} GiB of {role}s" for role, n in sorted(by_role.items())) or "no state"
    up, down = found.moved_bytes
    updates = sum(k in on_host for k, node in enumerate(ground.program.nodes) if node.target in UPDATES)
    total = sum(node.target in UPDATES for node in ground.program.nodes)
    yield f"on the host: {kept}; {updates} of {total} updates run there"
    yield f"copied a step: {up / 2**30:.3g} GiB to the device, {down / 2**30:.3g} GiB to the host, {found.exposed_s:.3g} s of it not hidden"
