"""Copies between tiers on a real device: two streams, one each way, and an event behind each copy.

    copying = COPIER.start("to_device", (x,), device)     # runs beside what the device computes
    copying.wait()                                        # the device's later work waits, or the host where it got the data

On a CPU device and host are RAM, so a copy is done when it has started. Buffers on the host are pinned, which is what lets a copy
run beside compute; torch keeps them in size classes and gives them again. What lies on disk is moved by the threads of its store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colofunc.executors.disk_tensors import SCRATCH, Moving, OnDisk, reading, writing
from colofunc.ops.copies import duplicate


class Copying:
    """A copy in flight."""

    __slots__ = ("_ready", "result")

    def __init__(self, result: torch.Tensor, ready: Callable[[], Any] | None = None) -> None:
        self.result = result
        self._ready = ready

    def wait(self) -> torch.Tensor:
        """The copy, safe to read for whoever runs next in its tier."""
        if self._ready is not None:
            self._ready()
        return self.result


class Copier:
    """The copy engines of the devices in this process, made at the first use."""

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def start(self, kind: str, operands: tuple[torch.Tensor, ...], device: torch.device) -> Copying | Moving:
        """Begin `to_host(x)`, `to_device(x)`, `to_disk(x)` or `put(into, x)`."""
        if kind == "to_disk":
            scratch = SCRATCH.get()
            return Copying(duplicate(operands[0])) if scratch is None else scratch.write(operands[0])
        if isinstance(operands[0], OnDisk):
            return writing(operands[0], operands[1]) if kind == "put" else reading(operands[0])
        if device.type != "cuda":
            return Copying(operands[0].copy_(operands[1]) if kind == "put" else duplicate(operands[0]))
        source = operands[-1]
        current, stream = torch.cuda.current_stream(device), self._stream(device, kind)
        if kind == "put":
            target = operands[0]
        else:
            pinned = kind == "to_host"
            where = torch.device("cpu") if pinned else device
            target = torch.empty_like(source, device=where, pin_memory=pinned, memory_format=torch.preserve_format)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            done = stream.record_event()
        (target if kind == "to_device" else source).record_stream(stream)  # its memory is not given away before the copy ends
        return Copying(target, (lambda: current.wait_event(done)) if kind == "to_device" else done.synchronize)

    def _stream(self, device: torch.device, kind: str) -> torch.cuda.Stream:
        way = "in" if kind == "to_device" else "out"
        if (device, way) not in self._streams:
            self._streams[device, way] = torch.cuda.Stream(device)
        return self._streams[device, way]


COPIER = Copier()
