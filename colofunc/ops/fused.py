"""Operators that write over a tensor which dies with them: only the last pass (`colofunc.program.passes.reuse`) puts
them in.

Problem: eager autograd keeps three tensors of the size of the logits at the end of a language model (the log
probabilities, the gradient of nll_loss, which is zero but for one entry a row, and the gradient of log_softmax), and a
dense gradient of the embedding beside that of the output layer it is tied to. Idea: one storage each.

    log_softmax_(x, dim)                                    x <- log_softmax(x, dim)
    cross_entropy_dx_(p, g, t, reduction, ignore, total)    p <- d loss / d logits, from log probabilities p (n, c)
    embedding_add_(acc, g, indices, padding)                acc[indices] += g

With s the gradient of one row's loss (0 for an ignored row), d loss / d logits = s (exp(p) - onehot(t)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colofunc.ops.define import define, nothing
from colofunc.ops.facts import Facts

aten = torch.ops.aten
MEAN = 1
CACHE_BYTES = 1 << 20  # rows are worked on in blocks of about this size, so that they are read from memory once


def _log_softmax_(x: Tensor, dim: int) -> None:
    # torch's CPU kernel reads a row whole before it writes it (held by a test); of others nothing is known.
    if x.device.type == "cpu" and x.is_contiguous() and dim % x.dim() == x.dim() - 1:
        aten._log_softmax.out(x, dim, False, out=x)
    else:
        x.copy_(torch.log_softmax(x, dim))


def _cross_entropy_dx_(
    log_p: Tensor, grad: Tensor, target: Tensor, reduction: int, ignore_index: int, total: Tensor
) -> None:
    each = -grad / total if reduction == MEAN else -grad
    counted = target != ignore_index
    scale = torch.where(counted, each.to(log_p.dtype), 0.0).unsqueeze(1)  # (n, 1)
    column = torch.where(counted, target, 0).unsqueeze(1)
    rows = log_p.shape[0]
    if log_p.device.type == "cpu":
        rows = max(1, CACHE_BYTES // max(1, log_p.shape[1] * log_p.element_size()))
    for i in range(0, log_p.shape[0], max(1, rows)):
        part, s = log_p[i : i + rows], scale[i : i + rows]
        part.exp_().mul_(-s)
        part.scatter_add_(1, column[i : i + rows], s)


def _log_softmax_over_(x: Tensor, dim: int) -> None:
    x.copy_(torch.log_softmax(x, dim))


def _cross_entropy_dx_over_(
    log_p: Tensor, grad: Tensor, target: Tensor, reduction: int, ignore_index: int, total: Tensor
) -> None:
    """`cross_entropy_dx_` in one elementwise expression, which a compiler writes as one loop."""
    each = -grad / total if reduction == MEAN else -grad
    counted = target != ignore_index
    scale = torch.where(counted, each.to(log_p.dtype), 0.0).unsqueeze(1)  # (n, 1)
    column = torch.where(counted, target, 0).unsqueeze(1)
    hit = torch.arange(log_p.shape[1], device=log_p.device) == column  # (n, c)
    log_p.copy_(torch.where(hit, scale, 0.0) - log_p.exp() * scale)


def _embedding_add_(total: Tensor, grad: Tensor, indices: Tensor, padding_idx: int) -> None:
    flat = indices.reshape(-1)
    rows = grad.reshape(flat.numel(), -1)
    if padding_idx >= 0:
        rows = rows.masked_fill((flat == padding_idx).unsqueeze(1), 0.0)
    if total.is_cuda:
        # In sorted order, as the gradient alone is made there: index_add_ adds in any order, and copies of several
        # ranks would part.
        total.index_put_((flat,), rows, accumulate=True)
    else:
        total.index_add_(0, flat, rows)


log_softmax_ = define(
    "log_softmax_(Tensor(a!) x, int dim) -> ()",
    _log_softmax_,
    nothing,
    for_compilers=_log_softmax_over_,
    facts=Facts(work="softmax"),
)
cross_entropy_dx_ = define(
    "cross_entropy_dx_(Tensor(a!) log_p, Tensor grad, Tensor target, int reduction, int ignore_index, Tensor total) -> "
    "()",
    _cross_entropy_dx_, nothing, for_compilers=_cross_entropy_dx_over_, facts=Facts(work="softmax"),
)  # fmt: skip
embedding_add_ = define(
    "embedding_add_(Tensor(a!) total, Tensor grad, Tensor indices, int padding_idx) -> ()",
    _embedding_add_,
    nothing,
    facts=Facts(work="gather"),
)


# ---- gradients that are added to what earlier microbatches gave ----


def _product_added(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return total.addmm_(a, b)


def _dw_added(total: Tensor, g: Tensor, x: Tensor) -> Tensor:
    return total.addmm_(g.reshape(-1, g.shape[-1]).t(), x.reshape(-1, x.shape[-1]))


def _embedding_added(total: Tensor, grad: Tensor, indices: Tensor, rows: int, padding_idx: int, scaled: bool) -> Tensor:
    _embedding_add_(total, grad, indices, padding_idx)
    return total


ADDERS: dict[str, Callable[..., Tensor]] = {
    "aten.mm.default": _product_added,
    "colofunc.linear_dw": _dw_added,
    "aten.embedding_dense_backward.default": _embedding_added,
}
"""Operator -> what adds its result to a tensor, given in front of its arguments, without making it first."""


def has_adder(target: str, args: tuple[Any, ...]) -> bool:
    """Whether the result of a call can be added to a tensor without being made."""
    scaled_by_counts = target == "aten.embedding_dense_backward.default" and args[4]
    return target in ADDERS and not scaled_by_counts
