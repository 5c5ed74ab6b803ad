"""Tracing and planning without weights: OPT-30B for 2 x 4 A100s, GPT-2 small, a mixture on four axes; each in a process of its own.

The mixture is small and its plan is not: ZeRO-3, tensor 1D, ring attention and experts, an axis each, on 16 ranks. LLaMA-3 8B is planned
with ZeRO-3, tensor 1D, ring attention and checkpoint for 1,024 ranks, four of its layers for 64 and for 512, and LLaMA-3 70B: neither the
sizes of axes nor the number of layers should matter much. The same without ring attention: four layers for 128 and for 256 ranks, and the
whole model with ZeRO-3 alone for 64. Their sequences are of 8,192 tokens, one for each rank of dp and cp.
A toy LLaMA of 12 layers is planned for four ranks with nothing that pins its plan: alone, and within 0.6 of what it takes then.
The step of the README is planned within its budget as there, with offload and checkpoint, and with offload alone.

Counted from the call of `step.lower` to its return: trace, simplify, plan, lower, check. Memory is the peak resident set
of the whole process, libraries included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import colofunc_plugins
import torch
from colofunc_plugins import experts, tensor, zero
from colofunc_plugins.sequence import ring
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)  # fmt: skip

import colofunc as cf
from bench import Row, Section, fresh, peak_rss_bytes

OF_8B = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8)
OF_70B = dict(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8)
LLAMAS = {
    "llama-3 8b on 1,024 ranks": (OF_8B, 32, dict(dp=16, cp=8, tp=8)),
    "4 of its layers on 64 ranks": (OF_8B, 4, dict(dp=4, cp=2, tp=8)),
    "4 of its layers on 512 ranks": (OF_8B, 4, dict(dp=16, cp=4, tp=8)),
    "llama-3 70b on 1,024 ranks": (OF_70B, 80, dict(dp=16, cp=8, tp=8)),
    "4 layers of 8b on dp=16, tp=8": (OF_8B, 4, dict(dp=16, tp=8)),
    "4 layers of 8b on dp=32, tp=8": (OF_8B, 4, dict(dp=32, tp=8)),
    "llama-3 8b on dp=64": (OF_8B, 32, dict(dp=64)),
}
"""Name -> sizes, layers, mesh."""
OF_AXES = {"dp": zero(3, "dp"), "tp": tensor("1d", "tp"), "cp": ring("cp")}
"""Axis of LLaMA's meshes -> the plan that it is for."""
TOYS: dict[str, Callable[[cf.Staged, int], cf.Staged]] = {
    "toy llama of 12 layers": lambda step, budget: step,
    "toy llama, offload": lambda step, budget: cf.offload(step, budget=budget),
    "toy llama, checkpoint": lambda step, budget: cf.checkpoint(step, budget=budget),
    "toy llama, both": lambda step, budget: cf.checkpoint(cf.offload(step), budget=budget),
}
OF_README: dict[str, Callable[[cf.Staged], cf.Staged]] = {
    "the README's step, offload": lambda step: step,
    "the README's step, offload and checkpoint": lambda step: cf.checkpoint(step),
}
"""Name -> what is done beside `cf.offload`."""
README_BUDGET = "2.5MiB"
TOY_PART = 0.6
"""Of the peak without a budget, what toys may take."""
LIMITS_S = {
    "opt-30b": 30.0, "gpt2": 5.0, "mixtral on 4 axes": 60.0, **dict.fromkeys(LLAMAS, 30.0), "llama-3 70b on 1,024 ranks": 60.0,
    **dict.fromkeys(TOYS), "toy llama, both": 5.0, **dict.fromkeys(OF_README, 1.0),
}  # fmt: skip
WITH_MEMORY_LIMIT = ("opt-30b", "llama-3 8b on 1,024 ranks", "llama-3 70b on 1,024 ranks")


def module_of(name: str) -> nn.Module:
    with torch.device("meta"):
        if name in LLAMAS:
            size, layers, _ = LLAMAS[name]
            more = dict(num_hidden_layers=layers, vocab_size=128256, max_position_embeddings=8192, use_cache=False)
            return LlamaForCausalLM(LlamaConfig(**size, **more))
        if name in TOYS:
            size = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=12, max_position_embeddings=64)
            return LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=4, use_cache=False))
        if name == "gpt2":
            return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        if name == "mixtral on 4 axes":
            size = dict(vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, max_position_embeddings=16)
            heads = dict(num_attention_heads=4, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2)
            return MixtralForCausalLM(MixtralConfig(**size, **heads, experts_implementation="grouped_mm"))
        width = 7168
        return OPTForCausalLM(
            OPTConfig(hidden_size=width, ffn_dim=4 * width, num_hidden_layers=48, num_attention_heads=56, word_embed_proj_dim=width)
        ).train(False)


def step_of_readme(name: str) -> tuple[cf.Staged, tuple[Any, Any]]:
    """(a staged step, its arguments): of the README's section about steps that do not fit."""
    model = cf.functional(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)))
    opt = cf.adapt(torch.optim.AdamW, lr=1e-3)

    def step_fn(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> torch.Tensor:
            out, _ = model.apply(params, model.buffers, batch["x"])
            return (out - batch["y"]).square().mean()

        loss, grads = cf.value_and_grad(loss_fn)(state["params"])
        grads, norm = cf.clip_by_global_norm(grads, 1.0)
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, {"loss": loss, "norm": norm}

    sharded = cf.shard(step_fn, cf.Mesh(dp=4), zero(3, "dp"))
    batch = {part: cf.abstract((512, 256)) for part in ("x", "y")}
    step = cf.offload(OF_README[name](sharded), budget=README_BUDGET)
    return step, ({"params": model.params, "opt": opt.init(model.params)}, batch)


def plan(name: str, budget_bytes: int = 0) -> dict[str, Any]:
    """budget_bytes: of a toy that has one."""
    if name in OF_README:
        step, arguments = step_of_readme(name)
    else:
        step, arguments = step_of(name, budget_bytes)
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        low = step.lower(*arguments)
    except cf.ColofuncError as error:
        return {"failed": str(error), "cpu_s": time.process_time() - cpu, "peak_bytes": peak_rss_bytes()}
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_bytes": peak_rss_bytes(),
        "nodes": len(low.program.nodes),
        "device_bytes": low.memory().peak_bytes["device"],
        "plan": str(low.plan),
    }


def step_of(name: str, budget_bytes: int) -> tuple[cf.Staged, tuple[Any, Any]]:
    """(a staged step, its arguments): of a transformer."""
    model, opt = cf.functional(module_of(name)), cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, _ = cf.train_step(model, opt)
    state = {"params": model.params, "buffers": model.buffers, "opt": opt.init(model.params)}
    if name in LLAMAS:
        *_, axes = LLAMAS[name]
        ids, mesh = cf.abstract((axes["dp"] * axes.get("cp", 1), 8192), torch.int64), cf.Mesh(**axes, topology="8xh100-80g")
        plans = [plan for axis, plan in OF_AXES.items() if axis in axes]
        step = cf.shard(step_fn, mesh, *plans, plugins=[colofunc_plugins])
        step = cf.checkpoint(step, budget="60GiB")
    elif name == "mixtral on 4 axes":
        ids, mesh = cf.abstract((16, 16), torch.int64), cf.Mesh(dp=2, tp=2, cp=2, ep=2, topology="16xa100-80g")
        step = cf.shard(step_fn, mesh, zero(3, "dp"), tensor("1d", "tp"), ring("cp"), experts("ep"), plugins=[colofunc_plugins])
    elif name in TOYS:
        ids = cf.abstract((8, 32), torch.int64)
        step = TOYS[name](cf.shard(step_fn, cf.Mesh(dp=2, tp=2, topology="8xa100-80g")), budget_bytes)
    else:
        ids = cf.abstract((8, 1024), torch.int64)
        step = cf.shard(step_fn, cf.Mesh(dp=2, tp=4, topology="8xa100-80g"))
    return step, (state, {"input_ids": ids, "labels": ids})


def bench() -> Section:
    found, budget_bytes = dict[str, Any](), 0
    for name in LIMITS_S:
        found[name] = fresh("planning", f"m.plan({name!r}, {budget_bytes if name in TOYS else 0})")
        if name == "toy llama of 12 layers":
            budget_bytes = int(TOY_PART * found[name]["device_bytes"])
    rows = []
    for name, limit in LIMITS_S.items():
        one, target = found[name], "" if limit is None else f"at most {limit:g} s"
        if "failed" in one:
            figure = f"no plan after {one['cpu_s']:.1f} CPU s: {one['failed']}"
            rows.append(Row(f"{name}: trace and plan", figure, target, False))
            continue
        figure = f"{one['cpu_s']:.1f} CPU s, {one['wall_s']:.1f} s by the clock, {one['nodes']:,} local operators"
        rows.append(Row(f"{name}: trace and plan", figure, target, None if limit is None else one["cpu_s"] <= limit))
        gib = one["peak_bytes"] / 2**30
        big = name in WITH_MEMORY_LIMIT
        rows.append(Row(f"{name}: peak memory", f"{gib:.2f} GiB", "at most 2 GB" if big else "", gib <= 1.86 if big else None))
        rows.append(Row(f"{name}: plan", one["plan"]))
    meshes = "; ".join(", ".join(f"{axis}={size}" for axis, size in axes.items()) for *_, axes in LLAMAS.values())
    setting = (
        "Training step (AdamW, 8 x 1024 tokens) for dp=2, tp=4 on 8xA100-80G; the mixture 16 x 16 tokens on dp=2, tp=2, cp=2, ep=2 of "
        f"16xA100-80G; LLaMA on {meshes} of 8xH100-80G; toys 8 x 32 tokens on dp=2, tp=2; "
        f"the README's step within {README_BUDGET} on dp=4; torch {torch.__version__}"
    )
    return Section("Trace and plan", setting, rows)
