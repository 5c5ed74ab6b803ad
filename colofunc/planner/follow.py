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

from collections.abc import Callable, Mapping

import attrs

from colofunc.dtensor.layout import Dim, Layout
from colofunc.dtensor.rule import Call, Rule, Strategy
from colofunc.dtensor.spec import Spec, bind
from colofunc.dtensor.strategies import build, place, placements
from colofunc.dtensor.strategies import follow as take
from colofunc.errors import PlanError
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
    stop: frozenset[int] = frozenset(),
) -> Followed:
    """Follow leaves that lie as `seeds` says (value id -> spec) through the operators up to the update.

    `stop`: indices of nodes that are reached, but that hand nothing on.
    """
    rules = rule_of or registered_rules(program)
    lies = {id: bind(spec, mesh, program.values[id].shape) for id, spec in seeds.items()}
    lies = {id: layout for id, layout in lies.items() if not layout.is_replicated}
    found: dict[int, Strategy] = {}
    for index, node in enumerate(program.nodes):
        if node.phase == "update" or not any(r in lies for r in node.refs):
            continue
        call, ids = call_of(node, program.values)
        strategy = _fitting(call, rules(node), tuple(lies.get(i) for i in ids), mesh)
        if strategy is None:
            continue
        found[index] = strategy
        for o, layout in zip(node.outs, strategy.outs, strict=True):
            if o is not None and layout is not None and not layout.pending and not layout.is_replicated and index not in stop:
                lies.setdefault(o, layout)
    return Followed(program, lies, found)


def registered_rules(program: Program) -> RuleOf:
    """Rules of operators as the installed plugins and the built-in tables know them."""
    registry = build_registry(())
    known: dict[Call, Rule | None] = {}

    def rule_of(node: Node) -> Rule | None:
        call = call_of(node, program.values)[0]
        if call not in known:
            known[call] = registry.rule(call)
        return known[call]

    return rule_of


def _fitting(call: Call, rule: Rule | None, lies: tuple[Layout | None, ...], mesh: Mesh) -> Strategy | None:
    """The strategy that takes every operand as it lies (those that lie nowhere as it likes); None where there is none."""
    options = []
    for k, layout in enumerate(lies):
        if layout is not None:
            if rule is not None and (strategy := take(call, rule, k, layout)) is not None:
                options.append(strategy)
    registry = build_registry(())
    options += list(registry.extra_strategies(call, mesh))
    for strategy in options:
        if all(have is None or have is want for have, want in zip(lies, strategy.ins, strict=True)):
            return strategy
    return None


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
    return tuple(found)
