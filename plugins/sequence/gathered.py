"""Gathered keys: every rank gathers keys and values, works on its own rows, and gathers them anew for backward.

    forward    all-gather K, V        attention of my rows over all columns
    backward   all-gather K, V again  dK, dV of my rows over all columns, reduce-scatter

One collective in place of n - 1 hops, and the whole keys of one layer at a time in memory: the pattern for groups of few
key heads, short sequences or many small ranks. Nothing gathered is kept for backward.

Source: context parallelism of Llama 3 (2407.21783), section 3.3.2.
"""

from __future__ import annotations

import attrs
import torch
from colofunc_plugins.sequence.call import Parts
from colofunc_plugins.sequence.heads import wide
from colofunc_plugins.sequence.pattern import Pattern

from colofunc import collectives


@attrs.frozen
class Gathered(Pattern):
    """Keys gathered over one axis."""

    @property
    def word(self) -> str:
        return "gathered striped" if self.striped else "gathered"

    def price(self, flops: float) -> tuple[float, float, float]:
        a, n, keys = self.attention, self.n, self.block_bytes()
        late = a.get("causal") and not a.get("window") and not self.striped
        extra_s, peak_bytes = self.mesh.collective_s("all_gather", n * keys, (self.axis,)), 2 * n * keys
        if a.backward:
            sums = n * self.block_bytes(wide(self.dtype))
            extra_s += self.mesh.collective_s("reduce_scatter", sums, (self.axis,))
            peak_bytes += 2 * sums
        return flops * (2 - 1 / n if late else 1), extra_s, peak_bytes

    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        order, widths = "(m n)" if self.striped else "(n m)", [x["k"].shape[-1], x["v"].shape[-1]]
        every = collectives.all_gather(torch.cat([x["k"], x["v"]], -1), self.axis, self.mesh)
        k, v = collectives.rearrange(every, f"n b g m e -> b g {order} e").split(widths, -1)
        found: tuple[torch.Tensor, ...] = self.over_all({**x, "k": k, "v": v})
        if not self.attention.backward:
            return found
        dq, dk, dv, dbias = found
        parts = collectives.rearrange(torch.cat([dk, dv], -1).to(wide(dk.dtype)), f"b g {order} e -> n b g m e", n=self.n)
        mine_k, mine_v = collectives.reduce_scatter(parts, self.axis, self.mesh).to(dk.dtype).split(widths, -1)
        return dq, mine_k, mine_v, dbias
