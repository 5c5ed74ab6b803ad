"""Writing and reading a large file at the pace of the disk.

Problem: written the usual way, bytes are copied to the page cache, which costs more than summing them, and the flush at
the end waits for the disk with nothing else to do. Idea: bytes are gathered in a few aligned buffers, and two threads
write full ones past the page cache (`O_DIRECT`) while the next is filled, so that the disk works from the first MiB on
and the flush finds little left. A checkpoint also pushes nothing else out of the cache. Where a file system cannot do
that, the same buffers are written the usual way.

    with open(path, "xb", buffering=0) as file, stream_to_disk(file.fileno()) as out:
        out.write(data)                       # bytes in order, of any length; all of them are on disk when the block ends
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread, local
from typing import Any

import numpy as np
import torch

from colofunc.executors.direct_io import DIRECT, PAGE_BYTES, ByteArray, padded_bytes, read_at, set_direct, write_at
from colofunc.executors.pages import pages

BUFFER_BYTES = 2 << 20  # a multiple of any block size of a disk
BUFFERS, WRITERS = 4, 2


class FileStream:
    """A file that is written from front to back. Made by `stream_to_disk`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0  # of the buffer that is being filled
        self._held = 0  # bytes in it
        self._made = 0
        self._free: SimpleQueue[ByteArray] = SimpleQueue()
        self._full: SimpleQueue[tuple[ByteArray, int] | None] = SimpleQueue()
        self._writers: list[Thread] = []
        self._errors: list[BaseException] = []
        self._buffer = self._fresh()

    def write(self, data: memoryview) -> None:
        """Append these bytes. Raises OSError of this write or an earlier one."""
        source = np.frombuffer(data, dtype=np.uint8)
        while len(source):
            count = min(len(source), BUFFER_BYTES - self._held)
            np.copyto(self._buffer[self._held : self._held + count], source[:count])  # releases the interpreter lock
            source, self._held = source[count:], self._held + count
            if self._held == BUFFER_BYTES:
                self._hand_over()

    def finish(self) -> None:
        """Write what is left and flush."""
        self.stop()
        if self._errors:
            raise self._errors[0]
        set_direct(self._fd, False)
        write_at(self._fd, self._buffer[: self._held], self._at)
        os.fsync(self._fd)

    def stop(self) -> None:
        """End the threads, when they have written what they were given."""
        for _ in self._writers:
            self._full.put(None)
        for writer in self._writers:
            writer.join()
        self._writers.clear()

    def _hand_over(self) -> None:
        if not self._writers:
            set_direct(self._fd, True)
            # Threads of our own: a pool takes no work once the interpreter is ending, and a save in the background ends
            # then.
            self._writers = [Thread(target=self._write, name=f"colofunc-disk-{k}") for k in range(WRITERS)]
            for writer in self._writers:
                writer.start()
        self._full.put((self._buffer, self._at))
        self._at, self._held = self._at + BUFFER_BYTES, 0
        self._buffer = self._fresh() if self._made < BUFFERS else self._free.get()
        if self._errors:
            raise self._errors[0]

    def _fresh(self) -> ByteArray:
        self._made += 1
        return pages(BUFFER_BYTES)

    def _write(self) -> None:
        while (full := self._full.get()) is not None:
            buffer, at = full
            try:
                if not self._errors:
                    write_at(self._fd, buffer, at)
            except BaseException as error:  # raised by the next call of `write` or by `finish`
                self._errors.append(error)
            self._free.put(buffer)


@contextmanager
def stream_to_disk(fd: int) -> Iterator[FileStream]:
    """A stream to an empty file; where the block ends well, everything is on disk."""
    made = FileStream(fd)
    try:
        yield made
        made.finish()
    finally:
        made.stop()


# ---- reading ----
#
# Problem: one thread that reads and then sums leaves the disk idle half of the time, and what is read the usual way is
# copied from the page cache by the same thread. Idea: a few threads, each with a block of its own: while one sums,
# others wait for the disk. What is in the page cache is taken from there; what is not goes past it (`O_DIRECT`), which
# costs the processor next to nothing and pushes nothing else out. Several processes read the usual way, so that what
# one has read serves the others.
#
#     fetch(path, [(offset, memoryview), ...], lambda k, count: ...)     # called when the k-th has `count` of its bytes


DEEP = 8  # threads that keep a disk busy
FROM_BYTES = 4 << 20  # less is read by the thread that asks
PROBES = 4  # pages of the file that are looked up in the page cache
NOWAIT = getattr(os, "RWF_NOWAIT", 0)
BlockRead = tuple[int, memoryview]  # where in the file, where to


def fetch(path: Path, blocks: Sequence[BlockRead], done: Callable[[int, int], None]) -> None:
    """Read every block to its memory.

    `done(k, count)` follows the k-th, with the bytes that the file had for it, in any thread.

    Raises OSError of the file, and what `done` raises: of several errors that of the first block.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in the place of a file is an error, not a wait
    direct = None
    try:
        few = sum(len(memory) for _, memory in blocks) < FROM_BYTES
        direct = None if few or _shared() or _cached(path, blocks) else _open_direct(path)
        threads = DEEP if direct is not None else os.cpu_count() or 1
        if few:
            threads = 1
        _together(min(threads, DEEP), len(blocks), lambda k: done(k, _one(fd, direct, blocks[k])))
    finally:
        os.close(fd)
        if direct is not None:
            os.close(direct)


def _together(threads: int, count: int, work: Callable[[int], None]) -> None:
    """work(0) to work(count - 1) by this thread and others of the pool.

    All have ended on return; the first error in order is raised.
    """
    left = iter(range(count))  # a thread that takes the next holds the interpreter lock
    errors: list[tuple[int, BaseException]] = []

    def some() -> None:
        for k in left:
            try:
                work(k)
            except BaseException as error:
                errors.append((k, error))
            if errors:
                return

    others = [_pool().submit(some) for _ in range(threads - 1)]
    some()
    for other in others:
        other.result()
    if errors:
        raise min(errors, key=lambda each: each[0])[1]


def _one(fd: int, direct: int | None, block: BlockRead) -> int:
    at, memory = block
    count = _read_direct(direct, memory, at) if direct is not None else None
    return read_at(fd, memory, at) if count is None else count


def _read_direct(fd: int, memory: memoryview, at: int) -> int | None:
    """The same past the page cache, by way of a buffer that begins at a page; None where the file system refuses.

    A call that ends within a page has come to the end of the file, so that no other follows: it would begin within a
    page.
    """
    skip = at % PAGE_BYTES
    length = padded_bytes(skip + len(memory))
    buffer = _buffer(length)
    count = 0
    while count < skip + len(memory):
        try:
            got = os.preadv(fd, [buffer[count:length].data], at - skip + count)
        except OSError:
            return None  # the usual way finds out whether it is the file or the way of reading
        count += got
        if got == 0 or got % PAGE_BYTES:
            break
    count = min(max(count - skip, 0), len(memory))
    np.copyto(np.frombuffer(memory, dtype=np.uint8)[:count], buffer[skip : skip + count])
    return count


_held = local()


def _buffer(nbytes: int) -> ByteArray:
    """This thread's, at least so large."""
    found: ByteArray | None = getattr(_held, "buffer", None)
    if found is None or len(found) < nbytes:
        found = _held.buffer = pages(nbytes)
    return found


@lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(DEEP, thread_name_prefix="colofunc-read")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has none of its parent's threads


def _shared() -> bool:
    """Whether other processes may be about to read the same file."""
    group: Any = torch.distributed
    return bool(group.is_available() and group.is_initialized() and group.get_world_size() > 1)


def _cached(path: Path, blocks: Sequence[BlockRead]) -> bool:
    """Whether a few pages of what is wanted are all in the page cache; where the system cannot tell, yes."""
    if not NOWAIT:
        return True
    page = bytearray(1)
    step = max(1, (len(blocks) - 1) // (PROBES - 1))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a look brings no more than the page
        for at, _ in blocks[::step]:
            os.preadv(fd, [page], at, NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        os.close(fd)
    return True


def _open_direct(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | DIRECT) if DIRECT else None
    except OSError:
        return None
