"""Seconds of pipelines: steps of two gloo processes beside torch's own schedules, planning of many stages, simulated stages.

    python -m bench pipeline_steps

Steps: an encoder of eight equal layers, MSE loss, fused AdamW, float32, one thread a rank. torch's stages hold the layers that ours do,
and run under `Schedule1F1B` and `ScheduleInterleaved1F1B`. Steps take turns in the same processes; a time is that of the slower rank, and
the middle of all pairs counts. CPU seconds are the sum of both ranks, the least of all rounds.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, fresh, pairs, peak_rss_bytes, ratio
from bench.calls import attention
from colofunc.executors.launch import launch

RANKS, PAIRS, WARM = 2, 20, 3
LAYERS, WIDTH, MICROBATCHES = 8, 256, 8
SHAPE = (16, 64, WIDTH)
CHUNKS = {"1f1b": 1, "interleaved-1f1b": 2}
"""Schedule -> stages of a rank."""
SIMULATED = 4


# ---- steps of two processes ----


def torchs(module: nn.TransformerEncoder, x: torch.Tensor, schedule: str) -> Callable[[], float]:
    """A step of torch's pipeline: stage k of n is the k-th part of the layers, stages go around over the ranks."""
    chunks = CHUNKS[schedule]
    stages = chunks * RANKS
    each = LAYERS // stages
    mine = range(dist.get_rank(), stages, RANKS)
    parts = [nn.Sequential(*module.layers[k * each : (k + 1) * each]) for k in mine]
    built = [PipelineStage(part, k, stages, torch.device("cpu")) for part, k in zip(parts, mine, strict=True)]
    loss_fn = nn.MSELoss()
    runner: Any = (
        Schedule1F1B(built[0], MICROBATCHES, loss_fn) if chunks == 1 else ScheduleInterleaved1F1B(built, MICROBATCHES, loss_fn)
    )
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4, fused=True)
    is_first, is_last = 0 in mine, stages - 1 in mine

    def step() -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (x,) if is_first else ()
        runner.step(*given, **({"target": x, "losses": losses} if is_last else {}), return_outputs=False)
        optimizer.step()
        return float(torch.stack(losses).detach().mean()) if is_last else 0.0

    return step


def ours(module: nn.Module, x: torch.Tensor, schedule: str) -> Callable[[], float]:
    model = cf.functional(module)
    step_fn, state = cf.train_step(
        model, cf.adapt(torch.optim.AdamW, lr=1e-4), loss=lambda out, x: nn.functional.mse_loss(out, x), inputs=lambda x: ((x,), {})
    )
    staged = cf.pipeline(cf.shard(step_fn, cf.Mesh(pp=RANKS)), microbatches=MICROBATCHES, schedule=schedule)
    held = [staged.init(state, x)]

    def step() -> float:
        held[0], metrics = staged(held[0], x)
        return float(metrics["loss"])

    return step


def rounds(schedule: str) -> dict[str, Any]:
    """Run on every rank: rounds of (ours, torch's) of one schedule, CPU seconds of both ranks, and the losses of the last rank."""
    torch.manual_seed(0)
    module, x = attention(WIDTH, LAYERS), torch.randn(SHAPE)
    steps = (ours(copy.deepcopy(module), x, schedule), torchs(copy.deepcopy(module), x, schedule))
    taken: list[list[float]] = []
    worked: list[list[float]] = []
    losses: list[list[float]] = []
    for n in range(WARM + PAIRS):
        seconds, cpu, loss = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
        for k in (n % 2, 1 - n % 2):
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            loss[k] = steps[k]()
            seconds[k], cpu[k] = time.perf_counter() - began, time.process_time() - began_cpu
        slowest, both, last = (torch.tensor(some, dtype=torch.float64) for some in (seconds, cpu, loss))
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(both)
        dist.broadcast(last, RANKS - 1)
        losses.append(last.tolist())
        if n >= WARM:
            taken.append(slowest.tolist())
            worked.append(both.tolist())
    return {"seconds": taken, "cpu": worked, "losses": losses}


def beside_torch(schedule: str) -> list[Row]:
    told = launch(rounds, RANKS, schedule, timeout_s=600.0)[0]
    middle = [statistics.median(column) * 1e3 for column in zip(*told["seconds"], strict=True)]
    cpu = [min(column) * 1e3 for column in zip(*told["cpu"], strict=True)]
    share = statistics.median(ours_s / torch_s for ours_s, torch_s in told["seconds"])
    apart = max(abs(a - b) / abs(b) for a, b in told["losses"])
    what = f"{schedule}, two processes, {MICROBATCHES} microbatches"
    return [
        Row(f"{what}: ours / torch's", f"{middle[0]:.1f} / {middle[1]:.1f} ms; CPU of both ranks {cpu[0]:.0f} / {cpu[1]:.0f} ms"),
        Row("ours / torch's", f"{share:.3f}", "at most 1.00", share <= 1.0),
        Row("largest relative difference of the losses", f"{apart:.1e} over {len(told['losses'])} steps", "1e-5", apart <= 1e-5),
    ]


# ---- planning ----


def plan_of_many(layers: int, stages: int, microbatches: int, schedule: str) -> dict[str, Any]:
    """CPU seconds of trace and plan, and the most memory of the process, for a language model that is 2048 wide."""
    config = GPT2Config(
        n_embd=2048, n_layer=layers, n_head=16, n_positions=1024, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False
    )
    model = cf.functional(cf.lazy(lambda: GPT2LMHeadModel(config)))
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=1e-4))
    ids = cf.abstract((microbatches, 1024), torch.int64)
    mesh = cf.Mesh(pp=stages, topology="64xa100-80g")
    step = cf.pipeline(cf.shard(step_fn, mesh), microbatches=microbatches, schedule=schedule)
    began = time.process_time()
    low = step.lower(state, {"input_ids": ids, "labels": ids})
    took_s = time.process_time() - began
    assert low.plan.pipeline is not None
    return {"cpu_s": took_s, "peak": peak_rss_bytes()}


def planned(schedule: str) -> Row:
    found = fresh("pipeline_steps", f"m.plan_of_many(96, 32, 64, {schedule!r})")
    figure = f"{found['cpu_s']:.1f} CPU s, {found['peak'] / 1e9:.2f} GB of the process"
    fits = found["cpu_s"] <= 20 and found["peak"] <= 1.5e9
    return Row(f"trace and plan 96 layers on 32 stages, 64 microbatches, {schedule}", figure, "at most 20 s and 1.5 GB", fits)


# ---- simulated ----


def simulated() -> list[Row]:
    """Four simulated stages beside the same step on one device, in microbatches and at once: CPU seconds of a step."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    ids = torch.randint(config.vocab_size, (4, 128))
    batch = {"input_ids": ids, "labels": ids}
    step_fn, state = cf.train_step(cf.functional(GPT2LMHeadModel(config)), cf.adapt(torch.optim.AdamW, lr=1e-4))
    whole = cf.shard(step_fn, cf.Mesh())
    one = cf.accumulate(whole, microbatches=4)
    four = cf.pipeline(cf.shard(step_fn, cf.Mesh(pp=SIMULATED)), microbatches=4, schedule="1f1b")
    steps = (whole, one, four)
    held: dict[int, Any] = {k: step.init(state, batch) for k, step in enumerate(steps)}

    def call(k: int) -> None:
        held[k] = steps[k](held[k], batch)[0]

    _, microbatches = ratio(pairs(lambda: call(0), lambda: call(1), count=6), 1, 0)
    stages, stages_text = ratio(pairs(lambda: call(1), lambda: call(2), count=6), 1, 0)
    both, both_text = ratio(pairs(lambda: call(0), lambda: call(2), count=6), 1, 0)
    what = f"{SIMULATED} simulated stages of GPT-2 small's widths, 4 layers, 4 microbatches"
    return [
        Row(f"{what} / the same on one device, CPU seconds of a step", stages_text, "at most 1.15", stages <= 1.15),
        Row("the same on one device in 4 microbatches / with the batch at once", microbatches),
        Row(f"{SIMULATED} stages / one device with the batch at once", both_text, "at most 1.15", both <= 1.15),
    ]


def bench() -> Section:
    rows = [row for schedule in CHUNKS for row in beside_torch(schedule)]
    rows += [planned("1f1b"), planned("zb-h1"), *simulated()]
    setting = f"encoder of {LAYERS} layers, {WIDTH} wide, {SHAPE[0]} x {SHAPE[1]} tokens; {PAIRS} pairs; torch {torch.__version__}"
    return Section("Seconds of pipelines", setting, rows)
