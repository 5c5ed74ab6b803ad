"""Experts: tokens, experts and hidden units are free, width and choices are whole.

    experts            b* [d], b* [k], b* [k], e (c f) [d], e [d] f -> b* [d]           e and f summed
    experts_backward   dx b* [d] and dweight b* [k] summed over e and f; dgate_up, ddown as they lie, summed over b*
    experts_input_gradients    the first two, and hidden units b* [k] (c f), b* [k] f, summed over e: others' are zero
    experts_weight_gradients   the hidden units, and what experts_backward reads -> dgate_up, ddown, summed over b*
    grouped_mm         [s] i, [e] i o, [e] -> [s] o     rows of a group are known by their place only
    expert_position    [b*] [k] -> [b*] [k]     opened at b*: ranks tell one another how often each expert was chosen

An axis on `b*` is data parallelism with whole weights. On `e` every rank runs its experts on all tokens: the local code
shifts indices, and a choice of another rank's expert is one of nobody's. On `f` it is tensor parallelism inside the
experts: column and row of every expert, `c` counts gate and up, (f c) where they are interleaved. In float8 `f` is
whole, and rows are rounded before they are multiplied: a sum still pending of `down`, or of the gradient that comes in,
must be whole first. Dispatch of tokens to the ranks of their experts is a strategy with local code of its own (the
plugin `moe`).
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import all_gather, axis_index, keep_first
from colofunc.ops.experts import Interleaved
from colofunc.ops.experts import expert_position as position_op
from colofunc.ops.experts_parts import EXPERTS, EXPERTS_BACKWARD, INPUT_GRADIENTS, WEIGHT_GRADIENTS
from colofunc.spec.layout import Dim, Layout, axes_of
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import LocalCode, LocalFn, StrategyFn, Texts, at, bind, names
from colofunc.spec.rules.local import rerun, strides
from colofunc.spec.rules.opened import Split, opened
from colofunc.spec.rules.pattern import RuleFn, pattern

WHOLE_IN_FLOAT8 = (
    "experts in float8 keep their hidden units whole, because a row of them has one scale; try experts('ep') instead, "
    "or leave experts out "
    "of where= of cf.fp8"
)


def experts(call: Call) -> Rule:
    return _explained(call, _rule(call, 0), 0)


def experts_backward(call: Call) -> Rule:
    return _explained(call, _rule(call, 1), 1)


def experts_input_gradients(call: Call) -> Rule:
    return _rule(call, 1)


def experts_weight_gradients(call: Call) -> Rule:
    return _rule(call, 3)


def _explained(call: Call, rule: Rule, x: int) -> Rule:
    return attrs.evolve(rule, why_whole=WHOLE_IN_FLOAT8) if _in_float8(call, x) else rule


def _rule(call: Call, x: int) -> Rule:
    """`x`: where the operand x stands; before it is the gradient of the result, if any, and what of the hidden units is
    given.
    """
    gated, transposed = bool(call.arg(x + 8, "gated", True)), bool(call.arg(x + 9, "transposed", False))
    batch = " ".join(names("b", len(call.ins[x].shape) - 1))
    gub, db = at(call, x + 5, "gate_up_bias"), at(call, x + 6, "down_bias")
    interleaved = Interleaved.of(str(call.arg(x + 7, "act"))) is not None
    float8 = _in_float8(call, x)
    # In float8 a row of hidden units has one scale, so that it is whole.
    f = "[f]" if float8 else "f"
    up, tokens, choices = f, f"{batch} [d]", f"{batch} [k]"
    if gated:
        up = f"({f} [c])" if interleaved else f"([c] {f})"
    weights = (f"e [d] {up}", f"e {f} [d]") if transposed else (f"e {up} [d]", f"e [d] {f}")
    texts: Texts = {
        x: tokens,
        x + 1: choices,
        x + 2: choices,
        x + 3: weights[0],
        x + 4: weights[1],
        gub: f"e {up}",
        db: "e [d]",
    }
    # choices times d times f
    size = round(_share(call, x) * prod(call.ins[x + 1].shape)) * prod(call.ins[x + 4].shape[1:])
    c = 2 if gated else 1
    sizes = {"c": 2} if gated else None
    if not x:
        # Rounding is not linear, and only what weighs the results of experts is not rounded.
        linear: list[set[int | None]] = [{2}] if float8 else [{2}, {x + 4, db}]
        return bind(
            call, texts, [tokens], reduce={"e": "sum", "f": "sum"}, linear=linear, local=_code(x, db),
            flops=2 * size * (c + 1), sizes=sizes,
        )  # fmt: skip
    batch_factors = names("b", len(call.ins[x].shape) - 1)
    free = [*batch_factors, "e", "f"]
    sums = dict.fromkeys(free, "sum")
    hidden, units = f"{choices} {up}", f"{choices} {f}"
    if call.target == INPUT_GRADIENTS:
        return bind(
            call, {0: tokens, **texts}, [tokens, choices, hidden, units], reduce={"e": "sum", "f": "sum"},
            local=_code(x, db), flops=2 * size * (2 * c + 1), sizes=sizes,
        )  # fmt: skip
    needed = call.target == WEIGHT_GRADIENTS or bool(call.arg(x + 10, "need_weights", True))
    grads = [weights[0], weights[1], f"e {up}", "e [d]"]
    before = [] if call.target == WEIGHT_GRADIENTS else [tokens, choices]
    outs: list[str] = []
    absent: list[tuple[int, str]] = []  # (result, factor): a gradient that is not wanted is empty, and depends on none
    for text, operand in zip(grads, (x + 3, x + 4, gub, db), strict=True):
        if needed and operand is not None:
            outs.append(text)
        else:
            absent += [(len(before) + len(outs), factor) for factor in free]
            outs.append("[z]")
    copied = [*absent, (len(before) + 3, "f")]
    if call.target == WEIGHT_GRADIENTS:
        return bind(
            call, {0: hidden, 1: units, 2: tokens, **texts}, outs, reduce=sums, linear=[{0, 2}], copied=copied,
            local=_code(x, db), flops=2 * size * (c + 1), sizes=sizes,
        )  # fmt: skip
    return bind(
        call, {0: tokens, **texts}, [*before, *outs], reduce=sums, linear=[] if float8 else [{0}],
        copied=copied, local=_code(x, db), flops=2 * size * (3 * c + 2), sizes=sizes,
    )  # fmt: skip


def _share_at(call: Call, x: int) -> int:
    return x + 11 if call.target == EXPERTS_BACKWARD else x + 10  # behind `need_weights`, which that alone has


def _in_float8(call: Call, x: int) -> bool:
    return bool(call.arg(_share_at(call, x) + 1, "float8", False))


def _share(call: Call, x: int) -> float:
    """The part of the choices that is expected to have an expert here."""
    return float(call.arg(_share_at(call, x), "share", 1.0))


def _code(x: int, db: int | None) -> LocalCode:
    def code(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> LocalFn | None:
        mine = ins[x + 3].dims[0]
        expert_axes = axes_of(mine)
        shifted = bool(expert_axes)
        on_f: list[str] = []  # axes that split the hidden units of experts
        if db is not None:
            on_f = [axis for axis in ins[x + 4].axes if axis not in expert_axes]
        if not shifted and not on_f:
            return None

        def local(*shards: torch.Tensor, mesh: Mesh) -> object:
            changes: dict[tuple[int, str], object] = {}
            if shifted:
                changes[x + 1, "index"] = local_expert(shards[x + 1], mine, mesh)
                ranks = prod(size for size, axis in mine if axis is not None)
                changes[_share_at(call, x), "share"] = _share(call, x) / ranks
            if on_f and db is not None:  # ranks with parts of f add up, and the bias counts once
                changes[x + 6, "down_bias"] = keep_first(shards[db], on_f, mesh)
            return rerun(call, shards, changes)

        return local

    return code


def local_expert(index: torch.Tensor, dim: Dim, mesh: Mesh) -> torch.Tensor:
    """Indices of experts among those of this rank, which lie as `dim` says; -1 for those of other ranks."""
    here = torch.zeros_like(index)
    mine = index >= 0
    rest = 1
    for (size, axis), far in reversed(list(zip(dim, strides(dim), strict=True))):
        digit = torch.div(index, far, rounding_mode="floor") % size
        if axis is None:
            here = here + digit * rest
            rest *= size
        else:
            mine = mine & (digit == axis_index((axis,), mesh))
    return torch.where(mine & (index < prod(size for size, _ in dim)), here, -1)


# ---- places in queues ----


def expert_position(call: Call) -> Rule:
    text = " ".join(f"[{b}]" for b in names("b", len(call.ins[0].shape)))
    return bind(call, {0: text}, [text])


def _split_queues(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    """Tokens split over dim 0: a rank's queues begin where those of the ranks before it end."""
    count = int(call.arg(1, "experts"))
    if len(call.ins[0].shape) != 2:
        return

    def code(call: Call, split: Split) -> LocalFn:
        def local(index: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            chosen = (index.reshape(-1, 1) == torch.arange(count)).sum(0)  # (e,)
            others = all_gather(chosen, split.axes, mesh)  # (ranks, e)
            before = torch.arange(others.shape[0]) < axis_index(split.axes, mesh)
            first = (others * before.unsqueeze(1)).sum(0)
            place = position_op(index, count)
            return torch.where(place >= 0, place + first[index.clamp(0, count - 1)], -1)

        return local

    yield from opened(call, mesh, expert_position(call), ["b0"], code, lambda call, split: 8.0 * count)


def _grouped(text: str, **more: Any) -> RuleFn:
    """The rule of a grouped product: each row is multiplied with one expert's matrix."""
    without_flops = pattern(text, linear=[{0}, {1}], **more)

    def rule(call: Call) -> Rule | None:
        found = without_flops(call)
        return found and attrs.evolve(found, flops=2 * prod(found.sizes[factor] for factor in "sio"))

    return rule


RULES: dict[str, RuleFn] = {
    "colofunc.grouped_mm": _grouped("[s] i, [e] i o, [e] -> [s] o", reduce={"i": "sum"}),
    "colofunc.grouped_mm_dw": _grouped("[s] i, [s] o, [e] -> [e] i o"),
    EXPERTS: experts,
    EXPERTS_BACKWARD: experts_backward,
    INPUT_GRADIENTS: experts_input_gradients,
    WEIGHT_GRADIENTS: experts_weight_gradients,
    "colofunc.expert_position": expert_position,
}
STRATEGIES: dict[str, StrategyFn] = {"colofunc.expert_position": _split_queues}
