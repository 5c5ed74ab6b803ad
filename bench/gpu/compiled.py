"""Slice 11: compiled steps: seconds until the first has run, segments, time of a step, and how that grows with layers.

Inductor keeps what it has compiled on disk, for all processes of a user. Seconds are measured with that empty: else the second model would
find the first one's functions there, and the first those of slice 4.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import attrs
import torch

import colofunc as cf
from bench import Row
from bench.gpu.measuring import clear, ids, staged_run, steps, training
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, at_most
from bench.gpu.sizes import Training
from colofunc.executors.compiled import compile_segments


def first_s(of: Training, setup: Setup, executor: str) -> float:
    """Seconds from a planned step to the end of its first run."""
    clear()
    batch = ids(of)
    step_fn, state = training(lambda: Llama(of.shape, setup.sizes.dtype))
    staged = cf.shard(step_fn, cf.Mesh(device="cuda"))
    staged = staged.on(executor) if executor else staged
    run = staged_run(staged, state, batch)  # traced and planned here
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def nothing_kept() -> AbstractContextManager[None]:
    """Within it inductor finds nothing that was compiled before, in this process or on disk."""
    from torch._inductor.utils import fresh_cache

    fresh: AbstractContextManager[None] = fresh_cache()
    return fresh


def growth(few: Callable[[], float], many: Callable[[], float]) -> tuple[float, float]:
    """What each of two gives, with nothing kept. The first run of all starts the compiler, and counts for neither."""
    with nothing_kept():
        few()
    with nothing_kept():
        first = few()
    with nothing_kept():
        return first, many()


def segments(setup: Setup) -> list[Row]:
    of = setup.sizes.compiled
    step_fn, state = training(lambda: Llama(of.shape, setup.sizes.dtype))
    low = cf.shard(step_fn, cf.Mesh(device="cuda")).lower(state, ids(of))
    program, bound = compile_segments(low.program)
    run = sum(node.target in bound for node in program.nodes)
    return [Row("segments of a step", f"{run} calls of {len(bound)} functions, of {len(low.program.nodes)} operators")]


def seconds(setup: Setup) -> list[Row]:
    of = setup.sizes.compiled
    one = attrs.evolve(of, shape=attrs.evolve(of.shape, layers=1))
    few, many = growth(lambda: first_s(one, setup, "compiled"), lambda: first_s(of, setup, "compiled"))
    rows = [Row(f"until the first step has run, {shape} layers", f"{taken:.1f} s") for shape, taken in ((1, few), (of.shape.layers, many))]
    return [*rows, at_most(f"{of.shape.layers} layers / 1 layer", many / few, 1.5, f"{many / few:.2f}")]


def step(setup: Setup) -> list[Row]:
    of, found = setup.sizes.compiled, {}
    for executor in ("", "compiled"):
        def make(executor: str = executor) -> object:
            step_fn, state = training(lambda: Llama(of.shape, setup.sizes.dtype))
            staged = cf.shard(step_fn, cf.Mesh(device="cuda"))
            return staged_run(staged.on(executor) if executor else staged, state, ids(of))

        found[executor or "operators"] = steps(make, setup.sizes.steps)
    ratio = found["compiled"].seconds / found["operators"].seconds
    rows = [Row(name, taken.words(of.tokens)) for name, taken in found.items()]
    return [*rows, at_most("a step, compiled / operators", ratio, 1.0, f"{ratio:.3f}")]


SLICE = Slice(11, "Compiled steps, the LLaMA of slice 4", (
    Part("segments", segments), Part("first call", seconds, ("inductor",)), Part("a step", step, ("inductor",)),
))  # fmt: skip
