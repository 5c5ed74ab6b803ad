"""Slice 16: a training step of adapters beside weights in nf4 (QLoRA), beside weights in bfloat16 (LoRA), and of all weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, Step, ids, staged_run, steps, training
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, at_least, at_most
from bench.gpu.sizes import Training

RANK = 16
LAYERS = tuple(f"*blocks.*.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down"))
KINDS = {"all": "all weights, bfloat16", "LoRA": "LoRA, bfloat16", "QLoRA": "QLoRA, nf4"}
AIMS = {"all": (1.0, 0.35), "LoRA": (0.8, 0.7)}
"""Kind -> how many times its tokens a second QLoRA should have at least, and how many times its peak at most."""
NEAR = 0.02
"""Of a loss: results are bfloat16, and sums are taken in another order."""


def adapted(of: Training, dtype: torch.dtype) -> tuple[Any, Any]:
    """(step function, state) that trains adapters of all products in blocks."""
    model = cf.lora(cf.functional(cf.lazy(lambda: Llama(of.shape, dtype))), LAYERS, rank=RANK)
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda loss: loss)


def run_of(kind: str, of: Training, dtype: torch.dtype, device: str = "cuda") -> Run:
    """A step that trains "all" weights, or adapters beside frozen ones: "LoRA", or "QLoRA" where these are in nf4."""
    torch.manual_seed(0)  # adapters begin with random numbers
    step_fn, state = training(lambda: Llama(of.shape, dtype)) if kind == "all" else adapted(of, dtype)
    step: Any = cf.shard(step_fn, cf.Mesh(device=device))
    if kind == "QLoRA":
        step = cf.quantize(step, "nf4", where=[f"{layer}.weight" for layer in LAYERS])
    return staged_run(step, state, {name: x.to(device) for name, x in ids(of).items()})


def numbers(setup: Setup) -> list[Row]:
    """The losses of three steps through weights in nf4, on the card and on the host: those behind the first tell of gradients."""
    losses = {}
    for device in ("cuda", "cpu"):
        run = run_of("QLoRA", setup.sizes.narrow, torch.bfloat16, device)
        losses[device] = [float(run()) for _ in range(3)]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["cuda"], losses["cpu"], strict=True))
    return [at_most("largest difference of the loss over three steps, card / host", apart, NEAR, f"{apart:.1e} ({losses['cuda']})")]


def speed(setup: Setup) -> list[Row]:
    """One after the other, each with the card to itself."""
    of, rows, taken = setup.sizes.adapters, [], dict[str, Step]()
    for kind, words in KINDS.items():
        taken[kind] = steps(partial(run_of, kind, of, setup.sizes.dtype), setup.sizes.steps)
        rows.append(Row(words, taken[kind].words(of.tokens)))
    packed = taken["QLoRA"]
    for kind, (least_speed, most_peak) in AIMS.items():
        speed, peak = taken[kind].seconds / packed.seconds, packed.peak_bytes / taken[kind].peak_bytes
        rows.append(at_least(f"tokens/s, QLoRA / {KINDS[kind]}", speed, least_speed, f"{speed:.3f}"))
        rows.append(at_most(f"peak, QLoRA / {KINDS[kind]}", peak, most_peak, f"{peak:.3f}"))
    return rows


SLICE = Slice(16, "Adapters beside weights in nf4, a LLaMA of 8B width, 8 layers, 2,048 tokens", (
    Part("numbers", numbers), Part("speed and peak", speed),
))  # fmt: skip
