"""Timetables: the loop over microbatches of one rank's program, run in the order of a schedule.

    by_timetable(loop, Scheduled("pp", 8, schedule, ...), program, mesh)

A schedule that looks at costs gets those of this very loop: it is cut for one microbatch first, and the clock says what
its parts take. A table with weight gradients apart (I and W) runs a loop with such operators in two (`split_backward`),
any other one the loop as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from colofunc.errors import PlanError
from colofunc.mesh import Mesh
from colofunc.planner.stages.simulate import simulate
from colofunc.program.actions import Action, ActionTable
from colofunc.program.cost import RuleOf, seconds_on
from colofunc.program.editor import Editor
from colofunc.program.ir import Loop, Node, Program, Timetable
from colofunc.program.passes.cut import cut
from colofunc.program.passes.split_backward import split_backward
from colofunc.program.pipeline_schedule import Schedule, StageCosts
from colofunc.program.places import SEND
from colofunc.program.stage_costs import one_trip, stage_costs


def in_parts(table: ActionTable) -> ActionTable:
    """A table that has I and W somewhere has them everywhere: a whole backward is one behind the other."""
    if not any(action.kind == "W" for action in table.actions):
        return table
    rows = []
    for row in table.rows:
        actions: list[Action] = []
        for action in row:
            parts = ("I", "W") if action.kind == "B" else (action.kind,)
            actions += [attrs.evolve(action, kind=kind) for kind in parts]
        rows.append(tuple(actions))
    return ActionTable(tuple(rows))


def forward_only(table: ActionTable) -> ActionTable:
    """What is left of a schedule where nothing is differentiated."""
    rows = []
    for row in table.rows:
        rows.append(tuple(action for action in row if action.kind == "F"))
    return ActionTable(tuple(rows))


def _at(indices: Sequence[int], table: ActionTable) -> ActionTable:
    """A table with its rows where the stages are. indices: per stage."""
    rows = {indices[row[0].stage]: row for row in table.rows}
    return ActionTable(tuple(rows[index] for index in sorted(rows)))


@attrs.frozen(eq=False)
class Scheduled:
    """What makes the timetable of a loop. stages: names of inputs -> stage. backward: whether anything is
    differentiated.

    indices: per stage, that of the axis. share: how much a rank may keep in flight, between one microbatch (0) and what
    the fastest table keeps (1). by_hand: whether the user said which parameters a stage has.
    """

    axis: str
    microbatches: int
    schedule: Schedule
    stages: Mapping[str, int]
    backward: bool
    rule_of: RuleOf
    indices: Sequence[int]
    share: float = 1.0
    validate_late: bool = False
    by_hand: bool = False

    def timetable(self, program: Program, index: int, mesh: Mesh) -> Timetable:
        """For the loop that is node `index` of one rank's program."""
        ranks = mesh.axis_size(self.axis)
        if not self.schedule.looks_at_costs:
            return self._of(self.schedule.table(ranks, self.microbatches))
        trip = Timetable(
            self.axis, one_trip(self.indices, forward_only=not self.backward), self.stages, by_hand=self.by_hand
        )
        loop = _cut_loop(cut(_with_timetable(program, index, trip)))
        costs = stage_costs(loop, mesh, seconds_on(mesh, self.rule_of))
        fastest = self.schedule.table(ranks, self.microbatches, costs)
        if self.share == 1.0:
            return self._of(fastest)
        most = max(simulate(fastest, costs).peak_bytes)
        least = max(_least_bytes(costs, fastest, rank) for rank in range(ranks))
        cap_bytes = least + self.share * max(0.0, most - least)
        return self._of(self.schedule.table(ranks, self.microbatches, costs, cap_bytes))

    def ordered(self, table: ActionTable) -> ActionTable:
        """A schedule's table as it runs: of what the step has, on the ranks that have the stages."""
        return _at(self.indices, in_parts(table) if self.backward else forward_only(table))

    def _of(self, table: ActionTable) -> Timetable:
        return Timetable(
            self.axis,
            self.ordered(table),
            self.stages,
            schedule=self.schedule.name,
            validate_late=self.validate_late,
            by_hand=self.by_hand,
        )


def _least_bytes(costs: StageCosts, table: ActionTable, rank: int) -> float:
    """Bytes that one microbatch keeps on a rank: what its forwards keep, and by how much that grows until weights are
    done.
    """
    here = [stage for stage in range(costs.stages) if table.rank_of[stage] == rank]
    grows = max(max(0.0, costs.weight_kept_bytes[stage] - costs.kept_bytes[stage]) for stage in here)
    return sum(costs.kept_bytes[stage] for stage in here) + grows


def by_timetable(loop: Callable[[Program], Program], scheduled: Scheduled, program: Program, mesh: Mesh) -> Program:
    """One rank's program with its loop over microbatches run by a timetable: the largest loop in which stages send to
    one another.
    """
    program = loop(program)
    sizes = {k: _size(node) for k, node in enumerate(program.nodes) if node.loop is not None and _sends(node.loop)}
    if not sizes and scheduled.validate_late:
        raise PlanError(
            'cf.pipeline(validate="next step"): one stage has all the work and none sends to another, so that nothing '
            "is validated later. "
            'Try: validate="step", or stages= that divide the work'
        )
    if not sizes:
        return program
    index = max(sizes, key=lambda k: sizes[k])
    apart = _weights_apart(program, index)
    timetable = scheduled.timetable(apart, index, mesh)
    if any(action.kind == "W" for action in timetable.table.actions):
        program = apart
    return _with_timetable(program, index, timetable)


def _weights_apart(program: Program, index: int) -> Program:
    """A program with gradients of weights in nodes of their own in the loop at a node."""
    loop = program.nodes[index].loop
    assert loop is not None, "a loop"
    edit = Editor(program)
    edit.change_body(index, split_backward(loop.body))
    return edit.done()


def _with_timetable(program: Program, index: int, timetable: Timetable) -> Program:
    node = program.nodes[index]
    assert node.loop is not None, "a loop"
    edit = Editor(program)
    edit.change(index, loop=attrs.evolve(node.loop, timetable=timetable))
    return edit.done()


def _cut_loop(program: Program) -> Loop:
    """The loop that was cut."""
    loops = [node.loop for node in program.nodes if node.loop is not None and node.loop.cut_by is not None]
    return loops[0]


def _sends(loop: Loop) -> bool:
    return any(node.target == SEND for node in loop.body.nodes)


def _size(node: Node) -> int:
    return 0 if node.loop is None else len(node.loop.body.nodes)
