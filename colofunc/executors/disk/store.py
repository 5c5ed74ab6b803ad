"""The disk tier: chunks of bytes that are read and written while something else computes.

Problem: state that does not fit in memory lies on disk. It must come and go at the pace of the drive without taking the
processor from training, a step that fails half-way must leave the state of the step before, and a bit that the disk
changed must never become a number. Idea: a few Python threads move blocks of 4 MiB with direct I/O, which takes no
interpreter lock and hardly any processor time; every chunk has room for two versions, a write goes to the one that does
not count, and `commit` makes all writes since the last one count at once; every block has a checksum.

    with DiskStore("/nvme", [chunk.nbytes for chunk in chunks]) as store:     # takes its room on disk, or fails, now
        written = [store.write(k, chunk) for k, chunk in enumerate(chunks)]  # chunks are not to be changed ...
        for ticket in written:
            ticket.wait()                                                     # ... until now
        store.commit()
        ahead = store.read(0, into=chunks[0])                                 # reads ahead; the caller decides the order
        ahead.wait()

Operations on one chunk happen in the order they were asked for, so a read sees the write before it. Blocks of different
chunks are served first come, first served. `files` says what lies on disk, `queue` how work is spread.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from functools import partial
from threading import Thread
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colofunc.errors import DiskError
from colofunc.executors.direct_io import ByteArray, padded_bytes, whole_pages
from colofunc.executors.disk.files import Files, create, disk_error
from colofunc.executors.disk.kept_versions import ChunkVersion, Holds, Reader
from colofunc.executors.disk.layout import BLOCK_BYTES, VERSIONS, DiskLayout, checksum
from colofunc.executors.disk.queue import Before, MoveBlock, Ticket, Work, Workers
from colofunc.mesh.sizes import size_text

THREADS = min(4, os.cpu_count() or 1)
"""4 fill a drive. They sum what they move, so more of them than cores take time from a step that computes there."""

# ---- what is where ----


class Records:
    """Which version of each chunk is which, and how blocks move.

    Knows no threads; each chunk is moved by one work at a time.
    """

    def __init__(self, files: Files) -> None:
        layout = files.layout
        self.files, self.layout = files, layout
        # per chunk: 0, 1, or -1 where none counts
        self.current: NDArray[np.int8] = np.full(len(layout.sizes), -1, np.int8)
        self.newest = self.current.copy()  # what a read sees
        self.sums = np.zeros((len(VERSIONS), layout.blocks[-1]), np.uint32)
        self.failed: dict[int, BaseException] = {}  # chunks whose newest version is broken

    def place(self, chunk: int, block: int, count: int) -> str:
        """For errors: `chunk 3, bytes 0 to 4096 of it, at byte 8192 of`; the file's path follows."""
        at = block * self.layout.block_bytes
        return f"chunk {chunk}, bytes {at} to {at + count} of it, at byte {self.layout.offsets[chunk] + at} of"

    def path(self, version: int) -> str:
        return str(self.files.path / VERSIONS[version])

    def put(self, chunk: int, version: int, source: ByteArray, block: int, buffer: ByteArray) -> None:
        """Write one block and note its checksum."""
        at = block * self.layout.block_bytes
        part = source[at : at + self.layout.block_bytes]
        data = part
        if not whole_pages(part):
            data = buffer[: padded_bytes(len(part))]
            np.copyto(data[: len(part)], part)  # releases the interpreter lock
            data[len(part) :] = 0
        self.sums[version, self.layout.blocks[chunk] + block] = checksum(data[: len(part)])
        try:
            self.files.write(version, data, self.layout.offsets[chunk] + at)
        except OSError as error:
            raise disk_error(
                f"cannot write {self.place(chunk, block, len(part))}", self.path(version), error
            ) from error

    def get(self, chunk: int, version: int, target: ByteArray, block: int, buffer: ByteArray) -> None:
        """Read one block and compare its checksum."""
        at = block * self.layout.block_bytes
        part = target[at : at + self.layout.block_bytes]
        data = part if whole_pages(part) else buffer[: padded_bytes(len(part))]
        where = self.place(chunk, block, len(part))
        try:
            self.files.read(version, data, self.layout.offsets[chunk] + at)
        except OSError as error:
            raise disk_error(f"cannot read {where}", self.path(version), error) from error
        found, expected = checksum(data[: len(part)]), int(self.sums[version, self.layout.blocks[chunk] + block])
        if found != expected:
            raise DiskError(
                f"{where} {self.path(version)!r} is not what was written: checksum {found:08x}, expected "
                f"{expected:08x}. Try: begin from a checkpoint, on another disk if this comes again"
            )
        if data is not part:
            np.copyto(part, data[: len(part)])

    def whole(self, chunk: int) -> None:
        """Raises DiskError where the last write of a chunk failed."""
        if chunk in self.failed:
            why = self.failed[chunk]
            raise DiskError(
                f"chunk {chunk} cannot be read, its last write failed: {why}. Try: write it again, or rollback()"
            ) from why

    def wrote(self, chunk: int, error: BaseException | None) -> None:
        if error is None:
            self.failed.pop(chunk, None)
        else:
            self.failed[chunk] = error


# ---- the store ----


class DiskStore:
    """Chunks of fixed sizes on disk, in a folder of its own within `directory`; see the module's docstring.

    sizes: bytes of each chunk; on disk each takes them twice, rounded up to 4096 (`layout.disk_bytes`). threads: how
    many move blocks. buffers_bytes: the most memory that the store takes; fewer threads where it has no room for a
    buffer of `block_bytes` for each. rank: in the folder's name, for processes that share a directory. versions: 1 for
    what is only read once it is committed, which takes half the room. `close` or the end of the process removes the
    files, and after a kill the next store in the same directory does. Only one thread may call methods at a time.
    Raises DiskError before anything is left on disk where the directory is missing, not writable or too small.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        sizes: Sequence[int],
        *,
        threads: int = THREADS,
        buffers_bytes: int = 4 * BLOCK_BYTES,
        block_bytes: int = BLOCK_BYTES,
        rank: int = 0,
        versions: int = len(VERSIONS),
    ) -> None:
        layout = DiskLayout.of(sizes, block_bytes, versions)
        threads = _threads(threads, buffers_bytes, block_bytes)
        self._files = create(directory, layout, rank)
        self._records = Records(self._files)
        self._workers = Workers(threads, block_bytes)
        self._holds = Holds()
        self._end = weakref.finalize(self, _finish, self._workers, self._files)

    # -- what there is --

    @property
    def path(self) -> str:
        """The store's own folder, for `open`."""
        return str(self._files.path)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._files.layout.sizes

    @property
    def direct(self) -> bool:
        """Whether bytes pass the page cache; some file systems cannot."""
        return self._files.direct

    @property
    def changed(self) -> bool:
        """Whether anything was written since the last commit."""
        return bool((self._records.newest != self._records.current).any())

    @property
    def closed(self) -> bool:
        return not self._end.alive

    # -- moving bytes --

    def write(self, chunk: int, tensor: Tensor, before: Before | None = None) -> Ticket:
        """Begin to write a contiguous CPU tensor of the chunk's bytes, of any dtype and shape, and return at once.

        The tensor is borrowed: nothing may change it until the ticket is done; `before()` is called by whoever reads
        it, before each block, and returns when its bytes are there. Where its memory begins at a page (`pages`, pinned
        memory) it is written from where it lies, else it goes through the store's buffers. Where it would replace what
        is held (`hold`), it waits until that is released. Raises DiskError where that takes too long.
        """
        source = self._bytes_of(chunk, tensor, "write")
        records = self._records
        if records.layout.versions == 1 and records.current[chunk] == 0:
            raise DiskError(
                f"chunk {chunk} of {self.path!r} counts and has one version, so it is only read. Try: x.clone() to "
                "change it"
            )
        version = 1 if records.current[chunk] == 0 else 0  # never the one that counts
        self._holds.wait(chunk, version, f"chunk {chunk} ({size_text(self.sizes[chunk])}) of {self.path!r}")
        records.newest[chunk] = version

        def move(block: int, buffer: ByteArray) -> None:
            if before is not None:
                before()
            records.put(chunk, version, source, block, buffer)

        return self._submit(chunk, f"writing chunk {chunk} to {records.path(version)!r}", move, writes=True)

    def read(self, chunk: int, into: Tensor, before: Before | None = None) -> Ticket:
        """Begin to read a chunk as it was written last, whether committed or not, and return at once.

        `into` has the last write's bytes once the ticket is done; until then, and after an error, nothing certain.
        `before()` returns when nobody else reads `into` any more.
        """
        target = self._bytes_of(chunk, into, "read")
        records, version = self._records, int(self._records.newest[chunk])
        if version < 0:
            raise DiskError(f"chunk {chunk} was never written. Try: write({chunk}, tensor) before read({chunk}, into)")

        def move(block: int, buffer: ByteArray) -> None:
            if before is not None:
                before()
            records.whole(chunk)
            records.get(chunk, version, target, block, buffer)

        return self._submit(chunk, f"reading chunk {chunk} from {records.path(version)!r}", move, writes=False)

    def hold(self, chunk: int, reader: Reader | None = None) -> ChunkVersion:
        """A chunk as it was written last, to be read whatever is written later, in another thread too, and then
        released.

        reader: who reads it, one object for all chunks, so that a write that waits can say for what.
        """
        self._ours(f"hold chunk {chunk} of")
        version = int(self._records.newest[chunk])
        if version < 0:
            raise DiskError(f"chunk {chunk} was never written. Try: write({chunk}, tensor) before hold({chunk})")
        reader = reader or Reader()
        self._holds.add(chunk, version, reader)
        return ChunkVersion(
            self.sizes[chunk],
            partial(self._read_held, chunk, version),
            partial(self._holds.release, chunk, version, reader),
        )

    def _read_held(self, chunk: int, version: int, into: Tensor) -> Ticket:
        target, records = self._bytes_of(chunk, into, "read"), self._records

        def move(block: int, buffer: ByteArray) -> None:
            records.get(chunk, version, target, block, buffer)

        return self._submit(chunk, f"reading chunk {chunk} from {records.path(version)!r}", move, writes=False)

    def _bytes_of(self, chunk: int, tensor: Tensor, doing: str) -> ByteArray:
        self._ours(f"{doing} chunk {chunk} of")
        sizes = self.sizes
        if not 0 <= chunk < len(sizes):
            raise DiskError(f"there is no chunk {chunk} in a store of {len(sizes)}. Try: 0 to {len(sizes) - 1}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
            raise DiskError(
                f"chunk {chunk} needs contiguous memory of the host, not {_about(tensor)}. Try: "
                "tensor.cpu().contiguous()"
            )
        if tensor.nbytes != sizes[chunk]:
            raise DiskError(
                f"chunk {chunk} has {sizes[chunk]} bytes, not {tensor.nbytes} ({_about(tensor)}). Try: a tensor of its "
                "size"
            )
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()

    def _submit(self, chunk: int, what: str, move: MoveBlock, writes: bool) -> Ticket:
        records, blocks = self._records, self._files.layout.of_chunk(chunk)

        def ended(error: BaseException | None) -> None:
            if writes:
                records.wrote(chunk, error)

        ticket = Ticket(what)
        self._workers.submit(Work(chunk, move, ticket, blocks.stop - blocks.start, writes, ended))
        return ticket

    # -- versions --

    def commit(self) -> None:
        """Wait for all writes, then make them count, all at once.

        With one version what was written is only read from now on.

        Raises DiskError where a write failed: then nothing has changed, and the chunk can be written again, or
        `rollback()` called.
        """
        self._ours("commit to")
        self._workers.wait_for_writes()
        records = self._records
        for chunk, error in records.failed.items():
            raise DiskError(f"nothing is committed, because chunk {chunk} was not written: {error}") from error
        records.current = records.newest.copy()

    def rollback(self) -> None:
        """Wait for all writes, then forget those since the last commit."""
        self._ours("roll back")
        self._workers.wait_for_writes()
        self._records.newest = self._records.current.copy()
        self._records.failed.clear()

    def _ours(self, doing: str) -> None:
        """Raises DiskError where the store cannot be used (any more)."""
        if self.closed:
            raise DiskError(f"cannot {doing} the store at {self.path!r}: it is closed. Try: a new store")
        if os.getpid() != self._files.owner:  # after a fork there are no threads
            raise DiskError(
                f"cannot {doing} the store at {self.path!r}: it is process {self._files.owner}'s. Try: one store per "
                "process"
            )

    def close(self) -> None:
        """End the threads and close the files, which removes them; what has not ended fails.

        Twice is as good as once.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _finish(workers: Workers, files: Files) -> None:
    """The end of a store: called by `close`, when nobody has it any more, or when the process ends."""
    if os.getpid() != files.owner:  # a forked process has neither the threads nor a say
        return
    if workers.mine:  # collected as garbage in one of its own threads, which cannot wait for itself
        Thread(target=_finish, args=(workers, files)).start()
        return
    workers.stop()
    files.shut()


def _threads(threads: int, buffers_bytes: int, block_bytes: int) -> int:
    """How many threads have a buffer each."""
    found = min(threads, buffers_bytes // block_bytes)
    if found < 1:
        least = f"1 thread and {block_bytes} bytes or more"
        raise DiskError(f"{threads} threads with {buffers_bytes} bytes of buffers move nothing. Try: {least}")
    return found


def _about(tensor: Tensor) -> str:
    strides = "" if tensor.is_contiguous() else f" with strides {tuple(tensor.stride())}"
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}{strides}"
