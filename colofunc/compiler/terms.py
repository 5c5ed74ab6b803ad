"""Which terms of the clock the seconds of a step are made of: work, launches, each collective by its axes, copies; and
what hides them.

Problem: "12 ms of communication" does not say whether a faster link, a larger bucket or nothing at all would make a
step faster: it depends on which collective it is and on whether the device computes meanwhile. Idea: the lanes say when
everything runs (`program/lanes.py`). What runs beside the device's work is hidden as far as the device works, and the
rest is exposed.

    print(low.plan.why("*.mlp"))             # ... all_gather tp            3.1 ms, 1.2 ms of it hidden  (48 calls)
    print(low.plan.why("all_gather"))        # the same of one kind of collectives, and whose they are
    for term in low.terms("*.mlp"): ...

An operator's seconds beside its launch are "compute" where its operations take longer than its bytes, else "memory".
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.plan import Plan
from colofunc.planner.plan_terms import COMPUTE, LAUNCHES, MEMORY, ON_HOST, TermSeconds
from colofunc.program.cost import RuleOf, collective_of, is_bound_by_memory
from colofunc.program.facts import is_called_with_others
from colofunc.program.ir import Node, Program
from colofunc.program.lanes import Busy, Lanes

COPIES = {"to device": "copies to device", "to host": "copies to host", "disk": "copies to or from disk"}
MOST_STEPS = 4
"""At most this many casts, views and packings stand between a parameter or its gradient and the collective that sends
it."""

TermKey = tuple[str, str, str, str, tuple[str, ...]]


def spent(program: Program, played: Lanes, mesh: Mesh, rule_of: RuleOf, plan: Plan) -> tuple[TermSeconds, ...]:
    """What a step takes, a row for each operator of a module and each sort of seconds.

    program: what was played, in the order in which it was; plan: by which layers are alike. A collective is of the
    module that reads what it sends, the first of them where several tensors are sent together, and of the parameters
    whose values or gradients those are.
    """
    working, alike = _Working.of(played.busy), _Alike(plan)
    launch_s = mesh.topology.device.launch_s
    leaves_of: dict[int, tuple[str, ...]] = {}
    bound: dict[int, bool] = {}
    found: dict[TermKey, list[float]] = {}

    def add(busy: Busy, what: str, seconds: float, hidden_s: float, leaves: tuple[str, ...] = ()) -> None:
        node = busy.node
        key = alike.path(node), node.target, node.phase, what, leaves
        row = found.setdefault(key, [0.0, 0.0, 0.0])
        for place, more in enumerate((seconds, hidden_s, 1.0)):
            row[place] += more

    for busy in played.busy:
        node, seconds, body = busy.node, busy.end_s - busy.start_s, _body(program, busy)
        if busy.lane != "compute":
            if id(node) not in leaves_of:
                leaves_of[id(node)] = alike.names(_leaves(node, body))
            add(busy, _words(busy, body), seconds, working.between(busy.start_s, busy.end_s), leaves_of[id(node)])
            continue
        if id(node) not in bound:
            bound[id(node)] = is_bound_by_memory(node, body.values, mesh, rule_of)
        launching_s = 0.0 if is_called_with_others(node) else min(seconds, launch_s)
        add(busy, MEMORY if bound[id(node)] else COMPUTE, seconds - launching_s, 0.0)
        if launching_s:
            add(busy, LAUNCHES, launching_s, 0.0)
    rows = (TermSeconds(*key[:4], row[0], row[1], int(row[2]), key[4]) for key, row in found.items() if row[0])
    return tuple(sorted(rows, key=lambda row: -(row.seconds - row.hidden_s)))


def _body(program: Program, busy: Busy) -> Program:
    """Where a node stands: in the whole, or in the body of a loop."""
    node = program.nodes[busy.index]
    return program if node.loop is None else node.loop.body


def _words(busy: Busy, body: Program) -> str:
    if busy.lane != "collectives":
        return COPIES.get(busy.lane, ON_HOST)
    collective = collective_of(busy.node, body.values)
    return busy.label if collective is None else f"{collective[0]} {','.join(collective[1])}"


def _leaves(node: Node, body: Program) -> list[str]:
    """The parameters that a collective or a copy is of: what it sends are their values or their gradients, as they are,
    cast or packed.
    """
    found, near = dict[str, None](), list(node.refs)
    for _ in range(MOST_STEPS):
        further: list[int] = []
        for id in near:
            value = body.values[id]
            if value.name and value.role in ("param", "frozen", "grad"):
                found[value.name.removeprefix("grad.")] = None
            elif value.role in ("param", "frozen", "grad") and id in body.makers:
                further += body.makers[id].refs
        near = further
    return list(found)


class _Alike:
    """Names of modules and parameters, with digits starred where the plan decides for several layers at once."""

    def __init__(self, plan: Plan) -> None:
        self.starred: dict[tuple[str, str], str] = {}
        self.paths: dict[str, str] = {}
        for decision in plan.decisions:
            if decision.count == 1:
                continue
            members = [key.split("|", 1)[0] for key in decision.keys]
            starred = _starred(members)
            for path in members:
                self.starred[path, decision.target] = self.paths[path] = starred

    def path(self, node: Node) -> str:
        return self.starred.get((node.path, node.target)) or self.paths.get(node.path, node.path)

    def names(self, leaves: Sequence[str]) -> tuple[str, ...]:
        """Of parameters, each once."""
        found = dict[str, None]()
        for leaf in leaves:
            found[self._name(leaf)] = None
        return tuple(found)

    def _name(self, leaf: str) -> str:
        """The module is the end of what stands before the last dot: "state.params.h.3.attn.weight" is of "h.3.attn"."""
        *around, name = leaf.split(".")
        for k in range(len(around)):
            module = self.paths.get(".".join(around[k:]))
            if module is not None:
                return ".".join([*around[:k], module, name])
        return leaf


def _starred(paths: Sequence[str]) -> str:
    """What paths of layers that are alike have in common: "h.0.fc1" and "h.1.fc1" are "h.*.fc1"."""
    common = []
    for parts in zip(*(path.split(".") for path in paths), strict=True):
        common.append(parts[0] if len(set(parts)) == 1 else "*")
    return ".".join(common)


@attrs.frozen
class _Working:
    """When the device works: spans that do not overlap, in order, and the seconds in front of each."""

    starts_s: tuple[float, ...]
    ends_s: tuple[float, ...]
    before_s: tuple[float, ...]

    @staticmethod
    def of(busy: Sequence[Busy]) -> _Working:
        spans = sorted((b.start_s, b.end_s) for b in busy if b.lane == "compute")
        lengths = (end - start for start, end in spans)
        return _Working(tuple(s for s, _ in spans), tuple(e for _, e in spans), tuple(accumulate(lengths, initial=0.0)))

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds that the device works in a span."""
        return max(0.0, self._until(end_s) - self._until(start_s))

    def _until(self, at_s: float) -> float:
        k = bisect_right(self.starts_s, at_s)
        if k == 0:
            return 0.0
        return self.before_s[k - 1] + min(at_s, self.ends_s[k - 1]) - self.starts_s[k - 1]
