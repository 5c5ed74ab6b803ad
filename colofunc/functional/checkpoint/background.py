"""Saving beside the steps: what lies in memory is written first, what lies on disk is read behind it, as it was.

Problem: a save in the background copies the state, and memory has no room for what lies on disk. Idea: what counts on
disk stays there for one more step, so it is held (`executors/disk/kept_versions.py`) and read while training goes on. A
copy of the rest would need room too, where the disk is used for want of it: steps go on when it is written.

    beside = BackgroundSave()
    items = beside.items(leaves, rank, Reader("cf.save to '/ckpt'"))    # to be written in this order, in a thread
    beside.taken.wait()                     # from now on steps may write
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Event

import attrs
import torch

from colofunc.dtensor.tensor import DTensor
from colofunc.executors.disk.kept_versions import ChunkVersion, Reader
from colofunc.executors.disk.tensors import OnDisk
from colofunc.functional.checkpoint.files import PieceToWrite
from colofunc.functional.checkpoint.parts import StateLeaf
from colofunc.spec.regions import unpadded


@attrs.frozen(eq=False)
class BackgroundSave:
    """`holds`: what lies on disk, until it is read. `taken`: set when the next step may write in place."""

    holds: list[ChunkVersion] = attrs.field(factory=list)
    taken: Event = attrs.field(factory=Event)

    def items(self, leaves: Sequence[StateLeaf], rank: int, reader: Reader) -> list[PieceToWrite]:
        """What `rank` writes, as it is now, if no step writes to what lies in memory before it is `taken`. reader: for
        steps that wait.
        """
        try:
            return self._items(leaves, rank, reader)
        except BaseException:
            self.let_go()
            raise

    def _items(self, leaves: Sequence[StateLeaf], rank: int, reader: Reader) -> list[PieceToWrite]:
        first, behind = list[PieceToWrite](), list[PieceToWrite]()
        for leaf in leaves:
            for item, held in leaf.written(rank):
                x = leaf.tensor
                part = leaf.part(held) if isinstance(x, DTensor) else None
                if isinstance(x, DTensor) and isinstance(part, OnDisk) and part.store is not None:
                    self.holds.append(part.store.hold(part.number, reader))
                    item = attrs.evolve(item, value=partial(self._read, self.holds[-1], part, x, held))
                    behind.append(item)
                else:
                    first.append(attrs.evolve(item, on_disk=isinstance(part, OnDisk)))
        return [*first, *behind]

    def _read(self, held: ChunkVersion, part: OnDisk, x: DTensor, rank: int) -> torch.Tensor:
        self.taken.set()
        flat = held.read()
        held.release()
        whole = flat.view(part.dtype).as_strided(part.shape, part.stride())
        return unpadded(whole, x.sharding, x.mesh, rank).contiguous()

    def let_go(self) -> None:
        """Nothing is read any more."""
        for held in self.holds:
            held.release()
        self.taken.set()
