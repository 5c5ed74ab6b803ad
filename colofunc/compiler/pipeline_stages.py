"""The stages of one schedule on the ranks of an axis: which rank has them, and where the forward pass is cut for them.

    there = StagesOn(build, "pp", schedule, order=None)
    cuts, about_s = there.fastest_cut(there.problem(), microbatches=8)       # where the schedule, by estimates, ends first

Problem: where stages begin goes by the devices that have them, by the kernels that a plan counts on and by the axes
that share a stage, and is asked for by each way to write a pipeline. Idea: one record gathers what the planner's search
for cuts (`planner.stages`) needs of a build; what it computes is kept with the program.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from math import inf

import attrs

from colofunc.compiler.transform import Build
from colofunc.mesh import Mesh
from colofunc.planner.stages.assignment import CutProblem, Cuts, StageActivations
from colofunc.planner.stages.bound import StepBound
from colofunc.planner.stages.cut_search import CutSearch
from colofunc.planner.stages.cuts import StageDevice
from colofunc.planner.stages.orders import DeviceOrder
from colofunc.planner.stages.piece_costs import PieceCosts
from colofunc.planner.stages.simulate import Player
from colofunc.planner.stages.stage_cuts import OtherSchedule, Piece, StageCuts, begins_of, pieces_of_problem
from colofunc.planner.stages.timetables import Scheduled
from colofunc.program.actions import ActionTable
from colofunc.program.cost import seconds_on
from colofunc.program.ir import Node, Program, kept_with
from colofunc.program.passes.kernels import with_kernels
from colofunc.program.passes.split_backward import split_backward
from colofunc.program.pipeline_schedule import Schedule
from colofunc.program.placing import StagesOf, placing_of

MOST_COMPARED = 600
"""Other schedules are compared where stages times microbatches are no more: their tables take long to make for many."""


@attrs.frozen(eq=False)
class StagesOn:
    """order: of each rank of the schedule, its index on the axis; None: the same."""

    build: Build
    axis: str
    schedule: Schedule
    order: DeviceOrder | None = None

    @property
    def ranks(self) -> int:
        """How many ranks of the pipeline there are."""
        return self.build.mesh.axis_size(self.axis)

    @property
    def count(self) -> int:
        """How many stages there are."""
        return self.schedule.stages(self.ranks)

    @property
    def sharing(self) -> int:
        """Ranks that share a stage."""
        return self.build.mesh.size // self.ranks

    @property
    def indices(self) -> list[int]:
        """Per stage, the index of the axis that has it."""
        order = range(self.ranks) if self.order is None else self.order
        return [order[self.schedule.rank_of(stage, self.ranks)] for stage in range(self.count)]

    @property
    def devices(self) -> list[StageDevice]:
        """Per stage, all that its rank has."""
        return [device_at(self.build.mesh, self.axis, index) for index in self.indices]

    def problem(self) -> CutProblem:
        """Where the forward pass may be cut."""
        return CutProblem(
            self.build.program, self.count, node_seconds(self.build), self._send_s, self.devices, self.indices
        )

    def pieces(self, problem: CutProblem) -> PieceCosts:
        """What the pieces of a problem take."""
        mesh, program = self.build.mesh, self.build.program
        splits = self.schedule.splits_backward
        with_their_kernels = kept_with(program, (with_kernels, mesh, splits), self._with_kernels)
        launch_s = mesh.topology.device.launch_s
        seconds = node_seconds(self.build.evolve(program=with_their_kernels))
        costs_of = partial(PieceCosts.of, problem, with_their_kernels, seconds, launch_s, self.sharing)
        return kept_with(program, (PieceCosts, tuple(problem.begins), mesh, self.sharing, splits), costs_of)

    def _with_kernels(self) -> Program:
        """The step with gradients of weights as the schedule has them, its calls with the kernels that a plan counts
        on."""
        program = self.build.program
        if self.schedule.splits_backward:
            program = split_backward(program)
        return with_kernels(program, self.build.mesh, self.build.registry.kernels)

    def fastest_cut(self, problem: CutProblem, microbatches: int) -> tuple[Cuts, float]:
        """Where the schedule, played by estimates, ends first, and after how many seconds."""
        search = CutSearch(problem, self.pieces(problem), self.schedule, self.ranks, microbatches, self._send_s)
        key = (CutSearch, self.axis, self.schedule, self.order, microbatches, self.build.mesh)
        return kept_with(self.build.program, key, search.fastest)

    def held(self, microbatches: int) -> StageActivations:
        """What stages keep by the schedule's table."""
        in_flight = (1,) * self.count
        if microbatches > 1:
            in_flight = self.schedule.table(self.ranks, microbatches).in_flight
        return StageActivations(in_flight, 1 / (microbatches * self.sharing))

    def bound(self, on_rows: Collection[int]) -> StepBound:
        """On a step's time. on_rows: positions of the nodes that read rows of the batch."""
        build, kernels = self.build, self.build.registry.kernels
        return StepBound.of(
            build.program,
            on_rows,
            node_seconds(build),
            build.mesh.topology.device.launch_s,
            lambda target: (target, "cuda") in kernels,
            self.indices,
            [device.speed for device in self.devices],
            self.sharing,
            self.schedule.splits_backward,
        )

    def at_least_s(self, bound: StepBound, cuts: Cuts, microbatches: int) -> float:
        """Seconds that a step takes at least, cut so."""
        program = self.build.program
        inputs = {position: found for position in range(len(program.inputs)) if (found := cuts.stages_of(position))}
        stages = StagesOf(self.axis, tuple(self.indices), inputs)
        placing = placing_of(program, stages.apart(self.ranks), self.build.mesh, stages)
        if placing is None:
            return 0.0
        rank_of = [at[1][0] if at is not None and len(at[1]) == 1 else None for at in placing.nodes]
        return bound.at(cuts, microbatches, rank_of)

    def cuts_of(
        self, assigned: Mapping[int, Sequence[int]], scheduled: Scheduled, given: bool, table: ActionTable
    ) -> StageCuts | None:
        """What a plan says of its cuts; None where stages that were given by hand begin within pieces.

        assigned: position of an input -> its stages. table: the actions of each rank that run.
        """
        problem = self.problem()
        begins = begins_of(problem, assigned, self.count)
        if begins is None:
            return None
        pieces = self._pieces_of(problem, scheduled.microbatches)
        rows = tuple(" ".join(map(str, row)) for row in table.rows)
        speeds = tuple(device.speed for device in self.devices)
        cuts = StageCuts(pieces, begins, rows, speeds, scheduled.backward, given)
        return attrs.evolve(cuts, others=tuple(self._others(cuts, scheduled, problem)))

    def _pieces_of(self, problem: CutProblem, microbatches: int) -> tuple[Piece, ...]:
        """What a plan says of the pieces."""
        return pieces_of_problem(problem, self.pieces(problem), microbatches, self.sharing, self._send_s)

    def _others(self, cuts: StageCuts, scheduled: Scheduled, problem: CutProblem) -> list[OtherSchedule]:
        """Schedules that look at no costs and have the same stages on the same ranks, fastest first."""
        found: list[OtherSchedule] = []
        if self.count * scheduled.microbatches > MOST_COMPARED:
            return found
        for other in self.build.registry.schedules.values():
            alike = other.alike(self.schedule) and other.name != self.schedule.name
            if other.looks_at_costs or not alike or not other.takes(self.ranks, scheduled.microbatches):
                continue
            table = attrs.evolve(scheduled, schedule=other).ordered(other.table(self.ranks, scheduled.microbatches))
            counted = cuts
            if other.splits_backward != self.schedule.splits_backward:
                there = attrs.evolve(self, schedule=other)
                counted = attrs.evolve(cuts, pieces=there._pieces_of(problem, scheduled.microbatches))
            found.append(OtherSchedule(other.name, counted.counted_by(table, Player(table), cuts.begins)))
        return sorted(found, key=lambda each: each.count.step_s)

    def _send_s(self, nbytes: float) -> float:
        """Seconds until the next rank of the axis has so many bytes."""
        return self.build.mesh.collective_s("send", nbytes, (self.axis,))


def node_seconds(build: Build) -> Callable[[Node], float]:
    """Seconds of a node of the global program on one device."""
    seconds, values = seconds_on(build.mesh, build.registry.rule), build.program.values
    return lambda node: seconds(node, values)


def device_at(mesh: Mesh, axis: str, index: int) -> StageDevice:
    """What the ranks at an index have: the speed of the slowest, and their memory together.

    They hold a stage's weights together at best (ZeRO, tensor parallelism), so that stages that do not fit in this
    fit nowhere there.
    """
    ranks = mesh.at(**{axis: index})
    if not mesh.topology.ranks:
        return StageDevice(1.0, inf)
    capacities = [mesh.device_bytes(rank) for rank in ranks]
    return StageDevice(mesh.speed(ranks), sum(inf if each is None else each for each in capacities))
