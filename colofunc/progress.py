"""A line to the person who waits for a plan: what is being done, and how far it is.

    with progress.line("planning"):                       # nothing is written in the first two seconds
        for variant in progress.over("variants", variants):
            ...                                           # planning: 3 of 5 variants, checkpoint 40 of 96 pieces, 12 s

Problem: searches are many loops in many files, and some run for minutes. Idea: a loop only notes where it is, in a
record that belongs to the plan (a context variable; without one `at` does nothing), and a thread looks at the record
twice a second and writes the line anew in its place. What a loop notes goes when it ends, or a loop around it goes on.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TextIO, TypeVar

import attrs

from colofunc import env

AFTER_S, EVERY_S = 2.0, 0.5
"""The line comes after so many seconds, and is written anew at most this often."""

T = TypeVar("T")
ProgressStep = tuple[int, int | None]
"""Which one it is, of how many; None: nobody knows."""


@attrs.define(eq=False)
class _Line:
    """What is being done, and where its loops are: the outer ones first."""

    what: str
    began: float
    steps: dict[str, ProgressStep] = attrs.field(factory=dict)

    def drop_behind(self, noun: str) -> None:
        """Forget what loops inside this one have noted."""
        nouns = list(self.steps)
        for inner in nouns[nouns.index(noun) + 1 :]:
            self.steps.pop(inner, None)

    def text(self, now: float, columns: int) -> str:
        """At most `columns` characters: of a line that wraps, only the last row could be written anew."""
        parts: list[str] = []
        for noun, (number, of) in self.steps.copy().items():  # the loops go on meanwhile
            if of is None:
                parts.append(f"{noun} {number}")
                continue
            where, _, things = noun.rpartition(" ")
            parts.append(f"{where} {number} of {of} {things}".strip())
        seconds = f"{now - self.began:.0f} s"
        done = f"{self.what}: {', '.join([*parts, ''])}"
        return done[: max(0, columns - len(seconds))] + seconds


_LINE: ContextVar[_Line | None] = ContextVar("line", default=None)


def at(noun: str, number: int, of: int | None = None) -> None:
    """Where a loop is.

    noun: "variants", or "checkpoint pieces", which the line says as `checkpoint 3 of 9 pieces`; where nobody knows of
    how many, "sharding", said as `sharding 3`.
    """
    record = _LINE.get()
    if record is None:
        return
    if noun in record.steps:
        record.drop_behind(noun)
    record.steps[noun] = (number, of)


def over(noun: str, things: Sequence[T]) -> Iterator[T]:
    """The things of a loop that notes where it is, until it ends. One thing alone is not worth a word."""
    record = _LINE.get()
    if record is None or len(things) < 2:
        yield from things
        return
    try:
        for number, thing in enumerate(things, 1):
            at(noun, number, len(things))
            yield thing
    finally:
        if noun in record.steps:
            record.drop_behind(noun)
            del record.steps[noun]


@contextmanager
def line(
    what: str,
    shown: bool = True,
    stream: TextIO | None = None,
    after_s: float = AFTER_S,
    every_s: float = EVERY_S,
) -> Iterator[None]:
    """While this is open, a line says what is noted by `at`. Inside another one it changes nothing.

    shown: False on ranks that have nothing to say. stream: stderr where None. The line is written where that is a
    terminal, or COLOFUNC_PROGRESS says so, and is gone at the end, also where that is an error.
    """
    stream = sys.stderr if stream is None else stream
    if not shown or stream is None or _LINE.get() is not None or not env.shows_progress(env.is_terminal(stream)):
        yield
        return
    record, ended = _Line(what, time.monotonic()), threading.Event()
    writer = threading.Thread(target=_write, args=(record, ended, stream, after_s, every_s), daemon=True)
    try:
        writer.start()
    except RuntimeError:  # the process may have no more threads: a plan needs none
        yield
        return
    token = _LINE.set(record)
    try:
        yield
    finally:
        _LINE.reset(token)
        ended.set()
        writer.join()


def _write(record: _Line, ended: threading.Event, stream: TextIO, after_s: float, every_s: float) -> None:
    """The line, anew and anew until the work has ended, and then nothing in its place."""
    written = False
    wait_s = after_s
    columns = shutil.get_terminal_size().columns - 1
    try:
        while not ended.wait(wait_s):
            stream.write(env.ERASED + record.text(time.monotonic(), columns))
            stream.flush()
            written, wait_s = True, every_s
        if written:
            stream.write(env.ERASED)
            stream.flush()
    except (OSError, ValueError):  # nobody reads it any more, or it was closed: the plan goes on
        return
