"""Slice 4: a LLaMA of 8B width in bfloat16: tokens per second and peak bytes, beside eager PyTorch and beside `torch.compile`.

All have the same weights' shapes, AdamW (fused in eager) and attention by torch's kernels; one after the other in one process, each with
the card to itself.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import colofunc as cf
from bench import Row
from bench.gpu.measuring import Run, Step, eager, ids, ours, steps
from bench.gpu.models import Llama
from bench.gpu.parts import Part, Setup, Slice, at_least, at_most, not_run


def theirs(setup: Setup, compiled: bool) -> Callable[[], Run]:
    of = setup.sizes.llama

    def make() -> Run:
        with torch.device("cuda"):
            module = Llama(of.shape, setup.sizes.dtype)
        return eager(module, ids(of), torch.compile(module) if compiled else None)

    return make


def mine(setup: Setup, executor: str = "") -> Callable[[], Run]:
    of = setup.sizes.llama

    def wrap(fn: object) -> object:
        step = cf.shard(fn, cf.Mesh(device="cuda"))
        return step.on(executor) if executor else step

    return lambda: ours(lambda: Llama(of.shape, setup.sizes.dtype), ids(of), wrap)


def beside(setup: Setup, name: str, first: Step, other: Callable[[], Run], why: str) -> list[Row]:
    """The rows of a comparison; `why`: the other cannot run here."""
    if why:
        return [not_run(name, why)]
    second, tokens = steps(other, setup.sizes.steps), setup.sizes.llama.tokens
    speed, bytes_ = second.seconds / first.seconds, first.peak_bytes / second.peak_bytes
    return [
        Row(name, second.words(tokens)),
        at_least(f"tokens/s, ours / {name}", speed, 1.0, f"{speed:.3f}"),
        at_most(f"peak, ours / {name}", bytes_, 1.0, f"{bytes_:.3f}"),
    ]


def operators(setup: Setup) -> list[Row]:
    found = steps(mine(setup), setup.sizes.steps)
    row = Row("ours", found.words(setup.sizes.llama.tokens))
    return [row, *beside(setup, "eager, SDPA", found, theirs(setup, False), setup.without("eager"))]


def compiled(setup: Setup) -> list[Row]:
    found = steps(mine(setup, "compiled"), setup.sizes.steps)
    row = Row("ours compiled", found.words(setup.sizes.llama.tokens))
    return [row, *beside(setup, "torch.compile", found, theirs(setup, True), setup.without("eager"))]


SLICE = Slice(4, "A LLaMA of 8B width, 8 layers, bfloat16, 8,192 tokens", (
    Part("operators", operators), Part("compiled", compiled, ("inductor",)),
))  # fmt: skip
