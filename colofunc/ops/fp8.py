"""Products of matrices in float8, each with a scale of its own: forward, and the gradients of both operands.

    amax = abs_max(x, None)                            # or (-1,): one of each row, the dim kept with size 1
    scale = fp8_scale(amax, 448.0, False)              # amax / 448, in float32 or float64; 1 where that is 0
    bits = fp8_cast(x, scale, torch.float8_e4m3fn)     # x / scale to the nearest, in a uint8 per number
    scaled_linear(x, w, x_scale, w_scale, b, dtype)    # (sum of x w) * x_scale * w_scale + b

    scaled_linear        x (..., i), w (o, i)     -> (..., o)    scales () or (..., 1) and (o, 1) or (o)
    scaled_linear_dx     g (..., o), w (o, i)     -> (..., i)    scales () or (..., 1) and (1, i)
    scaled_linear_dw     g (..., o), x (..., i)   -> (o, i)      scales () or (..., o) and (..., i), of leading dims 1

Problem: a product in float8 wants scales that depend on all of a tensor, of which a rank has a part, and is a call
of its own on each device. Idea: a maximum is an operator like any other, whose parts on ranks are joined by a
maximum; a product takes numbers and scales as they are. So each operator has a rule of one line, and a plan may
send numbers of one byte.

What is computed is said in full, so that it is the same everywhere, but for the order of sums: x is divided by its
scale in float32 (in float64 where it is that), what is above the largest number of the format becomes that number,
the rest is rounded to the nearest with ties to even; what is not finite is NaN. Products are summed in float32
(float64 for results in float64) and multiplied by x's scale, then by the other one's; a bias is added; that is
rounded to the result's dtype. The bits are kept as uint8, which every backend can send.

`CUDA_KERNELS` are `torch._scaled_mm` where it takes the shapes, and around it the passes of `fp8_triton`: a
maximum, a cast, and operands turned around, for torch multiplies rows by columns alone.

Source: Micikevicius et al. 2022, "FP8 formats for deep learning" (2209.05433).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from colofunc import compat
from colofunc.errors import RuleError
from colofunc.ops import triton_use
from colofunc.ops.define import define
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import NARROW, Kernel, KernelCall, Rates, anything, wide
from colofunc.ops.small_floats import E4M3, LARGEST, float8_bits

# ---- from numbers to bits ----


def _abs_max(x: Tensor, dims: Sequence[int] | None) -> Tensor:
    reduced = range(x.dim()) if dims is None else [dim % x.dim() for dim in dims]
    if any(x.shape[dim] == 0 for dim in reduced):  # of nothing there is no maximum
        return torch.zeros_like(_abs_max_fake(x, dims))
    if dims is None:
        least, largest = x.aminmax()  # which makes no copy of x
        return torch.maximum(-least, largest)
    if not dims:  # torch would reduce all
        return x.abs()
    least, largest = x.amin(tuple(dims), keepdim=True), x.amax(tuple(dims), keepdim=True)
    return torch.maximum(-least, largest).abs()  # of zeros it is no -0


def _abs_max_fake(x: Tensor, dims: Sequence[int] | None) -> Tensor:
    if dims is None:
        return x.new_empty(())
    gone = {dim % x.dim() for dim in dims}
    return x.new_empty([1 if dim in gone else size for dim, size in enumerate(x.shape)])


def _scale(amax: Tensor, largest: float, power_of_2: bool) -> Tensor:
    high = amax.to(wide(amax.dtype))
    # By a tensor: divided by a number, a card multiplies by its rounded inverse.
    scale = high / torch.full_like(high, largest)
    if power_of_2:
        scale = _rounded_up(scale)
    # Numbers of a tensor of zeros, or of one too small to divide, are 0 whatever they are divided by.
    return torch.where((amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def _rounded_up(scale: Tensor) -> Tensor:
    """To a power of 2, by their bits: an exponential need not be exact."""
    as_integer, mantissa = torch.int32, (1 << 23) - 1
    if scale.dtype is torch.float64:
        as_integer, mantissa = torch.int64, (1 << 52) - 1
    rounded = ((scale.contiguous().view(as_integer) + mantissa) & ~mantissa).view(scale.dtype)
    return torch.where(scale.isfinite(), rounded, scale)


def _scale_fake(amax: Tensor, largest: float, power_of_2: bool) -> Tensor:
    return amax.new_empty(amax.shape, dtype=wide(amax.dtype))


def _cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    numbers = x.to(torch.promote_types(x.dtype, scale.dtype)) / scale
    numbers = numbers.clamp_(-LARGEST[dtype], LARGEST[dtype])
    # What is not finite has to be seen behind a product: by a loss scale, and by who looks for what made it.
    numbers.masked_fill_(x.isinf(), torch.nan)
    return float8_bits(numbers, dtype)


def _cast_fake(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


abs_max = define(
    "abs_max(Tensor x, int[]? dims) -> Tensor", _abs_max, _abs_max_fake, facts=Facts(own_memory=True, work="reduction")
)
fp8_scale = define(
    "fp8_scale(Tensor amax, float largest, bool power_of_2) -> Tensor", _scale, _scale_fake, facts=Facts(own_memory=True),
)  # fmt: skip
fp8_cast = define(
    "fp8_cast(Tensor x, Tensor scale, ScalarType dtype) -> Tensor", _cast, _cast_fake, facts=Facts(own_memory=True)
)

CAST = fp8_cast.name
MAXIMUM = abs_max.name


def carried(target: str, refs: Sequence[int]) -> Sequence[int]:
    """Of the operands of a node, those whose numbers its result may have: of a cast x, and not its scale."""
    return refs[:1] if target == CAST else refs


# ---- products ----


def widened(bits: Tensor, dtype: torch.dtype, high: torch.dtype) -> Tensor:
    """Numbers of a format in float8 as they stand for in a wider dtype."""
    return bits.view(dtype).to(high)


def _of_columns(scale: Tensor) -> Tensor:
    """A scale as a product (..., columns) is multiplied by it: one number, or one of each column."""
    return scale if scale.dim() == 0 else scale.reshape(-1)


def _linear(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor:
    high = wide(dtype)
    out = F.linear(widened(x, E4M3, high), widened(w, E4M3, high))
    out.mul_(x_scale).mul_(_of_columns(w_scale))
    if b is not None:
        out.add_(b)
    return out.to(dtype)


def _linear_fake(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, b: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if x.shape[-1] != w.shape[-1]:
        weight = f"w {tuple(w.shape)}, (out, in), takes {w.shape[-1]}"
        attempt = f"x of shape {(*x.shape[:-1], w.shape[-1])}"
        raise RuleError(f"scaled_linear: x {tuple(x.shape)} ends in {x.shape[-1]}, and {weight}. Try: {attempt}")
    return x.new_empty((*x.shape[:-1], w.shape[0]), dtype=dtype)


def _linear_dx(
    g: Tensor, w: Tensor, g_scale: Tensor, w_scale: Tensor, g_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    high = wide(dtype)
    out = torch.matmul(widened(g, g_dtype, high), widened(w, E4M3, high))
    return out.mul_(g_scale).mul_(_of_columns(w_scale)).to(dtype)


def _linear_dx_fake(
    g: Tensor, w: Tensor, g_scale: Tensor, w_scale: Tensor, g_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    return g.new_empty((*g.shape[:-1], w.shape[1]), dtype=dtype)


def _linear_dw(
    g: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor, g_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    high = wide(dtype)
    rows, features = widened(g, g_dtype, high).flatten(0, -2), widened(x, E4M3, high).flatten(0, -2)
    out = torch.mm(rows.t(), features)
    out.mul_(g_scale if g_scale.dim() == 0 else g_scale.reshape(-1, 1))
    return out.mul_(_of_columns(x_scale)).to(dtype)


def _linear_dw_fake(
    g: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor, g_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    return g.new_empty((g.shape[-1], x.shape[-1]), dtype=dtype)


scaled_linear_dx = define(
    "scaled_linear_dx(Tensor g, Tensor w, Tensor g_scale, Tensor w_scale, ScalarType g_dtype, ScalarType dtype)"
    " -> Tensor",
    _linear_dx, _linear_dx_fake, facts=Facts(own_memory=True, product=True, row_order="any"),
)  # fmt: skip
scaled_linear_dw = define(
    "scaled_linear_dw(Tensor g, Tensor x, Tensor g_scale, Tensor x_scale, ScalarType g_dtype, ScalarType dtype)"
    " -> Tensor",
    _linear_dw, _linear_dw_fake, facts=Facts(own_memory=True, product=True, row_order="any"),
)  # fmt: skip
scaled_linear = define(
    "scaled_linear(Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? b, ScalarType dtype) -> Tensor",
    _linear, _linear_fake,
    facts=Facts(
        own_memory=True, product=True, row_order="any", weights=(1, 4),
        backward_products=(scaled_linear_dx.name, scaled_linear_dw.name, "colofunc.fp8_linear_dx"),
    ),
)  # fmt: skip


def bits_of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (..., k) in e4m3 with a scale of each row, a power of 2: (bits, scale (..., 1))."""
    scale = _scale(_abs_max(x, (-1,)), LARGEST[E4M3], True)
    return _cast(x, scale, E4M3), scale


def product_of_rows(x: Tensor, w: Tensor) -> Tensor:
    """x (m, k), w (n, k) -> (m, n): the product of both in float8 with a scale of each row, in the dtype of x."""
    x_bits, x_scale = bits_of_rows(x)
    w_bits, w_scale = bits_of_rows(w)
    return _linear(x_bits, w_bits, x_scale, w_scale, None, x.dtype)


PRODUCTS = (scaled_linear.name, scaled_linear_dx.name, scaled_linear_dw.name)


# ---- on a GPU ----

CAPABILITY = (8, 9)
"""The first CUDA devices with products in float8."""
ROWWISE_CAPABILITY = (9, 0)
"""The first with products whose scales are of rows and columns."""
MULTIPLE = 16
"""What the summed dim and the columns of a product are multiples of."""


def _operands(call: KernelCall) -> tuple[str, str]:
    """The names of a product's two matrices."""
    return {PRODUCTS[0]: ("x", "w"), PRODUCTS[1]: ("g", "w"), PRODUCTS[2]: ("g", "x")}[call.target]


def _shape(call: KernelCall) -> tuple[int, int, int]:
    """(rows, summed, columns) of a product."""
    first, second = (call[name].shape for name in _operands(call))
    batch = prod(first[:-1])
    if call.target == PRODUCTS[0]:
        return batch, first[-1], second[0]
    if call.target == PRODUCTS[1]:
        return batch, first[-1], second[1]
    return first[-1], batch, second[-1]


def _is_by_rows(call: KernelCall) -> bool:
    """Whether a scale is of rows or columns."""
    return any(call[f"{name}_scale"].shape for name in _operands(call))


def _taken(call: KernelCall) -> bool:
    """Whether torch._scaled_mm takes a product."""
    dtype = call["dtype"]
    if call.capability < CAPABILITY or dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if _is_by_rows(call) and (dtype is not torch.bfloat16 or call.capability < ROWWISE_CAPABILITY):
        return False
    rows, summed, columns = _shape(call)
    return min(rows, summed, columns) > 0 and summed % MULTIPLE == 0 and columns % MULTIPLE == 0


def _seconds(call: KernelCall, rates: Rates) -> float:
    rows, summed, columns = _shape(call)
    result = rows * columns * call["dtype"].itemsize
    moved = rows * summed + summed * columns + result + 2 * _copied_bytes(call)
    work = 2 * rows * summed * columns / rates.flops_per_s(E4M3)
    return max(work, moved / rates.bytes_per_s) + rates.launch_s


def _copied_bytes(call: KernelCall) -> int:
    """Copies of operands that lie the wrong way round for the product."""
    rows, summed, columns = _shape(call)
    if call.target == PRODUCTS[0]:
        return 0
    if call.target == PRODUCTS[1]:
        return summed * columns
    return rows * summed + summed * columns


def _widened_seconds(call: KernelCall, rates: Rates) -> float:
    rows, summed, columns = _shape(call)
    high = wide(call["dtype"])
    moved = 2 * _widened_bytes(call) + 3 * rows * columns * high.itemsize
    work = 2 * rows * summed * columns / rates.flops_per_s(high)
    return max(work, moved / rates.bytes_per_s) + 5 * rates.launch_s


def _widened_bytes(call: KernelCall) -> int:
    """Both operands in the dtype in which they are multiplied, and the product in it where the result has another."""
    rows, summed, columns = _shape(call)
    high = wide(call["dtype"])
    product = 0 if high is call["dtype"] else rows * columns
    return (rows * summed + summed * columns + product) * high.itemsize


def _multiplied(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """a (m, k) in rows times b (k, n) in columns, scales () or (m, 1) and (1, n)."""
    if a_scale.dim() or b_scale.dim():  # both are of rows and columns then
        a_scale = a_scale.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        b_scale = b_scale.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    scales = a_scale.to(torch.float32), b_scale.to(torch.float32)
    if bias is None or dtype is not torch.float32:
        return compat.scaled_mm(a, b, *scales, dtype, bias)
    return compat.scaled_mm(a, b, *scales, dtype, None) + bias  # it takes no bias in float32


def _turned(bits: Tensor) -> Tensor:
    """bits (r, c) -> (c, r), contiguous."""
    if bits.t().is_contiguous() or not (bits.is_contiguous() and triton_use.takes_triton(bits)):
        return bits.t().contiguous()
    from colofunc.ops.fp8_triton import transposed  # Triton is not there everywhere

    return transposed(bits)


def linear_cuda(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, b: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`scaled_linear` by `torch._scaled_mm`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous().view(E4M3)
    out = _multiplied(rows, w.contiguous().view(E4M3).t(), x_scale, w_scale, dtype, b)
    return out.view(*x.shape[:-1], w.shape[0])


def _linear_dx_cuda(
    g: Tensor, w: Tensor, g_scale: Tensor, w_scale: Tensor, g_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    rows = g.reshape(-1, g.shape[-1]).contiguous().view(g_dtype)
    out = _multiplied(rows, _turned(w).view(E4M3).t(), g_scale, w_scale, dtype)
    return out.view(*g.shape[:-1], w.shape[1])


def _linear_dw_cuda(
    g: Tensor, x: Tensor, g_scale: Tensor, x_scale: Tensor, g_dtype: torch.dtype, dtype: torch.dtype
) -> Tensor:
    rows = _turned(g.reshape(-1, g.shape[-1])).view(g_dtype)
    features = _turned(x.reshape(-1, x.shape[-1])).view(E4M3).t()
    return _multiplied(rows, features, g_scale, x_scale, dtype)


def _maximum_is_one_pass(call: KernelCall) -> bool:
    """Whether a maximum is of all dims, of the last one, or of all but the last."""
    x, dims = call["x"], call["dims"]
    return x.dtype in NARROW and (dims is None or _reduced(x.shape, dims) in _one_pass(len(x.shape)))


def _reduced(shape: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(dim % len(shape) for dim in dims))


def _one_pass(dims: int) -> tuple[tuple[int, ...], ...]:
    """The last dim, and all others where there are some."""
    last = (dims - 1,)
    return (last, tuple(range(dims - 1))) if dims > 1 else (last,)


def _abs_max_cuda(x: Tensor, dims: Sequence[int] | None) -> Tensor:
    if not (x.is_contiguous() and triton_use.takes_triton(x)):
        return _abs_max(x, dims)  # torch's reductions read any strides, and make no copy
    from colofunc.ops.fp8_triton import abs_max as in_one_pass  # Triton is not there everywhere

    return in_one_pass(x, None if dims is None else _reduced(x.shape, dims))


def scales_of(x: Sequence[int], scale: Sequence[int]) -> str | None:
    """What scales are of, by shapes: "one", "rows" or "columns" of x (..., columns); None: something else."""
    if prod(scale) == 1:
        return "one"
    if len(scale) != len(x):
        return None
    if tuple(scale) == (*x[:-1], 1):
        return "rows"
    return "columns" if prod(scale) == scale[-1] == x[-1] else None


def _cast_is_one_pass(call: KernelCall) -> bool:
    x, scale = call["x"], call["scale"]
    return x.dtype in NARROW and scale.dtype is torch.float32 and scales_of(x.shape, scale.shape) is not None


def _cast_cuda(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    of = scales_of(x.shape, scale.shape)
    if of is None or not triton_use.takes_triton(x):
        return _cast(x, scale, dtype)
    from colofunc.ops.fp8_triton import cast

    return cast(x, scale, dtype, of)


def _one_pass_seconds(call: KernelCall, rates: Rates) -> float:
    """A maximum reads its tensor, a cast writes a byte for each number besides."""
    x = call["x"]
    moved = x.nbytes + (x.numel if call.target == CAST else 0)
    return moved / rates.bytes_per_s + rates.launch_s


def _no_bytes(call: KernelCall) -> int:
    """Maxima of parts are few, and operands are read as they lie."""
    return 0


def _kernels() -> Iterator[Kernel]:
    yield Kernel(MAXIMUM, "cuda", _maximum_is_one_pass, _one_pass_seconds, _no_bytes, _abs_max_cuda)
    yield Kernel(CAST, "cuda", _cast_is_one_pass, _one_pass_seconds, _no_bytes, _cast_cuda)
    on_a_card: tuple[Callable[..., Tensor], ...] = (linear_cuda, _linear_dx_cuda, _linear_dw_cuda)
    emulated: tuple[Callable[..., Tensor], ...] = (_linear, _linear_dx, _linear_dw)
    for target, fast, slow in zip(PRODUCTS, on_a_card, emulated, strict=True):
        yield Kernel(target, "cuda", _taken, _seconds, _copied_bytes, fast)
        yield Kernel(target, "cuda", anything, _widened_seconds, _widened_bytes, slow)


CUDA_KERNELS = tuple(_kernels())
