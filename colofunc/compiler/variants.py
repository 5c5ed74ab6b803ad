"""Variants: a transform that leaves something open is planned in each way to write it, and the fastest that fits is taken.

Problem: how many microbatches a pipeline has, and where it is cut, decides what a rank holds and how long a step takes, and both are known
only of a finished program. Idea: each way is a chain of its own (`transform.Variant`), planned as if it had been written so: the accountant
counts it, the clock plays it. Ways are planned in the order of a bound on their time, and those whose bound is above the best plan so far
are not planned at all. What became of each is in the plan.

    8 microbatches, cut by time      1.20 s, fits with values made again
    8 microbatches, cut by memory    1.15 s                                     taken
    4 microbatches, cut by time      at least 1.31 s: not planned
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import attrs

from colofunc.compiler.budget import DoesNotFit
from colofunc.compiler.planning import Outcome, Planning
from colofunc.compiler.rank_agreement import from_main, told
from colofunc.compiler.staged import Staged, in_place_of
from colofunc.compiler.transform import Build, Transform, Variant
from colofunc.errors import CapacityError, PlanError
from colofunc.executors.watch import Watch
from colofunc.planner.plan import OtherWay, Plan

As = Callable[[Staged], Planning]
"""All that a chain is planned by."""
Recall = Callable[[Planning, bool], Outcome]
"""(what to plan, whether an error has to say the least budget) -> its plan."""


@attrs.frozen(eq=False)
class Ways:
    """The ways to write the open transform of a step; none where its chain leaves nothing open."""

    staged: Staged
    open: Transform | None
    variants: tuple[Variant, ...]

    @staticmethod
    def of(staged: Staged, build: Build, plan: Plan | None) -> Ways:
        """build: with the traced program. plan: one to follow, which says its way; None: there is none."""
        for transform in staged.transforms:
            variants = () if transform.variants is None else tuple(transform.variants(build))
            if variants:
                said = [each for each in variants if plan is not None and each.words == plan.way]
                return Ways(staged, transform, tuple(attrs.evolve(each, behind=None) for each in said) or variants)
        return Ways(staged, None, ())

    def written(self, index: int) -> Staged:
        """The chain in one way."""
        if self.open is None:
            return self.staged
        return in_place_of(self.staged, self.open, self.variants[index].transform)


@attrs.frozen(eq=False)
class Planned:
    """The way that was taken, what it was planned by, and its plan."""

    index: int
    planning: Planning
    outcome: Outcome


def planned(ways: Ways, planned_by: As, recall: Recall, watch: Watch | None) -> tuple[Planning, Outcome | None]:
    """What the fastest way that fits is planned by, and on rank 0 its plan. Collective.

    Raises PlanError where no way fits: that of the leanest.
    """
    if len(ways.variants) < 2:
        planning = planned_by(ways.written(0))
        outcome = from_main(watch, partial(recall, planning, True))
        if outcome is not None and ways.variants:
            outcome = _saying(outcome, ways.variants[0].words, ())
        return planning, outcome
    taken = from_main(watch, _Search(ways, planned_by, recall).run)
    index = told(watch, None if taken is None else taken.index)
    if taken is None:
        return planned_by(ways.written(index)), None
    return taken.planning, taken.outcome


def _saying(outcome: Outcome, way: str, others: tuple[OtherWay, ...]) -> Outcome:
    """A plan that says which way it goes, and what became of the others."""
    decided, program = outcome
    return attrs.evolve(decided, plan=attrs.evolve(decided.plan, way=way, others=others)), program


class _Search:
    def __init__(self, ways: Ways, planned_by: As, recall: Recall) -> None:
        self.ways, self.planned_by, self.recall = ways, planned_by, recall
        self.best: Planned | None = None
        self.others: dict[int, OtherWay] = {}
        self.refused: dict[int, PlanError | CapacityError] = {}

    def run(self) -> Planned:
        variants = self.ways.variants
        left = [index for index, each in enumerate(variants) if each.behind is None]
        while left:
            index = min(left, key=lambda k: (variants[k].at_least_s, k))
            left.remove(index)
            if self.best is not None and variants[index].at_least_s >= self._best_s():
                self._lose(index, variants[index].at_least_s, 0, "")
                continue
            if self._try(index):
                left += [k for k, each in enumerate(variants) if each.behind == variants[index].words]
        if self.best is None:
            self.best = self._leanest()
        others = tuple(self.others[index] for index in sorted(self.others))
        return attrs.evolve(self.best, outcome=_saying(self.best.outcome, variants[self.best.index].words, others))

    def _try(self, index: int) -> bool:
        """Plan one way; whether it fits with help only, or not at all."""
        try:
            planning = self.planned_by(self.ways.written(index))
            outcome = self.recall(planning, False)
        except (PlanError, CapacityError) as error:
            self.refused[index] = error
            peak_bytes = error.peak_bytes if isinstance(error, DoesNotFit) else 0
            self._lose(index, None, peak_bytes, str(error).splitlines()[0])
            return isinstance(error, (DoesNotFit, CapacityError))
        plan = outcome[0].plan
        if self.best is None or plan.cost_s < self._best_s():
            if self.best is not None:
                self._lose_planned(self.best)
            self.best = Planned(index, planning, outcome)
        else:
            self._lose_planned(Planned(index, planning, outcome))
        return bool(plan.memory)

    def _best_s(self) -> float:
        assert self.best is not None, "one was found"
        return self.best.outcome[0].plan.cost_s

    def _lose_planned(self, planned: Planned) -> None:
        plan = planned.outcome[0].plan
        self._lose(planned.index, plan.cost_s, plan.peak_bytes, "; ".join(plan.memory))

    def _lose(self, index: int, cost_s: float | None, peak_bytes: int, why: str) -> None:
        self.others[index] = OtherWay(self.ways.variants[index].words, cost_s, peak_bytes, why)

    def _leanest(self) -> Planned:
        """The way whose leanest plan holds least, planned with all that may make it fit. Raises what that raises, or what the first did."""
        lean = {index: error.peak_bytes for index, error in self.refused.items() if isinstance(error, DoesNotFit)}
        if not lean:
            raise self.refused[min(self.refused)]
        index = min(lean, key=lambda k: (lean[k], k))
        planning = self.planned_by(self.ways.written(index))
        try:
            outcome = self.recall(planning, True)
        except PlanError as error:
            words = [self.ways.variants[k].words for k in sorted(self.others)]
            error.add_note(f"tried: {', '.join(words)}; the leanest is {self.ways.variants[index].words}")
            raise
        self.others.pop(index)
        return Planned(index, planning, outcome)
