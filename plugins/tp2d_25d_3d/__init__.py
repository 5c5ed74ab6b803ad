"""Tensor parallelism: one operator's work over the ranks of an axis, or of a grid.

    step = cf.shard(step_fn, mesh, tensor("1d", "tp"))             # Megatron: column and row pairs, found by data flow
    step = cf.shard(step_fn, mesh, tensor("auto", "tp"))           # any split of the operators, by cost
    step = cf.shard(step_fn, mesh, tensor("2d", ("x", "y")))       # SUMMA; also "2.5d" and "3d", see plans.py

Problem: a model has to be rewritten, or a table of its module names kept, to say which product is split how. Idea: the
pattern is assigned to operators. `cf.product_pairs` reads from the traced program which product feeds which; the plan wishes
the weights so, and follows them: heads of attention, activation functions and all of backward are split along.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from colofunc_plugins.tp2d_25d_3d.lines import Auto, Megatron
from colofunc_plugins.tp2d_25d_3d.plans import Gridded

import colofunc as cf

__all__ = ["Auto", "Gridded", "Megatron", "tensor"]

MODES = {"1d": (1,), "auto": (1, 2), "2d": (2,), "2.5d": (2, 3), "3d": (3,)}
"""Mode -> how many axes it may have."""


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
    axes = _axes(mode, axis, depth)
    sizes = _sizes(mode, len(axes), depth, size)
    if mode == "1d":
        return Megatron(axes, sequence, vocabulary)
    return Auto(axes) if mode == "auto" else Gridded(mode, axes, sizes)


def _axes(mode: str, axis: str | Sequence[str] | None, depth: int | None) -> tuple[str, ...]:
    counts = MODES[mode]
    names = ("tp",) if 1 in counts else ("x", "y", "z")[: counts[-1]]
    axes = names if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    if depth is not None and mode != "2.5d":
        raise cf.PlanError(f"tensor({mode!r}) has no depth; write tensor('2.5d', ('x', 'y', 'z'), depth={depth})")
    if depth is not None and (isinstance(depth, bool) or depth < 1):
        raise cf.PlanError(f"tensor('2.5d', depth={depth!r}): a grid is at least one deep")
    if len(axes) == 2 and depth is not None and depth > 1:
        axes = (*axes, "depth")
    if len(axes) not in counts or not all(isinstance(a, str) for a in axes):
        how = "one axis" if counts == (1,) else f"{' or '.join(map(str, counts))} axes"
        raise cf.PlanError(f"tensor({mode!r}) takes {how}, not {axis!r}; write tensor({mode!r}, {names}), or make a view of several")
    if len(set(axes)) != len(axes):
        raise cf.PlanError(f"tensor({mode!r}, {axes!r}) names an axis twice; each way through the grid has its own")
    return axes


def _sizes(mode: str, count: int, depth: int | None, size: int | None) -> tuple[int, ...] | None:
    """Sizes of the axes, where `size` says them: a line, a square, with `depth` copies, or a cube."""
    if size is None:
        return None
    if mode in ("1d", "auto"):
        if isinstance(size, bool) or size < 1:
            raise cf.PlanError(f"tensor({mode!r}): size={size!r} is no number of ranks")
        return None
    if mode == "2.5d" and count == 3 and depth is None:
        raise cf.PlanError("tensor('2.5d', size=...) leaves open how deep the grid is; say depth=")
    deep = depth or 1
    side = round((size / deep) ** (1 / (3 if mode == "3d" else 2)))
    whole = (side,) * 3 if mode == "3d" else (side, side, deep)[:count]
    if prod(whole) != size:
        shape = "cube" if mode == "3d" else "square" + (f" of depth {deep}" if deep > 1 else "")
        raise cf.PlanError(f"tensor({mode!r}): {size} ranks are no {shape}; leave out size=, and give the mesh the sizes that you want")
    return whole
