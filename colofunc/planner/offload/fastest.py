"""Offload: which nodes run on the host, and what is copied when, so that the device's peak is within a budget.

Problem: parameters, gradients, optimizer state and activations compete for one memory, each with uses that are known.
Idea: a finished program is a trace of uses; storages that may move are its items (`residency` says when each is
copied), and where an update runs is one more thing to choose: on the device, which state has to travel to, or on the
host, which only gradients do. Every choice is scored by the same timeline of compute, host and copy engines; the
fastest is written down (`Tiered`).

    program -> items, uses, seconds -> reside() per split of the updates -> the fastest -> program with copies

The last parameters' updates stay on the device where that hides the tail: how many is found by trying. What is small is
not worth a copy and stays. What the host then has no room for goes to the disk, where there is one (`disk`):
then the fastest are also looked for as if copies took as long as the disk makes them, and the fastest with its disk is
taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import attrs

from colofunc import progress
from colofunc.mesh import Mesh
from colofunc.mesh.sizes import size_text
from colofunc.planner.offload.by_rank import OffloadChoice, by_rank, peak_bytes
from colofunc.planner.offload.choice import NO_HINT, Hint, OffloadCandidate, search_splits
from colofunc.planner.offload.disk import as_disk, least_disk_s, on_disk, timed
from colofunc.planner.offload.host_operators import check_where, words_of_host
from colofunc.planner.offload.loops import opened
from colofunc.planner.offload.policies import AUTO, MemoryPolicy, Room, State, policy_places
from colofunc.planner.offload.trace import Ground, ground_of, write_copies
from colofunc.planner.offload.updates import updates_of
from colofunc.planner.plan_table import time_text
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program
from colofunc.program.lanes import played
from colofunc.program.passes.narrow_gradients import narrow_gradients

HIDDEN_DISK = 1e-3
"""A disk that adds less than this part of the work counts as hidden: nothing else is looked for."""
ESTIMATE_ERROR = 0.05
"""Relative error of the search's time estimate; candidates closer than this are played in full."""
LARGE_NODES = 4000
"""In a program of more nodes what was best without a disk is tried as if copies were slower, and nothing else is
searched."""


@attrs.frozen(eq=False)
class Offloaded:
    """A program with copies in it.

    `exposed_s`: by how much it takes longer than without them, both played as they run (negative where the host takes
    work off the device). `short`: what the host lacks. `over`: bytes by which its peak exceeds the budget.
    """

    program: Program
    exposed_s: float
    words: tuple[str, ...] = ()
    short: str = ""
    over: int = 0
    hint: Hint = NO_HINT


def fastest_offload(
    program: Program,
    mesh: Mesh,
    node_s: NodeSeconds,
    budget_bytes: int | None,
    policy: MemoryPolicy = AUTO,
    given: Mapping[int, str] | None = None,
    host_bytes: int | None = None,
    disk: bool = False,
    like: Hint | None = None,
    captured: Mapping[int, bool] | None = None,
) -> Offloaded:
    """The fastest way found to run a finished program of one rank within `budget_bytes` of device memory.

    given: position of an input -> the tier that it lies in already. host_bytes: of host memory, where that is less than
    the topology has; `disk`: whether there is one for what exceeds it. Where nothing fits, the leanest program: its
    peak is the least budget. like: only what was best for another order of the same work is tried, and no copies are
    written: an estimate. captured: position of an input that the step took from outside -> whether its owner has it in
    memory, so that it stays there.
    """
    check_where(policy.where, program)
    rooms = [n for n in (host_bytes, mesh.capacity_bytes("host")) if n is not None]
    ground = ground_of(program, mesh, node_s, given)
    offloading = _Offloading(
        ground, mesh, node_s, budget_bytes, policy, given or {}, min(rooms, default=None), disk, captured or {}
    )
    return offloading.fastest() if like is None else offloading.estimate(like)


@attrs.frozen(eq=False)
class _Written:
    """A candidate with its copies written down. `rank`: (bytes over, is the host short, seconds), least first.

    host_bytes, plain_s: what it holds on the host and the seconds beyond those without copies, both before the disk.
    """

    host_bytes: int
    plain_s: float
    rank: tuple[int, bool, float]
    offloaded: Offloaded


class _Offloading:
    """`host_limit_bytes`: host memory that a rank may take, where that is known.

    `below`: input -> host or disk, where that is said.
    """

    def __init__(
        self, ground: Ground, mesh: Mesh, node_s: NodeSeconds, budget: int | None, policy: MemoryPolicy,
        given: Mapping[int, str], host_limit_bytes: int | None, disk: bool, captured: Mapping[int, bool],
    ) -> None:  # fmt: skip
        self.ground = ground
        self.program = ground.program
        self.mesh = mesh
        self.node_s = node_s
        self.budget = budget
        self.policy = policy
        self.host_limit_bytes = host_limit_bytes
        self.disk = disk
        self.captured = captured
        self.limit = budget if budget is not None else max(ground.held, default=0)
        inside = opened(ground, mesh, node_s, _placed(ground, policy, budget, mesh), self.limit, policy)
        if inside is None:
            self.grounds = [ground]
        elif "host" in policy.where.values():
            self.grounds = [inside]
        else:
            self.grounds = [ground, inside]
        self.below = _below(ground, policy, budget, mesh, given, captured)
        lying_there = [self.program.inputs[position] for position, tier in self.below.items() if tier == "disk"]
        self.disk_bytes = sum(self.program.values[i].nbytes for i in lying_there)

    def estimate(self, like: Hint) -> Offloaded:
        """What was best for another order of the same work, and nothing is written."""
        best = self.best_for(like, like.below)
        host_bytes = _on_host(best)
        short = "" if self.disk else _host_short(host_bytes, self.host_limit_bytes, self.disk, self.mesh.node_ranks)
        least_s = least_disk_s(self.mesh, max(self.above(host_bytes), self.disk_bytes)) if self.disk else 0.0
        return Offloaded(self.program, _longer_s(self.ground, best, least_s), (), short, best.over, best.hint)

    def fastest(self) -> Offloaded:
        """Without the disk in mind; and with it, where it shows."""
        best, alone_s = self.best_for(None), _alone_s(self.ground)
        self.before_s = played(self.program, self.mesh, self.node_s).end_s
        fastest = self.written(best)
        host_bytes = fastest.host_bytes
        needed_bytes = max(host_bytes, _on_host(best)) if self.disk else _on_host(best)
        above_bytes = max(self.above(needed_bytes), self.disk_bytes)
        uses_disk = above_bytes > 0 and (self.disk or "disk" in self.below.values())
        if not uses_disk or fastest.rank <= (best.over, False, fastest.plain_s + HIDDEN_DISK * alone_s):
            return fastest.offloaded
        # The disk shows: candidates are looked for as if copies took as long as it makes them.
        like = None if len(self.program.nodes) <= LARGE_NODES else best.hint
        part = min(1.0, above_bytes / max(1, host_bytes))
        for from_disk in sorted({part, 1.0 if like is None else part}):
            candidate = self.best_for(like, from_disk)
            # One that is slower even before its disk is counted is not written down.
            if fastest.rank > (candidate.over, False, _longer_s(self.ground, candidate) - ESTIMATE_ERROR * alone_s):
                fastest = min(fastest, self.written(candidate), key=_rank)
        return fastest.offloaded

    def above(self, host_bytes: int) -> int:
        """Bytes that the host has no room for."""
        return 0 if self.host_limit_bytes is None else max(0, host_bytes - self.host_limit_bytes)

    def best_for(self, like: Hint | None, from_disk: float = 0.0) -> OffloadCandidate:
        """Each rank's own, where they differ and that fits; else that of a rank that does the work of all."""
        apart = self.apart(like, from_disk)
        if apart is not None and not apart.over:
            return apart
        together = self.best_of(like, from_disk)
        return together if apart is None or together.over < apart.over else apart

    def apart(self, like: Hint | None, from_disk: float) -> OffloadCandidate | None:
        """What each rank does for itself; None where they do not differ, or one would move what others have."""
        ranks: list[OffloadCandidate] = []
        placed = _placed(self.ground, self.policy, self.budget, self.mesh)

        def choose(ground: Ground, told: Mapping[int, str | None]) -> OffloadChoice:
            found = self.searched(ground, told, None if like is None else like.of_rank(len(ranks)), from_disk)
            ranks.append(found)
            return OffloadChoice(found.on_host, found.items, found.trace, found.found, found.over)

        if self.grounds[0] is not self.ground:
            return None  # loops have to copy for themselves
        found = by_rank(self.ground, self.mesh, placed, choose)
        if found is None:
            return None
        gave_up = any(one.gave_up for one in ranks)
        one = ranks[0]
        return OffloadCandidate(
            found.over, self.ground, found.on_host, found.items, found.trace, found.found, one.share, one.point, one.below,
            sum(one.least_bytes for one in ranks), gave_up, tuple(ranks),
        )  # fmt: skip

    def best_of(self, like: Hint | None, from_disk: float = 0.0) -> OffloadCandidate:
        """With and without loops opened. from_disk: the part of what is copied that comes from disk."""
        best: OffloadCandidate | None = None
        for ground in progress.over("offload searches", self.grounds):
            if best is not None and not best.over and not best.found.moves:
                break  # nothing has to move
            placed = _placed(ground, self.policy, self.budget, self.mesh)
            candidate = self.searched(ground, placed, like, from_disk)
            if best is None or candidate.rank < best.rank:
                best = candidate
        assert best is not None, "the program as it is was tried"
        return best

    def searched(
        self, ground: Ground, placed: Mapping[int, str | None], like: Hint | None, from_disk: float
    ) -> OffloadCandidate:
        if not from_disk:
            return search_splits(ground, self.policy, placed, self.limit, like)
        slower = attrs.evolve(ground, links=as_disk(ground.links, self.mesh, from_disk))
        candidate = search_splits(slower, self.policy, placed, self.limit, like)
        moves = timed(candidate.trace, candidate.found, ground.links)
        return attrs.evolve(candidate, ground=ground, found=moves, below=from_disk)

    def written(self, candidate: OffloadCandidate) -> _Written:
        """The program of a candidate: with what the host does coming late, or at once where that takes less memory of
        the host.
        """
        late = self.written_as(candidate, True)
        host_is_short = late.rank[1]
        if not self.above(late.host_bytes) or not (host_is_short or len(self.program.nodes) <= LARGE_NODES):
            return late
        at_once = self.written_as(candidate, False)
        return attrs.evolve(min(late, at_once, key=_rank), host_bytes=late.host_bytes, plain_s=late.plain_s)

    def written_as(self, candidate: OffloadCandidate, late: bool) -> _Written:
        program = write_copies(
            candidate.ground, candidate.on_host, candidate.items, candidate.trace, candidate.found, late=late
        )
        program = narrow_gradients(program)
        host_bytes = held_bytes = peak_bytes(program, self.mesh, "host")
        plain_s = exposed_s = played(program, self.mesh, self.node_s).end_s - self.before_s
        words, lacks = tuple(_words(candidate, exposed_s)), ""
        if "disk" in self.below.values() or (self.disk and self.above(host_bytes)):
            lower = on_disk(program, self.mesh, self.node_s, self.host_limit_bytes, self.below, self.captured)
            program, words, lacks = lower.program, (*words, *lower.words), lower.short
            held_bytes = peak_bytes(program, self.mesh, "host")
            exposed_s = lower.end_s - self.before_s
        short = _host_short(held_bytes, self.host_limit_bytes, self.disk, self.mesh.node_ranks) or lacks
        offloaded = Offloaded(program, exposed_s, words, short, candidate.over, candidate.hint)
        return _Written(host_bytes, plain_s, (candidate.over, bool(short), exposed_s), offloaded)


def _rank(written: _Written) -> tuple[int, bool, float]:
    return written.rank


def _longer_s(ground: Ground, best: OffloadCandidate, least_s: float = 0.0) -> float:
    """Seconds beyond those of the work alone, all of it on the device. least_s: what it takes in any case."""
    alone_s = _alone_s(ground)
    more_s = max(best.found.seconds, least_s) - alone_s
    return more_s if abs(more_s) > 1e-12 * alone_s else 0.0


def _alone_s(ground: Ground) -> float:
    alone_s = 0.0
    for seconds in ground.device_s:
        alone_s += seconds
    return alone_s


def _on_host(best: OffloadCandidate) -> int:
    """About the bytes that a rank holds on the host: state that does not stay, and the rest from where it is made there
    or stored to its last use. Of the rank that holds most there, where each does its own."""
    if best.ranks:
        return max(map(_on_host, best.ranks)) + sum(nbytes for _, nbytes in _away_of_several(best))
    trace, residency = best.trace, best.found
    begins: list[tuple[int, int]] = []  # (item, position from which the host holds it)
    state_bytes = 0
    for k, item in enumerate(trace.items):
        if item.home:
            state_bytes += 0 if k in residency.residents else item.nbytes
        elif item.uses and item.uses[0] in item.host_uses:
            begins.append((k, item.uses[0]))
    for move in residency.moves:
        if move.kind == "store" and not trace.items[move.item].home:
            begins.append((move.item, move.start))
    change = [0] * (len(trace.seconds) + 2)
    for k, begin in begins:
        item = trace.items[k]
        change[begin] += item.nbytes
        change[max(item.uses[-1], begin) + 1] -= item.nbytes
    return state_bytes + max(accumulate(change))


def _away(best: OffloadCandidate) -> list[tuple[State, int]]:
    """State that does not stay on the device, and its bytes."""
    pairs = zip(best.items, best.trace.items, strict=True)
    away = [pair for k, pair in enumerate(pairs) if pair[1].home and k not in best.found.residents]
    return [(_state(best.ground, storage), item.nbytes) for storage, item in away]


def _away_of_several(best: OffloadCandidate) -> list[tuple[State, int]]:
    """What several ranks have on the host, where each does its own: it stands behind what each has chosen."""
    if not best.ranks:
        return []
    first = sum(len(one.items) for one in best.ranks)
    pairs = zip(best.items[first:], best.trace.items[first:], strict=True)
    return [(_state(best.ground, storage), item.nbytes) for storage, item in pairs]


def _placed(ground: Ground, policy: MemoryPolicy, budget_bytes: int | None, mesh: Mesh) -> dict[int, str | None]:
    """Storage of each state -> the tier that the policy or the caller says, seen from the device; None: open."""
    states = _states(ground)
    tiers = dict(zip(states, _said(ground, states, policy, budget_bytes, mesh), strict=True))
    tiers.update(ground.given)
    return {storage: "host" if tier == "disk" else tier for storage, tier in tiers.items()}


def _said(
    ground: Ground, states: Sequence[int], policy: MemoryPolicy, budget_bytes: int | None, mesh: Mesh
) -> Sequence[str | None]:
    room = Room(budget_bytes, _other_bytes(ground, states), mesh.node_ranks)
    return policy_places(policy, [_state(ground, s) for s in states], room)


def _below(
    ground: Ground,
    policy: MemoryPolicy,
    budget_bytes: int | None,
    mesh: Mesh,
    given: Mapping[int, str],
    captured: Mapping[int, bool],
) -> dict[int, str]:
    """Position of an input -> host or disk, where it lies there already or the policy says disk.

    Above, both are the host.
    """
    states = _states(ground)
    tiers = _said(ground, states, policy, budget_bytes, mesh)
    of_disk = {storage for storage, tier in zip(states, tiers, strict=True) if tier == "disk"}
    below: dict[int, str] = {}
    for position, i in enumerate(ground.program.inputs):
        if ground.lies.home[i] in of_disk and not captured.get(position):
            below[position] = "disk"
    for position, tier in given.items():
        if tier != "device":
            below[position] = tier
    return below


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
        f"what does not stay on the device {there}takes {size_text(peak)} of host memory a rank, the topology has or "
        "host= allows "
        f"{size_text(most)}{shared}; use more {'nodes' if shared else 'ranks'}, a larger budget, cf.checkpoint{more}, "
        "or a topology "
        "with more host memory"
    )


def _words(best: OffloadCandidate, exposed_s: float) -> Iterator[str]:
    """What was decided, for people."""
    ground = best.ground
    if not _away(best) and not best.found.moves and not ground.host_reads:
        yield "everything stays on the device"
        return
    # Bytes are a rank's: of the one that holds most there, where each does its own.
    fullest = max(best.ranks, key=_on_host, default=best)
    there = "on the host of the fullest rank" if best.ranks else "on the host"
    by_role: dict[str, int] = {}
    for state, nbytes in (*_away(fullest), *_away_of_several(best)):
        by_role[state.role] = by_role.get(state.role, 0) + nbytes
    kept = ", ".join(f"{size_text(n)} of {role}s" for role, n in sorted(by_role.items())) or "no state"
    up, down = fullest.found.moved_bytes
    updates = updates_of(fullest.ground)
    on_host = sum(fullest.on_host.issuperset(update.nodes) for update in updates)
    yield f"{there}: {kept}; {on_host} of {len(updates)} updates run there"
    if operators := words_of_host(ground.program, best.on_host):
        yield f"operators on the host: {operators}"
    inside = ", beside what loops copy" if ground.host_reads else ""
    hidden = f"{time_text(max(0.0, exposed_s))} of it not hidden"
    least = "" if not fullest.least_bytes else f"; no choice copies less than {size_text(fullest.least_bytes)}"
    yield f"copied a step: {size_text(up)} to the device, {size_text(down)} to the host{inside}, {hidden}{least}"
    if best.gave_up:
        yield "a linear program for fewest bytes took too many iterations: what moves was chosen without it"
