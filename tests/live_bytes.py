"""Measured memory: what every simulated rank really holds at each position of a program.

Problem: an accountant that is never checked drifts from what runs. Idea: run a program line by line, and after every
node add up the distinct storages behind the variables that are alive, per rank and tier. `program.memory` must say the
same numbers, to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colofunc.errors import CapacityError
from colofunc.executors.disk.tensors import OnDisk
from colofunc.executors.loops import SENT
from colofunc.executors.simulated import Shards, SimulatedProgram, distinct, own_memory
from colofunc.executors.source import ABSENT, Writer
from colofunc.mesh import Mesh
from colofunc.program.facts import lifetimes
from colofunc.program.ir import Node, Program
from colofunc.program.memory import memory
from colofunc.program.memory_report import place_text
from colofunc.program.places import has_places, on_rank

Holder = tuple[Collection[int], str]  # the ranks that hold a variable, and the tier of memory that it lies in


@attrs.frozen
class Measured:
    """Live bytes while node k runs (its operands and results together), the most of any rank; the most of each rank; and the outputs.

    rank_peaks: (rank, tier) -> the most bytes that the rank holds there at any time.
    """

    timeline: dict[str, tuple[int, ...]]
    rank_peaks: dict[tuple[int, str], int]
    outputs: list[Shards]

    @property
    def peak_bytes(self) -> dict[str, int]:
        return {tier: max(line, default=0) for tier, line in self.timeline.items()}

    def peaks_of_ranks(self, ranks: int, tier: str = "device") -> list[int]:
        """Of each of so many ranks, the most bytes that it holds."""
        return [self.rank_peaks.get((rank, tier), 0) for rank in range(ranks)]


def measure(program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> Measured:
    """Run `program` on the simulated mesh and look at what is held after each node, before anything is freed.

    A loop is one node: the most that is held in any trip of it. Raises CapacityError at the first node behind which a rank
    holds more than a tier of the mesh's topology has.
    """
    holders = Holders(program, mesh)
    runner = SimulatedProgram(program, mesh, tap=holders.behind)
    partition, flat = distinct(inputs, mesh.size)
    own_memory(flat, partition, runner._written)
    writer = runner.write(partition, flat[0].device if flat else torch.device("cpu"), sparing=False, look=holders.look_line)
    returned = [writer.everywhere(o) for o in program.outputs]
    env = dict(writer.names)
    env.update(zip(writer.input_names, flat, strict=True))
    by_node: list[list[str]] = [[] for _ in program.nodes]
    for text, origin in zip(writer.lines, writer.origin, strict=True):
        by_node[origin].append(text)
    timeline: dict[str, list[int]] = {tier: [] for tier in sorted(holders.tiers | {"device"})}
    inside: dict[str, int] = {}
    rank_peaks: dict[tuple[int, str], int] = {}

    between = {name: holder for names in holders.inside for name, holder in names.items()}

    def look(here: Mapping[str, Holder]) -> None:
        """The most that a rank holds now, per tier; `inside` is the most of all looks since it was emptied."""
        held = _held([*_variables(env, here), *_kept(env, between)], mesh.size)
        for holder, nbytes in held.items():
            rank_peaks[holder] = max(rank_peaks.get(holder, 0), nbytes)
        for tier in timeline:
            inside[tier] = max(inside.get(tier, 0), *(held.get((rank, tier), 0) for rank in range(mesh.size)))
        for rank in range(mesh.size) if mesh.topology.ranks else ():
            capacity_bytes = mesh.device_bytes(rank)
            if capacity_bytes is not None and held.get((rank, "device"), 0) > capacity_bytes:
                raise CapacityError(
                    f"simulated rank {rank} holds {held[rank, 'device']:,} B of device memory; topology {mesh.topology.name!r} has "
                    f"{capacity_bytes:,} B there. Try: a plan of this mesh"
                )

    with torch.no_grad():
        for at, lines in enumerate(by_node):
            inside.clear()
            env["look"] = lambda k, at=at: look({**holders.outside[at], **holders.inside[k]})
            frees = [text for text in lines if text.startswith("del ")]
            exec("\n".join(text for text in lines if not text.startswith("del ")), env)
            look(holders.outside[at])
            for tier, line in timeline.items():
                line.append(inside[tier])
                _check(program, mesh, tier, line)
            exec("\n".join(frees), env)
    outputs = [[env[name] for name in names] for names in returned]
    return Measured({tier: tuple(line) for tier, line in timeline.items()}, rank_peaks, outputs)


class Holders:
    """Which rank holds which variable, as the source is written: a rank that leaves a shared tensor no longer holds it.

    `outside`: behind each node of the program; `inside`: at each look within a loop, what its body has.
    Hidden variables of asynchronous starts are the simulator's, not a rank's. A rank has what it makes and does not read, as others do,
    until its next node only, whoever reads it there.
    """

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.outside: list[dict[str, Holder]] = []
        self.inside: list[dict[str, Holder]] = []
        self._last = {**dict.fromkeys(program.inputs, len(program.nodes)), **lifetimes(program)}
        # Of what all ranks make some may read nothing.
        self._read_by: list[set[int]] | None = None
        if has_places(program):
            parts = [on_rank(program, mesh, rank).program for rank in range(mesh.size)]
            self._read_by = [{*part.outputs, *part.last_uses, *part.inputs} for part in parts]

    @property
    def tiers(self) -> set[str]:
        return {tier for names in (*self.outside, *self.inside) for _, tier in names.values()}

    def behind(self, writer: Writer, index: int, node: Node) -> None:
        """A tap that writes nothing. What a loop gathers belongs to the node behind which it is known."""
        if not writer.loops:
            inputs = set(writer.program.inputs)
            alive = {i for i in writer.where if i in inputs or i in node.outs or self._last.get(i, -1) >= index}
            self.outside.append(_holders(writer, alive, self._read_by, node.results))

    def look_line(self, writer: Writer) -> str:
        """The line behind a node of a loop's body. What was sent is its receiver's from the part on that reads it."""
        self.inside.append(_holders(writer, set(writer.where) - writer.on_the_way))
        return f"look({len(self.inside) - 1})"


def _holders(
    writer: Writer, ids: Collection[int], read_by: Sequence[Collection[int]] | None = None, made: Collection[int] = ()
) -> dict[str, Holder]:
    """read_by: of each rank the values that it reads or gives; None: all read all. made: what a node has made just now."""
    who: dict[str, set[int]] = {}
    tiers: dict[str, str] = {}
    for id in ids:
        for rank, name in enumerate(writer.where[id]):
            if name == ABSENT or (read_by is not None and id not in read_by[rank] and id not in made):
                continue
            who.setdefault(name, set()).add(rank)
            tiers[name] = writer.program.values[id].tier
    return {name: (ranks, tiers[name]) for name, ranks in who.items()}


def _check(program: Program, mesh: Mesh, tier: str, line: Sequence[int]) -> None:
    capacity, at = mesh.capacity_bytes(tier), len(line) - 1
    if tier == "device" and mesh.topology.ranks:  # each by its own
        return
    if capacity is not None and line[at] > capacity:
        raise CapacityError(
            f"a simulated rank holds {line[at]:,} B of {tier} memory at {place_text(program, at)}; topology "
            f"{mesh.topology.name!r} has {capacity:,} B. The accountant counts {memory(program).summary(tier)}"
        )


def _variables(env: Mapping[str, object], holders: Mapping[str, Holder]) -> Iterator[tuple[object, Holder]]:
    return ((env.get(name), holder) for name, holder in holders.items())


def _kept(env: Mapping[str, object], holders: Mapping[str, Holder]) -> Iterator[tuple[object, Holder]]:
    """What is kept of microbatches between the parts of a loop. What is on its way to another rank belongs to none."""
    for variable, kept in env.items():
        if variable.startswith("kept") and isinstance(kept, dict):
            yield from ((tensor, holders[name]) for (name, _), tensor in kept.items() if not name.startswith(SENT))


def _held(tensors: Iterable[tuple[object, Holder]], ranks: int) -> dict[tuple[int, str], int]:
    seen: set[tuple[int, int]] = set()
    held: dict[tuple[int, str], int] = {}
    for tensor, (who, tier) in tensors:
        if not isinstance(tensor, torch.Tensor):
            continue
        if isinstance(tensor, OnDisk):
            where, nbytes = id(tensor), tensor.nbytes
        else:
            storage = tensor.untyped_storage()
            where, nbytes = storage.data_ptr(), storage.nbytes()
        for rank in who:
            if (rank, where) in seen:
                continue
            seen.add((rank, where))
            key = (rank, tier)
            held[key] = held.get(key, 0) + nbytes
    return held


class Held(TorchDispatchMode):
    """The most bytes that were alive at once of those that operators inside have made. operands: their storages do not count."""

    def __init__(self, operands: Any) -> None:
        super().__init__()
        self._operands = {x.untyped_storage()._cdata for x in operands if isinstance(x, Tensor)}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        for x in tree_leaves(made):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self._operands:
                storage = x.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self._alive.values()))
        return made
