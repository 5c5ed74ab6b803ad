"""Host memory in use: which copies read and write each piece of it, by the events behind them.

Problem: copies go on when the host has left the step that began them. What they read and write must not be read,
written or given back meanwhile, and nobody is to wait for more than that. Idea: each piece of host memory remembers the
event behind the last copy into it and those behind copies out of it since (`Flights`); whoever comes next asks for what
stands in its way. What has passed is forgotten.

    flights = IN_USE.of(x)
    events = flights.before(writes=True)     # what has to pass before somebody may write to x
    flights.note(event, writes=False)        # another copy out of x has begun
    IN_USE.forget()                          # of events that have passed nothing is kept
"""

from __future__ import annotations

from typing import Any

import attrs
import torch


@attrs.define
class Flights:
    """Events of the copies of one piece of host memory.

    They stand behind the last copy into it, and behind those out of it since.
    """

    filled: Any = None
    read: list[Any] = attrs.field(factory=list)

    def before(self, writes: bool) -> list[Any]:
        """What a copy, or the host, has to wait for before it reads, or writes, this memory."""
        return [event for event in (self.filled, *(self.read if writes else ())) if event is not None]

    def passed(self, writes: bool) -> None:
        """The host has waited for what stood before it: nobody need ask for that again."""
        self.filled = None
        if writes:
            self.read = []

    def note(self, done: Any, writes: bool) -> None:
        if writes:
            self.filled, self.read = done, []
        else:
            self.read.append(done)

    def over(self) -> bool:
        """Whether all has passed, as it is now. What has passed is forgotten."""
        if self.filled is not None and self.filled.query():
            self.filled = None
        self.read = [event for event in self.read if not event.query()]
        return self.filled is None and not self.read


class InUse:
    """Flights by the address of a tensor's memory. The thread that runs steps adds to it; others look."""

    def __init__(self) -> None:
        self._flights: dict[int, Flights] = {}

    def __bool__(self) -> bool:
        return bool(self._flights)

    def of(self, x: torch.Tensor) -> Flights:
        return self._flights.setdefault(x.untyped_storage().data_ptr(), Flights())

    def known(self, x: torch.Tensor) -> Flights | None:
        """The flights of memory that copies have used of late; None where there are none."""
        return self._flights.get(x.untyped_storage().data_ptr()) if self._flights else None

    def forget(self) -> None:
        """Leave out what has passed, without waiting for the rest."""
        for address, flights in list(self._flights.items()):
            if flights.over():
                self._flights.pop(address, None)

    def leave(self, begin: int, nbytes: int) -> list[Any]:
        """What has to pass before memory from this address on may go.

        Nobody has it any more, so it is forgotten here.
        """
        gone = [address for address in list(self._flights) if begin <= address < begin + nbytes]
        events: list[Any] = []
        for address in gone:
            events += self._flights.pop(address).before(writes=True)
        return events


IN_USE = InUse()
"""One for the process, as its memory is."""
