"""Heads by all-to-all where the axis does not divide the key heads: what `{cp: g}` of the rule cannot do.

    q (b, h, s/n, e)   rank j gets query heads j p ... (j + 1) p of all rows, p = ceil(h / n), padded with zeros behind h
    k (b, g, t/n, e)   and the key heads that these read; one that several ranks read goes to each of them
    out                back to rows of this rank, the padding cut off

Where n divides the key heads attention is `{cp: g}` of its own rule and the exchange is a conversion, kept for backward.
Here it is part of the operator, and q, k, v go twice. The slowest rank has p heads, as few as whole heads allow.

Source: DeepSpeed Ulysses (2309.14509).
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
class Heads(Pattern):
    """The exchange over one axis. h, g: heads and key heads of a rank (other axes may split them, too)."""

    @property
    def word(self) -> str:
        return "heads"

    @property
    def h(self) -> int:
        return self.layout("q").local_shape[1]

    @property
    def g(self) -> int:
        return self.layout("k").local_shape[1]

    @property
    def fits(self) -> bool:
        run = all(axis is not None for _, axis in self.layout("q").dims[1][:-1])  # a rank's heads are consecutive
        return self.g % self.n != 0 and not self.attention.shape("q_offset") and (run or not self.attention.get("dropout"))

    @property
    def each(self) -> int:
        """Query heads of a rank, padding included."""
        return -(-self.h // self.n)

    @property
    def kept(self) -> int:
        """Key heads that a rank needs at most."""
        r = self.h // self.g
        last = [min((j + 1) * self.each, self.h) - 1 for j in range(self.n)]
        return max(b // r - j * self.each // r + 1 for j, b in enumerate(last) if j * self.each < self.h)

    def first(self, j: int) -> int:
        """The first key head of rank j."""
        return min(j * self.each // (self.h // self.g), self.g - self.kept)

    @property
    def aligned(self) -> bool:
        """Whether the groups of every rank are those that the operator assumes: equally many query heads per key head."""
        p, r = self.each, self.h // self.g
        if p % self.kept:
            return False
        return all(i // r - self.first(i // p) == (i % p) // (p // self.kept) for i in range(self.h))

    def cost(self) -> cf.Cost:
        a, cost = self.attention, self.way.cost
        q, k, itemsize = self.layout("q"), self.layout("k"), self.dtype.itemsize
        per_row, per_column = q.local_numel // self.h * self.each * self.n, k.local_numel // self.g * self.kept * self.n
        wires = [per_row * itemsize, 2 * per_column * itemsize, per_row * itemsize]
        if a.backward:
            wires += [per_row * itemsize, per_row * itemsize, 2 * per_column * wide(self.dtype).itemsize]
        extra_s = sum(self.mesh.collective_s("all_to_all", nbytes, (self.axis,)) for nbytes in wires)
        flops = cost.flops * self.each * self.n / self.h
        return attrs.evolve(cost, flops=flops, extra_s=extra_s, peak_bytes=int(sum(wires)))

    # ---- there and back ----

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_to_all(x, self.axis, self.mesh)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, h, m, ...) of my rows -> (b, p, n m, ...) of my heads."""
        x = x if x.dim() == 4 else x.unsqueeze(-1)
        padded = collectives.fit(x, (x.shape[0], self.each * self.n, *x.shape[2:]))
        sent = self.exchange(collectives.rearrange(padded, "b (n p) m e -> n b p m e", n=self.n))
        return collectives.rearrange(sent, "n b p m e -> b p (n m) e")

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(b, p, n m, e) of my heads -> (b, h, m, e) of my rows."""
        sent = self.exchange(collectives.rearrange(x, "b p (n m) e -> n b p m e", n=self.n))
        return collectives.rearrange(sent, "n b p m e -> b (n p) m e")[:, : self.h]

    def key_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, g, m, e) of my columns -> (b, kept or p, n m, e): the key heads that my query heads read."""
        parts = [x[:, self.first(j) : self.first(j) + self.kept] for j in range(self.n)]
        mine = collectives.rearrange(self.exchange(torch.stack(parts)), "n b g m e -> b g (n m) e")
        return mine if self.aligned else mine.index_select(1, self.read())

    def read(self) -> torch.Tensor:
        """Which of my key heads each of my query heads reads."""
        r, me = self.h // self.g, collectives.axis_index(self.axis, self.mesh)
        mine = (me * self.each + torch.arange(self.each)).clamp(max=self.h - 1) // r
        first = (me * self.each // r).clamp(max=self.g - self.kept)
        return (mine - first).clamp(0, self.kept - 1)

    def key_columns(self, dx: torch.Tensor) -> torch.Tensor:
        """The way back of `key_heads` for gradients: summed over the ranks that read a head."""
        total = dx.to(wide(dx.dtype))
        if not self.aligned:
            total = total.new_zeros((total.shape[0], self.kept, *total.shape[2:])).index_add(1, self.read(), total)
        back = self.exchange(collectives.rearrange(total, "b g (n m) e -> n b g m e", n=self.n))
        found = back.new_zeros((back.shape[1], self.g, *back.shape[3:]))
        for j in range(self.n):
            found = found.index_add(1, torch.arange(self.first(j), self.first(j) + self.kept), back[j])
        return found.to(dx.dtype)

    # ---- bias ----

    def bias_here(self, x: torch.Tensor) -> torch.Tensor:
        """The bias of my heads and all rows."""
        x = x[(None,) * (4 - x.dim())]
        a = self.attention
        if a.bias_has(-3) and a.bias_has(-2):
            return self.to_heads(x)
        if a.bias_has(-3):
            padded = collectives.fit(x, (x.shape[0], self.each * self.n, *x.shape[2:]))
            return collectives.take_shard(collectives.rearrange(padded, "b (n p) m t -> n b p m t", n=self.n), self.axis, self.mesh)
        if a.bias_has(-2):
            return collectives.rearrange(collectives.all_gather(x, self.axis, self.mesh), "n b p m t -> b p (n m) t")
        return x

    def bias_back(self, dx: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Its gradient as the bias lies; pending where all ranks have a term of it."""
        a = self.attention
        if a.bias_has(-3) and a.bias_has(-2):
            found = self.to_rows(dx)
        elif a.bias_has(-3):  # every rank has its heads of it, zeros elsewhere
            me = collectives.axis_index(self.axis, self.mesh)
            mine = (torch.arange(self.n) == me).to(dx.dtype).reshape(-1, 1, 1, 1, 1) * dx
            found = collectives.rearrange(mine, "n b p m t -> b (n p) m t")[:, : self.h]
        elif a.bias_has(-2):
            found = collectives.reduce_scatter(collectives.rearrange(dx, "b p (n m) t -> n b p m t", n=self.n), self.axis, self.mesh)
        else:
            found = dx
        return found.reshape(like.shape)

    # ---- local code ----

    def changes(self) -> Changes:
        """My rows are all rows of this axis; dropout's weights are those of my heads."""
        local = [(size, axis) for size, axis in self.rows if axis != self.axis]
        rows = (*local[:-1], (local[-1][0] * self.n, None)) if local and local[-1][1] is None else (*local, (self.n, None))
        changes = self.dropout(rows, ((self.layout("k").shape[2], None),))
        if changes:
            q, t = self.layout("q"), self.layout("k").shape[2]
            at = self.attention.at
            sizes, offset = list(changes[at["sizes"], "sizes"]), changes[at["offset"], "offset"]
            heads = sum(1 for _, axis in q.dims[0] if axis is None) or 1
            sizes[heads] = self.each
            me = collectives.axis_index(self.axis, self.mesh)
            changes |= self.attention.change(sizes=sizes, offset=offset + me * (self.each * q.shape[2] * t))
        if self.attention.positional and any(axis is not None for _, axis in rows):
            changes |= self.attention.change(q_offset=scalar(self.row_positions(rows, ())))
        return changes

    def run(self, shards: Sequence[torch.Tensor], more: Any) -> Any:
        q, k, v = self.tensors(shards)
        tensors = {"q": self.to_heads(q), "k": self.key_heads(k), "v": self.key_heads(v), **more}
        bias = self.attention.operand("bias")
        if bias is not None:
            tensors["bias"] = self.bias_here(shards[bias])
        return self.attention.run(shards, tensors, self.changes())

    def forward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = self.run(shards, {})
        return self.to_rows(out), self.to_rows(lse.unsqueeze(-1)).squeeze(-1)

    def backward(self, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names = [n for n in ("grad", "out", "lse", "grad_lse") if self.attention.operand(n) is not None]
        rows = {name: self.to_heads(shards[self.attention.operand(name) or 0]) for name in names}
        rows |= {name: x.squeeze(-1) for name, x in rows.items() if "lse" in name}
        dq, dk, dv, dbias = self.run(shards, rows)
        if self.attention.get("need_dbias") and self.attention.operand("bias") is not None:
            dbias = self.bias_back(dbias, shards[self.attention.operand("bias") or 0])
        return self.to_rows(dq), self.key_columns(dk), self.key_columns(dv), dbias
