"""What sending gradients in 8 or 4 bits saves, and what it does to a model.

Bytes: a step of GPT-2 (124 million parameters, no values) on eight cards, under ZeRO-2 and ZeRO-3, by the collectives of the program that a
rank runs. Errors: the small LLaMA of `bench/quality.py` on two simulated ranks under ZeRO-2, from the same weights on the same batches as a
run that sends float32: of the gradient of the first step, and of the loss on text that it was not trained on.
"""

from __future__ import annotations

from typing import Any

import torch
from colofunc_plugins import zero

import colofunc as cf
from bench import Row, Section, fresh
from bench.quality import CONTEXT, HELD_OUT_ROWS, ROWS, batch, forward, new_model, text
from colofunc.planner.plan_table import time_text

STEPS, WARM_UP, RATE = 200, 20, 3e-4
SCHEMES = ("int8", "int4")
BOUND = 0.005
REDUCES = ("reduce_scatter", "all_reduce", "all_to_all")


def gpt_step(stage: int, wire: str | None) -> dict[str, Any]:
    """Bytes that a rank sends and receives in a step, as counted for its collectives, and the step's seconds as planned."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = cf.functional(cf.lazy(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))
    step = cf.precision(cf.shard(step_fn, cf.Mesh(dp=8, topology="8xa100-80g"), zero(stage, "dp")), "bf16")
    if wire is not None:
        step = cf.quantize(step, wire=wire)
    ids = cf.abstract((8, 1024), torch.int64)
    low = step.lower(state, {"input_ids": ids, "labels": ids})
    sums = sum(nbytes for (kind, _), nbytes in low.cost().bytes.items() if kind in REDUCES)
    return {"sums": sums, "all": sum(low.cost().bytes.values()), "step_s": low.lanes().end_s}


def rate(done: torch.Tensor) -> torch.Tensor:
    """The learning rate of the step behind `done` others."""
    return RATE * torch.minimum((done + 1) / WARM_UP, (STEPS - done) / (STEPS - WARM_UP))


def stepped(optimizer: Any, wire: str | None, feedback: bool) -> tuple[Any, Any]:
    """A step of the small model on two ranks, and its state."""
    step_fn, state = cf.train_step(new_model(), optimizer, clip=1.0)
    step = cf.shard(step_fn, cf.Mesh(dp=2, topology="8xa100-80g"), zero(2, "dp"))
    return (step if wire is None else cf.quantize(step, wire=wire, error_feedback=feedback)), state


def gradient_error(wire: str) -> float:
    """How far the first gradient is off, by norms over all parameters."""
    found = []
    data = text()[0]
    for scheme in (None, wire):
        step, state = stepped(cf.adapt(torch.optim.SGD, lr=1.0), scheme, False)
        before = {name: p.clone() for name, p in state["params"].items()}
        new, _ = step(state, batch(data, 0))
        found.append(torch.cat([(before[name] - p.full()).flatten() for name, p in new["params"].items()]))
    return float((found[1] - found[0]).norm() / found[0].norm())


def trained(wire: str | None, feedback: bool) -> dict[str, Any]:
    """The loss on held-out text of a run that sends gradients so."""
    data, held_out = text()
    step, state = stepped(cf.adapt(torch.optim.AdamW, lr=rate), wire, feedback)
    first = 0.0
    for number in range(STEPS):
        state, metrics = step(state, batch(data, number))
        first = first or float(metrics["loss"])
    params = {name: weight.full() for name, weight in state["params"].items()}
    loss = float(cf.shard(forward(new_model()), cf.Mesh())(params, batch(held_out, -1, HELD_OUT_ROWS)))
    return {"loss": loss, "first": first, "size": sum(p.numel() for p in params.values())}


def byte_rows() -> list[Row]:
    rows = []
    for stage in (2, 3):
        plain = fresh("wire", f"m.gpt_step({stage}, None)")
        rows.append(Row(f"GPT-2, ZeRO-{stage}, float32", f"{plain['sums'] / 1e6:.0f} MB for sums, {plain['all'] / 1e6:.0f} MB in all"))
        for scheme in SCHEMES:
            narrow = fresh("wire", f"m.gpt_step({stage}, {scheme!r})")
            less = plain["sums"] / narrow["sums"]
            said = (
                f"{narrow['sums'] / 1e6:.0f} MB for sums ({less:.2f} times fewer), {narrow['all'] / 1e6:.0f} MB in all; a step is "
                f"planned at {time_text(narrow['step_s'])} (float32: {time_text(plain['step_s'])})"
            )
            rows.append(Row(f"GPT-2, ZeRO-{stage}, {scheme}", said))
    return rows


def bench() -> Section:
    rows = byte_rows()
    for scheme in SCHEMES:
        rows.append(Row(f"first gradient, {scheme}", f"off by {fresh('wire', f'm.gradient_error({scheme!r})'):.2%}"))
    plain = fresh("wire", "m.trained(None, False)")
    rows.append(Row(f"float32, {STEPS} steps", f"loss {plain['loss']:.4f}"))
    for scheme in SCHEMES:
        for feedback in (False, True):
            loss = fresh("wire", f"m.trained({scheme!r}, {feedback})")["loss"]
            apart = loss / plain["loss"] - 1
            named = f"{scheme}, error feedback, {STEPS} steps" if feedback else f"{scheme}, {STEPS} steps"
            rows.append(Row(named, f"loss {loss:.4f} ({apart:+.2%})", f"within {BOUND:.1%}", abs(apart) <= BOUND))
    setting = (
        f"GPT-2 (124 million parameters) in bf16 with AdamW, 8 x 1,024 tokens, planned for 8xa100-80g: bytes are those of a rank's "
        f"collectives. LLaMA, 2 layers of 256, {plain['size'] / 1e6:.1f} million parameters, bytes of Python's standard library, {STEPS} "
        f"steps of {ROWS} x {CONTEXT} from a loss of {plain['first']:.2f}, two simulated ranks under ZeRO-2 in float32, AdamW at {RATE:g} "
        f"behind {WARM_UP} steps of warm-up, falling to 0; loss on {HELD_OUT_ROWS} rows of files that were not trained on. torch "
        f"{torch.__version__}."
    )
    return Section("Gradients on the wire", setting, rows)
