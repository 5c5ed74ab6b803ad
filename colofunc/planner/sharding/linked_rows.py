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
from colofunc.spec.layout import Dim, axes_of, make_layout
from colofunc.spec.rule import Strategy
from colofunc.spec.strategies import enumerate_layouts


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
            theirs = constraints.items.get(positions[id], ())
            own = _allowed(program, mesh, id, theirs) if theirs else None
            common = (common & own if own is not None else common) or common
        common = _most_split(common, {axis for constraint in said for axis in constraint.axes})
        name = program.values[lead].name
        items[positions[lead]] = (*said, _alike(frozenset(common), mesh, name))
        for id in free:
            offers = _striped_offers(common, said, program.values[id].shape, mesh)
            items[positions[id]] = (_alike(frozenset(common), mesh, name, offers),)
    return attrs.evolve(constraints, items=items)


def _most_split(rows: set[Dim], spoken: Collection[str]) -> set[Dim]:
    """Of several ways those that split rows over most of the axes that plans speak of: the tensors are to choose the same one."""
    most = max(sum(axis in spoken for axis in axes_of(dim)) for dim in rows)
    return {dim for dim in rows if sum(axis in spoken for axis in axes_of(dim)) == most}


def _is_pinned(constraint: Constraint) -> bool:
    """Whether it says exactly how a tensor lies, as of one that lies there already."""
    return isinstance(constraint.key, tuple) and constraint.key[0] == "pin"


def _allowed(program: Program, mesh: Mesh, id: int, some: Sequence[Constraint]) -> set[Dim] | None:
    """How the rows of an input may lie; None where they may be padded, which is a matter of each tensor."""
    options = [leaf_strategy(layout) for layout in enumerate_layouts(program.values[id].shape, mesh)]
    for constraint in some:
        options += constraint.offers
    found: set[Dim] = set()
    for option in options:
        layout = option.outs[0]
        if layout is None or not all(constraint.accepts(option) for constraint in some):
            continue
        if layout.is_padded:
            return None
        found.add(layout.dims[0])
    return found


def _is_striped(dim: Dim) -> bool:
    """Whether a rank has several runs of a dim, as of the rows of queries, keys and values in one weight."""
    return any(axis is None for _, axis in dim[:-1])


def _striped_offers(common: Collection[Dim], said: Sequence[Constraint], shape: tuple[int, ...], mesh: Mesh) -> tuple[Strategy, ...]:
    """What nothing else offers to a tensor: striped rows, with all dims on axes that plans and specs speak of for the lead."""
    spoken: set[str] = set()
    for constraint in said:
        spoken.update(constraint.axes or _of_offers(constraint))
    found = []
    for rows in sorted(filter(_is_striped, common), key=str):  # as sets have no order that all ranks agree on
        if not spoken.issuperset(axes_of(rows)):
            continue
        others = [axis for axis in mesh.axis_names if axis in spoken and axis not in axes_of(rows)]
        for layout in enumerate_layouts(shape, mesh, others):
            if not axes_of(layout.dims[0]):
                found.append(leaf_strategy(make_layout((rows, *layout.dims[1:]), shape)))
    return tuple(found)


def _of_offers(constraint: Constraint) -> set[str]:
    """The mesh axes on which what a constraint offers lies."""
    found: set[str] = set()
    for offer in constraint.offers:
        for layout in offer.outs:
            found.update(() if layout is None else layout.axes)
    return found


def _alike(common: frozenset[Dim], mesh: Mesh, name: str, offers: tuple[Strategy, ...] = ()) -> Constraint:
    """Rows lie in one of some ways."""

    def among(axes: Collection[str]) -> set[tuple[str, ...]]:
        return {tuple(axis for axis in axes_of(dim) if axis in axes) for dim in common}

    def accepts(strategy: Strategy) -> bool:
        layout = strategy.outs[0]
        return layout is not None and not layout.is_padded and layout.dims[0] in common

    def partly(axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
        wanted = among(axes)

        def test(strategy: Strategy) -> bool:
            layout = strategy.outs[0]
            return layout is not None and tuple(axis for axis in axes_of(layout.dims[0]) if axis in axes) in wanted

        return test

    says = f"the parts of {name!r} lie alike along its rows"
    return Constraint(("rows", tuple(sorted(common, key=str))), accepts, says, offers, axes=mesh.axis_names, partly=partly)
