"""check: a staged step against the function itself on one device, every leaf.

    cf.testing.check(cf.shard(step_fn, mesh), state, batch)

The reference is the original function (under `cf.precision` and the like: with what they put around it), run eagerly on
copies under the same canonical operators and the same seed.
Inputs are never consumed. Tolerances are those of the design: |a-b| <= 1e-10 * max(1, max|b|) per leaf in float64; where a leaf
or anything it is made of is narrower, what rounding does in this very step (see `bounds`), 1e-5 where that is less in float32; a
leaf that is an integer must be equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.compiler.lowered import Lowered
from colofunc.compiler.staged import Staged
from colofunc.errors import CheckError, InputError
from colofunc.ops import canonical
from colofunc.program.tracing.tree import map_tensors, walk_keys
from colofunc.testing.bounds import Bounds
from colofunc.testing.overflow import comparable, policy_of
from colofunc.testing.trees import NARROW, compare, plain_copy

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
    is left as it was. Raises CheckError naming the leaves that differ, their paths, specs and the size of the difference.
    """
    if not isinstance(step, Staged):
        raise InputError(f"check wants a staged step, not {type(step).__name__}. Try: check(cf.shard(step_fn, mesh), state, batch)")
    reference, batch = plain_copy(state), plain_copy(batch)
    reference, batch = doubled_inside((reference, batch))
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
                got, expected, began = comparable(
                    policy, reference, got, expected, low.mesh.size, mesh_run, device_run, f"step {n}: "
                )  # fmt: skip
            goes_on = _continues(expected, reference)
            bounds = Bounds(low, (began, *batch), FIRST_SEED + n, f"step {n}: ", goes_on)
            worst = max(worst, compare(got, expected, f"step {n}: out", tolerance, bounds))
            leaves, done = len(list(walk_keys(expected))), n + 1
            if n + 1 == steps or not goes_on:
                break
            placed, reference = got[0], expected[0]
            if tolerance is None and any(value.dtype in NARROW for value in low.global_program.values.values()):
                # Bounds are of one call: the next one begins with what the mesh has made, not with what rounding made of it twice.
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
