"""Versions of chunks that are read while training goes on.

Problem: a checkpoint of what lies on disk takes as long as the disk does, and steps go on changing it. Idea: each chunk
has two versions, and a step writes the one that does not count. So what counts now stays for one more step, and the
step after that waits, chunk by chunk, only where it has not been read yet. Nobody waits in silence, nor for a reader
that has stopped.

    held = store.hold(3, Reader("cf.save to '/ckpt'"))      # now
    ...                                                     # steps go on
    held.read(); held.release()                             # the bytes of then, in any thread
"""

from __future__ import annotations

import math
import time
import warnings
import weakref
from collections.abc import Callable
from threading import Condition

import attrs
import torch
from torch import Tensor

from colofunc.errors import DiskError
from colofunc.executors.disk.queue import Ticket
from colofunc.executors.pages import pages

SAY_AFTER_S = 5.0
DEADLINE_S = 1800.0


@attrs.define(eq=False)
class Reader:
    """Who reads what is held.

    `what`: in words, with a path. `deadline_s`: so long may it read nothing while a step waits for it.
    """

    what: str = "a reader"
    deadline_s: float = DEADLINE_S
    read_at_s: float = -math.inf  # when it let go of a chunk last
    waited_s: float = 0.0  # by steps, in all
    told: bool = False  # whether somebody has said so


class Holds:
    """Who wants a version of a chunk to stay as it is. Of any thread."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._readers: dict[tuple[int, int], list[Reader]] = {}

    def add(self, chunk: int, version: int, reader: Reader) -> None:
        with self._changed:
            self._readers.setdefault((chunk, version), []).append(reader)

    def release(self, chunk: int, version: int, reader: Reader) -> None:
        with self._changed:
            self._readers[chunk, version].remove(reader)
            reader.read_at_s = time.monotonic()
            self._changed.notify_all()

    def wait(self, chunk: int, version: int, what: str) -> None:
        """Until nobody wants it any more. what: the chunk in words.

        Says once for each reader that a step waits for it. Raises DiskError where it reads nothing for too long.
        """
        begun_s = time.monotonic()
        with self._changed:
            while readers := self._readers.get((chunk, version)):
                reader, now_s = readers[0], time.monotonic()
                end_s = max(begun_s, reader.read_at_s) + reader.deadline_s
                if now_s >= end_s:
                    raise DiskError(
                        f"{what} cannot be written: {reader.what} has to read it first and has read nothing for "
                        f"{reader.deadline_s:g} s. Try: look whether the disk that it writes to answers; what counts "
                        "on disk is as it was before this step"
                    )
                if not reader.told and reader.waited_s >= SAY_AFTER_S:
                    reader.told = True
                    warnings.warn(f"a step waits to write {what}, which {reader.what} has to read first", stacklevel=2)
                self._changed.wait(end_s - now_s if reader.told else min(end_s - now_s, SAY_AFTER_S - reader.waited_s))
                reader.waited_s += time.monotonic() - now_s


class ChunkVersion:
    """A chunk of so many bytes as it was when `DiskStore.hold` was called.

    It is released with the last reference at the latest.
    """

    def __init__(self, nbytes: int, read: Callable[[Tensor], Ticket], release: Callable[[], None]) -> None:
        self._nbytes, self._read = nbytes, read
        self._end = weakref.finalize(self, release)
        self._end.atexit = False

    def read(self) -> Tensor:
        """Its bytes."""
        into = torch.from_numpy(pages(self._nbytes))
        self._read(into).wait()
        return into

    def release(self) -> None:
        """It may be written again. Twice is as good as once."""
        self._end()
