"""What lies between the grouped products of experts on a GPU: gated units with their gradients, and zeros where
nobody's rows are.

Problem: on a Hopper the products of a layer of experts are half of its time; the rest are activations in eight passes
over halves of a tensor, and masks over results of which few rows, mostly none, are to be zero. Idea: a Triton kernel
for each, in which every element is read once, and one that reads the ends of groups and then writes only what nobody
has written.

    gated(h)                              # (rows, 2f) -> silu(gate) * up, (rows, f)
    gated_backward(da, scale, h)          # units, gradient of h, and sum(da * units) of each row in float32
    zero_rows(out, ends), zero_groups(out, ends)

Each product is rounded to the dtype one by one, as torch's operators do it; exponentials are Triton's, and sums are in
float32.

This module is imported where a kernel is launched: Triton is there with torch for CUDA, and not elsewhere.
"""

# Arguments of Triton's functions have types of its own, which annotations do not say.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from colofunc.ops.kernels import on_card_of

BLOCK = 1024
ZEROS = 8192
"""Elements of a program that writes zeros, or mostly nothing."""


@triton.jit
def _halves(h, row, at, f, inside):
    """Gate and up of some units of a row of (gate, up)."""
    gate = tl.load(h + row * 2 * f + at, mask=inside, other=0.0)
    up = tl.load(h + row * 2 * f + f + at, mask=inside, other=0.0)
    return gate.to(tl.float32), up.to(tl.float32)


@triton.jit
def _as(x, like: tl.constexpr):
    """Rounded to the dtype of a tensor, as an operator of torch would have given it."""
    return x.to(like).to(tl.float32)


@triton.jit
def gated_kernel(h, out, f, BLOCK: tl.constexpr):
    """out (rows, f): silu(gate) * up, one block of a row."""
    blocks = tl.cdiv(f, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    gate, up = _halves(h, row, at, f, at < f)
    dtype: tl.constexpr = out.dtype.element_ty
    unit = _as(gate / (1.0 + tl.exp(-gate)), dtype) * up
    tl.store(out + row * f + at, unit.to(dtype), mask=at < f)


@triton.jit
def gated_backward_kernel(da, scale, h, units, dh, dots, f, BLOCK: tl.constexpr):
    """One row: its units (f,), the gradient of (gate, up) (2f,), and the sum of da * units, where da * scale is the
    units' gradient.
    """
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = units.dtype.element_ty
    factor = tl.load(scale + row).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    start = 0
    while start < f:
        at = start + tl.arange(0, BLOCK)
        inside = at < f
        gate, up = _halves(h, row, at, f, inside)
        grad = tl.load(da + row * f + at, mask=inside, other=0.0).to(tl.float32)
        slope = 1.0 / (1.0 + tl.exp(-gate))
        activated = _as(gate * slope, dtype)
        unit = (activated * up).to(dtype)
        total += grad * unit.to(tl.float32)
        tl.store(units + row * f + at, unit, mask=inside)
        grad = _as(grad * factor, dtype)
        tl.store(dh + row * 2 * f + f + at, (grad * activated).to(dtype), mask=inside)
        dgate = _as(grad * up, dtype) * slope * (1.0 + gate * (1.0 - slope))
        tl.store(dh + row * 2 * f + at, dgate.to(dtype), mask=inside)
        start += BLOCK
    tl.store(dots + row, tl.sum(total, 0))


@triton.jit
def zero_kernel(out, ends, groups, columns, BEHIND: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros in a block of a row of out (rows, columns): of rows from the last end on, else of rows that are groups
    without elements.
    """
    blocks = tl.cdiv(columns, BLOCK)
    row = tl.program_id(0) // blocks
    if BEHIND:
        is_nobodys = row >= tl.load(ends + groups - 1)
    else:
        is_nobodys = tl.load(ends + row) == tl.load(ends + row - 1, mask=row > 0, other=0)
    if is_nobodys:
        at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), out.dtype.element_ty)
        tl.store(out + row.to(tl.int64) * columns + at, zeros, mask=at < columns)


def gated(h: Tensor) -> Tensor:
    """h (rows, 2f), contiguous, not empty -> (rows, f)."""
    rows, f = h.shape[0], h.shape[1] // 2
    out = torch.empty((rows, f), dtype=h.dtype, device=h.device)
    with on_card_of(h):
        gated_kernel[(rows * triton.cdiv(f, BLOCK),)](h, out, f, BLOCK=BLOCK)
    return out


def gated_backward(da: Tensor, scale: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """da (rows, f), scale (rows, 1), h (rows, 2f), contiguous, of one dtype -> units (rows, f), dh (rows, 2f), dots
    (rows,) in float32.
    """
    rows, f = da.shape
    units, dh = torch.empty_like(da), torch.empty_like(h)
    dots = torch.empty((rows,), dtype=torch.float32, device=h.device)
    with on_card_of(h):
        gated_backward_kernel[(rows,)](da, scale, h, units, dh, dots, f, BLOCK=BLOCK)
    return units, dh, dots


def zero_rows(out: Tensor, ends: Tensor) -> Tensor:
    """out (s, o), contiguous, with zeros from row ends[-1] on; ends (e,) int32."""
    return _zeros(out, ends, out.shape[1], behind=True)


def zero_groups(out: Tensor, ends: Tensor) -> Tensor:
    """out (e, i, o), contiguous, with zeros where a group is empty; ends (e,) int32."""
    return _zeros(out, ends, out[0].numel(), behind=False)


def _zeros(out: Tensor, ends: Tensor, columns: int, behind: bool) -> Tensor:
    with on_card_of(out):
        zero_kernel[(out.shape[0] * triton.cdiv(columns, ZEROS),)](
            out, ends, ends.shape[0], columns, BEHIND=behind, BLOCK=ZEROS
        )
    return out
