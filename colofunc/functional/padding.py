"""Padding of batches that changes no number: few lengths, whole row counts.

Problem: every new shape is traced and planned anew, and a last batch of 10 rows does not divide by 4 ranks. Idea: by
the names that tokenizers and models use, each tensor of a batch has one value that makes a position, or a whole row,
count for nothing: labels -100, masks 0.

    batch = cf.pad({"input_ids": ids, "labels": ids}, multiple=64)      # (4, 50) -> (4, 64), attention_mask added
    batch = cf.pad({"input_ids": ids, "labels": ids}, 1, rows=8)        # (6, 50) -> (8, 50), for 4 microbatches on 2 ranks

It is exact for losses that leave out labels of -100 and for models that honour `attention_mask`, or look only back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
import torch

from colofunc.dtensor.tensor import DTensor
from colofunc.errors import InputError
from colofunc.program.tracing.tree import Tree, flatten, unflatten

Fill = Mapping[str, float | None]

# What a position past the end holds. Tensors of other names keep their length.
POSITIONS: dict[str, float] = {
    "input_ids": 0, "attention_mask": 0, "token_type_ids": 0, "position_ids": 0, "labels": -100, "inputs_embeds": 0,
    "decoder_input_ids": 0, "decoder_attention_mask": 0, "decoder_inputs_embeds": 0, "special_tokens_mask": 1,
    "global_attention_mask": 0, "mm_token_type_ids": 0, "loss_mask": 0,
}  # fmt: skip
# What a row that counts for nothing holds; in tensors of other names it is a copy of a real row.
ROWS: dict[str, float] = {
    "labels": -100, "next_sentence_label": -100, "attention_mask": 0, "decoder_attention_mask": 0, "loss_mask": 0,
    "start_positions": 2**31 - 1, "end_positions": 2**31 - 1,  # question answering ignores what is past the end
}  # fmt: skip
# Tensors by which a loss tells which rows count.
DECIDING = ("labels", "next_sentence_label", "start_positions", "end_positions", "loss_mask")


def pad(
    batch: Any, multiple: int = 64, *, dim: int = 1, rows: int = 1, pad_id: int = 0, ignore_index: int = -100, fill: Fill | None = None,
    weights: str | None = None,
) -> Any:  # fmt: skip
    """The batch with its sequences lengthened at the end to the next multiple of `multiple`, each tensor for itself.

    `rows`: as many rows as the next multiple of it, the added ones without weight: labels -100, masks 0, anything else
    copied. Raises InputError where no tensor of the batch tells a loss to leave them out. `weights`: name of a leaf to
    add, 1 for real rows and 0 for added ones, for a loss that weighs its rows:
    `(row_losses * weight).sum() / weight.sum()`.

    `fill`: values by name or glob (the last part of the path, or all of it) for further tensors or in place of the
    usual ones; None leaves a tensor as it is. `attention_mask` is added where `input_ids` has none. Labels must be in
    the batch: a loss that takes `input_ids` for them would count what was added.
    """
    if multiple < 1 or rows < 1:
        raise InputError(f"cf.pad: multiple={multiple}, rows={rows}; give 1 or more, such as 64")
    fills = filled_table(POSITIONS, pad_id, ignore_index, fill)
    leaves, tree = flatten(with_mask(batch, fills))
    out = []
    for leaf, x in zip(tree.leaves(), leaves, strict=True):
        value = position_fill(leaf.name, x, dim, fills)
        out.append(x if value is None else lengthened(x, dim, -(-x.shape[dim] // multiple) * multiple, value))
    return _whole_rows(tree, out, rows, filled_table(ROWS, pad_id, ignore_index, fill), fill, weights)


def _whole_rows(
    tree: Tree,
    leaves: Sequence[torch.Tensor],
    multiple: int,
    fills: Mapping[str, float | None],
    fill: Fill | None,
    weights: str | None,
) -> Any:
    """The batch with rows that count for nothing up to a multiple.

    The rows are the leading size that most of them have.
    """
    sizes = Counter(x.shape[0] for x in leaves if x.dim())
    n = max(sizes, key=lambda size: (sizes[size], size), default=0)
    missing = -n % multiple
    if not missing and weights is None:
        return unflatten(tree, leaves)
    if weights is None and not decides(tree, leaves, fill):
        raise InputError(
            f"cf.pad: rows={multiple} adds {missing} rows to the {n} of this batch, and none of "
            f"{', '.join(tree.names())} tells a loss to leave them out. Try: fill={{'target': -100}} where such a "
            "value does, or weights='weight' and a loss that weighs its rows with it, (row_losses * weight).sum() / "
            "weight.sum()"
        )
    dead = torch.arange(n + missing) >= n
    out = []
    for name, x in zip(tree.names(), leaves, strict=True):
        has_rows = x.dim() > 0 and x.shape[0] == n
        out.append(dead_rows(name, more_rows(x, n + missing), dead, fills) if has_rows else x)
    if weights is None:
        return unflatten(tree, out)
    return unflatten(with_weight(tree, weights), [*out, (~dead).to(out[0].device, torch.get_default_dtype())])


def with_weight(tree: Tree, name: str) -> Tree:
    """The tree of a batch with a leaf behind all others. Raises InputError where it cannot be added."""
    leaf = Tree("tensor", name)
    if tree.kind == "tensor":
        return Tree("sequence", "", tuple, (0, 1), (tree, leaf))
    if tree.kind not in ("dict", "mapping") and (tree.kind != "sequence" or name in tree.keys):
        raise InputError(
            f"weights={name!r}: a leaf cannot be added to a {tree.type.__name__}; collate to a dict or tuple"
        )
    if name in tree.keys:
        raise InputError(f"weights={name!r}: the batch has a leaf of that name; choose another")
    key = name if tree.kind != "sequence" else len(tree.keys)
    return attrs.evolve(tree, keys=(*tree.keys, key), children=(*tree.children, leaf))


def filled_table(
    table: Mapping[str, float], pad_id: int = 0, ignore_index: int = -100, fill: Fill | None = None
) -> dict[str, float | None]:
    """The table with the caller's values; the caller's own names come first."""
    mine: dict[str, float | None] = dict(fill or {})
    own = {
        "input_ids": pad_id,
        "decoder_input_ids": pad_id,
        "labels": ignore_index,
        "next_sentence_label": ignore_index,
    }
    return {**mine, **{name: own.get(name, value) for name, value in table.items() if name not in mine}}


def fill_of(name: str, fills: Mapping[str, float | None]) -> float | None:
    """The value for a tensor at a dotted path; None where it has none."""
    last = name.rsplit(".", 1)[-1]
    for key, value in fills.items():
        if key in (name, last) or fnmatchcase(name, key):
            return value
    return None


def with_mask(batch: Any, fills: Mapping[str, float | None]) -> Any:
    """The batch with an attention mask of ones where it has token ids and no mask."""
    wants = isinstance(batch, Mapping) and "input_ids" in batch and "attention_mask" not in batch
    if not wants or fills.get("attention_mask") is None:
        return batch
    ids = torch.as_tensor(batch["input_ids"])
    added = {**batch, "attention_mask": torch.ones(ids.shape, dtype=torch.int64, device=ids.device)}
    return added if type(batch) is dict else type(batch)(added)


def position_fill(name: str, x: torch.Tensor, dim: int, fills: Mapping[str, float | None]) -> float | None:
    """What to append to `x` along `dim`; None where it is no sequence."""
    value = fill_of(name, fills)
    last = name.rsplit(".", 1)[-1]
    if isinstance(x, DTensor):
        raise InputError(
            f"cf.pad: {name!r} is on a mesh already; pad before, or write cf.batches(loader, mesh, spec, multiple=64)"
        )
    if value is None or x.dim() <= dim:
        return None
    if last == "attention_mask" and x.dim() > 2:
        raise InputError(
            f"cf.pad: {name!r} {tuple(x.shape)} is no (rows, length) mask; pad it yourself and write fill={{{last!r}: "
            f"None}}"
        )
    if last == "labels" and x.is_floating_point():
        return None  # targets of a regression: their dim is no sequence, and no value of them is ignored
    return value


def lengthened(x: torch.Tensor, dim: int, size: int, value: float) -> torch.Tensor:
    """`x` with `value` appended along `dim` up to `size`."""
    missing = size - x.shape[dim]
    if missing <= 0:
        return x
    shape = (*x.shape[:dim], missing, *x.shape[dim + 1 :])
    return torch.cat([x, torch.full(shape, value, dtype=x.dtype, device=x.device)], dim)


# ---- whole rows ----


def decides(tree: Tree, leaves: Sequence[torch.Tensor], fill: Fill | None) -> bool:
    """Whether some tensor of the batch tells a loss that a row counts for nothing."""
    for leaf, x in zip(tree.leaves(), leaves, strict=True):
        last = leaf.name.rsplit(".", 1)[-1]
        own = fill_of(leaf.name, fill or {})
        if own is not None and last not in POSITIONS:
            return True
        if last in DECIDING and (own is not None or not (x.is_floating_point() and last != "loss_mask")):
            return True
    return False


def dead_rows(name: str, x: torch.Tensor, dead: torch.Tensor, fills: Mapping[str, float | None]) -> torch.Tensor:
    """`x` whose rows at `dead` (a mask) hold what counts for nothing."""
    value = fill_of(name, fills)
    if value is None or (name.rsplit(".", 1)[-1] == "labels" and x.is_floating_point()):
        return x
    mask = dead.to(x.device).reshape(-1, *[1] * (x.dim() - 1))
    return x.masked_fill(mask, bool(value) if x.dtype == torch.bool else value)


def more_rows(x: torch.Tensor, rows: int) -> torch.Tensor:
    """`x` with its rows repeated up to `rows`."""
    n = x.shape[0]
    return x if n == rows else x[torch.arange(rows, device=x.device) % n]
