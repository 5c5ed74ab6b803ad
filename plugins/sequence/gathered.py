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
from colofunc_plugins.sequence.pattern import Parts, Pattern

import colofunc as cf


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
            sums = n * self.block_bytes(cf.local.wide(a.dtype))
            extra_s += self.mesh.collective_s("reduce_scatter", sums, (self.axis,))
            peak_bytes += 2 * sums
        return flops * (2 - 1 / n if late else 1), extra_s, peak_bytes

    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        over, widths = (2, self.axis, self.mesh, self.striped), [x["k"].shape[-1], x["v"].shape[-1]]
        k, v = cf.local.gathered(torch.cat([x["k"], x["v"]], -1), *over).split(widths, -1)
        found = self.over_all({**x, "k": k, "v": v})
        if not self.attention.backward:
            return found
        dq, dk, dv, dbias = found
        mine = cf.local.scattered(torch.cat([dk, dv], -1).to(cf.local.wide(dk.dtype)), *over)
        return dq, *mine.to(dk.dtype).split(widths, -1), dbias
