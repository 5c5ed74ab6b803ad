"""Planning 12 layers with `cf.offload` and `cf.checkpoint` together: GPT-2 and LLaMA for four ranks, nothing else said.

Widths of 128 and 512, 8 x 256 tokens, data and tensor parallelism open on dp=2, tp=2 or data parallelism on dp=4, over gloo and on
A100s, within 0.6 and 0.35 of what the fastest sharding takes. The models of a mesh share a process, so what is known of a call is known
to those behind it. Counted from the call of `step.lower` to its return.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import colofunc as cf
from bench import Row, Section, fresh

LAYERS, HEADS, VOCABULARY = 12, 4, 512
ROWS, TOKENS = 8, 256
WIDTHS, PARTS = (128, 512), (0.6, 0.35)
MODELS = ("gpt2", "llama")
MESHES: dict[str, dict[str, int]] = {"dp=2, tp=2": dict(dp=2, tp=2), "dp=4": dict(dp=4)}
TOPOLOGIES = {"gloo": None, "A100s": "8xa100-80g"}
LIMIT_S = 5.0


def module_of(name: str, width: int) -> nn.Module:
    with torch.device("meta"):
        if name == "gpt2":
            size = dict(n_positions=TOKENS, n_embd=width, n_layer=LAYERS, n_head=HEADS)
            return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **size, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        size = dict(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=LAYERS, max_position_embeddings=TOKENS)
        heads = dict(num_attention_heads=HEADS, num_key_value_heads=HEADS)
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **size, **heads, use_cache=False))


def plan(name: str, width: int, part: float, mesh: cf.Mesh) -> dict[str, Any]:
    model, opt = cf.functional(module_of(name, width)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step, _ = cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    ids = cf.abstract((ROWS, TOKENS), torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    sharded = cf.shard(step, mesh)
    whole_bytes = sharded.lower(state, batch).memory().peak_bytes["device"]
    both = cf.offload(cf.checkpoint(sharded), budget=int(part * whole_bytes))
    began = time.process_time()
    low = both.lower(state, batch)
    return {"cpu_s": time.process_time() - began, "step_s": low.plan.cost_s, "nodes": len(low.program.nodes)}


def plans(axes: dict[str, int], topology: str | None) -> dict[str, Any]:
    mesh = cf.Mesh(**axes) if topology is None else cf.Mesh(**axes, topology=topology)
    return {
        f"{name} of width {width} within {part:g}": plan(name, width, part, mesh) for name in MODELS for width in WIDTHS for part in PARTS
    }


def bench() -> Section:
    rows = []
    for there, topology in TOPOLOGIES.items():
        for on, axes in MESHES.items():
            for what, one in fresh("twelve_layers", f"m.plans({axes!r}, {topology!r})").items():
                figure = f"{one['cpu_s']:.1f} CPU s; {one['step_s'] * 1e3:.4g} ms a step, {one['nodes']:,} local operators"
                rows.append(Row(f"{what}, {on} of {there}", figure, f"at most {LIMIT_S:g} s", one["cpu_s"] <= LIMIT_S))
    setting = f"Training step (AdamW), {ROWS} x {TOKENS} tokens, {LAYERS} layers, offload and checkpoint; torch {torch.__version__}"
    return Section("Twelve layers with both", setting, rows)
