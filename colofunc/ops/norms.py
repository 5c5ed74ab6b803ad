"""RMS norm, kept whole: x (b*, z*), w (z*) -> y (b*, z*), rstd (b*, 1*), with y = x * rstd * w.

Problem: torch has kernels of it and of its gradients for CUDA alone, so that a trace, which knows no device, is shown
six elementwise operators and ten for their gradients, and keeps x in float32 and x * rstd for them. Idea: operators
that keep x as it is, and a number a row. With n = x * rstd and g the gradient of y:

    rms_norm(x, shape, w, eps)         b* [z*], [z*] -> b* [z*], b* 1*     rstd = (mean(x^2) + eps)^-1/2
    rms_norm_dx(g, x, shape, rstd, w)  b* [z*]                             rstd * (g w - n * mean(n g w))
    rms_norm_dw(g, x, shape, rstd)     z*                                  sum of n g over b*

Sums are taken in float32 at least. Source: Zhang and Sennrich, 1910.07467.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.define import define
from colofunc.ops.facts import Facts

aten = torch.ops.aten


def _last(shape: Sequence[int]) -> list[int]:
    """The dims that are normalised, which are the last ones."""
    return list(range(-len(shape), 0))


def _in_operators(x: Tensor, shape: Sequence[int], w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = torch.rsqrt(wide.square().mean(_last(shape), keepdim=True) + eps)
    y = wide * rstd if w is None else wide * rstd * w
    return y.to(x.dtype), rstd


def _rms_norm(x: Tensor, shape: Sequence[int], w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    if x.device.type != "cuda":
        return _in_operators(x, shape, w, eps)
    y, rstd = aten._fused_rms_norm(x, shape, w, eps)
    return y, rstd


def _rms_norm_fake(x: Tensor, shape: Sequence[int], w: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    of_rows = (*x.shape[: x.dim() - len(shape)], *(1 for _ in shape))
    return x.new_empty(x.shape), x.new_empty(of_rows, dtype=torch.promote_types(x.dtype, torch.float32))


def _dx_in_operators(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, w: Tensor | None) -> Tensor:
    normal, g = x.to(rstd.dtype) * rstd, g.to(rstd.dtype)
    g = g if w is None else g * w
    return (rstd * (g - normal * (normal * g).mean(_last(shape), keepdim=True))).to(x.dtype)


def _rms_norm_dx(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, w: Tensor | None) -> Tensor:
    if x.device.type != "cuda":
        return _dx_in_operators(g, x, shape, rstd, w)
    return _on_card(g, x, shape, rstd, w, [True, False])[0]


def _rms_norm_dx_fake(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, w: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


def _dw_in_operators(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor) -> Tensor:
    terms = g.to(rstd.dtype) * (x.to(rstd.dtype) * rstd)
    rows = list(range(x.dim() - len(shape)))
    return (terms.sum(rows) if rows else terms).to(x.dtype)


def _rms_norm_dw(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor) -> Tensor:
    if x.device.type != "cuda":
        return _dw_in_operators(g, x, shape, rstd)
    like = x.new_empty(tuple(shape))  # the kernel asks whether there is a weight; its numbers do not count here
    return _on_card(g, x, shape, rstd, like, [False, True])[1]


def _rms_norm_dw_fake(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor) -> Tensor:
    return x.new_empty(tuple(shape))


def _on_card(g: Tensor, x: Tensor, shape: Sequence[int], rstd: Tensor, w: Tensor | None, mask: list[bool]) -> Any:
    return aten._fused_rms_norm_backward(g.contiguous(), x.contiguous(), shape, rstd.contiguous(), w, mask)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, ctx.shape, w, _ = inputs
    ctx.save_for_backward(x, w, output[1])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, g: Tensor | None, g_rstd: Tensor | None) -> tuple[Any, ...]:
    x, w, rstd = ctx.saved_tensors
    need, dx, dw = ctx.needs_input_grad, None, None
    if g is not None and need[0]:
        dx = rms_norm_dx.apply(g, x, ctx.shape, rstd, w)
    if g is not None and w is not None and need[2]:
        dw = rms_norm_dw.apply(g, x, ctx.shape, rstd)
    if g_rstd is not None and need[0]:  # of a second derivative alone
        of_rstd = (-g_rstd * rstd**3 / prod(ctx.shape) * x).to(x.dtype)
        dx = of_rstd if dx is None else dx + of_rstd
    return dx, None, dw, None


def _save_dx(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    g, x, ctx.shape, rstd, w = inputs
    ctx.save_for_backward(g, x, rstd, w)


def _dx_gradient(ctx: Any, h: Tensor) -> tuple[Any, ...]:
    g, x, rstd, w = ctx.saved_tensors
    if w is None:
        pull = torch.func.vjp(lambda g, x, rstd: _dx_in_operators(g, x, ctx.shape, rstd, None), g, x, rstd)[1]
        dg, dx, d_rstd = pull(h)
        return dg, dx, None, d_rstd, None
    pull = torch.func.vjp(lambda g, x, rstd, w: _dx_in_operators(g, x, ctx.shape, rstd, w), g, x, rstd, w)[1]
    dg, dx, d_rstd, dw = pull(h)
    return dg, dx, None, d_rstd, dw


def _save_dw(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    g, x, ctx.shape, rstd = inputs
    ctx.save_for_backward(g, x, rstd)


def _dw_gradient(ctx: Any, h: Tensor) -> tuple[Any, ...]:
    pull = torch.func.vjp(lambda g, x, rstd: _dw_in_operators(g, x, ctx.shape, rstd), *ctx.saved_tensors)[1]
    dg, dx, d_rstd = pull(h)
    return dg, dx, None, d_rstd


# Both go by the rate of elementwise work: published predictions of steps beside what was measured of them were made so.
rms_norm_dx = define(
    "rms_norm_dx(Tensor g, Tensor x, int[] shape, Tensor rstd, Tensor? w) -> Tensor", _rms_norm_dx, _rms_norm_dx_fake,
    (_save_dx, _dx_gradient), for_compilers=_dx_in_operators, facts=Facts(own_memory=True, work="elementwise", row_order="any"),
)  # fmt: skip
rms_norm_dw = define(
    "rms_norm_dw(Tensor g, Tensor x, int[] shape, Tensor rstd) -> Tensor", _rms_norm_dw, _rms_norm_dw_fake,
    (_save_dw, _dw_gradient), for_compilers=_dw_in_operators, facts=Facts(own_memory=True, work="elementwise", row_order="any"),
)  # fmt: skip
rms_norm = define(
    "rms_norm(Tensor x, int[] shape, Tensor? w, float eps) -> (Tensor, Tensor)", _rms_norm, _rms_norm_fake, (_save, _gradient),
    for_compilers=_in_operators, facts=Facts(own_memory=True, weights=(1,), work="normalisation", row_order="any"),
)  # fmt: skip
