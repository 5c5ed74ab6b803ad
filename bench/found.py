"""Two gloo processes: what is found for small models, beside zero(1) and torch's DDP, by the clock.

    python -m bench found

Ten small models, one training step each with fused AdamW, float32, one thread a rank. The mesh names no topology, so the plan is found
for the machine as it was measured. The three steps take turns in the same processes; a time is that of the slower rank, and the middle
of all rounds counts. Found should be no slower than what a user would have named: by more than the spread of the rounds it is missed.
Where other programs run on the same processors, most of a time is waiting for a turn; CPU seconds (the mean of both ranks, the least of
all rounds) say what a step costs by itself.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import attrs
import torch
import torch.distributed as dist
from colofunc_plugins import zero
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import colofunc as cf
from bench import Row, Section
from bench.calls import attention, convolutions, perceptron
from colofunc.executors.launch import launch

RANKS, ROUNDS, WARM = 2, 21, 3
SLOWER = 1.05
"""The clock's error: a found plan that takes so many times as long as the named one still counts as equal."""

Shape = tuple[int, ...]
MODELS: dict[str, tuple[Callable[[], nn.Module], Shape]] = {
    "perceptron 2 x 64, 32 rows": (lambda: perceptron(64, 2), (32, 64)),
    "perceptron 4 x 256, 32 rows": (lambda: perceptron(256, 4), (32, 256)),
    "perceptron 4 x 256, 512 rows": (lambda: perceptron(256, 4), (512, 256)),
    "perceptron 8 x 128, 64 rows": (lambda: perceptron(128, 8), (64, 128)),
    "perceptron 2 x 1024, 64 rows": (lambda: perceptron(1024, 2), (64, 1024)),
    "convolutions 3 of 8 channels, 8 images": (lambda: convolutions(8, 3), (8, 3, 16, 16)),
    "convolutions 6 of 16 channels, 16 images": (lambda: convolutions(16, 6), (16, 3, 32, 32)),
    "transformer 1 x 64, 4 x 32 tokens": (lambda: attention(64, 1), (4, 32, 64)),
    "transformer 2 x 128, 8 x 64 tokens": (lambda: attention(128, 2), (8, 64, 128)),
    "transformer 4 x 128, 4 x 64 tokens": (lambda: attention(128, 4), (4, 64, 128)),
}
NAMES = ("found", "zero(1)", "DDP")


def ddp(module: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    """A step as its tutorial writes it, on this rank's rows."""
    wrapped = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    mine = x.chunk(RANKS)[dist.get_rank()]

    def step() -> float:
        optimizer.zero_grad()
        loss = wrapped(mine).square().mean()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def ours(module: nn.Module, x: torch.Tensor, *plans: Any) -> tuple[Callable[[], float], Any]:
    """(a step, what it was lowered to)."""
    model = cf.functional(module)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda out: out.square().mean())
    staged = cf.shard(step_fn, cf.Mesh(dp=RANKS), *plans)
    low = staged.lower(state, x)
    held = [staged.init(state, x)]

    def step() -> float:
        held[0], metrics = staged(held[0], x)
        return float(metrics["loss"])

    return step, low


def measure(which: str) -> dict[str, Any]:
    """Run on every rank: the rounds of one model."""
    make, shape = MODELS[which]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    found, low = ours(copy.deepcopy(module), x)
    named, _ = ours(copy.deepcopy(module), x, zero(1, "dp"))
    steps = (found, named, ddp(copy.deepcopy(module), x))
    rounds: list[list[float]] = []
    cpu: list[list[float]] = []
    for n in range(WARM + ROUNDS):
        taken, worked = [0.0] * len(steps), [0.0] * len(steps)
        for k in ((n + j) % len(steps) for j in range(len(steps))):
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            steps[k]()
            taken[k], worked[k] = time.perf_counter() - began, time.process_time() - began_cpu
        slowest, mean = torch.tensor(taken, dtype=torch.float64), torch.tensor(worked, dtype=torch.float64) / RANKS
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
        if n >= WARM:
            rounds.append(slowest.tolist())
            cpu.append(mean.tolist())
    return {"rounds": rounds, "cpu": cpu, "plan": str(low.plan), "calls": sum(low.cost().calls.values())}


@attrs.frozen
class Result:
    """Of one model: middle seconds of the three steps, their least CPU seconds, the middle of found / zero(1) and / DDP, the plan."""

    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    ratio: float
    to_ddp: float
    plan: str
    calls: int


def result(which: str) -> Result:
    told = launch(measure, RANKS, which, timeout_s=600.0)[0]
    rounds = told["rounds"]
    columns = list(zip(*rounds, strict=True))
    seconds = tuple(statistics.median(column) for column in columns)
    cpu_s = tuple(min(column) for column in zip(*told["cpu"], strict=True))
    to_named, to_ddp = (statistics.median(row[0] / row[k] for row in rounds) for k in (1, 2))
    return Result(seconds, cpu_s, to_named, to_ddp, told["plan"], told["calls"])


def bench() -> Section:
    rows = []
    for which in MODELS:
        one = result(which)
        times, cpu = (" / ".join(f"{s * 1e3:.1f}" for s in some) for some in (one.seconds, one.cpu_s))
        rows.append(Row(f"{which}: {' / '.join(NAMES)}", f"{times} ms; CPU {cpu} ms"))
        rows.append(Row("found / zero(1)", f"{one.ratio:.2f}", f"at most {SLOWER:.2f}", one.ratio <= SLOWER))
        rows.append(Row("found / DDP", f"{one.to_ddp:.2f}; CPU {one.cpu_s[0] / one.cpu_s[2]:.2f}"))
        rows.append(Row("the plan", f"{one.plan}, {one.calls} collectives"))
    return Section(
        "What is found for small models on two gloo ranks, by the clock",
        f"AdamW fused in all, float32, one thread a rank, torch {torch.__version__}, middle of {ROUNDS} rounds in turns, "
        f"load average {os.getloadavg()[0]:.0f} on {os.cpu_count()} processors",
        rows,
    )
