"""Adapters over a model of 8B: frozen weights lie once, in the dtype that is computed in, however the model was loaded.

The same LoRA step (LLaMA of 8B, rank 8 on the attention's projections, AdamW, bf16, 2 x 1024 tokens) within 12 GB of one device, of a
model that was made in float32 under `cf.precision`, and of one in bfloat16. Traced without weights; peaks are the accountant's.
"""

from __future__ import annotations

from typing import Any

import torch

import colofunc as cf
from bench import Row, Section, fresh
from bench.memory_plans import gb, tokens
from colofunc.cli import machine
from colofunc.planner.plan_table import time_text

BUDGET, ROWS, LENGTH = "12GB", 2, 1024
LIKE = 1.02
"""So many times more memory or time is as good."""


def adapted(dtype: torch.dtype) -> tuple[Any, Any]:
    """A LoRA step of a model in that dtype, and its state without values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256,
        max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        module = LlamaForCausalLM(config).to(dtype)
        model = cf.lora(cf.functional(module), where="*.self_attn.*_proj", rank=8)
        return cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))


def plan(dtype: str) -> dict[str, Any]:
    step, state = adapted(getattr(torch, dtype))
    mesh = machine("rtx4090", "", "64GiB", "")(cf.Mesh())
    found = cf.precision(cf.offload(cf.checkpoint(cf.shard(step, mesh)), budget=BUDGET), "bf16")
    low = found.lower(state, tokens(ROWS, LENGTH))
    frozen = [low.program.values[id] for id in low.program.inputs if low.program.values[id].role == "frozen"]
    weights = [value for value in frozen if value.nbytes > 1 << 20]  # tables of positions stay as they are
    return {
        "peak_bytes": dict(low.memory().peak_bytes), "step_s": low.lanes().end_s,
        "frozen_bytes": sum(value.nbytes for value in frozen), "dtypes": sorted({str(value.dtype) for value in weights}),
    }  # fmt: skip


def said(found: dict[str, Any]) -> str:
    peak = found["peak_bytes"]
    lie = f"frozen weights {gb(found['frozen_bytes'])} as {', '.join(found['dtypes'])}"
    return f"{lie}; peak {gb(peak['device'])}, {gb(peak.get('host', 0))} on the host; step {time_text(found['step_s'])} as planned"


def bench() -> Section:
    wide, narrow = (fresh("adapters", f"m.plan({dtype!r})") for dtype in ("float32", "bfloat16"))
    ratios = [wide["step_s"] / narrow["step_s"], wide["peak_bytes"].get("host", 0) / max(1, narrow["peak_bytes"].get("host", 0))]
    rows = [
        Row("made in float32, under cf.precision", said(wide)),
        Row("made in bfloat16", said(narrow)),
        Row("the first against the second", f"{ratios[0]:.2f} of the time, {ratios[1]:.2f} of the host's memory", f"at most {LIKE} both",
            max(ratios) <= LIKE),
    ]  # fmt: skip
    setting = f"LLaMA of 8B, LoRA of rank 8, {ROWS} x {LENGTH} tokens within {BUDGET} of an rtx4090; torch {torch.__version__}."
    return Section("Adapters over 8B", setting, rows)
