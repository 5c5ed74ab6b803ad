"""The part of each node of a loop that a timetable cuts: a stage, and whether it is forward, backward or a weight
gradient.

It follows from three facts. A node's stage is where it runs (`Node.on`), and where a rank has several stages, the one
that its operands have come to. It is backward if its phase says so, or if it reads what backward nodes make
(`facts.behind_forward`). A backward node is a weight gradient if nothing but one accumulator is reached from each of its
results: no other stage waits for it, and no other gradient.

Note [Floating]. What depends on no weight and on no other stage (masks, positions, a microbatch's rows) runs on all
ranks and belongs to no part. It is computed in each part that reads it, so that nothing of it is sent or kept. What all
ranks gather of it is gathered by a loop of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from colofunc.errors import PlanError
from colofunc.program.facts import behind_forward
from colofunc.program.ir import Node, Part, Program, Timetable
from colofunc.program.places import SEND

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
"""Kinds of parts. A schedule has B, or I and W in its place."""

ELSEWHERE = -1
"""In place of an accumulator: a value reaches another stage, or several accumulators."""

_OF_BATCH = frozenset({"batch", "constant", "seed"})
"""Roles of inputs of a loop that belong to no stage."""


class PartsOfNodes:
    """Which nodes of a body float, and the part of each other node on each rank that runs it. owned: value outside ->
    its stage.
    """

    def __init__(self, node: Node, body: Program, timetable: Timetable, owned: Mapping[int, int]) -> None:
        self.body = body
        self.timetable = timetable
        self.owned = {into: owned[ref] for ref, into in zip(node.refs, self.body.inputs, strict=True) if ref in owned}
        table = timetable.table
        self.everywhere = tuple(range(len(table.rows)))
        self.stages_of: dict[int, list[int]] = {rank: [] for rank in self.everywhere}
        for stage, rank in sorted(table.rank_of.items()):
            self.stages_of[rank].append(stage)
        kinds = {action.kind for row in table.rows for action in row}
        self.splits = INPUTS in kinds or WEIGHTS in kinds
        self.behind = behind_forward(body)
        self.floating: set[int] = set()
        self.of_weights = self._weights()  # and what is computed of them
        self.part: dict[tuple[int, int], Part] = {}  # (position, rank) -> part
        self.made: dict[tuple[int, int], Part] = {}  # (value, rank) -> the part that makes it, or has sent it there
        self.weight_gradients = self._weight_gradients() if self.splits else set()
        for index, inner in enumerate(self.body.nodes):
            self._place(index, inner)

    def _weights(self) -> set[int]:
        """Inputs that are weights, or made of one outside."""
        weights = set()
        for id in self.body.inputs:
            role = self.body.values[id].role
            if role in ("param", "frozen") or (id in self.owned and role != "buffer"):
                weights.add(id)
        return weights

    def ranks(self, node: Node) -> tuple[int, ...]:
        """Indices of the pipeline's axis that run a node."""
        return self.everywhere if node.on is None else node.on[1]

    def _place(self, index: int, node: Node) -> None:
        layouts = [self.body.values[out].layout for out in node.results]
        if any(layout is not None and layout.lies_along(self.timetable.along) for layout in layouts):
            raise split_along_stages(self.body, node, self.timetable.along)
        if not self.of_weights.isdisjoint(node.refs):
            self.of_weights.update(node.results)
        if node.target == SEND:
            _, _, _, source, targets = node.args
            part = self._of_operand(node, source)
            self.part[index, source] = part
            for rank in (*targets, source):
                self._has_made(node, rank, part)
            return
        floats = self._floats(node)
        if floats and node.outs:
            self.floating.update(node.results)
            return
        ranks = self.ranks(node)
        if floats:  # what shows something for all ranks does so on one
            ranks = ranks[:1]
        for rank in ranks:
            part = self._part(index, node, rank)
            self.part[index, rank] = part
            self._has_made(node, rank, part)

    def _has_made(self, node: Node, rank: int, part: Part) -> None:
        for out in node.results:
            self.made[out, rank] = part

    def _of_operand(self, node: Node, source: int) -> Part:
        """The part that sends: the one that makes what is sent."""
        (ref,) = node.refs
        if (ref, source) in self.made:
            return self.made[ref, source]
        return self.owned.get(ref, self.stages_of[source][0]), FORWARD

    def _floats(self, node: Node) -> bool:
        """See Note [Floating]. A node of one rank that reads something of that rank's is no such node."""
        if any(ref not in self.floating and ref in self.body.makers for ref in node.refs):
            return False
        if node.on is None or len(node.on[1]) > 1:
            return True
        given = [self.body.values[ref] for ref in node.refs if ref not in self.body.makers]
        return all(value.role in _OF_BATCH for value in given)

    def _part(self, index: int, node: Node, rank: int) -> Part:
        """The part that a node is in on a rank. Raises PlanError where the stages of the rank leave none."""
        stages = self.stages_of[rank]
        before = {ref: self.made[ref, rank] for ref in node.refs if (ref, rank) in self.made}
        owners = [self.owned[ref] for ref in node.refs if ref in self.owned and ref not in self.body.makers]
        owners = [stage for stage in owners if stage in stages]
        if index in self.behind:
            return self._backward_stage(index, rank, before, owners), self._backward_kind(index)
        # Forward, a node is in the first stage that is no earlier than those that its operands come from.
        least = max((*(stage for stage, _ in before.values()), *owners), default=stages[0])
        for stage in stages:
            if stage >= least:
                return stage, FORWARD
        raise self._backwards(index, rank)

    def _backward_kind(self, index: int) -> str:
        if not self.splits:
            return BACKWARD
        return WEIGHTS if index in self.weight_gradients else INPUTS

    def _backward_stage(self, index: int, rank: int, before: Mapping[int, Part], owners: Sequence[int]) -> int:
        """The stage of a node behind the forward pass: the last one whose values it reads, but none behind the
        gradients that it reads.
        """
        stages = self.stages_of[rank]
        most = min((stage for stage, kind in before.values() if kind != FORWARD), default=stages[-1])
        # What no weight has made (rotary tables, masks of all layers) says nothing of the stage whose backward reads
        # it.
        read = [stage for ref, (stage, kind) in before.items() if ref in self.of_weights and kind == FORWARD]
        own = [stage for stage in (*read, *owners) if stage in stages and stage <= most]
        allowed = own or [stage for stage in stages if stage <= most]
        if not allowed:
            raise self._backwards(index, rank)
        return max(allowed)

    def _backwards(self, index: int, rank: int) -> PlanError:
        """The error of a node that needs what is made behind it: by a later stage, or backward by an earlier one.

        Stages that were found and not given follow the order of the step: then it has no order that a pipeline can
        follow, as where a gradient is part of a loss.
        """
        node = self.body.nodes[index]
        if not node.line:  # what brings a result to where it is wanted has none
            return split_along_stages(self.body, node, self.timetable.along)
        where = f" in {node.path!r}" if node.path else ""
        line = f" ({node.line})" if node.line else ""
        name = node.target.removeprefix("aten.").removeprefix("colofunc.")
        here = f"{name}{where}{line} runs at {self.timetable.along}={rank}"
        if index not in self.behind and self.timetable.by_hand:
            return PlanError(
                f"{here} and needs what a later stage makes: stages have to follow the order in which the step "
                "computes. Try: stages=None, which follows it, or other globs"
            )
        needs = "the backward pass of an earlier stage" if index in self.behind else "a later stage"
        return PlanError(
            f"{here} and needs what {needs} makes: in a pipeline a microbatch goes forward through the stages once, and "
            "backward once. A step that computes a loss of gradients (a penalty, a second pass) does not. Try: "
            "cf.accumulate and zero(...) in place of cf.pipeline for this step"
        )

    def _weight_gradients(self) -> set[int]:
        """Positions of backward nodes of which each result leads to one accumulator alone: nobody waits for them.

        One node may make the gradients of a weight and of its bias.
        """
        # Value -> the one accumulator that is reached, or `ELSEWHERE`: another stage, or several. What reaches nothing
        # is not in it.
        reached: dict[int, int] = {}
        for position, out in enumerate(self.body.outputs):
            reached[out] = position if reached.get(out, position) == position else ELSEWHERE
        weight_gradients = set()
        for index, node in reversed(list(enumerate(self.body.nodes))):
            from_here = {reached[out] for out in node.results if out in reached}
            if node.target == SEND or not node.outs:
                from_here.add(ELSEWHERE)
            elif index in self.behind and ELSEWHERE not in from_here:
                weight_gradients.add(index)
            for ref in node.refs:
                both = from_here | {reached[ref]} if ref in reached else from_here
                if both:
                    reached[ref] = next(iter(both)) if len(both) == 1 else ELSEWHERE
        return weight_gradients


def split_along_stages(body: Program, node: Node, along: str) -> PlanError:
    """The error of a result of the microbatches that is to be split over the stages: in the loop a value is at one.

    node: what brings it there.
    """
    maker = node
    while not maker.line and maker.refs and maker.refs[0] in body.makers:
        maker = body.makers[maker.refs[0]]
    line = f" ({maker.line})" if maker.line else ""
    way = f" ({node.note})" if node.note else ""
    return PlanError(
        f"out_specs: a result{line} is to be split along axis {along!r}{way}, over which its microbatches go through "
        "stages; use another axis, or leave it at its stage and redistribute what the step returns"
    )
