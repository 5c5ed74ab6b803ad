"""Disk: what the host has no room for lies there, and is read into host memory before its use and written back behind
it.

Problem: where state of the host exceeds the host, a second choice of the same kind has to be made: what stays, what
goes, and when it moves, on a drive that is slower than any link. Idea: a program whose copies lead to the host is again
a trace of uses, one tier lower. Host storages are its items, the host's peak its budget, the disk its far tier, with
one queue for both directions; the same search decides (`residency`), and the same hand writes it down (`Tiered`).

    host: w (state)                        host: -
    to_device(%w)             ->           %1 = to_host_start(%w @disk) .. %2 = wait(%1); to_device(%2)
    put(%w, %new)                          put(%2, %new); put_start(%w @disk, %2) .. wait

What is read lies in host memory that the plan counts, so reading ahead stops where the host's budget does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

import attrs

from colofunc.mesh import Mesh
from colofunc.mesh.sizes import size_text
from colofunc.planner.offload.by_rank import OffloadChoice, by_rank
from colofunc.planner.offload.residency import Links, Residency, Trace, least_budget, reside
from colofunc.planner.offload.timeline import TraceLanes as Playing
from colofunc.planner.offload.timeline import play
from colofunc.planner.offload.trace import Ground, links_of, trace_of_ground, write_copies
from colofunc.planner.plan_table import time_text
from colofunc.program.cost import NodeSeconds
from colofunc.program.ir import Program, Value
from colofunc.program.lanes import Lanes, played
from colofunc.program.memory import lies, memory
from colofunc.program.passes.tiered import Tiers, readers
from colofunc.program.places import distinct_ranks
from colofunc.spec.parts import holds

TIERS: Tiers = ("host", "disk")
NOTHING: frozenset[int] = frozenset()


@attrs.frozen(eq=False)
class OnDiskProgram:
    """A program with part of the host's tier on disk. `end_s`: when its step ends. short: what the disk
    lacks."""

    program: Program
    end_s: float
    words: tuple[str, ...]
    short: str = ""


def on_disk(
    program: Program,
    mesh: Mesh,
    node_s: NodeSeconds,
    host_bytes: int | None,
    given: Mapping[int, str],
    captured: Mapping[int, bool] | None = None,
) -> OnDiskProgram:
    """`program` within `host_bytes` of host memory, where that can be. given: position of an input -> "host" or "disk",
    if said.

    captured: position of an input that the step took from outside -> whether its owner has it in memory.
    """
    captured = captured or {}
    before = played(program, mesh, node_s)
    ground = _ground(program, mesh, before, given)
    states = _states(ground, given, captured)
    limit = host_bytes if host_bytes is not None else max(ground.held, default=0)

    def choose(mine: Ground, told: Mapping[int, str | None]) -> OffloadChoice:
        items, trace = trace_of_ground(mine, NOTHING, told, limit)
        least = least_budget(trace)[0]
        return OffloadChoice(NOTHING, items, trace, reside(trace, max(limit, least), mine.links), max(0, least - limit))

    chosen = by_rank(ground, mesh, states, choose) or choose(ground, states)
    items, trace, found = chosen.items, chosen.trace, chosen.found
    done = write_copies(ground, NOTHING, items, trace, found)
    end_s = played(done, mesh, node_s).end_s
    longer_s = end_s - before.end_s
    return OnDiskProgram(
        done, end_s, tuple(_words(ground, items, trace, found, longer_s)), _short(done, mesh, captured)
    )


def as_disk(links: Links, mesh: Mesh, part: float) -> Links:
    """Links between device and host as they would be if such a part of what goes over them had to come from disk, or go
    there.
    """
    disk = links_of(mesh, TIERS)
    up, down = (part / rate for rate in (disk.to_device_bytes_per_s, disk.to_host_bytes_per_s))
    return Links(
        1 / max(1 / links.to_device_bytes_per_s, up), 1 / max(1 / links.to_host_bytes_per_s, down),
        links.latency_s + part * disk.latency_s, links.one_queue or part == 1,
    )  # fmt: skip


def timed(trace: Trace, found: Residency, links: Links) -> Residency:
    """What was found for other links, as long as it takes with these."""
    return attrs.evolve(found, seconds=play(Playing(trace), found.moves, links).makespan)


def least_disk_s(mesh: Mesh, nbytes: int) -> float:
    """Seconds to read and to write so many bytes once."""
    return mesh.copy_s(nbytes, "disk", "host") + mesh.copy_s(nbytes, "host", "disk")


def _short(program: Program, mesh: Mesh, captured: Collection[int]) -> str:
    """What is wrong where the disk cannot hold two versions of the state, one of what was captured, and what a step
    writes there.
    """
    most = mesh.capacity_bytes("disk")
    inputs = [
        (program.values[i], 1 if k in captured else 2)
        for k, i in enumerate(program.inputs)
        if program.values[i].tier == "disk"
    ]
    own = [
        (program.values[o], 1)
        for node in program.nodes
        if node.target.startswith("colofunc.to_disk")
        for o in node.results
    ]
    needed = 0
    for rank in distinct_ranks(program, mesh):  # each has a part of the disk, and what exists on it
        here = [value.nbytes * versions for value, versions in (*inputs, *own) if _exists(value, mesh, rank)]
        needed = max(needed, sum(here))
    if most is None or needed <= most:
        return ""
    ranks = f" ({mesh.node_ranks} ranks share a node's)" if mesh.node_ranks > 1 else ""
    return (
        f"two versions of the state on disk and what a step writes there for itself take {size_text(needed)} a rank, "
        "the topology has "
        f"{size_text(most)}{ranks}; use more {'nodes' if ranks else 'ranks'}, a larger disk, or more host memory "
        "(host=)"
    )


def _exists(value: Value, mesh: Mesh, rank: int) -> bool:
    return value.layout is None or holds(value.layout.at, mesh, rank)


def _ground(program: Program, mesh: Mesh, lanes: Lanes, given: Mapping[int, str]) -> Ground:
    """Positions take as long as the device is held up there: what runs beside it takes none."""
    found = lies(program)
    seconds = tuple(later - now for now, later in pairwise((*lanes.starts_s, lanes.end_s)))
    held = memory(program).timeline.get("host", (0,) * len(program.nodes))
    tiers = {found.home[program.inputs[k]]: tier for k, tier in given.items() if tier == "disk"}
    return Ground(
        program, found, held, readers(program, found), seconds, seconds, links_of(mesh, TIERS), tiers, tiers=TIERS
    )


def _states(ground: Ground, given: Mapping[int, str], captured: Mapping[int, bool]) -> dict[int, str | None]:
    """Storages of inputs that lie on the host between steps; not what is in memory in any case, because its owner has
    it there.
    """
    program = ground.program
    return {
        ground.lies.home[i]: given.get(k)
        for k, i in enumerate(program.inputs)
        if program.values[i].tier == "host"
        and i not in program.constants
        and (given.get(k) == "disk" or not captured.get(k))
    }


def _words(ground: Ground, items: Collection[int], trace: Trace, found: Residency, longer_s: float) -> Iterator[str]:
    away = [k for k, item in enumerate(trace.items) if item.home and k not in found.residents]
    if not away:
        return
    by_role: dict[str, int] = {}
    for k, s in enumerate(items):
        if k in set(away):
            role = ground.program.values[ground.lies.storages[s].value].role
            by_role[role] = by_role.get(role, 0) + trace.items[k].nbytes
    kept = ", ".join(
        f"{size_text(n)} of {'frozen weights' if role == 'frozen' else f'{role}s'}"
        for role, n in sorted(by_role.items())
    )
    read, written = map(size_text, found.moved_bytes)
    yield f"on disk: {kept}; read a step: {read}, written: {written}, {time_text(max(0.0, longer_s))} of it not hidden"
