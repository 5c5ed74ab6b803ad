"""Presence: who the ranks are, whether they live, and what is said where one waits for another.

Problem: a rank that saves, evaluates or calls `full()` alone waits in silence, and so does the peer of one that was
killed or stopped between two steps, where no connection of the process group notices it. Idea: every rank writes who it
is and, once a second, a number that grows; one that waits reads those of the ranks that it waits for.

    [rank 0] has waited 10 s at full() of a DTensor (8, 4) at train.py:31 for rank 1 (after step 7 (train) at
    train.py:20; its process 4711 is stopped); it gives up after 300 s

A process on the same machine is known exactly (`/proc`, proc(5)): it runs, is stopped, or has ended. Of others it is
known that they have ended (see `lifeline`), and the time since their number grew, which is said and decides nothing: a
process may be busy.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from colofunc.executors.lifeline import Lifelines

WHO, BEAT, NOTICES = "colofunc/who", "colofunc/beat", "colofunc/notices"
ENDED = "colofunc/ended"  # ranks whose connections rank 0 has seen closed
LEFT = "colofunc/left"  # what a rank says of itself when its script ends
SILENT_S = 5.0  # a rank whose number has not grown for so long is said to be silent
LAST_WORDS = 400  # characters of the error that ends a rank
STATE, BEGAN = 0, 19  # fields of /proc/PID/stat behind the name: proc(5) numbers them 3 and 22


@attrs.frozen
class Limits:
    """How long ranks wait for one another: until a line says who is where, and until it is an error."""

    limit_s: float = 300.0
    notice_s: float = 10.0


@attrs.frozen
class Process:
    """One rank's process.

    `place`: of machine and process namespace; numbers of processes mean the same where it is equal.
    """

    host: str
    place: str
    pid: int
    began: str

    @staticmethod
    def own() -> Process:
        host = socket.gethostname()
        marks = [host]
        with contextlib.suppress(OSError):  # not on Linux
            marks += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
        return Process(host, " ".join(marks), os.getpid(), started(os.getpid()))

    def condition(self) -> str:
        """ "running", "stopped" or "ended"; "" where that cannot be seen from this process."""
        if self.place != Process.own().place or not self.began:
            return ""
        return "ended" if started(self.pid) != self.began else process_state(self.pid)


def started(pid: int) -> str:
    """When a process was started, in the kernel's words; "" where that cannot be known."""
    return _stat(pid)[1]


def process_state(pid: int) -> str:
    """ "running", "stopped" or "ended": of a process of this machine."""
    state = _stat(pid)[0]
    if state in ("", "Z", "X"):
        return "ended"
    return "stopped" if state in ("T", "t") else "running"


def _stat(pid: int) -> tuple[str, str]:
    """(state, time of start) of a process; ("", "") where there is none or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[STATE], fields[BEGAN]


@attrs.define(eq=False)
class Waiting:
    """What this rank waits for. `keys`: what each rank writes when it comes there; () where it may be in a collective.

    step: the number of the step that it is in, 0 outside steps. on_gpu: it is the GPU that waits there; the host may be
    ahead.
    """

    what: str
    limit_s: float
    keys: Sequence[str] = ()
    step: int = 0
    on_gpu: bool = False
    began_s: float = attrs.field(factory=time.monotonic)
    told: tuple[str, ...] | None = None  # of which processes in which condition
    lost_s: float | None = None  # since when a rank is known not to come

    @property
    def waited_s(self) -> float:
        return time.monotonic() - self.began_s


class Presence:
    """What this rank knows of the others, through a store of its own."""

    def __init__(self, store: Any, rank: int, size: int, lines: Lifelines | None) -> None:
        self._store = store
        self._lines = lines
        self._closed: set[int] = set()  # ranks whose connection to this one was closed
        self.rank = rank
        self.size = size
        self._who: dict[int, Process] = {}
        self._beats: dict[int, tuple[bytes, float]] = {}  # rank -> its number, and when it was first seen
        self._own_beats = 0
        self._heard = 0
        self._main_left: str | None = None  # what rank 0, which serves the store, said at its end
        store.set(f"{WHO}/{rank}", json.dumps(attrs.astuple(Process.own())))

    def beat(self) -> None:
        """This rank lives. Who serves the store is asked as long as it answers."""
        for rank in () if self._lines is None else self._lines.ended():
            if rank not in self._closed:
                self._closed.add(rank)
                self._store.set(f"{ENDED}/{rank}", "1")
        self.process(0)
        self._main_left = self.left(0)
        self._own_beats += 1
        self._store.set(f"{BEAT}/{self.rank}", str(self._own_beats))

    def process(self, rank: int) -> Process | None:
        """Who a rank is; None where it has not said so yet."""
        key = f"{WHO}/{rank}"
        if rank not in self._who and self._store.check([key]):
            self._who[rank] = Process(*json.loads(self._store.get(key)))
        return self._who.get(rank)

    def known(self, rank: int) -> Process | None:
        """Who a rank is, as far as this one has asked before."""
        return self._who.get(rank)

    def silent_s(self, rank: int) -> float:
        """Seconds since the rank's number was seen to grow."""
        key, now = f"{BEAT}/{rank}", time.monotonic()
        number = self._store.get(key) if self._store.check([key]) else b""
        last = self._beats.get(rank)
        if last is None or last[0] != number:
            self._beats[rank] = number, now
            return 0.0
        return now - last[1]

    def words(self, rank: int) -> str:
        """What is known of a rank's process beyond that it runs."""
        process, condition = self.process(rank), self.condition(rank)
        if process is None or condition in ("", "running"):
            return ""
        if condition == "silent":
            return f"not heard of for {self.silent_s(rank):.0f} s (process {process.pid} on {process.host})"
        if condition == "stopped":
            return f"{_named(process)} is stopped"
        left = self.left(rank)
        return f"{_named(process)} has ended" + (f" with {left}" if left else "")

    def main_condition(self) -> str:
        """Of rank 0's process, "" where nothing is known.

        Asks nothing: rank 0 serves the store, which may not answer.
        """
        if 0 in self._closed:
            return "ended"
        process = self._who.get(0)
        return "" if process is None else process.condition()

    def main_words(self) -> str:
        """What is known of rank 0's process where the store does not answer."""
        process, condition = self._who.get(0), self.main_condition()
        name = "its process" if process is None else _named(process)
        if condition == "stopped":
            return f"{name} is stopped"
        if condition != "ended" and self._main_left is None:
            return f"{name} does not answer"
        return f"{name} has ended" + (f" with {self._main_left}" if self._main_left else "")

    def left(self, rank: int) -> str | None:
        """The error that a rank's script ended with, "" where it came to its end; None where it said nothing."""
        key = f"{LEFT}/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else None

    def leave(self, text: str) -> None:
        """This rank's script has come to its end."""
        self._store.set(f"{LEFT}/{self.rank}", text)

    def condition(self, rank: int) -> str:
        """Whether the rank's process is "running", "stopped", "ended" or "silent" of late.

        "" where nothing is known.
        """
        silent, process = self.silent_s(rank) > SILENT_S, self.process(rank)
        if process is None:
            return ""
        seen = process.condition()
        if seen != "ended" and (rank in self._closed or self._store.check([f"{ENDED}/{rank}"])):
            return "ended"
        return seen or ("silent" if silent else "")

    def missing(self, keys: Sequence[str]) -> list[int]:
        """Ranks whose keys are not there."""
        return [rank for rank, key in enumerate(keys) if not self._store.check([key])]

    def tell(self, ranks: Sequence[int], text: str) -> None:
        """Have `ranks` print that this one waits for them."""
        number = self._store.add(NOTICES, 1)
        self._store.set(f"{NOTICES}/{number}", json.dumps([list(ranks), text]))

    def heard(self) -> Iterator[str]:
        """What others have told this rank since the last time."""
        number = self._store.add(NOTICES, 0)
        while self._heard < number:
            key = f"{NOTICES}/{self._heard + 1}"
            if not self._store.check([key]):
                return  # it is being written
            self._heard += 1
            ranks, text = json.loads(self._store.get(key))
            if self.rank in ranks:
                yield text


def _named(process: Process) -> str:
    return f"its process {process.pid}" + ("" if process.host == socket.gethostname() else f" on {process.host}")


def last_words() -> str:
    """The error that ends this process, and where it was raised; "" where a script has come to its end."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {os.path.basename(frame.filename)}:{frame.lineno}" for frame in frames)
    return "".join(traceback.format_exception_only(error)).strip()[-LAST_WORDS:] + where


def ranks_text(ranks: Sequence[int], others: Sequence[str]) -> str:
    """`rank 1 (after step 3); rank 2 (in step 4)`, a few of many."""
    shown = [f"rank {rank}" + (f" ({words})" if words else "") for rank, words in zip(ranks, others, strict=True)]
    return "; ".join(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def say_presence(rank: int, text: str) -> None:
    print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)
