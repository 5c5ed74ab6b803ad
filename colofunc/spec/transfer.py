"""Transfers: which elements go from which rank to which where a tensor of one mesh becomes one of another.

Problem: two meshes cut a tensor for other axes, in other sizes and stripes, and to bring it together in between takes all of it on every
rank. Idea: a part is a product of index sets (`regions`), so what a rank wants is the overlaps of its part with the parts that there are,
and each of them comes from one rank that holds it: the same rank if it can, which sends nothing.

    (dp b) i on dp=2   ->   b (tp i) on tp=2       rank 0 keeps a quarter, sends a quarter to rank 1, and gets one from there

    plan = Transfer(source, mesh, target, other)
    plan.received(rank)        # the pieces that rank's part in `target` is made of
    plan.sent(rank)            # the pieces of its part in `source` that other ranks want
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.parts import holds
from colofunc.spec.regions import Pick, Region, carrier, common, count, owners, padded, put, region_of, take, unpadded


@attrs.frozen(eq=False)
class Piece:
    """Elements that one rank has and another wants: where they lie in the region of each."""

    source: int
    target: int
    there: tuple[Pick, ...]
    here: tuple[Pick, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(count(pick) for pick in self.here)


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

    def received(self, rank: int) -> list[Piece]:
        """The pieces of a rank's new part, by who sends them."""
        found, wanted = list[Piece](), self._wanted(rank)
        if wanted is None:
            return found
        for region, ranks in self._owners.items():
            picks = common(region, wanted)
            if picks is not None:
                found.append(Piece(_sender(ranks, rank), rank, *picks))
        return sorted(found, key=lambda piece: piece.source)

    def sent(self, rank: int) -> list[Piece]:
        """The pieces of a rank's old part that other ranks get from it, by who gets them."""
        if not holds(self.source.at, self.mesh, rank):
            return []
        mine, found = region_of(self.source, self.mesh, rank), list[Piece]()
        for target in range(self.other.size):
            wanted = self._wanted(target)
            if target == rank or wanted is None or _sender(self._owners.get(mine, [rank]), target) != rank:
                continue
            picks = common(mine, wanted)
            if picks is not None:
                found.append(Piece(rank, target, *picks))
        return found

    def taken(self, part: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece out of its sender's part; a view where it can be."""
        return take(unpadded(part, self.source, self.mesh, piece.source), piece.there)

    def made(self, rank: int, pieces: Sequence[Piece], value: Callable[[Piece], torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """A rank's new part, in memory of its own. `value`: what a piece holds; `like`: dtype and device."""
        if not holds(self.target.at, self.other, rank):
            return like.new_empty(0)
        out = like.new_empty(region_of(self.target, self.other, rank).shape)
        for piece in pieces:
            put(carrier(out), piece.here, carrier(value(piece).contiguous()))
        return padded(out, self.target, self.other, rank)

    def _wanted(self, rank: int) -> Region | None:
        """What a rank is to hold; None where that is nothing."""
        if not holds(self.target.at, self.other, rank):
            return None
        region = region_of(self.target, self.other, rank)
        return region if region.numel else None


def _sender(ranks: Sequence[int], target: int) -> int:
    """Of those that hold the same, who sends it: the rank itself, or another one for each."""
    return target if target in ranks else ranks[target % len(ranks)]
