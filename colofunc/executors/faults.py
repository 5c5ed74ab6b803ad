"""Faults on purpose: a door through which a test makes one rank fail at one kind of collective.

Problem: how a run ends when a rank fails must be tested on a laptop and on real ranks alike. Idea: every executor asks
a context variable before each collective; it is empty except inside `fail`.

>>> with fail(rank=1, at="all_gather"):
...     ask("all_gather", (0,))            # rank 0 passes
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import attrs

from colofunc.errors import FaultError, InputError, near

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "send")


@attrs.define
class Fault:
    """Rank `rank` fails the first time it comes to a collective of kind `at`, after `skip` of them."""

    rank: int
    at: str
    skip: int = 0


_FAULT: ContextVar[Fault | None] = ContextVar("colofunc_fault", default=None)


@contextmanager
def fail(rank: int, at: str, skip: int = 0) -> Iterator[None]:
    """Inside, rank `rank` raises FaultError at its collective number `skip` of kind `at` ("all_gather", ...)."""
    if at not in KINDS:
        raise InputError(f"fail: no collective is called {at!r}{near(at, KINDS, 'collectives')}")
    token = _FAULT.set(Fault(rank, at, skip))
    try:
        yield
    finally:
        _FAULT.reset(token)


def ask(kind: str, ranks: Sequence[int]) -> None:
    """Called before a collective that `ranks` are about to run; raises where one of them is to fail."""
    fault = _FAULT.get()
    if fault is None or fault.at != kind or fault.rank not in ranks:
        return
    if fault.skip > 0:
        fault.skip -= 1
        return
    raise FaultError(f"rank {fault.rank} fails at {kind} because a test asked for it (colofunc.testing.fail)")
