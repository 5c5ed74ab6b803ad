"""Offload: which nodes run on the host, and what is copied when, so that the device's peak is within a budget.

Problem: parameters, gradients, optimizer state and activations compete for one memory, each with uses that are known. Idea:
a finished program is a trace of uses; storages that may move are its items (`residency` says when each is copied), and where
an update runs is one more thing to choose: on the device, which state has to travel to, or on the host, which only gradients
do. Every choice is scored by the same timeline of compute, host and copy engines; the fastest is written down (`Tiered`).

    program -> items, uses, seconds -> reside() per split of the updates -> the fastest -> program with copies

The last parameters' updates stay on the device where that hides the tail: how many is found by trying. What is small is not
worth a copy and stays. What the host then has no room for goes to the disk, where there is one (`offload_disk`): then the
fastest are also looked for as if copies took as long as the disk makes them, and the fastest with its disk is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

import attrs

from colofunc.mesh import Mesh
from colofunc.mesh.sizes import size_text
from colofunc.planner.offload.choice import NO_HINT, Found, Hint, search
from colofunc.planner.offload.disk import as_disk, least_disk_s, on_disk, timed
from colofunc.planner.offload.host_operators import check_where, told
from colofunc.planner.offload.loops import opened
from colofunc.planner.offload.policies import AUTO, MemoryPolicy, Room, State, places
from colofunc.planner.offload.trace import Ground, NodeS, ground_of, write
from colofunc.planner.offload.updates import updates_of
from colofunc.planner.plan_table import time_text
from colofunc.program.ir import Program
from colofunc.program.lanes import played
from colofunc.program.memory import memory

FINE = 1e-3
"""Where a disk adds less than such a part of the work, nothing else is looked for."""
NEAR = 0.05
"""So near to what a program takes is what its search says, which does not see all that is in the program."""
LARGE = 4000
"""In a program of more nodes what was best without a disk is tried as if copies were slower, and nothing else is searched."""


@attrs.frozen(eq=False)
class Offloaded:
    """A program with copies in it. `exposed_s`: by how much it takes longer than without them, both played as they run (less than
    nothing where the host takes work off the device). `over`: bytes by which its peak exceeds the budget."""

    program: Program
    exposed_s: float
    words: tuple[str, ...] = ()
    short: str = ""  # what the host lacks
    over: int = 0
    hint: Hint = NO_HINT


def offload(
    program: Program,
    mesh: Mesh,
    node_s: NodeS,
    budget_bytes: int | None,
    policy: MemoryPolicy = AUTO,
    given: Mapping[int, str] | None = None,
    host_bytes: int | None = None,
    disk: bool = False,
    like: Hint | None = None,
    captured: Mapping[int, bool] | None = None,
) -> Offloaded:
    """The fastest way found to run a finished program of one rank within `budget_bytes` of device memory.

    given: position of an input -> the tier that it lies in already. host_bytes: of host memory, where that is less than the
    topology has; `disk`: whether there is one for what exceeds it. Where nothing fits, the leanest program: its peak is the
    least budget. like: only what was best for another order of the same work is tried, and no copies are written: an estimate.
    captured: position of an input that the step took from outside -> whether its owner has it in memory, so that it stays there.
    """
    check_where(policy.where, program)
    rooms = [n for n in (host_bytes, mesh.capacity_bytes("host")) if n is not None]
    ground = ground_of(program, mesh, node_s, given)
    one = _Offloading(ground, mesh, node_s, budget_bytes, policy, given or {}, min(rooms, default=None), disk, captured or {})
    return one.fastest() if like is None else one.estimate(like)


_Ranked = tuple[tuple[int, bool, float], Offloaded]  # (bytes over, is the host short, seconds), least first


class _Offloading:
    """`most`: bytes of host memory that a rank may take, where that is known. `below`: input -> host or disk, where that is said."""

    def __init__(
        self, ground: Ground, mesh: Mesh, node_s: NodeS, budget: int | None, policy: MemoryPolicy, given: Mapping[int, str],
        most: int | None, disk: bool, captured: Mapping[int, bool],
    ) -> None:  # fmt: skip
        self.ground, self.program, self.mesh, self.node_s = ground, ground.program, mesh, node_s
        self.budget, self.policy, self.most, self.disk, self.captured = budget, policy, most, disk, captured
        self.limit = budget if budget is not None else max(ground.held, default=0)
        inside = opened(ground, mesh, node_s, _placed(ground, policy, budget, mesh), self.limit, policy)
        self.grounds = [g for g in (ground, inside) if g is not None]
        if inside is not None and "host" in policy.where.values():
            self.grounds = [inside]
        self.below = _below(ground, policy, budget, mesh, given, captured)
        self.said = sum(self.program.values[self.program.inputs[k]].nbytes for k, tier in self.below.items() if tier == "disk")

    def estimate(self, like: Hint) -> Offloaded:
        """What was best for another order of the same work, and nothing is written."""
        best = self.best_of(like, like.below)
        host = _on_host(best)
        short = "" if self.disk else _host_short(host, self.most, self.disk, self.mesh.node_ranks)
        least_s = least_disk_s(self.mesh, max(self.above(host), self.said)) if self.disk else 0.0
        return Offloaded(self.program, _longer_s(self.ground, best, least_s), (), short, best.over, best.hint)

    def fastest(self) -> Offloaded:
        """Without the disk in mind; and with it, where it shows."""
        best, alone_s = self.best_of(None), _alone_s(self.ground)
        self.before_s = played(self.program, self.mesh, self.node_s).end_s
        host, plain_s, found = self.whole(best)
        above = max(self.above(max(host, _on_host(best)) if self.disk else _on_host(best)), self.said)
        deep = above > 0 and (self.disk or "disk" in self.below.values())
        if deep and found[0] > (best.over, False, plain_s + FINE * alone_s):  # else the disk is hidden
            like = None if len(self.program.nodes) <= LARGE else best.hint
            part = min(1.0, above / max(1, host))
            for one in (self.best_of(like, part) for part in sorted({part, 1.0 if like is None else part})):
                if found[0] > (one.over, False, _longer_s(self.ground, one) - NEAR * alone_s):  # else it is no faster with its disk
                    found = min(found, self.whole(one)[2], key=itemgetter(0))
        return found[1]

    def above(self, host: int) -> int:
        """Bytes that the host has no room for."""
        return 0 if self.most is None else max(0, host - self.most)

    def best_of(self, like: Hint | None, part: float = 0.0) -> Found:
        """With and without loops opened. part: of what is copied so much comes from disk."""
        best: Found | None = None
        for each in self.grounds:
            if best is None or best.over or best.found.moves:
                far = attrs.evolve(each, links=as_disk(each.links, self.mesh, part)) if part else each
                found = search(far, self.policy, _placed(each, self.policy, self.budget, self.mesh), self.limit, like)
                found = attrs.evolve(found, ground=each, found=timed(found.trace, found.found, each.links), below=part) if part else found
                best = found if best is None else min(best, found, key=lambda f: f.rank)
        assert best is not None, "the program as it is was tried"
        return best

    def whole(self, one: Found) -> tuple[int, float, _Ranked]:
        """(bytes on the host, seconds beyond those without copies, both before the disk; the plan and its rank)"""
        host, plain_s, found = self.written(one, True)
        if self.above(host) and (found[0][1] or len(self.program.nodes) <= LARGE):
            found = min(found, self.written(one, False)[2], key=itemgetter(0))
        return host, plain_s, found

    def written(self, one: Found, late: bool) -> tuple[int, float, _Ranked]:
        done = write(one.ground, one.on_host, one.items, one.trace, one.found, late=late)
        host = held = memory(done).peak_bytes.get("host", 0)
        plain_s = exposed_s = played(done, self.mesh, self.node_s).end_s - self.before_s
        words, lacks = tuple(_words(one, exposed_s)), ""
        if "disk" in self.below.values() or (self.disk and self.above(host)):
            lower = on_disk(done, self.mesh, self.node_s, self.most, self.below, self.captured)
            done, words, lacks = lower.program, (*words, *lower.words), lower.short
            held, exposed_s = memory(done).peak_bytes.get("host", 0), lower.end_s - self.before_s
        short = _host_short(held, self.most, self.disk, self.mesh.node_ranks) or lacks
        return host, plain_s, ((one.over, bool(short), exposed_s), Offloaded(done, exposed_s, words, short, one.over, one.hint))


def _longer_s(ground: Ground, best: Found, least_s: float = 0.0) -> float:
    """Seconds beyond those of the work alone, all of it on the device. least_s: what it takes in any case."""
    alone_s = _alone_s(ground)
    more_s = max(best.found.seconds, least_s) - alone_s
    return more_s if abs(more_s) > 1e-12 * alone_s else 0.0


def _alone_s(ground: Ground) -> float:
    alone_s = 0.0
    for seconds in ground.device_s:
        alone_s += seconds
    return alone_s


def _on_host(best: Found) -> int:
    """About the bytes that the host holds: state that does not stay, and what is stored of the rest, or made there, until its last use."""
    trace, found = best.trace, best.found
    change = [0] * (len(trace.seconds) + 2)
    made = [(k, item.uses[0]) for k, item in enumerate(trace.items) if not item.home and item.uses[:1] and item.uses[0] in item.host_uses]
    stored = [(move.item, move.start) for move in found.moves if move.kind == "store" and not trace.items[move.item].home]
    for k, begin in (*made, *stored):
        item = trace.items[k]
        change[begin] += item.nbytes
        change[max(item.uses[-1], begin) + 1] -= item.nbytes
    home = sum(item.nbytes for k, item in enumerate(trace.items) if item.home and k not in found.residents)
    return home + max(accumulate(change))


def _placed(ground: Ground, policy: MemoryPolicy, budget_bytes: int | None, mesh: Mesh) -> dict[int, str | None]:
    """Storage of each state -> the tier that the policy or the caller says, seen from the device; None: open."""
    states = _states(ground)
    said = {**dict(zip(states, _said(ground, states, policy, budget_bytes, mesh), strict=True)), **ground.given}
    return {s: "host" if tier == "disk" else tier for s, tier in said.items()}


def _said(ground: Ground, states: Sequence[int], policy: MemoryPolicy, budget_bytes: int | None, mesh: Mesh) -> Sequence[str | None]:
    room = Room(budget_bytes, _other_bytes(ground, states), mesh.node_ranks)
    return places(policy, [_state(ground, s) for s in states], room)


def _below(
    ground: Ground, policy: MemoryPolicy, budget_bytes: int | None, mesh: Mesh, given: Mapping[int, str], captured: Mapping[int, bool]
) -> dict[int, str]:
    """Position of an input -> host or disk, where it lies there already or the policy says disk. Above, both are the host."""
    states = _states(ground)
    disk = {s for s, tier in zip(states, _said(ground, states, policy, budget_bytes, mesh), strict=True) if tier == "disk"}
    said = {k: "disk" for k, i in enumerate(ground.program.inputs) if ground.lies.home[i] in disk and not captured.get(k)}
    return {**said, **{k: tier for k, tier in given.items() if tier != "device"}}


def _other_bytes(ground: Ground, states: Sequence[int]) -> int:
    """The peak of all that is no state."""
    state = sum(ground.lies.storages[s].nbytes for s in states)
    return max(ground.held, default=0) - state


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


def _host_short(peak: int, most: int | None, disk: bool, ranks: int) -> str:
    """What is wrong where the host cannot hold what does not stay on the device."""
    if most is None or peak <= most:
        return ""
    there = "and not on disk " if disk else ""
    more, shared = "" if disk else ', cf.offload(disk="DIR")', f" ({ranks} ranks share a node's)" if ranks > 1 else ""
    return (
        f"what does not stay on the device {there}takes {size_text(peak)} of host memory a rank, the topology has or host= allows "
        f"{size_text(most)}{shared}; use more {'nodes' if shared else 'ranks'}, a larger budget, cf.checkpoint{more}, or a topology "
        "with more host memory"
    )


def _words(best: Found, exposed_s: float) -> Iterator[str]:
    """What was decided, for people."""
    found, ground = best.found, best.ground
    home = [k for k, item in enumerate(best.trace.items) if item.home and k not in found.residents]
    if not home and not found.moves and not ground.host_reads:
        yield "everything stays on the device"
        return
    by_role: dict[str, int] = {}
    for k in home:
        role = _state(ground, best.items[k]).role
        by_role[role] = by_role.get(role, 0) + best.trace.items[k].nbytes
    kept = ", ".join(f"{size_text(n)} of {role}s" for role, n in sorted(by_role.items())) or "no state"
    up, down = found.moved_bytes
    updates = updates_of(ground)
    on_host = sum(best.on_host.issuperset(update.nodes) for update in updates)
    yield f"on the host: {kept}; {on_host} of {len(updates)} updates run there"
    if operators := told(ground.program, best.on_host):
        yield f"operators on the host: {operators}"
    inside = ", beside what loops copy" if ground.host_reads else ""
    hidden = f"{time_text(max(0.0, exposed_s))} of it not hidden"
    least = "" if not best.least_bytes else f"; no choice copies less than {size_text(best.least_bytes)}"
    yield f"copied a step: {size_text(up)} to the device, {size_text(down)} to the host{inside}, {hidden}{least}"
    if best.gave_up:
        yield "a linear program for fewest bytes took too many iterations: what moves was chosen without it"
