"""Floating-point numbers of 4 and 8 bits, and blocks of them with a scale each: the numbers of mxfp8 and nvfp4.

    e2m1   0 0.5 1 1.5 2 3 4 6 and their negatives, no NaN           e4m3   to 448, the least 2^-9, one NaN: torch.float8_e4m3fn
    e8m0   2^-127 to 2^127, one NaN, no sign and no zero             all of them: nearest, halfway to the even one, too large to the largest

    mxfp8  blocks of 32 columns: e4m3 times a power of two, 2^(floor(log2 max|w|) - 8). 8 is the exponent of 448, so a block's largest
           number is 256 to 511 scales, of which what is above 448 becomes 448. A block of zeros has the least scale.
    nvfp4  blocks of 16 columns: e2m1 times a scale of the block, e4m3(max|w| of the block / (6 outer)), times a float32 scale of the
           tensor, outer = max|w| / (6 * 448), with which the largest block's scale is 448.

Problem: hardware that has these formats is rare, and what is packed elsewhere is to be the same. Idea: everything but
one quotient is exact (a power of two divides, scales multiply in float64), and numbers are compared with halves between
neighbours: so data and scales are the same on every device. For weights in float32 and narrower they are those of exact
arithmetic; for float64 those of the quotient in it.

Sources: OCP Microscaling Formats (MX) Specification 1.0, sections 5 (formats) and 6.3 (conversion: the scale, and that
numbers above the largest are clamped). NVIDIA 2025, "Pretraining Large Language Models with NVFP4" (2509.25149), the
appendix on quantization: two levels of scales. Halves go to the even neighbour as in IEEE 754; the MX specification
leaves that open. NVIDIA's kernels multiply by reciprocals in float32, which may round a number near a half the other
way; here each number is the nearest one under the scales that are kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colofunc.ops.define import define

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
E4M3_LARGEST, E4M3_EXPONENT, E4M3_NAN = 448.0, 8, 0x7F
E5M2_INFINITY = 0x7C
E2M1_LARGEST = 6.0
LARGEST = {E4M3: E4M3_LARGEST, E5M2: 57344.0}
"""The largest number of each format of 8 bits."""
E8M0_BIAS, E8M0_NAN = 127, 0xFF
MX_BLOCK, NV_BLOCK = 32, 16


def _positive(exponent_bits: int, mantissa_bits: int, count: int) -> tuple[float, ...]:
    """The numbers with codes 0, 1, ... of a format with this many bits."""
    found = []
    bias = 2 ** (exponent_bits - 1) - 1
    for code in range(count):
        exponent, fraction = code >> mantissa_bits, (code & (2**mantissa_bits - 1)) / 2**mantissa_bits
        found.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return tuple(found)


E4M3_LEVELS = _positive(4, 3, E4M3_NAN)
E2M1_LEVELS = _positive(2, 1, 8)
FLOAT8_LEVELS = {E4M3: E4M3_LEVELS, E5M2: _positive(5, 2, E5M2_INFINITY)}
FLOAT8_NAN = 0x7F  # in either format


def nearest_codes(size: Tensor, levels: Sequence[float]) -> Tensor:
    """Which of ascending levels is the nearest to numbers of 0 and more, of two the one with an even code; int64."""
    grid = torch.tensor(levels, dtype=size.dtype, device=size.device)
    halves = (grid[1:] + grid[:-1]) / 2
    # What is at a half goes down; between an odd code and the next one it is to go up, so that half is the number right
    # below it.
    is_odd = torch.arange(len(halves), device=size.device) % 2 == 1
    halves = torch.where(is_odd, torch.nextafter(halves, torch.zeros_like(halves)), halves)
    return torch.bucketize(size.contiguous(), halves)


def float8_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The bits of the nearest numbers in e4m3 or e5m2, uint8, of numbers up to the format's largest; NaN stays NaN."""
    if x.dtype is not torch.float64:
        return x.to(dtype).view(torch.uint8)
    # Torch's cast goes through float32, and rounds twice.
    codes = torch.where(x.isnan(), FLOAT8_NAN, nearest_codes(x.abs(), FLOAT8_LEVELS[dtype]))
    return (codes | (x.signbit().to(torch.int64) << 7)).to(torch.uint8)


def e4m3_bits(x: Tensor) -> Tensor:
    """The bits of the nearest numbers in e4m3, uint8, too large to the largest; NaN stays NaN."""
    return float8_bits(x.clamp(-E4M3_LARGEST, E4M3_LARGEST), E4M3)


def e5m2_bits(x: Tensor) -> Tensor:
    """The same in e5m2."""
    return float8_bits(x.clamp(-LARGEST[E5M2], LARGEST[E5M2]), E5M2)


def e5m2_values(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of their bits."""
    return bits.view(E5M2).to(dtype)


def e4m3_values(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of their bits."""
    return bits.view(E4M3).to(dtype)


def e2m1_codes(x: Tensor) -> Tensor:
    """The codes of the nearest numbers in e2m1, 0 to 15: the sign is 8."""
    return nearest_codes(x.abs(), E2M1_LEVELS) | (x.signbit().to(torch.int64) << 3)


def e2m1_values(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers of their codes."""
    both = (*E2M1_LEVELS, *(-level for level in E2M1_LEVELS))
    return torch.tensor(both, dtype=dtype, device=codes.device)[codes.to(torch.int64)]


def e8m0_values(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The powers of two of their bits."""
    return bits.view(E8M0).to(dtype)


def _mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    blocks = weight.unflatten(1, (-1, MX_BLOCK))
    largest = blocks.abs().amax(2)
    exponent = torch.frexp(largest).exponent - 1 - E4M3_EXPONENT  # frexp's mantissa is from 0.5 to 1
    exponent = torch.where(largest == 0, -E8M0_BIAS, exponent).clamp(-E8M0_BIAS, E8M0_BIAS)
    scale = torch.where(largest.isfinite(), exponent + E8M0_BIAS, E8M0_NAN).to(torch.uint8)
    return e4m3_bits(blocks / e8m0_values(scale, weight.dtype).unsqueeze(2)).flatten(1), scale


def _mxfp8_fake(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    bits = weight.new_empty((rows, columns), dtype=torch.uint8)
    return bits, weight.new_empty((rows, columns // MX_BLOCK), dtype=torch.uint8)


def _over(x: Tensor, scale: Tensor) -> Tensor:
    """x in units of scales; where one is 0, what is a number becomes 0."""
    return x / torch.where(scale == 0, torch.inf, scale)


def _nvfp4(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64
    # By a tensor: divided by a number, a card multiplies by its rounded inverse.
    outer = (largest.to(wide) / torch.full_like(largest, E2M1_LARGEST * E4M3_LARGEST, dtype=wide)).to(torch.float32)
    blocks = weight.to(wide).unflatten(1, (-1, NV_BLOCK))
    scale = e4m3_bits(_over(blocks.abs().amax(2), E2M1_LARGEST * outer.to(wide)))
    codes = e2m1_codes(_over(blocks, (e4m3_values(scale, wide) * outer.to(wide)).unsqueeze(2)))
    pairs = codes.flatten(1).to(torch.uint8).unflatten(1, (-1, 2))
    return pairs[..., 0] | (pairs[..., 1] << 4), scale, outer.repeat(weight.shape[0])


def _nvfp4_fake(weight: Tensor, largest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = weight.shape
    data = weight.new_empty((rows, columns // 2), dtype=torch.uint8)
    return (
        data,
        weight.new_empty((rows, columns // NV_BLOCK), dtype=torch.uint8),
        weight.new_empty(rows, dtype=torch.float32),
    )


# Operators, because a tensor on several ranks has no view in another dtype. (o, i) -> data, scales of blocks, and of
# nvfp4 the tensor's scale for each row; largest: () max |w| of the whole tensor.
mxfp8_numbers = define("mxfp8_numbers(Tensor weight) -> (Tensor, Tensor)", _mxfp8, _mxfp8_fake)
nvfp4_numbers = define("nvfp4_numbers(Tensor weight, Tensor largest) -> (Tensor, Tensor, Tensor)", _nvfp4, _nvfp4_fake)
