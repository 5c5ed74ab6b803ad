"""From a staged function and its arguments to something that runs: the whole flow on one page.

    arguments -> signature -> [trace -> simplify -> plan -> lower -> check -> in place] -> run

The bracket happens once per signature (tree, shapes, dtypes, static leaves, and the layouts that DTensor arguments
already have, which the plan takes as given). `StepCompiler` is the only place that keeps state between calls.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import attrs
import torch

from colofunc import compat, env
from colofunc.dtensor.eager import convert_shards
from colofunc.dtensor.layout import Layout
from colofunc.dtensor.parts import part
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, PlanError
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.distributed import program_hash
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.ops import canonical
from colofunc.planner.constraints import Constraints
from colofunc.plugins import build_registry
from colofunc.program.buckets import buckets
from colofunc.program.check import check_program
from colofunc.program.coalesce import reduces_early, views_late
from colofunc.program.inplace import in_place
from colofunc.program.ir import Program
from colofunc.program.lower import lower
from colofunc.program.memory import memory
from colofunc.program.simplify import simplify
from colofunc.program.trace import Traced, record_local, trace
from colofunc.program.trace_tree import Tree, flatten, unflatten
from colofunc.transforms.agree import equal_leaves, from_main, main_seed, same, share, watch_of
from colofunc.transforms.decide import Candidates, Decided, decide
from colofunc.transforms.lowered import Lowered
from colofunc.transforms.staged import Staged
from colofunc.transforms.wanted import wanted

Leaf = torch.Tensor


class Ready:
    """A lowered step and, from the first call on, the backend that runs it."""

    def __init__(self, low: Lowered, executor: str | None, watch: Watch | None) -> None:
        self.low = low
        self.watch = watch
        self._executor = executor
        self._compared: set[str] = set()

    def compare(self, what: str, leaves: Sequence[Leaf]) -> None:
        """On real ranks, once: plain tensors must be equal on all of them."""
        if self.watch is not None and what not in self._compared:
            self._compared.add(what)
            names = [leaf.name for leaf in self.low.traced.in_tree.leaves()]
            equal_leaves(self.watch, names[: len(leaves)], leaves)

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.low.mesh, self._executor)

    @cached_property
    def run(self) -> Callable[[Sequence[list[torch.Tensor]]], list[list[torch.Tensor]]]:
        return self.backend.compile(self.low.program, self.low.mesh)


class StepCompiler:
    """Compiles a staged function once per signature and runs it."""

    def __init__(self) -> None:
        self._ready: dict[Any, list[Ready]] = {}
        self._last: tuple[Sequence[Leaf], Tree] = (), Tree("sequence")
        self._static_retraces = 0

    def call(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree)
        ready.compare("call", leaves)
        return run(ready, leaves, getattr(staged.fn, "__name__", "step"))

    def init(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        """Argument 0 placed in the layouts of the plan; its tensors are copied, so the originals stay the caller's."""
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree)
        first, first_tree = flatten(args[0])
        ready.compare("init", first)
        placed = [_placed(leaf, layout, ready, copy=True) for leaf, layout in zip(first, ready.low.input_layouts, strict=False)]
        return unflatten(first_tree, [_owned(shards, lay, ready) for shards, lay in zip(placed, ready.low.input_layouts, strict=False)])

    def lower(self, staged: Staged, args: tuple[Any, ...]) -> Lowered:
        leaves, tree = flatten(args)
        return self._get(staged, args, leaves, tree).low

    def _get(self, staged: Staged, args: tuple[Any, ...], leaves: Sequence[Leaf], tree: Tree) -> Ready:
        types = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in leaves)
        key = (tree.key(), types, torch.get_default_dtype(), training_flags(staged.fn))
        known = self._ready.setdefault(key, [])
        ready = next((r for r in known if _lies_as_planned(leaves, r.low.input_layouts)), None)
        if ready is None:
            if len(self._ready) > 1 and not known:
                self._tell_retrace(staged, leaves, tree)
            ready = prepare(staged, args, leaves)
            known.append(ready)
        self._last = leaves, tree
        return ready

    def _tell_retrace(self, staged: Staged, leaves: Sequence[Leaf], tree: Tree) -> None:
        """One line that says why a step is traced again; a third time for a static value is a warning."""
        before, old = self._last
        name = getattr(staged.fn, "__name__", "step")
        pairs = zip(tree.statics(), old.statics(), strict=False)
        static = next((f"argument {a.name}: {b.value!r} -> {a.value!r}" for a, b in pairs if a.value != b.value), None)
        if static is not None:
            self._static_retraces += 1
            say(f"{name} is traced again, a static value changed: {static}")
            if self._static_retraces == 3:
                warnings.warn(
                    f"{name} has been traced {self._static_retraces + 1} times because static values change ({static}); "
                    "pass numbers that vary as tensors or floats",
                    stacklevel=4,
                )
            return
        shapes = zip(tree.names(), leaves, before, strict=False)
        what = next((f"argument {n}: {tuple(b.shape)} -> {tuple(a.shape)}" for n, a, b in shapes if a.shape != b.shape), "its arguments' structure, dtypes or mode")
        say(f"{name} is traced again for {what}")


def training_flags(fn: Callable[..., Any], depth: int = 3) -> tuple[bool, ...]:
    """Train or eval mode of every module that a step function holds in its closure: a switch means another trace."""
    flags: list[bool] = []
    held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or () if _is_set(cell)]
    held += [getattr(fn, "__self__", None), *(getattr(fn, "__defaults__", None) or ())]
    for thing in held:
        parts = [getattr(thing, f.name) for f in attrs.fields(type(thing))] if attrs.has(type(thing)) else [thing]
        for part in parts:
            if isinstance(part, torch.nn.Module):
                flags += [m.training for m in part.modules()]
            elif depth and callable(part) and hasattr(part, "__closure__"):
                flags += training_flags(part, depth - 1)
    return tuple(flags)


def _is_set(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:  # a name that is assigned later
        return False
    return True


def _lies_as_planned(leaves: Sequence[Leaf], layouts: Sequence[Layout]) -> bool:
    """Plain tensors can be placed anywhere; a DTensor stays where it is, so the plan must want it there."""
    pairs = zip(leaves, layouts, strict=False)
    return all(not isinstance(leaf, DTensor) or leaf.sharding is layout for leaf, layout in pairs)


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


def prepare(staged: Staged, args: tuple[Any, ...], leaves: Sequence[Leaf]) -> Ready:
    """Trace, plan and lower for one signature."""
    mesh = mesh_of(staged)
    intent = staged.intent("shard")
    options = dict(intent.options) if intent is not None else {}
    registry = build_registry(tuple(options.get("plugins", ())))
    began = time.perf_counter()
    watch = watch_of(mesh, staged.executor)
    seen = partial(_seen, staged.fn, args, options.get("donate", "auto"))
    traced, program, donated = same(watch, "the traced program", seen, lambda made: program_hash(made[1], mesh))
    traced_s = time.perf_counter() - began
    given = {program.inputs[i]: leaf.sharding for i, leaf in enumerate(leaves) if isinstance(leaf, DTensor)}
    candidates = Candidates(program, mesh, registry)
    constraints, named = wanted(program, traced, mesh, options, given, staged.plan, candidates.rule_of)
    axes = mesh.axis_names if options.get("auto", True) else tuple(a for a in mesh.axis_names if a in named)
    plan_it = partial(_within, program, mesh, candidates, constraints, named, mesh.capacity_bytes("device"), axes, staged.executor != "compiled")
    choices, plan, local = share(watch, from_main(watch, plan_it), program, candidates.rule_of)
    planned_s = time.perf_counter() - began - traced_s
    if traced_s + planned_s > 2 and mesh.is_main:
        say(f"trace {traced_s:.1f} s · plan {planned_s:.1f} s · {len(local.nodes)} operators")
    low = Lowered(
        traced, program, choices, plan, local, mesh, registry, layouts_of(local, local.inputs), layouts_of(local, local.outputs), donated
    )
    return Ready(low, staged.executor, watch)


def _seen(fn: Callable[..., Any], args: tuple[Any, ...], donate: Any) -> tuple[Traced, Program, tuple[int, ...]]:
    """The step as it was traced, its program, and which input leaves it consumes."""
    traced = trace(fn, args)
    program = simplify(traced.program)
    donated, aliases = donation(traced, program, donate)
    return traced, attrs.evolve(program, aliases=aliases), donated


def layouts_of(program: Program, ids: Sequence[int]) -> tuple[Layout, ...]:
    """Where values of a local program lie."""
    found = tuple(program.values[i].layout for i in ids)
    assert all(layout is not None for layout in found), "inputs and outputs of a local program have layouts"
    return found  # type: ignore[return-value]


def _within(
    program: Program,
    mesh: Mesh,
    candidates: Candidates,
    constraints: Constraints,
    named: Mapping[str, str],
    budget_bytes: int | None,
    axes: tuple[str, ...],
    temporaries: bool = True,
    tries: int = 4,
) -> tuple[Decided, Program]:
    """Plan and lower so that the accountant agrees that the peak is within the budget.

    The planner's estimate is quick and a little off; where the accountant counts more, it plans again for less.
    """
    aim, peak = budget_bytes, 0
    for _ in range(tries):
        decided = decide(program, mesh, candidates, constraints, named, aim, axes)
        regather = decided.assignment.regather
        local = lower(program, decided.choices, decided.input_layouts, decided.output_layouts, mesh, record_local, regather)
        check_program(local, mesh)
        for name in sorted(candidates.registry.passes):
            local = candidates.registry.passes[name](local, mesh)
            check_program(local, mesh)
        local = in_place(buckets(views_late(reduces_early(local)), mesh), temporaries)
        if budget_bytes is None or aim is None:
            return decided, local
        report = memory(local)
        peak = report.peak_bytes["device"]
        if peak <= budget_bytes:
            return decided, local
        aim = int(min(aim, decided.assignment.peak_bytes) * budget_bytes / peak * 0.99)
    raise PlanError(
        f"no plan found within {(budget_bytes or 0) / 2**30:.2f} GiB a rank: the best has a peak of {peak / 2**30:.2f} GiB; "
        f"use more ranks, a smaller batch, or a topology with more memory"
    )


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


def run(ready: Ready, leaves: Sequence[Leaf], name: str) -> Any:
    """Run one call: place what is not placed, run, wrap what comes out, consume what was donated."""
    low = ready.low
    donated = set(low.donated)
    inputs = []
    for i, leaf in enumerate(leaves):
        inputs.append(_placed(leaf, low.input_layouts[i], ready, copy=i in donated and not _is_owned(leaf)))
    if low.traced.uses_seed:
        seed = main_seed(ready.watch, canonical.draw_seed())
        inputs.append([seed] * len(ready.backend.ranks(low.mesh)))
    mine = [leaf for i in low.donated if isinstance(leaf := leaves[i], DTensor) and leaf.owned]
    before = [compat.version(part) for leaf in mine for part in leaf.parts]
    try:
        outs = ready.run(inputs)
    except Exception as error:
        if before != [compat.version(part) for leaf in mine for part in leaf.parts]:
            for leaf in mine:
                leaf.consume(f"{name}, which failed in the middle of its update, so this state is lost (load the last checkpoint)")
            error.add_note(f"{name} had begun to update its state in place: that state is lost; load the last checkpoint")
        raise
    for leaf in mine:
        leaf.consume(name)
    return low.traced.unpack([_owned(shards, lay, ready) for shards, lay in zip(outs, low.output_layouts, strict=True)])


def _is_owned(leaf: Leaf) -> bool:
    return isinstance(leaf, DTensor) and leaf.owned


def _owned(shards: list[torch.Tensor], layout: Layout, ready: Ready) -> DTensor:
    return DTensor(shards, layout, ready.low.mesh, ready.backend, owned=True)


def _placed(leaf: Leaf, layout: Layout, ready: Ready, copy: bool) -> list[torch.Tensor]:
    """The owned ranks' parts of an argument. `copy`: they may be written to, so they must not be the caller's memory."""
    mesh, backend = ready.low.mesh, ready.backend
    if isinstance(leaf, DTensor):
        if leaf.mesh != mesh:
            raise InputError(f"an argument lies on {leaf.mesh}, the step runs on {mesh}; bring it over with distribute(x.full(), spec, mesh)")
        shards = convert_shards(leaf.parts, leaf.sharding, layout, mesh, backend)
        return [s.clone() for s in shards] if copy and leaf.sharding is layout else shards
    if leaf.is_meta:
        raise InputError(f"an argument of shape {tuple(leaf.shape)} has no data (meta tensor); give real values to run, or use step.lower")
    plain = leaf.detach()
    done: dict[tuple[int, ...], torch.Tensor] = {}
    out = []
    for rank in backend.ranks(mesh):
        where = mesh.coordinates(rank)
        key = tuple(where[a] for a in layout.axes)
        if key not in done or layout.pending:
            piece = part(plain, layout, mesh, rank)
            done[key] = piece.clone() if copy or not piece.is_contiguous() else piece
        out.append(done[key])
    return out
