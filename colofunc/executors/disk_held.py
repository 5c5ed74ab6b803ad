"""Versions of chunks that are read while training goes on.

Problem: a checkpoint of what lies on disk takes as long as the disk does, and steps go on changing it. Idea: each chunk has two
versions, and a step writes the one that does not count. So what counts now stays for one more step, and the step after that waits,
chunk by chunk, only where it has not been read yet.

    held = store.hold(3)               # now
    ...                                # steps go on
    held.read(); held.release()        # the bytes of then, in any thread
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import Condition

import torch
from torch import Tensor

from colofunc.executors.disk_queue import Ticket, aligned


class Holds:
    """How many want a version of a chunk to stay as it is. Of any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._counts: dict[tuple[int, int], int] = {}

    def add(self, chunk: int, version: int) -> None:
        with self._changed:
            self._counts[chunk, version] = self._counts.get((chunk, version), 0) + 1

    def release(self, chunk: int, version: int) -> None:
        with self._changed:
            self._counts[chunk, version] -= 1
            self._changed.notify_all()

    def wait(self, chunk: int, version: int) -> None:
        """Until nobody wants it any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._counts.get((chunk, version)))


class Held:
    """A chunk of so many bytes as it was when `DiskStore.hold` was called; it is released with the last reference at the latest."""

    def __init__(self, nbytes: int, read: Callable[[Tensor], Ticket], release: Callable[[], None]) -> None:
        self._nbytes, self._read = nbytes, read
        self._end = weakref.finalize(self, release)
        self._end.atexit = False

    def read(self) -> Tensor:
        """Its bytes."""
        into = torch.from_numpy(aligned(self._nbytes))
        self._read(into).wait()
        return into

    def release(self) -> None:
        """It may be written again. Twice is as good as once."""
        self._end()
