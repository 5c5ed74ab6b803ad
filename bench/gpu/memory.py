"""Slice 7: the most that torch allocates in a step against what the plan counts, with and without a budget."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import colofunc as cf
from bench import Row
from bench.gpu.measuring import clear, ids, staged_run, training
from bench.gpu.models import Llama, Opt
from bench.gpu.parts import Part, Setup, Slice, at_most

NEAR = 0.03


def llama(setup: Setup) -> torch.nn.Module:
    return Llama(setup.sizes.memory.shape, setup.sizes.dtype)


def opt(setup: Setup) -> torch.nn.Module:
    return Opt(setup.sizes.memory.shape, setup.sizes.dtype, setup.sizes.memory.length, 0.1)


def on_card(fn: Any) -> Any:
    return cf.shard(fn, cf.Mesh(device="cuda"))


def counted(setup: Setup, make: Callable[[Setup], torch.nn.Module], share: float, transforms: Callable[..., Any]) -> list[Row]:
    """Rows of one model; share: the budget, as a part of what the step takes without one (0: none)."""
    before, batch = clear(), ids(setup.sizes.memory)
    step_fn, state = training(partial(make, setup))
    staged, budget = on_card(step_fn), 0
    if share:
        budget = int(share * staged.lower(state, batch).memory().peak_bytes["device"])
        staged = transforms(on_card(step_fn), budget=budget)
    planned = staged.lower(state, batch).memory().peak_bytes["device"]
    step = staged_run(staged, state, batch)
    del state
    for _ in range(2):
        step()
    clear()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    found = torch.cuda.max_memory_allocated() - before
    off = found / planned - 1
    text = f"{found / 1e9:.3f} GB of {planned / 1e9:.3f} GB planned ({off:+.2%})"
    rows = [Row("max_memory_allocated against the plan", text, f"within {NEAR:.0%}", abs(off) <= NEAR)]
    if budget:
        rows.append(at_most("max_memory_allocated / budget", found / budget, 1 + NEAR, f"{found / budget:.3f} of {budget / 1e9:.3f} GB"))
    return rows


SLICE = Slice(7, "Peak memory against what the plan counts", (
    Part("LLaMA", partial(counted, make=llama, share=0.0, transforms=cf.offload)),
    Part("OPT with dropout", partial(counted, make=opt, share=0.0, transforms=cf.offload)),
    Part("LLaMA, recomputed, 90 %", partial(counted, make=llama, share=0.9, transforms=cf.checkpoint)),
    Part("LLaMA, offloaded, 60 %", partial(counted, make=llama, share=0.6, transforms=cf.offload)),
    Part("OPT with dropout, offloaded, 60 %", partial(counted, make=opt, share=0.6, transforms=cf.offload)),
))  # fmt: skip
