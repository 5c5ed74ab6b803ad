"""Gathered keys: every rank gathers keys and values, works on its own rows, and gathers them anew for backward.

    forward    all-gather K, V        attention of my rows over all columns
    backward   all-gather K, V again  dK, dV of my rows over all columns, reduce-scatter

One collective in place of n - 1 hops, and the whole keys of one layer at a time in memory: the pattern for groups of few
key heads, short sequences or many small ranks. Nothing gathered is kept for backward.

Source: context parallelism of Llama 3 (2407.21783), section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.pattern import Pattern, scalar, wide

import colofunc as cf
from colofunc import collectives


@attrs.frozen
class Gathered(Pattern):
    """Keys gathered over one axis."""

    @property
    def word(self) -> str:
        return "gathered striped" if self.striped else "gathered"

    @property
    def whole(self) -> Any:
        """The columns once gathered, in their global order."""
        return ((self.layout("k").shape[2], None),)

    def cost(self) -> cf.Cost:
        cost, n = self.way.cost, self.n
        late = self.attention.get("causal") and not self.attention.get("window") and not self.striped
        extra_s = self.mesh.collective_s("all_gather", n * self.block_bytes, (self.axis,))
        peak_bytes = 2 * n * self.block_bytes
        if self.attention.backward:
            extra_s += self.mesh.collective_s("reduce_scatter", n * self.wide_bytes, (self.axis,))
            peak_bytes += 2 * n * self.wide_bytes
        return attrs.evolve(cost, flops=cost.flops * (2 - 1 / n if late else 1), extra_s=extra_s, peak_bytes=peak_bytes)

    def run(self, shards: Sequence[torch.Tensor]) -> Any:
        _, k, v = self.tensors(shards)
        every = collectives.all_gather(torch.cat([k, v], -1), self.axis, self.mesh)
        order = "(m n)" if self.striped else "(n m)"
        k, v = collectives.rearrange(every, f"n b g m e -> b g {order} e").split([k.shape[-1], v.shape[-1]], -1)
        changes = self.dropout(self.rows, self.whole)
        if self.attention.positional:
            changes |= self.attention.change(q_offset=scalar(self.row_positions(self.rows, shards)))
        return self.attention.run(shards, {"k": k, "v": v}, changes)

    def forward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = self.run(shards)
        return out, lse

    def backward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dq, dk, dv, dbias = self.run(shards)
        order = "(m n)" if self.striped else "(n m)"
        parts = torch.cat([dk, dv], -1).to(wide(dk.dtype))
        mine = collectives.reduce_scatter(
            collectives.rearrange(parts, f"b g {order} e -> n b g m e", n=self.n), self.axis, self.mesh
        )
        mine_k, mine_v = mine.to(dk.dtype).split([dk.shape[-1], dv.shape[-1]], -1)
        return dq, mine_k, mine_v, dbias
