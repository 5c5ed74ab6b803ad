"""Finding column/row pairs: which product's result feeds which product's operand, through whatever keeps the factor.

    q, k, v   column  ->  view, rotate, attention, view  ->  o     row
    gate, up  column  ->  silu, mul                      ->  down  row

Problem: which weights Megatron splits by columns and which by rows is known per model family, and every framework keeps
a table of families. Idea: the traced program knows. Walk it once and give every product with a weight its columns, unless
what it reads arrives split along the very dim that it sums over: then it is the row partner of those columns. A column
product that reaches no row product stays whole. Where a fused weight is cut into parts (`q, k, v = qkv.split(d)`), plain
columns cannot pass and stripes can: `(3 tp o)`, each rank has its columns of every part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import attrs

import colofunc as cf

WEIGHTS = ("param", "frozen")
TRANSPOSES = ("aten.t.default", "aten.transpose.int", "aten.permute.default")
VIEWS = ("aten.view.", "aten._unsafe_view.", "aten.reshape.", "aten.clone.", "aten._to_copy.")
LOSSES = ("nll_loss", "cross_entropy")


@attrs.frozen
class Product:
    """A product of an activation with a weight: node index, the leaf, the dims of the leaf that are summed and kept."""

    index: int
    leaf: int
    summed: int
    kept: int
    bias: int | None
    weight_factors: tuple[str, str]  # (summed, kept) factors of the rule
    path: str


@attrs.frozen
class Pairs:
    """`columns`, `rows`: product -> stripes (1: plain). `vocabulary`: columns whose result reaches the loss split."""

    columns: Mapping[Product, int]
    rows: Mapping[Product, int]
    vocabulary: tuple[Product, ...]


def products(program: Any, rules: cf.Rules) -> Iterator[Product]:
    """Forward products of an activation with a 2-dim weight leaf (as it is, cast or transposed)."""
    made = program.producers()
    for index, node in enumerate(program.nodes):
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is None or rule.flops is None or rule.outs[0] is None:
            continue
        out = {f for dim in rule.outs[0] for f in dim}
        for k, ref in enumerate(node.refs):
            leaf, swapped = leaf_of(program, made, ref)
            operand = rule.ins[k]
            if leaf is None or len(operand) != 2 or any(len(dim) != 1 for dim in operand):
                continue
            (a,), (b,) = operand
            if (a in out) == (b in out):
                continue
            kept = 0 if a in out else 1
            factors = (b, a) if kept == 0 else (a, b)
            bias = next((leaf_of(program, made, r)[0] for j, r in enumerate(node.refs) if rule.ins[j] == ((factors[1],),)), None)
            place = 1 - kept if swapped else kept
            yield Product(index, leaf, 1 - place, place, bias, factors, node.path)
            break


def work(program: Any, rules: cf.Rules) -> dict[int, int]:
    """Node index -> flops, of forward operators that multiply with a weight: products, convolutions, whatever has flops."""
    made = program.producers()
    found = {}
    for index, node in enumerate(program.nodes):
        rule = rules.rule(node) if node.phase == "forward" else None
        if rule is not None and rule.flops is not None and any(leaf_of(program, made, r)[0] is not None for r in node.refs):
            found[index] = rule.flops
    return found


def leaf_of(program: Any, made: Mapping[int, Any], id: int) -> tuple[int | None, bool]:
    """(weight leaf behind a value, whether its dims are swapped)."""
    swapped = False
    while id in made and len(made[id].refs) == 1:
        node = made[id]
        source = program.values[node.refs[0]].shape
        if node.target in TRANSPOSES and len(source) == 2:
            swapped = not swapped
        elif source != program.values[id].shape:
            return None, False
        id = node.refs[0]
    return (id if program.values[id].role in WEIGHTS else None), swapped


def gradients(program: Any, product: Product, targets: tuple[str, ...]) -> tuple[int, ...]:
    """What backward makes with one product's operands: of those under its path that read its weight, or give a gradient of its
    weight's shape from what it read."""
    made = program.producers()
    forward = program.nodes[product.index]
    reads = {_root(program, made, ref) for ref in forward.refs}
    found = []
    for node in program.nodes:
        if node.phase == "backward" and node.path == product.path and node.target in targets:
            roots = {_root(program, made, ref) for ref in node.refs}
            shape = program.values[node.outs[0]].shape
            if product.leaf in roots or (roots & reads and sorted(shape) == sorted(program.values[product.leaf].shape)):
                found.append(node.outs[0])
    return tuple(found)


def _root(program: Any, made: Mapping[int, Any], id: int) -> int:
    """The value that an id is, but for how its dims are cut and in which order they stand, and for casts."""
    while id in made and made[id].target.startswith((*TRANSPOSES, *VIEWS)):
        id = made[id].refs[0]
    return id


def find(program: Any, mesh: cf.Mesh, axis: str) -> Pairs:
    """The pairs of a program over `axis`."""
    rules = cf.Rules(program, mesh)
    every = {p.index: p for p in products(program, rules)}
    stripes = dict.fromkeys(every, 1)  # what each product is tried as; absent: whole
    tried: dict[int, set[int]] = {i: {1} for i in every}
    while True:
        walk = _Walk(program, mesh, axis, rules, every, stripes)
        walk.run()
        lone = [i for i in walk.columns if i not in walk.paired or i in walk.summed]
        if not lone:
            columns = {every[i]: stripes[i] for i in walk.columns}
            rows = {every[i]: n for i, n in walk.rows.items()}
            return Pairs(columns, rows, tuple(every[i] for i in walk.columns if i in walk.lost))
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

    program: Any
    mesh: cf.Mesh
    axis: str
    rules: cf.Rules
    every: Mapping[int, Product]
    stripes: Mapping[int, int]
    lies: dict[int, cf.Layout] = attrs.field(factory=dict)
    origins: dict[int, frozenset[int]] = attrs.field(factory=dict)
    columns: list[int] = attrs.field(factory=list)
    rows: dict[int, int] = attrs.field(factory=dict)  # row product -> stripes in which its operand arrives
    paired: set[int] = attrs.field(factory=set)
    summed: set[int] = attrs.field(factory=set)  # columns over which a statistic is taken (a norm): the flow is a stream's
    lost: set[int] = attrs.field(factory=set)  # columns that end in a loss
    guilty: set[int] = attrs.field(factory=set)  # columns that an operator does not take, whatever else it reads
    cuts: dict[int, set[int]] = attrs.field(factory=dict)  # column -> stripes that the operator where it ended may pass

    def run(self) -> None:
        for index, node in enumerate(self.program.nodes):
            if node.phase != "forward":
                continue
            if index in self.every:
                self.product(index, node)
            elif any(r in self.lies for r in node.refs):
                self.passes(node)

    def product(self, index: int, node: Any) -> None:
        mine = self.every[index]
        seeds = {r: self.lies[r] for r in node.refs if r in self.lies}
        if seeds:
            strategy = self.rules.take(node, seeds)
            if strategy is not None and dict(strategy.axes).get(self.axis) == mine.weight_factors[0]:
                self.rows[index] = max(_stripes(layout, self.axis) for layout in seeds.values())
                self.paired |= frozenset().union(*(self.origins[r] for r in seeds))
            return
        stripe = self.stripes.get(index)
        if stripe is None:
            return
        strategy = self.rules.place(node, mine.weight_factors[1], self.axis, stripe)
        if strategy is None or strategy.outs[0] is None:
            return
        self.columns.append(index)
        self.lies[node.outs[0]], self.origins[node.outs[0]] = strategy.outs[0], frozenset({index})

    def passes(self, node: Any) -> None:
        seeds = {r: self.lies[r] for r in node.refs if r in self.lies}
        origins = frozenset().union(*(self.origins[r] for r in seeds))
        loss = any(word in node.target for word in LOSSES)
        strategy = self.rules.take(node, seeds, opened="softmax" in node.target or loss)
        if strategy is None:
            alone = [r for r in seeds if self.rules.take(node, {r: seeds[r]}, opened=False) is None]
            self.guilty |= frozenset().union(*(self.origins[r] for r in alone))
            for origin in origins:
                self.cuts.setdefault(origin, set()).update(s for r in seeds for s in self.rules.cuts(node, r, self.lies[r]))
            return
        if loss:
            self.paired |= origins
            self.lost |= origins
        elif any(layout is not None and layout.pending for layout in strategy.outs):
            self.summed |= origins
        for out, layout in zip(node.outs, strategy.outs, strict=True):
            if out is not None and layout is not None and not layout.pending and not layout.is_replicated:
                self.lies[out], self.origins[out] = layout, origins


def _stripes(layout: cf.Layout, axis: str) -> int:
    """How many parts stand before an axis in its dim."""
    dim = next(dim for dim in layout.dims if any(a == axis for _, a in dim))
    return prod(size for size, _ in dim[: next(k for k, (_, a) in enumerate(dim) if a == axis)])
