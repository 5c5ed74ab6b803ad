"""A liveness estimate for planning: bytes of one rank at every node, and what is alive at the peak.

The accountant of the local program is the judge of a budget (`assign(..., peak_bytes=...)`); this estimate is what the
search steers by, and the judge where no accountant is given. A value lives from its producer to its last use, a
converted copy from its first to its last use, inputs for the whole step; views share their base; a donated output takes
the memory of its input leaf. A sum that everybody wants reduced is reduced where it is made (`coalesce.reduces_early`):
from there on the copy lives.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from colofunc.planner.sharding.classes import Ties
from colofunc.planner.sharding.flows import Coded, alike
from colofunc.planner.sharding.model import Model
from colofunc.program.ir import Program
from colofunc.spec.strategies import FREE

Ints = NDArray[np.intp]


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
    model: Model
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
        n = len(self.program.nodes)
        own, last = np.zeros(len(self.spans)), self.last
        copies: list[tuple[Ints, Ints, float, int]] = []
        for f, coded in enumerate(self.model.coded):
            source, targets = coded.at(choice)
            own[f] = coded.numel[source] * coded.flow.itemsize
            if any(t != source for t in targets):
                lives: dict[tuple[int, int], tuple[Ints, Ints]] = {}
                early = _reduced(coded, source, targets)
                if early:
                    last = last.copy() if last is self.last else last
                    last[self.own[f]] = self.born[self.own[f]]
                for group, target, (a, b) in zip(coded.groups, targets, self.spans[f], strict=True):
                    a = np.minimum(a, self.made[f]) if early else a
                    if target != source:
                        had = lives.get((target, group))
                        lives[target, group] = (a, b) if had is None else (np.minimum(a, had[0]), np.maximum(b, had[1]))
                copies += [(a, b, coded.numel[t] * coded.flow.itemsize, f) for (t, _), (a, b) in lives.items()]
        none = np.zeros(0, dtype=np.intp)
        low = np.concatenate([self.born, *(a for a, _, _, _ in copies), none])
        high = np.concatenate([last, *(b for _, b, _, _ in copies), none])
        size = np.concatenate([own[self.flow], *(np.full(len(a), s) for a, _, s, _ in copies)])
        # Node k is at k + 1, the inputs at 0.
        change = np.bincount(low + 1, size, n + 3) - np.bincount(high + 2, size, n + 3)
        total = np.cumsum(change[: n + 1])
        return self._at(own, last, copies, int(total.argmax()) - 1, round(float(total.max())))

    def _at(
        self,
        own: NDArray[np.float64],
        last: Ints,
        copies: list[tuple[Ints, Ints, float, int]],
        position: int,
        nbytes: int,
    ) -> Peak:
        alive = (self.born <= position) & (position <= last)
        held = np.bincount(self.role[alive], own[self.flow[alive]], len(self.roles))
        roles = {role: int(b) for role, b in zip(self.roles, held, strict=True) if b}
        outs: dict[tuple[int, int], int] = {}
        for f, members in enumerate(np.bincount(self.flow[alive], minlength=len(self.spans)).tolist()):
            if members:
                key = (self.model.flows[f].producer, self.model.flows[f].result)
                outs[key] = outs.get(key, 0) + members
        copied: dict[int, int] = {}
        for a, b, size, f in copies:
            here = int(((a <= position) & (position <= b)).sum())
            if here:
                copied[f] = copied.get(f, 0) + here
                roles["copy"] = roles.get("copy", 0) + here * int(size)
        return Peak(nbytes, dict(sorted(roles.items(), key=lambda item: -item[1])), outs, copied)


def _reduced(coded: Coded, source: int, targets: Sequence[int]) -> bool:
    """Whether a sum is wanted reduced by all, to no more than it holds."""
    return bool(coded.layouts[source].pending) and all(
        t != source and coded.numel[t] <= coded.numel[source] for t in targets
    )


def liveness(program: Program, model: Model, ties: Ties) -> Liveness:
    """Birth, last use and uses of every value."""
    n = len(program.nodes)
    born = dict.fromkeys(program.inputs, -1)
    last = dict.fromkeys(program.inputs, n)
    view_of: dict[int, int] = {}
    at: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    first = alike(model.options)
    ends = _ends(program)
    for index, node in enumerate(program.nodes):
        refs = node.refs
        for operand, ref in enumerate(refs):
            span = at.setdefault(ref, {})
            key = (ties.of_node(index), first[ties.of_node(index)][operand])
            low, high = span.get(key, (index, index))
            span[key] = (low, max(high, ends[index]))
            last[ref] = max(last.get(ref, 0), index)
        for o in node.outs:
            if o is not None:
                born[o] = index
                last.setdefault(o, index)
                if refs and node.target.rsplit(".", 1)[0] in FREE:
                    view_of[o] = view_of.get(refs[0], refs[0])
    for out in program.outputs:
        last[out] = n
    for view, base in view_of.items():
        last[base] = max(last[base], last[view])
    leaf_of = dict(program.aliases)
    donated = frozenset(program.outputs[p] for p in leaf_of) - frozenset(program.inputs)
    spans = []
    flow_of: list[tuple[int, int]] = []
    for f, flow in enumerate(model.flows):
        uses = []
        for c, operand, _ in flow.uses:
            here = [at.get(id, {}).get((c, operand), (n, n)) for id in flow.values]
            uses.append((np.array([a for a, _ in here], dtype=np.intp), np.array([b for _, b in here], dtype=np.intp)))
        spans.append(tuple(uses))
        flow_of += [(id, f) for id in flow.values if id not in donated and id not in view_of]
    numbers: dict[str, int] = {}
    role = [numbers.setdefault(program.values[id].role, len(numbers)) for id, _ in flow_of]

    def ints(items: Sequence[int]) -> Ints:
        return np.array(items, dtype=np.intp)

    return Liveness(
        program,
        model,
        ints([f for _, f in flow_of]),
        ints([born[id] for id, _ in flow_of]),
        ints([last[id] for id, _ in flow_of]),
        ints(role),
        tuple(numbers),
        tuple(spans),
        tuple(ints([born[id] for id in flow.values]) for flow in model.flows),
        tuple(ints(some) for some in _members(flow_of, len(model.flows))),
    )


def _members(flow_of: Sequence[tuple[int, int]], n: int) -> list[list[int]]:
    """Per flow the positions of its values."""
    found: list[list[int]] = [[] for _ in range(n)]
    for k, (_, f) in enumerate(flow_of):
        found[f].append(k)
    return found


def _ends(program: Program) -> list[int]:
    """Until when each node holds its operands: its own index, for a view the last use of what it shows."""
    n = len(program.nodes)
    last = dict.fromkeys(program.outputs, n)
    ends = list(range(n))
    for index in range(n - 1, -1, -1):
        node = program.nodes[index]
        if node.refs and node.target.rsplit(".", 1)[0] in FREE:
            ends[index] = max([index, *(last.get(o, index) for o in node.results)])
        for ref in node.refs:
            last[ref] = max(last.get(ref, 0), ends[index])
    return ends
