"""The meaning of a layout, by definition: every rank's part of a global tensor.

What places tensors (`spec.transfer`) and what lowers steps are tested against this. It is written for clarity: reshape
each dim to its atoms, index the atoms that carry mesh axes with the rank's coordinates, merge the rest.
"""

from __future__ import annotations

import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Atom, Layout
from colofunc.spec.parts import holds


def part(x: torch.Tensor, layout: Layout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Rank `rank`'s part of the global tensor `x`. A pending sum gives the whole value to index 0 and zeros elsewhere.

    An empty tensor where the value does not exist.
    """
    if not holds(layout.at, mesh, rank):
        return x.new_empty(0)
    padded = x.new_zeros(layout.padded_shape)
    padded[tuple(slice(size) for size in layout.shape)] = x
    atoms: list[Atom] = []
    for dim in layout.dims:
        atoms += dim
    where = mesh.coordinates(rank)
    split = padded.reshape([size for size, _ in atoms])
    mine = split[tuple(slice(None) if axis is None else where[axis] for _, axis in atoms)]
    out = mine.reshape(layout.local_shape)
    # The terms add up to the value: one rank has all of it.
    if any(how == "sum" and where[axis] for axis, how in layout.pending):
        out = torch.zeros_like(out)
    return out


def parts(x: torch.Tensor, layout: Layout, mesh: Mesh) -> list[torch.Tensor]:
    """All ranks' parts in rank order."""
    return [part(x, layout, mesh, rank) for rank in range(mesh.size)]
