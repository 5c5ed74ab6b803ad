"""Adam and AdamW of parameters in bfloat16 without masters: computed in float32, and what is written rounded
stochastically.

    param, m, v = adamw_rounded(param, grad, m, v, step, lr, 0.9, 0.999, 1e-8, 0.01, True, False, None, site=3)

Parameter and moments are in bfloat16 and read as they are; every operation below rounds once in float32, so no
element's result depends on where it lies, and `ops.rounding` draws by (step, site, index in the global tensor). Nothing
random is kept: a step that is repeated, or goes on from a checkpoint, on any mesh, rounds alike. On the host a kernel
in C++ has the same bits (`ext/cuda/cpu/update_rounded.cpp`).

`sizes`, `strides`, `offset`: which part of the global parameter this is, see `colofunc.ops.indices`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import InputError
from colofunc.ops.define import define, define_update, nothing
from colofunc.ops.indices import Index, index_of
from colofunc.ops.rounding import DEVICE_TILE, HOST_TILE, PARAM_DRAW, key_of, root_of, rounded, words_by
from colofunc.ops.update_narrow import HOST_GRADS, host_form
from colofunc.ops.update_numbers import corrections, is_skipped, on_device

ROUNDED = (torch.bfloat16,)
"""Dtypes of parameters that are rounded so."""
MOMENT_DRAWS = (1, 2)
"""Which draws of an element's word are those of the moments."""


def _adamw_rounded_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, maximize: bool, finite: Tensor | None, site: int, sizes: Sequence[int] = (),
    strides: Sequence[int] = (), offset: Tensor | None = None,
) -> None:  # fmt: skip
    if not param.numel() or is_skipped(finite, param):
        return
    with compat.no_function_modes():
        wide = torch.float32
        finite = on_device(finite, param)
        times, first, root, keep = corrections(step, lr, param, beta1, beta2, weight_decay, wide)
        options = beta1, beta2, eps, weight_decay, decoupled, maximize
        written = [param, exp_avg, exp_avg_sq]
        # A shard may lie in another order than its elements are counted in.
        flat = [x.contiguous().view(-1) for x in written]
        grads = grad.contiguous().view(-1)
        index = index_of(param.shape, sizes, strides, offset, param.device)
        key = key_of(times.to(torch.int64), site)
        known = grads.dtype in HOST_GRADS and all(x.dtype in ROUNDED for x in flat)
        if known and isinstance(key, int) and isinstance(index.columns, tuple):
            numbers = float(first), float(root), float(keep), *options
            host_form(adamw_rounded_host_)(flat[0], grads, *flat[1:], *numbers, key, index.rows, *index.columns)
        else:
            _in_tiles(flat, grads, first, root, keep, *options, key, index, finite)
        for x, part in zip(written, flat, strict=True):
            if not x.is_contiguous():
                x.copy_(part.view(x.shape))


def _in_tiles(
    flat: Sequence[Tensor], grads: Tensor, first: Tensor | float, root: Tensor | float, keep: Tensor | float, beta1: float, beta2: float,
    eps: float, weight_decay: float, decoupled: bool, maximize: bool, key: int | Tensor, index: Index, finite: Tensor | None,
) -> None:  # fmt: skip
    """The update of flat tensors, so many elements at a time. flat: parameter and moments."""
    wide, param = torch.float32, flat[0]
    at_once = HOST_TILE if param.is_cpu else DEVICE_TILE
    for begin in range(0, param.numel(), at_once):
        end = min(param.numel(), begin + at_once)
        parts = [x[begin:end] for x in flat]
        new, mean, square = (x.to(wide) for x in parts)
        g = grads[begin:end].to(wide)
        g = -g if maximize else g
        if weight_decay != 0.0 and decoupled:
            new = new * keep
        elif weight_decay != 0.0:
            g = g + new * weight_decay
        mean = mean * beta1 + g * (1 - beta1)
        square = square * beta2 + g * g * (1 - beta2)
        new = new - mean * first / (root_of(square) / root + eps)
        words = words_by(index, begin, end, key, param.device)
        for old, x, draw in zip(parts, (new, mean, square), (PARAM_DRAW, *MOMENT_DRAWS), strict=True):
            x = rounded(x, words, draw)
            old.copy_(x if finite is None else torch.where(finite, x, old))


def _adamw_rounded_host_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, rate: float, root: float, keep: float, beta1: float, beta2: float,
    eps: float, weight_decay: float, decoupled: bool, maximize: bool, key: int, rows: Tensor, count: int, stride: int,
) -> None:  # fmt: skip
    flat, options = (param, exp_avg, exp_avg_sq), (beta1, beta2, eps, weight_decay, decoupled, maximize)
    _in_tiles(flat, grad, rate, root, keep, *options, key, Index(rows, (count, stride)), None)


def _fake_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: Tensor, lr: Tensor, beta1: float, beta2: float, eps: float,
    weight_decay: float, decoupled: bool, maximize: bool, finite: Tensor | None, site: int, sizes: Sequence[int] = (),
    strides: Sequence[int] = (), offset: Tensor | None = None,
) -> None:  # fmt: skip
    for name, x in (("parameter", param), ("first moment", exp_avg), ("second moment", exp_avg_sq)):
        if x.dtype not in ROUNDED:
            raise InputError(
                f"adamw_rounded: the {name} is in {x.dtype}. Try: parameters and moments in torch.bfloat16; "
                "colofunc.adamw"
            )


adamw_rounded, adamw_rounded_ = define_update(
    "adamw_rounded_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor step, Tensor lr, "
    "float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, Tensor? finite, int "
    "site, int[] sizes=[], int[] strides=[], Tensor? offset=None) -> ()",
    _adamw_rounded_, _fake_,
)  # fmt: skip
adamw_rounded_host_ = define(
    "adamw_rounded_host_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, float rate, float "
    "root, float keep, float beta1, float beta2, float eps, float weight_decay, bool decoupled, bool maximize, int "
    "key, Tensor rows, int count, int stride) -> ()",
    _adamw_rounded_host_, nothing,
)  # fmt: skip
"""On flat tensors on the host, which are contiguous; rate, root and keep are numbers of float32."""
