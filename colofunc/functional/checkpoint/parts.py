"""Who writes what: the leaves of a state as pieces, each stored once, balanced over the ranks.

Problem: replicas of a part lie on many ranks and must be written by one. Idea: every rank walks the same leaves in the
same order and gives each distinct part to that holder which has the fewest bytes so far; no message is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import attrs
import torch
import torch.distributed as dist

from colofunc import compat
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, MeshError
from colofunc.executors.backend import backend_for
from colofunc.executors.disk.tensors import in_memory
from colofunc.executors.watch import Watch
from colofunc.functional.checkpoint.files import PieceToWrite, dtype_name
from colofunc.mesh import Mesh
from colofunc.program.lazy import make
from colofunc.spec.layout import Layout
from colofunc.spec.regions import Region, owners, unpadded
from colofunc.spec.strategies import enumerate_layouts


@attrs.frozen
class Ranks:
    """The processes that save together: this one's number, how many there are, and the tie between them."""

    rank: int
    size: int
    watch: Watch | None

    @staticmethod
    def of(meshes: set[Mesh]) -> Ranks:
        """The processes of these meshes; without any, those of the process group."""
        sizes = {mesh.size for mesh in meshes}
        real = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        mesh = next(iter(meshes), Mesh(ranks=dist.get_world_size()) if real else Mesh())
        backend = backend_for(mesh)
        if backend.watch is None:
            return Ranks(0, 1, None)
        if sizes - {dist.get_world_size()}:
            raise MeshError(
                f"a state on meshes of {sorted(sizes)} ranks cannot be saved by {dist.get_world_size()} processes"
            )
        return Ranks(dist.get_rank(), dist.get_world_size(), backend.watch)


@attrs.frozen
class StateLeaf:
    """One tensor of the state, and which rank writes which part of it."""

    name: str
    tensor: torch.Tensor
    writers: tuple[tuple[Region, int, int], ...]  # (what, the rank that writes it, the mesh rank whose part it is)

    @property
    def layout(self) -> Layout | None:
        return self.tensor.sharding if isinstance(self.tensor, DTensor) else None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {"shape": list(self.tensor.shape), "dtype": dtype_name(self.tensor.dtype)}
        if self.layout is not None:
            found["dims"] = [list(map(list, dim)) for dim in self.layout.dims]
            found["tier"] = self.layout.tier
            if self.layout.at is not None:
                found["at"] = [self.layout.at[0], list(self.layout.at[1])]
        return found

    def items(self, rank: int) -> list[PieceToWrite]:
        """What `rank` writes of it."""
        return [item for item, _ in self.written(rank)]

    def written(self, rank: int) -> list[tuple[PieceToWrite, int]]:
        """What `rank` writes of it, and the mesh rank whose part that is."""
        on_disk = self.layout is not None and self.layout.tier == "disk"
        found = []
        for region, writer, held in self.writers:
            if writer == rank:
                name = self.name if len(self.writers) == 1 else f"{self.name}{region.text()}"
                found.append((PieceToWrite(name, self.tensor.dtype, region, partial(self._value, held), on_disk), held))
        return found

    def _value(self, held: int) -> torch.Tensor:
        x = self.tensor
        if not isinstance(x, DTensor):
            return make(x)
        return unpadded(in_memory(self.part(held)), x.sharding, x.mesh, held).contiguous()

    def part(self, held: int) -> torch.Tensor:
        """The part of a mesh rank of this process, of a tensor that is distributed."""
        assert isinstance(self.tensor, DTensor)
        parts = self.tensor.parts
        return parts[held] if len(parts) == self.tensor.mesh.size else parts[0]


def carried_out(x: torch.Tensor) -> torch.Tensor:
    """A tensor whose elements ranks hold: of a pending sum what it comes to, cut where it can be.

    Collective where it is one.
    """
    if not isinstance(x, DTensor) or not x.sharding.pending:
        return x
    axes = [axis for axis, _ in x.sharding.pending]
    bare = x.sharding.with_pending(())
    options = [
        layout.with_tier(bare.tier).with_at(bare.at) for layout in enumerate_layouts(tuple(x.shape), x.mesh, axes, bare)
    ]
    return x.redistribute(min((bare, *options), key=lambda layout: prod(layout.local_shape)))


def assign_writers(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> list[StateLeaf]:
    """Leaves with their writers; equal on all ranks."""
    load = [0] * ranks.size

    def writer(holders: list[int], nbytes: int) -> int:
        chosen = min(holders, key=lambda r: load[r]) if ranks.size > 1 else 0
        load[chosen] += nbytes
        return chosen

    leaves = []
    for name, x in tensors.items():
        check_has_elements(name, x)
        if isinstance(x, DTensor):
            parts = owners(x.sharding, x.mesh)
        else:
            parts = {Region.whole(x.shape): list(range(ranks.size))}
        writers = []
        for region, holders in parts.items():
            chosen = writer(holders, region.numel * x.dtype.itemsize)
            writers.append((region, chosen, chosen if ranks.size > 1 else holders[0]))
        leaves.append(StateLeaf(name, x, tuple(writers)))
    return leaves


def check_has_elements(name: str, x: torch.Tensor) -> None:
    """Raise InputError for a leaf that has no elements to write."""
    if x.layout != torch.strided or x.is_quantized:
        raise InputError(f"{name} is {x.layout}, which safetensors cannot hold; save x.to_dense()")
    if x.is_meta or isinstance(x, compat.FakeTensor):
        raise InputError(f"{name} {tuple(x.shape)} has no data yet; save what step.init or step returned")
