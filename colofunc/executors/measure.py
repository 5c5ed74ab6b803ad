"""Measured memory: what every simulated rank really holds at each position of a program.

Problem: an accountant that is never checked drifts from what runs. Idea: run a program line by line, and after every
node add up the distinct storages behind the variables that are alive, per rank and tier. `program.memory` must say the
same numbers, to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch

from colofunc.errors import CapacityError
from colofunc.executors.simulated import Shards, SimulatedProgram, distinct, own_memory
from colofunc.executors.source import Writer
from colofunc.mesh import Mesh
from colofunc.program.ir import Program
from colofunc.program.memory import memory
from colofunc.program.memory_report import place_text


@attrs.frozen
class Measured:
    """Live bytes while node k runs (its operands and results together), the most of any rank; and the outputs."""

    timeline: dict[str, tuple[int, ...]]
    outputs: list[Shards]

    @property
    def peak_bytes(self) -> dict[str, int]:
        return {tier: max(line, default=0) for tier, line in self.timeline.items()}


def measure(program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> Measured:
    """Run `program` on the simulated mesh and look at what is held after each node, before anything is freed.

    A loop is one node: the most that is held in any trip of it. Raises CapacityError at the first node behind which a rank
    holds more than a tier of the mesh's topology has.
    """
    runner = SimulatedProgram(program, mesh)
    partition, flat = distinct(inputs, mesh.size)
    own_memory(flat, partition, runner._written)
    writer = runner.write(partition, flat[0].device if flat else torch.device("cpu"), sparing=False, look="look()")
    env = dict(writer.names)
    env.update(zip(writer.input_names, flat, strict=True))
    by_node: list[list[str]] = [[] for _ in program.nodes]
    for text, origin in zip(writer.lines, writer.origin, strict=True):
        by_node[origin].append(text)
    owners = _owners(program, writer)
    tiers = {name: "device" for where in writer.inside for names in where.values() for name in names}
    tiers |= {name: program.values[id].tier for id, names in writer.where.items() for name in names}
    timeline: dict[str, list[int]] = {tier: [] for tier in sorted(set(tiers.values()) | {"device"})}
    inside: dict[str, int] = {}

    def look() -> dict[str, int]:
        """The most that a rank holds now, per tier; `inside` is the most of all looks since it was emptied."""
        held = _held(env, owners, tiers, mesh.size)
        for tier in timeline:
            inside[tier] = max(inside.get(tier, 0), *(held.get((rank, tier), 0) for rank in range(mesh.size)))
        return inside

    env["look"] = look
    with torch.no_grad():
        for lines in by_node:
            inside.clear()
            frees = [text for text in lines if text.startswith("del ")]
            exec("\n".join(text for text in lines if not text.startswith("del ")), env)
            held = look()
            for tier, line in timeline.items():
                line.append(held[tier])
                _check(program, mesh, tier, line)
            exec("\n".join(frees), env)
    outputs = [[env[name] for name in writer.where[o]] for o in program.outputs]
    return Measured({tier: tuple(line) for tier, line in timeline.items()}, outputs)


def _check(program: Program, mesh: Mesh, tier: str, line: Sequence[int]) -> None:
    capacity, at = mesh.capacity_bytes(tier), len(line) - 1
    if capacity is not None and line[at] > capacity:
        raise CapacityError(
            f"a simulated rank holds {line[at]:,} B of {tier} memory at {place_text(program, at)}; topology "
            f"{mesh.topology.name!r} has {capacity:,} B. The accountant counts {memory(program).summary(tier)}"
        )


def _owners(program: Program, writer: Writer) -> dict[str, set[int]]:
    """Variable -> the ranks that hold it. Hidden variables of asynchronous starts are the simulator's, not a rank's."""
    owners: dict[str, set[int]] = {}
    for names in [names for where in (writer.where, *writer.inside) for names in where.values()]:
        for rank, name in enumerate(names):
            owners.setdefault(name, set()).add(rank)
    return owners


def _held(env: dict[str, object], owners: dict[str, set[int]], tiers: dict[str, str], ranks: int) -> dict[tuple[int, str], int]:
    seen: set[tuple[int, int]] = set()
    held: dict[tuple[int, str], int] = {}
    for name, who in owners.items():
        tensor = env.get(name)
        if not isinstance(tensor, torch.Tensor):
            continue
        storage = tensor.untyped_storage()
        for rank in who:
            if (rank, storage.data_ptr()) in seen:
                continue
            seen.add((rank, storage.data_ptr()))
            key = (rank, tiers[name])
            held[key] = held.get(key, 0) + storage.nbytes()
    return held
