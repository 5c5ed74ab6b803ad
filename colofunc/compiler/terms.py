"""Which terms of the clock the seconds of a step are made of: work, launches, each collective by its axes, copies; and what hides them.

Problem: "12 ms of communication" does not say whether a faster link, a larger bucket or nothing at all would make a step faster: it
depends on which collective it is and on whether the device computes meanwhile. Idea: the lanes say when everything runs
(`program/lanes.py`). What runs beside the device's work is hidden as far as the device works, and the rest is exposed.

    for term in low.terms("*.mlp"):
        print(term)              # all_gather tp            3.1 ms, 1.2 ms of it hidden  (48 calls)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import attrs

from colofunc.planner.plan import matches
from colofunc.planner.plan_table import time_text
from colofunc.program.cost import collective_of
from colofunc.program.ir import Program, Value
from colofunc.program.lanes import Busy, Lanes

WORK, LAUNCHES, ON_HOST = "work", "launches", "on the host"
COPIES = {"to device": "copies to device", "to host": "copies to host", "disk": "copies to or from disk"}


@attrs.frozen
class Term:
    """Seconds of a step of one sort; `hidden_s`: of them, while the device works. `calls`: operators, every trip of a loop counted."""

    what: str
    seconds: float
    hidden_s: float
    calls: int

    @property
    def exposed_s(self) -> float:
        return self.seconds - self.hidden_s

    def __str__(self) -> str:
        hidden = f", {time_text(self.hidden_s)} of it hidden" if self.hidden_s else ""
        return f"{self.what:<24} {time_text(self.seconds)}{hidden}  ({self.calls} calls)"


def terms(program: Program, played: Lanes, launch_s: float, glob: str = "*") -> tuple[Term, ...]:
    """The terms of the operators that match, those first that hold the step up longest.

    program: what was played; launch_s: of the device, what every kernel takes beside its work. glob: of modules, or of operators. A
    collective is of the module that reads what it sends, the first of them where several tensors are sent together.
    """
    working = _Working.of(played.busy)
    found: dict[str, Term] = {}
    for busy in played.busy:
        if not _matches(busy, glob):
            continue
        seconds = busy.end_s - busy.start_s
        if busy.lane == "compute":
            launching_s = min(seconds, launch_s)
            _add(found, Term(WORK, seconds - launching_s, 0.0, 1))
            _add(found, Term(LAUNCHES, launching_s, 0.0, 1))
        else:
            _add(found, Term(_words(busy, _values(program, busy)), seconds, working.between(busy.start_s, busy.end_s), 1))
    return tuple(sorted((term for term in found.values() if term.seconds), key=lambda term: -term.exposed_s))


def terms_text(found: Sequence[Term], step_s: float) -> str:
    """The terms in lines, under which one decides; "" for none."""
    if not found:
        return ""
    first = found[0]
    share = first.exposed_s / step_s if step_s else 0.0
    exposed = f"{time_text(first.exposed_s)} that nothing hides, {share:.0%} of the step"
    head = f"in a step of {time_text(step_s)}, {first.what} decides: {exposed}"
    return "\n".join([head, *(f"  {term}" for term in found)])


def _matches(busy: Busy, glob: str) -> bool:
    """By the module that an operator is of, or one around it, or by the operator."""
    parts = busy.node.path.split(".")
    names = [busy.node.target, *(".".join(parts[:k]) for k in range(1, len(parts) + 1))]
    return any(matches(name, glob) for name in names)


def _values(program: Program, busy: Busy) -> Mapping[int, Value]:
    """Of the program that a node stands in: the whole, or the body of a loop."""
    node = program.nodes[busy.index]
    return program.values if node.loop is None else node.loop.body.values


def _words(busy: Busy, values: Mapping[int, Value]) -> str:
    if busy.lane != "collectives":
        return COPIES.get(busy.lane, ON_HOST)
    collective = collective_of(busy.node, values)
    return busy.label if collective is None else f"{collective[0]} {','.join(collective[1])}"


def _add(found: dict[str, Term], term: Term) -> None:
    so_far = found.get(term.what, Term(term.what, 0.0, 0.0, 0))
    total_s, hidden_s = so_far.seconds + term.seconds, so_far.hidden_s + term.hidden_s
    found[term.what] = Term(term.what, total_s, hidden_s, so_far.calls + term.calls)


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
