"""What the patterns of attention over a split sequence have in common: layouts, positions, how a strategy is made.

    rows `cp s`, columns `cp t`     contiguous: rank i has positions i m ... (i + 1) m
    rows `s cp`, columns `t cp`     striped: rank i has positions i, n + i, 2 n + i, ...
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.call import Attention, Changes

import colofunc as cf


@attrs.frozen
class Pattern(ABC):
    """One way to run one call: over `axis`, `way` says how the other axes are placed. `forward`, `backward` are local code."""

    attention: Attention
    mesh: cf.Mesh
    axis: str
    striped: bool
    way: cf.Strategy

    @property
    @abstractmethod
    def word(self) -> str:
        """What plans call it."""

    @property
    def fits(self) -> bool:
        """Whether it is for a call of these sizes."""
        return True

    @abstractmethod
    def cost(self) -> cf.Cost:
        """Of one rank."""

    @abstractmethod
    def forward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """out, lse of this rank's rows."""

    @abstractmethod
    def backward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv, dbias of this rank's rows and columns."""

    def strategy(self) -> cf.Strategy:
        outs = self.way.outs
        if self.sums_bias:
            *rest, bias = outs
            assert bias is not None
            outs = (*rest, bias.with_pending(tuple(sorted((*bias.pending, (self.axis, "sum"))))))
        words = ", ".join(filter(None, (f"{self.axis}: {self.word}", self.way.name.strip("{}"))))
        local = partial(_without_mesh, self.backward if self.attention.backward else self.forward)
        axes = ((self.axis, self.word), *self.way.axes)
        return attrs.evolve(self.way, name=f"{{{words}}}", outs=outs, local=local, cost=self.cost(), axes=axes)

    # ---- layouts ----

    @property
    def n(self) -> int:
        return self.mesh.axis_size(self.axis)

    def layout(self, name: str) -> cf.Layout:
        k = self.attention.operand(name)
        assert k is not None
        return self.way.ins[k]

    @property
    def rows(self) -> Any:
        return self.layout("q").dims[2]

    @property
    def columns(self) -> Any:
        return self.layout("k").dims[2]

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = self.attention.call.ins[self.attention.operand("k")].dtype
        return found

    @property
    def block_bytes(self) -> int:
        """A rank's keys and values."""
        return (self.layout("k").local_numel + self.layout("v").local_numel) * self.dtype.itemsize

    @property
    def wide_bytes(self) -> int:
        """Their gradients while they are summed."""
        return self.block_bytes // self.dtype.itemsize * wide(self.dtype).itemsize

    @property
    def sums_bias(self) -> bool:
        """A bias that all rows share: each rank has the gradient from its own rows."""
        a = self.attention
        return bool(a.backward and a.get("need_dbias") and a.operand("bias") is not None and not a.bias_has(-2))

    # ---- parts ----

    def tensors(self, shards: Sequence[torch.Tensor], names: str = "qkv") -> list[torch.Tensor]:
        return [shards[self.attention.operand(name) or 0] for name in names]

    def row_positions(self, rows: Any, shards: Sequence[torch.Tensor]) -> torch.Tensor | int:
        """Global positions of a rank's rows, from what the call says of them."""
        given = self.attention.operand("q_offset")
        if given is None:
            return cf.local.positions(rows, self.mesh)
        return shards[given] if self.attention.shape("q_offset") else shards[given] + cf.local.positions(rows, self.mesh)

    def column_positions(self, columns: Any, shards: Sequence[torch.Tensor], at: Mapping[str, torch.Tensor]) -> torch.Tensor:
        given = self.attention.operand("k_offset")
        start = cf.local.positions(columns, self.mesh, at)
        return scalar(start) if given is None else shards[given] + start

    def dropout(self, rows: Any, columns: Any, at: Mapping[str, torch.Tensor] | None = None) -> Changes:
        """Where a rank's part lies in the (b, h, s, t) weights that dropout counts; `at`: whose columns they are."""
        a, q = self.attention, self.layout("q")
        if not a.get("dropout"):
            return {}
        shape = (*q.shape[:3], self.layout("k").shape[2])
        sizes, strides, offset = cf.local.place_of([*q.dims[:2], rows], shape, self.mesh)
        more, steps, start = cf.local.place_of([columns], shape[3:], self.mesh, at)
        return a.change(sizes=[*sizes, *more], strides=[*strides, *steps], offset=scalar(offset + start))


def patterns(call: Any, mesh: cf.Mesh, axis: str, kind: type[Pattern], stripes: bool = True) -> Iterator[cf.Strategy]:
    """All of a kind over one axis: contiguous and, where `stripes`, striped."""
    attention, n = Attention.of(call), mesh.axis_size(axis)
    if n == 1 or attention.placed or attention.shape("k_offset") or len(attention.shape("q") or ()) != 4:
        return
    for striped in (False, True) if stripes else (False,):
        rows, columns = ({f: f"{f} {axis}" if striped else f"{axis} {f}"} for f in "st")
        for way in cf.ways(call, mesh, *attention.own(rows, columns)):
            pattern = kind(attention, mesh, axis, striped, way)
            if pattern.fits:
                yield pattern.strategy()


def scalar(x: torch.Tensor | int) -> torch.Tensor:
    """A number as a tensor, made inside the local code."""
    return x if isinstance(x, torch.Tensor) else torch.full((), x)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


def _without_mesh(code: Any, *shards: torch.Tensor, mesh: cf.Mesh) -> Any:
    return code(*shards)
