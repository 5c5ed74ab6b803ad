"""Saving and loading of state on disk: part by part, beside the next steps, with the numbers of the moment of the call."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from test_disk_state import equal, fulls, on_disk
from test_offload import one, peak, training

import colofunc as cf
from colofunc.errors import CheckpointError
from colofunc.executors.disk import DiskStore
from colofunc.executors.disk_held import Held, Holds


def test_it_is_saved_part_by_part_and_loaded_when_a_step_takes_it(tmp_path: Path) -> None:
    step, *args = training(layers=2)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    state, _ = staged(staged.init(*args), args[1])
    cf.save(tmp_path / "saved" / "s", state)
    want, _ = staged(state, args[1])
    loaded = cf.load(tmp_path / "saved" / "s", mesh=one())
    assert all(part.store is None for part in on_disk(loaded)) and loaded["params"]["2.weight"].sharding.tier == "disk"
    found, _ = staged(loaded, args[1])
    assert equal(fulls(found), fulls(want)) and all(part.store is not None for part in on_disk(found))


class Slow:
    """A save that reads nothing from disk until it is told to; `waiting`: a step has come to what is not read yet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.waiting = threading.Event(), threading.Event()
        read, wait = Held.read, Holds.wait

        def slow(held: Held) -> torch.Tensor:
            assert self.go.wait(60)
            return read(held)

        def noted(holds: Holds, chunk: int, version: int) -> None:
            if holds._counts.get((chunk, version)):
                self.waiting.set()
            wait(holds, chunk, version)

        monkeypatch.setattr(Held, "read", slow)
        monkeypatch.setattr(Holds, "wait", noted)


@pytest.mark.parametrize("share", [None, 0.6])
def test_saved_are_the_numbers_of_the_call_although_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: Any) -> None:
    """With a share only part of the state lies on disk; what lies in memory is written when the call returns."""
    step, *args = training(layers=2)
    base = cf.shard(step, one())
    room = {} if share is None else {"host": int(share * peak(cf.offload(base, policy="host"), *args, tier="host"))}
    staged = cf.offload(base, policy="disk" if share is None else "host", disk=tmp_path / "disk", **room)
    (tmp_path / "disk").mkdir()
    plain = cf.shard(step, one())
    state, want = staged(staged.init(*args), args[1])[0], plain(plain.init(*args), args[1])[0]
    then, slow = fulls(state), Slow(monkeypatch)
    saving = cf.save(tmp_path / "saved", state, wait=False)
    steps: list[Any] = [state]

    def train() -> None:
        for _ in range(3):
            steps.append(staged(steps[-1], args[1])[0])

    training_on = threading.Thread(target=train)
    training_on.start()
    assert slow.waiting.wait(60) and not saving.done and len(steps) == 2  # one step is done, the next waits
    slow.go.set()
    training_on.join(60)
    saving.wait(60)
    assert equal(fulls(cf.load(tmp_path / "saved", mesh=one())), then)
    for _ in range(3):
        want = plain(want, args[1])[0]
    assert equal(fulls(steps[-1]), fulls(want))


def test_a_save_that_fails_lets_go_of_what_it_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    state, _ = staged(staged.init(*args), args[1])

    def broken(held: Held) -> torch.Tensor:
        raise OSError("no answer")

    monkeypatch.setattr(Held, "read", broken)
    saving = cf.save(tmp_path / "saved" / "s", state, wait=False)
    for _ in range(3):
        state, _ = staged(state, args[1])
    with pytest.raises(CheckpointError, match="failed: no answer"):
        saving.wait(60)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="File exists"):  # before anything is read
        cf.save(tmp_path / "file" / "s", state, wait=False)
    for _ in range(3):
        state, _ = staged(state, args[1])


def test_a_version_that_is_held_is_read_whatever_is_written(tmp_path: Path) -> None:
    with DiskStore(tmp_path, [8]) as store:
        for n in range(3):
            store.write(0, torch.full((8,), n, dtype=torch.uint8)).wait()
            store.commit()
        held, again = store.hold(0), store.hold(0)
        store.write(0, torch.full((8,), 3, dtype=torch.uint8)).wait()
        store.commit()
        assert held.read().tolist() == [2] * 8
        writer = threading.Thread(target=lambda: store.write(0, torch.full((8,), 4, dtype=torch.uint8)).wait())
        held.release()
        held.release()
        writer.start()
        writer.join(0.1)
        assert writer.is_alive() and again.read().tolist() == [2] * 8
        del again  # the last reference lets go too
        writer.join(60)
        assert not writer.is_alive()
