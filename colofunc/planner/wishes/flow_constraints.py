"""Wishes that are followed: leaves that lie so, and operators that work so, hold whatever their layouts reach.

    Wish("batch.*", "(dp b) ...", along=True)       held: linear {dp: b}, linear_dw {dp: b}     left free: a softmax over b
    Wish("*", "{cp: ring}", along=True)             held: what reads the result of attention as it comes out of the ring

Problem: `follow` finds how a hundred operators would work by themselves, and not all of that is meant: an elementwise
operator may as well work on what was gathered already. Idea: operators that do what a plan is about (they have flops, read a
parameter, or sum over the plan's axes) are held to the way that was found; others are offered it. Ways that enumeration does
not have (stripes, axes in another order than the mesh's) are offered with every way to place the other axes beside them;
and where flows of several plans meet in one operator, one way that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.plan import parse_axes
from colofunc.planner.sharding.constraints import Constraint
from colofunc.planner.wishes.combined import combined, with_open_axes
from colofunc.planner.wishes.layout_equality import alike, usual
from colofunc.planner.wishes.propagation import follow
from colofunc.planner.wishes.wish import PARAMETERS, Wish
from colofunc.program.ir import Node, Program
from colofunc.program.lower import call_of
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Rule, Strategy

RuleOf = Callable[[Node], Rule | None]
ExtraOf = Callable[[Node], Iterable[Strategy]]


@attrs.frozen
class Flow:
    """What wishes of one source start from: values with how they lie, and nodes (by index) with the wishes for their pattern."""

    seeds: dict[int, tuple[Wish, Layout]] = attrs.field(factory=dict)
    held: dict[int, list[Wish]] = attrs.field(factory=dict)

    @property
    def wish(self) -> Wish:
        """One of them, which says what holds for all."""
        return next((wish for wish, _ in self.seeds.values()), None) or next(iter(self.held.values()))[0]


def along(
    flow: Flow, program: Program, mesh: Mesh, rule_of: RuleOf, extra_of: ExtraOf
) -> Iterator[tuple[int, dict[str, object], Constraint]]:
    """(item, axis -> factor that it is held to, constraint) of every operator that a flow reaches."""
    wish, n = flow.wish, len(program.inputs)
    patterns = {k: ways for k, some in flow.held.items() if (ways := _patterns(some, extra_of(program.nodes[k]), mesh))}
    starts = {id: layout for id, (_, layout) in flow.seeds.items()}
    followed = follow(program, mesh, starts, rule_of, wish.rest, wish.across, patterns, wish.gathers)
    mine = dict.fromkeys(a for layout in starts.values() for a in layout.axes)
    axes = tuple(mine | dict.fromkeys(a for some in patterns.values() for a, _ in some[0].axes))
    known: dict[Any, tuple[Strategy, ...]] = {}
    for index, strategy in followed.strategies.items():
        node = program.nodes[index]
        rule, (call, *_), layouts = rule_of(node), call_of(node, program.values), (*strategy.ins, *strategy.outs)
        odd = strategy.local is not None or not _enumerated(strategy, mesh)
        if odd and (call, layouts) not in known:
            known[call, layouts] = with_open_axes(call, rule, strategy, mesh, extra_of(node))
        offers = known[call, layouts] if odd else ()
        key = ("along", wish.source, axes, tuple(lay and lay.text() for lay in layouts))
        if wish.rest is not None or _works(node, rule, program, strategy):
            says = f"{wish}, followed to {strategy.name}"
            partly = None if odd else partial(_like, strategy)
            yield n + index, dict(strategy.axes), Constraint(key, _like(strategy, axes), says, offers, axes, partly=partly)
        elif offers:
            yield n + index, {}, Constraint(key, lambda s: True, "", offers)
    for index, strategy in followed.asked.items():
        if not _enumerated(strategy, mesh):
            node, layouts = program.nodes[index], (*strategy.ins, *strategy.outs)
            offers = with_open_axes(call_of(node, program.values)[0], rule_of(node), strategy, mesh)
            key = ("asked", wish.source, axes, tuple(lay and lay.text() for lay in layouts))
            yield n + index, {}, Constraint(key, lambda s: True, "", offers)


def _enumerated(strategy: Strategy, mesh: Mesh) -> bool:
    return all(layout is None or usual(layout, mesh) for layout in (*strategy.ins, *strategy.outs))


def _works(node: Node, rule: Rule | None, program: Program, strategy: Strategy) -> bool:
    """Whether an operator does what a plan is about: it has flops of its own, reads a parameter, or sums over the axes."""
    sums = any(layout is not None and layout.pending for layout in strategy.outs)
    reads = any(program.values[r].role in PARAMETERS for r in node.refs)
    return sums or reads or (rule is not None and rule.flops is not None)


def _like(strategy: Strategy, axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
    """Whether another strategy places `axes` in every operand and result as this one does."""
    want = (*strategy.ins, *strategy.outs)
    return lambda s: all(alike(a, b, axes) for a, b in zip(want, (*s.ins, *s.outs), strict=True))


def _patterns(wishes: Iterable[Wish], extra: Iterable[Strategy], mesh: Mesh) -> tuple[Strategy, ...]:
    """The strategies of plugins that wishes for one operator name together, without any other axis."""
    wants: list[dict[str, str]] = [{}]
    for wish in wishes:
        wants = [want | dict(parse_axes(str(more))) for want in wants for more in wish.wants]
    wants = [{a: word for a, word in want.items() if mesh.axis_size(a) > 1} for want in wants]
    return tuple(s for s in extra if dict(s.axes) in wants)


def meeting(
    ways: Mapping[int, list[Strategy]], program: Program, mesh: Mesh, rule_of: RuleOf, extra_of: ExtraOf
) -> Iterator[tuple[int, Constraint]]:
    """(item, constraint) where ways of single flows (item -> ways) that enumeration does not have are offered as one."""
    for item, some in ways.items():
        node = program.nodes[item - len(program.inputs)]
        if len(some) > 1 and (offers := combined(call_of(node, program.values)[0], rule_of(node), some, mesh, extra_of(node))):
            yield item, Constraint(("together", *(s.name for s in some)), lambda s: True, "", offers)
