"""Saves in the background: the values of their moment, errors where one waits, an end before the process's own."""

import errno
import importlib
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from saved import MESH, tensors

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.executors.launch import launch
from colofunc.functional.checkpoint import disk, files

saves: Any = importlib.import_module("colofunc.functional.save")


def test_a_background_save_holds_the_values_of_its_moment(tmp_path, monkeypatch) -> None:
    go = threading.Event()
    write = disk.write_at
    monkeypatch.setattr(disk, "write_at", lambda *args: go.wait(30) and write(*args))
    x, y = torch.zeros(1000), cf.distribute(torch.zeros(8), "(dp a)", MESH)
    saving = cf.save(tmp_path / "c", {"x": x, "y": y}, wait=False)
    assert not saving.done and "running" in repr(saving)
    x.fill_(1)
    y.add_(1)
    go.set()
    saving.wait()
    got = cf.load(tmp_path / "c")
    assert saving.done and got["x"].sum() == 0 and got["y"].sum() == 0


def test_a_save_says_that_it_waits_for_the_last_one(tmp_path, monkeypatch) -> None:
    go = threading.Event()
    write = disk.write_at
    monkeypatch.setattr(disk, "write_at", lambda *args: go.wait(30) and write(*args))
    monkeypatch.setattr(saves, "SAY_AFTER_S", 0.01)
    saving = cf.save(tmp_path / "a", tensors(), wait=False)
    threading.Timer(0.2, go.set).start()
    with pytest.warns(UserWarning, match=r"waits for the save to '.*a' in the background") as said:
        cf.save(tmp_path / "b", tensors())
    assert saving.done and (tmp_path / "b").exists() and said[0].filename == __file__


def test_what_goes_wrong_in_the_background_is_raised_by_wait_or_the_next_save(tmp_path, monkeypatch) -> None:
    def fail(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk, "write_at", fail)
        with pytest.raises(CheckpointError, match="No space left"):
            cf.save(tmp_path / "c", tensors(), wait=False).wait()
        forgotten = cf.save(tmp_path / "c", tensors(), wait=False)
        while not forgotten.done:
            time.sleep(0.01)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        cf.save(tmp_path / "d", tensors())
    assert "an earlier save" in caught.value.__notes__[0]
    assert os.listdir(tmp_path) == []
    cf.save(tmp_path / "d", tensors())


ENDS = """
import sys, torch
import colofunc as cf
cf.save(sys.argv[1], {"w": torch.ones(2_000_000)}, wait=False)
"""


def test_a_background_save_ends_before_the_interpreter(tmp_path, subprocess_env) -> None:
    subprocess.run([sys.executable, "-c", ENDS, str(tmp_path / "c")], env=subprocess_env, check=True, timeout=120)
    assert cf.load(tmp_path / "c")["w"].sum() == 2_000_000 and os.listdir(tmp_path) == ["c"]


# ---- on a rank ----


def saves_behind_and_returns(path: str) -> None:
    make, started = files.write_file, threading.Event()

    def slow(*args: Any) -> Any:
        started.set()
        time.sleep(0.5)
        return make(*args)

    importlib.import_module("colofunc.functional.save").write_file = slow
    cf.save(path, {"x": torch.ones(3)}, wait=False)
    assert started.wait(10)


@pytest.mark.dist
def test_a_launched_rank_ends_its_background_save(tmp_path) -> None:
    launch(saves_behind_and_returns, 1, str(tmp_path / "c"), timeout_s=100)
    assert cf.load(tmp_path / "c")["x"].tolist() == [1, 1, 1]
