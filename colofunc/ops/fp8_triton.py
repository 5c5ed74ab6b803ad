"""From numbers to float8 on a GPU: largest magnitudes, casts, and matrices of bytes turned around, each in one pass
over memory.

Problem: written with torch's operators a cast is six passes over its tensor in float32, a maximum of rows makes a
copy first, and torch copies transposed bytes one by one. All of it takes longer than products in float8 save. Idea:
a Triton kernel for each.

    abs_max(x, dims)               # as colofunc.abs_max, of all dims, of the last one, or of all but the last one
    cast(x, scale, dtype, of)      # as colofunc.fp8_cast, scale of one element, of rows, or of columns
    transposed(bits)               # (r, c) -> (c, r), contiguous

Magnitudes are compared by their bits, whose order is that of the numbers, with NaN above all. A cast rounds by
integers: halves go to the even neighbour, and what is below the least normal number is rounded by adding a power of
two. So both are the same on every card, as on the host; a cast of what is not a number is 0x7F, whatever its sign.

This module is imported where a kernel is launched: Triton is there with torch for CUDA, and not elsewhere.
"""

# Arguments of Triton's functions have types of its own, which annotations do not say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from colofunc.ops.kernels import on_card_of
from colofunc.ops.small_floats import E4M3, E5M2, LARGEST

CHUNK = 1 << 15
"""Elements of a program, where the maximum is of all."""
BLOCK = 2048
ROWS, COLUMNS = 16, 128
"""Of a tile, where the maximum is of columns."""
SPLIT = 256
"""Rows of a program there."""
TILE = 64
"""Rows and columns of a tile that is turned around."""
STRIDES = 3
"""Of leading dims, that a cast can follow in one launch; of a tensor with more each index of its first dim is another
launch."""
FORMATS = {E4M3: (3, 7), E5M2: (2, 15)}
"""Bits of the mantissa, bias of the exponent."""


@triton.jit
def _magnitude(x):
    """The bits of |x| in float32."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def row_max_kernel(x, out, n, length, BLOCK: tl.constexpr):
    """out (rows,): the bits of the largest magnitude of each `length` elements of x (n,)."""
    row = tl.program_id(0).to(tl.int64)
    first = row * length
    most = tl.zeros((BLOCK,), tl.int32)
    start = 0
    while start < length:
        at = start + tl.arange(0, BLOCK)
        found = tl.load(x + first + at, mask=(at < length) & (first + at < n), other=0.0)
        most = tl.maximum(most, _magnitude(found))
        start += BLOCK
    tl.store(out + row, tl.max(most, 0))


@triton.jit
def column_max_kernel(x, out, rows, columns, SPLIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """out (parts, columns): the bits of the largest magnitude of each column in `SPLIT` rows of x (rows, columns)."""
    part = tl.program_id(0)  # of these there may be more than a grid's second dim holds
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    start = 0
    while start < SPLIT:
        row = part * SPLIT + start + tl.arange(0, ROWS)
        at = row.to(tl.int64)[:, None] * columns + column[None, :]
        found = tl.load(x + at, mask=(row < rows)[:, None] & (column < columns)[None, :], other=0.0)
        most = tl.maximum(most, _magnitude(found))
        start += ROWS
    tl.store(out + part.to(tl.int64) * columns + column, tl.max(most, 0), mask=column < columns)


@triton.jit
def cast_kernel(
    x, scale, out, n, columns, far, middle_size, middle, near_size, near, right, STRIDED: tl.constexpr, OF: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out (n,): the bits of x / scale. `OF`: whether scales are of rows, of columns, or there is one.

    `STRIDED`: x is (any, middle_size, near_size, columns) in the strides (far, middle, near, right); otherwise numbers
    lie side by side.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    if OF == "rows":
        of = at // columns
    elif OF == "columns":
        of = at % columns
    else:
        of = tl.zeros_like(at)
    if STRIDED:
        row = at // columns
        block = row // near_size
        place = (
            (block // middle_size) * far
            + (block % middle_size) * middle
            + (row % near_size) * near
            + (at % columns) * right
        )
    else:
        place = at
    number = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    quotient = tl.div_rn(number, tl.load(scale + of, mask=inside, other=1.0))
    sign = (quotient.to(tl.int32, bitcast=True) >> 24) & 0x80
    size = tl.abs(quotient)
    # What is not a number is above nothing, and stays what it is.
    size = tl.where(size > LARGEST, LARGEST, size)
    wide = size.to(tl.int32, bitcast=True)
    last: tl.constexpr = 23 - MANTISSA
    half = (1 << (last - 1)) - 1 + ((wide >> last) & 1)
    normal = ((wide + half) >> last) - ((127 - BIAS) << MANTISSA)
    # A sum with this has the least number of the format as its last bit.
    above: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)
    small = (size + above).to(tl.int32, bitcast=True) - ((127 + 24 - BIAS - MANTISSA) << 23)
    bits = tl.where(size >= 2.0 ** (1 - BIAS), normal, small) | sign
    given = _magnitude(number)
    bits = tl.where((given >= 0x7F800000) | (quotient != quotient), 0x7F, bits)
    tl.store(out + at, bits.to(tl.uint8), mask=inside)


@triton.jit
def transpose_kernel(x, out, rows, columns, TILE: tl.constexpr):
    """out (columns, rows) of x (rows, columns), bytes."""
    tiles = tl.cdiv(columns, TILE)
    row = (tl.program_id(0) // tiles) * TILE + tl.arange(0, TILE)
    column = (tl.program_id(0) % tiles) * TILE + tl.arange(0, TILE)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    found = tl.load(x + row.to(tl.int64)[:, None] * columns + column[None, :], mask=inside, other=0)
    turned = tl.trans(found)
    tl.store(out + column.to(tl.int64)[:, None] * rows + row[None, :], turned, mask=tl.trans(inside))


def abs_max(x: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """x contiguous, not empty; dims: None, (last,), or all but the last."""
    columns = x.shape[-1] if x.dim() else 1
    rows = x.numel() // columns
    if dims is None:
        parts, grid, length = -(-x.numel() // CHUNK), 1, CHUNK
    elif dims == (x.dim() - 1,):
        parts, grid, length = rows, 1, columns
    else:
        parts, grid, length = -(-rows // SPLIT), triton.cdiv(columns, COLUMNS), 0
    with on_card_of(x):
        if length:
            most = torch.empty(parts, dtype=torch.int32, device=x.device)
            row_max_kernel[(parts,)](x, most, x.numel(), length, BLOCK=BLOCK)
        else:
            most = torch.empty((parts, columns), dtype=torch.int32, device=x.device)
            column_max_kernel[(parts, grid)](x, most, rows, columns, SPLIT=SPLIT, ROWS=ROWS, COLUMNS=COLUMNS)
    if dims is None:
        return most.amax().view(torch.float32).to(x.dtype)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    return (most if length else most.amax(0)).view(torch.float32).to(x.dtype).view(shape)


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, of: str) -> Tensor:
    """x not empty, in any strides; `of`: as `fp8.scales_of` says."""
    out = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    for index, leading in _launches(x):
        own_scale = scale[index] if of == "rows" else scale
        _cast_part(x[index], leading, own_scale.contiguous(), out[index], dtype, of)
    return out


def _launches(x: Tensor) -> Iterator[tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """Indices of leading dims, and what `_leading` finds of x there: at most `STRIDES`.

    For x of up to 4 dims it is x itself.
    """
    leading = _leading(x)
    if len(leading) <= STRIDES:
        yield (), leading
        return
    for k in range(x.shape[0]):
        for rest, leading in _launches(x[k]):
            yield (k, *rest), leading


def _leading(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of all dims but the last; those that are one run of steps are joined."""
    joined: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if joined and joined[-1][1] == size * stride:
            size *= joined.pop()[0]
        joined.append((size, stride))
    return joined


def _cast_part(
    x: Tensor, leading: list[tuple[int, int]], scale: Tensor, out: Tensor, dtype: torch.dtype, of: str
) -> None:
    """Fill `out`, contiguous, from x with these leading dims."""
    mantissa, bias = FORMATS[dtype]
    columns, right = (x.shape[-1], x.stride(-1)) if x.dim() else (1, 1)
    (_, far), (middle_size, middle), (near_size, near) = [(1, 0)] * (STRIDES - len(leading)) + leading
    with on_card_of(x):
        cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, scale, out, x.numel(), columns, far, middle_size, middle, near_size, near, right, STRIDED=not x.is_contiguous(),
            OF=of, MANTISSA=mantissa, BIAS=bias, LARGEST=LARGEST[dtype], BLOCK=BLOCK,
        )  # fmt: skip


def transposed(bits: Tensor) -> Tensor:
    """bits (r, c) in uint8, contiguous, not empty -> (c, r)."""
    rows, columns = bits.shape
    out = torch.empty((columns, rows), dtype=torch.uint8, device=bits.device)
    with on_card_of(bits):
        transpose_kernel[(triton.cdiv(rows, TILE) * triton.cdiv(columns, TILE),)](bits, out, rows, columns, TILE=TILE)
    return out
