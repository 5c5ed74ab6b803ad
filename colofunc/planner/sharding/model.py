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

ClassChoice = Sequence[int]  # option index per class
KernelS = Callable[[Node, Strategy], float | None]

TIE_S_PER_BYTE = 1e-18
"""Between equal costs the smaller local results win; far below any real second."""


@attrs.frozen(eq=False)
class PairwiseModel:
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

    def priced(self, copy_price: Sequence[float], extra: Sequence[Array]) -> PairwiseModel:
        """The same model where converted copies and options also cost memory."""
        return attrs.evolve(self, copy_price=tuple(copy_price), extra=tuple(extra), base=[])

    # --- the judge

    def true_cost(self, choice: ClassChoice) -> float:
        """Seconds of the whole step for one rank, with prices."""
        # Hot: every move that a search keeps ends here.
        members_s = zip(self.weight, self.seconds, choice, strict=True)
        own_s = sum([weight * seconds.item(option) for weight, seconds, option in members_s])
        if self.extra:
            own_s += sum([extra.item(option) for extra, option in zip(self.extra, choice, strict=True)])
        return own_s + self.conversions_s(choice)

    def conversions_s(self, choice: ClassChoice) -> float:
        """The part of `true_cost` that is converting between operators."""
        return sum([self.flow_s(flow, choice) for flow in range(len(self.flows))])

    def flow_s(self, flow: int, choice: ClassChoice) -> float:
        """Seconds of all conversions of all values of a flow (and the price of their copies)."""
        coded = self.coded[flow]
        seconds, nbytes = coded.measure(*coded.at(choice))
        return seconds + self.copy_price[flow] * nbytes if self.copy_price else seconds

    def steps(self, flow: int, choice: ClassChoice) -> list[tuple[Layout, Layout, float]]:
        """(from, to, seconds) of each conversion that one value of a flow goes through."""
        coded = self.coded[flow]
        steps = []
        for source, target, seconds in coded.steps(*coded.at(choice)):
            steps.append((coded.layouts[source], coded.layouts[target], seconds))
        return steps

    def own(self, number: int) -> Array:
        """Own seconds of all members of a class per option, with the price of memory."""
        base: Array = self.weight[number] * self.seconds[number]
        return base + self.extra[number] if self.extra else base

    def _price(self, flow: int) -> float:
        """Seconds per byte of a converted copy of all values of a flow."""
        return self.copy_price[flow] if self.copy_price else 0.0

    def row(self, number: int, choice: ClassChoice) -> Array:
        """True cost of each option of a class, all else as in `choice`, up to what does not depend on it."""
        row = self.own(number)
        for flow in self.flows_of[number]:
            coded, price = self.coded[flow], self._price(flow)
            producer = coded.flow.producer
            # With one consumer the cost is a table of both options, which is known already.
            pair = coded.pair(0, price) if len(coded.classes) == 1 and not coded.rest else None
            if pair is None or coded.classes[0] == producer:
                row = row + coded.row(number, choice, price)
            elif number == producer:
                row = row + pair[:, choice[coded.classes[0]]]
            else:
                row = row + pair[choice[producer]]
        return row

    # --- the model to search in

    def pair_graph(self, choice: ClassChoice | float) -> Graph:
        """The pairwise model. Where uses may share a conversion each pays a share: a given one, or by `choice`.

        With a choice, a use that takes target t pays 1 / (uses that take t now, itself included), which makes the
        model equal to the true cost at the choice itself (but for conversions that start from another copy).
        """
        if not self._base:
            self._base.append(self._unshared())
        graph = self._base[0].copy()
        for flow, coded in enumerate(self.coded):
            if len(coded.classes) < 2:
                continue
            for use, consumer in enumerate(coded.classes):
                costs = coded.pair(use, self._price(flow))
                if costs is None:
                    continue
                if isinstance(choice, float):
                    sharing = coded.groups.count(coded.groups[use])
                    costs = costs * max(choice, 1 / sharing)
                else:
                    costs = costs * coded.shares(use, choice)
                graph.add((coded.flow.producer, consumer), costs)
        return graph

    def _unshared(self) -> Graph:
        """What does not depend on who shares: own costs, values with one use, coming to rest."""
        graph = Graph([self.own(number) for number in range(len(self.options))])
        for flow, coded in enumerate(self.coded):
            rest = coded.settle()
            if rest is not None:
                graph.add((coded.flow.producer,), rest)
            if len(coded.classes) == 1:
                costs = coded.pair(0, self._price(flow))
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
) -> PairwiseModel:
    """Cost model. `outputs`: fixed layouts by output position; `regather`: values converted anew in each phase.

    `conversions`: those of another model on this mesh, to know what it knows. `sums`: see `Constraints`. `kernel_s`:
    seconds of an operator under a strategy where its kernel is known.
    """
    seconds = []
    for members, strategies in zip(ties.members, options, strict=True):
        # Members of a class cost the same, so the first stands for all.
        item = members[0]
        node = program.nodes[item - ties.n_inputs] if item >= ties.n_inputs else None
        costs_s = [own_s(program, node, strategy, mesh, kernel_s) for strategy in strategies]
        seconds.append(np.array(costs_s, dtype=float))
    flows = flows_of(program, ties, options, outputs, regather, sums or {})
    flows_of_class: list[dict[int, None]] = [{} for _ in options]  # in order, each once
    for position, flow in enumerate(flows):
        flows_of_class[flow.producer][position] = None
        for consumer, *_ in flow.uses:
            flows_of_class[consumer][position] = None
    conversions = conversions or Conversions(convert_s, mesh)
    return PairwiseModel(
        mesh,
        tuple(options),
        tuple(seconds),
        tuple(map(len, ties.members)),
        flows,
        tuple(Coded(flow, options, conversions) for flow in flows),
        tuple(map(tuple, flows_of_class)),
        conversions,
    )


def own_s(
    program: Program, node: Node | None, strategy: Strategy, mesh: Mesh, kernel_s: KernelS | None = None
) -> float:
    """Seconds of one operator under a strategy: its kernel's or the roofline of its local work, plus communication
    inside it.
    """
    tie_s = TIE_S_PER_BYTE * sum(layout.local_numel for layout in strategy.outs if layout is not None)
    cost = strategy.cost
    if node is None or not (cost.flops or cost.nbytes):
        return cost.extra_s + tie_s
    seconds = None if kernel_s is None else kernel_s(node, strategy)
    if seconds is not None:
        return seconds + cost.extra_s + tie_s
    values = [program.values[id] for id in (*node.refs, *node.results)]
    tensors = [(value.dtype, prod(value.shape)) for value in values]
    compute_s = mesh.compute_s(cost.flops, cost.nbytes, arithmetic_dtype(tensors), work_kind(node.target))
    return compute_s + cost.extra_s + tie_s
