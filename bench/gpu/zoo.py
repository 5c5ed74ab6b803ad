"""Slice 2: a training step of every model of the zoo (`tests/zoo.py`) on the card, against the CPU, in float64.

Processes try models side by side. An illegal access stays with the process that made it, and with whatever it tries next; a model may also
end its process, and the pool with it. What was not tried on a usable card is tried again: each row is of the model that it names.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

import colofunc as cf
from bench import Row
from bench.gpu.measuring import usable
from bench.gpu.parts import Part, Setup, Slice
from bench.gpu.sizes import REAL
from colofunc.testing import float64, last_bit
from colofunc.testing.check import run_reference, seeded
from colofunc.testing.trees import compare, plain_copy

TESTS = Path(__file__).parents[2] / "tests"
SEED = 3
FAMILIES = {"transformers": "transformers", "timm": "timm"}
"""Family of the zoo -> the library that it needs."""


def names(setup: Setup, chunk: int) -> list[str]:
    zoo = _zoo()
    every = [name for name, entry in zoo.ALL.items() if FAMILIES.get(entry.family, "") not in setup.lacks]
    return list(setup.sizes.zoo or every)[chunk :: setup.sizes.zoo_chunks]


NOT_BUILT, AS_TORCH = "not built: ", "as eager PyTorch there: "


def one_model(name: str) -> str:
    """Empty where a step of the model gives the same everywhere, or what was wrong, or not tried (`NOT_BUILT`), or how far
    torch itself is from the CPU there (`AS_TORCH`).
    """
    torch.set_num_threads(1)
    try:
        with float64():
            try:
                fn, state, batch = _zoo().step_of(name)
            except Exception as error:  # another version of its library has no such model
                return f"{NOT_BUILT}{type(error).__name__}: {error}".split("\n")[0][:200]
            got, want = (_ran(fn, state, batch, device) for device in ("cuda", "cpu"))
            return compare_within(got, want, fn, state, batch)
    except Exception as error:  # this model's row
        return f"{type(error).__name__}: {error}".split("\n")[0][:200]


def compare_within(got: Any, want: Any, fn: Any, state: Any, batch: Any) -> str:
    """The card's results against the CPU's, within 1e-10 or what rounding makes of this step, whichever is more.

    Where that fails, torch's own kernels may compute something else on a card: there its hard-swish and hard-sigmoid multiply numbers in
    float64 by a sixth in float32. So the results are compared with the function itself in eager PyTorch on the card, as strictly.
    """
    try:
        compare(got, want)
        return ""
    except cf.CheckError:
        moved = min(1e-6, 10 * last_bit(fn, state, batch))
    try:
        compare(got, want, tolerance=moved)
        return ""
    except cf.CheckError:
        on_card = tree_map(lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, (state, batch))
        eager = plain_copy(seeded(SEED, run_reference, fn, *on_card))
    found = compare(got, eager, tolerance=max(1e-10, moved))
    return f"{AS_TORCH}{found:.1e} from eager PyTorch on the card, which is {compare(eager, want, tolerance=1.0):.1e} from the CPU"


def in_a_process(name: str) -> str | None:
    """The same; None where a model before it has left this process without a usable card."""
    if not usable():
        return None
    return one_model(name)


def side_by_side(names: Sequence[str], pool: Callable[[int], Executor], workers: int) -> dict[str, str]:
    """Model -> what was wrong, empty where nothing was."""
    said: dict[str, str] = {}
    while left := [name for name in names if name not in said]:
        found, ended = _tried(left, pool, workers)
        said |= found
        if ended:  # one of those that were first in line has ended its process; which, shows alone
            for name in [name for name in left if name not in said][:workers]:
                said |= {name: "its process ended"} | _tried([name], pool, 1)[0]
    return said


def _tried(names: Sequence[str], pool: Callable[[int], Executor], workers: int) -> tuple[dict[str, str], bool]:
    """(model -> what was wrong, of those that were tried on a usable card; whether a process has ended)."""
    said: dict[str, str] = {}
    ended = False
    with pool(workers) as processes:
        running = {name: processes.submit(in_a_process, name) for name in names}
        for name, result in running.items():
            try:
                words = result.result()
            except BrokenProcessPool:
                ended = True
                continue
            if words is not None:
                said[name] = words
    return said, ended


def spawned(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))


def chunk(k: int, setup: Setup) -> list[Row]:
    chosen = names(setup, k)
    if setup.sizes.workers:
        said = side_by_side(chosen, spawned, setup.sizes.workers)
    else:
        said = {name: one_model(name) for name in chosen}
    built = {name: words for name, words in said.items() if not words.startswith(NOT_BUILT)}
    as_torch = {name: words for name, words in built.items() if words.startswith(AS_TORCH)}
    wrong = {name: words for name, words in built.items() if words and name not in as_torch}
    equal = f"{len(built) - len(as_torch) - len(wrong)} of {len(built)} models, {len(as_torch)} as eager PyTorch there"
    row = Row("a training step on the card, as on the CPU in float64", equal, "all", not wrong)
    others = [Row(name, words) for name, words in said.items() if words and name not in wrong]
    return [row, *(Row(name, words, "as on the CPU", False) for name, words in wrong.items()), *others]


def _ran(fn: object, state: object, batch: object, device: str) -> object:
    torch.manual_seed(SEED)
    step = cf.shard(fn, cf.Mesh(device=device))
    return plain_copy(step(step.init(state, batch), batch))


def _zoo() -> object:
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    return importlib.import_module("zoo")


SLICE = Slice(2, "Models on the card against the CPU", tuple(
    Part(f"models {k + 1}", partial(chunk, k)) for k in range(REAL.zoo_chunks)
))  # fmt: skip
