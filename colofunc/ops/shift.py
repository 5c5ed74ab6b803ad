"""Shift along a dim: row i of the result is row i - by of x, and `fill` where there is none.

Problem: a causal language model's labels are its tokens moved by one, written as a pad and a slice, or a slice put into
a tensor of fill. Taken apart, each of these needs the whole dim; together they need one row of a neighbour. Idea: the
pair is one operator (`program.passes.simplify` puts it there), so that a split sequence stays split.

    shift([a, b, c], 0, -1, fill=0)  ->  [b, c, 0]
"""

from __future__ import annotations

import torch
from torch import Tensor

from colofunc.ops.define import define


def _shift(x: Tensor, dim: int, by: int, fill: float) -> Tensor:
    n = x.shape[dim]
    out = torch.full_like(x, fill, memory_format=torch.contiguous_format)
    kept = max(0, n - abs(by))
    out.narrow(dim, max(0, min(by, n)), kept).copy_(x.narrow(dim, max(0, min(-by, n)), kept))
    return out


def _shift_fake(x: Tensor, dim: int, by: int, fill: float) -> Tensor:
    return x.new_empty(x.shape)


shift = define("shift(Tensor x, int dim, int by, Scalar fill) -> Tensor", _shift, _shift_fake, for_compilers=_shift)
