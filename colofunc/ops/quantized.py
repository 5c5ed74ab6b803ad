"""Quantized weights: plain tensors that stand for a matrix, and the operators that read them.

Problem: a weight in 8 or 4 bits is numbers and scales that belong together, while sharding, copies and files know
single tensors. Idea: a *format* says which tensors a matrix (o, i) becomes and how it is made of them again; all of
them have the rows as dim 0, so that a split of rows splits all of them. `Quantized` is one weight in a format. Each
format has three operators:

    int8_linear(x, data, scale, bias)      x (..., i) -> (..., o), as `linear` with the widened weight
    int8_linear_dx(g, data, scale)         its gradient: g (..., o) -> (..., i)
    int8_dequantize(data, scale, dtype)    the weight itself, (o, i)

    format  data                            scale                   zero            outer           bits a weight, of 4096 columns
    int8    int8 (o, i)                     float32 (o)                                             8.01
    fp8     uint8 (o, i), bits of e4m3fn    float32 (o)                                             8.01
    fp8_e5m2 uint8 (o, i), bits of e5m2     float32 (o)                                             8.01
    fp8_g128 uint8 (o, i), bits of e4m3fn   float32 (o, i/128)                                      8.25
    int4    uint8 (o, i/2), two in a byte   float32 (o, i/128)      uint8 (o, i/128)                4.31
    nf4     uint8 (o, i/2), two in a byte   uint8 (o, i/64)                         float32 (o)     4.13
    nf4_g64 uint8 (o, i/2), two in a byte   float32 (o, i/64)                                       4.50
    mxfp8   uint8 (o, i), bits of e4m3fn    uint8 (o, i/32), bits of e8m0                           8.25
    nvfp4   uint8 (o, i/2), two in a byte   uint8 (o, i/16), bits of e4m3fn         float32 (o)     4.51

A weight in any of them may have an `input_scale` (i) beside these parts: its columns were multiplied by it before they
were rounded, so inputs are divided by it in front of the product (`colofunc/ops/input_scales.py`), and a widened weight
is divided by it.

The first of two numbers in a byte is its low half. Source of nf4 and of scales that are quantized themselves: QLoRA
(2305.14314), section 3 and appendix E; here the second scale is one of a row, so that rows are independent of one
another. `nf4_g64` has the scales of blocks as they are: those that bitsandbytes keeps, or computes of its own second
scales. The second scale of nvfp4 is one of the whole tensor; each row has a copy of it, so that rows may lie on ranks,
and are read, as those of other formats. Sources of mxfp8 and nvfp4 are named in `colofunc/ops/small_floats.py`.

Products widen a few rows (or columns) at a time, `WIDENED_BYTES` at most, so that no whole weight is held beside the
packed one. They compute as `dequantize`, a cast to the dtype of x, and a product would: in the wider of the scales' and
x's dtype, then in that of x.

`int8_linear` and `int4_linear` of few rows have a kernel (`packed_linear_`; on the CPU in C++,
`ext/cuda/cpu/linear.cpp`, on GPUs in CUDA, `ext/cuda/cuda/linear.cu`), which widens in registers. For x in float32,
float16 and bfloat16 it sums products in float32 and rounds the result once, so for each element of y

    |y - exact| <= ((i + 4) 2^-24 + r) sum |x w| + u |exact|

u: 2^-24, 2^-11, 2^-8, half a unit in the last place of the dtype of x. r: 0 for int8, whose numbers are exact in all of
them; u for int4, whose weight may be rounded to the dtype of x as above. Numbers below 2^-126 may be taken as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from colofunc.errors import RuleError, TraceError
from colofunc.ops import native
from colofunc.ops.define import NAMESPACE, Operator, define, nothing
from colofunc.ops.facts import Facts
from colofunc.ops.small_floats import (
    E4M3_NAN,
    E8M0_NAN,
    MX_BLOCK,
    NV_BLOCK,
    e2m1_values,
    e4m3_bits,
    e4m3_values,
    e5m2_bits,
    e5m2_values,
    e8m0_values,
)

PARTS = ("data", "scale", "zero", "outer")
"""Names of the tensors that a weight may consist of, in the order in which operators take them."""
WIDENED_BYTES = 1 << 20
"""At most this much of a weight is widened at a time, where a single row (or group of columns) is not more. It stays in
a core's cache."""
# The 16 levels of NF4, at which a normal variable has equal mass between neighbours; 0 and both ends are among them
# (QLoRA, appendix E).
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@attrs.frozen(eq=False)
class Format:
    """How some tensors stand for a matrix (o, i).

    `parts`: which of `PARTS` there are. `group`: columns that share a scale, 1 where all of a row do: columns are cut
    between groups only. `packed`: numbers in an element of `data`. `widen(parts, dtype)`: the matrix in `dtype`, from
    parts with these rows and columns. `nan`: what stands for NaN in `scale`, where that is bits of floating-point
    numbers.
    """

    name: str
    parts: tuple[str, ...]
    group: int
    packed: int
    widen: Callable[[Sequence[Tensor], torch.dtype], Tensor]
    nan: int | None = None

    def columns(self, parts: Sequence[Tensor]) -> int:
        """Columns of the matrix."""
        return int(parts[0].shape[1]) * self.packed

    def rows_of(self, parts: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
        """The parts of some rows."""
        return [part[first:end] for part in parts]

    def columns_of(self, parts: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
        """The parts of some columns; `first` and `end` lie between groups."""
        columns = self.columns(parts)
        found = []
        for part in parts:
            if part.dim() == 2:
                width = part.shape[1]
                part = part[:, first * width // columns : end * width // columns]
            found.append(part)
        return found


# ---- the formats ----


def _widen_int8(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale = parts
    return data * scale.to(dtype).unsqueeze(1)  # in `dtype`, to which whole numbers are promoted


def _widen_fp8(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale = parts
    return e4m3_values(data, dtype) * scale.to(dtype).unsqueeze(1)


def _widen_fp8_e5m2(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale = parts
    return e5m2_values(data, dtype) * scale.to(dtype).unsqueeze(1)


def _widen_fp8_g128(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale = parts
    numbers = e4m3_values(data, dtype).unflatten(1, (scale.shape[1], -1))
    return (numbers * scale.to(dtype).unsqueeze(2)).flatten(1)


def _fp8_bits_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.uint8)


# Operators, because a tensor on several ranks has no view in another dtype.
fp8_bits = define("fp8_bits(Tensor x) -> Tensor", e4m3_bits, _fp8_bits_fake)
fp8_e5m2_bits = define("fp8_e5m2_bits(Tensor x) -> Tensor", e5m2_bits, _fp8_bits_fake)


def unpacked(data: Tensor) -> Tensor:
    """Numbers of 0 to 15, (o, i), of which each byte of (o, i/2) holds two."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)


def packed_nibbles(numbers: Tensor) -> Tensor:
    """Bytes (o, i/2) that hold two numbers of 0 to 15 each, of (o, i)."""
    pairs = numbers.to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4)


def _widen_int4(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale, zero = parts
    numbers = unpacked(data).unflatten(1, (scale.shape[1], -1)).to(dtype)
    return ((numbers - zero.to(dtype).unsqueeze(2)) * scale.to(dtype).unsqueeze(2)).flatten(1)


def nf4_scales(scale: Tensor, outer: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale of each block, (o, i/64), of its 8 bits and the row's own scale."""
    return scale.to(dtype) * (outer.to(dtype) / 255.0).unsqueeze(1)


def _nf4_values(data: Tensor, scale: Tensor) -> Tensor:
    """Levels times the scale of each block, in the dtype of the scales."""
    levels = torch.tensor(NF4_LEVELS, dtype=scale.dtype, device=data.device)
    numbers = levels[unpacked(data).to(torch.int64)].unflatten(1, (scale.shape[1], -1))
    return (numbers * scale.unsqueeze(2)).flatten(1)


def _widen_nf4(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale, outer = parts
    return _nf4_values(data, nf4_scales(scale, outer, dtype))


def _widen_nf4_g64(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale = parts
    return _nf4_values(data, scale.to(dtype))


def _widen_mxfp8(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale = parts
    numbers = e4m3_values(data, dtype).unflatten(1, (scale.shape[1], -1))
    return (numbers * e8m0_values(scale, dtype).unsqueeze(2)).flatten(1)


def _widen_nvfp4(parts: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    data, scale, outer = parts
    numbers = e2m1_values(unpacked(data), dtype).unflatten(1, (scale.shape[1], -1))
    scaled = (numbers * e4m3_values(scale, dtype).unsqueeze(2)).flatten(1)  # exact
    return scaled * outer.to(dtype).unsqueeze(1)


FORMATS: Mapping[str, Format] = {
    "int8": Format("int8", ("data", "scale"), 1, 1, _widen_int8),
    "fp8": Format("fp8", ("data", "scale"), 1, 1, _widen_fp8),
    "fp8_e5m2": Format("fp8_e5m2", ("data", "scale"), 1, 1, _widen_fp8_e5m2),
    "fp8_g128": Format("fp8_g128", ("data", "scale"), 128, 1, _widen_fp8_g128),
    "int4": Format("int4", ("data", "scale", "zero"), 128, 2, _widen_int4),
    "nf4": Format("nf4", ("data", "scale", "outer"), 64, 2, _widen_nf4),
    "nf4_g64": Format("nf4_g64", ("data", "scale"), 64, 2, _widen_nf4_g64),
    "mxfp8": Format("mxfp8", ("data", "scale"), MX_BLOCK, 1, _widen_mxfp8, nan=E8M0_NAN),
    "nvfp4": Format("nvfp4", ("data", "scale", "outer"), NV_BLOCK, 2, _widen_nvfp4, nan=E4M3_NAN),
}


# ---- products by kernels of our own ----

KERNEL_ROWS: Mapping[str, int] = {"cpu": 256, "cuda": 16}
"""Rows of x up to which a device's kernel is used: with more, widening is a small part and torch's product is the
faster one."""
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of x for which the kernels are written."""


def _has_kernel(form: Format, x: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether the kernel of a device takes this product, and is there. It reads rows whose numbers lie side by side."""
    if form.name not in ("int8", "int4") or x.device.type not in KERNEL_ROWS or x.dtype not in KERNEL_DTYPES:
        return False
    columns = form.columns(parts)
    if x.numel() == 0 or parts[0].numel() == 0 or x.numel() > KERNEL_ROWS[x.device.type] * columns:
        return False
    if form.name == "int4" and columns != parts[1].shape[1] * form.group:
        return False
    if any(part.dim() == 2 and part.stride(1) != 1 for part in parts):
        return False
    return native.ready(x.device.type)


def _by_kernel(out: Tensor, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> None:
    data, scale, *zero = parts
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    packed_linear_.op(out.view(-1, out.shape[-1]), rows, data, scale, zero[0] if zero else None, bias)


def _packed_linear_(
    out: Tensor, x: Tensor, data: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None
) -> None:
    if zero is None:
        _widened_linear(FORMATS["int8"], out, x, (data, scale), bias)
    else:
        _widened_linear(FORMATS["int4"], out, x, (data, scale, zero), bias)


packed_linear_ = define(
    "packed_linear_(Tensor(a!) out, Tensor x, Tensor data, Tensor scale, Tensor? zero, Tensor? bias) -> ()", _packed_linear_, nothing,
    facts=Facts(product=True),
)  # fmt: skip


# ---- their operators ----


@attrs.frozen(eq=False)
class Operators:
    """The three operators of a format."""

    linear: Operator
    linear_dx: Operator
    dequantize: Operator


def _wide_dtype(parts: Sequence[Tensor], dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a weight is widened that is read in `dtype`: float32, or a wider one."""
    dtype = torch.promote_types(dtype, torch.float32)
    for part in parts:
        if part.is_floating_point():
            dtype = torch.promote_types(dtype, part.dtype)
    return dtype


def _cuts(size: int, other: int, itemsize: int, group: int) -> Iterator[tuple[int, int]]:
    """Ranges of one dim whose part of a matrix is of `WIDENED_BYTES` at most, in whole groups."""
    fitting = WIDENED_BYTES // max(1, other * itemsize)
    step = max(group, fitting // group * group)
    for first in range(0, size, step):
        yield first, min(size, first + step)


def _widened_linear(form: Format, out: Tensor, x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> None:
    """Fill `out` (..., o), from some rows of the weight at a time."""
    rows, columns = parts[0].shape[0], form.columns(parts)
    dtype = _wide_dtype(parts, x.dtype)
    for first, end in _cuts(rows, columns, dtype.itemsize, 1):
        weight = form.widen(form.rows_of(parts, first, end), dtype).to(x.dtype)
        out[..., first:end] = F.linear(x, weight, None if bias is None else bias[first:end])


def _operators(form: Format) -> Operators:
    """Defines `colofunc::<format>_linear` and its relatives."""
    given = ", ".join(f"Tensor {part}" for part in form.parts)
    count = len(form.parts)

    def linear(x: Tensor, *rest: Any) -> Tensor:
        parts, bias = rest[:count], rest[count]
        out = x.new_empty((*x.shape[:-1], parts[0].shape[0]))
        if _has_kernel(form, x, parts):
            _by_kernel(out, x, parts, bias)
        else:
            _widened_linear(form, out, x, parts, bias)
        return out

    def linear_fake(x: Tensor, *rest: Any) -> Tensor:
        columns = form.columns(rest[:count])
        if x.shape[-1] != columns:
            raise RuleError(
                f"{form.name}_linear: x {tuple(x.shape)} ends in {x.shape[-1]}, and a weight with data "
                f"{tuple(rest[0].shape)} has {columns} columns. Try: x of shape {(*x.shape[:-1], columns)}"
            )
        return x.new_empty((*x.shape[:-1], rest[0].shape[0]))

    def linear_dx(g: Tensor, *parts: Tensor) -> Tensor:
        rows, columns = parts[0].shape[0], form.columns(parts)
        dtype = _wide_dtype(parts, g.dtype)
        out = g.new_empty((*g.shape[:-1], columns))
        for first, end in _cuts(columns, rows, dtype.itemsize, form.group):
            weight = form.widen(form.columns_of(parts, first, end), dtype).to(g.dtype)
            out[..., first:end] = torch.matmul(g, weight)
        return out

    def linear_dx_fake(g: Tensor, *parts: Tensor) -> Tensor:
        return g.new_empty((*g.shape[:-1], form.columns(parts)))

    def dequantize(*given: Any) -> Tensor:
        parts, dtype = given[:count], given[count]
        return form.widen(parts, _wide_dtype(parts, dtype)).to(dtype)

    def dequantize_fake(*given: Any) -> Tensor:
        return given[0].new_empty((given[0].shape[0], form.columns(given[:count])), dtype=given[count])

    def save_linear(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1 : 1 + count])

    def linear_backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        need = ctx.needs_input_grad
        dx = made.linear_dx.apply(g, *ctx.saved_tensors) if need[0] else None
        leading = list(range(g.dim() - 1))
        bias = None
        if need[-1] and len(need) == count + 2:
            bias = g.sum(leading) if leading else g
        return (dx, *[None] * count, bias)

    def save_dx(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs[1:])

    def dx_backward(ctx: Any, h: Tensor) -> tuple[Any, ...]:
        # dx = g @ w, so g gets h @ w.T, which is the product itself.
        dg = made.linear.apply(h, *ctx.saved_tensors, None) if ctx.needs_input_grad[0] else None
        return (dg, *[None] * count)

    made = Operators(
        define(
            f"{form.name}_linear(Tensor x, {given}, Tensor? bias) -> Tensor",
            linear,
            linear_fake,
            (save_linear, linear_backward),
            facts=Facts(
                own_memory=True,
                product=True,
                backward_products=(f"{NAMESPACE}.{form.name}_linear_dx",),
                weights=tuple(range(1, count + 2)),
                row_order="any",
            ),
        ),
        define(
            f"{form.name}_linear_dx(Tensor g, {given}) -> Tensor",
            linear_dx,
            linear_dx_fake,
            (save_dx, dx_backward),
            facts=Facts(own_memory=True, product=True, row_order="any"),
        ),
        define(
            f"{form.name}_dequantize({given}, ScalarType dtype) -> Tensor",
            dequantize,
            dequantize_fake,
            facts=Facts(own_memory=True),
        ),
    )
    return made


OPERATORS: Mapping[str, Operators] = {name: _operators(form) for name, form in FORMATS.items()}
PRODUCTS = frozenset(operators.linear.name for operators in OPERATORS.values())
PACKED_READERS: Mapping[str, Mapping[str, str]] = {
    "colofunc.linear": {name: operators.linear.name for name, operators in OPERATORS.items()},
    "colofunc.linear_dx": {name: operators.linear_dx.name for name, operators in OPERATORS.items()},
}
"""Product -> format -> the operator in its place, which reads the second operand packed."""
DEQUANTIZE: Mapping[str, str] = {f"colofunc.{name}_dequantize": name for name in FORMATS}
"""Operator that gives a weight -> its format."""


# ---- a weight ----


def still_packed(scheme: str) -> str:
    """What is wrong where a packed weight is used as if it were a tensor."""
    return (
        f"the weight is quantized as {scheme!r}, and only a step under cf.quantize reads it. Try: "
        "step = cf.quantize(step, ...) with that scheme, whose code is given the weight; or weight.dequantize()"
    )


@attrs.frozen(eq=False, repr=False)
class Quantized:
    """A weight in the parts of a format.

    What a tree holds in a weight's place: one container, whose tensors are the parts.

    Of a weight with more than two dims (a convolution's) the parts are those of the matrix of its rows.

    `scheme`: how its numbers were chosen ("int8", "nf4", ...). `form`: the name of its format. `dtype`: that it had.
    `data` has the weight's own name in a program, so that globs of plans and specs that are meant for the weight are
    about it; the others follow. `input_scale`: (i,) float32, by which its columns were multiplied before they were
    rounded; None: by nothing.
    """

    scheme: str
    form: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Tensor
    scale: Tensor
    zero: Tensor | None = None
    outer: Tensor | None = None
    input_scale: Tensor | None = None

    @property
    def format(self) -> Format:
        """How its parts stand for it."""
        return FORMATS[self.form]

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors that it consists of, in the order of its format."""
        every = {"data": self.data, "scale": self.scale, "zero": self.zero, "outer": self.outer}
        found = [every[name] for name in self.format.parts]
        return tuple(part for part in found if part is not None)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors that are kept of it: its parts, and the scale of its inputs where there is one."""
        return self.parts if self.input_scale is None else (*self.parts, self.input_scale)

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.numel() * tensor.itemsize for tensor in self.tensors)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight that it stands for, in `dtype` (its own by default)."""
        dtype = self.dtype if dtype is None else dtype
        if self.input_scale is None:
            rows = self.for_divided_inputs(dtype)
        else:
            # Cast once, after the division.
            rows = (self.for_divided_inputs(_wide_dtype(self.parts, dtype)) / self.input_scale).to(dtype)
        return rows if len(self.shape) == 2 else rows.reshape(self.shape)

    def for_divided_inputs(self, dtype: torch.dtype) -> Tensor:
        """The matrix (o, i) of its parts alone, which inputs divided by `input_scale` are multiplied with."""
        rows: Tensor = OPERATORS[self.form].dequantize(*self.parts, dtype)
        return rows

    def equal(self, other: object) -> bool:
        """Whether both are in the same scheme, with equal parts as `torch.equal` says of each; parts have to lie alike."""
        if not isinstance(other, Quantized):
            return False
        if (self.scheme, self.form, self.shape, self.dtype) != (other.scheme, other.form, other.shape, other.dtype):
            return False
        if len(self.tensors) != len(other.tensors):
            return False
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raises TraceError: code that is given packed weights, as a step without `cf.quantize` is, cannot use them.

        It is no TypeError, of which Python would make "unsupported operand".
        """
        leaves = pytree.tree_leaves((args, kwargs or {}))
        packed = next(leaf for leaf in leaves if isinstance(leaf, cls))
        raise TraceError(f"{getattr(func, '__name__', func)}: {still_packed(packed.scheme)}")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise AttributeError(f"{name}: {still_packed(self.scheme)}")

    def __repr__(self) -> str:
        return f"Quantized({self.scheme!r}, {tuple(self.shape)}, {str(self.dtype).removeprefix('torch.')}, {self.nbytes:,} bytes)"
