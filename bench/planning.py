"""Tracing and planning without weights: OPT-30B for 2 x 4 A100s, GPT-2 small, each in a process of its own.

Counted from the call of `step.lower` to its return: trace, simplify, plan, lower, check. Memory is the peak resident set
of the whole process, libraries included.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

import colofunc as cf
from bench import Row, Section, fresh, peak_rss_bytes

MODELS = ("opt-30b", "gpt2")


def module_of(name: str) -> torch.nn.Module:
    with torch.device("meta"):
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        width = 7168
        return OPTForCausalLM(
            OPTConfig(hidden_size=width, ffn_dim=4 * width, num_hidden_layers=48, num_attention_heads=56, word_embed_proj_dim=width)
        ).train(False)


def plan(name: str) -> dict[str, Any]:
    model, opt = cf.functional(module_of(name)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    ids = cf.abstract((8, 1024), torch.int64)
    step = cf.shard(step_fn, cf.Mesh(dp=2, tp=4, topology="8xa100-80g"))
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        low = step.lower(state, {"input_ids": ids, "labels": ids})
    except cf.ColofuncError as error:
        return {"failed": str(error), "cpu_s": time.process_time() - cpu, "peak_bytes": peak_rss_bytes()}
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": peak_rss_bytes(),
        "nodes": len(low.program.nodes),
        "plan": str(low.plan),
    }


def bench() -> Section:
    found = {name: fresh("planning", f"m.plan({name!r})") for name in MODELS}
    rows = []
    for name, limit in zip(MODELS, (30.0, 5.0), strict=True):
        one = found[name]
        if "failed" in one:
            figure = f"no plan after {one['cpu_s']:.1f} CPU s: {one['failed']}"
            rows.append(Row(f"{name}: trace and plan", figure, f"at most {limit:g} s", False))
            continue
        figure = f"{one['cpu_s']:.1f} CPU s, {one['wall_s']:.1f} s by the clock, {one['nodes']:,} local operators"
        rows.append(Row(f"{name}: trace and plan", figure, f"at most {limit:g} s", one["cpu_s"] <= limit))
        gib = one["peak_bytes"] / 2**30
        big = name == "opt-30b"
        rows.append(Row(f"{name}: peak memory", f"{gib:.2f} GiB", "at most 2 GB" if big else "", gib <= 1.86 if big else None))
        rows.append(Row(f"{name}: plan", one["plan"]))
    setting = f"Training step (AdamW, 8 x 1024 tokens) for dp=2, tp=4 on 8xA100-80G, torch {torch.__version__}"
    return Section("Trace and plan", setting, rows)
