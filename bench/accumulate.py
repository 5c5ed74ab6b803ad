"""`cf.accumulate` beside gradient accumulation by hand: GPT-2 (6 layers, width 512), 8 x 256 tokens in 4 microbatches.

By hand is the unmodified model in eager PyTorch: four times `(loss / 4).backward()`, then `torch.optim.AdamW(fused=True)`.
Every row has its labels, so that the two compute the same. Time: CPU seconds in alternating pairs. Memory: the peak
resident set of a warm step, above that of the process after its imports, each in a process of its own.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, _steps, fresh, pairs, ratio, seconds
from bench._steps import Step, ours

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


def by_hand(module: torch.nn.Module) -> Step:
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


def accumulated(module: torch.nn.Module, microbatches: int) -> Step:
    return ours(module, batch(), lambda step_fn: cf.accumulate(step_fn, microbatches))


def peak_bytes(which: str) -> int:
    """Of "by hand", "ours" or "whole", which is ours without accumulate; in a process of its own."""
    if which == "by hand":
        return _steps.peak_bytes(lambda: GPT2LMHeadModel(config()), by_hand, own_copy=False)
    microbatches = MICROBATCHES if which == "ours" else 1
    return _steps.peak_bytes(lambda: GPT2LMHeadModel(config()), lambda module: accumulated(module, microbatches), own_copy=True)


def bench() -> Section:
    torch.manual_seed(0)
    a, b = GPT2LMHeadModel(config()), GPT2LMHeadModel(config())
    b.load_state_dict(a.state_dict())
    losses: tuple[list[float], list[float]] = ([], [])
    first, second = by_hand(a), accumulated(b, MICROBATCHES)
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
