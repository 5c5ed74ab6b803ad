"""A save is there whole or not at all, whatever fails, and whoever else saves there; what `keep` removes."""

import errno
import multiprocessing
import os
import resource
import shutil
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import bits, state, tensors

import colofunc as cf
from colofunc.errors import CheckpointError, InputError
from colofunc.functional.checkpoint import disk, folder


def test_a_save_over_an_older_one_replaces_it(tmp_path) -> None:
    cf.save(tmp_path / "c", tensors(0))
    cf.save(tmp_path / "c", tensors(1))
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"]) and os.listdir(tmp_path) == ["c"]


def test_where_the_system_cannot_swap_it_renames_twice(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(folder, "swap_folders", lambda a, b: False)
    cf.save(tmp_path / "c", tensors(0))
    cf.save(tmp_path / "c", tensors(1))
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"]) and os.listdir(tmp_path) == ["c"]
    os.rename(tmp_path / "c", tmp_path / "c.old-0123456789ab")  # killed between the two
    assert bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(1)["w"])
    cf.save(tmp_path / "c", tensors(2))
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("where", ["write", "fsync", "rename"])
def test_a_failing_disk_leaves_the_last_one(tmp_path, monkeypatch, where) -> None:
    cf.save(tmp_path / "c", tensors(0))
    full_disk = OSError(errno.ENOSPC, "No space left on device")

    def fail(*args: Any) -> Any:
        raise full_disk

    owner, name = {"write": (disk, "write_at"), "fsync": (os, "fsync"), "rename": (folder.Writing, "_swap")}[where]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        says = "No space left on device; what was written is removed and the last checkpoint there is intact"
        with pytest.raises(CheckpointError, match=says):
            cf.save(tmp_path / "c", tensors(1))
    assert os.listdir(tmp_path) == ["c"] and bits(cf.load(tmp_path / "c")["w"]) == bits(tensors(0)["w"])
    cf.save(tmp_path / "c", tensors(1))


def limited(path: str, end: Connection) -> None:
    """What is said in a process whose files may not grow: the second format meets the checkpoint that the first has left."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    cf.save(path, {"w": torch.zeros(1000)})
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    for format in ("safetensors", "dcp"):
        try:
            cf.save(path, {"w": torch.ones(1_000_000)}, format=format)
        except cf.CheckpointError as error:
            end.send((format, " ".join(str(error).split())))
    end.send(None)


def another(work: Callable[..., None], path: Path) -> tuple[BaseProcess, Connection]:
    """A process that does `work(path, connection)`, from the server of warm processes, and the connection to it."""
    context = multiprocessing.get_context("forkserver")
    mine, its = context.Pipe()
    process = context.Process(target=work, args=(str(path), its))
    process.start()
    its.close()
    return process, mine


@pytest.mark.dist
def test_a_file_that_cannot_grow(tmp_path) -> None:
    process, connection = another(limited, tmp_path / "c")
    said = dict(iter(connection.recv, None))
    process.join()
    for format in ("safetensors", "dcp"):
        assert "File too large" in said[format], format
        assert "what was written is removed and the last checkpoint there is intact" in said[format], format
    assert os.listdir(tmp_path) == ["c"] and cf.load(tmp_path / "c")["w"].shape == (1000,)


def test_two_savers_of_one_folder(tmp_path) -> None:
    first = folder.Writing(tmp_path / "c")
    first.begin()
    with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on host .* is saving to .*c'; wait for it"):
        cf.save(tmp_path / "c", tensors())
    first.abandon()
    cf.save(tmp_path / "c", tensors())
    assert os.listdir(tmp_path) == ["c"]


def holds(path: str, end: Connection) -> None:
    """A save that waits for a word."""
    write = disk.write_at

    def slowly(*args: Any) -> None:
        end.send("writing")
        end.recv()
        write(*args)

    disk.write_at = slowly
    cf.save(path, {"w": torch.full((1000,), 1.0)})


def races_when_told(path: str, end: Connection) -> None:
    end.send("ready")
    end.recv()
    end.send(races(path, 1))


def races(path: str, who: int) -> int:
    """How many of many saves were done, not refused."""
    won = 0
    for _ in range(40):
        try:
            cf.save(path, {"who": who, "w": torch.full((5000,), float(won + 1)), "won": won + 1})
            won += 1
        except cf.CheckpointError as error:
            assert "is saving to" in str(error) and "wait for it, or save to another folder" in str(error), error
    return won


@pytest.mark.dist
def test_another_process_that_saves_there_is_named(tmp_path) -> None:
    """Two runs with one folder: the second one learns of the first, whose save is not touched."""
    cf.save(tmp_path / "c", {"w": torch.zeros(3)})
    other, connection = another(holds, tmp_path / "c")
    try:
        assert connection.recv() == "writing"
        with pytest.raises(CheckpointError, match=rf"process {other.pid} on host .* is saving to .*c'; wait for it, or save to"):
            cf.save(tmp_path / "c", {"w": torch.ones(3)})
        assert cf.load(tmp_path / "c")["w"].tolist() == [0, 0, 0]
        for _ in range(100):
            connection.send("go")
        other.join(60)
    finally:
        other.kill()
    assert other.exitcode == 0 and cf.load(tmp_path / "c")["w"].shape == (1000,) and os.listdir(tmp_path) == ["c"]


@pytest.mark.dist
def test_two_processes_that_save_to_one_folder_all_the_time(tmp_path) -> None:
    """Whatever the order: each save is done or refused, and the folder holds one that was done, whole."""
    other, connection = another(races_when_told, tmp_path / "c")
    try:
        assert connection.recv() == "ready"
        connection.send("go")
        mine = races(tmp_path / "c", 0)
        won = [mine, connection.recv()]
        other.join(60)
    finally:
        other.kill()
    got = cf.load(tmp_path / "c")
    assert sum(won) > 0 and got["won"] == won[got["who"]] and os.listdir(tmp_path) == ["c"]
    assert torch.equal(got["w"], torch.full((5000,), float(got["won"])))


def killed_at(path: Any) -> folder.Writing:
    """A save whose process has ended in the middle."""
    writing = folder.Writing(path)
    writing.begin()
    os.close(writing._lock._fd)  # as the end of its process does
    return writing


def test_what_a_killed_save_left_is_removed(tmp_path) -> None:
    (killed_at(tmp_path / "c").folder / "rank-00000-00000.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        cf.load(tmp_path / "c")
    cf.save(tmp_path / "c", tensors())
    assert os.listdir(tmp_path) == ["c"]


def test_a_file_in_the_way(tmp_path) -> None:
    (tmp_path / "c").write_text("notes")
    with pytest.raises(CheckpointError, match="is a file; a checkpoint is a folder"):
        cf.save(tmp_path / "c", tensors())
    assert (tmp_path / "c").read_text() == "notes"


def test_keep_and_the_last_one(tmp_path) -> None:
    for k in (1, 2, 9, 10, 11):
        cf.save(tmp_path / f"step-{k}", {"k": k}, keep=3)
    (tmp_path / "step-99").mkdir()  # no checkpoint
    assert sorted(os.listdir(tmp_path)) == ["step-10", "step-11", "step-9", "step-99"]
    assert cf.load(tmp_path / "step-*")["k"] == 11
    with pytest.raises(CheckpointError, match="no checkpoint matches"):
        cf.load(tmp_path / "run-*")
    with pytest.raises(InputError, match="keep=0"):
        cf.save(tmp_path / "step-1", {}, keep=0)


# ---- what `keep` removes ----


def test_keep_removes_what_killed_saves_left_under_other_names(tmp_path) -> None:
    cf.save(tmp_path / "step-1", state())
    held = folder.Writing(tmp_path / "step-2")
    held.begin()
    killed_at(tmp_path / "step-3")
    cf.save(tmp_path / "step-4", state())
    (tmp_path / "step-4").rename(tmp_path / "step-4.gone-0123456789ab")  # killed while it was being removed
    cf.save(tmp_path / "step-5", state(), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-2.colofunc-lock", held.folder.name, "step-5"]
    held.abandon()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-5"]


def test_older_ones_that_cannot_be_removed(tmp_path, monkeypatch) -> None:
    cf.save(tmp_path / "step-1", {"x": torch.ones(1)})
    real = os.rename

    def refuse(path: Any, target: Any) -> None:
        if str(path).endswith("step-1"):
            raise PermissionError(errno.EACCES, "no", str(path))
        real(path, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(CheckpointError, match=r"step-2' is saved, but an older one could not be removed"):
        cf.save(tmp_path / "step-2", {"x": torch.ones(1)}, keep=1)
    assert int(cf.load(tmp_path / "step-*")["x"]) == 1


def test_a_folder_that_is_given_up_is_gone_at_once(tmp_path) -> None:
    """Other ranks may be writing into it, so removing it file by file may leave it there, and they would wait."""
    writing = folder.Writing(tmp_path / "c")
    writing.begin()
    real = shutil.rmtree

    def late(path: Any, **options: Any) -> None:
        assert not writing.folder.exists()
        real(path, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", late)
        writing.abandon()
    assert not os.listdir(tmp_path)


def test_a_link_stays_a_link(tmp_path) -> None:
    cf.save(tmp_path / "a", {"x": torch.ones(1)})
    (tmp_path / "latest").symlink_to("a")
    cf.save(tmp_path / "latest", {"x": torch.zeros(1)})
    assert (tmp_path / "latest").is_symlink() and cf.load(tmp_path / "a")["x"] == 0
    assert sorted(os.listdir(tmp_path)) == ["a", "latest"]
