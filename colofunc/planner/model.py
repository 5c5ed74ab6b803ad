"""The cost model of one program: what a choice of strategies costs, exactly as lowering will spend it.

    cost = sum of the strategies' own seconds
         + for every value, in the order of its uses, each layout that is wanted and not there yet,
           converted from the cheapest copy there is

Two consumers that want one layout share the conversion, so the cost is not pairwise. `true_cost` is the judge;
`pair_graph` is the pairwise model that the search moves in, with a share of each conversion on each consumer;
`exact_graph` has one factor over all consumers of a value, for programs small enough.

A *flow* is one value: its producer, its distinct consumers (class, operand), and how many tied values are like it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, reduce
from math import prod
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.dtensor.layout import Layout, replicated
from colofunc.dtensor.rule import Strategy
from colofunc.errors import SpecError
from colofunc.mesh import Mesh
from colofunc.planner.classes import Ties
from colofunc.planner.eliminate import BIG, Array, Graph
from colofunc.program.ir import Node, Program

ConvertS = Callable[[Layout, Layout, Mesh, int], float]
Choice = Sequence[int]  # option index per class

TIE_S_PER_BYTE = 1e-18
"""Between equal costs the smaller local results win; far below any real second."""


@attrs.frozen
class Flow:
    """`count` values of class `producer` (result `result`) with the same uses.

    `uses`: (class, operand, group): operand -1 is the input leaf that a donated output returns to. Conversions are
    shared within a group only (a parameter that is gathered anew in each phase has one group per phase).
    `settle`: the value is an output of the step, so that a pending or wrongly placed one must be brought to rest.
    """

    producer: int
    result: int
    uses: tuple[tuple[int, int, int], ...]
    settle: Layout | str | None
    itemsize: int
    count: int
    values: tuple[int, ...]


@attrs.frozen(eq=False)
class Model:
    """Everything about the choice that does not depend on the choice. Built by `build_model`."""

    mesh: Mesh
    options: tuple[tuple[Strategy, ...], ...]  # per class; an input leaf's are strategies without operands
    seconds: tuple[Array, ...]  # per class and option, one member
    weight: tuple[int, ...]  # members per class
    flows: tuple[Flow, ...]
    flows_of: tuple[tuple[int, ...], ...]  # class -> flows it takes part in
    convert: Callable[[Layout, Layout, int], float]
    copy_price: tuple[float, ...] = ()  # per flow: seconds per byte of a converted copy of all its values
    _tables: dict[object, object] = attrs.field(factory=dict)
    _memo: dict[object, Any] = attrs.field(factory=dict)

    def priced(self, copy_price: Sequence[float]) -> Model:
        """The same model where converted copies also cost memory."""
        return attrs.evolve(self, copy_price=tuple(copy_price), memo={})

    def sharing(self, other: Model) -> Model:
        """The same model with the conversion tables of another one (equal options)."""
        return attrs.evolve(self, tables=other._tables, convert=other.convert)

    # --- layouts of options

    def source(self, flow: Flow, choice: Choice) -> Layout:
        layout = self.options[flow.producer][choice[flow.producer]].outs[flow.result]
        assert layout is not None, "a value that is used has a layout"
        return layout

    def target(self, use: tuple[int, int, int], choice: Choice) -> Layout:
        strategy = self.options[use[0]][choice[use[0]]]
        layout = strategy.outs[0] if use[1] < 0 else strategy.ins[use[1]]
        assert layout is not None
        return layout

    def side(self, cls: int, operand: int | None, result: int = 0) -> tuple[tuple[Layout, ...], NDArray[np.intp]]:
        """Distinct layouts of an operand (None, -1: a result) over a class's options, and which option has which."""
        key = ("side", cls, operand, result)
        found = self._tables.get(key)
        if found is None:
            seen: dict[Layout, int] = {}
            at = []
            for s in self.options[cls]:
                layout = s.outs[result] if operand is None or operand < 0 else s.ins[operand]
                assert layout is not None
                at.append(seen.setdefault(layout, len(seen)))
            found = self._tables[key] = (tuple(seen), np.array(at, dtype=np.intp))
        return found  # type: ignore[return-value]

    def table(self, src: tuple[Layout, ...], dst: tuple[Layout, ...], itemsize: int) -> Array:
        """Seconds of converting each of `src` to each of `dst`; computed once per pair of lists."""
        key = ("table", src, dst, itemsize)
        found = self._tables.get(key)
        if found is None:
            rows = [[min(self.convert(a, b, itemsize), BIG) for b in dst] for a in src]
            found = self._tables[key] = np.array(rows, dtype=float).reshape(len(src), len(dst))
        return found  # type: ignore[return-value]

    # --- the judge

    def true_cost(self, choice: Choice) -> float:
        """Seconds of the whole step for one rank."""
        own = sum(w * float(s[choice[c]]) for c, (w, s) in enumerate(zip(self.weight, self.seconds, strict=True)))
        return own + sum(self.flow_s(f, choice) for f in range(len(self.flows)))

    def conversions_s(self, choice: Choice) -> float:
        """The part of `true_cost` that is converting between operators."""
        return sum(self.flow_s(f, choice) for f in range(len(self.flows)))

    def flow_s(self, f: int, choice: Choice) -> float:
        """Seconds of all conversions of all values of flow f (and the price of their copies)."""
        flow = self.flows[f]
        source = self.source(flow, choice)
        targets = tuple(self.target(use, choice) for use in flow.uses)
        key = (f, source, targets)
        found = self._memo.get(key)
        if found is None:
            steps = self.steps(flow, source, targets)
            found = flow.count * sum(s for _, _, s in steps)
            if self.copy_price:
                found += self.copy_price[f] * flow.itemsize * sum(to.local_numel for _, to, _ in steps)
            self._memo[key] = found
        return found

    def steps(self, flow: Flow, source: Layout, targets: Sequence[Layout]) -> list[tuple[Layout, Layout, float]]:
        """(from, to, seconds) of each conversion one value of the flow goes through."""
        steps: list[tuple[Layout, Layout, float]] = []
        copies: dict[int, list[Layout]] = {}
        for (_, _, group), target in zip(flow.uses, targets, strict=True):
            have = copies.setdefault(group, [source])
            self._want(have, target, flow.itemsize, steps)
        if flow.settle is not None:
            self._want([source, *copies.get(0, [])], settled(source, flow.settle), flow.itemsize, steps)
        return steps

    def _want(
        self, have: list[Layout], target: Layout, itemsize: int, steps: list[tuple[Layout, Layout, float]]
    ) -> None:
        if target in have:
            return
        seconds, best = min(((min(self.convert(h, target, itemsize), BIG), k) for k, h in enumerate(have)))
        steps.append((have[best], target, seconds))
        have.append(target)

    # --- models to search in

    def unary(self, extra: Sequence[Array] | None = None) -> list[Array]:
        """Own seconds of each class's options, times members; `extra` is added (the price of memory)."""
        base = [w * s for w, s in zip(self.weight, self.seconds, strict=True)]
        return base if extra is None else [b + e for b, e in zip(base, extra, strict=True)]

    def pair_graph(self, choice: Choice | float, extra: Sequence[Array] | None = None) -> Graph:
        """The pairwise model. Where uses may share a conversion each pays a share: a given one, or by `choice`.

        With a choice, a use that takes target t pays 1 / (uses that take t now, itself included), which makes the
        model equal to the true cost at the choice itself (but for conversions that start from another copy).
        """
        graph = Graph(self.unary(extra))
        for f, flow in enumerate(self.flows):
            sources, at = self.side(flow.producer, None, flow.result)
            self._settle(graph, flow, sources, at)
            shared = len(flow.uses) > 1
            for k, use in enumerate(flow.uses):
                costs = self._pair(f, k)
                if costs is not None:
                    graph.add((flow.producer, use[0]), costs * self._shares(flow, k, choice) if shared else costs)
        return graph

    def _pair(self, f: int, k: int) -> Array | None:
        """Seconds of flow f per option of its producer and of use k, with the price of copies; None: all 0."""
        flow = self.flows[f]
        price = self.copy_price[f] if self.copy_price else 0.0
        key = ("pair", f, k, price)
        memo = self._memo if price else self._tables
        if key not in memo:
            sources, at = self.side(flow.producer, None, flow.result)
            targets, which = self.side(flow.uses[k][0], flow.uses[k][1])
            costs = flow.count * self.table(sources, targets, flow.itemsize)
            if price:
                copied = np.array([[s is not t for t in targets] for s in sources])
                costs = costs + price * copied * np.array([t.local_numel * flow.itemsize for t in targets])
            found = np.minimum(costs, BIG)[np.ix_(at, which)] if costs.any() else None
            memo[key] = found
        return memo[key]  # type: ignore[return-value]

    def _shares(self, flow: Flow, k: int, choice: Choice | float) -> Array | float:
        """What share of a conversion use k pays, per option of its class."""
        cls, operand, group = flow.uses[k]
        others = [u for j, u in enumerate(flow.uses) if j != k and u[2] == group]
        if not others:
            return 1.0
        if isinstance(choice, float):
            return max(choice, 1 / (1 + len(others)))
        targets, which = self.side(cls, operand)
        now = [self.target(u, choice) for u in others]
        return np.array([1.0 / (1 + now.count(t)) for t in targets])[which]

    def _settle(self, graph: Graph, flow: Flow, sources: tuple[Layout, ...], at: NDArray[np.intp]) -> None:
        if flow.settle is not None:
            rest = [min(self.convert(s, settled(s, flow.settle), flow.itemsize), BIG) for s in sources]
            graph.add((flow.producer,), flow.count * np.array(rest)[at])

    def exact_graph(self, most: int, extra: Sequence[Array] | None = None) -> Graph | None:
        """The true cost as factors over all uses of each value; None where a factor would exceed `most` entries."""
        graph = Graph(self.unary(extra))
        for flow in self.flows:
            sides = [self.side(flow.producer, None, flow.result), *(self.side(u[0], u[1]) for u in flow.uses)]
            if prod(len(at) for _, at in sides) > most:
                return None
            scope = (flow.producer, *(u[0] for u in flow.uses))
            graph.add(scope, flow.count * self._joint(flow, sides)[np.ix_(*(at for _, at in sides))])
        return graph

    def _joint(self, flow: Flow, sides: Sequence[tuple[tuple[Layout, ...], NDArray[np.intp]]]) -> Array:
        """Seconds over (source, target 1, target 2, ...): each target from the cheapest of what came before it."""
        lists = [layouts for layouts, _ in sides]
        total = np.zeros(tuple(map(len, lists)))
        groups = [0, *(u[2] for u in flow.uses)]

        def spread(table: Array, *axes: int) -> Array:
            shape = [1] * len(lists)
            for axis, n in zip(axes, table.shape, strict=True):
                shape[axis] = n
            return table.reshape(shape)

        for k in range(1, len(lists)):
            before = [j for j in range(k) if j == 0 or groups[j] == groups[k]]
            total = total + reduce(
                np.minimum, (spread(self.table(lists[j], lists[k], flow.itemsize), j, k) for j in before)
            )
        if flow.settle is not None:
            rest = tuple(settled(s, flow.settle) for s in lists[0])
            cheapest = spread(
                np.array([self.convert(s, r, flow.itemsize) for s, r in zip(lists[0], rest, strict=True)]), 0
            )
            for j in range(1, len(lists)):
                if groups[j] == 0:
                    cheapest = np.minimum(cheapest, spread(self.table(lists[j], rest, flow.itemsize).T, 0, j))
            total = total + np.minimum(cheapest, BIG)
        return total


def settled(source: Layout, how: Layout | str) -> Layout:
    """Where an output comes to rest: a given layout; replicated for scalars; else as it lies, nothing pending."""
    if isinstance(how, Layout):
        return how
    return replicated(source.shape, source.tier) if prod(source.shape) == 1 else source.with_pending(())


def build_model(
    program: Program,
    mesh: Mesh,
    ties: Ties,
    options: Sequence[tuple[Strategy, ...]],
    convert_s: ConvertS,
    outputs: dict[int, Layout],
    regather: frozenset[int] = frozenset(),
) -> Model:
    """Cost model. `outputs`: fixed layouts by output position; `regather`: values converted anew in each phase."""
    seconds = []
    for c, strategies in enumerate(options):
        item = ties.members[c][0]
        node = program.nodes[item - ties.n_inputs] if item >= ties.n_inputs else None
        seconds.append(np.array([own_s(program, node, s, mesh) for s in strategies], dtype=float))
    flows = _flows(program, ties, outputs, regather)
    touched: list[dict[int, None]] = [{} for _ in options]
    for f, flow in enumerate(flows):
        for c in (flow.producer, *(u[0] for u in flow.uses)):
            touched[c][f] = None

    @cache
    def convert(src: Layout, dst: Layout, itemsize: int) -> float:
        try:
            return 0.0 if src is dst else convert_s(src, dst, mesh, itemsize)
        except SpecError:  # there is no way from one to the other
            return BIG

    return Model(
        mesh,
        tuple(options),
        tuple(seconds),
        tuple(len(m) for m in ties.members),
        flows,
        tuple(tuple(t) for t in touched),
        convert,
    )


def own_s(program: Program, node: Node | None, strategy: Strategy, mesh: Mesh) -> float:
    """Seconds of one operator under a strategy: roofline of its local work, plus communication inside it."""
    local = sum(lay.local_numel for lay in strategy.outs if lay is not None)
    tie_s = TIE_S_PER_BYTE * local
    cost = strategy.cost
    if node is None or not (cost.flops or cost.nbytes):
        return cost.extra_s + tie_s
    dtype = next((program.values[o].dtype for o in node.outs if o is not None), None)
    name = "float32" if dtype is None or not dtype.is_floating_point else str(dtype).removeprefix("torch.")
    return mesh.compute_s(cost.flops, cost.nbytes, name) + cost.extra_s + tie_s


def _flows(program: Program, ties: Ties, outputs: dict[int, Layout], regather: frozenset[int]) -> tuple[Flow, ...]:
    uses: dict[int, dict[tuple[int, int, int], None]] = {id: {} for id in program.values}
    made = {id: (ties.of_input(k), 0) for k, id in enumerate(program.inputs)}
    phases: dict[str, int] = {}
    for index, node in enumerate(program.nodes):
        c = ties.of_node(index)
        for operand, ref in enumerate(node.refs):
            group = phases.setdefault(node.phase, len(phases)) if ref in regather else 0
            uses[ref][(c, operand, group)] = None
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
    grouped: dict[Flow, list[int]] = {}
    for id, (c, j) in made.items():
        if uses[id] or id in settle:
            alike = Flow(c, j, tuple(uses[id]), settle.get(id), program.values[id].dtype.itemsize, 0, ())
            grouped.setdefault(alike, []).append(id)
    return tuple(attrs.evolve(flow, count=len(ids), values=tuple(ids)) for flow, ids in grouped.items())
