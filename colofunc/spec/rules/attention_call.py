"""One call of attention or of its backward, as its rule and patterns over a split sequence look at it.

    colofunc.attention            q, k, v, bias, options                     -> out, lse
    colofunc.attention_backward   grad_out, q, k, v, bias, out, lse, options -> dq, dk, dv, dbias

Both have the same factors: batch b, key heads g, query heads of a group r, rows s, columns t. Arguments are found by
the names of the operator's schema; local code works on a dict of operands.

    a = cf.ext.AttentionCall(call)
    a.sizes["t"], a.get("causal"), a.operand("bias")
    x = a.parts(shards)                                     # {"q": ..., "k": ..., "v": ...} of one rank
    a.run(x, a.options(layout.dims, mesh, x))               # the operator on its rows, of which it is told where they stand
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.targets import overload
from colofunc.spec.layout import Dim, Layout
from colofunc.spec.rule import Call, Ref, Strategy
from colofunc.spec.rules.local import FirstPosition, place_of, positions, rerun

__all__ = ["AttentionCall"]

NamedOperands = dict[str, torch.Tensor]  # operands by name, as a rank has them
OwnAxes = Mapping[str, str]
_ROWS = ("q", "grad_out", "out", "lse", "grad_lse")  # operands with the factor s


@cache
def _arguments(target: str) -> Mapping[str, tuple[int, Any]]:
    """Name -> (position, default) of an operator's arguments."""
    return {a.name: (k, a.default_value) for k, a in enumerate(overload(target)._schema.arguments)}


@attrs.frozen
class AttentionCall:
    """A view of a call, for rules, strategies and local code."""

    FORWARD: ClassVar[str] = "colofunc.attention"
    BACKWARD: ClassVar[str] = "colofunc.attention_backward"
    TARGETS: ClassVar[tuple[str, ...]] = (FORWARD, BACKWARD)

    call: Call

    # ---- arguments ----

    @property
    def backward(self) -> bool:
        """Whether this is the backward call."""
        return self.call.target == self.BACKWARD

    def get(self, name: str) -> Any:
        """An argument; None where the operator has none of this name."""
        place = _arguments(self.call.target).get(name)
        return None if place is None else self.call.arg(place[0], name, place[1])

    def operand(self, name: str) -> int | None:
        """Its number among the tensor operands; None where it is not given."""
        found = self.get(name)
        return found.id if isinstance(found, Ref) else None

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor, all of it; None where it is not given."""
        k = self.operand(name)
        return None if k is None else self.call.ins[k].shape

    def layout(self, name: str, way: Strategy) -> Layout:
        """How a tensor that is given lies in one way to run the call."""
        k = self.operand(name)
        assert k is not None, name
        return way.ins[k]

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        k = self.operand("k")
        assert k is not None
        return self.call.ins[k].dtype

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the factors."""
        (b, h, s, _), (_, g, t, _) = self.shape("q") or (), self.shape("k") or ()
        return {"b": b, "g": g, "r": h // g, "s": s, "t": t}

    @property
    def positional(self) -> bool:
        """Whether positions of rows and columns count."""
        return bool(self.get("causal")) or bool(self.get("window"))

    @property
    def placed(self) -> bool:
        """Whether the call is about a part of larger weights already."""
        return bool(self.get("sizes")) or self.operand("offset") is not None

    @property
    def needs_dbias(self) -> bool:
        """Whether a bias is there whose gradient is wanted."""
        return bool(self.get("need_dbias")) and self.operand("bias") is not None

    def bias_has(self, dim: int) -> bool:
        """Whether the bias has dim -4 .. -1 of its own (is not broadcast along it)."""
        shape = self.shape("bias")
        return shape is not None and len(shape) >= -dim and shape[dim] > 1

    def own(self, rows: OwnAxes, columns: OwnAxes) -> tuple[list[OwnAxes], list[OwnAxes]]:
        """Per operand and per result, where the axes lie that split rows and columns (for `cf.ext.ways`)."""
        named = {**dict.fromkeys(_ROWS, rows), "k": columns, "v": columns}
        for name in ("least", "most", *(["q_offset"] if self.shape("q_offset") else [])):
            named[name] = rows
        bias = rows if self.bias_has(-2) else {}
        at = {self.operand(name): own for name, own in {**named, "bias": bias}.items()}
        ins: list[OwnAxes] = [at.get(k, {}) for k in range(len(self.call.ins))]
        return ins, [rows, columns, columns, bias if self.needs_dbias else {}] if self.backward else [rows, rows]

    # ---- local code ----

    def parts(self, shards: Sequence[torch.Tensor]) -> NamedOperands:
        """A rank's tensors by name."""
        names = _arguments(self.call.target)
        return {name: shards[k] for name in names if (k := self.operand(name)) is not None}

    def run(self, parts: NamedOperands, options: Mapping[str, Any]) -> Any:
        """The operator itself on a rank's tensors, with some options replaced (by name)."""
        names = _arguments(self.call.target)
        mine = {self.operand(name): part for name, part in parts.items()}
        changes = {(names[name][0], name): value for name, value in options.items()}
        return rerun(self.call, [mine[k] for k in range(len(self.call.ins))], changes)

    def options(
        self,
        dims: Sequence[Dim],
        mesh: Mesh,
        x: NamedOperands,
        columns: Dim | None = None,
        at: Mapping[str, torch.Tensor] | None = None,
    ) -> dict[str, Any]:
        """Options that say to the operator which part of the weights (b, h, s, t) a rank's tensors are about.

        `dims`: how b, h and s lie. `columns`: how t lies, of the ranks whose index along some axes is `at`; None: all
        columns.
        """
        found: dict[str, Any] = {}
        if self.positional and (columns is not None or any(axis is not None for _, axis in dims[2])):
            found["q_offset"] = (
                x["q_offset"] if self.shape("q_offset") else _from(x.get("q_offset"), positions(dims[2], mesh))
            )
            if columns is not None:
                found["k_offset"] = _from(x.get("k_offset"), positions(columns, mesh, at))
        return found | self.dropped(dims, mesh, columns, at)

    def dropped(
        self, dims: Sequence[Dim], mesh: Mesh, columns: Dim | None = None, at: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, Any]:
        """Those of them that dropout needs: the place of the part in the row-major order of all weights."""
        if not self.get("dropout"):
            return {}
        (b, h, s, _), t = self.shape("q") or (), self.sizes["t"]
        sizes, strides, offset = place_of(dims[:3], (b, h, s, t), mesh)
        more, steps, start = place_of([columns or ((t, None),)], (t,), mesh, at)
        return {"sizes": [*sizes, *more], "strides": [*strides, *steps], "offset": _from(None, offset + start)}


def _from(given: torch.Tensor | None, start: FirstPosition) -> torch.Tensor:
    if given is not None:
        return given + start
    return start if isinstance(start, torch.Tensor) else torch.full((), start)
