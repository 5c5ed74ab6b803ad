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
from colofunc.ops.torch_facts import BATCHED_PRODUCTS
from colofunc.planner.wishes.products import Product, root, tables, weighted
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
SUMS = ("aten.mm.default", *BATCHED_PRODUCTS)
"""Products of activations."""
SCALED = ("aten.mul.", "aten.div.", "aten.view.", "aten._unsafe_view.", "aten._to_copy.")
"""What may stand between an adapter and the sum."""


@attrs.frozen
class Pairs:
    """`columns`, `rows`: product -> stripes (1: plain).

    `vocabulary`: columns that are heads: no product comes behind them.
    """

    columns: Mapping[Product, int]
    rows: Mapping[Product, int]
    vocabulary: tuple[Product, ...]


def product_pairs(
    program: Program, mesh: Mesh, axis: str, rules: Rules | None = None, *, adapters_by_columns: bool = False
) -> Pairs:
    """The pairs of a program over `axis`, of what it divides: `.columns` and `.rows` (`cf.ext.products.Product` ->
    stripes), `.vocabulary`.

    rules: those that the plan was given. adapters_by_columns: of an adapter beside a column product both matrices are
    split by columns, and what passes between them is gathered, which is narrow. Else the second is the row partner of
    the first, as it is for two products of which one feeds the other, and gives a pending sum of what is wide.
    """
    rules = rules or Rules(program, mesh)
    products = {product.index: product for product in weighted(program, rules)}
    final = _final(program, products)
    vocabularies = _table_rows(program)
    adapters = _adapters(program, products) if adapters_by_columns else {}
    stripes = dict.fromkeys(products, 1)  # what each product is tried as; absent: whole
    tried: dict[int, set[int]] = {index: {1} for index in products}
    while True:
        walk = _Walk(program, mesh, axis, rules, products, stripes, adapters)
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
            vocabulary = [index for index in walk.columns if index in walk.lost or index in unpaired]
            for index in walk.beside:
                base = adapters[index].base
                columns[products[index]] = stripes[base]
                if base in vocabulary:
                    vocabulary += [adapters[index].first, index]
            return Pairs(columns, rows, tuple(products[index] for index in vocabulary))
        # Stripes first: what they join may make others part of a pair.
        if not _take_next_stripes(lone, walk, stripes, tried):
            # Keys that no head divides stop queries that would go through: without them these start anew.
            guilty = [index for index in lone if index in walk.guilty] or lone
            for index in lone:
                stripes[index], tried[index] = 1, {1}
            for index in guilty:
                stripes.pop(index)


def _take_next_stripes(lone: Sequence[int], walk: _Walk, stripes: dict[int, int], tried: dict[int, set[int]]) -> bool:
    """Whether some lone column gets stripes that were not tried: the fewest that the operator where it ended may pass."""
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
    adapters: Mapping[int, LowRankPair]  # by index of either of their products
    lies: dict[int, Layout] = attrs.field(factory=dict)
    origins: dict[int, frozenset[int]] = attrs.field(factory=dict)
    columns: list[int] = attrs.field(factory=list)
    beside: list[int] = attrs.field(factory=list)  # second products of adapters, split as the columns beside them
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

        Of an adapter beside a column product both are columns. Beside a product that stays whole an adapter does too.
        """
        seeds = {ref: self.lies[ref] for ref in node.refs if ref in self.lies}
        pair = self.adapters.get(index)
        is_second = pair is not None and pair.second == index
        if pair is not None and is_second and pair.base in self.columns and self.lay_out(node, index, pair.base):
            self.paired |= self._origins_of(seeds)
            self.beside.append(index)
        elif seeds:
            self.row(index, node, seeds)
        elif pair is None or (not is_second and (pair.base in self.columns or pair.base in self.rows)):
            if self.lay_out(node, index, index):
                self.columns.append(index)

    def row(self, index: int, node: Node, seeds: Mapping[int, Layout]) -> None:
        """Split by rows where the product sums over what lies split; else the columns end here."""
        summed, _ = self.products[index].weight_factors
        strategy = self.rules.take(node, seeds)
        if strategy is not None and dict(strategy.axes).get(self.axis) == summed:
            self.rows[index] = max(_stripes(layout, self.axis) for layout in seeds.values())
            self.paired |= self._origins_of(seeds)
        else:
            self.ended |= self._origins_of(seeds)

    def lay_out(self, node: Node, index: int, origin: int) -> bool:
        """Lay what a product gives out by columns, in the stripes of `origin`; whether that can be."""
        _, kept = self.products[index].weight_factors
        stripes, out = self.stripes.get(origin), node.outs[0]
        if stripes is None or out is None:
            return False
        strategy = self.rules.place(node, kept, self.axis, stripes)
        if strategy is None or strategy.outs[0] is None:
            return False
        self.lies[out], self.origins[out] = strategy.outs[0], frozenset({origin})
        return True

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


@attrs.frozen
class LowRankPair:
    """Two products of which the second reads just what the first gives, and what it gives is added to what a third one
    has made: the factors of a low-rank matrix beside the third one's, as an adapter's are. Indices of their nodes.
    """

    first: int
    second: int
    base: int


def _adapters(program: Program, products: Mapping[int, Product]) -> dict[int, LowRankPair]:
    """Adapters, by either of their two products."""
    makers = program.makers
    results = {out: index for index in products for out in program.nodes[index].results}
    found = {}
    for second in products:
        # What casts and views make of a result is still the result.
        read = [results.get(root(makers, ref)) for ref in program.nodes[second].refs]
        firsts = [index for index in read if index is not None]
        if len(firsts) != 1:
            continue
        beside = [results.get(root(makers, ref)) for ref in _added_to(program, second)]
        bases = [index for index in beside if index is not None]
        if len(bases) != 1:
            continue
        first, base = firsts[0], bases[0]
        wide, narrow = _sizes(program, products[first])
        _, wide_again = _sizes(program, products[second])
        if base < first and narrow < min(wide, wide_again):
            found[first] = found[second] = LowRankPair(first, second, base)
    return found


def _added_to(program: Program, index: int) -> list[int]:
    """The values to which a product's (first) result is added, scaled or as it is."""
    value = program.nodes[index].outs[0]
    while value is not None:
        readers = [program.nodes[at] for at in program.readers.get(value, ())]
        forward = [reader for reader in readers if reader.phase == "forward"]
        if len(forward) != 1:
            return []
        (reader,) = forward
        if reader.target.startswith("aten.add."):
            return [ref for ref in reader.refs if ref != value]
        if not reader.target.startswith(SCALED) or len(reader.refs) != 1:
            return []
        value = reader.outs[0]
    return []


def _sizes(program: Program, product: Product) -> tuple[int, int]:
    """(columns that a product sums over, columns that it gives)."""
    shape = program.values[product.leaf].shape
    return shape[product.summed], shape[product.kept]


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
