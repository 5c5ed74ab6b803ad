"""Random numbers and dropout on the CPU by a kernel in C++, with the bits of the reference.

Problem: NumPy writes and reads each step of a word's mix through the cache, on one thread. Idea: one operator that
fills a tensor, told the same as a GPU's kernel is (`colofunc.ops.random_kernels.Draw`); `ext/cuda/cpu/random.cpp` keeps
a word in registers, with SIMD and torch's threads. Normal numbers come from Wichura's algorithm in place of `erfinv`,
as on GPUs.

    fill(out, x, seed, offset, draw)

The Python kernel of the operator is made of the plain expressions of `colofunc.ops.draws`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from colofunc.ops import draws, native
from colofunc.ops.define import define, nothing
from colofunc.ops.draws import Threshold
from colofunc.ops.seeds import key_int

if TYPE_CHECKING:
    from colofunc.ops.random_kernels import Draw

# What the kernel can write, as `random.cpp` lists it.
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
KINDS = ("bits", "uniform", "normal", "keep")


def kernel_makes(dtype: torch.dtype) -> bool:
    """Whether the kernel makes tensors of `dtype` in the memory of the host."""
    return dtype in DTYPES and native.ready("cpu")


def fill(out: Tensor, x: Tensor | None, seed: int, offset: int, draw: Draw) -> None:
    """Fill `out`, which is dense."""
    sizes, strides, x_strides = (list(numbers) for numbers in zip(*draw.atoms, strict=True))
    rows, columns = (None, None) if draw.tables is None else draw.tables
    random_fill_(
        out, x, rows, columns, KINDS.index(draw.kind), key_int(seed, draw.site), offset, sizes, strides, x_strides, draw.byte, draw.bound,
        draw.ties, draw.scale,
    )  # fmt: skip


def _random_fill_(
    out: Tensor, x: Tensor | None, rows: Tensor | None, columns: Tensor | None, kind: int, key: int, first: int, sizes: Sequence[int],
    strides: Sequence[int], x_strides: Sequence[int], byte: int, bound: int, ties: bool, scale: float,
) -> None:  # fmt: skip
    if out.numel() == 0:
        return
    if rows is not None and columns is not None:
        index = rows.unsqueeze(1) + columns + first
    else:
        index = torch.full((), first)
        for size, stride in zip(sizes, strides, strict=True):
            index = index.unsqueeze(-1) + torch.arange(size) * stride
    # In the order of the memory of the result, whatever that of its dims.
    flat = torch.as_strided(out, (out.numel(),), (1,), out.storage_offset())
    if KINDS[kind] == "keep":
        numbers = _keep(index, key, Threshold(byte, 1 if ties else 0), bound)
    elif KINDS[kind] == "normal":
        numbers = draws.normal(index, key, out.dtype)
    else:
        numbers = draws.uniform(index, key, out.dtype) if KINDS[kind] == "uniform" else draws.bits(index, key)
    if x is not None:
        source = torch.as_strided(x, tuple(sizes), tuple(x_strides), x.storage_offset())
        numbers = (source * numbers.reshape(source.shape).to(x.dtype)).mul_(scale)
    flat.copy_(numbers.reshape(-1))


def _keep(index: Tensor, key: int, threshold: Threshold, bound: int) -> Tensor:
    """Draws that are below a byte, or equal to it with further bits below `bound`."""
    found = (draws.bits(index >> 3, key) >> ((index & 7) << 3)) & 255
    keep = found < threshold.byte
    if threshold.rest == 0:
        return keep
    return keep | ((found == threshold.byte) & (draws.bits(index, key ^ draws.SECOND, top_only=True) < bound))


random_fill_ = define(
    "random_fill_(Tensor(a!) out, Tensor? x, Tensor? rows, Tensor? columns, int kind, int key, int first, int[] "
    "sizes, int[] strides, int[] x_strides, int byte, int bound, bool ties, float scale) -> ()",
    _random_fill_, nothing,
)  # fmt: skip
