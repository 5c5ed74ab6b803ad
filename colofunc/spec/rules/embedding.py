"""Embedding tables: rows looked up by index, and the gradient that adds rows up.

    embedding                 [v] e, i0 i1 -> i0 i1 e
    embedding_dense_backward  i0 i1 e, i0 i1 -> [v] e         i summed
    embedding_bag             [v] e, b n, b n -> b e          n summed; the last operand, factors, may be absent

The vocabulary `v` is whole in the rule, because an index points anywhere in it. Two strategies split it: the lookup
asks for the rows that this rank has and leaves a pending sum (every other rank gives zeros), the gradient keeps this
rank's rows. Torch's own bags, of a flat list of indices cut at offsets, are data: only `e` is free there.
Source: vocabulary-parallel embedding, Megatron-LM (1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from colofunc.mesh import Mesh
from colofunc.ops.bags import backward_of_some, embedding_bag_factors_backward, first_bags
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import LocalFn, StrategyFn, Texts, at, bind, names
from colofunc.spec.rules.local import clear, first_of, inside, no_traffic
from colofunc.spec.rules.opened import Split, opened
from colofunc.spec.rules.pattern import RuleFn


def embedding(call: Call) -> Rule:
    index = " ".join(names("i", len(call.ins[1].shape)))
    return bind(call, {0: "[v] e", 1: index}, [f"{index} e"], linear=[{0}])


def _split_lookup(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    def code(call: Call, split: Split) -> LocalFn:
        rows, size = split.ins[0].dims[0], call.ins[0].shape[0]

        def lookup(weight: torch.Tensor, index: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            here, mine = inside(index, first_of(rows, mesh), weight.shape[0])
            # An index that no rank has must fail as on one device, not give zeros.
            here = torch.where((index < 0) | (index >= size), index, here)
            return clear(torch.ops.aten.embedding.default(weight, here), mine.unsqueeze(-1))

        return lookup

    yield from opened(call, mesh, embedding(call), ["v"], code, no_traffic, how="sum")


def embedding_dense_backward(call: Call) -> Rule:
    n = len(call.ins[1].shape)
    by_frequency = bool(call.arg(4, "scale_grad_by_freq", False))  # counts all indices: they must be whole
    index = " ".join(f"[{i}]" if by_frequency else i for i in names("i", n))
    return bind(
        call,
        {0: f"{index} e", 1: index},
        ["[v] e"],
        reduce={} if by_frequency else dict.fromkeys(names("i", n), "sum"),
        linear=[{0}],
    )


def _split_rows(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    if call.arg(4, "scale_grad_by_freq", False):
        return
    padding_idx = call.arg(3, "padding_idx", -1)

    def code(call: Call, split: Split) -> LocalFn:
        out = split.outs[0]
        rows, mine_rows = (out.local_shape[0], out.dims[0]) if out is not None else (0, ())

        def add_rows(grad: torch.Tensor, index: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            here, mine = inside(index, first_of(mine_rows, mesh), rows)
            mine = mine & (index != padding_idx)
            kept = clear(grad, mine.unsqueeze(-1))
            return torch.ops.aten.embedding_dense_backward.default(kept, here, rows, -1, False)

        return add_rows

    yield from opened(call, mesh, embedding_dense_backward(call), ["v"], code, no_traffic)


def flat_bags(call: Call) -> Rule | None:
    """Only the embedding dim is free: bags are runs of the flat index, cut at offsets that are data."""
    per_sample = at(call, 6, "per_sample_weights")
    if len(call.ins[1].shape) != 1:
        return None
    _, *others = call.outs
    outs, copied = ["[n] e"], []
    for number, typ in enumerate(others, 1):  # of a maximum, which row it is from, column by column
        is_by_column = typ is not None and len(typ.shape) == 2
        outs.append(f"[y{number}] e" if is_by_column else f"[y{number}]")
        if not is_by_column:
            copied.append((number, "e"))
    return bind(call, {0: "[v] e", 1: "[i]", 2: "[o]", per_sample: "[i]"}, outs, copied=copied)


def flat_bags_backward(call: Call) -> Rule:
    """The gradient of each bag goes to its rows, column by column."""
    rest: Texts = {}
    for number, typ in enumerate(call.ins[1:], 1):
        rest[number] = f"[x{number}] e" if len(typ.shape) == 2 else f"[x{number}]"
    return bind(call, {0: "[n] e", **rest}, ["[v] e"], linear=[{0}])


def flat_bags_sparse_backward(call: Call) -> Rule | None:
    return None if call.arg(9, "sparse", False) else flat_bags_backward(call)


def flat_bags_factors_backward(call: Call) -> Rule:
    data: Texts = {number: f"[x{number}]" for number in range(2, len(call.ins))}
    return bind(call, {0: "[n] e", 1: "[v] e", **data}, ["[i]"], reduce={"e": "sum"}, linear=[{0}, {1}])


# ---- bags of a matrix of indices ----


def bags(call: Call) -> Rule:
    factors = at(call, 2, "factors")
    return bind(call, {0: "[v] e", 1: "b n", factors: "b n"}, ["b e"], reduce={"n": "sum"}, linear=[{0}, {factors}])


def bags_backward(call: Call) -> Rule:
    factors = at(call, 2, "factors")
    return bind(
        call, {0: "b e", 1: "b n", factors: "b n"}, ["[v] e"], reduce={"b": "sum", "n": "sum"}, linear=[{0}, {factors}]
    )


def bags_factors_backward(call: Call) -> Rule:
    return bind(call, {0: "b e", 1: "[v] e", 2: "b n"}, ["b n"], reduce={"e": "sum"}, linear=[{0}, {1}])


def _mine(index: torch.Tensor, first: torch.Tensor | int, rows: int, padding: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(local indices, which of them are rows of this rank that count), both (b, n)."""
    here, mine = inside(index, first, rows)
    return here, mine & (index != padding)


def _split_bags(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    """Rows of other ranks stand behind the own ones of their bag, and are summed in a bag of their own, which nobody
    reads.

    Zeros as factors would not do: a row may hold infinity, and nothing times infinity is NaN.
    """
    if 0 in call.ins[1].shape:
        return
    padding, size = int(call.arg(3, "padding")), call.ins[0].shape[0]

    def code(call: Call, split: Split) -> LocalFn:
        rows = split.ins[0].dims[0]

        def local(weight: torch.Tensor, index: torch.Tensor, *factors: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            here, mine = _mine(index, first_of(rows, mesh), weight.shape[0], padding)
            # An index that no rank has must fail as on one device, not give zeros.
            here = torch.where((index < 0) | (index >= size), index, here)
            own_first = mine.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
            of_rows = factors[0].gather(1, own_first) if factors else None
            return first_bags(weight, here.gather(1, own_first), mine.sum(1), of_rows)

        return local

    yield from opened(call, mesh, bags(call), ["v"], code, no_traffic, how="sum")


def _split_bags_rows(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    """To the rows of other ranks goes the gradient of one more bag, which is zero."""
    if 0 in call.ins[1].shape:
        return
    padding = int(call.arg(4, "padding"))

    def code(call: Call, split: Split) -> LocalFn:
        out = split.outs[0]
        assert out is not None, "the gradient of a table has a layout"
        rows, mine_rows = out.local_shape[0], out.dims[0]

        def local(grad: torch.Tensor, index: torch.Tensor, *factors: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            here, mine = _mine(index, first_of(mine_rows, mesh), rows, padding)
            return backward_of_some(grad, here, mine, clear(factors[0], mine) if factors else None, rows)

        return local

    yield from opened(call, mesh, bags_backward(call), ["v"], code, no_traffic)


def _split_bags_factors(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    if 0 in call.ins[2].shape:
        return
    padding = int(call.arg(3, "padding"))

    def code(call: Call, split: Split) -> LocalFn:
        rows = split.ins[1].dims[0]

        def local(grad: torch.Tensor, weight: torch.Tensor, index: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            here, mine = _mine(index, first_of(rows, mesh), weight.shape[0], padding)
            return clear(embedding_bag_factors_backward(grad, weight, here, -1), mine)

        return local

    yield from opened(call, mesh, bags_factors_backward(call), ["v"], code, no_traffic, how="sum")


RULES: dict[str, RuleFn] = {
    "colofunc.embedding_bag": bags,
    "colofunc.embedding_bag_backward": bags_backward,
    "colofunc.embedding_bag_factors_backward": bags_factors_backward,
    "aten._embedding_bag_backward": flat_bags_sparse_backward,
    "aten._embedding_bag_per_sample_weights_backward": flat_bags_factors_backward,
    "aten.embedding": embedding,
    "aten.embedding_dense_backward": embedding_dense_backward,
    "aten._embedding_bag_dense_backward": flat_bags_backward,
    "aten._embedding_bag": flat_bags,
    "aten._embedding_bag_forward_only": flat_bags,
}
STRATEGIES: dict[str, StrategyFn] = {
    "colofunc.embedding_bag": _split_bags,
    "colofunc.embedding_bag_backward": _split_bags_rows,
    "colofunc.embedding_bag_factors_backward": _split_bags_factors,
    "aten.embedding": _split_lookup,
    "aten.embedding_dense_backward": _split_rows,
}
