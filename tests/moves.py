"""What moves mean: a reference interpreter over all ranks' tensors, a few lines per operator.

    shards = run_moves(parts(x, src, mesh), conversion(src, dst, mesh, x.itemsize).moves, mesh)

Written for clarity: what conversions are compared with, apart from all executors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import torch

from colofunc.errors import CollectiveError
from colofunc.mesh import Mesh
from colofunc.ops import collectives  # noqa: F401  (registers the kernels of rearrange and fit)
from colofunc.ops.define import KERNELS
from colofunc.spec.conversions.lower import ConversionCall

Tensor = torch.Tensor
Shards = list[Tensor]  # one per rank; or one per member of a group

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def all_gather(xs: Shards) -> Shards:
    whole = torch.stack(xs)
    return [whole.clone() for _ in xs]


def reduce_scatter(xs: Shards, how: str) -> Shards:
    return [reduce(REDUCE[how], [x[j] for x in xs]).clone() for j in range(len(xs))]


def all_reduce(xs: Shards, how: str) -> Shards:
    total = reduce(REDUCE[how], xs)
    return [total.clone() for _ in xs]


def all_to_all(xs: Shards) -> Shards:
    return [torch.stack([x[j] for x in xs]) for j in range(len(xs))]


def permute(xs: Shards, table: Sequence[int]) -> Shards:
    return [xs[source].clone() for source in table]


def take_shard(xs: Shards) -> Shards:
    return [x[i].clone() for i, x in enumerate(xs)]


def keep_first(xs: Shards, how: str) -> Shards:
    return [x if i == 0 or how != "sum" else torch.zeros_like(x) for i, x in enumerate(xs)]


GROUPED: dict[str, Callable[..., Shards]] = {
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_reduce": all_reduce,
    "all_to_all": all_to_all,
    "permute": permute,
    "take_shard": take_shard,
    "keep_first": keep_first,
}


LOCAL: dict[str, Callable[..., Tensor]] = {name: KERNELS[f"colofunc.{name}"] for name in ("rearrange", "fit")}


def run_group(target: str, shards: Sequence[Tensor], axes: Iterable[str], mesh: Mesh, *args: Any) -> Shards:
    """One collective on all ranks' tensors: every group of `axes` on its own."""
    out: list[Tensor | None] = [None] * len(shards)
    for group in mesh.groups(axes):
        for rank, y in zip(group, GROUPED[target]([shards[rank] for rank in group], *args), strict=True):
            out[rank] = y
    return [y for y in out if y is not None]


def run_moves(shards: Sequence[Tensor], moves: Iterable[ConversionCall], mesh: Mesh) -> Shards:
    """All ranks' tensors after the moves, in rank order."""
    now = list(shards)
    for move in moves:
        if move.target in LOCAL:
            now = [LOCAL[move.target](x, *move.args) for x in now]
        else:
            axes, n, *args = move.args
            if any(len(group) != n for group in mesh.groups(axes)):
                raise CollectiveError(f"{move} is planned for groups of {n}, which {mesh!r} does not have over {axes}")
            now = run_group(move.target, now, axes, mesh, *args)
        wrong = next((tuple(x.shape) for x in now if tuple(x.shape) != move.local_shape), None)
        if wrong is not None:
            raise CollectiveError(f"{move} gave shape {wrong}, planned was {move.local_shape}")
    return now
