"""Models through four stages, equal to one device: a tied weight, skips between convolutions, a mixture of experts, an encoder that
all of a decoder reads, and models of timm as they are. What depends on no weight is made on each stage.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import experts, zero
from pipelined import gpt2
from test_pipeline import agrees_with_one_device
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import colofunc as cf
from colofunc.program.ir import Node, Program
from colofunc.program.places import SEND, on_rank


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


def t5() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0.0)
    net = T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)).double()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=0.5)
    return step, state, {"input_ids": torch.randint(32, (8, 6)), "labels": torch.randint(32, (8, 5))}


def of_timm(name: str, size: int, **options: Any) -> tuple[Any, Any, Any]:
    """A classifier of timm's, which trains on images of so many pixels a side."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = cf.functional(timm.create_model(name, pretrained=False, num_classes=8, **options).double())
    loss = lambda out, batch: F.cross_entropy(out, batch["classes"])  # noqa: E731
    images = lambda batch: ((batch["images"],), {})  # noqa: E731
    step, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), loss, clip=0.5, inputs=images)
    return step, state, {"images": torch.randn(8, 3, size, size, dtype=torch.float64), "classes": torch.randint(8, (8,))}


def vit() -> tuple[Any, Any, Any]:
    return of_timm("vit_tiny_patch16_224", 16, img_size=16, patch_size=8, embed_dim=16, depth=4, num_heads=2)


def convnext() -> tuple[Any, Any, Any]:
    return of_timm("convnext_atto", 32, depths=(1, 1, 1, 1), dims=(8, 16, 24, 32))


MODELS: dict[str, tuple[Callable[[], tuple[Any, Any, Any]], dict[str, int], tuple[Any, ...]]] = {
    "gpt2": (lambda: gpt2(4), {}, ()),
    "unet": (unet, {}, ()),
    "mixtral": (mixtral, {"ep": 2}, (experts("ep"),)),
    "mixtral, zero3": (mixtral, {"ep": 2}, (zero(3, "ep"), experts("ep"))),
    "t5": (t5, {}, ()),
    "vit": (vit, {}, ()),
    "convnext": (convnext, {}, ()),
}
BY_DEFAULT = {("gpt2", "zb-h1"), ("unet", "1f1b"), ("t5", "1f1b"), ("vit", "1f1b")}
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


def nodes_of(program: Program) -> Iterator[tuple[Program, Node]]:
    """Nodes of a program and of its loops, each with the program that has its values."""
    for node in program.nodes:
        if node.loop is None:
            yield program, node
        else:
            yield from nodes_of(node.loop.body)


@pytest.mark.parametrize("masked", [True, False])
def test_masks_and_rotary_tables_are_made_on_each_stage(masked: bool) -> None:
    """What one stage sends the other is the hidden state and its gradient, the loss and the norm: no mask, no table.

    A root mean square is written out in many operators, and a stage begins at its weight: its factors are sent as well.
    """
    torch.manual_seed(0)
    rows, tokens, width, microbatches = 8, 6, 16, 4
    sizes = dict(vocab_size=32, hidden_size=width, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    net = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=16)).double()
    step, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-3), clip=0.5)
    ids, mask = torch.randint(32, (rows, tokens)), torch.ones(rows, tokens, dtype=torch.int64)
    mask[::2, 4:] = 0  # of each microbatch one row is shorter, so that the mask depends on the batch
    batch = {"input_ids": ids, "labels": torch.where(mask == 1, ids, -100)} | ({"attention_mask": mask} if masked else {})
    low = agrees_with_one_device(cf.pipeline(cf.shard(step, cf.Mesh(pp=2)), microbatches=microbatches), state, batch)
    sent = [program.values[node.refs[0]].shape for program, node in nodes_of(low.program) if node.target == SEND]
    hidden = (rows // microbatches, tokens, width)
    assert hidden in sent and {shape for shape in sent if len(shape) > 1} <= {hidden, (*hidden[:2], 1)}
    for rank in range(2):
        made = {node.target for _, node in nodes_of(on_rank(low.program, low.mesh, rank).program)}
        assert "aten.cos.default" in made
