"""check: a staged step against the function itself on one device, every leaf.

    cf.testing.check(cf.shard(step_fn, mesh), state, batch)

The reference is the original function (under `cf.precision` and the like: with what they put around it), run eagerly on
copies under the same canonical operators and the same seed. Inputs are never consumed. Tolerances are those of the
design: |a-b| <= 1e-10 * max(1, max|b|) per leaf in float64; where a leaf or anything it is made of is narrower, what
rounding does in this very step (see `bounds`), 1e-5 where that is less in float32; a leaf that is an integer must be
equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import attrs
import torch

from colofunc.compiler.lowered import Lowered
from colofunc.compiler.observation import arguments_of
from colofunc.compiler.staged import Staged
from colofunc.compiler.tolerance import Allowed, Reference
from colofunc.errors import CheckError, InputError
from colofunc.ops import canonical
from colofunc.ops.dtypes import Policy
from colofunc.ops.updates import gradient_at
from colofunc.program.ir import Program, Ref
from colofunc.program.tracing.kept import state_of
from colofunc.program.tracing.tree import map_tensors, walk_keys
from colofunc.testing.trees import NARROW, compare, plain_copy
from colofunc.transforms.precision import LOSS_SCALE, next_scale

FIRST_SEED = 1234


@attrs.frozen
class Checked:
    """What was compared: leaves and steps, the largest scaled difference, and the lowered step that ran last."""

    leaves: int
    steps: int
    worst: float
    low: Lowered = attrs.field(repr=False, eq=False)


def check(step: Staged, state: Any, *batch: Any, steps: int = 2, tolerance: float | None = None) -> Checked:
    """Run `steps` steps of `step` and of its function side by side and compare every output leaf.

    Where `steps` > 1 the function's first output is its next first argument; a function that returns something else is
    checked for one step. Inside `with float64():` float32 leaves of the arguments become float64. The default generator
    is left as it was. Raises CheckError naming the leaves that differ, their paths, specs and the size of the
    difference.
    """
    if not isinstance(step, Staged):
        raise InputError(
            f"check wants a staged step, not {type(step).__name__}. Try: check(cf.shard(step_fn, mesh), state, batch)"
        )
    reference, batch = plain_copy(state), plain_copy(batch)
    reference, batch = doubled_inside((reference, batch))
    step = step.settled(reference, *batch)
    policy = policy_of(step)
    worst, leaves, done = 0.0, 0, 0
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(FIRST_SEED)
        reference = step.arguments((reference, *batch))[0]
        placed = step.init(reference, *batch)
        for n in range(steps):
            low = step.lower(placed, *batch)
            expected = _device_run(step, batch, FIRST_SEED + n, reference)
            got = seeded(FIRST_SEED + n, step, placed, *plain_copy(batch))
            began = reference
            if policy is not None:
                mesh_run = partial(_mesh_run, step, batch, FIRST_SEED + n)
                device_run = partial(_device_run, step, batch, FIRST_SEED + n)
                got, expected, began = comparable_step(
                    policy, reference, got, expected, low.mesh.size, mesh_run, device_run, f"step {n}: "
                )  # fmt: skip
            goes_on = _continues(expected, reference)
            bounds = OutputTolerances(low, (began, *batch), FIRST_SEED + n, f"step {n}: ", goes_on)
            worst = max(worst, compare(got, expected, f"step {n}: out", tolerance, bounds))
            leaves, done = len(list(walk_keys(expected))), n + 1
            if n + 1 == steps or not goes_on:
                break
            placed, reference = got[0], expected[0]
            if tolerance is None and any(value.dtype in NARROW for value in low.global_program.values.values()):
                # Bounds are of one call: the next one begins with what the mesh has made, not with what rounding made
                # of it twice.
                reference = plain_copy(placed)
    return Checked(leaves, done, worst, low)


def doubled_inside(tree: Any) -> Any:
    """Inside `with float64():` the tree with its float32 leaves as float64, else the tree."""
    return map_tensors(doubled, tree) if torch.get_default_dtype() is torch.float64 else tree


def doubled(x: torch.Tensor) -> torch.Tensor:
    """float32 as float64; anything else as it is."""
    return x.detach().double().requires_grad_(x.requires_grad) if x.dtype is torch.float32 else x


def _device_run(step: Staged, batch: Any, seed: int, state: Any) -> Any:
    """One step of the function on one device, on copies."""
    return seeded(seed, run_reference, step.reference, plain_copy(state), *plain_copy(batch))


def _mesh_run(step: Staged, batch: Any, seed: int, state: Any) -> Any:
    """One step on the mesh, from a plain state and on copies."""
    placed = step.init(plain_copy(state), *batch)
    return seeded(seed, step, placed, *plain_copy(batch))


def seeded(seed: int, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(*args)` with torch's default generator at `seed`."""
    torch.manual_seed(seed)
    return fn(*args)


def run_reference(fn: Callable[..., Any], *args: Any) -> Any:
    """The function on one device under the canonical operators, with the seed that a staged call would draw."""
    with canonical.single_device():
        return fn(*args)


def _continues(out: Any, state: Any) -> bool:
    """Whether output 0 can be the next argument 0."""
    if not isinstance(out, (tuple, list)) or not out:
        return False
    return [(keys, _type(x)) for keys, x in walk_keys(out[0])] == [(keys, _type(x)) for keys, x in walk_keys(state)]


def _type(x: Any) -> Any:
    return (x.shape, x.dtype) if isinstance(x, torch.Tensor) else x


__all__ = ["CheckError", "Checked", "check", "run_reference", "seeded"]


# ---- steps that one side skips ----
#
# Problem: a float16 gradient is finite up to 65504. The mesh adds the parts of its ranks in float32 (`Policy.reduce`),
# so it takes a step whose sum one device cannot hold; parts that cancel may overflow where their sum does not. Neither
# is a mistake, and the two states have nothing in common. Idea: a loss scale changes nothing but what overflows and
# underflows. Parts that are finite on R ranks have a sum of at most R times 65504, so with 1/(2R) of the scale one
# device takes the step as well, and what the mesh made of it is compared with that. Where the mesh skips, its state has
# to be the old one to the last bit, and the step of both is compared with the smaller scale.
#
#     one device: 2 x 50272 = inf, skipped      mesh: 50272 + 50272 in float32, taken      one device at a quarter: 25136, taken


PlainStep = Callable[[Any], Any]  # a step of a plain state
StepResults = tuple[Any, Any, Any]  # what the mesh gave, what is expected, the state that this began with


def policy_of(step: Staged) -> Policy | None:
    """The policy of a step that has a loss scale, None for other steps."""
    precision = step.transform("precision")
    policy: Policy | None = precision.options["policy"] if precision is not None else None
    return policy if policy is not None and policy.scales is not None else None


def comparable_step(
    policy: Policy,
    state: Any,
    got: Any,
    expected: Any,
    ranks: int,
    mesh_run: PlainStep,
    device_run: PlainStep,
    where: str,
) -> StepResults:
    """`got`, `expected` and `state` where both took the step or both skipped it, else as the module says.

    state: plain, with its loss scale; mesh_run and device_run: a step of such a state. Raises CheckError where the mesh
    returns another state than the one of a step that it skipped, or where the two decide differently with the smaller
    scale too.
    """
    if not _returns(expected, state) or _taken(got) == _taken(expected):
        return got, expected, state
    record, bare = LOSS_SCALE.split(state)
    small = record["scale"] / 2 ** (ranks.bit_length() + 1)
    smaller = LOSS_SCALE.join(bare, {**record, "scale": small})
    expected = device_run(smaller)
    if _taken(got):
        mesh_took = got
    else:
        skipped = LOSS_SCALE.join(bare, next_scale(policy, record, torch.tensor(False)))
        compare(state_of(got)[0], skipped, f"{where}the state of a step that was skipped", tolerance=0.0)
        mesh_took = mesh_run(smaller)
    if not (_taken(mesh_took) and _taken(expected)):
        raise CheckError(
            f"{where}one device and the mesh do not skip the same steps, with a loss scale of "
            f"{float(record['scale']):g} nor with {float(small):g}\nTry: step.lower(...).check_finite(...), which "
            "names the operator that overflows"
        )
    if mesh_took is not got:
        return mesh_took, expected, smaller
    # What the mesh took with the scale as it was: the numbers are those of the smaller one, the record is not.
    new, back = state_of(expected)
    after = next_scale(policy, record, torch.tensor(True))
    return got, back(LOSS_SCALE.join(LOSS_SCALE.split(new)[1], after)), smaller


def _returns(out: Any, state: Any) -> bool:
    """Whether a step returned a state with its loss scale."""
    return [keys for keys, _ in walk_keys(state_of(out)[0])] == [keys for keys, _ in walk_keys(state)]


def _taken(out: Any) -> bool:
    """Whether a step was taken, from the loss scale in what it returned."""
    return int(LOSS_SCALE.split(state_of(out)[0])[0]["skipped"]) == 0


# ---- bounds of one call ----
#
# A bound per dtype is false in both directions: half of a small gradient is within 0.02 of nothing, and Adam moves a
# weight by its whole rate, this way or that, where only rounding is left of a gradient. See `compiler/tolerance.py`. It
# costs one more run of the step on one device (three where there are half precisions), so it is worked out when
# somebody asks.


class OutputTolerances:
    """Of the outputs of one call. args: plain values; seed: torch's, with which the call draws its random numbers.

    where: what a name begins with in an error. goes_on: output 0 is the next argument 0, so that it has the names of
    that.
    """

    def __init__(self, low: Lowered, args: tuple[Any, ...], seed: int, where: str = "", goes_on: bool = False) -> None:
        self._low = low
        self._where = where
        self._goes_on = goes_on
        self._args = args
        self._seed = seed

    def of(self, position: int, expected: torch.Tensor) -> float | torch.Tensor | None:
        """As a share of max(1, max|expected|), or for every element; None where the step has no such output."""
        outputs = self._low.global_program.outputs
        if position >= len(outputs):
            return None
        return self._allowed.of(outputs[position], expected)

    def name(self, position: int) -> str | None:
        """What the plan calls an output: that of a state by the name of the argument that it comes back as."""
        traced = self._low.traced
        if position >= len(traced.out_names):
            return None
        first = traced.in_tree.children[0]
        if self._goes_on and position < len(first.names()):
            return f"{self._where}{traced.names[position]}"
        return f"{self._where}{traced.out_names[position]}"

    @cached_property
    def _allowed(self) -> Allowed:
        program = self._low.global_program
        torch.manual_seed(self._seed)
        inputs = arguments_of(self._low, self._args).whole()
        asked = Counter({*program.outputs, *_gradients(program)})
        allowed = Allowed(program, inputs, tuple(asked), None)
        reference = Reference(program, inputs, asked, allowed.ran)
        with torch.no_grad():
            for output in program.outputs:
                reference.value(output)
        return allowed


def _gradients(program: Program) -> list[int]:
    """What updates read, whose own bounds say how far the update may be off."""
    found = []
    for node in program.nodes:
        place = gradient_at(node.target)
        if place is not None and isinstance(node.args[place], Ref):
            found.append(node.args[place].id)
    return found
