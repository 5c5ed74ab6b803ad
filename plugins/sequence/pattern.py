"""What the patterns of attention over a split sequence have in common: layouts, positions, how a strategy is made.

    rows `cp s`, columns `cp t`     contiguous: rank i has positions i m ... (i + 1) m
    rows `s cp`, columns `t cp`     striped: rank i has positions i, n + i, 2 n + i, ...

A pattern may stand between exchanges over a second axis (`Heads`): what it sees then are some heads of more rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.call import Attention, Changes, Parts
from colofunc_plugins.sequence.heads import Heads

import colofunc as cf


@attrs.frozen
class Pattern(ABC):
    """One way to run one call: over `axis`, `way` says how the other axes are placed, `heads` is the exchange around it."""

    attention: Attention
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
        words = ((self.axis, self.word),) if self.word else ()
        words += () if heads is None else ((heads.axis, "heads"),)
        if a.needs_dbias and not a.bias_has(-2):  # a bias that all rows share: each rank has the gradient from its own rows
            *rest, bias = outs
            assert bias is not None
            outs = (*rest, bias.with_pending(tuple(sorted((*bias.pending, *((axis, "sum") for axis, _ in words))))))
        name = ", ".join(filter(None, (*(f"{axis}: {word}" for axis, word in words), self.way.name.strip("{}"))))
        flops, extra_s, peak_bytes = self.price(self.way.cost.flops * (1 if heads is None else heads.padding))
        if heads is not None:
            wires = heads.wires()
            extra_s += sum(self.mesh.collective_s("all_to_all", nbytes, (heads.axis,)) for nbytes in wires)
            peak_bytes += sum(wires)
        cost = attrs.evolve(self.way.cost, flops=flops, extra_s=extra_s, peak_bytes=int(peak_bytes))
        axes = (*words, *self.way.axes)
        return attrs.evolve(self.way, name=f"{{{name}}}", outs=outs, local=partial(_local, self), cost=cost, axes=axes)

    # ---- layouts, inside the exchange ----

    @property
    def n(self) -> int:
        return self.mesh.axis_size(self.axis)

    def lies(self, name: str) -> Any:
        """How rows (of "q") or columns (of "k") lie."""
        dim = self.layout(name).dims[2]
        return dim if self.heads is None else self.heads.opened(dim)

    def layout(self, name: str) -> cf.Layout:
        k = self.attention.operand(name)
        assert k is not None
        return self.way.ins[k]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.attention.call.ins[self.attention.operand("k")].dtype
        return found

    def block_bytes(self, dtype: torch.dtype | None = None) -> float:
        """A rank's keys and values; or their gradients while they are summed, in another dtype."""
        numel = self.layout("k").local_numel + self.layout("v").local_numel
        return numel * (dtype or self.dtype).itemsize * (1 if self.heads is None else self.heads.copies)

    # ---- positions ----

    def row_positions(self, x: Parts) -> torch.Tensor:
        """Global positions of a rank's rows, from what the call says of them."""
        given = x.get("q_offset")
        if given is not None and self.attention.shape("q_offset"):
            return given
        start = cf.local.positions(self.lies("q"), self.mesh)
        return scalar(start) if given is None else given + start

    def column_positions(self, x: Parts, at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        start = cf.local.positions(self.lies("k"), self.mesh, at)
        return scalar(start) if "k_offset" not in x else x["k_offset"] + start

    def dropout(self, columns: Any, at: Mapping[str, torch.Tensor] | None = None) -> Changes:
        """Where a rank's part lies in the (b, h, s, t) weights that dropout counts; `at`: whose columns they are."""
        a, q = self.attention, self.layout("q")
        if not a.get("dropout"):
            return {}
        shape = (*q.shape[:3], self.layout("k").shape[2])
        sizes, strides, offset = cf.local.place_of([*q.dims[:2], self.lies("q")], shape, self.mesh)
        if self.heads is not None:
            sizes, offset = self.heads.placed(sizes, offset, shape)
        more, steps, start = cf.local.place_of([columns], shape[3:], self.mesh, at)
        return a.change(sizes=[*sizes, *more], strides=[*strides, *steps], offset=scalar(offset + start))

    def over_all(self, x: Parts) -> Any:
        """The operator on a rank's rows and all columns, in their order."""
        changes = self.dropout(((self.layout("k").shape[2], None),))
        if self.attention.positional and any(axis is not None for _, axis in self.lies("q")):
            changes |= self.attention.change(q_offset=self.row_positions(x))
        return self.attention.run(x, changes)


@attrs.frozen
class Whole(Pattern):
    """Nothing over an axis: what an exchange of heads has between."""

    @property
    def word(self) -> str:
        return ""

    def price(self, flops: float) -> tuple[float, float, float]:
        return flops, 0.0, 0.0

    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        found: tuple[torch.Tensor, ...] = self.over_all(x)
        return found


def patterns(call: Any, mesh: cf.Mesh, kind: type[Pattern], axis: str, heads: Sequence[str] = ()) -> Iterator[cf.Strategy]:
    """All of a kind over `axis` ("": none), contiguous and striped: alone, and with heads exchanged over one of `heads`."""
    attention = Attention.of(call)
    if attention.placed or attention.shape("k_offset") or len(attention.shape("q") or ()) != 4:
        return
    around = [*([""] if axis else []), *(u for u in heads if mesh.axis_size(u) > 1)]
    for striped, other in product((False, True) if axis else (False,), around):
        rows, columns = ({f: f"{other} {f} {axis}" if striped else f"{axis} {other} {f}"} for f in "st")
        for way in cf.ways(call, mesh, *attention.own(rows, columns)):
            exchange = Heads(attention, mesh, other, way) if other else None
            if exchange is None or exchange.fits:
                yield kind(attention, mesh, axis, striped, way, exchange).strategy()


def scalar(x: torch.Tensor | int) -> torch.Tensor:
    """A number as a tensor, made inside the local code."""
    return x if isinstance(x, torch.Tensor) else torch.full((), x)


def _local(pattern: Pattern, *shards: torch.Tensor, mesh: cf.Mesh) -> tuple[torch.Tensor, ...]:
    x, heads = pattern.attention.parts(shards), pattern.heads
    return pattern.attend(x) if heads is None else heads.back(pattern.attend(heads.there(x)), x)
