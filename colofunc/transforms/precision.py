"""precision: compute in bfloat16 or float16, keep float32 masters in the state.

    step = cf.precision(step_fn, "bf16")
    step = cf.precision(step_fn, cf.Policy(compute="bf16", overrides={"*.router": "fp32"}))
    step = cf.shard(cf.precision(step_fn, "fp16"), mesh)          # in any order; masters are cast before they are gathered

Problem: a script in mixed precision has casts in its model, masters in its optimizer and a loss scaler that asks the
device after every step whether to skip it. Idea: the policy is a function mode around the step (`colofunc.ops.policy`),
masters are the state itself, and the loss scale is three more numbers in the state, so that skipping is a `where`:
inside the update operators, which so stay in place, and around everything else in the state.

    state["loss_scale"] = {"scale": 32768.0, "good": 0, "skipped": 0}      # fp16 only

A state that is a tuple or list has them as one more item at its end, a record in a field `loss_scale`.

A step whose gradients are not all finite returns the state that it was given, with half the scale; 2000 good steps in a
row double it. Metrics stay visible: the loss as it came out, and `skipped`, the steps skipped in a row. The host looks
at that number once in 100 calls, and 100 skipped steps in a row end in a PrecisionError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.errors import InputError, PrecisionError
from colofunc.ops.dtypes import Policy, floating
from colofunc.ops.policy import Mixed
from colofunc.planner.sharding.constraints import Constraints
from colofunc.program.passes.wide_sums import narrow_sources, wide_sums
from colofunc.program.tracing.kept import KeptRecord, state_of
from colofunc.program.tracing.tree import flatten, unflatten

LOSS_SCALE = KeptRecord(
    "loss_scale", ("scale", "good", "skipped"), "cf.precision('fp16') keeps its loss scale", "bf16, which needs none"
)  # fmt: skip
FIRST = 32768.0  # the largest power of two in float16, so that a loss in float16 can be scaled by it
GROWS_AFTER = 2000  # good steps in a row
LEAST = 1.0
LOOKS_EVERY = 100  # calls
PATIENCE = 100  # skipped steps in a row


def precision(
    step_fn: Callable[..., Any] | str | Policy | None = None, policy: str | Policy | torch.dtype | None = None
) -> Any:
    """The step function computing in another precision; "bf16", "fp16", or a `cf.Policy`.

    Floating leaves of argument 0 that are narrower than `Policy.params` are widened. What the step differentiates, and
    the weights of `Model.apply`, are cast to the compute dtype. As a decorator: `@cf.precision("bf16")`.
    """
    if isinstance(step_fn, (str, Policy, torch.dtype)) and policy is None:
        step_fn, policy = None, step_fn
    chosen = policy if isinstance(policy, Policy) else Policy(compute=floating("bf16" if policy is None else policy))
    transform = Transform(
        "precision",
        {"policy": chosen},
        wrap=functools.partial(_wrapped, chosen),
        grow=_Grow(chosen),
        constrain=functools.partial(_priced, chosen),
        rewrite_local=functools.partial(_summed, chosen),
    )
    if step_fn is None or isinstance(step_fn, (str, Policy)):
        return stage(None, transform)
    return stage(step_fn, transform)


def _summed(policy: Policy, build: Build) -> Build:
    return build.evolve(program=wide_sums(build.program, policy.reduce))


def _priced(policy: Policy, build: Build) -> Build:
    """The planner pays for sums of gradients what `_summed` makes of them."""
    sums = dict.fromkeys(sorted(narrow_sources(build.program, policy.reduce)), policy.reduce.itemsize)
    return build.evolve(constraints=build.constraints | Constraints(sums=sums))


# ---- the state ----


class _Grow:
    """Argument 0 with masters, and with a loss scale where there is one. Counts calls to look at it now and then."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls = 0

    def __call__(self, build: Build) -> Build:
        return build.evolve(state=self._grown(build.state))

    def _grown(self, state: Any) -> Any:
        leaves, tree = flatten(state)
        wide = self.policy.params
        if any(_narrower(leaf, wide) for leaf in leaves):
            state = unflatten(tree, [leaf.to(wide) if _narrower(leaf, wide) else leaf for leaf in leaves])
        if self.policy.scales is None:
            return state
        record, bare = LOSS_SCALE.split(state)
        if record is not None:
            self._look(record)
            return state
        first = FIRST if self.policy.scales == "dynamic" else float(self.policy.scales)
        zero = torch.zeros((), dtype=torch.int64)
        return LOSS_SCALE.join(bare, {"scale": torch.tensor(first), "good": zero, "skipped": zero.clone()})

    def _look(self, record: Any) -> None:
        self.calls += 1
        skipped = record["skipped"]
        if self.calls % LOOKS_EVERY or skipped.is_meta:
            return
        if int(skipped) >= PATIENCE:
            raise PrecisionError(
                f"{int(skipped)} steps in a row were skipped because gradients were not finite, at last with a loss "
                f"scale of {float(record['scale']):g}; the state is that before the first of them. Try: bf16, "
                "overrides={glob: 'fp32'} for the module that overflows (low.check_finite finds it), or a smaller "
                "learning rate from an earlier checkpoint"
            )


def _narrower(t: Tensor, wide: torch.dtype) -> bool:
    return t.is_floating_point() and t.dtype.itemsize < wide.itemsize


# ---- the step ----


def _wrapped(policy: Policy, build: Build) -> Build:
    fn = build.fn

    @functools.wraps(fn)
    def stepped(*args: Any) -> Any:
        if policy.scales is None or not args:
            with Mixed(policy) as mixed:
                out = fn(*args)
            mixed.check_overrides()
            return _checked(args, out)
        record, state = LOSS_SCALE.split(args[0])
        with Mixed(policy, record["scale"]) as mixed:
            out = _checked((state,), fn(state, *args[1:]))
        mixed.check_overrides()
        return _scaled(policy, record, state, out, mixed)

    return build.evolve(fn=stepped)


def _checked(args: tuple[Any, ...], out: Any) -> Any:
    """`out`, unless it is a state of which a leaf has lost digits."""
    if not args:
        return out
    old, tree = flatten(args[0])
    new, new_tree = flatten(state_of(out)[0])
    if tree.key() == new_tree.key():
        for name, a, b in zip(tree.names(), old, new, strict=True):
            if (
                a.is_floating_point()
                and b.is_floating_point()
                and b.dtype.itemsize < a.dtype.itemsize
                and a.shape == b.shape
            ):
                raise InputError(
                    f"the step returns {name or 'its state'} as {b.dtype} and was given {a.dtype}, so under "
                    "cf.precision it would lose its master; update parameters under torch.no_grad(), or with "
                    "cf.adapt(...)"
                )
    return out


def _scaled(policy: Policy, record: Any, state: Any, out: Any, mixed: Mixed) -> Any:
    """What the step returns with the loss scale in it; the old state where a gradient was not finite."""
    new, back = state_of(out)
    old_leaves, old_tree = flatten(state)
    leaves, tree = flatten(new)
    if tree.key() != old_tree.key():
        if mixed.finite:
            raise InputError(
                "a step with a loss scale returns its new state first, with the tree of the old one, so that a step "
                "whose gradients overflow can be skipped"
            )
        return out  # evaluates, and returns no state
    finite = mixed.all_finite()
    if finite is None:
        return back(LOSS_SCALE.join(new, record))
    kept = [mixed.chosen(leaf, old) for old, leaf in zip(old_leaves, leaves, strict=True)]
    return back(LOSS_SCALE.join(unflatten(tree, kept), next_scale(policy, record, finite)))


def next_scale(policy: Policy, record: Any, finite: Tensor) -> dict[str, Tensor]:
    """The loss scale behind a step, from the one before it and whether the step's gradients are finite."""
    scale, good, skipped = record["scale"], record["good"], record["skipped"]
    counted = torch.where(finite, good + 1, torch.zeros_like(good))
    new = scale
    if policy.scales == "dynamic":
        grown = counted >= GROWS_AFTER
        new = torch.where(finite, torch.where(grown, scale * 2.0, scale), (scale * 0.5).clamp(min=LEAST))
        counted = torch.where(grown, torch.zeros_like(counted), counted)
    return {"scale": new, "good": counted, "skipped": torch.where(finite, torch.zeros_like(skipped), skipped + 1)}
