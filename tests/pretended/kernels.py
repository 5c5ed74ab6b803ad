"""Operators that only a card has, or that it computes in other dtypes than the CPU, as functions of tensors of the host."""

from __future__ import annotations

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


EMULATED: dict[Any, Callable[..., Any]] = {
    aten.native_layer_norm_backward.default: layer_norm_backward,
    aten.log_sigmoid_backward.default: log_sigmoid_backward,
    **ATTENTION,
}
"""Operator -> a function of tensors of the host with the same signature and results."""


FOR_A_CARD = ("CUDA", "CompositeImplicitAutograd", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def runs_on_a_card(func: Any) -> bool:
    """Whether torch has a kernel of an operator for CUDA, or one that is made of other operators."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in FOR_A_CARD)


BUILT_WITH_CUDA = runs_on_a_card(aten.mm.default)
"""Else nobody knows which kernels there would be."""
