"""How close is equal: the tolerances of the design, and the difference that is measured against them.

>>> scaled_difference(torch.tensor([100.0, 1.0]), torch.tensor([101.0, 1.0]))        # of the largest value
0.009900989942252636
"""

from __future__ import annotations

import torch

# |a - b| <= bound * max(1, max|b|) per tensor. Half precisions: a few rounding errors of their 8 and 11 bits.
TOLERANCE = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.bfloat16: 2e-2,
    torch.float16: 2e-3,
}


def absolute_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """|a - b| element by element; of whole numbers as float64, where nothing wraps around."""
    if b.dtype.is_floating_point or b.dtype.is_complex:
        return (a.to(b.dtype) - b).abs()
    return (a.to(torch.float64) - b.to(torch.float64)).abs()


def scaled_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """max|a - b| / max(1, max|b|); infinite where one is not finite and the other is something else."""
    if b.numel() == 0:
        return 0.0
    finite = torch.isfinite(b)
    same = torch.equal(torch.isfinite(a), finite) and torch.equal(a.isnan(), b.isnan())
    if not same or not torch.equal(a[b.isinf()], b[b.isinf()]):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(1.0, float(b[finite].abs().max()))
    return float((a[finite] - b[finite]).abs().max()) / scale
