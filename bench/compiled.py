"""Compiled steps beside written ones: training steps of small models on one device, `step.on("compiled")` and the straight-line function.

Both are the same plan of the same step, with the same fused update. Time: CPU seconds in alternating pairs, of which the middle counts;
the first call of a compiled step, which compiles, is told apart.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import colofunc as cf
from bench import Row, Section
from bench._steps import Step
from bench.calls import MODELS

PAIRS = 15
STEPS = 10
"""Steps in a row that are timed together."""


def training(make: Callable[[], nn.Module], shape: tuple[int, ...], executor: str) -> Step:
    """A training step; each call is one step and gives its loss."""
    torch.manual_seed(0)
    model, x = cf.functional(make()), torch.randn(shape)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda out: out.square().mean())
    staged = cf.shard(step_fn, cf.Mesh()).on(executor)
    held = {"state": staged.init(state, x)}

    def step() -> float:
        held["state"], metrics = staged(held["state"], x)
        return float(metrics["loss"])

    return step


def cpu_seconds(step: Step, times: int) -> float:
    start = time.process_time()
    for _ in range(times):
        step()
    return (time.process_time() - start) / times


def rows_of(name: str, make: Callable[[], nn.Module], shape: tuple[int, ...]) -> list[Row]:
    written, compiled = training(make, shape, "simulated"), training(make, shape, "compiled")
    first_s = cpu_seconds(compiled, 1)
    cpu_seconds(written, 3), cpu_seconds(compiled, 3)
    pairs = [(cpu_seconds(written, STEPS), cpu_seconds(compiled, STEPS)) for _ in range(PAIRS)]
    middle = statistics.median
    ratio = middle(after / before for before, after in pairs)
    written_ms, compiled_ms = (1e3 * middle(pair[k] for pair in pairs) for k in (0, 1))
    return [
        Row(f"{name}: written / compiled", f"{written_ms:.2f} / {compiled_ms:.2f} ms"),
        Row("compiled / written", f"{ratio:.3f}", "at most 1.00", ratio <= 1.0),
        Row("the first compiled call", f"{first_s:.1f} s"),
    ]


def bench() -> Section:
    return Section(
        "A compiled step beside the written one",
        f"AdamW fused in both, float32, {torch.get_num_threads()} thread(s), torch {torch.__version__}, middle of {PAIRS} pairs",
        [row for name, (make, shape) in MODELS.items() for row in rows_of(name, make, shape)],
    )
