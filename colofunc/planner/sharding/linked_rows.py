"""Linked rows: tensors that belong together row by row lie alike along their rows.

Problem: a quantized weight is numbers, scales and zeros, each an input of its own, and a plan speaks of them one by
one. Idea: how the rows (dim 0) of the numbers may lie is how those of the others may lie, so where a plan or a spec
says it of the weight, all of them follow. Where nothing is said, costs decide: products want them alike.

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

    The first of a group leads: what plans say of the others counts only as far as it agrees. What lies somewhere
    already stays there.
    """
    positions = {id: position for position, id in enumerate(program.inputs)}
    items = dict(constraints.items)

    def constraints_of(id: int) -> tuple[Constraint, ...]:
        return tuple(constraints.items.get(positions[id], ()))

    for lead, *others in groups:
        of_lead = constraints_of(lead)
        common = _allowed(program, mesh, lead, of_lead) if of_lead else None
        if common is None:
            continue
        free = [id for id in others if not any(map(_is_pinned, constraints_of(id)))]
        for id in free:
            own = _allowed(program, mesh, id, constraints_of(id)) if constraints_of(id) else None
            if own is not None:
                common = (common & own) or common
        axes_of_lead = set[str]()
        for constraint in of_lead:
            axes_of_lead.update(constraint.axes)
        common = _most_split(common, axes_of_lead)

        name = program.values[lead].name
        items[positions[lead]] = (*of_lead, _alike(frozenset(common), mesh, name))
        for id in free:
            offers = _striped_offers(common, of_lead, program.values[id].shape, mesh)
            items[positions[id]] = (_alike(frozenset(common), mesh, name, offers),)
    return attrs.evolve(constraints, items=items)


def _most_split(rows: set[Dim], spoken: Collection[str]) -> set[Dim]:
    """Of several ways those that split rows over most of the axes that plans speak of: the tensors are to choose the
    same.
    """

    def split_count(dim: Dim) -> int:
        return len(_axes_among(dim, spoken))

    most = max(map(split_count, rows))
    return {dim for dim in rows if split_count(dim) == most}


def _axes_among(dim: Dim, axes: Collection[str]) -> tuple[str, ...]:
    """The axes over which a dim is split, as far as they are among some."""
    return tuple(axis for axis in axes_of(dim) if axis in axes)


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


def _striped_offers(
    common: Collection[Dim], of_lead: Sequence[Constraint], shape: tuple[int, ...], mesh: Mesh
) -> tuple[Strategy, ...]:
    """What nothing else offers to a tensor: striped rows, with all dims on axes that plans and specs speak of for the
    lead.
    """
    spoken: set[str] = set()
    for constraint in of_lead:
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

    def accepts(strategy: Strategy) -> bool:
        layout = strategy.outs[0]
        return layout is not None and not layout.is_padded and layout.dims[0] in common

    def partly(axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
        allowed = {_axes_among(dim, axes) for dim in common}

        def accepts_on_axes(strategy: Strategy) -> bool:
            layout = strategy.outs[0]
            return layout is not None and _axes_among(layout.dims[0], axes) in allowed

        return accepts_on_axes

    key = ("rows", tuple(sorted(common, key=str)))
    says = f"the parts of {name!r} lie alike along its rows"
    return Constraint(key, accepts, says, offers, axes=mesh.axis_names, partly=partly)
