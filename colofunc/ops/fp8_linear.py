"""Linear layers whose products are in float8, forward and backward, with scales that are made of the tensors as they are.

    recipe = RECIPES["tensorwise"]
    y = fp8_linear(x, w, b, recipe)            # gradients of x and w are products in float8 too, that of b is a sum

    tensorwise             one scale of x, of w and of the gradient; gradients in e5m2
    rowwise                one scale of each row that a product sums over; all in e4m3, scales are powers of 2
    rowwise_with_gw_hp     as rowwise forward; the gradient of x from one scale of w; that of w from x and the gradient as they are

Problem: of the three products x w^T, g w and g^T x each sums over another dim, and a scale of a row goes out of a sum only if the row
lies along it. Idea: a scale of a whole tensor suits all three products, so that its numbers are kept for backward, one byte each. Scales
of rows are made anew for each product. Then the gradient of w has scales that are made of all rows of the batch, and what
rowwise_with_gw_hp computes of a row depends on this row only, but for w's gradient, which is a sum.

The recipes are those that torchao has by these names (torchao.float8, `Float8LinearRecipeName`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.errors import InputError
from colofunc.ops.fp8 import (
    E4M3,
    E5M2,
    LARGEST,
    abs_max,
    fp8_cast,
    fp8_scale,
    scaled_linear,
    scaled_linear_dw,
    scaled_linear_dx,
)
from colofunc.ops.linear import linear_dw


@attrs.frozen
class Recipe:
    """How the operands of a layer's three products become numbers in float8.

    `g_dtype`: of gradients of results. `rows`: a scale of each row that is summed over, else one of the tensor. `power_of_2`: scales are
    rounded up to one. `exact_dw`: the gradient of the weight is a product of x and the gradient as they are, and the gradient of x has
    one scale of the weight.
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
}


def fp8_linear(x: Tensor, w: Tensor, b: Tensor | None, recipe: Recipe) -> Tensor:
    """x (..., i), w (o, i) of one dtype -> (..., o) in it."""
    along = (-1,) if recipe.rows else None
    x_bits, x_scale = recipe.cast(x.detach(), along)
    w_bits, w_scale = recipe.cast(w.detach(), along)
    result: Tensor = _Product.apply(x, w, b, x_bits, w_bits, x_scale, w_scale, recipe)
    return result


class _Product(torch.autograd.Function):
    """The product of bits, with gradients for the numbers that they were made of."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, w: Tensor, b: Tensor | None, x_bits: Tensor, w_bits: Tensor, x_scale: Tensor, w_scale: Tensor, recipe: Recipe
    ) -> Tensor:
        return scaled_linear(x_bits, w_bits, x_scale, w_scale, b, x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, w, _, x_bits, w_bits, x_scale, w_scale, recipe = inputs
        ctx.recipe, ctx.dtype = recipe, x.dtype
        # Only what a needed gradient reads is kept: a frozen weight keeps no activation.
        of_x, of_w = (x, w) if recipe.rows else (x_bits, w_bits)
        scale_of_x, scale_of_w = (None, None) if recipe.rows else (x_scale, w_scale)
        need = ctx.needs_input_grad
        ctx.save_for_backward(
            of_x if need[1] else None, of_w if need[0] else None, scale_of_x if need[1] else None, scale_of_w if need[0] else None
        )

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        need = ctx.needs_input_grad
        dx, dw = _Gradients.apply(g, *ctx.saved_tensors, ctx.recipe, ctx.dtype)
        leading = list(range(g.dim() - 1))
        db = None
        if need[2]:
            db = g.sum(leading) if leading else g
        return dx, dw, db, None, None, None, None, None


class _Gradients(torch.autograd.Function):
    """Both gradients of a layer. They have no gradient themselves, and say so: rounding has none."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        g: Tensor, x: Tensor | None, w: Tensor | None, x_scale: Tensor | None, w_scale: Tensor | None, recipe: Recipe, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        make = _by_rows if recipe.rows else _by_tensors
        return make(g, x, w, x_scale, w_scale, recipe, dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise InputError(
            "cf.fp8: a gradient of a gradient goes through products in float8, which have none. Try: globs in where= that leave out the "
            "layers of which second derivatives are taken"
        )


def _by_tensors(
    g: Tensor, x: Tensor | None, w: Tensor | None, x_scale: Tensor | None, w_scale: Tensor | None, recipe: Recipe, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """From numbers that were made forward, and one scale of the gradient."""
    g_bits, g_scale = recipe.cast(g, None, recipe.g_dtype)
    dx = dw = None
    if w is not None and w_scale is not None:
        dx = scaled_linear_dx(g_bits, w, g_scale, w_scale, recipe.g_dtype, dtype)
    if x is not None and x_scale is not None:
        dw = scaled_linear_dw(g_bits, x, g_scale, x_scale, recipe.g_dtype, dtype)
    return dx, dw


def _by_rows(
    g: Tensor, x: Tensor | None, w: Tensor | None, x_scale: Tensor | None, w_scale: Tensor | None, recipe: Recipe, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """From operands as they are, whose scales are along the dim that each product sums over."""
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
