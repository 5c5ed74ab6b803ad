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

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any

import attrs

from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.ops.targets import is_view
from colofunc.plugins import Registry, build_registry
from colofunc.program.ir import Node, Program
from colofunc.program.lower import call_in
from colofunc.spec.layout import Dim, Layout
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.spec import Spec, bind
from colofunc.spec.strategies import build, lay_out, place, usable
from colofunc.spec.strategies import follow as take


@attrs.frozen(eq=False)
class Followed:
    """`layouts`: value id -> how it lies. `strategies`: index of a node -> how it works on what reaches it.

    `asked`: index of a node that nothing reaches -> how it could give what a node that is reached wants of it
    (positions, a table of angles).
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
    rules: Rules | None = None,
    rest: Mapping[int, str] | None = None,
    across: Collection[str] = (),
    held: Mapping[int, Sequence[Strategy]] | None = None,
    gathers: Collection[str] = (),
    apart: bool = False,
) -> Followed:
    """Follow leaves that lie as `seeds` says (value id -> spec) through the operators up to the update.

    `rules`: what operators can do, as a plan's `wishes` are given it; None: by the rules of installed plugins. `rest`:
    how results that are reduced lie then, a spec per number of dims ({3: "b (tp s) d"}; "..." is whole, and
    what is not in it is whole), and they are followed further. None: the flow ends there. `across`: operators that the
    flow crosses whatever they do inside: each factor lies in their results as it does in their operands. `held`: index
    of a node -> the strategies of a pattern that it is held to: the flow goes on from what it gives, wherever it came
    from. `gathers`: operators whose last operand yields where it does not fit the others. `apart`: each pending result
    comes to rest by itself, also where the sum of several could.
    """
    rules = rules or Rules(program, mesh)
    lies = {id: bind(spec, mesh, program.values[id].shape) for id, spec in seeds.items()}
    if rest is None:
        lies = {id: layout for id, layout in lies.items() if not layout.is_replicated}
    walk = _Walk(rules, lies, rest, gathers, apart)
    for index, node in enumerate(program.nodes):
        if held and index in held:
            walk.hold(index, node, held[index])
        elif node.phase != "update" and any(ref in lies for ref in node.refs):
            if node.target in across:
                walk.cross(node)
            else:
                walk.take(index, node)
    return Followed(program, lies, walk.strategies, _asked(program, rules, lies, walk.strategies))


@attrs.define(eq=False)
class _Walk:
    """A walk along a program, node by node. `lies`: value id -> how it lies, as far as the flow has come.

    `at_rest`: values that lie as they do because a sum came to rest there.
    """

    rules: Rules
    lies: dict[int, Layout]
    rest: Mapping[int, str] | None
    gathers: Collection[str]
    apart: bool
    strategies: dict[int, Strategy] = attrs.field(factory=dict)
    at_rest: set[int] = attrs.field(factory=set)

    def hold(self, index: int, node: Node, options: Sequence[Strategy]) -> None:
        """The flow goes on from what a pattern gives, wherever it came from."""
        self.strategies[index] = pattern = self.rules.nearest(node, options, self.lies)
        for out, layout in zip(node.outs, pattern.outs, strict=True):
            if out is not None and layout is not None and not layout.pending:
                self.lies[out] = layout

    def cross(self, node: Node) -> None:
        """Each factor lies in the results as it does in the operands."""
        operands = {ref: self.lies[ref] for ref in node.refs if ref in self.lies}
        for out, layout in self.rules.crossed(node, operands).items():
            self.lies.setdefault(out, layout)

    def take(self, index: int, node: Node) -> None:
        """The node works on operands as they lie, where it can, and its results go on from there."""
        operands = self._operands(node)
        resting = {ref for ref in operands if ref in self.at_rest}
        strategy = self.rules.take(node, operands)
        # what rests is converted to what the others need: a gather before a column product
        if strategy is None and resting:
            strategy = self.rules.take(node, {ref: layout for ref, layout in operands.items() if ref not in resting})
            resting = set()
        if strategy is None and node.target in self.gathers and len(operands) > 1:
            strategy = self.rules.take(node, {ref: layout for ref, layout in operands.items() if ref != node.refs[-1]})
        if strategy is None:
            return
        self.strategies[index] = strategy
        if len(resting) == len(operands):
            self.at_rest.update(node.results)
        for out, layout in zip(node.outs, strategy.outs, strict=True):
            if out is None or layout is None:
                continue
            if self.rest is not None or not (layout.pending or layout.is_replicated):
                self.lies.setdefault(out, layout)

    def _operands(self, node: Node) -> dict[int, Layout]:
        """How the operands lie, those that a flow has reached; pending ones come to rest unless the node carries them
        on.
        """
        operands = {ref: self.lies[ref] for ref in node.refs if ref in self.lies}
        pending = [ref for ref, layout in operands.items() if layout.pending]
        if self.rest is None or not pending or _passes(node, operands, self.rules, self.apart):
            return operands
        for ref in pending:
            operands[ref] = self.lies[ref] = _at_rest(operands[ref], self.rules.mesh, self.rest)
            self.at_rest.add(ref)
        return operands


def _asked(
    program: Program, rules: Rules, lies: Mapping[int, Layout], followed: Mapping[int, Strategy]
) -> dict[int, Strategy]:
    """What the followed operators want of others, passed on to where it is made."""
    wants: dict[int, Layout] = {}
    asked: dict[int, Strategy] = {}
    for index in range(len(program.nodes) - 1, -1, -1):
        node, strategy = program.nodes[index], followed.get(index)
        if strategy is None:
            strategy = _giving(node, wants, rules)
            if strategy is None:
                continue
            asked[index] = strategy
        for ref, layout in zip(node.refs, strategy.ins, strict=True):
            if ref not in lies and not layout.is_replicated and not layout.pending:
                wants.setdefault(ref, layout)
    return asked


def _giving(node: Node, wants: Mapping[int, Layout], rules: Rules) -> Strategy | None:
    """The strategy that gives a result as it is wanted, the first of them."""
    for position, out in enumerate(node.outs):
        if out is not None and out in wants:
            strategy = rules.give(node, position, wants[out])
            if strategy is not None:
                return strategy
    return None


def _passes(node: Node, lies: Mapping[int, Layout], rules: Rules, apart: bool) -> bool:
    """Whether a pending sum is carried on: through views, and through sums of nothing but pending terms unless those
    rest apart.
    """
    base = node.target.rsplit(".", 1)[0]
    sums = not apart and base in ("aten.add", "aten.sub") and all(r in lies and lies[r].pending for r in node.refs)
    return (sums or is_view(node.target)) and rules.take(node, lies) is not None


def _at_rest(layout: Layout, mesh: Mesh, rest: Mapping[int, str]) -> Layout:
    try:
        return bind(rest.get(len(layout.shape), "..."), mesh, layout.shape)
    except SpecError:  # a size that the axis does not divide
        return layout.with_pending(())


class Rules:
    """What the operators of a program can do on a mesh, for plans that look before they wish.

    `registry`: what plugins bring, `Build.registry` of a step; None: the installed ones.
    """

    def __init__(self, program: Program, mesh: Mesh, registry: Registry | None = None) -> None:
        self.program, self.mesh = program, mesh
        self.registry = build_registry(()) if registry is None else registry
        self._known: dict[Call, Rule | None] = {}
        self._extra: dict[Call, tuple[Strategy, ...]] = {}
        self._taken: dict[Any, Strategy | None] = {}

    def call(self, node: Node) -> Call:
        """The node without its program: what rules and strategies see of it."""
        return call_in(self.program, node)[0]

    def rule(self, node: Node) -> Rule | None:
        """The einops rule of an operator call, checked; None: it has none."""
        return self.rule_of_call(self.call(node))

    def rule_of_call(self, call: Call) -> Rule | None:
        """The same, of a node without its program."""
        if call not in self._known:
            rule = self.registry.rule(call)
            if rule is not None:
                rule.check(call)
            self._known[call] = rule
        return self._known[call]

    def extra(self, node: Node) -> tuple[Strategy, ...]:
        """Strategies with local code of their own, beyond the rule's."""
        return self._extra_of_call(self.call(node))

    def _extra_of_call(self, call: Call) -> tuple[Strategy, ...]:
        if call not in self._extra:
            self._extra[call] = self.registry.extra_strategies(call, self.mesh)
        return self._extra[call]

    def take(self, node: Node, lies: Mapping[int, Layout], opened: bool = True) -> Strategy | None:
        """The strategy that takes operands as they lie (value id -> layout), the others as it likes; None: there is
        none.

        `opened`: also strategies with local code of their own, such as softmax over a split dim.
        """
        call, ids = call_in(self.program, node)
        have = tuple(lies.get(i) for i in ids)
        key = (call, have, opened)
        if key not in self._taken:
            self._taken[key] = self._take(call, self.rule(node), have, opened)
        return self._taken[key]

    def _take(self, call: Call, rule: Rule | None, have: tuple[Layout | None, ...], opened: bool) -> Strategy | None:
        options = (
            [] if rule is None else [take(call, rule, k, layout) for k, layout in enumerate(have) if layout is not None]
        )
        more = self._extra_of_call(call) if opened else ()
        for strategy in (*options, *more):
            if strategy is not None and all(h is None or h is want for h, want in zip(have, strategy.ins, strict=True)):
                return strategy
        return None

    def nearest(self, node: Node, options: Sequence[Strategy], lies: Mapping[int, Layout]) -> Strategy:
        """Of several strategies the one that takes most operands as they lie."""
        ids = call_in(self.program, node)[1]
        return max(options, key=lambda s: sum(lies.get(i) is want for i, want in zip(ids, s.ins, strict=True)))

    def crossed(self, node: Node, lies: Mapping[int, Layout]) -> dict[int, Layout]:
        """Results of a node whose factors lie as they do in the operands (also those that its rule wants whole)."""
        call, ids = call_in(self.program, node)
        rule = self.rule(node)
        if rule is None:
            return {}
        placement: dict[str, Dim] = {}
        for id, operand in zip(ids, rule.ins, strict=True):
            if id in lies:
                placement.update(place(operand, rule, lies[id].with_pending(())) or {})
        layouts = {}
        for out, dims, typ in zip(node.outs, rule.outs, call.outs, strict=True):
            if out is None or dims is None or typ is None:
                continue
            # An axis on rows here and on columns there (both of them in the gradient of a bias) is on the rows.
            own: dict[str, Dim] = {}
            taken = set[str | None]()
            for factor in (factor for dim in dims for factor in dim):
                axes = {axis for _, axis in placement.get(factor, ()) if axis is not None}
                if factor in placement and not axes & taken:
                    own[factor] = placement[factor]
                    taken |= axes
            layouts[out] = lay_out(dims, typ, rule, own)
        return layouts

    def give(self, node: Node, result: int, layout: Layout) -> Strategy | None:
        """The strategy whose result lies so; None: there is none."""
        rule = self.rule(node)
        out = None if rule is None else rule.outs[result]
        if rule is None or out is None:
            return None
        placement = place(out, rule, layout)
        if placement is None or any(factor not in usable(rule) for factor in placement):
            return None
        strategy = build(self.call(node), rule, placement)
        return strategy if strategy.outs[result] is layout else None

    def place(self, node: Node, factor: str, axis: str, stripes: int = 1) -> Strategy | None:
        """The strategy with `axis` on a factor, in so many stripes; None where the sizes do not divide."""
        rule, n = self.rule(node), self.mesh.axis_size(axis)
        if rule is None or rule.sizes.get(factor, 0) % (n * stripes) or factor not in usable(rule):
            return None
        atoms = ((stripes, None), (n, axis), (rule.sizes[factor] // n // stripes, None))
        return build(call_in(self.program, node)[0], rule, {factor: tuple(a for a in atoms if a[0] > 1)})

    def cuts(self, node: Node, value: int, layout: Layout) -> tuple[int, ...]:
        """Numbers of stripes with which the split dim of an operand keeps clear of the factors that its rule cuts it
        into.
        """
        rule = self.rule(node)
        if rule is None:
            return ()
        stripes = dict[int, None]()  # in order, each once
        for operand, ref in zip(rule.ins, node.refs, strict=False):
            if ref != value:
                continue
            for factors, dim in zip(operand, layout.dims, strict=False):
                if any(axis is not None for _, axis in dim):
                    for k in range(1, len(factors)):
                        stripes[prod(rule.sizes[factor] for factor in factors[:k])] = None
        return tuple(stripes)
