"""Pairs of products: which product's result feeds which product's operand, through whatever keeps the factor.

    q, k, v   column  ->  view, rotate, attention, view  ->  o     row
    gate, up  column  ->  silu, mul                      ->  down  row
    q, w      column  ->  relu(q @ keys)                 ->  the sum over heads, weighted with w (an indexer)

Problem: tensor parallelism splits some weights by columns and others by rows, which is known per model family, and
every framework keeps a table of families. Idea: the traced program knows. Walk it once and give every product with a
weight its columns, unless what it reads arrives split along the very dim that it sums over: then it is the row partner
of those columns. A column product that reaches no row product stays whole. Where a fused weight is cut into parts
(`q, k, v = qkv.split(d)`), plain columns cannot pass and stripes can: `(3 tp o)`, each rank has its columns of every
part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod

import attrs

from colofunc.mesh import Mesh
from colofunc.ops.experts_parts import EXPERTS
from colofunc.ops.fp8 import MAXIMUM
from colofunc.ops.int8_products import SIZE
from colofunc.planner.wishes.products import Product, tables, weighted
from colofunc.planner.wishes.propagation import Rules
from colofunc.program.ir import Node, Program
from colofunc.spec.layout import Layout

__all__ = ["product_pairs"]

LOSSES = ("nll_loss", "cross_entropy")
"""Words in the names of operators that are losses."""
OPENED = ("softmax", "rounded_rows")
"""Operators over whole rows that columns may pass split, for a few bytes a row."""
MAXIMA = (MAXIMUM, SIZE)
"""Maxima for a cast, which say nothing of the flow."""
SUMS = ("aten.mm.default", "aten.bmm.default", "aten.baddbmm.default")
"""Products of activations."""


@attrs.frozen
class Pairs:
    """`columns`, `rows`: product -> stripes (1: plain).

    `vocabulary`: columns that are heads: no product comes behind them.
    """

    columns: Mapping[Product, int]
    rows: Mapping[Product, int]
    vocabulary: tuple[Product, ...]


def product_pairs(program: Program, mesh: Mesh, axis: str, rules: Rules | None = None) -> Pairs:
    """The pairs of a program over `axis`, of what it divides: `.columns` and `.rows` (`cf.ext.products.Product` ->
    stripes), `.vocabulary`.

    `rules`: those that the plan was given.
    """
    rules = rules or Rules(program, mesh)
    products = {product.index: product for product in weighted(program, rules)}
    final = _final(program, products)
    vocabularies = _table_rows(program)
    stripes = dict.fromkeys(products, 1)  # what each product is tried as; absent: whole
    tried: dict[int, set[int]] = {index: {1} for index in products}
    while True:
        walk = _Walk(program, mesh, axis, rules, products, stripes)
        walk.run()
        heads = set()
        for index in final:
            product = products[index]
            if walk.leaves(index) or program.values[product.leaf].shape[product.kept] in vocabularies:
                heads.add(index)
        unpaired = heads.difference(walk.paired)
        lone = []
        for index in walk.columns:
            if index in walk.summed or not (index in walk.paired or index in heads):
                lone.append(index)
        if not lone:
            columns = {products[index]: stripes[index] for index in walk.columns}
            rows = {products[index]: count for index, count in walk.rows.items()}
            vocabulary = [products[index] for index in walk.columns if index in walk.lost or index in unpaired]
            return Pairs(columns, rows, tuple(vocabulary))
        # Stripes first: what they join may make others part of a pair.
        if not _take_next_stripes(lone, walk, stripes, tried):
            # Keys that no head divides stop queries that would go through: without them these start anew.
            guilty = [index for index in lone if index in walk.guilty] or lone
            for index in lone:
                stripes[index], tried[index] = 1, {1}
            for index in guilty:
                stripes.pop(index)


def _take_next_stripes(lone: Sequence[int], walk: _Walk, stripes: dict[int, int], tried: dict[int, set[int]]) -> bool:
    """Whether some lone column gets stripes that were not tried: the fewest that the operator where it ended may pass.
    """
    taken = False
    for index in lone:
        untried = walk.cuts.get(index, set()) - tried[index]
        if untried:
            stripes[index] = min(untried)
            tried[index].add(stripes[index])
            taken = True
    return taken


@attrs.define
class _Walk:
    """One walk: values that lie split, and from which columns they come."""

    program: Program
    mesh: Mesh
    axis: str
    rules: Rules
    products: Mapping[int, Product]  # by index of their nodes
    stripes: Mapping[int, int]
    lies: dict[int, Layout] = attrs.field(factory=dict)
    origins: dict[int, frozenset[int]] = attrs.field(factory=dict)
    columns: list[int] = attrs.field(factory=list)
    rows: dict[int, int] = attrs.field(factory=dict)  # row product -> stripes in which its operand arrives
    paired: set[int] = attrs.field(factory=set)
    summed: set[int] = attrs.field(
        factory=set
    )  # columns over which a statistic is taken (a norm): the flow is a stream's
    lost: set[int] = attrs.field(factory=set)  # columns that end in a loss
    guilty: set[int] = attrs.field(factory=set)  # columns that an operator does not take, whatever else it reads
    ended: set[int] = attrs.field(factory=set)  # columns whose result some operator does not take split
    cuts: dict[int, set[int]] = attrs.field(factory=dict)  # column -> stripes that the operator where it ended may pass

    def run(self) -> None:
        for index, node in enumerate(self.program.nodes):
            if node.phase != "forward":
                continue
            if index in self.products:
                self.product(index, node)
            elif node.target not in MAXIMA and any(ref in self.lies for ref in node.refs):
                self.passes(node)

    def _origins_of(self, refs: Iterable[int]) -> frozenset[int]:
        """The columns that some values come from."""
        return frozenset[int]().union(*(self.origins[ref] for ref in refs))

    def leaves(self, column: int) -> bool:
        """Whether a column's result comes out of the step split."""
        outputs = {out for out in self.program.outputs if column in self.origins.get(out, ())}
        return bool(outputs) and column not in self.ended

    def product(self, index: int, node: Node) -> None:
        """A product whose operand arrives split is its row partner, if it sums over that; another one begins a column.
        """
        summed, kept = self.products[index].weight_factors
        seeds = {ref: self.lies[ref] for ref in node.refs if ref in self.lies}
        if seeds:
            strategy = self.rules.take(node, seeds)
            if strategy is not None and dict(strategy.axes).get(self.axis) == summed:
                self.rows[index] = max(_stripes(layout, self.axis) for layout in seeds.values())
                self.paired |= self._origins_of(seeds)
            else:
                self.ended |= self._origins_of(seeds)
            return
        stripes = self.stripes.get(index)
        if stripes is None:
            return
        strategy, out = self.rules.place(node, kept, self.axis, stripes), node.outs[0]
        if strategy is None or strategy.outs[0] is None or out is None:
            return
        self.columns.append(index)
        self.lies[out], self.origins[out] = strategy.outs[0], frozenset({index})

    def closes(self, node: Node) -> bool:
        """Whether a product of activations sums over what the columns split, and gives less than it reads: it is their
        row partner.

        A sum over the heads of an indexer is; scores that sum over the width of a head are not, which are larger than
        queries and keys.
        """
        if node.target not in SUMS:
            return False
        (result,) = (self.program.values[out] for out in node.results)
        return prod(result.shape) < max(prod(self.program.values[ref].shape) for ref in node.refs)

    def passes(self, node: Node) -> None:
        """An operator that is no product with a weight: what it makes of split operands lies split too, or the columns
        end here.
        """
        seeds = {ref: self.lies[ref] for ref in node.refs if ref in self.lies}
        origins = self._origins_of(seeds)
        loss = any(word in node.target for word in LOSSES)
        opened = loss or any(word in node.target for word in OPENED)
        strategy = self.rules.take(node, seeds, opened=opened)
        if strategy is None:
            self._end(node, seeds)
            return
        if loss:
            self.paired |= origins
            self.lost |= origins
        elif any(layout is not None and layout.pending for layout in strategy.outs):
            if self.closes(node):
                self.paired |= origins
            else:
                self.summed |= origins
        for out, layout in zip(node.outs, strategy.outs, strict=True):
            if out is not None and layout is not None and not layout.pending and not layout.is_replicated:
                self.lies[out], self.origins[out] = layout, origins

    def _end(self, node: Node, seeds: Mapping[int, Layout]) -> None:
        """Columns end at an operator that does not take their results split; stripes might pass it."""
        refused = [ref for ref in seeds if self.rules.take(node, {ref: seeds[ref]}, opened=False) is None]
        origins = self._origins_of(seeds)
        self.ended |= origins
        self.guilty |= self._origins_of(refused)
        stripes: set[int] = set()
        for ref, layout in seeds.items():
            stripes.update(self.rules.cuts(node, ref, layout))
        for origin in origins:
            self.cuts.setdefault(origin, set()).update(stripes)


def _final(program: Program, products: Collection[int]) -> set[int]:
    """Products behind which no other product with a weight comes, nor attention or experts."""
    final = set(products)
    behind: dict[int, frozenset[int]] = {}  # value -> products before it
    for index, node in enumerate(program.nodes):
        if node.phase != "forward":
            continue
        before = frozenset[int]().union(*(behind.get(ref, frozenset()) for ref in node.refs))
        if index in products or node.target in ("colofunc.attention", EXPERTS):
            final -= before
            before = frozenset({index} & final)
        behind |= dict.fromkeys(node.results, before)
    return final


def _table_rows(program: Program) -> set[int]:
    """How many rows the tables have that are looked up by index: sizes of vocabularies."""
    return {program.values[table].shape[0] for table in tables(program)}


def _stripes(layout: Layout, axis: str) -> int:
    """How many parts stand before an axis in its dim."""
    for dim in layout.dims:
        before = 1
        for size, owner in dim:
            if owner == axis:
                return before
            before *= size
    raise AssertionError(f"nothing lies on {axis!r} in {layout.text()}")
