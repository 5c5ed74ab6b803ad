"""Two gloo processes on loopback: a training step of GPT-2 beside torch's FSDP2, alternating in the same processes.

    python -m bench.fsdp2 [--pairs 20] [--batch 4] [--length 256]        # and `python -m bench fsdp2`
    python -m bench.fsdp2 --zero3                                       # and `python -m bench zero3`

One model (about 30M parameters), one optimizer (fused AdamW), float32, one thread per rank. FSDP2 wraps every block and
the root, once with `reshard_after_forward=True` and once with False; each round runs our step and both of these in
rotating order, and every time is that of the slower rank. Both sides report the global mean loss. Our plan is the
automatic one for the topology measured on the spot, so it is printed with the figures. With `--zero3` it is ZeRO-3 that gathers
again for backward, with and without chunks, beside FSDP2 that reshards: the same layout of states on both sides.

Bytes are what one rank receives in a step (ring algorithms). FSDP2's follow from what it does: every parameter is
gathered once (blocks twice where they are resharded after forward), every gradient reduce-scattered once, the loss reduced.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from colofunc_plugins import zero
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section
from colofunc.executors.launch import launch
from colofunc.mesh import wire_bytes
from colofunc.mesh.profile import profile_mesh

RANKS, LR, WEIGHT_DECAY = 2, 1e-4, 0.01


@attrs.frozen
class Size:
    """A model and a batch; `batch` and `length` are per rank."""

    layers: int = 6
    width: int = 512
    vocabulary: int = 16384
    batch: int = 4
    length: int = 256

    def model(self) -> GPT2LMHeadModel:
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=self.vocabulary, n_positions=self.length, n_embd=self.width, n_layer=self.layers, n_head=8,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        return GPT2LMHeadModel(config)

    def ids(self, n: int) -> torch.Tensor:
        """The global batch of step `n`: (ranks * batch, length)."""
        rows = torch.Generator().manual_seed(n)
        return torch.randint(0, self.vocabulary, (RANKS * self.batch, self.length), generator=rows)


Step = Callable[[torch.Tensor], float]


def fsdp2(module: GPT2LMHeadModel, reshard: bool) -> Step:
    """One training step of FSDP2, as its tutorial writes it, with the global mean loss."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in module.transformer.h:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)  # its parameters are needed again at once
    opt = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    rank = dist.get_rank()

    def step(ids: torch.Tensor) -> float:
        mine = ids.chunk(RANKS)[rank]
        loss = module(input_ids=mine, labels=mine).loss
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return float(mean) / RANKS

    return step


def fsdp2_bytes(module: torch.nn.Module, blocks: Sequence[torch.nn.Module], reshard: bool) -> int:
    """What one rank receives in a step of `fsdp2`; dim 0 of every parameter is padded to the ranks."""

    def padded(parts: Sequence[torch.nn.Module]) -> int:
        params = {id(p): p for part in parts for p in part.parameters()}
        return sum(math.ceil(p.shape[0] / RANKS) * RANKS * math.prod(p.shape[1:]) * p.itemsize for p in params.values())

    everything, again = padded([module]), padded(blocks) if reshard else 0
    gathered = wire_bytes("all_gather", everything, RANKS) + wire_bytes("all_gather", again, RANKS)
    return gathered + wire_bytes("reduce_scatter", everything, RANKS) + wire_bytes("all_reduce", 4, RANKS)


ZERO3 = (zero(3, "dp", chunk="auto", regather=True), zero(3, "dp", regather=True))


def ours(module: GPT2LMHeadModel, size: Size, topology: Any, *plans: Any) -> tuple[Step, Any]:
    """(the sharded training step, what it was lowered to)."""
    model = cf.functional(module)
    step_fn, state = cf.train_step(model, cf.adapt(torch.optim.AdamW, lr=LR, weight_decay=WEIGHT_DECAY))
    step = cf.shard(step_fn, cf.Mesh(dp=RANKS, topology=topology), *plans)

    def batch(ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input_ids": ids, "labels": ids}

    low = step.lower(state, batch(size.ids(0)))
    held = [step.init(state, batch(size.ids(0)))]

    def run(ids: torch.Tensor) -> float:
        held[0], metrics = step(held[0], batch(ids))
        return float(metrics["loss"])

    return run, low


@attrs.frozen
class Report:
    """What was measured, per round: ours, FSDP2 resharding, FSDP2 keeping; with `zero3` ours with and without chunks, FSDP2 resharding."""

    seconds: tuple[tuple[float, float, float], ...]  # wall clock of the slower rank
    cpu_s: tuple[tuple[float, float, float], ...]  # both processes, all threads
    losses: tuple[tuple[float, float, float], ...]
    plan: str
    cost: str
    calls: int  # collectives of a step, ours
    our_bytes: int
    their_bytes: tuple[int, int]
    parameters: int


def measure(size: Size, pairs: int, topology: str | None, zero3: bool) -> dict[str, Any]:
    """Run on every rank: `pairs` rounds of the three steps in rotating order; the fields of a `Report`."""
    module = size.model()
    blocks = list(module.transformer.h)
    their_bytes = (fsdp2_bytes(module, blocks, True), fsdp2_bytes(module, blocks, False))
    parameters = sum(p.numel() for p in module.parameters())
    mesh = cf.Mesh(dp=RANKS)
    topology = topology or profile_mesh(mesh, seconds=4.0)
    first, low = ours(copy.deepcopy(module), size, topology, *ZERO3[: int(zero3)])
    keeping = ours(copy.deepcopy(module), size, topology, ZERO3[1])[0] if zero3 else fsdp2(copy.deepcopy(module), False)
    resharding = fsdp2(copy.deepcopy(module), True)
    steps = (first, keeping, resharding) if zero3 else (first, resharding, keeping)
    seconds, cpu_s, losses = [], [], []
    for n in range(-2, pairs):  # two rounds to warm up
        ids = size.ids(n + 2)
        taken, worked, found = [0.0] * 3, [0.0] * 3, [0.0] * 3
        for k in ((n + j) % 3 for j in range(3)):
            dist.barrier()
            began, work = time.perf_counter(), time.process_time()
            found[k] = steps[k](ids)
            taken[k], worked[k] = time.perf_counter() - began, time.process_time() - work
        slowest, both = torch.tensor(taken, dtype=torch.float64), torch.tensor(worked, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(both)
        if n >= 0:
            seconds.append(tuple(slowest.tolist()))
            cpu_s.append(tuple(both.tolist()))
        losses.append(tuple(found))
    cost = low.cost()
    return {
        "seconds": tuple(seconds), "cpu_s": tuple(cpu_s), "losses": tuple(losses), "plan": str(low.plan), "cost": str(cost),
        "calls": sum(cost.calls.values()), "our_bytes": cost.wire_bytes, "their_bytes": their_bytes, "parameters": parameters,
    }  # fmt: skip


def run(size: Size, pairs: int, topology: str | None, zero3: bool = False) -> Report:
    """`measure` on two processes; raises where the two sides do not compute the same losses."""
    report = Report(**launch(measure, RANKS, size, pairs, topology, zero3, timeout_s=3600.0)[0])
    worst = max(max(abs(a - b), abs(a - c)) / abs(b) for a, b, c in report.losses)
    if worst > 1e-4:  # float32, three orders of summation, and steps that follow one another
        raise AssertionError(f"the losses differ by {worst:.1e}: {report.losses}")
    return report


def spread(found: list[float]) -> str:
    """Median and middle half of sorted ratios."""
    quarter = len(found) // 4
    return f"{statistics.median(found):.2f} (middle half {found[quarter]:.2f} to {found[-1 - quarter]:.2f}, {len(found)} pairs)"


def zero3_rows(report: Report, size: Size) -> list[Row]:
    """The table of ZeRO-3 beside FSDP2 that reshards."""
    tokens, names = RANKS * size.batch * size.length, ("ours in chunks", "ours without chunks", "FSDP2, reshard_after_forward=True")
    out = [Row("our plan", report.plan)]
    for name, column in zip(names, zip(*report.seconds, strict=True), strict=True):
        middle = statistics.median(column)
        out.append(Row(name, f"{middle:.3f} s a step, {tokens / middle:,.0f} tokens/s"))
    for k, name in enumerate(names[:2]):
        ratios = sorted(s[2] / s[k] for s in report.seconds)
        out.append(Row(f"tokens/s, {name} / FSDP2", spread(ratios), "at least 1.0", statistics.median(ratios) >= 1.0))
    work = sorted(c[2] / c[0] for c in report.cpu_s)
    theirs = report.their_bytes[0]
    return [
        *out,
        Row("CPU seconds of both ranks, FSDP2 / ours in chunks", spread(work)),
        Row("bytes a rank receives per step, ours in chunks", f"{report.our_bytes:,}"),
        Row("bytes, FSDP2, which keeps its root (the tied table) gathered for backward", f"{theirs:,}"),
        Row("collectives of a step, ours in chunks", f"{report.calls}"),
        Row("largest difference of losses", f"{max(max(abs(a - c), abs(b - c)) for a, b, c in report.losses):.1e}"),
    ]


def rows(report: Report, size: Size) -> list[Row]:
    """The table."""
    mine, resharding, keeping = (statistics.median(column) for column in zip(*report.seconds, strict=True))
    better = 1 if resharding < keeping else 2
    ratios = sorted(s[better] / s[0] for s in report.seconds)
    work = sorted(c[better] / c[0] for c in report.cpu_s)
    tokens, middle = RANKS * size.batch * size.length, statistics.median(ratios)
    fewest = min(report.their_bytes)
    return [
        Row("our plan", report.plan),
        Row("ours", f"{mine:.3f} s a step, {tokens / mine:,.0f} tokens/s"),
        Row("FSDP2, reshard_after_forward=True", f"{resharding:.3f} s a step, {tokens / resharding:,.0f} tokens/s"),
        Row("FSDP2, reshard_after_forward=False", f"{keeping:.3f} s a step, {tokens / keeping:,.0f} tokens/s"),
        Row("tokens/s, ours / better FSDP2", spread(ratios), "at least 1.0", middle >= 1.0),
        Row("CPU seconds of both ranks, better FSDP2 / ours", spread(work)),
        Row("bytes a rank receives per step, ours", f"{report.our_bytes:,}", f"at most {fewest:,}", report.our_bytes <= fewest),
        Row("bytes, FSDP2", f"{report.their_bytes[1]:,} ({report.their_bytes[0]:,} resharding)"),
        Row("largest difference of losses", f"{max(max(abs(a - b), abs(a - c)) for a, b, c in report.losses):.1e}"),
    ]


def bench(size: Size | None = None, pairs: int = 20, topology: str | None = None, zero3: bool = False) -> Section:
    """All figures for one size, by default the issue's."""
    size = size or Size()
    report = run(size, pairs, topology, zero3)
    model = f"GPT-2, {report.parameters / 1e6:.1f}M parameters, {size.batch} x {size.length} tokens per rank, fused AdamW"
    setting = f"{model}, float32, one thread per rank, torch {torch.__version__}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    if zero3:
        return Section("ZeRO-3 on two gloo processes beside FSDP2", setting, zero3_rows(report, size))
    return Section("Two gloo processes beside FSDP2", setting, rows(report, size))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--topology", default=None, help="a name or file; by default measured on the spot")
    parser.add_argument("--zero3", action="store_true", help="ZeRO-3, with and without chunks, beside FSDP2 that reshards")
    args = parser.parse_args()
    section = bench(Size(args.layers, args.width, args.vocabulary, args.batch, args.length), args.pairs, args.topology, args.zero3)
    print(section.setting)
    for row in section.rows:
        print(f"{row.what:<48} {row.figure:<60} {row.target}")


if __name__ == "__main__":
    main()
