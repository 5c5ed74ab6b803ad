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
Found = tuple[torch.Tensor, ...]


class Whole(cf.ext.AttentionPattern):
    """Nothing over an axis: what an exchange of heads alone has between there and back."""

    words = "", ""

    def price(self, flops: float) -> tuple[float, float, float]:
        return flops, 0.0, 0.0

    def attend(self, x: Parts) -> Found:
        return self.over_all(x)


@attrs.frozen
class Heads:
    """The exchange over one axis, for one call whose other axes lie as `way` says: a `cf.ext.AttentionExchange`."""

    attention: cf.ext.AttentionCall
    mesh: cf.Mesh
    axis: str
    way: cf.Strategy
    word = "heads"

    @property
    def n(self) -> int:
        return self.mesh.axis_size(self.axis)

    @property
    def h(self) -> int:
        """Query heads of a rank outside (other axes may split them, too)."""
        return self.attention.layout("q", self.way).local_shape[1]

    @property
    def g(self) -> int:
        return self.attention.layout("k", self.way).local_shape[1]

    @property
    def p(self) -> int:
        """Query heads of a rank inside, padding included."""
        return -(-self.h // self.n)

    @property
    def fits(self) -> bool:
        run = all(axis is not None for _, axis in self.attention.layout("q", self.way).dims[1][:-1])  # a rank's heads are consecutive
        return self.g % self.n != 0 and not self.attention.shape("q_offset") and (run or not self.attention.get("dropout"))

    # ---- who reads which key heads ----

    def reads(self, j: int) -> list[int]:
        """The key head that each query head of rank j reads."""
        return [i // (self.h // self.g) for i in range(j * self.p, min((j + 1) * self.p, self.h))]

    @property
    def kept(self) -> int:
        """Key heads that a rank needs at most."""
        return max(len(set(self.reads(j))) for j in range(self.n))

    def first(self, j: int) -> int:
        """The first key head of rank j."""
        return min(j * self.p // (self.h // self.g), self.g - self.kept)

    @property
    def aligned(self) -> bool:
        """Whether the groups of every rank are those that the operator assumes: equally many query heads per key head."""
        r, rest = divmod(self.p, self.kept)
        return not rest and all(k - self.first(j) == i // r for j in range(self.n) for i, k in enumerate(self.reads(j)))

    def read(self) -> torch.Tensor:
        """Which of my key heads each of my query heads reads."""
        r, me = self.h // self.g, collectives.axis_index(self.axis, self.mesh)
        mine = (me * self.p + torch.arange(self.p)).clamp(max=self.h - 1) // r
        first = (me * self.p // r).clamp(max=self.g - self.kept)
        return (mine - first).clamp(0, self.kept - 1)

    # ---- what it costs, and what stands between ----

    @property
    def work(self) -> float:
        return self.p * self.n / self.h

    @property
    def keys(self) -> float:
        return (self.kept if self.aligned else self.p) * self.n / self.g

    def price(self) -> tuple[float, float]:
        a = self.attention
        rows = a.layout("q", self.way).local_numel // self.h * self.p * self.n * a.dtype.itemsize
        columns = 2 * a.layout("k", self.way).local_numel // self.g * self.kept * self.n
        wires = [rows, columns * a.dtype.itemsize, rows]  # q, k and v, out
        wires += [rows, rows, columns * cf.ext.local.wide(a.dtype).itemsize] if a.backward else []
        return sum(self.mesh.collective_s("all_to_all", nbytes, (self.axis,)) for nbytes in wires), sum(wires)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Where there is dropout: the place of my heads among the (b, h, s, t) weights."""
        if "sizes" not in options:
            return options
        q, t = self.attention.layout("q", self.way), self.attention.sizes["t"]
        at = sum(1 for _, axis in q.dims[0] if axis is None) or 1
        sizes, me = options["sizes"], collectives.axis_index(self.axis, self.mesh)
        offset = options["offset"] + me * (self.p * q.shape[2] * t)
        return options | {"sizes": [*sizes[:at], self.p, *sizes[at + 1 :]], "offset": offset}

    # ---- there and back ----

    def there(self, x: Parts) -> Parts:
        """Some heads of all rows."""
        found = {**x, "k": self.key_heads(x["k"]), "v": self.key_heads(x["v"])}
        for name in ("q", "grad_out", "out", "lse", "grad_lse"):
            if name in x:
                found[name] = self.to_heads(x[name])
        for name in ("least", "most"):
            if name in x:
                found[name] = cf.ext.local.gathered(x[name], 2, self.axis, self.mesh)
        if "bias" in x:
            found["bias"] = self.to_heads(x["bias"][(None,) * (4 - x["bias"].dim())], *self.bias)
        return found

    def back(self, found: Found, x: Parts) -> Found:
        if not self.attention.backward:
            out, lse = found
            return self.to_rows(out), self.to_rows(lse)
        dq, dk, dv, dbias = found
        if self.attention.needs_dbias:
            dbias = self.to_rows(dbias, *self.bias).reshape(x["bias"].shape)
        return self.to_rows(dq), self.key_columns(dk), self.key_columns(dv), dbias

    @property
    def bias(self) -> tuple[bool, bool]:
        """Whether the bias has heads, and rows, of its own."""
        return self.attention.bias_has(-3), self.attention.bias_has(-2)

    def to_heads(self, x: torch.Tensor, heads: bool = True, rows: bool = True) -> torch.Tensor:
        """(b, h, m, ..) of my rows -> (b, p, n m, ..) of my heads; a bias may have no heads, or no rows, of its own."""
        if not heads:
            return cf.ext.local.gathered(x, 2, self.axis, self.mesh) if rows else x
        x = collectives.fit(x, (x.shape[0], self.p * self.n, *x.shape[2:]))
        return cf.ext.local.exchanged(x, 1, 2, self.axis, self.mesh) if rows else cf.ext.local.part(x, 1, self.axis, self.mesh)

    def to_rows(self, x: torch.Tensor, heads: bool = True, rows: bool = True) -> torch.Tensor:
        """(b, p, n m, ..) of my heads -> (b, h, m, ..) of my rows; what has no rows is pending, a term on every rank."""
        if not heads:
            return cf.ext.local.scattered(x, 2, self.axis, self.mesh) if rows else x
        x = cf.ext.local.exchanged(x, 2, 1, self.axis, self.mesh) if rows else cf.ext.local.among_zeros(x, 1, self.axis, self.mesh)
        return x[:, : self.h]

    def key_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, g, m, e) of my columns -> (b, kept or p, n m, e): the key heads that my query heads read."""
        parts = [x[:, self.first(j) : self.first(j) + self.kept] for j in range(self.n)]
        came = collectives.all_to_all(torch.stack(parts), self.axis, self.mesh)
        mine = collectives.rearrange(came, "n b g m e -> b g (n m) e")
        return mine if self.aligned else mine.index_select(1, self.read())

    def key_columns(self, dx: torch.Tensor) -> torch.Tensor:
        """The way back of `key_heads` for gradients: summed over the ranks that read a head."""
        total = dx.to(cf.ext.local.wide(dx.dtype))
        if not self.aligned:
            total = total.new_zeros((total.shape[0], self.kept, *total.shape[2:])).index_add(1, self.read(), total)
        came = collectives.all_to_all(collectives.rearrange(total, "b g (n m) e -> n b g m e", n=self.n), self.axis, self.mesh)
        found = came.new_zeros((came.shape[1], self.g, *came.shape[3:]))
        for j in range(self.n):
            found = found.index_add(1, torch.arange(self.first(j), self.first(j) + self.kept), came[j])
        return found.to(dx.dtype)
