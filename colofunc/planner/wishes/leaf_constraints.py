"""What a wish for a leaf means: which strategies of the leaf it accepts, and which it offers that enumeration lacks.

"(tp o) i"      tp on dim 0, the other axes as the search likes
"o i"           whole on every axis
(a, b)          either
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod

import attrs

from colofunc.errors import PlanError, SpecError
from colofunc.mesh import Mesh
from colofunc.planner.sharding.constraints import Constraint, leaf_strategy
from colofunc.planner.wishes.gradients import worked_on
from colofunc.planner.wishes.layout_equality import lies_alike, orders
from colofunc.planner.wishes.ranks import Places
from colofunc.planner.wishes.wish import PARAMETERS, Wish
from colofunc.program.ir import Program, Value
from colofunc.spec.layout import Dim, Layout, at_text, is_major, make_layout
from colofunc.spec.rule import Strategy
from colofunc.spec.spec import bind, parse
from colofunc.spec.strategies import enumerate_layouts


@attrs.frozen
class NamedValues:
    """Values, and their numbers by all that may be written for them: "layers.0.weight", "0.weight" and "weight" are one
    leaf's.
    """

    values: Sequence[Value]
    numbers: Mapping[str, Sequence[int]]

    @staticmethod
    def of(values: Sequence[Value]) -> NamedValues:
        numbers = defaultdict[str, list[int]](list)
        for number, value in enumerate(values):
            ending: str | None = value.name
            while ending is not None:
                numbers[ending].append(number)
                _, dot, behind = ending.partition(".")
                ending = behind if dot else None
        return NamedValues(values, numbers)

    def met(self, wish: Wish) -> list[tuple[int, Value]]:
        """Those that a wish is about, with their numbers."""
        # Plans wish for one leaf at a time by its name: comparing all names for each would take minutes for a deep
        # model.
        if isinstance(wish.match, str) and not any(character in wish.match for character in "*?["):
            return [(number, self.values[number]) for number in self.numbers.get(wish.match, ())]
        return [(number, value) for number, value in enumerate(self.values) if wish.meets(value.name)]


def on_leaves(
    wish: Wish, program: Program, mesh: Mesh, leaves: NamedValues, grads: NamedValues
) -> Iterator[tuple[int, Places, Constraint]]:
    """(item, what the wish says of each axis there, its constraint) for each leaf, and each operator on a gradient."""
    if wish.values:
        return
    for item, value in _items_met(wish, program, leaves, grads):
        layouts = layouts_wished(wish, value, mesh)
        axes = wish.axes if wish.axes is not None else (_axes_named(wish, mesh) or mesh.axis_names)
        axes = tuple(axis for axis in mesh.atoms(axes) if mesh.axis_size(axis) > 1)
        by_layout = [dims_of_axes(layout, axes) for layout in layouts]
        said = by_layout[0]
        if len(by_layout) > 1:
            said = {}
            for axis in axes:
                said[axis] = frozenset(of_layout[axis] for of_layout in by_layout)
        constraints = [_leaf_constraint(wish, layout.with_at(None), axes, mesh) for layout in layouts]
        constraint = _any_of(constraints)
        if item >= len(program.inputs):  # an operator makes its own offers
            constraint = attrs.evolve(constraint, offers=())
        yield item, said, constraint


def _items_met(wish: Wish, program: Program, leaves: NamedValues, grads: NamedValues) -> Iterator[tuple[int, Value]]:
    """The leaves and gradients that a wish is about, and as what items: of a gradient the operators of the update on
    it.
    """
    roles = wish.roles or PARAMETERS
    met = leaves.met(wish)
    of_roles = [(number, value) for number, value in met if value.role in roles]
    if not of_roles and not wish.roles:
        of_roles = met
    yield from of_roles
    if "grad" in roles:
        for index, grad in worked_on(program, [grad for _, grad in grads.met(wish)]):
            yield len(program.inputs) + index, grad


def _any_of(constraints: Sequence[Constraint]) -> Constraint:
    if len(constraints) == 1:
        return constraints[0]
    offers = list[Strategy]()
    for constraint in constraints:
        offers += constraint.offers
    key = ("any", *(constraint.key for constraint in constraints))

    def accepts(strategy: Strategy) -> bool:
        return any(constraint.accepts(strategy) for constraint in constraints)

    def partly(axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
        parts = [constraint.on(axes) for constraint in constraints]
        return lambda strategy: any(part is None or part.accepts(strategy) for part in parts)

    return Constraint(key, accepts, constraints[0].says, tuple(offers), constraints[0].axes, partly=partly)


def layouts_wished(wish: Wish, value: Value, mesh: Mesh) -> tuple[Layout, ...]:
    """The specs of a wish as layouts of a value. Raises PlanError where they cannot be."""
    try:
        return tuple(bind(want, mesh, value.shape) for want in wish.wants)
    except SpecError as error:
        raise PlanError(f"{wish} cannot be done on {value.name!r} of shape {value.shape} on {mesh}: {error}") from error


def _axes_named(wish: Wish, mesh: Mesh) -> tuple[str, ...]:
    """Axes that a spec names, also those of size 1."""
    names: list[str] = []
    for want in wish.wants:
        if isinstance(want, Layout):
            return mesh.axis_names  # a bound layout is meant exactly
        parsed = parse(str(want))
        for dim in parsed.dims:
            for factor in dim or ():
                if factor.name and factor.name in mesh:
                    names.append(factor.name)
        names += [axis for axis, _ in parsed.pending]
        if parsed.at is not None:
            names.append(parsed.at[0])
    return tuple(dict.fromkeys(names))


def _leaf_constraint(wish: Wish, layout: Layout, axes: tuple[str, ...], mesh: Mesh) -> Constraint:
    exact = leaf_strategy(layout)
    if layout.is_padded or set(layout.axes) - set(axes):  # meant exactly, and not among the enumerated ones
        return Constraint(("leaf", layout), lambda strategy: strategy.outs[0] is layout, str(wish), (exact,))
    key = ("leaf", layout, axes)
    if not is_major(layout):  # striped: not enumerated either, but other axes may lie on other dims
        offers = tuple(map(leaf_strategy, _with_others(layout, mesh)))
        return Constraint(key, lambda strategy: lies_alike(layout, strategy.outs[0], axes), str(wish), offers, axes)

    def in_order_on(some: tuple[str, ...]) -> Callable[[Strategy], bool]:
        wished = orders(layout, some)
        return lambda strategy: strategy.outs[0] is not None and orders(strategy.outs[0], some) == wished

    def room(some: tuple[str, ...]) -> Callable[[Strategy], bool]:
        later = []
        for dim in orders(layout, axes)[0]:
            later.append(prod(mesh.axis_size(axis) for axis in dim if axis not in some))
        return lambda strategy: strategy.outs[0] is not None and _has_room(strategy.outs[0], later)

    return Constraint(key, in_order_on(axes), str(wish), (exact,), axes, partly=in_order_on, room=room)


def _has_room(layout: Layout, ways: Sequence[int]) -> bool:
    """Whether what is local of each dim can still be split so many ways: axes that are decided later will lie there."""
    for dim, count in zip(layout.dims, ways, strict=True):
        local = prod(size for size, axis in dim if axis is None)
        if local % count:
            return False
    return True


def _with_others(layout: Layout, mesh: Mesh) -> tuple[Layout, ...]:
    """A layout as it is, and with every way to split what it leaves whole (of each dim the last such part) over the
    other axes.
    """
    other_axes = tuple(axis for axis in mesh.axis_names if axis not in layout.axes)
    last_wholes = [_last_whole(dim) for dim in layout.dims]
    whole_sizes = []
    for place, dim in zip(last_wholes, layout.dims, strict=True):
        whole_sizes.append(1 if place is None else dim[place][0])
    layouts = {layout: None}
    for other in enumerate_layouts(tuple(whole_sizes), mesh, other_axes):
        dims: list[Dim] = []
        for place, dim, split in zip(last_wholes, layout.dims, other.dims, strict=True):
            dims.append(dim if place is None else (*dim[:place], *split, *dim[place + 1 :]))
        layouts.setdefault(make_layout(tuple(dims), layout.shape), None)
    return tuple(layouts)


def _last_whole(dim: Dim) -> int | None:
    """The place of the last part of a dim that no axis splits."""
    last = None
    for place, (_, axis) in enumerate(dim):
        if axis is None:
            last = place
    return last


def dims_of_axes(layout: Layout, axes: Iterable[str]) -> Places:
    """Axis -> the dim it lies on, "whole" where it lies on none, or its pending reduction."""
    place_of: Places = {}
    for number, dim in enumerate(layout.dims):
        for _, axis in dim:
            if axis is not None:
                place_of[axis] = number
    for axis, how in layout.pending:
        place_of[axis] = f"pending {how}"
    if layout.at is not None:
        place_of[layout.at[0]] = at_text(layout.at)
    return {axis: place_of.get(axis, "whole") for axis in axes}
