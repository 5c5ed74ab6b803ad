"""Slice 2: a training step of every model of the zoo (`tests/zoo.py`) on the card, against the CPU, in float64."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch

import colofunc as cf
from bench import Row
from bench.gpu.parts import Part, Setup, Slice
from bench.gpu.sizes import REAL
from colofunc.testing import float64, last_bit
from colofunc.testing.trees import compare, plain_copy

TESTS = Path(__file__).parents[2] / "tests"
FAMILIES = {"transformers": "transformers", "timm": "timm"}
"""Family of the zoo -> the library that it needs."""


def names(setup: Setup, chunk: int) -> list[str]:
    zoo = _zoo()
    every = [name for name, entry in zoo.ALL.items() if FAMILIES.get(entry.family, "") not in setup.lacks]
    return list(setup.sizes.zoo or every)[chunk :: setup.sizes.zoo_chunks]


def one_model(name: str) -> str:
    """Empty where a step of the model gives the same everywhere, or what was wrong."""
    torch.set_num_threads(1)
    try:
        with float64():
            fn, state, batch = _zoo().step_of(name)
            got, want = (_ran(fn, state, batch, device) for device in ("cuda", "cpu"))
            try:
                compare(got, want)
            except cf.CheckError:
                # Batch norm over a few samples magnifies rounding; moving the inputs by their last bit shows how much.
                compare(got, want, tolerance=min(1e-6, 10 * last_bit(fn, state, batch)))
    except Exception as error:  # this model's row
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]
    return ""


def chunk(k: int, setup: Setup) -> list[Row]:
    chosen = names(setup, k)
    if setup.sizes.workers:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(setup.sizes.workers, mp_context=spawn) as workers:
            said = list(workers.map(one_model, chosen))
    else:
        said = list(map(one_model, chosen))
    wrong = {name: words for name, words in zip(chosen, said, strict=True) if words}
    equal = f"{len(chosen) - len(wrong)} of {len(chosen)} models"
    row = Row("a training step on the card, as on the CPU in float64", equal, "all", not wrong)
    return [row, *(Row(name, words, "as on the CPU", False) for name, words in wrong.items())]


def _ran(fn: object, state: object, batch: object, device: str) -> object:
    torch.manual_seed(3)
    step = cf.shard(fn, cf.Mesh(device=device))
    return plain_copy(step(step.init(state, batch), batch))


def _zoo() -> object:
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module("zoo")


SLICE = Slice(2, "Models on the card against the CPU", tuple(
    Part(f"models {k + 1}", partial(chunk, k)) for k in range(REAL.zoo_chunks)
))  # fmt: skip
