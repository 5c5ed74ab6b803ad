"""Experts of a mixture, kept whole: x (b*, d), index (b*, k), weight (b*, k) -> y (b*, d).

    y[n] = sum_k weight[n, k] * expert[index[n, k]](x[n])
    expert(x) = down @ (act(gate @ x) * (up @ x))            gate_up (e, 2f, d) is [gate; up], down (e, d, f)
    act "interleaved_swiglu:alpha:limit"                     gate_up (e, 2f, d) is gate, up, gate, up, ... (see `Interleaved`)

Problem: traced through aten, a layer of experts is a sort, gathers, grouped products over segments that data decides,
and a scatter; which rows belong to which expert is lost, and `grouped_mm` knows neither float64 nor, before torch 2.15,
float32. Idea: one operator says what is meant, and its gradient is one more. Factors: b* tokens, k choices, e experts,
f hidden units, d width.

An index outside of 0 .. e-1 means "no expert here": it adds nothing, and its weight has no gradient. So a rank that
holds some experts runs the same operator on shifted indices, and what ranks give adds up. An expert without tokens has
zero gradients. `share` is the part of the choices that is expected to have an expert here; only the count of its work
reads it.

The kernels of the CPU go through the experts one after another, at most `ROWS` rows at a time, so that beside operands
and results they need memory for that many rows only; a card has its own (`experts_device`, chosen by `experts_guards`),
for which the host does not wait. Backward computes hidden units again instead of keeping (tokens, k, 2f) of them. Sums
over choices are taken in the order of experts, in float32 at least.

float8=True: the products with weights are those of `fp8.product_of_rows`, forward and backward: numbers in e4m3, a
scale of each row that is summed over. A row of hidden units is whole then, so no rank has a part of it. Gradients of
weights are products in the weights' dtype: their scales would be of all tokens of an expert, wherever they are.

`experts_input_gradients` and `experts_weight_gradients` are that backward in two calls, for pipelines that compute
gradients of weights later. The first also gives what the second multiplies, so that nothing is computed twice: dh
(b*, k, 2f), the gradients of what goes into activations, and a (b*, k, f), what comes out, in the order of the choices;
those of no expert are zero. There is no such pair for float8.

`expert_position(index, e)` is the place of each choice in its expert's queue, in the order of tokens: what a capacity
compares with. Source: Shazeer et al. (1701.06538); GShard (2006.16668), section 2.2, for capacities.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import ceil
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import InputError, RuleError
from colofunc.ops.define import define
from colofunc.ops.experts_guards import EXPERTS_KERNELS
from colofunc.ops.experts_parts import ACTS as ACTS
from colofunc.ops.experts_parts import INTERLEAVED as INTERLEAVED
from colofunc.ops.experts_parts import ExpertWeights
from colofunc.ops.experts_parts import Interleaved as Interleaved
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import for_tensors, table_of, wide

ROWS = 1 << 12  # rows of one expert that a kernel of the CPU works on at a time


def _runs(index: Tensor, experts: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(expert, choices, tokens): positions in the flat (tokens, k) index that chose it, and the tokens they are of."""
    flat = index.reshape(-1)
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    order = torch.argsort(key, stable=True)
    counts = torch.bincount(key, minlength=experts + 1)[:experts].tolist()
    k, start = max(index.shape[-1], 1), 0
    for expert, count in enumerate(counts):
        for first in range(start, start + count, ROWS):
            choices = order[first : min(first + ROWS, start + count)]
            yield expert, choices, torch.div(choices, k, rounding_mode="floor")
        start += count


def _one_by_one(
    x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False, share: float = 1.0,
    float8: bool = False,
) -> Tensor:  # fmt: skip
    w = ExpertWeights(gate_up, down, gate_up_bias, down_bias, act, gated, transposed, float8)
    out = torch.promote_types(gate_up.dtype, weight.dtype)
    rows, scale = x.reshape(-1, x.shape[-1]), weight.reshape(-1)
    total = torch.zeros(rows.shape, dtype=wide(out), device=x.device)
    for i, choices, tokens in _runs(index, gate_up.shape[0]):
        y = w.product(w.activated(w.hidden(rows[tokens].to(gate_up.dtype), i)), w.down_of(i))
        if down_bias is not None:
            y = y + down_bias[i]
        total.index_add_(0, tokens, y.to(total.dtype) * scale[choices, None].to(total.dtype))
    return total.to(out).reshape(x.shape)


def _one_by_one_backward(
    g: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False, need_weights: bool = True, share: float = 1.0,
    float8: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = ExpertWeights(gate_up, down, gate_up_bias, down_bias, act, gated, transposed, float8)
    sums = _zero_sums(x, w, need_weights)

    def add(i: int, choices: Tensor, dh: Tensor, xs: Tensor, gs: Tensor, a: Tensor) -> None:
        if need_weights:
            _add_weights(sums, i, dh, xs, gs * weight.reshape(-1)[choices, None].to(gs.dtype), a, transposed)

    dx, dweight = _backward_runs(g, x, index, weight, w, add)
    return dx, dweight, sums[0], sums[1], sums[2], sums[3]


def _input_gradients(
    g: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False, share: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = ExpertWeights(gate_up, down, gate_up_bias, down_bias, act, gated, transposed)
    choices_of_all = index.numel()
    hidden_gradients = gate_up.new_zeros(choices_of_all, w.hidden_width)
    units = gate_up.new_zeros(choices_of_all, w.units)

    def keep(i: int, choices: Tensor, dh: Tensor, xs: Tensor, gs: Tensor, a: Tensor) -> None:
        hidden_gradients[choices] = dh
        units[choices] = a

    dx, dweight = _backward_runs(g, x, index, weight, w, keep)
    return dx, dweight, hidden_gradients.reshape(*index.shape, w.hidden_width), units.reshape(*index.shape, w.units)


def _weight_gradients(
    dh: Tensor, a: Tensor, g: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False,
    share: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = ExpertWeights(gate_up, down, gate_up_bias, down_bias, act, gated, transposed)
    sums, dtype = _zero_sums(x, w, True), gate_up.dtype
    rows, grads, scale = x.reshape(-1, x.shape[-1]), g.reshape(-1, x.shape[-1]), weight.reshape(-1)
    hidden_gradients, units = dh.reshape(-1, dh.shape[-1]), a.reshape(-1, a.shape[-1])
    for i, choices, tokens in _runs(index, gate_up.shape[0]):
        xs, dy = rows[tokens].to(dtype), grads[tokens].to(dtype) * scale[choices, None].to(dtype)
        _add_weights(sums, i, hidden_gradients[choices], xs, dy, units[choices], transposed)
    return sums[0], sums[1], sums[2], sums[3]


def _backward_runs(
    g: Tensor,
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    w: ExpertWeights,
    each: Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], None],
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of choices' weights.

    each: is given of each run its expert, its choices, the gradient of its hidden units, its rows of x and of g, and
    its activated units.
    """
    dtype = w.gate_up.dtype
    rows, grads, scale = x.reshape(-1, x.shape[-1]), g.reshape(-1, x.shape[-1]), weight.reshape(-1)
    dx = torch.zeros(rows.shape, dtype=wide(dtype), device=x.device)
    dweight = torch.zeros(scale.shape, dtype=wide(weight.dtype), device=x.device)
    for i, choices, tokens in _runs(index, w.gate_up.shape[0]):
        xs, gs, s = rows[tokens].to(dtype), grads[tokens].to(dtype), scale[choices, None]
        h = w.hidden(xs, i)
        a = w.activated(h)
        da = w.product(gs, w.down_of(i).t())  # of the expert's result with weight 1
        dot = (da.to(dweight.dtype) * a.to(dweight.dtype)).sum(-1)
        if w.down_bias is not None:
            dot = dot + (gs.to(dot.dtype) @ w.down_bias[i].to(dot.dtype))
        dweight[choices] = dot
        dh = w.activated_backward((da * s.to(dtype)), h)
        dx.index_add_(0, tokens, w.product(dh, w.up_of(i).t()).to(dx.dtype))
        each(i, choices, dh, xs, gs, a)
    return dx.to(x.dtype).reshape(x.shape), dweight.to(weight.dtype).reshape(weight.shape)


def _zero_sums(x: Tensor, w: ExpertWeights, needed: bool) -> list[Tensor]:
    """Where gradients of gate_up, down and their biases are added up; empty where one is not wanted."""
    sums: list[Tensor] = []
    for t in (w.gate_up, w.down, w.gate_up_bias, w.down_bias):
        sums.append(torch.zeros_like(t) if needed and t is not None else x.new_empty(0))
    return sums


def _add_weights(sums: list[Tensor], i: int, dh: Tensor, xs: Tensor, dy: Tensor, a: Tensor, transposed: bool) -> None:
    """Add one run's terms of the gradients of gate_up, down and their biases."""
    sums[0][i] += xs.t() @ dh if transposed else dh.t() @ xs
    sums[1][i] += a.t() @ dy if transposed else dy.t() @ a
    for k, d in ((2, dh), (3, dy)):
        if sums[k].dim() == 2:
            sums[k][i] += d.sum(0)


# ---- the operators ----

_KERNELS = table_of(EXPERTS_KERNELS)


def _experts(*args: Any, **options: Any) -> Tensor:
    found = for_tensors(_KERNELS, "colofunc.experts", args, options)
    return _one_by_one(*args, **options) if found is None else found[0].fn(*found[1])


def _experts_backward(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    found = for_tensors(_KERNELS, "colofunc.experts_backward", args, options)
    return _one_by_one_backward(*args, **options) if found is None else found[0].fn(*found[1])


def _experts_input_gradients(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = for_tensors(_KERNELS, "colofunc.experts_input_gradients", args, options)
    return _input_gradients(*args, **options) if found is None else found[0].fn(*found[1])


def _experts_weight_gradients(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found = for_tensors(_KERNELS, "colofunc.experts_weight_gradients", args, options)
    return _weight_gradients(*args, **options) if found is None else found[0].fn(*found[1])


def _check(
    x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, act: str, gated: bool, transposed: bool
) -> None:
    interleaved = Interleaved.of(act)
    if act not in ACTS and interleaved is None:
        raise RuleError(f"experts: no activation {act!r}; it knows {', '.join((*ACTS, INTERLEAVED))}")
    if interleaved is not None and not gated:
        raise RuleError(f"experts: {act!r} has a gate. Try: gated=True")
    if index.dtype not in (torch.int64, torch.int32):
        raise RuleError(f"experts: index is {index.dtype}; take the int64 that topk gives")
    up = gate_up.shape[1:] if not transposed else tuple(reversed(gate_up.shape[1:]))
    dn = down.shape[1:] if not transposed else tuple(reversed(down.shape[1:]))
    lead = x.shape[:-1]
    fits = gate_up.dim() == down.dim() == 3 and gate_up.shape[0] == down.shape[0] and up[1] == dn[0] == x.shape[-1]
    if not fits or up[0] != (2 if gated else 1) * dn[1] or index.shape != weight.shape or index.shape[:-1] != lead:
        raise RuleError(
            f"experts: x {tuple(x.shape)}, index {tuple(index.shape)}, weight {tuple(weight.shape)}, gate_up "
            f"{tuple(gate_up.shape)}, down {tuple(down.shape)} are not (b*, d), (b*, k), (b*, k), (e, "
            f"{'2f' if gated else 'f'}, d), (e, d, f){' with the last two dims swapped' if transposed else ''}. Try: "
            f"gated={not gated} or transposed={not transposed}"
        )


def _experts_fake(
    x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False, share: float = 1.0,
    float8: bool = False,
) -> Tensor:  # fmt: skip
    _check(x, index, weight, gate_up, down, act, gated, transposed)
    return x.new_empty(x.shape, dtype=torch.promote_types(gate_up.dtype, weight.dtype))


def _backward_fake(
    g: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False, need_weights: bool = True, share: float = 1.0,
    float8: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    weights = (gate_up, down, gate_up_bias, down_bias)
    sums = [w.new_empty(w.shape) if need_weights and w is not None else x.new_empty(0) for w in weights]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *sums


def _input_gradients_fake(
    g: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None,
    down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False, share: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    w = ExpertWeights(gate_up, down, gate_up_bias, down_bias, act, gated, transposed)
    kept = [gate_up.new_empty(*index.shape, width) for width in (w.hidden_width, w.units)]
    return x.new_empty(x.shape), weight.new_empty(weight.shape), *kept


def _weight_gradients_fake(
    dh: Tensor, a: Tensor, g: Tensor, x: Tensor, index: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor,
    gate_up_bias: Tensor | None, down_bias: Tensor | None, act: str, gated: bool = True, transposed: bool = False,
    share: float = 1.0,
) -> tuple[Tensor, ...]:  # fmt: skip
    weights = (gate_up, down, gate_up_bias, down_bias)
    return tuple(w.new_empty(w.shape) if w is not None else x.new_empty(0) for w in weights)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.options = inputs[:7], inputs[7:]  # act, gated, transposed, and share and float8 where they were given
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    need = ctx.needs_input_grad
    act, gated, transposed, *rest = ctx.options
    found = experts_backward(g, *ctx.saved_tensors, act, gated, transposed, any(need[3:7]), *rest)
    dx, dweight, *grads = (d if n else None for d, n in zip(found, (need[0], need[2], *need[3:7]), strict=True))
    return dx, None, dweight, *grads, *[None] * len(ctx.options)


_OPERANDS = (
    "Tensor x, Tensor index, Tensor weight, Tensor gate_up, Tensor down, Tensor? gate_up_bias, Tensor? down_bias"
)
_OPTIONS = "str act, bool gated=True, bool transposed=False"
_LAST = "float share=1.0, bool float8=False"

experts_backward = define(
    f"experts_backward(Tensor g, {_OPERANDS}, {_OPTIONS}, bool need_weights=True, {_LAST}) -> "
    f"({', '.join(['Tensor'] * 6)})",
    _experts_backward, _backward_fake, facts=Facts(product=True, row_order="dealt"),
)  # fmt: skip
experts_input_gradients = define(
    f"experts_input_gradients(Tensor g, {_OPERANDS}, {_OPTIONS}, float share=1.0) -> (Tensor, Tensor, Tensor, Tensor)",
    _experts_input_gradients, _input_gradients_fake, facts=Facts(product=True, row_order="dealt"),
)  # fmt: skip
experts_weight_gradients = define(
    f"experts_weight_gradients(Tensor dh, Tensor a, Tensor g, {_OPERANDS}, {_OPTIONS}, float share=1.0) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    _experts_weight_gradients, _weight_gradients_fake, facts=Facts(product=True, row_order="dealt"),
)  # fmt: skip
experts = define(
    f"experts({_OPERANDS}, {_OPTIONS}, {_LAST}) -> Tensor",
    _experts,
    _experts_fake,
    (_save, _gradient),
    facts=Facts(product=True, weights=(3, 4, 5, 6), row_order="dealt"),
)


def _expert_position(index: Tensor, experts: int) -> Tensor:
    flat = index.reshape(-1)
    key = torch.where((flat >= 0) & (flat < experts), flat, experts)
    sorted_key, order = torch.sort(key, stable=True)
    # where its queue begins; nothing that a host would have to wait for
    first = torch.searchsorted(sorted_key, sorted_key)
    place = torch.empty_like(flat, dtype=torch.int64)
    place[order] = torch.arange(flat.numel(), device=flat.device) - first
    return torch.where(key < experts, place, -1).reshape(index.shape)


expert_position = define(
    "expert_position(Tensor index, int experts) -> Tensor",
    _expert_position,
    lambda index, experts: index.new_empty(index.shape, dtype=torch.int64),
)


# ---- float8 ----


Asked = Callable[[Tensor, Tensor], bool]  # the two weights of a layer -> whether its products are in float8
_FLOAT8: ContextVar[Asked | None] = ContextVar("colofunc_experts_float8", default=None)


@contextmanager
def float8_where(asked: Asked) -> Iterator[None]:
    """Inside, layers of experts multiply in float8 where `asked` says so of their weights."""
    token = _FLOAT8.set(asked)
    try:
        yield
    finally:
        _FLOAT8.reset(token)


def in_float8(gate_up: Tensor, down: Tensor) -> bool:
    """Whether a layer with these weights, as the step's code has them, multiplies in float8."""
    asked = _FLOAT8.get()
    return asked is not None and asked(gate_up, down)


# ---- capacity ----


class Capacity:
    """A capacity factor that layers of experts run under, and how many of them have."""

    def __init__(self, factor: float) -> None:
        self.factor = check_factor(factor)
        self.layers = 0


_AROUND: ContextVar[Capacity | None] = ContextVar("colofunc_expert_capacity", default=None)


@contextmanager
def capacity_of(factor: float) -> Iterator[Capacity]:
    """Inside, an expert takes `factor` times its even share of the choices, and no more."""
    found = Capacity(factor)
    token = _AROUND.set(found)
    try:
        yield found
    finally:
        _AROUND.reset(token)


def check_factor(factor: float) -> float:
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
        raise InputError(f"capacity_factor={factor!r} is no number above 0: no expert could take a token. Try: 1.25")
    return float(factor)


def capacity(choices: int, experts: int, factor: float) -> int:
    """How many of so many choices one expert takes: its even share times the factor, rounded up."""
    return ceil(check_factor(factor) * choices / experts)


def capped(index: Tensor, experts: int, factor: float | None = None) -> Tensor:
    """The index with -1 for choices over capacity: the first in the order of tokens stay.

    None: the factor around it, if any.
    """
    around = _AROUND.get()
    if around is not None:
        around.layers += 1
        factor = around.factor if factor is None else factor
    if factor is None:
        return index
    place = expert_position(index.reshape(-1, index.shape[-1]), experts).reshape(index.shape)
    return torch.where(place < capacity(index.numel(), experts, factor), index, -1)
