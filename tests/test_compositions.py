"""Transforms composed at random on whole models: each composition has the numbers of one device, or is refused in words.

`pytest -s -m sweep tests/test_compositions.py` tries SEEDS of them, training and inference; the rest of the time a few. What is drawn: a
model, a mesh, named plans, a budget as a part of the peak, schedule and microbatches, quantized weights, float8, and the order in which the
transforms stand. A refusal is a ColofuncError; anything else that is raised is a mistake of ours.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from colofunc_plugins import experts, ring, tensor, ulysses, zero
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import colofunc as cf
from colofunc.testing import check

SEEDS, DEFAULT, ROWS = 150, (0, 2, 5, 15, 18), 8
SIZES = dict(hidden_size=128, intermediate_size=128, num_attention_heads=4, vocab_size=64)
GROUPED = SIZES | dict(num_key_value_heads=2)
QUIET = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


class Unet(nn.Module):
    """Convolutions with a skip, a norm over groups and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.down, self.middle = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.norm, self.up, self.head = nn.GroupNorm(4, 32), nn.ConvTranspose2d(32, 16, 2, 2), nn.Linear(32, 8)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        skip = F.relu(self.begin(images))
        low = F.relu(self.norm(self.middle(F.relu(self.down(skip)))))
        return self.head(torch.cat([skip, self.up(low)], 1).mean((2, 3)))


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=64, n_positions=32, **QUIET))


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **GROUPED))


def gemma() -> nn.Module:
    return Gemma2ForCausalLM(Gemma2Config(num_hidden_layers=3, head_dim=32, sliding_window=4, **GROUPED))


def bert() -> nn.Module:
    return BertForMaskedLM(BertConfig(num_hidden_layers=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES))


def t5() -> nn.Module:
    sizes = dict(d_model=128, d_kv=32, d_ff=128, num_layers=2, num_heads=4, vocab_size=64)
    return T5ForConditionalGeneration(T5Config(dropout_rate=0.0, decoder_start_token_id=0, **sizes))


def qwen3_with_experts() -> nn.Module:
    sizes = dict(head_dim=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(num_hidden_layers=3, **sizes, **GROUPED))


MODELS: dict[Callable[[], nn.Module], str] = {  # with the layers that adapters and quantized weights are for
    gpt2: "*.c_proj", llama: "*.q_proj", gemma: "*.o_proj", bert: "*.query", t5: "*.wo", qwen3_with_experts: "*.q_proj", Unet: "head",
}  # fmt: skip
MESHES: tuple[dict[str, int], ...] = (
    dict(dp=2), dict(dp=4), dict(tp=2), dict(dp=2, tp=2), dict(cp=2), dict(dp=2, cp=2), dict(ep=2), dict(dp=2, ep=2),
    dict(pp=2), dict(pp=2, dp=2), dict(pp=2, tp=2), dict(pp=2, dp=2, tp=2),
)  # fmt: skip
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "auto")
SCHEMES = ("int8", "int8-dynamic", "int4-g128", "nf4", "fp8", "fp8-dynamic", "fp8-g128-dynamic")
BUDGETS = (0.95, 0.85, 0.7)


class Composition:
    """What is drawn from a seed: a step, what it is called with, and transforms from the first that is applied to the last."""

    def __init__(self, seed: int, trains: bool) -> None:
        self.draw, self.words = random.Random(seed), list[str]()
        torch.manual_seed(0)
        make = self.draw.choice(list(MODELS))
        self.name, self.layers = make.__name__, MODELS[make]
        self.module = make().double()
        self.axes = self.draw.choice(MESHES)
        quantized = self.draw.choice((None, None, *SCHEMES))
        self.step, self.args = self.training(quantized is not None) if trains else self.inference()
        self.transforms = [(f"shard {self.axes}", self.shard())]
        if quantized is not None:
            self.add(f"quantize {quantized}", lambda step: cf.quantize(step, quantized, where=f"{self.layers}.weight"))
        elif trains and self.draw.random() < 0.15:
            scaling = self.draw.choice(("tensorwise", "rowwise_with_gw_hp", "delayed"))
            self.add(f"fp8 {scaling}", lambda step: cf.fp8(step, scaling=scaling))
        microbatches = self.draw.choice((2, 4))
        if "pp" in self.axes:
            schedule = self.draw.choice(SCHEDULES if trains else ("gpipe", "1f1b"))
            self.add(f"pipeline {schedule} {microbatches}", lambda step: cf.pipeline(step, microbatches=microbatches, schedule=schedule))
        elif self.draw.random() < 0.3:
            self.add(f"accumulate {microbatches}", lambda step: cf.accumulate(step, microbatches))
        kinds = self.draw.choice(((), (), ("offload",), ("checkpoint",), ("checkpoint", "offload"))[: 5 if trains else 3])
        if kinds:
            budget = int(self.draw.choice(BUDGETS) * self.peak_bytes())
            for kind in kinds:
                self.add(f"{kind} {budget}", lambda step, kind=kind: getattr(cf, kind)(step, budget=budget))
        self.draw.shuffle(self.transforms)

    def add(self, words: str, transform: Callable[[Any], Any]) -> None:
        self.transforms.append((words, transform))

    def batch(self) -> dict[str, torch.Tensor]:
        if self.name == "Unet":
            return {"images": torch.randn(ROWS, 3, 8, 8, dtype=torch.float64), "labels": torch.randint(8, (ROWS,))}
        ids = torch.randint(64, (ROWS, 8))
        return {"input_ids": ids, "labels": ids}

    def training(self, adapted: bool) -> tuple[Any, tuple[Any, ...]]:
        model = cf.functional(self.module)
        if adapted:
            model = cf.lora(model, self.layers, rank=2)
        more: dict[str, Any] = {"clip": self.draw.choice((None, 1.0))}
        if self.name == "Unet":
            more |= dict(loss=lambda out, b: F.cross_entropy(out, b["labels"]), inputs=lambda b: ((b["images"],), {}))
        optimizer = self.draw.choice((torch.optim.AdamW, torch.optim.SGD))
        step, state = cf.train_step(model, cf.adapt(optimizer, lr=1e-2), **more)
        return step, (state, self.batch())

    def inference(self) -> tuple[Any, tuple[Any, ...]]:
        model, batch = cf.functional(self.module.eval()), self.batch()

        def forward(params: Any, given: dict[str, torch.Tensor]) -> Any:
            if self.name == "Unet":
                return model.apply(params, model.buffers, given["images"])[0]
            return model.apply(params, model.buffers, **given)[0].logits

        return forward, (model.params, batch)

    def shard(self) -> Callable[[Any], Any]:
        plans: list[Any] = []
        if "dp" in self.axes:
            plans += self.draw.choice(([], [zero(1, "dp")], [zero(2, "dp")], [zero(3, "dp")]))
        if "tp" in self.axes and self.name != "Unet":
            plans += self.draw.choice(([], [tensor("1d", "tp")]))
        if "cp" in self.axes:
            plans += [self.draw.choice((ring, ulysses))("cp")]
        if "ep" in self.axes and "experts" in self.name:
            plans += [experts("ep")]
        self.words.append(f"plans {[plan.name for plan in plans]}")
        return lambda step: cf.shard(step, cf.Mesh(**self.axes), *plans)

    def peak_bytes(self) -> int:
        return self.composed().lower(*self.args).memory().peak_bytes["device"]

    def composed(self) -> Any:
        step = self.step
        for _, transform in self.transforms:
            step = transform(step)
        return step

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(self.words)}; {' > '.join(words for words, _ in self.transforms)}"


def tried(seed: int, trains: bool) -> str:
    """What came of a composition: "equal", or the words of the refusal."""
    with cf.testing.float64():
        try:
            one = Composition(seed, trains)
            print(f"{seed}: {one}")
            check(one.composed(), *one.args)
        except cf.ColofuncError as refused:
            return f"{type(refused).__name__}: {refused}"
    return "equal"


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("seed", DEFAULT)
def test_a_few_compositions_are_equal(seed: int, trains: bool) -> None:
    assert tried(seed, trains) == "equal"


@pytest.mark.sweep
@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_composition_is_equal_or_refused(seed: int, trains: bool) -> None:
    print(tried(seed, trains))
