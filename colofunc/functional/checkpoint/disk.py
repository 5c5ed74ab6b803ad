"""Writing a large file at the pace of the disk.

Problem: written the usual way, bytes are copied to the page cache, which costs more than summing them, and the flush at
the end waits for the disk with nothing else to do. Idea: bytes are gathered in a few aligned buffers, and two threads
write full ones past the page cache (`O_DIRECT`) while the next is filled, so that the disk works from the first MiB on
and the flush finds little left. A checkpoint also pushes nothing else out of the cache. Where a file system cannot do
that, the same buffers are written the usual way.

    with open(path, "xb", buffering=0) as file, stream(file.fileno()) as out:
        out.write(data)                       # bytes in order, of any length; all of them are on disk when the block ends
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from colofunc.executors.disk.files import set_direct

BUFFER_BYTES = 2 << 20  # a multiple of any block size of a disk
BUFFERS, WRITERS = 4, 2
Buffer = np.ndarray[tuple[int], np.dtype[np.uint8]]


class Stream:
    """A file that is written from front to back. Made by `stream`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._at = 0  # of the buffer that is being filled
        self._held = 0  # bytes in it
        self._made = 0
        self._free: SimpleQueue[Buffer] = SimpleQueue()
        self._full: SimpleQueue[tuple[Buffer, int] | None] = SimpleQueue()
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
        write_at(self._fd, memory(self._buffer[: self._held]), self._at)
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
            # Threads of our own: a pool takes no work once the interpreter is ending, and a save in the background ends then.
            self._writers = [Thread(target=self._write, name=f"colofunc-disk-{k}") for k in range(WRITERS)]
            for writer in self._writers:
                writer.start()
        self._full.put((self._buffer, self._at))
        self._at, self._held = self._at + BUFFER_BYTES, 0
        self._buffer = self._fresh() if self._made < BUFFERS else self._free.get()
        if self._errors:
            raise self._errors[0]

    def _fresh(self) -> Buffer:
        """Another buffer, which begins at a page."""
        self._made += 1
        return np.frombuffer(mmap.mmap(-1, BUFFER_BYTES), dtype=np.uint8)

    def _write(self) -> None:
        while (full := self._full.get()) is not None:
            buffer, at = full
            try:
                if not self._errors:
                    write_at(self._fd, memory(buffer), at)
            except BaseException as error:  # raised by the next call of `write` or by `finish`
                self._errors.append(error)
            self._free.put(buffer)


@contextmanager
def stream(fd: int) -> Iterator[Stream]:
    """A stream to an empty file; where the block ends well, everything is on disk."""
    made = Stream(fd)
    try:
        yield made
        made.finish()
    finally:
        made.stop()


def memory(buffer: Buffer) -> memoryview:
    whole: Any = buffer
    return memoryview(whole)


def write_at(fd: int, data: memoryview, at: int) -> None:
    """All of `data` to byte `at` of a file."""
    buffered = False
    while len(data):
        try:
            count = os.pwrite(fd, data, at)
        except OSError as error:
            # Some file systems take the flag and refuse the write; one that ended in the middle of a block is not aligned. The
            # flag is the file's, so the other thread may have taken it away since: ask for nothing, try once without.
            if error.errno != errno.EINVAL or buffered:
                raise
            set_direct(fd, False)
            buffered = True
            continue
        data, at = data[count:], at + count
