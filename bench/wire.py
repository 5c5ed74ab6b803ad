"""What sending gradients in 8 or 4 bits, and gathering parameters in 8, saves, and what it does to a model.

Bytes: a step of GPT-2 (124 million parameters, no values) on eight cards, under ZeRO-2 and ZeRO-3, by the collectives of the program that a
rank runs; parameters are gathered in 8 bits under ZeRO-3. Errors: the small LLaMA of `bench/quality.py` on two simulated ranks under ZeRO-2
(ZeRO-3 where parameters are gathered so), from the same weights on the same batches as a run that sends float32: of the gradient of the
first step, and of the loss on text that it was not trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from colofunc_plugins import zero

import colofunc as cf
from bench import Row, Section, fresh
from bench.quality import CONTEXT, HELD_OUT_ROWS, ROWS, batch, forward, new_model, text
from colofunc.planner.plan_table import time_text

STEPS, WARM_UP, RATE = 200, 20, 3e-4
SCHEMES = ("int8", "int4", "fp8")
GATHERED = ("int8", "fp8")
"""How parameters are gathered, in runs of their own."""
BOUND = 0.005
AT_ONCE = 8
REDUCES = ("reduce_scatter", "all_reduce", "all_to_all")


def gpt_step(stage: int, wire: str | None, gathers: str | None = None) -> dict[str, Any]:
    """Bytes that a rank sends and receives in a step, as counted for its collectives, and the step's seconds as planned."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = cf.functional(cf.lazy(lambda: GPT2LMHeadModel(GPT2Config(use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0))))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))
    step = cf.precision(cf.shard(step_fn, cf.Mesh(dp=8, topology="8xa100-80g"), zero(stage, "dp")), "bf16")
    if wire is not None:
        step = cf.quantize(step, wire=wire)
    if gathers is not None:
        step = cf.quantize(step, gathers=gathers)
    ids = cf.abstract((8, 1024), torch.int64)
    low = step.lower(state, {"input_ids": ids, "labels": ids})
    sums = sum(nbytes for (kind, _), nbytes in low.cost().bytes.items() if kind in REDUCES)
    gathered = sum(nbytes for (kind, _), nbytes in low.cost().bytes.items() if kind == "all_gather")
    return {"sums": sums, "gathered": gathered, "all": sum(low.cost().bytes.values()), "step_s": low.lanes().end_s}


def rate(done: torch.Tensor) -> torch.Tensor:
    """The learning rate of the step behind `done` others."""
    return RATE * torch.minimum((done + 1) / WARM_UP, (STEPS - done) / (STEPS - WARM_UP))


def stepped(optimizer: Any, wire: str | None, feedback: bool, gathers: str | None = None) -> tuple[Any, Any]:
    """A step of the small model on two ranks, and its state."""
    step_fn, state = cf.train_step(new_model(), optimizer, clip=1.0)
    step = cf.shard(step_fn, cf.Mesh(dp=2, topology="8xa100-80g"), zero(2 if gathers is None else 3, "dp"))
    if gathers is not None:
        step = cf.quantize(step, gathers=gathers)
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


def trained(wire: str | None, feedback: bool, gathers: str | None = None) -> dict[str, Any]:
    """The loss on held-out text of a run that sends gradients so, and gathers parameters so."""
    data, held_out = text()
    step, state = stepped(cf.adapt(torch.optim.AdamW, lr=rate), wire, feedback, gathers)
    first = 0.0
    for number in range(STEPS):
        state, metrics = step(state, batch(data, number))
        first = first or float(metrics["loss"])
    params = {name: weight.full() for name, weight in state["params"].items()}
    loss = float(cf.shard(forward(new_model()), cf.Mesh())(params, batch(held_out, -1, HELD_OUT_ROWS)))
    return {"loss": loss, "first": first, "size": sum(p.numel() for p in params.values())}


def found_by(calls: Sequence[str]) -> dict[str, Any]:
    """What expressions of this module give, each in a process of its own. No figure is a time, so several run at once."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return dict(zip(calls, pool.map(partial(fresh, "wire"), calls), strict=True))


def byte_row(stage: int, scheme: str, found: dict[str, Any]) -> Row:
    """What a step sends for sums of gradients, and in all, beside the same step in float32."""
    plain, narrow = found[f"m.gpt_step({stage}, None)"], found[f"m.gpt_step({stage}, {scheme!r})"]
    said = (
        f"{narrow['sums'] / 1e6:.0f} MB for sums ({plain['sums'] / narrow['sums']:.2f} times fewer), {narrow['all'] / 1e6:.0f} MB in all "
        f"({plain['all'] / 1e6:.0f}); a step is planned at {time_text(narrow['step_s'])} ({time_text(plain['step_s'])})"
    )
    return Row(f"GPT-2, ZeRO-{stage}, {scheme}", said)


def gather_row(form: str, found: dict[str, Any]) -> Row:
    """What a step sends for gathers, and in all, beside the same step in bf16."""
    plain, narrow = found["m.gpt_step(3, None)"], found[f"m.gpt_step(3, None, {form!r})"]
    said = (
        f"{narrow['gathered'] / 1e6:.0f} MB for gathers ({plain['gathered'] / narrow['gathered']:.2f} times fewer), "
        f"{narrow['all'] / 1e6:.0f} MB in all ({plain['all'] / 1e6:.0f}); a step is planned at {time_text(narrow['step_s'])} "
        f"({time_text(plain['step_s'])})"
    )
    return Row(f"GPT-2, ZeRO-3, parameters gathered in {form}", said)


def gathered_loss_row(form: str, found: dict[str, Any]) -> Row:
    """The loss behind training with parameters that are read in 8 bits, beside that of float32."""
    loss = found[f"m.trained(None, False, {form!r})"]["loss"]
    apart = loss / found["m.trained(None, False)"]["loss"] - 1
    named = f"parameters gathered in {form}, {STEPS} steps"
    return Row(named, f"loss {loss:.4f} ({apart:+.2%})", f"within {BOUND:.1%}", abs(apart) <= BOUND)


def loss_row(scheme: str, feedback: bool, found: dict[str, Any]) -> Row:
    """The loss behind training, beside that of float32."""
    loss = found[f"m.trained({scheme!r}, {feedback})"]["loss"]
    apart = loss / found["m.trained(None, False)"]["loss"] - 1
    named = f"{scheme}, error feedback, {STEPS} steps" if feedback else f"{scheme}, {STEPS} steps"
    return Row(named, f"loss {loss:.4f} ({apart:+.2%})", f"within {BOUND:.1%}", abs(apart) <= BOUND)


def bench() -> Section:
    runs = [(scheme, feedback) for scheme in SCHEMES for feedback in (False, True)]
    steps = [(stage, scheme) for stage in (2, 3) for scheme in (None, *SCHEMES)]
    calls = ["m.trained(None, False)", *(f"m.trained({scheme!r}, {feedback})" for scheme, feedback in runs)]
    calls += [f"m.gradient_error({scheme!r})" for scheme in SCHEMES]
    calls += [f"m.gpt_step({stage}, {scheme!r})" for stage, scheme in steps]
    calls += [call for form in GATHERED for call in (f"m.gpt_step(3, None, {form!r})", f"m.trained(None, False, {form!r})")]
    found = found_by(calls)
    plain = found["m.trained(None, False)"]
    rows = [byte_row(stage, scheme, found) for stage, scheme in steps if scheme is not None]
    rows += [Row(f"first gradient, {scheme}", f"off by {found[f'm.gradient_error({scheme!r})']:.2%}") for scheme in SCHEMES]
    rows.append(Row(f"float32, {STEPS} steps", f"loss {plain['loss']:.4f}"))
    rows += [loss_row(scheme, feedback, found) for scheme, feedback in runs]
    rows += [row(form, found) for form in GATHERED for row in (gather_row, gathered_loss_row)]
    setting = (
        f"GPT-2 (124 million parameters) in bf16 with AdamW, 8 x 1,024 tokens, planned for 8xa100-80g: bytes are those of a rank's "
        f"collectives. LLaMA, 2 layers of 256, {plain['size'] / 1e6:.1f} million parameters, bytes of Python's standard library, {STEPS} "
        f"steps of {ROWS} x {CONTEXT} from a loss of {plain['first']:.2f}, two simulated ranks under ZeRO-2 in float32, AdamW at {RATE:g} "
        f"behind {WARM_UP} steps of warm-up, falling to 0; loss on {HELD_OUT_ROWS} rows of files that were not trained on. torch "
        f"{torch.__version__}."
    )
    return Section("Gradients on the wire", setting, rows)
