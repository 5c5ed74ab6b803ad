"""Staged: a function and what is wished of it.

A transform does not run anything. It returns a `Staged`: the original function and a tuple of `Intent` records, one
per transform, in the order of application. Tracing, planning and lowering happen once per signature, at the first
call, when all intents are known and can be decided together.

    step = offload(shard(step_fn, mesh), budget="6GiB")      # Staged(step_fn, (Intent("shard"), Intent("offload")))
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError, PlanError, near
from colofunc.ops import canonical
from colofunc.program.tracing.tree import flatten, unflatten

EXECUTORS = ("simulated", "distributed", "compiled")


@attrs.frozen
class Intent:
    """What one transform wishes. `options` are the transform's own arguments.

    `around`: wraps the step function before it is traced, and before the single-device reference runs it.
    `within`: the same for a transform that has to know the chain: `within(staged, fn)`.
    `grow`: argument 0 with what the transform keeps in the state; a state that has it already comes back as it is.
    `local`: rewrites the program of one rank, beside the passes of plugins.
    `last`: makes, from the trace, the registry and the constraints, rewrites of one rank's program that run after all others: the
    first, or another where that keeps to a budget in less time.
    `constrain`: from the trace, its program and the registry, what the planner may not decide otherwise.
    `refit`: completes one rank's program so that it fits a budget (`options["budget_bytes"]`, if it has one of its own).
    `move`: from the plugins' policies of memory, the tiers of inputs that lie somewhere, and positions of what the step captured -> whether
    somebody has it in memory, `within.Move`: copies between tiers.
    `wider`: what to write instead where its policy forbids what would need less memory.
    `clashes`: other transform -> why the two cannot stand in one chain, and what to do instead.
    """

    transform: str
    options: Mapping[str, Any]
    around: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    grow: Callable[[Any], Any] | None = None
    clashes: Mapping[str, str] = attrs.field(factory=dict)
    local: Callable[[Any, Any], Any] | None = None
    last: Callable[[Any, Any, Any], Sequence[Callable[[Any, Any], Any]]] | None = None
    constrain: Callable[[Any, Any, Any], Any] | None = None
    within: Callable[[Any, Callable[..., Any]], Callable[..., Any]] | None = None
    refit: Callable[[Any, Any, Any, Any], Any] | None = None
    move: Callable[[Any, Any, Any], Any] | None = None
    wider: str = ""


class Compiler(Protocol):
    """Turns a function and its intents into something that runs; `step_compiler.StepCompiler` implements it."""

    def call(self, staged: Staged, args: tuple[Any, ...]) -> Any: ...
    def init(self, staged: Staged, args: tuple[Any, ...]) -> Any: ...
    def lower(self, staged: Staged, args: tuple[Any, ...]) -> Any: ...
    def compare(self, staged: Staged, args: tuple[Any, ...], tolerance: float | None) -> Any: ...
    def profile(self, staged: Staged, args: tuple[Any, ...], path: Any, steps: int) -> Any: ...


@attrs.frozen(eq=False)
class Staged:
    """A step function with intents. Call it like the function it wraps."""

    fn: Callable[..., Any]
    intents: tuple[Intent, ...]
    compiler: Compiler
    executor: str | None = None
    plan: Any = None  # a Plan whose decisions are constraints

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step: DTensors (or plain global tensors) in, DTensors out."""
        return self.compiler.call(self, self.arguments(args, kwargs))

    def init(self, *args: Any, **kwargs: Any) -> Any:
        """Argument 0 placed as this step wants it; the others may be `cf.abstract` examples."""
        return self.compiler.init(self, self.arguments(args, kwargs))

    def eager(self, *args: Any, **kwargs: Any) -> Any:
        """The function on one device: breakpoints work. DTensors enter whole, results are plain (collective on real ranks).

        Random numbers are those of the staged step; what transforms keep in the state is there, as `reference` says.
        """
        leaves, tree = flatten(self.arguments(args, kwargs))
        with canonical.single_device():
            return self.reference(*unflatten(tree, [_plain(leaf) for leaf in leaves]))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Trace, plan and lower for arguments like these, without running: a `Lowered`."""
        return self.compiler.lower(self, self.arguments(args, kwargs))

    def compare(self, *args: Any, tolerance: float | None = None, **kwargs: Any) -> Any:
        """The first value that this step computes differently from its function on one device; see `low.compare`."""
        return self.compiler.compare(self, self.arguments(args, kwargs), tolerance)

    def profile(self, path: Any, *args: Any, steps: int = 3, **kwargs: Any) -> Any:
        """Time a few steps on copies of the arguments: a Chrome trace at `path`, and a `Profile` with `.table()`."""
        return self.compiler.profile(self, self.arguments(args, kwargs), path, steps)

    def on(self, executor: str) -> Staged:
        """The same step on another executor: "simulated", "distributed" or "compiled"."""
        if executor not in EXECUTORS:
            raise PlanError(f"unknown executor {executor!r}{near(executor, EXECUTORS, 'executors')}")
        return attrs.evolve(self, executor=executor, compiler=fresh(self.compiler))

    def with_plan(self, plan: Any) -> Staged:
        """The same step, deciding as `plan` did wherever it speaks."""
        return attrs.evolve(self, plan=plan, compiler=fresh(self.compiler))

    @property
    def reference(self) -> Callable[..., Any]:
        """The function with what the transforms put around it: what this step computes on one device.

        By name of the transform, whatever the order of the chain, so that `a(b(f))` and `b(a(f))` compute the same.
        """
        fn = self.fn
        for intent in sorted(self.intents, key=lambda intent: intent.transform):
            if intent.around is not None:
                fn = intent.around(fn)
            if intent.within is not None:
                fn = intent.within(self, fn)
        return fn

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """The arguments of a call by position, argument 0 with everything that the transforms keep in it."""
        args = _positional(self.fn, args, kwargs or {})
        for intent in self.intents:
            if intent.grow is not None and args:
                args = (intent.grow(args[0]), *args[1:])
        return args

    def intent(self, transform: str) -> Intent | None:
        """The intent of one transform, if it is in the chain."""
        return next((i for i in self.intents if i.transform == transform), None)


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
        raise InputError(f"{getattr(fn, '__name__', fn)} cannot be called so: {error}; pass arguments by position") from error
    if bound.kwargs:
        names = ", ".join(bound.kwargs)
        raise InputError(f"{getattr(fn, '__name__', fn)} takes {names} by keyword only; a staged step passes arguments by position")
    return bound.args


def fresh(compiler: Compiler) -> Compiler:
    """A compiler of the same kind with an empty cache."""
    return type(compiler)()


def stage(fn: Callable[..., Any] | Staged, intent: Intent, compiler: Callable[[], Compiler]) -> Staged:
    """`fn` with one more intent. Raises PlanError where the same transform was applied before, or one that clashes."""
    if isinstance(fn, Staged):
        if fn.intent(intent.transform) is not None:
            raise PlanError(
                f"{intent.transform} is applied twice to {getattr(fn.fn, '__name__', fn.fn)}; "
                f"give all its plans in one call: cf.{intent.transform}(fn, ...)"
            )
        for before in fn.intents:
            why = before.clashes.get(intent.transform) or intent.clashes.get(before.transform)
            if why:
                raise PlanError(f"{before.transform} and {intent.transform} cannot both be applied to one step: {why}")
        return attrs.evolve(fn, intents=(*fn.intents, intent), compiler=fresh(fn.compiler))
    if not callable(fn):
        raise PlanError(f"cf.{intent.transform} wants a step function, not {type(fn).__name__}")
    return Staged(fn, (intent,), compiler())
