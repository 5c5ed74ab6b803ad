"""`cf.precision(step, "bf16")` beside the same written by hand: GPT-2 (4 layers, width 512), 2 x 256 tokens, AdamW.

By hand: float32 masters, `torch.func.functional_call` with their bfloat16 casts, `loss.backward()`, fused
`torch.optim.AdamW` on the masters; no autocast. Ours is the unmodified step through `cf.precision` on a mesh of one. Both
keep the model's own float32 upcasts. Time: CPU seconds in alternating pairs.
"""

from __future__ import annotations

import os

import torch
from torch.func import functional_call
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, pairs, ratio, seconds
from bench._steps import Step, ours

SHAPE = (2, 256)
PAIRS = 8


def config() -> GPT2Config:
    return GPT2Config(n_layer=4, n_embd=512, n_head=8, vocab_size=16384, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, config().vocab_size, SHAPE, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def by_hand(module: torch.nn.Module) -> Step:
    masters = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-4, fused=True)
    data = batch()

    def step() -> float:
        optimizer.zero_grad()
        narrow = {n: p.to(torch.bfloat16) for n, p in masters.items()}
        loss = functional_call(module, narrow, (), data).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def bench() -> Section:
    torch.manual_seed(0)
    a, b = GPT2LMHeadModel(config()).train(), GPT2LMHeadModel(config()).train()
    b.load_state_dict(a.state_dict())
    losses: tuple[list[float], list[float]] = ([], [])
    first = by_hand(a)
    second = ours(b, batch(), lambda step_fn: cf.precision(step_fn, "bf16"))
    times = pairs(lambda: losses[0].append(first()), lambda: losses[1].append(second()), count=PAIRS)
    middle, text = ratio(times, 1, 0)
    apart = max(abs(x - y) for x, y in zip(*losses, strict=True))
    return Section(
        "Precision beside mixed precision by hand",
        f"GPT-2, 4 layers of width 512, {SHAPE[0]} x {SHAPE[1]} tokens, bf16 with float32 masters, AdamW fused in both, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
        [
            Row("CPU seconds of a step, by hand", seconds(times, 0)),
            Row("CPU seconds of a step, ours", seconds(times, 1)),
            Row("ours / by hand, CPU seconds", text, "at most 1.05", middle <= 1.05),
            Row("largest difference of the losses", f"{apart:.1e} over {len(losses[0])} steps"),
        ],
    )
