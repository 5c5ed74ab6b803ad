"""Updates of many parameters as one call, with the numbers of the operators that `update` has for one.

Problem: to call the update of a small parameter takes longer than to compute it, so that a hundred of them are a third
of a small step. Idea: torch's fused kernels take lists of tensors. What runs a program may call one of these functions
in place of several updates that stand side by side and differ in their tensors alone.

    adamw_(p, g, m, v, step, lr, 0.9, ...)
    adamw_(q, h, n, w, step, lr, 0.9, ...)      ->      adamw_all_((p, q), (g, h), (m, n), (v, w), step, lr, 0.9, ...)

Parameters that the kernels cannot take (laid otherwise in memory than their operands) are updated one by one, which
holds one temporary at a time, and so are those for which there is a kernel in C++. Optimizers for which torch has no
kernel without temporaries are not here: its `_foreach` functions would hold those of all parameters at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from typing import Any

import attrs
from torch import Tensor

from colofunc.ops.define import KERNELS
from colofunc.ops.update_fused import FUSED_DTYPES, fusable, fused_adamw_, fused_sgd_, is_exact, sgd_is_fused
from colofunc.ops.update_narrow import adamw_asks_kernel

_is_contiguous = Tensor.is_contiguous


@attrs.frozen
class Many:
    """The form of an in-place update that takes many parameters: a tuple for each of the arguments at `own`, the others
    once.
    """

    own: tuple[int, ...]
    call: Callable[..., None]


def _each(
    fused: Callable[..., None] | None,
    single: Callable[..., Any],
    columns: Sequence[Sequence[Tensor]],
    lists: Sequence[Sequence[Tensor | None]],
) -> None:
    """`fused(*columns)` for those parameters that it can take, `single` for each of the others; None: for all of them.

    columns: the tensors that have to lie alike, parameters first. lists: what `single` takes, per argument.
    """
    if fused is not None and all(map(_is_contiguous, chain.from_iterable(columns))):
        fused(*columns)
        return
    # Positions of the parameters that `fused` takes, in their order.
    taken: dict[int, None] = {}
    if fused is not None:
        for position, tensors in enumerate(zip(*columns, strict=True)):
            if all(map(_is_contiguous, tensors)) or fusable(*tensors):
                taken[position] = None
        if taken:
            parts: list[list[Tensor]] = []
            for column in columns:
                parts.append([column[position] for position in taken])
            fused(*parts)
    for position, operands in enumerate(zip(*lists, strict=True)):
        if position not in taken:
            single(*operands)


def adamw_all_(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor], step: Tensor,
    lr: Tensor, beta1: float, beta2: float, eps: float, weight_decay: float, decoupled: bool, amsgrad: bool = False,
    maxima: Sequence[Tensor | None] | None = None, maximize: bool = False, finite: Tensor | None = None,
) -> None:  # fmt: skip
    """`colofunc.adamw_` of many parameters of one dtype on one device."""
    options = beta1, beta2, eps, weight_decay, decoupled
    # Large parameters have a kernel of their own, whose numbers are other ones in the last bits.
    alone = [not amsgrad and adamw_asks_kernel(param, grad) for param, grad in zip(params, grads, strict=True)]
    if any(alone):
        rows = list(zip(params, grads, exp_avgs, exp_avg_sqs, strict=True))
        for row in compress(rows, alone):
            KERNELS["colofunc.adamw_"](*row, step, lr, *options, maximize=maximize, finite=finite)
        others = [row for row, is_done in zip(rows, alone, strict=True) if not is_done]
        if not others:
            return
        params, grads, exp_avgs, exp_avg_sqs = zip(*others, strict=True)
        maxima = None
    tops = [top for top in maxima or () if top is not None] if amsgrad else []

    def fused(p: Any, g: Any, m: Any, v: Any, *x: Any) -> None:
        fused_adamw_(p, g, m, v, x[0] if x else [], step, lr, *options, maximize, finite)

    def single(p: Tensor, g: Tensor, m: Tensor, v: Tensor, top: Tensor | None) -> None:
        KERNELS["colofunc.adamw_"](p, g, m, v, step, lr, *options, amsgrad, top, maximize, finite)

    columns = [params, grads, exp_avgs, exp_avg_sqs, *([tops] if tops else [])]
    lists = [params, grads, exp_avgs, exp_avg_sqs, maxima or [None] * len(params)]
    able = params[0].dtype in FUSED_DTYPES and is_exact(params[0])
    _each(fused if able else None, single, columns, lists)


def sgd_all_(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor | None] | None, step: Tensor, lr: Tensor, momentum: float,
    dampening: float, weight_decay: float, nesterov: bool, maximize: bool = False, finite: Tensor | None = None,
) -> None:  # fmt: skip
    """`colofunc.sgd_` of many parameters of one dtype on one device."""
    held = [buffer for buffer in buffers or () if buffer is not None] if momentum != 0.0 else []

    def fused(p: Any, g: Any, *b: Any) -> None:
        fused_sgd_(p, g, b[0] if b else [], lr, momentum, weight_decay, nesterov, maximize, finite)

    def single(p: Tensor, g: Tensor, b: Tensor | None) -> None:
        KERNELS["colofunc.sgd_"](p, g, b, step, lr, momentum, dampening, weight_decay, nesterov, maximize, finite)

    able = sgd_is_fused(params[0], momentum, dampening)
    _each(
        fused if able else None,
        single,
        [params, grads, *([held] if held else [])],
        [params, grads, buffers or [None] * len(params)],
    )


MANY: Mapping[str, Many] = {
    "colofunc.adamw_": Many((0, 1, 2, 3, 12), adamw_all_),
    "colofunc.sgd_": Many((0, 1, 2), sgd_all_),
}
