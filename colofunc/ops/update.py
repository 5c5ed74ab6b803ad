"""Optimizer updates, one operator per parameter, each with an in-place twin.

Problem: an optimizer written in aten is a dozen nodes per parameter that hold five times its memory and cannot be
grouped by chunk later. Idea: `adamw` and `sgd` are single functional operators, elementwise over the parameter, so any
layout of it is fine as long as all operands share it. The last pass replaces one by its twin where the old values have
no later reader; the twin's schema says which arguments the results then live in (`ops.twins`).

    param, m, v, _ = adamw(param, grad, m, v, step, lr, 0.9, 0.999, 1e-8, 0.01, True)
    adamw_(param, grad, m, v, step, lr, 0.9, 0.999, 1e-8, 0.01, True)            # same numbers, no allocation

`finite`, a 0-dim bool where there is one, says whether the update happens at all: where it is false every result is the
old value, bit for bit, so that a step whose gradients overflowed can be skipped in place and nobody asks the device.

`step` (already incremented) and `lr` are 0-dim tensors, so that a schedule needs no retrace. A result that does not
exist (the maximum without amsgrad, the buffer without momentum) is an empty tensor.
Source: Kingma and Ba, Adam (2015), algorithm 1; Loshchilov and Hutter, Decoupled weight decay (2019), algorithm 2;
Sutskever et al. (2013) for momentum as `torch.optim.SGD` has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.define import define_update
from colofunc.ops.update_device import adamw_device_, reads_narrow_there, sgd_device_
from colofunc.ops.update_fused import beside, fusable, fused_adamw_, fused_sgd_, is_exact, sgd_is_fused
from colofunc.ops.update_narrow import (
    adamw_asks_kernel,
    adamw_host_,
    asks_kernel,
    host_form,
    in_memory_order,
    reads_narrow,
    sgd_host_,
)


def _aligned(grad: Tensor, param: Tensor) -> Tensor:
    if grad.stride() == param.stride() and grad.dtype == param.dtype:
        return grad
    return torch.empty_like(param).copy_(grad)


def _write(old: Tensor, new: Tensor, finite: Tensor | None) -> Tensor:
    """`new` written over `old`, or nothing."""
    return old.copy_(new if finite is None else torch.where(finite, new.to(old.dtype), old))


# ---- Adam and AdamW ----


def _adamw_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, beta1: float,
    beta2: float, eps: float, weight_decay: float, decoupled: bool, amsgrad: bool = False, max_exp_avg_sq: Tensor | None = None,
    maximize: bool = False, finite: Tensor | None = None,
) -> None:  # fmt: skip
    if not amsgrad and adamw_asks_kernel(param, grad) and adamw_host_.bare(
        param, grad, exp_avg, exp_avg_sq, step, lr, beta1, beta2, eps, weight_decay, decoupled, maximize, finite
    ):  # fmt: skip
        return
    maxima = [max_exp_avg_sq] if amsgrad and max_exp_avg_sq is not None else []
    if is_exact(param) and fusable(param, exp_avg, exp_avg_sq, *maxima):
        if not maxima and (reads_narrow(param, grad) or reads_narrow_there(param, grad)):
            operands = in_memory_order(param, grad, exp_avg, exp_avg_sq)
            flag = None if finite is None else beside(finite, param)
            options = beta1, beta2, eps, weight_decay, decoupled, maximize, flag
            if not param.is_cpu:
                adamw_device_(*operands, step, lr, *options)
                return
            if host_form(adamw_host_)(*operands, beside(step, param), beside(lr, param), *options):
                return
        fused_adamw_(
            [param], [_aligned(grad, param)], [exp_avg], [exp_avg_sq], maxima, step, lr, beta1, beta2, eps, weight_decay, decoupled,
            maximize, finite,
        )  # fmt: skip
        return
    wide = torch.promote_types(param.dtype, torch.float32)
    if finite is not None:
        finite = beside(finite, param)
    rate, count = beside(lr, param).to(wide), beside(step, param).to(torch.float64)
    p, g = param.to(wide), grad.to(wide)
    if maximize:
        g = -g
    if weight_decay != 0.0 and decoupled:
        p = p * (1 - rate * weight_decay)
    elif weight_decay != 0.0:
        g = g + weight_decay * p
    _write(exp_avg, exp_avg.to(wide).lerp(g, 1 - beta1), finite)
    _write(exp_avg_sq, exp_avg_sq.to(wide) * beta2 + (1 - beta2) * g * g, finite)
    second = exp_avg_sq
    if maxima:
        second = _write(maxima[0], torch.maximum(maxima[0], exp_avg_sq), finite)
    first_scale, second_scale = 1 - beta1**count, (1 - beta2**count).sqrt()
    denominator = second.to(wide).sqrt() / second_scale.to(wide) + eps
    _write(param, p - (rate / first_scale.to(wide)) * exp_avg.to(wide) / denominator, finite)


# ---- SGD ----


def _sgd_(
    param: Tensor, grad: Tensor, buffer: Tensor | None, step: Tensor, lr: Tensor, momentum: float, dampening: float,
    weight_decay: float, nesterov: bool, maximize: bool = False, finite: Tensor | None = None,
) -> None:  # fmt: skip
    buffers = [buffer] if momentum != 0.0 and buffer is not None else []
    if (momentum == 0.0 or dampening == 0.0) and asks_kernel(param, grad) and sgd_host_.bare(
        param, grad, buffers[0] if buffers else None, lr, momentum, weight_decay, nesterov, maximize, finite
    ):  # fmt: skip
        return
    if sgd_is_fused(param, momentum, dampening) and fusable(param, *buffers):
        if reads_narrow(param, grad) or reads_narrow_there(param, grad):
            p, g, *rest = in_memory_order(param, grad, *buffers)
            held = rest[0] if rest else None
            flag = None if finite is None else beside(finite, param)
            if not param.is_cpu:
                sgd_device_(p, g, held, lr, momentum, weight_decay, nesterov, maximize, flag)
                return
            if host_form(sgd_host_)(p, g, held, beside(lr, param), momentum, weight_decay, nesterov, maximize, flag):
                return
        fused_sgd_([param], [_aligned(grad, param)], buffers, lr, momentum, weight_decay, nesterov, maximize, finite)
        return
    lr, step = beside(lr, param), beside(step, param)
    if finite is not None:
        finite = beside(finite, param)
    g = grad.neg() if maximize else grad
    if weight_decay != 0.0:
        g = g.add(param, alpha=weight_decay)
    if momentum != 0.0 and buffer is not None:
        # The first gradient enters the buffer undamped, as torch.optim.SGD has it.
        fresh = 1.0 - dampening * (step > 1).to(buffer.dtype) if dampening != 0.0 else 1.0
        held = buffer if finite is None else buffer.clone()
        held.mul_(momentum).add_(g * fresh)
        g = g.add(held, alpha=momentum) if nesterov else held
        if finite is not None:
            _write(buffer, held, finite)
    moved = lr.to(param.dtype) * g
    # Not a product with `finite`: 0 times infinity is no number.
    param.sub_(moved if finite is None else torch.where(finite, moved, torch.zeros_like(moved)))


def _adamw_reads_narrow(given: Mapping[str, Any]) -> bool:
    return not given["amsgrad"]


def _sgd_reads_narrow(given: Mapping[str, Any]) -> bool:
    return given["momentum"] == 0.0 or given["dampening"] == 0.0


adamw, adamw_ = define_update(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor step, Tensor lr, float "
    "beta1, float beta2, float eps, float weight_decay, bool decoupled, bool amsgrad=False, Tensor(d!)? "
    "max_exp_avg_sq=None, bool maximize=False, Tensor? finite=None) -> ()",
    _adamw_, narrow_where=_adamw_reads_narrow, narrow_on_device=True,
)  # fmt: skip
sgd, sgd_ = define_update(
    "sgd_(Tensor(a!) param, Tensor grad, Tensor(b!)? buffer, Tensor step, Tensor lr, float momentum, float dampening, "
    "float weight_decay, bool nesterov, bool maximize=False, Tensor? finite=None) -> ()",
    _sgd_, narrow_where=_sgd_reads_narrow, narrow_on_device=True,
)  # fmt: skip
