"""Slice 14: training in float8: products on the card against the host's emulation, and the LLaMA's step beside bfloat16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import colofunc as cf
from bench import Row
from bench.gpu.measuring import ids, ours, staged_run, steps, training
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, at_least, at_most

SCALINGS = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
NEAR = 0.02
"""Of a loss: results are bfloat16, and sums are taken in another order."""


def staged(scaling: str, device: str, fn: Any) -> Any:
    step = cf.shard(fn, cf.Mesh(device=device))
    return cf.fp8(step, where="*blocks.*", scaling=scaling) if scaling else step


def numbers(scaling: str, setup: Setup) -> list[Row]:
    """The losses of three steps of a narrow LLaMA in bfloat16, on the card and on the host: those behind the first tell of gradients."""
    of = setup.sizes.narrow
    step_fn, state = training(lambda: Llama(of.shape, torch.bfloat16))
    losses = {}
    for device in ("cuda", "cpu"):
        torch.manual_seed(0)
        batch = {name: x.to(device) for name, x in ids(of).items()}
        run = staged_run(staged(scaling, device, step_fn), state, batch)
        losses[device] = [float(run()) for _ in range(3)]
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["cuda"], losses["cpu"], strict=True))
    return [at_most("largest difference of the loss over three steps, card / host", apart, NEAR, f"{apart:.1e} ({losses['cuda']})")]


def speed(setup: Setup) -> list[Row]:
    of, rows, taken = setup.sizes.llama, [], {}
    for scaling in ("", "tensorwise", "rowwise"):
        wrap = partial(staged, scaling, "cuda")
        found = steps(partial(ours, lambda: Llama(of.shape, setup.sizes.dtype), ids(of), wrap), setup.sizes.steps)
        taken[scaling] = found.seconds
        rows.append(Row(scaling or "bfloat16", found.words(of.tokens)))
    for scaling in ("tensorwise", "rowwise"):
        ratio = taken[""] / taken[scaling]
        rows.append(at_least(f"tokens/s, {scaling} / bfloat16", ratio, 1.0, f"{ratio:.3f}"))
    return rows


SLICE = Slice(14, "Training in float8, the LLaMA of slice 4", (
    *(Part(f"numbers, {scaling}", partial(numbers, scaling)) for scaling in SCALINGS), Part("speed", speed),
))  # fmt: skip
