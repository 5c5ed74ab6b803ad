"""Flat: a tensor as a range of a flat buffer that is split over axes (ZeRO chunks).

Problem: many small parameters make many small collectives. Idea: pack them into one flat buffer of `chunk` elements
and split the buffer evenly, wherever tensors begin and end. A rank's piece of one tensor is what of its range falls
into the rank's slice: a 1-D tensor, possibly empty.

>>> flat = Flat(chunk=12, offset=2, axes=("dp",))          # on dp=4 the slices are 0-3, 3-6, 6-9, 9-12
>>> [piece_range(flat, 5, i, Mesh(dp=4)) for i in range(4)]
[(0, 1), (1, 4), (4, 5), (5, 5)]

Collectives act on whole slices of the buffer, which are equal on all ranks: one gather gives every tensor in it.
Source: Rajbhandari et al., ZeRO (1910.02054); Fang et al., PatrickStar (2108.05818) for chunks of many tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import attrs
import torch

from colofunc.dtensor.convert import Conversion, Move, conversion
from colofunc.dtensor.layout import Layout, replicated
from colofunc.errors import SpecError
from colofunc.mesh import Mesh, wire_bytes


@attrs.frozen
class Flat:
    """A tensor at `offset` of a buffer of `chunk` elements, split evenly over `axes` (first is major)."""

    chunk: int
    offset: int
    axes: tuple[str, ...]


def slice_numel(flat: Flat, mesh: Mesh) -> int:
    """Elements of the buffer on each rank; SpecError where the buffer cannot be split evenly."""
    n = prod(mesh.axis_size(axis) for axis in mesh.atoms(flat.axes))
    if flat.chunk % n:
        raise SpecError(
            f"a buffer of {flat.chunk} elements is not split evenly over {flat.axes} of {mesh!r}; make it "
            f"a multiple of {n}"
        )
    return flat.chunk // n


def piece_range(flat: Flat, numel: int, index: int, mesh: Mesh) -> tuple[int, int]:
    """First and last (excluded) element of the flattened tensor that the rank with this index along `axes` holds."""
    if flat.offset < 0 or flat.offset + numel > flat.chunk:
        raise SpecError(f"{numel} elements at {flat.offset} do not fit a buffer of {flat.chunk}; use a larger chunk")
    size = slice_numel(flat, mesh)
    low, high = (min(max(edge - flat.offset, 0), numel) for edge in (index * size, (index + 1) * size))
    return low, high


def cut(x: torch.Tensor, flat: Flat, mesh: Mesh) -> list[torch.Tensor]:
    """All ranks' pieces of a global tensor, in rank order."""
    ends = [piece_range(flat, x.numel(), mesh.index(rank, flat.axes), mesh) for rank in range(mesh.size)]
    return [x.reshape(-1)[low:high] for low, high in ends]


def join_pieces(pieces: Sequence[torch.Tensor], flat: Flat, shape: Sequence[int], mesh: Mesh) -> torch.Tensor:
    """The global tensor from all ranks' pieces (inverse of `cut`)."""
    group = mesh.group_of(0, flat.axes)
    return torch.cat([pieces[rank] for rank in group]).reshape(tuple(shape))


def pack(tensors: Sequence[torch.Tensor], flats: Sequence[Flat], mesh: Mesh) -> list[torch.Tensor]:
    """All ranks' slices of one buffer that holds the tensors; zeros where none lies."""
    buffer = tensors[0].new_zeros(flats[0].chunk)
    for x, flat in zip(tensors, flats, strict=True):
        piece_range(flat, x.numel(), 0, mesh)  # raises where it does not fit
        buffer[flat.offset : flat.offset + x.numel()] = x.reshape(-1)
    size = slice_numel(flats[0], mesh)
    starts = [size * mesh.index(rank, flats[0].axes) for rank in range(mesh.size)]
    return [buffer[start : start + size].clone() for start in starts]


def from_flat(flat: Flat, dst: Layout, mesh: Mesh, itemsize: int) -> Conversion:
    """Moves from a rank's slice of the buffer to its part of `dst`: one gather, then what is free."""
    size, atoms, n = slice_numel(flat, mesh), mesh.atoms(flat.axes), flat.chunk // slice_numel(flat, mesh)
    piece_range(flat, prod(dst.shape), 0, mesh)
    whole = replicated(dst.shape)
    moves = [] if n == 1 else [Move("all_gather", (atoms, n), (size,), (n, size))]
    moves.append(Move("take_range", (flat.offset, dst.shape), (n, size) if n > 1 else (size,), dst.shape, whole))
    rest = conversion(whole, dst, mesh, itemsize)
    cost_s = mesh.collective_s("all_gather", flat.chunk * itemsize, atoms)
    return _joined(moves, rest, cost_s, "all_gather", flat, n, itemsize)


def to_flat(src: Layout, flat: Flat, mesh: Mesh, itemsize: int) -> Conversion:
    """Moves from a rank's part of `src` to its slice of a buffer that is zero elsewhere.

    A sum that is pending over exactly the buffer's axes is reduced by one reduce-scatter of the buffer.
    """
    size, atoms, n = slice_numel(flat, mesh), mesh.atoms(flat.axes), flat.chunk // slice_numel(flat, mesh)
    piece_range(flat, prod(src.shape), 0, mesh)
    summed = tuple(sorted((atom, "sum") for atom in atoms if mesh.axis_size(atom) > 1))
    reduces = bool(summed) and set(summed) <= set(src.pending)
    whole = replicated(src.shape).with_pending(summed if reduces else ())
    first = conversion(src, whole, mesh, itemsize)
    moves = [Move("put_range", (flat.offset, flat.chunk), src.shape, (flat.chunk,))]
    if n > 1:
        shape = (n, size)
        moves.append(Move("rearrange", ("(a b) -> a b", ("a", "b"), shape), (flat.chunk,), shape))
        target, args = ("reduce_scatter", (atoms, n, "sum")) if reduces else ("take_shard", (atoms, n))
        moves.append(Move(target, args, shape, (size,)))
    cost_s = mesh.collective_s("reduce_scatter", flat.chunk * itemsize, atoms) if reduces else 0.0
    return _joined(moves, first, cost_s, "reduce_scatter" if reduces else "", flat, n, itemsize, before=False)


def _joined(
    moves: list[Move], other: Conversion, cost_s: float, kind: str, flat: Flat, n: int, itemsize: int,
    before: bool = True,
) -> Conversion:  # fmt: skip
    wire = wire_bytes(kind, flat.chunk * itemsize, n) if kind else 0
    peak = max(prod(m.in_shape) + prod(m.local_shape) for m in moves) * itemsize
    both = (*moves, *other.moves) if before else (*other.moves, *moves)
    return Conversion(both, cost_s + other.cost_s, wire + other.wire_bytes, max(peak, other.peak_bytes))
