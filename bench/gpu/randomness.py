"""Slice 6: counter-based random numbers: the CPU's bits, and their time beside torch's own."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, ids, ours, side_by_side, steps
from bench.gpu.models import Opt
from bench.gpu.parts import Part, Setup, Slice, at_most
from colofunc.ops import random as counted

P = 0.1


def bits(setup: Setup) -> list[Row]:
    shape, rows = setup.sizes.numbers, []
    here, there = torch.tensor(5), torch.tensor(5).to("cuda")
    exact: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "bits": lambda seed: counted.random_bits(seed, 3, shape),
        "uniform": lambda seed: counted.random_uniform(seed, 3, shape, torch.float32),
        "Bernoulli": lambda seed: counted.random_bernoulli(seed, 3, shape, torch.float32, 0.9),
        "dropout": lambda seed: counted.dropout(torch.ones(shape).to(seed.device), seed, 3, P),
    }
    for name, draw in exact.items():
        apart = int((draw(there).cpu() != draw(here)).sum())
        rows.append(Row(f"{name}, numbers that differ from the CPU's", f"{apart} of {shape[0] * shape[1]:,}", "none", apart == 0))
    a, b = (counted.random_normal(seed, 3, shape, torch.float32).cpu() for seed in (there, here))
    ulp = float(((a - b).abs() / (torch.finfo(torch.float32).eps * b.abs()).clamp_min(torch.finfo(torch.float32).tiny)).max())
    return [*rows, at_most("normal, largest difference in units of the last place", ulp, 2.0, f"{ulp:.2f}")]


def speed(setup: Setup) -> list[Row]:
    shape, dtype = setup.sizes.numbers, setup.sizes.dtype
    seed, x = torch.tensor(5).to("cuda"), torch.ones(setup.sizes.numbers, dtype=dtype).to("cuda")
    both: dict[str, tuple[Run, Run]] = {
        "dropout": (lambda: counted.dropout(x, seed, 0, P), lambda: F.dropout(x, P)),
        "rand": (lambda: counted.random_uniform(seed, 0, shape, dtype), lambda: torch.rand(shape, dtype=dtype, device="cuda")),
        "randn": (lambda: counted.random_normal(seed, 0, shape, dtype), lambda: torch.randn(shape, dtype=dtype, device="cuda")),
        "Bernoulli": (lambda: counted.random_bernoulli(seed, 0, shape, dtype, 0.9), lambda: torch.empty_like(x).bernoulli_(0.9)),
    }
    rows, nbytes = [], x.nbytes
    for name, (mine, theirs) in both.items():
        taken = side_by_side({"ours": mine, "torch": theirs}, setup.sizes.repeats)
        ratio = taken["ours"] / taken["torch"]
        text = f"{ratio:.2f} (ours {1e6 * taken['ours']:.0f} microseconds, {nbytes / taken['ours'] / 1e9:,.0f} GB/s of results)"
        rows.append(at_most(f"{name}, ours / torch", ratio, 1.05, text))
    return rows


def step(setup: Setup) -> list[Row]:
    """What dropout costs a training step: its masks are made again in the backward."""
    of = setup.sizes.narrow if setup.sizes.workers == 0 else setup.sizes.clock[1]
    found = {}
    for p in (0.0, P):
        def make(p: float = p) -> Run:
            return ours(lambda: Opt(of.shape, setup.sizes.dtype, of.length, p), ids(of), lambda fn: cf.shard(fn, cf.Mesh(device="cuda")))

        found[p] = steps(make, setup.sizes.steps)
    ratio = found[P].seconds / found[0.0].seconds
    rows = [Row(f"a training step with dropout {p}", taken.words(of.tokens)) for p, taken in found.items()]
    return [*rows, at_most("a training step, with dropout / without", ratio, 1.1, f"{ratio:.3f}")]


SLICE = Slice(6, "Random numbers", (Part("bits", bits), Part("speed", speed), Part("a step", step)))
