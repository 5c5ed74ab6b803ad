"""A step on a mesh of one beside eager PyTorch: GPT-2 small, 4 x 256 tokens, AdamW, no dropout, float32.

Eager is the unmodified model, `loss.backward()` and `torch.optim.AdamW(fused=True)`; ours is `cf.shard(step, cf.Mesh())`
with `cf.adapt(torch.optim.AdamW)`, whose update is the same fused kernel. Time: CPU seconds in alternating pairs. Memory:
the peak resident set of a warm step, above that of the process after its imports, each in a process of its own.
"""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, _steps, fresh, pairs, ratio, seconds
from bench._steps import Step, ours

SHAPE = (4, 256)
PAIRS = 4


def config() -> GPT2Config:
    return GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, config().vocab_size, SHAPE, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def eager(module: torch.nn.Module) -> Step:
    """A training step of the module as it is."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    data = batch()

    def step() -> float:
        optimizer.zero_grad()
        loss = module(**data).loss
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def on_one(module: torch.nn.Module) -> Step:
    """The same step through `cf.shard` on a mesh of one."""
    return ours(module, batch(), lambda step_fn: cf.shard(step_fn, cf.Mesh()))


def peak_bytes(which: str) -> int:
    """Of "eager" or "ours", in a process of its own."""
    make = eager if which == "eager" else on_one
    return _steps.peak_bytes(lambda: GPT2LMHeadModel(config()), make, own_copy=which != "eager")


def bench() -> Section:
    torch.manual_seed(0)
    a, b = GPT2LMHeadModel(config()), GPT2LMHeadModel(config())
    b.load_state_dict(a.state_dict())
    losses: tuple[list[float], list[float]] = ([], [])
    first, second = eager(a), on_one(b)
    times = pairs(lambda: losses[0].append(first()), lambda: losses[1].append(second()), count=PAIRS)
    middle, text = ratio(times, 1, 0)
    apart = max(abs(x - y) for x, y in zip(*losses, strict=True))
    peaks = {which: fresh("mesh_of_one", f"m.peak_bytes({which!r})") for which in ("eager", "ours")}
    share = peaks["ours"] / peaks["eager"]
    return Section(
        "A mesh of one beside eager PyTorch",
        f"GPT-2 small (random weights), {SHAPE[0]} x {SHAPE[1]} tokens, float32, AdamW fused in both, no dropout, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}",
        [
            Row("CPU seconds of a step, eager", seconds(times, 0)),
            Row("CPU seconds of a step, ours", seconds(times, 1)),
            Row("ours / eager, CPU seconds", text, "at most 1.00", middle <= 1.0),
            Row("peak resident bytes above imports, eager", f"{peaks['eager'] / 2**20:,.0f} MiB"),
            Row("peak resident bytes above imports, ours", f"{peaks['ours'] / 2**20:,.0f} MiB"),
            Row("ours / eager, peak", f"{share:.2f}", "at most 1.00", share <= 1.0),
            Row("largest difference of the losses", f"{apart:.1e} over {len(losses[0])} steps"),
        ],
    )
