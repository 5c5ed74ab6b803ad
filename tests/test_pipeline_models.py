"""Models through four stages, equal to one device: a tied weight, skips between convolutions, a mixture of experts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from colofunc_plugins import experts, zero
from pipelined import gpt2
from test_pipeline import agrees_with_one_device
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import colofunc as cf


class UNet(nn.Module):
    """Two levels; what each level down makes is read on the way up."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, width, 3, padding=1), nn.GroupNorm(2, width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge, self.last = nn.Conv2d(2 * width, width, 3, padding=1), nn.Conv2d(width, 1, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        wide = torch.relu(self.norm(self.first(image)))
        narrow = torch.relu(self.down(wide))
        narrow = narrow + torch.relu(self.middle(narrow))
        return self.last(torch.relu(self.merge(torch.cat([self.up(narrow), wide], 1))))


def unet() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model, opt = cf.functional(UNet().double()), cf.adapt(torch.optim.AdamW, lr=1e-3)
    loss = lambda out, images: (out - images.mean(1, keepdim=True)).square().mean()  # noqa: E731
    step, state = cf.train_step(model, opt, loss, clip=0.3, inputs=lambda images: ((images,), {}))
    return step, state, torch.randn(8, 3, 8, 8, dtype=torch.float64)


def mixtral() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1)
    config = MixtralConfig(**sizes, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2)
    step, state = cf.train_step(cf.functional(MixtralForCausalLM(config).double()), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=0.5)
    ids = torch.randint(32, (8, 8))
    return step, state, {"input_ids": ids, "labels": ids}


MODELS: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], dict[str, int], tuple[Any, ...]]] = {
    "gpt2": (lambda: gpt2(4), {}, ()),
    "unet": (unet, {}, ()),
    "mixtral": (mixtral, {"ep": 2}, (experts("ep"),)),
    "mixtral, zero3": (mixtral, {"ep": 2}, (zero(3, "ep"), experts("ep"))),
}
BY_DEFAULT = {("gpt2", "zb-h1"), ("unet", "1f1b"), ("mixtral", "1f1b")}
CASES = [
    pytest.param(name, schedule, marks=() if (name, schedule) in BY_DEFAULT else pytest.mark.sweep)
    for name in MODELS
    for schedule in ("1f1b", "zb-h1", "auto")
]


@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_models_through_four_stages(name: str, schedule: str) -> None:
    make, axes, plans = MODELS[name]
    step, state, batch = make()
    chain = cf.pipeline(cf.shard(step, cf.Mesh(pp=4, **axes), *plans), microbatches=4, schedule=schedule)
    low = agrees_with_one_device(chain, state, batch)
    stages = {leaf.at[1] for leaf in low.plan.inputs if leaf.role == "param" and leaf.at is not None}
    assert {(0,), (1,), (2,), (3,)} <= stages
