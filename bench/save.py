"""Saving and loading beside `torch.save`, `torch.load` and `torch.distributed.checkpoint`, and what training notices of it.

Throughput: one state of float32 tensors, plain, in alternating rounds within one process, by wall time (this is about
disks and memory, not only about the CPU); the median of the rounds' ratios counts. Ours sums every block and is on disk when it
returns, and so is DCP. `torch.save` leaves its file in the page cache, where a crash of the machine loses it; what does
the same work is `torch.save` with a flush, and ours is to be no slower than either. Every save goes to a new name:
`torch.save` over an old file flushes it on ext4, which would flatter ours. Files are loaded from the page cache, as in
another evaluation, and from the disk, as in a job that starts again. Stall: stretches of training with one background
save beside stretches without.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed import checkpoint
from torch.utils import _pytree as pytree
from transformers import GPT2Config, GPT2LMHeadModel

import colofunc as cf
from bench import Row, Section, ratio

SIZES = (4096, 4096), 4  # 4 tensors of 64 MiB
ROUNDS = 9
STRETCHES, EVERY = 5, 10  # stretches of training, of 10 steps with one save


def state() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    shape, count = SIZES
    return {f"layer{k}.weight": torch.randn(*shape, generator=made) for k in range(count)}


def wall_s(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def rounds(runs: dict[str, Callable[[Path], Any]], folder: Path, prepare: Callable[[Path], Any]) -> dict[str, list[float]]:
    """Wall seconds of each per round, run in turn after one round that does not count; `prepare` is not timed."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(ROUNDS + 1):
        for name, run in runs.items():
            target = folder / name.replace(" ", "-")
            prepare(target)
            os.sync()
            taken = wall_s(lambda run=run, target=target: run(target))
            if k:
                times[name].append(taken)
    return times


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def forget(path: Path) -> None:
    """Drop a checkpoint from the page cache."""
    for file in path.iterdir() if path.is_dir() else [path]:
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def flushed(value: Any, path: Path) -> None:
    torch.save(value, path)
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def dcp_load(path: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: torch.empty_like(x) for name, x in like.items()}
    checkpoint.load(found, checkpoint_id=path, no_dist=True)
    return found


def throughput(folder: Path) -> tuple[dict[str, list[float]], ...]:
    """(seconds to save, to load from the page cache, to load from the disk) by kind, one per round."""
    value = state()
    saves: dict[str, Callable[[Path], Any]] = {
        "ours": lambda path: cf.save(path, value),
        "torch.save, flushed": lambda path: flushed(value, path),
        "torch.save": lambda path: torch.save(value, path),
        "DCP": lambda path: checkpoint.save(value, storage_writer=checkpoint.FileSystemWriter(path, sync_files=True), no_dist=True),
    }
    loads: dict[str, Callable[[Path], Any]] = {
        "ours": cf.load,
        "torch.save": torch.load,
        "DCP": lambda path: dcp_load(path, value),
    }
    return rounds(saves, folder, remove), rounds(loads, folder, lambda path: None), rounds(loads, folder, forget)


@attrs.frozen
class Stall:
    """What training notices of background saves: shares of its time."""

    cpu: list[tuple[float, ...]]  # (with saves, without) seconds of the training thread
    inside: float  # wall time within cf.save over that of a stretch with saves
    step_s: float
    nbytes: int


def stall(folder: Path) -> Stall:
    config = GPT2Config(
        n_embd=256, n_layer=4, n_head=4, vocab_size=4096, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )
    step_fn, start = cf.train_step(cf.functional(GPT2LMHeadModel(config)), cf.adapt(torch.optim.AdamW, lr=1e-4))
    ids = torch.randint(0, 4096, (8, 128))
    batch = {"input_ids": ids, "labels": ids}
    step = cf.shard(step_fn, cf.Mesh())
    held = {"state": step.init(start, batch)}
    inside = [0.0]

    def stretch(saves: bool) -> tuple[float, float]:
        """(wall, CPU) seconds of the training thread."""
        wall, cpu = time.perf_counter(), time.thread_time()
        for k in range(EVERY):
            held["state"], metrics = step(held["state"], batch)
            float(metrics["loss"])
            if saves and k == 0:
                inside[0] += wall_s(lambda: cf.save(folder / "run", held["state"], wait=False))
        return time.perf_counter() - wall, time.thread_time() - cpu

    stretch(True)
    inside[0], walls, cpu, plain = 0.0, 0.0, [], []
    for _ in range(STRETCHES):
        cf.save(folder / "last", {"n": 1})  # what still runs ends outside of what is measured
        without, with_saves = stretch(False), stretch(True)
        cpu.append((with_saves[1], without[1]))
        walls += with_saves[0]
        plain.append(without[0] / EVERY)
    nbytes = sum(x.numel() * x.element_size() for x in pytree.tree_leaves(held["state"]) if isinstance(x, torch.Tensor))
    return Stall(cpu, inside[0] / walls, statistics.median(plain), nbytes)


def bench() -> Section:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    folder = Path(tempfile.mkdtemp(dir=os.getcwd()))
    load_before = os.getloadavg()[0]
    try:
        saves, *loads = throughput(folder)
        noticed = stall(folder)
    finally:
        shutil.rmtree(folder)
    size = SIZES[1] * SIZES[0][0] * SIZES[0][1] * 4
    warm, cold = ({name.replace("torch.save", "torch.load"): some for name, some in by.items()} for by in loads)
    rows = [Row(f"save, {name}", f"{size / statistics.median(some) / 1e9:.2f} GB/s") for name, some in saves.items()]
    rows += [Row(f"load, {name}", f"{size / statistics.median(some) / 1e9:.2f} GB/s") for name, some in warm.items()]
    rows += [Row(f"load from disk, {name}", f"{size / statistics.median(some) / 1e9:.2f} GB/s") for name, some in cold.items()]
    for what, times, other in (
        ("save: torch.save with a flush / ours, both on disk", saves, "torch.save, flushed"),
        ("save: DCP / ours, both on disk", saves, "DCP"),
        ("save: torch.save as it is, in the page cache / ours, on disk", saves, "torch.save"),
        ("load: torch.load / ours", warm, "torch.load"),
        ("load: DCP / ours", warm, "DCP"),
        ("load from disk: torch.load / ours", cold, "torch.load"),
        ("load from disk: DCP / ours", cold, "DCP"),
    ):
        middle, text = ratio(list(zip(times[other], times["ours"], strict=True)), 0, 1)
        rows.append(Row(f"{what}, seconds", text, "at least 1.00", middle >= 1.0))
    middle, text = ratio(noticed.cpu, 0, 1)
    what = f"training with a background save of {noticed.nbytes / 1e6:.0f} MB every {EVERY} steps of {noticed.step_s:.2f} s / without"
    rows.append(Row(f"{what}, CPU seconds of its thread", text, "at most 1.05", middle <= 1.05))
    what = "share of training time within cf.save(wait=False), wall"
    rows.append(Row(what, f"{noticed.inside:.1%}", "at most 5 %", noticed.inside <= 0.05))
    return Section(
        "Saving and loading",
        f"{SIZES[1]} tensors of {size / SIZES[1] / 2**20:.0f} MiB, float32, one local disk, each to a new name, wall time, medians of "
        f"{ROUNDS} rounds; GPT-2 of 4 layers for the background; {torch.get_num_threads()} thread(s), {os.cpu_count()} cores, load "
        f"{load_before:.1f} before, torch {torch.__version__}",
        rows,
    )
