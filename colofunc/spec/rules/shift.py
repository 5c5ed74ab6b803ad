"""A shift along a split dim: only what crosses from one rank's part to another's travels.

    shift   d0 [d1] -> d0 [d1]      (cp s): the last rows of each rank go to the next; (s cp): each part goes to the next rank

Whatever the order of a dim's atoms, the last one is moved by `k mod n` and what leaves it at the end is a shift by one
more of everything before it: the local code is that recursion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import permutations
from math import prod

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.mesh.cost import rotation
from colofunc.ops.collectives import axis_index, permute
from colofunc.spec.layout import Atom, Dim, axes_of
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import StrategyFn
from colofunc.spec.rules.pattern import RuleFn, dims_of, wrap
from colofunc.spec.strategies import build, placements


def shift(call: Call) -> Rule | None:
    dims, sizes = dims_of(call.ins[0].shape)
    return Rule((dims,), (dims,), sizes, whole=frozenset(dims[wrap(call.arg(1, "dim"), len(dims))]))


def shifts(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    """The moved dim over one or two axes, in blocks, in stripes, or one of each."""
    rule = shift(call)
    if rule is None or not rule.whole:
        return
    (moved,) = rule.whole
    free = attrs.evolve(rule, whole=frozenset())
    dim = wrap(call.arg(1, "dim"), len(call.ins[0].shape))
    by, fill = int(call.arg(2, "by")), call.arg(3, "fill")
    axes = tuple(axis for axis in mesh.axis_names if mesh.axis_size(axis) > 1)
    for atoms in _splits(rule.sizes[moved], axes, mesh):
        others = tuple(axis for axis in axes if axis not in axes_of(atoms))
        for placement, passing in placements(rule, mesh, others, orders=False):
            if passing:
                continue
            strategy = build(call, free, {**placement, moved: atoms})
            nbytes = strategy.ins[0].local_numel * call.ins[0].dtype.itemsize
            split = strategy.ins[0].dims[dim]
            wire_s = 0.0
            for axis, hops, part in _travelling(split, by):
                table = rotation(mesh.axis_size(axis), hops)
                wire_s += mesh.collective_s("permute", nbytes * part, (axis,), table)
            local = partial(_local, dim=dim, atoms=split, by=by, fill=fill)
            yield attrs.evolve(strategy, local=local, cost=attrs.evolve(strategy.cost, extra_s=wire_s))


def _splits(size: int, axes: tuple[str, ...], mesh: Mesh) -> Iterator[Dim]:
    """A dim of `size` over one or two axes, with the local atom in each place."""
    if not size:
        return
    for chosen in (*permutations(axes, 1), *permutations(axes, 2)):
        ranks = prod(mesh.axis_size(axis) for axis in chosen)
        if size % ranks:
            continue
        split = [(mesh.axis_size(axis), axis) for axis in chosen]
        for place in range(len(split) + 1):
            atoms = (*split[:place], (size // ranks, None), *split[place:])
            yield tuple(atom for atom in atoms if atom[0] > 1)


def _travelling(atoms: Dim, by: int, share: float = 1.0) -> Iterator[tuple[str, int, float]]:
    """(axis, how many ranks further, share of a rank's part) of the permutes of `_moved`."""
    if by == 0 or not atoms:
        return
    *outer, (size, axis) = atoms
    more, rest = divmod(by, size)
    if axis is not None and rest:
        yield axis, rest, share
    # Of a split dim everything is moved both ways, and each rank takes one of them; of a local one each part is moved
    # as it has to be.
    near = far = share
    if axis is None:
        near, far = share * (size - rest) / size, share * rest / size
    yield from _travelling(tuple(outer), more, near)
    if rest:
        yield from _travelling(tuple(outer), more + 1, far)


def _local(x: torch.Tensor, dim: int, atoms: Dim, by: int, fill: float, mesh: Mesh) -> torch.Tensor:
    local_sizes = [size for size, axis in atoms if axis is None]
    mine = x.movedim(dim, -1).unflatten(-1, [*local_sizes, 1])
    moved = _moved(mine, atoms, by, fill, mesh)
    return moved.reshape(*mine.shape[: x.dim() - 1], x.shape[dim]).movedim(-1, dim).contiguous()


def _moved(x: torch.Tensor, atoms: Sequence[Atom], by: int, fill: float, mesh: Mesh) -> torch.Tensor:
    """x (..., one dim for each local atom, what is moved together), shifted by `by` along the atoms taken as one dim.
    """
    if by == 0:
        return x
    if not atoms:
        return torch.full_like(x, fill)
    *outer, (size, axis) = atoms
    more, rest = divmod(by, size)
    if axis is not None:
        if not rest:
            return _moved(x, outer, more, fill, mesh)
        came = permute(x, axis, mesh, rotation(size, by))
        near = _moved(came, outer, more, fill, mesh)
        is_near = axis_index(axis, mesh) >= rest
        return torch.where(is_near, near, _moved(came, outer, more + 1, fill, mesh))
    parts = []
    for part, steps in ((x[..., size - rest :, :], more + 1), (x[..., : size - rest, :], more)):
        if part.shape[-2]:
            parts.append(_moved(part.flatten(-2), outer, steps, fill, mesh).unflatten(-1, part.shape[-2:]))
    return torch.cat(parts, -2)


RULES: dict[str, RuleFn] = {"colofunc.shift": shift}
STRATEGIES: dict[str, StrategyFn] = {"colofunc.shift": shifts}
