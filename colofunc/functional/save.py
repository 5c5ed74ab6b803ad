"""Saving: `cf.save(path, state)` writes the state once, whole or not at all.

Problem: a training state is spread over ranks, is too large for one of them, changes in place at the next step, and the
job may die at any moment. Idea: each rank writes the parts that it holds into one folder (safetensors and a JSON index,
no pickle), replicas are written by one rank, and the folder gets its name at the end, when everything is on disk.

    cf.save("run/step-100", state)                                  # returns when it is done
    saving = cf.save("run/step-200", state, wait=False, keep=3)     # returns when the state has been copied
    saving.wait()                                                   # raises what went wrong

The position of random numbers is saved too, and with `batches=` that of the loader. Where the ranks are processes,
saving is collective: all call it, and the folder is on a file system that all of them see.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import warnings
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import attrs
import torch

from colofunc.dtensor.tensor import DTensor, validate
from colofunc.errors import CheckpointError, InputError, near
from colofunc.executors.disk.kept_versions import SAY_AFTER_S, Reader
from colofunc.executors.launch import before_end
from colofunc.functional.checkpoint.background import BackgroundSave
from colofunc.functional.checkpoint.dcp import METADATA
from colofunc.functional.checkpoint.files import PieceToWrite, StoredPiece, write_file
from colofunc.functional.checkpoint.folder import Writing, keep_newest
from colofunc.functional.checkpoint.index import INDEX, read_index, write_durably, write_index
from colofunc.functional.checkpoint.parts import Ranks, StateLeaf, assign_writers, carried_out
from colofunc.functional.checkpoint.staging import Slab, as_given, snapshot_items, stage, stage_ahead
from colofunc.functional.checkpoint.tree import pack
from colofunc.functional.checkpoint.waiting import Patience
from colofunc.ops.seeds import random_state
from colofunc.owned import given

FORMATS = ("safetensors", "dcp")
FILE_BYTES = 4 << 30  # a file is closed when it holds this much
DEADLINE_S = 1800.0


class Resumable(Protocol):
    """What has a position that can be saved: the result of `cf.batches`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Saving:
    """A save that is done or on its way."""

    def __init__(self, path: Path, future: Future[None]) -> None:
        self.path = path
        self._future = future
        self._reported = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Until it has ended. Raises the error of the save; TimeoutError where it has not ended by then."""
        try:
            self._future.result(timeout_s)
        finally:
            self._reported = self._reported or self._future.done()

    @property
    def unreported(self) -> BaseException | None:
        """Its error, if nobody has seen it."""
        return self._future.exception() if self._future.done() and not self._reported else None

    def __repr__(self) -> str:
        error = self._future.exception() if self._future.done() else None
        stage = "done" if self.done else "running"
        return f"Saving({str(self.path)!r}, {'failed' if error else stage})"


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    format: str = "safetensors",
    wait: bool = True,
    batches: Resumable | None = None,
    random: bool = True,
    keep: int | None = None,
    overwrite: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Saving:
    """Write `state`, any tree that a step takes, to folder `path`. Collective on real ranks.

    format: "dcp" writes what `torch.distributed.checkpoint.load` reads. wait=False: return when the state has been
    copied; the rest happens in a thread, which ends before the interpreter does, and what goes wrong is raised by
    `wait()` or the next save. With state on disk nothing is copied, since memory has no room for it: it returns when
    what lies in memory is written, and reads what lies on disk, as it was, beside the next steps; as "dcp" when all is
    written. keep: of the folders beside `path` whose names differ in numbers only, this many newest stay. overwrite:
    write into a folder that holds other files too; they stay, unless they have a name that is written. Without it such
    a folder is an error, and only what an earlier save wrote there is replaced. deadline_s: how long ranks wait for
    each other. Raises CheckpointError where another process saves to the same folder or the disk is full; the folder is
    then as it was before.
    """
    if format not in FORMATS:
        raise InputError(f"save: no format {format!r}{near(format, FORMATS)}")
    if keep is not None and keep < 1:
        raise InputError(f"save: keep={keep}; keep at least 1, the one that is saved")
    saver = _saver()
    failed = saver.settle()
    where = given(path, "cf.save", CheckpointError)

    def make() -> _Job:
        made = _Job.make(where, state, batches, random, keep, deadline_s)
        return made if wait else made.copied(format, saver.slab)

    job = _prepared(where, make)
    job.overwrite = overwrite
    wait = wait or (job.large and format == "dcp")
    if format == "dcp" and not wait and job.ranks.size > 1:
        raise InputError(
            'save: format="dcp" on several processes talks to them, so it cannot run beside a step; use wait=True'
        )
    run = job.run_dcp if format == "dcp" else job.run
    try:
        writing = _begin(job, failed)
    except BaseException:
        job.beside.let_go()  # whoever keeps the error would keep steps waiting
        raise
    if wait:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        run_now(future, lambda: _attempt(job, writing, run))
        saving = Saving(job.path, future)
        saving.wait()
        return saving
    saving = saver.start(job.path, as_given(lambda: _attempt(job, writing, run)))
    job.beside.taken.wait()  # set at the latest when the save has ended, however it ends
    return saving


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _what(path: Path) -> str:
    return f"save to {str(path)!r}"


def _prepared(path: Path, make: Callable[[], _Job]) -> _Job:
    """The job; where this rank cannot save its state, the others learn of it instead of waiting."""
    try:
        return make()
    except Exception as error:
        watch = Ranks.of(set()).watch
        if watch is not None:
            watch.give_up(_what(path), error, DEADLINE_S)
        raise


def run_now(future: Future[None], work: Callable[[], None]) -> None:
    """Run the work here; the future has its outcome."""
    try:
        work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(None)


@attrs.define
class _Job:
    """What one save has to do on this rank."""

    path: Path
    content: dict[str, Any]
    leaves: list[StateLeaf]
    ranks: Ranks
    items: list[PieceToWrite]
    keep: int | None
    deadline_s: float
    overwrite: bool = False
    writing: Writing | None = None
    beside: BackgroundSave = attrs.field(factory=BackgroundSave)
    arrived: Callable[[], None] = lambda: None  # waits for the copies that the leaves are of

    @staticmethod
    def make(
        path: Path, state: Any, batches: Resumable | None, random: bool, keep: int | None, deadline_s: float
    ) -> _Job:
        tree, tensors = pack(state)
        content: dict[str, Any] = {"state": tree}
        extra: dict[str, Any] = {}
        if random:
            extra["random"] = random_state()
        if batches is not None:
            extra["batches"] = batches.state_dict()
        for key, value in extra.items():
            content[key], more = pack(value, f"~{key}")
            tensors |= more
        distributed = [x for x in tensors.values() if isinstance(x, DTensor)]
        validate(distributed)
        tensors = {name: carried_out(x) for name, x in tensors.items()}
        meshes = {x.mesh for x in distributed}
        ranks = Ranks.of(meshes)
        leaves = assign_writers(tensors, ranks)
        content["mesh"] = [list(axis) for axis in next(iter(meshes)).axes] if meshes else None
        content["torch"] = str(torch.__version__)
        items = [item for leaf in leaves for item in leaf.items(ranks.rank)]
        return _Job(path, content, leaves, ranks, items, keep, deadline_s)

    @property
    def large(self) -> bool:
        """Whether part of the state lies on disk, because memory has no room for it."""
        return any(leaf.layout is not None and leaf.layout.tier == "disk" for leaf in self.leaves)

    def copied(self, format: str, slab: Slab) -> _Job:
        """With copies of everything, so that the next step may write in place.

        With state on disk: `BackgroundSave`; as "dcp" it is not copied.
        """
        if self.large and format == "dcp":
            return self
        if self.large:
            reader = Reader(f"cf.save to {str(self.path)!r}", self.deadline_s)
            self.items = self.beside.items(self.leaves, self.ranks.rank, reader)
            return self
        self.beside.taken.set()
        if format == "dcp" and self.ranks.size == 1:
            self.leaves = assign_writers(self._whole(slab), self.ranks)
        else:
            self.items = snapshot_items(self.items, slab)
        return self

    def _whole(self, slab: Slab) -> dict[str, torch.Tensor]:
        """Copies of all leaves on the host, each whole; they have come when `arrived` says so."""
        values: list[Callable[[], torch.Tensor]] = []
        for leaf in self.leaves:
            if isinstance(leaf.tensor, DTensor):
                values.append(leaf.tensor.full)
            else:
                values.append(partial(_itself, leaf.tensor))
        staged = stage(values, [leaf.tensor.nbytes for leaf in self.leaves], slab, duplicate=True)
        self.arrived = staged.wait
        return {leaf.name: x for leaf, x in zip(self.leaves, staged.tensors, strict=True)}

    # ---- safetensors ----

    def run(self) -> None:
        """Write this rank's files; rank 0 writes the index when all have done so."""
        assert self.writing is not None
        folder = self.writing.folder
        own = [[item.name, piece.to_json()] for item, piece in self._write(folder)]
        self.beside.taken.set()  # where nothing of this rank lies on disk, no read has said so
        if self.ranks.rank != 0:
            _drop(folder / f"rank-{self.ranks.rank:05d}.json", json.dumps(own).encode())
            self._outcome()
            return
        pieces: dict[str, Any] = {}
        for written in (own, *self._others(folder)):
            pieces |= dict(written)
        tensors = {}
        for leaf in self.leaves:
            of_leaf: list[Any] = []
            for rank in range(self.ranks.size):
                of_leaf += [pieces[item.name] for item in leaf.items(rank)]
            tensors[leaf.name] = {**leaf.to_json(), "pieces": of_leaf}
        write_index(folder, {**self.content, "token": self.writing.token, "tensors": tensors})
        self._commit()

    def _commit(self) -> None:
        assert self.writing is not None
        self.writing.commit()
        try:
            if self.keep is not None:
                keep_newest(self.path, self.keep)
        except OSError as error:
            raise CheckpointError(
                f"{str(self.path)!r} is saved, but an older one could not be removed (keep=): {error}"
            ) from error

    def _write(self, folder: Path) -> list[tuple[PieceToWrite, StoredPiece]]:
        files: list[list[PieceToWrite]] = []
        held = FILE_BYTES
        for item in stage_ahead(self.items):
            if held >= FILE_BYTES:
                files.append([])
                held = 0
            files[-1].append(item)
            held += item.nbytes
        written: list[tuple[PieceToWrite, StoredPiece]] = []
        for number, items in enumerate(files):
            pieces = write_file(folder / f"rank-{self.ranks.rank:05d}-{number:05d}.safetensors", items)
            written += zip(items, pieces, strict=True)
        return written

    def _others(self, folder: Path) -> list[Sequence[Any]]:
        """What the other ranks have written, in rank order."""
        patience = Patience(self.ranks.watch, _what(self.path), self.deadline_s)
        found = []
        for rank in range(1, self.ranks.size):
            path = folder / f"rank-{rank:05d}.json"

            def written(path: Path = path) -> bool:
                failed = sorted(folder.glob("*.failed"))
                if failed and not path.exists():
                    raise CheckpointError(f"{_what(self.path)}: {failed[0].read_text() or failed[0].name}")
                return path.exists()

            patience.wait(
                rank, written, "had not written its part", "; is the folder on a file system that all ranks see?"
            )
            found.append(json.loads(path.read_bytes()))
            path.unlink()
        return found

    def _outcome(self) -> None:
        """Wait until rank 0 has given the folder its name, or has given up."""
        assert self.writing is not None
        folder = self.writing.folder
        patience = Patience(self.ranks.watch, _what(self.path), self.deadline_s)
        patience.wait(0, lambda: not folder.exists(), "had not finished it")
        if read_index(self.path).get("token") != self.writing.token:
            raise CheckpointError(f"save to {str(self.path)!r} was given up on another rank, whose error says why")

    # ---- torch.distributed.checkpoint ----

    def run_dcp(self) -> None:
        # Imported here: it takes a second, and few programs need it.
        from colofunc.functional.checkpoint.dcp_planner import write

        assert self.writing is not None
        self.arrived()
        try:
            write(self.writing.folder, self.leaves, self.content, self.ranks)
        except RuntimeError as error:
            lost = "" if self.ranks.watch is None else self.ranks.watch.lost(error)
            if lost:
                raise CheckpointError(f"{_what(self.path)}: {lost}") from error
            raise
        if self.ranks.rank == 0:
            said = {
                "token": self.writing.token,
                "format": "dcp",
                "metadata": zlib.crc32((self.writing.folder / METADATA).read_bytes()),
            }
            write_index(self.writing.folder, self.content | said)
            self._commit()
        else:
            self._outcome()


def _drop(path: Path, data: bytes) -> None:
    """A file that appears with all its bytes."""
    temporary = path.with_suffix(".part")
    write_durably(temporary, data)
    os.rename(temporary, path)


def _begin(job: _Job, failed: BaseException | None) -> Writing:
    """Rank 0 takes the lock and makes the folder; all learn its name, or why there is none."""
    job.writing = writing = Writing(job.path, job.overwrite)
    problem = failed
    if job.ranks.rank == 0 and problem is None:
        try:
            writing.begin()
        except (OSError, CheckpointError) as error:
            problem = error
    watch = job.ranks.watch
    if watch is not None:
        own = json.dumps([str(writing.folder), None if problem is None else str(problem)])
        said = [json.loads(text) for text in watch.exchange(_what(job.path), own, job.deadline_s)]
        bad = [text for _, text in said if text is not None]
        if bad and problem is None:
            problem = CheckpointError(bad[0])
            if job.ranks.rank == 0:
                writing.abandon()
        if job.ranks.rank != 0:
            writing.join(said[0][0])
    if problem is not None:
        if isinstance(problem, CheckpointError):
            raise problem
        raise CheckpointError(f"save to {str(job.path)!r}: {problem}") from problem
    return writing


def _attempt(job: _Job, writing: Writing, run: Callable[[], None]) -> None:
    """Run a save; where it fails, remove what it wrote."""
    try:
        run()
    except BaseException as error:
        if job.ranks.rank == 0:
            writing.abandon()
        else:
            _give_up(job, writing, error)
        if isinstance(error, OSError):
            left = "the last checkpoint there is intact" if job.path.exists() else "nothing is there"
            raise CheckpointError(
                f"save to {str(job.path)!r} failed: {error}; what was written is removed and {left}"
            ) from error
        raise
    finally:
        job.beside.let_go()


def _give_up(job: _Job, writing: Writing, error: BaseException) -> None:
    """Make room first: the disk may be full."""
    for own in writing.folder.glob(f"rank-{job.ranks.rank:05d}*"):
        own.unlink(missing_ok=True)
    if writing.folder.exists():
        (writing.folder / f"{job.ranks.rank}.failed").write_text(f"rank {job.ranks.rank} failed: {error}")


# ---- in the background ----


class _Saver:
    """This process's background thread, and the save that it works on."""

    def __init__(self) -> None:
        # One thread: saves end in the order in which they began. The interpreter waits for it before it ends.
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="colofunc-save")
        self._last: Saving | None = None
        self.slab = Slab()  # of the save beside the steps, of which there is one at a time
        atexit.register(self._report)
        before_end(self._finish)

    def start(self, path: Path, work: Callable[[], None]) -> Saving:
        self._last = Saving(path, self._pool.submit(work))
        return self._last

    def settle(self) -> BaseException | None:
        """Wait for the last save; its error, if nobody has seen it."""
        last, self._last = self._last, None
        if last is None:
            return None
        if wait_for([last._future], SAY_AFTER_S).not_done:
            warnings.warn(
                f"cf.save waits for the save to {str(last.path)!r} in the background, which has not ended", stacklevel=3
            )
        failed = last.unreported if last.done else last._future.exception()
        if failed is not None:
            last._reported = True
            failed.add_note(
                f"this was an earlier save, to {str(last.path)!r}, in the background; the new one has not begun"
            )
        return failed

    def _finish(self) -> None:
        self._pool.shutdown()
        self._report()

    def _report(self) -> None:
        if self._last is not None and self._last.unreported is not None:
            print(f"cf.save to {str(self._last.path)!r} failed: {self._last.unreported}", file=sys.stderr)


@lru_cache(maxsize=1)
def _saver() -> _Saver:
    return _Saver()


__all__ = ["INDEX", "Saving", "save"]
