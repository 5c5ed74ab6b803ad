"""The sum of a tensor's squares as one operator, `colofunc.sum_of_squares`: what a joint norm is made of.

Problem: to square a tensor and to sum the squares writes and reads another one of its size, which on a host takes ten
times as long as to read the tensor (`bench/native_passes.py`); a running sum in float32 would lose a thousandth of a
large one. Idea: one pass, in which squares are summed by rows, and rows in float64: on the host by a kernel in C++
(`ext/cuda/cpu/squares.cpp`), else by torch's norm of rows.

    total = sum_of_squares(grad)          # 0-dim, in the dtype of grad, at least float32

In float32 squares of elements below 1e-19 lose digits, of those below 2.6e-23 they are 0, and a row with a norm above
1e19 counts as infinite. Sums in float64 would have no such bounds, but take a third of the time of an update. Between
them the error is at most that of `ROW` roundings, relative. The kernel has the same bits for each instruction set and
number of threads; without it the order of a sum is another one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colofunc import compat
from colofunc.errors import InputError
from colofunc.ops import native
from colofunc.ops.define import define, nothing
from colofunc.ops.facts import Facts
from colofunc.ops.update_narrow import HOST_GRADS

ROW = 1024
"""Elements whose squares are summed in their own precision, in at least float32."""


def in_float64(x: Tensor) -> Tensor:
    """0-dim float64: the sum of squares by rows."""
    if x.is_cpu and x.dtype in HOST_GRADS and x.is_contiguous() and native.ready("cpu"):
        with compat.no_function_modes():
            out = torch.empty((), dtype=torch.float64)
        squares_host_.bare(out, x)
        return out
    return _by_rows(x)


def _by_rows(x: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    flat, count = x.reshape(-1), x.numel() // ROW
    rows, rest = flat[: count * ROW].view(count, ROW), flat[count * ROW :]
    of_rows = torch.linalg.vector_norm(rows, dim=1, dtype=wide).to(torch.float64)
    return of_rows.square().sum() + torch.linalg.vector_norm(rest, dtype=wide).to(torch.float64).square()


def _sum_of_squares(x: Tensor) -> Tensor:
    return in_float64(x).to(torch.promote_types(x.dtype, torch.float32))


def _fake(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.promote_types(x.dtype, torch.float32))


def written_out(x: Tensor) -> Tensor:
    """As a step writes it, and for a compiler, which makes one loop of it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * wide).sum()


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return (2.0 * grad * x).to(x.dtype)


def _squares_host_(out: Tensor, x: Tensor) -> None:
    if x.dtype not in HOST_GRADS or not x.is_contiguous():
        raise InputError(f"squares_host_: {x.dtype}, or not contiguous. Try: colofunc.sum_of_squares, which takes any")
    out.copy_(_by_rows(x))


sum_of_squares = define(
    "sum_of_squares(Tensor x) -> Tensor",
    _sum_of_squares,
    _fake,
    (_save, _backward),
    for_compilers=written_out,
    facts=Facts(work="reduction"),
)
squares_host_ = define("squares_host_(Tensor(a!) out, Tensor x) -> ()", _squares_host_, nothing)
