"""What one signature of a step is planned by, and the ways to come to a plan.

Problem: transforms record intents one by one, arguments lie somewhere already, other steps have placed what this one
captured, and a plan is asked for in several ways: from nothing, as the plan of another length, from the cache. Idea:
gather all of it once, in a record; each way is a method of it, and all of them end alike.

    planning = planning_of(staged, step, priced, registry, placed, before, measured)
    planning.search()                      # from the cache, else from nothing
    planning.near(before)                  # as the plan of a like batch did, else as above
    planning.measured(plan)                # the sharding of a plan stands: what is kept, copied and made again is decided anew

Each gives what was decided, and the program that a rank runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import attrs

from colofunc import env
from colofunc.compiler.budget import FailedSearch, or_named, plan_for_budget, plan_from_known, plan_of
from colofunc.compiler.completion import Completion, ways_of
from colofunc.compiler.decisions import Candidates, Decisions
from colofunc.compiler.hooks import applied, through
from colofunc.compiler.input_places import (
    PlacedHidden,
    PlacedInputs,
    TracedStep,
    aliases_kept,
    moves_of_tiers,
    pinned_hidden,
    tiers_of_inputs,
    tiers_stay,
)
from colofunc.compiler.kept_programs import KeptPrograms
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.memory_limits import device_limit_bytes
from colofunc.compiler.named_candidates import named_shardings
from colofunc.compiler.passes import REWRITES, Pass, PassOutputs, check_interface, passes_of_plugins, run_passes
from colofunc.compiler.plan_cache import decided_by, key_of, nearest, remembered
from colofunc.compiler.sharder import Sharder
from colofunc.compiler.staged import Staged
from colofunc.compiler.transform import Build, Hook, Transform
from colofunc.compiler.user_constraints import constraints_of_user, staying, wished_axes, without_places, without_tiers
from colofunc.errors import PlanError
from colofunc.executors.backend import as_run, held, held_in_order, ordered
from colofunc.executors.fused import as_executed
from colofunc.mesh import Mesh
from colofunc.planner.candidate import FinishedProgram
from colofunc.planner.plan import Plan, PlanOfAxis
from colofunc.planner.sharding.assign import Memo
from colofunc.planner.sharding.constraints import Constraints, retried
from colofunc.planner.sharding.explain import constraints_from
from colofunc.plugins.registry import Registry
from colofunc.program.ir import Program
from colofunc.program.passes.kernels import with_kernels
from colofunc.program.places import has_places
from colofunc.program.placing import placing_of, with_outputs
from colofunc.program.timed import Timed

Outcome = tuple[Decisions, Program]
"""What was decided, and the program that a rank runs."""


@attrs.frozen(eq=False)
class Planning:
    """`named`: axis -> the plan that speaks for it. `axes`: those that are searched; `searches_axes`: whether those are
    among them of which nobody speaks. `parts`: microbatches.

    `hooks`: of transforms. `asked`: what else decides the plan, for the key of the cache.
    """

    program: Program
    mesh: Mesh
    registry: Registry
    candidates: Candidates
    constraints: Constraints
    named: Mapping[str, PlanOfAxis]
    axes: tuple[str, ...]
    budget_bytes: int | None
    parts: int
    completion: Completion
    hooks: tuple[Hook, ...]
    asked: tuple[Any, ...]
    searches_axes: bool = True
    failed: list[tuple[Constraints, FailedSearch]] = attrs.field(factory=list, init=False)

    def search(self, says_least: bool = True) -> Outcome:
        """The plan that the cache has, else the best that is found.

        says_least: whether the least budget is looked for where nothing fits, for the error; otherwise this raises
        DoesNotFit, sooner, and the next call goes on from there.
        """
        key = key_of(self.program, self.mesh, self.registry, self.constraints, self.hooks, self.asked)
        search_anew = partial(retried, partial(self._under, says_least=says_least), self.constraints, self.program)
        return remembered(key, search_anew, self._rebuilt, env.say)

    def near(self, before: Sequence[Lowered], says_least: bool = True) -> Outcome:
        """Searched from where the plan of a like batch is, if there is one; else from nothing."""
        like = nearest(before, self.program)
        if like is None or self.failed:
            return self.search(says_least)
        try:
            return retried(partial(self._from, like), self.constraints, self.program)
        except PlanError:  # what it decided cannot be done with these sizes, or nothing near it keeps to the budget
            return self.search(says_least)

    def measured(self, plan: Plan) -> Outcome:
        """The sharding of `plan`, completed anew."""
        return plan_of(self.completion, self._decided_by(plan), self.budget_bytes)

    def stages(self, plan: Plan, decided: Decisions | None) -> PassOutputs:
        """What the program of `plan` goes through from lowering on, run again. decided: None on ranks that have only
        been told the plan.
        """
        completion = attrs.evolve(self.completion, keeps=True, kept=KeptPrograms())
        if decided is None:
            decided = self._decided_by(plan)
        done = self._finished(completion, decided, plan)
        last_passes = (*completion.last_passes(), Pass("order", completion.as_run))
        _, last_stages = run_passes(last_passes, done.program, completion.left_out, keep=True)
        return (*done.stages, *last_stages)

    def _under(self, constraints: Constraints, says_least: bool = True) -> Outcome:
        """A plan searched from nothing, or on from where a search under these constraints failed before."""
        failed_before = None
        for earlier, search in self.failed:
            if earlier is constraints:
                failed_before = search
                break
        if failed_before is None:
            self.candidates.memo = Memo()
            sharder = self._sharder(constraints)
            outcome = plan_for_budget(sharder, self.budget_bytes, self.parts, self._named(sharder))
            if not isinstance(outcome, FailedSearch):
                return outcome
            failed_before = outcome
            self.failed.append((constraints, failed_before))
        if not says_least:
            raise failed_before.refusal()
        return failed_before.plan_for_least()

    def _from(self, like: Lowered, constraints: Constraints) -> Outcome:
        """Searched from what `like` decides. Raises PlanError where that cannot be."""
        as_there = constraints | constraints_from(like.plan, self.program, like.mesh, self.candidates.rule_of)
        self.candidates.memo = Memo()
        known = self._sharder(as_there).assign(None)
        sharder = self._sharder(constraints)
        outcome = plan_from_known(sharder, self.budget_bytes, self.parts, known)
        return or_named(self.completion, outcome, self.budget_bytes, self._named(sharder))

    def _named(self, sharder: Sharder) -> Iterable[Decisions]:
        return named_shardings(sharder, self.registry) if self.searches_axes else ()

    def _sharder(self, constraints: Constraints) -> Sharder:
        return Sharder(self.completion, self.candidates, constraints, self.named, self.axes)

    def _rebuilt(self, plan: Plan) -> Outcome:
        decided = self._decided_by(plan)
        return decided, self.completion.ended(self._finished(self.completion, decided, plan))

    def _finished(self, completion: Completion, decided: Decisions, plan: Plan) -> FinishedProgram:
        done = completion.finish_best(decided, self.budget_bytes)
        if self.budget_bytes is not None and not done.fits(self.budget_bytes):  # it was found for less
            done = completion.finish(decided, plan.budget_bytes)
        return done

    def _decided_by(self, plan: Plan) -> Decisions:
        return decided_by(plan, self.program, self.mesh, self.candidates, self.constraints)


def planning_of(
    staged: Staged,
    step: TracedStep,
    priced: Mesh,
    registry: Registry,
    placed: PlacedInputs,
    before: Sequence[Lowered],
    timed: Timed | None,
    on_real_ranks: bool,
) -> Planning:
    """All that a plan is made by. priced: the mesh with the figures that count. timed: how long operators were measured
    to take.
    """
    sharding, program = staged.sharding, step.program
    candidates = Candidates(program, priced, registry)
    constraints, named = constraints_of_user(
        program,
        step.traced,
        priced,
        sharding,
        placed.fixed,
        placed.rows,
        staged.plan,
        candidates.rules,
    )
    budget_bytes = device_limit_bytes(staged, priced)

    # Transforms add what the planner may not decide otherwise, and ways to finish a program.
    build = Build(
        staged.build.transforms,
        priced,
        program=program,
        traced=step.traced,
        registry=registry,
        constraints=constraints,
        budget_bytes=budget_bytes,
    )
    build = through("constrain", build)
    build = through("candidates", build.evolve(constraints=staying(program, placed.state, build.constraints)))

    # What was placed before stays, and tiers that the user wishes are read off the constraints.
    hidden = PlacedHidden.of_step(step, staged.mesh, before, tiers_stay(build.moves, placed, timed))
    constraints, wished_tiers = without_tiers(pinned_hidden(program, hidden, build.constraints), program)
    # From here on outputs share memory with inputs where the constraints let them.
    program = candidates.program = attrs.evolve(program, aliases=aliases_kept(program, constraints))

    # Values that exist at one coordinate of an axis only leave nothing to be decided on it.
    ends = {position: layout.at for position, layout in constraints.outputs.items() if layout.at is not None}
    constraints = without_places(constraints, program, priced)
    placing = placing_of(program, constraints.at, priced, constraints.stages)
    if placing is not None:
        places = {position: at for position, at in enumerate(placing.inputs) if at is not None}
        constraints = attrs.evolve(constraints, at=places)
    placing = with_outputs(placing, program, ends)
    axes = priced.axis_names if sharding.auto else wished_axes(priced, constraints, named)
    staged_axes = {axis for axis, _ in constraints.at.values()}
    if staged_axes:  # plans offer layouts over all axes of the mesh, and know nothing of where values are placed
        constraints = constraints.offering_nothing_on(staged_axes)
        axes = tuple(axis for axis in axes if axis not in staged_axes)

    holds_temporaries = staged.executor != "compiled"
    lies = tiers_of_inputs(step, program, placed, hidden, wished_tiers, build.moves)
    completion = Completion(
        program=program,
        mesh=priced,
        rule_of=registry.rule,
        passes=_passes(build),
        chunks=constraints.chunks,
        temporaries=holds_temporaries,
        count=partial(held_in_order, mesh=priced, name=staged.executor),
        searches=build.searches,
        moves=build.moves or moves_of_tiers(lies),
        lies=lies,
        order=partial(_in_order, mesh=priced, executor=staged.executor),
        before_moves=partial(_before_moves, mesh=priced, executor=staged.executor),
        as_run=partial(as_run, mesh=priced, name=staged.executor),
        clocked=partial(as_executed, executor=staged.executor, mesh=priced, rule_of=registry.rule),
        ways=ways_of(build.alternatives),
        kernels=partial(with_kernels, mesh=priced, table=registry.kernels),
        timed=timed,
        wider=[transform.wider for transform in build.transforms if transform.wider],
        left_out=step.left_out,
        placing=placing,
        room_bytes=budget_bytes,
        cuts_of=build.cuts_of,
    )
    completion = _without(completion, step.left_out, staged.executor)
    return Planning(
        program=program,
        mesh=priced,
        registry=registry,
        candidates=candidates,
        constraints=constraints,
        named=named,
        axes=axes,
        budget_bytes=budget_bytes,
        parts=build.microbatches,
        completion=completion,
        hooks=build.hooks,
        searches_axes=sharding.auto,
        asked=(
            _options(staged.transforms),
            sorted(named.items()),
            budget_bytes,
            axes,
            holds_temporaries,
            build.microbatches,
            on_real_ranks,
            sorted(step.left_out),
        ),
    )


# ---- what the transforms ask for ----


def _options(transforms: Sequence[Transform]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The options of each transform, as text.

    All but the mesh and the plugins, which the key of the cache has already.
    """
    options_by_transform = []
    for transform in transforms:
        options = dict(transform.options)
        if transform.sharding is not None:
            options.update(attrs.asdict(transform.sharding, recurse=False))
        texts = []
        for name, value in options.items():
            if name not in ("mesh", "plugins"):
                texts.append((name, repr(value)))
        options_by_transform.append((transform.name, sorted(texts)))
    return options_by_transform


def _passes(build: Build) -> list[Pass]:
    """Of plugins, by name, and behind them those of transforms."""
    return passes_of_plugins(build.registry.passes, build.mesh) + rewrites("rewrite_local", build)


def rewrites(hook: str, build: Build) -> list[Pass]:
    """One hook of all transforms that changes the program, as passes."""
    users = [transform for transform in build.transforms if getattr(transform, hook) is not None]
    return [Pass(f"{transform.name}.{hook}", partial(_rewritten, hook, transform, build)) for transform in users]


def _rewritten(hook: str, transform: Transform, build: Build, program: Program) -> Program:
    rewritten = applied(transform, hook, build.evolve(program=program)).program
    check_interface(f"{transform.name}.{hook}", program, rewritten)
    return rewritten


def can_be_left_out(build: Build) -> list[str]:
    """Names of the passes that a step is right without, if not the same."""
    ours = [each.name for hook in ("rewrite_global", "rewrite_local") for each in rewrites(hook, build)]
    return [*REWRITES, *sorted(build.registry.passes), *ours]


def _without(completion: Completion, left_out: frozenset[str], executor: str | None) -> Completion:
    """`completion` without the searches, so that nothing is made again, or without the order in which the executor
    runs a program, so that it runs and is counted as it was written.
    """
    if "searches" in left_out:
        completion = attrs.evolve(completion, searches=())
    if "order" in left_out:
        count = partial(held, mesh=completion.mesh, name=executor)
        completion = attrs.evolve(completion, order=_as_it_is, before_moves=_as_it_is, as_run=_as_it_is, count=count)
    return completion


def _as_it_is(program: Program, ahead_bytes: float = inf) -> Program:
    return program


def _in_order(program: Program, ahead_bytes: float, mesh: Mesh, executor: str | None) -> Program:
    """As the executor runs it, with at most so many bytes gathered ahead of their use."""
    return ordered(program, mesh, executor, ahead_bytes)


def _before_moves(program: Program, ahead_bytes: float, mesh: Mesh, executor: str | None) -> Program:
    """The order in which copies are written into a program.

    In a pipeline collectives then stand where they are used: among started ones the search for copies takes up to seven
    times as long, for steps between 9 % less and 6 % more.
    """
    return program if has_places(program) else ordered(program, mesh, executor, ahead_bytes)
