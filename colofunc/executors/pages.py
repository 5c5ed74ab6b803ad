"""Pages of the host, pinned where a card copies from and to them.

Note [Who keeps host memory]: all of it is taken here, by four owners that know different things.
- `pools.Pool` knows the program: how many buffers of each size are in use at one time. It takes them once and is never
  out of them.
- `disk.tensors.Staging` knows nothing of what comes: it keeps what was given back, by size, up to what was in use at
  the busiest moment.
- `functional.checkpoint.staging.Slab` knows one save, which takes its bytes front to back and lets go of all of them at
  once.
- Threads that read and write files have a buffer each for as long as they live.
A free list that served the first two would have to be told what is planned to refuse the rest, and what is not to make
room.

Pinned pages that nobody has any more may still be copied. The host does not wait for that: they are unpinned when the
events behind those copies have passed, which is asked for when others are pinned and at the end of a step
(`give_back`). At the end of the process they go with it.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from typing import Any

import attrs
import numpy as np
import torch

from colofunc.executors.pages_in_use import IN_USE

PORTABLE = 1
"""Pinned for all devices of the process: cudaHostRegisterPortable."""


def pages(nbytes: int, pinned: bool = False, seen: bool = False) -> np.ndarray:
    """So many bytes that begin at a page, of any content. They go when nobody has a slice of the array.

    seen: a caller of the project may get tensors that lie there, so copies may begin that `IN_USE` is not told of.
    """
    block = mmap.mmap(-1, max(nbytes, 1))  # no mapping is empty
    memory = np.frombuffer(block, np.uint8)
    if pinned:
        give_back()
        address = memory.ctypes.data
        torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, PORTABLE)))
        weakref.finalize(memory, let_go, block, address, seen).atexit = False
    return memory[:nbytes]


@attrs.frozen(eq=False)
class _Left:
    """Pinned pages that nobody has. `block` keeps them; the events are of their last copies."""

    block: mmap.mmap
    address: int
    events: list[Any]


_LEFT: deque[_Left] = deque()  # taken and put in single steps: a finalizer may come in between, in any thread


def let_go(block: mmap.mmap, address: int, seen: bool) -> None:
    """Nobody has these pages any more."""
    events = IN_USE.leave(address, len(block))
    if seen:  # as far as a copy of the caller's own is on the stream that is current; copies on others are the caller's to wait for
        events.append(torch.cuda.current_stream().record_event())
    _LEFT.append(_Left(block, address, events))
    give_back()


def give_back() -> None:
    """Unpin what no copy reads or writes any more. The host asks, and does not wait."""
    for _ in range(len(_LEFT)):
        try:
            left = _LEFT.popleft()
        except IndexError:  # somebody else was quicker
            return
        if all(event.query() for event in left.events):
            torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(left.address)))
        else:
            _LEFT.append(left)
