"""Updates that read a gradient narrower than the parameter, as the backward pass made it.

Problem: in mixed precision a gradient in bfloat16 meets a float32 parameter. To cast it as a whole writes and reads
four bytes an element more than the update needs, and holds them. Idea: one pass over memory reads the narrow gradient
and writes parameter and states, by a kernel in C++ (`ext/cuda/cpu/update.cpp`). Without a compiler torch's fused kernel
works on a block at a time, whose cast stays in the cache; a parameter of one block is cast as before. AdamW's kernel
takes a float32 gradient, too.

    adamw_host_(param, grad, exp_avg, exp_avg_sq, step, lr, 0.9, 0.999, 1e-8, 0.01, True, False, None)    # float32, grad bfloat16

The operators say whether they could take their operands, which are contiguous and on the host; where not, nothing has
happened.

    adamw:  m += (g - m) (1 - beta1)      v = v beta2 + (1 - beta2) g g      p = p keep - rate m / (sqrt(v) inverse_root + eps)
    sgd:    b = b momentum + g            p -= lr (g + momentum b  or  b)

where g is the gradient, negated to maximize, with the decay that is not decoupled, keep = 1 - lr weight_decay where it
is, rate = lr / (1 - beta1^step) and inverse_root = 1 / sqrt(1 - beta2^step), both worked out in float64.

Numbers: the blocks have the bits of torch's fused kernel on a gradient that was cast before. The kernel rounds every
operation above by itself, so that each instruction set gives the same bits; torch's contracts some. Each of the two is
as near to the exact result as these roundings allow. With u = 2^-24 and g the sum of the absolute values that it is
made of: m within 8u (|m| + g), v within 8u (v beta2 + (1 - beta2) g g), p within 4u |p|, 8u of what it moves, and what
these errors of m and v move it (tests/test_update_narrow.py). Source: as `colofunc.ops.update`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import InputError
from colofunc.ops import native
from colofunc.ops.define import Operator, define
from colofunc.ops.update_fused import fused_adamw_, fused_sgd_

GRADS = (torch.bfloat16, torch.float16)
HOST_GRADS = (torch.float32, *GRADS)
"""Of what the kernels on the host read."""
WIDE_FROM = 1 << 16
"""Elements from which on AdamW's kernel takes a float32 gradient: of smaller parameters torch's fused kernel updates
many in a call."""
BLOCK = 1 << 19
"""Elements that are cast at a time without the kernel, to 2 MiB: fewer calls than smaller ones, and less to read again
than larger ones."""


def is_narrow(param: torch.dtype, grad: torch.dtype) -> bool:
    """Whether updates of these dtypes are here."""
    return param == torch.float32 and grad in GRADS


def reads_narrow(param: Tensor, grad: Tensor) -> bool:
    """Whether an update reads this gradient as it is: on the host, and without the kernel where it is more than one
    block.
    """
    if not is_narrow(param.dtype, grad.dtype) or param.device.type != "cpu" or param.shape != grad.shape:
        return False
    return native.ready("cpu") or param.numel() > BLOCK


def asks_kernel(param: Tensor, grad: Tensor) -> bool:
    """Whether `adamw_host_` or `sgd_host_` is called first, which says whether it could take its operands.

    To ask more here takes a tenth of the time of an update in the cache.
    """
    return grad.dtype in GRADS and param.is_cpu and native.ready("cpu")


def adamw_asks_kernel(param: Tensor, grad: Tensor) -> bool:
    """The same for AdamW, whose kernel gains with large float32 gradients, too.

    SGD's does not below tens of millions of elements.
    """
    if grad.dtype not in HOST_GRADS or not param.is_cpu or (grad.dtype == torch.float32 and param.numel() < WIDE_FROM):
        return False
    return native.ready("cpu")


def taken_as_they_lie(param: Tensor, grad: Tensor, *states: Tensor) -> bool:
    """Whether LAMB's kernel takes these tensors: contiguous and on the host, in float32 by a gradient of one of
    `HOST_GRADS`.
    """
    return _plain(param, grad, *states) and native.ready("cpu")


def host_form(update: Operator) -> Callable[..., Any]:
    """What runs for an update on the host: its compiled kernel, or the reference where that may not run."""
    return update if native.ready("cpu") else update.kernel


def in_memory_order(param: Tensor, grad: Tensor, *states: Tensor) -> Sequence[Tensor]:
    """All of them contiguous, with elements in the order of the parameter's memory.

    It is dense, and its states lie as it does.
    """
    if param.is_contiguous():
        return param, grad.contiguous(), *states
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return [torch.as_strided(x, (x.numel(),), (1,)) for x in (param, grad, *states)]


# ---- the operators: without the library, blocks of torch's ----


def in_blocks(param: Tensor, grad: Tensor, *states: Tensor) -> Iterator[list[Tensor]]:
    """The operands of one block after the other, the gradient as wide as the parameter."""
    with compat.no_function_modes():
        wide = torch.empty(min(BLOCK, param.numel()), dtype=param.dtype)
    flat = [x.view(-1) for x in (param, grad, *states)]
    for begin in range(0, param.numel(), BLOCK):
        p, g, *others = (x[begin : begin + BLOCK] for x in flat)
        yield [p, g if g.dtype == p.dtype else wide[: len(p)].copy_(g), *others]


def check_operands(
    what: str,
    param: Tensor,
    grad: Tensor,
    *states: Tensor,
    grads: Sequence[torch.dtype] = GRADS,
    takes_any: str = "colofunc.adamw_ or colofunc.sgd_, which take any",
) -> None:
    """Raises InputError where an update in float32 cannot take these, by a gradient of one of `grads`.

    takes_any: the operators to try in place of `what` where tensors lie apart.
    """
    if any(not x.is_contiguous() or x.numel() != param.numel() for x in (param, grad, *states)):
        raise InputError(f"{what}: not contiguous, or not of the parameter's size. Try: {takes_any}")
    if any(x.dtype != torch.float32 for x in (param, *states)):
        raise InputError(f"{what}: neither parameter nor states may be other than float32. Try: a cast to it")
    if grad.dtype not in grads:
        able = " or ".join(str(dtype).removeprefix("torch.") for dtype in grads)
        instead = "torch's fused kernel" if grads == GRADS else "a cast to float32"
        raise InputError(f"{what}: a gradient is {able}, not {grad.dtype}. Try: {instead}")


def _plain(param: Tensor, grad: Tensor, *states: Tensor) -> bool:
    """Whether these are operands of `adamw_host_` and `sgd_host_`."""
    if param.dtype != torch.float32 or grad.dtype not in HOST_GRADS or any(x.dtype != torch.float32 for x in states):
        return False
    return all(x.is_cpu and x.is_contiguous() and x.shape == param.shape for x in (param, grad, *states))


def _adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, maximize: bool, finite: Tensor | None,
) -> bool:  # fmt: skip
    if not _plain(param, grad, exp_avg, exp_avg_sq):
        return False
    if finite is None or bool(finite):
        for p, g, m, v in in_blocks(param, grad, exp_avg, exp_avg_sq):
            fused_adamw_([p], [g], [m], [v], [], step, lr, beta1, beta2, eps, weight_decay, decoupled, maximize, None)
    return True


def _sgd(
    param: Tensor, grad: Tensor, buffer: Tensor | None, lr: Tensor, momentum: float, weight_decay: float, nesterov: bool, maximize: bool,
    finite: Tensor | None,
) -> bool:  # fmt: skip
    buffers = [] if buffer is None else [buffer]
    if not _plain(param, grad, *buffers):
        return False
    if finite is None or bool(finite):
        for p, g, *b in in_blocks(param, grad, *buffers):
            fused_sgd_([p], [g], b, lr, momentum, weight_decay, nesterov, maximize, None)
    return True


def _taken(*args: object, **kwargs: object) -> bool:
    return True


adamw_host_ = define(
    "adamw_host_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor step, Tensor lr, "
    "float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, Tensor? finite) -> bool",
    _adamw, _taken,
)  # fmt: skip
sgd_host_ = define(
    "sgd_host_(Tensor(a!) param, Tensor grad, Tensor(b!)? buffer, Tensor lr, float momentum, float weight_decay, bool "
    "nesterov, bool maximize, Tensor? finite) -> bool",
    _sgd, _taken,
)  # fmt: skip
