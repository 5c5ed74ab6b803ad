"""Adam and AdamW whose moments are kept in 8 bits: codes of one byte, and a scale for each block of elements.

Problem: two float32 moments are twice the memory of the parameters. Idea: an element of a moment is a byte that says
which share of the largest of its block it is, and the update reads and writes bytes; a moment is wide for some blocks
at a time only.

    param, m, m_scale, v, v_scale = adamw8(param, grad, m, m_scale, v, v_scale, step, lr, 0.9, 0.999, 1e-8, 0.01, True)

    m   int8, v   uint8, of the parameter's shape       m_scale, v_scale   float32, (..., blocks): the largest of each block

Blocks are runs of at most `BLOCK` elements in row-major order, which never go beyond the dim that they cut: `block_of`
says which one that is, from the shape alone. A parameter that is split between blocks has the codes and scales of one
device, bit for bit: each operation below is one operator of torch that rounds once, so that no element's result depends
on where it lies.

Codes: of the first moment, shares of the largest between 1 and 1e-6 lie in decades, and a decade has twice as many
levels as the one below it, evenly spaced. The code k with leading bit j stands for the level k - 2^j of the decade j.
The square's moment is divided by, so that what counts is its relative error: its levels lie at equal ratios, 255 in
seven decades.

    first    share(k) = 10^(j - 6) (0.1 + 0.9 (k - 2^j + 1) / 2^j),  k = 1 to 127        share(0) = 0        share(-k) = -share(k)
    square   share(k) = 10^(7 (k - 255) / 254),  k = 1 to 255                            share(0) = 0

A first moment near the largest is within 1 %, and what is a thousandth of it still has some levels; a square is within
3.3 %, and a positive one is never rounded to 0. Squares move so slowly that they are rounded up or down in turns (Note
[Dither]), first moments to the nearest. With a `site`, a parameter in bfloat16 is rounded up or down by a draw
(`ops.rounding`), and `sizes`, `strides`, `offset` say which part of the global one it is. On the host a kernel in C++
has the same bits (`ext/cuda/cpu/update_packed.cpp`). Source: Dettmers et al. 2022,
"8-bit optimizers via block-wise quantization" (2110.02861), section 2, which has a code like the first one for both
moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.ops.define import define, define_update, nothing
from colofunc.ops.indices import Index, index_of
from colofunc.ops.rounding import PARAM_DRAW, key_of, root_of, rounded, words_by
from colofunc.ops.update_narrow import HOST_GRADS, host_form
from colofunc.ops.update_numbers import corrections, is_skipped, on_device

BLOCK = 128
"""At most so many elements share a scale, which is 8.25 bits an element. Rows of most models are cut into blocks of
just this size."""
LEAST_BLOCK = 32
"""A parameter whose blocks would be smaller (of a prime number of columns, say) keeps wide moments: scales would be too
many."""
LEAST_ELEMENTS = 4096
"""A smaller parameter (a bias, a norm) keeps wide moments: there is nothing to win."""
WIDENED_ELEMENTS = 1 << 18
"""Elements that are wide at a time on the host: 1 MiB for each of a handful of temporaries."""
SIGNED_DECADES, DECADES = 7, 7
"""In which levels of the first moment and of the square lie."""
GOLDEN, ROOT = 0.6180339887498949, 0.4142135623730951  # parts of two irrational numbers


def code_dtype(signed: bool) -> torch.dtype:
    """Of codes: -127 to 127 of the first moment, 0 to 255 of the second."""
    return torch.int8 if signed else torch.uint8


@attrs.frozen
class Blocks:
    """How a shape is cut: dim `dim` in `count` pieces, each of which is a block with all dims behind it.

    `size`: its elements.
    """

    dim: int
    count: int
    size: int

    def scales(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the scales of a tensor of this shape."""
        return (*shape[: self.dim], self.count)


@cache
def block_of(shape: tuple[int, ...]) -> Blocks | None:
    """The largest blocks of at most `BLOCK` elements; None where moments of this shape are kept wide.

    >>> block_of((1024, 768)), block_of((64, 64, 3, 3)), block_of((768,))
    (Blocks(dim=1, count=6, size=128), Blocks(dim=1, count=8, size=72), None)
    """
    if prod(shape) < LEAST_ELEMENTS:
        return None
    found: Blocks | None = None
    behind = 1
    for dim in reversed(range(len(shape))):
        piece = max((n for n in range(1, BLOCK // behind + 1) if shape[dim] % n == 0), default=0)
        if piece and (found is None or piece * behind > found.size):
            found = Blocks(dim, shape[dim] // piece, piece * behind)
        behind *= shape[dim]
    return found if found is not None and found.size >= LEAST_BLOCK else None


# ---- the code ----


def _shares(signed: bool) -> list[float]:
    """What codes from 0 on stand for, ascending."""
    shares = [0.0]
    if not signed:
        return shares + [10.0 ** (DECADES * (code - 255) / 254) for code in range(1, 256)]
    for decade in range(SIGNED_DECADES):
        levels = 2**decade
        largest = 10.0 ** (decade - SIGNED_DECADES + 1)
        shares += [largest * (0.1 + 0.9 * (level + 1) / levels) for level in range(levels)]
    return shares


@attrs.frozen(eq=False)
class _Code:
    """Tables of a code in one dtype.

    The float of a share is cut behind 7 bits of its mantissa, which is finer than any two levels lie.

    `shares`: what codes stand for, from the least on. `code`: that of the level at or below the first share with these
    bits. `next`: the level above it, so that the level at or below a share with these bits is this one or that.
    `per_gap`: of a code, 1 over the distance to the next level.
    """

    shares: Tensor
    code: Tensor
    next: Tensor
    levels: Tensor
    per_gap: Tensor


_BITS = {torch.float32: (torch.int32, 16, 127), torch.float64: (torch.int64, 45, 1023)}
"""The dtype as whole numbers, how many bits are cut, the exponent of 1."""
_OCTAVES = 27  # below 1, of which the last is below the first level


@cache
def _tables(signed: bool, dtype: torch.dtype, device: torch.device) -> _Code:
    whole, cut, one = _BITS[dtype]
    with compat.disable_modes(), compat.no_function_modes():
        levels = torch.tensor(_shares(signed), dtype=torch.float64).to(dtype)
        bits = torch.arange((one - _OCTAVES) << 7, (one << 7) + 1, dtype=whole)
        first = (bits << cut).view(dtype)
        first[0] = 0.0
        code = torch.bucketize(first, levels, right=True) - 1
        above = torch.cat((levels[1:], levels.new_full((1,), float("inf"))))
        shares = torch.cat((-levels[1:].flip(0), levels)) if signed else levels
        every = (shares, code.to(dtype), above[code], levels, 1 / (above - levels))
        return _Code(*(table.to(device) for table in every))


def widen(codes: Tensor, scale: Tensor, signed: bool, dtype: torch.dtype) -> Tensor:
    """Codes (blocks, size) with scales (blocks,) -> numbers in `dtype`."""
    at = codes.to(torch.int32).view(-1)
    if signed:
        at += 2**SIGNED_DECADES - 1
    shares = _tables(signed, dtype, codes.device).shares.index_select(0, at).view(codes.shape)
    return shares * scale.to(dtype).unsqueeze(1)


def pack_blocks(
    numbers: Tensor, signed: bool, dtype: torch.dtype, upward: float | Tensor = 0.5
) -> tuple[Tensor, Tensor]:
    """Numbers (blocks, size) -> codes (blocks, size) and scales (blocks,) in `dtype`.

    upward: which part of the way to the next level a number must be beyond to be rounded up, one or (size,).
    """
    share = numbers.abs()
    scale = share.amax(1).to(dtype)
    unit = scale.to(numbers.dtype).unsqueeze(1)
    # Zeros of a block of zeros are zero whatever they are divided by.
    share /= torch.where(unit == 0, torch.ones_like(unit), unit)
    tables = _tables(signed, numbers.dtype, numbers.device)
    whole, cut, one = _BITS[numbers.dtype]
    at = ((share.view(whole) >> cut) - ((one - _OCTAVES) << 7)).clamp_(0, _OCTAVES << 7).view(-1)
    codes = tables.code.index_select(0, at).view(share.shape)
    codes += share >= tables.next.index_select(0, at).view(share.shape)
    below = codes.to(torch.int32).view(-1)
    level, per_gap = (table.index_select(0, below).view(share.shape) for table in (tables.levels, tables.per_gap))
    part = (share - level) * per_gap
    codes += part > upward
    if signed:
        codes = codes.copysign(numbers)
    else:
        codes = torch.maximum(codes, (numbers > 0).to(codes.dtype))
    return codes.to(code_dtype(signed)), scale


def dither(step: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Where numbers of a block are rounded up at a step, (size,).

    Over steps it is each part of a way between levels as often as any other.

    Note [Dither]: the square's moment moves by a thousandth of itself at a step, and levels lie further apart than
    that: rounded to the nearest one it would never move. Here a number is rounded up as often as it is near to the
    level above. The sequence is that of Weyl, multiples of an irrational number without their whole part; it depends on
    the step and on the place in the block only, both of which are the same on every mesh.
    """
    place = torch.arange(1, size + 1, dtype=torch.float64, device=step.device)
    return ((step.to(torch.float64) * GOLDEN + place * ROOT) % 1.0).to(dtype)


def widened_moment(codes: Tensor, scale: Tensor, signed: bool) -> Tensor:
    """A moment of the shape of its codes, in the dtype of its scales."""
    with compat.no_function_modes():
        rows = codes.reshape(max(1, scale.numel()), -1)
        return widen(rows, scale.reshape(-1), signed, scale.dtype).view(codes.shape)


def packed_moment(moment: Tensor, blocks: Blocks, signed: bool) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales of a wide moment."""
    with compat.no_function_modes():
        wide = moment.to(torch.promote_types(moment.dtype, torch.float32))
        codes, scale = pack_blocks(wide.reshape(-1, blocks.size), signed, torch.float32)
        return codes.view(moment.shape), scale.view(blocks.scales(tuple(moment.shape)))


# ---- the update ----


def _adamw8_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor, step: Tensor,
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, maximize: bool = False,
    finite: Tensor | None = None, site: int | None = None, sizes: Sequence[int] = (), strides: Sequence[int] = (),
    offset: Tensor | None = None,
) -> None:  # fmt: skip
    count = exp_avg_scale.numel()
    if not count or is_skipped(finite, param):
        return
    with compat.no_function_modes():
        wide = torch.promote_types(param.dtype, torch.float32)
        finite = on_device(finite, param)
        times, first, root, keep = corrections(step, lr, param, beta1, beta2, weight_decay, wide)
        options = beta1, beta2, eps, weight_decay, decoupled, maximize
        written = [param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale]
        # A shard may lie in another order than its elements are counted in.
        rows = [x.contiguous().view(count, -1) for x in written]
        grads = grad.contiguous().view(count, -1)
        upward = dither(times, param.numel() // count, wide)  # Note [Dither]
        index = index_of(param.shape, sizes, strides, offset, param.device)
        key = None if site is None else key_of(times.to(torch.int64), site)
        if _is_for_host(rows, grads, key) and isinstance(index.columns, tuple):
            tables = host_tables(True), host_tables(False)
            numbers = float(first), float(root), float(keep), *options
            host_form(adamw8_host_)(
                rows[0], grads, *rows[1:], upward, *tables, *numbers, key, index.rows, *index.columns
            )
        else:
            _in_rows(rows, grads, upward, first, root, keep, *options, key, index, finite)
        for x, flat in zip(written, rows, strict=True):
            if not x.is_contiguous():
                x.copy_(flat.view(x.shape))


def _is_for_host(rows: Sequence[Tensor], grads: Tensor, key: int | Tensor | None) -> bool:
    """Whether `adamw8_host_` takes these operands, which are contiguous. key: of draws, which are for bfloat16."""
    param, scales = rows[0], (rows[2], rows[4])
    is_known = param.dtype is torch.bfloat16 or (param.dtype is torch.float32 and key is None)
    is_narrow = grads.dtype in HOST_GRADS and all(scale.dtype is torch.float32 for scale in scales)
    return param.is_cpu and is_known and is_narrow and not isinstance(key, Tensor)


@cache
def host_tables(signed: bool) -> Tensor:
    """The tables of a code in float32 on the host, one behind the other."""
    tables = _tables(signed, torch.float32, torch.device("cpu"))
    with compat.disable_modes(), compat.no_function_modes():
        return torch.cat((tables.shares, tables.code, tables.next, tables.levels, tables.per_gap))


def _in_rows(
    rows: Sequence[Tensor], grads: Tensor, upward: Tensor, first: Tensor | float, root: Tensor | float, keep: Tensor | float,
    beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, maximize: bool, key: int | Tensor | None, index: Index,
    finite: Tensor | None,
) -> None:  # fmt: skip
    """The update, so many blocks at a time. rows: parameter, moments and scales, a block in each row."""
    param, wide, size = rows[0], upward.dtype, upward.numel()
    count = param.shape[0]
    at_once = max(1, WIDENED_ELEMENTS // size) if param.device.type == "cpu" else count
    for begin in range(0, count, at_once):
        p, m, m_scale, v, v_scale = (x[begin : begin + at_once] for x in rows)
        g = grads[begin : begin + at_once].to(wide)
        g = -g if maximize else g
        new = p.to(wide)
        if weight_decay != 0.0 and decoupled:
            new = new * keep
        elif weight_decay != 0.0:
            g = g + new * weight_decay
        mean = widen(m, m_scale.view(-1), True, wide) * beta1 + g * (1 - beta1)
        square = widen(v, v_scale.view(-1), False, wide) * beta2 + g * g * (1 - beta2)
        new = new - mean * first / (root_of(square) / root + eps)
        codes = (*pack_blocks(mean, True, m_scale.dtype), *pack_blocks(square, False, v_scale.dtype, upward))
        if key is not None:
            words = words_by(index, begin * size, min(count, begin + at_once) * size, key, param.device)
            new = rounded(new, words.view(new.shape), PARAM_DRAW)
        for old, x in zip((p, m, m_scale, v, v_scale), (new, *codes), strict=True):
            x = x.view(old.shape).to(old.dtype)
            old.copy_(x if finite is None else torch.where(finite, x, old))


def _adamw8_host_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_scale: Tensor, exp_avg_sq: Tensor, exp_avg_sq_scale: Tensor, upward: Tensor,
    signed_tables: Tensor, tables: Tensor, rate: float, root: float, keep: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, maximize: bool, key: int | None, places: Tensor, count: int, stride: int,
) -> None:  # fmt: skip
    rows, options = (param, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale), (beta1, beta2, eps, weight_decay)
    index = Index(places, (count, stride))
    _in_rows(rows, grad, upward, rate, root, keep, *options, decoupled, maximize, key, index, None)


adamw8, adamw8_ = define_update(
    "adamw8_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_scale, Tensor(d!) exp_avg_sq, "
    "Tensor(e!) exp_avg_sq_scale, Tensor step, Tensor lr, float beta1, float beta2, float eps, float weight_decay, "
    "bool decoupled, bool maximize=False, Tensor? finite=None, int? site=None, int[] sizes=[], int[] strides=[], "
    "Tensor? offset=None) -> ()",
    _adamw8_,
)  # fmt: skip
adamw8_host_ = define(
    "adamw8_host_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_scale, Tensor(d!) exp_avg_sq, "
    "Tensor(e!) exp_avg_sq_scale, Tensor upward, Tensor signed_tables, Tensor tables, float rate, float root, float "
    "keep, float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, int? key, Tensor "
    "places, int count, int stride) -> ()",
    _adamw8_host_, nothing,
)  # fmt: skip
"""On contiguous tensors on the host, a block in each row; rate, root and keep are numbers of float32, the tables those
of `host_tables`."""
