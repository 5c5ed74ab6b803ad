"""Pieces of local code that strategies share: which part is mine, the operator itself on it, collectives along a dim.

    here, mine = inside(index, first_of(atoms, mesh), rows)      # this rank has rows first .. first + rows
    clear(x[here], mine)                                         # zeros for the indices of other ranks

For plugins it is `cf.ext.local`. `at` asks for another rank: its index along some axes, in place of this rank's own.

    cf.ext.local.positions(layout.dims[2], mesh, at={"cp": owner})   # of the block of keys that came from `owner`
    cf.ext.local.rerun(call, shards, {(11, "k_offset"): start})      # the operator itself on local parts

Collectives have chunks in a leading dim; these have them in the dim that they are about. Blocks stand in rank order, or
are dealt round where they are `striped`.

    gathered(x, dim, "tp", mesh)            all members' parts side by side
    scattered(x, dim, "tp", mesh)           of the sum of all members' x one's own part
    exchanged(x, split, join, "sp", mesh)   part i of `split` to member i, what comes in along `join`
    part(x, dim, "tp", mesh)                of what all have the own part; among_zeros: this part, and zeros in the others
    passing(x, 4, "cp", mesh)               what 4 members have, one after the other, each sent before the last is used
    streamed(x, 3, "y", mesh)               slices of dim 0 of all members' parts, in 3 panels, each sent likewise
    collected(panels, "y", mesh)            such panels put back: of the sum of all members' panels the own slices
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import (
    AxisNames,
    all_gather,
    all_to_all,
    axis_index,
    permute,
    rearrange,
    reduce_scatter,
    take_shard,
)
from colofunc.ops.kernels import wide
from colofunc.ops.targets import resolve
from colofunc.spec.layout import Atom
from colofunc.spec.rule import Call, Ref
from colofunc.spec.rules.opened import Split

__all__ = [
    "among_zeros", "clear", "collected", "exchanged", "first_of", "gathered", "inside", "part", "passing", "place_of", "positions", "rerun",
    "scattered", "streamed", "wide",
]  # fmt: skip


def strides(atoms: tuple[Atom, ...]) -> list[int]:
    """How far one step of each atom moves in its dim."""
    found: list[int] = []
    stride = 1
    for size, _ in reversed(atoms):
        found.append(stride)
        stride *= size
    return found[::-1]


def first_of(atoms: tuple[Atom, ...], mesh: Mesh) -> torch.Tensor | int:
    """Where this rank's part of a dim begins, for a dim whose mesh axes are major."""
    first: torch.Tensor | int = 0
    for (_, axis), stride in zip(atoms, strides(atoms), strict=True):
        if axis is not None:
            first = first + axis_index((axis,), mesh) * stride
    return first


def inside(index: torch.Tensor, first: torch.Tensor | int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Local indices (0 where the element is another rank's) and the mask of those that are this rank's."""
    here = index - first
    mine = (here >= 0) & (here < size)
    return torch.where(mine, here, 0), mine


def no_traffic(call: Call, split: Split) -> float:
    """For local code that does not communicate."""
    return 0.0


def clear(x: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
    """`x` with zeros where `mine` is false (NaN and infinity go too)."""
    return torch.where(mine, x, 0)


def rerun(call: Call, shards: Sequence[torch.Tensor], changes: Mapping[tuple[int, str], Any]) -> Any:
    """Run the call's operator on local parts with some arguments changed, given as (position, name) -> value."""
    args, kwargs = call.args, dict(call.kwargs)
    for (index, name), value in changes.items():
        if index < len(args):
            args = (*args[:index], value, *args[index + 1 :])
        else:
            kwargs[name] = value
    filled = {name: _filled(value, shards) for name, value in kwargs.items()}
    return resolve(call.target)(*_filled(args, shards), **filled)


def _filled(tree: Any, shards: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, Ref):
        return shards[tree.id]
    if isinstance(tree, tuple):
        return tuple(_filled(item, shards) for item in tree)
    return tree


FirstPosition = torch.Tensor | int  # of this rank's part: a number where all ranks agree


def place_of(
    dims: Sequence[tuple[Atom, ...]], shape: Sequence[int], mesh: Mesh, at: Mapping[str, torch.Tensor] | None = None
) -> tuple[list[int], list[int], FirstPosition]:
    """(sizes, strides, offset): where a part with these atoms lies in the row-major order of the global `shape`."""
    at = at or {}
    sizes: list[int] = []
    far: list[int] = []
    offset: torch.Tensor | int = 0
    for number, atoms in enumerate(dims):
        row = prod(shape[number + 1 :])
        for (size, axis), stride in zip(atoms, strides(atoms), strict=True):
            if axis is None:
                sizes.append(size)
                far.append(stride * row)
            else:
                index = at[axis] if axis in at else axis_index((axis,), mesh)
                offset = offset + index * (stride * row)
        # A dim that is split whole still has an element here.
        if not any(axis is None for _, axis in atoms):
            sizes.append(1)
            far.append(0)
    return sizes, far, offset


def positions(atoms: tuple[Atom, ...], mesh: Mesh, at: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor | int:
    """The global positions of a part of one dim: where it begins if it is one run, else every position."""
    sizes, far, offset = place_of([atoms], [prod(size for size, _ in atoms)], mesh, at)
    if len(sizes) == 1 and far[0] in (0, 1):
        return offset
    total = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(sizes, far, strict=True):
        total = (total.unsqueeze(1) + torch.arange(size) * stride).flatten()
    return total + offset


# ---- collectives along a dim ----


def gathered(x: torch.Tensor, dim: int, axes: AxisNames, mesh: Mesh, striped: bool = False) -> torch.Tensor:
    """(.., m, ..) -> (.., n m, ..): all members' parts of `dim`."""
    every = all_gather(x.contiguous(), axes, mesh)
    if dim == 0 and not striped:
        return every.flatten(0, 1)  # as they stand
    return rearrange(every, f"n {_dims(x)} -> {_dims(x, dim, striped)}")


def scattered(x: torch.Tensor, dim: int, axes: AxisNames, mesh: Mesh, striped: bool = False) -> torch.Tensor:
    """(.., n m, ..) -> (.., m, ..): of the sum of all members' x the own part of `dim`."""
    n = _ranks(axes, mesh)
    if dim == 0 and not striped:
        return reduce_scatter(x.unflatten(0, (n, -1)), axes, mesh)
    return reduce_scatter(rearrange(x, f"{_dims(x, dim, striped)} -> n {_dims(x)}", n=n), axes, mesh)


def exchanged(x: torch.Tensor, split: int, join: int, axes: AxisNames, mesh: Mesh) -> torch.Tensor:
    """(.., n p, .., m, ..) -> (.., p, .., n m, ..): block i of dim `split` goes to member i, what comes stands along
    `join`.
    """
    n = _ranks(axes, mesh)
    came = all_to_all(rearrange(x, f"{_dims(x, split)} -> n {_dims(x)}", n=n), axes, mesh)
    return rearrange(came, f"n {_dims(x)} -> {_dims(x, join)}")


def part(x: torch.Tensor, dim: int, axes: AxisNames, mesh: Mesh) -> torch.Tensor:
    """(.., n m, ..) -> (.., m, ..): the own block of what all members have; nothing moves."""
    return take_shard(rearrange(x, f"{_dims(x, dim)} -> n {_dims(x)}", n=_ranks(axes, mesh)), axes, mesh)


def among_zeros(x: torch.Tensor, dim: int, axes: AxisNames, mesh: Mesh) -> torch.Tensor:
    """(.., m, ..) -> (.., n m, ..): the own block in its place, a term of a pending sum; nothing moves."""
    mine = (torch.arange(_ranks(axes, mesh)) == axis_index(axes, mesh)).to(x.dtype)
    return rearrange(mine.reshape(-1, *[1] * x.dim()) * x, f"n {_dims(x)} -> {_dims(x, dim)}")


def passing(x: torch.Tensor, count: int, axis: str, mesh: Mesh) -> Iterator[torch.Tensor]:
    """What this rank has, the rank before it, the one before that: `count` of them, each on its way while one is in
    use.
    """
    n = mesh.axis_size(axis)
    for step in range(count):
        here = x
        if step + 1 < count:
            x = permute(here, axis, mesh, [(i - 1) % n for i in range(n)])
        yield here


def streamed(
    x: torch.Tensor, count: int, axes: AxisNames, mesh: Mesh, blocks: int | None = None
) -> Iterator[torch.Tensor]:
    """All members' x, (n m, ..), in `count` panels (n m / count, ..), each of which is on its way while the one before
    it is in use.

    A panel is a slice of each of `blocks` blocks that all parts together fall into: one a member, or a multiple.
    """
    slices = x.unflatten(0, (_blocks_each(blocks, axes, mesh), count, -1))
    coming = all_gather(slices[:, 0].contiguous(), axes, mesh).flatten(0, 2)
    for k in range(count):
        here = coming
        if k + 1 < count:
            coming = all_gather(slices[:, k + 1].contiguous(), axes, mesh).flatten(0, 2)
        yield here


def collected(panels: Iterable[torch.Tensor], axes: AxisNames, mesh: Mesh, blocks: int | None = None) -> torch.Tensor:
    """The way back from `streamed`, for terms: of the sum of all members' panels (n m / count, ..) the own slices, (m,
    ..).
    """
    cut = (_ranks(axes, mesh), _blocks_each(blocks, axes, mesh), -1)
    return torch.stack([reduce_scatter(panel.unflatten(0, cut), axes, mesh) for panel in panels], 1).flatten(0, 2)


def _blocks_each(blocks: int | None, axes: AxisNames, mesh: Mesh) -> int:
    return 1 if blocks is None else blocks // _ranks(axes, mesh)


def _ranks(axes: AxisNames, mesh: Mesh) -> int:
    return prod(mesh.part_size(atom) for atom in mesh.atoms(axes))


def _dims(x: torch.Tensor, dim: int | None = None, striped: bool = False) -> str:
    """The dims of x for einops; `dim` as n blocks, or as n stripes."""
    letters = list("abcdefgh"[: x.dim()])
    if dim is not None:
        letters[dim] = f"({letters[dim]} n)" if striped else f"(n {letters[dim]})"
    return " ".join(letters)
