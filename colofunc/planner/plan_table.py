"""A plan as a table of text: calls that are decided alike in one line, the dearest only.

phase     operator            ×  rule                  strategy         compute    comm  collectives    why
forward   h.*.mlp.fc linear  48  b0 b1 i, o i -> ...   {dp: b0, tp: o}  52.8 ms     0 s                 next best ...
and 61 more lines, 8% of the operators' time: plan.table(costly=None)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from colofunc.mesh.sizes import size_text as size_text
from colofunc.planner.sharding.classes import starred
from colofunc.planner.stages.report import Pipelined
from colofunc.program.text import columns, target_text

if TYPE_CHECKING:
    from colofunc.planner.plan import Decision, Plan

HEAD = ("phase", "operator", "×", "rule", "strategy", "compute", "comm", "collectives", "why")
NUMBERS = (2, 5, 6)  # columns whose text stands on the right
WIDEST = 40  # letters of a rule or a reason; `why` has them whole


def plan_table(plan: Plan, decisions: Sequence[Decision], costly: int | None) -> str:
    """The plan in a sentence, then one line per kind of call, in the order of the program.

    Seconds are those of all its calls together, before any of them hides another; the sentence has the time of the
    step.
    """
    lines = _alike(decisions)
    shown = lines
    if costly is not None:
        dearest = sorted(range(len(lines)), key=lambda k: -lines[k].cost_s)[:costly]
        shown = [lines[k] for k in sorted(dearest)]
    text = [str(plan), columns([HEAD, *map(_row, shown)], NUMBERS)]
    if len(shown) < len(lines):
        total_s = sum(line.cost_s for line in lines)
        left_s = total_s - sum(line.cost_s for line in shown)
        share = left_s / total_s if total_s else 0.0
        text.append(
            f"and {len(lines) - len(shown)} more lines, {share:.0%} of the operators' time: plan.table(costly=None)"
        )
    if plan.pipeline is not None:
        text.append(pipeline_table(plan.pipeline))
    if plan.way:
        text += [f"chosen: {plan.way}", *(f"  not {other.line(plan)}" for other in plan.others)]
    return "\n".join([*text, *plan.memory, *plan.notes, *plan.card])


def pipeline_table(pipeline: Pipelined) -> str:
    """A line per index of the axis. It waits while its loop over microbatches lasts and it does not compute."""
    lines = [(pipeline.axis, "stages", "weights and states", "peak", "computes", "waits")]
    for index, use in enumerate(pipeline.ranks):
        stages = " ".join(map(str, use.stages))
        nbytes = size_text(use.kept_bytes), size_text(use.peak_bytes)
        lines.append((str(index), stages, *nbytes, time_text(use.compute_s), time_text(use.wait_s)))
    table = columns(lines, (0,))
    return f"{table}\n{pipeline.uneven}" if pipeline.uneven else table


@attrs.frozen
class _Line:
    """Calls of one operator at the same place of identical layers that were decided alike."""

    first: Decision
    path: str
    count: int
    compute_s: float  # of all calls, like what follows
    communication_s: float

    @property
    def cost_s(self) -> float:
        return self.compute_s + self.communication_s

    def plus(self, other: Decision) -> _Line:
        return _Line(
            self.first,
            self.path if other.path == self.path else starred(self.path),
            self.count + other.count,
            self.compute_s + other.count * other.compute_s,
            self.communication_s + other.count * other.communication_s,
        )


def _alike(decisions: Sequence[Decision]) -> list[_Line]:
    lines: dict[tuple[object, ...], _Line] = {}
    for decision in decisions:
        key = (
            decision.phase, starred(decision.path), decision.target, decision.rule, decision.strategy, decision.collectives,
        )  # fmt: skip
        empty = _Line(decision, decision.path, 0, 0.0, 0.0)
        lines[key] = lines.get(key, empty).plus(decision)
    return list(lines.values())


def _row(line: _Line) -> tuple[str, ...]:
    decision = line.first
    return (
        decision.phase,
        f"{line.path} {target_text(decision.target)}".strip(),
        str(line.count),
        _short(decision.rule),
        decision.strategy,
        time_text(line.compute_s),
        time_text(line.communication_s),
        "; ".join(decision.collectives),
        _short(decision.why),
    )


def _short(text: str) -> str:
    return text if len(text) <= WIDEST else text[: WIDEST - 1].rstrip() + "…"


def time_text(seconds: float) -> str:
    """`1.07 s`, `1.2 ms`, `3 µs`, `0 s`."""
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s"
