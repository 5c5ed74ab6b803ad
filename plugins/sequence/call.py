"""One call of attention or of its backward, as the strategies of this plugin look at it.

    colofunc.attention            q, k, v, bias, options            -> out, lse
    colofunc.attention_backward   grad, q, k, v, bias, out, lse, options -> dq, dk, dv, dbias

Both have the same factors: batch b, key heads g, query heads of a group r, rows s, columns t. `Attention` finds operands
by name; local code works on a dict of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

import colofunc as cf

Own = Mapping[str, str]
Changes = dict[tuple[int, str], Any]
Parts = dict[str, torch.Tensor]  # operands by name, as a rank has them
FORWARD, BACKWARD = "colofunc.attention", "colofunc.attention_backward"
TARGETS = (FORWARD, BACKWARD)
# Arguments in their order; tensors in front of the options.
_TENSORS = {FORWARD: ("q", "k", "v", "bias"), BACKWARD: ("grad", "q", "k", "v", "bias", "out", "lse")}
_OPTIONS = ("scale", "causal", "window", "dropout", "seed", "site", "q_offset", "k_offset", "sizes", "strides", "offset")
_LAST = ("need_dbias", "grad_lse")
_DEFAULTS: dict[str, Any] = {"causal": False, "window": 0, "dropout": 0.0, "sizes": (), "strides": (), "need_dbias": False}
_ROWS = ("q", "grad", "out", "lse", "grad_lse")


@attrs.frozen
class Attention:
    """A view of a call: arguments by name, `at` their positions, `operand` their number among its tensors."""

    call: Any
    at: Mapping[str, int]

    @staticmethod
    def of(call: Any) -> Attention:
        names = (*_TENSORS[call.target], *_OPTIONS, *(_LAST if call.target == BACKWARD else ()))
        return Attention(call, {name: k for k, name in enumerate(names)})

    @property
    def backward(self) -> bool:
        return bool(self.call.target == BACKWARD)

    def get(self, name: str) -> Any:
        return self.call.arg(self.at[name], name, _DEFAULTS.get(name)) if name in self.at else None

    def operand(self, name: str) -> int | None:
        """Its number among the tensor operands; None where it is not given."""
        found = self.get(name)
        return found.id if found is not None and hasattr(found, "id") else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        k = self.operand(name)
        return None if k is None else self.call.ins[k].shape

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the factors."""
        (b, h, s, _), (_, g, t, _) = self.shape("q") or (), self.shape("k") or ()
        return {"b": b, "g": g, "r": h // g, "s": s, "t": t}

    @property
    def positional(self) -> bool:
        return bool(self.get("causal")) or bool(self.get("window"))

    @property
    def placed(self) -> bool:
        """Whether the call is about a part of larger weights already."""
        return bool(self.get("sizes")) or self.operand("offset") is not None

    @property
    def needs_dbias(self) -> bool:
        return bool(self.backward and self.get("need_dbias") and self.operand("bias") is not None)

    def bias_has(self, dim: int) -> bool:
        """Whether the bias has dim -4 .. -1 of its own (is not broadcast along it)."""
        shape = self.shape("bias")
        return shape is not None and len(shape) >= -dim and shape[dim] > 1

    def own(self, rows: Own, columns: Own) -> tuple[list[Own], list[Own]]:
        """Per operand and per result, where the axes lie that split rows and columns (for `cf.ways`)."""
        named = {**dict.fromkeys(_ROWS, rows), "k": columns, "v": columns}
        if self.shape("q_offset"):
            named["q_offset"] = rows
        if self.bias_has(-2):
            named["bias"] = rows
        ins: list[Own] = [{} for _ in self.call.ins]
        for name, own in named.items():
            k = self.operand(name)
            if k is not None:
                ins[k] = own
        bias = rows if self.bias_has(-2) and self.get("need_dbias") else {}
        return ins, [rows, columns, columns, bias] if self.backward else [rows, rows]

    def change(self, **values: Any) -> Changes:
        """Arguments by name, as `cf.local.rerun` takes them."""
        return {(self.at[name], name): value for name, value in values.items()}

    def parts(self, shards: Sequence[torch.Tensor]) -> Parts:
        return {name: shards[k] for name in self.at if (k := self.operand(name)) is not None}

    def run(self, parts: Parts, changes: Changes) -> Any:
        """The operator itself on local parts, with some options replaced."""
        mine = {self.operand(name): part for name, part in parts.items()}
        return cf.local.rerun(self.call, [mine[k] for k in range(len(self.call.ins))], changes)
