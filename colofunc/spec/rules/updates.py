"""Updates whose states have other shapes than the parameter: moments in 8 bits, with a scale for each block of elements.

    adamw8    (o, i) in blocks of h columns      o (g [h]), o (g [h]), o (g [h]), o g, o (g [h]), o g, , -> o (g [h]), ...
              (o, c, k) with blocks of h k       o (g [h]) [k], ...

A block is never cut: `g` counts them. Updates that are elementwise in everything are pointwise.
"""

from __future__ import annotations

from colofunc.ops.update_packed import block_of
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import Texts, at, bind
from colofunc.spec.rules.pattern import RuleFn

_CODES, _SCALES = (2, 4), (3, 5)  # arguments of adamw8


def _adamw8(call: Call) -> Rule | None:
    shape = call.ins[0].shape
    blocks = block_of(shape)
    if blocks is None or any(call.ins[k].shape != shape for k in _CODES):
        return None
    if any(call.ins[k].shape != blocks.scales(shape) for k in _SCALES):
        return None
    before = [f"d{dim}" for dim in range(blocks.dim)]
    behind = [f"[d{dim}]" for dim in range(blocks.dim + 1, len(shape))]
    full, scale = " ".join([*before, "(g [h])", *behind]), " ".join([*before, "g"])
    texts: Texts = {0: full, 1: full, **dict.fromkeys(_CODES, full), **dict.fromkeys(_SCALES, scale)}
    texts |= {at(call, 6, "step"): "", at(call, 7, "lr"): "", at(call, 14, "finite"): ""}
    return bind(call, texts, [full, full, scale, full, scale], sizes={"g": blocks.count})


RULES: dict[str, RuleFn] = {"colofunc.adamw8": _adamw8}
