"""The plans "2d", "2.5d" and "3d": every product with a weight on the grid, and what lies between follows.

    tensor("2d", ("x", "y"))              weights (x i) (y o)      activations (x b) s (y d)
    tensor("2.5d", ("x", "y", "z"))       weights (x i) (y o)      activations (x z b) s (y d)       z: depth
    tensor("3d", ("z", "x", "y"))         weights (x z i) (y o)    activations (z y b) s (x d), then (z x b) s (y d), in turn

A product's pattern says where its operands and its result lie; the flow goes on from there through norms, attention over
heads, activation functions and the residual stream, and through all of backward. A fused weight is cut in stripes, as in
"1d". Embeddings, norms' weights and what a size keeps out of the grid are found by cost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from math import lcm, prod
from typing import Any

import attrs
from colofunc_plugins.tp2d_25d_3d.grid3d import Cube
from colofunc_plugins.tp2d_25d_3d.pairs import EXPERTS, STRIPES, group, hidden, routers
from colofunc_plugins.tp2d_25d_3d.summa import Grid

import colofunc as cf
from colofunc import products

BACKWARD = {"colofunc.linear": ("colofunc.linear_dx", "colofunc.linear_dw")}


@attrs.frozen
class Gridded:
    """What `tensor("2d" | "2.5d" | "3d", axes)` returns: a named plan that brings its strategies with it."""

    mode: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None  # of the axes, where they were said

    @property
    def name(self) -> str:
        return f"tensor({self.mode}, {', '.join(self.axes)})"

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(products.FORMS, self.strategies)

    def strategies(self, call: Any, mesh: cf.Mesh) -> Iterator[cf.Strategy]:
        """Of one call, on all grids that the plan uses."""
        for grid in self.grids(mesh) if all(axis in mesh for axis in self.axes) else ():  # a mesh of time has none of them
            yield from grid.strategies(call, mesh)

    def grids(self, mesh: cf.Mesh) -> tuple[Grid | Cube, ...]:
        """The grid of column products, and that of row products where it is another."""
        if self.mode == "3d":
            z, x, y = mesh.atoms(self.axes)
            return Cube(x, y, z), Cube(y, x, z)
        x, y, *depth = mesh.atoms(self.axes)
        return (Grid(x, y, mesh.axis_size(x), mesh.axis_size(y), *depth),)

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        self._check(mesh)
        if all(mesh.axis_size(a) == 1 for a in self.axes):
            return []
        specs: dict[int, str | cf.Layout] = {}
        found: list[cf.Wish] = []
        rules = cf.Rules(program, mesh)
        rows = self._rows(program, mesh)
        mine = list(self._products(program, mesh))
        paths = Counter(product.path for product, _, _ in mine)
        for product, grid, stripes in mine:
            inputs, outputs = group(grid.lies["w"]["i"], "i"), group(grid.lies["w"]["o"], "o", stripes)
            specs.setdefault(product.leaf, product.spec(inputs, outputs))
            if product.bias is not None:
                specs.setdefault(product.bias, outputs)
            words = [(axis, word) for axis, word in grid.words(stripes) if mesh.axis_size(axis) > 1]
            found += self._on_operators(program, product, words, paths[product.path] == 1)
        if not specs:
            sizes = " by ".join(str(mesh.axis_size(a)) for a in mesh.atoms(self.axes))
            raise cf.PlanError(
                f"{self.name} finds no product with a weight whose inputs and outputs both divide over {sizes} ranks; "
                "use fewer ranks, or tensor('1d', axis), which splits one of the two"
            )
        held, apart = {product.index for product, _, _ in mine}, set[int]()
        for index, wishes, leaves in self._experts(program, mesh, rules):
            held.add(index)
            found += wishes
            specs |= leaves
            apart |= set(leaves)  # what works on them is said already
        self._worthwhile(program, rules, held)
        for id, spec in specs.items():
            found.append(cf.Wish(program.values[id].name, spec, self.axes, (program.values[id].role,), self.name, along=id not in apart))
        kept = ((program.values[state].name, specs[id]) for state, id in cf.reading.moments(program).items() if id in specs)
        found += [cf.Wish(name, spec, self.axes, ("state",), self.name) for name, spec in kept]
        return [*rows, *dict.fromkeys(found)]

    def _on_operators(self, program: Any, product: products.Product, words: list[tuple[str, str]], alone: bool) -> Iterator[cf.Wish]:
        """What a product and its gradients do. Not `alone`: an adapter's products stand under the path of the layer that it is for."""
        node = program.nodes[product.index]
        targets = {"forward": (node.target,), "backward": BACKWARD.get(node.target, ("aten.mm.default",))}
        made = {"forward": node.outs, "backward": products.gradients(program, product, targets["backward"])}
        for some in (words[:2], words[2:]):  # the planner takes two axes together, then the third
            want = "{" + ", ".join(f"{axis}: {word}" for axis, word in some) + "}"
            for phase in ("forward", "backward") if some else ():
                rest: dict[str, Any] = dict(targets=targets[phase], phases=(phase,), along=True, optional=phase != "forward")
                if alone or made[phase]:
                    yield cf.Wish(product.path, want, source=self.name, values=() if alone else made[phase], **rest)

    def _check(self, mesh: cf.Mesh) -> None:
        atoms, has = mesh.atoms(self.axes), tuple(map(mesh.axis_size, self.axes))
        if len(atoms) != len(self.axes):
            raise cf.PlanError(f"{self.name}: a view stands for several axes, {', '.join(atoms)} in all; name single axes")
        for axis, said, size in zip(self.axes, self.sizes or has, has, strict=True):
            if said != size:
                raise cf.PlanError(f"{self.name}: axis {axis!r} of {mesh} has {size} ranks, where the plan says {said}; change one of them")

    def _products(self, program: Any, mesh: cf.Mesh) -> Iterator[tuple[products.Product, Grid | Cube, int]]:
        """(product, grid, stripes) of every product that the grid divides."""
        grids = self.grids(mesh)
        pairs = cf.product_pairs(program, mesh, mesh.atoms(self.axes)[-1 if self.mode == "3d" else 1])
        every = list(products.weighted(program, cf.Rules(program, mesh)))
        apart = routers(program, {product.index for product in every})  # as narrow as there are experts, on tokens in one dim: by cost
        for product in every:
            if program.nodes[product.index].target not in products.FORMS or product.index in apart:
                continue
            grid = grids[-1] if product in pairs.rows else grids[0]
            stripes = pairs.columns.get(product, 1)
            shape = program.values[product.leaf].shape
            inputs, outputs = (prod(map(mesh.axis_size, grid.lies["w"][f].split())) for f in "io")
            if isinstance(grid, Grid):
                inputs = lcm(grid.rows, grid.columns)
            stripes = stripes if stripes in STRIPES and shape[product.kept] % (outputs * stripes) == 0 else 1
            if shape[product.summed] % inputs == 0 and shape[product.kept] % outputs == 0:
                yield product, grid, stripes

    def _experts(self, program: Any, mesh: cf.Mesh, rules: cf.Rules) -> Iterator[tuple[int, list[cf.Wish], dict[int, cf.Layout]]]:
        """(node, wishes, weight -> how it lies) of experts: a token's whole width is gathered from the axis that splits it, which has
        hidden units instead, and the sum goes back to where the width was; the other axes have rows."""
        first, width, *more = mesh.atoms(self.axes)
        words = {axis: "f" if axis == width else "b0" for axis in (width, first, *more) if mesh.axis_size(axis) > 1}
        for index, path, leaves in hidden(program, rules, width):
            rest = dict(source=self.name, targets=EXPERTS, phases=("forward", "backward"))
            yield index, [cf.Wish(path or "*", f"{{{axis}: {word}}}", self.axes, **rest) for axis, word in words.items()], leaves

    def _worthwhile(self, program: Any, rules: cf.Rules, mine: set[int]) -> None:
        """Raises where most of the work is not in products on the grid: it would be copied, or split in some other way."""
        flops = products.work(program, rules)
        rest = [index for index in flops if index not in mine]
        share = 1 - sum(flops[k] for k in rest) / max(1, sum(flops.values()))
        if share < 0.5:
            node = program.nodes[max(rest, key=flops.__getitem__)]
            shapes = " and ".join(str(tuple(program.values[r].shape)) for r in node.refs[:2])
            raise cf.PlanError(
                f"{self.name}: products that the grid can hold are {100 * share:.0f} % of the work with weights; the most of the rest is "
                f"{node.target} in {node.path!r} on {shapes}; use zero(...) for this model, or sizes that the axes divide"
            )

    def _rows(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        """The rows of the batch on the axes that are for them."""
        atoms = mesh.atoms(self.axes)
        on = (atoms[0],) if self.mode == "3d" else tuple(sorted((atoms[0], *atoms[2:]), key=mesh.axis_names.index))
        ways = prod(map(mesh.axis_size, on))
        if self.mode == "3d":  # on the one other axis, then on the other
            ways *= lcm(*map(mesh.axis_size, atoms[1:]))
        spec = f"({' '.join(on)} b) ..."
        return [cf.Wish(v.name, spec, on, ("batch",), self.name, along=True) for v in cf.reading.rows(program, ways, self.name)]
