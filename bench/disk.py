"""The disk tier: its store beside plain system calls, and a training step with its state on disk beside one with it on the host.

Every way moves the same bytes between the same tensors and files whose room is taken, in alternating rounds within one
process: the store (checksums, two versions), from memory that begins at a page and from memory that does
not; `os.pwrite` and `os.preadv` through the page cache; and `O_DIRECT` by one thread, as `dd oflag=direct` does. A write
counts until `fdatasync` has returned, a read begins with nothing of the file in the page cache. By wall time, because it is
about the disk, and by CPU seconds, because they are taken from training; medians of the rounds and of their ratios.

The step trains a chain of linear layers with AdamW on one CPU device. With its state on disk it reads and writes all of it in
every step, beside forward, backward and updates; the store moves the same bytes alone for comparison.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import colofunc as cf
from bench import Row, Section, ratio
from colofunc.executors.disk.store import DiskStore
from colofunc.executors.pages import pages

CHUNK_BYTES, CHUNKS = 32 << 20, 8
BLOCK_BYTES = 4 << 20
ROUNDS, WARM = 8, 2  # the store's writes alternate between two files: both are touched before it counts

Times = dict[str, list[tuple[float, float]]]  # way -> (wall, CPU) seconds per round


class Plain:
    """A file of all chunks, moved by system calls in order."""

    def __init__(self, path: Path, flags: int) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | flags)
        os.posix_fallocate(self.fd, 0, CHUNKS * CHUNK_BYTES)

    def write(self, chunks: list[torch.Tensor]) -> None:
        self._move(chunks, os.pwritev)
        os.fdatasync(self.fd)

    def read(self, chunks: list[torch.Tensor]) -> None:
        self._move(chunks, os.preadv)

    def forget(self) -> None:
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _move(self, chunks: list[torch.Tensor], move: Callable[..., int]) -> None:
        for k, chunk in enumerate(chunks):
            data = memoryview(chunk.numpy())
            for at in range(0, CHUNK_BYTES, BLOCK_BYTES):
                assert move(self.fd, [data[at : at + BLOCK_BYTES]], k * CHUNK_BYTES + at) == BLOCK_BYTES


class Store:
    """The same calls on a `DiskStore`."""

    def __init__(self, store: DiskStore) -> None:
        self.store = store

    def write(self, chunks: list[torch.Tensor]) -> None:
        for ticket in [self.store.write(k, chunk) for k, chunk in enumerate(chunks)]:
            ticket.wait()
        self.store.commit()
        for fd in self.store._files._fds:
            os.fdatasync(fd)

    def read(self, chunks: list[torch.Tensor]) -> None:
        for ticket in [self.store.read(k, chunk) for k, chunk in enumerate(chunks)]:
            ticket.wait()

    def forget(self) -> None:
        assert self.store.direct  # else it would read from the page cache


def memory(shift: int) -> list[torch.Tensor]:
    """Chunks of random bytes that begin `shift` bytes after a page."""
    made = [torch.from_numpy(pages(CHUNK_BYTES + shift))[shift:] for _ in range(CHUNKS)]
    for k, chunk in enumerate(made):
        chunk.copy_(torch.from_numpy(np.random.default_rng(k).integers(0, 256, CHUNK_BYTES, np.uint8)))
    return made


def timed(run: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def rounds(folder: Path) -> tuple[Times, Times]:
    """(writes, reads) of every way."""
    aligned, shifted = memory(0), memory(64)
    store = Store(DiskStore(folder, [CHUNK_BYTES] * CHUNKS))
    ways: dict[str, tuple[Plain | Store, list[torch.Tensor]]] = {
        "the store": (store, aligned),
        "the store, memory at any address": (store, shifted),
        "buffered": (Plain(folder / "buffered", 0), shifted),
        "direct, 1 thread": (Plain(folder / "direct", os.O_DIRECT), aligned),
    }
    writes, reads = ({name: [] for name in ways} for _ in range(2))
    for k in range(WARM + ROUNDS):
        turn = [*ways.items()][k % len(ways) :] + [*ways.items()][: k % len(ways)]  # who comes behind whom changes what a disk has at hand
        for name, (way, chunks) in turn:
            taken = timed(lambda way=way, chunks=chunks: way.write(chunks))
            if k >= WARM:
                writes[name].append(taken)
        for name, (way, chunks) in turn:
            way.forget()
            taken = timed(lambda way=way, chunks=chunks: way.read(chunks))
            if k >= WARM:
                reads[name].append(taken)
    assert all(torch.equal(a, b) for a, b in zip(aligned, shifted, strict=True))
    store.store.close()
    return writes, reads


def rows(what: str, times: Times) -> list[Row]:
    nbytes = CHUNK_BYTES * CHUNKS
    found = []
    for name, some in times.items():
        wall, cpu = (statistics.median(t[column] for t in some) for column in (0, 1))
        found.append(Row(f"{what}, {name}", f"{nbytes / wall / 1e9:.2f} GB/s, {cpu / nbytes * 2**30:.2f} CPU s per GiB"))
    wanted = [("buffered", "seconds", 0, 1.0), ("direct, 1 thread", "seconds", 0, 0.9), ("buffered", "CPU seconds", 1, 1.0)]
    for other, by, column, least in wanted:
        columns = [(a[column], b[column]) for a, b in zip(times[other], times["the store"], strict=True)]
        middle, text = ratio(columns, 0, 1)
        found.append(Row(f"{what}: {other} / the store, {by}", text, f"at least {least:.2f}", middle >= least))
    return found


LAYERS, WIDTH, BATCH = 8, 1024, 1024


def steps(folder: Path) -> tuple[list[tuple[float, float, float]], int]:
    """(per round the seconds of a step on the host, of one on disk, and of the store alone; bytes of the state)."""
    net = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    loss, inputs = lambda out, batch: (out**2).mean(), lambda batch: ((batch,), {})
    step_fn, state = cf.train_step(cf.functional(net), cf.adapt(torch.optim.AdamW, lr=1e-4), loss=loss, inputs=inputs)
    batch = torch.randn(BATCH, WIDTH)
    host_step, disk_step = (cf.offload(cf.shard(step_fn, cf.Mesh()), policy=p, disk=folder) for p in ("host", "disk"))
    states = [host_step.init(state, batch), disk_step.init(state, batch)]
    nbytes = disk_step.lower(state, batch).memory().peak_bytes["disk"]
    chunks = [torch.from_numpy(pages(4 * WIDTH * WIDTH)) for _ in range(nbytes // (4 * WIDTH * WIDTH))]
    store = Store(DiskStore(folder, [len(chunk) for chunk in chunks]))
    found = []
    for k in range(WARM + ROUNDS):
        taken = []
        for which, step in enumerate((host_step, disk_step)):
            began = time.perf_counter()
            states[which], _ = step(states[which], batch)
            taken.append(time.perf_counter() - began)
        for ticket in [store.store.write(j, chunk) for j, chunk in enumerate(chunks)]:
            ticket.wait()
        began = time.perf_counter()
        store.read(chunks)
        for ticket in [store.store.write(j, chunk) for j, chunk in enumerate(chunks)]:
            ticket.wait()
        taken.append(time.perf_counter() - began)
        if k >= WARM:
            found.append((taken[0], taken[1], taken[2]))
    pairs = zip(states[0]["params"].items(), states[1]["params"].items(), strict=True)
    assert all(torch.equal(a.full(), b.full()) for (_, a), (_, b) in pairs)
    store.store.close()
    return found, nbytes


def step_rows(found: list[tuple[float, float, float]], nbytes: int) -> list[Row]:
    host_s, disk_s, alone_s = (statistics.median(column) for column in zip(*found, strict=True))
    middle, text = ratio([(disk, host + alone) for host, disk, alone in found], 0, 1)
    moved = f"{nbytes >> 20} MiB read, as much written"
    return [
        Row("a step, state on the host", f"{1e3 * host_s:.0f} ms"),
        Row("a step, state on disk", f"{1e3 * disk_s:.0f} ms ({moved}), {disk_s / host_s:.2f} times that"),
        Row("the same bytes by the store alone", f"{1e3 * alone_s:.0f} ms"),
        Row("state on disk / state on the host and the store's bytes one after the other", text, "at most 1.00", middle <= 1.0),
    ]


def bench() -> Section:
    folder = Path(tempfile.mkdtemp(dir=os.getcwd()))
    load_before = os.getloadavg()[0]
    try:
        writes, reads = rounds(folder)
        trained, state_bytes = steps(folder)
    finally:
        shutil.rmtree(folder)
    return Section(
        "The disk tier",
        f"{CHUNKS} chunks of {CHUNK_BYTES >> 20} MiB, one local disk, blocks of {BLOCK_BYTES >> 20} MiB, on disk at the end of a write, "
        f"not in the page cache at the start of a read; medians of {ROUNDS} rounds; {os.cpu_count()} cores, load {load_before:.1f} before, "
        f"torch {torch.__version__}",
        [*rows("write", writes), *rows("read", reads), *step_rows(trained, state_bytes)],
    )
