"""Tensor parallelism: one operator's work over the ranks of an axis.

    step = cf.shard(step_fn, mesh, tensor("1d", "tp"))             # Megatron: column and row pairs, found by data flow
    step = cf.shard(step_fn, mesh, tensor("auto", "tp"))           # any split of the operators, by cost

Problem: a model has to be rewritten, or a table of its module names kept, to say which product is split how. Idea: the
pattern is assigned to operators. `pairs.find` reads from the traced program which product feeds which; the plan wishes
the weights so, and follows them: heads of attention, activation functions and all of backward are split along.

    x whole -> q, k, v column (tp o) -> attention over heads -> o row (tp i) -> pending sum: one all-reduce, x whole

Per layer and step four all-reduces of (b, s, d): two forward (behind each row product), two backward (behind each group
of column products). Source: Megatron-LM (1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from colofunc_plugins.tp2d_25d_3d.pairs import Pairs, find, products

import colofunc as cf

__all__ = ["Auto", "Megatron", "Pairs", "find", "tensor"]

MODES = ("1d", "auto")


def tensor(mode: str = "1d", axis: str = "tp", *, sequence: bool = False, vocabulary: bool = True) -> Megatron | Auto:
    """Tensor parallelism over `axis`. mode "1d": Megatron's column and row pairs; "auto": whatever costs least.

    sequence: whether "1d" keeps what lies between the pairs (norms, residual sums) split along the sequence, so that each
    all-reduce becomes a reduce-scatter and an all-gather of the same bytes. vocabulary: whether "1d" splits the output
    layer, its loss and the embedding along the vocabulary, where the loss can.
    """
    if mode not in MODES:
        raise cf.PlanError(f"tensor has modes {', '.join(map(repr, MODES))}, not {mode!r}; write tensor('1d', 'tp')")
    if not isinstance(axis, str):
        raise cf.PlanError(f"tensor({mode!r}) takes one axis, not {axis!r}; write tensor('1d', 'tp'), or make a view of several")
    return Megatron((axis,), sequence, vocabulary) if mode == "1d" else Auto((axis,))


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
        specs = dict(self._specs(program, pairs, axis))
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
        return found + [cf.Wish(name, spec, self.axes, ("state",), self.name) for name, spec in _moments(program, specs)]

    def _specs(self, program: Any, pairs: Pairs, axis: str) -> Iterator[tuple[int, str]]:
        """Leaf -> spec, of weights, biases and tables."""
        tables = _tables(program)
        for product, stripes in pairs.columns.items():
            if product in pairs.vocabulary and not self.vocabulary:
                continue
            split = f"({stripes} {axis} o)" if stripes > 1 else f"({axis} o)"
            yield product.leaf, f"{split} i" if product.kept == 0 else f"i {split}"
            if product.bias is not None:
                yield product.bias, split
            if product in pairs.vocabulary:
                rows = program.values[product.leaf].shape[product.kept]
                yield from ((id, f"({axis} v) e") for id in tables if program.values[id].shape[0] == rows and id != product.leaf)
        for product in pairs.rows:
            yield product.leaf, f"({axis} i) o" if product.summed == 0 else f"o ({axis} i)"


@attrs.frozen
class Auto:
    """What `tensor("auto", axis)` returns: every product with a weight splits its work over the axis, as cost says."""

    axes: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"tensor(auto, {self.axes[0]})"

    def wishes(self, program: Any, mesh: cf.Mesh) -> list[cf.Wish]:
        (axis,) = mesh.atoms(self.axes)
        n = mesh.axis_size(axis)
        if n == 1:
            return []
        found, rules = [], cf.Rules(program, mesh)
        for product in products(program, rules):
            node = program.nodes[product.index]
            ways = tuple(f"{{{axis}: {f}}}" for f in product.weight_factors if rules.place(node, f, axis) is not None)
            if ways:
                found.append(cf.Wish(node.path, ways, self.axes, source=self.name, targets=(node.target,)))
        if not found:
            raise cf.PlanError(f"{self.name}: no product with a weight has a dim that divides over {n} ranks; use fewer")
        return list(dict.fromkeys(found))


def _whole(shape: tuple[int, ...]) -> str:
    return " ".join(f"d{d}" for d in range(len(shape)))


def _tables(program: Any) -> list[int]:
    """Weights that are looked up by index."""
    refs = [node.refs[0] for node in program.nodes if node.phase == "forward" and node.target.startswith("aten.embedding.")]
    return [id for id in dict.fromkeys(refs) if program.values[id].role in ("param", "frozen")]


def _moments(program: Any, specs: Mapping[int, str]) -> list[tuple[str, str]]:
    """State leaves of the same shape whose names end as a weight's does -> that weight's spec."""
    weights = [program.values[id] for id in program.inputs if program.values[id].role == "param"]
    found = []
    for id in program.inputs:
        value = program.values[id]
        if value.role != "state" or not value.shape:
            continue
        alike = [w for w in weights if w.shape == value.shape]
        best = max(alike, key=lambda w: _common(w.name, value.name), default=None)
        if best is not None and _common(best.name, value.name):
            found.append((value.name, specs.get(best.id, _whole(value.shape))))
    return found


def _common(a: str, b: str) -> int:
    """How many of the last parts of two dotted names agree."""
    n = 0
    for x, y in zip(reversed(a.split(".")), reversed(b.split("."))):
        if x != y:
            break
        n += 1
    return n
