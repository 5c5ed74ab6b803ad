"""What one signature of a step is planned by, and the ways to come to a plan.

Problem: transforms record intents one by one, arguments lie somewhere already, other steps have placed what this one captured, and a
plan is asked for in several ways: from nothing, as the plan of another length, from the cache. Idea: gather all of it once, in a record;
each way is a method of it, and all of them end alike.

    planning = gathered(staged, seen, priced, registry, placed, before, measured)
    planning.search()                      # from the cache, else from nothing
    planning.near(before)                  # as the plan of a like batch did, else as above
    planning.measured(plan)                # the sharding of a plan stands: what is kept, copied and made again is decided anew

Each gives what was decided, and the program that a rank runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

import attrs
import torch

from colofunc import env
from colofunc.compiler.budget import Missed, finished, nearby, within
from colofunc.compiler.completion import Completion, ways_of
from colofunc.compiler.decisions import Candidates, Decided, assigned
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.passes import REWRITES, Pass, Stages, run_passes
from colofunc.compiler.plan_cache import decided_by, key_of, nearest, remembered
from colofunc.compiler.staged import Staged
from colofunc.compiler.transform import Build, Hook, Lies, Move, Rewrite, Transform, through
from colofunc.compiler.user_constraints import pin, staying, wanted, wished_axes, without_places, without_tiers
from colofunc.dtensor.placed import SHELF
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import PlanError
from colofunc.executors.backend import held, ordered
from colofunc.executors.fused import as_executed
from colofunc.mesh import Mesh
from colofunc.mesh.card import card_memory
from colofunc.mesh.sizes import Room
from colofunc.planner.candidate import Fitted
from colofunc.planner.offload.choice import Hint
from colofunc.planner.offload.fastest import Offloaded, offload
from colofunc.planner.offload.policies import GIVEN
from colofunc.planner.plan import Plan
from colofunc.planner.recompute.stages import NodeS
from colofunc.planner.sharding.assign import Memo
from colofunc.planner.sharding.constraints import Constraint, Constraints, retried
from colofunc.planner.sharding.explain import constraints_from
from colofunc.plugins.registry import Registry
from colofunc.program.ir import Program
from colofunc.program.lazy import LazyTensor
from colofunc.program.passes.kernels import capability_on, with_kernels
from colofunc.program.placing import placing_of
from colofunc.program.timed import Timed
from colofunc.program.tracing.trace import Traced
from colofunc.spec.layout import Layout

Outcome = tuple[Decided, Program]
"""What was decided, and the program that a rank runs."""


@attrs.frozen(eq=False)
class Seen:
    """A step as it was traced. `donated`: positions of the leaves that it consumes. `hidden`: tensors that it took from outside.

    `left_out`: names of the passes that it does not go through. `traced_s`: how long the trace took.
    """

    traced: Traced
    program: Program
    donated: tuple[int, ...]
    hidden: tuple[torch.Tensor, ...]
    left_out: frozenset[str]
    traced_s: float

    @property
    def first_hidden(self) -> int:
        """Position of the first hidden input: behind the caller's leaves and the seed."""
        return len(self.traced.names) + self.traced.uses_seed


@attrs.frozen
class Placed:
    """Inputs that lie somewhere already, by value id.

    `fixed`: they stay there. `rows`: of batches, which a plan may lay otherwise, axis by axis. `state`: as a file had it, or another step;
    all of it stays, or all of it is placed anew (a parameter and its moments belong together).
    """

    fixed: dict[int, Layout]
    rows: dict[int, Layout]
    state: dict[int, Layout]

    @staticmethod
    def of_leaves(program: Program, leaves: Sequence[torch.Tensor | None]) -> Placed:
        placed = Placed({}, {}, {})
        for position, leaf in enumerate(leaves):
            if not isinstance(leaf, DTensor):
                continue
            layouts = placed.fixed
            if leaf.movable:
                layouts = placed.state if leaf.owned else placed.rows
            layouts[program.inputs[position]] = leaf.sharding
        return placed


@attrs.frozen(eq=False)
class Planning:
    """`named`: axis -> the plan that speaks for it. `axes`: those that are searched. `parts`: microbatches.

    `hooks`: of transforms. `asked`: what else decides the plan, for the key of the cache.
    """

    program: Program
    mesh: Mesh
    registry: Registry
    candidates: Candidates
    constraints: Constraints
    named: Mapping[str, str]
    axes: tuple[str, ...]
    budget_bytes: int | None
    parts: int
    completion: Completion
    hooks: tuple[Hook, ...]
    asked: tuple[Any, ...]
    missed: list[tuple[Constraints, Missed]] = attrs.field(factory=list, init=False)

    def search(self, says_least: bool = True) -> Outcome:
        """The plan that the cache has, else the best that is found.

        says_least: whether the least budget is looked for where nothing fits, for the error; otherwise this raises DoesNotFit, sooner, and
        the next call goes on from there.
        """
        key = key_of(self.program, self.mesh, self.registry, self.constraints, self.hooks, self.asked)
        from_nothing = partial(retried, partial(self._under, says_least=says_least), self.constraints, self.program)
        return remembered(key, from_nothing, self._rebuilt, env.say)

    def near(self, before: Sequence[Lowered], says_least: bool = True) -> Outcome:
        """Searched from where the plan of a like batch is, if there is one; else from nothing."""
        like = nearest(before, self.program)
        if like is None or self.missed:
            return self.search(says_least)
        try:
            return retried(partial(self._from, like), self.constraints, self.program)
        except PlanError:  # what it decided cannot be done with these sizes, or nothing near it keeps to the budget
            return self.search(says_least)

    def measured(self, plan: Plan) -> Outcome:
        """The sharding of `plan`, completed anew."""
        return finished(self.completion, self._decided_by(plan), self.budget_bytes)

    def stages(self, plan: Plan, decided: Decided | None) -> Stages:
        """What the program of `plan` goes through from lowering on, run again. decided: None on ranks that have only been told the plan."""
        completion = attrs.evolve(self.completion, keeps=True)
        done = self._finished(completion, self._decided_by(plan) if decided is None else decided, plan)
        last = Pass("one_call", lambda _: completion.ended(done)), Pass("order", lambda program: completion.order(program, inf))
        return (*done.stages, *run_passes(last, done.program, keep=True)[1])

    def _under(self, constraints: Constraints, says_least: bool = True) -> Outcome:
        missed = next((missed for under, missed in self.missed if under is constraints), None)
        if missed is None:
            self.candidates.memo = Memo()
            found = within(self.completion, self.candidates, constraints, self.named, self.budget_bytes, self.axes, self.parts)
            if not isinstance(found, Missed):
                return found
            missed = found
            self.missed.append((constraints, missed))
        if not says_least:
            raise missed.refused()
        return missed.plan()

    def _from(self, like: Lowered, constraints: Constraints) -> Outcome:
        """Searched from what `like` decides. Raises PlanError where that cannot be."""
        as_there = constraints | constraints_from(like.plan, self.program, like.mesh)
        self.candidates.memo = Memo()
        known = assigned(self.program, self.mesh, self.candidates, as_there, self.axes, None)
        return nearby(
            self.completion, self.candidates, constraints, self.named, self.budget_bytes, self.axes, self.parts, known
        )

    def _rebuilt(self, plan: Plan) -> Outcome:
        decided = self._decided_by(plan)
        return decided, self.completion.ended(self._finished(self.completion, decided, plan))

    def _finished(self, completion: Completion, decided: Decided, plan: Plan) -> Fitted:
        done = completion.finish(decided, self.budget_bytes)
        if self.budget_bytes is not None and not done.fits(self.budget_bytes):  # it was found for less
            done = completion.finish(decided, plan.budget_bytes)
        return done

    def _decided_by(self, plan: Plan) -> Decided:
        return decided_by(plan, self.program, self.mesh, self.candidates, self.constraints)


def gathered(
    staged: Staged,
    seen: Seen,
    priced: Mesh,
    registry: Registry,
    placed: Placed,
    before: Sequence[Lowered],
    timed: Timed | None,
    on_real_ranks: bool,
) -> Planning:
    """All that a plan is made by. priced: the mesh with the figures that count. timed: how long operators were measured to take."""
    sharding, program = staged.sharding, seen.program
    candidates = Candidates(program, priced, registry)
    constraints, named = wanted(
        program, seen.traced, priced, sharding, placed.fixed, placed.rows, staged.plan, candidates.rule_of, candidates.extra_of
    )
    budget_bytes = least_budget_of(staged, priced)
    build = Build(staged.build.transforms, priced, program=program, traced=seen.traced, registry=registry, constraints=constraints)
    build = build.evolve(budget_bytes=budget_bytes)
    build = through("constrain", build)
    build = through("candidates", build.evolve(constraints=staying(program, placed.state, build.constraints)))
    hidden = _placed_hidden(seen, staged.mesh, before, _tiers_stay(build.moves, placed, timed))
    constraints, wished = without_tiers(_as_placed(program, hidden.layouts, build.constraints), program)
    # From here on outputs share memory with inputs where the constraints let them.
    program = candidates.program = attrs.evolve(program, aliases=_tied(program, constraints))
    constraints = without_places(constraints, program, priced)
    placing = placing_of(program, constraints.at, priced, constraints.stages)
    if placing is not None:
        constraints = attrs.evolve(constraints, at={k: at for k, at in enumerate(placing.inputs) if at is not None})
    axes = priced.axis_names if sharding.auto else wished_axes(priced, constraints, named)
    staged_axes = {axis for axis, _ in constraints.at.values()}
    if staged_axes:  # plans offer layouts over all axes of the mesh, and know nothing of where values are placed
        constraints = constraints.offering_nothing_on(staged_axes)
        axes = tuple(axis for axis in axes if axis not in staged_axes)
    temporaries = staged.executor != "compiled"
    lies = _lies(seen, program, _input_tiers(program, placed, hidden), wished, build.moves)
    passes = _passes(build)
    completion = Completion(
        program=program,
        mesh=priced,
        rule_of=registry.rule,
        passes=passes,
        chunks=constraints.chunks,
        temporaries=temporaries,
        count=partial(held, mesh=priced, name=staged.executor),
        searches=build.searches,
        moves=build.moves or _given(lies),
        lies=lies,
        order=partial(_in_order, mesh=priced, executor=staged.executor),
        clocked=partial(as_executed, executor=staged.executor, mesh=priced, rule_of=registry.rule),
        ways=ways_of(build.alternatives),
        kernels=partial(with_kernels, mesh=priced, table=registry.kernels),
        timed=timed,
        wider=[transform.wider for transform in build.transforms if transform.wider],
        left_out=seen.left_out,
        placing=placing,
        room_bytes=budget_bytes,
        cuts_of=build.cuts_of,
    )
    parts = build.microbatches
    asked = (_asked(staged.transforms), sorted(named.items()), budget_bytes, axes, temporaries, parts, on_real_ranks, sorted(seen.left_out))
    return Planning(program, priced, registry, candidates, constraints, named, axes, budget_bytes, parts, completion, build.hooks, asked)


# ---- what the transforms ask for ----


def _asked(transforms: Sequence[Transform]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The options of each transform, as text: but for the mesh and the plugins, which the key of the cache has already."""
    asked = []
    for transform in transforms:
        sharding = {} if transform.sharding is None else attrs.asdict(transform.sharding, recurse=False)
        options = {**transform.options, **sharding}
        asked.append((transform.name, sorted((name, repr(value)) for name, value in options.items() if name not in ("mesh", "plugins"))))
    return asked


def least_budget_of(staged: Staged, priced: Mesh) -> int | None:
    """The smallest of what the device has and what transforms were given; None: without limit.

    Where ranks differ: what the roomiest has, and what the others lack to it counts as taken (`Completion`).
    """
    capacities = [priced.device_bytes(rank) for rank in (range(priced.size) if priced.topology.ranks else (0,))]
    limited = [each for each in capacities if each is not None]
    budgets = [max(limited, default=None)]
    for transform in staged.transforms:
        if transform.auto_budget:
            budgets.append(auto_bytes(priced))
        elif transform.budget is not None:
            budgets.append(bytes_in(priced, "device", transform.budget, f"cf.{transform.name}(budget", "6GiB"))
    return min((budget for budget in budgets if budget is not None), default=None)


def auto_bytes(priced: Mesh) -> int | None:
    """What a budget "auto" comes to on each device; None is unlimited. Ranks whose own device has less are kept to that as well.

    Of a CUDA card, found or named, what its context, libraries, communicators and fragments leave.
    """
    topology = priced.topology
    left_bytes = topology.tier("device").capacity_bytes
    card = None if capability_on(topology) is None else card_memory(topology, 0, priced.size, is_tight=True)
    if card is not None:
        left_bytes = card.budget_bytes
    elif left_bytes is not None:
        left_bytes -= topology.reserved_bytes
    return min((limit for limit in (left_bytes, topology.budget_bytes) if limit is not None), default=None)


def bytes_in(mesh: Mesh, tier: str, given: Room, said: str, such: str) -> int | None:
    """Bytes of a tier from (bytes, or a part of what a rank has). Raises PlanError for a part of what has no limit."""
    nbytes, part = given
    if nbytes is not None or part is None:
        return nbytes
    capacity = mesh.capacity_bytes(tier)
    if capacity is None:
        raise PlanError(
            f"{said}={part}) is a part of the {tier}'s memory, which topology {mesh.topology.name!r} does not limit; give bytes such as "
            f"{such!r}, or a topology"
        )
    return int(part * capacity)


def _passes(build: Build) -> list[Pass]:
    """Of plugins, by name, and behind them those of transforms."""
    by_plugins = build.registry.passes
    passes = [Pass(name, partial(_by_plugin, by_plugins[name], build.mesh)) for name in sorted(by_plugins)]
    return passes + rewrites("rewrite_local", build)


def _by_plugin(rewrite: Rewrite, mesh: Mesh, program: Program) -> Program:
    return rewrite(program, mesh)


def rewrites(hook: str, build: Build) -> list[Pass]:
    """One hook of all transforms that changes the program, as passes."""
    users = [transform for transform in build.transforms if getattr(transform, hook) is not None]
    return [Pass(f"{transform.name}.{hook}", partial(_rewritten, hook, transform, build)) for transform in users]


def _rewritten(hook: str, transform: Transform, build: Build, program: Program) -> Program:
    return transform.applied(hook, build.evolve(program=program)).program


def can_be_left_out(build: Build) -> list[str]:
    """Names of the passes that a step is right without, if not the same."""
    ours = [each.name for hook in ("rewrite_global", "rewrite_local") for each in rewrites(hook, build)]
    return [*REWRITES, *sorted(build.registry.passes), *ours]


def _in_order(program: Program, ahead_bytes: float, mesh: Mesh, executor: str | None) -> Program:
    """As the executor runs it, with at most so many bytes gathered ahead of their use."""
    return ordered(program, mesh, executor, ahead_bytes)


# ---- where inputs lie ----


def _tiers_stay(moves: Sequence[Move], placed: Placed, timed: Timed | None) -> bool:
    """Whether captured tensors stay in the tiers in which other steps have them: where this step works on the same state.

    Tiers of a step that has nothing to do with it, as of an earlier trial with the same model, say nothing here.
    """
    if moves:
        return bool(placed.fixed) or timed is not None
    return any(layout.tier != "device" for layout in placed.fixed.values())


@attrs.frozen
class _Hidden:
    """Position of a hidden input -> how it was placed; the positions of those that stay in their tiers, too."""

    layouts: Mapping[int, Layout]
    stay: frozenset[int]


def _placed_hidden(seen: Seen, mesh: Mesh, before: Sequence[Lowered], tiers_stay: bool) -> _Hidden:
    """What this step has placed stays where it is. What another one has placed stays in its tier only where `tiers_stay`."""
    own: dict[int, Layout] = {}
    for low in before:
        for tensor, layout in zip(low.hidden, low.hidden_layouts, strict=True):
            own[id(tensor)] = layout
    layouts: dict[int, Layout] = {}
    stay = set()
    for position, tensor in enumerate(seen.hidden, seen.first_hidden):
        lies = own.get(id(tensor)) or SHELF.layout(tensor, mesh)
        if lies is None:
            continue
        if tiers_stay or id(tensor) in own:
            layouts[position] = lies
            stay.add(position)
        else:
            layouts[position] = lies.with_tier("device")
    return _Hidden(layouts, frozenset(stay))


def _as_placed(program: Program, layouts: Mapping[int, Layout], constraints: Constraints) -> Constraints:
    """Frozen weights that another step has placed stay where they are, unless the user says otherwise."""
    items: dict[int, tuple[Constraint, ...]] = {}
    for position, layout in layouts.items():
        if position not in constraints.items:
            items[position] = (pin(layout, f"{program.values[program.inputs[position]].name} already lies as {layout.text()!r}"),)
    return constraints | Constraints(items)


def _input_tiers(program: Program, placed: Placed, hidden: _Hidden) -> dict[int, str]:
    """Position of an input -> the tier that it lies in already."""
    tiers = {position: "device" for position, value in enumerate(program.inputs) if value in placed.fixed}
    for position in hidden.stay:
        tiers[position] = hidden.layouts[position].tier
    return tiers


def _lies(seen: Seen, program: Program, lying: Mapping[int, str], wished: Mapping[int, str], moves: Sequence[Move]) -> Lies:
    """Where inputs lie. lying: position of an input -> the tier that it lies in already. wished: the one that the user wants it in."""
    captured = {}
    for position, tensor in enumerate(seen.hidden, seen.first_hidden):
        # Whoever holds a tensor in memory holds it as it is, not as it is read.
        as_it_is = tensor.dtype == program.values[program.inputs[position]].dtype
        captured[position] = not moves or (as_it_is and not isinstance(tensor, LazyTensor))
    return Lies({**lying, **wished}, captured)


def _given(lies: Lies) -> tuple[Move, ...]:
    """Where no transform writes copies but something does not lie on the device: plain ones, of what is needed."""
    return () if set(lies.tiers.values()) <= {"device"} else (_copied_in,)


def _copied_in(
    program: Program, mesh: Mesh, node_s: NodeS, budget_bytes: int | None, lies: Lies, /, *, like: Hint | None = None
) -> Offloaded:
    return offload(program, mesh, node_s, budget_bytes, policy=GIVEN, given=lies.tiers, like=like, captured=lies.captured)


def _tied(program: Program, constraints: Constraints) -> tuple[tuple[int, int], ...]:
    """Donated pairs whose output may lie as its input does: the user fixed no other layout, and nothing is pending but what stays so."""
    lies: dict[int, Layout] = {}
    for position, of_input in constraints.items.items():
        for constraint in of_input:
            for offer in constraint.offers:
                if position < len(program.inputs) and offer.outs[0] is not None:
                    lies[position] = offer.outs[0]
    pairs = []
    for out, into in program.aliases:
        if into in constraints.terms and out not in constraints.outputs:
            pairs.append((out, into))
            continue
        wanted_there, layout = constraints.outputs.get(out), lies.get(into)
        if (wanted_there is None or wanted_there is layout) and not (layout is not None and layout.pending):
            pairs.append((out, into))
    return tuple(pairs)
