"""LAMB's direction as one operator, `colofunc.lamb_direction`, and the length that a step along it has.

Problem: LAMB moves a parameter along Adam's direction by a length that depends on two norms of the whole parameter, so
that it is no elementwise update, and of a shard it would be another one. Idea: three pieces. The operator keeps the
moments and gives the direction, elementwise, and the two squared norms, which are sums: of shards they are added up
over axes like any other. The ratios of all parameters are computed together, so that ranks exchange all norms at once.
The step along the direction is plain SGD's.

    direction, squares, m, v = lamb_direction(param, grad, m, v, step, 0.9, 0.999, 1e-6, 0.01)
    ratios = trust_ratios([squares, ...])
    param, _ = sgd(param, direction, None, step, lr * ratios[0], 0.0, 0.0, 0.0, False)

    direction = m / (sqrt(v) + eps) + weight_decay param        m, v: moments of Adam, their bias corrected
    squares = (sum of param^2, sum of direction^2)              (2,) float64
    ratio = |param| / |direction|, and 1 where one of them is 0

The twin `lamb_direction_` writes the moments where they lie. The direction has the parameter's shape, in at least
float32. Moments and the first term are those of `colofunc.adamw_` for a parameter of zeros, so that whatever kernel
runs there runs here. On the host one pass by a kernel in C++ (`ext/cuda/cpu/lamb.cpp`) gives both, `lamb_host_`, for a
float32 parameter and a gradient in float32, bfloat16 or float16. Its moments and first term round as `update_narrow`
says. Squares are summed as `colofunc.ops.squares` says. On a GPU one pass by a kernel in CUDA, `lamb_device_`, gives
the direction of such operands. Source: You et al., Large batch optimization for deep learning (2019, 1904.00962),
algorithm 2, with the identity for phi.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colofunc import compat
from colofunc.ops import native
from colofunc.ops.define import always, define, define_update, nothing
from colofunc.ops.squares import in_float64
from colofunc.ops.update import adamw_
from colofunc.ops.update_fused import beside, fusable
from colofunc.ops.update_narrow import HOST_GRADS, check_operands, in_memory_order, taken_as_they_lie


def trust_ratios(squares: Sequence[Tensor]) -> Tensor:
    """(n,) float64 of n pairs of squared norms. Parts on ranks are added up, those of all pairs at once."""
    lengths = torch.stack(list(squares)).sqrt()
    of_params, of_directions = lengths.unbind(1)
    ratios = of_params / of_directions
    return torch.where((of_params > 0) & (of_directions > 0), ratios, torch.ones_like(ratios))


def _in_one_pass_there(param: Tensor, grad: Tensor, *states: Tensor) -> bool:
    """Whether `lamb_device_` takes these: float32 on a GPU, which lie alike."""
    if param.device.type != "cuda" or param.dtype != torch.float32 or grad.dtype not in HOST_GRADS:
        return False
    return param.shape == grad.shape and fusable(param, *states) and native.ready("cuda")


def _direction_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, beta1: float, beta2: float,
    eps: float, weight_decay: float, maximize: bool = False, finite: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    as_they_lie = taken_as_they_lie(param, grad, exp_avg, exp_avg_sq)
    if as_they_lie and (finite is None or bool(finite)):
        with compat.no_function_modes():
            direction, squares = torch.empty_like(param), torch.empty(2, dtype=torch.float64)
        lamb_host_.bare(
            direction, squares, param, grad, exp_avg, exp_avg_sq, step.item(), beta1, beta2, eps, weight_decay, maximize
        )
        return direction, squares
    if _in_one_pass_there(param, grad, exp_avg, exp_avg_sq):
        with compat.no_function_modes():
            # A step that is skipped writes no direction, and nobody may meet what lay there before.
            direction = torch.empty_like(param) if finite is None else torch.zeros_like(param)
        p, g, m, v, d = in_memory_order(param, grad, exp_avg, exp_avg_sq, direction)
        flag = None if finite is None else beside(finite, param)
        lamb_device_(d, p, g, m, v, step, beta1, beta2, eps, weight_decay, maximize, flag)
        return direction, torch.stack([in_float64(param), in_float64(direction)])
    return _by_adamw(param, grad, exp_avg, exp_avg_sq, step, beta1, beta2, eps, weight_decay, maximize, finite)


def _by_adamw(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, beta1: float, beta2: float,
    eps: float, weight_decay: float, maximize: bool, finite: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    direction = torch.zeros_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
    # At a rate of -1 AdamW moves a parameter of zeros to its direction.
    rate = torch.full((), -1.0, dtype=torch.float64, device=param.device)
    adamw_.kernel(
        direction, grad, exp_avg, exp_avg_sq, step, rate, beta1, beta2, eps, 0.0, True, maximize=maximize, finite=finite
    )
    if weight_decay != 0.0:
        direction.add_(param, alpha=weight_decay)
    return direction, torch.stack([in_float64(param), in_float64(direction)])


def _lamb_host_(
    direction: Tensor, squares: Tensor, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: float, beta1: float,
    beta2: float, eps: float, weight_decay: float, maximize: bool,
) -> None:  # fmt: skip
    takes_any = "colofunc.lamb_direction_, which takes any"
    check_operands("lamb_host_", param, grad, exp_avg, exp_avg_sq, direction, grads=HOST_GRADS, takes_any=takes_any)
    count = torch.full((), step, dtype=torch.float32)
    found = _by_adamw(param, grad, exp_avg, exp_avg_sq, count, beta1, beta2, eps, weight_decay, maximize, None)
    direction.copy_(found[0])
    squares.copy_(found[1])


def _lamb_device_(
    direction: Tensor, param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, beta1: float, beta2: float,
    eps: float, weight_decay: float, maximize: bool, finite: Tensor | None,
) -> None:  # fmt: skip
    takes_any = "colofunc.lamb_direction_, which takes any"
    check_operands("lamb_device_", param, grad, exp_avg, exp_avg_sq, direction, grads=HOST_GRADS, takes_any=takes_any)
    found = _by_adamw(param, grad, exp_avg, exp_avg_sq, step, beta1, beta2, eps, weight_decay, maximize, finite)[0]
    direction.copy_(found if finite is None else torch.where(finite, found, direction))


def _fake_(param: Tensor, *others: object, **more: object) -> tuple[Tensor, Tensor]:
    direction = torch.empty_like(param, dtype=torch.promote_types(param.dtype, torch.float32))
    return direction, param.new_empty(2, dtype=torch.float64)


lamb_direction, lamb_direction_ = define_update(
    "lamb_direction_(Tensor param, Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, Tensor step, float beta1, "
    "float beta2, float eps, float weight_decay, bool maximize=False, Tensor? finite=None) -> (Tensor, Tensor)",
    _direction_, _fake_, narrow_where=always, narrow_on_device=True,
)  # fmt: skip
lamb_host_ = define(
    "lamb_host_(Tensor(a!) direction, Tensor(b!) squares, Tensor param, Tensor grad, Tensor(c!) exp_avg, Tensor(d!) "
    "exp_avg_sq, float step, float beta1, float beta2, float eps, float weight_decay, bool maximize) -> ()",
    _lamb_host_, nothing,
)  # fmt: skip
lamb_device_ = define(
    "lamb_device_(Tensor(a!) direction, Tensor param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor "
    "step, float beta1, float beta2, float eps, float weight_decay, bool maximize, Tensor? finite) -> ()",
    _lamb_device_, nothing,
)  # fmt: skip
