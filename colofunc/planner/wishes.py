"""Wishes: what a user or a named plan wants of single tensors and operators, turned into constraints.

    {"*.q_proj.weight": "(tp o) i"}            a spec for parameters; it speaks for the axes that it names (tp)
    {"*.mlp.fc": "{tp: o}"}                    a strategy for the forward operators of a module; backward stays free
    lambda name, shape: "(tp o) i" or None     a function of parameter name and global shape
    Wish("*", "(dp ...)", axes=("dp",))        what a named plan such as zero(3, "dp") gives
    Wish("*", ("(dp o) i", "o (dp i)"))        one of several, the cheapest
    Wish("batch.*", "(dp ...)", along=True)    and every operator that it reaches by itself works so (`follow`)

A spec that names no axis means whole on every axis. Two wishes that put one axis of one tensor in two places clash; a
wish that matches nothing is an error with near names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, Protocol, runtime_checkable

import attrs

from colofunc.dtensor.layout import Dim, Layout, is_major, make_layout
from colofunc.dtensor.rule import Rule, Strategy
from colofunc.dtensor.spec import Spec, bind, parse
from colofunc.dtensor.strategies import enumerate_layouts
from colofunc.errors import PlanError, SpecError, near
from colofunc.mesh import Mesh
from colofunc.planner.constraints import Constraint, Constraints, leaf_strategy
from colofunc.planner.follow import beside, follow, together
from colofunc.planner.gradients import worked_on
from colofunc.planner.plan import matches, parse_axes
from colofunc.planner.ranks import heard, highest
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lower import call_of

Want = str | Spec | Layout
Where = dict[str, object]  # axis -> dim it lies on ("whole", or "pending sum" for none)
PARAMETERS = ("param", "frozen")


@attrs.frozen
class Wish:
    """One wish. `match`: a glob on parameter names or module paths, or a test of the name.

    `want`: a spec (of a tensor), several of which any will do, or "{axis: factor}" (of an operator; "{tp: whole}" keeps
    tp out). `axes`: it speaks for these only; None: those that `want` names, all if it names none. `roles`: input leaves it may mean; None:
    parameters, or any leaf where no parameter matches. `source`: who wishes, for messages. `optional`: it may match
    nothing. `along`: operators that work on the tensor as it lies, forward and backward, are held to do so; wishes of one
    source are followed together, and so is what an operator gives under the pattern of a plugin that is wished for it.
    `rest`: how results that are reduced on the way lie then (see `follow`), which holds what
    works on these too. `regather`: whether a parameter is gathered anew in backward; None: as memory asks. `phases`: the
    phases whose operators an operator wish holds. `chunk`: the parameter lies with others in chunks of so many elements
    ("auto": searched), which are gathered and reduced as one. `scatter`: whether its gradient is reduced in each microbatch
    (True: less memory, more on the wire) or once; None: as memory asks. The role "grad" means what the update
    makes of gradients elementwise. The words in "{axis: word}" are factors of the
    operator's rule, or what a plugin's strategy calls its own pattern ("{cp: ring}"). `across`: operators that are not
    followed but crossed: what goes in split comes out split, and a wish of its own says how they work (see `follow`).
    `rank`: where wishes speak for one axis of one tensor or operator, those of lower rank are not heard (see `ranks`).
    `gathers`: products whose last operand is gathered where it does not fit the others (keys, of which rows of scores need all).
    `values`: ids of values inside the program, instead of names: those that read them take them so, and it is followed from there.
    Of an operator wish: only the operators that make one of them, where several stand under one path (an adapter's products).
    """

    match: str | Callable[[str], bool]
    want: Want | tuple[Want, ...]
    axes: tuple[str, ...] | None = None
    roles: tuple[str, ...] | None = None
    source: str = "the plan"
    optional: bool = False
    targets: tuple[str, ...] = ()  # operators meant ("colofunc.linear"); () for all of the module
    along: bool = False
    regather: bool | None = None
    rest: Mapping[int, str] | None = None
    phases: tuple[str, ...] = ("forward",)
    chunk: int | str | None = None
    scatter: bool | None = None
    across: tuple[str, ...] = ()
    rank: int = 0
    values: tuple[int, ...] = ()
    gathers: tuple[str, ...] = ()

    @property
    def on_operator(self) -> bool:
        wants = self.want if isinstance(self.want, tuple) else (self.want,)
        return all(isinstance(want, str) and want.lstrip().startswith("{") for want in wants)

    def meets(self, name: str) -> bool:
        return matches(name, self.match) if isinstance(self.match, str) else bool(self.match(name))

    def __str__(self) -> str:
        pattern = self.match if isinstance(self.match, str) else "(a test of the name)"
        wants = self.want if isinstance(self.want, tuple) else (self.want,)
        want = " or ".join(repr(w.text() if isinstance(w, Layout) else str(w)) for w in wants)
        return f"{self.source}: {pattern!r} -> {want}"


@runtime_checkable
class NamedPlan(Protocol):
    """What `zero(3, "dp")` and its like return: wishes about the axes it names, for a given program and mesh."""

    axes: tuple[str, ...]

    def wishes(self, program: Program, mesh: Mesh, /) -> Sequence[Wish]: ...


def wishes_of(plan: Any, program: Program, source: str = "the plan", mesh: Mesh | None = None) -> tuple[Wish, ...]:
    """Wishes from a dict of globs, a function (name, shape) -> spec or None, a Wish, or a sequence of these.

    With `mesh` also from a named plan; its wishes speak for its axes only.
    """
    if isinstance(plan, Wish):
        return (plan,)
    if mesh is not None and isinstance(plan, NamedPlan):
        mesh.atoms(plan.axes)  # raises on unknown axes, with near names
        return tuple(w if w.axes is not None else attrs.evolve(w, axes=plan.axes) for w in plan.wishes(program, mesh))
    if isinstance(plan, Mapping):
        return tuple(
            attrs.evolve(want, match=match)
            if isinstance(want, Wish)
            else Wish(match, _want(want, match), source=source)
            for match, want in plan.items()
        )
    if callable(plan):
        found = []
        for id in program.inputs:
            value = program.values[id]
            want = plan(value.name, value.shape) if value.role in PARAMETERS else None
            if want is not None:
                found.append(Wish(value.name, _want(want, value.name), source=source))
        if not found:
            raise PlanError(
                f"{source}: the function gave no spec for any of the parameters; return a spec for some name"
            )
        return tuple(found)
    if isinstance(plan, Sequence) and not isinstance(plan, str):
        return tuple(w for part in plan for w in wishes_of(part, program, source, mesh))
    raise PlanError(f"{source} is {plan!r}; give a dict of globs, a function (name, shape) -> spec, or a named plan")


def _want(want: object, match: object) -> Want:
    if isinstance(want, (str, Spec, Layout)):
        return want
    raise PlanError(
        f"the wish for {match!r} is {want!r}; give a spec such as '(tp o) i' or a strategy such as '{{tp: o}}'"
    )


def constraints_of(
    wishes: Iterable[Wish],
    program: Program,
    mesh: Mesh,
    rule_of: Callable[[Node], Rule | None] = lambda node: None,
    extra_of: Callable[[Node], Iterable[Strategy]] = lambda node: (),
) -> Constraints:
    """All wishes as constraints; raises PlanError on clashes, on wishes that match nothing or cannot be done."""
    items: dict[int, list[Constraint]] = {}
    said: dict[int, list[tuple[Wish, Where]]] = {}
    seeds: dict[str, dict[int, tuple[Wish, Layout]]] = {}  # source -> value -> what it is wished to be followed as
    held: dict[str, dict[int, list[Wish]]] = {}  # source -> index of a node -> wishes for its pattern, which is followed
    regather: dict[int, bool] = {}
    chunks: dict[int, int | str] = {}
    scatter: dict[int, bool] = {}
    told = [
        (wish, list(_on_operators(wish, program, mesh, rule_of, extra_of) if wish.on_operator else _on_leaves(wish, program, mesh)))
        for wish in wishes
    ]
    ranks = highest((item, wish.rank, where) for wish, found in told for item, where, _ in found)
    for wish, found in told:
        none = True
        for item, all_of, whole in found:
            none = False
            where, left = heard(ranks, item, wish.rank, all_of, whole)
            constraint = left or Constraint(("nothing",), lambda s: True, str(wish))
            _check_clash(item, wish, where, said.setdefault(item, []), program)
            said[item].append((wish, where))
            items.setdefault(item, []).append(constraint)
            if wish.along and wish.on_operator:
                held.setdefault(wish.source, {}).setdefault(item - len(program.inputs), []).append(wish)
            elif wish.along:
                id = program.inputs[item]
                seeds.setdefault(wish.source, {})[id] = wish, _bounds(wish, program.values[id], mesh)[0]
            if wish.regather is not None and not wish.on_operator:
                regather[item] = wish.regather
                if wish.regather:
                    for node in _casts(program, item):
                        items.setdefault(node, []).append(attrs.evolve(constraint, says=f"{wish}, cast where it lies", offers=()))
            if wish.chunk is not None and not wish.on_operator:
                chunks[item] = wish.chunk
            if wish.scatter is not None and not wish.on_operator:
                scatter[item] = wish.scatter
        for id in () if wish.on_operator else wish.values:
            seeds.setdefault(wish.source, {})[id] = wish, _bounds(wish, program.values[id], mesh)[0]
        if none and not wish.optional and (wish.on_operator or not wish.values):
            raise PlanError(f"{wish} matches nothing{near(str(wish.match), _known(wish, program), 'names')}")
    odd: dict[int, list[Strategy]] = {}  # per operator, ways of single flows that enumeration does not have
    for source in dict.fromkeys((*seeds, *held)):
        patterns = {k: _patterns(some, extra_of(program.nodes[k]), mesh) for k, some in held.get(source, {}).items()}
        first = next(wish for wish, _ in seeds[source].values()) if source in seeds else next(iter(held[source].values()))[0]
        for item, wish, all_of, whole in _along(first, seeds.get(source, {}), patterns, program, mesh, rule_of, extra_of):
            where, left = heard(ranks, item, wish.rank, all_of, whole)
            _check_clash(item, wish, where, said.setdefault(item, []), program)
            said[item].append((wish, where))
            items.setdefault(item, []).extend([] if left is None else [left])
            odd.setdefault(item, []).extend(whole.offers[:1])
    for item, some in odd.items():
        at = program.nodes[item - len(program.inputs)]
        if len(some) > 1 and (offers := together(call_of(at, program.values)[0], rule_of(at), some, mesh, extra_of(at))):
            items[item].append(Constraint(("together", *(s.name for s in some)), lambda s: True, "", offers))
    return Constraints({item: tuple(some) for item, some in items.items()}, regather=regather, chunks=chunks, scatter=scatter)


def _known(wish: Wish, program: Program) -> set[str]:
    if wish.on_operator:
        return {n.path for n in program.nodes if n.path and n.phase in wish.phases}
    roles = wish.roles or PARAMETERS
    named = {program.values[i].name for i in program.inputs if program.values[i].role in roles}
    return named or {program.values[i].name for i in program.inputs}


def _check_clash(item: int, wish: Wish, where: Where, before: Sequence[tuple[Wish, Where]], program: Program) -> None:
    for other, had in before:
        for axis in where:
            if axis in had and not _meet(had[axis], where[axis]):
                n = len(program.inputs)
                thing = program.values[program.inputs[item]].name if item < n else program.nodes[item - n].path
                raise PlanError(
                    f"two wishes clash on axis {axis!r} of {thing!r}: {other} puts it on {_say(had[axis])}, "
                    f"{wish} on {_say(where[axis])}; drop one, or give them different axes"
                )


def _meet(one: object, other: object) -> bool:
    """Whether two wishes leave a place for an axis; one of several places is a frozenset."""
    both = [set(p) if isinstance(p, frozenset) else {p} for p in (one, other)]
    return bool(both[0] & both[1])


def _say(place: object) -> str:
    if isinstance(place, frozenset):
        return " or ".join(sorted(map(_say, place)))
    return f"dim {place}" if isinstance(place, int) else str(place)


def _on_leaves(wish: Wish, program: Program, mesh: Mesh) -> Iterator[tuple[int, Where, Constraint]]:
    if wish.values:
        return
    hits = [(k, program.values[i]) for k, i in enumerate(program.inputs) if wish.meets(program.values[i].name)]
    roles = wish.roles or PARAMETERS
    chosen = [(k, v) for k, v in hits if v.role in roles] or ([] if wish.roles else hits)
    if "grad" in roles:
        chosen += [(len(program.inputs) + index, grad) for index, grad in worked_on(program, wish.meets)]
    for k, value in chosen:
        layouts = _bounds(wish, value, mesh)
        axes = wish.axes if wish.axes is not None else (_named(wish, mesh) or mesh.axis_names)
        axes = tuple(a for a in mesh.atoms(axes) if mesh.axis_size(a) > 1)
        wheres = [places(layout, axes) for layout in layouts]
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
    wants = wish.want if isinstance(wish.want, tuple) else (wish.want,)
    try:
        return tuple(bind(want, mesh, value.shape) for want in wants)
    except SpecError as error:
        raise PlanError(f"{wish} cannot be done on {value.name!r} of shape {value.shape} on {mesh}: {error}") from error


def _named(wish: Wish, mesh: Mesh) -> tuple[str, ...]:
    """Axes that a spec names, also those of size 1."""
    names: list[str] = []
    for want in wish.want if isinstance(wish.want, tuple) else (wish.want,):
        if isinstance(want, Layout):
            return mesh.axis_names  # a bound layout is meant exactly
        parsed = parse(str(want))
        names += [f.name for dim in parsed.dims if dim is not None for f in dim if f.name in mesh and f.name]
        names += [a for a, _ in parsed.pending]
    return tuple(dict.fromkeys(names))


def _leaf_constraint(wish: Wish, layout: Layout, axes: tuple[str, ...], mesh: Mesh) -> Constraint:
    exact = leaf_strategy(layout)
    if layout.is_padded or set(layout.axes) - set(axes):  # meant exactly, and not among the enumerated ones
        return Constraint(("leaf", layout), lambda s: s.outs[0] is layout, str(wish), (exact,))
    if not is_major(layout):  # striped: not enumerated either, but other axes may lie on other dims
        offers = tuple(map(leaf_strategy, _with_others(layout, mesh)))
        return Constraint(("leaf", layout, axes), lambda s: _alike(layout, s.outs[0], axes), str(wish), offers, axes)

    def among(some: tuple[str, ...]) -> Callable[[Strategy], bool]:
        want = _orders(layout, some)
        return lambda s: s.outs[0] is not None and _orders(s.outs[0], some) == want

    def room(some: tuple[str, ...]) -> Callable[[Strategy], bool]:
        later = [prod(mesh.axis_size(a) for a in dim if a not in some) for dim in _orders(layout, axes)[0]]
        return lambda s: s.outs[0] is not None and _has_room(s.outs[0], later)

    return Constraint(("leaf", layout, axes), among(axes), str(wish), (exact,), axes, partly=among, room=room)


def _has_room(layout: Layout, ways: Sequence[int]) -> bool:
    """Whether what is local of each dim can still be split so many ways: axes that are decided later will lie there."""
    return all(prod(n for n, a in dim if a is None) % n == 0 for dim, n in zip(layout.dims, ways, strict=True))


def _orders(layout: Layout, axes: tuple[str, ...]) -> tuple[tuple[tuple[str, ...], ...], tuple[object, ...]]:
    """Per dim the order of `axes` among its factors, and what is pending over them."""
    dims = tuple(tuple(a for _, a in dim if a is not None and a in axes) for dim in layout.dims)
    return dims, tuple(p for p in layout.pending if p[0] in axes)


def _with_others(layout: Layout, mesh: Mesh) -> tuple[Layout, ...]:
    """A layout as it is, and with every way to split what it leaves whole (of each dim the last such part) over the other axes."""
    names = tuple(a for a in mesh.axis_names if a not in layout.axes)
    at = [max((k for k, (_, a) in enumerate(dim) if a is None), default=None) for dim in layout.dims]
    last = tuple(1 if k is None else dim[k][0] for k, dim in zip(at, layout.dims, strict=True))
    found: dict[Layout, None] = {layout: None}
    for other in enumerate_layouts(last, mesh, names):
        parts = zip(at, layout.dims, other.dims, strict=True)
        dims = tuple(a if k is None else (*a[:k], *b, *a[k + 1 :]) for k, a, b in parts)
        found.setdefault(make_layout(dims, layout.shape), None)
    return tuple(found)


def places(layout: Layout, axes: Iterable[str]) -> Where:
    """Axis -> the dim it lies on, "whole" where it lies on none, or its pending reduction."""
    on: Where = {a: d for d, dim in enumerate(layout.dims) for _, a in dim if a is not None}
    on |= {a: f"pending {how}" for a, how in layout.pending}
    return {a: on.get(a, "whole") for a in axes}


def _on_operators(
    wish: Wish,
    program: Program,
    mesh: Mesh,
    rule_of: Callable[[Node], Rule | None],
    extra_of: Callable[[Node], Iterable[Strategy]],
) -> Iterator[tuple[int, Where, Constraint]]:
    some = [parse_axes(str(want)) for want in (wish.want if isinstance(wish.want, tuple) else (wish.want,))]
    if not all(some):
        raise PlanError(f"{wish}: write a strategy as '{{tp: o, dp: b0}}', each mesh axis on a factor of the rule")
    for axis in (axis for pairs in some for axis, _ in pairs):
        mesh.axis_size(axis)  # raises on unknown axes, with near names
    n = len(program.inputs)
    hits = [
        (k, node) for k, node in enumerate(program.nodes)
        if node.phase in wish.phases and wish.meets(node.path) and (not wish.targets or node.target in wish.targets)
        and (not wish.values or any(o in wish.values for o in node.outs))
    ]  # fmt: skip
    words = [_words(rule_of(node), extra_of(node)) for _, node in hits]
    asked = [{f for a, f in pairs if mesh.axis_size(a) > 1} for pairs in some]
    able = [hit for hit, known in zip(hits, words, strict=True) if any(factors <= known for factors in asked)]
    if hits and not able:
        rules = {
            f"{node.target}: {rule.text()}" if (rule := rule_of(node)) else f"{node.target}: no rule"
            for _, node in hits
        }
        line = f" (first at {hits[0][1].line})" if hits[0][1].line else ""
        raise PlanError(
            f"{wish} cannot be done on {mesh}: no operator there{line} has these factors ({'; '.join(sorted(rules)[:6])}); "
            "name factors of a rule"
        )
    wants = [{a: f for a, f in pairs if mesh.axis_size(a) > 1} for pairs in some]
    for k, node in able:
        rule = rule_of(node)
        says = f"{wish} (rule {rule.text()})" if rule else str(wish)
        where = wants[0] if len(wants) == 1 else {a: frozenset(want.get(a, "whole") for want in wants) for want in wants for a in want}
        key = ("node", *(tuple(want.items()) for want in wants))
        yield n + k, dict(where), Constraint(
            key, _placer(wants), says, (), tuple(where), len(where) > 1, lambda some: _placer(wants, some)
        )


def _words(rule: Rule | None, extra: Iterable[Strategy]) -> set[str]:
    """What an axis can be placed on: factors of the rule, and the patterns of strategies with local code of their own."""
    found = {word for strategy in extra for _, word in strategy.axes}
    return found | {"whole", *rule.sizes} if rule is not None else found


def _placer(wants: Sequence[Mapping[str, str]], axes: tuple[str, ...] | None = None) -> Callable[[Strategy], bool]:
    """The test of a strategy's factors; `axes`: of these alone."""

    def accepts(s: Strategy) -> bool:
        on = dict(s.axes)
        return any(
            all(on.get(axis, "whole") == factor for axis, factor in want.items() if axes is None or axis in axes) for want in wants
        )

    return accepts


def _casts(program: Program, item: int) -> list[int]:
    """Items of the nodes that cast an input leaf."""
    n, id = len(program.inputs), program.inputs[item]
    return [n + k for k, node in enumerate(program.nodes) if node.refs == (id,) and node.target.startswith("aten._to_copy")]


def _patterns(wishes: Iterable[Wish], extra: Iterable[Strategy], mesh: Mesh) -> tuple[Strategy, ...]:
    """The strategies of plugins that wishes for one operator name together, without any other axis."""
    wants: list[dict[str, str]] = [{}]
    for wish in wishes:
        some = wish.want if isinstance(wish.want, tuple) else (wish.want,)
        wants = [want | dict(parse_axes(str(more))) for want in wants for more in some]
    wants = [{a: word for a, word in want.items() if mesh.axis_size(a) > 1} for want in wants]
    return tuple(s for s in extra if dict(s.axes) in wants)


# ---- wishes that are followed through the program ----


def _along(
    wish: Wish,
    seeds: Mapping[int, tuple[Wish, Layout]],
    held: Mapping[int, tuple[Strategy, ...]],
    program: Program,
    mesh: Mesh,
    rule_of: Callable[[Node], Rule | None],
    extra_of: Callable[[Node], Iterable[Strategy]],
) -> Iterator[tuple[int, Wish, Where, Constraint]]:
    """Constraints on every operator that leaves and patterns of one source reach: held where it works, offered where it passes on.

    `wish`: one of them, which says what holds for all.
    """
    patterns = {index: some for index, some in held.items() if some}
    starts = {id: layout for id, (_, layout) in seeds.items()}
    followed = follow(program, mesh, starts, rule_of, wish.rest, wish.across, patterns, wish.gathers)
    mine = dict.fromkeys(a for _, layout in seeds.values() for a in layout.axes)
    axes = tuple(mine | dict.fromkeys(a for some in patterns.values() for a, _ in some[0].axes))
    n, known = len(program.inputs), dict[Any, tuple[Strategy, ...]]()
    for index, strategy in followed.strategies.items():
        rule = rule_of(program.nodes[index])
        call, layouts = call_of(program.nodes[index], program.values)[0], (*strategy.ins, *strategy.outs)
        odd = strategy.local is not None or any(lay is not None and not _usual(lay, mesh) for lay in layouts)
        if odd and (call, layouts) not in known:
            known[call, layouts] = beside(call, rule, strategy, mesh, extra_of(program.nodes[index]))
        offers = known[call, layouts] if odd else ()
        key = ("along", wish.source, axes, tuple(lay and lay.text() for lay in (*strategy.ins, *strategy.outs)))
        if wish.rest is not None or _works(program.nodes[index], rule, program, strategy):
            says = f"{wish}, followed to {strategy.name}"
            partly = None if odd else partial(_like, strategy)
            yield n + index, wish, dict(strategy.axes), Constraint(key, _like(strategy, axes), says, offers, axes, partly=partly)
        elif offers:
            yield n + index, wish, {}, Constraint(key, lambda s: True, "", offers)
    for index, strategy in followed.asked.items():
        call, layouts = call_of(program.nodes[index], program.values)[0], (*strategy.ins, *strategy.outs)
        if not all(lay is None or _usual(lay, mesh) for lay in layouts):
            offers = beside(call, rule_of(program.nodes[index]), strategy, mesh)
            key = ("asked", wish.source, axes, tuple(lay and lay.text() for lay in layouts))
            yield n + index, wish, {}, Constraint(key, lambda s: True, "", offers)


def _usual(layout: Layout, mesh: Mesh) -> bool:
    """Whether enumeration has it: axes are major, and in the mesh's order."""
    order = mesh.axis_names.index
    some = [[order(a) for _, a in dim if a is not None] for dim in layout.dims]
    return is_major(layout) and all(dim == sorted(dim) for dim in some)


def _works(node: Node, rule: Rule | None, program: Program, strategy: Strategy) -> bool:
    """Whether an operator does what a plan is about: it has flops of its own, reads a parameter, or sums over the axes."""
    sums = any(layout is not None and layout.pending for layout in strategy.outs)
    reads = any(program.values[r].role in PARAMETERS for r in node.refs)
    return sums or reads or (rule is not None and rule.flops is not None)


def _like(strategy: Strategy, axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
    """Whether another strategy places `axes` in every operand and result as this one does."""
    want = (*strategy.ins, *strategy.outs)
    return lambda s: all(_alike(a, b, axes) for a, b in zip(want, (*s.ins, *s.outs), strict=True))


def _alike(want: Layout | None, layout: Layout | None, axes: tuple[str, ...]) -> bool:
    """Whether `axes` lie in a layout as in one that has no others: per dim in that order, behind as many parts (stripes).

    What stands before an axis may be split over others itself: `(8 tp s)` is met by `(dp 4 tp s)`, `(tp o)` by `(dp tp o)`.
    """
    if want is None or layout is None or want is layout:
        return want is layout
    if _orders(want, axes) != _orders(layout, axes):
        return False
    for mine, theirs in zip(want.dims, layout.dims, strict=True):
        for axis in (a for _, a in mine if a in axes):
            whole = prod(size for size, a in _before(mine, axis) if a is None)  # axes of its own that are not decided yet do not count
            before = [(size, a) for size, a in _before(theirs, axis) if a not in axes]
            parts = {prod(size for size, a in before if a is None)}
            for size in (size for size, a in before if a is not None):  # it splits a part of what stands before, or of the axis's own
                parts |= {size * n for n in parts}
            if whole not in parts:
                return False
    return True


def _before(dim: Dim, axis: str | None) -> Dim:
    return dim[: next(k for k, (_, a) in enumerate(dim) if a == axis)]
