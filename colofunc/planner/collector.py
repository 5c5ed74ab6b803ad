"""The garbage collector while a step is traced and a plan is made: fewer collections.

Problem: a plan makes millions of small records, next to none of them in a cycle, and the collector walks over them
again and again: a third of the time of a large plan. Idea: raise its threshold until the plan is there.

    with fewer_collections():
        plan = ...
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

THRESHOLD = 100_000
"""Generation-0 threshold of the garbage collector while a step is traced and planned."""
LOCK = Lock()
SAVED: list[tuple[int, int, int]] = []
"""The thresholds from before, once for each thread that is planning."""


@contextmanager
def fewer_collections() -> Iterator[None]:
    """The thresholds are as before behind it. Where collection is switched off, it stays so."""
    with LOCK:
        # A thread that begins while another one plans finds a raised threshold: what was before is what that one saved.
        SAVED.append(SAVED[0] if SAVED else gc.get_threshold())
        before = SAVED[0]
        if before[0] > 0:
            gc.set_threshold(max(THRESHOLD, before[0]), *before[1:])
    try:
        yield
    finally:
        with LOCK:
            before = SAVED.pop()
            if not SAVED:
                gc.set_threshold(*before)
