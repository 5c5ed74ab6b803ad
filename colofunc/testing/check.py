"""check: a staged step against the function itself on one device, every leaf.

    cf.testing.check(cf.shard(step_fn, mesh), state, batch)

The reference is the original function, run eagerly on copies under the same canonical operators and the same seed.
Inputs are never consumed. Tolerances are those of the design: |a-b| <= 1e-10 * max(1, max|b|) per leaf in float64,
1e-5 in float32; a leaf that is an integer must be equal.
"""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CheckError
from colofunc.ops import canonical
from colofunc.transforms.staged import Staged

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@attrs.frozen
class Checked:
    """What was compared: leaves and steps, and the largest scaled difference."""

    leaves: int
    steps: int
    worst: float


def check(step: Staged, state: Any, *batch: Any, steps: int = 2, tolerance: float | None = None) -> Checked:
    """Run `steps` steps of `step` and of its function side by side and compare every output leaf.

    The function's first output must be the next first argument where `steps` > 1. Raises CheckError naming the first
    leaf that differs, its path, spec and the size of the difference.
    """
    state = copy_tree(state)
    placed, reference = step.init(state, *batch), state
    worst, leaves = 0.0, 0
    for n in range(steps):
        seed = 1234 + n
        torch.manual_seed(seed)
        expected = run_reference(step.fn, reference, *copy_tree(batch))
        torch.manual_seed(seed)
        got = step(placed, *copy_tree(batch))
        worst = max(worst, compare_trees(got, expected, f"step {n}", tolerance))
        leaves = len(pytree.tree_leaves(expected))
        if n + 1 < steps:
            placed, reference = got[0], expected[0]
    return Checked(leaves, steps, worst)


def run_reference(fn: Any, *args: Any) -> Any:
    """The function on one device under the canonical operators, with the seed that a staged call would draw."""
    with canonical.single_device():
        return fn(*args)


def copy_tree(tree: Any) -> Any:
    """A deep copy of the tensors of a tree (plain data stays)."""
    return pytree.tree_map(lambda x: x.detach().clone() if isinstance(x, torch.Tensor) else x, tree)


def compare_trees(got: Any, expected: Any, where: str = "", tolerance: float | None = None) -> float:
    """Largest scaled difference of two trees; raises CheckError at the first leaf beyond its tolerance."""
    a, a_tree = pytree.tree_flatten_with_path(got)
    b, b_tree = pytree.tree_flatten_with_path(expected)
    if len(a) != len(b):
        raise CheckError(f"{where}: {len(a)} leaves against {len(b)} of the reference; trees {a_tree} and {b_tree}")
    worst = 0.0
    for (path, x), (_, y) in zip(a, b, strict=True):
        name = f"{where}{pytree.keystr(path)}"
        worst = max(worst, compare_leaf(x, y, name, tolerance))
    return worst


def compare_leaf(x: Any, y: Any, name: str, tolerance: float | None = None) -> float:
    """Scaled difference of two leaves; raises CheckError beyond the tolerance of the reference's dtype."""
    if not isinstance(y, torch.Tensor):
        if x != y and not (isinstance(x, torch.Tensor) and x.numel() == 1 and x.item() == y):
            raise CheckError(f"{name}: {x!r} against {y!r} on one device")
        return 0.0
    spec = x.sharding.text() if isinstance(x, DTensor) else "plain"
    plain = x.full() if isinstance(x, DTensor) else x
    if tuple(plain.shape) != tuple(y.shape) or plain.dtype != y.dtype:
        raise CheckError(f"{name} [{spec}]: {tuple(plain.shape)} {plain.dtype} against {tuple(y.shape)} {y.dtype} on one device")
    if not y.dtype.is_floating_point and not y.dtype.is_complex:
        if not torch.equal(plain, y):
            raise CheckError(f"{name} [{spec}]: {int((plain != y).sum())} of {y.numel()} integers differ from one device")
        return 0.0
    if y.numel() == 0:
        return 0.0
    if not torch.equal(torch.isnan(plain), torch.isnan(y)):
        raise CheckError(f"{name} [{spec}]: not-a-number in other places than on one device")
    scale = max(1.0, float(torch.nan_to_num(y).abs().max()))
    worst = float(torch.nan_to_num(plain - y).abs().max()) / scale
    bound = tolerance if tolerance is not None else TOLERANCE[y.dtype]
    if worst > bound:
        raise CheckError(f"{name} [{spec}]: differs from one device by {worst:.3g} (scaled), allowed {bound:.0e}; try step.lower(...).compare(...)")
    return worst
