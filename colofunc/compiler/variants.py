"""Variants: a transform that leaves something open is planned in each way to write it, and the fastest that fits is
taken.

Problem: how many microbatches a pipeline has, and where it is cut, decides what a rank holds and how long a step takes,
and both are known only of a finished program. Idea: each way is a chain of its own (`transform.Variant`), planned as if
it had been written so: the accountant counts it, the clock plays it. Ways are planned in the order of a bound on their
time, and those whose bound is above the best plan so far are not planned at all. What became of each is in the plan.

    8 microbatches, cut by time      1.20 s, fits with values made again
    8 microbatches, cut by memory    1.15 s                                     taken
    4 microbatches, cut by time      at least 1.31 s: not planned

Where a bound tells ways apart too seldom, as placements of one schedule, a variant has an estimate too: those that are
far behind are not planned once one of their group fits without help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import inf

import attrs

from colofunc import progress
from colofunc.compiler.budget import DoesNotFit
from colofunc.compiler.planning import Outcome, Planning
from colofunc.compiler.rank_agreement import from_main, told_by_main
from colofunc.compiler.staged import Staged, in_place_of
from colofunc.compiler.transform import Build, Transform, Variant
from colofunc.errors import CapacityError, PlanError, near
from colofunc.executors.watch import Watch
from colofunc.planner.plan import ESTIMATE, OtherWay, Plan
from colofunc.program.passes.mixing import Mixes

As = Callable[[Staged], Planning]
"""All that a chain is planned by."""
Recall = Callable[[Planning, bool], Outcome]
"""(what to plan, whether an error has to say the least budget) -> its plan."""


ESTIMATED = 0.02
"""A way that its estimate puts behind another one by more than this part is not planned, where that one fits without
help."""
LARGE = 2000
"""Of programs of more operators, which take long to plan, a way that is behind by less is not planned either."""

Way = tuple[int, ...]
"""The number of a variant, and of one of those that are leaner."""


@attrs.frozen(eq=False)
class Ways:
    """The ways to write the open transform of a step.

    None where its chain leaves nothing open. only: the one that is to be taken.

    estimated: by which part a way may be behind the best of its group and still be planned.
    """

    staged: Staged
    open: Transform | None
    variants: tuple[Variant, ...]
    only: Way | None = None
    estimated: float = ESTIMATED
    leaner: dict[int, Sequence[Variant]] = attrs.field(factory=dict, init=False)

    @staticmethod
    def of(staged: Staged, build: Build, plan: Plan | None) -> Ways:
        """build: with the traced program. plan: one to follow, which says its way; None: there is none.

        Raises PlanError where a step has no such way, leaves nothing open, or has two transforms that leave something
        open.
        """
        way = "" if plan is None else plan.way
        build = build.evolve(way=way)
        found: dict[str, tuple[Transform, tuple[Variant, ...]]] = {}
        for transform in staged.transforms:
            variants = () if transform.variants is None else tuple(transform.variants(build))
            if variants:
                found[transform.name] = transform, variants
        if len(found) > 1:
            first, second = sorted(found)[:2]
            raise PlanError(
                f"{first} and {second} both leave open how they are written ({found[first][1][0].words!r} is a way of "
                f"the one, {found[second][1][0].words!r} of the other), and one of a chain may. Try: say all that one "
                "of them leaves open"
            )
        for transform, variants in found.values():
            estimated = 0.0 if len(build.program.nodes) > LARGE else ESTIMATED
            ways = Ways(staged, transform, variants, estimated=estimated)
            return attrs.evolve(ways, only=ways.called(way)) if way else ways
        if way:
            raise PlanError(
                f"the plan to follow goes the way {way!r}, and this step leaves nothing open: its microbatches and "
                "stages are given. Try: stages=None and what else was open when the plan was made, or plan it without "
                "with_plan"
            )
        return Ways(staged, None, (), only=())

    def called(self, words: str) -> Way:
        """The way with these words. Raises PlanError where there is none."""
        for number, variant in enumerate(self.variants):
            if variant.words == words:
                return (number,)
            if words.startswith(variant.words.partition(",")[0]):
                for way in self.behind((number,)):
                    if self.variant(way).words == words:
                        return way
        hint = near(words, [variant.words for variant in self.variants], "ways")
        raise PlanError(
            f"the plan to follow goes the way {words!r}, which this step does not have{hint}; "
            f"write the step as it was when the plan was made, or plan it without with_plan"
        )

    def behind(self, way: Way) -> list[Way]:
        """Those that are tried where a way needs help."""
        if len(way) > 1:
            return []
        (number,) = way
        if number not in self.leaner:
            self.leaner[number] = self.variants[number].leaner()
        return [(number, k) for k in range(len(self.leaner[number]))]

    def variant(self, way: Way) -> Variant:
        if len(way) == 1:
            return self.variants[way[0]]
        self.behind(way[:1])
        return self.leaner[way[0]][way[1]]

    def written(self, way: Way) -> Staged:
        """The chain in one way."""
        if self.open is None:
            return self.staged
        return in_place_of(self.staged, self.open, self.variant(way).transform)


@attrs.frozen(eq=False)
class PlannedVariant:
    """The way that was taken, what it was planned by, and its plan."""

    way: Way
    planning: Planning
    outcome: Outcome


def planned(ways: Ways, planned_by: As, recall: Recall, watch: Watch | None) -> tuple[Planning, Outcome | None]:
    """What the fastest way that fits is planned by, and on rank 0 its plan. Collective.

    Raises PlanError where no way fits: that of the leanest.
    """
    if ways.only is not None:
        planning = planned_by(ways.written(ways.only))
        outcome = from_main(watch, partial(recall, planning, True))
        if outcome is not None and ways.only:
            outcome = _saying(outcome, ways.variant(ways.only).words, ())
        return planning, outcome
    taken = from_main(watch, _Search(ways, planned_by, recall).run)
    way = told_by_main(watch, None if taken is None else taken.way)
    if taken is None:
        return planned_by(ways.written(way)), None
    return taken.planning, taken.outcome


def _saying(outcome: Outcome, way: str, others: tuple[OtherWay, ...]) -> Outcome:
    """A plan that says which way it goes, and what became of the others."""
    decided, program = outcome
    return attrs.evolve(decided, plan=attrs.evolve(decided.plan, way=way, others=others)), program


class _Search:
    def __init__(self, ways: Ways, planned_by: As, recall: Recall) -> None:
        self.ways, self.planned_by, self.recall = ways, planned_by, recall
        self.best: PlannedVariant | None = None
        self.others: dict[Way, OtherWay] = {}
        self.refused: dict[Way, PlanError | CapacityError] = {}
        # of those that do not fit: its peak, which it is, how it was planned
        self.leanest: tuple[int, Way, Planning] | None = None
        self.bounds: dict[Way, float] = {}
        # group -> the least estimate of its ways that were planned and fit without help
        self.fits: dict[str, float] = {}

    def run(self) -> PlannedVariant:
        left: list[Way] = [(number,) for number in range(len(self.ways.variants))]
        looked_at = 0
        while left:
            looked_at += 1
            if len(self.ways.variants) > 1:
                progress.at("variants", looked_at, looked_at + len(left) - 1)
            # A single way needs no bound, and has one only for the time that it takes to compute.
            way = left[0]
            if len(left) > 1 or self.best is not None:
                way = min(left, key=lambda each: (self._order_s(each), each))
            left.remove(way)
            if self._is_far_behind(way):  # which is known already; a bound takes time to compute
                self._lose(way, self._order_s(way), 0, ESTIMATE)
            elif self.best is not None and (self._bound_s(way), False) >= _merit(self.best):
                self._lose(way, self._bound_s(way), 0, "")
            elif self._try(way):
                left += self.ways.behind(way)
        self._check_mixing()
        best = self._leanest() if self.best is None else self.best
        others = tuple(self.others[way] for way in sorted(self.others))
        return attrs.evolve(best, outcome=_saying(best.outcome, self.ways.variant(best.way).words, others))

    def _bound_s(self, way: Way) -> float:
        if way not in self.bounds:
            self.bounds[way] = self.ways.variant(way).at_least_s()
        return self.bounds[way]

    def _order_s(self, way: Way) -> float:
        """Seconds by which ways are tried in order: their estimate, or a bound."""
        about = self.ways.variant(way).about
        return self._bound_s(way) if about is None else about[1]

    def _is_far_behind(self, way: Way) -> bool:
        about = self.ways.variant(way).about
        return about is not None and about[1] > self.fits.get(about[0], inf) * (1 + self.ways.estimated)

    def _try(self, way: Way) -> bool:
        """Plan one way; whether it fits with help only, or not at all."""
        planning = None
        try:
            planning = self.planned_by(self.ways.written(way))
            outcome = self.recall(planning, False)
        except (PlanError, CapacityError) as error:
            self.refused[way] = error
            peak_bytes = error.peak_bytes if isinstance(error, DoesNotFit) else 0
            if (
                planning is not None
                and isinstance(error, DoesNotFit)
                and (self.leanest is None or (peak_bytes, way) < self.leanest[:2])
            ):
                self.leanest = peak_bytes, way, planning
            self._lose(way, None, peak_bytes, str(error).splitlines()[0])
            return isinstance(error, (DoesNotFit, CapacityError))
        found = PlannedVariant(way, planning, outcome)
        about = self.ways.variant(way).about
        if about is not None and not outcome[0].plan.memory:
            self.fits[about[0]] = min(about[1], self.fits.get(about[0], inf))
        if self.best is None or _merit(found) < _merit(self.best):
            self.best, found = found, self.best
        if found is not None:
            plan = found.outcome[0].plan
            self._lose(found.way, plan.cost_s, plan.peak_bytes, "; ".join(plan.memory))
        return bool(outcome[0].plan.memory) and not planning.completion.follows_policies

    def _check_mixing(self) -> None:
        """Raises where one microbatch is all that is left because an operator mixes samples.

        What was asked for is a pipeline.
        """
        if self.best is not None and self._several(self.best.way):
            return
        tried: list[Way] = []
        for way, other in self.others.items():
            if self._several(way) and (way in self.refused or other.peak_bytes):
                tried.append(way)
        if tried and all(isinstance(self.refused.get(way), Mixes) for way in tried):
            error = self.refused[min(tried)]
            self._say_what_one_does(error)
            raise error

    def _say_what_one_does(self, error: Exception) -> None:
        """One microbatch is what the error recommends, and may not fit."""
        if self.best is not None:
            error.add_note(
                f"{self.ways.variant(self.best.way).words} has a plan; write microbatches=1 where that will do"
            )
            return
        for way in sorted(self.refused):
            if not self._several(way):
                words, first_line = self.ways.variant(way).words, str(self.refused[way]).splitlines()[0]
                error.add_note(
                    f"no number of microbatches has a plan: above 1 that operator mixes them, and {words}: {first_line}"
                )
                return

    def _several(self, way: Way) -> bool:
        return self.ways.variant(way).transform.microbatches > 1

    def _lose(self, way: Way, cost_s: float | None, peak_bytes: int, why: str) -> None:
        self.others[way] = OtherWay(self.ways.variant(way).words, cost_s, peak_bytes, why)

    def _leanest(self) -> PlannedVariant:
        """The way whose leanest plan holds least, planned with all that may make it fit.

        Raises what that raises, or what the first did.
        """
        if self.leanest is None:
            raise self.refused[min(self.refused)]
        _, way, planning = self.leanest
        try:
            outcome = self.recall(planning, True)
        except PlanError as error:
            if len(self.others) > 1:
                words = [self.ways.variant(each).words for each in sorted(self.others)]
                error.add_note(f"tried: {'; '.join(words)}. The leanest is {self.ways.variant(way).words}")
            raise
        self.others.pop(way)
        return PlannedVariant(way, planning, outcome)


def _merit(planned: PlannedVariant) -> tuple[float, bool]:
    """Of equally fast plans the one that makes nothing again and copies nothing is better."""
    plan = planned.outcome[0].plan
    return plan.cost_s, bool(plan.memory)
