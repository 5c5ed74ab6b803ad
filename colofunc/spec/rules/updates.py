"""Updates with more than tensors of the parameter's shape; those that are elementwise in everything are pointwise.

    adamw8            (o, i) in blocks of h columns      o (g [h]), o (g [h]), o (g [h]), o g, o (g [h]), o g, , -> o (g [h]), ...
                      (o, c, k) with blocks of h k       o (g [h]) [k], ...
    adamw_rounded     (o, i)                             o i, o i, o i, o i, , -> o i, o i, o i
    lamb_direction    (o, i)                             o i, o i, o i, o i, -> o i, [norms], o i, o i

What is rounded by a draw knows where in the global parameter it lies, as random numbers do (`rules.random`). Of moments
in 8 bits a block with a scale is never cut: `g` counts them. LAMB's squared norms are summed over all factors.
"""

from __future__ import annotations

from colofunc.ops.update_packed import block_of
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import Texts, at, bind, names
from colofunc.spec.rules.pattern import RuleFn
from colofunc.spec.rules.random import is_placed, knowing_its_place

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
    code = None
    if call.arg(15, "site", None) is not None:
        if is_placed(call, 16):
            return None
        code = knowing_its_place(16)
    return bind(call, texts, [full, full, scale, full, scale], sizes={"g": blocks.count}, local=code)


def _adamw_rounded(call: Call) -> Rule | None:
    shape = call.ins[0].shape
    if any(call.ins[k].shape != shape for k in range(4)) or is_placed(call, 14):
        return None
    full = " ".join(names("d", len(shape)))
    texts: Texts = dict.fromkeys(range(4), full)
    texts |= {at(call, 4, "step"): "", at(call, 5, "lr"): "", at(call, 12, "finite"): ""}
    return bind(call, texts, [full, full, full], local=knowing_its_place(14))


def _lamb_direction(call: Call) -> Rule | None:
    shape = call.ins[0].shape
    tensors = range(4)  # parameter, gradient, moments
    if any(call.ins[k].shape != shape for k in tensors):
        return None
    dims = names("d", len(shape))
    full = " ".join(dims)
    texts: Texts = dict.fromkeys(tensors, full)
    texts |= {at(call, 4, "step"): "", at(call, 10, "finite"): ""}
    return bind(call, texts, [full, "[norms]", full, full], reduce=dict.fromkeys(dims, "sum"))


RULES: dict[str, RuleFn] = {
    "colofunc.adamw8": _adamw8, "colofunc.adamw_rounded": _adamw_rounded, "colofunc.lamb_direction": _lamb_direction,
}  # fmt: skip
