"""Grouped products, for every floating dtype: rows (s, i), sorted by group, times matrices (e, i, o) -> (s, o).

Rows offs[g - 1] .. offs[g] - 1 belong to group g; rows behind the last offset give zeros. On a card the
host does not read the offsets (`grouped_device`, chosen by `experts_guards`); elsewhere there is one product per group.

    grouped_mm(x, w, offs)        [s] i, [e] i o, [e] -> [s] o
    grouped_mm_dw(x, g, offs)     [s] i, [s] o, [e]   -> [e] i o
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from colofunc.errors import RuleError
from colofunc.ops.define import define
from colofunc.ops.experts_guards import GROUPED_KERNELS
from colofunc.ops.facts import Facts
from colofunc.ops.kernels import for_tensors, table_of

_KERNELS = table_of(GROUPED_KERNELS)


def _groups(offs: Tensor) -> Iterator[tuple[int, int, int]]:
    """(group, first row, end) of the groups that have rows."""
    start = 0
    for group, end in enumerate(offs.tolist()):
        if end > start:
            yield group, start, end
        start = max(start, end)


def _grouped_mm(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    found = for_tensors(_KERNELS, "colofunc.grouped_mm", (x, w, offs), {})
    if found is not None:
        return found[0].fn(*found[1])
    out = x.new_zeros((x.shape[0], w.shape[2]))
    for group, start, end in _groups(offs):
        torch.mm(x[start:end], w[group], out=out[start:end])
    return out


def _grouped_mm_fake(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    if x.dim() != 2 or w.dim() != 3 or x.shape[1] != w.shape[1] or offs.shape != w.shape[:1] or x.dtype != w.dtype:
        raise RuleError(
            f"grouped_mm: x {x.dtype} {tuple(x.shape)}, w {w.dtype} {tuple(w.shape)} and offs {tuple(offs.shape)} are "
            "not (s, i), (e, i, o), (e,) of one dtype. Try: w.transpose(1, 2) or x.to(w.dtype)"
        )
    return x.new_empty((x.shape[0], w.shape[2]))


def _grouped_mm_dw(x: Tensor, g: Tensor, offs: Tensor) -> Tensor:
    found = for_tensors(_KERNELS, "colofunc.grouped_mm_dw", (x, g, offs), {})
    if found is not None:
        return found[0].fn(*found[1])
    out = x.new_zeros((offs.shape[0], x.shape[1], g.shape[1]))
    for group, start, end in _groups(offs):
        torch.mm(x[start:end].t(), g[start:end], out=out[group])
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    x, w, offs = ctx.saved_tensors
    need = ctx.needs_input_grad
    dx = grouped_mm.apply(g, w.transpose(1, 2), offs) if need[0] else None
    return dx, grouped_mm_dw.apply(x, g, offs) if need[1] else None, None


def _dw_gradient(ctx: Any, h: Tensor) -> tuple[Any, ...]:
    # dw[g] = x_g.T @ g_g with h (e, i, o): x gets g @ h.T per group, g gets x @ h.
    x, g, offs = ctx.saved_tensors
    need = ctx.needs_input_grad
    dx = grouped_mm.apply(g, h.transpose(1, 2), offs) if need[0] else None
    return dx, grouped_mm.apply(x, h, offs) if need[1] else None, None


grouped_mm = define(
    "grouped_mm(Tensor x, Tensor w, Tensor offs) -> Tensor",
    _grouped_mm,
    _grouped_mm_fake,
    (_save, _gradient),
    facts=Facts(product=True, weights=(1,)),
)
grouped_mm_dw = define(
    "grouped_mm_dw(Tensor x, Tensor g, Tensor offs) -> Tensor", _grouped_mm_dw,
    lambda x, g, offs: x.new_empty((offs.shape[0], x.shape[1], g.shape[1])), (_save, _dw_gradient), facts=Facts(product=True),
)  # fmt: skip
