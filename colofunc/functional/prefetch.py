"""Reading ahead: a thread that keeps the next few items of an iterator ready.

Problem: a step waits for its data. Idea: a thread reads up to `count` items ahead; what fails there is raised where the
item is asked for, with its own traceback, and the thread ends when its reader is closed, dropped or exhausted.

    with closing(Prefetcher(iter(loader), 2)) as items:
        for item in items: ...

The first item is read by the caller: who shuffles draws from torch's generator then, and must not race with the step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Any

_END = object()


class _Failed:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class Prefetcher:
    """An iterator over `source`, `count` items ahead."""

    def __init__(self, source: Iterator[Any], count: int) -> None:
        self._source: Iterator[Any] | None = source
        self._items: Queue[Any] = Queue(count)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = False
        # The thread knows the queue and the event, not this object, so that dropping this object ends it.
        weakref.finalize(self, self._stop.set)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        if self._thread is None:
            return self._first()
        item = self._items.get()
        if item is _END:
            self.close()
            raise StopIteration
        if isinstance(item, _Failed):
            self.close()
            error = item.error
            try:
                raise error
            finally:
                del item, error  # its traceback has this frame: no cycle may keep the loader's workers alive
        return item

    def _first(self) -> Any:
        assert self._source is not None
        source, self._source = self._source, None
        try:
            item = next(source)
        except BaseException:
            self._over = True
            raise
        work = (source, self._items, self._stop)
        self._thread = threading.Thread(target=_read, args=work, name="colofunc-batches", daemon=True)
        self._thread.start()
        return item

    def close(self) -> None:
        """End the thread; what it has read is dropped."""
        self._over = True
        self._stop.set()
        self._source = None
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=30.0)
        while not self._items.empty():
            try:
                self._items.get_nowait()
            except Empty:
                break


def _read(source: Iterator[Any], items: Queue[Any], stop: threading.Event) -> None:
    try:
        for item in source:
            if not _put(items, item, stop):
                return
        _put(items, _END, stop)
    except BaseException as error:  # raised again where the item is asked for
        _put(items, _Failed(error), stop)


def _put(items: Queue[Any], item: Any, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            items.put(item, timeout=0.05)
            return True
        except Full:
            continue
    return False
