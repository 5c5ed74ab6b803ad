"""The store when something is wrong: damage, no directory, no room, file systems without direct I/O."""

import errno
import fcntl
import os
import re
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_disk import PAGE, content, disk_threads, folders, random_bytes, read, store, strangers, write  # noqa: F401

from colofunc.errors import DiskError
from colofunc.executors.disk.layout import checksum

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
    with store(tmp_path, [3, 9000]) as tried:
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
        tried.rollback()
        assert read(tried, 0) == b"one" and read(tried, 1) == b"2" * 9000


def test_a_directory_that_is_removed_under_way(tmp_path: Path) -> None:
    with store(tmp_path, [3]) as tried:
        write(tried, 0, b"one")
        tried.commit()
        shutil.rmtree(tried.path)
        with pytest.raises(DiskError, match=r"cannot write chunk 0, .*version-1': the file was removed. Try: name a directory"):
            write(tried, 0, b"two")
        tried.rollback()
        assert read(tried, 0) == b"one"
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
