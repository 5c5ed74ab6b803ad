"""From a function and its arguments to a lowered step: the whole planning flow on one page.

    trace -> simplify -> decide -> lower -> check -> plugin passes -> schedule -> in place

It happens once per signature (see `compile`). On real ranks all trace and compare, rank 0 plans for all.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc import env
from colofunc.dtensor.layout import Layout
from colofunc.dtensor.lazy import LazyTensor
from colofunc.dtensor.placed import SHELF
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import PlanError
from colofunc.executors.backend import held, ordered
from colofunc.executors.distributed import program_hash
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.mesh.sizes import Room, size_text
from colofunc.ops.kernels import Table
from colofunc.planner.describe import UNUSED
from colofunc.planner.offload.fastest import offload
from colofunc.planner.offload.policies import GIVEN
from colofunc.planner.plan import Plan
from colofunc.planner.seldom import seldom
from colofunc.planner.sharding.assign import Memo
from colofunc.planner.sharding.constraints import Constraint, Constraints, retried
from colofunc.plugins import bringing, build_registry
from colofunc.program.ir import Program, Value
from colofunc.program.passes.as_read import as_read
from colofunc.program.passes.kernels import with_kernels
from colofunc.program.passes.simplify import simplify
from colofunc.program.timed import Timed
from colofunc.program.tracing.lift import lift
from colofunc.program.tracing.roles import comes_back, first_result
from colofunc.program.tracing.trace import Traced, trace
from colofunc.transforms.agree import equal_captured, from_main, same, share
from colofunc.transforms.decide import Candidates, Decided
from colofunc.transforms.kept import as_before, is_again
from colofunc.transforms.lowered import Lowered
from colofunc.transforms.machine import as_measured
from colofunc.transforms.plan_cache import decided_by, key_of, remembered
from colofunc.transforms.staged import Intent, Staged
from colofunc.transforms.wanted import pin, wanted, wished_axes, without_tiers
from colofunc.transforms.within import AS_IT_IS, Ending, Rewrite, finished, within

MUCH_BYTES = 4 << 30
"""A plan that needs so much memory a rank is warned of where nobody has said what the machine has."""
IDLE = 0.25  # a plan that uses at most this share of the mesh's computing is warned of


def say(text: str) -> None:
    """One line to the person who waits."""
    if not env.switched_on("COLOFUNC_QUIET"):
        print(f"colofunc: {text}", file=sys.stderr, flush=True)


def mesh_of(staged: Staged) -> Mesh:
    """The mesh that `shard` was given, else a mesh of one."""
    intent = staged.intent("shard")
    mesh = intent.options["mesh"] if intent is not None else Mesh()
    if not isinstance(mesh, Mesh):
        raise PlanError(f"cf.shard wants a cf.Mesh as its second argument, not {mesh!r}; write cf.Mesh(dp=2)")
    return mesh


def _with_kernels(program: Program, mesh: Mesh, way: Rewrite, table: Table) -> Program:
    """What a way makes, and behind it which kernels its calls get."""
    return with_kernels(way(program, mesh), mesh, table)


def prepare(
    staged: Staged,
    args: tuple[Any, ...],
    leaves: Sequence[torch.Tensor | None],
    watch: Watch | None,
    measured: tuple[Plan, Timed] | None = None,
    before: Sequence[Lowered] = (),
) -> Lowered:
    """Trace, plan and lower for one signature. `leaves`: those that lie somewhere already stay there.

    `measured`: a plan whose sharding stands, and how long its operators take: what is kept, copied and made again is decided anew.
    `before`: what was prepared of this step for other signatures; see `kept`.
    """
    mesh = mesh_of(staged)
    intent = staged.intent("shard")
    options = dict(intent.options) if intent is not None else {}
    registry = build_registry((*options.get("plugins", ()), *bringing(options.get("plans", ()))))
    began = time.perf_counter()
    seen = partial(_seen, staged.reference, args, options.get("donate", "auto"))
    traced, program, donated, hidden = same(watch, "the traced program", seen, lambda made: _digest(mesh, made[1]))
    at = len(traced.names) + traced.uses_seed
    equal_captured(watch, program, {**program.constants, **dict(zip(program.inputs[at:], hidden, strict=False))})
    traced_s = time.perf_counter() - began
    placed = {program.inputs[i]: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}
    given = {id: leaf.sharding for id, leaf in placed.items() if not leaf.movable}
    usual = {id: leaf.sharding for id, leaf in placed.items() if leaf.movable}
    same_step = next((low for low in before if measured is None and is_again(low, program, donated, given)), None)
    if same_step is not None:
        return attrs.evolve(same_step, traced=traced, hidden=hidden)
    priced = as_measured(mesh, watch, say)
    candidates = Candidates(program, priced, registry)
    constraints, named = wanted(program, traced, priced, options, given, usual, staged.plan, candidates.rule_of, candidates.extra_of)
    moves = next((i.move for i in staged.intents if i.move is not None), None)
    shared = bool(given or measured) if moves is not None else any(layout.tier != "device" for layout in given.values())
    shelved, stay = _shelved(hidden, at, mesh, before, shared)
    constraints, tiers = without_tiers(_as_placed(program, shelved, constraints), program)
    for each in staged.intents:
        constraints = constraints | each.constrain(traced, program, registry) if each.constrain is not None else constraints
    program = candidates.program = attrs.evolve(program, aliases=_tied(program, constraints))
    axes = mesh.axis_names if options.get("auto", True) else wished_axes(priced, constraints, named)
    budgets = [priced.capacity_bytes("device"), *(_budget(i, priced) for i in staged.intents)]
    budget, temporaries = min((b for b in budgets if b is not None), default=None), staged.executor != "compiled"
    passes = [registry.passes[name] for name in sorted(registry.passes)]
    passes += [i.local for i in sorted(staged.intents, key=lambda i: i.transform) if i.local is not None]
    last = next((i.last(traced, registry, constraints) for i in staged.intents if i.last is not None), AS_IT_IS)
    ways = [partial(_with_kernels, way=way, table=registry.kernels) for way in last]
    parts = max((int(i.options.get("microbatches", 1)) for i in staged.intents), default=1)
    count = partial(held, mesh=priced, name=staged.executor)
    refit = next((i.refit for i in staged.intents if i.refit is not None), None)
    lying = {k: "device" for k, i in enumerate(program.inputs) if i in given}
    lying |= {k: shelved[k].tier for k in stay}
    tiers = {**lying, **tiers} if moves is not None or {*lying.values(), *tiers.values()} - {"device"} else {}
    # Whoever holds a tensor in memory holds it as it is, not as it is read.
    captured = {k: not isinstance(x, LazyTensor) and x.dtype == program.values[program.inputs[k]].dtype for k, x in enumerate(hidden, at)}
    plain = partial(offload, policy=GIVEN, given=tiers, captured=dict.fromkeys(captured, True)) if tiers else None
    move = moves(registry.memory_policies, tiers, captured) if moves is not None else plain
    order = lambda some, ahead_bytes: ordered(some, priced, staged.executor, ahead_bytes)  # noqa: E731
    wider, timed = [i.wider for i in staged.intents if i.wider], None if measured is None else measured[1]
    ending = Ending(program, priced, registry.rule, passes, constraints.chunks, temporaries, count, refit, move, order, ways, timed, wider)

    def plan_under(some: Constraints, name_least: bool = True) -> tuple[Decided, Program]:
        candidates.memo = Memo()
        return within(ending, candidates, some, named, budget, axes, parts, name_least=name_least)

    plan_it = partial(retried, plan_under, program=program)
    plan_alike = partial(retried, partial(plan_under, name_least=False), program=program)

    def again(plan: Plan) -> tuple[Decided, Program]:
        decided = decided_by(plan, program, priced, candidates, constraints)
        done = ending.finish(decided, budget)
        if budget is not None and not done.fits(budget):  # it was found for less
            done = ending.finish(decided, plan.budget_bytes)
        return decided, ending.ended(done)

    asked = [(i.transform, sorted((k, repr(v)) for k, v in i.options.items() if k not in ("mesh", "plugins"))) for i in staged.intents]
    real = staged.executor == "distributed" or watch is not None
    chain = (asked, sorted(named.items()), budget, axes, temporaries, parts, real)
    anew = lambda plan: finished(ending, decided_by(plan, program, priced, candidates, constraints), budget)  # noqa: E731

    def search() -> tuple[Decided, Program]:
        return remembered(key_of(program, priced, registry, constraints, chain), partial(plan_it, constraints), again, say)

    recall = partial(as_before, before, program, plan_alike, constraints, search) if measured is None else partial(anew, measured[0])
    with seldom():
        choices, plan, local = share(watch, from_main(watch, recall), program, candidates.rule_of)
    planned_s = time.perf_counter() - began - traced_s
    if traced_s + planned_s > 2 and mesh.is_main:
        say(f"trace {traced_s:.1f} s · plan {planned_s:.1f} s · {len(local.nodes)} operators")
    if priced.topology.reserved_bytes:
        plan = attrs.evolve(plan, notes=(*plan.notes, _margin(priced)))
    local = attrs.evolve(local, kernels=registry.kernels)
    ins, outs = layouts_of(local, local.inputs), layouts_of(local, local.outputs)
    low = Lowered(traced, program, choices, plan, local, mesh, priced, registry, ins, outs, donated, staged.executor, hidden)
    if mesh.size > 1 and mesh.is_main:
        _warn_of_idle_ranks(low)
    if mesh.is_main:
        _warn_of_unknown_machine(low)
    return low


def _margin(priced: Mesh) -> str:
    """What a plan does not use of a card."""
    usable_bytes, reserved_bytes = priced.capacity_bytes("device"), priced.topology.reserved_bytes
    return (
        f"of a card's memory plans may use {size_text(usable_bytes or 0)}; {size_text(reserved_bytes)} are left to what is there already, "
        "the driver's context, buffers of collectives and workspaces of libraries"
    )


def _warn_of_idle_ranks(low: Lowered) -> None:
    """A plan may be the cheapest that was found and still leave most of the machine without work of its own."""
    used = low.coverage().efficiency
    if used > IDLE:
        return
    idle = [use.axis for use in low.plan.axes if use.words == UNUSED]
    where = f" (every rank computes everything along {', '.join(idle)})" if idle else ""
    warnings.warn(
        f"the plan uses {used:.0%} of the computing of {low.mesh}{where}: by its estimate, splitting this step costs more than it saves. "
        "Try: a larger batch or model, fewer ranks, a topology that fits the machine, or a named plan such as zero(3, axis)",
        stacklevel=6,
    )


def _warn_of_unknown_machine(low: Lowered) -> None:
    """Where much memory is needed and nobody has said what the machine has, a plan is a guess."""
    peak_bytes = low.plan.peak_bytes
    if not low.priced.assumed or peak_bytes < MUCH_BYTES:
        return
    arguments = [f"{name}={size}" for name, size in low.mesh.axes]
    arguments.append('topology="8xa100-80g"')
    such_a_mesh = f"cf.Mesh({', '.join(arguments)})"
    warnings.warn(
        f"the plan needs {peak_bytes / 2**30:.1f} GiB a rank and {low.mesh} names no topology: memory counts as unlimited, and rates are "
        f"those of {low.priced.topology.name}, a small CPU box. Try: {such_a_mesh}, or the file that "
        "cf.profile_mesh(mesh).save(path) writes on the machine",
        stacklevel=6,
    )


def _budget(intent: Intent, mesh: Mesh) -> int | None:
    """The bytes that a transform was given, or its part of what a device has."""
    given = intent.options.get("budget_bytes"), intent.options.get("budget_part")
    return bytes_in(mesh, "device", given, f"cf.{intent.transform}(budget", "6GiB")


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


def _digest(mesh: Mesh, program: Program) -> str:
    """What must be equal on all ranks, but for the numbers that the step captured: these are compared by name."""
    return program_hash(attrs.evolve(program, constants={}), mesh)


def _tied(program: Program, constraints: Constraints) -> tuple[tuple[int, int], ...]:
    """Donated pairs whose output may lie as its input does: the user fixed no other layout, and nothing is pending."""
    lies: dict[int, Layout] = {}
    for position, some in constraints.items.items():
        for constraint in some:
            for offer in constraint.offers:
                if position < len(program.inputs) and offer.outs[0] is not None:
                    lies[position] = offer.outs[0]
    pairs = []
    for out, into in program.aliases:
        wanted_there, layout = constraints.outputs.get(out), lies.get(into)
        if (wanted_there is None or wanted_there is layout) and not (layout is not None and layout.pending):
            pairs.append((out, into))
    return tuple(pairs)


def _shelved(
    hidden: Sequence[torch.Tensor], at: int, mesh: Mesh, before: Sequence[Lowered], shared: bool
) -> tuple[dict[int, Layout], set[int]]:
    """(position of a hidden input -> how it was placed, positions of those that stay in their tiers, too). at: position of the first.

    What this step has placed stays where it is. What another one has placed stays in its tier only if its state is `shared` with this
    step: tiers of a step that has nothing to do with it, as of an earlier trial with the same model, say nothing here.
    """
    own = {id(tensor): layout for low in before for tensor, layout in zip(low.hidden, low.hidden_layouts, strict=True)}
    found, stay = dict[int, Layout](), set[int]()
    for position, tensor in enumerate(hidden, at):
        layout = own.get(id(tensor)) or SHELF.layout(tensor, mesh)
        if layout is None:
            continue
        if shared or id(tensor) in own:
            found[position] = layout
            stay.add(position)
        else:
            found[position] = layout.with_tier("device")
    return found, stay


def _as_placed(program: Program, shelved: Mapping[int, Layout], constraints: Constraints) -> Constraints:
    """Frozen weights that another step has placed stay where they are, unless the user says otherwise."""
    items: dict[int, tuple[Constraint, ...]] = {}
    for position, layout in shelved.items():
        if position not in constraints.items:
            items[position] = (pin(layout, f"{program.values[program.inputs[position]].name} already lies as {layout.text()!r}"),)
    return constraints | Constraints(items)


def _seen(
    fn: Callable[..., Any], args: tuple[Any, ...], donate: Any
) -> tuple[Traced, Program, tuple[int, ...], tuple[torch.Tensor, ...]]:
    """The step as it was traced, its program, which input leaves it consumes, and its hidden inputs."""
    traced = trace(fn, args)
    program, hidden = lift(simplify(traced.program), traced.captured)
    program = as_read(program, [i for i in program.inputs if i not in program.constants][len(traced.names) + traced.uses_seed :])
    donated, aliases = donation(traced, program, donate)
    return traced, attrs.evolve(program, aliases=aliases), donated, hidden


def layouts_of(program: Program, ids: Sequence[int]) -> tuple[Layout, ...]:
    """Where values of a local program lie."""
    found = tuple(program.values[i].layout for i in ids)
    assert all(layout is not None for layout in found), "inputs and outputs of a local program have layouts"
    return found  # type: ignore[return-value]


def donation(traced: Traced, program: Program, donate: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(positions of consumed input leaves, pairs (output, input) of leaves that may share memory).

    "auto": argument 0 is consumed where output 0 has the same tree, shapes and dtypes, and is no batch. `()` or None: nothing is.
    """
    if donate in ((), None, False):
        return (), ()
    args_tree = traced.in_tree.children[0]
    if not args_tree.children:
        return (), ()
    first, result = args_tree.children[0], first_result(traced.out_tree)
    n = len(first.names())
    before = [program.values[i] for i in program.inputs[:n]]
    after = [program.values[i] for i in program.outputs[:n]]
    if donate == "auto" and _is_batch(before, program):
        return (), ()
    matched = comes_back(first, result, before, after)
    if not matched:
        if donate != "auto":
            raise PlanError(
                f"donate={donate!r} cannot be met: output 0 has not the tree, shapes and dtypes of argument 0 ({first.name!r}); "
                'return the new state first, or use donate="auto"'
            )
        return (), ()
    return tuple(range(n)), tuple((i, i) for i in range(n))


def _is_batch(leaves: Sequence[Value], program: Program) -> bool:
    """Whether these are rows that a step with weights elsewhere reads: what it returns of their shape is not their next value."""
    weights = any(program.values[i].role == "param" for i in program.inputs)
    return weights and all(leaf.role == "batch" for leaf in leaves)
