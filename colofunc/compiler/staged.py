"""Staged: a function and what is wished of it.

A transform does not run anything. It returns a `Staged`: the original function and a tuple of `Transform` records, in
the order of application. Tracing, planning and lowering happen once per signature, at the first call, when all
transforms are known and can be decided together.

    step = offload(shard(step_fn, mesh), budget="6GiB")      # Staged(step_fn, (Transform("shard"), Transform("offload")))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, wraps
from typing import Any, Protocol

import attrs
import torch

from colofunc.compiler.hooks import through
from colofunc.compiler.transform import BUILT_IN, Build, Sharding, Transform, in_order
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, PlanError, TraceError, near
from colofunc.mesh import Mesh
from colofunc.ops import canonical
from colofunc.planner.plan import Plan
from colofunc.program.tracing.meta import active_stacks, user_line
from colofunc.program.tracing.tree import flatten, map_tensors, unflatten

EXECUTORS = ("simulated", "distributed", "compiled")


class Compiler(Protocol):
    """Turns a staged function into something that runs; `step_compiler.StepCompiler` implements it."""

    def call(self, staged: Staged, args: tuple[Any, ...]) -> Any: ...
    def init(self, staged: Staged, args: tuple[Any, ...]) -> Any: ...
    def lower(self, staged: Staged, args: tuple[Any, ...]) -> Any: ...
    def compare(self, staged: Staged, args: tuple[Any, ...], tolerance: float | None) -> Any: ...
    def profile(self, staged: Staged, args: tuple[Any, ...], path: Any, steps: int) -> Any: ...
    def settled(self, staged: Staged, open: Transform, args: tuple[Any, ...]) -> Staged: ...
    def another(self) -> Compiler: ...


@attrs.frozen(eq=False)
class Staged:
    """A step function and the transforms of its chain. Call it like the function it wraps."""

    fn: Callable[..., Any]
    transforms: tuple[Transform, ...]
    compiler: Compiler
    executor: str | None = None
    plan: Any = None  # a Plan whose decisions are constraints
    _in_order: tuple[Transform, ...] = attrs.field(init=False)

    @_in_order.default
    def _ordered(self) -> tuple[Transform, ...]:
        return in_order(self.transforms)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: DTensors (or plain global tensors) in, DTensors out."""
        if active_stacks() is not None:
            raise TraceError(
                f"{getattr(self.fn, '__name__', 'a step')}, which is a staged step itself, is called inside of another "
                f"one at {user_line()}. Try: the function that it was made of (its .fn); the step around it plans both"
            )
        step, args = self._ready(args, kwargs)
        return step.compiler.call(step, args)

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Argument 0 placed as this step wants it; the others may be `cf.abstract` examples."""
        if not args and not kwargs:
            raise InputError("step.init was given no argument to place. Try: step.init(state, *batch)")
        step, args = self._ready(args, kwargs)
        return step.compiler.init(step, args)

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The function on one device: breakpoints work.

        DTensors enter whole, results are plain (collective on real ranks).

        Random numbers are those of the staged step; what transforms keep in the state is there, as `reference` says.
        """
        step, args = self._ready(args, kwargs)
        leaves, tree = flatten(args)
        with canonical.single_device():
            return step.reference(*unflatten(tree, [_plain(leaf) for leaf in leaves]))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Trace, plan and lower for arguments like these, without running: a `Lowered`."""
        step, args = self._ready(args, kwargs)
        return step.compiler.lower(step, args)

    def compare(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> Any:
        """The first value that this step computes differently from its function on one device; see `low.compare`."""
        step, args = self._ready(args, kwargs)
        return step.compiler.compare(step, args, tolerance)

    def profile(self, path: Any, *args: Any, steps: int = 3, **kwargs: Any) -> Any:
        """Time a few steps on copies of the arguments: a Chrome trace at `path`, and a `Profile` with `.table()`."""
        step, args = self._ready(args, kwargs)
        return step.compiler.profile(step, args, path, steps)

    def settled(self, *args: Any, **kwargs: Any) -> Staged:
        """The step with all said that its transforms leave open, for arguments like these and all later ones: itself
        where nothing is.

        What another step is to share with it, such as the schemes of weights, is in `settled.transform(name).decided`.
        """
        open = next((one for one in self.transforms if one.open is not None), None)
        return self if open is None else self.compiler.settled(self, open, _positional(self.fn, args, kwargs))

    def _ready(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Staged, tuple[Any, ...]]:
        """What runs, and its arguments."""
        step = self.settled(*args, **kwargs)
        return step, step.arguments(args, kwargs)

    def on(self, executor: str) -> Staged:
        """The same step on another executor: "simulated", "distributed" or "compiled".

        On the last two, and by default where the mesh names a machine with CUDA cards, it is planned as real ranks run
        it, with collectives beside compute, also before there are any.
        """
        if executor not in EXECUTORS:
            raise PlanError(f"unknown executor {executor!r}{near(executor, EXECUTORS, 'executors')}")
        return attrs.evolve(self, executor=executor, compiler=self.compiler.another())

    def with_plan(self, plan: Any) -> Staged:
        """The same step, deciding as `plan` did wherever it speaks."""
        if plan is not None and not isinstance(plan, Plan):
            raise PlanError(
                f"step.with_plan was given {plan!r}, which is no plan. Try: cf.Plan.load(path), or the .plan of a "
                "lowered step"
            )
        return attrs.evolve(self, plan=plan, compiler=self.compiler.another())

    @property
    def mesh(self) -> Mesh:
        """The mesh that it is sharded on, else a mesh of one."""
        mesh = self.sharding.mesh
        if not isinstance(mesh, Mesh):
            raise PlanError(f"cf.shard wants a cf.Mesh as its second argument, not {mesh!r}; write cf.Mesh(dp=2)")
        return mesh

    @cached_property
    def sharding(self) -> Sharding:
        """How it is asked to lie on a mesh; on a mesh of one where no transform says it."""
        said = (transform.sharding for transform in self.transforms)
        return next((one for one in said if one is not None), Sharding(Mesh()))

    @property
    def sharded(self) -> Transform | None:
        """The transform that says how the step lies on a mesh; at most one of a chain does."""
        return next((one for one in self.transforms if one.sharding is not None), None)

    @property
    def disk(self) -> str | bool | None:
        """The directory for what is kept on disk, as the one transform says that names it."""
        return next((one.disk for one in self.transforms if one.disk is not None), None)

    @property
    def build(self) -> Build:
        """What is known before anything is traced."""
        return Build(self._in_order, self.mesh, fn=self.fn)

    @property
    def reference(self) -> Callable[..., Any]:
        """The function with what the transforms put around it: what this step computes on one device.

        In the order of their hooks, whatever the order of the chain, so that `a(b(f))` and `b(a(f))` compute the same.
        Where they change numbers of the traced program, it runs as the program of a mesh of one: the same trace, with
        the same rewriting.
        """
        fn = through("wrap", self.build).fn
        if not any(transform.changes_numbers for transform in self.transforms):
            return fn
        rewriting: list[Transform] = []
        for each in self.transforms:
            if each.rewrite_global is not None:
                rewrite, behind = each.rewrite_global, each.behind
                rewriting.append(Transform(each.name, each.options, rewrite_global=rewrite, behind=behind))
        alone = Staged(fn, tuple(rewriting), self.compiler.another(), executor="simulated")

        @wraps(fn)
        def stepped(*args: Any) -> Any:
            if active_stacks() is not None:
                return fn(*args)  # the trace, which is rewritten
            return map_tensors(_plain, alone(*args))

        return stepped

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """The arguments of a call by position, with everything that the transforms keep in them."""
        args = _positional(self.fn, args, kwargs or {})
        if not args or not any(transform.grow is not None for transform in self.transforms):
            return args
        grown = through("grow", self.build.evolve(state=args[0], others=args[1:]))
        return (grown.state, *grown.others)

    def transform(self, name: str) -> Transform | None:
        """One transform of the chain, if it is there."""
        return next((one for one in self.transforms if one.name == name), None)


def _plain(leaf: torch.Tensor) -> torch.Tensor:
    """The whole value where the leaf is distributed, else the leaf."""
    return leaf.full().detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, DTensor) else leaf


def _positional(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments by position, as the function's own signature orders them."""
    if not kwargs:
        return args
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{getattr(fn, '__name__', fn)} cannot be called so: {error}; pass arguments by position"
        ) from error
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise InputError(
            f"{getattr(fn, '__name__', fn)} takes {names} by keyword only; a staged step passes arguments by position"
        )
    return bound.args


def fresh(compiler: Compiler) -> Compiler:
    """A compiler of the same kind with an empty cache."""
    return type(compiler)()


_ONE_OF_A_CHAIN = {
    "sharding": (
        "say how the step lies on a mesh ({one.mesh!r} and {other.mesh!r})",
        "drop one of them, and give its plans to the other",
    ),
    "disk": ("name a directory for what is kept on disk ({one!r} and {other!r})", "name it in one of them"),
    "open": (
        "leave open what the state depends on",
        "decide one, and give the other step.settled(...).transform({first!r}).decided",
    ),
}
"""Field of a transform -> (what it says, how a chain is written where two have said it)."""


def applied(step: Staged, transform: Transform) -> Staged:
    """`step` with one more transform.

    Raises PlanError where it was applied before, where it clashes with another, or where both say what one of a chain
    may.
    """
    name = getattr(step.fn, "__name__", step.fn)
    if step.transform(transform.name) is not None:
        instead = ". Try: one of them, with the options of both"
        if transform.name in BUILT_IN:
            instead = f"; give all its plans in one call: cf.{transform.name}(fn, ...)"
        raise PlanError(f"{transform.name} is applied twice to {name}{instead}")
    for before in step.transforms:
        why = before.clashes.get(transform.name) or transform.clashes.get(before.name)
        if why:
            raise PlanError(f"{before.name} and {transform.name} cannot both be applied to one step: {why}")
        for field, (what, remedy) in _ONE_OF_A_CHAIN.items():
            one, other = getattr(before, field), getattr(transform, field)
            if one is not None and other is not None:
                raise PlanError(
                    f"{before.name} and {transform.name} both {what.format(one=one, other=other)}, and one of a chain "
                    f"may. Try: {remedy.format(first=before.name)}"
                )
    return attrs.evolve(step, transforms=(*step.transforms, transform), compiler=fresh(step.compiler))


def plugins_of(step_fn: Any) -> tuple[Any, ...]:
    """The plugins of the step that a transform is put around, beside the installed ones; () of a plain function."""
    return step_fn.sharding.all_plugins if isinstance(step_fn, Staged) else ()


def in_place_of(step: Staged, old: Transform, new: Transform) -> Staged:
    """`step` with one of its transforms exchanged."""
    transforms = tuple(new if one is old else one for one in step.transforms)
    return attrs.evolve(step, transforms=transforms, compiler=fresh(step.compiler))
