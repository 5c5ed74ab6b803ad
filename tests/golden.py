"""Golden texts: what some hundreds of steps are lowered to, to be compared before and after a change of the engine.

    python -m tests.golden record before            # one file for each step: plan, program, peaks and planned time
    ...                                              # the change
    python -m tests.golden record after
    python -m tests.golden compare before after     # names what differs, with the first lines; exit status 1 if anything does

Both runs need the same torch and transformers, since traces follow theirs. `--part 0/2` records every second step, so that two
processes share the work; `--only zoo` those whose name begins so. Values are numbered in the order in which a text names them, and
comments (source lines) are left out: neither is behaviour.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from difflib import unified_diff
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("COLOFUNC_CACHE", "off")
os.environ.setdefault("COLOFUNC_MEASURE", "off")
os.environ.setdefault("COLOFUNC_QUIET", "1")

import matrix
import matrix_memory
import random_cases
import torch
import zoo

import colofunc as cf

CELLS = 80
"""Parallel modes of `matrix` from which every second is recorded, each with the plans that it names."""
NARROW = 16
"""Of the cells within a budget in `matrix_memory`."""
RANDOM = 80
"""Generated programs on generated meshes, with generated chains."""
MODELS = (
    "gpt2", "llama", "bert", "t5", "gemma2", "gpt_oss", "bloom", "deberta", "mamba", "whisper", "clip",
    "resnet", "mobilenetv3", "convnext", "timm_swin", "mixer", "kind_uneven",
)  # fmt: skip
MESHES = ({"dp": 4}, {"dp": 2, "tp": 2})
CHAINS: dict[str, Callable[[Any], Any]] = {
    "": lambda step: step,
    "checkpoint": lambda step: cf.checkpoint(step, policy="dots"),
    "offload": lambda step: cf.offload(step, policy="host"),
    "accumulate": lambda step: cf.accumulate(step, microbatches=2),
    "bf16": lambda step: cf.precision(step, "bf16"),
}
SHOWN = 12
"""Lines of a difference that `compare` prints for each step."""

Case = Callable[[], Any]


def cases() -> Iterator[tuple[str, Case]]:
    """(name, what lowers it)."""
    for cell in matrix.chosen(most=CELLS)[::2]:
        yield f"matrix/{cell}", partial(_cell, cell)
    for some in matrix_memory.sweep()[:: max(1, len(matrix_memory.sweep()) // NARROW)]:
        yield f"narrow/{some}", partial(_narrow, some)
    for name in MODELS:
        for sizes in MESHES:
            text = "x".join(f"{axis}{size}" for axis, size in sizes.items())
            yield f"zoo/{name}-{text}", partial(_model, name, sizes, "")
        for chain in [chain for chain in CHAINS if chain]:
            yield f"zoo/{name}-dp2-{chain}", partial(_model, name, {"dp": 2}, chain)
    for seed in range(RANDOM):
        yield f"random/{seed}", partial(_random, seed)


def _cell(cell: matrix.Cell) -> Any:
    step, state, batch = matrix.step_of(cell.kind, cell.extra, cell.precision)
    return matrix.staged(cell, step).lower(state, batch)


def _narrow(some: matrix_memory.Narrow) -> Any:
    cell = some.cell
    step, state, batch = matrix.step_of(cell.kind, cell.extra, cell.precision, some.layers)
    whole = matrix.staged(cell, step).lower(state, batch)
    _, _, low = matrix_memory._tightest(some, step, state, batch, whole)
    return low


def _model(name: str, sizes: dict[str, int], chain: str) -> Any:
    step, state, batch = zoo.step_of(name)
    staged = CHAINS[chain](cf.shard(step, cf.Mesh(**sizes, topology=matrix.machine())))
    return staged.lower(state, batch)


def _random(seed: int) -> Any:
    case = random_cases.draw(seed)
    return case.staged().lower(*case.arguments())


def canonical(text: str) -> str:
    """A program's text without comments, its values numbered in the order of their first appearance."""
    numbers: dict[str, int] = {}
    lines = [line.split("    # ")[0].rstrip() for line in text.splitlines()]
    return re.sub(r"%(\d+)", lambda found: f"%{numbers.setdefault(found[1], len(numbers))}", "\n".join(lines))


def described(low: Any) -> str:
    """What is compared of a lowered step."""
    peaks = ", ".join(f"{tier} {nbytes:,} B" for tier, nbytes in sorted(low.memory().peak_bytes.items()))
    head = f"planned {low.plan.cost_s:.9g} s; peak {peaks}"
    inputs = "\n".join(f"{leaf.name}: {leaf.spec}" for leaf in low.plan.inputs)
    return f"{head}\n\n{inputs}\n\n{canonical(low.text())}\n"


def record(folder: Path, part: int, parts: int, only: str) -> None:
    for name, lower in list(cases())[part::parts]:
        if not name.startswith(only):
            continue
        began = time.perf_counter()
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings(action="ignore"), cf.testing.float64():
                text = described(lower())
        except cf.ColofuncError as error:  # a refusal is behaviour, too
            text = f"{type(error).__name__}: {canonical(str(error))}\n"
        except Exception:
            text = f"fell:\n{traceback.format_exc()}"
        path.write_text(text)
        print(f"{name}: {len(text):,} characters, {time.perf_counter() - began:.1f} s", flush=True)


def compare(before: Path, after: Path) -> int:
    """1 if a text differs or is in one folder only, else 0."""
    there = [{str(path.relative_to(folder)) for path in folder.rglob("*.txt")} for folder in (before, after)]
    different = 0
    for name in sorted(there[0] & there[1]):
        texts = [(folder / name).read_text() for folder in (before, after)]
        if texts[0] == texts[1]:
            continue
        different += 1
        print(f"--- {name}")
        lines = list(unified_diff(texts[0].splitlines(), texts[1].splitlines(), lineterm="", n=0))[2:]
        print("\n".join(line[:200] for line in lines[:SHOWN]))
    missing = len(there[0] ^ there[1])
    print(f"{len(there[0] & there[1])} steps in both, {different} differ; {missing} in one only")
    return int(different > 0 or missing > 0)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description="What steps are lowered to, recorded and compared.")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--part", default="0/1", help="k/n: every n-th step, from the k-th on")
    recording.add_argument("--only", default="", help="steps whose name begins so")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    given = parser.parse_args()
    if given.command == "compare":
        return compare(given.before, given.after)
    part, parts = map(int, given.part.split("/"))
    record(given.folder, part, parts, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
