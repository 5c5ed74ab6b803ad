"""Slice 12: NCCL with one rank, which is what one card can try: the same step, state that is saved and loaded, and what a call costs."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import colofunc as cf
from bench import Row
from bench.gpu.measuring import host_seconds, ids, ours, steps, training
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, at_most
from colofunc.testing.trees import compare, plain_copy


@contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore(), device_id=torch.device("cuda", 0))
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_card(fn: object) -> object:
    return cf.shard(fn, cf.Mesh(device="cuda"))


def same(setup: Setup) -> list[Row]:
    of, batch = setup.sizes.narrow, ids(setup.sizes.narrow)
    step_fn, state = training(lambda: Llama(of.shape, torch.float32))

    def ran(folder: str) -> object:
        torch.manual_seed(0)
        step = on_card(step_fn)
        placed, _ = step(step.init(state, batch), batch)
        cf.save(Path(folder) / "state", placed)
        return plain_copy(cf.load(Path(folder) / "state", mesh=cf.Mesh(device="cuda")))

    with tempfile.TemporaryDirectory() as alone:
        want = ran(alone)
    with group(), tempfile.TemporaryDirectory() as joined:
        worst = compare(ran(joined), want)
    return [Row("a step, saved and loaded, with a process group against without", f"{worst:.1e}", "at most 1e-5", worst <= 1e-5)]


def speed(setup: Setup) -> list[Row]:
    of = setup.sizes.narrow

    def make() -> object:
        return ours(lambda: Llama(of.shape, setup.sizes.dtype), ids(of), on_card)

    alone = steps(make, setup.sizes.steps)
    with group():
        joined = steps(make, setup.sizes.steps)
        numbers = torch.zeros(1 << 20, device="cuda")
        call = host_seconds(lambda: dist.all_reduce(numbers), setup.sizes.repeats)
    ratio = joined.seconds / alone.seconds
    return [
        at_most("a step of short operators, with a process group / without", ratio, 1.05, f"{ratio:.3f} ({1e3 * joined.seconds:.3g} ms)"),
        Row("host time of an all-reduce of 4 MiB", f"{1e6 * call:.1f} microseconds"),
    ]


SLICE = Slice(12, "NCCL on one rank", (Part("the same", same, ("nccl",)), Part("speed", speed, ("nccl",))))
