"""Layouts from and to the placements of `torch.distributed.tensor`.

torch lists one placement per mesh dim and applies them left to right: a later `Shard` of the same dim splits what the
earlier ones left, so left is major. A strided shard first cuts the dim in `split_factor` blocks and splits each.

>>> to_placements(Spec("(tp dp o) i").bind(Mesh(dp=2, tp=2), (8, 8)), mesh)
(_StridedShard(dim=0, sf=2), Shard(dim=0))

An uneven `Shard` is our padded spec: the same elements on the same ranks, with zeros after the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from colofunc import compat
from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.spec.layout import REDUCTIONS, Atom, Layout, make_layout

if TYPE_CHECKING:  # half a second to import, so each function does when it is called
    from torch.distributed.tensor import Partial, Placement


def from_placements(
    placements: Sequence[Placement], mesh: Mesh, shape: Sequence[int], order: Sequence[str] | None = None
) -> Layout:
    """The layout of a tensor of global `shape`. order: the mesh axes that torch's mesh dims are, all of them."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    axes = tuple(order) if order is not None else mesh.axis_names
    shape = tuple(shape)
    try:
        if len(placements) != len(axes) or sorted(axes) != sorted(mesh.axis_names):
            raise SpecError(f"{len(placements)} placements for mesh dims {axes}; give one for every axis of the mesh")
        dims: list[list[Atom]] = [[(size, None)] for size in shape]
        pending: list[tuple[str, str]] = []
        for axis, placement in zip(axes, placements, strict=True):
            n = mesh.shape[axis]
            if n == 1 or isinstance(placement, Replicate):
                continue
            if isinstance(placement, Partial):
                pending.append((axis, _reduction(placement)))
                continue
            factor = compat.strided_factor(placement)
            if factor is None and not isinstance(placement, Shard):
                raise SpecError(f"placement {placement!r} of axis {axis!r} is none of Shard, Replicate and Partial")
            dim = placement.dim  # type: ignore[attr-defined]
            if not -len(shape) <= dim < len(shape):
                raise SpecError(f"{placement!r} of axis {axis!r} splits dim {dim} of a tensor with {len(shape)} dims")
            dims[dim] = _split(dims[dim], factor or 1, n, axis)
        return make_layout(tuple(map(tuple, dims)), shape, tuple(pending))
    except SpecError as error:
        error.add_note(f"from placements {tuple(placements)} of shape {shape} on {mesh!r}")
        raise


def _reduction(placement: Partial) -> str:
    how = str(placement.reduce_op)
    if how not in REDUCTIONS:
        raise SpecError(f"pending reduction {how!r} of {placement!r} is none of {REDUCTIONS}; reduce it in torch first")
    return how


def _split(atoms: list[Atom], skip: int, n: int, axis: str) -> list[Atom]:
    """The dim with `axis` placed on the next n of its local factors, after the first `skip` of them."""
    local = prod(size for size, owner in atoms if owner is None)
    if local % (skip * n):
        if skip > 1 or any(owner is not None for _, owner in atoms):
            raise SpecError(f"a second split of an uneven dim ({local} by {skip * n}) has no spec; pad the dim first")
        return [(n, axis), (-(-local // n), None)]
    out: list[Atom] = []
    left, placed = skip, False
    for size, owner in atoms:
        if owner is not None or placed:
            out.append((size, owner))
        elif left >= size and left % size == 0:
            out.append((size, None))
            left //= size
        elif size % (left * n) == 0:
            out += [(left, None), (n, axis), (size // (left * n), None)]
            placed = True
        else:
            raise SpecError(f"axis {axis!r} would be cut by a split that is already there; no spec says that")
    if not placed:
        raise SpecError(f"split factor {skip} leaves nothing for axis {axis!r} of size {n}")
    return out


def to_placements(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """One placement per axis of the mesh, in its order; SpecError where torch has none for this layout."""
    from torch.distributed.tensor import Partial, Replicate

    pending = dict(layout.pending)
    done: set[str] = set()
    out: list[Placement] = []
    for axis in mesh.axis_names:
        if axis in pending:
            out.append(Partial(pending[axis]))
        elif axis in layout.axes:
            out.append(_placement(layout, axis, done))
        else:
            out.append(Replicate())
        done.add(axis)
    return tuple(out)


def _placement(layout: Layout, axis: str, done: set[str]) -> Placement:
    from torch.distributed.tensor import Shard

    for d, atoms in enumerate(layout.dims):
        owners = [owner for _, owner in atoms]
        if axis not in owners:
            continue
        if prod(size for size, _ in atoms) != layout.shape[d]:
            n, local = atoms[0][0], prod(size for size, _ in atoms[1:])
            if owners[0] != axis or any(owners[1:]) or local != -(-layout.shape[d] // n):
                raise SpecError(f"padded dim {d} of {layout} is split unlike torch splits it; redistribute it first")
            return Shard(d)
        before = prod(size for size, owner in atoms[: owners.index(axis)] if owner is None or owner not in done)
        if before == 1:
            return Shard(d)
        strided: Any = compat.strided_shard(d, before)
        if strided is None:
            raise SpecError(f"{layout} needs a strided shard, which this torch lacks; redistribute it first")
        return strided
    raise SpecError(f"{layout} does not split over axis {axis!r}")
