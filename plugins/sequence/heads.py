"""Heads by all-to-all where the axis does not divide the key heads: what `{cp: g}` of the rule cannot do.

    q (b, h, s/n, e)   rank j gets query heads j p ... (j + 1) p of all rows, p = ceil(h / n), padded with zeros behind h
    k (b, g, t/n, e)   and the key heads that these read; one that several ranks read goes to each of them
    out                back to rows of this rank, the padding cut off

Where n divides the key heads attention is `{cp: g}` of its own rule and the exchange is a conversion, kept for
backward. Here it is part of the operator, and q, k, v go twice. The slowest rank has p heads, as few as whole heads
allow. Between there and back stands attention itself, or a ring over another axis: "all rows" are then those of its
rank.

Source: DeepSpeed Ulysses (2309.14509).
"""

from __future__ import annotations

from typing import Any

import attrs
import torch

import colofunc as cf
from colofunc import collectives

NamedOperands = dict[str, torch.Tensor]  # operands by name, as a rank has them
AttentionResults = tuple[torch.Tensor, ...]


class HeadsAlone(cf.ext.AttentionPattern):
    """Nothing over an axis: what an exchange of heads alone has between there and back."""

    words = "", ""

    def price(self, flops: float) -> tuple[float, float, float]:
        return flops, 0.0, 0.0

    def attend(self, x: NamedOperands) -> AttentionResults:
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
    def ranks(self) -> int:
        """n."""
        return self.mesh.axis_size(self.axis)

    @property
    def query_heads(self) -> int:
        """h: query heads of a rank outside (other axes may split them, too)."""
        return self.attention.layout("q", self.way).local_shape[1]

    @property
    def key_heads(self) -> int:
        """g: key heads of a rank outside."""
        return self.attention.layout("k", self.way).local_shape[1]

    @property
    def heads_each(self) -> int:
        """p: query heads of a rank inside, padding included."""
        return -(-self.query_heads // self.ranks)

    @property
    def fits(self) -> bool:
        """Whether this exchange is for the call: the rule's own cannot do it, and bits of dropout stay those of one
        device.
        """
        if self.key_heads % self.ranks == 0 or self.attention.shape("q_offset"):
            return False
        heads = self.attention.layout("q", self.way).dims[1]
        consecutive = all(axis is not None for _, axis in heads[:-1])
        return consecutive or not self.attention.get("dropout")

    # ---- who reads which key heads ----

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.query_heads // self.key_heads

    def keys_read(self, rank: int) -> list[int]:
        """The key head that each query head of a rank reads."""
        begin, end = rank * self.heads_each, min((rank + 1) * self.heads_each, self.query_heads)
        return [head // self.group for head in range(begin, end)]

    @property
    def keys_each(self) -> int:
        """Key heads that a rank needs at most."""
        return max(len(set(self.keys_read(rank))) for rank in range(self.ranks))

    def first_key(self, rank: int) -> int:
        """The first key head that a rank gets."""
        return min(rank * self.heads_each // self.group, self.key_heads - self.keys_each)

    @property
    def aligned(self) -> bool:
        """Whether the groups of every rank are those that the operator assumes: equally many query heads per key head.
        """
        if self.heads_each % self.keys_each:
            return False
        group = self.heads_each // self.keys_each
        for rank in range(self.ranks):
            for head, key in enumerate(self.keys_read(rank)):
                if key - self.first_key(rank) != head // group:
                    return False
        return True

    def key_index(self) -> torch.Tensor:
        """Which of my key heads each of my query heads reads."""
        me = collectives.axis_index(self.axis, self.mesh)
        heads = me * self.heads_each + torch.arange(self.heads_each)
        keys = heads.clamp(max=self.query_heads - 1) // self.group
        first = (me * self.heads_each // self.group).clamp(max=self.key_heads - self.keys_each)
        return (keys - first).clamp(0, self.keys_each - 1)

    # ---- what it costs, and what stands between ----

    @property
    def work(self) -> float:
        return self.heads_each * self.ranks / self.query_heads

    @property
    def keys(self) -> float:
        return (self.keys_each if self.aligned else self.heads_each) * self.ranks / self.key_heads

    def price(self) -> tuple[float, float]:
        """(seconds on the wire, bytes of all that is sent)."""
        call = self.attention
        per_query_head = call.layout("q", self.way).local_numel // self.query_heads
        queries = per_query_head * self.heads_each * self.ranks
        keys_and_values = 2 * call.layout("k", self.way).local_numel // self.key_heads * self.keys_each * self.ranks

        query_bytes = queries * call.dtype.itemsize
        wires = [query_bytes, keys_and_values * call.dtype.itemsize, query_bytes]  # q, k and v, out
        if call.backward:
            wires += [query_bytes, query_bytes, keys_and_values * cf.ext.local.wide(call.dtype).itemsize]
        seconds = sum(self.mesh.collective_s("all_to_all", nbytes, (self.axis,)) for nbytes in wires)
        return seconds, sum(wires)

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Where there is dropout: the place of my heads among the (b, h, s, t) weights."""
        if "sizes" not in options:
            return options
        queries, columns = self.attention.layout("q", self.way), self.attention.sizes["t"]
        me = collectives.axis_index(self.axis, self.mesh)
        offset = options["offset"] + me * (self.heads_each * queries.shape[2] * columns)
        sizes = list(options["sizes"])
        heads_at = sum(1 for _, axis in queries.dims[0] if axis is None) or 1  # behind the factors of the batch
        sizes[heads_at] = self.heads_each
        return options | {"sizes": sizes, "offset": offset}

    # ---- there and back ----

    def there(self, x: NamedOperands) -> NamedOperands:
        """Some heads of all rows."""
        found = {**x, "k": self.to_key_heads(x["k"]), "v": self.to_key_heads(x["v"])}
        for name in ("q", "grad_out", "out", "lse", "grad_lse"):
            if name in x:
                found[name] = self.to_heads(x[name])
        for name in ("least", "most"):
            if name in x:
                found[name] = cf.ext.local.gathered(x[name], 2, self.axis, self.mesh)
        if "bias" in x:
            found["bias"] = self.to_heads(x["bias"][(None,) * (4 - x["bias"].dim())], *self.bias)
        return found

    def back(self, found: AttentionResults, x: NamedOperands) -> AttentionResults:
        if not self.attention.backward:
            out, lse = found
            return self.to_rows(out), self.to_rows(lse)
        dq, dk, dv, dbias = found
        if self.attention.needs_dbias:
            dbias = self.to_rows(dbias, *self.bias).reshape(x["bias"].shape)
        return self.to_rows(dq), self.to_key_columns(dk), self.to_key_columns(dv), dbias

    @property
    def bias(self) -> tuple[bool, bool]:
        """Whether the bias has heads, and rows, of its own."""
        return self.attention.bias_has(-3), self.attention.bias_has(-2)

    def to_heads(self, x: torch.Tensor, heads: bool = True, rows: bool = True) -> torch.Tensor:
        """(b, h, m, ..) of my rows -> (b, p, n m, ..) of my heads; a bias may have no heads, or no rows, of its own."""
        if not heads:
            return cf.ext.local.gathered(x, 2, self.axis, self.mesh) if rows else x
        x = collectives.fit(x, (x.shape[0], self.heads_each * self.ranks, *x.shape[2:]))
        return (
            cf.ext.local.exchanged(x, 1, 2, self.axis, self.mesh)
            if rows
            else cf.ext.local.part(x, 1, self.axis, self.mesh)
        )

    def to_rows(self, x: torch.Tensor, heads: bool = True, rows: bool = True) -> torch.Tensor:
        """(b, p, n m, ..) of my heads -> (b, h, m, ..) of my rows; what has no rows is pending, a term on every rank.
        """
        if not heads:
            return cf.ext.local.scattered(x, 2, self.axis, self.mesh) if rows else x
        x = (
            cf.ext.local.exchanged(x, 2, 1, self.axis, self.mesh)
            if rows
            else cf.ext.local.among_zeros(x, 1, self.axis, self.mesh)
        )
        return x[:, : self.query_heads]

    def to_key_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(b, g, m, e) of my columns -> (b, kept or p, n m, e): the key heads that my query heads read."""
        parts = []
        for rank in range(self.ranks):
            first = self.first_key(rank)
            parts.append(x[:, first : first + self.keys_each])
        came = collectives.all_to_all(torch.stack(parts), self.axis, self.mesh)
        mine = collectives.rearrange(came, "n b g m e -> b g (n m) e")
        return mine if self.aligned else mine.index_select(1, self.key_index())

    def to_key_columns(self, dx: torch.Tensor) -> torch.Tensor:
        """The way back of `to_key_heads` for gradients: summed over the ranks that read a head."""
        total = dx.to(cf.ext.local.wide(dx.dtype))
        if not self.aligned:
            total = total.new_zeros((total.shape[0], self.keys_each, *total.shape[2:])).index_add(
                1, self.key_index(), total
            )
        by_rank = collectives.rearrange(total, "b g (n m) e -> n b g m e", n=self.ranks)
        came = collectives.all_to_all(by_rank, self.axis, self.mesh)
        found = came.new_zeros((came.shape[1], self.key_heads, *came.shape[3:]))
        for rank in range(self.ranks):
            first = self.first_key(rank)
            found = found.index_add(1, torch.arange(first, first + self.keys_each), came[rank])
        return found.to(dx.dtype)
