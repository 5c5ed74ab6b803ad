"""Fewer options where three axes are decided at once: those that fit how values lie around operators that plans hold.

Problem: with three axes an operator has hundreds of options and a pair of neighbours a hundred thousand conversions to
price; a plan such as tensor("3d") holds the products, and what lies between is a few norms and activations. Idea: let
layouts spread from what is held, as they lie from producers to consumers and as they are wanted from consumers to
producers, and keep of each operator the options that take all operands, or give all results, in a layout that came by.

    linear (held) -> (x b) s (y d)      silu: 342 options, of which one takes (x b) s (y d)

What is left out comes back when axes have their turns one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from colofunc.planner.sharding.classes import Ties
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy
from colofunc.spec.strategies import Pending

FEW = 16
"""A class with at most this many options keeps them all, and layouts spread from them."""

ROUNDS = 3
"""Layouts spread through the program, there and back, at most this many times."""

ClassOptions = Sequence[tuple[Strategy, ...]]  # per class


def lean(program: Program, ties: Ties, options: ClassOptions) -> list[tuple[Strategy, ...]]:
    """Per class the options to search among; the first one (replicated) always is."""
    spread = _Spread(program, ties, options)
    for _ in range(ROUNDS):
        before = spread.count()
        spread.from_producers()
        spread.from_consumers()
        if spread.count() == before:
            break
    return [_chosen(of_class, kept) for of_class, kept in zip(options, spread.kept, strict=True)]


def _chosen(options: Sequence[Strategy], kept: set[int]) -> tuple[Strategy, ...]:
    return tuple(option for number, option in enumerate(options) if number in kept)


class _Spread:
    """What is kept so far.

    `kept`: per class, numbers of options. `lies`: by value, layouts as it is made; `wants`: as it is read.
    """

    def __init__(self, program: Program, ties: Ties, options: ClassOptions) -> None:
        self.program = program
        self.ties = ties
        self.options = options
        self.leaf_of = dict(program.aliases)
        self.lies: dict[int, set[Layout]] = {id: set() for id in program.values}
        self.wants: dict[int, set[Layout]] = {id: set() for id in program.values}
        self.kept: list[set[int]] = []
        for of_class in options:
            keeps_all = len(of_class) <= FEW
            self.kept.append(set(range(len(of_class))) if keeps_all else {0})
        for position in range(len(program.inputs)):
            leaf_class = ties.of_input(position)
            self.kept[leaf_class].update(_stored(options[leaf_class]))

    def count(self) -> int:
        """Options that are kept, of all classes."""
        return sum(map(len, self.kept))

    def from_producers(self) -> None:
        """Layouts spread as values are made; an option is kept that takes all operands as they lie."""
        for position, id in enumerate(self.program.inputs):
            self.lies[id] |= self._made(self.ties.of_input(position), 0)
        for index, node in enumerate(self.program.nodes):
            node_class = self.ties.of_node(index)
            for number, option in self._left_out(node_class):
                if _takes(option, node, self.lies):
                    self.kept[node_class].add(number)
            for result, out in enumerate(node.outs):
                if out is not None:
                    self.lies[out] |= self._made(node_class, result)

    def from_consumers(self) -> None:
        """Layouts spread as values are read; an option is kept that gives all results as they are wanted."""
        for position, id in enumerate(self.program.outputs):
            if position in self.leaf_of:  # what returns to a leaf is wanted as that lies
                self.wants[id] |= self.lies[self.program.inputs[self.leaf_of[position]]]
        for index, node in reversed(list(enumerate(self.program.nodes))):
            node_class = self.ties.of_node(index)
            options, kept = self.options[node_class], self.kept[node_class]
            for number, option in self._left_out(node_class):
                if _gives(option, node, self.wants):
                    kept.add(number)
            for operand, id in enumerate(node.refs):
                self.wants[id].update(options[number].ins[operand] for number in kept)
        for position, id in enumerate(self.program.inputs):
            leaf_class = self.ties.of_input(position)
            for number, option in self._left_out(leaf_class):
                if option.outs[0] in self.wants[id]:
                    self.kept[leaf_class].add(number)

    def _left_out(self, of: int) -> list[tuple[int, Strategy]]:
        """Options of a class that are not kept, with their numbers."""
        options, kept = self.options[of], self.kept[of]
        if len(kept) == len(options):
            return []
        return [(number, option) for number, option in enumerate(options) if number not in kept]

    def _made(self, of: int, result: int) -> set[Layout]:
        """Layouts of a result under the options of a class that are kept."""
        layouts: set[Layout] = set()
        for number in self.kept[of]:
            layout = self.options[of][number].outs[result]
            if layout is not None:
                layouts.add(layout)
        return layouts


def _stored(options: Sequence[Strategy]) -> Iterator[int]:
    """Of a leaf: per dim the first option that has most axes, all on that dim."""
    most = max((len(option.outs[0].axes) for option in options if option.outs[0] is not None), default=0)
    seen: set[int] = set()
    for number, option in enumerate(options):
        layout = option.outs[0]
        assert layout is not None, "a leaf has a layout"
        dims = {position for position, dim in enumerate(layout.dims) for _, axis in dim if axis is not None}
        if len(layout.axes) == most and len(dims) == 1 and not dims & seen:
            seen |= dims
            yield number


def _takes(option: Strategy, node: Node, lies: dict[int, set[Layout]]) -> bool:
    """Whether every operand has come by as the option wants it."""
    return all(layout in lies[ref] for layout, ref in zip(option.ins, node.refs, strict=True))


def _gives(option: Strategy, node: Node, wants: dict[int, set[Layout]]) -> bool:
    """Whether some result is read, and each that is read is wanted as the option makes it."""
    is_read = False
    for layout, id in zip(option.outs, node.outs, strict=True):
        if id is None or not wants[id]:
            continue
        if layout not in wants[id]:
            return False
        is_read = True
    return is_read


# ---- pending reductions ----
#
# Problem: linear operators pass sums on and views pass maxima, too, so each has an option for it on every axis, and
# each such layout is priced against all others; but few values are ever made pending. Idea: follow from producers to
# consumers which kinds of reduction a value can be pending over, and drop the options that pass on one of which no
# operand can have any.
#
#     amax (makes max:tp) -> view: {}, {tp: b}, {tp: max}          parameter -> view: {}, {tp: b}
#
# Nothing is lost: such an option would take copies as if they were pending, which is free, and then what it gives has
# to be reduced. The option that takes and gives copies instead does the same work with nothing to reduce; where that
# one is not there (a wish excludes it), nothing is dropped.

Ends = tuple[tuple[Layout, ...], tuple[Layout | None, ...]]
Passed = tuple[tuple[Pending, tuple[int, ...]], ...]  # what passes through, and the operands by which it comes


def reachable(program: Program, ties: Ties, options: ClassOptions) -> list[tuple[Strategy, ...]]:
    """Per class the options but those that, for every member, pass on what no operand can have."""
    passed, ends = list[list[Passed]](), list[set[Ends]]()
    for of_class in options:
        passed.append([_passed(option) for option in of_class])
        ends.append({(option.ins, option.outs) for option in of_class})
    kinds: dict[int, frozenset[str]] = {}  # value -> the reductions that it can be pending over
    for position, id in enumerate(program.inputs):
        kinds[id] = _kinds(options[ties.of_input(position)], 0)

    kept: list[set[int]] = [set() for _ in options]
    known: dict[tuple[int, tuple[frozenset[str], ...]], list[int]] = {}  # members of a class mostly have operands alike
    for index, node in enumerate(program.nodes):
        node_class = ties.of_node(index)
        of_class = options[node_class]
        operand_kinds = tuple(kinds[ref] for ref in node.refs)
        useful = known.get((node_class, operand_kinds))
        if useful is None:
            useful = []
            for number, option in enumerate(of_class):
                if _is_useful(option, passed[node_class][number], operand_kinds, ends[node_class]):
                    useful.append(number)
            known[node_class, operand_kinds] = useful
            kept[node_class].update(useful)
        for result, out in enumerate(node.outs):
            if out is not None:
                kinds[out] = _kinds([of_class[number] for number in useful], result)
    # A class of leaves has no node that could keep an option: it keeps all.
    return [_chosen(of_class, chosen) if chosen else of_class for of_class, chosen in zip(options, kept, strict=True)]


def _kinds(options: Sequence[Strategy], result: int) -> frozenset[str]:
    """The reductions over which a result can be pending."""
    kinds: set[str] = set()
    for option in options:
        layout = option.outs[result]
        if layout is not None:
            kinds.update(how for _, how in layout.pending)
    return frozenset(kinds)


def _passed(strategy: Strategy) -> Passed:
    """Each reduction that passes through, with its operands. What an axis on a factor adds up is made here instead."""
    if strategy.local is not None:
        return ()
    given = {pending for layout in strategy.outs if layout is not None for pending in layout.pending}
    placed = {axis for axis, _ in strategy.axes}
    passed = []
    for pending in sorted(given):
        operands = tuple(position for position, layout in enumerate(strategy.ins) if pending in layout.pending)
        if operands and pending[0] not in placed:
            passed.append((pending, operands))
    return tuple(passed)


def _is_useful(strategy: Strategy, passed: Passed, kinds: Sequence[frozenset[str]], ends: set[Ends]) -> bool:
    """Whether some operand can have each reduction that passes, or no option of `ends` does the same with copies.
    kinds: by operand.
    """
    idle: set[Pending] = set()
    for pending, operands in passed:
        _, how = pending
        if not any(how in kinds[operand] for operand in operands):
            idle.add(pending)
    if not idle:
        return True
    ins = tuple(_without(layout, idle) for layout in strategy.ins)
    outs = tuple(None if layout is None else _without(layout, idle) for layout in strategy.outs)
    return (ins, outs) not in ends


def _without(layout: Layout, reductions: set[Pending]) -> Layout:
    """A layout with copies where these reductions are pending."""
    if not layout.pending:
        return layout
    return layout.with_pending(tuple(pending for pending in layout.pending if pending not in reductions))
