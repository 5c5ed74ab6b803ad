"""Linear layers, kept whole: x (..., i), w (o, i), b (o) -> (..., o).

Traced through aten, a linear on three dims becomes view, mm, view, and which dims were batch is lost. Here the call
and its two gradients are operators over all leading dims:

    linear(x, w, b)     b* i, o i, o -> b* o
    linear_dx(g, w)     b* o, o i    -> b* i
    linear_dw(g, x)     b* o, b* i   -> o i

The gradient of the bias is `aten.sum` over the leading dims. The kernels call what eager autograd calls: one gemm on
the folded leading dims. Where nothing needs a gradient, torch does not fold dims that lie transposed (tokens before
rows, as attention modules have them): it multiplies each of them with the weight by itself, which took up to three
times as long. They are copied here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colofunc.errors import RuleError
from colofunc.ops.define import define
from colofunc.ops.facts import Facts


def _linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    if x.dim() < 3 or x.is_contiguous():
        return F.linear(x, w, b)
    return F.linear(x.flatten(0, -2), w, b).view(*x.shape[:-1], w.shape[0])


def _linear_fake(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    if x.shape[-1] != w.shape[-1]:
        weight = f"w {tuple(w.shape)}, (out, in), takes {w.shape[-1]}"
        raise RuleError(f"linear: x {tuple(x.shape)} ends in {x.shape[-1]}, and {weight}. Try: {_fitting(x, w)}")
    return x.new_empty((*x.shape[:-1], w.shape[0]))


def _fitting(x: Tensor, w: Tensor) -> str:
    """What would fit, in words.

    The input is what people change from call to call, unless the weight stands the other way round.
    """
    if w.dim() == 2 and x.shape[-1] == w.shape[0]:
        return "w.t()"
    return f"x of shape {(*x.shape[:-1], w.shape[-1])}"


def _linear_dx(g: Tensor, w: Tensor) -> Tensor:
    if g.dim() < 3 or g.is_contiguous():
        return torch.matmul(g, w)
    return torch.matmul(g.flatten(0, -2), w).view(*g.shape[:-1], w.shape[1])


def _linear_dx_fake(g: Tensor, w: Tensor) -> Tensor:
    return g.new_empty((*g.shape[:-1], w.shape[1]))


def _linear_dw(g: Tensor, x: Tensor) -> Tensor:
    o, i = g.shape[-1], x.shape[-1]
    return torch.mm(g.reshape(-1, o).t(), x.reshape(-1, i))


def _linear_dw_fake(g: Tensor, x: Tensor) -> Tensor:
    return g.new_empty((g.shape[-1], x.shape[-1]))


def _save_two(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])


def _dx_backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:
    # dx = g @ w, so g gets h @ w.T (a linear) and w gets g.T @ h over the leading dims.
    g, w = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (linear.apply(h, w, None) if need[0] else None, linear_dw.apply(g, h) if need[1] else None)


def _dw_backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:
    # dw = g.T @ x with h (o, i): g gets x @ h.T (a linear), x gets g @ h.
    g, x = ctx.saved_tensors
    need = ctx.needs_input_grad
    return (linear.apply(x, h, None) if need[0] else None, linear_dx.apply(g, h) if need[1] else None)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, w = inputs[0], inputs[1]
    need = ctx.needs_input_grad
    # Only what a needed gradient reads is kept: a frozen weight keeps no activation.
    ctx.save_for_backward(x if need[1] else None, w if need[0] else None)


def _linear_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    need = ctx.needs_input_grad
    dx = linear_dx.apply(g, w) if need[0] else None
    dw = linear_dw.apply(g, x) if need[1] else None
    leading = list(range(g.dim() - 1))
    db = None
    if len(need) > 2 and need[2]:  # the dispatcher drops a trailing default
        db = g.sum(leading) if leading else g
    return dx, dw, db


def _linear_dw_of_matrices(g: Tensor, x: Tensor) -> Tensor:
    return torch.mm(g.t(), x)


# What the kernels above come to where the first operand is a matrix, for executors, which know that when they write a
# call.
FOR_MATRICES: dict[Callable[..., Any], Callable[..., Any]] = {
    _linear: F.linear,
    _linear_dx: torch.mm,
    _linear_dw: _linear_dw_of_matrices,
}

linear_dx = define(
    "linear_dx(Tensor g, Tensor w) -> Tensor", _linear_dx, _linear_dx_fake, (_save_two, _dx_backward), for_compilers=_linear_dx,
    facts=Facts(own_memory=True, product=True, as_products=("b o, o i -> b i",), row_order="any"),
)  # fmt: skip
linear_dw = define(
    "linear_dw(Tensor g, Tensor x) -> Tensor", _linear_dw, _linear_dw_fake, (_save_two, _dw_backward), for_compilers=_linear_dw,
    facts=Facts(own_memory=True, product=True, as_products=("b o, b i -> o i",), row_order="any"),
)  # fmt: skip
linear = define(
    "linear(Tensor x, Tensor w, Tensor? b=None) -> Tensor", _linear, _linear_fake, (_save_linear, _linear_backward),
    for_compilers=_linear,
    facts=Facts(
        own_memory=True, product=True, backward_products=(linear_dx.name, linear_dw.name), as_products=("b i, o i, o -> b o",),
        weights=(1, 2), row_order="any",
    ),
)  # fmt: skip
