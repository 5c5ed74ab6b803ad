"""Random numbers as plain expressions of the index: what a compiler sees, and what devices without a kernel of ours
run.

Problem: a compiler cannot look into an operator, so a random mask would be made by one kernel and read by the next.
Idea: the number of an element is a few integer operations on its index; written with torch's own operators they fuse
with whatever stands before and behind.

    index = torch.arange(6).view(2, 3)
    x * keep(0.9, index, key_of(seed, site=3)).to(x.dtype)        # one loop when compiled, no mask in memory

The numbers are those of `colofunc.ops.random` (bits, uniform, Bernoulli) and `colofunc.ops.masks` (bytes of words), bit
for bit; normal ones agree as far as `erfinv` of two devices does.
"""

from __future__ import annotations

from math import floor, sqrt

import attrs
import torch
from torch import Tensor

from colofunc.ops.seeds import GAMMA, ROUNDS, signed

# Sets the stream of the further bits of a Bernoulli draw apart from that of the words.
SECOND = signed(0xD1B54A32D192ED03)
# As many top bits of a word are right without the last round of its mix.
TOP_BITS = 31
# Bits that a uniform number of a dtype can hold exactly in [0, 1).
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# A normal number is the inverse distribution function of (52 bits and a half) / 2^52, never 0 or 1: first scaled to
# (-1, 1), without rounding, since the result has 53 bits.
NORMAL_BITS = 52
NORMAL_SCALE, NORMAL_SHIFT = 2.0**-51, 2.0**-52 - 1.0
SQRT2 = sqrt(2.0)


@attrs.frozen
class Threshold:
    """Probability q as a first byte and 31 bits below it."""

    byte: int
    rest: int

    @staticmethod
    def of(q: float) -> Threshold:
        q = min(max(q, 0.0), 1.0)
        byte = floor(q * 256.0)
        return Threshold(byte, round((q * 256.0 - byte) * 2.0**31))

    @property
    def bound(self) -> int | None:
        """What the further bits, read as int64, must be below; None where all are."""
        return (self.rest << 33) - (1 << 63) if self.rest < 1 << 31 else None


def mixed(z: Tensor, top_only: bool = False) -> Tensor:
    """SplitMix64's mix. `top_only`: only the top `TOP_BITS` are right."""
    for shift, factor in ROUNDS[:-1] if top_only else ROUNDS:
        # Shifts of int64 are arithmetic, so the sign is masked off.
        z = z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))
        if factor is not None:
            z = z * signed(factor)
    return z


def key_of(seed: Tensor, site: int | Tensor) -> Tensor:
    """The stream of a call site: mixed twice, so that neighbouring seeds and sites share nothing."""
    add = (site + 1) * signed(GAMMA) if isinstance(site, Tensor) else signed((site + 1) * GAMMA)
    return mixed(mixed(seed) + add)


def bits(index: Tensor, key: Tensor | int, top_only: bool = False) -> Tensor:
    return mixed(index * signed(GAMMA) + key, top_only)


def _top(words: Tensor, count: int) -> Tensor:
    return (words >> (64 - count)) & ((1 << count) - 1)


def uniform(index: Tensor, key: Tensor | int, dtype: torch.dtype) -> Tensor:
    count = UNIFORM_BITS[dtype]
    return _top(bits(index, key, count <= TOP_BITS), count).to(dtype) * 2.0**-count


def normal(index: Tensor, key: Tensor | int, dtype: torch.dtype) -> Tensor:
    u = _top(bits(index, key), NORMAL_BITS).to(torch.float64) * NORMAL_SCALE + NORMAL_SHIFT
    return (u.erfinv() * SQRT2).to(dtype)


def keep(q: float, index: Tensor, key: Tensor | int) -> Tensor:
    """Whether draws of probability q say yes; one word for each element."""
    threshold = Threshold.of(q)
    if threshold.byte > 255:
        return torch.ones_like(index, dtype=torch.bool)
    byte = (bits(index >> 3, key) >> ((index & 7) << 3)) & 255
    less = byte < threshold.byte
    if threshold.rest == 0:
        return less
    return less | ((byte == threshold.byte) & further(index, threshold, key))


def further(index: Tensor, threshold: Threshold, key: Tensor | int) -> Tensor:
    """Whether the further bits of the elements are below the threshold's."""
    if threshold.bound is None:
        return torch.ones_like(index, dtype=torch.bool)
    return bits(index, key ^ SECOND, top_only=True) < threshold.bound
