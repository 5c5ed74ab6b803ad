"""Tensor parallelism over a grid of ranks: each product's weight, operand and result lie on all of its axes.

    step = cf.shard(step_fn, mesh, tensor("2d", ("x", "y")))               # SUMMA, see summa.py
    step = cf.shard(step_fn, mesh, tensor("2.5d", ("x", "y", "z")))        # with copies of the weights (Tesseract)
    step = cf.shard(step_fn, mesh, tensor("3d", ("z", "x", "y")))          # a cube, see grid3d.py
    step = cf.shard(step_fn, mesh, tensor("auto", ("x", "y")))             # any split, the grid among them, by cost

Problem: split over one axis, a layer's activations stand whole on every rank. Idea: a pattern of operators
(`cf.ext.products`), with local code for the product and both gradients; plans.py says which products of a traced
program are held to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from colofunc_plugins.tp2d_25d_3d.plans import Auto, Gridded

import colofunc as cf

__all__ = ["MODES", "Auto", "Gridded", "tensor"]

MODES = {"auto": (1, 2), "2d": (2,), "2.5d": (2, 3), "3d": (3,)}
"""Mode -> how many axes it may have."""


def tensor(
    mode: str, axis: str | Sequence[str] | None = None, *, depth: int | None = None, size: int | None = None
) -> Auto | Gridded:
    """The modes of `colofunc_plugins.tensor` that have a grid of axes, by default "x", "y" and "z", and "auto", by
    default "tp".

    axis: of "2d" (rows, columns), of "2.5d" (rows, columns, depth), of "3d" (rows, inputs, outputs). depth, size: as
    there.
    """
    if mode not in MODES:
        raise cf.PlanError(
            f"a grid has modes {', '.join(map(repr, MODES))}, not {mode!r}; colofunc_plugins.tensor has every mode"
        )
    axes = _axes(mode, axis, depth)
    sizes = None if size is None else _sizes(mode, len(axes), depth, size)
    return Auto(axes) if mode == "auto" else Gridded(mode, axes, sizes)


def _axes(mode: str, axis: str | Sequence[str] | None, depth: int | None) -> tuple[str, ...]:
    counts = MODES[mode]
    names = ("tp",) if 1 in counts else ("x", "y", "z")[: counts[-1]]
    axes = (axis,) if isinstance(axis, str) else tuple(names if axis is None else axis)
    if depth is not None and mode != "2.5d":
        raise cf.PlanError(f"tensor({mode!r}) has no depth; write tensor('2.5d', ('x', 'y', 'z'), depth={depth})")
    if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
        raise cf.PlanError(
            f"tensor('2.5d', depth={depth!r}): a grid is at least one deep. Try: depth=2, or three axes, ('x', 'y', "
            "'z')"
        )
    if len(axes) == 2 and depth is not None and depth > 1:
        axes = (*axes, "depth")
    if len(axes) not in counts or not all(isinstance(a, str) for a in axes):
        how = " or ".join(map(str, counts))
        raise cf.PlanError(
            f"tensor({mode!r}) takes {how} axes, not {axis!r}; write tensor({mode!r}, {names}), or make a view of "
            "several"
        )
    if len(set(axes)) != len(axes):
        raise cf.PlanError(f"tensor({mode!r}, {axes!r}) names an axis twice; each way through the grid has its own")
    return axes


def _sizes(mode: str, count: int, depth: int | None, size: int) -> tuple[int, ...] | None:
    """Sizes of the axes: a square, with `depth` copies, or a cube; "auto" leaves them to the mesh."""
    if mode == "auto":
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise cf.PlanError(f"tensor({mode!r}): size={size!r} is no number of ranks")
        return None
    if mode == "2.5d" and count == 3 and depth is None:
        raise cf.PlanError("tensor('2.5d', size=...) leaves open how deep the grid is; say depth=")
    deep = depth or 1
    side = round((size / deep) ** (1 / (3 if mode == "3d" else 2)))
    whole = (side,) * 3 if mode == "3d" else (side, side, deep)[:count]
    if prod(whole) != size:
        shape = "cube" if mode == "3d" else "square" + (f" of depth {deep}" if deep > 1 else "")
        raise cf.PlanError(
            f"tensor({mode!r}): {size} ranks are no {shape}; leave out size=, and give the mesh the sizes that you want"
        )
    return whole
