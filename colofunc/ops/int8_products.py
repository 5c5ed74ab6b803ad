"""Products of inputs in int8 and weights in int8, in whole numbers: what `int8-dynamic` and `smoothquant` compute.

    size = row_size(x, 6.0)                       # x (..., i) -> (...,): the largest |x| of each row below 6
    rows = int8_rows(x, size, 6.0)                # (..., i) int8: multiples of size / 127, 0 where x is an outlier
    int8_rows_linear(rows, data, scale, size, x, 6.0, bias, dtype)
                                                  # (..., o): int32 sums, both scales, outliers, bias

    rounded_linear(x, bias, data, scale, 6.0)     # all three, with the gradient of a layer with this weight

Problem: a product of rounded inputs with a rounded weight is one of whole numbers times two scales, for which
devices have instructions of twice the speed; computed in floats it only says what rounding does. Idea: three
operators, each with a rule of one line. The largest of a row is a maximum, whose parts on ranks are joined by a
maximum; so the ranks of split columns round with one scale, and each has a whole sum of its own columns. What
travels between layers may be the int8 numbers, a byte each.

What is computed is said in full. `rows` is x over its unit (size / 127, in float32, float64 for x in float64),
rounded to nearest with ties to even. Sums are exact: int32, for `MOST_COLUMNS` columns at most. They are converted
to float32 (float64 for results in float64), multiplied by the row's unit, then by the scale of the weight's row;
outliers times the widened weight are added, then the bias; that is rounded to the result's dtype. So without
outliers results are equal bit for bit on all devices, however sums are made. Where columns are split over ranks,
the sum over ranks is one of scaled parts.

Outliers (of |x| not less than the threshold; with the threshold infinity there are none) stay as they are. Their
product reads the columns in which any row has one, so the host waits for the device to learn which. With the
threshold infinity a row with a number that is not finite is NaN, by its size, which is infinity then: a maximum
over ranks may lose NaN.

`torch._int_mm` is the product where the device has one: CPUs with VNNI, GPUs from compute capability 8.0. Elsewhere
sums are those of float32 products of so few columns that they are exact. Source: Dettmers et al. 2022, "LLM.int8()"
(2208.07339), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colofunc import compat
from colofunc.errors import RuleError
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import Kernel, KernelCall, Rates, anything, wide
from colofunc.ops.quantized import FORMATS, OPERATORS
from colofunc.ops.quantized_inputs import STEPS, largest_below, units

MOST_COLUMNS = 1 << 17
"""Columns of which a sum of products of two numbers up to 127 fits into int32."""
EXACT_COLUMNS = 1 << 10
"""Columns of which such a sum is exact in float32, which has all whole numbers up to 2^24."""
ROWS_AS_COLUMNS = 512
"""On CPUs, up to so many rows the product is computed transposed: torch turns no weight around that comes first."""

BLOCK = 1 << 16
"""On CPUs at most so many numbers are worked on at a time."""


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Rows whose numbers stay in a core's cache while they are worked on; on a card all of them at once."""
    count = rows.shape[0]
    step = max(1, count)
    if rows.device.type == "cpu":
        step = max(1, BLOCK // max(1, rows.shape[1]))
    for first in range(0, count, step):
        yield slice(first, first + step)


def _matrix(x: Tensor) -> Tensor:
    """(..., i) as (m, i), though there may be no columns."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


# ---- rows in int8 ----

# Note [Results that are no views]: an operator writes through a view of its result, and returns the result. Autograd
# lets nobody write into a view that a function returns, and behind a layer stands, for example, `ReLU(inplace=True)`.


def _row_size(x: Tensor, threshold: float) -> Tensor:
    rows, out = _matrix(x), x.new_empty(x.shape[:-1])
    sizes = out.view(-1)
    for part in _blocks(rows):
        sizes[part] = _size_of_rows(rows[part], threshold)
    return out


def _size_of_rows(rows: Tensor, threshold: float) -> Tensor:
    size = largest_below(rows, threshold)
    if not isinf(threshold):
        return size
    finite = rows.isfinite().all(-1)
    return torch.where(finite, size, torch.full_like(size, torch.inf))


def _row_size_fake(x: Tensor, threshold: float) -> Tensor:
    return x.new_empty(x.shape[:-1])


def _int8_rows(x: Tensor, size: Tensor, threshold: float) -> Tensor:
    rows, sizes = _matrix(x), size.reshape(-1)
    out = x.new_empty(x.shape, dtype=torch.int8)
    made = out.view(rows.shape)
    for part in _blocks(rows):
        # The unit of a row of subnormal numbers is rounded itself, so that more than 127 of them may be in one.
        numbers = units(rows[part], sizes[part]).clamp_(-STEPS, STEPS)
        made[part] = numbers.masked_fill_(~(rows[part].abs() < threshold), 0.0)
    return out


def _int8_rows_fake(x: Tensor, size: Tensor, threshold: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.int8)


row_size = define(
    "row_size(Tensor x, float threshold) -> Tensor",
    _row_size,
    _row_size_fake,
    facts=Facts(own_memory=True, work="reduction"),
)
int8_rows = define(
    "int8_rows(Tensor x, Tensor size, float threshold) -> Tensor", _int8_rows, _int8_rows_fake, facts=Facts(own_memory=True),
)  # fmt: skip

SIZE = row_size.name


# ---- the product ----


def exact_sums(rows: Tensor, data: Tensor) -> Tensor:
    """Whole sums of products, rows (m, i) and data (o, i) in int8 -> (m, o) int32.

    They are made by float32 products of a few columns at a time.
    """
    sums = rows.new_zeros((rows.shape[0], data.shape[0]), dtype=torch.int32)
    for first in range(0, rows.shape[1], EXACT_COLUMNS):
        columns = slice(first, first + EXACT_COLUMNS)
        sums += F.linear(rows[:, columns].to(torch.float32), data[:, columns].to(torch.float32)).to(torch.int32)
    return sums


def cpu_sums(rows: Tensor, data: Tensor) -> Tensor:
    """The same sums by the product of whole numbers that CPUs with VNNI have."""
    if rows.shape[0] > ROWS_AS_COLUMNS:
        return compat.int_mm(rows, data.t())
    return compat.int_mm(data, rows.t()).t()


def cuda_sums(rows: Tensor, data: Tensor) -> Tensor:
    """The same sums by the tensor cores of a GPU, which take `LEAST_ROWS` rows and more."""
    count = rows.shape[0]
    if count < LEAST_ROWS:
        rows = F.pad(rows, (0, 0, 0, LEAST_ROWS - count))
    return compat.int_mm(rows.contiguous(), data.contiguous().t())[:count]


def best_sums(rows: Tensor, data: Tensor) -> Tensor:
    # Of a weight with one row or column, whose strides say nothing, torch reads what lies behind it.
    some = rows.shape[0] > 0 and data.shape[0] > 1 and data.shape[1] > 1
    if some and rows.device.type == "cpu" and compat.has_int_mm_on_cpu() and _is_apart(rows) and _is_apart(data):
        return cpu_sums(rows, data)
    return exact_sums(rows, data)


def _is_apart(matrix: Tensor) -> bool:
    """Whether each number has a place of its own, as not in what was expanded.

    Of others torch reads some in wrong places.
    """
    (rows, columns), (down, right) = matrix.shape, matrix.stride()
    along_rows = right * (columns - 1) >= columns - 1 and down > right * (columns - 1)
    along_columns = down * (rows - 1) >= rows - 1 and right > down * (rows - 1)
    return along_rows or along_columns


def _scaled(
    sums: Tensor,
    data: Tensor,
    scale: Tensor,
    size: Tensor,
    x: Tensor | None,
    threshold: float,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """What sums (m, o) stand for, (..., o)."""
    high = wide(dtype)
    unit = size.reshape(-1, 1).to(high) / STEPS
    scales = scale.to(high)
    outliers = None
    if x is not None:
        outliers = _outliers(_matrix(x), threshold, data, scale, high)
    out = sums.new_empty((*size.shape, data.shape[0]), dtype=dtype)  # Note [Results that are no views]
    made = out.view(sums.shape)
    for part in _blocks(made):
        numbers = sums[part].to(high).mul_(unit[part]).mul_(scales)
        if outliers is not None:
            numbers.add_(outliers[part])
        if bias is not None:
            numbers.add_(bias)
        made[part] = numbers
    return out


def _outliers(x: Tensor, threshold: float, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """The product (m, o) of what stays as it is of x (m, i), by the columns of the weight that it needs.

    None where nothing stays.
    """
    if x.numel() == 0:
        return None
    least, largest = x.aminmax()  # which makes no copy of x; NaN compares as no less
    if bool((least > -threshold) & (largest < threshold)):
        return None
    large = ~(x.abs() < threshold)
    columns = large.any(0).nonzero().squeeze(1)
    kept = torch.where(large[:, columns], x[:, columns], 0).to(dtype)
    return F.linear(kept, FORMATS["int8"].widen((data[:, columns], scale), dtype))


def _int8_rows_linear(rows: Tensor, data: Tensor, *rest: Any) -> Tensor:
    """rest: what `_scaled` takes behind the weight."""
    return _scaled(best_sums(_matrix(rows), data), data, *rest)


def _int8_rows_linear_cuda(rows: Tensor, data: Tensor, *rest: Any) -> Tensor:
    return _scaled(cuda_sums(_matrix(rows), data), data, *rest)


def _int8_rows_linear_fake(
    rows: Tensor,
    data: Tensor,
    scale: Tensor,
    size: Tensor,
    x: Tensor | None,
    threshold: float,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if rows.shape[-1] != data.shape[-1]:
        raise RuleError(
            f"int8_rows_linear: rows {tuple(rows.shape)} end in {rows.shape[-1]}, and a weight with data "
            f"{tuple(data.shape)} has {data.shape[-1]} columns. Try: rows of shape {(*rows.shape[:-1], data.shape[-1])}"
        )
    return rows.new_empty((*rows.shape[:-1], data.shape[0]), dtype=dtype)


# The bias is behind rows that may be missing, so that no position is its own.
int8_rows_linear = define(
    "int8_rows_linear(Tensor rows, Tensor data, Tensor scale, Tensor size, Tensor? x, float threshold, Tensor? bias, "
    "ScalarType dtype) -> Tensor",
    _int8_rows_linear, _int8_rows_linear_fake,
    facts=Facts(
        own_memory=True, product=True, backward_products=("colofunc.int8_linear_dx",), weights=(1, 2), row_order="any"
    ),
)  # fmt: skip

PRODUCT = int8_rows_linear.name


# ---- a layer ----


def takes(x: Tensor, weight: Tensor, bias: Tensor | None, form: str) -> bool:
    """Whether a layer, as the step's code calls it, can be a product of whole numbers."""
    if form != "int8" or x.dim() == 0 or not x.is_floating_point():
        return False
    # What torch refuses it is to refuse here, too.
    one_dtype = x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    return one_dtype and weight.shape[1] <= MOST_COLUMNS


def rounded_linear(x: Tensor, bias: Tensor | None, data: Tensor, scale: Tensor, threshold: float) -> Tensor:
    """A linear layer with a weight in int8 on inputs (..., i) rounded to int8 -> (..., o), in the dtype of x.

    The gradient of x goes through the rounding as if it were not there.
    """
    result: Tensor = _Layer.apply(x, bias, data, scale, threshold)
    return result


class _Layer(torch.autograd.Function):
    """The product of rounded inputs; its gradient is that of the layer whose inputs are not rounded."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, data: Tensor, scale: Tensor, threshold: float) -> Tensor:
        size: Tensor = row_size(x, threshold)
        rows: Tensor = int8_rows(x, size, threshold)
        kept = None if isinf(threshold) else x
        result: Tensor = int8_rows_linear(rows, data, scale, size, kept, threshold, bias, x.dtype)
        return result

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[2:4])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        dx = OPERATORS["int8"].linear_dx.apply(g, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
        leading = list(range(g.dim() - 1))
        db = None
        if ctx.needs_input_grad[1]:
            db = g.sum(leading) if leading else g
        return dx, db, None, None, None


# ---- on a GPU ----

CAPABILITY = (8, 0)
LEAST_ROWS = 32
"""`torch._int_mm` takes more than 16 rows on a GPU; fewer are filled up with zeros."""
MULTIPLE = 8
"""What the columns and the rows of a weight are multiples of there."""
LAUNCHES = 5
"""Sums, their conversion, both scales, and the result's dtype; outliers are three more."""


def _shape(call: KernelCall) -> tuple[int, int, int]:
    """(rows, summed, columns) of a product."""
    *batch, summed = call["rows"].shape
    return prod(batch), summed, call["data"].shape[0]


def _taken(call: KernelCall) -> bool:
    rows, summed, columns = _shape(call)
    if call.capability < CAPABILITY or min(rows, summed, columns) == 0:
        return False
    return summed % MULTIPLE == 0 and columns % MULTIPLE == 0


def _around_bytes(call: KernelCall) -> int:
    """Sums, and what they are scaled in where that is not the result."""
    rows, _, columns = _shape(call)
    high = wide(call["dtype"])
    return rows * columns * (4 + (0 if high is call["dtype"] else high.itemsize))


def _around_s(call: KernelCall, rates: Rates) -> float:
    """Seconds of all that is not the product: sums are converted, scaled twice and rounded, and outliers looked for."""
    rows, summed, columns = _shape(call)
    moved = rows * columns * (4 + 5 * wide(call["dtype"]).itemsize + call["dtype"].itemsize)
    launches = LAUNCHES
    if call["x"] is not None:
        moved += call["x"].nbytes + 3 * rows * summed
        launches += 3
    return moved / rates.bytes_per_s + launches * rates.launch_s


def _seconds(call: KernelCall, rates: Rates) -> float:
    rows, summed, columns = _shape(call)
    work = 2 * max(rows, LEAST_ROWS) * summed * columns / rates.flops_per_s(torch.int8)
    return max(work, (rows + columns) * summed / rates.bytes_per_s) + _around_s(call, rates)


def _widened_bytes(call: KernelCall) -> int:
    """Beside sums and results a few columns of both operands in float32, and a product of them twice."""
    rows, summed, columns = _shape(call)
    return _around_bytes(call) + 4 * min(summed, EXACT_COLUMNS) * (rows + columns) + 8 * rows * columns


def _widened_s(call: KernelCall, rates: Rates) -> float:
    rows, summed, columns = _shape(call)
    parts = -(-summed // EXACT_COLUMNS)
    moved = 9 * summed * (rows + columns) + 20 * parts * rows * columns
    work = 2 * rows * summed * columns / rates.flops_per_s(torch.float32)
    return max(work, moved / rates.bytes_per_s) + 5 * parts * rates.launch_s + _around_s(call, rates)


CUDA_KERNELS = (
    Kernel(PRODUCT, "cuda", _taken, _seconds, _around_bytes, _int8_rows_linear_cuda),
    Kernel(PRODUCT, "cuda", anything, _widened_s, _widened_bytes, _int8_rows_linear),
)
