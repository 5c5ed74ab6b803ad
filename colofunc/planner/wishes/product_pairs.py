"""Pairs of products: which product's result feeds which product's operand, through whatever keeps the factor.

    q, k, v   column  ->  view, rotate, attention, view  ->  o     row
    gate, up  column  ->  silu, mul                      ->  down  row
    q, w      column  ->  relu(q @ keys)                 ->  the sum over heads, weighted with w (an indexer)

Problem: tensor parallelism splits some weights by columns and others by rows, which is known per model family, and every
framework keeps a table of families. Idea: the traced program knows. Walk it once and give every product with a weight its columns, unless
what it reads arrives split along the very dim that it sums over: then it is the row partner of those columns. A column
product that reaches no row product stays whole. Where a fused weight is cut into parts (`q, k, v = qkv.split(d)`), plain
columns cannot pass and stripes can: `(3 tp o)`, each rank has its columns of every part.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import attrs

from colofunc.mesh import Mesh
from colofunc.ops.fp8 import MAXIMUM
from colofunc.ops.int8_products import SIZE
from colofunc.planner.wishes.products import Product, weighted
from colofunc.planner.wishes.propagation import Rules
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout

__all__ = ["product_pairs"]

LOSSES = ("nll_loss", "cross_entropy")
OPENED = ("softmax", "rounded_rows")
"""Operators over whole rows that columns may pass split, for a few bytes a row."""
MAXIMA = (MAXIMUM, SIZE)
"""Maxima for a cast, which say nothing of the flow."""
SUMS = ("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default")
"""Products of activations."""


@attrs.frozen
class Pairs:
    """`columns`, `rows`: product -> stripes (1: plain). `vocabulary`: columns that are heads: no product comes behind them."""

    columns: Mapping[Product, int]
    rows: Mapping[Product, int]
    vocabulary: tuple[Product, ...]


def product_pairs(program: Program, mesh: Mesh, axis: str, rules: Rules | None = None) -> Pairs:
    """The pairs of a program over `axis`, of what it divides: `.columns` and `.rows` (`cf.ext.products.Product` -> stripes), `.vocabulary`.

    `rules`: those that the plan was given.
    """
    rules = rules or Rules(program, mesh)
    every = {p.index: p for p in weighted(program, rules)}
    final, tables = _final(program, every), _table_rows(program)
    stripes = dict.fromkeys(every, 1)  # what each product is tried as; absent: whole
    tried: dict[int, set[int]] = {i: {1} for i in every}
    while True:
        walk = _Walk(program, mesh, axis, rules, every, stripes)
        walk.run()
        heads = {i for i in final if walk.leaves(i) or program.values[every[i].leaf].shape[every[i].kept] in tables}
        lone = [i for i in walk.columns if i in walk.summed or (i not in walk.paired and i not in heads)]
        if not lone:
            columns = {every[i]: stripes[i] for i in walk.columns}
            rows = {every[i]: n for i, n in walk.rows.items()}
            return Pairs(columns, rows, tuple(every[i] for i in walk.columns if i in walk.lost or (i in heads and i not in walk.paired)))
        # Stripes first: what they join may make others part of a pair.
        more = {i: next((s for s in sorted(walk.cuts.get(i, ())) if s not in tried[i]), None) for i in lone}
        for i in lone:
            step = more[i]
            if step is not None:
                stripes[i] = step
                tried[i].add(step)
        if not any(more.values()):
            # Keys that no head divides stop queries that would go through: without them these start anew.
            guilty = [i for i in lone if i in walk.guilty] or lone
            for i in lone:
                stripes[i], tried[i] = 1, {1}
            for i in guilty:
                stripes.pop(i)


@attrs.define
class _Walk:
    """One walk: values that lie split, and from which columns they come."""

    program: Program
    mesh: Mesh
    axis: str
    rules: Rules
    every: Mapping[int, Product]
    stripes: Mapping[int, int]
    lies: dict[int, Layout] = attrs.field(factory=dict)
    origins: dict[int, frozenset[int]] = attrs.field(factory=dict)
    columns: list[int] = attrs.field(factory=list)
    rows: dict[int, int] = attrs.field(factory=dict)  # row product -> stripes in which its operand arrives
    paired: set[int] = attrs.field(factory=set)
    summed: set[int] = attrs.field(factory=set)  # columns over which a statistic is taken (a norm): the flow is a stream's
    lost: set[int] = attrs.field(factory=set)  # columns that end in a loss
    guilty: set[int] = attrs.field(factory=set)  # columns that an operator does not take, whatever else it reads
    ended: set[int] = attrs.field(factory=set)  # columns whose result some operator does not take split
    cuts: dict[int, set[int]] = attrs.field(factory=dict)  # column -> stripes that the operator where it ended may pass

    def run(self) -> None:
        for index, node in enumerate(self.program.nodes):
            if node.phase != "forward":
                continue
            if index in self.every:
                self.product(index, node)
            elif node.target not in MAXIMA and any(r in self.lies for r in node.refs):
                self.passes(node)

    def leaves(self, column: int) -> bool:
        """Whether a column's result comes out of the step split."""
        outputs = {out for out in self.program.outputs if column in self.origins.get(out, ())}
        return bool(outputs) and column not in self.ended

    def product(self, index: int, node: Node) -> None:
        mine = self.every[index]
        seeds = {r: self.lies[r] for r in node.refs if r in self.lies}
        if seeds:
            strategy = self.rules.take(node, seeds)
            if strategy is not None and dict(strategy.axes).get(self.axis) == mine.weight_factors[0]:
                self.rows[index] = max(_stripes(layout, self.axis) for layout in seeds.values())
                self.paired |= frozenset().union(*(self.origins[r] for r in seeds))
            else:
                self.ended |= frozenset().union(*(self.origins[r] for r in seeds))
            return
        stripe = self.stripes.get(index)
        if stripe is None:
            return
        strategy, out = self.rules.place(node, mine.weight_factors[1], self.axis, stripe), node.outs[0]
        if strategy is None or strategy.outs[0] is None or out is None:
            return
        self.columns.append(index)
        self.lies[out], self.origins[out] = strategy.outs[0], frozenset({index})

    def closes(self, node: Node) -> bool:
        """Whether a product of activations sums over what the columns split, and gives less than it reads: it is their row partner.

        A sum over the heads of an indexer is; scores that sum over the width of a head are not, which are larger than queries and keys.
        """
        if node.target not in SUMS:
            return False
        (result,) = (self.program.values[out] for out in node.outs if out is not None)
        return prod(result.shape) < max(prod(self.program.values[ref].shape) for ref in node.refs)

    def passes(self, node: Node) -> None:
        seeds = {r: self.lies[r] for r in node.refs if r in self.lies}
        origins = frozenset().union(*(self.origins[r] for r in seeds))
        loss = any(word in node.target for word in LOSSES)
        strategy = self.rules.take(node, seeds, opened=loss or any(word in node.target for word in OPENED))
        if strategy is None:
            alone = [r for r in seeds if self.rules.take(node, {r: seeds[r]}, opened=False) is None]
            self.ended |= origins
            self.guilty |= frozenset().union(*(self.origins[r] for r in alone))
            for origin in origins:
                self.cuts.setdefault(origin, set()).update(s for r in seeds for s in self.rules.cuts(node, r, self.lies[r]))
            return
        if loss:
            self.paired |= origins
            self.lost |= origins
        elif any(layout is not None and layout.pending for layout in strategy.outs):
            closed = self.closes(node)
            self.paired |= origins if closed else frozenset()
            self.summed |= frozenset() if closed else origins
        for out, layout in zip(node.outs, strategy.outs, strict=True):
            if out is not None and layout is not None and not layout.pending and not layout.is_replicated:
                self.lies[out], self.origins[out] = layout, origins


def _final(program: Program, every: Mapping[int, Product]) -> set[int]:
    """Products behind which no other product with a weight comes, nor attention or experts."""
    final = set(every)
    behind: dict[int, frozenset[int]] = {}  # value -> products before it
    for index, node in enumerate(program.nodes):
        if node.phase != "forward":
            continue
        before = frozenset[int]().union(*(behind.get(ref, frozenset()) for ref in node.refs))
        if index in every or node.target in ("colofunc.attention", "colofunc.experts"):
            final -= before
            before = frozenset({index} & final)
        behind |= dict.fromkeys(node.results, before)
    return final


def _table_rows(program: Program) -> set[int]:
    """How many rows the tables have that are looked up by index: sizes of vocabularies."""
    found = set()
    for node in program.nodes:
        if node.phase == "forward" and node.target.startswith("aten.embedding."):
            found.add(program.values[node.refs[0]].shape[0])
    return found


def _stripes(layout: Layout, axis: str) -> int:
    """How many parts stand before an axis in its dim."""
    dim = next(dim for dim in layout.dims if any(a == axis for _, a in dim))
    return prod(size for size, _ in dim[: next(k for k, (_, a) in enumerate(dim) if a == axis)])
