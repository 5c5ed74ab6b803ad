"""Linear layers whose products are in float8, forward and backward.

    recipe = RECIPES["tensorwise"]
    y = fp8_linear(x, w, b, recipe)            # gradients of x and w are products in float8 too, that of b is a sum
    y = fp8_linear(x, w, b, recipe, Delayed(scales, see))      # scales that were made before, of what `see` was told

    tensorwise             one scale of x, of w and of the gradient; gradients in e5m2
    rowwise                one scale of each row that a product sums over; all in e4m3, scales are powers of 2
    rowwise_with_gw_hp     as rowwise forward; the gradient of x from one scale of w; that of w from x and the gradient as they are
    delayed                as tensorwise, with scales that are known before the tensors are

Problem: of the three products x w^T, g w and g^T x each sums over another dim, and a scale of a row goes out of a sum
only if the row lies along it. Idea: a scale of a whole tensor suits all three products, so that its numbers are kept
for backward, one byte each. Scales of rows are made anew for each product. Then the gradient of w has scales that are
made of all rows of the batch, and what rowwise_with_gw_hp computes of a row depends on this row only, but for w's
gradient, which is a sum.

The recipes are those that torchao has by these names (torchao.float8, `Float8LinearRecipeName`); delayed is Transformer
Engine's `DelayedScaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.fp8 import (
    abs_max,
    fp8_cast,
    fp8_scale,
    scaled_linear,
    scaled_linear_dw,
    scaled_linear_dx,
)
from colofunc.ops.linear import linear_dw
from colofunc.ops.small_floats import E4M3, E5M2, LARGEST

See = Callable[[int, Tensor], None]  # which operand, and the largest of its numbers


@attrs.frozen
class Recipe:
    """How the operands of a layer's three products become numbers in float8.

    `g_dtype`: of gradients of results. `rows`: a scale of each row that is summed over, else one of the tensor.
    `power_of_2`: scales are rounded up to one. `exact_dw`: the gradient of the weight is a product of x and the
    gradient as they are, and the gradient of x has one scale of the weight.
    """

    g_dtype: torch.dtype = E5M2
    rows: bool = False
    power_of_2: bool = False
    exact_dw: bool = False

    def cast(self, x: Tensor, dims: Sequence[int] | None, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
        """(bits, scale) of a tensor; dims: those over which a scale is, None: all."""
        scale = fp8_scale(abs_max(x, dims), LARGEST[dtype], self.power_of_2)
        return fp8_cast(x, scale, dtype), scale


RECIPES = {
    "tensorwise": Recipe(),
    "rowwise": Recipe(g_dtype=E4M3, rows=True, power_of_2=True),
    "rowwise_with_gw_hp": Recipe(g_dtype=E4M3, rows=True, power_of_2=True, exact_dw=True),
    "delayed": Recipe(),
}
OPERANDS = ("x", "w", "g")
"""Inputs, weights, and gradients of results: what a layer casts."""
FORMATS = (E4M3, E4M3, E5M2)
"""The format of each under delayed scaling."""


@attrs.frozen(eq=False)
class Delayed:
    """Scales that were made before: one of each of `OPERANDS`, 0-dim.

    `see(operand, amax)` is told the largest number of each, 0-dim.
    """

    scales: Sequence[Tensor]
    see: See

    def cast(self, x: Tensor, operand: int) -> tuple[Tensor, Tensor]:
        """(bits, scale)."""
        self.see(operand, abs_max(x, None))
        return fp8_cast(x, self.scales[operand], FORMATS[operand]), self.scales[operand]


def fp8_linear(x: Tensor, w: Tensor, b: Tensor | None, recipe: Recipe, delayed: Delayed | None = None) -> Tensor:
    """x (..., i), w (o, i) of one dtype -> (..., o) in it."""
    if delayed is None:
        along = (-1,) if recipe.rows else None
        x_bits, x_scale = recipe.cast(x.detach(), along)
        w_bits, w_scale = recipe.cast(w.detach(), along)
        g_scale, see = None, None
    else:
        x_bits, x_scale = delayed.cast(x.detach(), 0)
        w_bits, w_scale = delayed.cast(w.detach(), 1)
        g_scale, see = delayed.scales[2], delayed.see
    result: Tensor = _Product.apply(x, w, b, x_bits, w_bits, x_scale, w_scale, g_scale, see, recipe)
    return result


class _Product(torch.autograd.Function):
    """The product of bits, with gradients for the numbers that they were made of."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor | None, x_bits: Tensor, w_bits: Tensor, x_scale: Tensor, w_scale: Tensor,
        g_scale: Tensor | None, see: See | None, recipe: Recipe,
    ) -> Tensor:  # fmt: skip
        return scaled_linear(x_bits, w_bits, x_scale, w_scale, b, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, x_bits, w_bits, x_scale, w_scale, g_scale, see, recipe = inputs
        ctx.recipe, ctx.see, ctx.dtype = recipe, see, x.dtype
        # Only what a needed gradient reads is kept: a frozen weight keeps no activation.
        of_x, of_w = (x, w) if recipe.rows else (x_bits, w_bits)
        scale_of_x, scale_of_w = (None, None) if recipe.rows else (x_scale, w_scale)
        need = ctx.needs_input_grad
        ctx.save_for_backward(
            of_x if need[1] else None, of_w if need[0] else None, scale_of_x if need[1] else None, scale_of_w if need[0] else None,
            g_scale,
        )  # fmt: skip

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        need = ctx.needs_input_grad
        dx, dw = _Gradients.apply(g, *ctx.saved_tensors, ctx.see, ctx.recipe, ctx.dtype)
        leading = list(range(g.dim() - 1))
        db = None
        if need[2]:
            db = g.sum(leading) if leading else g
        return dx, dw, db, *[None] * 7


class _Gradients(torch.autograd.Function):
    """Both gradients of a layer. They have no gradient themselves, and say so: rounding has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, x: Tensor | None, w: Tensor | None, x_scale: Tensor | None, w_scale: Tensor | None, g_scale: Tensor | None,
        see: See | None, recipe: Recipe, dtype: torch.dtype,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        if recipe.rows:
            return _by_rows(g, x, w, recipe, dtype)
        if see is None or g_scale is None:
            g_bits, g_scale = recipe.cast(g, None, recipe.g_dtype)
        else:
            see(2, abs_max(g, None))
            g_bits = fp8_cast(g, g_scale, recipe.g_dtype)
        dx = dw = None
        if w is not None and w_scale is not None:
            dx = scaled_linear_dx(g_bits, w, g_scale, w_scale, recipe.g_dtype, dtype)
        if x is not None and x_scale is not None:
            dw = scaled_linear_dw(g_bits, x, g_scale, x_scale, recipe.g_dtype, dtype)
        return dx, dw

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InputError(
            "cf.fp8: a gradient of a gradient goes through products in float8, which have none. Try: globs in where= "
            "that leave out the layers of which second derivatives are taken"
        )


def _by_rows(
    g: Tensor, x: Tensor | None, w: Tensor | None, recipe: Recipe, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients from operands as they are, whose scales are along the dim that each product sums over."""
    dx = dw = None
    batch = list(range(g.dim() - 1))
    if w is not None:
        g_bits, g_scale = recipe.cast(g, (-1,), recipe.g_dtype)
        w_bits, w_scale = recipe.cast(w, None if recipe.exact_dw else (0,))
        dx = scaled_linear_dx(g_bits, w_bits, g_scale, w_scale, recipe.g_dtype, dtype)
    if x is not None and recipe.exact_dw:
        dw = linear_dw(g, x)
    elif x is not None:
        g_bits, g_scale = recipe.cast(g, batch, recipe.g_dtype)
        x_bits, x_scale = recipe.cast(x, batch)
        dw = scaled_linear_dw(g_bits, x_bits, g_scale, x_scale, recipe.g_dtype, dtype)
    return dx, dw
