"""What plans change with the clock: chosen by data sheets, and by what programs attain of them.

A step is planned twice, on the data sheet's figures of a machine and on the curves of its device (`colofunc/mesh/devices/`); then the
first plan is followed on the curves. What it takes there over what the second plan takes is what choosing by the sheet costs, as far as the
curves are right (`python -m bench published` says how far).

    python -m bench by_clock
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

import colofunc as cf
from bench import Row, Section, fresh
from colofunc.mesh.presets import DATASHEET


@attrs.frozen
class Case:
    """A model, its batch (rows, tokens), where it runs, and what its chain adds to `shard`."""

    model: Callable[[], torch.nn.Module]
    batch: tuple[int, int]
    axes: dict[str, int]
    topology: str
    chain: Callable[[Any], Any] = lambda step: step


def _llama(layers: int) -> LlamaForCausalLM:
    sizes = dict(hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=layers)
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128256, max_position_embeddings=8192, use_cache=False))


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def _opt_13b() -> OPTForCausalLM:
    sizes = dict(hidden_size=5120, ffn_dim=20480, num_hidden_layers=4, num_attention_heads=40, word_embed_proj_dim=5120)
    return OPTForCausalLM(OPTConfig(**sizes)).train(False)


CASES = {
    "LLaMA-3 8B, 4 of its layers, 16 x 8192 tokens, dp=2 tp=4": Case(lambda: _llama(4), (16, 8192), dict(dp=2, tp=4), "8xh100"),
    "the same, 64 x 8192 tokens, dp=8 tp=8": Case(lambda: _llama(4), (64, 8192), dict(dp=8, tp=8), "8xh100"),
    "the same, 64 x 512 tokens, dp=8 tp=8": Case(lambda: _llama(4), (64, 512), dict(dp=8, tp=8), "8xh100"),
    "the same, 64 x 8192 tokens, dp=64, bfloat16": Case(
        lambda: _llama(4), (64, 8192), dict(dp=64), "8xh100", lambda step: cf.precision(step, "bf16")
    ),
    "GPT-2, 8 x 1024 tokens, dp=2 tp=4": Case(_gpt2, (8, 1024), dict(dp=2, tp=4), "8xa100-80g"),
    "GPT-2, 16 x 128 tokens, dp=2 tp=8": Case(_gpt2, (16, 128), dict(dp=2, tp=8), "8xa100-80g"),
    "GPT-2, 16 x 128 tokens, dp=16, bfloat16": Case(
        _gpt2, (16, 128), dict(dp=16), "8xa100-80g", lambda step: cf.precision(step, "bf16")
    ),
    "OPT-13B, 4 of its layers, 16 x 1024 tokens, dp=2 tp=4, bfloat16": Case(
        _opt_13b, (16, 1024), dict(dp=2, tp=4), "8xa100-80g", lambda step: cf.precision(step, "bf16")
    ),
}  # fmt: skip


def measure(name: str) -> dict[str, Any]:
    """Seconds of a step: as the sheet says, of the sheet's plan by the curves, of the curves' plan."""
    case = CASES[name]
    with torch.device("meta"):
        model = cf.functional(case.model())
    opt = cf.adapt(torch.optim.AdamW, lr=1e-4)
    step_fn, state = cf.train_step(model, opt)
    ids = cf.abstract(case.batch, torch.int64)

    def staged(topology: str) -> Any:
        return case.chain(cf.shard(step_fn, cf.Mesh(**case.axes, topology=topology)))

    batch = {"input_ids": ids, "labels": ids}
    sheet, attained = case.topology + DATASHEET, case.topology
    by_sheet = staged(sheet).lower(state, batch).plan
    followed = staged(attained).with_plan(by_sheet).lower(state, batch).plan
    by_curves = staged(attained).lower(state, batch).plan
    return {
        "sheet_s": by_sheet.cost_s,
        "followed_s": followed.cost_s,
        "curves_s": by_curves.cost_s,
        "sheet_modes": str(by_sheet).partition(" on ")[0],
        "curves_modes": str(by_curves).partition(" on ")[0],
    }


def bench() -> Section:
    rows = []
    for name in CASES:
        found = fresh("by_clock", f"m.measure({name!r})")
        sheet_ms, followed_ms, curves_ms = (1e3 * found[key] for key in ("sheet_s", "followed_s", "curves_s"))
        same = found["sheet_modes"] == found["curves_modes"]
        modes = found["curves_modes"] if same else f"{found['curves_modes']}, by the sheet {found['sheet_modes']}"
        figure = f"{sheet_ms:.4g} ms by the sheet; its plan by the curves {followed_ms:.4g}, the curves' plan {curves_ms:.4g}: {modes}"
        ratio = followed_ms / curves_ms
        rows.append(Row(name, f"{figure}; {ratio:.3f} times", "at least 0.99", ratio >= 0.99))
    return Section("Plans by data sheets and by curves", f"seconds of a planned step, AdamW; torch {torch.__version__}", rows)
