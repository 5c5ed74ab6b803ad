"""Within a budget: plan, lower, count; where it is too much, make again what backward reads, or plan for less.

The planner's estimate of the peak is quick and a little off, the accountant's is right to the byte and comes last. So a
plan is made, completed and counted, and made again with less in mind until what was counted fits.

    decide -> lower, passes -> (recompute) -> coalesce, chunks, buckets, in place -> count
       ^-------------------------- too much: aim for less ---------------------------|
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.constraints import Constraints
from colofunc.planner.recompute import Finish, Fitted
from colofunc.planner.stages import NodeS
from colofunc.program.buckets import buckets
from colofunc.program.check import check_program
from colofunc.program.chunks import chunked
from colofunc.program.coalesce import reduces_early, views_late
from colofunc.program.cost import RuleOf, node_s
from colofunc.program.inplace import in_place
from colofunc.program.ir import Program
from colofunc.program.lower import lower
from colofunc.program.memory import MemoryReport
from colofunc.program.trace import record_local
from colofunc.transforms.decide import Candidates, Decided, decide

# (program of one rank, seconds of a node, how to complete and count it, budget) -> (what fits or None, the leanest tried)
Refit = Callable[[Program, NodeS, Finish, int | None], tuple[Fitted | None, Fitted]]


@attrs.frozen(eq=False)
class Ending:
    """What happens to a program of one rank once its plan is made.

    `passes`: of plugins and transforms. `chunks`: input position -> elements of the chunks that it lies in. `temporaries`:
    whether they are written over. `count`: the accountant of the executor that will run it. `refit`: of `checkpoint`.
    """

    program: Program
    mesh: Mesh
    rule_of: RuleOf
    passes: Sequence[Callable[[Program, Mesh], Program]]
    chunks: Mapping[int, int | str]
    temporaries: bool
    count: Callable[[Program], MemoryReport]
    refit: Refit | None = None

    def finish(self, decided: Decided, budget_bytes: int | None) -> Fitted:
        """The program that runs, as decided. Its peak is counted only where somebody asks."""
        local = self._lowered(decided)
        if self.refit is None:
            done = self._completed(local)
            return Fitted(done, 0 if budget_bytes is None else self._peak(done), 0.0)
        cost = partial(node_s, mesh=self.mesh, rule_of=self.rule_of)
        fitted, leanest = self.refit(local, cost, self._counted, budget_bytes)
        return fitted or leanest

    def _lowered(self, decided: Decided) -> Program:
        layouts = decided.input_layouts, decided.output_layouts
        local = lower(self.program, decided.choices, *layouts, self.mesh, record_local, decided.regather)
        check_program(local, self.mesh)
        for rewrite in self.passes:
            local = rewrite(local, self.mesh)
            check_program(local, self.mesh)
        return local

    def _completed(self, local: Program) -> Program:
        chunks = {local.inputs[k]: size for k, size in self.chunks.items()}
        local, apart = chunked(views_late(reduces_early(local)), chunks)
        return in_place(buckets(local, self.mesh, apart), self.temporaries)

    def _counted(self, local: Program) -> tuple[Program, int]:
        check_program(local, self.mesh)
        done = self._completed(local)
        return done, self._peak(done)

    def _peak(self, done: Program) -> int:
        return self.count(done).peak_bytes["device"]


def within(
    ending: Ending,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, str],
    budget_bytes: int | None,
    axes: tuple[str, ...],
    parts: int = 1,
    tries: int = 4,
) -> tuple[Decided, Program]:
    """Plan and complete so that the accountant agrees that the peak is within the budget.

    The planner knows nothing of microbatches: a step in `parts` may hold so many times less than it says. Where a step may
    make values again, the fastest plan is tried first so, and beside those for less memory: the cheapest that fits is taken.
    """
    make = partial(decide, ending.program, ending.mesh, candidates, constraints, named, axes=axes)
    aim = None if budget_bytes is None else budget_bytes * parts
    least: Fitted | None = None
    fits: list[tuple[float, Decided, Fitted]] = []
    aims = [None] if ending.refit is not None and budget_bytes is not None else []
    for k in range(tries + parts.bit_length() - 1 + len(aims)):
        try:
            decided = make(budget_bytes=aims[k] if k < len(aims) else aim)
        except PlanError:
            if least is None:
                raise
            break  # the planner sees nothing for less
        done = ending.finish(decided, budget_bytes)
        if budget_bytes is None or aim is None:
            return decided, done.program
        least = done if least is None else min(least, done, key=lambda fit: fit.peak_bytes)
        if done.peak_bytes <= budget_bytes:
            fits.append((decided.plan.cost_s + done.again_s, decided, done))
        if fits and (done.again_s == 0 or k >= len(aims)):
            break
        if k >= len(aims):
            aim = int(min(aim, decided.plan.peak_bytes) * budget_bytes / done.peak_bytes * 0.99)
    if fits:
        _, decided, done = min(fits, key=lambda fit: fit[0])
        return decided, done.program
    less = "a smaller batch" if ending.refit is not None else "a smaller batch, cf.checkpoint"
    assert least is not None, "a plan was made, or the planner has said why not"
    raise PlanError(
        f"no plan found within {_gib(budget_bytes or 0)} a rank: the least found has a peak of {_gib(least.peak_bytes)}; "
        f"use more ranks, {less}, or a topology with more memory. It holds {ending.count(least.program).summary()}"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 27 else f"{nbytes:,} B"
