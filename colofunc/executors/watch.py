"""Watching peers: a rank that fails ends all within seconds, with its traceback.

Problem: when one rank fails, the others wait in a collective for ever. Idea: a small key-value store beside the process
group. The failing rank writes its traceback there; a thread on every other rank looks once a second, prints it and ends
the process (see `lookout`). It ends the process because a thread that waits inside a collective cannot be woken.

With NCCL the host is ahead of its GPU, where a collective of a step may wait for a peer long after the step was called:
what the GPU has not come past is looked after until it has (see `flight`), and a rank that ends aborts its
communicators first.

The store also holds what ranks compare before a program runs (`agree`), and where each rank is: a rank that comes to a
collective alone says so after a while, on both sides, and ends within a deadline, with an error that names its own line
and where the others are (see `presence`).

    meet(watch, "save to 'run/7'", deadline_s=60)      # all ranks must come to this point within 60 s
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from colofunc.errors import CollectiveError
from colofunc.executors.flight import Flight, abort_all
from colofunc.executors.lookout import FAILED, LOOK_S, Activity, Lookout, connect, write_failure
from colofunc.executors.places import CAME, FAILED_BEFORE, GONE, Answer, write_place
from colofunc.executors.presence import Limits, Waiting
from colofunc.executors.rendezvous import Meeting, patient, serve
from colofunc.program.tracing.meta import user_line

TELL_S = 6.0
"""How long a rank that fails tries to tell the others, before it raises its own error."""
READ_S = 5.0
"""How long rank 0 stays for the others to read what was said in a round after which the script may end."""
SAME_ORDER = "all ranks must call the same steps in the same order"


def meet(watch: Watch | None, what: str, deadline_s: float | None = None) -> None:
    """All ranks must come to this point, with the same `what`, within `deadline_s` (None: the watch's own deadline).

    Raises CollectiveError that names this rank's line and where the others are; where ranks are missing, those end
    too. Nothing to do without other processes (`watch` is None). `what` reads like "full() of a DTensor (8, 4)".
    """
    if watch is not None:
        watch.meet(what, deadline_s)


def _of_transport(error: BaseException) -> bool:
    """Whether an error is torch.distributed's own: a peer that is gone, or a wait that was too long."""
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error))


class LateError(CollectiveError):
    """Some ranks did not come to a point that all ranks must come to."""


def _at(what: str, line: str) -> str:
    return f"{what} at {line}" if line else what


class Watch:
    """This rank's connection to the store, and the lookout for failures of others."""

    def __init__(self, rank: int, size: int, limits: Limits | None = None, meeting: Meeting | None = None) -> None:
        """Waits for all ranks.

        `meeting`: the store through which they find one another, if there is no process group yet.
        """
        self.rank = rank
        self.size = size
        self.chosen = False  # whether the limits were said to us, and not to a process group of somebody else's
        self.made_group = False  # whether the process group is ours
        self._activity = Activity(rank, size, limits or Limits())
        meeting = meeting or Meeting.of_group(rank, self.limits)
        self._server, address = serve(meeting, rank)
        self._store = connect(address)
        self._rounds = 0
        self._steps_begun = 0
        self._steps_done = 0
        self._programs_run = 0  # collective ones, and a checksum of which they were
        self._history = 0
        self._lookout = Lookout(self._activity, address)
        atexit.register(self._lookout.close, self._store)
        # Ends this rank too where one that has come ends while the last are waited for.
        with self:
            meeting.arrivals.wait(patient(self._lookout.absent))
        self._lookout.meet_main()  # from now on known, whatever becomes of it

    @property
    def limits(self) -> Limits:
        return self._activity.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._activity.limits = limits

    @property
    def deadline_s(self) -> float:
        """How long ranks wait for one another before it is an error."""
        return self.limits.limit_s

    @property
    def flight(self) -> Flight:
        """What the GPU has not come past, while the host is ahead of it."""
        return self._activity.flight

    # ---- collectives of a step ----

    def __enter__(self) -> Watch:
        activity = self._activity
        if not activity.running:
            step = self._steps_begun if self._steps_begun > self._steps_done else 0
            activity.inside = Waiting(activity.here, self.deadline_s, step=step)
        activity.running += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        told: BaseException | None = None if isinstance(error, (KeyboardInterrupt, SystemExit)) else error
        try:
            if error is not None and _of_transport(error):
                told = CollectiveError(self._lost_peer())
            if told is not None:
                self.publish(told)
        finally:  # only now: where rank 0 does not answer, what is asked above ends when the limit of this wait is over
            self._activity.running -= 1
            if not self._activity.running:
                self._activity.inside = None
        if told is not None and told is not error:
            raise told from error

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; only the first failure counts."""
        self._activity.failed = True
        if self.flight.used:
            abort_all()  # whatever this rank does next is not to wait for what its GPU waits for
        text = "".join(traceback.format_exception(error))
        told = threading.Event()

        def tell() -> None:
            with contextlib.suppress(Exception):
                write_failure(self._store, f"rank {self.rank} failed:\n{text}")
                told.set()

        # Where rank 0 is stopped its store neither answers nor fails: this rank's own error comes first.
        telling = threading.Thread(target=tell, name="colofunc-watch-tell", daemon=True)
        telling.start()
        telling.join(TELL_S)
        if not told.is_set():
            error.add_note(f"the other ranks could not be told: rank 0 does not answer ({self._lookout.main_text()})")

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside, this rank is in its next step; others read it when they wait in vain.

        Costs two messages, no waiting.
        """
        self._steps_begun += 1
        self._announce(f"in step {self._steps_begun} ({name})")
        failed = True
        try:
            yield
            failed = False
        finally:
            self._steps_done = self._steps_begun
            if not failed or self._lookout.main_answers:
                self._announce(f"after step {self._steps_begun} ({name})")

    def _announce(self, what: str) -> None:
        """This rank is in `what` from now on."""
        activity = self._activity
        activity.here = _at(what, user_line())
        activity.waiting = Waiting(activity.here, self.deadline_s)  # where rank 0 is stopped it does not answer
        with contextlib.suppress(Exception):  # a lost store is the lookout's business
            write_place(self._store, self.rank, self._steps_done, activity.here, self._steps_begun)
        activity.waiting = None

    def advance(self, program: str) -> None:
        """This rank runs a collective program with this hash."""
        self._programs_run += 1
        self._history = zlib.crc32(program.encode(), self._history)

    def launched(self) -> Flight:
        """The host begins to hand the program of a step to its GPU."""
        self.flight.begin(self._steps_begun, self._activity.here)
        return self.flight

    # ---- points that all ranks come to ----

    def agree(self, what: str, text: str, timeout_s: float, last: bool = False) -> None:
        """Raise CollectiveError unless all ranks give the same string; the error names the ranks that differ."""
        texts = self.exchange(what, text, timeout_s, last)
        if len(set(texts)) > 1:
            common = max(set(texts), key=lambda t: (texts.count(t), -texts.index(t)))
            odd = [rank for rank, other in enumerate(texts) if other != common]
            raise CollectiveError(
                f"{what} differs between ranks: ranks {odd} have another one than the rest. Ranks must call the same "
                "step with arguments of the same shapes, dtypes and static values, and run the same versions"
            )

    def meet(self, what: str, deadline_s: float | None = None) -> None:
        """All ranks come to this point with the same `what`.

        A rank that waits in vain tells the others before it raises.
        """
        deadline_s = self.deadline_s if deadline_s is None else deadline_s
        try:
            histories = self.exchange(what, f"{self._programs_run} {self._history}", deadline_s)
        except LateError as late:
            self.publish(late)
            raise
        if len(set(histories)) > 1:
            raise CollectiveError(
                f"{_at(what, user_line())}: the ranks have not run the same steps before it "
                f"({self.whereabouts(range(self.size))}), so numbers since then cannot be trusted; {SAME_ORDER}"
            )

    def give_up(self, what: str, error: BaseException, timeout_s: float) -> None:
        """In place of `agree` on a rank that failed before it.

        The others learn of it, this rank raises its own error.
        """
        try:
            self._round(FAILED_BEFORE, what, f"{type(error).__name__}: {error}", timeout_s)
        except CollectiveError as late:
            error.add_note(str(late))

    def exchange(self, what: str, text: str, timeout_s: float, last: bool = False) -> list[str]:
        """Every rank's string, in rank order. Raises CollectiveError where a rank is late, failed, or elsewhere.

        last: a script may well end after this; equal on ranks that give equal strings.
        """
        answers = self._round(CAME, what, text, timeout_s, last)
        here = _at(what, answers[self.rank].line)
        for rank, answer in enumerate(answers):
            if answer.state == GONE:
                raise LateError(f"{here}: {answer.text}")
            if answer.state == FAILED_BEFORE:
                raise CollectiveError(f"{answer.what} failed on rank {rank}: {answer.text}")
        for rank, answer in enumerate(answers):
            if answer.what != what:
                raise CollectiveError(
                    f"rank {self.rank} has come to {here}, rank {rank} to {_at(answer.what, answer.line)}; {SAME_ORDER}"
                )
        return [answer.text for answer in answers]

    def _round(self, state: str, what: str, text: str, timeout_s: float, last: bool = False) -> list[Answer]:
        """What every rank says in this round, in rank order."""
        self._rounds += 1
        prefix, line = f"colofunc/agree/{self._rounds}", user_line()
        self._store.set(f"{prefix}/{self.rank}", Answer(state, what, text, line).packed())
        keys = [f"{prefix}/{rank}" for rank in range(self.size)]
        self._activity.waiting = Waiting(_at(what, line), timeout_s, keys)
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            answers = [Answer.unpacked(packed) for packed in self._store.multi_get(keys)]
        except dist.DistError as error:  # others come from signal handlers: a loader's worker was killed
            raise LateError(self._late_text(_at(what, line), keys, timeout_s)) from error
        finally:
            self._activity.waiting = None
        # All ranks have come to this round, so all have read what was said in the one before.
        self._store.delete_key(f"colofunc/agree/{self._rounds - 1}/{self.rank}")
        differ = len({(answer.state, answer.what, answer.text) for answer in answers}) > 1
        if last or differ:  # where they differ, the error that follows may end the script
            self._stay_until_read(prefix, readers=sum(answer.state != GONE for answer in answers))
        return answers

    def _late_text(self, here: str, keys: Sequence[str], timeout_s: float) -> str:
        try:
            late = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except Exception:
            return f"{here}: rank {self.rank} waited for rank 0 ({self._lookout.main_text()}); {SAME_ORDER}"
        return (
            f"{here}: rank {self.rank} waited {timeout_s:g} s for ranks {late}, which did not come here "
            f"({self.whereabouts(late)}); {SAME_ORDER}"
        )

    def _stay_until_read(self, prefix: str, readers: int) -> None:
        """Rank 0 serves the store: where its process may end right after this, it lets the others read first."""
        read = self._store.add(f"{prefix}/read", 1)
        until = time.monotonic() + READ_S
        while self.rank == 0 and read < readers and time.monotonic() < until:
            time.sleep(0.002)
            read = self._store.add(f"{prefix}/read", 0)

    # ---- what has become of the others ----

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Where `ranks` were last, in words."""
        return self._lookout.whereabouts(ranks)

    def fate(self, rank: int) -> tuple[str, str]:
        """What has become of a rank's process, "ended", "stopped" or another word, and where the rank was, in words."""
        return self._lookout.fate(rank)

    def lost(self, error: BaseException) -> str:
        """Who is lost, and where; "" where `error` is not the transport's own."""
        return self._lost_peer() if _of_transport(error) else ""

    def _lost_peer(self) -> str:
        """What to say in place of the transport's own words when a collective fails."""
        until = time.monotonic() + 2 * LOOK_S  # within which a peer has said why, or is seen to have ended
        while time.monotonic() < until and self._lookout.main_answers:
            with contextlib.suppress(Exception):
                if self._store.check([FAILED]):
                    return self._store.get(FAILED).decode()
                if self._lookout.any_ended():
                    break
            time.sleep(LOOK_S / 8)
        others = [rank for rank in range(self.size) if rank != self.rank]
        return (
            f"rank {self.rank}, {self._activity.here}, lost or waited in vain for its peers "
            f"({self.whereabouts(others)}); {SAME_ORDER}, and as often"
        )
