"""The plugins that ship with colofunc, imported as `colofunc_plugins`.

    from colofunc_plugins import zero, tensor, experts, ring

Each enters by the same door as a third party's plugin, uses public names of colofunc only, and knows no other plugin.
This module is what the entry point names; `cf.configure(..., plugins=[colofunc_plugins])` where nothing is installed.
`tensor` is the one name for modes of two plugins: a line of ranks (tp1d) and grids of them (tp2d_25d_3d).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colofunc_plugins.gemini import colofunc_memory_policies, elixir, gemini
from colofunc_plugins.moe import experts
from colofunc_plugins.pipeline import colofunc_schedules, stages
from colofunc_plugins.sequence import gather_kv, ring, ulysses
from colofunc_plugins.sequence.plan import sequence as sequence_of_mode
from colofunc_plugins.tp1d import Megatron, megatron
from colofunc_plugins.tp2d_25d_3d import MODES, Auto, Gridded
from colofunc_plugins.tp2d_25d_3d import tensor as grid
from colofunc_plugins.zero import zero

import colofunc as cf

__all__ = [
    "colofunc_memory_policies", "colofunc_schedules", "elixir", "experts", "gather_kv", "gemini",
    "ring", "stages", "tensor", "ulysses", "zero",
]  # fmt: skip


@cf.hookimpl
def colofunc_plans() -> Mapping[str, Callable[..., Any]]:
    return {
        "experts": experts,
        "gather_kv": gather_kv,
        "ring": ring,
        "sequence": sequence_of_mode,
        "stages": stages,
        "tensor": tensor,
        "ulysses": ulysses,
        "zero": zero,
        # what other frameworks call the same
        "context_parallel": sequence_of_mode,
        "expert_parallel": experts,
        "sequence_parallel": sequence_of_mode,
        "tensor_parallel": tensor,
        "zero_optimization": zero,
    }


@cf.hookimpl
def colofunc_candidate_plans() -> Mapping[str, Callable[..., Any]]:
    return {
        "zero(3)": lambda axes: zero(3, axes),
        "zero(1)": lambda axes: zero(1, axes),
        "tensor(1d)": lambda axes: megatron(axes) if len(axes) == 1 else None,
    }


def tensor(
    mode: str = "1d",
    axis: str | Sequence[str] | None = None,
    *,
    sequence: bool = False,
    vocabulary: bool = True,
    depth: int | None = None,
    size: int | None = None,
    apart: bool = False,
) -> Megatron | Auto | Gridded:
    """Tensor parallelism over one axis, or over a grid of two or three.

    mode "1d": Megatron's column and row pairs; "2d": SUMMA; "2.5d": SUMMA with copies of the weights (Tesseract); "3d":
    a cube; "auto": whatever costs least, over one axis or two. axis: "tp"; of "2d" (rows, columns), of "2.5d" (rows,
    columns, depth), of "3d" (rows, inputs, outputs), by default "x", "y" and "z". sequence: whether "1d" keeps what
    lies between the pairs (norms, residual sums) split along the sequence, so that each all-reduce becomes a
    reduce-scatter and an all-gather of the same bytes. vocabulary: whether "1d" splits the output layer, its loss and
    the embedding along the vocabulary, where the loss can. depth: how many copies "2.5d" makes, the size of its third
    axis ("depth", where two are named). size: how many ranks there are in all, to be checked. apart: whether "1d" with
    `sequence` reduces and scatters the gradients of one input one by one, as plans of torch's DTensor do, not their
    sum.
    """
    if apart and mode != "1d":
        raise cf.PlanError(f"tensor({mode!r}) has no apart; it is of tensor('1d', 'tp', sequence=True, apart=True)")
    if mode in MODES:
        return grid(mode, axis, depth=depth, size=size)
    if mode != "1d":
        modes = ", ".join(map(repr, ("1d", *MODES)))
        raise cf.PlanError(f"tensor has modes {modes}, not {mode!r}; write tensor('1d', 'tp')")
    if depth is not None:
        raise cf.PlanError(f"tensor('1d') has no depth; write tensor('2.5d', ('x', 'y', 'z'), depth={depth})")
    return megatron(axis, sequence=sequence, vocabulary=vocabulary, size=size, apart=apart)
