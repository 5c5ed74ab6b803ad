"""Fewer collections of cycles while a plan is made.

Problem: a plan makes millions of small records, next to none of them in a cycle, and the collector walks over them again and
again: a third of the time of a large plan. Idea: it looks a hundred times less often, until the plan is there.

    with seldom():
        plan = ...
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

EVERY = 100_000
"""Generation-0 threshold of the garbage collector while a plan is made."""
LOCK = Lock()
SET: list[tuple[int, int, int]] = []
"""The thresholds from before, once for each thread that is planning."""


@contextmanager
def seldom() -> Iterator[None]:
    """As often as before again behind it; where collection is switched off, it stays so."""
    with LOCK:
        SET.append(SET[0] if SET else gc.get_threshold())
        if SET[0][0] > 0:
            gc.set_threshold(max(EVERY, SET[0][0]), *SET[0][1:])
    try:
        yield
    finally:
        with LOCK:
            last = SET.pop()
            if not SET:
                gc.set_threshold(*last)
