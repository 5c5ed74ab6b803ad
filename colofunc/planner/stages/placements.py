"""Placements: how many stages a rank has, and which, decided with the order of actions by the simulated step.

    table, costs = placed(schedule("auto"), ranks=4, microbatches=8, pieces=StageCosts.uniform(8))
    simulate(table, costs).makespan_s

Problem: two stages a rank have half the bubble of one and twice the sends, and what a rank keeps is another for each
placement. Idea: the layers are given in pieces, as fine as the placement with most stages needs them. A placement with
fewer stages joins neighbours, each gets the table that is best for it within the same cap, and the simulator says which
step ends first.
"""

from __future__ import annotations

from colofunc.errors import PlanError
from colofunc.planner.stages.simulate import simulate
from colofunc.program.actions import ActionTable
from colofunc.program.pipeline_schedule import Schedule, StageCosts


def placed(
    schedule: Schedule, ranks: int, microbatches: int, pieces: StageCosts, cap_bytes: float | None = None
) -> tuple[ActionTable, StageCosts]:
    """The table that ends first of all placements of a schedule, and the costs of its stages.

    pieces: costs of neighbouring pieces, a multiple of the stages of each placement, which joins as many neighbours as
    it has to. Of equally fast tables the one with fewer stages is taken. Raises PlanError where no placement has such a
    number of stages, or none fits.
    """
    joined: dict[int, StageCosts] = {}
    for each in schedule.placements:
        stages = each.stages(ranks)
        if pieces.stages % stages == 0:
            joined[stages] = pieces.joined(pieces.stages // stages)
    if not joined:
        counts = sorted({each.stages(ranks) for each in schedule.placements})
        raise PlanError(
            f"schedule {schedule.name!r} has {' or '.join(map(str, counts))} stages on {ranks} ranks and was given "
            f"costs of {pieces.stages} pieces; give a multiple of its stages"
        )
    found: list[tuple[float, int, ActionTable]] = []
    errors: list[PlanError] = []
    for stages, costs in sorted(joined.items()):
        try:
            table = schedule.table(ranks, microbatches, costs, cap_bytes)
        except PlanError as error:  # what one microbatch keeps there is more than the cap
            errors.append(error)
            continue
        found.append((simulate(table, costs).makespan_s, stages, table))
    if not found:
        raise errors[0]
    _, stages, table = min(found, key=lambda each: each[:2])
    return table, joined[stages]
