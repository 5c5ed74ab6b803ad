"""Fewer options where three axes are decided at once: those that fit how values lie around operators that plans hold.

Problem: with three axes an operator has hundreds of options and a pair of neighbours a hundred thousand conversions to price;
a plan such as tensor("3d") holds the products, and what lies between is a few norms and activations. Idea: let layouts
spread from what is held, as they lie from producers to consumers and as they are wanted from consumers to producers, and
keep of each operator the options that take all operands, or give all results, in a layout that came by.

    linear (held) -> (x b) s (y d)      silu: 342 options, of which one takes (x b) s (y d)

What is left out comes back when axes have their turns one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from colofunc.planner.sharding.classes import Ties
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy

FEW = 16
"""A class with at most this many options keeps them all, and layouts spread from them."""

ROUNDS = 3

Options = Sequence[tuple[Strategy, ...]]


def lean(program: Program, ties: Ties, options: Options) -> list[tuple[Strategy, ...]]:
    """Per class the options to search among; the first one (replicated) always is."""
    kept = [set(range(len(some))) if len(some) <= FEW else {0} for some in options]
    for k in range(len(program.inputs)):
        c = ties.of_input(k)
        kept[c] |= set(_stored(options[c]))
    lies: dict[int, set[Layout]] = {id: set() for id in program.values}  # by value, as it is made
    wants: dict[int, set[Layout]] = {id: set() for id in program.values}  # by value, as it is read
    leaf_of = dict(program.aliases)
    for _ in range(ROUNDS):
        before = sum(map(len, kept))
        for k, id in enumerate(program.inputs):
            lies[id] |= _outs(options[ties.of_input(k)], kept[ties.of_input(k)], 0)
        for index, node in enumerate(program.nodes):
            c = ties.of_node(index)
            kept[c] |= {o for o in _others(options[c], kept[c]) if _takes(options[c][o], node, lies)}
            for j, out in enumerate(node.outs):
                if out is not None:
                    lies[out] |= _outs(options[c], kept[c], j)
        for position, id in enumerate(program.outputs):
            if position in leaf_of:  # what returns to a leaf is wanted as that lies
                wants[id] |= lies[program.inputs[leaf_of[position]]]
        for index, node in reversed(list(enumerate(program.nodes))):
            c = ties.of_node(index)
            kept[c] |= {o for o in _others(options[c], kept[c]) if _gives(options[c][o], node, wants)}
            for j, ref in enumerate(node.refs):
                wants[ref] |= {options[c][o].ins[j] for o in kept[c]}
        for k, id in enumerate(program.inputs):
            c = ties.of_input(k)
            kept[c] |= {o for o in _others(options[c], kept[c]) if options[c][o].outs[0] in wants[id]}
        if sum(map(len, kept)) == before:
            break
    return [tuple(s for o, s in enumerate(some) if o in chosen) for some, chosen in zip(options, kept, strict=True)]


def _stored(options: Sequence[Strategy]) -> Iterator[int]:
    """Of a leaf: per dim the first option that has most axes, all on that dim."""
    most = max((len(s.outs[0].axes) for s in options if s.outs[0] is not None), default=0)
    seen: set[int] = set()
    for o, strategy in enumerate(options):
        layout = strategy.outs[0]
        assert layout is not None, "a leaf has a layout"
        dims = {d for d, dim in enumerate(layout.dims) for _, axis in dim if axis is not None}
        if len(layout.axes) == most and len(dims) == 1 and not dims & seen:
            seen |= dims
            yield o


def _others(options: Sequence[Strategy], kept: set[int]) -> list[int]:
    return [o for o in range(len(options)) if o not in kept] if len(kept) < len(options) else []


def _outs(options: Sequence[Strategy], kept: set[int], j: int) -> set[Layout]:
    return {layout for o in kept if (layout := options[o].outs[j]) is not None}


def _takes(strategy: Strategy, node: Node, lies: dict[int, set[Layout]]) -> bool:
    """Whether every operand has come by as the strategy wants it."""
    return all(layout in lies[ref] for layout, ref in zip(strategy.ins, node.refs, strict=True))


def _gives(strategy: Strategy, node: Node, wants: dict[int, set[Layout]]) -> bool:
    """Whether every result that is read is wanted as the strategy makes it."""
    read = [(layout, wants[o]) for layout, o in zip(strategy.outs, node.outs, strict=True) if o is not None and wants[o]]
    return bool(read) and all(layout in some for layout, some in read)


# ---- pending reductions ----
# Problem: linear operators pass sums on and views pass maxima, too, so each has an option for it on every axis, and each such
# layout is priced against all others; but few values are ever made pending. Idea: follow from producers to consumers which
# kinds of reduction a value can be pending over, and drop the options that pass on one of which no operand can have any.
#
#     amax (makes max:tp) -> view: {}, {tp: b}, {tp: max}          parameter -> view: {}, {tp: b}
#
# Nothing is lost: such an option would take copies as if they were pending, which is free, and then what it gives has to be
# reduced. The option that takes and gives copies instead does the same work with nothing to reduce; where that one is not
# there (a wish excludes it), nothing is dropped.


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
