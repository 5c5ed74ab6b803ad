"""Copies of ranks that do different things: what each moves is chosen for its own memory, and put together.

Problem: a program with stages is the union of what all ranks do. Counted as one it holds the state of all stages at
once, so that each would put away what it has room for. Idea: what one rank runs is a program too. It is searched by
itself, with its own bytes and its own budget, and what was found for it is written into the union, where other ranks do
not run what is copied.

    found = by_rank(ground, mesh, placed, choose)     # None: something is not one rank's own to move

What several ranks have (a tied weight, a learning rate) stays where it is: to move it would be all of theirs to choose.
What is small and said to lie elsewhere is copied right before it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.offload.residency import OffloadItem, Residency, ScheduledCopy, Trace
from colofunc.planner.offload.timeline import TraceLanes, play
from colofunc.planner.offload.trace import FEW, Ground
from colofunc.program.ir import Program
from colofunc.program.memory import lies, memory
from colofunc.program.passes.tiered import readers
from colofunc.program.places import OnRank, distinct_ranks, has_places, on_rank


@attrs.frozen(eq=False)
class OffloadChoice:
    """What was chosen for a program: the nodes that run on the host, the storages that may move, and what moves when.
    `over`: bytes that it takes too many."""

    on_host: frozenset[int]
    items: Sequence[int]
    trace: Trace
    found: Residency
    over: int = 0


ValueTiers = Mapping[int, str | None]
Choose = Callable[[Ground, ValueTiers], OffloadChoice]


def by_rank(ground: Ground, mesh: Mesh, placed: ValueTiers, choose: Choose) -> OffloadChoice | None:
    """What each rank of the ground's program does for itself, as one choice for all of it.

    placed: storage of a state -> the tier where it is said. choose: the choice for the ground of what one rank runs.
    None where the ranks do not differ, or one would move what others have too.
    """
    program = ground.program
    if not has_places(program) or ground.host_reads:
        return None
    parts = [on_rank(program, mesh, rank) for rank in distinct_ranks(program, mesh)]
    owners: dict[int, int] = {}  # node -> how many ranks of those run it
    holders: dict[int, int] = {}  # storage -> how many have it
    for part in parts:
        for position in part.nodes:
            owners[position] = owners.get(position, 0) + 1
        storages = {ground.lies.home[id] for id in _ids(part.program) if id in ground.lies.home}
        for storage in storages:
            holders[storage] = holders.get(storage, 0) + 1
    several = {storage for storage, count in holders.items() if count > 1}
    far = [storage for storage in several if placed.get(storage) not in (None, ground.tiers[0])]
    if any(ground.lies.storages[storage].nbytes >= FEW for storage in far):
        return None
    union = _Union(ground)
    for part in parts:
        of_rank = _alone(ground, part, several)
        chosen = choose(of_rank, _told(ground, of_rank, placed))
        # What several ranks run would be on the host for one of them and on the device for another.
        if any(owners[part.nodes[position]] > 1 for position in chosen.on_host):
            return None
        if not union.add(part, of_rank, chosen, several):
            return None
    union.add_few(far)
    return union.chosen()


def peak_bytes(program: Program, mesh: Mesh, tier: str) -> int:
    """Of the rank that holds most there."""
    programs = [on_rank(program, mesh, rank).program for rank in distinct_ranks(program, mesh)]
    return max(memory(of_rank).peak_bytes.get(tier, 0) for of_rank in programs)


def _alone(ground: Ground, part: OnRank, several: set[int]) -> Ground:
    """The ground of what one rank runs, with its own bytes. Positions take as long as in the program of all, which
    waits for others.

    several: storages of all that several ranks have.
    """
    program, found, near = part.program, lies(part.program), ground.tiers[0]
    given: dict[int, str] = {}
    for id in program.inputs:
        storage = ground.lies.home[id]
        if storage in ground.given and storage not in several:
            given[found.home[id]] = ground.given[storage]
    stay: set[int] = set()
    for id in _ids(program):
        if id in found.home and ground.lies.home.get(id) in several:
            stay.add(found.home[id])
    return Ground(
        program,
        found,
        memory(program).timeline.get(near, (0,) * len(program.nodes)),
        readers(program, found),
        tuple(ground.device_s[position] for position in part.nodes),
        tuple(ground.host_s[position] for position in part.nodes),
        ground.links,
        given,
        tiers=ground.tiers,
        stay=frozenset(stay),
    )


def _ids(program: Program) -> list[int]:
    ids = list(program.inputs)
    for node in program.nodes:
        ids += node.results
    return ids


def _told(ground: Ground, of_rank: Ground, placed: ValueTiers) -> ValueTiers:
    """What is said of a rank's own storages; those of several ranks stay."""
    told: dict[int, str | None] = {}
    for id in of_rank.program.inputs:
        own, storage = of_rank.lies.home[id], ground.lies.home[id]
        if storage in placed:
            told[own] = ground.tiers[0] if own in of_rank.stay else placed[storage]
    return told


class _Union:
    """Choices of ranks, put together for the program of all."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        self.on_host: set[int] = set()
        self.storages: list[int] = []
        self.items: list[OffloadItem] = []
        self.residents: set[int] = set()
        self.moves: list[ScheduledCopy] = []
        self.peak_bytes, self.over = 0, 0
        self.moved = [0, 0]

    def add(self, part: OnRank, of_rank: Ground, chosen: OffloadChoice, several: set[int]) -> bool:
        """With what one rank does; whether all of that is its own."""
        where = (*part.nodes, len(self.ground.program.nodes))
        numbers: dict[int, int] = {}  # of the rank's items -> of all
        for number, (own, item) in enumerate(zip(chosen.items, chosen.trace.items, strict=True)):
            value = of_rank.lies.storages[own].value
            storage = self.ground.lies.home[value]
            if storage in several or self.ground.lies.storages[storage].value != value:
                return False
            numbers[number] = len(self.items)
            self.storages.append(storage)
            self.items.append(_at(item, where))
        self.on_host.update(where[position] for position in chosen.on_host)
        self.residents.update(numbers[number] for number in chosen.found.residents)
        for move in chosen.found.moves:
            positions = where[move.start], where[move.done], where[move.free]
            self.moves.append(ScheduledCopy(numbers[move.item], move.kind, *positions))
        self.peak_bytes = max(self.peak_bytes, chosen.found.peak_bytes)
        self.over = max(self.over, chosen.over)
        to_device, to_host = chosen.found.moved_bytes
        self.moved = [self.moved[0] + to_device, self.moved[1] + to_host]
        return True

    def add_few(self, far: Sequence[int]) -> None:
        """With small state of several ranks, which lies in the far tier and is copied where it is read."""
        for storage in far:
            self.storages.append(storage)
            self.items.append(OffloadItem(self.ground.lies.storages[storage].nbytes, True, stays=False))

    def chosen(self) -> OffloadChoice:
        """One choice for the program of all, which takes as long as if one rank did all."""
        ground, count = self.ground, len(self.ground.program.nodes)
        seconds = list(ground.device_s[:count])
        for position in self.on_host:
            seconds[position] = ground.host_s[position]
        trace = Trace(tuple(seconds), self.on_host, ground.held[:count], tuple(self.items))
        moves = tuple(sorted(self.moves, key=lambda move: move.start))
        took_s = play(TraceLanes(trace), moves, ground.links).makespan
        to_device, to_host = self.moved
        found = Residency(moves, frozenset(self.residents), self.peak_bytes, took_s, (to_device, to_host))
        return OffloadChoice(frozenset(self.on_host), self.storages, trace, found, self.over)


def _at(item: OffloadItem, where: Sequence[int]) -> OffloadItem:
    """An item whose uses are at other positions."""

    def there(positions: Sequence[int] | frozenset[int]) -> list[int]:
        return [where[position] for position in positions]

    return attrs.evolve(
        item,
        uses=tuple(there(item.uses)),
        writes=there(item.writes),
        host_uses=there(item.host_uses),
        held=tuple((where[begin], where[end]) for begin, end in item.held),
    )
