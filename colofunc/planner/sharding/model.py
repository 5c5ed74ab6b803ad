"""The cost model of one program: what a choice of strategies costs, exactly as lowering will spend it.

    cost = sum of the strategies' own seconds
         + for every value, in the order of its uses, each layout that is wanted and not there yet,
           converted from the cheapest copy there is

Two consumers that want one layout share the conversion, so the cost is not pairwise. `true_cost` is the judge;
`pair_graph` is the pairwise model that the search moves in, with a share of each conversion on each consumer;
`exact.exact_graph` has one factor over all consumers of a value, for programs small enough. `row` is the true cost of
every option of one class, all else as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

import attrs
import numpy as np

from colofunc.mesh import Mesh
from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.eliminate import Array, Graph
from colofunc.planner.sharding.flows import Coded, Conversions, ConvertS, Flow, flows_of
from colofunc.program.cost import arithmetic_dtype
from colofunc.program.ir import Node, Program
from colofunc.program.work_kinds import work_kind
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Strategy

Choice = Sequence[int]  # option index per class
KernelS = Callable[[Node, Strategy], float | None]

TIE_S_PER_BYTE = 1e-18
"""Between equal costs the smaller local results win; far below any real second."""


@attrs.frozen(eq=False)
class Model:
    """Everything about the choice that does not depend on the choice. Built by `build_model`."""

    mesh: Mesh
    options: tuple[tuple[Strategy, ...], ...]  # per class; an input leaf's are strategies without operands
    seconds: tuple[Array, ...]  # per class and option, one member
    weight: tuple[int, ...]  # members per class
    flows: tuple[Flow, ...]
    coded: tuple[Coded, ...]  # the flows over these options
    flows_of: tuple[tuple[int, ...], ...]  # class -> flows it takes part in
    conversions: Conversions
    copy_price: tuple[float, ...] = ()  # per flow: seconds per byte of a converted copy of all its values
    extra: tuple[Array, ...] = ()  # per class and option: added seconds (a price of memory)
    _base: list[Graph] = attrs.field(factory=list)

    def priced(self, copy_price: Sequence[float], extra: Sequence[Array]) -> Model:
        """The same model where converted copies and options also cost memory."""
        return attrs.evolve(self, copy_price=tuple(copy_price), extra=tuple(extra), base=[])

    # --- the judge

    def true_cost(self, choice: Choice) -> float:
        """Seconds of the whole step for one rank, with prices."""
        own = sum([w * s.item(choice[c]) for c, (w, s) in enumerate(zip(self.weight, self.seconds, strict=True))])
        own += sum([e.item(choice[c]) for c, e in enumerate(self.extra)])
        return own + self.conversions_s(choice)

    def conversions_s(self, choice: Choice) -> float:
        """The part of `true_cost` that is converting between operators."""
        return sum([self.flow_s(f, choice) for f in range(len(self.flows))])

    def flow_s(self, f: int, choice: Choice) -> float:
        """Seconds of all conversions of all values of flow f (and the price of their copies)."""
        coded = self.coded[f]
        seconds, nbytes = coded.measure(*coded.at(choice))
        return seconds + self.copy_price[f] * nbytes if self.copy_price else seconds

    def steps(self, f: int, choice: Choice) -> list[tuple[Layout, Layout, float]]:
        """(from, to, seconds) of each conversion that one value of flow f goes through."""
        coded = self.coded[f]
        return [(coded.layouts[a], coded.layouts[b], s) for a, b, s in coded.steps(*coded.at(choice))]

    def own(self, c: int) -> Array:
        """Own seconds of all members of a class per option, with the price of memory."""
        base: Array = self.weight[c] * self.seconds[c]
        return base + self.extra[c] if self.extra else base

    def row(self, c: int, choice: Choice) -> Array:
        """True cost of each option of class c, all else as in `choice`, up to what does not depend on c."""
        row = self.own(c)
        for f in self.flows_of[c]:
            coded, price = self.coded[f], self.copy_price[f] if self.copy_price else 0.0
            pair = coded.pair(0, price) if len(coded.classes) == 1 and not coded.rest else None
            if pair is None or coded.classes[0] == coded.flow.producer:
                row = row + coded.row(c, choice, price)
            elif c == coded.flow.producer:
                row = row + pair[:, choice[coded.classes[0]]]
            else:
                row = row + pair[choice[coded.flow.producer]]
        return row

    # --- the model to search in

    def pair_graph(self, choice: Choice | float) -> Graph:
        """The pairwise model. Where uses may share a conversion each pays a share: a given one, or by `choice`.

        With a choice, a use that takes target t pays 1 / (uses that take t now, itself included), which makes the
        model equal to the true cost at the choice itself (but for conversions that start from another copy).
        """
        if not self._base:
            self._base.append(self._unshared())
        graph = self._base[0].copy()
        for f, coded in enumerate(self.coded):
            if len(coded.classes) < 2:
                continue
            for k, c in enumerate(coded.classes):
                costs = coded.pair(k, self.copy_price[f] if self.copy_price else 0.0)
                if costs is None:
                    continue
                if isinstance(choice, float):
                    others = coded.groups.count(coded.groups[k]) - 1
                    costs = costs * max(choice, 1 / (1 + others))
                else:
                    costs = costs * coded.shares(k, choice)
                graph.add((coded.flow.producer, c), costs)
        return graph

    def _unshared(self) -> Graph:
        """What does not depend on who shares: own costs, values with one use, coming to rest."""
        graph = Graph([self.own(c) for c in range(len(self.options))])
        for f, coded in enumerate(self.coded):
            rest = coded.settle()
            if rest is not None:
                graph.add((coded.flow.producer,), rest)
            if len(coded.classes) == 1:
                costs = coded.pair(0, self.copy_price[f] if self.copy_price else 0.0)
                if costs is not None:
                    graph.add((coded.flow.producer, coded.classes[0]), costs)
        return graph


def build_model(
    program: Program,
    mesh: Mesh,
    ties: Ties,
    options: Sequence[tuple[Strategy, ...]],
    convert_s: ConvertS,
    outputs: dict[int, Layout],
    regather: frozenset[int] = frozenset(),
    conversions: Conversions | None = None,
    sums: Mapping[int, int] | None = None,
    kernel_s: KernelS | None = None,
) -> Model:
    """Cost model. `outputs`: fixed layouts by output position; `regather`: values converted anew in each phase.

    `conversions`: those of another model on this mesh, to know what it knows. `sums`: see `Constraints`. `kernel_s`:
    seconds of an operator under a strategy where its kernel is known.
    """
    seconds = []
    for c, strategies in enumerate(options):
        item = ties.members[c][0]
        node = program.nodes[item - ties.n_inputs] if item >= ties.n_inputs else None
        seconds.append(np.array([own_s(program, node, s, mesh, kernel_s) for s in strategies], dtype=float))
    flows = flows_of(program, ties, options, outputs, regather, sums or {})
    touched: list[dict[int, None]] = [{} for _ in options]
    for f, flow in enumerate(flows):
        for c in (flow.producer, *(u[0] for u in flow.uses)):
            touched[c][f] = None
    conversions = conversions or Conversions(convert_s, mesh)
    return Model(
        mesh,
        tuple(options),
        tuple(seconds),
        tuple(len(m) for m in ties.members),
        flows,
        tuple(Coded(flow, options, conversions) for flow in flows),
        tuple(tuple(t) for t in touched),
        conversions,
    )


def own_s(
    program: Program, node: Node | None, strategy: Strategy, mesh: Mesh, kernel_s: KernelS | None = None
) -> float:
    """Seconds of one operator under a strategy: its kernel's or the roofline of its local work, plus communication
    inside it.
    """
    local = sum(lay.local_numel for lay in strategy.outs if lay is not None)
    tie_s = TIE_S_PER_BYTE * local
    cost = strategy.cost
    if node is None or not (cost.flops or cost.nbytes):
        return cost.extra_s + tie_s
    seconds = None if kernel_s is None else kernel_s(node, strategy)
    if seconds is not None:
        return seconds + cost.extra_s + tie_s
    tensors = [(program.values[i].dtype, prod(program.values[i].shape)) for i in (*node.refs, *node.results)]
    compute_s = mesh.compute_s(cost.flops, cost.nbytes, arithmetic_dtype(tensors), work_kind(node.target))
    return compute_s + cost.extra_s + tie_s
