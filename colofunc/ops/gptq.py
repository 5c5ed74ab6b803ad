"""gptq: int4 weights whose rounding looks at the inputs that they are multiplied with.

    moments = calibration(params, batch)                    # {weight: sum of x x^T over the rows of its inputs, (i, i)}
    step = cf.quantize(step, cf.gptq(moments))

Problem: rounding each number to its nearest level adds up errors that a product with correlated inputs could have
cancelled. Idea: round columns one after the other, and after each change the columns that are still to come so that
outputs of the layer stay as near as they can,

    q_j = nearest(w_j)      w_k -= (w_j - q_j) U_jk / U_jj  for k > j,      U^T U = (moments + damping)^-1, U upper triangular

which is elimination in the normal equations of the least change of outputs. A row of the weight does not ask about
another one, so rows may lie on ranks; all is computed in float64. Scale and zero of a group of 128 columns are chosen
when its first column is reached. Source: Frantar et al. 2022, "GPTQ" (2210.17323), algorithm 1; damping as there, a
part of the mean of the diagonal.
"""

from __future__ import annotations

from functools import partial

import attrs
import torch
from torch import Tensor

from colofunc import compat
from colofunc.ops.measured import WeightMeasures
from colofunc.ops.quantized import FORMATS, packed_nibbles
from colofunc.ops.quantizers import Quantizer, int4, int4_grid, int4_numbers

GROUP = FORMATS["int4"].group
DAMPING = 0.01
"""What is added to the diagonal, as a part of its mean: moments of few rows have no inverse."""


def calibrated(moments: WeightMeasures, damping: float) -> Quantizer:
    """The scheme "gptq" in the format int4. moments: of each weight (i, i), float64."""
    return Quantizer("gptq", form="int4", quantize=int4, by_name=_Calibrated(moments, damping).named)


@attrs.frozen(eq=False)
class _Calibrated:
    """Moments by name, and the factors that were made of them."""

    moments: WeightMeasures
    damping: float
    factors: dict[str, Tensor] = attrs.field(factory=dict)

    def named(self, name: str) -> Quantizer:
        """The scheme for the weight of this name."""
        return Quantizer("gptq", form="int4", quantize=partial(self._quantized, name, self.moments.known(name)))

    def _quantized(self, name: str, known: str, weight: Tensor) -> dict[str, Tensor]:
        if weight.is_meta:
            return int4(weight)
        with compat.no_function_modes():
            moments = self.moments.of(name, weight.shape[1])
            if known not in self.factors:
                self.factors[known] = factor(moments, self.damping)
            return rounded_int4(weight, self.factors[known])


def factor(moments: Tensor, damping: float) -> Tensor:
    """U, upper triangular, of moments (i, i)."""
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal.add_(damping * diagonal.mean())
    diagonal[diagonal == 0] = 1.0  # of inputs that are all zero: any will do
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def rounded_int4(weight: Tensor, upper: Tensor) -> dict[str, Tensor]:
    """The parts of the format int4 of some rows, (o, i)."""
    upper = upper.to(weight.device)
    rest = weight.to(torch.float64, copy=True)
    numbers, scales, zeros = torch.empty_like(rest), list[Tensor](), list[Tensor]()
    for first in range(0, rest.shape[1], GROUP):
        end = first + GROUP
        group, own = rest[:, first:end], upper[first:end, first:end]
        scale, zero = int4_grid(group)
        errors = torch.empty_like(group)
        for column in range(GROUP):
            given = group[:, column]
            found = int4_numbers(given.unsqueeze(1), scale, zero).squeeze(1)
            numbers[:, first + column] = found
            errors[:, column] = (given - (found - zero) * scale.to(torch.float64)) / own[column, column]
            group[:, column + 1 :] -= errors[:, column : column + 1] * own[column, column + 1 :]
        rest[:, end:] -= errors @ upper[first:end, end:]
        scales.append(scale)
        zeros.append(zero.to(torch.uint8))
    return {"data": packed_nibbles(numbers), "scale": torch.stack(scales, 1), "zero": torch.stack(zeros, 1)}
