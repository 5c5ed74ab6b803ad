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

from typing import Any

import attrs
import torch

import colofunc as cf
from colofunc import collectives

Parts = dict[str, torch.Tensor]  # operands by name, as a rank has them


@attrs.frozen
class Heads:
    """The exchange over one axis, for one call whose other axes lie as `way` says."""

    attention: cf.AttentionCall
    mesh: cf.Mesh
    axis: str
    way: cf.Strategy

    @property
    def n(self) -> int:
        return self.mesh.axis_size(self.axis)

    @property
    def h(self) -> int:
        """Heads of a rank (other axes may split them, too)."""
        return self.attention.layout("q", self.way).local_shape[1]

    @property
    def g(self) -> int:
        return self.attention.layout("k", self.way).local_shape[1]

    @property
    def fits(self) -> bool:
        run = all(axis is not None for _, axis in self.attention.layout("q", self.way).dims[1][:-1])  # a rank's heads are consecutive
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
        a = self.attention
        rows = a.layout("q", self.way).local_numel // self.h * self.each * self.n * a.dtype.itemsize
        columns = 2 * a.layout("k", self.way).local_numel // self.g * self.kept * self.n
        there_and_back = [rows, columns * a.dtype.itemsize, rows]
        return [*there_and_back, rows, rows, columns * cf.local.wide(a.dtype).itemsize] if a.backward else there_and_back

    def placed(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options of all heads for those of this rank: their place among the (b, h, s, t) weights."""
        if "sizes" not in options:
            return options
        q, t = self.attention.layout("q", self.way), self.attention.sizes["t"]
        at = sum(1 for _, axis in q.dims[0] if axis is None) or 1
        sizes, me = options["sizes"], collectives.axis_index(self.axis, self.mesh)
        offset = options["offset"] + me * (self.each * q.shape[2] * t)
        return options | {"sizes": [*sizes[:at], self.each, *sizes[at + 1 :]], "offset": offset}

    # ---- there and back ----

    def there(self, x: Parts) -> Parts:
        """Some heads of all rows."""
        found = {**x, "k": self.key_heads(x["k"]), "v": self.key_heads(x["v"])}
        for name in ("q", "grad_out", "out", "lse", "grad_lse"):
            if name in x:
                found[name] = self.to_heads(x[name])
        return found | {"bias": self.bias_here(x["bias"])} if "bias" in x else found

    def back(self, found: tuple[torch.Tensor, ...], x: Parts) -> tuple[torch.Tensor, ...]:
        if not self.attention.backward:
            out, lse = found
            return self.to_rows(out), self.to_rows(lse)
        dq, dk, dv, dbias = found
        dbias = self.bias_back(dbias, x["bias"]) if self.attention.needs_dbias else dbias
        return self.to_rows(dq), self.key_columns(dk), self.key_columns(dv), dbias

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """(b, h, m, ..) with zeros behind h: (b, n p, m, ..)."""
        return collectives.fit(x, (x.shape[0], self.each * self.n, *x.shape[2:]))

    def to_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, h, m, ..) of my rows -> (b, p, n m, ..) of my heads."""
        return cf.local.exchanged(self.padded(x), 1, 2, self.axis, self.mesh)

    def to_rows(self, x: torch.Tensor) -> torch.Tensor:
        """(b, p, n m, ..) of my heads -> (b, h, m, ..) of my rows."""
        return cf.local.exchanged(x, 2, 1, self.axis, self.mesh)[:, : self.h]

    def key_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, g, m, e) of my columns -> (b, kept or p, n m, e): the key heads that my query heads read."""
        parts = [x[:, self.first(j) : self.first(j) + self.kept] for j in range(self.n)]
        came = collectives.all_to_all(torch.stack(parts), self.axis, self.mesh)
        mine = collectives.rearrange(came, "n b g m e -> b g (n m) e")
        return mine if self.aligned else mine.index_select(1, self.read())

    def read(self) -> torch.Tensor:
        """Which of my key heads each of my query heads reads."""
        r, me = self.h // self.g, collectives.axis_index(self.axis, self.mesh)
        mine = (me * self.each + torch.arange(self.each)).clamp(max=self.h - 1) // r
        first = (me * self.each // r).clamp(max=self.g - self.kept)
        return (mine - first).clamp(0, self.kept - 1)

    def key_columns(self, dx: torch.Tensor) -> torch.Tensor:
        """The way back of `key_heads` for gradients: summed over the ranks that read a head."""
        total = dx.to(cf.local.wide(dx.dtype))
        if not self.aligned:
            total = total.new_zeros((total.shape[0], self.kept, *total.shape[2:])).index_add(1, self.read(), total)
        came = collectives.all_to_all(collectives.rearrange(total, "b g (n m) e -> n b g m e", n=self.n), self.axis, self.mesh)
        found = came.new_zeros((came.shape[1], self.g, *came.shape[3:]))
        for j in range(self.n):
            found = found.index_add(1, torch.arange(self.first(j), self.first(j) + self.kept), came[j])
        return found.to(dx.dtype)

    def bias_here(self, x: torch.Tensor) -> torch.Tensor:
        """The bias of my heads and all rows."""
        x, (heads, rows) = x[(None,) * (4 - x.dim())], map(self.attention.bias_has, (-3, -2))
        if heads:
            return self.to_heads(x) if rows else cf.local.part(self.padded(x), 1, self.axis, self.mesh)
        return cf.local.gathered(x, 2, self.axis, self.mesh) if rows else x

    def bias_back(self, dx: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Its gradient as the bias lies; pending where all ranks have a term of it."""
        heads, rows = map(self.attention.bias_has, (-3, -2))
        if heads:
            dx = self.to_rows(dx) if rows else cf.local.among_zeros(dx, 1, self.axis, self.mesh)[:, : self.h]
        elif rows:
            dx = cf.local.scattered(dx, 2, self.axis, self.mesh)
        return dx.reshape(like.shape)
