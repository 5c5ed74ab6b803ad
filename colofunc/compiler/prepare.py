"""From a function and its arguments to a lowered step: the whole planning flow on one page.

    trace -> simplify -> lift -> as_read -> rewrite_global -> constraints, candidates -> plan -> completion

The passes in front of the plan are here, those behind it in `completion`. It happens once per signature (see
`step_compiler`). On real ranks all trace and compare, rank 0 plans for all.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc import env, progress
from colofunc.compiler.decisions import Decisions
from colofunc.compiler.input_places import PlacedInputs, TracedStep
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.machine import as_measured
from colofunc.compiler.memory_limits import auto_bytes, device_limit_bytes
from colofunc.compiler.passes import Pass, PassOutput, PassOutputs, left_out, run_passes
from colofunc.compiler.plan_cache import is_again
from colofunc.compiler.planning import Outcome, Planning, can_be_left_out, planning_of, rewrites
from colofunc.compiler.rank_agreement import equal_captured, same, share
from colofunc.compiler.staged import Staged
from colofunc.compiler.transform import Build
from colofunc.compiler.variants import Ways, planned
from colofunc.dtensor.roles import role_of
from colofunc.errors import PlanError
from colofunc.executors.backend import planned_on_real_ranks
from colofunc.executors.rank_program import program_hash
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.mesh.card import card_memory
from colofunc.mesh.sizes import size_text
from colofunc.planner.describe import UNUSED
from colofunc.planner.plan import Plan
from colofunc.planner.stages.report import one_stage_works
from colofunc.plugins import build_registry
from colofunc.program.check import check_program
from colofunc.program.ir import Program, Value
from colofunc.program.passes.kernels import capability_on
from colofunc.program.passes.narrow_captures import as_read
from colofunc.program.passes.simplify import simplify
from colofunc.program.post_validation import deferred_parts, validates_late
from colofunc.program.timed import Timed
from colofunc.program.tracing.captured import lift
from colofunc.program.tracing.roles import comes_back, results_of
from colofunc.program.tracing.trace import Traced, trace
from colofunc.program.tracing.tree import Tree
from colofunc.spec.layout import Layout

MUCH_BYTES = 4 << 30
"""Where nobody has said what the machine has, a plan that needs at least this much memory a rank is warned of."""
IDLE = 0.25
"""A plan that uses at most this share of the mesh's computing is warned of."""
SLOW_S = 2.0
"""Where tracing and planning take longer, a line says so."""


def prepare(
    staged: Staged,
    args: tuple[Any, ...],
    leaves: Sequence[torch.Tensor | None],
    watch: Watch | None,
    measured: tuple[Plan, Timed] | None = None,
    before: Sequence[Lowered] = (),
    says_least: bool = True,
) -> Lowered:
    """Trace, plan and lower for one signature. `leaves`: those that lie somewhere already stay there.

    `measured`: a plan whose sharding stands, and how long its operators take: what is kept, copied and made again is
    decided anew. `before`: what was prepared of this step for other signatures; see `plan_cache`. `says_least`: whether
    the error says the least budget where nothing fits.
    """
    mesh, sharding = staged.mesh, staged.sharding
    registry = build_registry(sharding.all_plugins)
    build = staged.build.evolve(registry=registry)
    without = left_out(can_be_left_out(build))
    began = time.perf_counter()
    seen = _seen_alike(watch, mesh, partial(_seen, build, staged.reference, args, sharding.donate, without))
    traced_s = time.perf_counter() - began
    placed = PlacedInputs.of_leaves(seen.program, leaves)
    if measured is None:
        for low in before:
            if is_again(low, seen.program, seen.donated, placed.fixed):
                return attrs.evolve(low, traced=seen.traced, hidden=seen.hidden)
    priced = as_measured(mesh, watch, env.say)
    real = planned_on_real_ranks(mesh, staged.executor) or watch is not None
    timed = None if measured is None else measured[1]

    def planned_by(way: Staged) -> Planning:
        return planning_of(way, seen, priced, registry, placed, before, timed, real)

    def recall(planning: Planning, last: bool) -> Outcome:
        return planning.near(before, last and says_least) if measured is None else planning.measured(measured[0])

    traced_build = build.evolve(
        mesh=priced, program=seen.program, traced=seen.traced, budget_bytes=device_limit_bytes(staged, priced)
    )
    ways = Ways.of(staged, traced_build, staged.plan if measured is None else measured[0])
    # Behind the trace, in which the step may ask its user something.
    with progress.line("planning", mesh.is_main):
        planning, made = planned(ways, planned_by, recall, watch)
    choices, plan, local = share(watch, made, planning.program, planning.candidates.rule_of)
    planned_s = time.perf_counter() - began - traced_s
    if traced_s + planned_s > SLOW_S and mesh.is_main:
        env.say(f"trace {traced_s:.1f} s · plan {planned_s:.1f} s · {len(local.nodes)} operators")
    notes = _notes(staged, planning, priced, plan, local)
    taken = tuple(pair for transform in staged.transforms for pair in transform.taken)
    plan = attrs.evolve(plan, card=_card(priced, plan), notes=(*plan.notes, *notes), taken=taken)
    low = Lowered(
        traced=seen.traced,
        global_program=planning.program,
        choices=choices,
        plan=plan,
        program=attrs.evolve(local, kernels=registry.kernels),
        mesh=mesh,
        priced=priced,
        registry=registry,
        input_layouts=layouts_of(local, local.inputs),
        output_layouts=layouts_of(local, local.outputs),
        donated=seen.donated,
        executor=staged.executor,
        hidden=seen.hidden,
        left_out=without,
        stages_of=partial(_stages, build, seen, planning, plan, None if made is None else made[0]),
    )
    if validates_late(low.program):
        deferred_parts(low.program, priced)  # raises where it has none
    if mesh.size > 1 and mesh.is_main:
        _warn_of_idle_ranks(low)
    if mesh.is_main:
        _warn_of_unknown_machine(low)
    return low


def _notes(staged: Staged, planning: Planning, priced: Mesh, plan: Plan, local: Program) -> list[str]:
    """What a plan says beside its decisions: the margin of memory, a pipeline of one stage, and what transforms have to
    say.
    """
    notes: list[str] = []
    if priced.topology.reserved_bytes:
        notes.append(_margin(priced))
    if any(transform.auto_budget for transform in staged.transforms) and auto_bytes(priced) != priced.capacity_bytes(
        "device"
    ):
        notes.append(_auto(priced))
    stages = planning.constraints.stages
    in_a_row = stages is not None and staged.mesh.axis_size(stages.axis) > 1 and planning.parts > 1
    if stages is not None and in_a_row and plan.pipeline is None:
        idle = one_stage_works(stages.axis, planning.parts)
        notes.append(idle)
        if staged.mesh.is_main:
            warnings.warn(idle, stacklevel=6)
    for transform in staged.transforms:
        notes += transform.notes
        if transform.says is not None:
            notes += transform.says(planning.program, local)
    return notes


def _seen_alike(watch: Watch | None, mesh: Mesh, see: Callable[[], TracedStep]) -> TracedStep:
    """The step as all ranks have traced it. Collective."""
    seen = same(watch, "the traced program", see, lambda seen: _digest(mesh, seen.program))
    hidden = zip(seen.program.inputs[seen.first_hidden :], seen.hidden, strict=False)
    equal_captured(watch, seen.program, {**seen.program.constants, **dict(hidden)})
    return seen


def _margin(priced: Mesh) -> str:
    """What a plan does not use of a card that was found."""
    reserved_bytes = priced.topology.reserved_bytes
    usable_bytes = (priced.topology.tier("device").capacity_bytes or 0) - reserved_bytes
    return (
        f"of a card's memory plans may use {size_text(usable_bytes)}; {size_text(reserved_bytes)} are left to what is "
        "there already, the driver's context, buffers of collectives and workspaces of libraries"
    )


def _card(priced: Mesh, plan: Plan) -> tuple[str, ...]:
    """What a CUDA card holds of the plan, in lines; () for other devices."""
    if capability_on(priced.topology) is None:
        return ()
    card = card_memory(priced.topology, plan.peak_bytes, priced.size, is_tight=bool(plan.memory))
    return () if card is None else card.lines()


def _auto(priced: Mesh) -> str:
    """What a budget "auto" leaves of a card."""
    capacity_bytes = priced.topology.tier("device").capacity_bytes
    return (
        f"a budget 'auto' is {size_text(auto_bytes(priced) or 0)} of a card of {size_text(capacity_bytes or 0)}: the "
        "rest is for the driver's context, libraries, buffers of collectives, and what the caching allocator may lose "
        "to fragments. A budget in bytes is taken as it is"
    )


def _warn_of_idle_ranks(low: Lowered) -> None:
    """A plan may be the cheapest that was found and still leave most of the machine without work of its own."""
    used = low.coverage().efficiency
    if used > IDLE:
        return
    idle = [use.axis for use in low.plan.axes if use.words == UNUSED]
    where = f" (every rank computes everything along {', '.join(idle)})" if idle else ""
    warnings.warn(
        f"the plan uses {used:.0%} of the computing of {low.mesh}{where}: by its estimate, splitting this step costs "
        "more than it saves. Try: a larger batch or model, fewer ranks, a topology that fits the machine, or a named "
        "plan such as zero(3, axis)",
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
        f"the plan needs {peak_bytes / 2**30:.1f} GiB a rank and {low.mesh} names no topology: memory counts as "
        f"unlimited, and rates are those of {low.priced.topology.name}, a small CPU box. Try: {such_a_mesh}, or the "
        "file that cf.profile_mesh(mesh).save(path) writes on the machine",
        stacklevel=6,
    )


def _digest(mesh: Mesh, program: Program) -> str:
    """What must be equal on all ranks, but for the numbers that the step captured: these are compared by name."""
    return program_hash(attrs.evolve(program, constants={}), mesh)


def _seen(
    build: Build, fn: Callable[..., Any], args: tuple[Any, ...], donate: Any, without: frozenset[str]
) -> TracedStep:
    began = time.perf_counter()
    traced = trace(fn, args, role_of=role_of)
    traced_s = time.perf_counter() - began
    program, hidden, _ = _global(build, traced, without)
    donated, aliases = donation(traced, program, donate)
    return TracedStep(traced, attrs.evolve(program, aliases=aliases), donated, hidden, without, traced_s)


def _global(
    build: Build, traced: Traced, without: frozenset[str], keep: bool = False
) -> tuple[Program, tuple[torch.Tensor, ...], PassOutputs]:
    """The program that is planned, the tensors that it takes from outside, and what it went through."""
    hidden: tuple[torch.Tensor, ...] = ()

    def lifted(program: Program) -> Program:
        nonlocal hidden
        program, hidden = lift(program, traced.captured)
        return program

    def read(program: Program) -> Program:
        inputs = [i for i in program.inputs if i not in program.constants]
        return as_read(program, inputs[len(traced.names) + traced.uses_seed :])

    def checked(each: Pass, program: Program) -> Program:
        rewritten = each.run(program)
        check_program(rewritten)
        return rewritten

    passes = [
        Pass("simplify", simplify, optional=False),
        Pass("lift", lifted, optional=False),
        Pass("as_read", read, optional=False),
    ]
    for each in rewrites("rewrite_global", build.evolve(traced=traced)):
        passes.append(attrs.evolve(each, run=partial(checked, each)))
    program, stages = run_passes(passes, traced.program, without, keep)
    return program, hidden, stages


def _stages(build: Build, seen: TracedStep, planning: Planning, plan: Plan, decided: Decisions | None) -> PassOutputs:
    """All that the step went through, run again but for the trace."""
    traced = PassOutput("trace", seen.traced.program, seen.traced_s)
    return (traced, *_global(build, seen.traced, seen.left_out, keep=True)[2], *planning.stages(plan, decided))


def layouts_of(program: Program, ids: Sequence[int]) -> tuple[Layout, ...]:
    """Where values of a local program lie."""
    found = tuple(program.values[i].layout for i in ids)
    assert all(layout is not None for layout in found), "inputs and outputs of a local program have layouts"
    return found  # type: ignore[return-value]


def donation(traced: Traced, program: Program, donate: Any) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """(positions of consumed input leaves, pairs (output, input) of leaves that may share memory).

    "auto": argument 0 is consumed where output 0 has the same tree, shapes and dtypes, and is no batch. (k, ...): these
    arguments are, each for the first output that has its tree, shapes and dtypes, and that no other has taken. `()` or
    None: nothing is.
    """
    if donate in ((), None, False):
        return (), ()
    arguments = _leaves_of(traced.in_tree.children, program.inputs)
    outputs = _leaves_of(results_of(traced.out_tree), program.outputs)
    if donate == "auto":
        first = arguments[:1]
        if (
            not first
            or not _goes_to(first[0], outputs[0], program)
            or _is_batch([program.values[i] for i in first[0].ids], program)
        ):
            return (), ()
        return _shared([(first[0], outputs[0])])
    return _shared(_asked(donate, arguments, outputs, program))


def _asked(
    donate: tuple[int, ...], arguments: Sequence[_Leaves], outputs: Sequence[_Leaves], program: Program
) -> list[tuple[_Leaves, _Leaves]]:
    """Arguments at these positions, and an output for each. Raises PlanError where there is none."""
    pairs: list[tuple[_Leaves, _Leaves]] = []
    for k in donate:
        if k >= len(arguments):
            raise PlanError(
                f"donate={donate!r}: the step has {len(arguments)} arguments by position. Try: a number below that"
            )
        taken = [output for _, output in pairs]
        free = [output for output in outputs if output not in taken]
        found = next((output for output in free if _goes_to(arguments[k], output, program)), None)
        if found is None:
            raise PlanError(
                f"donate={donate!r} cannot be met: no output has the tree, shapes and dtypes of argument {k} "
                f'({arguments[k].tree.name!r}); return its new value, or use donate="auto"'
            )
        pairs.append((arguments[k], found))
    return pairs


@attrs.frozen(eq=False)
class _Leaves:
    """An argument or an output of a step: its tree, and where its leaves begin among all of them."""

    tree: Tree
    first: int
    ids: tuple[int, ...]


def _leaves_of(trees: Sequence[Tree], ids: Sequence[int]) -> list[_Leaves]:
    found, first = [], 0
    for tree in trees:
        count = len(tree.names())
        found.append(_Leaves(tree, first, tuple(ids[first : first + count])))
        first += count
    return found


def _goes_to(argument: _Leaves, output: _Leaves, program: Program) -> bool:
    before = [program.values[id] for id in argument.ids]
    after = [program.values[id] for id in output.ids]
    return comes_back(argument.tree, output.tree, before, after)


def _shared(pairs: Sequence[tuple[_Leaves, _Leaves]]) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """Consumed leaves, and (output, input) of leaves, of arguments and their outputs."""
    both = [(output.first + k, argument.first + k) for argument, output in pairs for k in range(len(argument.ids))]
    return tuple(sorted(into for _, into in both)), tuple(both)


def _is_batch(leaves: Sequence[Value], program: Program) -> bool:
    """Whether these are rows that a step with weights elsewhere reads: what it returns of their shape is not their next
    value.
    """
    weights = any(program.values[i].role == "param" for i in program.inputs)
    return weights and all(leaf.role == "batch" for leaf in leaves)
