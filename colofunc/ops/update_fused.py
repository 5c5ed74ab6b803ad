"""torch's fused kernels of updates, and which tensors they can take.

Problem: they walk all operands in memory order, read counts, rates and flags in one dtype, and are less precise than
the parameter on some devices. Idea: whoever updates one parameter or many asks here first, and calls them through the
functions below.

    if is_exact(param) and fusable(param, exp_avg, exp_avg_sq):
        fused_adamw_([param], [grad], [exp_avg], [exp_avg_sq], [], step, lr, 0.9, 0.999, 1e-8, 0.01, True, False, None)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colofunc import compat

aten = torch.ops.aten
FUSED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def fusable(param: Tensor, *others: Tensor) -> bool:
    """torch's fused kernels walk all operands in memory order, so they must lie alike."""
    dtype, stride = param.dtype, param.stride()
    if dtype not in FUSED_DTYPES or any(t.dtype != dtype or t.shape != param.shape for t in others):
        return False
    if param.is_contiguous():  # strides along dims of one element say nothing
        return all(t.is_contiguous() for t in others)
    # Dense in another order has no gaps either: a copy of it lies the same way.
    return all(t.stride() == stride for t in others) and stride == torch.empty_like(param, device="meta").stride()


def is_exact(param: Tensor) -> bool:
    """Whether torch's fused kernels compute as precisely as the parameter is: on CUDA they read the rate as float32."""
    return param.device.type == "cpu" or param.dtype != torch.float64


def beside(number: Tensor, param: Tensor) -> Tensor:
    """A step count, rate or flag in the memory of the parameter: a kernel on a GPU that is handed one of the host reads
    nobody's memory.
    """
    return number if number.device == param.device else number.to(param.device)


def _rate(lr: Tensor, param: Tensor) -> Tensor:
    """The learning rate as the fused kernels read it."""
    return beside(lr, param) if param.device.type == "cpu" else lr.to(param.device, torch.float32)


def _found_inf(finite: Tensor | None, param: Tensor) -> Tensor | None:
    return None if finite is None else beside(finite, param).logical_not().to(torch.float32)


def fused_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    maxima: Sequence[Tensor], step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool,
    maximize: bool, finite: Tensor | None,
) -> None:  # fmt: skip
    """torch's fused kernel on parameters of one dtype and device, each of which lies as its operands do.

    No maxima: no amsgrad.
    """
    fused = aten._fused_adamw_.tensor_lr if decoupled else aten._fused_adam_.tensor_lr
    # The kernel reads counts and flags as float32, whatever a mode such as `cf.testing.float64()` makes of that dtype.
    with compat.no_function_modes():
        count = beside(step, params[0]).to(torch.float32)
        fused(
            params, grads, exp_avgs, exp_avg_sqs, maxima, [count] * len(params), lr=_rate(lr, params[0]), beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=bool(maxima), maximize=maximize, found_inf=_found_inf(finite, params[0]),
        )  # fmt: skip


def fused_sgd_(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], lr: Tensor, momentum: float, weight_decay: float,
    nesterov: bool, maximize: bool, finite: Tensor | None,
) -> None:  # fmt: skip
    """torch's fused kernel, as `fused_adamw_`. No buffers: no momentum."""
    with compat.no_function_modes():
        aten._fused_sgd_.tensor_lr(
            params, grads, buffers, weight_decay=weight_decay, momentum=momentum if buffers else 0.0, lr=_rate(lr, params[0]),
            dampening=0.0, nesterov=nesterov and bool(buffers), maximize=maximize, is_first_step=False,
            found_inf=_found_inf(finite, params[0]),
        )  # fmt: skip


def sgd_is_fused(param: Tensor, momentum: float, dampening: float) -> bool:
    """Whether torch's fused kernel has the numbers of this update: in half precision it rounds less often, and only it
    would have to know from the host whether a step with damped gradients is the first one."""
    return param.dtype in (torch.float64, torch.float32) and is_exact(param) and (momentum == 0.0 or dampening == 0.0)
