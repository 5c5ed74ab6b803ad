"""The plan of another length of a batch, beside a plan of that length made from nothing: its seconds, and what planning took.

A step that has seen 128 tokens is given 192. What does not depend on the length is kept, so its second plan has to be cheaper to make, and
it must not be worse. A toy LLaMA of four layers with AdamW on dp=2, tp=2 that no plan pins, its state not placed: sharded, and within 60 %
of what it holds for the first length without a budget, by recomputation, by copies, and by both. Every case runs in a process of its own,
which plans the second length from nothing once before anything is measured: what conversions cost is remembered, and counts for nobody.
CPU seconds are those of `step.lower`, trace included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from bench import Row, Section, fresh

LENGTHS = 128, 192
PART = 0.6
"""Of what a step holds without a budget."""
SLOWER = 1.01
"""A second plan may be this much slower than one from nothing: as `colofunc.compiler.budget.TOLERANCE` allows."""
PART_OF_WORK = 0.5
"""What planning another length may take of what planning it from nothing does."""
CASES: dict[str, Callable[[Any, int], Any]] = {
    "shard": lambda step, budget: step,
    "checkpoint": lambda step, budget: cf.checkpoint(step, budget=budget),
    "offload": lambda step, budget: cf.offload(step, budget=budget),
    "both": lambda step, budget: cf.offload(cf.checkpoint(step), budget=budget),
}


def toy(layers: int = 4) -> tuple[Any, Any]:
    """(step function, state) of a toy LLaMA."""
    heads = dict(num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=256)
    config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=layers, use_cache=False, **heads)
    with torch.device("meta"):
        model = cf.functional(LlamaForCausalLM(config))
    return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))


def tokens(length: int) -> dict[str, torch.Tensor]:
    ids = cf.abstract((8, length), torch.int64)
    return {"input_ids": ids, "labels": ids}


def planned(step: Any, state: Any, length: int) -> tuple[Any, float]:
    """(the lowered step, CPU seconds until it was there)."""
    began = time.process_time()
    low = step.lower(state, tokens(length))
    return low, time.process_time() - began


def measure(name: str) -> dict[str, float]:
    """Planned seconds of the second length and CPU seconds of lowering it, `new` from nothing and `again` after the first length."""
    step_fn, state = toy()
    mesh = cf.Mesh(dp=2, tp=2)
    budget = 0
    if name != "shard":
        budget = int(PART * cf.shard(step_fn, mesh).lower(state, tokens(LENGTHS[0])).memory().peak_bytes["device"])

    def staged() -> Any:
        return CASES[name](cf.shard(step_fn, mesh), budget)

    planned(staged(), state, LENGTHS[1])
    new, new_cpu_s = planned(staged(), state, LENGTHS[1])
    step = staged()
    _, first_cpu_s = planned(step, state, LENGTHS[0])
    again, again_cpu_s = planned(step, state, LENGTHS[1])
    return {
        "new_s": new.plan.cost_s,
        "again_s": again.plan.cost_s,
        "first_cpu_s": first_cpu_s,
        "new_cpu_s": new_cpu_s,
        "again_cpu_s": again_cpu_s,
    }


def bench() -> Section:
    rows = []
    for name in CASES:
        one = fresh("second_length", f"m.measure({name!r})")
        ratio, work = one["again_s"] / one["new_s"], one["again_cpu_s"] / one["new_cpu_s"]
        planned_ms = f"{1e3 * one['again_s']:.1f} ms a step, {1e3 * one['new_s']:.1f} from nothing: {ratio:.3f}"
        rows.append(Row(f"{name}: planned step", planned_ms, f"at most {SLOWER:g} times", ratio <= SLOWER))
        cpu = f"{one['again_cpu_s']:.1f} CPU s, {one['new_cpu_s']:.1f} from nothing: {work:.2f}"
        rows.append(Row(f"{name}: trace and plan", cpu, f"at most {PART_OF_WORK:g} times", work <= PART_OF_WORK))
    setting = f"8 x {LENGTHS[0]} tokens, then 8 x {LENGTHS[1]}; dp=2, tp=2 without a topology; torch {torch.__version__}"
    return Section("Another length of a batch", setting, rows)
