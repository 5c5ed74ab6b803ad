"""Within a budget: plan, lower, count; where it is too much, make again what backward reads, or plan for less.

The planner's estimate of the peak is quick and a little off, the accountant's is right to the byte and comes last. So a
plan is made, completed and counted, and made again with less in mind until what was counted fits.

    decide -> lower, passes -> (recompute) -> coalesce, chunks, buckets, in place -> count
       ^-------------------------- too much: aim for less ---------------------------|
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf

import attrs

from colofunc.errors import CapacityError, PlanError
from colofunc.mesh import Mesh
from colofunc.planner.constraints import Constraints
from colofunc.planner.offload import Offloaded
from colofunc.planner.recompute import Finish, Fitted
from colofunc.planner.stages import NodeS
from colofunc.program.buckets import buckets
from colofunc.program.check import check_program
from colofunc.program.chunks import chunked
from colofunc.program.coalesce import reduces_early, views_late
from colofunc.program.cost import RuleOf, node_s
from colofunc.program.inplace import in_place
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lower import lower
from colofunc.program.memory import MemoryReport
from colofunc.program.trace import record_local
from colofunc.transforms.decide import Candidates, Decided, decide

SHARE = 32
"""Where a budget is to be kept to, a bucket of small collectives is at most its 32nd part."""
# (finished program of one rank, mesh, seconds of a node, budget) -> the program with copies between tiers in it
Move = Callable[[Program, Mesh, NodeS, int | None], Offloaded]
# (program of one rank, seconds of a node, how to complete and count it, budget) -> (what fits or None, the leanest tried)
Refit = Callable[[Program, NodeS, Finish, int | None], tuple[Fitted | None, Fitted]]


@attrs.frozen(eq=False)
class Ending:
    """What happens to a program of one rank once its plan is made.

    `passes`: of plugins and transforms. `chunks`: input position -> elements of the chunks that it lies in. `temporaries`:
    whether they are written over. `count`: the accountant of the executor that will run it. `refit`: of `checkpoint`.
    `move`: of `offload`, for the program in the `order` in which that executor runs it, with so many bytes gathered ahead.
    """

    program: Program
    mesh: Mesh
    rule_of: RuleOf
    passes: Sequence[Callable[[Program, Mesh], Program]]
    chunks: Mapping[int, int | str]
    temporaries: bool
    count: Callable[[Program], MemoryReport]
    refit: Refit | None = None
    move: Move | None = None
    order: Callable[[Program, float], Program] = lambda program, _: program

    def finish(self, decided: Decided, budget_bytes: int | None) -> Fitted:
        """The program that runs, as decided. Its peak is counted only where somebody asks."""
        local = self._lowered(decided)
        counted = partial(self._counted, budget_bytes=budget_bytes)
        if self.refit is None:
            return counted(local)
        fitted, leanest = self.refit(local, self._node_s, counted, budget_bytes)
        return fitted or leanest

    @property
    def gives_way(self) -> bool:
        """Whether a program that is too large may be made to fit."""
        return self.refit is not None or self.move is not None

    def _node_s(self, node: Node, values: Mapping[int, Value]) -> float:
        return node_s(node, values, self.mesh, self.rule_of)

    def _lowered(self, decided: Decided) -> Program:
        layouts = decided.input_layouts, decided.output_layouts
        local = lower(self.program, decided.choices, *layouts, self.mesh, record_local, decided.regather)
        check_program(local, self.mesh)
        for rewrite in self.passes:
            local = rewrite(local, self.mesh)
            check_program(local, self.mesh)
        return local

    def _completed(self, local: Program, bucket_bytes: float) -> Program:
        chunks = {local.inputs[k]: size for k, size in self.chunks.items()}
        local, apart = chunked(views_late(reduces_early(local)), chunks)
        return in_place(buckets(local, self.mesh, apart, bucket_bytes), self.temporaries)

    def _counted(self, local: Program, budget_bytes: int | None) -> Fitted:
        check_program(local, self.mesh)
        piece = inf if budget_bytes is None or not self.gives_way else budget_bytes / SHARE
        done = self._completed(local, piece)
        if self.move is None:
            return Fitted(done, 0 if budget_bytes is None and self.refit is None else self._peak(done), 0.0)
        moved = self.move(self.order(done, piece), self.mesh, self._node_s, budget_bytes)
        check_program(moved.program, self.mesh)
        return Fitted(moved.program, self._peak(moved.program), moved.exposed_s, moved.words, moved.short)

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
    aims = [None] if ending.gives_way and budget_bytes is not None else []
    alone = ending.gives_way and ending.mesh.size == 1  # then there is one plan, whatever it may hold
    for k in range(1 if alone else tries + parts.bit_length() - 1 + len(aims)):
        try:
            decided = make(budget_bytes=aims[k] if k < len(aims) else aim)
        except PlanError:
            if least is None:
                raise
            break  # the planner sees nothing for less
        done = ending.finish(decided, budget_bytes)
        if budget_bytes is None or aim is None:
            if done.short:
                raise CapacityError(done.short)
            return _told(decided, done)
        least = done if least is None else min(least, done, key=lambda fit: fit.peak_bytes)
        if done.fits(budget_bytes):
            fits.append((decided.plan.cost_s + done.more_s, decided, done))
        if fits and (done.more_s == 0 or k >= len(aims)):
            break
        if k >= len(aims):
            aim = int(min(aim, decided.plan.peak_bytes) * budget_bytes / done.peak_bytes * 0.99)
    if fits:
        _, decided, done = min(fits, key=lambda fit: fit[0])
        return _told(decided, done)
    others = [name for name, there in (("cf.checkpoint", ending.refit), ("cf.offload", ending.move)) if there is None]
    less = ", ".join(["a smaller batch", *others])
    assert least is not None, "a plan was made, or the planner has said why not"
    if least.short and least.peak_bytes <= (budget_bytes or 0):
        raise CapacityError(least.short)
    raise PlanError(
        f"no plan found within {_gib(budget_bytes or 0)} a rank: the least found has a peak of {_gib(least.peak_bytes)}; "
        f"use more ranks, {less}, or a topology with more memory. It holds {ending.count(least.program).summary()}"
    )


def _told(decided: Decided, done: Fitted) -> tuple[Decided, Program]:
    """The plan says what was done to keep to the budget, and what then is held and how long it takes."""
    plan = decided.plan
    if done.words:
        plan = attrs.evolve(plan, memory=done.words, peak_bytes=done.peak_bytes, cost_s=plan.cost_s + done.more_s)
    return attrs.evolve(decided, plan=plan), done.program


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 1 << 27 else f"{nbytes:,} B"
