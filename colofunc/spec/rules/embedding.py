"""Embedding tables: rows looked up by index, and the gradient that adds rows up.

    embedding                 [v] e, i0 i1 -> i0 i1 e
    embedding_dense_backward  i0 i1 e, i0 i1 -> [v] e         i summed

The vocabulary `v` is whole in the rule, because an index points anywhere in it. Two strategies split it: the lookup
asks for the rows that this rank has and leaves a pending sum (every other rank gives zeros), the gradient keeps this
rank's rows. Source: vocabulary-parallel embedding, Megatron-LM (1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from colofunc.mesh import Mesh
from colofunc.spec.rule import Call, Rule, Strategy
from colofunc.spec.rules.build import Local, StrategyFn, Texts, at, bind, names
from colofunc.spec.rules.local import clear, first_of, inside, no_traffic
from colofunc.spec.rules.opened import Split, opened
from colofunc.spec.rules.pattern import RuleFn


def embedding(call: Call) -> Rule:
    index = " ".join(names("i", len(call.ins[1].shape)))
    return bind(call, {0: "[v] e", 1: index}, [f"{index} e"], linear=[{0}])


def _split_lookup(call: Call, mesh: Mesh) -> Iterator[Strategy]:
    def code(call: Call, split: Split) -> Local:
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

    def code(call: Call, split: Split) -> Local:
        out = split.outs[0]
        rows, mine_rows = (out.local_shape[0], out.dims[0]) if out is not None else (0, ())

        def add_rows(grad: torch.Tensor, index: torch.Tensor, mesh: Mesh) -> torch.Tensor:
            here, mine = inside(index, first_of(mine_rows, mesh), rows)
            mine = mine & (index != padding_idx)
            kept = clear(grad, mine.unsqueeze(-1))
            return torch.ops.aten.embedding_dense_backward.default(kept, here, rows, -1, False)

        return add_rows

    yield from opened(call, mesh, embedding_dense_backward(call), ["v"], code, no_traffic)


def _bag_mode(call: Call, index: int = 4) -> int:
    return int(call.arg(index, "mode", 0))


def embedding_bag(call: Call) -> Rule | None:
    """Only the embedding dim is free: bags are runs of the flat index, cut at offsets that are data."""
    per_sample = at(call, 6, "per_sample_weights")
    if len(call.ins[1].shape) != 1 or _bag_mode(call) == 2:
        return None
    return bind(
        call,
        {0: "[v] e", 1: "[i]", 2: "[o]", per_sample: "[i]"},
        ["[n] e", "[x]", "[y]", "[z]"],
        copied=[(1, "e"), (2, "e"), (3, "e")],
    )


def embedding_bag_dense_backward(call: Call) -> Rule | None:
    if _bag_mode(call, 7) == 2 or len(call.ins) > 6:
        return None
    indices: Texts = {k: f"[x{k}]" for k in range(1, len(call.ins))}
    return bind(call, {0: "[n] e", **indices}, ["[v] e"], linear=[{0}])


def embedding_bag_backward(call: Call) -> Rule | None:
    """As the dense one: the gradient of each bag goes to its rows, column by column."""
    if _bag_mode(call, 8) == 2 or len(call.ins) > 6 or call.arg(9, "sparse", False):
        return None
    rest: Texts = {k: f"[x{k}]" for k in range(1, len(call.ins))}
    return bind(call, {0: "[n] e", **rest}, ["[v] e"], linear=[{0}])


RULES: dict[str, RuleFn] = {
    "aten._embedding_bag_backward": embedding_bag_backward,
    "aten.embedding": embedding,
    "aten.embedding_dense_backward": embedding_dense_backward,
    "aten._embedding_bag_dense_backward": embedding_bag_dense_backward,
    "aten._embedding_bag": embedding_bag,
    "aten._embedding_bag_forward_only": embedding_bag,
}
STRATEGIES: dict[str, StrategyFn] = {
    "aten.embedding": _split_lookup,
    "aten.embedding_dense_backward": _split_rows,
}
