"""Gradients with residuals: each rank has terms of both, which pass as they are, so that what sums them knows what a
rank sends.

    carry      b*, b* -> b*, b*        a sum pending over an axis is pending of all four
    residual   b* -> b*
"""

from __future__ import annotations

from colofunc.ops.wire import CARRY, RESIDUAL
from colofunc.spec.rules.pattern import RuleFn, pattern

RULES: dict[str, RuleFn] = {
    CARRY: pattern("b*, b* -> b*, b*", linear=[{0, 1}]),
    RESIDUAL: pattern("b* -> b*", linear=[{0}]),
}
