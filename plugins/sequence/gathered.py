"""Gathered keys: every rank gathers keys and values, works on its own rows, and gathers them anew for backward.

    forward    all-gather K, V        attention of my rows over all columns
    backward   all-gather K, V again  dK, dV of my rows over all columns, reduce-scatter

One collective in place of n - 1 hops, and the whole keys of one layer at a time in memory: the pattern for groups of
few key heads, short sequences or many small ranks. Nothing gathered is kept for backward.

Source: context parallelism of Llama 3 (2407.21783), section 3.3.2.
"""

from __future__ import annotations

import torch

import colofunc as cf


class Gathered(cf.ext.AttentionPattern):
    """Keys gathered over one axis."""

    words = "gathered", "gathered striped"

    def price(self, flops: float) -> tuple[float, float, float]:
        call = self.attention
        keys_bytes = self.n * self.block_bytes()
        extra_s = self.mesh.collective_s("all_gather", keys_bytes, (self.axis,))
        peak_bytes = 2 * keys_bytes
        if call.backward:
            sums_bytes = self.n * self.block_bytes(cf.ext.local.wide(call.dtype))
            extra_s += self.mesh.collective_s("reduce_scatter", sums_bytes, (self.axis,))
            peak_bytes += 2 * sums_bytes
        return flops * self.busiest, extra_s, peak_bytes

    def attend(self, x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        over = (2, self.axis, self.mesh, self.striped)
        found = self.over_all(x, cf.ext.local.gathered(self.keys(x), *over))
        if not self.attention.backward:
            return found
        dq, dk, dv, dbias = found
        return dq, *self.apart(cf.ext.local.scattered(self.key_grads(dk, dv), *over), x), dbias
