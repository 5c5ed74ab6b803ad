"""The plans "2d", "2.5d" and "3d": every product with a weight on the grid, and what lies between follows.

    tensor("2d", ("x", "y"))              weights (x i) (y o)      activations (x b) s (y d)
    tensor("2.5d", ("x", "y", "z"))       weights (x i) (y o)      activations (x z b) s (y d)       z: depth
    tensor("3d", ("z", "x", "y"))         weights (x z i) (y o)    activations (z y b) s (x d), then (z x b) s (y d), in turn

A product's pattern says where its operands and its result lie; the flow goes on from there through norms, attention
over heads, activation functions and the residual stream, and through all of backward. A fused weight is cut in stripes,
as in "1d". Embeddings, norms' weights and what a size keeps out of the grid are found by cost; so is all else by the
plan "auto".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import permutations
from itertools import product as combine
from math import prod
from typing import Any, ClassVar

import attrs
from colofunc_plugins.tp2d_25d_3d.grid3d import Cube
from colofunc_plugins.tp2d_25d_3d.summa import STRIPES, AxisWords, Grid

import colofunc as cf
from colofunc.ext import products


@attrs.frozen
class Gridded:
    """What `tensor("2d" | "2.5d" | "3d", axes)` returns: a named plan that brings its strategies with it."""

    mode: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None  # of the axes, where they were said
    splits_products: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"tensor({self.mode}, {', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(products.matrix_products(), self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """Of one call, on all grids that the plan uses."""
        if all(axis in mesh for axis in self.axes):  # a mesh of time has none of them
            for grid in self.grids(mesh):
                yield from grid.strategies(call, mesh)

    def grids(self, mesh: cf.Mesh) -> tuple[Grid | Cube, ...]:
        """The grid of column products, and that of row products where it is another."""
        if self.mode == "3d":
            z, x, y = mesh.atoms(self.axes)
            return Cube(x, y, z), Cube(y, x, z)
        return (Grid(*mesh.atoms(self.axes)),)

    def wishes(self, program: Any, mesh: cf.Mesh, rules: cf.ext.Rules | None = None) -> list[cf.ext.Wish]:
        """Rows of the batch, weights on the grid, and the pattern of each product with one of them; experts' as well.
        """
        self._check(mesh)
        if all(mesh.axis_size(axis) == 1 for axis in self.axes):
            return []
        rules = rules or cf.ext.Rules(program, mesh)
        rows = self._rows(program, mesh)
        specs: dict[int, str | cf.Layout] = {}
        patterns = {}
        for product, grid, stripes in self._products(program, mesh, rules):
            inputs = products.dim(grid.lies["w"]["i"], "_")
            outputs = products.dim(grid.lies["w"]["o"], "_", stripes)
            specs.setdefault(product.leaf, product.spec(inputs, outputs))
            for vector in product.vectors:
                specs.setdefault(vector, outputs)
            patterns[product] = grid.words(stripes)
        if not specs:
            sizes = " by ".join(str(mesh.axis_size(axis)) for axis in mesh.atoms(self.axes))
            raise cf.PlanError(
                f"{self.name} finds no product with a weight whose inputs and outputs both divide over {sizes} ranks; "
                "use fewer ranks, or tensor('1d', axis), which splits one of the two"
            )
        found = list(products.wishes(program, mesh, patterns, self.name))
        held = {product.index for product in patterns}
        dense = set(specs)
        # A token's whole width is gathered from the axis that splits it, which has hidden units instead; the others
        # have rows.
        first, width, *more = mesh.atoms(self.axes)
        for index, wishes, leaves in cf.ext.reading.experts(program, mesh, width, self.name, (first, *more), rules):
            held.add(index)
            found += wishes
            specs |= leaves
            dense -= set(leaves)  # what works on them is said already
        products.worthwhile(
            program, rules, held, self.name, "use zero(...) for this model, or sizes that the axes divide"
        )
        for id, spec in cf.ext.reading.with_moments(program, specs).items():
            value = program.values[id]
            found.append(cf.ext.Wish(value.name, spec, self.axes, (value.role,), self.name, along=id in dense))
        return [*rows, *dict.fromkeys(found)]

    def _check(self, mesh: cf.Mesh) -> None:
        atoms, has = mesh.atoms(self.axes), tuple(map(mesh.axis_size, self.axes))
        if len(atoms) != len(self.axes):
            raise cf.PlanError(
                f"{self.name}: a view stands for several axes, {', '.join(atoms)} in all; name single axes"
            )
        for axis, said, size in zip(self.axes, self.sizes or has, has, strict=True):
            if said != size:
                raise cf.PlanError(
                    f"{self.name}: axis {axis!r} of {mesh} has {size} ranks, where the plan says {said}; change one of "
                    "them"
                )

    def _products(
        self, program: Any, mesh: cf.Mesh, rules: cf.ext.Rules
    ) -> Iterator[tuple[products.Product, Grid | Cube, int]]:
        """(product, grid, stripes) of every product that the grid divides."""
        grids = self.grids(mesh)
        pairs = cf.ext.product_pairs(program, mesh, mesh.atoms(self.axes)[-1 if self.mode == "3d" else 1], rules)
        every = list(products.weighted(program, rules))
        # as narrow as there are experts: by cost
        apart = cf.ext.reading.routers(program, {product.index for product in every})
        for product in every:
            if program.nodes[product.index].target not in products.matrix_products() or product.index in apart:
                continue
            grid = grids[-1] if product in pairs.rows else grids[0]
            inputs, outputs = products.parts(mesh, grid.lies, "i"), products.parts(mesh, grid.lies, "o")
            shape = program.values[product.leaf].shape
            stripes = pairs.columns.get(product, 1)
            if stripes not in STRIPES or shape[product.kept] % (outputs * stripes):
                stripes = 1
            if shape[product.summed] % inputs == 0 and shape[product.kept] % outputs == 0:
                yield product, grid, stripes

    def _rows(self, program: Any, mesh: cf.Mesh) -> list[cf.ext.Wish]:
        """The rows of the batch on the axes that are for them."""
        first, _, *depth = mesh.atoms(self.axes)
        if self.mode == "3d":  # further on the one other axis, then on the other
            depth = []
        axes = tuple(sorted((first, *depth), key=mesh.axis_names.index))
        parts = products.parts(mesh, self.grids(mesh)[0].lies, "b") * prod(map(mesh.axis_size, depth))
        leaves = cf.ext.reading.rows(program, parts, self.name)
        return [
            cf.ext.Wish(leaf.name, f"({' '.join(axes)} _) ...", axes, ("batch",), self.name, along=True)
            for leaf in leaves
        ]


@attrs.frozen
class Auto:
    """What `tensor("auto", axes)` returns: every product with a weight splits its work over the axes, as cost says.

    Over two axes also as SUMMA, either way round: more messages than gathering operands whole and the same bytes, so
    cost takes it where memory asks for it.
    """

    axes: tuple[str, ...]
    splits_products: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"tensor(auto, {', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(products.matrix_products(), self.strategies) if len(self.axes) == 2 else {}

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        for grid in self.grids(mesh):
            yield from grid.strategies(call, mesh)

    def grids(self, mesh: cf.Mesh) -> list[Grid]:
        """Both ways round."""
        names = [axis for axis in self.axes if axis in mesh and mesh.axis_size(axis) > 1]
        return [Grid(*way) for way in permutations(names)] if len(names) == 2 else []

    def wishes(self, program: Any, mesh: cf.Mesh, rules: cf.ext.Rules | None = None) -> list[cf.ext.Wish]:
        """Of every product with a weight all ways to split its work over all axes."""
        axes = [axis for axis in mesh.atoms(self.axes) if mesh.axis_size(axis) > 1]
        if not axes:
            return []
        rules = rules or cf.ext.Rules(program, mesh)
        patterns = tuple(grid.words(1) for grid in self.grids(mesh))
        found = list[cf.ext.Wish]()
        for product in products.weighted(program, rules):
            node = program.nodes[product.index]
            by_axis = [_placed(product, node, axis, rules) for axis in axes]
            if not all(by_axis):
                continue
            ways: list[AxisWords] = [*combine(*by_axis)]
            if node.target in products.matrix_products():
                ways += patterns
            wants = []
            for way in ways:
                placed = ", ".join(f"{axis}: {word}" for axis, word in way)
                wants.append("{" + placed + "}")
            found.append(cf.ext.Wish(node.path, tuple(wants), self.axes, source=self.name, targets=(node.target,)))
        if not found:
            sizes = " by ".join(str(mesh.axis_size(axis)) for axis in axes)
            raise cf.PlanError(
                f"{self.name}: no product with a weight has a dim that divides over {sizes} ranks; use fewer"
            )
        return list(dict.fromkeys(found))


def _placed(product: products.Product, node: Any, axis: str, rules: cf.ext.Rules) -> list[tuple[str, str]]:
    """(axis, factor) of the factors of the weight that may lie on the axis."""
    return [(axis, factor) for factor in product.weight_factors if rules.place(node, factor, axis) is not None]
