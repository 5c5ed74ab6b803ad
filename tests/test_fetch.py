"""Reading blocks of a file: the same bytes by every way, at every offset; who waits, who fails, what is left behind."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from colofunc.functional.checkpoint import disk as module
from colofunc.functional.checkpoint.disk import fetch

SIZE = 3 * 4096 + 77


@pytest.fixture
def file(tmp_path: Path) -> tuple[Path, bytes]:
    data = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
    (tmp_path / "data").write_bytes(data)
    return tmp_path / "data", data


def blocks_of(spans: list[tuple[int, int]]) -> list[tuple[int, memoryview]]:
    return [(at, memoryview(bytearray(length))) for at, length in spans]


SPANS = [(0, 4096), (4096, 100), (1, 4095), (5000, 7000), (8191, 2), (SIZE - 77, 77), (0, SIZE), (3, 0)]


@pytest.mark.parametrize("way", ["one thread", "cached", "direct", "refused", "no flag"])
def test_every_way_reads_the_same_bytes(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    path, data = file
    monkeypatch.setattr(module, "FROM_BYTES", 1 << 30 if way == "one thread" else 1)
    monkeypatch.setattr(module, "_cached", lambda *_: way == "cached")
    if way == "refused":
        monkeypatch.setattr(module, "_read_direct", lambda *_: None)
    if way == "no flag":
        monkeypatch.setattr(module, "DIRECT", 0)
    blocks, counts = blocks_of(SPANS), {}
    fetch(path, blocks, counts.__setitem__)
    assert counts == dict(enumerate(length for _, length in SPANS))
    assert all(bytes(memory) == data[at : at + len(memory)] for at, memory in blocks)


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_ends_early_says_how_much_it_had(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, cached: bool) -> None:
    path, data = file
    monkeypatch.setattr(module, "FROM_BYTES", 1)
    monkeypatch.setattr(module, "_cached", lambda *_: cached)
    blocks, counts = blocks_of([(SIZE - 10, 5000), (SIZE + 9000, 10), (0, SIZE + 1)]), {}
    fetch(path, blocks, counts.__setitem__)
    assert counts == {0: 10, 1: 0, 2: SIZE} and bytes(blocks[0][1][:10]) == data[-10:]


def test_the_first_error_is_raised_when_all_threads_are_done(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FROM_BYTES", 1)
    running: set[int] = set()

    def done(k: int, count: int) -> None:
        running.add(k)
        try:
            if k >= 5:
                raise ValueError(k)
        finally:
            running.discard(k)

    with pytest.raises(ValueError, match="5"):
        fetch(file[0], blocks_of([(4 * k, 4) for k in range(200)]), done)
    assert not running


@pytest.mark.parametrize(("error", "cached"), [(None, True), (BlockingIOError, False), (OSError, True)])
def test_what_is_in_the_page_cache_is_read_from_there(
    file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch, error: type[OSError] | None, cached: bool
) -> None:
    """A look that would wait says that it is not there; a file system that knows no such look is read the usual way."""

    def look(fd: int, buffers: list[bytearray], at: int, flags: int) -> int:
        if error is not None and at == 8192:
            raise error
        return 1

    monkeypatch.setattr(module.os, "preadv", look)
    assert module._cached(file[0], blocks_of([(0, 4096), (8192, 4096)])) is cached


def test_a_child_process_reads_too(file: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of its parent's threads, so that a pool of theirs would wait for ever."""
    monkeypatch.setattr(module, "FROM_BYTES", 1)
    monkeypatch.setattr(module, "_cached", lambda *_: False)
    fetch(file[0], blocks_of(SPANS), lambda k, count: None)
    child = os.fork()
    if not child:
        try:
            signal.alarm(60)
            fetch(file[0], blocks_of(SPANS), lambda k, count: None)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
