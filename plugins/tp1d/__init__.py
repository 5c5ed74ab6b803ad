"""1D tensor parallelism: pairs of products split over one axis.

    step = cf.shard(step_fn, mesh, tensor("1d", "tp"))        # colofunc_plugins.tensor

    x whole -> q, k, v column (tp o) -> attention over heads -> o row (tp i) -> pending sum: one all-reduce, x whole

Problem: a model has to be rewritten, or a table of its module names kept, to say which product is split how. Idea:
`cf.ext.product_pairs` reads from the traced program which product feeds which; the plan wishes the weights so, and
follows them: heads of attention, activation functions and all of backward are split along. Experts are a pair of
products each. Both matrices of an adapter beside a column product are split by columns; the narrow activations between
them are gathered.

Per layer and step four all-reduces of (b, s, d): two forward (behind each row product), two backward (behind each group
of column products). Source: Megatron-LM (1909.08053), section 3; along the sequence: 2205.05198.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs

import colofunc as cf

__all__ = ["Megatron", "megatron"]


def megatron(
    axis: str | Sequence[str] | None = None,
    *,
    sequence: bool = False,
    vocabulary: bool = True,
    size: int | None = None,
    apart: bool = False,
) -> Megatron:
    """`tensor("1d", axis)`: column and row pairs over one axis, "tp" by default.

    sequence: whether what lies between the pairs (norms, residual sums) stays split along the sequence, so that each
    all-reduce becomes a reduce-scatter and an all-gather of the same bytes. vocabulary: whether the output layer, its
    loss and the embedding are split along the vocabulary, where the loss can. size: how many ranks there are. apart:
    with `sequence`, the gradients of an input that several products read (q, k and v) are reduced and scattered one by
    one, as plans of torch's DTensor do that give each product its input as a part of the sequence; else they are summed
    first, which sends less.

    Raises PlanError where `apart` is said without `sequence`.
    """
    if axis is None:
        axis = "tp"
    axes = (axis,) if isinstance(axis, str) else tuple(axis)
    if len(axes) != 1 or not isinstance(axes[0], str):
        raise cf.PlanError(
            f"tensor('1d') takes one axis, not {axis!r}; write tensor('1d', ('tp',)), or make a view of several"
        )
    if size is not None and (isinstance(size, bool) or size < 1):
        raise cf.PlanError(f"tensor('1d'): size={size!r} is no number of ranks")
    if apart and not sequence:
        raise cf.PlanError(
            "tensor('1d', apart=True) is of gradients that are scattered along the sequence; add sequence=True"
        )
    return Megatron(axes, sequence, vocabulary, apart)


@attrs.frozen
class Megatron:
    """What `tensor("1d", axis)` returns: a named plan."""

    axes: tuple[str, ...]
    sequence: bool = False
    vocabulary: bool = True
    apart: bool = False
    splits_products: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return f"tensor(1d, {self.axes[0]})"

    def wishes(self, program: Any, mesh: cf.Mesh, rules: cf.ext.Rules | None = None) -> list[cf.ext.Wish]:
        """Weights of pairs of products split by column and by row, experts' as well; all other weights whole."""
        (axis,) = mesh.atoms(self.axes)
        if mesh.axis_size(axis) == 1:
            return []
        rules = rules or cf.ext.Rules(program, mesh)
        pairs = cf.ext.product_pairs(program, mesh, axis, rules, adapters_by_columns=True)
        specs: dict[int, str | cf.Layout] = dict(self._specs(program, pairs, axis))
        layers = [] if self.sequence else list(cf.ext.reading.experts(program, mesh, axis, self.name, rules=rules))
        for _, _, leaves in layers:
            specs |= leaves
        if not specs:
            raise cf.PlanError(
                f"{self.name} finds no two products with weights of which one feeds the other and whose heads and "
                "widths "
                f"divide over {mesh.axis_size(axis)} ranks; use fewer, or tensor('auto', {axis!r})"
                + cf.ext.products.why_whole(program, rules)
            )
        if not self.sequence:  # else what stays whole works on the tokens of a rank
            held = {product.index for product in (*pairs.columns, *pairs.rows)} | {index for index, _, _ in layers}
            instead = f"use fewer ranks, tensor('auto', {axis!r}), or zero(...) for this model"
            cf.ext.products.worthwhile(program, rules, held, self.name, instead)
        found = self._state(program, specs, axis)
        of_experts = dict.fromkeys(wish for _, wishes, _ in layers for wish in wishes)  # each once
        return [*found, *of_experts]

    def _state(self, program: Any, specs: dict[int, str | cf.Layout], axis: str) -> list[cf.ext.Wish]:
        """Every weight and its moments as `specs` says, or whole."""
        # what follows from no weight: (b, s, d) along the sequence
        rest = {3: f"_ ({axis} _) _"} if self.sequence else {}
        every = {id: specs.get(id, "...") for id in program.inputs if program.values[id].role in ("param", "frozen")}
        found = list[cf.ext.Wish]()
        for id, spec in cf.ext.reading.with_moments(program, every).items():
            value, along = program.values[id], id in specs
            found.append(
                cf.ext.Wish(
                    value.name, spec, self.axes, (value.role,), self.name, along=along, rest=rest, apart=self.apart
                )
            )
        return found

    def _held(self, pairs: Any) -> list[Any]:
        """The products that are split."""
        columns = [product for product in pairs.columns if self.vocabulary or product not in pairs.vocabulary]
        return [*columns, *pairs.rows]

    def _specs(self, program: Any, pairs: Any, axis: str) -> Iterator[tuple[int, str]]:
        """Leaf -> spec, of weights, biases and tables."""
        tables = [id for id in cf.ext.products.tables(program) if program.values[id].role in ("param", "frozen")]
        for product in self._held(pairs):
            if product in pairs.rows:
                yield product.leaf, product.spec(summed=cf.ext.products.dim(axis, "_", pairs.rows[product]))
                continue
            split = cf.ext.products.dim(axis, "_", pairs.columns[product])
            yield product.leaf, product.spec(kept=split)
            for vector in product.vectors:
                yield vector, split
            if product in pairs.vocabulary:
                rows = program.values[product.leaf].shape[product.kept]
                for table in tables:
                    if program.values[table].shape[0] == rows and table != product.leaf:
                        yield table, f"({axis} _) _"
