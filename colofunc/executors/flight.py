"""Flight: what this rank has handed to its GPU and what has not ended there.

Problem: with NCCL a collective is done by the GPU. The host starts it, leaves the step and goes on; where a peer is
gone, nothing raises, and the host comes to wait much later, for a number that never comes. Idea: a step leaves its
collectives by name, and an event behind its last operator. The thread that watches the peers asks which of them have
passed: the first that has not is where this rank is.

    flight.begin(7, "in step 7 (train) at train.py:20")
    flight.started("all_gather 0.weight at train.py:12", works)
    flight.end(event)                        # recorded behind the last operator
    flight.waiting(300.0)                    # what the GPU is at, since when; None where all has passed

A step that has passed is dropped when the next one ends: what is kept are the works of the steps that the host is ahead
by.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from colofunc import compat
from colofunc.executors.presence import Waiting

ABORT_S = 5.0
"""How long to end a communicator may take: it waits for kernels, which may wait for those of another communicator."""


@attrs.define(eq=False)
class _Launched:
    """One step. `works`: (name, what is asked whether it is over), in the order in which they were started."""

    step: int
    what: str
    works: deque[tuple[str, Any]] = attrs.field(factory=deque)
    end: torch.cuda.Event | None = None  # from the moment on when the host has left the step


class Flight:
    """The steps that have not passed on this rank's GPU. The main thread adds to it, the watch's thread looks."""

    def __init__(self) -> None:
        self._steps: deque[_Launched] = deque()
        self._open: _Launched | None = None
        self._lock = threading.Lock()
        self._seen: tuple[int, int] = 0, -1  # (number of steps, collectives left in the first) when it was looked last
        self._waiting: Waiting | None = None
        self._ended = 0
        self.used = False
        self.passed = 0  # the last step of which all has passed

    def begin(self, step: int, what: str) -> None:
        """The host begins to hand over the program of a step."""
        self.used = True
        self._open = _Launched(step, what)
        with self._lock:
            self._steps.append(self._open)

    def started(self, name: str, works: Sequence[Any]) -> None:
        """The host has started a collective of this step."""
        if self._open is not None:
            self._open.works.extend((name, work) for work in works)

    def end(self, event: torch.cuda.Event) -> None:
        """The host has handed over all of it, and the event behind it."""
        if self._open is not None:
            self._open.end, self._open = event, None
        with self._lock:
            self._drop()

    def give_up(self) -> None:
        """The step was interrupted on the host: what of it is on the GPU has no end that could be asked for."""
        with self._lock:
            if self._open is not None:
                self._steps.remove(self._open)
        self._open = None

    def wait(self) -> None:
        """Until all has passed; the watch's thread goes on looking."""
        for launched in list(self._steps):
            if launched.end is not None:
                launched.end.synchronize()

    def waiting(self, limit_s: float) -> Waiting | None:
        """What the GPU has not come past, and since when it is the same; None where all has passed."""
        with self._lock:
            self._drop()
            if not self._steps:
                self._waiting = None
                return None
            first = self._steps[0]
            while first.works and first.works[0][1].is_completed():
                first.works.popleft()
            place = self._ended, len(first.works)
            if self._waiting is None or place != self._seen:
                at = f"in {first.works[0][0]}, " if first.works else ""
                self._waiting, self._seen = Waiting(at + first.what, limit_s, step=first.step, on_gpu=True), place
            return self._waiting

    def _drop(self) -> None:
        """Leave out the steps that have passed."""
        while self._steps and (end := self._steps[0].end) is not None and end.query():
            self.passed = max(self.passed, self._steps.popleft().step)
            self._ended += 1


def mark_passed(device: torch.device) -> torch.cuda.Event:
    """What the GPU comes past when it has done all that its current stream has so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def abort_all() -> list[Any]:
    """End what all process groups have under way on GPUs, without the peers; the groups. They carry nothing after that.

    Side by side: the kernels of one communicator may stand behind those of another.
    """
    groups = compat.all_groups()
    threads = [threading.Thread(target=compat.abort, args=(group, "cuda"), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ABORT_S)
    return groups
