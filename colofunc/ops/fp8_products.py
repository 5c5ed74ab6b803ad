"""Products of inputs in float8 and weights in float8: what `fp8-dynamic` and `fp8-g128-dynamic` compute.

    rounded_linear(x, bias, data, scale, "fp8")        # x (..., i), a weight (o, i) with a scale (o) -> (..., o)
    rounded_linear(x, bias, data, scale, "fp8_g128")   # the same, with a scale (o, g) for each group of columns

Problem: a weight that is kept in float8 and widened for its product is only stored small; cards multiply float8 at
twice the speed. Idea: each row of the input (a token's features) gets a scale of its own while the step runs, or one
for each group of columns that the weight has scales for, and is cast by it. That is what `colofunc/ops/fp8.py` does for
training, so the operators of a maximum, a scale, a cast and a product by rows are those. A product by groups is one
more:

    scaled_groups_linear(x, w, x_scale, w_scale, b, dtype)
        x (..., i), w (o, i)   -> (..., o)    scales (..., g) and (o, g), of i / g columns each

Of a row the largest number becomes 448; scales are no powers of 2, as those of the weight are none. Products of a group
are summed in float32 (float64 for results in float64), multiplied by the input's scale, then by the weight's; the
groups are added in their order, then the bias, and that is rounded to the result's dtype. So it is the same everywhere,
but for the order of sums in a group. A row depends on this row only.

On a card with products by groups of 128 (compute capability 9.x, CUDA 12.9) a product is `torch._scaled_mm`, which
adds groups in the float32 of its accumulators. The gradient of the input is that of a layer with the widened weight
whose inputs are not rounded.

Sources: DeepSeek-V3 (2412.19437), section 3.3.2; torchao, `Float8DynamicActivationFloat8WeightConfig` with `PerRow`.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colofunc import compat
from colofunc.errors import RuleError
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.fp8 import (
    MULTIPLE,
    abs_max,
    fp8_cast,
    fp8_scale,
    linear_cuda,
    scaled_linear,
    widened,
)
from colofunc.ops.kernels import Kernel, KernelCall, Rates, anything, wide
from colofunc.ops.quantized import FORMATS, OPERATORS
from colofunc.ops.small_floats import E4M3, LARGEST

FORMS = ("fp8", "fp8_g128")
"""Formats of weights that are multiplied so."""


# ---- products by groups ----


def _check_columns(name: str, x: Tensor, w: Tensor) -> None:
    """Raises RuleError where rows have other columns than the weight."""
    if x.shape[-1] != w.shape[-1]:
        raise RuleError(
            f"{name}: x {tuple(x.shape)} ends in {x.shape[-1]}, and a weight with data {tuple(w.shape)} has "
            f"{w.shape[-1]} columns. Try: x of shape {(*x.shape[:-1], w.shape[-1])}"
        )


def _linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor:
    high = wide(dtype)
    groups = w_scale.shape[1]
    width = w.shape[1] // groups
    out = x.new_zeros((*x.shape[:-1], w.shape[0]), dtype=high)
    for group in range(groups):
        columns = slice(group * width, (group + 1) * width)
        part = F.linear(widened(x[..., columns], E4M3, high), widened(w[:, columns], E4M3, high))
        out.add_(part.mul_(x_scale[..., group : group + 1]).mul_(w_scale[:, group]))
    if b is not None:
        out.add_(b)
    return out.to(dtype)


def _linear_fake(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, b: Tensor | None, dtype: torch.dtype
) -> Tensor:
    _check_columns("scaled_groups_linear", x, w)
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype)


scaled_groups_linear = define(
    "scaled_groups_linear(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? b, ScalarType dtype) -> Tensor",
    _linear, _linear_fake,
    facts=Facts(
        own_memory=True, product=True, backward_products=("colofunc.fp8_g128_linear_dx",), weights=(1, 3, 4), row_order="any"
    ),
)  # fmt: skip

PRODUCT = scaled_groups_linear.name


# ---- a layer ----


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> bool:
    """Whether a layer, as the step's code calls it, can be a product in float8."""
    if form not in FORMS or x.dim() == 0 or not x.is_floating_point():
        return False
    # Operands of several dtypes are left to torch, which refuses them.
    return x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)


def rounded_linear(x: Tensor, bias: Tensor | None, data: Tensor, scale: Tensor, form: str) -> Tensor:
    """A linear layer with a weight in float8 on inputs (..., i) rounded to float8 -> (..., o), in the dtype of x.

    `data`, `scale`: parts of a weight in the format `form`, one of `FORMS`. The gradient of x goes through the rounding
    as if it were not there. Raises RuleError where x has other columns than the weight.
    """
    _check_columns("linear in float8", x, data)
    rows = x.unsqueeze(0) if x.dim() == 1 else x
    result: Tensor = _Layer.apply(rows, bias, data, scale, form)
    return result.squeeze(0) if x.dim() == 1 else result


class _Layer(torch.autograd.Function):
    """The product of rounded inputs; its gradient is that of the layer whose inputs are not rounded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, data: Tensor, scale: Tensor, form: str) -> Tensor:
        bits, x_scale = _cast(_in_groups(x, form))
        if FORMATS[form].group == 1:
            by_rows: Tensor = scaled_linear(bits, data, x_scale, scale, bias, x.dtype)
            return by_rows
        by_groups: Tensor = scaled_groups_linear(bits.flatten(-2), data, x_scale.squeeze(-1), scale, bias, x.dtype)
        return by_groups

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[2:4])
        ctx.form = inputs[4]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        dx = OPERATORS[ctx.form].linear_dx.apply(g, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
        db = g.sum(list(range(g.dim() - 1))) if ctx.needs_input_grad[1] else None
        return dx, db, None, None, None


def rounded_rows(x: Tensor, form: str) -> Tensor:
    """Inputs (..., i) as `rounded_linear` multiplies them with a weight in the format `form`, in float32 or float64."""
    bits, scale = _cast(_in_groups(x, form))
    # Rows in float8 with their scales are what such a weight is, so the operator that widens it widens them.
    rows = bits.reshape(-1, x.shape[-1])
    scales = scale.reshape(rows.shape[0]) if FORMATS[form].group == 1 else scale.reshape(rows.shape[0], -1)
    numbers: Tensor = OPERATORS[form].dequantize.apply(rows, scales, scale.dtype)
    return numbers.reshape(x.shape)


def _in_groups(x: Tensor, form: str) -> Tensor:
    """Inputs (..., i) with what shares a scale as the last dim: as they are, or (..., g, i / g)."""
    width = FORMATS[form].group
    return x if width == 1 else x.unflatten(-1, (-1, width))


def _cast(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (..., i) in float8, and the scale of each (..., 1)."""
    scale: Tensor = fp8_scale(abs_max(rows, (-1,)), LARGEST[E4M3], False)
    bits: Tensor = fp8_cast(rows, scale, E4M3)
    return bits, scale


# ---- on a GPU ----

CARD_GENERATION = 9
"""Compute capability (9, x), whose products have scales of groups; torch has them on no other."""
CARD_WIDTH = 128
"""Columns of a group there."""


def _shape(call: KernelCall) -> tuple[int, int, int, int]:
    """(rows, summed, columns, groups) of a product."""
    *batch, summed = call["x"].shape
    return prod(batch), summed, *call["w_scale"].shape


def _taken(call: KernelCall) -> bool:
    """Whether torch._scaled_mm takes a product."""
    rows, summed, columns, groups = _shape(call)
    if call.capability[0] != CARD_GENERATION or not compat.has_scaled_mm_by_groups():
        return False
    if min(rows, columns, groups) == 0 or summed != groups * CARD_WIDTH or columns % MULTIPLE:
        return False
    # A single group is a product by rows, with results in bfloat16 alone.
    return call["dtype"] is torch.bfloat16 or (call["dtype"] is torch.float32 and groups > 1)


def _linear_cuda(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, b: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if w_scale.shape[1] == 1:
        return linear_cuda(x, w, x_scale, w_scale, b, dtype)
    rows = x.reshape(-1, x.shape[-1])
    of_rows = x_scale.reshape(-1, x_scale.shape[-1]).to(torch.float32)
    count = rows.shape[0]
    missing = _filled_rows(count)
    if missing:
        rows, of_rows = F.pad(rows, (0, 0, 0, missing)), F.pad(of_rows, (0, 0, 0, missing))
    # Of both operands the scales of one group lie side by side.
    of_rows = of_rows.t().contiguous().t()
    of_columns = w_scale.to(torch.float32).t().contiguous()
    bits, columns = rows.contiguous().view(E4M3), w.contiguous().view(E4M3).t()
    made = _product_dtype(b is not None, dtype)
    out = compat.scaled_mm(bits, columns, of_rows, of_columns, made, None)[:count]
    if b is not None:
        out = out.add_(b).to(dtype)  # rounded once, behind the bias
    if missing and made is dtype:
        out = out.clone()  # in memory of its own, without the rows that were filled up
    return out.view(*x.shape[:-1], w.shape[0])


def _product_dtype(has_bias: bool, dtype: torch.dtype) -> torch.dtype:
    """In which dtype a card gives a product whose result is in `dtype`."""
    return torch.float32 if has_bias else dtype


def _filled_rows(rows: int) -> int:
    """How many rows of zeros bring a product to a multiple of 16 rows: each group's scales begin at a multiple of 64
    bytes then.
    """
    return -rows % MULTIPLE


def _around_bytes(call: KernelCall) -> int:
    """Scales that are turned around, rows that are filled up, and a product that is not the result yet."""
    rows, summed, columns, groups = _shape(call)
    filled = _filled_rows(rows)
    made = _product_dtype(call["b"] is not None, call["dtype"])
    product = (rows + filled) * columns * made.itemsize if filled or made is not call["dtype"] else 0
    operand = (rows + filled) * (summed + 4 * groups) if filled else 0
    return operand + product + 4 * (rows + filled + columns) * groups


def _seconds(call: KernelCall, rates: Rates) -> float:
    rows, summed, columns, groups = _shape(call)
    result = rows * columns * call["dtype"].itemsize
    moved = summed * (rows + columns) + result + 3 * 4 * (rows + columns) * groups
    launches = 3
    if call["b"] is not None:
        moved += 12 * rows * columns
        launches += 2
    work = 2 * rows * summed * columns / rates.flops_per_s(E4M3)
    return max(work, moved / rates.bytes_per_s) + launches * rates.launch_s


def _widened_bytes(call: KernelCall) -> int:
    """The sum and a product, and the columns of a group of both operands, in the dtype in which they are multiplied."""
    rows, summed, columns, groups = _shape(call)
    return wide(call["dtype"]).itemsize * (2 * rows * columns + (rows + columns) * summed // max(1, groups))


def _widened_s(call: KernelCall, rates: Rates) -> float:
    rows, summed, columns, groups = _shape(call)
    high = wide(call["dtype"])
    moved = (3 * summed * (rows + columns) + 8 * groups * rows * columns) * high.itemsize
    work = 2 * rows * summed * columns / rates.flops_per_s(high)
    return max(work, moved / rates.bytes_per_s) + 6 * groups * rates.launch_s


CUDA_KERNELS = (
    Kernel(PRODUCT, "cuda", _taken, _seconds, _around_bytes, _linear_cuda),
    Kernel(PRODUCT, "cuda", anything, _widened_s, _widened_bytes, _linear),
)
