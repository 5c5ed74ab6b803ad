"""Writes in place and views, traced: the program is functional, and computes what the step does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from traced import f64, same, targets


def _slice_add(x: torch.Tensor) -> Any:
    y = x * 1.0
    y[1:].add_(x[:-1])
    return y


def _transposed(x: torch.Tensor) -> Any:
    y = x * 1.0
    z = y.t()
    z.mul_(2)
    z[0] = 3.0
    return y, z


def _chunks(x: torch.Tensor) -> Any:
    y = x.clone()
    a, b = y.chunk(2, dim=1)
    a.copy_(b)
    b += a
    return y, a, b


def _index_put(x: torch.Tensor) -> Any:
    y = x.clone()
    y[torch.tensor([0, 2]), 1] = 5.0
    y.index_put_((torch.tensor([1, 1]),), x[:2], accumulate=True)
    y[y > 1] = 0.0
    return y


def _views_of_views(x: torch.Tensor) -> Any:
    y = x.clone()
    v = y.view(-1)[2:].view(-1, 2)
    w = y.unsqueeze(0).squeeze(0).select(0, 1)
    v[:, 0].neg_()
    w.add_(1)
    return y, v, w, y.diagonal().mul_(2), y


def _out_argument(x: torch.Tensor) -> Any:
    y = torch.empty_like(x)
    torch.add(x, 1, out=y[:])
    return y


def _fills(x: torch.Tensor) -> Any:
    y = x.clone()
    y[0].zero_()
    y[1:2].fill_(2.5)
    y.t()[1].fill_(x.sum())
    return y, y.masked_fill_(y > 2, 0.0), y.clamp_(min=0)


def _strided(x: torch.Tensor) -> Any:
    y = (x * 2).t()
    y.as_strided((2, 2), (1, 3)).add_(1)
    z = x.clone()
    z.unfold(1, 2, 1)[:, 0, 0].mul_(3)
    return y, z, y.as_strided((2,), (1,), 3)


def _shape_in_place(x: torch.Tensor) -> Any:
    y = x.clone()
    z = y.view(4, 3)
    y.unsqueeze_(0).transpose_(1, 2)
    z[0] = 7.0
    y.squeeze_().t_()
    w = (x * 2).as_strided_((4, 3), (1, 4))
    w.add_(1)
    return y, y.shape[0] * x, z, w


def _channels_last(x: torch.Tensor) -> Any:
    y = F.adaptive_avg_pool2d(x.view(1, 3, 2, 2).to(memory_format=torch.channels_last), 1)
    return y, F.adaptive_avg_pool2d(x.view(1, 3, 2, 2), 1) * 2


def _foreach(x: torch.Tensor) -> Any:
    a, b = x.clone(), x * 2
    torch._foreach_add_([a, b], [b, x], alpha=2)
    torch._foreach_mul_([a, b], 3.0)
    return a, b, torch._foreach_norm([a, b])


def _in_place_under_autograd(x: torch.Tensor) -> Any:
    w = x.detach().requires_grad_()
    y = w * 2
    y[:, 1:].mul_(w[:, :-1])
    y.add_(1).neg_()
    y[0, 0] = 0.0
    (y * y).sum().backward()
    return y, w.grad


def _data_swap(x: torch.Tensor) -> Any:
    y = torch.zeros_like(x)
    y.data = x * 2
    return y + 1


def _casts(x: torch.Tensor) -> Any:
    y = torch.zeros(3, 4, dtype=torch.float32)
    y.copy_(x)
    y += x
    z = y.view(torch.int32)
    z.add_(1)
    return y, z


@pytest.mark.parametrize(
    "fn",
    [
        _slice_add, _transposed, _chunks, _index_put, _views_of_views, _out_argument, _fills, _strided, _foreach,
        _shape_in_place, _channels_last, _in_place_under_autograd, _data_swap, _casts,
    ],
)  # fmt: skip
def test_mutation_becomes_functional(fn: Callable[..., Any]) -> None:
    traced = same(fn, torch.randn(3, 4, dtype=f64))
    for name in targets(traced):
        assert not name.split(".")[1].endswith("_"), name


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [
        ((4, 3), (1, 4), 0),
        ((12,), (1,), 0),
        ((2, 1, 3), (3, 99, 1), 4),
        ((4, 5, 3), (3, 0, 1), 0),
        ((3, 4), (4, 1), 0),
        ((2,), (1,), 3),
    ],
)
def test_strides_become_words(size: Any, stride: Any, offset: int) -> None:
    traced = same(lambda x: (x * 1).as_strided(size, stride, offset), torch.randn(3, 4, dtype=f64))
    assert "aten.as_strided.default" not in targets(traced)


def test_views_are_derived_again_only_when_read() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        v = y[0]
        y.add_(1)
        y.add_(2)
        return v

    assert targets(same(step, torch.randn(2, 3, dtype=f64))).count("aten.select.int") == 2
