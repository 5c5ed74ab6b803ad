"""Parts of ranks: who has one, which ranks have the same, and the global tensor that they make together.

How a part is cut out of the global tensor is in `transfer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.spec.layout import At, Atom, Layout
from colofunc.spec.spec import Spec, parse

_REDUCE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def _inside(layout: Layout) -> tuple[slice, ...]:
    """The elements of a padded tensor that are no padding."""
    return tuple(slice(0, size) for size in layout.shape)


def _index(atoms: Sequence[Atom], where: Mapping[str, int]) -> tuple[slice | int, ...]:
    """Of a tensor with a dim for each atom, the part at some coordinates of the mesh."""
    return tuple(slice(None) if axis is None else where[axis] for _, axis in atoms)


def _atoms(layout: Layout) -> list[Atom]:
    atoms: list[Atom] = []
    for dim in layout.dims:
        atoms += dim
    return atoms


def holds(at: At | None, mesh: Mesh, rank: int) -> bool:
    """Whether a rank is among those that have a value, or run an operator."""
    return at is None or mesh.index(rank, at[0]) in at[1]


NOTHING = (-1,)
"""The key of a part of a value that does not exist on a rank."""


def part_key(layout: Layout, mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Equal for ranks that hold the same part."""
    if not holds(layout.at, mesh, rank):
        return NOTHING
    where = mesh.coordinates(rank)
    pending_axes = [axis for axis, _ in layout.pending]
    return tuple(where[axis] for axis in (*layout.axes, *pending_axes))


def shared_parts(
    layout: Layout, mesh: Mesh, ranks: Sequence[int], make: Callable[[int], torch.Tensor]
) -> list[torch.Tensor]:
    """The parts of some ranks.

    Each distinct part is made once, for the first rank that holds it, and shared by the others.
    """
    done: dict[tuple[int, ...], torch.Tensor] = {}
    out = []
    for rank in ranks:
        key = part_key(layout, mesh, rank)
        if key not in done:
            done[key] = make(rank)
        out.append(done[key])
    return out


def join(shards: Sequence[torch.Tensor], layout: Layout, mesh: Mesh) -> torch.Tensor:
    """The global tensor from all ranks' parts (pending reductions are carried out)."""
    atoms = _atoms(layout)
    local_sizes = [size for size, axis in atoms if axis is None]
    out = shards[0].new_empty([size for size, _ in atoms])

    # Along the axes that the layout does not name lie copies: only those at `first` are read.
    first = dict.fromkeys(mesh.axis_names, 0)
    if layout.at is not None:
        first[layout.at[0]] = layout.at[1][0]
    named = {*layout.axes, *(axis for axis, _ in layout.pending)}
    copied = [axis for axis in mesh.axis_names if axis not in named]

    done: dict[tuple[int, ...], torch.Tensor] = {}
    for rank, shard in enumerate(shards):
        where = mesh.coordinates(rank)
        if any(where[axis] != first[axis] for axis in copied):
            continue
        key = tuple(where[axis] for _, axis in atoms if axis is not None)
        local = shard.reshape(local_sizes)
        # Ranks that hold terms of one part are combined in rank order.
        if key in done:
            reductions = {how for axis, how in layout.pending if where[axis]}
            how = reductions.pop() if len(reductions) == 1 else "sum"
            local = _REDUCE[how](done[key], local)
        done[key] = local
        out[_index(atoms, where)] = local
    padded = out.reshape(layout.padded_shape)
    return padded[_inside(layout)] if layout.is_padded else padded


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def global_shape(spec: str | Spec | Layout, mesh: Mesh, local_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the whole: every local size times the sizes of the axes that its dim names."""
    if isinstance(spec, Layout):
        return spec.shape
    dims = list(parse(str(spec)).dims)
    if None in dims:  # `...` stands for dims that are not split
        place = dims.index(None)
        dims[place : place + 1] = [()] * (len(local_shape) - len(dims) + 1)
    if len(dims) != len(local_shape):
        raise SpecError(f"{str(spec)!r} has {len(dims)} dims, the part has {len(local_shape)} (shape {local_shape})")
    sizes: list[int] = []
    for dim, size in zip(dims, local_shape, strict=True):
        for factor in dim or ():
            if factor.name and factor.name in mesh:
                size *= mesh.axis_size(factor.name)
        sizes.append(size)
    return tuple(sizes)
