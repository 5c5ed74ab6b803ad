"""Eight simulated ranks in one process beside the same step on one device.

All ranks together compute what one device computes, so the price of simulating is what ranks repeat, what collectives
copy, and Python. Two models: one so small that Python counts, one bound by its matrix products. The single step is the
unmodified model in eager PyTorch with `torch.optim.AdamW(fused=True)`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, pairs, ratio, seconds

MESHES = ({"dp": 8}, {"dp": 2, "tp": 4})
VOCABULARY = 256


@attrs.frozen
class Size:
    name: str
    layers: int
    width: int
    shape: tuple[int, int]  # batch x tokens
    count: int
    limit: float


SMALL = Size("small", 4, 256, (8, 32), 7, 10.0)
LARGE = Size("bound by compute", 2, 1024, (4, 256), 3, 1.5)


def config(size: Size) -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCABULARY, n_positions=size.shape[1], n_embd=size.width, n_layer=size.layers, n_head=8,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip


def batch(size: Size) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, size.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def eager(size: Size) -> Callable[[], None]:
    torch.manual_seed(0)
    module = GPT2LMHeadModel(config(size))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    data = batch(size)

    def step() -> None:
        optimizer.zero_grad()
        module(**data).loss.backward()
        optimizer.step()

    return step


def ours(size: Size, axes: dict[str, int]) -> tuple[Callable[[], None], str]:
    """(a step on simulated ranks, what its plan is)."""
    torch.manual_seed(0)
    model, data = cf.functional(GPT2LMHeadModel(config(size))), batch(size)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))
    sharded = cf.shard(step_fn, cf.Mesh(**axes)) if axes else cf.shard(step_fn, cf.Mesh())
    held: dict[str, Any] = {"state": sharded.init(state, data)}
    words = str(sharded.lower(held["state"], data).plan).split(" on ")[0]

    def step() -> None:
        held["state"], _ = sharded(held["state"], data)

    return step, words


def measure(size: Size) -> list[Row]:
    one, _ = ours(size, {})
    eights = [ours(size, axes) for axes in MESHES]
    times = pairs(eager(size), one, *(step for step, _ in eights), count=size.count)
    what = f"{size.name}: {size.layers} layers, {size.width} wide, {size.shape[0]} x {size.shape[1]} tokens"
    rows = [Row(f"{what}; one eager step", seconds(times, 0)), Row(f"{size.name}: a mesh of one", ratio(times, 1, 0)[1])]
    for k, (axes, (_, words)) in enumerate(zip(MESHES, eights, strict=True)):
        middle, text = ratio(times, 2 + k, 0)
        mesh = ", ".join(f"{a}={n}" for a, n in axes.items())
        rows.append(Row(f"{size.name}: eight ranks, {mesh} ({words})", text, f"at most {size.limit:g}", middle <= size.limit))
    return rows


def bench() -> Section:
    return Section(
        "Eight simulated ranks beside one step",
        f"CPU seconds of a training step of GPT-2 (float32, AdamW) over those of one eager step, "
        f"{torch.get_num_threads()} thread(s), torch {torch.__version__}",
        [*measure(SMALL), *measure(LARGE)],
    )
