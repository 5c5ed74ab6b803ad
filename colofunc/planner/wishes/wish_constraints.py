"""What wishes mean for the leaves and operators of one program, as constraints on the search.

    Wish("*.q_proj.weight", "(tp o) i")      leaf: tp on dim 0, the other axes as the search likes
    Wish("*.mlp.fc", "{tp: o}")              forward operators of mlp.fc: tp on the rule's factor o
    Wish("*", ("(dp o) i", "o (dp i)"))      leaves: either; all ways that a spec needs and enumeration lacks are offered
    Wish("batch.*", "(dp b) ...", along=True)     the leaf, and what its layout reaches (`along`)

A spec that names no axis means whole on every axis. Two wishes that put one axis of one tensor in two places clash; a
wish that matches nothing is an error with near names.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from colofunc.errors import PlanError, near
from colofunc.mesh import Mesh
from colofunc.planner.sharding.constraints import Constraint, Constraints
from colofunc.planner.wishes.flow_constraints import WishSeeds, constraints_along, meeting
from colofunc.planner.wishes.gradients import gradients
from colofunc.planner.wishes.leaf_constraints import NamedValues, layouts_wished, on_leaves
from colofunc.planner.wishes.operator_constraints import on_operators
from colofunc.planner.wishes.propagation import Rules
from colofunc.planner.wishes.ranks import HighestRanks, Places, can_meet, highest_ranks, part_heard, words_of_place
from colofunc.planner.wishes.wish import PARAMETERS, Wish
from colofunc.program.ir import Program
from colofunc.spec.layout import At, Layout
from colofunc.spec.rule import Strategy


def constraints_of(wishes: Iterable[Wish], program: Program, mesh: Mesh, rules: Rules | None = None) -> Constraints:
    """All wishes as constraints, by what operators can do.

    Raises PlanError on clashes, on wishes that match nothing or cannot be done.
    """
    rules = rules or Rules(program, mesh)
    leaves = NamedValues.of([program.values[id] for id in program.inputs])
    grads = NamedValues.of(gradients(program))
    by_wish = list[tuple[Wish, list[tuple[int, Places, Constraint]]]]()
    ranked = list[tuple[int, int, Places]]()
    for wish in wishes:
        if wish.on_operator:
            of_wish = list(on_operators(wish, program, mesh, rules))
        else:
            of_wish = list(on_leaves(wish, program, mesh, leaves, grads))
        by_wish.append((wish, of_wish))
        ranked += [(item, wish.rank, places) for item, places, _ in of_wish]

    said = _Said(program, mesh, highest_ranks(ranked))
    for wish, of_wish in by_wish:
        for item, places, constraint in of_wish:
            said.add(wish, item, places, constraint)
        if not wish.on_operator:
            for id in wish.values:
                said.follow(wish, id)
        if not of_wish and not wish.optional and (wish.on_operator or not wish.values):
            raise PlanError(f"{wish} matches nothing{near(str(wish.match), _known_names(wish, program), 'names')}")

    # Layouts and patterns that are followed through the program constrain what they reach.
    lacking: dict[int, list[Strategy]] = {}  # per operator, ways of single flows that enumeration does not have
    for source in dict.fromkeys((*said.followed, *said.held)):
        flow = WishSeeds(said.followed.get(source, {}), said.held.get(source, {}))
        for item, places, constraint in constraints_along(flow, program, mesh, rules):
            heard = said.hear(flow.wish, item, places, constraint)
            of_item = said.items.setdefault(item, [])
            if heard is not None:
                of_item.append(heard)
            lacking.setdefault(item, []).extend(constraint.offers[:1])
    for item, constraint in meeting(lacking, program, mesh, rules):
        said.items[item].append(constraint)
    items = {item: tuple(constraints) for item, constraints in said.items.items()}
    return Constraints(items, regather=said.regather, chunks=said.chunks, scatter=said.scatter, at=said.at)


@attrs.define
class _Said:
    """What wishes say of items (input leaves, then nodes), one after the other.

    `places`: item -> what each wish says of its axes.
    `followed`: source of a wish -> value -> the wish, and the layout that is followed from there.
    `held`: source -> node -> wishes for its pattern, which is followed.
    """

    program: Program
    mesh: Mesh
    ranks: HighestRanks
    items: dict[int, list[Constraint]] = attrs.field(factory=dict)
    places: dict[int, list[tuple[Wish, Places]]] = attrs.field(factory=dict)
    followed: dict[str, dict[int, tuple[Wish, Layout]]] = attrs.field(factory=dict)
    held: dict[str, dict[int, list[Wish]]] = attrs.field(factory=dict)
    regather: dict[int, bool] = attrs.field(factory=dict)
    chunks: dict[int, int | str] = attrs.field(factory=dict)
    scatter: dict[int, bool] = attrs.field(factory=dict)
    at: dict[int, At] = attrs.field(factory=dict)

    def hear(self, wish: Wish, item: int, all_places: Places, whole: Constraint) -> Constraint | None:
        """What of a constraint is heard beside wishes of higher rank; raises PlanError where another of its rank says
        otherwise.
        """
        places, heard = part_heard(self.ranks, item, wish.rank, all_places, whole)
        earlier = self.places.setdefault(item, [])
        for other, other_places in earlier:
            for axis, place in places.items():
                if axis in other_places and not can_meet(other_places[axis], place):
                    raise PlanError(
                        f"two wishes clash on axis {axis!r} of {self._name(item)!r}: "
                        f"{other} puts it on {words_of_place(other_places[axis])}, {wish} on {words_of_place(place)}; "
                        "drop one, or give them different axes"
                    )
        earlier.append((wish, places))
        return heard

    def add(self, wish: Wish, item: int, places: Places, whole: Constraint) -> None:
        """A wish for one item, with what it says beside where the item lies."""
        constraint = self.hear(wish, item, places, whole)
        if constraint is None:  # nothing of it is heard; the item is still one that wishes speak of
            constraint = Constraint(("nothing",), lambda strategy: True, str(wish))
        self.items.setdefault(item, []).append(constraint)
        input_count = len(self.program.inputs)
        if wish.on_operator:
            if wish.along:
                self.held.setdefault(wish.source, {}).setdefault(item - input_count, []).append(wish)
            return
        if wish.along:
            self.follow(wish, self.program.inputs[item])
        if wish.regather is not None:
            self.regather[item] = wish.regather
        if wish.regather:
            for cast in _casts(self.program, item):
                as_it_lies = attrs.evolve(constraint, says=f"{wish}, cast where it lies", offers=())
                self.items.setdefault(cast, []).append(as_it_lies)
        if item < input_count:
            at = self._layout(wish, self.program.inputs[item]).at
            if at is not None:
                self.at[item] = at
        if wish.chunk is not None:
            self.chunks[item] = wish.chunk
        if wish.scatter is not None:
            self.scatter[item] = wish.scatter

    def follow(self, wish: Wish, id: int) -> None:
        """What a value's layout reaches is to lie along it."""
        self.followed.setdefault(wish.source, {})[id] = wish, self._layout(wish, id)

    def _layout(self, wish: Wish, id: int) -> Layout:
        """Where a value lies by the first spec of a wish."""
        return layouts_wished(wish, self.program.values[id], self.mesh)[0]

    def _name(self, item: int) -> str:
        input_count = len(self.program.inputs)
        if item < input_count:
            return self.program.values[self.program.inputs[item]].name
        return self.program.nodes[item - input_count].path


def _known_names(wish: Wish, program: Program) -> set[str]:
    """What a wish of this kind could have named."""
    if wish.on_operator:
        return {node.path for node in program.nodes if node.path and node.phase in wish.phases}
    leaves = [program.values[id] for id in program.inputs]
    roles = wish.roles or PARAMETERS
    of_roles = {leaf.name for leaf in leaves if leaf.role in roles}
    return of_roles or {leaf.name for leaf in leaves}


def _casts(program: Program, item: int) -> list[int]:
    """Items of the nodes that cast an input leaf."""
    input_count, id = len(program.inputs), program.inputs[item]
    casts = []
    for index, node in enumerate(program.nodes):
        if node.refs == (id,) and node.target.startswith("aten._to_copy"):
            casts.append(input_count + index)
    return casts
