"""The disk tier: what is read is what was written, and a failure or a kill leaves the last commit."""

import errno
import fcntl
import gc
import json
import os
import re
import resource
import shutil
import subprocess
import sys
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
from colofunc.executors import disk_files
from colofunc.executors.disk import DiskStore, aligned_empty
from colofunc.executors.disk_layout import Layout, checksum, disk_bytes

PAGE = 4096
EDGES = [0, 1, 511, 512, 513, 4095, 4096, 4097, 8191, 8192, 12289]


def store(directory: Any, sizes: Any = (5000, 3), **options: Any) -> DiskStore:
    return DiskStore(directory, sizes, **{"block_bytes": PAGE, "buffers_bytes": 4 * PAGE} | options)


def random_bytes(seed: int, size: int, shift: int = 0) -> torch.Tensor:
    """A tensor whose memory begins `shift` bytes after a page."""
    whole = aligned_empty(size + shift)
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


def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("colofunc-disk")]


# ---- bytes ----

CHUNKS, SHIFT = st.integers(0, len(EDGES) - 1), st.sampled_from([0, 0, 1, 64])
DOINGS = st.one_of(
    st.tuples(st.just("write"), CHUNKS, SHIFT),
    st.tuples(st.just("read"), CHUNKS, SHIFT),
    st.sampled_from([("commit",), ("rollback",), ("reopen",), ("wait",)]),
)


@given(st.lists(DOINGS, max_size=40), st.integers(1, 3))
def test_any_sequence_reads_what_a_dict_holds(doings: list[Any], threads: int) -> None:
    last: dict[int, bytes] = {}
    now: dict[int, bytes] = {}
    tickets, expected = [], []
    with tempfile.TemporaryDirectory() as directory:
        tried = store(directory, EDGES, threads=threads, keep=True)
        for number, (doing, *given) in enumerate([*doings, ("wait",), ("commit",), ("reopen",)]):
            if doing == "write":
                data = random_bytes(number, EDGES[given[0]], given[1])
                tickets.append(tried.write(given[0], data))
                now[given[0]] = content(data)
            elif doing == "read" and given[0] in now:
                into = random_bytes(999, EDGES[given[0]], given[1])
                tickets.append(tried.read(given[0], into))
                expected.append((into, now[given[0]]))
            elif doing == "commit":
                tried.commit(note=str(number))
                last = dict(now)
            elif doing == "rollback":
                tried.rollback()
                now = dict(last)
            elif doing in ("wait", "reopen"):
                for ticket in tickets:
                    ticket.wait(60)
                tickets.clear()
                assert all(content(into) == data for into, data in expected)
            if doing == "reopen":
                tried.close()
                if not last and not list(Path(directory).rglob("index")):
                    return
                tried, now = DiskStore.open(directory, threads=threads), dict(last)
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


def test_rollback_and_reopen_go_to_the_last_commit(tmp_path: Path) -> None:
    with store(tmp_path, [3], keep=True) as tried:
        write(tried, 0, b"one")
        tried.commit("step 1")
        write(tried, 0, b"two")
        assert read(tried, 0) == b"two"
        tried.rollback()
        assert read(tried, 0) == b"one"
        write(tried, 0, b"bad")
    with DiskStore.open(tmp_path) as again:
        assert read(again, 0) == b"one" and again.note == "step 1"


def test_a_commit_that_cannot_replace_the_index_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with store(tmp_path, [3, 3], keep=True) as tried:
        write(tried, 0, b"one")
        tried.commit()
        write(tried, 0, b"two")
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", refuse)
            with pytest.raises(DiskError, match=r"nothing is committed, the index cannot be replaced in '.*': Input/output error"):
                tried.commit()
    with DiskStore.open(tmp_path) as again:
        assert read(again, 0) == b"one"
        with pytest.raises(DiskError, match="chunk 1 was never written"):
            again.read(1, torch.empty(3, dtype=torch.uint8))


def test_a_durable_commit_flushes_data_before_the_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    with store(tmp_path) as tried:
        write(tried, 1, b"abc")
        for name in ("fdatasync", "fsync", "replace"):
            real = getattr(os, name)
            monkeypatch.setattr(os, name, lambda *a, name=name, real=real, **k: (calls.append(name), real(*a, **k)))
        tried.commit()
        assert calls == ["replace"]
        tried.commit(durable=True)
    assert calls[1:] == ["fdatasync", "fdatasync", "fsync", "replace", "fsync"]


KILLED = """
import itertools, os, signal, sys, torch
from colofunc.executors.disk import DiskStore

def train(directory, keep, said):
    store = DiskStore(directory, [100_000, 3, 70_000], block_bytes=4096, buffers_bytes=16384, keep=keep)
    for step in itertools.count(1):
        for k, size in enumerate(store.sizes):
            store.write(k, torch.full((size,), step % 251, dtype=torch.uint8))
        store.commit(str(step))
        os.write(said, b".")

for number, directory in enumerate(sys.argv[1:]):
    heard, said = os.pipe()
    child = os.fork()
    if child == 0:
        train(directory, "keep" in directory, said)
    for _ in range(1 + 3 * number):
        os.read(heard, 1)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_a_killed_process_leaves_its_last_commit(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    kept, left = [tmp_path / f"keep{k}" for k in range(8)], tmp_path / "leave"
    for path in (*kept, left):
        path.mkdir()
    living = store(left)
    subprocess.run([sys.executable, "-c", KILLED, *map(str, (*kept, left))], check=True, env=subprocess_env)
    for number, path in enumerate(kept):
        with DiskStore.open(path, rank=0) as found:
            step = int(found.note)
            assert step >= 1 + 3 * number
            for chunk, size in enumerate(found.sizes):
                assert read(found, chunk) == bytes([step % 251]) * size
            write(found, 1, b"new")
            found.commit("on")
        with DiskStore.open(path, keep=False) as found:
            assert read(found, 1) == b"new" and found.note == "on"
        assert folders(path) == []
    assert len(folders(left)) == 2
    with store(left, rank=3) as mine:  # removes what the killed process did not keep
        assert folders(left) == sorted(Path(s.path).name for s in (living, mine))
    living.close()


def test_half_made_and_foreign_folders_are_not_taken_for_dead_stores(tmp_path: Path) -> None:
    bare, unsigned, elsewhere, other = (tmp_path / f"colofunc-disk-rank00000-{k}" for k in "abcd")
    for path in (bare, unsigned, elsewhere, other):
        path.mkdir()
    (unsigned / "lock").touch()
    (elsewhere / "lock").write_text(json.dumps({"host": "another host", "pid": 1, "rank": 0, "keep": False}))
    (other / "precious").touch()
    with store(tmp_path) as tried:
        assert folders(tmp_path) == sorted([unsigned.name, elsewhere.name, other.name, Path(tried.path).name])


def test_what_is_kept_is_removed_by_nobody_else(tmp_path: Path) -> None:
    with store(tmp_path, [3], keep=True) as first:
        write(first, 0, b"one")
        first.commit()
    with store(tmp_path, [3]):
        assert len(folders(tmp_path)) == 2
    with DiskStore.open(tmp_path) as again:
        assert again.path == first.path and read(again, 0) == b"one"


# ---- damage ----


@given(st.sampled_from([1, 511, 4096, 4097, 20000]), st.data())
def test_a_checksum_sees_a_change_within_a_word_and_whole_pages(size: int, data: st.DataObject) -> None:
    block = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before, bad = checksum(block), block.copy()
    bad[data.draw(st.integers(0, size - 1))] ^= data.draw(st.integers(1, 255))
    assert checksum(bad) != before
    if size > 2 * PAGE:
        first, second = data.draw(st.permutations(range(size // PAGE)))[:2]
        lost, swapped = block.copy(), block.copy()
        lost[first * PAGE + 512 : first * PAGE + 1024] = 0  # one sector
        swapped.resize(size // PAGE * PAGE)
        pages = swapped.reshape(-1, PAGE)
        pages[[first, second]] = pages[[second, first]]
        assert before not in (checksum(lost), checksum(np.concatenate([swapped, block[len(swapped) :]])))


def test_damaged_data_is_an_error_with_chunk_file_and_bytes(tmp_path: Path) -> None:
    with store(tmp_path, [10, 9000]) as tried:
        write(tried, 0, bytes(10))
        write(tried, 1, bytes(9000))
        tried.commit()
        file = Path(tried.path) / "version-0"
        with open(file, "r+b") as raw:
            raw.seek(PAGE + 4096 + 17)
            raw.write(b"\1")
        into = torch.zeros(9000, dtype=torch.uint8)
        said = f"chunk 1, bytes 4096 to 8192 of it, at byte 8192 of '{file}' is not what was written: checksum "
        with pytest.raises(DiskError, match=re.escape(said)):
            tried.read(1, into).wait(60)
        assert read(tried, 0) == bytes(10)
        write(tried, 1, b"\2" * 9000)
        assert read(tried, 1) == b"\2" * 9000


@pytest.mark.parametrize("name", ["index", "version-1"])
def test_a_damaged_or_incomplete_store_is_not_opened(tmp_path: Path, name: str) -> None:
    with store(tmp_path, keep=True) as tried:
        write(tried, 1, b"abc")
        tried.commit()
    file = Path(tried.path) / name
    if name == "index":
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    else:
        file.unlink()
    with pytest.raises(DiskError, match="is damaged: its checksum" if name == "index" else "cannot open the store at .*: No such file"):
        DiskStore.open(tmp_path)
    assert Path(tried.path).exists() and not disk_threads()


def test_a_file_that_was_cut_is_an_error(tmp_path: Path) -> None:
    with store(tmp_path, [8192]) as tried:
        write(tried, 0, bytes(8192))
        os.truncate(Path(tried.path) / "version-0", 4096)
        with pytest.raises(DiskError, match=r"chunk 0, bytes 4096 to 8192 of it.*the file ends at byte 4096"):
            tried.read(0, torch.zeros(8192, dtype=torch.uint8)).wait(60)


# ---- no directory, no room ----


def test_a_directory_must_be_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"the disk directory '.*missing' does not exist. Try: mkdir -p "):
        store(tmp_path / "missing")
    with pytest.raises(DiskError, match=r"the disk directory '.*file' is a file. Try: name a directory"):
        store(tmp_path / "file")
    with pytest.raises(DiskError, match=r"there is no directory '.*missing'"):
        DiskStore.open(tmp_path / "missing")
    with pytest.raises(DiskError, match=r"holds no store that can be opened: nothing was committed there"):
        DiskStore.open(tmp_path)
    assert not disk_threads()


@pytest.mark.parametrize("why", [errno.EACCES, errno.EROFS])
def test_a_directory_must_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: int) -> None:
    def refuse(path: Any, *args: Any) -> None:  # the superuser may write everywhere
        raise OSError(why, os.strerror(why), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    said = f"cannot make a store in '{tmp_path}': {os.strerror(why)}. Try: name a directory that this user may write to"
    with pytest.raises(DiskError, match=re.escape(said)):
        store(tmp_path)


def test_too_little_room_names_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(tmp_path)
    free = type(real)((*real[:4], 3, *real[5:]))  # the fifth: free blocks for users
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    with store(tmp_path, [1]) as other:
        with pytest.raises(DiskError) as found:
            store(tmp_path, [PAGE, 2 * PAGE])
    told = str(found.value)
    assert f"'{tmp_path}' has too little room (needed: 24 KiB = 24576 bytes for two versions of every chunk (2)" in told
    assert f"free: {size(3 * real.f_frsize)} = {3 * real.f_frsize} bytes" in told and Path(other.path).name in told
    assert told.endswith("Try: free space there, or name a directory of a larger file system")


def size(nbytes: int) -> str:
    return f"{nbytes // 1024} KiB"


@pytest.fixture
def file_limit() -> Any:
    """Sets the most bytes that a file of this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_cannot_be_allocated_leaves_nothing(tmp_path: Path, file_limit: Any) -> None:
    file_limit(10_000)
    with pytest.raises(DiskError, match=r"cannot allocate in '.*': File too large \(needed: 192 KiB = 196608 bytes .*ulimit -f"):
        store(tmp_path, [98304])
    assert folders(tmp_path) == [] and not disk_threads()


def test_a_write_that_fails_commits_nothing_and_can_be_tried_again(tmp_path: Path, file_limit: Any) -> None:
    with store(tmp_path, [3, 9000], keep=True) as tried:
        write(tried, 0, b"one")
        write(tried, 1, b"1" * 9000)
        tried.commit()
        write(tried, 0, b"two")
        file_limit(8192)  # a write of the second chunk reaches the limit after its first block
        ticket = tried.write(1, random_bytes(1, 9000))
        said = rf"cannot write chunk 1, bytes \d+ to \d+ of it, at byte \d+ of '{tried.path}/version-1': File too large"
        with pytest.raises(DiskError, match=said):
            ticket.wait(60)
        with pytest.raises(DiskError, match="nothing is committed, because chunk 1 was not written"):
            tried.commit()
        with pytest.raises(DiskError, match="chunk 1 cannot be read, its last write failed"):
            read(tried, 1)
        tried.rollback()
        assert read(tried, 0) == b"one" and read(tried, 1) == b"1" * 9000
        with pytest.raises(DiskError, match=said):
            write(tried, 1, b"2" * 9000)
        file_limit(resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        write(tried, 1, b"2" * 9000)
        tried.commit()
    with DiskStore.open(tmp_path) as again:
        assert read(again, 0) == b"one" and read(again, 1) == b"2" * 9000


def test_a_directory_that_is_removed_under_way(tmp_path: Path) -> None:
    with store(tmp_path, [3]) as tried:
        write(tried, 0, b"one")
        tried.commit()
        shutil.rmtree(tried.path)
        with pytest.raises(DiskError, match=r"cannot write chunk 0, .*version-1': the file was removed. Try: name a directory"):
            write(tried, 0, b"two")
        tried.rollback()
        assert read(tried, 0) == b"one"
        with pytest.raises(DiskError, match=r"nothing is committed, the index cannot be replaced in .*: No such file or directory"):
            tried.commit()
    assert folders(tmp_path) == [] and not disk_threads()


# ---- file systems without direct I/O ----


@pytest.mark.parametrize("refuses", ["the flag", "the call"])
def test_without_direct_io_bytes_go_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    def flagged(fd: int) -> bool:
        return bool(control(fd, fcntl.F_GETFL) & os.O_DIRECT)

    def set_flags(fd: int, what: int, *args: Any) -> int:
        if what == fcntl.F_SETFL and args[0] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O here")
        return control(fd, what, *args)

    def call(real: Any) -> Any:
        def moved(fd: int, *args: Any) -> int:
            if flagged(fd):
                raise OSError(errno.EINVAL, "not aligned")
            return real(fd, *args)

        return moved

    control = fcntl.fcntl
    if refuses == "the flag":
        monkeypatch.setattr(fcntl, "fcntl", set_flags)
    for name in ("pwritev", "preadv"):
        monkeypatch.setattr(os, name, call(getattr(os, name)))
    data = random_bytes(1, 9000)
    with store(tmp_path, [9000]) as tried:
        tried.write(0, data).wait(60)
        assert not tried.direct and read(tried, 0, 1) == content(data)


def test_calls_that_move_less_than_asked_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda fd, buffers, at, real=real: real(fd, [buffers[0][:1000]], at))
    data = random_bytes(1, 9000)
    with store(tmp_path, [9000]) as tried:
        tried.write(0, data).wait(60)
        assert read(tried, 0) == content(data)


@pytest.mark.parametrize(("size", "shift", "in_place"), [(2 * PAGE, 0, 2), (2 * PAGE, 64, 0), (2 * PAGE + 8, 0, 2)])
def test_aligned_memory_is_moved_from_and_to_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, shift: int, in_place: int
) -> None:
    addresses: list[int] = []
    for name in ("pwritev", "preadv"):
        real = getattr(os, name)
        noted = lambda fd, buffers, at, real=real: (addresses.append(buffers[0].ctypes.data), real(fd, buffers, at))[1]  # noqa: E731
        monkeypatch.setattr(os, name, noted)
    data, into = random_bytes(1, size, shift), random_bytes(2, size, shift)
    with store(tmp_path, [size]) as tried:
        tried.write(0, data).wait(60)
        tried.read(0, into).wait(60)
    assert content(into) == content(data) and all(address % PAGE == 0 for address in addresses)
    for tensor in (data, into):
        lies = range(tensor.data_ptr(), tensor.data_ptr() + size)
        assert sum(address in lies for address in addresses) == in_place


# ---- threads, order, memory ----


class Gate:
    """Holds every write of the process until it is opened, and counts the bytes that are held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened, self.changed = threading.Event(), threading.Condition()
        self.held = self.most = self.passed = 0
        self.real = os.pwritev
        monkeypatch.setattr(os, "pwritev", self)

    def __call__(self, fd: int, buffers: Any, at: int) -> int:
        nbytes = sum(len(buffer) for buffer in buffers)
        self.count(nbytes)
        assert self.opened.wait(60)
        moved = self.real(fd, buffers, at)
        self.passed += 1
        self.count(-nbytes)
        return moved

    def count(self, nbytes: int) -> None:
        with self.changed:
            self.held += nbytes
            self.most = max(self.most, self.held)
            self.changed.notify_all()

    def wait_until(self, nbytes: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.held >= nbytes, 60)


@pytest.mark.parametrize("shift", [0, 64])
def test_no_more_bytes_are_under_way_than_the_buffers_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    gate = Gate(monkeypatch)
    data = [random_bytes(k, 5 * PAGE, shift) for k in range(20)]
    with store(tmp_path, [5 * PAGE] * 20, threads=8, buffers_bytes=3 * PAGE) as tried:
        assert len(disk_threads()) == 3
        tickets = [tried.write(k, x) for k, x in enumerate(data)]
        gate.wait_until(3 * PAGE)
        assert not any(ticket.done for ticket in tickets)
        with pytest.raises(DiskError, match=r"writing chunk 0 to .* has not ended after 0.01 s"):
            tickets[0].wait(0.01)
        gate.opened.set()
        for ticket in tickets:
            ticket.wait(60)
        assert gate.most == 3 * PAGE and gate.passed == 100
        assert all(read(tried, k) == content(x) for k, x in enumerate(data))


def test_a_read_waits_for_the_write_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    with store(tmp_path, [3, 3]) as tried:
        gate.opened.set()
        write(tried, 0, b"old")
        write(tried, 1, b"two")
        gate.opened.clear()
        written = tried.write(0, torch.tensor(list(b"new"), dtype=torch.uint8))
        into = torch.zeros(3, dtype=torch.uint8)
        seen = tried.read(0, into)
        assert read(tried, 1) == b"two"  # another chunk does not wait
        assert not written.done and not seen.done
        gate.opened.set()
        seen.wait(60)
        assert written.done and content(into) == b"new"


def test_closing_fails_what_has_not_ended_and_ends_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    tried = store(tmp_path, [3, 2 * PAGE], threads=1)
    tickets = [tried.write(k, random_bytes(k, size)) for k, size in enumerate(tried.sizes)]
    gate.wait_until(PAGE)
    closing = threading.Thread(target=tried.close)
    closing.start()
    while not tried._workers._stopping:
        pass
    gate.opened.set()
    closing.join()
    tickets[0].wait(60)
    with pytest.raises(DiskError, match="the store was closed before this ended"):
        tickets[1].wait(60)
    tried.close()
    assert gate.passed == 1 and folders(tmp_path) == [] and not disk_threads()
    for call in (tried.commit, tried.rollback, lambda: read(tried, 0)):
        with pytest.raises(DiskError, match="it is closed"):
            call()


def test_a_store_that_nobody_has_any_more_is_closed(tmp_path: Path) -> None:
    tried: Any = store(tmp_path)
    tried.itself = tried  # found by the garbage collector only
    assert len(disk_threads()) == 4
    del tried
    gc.collect()
    assert folders(tmp_path) == [] and not disk_threads()


def test_the_end_of_the_process_cleans_up(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    code = (
        "import sys, os, torch; from colofunc.executors.disk import DiskStore\n"
        "stores = [DiskStore(sys.argv[1], [3], keep=keep) for keep in (True, False)]\n"
        "stores[1].write(0, torch.zeros(3, dtype=torch.uint8))\n"
        "if os.fork() == 0: sys.exit()\n"  # ends as a process does, with what it has inherited
        "os.wait(); assert all(os.path.exists(store.path) for store in stores); print(stores[0].path)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert folders(tmp_path) == [Path(done.stdout.strip()).name]


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    with store(tmp_path) as tried:
        tried._files.owner += 1  # as it looks from there
        with pytest.raises(DiskError, match=rf"cannot commit to the store at .*: it is process {os.getpid() + 1}'s"):
            tried.commit()
        tried._files.owner -= 1


# ---- several stores ----


def test_processes_share_a_directory(tmp_path: Path) -> None:
    stores = [store(tmp_path, [3], rank=rank, keep=True) for rank in (0, 1, 1)]
    for number, tried in enumerate(stores):
        assert f"rank{tried_rank(tried):05d}" in tried.path
        write(tried, 0, b"%d__" % number)
        tried.commit()
    with pytest.raises(DiskError, match=rf"holds no store of rank 0 .*rank00000-\w+ is in use by process {os.getpid()} on "):
        DiskStore.open(tmp_path, rank=0)
    for tried in stores:
        tried.close()
    with DiskStore.open(tmp_path, rank=0) as found:
        assert read(found, 0) == b"0__"
    with pytest.raises(DiskError, match=r"holds 2 stores of rank 1: .*Try: open one of them by its own path"):
        DiskStore.open(tmp_path, rank=1)
    with DiskStore.open(stores[2].path, keep=False) as found:
        assert read(found, 0) == b"2__"
    with DiskStore.open(tmp_path, rank=1) as found:
        assert read(found, 0) == b"1__"


def tried_rank(tried: DiskStore) -> int:
    return int(json.loads((Path(tried.path) / "lock").read_text())["rank"])


def test_a_folder_swept_while_it_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, swept = os.open, []

    def open_after_sweep(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if str(path).endswith("lock") and flags & os.O_CREAT and not swept:
            swept.append(path)
            monkeypatch.setattr(os, "open", real)
            disk_files._sweep(tmp_path)
        return real(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_after_sweep)
    with store(tmp_path) as tried:
        assert len(swept) == 1 and folders(tmp_path) == [Path(tried.path).name]


def test_a_lock_whose_owner_has_just_removed_it_is_not_taken(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    (tmp_path / "lock").unlink()
    assert not disk_files._lock(fd)


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
        (dict(buffers_bytes=4095), "4 threads with 4095 bytes of buffers move nothing"),
        (dict(sizes=[1, -2]), "chunk 1 has -2 bytes"),
    ]:
        with pytest.raises(DiskError, match=said):
            store(tmp_path, **options)
    assert folders(tmp_path) == []


def test_layout_begins_every_chunk_at_a_page() -> None:
    layout = Layout.of([5000, 0, 8], PAGE)
    assert layout.offsets == (0, 8192, 8192, 12288) and layout.blocks == (0, 2, 2, 3)
