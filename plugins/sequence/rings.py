"""Ring attention: every rank keeps its rows of queries, and the blocks of keys and values travel.

    step 0      rank i works on block i            sends it to i + 1
    step j      rank i works on block i - j        results of the blocks are merged by their log-sum-exp

Problem: attention over a split sequence needs every key on every rank, and gathering them makes memory grow with the
sequence. Idea: hold one block at a time. With running result o and log-sum-exp m, a block's o', m' come in as

    w = sigmoid(m' - m)      o <- o + w (o' - o)      m <- log(exp m + exp m')

Backward is a second ring: with the merged out and lse each block's gradients are those of the block alone, so dK and dV
travel with their K and V, each rank adds its part (at least float32), and one last hop brings them home.

Layouts: "ring" holds contiguous blocks, `cp s`. Under a causal mask rank 0 then works on one block and the last on all;
"striped" deals rows round, `s cp`: all ranks see equally many pairs at every step. A causal window needs only the blocks
that it reaches, which contiguous blocks make few: the others are never sent.

The next block's permute stands before the work on the present one, so that executors run both at once.

Source: Ring Attention (2310.01889); Striped Attention (2311.09431); Ring Self-Attention (2105.13120).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.call import Changes
from colofunc_plugins.sequence.pattern import Pattern, scalar, wide

import colofunc as cf
from colofunc import collectives


@attrs.frozen
class Ring(Pattern):
    """One ring."""

    @property
    def word(self) -> str:
        return "striped" if self.striped else "ring"

    @property
    def alike(self) -> bool:
        """Whether row i and column i of a rank are the same position, so that a rank's own block is an attention of its own."""
        return bool(self.rows == self.columns and self.attention.operand("q_offset") is None and self.attention.operand("k_offset") is None)

    @property
    def blocks(self) -> int:
        """How many blocks a rank works on: a causal window reaches only so far back."""
        window, size = self.attention.get("window"), self.layout("k").local_shape[2]
        if not (self.attention.get("causal") and window and self.alike) or self.striped:
            return self.n
        return int(min(self.n, (window + size - 2) // size + 1))

    def cost(self) -> cf.Cost:
        """The rank with most work decides; what is sent costs time only where work does not hide it."""
        cost, blocks = self.way.cost, self.blocks
        late = self.attention.get("causal") and not self.attention.get("window") and not self.striped and self.alike
        flops = cost.flops * (2 - 1 / self.n if late else 1)
        sent = [self.block_bytes, self.wide_bytes] if self.attention.backward else [self.block_bytes]
        start_s, hop_s = (
            sum(self.mesh.collective_s("permute", each, (self.axis,)) for each in some) for some in ([1] * len(sent), sent)
        )
        work_s = self.mesh.compute_s(flops / blocks, 0, str(self.dtype).removeprefix("torch."))
        extra_s = (blocks - 1) * (start_s + max(0.0, hop_s - work_s))
        return attrs.evolve(cost, flops=flops, extra_s=extra_s, peak_bytes=2 * sum(sent))

    # ---- one block ----

    def send(self, x: torch.Tensor, hops: int = 1) -> torch.Tensor:
        """What the rank `hops` before this one had."""
        return collectives.permute(x, self.axis, self.mesh, [(i - hops) % self.n for i in range(self.n)])

    def block(self, shards: Sequence[torch.Tensor], step: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        """The operator on this rank's rows and the block of keys that it has at `step`."""
        me = collectives.axis_index(self.axis, self.mesh)
        owner = torch.remainder(me - step, self.n)
        tensors = {"k": k, "v": v}
        if self.attention.bias_has(-1):
            whole = shards[self.attention.operand("bias") or 0]
            tensors["bias"] = self.split(whole).index_select(self.dim, owner.reshape(1)).squeeze(self.dim)
        return self.attention.run(shards, tensors, self.changes(shards, step, me, owner))

    @property
    def dim(self) -> int:
        """Of columns as (blocks, their columns) or (columns, blocks): where the blocks are counted."""
        return -1 if self.striped else -2

    def split(self, bias: torch.Tensor) -> torch.Tensor:
        return bias.unflatten(-1, (-1, self.n) if self.striped else (self.n, -1))

    def changes(self, shards: Sequence[torch.Tensor], step: int, me: torch.Tensor, owner: torch.Tensor) -> Changes:
        """Positions of the rows and columns of one block, and its place among the weights for dropout."""
        a, at = self.attention, {self.axis: owner}
        found = self.dropout(self.rows, self.columns, at)
        if not a.positional:
            return found
        if self.alike and self.striped and not a.get("window"):
            # Column j of rank c is seen by row i of rank r for j <= i where c <= r, else for j < i.
            return found | (a.change(k_offset=(owner > me).to(torch.int64)) if step else {})
        if self.alike and not self.striped and step == 0:
            return found
        return found | a.change(
            q_offset=scalar(self.row_positions(self.rows, shards)), k_offset=self.column_positions(self.columns, shards, at)
        )

    # ---- local code ----

    def forward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = self.tensors(shards)
        travelling = torch.cat([k, v], -1)
        out, lse = torch.empty(0), torch.empty(0)
        for step in range(self.blocks):
            here = travelling
            if step + 1 < self.blocks:
                travelling = self.send(here)
            part, m = self.block(shards, step, *(here.split([k.shape[-1], v.shape[-1]], -1) if step else (k, v)))
            out, lse = merged(out, lse, part.to(wide(part.dtype)), m) if step else (part.to(wide(part.dtype)), m)
        return out.to(q.dtype), lse

    def backward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = self.tensors(shards)
        parts, travelling = [k.shape[-1], v.shape[-1]], torch.cat([k, v], -1)
        dq = own = home = torch.empty(0)
        biases = []
        for step in range(self.blocks):
            here = travelling
            if step + 1 < self.blocks:
                travelling = self.send(here)
            part, dk, dv, dbias = self.block(shards, step, *(here.split(parts, -1) if step else (k, v)))
            biases.append(dbias)
            dkv = torch.cat([dk, dv], -1).to(wide(k.dtype))
            dq = dq + part.to(wide(part.dtype)) if step else part.to(wide(part.dtype))
            if step == 0:
                own = dkv  # added at the end: it need not go round
                continue
            dkv = dkv + home if step > 1 else dkv
            home = self.send(dkv, 1 if step + 1 < self.blocks else -step)
        dkv = own + home if self.blocks > 1 else own
        dk, dv = (x.to(k.dtype) for x in dkv.split(parts, -1))
        return dq.to(q.dtype), dk, dv, self.bias_grad(biases)

    def bias_grad(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The columns of all blocks in their places: block c was worked on at step me - c."""
        a = self.attention
        if not a.get("need_dbias") or a.operand("bias") is None:
            return parts[0]
        if not a.bias_has(-1):
            return torch.stack(parts).sum(0)
        parts = parts + [torch.zeros_like(parts[0])] * (self.n - len(parts))
        me = collectives.axis_index(self.axis, self.mesh)
        order = torch.remainder(me - torch.arange(self.n), self.n)
        return torch.stack(parts, self.dim).index_select(self.dim, order).flatten(-2)


def merged(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two blocks of columns from that over each; a row that sees neither stays as it is."""
    weight = torch.sigmoid((m - lse).nan_to_num(nan=0.0))
    return torch.lerp(out, part, weight.unsqueeze(-1)), torch.logaddexp(lse, m)
