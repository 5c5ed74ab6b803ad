"""Pieces of local code shared by strategies that split an indexed dim: which indices are mine, and zeros elsewhere.

    here, mine = inside(index, first_of(atoms, mesh), rows)      # this rank has rows first .. first + rows
    clear(x[here], mine)                                         # zeros for the indices of other ranks

For plugins it is `cf.local`. `at` asks for another rank: its index along some axes, in place of this rank's own.

    cf.local.positions(layout.dims[2], mesh, at={"cp": owner})   # of the block of keys that came from `owner`
    cf.local.rerun(call, shards, {(11, "k_offset"): start})      # the operator itself on local parts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from colofunc.dtensor.layout import Atom
from colofunc.dtensor.rule import Call, Ref
from colofunc.dtensor.rules.opened import Split
from colofunc.mesh import Mesh
from colofunc.ops.collectives import axis_index
from colofunc.ops.targets import resolve


def strides(atoms: tuple[Atom, ...]) -> list[int]:
    """How far one step of each atom moves in its dim."""
    return [prod(n for n, _ in atoms[i + 1 :]) for i in range(len(atoms))]


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
    return resolve(call.target)(*_filled(args, shards), **{k: _filled(v, shards) for k, v in kwargs.items()})


def _filled(tree: Any, shards: Sequence[torch.Tensor]) -> Any:
    if isinstance(tree, Ref):
        return shards[tree.id]
    if isinstance(tree, tuple):
        return tuple(_filled(item, shards) for item in tree)
    return tree


Start = torch.Tensor | int  # of this rank's part: a number where all ranks agree


def place_of(
    dims: Sequence[tuple[Atom, ...]], shape: Sequence[int], mesh: Mesh, at: Mapping[str, torch.Tensor] | None = None
) -> tuple[list[int], list[int], Start]:
    """(sizes, strides, offset): where a part with these atoms lies in the row-major order of the global `shape`."""
    at = at or {}
    sizes: list[int] = []
    far: list[int] = []
    offset: torch.Tensor | int = 0
    for d, atoms in enumerate(dims):
        row = prod(shape[d + 1 :])
        for (n, axis), stride in zip(atoms, strides(atoms), strict=True):
            if axis is None:
                sizes.append(n)
                far.append(stride * row)
            else:
                offset = offset + (at[axis] if axis in at else axis_index((axis,), mesh)) * (stride * row)
        if not any(axis is None for _, axis in atoms):
            sizes.append(1)
            far.append(0)
    return sizes, far, offset


def positions(atoms: tuple[Atom, ...], mesh: Mesh, at: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor | int:
    """The global positions of a part of one dim: where it begins if it is one run, else every position."""
    sizes, far, offset = place_of([atoms], [prod(n for n, _ in atoms)], mesh, at)
    if len(sizes) == 1 and far[0] in (0, 1):
        return offset
    total = torch.zeros(1, dtype=torch.int64)
    for n, stride in zip(sizes, far, strict=True):
        total = (total.unsqueeze(1) + torch.arange(n) * stride).flatten()
    return total + offset
