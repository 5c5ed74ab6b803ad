"""What wishes mean for the leaves and operators of one program, as constraints on the search.

    Wish("*.q_proj.weight", "(tp o) i")      leaf: tp on dim 0, the other axes as the search likes
    Wish("*.mlp.fc", "{tp: o}")              forward operators of mlp.fc: tp on the rule's factor o
    Wish("*", ("(dp o) i", "o (dp i)"))      leaves: either; all ways that a spec needs and enumeration lacks are offered
    Wish("batch.*", "(dp b) ...", along=True)     the leaf, and what its layout reaches (`along`)

A spec that names no axis means whole on every axis. Two wishes that put one axis of one tensor in two places clash; a
wish that matches nothing is an error with near names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import prod

import attrs

from colofunc.errors import PlanError, SpecError, near
from colofunc.mesh import Mesh
from colofunc.planner.plan import parse_axes
from colofunc.planner.sharding.constraints import Constraint, Constraints, leaf_strategy
from colofunc.planner.wishes.flow_constraints import ExtraOf, Flow, RuleOf, along, meeting
from colofunc.planner.wishes.layout_equality import alike, orders
from colofunc.planner.wishes.wish import PARAMETERS, Wish
from colofunc.program.facts import is_pointwise
from colofunc.program.ir import Node, Program, Value, computed_once
from colofunc.spec.layout import At, Dim, Layout, at_text, is_major, make_layout
from colofunc.spec.rule import Rule, Strategy
from colofunc.spec.spec import bind, parse
from colofunc.spec.strategies import enumerate_layouts

Where = dict[str, object]  # axis -> dim it lies on ("whole", or "pending sum" for none)


def constraints_of(
    wishes: Iterable[Wish],
    program: Program,
    mesh: Mesh,
    rule_of: RuleOf = lambda node: None,
    extra_of: ExtraOf = lambda node: (),
) -> Constraints:
    """All wishes as constraints; raises PlanError on clashes, on wishes that match nothing or cannot be done."""
    leaves = _Named.of([program.values[i] for i in program.inputs])
    grads = _Named.of(gradients(program))

    def found_by(wish: Wish) -> list[tuple[int, Where, Constraint]]:
        if wish.on_operator:
            return list(_on_operators(wish, program, mesh, rule_of, extra_of))
        return list(_on_leaves(wish, program, mesh, leaves, grads))

    told = [(wish, found_by(wish)) for wish in wishes]
    some = _Heard(program, mesh, highest((item, wish.rank, where) for wish, found in told for item, where, _ in found))
    for wish, found in told:
        for item, where, constraint in found:
            some.add(wish, item, where, constraint)
        for id in () if wish.on_operator else wish.values:
            some.seeds.setdefault(wish.source, {})[id] = wish, _bounds(wish, program.values[id], mesh)[0]
        if not found and not wish.optional and (wish.on_operator or not wish.values):
            raise PlanError(f"{wish} matches nothing{near(str(wish.match), _known(wish, program), 'names')}")
    odd: dict[int, list[Strategy]] = {}  # per operator, ways of single flows that enumeration does not have
    for source in dict.fromkeys((*some.seeds, *some.held)):
        flow = Flow(some.seeds.get(source, {}), some.held.get(source, {}))
        for item, where, constraint in along(flow, program, mesh, rule_of, extra_of):
            left = some.hear(flow.wish, item, where, constraint)
            some.items.setdefault(item, []).extend([] if left is None else [left])
            odd.setdefault(item, []).extend(constraint.offers[:1])
    for item, constraint in meeting(odd, program, mesh, rule_of, extra_of):
        some.items[item].append(constraint)
    items = {item: tuple(constraints) for item, constraints in some.items.items()}
    return Constraints(items, regather=some.regather, chunks=some.chunks, scatter=some.scatter, at=some.at)


@attrs.define
class _Heard:
    """What wishes say of items (input leaves, then nodes), one after the other."""

    program: Program
    mesh: Mesh
    ranks: Ranks
    items: dict[int, list[Constraint]] = attrs.field(factory=dict)
    said: dict[int, list[tuple[Wish, Where]]] = attrs.field(factory=dict)
    seeds: dict[str, dict[int, tuple[Wish, Layout]]] = attrs.field(factory=dict)  # source -> value -> what it is to be followed as
    held: dict[str, dict[int, list[Wish]]] = attrs.field(factory=dict)  # source -> node -> wishes for its pattern, which is followed
    regather: dict[int, bool] = attrs.field(factory=dict)
    chunks: dict[int, int | str] = attrs.field(factory=dict)
    scatter: dict[int, bool] = attrs.field(factory=dict)
    at: dict[int, At] = attrs.field(factory=dict)

    def hear(self, wish: Wish, item: int, all_of: Where, whole: Constraint) -> Constraint | None:
        """What of a constraint is heard beside wishes of higher rank; raises PlanError where another of its rank says otherwise."""
        where, left = heard(self.ranks, item, wish.rank, all_of, whole)
        for other, had in self.said.setdefault(item, []):
            for axis in where:
                if axis in had and not _meet(had[axis], where[axis]):
                    n = len(self.program.inputs)
                    thing = self.program.values[self.program.inputs[item]].name if item < n else self.program.nodes[item - n].path
                    raise PlanError(
                        f"two wishes clash on axis {axis!r} of {thing!r}: {other} puts it on {_say(had[axis])}, "
                        f"{wish} on {_say(where[axis])}; drop one, or give them different axes"
                    )
        self.said[item].append((wish, where))
        return left

    def add(self, wish: Wish, item: int, all_of: Where, whole: Constraint) -> None:
        """A wish for one item, with what it says beside where the item lies."""
        constraint = self.hear(wish, item, all_of, whole) or Constraint(("nothing",), lambda s: True, str(wish))
        self.items.setdefault(item, []).append(constraint)
        if wish.along and wish.on_operator:
            self.held.setdefault(wish.source, {}).setdefault(item - len(self.program.inputs), []).append(wish)
        elif wish.along:
            value = self.program.values[self.program.inputs[item]]
            self.seeds.setdefault(wish.source, {})[value.id] = wish, _bounds(wish, value, self.mesh)[0]
        if wish.on_operator:
            return
        if wish.regather is not None:
            self.regather[item] = wish.regather
        for node in _casts(self.program, item) if wish.regather else ():
            self.items.setdefault(node, []).append(attrs.evolve(constraint, says=f"{wish}, cast where it lies", offers=()))
        at = _bounds(wish, self.program.values[self.program.inputs[item]], self.mesh)[0].at if item < len(self.program.inputs) else None
        if at is not None:
            self.at[item] = at
        if wish.chunk is not None:
            self.chunks[item] = wish.chunk
        if wish.scatter is not None:
            self.scatter[item] = wish.scatter


def _known(wish: Wish, program: Program) -> set[str]:
    if wish.on_operator:
        return {n.path for n in program.nodes if n.path and n.phase in wish.phases}
    roles = wish.roles or PARAMETERS
    named = {program.values[i].name for i in program.inputs if program.values[i].role in roles}
    return named or {program.values[i].name for i in program.inputs}


def _meet(one: object, other: object) -> bool:
    """Whether two wishes leave a place for an axis; one of several places is a frozenset."""
    both = [set(p) if isinstance(p, frozenset) else {p} for p in (one, other)]
    return bool(both[0] & both[1])


def _say(place: object) -> str:
    if isinstance(place, frozenset):
        return " or ".join(sorted(map(_say, place)))
    return f"dim {place}" if isinstance(place, int) else str(place)


@attrs.frozen
class _Named:
    """Values, and their numbers by all that may be written for them: "layers.0.weight", "0.weight" and "weight" are one leaf's."""

    values: Sequence[Value]
    numbers: Mapping[str, Sequence[int]]

    @staticmethod
    def of(values: Sequence[Value]) -> _Named:
        numbers = defaultdict[str, list[int]](list)
        for k, value in enumerate(values):
            rest: str | None = value.name
            while rest is not None:
                numbers[rest].append(k)
                _, dot, behind = rest.partition(".")
                rest = behind if dot else None
        return _Named(values, numbers)

    def met(self, wish: Wish) -> list[tuple[int, Value]]:
        """Those that a wish is about, with their numbers."""
        # Plans wish for one leaf at a time by its name: a look at all names for each would take minutes for a deep model.
        if isinstance(wish.match, str) and not any(c in wish.match for c in "*?["):
            return [(k, self.values[k]) for k in self.numbers.get(wish.match, ())]
        return [(k, value) for k, value in enumerate(self.values) if wish.meets(value.name)]


def _on_leaves(wish: Wish, program: Program, mesh: Mesh, leaves: _Named, grads: _Named) -> Iterator[tuple[int, Where, Constraint]]:
    if wish.values:
        return
    hits = leaves.met(wish)
    roles = wish.roles or PARAMETERS
    chosen = [(k, v) for k, v in hits if v.role in roles] or ([] if wish.roles else hits)
    if "grad" in roles:
        met = [grad for _, grad in grads.met(wish)]
        chosen += [(len(program.inputs) + index, grad) for index, grad in worked_on(program, met)]
    for k, value in chosen:
        layouts = _bounds(wish, value, mesh)
        axes = wish.axes if wish.axes is not None else (_named(wish, mesh) or mesh.axis_names)
        axes = tuple(a for a in mesh.atoms(axes) if mesh.axis_size(a) > 1)
        wheres = [places(layout, axes) for layout in layouts]
        layouts = tuple(layout.with_at(None) for layout in layouts)
        where = {a: frozenset(w[a] for w in wheres) if len(wheres) > 1 else wheres[0][a] for a in axes}
        constraint = _any_of([_leaf_constraint(wish, layout, axes, mesh) for layout in layouts])
        yield k, where, constraint if k < len(program.inputs) else attrs.evolve(constraint, offers=())


def _any_of(some: Sequence[Constraint]) -> Constraint:
    if len(some) == 1:
        return some[0]
    offers = tuple(offer for c in some for offer in c.offers)
    key = ("any", *(c.key for c in some))

    def partly(axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
        parts = [c.on(axes) for c in some]
        return lambda s: any(c is None or c.accepts(s) for c in parts)

    return Constraint(key, lambda s: any(c.accepts(s) for c in some), some[0].says, offers, some[0].axes, partly=partly)


def _bounds(wish: Wish, value: Value, mesh: Mesh) -> tuple[Layout, ...]:
    try:
        return tuple(bind(want, mesh, value.shape) for want in wish.wants)
    except SpecError as error:
        raise PlanError(f"{wish} cannot be done on {value.name!r} of shape {value.shape} on {mesh}: {error}") from error


def _named(wish: Wish, mesh: Mesh) -> tuple[str, ...]:
    """Axes that a spec names, also those of size 1."""
    names: list[str] = []
    for want in wish.wants:
        if isinstance(want, Layout):
            return mesh.axis_names  # a bound layout is meant exactly
        parsed = parse(str(want))
        for dim in parsed.dims:
            names += [f.name for f in dim or () if f.name and f.name in mesh]
        names += [axis for axis, _ in parsed.pending]
        if parsed.at is not None:
            names.append(parsed.at[0])
    return tuple(dict.fromkeys(names))


def _leaf_constraint(wish: Wish, layout: Layout, axes: tuple[str, ...], mesh: Mesh) -> Constraint:
    exact = leaf_strategy(layout)
    if layout.is_padded or set(layout.axes) - set(axes):  # meant exactly, and not among the enumerated ones
        return Constraint(("leaf", layout), lambda s: s.outs[0] is layout, str(wish), (exact,))
    if not is_major(layout):  # striped: not enumerated either, but other axes may lie on other dims
        offers = tuple(map(leaf_strategy, _with_others(layout, mesh)))
        return Constraint(("leaf", layout, axes), lambda s: alike(layout, s.outs[0], axes), str(wish), offers, axes)

    def among(some: tuple[str, ...]) -> Callable[[Strategy], bool]:
        want = orders(layout, some)
        return lambda s: s.outs[0] is not None and orders(s.outs[0], some) == want

    def room(some: tuple[str, ...]) -> Callable[[Strategy], bool]:
        later = []
        for dim in orders(layout, axes)[0]:
            later.append(prod(mesh.axis_size(axis) for axis in dim if axis not in some))
        return lambda s: s.outs[0] is not None and _has_room(s.outs[0], later)

    return Constraint(("leaf", layout, axes), among(axes), str(wish), (exact,), axes, partly=among, room=room)


def _has_room(layout: Layout, ways: Sequence[int]) -> bool:
    """Whether what is local of each dim can still be split so many ways: axes that are decided later will lie there."""
    for dim, n in zip(layout.dims, ways, strict=True):
        local = prod(size for size, axis in dim if axis is None)
        if local % n:
            return False
    return True


def _with_others(layout: Layout, mesh: Mesh) -> tuple[Layout, ...]:
    """A layout as it is, and with every way to split what it leaves whole (of each dim the last such part) over the other axes."""
    names = tuple(a for a in mesh.axis_names if a not in layout.axes)
    at = [_last_whole(dim) for dim in layout.dims]
    last = tuple(1 if k is None else dim[k][0] for k, dim in zip(at, layout.dims, strict=True))
    found: dict[Layout, None] = {layout: None}
    for other in enumerate_layouts(last, mesh, names):
        dims: list[Dim] = []
        for k, dim, split in zip(at, layout.dims, other.dims, strict=True):
            dims.append(dim if k is None else (*dim[:k], *split, *dim[k + 1 :]))
        found.setdefault(make_layout(tuple(dims), layout.shape), None)
    return tuple(found)


def _last_whole(dim: Dim) -> int | None:
    """The place of the last part of a dim that no axis splits."""
    found = None
    for place, (_, axis) in enumerate(dim):
        if axis is None:
            found = place
    return found


def places(layout: Layout, axes: Iterable[str]) -> Where:
    """Axis -> the dim it lies on, "whole" where it lies on none, or its pending reduction."""
    on: Where = {a: d for d, dim in enumerate(layout.dims) for _, a in dim if a is not None}
    on |= {a: f"pending {how}" for a, how in layout.pending}
    on |= {} if layout.at is None else {layout.at[0]: at_text(layout.at)}
    return {a: on.get(a, "whole") for a in axes}


def _on_operators(
    wish: Wish,
    program: Program,
    mesh: Mesh,
    rule_of: RuleOf,
    extra_of: ExtraOf,
) -> Iterator[tuple[int, Where, Constraint]]:
    wants = list(_factors_asked(wish, mesh))
    hits = list(_operators_met(wish, program))
    able = []
    for k, node in hits:
        known = _words(rule_of(node), extra_of(node))
        if any(known.issuperset(want.values()) for want in wants):
            able.append((k, node))
    if hits and not able:
        raise PlanError(_lacks_factors(wish, mesh, [node for _, node in hits], rule_of))
    for k, node in able:
        rule = rule_of(node)
        says = f"{wish} (rule {rule.text()})" if rule else str(wish)
        where: Mapping[str, str | frozenset[str]] = wants[0] if wants else {}
        if len(wants) > 1:
            axes = dict.fromkeys(axis for want in wants for axis in want)
            where = {axis: frozenset(want.get(axis, "whole") for want in wants) for axis in axes}
        key = ("node", *(tuple(want.items()) for want in wants))
        yield len(program.inputs) + k, dict(where), Constraint(
            key, _placer(wants), says, (), tuple(where), len(where) > 1, lambda some: _placer(wants, some)
        )


def _factors_asked(wish: Wish, mesh: Mesh) -> Iterator[dict[str, str]]:
    """For each strategy that a wish names, axis -> factor of the rule, of axes that split anything. Raises PlanError where it is none."""
    for want in wish.wants:
        pairs = parse_axes(str(want))
        if not pairs:
            raise PlanError(f"{wish}: write a strategy as '{{tp: o, dp: b0}}', each mesh axis on a factor of the rule")
        # The size of an axis that the mesh has not is an error with near names.
        yield {axis: factor for axis, factor in pairs if mesh.axis_size(axis) > 1}


def _operators_met(wish: Wish, program: Program) -> Iterator[tuple[int, Node]]:
    """The operators that a wish is about, with their positions."""
    for k, node in enumerate(program.nodes):
        if node.phase not in wish.phases or not wish.meets(node.path):
            continue
        if wish.targets and node.target not in wish.targets:
            continue
        if not wish.values or any(out in wish.values for out in node.outs):
            yield k, node


def _lacks_factors(wish: Wish, mesh: Mesh, nodes: Sequence[Node], rule_of: RuleOf) -> str:
    """What to say where no operator that a wish is about has the factors that it names."""
    rules = set[str]()
    for node in nodes:
        rule = rule_of(node)
        rules.add(f"{node.target}: {'no rule' if rule is None else rule.text()}")
    line = f" (first at {nodes[0].line})" if nodes[0].line else ""
    return (
        f"{wish} cannot be done on {mesh}: no operator there{line} has these factors ({'; '.join(sorted(rules)[:6])}); "
        "name factors of a rule"
    )


def _words(rule: Rule | None, extra: Iterable[Strategy]) -> set[str]:
    """What an axis can be placed on: factors of the rule, and the patterns of strategies with local code of their own."""
    found = {word for strategy in extra for _, word in strategy.axes}
    return found | {"whole", *rule.sizes} if rule is not None else found


def _placer(wants: Sequence[Mapping[str, str]], axes: tuple[str, ...] | None = None) -> Callable[[Strategy], bool]:
    """The test of a strategy's factors; `axes`: of these alone."""

    def accepts(s: Strategy) -> bool:
        on = dict(s.axes)
        for want in wants:
            asked = want if axes is None else {axis: factor for axis, factor in want.items() if axis in axes}
            if all(on.get(axis, "whole") == factor for axis, factor in asked.items()):
                return True
        return False

    return accepts


def _casts(program: Program, item: int) -> list[int]:
    """Items of the nodes that cast an input leaf."""
    n, id = len(program.inputs), program.inputs[item]
    return [n + k for k, node in enumerate(program.nodes) if node.refs == (id,) and node.target.startswith("aten._to_copy")]


# ---- gradients ----
# Problem: a parameter's update is pinned by where its state lies, and a gradient passes through others before (clipping, the
# squares of its norm, a loss scale). Left free, they may ask for other layouts, and the gradient travels twice. Idea: follow a
# gradient from where it is made, through elementwise operators that keep its shape.
#
#     grad.w -> mul(g, g)          squares of the norm: here, and no further, its sum has another shape
#            -> mul(g, factor)     what the update reads


@computed_once
def gradients(program: Program) -> tuple[Value, ...]:
    """All gradients of a program."""
    return tuple(value for value in program.values.values() if value.role == "grad")


def worked_on(program: Program, grads: Iterable[Value]) -> Iterator[tuple[int, Value]]:
    """(index of a node of the update, the gradient that it works on) for these gradients.

    Plans ask for one parameter at a time, so only what reads a gradient is looked at, and what reads that.
    """
    from_ = {grad.id: grad for grad in grads}
    readers = _elementwise_readers(program)
    ahead = [index for id in from_ for index in readers.get(id, ())]
    heapify(ahead)
    last = -1
    while ahead:
        index = heappop(ahead)
        if index == last:
            continue
        last, node = index, program.nodes[index]
        (out,) = node.results
        read = {from_[i].id: from_[i] for i in node.refs if i in from_ and from_[i].shape == program.values[out].shape}
        if len(read) == 1:
            (grad,) = read.values()
            from_[out] = grad
            yield index, grad
            for reader in readers.get(out, ()):
                heappush(ahead, reader)


@computed_once
def _elementwise_readers(program: Program) -> Mapping[int, list[int]]:
    """Value -> positions of the elementwise operators of the update that read it."""
    found: dict[int, list[int]] = {}
    for index, node in enumerate(program.nodes):
        if node.phase == "update" and len(node.outs) == 1 == len(node.results) and is_pointwise(node.target):
            for id in dict.fromkeys(node.refs):
                found.setdefault(id, []).append(index)
    return found


# ---- wishes of different rank ----
#     zero(3, ("dp", "ep"))    layers.0.experts.up  (dp ep d0) ...   rank 0      heard for dp
#     experts("ep")            layers.0.experts.up  (ep e) ...       rank 1      heard for ep
#     experts("ep")            layers.0.q_proj      whole            rank -1     not heard: zero speaks for ep here
#
# Problem: "states over all ranks" and "experts over these" are both what the field says, of different tensors, and as
# wishes they clash. Idea: who speaks of few tensors in particular outranks who speaks of all; what a plan says only so that
# nothing is left open yields to everybody. Wishes of equal rank still clash.


Ranks = Mapping[int, Mapping[str, int]]  # item -> axis -> the highest rank that speaks for it


def highest(said: Iterable[tuple[int, int, Iterable[str]]]) -> Ranks:
    """From (item, rank of a wish, axes it speaks for)."""
    found: dict[int, dict[str, int]] = {}
    for item, rank, axes in said:
        mine = found.setdefault(item, {})
        mine.update({axis: max(rank, mine.get(axis, rank)) for axis in axes})
    return found


def heard(
    ranks: Ranks, item: int, rank: int, where: Mapping[str, object], constraint: Constraint
) -> tuple[dict[str, object], Constraint | None]:
    """What is left of a wish: the axes for which none outranks it, and its constraint on these; None: nothing."""
    mine = {axis: place for axis, place in where.items() if ranks.get(item, {}).get(axis, rank) <= rank}
    return mine, constraint if len(mine) == len(where) else attrs.evolve(constraint, room=None).on(tuple(mine))
