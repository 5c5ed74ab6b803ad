"""Patterns of attention over a split sequence: what one rank does, said once; layouts, positions and strategies made of
it.

    rows `cp s`, columns `cp t`     contiguous: rank i has positions i m ... (i + 1) m
    rows `s cp`, columns `t cp`     striped: rank i has positions i, n + i, 2 n + i, ...

Problem: attention alone looks from one token to another, so tokens that are split need a pattern: keys that travel or
are gathered. Masks, windows, biases and dropout must be told where rows and columns stand, and batch and heads may lie
over any other axes. Idea: a pattern says its words, its price, and what a rank does with its parts; the rest stands
here.

    class Direct(cf.ext.AttentionPattern):                       # docs/parallel.md has all of it
        words = "direct", "direct striped"                   # plans ask for it: "{cp: direct}"

        def price(self, flops): ...                          # of one rank
        def attend(self, x):                                 # x["q"]: (b, h, s/n, e), x["k"]: (b, g, t/n, e)
            return self.merged(self.over_block(x, keys, me, owner) for owner, keys in ...)

    Direct.strategies(call, mesh, "cp")                      # for the hook `colofunc_strategies`

Around a pattern may stand an exchange over a second axis, which deals heads for rows: inside it sees some heads of more
rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar, Protocol

import attrs
import torch

from colofunc.mesh import Mesh
from colofunc.ops.collectives import axis_index
from colofunc.planner.wishes.factor_strategies import ways
from colofunc.spec.layout import Dim, Layout
from colofunc.spec.rule import Call, Strategy
from colofunc.spec.rules.attention_call import AttentionCall
from colofunc.spec.rules.local import wide

__all__ = ["AttentionExchange", "AttentionPattern"]

NamedOperands = dict[str, torch.Tensor]  # operands by name, as a rank has them
AttentionResults = tuple[torch.Tensor, ...]  # out, lse; of backward dq, dk, dv, dbias


class AttentionExchange(Protocol):
    """What stands around a pattern, over `axis`: other operands for it, and its results as the caller has them."""

    @property
    def axis(self) -> str:
        """The mesh axis that it exchanges along."""

    @property
    def word(self) -> str:
        """What plans call it."""

    @property
    def fits(self) -> bool:
        """Whether it can stand around this call."""

    @property
    def work(self) -> float:
        """Work of the slowest rank inside, of a fair share."""

    @property
    def keys(self) -> float:
        """Keys and values of a rank inside, of those outside."""

    def price(self) -> tuple[float, float]:
        """(seconds of communication, peak bytes) of one rank, there and back."""

    def there(self, x: NamedOperands) -> NamedOperands:
        """The operands inside."""

    def back(self, found: AttentionResults, x: NamedOperands) -> AttentionResults:
        """The results outside, of those inside and the operands outside."""

    def options(self, options: dict[str, Any]) -> Mapping[str, Any]:
        """The options of the operator inside, of those for all heads."""


Around = Callable[[AttentionCall, Mesh, str, Strategy], AttentionExchange]


@attrs.frozen
class AttentionPattern(ABC):
    """One way to run one call of attention, or of its backward, with rows and columns split over `axis`.

    `words`: what plans call it, contiguous and striped; "" where it does nothing over an axis. `striped`: which of
    these it is. `way`: how the other axes are placed. `exchange`: what stands around it.
    """

    words: ClassVar[tuple[str, str]]

    attention: AttentionCall
    mesh: Mesh
    axis: str
    striped: bool
    way: Strategy
    exchange: AttentionExchange | None = None

    @abstractmethod
    def price(self, flops: float) -> tuple[float, float, float]:
        """(flops, seconds of communication, peak bytes) of one rank, given its fair share of flops."""

    @abstractmethod
    def attend(self, x: NamedOperands) -> AttentionResults:
        """out, lse of a rank's rows; backward (`attention.backward`) dq, dk, dv, dbias of its rows and columns."""

    # ---- strategies ----

    @classmethod
    def strategies(
        cls, call: Call, mesh: Mesh, axis: str, exchange: Around | None = None, over: Sequence[str] = ()
    ) -> Iterator[Strategy]:
        """All of this pattern over `axis` ("": none), contiguous and striped, beside every way to place the other axes.

        Alone, and inside `exchange(attention, mesh, another, way)` over each of the axes `over` where that fits.
        Nothing where the mesh has one rank on the axis, or none such, as that of a microbatch.
        """
        if axis and (axis not in mesh or mesh.axis_size(axis) == 1):
            return
        attention = AttentionCall(call)
        if attention.placed or attention.shape("k_offset") or len(attention.shape("q") or ()) != 4:
            return
        around = [*([""] if axis else []), *(u for u in over if mesh.axis_size(u) > 1)]
        for striped, other in product((False, True) if axis else (False,), around):
            rows, columns = ({f: f"{other} _ {axis}" if striped else f"{axis} {other} _"} for f in "st")
            for way in ways(call, mesh, *attention.own(rows, columns)):
                outer = exchange(attention, mesh, other, way) if exchange is not None and other else None
                if outer is None or outer.fits:
                    yield cls(attention, mesh, axis, striped, way, outer).strategy()

    def strategy(self) -> Strategy:
        """This one, with its code and its cost."""
        a, outer, outs = self.attention, self.exchange, self.way.outs
        word = self.words[self.striped]
        words = [(self.axis, word)] if word else []
        words += [] if outer is None else [(outer.axis, outer.word)]
        # a bias that all rows share: each rank has the gradient from its own rows
        if a.needs_dbias and not a.bias_has(-2):
            *rest, bias = outs
            assert bias is not None
            outs = (*rest, bias.with_pending((*bias.pending, *((axis, "sum") for axis, _ in words))))
        flops, extra_s, peak_bytes = self.price(self.way.cost.flops * (1 if outer is None else outer.work))
        more_s, more_bytes = (0.0, 0.0) if outer is None else outer.price()
        return self.way.with_pattern(
            words,
            partial(_local, self),
            flops=flops,
            extra_s=extra_s + more_s,
            peak_bytes=peak_bytes + more_bytes,
            outs=outs,
        )

    # ---- layouts, inside the exchange, and what prices are made of ----

    @property
    def n(self) -> int:
        """Ranks of the axis."""
        return self.mesh.axis_size(self.axis)

    def layout(self, name: str) -> Layout:
        """How an operand lies, outside."""
        return self.attention.layout(name, self.way)

    def lies(self, name: str) -> Dim:
        """How rows (of "q") or columns (of "k") lie."""
        layout = self.layout(name)
        return (layout if self.exchange is None else layout.without((self.exchange.axis,))).dims[2]

    @property
    def dims(self) -> tuple[Dim, ...]:
        """How b, h and s lie."""
        return (*self.layout("q").dims[:2], self.lies("q"))

    def block_bytes(self, dtype: torch.dtype | None = None) -> float:
        """A rank's keys and values; or their gradients while they are summed, in another dtype."""
        numel = self.layout("k").local_numel + self.layout("v").local_numel
        return numel * (dtype or self.attention.dtype).itemsize * (1 if self.exchange is None else self.exchange.keys)

    @property
    def busiest(self) -> float:
        """Pairs that the busiest rank sees, of a fair share: the last contiguous block sees nearly all under a causal
        mask.
        """
        late = self.attention.get("causal") and not self.attention.get("window") and not self.striped
        return 2 - 1 / self.n if late else 1

    # ---- the operator on a rank's rows ----

    def run(self, x: NamedOperands, options: dict[str, Any]) -> AttentionResults:
        """The operator on some rows and columns."""
        found: AttentionResults = self.attention.run(
            x, options if self.exchange is None else self.exchange.options(options)
        )
        return found

    def over_all(self, x: NamedOperands, keys: torch.Tensor | None = None) -> AttentionResults:
        """The operator on a rank's rows and all columns in their order: those of x, or `keys` with values beside them.
        """
        here = x if keys is None else self.with_keys(x, keys)
        return self.run(here, self.attention.options(self.dims, self.mesh, here))

    def over_block(
        self, x: NamedOperands, keys: torch.Tensor, me: torch.Tensor, owner: torch.Tensor, own: bool = False
    ) -> AttentionResults:
        """The operator on the rows of rank `me`, this one, and the columns of rank `owner`: `keys` with values beside
        them.

        Of a bias and of codes x has all columns. `own`: these are known to be the rank's own columns, and those of x
        are taken.
        """
        here = x if own else self.with_keys(x, keys)
        for name in [name for name, cut in (("bias", self.attention.bias_has(-1)), ("code", "code" in x)) if cut]:
            blocks = x[name].unflatten(-1, (-1, self.n) if self.striped else (self.n, -1))
            here = {**here, name: blocks.index_select(self._blocks, owner.reshape(1)).squeeze(self._blocks)}
        return self.run(here, self._block_options(here, me, owner, own))

    @property
    def alike(self) -> bool:
        """Whether row i and column i of a rank are the same position, so that a rank's own block is an attention of its
        own.
        """
        a = self.attention
        return bool(
            self.lies("q") == self.lies("k") and a.operand("q_offset") is None and a.operand("k_offset") is None
        )

    @property
    def _blocks(self) -> int:
        """Of columns as (blocks, their columns) or (columns, blocks): where the blocks are counted."""
        return -1 if self.striped else -2

    def _block_options(self, x: NamedOperands, me: torch.Tensor, owner: torch.Tensor, own: bool) -> dict[str, Any]:
        """Positions of the rows and columns of one block, and its place among the weights for dropout."""
        a, columns, at = self.attention, self.lies("k"), {self.axis: owner}
        if self.alike and (not a.get("window") if self.striped else own):
            # Striped: column j of rank c is seen by row i of rank r for j <= i where c <= r, else for j < i.
            later = {} if own or not a.positional else {"k_offset": (owner > me).to(torch.int64)}
            return later | a.dropped(self.dims, self.mesh, columns, at)
        return a.options(self.dims, self.mesh, x, columns, at)

    # ---- blocks: side by side as they travel, and what is found of several as that of all ----

    def keys(self, x: NamedOperands) -> torch.Tensor:
        """(b, g, t, e + f): keys with values beside them."""
        return torch.cat([x["k"], x["v"]], -1)

    def key_grads(self, dk: torch.Tensor, dv: torch.Tensor) -> torch.Tensor:
        """Their gradients in the same form; at least float32, because they are summed on the way."""
        return torch.cat([dk, dv], -1).to(wide(dk.dtype))

    def apart(self, keys: torch.Tensor, x: NamedOperands) -> Sequence[torch.Tensor]:
        """The two of either form, of the widths and the dtype of those in x."""
        return keys.to(x["k"].dtype).split([x["k"].shape[-1], x["v"].shape[-1]], -1)

    def with_keys(self, x: NamedOperands, keys: torch.Tensor) -> NamedOperands:
        """The operands with other keys and values."""
        return {**x, **dict(zip(("k", "v"), self.apart(keys, x), strict=True))}

    @staticmethod
    def merged(found: Iterable[AttentionResults]) -> AttentionResults:
        """(out, lse) over all columns from those over blocks of them; a row that sees none of a block stays as it is.

        With w = sigmoid(m' - m), a block's o', m' come into o, m as o + w (o' - o) and log(exp m + exp m').
        """
        blocks = iter(found)
        out, lse = next(blocks)
        dtype = out.dtype
        out = out.to(wide(dtype))
        for part, m in blocks:
            weight = torch.sigmoid((m - lse).nan_to_num(nan=0.0))
            out, lse = torch.lerp(out, part.to(out.dtype), weight.unsqueeze(-1)), torch.logaddexp(lse, m)
        return out.to(dtype), lse

    def bias_grad(
        self, parts: Sequence[torch.Tensor], at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """dbias over all columns from those over blocks: on rank `me` that of rank c is parts[at(me, c)], zeros behind
        them.
        """
        if not self.attention.needs_dbias:
            return parts[0]
        if not self.attention.bias_has(-1):
            return torch.stack(tuple(parts)).sum(0)
        every = [*parts, *[torch.zeros_like(parts[0])] * (self.n - len(parts))]
        order = at(axis_index(self.axis, self.mesh), torch.arange(self.n))
        return torch.stack(every, self._blocks).index_select(self._blocks, order).flatten(-2)


def _local(pattern: AttentionPattern, *shards: torch.Tensor, mesh: Mesh) -> AttentionResults:
    x, outer = pattern.attention.parts(shards), pattern.exchange
    return pattern.attend(x) if outer is None else outer.back(pattern.attend(outer.there(x)), x)
