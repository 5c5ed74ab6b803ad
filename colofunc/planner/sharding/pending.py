"""Fewer options: a pending reduction passes through an operator only where one can have come up.

Problem: linear operators pass sums on and views pass maxima, too, so each has an option for it on every axis, and each such
layout is priced against all others; but few values are ever made pending. Idea: follow from producers to consumers which
kinds of reduction a value can be pending over, and drop the options that pass on one of which no operand can have any.

    amax (makes max:tp) -> view: {}, {tp: b}, {tp: max}          parameter -> view: {}, {tp: b}

Nothing is lost: such an option would take copies as if they were pending, which is free, and then what it gives has to be
reduced. The option that takes and gives copies instead does the same work with nothing to reduce; where that one is not
there (a wish excludes it), nothing is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

from colofunc.planner.sharding.classes import Ties
from colofunc.program.ir import Program
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy

Pending = tuple[str, str]
Ends = tuple[tuple[Layout, ...], tuple[Layout | None, ...]]
Passed = tuple[tuple[Pending, tuple[int, ...]], ...]  # what passes through, and the operands by which it comes


def reachable(program: Program, ties: Ties, options: Sequence[tuple[Strategy, ...]]) -> list[tuple[Strategy, ...]]:
    """Per class the options but those that, for every member, pass on what no operand can have."""
    kinds = {id: _kinds(options[ties.of_input(k)], 0) for k, id in enumerate(program.inputs)}  # by value
    passed = [[_passed(s) for s in some] for some in options]
    there = [{(s.ins, s.outs) for s in some} for some in options]
    kept: list[set[int]] = [set() for _ in options]
    known: dict[tuple[int, tuple[frozenset[str], ...]], list[int]] = {}  # members of a class mostly have operands alike
    for index, node in enumerate(program.nodes):
        c = ties.of_node(index)
        key = c, tuple(kinds[ref] for ref in node.refs)
        if key not in known:
            known[key] = [o for o, s in enumerate(options[c]) if not passed[c][o] or _useful(s, passed[c][o], key[1], there[c])]
            kept[c].update(known[key])
        for j, out in enumerate(node.outs):
            if out is not None:
                kinds[out] = _kinds([options[c][o] for o in known[key]], j)
    return [tuple(s for o, s in enumerate(some) if o in here) if here else some for some, here in zip(options, kept, strict=True)]


def _kinds(options: Sequence[Strategy], result: int) -> frozenset[str]:
    return frozenset(how for s in options if (layout := s.outs[result]) is not None for _, how in layout.pending)


def _passed(strategy: Strategy) -> Passed:
    """Each reduction that passes through, with its operands. What an axis on a factor adds up is made here instead."""
    if strategy.local is not None:
        return ()
    given = {pending for layout in strategy.outs if layout is not None for pending in layout.pending}
    placed = {axis for axis, _ in strategy.axes}
    def having(p: tuple[str, str]) -> tuple[int, ...]:
        """Operands over which it is pending."""
        return tuple(k for k, layout in enumerate(strategy.ins) if p in layout.pending)

    found = ((p, having(p)) for p in sorted(given) if p[0] not in placed)
    return tuple((pending, operands) for pending, operands in found if operands)


def _useful(strategy: Strategy, passed: Passed, kinds: Sequence[frozenset[str]], there: set[Ends]) -> bool:
    """Whether some operand can have each reduction that passes, or nothing does the same with copies. kinds: by operand."""
    idle = {p for p, operands in passed if not any(p[1] in kinds[k] for k in operands)}
    if not idle:
        return True
    ins = tuple(_without(layout, idle) for layout in strategy.ins)
    outs = tuple(None if layout is None else _without(layout, idle) for layout in strategy.outs)
    return (ins, outs) not in there


def _without(layout: Layout, some: set[Pending]) -> Layout:
    return layout.with_pending(tuple(p for p in layout.pending if p not in some)) if layout.pending else layout
