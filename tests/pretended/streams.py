"""Streams and events of a pretended card: work runs late, and in a random order within what events and waits allow.

Problem: on a real card a missing wait is a race that shows once in a thousand runs. Idea: nothing runs when it is handed to a stream. Only
when the host waits is work taken from the heads of the streams, by priorities that are drawn at random and drawn anew now and then, so that
one stream may be far ahead of another; a wait for an event is all that holds a stream back.

    first, second = Stream(engine), Stream(engine)
    first.launch(lambda: x.copy_(y))
    second.wait_stream(first)            # without it, second's work may come first
    second.launch(lambda: z.copy_(x))
    second.synchronize()

Source of the priorities: Burckhardt et al., A randomized scheduler with probabilistic guarantees of finding bugs (2010).
"""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

ANEW = 1 / 16
"""Probability that the priorities of streams are drawn anew behind one piece of work."""
POLL_S = 1e-4
"""Between two looks at work that other processes have to end."""


class Mark:
    """A point in a stream: passed when all that was handed to the stream before it has run."""

    def __init__(self) -> None:
        self.passed = False
        self.passed_at = 0  # pieces of work that had run by then


class Engine:
    """Runs the work of all streams of a process, when somebody waits for it. Errors of work come out where the host waits."""

    def __init__(self, seed: int, waits: Callable[[str], None] = lambda why: None) -> None:
        self.lock = threading.RLock()
        self.ran = 0
        self.host_waits = waits  # told of each wait of the host, and what for
        self._random = random.Random(seed)
        self._streams: list[Stream] = []
        self._priority: dict[Stream, float] = {}
        self._failure: Exception | None = None

    def add(self, stream: Stream) -> None:
        self._streams.append(stream)
        self._priority[stream] = self._random.random()

    def until(self, mark: Mark) -> None:
        """Run work until a mark is passed."""
        with self.lock:
            while not mark.passed:
                if not self.step():
                    time.sleep(POLL_S)
            self._raise()

    def drain(self) -> None:
        """Run all work there is."""
        with self.lock:
            while any(stream.queue for stream in self._streams):
                if not self.step():
                    time.sleep(POLL_S)
            self._raise()

    def step(self) -> bool:
        """Run one piece of work; False where each stream waits for another process.

        The collector is off meanwhile: what it finds may wait for the card (pages that are let go of), in the middle of this piece.
        """
        with self.lock, _without_collector():
            ready = [stream for stream in self._streams if stream.queue and stream.queue[0].ready()]
            if not ready:
                if not any(isinstance(stream.queue[0], Elsewhere) for stream in self._streams if stream.queue):
                    raise RuntimeError("every stream waits for an event that no stream will pass")
                return False
            if self._random.random() < ANEW:
                self._priority = {stream: self._random.random() for stream in self._streams}
            stream = max(ready, key=self._priority.__getitem__)
            work = stream.queue.popleft()
            self.ran += 1
            with _apart():
                try:
                    work.run(self)
                except Exception as error:  # as on a card: told to the host when it next waits
                    self._failure = self._failure or error
            return True

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Whatever the host is at when it comes to run work: tracing, or the middle of an operator on fake tensors.

    There torch computes shapes only, for all tensors: kernels would write nothing, and collectives would not begin.
    """
    shapes_only = torch._C._meta_in_tls_dispatch_include()
    torch._C._set_meta_in_tls_dispatch_include(False)
    try:
        # In inference mode it may write to tensors that were made there, and to others.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            yield
    finally:
        torch._C._set_meta_in_tls_dispatch_include(shapes_only)


class Work:
    """A kernel or a copy."""

    def __init__(self, run: Callable[[], Any]) -> None:
        self._run = run

    def ready(self) -> bool:
        return True

    def run(self, engine: Engine) -> None:
        self._run()


class Passing(Work):
    """The place of a mark."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def run(self, engine: Engine) -> None:
        self.mark.passed, self.mark.passed_at = True, engine.ran


class Waiting(Work):
    """A stream waits until a mark is passed."""

    def __init__(self, mark: Mark) -> None:
        self.mark = mark

    def ready(self) -> bool:
        return self.mark.passed

    def run(self, engine: Engine) -> None: ...


class Elsewhere(Work):
    """Work with other processes, such as a collective: begun when it is at the head of its stream, ended when they have joined."""

    def __init__(self, begin: Callable[[], Any], end: Callable[[], Any]) -> None:
        self._begin, self._end = begin, end
        self._pending: Any = None

    def ready(self) -> bool:
        if self._pending is None:
            with _apart():
                self._pending = self._begin()
        return all(pending.is_completed() for pending in self._pending)

    def run(self, engine: Engine) -> None:
        for pending in self._pending:
            pending.wait()  # raises what went wrong
        self._end()


class Stream:
    """A queue of work. Has the methods of `torch.cuda.Stream` that the project calls."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.device = device
        self.engine = engine
        self.queue: deque[Work] = deque()
        engine.add(self)

    def launch(self, run: Callable[[], Any]) -> None:
        self.push(Work(run))

    def push(self, work: Work) -> None:
        with self.engine.lock:
            self.queue.append(work)

    def mark(self) -> Mark:
        mark = Mark()
        self.push(Passing(mark))
        return mark

    def wait_mark(self, mark: Mark) -> None:
        if not mark.passed:
            self.push(Waiting(mark))

    def wait_event(self, event: Event) -> None:
        if event.marked is not None:
            self.wait_mark(event.marked)

    def wait_stream(self, other: Stream) -> None:
        self.wait_mark(other.mark())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """What a program calls: the host waits, and that is counted."""
        self.engine.host_waits("stream")
        self.finish()

    def finish(self) -> None:
        """Run what it has been given, for the pretence itself."""
        self.engine.until(self.mark())


class Event:
    """Has the methods of `torch.cuda.Event`. Where none is given, `record` and `wait` take the current stream."""

    current: Callable[[], Stream]
    """Set while a machine is pretended."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.marked: Mark | None = None
        self.stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or Event.current()
        self.marked = self.stream.mark()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or Event.current()).wait_event(self)

    def synchronize(self) -> None:
        if self.stream is not None and self.marked is not None:
            self.stream.engine.host_waits("event")
            self.stream.engine.until(self.marked)

    def query(self) -> bool:
        return self.marked is None or self.marked.passed

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, if each piece of work took a microsecond."""
        assert self.marked is not None and end.marked is not None, "both events are recorded first"
        return (end.marked.passed_at - self.marked.passed_at) * 1e-3
