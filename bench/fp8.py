"""What training in float8 does to a model: the small LLaMA of `bench/quality.py`, trained in bf16 with and without `cf.fp8`.

From the same weights on the same batches, with float32 masters; compared by the loss on text that it was not trained on. Every projection
multiplies in float8, forward and backward; the head stays in bf16, as is usual.

With the usual schedule (a warm-up, then a rate that falls to 0): at a rate of 1e-3 from the first step, where a run stands after 300 steps
moves by a percent for any reason at all, so that it tells nothing of float8.
"""

from __future__ import annotations

from typing import Any

import torch

import colofunc as cf
from bench import Row, Section, fresh
from bench.quality import CONTEXT, HELD_OUT_ROWS, ROWS, STEPS, WHERE, batch, forward, new_model, text
from colofunc.ops.fp8_linear import RECIPES

RATE, WARM_UP = 3e-4, 30
BOUND = 0.005


def rate(done: torch.Tensor) -> torch.Tensor:
    """The learning rate of the step behind `done` others."""
    return RATE * torch.minimum((done + 1) / WARM_UP, (STEPS - done) / (STEPS - WARM_UP))


def trained(scaling: str | None) -> dict[str, Any]:
    """The loss on held-out text of a run in bf16, or in float8 where there is a scaling."""
    model, (data, held_out) = new_model(), text()
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=rate), clip=1.0)
    step = cf.precision(cf.shard(step_fn, cf.Mesh()), "bf16")
    if scaling is not None:
        step = cf.fp8(step, where=WHERE, scaling=scaling)
    first = 0.0
    for number in range(STEPS):
        state, metrics = step(state, batch(data, number))
        first = first or float(metrics["loss"])
    params = {name: weight.full() for name, weight in state["params"].items()}
    loss = float(cf.shard(forward(model), cf.Mesh())(params, batch(held_out, -1, HELD_OUT_ROWS)))
    return {"loss": loss, "first": first, "size": sum(p.numel() for p in params.values())}


def bench() -> Section:
    plain = fresh("fp8", "m.trained(None)")
    rows = [Row(f"bf16, {STEPS} steps", f"loss {plain['loss']:.4f}")]
    for scaling in RECIPES:
        loss = fresh("fp8", f"m.trained({scaling!r})")["loss"]
        apart = loss / plain["loss"] - 1
        rows.append(Row(f"fp8, {scaling}, {STEPS} steps", f"loss {loss:.4f} ({apart:+.2%})", f"within {BOUND:.1%}", abs(apart) <= BOUND))
    setting = (
        f"LLaMA, 2 layers of 256, {plain['size'] / 1e6:.1f} million parameters, bytes of Python's standard library, {STEPS} steps of "
        f"{ROWS} x {CONTEXT} from a loss of {plain['first']:.2f}, AdamW at {RATE:g} behind {WARM_UP} steps of warm-up, falling to 0; all "
        f"projections in float8 (emulated), bf16 otherwise; loss on {HELD_OUT_ROWS} rows of files that were not trained on, computed in "
        f"float32. torch {torch.__version__}."
    )
    return Section("Training in float8", setting, rows)
