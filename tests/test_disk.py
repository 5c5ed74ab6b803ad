"""The disk tier: what is read is what was written, a failure leaves the last commit, and a kill nothing."""

import json
import multiprocessing
import os
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colofunc.errors import DiskError
from colofunc.executors.disk.layout import DiskLayout, disk_bytes
from colofunc.executors.disk.store import DiskStore
from colofunc.executors.pages import pages

PAGE = 4096
EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 12289]


def store(directory: Any, sizes: Any = (5000, 3), **options: Any) -> DiskStore:
    return DiskStore(directory, sizes, **{"block_bytes": PAGE, "buffers_bytes": 4 * PAGE} | options)


def random_bytes(seed: int, size: int, shift: int = 0) -> torch.Tensor:
    """A tensor whose memory begins `shift` bytes after a page."""
    whole = torch.from_numpy(pages(size + shift))
    whole[shift:] = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, np.uint8))
    return whole[shift:]


def content(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.tolist())


def read(store: DiskStore, chunk: int, shift: int = 0) -> bytes:
    into = random_bytes(999, store.sizes[chunk], shift)
    store.read(chunk, into).wait(60)
    return content(into)


def write(store: DiskStore, chunk: int, data: bytes) -> None:
    store.write(chunk, torch.tensor(list(data), dtype=torch.uint8)).wait(60)


def folders(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


STRANGERS: set[threading.Thread] = set()  # of stores that tests before have left behind


@pytest.fixture(autouse=True)
def strangers() -> None:
    STRANGERS.clear()
    STRANGERS.update(threading.enumerate())


def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("colofunc-disk") and thread not in STRANGERS]


# ---- bytes ----

CHUNKS, SHIFT = st.integers(0, len(EDGES) - 1), st.sampled_from([0, 0, 1, 64])
DOINGS = st.one_of(
    st.tuples(st.just("write"), CHUNKS, SHIFT),
    st.tuples(st.just("read"), CHUNKS, SHIFT),
    st.sampled_from([("commit",), ("rollback",), ("wait",)]),
)


@given(st.lists(DOINGS, max_size=40), st.integers(1, 3))
def test_any_sequence_reads_what_a_dict_holds(doings: list[Any], threads: int) -> None:
    last: dict[int, bytes] = {}
    now: dict[int, bytes] = {}
    tickets, expected = [], []
    with tempfile.TemporaryDirectory() as directory:
        tried = store(directory, EDGES, threads=threads)
        for number, (doing, *given) in enumerate([*doings, ("wait",), ("rollback",)]):
            if doing == "write":
                data = random_bytes(number, EDGES[given[0]], given[1])
                tickets.append(tried.write(given[0], data))
                now[given[0]] = content(data)
            elif doing == "read" and given[0] in now:
                into = random_bytes(999, EDGES[given[0]], given[1])
                tickets.append(tried.read(given[0], into))
                expected.append((into, now[given[0]]))
            elif doing == "commit":
                tried.commit()
                last = dict(now)
            elif doing == "rollback":
                tried.rollback()
                now = dict(last)
            elif doing == "wait":
                for ticket in tickets:
                    ticket.wait(60)
                tickets.clear()
                assert all(content(into) == data for into, data in expected)
        for chunk, data in last.items():
            assert read(tried, chunk) == data
        tried.close()


@pytest.mark.parametrize("shift", [0, 64, 1])
@pytest.mark.parametrize("size", [*EDGES, 3 * PAGE, 5 * PAGE - 1, 5 * PAGE + 1])
def test_every_size_at_every_alignment(tmp_path: Path, size: int, shift: int) -> None:
    data = random_bytes(size, size, shift)
    with store(tmp_path, [7, size, 7]) as tried:
        for chunk in (0, 2):
            write(tried, chunk, b"beside!")
        tried.write(1, data).wait(60)
        assert read(tried, 1, shift) == read(tried, 1, 65 - shift) == content(data)
        assert read(tried, 0) == read(tried, 2) == b"beside!"


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint16],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype) -> None:
    source = torch.arange(-20, 21).reshape(1, 41).clamp(0 if dtype == torch.uint16 else -20).to(dtype)
    into = torch.zeros_like(source)
    with store(tmp_path, [source.nbytes]) as tried:
        tried.write(0, source).wait(60)
        tried.read(0, into).wait(60)
    assert into.dtype == dtype and torch.equal(into.view(torch.uint8), source.view(torch.uint8))


def test_parameters_and_scalars(tmp_path: Path) -> None:
    scalar, parameter = torch.tensor(3.5), torch.nn.Parameter(torch.ones(4, 4))
    with store(tmp_path, [4, 64]) as tried:
        tried.write(0, scalar).wait(60)
        tried.write(1, torch.full((4, 4), 2.0)).wait(60)
        tried.read(1, parameter).wait(60)
        assert read(tried, 0) == b"\0\0\x60\x40"
    assert torch.equal(parameter.detach(), torch.full((4, 4), 2.0))


def test_a_store_takes_its_room_at_once(tmp_path: Path) -> None:
    with store(tmp_path, [5000, 0, 4096]) as tried:
        files = [Path(tried.path) / name for name in ("version-0", "version-1")]
        assert [file.stat().st_size for file in files] == [12288, 12288] and disk_bytes(tried.sizes) == 24576
        assert all(file.stat().st_blocks * 512 >= 12288 for file in files)


# ---- versions ----


def test_rollback_goes_to_the_last_commit(tmp_path: Path) -> None:
    with store(tmp_path, [3]) as tried:
        write(tried, 0, b"one")
        tried.commit()
        write(tried, 0, b"two")
        assert read(tried, 0) == b"two"
        tried.rollback()
        assert read(tried, 0) == b"one"


def is_killed(path: str) -> None:
    killed = DiskStore(path, [100_000], block_bytes=4096, buffers_bytes=16384)
    killed.write(0, torch.zeros(100_000, dtype=torch.uint8))
    killed.commit()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.dist  # from the server of warm processes
def test_what_a_killed_process_left_goes_with_the_next_store(tmp_path: Path) -> None:
    living = store(tmp_path)
    killed = multiprocessing.get_context("forkserver").Process(target=is_killed, args=(str(tmp_path),))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and len(folders(tmp_path)) == 2
    with store(tmp_path, rank=3) as mine:
        assert folders(tmp_path) == sorted(Path(s.path).name for s in (living, mine))
    living.close()


def test_half_made_and_foreign_folders_are_not_taken_for_dead_stores(tmp_path: Path) -> None:
    bare, unsigned, elsewhere, other = (tmp_path / f"colofunc-disk-rank00000-{k * 12}" for k in "abcd")
    for path in (bare, unsigned, elsewhere, other):
        path.mkdir()
    (unsigned / "lock").touch()
    (elsewhere / "lock").write_text(json.dumps({"host": "another host", "pid": 1, "rank": 0}))
    (other / "precious").touch()
    with store(tmp_path) as tried:
        assert folders(tmp_path) == sorted([unsigned.name, elsewhere.name, other.name, Path(tried.path).name])


# ---- what is refused ----


def test_tensors_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with store(tmp_path, [16]) as tried:
        for tensor, said in [
            (torch.zeros(5), r"chunk 0 has 16 bytes, not 20 \(float32 of shape \(5,\) on cpu\)"),
            (torch.zeros(2, 4)[:, ::2], r"not float32 of shape \(2, 2\) on cpu with strides \(4, 2\). Try: tensor.cpu\(\).contiguous\(\)"),
            (torch.zeros(4, device="meta"), "not float32 of shape .* on meta"),
            (torch.zeros(2, dtype=torch.complex64).conj(), "needs contiguous memory of the host"),
        ]:
            for call in (tried.write, tried.read):
                with pytest.raises(DiskError, match=said):
                    call(0, tensor)
        with pytest.raises(DiskError, match=r"there is no chunk 1 in a store of 1. Try: 0 to 0"):
            tried.write(1, torch.zeros(4))


def test_settings_that_cannot_work_are_refused(tmp_path: Path) -> None:
    for options, said in [
        (dict(block_bytes=1000), "blocks of 1000 bytes: direct I/O needs a multiple of 4096"),
        (dict(threads=0), "0 threads with 16384 bytes of buffers move nothing. Try: 1 thread and 4096 bytes or more"),
        (dict(threads=4, buffers_bytes=4095), "4 threads with 4095 bytes of buffers move nothing"),
        (dict(sizes=[1, -2]), "chunk 1 has -2 bytes"),
    ]:
        with pytest.raises(DiskError, match=said):
            store(tmp_path, **options)
    assert folders(tmp_path) == []


def test_layout_begins_every_chunk_at_a_page() -> None:
    layout = DiskLayout.of([5000, 0, 8], PAGE)
    assert layout.offsets == (0, 8192, 8192, 12288) and layout.blocks == (0, 2, 2, 3)
