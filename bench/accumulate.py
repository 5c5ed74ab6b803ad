"""`cf.accumulate` beside gradient accumulation by hand: GPT-2 (6 layers, width 512), 8 x 256 tokens in 4 microbatches.

By hand is the unmodified model in eager PyTorch: four times `(loss / 4).backward()`, then `torch.optim.AdamW(fused=True)`.
Every row has its labels, so that the two compute the same. Time: CPU seconds in alternating pairs. Memory: the peak
resident set of a warm step, above that of the process after its imports, each in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, forget_peak, fresh, pairs, peak_rss_bytes, ratio, rss_bytes, seconds

SHAPE = (8, 256)
MICROBATCHES = 4
PAIRS = 5


def config() -> GPT2Config:
    return GPT2Config(
        vocab_size=8192, n_positions=SHAPE[1], n_embd=512, n_layer=6, n_head=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 8192, SHAPE, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def by_hand(module: torch.nn.Module) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    parts = [{k: v[i::MICROBATCHES] for k, v in batch().items()} for i in range(MICROBATCHES)]

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for part in parts:
            loss = module(**part).loss / MICROBATCHES
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        return total

    return step


def ours(module: torch.nn.Module, microbatches: int) -> Callable[[], float]:
    data = batch()
    step_fn, state = cf.train_step(cf.functional(module), cf.adapt(torch.optim.AdamW, lr=1e-4))
    accumulated = cf.accumulate(step_fn, microbatches)
    held: dict[str, Any] = {"state": accumulated.init(state, data)}

    def step() -> float:
        held["state"], metrics = accumulated(held["state"], data)
        return float(metrics["loss"])

    return step


def peak_bytes(which: str) -> int:
    """Peak resident bytes of a warm step above those of the imports, in this (fresh) process."""
    before = rss_bytes()
    torch.manual_seed(0)
    module = GPT2LMHeadModel(config())
    if which == "by hand":
        step = by_hand(module)
    else:
        step = ours(module, MICROBATCHES if which == "ours" else 1)
        for p in module.parameters():  # the state has its own copy; the module by hand is the only one
            p.data = torch.empty(0)
    step()
    forget_peak()
    step()
    return peak_rss_bytes() - before


def bench() -> Section:
    torch.manual_seed(0)
    a, b = GPT2LMHeadModel(config()), GPT2LMHeadModel(config())
    b.load_state_dict(a.state_dict())
    losses: tuple[list[float], list[float]] = ([], [])
    first, second = by_hand(a), ours(b, MICROBATCHES)
    times = pairs(lambda: losses[0].append(first()), lambda: losses[1].append(second()), count=PAIRS)
    middle, text = ratio(times, 1, 0)
    apart = max(abs(x - y) for x, y in zip(*losses, strict=True))
    peaks = {which: fresh("accumulate", f"m.peak_bytes({which!r})") for which in ("by hand", "ours", "whole")}
    share = peaks["ours"] / peaks["by hand"]
    return Section(
        "Accumulation beside a loop by hand",
        f"GPT-2 of 6 layers and width 512 (random weights), {SHAPE[0]} x {SHAPE[1]} tokens in {MICROBATCHES} microbatches, float32, "
        f"AdamW fused in both, mesh of one, {torch.get_num_threads()} thread(s), torch {torch.__version__}",
        [
            Row("CPU seconds of a step, by hand", seconds(times, 0)),
            Row("CPU seconds of a step, ours", seconds(times, 1)),
            Row("ours / by hand, CPU seconds", text, "at most 1.05", middle <= 1.05),
            Row("peak resident bytes above imports, by hand", f"{peaks['by hand'] / 2**20:,.0f} MiB"),
            Row("peak resident bytes above imports, ours", f"{peaks['ours'] / 2**20:,.0f} MiB"),
            Row("peak resident bytes above imports, ours without accumulate", f"{peaks['whole'] / 2**20:,.0f} MiB"),
            Row("ours / by hand, peak", f"{share:.2f}", "at most 1.05", share <= 1.05),
            Row("largest difference of the losses", f"{apart:.1e} over {len(losses[0])} steps"),
        ],
    )
