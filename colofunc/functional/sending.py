"""Parts of batches on their way to a card, beside what the card computes.

Problem: a copy from memory that is not pinned makes the host wait for all that the card has been given. Idea: a part is
pinned (where the loader has not), and copied on a stream of its own; the stream that computes waits for the copy, the
host does not.

    sender = Sender(torch.device("cuda", 0))
    x = sender.send(part)                     # the host goes on; work that comes later sees the numbers
"""

from __future__ import annotations

from typing import Any

import torch


class Sender:
    """Sends what lies on the host to one device, and leaves what lies elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None  # made with the first copy, by who reads the batches

    def send(self, x: torch.Tensor) -> torch.Tensor:
        """`x` on the device, safe to read for what the current stream is given from now on."""
        if self.device.type == "cpu" or x.device.type != "cpu":
            return x
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            there = x.pin_memory().to(self.device, non_blocking=True)
        current.wait_event(self._stream.record_event())
        there.record_stream(current)  # its memory is of the stream that copies
        return there
