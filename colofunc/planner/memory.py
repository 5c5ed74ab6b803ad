"""A liveness estimate for planning: bytes of one rank at every node, and what is alive at the peak.

The accountant of the local program is the judge of a budget (`assign(..., peak_bytes=...)`); this estimate is what the
search steers by, and the judge where no accountant is given. A value lives from its producer to its last use, a
converted copy from its first to its last use, inputs for the whole step; views share their base; a donated output takes
the memory of its input leaf.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from colofunc.dtensor.layout import Layout
from colofunc.dtensor.strategies import FREE
from colofunc.planner.classes import Ties
from colofunc.planner.model import Model
from colofunc.program.ir import Program


@attrs.frozen
class Peak:
    """The largest moment. `alive_outs`: (class, result) -> members alive there; `alive_copies`: flow -> copies."""

    nbytes: int
    position: int
    by_role: Mapping[str, int]
    alive_outs: Mapping[tuple[int, int], int]
    alive_copies: Mapping[int, int]


@attrs.frozen(eq=False)
class Liveness:
    """What does not depend on the choice: where each value is born, last used, and used how. Built by `liveness`."""

    program: Program
    model: Model
    born: Mapping[int, int]  # value -> node index, -1 for inputs
    last: Mapping[int, int]  # value -> last use, through views
    view_of: Mapping[int, int]  # value -> base value that a view's result shares memory with
    donated: frozenset[int]  # outputs that take an input leaf's memory
    spans: Mapping[int, Sequence[tuple[int, int]]]  # value -> per use of its flow, (first, last) node index

    def peak(self, choice: Sequence[int]) -> Peak:
        """Peak of the step under a choice."""
        n = len(self.program.nodes)
        change = np.zeros(n + 3)
        pieces: list[tuple[int, int, float, str, tuple[int, int] | int]] = []
        for f, flow in enumerate(self.model.flows):
            source = self.model.source(flow, choice)
            targets = [self.model.target(use, choice) for use in flow.uses]
            own = source.local_numel * flow.itemsize
            for id in flow.values:
                if id not in self.donated and id not in self.view_of:
                    where = (self.born[id], self.last[id])
                    pieces.append((*where, own, self.program.values[id].role, (flow.producer, flow.result)))
                if not any(t is not source for t in targets):
                    continue
                lives: dict[tuple[Layout, int], tuple[int, int]] = {}
                for (_, _, group), target, (a, b) in zip(flow.uses, targets, self.spans[id], strict=True):
                    if target is not source:
                        low, high = lives.get((target, group), (a, b))
                        lives[target, group] = (min(a, low), max(b, high))
                for (target, _), (a, b) in lives.items():
                    pieces.append((a, b, target.local_numel * flow.itemsize, "copy", f))
        for a, b, nbytes, _, _ in pieces:  # node k is at k + 1, the inputs at 0
            change[a + 1] += nbytes
            change[b + 2] -= nbytes
        total = np.cumsum(change[: n + 1])
        return self._at(pieces, int(total.argmax()) - 1, int(total.max()))

    def _at(self, pieces: list[tuple[int, int, float, str, tuple[int, int] | int]], position: int, nbytes: int) -> Peak:
        roles: dict[str, int] = {}
        outs: dict[tuple[int, int], int] = {}
        copies: dict[int, int] = {}
        for a, b, size, role, owner in pieces:
            if a <= position <= b:
                roles[role] = roles.get(role, 0) + int(size)
                if isinstance(owner, tuple):
                    outs[owner] = outs.get(owner, 0) + 1
                else:
                    copies[owner] = copies.get(owner, 0) + 1
        return Peak(nbytes, position, dict(sorted(roles.items(), key=lambda item: -item[1])), outs, copies)


def liveness(program: Program, model: Model, ties: Ties) -> Liveness:
    """Birth, last use and uses of every value."""
    n = len(program.nodes)
    born = dict.fromkeys(program.inputs, -1)
    last = dict.fromkeys(program.inputs, n)
    view_of: dict[int, int] = {}
    at: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    for index, node in enumerate(program.nodes):
        refs = node.refs
        for operand, ref in enumerate(refs):
            span = at.setdefault(ref, {})
            key = (ties.of_node(index), operand)
            span[key] = (span.get(key, (index, index))[0], index)
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
    spans: dict[int, Sequence[tuple[int, int]]] = {}
    for flow in model.flows:
        for id in flow.values:
            here = at.get(id, {})
            spans[id] = [here.get((c, operand), (n, n)) for c, operand, _ in flow.uses]
    return Liveness(program, model, born, last, view_of, donated, spans)
