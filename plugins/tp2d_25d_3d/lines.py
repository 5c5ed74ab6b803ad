"""The plans "1d" and "auto": products split over one axis.

    x whole -> q, k, v column (tp o) -> attention over heads -> o row (tp i) -> pending sum: one all-reduce, x whole

Per layer and step "1d" has four all-reduces of (b, s, d): two forward (behind each row product), two backward (behind each
group of column products). "auto" leaves the split of each product to cost. Source: Megatron-LM (1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from itertools import product as combine
from typing import Any

import attrs
from colofunc_plugins.tp2d_25d_3d.pairs import EXPERTS, group, hidden
from colofunc_plugins.tp2d_25d_3d.summa import Grid

import colofunc as cf


@attrs.frozen
class Megatron:
    """What `tensor("1d", axis)` returns: a named plan."""

    axes: tuple[str, ...]
    sequence: bool = False
    vocabulary: bool = True

    @property
    def name(self) -> str:
        return f"tensor(1d, {self.axes[0]})"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        (axis,) = mesh.atoms(self.axes)
        if mesh.axis_size(axis) == 1:
            return []
        layers = {} if self.sequence else {path: leaves for _, path, leaves in hidden(program, cf.Rules(program, mesh), axis)}
        specs: dict[int, str | cf.Layout] = dict(self._specs(program, mesh, axis))
        for leaves in layers.values():
            specs |= leaves
        if not specs:
            raise cf.PlanError(
                f"{self.name} finds no two products with weights of which one feeds the other and whose heads and widths "
                f"divide over {mesh.axis_size(axis)} ranks; use fewer, or tensor('auto', {axis!r})"
            )
        rest = {3: f"b ({axis} s) d"} if self.sequence else {}
        found = []
        for value in (program.values[id] for id in program.inputs):
            if value.role in ("param", "frozen"):
                spec = specs.get(value.id, "...")
                found.append(cf.Wish(value.name, spec, self.axes, (value.role,), self.name, along=value.id in specs, rest=rest))
        for path in layers:
            want = f"{{{axis}: f}}"
            found.append(cf.Wish(path or "*", want, self.axes, source=self.name, targets=EXPERTS, phases=("forward", "backward")))
        kept = ((program.values[state].name, specs.get(id, "...")) for state, id in cf.reading.moments(program).items())
        return found + [cf.Wish(name, spec, self.axes, ("state",), self.name) for name, spec in kept]

    def _specs(self, program: Any, mesh: cf.Mesh, axis: str) -> Iterator[tuple[int, str]]:
        """Leaf -> spec, of weights, biases and tables."""
        pairs, tables = cf.product_pairs(program, mesh, axis), _tables(program)
        for product, stripes in pairs.columns.items():
            if product in pairs.vocabulary and not self.vocabulary:
                continue
            split = group(axis, "o", stripes)
            yield product.leaf, product.spec(kept=split)
            if product.bias is not None:
                yield product.bias, split
            if product in pairs.vocabulary:
                rows = program.values[product.leaf].shape[product.kept]
                yield from ((id, f"({axis} v) e") for id in tables if program.values[id].shape[0] == rows and id != product.leaf)
        for product, stripes in pairs.rows.items():
            yield product.leaf, product.spec(summed=group(axis, "i", stripes))


def _tables(program: Any) -> list[int]:
    """Weights that are looked up by index."""
    refs = [node.refs[0] for node in program.nodes if node.phase == "forward" and node.target.startswith("aten.embedding.")]
    return [id for id in dict.fromkeys(refs) if program.values[id].role in ("param", "frozen")]


@attrs.frozen
class Auto:
    """What `tensor("auto", axes)` returns: every product with a weight splits its work over the axes, as cost says.

    Over two axes also as SUMMA, either way round: more messages than gathering operands whole and the same bytes, so cost
    takes it where memory asks for it.
    """

    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"tensor(auto, {', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(cf.products.FORMS, self.strategies) if len(self.axes) == 2 else {}

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        for grid in self.grids(mesh):
            yield from grid.strategies(call, mesh)

    def grids(self, mesh: cf.Mesh) -> list[Grid]:
        """Both ways round."""
        names = [a for a in self.axes if a in mesh and mesh.axis_size(a) > 1]
        return [Grid(x, y, mesh.axis_size(x), mesh.axis_size(y)) for x, y in permutations(names)] if len(names) == 2 else []

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        axes = [a for a in mesh.atoms(self.axes) if mesh.axis_size(a) > 1]
        if not axes:
            return []
        found, rules = [], cf.Rules(program, mesh)
        patterns = tuple(grid.words(1) for grid in self.grids(mesh))
        for product in cf.products.weighted(program, rules):
            node = program.nodes[product.index]
            able = [[(a, f) for f in product.weight_factors if rules.place(node, f, a) is not None] for a in axes]
            if all(able):
                ways = (*combine(*able), *(patterns if node.target in cf.products.FORMS else ()))
                want = tuple("{" + ", ".join(f"{axis}: {word}" for axis, word in way) + "}" for way in ways)
                found.append(cf.Wish(node.path, want, self.axes, source=self.name, targets=(node.target,)))
        if not found:
            n = " by ".join(str(mesh.axis_size(a)) for a in axes)
            raise cf.PlanError(f"{self.name}: no product with a weight has a dim that divides over {n} ranks; use fewer")
        return list(dict.fromkeys(found))
