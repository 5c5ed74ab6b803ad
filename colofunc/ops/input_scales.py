"""awq and smoothquant: a scale multiplies columns of a weight before they are rounded, and divides its inputs.

    y = x W^T = (x / s) (W s)^T          s: (i,), one number for each input channel

Problem: a few input channels are many times as large as the others. Where weights are rounded, errors in their columns
count for more than all others; where inputs are rounded too, they take the digits of the rest of a row. Idea: the
product is the same for any s > 0, and s decides what is rounded finely.

    awq          int4 weights: s = (size of the channel)^alpha. Columns that count are larger than the rest of their
                 group, and rounded more finely. Each weight has the alpha of `ALPHAS` with the least error of its
                 product on the calibration data.
    smoothquant  int8 weights and inputs: s = max|x|^alpha / max|w|^(1 - alpha) of the channel. With alpha 0.5, x / s
                 and w s are equally large in each channel.

Both ask about all rows of a weight (the error of a product, the largest of a column), so s is found before the first
row is packed; then rows do not ask about one another. s is kept beside the weight, and not folded into a norm in front
of it, as the sources do: so any linear layer can have it, for one division of its inputs.

Sources: Lin et al. 2023, "AWQ" (2306.00978), section 3.2; Xiao et al. 2022, "SmoothQuant" (2211.10438), equation 4. Two
things differ from AWQ: the size of a channel is the root of the mean of x^2, not the mean of |x|, because the error of
a product is made of x^2, and gptq needs the same moments; and weights are not clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.ops.measured import WeightMeasures
from colofunc.ops.quantized import FORMATS
from colofunc.ops.quantizers import Quantizer, int4, int8

ALPHAS = tuple(k / 20 for k in range(20))
"""Exponents that awq tries. The first scales nothing: on the calibration data awq is never worse than int4-g128."""
LEAST = 1e-4
"""Channels below this part of the mean size count as of the mean size: those without inputs are rounded like others."""

FindScales = Callable[
    [Iterable[Tensor], Tensor], Tensor
]  # blocks of a weight's rows, what was measured of its inputs -> s


def awq(moments: WeightMeasures) -> Quantizer:
    """The scheme "awq" in the format int4. moments: of each weight the sum of x x^T, (i, i) float64."""
    plain = Quantizer("awq", form="int4", quantize=int4)
    return attrs.evolve(plain, by_name=_Scaled(plain, moments, awq_scale).named)


def smoothquant(maxima: WeightMeasures, alpha: float) -> Quantizer:
    """The scheme "smoothquant" in the format int8. maxima: of each weight max |x|, (i,) float64."""
    # No input is kept as it is: what would be an outlier is in the weights.
    plain = Quantizer("smoothquant", form="int8", quantize=int8, outliers=float("inf"))
    return attrs.evolve(plain, by_name=_Scaled(plain, maxima, partial(smoothquant_scale, alpha=alpha)).named)


@attrs.frozen(eq=False)
class _Scaled:
    """A scheme whose input scales are found from what was measured."""

    plain: Quantizer
    measured: WeightMeasures
    find: FindScales

    def named(self, name: str) -> Quantizer:
        """The scheme for the weight of this name."""
        self.measured.known(name)  # raises now, not when rows are read
        return attrs.evolve(self.plain, input_scale=partial(_input_scale, self, name))


def _input_scale(scheme: _Scaled, name: str, blocks: Iterable[Tensor]) -> Tensor:
    """s of the weight of this name, (i,) float32."""
    blocks = iter(blocks)
    first = next(blocks)  # has all columns of the weight, and lies where it lies
    measured = scheme.measured.of(name, columns=first.shape[1]).to(first.device)
    with compat.no_function_modes():
        return scheme.find(chain([first], blocks), measured)


def awq_scale(blocks: Iterable[Tensor], moments: Tensor) -> Tensor:
    """s of awq, (i,) float32. blocks: rows of the weight, (some, i) each; moments: (i, i) float64."""
    size = _sizes(moments.diagonal().clamp(min=0).sqrt())
    candidates = [_centred(size**alpha) for alpha in ALPHAS]
    errors = [moments.new_zeros(()) for _ in candidates]
    for rows in blocks:
        for number, scale in enumerate(candidates):
            errors[number] += squared_error(rows, scale, moments)
    return candidates[int(torch.stack(errors).argmin())]


def squared_error(rows: Tensor, scale: Tensor, moments: Tensor) -> Tensor:
    """Sum over calibration inputs x of the square of (rows' - rows) x, () float64. rows': in int4, with this scale."""
    scaled = rows * scale
    parts = int4(scaled)
    numbers = FORMATS["int4"].widen([parts[name] for name in FORMATS["int4"].parts], torch.float64)
    off = numbers / scale - rows
    return ((off @ moments) * off).sum()


def smoothquant_scale(blocks: Iterable[Tensor], maxima: Tensor, alpha: float) -> Tensor:
    """s of smoothquant, (i,) float32. blocks: rows of the weight, (some, i) each; maxima: max |x|, (i,) float64."""
    largest = torch.zeros_like(maxima)
    for rows in blocks:
        largest = torch.maximum(largest, rows.abs().amax(0).to(torch.float64))
    return _centred(_sizes(maxima) ** alpha / _sizes(largest) ** (1 - alpha))


def _sizes(sizes: Tensor) -> Tensor:
    """Sizes of channels, the mean where one is next to nothing; ones where all are zero."""
    mean = sizes.mean()
    if mean == 0:
        return torch.ones_like(sizes)
    return torch.where(sizes < LEAST * mean, mean, sizes)


def _centred(scale: Tensor) -> Tensor:
    """A scale times a constant, so that its least is 1 / c and its largest c, in float32.

    What is rounded does not depend on the constant, and inputs keep about the size that they had.
    """
    return (scale / (scale.amin() * scale.amax()).sqrt()).to(torch.float32)
