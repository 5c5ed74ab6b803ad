"""Linked rows: tensors that belong together row by row lie alike along their rows.

Problem: a quantized weight is numbers, scales and zeros, each an input of its own, and a plan speaks of them one by one. Idea: how
the rows (dim 0) of the numbers may lie is how those of the others may lie, so where a plan or a spec says it of the weight, all of them
follow. Where nothing is said, costs decide: products want them alike.

    state.0.weight         (tp dp o) i     by zero(3, "dp") and tensor("1d", "tp")
    state.0.weight.scale   (tp dp o) g
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.sharding.constraints import Constraint, Constraints, leaf_strategy
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy
from colofunc.spec.strategies import enumerate_layouts

Rows = tuple[str, ...]  # mesh axes on dim 0, major first


def linked_rows(program: Program, mesh: Mesh, constraints: Constraints, groups: Iterable[Sequence[int]]) -> Constraints:
    """The constraints, with the rows of each group of input values (ids) alike.

    The first of a group leads: what plans say of the others counts only as far as it agrees. What lies somewhere already stays there.
    """
    positions = {id: position for position, id in enumerate(program.inputs)}
    items = dict(constraints.items)
    for lead, *others in groups:
        said = constraints.items.get(positions[lead], ())
        common = _allowed(program, mesh, lead, said) if said else None
        if common is None:
            continue
        free = [id for id in others if not any(_is_pinned(constraint) for constraint in constraints.items.get(positions[id], ()))]
        for id in free:
            own = _allowed(program, mesh, id, constraints.items.get(positions[id], ()))
            common = (common & own if own is not None else common) or common
        common = _most_split(common, {axis for constraint in said for axis in constraint.axes})
        alike = _alike(frozenset(common), mesh, program.values[lead].name)
        items[positions[lead]] = (*said, alike)
        items |= {positions[id]: (alike,) for id in free}
    return attrs.evolve(constraints, items=items)


def _most_split(rows: set[Rows], spoken: Collection[str]) -> set[Rows]:
    """Of several ways those that split rows over most of the axes that plans speak of: the tensors are to choose the same one."""
    most = max(sum(axis in spoken for axis in axes) for axes in rows)
    return {axes for axes in rows if sum(axis in spoken for axis in axes) == most}


def _is_pinned(constraint: Constraint) -> bool:
    """Whether it says exactly how a tensor lies, as of one that lies there already."""
    return isinstance(constraint.key, tuple) and constraint.key[0] == "pin"


def _allowed(program: Program, mesh: Mesh, id: int, some: Sequence[Constraint]) -> set[Rows] | None:
    """How the rows of an input may lie; None where it may lie in a way that has no such words (padded, striped)."""
    options = [leaf_strategy(layout) for layout in enumerate_layouts(program.values[id].shape, mesh)]
    for constraint in some:
        options += constraint.offers
    found: set[Rows] = set()
    for option in options:
        layout = option.outs[0]
        if layout is None or not all(constraint.accepts(option) for constraint in some):
            continue
        rows = _rows(layout)
        if rows is None:
            return None
        found.add(rows)
    return found


def _rows(layout: Layout) -> Rows | None:
    """The axes on dim 0; None where something stands before or between them."""
    axes: list[str] = []
    for count, (_, axis) in enumerate(layout.dims[0]):
        if axis is not None and len(axes) < count:
            return None
        if axis is not None:
            axes.append(axis)
    return None if layout.is_padded else tuple(axes)


def _alike(common: frozenset[Rows], mesh: Mesh, name: str) -> Constraint:
    def among(axes: Collection[str]) -> set[Rows]:
        return {tuple(axis for axis in rows if axis in axes) for rows in common}

    def accepts(strategy: Strategy) -> bool:
        layout = strategy.outs[0]
        return layout is not None and _rows(layout) in common

    def partly(axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
        wanted = among(axes)

        def test(strategy: Strategy) -> bool:
            layout = strategy.outs[0]
            rows = None if layout is None else _rows(layout)
            return rows is not None and tuple(axis for axis in rows if axis in axes) in wanted

        return test

    says = f"the parts of {name!r} lie alike along its rows"
    return Constraint(("rows", tuple(sorted(common))), accepts, says, axes=mesh.axis_names, partly=partly)
