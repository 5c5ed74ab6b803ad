"""Planned seconds of whole training steps beside measured ones, on this machine's CPU after a profile.

Ten models of different kinds, forward, backward and AdamW, float32, one thread. The machine is measured once (`cf.profile_mesh`), each step
is planned for what was found, and then runs: the middle of many steps counts by CPU seconds. Where the other half of a core is busy with
other programs a step takes up to twice as long, by CPU seconds too, so only steps count beside which a product is as fast as it was in the
profile. The same plan by the preset of a CPU box, which knows single rates only, stands beside.

    python -m bench planned_steps
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import colofunc as cf
from bench import Row, Section
from bench.calls import attention, convolutions, perceptron
from colofunc.mesh.stopwatch import least_run_s

PROFILE_S = 30.0
STEPS, WARM, ENOUGH, MOST_S = 9, 2, 3, 30.0
WIDE, QUIET = 512, 1.08
"""A step counts where a product of so many rows and columns, before and behind it, takes at most so many times what the profile found."""
NEAR = 0.1


@attrs.frozen
class Case:
    """A model and what it is given; `loss`: of its result, None where it gives its own."""

    make: Callable[[], nn.Module]
    batch: Callable[[], Any]
    is_plain: bool = False


def tokens(rows: int, length: int, vocabulary: int) -> Callable[[], Any]:
    def make() -> Any:
        numbers = torch.randint(0, vocabulary, (rows, length))
        return {"input_ids": numbers, "labels": numbers}

    return make


def images(rows: int, size: int, classes: int) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.randn(rows, 3, size, size), "labels": torch.randint(0, classes, (rows,))}


def plain(*shape: int) -> Callable[[], Any]:
    return lambda: torch.randn(*shape)


def gpt2(width: int, layers: int) -> nn.Module:
    sizes = dict(n_embd=width, n_layer=layers, n_head=width // 64, n_positions=256, vocab_size=4096, use_cache=False)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def llama(width: int, layers: int, ffn: int) -> nn.Module:
    sizes = dict(hidden_size=width, num_hidden_layers=layers, intermediate_size=ffn, vocab_size=4096, use_cache=False)
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=width // 64, num_key_value_heads=2, max_position_embeddings=512))


def opt(width: int, layers: int) -> nn.Module:
    sizes = dict(hidden_size=width, num_hidden_layers=layers, ffn_dim=4 * width, vocab_size=4096, word_embed_proj_dim=width)
    return OPTForCausalLM(OPTConfig(**sizes, num_attention_heads=width // 64, max_position_embeddings=256, dropout=0.0, use_cache=False))


def bert(width: int, layers: int) -> nn.Module:
    sizes = dict(hidden_size=width, num_hidden_layers=layers, intermediate_size=4 * width, vocab_size=4096, num_attention_heads=width // 64)
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def vit(width: int, layers: int) -> nn.Module:
    sizes = dict(hidden_size=width, num_hidden_layers=layers, intermediate_size=4 * width, num_attention_heads=width // 64)
    return ViTForImageClassification(ViTConfig(**sizes, image_size=64, patch_size=8, num_labels=10))


CASES = {
    "perceptron 4 x 1024, 256 rows": Case(lambda: perceptron(1024, 4), plain(256, 1024), True),
    "perceptron 8 x 256, 128 rows": Case(lambda: perceptron(256, 8), plain(128, 256), True),
    "convolutions 6 of 32 channels, 16 images": Case(lambda: convolutions(32, 6), plain(16, 3, 32, 32), True),
    "transformer 4 x 256, 8 x 128 tokens": Case(lambda: attention(256, 4), plain(8, 128, 256), True),
    "GPT-2 of 4 x 256, 4 x 256 tokens": Case(lambda: gpt2(256, 4), tokens(4, 256, 4096)),
    "LLaMA of 4 x 256, 4 x 256 tokens": Case(lambda: llama(256, 4, 704), tokens(4, 256, 4096)),
    "LLaMA of 2 x 512, 2 x 512 tokens": Case(lambda: llama(512, 2, 1408), tokens(2, 512, 4096)),
    "OPT of 4 x 384, 4 x 128 tokens": Case(lambda: opt(384, 4), tokens(4, 128, 4096)),
    "BERT of 4 x 256, 8 x 128 tokens": Case(lambda: bert(256, 4), tokens(8, 128, 4096)),
    "ViT of 6 x 256, 8 images": Case(lambda: vit(256, 6), images(8, 64, 10)),
}


def staged(case: Case, topology: cf.Topology | str) -> tuple[Any, Any, Any]:
    """(step, state, batch) of a case, planned for a machine."""
    torch.manual_seed(0)
    loss = (lambda out: out.square().mean()) if case.is_plain else (lambda out: out.loss)
    step_fn, state = cf.train_step(cf.functional(case.make()), cf.adapt(torch.optim.AdamW, lr=1e-4), loss=loss)
    return cf.shard(step_fn, cf.Mesh(device="cpu", topology=topology)), state, case.batch()


def planned_s(case: Case, topology: cf.Topology | str) -> float:
    step, state, batch = staged(case, topology)
    return step.lower(state, batch).lanes().end_s


def quiet_flops_per_s(topology: cf.Topology) -> float:
    """Of the product that tells whether other programs slow this one down, in the profile."""
    curve = topology.device.work_rate("product", "float32")
    assert curve is not None, "a profile has float32 products"
    return curve.at(2.0 * WIDE**3)


def product_flops_per_s() -> float:
    a, b = torch.randn(WIDE, WIDE), torch.randn(WIDE, WIDE)
    return 2.0 * WIDE**3 / least_run_s(lambda: a @ b, torch.device("cpu"), repeats=3)


def measured_s(case: Case, topology: cf.Topology) -> tuple[float, int]:
    """(middle seconds of steps, how many), of those beside which products run as fast as in the profile; of all where there are too few."""
    step, state, batch = staged(case, topology)
    state, wanted, until_s = step.init(state, batch), quiet_flops_per_s(topology) / QUIET, time.perf_counter() + MOST_S
    every: list[float] = []
    quiet: list[float] = []
    before = False
    while len(quiet) < STEPS and (time.perf_counter() < until_s or len(every) < STEPS):
        began_s = time.process_time()
        state, metrics = step(state, batch)
        float(metrics["loss"])
        every.append(time.process_time() - began_s)
        after = product_flops_per_s() >= wanted
        if before and after and len(every) > WARM:
            quiet.append(every[-1])
        before = after
    enough = len(quiet) >= ENOUGH
    return statistics.median(quiet if enough else every[WARM:]), len(quiet) if enough else 0


def bench() -> Section:
    found, rows, offs = cf.profile_mesh(cf.Mesh(device="cpu"), seconds=PROFILE_S), [], []
    for name, case in CASES.items():
        (taken_s, quiet), by_profile_s, by_preset_s = measured_s(case, found), planned_s(case, found), planned_s(case, "gloo-cpu")
        off, preset_off = by_profile_s / taken_s - 1, by_preset_s / taken_s - 1
        offs.append(abs(off))
        about = f"{quiet} quiet steps" if quiet else "no quiet steps"
        figure = f"{1e3 * by_profile_s:.4g} ms planned, {1e3 * taken_s:.4g} measured ({about}): {off:+.0%}; by the preset {preset_off:+.0%}"
        rows.append(Row(name, figure, f"within {NEAR:.0%}", abs(off) <= NEAR))
    rows.insert(0, Row("median and worst error", f"{statistics.median(offs):.0%}, {max(offs):.0%}", f"worst {NEAR:.0%}", max(offs) <= NEAR))
    setting = f"One thread, float32, AdamW, middle of {STEPS} steps by CPU seconds, beside which products are as fast as profiled"
    return Section("Planned steps on this machine", setting, rows)
