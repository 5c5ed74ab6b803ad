"""Steps on state that lies on disk, where the disk fails or the user stops them: the state of before is good, or is said to be lost."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_disk_state import equal, files, fulls, trained_once
from test_offload import one, training

import colofunc as cf
from colofunc.errors import DiskError
from colofunc.executors.disk.store import DiskStore


def goes_on(staged: Any, state: Any, before: dict[str, torch.Tensor], args: Any, steps: int = 2) -> None:
    """The state is what it was, and the next step of it what a step in memory makes."""
    assert equal(fulls(state), before)
    plain = cf.shard(training(layers=1)[0], one())
    want = plain.init(*args)
    for _ in range(steps):
        want, _ = plain(want, args[1])
    assert equal(fulls(staged(state, args[1])[0]), fulls(want))


def test_a_directory_that_is_removed_while_it_is_in_use(tmp_path: Path) -> None:
    staged, state, args = trained_once(tmp_path)
    shutil.rmtree(next(tmp_path.iterdir()))
    before = fulls(state)
    with pytest.raises(DiskError, match=r"the file was removed. Try: name a directory that nothing removes") as caught:
        staged(state, args[1])
    assert "while running colofunc.wait" in str(caught.value.__notes__)
    assert equal(fulls(state), before)  # it can be read as long as the process has the files open, hence saved and placed again
    (tmp_path / "other").mkdir()
    other = cf.offload(cf.shard(training(layers=1)[0], one()), policy="disk", disk=tmp_path / "other")
    goes_on(other, other.init(state, args[1]), before, args)


def test_a_disk_that_is_full_in_a_step_leaves_the_state_of_before(tmp_path: Path, monkeypatch: Any) -> None:
    staged, state, args = trained_once(tmp_path)
    before, lying = fulls(state), files(tmp_path)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        said = r"cannot write chunk \d+, .*version-0'.*: No space left on device. Try: free space there"
        with pytest.raises(DiskError, match=said) as caught:
            staged(state, args[1])
    assert str(tmp_path) in str(caught.value)
    assert files(tmp_path) == lying
    goes_on(staged, state, before, args)


def test_a_step_that_is_interrupted_leaves_the_state_of_before(tmp_path: Path, monkeypatch: Any) -> None:
    staged, state, args = trained_once(tmp_path)
    before, write, written = fulls(state), DiskStore.write, []

    def interrupted(store: DiskStore, chunk: int, *of: Any) -> Any:
        written.append(chunk)
        if len(written) == 4:
            raise KeyboardInterrupt
        return write(store, chunk, *of)

    with monkeypatch.context() as patch:
        patch.setattr(DiskStore, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            staged(state, args[1])
    goes_on(staged, state, before, args)


def test_a_state_of_two_stores_of_which_one_cannot_commit_is_lost_and_says_so(tmp_path: Path, monkeypatch: Any) -> None:
    staged, state, args = trained_once(tmp_path)
    two = {**state, "opt": staged.init(*args)["opt"]}
    commit, done = DiskStore.commit, []

    def second_fails(store: DiskStore, *args: Any, **kwargs: Any) -> None:
        done.append(store)
        if len(done) == 2:
            raise DiskError("pulled")
        commit(store, *args, **kwargs)

    monkeypatch.setattr(DiskStore, "commit", second_fails)
    with pytest.raises(DiskError, match="pulled") as caught:
        staged(two, args[1])
    assert any("that state is lost; load the last checkpoint" in note for note in caught.value.__notes__)
    with pytest.raises(cf.ColofuncError, match="this state is lost"):
        staged(two, args[1])


def test_a_state_that_was_consumed_names_the_step_that_did_it(tmp_path: Path) -> None:
    staged, state, args = trained_once(tmp_path)
    after, _ = staged(state, args[1])
    for use in (lambda: staged(state, args[1]), lambda: cf.save(tmp_path / "s", state)):
        with pytest.raises(cf.ColofuncError, match=r"'a @disk' was donated to step_fn .*use that call's output"):
            use()
    assert not (tmp_path / "s").exists() and fulls(after)
