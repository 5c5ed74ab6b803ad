"""Fourier transforms: transformed dims are whole, the others free; all are linear.

    _fft_r2c over dim 1      d0 [w] d2 -> d0 [v] d2
"""

from __future__ import annotations

from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import along
from colofunc.spec.rules.pattern import RuleFn


def transform(call: Call) -> Rule | None:
    return along(call, call.arg(1, "dim"), linear=[{0}])


RULES: dict[str, RuleFn] = dict.fromkeys(("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r"), transform)
