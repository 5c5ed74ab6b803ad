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
from colofunc.mesh.cost import without_starts
from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.eliminate import BIG, Array
from colofunc.program.ir import Program
from colofunc.program.passes.buckets import COPIES
from colofunc.spec.layout import Layout, replicated
from colofunc.spec.rule import Strategy
from colofunc.spec.strategies import FREE

ConvertS = Callable[[Layout, Layout, Mesh, int], float]
Step = tuple[int, int, float]  # from layout, to layout, seconds
STATE = ("param", "frozen", "state", "buffer")


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


def settled(source: Layout, how: Layout | str) -> Layout:
    """Where an output comes to rest: a given layout; replicated for scalars; else as it lies, nothing pending."""
    if isinstance(how, Layout):
        return how
    return replicated(source.shape, source.tier) if prod(source.shape) == 1 else source.with_pending(())


class Conversions:
    """Seconds of conversions on one mesh, BIG where there is no way from one layout to the other.

    Note [Starts that are shared]. A model has dozens of small gradients, and each collective takes a while to start. What the
    update alone reads can wait, and state can be asked for early, so such collectives become one bucket later
    (`program/passes/buckets.py`): of each counts what it moves, its part of one start, and to be copied into a bucket and out of
    it, where that is less than a start of its own. What flows through the layers is waited for at once and pays its start. Only
    where starts were measured: latencies of a data sheet are those of a wire, and weigh little.
    """

    def __init__(self, convert_s: ConvertS, mesh: Mesh) -> None:
        self._convert_s, self._mesh = convert_s, mesh
        self._unstarted = mesh.with_topology(without_starts(mesh.topology)) if mesh.topology.measured else None
        self._tables: dict[tuple[tuple[Layout, ...], tuple[Layout, ...], int, int, int], Array] = {}

    def second(self, src: Layout, dst: Layout, itemsize: int, sum_itemsize: int = 0, together: int = 1) -> float:
        itemsize = max(itemsize, sum_itemsize) if src.pending else itemsize
        if src is dst:
            return 0.0
        try:
            alone_s = self._convert_s(src, dst, self._mesh, itemsize)
            if self._unstarted is None or together < 2:
                return min(alone_s, BIG)
            unstarted_s = self._convert_s(src, dst, self._unstarted, itemsize)
            nbytes = max(src.local_numel, dst.local_numel) * itemsize
            copied_s = COPIES * (nbytes / self._mesh.topology.device.memory_bytes_per_s + self._mesh.topology.device.launch_s)
            return min(alone_s, unstarted_s + (alone_s - unstarted_s) / together + copied_s, BIG)
        except SpecError:
            return BIG

    def table(
        self, srcs: tuple[Layout, ...], dsts: tuple[Layout, ...], itemsize: int, sum_itemsize: int = 0, together: int = 1
    ) -> Array:
        """From each to each; values of one shape often ask for the same."""
        key = (srcs, dsts, itemsize, sum_itemsize, together)
        found = self._tables.get(key)
        if found is None:
            rows = [[self.second(a, b, itemsize, sum_itemsize, together) for b in dsts] for a in srcs]
            found = self._tables[key] = np.array(rows, dtype=float)
        return found


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
        self.source = [number(s.outs[flow.result]) for s in options[flow.producer]]
        self.classes = [c for c, _, _ in flow.uses]
        self.groups = [g for _, _, g in flow.uses]
        self.targets = [[number(s.outs[0] if k < 0 else s.ins[k]) for s in options[c]] for c, k, _ in flow.uses]
        self.rest: list[int] = []  # per number of a source, the layout it settles to
        if flow.settle is not None:
            self.rest = [number(settled(source, flow.settle)) for source in list(numbers)]
        self.layouts = tuple(numbers)
        self.numel = [layout.local_numel for layout in self.layouts]
        self._known: dict[int, float] = {}
        self._measured: dict[tuple[int, tuple[int, ...]], tuple[float, float]] = {}
        self._pairs: dict[int, Array | None] = {}
        self._spread: dict[int, tuple[list[tuple[int, ...]], NDArray[np.intp]]] = {}

    def at(self, choice: Sequence[int]) -> tuple[int, tuple[int, ...]]:
        """Source and targets under a choice."""
        targets = tuple([t[choice[c]] for c, t in zip(self.classes, self.targets)])
        return self.source[choice[self.flow.producer]], targets

    def second(self, a: int, b: int) -> float:
        """Seconds of one conversion of one value."""
        if a == b:
            return 0.0
        key = a * len(self.layouts) + b
        found = self._known.get(key)
        if found is None:
            found = self.conversions.second(
                self.layouts[a], self.layouts[b], self.flow.itemsize, self.flow.sum_itemsize, self.flow.together
            )
            self._known[key] = found
        return found

    def steps(self, source: int, targets: Sequence[int]) -> list[Step]:
        """Each conversion one value goes through."""
        steps: list[Step] = []
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

    def _want(self, have: list[int], target: int, steps: list[Step]) -> None:
        if target in have:
            return
        seconds, k = min([(self.second(h, target), k) for k, h in enumerate(have)])
        steps.append((have[k], target, seconds))
        have.append(target)

    def measure(self, source: int, targets: tuple[int, ...]) -> tuple[float, float]:
        """Seconds of all conversions of all values; bytes of the converted copies of one."""
        key = (source, targets)
        found = self._measured.get(key)
        if found is None:
            steps = self.steps(source, targets)
            seconds = self.flow.count * sum([s for _, _, s in steps])
            found = self._measured[key] = (seconds, float(self.flow.itemsize * sum([self.numel[t] for _, t, _ in steps])))
        return found

    def row(self, cls: int, choice: Sequence[int], price: float) -> Array:
        """Seconds (with `price` per byte of copies) for each option of a class, the others as in `choice`."""
        found = self._spread.get(cls)
        if found is None:
            found = self._spread[cls] = self._distinct(cls)
        distinct, which = found
        source, targets = self.at(choice)
        makes = cls == self.flow.producer
        places = [k for k, c in enumerate(self.classes) if c == cls]
        out = []
        for some in distinct:
            here = list(targets)
            for k, t in zip(places, some[makes:], strict=True):
                here[k] = t
            seconds, nbytes = self.measure(some[0] if makes else source, tuple(here))
            out.append(seconds + price * nbytes)
        return np.array(out)[which]

    def _distinct(self, cls: int) -> tuple[list[tuple[int, ...]], NDArray[np.intp]]:
        """What the options of a class say about this flow, each once; and which option says which."""
        columns = [self.source] if cls == self.flow.producer else []
        columns += [t for c, t in zip(self.classes, self.targets, strict=True) if c == cls]
        seen: dict[tuple[int, ...], int] = {}
        which = [seen.setdefault(says, len(seen)) for says in zip(*columns, strict=True)]
        return list(seen), np.array(which, dtype=np.intp)

    def pair(self, k: int, price: float) -> Array | None:
        """Seconds per option of the producer and of use k, as if it were the only use; None: all 0."""
        if k not in self._pairs:
            self._pairs[k] = self._pair(k)
        found = self._pairs[k]
        if not price:
            return found
        source, target = np.array(self.source), np.array(self.targets[k])
        copied = (source[:, None] != target[None, :]) * (np.array(self.numel, dtype=float)[target] * self.flow.itemsize)
        return np.minimum((0.0 if found is None else found) + price * copied, BIG)

    def _pair(self, k: int) -> Array | None:
        sources, at = np.unique(np.array(self.source), return_inverse=True)
        targets, which = np.unique(np.array(self.targets[k]), return_inverse=True)
        srcs, dsts = (tuple(self.layouts[n] for n in numbers.tolist()) for numbers in (sources, targets))
        table = self.conversions.table(srcs, dsts, self.flow.itemsize, self.flow.sum_itemsize, self.flow.together)
        if not table.any():
            return None
        return np.minimum(self.flow.count * table, BIG)[np.ix_(at, which)]

    def shares(self, k: int, choice: Sequence[int]) -> Array | float:
        """What share of a conversion use k pays per option of its class: 1 / (uses that take it now, itself included)."""
        others = [t[choice[c]] for j, (c, t) in enumerate(zip(self.classes, self.targets, strict=True))
                  if j != k and self.groups[j] == self.groups[k]]  # fmt: skip
        if not others:
            return 1.0
        uses = np.bincount(others, minlength=len(self.layouts))
        share: Array = 1.0 / (1 + uses[self.targets[k]])
        return share

    def settle(self) -> Array | None:
        """Seconds of coming to rest per option of the producer, as if nobody used the value."""
        if not self.rest:
            return None
        return np.minimum(self.flow.count * np.array([self.second(s, self.rest[s]) for s in self.source]), BIG)


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
    first = alike(options)
    uses: dict[int, dict[tuple[int, int, int], None]] = {id: {} for id in program.values}
    made = {id: (ties.of_input(k), 0) for k, id in enumerate(program.inputs)}
    phases: dict[str, int] = {}
    for index, node in enumerate(program.nodes):
        c = ties.of_node(index)
        for operand, ref in enumerate(node.refs):
            group = phases.setdefault(node.phase, len(phases)) if ref in regather else 0
            uses[ref][(c, first[c][operand], group)] = None
        for j, o in enumerate(node.outs):
            if o is not None:
                made[o] = (c, j)
    leaf_of = dict(program.aliases)
    settle: dict[int, Layout | str] = {}
    for position, id in enumerate(program.outputs):
        if position in leaf_of:
            uses[id][(ties.of_input(leaf_of[position]), -1, 0)] = None
        else:
            settle[id] = outputs.get(position, "rest")
    late, parameters = _can_wait(program), max(1, sum(program.values[i].role == "param" for i in program.inputs))
    grouped: dict[Flow, list[int]] = {}
    for id, (c, j) in made.items():
        if uses[id] or id in settle:
            size = program.values[id].dtype.itemsize
            together = parameters if id in late else 1
            like = Flow(c, j, tuple(uses[id]), settle.get(id), size, sums.get(id, size), together, 0, ())
            grouped.setdefault(like, []).append(id)
    return tuple(attrs.evolve(flow, count=len(ids), values=tuple(ids)) for flow, ids in grouped.items())


def _can_wait(program: Program) -> frozenset[int]:
    """Values whose collectives can join others: state that is there from the start, and what nobody but the update reads."""
    read_at_once = {i for node in program.nodes if node.phase != "update" for i in node.refs}
    state = {i for i in program.inputs if program.values[i].role in STATE}
    return frozenset(i for i in program.values if i in state or i not in read_at_once)


def copies_of(program: Program, ids: Collection[int]) -> frozenset[int]:
    """The values and what casts and views alone make of them: what is let go of with them, and made anew with them."""
    found = set(ids)
    for node in program.nodes:
        moved = node.target.rsplit(".", 1)[0] in FREE or node.target.startswith("aten._to_copy")
        if moved and len(node.refs) == 1 and node.refs[0] in found:
            found.update(node.results)
    return frozenset(found)


def alike(options: Sequence[tuple[Strategy, ...]]) -> list[list[int]]:
    """Per class and operand, the first operand that every option wants in the same layout."""
    out = []
    for strategies in options:
        columns = list(zip(*(s.ins for s in strategies), strict=True))
        seen: dict[tuple[Layout, ...], int] = {}
        out.append([seen.setdefault(column, k) for k, column in enumerate(columns)])
    return out
