"""What a plan says of a pipeline: the schedule, its bubble, and what each stage holds, computes and waits for.

    pipelined(program, mesh, seconds, peak_bytes).words      "pipeline of 4 stages, 1f1b, 8 microbatches, bubble 27.3%"

All seconds are those of the clock (`program.lanes`), all bytes those of the accountant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import attrs

from colofunc.mesh import Mesh
from colofunc.planner.stages.simulate import Simulated, Span
from colofunc.planner.stages.stage_cuts import StageCuts
from colofunc.program.actions import ActionTable
from colofunc.program.ir import Loop, Program
from colofunc.program.lanes import Seconds, played, rows_by_timetable
from colofunc.program.places import distinct_ranks, on_rank
from colofunc.program.post_validation import copied_bytes, deferred_parts, validates_late
from colofunc.program.stage_costs import stage_costs
from colofunc.spec.layout import At
from colofunc.spec.parts import holds

CutsOf = Callable[[ActionTable], StageCuts | None]
"""What there is to say of the cuts, by the table that runs."""
STEPS = (3, 7)
"""The seconds of a step in a row: from the end of the first of these steps to that of the second, over the steps
between."""
KEPT = frozenset({"param", "frozen", "buffer", "state"})
"""Roles of what a rank holds between steps."""
UNEVEN = 1.5
"""A rank that computes more than this times its even share is named."""


@attrs.frozen
class StageUse:
    """What the ranks at one index of the pipeline's axis do. `kept_bytes`: weights and states. `compute_s`, `wait_s`:
    of one step.

    `speed`: of the slowest of them, in parts of the topology's device.
    """

    stages: tuple[int, ...]
    kept_bytes: int
    peak_bytes: int
    compute_s: float
    wait_s: float
    speed: float = 1.0


@attrs.frozen
class Pipelined:
    """A pipeline as planned. `bubble`: the part of its span in which the rank with the longest one waits (2401.10241,
    section 5.3).

    `cuts`: where its stages begin, and where else they could; None where stages that were given by hand begin within
    layers.
    """

    axis: str
    schedule: str
    microbatches: int
    bubble: float
    ranks: tuple[StageUse, ...]
    cuts: StageCuts | None = None

    @property
    def words(self) -> str:
        """What the plan's sentence says of the axis."""
        stages = sum(len(use.stages) for use in self.ranks)
        words = (
            f"pipeline of {stages} stages, {self.schedule}, {self.microbatches} microbatches, bubble {self.bubble:.1%}"
        )
        speeds = [use.speed for use in self.ranks]
        if any(speed != 1.0 for speed in speeds):
            words += f", on ranks of speeds {', '.join(f'{speed:g}' for speed in speeds)}"
        return words

    @property
    def uneven(self) -> str:
        """The rank that the others wait for, where its share of the work is far from even; "" where it is not."""
        work_s = [use.compute_s for use in self.ranks]
        share = max(work_s) / sum(work_s) if sum(work_s) else 0.0
        if share <= UNEVEN / len(work_s):
            return ""
        slowest, even = work_s.index(max(work_s)), 1 / len(work_s)
        return (
            f"{self.axis}={slowest} does {share:.0%} of the pipeline's work, where {even:.0%} would be even, and the "
            "others wait for it. "
            "Try: other stages=, fewer stages, or its layers divided along another axis (tensor)"
        )


def one_stage_works(axis: str, microbatches: int) -> str:
    """Of a step for which a pipeline was asked, and in which no stage sends to another."""
    return (
        f"cf.pipeline(axis={axis!r}): one stage has all the work and none sends to another, as where a tied weight is "
        "on every stage: "
        f"{microbatches} microbatches follow one another there, and nothing runs at the same time. "
        f"Try: stages= that divide the work, more layers, or the ranks of {axis!r} for another plan"
    )


def pipeline_loop(program: Program) -> Loop | None:
    """The loop of one rank's program, or of the union of all, that a schedule runs."""
    loops = (node.loop for node in program.nodes if node.loop is not None)
    return next((loop for loop in loops if loop.cut_by is not None), None)


def clocked(program: Program, mesh: Mesh, seconds: Seconds) -> Simulated | None:
    """The schedule of a step as the clock plays it, from the begin of its loop; None where there is no pipeline."""
    loop = pipeline_loop(program)
    if loop is None or loop.cut_by is None:
        return None
    rows = []
    for rank, row in enumerate(rows_by_timetable(loop, loop.cut_by, mesh, seconds)):
        rows.append(tuple(Span(rank, did.action, did.start_s, did.end_s) for did in row))
    return Simulated(stage_costs(loop, mesh, seconds), tuple(rows))


def period_s(program: Program, mesh: Mesh, seconds: Seconds) -> float:
    """Seconds of one step in a row of steps: a rank goes on to the next one as soon as it has ended, and waits for what
    it needs there.
    """
    nodes, copies_s = program.nodes, 0.0
    if validates_late(program):
        parts = deferred_parts(program, mesh)
        # What the exchange says comes while the next step's schedule runs.
        nodes = (*parts.main.nodes, *parts.update.nodes)
        copied = max(copied_bytes(on_rank(program, mesh, rank).program) for rank in distinct_ranks(program, mesh))
        copies_s = 2 * copied / mesh.topology.device.memory_bytes_per_s  # read and written
    few, many = STEPS
    short, long = (played(attrs.evolve(program, nodes=nodes * count), mesh, seconds).end_s for count in STEPS)
    return (long - short) / (many - few) + copies_s


def pipelined(
    program: Program, mesh: Mesh, seconds: Seconds, peak_bytes: Callable[[int], int], cuts_of: CutsOf | None = None
) -> Pipelined | None:
    """What a plan says of a step's pipeline; None where it has none. peak_bytes: of a rank, on its device."""
    loop, played = pipeline_loop(program), clocked(program, mesh, seconds)
    if loop is None or loop.cut_by is None or played is None:
        return None
    timetable = loop.cut_by
    kept = [0] * timetable.table.ranks
    peaks = [0] * timetable.table.ranks
    kept_at = _kept_bytes_at(program)
    for rank in distinct_ranks(program, mesh):
        index = mesh.index(rank, (timetable.along,))
        kept[index] = max(kept[index], sum(nbytes for at, nbytes in kept_at.items() if holds(at, mesh, rank)))
        peaks[index] = max(peaks[index], peak_bytes(rank))
    uses = []
    for index, row in enumerate(timetable.table.rows):
        stages = tuple(sorted({action.stage for action in row}))
        work_s = played.work_s[index]
        speed = mesh.speed(mesh.at(**{timetable.along: index}))
        uses.append(StageUse(stages, kept[index], peaks[index], work_s, played.makespan_s - work_s, speed))
    schedule = f"{timetable.schedule} validated in the next step" if timetable.validate_late else timetable.schedule
    cuts = None if cuts_of is None else cuts_of(timetable.table)
    return Pipelined(timetable.along, schedule, loop.trips, played.bubble, tuple(uses), cuts)


def _kept_bytes_at(program: Program) -> Counter[At | None]:
    """Place -> bytes of the weights and states there, on each rank of the place."""
    nbytes: Counter[At | None] = Counter()
    for id in program.inputs:
        value = program.values[id]
        if value.role in KEPT:
            nbytes[None if value.layout is None else value.layout.at] += value.nbytes
    return nbytes
