"""Transfers: which elements go from which rank to which where a tensor of one mesh becomes one of another.

Problem: two meshes cut a tensor for other axes, in other sizes and stripes, and to bring it together in between takes
all of it on every rank. Idea: a part is a product of index sets (`regions`), so what a rank wants is the overlaps of
its part with the parts that there are, and each of them comes from one rank that holds it: the same rank if it can,
which sends nothing.

    (dp b) i on dp=2   ->   b (tp i) on tp=2       rank 0 keeps a quarter, sends a quarter to rank 1, and gets one from there

    plan = Transfer(source, mesh, target, other)
    plan.received(rank)        # the pieces that rank's part in `target` is made of
    plan.sent(rank)            # the pieces of its part in `source` that other ranks want

What lies in files is brought to a mesh in the same way: there a piece comes from a stored region (`pieces_of`,
`assembled`). Of a tensor that is whole in this process, a rank's part is one piece (`part`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Generic, TypeVar

import attrs
import torch

from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.parts import holds
from colofunc.spec.regions import (
    Pick,
    Region,
    carrier,
    common,
    count,
    cut,
    owners,
    padded,
    put,
    region_of,
    take,
    unpadded,
)

SourceT = TypeVar("SourceT")


@attrs.frozen(eq=False)
class TransferPiece(Generic[SourceT]):
    """Elements that a source has and a part wants: where they lie in the region of each.

    `source`: a rank, or what is stored.
    """

    source: SourceT
    there: tuple[Pick, ...]
    here: tuple[Pick, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(count(pick) for pick in self.here)

    @property
    def in_order(self) -> bool:
        """Whether it lies in the part as one box."""
        return all(isinstance(pick, slice) and pick.step == 1 for pick in self.here)


def pieces_of(wanted: Region, sources: Iterable[tuple[Region, SourceT]]) -> list[TransferPiece[SourceT]]:
    """The pieces that a region is made of, in the order of the sources, which overlap nowhere."""
    found = []
    for region, source in sources:
        picks = common(region, wanted)
        if picks is not None:
            found.append(TransferPiece(source, *picks))
    return found


def assembled(
    out: torch.Tensor, pieces: Iterable[TransferPiece[SourceT]], value: Callable[[TransferPiece[SourceT]], torch.Tensor]
) -> torch.Tensor:
    """`out` with the value of every piece written into it, one after another: beside it, memory holds one piece at a
    time.
    """
    for piece in pieces:
        put(carrier(out), piece.here, carrier(value(piece).contiguous()))
    return out


def part(whole: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """A rank's part of a tensor that is whole in this process; a view of it where it can be.

    A pending sum gives the whole value to index 0 and zeros elsewhere. An empty tensor where the value does not exist.
    Raises SpecError where the tensor has another shape than the layout says.
    """
    if whole.shape != layout.shape:
        raise SpecError(
            f"a tensor of shape {tuple(whole.shape)} is to lie as {layout.text()!r} of {layout.shape}. "
            "Try: the shape that was said of it"
        )
    if not holds(layout.at, mesh, rank):
        return whole.new_empty(0)
    out = whole if layout.is_replicated else cut(whole, region_of(layout, mesh, rank))
    if layout.is_padded:
        out = padded(out, layout, mesh, rank)
    if layout.pending:
        where = mesh.coordinates(rank)
        # The terms add up to the value: one rank has all of it.
        if any(how == "sum" and where[axis] for axis, how in layout.pending):
            out = torch.zeros_like(out)
    return out


@attrs.frozen(eq=False)
class Transfer:
    """From a layout on one mesh to a layout on another, without pending sums. Ranks of both are numbered alike."""

    source: Layout
    mesh: Mesh
    target: Layout
    other: Mesh

    @cached_property
    def _owners(self) -> dict[Region, list[int]]:
        return owners(self.source, self.mesh)

    def received(self, rank: int) -> list[TransferPiece[int]]:
        """The pieces of a rank's new part, by who sends them."""
        if not holds(self.target.at, self.other, rank):
            return []
        senders = ((region, _sender(ranks, rank)) for region, ranks in self._owners.items())
        return sorted(pieces_of(region_of(self.target, self.other, rank), senders), key=lambda piece: piece.source)

    def sent(self, rank: int) -> dict[int, TransferPiece[int]]:
        """The pieces of a rank's old part that other ranks get from it, by who gets them."""
        found: dict[int, TransferPiece[int]] = {}
        if not holds(self.source.at, self.mesh, rank):
            return found
        mine = region_of(self.source, self.mesh, rank)
        holders = self._owners.get(mine, [rank])
        for target in range(self.other.size):
            if target == rank or _sender(holders, target) != rank or not holds(self.target.at, self.other, target):
                continue
            for piece in pieces_of(region_of(self.target, self.other, target), [(mine, rank)]):
                found[target] = piece
        return found

    def taken(self, part: torch.Tensor, piece: TransferPiece[int]) -> torch.Tensor:
        """A piece out of its sender's part; a view where it can be."""
        return take(unpadded(part, self.source, self.mesh, piece.source), piece.there)

    def made(self, rank: int, value: Callable[[TransferPiece[int]], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """A rank's new part, in memory of its own. `value`: what a piece holds; `like`: dtype and device."""
        if not holds(self.target.at, self.other, rank):
            return like.new_empty(0)
        out = like.new_empty(region_of(self.target, self.other, rank).shape)
        return padded(assembled(out, self.received(rank), value), self.target, self.other, rank)


def _sender(ranks: Sequence[int], target: int) -> int:
    """Of those that hold the same, who sends it: the rank itself, or another one for each."""
    return target if target in ranks else ranks[target % len(ranks)]
