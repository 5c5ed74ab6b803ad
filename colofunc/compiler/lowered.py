"""Lowered: everything known about a step before it runs, and the questions one can ask of it.

low = step.lower(state, batch)
low.plan.table(); low.text(); low.cost().seconds; low.memory().peak_bytes["device"]; low.coverage()
print(low.passes); low.after("lower").text()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import attrs
import torch

from colofunc.compiler.check_finite import Finite, check_finite
from colofunc.compiler.compare import Compared, compare
from colofunc.compiler.passes import Passes, PassOutputs
from colofunc.compiler.terms import spent
from colofunc.dtensor.placed import SHELF, ToDisk
from colofunc.errors import PlanError
from colofunc.executors.backend import Backend, fullest, held
from colofunc.executors.fused import as_executed
from colofunc.executors.rank_program import program_hash
from colofunc.mesh import Mesh
from colofunc.planner.plan import Plan
from colofunc.planner.plan_terms import Term, about, summed
from colofunc.planner.stages.report import clocked, period_s
from colofunc.planner.stages.simulate import Simulated
from colofunc.plugins import Registry
from colofunc.program.cost import CostReport, node_work, program_cost, seconds_on
from colofunc.program.ir import Program
from colofunc.program.lanes import Lanes, lanes
from colofunc.program.lower import Choice
from colofunc.program.memory import MemoryReport
from colofunc.program.passing import passing
from colofunc.program.places import distinct_ranks, on_rank
from colofunc.program.placing import placed_everywhere, placing_of
from colofunc.program.text import text
from colofunc.program.tracing.trace import Traced
from colofunc.spec.layout import At, Layout


@attrs.frozen
class Coverage:
    """How much of a step is split, as shares in 0..1, and the operators that are not understood.

    `flops`, `bytes`: share of the work, and of the bytes of results, in operators that at least one axis splits.
    `efficiency`: flops of one device / (ranks x flops of one rank); 1 is perfect splitting over every axis.
    `fallbacks`: operators without a rule, which run replicated. `undecided`: "operator: factors" of rules that say
    nothing of factors on no result, neither reduced nor whole, so that no axis can split them.
    """

    flops: float
    bytes: float
    efficiency: float
    fallbacks: tuple[str, ...]
    undecided: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return attrs.asdict(self)[name]


@attrs.frozen(eq=False)
class Lowered:
    """A step, planned and lowered for one signature.

    `traced.program` is the global view, `program` what a rank runs.
    """

    traced: Traced
    global_program: Program
    choices: tuple[Choice, ...]
    plan: Plan
    program: Program
    mesh: Mesh
    priced: Mesh  # the same mesh with the figures that the plan was made by
    registry: Registry
    input_layouts: tuple[Layout, ...]
    output_layouts: tuple[Layout, ...]
    donated: tuple[int, ...]  # positions of input leaves that the call consumes
    executor: str | None = None  # as `step.on` said
    hidden: tuple[torch.Tensor, ...] = ()  # captured tensors that are inputs behind the caller's and the seed
    left_out: frozenset[str] = frozenset()  # names of the passes that it does not go through
    stages_of: Callable[[], PassOutputs] = tuple  # runs all passes again, and keeps the program behind each

    @property
    def hidden_ids(self) -> tuple[int, ...]:
        """Values of the local program that are hidden inputs."""
        inputs = tuple(id for id in self.program.inputs if id not in self.program.constants)
        return inputs[len(inputs) - len(self.hidden) :]

    @property
    def hidden_dtypes(self) -> tuple[torch.dtype, ...]:
        """In which hidden inputs lie."""
        return tuple(self.program.values[id].dtype for id in self.hidden_ids)

    @property
    def hidden_layouts(self) -> tuple[Layout, ...]:
        """Where hidden inputs lie."""
        found = tuple(self.program.values[id].layout for id in self.hidden_ids)
        assert all(layout is not None for layout in found), "inputs of a local program have layouts"
        return found  # type: ignore[return-value]

    def hidden_parts(self, backend: Backend, to_disk: ToDisk | None = None) -> list[list[torch.Tensor]]:
        """Per hidden input, the parts of the ranks in this process. to_disk: for those that are to lie there; None: to
        look only.
        """
        parts = []
        for tensor, layout, id in zip(self.hidden, self.hidden_layouts, self.hidden_ids, strict=True):
            value = self.program.values[id]
            parts.append(SHELF.parts(tensor, layout, self.mesh, backend, value.name, to_disk, value.dtype))
        return parts

    def text(self) -> str:
        """The local program, one line per node."""
        return text(self.program)

    @cached_property
    def passes(self) -> Passes:
        """What this step went through, from the trace to what runs.

        Everything is run again for it, but the search for a plan.

        Raises PlanError where that ends in another program than this one (a bug).
        """
        passes = Passes(self.stages_of())
        ran = attrs.evolve(passes.stages[-1].program, kernels=self.program.kernels)
        if program_hash(ran, self.mesh) != program_hash(self.program, self.mesh):
            raise PlanError(
                "the passes of this step, run again, give another program than the one that runs; please report its "
                "plan"
            )
        return passes

    def after(self, name: str) -> Lowered:
        """This step as it was behind one pass: its `text()`, and its `program`.

        Raises PlanError where there is no such pass.
        """
        return attrs.evolve(self, program=self.passes[name].program)

    def cost(self, rank: int | None = None) -> CostReport:
        """Seconds, flops, bytes and calls per collective and axis, of a rank.

        By default of the busiest where they differ.
        """
        some = distinct_ranks(self.program, self.mesh) if rank is None else (rank,)
        parts = [self._clocked(on_rank(self.program, self.mesh, one).program) for one in some]
        return max(
            (program_cost(part, self.priced, self.registry.rule) for part in parts), key=lambda cost: cost.seconds
        )

    def memory(self, rank: int | None = None) -> MemoryReport:
        """Live bytes per tier at every position of what a rank runs, by default the one that holds most.

        On real ranks collectives are started early and waited for late: what is in flight counts, and positions are
        those of that order.
        """
        report, pool = held(self.program, self.mesh, self.executor, rank), passing(self.program)
        return attrs.evolve(report, pool=pool) if pool.classes else report

    def lanes(self, rank: int | None = None) -> Lanes:
        """When each operator of a rank runs, on the device, the links and the host; positions are those of `memory()`.

        By default of the rank whose memory that is. Where ranks do different things they are played together, as the
        plan has them.
        """
        chosen = fullest(self.program, self.mesh, self.executor) if rank is None else rank
        return lanes(self._clocked(self.program), self.priced, self.registry.rule, chosen)

    def terms(self, glob: str = "*") -> tuple[Term, ...]:
        """What the seconds of matching modules or operators are made of: compute, memory, launches, each collective by
        its axes, copies.

        Those first that hold the step up longest; of the rank whose `lanes()` these are.
        """
        rank = fullest(self.program, self.mesh, self.executor)
        program = on_rank(self._clocked(self.program), self.mesh, rank).program
        rows = spent(program, self.lanes(), self.priced, self.registry.rule, self.plan)
        return summed(row for row in rows if glob == "*" or about(row, glob))

    def why(self, glob: str, most: int = 4) -> str:
        """`plan.why(glob, most)`."""
        return self.plan.why(glob, most)

    def pipeline(self) -> Simulated:
        """The schedule of a pipelined step as the clock plays it: `print(low.pipeline().text())` draws a lane per rank.

        Raises PlanError where the step has no pipeline.
        """
        played = clocked(self._clocked(self.program), self.priced, seconds_on(self.priced, self.registry.rule))
        if played is None:
            raise PlanError(
                "this step has no pipeline; write cf.pipeline(step, microbatches=8) with an axis of the mesh that has "
                "ranks"
            )
        return played

    def period_s(self) -> float:
        """Seconds of one step in a row of steps, by the clock.

        It is less than that of a step alone where ranks end one after another.

        With `cf.pipeline(validate="next step")` a rank begins the next step while others end this one.
        `low.plan.cost_s` is of one alone.
        """
        seconds = seconds_on(self.priced, self.registry.rule)
        return period_s(self._clocked(self.program), self.priced, seconds)

    def _clocked(self, program: Program) -> Program:
        return as_executed(program, self.executor, self.priced, self.registry.rule)

    def compare(self, *args: Any, tolerance: float | None = None) -> Compared:
        """The first value that the mesh computes differently from one device. Runs both, consumes nothing."""
        return compare(self, args, tolerance=tolerance)

    def check_finite(self, *args: Any) -> Finite:
        """The first value of the step that is NaN or infinite without an operand that was. Consumes nothing."""
        return check_finite(self, args)

    def _places(self) -> tuple[At | None, ...]:
        """Who runs each node of the global program."""
        given = {position: layout.at for position, layout in enumerate(self.input_layouts) if layout.at is not None}
        return (placing_of(self.global_program, given, self.mesh) or placed_everywhere(self.global_program)).nodes

    def _apart(self, at: At | None) -> float:
        """By how much less a rank does in the mean if only some run an operator."""
        return 1.0 if at is None else self.mesh.axis_size(at[0]) / len(at[1])

    def coverage(self) -> Coverage:
        """The share of the step that is really split, and what is not understood."""
        flops = split_flops = nbytes = split_bytes = local_flops = 0.0
        fallbacks: set[str] = set()
        undecided: set[str] = set()
        values = self.global_program.values
        for node, choice, at in zip(self.global_program.nodes, self.choices, self._places(), strict=True):
            work, _, _ = node_work(node, values, self.registry.rule)
            strategy = choice.strategy
            if choice.rule is None and not strategy.local and node.refs:
                fallbacks.add(node.target)
            if choice.rule is not None and choice.rule.undecided():
                undecided.add(f"{node.target}: {' '.join(choice.rule.undecided())}")
            ways = _ways(strategy.outs, strategy.ins, self.mesh, strategy.axes) * self._apart(at)
            flops += work
            local_flops += work / ways
            split_flops += work if ways > 1 else 0.0
            for out, layout in zip(node.outs, strategy.outs, strict=True):
                if out is None or layout is None or not layout.shape:
                    continue
                nbytes += values[out].nbytes
                split_bytes += values[out].nbytes if layout.axes else 0
        return Coverage(
            split_flops / flops if flops else 1.0,
            split_bytes / nbytes if nbytes else 1.0,
            flops / (local_flops * self.mesh.size) if local_flops else 1.0,
            tuple(sorted(fallbacks)),
            tuple(sorted(undecided)),
        )


def _ways(outs: Sequence[Layout | None], ins: Sequence[Layout], mesh: Mesh, axes: Sequence[tuple[str, str]]) -> int:
    """By how many an operator's work is split.

    These are the axes its strategy places, or those its operands and results lie on.
    """
    names = {a for a, _ in axes}
    for layout in (*outs, *ins):
        if layout is not None:
            names |= set(layout.axes)
    return prod(mesh.axis_size(name) for name in names)
