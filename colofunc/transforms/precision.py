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

import warnings
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor

from colofunc.compiler.step_compiler import stage
from colofunc.compiler.transform import Build, Transform
from colofunc.dtensor.roles import LASTING, give_role, role_of
from colofunc.errors import InputError, PrecisionError
from colofunc.ops.dtypes import Policy, floating
from colofunc.ops.policy import Mixed
from colofunc.planner.sharding.constraints import Constraints
from colofunc.program.ir import Value
from colofunc.program.passes.wide_sums import narrow_sources, wide_sums
from colofunc.program.tracing.kept import KeptRecord, state_of
from colofunc.program.tracing.roles import next_values, results_of, same_shapes
from colofunc.program.tracing.trace import Traced, trace
from colofunc.program.tracing.tree import Tree, flatten, unflatten

LOSS_SCALE = KeptRecord(
    "loss_scale", ("scale", "good", "skipped"), "cf.precision('fp16') keeps its loss scale", "bf16, which needs none"
)  # fmt: skip
FIRST = 32768.0  # the largest power of two in float16, so that a loss in float16 can be scaled by it
GROWS_AFTER = 2000  # good steps in a row
LEAST = 1.0  # a loss scale is never halved below this
LOOKS_EVERY = 100  # calls
PATIENCE = 100  # skipped steps in a row


def precision(
    step_fn: Callable[..., Any] | str | Policy | None = None, policy: str | Policy | torch.dtype | None = None
) -> Any:
    """The step function computing in another precision; "bf16", "fp16", or a `cf.Policy`.

    Floating parameters, state and buffers that are narrower than `Policy.params` are widened, in whichever argument
    they stand; the batch is not. What the step differentiates, and the weights of `Model.apply`, are cast to the
    compute dtype. A loss scale is kept in argument 0. As a decorator: `@cf.precision("bf16")`.
    """
    if isinstance(step_fn, (str, Policy, torch.dtype)) and policy is None:
        step_fn, policy = None, step_fn
    chosen = policy if isinstance(policy, Policy) else Policy(compute=floating("bf16" if policy is None else policy))
    transform = Transform(
        "precision",
        {"policy": chosen},
        wrap=partial(_wrapped, chosen),
        grow=_Grow(chosen),
        constrain=partial(_priced, chosen),
        rewrite_local=partial(_summed, chosen),
    )
    if step_fn is None or isinstance(step_fn, (str, Policy)):
        return stage(None, transform)
    return stage(step_fn, transform)


def _summed(policy: Policy, build: Build) -> Build:
    return build.evolve(program=wide_sums(build.program, policy.reduce))


def _priced(policy: Policy, build: Build) -> Build:
    """The planner pays for sums of gradients what `_summed` makes of them.

    Raises InputError for a state that loses its master.
    """
    _check_masters(build.traced)
    sums = dict.fromkeys(sorted(narrow_sources(build.program, policy.reduce)), policy.reduce.itemsize)
    return build.evolve(constraints=build.constraints | Constraints(sums=sums))


# ---- the state ----


class _Grow:
    """The arguments with masters, and argument 0 with a loss scale where there is one. Counts calls to look at it now
    and then.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.calls = 0
        # Trees and shapes of arguments -> the role of each of their leaves, as a trace has found it; None: it failed.
        self.traced: dict[Any, Sequence[str] | None] = {}

    def __call__(self, build: Build) -> Build:
        if any(_narrower(leaf, self.policy.params) for leaf in flatten((build.state, *build.others))[0]):
            build = self._widened(build)
        return build.evolve(state=self._scaled(build.state))

    def _scaled(self, state: Any) -> Any:
        """A state with a loss scale, where the policy has one."""
        if self.policy.scales is None:
            return state
        record, bare = LOSS_SCALE.split(state)
        if record is not None:
            self._look(record)
            return state
        first = FIRST if self.policy.scales == "dynamic" else float(self.policy.scales)
        zero = torch.zeros((), dtype=torch.int64)
        return LOSS_SCALE.join(bare, {"scale": torch.tensor(first), "good": zero, "skipped": zero.clone()})

    def _widened(self, build: Build) -> Build:
        """The arguments with everything wide that goes from step to step."""
        record, bare = None, build.state
        if self.policy.scales is not None:
            record, bare = LOSS_SCALE.split(build.state)
        args = (bare, *build.others)
        leaves, tree = flatten(args)
        lasting = self._lasting(build.fn, args, leaves, tree)
        wide = list(leaves)
        for place, leaf in enumerate(leaves):
            if lasting[place] and _narrower(leaf, self.policy.params):
                wide[place] = leaf.to(self.policy.params)
                if role_of(leaf):
                    give_role(role_of(leaf), [wide[place]])
        bare, *others = unflatten(tree, wide)
        return build.evolve(state=bare if record is None else LOSS_SCALE.join(bare, record), others=tuple(others))

    def _lasting(
        self, fn: Callable[..., Any], args: tuple[Any, ...], leaves: Sequence[Tensor], tree: Tree
    ) -> Sequence[bool]:
        """Whether each leaf goes from step to step.

        It carries a role, or a trace of the step says what it is: weights that a user has made by hand carry none. What
        the step itself cannot be traced with (other transforms keep something in the state) is no such state, and where
        nothing there carries a role argument 0 is taken for what lasts.
        """
        carried = [role_of(leaf) for leaf in leaves]
        unknown = [leaf for leaf, role in zip(leaves, carried, strict=True) if not role]
        if not any(_narrower(leaf, self.policy.params) for leaf in unknown):
            return [role in LASTING for role in carried]
        key = tree.key(), tuple(tuple(leaf.shape) for leaf in leaves)
        if key not in self.traced:
            self.traced[key] = self._roles(fn, args)
        traced = self.traced[key]
        if traced is not None:
            return [(own or found) in LASTING for own, found in zip(carried, traced, strict=True)]
        first = len(flatten(args[0])[0]) if not any(carried) else 0
        return [place < first or role in LASTING for place, role in enumerate(carried)]

    def _roles(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Sequence[str] | None:
        """The role of each leaf, by a trace; None where the step cannot be traced so."""

        @wraps(fn)
        def narrow(*args: Any) -> Any:
            with Mixed(self.policy):
                return fn(*args)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the trace that is planned says it
            try:
                program = trace(narrow, args, role_of=role_of).program
            except Exception:
                return None  # if this is no fault of the arguments alone, the trace that is planned raises it
        return [program.values[id].role for id in program.inputs[: len(flatten(args)[0])]]

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

    @wraps(fn)
    def stepped(*args: Any) -> Any:
        if policy.scales is None or not args:
            with Mixed(policy) as mixed:
                out = fn(*args)
            mixed.check_overrides()
            return out
        record, state = LOSS_SCALE.split(args[0])
        with Mixed(policy, record["scale"]) as mixed:
            out = fn(state, *args[1:])
            _check_master(state, out)
        mixed.check_overrides()
        return _scaled(policy, record, state, out, mixed)

    return build.evolve(fn=stepped)


def _check_masters(traced: Traced) -> None:
    """Raises InputError where an argument that goes from step to step comes back narrower than it was given."""
    program, arguments = traced.program, traced.in_tree.children
    ids = dict(zip(traced.names, program.inputs, strict=False))
    results = results_of(traced.out_tree)
    comes_back = partial(next_values, arguments, results, ids, program.outputs, program.values, program.nodes)
    whole = comes_back()
    for name, narrow in comes_back(alike=_loses_digits).items():
        old, new = program.values[ids[name]], program.values[narrow]
        # Where nothing is known of a step, a tree that comes back is a state.
        lasts = old.role in LASTING or (traced.knows_no_weights and name not in _lone(arguments))
        if lasts and name not in whole and _narrower_value(old, new):
            argument = next(each.name for each in arguments if name in each.names())
            raise _loses_master(name.removeprefix(f"{argument}."), new.dtype, old.dtype)


def _lone(arguments: Sequence[Tree]) -> set[str]:
    """The names of arguments that are one tensor."""
    return {argument.name for argument in arguments if argument.kind == "tensor"}


def _loses_digits(argument: Tree, result: Tree, before: Sequence[Value], after: Sequence[Value]) -> bool:
    return same_shapes(argument, result, before, after) and any(map(_narrower_value, before, after))


def _narrower_value(old: Value, new: Value) -> bool:
    floating = old.dtype.is_floating_point and new.dtype.is_floating_point
    return floating and new.dtype.itemsize < old.dtype.itemsize


def _check_master(state: Any, out: Any) -> None:
    """Raises InputError where a step with a loss scale returns its state narrower, which behind it could not be seen."""
    old, tree = flatten(state)
    new, new_tree = flatten(state_of(out)[0])
    if tree.key() != new_tree.key():
        return
    for name, a, b in zip(tree.names(), old, new, strict=True):
        if a.is_floating_point() and _narrower(b, a.dtype) and a.shape == b.shape:
            raise _loses_master(name, b.dtype, a.dtype)


def _loses_master(name: str, new: torch.dtype, old: torch.dtype) -> InputError:
    return InputError(
        f"the step returns {name or 'its state'} as {new} and was given {old}, so under cf.precision it would lose its "
        "master; update parameters under torch.no_grad(), or with cf.adapt(...)"
    )


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
