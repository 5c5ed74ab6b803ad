"""Experts on a card: choices are sorted once, products are grouped, and the host never learns how many each expert has.

    order       choices, sorted by expert; those of no expert come last
    ends        where each expert's choices end in it
    products    of torch or by tiles, `grouped_device`

Shapes do not depend on the choices, so all choices are computed, those of no expert too; what they give is left out. As
many choices are worked on at a time as take the memory of the experts' weights, and at least `LEAST_CHOICES`: mostly
all. Where they are several times, gradients of weights are made for each and added up, which needs the memory of the
weights once more.

Sums over choices are taken in the order of experts, in float32 at least, and always in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from colofunc.ops import triton_use
from colofunc.ops.experts_native import add_choices, adds, sorted_choices
from colofunc.ops.experts_parts import ExpertWeights
from colofunc.ops.grouped_device import EMULATED, GROUPED, SCALED, TILED, Products
from colofunc.ops.kernels import NARROW, wide

LEAST_CHOICES = 1 << 12


@attrs.frozen(eq=False)
class ExpertsRun:
    """Some choices in the order of experts: positions in the flat (tokens, k) index, tokens, experts, ends of experts
    among them.

    `nobodys`: (rows, 1), the choices of no expert; their `expert` is the last one. `place`: (tokens, k), where all
    choices stand in that order, of which `first` is the first one here; None where `experts_native` has no kernel.
    """

    choices: Tensor
    tokens: Tensor
    expert: Tensor
    nobodys: Tensor
    ends: Tensor
    place: Tensor | None
    first: int


def runs(index: Tensor, w: ExpertWeights) -> Iterator[ExpertsRun]:
    """All choices, as many at a time as memory is meant to hold."""
    experts = w.gate_up.shape[0]
    order, sorted_key, ends, place = sorted_choices(index, experts)
    k, length = max(index.shape[-1], 1), at_once(w.gate_up.numel() + w.down.numel(), w.width, w.hidden_width)
    for first in range(0, order.shape[0], length):
        choices, key = order[first : first + length], sorted_key[first : first + length]
        tokens = torch.div(choices, k, rounding_mode="floor")
        nobodys = (key == experts).unsqueeze(1)
        yield ExpertsRun(
            choices,
            tokens,
            key.clamp(max=experts - 1),
            nobodys,
            (ends - first).clamp(0, choices.shape[0]),
            place,
            first,
        )


def at_once(weights: int, d: int, hidden: int) -> int:
    """Choices whose rows, hidden units and their gradients take the memory of so many elements of weights."""
    return max(LEAST_CHOICES, weights // (4 * d + 3 * hidden))


def _hidden(w: ExpertWeights, xs: Tensor, run: ExpertsRun, by: Products) -> Tensor:
    """What goes into the activations, (rows, 2f) or (rows, f)."""
    up = w.gate_up if w.transposed else w.gate_up.transpose(1, 2)
    h = by.product(xs, up, run.ends)
    return h if w.gate_up_bias is None else h + w.gate_up_bias[run.expert]


def _experts(by: Products, x: Tensor, index: Tensor, weight: Tensor, *given: Any) -> Tensor:
    """What `experts` computes."""
    # the share of choices with an expert here changes no number, and what is in float8 `by` has chosen
    *parts, _, _ = given
    w = ExpertWeights(*parts)
    out = torch.promote_types(w.gate_up.dtype, weight.dtype)
    rows, scale = x.reshape(-1, x.shape[-1]), weight.reshape(-1)
    total = torch.zeros(rows.shape, dtype=wide(out), device=x.device)
    if not w.gate_up.shape[0]:
        return total.to(out).reshape(x.shape)
    down = w.down if w.transposed else w.down.transpose(1, 2)
    for run in runs(index, w):
        _add_run(by, w, run, rows, scale, down, total)
    return total.to(out).reshape(x.shape)


def _add_run(
    by: Products, w: ExpertWeights, run: ExpertsRun, rows: Tensor, scale: Tensor, down: Tensor, total: Tensor
) -> None:
    """What one run adds; all that it makes goes with it."""
    y = by.product(_activated(w, _hidden(w, rows[run.tokens].to(w.gate_up.dtype), run, by)), down, run.ends)
    if w.down_bias is not None:
        y = y + w.down_bias[run.expert]
    if run.place is not None and adds(total, scale, y.dtype):
        add_choices(total, y, run.place, scale, run.first)
        return
    term = (y.to(total.dtype) * scale[run.choices, None].to(total.dtype)).masked_fill_(run.nobodys, 0)
    total.index_put_((run.tokens,), term, accumulate=True)


def _experts_backward(
    by: Products, g: Tensor, x: Tensor, index: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `experts_backward` computes."""
    *parts, need_weights, _, _ = given
    w = ExpertWeights(*parts)
    sums = Sums(w, need_weights, by)
    return (*_backward_runs(by, w, g, x, index, weight, sums if need_weights else None), *sums.results(x))


def _experts_input_gradients(
    by: Products, g: Tensor, x: Tensor, index: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `experts_input_gradients` computes."""
    *parts, _ = given
    w = ExpertWeights(*parts)
    kept = HiddenGradients(w, index)
    dx, dweight = _backward_runs(by, w, g, x, index, weight, kept)
    return dx, dweight, kept.hidden_gradients, kept.units


def _experts_weight_gradients(
    by: Products, dh: Tensor, a: Tensor, g: Tensor, x: Tensor, index: Tensor, weight: Tensor, *given: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `experts_weight_gradients` computes."""
    *parts, _ = given
    w = ExpertWeights(*parts)
    sums = Sums(w, True, by)
    hidden_gradients, units = dh.reshape(-1, w.hidden_width), a.reshape(-1, w.units)
    for run, xs, gs, s in _rows_of_runs(w, g, x, index, weight):
        sums.add(run, hidden_gradients[run.choices], xs, gs, s, units[run.choices])
    return sums.results(x)


def _rows_of_runs(
    w: ExpertWeights, g: Tensor, x: Tensor, index: Tensor, weight: Tensor
) -> Iterator[tuple[ExpertsRun, Tensor, Tensor, Tensor]]:
    """Each run, with its rows of x and of g and (rows, 1) the weights of its choices."""
    if not w.gate_up.shape[0]:
        return
    dtype = w.gate_up.dtype
    rows, grads, scale = x.reshape(-1, x.shape[-1]), g.reshape(-1, x.shape[-1]), weight.reshape(-1)
    for run in runs(index, w):
        yield run, rows[run.tokens].to(dtype), grads[run.tokens].to(dtype), scale[run.choices, None].to(dtype)


def _backward_runs(
    by: Products,
    w: ExpertWeights,
    g: Tensor,
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    behind: Sums | HiddenGradients | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of choices' weights.

    behind: takes of each run what gradients of weights are made of.
    """
    dx = torch.zeros(x.reshape(-1, x.shape[-1]).shape, dtype=wide(w.gate_up.dtype), device=x.device)
    dweight = torch.zeros(weight.numel(), dtype=wide(weight.dtype), device=x.device)
    for run, xs, gs, s in _rows_of_runs(w, g, x, index, weight):
        _add_gradients(by, w, run, (xs, gs, s), (dx, dweight, behind))
    return dx.to(x.dtype).reshape(x.shape), dweight.to(weight.dtype).reshape(weight.shape)


def _add_gradients(
    by: Products,
    w: ExpertWeights,
    run: ExpertsRun,
    operands: tuple[Tensor, Tensor, Tensor],
    sums: tuple[Tensor, Tensor, Sums | HiddenGradients | None],
) -> None:
    """What one run adds to gradients of x, of choices' weights and of experts' weights.

    All that it makes goes with it.
    """
    (xs, gs, s), (dx, dweight, behind) = operands, sums
    up_back, down_back = (t.transpose(1, 2) if w.transposed else t for t in (w.gate_up, w.down))
    h = _hidden(w, xs, run, by)
    da = by.product(gs, down_back, run.ends)  # of the expert's result with weight 1
    a, dh, dot = _through_activations(w, h, da, s, dweight.dtype)
    if w.down_bias is not None:
        dot = dot + (gs.to(dot.dtype) * w.down_bias[run.expert].to(dot.dtype)).sum(-1)
    dweight.index_put_((run.choices,), dot.masked_fill_(run.nobodys.squeeze(1), 0))
    term = by.product(dh, up_back, run.ends)
    if run.place is not None and adds(dx, None, term.dtype):
        add_choices(dx, term, run.place, None, run.first)
    else:
        dx.index_put_((run.tokens,), term.to(dx.dtype), accumulate=True)
    if behind is not None:
        behind.add(run, dh, xs, gs, s, a)


def _activated(w: ExpertWeights, h: Tensor) -> Tensor:
    """Units of experts, (rows, f)."""
    if not _is_one_pass(w, h):
        return w.activated(h)
    from colofunc.ops.experts_triton import gated  # Triton is not there everywhere

    return gated(h)


def _through_activations(
    w: ExpertWeights, h: Tensor, da: Tensor, s: Tensor, sums: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Units (rows, f), the gradient of h, and sum(da * units) of each row in the dtype `sums`.

    The units' gradient is da * s.
    """
    if sums is torch.float32 and da.is_contiguous() and _is_one_pass(w, h):
        from colofunc.ops.experts_triton import gated_backward

        return gated_backward(da, s.contiguous(), h)
    a = w.activated(h)
    dot = (da.to(sums) * a.to(sums)).sum(-1)  # its wide copies are gone before h has a gradient
    return a, w.activated_backward(da * s, h), dot


def is_one_pass(act: str, gated: bool, dtype: torch.dtype) -> bool:
    """Whether there is a kernel for activations."""
    return gated and act == "silu" and dtype in NARROW


def _is_one_pass(w: ExpertWeights, h: Tensor) -> bool:
    return is_one_pass(w.act, w.gated, h.dtype) and h.is_contiguous() and triton_use.takes_triton(h)


class HiddenGradients:
    """Gradients of hidden units and activated units of all choices, in the order of the choices."""

    def __init__(self, w: ExpertWeights, index: Tensor) -> None:
        # Runs are of all choices, so that each row is written, unless there is no expert.
        make = w.gate_up.new_empty if w.gate_up.shape[0] else w.gate_up.new_zeros
        self.hidden_gradients = make(*index.shape, w.hidden_width)
        self.units = make(*index.shape, w.units)

    def add(self, run: ExpertsRun, dh: Tensor, xs: Tensor, gs: Tensor, s: Tensor, a: Tensor) -> None:
        """One run's rows; those of no expert are zero."""
        for kept, made in ((self.hidden_gradients, dh), (self.units, a)):
            kept.view(-1, kept.shape[-1])[run.choices] = made.masked_fill_(run.nobodys, 0)


class Sums:
    """Gradients of gate_up, down and their biases, over runs."""

    def __init__(self, w: ExpertWeights, needed: bool, by: Products) -> None:
        self._w = w
        self._by = by
        self._needed = needed
        self._products: list[Tensor] = []
        biases = [w.gate_up_bias, w.down_bias]
        self._biases = [torch.zeros_like(b, dtype=wide(b.dtype)) if b is not None and needed else None for b in biases]

    def add(self, run: ExpertsRun, dh: Tensor, xs: Tensor, gs: Tensor, s: Tensor, a: Tensor) -> None:
        """One run's terms: gradients of hidden units and results (gs * s), and what they were made of."""
        dy = gs * s
        pairs = [(dh, xs), (dy, a)]
        of_groups = self._by.of_groups
        made = [of_groups(i, o, run.ends) if self._w.transposed else of_groups(o, i, run.ends) for o, i in pairs]
        self._products = (
            [total.add_(term) for total, term in zip(self._products, made, strict=True)] if self._products else made
        )
        for total, (grad, _) in zip(self._biases, pairs, strict=True):
            if total is not None:
                total.index_put_((run.expert,), grad.to(total.dtype).masked_fill(run.nobodys, 0), accumulate=True)

    def results(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        w = self._w
        if not self._needed:
            return like.new_empty(0), like.new_empty(0), like.new_empty(0), like.new_empty(0)
        made = self._products or [
            torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (w.gate_up, w.down)
        ]
        of_biases: list[Tensor] = []
        for total, bias in zip(self._biases, (w.gate_up_bias, w.down_bias), strict=True):
            of_biases.append(like.new_empty(0) if total is None or bias is None else total.to(bias.dtype))
        return made[0], made[1], of_biases[0], of_biases[1]


# ---- the kernels, with the arguments of the operators ----


def grouped_experts(*args: Any) -> Tensor:
    return _experts(GROUPED, *args)


def grouped_experts_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _experts_backward(GROUPED, *args)


def tiled_experts(*args: Any) -> Tensor:
    return _experts(TILED, *args)


def tiled_experts_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _experts_backward(TILED, *args)


def grouped_experts_input_gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _experts_input_gradients(GROUPED, *args)


def grouped_experts_weight_gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _experts_weight_gradients(GROUPED, *args)


def tiled_experts_input_gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _experts_input_gradients(TILED, *args)


def tiled_experts_weight_gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _experts_weight_gradients(TILED, *args)


def scaled_experts(*args: Any) -> Tensor:
    return _experts(SCALED, *args)


def scaled_experts_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _experts_backward(SCALED, *args)


def emulated_experts(*args: Any) -> Tensor:
    return _experts(EMULATED, *args)


def emulated_experts_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _experts_backward(EMULATED, *args)
