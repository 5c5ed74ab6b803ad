"""From a card to the host for a save: everything at once or a window ahead, waited for by an event.

Problem: `x.cpu()` makes the host wait for all that the card has been given, once for each tensor, and copies at half
the speed of the link. Idea: copies go to pinned memory one behind another, on the stream that computes, so that steps
that come later write behind them; one event stands behind all, and whoever writes the file waits for it.

    slab = Slab()
    items = snapshot_items(items, slab)        # the host goes on, the next step may begin
    items[0].value()                     # waits, once

A save that its caller waits for stages `WINDOW_BYTES` while those before are written: pinned memory is two windows, or
two of the largest tensor. One beside the steps needs room for all that it copies, which it keeps for the next save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch

from colofunc.executors.pages import pages
from colofunc.functional.checkpoint.files import PieceToWrite
from colofunc.functional.checkpoint.pages import copy

WINDOW_BYTES = 256 << 20
ALIGNED_BYTES = 64

ValueFn = Callable[[], torch.Tensor]


class Slab:
    """Pinned memory that one save uses at a time; it grows to what is asked for."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else self._memory.numel()

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes of any content; what was taken before is given back."""
        if self._memory is None or self._memory.numel() < nbytes or not self._memory.is_pinned():
            self._memory = None  # it goes before there is more
            self._memory = torch.from_numpy(pages(nbytes, pinned=True))
        return self._memory[:nbytes]


class StagedCopies:
    """Copies on their way to `tensors`, in memory of the host; nobody reads them before `wait`."""

    def __init__(self, tensors: list[torch.Tensor], events: list[Any]) -> None:
        self.tensors = tensors
        self._events = events

    def wait(self) -> None:
        """Until all have come, which takes time once."""
        for event in self._events:
            event.synchronize()
        self._events = []  # they have passed; a thread that is still in the loop has the list of before

    def value(self, k: int) -> torch.Tensor:
        self.wait()
        return self.tensors[k]

    def values(self) -> list[ValueFn]:
        """Per tensor, what waits for all and gives it."""
        return [partial(self.value, k) for k in range(len(self.tensors))]


def stage(values: Sequence[ValueFn], nbytes: Sequence[int], slab: Slab, duplicate: bool) -> StagedCopies:
    """The values in memory of the host; `nbytes`: of each. Those on a card are copied as the current stream gets there.

    duplicate: what lies on the host is copied too, at once, because it will be written to.
    """
    tensors: list[torch.Tensor] = []
    streams: dict[torch.device, Any] = {}
    memory, at = None, 0
    for value, size in zip(values, nbytes, strict=True):
        x = value().detach()
        if not x.numel():
            x = torch.empty(x.shape, dtype=x.dtype)
        elif x.is_cuda:
            if memory is None:
                memory = slab.take(sum(map(_rounded, nbytes)))
            room = memory[at : at + size].view(x.dtype).reshape(x.shape)
            x = _sent(room, x, streams)
            at += _rounded(size)
        elif duplicate:
            x = copy(x)
        tensors.append(x)
    events = []
    for stream in streams.values():
        events.append(torch.cuda.Event(blocking=True))
        events[-1].record(stream)
    return StagedCopies(tensors, events)


def _rounded(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


def _sent(room: torch.Tensor, x: torch.Tensor, streams: dict[torch.device, Any]) -> torch.Tensor:
    """`room`, which will hold `x` when the stream has got there."""
    stream = streams.setdefault(x.device, torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        room.copy_(x.resolve_conj().resolve_neg(), non_blocking=True)
    return room


def snapshot_items(items: Sequence[PieceToWrite], slab: Slab) -> list[PieceToWrite]:
    """The items with copies of their values, begun when this returns: steps may write to what they are of."""
    values = stage([item.value for item in items], [item.nbytes for item in items], slab, duplicate=True).values()
    return [attrs.evolve(item, value=value) for item, value in zip(items, values, strict=True)]


@attrs.define(eq=False)
class Window:
    """Items that are staged together."""

    items: list[PieceToWrite]
    values: list[ValueFn] = attrs.field(factory=list)

    def begin(self, slab: Slab) -> None:
        staged = stage([item.value for item in self.items], [item.nbytes for item in self.items], slab, duplicate=False)
        self.values = staged.values()


def stage_ahead(items: Sequence[PieceToWrite], window_bytes: int = WINDOW_BYTES) -> list[PieceToWrite]:
    """The items, whose values are asked for one after another, with those of the next window on their way to the host
    meanwhile.

    What is read from disk is read when it is asked for. Whoever asks in another order gets the same, and waits more
    often.
    """
    windows = list(_windows([item for item in items if not item.on_disk], window_bytes))
    slabs = Slab(), Slab()
    holds = [-1, -1]  # the window that lies in each slab

    def value(number: int, place: int) -> torch.Tensor:
        """Of the item at a place in a window; begins that window and the next."""
        for near in (number, number + 1):  # the slab of window n is free when n + 1 is asked for
            if near < len(windows) and holds[near % 2] != near:
                windows[near].begin(slabs[near % 2])
                holds[near % 2] = near
        return windows[number].values[place]()

    values: list[ValueFn] = []
    for number, window in enumerate(windows):
        for place in range(len(window.items)):
            values.append(partial(value, number, place))
    staged, in_order = [], iter(values)
    for item in items:
        staged.append(item if item.on_disk else attrs.evolve(item, value=next(in_order)))
    return staged


def as_given(work: Callable[[], None]) -> Callable[[], None]:
    """`work` for another thread, where what it gives a card stands behind what the current stream of this thread has
    been given.
    """
    if not torch.cuda.is_initialized():
        return work
    stream = torch.cuda.current_stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            work()

    return run


def _windows(items: Sequence[PieceToWrite], window_bytes: int) -> Iterator[Window]:
    window, nbytes = list[PieceToWrite](), 0
    for item in items:
        if window and nbytes + item.nbytes > window_bytes:
            yield Window(window)
            window, nbytes = [], 0
        window.append(item)
        nbytes += item.nbytes
    if window:
        yield Window(window)
