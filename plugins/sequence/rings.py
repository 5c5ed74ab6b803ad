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

from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.call import Changes, Parts
from colofunc_plugins.sequence.heads import wide
from colofunc_plugins.sequence.pattern import Pattern

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
        a = self.attention
        return bool(self.lies("q") == self.lies("k") and a.operand("q_offset") is None and a.operand("k_offset") is None)

    @property
    def blocks(self) -> int:
        """How many blocks a rank works on: a causal window reaches only so far back."""
        window, size = self.attention.get("window"), self.layout("k").shape[2] // self.n
        if not (self.attention.get("causal") and window and self.alike) or self.striped:
            return self.n
        return int(min(self.n, (window + size - 2) // size + 1))

    def price(self, flops: float) -> tuple[float, float, float]:
        """The rank with most work decides; what is sent costs time only where work does not hide it."""
        a, blocks = self.attention, self.blocks
        sent = [self.block_bytes(), self.block_bytes(wide(self.dtype))] if a.backward else [self.block_bytes()]
        start_s, hop_s = (
            sum(self.mesh.collective_s("permute", each, (self.axis,)) for each in some) for some in ([1] * len(sent), sent)
        )
        late = a.get("causal") and not a.get("window") and not self.striped and self.alike
        work_s = self.mesh.compute_s(flops / blocks, 0, str(self.dtype).removeprefix("torch."))
        return flops * (2 - 1 / self.n if late else 1), (blocks - 1) * (start_s + max(0.0, hop_s - work_s)), 2 * sum(sent)

    # ---- one block ----

    def send(self, x: torch.Tensor, hops: int = 1) -> torch.Tensor:
        """What the rank `hops` before this one had."""
        return collectives.permute(x, self.axis, self.mesh, [(i - hops) % self.n for i in range(self.n)])

    def block(self, x: Parts, step: int, keys: torch.Tensor) -> Any:
        """The operator on this rank's rows and the block of keys and values that it has at `step`."""
        me = collectives.axis_index(self.axis, self.mesh)
        owner = torch.remainder(me - step, self.n)
        if step:
            k, v = keys.split([x["k"].shape[-1], x["v"].shape[-1]], -1)
            x = {**x, "k": k, "v": v}
        if self.attention.bias_has(-1):
            split = x["bias"].unflatten(-1, (-1, self.n) if self.striped else (self.n, -1))
            x = {**x, "bias": split.index_select(self.dim, owner.reshape(1)).squeeze(self.dim)}
        return self.attention.run(x, self.changes(x, step, me, owner))

    @property
    def dim(self) -> int:
        """Of columns as (blocks, their columns) or (columns, blocks): where the blocks are counted."""
        return -1 if self.striped else -2

    def changes(self, x: Parts, step: int, me: torch.Tensor, owner: torch.Tensor) -> Changes:
        """Positions of the rows and columns of one block, and its place among the weights for dropout."""
        a, at = self.attention, {self.axis: owner}
        found = self.dropout(self.lies("k"), at)
        if not a.positional:
            return found
        if self.alike and self.striped and not a.get("window"):
            # Column j of rank c is seen by row i of rank r for j <= i where c <= r, else for j < i.
            return found | (a.change(k_offset=(owner > me).to(torch.int64)) if step else {})
        if self.alike and not self.striped and step == 0:
            return found
        return found | a.change(q_offset=self.row_positions(x), k_offset=self.column_positions(x, at))

    # ---- local code ----

    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        return self.backward(x) if self.attention.backward else self.forward(x)

    def forward(self, x: Parts) -> tuple[torch.Tensor, ...]:
        travelling = torch.cat([x["k"], x["v"]], -1)
        out, lse = torch.empty(0), torch.empty(0)
        for step in range(self.blocks):
            here = travelling
            if step + 1 < self.blocks:
                travelling = self.send(here)
            part, m = self.block(x, step, here)
            part = part.to(wide(part.dtype))
            out, lse = merged(out, lse, part, m) if step else (part, m)
        return out.to(x["q"].dtype), lse

    def backward(self, x: Parts) -> tuple[torch.Tensor, ...]:
        k, v = x["k"], x["v"]
        travelling = torch.cat([k, v], -1)
        dq = own = home = torch.empty(0)
        biases = []
        for step in range(self.blocks):
            here = travelling
            if step + 1 < self.blocks:
                travelling = self.send(here)
            part, dk, dv, dbias = self.block(x, step, here)
            biases.append(dbias)
            dkv = torch.cat([dk, dv], -1).to(wide(k.dtype))
            dq = dq + part.to(wide(part.dtype)) if step else part.to(wide(part.dtype))
            if step == 0:
                own = dkv  # added at the end: it need not go round
                continue
            dkv = dkv + home if step > 1 else dkv
            home = self.send(dkv, 1 if step + 1 < self.blocks else -step)
        dk, dv = (own + home if self.blocks > 1 else own).to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
        return dq.to(x["q"].dtype), dk, dv, self.bias_grad(biases)

    def bias_grad(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The columns of all blocks in their places: block c was worked on at step me - c."""
        if not self.attention.needs_dbias:
            return parts[0]
        if not self.attention.bias_has(-1):
            return torch.stack(parts).sum(0)
        parts = parts + [torch.zeros_like(parts[0])] * (self.n - len(parts))
        me = collectives.axis_index(self.axis, self.mesh)
        order = torch.remainder(me - torch.arange(self.n), self.n)
        return torch.stack(parts, self.dim).index_select(self.dim, order).flatten(-2)


def merged(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two blocks of columns from that over each; a row that sees neither stays as it is."""
    weight = torch.sigmoid((m - lse).nan_to_num(nan=0.0))
    return torch.lerp(out, part, weight.unsqueeze(-1)), torch.logaddexp(lse, m)
