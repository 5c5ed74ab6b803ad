"""Flows: who makes a value and who reads it, with layouts as small numbers.

A *flow* is one value: its producer, its distinct consumers (class, operand), and how many tied values are like it. What
its conversions cost depends on few layouts, however many strategies there are, so each layout that may be asked for
gets a number and every answer is remembered by numbers:

    source  [0, 0, 1, 2, ...]     layout number per option of the producer
    targets [1, 1, 3, 0, ...]     per use, layout number per option of the consumer

Conversions are paid once per layout: each layout that is wanted and not there yet is converted from the cheapest copy
there is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.ops.targets import is_view
from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.eliminate import BIG, Array
from colofunc.program.ir import Program
from colofunc.program.passes.buckets import COPIES
from colofunc.spec.layout import Layout, replicated
from colofunc.spec.rule import Strategy

ConvertS = Callable[[Layout, Layout, Mesh, int], float]
FlowStep = tuple[int, int, float]  # from layout, to layout, seconds
ENLARGED = 1 << 24
"""What moving takes without starts is asked of tensors this many times as large, beside which starts are nothing."""
STATE = ("param", "frozen", "state", "buffer")
CAST = "aten._to_copy"


@attrs.frozen
class Flow:
    """`count` values of class `producer` (result `result`) with the same uses.

    `uses`: (class, operand, group): operand -1 is the input leaf that a donated output returns to; of operands that
    every strategy wants alike only the first is named. Conversions are shared within a group only (a parameter that is
    gathered anew in each phase has one group per phase).
    `settle`: the value is an output of the step, so that a pending or wrongly placed one must be brought to rest.
    `together`: its collectives can share a start with those of so many values, see `Conversions`; 1: with none.
    """

    producer: int
    result: int
    uses: tuple[tuple[int, int, int], ...]
    settle: Layout | str | None
    itemsize: int
    sum_itemsize: int  # while it is summed over the mesh
    together: int
    count: int
    values: tuple[int, ...]


def settled_layout(source: Layout, how: Layout | str) -> Layout:
    """Where an output comes to rest: a given layout; replicated for scalars; else as it lies, nothing pending."""
    if isinstance(how, Layout):
        return how
    return replicated(source.shape, source.tier) if prod(source.shape) == 1 else source.with_pending(())


class Conversions:
    """Seconds of conversions on one mesh, BIG where there is no way from one layout to the other.

    Starts are shared: a model has dozens of small gradients, and each collective takes a while to start.
    What the update alone reads can wait, and state can be asked for early, so such collectives become one bucket later
    (`program/passes/buckets.py`): of each counts what it moves, its part of one start, and to be copied into a bucket
    and out of it, where that is less than a start of its own. What flows through the layers is waited for at once and
    pays its start.
    """

    def __init__(self, convert_s: ConvertS, mesh: Mesh) -> None:
        self._convert_s, self._mesh = convert_s, mesh
        self._tables: dict[tuple[tuple[Layout, ...], tuple[Layout, ...], int, int, int], Array] = {}

    def second(self, src: Layout, dst: Layout, itemsize: int, sum_itemsize: int = 0, together: int = 1) -> float:
        itemsize = max(itemsize, sum_itemsize) if src.pending else itemsize
        if src is dst:
            return 0.0
        try:
            alone_s = self._convert_s(src, dst, self._mesh, itemsize)
            if together < 2:
                return min(alone_s, BIG)
            nbytes = max(src.local_numel, dst.local_numel) * itemsize
            copied_s = COPIES * (
                nbytes / self._mesh.topology.device.memory_bytes_per_s + self._mesh.topology.device.launch_s
            )
            unstarted_s = self._convert_s(src, dst, self._mesh, itemsize * ENLARGED) / ENLARGED
            return min(alone_s, unstarted_s + (alone_s - unstarted_s) / together + copied_s, BIG)
        except SpecError:
            return BIG

    def table(
        self,
        srcs: tuple[Layout, ...],
        dsts: tuple[Layout, ...],
        itemsize: int,
        sum_itemsize: int = 0,
        together: int = 1,
    ) -> Array:
        """From each to each; values of one shape often ask for the same."""
        key = (srcs, dsts, itemsize, sum_itemsize, together)
        table = self._tables.get(key)
        if table is None:
            table = np.empty((len(srcs), len(dsts)), dtype=float)
            for row, src in enumerate(srcs):
                for column, dst in enumerate(dsts):
                    table[row, column] = self.second(src, dst, itemsize, sum_itemsize, together)
            self._tables[key] = table
        return table


class Coded:
    """A flow over the options of its classes. Built once per problem; remembers what it was asked."""

    __slots__ = (
        "_known", "_measured", "_pairs", "_spread", "classes", "conversions", "flow", "groups", "layouts", "numel", "rest",
        "source", "targets",
    )  # fmt: skip

    def __init__(self, flow: Flow, options: Sequence[tuple[Strategy, ...]], conversions: Conversions) -> None:
        numbers: dict[Layout, int] = {}

        def number(layout: Layout | None) -> int:
            assert layout is not None, "a value that is used has a layout"
            return numbers.setdefault(layout, len(numbers))

        self.flow, self.conversions = flow, conversions
        self.source = [number(strategy.outs[flow.result]) for strategy in options[flow.producer]]
        self.classes = list[int]()
        self.groups = list[int]()
        self.targets = list[list[int]]()
        for cls, operand, group in flow.uses:
            self.classes.append(cls)
            self.groups.append(group)
            of_use = []
            for strategy in options[cls]:
                of_use.append(number(strategy.outs[0] if operand < 0 else strategy.ins[operand]))
            self.targets.append(of_use)
        self.rest: list[int] = []  # per number of a source, the layout it settles to
        if flow.settle is not None:
            self.rest = [number(settled_layout(source, flow.settle)) for source in list(numbers)]
        self.layouts = tuple(numbers)
        self.numel = [layout.local_numel for layout in self.layouts]
        self._known: dict[int, float] = {}
        self._measured: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
        self._pairs: dict[int, Array | None] = {}
        self._spread: dict[int, tuple[list[tuple[int, ...]], NDArray[np.intp]]] = {}

    def at(self, choice: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Source and targets under a choice."""
        targets = tuple([of_use[choice[cls]] for cls, of_use in zip(self.classes, self.targets)])
        return self.source[choice[self.flow.producer]], targets

    def second(self, source: int, target: int) -> float:
        """Seconds of one conversion of one value, from one layout's number to another's."""
        if source == target:
            return 0.0
        key = source * len(self.layouts) + target
        seconds = self._known.get(key)
        if seconds is None:
            flow = self.flow
            seconds = self.conversions.second(
                self.layouts[source], self.layouts[target], flow.itemsize, flow.sum_itemsize, flow.together
            )
            self._known[key] = seconds
        return seconds

    def steps(self, source: int, targets: Sequence[int]) -> list[FlowStep]:
        """Each conversion one value goes through."""
        steps: list[FlowStep] = []
        if len(targets) == 1 and not self.rest:
            if targets[0] != source:
                steps.append((source, targets[0], self.second(source, targets[0])))
            return steps
        copies: dict[int, list[int]] = {}
        for group, target in zip(self.groups, targets, strict=True):
            self._want(copies.setdefault(group, [source]), target, steps)
        if self.rest:
            self._want([source, *copies.get(0, ())], self.rest[source], steps)
        return steps

    def _want(self, copies: list[int], target: int, steps: list[FlowStep]) -> None:
        """One more copy, made of the cheapest that is there, of equal ones the first."""
        if target in copies:
            return
        seconds, position = min([(self.second(copy, target), position) for position, copy in enumerate(copies)])
        steps.append((copies[position], target, seconds))
        copies.append(target)

    def measure(self, source: int, targets: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of all conversions of all values; bytes of the converted copies of one."""
        key = (source, targets)
        measured = self._measured.get(key)
        if measured is None:
            seconds, numel = 0.0, 0
            for _, target, step_s in self.steps(source, targets):
                seconds += step_s
                numel += self.numel[target]
            measured = self._measured[key] = (self.flow.count * seconds, float(self.flow.itemsize * numel))
        return measured

    def row(self, cls: int, choice: Sequence[int], price: float) -> Array:
        """Seconds (with `price` per byte of copies) for each option of a class, the others as in `choice`."""
        spread = self._spread.get(cls)
        if spread is None:
            spread = self._spread[cls] = self._distinct(cls)
        distinct, which = spread
        source, targets = self.at(choice)
        makes = cls == self.flow.producer
        own_uses = [use for use, user in enumerate(self.classes) if user == cls]
        costs = []
        for numbers in distinct:
            targets_then = list(targets)
            for use, target in zip(own_uses, numbers[makes:], strict=True):
                targets_then[use] = target
            seconds, nbytes = self.measure(numbers[0] if makes else source, tuple(targets_then))
            costs.append(seconds + price * nbytes)
        return np.array(costs)[which]

    def _distinct(self, cls: int) -> tuple[list[tuple[int, ...]], NDArray[np.intp]]:
        """What the options of a class say about this flow, each once; and which option says which."""
        columns = [self.source] if cls == self.flow.producer else []
        columns += [of_use for user, of_use in zip(self.classes, self.targets, strict=True) if user == cls]
        position_of: dict[tuple[int, ...], int] = {}
        which = [position_of.setdefault(numbers, len(position_of)) for numbers in zip(*columns, strict=True)]
        return list(position_of), np.array(which, dtype=np.intp)

    def pair(self, use: int, price: float) -> Array | None:
        """Seconds per option of the producer and of one use, as if it were the only one; None: all 0."""
        if use not in self._pairs:
            self._pairs[use] = self._pair(use)
        seconds = self._pairs[use]
        if not price:
            return seconds
        source, target = np.array(self.source), np.array(self.targets[use])
        copied = (source[:, None] != target[None, :]) * (np.array(self.numel, dtype=float)[target] * self.flow.itemsize)
        return np.minimum((0.0 if seconds is None else seconds) + price * copied, BIG)

    def _pair(self, use: int) -> Array | None:
        # Options that ask for the same layouts cost the same, so each pair of layouts is looked up once.
        sources, source_of = np.unique(np.array(self.source), return_inverse=True)
        targets, target_of = np.unique(np.array(self.targets[use]), return_inverse=True)
        srcs = tuple(self.layouts[number] for number in sources.tolist())
        dsts = tuple(self.layouts[number] for number in targets.tolist())
        table = self.conversions.table(srcs, dsts, self.flow.itemsize, self.flow.sum_itemsize, self.flow.together)
        if not table.any():
            return None
        return np.minimum(self.flow.count * table, BIG)[np.ix_(source_of, target_of)]

    def shares(self, use: int, choice: Sequence[int]) -> Array | float:
        """What share of a conversion a use pays per option of its class: 1 / (uses that take it now, itself included)."""
        others = list[int]()
        for other, (cls, of_use) in enumerate(zip(self.classes, self.targets, strict=True)):
            if other != use and self.groups[other] == self.groups[use]:
                others.append(of_use[choice[cls]])
        if not others:
            return 1.0
        use_counts = np.bincount(others, minlength=len(self.layouts))
        share: Array = 1.0 / (1 + use_counts[self.targets[use]])
        return share

    def settle(self) -> Array | None:
        """Seconds of coming to rest per option of the producer, as if nobody used the value."""
        if not self.rest:
            return None
        seconds = [self.second(source, self.rest[source]) for source in self.source]
        return np.minimum(self.flow.count * np.array(seconds), BIG)


def flows_of(
    program: Program,
    ties: Ties,
    options: Sequence[tuple[Strategy, ...]],
    outputs: dict[int, Layout],
    regather: frozenset[int],
    sums: Mapping[int, int],
) -> tuple[Flow, ...]:
    """All flows of a program. `outputs`: fixed layouts by output position; `regather`: converted anew in each phase.

    `sums`: bytes of an element of a value while it is summed, where those are not its own.
    """
    first = operands_alike(options)
    uses: dict[int, dict[tuple[int, int, int], None]] = {id: {} for id in program.values}

    # Who makes a value (class, result), and who reads it.
    maker_of = {id: (ties.of_input(position), 0) for position, id in enumerate(program.inputs)}
    phases: dict[str, int] = {}
    for index, node in enumerate(program.nodes):
        cls = ties.of_node(index)
        for operand, ref in enumerate(node.refs):
            group = phases.setdefault(node.phase, len(phases)) if ref in regather else 0
            uses[ref][(cls, first[cls][operand], group)] = None
        for result, id in enumerate(node.outs):
            if id is not None:
                maker_of[id] = (cls, result)

    # A donated output returns to its input leaf; another comes to rest.
    leaf_of = dict(program.aliases)
    settle: dict[int, Layout | str] = {}
    for position, id in enumerate(program.outputs):
        if position in leaf_of:
            uses[id][(ties.of_input(leaf_of[position]), -1, 0)] = None
        else:
            settle[id] = outputs.get(position, "rest")

    # Values that are like in all of this are one flow.
    waiting = _can_wait(program)
    parameter_count = max(1, sum(program.values[id].role == "param" for id in program.inputs))
    values_of: dict[Flow, list[int]] = {}
    for id, (cls, result) in maker_of.items():
        if not uses[id] and id not in settle:
            continue
        itemsize = program.values[id].dtype.itemsize
        flow = Flow(
            producer=cls,
            result=result,
            uses=tuple(uses[id]),
            settle=settle.get(id),
            itemsize=itemsize,
            sum_itemsize=sums.get(id, itemsize),
            together=parameter_count if id in waiting else 1,
            count=0,
            values=(),
        )
        values_of.setdefault(flow, []).append(id)
    return tuple(attrs.evolve(flow, count=len(ids), values=tuple(ids)) for flow, ids in values_of.items())


def _can_wait(program: Program) -> frozenset[int]:
    """Values whose collectives can join others: state that is there from the start, and what nobody but the update
    reads, or a cast whose result nobody but the update reads.
    """
    read_at_once = set[int]()
    for node in reversed(program.nodes):
        is_cast = node.target.startswith(CAST)
        waits = node.phase == "update" or (is_cast and read_at_once.isdisjoint(node.results))
        if not waits:
            read_at_once.update(node.refs)
    state = {id for id in program.inputs if program.values[id].role in STATE}
    return frozenset(id for id in program.values if id in state or id not in read_at_once)


def copies_of(program: Program, ids: Collection[int]) -> frozenset[int]:
    """The values and what casts and views alone make of them: what is let go of with them, and made anew with them."""
    found = set(ids)
    for node in program.nodes:
        moved = is_view(node.target) or node.target.startswith(CAST)
        if moved and len(node.refs) == 1 and node.refs[0] in found:
            found.update(node.results)
    return frozenset(found)


def operands_alike(options: Sequence[tuple[Strategy, ...]]) -> list[list[int]]:
    """Per class and operand, the first operand that every option wants in the same layout."""
    first_of_class = []
    for strategies in options:
        columns = zip(*[strategy.ins for strategy in strategies], strict=True)
        first: dict[tuple[Layout, ...], int] = {}
        first_of_class.append([first.setdefault(column, operand) for operand, column in enumerate(columns)])
    return first_of_class
