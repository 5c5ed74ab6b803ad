"""Tensor parallelism: one operator's work over the ranks of an axis.

    step = cf.shard(step_fn, mesh, tensor("1d", "tp"))             # Megatron: column and row pairs, found by data flow
    step = cf.shard(step_fn, mesh, tensor("auto", "tp"))           # any split of the operators, by cost
    step = cf.shard(step_fn, mesh, tensor("2d", ("x", "y")))       # SUMMA; also "2.5d" and "3d", see plans.py

Problem: a model has to be rewritten, or a table of its module names kept, to say which product is split how. Idea: the
pattern is assigned to operators. `pairs.find` reads from the traced program which product feeds which; the plan wishes
the weights so, and follows them: heads of attention, activation functions and all of backward are split along.

    x whole -> q, k, v column (tp o) -> attention over heads -> o row (tp i) -> pending sum: one all-reduce, x whole

Per layer and step four all-reduces of (b, s, d): two forward (behind each row product), two backward (behind each group
of column products). Source: Megatron-LM (1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import permutations
from itertools import product as combine
from typing import Any

import attrs
from colofunc_plugins.tp2d_25d_3d.grids import FORMS
from colofunc_plugins.tp2d_25d_3d.moments import moments
from colofunc_plugins.tp2d_25d_3d.pairs import Pairs, find, leaf_of, products
from colofunc_plugins.tp2d_25d_3d.plans import Gridded, gridded
from colofunc_plugins.tp2d_25d_3d.summa import Grid

import colofunc as cf

__all__ = ["Auto", "Gridded", "Megatron", "Pairs", "find", "tensor"]

EXPERTS = ("colofunc.experts", "colofunc.experts_backward")
MODES = {"1d": ("tp",), "auto": ("tp",), "2d": ("x", "y"), "2.5d": ("x", "y", "z"), "3d": ("x", "y", "z")}


def tensor(
    mode: str = "1d",
    axis: str | Sequence[str] | None = None,
    *,
    sequence: bool = False,
    vocabulary: bool = True,
    depth: int | None = None,
    size: int | None = None,
) -> Megatron | Auto | Gridded:
    """Tensor parallelism over one axis, or over a grid of two or three.

    mode "1d": Megatron's column and row pairs; "2d": SUMMA; "2.5d": SUMMA with copies of the weights (Tesseract); "3d":
    a cube; "auto": whatever costs least, over one axis or two. axis: "tp"; of "2d" (rows, columns), of "2.5d" (rows,
    columns, depth), of "3d" (rows, inputs, outputs), by default "x", "y" and "z".
    sequence: whether "1d" keeps what lies between the pairs (norms, residual sums) split along the sequence, so that each
    all-reduce becomes a reduce-scatter and an all-gather of the same bytes. vocabulary: whether "1d" splits the output
    layer, its loss and the embedding along the vocabulary, where the loss can. depth: how many copies "2.5d" makes, the size of
    its third axis ("depth", where two are named). size: how many ranks there are in all, to be checked.
    """
    if mode not in MODES:
        raise cf.PlanError(f"tensor has modes {', '.join(map(repr, MODES))}, not {mode!r}; write tensor('1d', 'tp')")
    axes = MODES[mode] if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    if depth is not None and mode != "2.5d":
        raise cf.PlanError(f"tensor({mode!r}) has no depth; write tensor('2.5d', ('x', 'y', 'z'), depth={depth})")
    if mode == "1d" and (len(axes) != 1 or not isinstance(axes[0], str)):
        raise cf.PlanError(f"tensor({mode!r}) takes one axis, not {axis!r}; write tensor('1d', 'tp'), or make a view of several")
    if mode == "auto" and len(axes) not in (1, 2):
        raise cf.PlanError(f"tensor('auto') takes one axis or two, not {axis!r}; for three write tensor('3d', ('x', 'y', 'z')) or '2.5d'")
    if size is not None and mode in ("1d", "auto") and (isinstance(size, bool) or size < 1):
        raise cf.PlanError(f"tensor({mode!r}): size={size!r} is no number of ranks")
    if mode == "1d":
        return Megatron(axes, sequence, vocabulary)
    return Auto(axes) if mode == "auto" else gridded(mode, axes, depth, size)


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
        pairs = find(program, mesh, axis)
        layers = {} if self.sequence else dict(_hidden(program, cf.Rules(program, mesh), axis))
        specs: dict[int, str | cf.Layout] = dict(self._specs(program, pairs, axis))
        for leaves in layers.values():
            specs |= leaves
        if not specs:
            raise cf.PlanError(
                f"{self.name} finds no two products with weights of which one feeds the other and whose heads and widths "
                f"divide over {mesh.axis_size(axis)} ranks; use fewer, or tensor('auto', {axis!r})"
            )
        rest = {3: f"b ({axis} s) d"} if self.sequence else {}
        found = []
        for id in program.inputs:
            value = program.values[id]
            if value.role in ("param", "frozen"):
                spec = specs.get(id, _whole(value.shape))
                found.append(cf.Wish(value.name, spec, self.axes, (value.role,), self.name, along=id in specs, rest=rest))
        for path in layers:
            want = f"{{{axis}: f}}"
            found.append(cf.Wish(path or "*", want, self.axes, source=self.name, targets=EXPERTS, phases=("forward", "backward")))
        kept = ((value, specs.get(id, _whole(value.shape))) for value, id in moments(program))
        return found + [cf.Wish(value.name, spec, self.axes, ("state",), self.name) for value, spec in kept]

    def _specs(self, program: Any, pairs: Pairs, axis: str) -> Iterator[tuple[int, str]]:
        """Leaf -> spec, of weights, biases and tables."""
        tables = _tables(program)
        for product, stripes in pairs.columns.items():
            if product in pairs.vocabulary and not self.vocabulary:
                continue
            split = _cut(axis, "o", stripes)
            yield product.leaf, f"{split} i" if product.kept == 0 else f"i {split}"
            if product.bias is not None:
                yield product.bias, split
            if product in pairs.vocabulary:
                rows = program.values[product.leaf].shape[product.kept]
                yield from ((id, f"({axis} v) e") for id in tables if program.values[id].shape[0] == rows and id != product.leaf)
        for product, stripes in pairs.rows.items():
            split = _cut(axis, "i", stripes)
            yield product.leaf, f"{split} o" if product.summed == 0 else f"o {split}"


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

    @property
    def __name__(self) -> str:  # what it is called as a plugin
        return self.name

    @cf.hookimpl
    def colofunc_strategies(self) -> Mapping[str, Callable[..., Any]]:
        return dict.fromkeys(FORMS, self.strategies) if len(self.axes) == 2 else {}

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
        for product in products(program, rules):
            node = program.nodes[product.index]
            able = [[(a, f) for f in product.weight_factors if rules.place(node, f, a) is not None] for a in axes]
            ways = (*combine(*able), *(patterns if all(able) and node.target in FORMS else ()))
            if all(able):
                want = tuple("{" + ", ".join(f"{axis}: {word}" for axis, word in way) + "}" for way in ways)
                found.append(cf.Wish(node.path, want, self.axes, source=self.name, targets=(node.target,)))
        if not found:
            n = " by ".join(str(mesh.axis_size(a)) for a in axes)
            raise cf.PlanError(f"{self.name}: no product with a weight has a dim that divides over {n} ranks; use fewer")
        return list(dict.fromkeys(found))


def _hidden(program: Any, rules: cf.Rules, axis: str) -> Iterator[tuple[str, dict[int, cf.Layout]]]:
    """Module path of every layer of experts -> its weights, split by hidden units: a column and row pair in each expert."""
    made = program.producers()
    for node in program.nodes:
        way = rules.place(node, "f", axis) if node.target == EXPERTS[0] else None
        if way is not None:
            leaves = ((leaf_of(program, made, ref)[0], lies) for ref, lies in zip(node.refs[3:], way.ins[3:], strict=True))
            yield node.path, {id: lies for id, lies in leaves if id is not None and lies is not None}


def _cut(axis: str, name: str, stripes: int) -> str:
    return f"({stripes} {axis} {name})" if stripes > 1 else f"({axis} {name})"


def _whole(shape: tuple[int, ...]) -> str:
    return " ".join(f"d{d}" for d in range(len(shape)))


def _tables(program: Any) -> list[int]:
    """Weights that are looked up by index."""
    refs = [node.refs[0] for node in program.nodes if node.phase == "forward" and node.target.startswith("aten.embedding.")]
    return [id for id in dict.fromkeys(refs) if program.values[id].role in ("param", "frozen")]
