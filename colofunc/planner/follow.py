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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import attrs

from colofunc.dtensor.layout import Dim, Layout
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
    """`layouts`: value id -> how it lies. `strategies`: index of a node -> how it works on what reaches it."""

    program: Program
    layouts: Mapping[int, Layout]
    strategies: Mapping[int, Strategy]

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
) -> Followed:
    """Follow leaves that lie as `seeds` says (value id -> spec) through the operators up to the update.

    `rest`: how results that are reduced lie then, a spec per number of dims ({3: "b (tp s) d"}; "..." is whole, and what
    is not in it is whole), and they are followed further. None: the flow ends there. `across`: operators that the flow
    crosses whatever they do inside: each factor lies in their results as it does in their operands. `held`: index of a node
    -> the strategies of a pattern that it is held to: the flow goes on from what it gives, wherever it came from.
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
        if strategy is None:
            continue
        found[index] = strategy
        if len(resting) == len(mine):
            stream.update(o for o in node.outs if o is not None)
        for o, out in zip(node.outs, strategy.outs, strict=True):
            if o is not None and out is not None and (rest is not None or not (out.pending or out.is_replicated)):
                lies.setdefault(o, out)
    return Followed(program, lies, found)


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

    `rule_of`: None: the rules of the installed plugins and the built-in ones.
    """

    def __init__(self, program: Program, mesh: Mesh, rule_of: RuleOf | None = None) -> None:
        self.program, self.mesh = program, mesh
        self._rule_of, self._registry = rule_of, build_registry(())
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


def beside(call: Call, rule: Rule | None, strategy: Strategy, mesh: Mesh) -> tuple[Strategy, ...]:
    """A strategy that enumeration does not offer, alone and together with every way to place the axes that it leaves open."""
    if rule is None or strategy.local is not None:
        return (strategy,)
    placement: dict[str, Dim] = {}
    for operand, layout in zip((*rule.ins, *rule.outs), (*strategy.ins, *strategy.outs), strict=True):
        if operand is not None and layout is not None:
            placement.update(place(operand, rule, layout.with_pending(())) or {})
    mine = {a for a, _ in strategy.axes}
    others = tuple(a for a in mesh.axis_names if a not in mine and mesh.axis_size(a) > 1)
    if len(others) > 2:
        raise PlanError(f"a striped layout beside {len(others)} open axes ({', '.join(others)}) is not searched; name plans for them")
    found: dict[Strategy, None] = {strategy: None}
    for more, passing in placements(rule, mesh, others, orders=False):
        if not set(more) & set(placement):
            found.setdefault(build(call, rule, {**placement, **more}, passing), None)
    for axis in others:
        for factor, dim in placement.items():
            for both in _within(dim, axis, mesh.axis_size(axis)):
                found.setdefault(build(call, rule, {**placement, factor: both}), None)
    return tuple(found)


def _within(dim: Dim, axis: str, n: int) -> Iterator[Dim]:
    """The dim with `axis` as the major part of each local atom that it divides."""
    for k, (size, owner) in enumerate(dim):
        if owner is None and size % n == 0:
            yield (*dim[:k], (n, axis), *(((size // n, None),) if size > n else ()), *dim[k + 1 :])
