"""Lion as one operator, `colofunc.lion`, with its in-place twin and the form that runs on the host.

Problem: torch has no Lion, and its pieces pass over the parameter seven times to read and write three tensors. Idea:
one operator, elementwise over the parameter, of which a kernel makes one pass: on the host in C++
(`ext/cuda/cpu/update.cpp`), on a GPU in CUDA (`ext/cuda/cuda/update.cu`).

    param, exp_avg = lion(param, grad, exp_avg, lr, 0.9, 0.99, 0.1)
    lion_(param, grad, exp_avg, lr, 0.9, 0.99, 0.1)                       # same numbers, no allocation

    toward = exp_avg beta1 + (1 - beta1) grad      param = param (1 - lr weight_decay) - lr sign(toward)
    exp_avg = exp_avg beta2 + (1 - beta2) grad

The sign of NaN is NaN here. torch's is 0, with which a gradient of NaN would leave the parameter where it is and nobody
would know.

Numbers: every operation above rounds once, in Python and in the kernels, so that a float32 parameter has the same bits
with a compiler and without, at every instruction set and on a GPU, by a gradient in float32, bfloat16 or float16. `lr`
is a 0-dim tensor; no count of steps is needed. `finite`: as in `colofunc.ops.update`. Source: Chen et al., Symbolic
discovery of optimization algorithms (2023, 2302.06675), algorithm 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from colofunc import compat
from colofunc.ops import native
from colofunc.ops.define import always, define, define_update, nothing
from colofunc.ops.update_fused import beside, fusable
from colofunc.ops.update_narrow import BLOCK, HOST_GRADS, check_operands, host_form, in_blocks, in_memory_order


def _in_one_pass(param: Tensor, grad: Tensor, exp_avg: Tensor) -> bool:
    """Whether `lion_host_` and `lion_device_` take these: float32, which lie alike."""
    if param.dtype != torch.float32 or grad.dtype not in HOST_GRADS:
        return False
    return param.shape == grad.shape and fusable(param, exp_avg)


def _move_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, toward: Tensor, part: Tensor, rate: Tensor | float, keep: Tensor | float, beta1: float,
    beta2: float, maximize: bool,
) -> None:  # fmt: skip
    """One step in place, of tensors of one shape and dtype. toward, part: memory like the parameter's. keep: what decay
    leaves of it.
    """
    upward = -1.0 if maximize else 1.0
    torch.mul(exp_avg, beta1, out=toward).add_(torch.mul(grad, upward * (1 - beta1), out=part))
    # The sign, but of NaN itself: anything but 0 is at least 1 after two products with the largest power of two.
    largest = 2.0 ** (math.frexp(torch.finfo(toward.dtype).max)[1] - 1)
    toward.mul_(largest).mul_(largest).clamp_(-1.0, 1.0)
    param.mul_(keep).sub_(toward.mul_(rate))
    exp_avg.mul_(beta2).add_(torch.mul(grad, upward * (1 - beta2), out=part))


def _lion_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, lr: Tensor, beta1: float, beta2: float, weight_decay: float, maximize: bool = False,
    finite: Tensor | None = None,
) -> None:  # fmt: skip
    one_pass = _in_one_pass(param, grad, exp_avg)
    if one_pass and param.device.type == "cpu":
        if finite is None or bool(finite):
            host_form(lion_host_)(
                *in_memory_order(param, grad, exp_avg), float(lr), beta1, beta2, weight_decay, maximize
            )
        return
    if one_pass and param.device.type == "cuda" and native.ready("cuda"):
        flag = None if finite is None else beside(finite, param)
        lion_device_(*in_memory_order(param, grad, exp_avg), lr, beta1, beta2, weight_decay, maximize, flag)
        return
    wide = torch.promote_types(param.dtype, torch.float32)
    rate = beside(lr, param).to(torch.float64)
    keep = (1 - rate * weight_decay).to(wide)
    # Where something else is to be kept or written, the step is made on copies.
    direct = finite is None and param.dtype == exp_avg.dtype == wide
    p, m = (x if direct else x.to(wide, copy=True) for x in (param, exp_avg))
    _move_(p, grad.to(wide), m, torch.empty_like(p), torch.empty_like(p), rate.to(wide), keep, beta1, beta2, maximize)
    if direct:
        return
    for old, new in ((param, p), (exp_avg, m)):
        new = new.to(old.dtype)
        old.copy_(new if finite is None else torch.where(beside(finite, param), new, old))


def _lion_host_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    maximize: bool,
) -> None:
    check_operands("lion_host_", param, grad, exp_avg, grads=HOST_GRADS, takes_any="colofunc.lion_, which takes any")
    with compat.no_function_modes():
        toward, part = torch.empty((2, min(BLOCK, param.numel())), dtype=torch.float32)
    for p, g, m in in_blocks(param, grad, exp_avg):
        _move_(p, g, m, toward[: len(p)], part[: len(p)], lr, 1 - lr * weight_decay, beta1, beta2, maximize)


def _lion_device_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, lr: Tensor, beta1: float, beta2: float, weight_decay: float, maximize: bool,
    finite: Tensor | None,
) -> None:  # fmt: skip
    check_operands("lion_device_", param, grad, exp_avg, grads=HOST_GRADS, takes_any="colofunc.lion_, which takes any")
    rate = beside(lr, param).to(torch.float64)
    keep = (1 - rate * weight_decay).to(param.dtype)
    p, m = param.clone(), exp_avg.clone()
    _move_(
        p, grad.to(p.dtype), m, torch.empty_like(p), torch.empty_like(p), rate.to(p.dtype), keep, beta1, beta2, maximize
    )
    for old, new in ((param, p), (exp_avg, m)):
        old.copy_(new if finite is None else torch.where(finite, new, old))


lion, lion_ = define_update(
    "lion_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor lr, float beta1, float beta2, float weight_decay, "
    "bool maximize=False, Tensor? finite=None) -> ()",
    _lion_, narrow_where=always, narrow_on_device=True,
)  # fmt: skip
lion_host_ = define(
    "lion_host_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, float lr, float beta1, float beta2, float "
    "weight_decay, bool maximize) -> ()",
    _lion_host_, nothing,
)  # fmt: skip
lion_device_ = define(
    "lion_device_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor lr, float beta1, float beta2, float "
    "weight_decay, bool maximize, Tensor? finite) -> ()",
    _lion_device_, nothing,
)  # fmt: skip
