"""Updates on a GPU that read a gradient narrower than the parameter, as the backward pass made it.

Problem: torch's fused kernels read all operands in one dtype, so a gradient in bfloat16 is cast as a whole before a
float32 parameter is updated: 8 bytes an element more are written and read than the 26 that Adam needs, and 4 are held.
Idea: one pass by a kernel in CUDA (`ext/cuda/cuda/update.cu`) with the rules of the CPU's. Without it torch's fused
kernel takes a gradient that was cast before.

    adamw_device_(param, grad, exp_avg, exp_avg_sq, step, lr, 0.9, 0.999, 1e-8, 0.01, True, False, None)    # float32, grad bfloat16

`step`, `lr` and `finite` are as `colofunc.ops.update` has them; what lies on the device of them is read there, and the
host waits for nothing. Formulas and bounds: `colofunc.ops.update_narrow`. Products and sums round as the CPU's kernels
have them, so that SGD has the same bits; powers in Adam's rate are another library's.
"""

from __future__ import annotations

from torch import Tensor

from colofunc.ops import native
from colofunc.ops.define import define, nothing
from colofunc.ops.update_fused import fused_adamw_, fused_sgd_
from colofunc.ops.update_narrow import check_operands, is_narrow


def reads_narrow_there(param: Tensor, grad: Tensor) -> bool:
    """Whether an update on a GPU reads this gradient as it is.

    Tensors of which `fusable` has agreed to parameter and states.
    """
    fits = is_narrow(param.dtype, grad.dtype) and param.device.type == "cuda" and param.shape == grad.shape
    return fits and native.ready("cuda")


# ---- the operators: without the library, torch's on a gradient that was cast ----


def _adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, maximize: bool, finite: Tensor | None,
) -> None:  # fmt: skip
    check_operands("adamw_device_", param, grad, exp_avg, exp_avg_sq)
    wide = grad.to(param.dtype)
    fused_adamw_(
        [param],
        [wide],
        [exp_avg],
        [exp_avg_sq],
        [],
        step,
        lr,
        beta1,
        beta2,
        eps,
        weight_decay,
        decoupled,
        maximize,
        finite,
    )


def _sgd(
    param: Tensor, grad: Tensor, buffer: Tensor | None, lr: Tensor, momentum: float, weight_decay: float, nesterov: bool, maximize: bool,
    finite: Tensor | None,
) -> None:  # fmt: skip
    buffers = [] if buffer is None else [buffer]
    check_operands("sgd_device_", param, grad, *buffers)
    fused_sgd_([param], [grad.to(param.dtype)], buffers, lr, momentum, weight_decay, nesterov, maximize, finite)


adamw_device_ = define(
    "adamw_device_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor step, Tensor lr, "
    "float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, Tensor? finite) -> ()",
    _adamw, nothing,
)  # fmt: skip
sgd_device_ = define(
    "sgd_device_(Tensor(a!) param, Tensor grad, Tensor(b!)? buffer, Tensor lr, float momentum, float weight_decay, "
    "bool nesterov, bool maximize, Tensor? finite) -> ()",
    _sgd, nothing,
)  # fmt: skip
