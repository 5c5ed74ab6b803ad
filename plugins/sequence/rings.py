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

from collections.abc import Iterator
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.pattern import Parts, Pattern

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
        sent = [self.block_bytes(), self.block_bytes(cf.local.wide(a.dtype))] if a.backward else [self.block_bytes()]
        start_s, hop_s = (
            sum(self.mesh.collective_s("permute", each, (self.axis,)) for each in some) for some in ([1] * len(sent), sent)
        )
        late = a.get("causal") and not a.get("window") and not self.striped and self.alike
        work_s = self.mesh.compute_s(flops / blocks, 0, str(a.dtype).removeprefix("torch."))
        return flops * (2 - 1 / self.n if late else 1), (blocks - 1) * (start_s + max(0.0, hop_s - work_s)), 2 * sum(sent)

    # ---- local code ----

    def steps(self, x: Parts) -> Iterator[Any]:
        """What the operator gives on this rank's rows and the block of keys and values that it has at each step."""
        me, widths = collectives.axis_index(self.axis, self.mesh), [x["k"].shape[-1], x["v"].shape[-1]]
        for step, keys in enumerate(cf.local.passing(torch.cat([x["k"], x["v"]], -1), self.blocks, self.axis, self.mesh)):
            owner = torch.remainder(me - step, self.n)
            k, v = keys.split(widths, -1) if step else (x["k"], x["v"])
            here = {**x, "k": k, "v": v}
            if self.attention.bias_has(-1):
                split = x["bias"].unflatten(-1, (-1, self.n) if self.striped else (self.n, -1))
                here["bias"] = split.index_select(self.dim, owner.reshape(1)).squeeze(self.dim)
            yield self.run(here, self.options(here, step, me, owner))

    @property
    def dim(self) -> int:
        """Of columns as (blocks, their columns) or (columns, blocks): where the blocks are counted."""
        return -1 if self.striped else -2

    def options(self, x: Parts, step: int, me: torch.Tensor, owner: torch.Tensor) -> dict[str, Any]:
        """Positions of the rows and columns of one block, and its place among the weights for dropout."""
        a, columns, at = self.attention, self.lies("k"), {self.axis: owner}
        if self.alike and (not a.get("window") if self.striped else step == 0):
            # Striped: column j of rank c is seen by row i of rank r for j <= i where c <= r, else for j < i.
            order = {"k_offset": (owner > me).to(torch.int64)} if a.positional and step else {}
            return order | a.dropped(self.dims, self.mesh, columns, at)
        return a.options(self.dims, self.mesh, x, columns, at)

    def attend(self, x: Parts) -> tuple[torch.Tensor, ...]:
        return self.backward(x) if self.attention.backward else self.forward(x)

    def forward(self, x: Parts) -> tuple[torch.Tensor, ...]:
        dtype, steps = x["q"].dtype, self.steps(x)
        out, lse = next(steps)
        out = out.to(cf.local.wide(dtype))
        for part, m in steps:
            out, lse = merged(out, lse, part.to(out.dtype), m)
        return out.to(dtype), lse

    def backward(self, x: Parts) -> tuple[torch.Tensor, ...]:
        q, k, v = x["q"], x["k"], x["v"]
        steps = self.steps(x)
        dq, dk, dv, dbias = next(steps)
        dq, own, biases = dq.to(cf.local.wide(q.dtype)), joined(dk, dv), [dbias]
        home = None  # what other ranks add to dK and dV travels with these; the own part need not go round
        for step, (part, dk, dv, dbias) in enumerate(steps, 1):
            dq, dkv = dq + part.to(dq.dtype), joined(dk, dv)
            hops = 1 if step + 1 < self.blocks else -step  # on with the keys; in the end, home
            table = [(i - hops) % self.n for i in range(self.n)]
            home = collectives.permute(dkv if home is None else dkv + home, self.axis, self.mesh, table)
            biases.append(dbias)
        dk, dv = (own if home is None else own + home).to(k.dtype).split([k.shape[-1], v.shape[-1]], -1)
        return dq.to(q.dtype), dk, dv, self.bias_grad(biases)

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


def joined(dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
    """Both as they travel: at least float32, because they are summed on the way."""
    return torch.cat([dk, dv], -1).to(cf.local.wide(dk.dtype))
