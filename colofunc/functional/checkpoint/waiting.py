"""Waiting for the files of another rank while a checkpoint is written.

Problem: ranks that write say in files that they are done, in a thread beside the steps, where no collective notices
that one of them was killed. Idea: whoever waits for a rank's file asks now and then what has become of its process.

    files = Patience(watch, "save to 'run/7'", deadline_s=1800.0)
    files.wait(1, part.exists, "had not written its part")     # rank 1's part is there, or an error says why it never will be
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from colofunc.errors import CheckpointError
from colofunc.executors.presence import say_presence
from colofunc.executors.watch import Watch

POLL_S = 0.02
LOOK_S = 1.0  # how often it is asked what has become of a process


@attrs.define(eq=False)
class Patience:
    """How long the ranks of one save wait for one another's files."""

    watch: Watch | None
    what: str
    deadline_s: float
    _until_s: float = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._until_s = time.monotonic() + self.deadline_s

    def wait(self, rank: int, done: Callable[[], bool], late: str, hint: str = "") -> None:
        """Until `done()`. Raises CheckpointError where the rank's process has ended before, and after the deadline.

        late: what the rank has not done, as in "had not written its part".
        """
        look_s, told = time.monotonic() + LOOK_S, False
        while not done():
            now_s = time.monotonic()
            if now_s > self._until_s:
                known = "" if self.watch is None else f" ({self.watch.fate(rank)[1]})"
                raise CheckpointError(f"{self.what}: rank {rank} {late} after {self.deadline_s:g} s{known}{hint}")
            if self.watch is not None and now_s > look_s:
                look_s = now_s + LOOK_S
                condition, text = self.watch.fate(rank)
                if condition == "ended" and not done():  # it may have been the last thing that it did
                    raise CheckpointError(f"{self.what}: {text}; it {late}")
                if condition == "stopped" and not told:
                    told = True
                    say_presence(
                        self.watch.rank, f"waits in {self.what} for {text}; it gives up after {self.deadline_s:g} s"
                    )
            time.sleep(POLL_S)
