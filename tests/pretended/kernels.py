"""Operators that only a card has, or that it computes in other dtypes than the CPU, as functions of tensors of the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pretended.attention import ATTENTION

aten = torch.ops.aten


def layer_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Any
) -> Any:
    """A card keeps statistics in float32 and computes in it."""
    wide = [t if t is None else t.to(mean.dtype) for t in (grad, x, weight, bias)]
    return aten.native_layer_norm_backward.default(wide[0], wide[1], shape, mean, rstd, wide[2], wide[3], wanted)


def log_sigmoid_backward(grad: Tensor, x: Tensor, buffer: Tensor) -> Tensor:
    """The CPU keeps a buffer between forward and backward; a card computes it again."""
    return aten.log_sigmoid_backward.default(grad, x, aten.log_sigmoid_forward.default(x)[1])


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    assert weight is None or weight.dtype == x.dtype
    wide, dims = x.to(torch.promote_types(x.dtype, torch.float32)), list(range(-len(shape), 0))
    rstd = torch.rsqrt((wide * wide).mean(dims, keepdim=True) + (torch.finfo(wide.dtype).eps if eps is None else eps))
    return torch.rms_norm(wide, shape, None if weight is None else weight.to(wide.dtype), eps).to(x.dtype), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, weight: Tensor | None, wanted: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """What is not wanted is not there."""
    assert all(t.is_contiguous() for t in (grad, x, rstd)) and rstd.dtype == torch.promote_types(x.dtype, torch.float32)
    g, wide, n, rows = grad.double(), x.double(), math.prod(shape), list(range(x.dim() - len(shape)))
    gw = g if weight is None else g * weight.double()
    along = (gw * wide).sum(list(range(-len(shape), 0)), keepdim=True)
    dx, dw = gw * rstd.double() - wide * rstd.double() ** 3 * along / n, g * wide * rstd.double()
    return dx.to(x.dtype) if wanted[0] else None, dw.sum(rows).to(x.dtype) if wanted[1] else None


EMULATED: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    aten._fused_rms_norm.default: rms_norm,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    **ATTENTION,
}
"""Operator -> a function of tensors of the host with the same signature and results."""


FOR_A_CARD = ("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def runs_on_a_card(func: Any) -> bool:
    """Whether torch has a kernel of an operator for CUDA, or one that is made of other operators."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in FOR_A_CARD)


BUILT_WITH_CUDA = runs_on_a_card(aten.mm.default)
"""Else nobody knows which kernels there would be."""
