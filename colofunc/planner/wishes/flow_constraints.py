"""Wishes that are followed: leaves that lie so, and operators that work so, hold whatever their layouts reach.

    Wish("batch.*", "(dp b) ...", along=True)       held: linear {dp: b}, linear_dw {dp: b}     left free: a softmax over b
    Wish("*", "{cp: ring}", along=True)             held: what reads the result of attention as it comes out of the ring

Problem: `follow` finds how a hundred operators would work by themselves, and not all of that is meant: an elementwise
operator may as well work on what was gathered already. Idea: operators that do what a plan is about (they have flops,
read a parameter, or sum over the plan's axes) are held to the way that was found; others are offered it. Ways that
enumeration does not have (stripes, axes in another order than the mesh's) are offered with every way to place the other
axes beside them; and where flows of several plans meet in one operator, one way that is all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.plan import parse_axes
from colofunc.planner.sharding.constraints import Constraint
from colofunc.planner.wishes.layout_equality import is_enumerated, lies_alike
from colofunc.planner.wishes.propagation import Rules, follow
from colofunc.planner.wishes.wish import PARAMETERS, Wish
from colofunc.program.facts import facts_of
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Atom, Dim, Layout, axes_of
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.strategies import build, lay_out, place, placements, usable


@attrs.frozen
class WishSeeds:
    """What wishes of one source start from: values with how they lie, and nodes (by index) with the wishes for their
    pattern.
    """

    seeds: dict[int, tuple[Wish, Layout]] = attrs.field(factory=dict)
    held: dict[int, list[Wish]] = attrs.field(factory=dict)

    @property
    def wish(self) -> Wish:
        """One of them, which says what holds for all."""
        return next((wish for wish, _ in self.seeds.values()), None) or next(iter(self.held.values()))[0]


def constraints_along(
    flow: WishSeeds, program: Program, mesh: Mesh, rules: Rules
) -> Iterator[tuple[int, dict[str, object], Constraint]]:
    """(item, axis -> factor that it is held to, constraint) of every operator that a flow reaches."""
    wish, first_node = flow.wish, len(program.inputs)
    patterns: dict[int, tuple[Strategy, ...]] = {}
    for index, wishes in flow.held.items():
        found = _patterns(wishes, rules.extra(program.nodes[index]), mesh)
        if found:
            patterns[index] = found
    starts = {id: layout for id, (_, layout) in flow.seeds.items()}
    followed = follow(program, mesh, starts, rules, wish.rest, wish.across, patterns, wish.gathers, wish.apart)
    own_axes: dict[str, None] = {}  # in order, each once
    for layout in starts.values():
        own_axes.update(dict.fromkeys(layout.axes))
    for found in patterns.values():
        own_axes.update(dict.fromkeys(axis for axis, _ in found[0].axes))
    axes = tuple(own_axes)
    known: dict[Any, tuple[Strategy, ...]] = {}
    for index, strategy in followed.strategies.items():
        node = program.nodes[index]
        rule, call, layouts = rules.rule(node), rules.call(node), (*strategy.ins, *strategy.outs)
        # What enumeration does not have is offered, beside every way to place the open axes.
        odd = strategy.local is not None or not _enumerated(strategy, mesh)
        if odd and (call, layouts) not in known:
            known[call, layouts] = with_open_axes(call, rule, strategy, mesh, rules.extra(node))
        offers = known[call, layouts] if odd else ()
        key = ("along", wish.source, axes, tuple(lay and lay.text() for lay in layouts))
        if wish.rest is not None or _works(node, rule, program, strategy):
            says = f"{wish}, followed to {strategy.name}"
            partly = None if odd else partial(_like, strategy)
            constraint = Constraint(key, _like(strategy, axes), says, offers, axes, partly=partly)
            yield first_node + index, dict(strategy.axes), constraint
        elif offers:
            yield first_node + index, {}, Constraint(key, lambda strategy: True, "", offers)
    for index, strategy in followed.asked.items():
        if not _enumerated(strategy, mesh):
            node, layouts = program.nodes[index], (*strategy.ins, *strategy.outs)
            offers = with_open_axes(rules.call(node), rules.rule(node), strategy, mesh)
            key = ("asked", wish.source, axes, tuple(lay and lay.text() for lay in layouts))
            yield first_node + index, {}, Constraint(key, lambda strategy: True, "", offers)


def _enumerated(strategy: Strategy, mesh: Mesh) -> bool:
    return all(layout is None or is_enumerated(layout, mesh.axis_names) for layout in (*strategy.ins, *strategy.outs))


def _works(node: Node, rule: Rule | None, program: Program, strategy: Strategy) -> bool:
    """Whether an operator does what a plan is about: it has flops of its own, reads a parameter, or sums over the axes."""
    sums = any(layout is not None and layout.pending for layout in strategy.outs)
    reads = any(program.values[ref].role in PARAMETERS for ref in node.refs)
    return sums or reads or (rule is not None and rule.flops is not None)


def _like(strategy: Strategy, axes: tuple[str, ...]) -> Callable[[Strategy], bool]:
    """Whether another strategy places `axes` in every operand and result as this one does."""
    wanted = (*strategy.ins, *strategy.outs)

    def accepts(other: Strategy) -> bool:
        pairs = zip(wanted, (*other.ins, *other.outs), strict=True)
        return all(lies_alike(layout, other_layout, axes) for layout, other_layout in pairs)

    return accepts


def _patterns(wishes: Iterable[Wish], extra: Iterable[Strategy], mesh: Mesh) -> tuple[Strategy, ...]:
    """The strategies of plugins that wishes for one operator name together, without any other axis."""
    # Of each wish one of its patterns: all combinations of them, by axis.
    combined: list[dict[str, str]] = [{}]
    for wish in wishes:
        longer = []
        for words in combined:
            for pattern in wish.wants:
                longer.append(words | dict(parse_axes(str(pattern))))
        combined = longer
    wanted = []
    for words in combined:
        wanted.append({axis: word for axis, word in words.items() if mesh.axis_size(axis) > 1})
    return tuple(strategy for strategy in extra if dict(strategy.axes) in wanted)


def meeting(
    ways: Mapping[int, list[Strategy]], program: Program, mesh: Mesh, rules: Rules
) -> Iterator[tuple[int, Constraint]]:
    """(item, constraint) where ways of single flows (item -> ways) that enumeration does not have are offered as one."""
    for item, strategies in ways.items():
        if len(strategies) < 2:
            continue
        node = program.nodes[item - len(program.inputs)]
        offers = combined(rules.call(node), rules.rule(node), strategies, mesh, rules.extra(node))
        if offers:
            key = ("together", *(strategy.name for strategy in strategies))
            yield item, Constraint(key, lambda strategy: True, "", offers)


# ---- axes of several flows ----
#
# Problem: stripes of a fused weight come from one plan, rows of a flat batch from another, sequences that two plans cut
# from a third. An operator that two of them reach has to lie as both say, and enumeration offers no such strategy.
# Idea: lay the axes of all flows on the factors of the operator's rule, where each has room, and offer the result
# beside every way to place the axes that stay open.
#
#     (16 tp 8) of one flow, (128 cp) of another, of the same factor          (16 tp 4 cp)


MAX_OPEN_AXES = 3
"""At most this many axes beside a followed one are searched."""


def with_open_axes(
    call: Call, rule: Rule | None, strategy: Strategy, mesh: Mesh, extra: Iterable[Strategy] = ()
) -> tuple[Strategy, ...]:
    """A strategy that enumeration does not offer, alone and together with every way to place the axes that it leaves
    open.

    `extra`: strategies with local code of their own, which may work on rows that lie so, too.
    """
    if rule is None:
        return (strategy,)
    placement = _placement(rule, strategy)
    offers: dict[Strategy, None] = {strategy: None}  # in order, each once
    if facts_of(call.target).row_order:
        for other in extra:
            offers.update(dict.fromkeys(_relaid(call, rule, other, strategy, placement, mesh)))
    local_code = any(word not in rule.sizes for _, word in strategy.axes)
    if local_code or any(factor not in usable(rule) for factor in placement):
        return tuple(offers)
    own = {axis for axis, _ in strategy.axes}
    open_axes = tuple(axis for axis in mesh.axis_names if axis not in own and mesh.axis_size(axis) > 1)
    if len(open_axes) > MAX_OPEN_AXES:
        raise PlanError(
            f"a striped layout beside {len(open_axes)} open axes ({', '.join(open_axes)}) is not searched; name plans "
            "for them"
        )
    for inside, rest in _placed_inside(placement, open_axes, mesh):
        for outside, passing in placements(rule, mesh, rest, orders=False):
            if not set(outside) & set(placement):
                offers.setdefault(build(call, rule, {**inside, **outside}, passing), None)
    return tuple(offers)


def combined(
    call: Call, rule: Rule | None, strategies: Sequence[Strategy], mesh: Mesh, extra: Iterable[Strategy] = ()
) -> tuple[Strategy, ...]:
    """Strategies of several flows as one, where each has its axes where the others leave room, and beside open axes."""
    if rule is None:
        return ()
    merged: dict[str, Dim] = {}
    for strategy in strategies:
        placement = _placement(rule, strategy) if strategy.local is None else {}
        split = {factor: dim for factor, dim in placement.items() if axes_of(dim)}
        taken = _all_axes(merged.values())
        if not split or taken & _all_axes(split.values()):
            return ()
        for factor, dim in split.items():
            refined = _refined(merged[factor], dim) if factor in merged else dim
            if refined is None:
                return ()
            merged[factor] = refined
    return with_open_axes(call, rule, build(call, rule, merged), mesh, extra)


def _all_axes(dims: Iterable[Dim]) -> set[str]:
    return set().union(*map(axes_of, dims))


def _refined(one: Dim, other: Dim) -> Dim | None:
    """One factor with the axes of both: (16 tp 8) and (128 cp) are (16 tp 4 cp); None where they do not fit."""
    atoms: list[Atom] = []
    parts = 1  # that the atoms so far make
    for before, size, axis in sorted([*_cuts(one), *_cuts(other)], key=lambda cut: cut[0]):
        if before > parts:
            if before % parts:
                return None
            atoms.append((before // parts, None))
            parts = before
        atoms.append((size, axis))
        parts *= size
    rest, odd = divmod(prod(size for size, _ in one), parts)
    if odd:
        return None
    if rest > 1:
        atoms.append((rest, None))
    return tuple(atoms)


def _cuts(dim: Dim) -> Iterator[tuple[int, int, str]]:
    """(parts before it, its size, axis) of every axis in a dim."""
    before = 1
    for size, axis in dim:
        if axis is not None:
            yield before, size, axis
        before *= size


def _placement(rule: Rule, strategy: Strategy) -> dict[str, Dim]:
    """Factor -> how it lies, of a strategy that puts each factor the same way in all operands."""
    placement: dict[str, Dim] = {}
    for operand, layout in zip((*rule.ins, *rule.outs), (*strategy.ins, *strategy.outs), strict=True):
        if operand is not None and layout is not None:
            placement.update(place(operand, rule, layout.with_pending(())) or {})
    return placement


def _placed_inside(
    placement: Mapping[str, Dim], axes: tuple[str, ...], mesh: Mesh
) -> Iterator[tuple[Mapping[str, Dim], tuple[str, ...]]]:
    """(placement with some axes inside its factors, the axes left); where two share a local part they stand in their
    order.
    """
    if not axes:
        yield placement, ()
        return
    *first, last = axes
    for inside, rest in _placed_inside(placement, tuple(first), mesh):
        yield inside, (*rest, last)
        for factor, dim in inside.items():
            for refined in _split_inside(dim, last, mesh.axis_size(last)):
                yield {**inside, factor: refined}, rest


def _split_inside(dim: Dim, axis: str, ranks: int) -> Iterator[Dim]:
    """The dim with `axis` as the major part of each local atom that it divides."""
    for position, (size, owner) in enumerate(dim):
        if owner is None and size % ranks == 0:
            rest = ((size // ranks, None),) if size > ranks else ()
            yield (*dim[:position], (ranks, axis), *rest, *dim[position + 1 :])


def _relaid(
    call: Call, rule: Rule, other: Strategy, like: Strategy, placement: Mapping[str, Dim], mesh: Mesh
) -> Iterator[Strategy]:
    """`other` on operands whose factors lie as those of `like`: it has the same axes on them, in blocks."""
    own = dict(like.axes)
    if not own or any((axis, factor) not in other.axes or factor not in placement for axis, factor in own.items()):
        return
    operands = [*zip(rule.ins, other.ins, call.ins, strict=True), *zip(rule.outs, other.outs, call.outs, strict=True)]
    placed: list[dict[str, Dim] | None] = []  # per operand: factor -> how `other` has it
    for operand, layout, _ in operands:
        lies = None
        if operand is not None and layout is not None:
            lies = place(operand, rule, layout.with_pending(()))
        if lies is None and layout is not None:
            return
        placed.append(lies)
    # Axes of `other` alone on the factors that both split: there they may stand inside what `like` leaves.
    guests: dict[str, tuple[str, ...]] = {}
    for factor in own.values():
        guests[factor] = tuple(axis for axis, on in other.axes if on == factor and axis not in own)
    there = set[str]()
    for lies in placed:
        if lies is not None:
            there |= _all_axes(lies[factor] for factor in own.values() if factor in lies)
    if facts_of(call.target).row_order == "dealt":
        guests = dict.fromkeys(guests, tuple(sorted(there - set(own), key=mesh.axis_names.index)))
    all_guests = tuple(axis for axes in guests.values() for axis in axes)
    if there - set(own) - set(all_guests):
        return  # axes of a pattern of its own lie there as well
    for inside, rest in _placed_inside({factor: placement[factor] for factor in guests}, all_guests, mesh):
        if rest or _has_guest_of_another(inside, guests):
            continue
        laid: list[Layout | None] = []
        for lies, (operand, layout, typ) in zip(placed, operands, strict=True):
            if lies is None or operand is None or layout is None or typ is None:
                laid.append(layout)
            else:
                moved = {factor: inside.get(factor, dim) for factor, dim in lies.items()}
                laid.append(lay_out(operand, typ, rule, moved, layout.pending))
        ins = tuple(layout for layout in laid[: len(rule.ins)] if layout is not None)
        yield attrs.evolve(other, ins=ins, outs=tuple(laid[len(rule.ins) :]))


def _has_guest_of_another(inside: Mapping[str, Dim], guests: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether some factor has an axis that is the guest of another factor."""
    for factor, dim in inside.items():
        for host, axes in guests.items():
            if host != factor and not set(axes).isdisjoint(axes_of(dim)):
                return True
    return False
