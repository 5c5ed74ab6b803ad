"""From a function and its arguments to a lowered step: the whole planning flow on one page.

    trace -> simplify -> decide -> lower -> check -> plugin passes -> schedule -> in place

It happens once per signature (see `compile`). On real ranks all trace and compare, rank 0 plans for all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
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
from colofunc.mesh.sizes import Room
from colofunc.planner.offload.fastest import offload
from colofunc.planner.plan import Plan
from colofunc.planner.seldom import seldom
from colofunc.planner.sharding.assign import Memo
from colofunc.planner.sharding.constraints import Constraint, Constraints, retried
from colofunc.plugins import bringing, build_registry
from colofunc.program.ir import Program
from colofunc.program.passes.simplify import simplify
from colofunc.program.timed import Timed
from colofunc.program.tracing.lift import lift
from colofunc.program.tracing.trace import Traced, trace
from colofunc.program.tracing.tree import Tree
from colofunc.transforms.agree import equal_captured, from_main, same, share
from colofunc.transforms.decide import Candidates, Decided
from colofunc.transforms.lowered import Lowered
from colofunc.transforms.plan_cache import decided_by, key_of, remembered
from colofunc.transforms.staged import Intent, Staged
from colofunc.transforms.wanted import pin, wanted, wished_axes, without_tiers
from colofunc.transforms.within import AS_IT_IS, Ending, finished, within


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


def prepare(
    staged: Staged,
    args: tuple[Any, ...],
    leaves: Sequence[torch.Tensor | None],
    watch: Watch | None,
    measured: tuple[Plan, Timed] | None = None,
) -> Lowered:
    """Trace, plan and lower for one signature. `leaves`: those that lie somewhere already stay there.

    `measured`: a plan whose sharding stands, and how long its operators take: what is kept, copied and made again is decided anew.
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
    given = {program.inputs[i]: leaf.sharding for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}
    candidates = Candidates(program, mesh, registry)
    constraints, named = wanted(program, traced, mesh, options, given, staged.plan, candidates.rule_of, candidates.extra_of)
    constraints, tiers = without_tiers(_as_placed(program, traced, hidden, mesh, constraints), program)
    for each in staged.intents:
        constraints = constraints | each.constrain(traced, program, registry) if each.constrain is not None else constraints
    program = candidates.program = attrs.evolve(program, aliases=_tied(program, constraints))
    axes = mesh.axis_names if options.get("auto", True) else wished_axes(mesh, constraints, named)
    budgets = [mesh.capacity_bytes("device"), *(_budget(i, mesh) for i in staged.intents)]
    budget, temporaries = min((b for b in budgets if b is not None), default=None), staged.executor != "compiled"
    passes = [registry.passes[name] for name in sorted(registry.passes)]
    passes += [i.local for i in sorted(staged.intents, key=lambda i: i.transform) if i.local is not None]
    ways = next((i.last(traced, registry, constraints) for i in staged.intents if i.last is not None), AS_IT_IS)
    parts = max((int(i.options.get("microbatches", 1)) for i in staged.intents), default=1)
    count = partial(held, mesh=mesh, name=staged.executor)
    refit = next((i.refit for i in staged.intents if i.refit is not None), None)
    moves = next((i.move for i in staged.intents if i.move is not None), None)
    lying = {k: "device" for k, i in enumerate(program.inputs) if i in given}
    lying |= {k: layout.tier for k, x in enumerate(hidden, at) if (layout := SHELF.layout(x, mesh)) is not None}
    tiers = {**lying, **tiers} if moves is not None or {*lying.values(), *tiers.values()} - {"device"} else {}
    captured = {k: not isinstance(x, LazyTensor) for k, x in enumerate(hidden, at)}
    plain = partial(offload, given=tiers, captured=dict.fromkeys(captured, True)) if tiers else None
    move = moves(registry.memory_policies, tiers, captured) if moves is not None else plain
    order = lambda some, ahead_bytes: ordered(some, mesh, staged.executor, ahead_bytes)  # noqa: E731
    wider, timed = [i.wider for i in staged.intents if i.wider], None if measured is None else measured[1]
    ending = Ending(program, mesh, registry.rule, passes, constraints.chunks, temporaries, count, refit, move, order, ways, timed, wider)

    def plan_under(some: Constraints) -> tuple[Decided, Program]:
        candidates.memo = Memo()
        return within(ending, candidates, some, named, budget, axes, parts)

    plan_it = partial(retried, plan_under, constraints, program)

    def again(plan: Plan) -> tuple[Decided, Program]:
        decided = decided_by(plan, program, mesh, candidates, constraints)
        return decided, ending.finish(decided, budget).program

    asked = [(i.transform, sorted((k, repr(v)) for k, v in i.options.items() if k not in ("mesh", "plugins"))) for i in staged.intents]
    real = staged.executor == "distributed" or watch is not None
    chain = (asked, sorted(named.items()), budget, axes, temporaries, parts, real)
    anew = lambda plan: finished(ending, decided_by(plan, program, mesh, candidates, constraints), budget)  # noqa: E731
    recall = lambda: remembered(key_of(program, mesh, registry, constraints, chain), plan_it, again, say)  # noqa: E731
    recall = recall if measured is None else partial(anew, measured[0])
    with seldom():
        choices, plan, local = share(watch, from_main(watch, recall), program, candidates.rule_of)
    planned_s = time.perf_counter() - began - traced_s
    if traced_s + planned_s > 2 and mesh.is_main:
        say(f"trace {traced_s:.1f} s · plan {planned_s:.1f} s · {len(local.nodes)} operators")
    ins, outs = layouts_of(local, local.inputs), layouts_of(local, local.outputs)
    return Lowered(traced, program, choices, plan, local, mesh, registry, ins, outs, donated, staged.executor, hidden)


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


def _as_placed(
    program: Program, traced: Traced, hidden: Sequence[torch.Tensor], mesh: Mesh, constraints: Constraints
) -> Constraints:
    """Frozen weights that another step has placed stay where they are, unless the user says otherwise."""
    items: dict[int, tuple[Constraint, ...]] = {}
    for position, tensor in enumerate(hidden, len(traced.names) + traced.uses_seed):
        layout = SHELF.layout(tensor, mesh)
        if layout is not None and position not in constraints.items:
            items[position] = (pin(layout, f"{program.values[program.inputs[position]].name} already lies as {layout.text()!r}"),)
    return constraints | Constraints(items)


def _seen(
    fn: Callable[..., Any], args: tuple[Any, ...], donate: Any
) -> tuple[Traced, Program, tuple[int, ...], tuple[torch.Tensor, ...]]:
    """The step as it was traced, its program, which input leaves it consumes, and its hidden inputs."""
    traced = trace(fn, args)
    program, hidden = lift(simplify(traced.program), traced.captured)
    donated, aliases = donation(traced, program, donate)
    return traced, attrs.evolve(program, aliases=aliases), donated, hidden


def layouts_of(program: Program, ids: Sequence[int]) -> tuple[Layout, ...]:
    """Where values of a local program lie."""
    found = tuple(program.values[i].layout for i in ids)
    assert all(layout is not None for layout in found), "inputs and outputs of a local program have layouts"
    return found  # type: ignore[return-value]


def donation(traced: Traced, program: Program, donate: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(positions of consumed input leaves, pairs (output, input) of leaves that may share memory).

    "auto": argument 0 is consumed where output 0 has the same tree, shapes and dtypes. `()` or None: nothing is.
    """
    if donate in ((), None, False):
        return (), ()
    args_tree = traced.in_tree.children[0]
    if not args_tree.children:
        return (), ()
    first, out = args_tree.children[0], traced.out_tree
    result = out.children[0] if out.kind in ("sequence", "namedtuple") and out.type is not list and out.children else out
    n, m = len(first.names()), len(result.names())
    matched = n == m and n > 0 and _shape_of_tree(first) == _shape_of_tree(result)
    if matched:
        for i in range(n):
            a, b = program.values[program.inputs[i]], program.values[program.outputs[i]]
            matched = matched and (a.shape, a.dtype) == (b.shape, b.dtype)
    if not matched:
        if donate != "auto":
            raise PlanError(
                f"donate={donate!r} cannot be met: output 0 has not the tree, shapes and dtypes of argument 0 ({first.name!r}); "
                'return the new state first, or use donate="auto"'
            )
        return (), ()
    return tuple(range(n)), tuple((i, i) for i in range(n))


def _shape_of_tree(tree: Tree) -> Any:
    return (tree.kind, tree.type, tree.keys, tuple(_shape_of_tree(c) for c in tree.children))
