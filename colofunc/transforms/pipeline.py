"""pipeline: layers on ranks of their own, microbatches that follow one another through them.

    sharded = cf.shard(step_fn, cf.Mesh(pp=4, dp=2), zero(1, "dp"))
    step = cf.pipeline(sharded, axis="pp", microbatches=8, schedule="1f1b")

Problem: a model is too large for the ranks that share a layer, and pipelines are where composition ends elsewhere:
models cut by hand, schedules that forbid ZeRO. Idea: the step is one traced program. Its forward pass is cut in stages;
a parameter exists on the ranks of its stage (`@pp=1`), and operators run where their parameters are; what leaves a
stage is sent. The batch comes in microbatches, as under `cf.accumulate`, with the same numbers, and a schedule says
which rank does what of which microbatch: `passes.cut` cuts a trip of the loop in forward, backward, or input gradient
and weight gradient of each stage.

Source: GPipe (1811.06965); PipeDream-Flush or 1F1B (2104.04473); Zero Bubble (2401.10241), also for validation in the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import attrs

from colofunc.compiler.microbatches import check_number, equal_parts, loops_over, on_rows, rows_of
from colofunc.compiler.pipeline_stages import StagesOn, device_at
from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Rewrite, Transform, Variant
from colofunc.errors import PlanError, near
from colofunc.mesh import Mesh
from colofunc.planner.plan import matches
from colofunc.planner.sharding.constraints import Constraints
from colofunc.planner.stages.assignment import CutProblem, Cuts, cuts_at
from colofunc.planner.stages.bound import StepBound
from colofunc.planner.stages.forward_pass import WEIGHTS, reading_of
from colofunc.planner.stages.orders import DeviceOrder, best_order, least_order, roomiest_first
from colofunc.planner.stages.timetables import Scheduled, by_timetable
from colofunc.program.ir import Program, computed_once
from colofunc.program.passes.mixing import MIXING
from colofunc.program.pipeline_schedule import Schedule
from colofunc.program.placing import StagesOf

StageGlobs = Mapping[str, int]
AUTO = "auto"
VALIDATE = ("step", "next step")
LEVELS = 3
"""At most this many cuts are tried beside the balanced one under a budget, from that with the least full stage on."""
SHARES = (0.75, 0.5, 0.25, 0.0)
"""Under a budget, a schedule that looks at costs is tried with less in flight too: from the least (0) to what the
fastest keeps (1)."""


def pipeline(
    step_fn: Callable[..., Any] | None = None,
    axis: str = "pp",
    microbatches: int | str = 8,
    schedule: str = "1f1b",
    stages: StageGlobs | None = None,
    batch: int | str | None = None,
    mixing: str = "error",
    validate: str = "step",
) -> Any:
    """The step with its layers on the ranks of `axis`, and its batch in `microbatches` that follow one another there.

    microbatches: how many, or "auto": of all divisors of the batch that the schedule admits, the one with the fastest
    plan that fits. schedule: a name of `colofunc_schedules`, such as "gpipe", "1f1b", "zb-h1"; "auto": by
    the costs of the step, also how many stages a rank has and which. stages: glob over names
    of parameters -> stage (the first that matches counts); None: the forward pass is cut where its schedule ends
    first, or, where that fits a budget with help only (values made again, copies), where the plan is fastest of a few
    cuts from there to equally full ones. batch: the argument whose leaves are split on dim 0, by position or name
    (None: the first that is the batch alone, by its roles). mixing: what to do with operators that mix samples, as under
    `cf.accumulate`: "error", or "per-microbatch" (the numbers change). Otherwise the numbers are those of one device.
    validate: when a rank looks at what other stages say of its update (the factor of clipping by the joint norm,
    whether fp16 overflowed anywhere) and of results (the loss): at the end of the "step", or in the "next step", or
    when somebody reads a tensor before that. Then it updates by the scalars of the last step meanwhile, keeps copies of
    what it writes to, and puts right what was guessed wrongly.

    Raises PlanError for an axis that the mesh does not have, a schedule that nobody gives, more stages than there are
    layers, microbatches that do not divide the batch, and an operator that mixes samples ("auto": where it leaves one
    microbatch only); with validate="next step" for one microbatch, where the update itself communicates between stages,
    values are moved between tiers of memory, ranks are of unlike devices, no stage waits for another or one sends on
    what it was told, what stages say is put together by a collective that cannot stand before their messages, or a part
    of the step writes to what another still reads or passes on what has no layout; and in the first call where its
    messages would go by NCCL.
    """
    if microbatches != AUTO:
        check_number(microbatches, "pipeline")
    if mixing not in MIXING:
        raise PlanError(f"unknown mixing {mixing!r}{near(str(mixing), MIXING, 'ways')}")
    if validate not in VALIDATE:
        raise PlanError(f"unknown validate {validate!r}{near(str(validate), VALIDATE, 'ways')}")
    if stages is not None and not _name_stages(stages):
        raise PlanError(
            f"stages={stages!r} names no stages; write stages={{'layers.0.*': 0, 'layers.1.*': 1}}, or None for "
            "balanced ones"
        )
    number = None if isinstance(microbatches, str) else microbatches
    if number == 1 and validate == "next step":
        raise PlanError(_one_is_not_validated("microbatches=1"))
    asked = _Asked(axis, number, schedule, None if stages is None else tuple(stages.items()), batch, mixing, validate)
    return stage(step_fn, asked.transform())


def _one_is_not_validated(what: str) -> str:
    return (
        f'cf.pipeline(validate="next step"): {what}, and one microbatch has no schedule: each stage waits for the one '
        'before it, so that nothing would be validated later. Try: validate="step", or more microbatches'
    )


def _name_stages(stages: Any) -> bool:
    """Whether globs are mapped to numbers of stages."""
    if not isinstance(stages, Mapping) or not stages:
        return False
    return all(isinstance(glob, str) and isinstance(k, int) and k >= 0 for glob, k in stages.items())


@attrs.frozen
class _Asked:
    """What the pipeline was asked for. microbatches: None: that is open. ends: where the forward pass is cut (`Cuts`);
    None: where the schedule ends first. order: of each rank of the schedule, its index on the axis; None: the same."""

    axis: str
    microbatches: int | None
    schedule: str
    stages: tuple[tuple[str, int], ...] | None
    batch: int | str | None
    mixing: str
    validate: str = "step"
    ends: tuple[int, ...] | None = None
    order: DeviceOrder | None = None

    def transform(self, variants: bool = True) -> Transform:
        """variants: whether what is open is to be chosen."""
        write = "write cf.pipeline(step, microbatches=8)"
        clashes = {"accumulate": f"a pipeline has microbatches of its own; {write} without cf.accumulate"}
        if self.microbatches is None:
            clashes["local_stats"] = f"its numbers depend on how many microbatches there are; {write}"
        return Transform(
            "pipeline",
            attrs.asdict(self, recurse=False),
            constrain=self.constrained,
            candidates=self.loops,
            microbatches=self.microbatches or 1,
            clashes=clashes,
            variants=self.variants if variants else None,
        )

    def variants(self, build: Build) -> Sequence[Variant]:
        """Numbers of microbatches, placements of a schedule that has several, orders of devices that differ, and behind
        each, under a budget or for a plan that is followed, cuts; () where none of them is open."""
        ranks, several = self._ranks(build.mesh), len(self._placements(build)) > 1
        numbers = self.numbers(build, self._schedule(build), ranks)
        ways: list[_Way] = []
        for schedule in self._placements(build):
            ways += self._ways(build, schedule, ranks, schedule.name if several else "")
        if self.microbatches is not None and len(ways) == 1 and not ways[0].cuts_open:
            return ()
        found: list[Variant] = []
        for number in numbers:
            for way in ways:
                # One microbatch has no schedule, so that it has no placement to be chosen.
                if number > 1 or way.there.schedule is ways[0].there.schedule:
                    found.append(way.variant(number))
        return found

    def _ways(self, build: Build, schedule: Schedule, ranks: int, name: str) -> list[_Way]:
        """Of one placement, in each order of the ranks. name: what tells it from others."""
        cuts_open = self.stages is None and schedule.stages(ranks) > 1
        asked = attrs.evolve(self, schedule=schedule.name)
        there = asked.on(build, schedule)
        problem = there.problem() if cuts_open else None
        # A plan that was made under a budget is followed without one too.
        leaner = cuts_open and (build.budget_bytes is not None or bool(build.way))
        ways = [_Way(asked, there, problem, leaner, name)]
        for order in ways[0].orders():
            ordered = attrs.evolve(there, order=order)
            on_these = None if problem is None else problem.on(ordered.devices)
            ways.append(_Way(attrs.evolve(asked, order=order), ordered, on_these, leaner, name))
        return ways

    def on(self, build: Build, schedule: Schedule) -> StagesOn:
        """The stages of one placement."""
        return StagesOn(build, self.axis, schedule, self.order)

    def numbers(self, build: Build, schedule: Schedule, ranks: int) -> list[int]:
        """Of microbatches."""
        if self.microbatches is not None:
            self._admitted(build, schedule, ranks)
            return [self.microbatches]
        rows = rows_of(self.batch, build)
        numbers = schedule.admitted(rows, ranks)
        if numbers == [1] and self.validate == "next step":
            raise PlanError(_one_is_not_validated(f"microbatches='auto' is 1 for a batch of {rows} rows"))
        if self.validate == "next step":
            numbers = [number for number in numbers if number > 1]
        if not numbers:
            raise PlanError(
                f"microbatches='auto': no divisor of the {rows} rows of the batch is a number of microbatches that the "
                f"schedule {self.schedule!r} takes on {ranks} ranks; pad the batch to a multiple of "
                f"{ranks if schedule.whole_groups else schedule.least_microbatches(ranks)}"
            )
        return numbers

    def _admitted(self, build: Build, schedule: Schedule, ranks: int) -> frozenset[int]:
        """Numbers of microbatches that the schedule takes and that divide the batch.

        Raises PlanError where what was given is none that the schedule takes. One microbatch needs no batch, where the
        schedule takes it.
        """
        if self.number == 1 and schedule.least_microbatches(ranks) == 1 and not schedule.whole_groups:
            return frozenset((1,))
        rows = rows_of(self.batch, build)
        schedule.check_microbatches(ranks, self.number, rows)
        return frozenset(schedule.admitted(rows, ranks))

    def constrained(self, build: Build) -> Build:
        """Parameters exist on the ranks of their stages, and every rank's rows come in equal microbatches."""
        schedule, ranks = self._schedule(build), self._ranks(build.mesh)
        admitted = self._admitted(build, schedule, ranks)
        stages = StagesOf(self.axis, tuple(self.on(build, schedule).indices), self._assigned(build, schedule, ranks))
        at = stages.apart(ranks)
        if self.number > 1:
            build = equal_parts(self.number, self.batch, self.mixing, build, admitted.__contains__)
        return build.evolve(constraints=build.constraints | Constraints(at=at, stages=stages))

    def loops(self, build: Build) -> Build:
        """The loop over microbatches, with the schedule's timetable."""
        schedule, ranks = self._schedule(build), self._ranks(build.mesh)
        if self.number == 1:
            return build
        stages, assigned = {}, self._assigned(build, schedule, ranks)
        for position, found in assigned.items() if schedule.stages_per_rank > 1 else ():
            if len(found) == 1:
                stages[build.program.values[build.program.inputs[position]].name] = found[0]
        backward = any(node.phase == "backward" for node in build.program.nodes)
        there = self.on(build, schedule)
        late = self.validate == "next step"
        rule_of = build.registry.rule
        scheduled = Scheduled(
            self.axis,
            self.number,
            schedule,
            stages,
            backward,
            rule_of,
            there.indices,
            validate_late=late,
            by_hand=self.stages is not None,
        )
        ways = loops_over(self.number, self.batch, self.mixing, build)
        # the same loop for every timetable
        written = [computed_once(partial(_rewritten, way, build.mesh)) for way in ways]
        loops = [partial(by_timetable, loop, scheduled) for loop in written]
        if schedule.looks_at_costs:
            # Costs are known better once a program is finished: what has a name is counted then, of the same stages.
            named = [other for other in build.registry.schedules.values() if other.alike(schedule)]
            others = [attrs.evolve(scheduled, schedule=other) for other in named if not other.looks_at_costs]
            if build.budget_bytes is not None:
                # Less in flight is one way to keep to a budget, to make values again in the fastest order is another,
                # and both go together.
                others = [*(attrs.evolve(scheduled, share=share) for share in SHARES), *others]
            loops += [partial(by_timetable, written[0], each) for each in others]
        cuts_of = partial(there.cuts_of, assigned, scheduled, self.stages is not None)
        return build.evolve(alternatives=(*build.alternatives, loops), cuts_of=cuts_of)

    @property
    def number(self) -> int:
        """Microbatches, which are known once a variant is taken."""
        assert self.microbatches is not None, "a variant says how many"
        return self.microbatches

    def _ranks(self, mesh: Mesh) -> int:
        if self.axis not in mesh.axis_names:
            hint = near(self.axis, mesh.axis_names, "axes")
            raise PlanError(f"cf.pipeline(axis={self.axis!r}): {mesh!r} has no such axis{hint}")
        return mesh.axis_size(self.axis)

    def _schedule(self, build: Build) -> Schedule:
        """The one that was asked for; of one with several placements the first that can be."""
        return self._placements(build)[0]

    def _placements(self, build: Build) -> list[Schedule]:
        """The schedules of one placement each that the model's layers, or the stages that were given, allow."""
        known = dict(build.registry.schedules)
        for each in build.registry.schedules.values():
            known.update({placed.name: placed for placed in each.among if placed.name not in known})
        if not isinstance(self.schedule, str) or self.schedule not in known:
            name = "" if self.schedule is None else str(self.schedule)
            raise PlanError(f"unknown schedule {self.schedule!r}{near(name, sorted(known), 'schedules')}")
        placements, ranks = list(known[self.schedule].placements), self._ranks(build.mesh)
        if len(placements) == 1:
            return placements
        counts = sorted({placed.stages(ranks) for placed in placements})
        if self.stages is not None:
            wanted = 1 + max(stage for _, stage in self.stages)
            count = next((count for count in counts if count >= wanted), counts[-1])
            return [placed for placed in placements if placed.stages(ranks) == count]
        places = len(reading_of(build.program).places)
        return [placed for placed in placements if placed.stages(ranks) <= max(places, counts[0])]

    def _assigned(self, build: Build, schedule: Schedule, ranks: int) -> dict[int, tuple[int, ...]]:
        """Position of an input -> the stages that it belongs to."""
        count = ranks * schedule.stages_per_rank
        if self.stages is not None:
            return self._by_globs(build.program, count)
        if count == 1:
            return {}
        program = build.program
        if self.ends is not None:
            cuts = cuts_at(program, self.ends)
        else:
            there = self.on(build, schedule)
            cuts, _ = there.fastest_cut(there.problem(), self.number)
        return {position: found for position in range(len(program.inputs)) if (found := cuts.stages_of(position))}

    def _by_globs(self, program: Program, count: int) -> dict[int, tuple[int, ...]]:
        assert self.stages is not None, "globs were given"
        leaves = {k: program.values[i].name for k, i in enumerate(program.inputs) if program.values[i].role in WEIGHTS}
        for glob, index in self.stages:
            if index >= count:
                raise PlanError(
                    f"stages={{{glob!r}: {index}}}: the schedule {self.schedule!r} has {count} stages on "
                    f"{self.axis!r}; write stages from 0 to {count - 1}, or more ranks on {self.axis!r}"
                )
            if not any(matches(name, glob) for name in leaves.values()):
                some = ", ".join(list(leaves.values())[:3])
                raise PlanError(f"stages={{{glob!r}: {index}}} matches no parameter; the first are {some}")
        found: dict[int, tuple[int, ...]] = {}
        for position, name in leaves.items():
            indices = [index for glob, index in self.stages if matches(name, glob)]
            if indices:
                found[position] = (indices[0],)
        return found


@attrs.frozen(eq=False)
class _Way:
    """What is open, written in every way. problem: of the cuts; None: they are given. name: of the placement, where
    there are several.
    """

    asked: _Asked
    there: StagesOn
    problem: CutProblem | None
    cuts_open: bool
    name: str

    def variant(self, number: int) -> Variant:
        """So many microbatches, cut where the schedule ends first."""
        microbatches = f"{number} microbatches" if number > 1 else "1 microbatch"
        words = microbatches
        if self.name and number > 1:
            words += f", {self.name}"
        if self.asked.order is not None:
            words += f", ranks in the order {self.asked.axis}={','.join(map(str, self.asked.order))}"
        asked = attrs.evolve(self.asked, microbatches=number)
        if self.problem is None:
            return Variant(asked.transform(False), words, lambda: self.bound.of_any_cut(number))
        cuts, about_s = self.there.fastest_cut(self.problem, number)
        leaner = partial(self._leaner, self.problem, number, words)
        transform = attrs.evolve(asked, ends=cuts.ends).transform(False)
        by_time = Variant(transform, f"{words}, cut by time", partial(self._at_least_s, cuts, number))
        if self.name:
            by_time = attrs.evolve(by_time, about=(microbatches, about_s))
        return attrs.evolve(by_time, leaner=leaner) if self.cuts_open else by_time

    def _leaner(self, problem: CutProblem, number: int, words: str) -> list[Variant]:
        """Cut so that the fullest stage holds less."""
        cuts = problem.leaner(self.there.held(number), LEVELS)
        found = []
        for level, there in enumerate(cuts):
            how = f"between memory and time, {level} of {len(cuts) - 1}" if level else "by memory"
            transform = attrs.evolve(self.asked, microbatches=number, ends=there.ends).transform(False)
            found.append(Variant(transform, f"{words}, cut {how}", partial(self._at_least_s, there, number)))
        return found

    def _at_least_s(self, cuts: Cuts, number: int) -> float:
        return self.there.at_least_s(self.bound, cuts, number)

    def orders(self) -> list[DeviceOrder]:
        """Other orders of the ranks that may be better: of the fastest slowest stage, of the least bound, and the
        roomiest first under a budget, or for a plan that is followed and may have had one. [] where ranks are alike."""
        there, mesh = self.there, self.there.build.mesh
        if not mesh.topology.ranks or self.problem is None:
            return []
        problem, schedule = self.problem, there.schedule
        devices = [device_at(mesh, self.asked.axis, index) for index in range(there.ranks)]
        where = there.indices
        numbers = self.asked.numbers(there.build, schedule, there.ranks)
        middle = numbers[len(numbers) // 2]

        def problem_of(order: DeviceOrder) -> CutProblem:
            return problem.on([devices[order[rank]] for rank in where])

        def at_least_s(order: DeviceOrder) -> float:
            indices = [order[rank] for rank in where]
            bound = attrs.evolve(self.bound, rank_of=indices, speeds=[devices[index].speed for index in indices])
            return bound.at(problem_of(order).balanced(), middle)

        found = [best_order(devices, schedule.stages_per_rank, problem_of), least_order(devices, at_least_s)]
        if there.build.budget_bytes is not None or there.build.way:
            found.append(roomiest_first(devices))
        return list(dict.fromkeys(order for order in found if order is not None))

    @cached_property
    def bound(self) -> StepBound:
        """On a step's time; it is computed where several ways are compared."""
        return self.there.bound(on_rows(self.asked.batch, self.there.build))


def _rewritten(way: Rewrite, mesh: Mesh, program: Program) -> Program:
    return way(program, mesh)


__all__ = ["pipeline"]
