"""A pipeline schedule: how many stages a rank has and which, and the table of actions for so many microbatches.

Problem: schedules differ in what they need (stages per rank, a backward in two parts, a number of microbatches) and in
what they look at (some none of the costs, some all). Idea: a frozen record says the first, and one function gives the
table.

    Schedule("gpipe", gpipe).table(ranks=4, microbatches=8)

Source: the placement in the shape of a V is Pipeline Parallelism with Controllable Memory (2405.15362, section 3).
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from colofunc.errors import PlanError, plugin_faults
from colofunc.program.actions import Action, ActionTable, check_table

PLACEMENTS = ("loop", "v")


def _as_floats(values: object) -> tuple[float, ...]:
    assert isinstance(values, (tuple, list))
    return tuple(float(value) for value in values)


@attrs.frozen
class StageCosts:
    """What the stages of a pipeline take for one microbatch, a figure per stage.

    forward_s, input_s, weight_s: seconds of F, I and W; B takes those of I and W. send_s: seconds from the end of a
    stage's F until the next stage has its result; send_back_s: from the end of a stage's B or I until the stage before
    it has the gradient; both have a figure per pair of neighbours, which counts where they are on different ranks.
    kept_bytes: from the beginning of F to the end of B or I; weight_kept_bytes: from the end of I to the end of W.
    """

    forward_s: tuple[float, ...] = attrs.field(converter=_as_floats)
    input_s: tuple[float, ...] = attrs.field(converter=_as_floats)
    weight_s: tuple[float, ...] = attrs.field(converter=_as_floats)
    send_s: tuple[float, ...] = attrs.field(converter=_as_floats)
    send_back_s: tuple[float, ...] = attrs.field(converter=_as_floats)
    kept_bytes: tuple[float, ...] = attrs.field(converter=_as_floats)
    weight_kept_bytes: tuple[float, ...] = attrs.field(converter=_as_floats)

    def __attrs_post_init__(self) -> None:
        for field in attrs.fields(StageCosts):
            values = getattr(self, field.name)
            wanted = self.stages - 1 if field.name.startswith("send") else self.stages
            if len(values) != wanted:
                raise PlanError(f"costs of {self.stages} stages have {len(values)} figures {field.name}; give {wanted}")
            wrong = [value for value in values if not value >= 0]
            if wrong:
                raise PlanError(f"{field.name} of a stage is {wrong[0]}; give seconds and bytes of at least 0")

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.forward_s)

    @classmethod
    def uniform(
        cls,
        stages: int,
        f: float = 1.0,
        i: float = 1.0,
        w: float = 1.0,
        send: float = 0.0,
        kept: float = 1.0,
        weight_kept: float = 0.5,
    ) -> StageCosts:
        """Stages that are alike."""
        boundaries = (send,) * (stages - 1)
        return cls(
            (f,) * stages,
            (i,) * stages,
            (w,) * stages,
            boundaries,
            boundaries,
            (kept,) * stages,
            (weight_kept,) * stages,
        )

    def joined(self, parts: int) -> StageCosts:
        """Costs where each `parts` neighbours are one stage. Raises PlanError where they leave a remainder."""
        if parts < 1 or self.stages % parts:
            raise PlanError(f"{self.stages} stages cannot be joined by {parts}; give a divisor of {self.stages}")
        sums = {}
        for field in attrs.fields(StageCosts):
            values = getattr(self, field.name)
            if field.name.startswith("send"):  # between the stages that are left
                sums[field.name] = values[parts - 1 :: parts]
            else:
                sums[field.name] = [sum(values[first : first + parts]) for first in range(0, self.stages, parts)]
        return StageCosts(**sums)

    def seconds(self, action: Action) -> float:
        """How long an action takes."""
        if action.kind == "F":
            return self.forward_s[action.stage]
        if action.kind == "I":
            return self.input_s[action.stage]
        if action.kind == "W":
            return self.weight_s[action.stage]
        return self.input_s[action.stage] + self.weight_s[action.stage]


MakeTable = Callable[[int, int, StageCosts | None, float | None], ActionTable]


@attrs.frozen
class Schedule:
    """A named way to order the actions of a pipeline.

    make: (ranks, microbatches, costs or None, most bytes of activations on a rank or None) -> ActionTable. A schedule
    that looks at no costs gives the same table for all. placement: which rank has which stage: "loop" (stage mod ranks)
    or "v" (0..p-1, then p-1..0). splits_backward: whether the table has I and W. least_per_rank: microbatches that it
    needs for each rank, at least. whole_groups: whether it takes multiples of the number of ranks only. looks_at_costs:
    whether the table depends on costs and the cap; then `cf.pipeline` gives both. among: schedules of one placement
    each, the first with as many stages as this one; `cf.pipeline` plans the step by each and takes the fastest, and
    `make` gets costs of as many stages as any of them has. draft: makes a table for costs in less time, by which cuts
    are compared; None: `make` does.
    """

    name: str
    make: MakeTable = attrs.field(repr=False)
    stages_per_rank: int = 1
    placement: str = "loop"
    splits_backward: bool = False
    least_per_rank: int = 0
    whole_groups: bool = False
    looks_at_costs: bool = False
    among: tuple[Schedule, ...] = attrs.field(default=(), repr=False)
    draft: MakeTable | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise PlanError(f"schedule {self.name!r} has the placement {self.placement!r}; give 'loop' or 'v'")
        if self.stages_per_rank < 1:
            raise PlanError(f"schedule {self.name!r} has {self.stages_per_rank} stages per rank; give at least 1")
        if any(each.among for each in self.among):
            raise PlanError(
                f"schedule {self.name!r} is among schedules that have some among them; give those themselves"
            )
        if self.among and self.among[0].stages_per_rank != self.stages_per_rank:
            wanted = self.among[0]
            raise PlanError(
                f"schedule {self.name!r} has {self.stages_per_rank} stages per rank, and the first of those it takes, "
                f"{wanted.name!r}, has {wanted.stages_per_rank}; give both the same"
            )

    @property
    def placements(self) -> tuple[Schedule, ...]:
        """The schedules of one placement each that it may be."""
        return self.among or (self,)

    def alike(self, other: Schedule) -> bool:
        """Whether both have the same stages on the same ranks."""
        return (self.stages_per_rank, self.placement) == (other.stages_per_rank, other.placement)

    def stages(self, ranks: int) -> int:
        """How many stages the model is cut into."""
        return ranks * self.stages_per_rank

    def rank_of(self, stage: int, ranks: int) -> int:
        """The rank that has a stage."""
        turn, place = divmod(stage, ranks)
        if self.placement == "v" and turn % 2:
            return ranks - 1 - place
        return place

    def least_microbatches(self, ranks: int) -> int:
        """How many microbatches it needs on so many ranks."""
        return max(1, self.least_per_rank * ranks)

    def admitted(self, rows: int, ranks: int) -> list[int]:
        """The divisors of a batch's rows that are numbers of microbatches for it on so many ranks, ascending."""
        return [number for number in range(1, rows + 1) if rows % number == 0 and self.takes(ranks, number)]

    def takes(self, ranks: int, microbatches: int) -> bool:
        """Whether it runs so many microbatches on so many ranks."""
        return microbatches >= self.least_microbatches(ranks) and not (self.whole_groups and microbatches % ranks)

    def check_microbatches(self, ranks: int, microbatches: int, rows: int | None = None) -> None:
        """Raises PlanError where they are no number, too few for it on so many ranks, or come in no whole groups.

        rows: of the batch; then what the error advises divides them.
        """
        for number, what in ((ranks, "ranks"), (microbatches, "microbatches")):
            if not isinstance(number, int) or number < 1:
                raise PlanError(f"schedule {self.name!r} was given {number!r} {what}; give a number from 1 on")
        least = self.least_microbatches(ranks)
        if microbatches < least:
            advice = self._advice(ranks, least, rows)
            raise PlanError(
                f"schedule {self.name!r} needs at least {least} microbatches on {ranks} ranks and has {microbatches}; "
                f"{advice}"
            )
        if self.whole_groups and microbatches % ranks:
            advice = self._advice(ranks, microbatches + -microbatches % ranks, rows)
            raise PlanError(
                f"schedule {self.name!r} takes groups of {ranks} microbatches on {ranks} ranks, which do not divide "
                f"{microbatches}; {advice}"
            )

    def _advice(self, ranks: int, number: int, rows: int | None) -> str:
        """What to do instead. number: of microbatches that it takes, whatever the batch."""
        if rows is None:
            return f"give microbatches={number}, or another schedule"
        admitted = self.admitted(rows, ranks)
        if not admitted:
            multiple = ranks if self.whole_groups else self.least_microbatches(ranks)
            return f"no such number divides the {rows} rows of the batch: pad it to a multiple of {multiple}, or give another schedule"
        return f"give microbatches={' or '.join(map(str, admitted))}, which divide the {rows} rows of the batch, or another schedule"

    def table(
        self, ranks: int, microbatches: int, costs: StageCosts | None = None, cap_bytes: float | None = None
    ) -> ActionTable:
        """The checked table.

        Raises PlanError where there are too few microbatches, or the schedule's own table cannot be run.
        """
        self.check_microbatches(ranks, microbatches)
        counts = sorted({each.stages(ranks) for each in self.placements})
        if costs is not None and costs.stages not in counts:
            wanted = " or ".join(map(str, counts))
            raise PlanError(
                f"schedule {self.name!r} has {wanted} stages on {ranks} ranks and was given costs of {costs.stages}"
            )
        what = f"colofunc_schedules: the table of the schedule {self.name!r}"
        with plugin_faults(what, "a cf.ext.ActionTable for every number of ranks and microbatches that it admits"):
            table = self.make(ranks, microbatches, costs, cap_bytes)
        self._check(table, ranks, microbatches)
        return table

    def drafted(self, ranks: int, microbatches: int, costs: StageCosts) -> ActionTable:
        """A table to compare cuts by."""
        if self.draft is None:
            return self.table(ranks, microbatches, costs)
        return self.draft(ranks, microbatches, costs, None)

    def _check(self, table: ActionTable, ranks: int, microbatches: int) -> None:
        if not isinstance(table, ActionTable):
            raise PlanError(
                f"schedule {self.name!r} made a {type(table).__name__}; its `make` returns a cf.ext.ActionTable"
            )
        stages = table.stages if self.among else self.stages(ranks)
        try:
            check_table(table, stages, microbatches)
        except PlanError as error:
            raise PlanError(f"schedule {self.name!r} on {ranks} ranks: {error}") from None
        if any(each.stages(ranks) == stages and not each.misplaced(table, ranks) for each in self.among):
            return
        for stage, rank, wanted in self.misplaced(table, ranks):
            raise PlanError(
                f"schedule {self.name!r} has stage {stage} on rank {rank}, and its placement {self.placement!r} says "
                f"rank {wanted}; change one of them"
            )

    def misplaced(self, table: ActionTable, ranks: int) -> list[tuple[int, int, int]]:
        """(stage, its rank in a table, its rank by the placement) of stages that are elsewhere."""
        places = [(stage, rank, self.rank_of(stage, ranks)) for stage, rank in table.rank_of.items()]
        return [place for place in places if place[1] != place[2]]
