"""What a scheme that rounds inputs makes of them: the numbers that its products multiply, as plain floats.

    rounded_inputs(scheme, x)        # x (..., i) -> (..., i) in float32, in float64 where x is

For who measures what the rounding does. A step itself multiplies these numbers narrow (`colofunc/ops/int8_products.py`,
`colofunc/ops/fp8_products.py`), with the same result but for the order of sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.ops import fp8_products
from colofunc.ops.quantized_inputs import rounded_rows
from colofunc.ops.quantizers import Quantizer


def rounded_inputs(scheme: Quantizer, x: Tensor) -> Tensor:
    """Inputs (..., i) of a linear layer as a weight in the scheme is multiplied with them, without `input_scale`."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if scheme.float8_inputs:
        return fp8_products.rounded_rows(wide, scheme.form)
    assert scheme.outliers is not None, "it rounds inputs"
    rounded: Tensor = rounded_rows.apply(wide, scheme.outliers)
    return rounded
