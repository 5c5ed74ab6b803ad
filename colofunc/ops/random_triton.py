"""Random numbers and dropout on a GPU: one launch, equal bits.

Problem: written with torch's operators a random mask is dozens of launches, each of which reads and writes words of 64
bits. Idea: one Triton kernel in which every element computes its own number in registers and stores the result alone;
dropout reads x, decides and writes, and its backward is the same kernel on the gradient.

    fill(out, x, seed, offset, draw)       # launches once; reads no value on the host

`colofunc.ops.draws` and `colofunc.ops.masks` define the numbers. As in `masks`, eight Bernoulli draws share a word
where columns are a run: a group of eight mixes one word (two where runs begin within one), and further bits only for
those of its elements that tie with the threshold's first byte: one mix for the first of a group, and further rounds of
a loop, which one block in twenty takes, for the rest.

Normal numbers use Wichura's algorithm in float64 instead of `erfinv`: it needs a logarithm and a root alone, and its
relative error of 1e-16 vanishes in float32. Source: Wichura, Algorithm AS 241 (1988), PPND16.

This module is imported where a kernel is launched: Triton is there with torch for CUDA, and not elsewhere.
"""

# Arguments of Triton's functions have types of its own, which annotations do not say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from colofunc.ops.draws import UNIFORM_BITS
from colofunc.ops.kernels import on_card_of

if TYPE_CHECKING:
    from colofunc.ops.random_kernels import Draw

# Elements of a program: eight for each of the threads of four warps.
BLOCK = 1024
# Arguments of which no value is compiled in.
UNKNOWN = ["seed", "offset", "site", "byte", "bound", "scale"]


@triton.jit
def _mixed(z, TOP_ONLY: tl.constexpr):
    """SplitMix64's mix of unsigned words; `TOP_ONLY`: the top 31 bits alone are right."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    if not TOP_ONLY:
        z = z ^ (z >> 31)
    return z


@triton.jit
def _word(index, key, TOP_ONLY: tl.constexpr):
    return _mixed(index.to(tl.uint64) * 0x9E3779B97F4A7C15 + key, TOP_ONLY)


@triton.jit
def _key(seed, site):
    """The stream of a call site; `site` is its number plus one."""
    return _mixed(_mixed(seed.to(tl.uint64), False) + site.to(tl.uint64) * 0x9E3779B97F4A7C15, False)


@triton.jit
def _scalar(value, ON_CARD: tl.constexpr):
    """A number that lies on the card, or that the host knows."""
    if ON_CARD:
        number = tl.load(value)
    else:
        number = value.to(tl.int64)
    return number


@triton.jit
def _store(out, place, number, mask):
    """Half precision is rounded from float32, as torch does."""
    if out.dtype.element_ty == tl.float16 or out.dtype.element_ty == tl.bfloat16:
        number = number.to(tl.float32)
    tl.store(out + place, number.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _places(position, sizes, strides, x_strides, ATOMS: tl.constexpr):
    """(global index without offset, place in x) of positions in the memory of the result."""
    index = tl.zeros_like(position).to(tl.int64)
    at = tl.zeros_like(position).to(tl.int64)
    rest = position
    for back in tl.static_range(ATOMS - 1):
        # Written out: Triton takes a second value for a `tl.constexpr` name as an error.
        c = (rest % sizes[ATOMS - 1 - back]).to(tl.int64)
        rest = rest // sizes[ATOMS - 1 - back]
        index += c * strides[ATOMS - 1 - back]
        at += c * x_strides[ATOMS - 1 - back]
    rest = rest.to(tl.int64)
    return index + rest * strides[0], at + rest * x_strides[0]


# Coefficients of the three quotients of polynomials, highest power first: (numerator, denominator) for the centre, for
# the tails, and for the far tails.
QUOTIENTS = tl.constexpr((
    (2509.0809287301227, 5226.495278852854, 0.0007745450142783414, 1.0507500716444169e-09, 2.0103343992922881e-07, 2.0442631033899397e-15),
    (33430.57558358813, 28729.085735721943, 0.022723844989269184, 0.0005475938084995345, 2.7115555687434876e-05, 1.421511758316446e-07),
    (67265.7709270087, 39307.89580009271, 0.2417807251774506, 0.015198666563616457, 0.0012426609473880784, 1.8463183175100548e-05),
    (45921.95393154987, 21213.794301586597, 1.2704582524523684, 0.14810397642748008, 0.026532189526576124, 0.0007868691311456133),
    (13731.69376550946, 5394.196021424751, 3.6478483247632045, 0.6897673349851, 0.29656057182850487, 0.014875361290850615),
    (1971.5909503065513, 687.1870074920579, 5.769497221460691, 1.6763848301838038, 1.7848265399172913, 0.1369298809227358),
    (133.14166789178438, 42.31333070160091, 4.630337846156546, 2.053191626637759, 5.463784911164114, 0.599832206555888),
    (3.3871328727963665, 1.0, 1.4234371107496835, 1.0, 6.657904643501103, 1.0),
))  # fmt: skip


@triton.jit
def _step(total, r, centre, near, a: tl.constexpr, b: tl.constexpr, c: tl.constexpr):
    """One step of Horner's rule. A bare constant would have 32 bits."""
    tails = tl.where(near, tl.full((), b, tl.float64), tl.full((), c, tl.float64))
    return total * r + tl.where(centre, tl.full((), a, tl.float64), tails)


@triton.jit
def _quantile(s):
    """The normal number of the odd integer s: the inverse distribution function at 1/2 + s / 2^53."""
    q = s.to(tl.float64) * tl.full((), 2.0**-53, tl.float64)
    tail = ((1 << 52) - tl.abs(s)).to(tl.float64) * tl.full((), 2.0**-53, tl.float64)
    far = tl.sqrt(-tl.log(tail))
    centre = tl.abs(q) <= 0.425
    near = far <= 5.0
    start = tl.where(near, tl.full((), 1.6, tl.float64), tl.full((), 5.0, tl.float64))
    r = tl.where(centre, tl.full((), 0.180625, tl.float64) - q * q, far - start)
    above = tl.zeros_like(q)
    below = tl.zeros_like(q)
    for k in tl.static_range(8):
        above = _step(above, r, centre, near, QUOTIENTS[k][0], QUOTIENTS[k][2], QUOTIENTS[k][4])
        below = _step(below, r, centre, near, QUOTIENTS[k][1], QUOTIENTS[k][3], QUOTIENTS[k][5])
    sign = tl.where(s < 0, tl.full((), -1.0, tl.float64), tl.full((), 1.0, tl.float64))
    return tl.where(centre, q, sign) * above / below


@triton.jit(do_not_specialize=UNKNOWN)
def numbers_kernel(
    out, seed, offset, n, site, sizes, strides, x_strides,
    KIND: tl.constexpr, BITS: tl.constexpr, SEED_ON_CARD: tl.constexpr, OFFSET_ON_CARD: tl.constexpr, ATOMS: tl.constexpr,
    WIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out (n,): bits, uniform numbers of `BITS` bits, or normal ones."""
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    position = pid * SIZE + tl.arange(0, SIZE)
    index, _ = _places(position, sizes, strides, x_strides, ATOMS)
    word = _word(
        index + _scalar(offset, OFFSET_ON_CARD),
        _key(_scalar(seed, SEED_ON_CARD), site),
        KIND == "uniform" and BITS <= 31,
    )
    if KIND == "bits":
        number = word.to(tl.int64)
    elif KIND == "normal":
        number = _quantile((word >> 12).to(tl.int64) * 2 + 1 - (1 << 52))
    elif BITS > 24:
        number = (word >> (64 - BITS)).to(tl.int64).to(tl.float64) * tl.full((), 1.0 / (1 << BITS), tl.float64)
    else:
        number = (word >> (64 - BITS)).to(tl.int32).to(tl.float32) * (1.0 / (1 << BITS))
    _store(out, position, number, position < n)


@triton.jit
def _first_of(ties):
    """Which of eight bytes holds the lowest bit of a word with bits 7, 15, ..., 63, and that bit.

    The byte is 0 where the word has none.
    """
    bit = ties & ((ties ^ 0xFFFFFFFFFFFFFFFF) + 1)
    byte = (
        ((bit & 0x8080808000000000) != 0).to(tl.int64) * 4
        + ((bit & 0x8080000080800000) != 0).to(tl.int64) * 2
        + ((bit & 0x8000800080008000) != 0).to(tl.int64)
    )
    return byte, bit


@triton.jit
def _eight(index, key, byte, bound, SHIFTED: tl.constexpr, TIES: tl.constexpr):
    """Draws for the indices `index + 0..7`: bytes of decisions, and a word whose bits 7, 15, ..., 63 are the ties that
    won.
    """
    start = (index & 7).to(tl.uint64) * 8
    word = _word(index >> 3, key, False)
    if SHIFTED:
        behind = _word((index >> 3) + 1, key, False)
        # A shift by 64 is not defined.
        word = tl.where(start == 0, word, (word >> start) | (behind << ((64 - start) & 63)))
    won = tl.zeros_like(word)
    if TIES:
        # Bit 7 of each byte that equals the threshold's.
        apart = word ^ (byte.to(tl.uint64) * 0x0101010101010101)
        ties = (((apart & 0x7F7F7F7F7F7F7F7F) + 0x7F7F7F7F7F7F7F7F) | apart | 0x7F7F7F7F7F7F7F7F) ^ 0xFFFFFFFFFFFFFFFF
        some = 1
        while some > 0:
            which, bit = _first_of(ties)
            further = _word(index + which, key ^ 0xD1B54A32D192ED03, True)
            won = tl.where(further.to(tl.int64) < bound, won | bit, won)
            ties = ties ^ bit
            some = tl.max((ties != 0).to(tl.int32), 0)
    return word, won


@triton.jit
def _kept(out, x, place, at, keep, scale, mask, DROPOUT: tl.constexpr):
    """Store ones and zeros, or x where it is kept, times a factor that half precision could not hold."""
    if DROPOUT:
        value = tl.load(x + at, mask=mask, other=0.0)
        if value.dtype == tl.float64:
            value = value * keep.to(tl.float64) * scale.to(tl.float64, bitcast=True)
        else:
            value = value.to(tl.float32) * keep.to(tl.float32) * scale.to(tl.float64, bitcast=True).to(tl.float32)
        _store(out, place, value, mask)
    else:
        _store(out, place, keep, mask)


@triton.jit(do_not_specialize=UNKNOWN)
def keep_kernel(
    out, x, seed, offset, n, site, byte, bound, scale, sizes, strides, x_strides, rows, columns,
    DROPOUT: tl.constexpr, TABLES: tl.constexpr, SHARED: tl.constexpr, SHIFTED: tl.constexpr, TIES: tl.constexpr,
    SEED_ON_CARD: tl.constexpr, OFFSET_ON_CARD: tl.constexpr, ATOMS: tl.constexpr, WIDE: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """out (n,): Bernoulli draws, or x times them and `scale` (the bits of a float64).

    `SHARED`: each eight elements of the result from one multiple of eight on have consecutive indices. `TABLES`: the
    element at (r, c) of (n / sizes[0], sizes[0]) has the index rows[r] + columns[c].
    """
    pid = tl.program_id(0)
    if WIDE:
        pid = pid.to(tl.int64)
    key = _key(_scalar(seed, SEED_ON_CARD), site)
    first = _scalar(offset, OFFSET_ON_CARD)
    byte = byte.to(tl.int64)
    bound = bound.to(tl.int64)
    scale = scale.to(tl.int64)
    if SHARED:
        group = pid * (SIZE // 8) + tl.arange(0, SIZE // 8)
        index, at = _places(group * 8, sizes, strides, x_strides, ATOMS)
        word, won = _eight(index + first, key, byte, bound, SHIFTED, TIES)
        j = tl.arange(0, 8)[None, :]
        place = (group * 8)[:, None] + j
        shift = (j * 8).to(tl.uint64)
        keep = ((word[:, None] >> shift) & 255).to(tl.int64) < byte
        keep = keep | (((won[:, None] >> (shift + 7)) & 1) != 0)
        _kept(out, x, place, at[:, None] + j * x_strides[ATOMS - 1], keep, scale, place < n, DROPOUT)
    else:
        place = pid * SIZE + tl.arange(0, SIZE)
        if TABLES:
            at = place
            index = tl.load(rows + place // sizes[0], mask=place < n, other=0)
            index += tl.load(columns + place % sizes[0], mask=place < n, other=0)
        else:
            index, at = _places(place, sizes, strides, x_strides, ATOMS)
        index += first
        found = ((_word(index >> 3, key, False) >> ((index & 7).to(tl.uint64) * 8)) & 255).to(tl.int64)
        keep = found < byte
        if TIES:
            keep = keep | ((found == byte) & (_word(index, key ^ 0xD1B54A32D192ED03, True).to(tl.int64) < bound))
        _kept(out, x, place, at, keep, scale, place < n, DROPOUT)


def fill(out: Tensor, x: Tensor | None, seed: Tensor | int, offset: Tensor | int, draw: Draw) -> None:
    """Fill `out`, which is dense, by one launch. Seed and offset: where tensors, on the device of `out`."""
    n = out.numel()
    sizes, strides, x_strides = (tuple(some) for some in zip(*draw.atoms, strict=True))
    # The last program reaches beyond n.
    shared = {
        "SEED_ON_CARD": isinstance(seed, Tensor), "OFFSET_ON_CARD": isinstance(offset, Tensor), "ATOMS": len(sizes),
        "WIDE": n > 2**31 - 1 - BLOCK, "SIZE": BLOCK, "enable_fp_fusion": True,
    }  # fmt: skip
    grid = (triton.cdiv(n, BLOCK),)
    with on_card_of(out):
        if draw.kind in ("bits", "uniform", "normal"):
            bits = UNIFORM_BITS[out.dtype] if draw.kind == "uniform" else 64
            numbers_kernel[grid](
                out, seed, offset, n, draw.site + 1, sizes, strides, x_strides, KIND=draw.kind, BITS=bits, **shared
            )
            return
        rows, columns = draw.tables if draw.tables is not None else (None, None)
        keep_kernel[grid](
            out, x, seed, offset, n, draw.site + 1, draw.byte, draw.bound, draw.scale_bits, sizes, strides, x_strides, rows, columns,
            DROPOUT=x is not None, TABLES=rows is not None, SHARED=draw.shared,
            SHIFTED=isinstance(offset, Tensor) or offset % 8 != 0, TIES=draw.ties, **shared,
        )  # fmt: skip
