"""What the patterns of attention over a split sequence have in common: layouts, positions, how a strategy is made.

    rows `cp s`, columns `cp t`     contiguous: rank i has positions i m ... (i + 1) m
    rows `s cp`, columns `t cp`     striped: rank i has positions i, n + i, 2 n + i, ...

A pattern may stand between exchanges over a second axis (`Heads`): what it sees then are some heads of more rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.heads import Heads, Parts

import colofunc as cf


@attrs.frozen
class Pattern(ABC):
    """One way to run one call: over `axis`, `way` says how the other axes are placed, `heads` is the exchange around it."""

    attention: cf.AttentionCall
    mesh: cf.Mesh
    axis: str
    striped: bool
    way: cf.Strategy
    heads: Heads | None = None

    @property
    @abstractmethod
    def word(self) -> str:
        """What plans call it; "" where it does nothing over an axis."""

    @abstractmethod
    def price(self, flops: float) -> tuple[float, float, float]:
        """(flops, seconds of communication, peak bytes) of one rank, given its fair share of flops."""

    @abstractmethod
    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        """out, lse of a rank's rows; backward dq, dk, dv, dbias of its rows and columns."""

    def strategy(self) -> cf.Strategy:
        a, heads, outs = self.attention, self.heads, self.way.outs
        words = [(self.axis, self.word)] if self.word else []
        words += [] if heads is None else [(heads.axis, "heads")]
        if a.needs_dbias and not a.bias_has(-2):  # a bias that all rows share: each rank has the gradient from its own rows
            *rest, bias = outs
            assert bias is not None
            outs = (*rest, bias.with_pending((*bias.pending, *((axis, "sum") for axis, _ in words))))
        flops, extra_s, peak_bytes = self.price(self.way.cost.flops * (1 if heads is None else heads.padding))
        if heads is not None:
            wires = heads.wires()
            extra_s += sum(self.mesh.collective_s("all_to_all", nbytes, (heads.axis,)) for nbytes in wires)
            peak_bytes += sum(wires)
        return self.way.with_pattern(words, partial(_local, self), flops=flops, extra_s=extra_s, peak_bytes=peak_bytes, outs=outs)

    # ---- layouts, inside the exchange ----

    @property
    def n(self) -> int:
        return self.mesh.axis_size(self.axis)

    def layout(self, name: str) -> cf.Layout:
        return self.attention.layout(name, self.way)

    def lies(self, name: str) -> Any:
        """How rows (of "q") or columns (of "k") lie."""
        layout = self.layout(name)
        return (layout if self.heads is None else layout.without((self.heads.axis,))).dims[2]

    def block_bytes(self, dtype: torch.dtype | None = None) -> float:
        """A rank's keys and values; or their gradients while they are summed, in another dtype."""
        numel = self.layout("k").local_numel + self.layout("v").local_numel
        return numel * (dtype or self.attention.dtype).itemsize * (1 if self.heads is None else self.heads.copies)

    # ---- running the operator ----

    @property
    def dims(self) -> tuple[Any, ...]:
        """How b, h and s lie."""
        return (*self.layout("q").dims[:2], self.lies("q"))

    def run(self, x: Parts, options: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """The operator on some rows and columns."""
        found: tuple[torch.Tensor, ...] = self.attention.run(x, options if self.heads is None else self.heads.placed(options))
        return found

    def over_all(self, x: Parts) -> tuple[torch.Tensor, ...]:
        """The operator on a rank's rows and all columns, in their order."""
        return self.run(x, self.attention.options(self.dims, self.mesh, x))


@attrs.frozen
class Whole(Pattern):
    """Nothing over an axis: what an exchange of heads has between."""

    word = ""

    def price(self, flops: float) -> tuple[float, float, float]:
        return flops, 0.0, 0.0

    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        return self.over_all(x)


def patterns(call: Any, mesh: cf.Mesh, kind: type[Pattern], axis: str, heads: Sequence[str] = ()) -> Iterator[cf.Strategy]:
    """All of a kind over `axis` ("": none), contiguous and striped: alone, and with heads exchanged over one of `heads`."""
    attention = cf.AttentionCall(call)
    if attention.placed or attention.shape("k_offset") or len(attention.shape("q") or ()) != 4:
        return
    around = [*([""] if axis else []), *(u for u in heads if mesh.axis_size(u) > 1)]
    for striped, other in product((False, True) if axis else (False,), around):
        rows, columns = ({f: f"{other} {f} {axis}" if striped else f"{axis} {other} {f}"} for f in "st")
        for way in cf.ways(call, mesh, *attention.own(rows, columns)):
            exchange = Heads(attention, mesh, other, way) if other else None
            if exchange is None or exchange.fits:
                yield kind(attention, mesh, axis, striped, way, exchange).strategy()


def _local(pattern: Pattern, *shards: torch.Tensor, mesh: cf.Mesh) -> tuple[torch.Tensor, ...]:
    x, heads = pattern.attention.parts(shards), pattern.heads
    return pattern.attend(x) if heads is None else heads.back(pattern.attend(heads.there(x)), x)
