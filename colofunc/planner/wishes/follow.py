"""Where a layout goes by itself: data parallel and tensor parallel are statements about a few leaves, followed.

Problem: "batch on `dp`" or "this weight by columns" says nothing of the hundred operators behind it, and yet everybody
knows what each of them does then. Idea: walk the program once; whatever takes an operand as it lies, by its rule, hands
its result on as it comes out.

    batch.x (dp b) i      linear {dp: b}        relu {dp: d0}         linear_dw {dp: b}, pending: it rests here
    fc1.weight (tp o) i   linear {tp: o}        relu {tp: d1}         linear of fc2 {tp: i}, pending: it rests here

A pending result comes to rest (it is reduced), so the flow ends there. Where two operands come in ways that do not fit
each other the flow ends too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs

from colofunc.dtensor.layout import Atom, Dim, Layout
from colofunc.dtensor.rule import Call, Rule, Strategy
from colofunc.dtensor.spec import Spec, bind
from colofunc.dtensor.strategies import FREE, build, lay_out, place, placements, usable
from colofunc.dtensor.strategies import follow as take
from colofunc.errors import PlanError, SpecError
from colofunc.mesh import Mesh
from colofunc.plugins import build_registry
from colofunc.program.ir import Node, Program
from colofunc.program.lower import call_of

RuleOf = Callable[[Node], Rule | None]


@attrs.frozen(eq=False)
class Followed:
    """`layouts`: value id -> how it lies. `strategies`: index of a node -> how it works on what reaches it.

    `asked`: index of a node that nothing reaches -> how it could give what a node that is reached wants of it (positions,
    a table of angles).
    """

    program: Program
    layouts: Mapping[int, Layout]
    strategies: Mapping[int, Strategy]
    asked: Mapping[int, Strategy] = attrs.field(factory=dict)

    def factors(self, index: int, axis: str) -> str | None:
        """The factor of node `index` that `axis` lies on, None where the flow does not reach it."""
        strategy = self.strategies.get(index)
        return None if strategy is None else dict(strategy.axes).get(axis)


def follow(
    program: Program,
    mesh: Mesh,
    seeds: Mapping[int, str | Spec | Layout],
    rule_of: RuleOf | None = None,
    rest: Mapping[int, str] | None = None,
    across: Collection[str] = (),
    held: Mapping[int, Sequence[Strategy]] | None = None,
    gathers: Collection[str] = (),
) -> Followed:
    """Follow leaves that lie as `seeds` says (value id -> spec) through the operators up to the update.

    `rest`: how results that are reduced lie then, a spec per number of dims ({3: "b (tp s) d"}; "..." is whole, and what
    is not in it is whole), and they are followed further. None: the flow ends there. `across`: operators that the flow
    crosses whatever they do inside: each factor lies in their results as it does in their operands. `held`: index of a node
    -> the strategies of a pattern that it is held to: the flow goes on from what it gives, wherever it came from. `gathers`:
    operators whose last operand yields where it does not fit the others.
    """
    rules = Rules(program, mesh, rule_of)
    lies = {id: bind(spec, mesh, program.values[id].shape) for id, spec in seeds.items()}
    if rest is None:
        lies = {id: layout for id, layout in lies.items() if not layout.is_replicated}
    found: dict[int, Strategy] = {}
    stream: set[int] = set()  # values that lie as they do because a sum came to rest there
    for index, node in enumerate(program.nodes):
        if held and index in held:
            found[index] = pattern = rules.nearest(node, held[index], lies)
            outs = zip(node.outs, pattern.outs, strict=True)
            lies |= {o: out for o, out in outs if o is not None and out is not None and not out.pending}
            continue
        if node.phase == "update" or not any(r in lies for r in node.refs):
            continue
        mine = {r: lies[r] for r in node.refs if r in lies}
        if node.target in across:
            lies |= {o: layout for o, layout in rules.crossed(node, mine).items() if o not in lies}
            continue
        if rest is not None and any(layout.pending for layout in mine.values()) and not _passes(node, mine, rules):
            for r, layout in mine.items():
                if layout.pending:
                    mine[r] = lies[r] = _at_rest(layout, mesh, rest)
                    stream.add(r)
        resting = {r for r in mine if r in stream}
        strategy = rules.take(node, mine)
        if strategy is None and resting:  # what rests is converted to what the others need: a gather before a column product
            strategy = rules.take(node, {r: layout for r, layout in mine.items() if r not in resting})
            resting = set()
        if strategy is None and node.target in gathers and len(mine) > 1:
            strategy = rules.take(node, {r: layout for r, layout in mine.items() if r != node.refs[-1]})
        if strategy is None:
            continue
        found[index] = strategy
        if len(resting) == len(mine):
            stream.update(o for o in node.outs if o is not None)
        for o, out in zip(node.outs, strategy.outs, strict=True):
            if o is not None and out is not None and (rest is not None or not (out.pending or out.is_replicated)):
                lies.setdefault(o, out)
    return Followed(program, lies, found, _asked(program, rules, lies, found))


def _asked(program: Program, rules: Rules, lies: Mapping[int, Layout], found: Mapping[int, Strategy]) -> dict[int, Strategy]:
    """What the followed operators want of others, passed on to where it is made."""
    wants: dict[int, Layout] = {}
    asked: dict[int, Strategy] = {}
    for index in range(len(program.nodes) - 1, -1, -1):
        node, strategy = program.nodes[index], found.get(index)
        if strategy is None:
            wanted = ((j, wants[o]) for j, o in enumerate(node.outs) if o in wants)
            strategy = next((s for j, layout in wanted if (s := rules.give(node, j, layout)) is not None), None)
            if strategy is None:
                continue
            asked[index] = strategy
        for ref, layout in zip(node.refs, strategy.ins, strict=True):
            if ref not in lies and not layout.is_replicated and not layout.pending:
                wants.setdefault(ref, layout)
    return asked


def _passes(node: Node, lies: Mapping[int, Layout], rules: Rules) -> bool:
    """Whether a pending sum is carried on: through views, and through sums of nothing but pending terms."""
    base = node.target.rsplit(".", 1)[0]
    sums = base in ("aten.add", "aten.sub") and all(r in lies and lies[r].pending for r in node.refs)
    return (sums or base in FREE) and rules.take(node, lies) is not None


def _at_rest(layout: Layout, mesh: Mesh, rest: Mapping[int, str]) -> Layout:
    try:
        return bind(rest.get(len(layout.shape), "..."), mesh, layout.shape)
    except SpecError:  # a size that the axis does not divide
        return layout.with_pending(())


class Rules:
    """What the operators of a program can do on a mesh, for plans that look before they wish.

    `rule_of`: None: the rules of `plugins`, as `cf.shard` takes them, of the installed ones, and the built-in ones.
    """

    def __init__(self, program: Program, mesh: Mesh, rule_of: RuleOf | None = None, plugins: Sequence[Any] = ()) -> None:
        self.program, self.mesh = program, mesh
        self._rule_of, self._registry = rule_of, build_registry(tuple(plugins))
        self._known: dict[Call, Rule | None] = {}
        self._taken: dict[Any, Strategy | None] = {}

    def call(self, node: Node) -> Call:
        """The node without its program: what rules and strategies see of it."""
        return call_of(node, self.program.values)[0]

    def rule(self, node: Node) -> Rule | None:
        """The einops rule of an operator call; None: it has none."""
        if self._rule_of is not None:
            return self._rule_of(node)
        call = call_of(node, self.program.values)[0]
        if call not in self._known:
            self._known[call] = self._registry.rule(call)
        return self._known[call]

    def take(self, node: Node, lies: Mapping[int, Layout], opened: bool = True) -> Strategy | None:
        """The strategy that takes operands as they lie (value id -> layout), the others as it likes; None: there is none.

        `opened`: also strategies with local code of their own, such as softmax over a split dim.
        """
        call, ids = call_of(node, self.program.values)
        have = tuple(lies.get(i) for i in ids)
        key = (call, have, opened)
        if key not in self._taken:
            self._taken[key] = self._take(call, self.rule(node), have, opened)
        return self._taken[key]

    def _take(self, call: Call, rule: Rule | None, have: tuple[Layout | None, ...], opened: bool) -> Strategy | None:
        options = [] if rule is None else [take(call, rule, k, layout) for k, layout in enumerate(have) if layout is not None]
        more = self._registry.extra_strategies(call, self.mesh) if opened else ()
        for strategy in (*options, *more):
            if strategy is not None and all(h is None or h is want for h, want in zip(have, strategy.ins, strict=True)):
                return strategy
        return None

    def nearest(self, node: Node, options: Sequence[Strategy], lies: Mapping[int, Layout]) -> Strategy:
        """Of several strategies the one that takes most operands as they lie."""
        ids = call_of(node, self.program.values)[1]
        return max(options, key=lambda s: sum(lies.get(i) is want for i, want in zip(ids, s.ins, strict=True)))

    def crossed(self, node: Node, lies: Mapping[int, Layout]) -> dict[int, Layout]:
        """Results of a node whose factors lie as they do in the operands (also those that its rule wants whole)."""
        call, ids = call_of(node, self.program.values)
        rule = self.rule(node)
        if rule is None:
            return {}
        placement: dict[str, Dim] = {}
        for id, operand in zip(ids, rule.ins, strict=True):
            placement |= place(operand, rule, lies[id].with_pending(())) or {} if id in lies else {}
        found = {}
        for o, op, typ in zip(node.outs, rule.outs, call.outs, strict=True):
            # An axis on rows here and on columns there (both of them in the gradient of a bias) is on the rows.
            mine: dict[str, Dim] = {}
            for f in (f for dim in op or () for f in dim if f in placement):
                if not {a for _, a in placement[f]} & {a for lies in mine.values() for _, a in lies if a is not None}:
                    mine[f] = placement[f]
            if o is not None and op is not None and typ is not None:
                found[o] = lay_out(op, typ, rule, mine)
        return found

    def give(self, node: Node, result: int, layout: Layout) -> Strategy | None:
        """The strategy whose result lies so; None: there is none."""
        rule, out = self.rule(node), None
        if rule is not None:
            out = rule.outs[result]
        placement = None if rule is None or out is None else place(out, rule, layout)
        if rule is None or placement is None or any(f not in usable(rule) for f in placement):
            return None
        strategy = build(self.call(node), rule, placement)
        return strategy if strategy.outs[result] is layout else None

    def place(self, node: Node, factor: str, axis: str, stripes: int = 1) -> Strategy | None:
        """The strategy with `axis` on a factor, in so many stripes; None where the sizes do not divide."""
        rule, n = self.rule(node), self.mesh.axis_size(axis)
        if rule is None or rule.sizes.get(factor, 0) % (n * stripes) or factor not in usable(rule):
            return None
        atoms = ((stripes, None), (n, axis), (rule.sizes[factor] // n // stripes, None))
        return build(call_of(node, self.program.values)[0], rule, {factor: tuple(a for a in atoms if a[0] > 1)})

    def cuts(self, node: Node, value: int, layout: Layout) -> tuple[int, ...]:
        """Numbers of stripes with which the split dim of an operand keeps clear of the factors that its rule cuts it into."""
        rule, found = self.rule(node), dict[int, None]()
        for operand, ref in zip(rule.ins if rule is not None else (), node.refs, strict=False):
            for factors, dim in zip(operand, layout.dims, strict=False) if ref == value else ():
                if rule is not None and len(factors) > 1 and any(axis is not None for _, axis in dim):
                    for k in range(1, len(factors)):
                        found[prod(rule.sizes[f] for f in factors[:k])] = None
        return tuple(found)


FREE_ROWS = (
    "aten._log_softmax", "aten._softmax", "aten.nll_loss", "aten.embedding", "aten.native_layer_norm", "aten._fused_rms_norm",
    "colofunc.linear", "aten.mm", "aten.addmm", "colofunc.experts",
)  # fmt: skip
"""Operators to which it is all the same in which order their rows lie, whoever wrote the local code."""

DEALT_ROWS = ("colofunc.experts",)
"""Those of them whose patterns do not care either how rows are dealt to the ranks of their own axes."""

MOST_BESIDE = 3
"""Axes beside a followed one that are searched together."""


def beside(call: Call, rule: Rule | None, strategy: Strategy, mesh: Mesh, extra: Iterable[Strategy] = ()) -> tuple[Strategy, ...]:
    """A strategy that enumeration does not offer, alone and together with every way to place the axes that it leaves open.

    `extra`: strategies with local code of their own, which may work on rows that lie so, too.
    """
    if rule is None:
        return (strategy,)
    placement = _placement(rule, strategy)
    found: dict[Strategy, None] = {strategy: None}
    if call.target.startswith(FREE_ROWS):
        found |= dict.fromkeys(other for each in extra for other in _relaid(call, rule, each, strategy, placement, mesh))
    if any(f not in usable(rule) for f in placement) or any(word not in rule.sizes for _, word in strategy.axes):  # local code of its own
        return tuple(found)
    mine = {a for a, _ in strategy.axes}
    others = tuple(a for a in mesh.axis_names if a not in mine and mesh.axis_size(a) > 1)
    if len(others) > MOST_BESIDE:
        raise PlanError(f"a striped layout beside {len(others)} open axes ({', '.join(others)}) is not searched; name plans for them")
    for both, rest in _among(placement, others, mesh):
        for more, passing in placements(rule, mesh, rest, orders=False):
            if not set(more) & set(placement):
                found.setdefault(build(call, rule, {**both, **more}, passing), None)
    return tuple(found)


def together(call: Call, rule: Rule | None, some: Sequence[Strategy], mesh: Mesh, extra: Iterable[Strategy] = ()) -> tuple[Strategy, ...]:
    """Strategies of several flows as one, where each has its axes where the others leave room, and beside open axes.

    Stripes of a fused weight from one plan, rows of a flat batch from another, sequences that two plans cut: neither is
    enumerated, so neither is offered beside the other.
    """
    merged: dict[str, Dim] = {}
    for strategy in some:
        mine = _placement(rule, strategy) if rule is not None and strategy.local is None else {}
        split = {f: dim for f, dim in mine.items() if any(axis is not None for _, axis in dim)}
        taken = {axis for dim in merged.values() for _, axis in dim if axis is not None}
        if not split or taken & {axis for dim in split.values() for _, axis in dim}:
            return ()
        for f, dim in split.items():
            both = _refined(merged[f], dim) if f in merged else dim
            if both is None:
                return ()
            merged[f] = both
    return beside(call, rule, build(call, rule, merged), mesh, extra) if rule is not None else ()


def _refined(one: Dim, other: Dim) -> Dim | None:
    """One factor with the axes of both: (16 tp 8) and (128 cp) are (16 tp 4 cp); None where they do not fit."""
    found: list[Atom] = []
    at = 1
    for before, n, axis in sorted([*_cuts(one), *_cuts(other)], key=lambda cut: cut[0]):
        if before > at:
            if before % at:
                return None
            found.append((before // at, None))
            at = before
        found.append((n, axis))
        at *= n
    rest, odd = divmod(prod(n for n, _ in one), at)
    return None if odd else (*found, *([(rest, None)] if rest > 1 else []))


def _cuts(dim: Dim) -> Iterator[tuple[int, int, str]]:
    """(parts before it, its size, axis) of every axis in a dim."""
    for k, (n, axis) in enumerate(dim):
        if axis is not None:
            yield prod(size for size, _ in dim[:k]), n, axis


def _placement(rule: Rule, strategy: Strategy) -> dict[str, Dim]:
    """Factor -> how it lies, of a strategy that puts each factor the same way in all operands."""
    found: dict[str, Dim] = {}
    for operand, layout in zip((*rule.ins, *rule.outs), (*strategy.ins, *strategy.outs), strict=True):
        if operand is not None and layout is not None:
            found.update(place(operand, rule, layout.with_pending(())) or {})
    return found


def _among(placement: Mapping[str, Dim], axes: tuple[str, ...], mesh: Mesh) -> Iterator[tuple[Mapping[str, Dim], tuple[str, ...]]]:
    """(placement with some axes inside its factors, the axes left); where two share a local part they stand in their order."""
    if not axes:
        yield placement, ()
        return
    *first, last = axes
    for some, rest in _among(placement, tuple(first), mesh):
        yield some, (*rest, last)
        for factor, dim in some.items():
            for both in _within(dim, last, mesh.axis_size(last)):
                yield {**some, factor: both}, rest


def _relaid(call: Call, rule: Rule, other: Strategy, like: Strategy, placement: Mapping[str, Dim], mesh: Mesh) -> Iterator[Strategy]:
    """`other` on operands whose factors lie as those of `like`: it has the same axes on them, in blocks."""
    mine = dict(like.axes)
    if not mine or any((a, f) not in other.axes or f not in placement for a, f in mine.items()):
        return
    both = [*zip(rule.ins, other.ins, call.ins, strict=True), *zip(rule.outs, other.outs, call.outs, strict=True)]
    lies = [None if op is None or lay is None else place(op, rule, lay.with_pending(())) for op, lay, _ in both]
    if any(p is None and lay is not None for p, (_, lay, _) in zip(lies, both, strict=True)):
        return
    guests = {f: tuple(a for a, g in other.axes if g == f and a not in mine) for f in mine.values()}
    theirs = {a for p in lies if p is not None for f in mine.values() for _, a in p.get(f, ()) if a is not None}
    if call.target.startswith(DEALT_ROWS):
        guests = dict.fromkeys(guests, tuple(sorted(theirs - set(mine), key=mesh.axis_names.index)))
    if theirs - set(mine) - {a for some in guests.values() for a in some}:
        return  # axes of a pattern of its own lie there as well
    for some, rest in _among({f: placement[f] for f in guests}, tuple(a for g in guests.values() for a in g), mesh):
        if rest or any({a for _, a in dim} & {b for g, bs in guests.items() if g != f for b in bs} for f, dim in some.items()):
            continue
        laid = [
            lay if p is None or op is None or lay is None or typ is None
            else lay_out(op, typ, rule, {**p, **{f: dim for f, dim in some.items() if f in p}}, lay.pending)
            for p, (op, lay, typ) in zip(lies, both, strict=True)
        ]  # fmt: skip
        ins = tuple(lay for lay in laid[: len(rule.ins)] if lay is not None)
        yield attrs.evolve(other, ins=ins, outs=tuple(laid[len(rule.ins) :]))


def _within(dim: Dim, axis: str, n: int) -> Iterator[Dim]:
    """The dim with `axis` as the major part of each local atom that it divides."""
    for k, (size, owner) in enumerate(dim):
        if owner is None and size % n == 0:
            yield (*dim[:k], (n, axis), *(((size // n, None),) if size > n else ()), *dim[k + 1 :])
