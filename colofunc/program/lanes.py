"""Lanes: when each operator of one rank runs, on which of the things that work side by side.

Problem: a sum of seconds says what a step costs, not what hides what. Idea: the local program is played forward in its
order. The device computes; the links of each level (in a box, between boxes) are an engine that works first in, first
out, and so are copies in each direction, and the disk, for both; what lies on the host is computed there. A collective
keeps the links of every level that it uses (`Mesh.link_levels`) until it ends: one that spans boxes with several ranks
in each goes over those within a box, too.

A plain collective or copy holds the device up, a started one only at its wait. Work of the host holds up nobody who has
his work: it runs in the thread that hands work out, so that what comes behind it in the order begins when it has ended,
and what came before goes on. Where it is known how long that thread takes to hand out an operator
(`Device.host_launch_s`), none begins before: many short kernels take what the host does.

    device     |linear|linear|        |linear|
    wires      |all_gather   |reduce_scatter|
    to device         |copy  |

The trips of a loop follow one another. Seconds are those of the planner: roofline compute, alpha-beta links.

Note [Contention with compute]. A collective's kernels keep some of the device's processors and of its memory's
bandwidth. Where a machine says by how much (`Device.contention`), an operator takes so much longer for as long as a
collective runs beside it; the collective itself takes what it takes alone, and it makes no difference how many there
are. In a pipeline what a part sends runs beside the parts behind it on the same rank; of those the operators take
longer, which are taken to be spread evenly over a part (`beside_s`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs

from colofunc.mesh import Mesh
from colofunc.mesh.software import WAITS
from colofunc.program.actions import Action, linear_order
from colofunc.program.cost import RuleOf, seconds_on
from colofunc.program.facts import COPIES, WIRE, is_called_with_others, kind_of, kind_of_target, written
from colofunc.program.host_seconds import host_seconds
from colofunc.program.ir import Loop, Node, Part, Program, Timetable, Value
from colofunc.program.places import SEND, distinct_ranks, has_places, same_as
from colofunc.program.text import target_text
from colofunc.spec.parts import holds

Seconds = Callable[[Node, Mapping[int, Value]], float]
LANES = ("compute", "collectives", "to device", "to host", "host", "disk")
WAIT = ("wait", False)  # what `kind_of` says of it
COPY_LANES = frozenset({"to device", "to host", "disk"})


class Busy(NamedTuple):
    """One operator on one lane; `index`: its position in the program, or that of the loop that it is in.

    A tuple and no record of attrs: one is made for every node of every candidate, and a frozen record takes three times
    as long.
    """

    lane: str
    start_s: float
    end_s: float
    label: str
    index: int  # type: ignore[assignment]  # in place of a tuple's method, which nobody calls
    node: Node


@attrs.frozen
class Lanes:
    """`busy`: in the order of the program.

    `starts_s`: per position, when the device has come to it. `end_s`: when all lanes are idle.

    `bodies[k]`: of the loop at position k, one trip, which begins at 0.
    """

    busy: tuple[Busy, ...]
    starts_s: tuple[float, ...]
    end_s: float
    bodies: Mapping[int, Lanes] = attrs.field(factory=dict, repr=False)

    def busy_s(self) -> dict[str, float]:
        """Lane -> seconds that it works; lanes that never do are left out."""
        found = dict.fromkeys(LANES, 0.0)
        for busy in self.busy:
            found[busy.lane] += busy.end_s - busy.start_s
        return {lane: seconds for lane, seconds in found.items() if seconds}


def lanes(program: Program, mesh: Mesh, rule_of: RuleOf, rank: int | None = None) -> Lanes:
    """Play a local program as it stands: what real ranks run is `overlapped` first."""
    return played(program, mesh, seconds_on(mesh, rule_of), rank)


def played(program: Program, mesh: Mesh, seconds: Seconds, rank: int | None = None) -> Lanes:
    """`lanes` where somebody says how long an operator of the device takes.

    Where ranks do different things all are played together, so that each waits for what others send. What comes of it
    is what `rank` does, with positions in its own part (`places.on_rank`); without a rank what all do, with positions
    in the program.
    """
    if not has_places(program):
        return _Player(program, mesh, seconds).play()
    by_rank = _together(program, mesh, seconds, distinct_ranks(program, mesh))
    return _union(program, mesh, by_rank) if rank is None else by_rank[same_as(rank, program, mesh)]


def _union(program: Program, mesh: Mesh, by_rank: Mapping[int, Lanes]) -> Lanes:
    """What all ranks do: each node as the first rank does it that runs it."""
    at = dict.fromkeys(by_rank, 0)  # positions that each has come to
    where: dict[tuple[int, int], int] = {}  # (rank, position there) -> position in the program
    starts = []
    taking_part = _TakingPart(mesh, tuple(by_rank))
    for index, node in enumerate(program.nodes):
        here = taking_part.of(node)
        starts.append(max(by_rank[rank].starts_s[at[rank]] for rank in here))
        where[here[0], at[here[0]]] = index
        for rank in here:
            at[rank] += 1
    done: list[Busy] = []
    bodies: dict[int, Lanes] = {}
    for rank, lanes in by_rank.items():
        for busy in lanes.busy:
            if (rank, busy.index) in where:
                done.append(busy._replace(index=where[rank, busy.index]))
        for position, body in lanes.bodies.items():
            if (rank, position) in where:
                bodies[where[rank, position]] = body
    done.sort(key=lambda busy: busy.index)
    return Lanes(tuple(done), tuple(starts), max(lanes.end_s for lanes in by_rank.values()), bodies)


class _TakingPart:
    """Which of some ranks run a node. Most nodes are of one stage, so that few answers differ."""

    def __init__(self, mesh: Mesh, ranks: Sequence[int]) -> None:
        self._mesh, self._ranks = mesh, ranks
        self._known: dict[Any, tuple[int, ...]] = {}  # (where a node runs, what a send says of its ranks) -> ranks

    def of(self, node: Node) -> tuple[int, ...]:
        key = node.on, node.args[1:] if node.target == SEND else ()
        ranks = self._known.get(key)
        if ranks is None:
            ranks = self._known[key] = tuple(rank for rank in self._ranks if _takes_part(node, self._mesh, rank))
        return ranks


def _takes_part(node: Node, mesh: Mesh, rank: int) -> bool:
    if not holds(node.on, mesh, rank):
        return False
    if node.target != SEND:
        return True
    _, axes, _, source, targets = node.args
    return mesh.index(rank, axes) in (source, *targets)


def _together(program: Program, mesh: Mesh, seconds: Seconds, ranks: Sequence[int]) -> dict[int, Lanes]:
    """Per rank, what it does while the others do their part."""
    players = {rank: _Player(program, mesh, seconds) for rank in ranks}
    taking_part = _TakingPart(mesh, ranks)
    for node in program.nodes:
        here = {rank: players[rank] for rank in taking_part.of(node)}
        if node.target == SEND:
            _, axes, _, source, targets = node.args
            sent_s = max(player.sends(node) for rank, player in here.items() if mesh.index(rank, axes) == source)
            for rank, player in here.items():
                index = mesh.index(rank, axes)
                if index in targets and index != source:
                    player.receives(node, sent_s)
        elif node.loop is not None and node.loop.cut_by is not None:
            _by_timetable(node, node.loop, node.loop.cut_by, mesh, seconds, here)
        elif node.loop is not None:
            trips = _together(node.loop.body, mesh, seconds, list(here))
            longest_s = max(trip.end_s for trip in trips.values())
            for rank, player in here.items():
                player.repeats(node, node.loop, attrs.evolve(trips[rank], end_s=longest_s))
        else:
            for player in here.values():
                player.step(node)
    return {rank: player.lanes() for rank, player in players.items()}


def _by_timetable(
    node: Node, loop: Loop, timetable: Timetable, mesh: Mesh, seconds: Seconds, players: Mapping[int, _Player]
) -> None:
    """Each player does its row of the timetable."""
    index_of = {rank: mesh.index(rank, (timetable.along,)) for rank in players}
    began = {rank: player.begins(node) for rank, player in players.items()}
    free_s = {index_of[rank]: start_s for rank, (_, start_s) in began.items()}
    rows = rows_by_timetable(loop, timetable, mesh, seconds, free_s)
    for rank, player in players.items():
        position, start_s = began[rank]
        row = rows[index_of[rank]]
        player.ends(node, position, row, row[-1].end_s if row else start_s)


@attrs.frozen
class PlayedAction:
    """One action of a timetable, in seconds from the begin of the step."""

    start_s: float
    end_s: float
    action: Action


def rows_by_timetable(
    loop: Loop, timetable: Timetable, mesh: Mesh, seconds: Seconds, free_s: Mapping[int, float] | None = None
) -> list[list[PlayedAction]]:
    """Per index of the pipeline's axis, when it does its actions: in order, each when what it reads has come.

    free_s: index -> when it can begin. What a part sends leaves when the part has ended, and slows down what the rank
    does next where the device says so (Note [Contention with compute]).
    """
    free = dict.fromkeys(range(timetable.table.ranks), 0.0) | dict(free_s or {})
    wire_free, came = dict(free), dict[tuple[int, int], float]()
    parts = part_times(loop, timetable, mesh, seconds)
    rows: list[list[PlayedAction]] = [[] for _ in free]
    for here, action in linear_order(timetable.table):
        part, microbatch = parts[action.stage, action.kind], action.microbatch
        start_s = max(free[here], *(came.get((id, microbatch), 0.0) for id in part.reads), 0.0)
        free[here] = start_s + part.beside_s(wire_free[here] - start_s, mesh.topology.device.contention)
        rows[here].append(PlayedAction(start_s, free[here], action))
        for id, sent_s in part.sends:
            wire_free[here] = max(wire_free[here], free[here]) + sent_s
            came[id, microbatch] = wire_free[here]
    return rows


def part_times(loop: Loop, timetable: Timetable, mesh: Mesh, seconds: Seconds) -> dict[Part, PartTime]:
    """Each part of a loop that was cut, by itself, on the slowest of the ranks that have its stage."""
    found = {}
    for part, span in zip(timetable.parts, timetable.spans(), strict=True):
        time = PartTime.of(loop.body, span, mesh, seconds)
        if mesh.topology.ranks:
            stage, _ = part
            speed = mesh.speed(mesh.at(**{timetable.along: timetable.table.rank_of[stage]}))
            time = attrs.evolve(time, seconds=time.seconds / speed, work_s=time.work_s / speed)
        found[part] = time
    return found


@attrs.frozen
class PartTime:
    """A part of a body: how long it takes alone, the values that it reads, those that it sends with their seconds.

    work_s: of its seconds those in which the device computes.
    """

    seconds: float
    reads: tuple[int, ...]
    sends: tuple[tuple[int, float], ...]
    work_s: float = 0.0

    def beside_s(self, wired_s: float, contention: float) -> float:
        """Seconds where collectives run for so long beside it, which make operators take longer by `contention` of
        their time.
        """
        if wired_s <= 0 or contention <= 0 or not self.seconds:
            return self.seconds
        slower = 1 + contention * self.work_s / self.seconds  # so many times longer, while they run
        longer_s = self.seconds * slower
        if longer_s <= wired_s:
            return longer_s
        # For `wired_s` only 1 / slower of the work is done; the rest takes what it takes alone.
        return self.seconds + wired_s * (1 - 1 / slower)

    @staticmethod
    def of(body: Program, span: tuple[int, int], mesh: Mesh, seconds: Seconds) -> PartTime:
        """The part whose nodes stand between two positions."""
        player = _Player(body, mesh, seconds)
        reads: dict[int, None] = {}
        sends: list[tuple[int, float]] = []
        for node in body.nodes[slice(*span)]:
            reads |= dict.fromkeys(node.refs)
            if node.target == SEND:
                sends += [(out, seconds(node, body.values)) for out in node.results]
            else:
                player.step(node)
        played = player.lanes()
        work_s = sum(busy.end_s - busy.start_s for busy in played.busy if busy.lane == "compute")
        return PartTime(played.end_s, tuple(reads), tuple(sends), work_s)


class _Player:
    def __init__(self, program: Program, mesh: Mesh, seconds: Seconds) -> None:
        self.program, self.mesh, self.device_s = program, mesh, seconds
        # Lane -> when it is free. The host's: the thread that hands work out. Collectives have their links here.
        self.free = dict.fromkeys(LANES, 0.0)
        self.wires: dict[tuple[str, ...], tuple[str, ...]] = {}  # axes -> what has to be free
        # value -> when it may be read, where that is later than its place in the order
        self.ready: dict[int, float] = {}
        self.busy: list[Busy] = []
        self.bodies: dict[int, Lanes] = {}
        self.clock = 0.0  # when the device may go on
        device = mesh.topology.device
        self.hands_out = device.host_launch_s > 0  # where it is known how long that takes
        self.launch_s, self.view_s = device.host_launch_s, device.host_view_s
        # until when collectives run, beside which kernels take longer
        self.contention, self.wired_s = device.contention, 0.0
        self.starts: list[float] = []
        # axes whose collectives hold the device up, also where they are started early
        self.waits = mesh.topology.software.axes(WAITS)

    def play(self) -> Lanes:
        for node in self.program.nodes:
            self.step(node)
        return self.lanes()

    def lanes(self) -> Lanes:
        return Lanes(tuple(self.busy), tuple(self.starts), max(self.clock, *self.free.values()), self.bodies)

    def step(self, node: Node) -> None:
        index = len(self.starts)
        self.starts.append(self.clock)
        on_s = self._node(index, node, self.clock)
        if on_s > self.clock:
            self.clock = on_s

    def _begin(self) -> int:
        """The position of the next node."""
        self.starts.append(self.clock)
        return len(self.starts) - 1

    def sends(self, node: Node) -> float:
        """When what is sent has arrived; the device goes on meanwhile."""
        index, needs, seconds = self._begin(), self._needs(node), self._seconds(node, self._lane(node, kind_of(node)))
        wires = self._wires(node)
        begin = max(self.clock, needs, self.free["host"], *(self.free[wire] for wire in wires))
        self.busy.append(Busy("collectives", begin, begin + seconds, target_text(node.target), index, node))
        for wire in wires:
            self.free[wire] = begin + seconds
        if self.contention and begin + seconds > self.wired_s:
            self.wired_s = begin + seconds
        return begin + seconds

    def receives(self, node: Node, sent_s: float) -> None:
        self._begin()
        self._made(node, sent_s)

    def begins(self, node: Node) -> tuple[int, float]:
        """(position, when it can begin) of a loop that others take part in."""
        return self._begin(), max(self.clock, self._needs(node), self.free["host"])

    def ends(self, node: Node, index: int, row: Sequence[PlayedAction], end_s: float) -> None:
        """What a rank has done of it."""
        self.busy += [Busy("compute", did.start_s, did.end_s, str(did.action), index, node) for did in row]
        self.clock = end_s
        self.free = {lane: max(free, end_s) for lane, free in self.free.items()}
        self._made(node, end_s)

    def repeats(self, node: Node, loop: Loop, trip: Lanes) -> None:
        index = self._begin()
        begin = max(self.clock, self._needs(node), self.free["host"])
        self.clock = max(self.clock, self._trips(index, node, loop, trip, begin))

    def _needs(self, node: Node) -> float:
        """When all operands are there."""
        latest_s, ready = 0.0, self.ready
        for id in node.refs:
            if id in ready and ready[id] > latest_s:
                latest_s = ready[id]
        return latest_s

    def _node(self, index: int, node: Node, clock: float) -> float:
        """When the device may go on."""
        # Comparisons and no `max`, and few calls: this runs for every node of every candidate.
        kind, needs = kind_of_target(node.target), self._needs(node)
        if kind == WAIT:
            self._made(node, needs)
            return needs
        if node.loop is not None:
            trip = played(node.loop.body, self.mesh, self.device_s)
            return self._trips(index, node, node.loop, trip, max(clock, needs, self.free["host"]))
        lane = self._lane(node, kind)
        if lane == "compute":
            seconds = self.device_s(node, self.program.values)
        else:
            seconds = self._seconds(node, lane)
        if self.hands_out and lane != "host":
            self.free["host"] += self._handed_s(node, seconds)
        engines = self._wires(node) if lane == "collectives" else (lane,)
        begin = self.free["host"]
        if needs > begin:
            begin = needs
        if lane != "host":
            if clock > begin:
                begin = clock
            for engine in engines:
                if self.free[engine] > begin:
                    begin = self.free[engine]
        if lane == "compute" and begin < self.wired_s:
            seconds = self._beside_collectives_s(seconds, self.wired_s - begin)
        if seconds:
            self.busy.append(Busy(lane, begin, begin + seconds, target_text(node.target), index, node))
            for engine in engines:
                self.free[engine] = begin + seconds
        apart = lane == "host" or (kind is not None and kind[1])
        if self.waits and lane == "collectives" and self.waits.issuperset(node.args[1]):
            apart = False
        if apart or lane in COPY_LANES:
            self._made(node, begin + seconds)
        if self.contention and lane == "collectives" and begin + seconds > self.wired_s:
            self.wired_s = begin + seconds
        return clock if apart else begin + seconds

    def _beside_collectives_s(self, seconds: float, wired_s: float) -> float:
        """Of an operator, `seconds` long alone, while collectives run for `wired_s`.

        See Note [Contention with compute].
        """
        longer_s = seconds * (1 + self.contention)
        if longer_s <= wired_s:
            return longer_s
        return seconds + wired_s * self.contention / (1 + self.contention)

    def _wires(self, node: Node) -> tuple[str, ...]:
        """The links that a collective keeps to itself.

        Each group has a stream of its own: those with other links run beside it.
        """
        axes = tuple(node.args[1])
        found = self.wires.get(axes)
        if found is None:
            found = self.wires[axes] = tuple(f"links of level {level}" for level in self.mesh.link_levels(axes))
            for wire in found:
                self.free.setdefault(wire, 0.0)
        return found

    def _handed_s(self, node: Node, seconds: float) -> float:
        """In which the host hands out a node; of what a compiler fuses, or one call updates, the first alone."""
        if is_called_with_others(node):
            return 0.0
        if seconds:
            return self.launch_s
        return self.view_s if node.kernel is None else 0.0

    def _made(self, node: Node, when_s: float) -> None:
        for id in (*written(node), *node.results):
            self.ready[id] = when_s

    def _trips(self, index: int, node: Node, loop: Loop, trip: Lanes, begin: float) -> float:
        self.bodies[index] = trip
        for number in range(loop.trips):
            now = begin + number * trip.end_s
            for busy in trip.busy:
                self.busy.append(busy._replace(start_s=busy.start_s + now, end_s=busy.end_s + now, index=index))
        end = begin + loop.trips * trip.end_s
        self.free = {lane: max(free, end) for lane, free in self.free.items()}
        self._made(node, end)
        return end

    def _lane(self, node: Node, kind: tuple[str, bool] | None) -> str:
        if kind is not None:
            if kind[0] in WIRE:
                return "collectives"
            if kind[0] in COPIES:
                source, target = self._ends(node)
                if "disk" in (source, target):
                    return "disk"
                return "to device" if target == "device" else "to host"
        values = self.program.values
        for id in node.refs:  # of most nodes the first says it
            if values[id].tier != "host":
                return "compute"
        for id in node.results:
            if values[id].tier != "host":
                return "compute"
        return "host" if node.refs or node.results else "compute"

    def _ends(self, node: Node) -> tuple[str, str]:
        """The tiers that a copy leads from and to."""
        into = node.refs[0] if node.target.startswith("colofunc.put") else node.outs[0]
        assert into is not None, "a copy that nobody has is not made"
        return self.program.values[node.refs[-1]].tier, self.program.values[into].tier

    def _seconds(self, node: Node, lane: str) -> float:
        values = self.program.values
        if lane in COPY_LANES:
            return self.mesh.copy_s(values[node.refs[-1]].nbytes, *self._ends(node))
        seconds = self.device_s(node, values)
        return host_seconds(node, values, self.mesh, seconds) if lane == "host" else seconds
