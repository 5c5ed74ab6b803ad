"""Whether kernels in Triton may be launched on a tensor: there is a card, Triton, and what Triton needs to launch.

    if triton_use.takes_triton(x): ...       # else the same by torch's operators
"""

from __future__ import annotations

import subprocess
import warnings
from functools import cache

import torch

from colofunc.ops.kernels import has_triton


def takes_triton(x: torch.Tensor) -> bool:
    """Whether a kernel in Triton may be launched on x where it lies."""
    return x.is_cuda and x.numel() > 0 and launches_on(x.device)


def launches_on(device: torch.device) -> bool:
    """Whether a kernel in Triton may be launched on a card."""
    return has_triton() and _compiles(device)


@cache
def _compiles(device: torch.device) -> bool:
    """Whether Triton can launch a kernel there: it wants a C compiler. Says so once where it cannot."""
    from colofunc.ops.fp8_triton import transposed  # Triton is not there everywhere

    try:
        transposed(torch.zeros((1, 2), dtype=torch.uint8, device=device))
    except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
        words = str(error).strip().split("\n")[0][:200]
        warnings.warn(
            f"Triton launches no kernel on {device} ({type(error).__name__}: {words}), so random numbers, casts to "
            "float8 and experts take torch's operators. Try: a C compiler, or CC=path",
            stacklevel=2,
        )
        return False
    return True
