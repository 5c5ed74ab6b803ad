"""The store's threads: order, bounded memory, several stores and processes in one directory."""

import gc
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_disk import PAGE, content, disk_threads, folders, random_bytes, read, store, strangers, write  # noqa: F401

from colofunc.errors import DiskError
from colofunc.executors.disk import files as disk_files
from colofunc.executors.disk.store import DiskStore

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
    tried: Any = store(tmp_path, threads=4)
    tried.itself = tried  # found by the garbage collector only
    assert len(disk_threads()) == 4
    del tried
    gc.collect()
    assert folders(tmp_path) == [] and not disk_threads()


def test_the_end_of_the_process_cleans_up(tmp_path: Path, subprocess_env: dict[str, str]) -> None:
    code = (
        "import sys, os, torch; from colofunc.executors.disk.store import DiskStore\n"
        "store = DiskStore(sys.argv[1], [3])\n"
        "store.write(0, torch.zeros(3, dtype=torch.uint8))\n"
        "if os.fork() == 0: sys.exit()\n"  # ends as a process does, with what it has inherited
        "os.wait(); assert os.path.exists(store.path)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=subprocess_env)
    assert done.returncode == 0, done.stderr
    assert folders(tmp_path) == []


def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    with store(tmp_path) as tried:
        tried._files.owner += 1  # as it looks from there
        with pytest.raises(DiskError, match=rf"cannot commit to the store at .*: it is process {os.getpid() + 1}'s"):
            tried.commit()
        tried._files.owner -= 1


# ---- several stores ----


def test_processes_share_a_directory(tmp_path: Path) -> None:
    stores = [store(tmp_path, [3], rank=rank) for rank in (0, 1, 1)]
    for number, tried in enumerate(stores):
        assert f"rank{tried_rank(tried):05d}" in tried.path
        write(tried, 0, b"%d__" % number)
    for number, tried in enumerate(stores):
        assert read(tried, 0) == b"%d__" % number
        tried.close()
    assert folders(tmp_path) == []


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
