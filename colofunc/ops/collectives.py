"""Collectives as operators on one rank's tensor, so that local code can call them and a program can record them.

Problem: what one rank does must be one program for all ranks. Idea: a collective is an operator like any other; its
group is named by mesh axes, chunks always stand in a leading dim, and a rank's coordinate is an operator too.

    def row_parallel(x, w, mesh):                      # x: (b, i/tp), w: (o, i/tp) local
        return collectives.all_reduce(x @ w.T, "tp", mesh)

| operator | x | result | member i of a group of n |
|---|---|---|---|
| all_gather | s | (n, *s) | has all members' x |
| reduce_scatter | (n, *s) | s | has the reduction of all members' x[i] |
| all_reduce | s | s | has the reduction of all members' x |
| all_to_all | (n, *s) | (n, *s) | has x[i] of member j as chunk j; with `rows`, the first rows of each chunk, then zeros |
| permute | s | s | has x of member table[i] |
| send | s | s | has x of member `source`, if i is one of `targets`; others have no part in it; a `tag` tells messages apart |
| take_shard | (n, *s) | s | has x[i]; no communication |
| keep_first | s | s | has x if i = 0, else zeros (a pending sum); copies are a pending max or min as they are |
| axis_index | | 0-dim int64 | has i |

`axes` are atomic axes or parts of one ("dp[2:2]", see `colofunc.mesh`), major first: i is row-major over them. `how` is
"sum", "max" or "min". There is no group behind a single tensor, so running one eagerly is an error: executors
interpret these nodes, traces see their shapes. Gradients are transposes of the linear map over all ranks' values
together (the loss is the sum of what the ranks return), as in JAX: all_gather and reduce_scatter are each other's.
`rearrange` (einops) and `fit` (pad with zeros or cut at the end) are ordinary functions with kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import einops
import torch
from torch import Tensor

from colofunc.errors import CollectiveError
from colofunc.mesh import Mesh
from colofunc.ops.define import define
from colofunc.ops.facts import NOTHING, Facts
from colofunc.ops.pattern_words import factors_of

__all__ = [
    "all_gather", "all_reduce", "all_to_all", "axis_index", "fit", "keep_first", "permute", "rearrange", "rearrange_view",
    "reduce_scatter", "take_shard",
]  # fmt: skip

REDUCTIONS = ("sum", "max", "min")


def _eager(name: str) -> Callable[..., Tensor]:
    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        raise CollectiveError(
            f"colofunc.{name} was called on a plain tensor outside a program: one tensor has no peers. Call it in the "
            "local code of a strategy, or use DTensor.redistribute"
        )

    return kernel


# ---- shapes ----


def _chunks(x: Tensor, n: int, name: str) -> None:
    if x.dim() == 0 or x.shape[0] != n:
        raise CollectiveError(f"colofunc.{name}: dim 0 of a tensor of shape {tuple(x.shape)} must hold {n} chunks")


def _check_how(how: str, name: str) -> None:
    if how not in REDUCTIONS:
        raise CollectiveError(f"colofunc.{name}: no reduction {how!r}; use one of {', '.join(REDUCTIONS)}")


def _all_gather_fake(x: Tensor, axes: Sequence[str], n: int) -> Tensor:
    return x.new_empty((n, *x.shape))


def _reduce_scatter_fake(x: Tensor, axes: Sequence[str], n: int, how: str) -> Tensor:
    _chunks(x, n, "reduce_scatter")
    _check_how(how, "reduce_scatter")
    return x.new_empty(x.shape[1:])


def _all_reduce_fake(x: Tensor, axes: Sequence[str], n: int, how: str) -> Tensor:
    _check_how(how, "all_reduce")
    return x.new_empty(x.shape)


def _all_to_all_fake(x: Tensor, axes: Sequence[str], n: int, rows: Tensor | None = None, expected: int = 0) -> Tensor:
    _chunks(x, n, "all_to_all")
    if rows is not None and (x.dim() < 2 or rows.shape != x.shape[1:2] or not 0 <= expected <= x.shape[1]):
        raise CollectiveError(
            f"colofunc.all_to_all: rows of shape {tuple(rows.shape)}, {expected} expected, for chunks of "
            f"{tuple(x.shape[1:])}; give one number per row of a chunk, all equal"
        )
    return x.new_empty(x.shape)


def _permute_fake(x: Tensor, axes: Sequence[str], n: int, table: Sequence[int]) -> Tensor:
    if sorted(table) != list(range(n)):
        raise CollectiveError(f"colofunc.permute: table {list(table)} is no permutation of 0..{n - 1}")
    return x.new_empty(x.shape)


def _send_fake(x: Tensor, axes: Sequence[str], n: int, source: int, targets: Sequence[int], tag: int = 0) -> Tensor:
    if not 0 <= source < n or not targets or not all(0 <= target < n for target in targets):
        raise CollectiveError(f"colofunc.send: from {source} to {list(targets)}, and the members are 0..{n - 1}")
    return x.new_empty(x.shape)


def _receive_fake(
    axes: Sequence[str], n: int, source: int, shape: Sequence[int], dtype: torch.dtype, tag: int = 0
) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def _take_shard_fake(x: Tensor, axes: Sequence[str], n: int) -> Tensor:
    _chunks(x, n, "take_shard")
    return x.new_empty(x.shape[1:])


def _keep_first_fake(x: Tensor, axes: Sequence[str], n: int, how: str) -> Tensor:
    _check_how(how, "keep_first")
    return x.new_empty(x.shape)


def _axis_index_fake(axes: Sequence[str]) -> Tensor:
    return torch.empty((), dtype=torch.int64)


# ---- gradients: transposes ----


def _save_call(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rest = inputs[1:]


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_call(ctx, inputs, output)
    if inputs[3] != "sum":
        ctx.rest = None


def _rest(ctx: Any, name: str) -> tuple[Any, ...]:
    if ctx.rest is None:
        raise CollectiveError(f"colofunc.{name} of a max or min has no gradient; give the strategy its own backward")
    return ctx.rest


def _all_gather_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axes, n = ctx.rest
    return _REDUCE_SCATTER(grad, axes, n, "sum"), None, None


def _reduce_scatter_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axes, n, _ = _rest(ctx, "reduce_scatter")
    return _ALL_GATHER(grad, axes, n), None, None, None


def _all_reduce_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axes, n, how = _rest(ctx, "all_reduce")
    return _ALL_REDUCE(grad, axes, n, how), None, None, None


def _all_to_all_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _ALL_TO_ALL(grad, *ctx.rest), None, None, None, None


def _permute_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axes, n, table = ctx.rest
    inverse = [table.index(i) for i in range(n)]
    return _PERMUTE(grad, axes, n, inverse), None, None, None


def _take_shard_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axes, n = ctx.rest
    mine = torch.arange(n, device=grad.device) == _AXIS_INDEX(axes).to(grad.device)
    return mine.reshape(n, *[1] * grad.dim()).to(grad.dtype) * grad, None, None


def _keep_first_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    axes, n, how = _rest(ctx, "keep_first")
    return _KEEP_FIRST(grad, axes, n, how), None, None, None


# ---- local functions ----


def rearrange_view(x: Tensor, pattern: str, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
    """`einops.rearrange` with the sizes as two lists; the result may share memory with x."""
    return einops.rearrange(x, pattern, **dict(zip(names, sizes, strict=True)))


def _rearrange(x: Tensor, pattern: str, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
    out = rearrange_view(x, pattern, names, sizes)
    # An operator's result is its own memory.
    return out.clone(memory_format=torch.contiguous_format)


def _rearrange_fake(x: Tensor, pattern: str, names: Sequence[str], sizes: Sequence[int]) -> Tensor:
    return x.new_empty(rearrange_view(x, pattern, names, sizes).shape)


def _factor_sizes(shape: Sequence[int], left: str, names: Sequence[str], sizes: Sequence[int]) -> dict[str, int]:
    """Sizes of all names on the left of a pattern."""
    known = dict(zip(names, sizes, strict=True))
    for dim, size in zip(factors_of(left), shape, strict=True):
        for name in dim:
            if name not in known:
                known[name] = size // prod(known.get(other, 1) for other in dim)
    return known


def _rearrange_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, pattern, names, sizes = inputs
    left, right = pattern.split("->")
    ctx.inverse = (f"{right.strip()} -> {left.strip()}", _factor_sizes(x.shape, left, names, sizes))


def _rearrange_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    pattern, known = ctx.inverse
    return _REARRANGE(grad, pattern, list(known), list(known.values())), None, None, None


def _fit(x: Tensor, shape: Sequence[int]) -> Tensor:
    out = x.new_zeros(tuple(shape))
    common = tuple(slice(0, min(a, b)) for a, b in zip(x.shape, shape, strict=True))
    out[common] = x[common]
    return out


def _fit_fake(x: Tensor, shape: Sequence[int]) -> Tensor:
    if len(shape) != x.dim():
        raise CollectiveError(f"colofunc.fit: {tuple(shape)} and a tensor of shape {tuple(x.shape)} differ in rank")
    return x.new_empty(tuple(shape))


def _fit_save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = tuple(inputs[0].shape)


def _fit_back(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _FIT(grad, ctx.shape), None


# ---- registration ----


def _collective(
    name: str,
    signature: str,
    fake: Callable[..., Tensor],
    save: Callable[..., None],
    back: Any,
    kind: str,
    facts: Facts = NOTHING,
) -> Any:
    return define(f"{name}({signature}) -> Tensor", _eager(name), fake, (save, back), kind=kind, facts=facts)


_ALL_GATHER = _collective(
    "all_gather",
    "Tensor x, str[] axes, int n",
    _all_gather_fake,
    _save_call,
    _all_gather_back,
    "wire",
    facts=Facts(own_memory=True),
)
_REDUCE_SCATTER = _collective(
    "reduce_scatter",
    "Tensor x, str[] axes, int n, str how",
    _reduce_scatter_fake,
    _save_sum,
    _reduce_scatter_back,
    "wire",
    facts=Facts(own_memory=True),
)
_ALL_REDUCE = _collective(
    "all_reduce",
    "Tensor x, str[] axes, int n, str how",
    _all_reduce_fake,
    _save_sum,
    _all_reduce_back,
    "wire",
    facts=Facts(own_memory=True),
)
_ALL_TO_ALL = _collective(
    "all_to_all", "Tensor x, str[] axes, int n, Tensor? rows=None, int expected=0", _all_to_all_fake, _save_call, _all_to_all_back,
    "wire", facts=Facts(own_memory=True),
)  # fmt: skip
_PERMUTE = _collective(
    "permute", "Tensor x, str[] axes, int n, int[] table", _permute_fake, _save_call, _permute_back, "wire"
)
define(
    "send(Tensor x, str[] axes, int n, int source, int[] targets, *, int tag=0) -> Tensor",
    _eager("send"),
    _send_fake,
    kind="peer",
)
define(
    "receive(str[] axes, int n, int source, int[] shape, ScalarType dtype, *, int tag=0) -> Tensor", _eager("receive"), _receive_fake,
    kind="peer",
)  # fmt: skip
_TAKE_SHARD = _collective(
    "take_shard", "Tensor x, str[] axes, int n", _take_shard_fake, _save_call, _take_shard_back, "rank"
)
_KEEP_FIRST = _collective(
    "keep_first", "Tensor x, str[] axes, int n, str how", _keep_first_fake, _save_sum, _keep_first_back, "rank"
)
_AXIS_INDEX = define("axis_index(str[] axes) -> Tensor", _eager("axis_index"), _axis_index_fake, kind="rank")
_REARRANGE = define(
    "rearrange(Tensor x, str pattern, str[] names, int[] sizes) -> Tensor",
    _rearrange, _rearrange_fake, (_rearrange_save, _rearrange_back), kind="layout",
)  # fmt: skip
_FIT = define("fit(Tensor x, int[] shape) -> Tensor", _fit, _fit_fake, (_fit_save, _fit_back), for_compilers=_fit)


# ---- for local code ----

AxisNames = str | Iterable[str]


def _group(axes: AxisNames, mesh: Mesh) -> tuple[list[str], int]:
    """Atomic axes of more than one rank, and the size of their groups."""
    atoms = [atom for atom in mesh.atoms(axes) if mesh.part_size(atom) > 1]
    return atoms, prod(mesh.part_size(atom) for atom in atoms)


def all_gather(x: Tensor, axes: AxisNames, mesh: Mesh) -> Tensor:
    """All members' x, (n, *x.shape)."""
    atoms, n = _group(axes, mesh)
    return _ALL_GATHER(x, atoms, n) if n > 1 else x.unsqueeze(0)


def reduce_scatter(x: Tensor, axes: AxisNames, mesh: Mesh, how: str = "sum") -> Tensor:
    """The reduction of all members' chunk i, for member i. x: (n, *s) -> s."""
    atoms, n = _group(axes, mesh)
    return _REDUCE_SCATTER(x, atoms, n, how) if n > 1 else x.squeeze(0)


def all_reduce(x: Tensor, axes: AxisNames, mesh: Mesh, how: str = "sum") -> Tensor:
    """The reduction of all members' x."""
    atoms, n = _group(axes, mesh)
    return _ALL_REDUCE(x, atoms, n, how) if n > 1 else x


def all_to_all(x: Tensor, axes: AxisNames, mesh: Mesh, rows: Tensor | None = None, expected: int = 0) -> Tensor:
    """Chunk j goes to member j; the result's chunk j comes from member j. x: (n, *s).

    rows: (s[0],) integers, all equal, and the same on all members: only so many rows of each chunk travel, nothing at
    all where they are 0; the result has zeros behind them. `expected`: how many are counted on the wire before they are
    known.
    """
    atoms, n = _group(axes, mesh)
    if n == 1:
        return x
    return _ALL_TO_ALL(x, atoms, n) if rows is None else _ALL_TO_ALL(x, atoms, n, rows, expected)


def permute(x: Tensor, axes: AxisNames, mesh: Mesh, table: Sequence[int]) -> Tensor:
    """x of member table[i], for member i."""
    atoms, n = _group(axes, mesh)
    return _PERMUTE(x, atoms, n, list(table)) if n > 1 else x


def axis_index(axes: AxisNames, mesh: Mesh) -> Tensor:
    """This rank's row-major index along the axes, a 0-dim int64."""
    atoms, n = _group(axes, mesh)
    return _AXIS_INDEX(atoms) if n > 1 else torch.zeros((), dtype=torch.int64)


def take_shard(x: Tensor, axes: AxisNames, mesh: Mesh) -> Tensor:
    """This rank's chunk of a copy. x: (n, *s) -> s."""
    atoms, n = _group(axes, mesh)
    return _TAKE_SHARD(x, atoms, n) if n > 1 else x.squeeze(0)


def keep_first(x: Tensor, axes: AxisNames, mesh: Mesh, how: str = "sum") -> Tensor:
    """Copies as terms of a pending reduction: x on index 0 and zeros elsewhere for a sum, x everywhere for max, min."""
    atoms, n = _group(axes, mesh)
    return _KEEP_FIRST(x, atoms, n, how) if n > 1 and how == "sum" else x


def rearrange(x: Tensor, pattern: str, **sizes: int) -> Tensor:
    """`einops.rearrange`, one node in a program."""
    return _REARRANGE(x, pattern, list(sizes), list(sizes.values()))


def fit(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Pad with zeros, or cut, each dim at its end."""
    return _FIT(x, list(shape))
