"""Trees of tensors as tests need them: copies, plain values, and a comparison that names the leaf.

>>> compare({"w": torch.ones(2)}, {"w": torch.ones(2)})
0.0
"""

from __future__ import annotations

from typing import Any

import torch

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import CheckError
from colofunc.program.closeness import TOLERANCE, scaled_difference
from colofunc.program.tracing.tree import map_tensors, walk


def plain_copy(tree: Any) -> Any:
    """Copies of all tensors, on CPU and whole: what a check may use up. Collective where leaves are DTensors."""
    return map_tensors(_plain_copy, tree)


def _plain_copy(x: torch.Tensor) -> torch.Tensor:
    whole = x.full() if isinstance(x, DTensor) else x.detach()
    # .clone() keeps what the leaf was differentiated for: the step may read requires_grad.
    return whole.cpu().clone().requires_grad_(x.requires_grad and x.is_leaf)


def compare(got: Any, expected: Any, where: str = "", tolerance: float | None = None) -> float:
    """The largest scaled difference of two trees. Raises CheckError that lists the leaves beyond their tolerance."""
    a, b = list(walk(got, where)), list(walk(expected, where))
    there, wanted = [path for path, _ in a], [path for path, _ in b]
    if there != wanted:
        odd = [p for p in there if p not in wanted][:4], [p for p in wanted if p not in there][:4]
        raise CheckError(f"{where or 'compare'}: the trees differ, unexpected {odd[0]}, missing {odd[1]}, or in another order")
    worst, failed = 0.0, []
    for (path, x), (_, y) in zip(a, b, strict=True):
        try:
            worst = max(worst, compare_leaf(x, y, path, tolerance))
        except CheckError as error:
            failed.append(str(error))
    if failed:
        more = f"\nand {len(failed) - 8} more of {len(b)} leaves" if len(failed) > 8 else ""
        raise CheckError("\n".join(failed[:8]) + more + "\nTry: step.lower(...).text(), which shows how each of them is computed and moved")
    return worst


def compare_leaf(x: Any, y: Any, name: str, tolerance: float | None = None) -> float:
    """Scaled difference of two leaves. Raises CheckError beyond the tolerance of the reference's dtype."""
    if not isinstance(y, torch.Tensor):
        if x is not y and x != y:
            raise CheckError(f"{name}: {x!r} against {y!r}")
        return 0.0
    if not isinstance(x, torch.Tensor):
        raise CheckError(f"{name}: {x!r} against a tensor of shape {tuple(y.shape)}")
    label = f"{name} [{x.sharding.text()}]" if isinstance(x, DTensor) else name
    whole = x.full() if isinstance(x, DTensor) else x.detach()
    y = y.full() if isinstance(y, DTensor) else y.detach()
    if (whole.shape, whole.dtype) != (y.shape, y.dtype):
        raise CheckError(f"{label}: {tuple(whole.shape)} {whole.dtype} against {tuple(y.shape)} {y.dtype}")
    if not (y.dtype.is_floating_point or y.dtype.is_complex):
        if not torch.equal(whole, y):
            raise CheckError(f"{label}: {int((whole != y).sum())} of {y.numel()} values differ")
        return 0.0
    worst = scaled_difference(whole, y)
    bound = tolerance if tolerance is not None else TOLERANCE.get(y.dtype, 1e-1)
    if not worst <= bound:
        raise CheckError(f"{label}: differs by {worst:.3g} of the largest value, allowed {bound:.0e}")
    return worst
