"""Weight gradients apart from input gradients: what one operator computes becomes two where a schedule has I and W."""

from typing import Any

import pytest
import torch
from test_pipeline import agrees_with_one_device
from test_pipeline_models import nodes_of
from torch import nn

import colofunc as cf

CONVOLUTION = "aten.convolution_backward.default"


def convolutions(layers: int = 8, width: int = 4) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    blocks: list[nn.Module] = []
    for index in range(layers):
        blocks += [nn.Conv2d(3 if index == 0 else width, width, 3, padding=1, bias=index % 2 == 0), nn.Tanh()]
    model = cf.functional(nn.Sequential(*blocks).double())
    loss = lambda out, images: out.square().mean()  # noqa: E731
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), loss, clip=0.3, inputs=lambda images: ((images,), {}))
    return step, state, torch.randn(8, 3, 6, 6, dtype=torch.float64)


def masks(low: Any) -> list[tuple[bool, ...]]:
    """Which gradients each backward of a convolution makes."""
    return [tuple(node.args[-1]) for _, node in nodes_of(low.program) if node.target == CONVOLUTION]


@pytest.mark.parametrize(("ranks", "schedule"), [(2, "zb-h1"), (2, "zb-v"), (4, "zb-h1"), (4, "zb-v")])
def test_convolutions_with_weight_gradients_apart_train_as_one_device_does(ranks: int, schedule: str) -> None:
    step, state, batch = convolutions()
    low = agrees_with_one_device(cf.pipeline(cf.shard(step, cf.Mesh(pp=ranks)), microbatches=4, schedule=schedule), state, batch)
    assert all(made[0] != any(made[1:]) for made in masks(low)), "one node makes the one or the other"


def test_a_schedule_without_weight_parts_leaves_the_backward_whole() -> None:
    step, state, batch = convolutions()
    low = cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=4, schedule="1f1b").lower(state, batch)
    assert sum(made[0] and made[1] for made in masks(low)) == 7, "all but the first, whose input has no gradient"


def test_zero_bubble_has_less_of_a_bubble_with_convolutions() -> None:
    """W has the seconds of the weights: as many as the inputs' gradients of the same layers."""
    step, state, _ = convolutions(width=64)
    batch = cf.abstract((64, 3, 32, 32), torch.float64)
    at = {f"{2 * layer}.*": layer // 2 for layer in range(8)}
    lows = {}
    for schedule in ("1f1b", "zb-h1"):
        chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=4, topology="4xa100-80g")), microbatches=8, schedule=schedule, stages=at)
        lows[schedule] = chain.lower(state, batch)
    assert lows["zb-h1"].pipeline().bubble < 0.7 * lows["1f1b"].pipeline().bubble
    assert lows["zb-h1"].plan.cost_s < lows["1f1b"].plan.cost_s
