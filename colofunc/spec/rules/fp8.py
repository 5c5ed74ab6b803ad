"""Products in float8: as `linear`, where scales go with the rows and columns that they are of.

    abs_max            b*              -> b*, or nothing   an axis on a dim that is reduced leaves max:axis
    fp8_scale          b*              -> b*
    fp8_cast           b*, b*          -> b*               a scale of many numbers broadcasts
    scaled_linear      b* i, o i, b* 1, o 1, o -> b* o     i summed; the scale of w may be of shape o
    scaled_groups_linear  b* (g [e]), o (g [e]), b* g, o g, o -> b* o    g summed: it counts groups, which are not cut
    scaled_linear_dx   b* o, o i, b* 1, 1 i    -> b* i     o summed
    scaled_linear_dw   b* o, b* i, 1* o, 1* i  -> o i      b summed

A scale without dims is one of a whole tensor. A bias is an addend, as in `linear`.
"""

from __future__ import annotations

from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import Texts, at, bind, names
from colofunc.spec.rules.pattern import RuleFn, dims_of, pattern, with_flops
from colofunc.spec.rules.pointwise import aligned
from colofunc.spec.rules.reduce import reduced, reduced_dims


def _abs_max(call: Call) -> Rule | None:
    dims = call.arg(1, "dims")
    return reduced(call, reduced_dims(dims, len(call.ins[0].shape)), dims is not None, "max")


def _cast(call: Call) -> Rule | None:
    operand, sizes = dims_of(call.ins[0].shape)
    scale = aligned(call.ins[1].shape, operand, call.ins[0].shape)
    return None if scale is None else Rule((operand, scale), (operand,), sizes)


def _scale(call: Call, index: int, text: str) -> str:
    """The pattern of a scale, of one without dims none."""
    return text if call.ins[index].shape else ""


def _batch(call: Call) -> tuple[str, str]:
    """Names of the leading dims, and as many of size 1."""
    count = len(call.ins[0].shape) - 1
    return " ".join(names("b", count)), " ".join(["1"] * count)


def _linear(call: Call) -> Rule | None:
    batch, _ = _batch(call)
    bias = at(call, 4, "b")
    of_w = "o" if len(call.ins[3].shape) == 1 else "o 1"
    texts: Texts = {0: f"{batch} i", 1: "o i", 2: _scale(call, 2, f"{batch} 1"), 3: _scale(call, 3, of_w), bias: "o"}
    return with_flops(bind(call, texts, [f"{batch} o"], reduce={"i": "sum"}, addends=[bias]))


def _groups_linear(call: Call) -> Rule | None:
    batch, _ = _batch(call)
    bias = at(call, 4, "b")
    texts: Texts = {0: f"{batch} (g [e])", 1: "o (g [e])", 2: f"{batch} g", 3: "o g", bias: "o"}
    sizes = {"e": call.ins[1].shape[1] // call.ins[3].shape[1]}
    return with_flops(bind(call, texts, [f"{batch} o"], reduce={"g": "sum"}, addends=[bias], sizes=sizes))


def _linear_dx(call: Call) -> Rule | None:
    batch, _ = _batch(call)
    texts: Texts = {0: f"{batch} o", 1: "o i", 2: _scale(call, 2, f"{batch} 1"), 3: _scale(call, 3, "1 i")}
    return with_flops(bind(call, texts, [f"{batch} i"], reduce={"o": "sum"}))


def _linear_dw(call: Call) -> Rule | None:
    batch, ones = _batch(call)
    texts: Texts = {0: f"{batch} o", 1: f"{batch} i", 2: _scale(call, 2, f"{ones} o"), 3: _scale(call, 3, f"{ones} i")}
    return with_flops(bind(call, texts, ["o i"], reduce=dict.fromkeys(batch.split(), "sum")))


RULES: dict[str, RuleFn] = {
    "colofunc.abs_max": _abs_max,
    "colofunc.fp8_scale": pattern("b* -> b*"),
    "colofunc.fp8_cast": _cast,
    "colofunc.scaled_linear": _linear,
    "colofunc.scaled_groups_linear": _groups_linear,
    "colofunc.scaled_linear_dx": _linear_dx,
    "colofunc.scaled_linear_dw": _linear_dw,
}
