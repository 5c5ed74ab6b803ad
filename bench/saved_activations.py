"""Activations kept for backward in 8 bits: the peak of a step of GPT-2, and what it does to a model that is trained so.

Peaks are those of the accountant, of a step in bf16 with AdamW on one card that is not here; so are seconds, which count that values are
packed and widened. Beside it stands making values again within the same memory. Quality is that of the small LLaMA of `bench/quality.py`,
with the batches and the rate of `bench/fp8.py`.
"""

from __future__ import annotations

from typing import Any

import torch

import colofunc as cf
from bench import Row, Section, fresh
from bench.fp8 import BOUND, RATE, WARM_UP, rate
from bench.quality import CONTEXT, HELD_OUT_ROWS, ROWS, STEPS, batch, forward, new_model, text
from colofunc.ops.saved_activations import NUMBERS

CARD = "h100"
BATCH, LENGTH = 8, 1024


def gpt2_step() -> tuple[Any, Any, Any]:
    """(step in bf16, its state, a batch), of GPT-2's smallest size; nothing is made."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = cf.functional(cf.lazy(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False))))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), clip=1.0)
    step = cf.precision(cf.shard(step_fn, cf.Mesh(topology=CARD)), "bf16")
    ids = cf.abstract((BATCH, LENGTH), torch.int64)
    return step, state, {"input_ids": ids, "labels": ids}


def planned(activations: str | None, budget_bytes: int | None = None) -> dict[str, Any]:
    """Peak and seconds of the step as planned: with activations in a form, or made again within a budget."""
    step, state, example = gpt2_step()
    if activations is not None:
        step = cf.quantize(step, activations=activations)
    if budget_bytes is not None:
        step = cf.checkpoint(step, budget=budget_bytes)
    low = step.lower(state, example)
    said = [note for note in low.plan.notes if note.startswith("activations")]
    return {"peak": low.memory().peak_bytes["device"], "seconds": low.cost().seconds, "said": said}


def trained(activations: str | None) -> dict[str, Any]:
    """The loss on held-out text of a run in bf16 that keeps activations in a form, or as they are."""
    model, (data, held_out) = new_model(), text()
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=rate), clip=1.0)
    step = cf.precision(cf.shard(step_fn, cf.Mesh()), "bf16")
    if activations is not None:
        step = cf.quantize(step, activations=activations)
    for number in range(STEPS):
        state, _ = step(state, batch(data, number))
    params = {name: weight.full() for name, weight in state["params"].items()}
    return {"loss": float(cf.shard(forward(model), cf.Mesh())(params, batch(held_out, -1, HELD_OUT_ROWS)))}


def bench() -> Section:
    plain = fresh("saved_activations", "m.planned(None)")
    rows = [Row("GPT-2, all kept as it is", _peak(plain))]
    for form in NUMBERS:
        made = fresh("saved_activations", f"m.planned({form!r})")
        rows.append(Row(f"GPT-2, activations in {form}", f"{_beside(made, plain)}; {made['said'][0].split(': ')[1]}"))
    again = fresh("saved_activations", f"m.planned(None, {made['peak']})")
    rows.append(Row("GPT-2, made again within that memory", _beside(again, plain)))
    both = fresh("saved_activations", f"m.planned('int8', {int(0.85 * made['peak'])})")
    rows.append(Row("GPT-2, in int8 and made again within 0.85 of it", _beside(both, plain)))
    kept = fresh("saved_activations", "m.trained(None)")
    rows.append(Row(f"bf16, {STEPS} steps", f"loss {kept['loss']:.4f}"))
    for form in NUMBERS:
        loss = fresh("saved_activations", f"m.trained({form!r})")["loss"]
        apart = loss / kept["loss"] - 1
        figure = f"loss {loss:.4f} ({apart:+.2%})"
        rows.append(Row(f"activations in {form}, {STEPS} steps", figure, f"within {BOUND:.1%}", abs(apart) <= BOUND))
    setting = (
        f"GPT-2 of 124 million parameters, {BATCH} x {LENGTH} tokens, AdamW with float32 masters, bf16, planned for one {CARD}. Quality: "
        f"LLaMA, 2 layers of 256, bytes of Python's standard library, {STEPS} steps of {ROWS} x {CONTEXT}, AdamW at {RATE:g} behind "
        f"{WARM_UP} steps of warm-up, falling to 0; loss on {HELD_OUT_ROWS} rows of files that were not trained on, computed in float32. "
        f"torch {torch.__version__}."
    )
    return Section("Activations in 8 bits", setting, rows)


def _peak(made: dict[str, Any]) -> str:
    return f"peak {made['peak'] / 2**30:.2f} GiB, {made['seconds'] * 1e3:.1f} ms as planned"


def _beside(made: dict[str, Any], plain: dict[str, Any]) -> str:
    peak, seconds = made["peak"] / plain["peak"], made["seconds"] / plain["seconds"]
    return f"{_peak(made)}: {peak:.2f} of the peak, {seconds:.2f} of the time"
