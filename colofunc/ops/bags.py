"""Bags of rows of a table, summed: `nn.EmbeddingBag` over a matrix of indices, as an operator whose batch can be split.

Problem: torch lays the bags one behind the other and says by offsets where each begins, so that nothing knows any more
that row b of the indices is bag b. Idea: a matrix of indices stays one. A mean is this sum, divided by how many there
are.

    embedding_bag(weight, index, factors)      v e, b n, b n -> b e       out[b] = sum over n of factors[b, n] * weight[index[b, n]]

Where `index` says `padding` (-1: nowhere) a row counts for nothing. The operator is linear in `weight` and in
`factors`, and its gradients are so in what they are given: the three are each other's derivatives. None of them makes
the rows of all bags, (b, n, e).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colofunc.ops.define import define
from colofunc.ops.facts import Facts

SUM = 0  # torch's number of this mode


def _offsets(index: Tensor) -> Tensor:
    bags, each = index.shape
    return torch.arange(bags, device=index.device, dtype=index.dtype) * each


def _bag_of(index: Tensor) -> Tensor:
    """Per index, row-major, the bag that it is in."""
    bags, each = index.shape
    return torch.arange(bags, device=index.device, dtype=index.dtype).repeat_interleave(each)


def _flat(factors: Tensor | None) -> Tensor | None:
    return None if factors is None else factors.reshape(-1)


def _embedding_bag(weight: Tensor, index: Tensor, factors: Tensor | None, padding: int) -> Tensor:
    if not index.numel():
        return weight.new_zeros((index.shape[0], weight.shape[1]))
    bag = torch.ops.aten._embedding_bag_forward_only.default
    result: Tensor = bag(weight, index.reshape(-1), _offsets(index), False, SUM, False, _flat(factors), False, padding)[
        0
    ]
    return result


def _backward(grad: Tensor, index: Tensor, factors: Tensor | None, rows: int, padding: int) -> Tensor:
    bags, each = index.shape
    if not index.numel():
        return grad.new_zeros((rows, grad.shape[1]))
    sizes, no_maxima = index.new_full((bags,), each), index.new_empty(0)
    dense = torch.ops.aten._embedding_bag_dense_backward.default
    result: Tensor = dense(
        grad.contiguous(),
        index.reshape(-1),
        _bag_of(index),
        sizes,
        no_maxima,
        rows,
        False,
        SUM,
        _flat(factors),
        padding,
    )
    return result


def first_bags(weight: Tensor, index: Tensor, counts: Tensor, factors: Tensor | None) -> Tensor:
    """The sums of the first `counts` (b,) rows of each bag; (b, e).

    The others of a bag are one behind it, which is left out.
    """
    bags = index.shape[0]
    begins = _offsets(index)
    offsets = torch.stack([begins, begins + counts], 1).reshape(-1)
    bag = torch.ops.aten._embedding_bag_forward_only.default
    result: Tensor = bag(weight, index.reshape(-1), offsets, False, SUM, False, _flat(factors), False, -1)[0]
    return result.view(bags, 2, weight.shape[1])[:, 0].contiguous()


def backward_of_some(grad: Tensor, index: Tensor, counted: Tensor, factors: Tensor | None, rows: int) -> Tensor:
    """The gradient (rows, e) of a sum over those rows that are `counted` (b, n).

    The others are in one more bag, whose gradient is 0.
    """
    bags, each = index.shape
    more = torch.cat([grad, grad.new_zeros((1, grad.shape[1]))])
    bag_of = torch.where(counted.reshape(-1), _bag_of(index), bags)
    sizes, no_maxima = index.new_full((bags + 1,), each), index.new_empty(0)
    dense = torch.ops.aten._embedding_bag_dense_backward.default
    result: Tensor = dense(more, index.reshape(-1), bag_of, sizes, no_maxima, rows, False, SUM, _flat(factors), -1)
    return result


def _factors_backward(grad: Tensor, weight: Tensor, index: Tensor, padding: int) -> Tensor:
    if not index.numel():
        return grad.new_zeros(index.shape)
    of_factors = torch.ops.aten._embedding_bag_per_sample_weights_backward.default
    result: Tensor = of_factors(
        grad.contiguous(), weight, index.reshape(-1), _offsets(index), _bag_of(index), SUM, padding
    )
    return result.view(index.shape)


def _save_bag(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, ctx.padding = inputs
    ctx.save_for_backward(*tensors)


def _bag_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    weight, index, factors = ctx.saved_tensors
    of_weight = of_factors = None
    if ctx.needs_input_grad[0]:
        of_weight = embedding_bag_backward.apply(grad, index, factors, weight.shape[0], ctx.padding)
    if ctx.needs_input_grad[2]:
        of_factors = embedding_bag_factors_backward.apply(grad, weight, index, ctx.padding)
    return of_weight, None, of_factors, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    *tensors, _, ctx.padding = inputs
    ctx.save_for_backward(*tensors)


def _backward_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """grad: (v, e), of the weight's gradient."""
    bags, index, factors = ctx.saved_tensors
    of_bags = embedding_bag.apply(grad, index, factors, ctx.padding) if ctx.needs_input_grad[0] else None
    of_factors = (
        embedding_bag_factors_backward.apply(bags, grad, index, ctx.padding) if ctx.needs_input_grad[2] else None
    )
    return of_bags, None, of_factors, None, None


def _factors_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """grad: (b, n), of the factors' gradient."""
    bags, weight, index = ctx.saved_tensors
    of_bags = embedding_bag.apply(weight, index, grad, ctx.padding) if ctx.needs_input_grad[0] else None
    of_weight = None
    if ctx.needs_input_grad[1]:
        of_weight = embedding_bag_backward.apply(bags, index, grad, weight.shape[0], ctx.padding)
    return of_bags, of_weight, None, None


embedding_bag = define(
    "embedding_bag(Tensor weight, Tensor index, Tensor? factors, int padding) -> Tensor", _embedding_bag,
    lambda weight, index, factors, padding: weight.new_empty((index.shape[0], weight.shape[1])), (_save_bag, _bag_gradient),
    facts=Facts(own_memory=True, weights=(0,), rows="summed", work="gather"),
)  # fmt: skip
embedding_bag_backward = define(
    "embedding_bag_backward(Tensor grad, Tensor index, Tensor? factors, int rows, int padding) -> Tensor", _backward,
    lambda grad, index, factors, rows, padding: grad.new_empty((rows, grad.shape[1])), (_save_backward, _backward_gradient),
    facts=Facts(own_memory=True, rows="written", work="gather"),
)  # fmt: skip
embedding_bag_factors_backward = define(
    "embedding_bag_factors_backward(Tensor grad, Tensor weight, Tensor index, int padding) -> Tensor", _factors_backward,
    lambda grad, weight, index, padding: grad.new_empty(index.shape), (_save_bag, _factors_gradient),
    facts=Facts(work="gather"),
)  # fmt: skip


def bags_of(index: Tensor, weight: Tensor, mode: str, factors: Tensor | None, padding: int | None) -> Tensor:
    """What `F.embedding_bag` returns for a matrix of indices, by "sum" or "mean". factors: (b, n), of a sum alone.

    A mean is over the rows that are no padding, and 0 where there is none.
    """
    row = -1 if padding is None else padding % weight.shape[0]
    total = embedding_bag.apply(weight, index, factors, row)
    if mode == "sum":
        return total
    if padding is None:
        return total / max(1, index.shape[1])
    counts = (index != row).sum(1, keepdim=True).clamp_min(1)
    return total / counts.to(total.dtype)
