"""State on disk: room for it is taken before anything is placed, and each part goes there as soon as it is made.

    shelves = Shelves("/nvme", leaves, layouts, [False] * len(leaves), mesh, backend)   # takes the room, or fails
    for leaf, layout in zip(leaves, layouts):
        shelves.keep(place(leaf, layout, mesh, backend), layout)    # on disk where the layout says so; the part may go
    shelves.commit()

What lies on disk already stays where it is, unless it is to be copied. Ranks of one process that hold the same part
share its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from colofunc.compiler.lowered import Lowered
from colofunc.dtensor.placed import SHELF
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.executors.backend import Backend
from colofunc.executors.disk.tensors import ChunkRoom, OnDisk, in_memory
from colofunc.mesh import Mesh
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout
from colofunc.spec.parts import NOTHING, holds, part_key, shared_parts


class Shelves:
    """Room on disk for those of a step's inputs that are to lie there and do not yet; for nothing where no directory is
    named.
    """

    def __init__(
        self,
        directory: str | bool | None,
        leaves: Sequence[torch.Tensor],
        layouts: Sequence[Layout],
        copied: Sequence[bool],
        mesh: Mesh,
        backend: Backend,
        once: bool = False,
    ) -> None:
        """once: what is kept is only read from then on."""
        self._mesh, self._ranks, self._backend = mesh, backend.ranks(mesh), backend
        new: list[tuple[torch.Tensor, Layout]] = []
        for leaf, layout, copy in zip(leaves, layouts, copied, strict=False):
            if layout.tier == "disk" and (copy or not self._is_there(leaf)):
                new.append((leaf, layout))
        if any(directory is True or not isinstance(leaf, DTensor) for leaf, _ in new):
            named(directory)
        sizes = [_part_bytes(leaf, layout) for leaf, layout in new for _ in self._distinct(layout)]
        self._room = (
            None if directory is None or not sizes else ChunkRoom(named(directory), sizes, self._ranks[0], once)
        )

    def _distinct(self, layout: Layout) -> set[tuple[int, ...]]:
        """The distinct parts of the ranks in this process, of those that have one."""
        return {part_key(layout, self._mesh, rank) for rank in self._ranks} - {NOTHING}

    def keep(self, parts: list[torch.Tensor], layout: Layout) -> list[torch.Tensor]:
        """The parts, on disk where their layout says so and a directory is named."""
        if self._room is None or layout.tier != "disk" or _have_places(parts, layout, self._mesh, self._ranks):
            return parts
        room, of_rank = self._room, dict(zip(self._ranks, parts, strict=True))

        def kept(rank: int) -> torch.Tensor:
            exists = holds(layout.at, self._mesh, rank)
            return room.keep(in_memory(of_rank[rank])) if exists else of_rank[rank]

        return shared_parts(layout, self._mesh, self._ranks, kept)

    def _is_there(self, leaf: torch.Tensor) -> bool:
        if not isinstance(leaf, DTensor):
            return False
        return _have_places(leaf.parts_in_flight, leaf.sharding, leaf.mesh, self._backend.ranks(leaf.mesh))

    def commit(self) -> None:
        """What was kept counts from now on, whatever happens to the step."""
        if self._room is not None:
            self._room.store.commit()


def shelves_of_hidden(low: Lowered, directory: str | bool | None, backend: Backend) -> Shelves:
    """Room for those of the hidden inputs that lie on disk and have no place there yet."""
    new: list[torch.Tensor] = []
    layouts: list[Layout] = []
    for x, layout, dtype in zip(low.hidden, low.hidden_layouts, low.hidden_dtypes, strict=True):
        if not isinstance(x, DTensor) and SHELF.has(x, layout, low.mesh, backend, dtype) is None:
            new.append(torch.empty(x.shape, dtype=dtype, device="meta"))
            layouts.append(layout)
    return Shelves(directory, new, layouts, [True] * len(new), low.mesh, backend, once=True)


def named(directory: str | bool | None) -> str:
    """The directory. Raises InputError where a plan is to run that was made for a disk which has none."""
    if not isinstance(directory, str):
        raise InputError(
            "this plan keeps something on disk, and no directory is named for it. Try: cf.offload(step, ..., "
            "disk='/nvme/me'), with_plan(plan) where it was planned elsewhere"
        )
    return directory


def _have_places(parts: Sequence[torch.Tensor], layout: Layout, mesh: Mesh, ranks: Sequence[int]) -> bool:
    """Whether the parts of these ranks lie in a store, where they exist."""
    return all(_has_place(part) for part, rank in zip(parts, ranks, strict=True) if holds(layout.at, mesh, rank))


def _has_place(part: torch.Tensor) -> bool:
    """Whether it lies in a store; one of a checkpoint is there to be read only."""
    return isinstance(part, OnDisk) and part.store is not None


def _part_bytes(leaf: torch.Tensor, layout: Layout) -> int:
    nbytes = leaf.dtype.itemsize
    for size in layout.local_shape:
        nbytes *= size
    return nbytes


def scratch_sizes(program: Program, mesh: Mesh, ranks: Sequence[int]) -> list[int]:
    """Bytes of what each of some ranks writes to disk within a step."""
    sizes = []
    for node in program.nodes:
        if node.target.startswith("colofunc.to_disk") and node.outs[0]:
            nbytes = program.values[node.outs[0]].nbytes
            sizes += [nbytes for rank in ranks if holds(node.on, mesh, rank)]
    return sizes
