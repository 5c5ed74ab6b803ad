"""Stochastic rounding: a float32 number becomes one of its two neighbours in bfloat16, the nearer one more often.

    words = words_by(index_of(x.shape, *place, x.device), 0, x.numel(), key_of(seed, site), x.device)
    y = rounded(x.flatten(), words, which=0)                 # the mean over seeds is x

Problem: an update of a parameter in bfloat16 is less than half the way to the next number, so that to the nearest
nothing ever moves. Idea: a number that is a quarter of the way to its upper neighbour goes there every fourth time.
Which times is a draw by (seed, site, index of the element in the *global* tensor), as in `ops.random`: the same on
every mesh. One word of 64 bits has the draws of four tensors.

    bits of x as a whole number, plus 0 to 2^16 - 1, without the low 16 bits

What bfloat16 has exactly stays, NaN and infinity too. A number beyond bfloat16's largest becomes it or infinity.
Sources: Gupta et al. 2015, "Deep learning with limited numerical precision" (1502.02551), section 3, with the unbiased
rounding; Zamirai et al. 2020, "Revisiting BFloat16 training" (2010.06192), section 4, for updates of parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.ops import draws
from colofunc.ops.indices import Index
from colofunc.ops.masks import mix_
from colofunc.ops.seeds import GAMMA, key_int, signed

DROPPED_BITS = 16
"""Low bits of float32's mantissa that bfloat16 does not have."""
PARAM_DRAW = 0
"""Which draw of a word rounds a parameter."""
HOST_TILE, DEVICE_TILE = 1 << 15, 1 << 24
"""Elements that are rounded at a time. On the host words stay in the second-level cache, elsewhere this bounds the
memory."""


def key_of(seed: Tensor, site: int) -> int | Tensor:
    """The stream of a site, beside the 0-dim seed: on the host a number."""
    return key_int(int(seed), site) if seed.device.type == "cpu" else draws.key_of(seed, site)


def words_by(index: Index, first: int, end: int, key: int | Tensor, device: torch.device) -> Tensor:
    """What is drawn from a stream for the elements first to end of a local tensor in row-major order:
    (end - first,) int64 on `device`.
    """
    at = torch.arange(first, end, device=device)
    if index.rows.numel() == 1:
        columns = at
        numbers = index.rows.to(device)
    else:
        columns = at % index.count
        numbers = index.rows.to(device)[at // index.count]
    if isinstance(index.columns, tuple):
        numbers = numbers + columns * index.columns[1]
    else:
        numbers = numbers + index.columns.to(device)[columns]
    words = (numbers * signed(GAMMA)).add_(key)
    return mix_(words, torch.empty_like(words))


def rounded(x: Tensor, words: Tensor, which: int) -> Tensor:
    """x in float32 rounded to bfloat16 by draw number `which` (0 to 3) of each element's word."""
    draw = ((words >> (DROPPED_BITS * which)) & ((1 << DROPPED_BITS) - 1)).to(torch.int32)
    bits = (x.contiguous().view(torch.int32) + draw) & -(1 << DROPPED_BITS)
    # A carry would make infinity of the bits of a NaN, and a NaN of those of infinity.
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)


def root_of(x: Tensor) -> Tensor:
    """The square root, rounded once. x: of floating numbers, not below zero.

    On the host torch's root of float32 numbers may be one of a library of vector functions, whose last place is now and
    then another one. The root in float64 is far enough from where float32 rounds the other way: a square of 25 bits
    that is no float32 number differs from one by 2^-49 of it at least, and float64 has 53 bits.
    """
    if x.device.type == "cpu" and x.dtype is torch.float32:
        return x.to(torch.float64).sqrt_().to(torch.float32)
    return x.sqrt()
