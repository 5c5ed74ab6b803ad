"""What one signature of a step is planned by, and the ways to come to a plan.

Problem: transforms record intents one by one, arguments lie somewhere already, other steps have placed what this one captured, and a
plan is asked for in several ways: from nothing, as the plan of another length, from the cache. Idea: gather all of it once, in a record;
each way is a method of it, and all of them end alike.

    planning = gathered(staged, seen, priced, registry, placed, before, measured)
    planning.search(say)                   # from the cache, else from nothing
    planning.near(before, say)             # as the plan of a like batch did, else as above
    planning.measured(plan)                # the sharding of a plan stands: what is kept, copied and made again is decided anew

Each gives what was decided, and the program that a rank runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.compiler.budget import AS_IT_IS, Ending, Move, Rewrite, finished, within
from colofunc.compiler.decide import Candidates, Decided
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.plan_cache import decided_by, key_of, remembered
from colofunc.compiler.plan_reuse import as_before
from colofunc.compiler.staged import Intent, Staged
from colofunc.compiler.user_constraints import pin, wanted, wished_axes, without_tiers
from colofunc.dtensor.layout import Layout
from colofunc.dtensor.lazy import LazyTensor
from colofunc.dtensor.placed import SHELF
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import PlanError
from colofunc.executors.backend import held, ordered
from colofunc.mesh import Mesh
from colofunc.mesh.found import auto_bytes
from colofunc.mesh.sizes import Room
from colofunc.ops.kernels import Table
from colofunc.planner.offload.fastest import offload
from colofunc.planner.offload.policies import GIVEN
from colofunc.planner.plan import Plan
from colofunc.planner.sharding.assign import Memo
from colofunc.planner.sharding.constraints import Constraint, Constraints, retried
from colofunc.plugins.registry import Registry
from colofunc.program.ir import Program
from colofunc.program.passes.kernels import with_kernels
from colofunc.program.timed import Timed
from colofunc.program.tracing.trace import Traced

Outcome = tuple[Decided, Program]
"""What was decided, and the program that a rank runs."""


@attrs.frozen(eq=False)
class Seen:
    """A step as it was traced. `donated`: positions of the leaves that it consumes. `hidden`: tensors that it took from outside."""

    traced: Traced
    program: Program
    donated: tuple[int, ...]
    hidden: tuple[torch.Tensor, ...]

    @property
    def first_hidden(self) -> int:
        """Position of the first hidden input: behind the caller's leaves and the seed."""
        return len(self.traced.names) + self.traced.uses_seed


@attrs.frozen
class Placed:
    """Inputs that lie somewhere already, by value id. `movable`: those that a plan may place anew, and the others."""

    fixed: Mapping[int, Layout]
    movable: Mapping[int, Layout]

    @staticmethod
    def of_leaves(program: Program, leaves: Sequence[torch.Tensor | None]) -> Placed:
        fixed: dict[int, Layout] = {}
        movable: dict[int, Layout] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, DTensor):
                layouts = movable if leaf.movable else fixed
                layouts[program.inputs[position]] = leaf.sharding
        return Placed(fixed, movable)


@attrs.frozen(eq=False)
class Planning:
    """`named`: axis -> the plan that speaks for it. `axes`: those that are searched. `parts`: microbatches.

    `asked`: what else decides the plan, for the key of the cache.
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
    ending: Ending
    asked: tuple[Any, ...]

    def search(self, say: Callable[[str], None]) -> Outcome:
        """The plan that the cache has, else the best that is found."""
        key = key_of(self.program, self.mesh, self.registry, self.constraints, self.asked)
        from_nothing = partial(retried, self._under, self.constraints, self.program)
        return remembered(key, from_nothing, self._rebuilt, say)

    def near(self, before: Sequence[Lowered], say: Callable[[str], None]) -> Outcome:
        """Decided as the plan of a like batch was, where that can be; else searched."""
        plan = partial(retried, partial(self._under, name_least=False), program=self.program)
        return as_before(before, self.program, plan, self.constraints, partial(self.search, say))

    def measured(self, plan: Plan) -> Outcome:
        """The sharding of `plan`, completed anew."""
        return finished(self.ending, self._decided_by(plan), self.budget_bytes)

    def _under(self, constraints: Constraints, name_least: bool = True) -> Outcome:
        self.candidates.memo = Memo()
        return within(
            self.ending, self.candidates, constraints, self.named, self.budget_bytes, self.axes, self.parts, name_least=name_least
        )

    def _rebuilt(self, plan: Plan) -> Outcome:
        decided = self._decided_by(plan)
        done = self.ending.finish(decided, self.budget_bytes)
        if self.budget_bytes is not None and not done.fits(self.budget_bytes):  # it was found for less
            done = self.ending.finish(decided, plan.budget_bytes)
        return decided, self.ending.ended(done)

    def _decided_by(self, plan: Plan) -> Decided:
        return decided_by(plan, self.program, self.mesh, self.candidates, self.constraints)


def mesh_of(staged: Staged) -> Mesh:
    """The mesh that `shard` was given, else a mesh of one."""
    intent = staged.intent("shard")
    mesh = intent.options["mesh"] if intent is not None else Mesh()
    if not isinstance(mesh, Mesh):
        raise PlanError(f"cf.shard wants a cf.Mesh as its second argument, not {mesh!r}; write cf.Mesh(dp=2)")
    return mesh


def shard_options(staged: Staged) -> dict[str, Any]:
    """What `cf.shard` was given."""
    intent = staged.intent("shard")
    return {} if intent is None else dict(intent.options)


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
    options, program = shard_options(staged), seen.program
    candidates = Candidates(program, priced, registry)
    constraints, named = wanted(
        program, seen.traced, priced, options, placed.fixed, placed.movable, staged.plan, candidates.rule_of, candidates.extra_of
    )
    hidden = _placed_hidden(seen, mesh_of(staged), before, _tiers_stay(staged, placed, timed))
    constraints, tiers = without_tiers(_as_placed(program, hidden.layouts, constraints), program)
    for each in staged.intents:
        if each.constrain is not None:
            constraints = constraints | each.constrain(seen.traced, program, registry)
    # From here on outputs share memory with inputs where the constraints let them.
    program = candidates.program = attrs.evolve(program, aliases=_tied(program, constraints))
    axes = priced.axis_names if options.get("auto", True) else wished_axes(priced, constraints, named)
    budget_bytes = _least_budget(staged, priced)
    parts = max((int(i.options.get("microbatches", 1)) for i in staged.intents), default=1)
    temporaries = staged.executor != "compiled"
    ending = Ending(
        program=program,
        mesh=priced,
        rule_of=registry.rule,
        passes=_passes(staged, registry),
        chunks=constraints.chunks,
        temporaries=temporaries,
        count=partial(held, mesh=priced, name=staged.executor),
        refit=next((i.refit for i in staged.intents if i.refit is not None), None),
        move=_move(staged, registry, seen, program, _input_tiers(program, placed, hidden), tiers),
        order=partial(_in_order, mesh=priced, executor=staged.executor),
        ways=_ways(staged, seen, registry, constraints),
        timed=timed,
        wider=[i.wider for i in staged.intents if i.wider],
    )
    asked = (_asked(staged.intents), sorted(named.items()), budget_bytes, axes, temporaries, parts, on_real_ranks)
    return Planning(program, priced, registry, candidates, constraints, named, axes, budget_bytes, parts, ending, asked)


# ---- what the intents ask for ----


def _asked(intents: Sequence[Intent]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The options of each transform, as text: but for the mesh and the plugins, which the key of the cache has already."""
    asked = []
    for intent in intents:
        options = [(name, repr(value)) for name, value in intent.options.items() if name not in ("mesh", "plugins")]
        asked.append((intent.transform, sorted(options)))
    return asked


def _least_budget(staged: Staged, priced: Mesh) -> int | None:
    """The smallest of what the device has and what transforms were given; None: without limit."""
    budgets = [priced.capacity_bytes("device")]
    for intent in staged.intents:
        given = intent.options.get("budget_bytes"), intent.options.get("budget_part")
        if is_auto(intent):
            budgets.append(auto_bytes(priced.topology))
        budgets.append(bytes_in(priced, "device", given, f"cf.{intent.transform}(budget", "6GiB"))
    return min((budget for budget in budgets if budget is not None), default=None)


def is_auto(intent: Intent) -> bool:
    """Whether a transform that keeps to a budget was given "auto"."""
    keeps_to_a_budget = "budget_part" in intent.options
    return keeps_to_a_budget and intent.options["budget_bytes"] is None and intent.options["budget_part"] is None


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


def _passes(staged: Staged, registry: Registry) -> list[Rewrite]:
    """Of plugins, by name, and behind them those of transforms."""
    passes = [registry.passes[name] for name in sorted(registry.passes)]
    for intent in sorted(staged.intents, key=lambda i: i.transform):
        if intent.local is not None:
            passes.append(intent.local)
    return passes


def _ways(staged: Staged, seen: Seen, registry: Registry, constraints: Constraints) -> list[Rewrite]:
    """Alternative final passes, the fastest first; behind each of them it is settled which kernels its calls get."""
    last = AS_IT_IS
    for intent in staged.intents:
        if intent.last is not None:
            last = intent.last(seen.traced, registry, constraints)
            break
    return [partial(_with_kernels, way=way, table=registry.kernels) for way in last]


def _with_kernels(program: Program, mesh: Mesh, way: Rewrite, table: Table) -> Program:
    return with_kernels(way(program, mesh), mesh, table)


def _in_order(program: Program, ahead_bytes: float, mesh: Mesh, executor: str | None) -> Program:
    """As the executor runs it, with at most so many bytes gathered ahead of their use."""
    return ordered(program, mesh, executor, ahead_bytes)


# ---- where inputs lie ----


def _moves(staged: Staged) -> Callable[..., Move] | None:
    """What writes copies between tiers, where a transform asks for them."""
    return next((i.move for i in staged.intents if i.move is not None), None)


def _tiers_stay(staged: Staged, placed: Placed, timed: Timed | None) -> bool:
    """Whether captured tensors stay in the tiers in which other steps have them: where this step works on the same state.

    Tiers of a step that has nothing to do with it, as of an earlier trial with the same model, say nothing here.
    """
    if _moves(staged) is not None:
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


def _move(
    staged: Staged, registry: Registry, seen: Seen, program: Program, lying: Mapping[int, str], wished: Mapping[int, str]
) -> Move | None:
    """What writes copies between tiers: the transform's, else a plain one where something does not lie on the device.

    lying: position of an input -> the tier that it lies in already. wished: the one that the user wants it in.
    """
    captured = {}
    for position, tensor in enumerate(seen.hidden, seen.first_hidden):
        # Whoever holds a tensor in memory holds it as it is, not as it is read.
        as_it_is = tensor.dtype == program.values[program.inputs[position]].dtype
        captured[position] = as_it_is and not isinstance(tensor, LazyTensor)
    moves = _moves(staged)
    tiers = {**lying, **wished}
    if moves is not None:
        return moves(registry.memory_policies, tiers, captured)
    if {*lying.values(), *wished.values()} <= {"device"}:
        return None
    return partial(offload, policy=GIVEN, given=tiers, captured=dict.fromkeys(captured, True))


def _tied(program: Program, constraints: Constraints) -> tuple[tuple[int, int], ...]:
    """Donated pairs whose output may lie as its input does: the user fixed no other layout, and nothing is pending."""
    lies: dict[int, Layout] = {}
    for position, of_input in constraints.items.items():
        for constraint in of_input:
            for offer in constraint.offers:
                if position < len(program.inputs) and offer.outs[0] is not None:
                    lies[position] = offer.outs[0]
    pairs = []
    for out, into in program.aliases:
        wanted_there, layout = constraints.outputs.get(out), lies.get(into)
        if (wanted_there is None or wanted_there is layout) and not (layout is not None and layout.pending):
            pairs.append((out, into))
    return tuple(pairs)
