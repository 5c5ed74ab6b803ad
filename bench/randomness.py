"""Counter-based random numbers beside torch's sequential ones: single operators, and a training step with dropout.

The step is `bench.mesh_of_one`'s with dropout of 0.1 everywhere: eager is the unmodified model under `F.dropout`, ours is
`cf.shard(step, cf.Mesh())`, whose masks are functions of (seed, call site, element) and are made again in the backward.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from bench import Row, Section, mesh_of_one, pairs, ratio, seconds
from colofunc.ops import native
from colofunc.ops import random as ours

SHAPE = (4, 256, 3072)
LAYERS = 4
P = 0.1


def config(p: float) -> GPT2Config:
    return GPT2Config(n_layer=LAYERS, resid_pdrop=p, embd_pdrop=p, attn_pdrop=p)


def trained(apply: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], Any]:
    """Forward and backward of one dropout."""

    def run() -> Any:
        y = apply(x)
        return torch.autograd.grad(y, x, y.detach())

    return run


def operators() -> list[Row]:
    seed, x = torch.tensor(5), torch.randn(SHAPE).requires_grad_()
    both = {
        "dropout, forward": (lambda: F.dropout(x.detach(), P), lambda: ours.dropout(x.detach(), seed, 0, P)),
        "dropout, forward and backward": (
            trained(lambda x: F.dropout(x, P), x),
            trained(lambda x: ours.dropout(x, seed, 0, P), x),
        ),
        "bernoulli_": (
            lambda: torch.empty(SHAPE).bernoulli_(0.9),
            lambda: ours.random_bernoulli(seed, 0, SHAPE, torch.float32, 0.9),
        ),
        "rand": (lambda: torch.rand(SHAPE), lambda: ours.random_uniform(seed, 0, SHAPE, torch.float32)),
        "randn": (lambda: torch.randn(SHAPE), lambda: ours.random_normal(seed, 0, SHAPE, torch.float32)),
    }
    rows = []
    for name, (theirs, mine) in both.items():
        times = pairs(theirs, mine, count=15, warm=2)
        middle, text = ratio(times, 1, 0)
        target = ("at most 1.05", middle <= 1.05) if name.startswith("dropout") else ("", None)
        rows.append(Row(f"{name} of {SHAPE} float32, ours / torch", text, *target))
    return rows


def bench() -> Section:
    os.environ["COLOFUNC_NATIVE"] = "require"  # what runs where there is a compiler
    native.ready("cpu")
    rows = operators()
    for p in (0.0, P):
        torch.manual_seed(0)
        a, b = GPT2LMHeadModel(config(p)), GPT2LMHeadModel(config(p))
        b.load_state_dict(a.state_dict())
        times = pairs(mesh_of_one.eager(a.train()), mesh_of_one.on_one(b.train()), count=4, warm=1)
        middle, text = ratio(times, 1, 0)
        what = f"a training step with dropout {p}"
        rows += [Row(f"{what}: CPU seconds eager, ours", f"{seconds(times, 0)}, {seconds(times, 1)}")]
        rows += [Row(f"{what}: ours / eager", text, *(("at most 1.05", middle <= 1.05) if p else ()))]
    return Section(
        "Random numbers",
        f"GPT-2 small's widths with {LAYERS} layers (random weights), {mesh_of_one.SHAPE[0]} x {mesh_of_one.SHAPE[1]} tokens, float32, "
        f"AdamW fused in both, {torch.get_num_threads()} thread(s), torch {torch.__version__}, "
        f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores",
        rows,
    )
