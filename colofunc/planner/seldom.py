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

EVERY = 100_000
"""So many more records than went away, before the youngest are looked at."""


@contextmanager
def seldom() -> Iterator[None]:
    """As often as before again behind it; where collection is switched off, it stays so."""
    before = gc.get_threshold()
    if before[0] > 0:
        gc.set_threshold(max(EVERY, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
