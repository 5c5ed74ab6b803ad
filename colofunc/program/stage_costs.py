"""Costs of a pipeline's stages, by the one clock: seconds of each part of a loop, of what is sent, and the bytes that
are kept.

    costs = stage_costs(loop, mesh, seconds)          # the body was cut in F, I and W (`passes.cut`)
    schedule.table(ranks=4, microbatches=8, costs=costs)
"""

from __future__ import annotations

from collections.abc import Iterable

from colofunc.mesh import Mesh
from colofunc.program.actions import Action, ActionTable
from colofunc.program.aliases import aliases
from colofunc.program.ir import Loop, Part
from colofunc.program.lanes import PartTime, Seconds, part_times
from colofunc.program.pipeline_schedule import StageCosts

NOTHING = PartTime(0.0, (), ())


def one_trip(rank_of: Iterable[int], forward_only: bool) -> ActionTable:
    """F, I and W of every stage for one microbatch: a table to cut a body by whose costs are asked for. rank_of: per
    stage.
    """
    stages_of: dict[int, list[int]] = {}
    for stage, rank in enumerate(rank_of):
        stages_of.setdefault(rank, []).append(stage)
    rows = []
    for rank in range(len(stages_of)):
        row = [Action(stage, "F", 0) for stage in stages_of[rank]]
        if not forward_only:
            row += [Action(stage, "I", 0) for stage in reversed(stages_of[rank])]
            row += [Action(stage, "W", 0) for stage in reversed(stages_of[rank])]
        rows.append(tuple(row))
    return ActionTable(tuple(rows))


def stage_costs(loop: Loop, mesh: Mesh, seconds: Seconds) -> StageCosts:
    """What each stage takes for one microbatch. A stage without a part (no backward) takes nothing for it.

    A backward that was not cut in two counts as I, and its W as nothing. Results that may be views are counted with
    what they look at.
    """
    timetable = loop.cut_by
    assert timetable is not None, "costs are those of a loop that was cut"
    times = part_times(loop, timetable, mesh, seconds)
    stages = timetable.table.stages
    kept = _Kept(loop)

    def times_of(kind: str) -> list[PartTime]:
        return [times.get((stage, kind), NOTHING) for stage in range(stages)]

    forwards, weights = times_of("F"), times_of("W")
    backwards = times_of("I" if (0, "I") in times else "B")
    return StageCosts(
        forward_s=[part.seconds for part in forwards],
        input_s=[part.seconds for part in backwards],
        weight_s=[part.seconds for part in weights],
        send_s=[_sent_s(part) for part in forwards[:-1]],
        send_back_s=[_sent_s(part) for part in backwards[1:]],
        kept_bytes=[kept.until(stage, ("B", "I", "W")) for stage in range(stages)],
        weight_kept_bytes=[kept.until(stage, ("W",)) for stage in range(stages)],
    )


def _sent_s(part: PartTime) -> float:
    return sum(seconds for _, seconds in part.sends)


class _Kept:
    """Which memory a part of a trip makes, and which of it later parts of the same stage read."""

    def __init__(self, loop: Loop) -> None:
        assert loop.timetable is not None
        self.loop = loop
        self.spans = dict(zip(loop.timetable.parts, loop.timetable.spans(), strict=True))
        self.group = aliases(loop.body).group
        self.given = frozenset(loop.body.inputs)

    def until(self, stage: int, kinds: tuple[str, ...]) -> int:
        """Bytes that parts of these kinds read and earlier parts have made, here or elsewhere."""
        read: set[int] = set()
        for kind in kinds:
            read |= self._reads((stage, kind)) - self._makes((stage, kind))
        gradients: set[int] = set()
        if kinds != ("W",):
            # What comes as a gradient is there when the backward begins, not from the forward on.
            for part in self.spans:
                gradients |= self._makes(part) if part[1] != "F" else set()
        return sum(self.loop.body.values[id].nbytes for id in read - gradients)

    def _reads(self, part: Part) -> set[int]:
        found = set()
        for node in self.loop.body.nodes[slice(*self.spans.get(part, (0, 0)))]:
            found |= {self.group(ref) for ref in node.refs}
        return found - self.given

    def _makes(self, part: Part) -> set[int]:
        nodes = self.loop.body.nodes[slice(*self.spans.get(part, (0, 0)))]
        return {self.group(out) for node in nodes for out in node.results}
