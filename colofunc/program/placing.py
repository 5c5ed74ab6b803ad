"""Placing: where the nodes of a global program run, if some of its inputs exist at some indices of a mesh axis only.

Problem: a person says where parameters are (`o i @pp=1`), and everything else is to follow. Idea: a node runs where its
operands are. Where these are apart, the fewest bytes travel:

- A parameter never travels. Views are taken again where what they look at has come, which is sent in their place unless
  it is larger.
- What was sent once is there for all that follow. So stage 1's products run at 1, the gradient that leaves it is sent
  to 0 once, and what neither reads, such as a mask, is made on all ranks.
- A gradient is made where its parameter is. Scalars that are computed of gradients of several stages (a joint norm,
  whether all are finite) are computed on all ranks: each stage sends its parts once, and no rank waits for another to
  answer.
- What a stage hands on and the next one keeps packed for backward is packed there.
- In a pipeline no byte is saved against the order of its stages: what is small and made of a weight alone, such as its
  cast, could be sent to an earlier stage, and what is computed with it would have to come back. What only the gradients
  of one stage are made of, such as the sum for a bias, runs there where the gradient that it reads comes anyway: sent
  from a later stage, it would be waited for behind the last microbatch.

    placing_of(program, {0: ("pp", (0,)), 3: ("pp", (1,))}, mesh).nodes       # per node ("pp", (0,)), ("pp", (1,)), or None: all ranks

State of which nobody says anything is where the only nodes that read it are: a parameter's moments follow it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.ops.saved_activations import PACK
from colofunc.ops.targets import is_view
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import At

Indices = frozenset[int]  # of the mesh axis, or stages of a pipeline

STATE = frozenset({"param", "state", "buffer", "frozen"})
"""Roles of inputs that stay where they are."""

ROUNDS = 4
"""At most this many rounds find state that follows other state: moments follow parameters, and what is computed of them
follows these."""


@attrs.frozen
class Placing:
    """Where things are: inputs and outputs by position, nodes by index. None: everywhere."""

    inputs: tuple[At | None, ...]
    nodes: tuple[At | None, ...]
    outputs: tuple[At | None, ...]


@attrs.frozen
class StagesOf:
    """Stages of a pipeline, of which a rank may have several. `ranks`: per stage, the index of `axis` that has it.

    `inputs`: position of an input -> its stages.
    """

    axis: str
    ranks: tuple[int, ...]
    inputs: Mapping[int, tuple[int, ...]]

    def at(self, position: int) -> At:
        """Where an input exists."""
        return self.axis, tuple(sorted({self.ranks[stage] for stage in self.inputs[position]}))

    def apart(self, ranks: int) -> dict[int, At]:
        """Where the inputs exist that do not exist on all of so many ranks."""
        apart = {}
        for position in self.inputs:
            axis, indices = self.at(position)
            if len(indices) < ranks:
                apart[position] = axis, indices
        return apart

    def on(self, indices: Iterable[int]) -> Indices:
        """All stages of the ranks at some indices."""
        ranks = set(indices)
        return frozenset(stage for stage, rank in enumerate(self.ranks) if rank in ranks)


def placing_of(program: Program, given: Mapping[int, At], mesh: Mesh, stages: StagesOf | None = None) -> Placing | None:
    """Where everything is, by what is said of inputs (by position); None where nothing is said.

    stages: where ranks have several stages what follows from one stage is told from what follows from another. Raises
    PlanError where inputs are placed on several axes.
    """
    if not given:
        return None
    axes = {axis for axis, _ in given.values()}
    if len(axes) > 1:
        raise PlanError(
            f"values are placed at indices of {len(axes)} axes, {', '.join(sorted(axes))}; place all of them on one "
            "axis"
        )
    (axis,) = axes
    ranks = tuple(range(mesh.axis_size(axis)))
    in_order = stages is not None and stages.axis == axis
    if stages is None or not in_order:
        stages = StagesOf(axis, ranks, {})
    where: dict[int, Indices] = {}
    for position, (_, indices) in given.items():
        where[position] = frozenset(stages.inputs.get(position, ())) or stages.on(indices)
    for _ in range(ROUNDS):
        run = _Run(program, len(stages.ranks), where, in_order)
        followers = run.followers()
        if not followers:
            break
        where |= followers
    return run.placing(stages)


class _Run:
    """One pass over the nodes. `there`: value -> where a copy is by now; `home`: where it was made.

    in_order: indices are stages, which a microbatch goes through from the first to the last, and its gradients from the
    last to the first.
    """

    def __init__(self, program: Program, size: int, inputs: Mapping[int, Indices], in_order: bool) -> None:
        self.program = program
        self.everywhere = frozenset(range(size))
        self.given = inputs
        self.in_order = in_order
        self.home = {id: inputs.get(position, self.everywhere) for position, id in enumerate(program.inputs)}
        self.there = dict(self.home)
        self.stays = {id for id in program.inputs if program.values[id].role in STATE}
        self.gradient_of = inputs_of_gradients(program)
        self.last_fed = self._last_fed() if in_order else {}
        self.first_fed = self._first_fed() if in_order else {}
        self.of_weights = self._of_weights() if in_order else set[int]()
        self.of_gradients = self._of_gradients() if in_order else set[int]()
        self.nodes: list[Indices] = []
        for node in program.nodes:
            at = self._choose(node)
            self.nodes.append(at)
            for id in node.refs:
                self._bring(id, at)
            for id in node.results:
                self.home[id] = self.there[id] = at

    def _choose(self, node: Node) -> Indices:
        """Where a node runs."""
        homes = {self.home[id] for id in node.refs if self.home[id] != self.everywhere}
        if not homes:
            return self.everywhere
        for id in node.results:
            if id in self.gradient_of:
                return self.home[self.gradient_of[id]]
        if len(homes) > 1 and self._joins_scalars(node):
            return self.everywhere
        own = self._own_stage(node) if node.target != PACK else self._keeping_stage(node)
        if own is not None:
            return frozenset((own,))
        options = set(homes)
        if node.phase != "update":  # an update keeps all copies of what it updates equal
            options.update(frozenset((index,)) for home in homes for index in home)

        def order(at: Indices) -> tuple[bool, bool, bool, float, int, int]:
            moved = sum(self._moved(id, at) for id in dict.fromkeys(node.refs))
            # What flows forward has to come to the later stage anyway, gradients to the earlier one.
            flows_forward = node.phase == "forward" and moved > 0
            nearest = -max(at) if flows_forward else min(at)
            return moved == inf, self._against_order(node, at), self._takes_weights(node, at), moved, len(at), nearest

        return min(options, key=order)

    def _against_order(self, node: Node, at: Indices) -> bool:
        """Whether a node would need, in forward, what a later stage makes, or in backward what the backward of an
        earlier one does.
        """
        if not self.in_order or node.phase not in ("forward", "backward"):
            return False
        if node.phase == "forward":
            return any(min(at) < min(self.home[id]) for id in node.refs)
        if any(max(at) < self.last_fed.get(id, 0) for id in node.results):
            return True
        for id in node.refs:
            maker = self.program.makers.get(id)
            if maker is not None and maker.phase == "backward" and max(at) > max(self.home[id]):
                return True
        return False

    def _takes_weights(self, node: Node, at: Indices) -> bool:
        """Whether, in a pipeline, what is made of weights alone (a cast of one) would leave its stage: work goes where
        weights are.
        """
        return self.in_order and any(id in self.of_weights and not at <= self.there[id] for id in node.refs)

    def _joins_scalars(self, node: Node) -> bool:
        """Whether a node puts scalars of gradients together, such as the squares of a joint norm."""
        if not any(id in self.of_gradients for id in node.results):
            return False
        if any(id in self.stays and self.home[id] != self.everywhere for id in node.refs):
            return False  # the update of a scalar parameter is where that is
        return all(self.program.values[id].shape == () for id in node.refs)

    def _of_gradients(self) -> set[int]:
        """What is computed of parameters' gradients."""
        reached = set(self.gradient_of)
        for node in self.program.nodes:
            if not reached.isdisjoint(node.refs):
                reached.update(node.results)
        return reached - set(self.gradient_of)

    def _of_weights(self) -> set[int]:
        """Weights, and what is computed of them and of nothing else."""
        of_weights = set(self.stays)
        for node in self.program.nodes:
            if node.refs and of_weights.issuperset(node.refs):
                of_weights.update(node.results)
        return of_weights

    def _last_fed(self) -> dict[int, int]:
        """Value of the backward pass -> the last stage to whose parameters' gradients it leads: no earlier stage can
        make it.
        """
        # Of a tied weight each stage makes its own part.
        single = {
            gradient: self.home[weight] for gradient, weight in self.gradient_of.items() if len(self.home[weight]) == 1
        }
        return last_fed(self.program, {gradient: max(home) for gradient, home in single.items()})

    def _first_fed(self) -> dict[int, int]:
        """Value of the backward pass -> the first stage to whose parameters' gradients it leads."""
        first = {gradient: min(self.home[weight]) for gradient, weight in self.gradient_of.items()}
        for node in reversed(self.program.nodes):
            stages = [first[out] for out in node.results if out in first]
            if node.phase == "backward" and stages:
                for ref in node.refs:
                    first[ref] = min(first.get(ref, stages[0]), *stages)
        return first

    def _own_stage(self, node: Node) -> int | None:
        """The stage whose weights' gradients alone a sum leads to, where all that it reads is there or comes there
        anyway.
        """
        if not self.in_order or node.phase != "backward" or not self._is_sum(node):
            return None
        if not all(id in self.first_fed for id in node.results):
            return None
        stages = {self.first_fed[id] for id in node.results} | {self.last_fed.get(id, 0) for id in node.results}
        if len(stages) != 1:
            return None
        (stage,) = stages
        for id in node.refs:
            if stage not in self.there[id] and not self._comes_anyway(id, stage, node):
                return None
        return stage

    def _keeping_stage(self, node: Node) -> int | None:
        """The stage whose backward reads what is packed: an earlier one could not hand it on there."""
        return max((self.last_fed[id] for id in node.results if id in self.last_fed), default=None)

    def _is_sum(self, node: Node) -> bool:
        """Whether a node sums what is larger than its result."""
        if not node.target.startswith("aten.sum."):
            return False
        values = self.program.values
        summed_bytes = values[node.refs[0]].nbytes
        return all(values[id].nbytes < summed_bytes for id in node.results)

    def _comes_anyway(self, id: int, stage: int, reader: Node) -> bool:
        """Whether a gradient is read beside something that only a stage has."""
        maker = self.program.makers.get(id)
        if maker is None or maker.phase != "backward":
            return False
        for index in self.program.readers[id]:
            other = self.program.nodes[index]
            if other is not reader and any(self.home.get(ref) == frozenset((stage,)) for ref in other.refs):
                return True
        return False

    def _moved(self, id: int, at: Indices) -> float:
        """Bytes that travel so that a value is there; infinite of a parameter."""
        lacking = at - self.there[id]
        if not lacking:
            return 0.0
        sent = self.program.values[id].nbytes * float(len(lacking))
        maker = self.program.makers.get(id)
        if maker is not None and is_free_view(maker):
            return min(sent, sum(self._moved(ref, at) for ref in maker.refs))
        return inf if id in self.stays else sent

    def _bring(self, id: int, at: Indices) -> None:
        """Have a value there.

        With a view comes what it looks at, where that is sent in its place or is there already.
        """
        if at <= self.there[id]:
            return
        maker = self.program.makers.get(id)
        if maker is not None and (self._is_taken_again(maker, at) or is_sent_as_source(self.program, id)):
            for ref in maker.refs:
                self._bring(ref, at)
        self.there[id] |= at

    def _is_taken_again(self, maker: Node, at: Indices) -> bool:
        """Whether a node takes a view, and of what is there by now."""
        return is_free_view(maker) and not any(self._moved(ref, at) for ref in maker.refs)

    def followers(self) -> dict[int, Indices]:
        """Position of state of which nobody has said anything -> where the only nodes are that read it, and what it
        becomes is.
        """
        output_of = {position: out for out, position in self.program.aliases}
        followers = {}
        for position, id in enumerate(self.program.inputs):
            if position in self.given or id not in self.stays or id in self.program.constants:
                continue
            places = {self.nodes[index] for index in self.program.readers.get(id, ())}
            if position in output_of:
                places.add(self.home[self.program.outputs[output_of[position]]])
            if len(places) == 1 and self.everywhere not in places:
                (followers[position],) = places
        return followers

    def placing(self, stages: StagesOf) -> Placing:
        """What was found, in terms of the mesh axis."""
        leaf_of = dict(self.program.aliases)
        outputs = []
        for position, id in enumerate(self.program.outputs):
            if position in leaf_of:  # it takes the place of an input, where that is
                outputs.append(self.home[self.program.inputs[leaf_of[position]]])
            elif self.program.values[id].shape == ():  # a loss, which all ranks print
                outputs.append(self.everywhere)
            else:
                outputs.append(self.home[id])
        inputs = [self.home[id] for id in self.program.inputs]
        return Placing(_ats(stages, inputs), _ats(stages, self.nodes), _ats(stages, outputs))


def _ats(stages: StagesOf, places: Iterable[Indices]) -> tuple[At | None, ...]:
    """Indices of the mesh axis for sets of stages; None for all."""
    all_ranks = set(stages.ranks)
    ats: list[At | None] = []
    for at in places:
        ranks = {stages.ranks[stage] for stage in at}
        ats.append(None if ranks == all_ranks else (stages.axis, tuple(sorted(ranks))))
    return tuple(ats)


def last_fed(program: Program, of_gradients: Mapping[int, int]) -> dict[int, int]:
    """Value of the backward pass -> the largest number of a gradient that it leads to. of_gradients: gradient -> its
    number.
    """
    last = dict(of_gradients)
    for node in reversed(program.nodes):
        number = max((last.get(out, 0) for out in node.results), default=0)
        if node.phase == "backward" and number:
            for ref in node.refs:
                last[ref] = max(last.get(ref, 0), number)
    return last


def inputs_of_gradients(program: Program) -> dict[int, int]:
    """Gradient -> the input that it is the gradient of, for those that the trace has named so."""
    input_of = {f"grad.{program.values[id].name}": id for id in program.inputs}
    gradients = {}
    for id, value in program.values.items():
        if value.role == "grad" and value.name in input_of:
            gradients[id] = input_of[value.name]
    return gradients


def placed_everywhere(program: Program) -> Placing:
    """Everything on all ranks."""
    return Placing((None,) * len(program.inputs), (None,) * len(program.nodes), (None,) * len(program.outputs))


def with_outputs(placing: Placing | None, program: Program, ends: Mapping[int, At]) -> Placing | None:
    """The same with some outputs, by position, at other places: what somebody asks for is sent there. None:
    everywhere."""
    if not ends:
        return placing
    placing = placing or placed_everywhere(program)
    outputs = [ends.get(position, at) for position, at in enumerate(placing.outputs)]
    return attrs.evolve(placing, outputs=tuple(outputs))


def is_sent_as_source(program: Program, id: int) -> bool:
    """Whether what a value looks at is sent in its place: it is no larger, and others may read it there too."""
    maker = program.makers.get(id)
    if maker is None or not is_free_view(maker):
        return False
    (source,) = set(maker.refs)
    return source in program.makers and program.values[source].nbytes <= program.values[id].nbytes


def is_free_view(node: Node) -> bool:
    """Whether a node takes a view of its one operand, which costs nothing where that is."""
    return is_view(node.target) and len(set(node.refs)) == 1
