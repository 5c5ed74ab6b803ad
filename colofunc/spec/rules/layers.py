"""Layers of their own kind. Weight normalisation: one length per index of a dim, the others whole. Recurrent layers:
the sequence and the hidden units are whole, samples are free.

    _weight_norm_interface          c [x0], c 1 -> c [x0], c 1
    renorm (dim 0)                  c [x0] -> c [x0]
    lstm             [s] b [g], b [h], b [h], [g] [h] -> [s] b [h], b [h], [s] b [h], [s] b [g]
    lstm_backward    [s] b [h], b [h], b [h], [g] [h], [s] b [h], [s] b [g] -> [s] b [g], b [h], b [h]
"""

from __future__ import annotations

import torch

from colofunc.mesh import Mesh
from colofunc.spec.layout import Layout
from colofunc.spec.rule import Call, Rule
from colofunc.spec.rules.build import LocalFn, Texts, bind
from colofunc.spec.rules.local import rerun
from colofunc.spec.rules.pattern import RuleFn, wrap


def _norm_texts(call: Call, index: int) -> tuple[str, str]:
    """(text of the direction v, text of the length g): one length per index of `dim`."""
    rank = len(call.ins[0].shape)
    dim = wrap(call.arg(index, "dim", 0), rank)
    v = " ".join("c" if d == dim else f"[x{d}]" for d in range(rank))
    return v, " ".join("c" if d == dim else "1" for d in range(rank))


def _dense(call: Call, ins: tuple[Layout, ...], outs: tuple[Layout | None, ...]) -> LocalFn | None:
    """torch's CPU kernels read v as if its memory were dense, which a striped part need not be."""
    if not ins[0].axes:
        return None

    def local(*shards: torch.Tensor, mesh: Mesh) -> object:
        return rerun(call, [x.clone(memory_format=torch.contiguous_format) for x in shards], {})

    return local


def weight_norm(call: Call) -> Rule | None:
    if len(call.ins[0].shape) != len(call.ins[1].shape):
        return None
    v, g = _norm_texts(call, 2)
    return bind(call, {0: v, 1: g}, [v, g], local=_dense)


def weight_norm_backward(call: Call) -> Rule | None:
    if len(call.ins[0].shape) != len(call.ins[2].shape):
        return None
    v, g = _norm_texts(call, 4)
    return bind(call, {0: v, 1: v, 2: g, 3: g}, [v, g], linear=[{0}], local=_dense)


def renorm(call: Call) -> Rule:
    v, _ = _norm_texts(call, 2)
    return bind(call, {0: v}, [v])


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


RULES: dict[str, RuleFn] = {
    "aten._weight_norm_interface": weight_norm,
    "aten._weight_norm_interface_backward": weight_norm_backward,
    "aten.renorm": renorm,
    "colofunc.lstm": lstm,
    "colofunc.lstm_backward": lstm_backward,
}
