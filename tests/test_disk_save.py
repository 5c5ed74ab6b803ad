"""Saving and loading of state on disk: part by part, beside the next steps, with the numbers of the moment of the call."""

import importlib
import threading
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from test_disk_state import equal, fulls, on_disk
from test_offload import one, peak, training

import colofunc as cf
from colofunc.errors import CheckpointError, DiskError
from colofunc.executors.disk import kept_versions as disk_held
from colofunc.executors.disk.kept_versions import ChunkVersion, Holds
from colofunc.executors.disk.store import DiskStore
from colofunc.functional.checkpoint.folder import Writing
from colofunc.functional.checkpoint.parts import Ranks
from colofunc.functional.checkpoint.staging import Slab

saves: Any = importlib.import_module("colofunc.functional.save")


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
        read, wait = ChunkVersion.read, Holds.wait

        def slow(held: ChunkVersion) -> torch.Tensor:
            assert self.go.wait(60)
            return read(held)

        def noted(holds: Holds, chunk: int, version: int, what: str) -> None:
            if holds._readers.get((chunk, version)):
                self.waiting.set()
            wait(holds, chunk, version, what)

        monkeypatch.setattr(ChunkVersion, "read", slow)
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

    def broken(held: ChunkVersion) -> torch.Tensor:
        raise OSError("no answer")

    monkeypatch.setattr(ChunkVersion, "read", broken)
    saving = cf.save(tmp_path / "saved" / "s", state, wait=False)
    for _ in range(3):
        state, _ = staged(state, args[1])
    with pytest.raises(CheckpointError, match="failed: no answer"):
        saving.wait(60)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="cannot be used: Not a directory"):  # before anything is read
        cf.save(tmp_path / "file" / "s", state, wait=False)
    for _ in range(3):
        state, _ = staged(state, args[1])


def saved_behind(folder: Path, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[Any, Any, Slow, Any, Any]:
    """(the step, a state one step after the one that is being saved, what holds the save up, the save, the batch)"""
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=folder)
    state, _ = staged(staged.init(*args), args[1])
    slow = Slow(monkeypatch)
    saving = cf.save(folder / "saved" / "s", state, wait=False, **how)
    return staged, staged(state, args[1])[0], slow, saving, args[1]


def test_a_step_that_waits_for_a_save_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_held, "SAY_AFTER_S", 0.01)
    staged, state, slow, saving, batch = saved_behind(tmp_path, monkeypatch)
    warn = warnings.warn
    monkeypatch.setattr(warnings, "warn", lambda *args, **kw: (warn(*args, **kw), slow.go.set()))  # the save goes on when it was said
    with pytest.warns(UserWarning, match="a step waits to write chunk") as said:
        staged(state, batch)
    saving.wait(60)
    assert len(said) == 1 and f"which cf.save to '{tmp_path / 'saved' / 's'}' has to read first" in str(said[0].message)


def test_a_save_that_reads_nothing_any_more_is_an_error_of_the_step_which_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staged, state, slow, saving, batch = saved_behind(tmp_path, monkeypatch, deadline_s=0.05)
    before = fulls(state)
    said = r"chunk \d+ \(.*\) of '.*' cannot be written: cf\.save to '.*/s' has to read it first and has read nothing for 0.05 s. Try"
    with pytest.raises(DiskError, match=said):
        staged(state, batch)
    assert not saving.done and equal(fulls(state), before)
    slow.go.set()
    saving.wait(60)
    again, _ = staged(state, batch)
    plain = cf.shard(training(layers=1)[0], one())
    want = plain.init(*training(layers=1)[1:])
    for _ in range(3):
        want, _ = plain(want, batch)
    assert equal(fulls(again), fulls(want))


def test_a_step_that_waits_goes_on_when_the_save_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged, state, slow, saving, batch = saved_behind(tmp_path, monkeypatch)
    read = ChunkVersion.read

    def broken(held: ChunkVersion) -> torch.Tensor:
        read(held)
        raise OSError("pulled")

    monkeypatch.setattr(ChunkVersion, "read", broken)  # the first read waits already: what follows it fails
    step = threading.Thread(target=lambda: staged(state, batch))
    step.start()
    assert slow.waiting.wait(60)
    slow.go.set()
    step.join(60)
    assert not step.is_alive()
    with pytest.raises(CheckpointError, match="failed: pulled"):
        saving.wait(60)


def test_a_save_that_cannot_begin_holds_nothing_while_somebody_keeps_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    state, _ = staged(staged.init(*args), args[1])
    hold, taken = DiskStore.hold, []

    def fails(store: DiskStore, chunk: int, reader: Any) -> ChunkVersion:
        if len(taken) == 3:
            raise DiskError("no more")
        taken.append(hold(store, chunk, reader))
        return taken[-1]

    monkeypatch.setattr(DiskStore, "hold", fails)
    with pytest.raises(DiskError, match="no more") as kept:
        cf.save(tmp_path / "s", state, wait=False)
    for _ in range(3):  # would wait for ever
        state, _ = staged(state, args[1])
    assert len(taken) == 3 and kept.traceback


def test_a_rank_that_writes_nothing_from_disk_does_not_wait_for_those_that_do(tmp_path: Path) -> None:
    step, *args = training(layers=1)
    staged = cf.offload(cf.shard(step, one()), policy="disk", disk=tmp_path)
    state, _ = staged(staged.init(*args), args[1])
    path = tmp_path / "saved" / "s"
    jobs = []
    for rank in range(2):  # as on two ranks, of which the second writes one small tensor that lies in memory
        job = saves._Job.make(path, state, None, False, None, 60.0)
        job.ranks = Ranks(rank, 2, None)
        job.leaves = [attrs.evolve(leaf, writers=tuple((r, int(leaf.layout.tier != "disk"), held) for r, _, held in leaf.writers))
                      for leaf in job.leaves if leaf.layout is not None]  # fmt: skip
        jobs.append(job.copied("safetensors", Slab()))
    first, second = jobs
    second.writing, first.writing = Writing(path), Writing(path)
    first.writing.begin()
    second.writing.join(str(first.writing.folder))
    thread = threading.Thread(target=second.run)
    thread.start()
    assert first.beside.holds and not second.beside.holds and second.items
    assert second.beside.taken.wait(60) and thread.is_alive()  # it may go on: the first has written nothing
    first.run()
    thread.join(60)
    assert not thread.is_alive() and equal(fulls(cf.load(path, mesh=one())), fulls(state))


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
