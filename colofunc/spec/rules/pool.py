"""Pooling: batch and channels are free; pooled dims are whole, for windows overlap and indices count in a plane.

    max_pool2d_with_indices     b0 b1 [h] [w] -> b0 b1 [oh] [ow], b0 b1 [oh] [ow]
    avg_pool2d                  b0 b1 [h] [w] -> b0 b1 [oh] [ow]                     linear
"""

from __future__ import annotations

from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import StrategyFn, bind, leading, whole
from colofunc.spec.rules.pattern import RuleFn


def _fractional(n: int) -> RuleFn:
    """Fractional pooling: one random sample per image and channel, `b0 b1 [n]` beside `b0 b1 [h] [w]`."""

    def rule(call: Call) -> Rule | None:
        if len(call.ins[0].shape) != n + 2:
            return None
        planes = [" ".join(["b0", "b1", *whole(f"x{k}_", n)]) for k in range(3)]
        return bind(call, {0: planes[0], 1: "b0 b1 [s]"}, planes[1:])

    return rule


def _pools() -> dict[str, RuleFn]:
    rules: dict[str, RuleFn] = {}
    for n in (1, 2, 3):
        rules |= {
            f"aten.max_pool{n}d_with_indices": leading(n),
            f"aten.max_pool{n}d_with_indices_backward": leading(n, linear=[{0}]),
            f"aten.max_pool{n}d": leading(n),
            f"aten.avg_pool{n}d": leading(n, linear=[{0}]),
            f"aten.avg_pool{n}d_backward": leading(n, linear=[{0}]),
            f"aten._adaptive_avg_pool{n}d": leading(n, linear=[{0}]),
            f"aten.adaptive_avg_pool{n}d": leading(n, linear=[{0}]),
            f"aten._adaptive_avg_pool{n}d_backward": leading(n, linear=[{0}]),
            f"aten.adaptive_max_pool{n}d": leading(n),
            f"aten.adaptive_max_pool{n}d_backward": leading(n, linear=[{0}]),
            f"aten.max_unpool{n}d": leading(n),
            f"aten.fractional_max_pool{n}d": _fractional(n),
            f"aten.fractional_max_pool{n}d_backward": leading(n, linear=[{0}]),
        }
    return rules


RULES: dict[str, RuleFn] = _pools()
STRATEGIES: dict[str, StrategyFn] = {}
