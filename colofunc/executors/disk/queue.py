"""The threads of the disk tier: blocks move first come, first served, work on one chunk in the order it was asked for.

Problem: system calls that move megabytes should run beside the computation, a bounded number of bytes at a time, and a
read must not overtake the write before it. Idea: a few threads, each with one buffer that direct I/O can use; per chunk
a chain of which only the first work has blocks in the common queue.

    workers = Workers(threads=4, block_bytes=4 << 20)
    workers.submit(Work(chunk=0, move=move, ticket=ticket, left=blocks, writes=True, ended=ended))
    ticket.wait()
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Condition, Event, Thread, current_thread

import attrs

from colofunc.errors import DiskError
from colofunc.executors.direct_io import ByteArray
from colofunc.executors.pages import pages

Before = Callable[[], None]  # returns when host memory may be read or written: what copies of a card are waited for by
MoveBlock = Callable[[int, ByteArray], None]  # (block of the chunk, a buffer of the thread)


class Ticket:
    """A read or write that was asked for."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._ended = Event()
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all bytes have moved. Raises DiskError that says why they have not."""
        if not self._ended.wait(timeout_s):
            raise DiskError(
                f"{self._what} has not ended after {timeout_s} s. Try: look whether the disk answers at all"
            )
        if self._error is not None:
            raise self._error

    def end(self, error: BaseException | None) -> None:
        self._error = error
        self._ended.set()


@attrs.define(eq=False)
class Work:
    """All blocks of one read or write."""

    chunk: int
    move: MoveBlock
    ticket: Ticket
    left: int  # blocks that have not moved
    writes: bool
    ended: Callable[[BaseException | None], None]  # told how it ended, before the ticket
    error: BaseException | None = None


class Workers:
    """Threads with one buffer each, so that what is under way takes no more memory than these buffers.

    Work on a chunk begins when the work before it on the same chunk has ended.
    """

    def __init__(self, threads: int, block_bytes: int) -> None:
        self._changed = Condition()  # of everything below
        self._ready: deque[tuple[Work, int]] = deque()
        self._chains: dict[int, deque[Work]] = {}  # per chunk: what is under way, what waits
        self._writing = 0
        self._stopping = False
        # Daemons: others would be waited for before the end of the process can stop them.
        args = [(pages(block_bytes),) for _ in range(threads)]
        self._threads = [
            Thread(target=self._serve, args=arg, name=f"colofunc-disk-{k}", daemon=True) for k, arg in enumerate(args)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Work) -> None:
        with self._changed:
            chain = self._chains.setdefault(work.chunk, deque())
            chain.append(work)
            self._writing += work.writes
            if len(chain) == 1:
                self._begin(work)

    def wait_for_writes(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._writing == 0)

    def stop(self) -> None:
        """End the threads after the blocks they are at; what was asked for and has not ended fails."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with self._changed:
            for work in [work for chain in self._chains.values() for work in chain]:
                work.ticket.end(
                    DiskError("the store was closed before this ended. Try: wait for what is needed before close()")
                )
            self._chains.clear()

    @property
    def mine(self) -> bool:
        """Whether this is called in one of the threads."""
        return current_thread() in self._threads

    def _serve(self, buffer: ByteArray) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._stopping)
                if self._stopping:
                    return
                work, block = self._ready.popleft()
            error: BaseException | None = None
            if work.error is None:
                try:
                    work.move(block, buffer)
                except BaseException as raised:  # given to who waits for the ticket
                    error = raised
            with self._changed:
                work.error = work.error or error
                work.left -= 1
                if work.left == 0:
                    self._end(work)
            del work, error  # both hold the caller's tensor

    def _begin(self, work: Work) -> None:
        if work.left == 0:
            self._end(work)
            return
        self._ready.extend((work, block) for block in range(work.left))
        self._changed.notify_all()

    def _end(self, work: Work) -> None:
        chain = self._chains[work.chunk]
        chain.popleft()
        self._writing -= work.writes
        self._changed.notify_all()
        work.ended(work.error)
        work.ticket.end(work.error)
        if chain:
            self._begin(chain[0])
        else:
            del self._chains[work.chunk]
