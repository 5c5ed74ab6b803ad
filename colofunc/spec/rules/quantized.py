"""Products with quantized weights: as `linear`, with the parts of the weight split as its rows and columns are.

    int8_linear      b* i, o i, o, o              -> b* o          i summed; the scale of a row goes with the row
    int4_linear      b* (g [e]), o (g [h]), o g, o g, o -> b* o    g counts groups: columns are cut between groups only
    int8_linear_dx   b* o, o i, o                 -> b* i          o summed
    int8_dequantize  o i, o                       -> o i
    mxfp8_numbers    o (g [e])                    -> o (g [e]), o g       a block is in one place
    nvfp4_numbers    o (g [e]), the largest       -> o (g [h]), o g, o    two numbers in an element of data: h = e / 2
    rounded_rows     b* [i]                       -> b* [i]        opened at i: ranks tell one another the largest of each row
    row_size         b* i                         -> b*            an axis on i leaves max:axis
    int8_rows        b* i, b*                     -> b* i
    int8_rows_linear b* i, o i, o, b*, b* i, o    -> b* o          i summed: whole sums of a rank's columns, under one scale of a row
    pack_saved       b* (g [h]) [c*]              -> b* (g [h]) [c*], b* g       a group is in one place
    widen_saved      b* (g [h]) [c*], b* g        -> b* (g [h]) [c*]

A bias is an addend, as in `linear`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import all_reduce
from colofunc.ops.quantized import FORMATS, Format
from colofunc.ops.quantized_inputs import largest_below, rounded
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import LocalFn, Texts, at, bind, names
from colofunc.spec.rules.opened import Split, nbytes_without, opened
from colofunc.spec.rules.pattern import RuleFn, pattern, with_flops
from colofunc.spec.rules.reduce import reduced


def _texts(form: Format, first: int) -> Texts:
    """The patterns of a weight's parts, which are operands from `first` on."""
    if form.group == 1:
        dims = {"data": "o i", "scale": "o"}
    else:
        dims = {"data": "o (g [h])", "scale": "o g", "zero": "o g", "outer": "o"}
    return {first + k: dims[part] for k, part in enumerate(form.parts)}


def _columns(form: Format) -> str:
    return "i" if form.group == 1 else "(g [e])"


def _bound(
    form: Format,
    call: Call,
    texts: Texts,
    out: str,
    reduce: dict[str, str],
    linear: list[set[int | None]],
    bias: int | None = None,
) -> Rule:
    sizes = None if form.group == 1 else {"e": form.group, "h": form.group // form.packed}
    return bind(call, texts, [out], reduce=reduce, linear=linear, addends=[bias], sizes=sizes)


def _with_flops(rule: Rule, call: Call, form: Format) -> Rule:
    """Two operations for each row of x and each number of the weight."""
    batch = prod(call.ins[0].shape[:-1])
    return attrs.evolve(rule, flops=2 * batch * prod(call.ins[1].shape) * form.packed)


def _linear(form: Format) -> RuleFn:
    def rule(call: Call) -> Rule | None:
        batch = " ".join(names("b", len(call.ins[0].shape) - 1))
        bias = at(call, 1 + len(form.parts), "bias")
        texts: Texts = {0: f"{batch} {_columns(form)}", **_texts(form, 1), bias: "o"}
        summed = {"i": "sum", "g": "sum"}
        return _with_flops(_bound(form, call, texts, f"{batch} o", summed, [{0, bias}], bias), call, form)

    return rule


def _linear_dx(form: Format) -> RuleFn:
    def rule(call: Call) -> Rule | None:
        batch = " ".join(names("b", len(call.ins[0].shape) - 1))
        texts: Texts = {0: f"{batch} o", **_texts(form, 1)}
        return _with_flops(_bound(form, call, texts, f"{batch} {_columns(form)}", {"o": "sum"}, [{0}]), call, form)

    return rule


def _dequantize(form: Format) -> RuleFn:
    def rule(call: Call) -> Rule | None:
        return _bound(form, call, _texts(form, 0), f"o {_columns(form)}", {}, [])

    return rule


def _numbers(form: Format) -> RuleFn:
    """What packs rows in blocks of columns; a second operand is a number."""

    def rule(call: Call) -> Rule | None:
        ins: Texts = {0: f"o {_columns(form)}"}
        if len(call.ins) == 2:
            ins[1] = ""
        sizes = {"e": form.group, "h": form.group // form.packed}
        return bind(call, ins, list(_texts(form, 0).values()), sizes=sizes)

    return rule


def _row_size(call: Call) -> Rule | None:
    return reduced(call, [len(call.ins[0].shape) - 1], False, "max")


def _int8_rows_linear(call: Call) -> Rule | None:
    batch = " ".join(names("b", len(call.ins[0].shape) - 1))
    x, bias = at(call, 4, "x"), at(call, 6, "bias")
    texts: Texts = {0: f"{batch} i", 1: "o i", 2: "o", 3: batch, x: f"{batch} i", bias: "o"}
    return with_flops(bind(call, texts, [f"{batch} o"], reduce={"i": "sum"}, addends=[bias]))


def _saved(shape: tuple[int, ...], dim: int) -> tuple[str, str]:
    """The patterns of an activation in groups that cut `dim`, and of their scales."""
    before = names("b", dim)
    behind = [f"[c{number}]" for number in range(dim + 1, len(shape))]
    return " ".join([*before, "(g [h])", *behind]), " ".join([*before, "g"])


def _pack_saved(call: Call) -> Rule | None:
    dim, width = call.arg(1, "dim"), call.arg(2, "width")
    full, scale = _saved(call.ins[0].shape, dim)
    return bind(call, {0: full}, [full, scale], sizes={"h": width})


def _widen_saved(call: Call) -> Rule | None:
    codes, scales = call.ins
    full, scale = _saved(codes.shape, len(scales.shape) - 1)
    return bind(call, {0: full, 1: scale}, [full], sizes={"g": scales.shape[-1]})


_rows = pattern("b* [i] -> b* [i]")


def _rows_over_ranks(call: Call, split: Split) -> LocalFn:
    axes, threshold = split.axes, call.arg(1, "threshold")

    def local(x: torch.Tensor, *, mesh: Mesh) -> torch.Tensor:
        return rounded(x, all_reduce(largest_below(x, threshold), axes, mesh, "max"), threshold)

    return local


def _open_rows(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    def traffic(call: Call, split: Split) -> float:
        return nbytes_without(split.ins[0], -1, call.ins[0].dtype)

    return opened(call, mesh, _rows(call), ["i"], _rows_over_ranks, traffic)


STRATEGIES = {"colofunc.rounded_rows": _open_rows}
RULES: dict[str, RuleFn] = {
    "colofunc.fp8_bits": pattern("b* -> b*"),
    "colofunc.fp8_e5m2_bits": pattern("b* -> b*"),
    "colofunc.mxfp8_numbers": _numbers(FORMATS["mxfp8"]),
    "colofunc.nvfp4_numbers": _numbers(FORMATS["nvfp4"]),
    "colofunc.rounded_rows": _rows,
    "colofunc.row_size": _row_size,
    "colofunc.int8_rows": pattern("b* i, b* -> b* i"),
    "colofunc.int8_rows_linear": _int8_rows_linear,
    "colofunc.pack_saved": _pack_saved,
    "colofunc.widen_saved": _widen_saved,
}
for _form in FORMATS.values():
    RULES[f"colofunc.{_form.name}_linear"] = _linear(_form)
    RULES[f"colofunc.{_form.name}_linear_dx"] = _linear_dx(_form)
    RULES[f"colofunc.{_form.name}_dequantize"] = _dequantize(_form)
