"""Ring attention: every rank keeps its rows of queries, and the blocks of keys and values travel.

    step 0      rank i works on block i            sends it to i + 1
    step j      rank i works on block i - j        results of the blocks are merged by their log-sum-exp

Problem: attention over a split sequence needs every key on every rank, and gathering them makes memory grow with the
sequence. Idea: hold one block at a time. Backward is a second ring: with the merged out and lse each block's gradients
are those of the block alone, so dK and dV travel with their K and V, each rank adds its part (at least float32), and
one last hop brings them home.

Layouts: "ring" holds contiguous blocks, `cp s`. Under a causal mask rank 0 then works on one block and the last on all;
"striped" deals rows round, `s cp`: all ranks see equally many pairs at every step. A causal window needs only the
blocks that it reaches, which contiguous blocks make few: the others are never sent.

The next block's permute stands before the work on the present one, so that executors run both at once.

Source: Ring Attention (2310.01889); Striped Attention (2311.09431); Ring Self-Attention (2105.13120).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

import colofunc as cf
from colofunc import collectives

AttentionResults = tuple[torch.Tensor, ...]


class Ring(cf.ext.AttentionPattern):
    """One ring."""

    words = "ring", "striped"

    @property
    def blocks(self) -> int:
        """How many blocks a rank works on: a causal window reaches only so far back."""
        window = self.attention.get("window")
        if self.striped or not (self.attention.get("causal") and window and self.alike):
            return self.n
        block = self.layout("k").shape[2] // self.n
        return int(min(self.n, (window + block - 2) // block + 1))

    def price(self, flops: float) -> tuple[float, float, float]:
        """The rank with most work decides; what is sent costs time only where work does not hide it."""
        call, blocks = self.attention, self.blocks
        sent = [self.block_bytes()]
        if call.backward:
            sent.append(self.block_bytes(cf.ext.local.wide(call.dtype)))  # dK and dV
        start_s = len(sent) * self._hop_s(1)
        hop_s = sum(self._hop_s(nbytes) for nbytes in sent)
        work_s = self.mesh.compute_s(flops / blocks, 0, str(call.dtype).removeprefix("torch."))
        shown_s = start_s + max(0.0, hop_s - work_s)
        busiest = self.busiest if self.alike else 1
        return flops * busiest, (blocks - 1) * shown_s, 2 * sum(sent)

    def _hop_s(self, nbytes: int) -> float:
        return self.mesh.collective_s("permute", nbytes, (self.axis,))

    def steps(self, x: dict[str, torch.Tensor]) -> Iterator[AttentionResults]:
        """What the operator gives on this rank's rows and the block of keys and values that it has at each step."""
        me = collectives.axis_index(self.axis, self.mesh)
        for step, keys in enumerate(cf.ext.local.passing(self.keys(x), self.blocks, self.axis, self.mesh)):
            yield self.over_block(x, keys, me, torch.remainder(me - step, self.n), own=step == 0)

    def attend(self, x: dict[str, torch.Tensor]) -> AttentionResults:
        return self.backward(x) if self.attention.backward else self.merged(self.steps(x))

    def backward(self, x: dict[str, torch.Tensor]) -> AttentionResults:
        dtype, steps = x["q"].dtype, self.steps(x)
        dq, dk, dv, dbias = next(steps)
        dq = dq.to(cf.ext.local.wide(dtype))
        own, biases = self.key_grads(dk, dv), [dbias]
        home = None  # what other ranks add to dK and dV travels with these; the own part need not go round
        for step, (part, dk, dv, dbias) in enumerate(steps, 1):
            dq = dq + part.to(dq.dtype)
            dkv = self.key_grads(dk, dv)
            hops = 1 if step + 1 < self.blocks else -step  # on with the keys; in the end, home
            table = [(i - hops) % self.n for i in range(self.n)]
            home = collectives.permute(dkv if home is None else dkv + home, self.axis, self.mesh, table)
            biases.append(dbias)
        dk, dv = self.apart(own if home is None else own + home, x)
        # c came at step me - c
        return dq.to(dtype), dk, dv, self.bias_grad(biases, lambda me, c: torch.remainder(me - c, self.n))
