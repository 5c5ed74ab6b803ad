"""Heads by all-to-all where the axis does not divide the key heads: what `{cp: g}` of the rule cannot do.

    q (b, h, s/n, e)   rank j gets query heads j p ... (j + 1) p of all rows, p = ceil(h / n), padded with zeros behind h
    k (b, g, t/n, e)   and the key heads that these read; one that several ranks read goes to each of them
    out                back to rows of this rank, the padding cut off

Where n divides the key heads attention is `{cp: g}` of its own rule and the exchange is a conversion, kept for backward.
Here it is part of the operator, and q, k, v go twice. The slowest rank has p heads, as few as whole heads allow. Between
there and back stands attention itself, or a ring over another axis: "all rows" are then those of its rank.

Source: DeepSpeed Ulysses (2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from colofunc_plugins.sequence.call import Attention, Parts

import colofunc as cf
from colofunc import collectives


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in."""
    return torch.promote_types(dtype, torch.float32)


@attrs.frozen
class Heads:
    """The exchange over one axis, for one call whose other axes lie as `way` says."""

    attention: Attention
    mesh: cf.Mesh
    axis: str
    way: cf.Strategy

    @property
    def n(self) -> int:
        return self.mesh.axis_size(self.axis)

    def layout(self, name: str) -> cf.Layout:
        k = self.attention.operand(name)
        assert k is not None
        return self.way.ins[k]

    @property
    def h(self) -> int:
        """Heads of a rank (other axes may split them, too)."""
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

    # ---- what it costs, and what stands between ----

    @property
    def padding(self) -> float:
        """Work of the slowest rank, of a fair share."""
        return self.each * self.n / self.h

    @property
    def copies(self) -> float:
        """Keys of a rank after the exchange, of those before."""
        return (self.kept if self.aligned else self.each) * self.n / self.g

    def wires(self) -> list[float]:
        """Bytes of a rank in each all-to-all."""
        q, k, dtype = self.layout("q"), self.layout("k"), self.attention.call.ins[self.attention.operand("k")].dtype
        rows = q.local_numel // self.h * self.each * self.n * dtype.itemsize
        columns = 2 * k.local_numel // self.g * self.kept * self.n
        there_and_back = [rows, columns * dtype.itemsize, rows]
        return [*there_and_back, rows, rows, columns * wide(dtype).itemsize] if self.attention.backward else there_and_back

    def opened(self, dim: Any) -> Any:
        """A dim of rows or columns after the exchange: this axis has become local."""
        found: list[tuple[int, str | None]] = []
        for size, axis in ((size, None if axis == self.axis else axis) for size, axis in dim):
            if found and axis is None and found[-1][1] is None:
                found[-1] = found[-1][0] * size, None
            else:
                found.append((size, axis))
        return tuple(found)

    def placed(self, sizes: Sequence[int], offset: Any, shape: Sequence[int]) -> tuple[list[int], Any]:
        """The place of a rank's heads in the (b, h, s, t) weights, from that of all heads."""
        at = sum(1 for _, axis in self.layout("q").dims[0] if axis is None) or 1
        me = collectives.axis_index(self.axis, self.mesh)
        return [*sizes[:at], self.each, *sizes[at + 1 :]], offset + me * (self.each * shape[2] * shape[3])

    # ---- there and back ----

    def there(self, x: Parts) -> Parts:
        """Some heads of all rows."""
        found = dict(x)
        found |= {name: self.to_heads(x[name]) for name in ("q", "grad", "out") if name in x}
        found |= {name: self.to_heads(x[name].unsqueeze(-1)).squeeze(-1) for name in ("lse", "grad_lse") if name in x}
        found |= {name: self.key_heads(x[name]) for name in ("k", "v")}
        return found | {"bias": self.bias_here(x["bias"])} if "bias" in x else found

    def back(self, found: tuple[torch.Tensor, ...], x: Parts) -> tuple[torch.Tensor, ...]:
        if not self.attention.backward:
            out, lse = found
            return self.to_rows(out), self.to_rows(lse.unsqueeze(-1)).squeeze(-1)
        dq, dk, dv, dbias = found
        dbias = self.bias_back(dbias, x["bias"]) if self.attention.needs_dbias else dbias
        return self.to_rows(dq), self.key_columns(dk), self.key_columns(dv), dbias

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        return collectives.all_to_all(x, self.axis, self.mesh)

    def dealt(self, x: torch.Tensor) -> torch.Tensor:
        """(b, h, m, e) as (n, b, p, m, e), zeros behind h."""
        padded = collectives.fit(x, (x.shape[0], self.each * self.n, *x.shape[2:]))
        return collectives.rearrange(padded, "b (n p) m e -> n b p m e", n=self.n)

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, h, m, e) of my rows -> (b, p, n m, e) of my heads."""
        return collectives.rearrange(self.exchange(self.dealt(x)), "n b p m e -> b p (n m) e")

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

    def bias_here(self, x: torch.Tensor) -> torch.Tensor:
        """The bias of my heads and all rows."""
        x, (heads, rows) = x[(None,) * (4 - x.dim())], map(self.attention.bias_has, (-3, -2))
        if heads:
            return self.to_heads(x) if rows else collectives.take_shard(self.dealt(x), self.axis, self.mesh)
        return collectives.rearrange(collectives.all_gather(x, self.axis, self.mesh), "n b p m t -> b p (n m) t") if rows else x

    def bias_back(self, dx: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Its gradient as the bias lies; pending where all ranks have a term of it."""
        heads, rows = map(self.attention.bias_has, (-3, -2))
        if heads and rows:
            dx = self.to_rows(dx)
        elif heads:  # every rank has its heads of it, zeros elsewhere
            mine = (torch.arange(self.n) == collectives.axis_index(self.axis, self.mesh)).to(dx.dtype)
            dx = collectives.rearrange(mine.reshape(-1, 1, 1, 1, 1) * dx, "n b p m t -> b (n p) m t")[:, : self.h]
        elif rows:
            dx = collectives.reduce_scatter(collectives.rearrange(dx, "b p (n m) t -> n b p m t", n=self.n), self.axis, self.mesh)
        return dx.reshape(like.shape)
