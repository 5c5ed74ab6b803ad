"""Lion as one operator, `colofunc.lion`, with its in-place twin and the form that runs on the host.

Problem: torch has no Lion, and its pieces pass over the parameter seven times to read and write three tensors. Idea: one operator,
elementwise over the parameter, whose host form is one pass by a kernel in C++ (`ext/cuda/cpu/update.cpp`).

    param, exp_avg = lion(param, grad, exp_avg, lr, 0.9, 0.99, 0.1)
    lion_(param, grad, exp_avg, lr, 0.9, 0.99, 0.1)                       # same numbers, no allocation

    toward = exp_avg beta1 + (1 - beta1) grad      param = param (1 - lr weight_decay) - lr sign(toward)
    exp_avg = exp_avg beta2 + (1 - beta2) grad

Of NaN the sign is NaN, where torch's is 0: a gradient that is none would else leave the parameter where it is without a word.

Numbers: every operation above rounds once, in Python and in the kernel, so that a float32 parameter has the same bits with a compiler and
without, at every instruction set, by a gradient in float32, bfloat16 or float16. `lr` is a 0-dim tensor; no count of steps is needed.
`finite`: as in `colofunc.ops.update`.
Source: Chen et al., Symbolic discovery of optimization algorithms (2023, 2302.06675), algorithm 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.ops import native
from colofunc.ops.define import define
from colofunc.ops.update_fused import beside, fusable
from colofunc.ops.update_narrow import GRADS, check_operands, in_blocks, in_memory_order

HOST_GRADS = (torch.float32, *GRADS)


def _on_host(param: Tensor, grad: Tensor, exp_avg: Tensor) -> bool:
    """Whether `lion_host_` takes these: float32 on the host, which lie alike."""
    if param.device.type != "cpu" or param.dtype != torch.float32 or grad.dtype not in HOST_GRADS:
        return False
    return param.shape == grad.shape and fusable(param, exp_avg)


def _next(
    param: Tensor, grad: Tensor, exp_avg: Tensor, rate: Tensor | float, keep: Tensor | float, beta1: float, beta2: float
) -> tuple[Tensor, Tensor]:
    """(parameter, momentum) in the dtype of all three tensors. keep: the share of the parameter that decay leaves."""
    toward = exp_avg * beta1 + grad * (1 - beta1)
    sign = torch.where(toward == toward, toward.sign(), toward)
    return param * keep - sign * rate, exp_avg * beta2 + grad * (1 - beta2)


def _lion_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, lr: Tensor, beta1: float, beta2: float, weight_decay: float, maximize: bool = False,
    finite: Tensor | None = None,
) -> None:  # fmt: skip
    if _on_host(param, grad, exp_avg):
        if finite is None or bool(finite):
            update = lion_host_ if native.ready() else lion_host_.kernel
            update(*in_memory_order(param, grad, exp_avg), float(lr), beta1, beta2, weight_decay, maximize)
        return
    wide = torch.promote_types(param.dtype, torch.float32)
    rate = beside(lr, param).to(torch.float64)
    g = grad.to(wide)
    g = -g if maximize else g
    keep = (1 - rate * weight_decay).to(wide)
    new, mean = _next(param.to(wide), g, exp_avg.to(wide), rate.to(wide), keep, beta1, beta2)
    if finite is not None:
        finite = beside(finite, param)
    for old, value in ((param, new), (exp_avg, mean)):
        value = value.to(old.dtype)
        old.copy_(value if finite is None else torch.where(finite, value, old))


def _lion(
    param: Tensor, grad: Tensor, exp_avg: Tensor, lr: Tensor, beta1: float, beta2: float, weight_decay: float, maximize: bool = False,
    finite: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    new, mean = param.clone(), exp_avg.clone()
    _lion_(new, grad, mean, lr, beta1, beta2, weight_decay, maximize, finite)
    return new, mean


def _lion_fake(param: Tensor, grad: Tensor, exp_avg: Tensor, *options: object, **more: object) -> tuple[Tensor, Tensor]:
    return torch.empty_like(param), torch.empty_like(exp_avg)


def _lion_host_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, lr: float, beta1: float, beta2: float, weight_decay: float, maximize: bool
) -> None:
    check_operands("lion_host_", param, grad, exp_avg, grads=HOST_GRADS)
    for p, g, m in in_blocks(param, grad, exp_avg):
        new, mean = _next(p, -g if maximize else g, m, lr, 1 - lr * weight_decay, beta1, beta2)
        p.copy_(new)
        m.copy_(mean)


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _always(given: object) -> bool:
    return True


def _schema(p: str = "", m: str = "") -> str:
    tensors = f"Tensor{p} param, Tensor grad, Tensor{m} exp_avg, Tensor lr"
    return f"({tensors}, float beta1, float beta2, float weight_decay, bool maximize=False, Tensor? finite=None)"


lion = define(f"lion{_schema()} -> (Tensor, Tensor)", _lion, _lion_fake, updates_by="grad")
lion_ = define(f"lion_{_schema('(a!)', '(b!)')} -> ()", _lion_, _nothing, updates_by="grad", narrow_where=_always)
lion_host_ = define(
    "lion_host_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, float lr, float beta1, float beta2, float weight_decay, "
    "bool maximize) -> ()",
    _lion_host_, _nothing,
)  # fmt: skip
