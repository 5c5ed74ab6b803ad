"""A model that fits nowhere: OPT-175B's shapes, built lazily and planned for 64 A100s, in a process of its own.

Counted from before the constructor to what `step.lower` returns: build, optimizer state, trace, simplify, plan, lower,
check. Nothing is drawn and no value is made. Memory is the peak resident set of the whole process, libraries included.
"""

from __future__ import annotations

import os
import time
from typing import Any

import torch
from transformers import OPTConfig, OPTForCausalLM

import colofunc as cf
from bench import Row, Section, fresh, peak_rss_bytes

WIDTH, LAYERS, HEADS = 12288, 96, 96


def module() -> torch.nn.Module:
    config = OPTConfig(
        hidden_size=WIDTH, ffn_dim=4 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, word_embed_proj_dim=WIDTH, dropout=0.0
    )
    return OPTForCausalLM(config)


def plan() -> dict[str, Any]:
    before = peak_rss_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    model = cf.functional(cf.lazy(module))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))
    built_s, built_bytes = time.process_time() - cpu, peak_rss_bytes()
    ids = cf.abstract((8, 2048), torch.int64)
    step = cf.shard(step_fn, cf.Mesh(dp=8, tp=8, topology="64xa100-80g"))
    low = step.lower(state, {"input_ids": ids, "labels": ids})
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "built_s": built_s,
        "built_bytes": built_bytes - before,
        "peak_bytes": peak_rss_bytes(),
        "before_bytes": before,
        "parameters": sum(p.numel() for p in model.params.values()),
        "nodes": len(low.program.nodes),
        "plan": str(low.plan),
        "load": os.getloadavg()[0],
    }


def bench() -> Section:
    one = fresh("lazy", "m.plan()")
    gib = {k: one[k] / 2**30 for k in ("peak_bytes", "before_bytes", "built_bytes")}
    figure = f"{one['cpu_s']:.1f} CPU s, {one['wall_s']:.1f} s by the clock (load {one['load']:.1f}), {one['nodes']:,} local operators"
    peak = f"{gib['peak_bytes']:.2f} GiB, of which {gib['before_bytes']:.2f} GiB are imports"
    rows = [
        Row("cf.lazy and opt.init", f"{one['built_s']:.1f} CPU s, {gib['built_bytes'] * 1024:.0f} MiB"),
        Row("with trace, plan and lower", figure, "at most 60 s", one["cpu_s"] <= 60),
        Row("peak memory", peak, "at most 2 GB", one["peak_bytes"] <= 2e9),
        Row("plan", one["plan"]),
    ]
    setting = (
        f"OPT-175B's shapes ({one['parameters'] / 1e9:.1f}e9 parameters), AdamW, 8 x 2048 tokens, dp=8, tp=8 on 64 A100-80G, "
        f"torch {torch.__version__}"
    )
    return Section("A lazy model of 175 billion parameters", setting, rows)
