"""Offload and collectives together: planned seconds of a LLaMA-like training step under `zero(3)`, with part of its state on the host.

By the clock of the planner, on a topology with slow links, where there is much to hide: nothing runs here. A step is planned twice, as
the simulated mesh runs it, collective by collective, and as real ranks do, which start collectives early and wait for them late.
"""

from __future__ import annotations

from typing import Any

import torch
from colofunc_plugins import zero
from transformers import LlamaConfig, LlamaForCausalLM

import colofunc as cf
from bench import Row, Section

TOPOLOGY, RANKS, PARTS = "8xl4", 4, (0.7, 0.4)


def problem() -> tuple[Any, Any, Any]:
    """(step function, state, batch) of two layers of width 1024."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=2, max_position_embeddings=512, **sizes)
    model = cf.functional(LlamaForCausalLM(config))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-3), loss=lambda out: out.loss)
    return step_fn, state, dict.fromkeys(("input_ids", "labels"), cf.abstract((8, 512), torch.int64))


def bench() -> Section:
    step_fn, state, batch = problem()
    step = cf.shard(step_fn, cf.Mesh(dp=RANKS, topology=TOPOLOGY), zero(3, "dp"))
    whole = step.on("distributed").lower(state, batch)
    peak_bytes, rows = whole.memory().peak_bytes["device"], [Row("all on the device", f"{1e3 * whole.lanes().end_s:.2f} ms")]
    for part in PARTS:
        offloaded = cf.offload(step, budget=int(part * peak_bytes))
        in_order, overlapped = (offloaded.on(name).lower(state, batch).lanes().end_s for name in ("simulated", "distributed"))
        what = f"in {part:.0%} of its memory: collectives in order / overlapped"
        rows.append(Row(what, f"{1e3 * in_order:.2f} / {1e3 * overlapped:.2f} ms"))
        rows.append(Row("overlapped / in order", f"{overlapped / in_order:.3f}", "below 1", overlapped < in_order))
    return Section("Offload and collectives together", f"{RANKS} ranks of {TOPOLOGY}, planned seconds, torch {torch.__version__}", rows)
