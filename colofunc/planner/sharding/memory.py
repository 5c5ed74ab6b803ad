"""A liveness estimate for planning: bytes of one rank at every node, and what is alive at the peak.

The accountant of the local program is the judge of a budget (`assign(..., peak_bytes=...)`); this estimate is what the
search steers by, and the judge where no accountant is given. A value lives from its producer to its last use, a
converted copy from its first to its last use, inputs for the whole step; views share their base; a donated output takes
the memory of its input leaf. A sum that everybody wants reduced is reduced where it is made (`coalesce.reduce_early`):
from there on the copy lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.ops.targets import is_view
from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.flows import Coded, operands_alike
from colofunc.planner.sharding.model import PairwiseModel
from colofunc.program.ir import Node, Program

Ints = NDArray[np.intp]
_Copies = tuple[Ints, Ints, float, int]
"""Converted copies of the values of one flow: (first node of each, last node of each, bytes of one, the flow)."""


@attrs.frozen
class Peak:
    """The largest moment. `alive_outs`: (class, result) -> members alive there; `alive_copies`: flow -> copies."""

    nbytes: int
    by_role: Mapping[str, int]
    alive_outs: Mapping[tuple[int, int], int]
    alive_copies: Mapping[int, int]


@attrs.frozen(eq=False)
class Liveness:
    """What does not depend on the choice: where each value is born, last used, and used how. Built by `liveness`."""

    program: Program
    model: PairwiseModel
    flow: Ints  # per value that has memory of its own: its flow,
    born: Ints  # node index, -1 for inputs,
    last: Ints  # last use, through views,
    role: Ints  # and number of its role
    roles: tuple[str, ...]
    spans: tuple[tuple[tuple[Ints, Ints], ...], ...]  # per flow and use, (first, last) node index of each value
    made: tuple[Ints, ...]  # per flow, where each value is made
    own: tuple[Ints, ...]  # per flow, which of the values that have memory of their own are its values

    def peak(self, choice: Sequence[int]) -> Peak:
        """Peak of the step under a choice."""
        count = len(self.program.nodes)
        own_bytes = np.zeros(len(self.spans))
        last = self.last.copy()
        copies: list[_Copies] = []
        for flow, coded in enumerate(self.model.coded):
            source, targets = coded.at(choice)
            itemsize = coded.flow.itemsize
            own_bytes[flow] = coded.numel[source] * itemsize
            if all(target == source for target in targets):
                continue
            early = _reduced(coded, source, targets)
            if early:
                last[self.own[flow]] = self.born[self.own[flow]]
            for (target, _), (begin, end) in self._lives(flow, coded, source, targets, early).items():
                copies.append((begin, end, coded.numel[target] * itemsize, flow))
        begins = np.concatenate([self.born, *(begin for begin, _, _, _ in copies)])
        ends = np.concatenate([last, *(end for _, end, _, _ in copies)])
        sizes = [np.full(len(begin), nbytes) for begin, _, nbytes, _ in copies]
        size = np.concatenate([own_bytes[self.flow], *sizes])
        # Node k is at k + 1, the inputs at 0.
        change = np.bincount(begins + 1, size, count + 3) - np.bincount(ends + 2, size, count + 3)
        total = np.cumsum(change[: count + 1])
        return self._at(own_bytes, last, copies, int(total.argmax()) - 1, round(float(total.max())))

    def _lives(
        self, flow: int, coded: Coded, source: int, targets: Sequence[int], early: bool
    ) -> dict[tuple[int, int], tuple[Ints, Ints]]:
        """(target, group) -> the first and last node at which the converted copy of each value lives.

        early: the copy is made where the value is.
        """
        lives: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        for group, target, (begin, end) in zip(coded.groups, targets, self.spans[flow], strict=True):
            if target == source:
                continue
            if early:
                begin = np.minimum(begin, self.made[flow])
            # Uses that share a conversion share its copy.
            if (target, group) in lives:
                other_begin, other_end = lives[target, group]
                begin, end = np.minimum(begin, other_begin), np.maximum(end, other_end)
            lives[target, group] = (begin, end)
        return lives

    def _at(
        self, own_bytes: NDArray[np.float64], last: Ints, copies: list[_Copies], position: int, nbytes: int
    ) -> Peak:
        """What is alive at a position."""
        alive = (self.born <= position) & (position <= last)
        held = np.bincount(self.role[alive], own_bytes[self.flow[alive]], len(self.roles))
        roles = {role: int(held_bytes) for role, held_bytes in zip(self.roles, held, strict=True) if held_bytes}
        outs: dict[tuple[int, int], int] = {}
        for flow, members in enumerate(np.bincount(self.flow[alive], minlength=len(self.spans)).tolist()):
            if members:
                key = (self.model.flows[flow].producer, self.model.flows[flow].result)
                outs[key] = outs.get(key, 0) + members
        copied: dict[int, int] = {}
        for begin, end, copy_bytes, flow in copies:
            here = int(((begin <= position) & (position <= end)).sum())
            if here:
                copied[flow] = copied.get(flow, 0) + here
                roles["copy"] = roles.get("copy", 0) + here * int(copy_bytes)
        return Peak(nbytes, dict(sorted(roles.items(), key=lambda item: -item[1])), outs, copied)


def _reduced(coded: Coded, source: int, targets: Sequence[int]) -> bool:
    """Whether a sum is wanted reduced by all, to no more than it holds."""
    if not coded.layouts[source].pending:
        return False
    return all(target != source and coded.numel[target] <= coded.numel[source] for target in targets)


def liveness(program: Program, model: PairwiseModel, ties: Ties) -> Liveness:
    """Birth, last use and uses of every value."""
    count = len(program.nodes)
    born, last, view_of = _lives(program)
    # A donated output takes its leaf's memory, a view that of its base.
    donated = frozenset(program.outputs[position] for position, _ in program.aliases) - frozenset(program.inputs)
    uses_of = _uses(program, model, ties)
    spans: list[tuple[tuple[Ints, Ints], ...]] = []
    owners: list[tuple[int, int]] = []  # (value that has memory of its own, its flow)
    made: list[Ints] = []
    own: list[Ints] = []
    for flow_number, flow in enumerate(model.flows):
        made.append(_ints([born[id] for id in flow.values]))
        uses = []
        for consumer, operand, _ in flow.uses:
            here = [uses_of.get(id, {}).get((consumer, operand), (count, count)) for id in flow.values]
            uses.append((_ints([begin for begin, _ in here]), _ints([end for _, end in here])))
        spans.append(tuple(uses))
        owning = [id for id in flow.values if id not in donated and id not in view_of]
        own.append(_ints(range(len(owners), len(owners) + len(owning))))
        owners += [(id, flow_number) for id in owning]
    numbers: dict[str, int] = {}
    roles = [numbers.setdefault(program.values[id].role, len(numbers)) for id, _ in owners]
    return Liveness(
        program,
        model,
        _ints([flow_number for _, flow_number in owners]),
        _ints([born[id] for id, _ in owners]),
        _ints([last[id] for id, _ in owners]),
        _ints(roles),
        tuple(numbers),
        tuple(spans),
        tuple(made),
        tuple(own),
    )


def _ints(items: Sequence[int]) -> Ints:
    return np.array(items, dtype=np.intp)


def _lives(program: Program) -> tuple[dict[int, int], dict[int, int], dict[int, int]]:
    """(value -> the node that makes it, -1 for inputs; value -> its last use, through views; view -> its base)."""
    count = len(program.nodes)
    born = {**dict.fromkeys(program.inputs, -1), **program.made_at}
    last = dict.fromkeys(program.inputs, count)
    view_of: dict[int, int] = {}
    for index, node in enumerate(program.nodes):
        looks = _looks(node)
        for out in node.results:
            last[out] = program.last_uses.get(out, index)
            if looks:
                view_of[out] = view_of.get(node.refs[0], node.refs[0])
    for view, base in view_of.items():
        last[base] = max(last[base], last[view])
    return born, last, view_of


def _uses(program: Program, model: PairwiseModel, ties: Ties) -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
    """Value -> (class, operand) that reads it -> the first and last node index of these uses, through views."""
    uses: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    # Operands that have the same layout in every option are one use, the first of them.
    first = operands_alike(model.options)
    ends = _ends(program)
    for index, node in enumerate(program.nodes):
        reader = ties.of_node(index)
        for operand, ref in enumerate(node.refs):
            spans = uses.setdefault(ref, {})
            key = (reader, first[reader][operand])
            begin, end = spans.get(key, (index, index))
            spans[key] = (begin, max(end, ends[index]))
    return uses


def _looks(node: Node) -> bool:
    """Whether a node shows memory of its operand."""
    return bool(node.refs) and is_view(node.target)


def _ends(program: Program) -> list[int]:
    """Until when each node holds its operands: its own index, for a view the last use of what it shows."""
    count = len(program.nodes)
    last = dict.fromkeys(program.outputs, count)
    ends = list(range(count))
    for index in range(count - 1, -1, -1):
        node = program.nodes[index]
        if _looks(node):
            ends[index] = max([index, *(last.get(out, index) for out in node.results)])
        for ref in node.refs:
            last[ref] = max(last.get(ref, 0), ends[index])
    return ends
