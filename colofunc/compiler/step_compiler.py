"""Calling a staged step: find or prepare what fits the arguments, and run it.

    arguments -> signature -> [prepare] -> run

The bracket happens once per signature (tree, shapes, dtypes, static leaves, what lies around the call, and the layouts
that DTensor arguments already have, which the plan takes as given). A call like the last one needs no signature: a
guard says so. `StepCompiler` is the only place that keeps state between calls.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import attrs
import torch

from colofunc import env
from colofunc.compiler.compare import Compared, compare
from colofunc.compiler.disk_state import Shelves
from colofunc.compiler.guard import CallLeaves, Guard
from colofunc.compiler.hints import hinted
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.prepare import prepare
from colofunc.compiler.prepared_step import PreparedStep, lies_as_planned
from colofunc.compiler.profile import profile
from colofunc.compiler.rank_agreement import watch_of
from colofunc.compiler.retraces import Retraces, Signature
from colofunc.compiler.settling import settled
from colofunc.compiler.staged import Staged, applied
from colofunc.compiler.surroundings import Surroundings, ambient, look_around
from colofunc.compiler.transform import BUILT_IN, Transform
from colofunc.compiler.warmup import agreed_by_all, moved_leaves, step_s, warmup
from colofunc.dtensor.other_mesh import FromOtherMesh
from colofunc.dtensor.placed import other_mesh_error, place, side_by_side
from colofunc.dtensor.tensor import DTensor, as_movable
from colofunc.errors import ColofuncError, InputError, PlanError
from colofunc.executors.backend import backend_for
from colofunc.executors.profile import Profile
from colofunc.mesh import Mesh
from colofunc.ops.plain import refuse_unlike
from colofunc.planner.collector import fewer_collections
from colofunc.planner.plan_table import time_text
from colofunc.program.lazy import LazyTensor
from colofunc.program.tracing.meta import user_line
from colofunc.program.tracing.modules_used import UsedModules
from colofunc.program.tracing.trace import argument_names
from colofunc.program.tracing.tree import Tree, flatten, map_tensors, unflatten

LEAST = 0.01
"""Relative gain below which a plan from measurements is not worth moving state."""
RECENT = 4
"""Prepared steps whose guards are asked before a call is looked up: lengths of batches that take turns."""


class StepCompiler:
    """Compiles a staged function once per signature and runs it."""

    def __init__(self) -> None:
        self._ready: dict[Any, list[PreparedStep]] = {}
        self._recent: list[PreparedStep] = []  # those whose guards are asked first
        self._last: tuple[Sequence[torch.Tensor], Tree, Surroundings] = (), Tree("sequence"), Surroundings(ambient())
        self._retraces = Retraces()
        self._calls = 0
        self._settled: Staged | None = None
        self._taken: Mapping[str, str] = {}  # what the same chain has taken on another executor, or by another plan

    def another(self) -> StepCompiler:
        """An empty one for the same chain, on another executor or by another plan: what was left open stays decided."""
        new = StepCompiler()
        new._taken = self._taken
        if self._settled is not None:
            for transform in self._settled.transforms:
                new._taken = dict(transform.taken) or new._taken
        return new

    def call(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        name = getattr(staged.fn, "__name__", "step")
        for ready in self._recent:
            guard = ready.guard
            given = None if guard is None else guard.given(args)
            if guard is not None and given is not None and ready.used.stands() and not ready.stale():
                self._last = given.leaves, guard.tree, guard.surroundings
                return self._run(staged, ready, given, name)
        leaves, tree = flatten(args)
        ready = self._get(staged, args, leaves, tree, runs=True)
        ready.compare("call", leaves)
        if ready.measure:
            ready.measure, ready.warmup = 0, warmup(ready.low, ready.backend, ready.measure, name)
        elif ready.warmup is not None and not ready.warmup.left:
            self._plan_again(staged, args, leaves, ready, name)
        guard = None
        if ready.warmup is None and ready.after is None:
            guard = Guard.of(tree, leaves, ready.homes, self._last[2])
        out = self._run(staged, ready, CallLeaves.of(leaves, ready.homes), name)
        ready.guard = guard
        self._recent = [ready, *(other for other in self._recent if other is not ready)][:RECENT]
        return out

    def _run(self, staged: Staged, ready: PreparedStep, given: CallLeaves, name: str) -> Any:
        self._calls += 1
        with nullcontext() if ready.watch is None else ready.watch.step(name):
            every = staged.sharding.agree_every
            agrees_now = bool(every) and self._calls % every == 0
            try:
                while ready.after is not None:
                    ready = ready.after
                    low, called = ready.low, _called(name)
                    leaves = moved_leaves(given.leaves, low.input_layouts, low, ready.backend, ready.disk, called)
                    given = CallLeaves.of(leaves, ready.homes)
                return ready.call(given, _called(name), every if agrees_now else 0)
            except torch.OutOfMemoryError as error:
                ready.explain_full(error)
                raise

    def _plan_again(
        self, staged: Staged, args: tuple[Any, ...], leaves: Sequence[torch.Tensor], old: PreparedStep, name: str
    ) -> None:
        """By what the first steps have measured.

        A plan that cannot be made, or is no faster, leaves the old one standing.
        """
        assert old.warmup is not None, "whoever calls has looked"
        timed, old.warmup = old.warmup.timed(), None
        donated = set(old.low.donated)
        staying = [None if position in donated else leaf for position, leaf in enumerate(leaves)]
        low, why = None, "another rank says why"
        try:
            with fewer_collections():
                low = prepare(staged, args, staying, old.watch, (old.low.plan, timed))
        except ColofuncError as error:
            why = str(error)
        if not agreed_by_all(low is not None, old.watch) or low is None:
            warnings.warn(
                f"{name} keeps its plan: none could be made from what its first steps measured ({why})", stacklevel=4
            )
            return
        before_s, after_s = step_s(old.low, timed), step_s(low, timed)
        faster = after_s < before_s * (1 - LEAST)
        if low.mesh.is_main:
            what = "is planned again" if faster else "keeps its plan, the best that is known by that"
            env.say(f"{name} {what}: measured, a step takes {time_text(before_s)}, planned anew {time_text(after_s)}")
        if faster:
            low = attrs.evolve(low, plan=attrs.evolve(low.plan, cost_s=after_s))
            old.after = PreparedStep(low, staged.executor, old.watch, staged.fn, old.disk, leaves, old.used)
            known = next(some for some in self._ready.values() if old in some)
            known.insert(0, old.after)

    def init(self, staged: Staged, args: tuple[Any, ...]) -> Any:
        """Argument 0 placed in the layouts of the plan; its tensors are copied, so the originals stay the caller's.

        What lies on the mesh already stays as it is split if the step's plans allow that, see
        `user_constraints.staying`.
        """
        args = brought_over(args, staged.mesh)
        leaves, tree = flatten(args)
        first, first_tree = flatten(args[0])
        state = [as_movable(x) if isinstance(x, DTensor) else x for x in first]
        ready = self._get(staged, args, [*state, *leaves[len(first) :]], tree, runs=True)
        ready.compare("init", first)
        names, layouts = ready.low.traced.names, ready.low.input_layouts
        what = "what the step reads beside its arguments"
        try:
            ready.hidden()
            _ = ready.scratch  # its room is taken now, or not at all
            placed = []
            shelves = Shelves(ready.disk, first, layouts, [True] * len(first), ready.low.mesh, ready.backend)
            for leaf, layout, name in zip(first, layouts, names, strict=False):  # one by one: lazy leaves are made here
                what = f"{name!r} of the state"
                on_mesh = place(leaf, layout, ready.low.mesh, ready.backend, True, name, device=ready.device)
                placed.append(shelves.keep(on_mesh, layout))
            shelves.commit()
            what = "what is updated by one kernel, side by side,"
            placed = side_by_side(placed, ready.buffers)
        except torch.OutOfMemoryError as error:
            error.add_note(f"while {what} was placed")
            ready.explain_full(error)
            raise
        made = [ready.owned(*one) for one in zip(placed, ready.homes, ready.roles, strict=False)]
        return unflatten(first_tree, made)

    def settled(self, staged: Staged, open: Transform, args: tuple[Any, ...]) -> Staged:
        """The chain with what one transform leaves open decided, by the first arguments."""
        if self._settled is None:
            said = self._taken if staged.plan is None else dict(staged.plan.taken) or self._taken
            watch = watch_of(staged.mesh, staged.executor)
            self._settled = settled(staged, open, args, partial(_lowered_with, args), watch, said)
        return self._settled

    def lower(self, staged: Staged, args: tuple[Any, ...], says_least: bool = True) -> Lowered:
        """says_least: whether the error says the least budget where nothing fits, which takes a search of its own."""
        leaves, tree = flatten(args)
        return self._get(staged, args, leaves, tree, says_least=says_least).low

    def compare(self, staged: Staged, args: tuple[Any, ...], tolerance: float | None) -> Compared:
        return compare(self._get(staged, args, *flatten(args), runs=True).low, args, staged.reference, tolerance)

    def profile(self, staged: Staged, args: tuple[Any, ...], path: Any, steps: int) -> Profile:
        return profile(self._get(staged, args, *flatten(args), runs=True).low, args, path, steps)

    def _get(
        self,
        staged: Staged,
        args: tuple[Any, ...],
        leaves: Sequence[torch.Tensor],
        tree: Tree,
        runs: bool = False,
        says_least: bool = True,
    ) -> PreparedStep:
        """The step for these arguments, prepared now if it was not.

        `runs`: not only to look at, so the mesh has to be there.
        """
        if any(x.is_nested for x in leaves):  # which have no shape
            check_arguments(staged, args)
        types = tuple((tuple(x.shape), x.dtype, x.requires_grad) for x in leaves)
        around = look_around(staged.fn)
        key = (tree.key(), types, *around.key)
        known = self._ready.setdefault(key, [])
        stale = [old for old in known if old.stale()]
        for old in stale:
            self._retraces.stale(staged, old.stale())
            known.remove(old)
            old.guard = None
        fitting = [other for other in known if other.used.stands()]
        ready = next((other for other in fitting if lies_as_planned(leaves, other.low.input_layouts)), None)
        if ready is None:
            check_arguments(staged, args)
            if len(self._ready) > 1 and not known and not stale:
                self._retraces.tell(staged, Signature(leaves, tree, around), Signature(*self._last))
            if known and not fitting:
                self._retraces.modes(staged)
            if runs:
                backend_for(staged.mesh, staged.executor)  # a mesh that does not fit the processes: before planning
            watch = watch_of(staged.mesh, staged.executor)
            before = [other.low for alike in self._ready.values() for other in alike]
            earlier = _used_by(before)
            with fewer_collections(), hinted(staged.sharding.all_plugins):
                low = prepare(staged, args, leaves, watch, before=before, says_least=says_least)
            # A step may switch modes itself: what counts is how a call finds them, where that is known.
            used = _used_by([low]).earlier(earlier).without(around.modes, around.frozen)
            ready = PreparedStep(low, staged.executor, watch, staged.fn, staged.disk, leaves, used)
            ready.measure = max((one.measure for one in staged.transforms), default=0)
            known.append(ready)
        self._last = leaves, tree, around
        return ready


def _lowered_with(args: tuple[Any, ...], staged: Staged) -> Lowered:
    """One of several ways to write a chain, for a call's arguments.

    Raises, sooner than `lower`, where it fits no budget.
    """
    compiler = staged.compiler
    assert isinstance(compiler, StepCompiler), "it was made beside this one"
    return compiler.lower(staged, staged.arguments(args), says_least=False)


def _used_by(prepared: Sequence[Lowered]) -> UsedModules:
    """What the traces of these steps have used, as it is now."""
    modules = [module for low in prepared for module in low.traced.modules]
    models = [model for low in prepared for model in low.traced.models]
    return UsedModules.of(modules, models)


def _called(name: str) -> str:
    """The step and the user's line of this call, for the error on what it consumes."""
    line = user_line()
    return f"{name} at {line}" if line else name


def brought_over(args: tuple[Any, ...], mesh: Mesh) -> tuple[Any, ...]:
    """The arguments, those that lie on another mesh as lazy tensors: they are sent when it is known where their parts
    are to lie.
    """

    def lazy(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor) or x.mesh == mesh:
            return x
        like = torch.empty(x.shape, dtype=x.dtype, device="meta")
        return LazyTensor(FromOtherMesh(x), like).requires_grad_(x.requires_grad)

    moved: tuple[Any, ...] = map_tensors(lazy, args)
    return moved


def check_arguments(staged: Staged, args: tuple[Any, ...]) -> None:
    """Raises InputError where a program cannot compute with an argument, or where it lies on another mesh than the
    step's.
    """
    mesh = staged.mesh
    for name, argument in zip(argument_names(staged.fn, len(args)), args, strict=True):
        leaves, tree = flatten(argument, name)
        for leaf, leaf_name in zip(leaves, tree.names(), strict=True):
            if not isinstance(leaf, DTensor):
                refuse_unlike(leaf, f"argument {leaf_name!r}", InputError)
            elif leaf.mesh != mesh:  # layouts speak of axes of their own mesh
                raise other_mesh_error(f"argument {leaf_name!r}", leaf, mesh)


def stage(step_fn: Callable[..., Any] | Staged | None, transform: Transform) -> Any:
    """A step function with one more transform: a `Staged`. Without a function, a decorator that takes it.

    Raises PlanError where the transform was applied before, or with one that clashes, or to what is no function.
    """
    if step_fn is None:
        return lambda fn: stage(fn, transform)
    if isinstance(step_fn, Staged):
        return applied(step_fn, transform)
    if not callable(step_fn):
        caller = f"cf.{transform.name}" if transform.name in BUILT_IN else transform.name
        raise PlanError(f"{caller} wants a step function, not {type(step_fn).__name__}")
    return Staged(step_fn, (transform,), StepCompiler())
