"""Copies between tiers on a real device: two streams, one each way, and events between them and who uses the memory.

    copying = COPIER.start("to_device", (x,), device)     # runs beside what the device computes
    copying.wait()                                        # the device's later work waits for it; the host goes on

Host memory is written and read by three parties that do not wait for one another: both streams, and the host itself. So
each piece of it remembers the copies of it (`pages_in_use`); whoever comes next waits for what stands in its way: a
stream for events, the host in `settle`. Memory of the device needs none of it: it is allocated, and after the wait
given back, in the order of the stream that computes. The host leaves a step without waiting: the copies of the next one
wait for these, and outside of steps the host waits when it looks at what a copy has to do with (`arrived`). At the end
of the process nobody looks, so nobody waits.

On a CPU device and host are RAM, so a copy is done when it has started. What lies on disk is moved by the threads of
its store, into and from pinned memory where there is a card; it is they that wait for copies of that memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from colofunc.executors.disk.tensors import SCRATCH, Moving, OnDisk, reading, writing
from colofunc.executors.pages import give_back
from colofunc.executors.pages_in_use import IN_USE, Flights, InUse
from colofunc.executors.pools import Pool
from colofunc.ops.copies import duplicate


class Copying:
    """A copy in flight. It holds what is copied until it is waited for."""

    __slots__ = ("_ready", "_source", "result")

    def __init__(
        self, result: torch.Tensor, ready: Callable[[], Any] | None = None, source: torch.Tensor | None = None
    ) -> None:
        self.result = result
        self._ready, self._source = ready, source

    def wait(self) -> torch.Tensor:
        """The copy, safe to read for whoever runs next in its tier; on the host, for who has asked to `settle` it."""
        if self._ready is not None:
            self._ready()
            self._ready = self._source = None
        return self.result


class Engines:
    """What a device copies with: streams and events, as CUDA has them. Tests have others."""

    def current(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device) -> Any:
        return torch.cuda.Stream(device)

    def empty(self, like: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        """Memory of any content that lies as `like` does, of a device or (None) of the host, where it is pinned."""
        where, pinned = device or torch.device("cpu"), device is None
        return torch.empty_like(like, device=where, pin_memory=pinned, memory_format=torch.preserve_format)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin to copy on a stream; the event behind it."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()


class Copier:
    """The copy engines of the devices in this process, made at the first use."""

    def __init__(self, engines: Engines | None = None, in_use: InUse | None = None) -> None:
        self._engines = engines or Engines()
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._in_use = InUse() if in_use is None else in_use

    def start(
        self, kind: str, operands: tuple[torch.Tensor, ...], device: torch.device, pool: Pool | None = None
    ) -> Copying | Moving:
        """Begin `to_host(x)`, `to_device(x)`, `to_disk(x)` or `put(into, x)`.

        `pool`: where a copy on the host is to lie.
        """
        if kind == "to_disk":
            scratch = SCRATCH.get()
            if scratch is not None:
                return scratch.write(operands[0], self._before(operands[0], writes=False))
            self.settle(operands)
            return Copying(duplicate(operands[0]))
        if isinstance(operands[0], OnDisk):
            if kind == "put":
                return writing(operands[0], operands[1], self._before(operands[1], writes=False))
            return reading(operands[0], device.type != "cpu", partial(self._before, writes=True))
        if device.type != "cpu":
            return self._fly(kind, operands, device, pool)
        if kind == "put" or (pool is not None and kind == "to_host"):
            target = operands[0] if kind == "put" or pool is None else pool.like(operands[0])
            return Copying(target.copy_(operands[-1]))
        return Copying(duplicate(operands[0]))

    def _fly(self, kind: str, operands: tuple[torch.Tensor, ...], device: torch.device, pool: Pool | None) -> Copying:
        source, writes = operands[-1], kind != "to_device"  # whether host memory is written
        if kind == "put":
            target = operands[0]
        elif pool is not None and kind == "to_host":
            target = pool.like(source)
        else:
            target = self._engines.empty(source, None if writes else device)
        current, stream = self._engines.current(device), self._stream(device, kind)
        flights = self._in_use.of(target if writes else source)
        stream.wait_stream(current)  # what it reads is computed, and who had the target's memory before has ended
        for event in flights.before(writes):
            stream.wait_event(event)
        done = self._engines.copy(stream, target, source)
        flights.note(done, writes)
        return Copying(target, partial(current.wait_event, done), source)

    def _before(self, x: torch.Tensor, writes: bool) -> Callable[[], None] | None:
        """What a thread calls before it reads or writes this memory of the host.

        So the host itself need not wait.
        """
        flights = self._known(x)
        events = () if flights is None else tuple(flights.before(writes))
        return partial(_passed, events) if events else None

    def settle(self, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor] = ()) -> None:
        """The host waits until it may read and write these tensors of its own."""
        for x, changed in (*((x, False) for x in reads), *((x, True) for x in writes)):
            flights = self._known(x)
            if flights is not None:
                for event in flights.before(changed):
                    event.synchronize()
                flights.passed(changed)

    def arrived(self, tensors: Iterable[torch.Tensor]) -> None:
        """Outside of a step, and in any thread: the host waits until it may read and write these tensors."""
        if self._in_use:
            for x in tensors:
                passed = self._before(x, writes=True)
                if passed is not None:
                    passed()

    def finish(self) -> None:
        """At the end of a step, for which the host does not wait: what has passed by now is forgotten, and its memory
        goes.
        """
        self._in_use.forget()
        give_back()

    def _known(self, x: torch.Tensor) -> Flights | None:
        return None if isinstance(x, OnDisk) or not x.is_cpu else self._in_use.known(x)

    def _stream(self, device: torch.device, kind: str) -> Any:
        way = "in" if kind == "to_device" else "out"
        if (device, way) not in self._streams:
            self._streams[device, way] = self._engines.stream(device)
        return self._streams[device, way]


def _passed(events: Iterable[Any]) -> None:
    for event in events:
        event.synchronize()


COPIER = Copier(in_use=IN_USE)
"""One for the process, as its engines are."""
