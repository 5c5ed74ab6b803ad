"""Rule: what an operator call does with the factors of its dims, and Strategy: one way to split it.

A rule is an einops pattern bound to one call. `linear` on (2, 8, 16) and (32, 16) has

    b0 b1 i, o i -> b0 b1 o          sizes b0=2 b1=8 i=16 o=32

A mesh axis placed on a factor splits every dim that has the factor. A factor that is missing on the right is reduced:
placing an axis on `i` leaves a pending sum. A bracketed factor must be whole. Where an operator is jointly linear in a
set of operands, a pending sum on all of them passes to the output.

A `Call` is what rules and strategies see of a node: target, arguments, shapes and dtypes, never the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import attrs
import torch

from colofunc.errors import RuleError
from colofunc.spec.layout import Layout

Factors = tuple[str, ...]  # the factors of one dim, major first; () is a dim of size 1
Operand = tuple[Factors, ...]  # one tensor: its dims


@attrs.frozen(slots=True)
class Ref:
    """Stands for a tensor among arguments: operand `id` of a `Call`, value `id` of a program's `Node`."""

    id: int


@attrs.frozen
class TensorType:
    """Global shape and dtype of an operand or result."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@attrs.frozen(cache_hash=True)
class Call:
    """One operator call without its program. Tensor operand k is `Ref(k)` inside args and kwargs."""

    target: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType | None, ...]  # None where the operator returns no tensor there

    def arg(self, index: int, name: str, default: Any = None) -> Any:
        """Positional argument `index`, or keyword `name`, or `default`."""
        if index < len(self.args):
            return self.args[index]
        return dict(self.kwargs).get(name, default)


# (call, in layouts, out layouts) -> (args, kwargs) with local sizes
Localize = Callable[
    [Call, tuple[Layout, ...], tuple[Layout | None, ...]], tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]
]


@attrs.frozen
class Rule:
    """An einops pattern bound to one call.

    `reduce`: factor -> "sum" | "max" | "min", for factors missing on the right that may be split. `whole`: factors that
    may not be split; `why_whole`: where other calls of the operator have one of them open, the reason and what to try.
    `linear`: sets of operand positions through which pending sums pass jointly; `monotone`: sets through which pending
    max / min pass. `addends`: operands that are added once, a bias: pending over every axis that is placed on a reduced
    factor. `copied`: (result, factor) pairs: the result does not depend on the factor, so every rank of an axis placed
    on it computes all of it (the bias gradient of a convolution and its input channels). `localize`: (call, in layouts,
    out layouts) -> (args, kwargs) with local sizes, for operators that have sizes among their arguments; None if the
    arguments hold for local shapes as they are. `local`: (call, in layouts, out layouts) -> local code
    `f(*shards, mesh=mesh)`, or None where the operator itself does it. For operators that need other code once split,
    such as mean (local sum / global count). Its collectives, if any, are on scalars (a count); what communicates more
    is a `Strategy`, which has a cost.
    """

    ins: tuple[Operand, ...]
    outs: tuple[Operand | None, ...]
    sizes: Mapping[str, int]
    reduce: Mapping[str, str] = attrs.field(factory=dict)
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    monotone: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    copied: frozenset[tuple[int, str]] = frozenset()
    localize: Localize | None = None
    local: Callable[[Call, tuple[Layout, ...], tuple[Layout | None, ...]], Callable[..., Any] | None] | None = None
    flops: int | None = None  # of the whole call; None: one per output element
    why_whole: str = ""

    def shardable(self) -> tuple[str, ...]:
        """Factors a mesh axis can be placed on: not whole, and either kept or reduced."""
        usable = _factors(self.outs) | self.reduce.keys()
        return tuple(factor for factor in self.sizes if factor in usable and factor not in self.whole)

    def undecided(self) -> tuple[str, ...]:
        """Factors that are on no result, and of which nothing says that they are reduced or whole: no axis can split
        them.
        """
        open_factors = _factors(self.ins) - _factors(self.outs) - self.whole - self.reduce.keys()
        return tuple(factor for factor, size in self.sizes.items() if factor in open_factors and size > 1)

    def text(self) -> str:
        """`b0 b1 i, o i -> b0 b1 o`, whole factors in brackets."""

        def word(factor: str) -> str:
            return f"[{factor}]" if factor in self.whole else factor

        def dim_text(factors: Factors) -> str:
            if not factors:
                return "1"
            if len(factors) == 1:
                return word(factors[0])
            return "(" + " ".join(map(word, factors)) + ")"

        def operand_text(operand: Operand | None) -> str:
            return "-" if operand is None else " ".join(map(dim_text, operand))

        return ", ".join(map(operand_text, self.ins)) + " -> " + ", ".join(map(operand_text, self.outs))

    def check(self, call: Call) -> None:
        """Raise RuleError unless the pattern's sizes multiply to the call's shapes and factors are used lawfully."""
        for what, operands, types in (("operand", self.ins, call.ins), ("result", self.outs, call.outs)):
            if len(operands) != len(types):
                raise RuleError(f"{call.target}: rule has {len(operands)} {what}s, the call has {len(types)}")
            for number, (operand, typ) in enumerate(zip(operands, types, strict=True)):
                if operand is None or typ is None:
                    continue
                shape = tuple(self._size(dim) for dim in operand)
                if shape != typ.shape:
                    raise RuleError(
                        f"{call.target}: {what} {number} has shape {typ.shape}, the rule {self.text()} says {shape}"
                    )

    def _size(self, factors: Factors) -> int:
        return prod(self.sizes[factor] for factor in factors)


def _factors(operands: Sequence[Operand | None]) -> set[str]:
    """The factors of operands or results."""
    factors: set[str] = set()
    for operand in operands:
        factors.update(*(operand or ()))
    return factors


@attrs.frozen
class Cost:
    """What one strategy costs one rank: floating point operations, bytes read and written, peak extra bytes."""

    flops: float = 0.0
    nbytes: float = 0.0
    peak_bytes: int = 0
    extra_s: float = 0.0  # communication inside the local code, in seconds


@attrs.frozen
class Strategy:
    """One way to run one operator call on a mesh: the layouts it wants and gives, and its local code.

    `name`: "{dp: b, tp: o}". `local`: None runs the operator itself on the local parts (arguments through the rule's
    `localize`); otherwise `local(*shards, mesh)` in terms of `cf.collectives` and torch, traced into the program.
    """

    name: str
    ins: tuple[Layout, ...]
    outs: tuple[Layout | None, ...]
    cost: Cost = Cost()
    local: Callable[..., Any] | None = None
    axes: tuple[tuple[str, str], ...] = ()  # (mesh axis, factor) in order

    def with_pattern(
        self,
        words: Sequence[tuple[str, str]],
        local: Callable[..., Any],
        *,
        flops: float | None = None,
        extra_s: float = 0.0,
        peak_bytes: float = 0,
        outs: tuple[Layout | None, ...] | None = None,
    ) -> Strategy:
        """This way to place other axes (one that `cf.ext.ways` gives) with a pattern of your own beside it.

        `words`: (axis, what plans call the pattern there). `flops`, `outs`: instead of the way's own; `extra_s`,
        `peak_bytes`: communication and buffers of the local code.
        """
        texts = [f"{axis}: {word}" for axis, word in words]
        own_text = self.name.strip("{}")
        if own_text:
            texts.append(own_text)
        cost = attrs.evolve(
            self.cost, flops=self.cost.flops if flops is None else flops, extra_s=extra_s, peak_bytes=int(peak_bytes)
        )
        return attrs.evolve(
            self,
            name="{" + ", ".join(texts) + "}",
            outs=self.outs if outs is None else outs,
            cost=cost,
            local=local,
            axes=(*words, *self.axes),
        )
