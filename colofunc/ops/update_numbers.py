"""What the updates of Adam in narrow dtypes (`update_rounded`, `update_packed`) begin with."""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.ops.update_fused import beside


def is_skipped(finite: Tensor | None, param: Tensor) -> bool:
    """Whether the host skips a step.

    It looks at a flag that lies there, and at any flag of a parameter that lies there: kernels for the host are not told.
    Where both are on a GPU its kernels look.
    """
    if finite is None or (finite.device.type != "cpu" and param.device.type != "cpu"):
        return False
    return not bool(finite)


def on_device(finite: Tensor | None, param: Tensor) -> Tensor | None:
    """The flag where the device has to look at it, beside the parameter; None where nothing is skipped."""
    if finite is None or finite.device.type == "cpu":
        return None
    return beside(finite, param)


def corrections(
    step: Tensor, lr: Tensor, param: Tensor, beta1: float, beta2: float, weight_decay: float, wide: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(number of the update in float64; in `wide` the rate over the first moment's correction, the root of the second
    one's, and what decoupled decay leaves of a parameter), 0-dim, beside the parameter.
    """
    times, rate = beside(step, param).to(torch.float64), beside(lr, param).to(torch.float64)
    first = (rate / (1 - beta1**times)).to(wide)
    root = (1 - beta2**times).sqrt().to(wide)
    keep = (1 - rate * weight_decay).to(wide)
    return times, first, root, keep
