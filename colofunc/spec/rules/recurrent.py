"""Recurrent layers: the sequence and the hidden units are whole, samples are free.

    lstm             [s] b [g], b [h], b [h], [g] [h] -> [s] b [h], b [h], [s] b [h], [s] b [g]
    lstm_backward    [s] b [h], b [h], b [h], [g] [h], [s] b [h], [s] b [g] -> [s] b [g], b [h], b [h]
"""

from __future__ import annotations

from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import Texts, bind
from colofunc.spec.rules.pattern import RuleFn

HIDDEN, STATE, GATES, WEIGHT = "[s] b [h]", "b [h]", "[s] b [g]", "[g] [h]"


def lstm(call: Call) -> Rule:
    texts: Texts = {0: GATES, 1: STATE, 2: STATE, 3: WEIGHT}
    return bind(call, texts, [HIDDEN, STATE, HIDDEN, GATES], flops=_flops(call, 0))


def lstm_backward(call: Call) -> Rule:
    texts: Texts = {0: HIDDEN, 1: STATE, 2: STATE, 3: WEIGHT, 4: HIDDEN, 5: GATES}
    return bind(call, texts, [GATES, STATE, STATE], linear=[{0, 1}], flops=_flops(call, 5))


def _flops(call: Call, gates: int) -> int:
    """Of the product at each place, and about six operations for each gate."""
    steps, samples, size = call.ins[gates].shape
    return steps * samples * size * (2 * (size // 4) + 6)


RULES: dict[str, RuleFn] = {"colofunc.lstm": lstm, "colofunc.lstm_backward": lstm_backward}
