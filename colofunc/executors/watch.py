"""Watching peers: a rank that fails ends all within seconds, with its traceback.

Problem: when one rank fails, the others wait in a collective for ever. Idea: a small key-value store beside the process
group. The failing rank writes its traceback there; a thread on every other rank looks once a second, prints it and ends
the process. It ends the process because a thread that waits inside a collective cannot be woken.

With NCCL the host is ahead of its GPU, where a collective of a step may wait for a peer long after the step was called: what the GPU
has not come past is looked after until it has (see `flight`), and a rank that ends aborts its communicators first.

The store also holds what ranks compare before a program runs (`agree`), and where each rank is: a rank that comes to a
collective alone says so after a while, on both sides, and ends within a deadline, with an error that names its own line and where
the others are (see `presence`).

    meet(watch, "save to 'run/7'", deadline_s=60)      # all ranks must come to this point within 60 s
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from colofunc.errors import CollectiveError
from colofunc.executors.flight import Flight, abort_all
from colofunc.executors.joining import Meeting, patient, serve
from colofunc.executors.lifeline import Lifelines
from colofunc.executors.places import NOWHERE, place_of, write_on_gpu, write_place
from colofunc.executors.presence import WHO, Limits, Presence, Waiting, last_words, ranks_text, say
from colofunc.program.tracing.meta import user_line

FAILED = "colofunc/failed"
GONE = "gone"  # said in place of a rank that has ended
FEW = 32  # ranks that one rank looks after at a time
LOOK_S = 1.0  # how often a rank looks for what happened to others
LOST_AFTER_S = 6.0  # how long the store, or a rank that has ended, may be gone during a step before the run is given up
EXIT_CODE = 13


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
    """This rank's connection to the store, and the threads that look for failures of others."""

    def __init__(self, rank: int, size: int, limits: Limits | None = None, meeting: Meeting | None = None) -> None:
        """Waits for all ranks. `meeting`: the store through which they find one another, if there is no process group yet."""
        self.rank = rank
        self.size = size
        self.limits = limits or Limits()
        self.chosen = False  # whether the limits were said to us, and not to a process group of somebody else's
        meeting = meeting or Meeting.of_group(rank, self.limits)
        self._server, address = serve(meeting, rank)
        # A client of its own per use: a blocking call on one would hold up the thread. A busy machine may take long to connect.
        self._store, self._thread_store = (
            TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60)) for _ in range(2)
        )
        self._thread_store.set_timeout(timedelta(seconds=5))
        self._presence = Presence(self._thread_store, rank, size, Lifelines.meet(self._thread_store, rank, address[0]))
        self._waiting: Waiting | None = None  # for ranks that have not come to a point yet
        self._inside: Waiting | None = None  # for ranks in the collectives of a step
        self._asked_s: float | None = None  # since when the thread has had no answer
        self._running = 0
        self._rounds = 0
        self._failed = False
        self.flight = Flight()  # what the GPU has not come past, while the host is ahead of it
        self._told_on_gpu = 0, ""
        self._steps = 0  # begun
        self._done = 0
        self._here = NOWHERE
        self._main_at = NOWHERE  # where rank 0 was seen last: it cannot be asked once it has ended
        self._run = 0  # collective programs that this rank has run, and a checksum of which
        self._history = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look, name="colofunc-watch", daemon=True)]
        if rank:
            self._threads.append(threading.Thread(target=self._mind, name="colofunc-watch-store", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self._leave_off)
        who = [f"{WHO}/{r}" for r in range(size)]
        # Ends this rank too where one that has come ends while the last are waited for.
        with self:
            meeting.arrivals.wait(patient(lambda: [r for r, key in enumerate(who) if not self._thread_store.check([key])]))
        self._presence.process(0)  # from now on known, whatever becomes of it

    @property
    def deadline_s(self) -> float:
        """How long ranks wait for one another before it is an error."""
        return self.limits.limit_s

    def __enter__(self) -> Watch:
        if not self._running:
            self._inside = Waiting(self._here, self.deadline_s, step=self._steps if self._steps > self._done else 0)
        self._running += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        told: BaseException | None = None if isinstance(error, (KeyboardInterrupt, SystemExit)) else error
        try:
            if error is not None and _of_transport(error):
                told = CollectiveError(self._lost_peer())
            if told is not None:
                self.publish(told)
        finally:  # only now: where rank 0 does not answer, what is asked above ends when the limit of this wait is over
            self._running -= 1
            if not self._running:
                self._inside = None
        if told is not None and told is not error:
            raise told from error

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; only the first failure counts."""
        self._failed = True
        if self.flight.used:
            abort_all()  # whatever this rank does next is not to wait for what its GPU waits for
        text = "".join(traceback.format_exception(error))
        told = threading.Event()

        def tell() -> None:
            with contextlib.suppress(Exception):
                _fail(self._store, f"rank {self.rank} failed:\n{text}")
                told.set()

        # Where rank 0 is stopped its store neither answers nor fails: this rank's own error comes first.
        telling = threading.Thread(target=tell, name="colofunc-watch-tell", daemon=True)
        telling.start()
        telling.join(LOST_AFTER_S)
        if not told.is_set():
            error.add_note(f"the other ranks could not be told: rank 0 does not answer ({self._main_text()})")

    def agree(self, what: str, mine: str, timeout_s: float, last: bool = False) -> None:
        """Raise CollectiveError unless all ranks give the same string; the error names the ranks that differ."""
        texts = self.exchange(what, mine, timeout_s, last)
        if len(set(texts)) > 1:
            common = max(set(texts), key=lambda t: (texts.count(t), -texts.index(t)))
            odd = [r for r, t in enumerate(texts) if t != common]
            raise CollectiveError(
                f"{what} differs between ranks: ranks {odd} have another one than the rest. Ranks must call the same step "
                "with arguments of the same shapes, dtypes and static values, and run the same versions"
            )

    def meet(self, what: str, deadline_s: float | None = None) -> None:
        """All ranks come to this point with the same `what`. A rank that waits in vain tells the others before it raises."""
        try:
            said = self.exchange(what, f"{self._run} {self._history}", self.deadline_s if deadline_s is None else deadline_s)
        except LateError as late:
            self.publish(late)
            raise
        if len(set(said)) > 1:
            raise CollectiveError(
                f"{_at(what, user_line())}: the ranks have not run the same steps before it ({self.whereabouts(range(self.size))}), "
                "so numbers since then cannot be trusted; all ranks must call the same steps in the same order"
            )

    def give_up(self, what: str, error: BaseException, timeout_s: float) -> None:
        """In place of `agree` on a rank that failed before it: the others learn of it, this rank raises its own error."""
        try:
            self._everyone("failed", what, f"{type(error).__name__}: {error}", timeout_s)
        except CollectiveError as late:
            error.add_note(str(late))

    def exchange(self, what: str, mine: str, timeout_s: float, last: bool = False) -> list[str]:
        """Every rank's string, in rank order. Raises CollectiveError where a rank is late, failed, or elsewhere.

        last: a script may well end after this; equal on ranks that give equal strings.
        """
        said = self._everyone("", what, mine, timeout_s, last)
        for r, (state, there, text, _) in enumerate(said):
            if state == GONE:
                raise LateError(f"{_at(what, said[self.rank][3])}: {text}")
            if state == "failed":
                raise CollectiveError(f"{there} failed on rank {r}: {text}")
        elsewhere = {r: (there, line) for r, (_, there, _, line) in enumerate(said) if there != what}
        if elsewhere:
            r, (there, line) = next(iter(elsewhere.items()))
            raise CollectiveError(
                f"rank {self.rank} has come to {_at(what, said[self.rank][3])}, rank {r} to {_at(there, line)}; "
                "all ranks must call the same steps in the same order"
            )
        return [text for _, _, text, _ in said]

    def _everyone(self, state: str, what: str, mine: str, timeout_s: float, last: bool = False) -> list[list[str]]:
        """Every rank's (state, what, text, line) of this round."""
        self._rounds += 1
        prefix, line = f"colofunc/agree/{self._rounds}", user_line()
        self._store.set(f"{prefix}/{self.rank}", json.dumps([state, what, mine, line]))
        keys = [f"{prefix}/{r}" for r in range(self.size)]
        self._waiting = Waiting(_at(what, line), timeout_s, keys)
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            texts = [text.decode() for text in self._store.multi_get(keys)]
        except dist.DistError as error:  # others come from signal handlers: a loader's worker was killed
            raise LateError(self._late(_at(what, line), keys, timeout_s)) from error
        finally:
            self._waiting = None
        said = [json.loads(text) for text in texts]
        # All ranks have come to this round, so all have read what was said in the one before.
        self._store.delete_key(f"colofunc/agree/{self._rounds - 1}/{self.rank}")
        readers = sum(state != GONE for state, *_ in said)
        self._leave(prefix, last or len({(state, there, text) for state, there, text, _ in said}) > 1, readers)
        return said

    def _late(self, here: str, keys: list[str], timeout_s: float) -> str:
        try:
            late = [r for r, key in enumerate(keys) if not self._store.check([key])]
        except Exception:
            text = f"{here}: rank {self.rank} waited for rank 0 ({self._main_text()})"
            return f"{text}; all ranks must call the same steps in the same order"
        return (
            f"{here}: rank {self.rank} waited {timeout_s:g} s for ranks {late}, which did not come here "
            f"({self.whereabouts(late)}); all ranks must call the same steps in the same order"
        )

    # ---- where each rank is ----

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Inside, this rank is in its next step; others read it when they wait in vain. Costs two messages, no waiting."""
        self._steps += 1
        self._announce(f"in step {self._steps} ({name})")
        failed = True
        try:
            yield
            failed = False
        finally:
            self._done = self._steps
            if not failed or self._main_answers:
                self._announce(f"after step {self._steps} ({name})")

    def advance(self, program: str) -> None:
        """This rank runs a collective program with this hash."""
        self._run += 1
        self._history = zlib.crc32(program.encode(), self._history)

    def launched(self) -> Flight:
        """The host begins to hand the program of a step to its GPU."""
        self.flight.begin(self._steps, self._here)
        return self.flight

    def _announce(self, what: str) -> None:
        self._here = _at(what, user_line())
        self._waiting = Waiting(self._here, self.deadline_s)  # where rank 0 is stopped it does not answer
        with contextlib.suppress(Exception):  # a lost store is the thread's business
            write_place(self._store, self.rank, self._done, self._here, self._steps)
        self._waiting = None

    def lost(self, error: BaseException) -> str:
        """Who is lost, and where; "" where `error` is not the transport's own."""
        return self._lost_peer() if _of_transport(error) else ""

    def _lost_peer(self) -> str:
        """What to say in place of the transport's own words when a collective fails."""
        others = [r for r in range(self.size) if r != self.rank]
        until = time.monotonic() + 2 * LOOK_S  # within which a peer has said why, or is seen to have ended
        while time.monotonic() < until and self._main_answers:
            with contextlib.suppress(Exception):
                if self._store.check([FAILED]):
                    return self._store.get(FAILED).decode()
                if any(self._presence.condition(r) == "ended" for r in others[:FEW]):
                    break
            time.sleep(LOOK_S / 8)
        return (
            f"rank {self.rank}, {self._here}, lost or waited in vain for its peers "
            f"({self.whereabouts(others)}); all ranks must call the same steps in the same order, and as often"
        )

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Where `ranks` were last, in words."""
        return "; ".join(f"rank {r}: {self._whereabout(r)}" for r in ranks)

    def _whereabout(self, rank: int) -> str:
        if rank == self.rank:
            return self._here
        if self._main_answers:
            with contextlib.suppress(Exception):
                return self._known(rank)
        return self._main_text() if rank == 0 else "no longer to be reached"

    @property
    def _main_answers(self) -> bool:
        """Whether rank 0, whom all ask, may well answer: whoever asks one that is stopped waits for ever."""
        return self.rank == 0 or self._presence.main_condition() not in ("ended", "stopped")

    def fate(self, rank: int) -> tuple[str, str]:
        """What has become of a rank's process, "ended", "stopped" or another word, and where the rank was, in words."""
        if rank == 0 and rank != self.rank:  # it serves the store
            return self._presence.main_condition(), f"rank 0: {self._main_text()}"
        return self._presence.condition(rank), self.whereabouts([rank])

    def _main_text(self) -> str:
        """Where rank 0 was seen last, and what has become of its process; its store does not answer."""
        return f"when last heard of {self._main_at}; {self._presence.main_words()}"

    def _leave(self, prefix: str, last: bool, readers: int) -> None:
        """Rank 0 serves the store: where its process may end right after this, it lets the others read first."""
        read = self._store.add(f"{prefix}/read", 1) if last else 0
        until = time.monotonic() + 5.0
        while last and self.rank == 0 and read < readers and time.monotonic() < until:
            time.sleep(0.002)
            read = self._store.add(f"{prefix}/read", 0)

    # ---- the threads ----

    @property
    def _every_s(self) -> float:
        return min(LOOK_S, self.limits.notice_s / 2)

    def _leave_off(self) -> None:
        """End the threads before the interpreter ends: one that came back from the store after that would abort the process.

        What the GPU has not done by then would not be done: it is waited for, and looked after, as during a step.
        """
        if not self._failed and not last_words():
            self.flight.wait()
        with contextlib.suppress(Exception):
            self._tell_gpu(self._store)
        self._over.set()
        for thread in self._threads:
            thread.join(LOOK_S)
        if any(thread.is_alive() for thread in self._threads):
            return  # the store does not answer
        last = last_words()
        with contextlib.suppress(Exception):
            self._presence.leave(last)
        if self.rank == 0 and last:
            time.sleep(2 * self._every_s)  # the store ends with this process: the others read why

    def _look(self) -> None:
        lost_since: float | None = None
        while not self._over.wait(self._every_s) and not self._failed:
            self._asked_s = time.monotonic()
            try:
                if self._thread_store.check([FAILED]) and not self._failed:
                    self._end(self._thread_store.get(FAILED).decode())
                self._look_around()
                self._asked_s = lost_since = None
            except Exception:
                self._asked_s = None  # an answer of a kind
                # The rank that serves the store has ended: fine between steps, a failure inside one.
                lost_since = lost_since or time.monotonic()
                if self._running and time.monotonic() - lost_since > LOST_AFTER_S:
                    self._end(f"rank 0 is lost ({self._main_text()}) while rank {self.rank} is {self._here}")
                if not self._running and time.monotonic() - lost_since > LOST_AFTER_S:
                    return

    def _look_around(self) -> None:
        """Say that this rank lives, print who waits for it, and look after those that it waits for."""
        self._presence.beat()
        self._main_at = place_of(self._thread_store, 0).where
        for text in self._presence.heard():
            say(self.rank, f"{text} for this rank, which is {self._here}; all ranks must call the same steps in the same order")
        self._tell_gpu(self._thread_store)
        waiting = self._now()
        if waiting is None or waiting.waited_s < self._every_s:
            return
        missing = self._missing(waiting)
        known = [self._known(r) for r in missing]
        conditions = tuple(self._presence.condition(r) for r in missing)
        news = waiting.told is None or not set(conditions) <= {"", "running", *waiting.told}
        if missing and news and waiting.waited_s > self.limits.notice_s:
            waiting.told = conditions
            self._notice(waiting, missing, known)
        for r, words, condition in zip(missing, known, conditions, strict=True):
            if condition == "ended":
                self._lost(waiting, r, words)
        # Of a collective on a GPU nobody else says that it has taken too long: not in these words.
        if waiting.on_gpu and waiting.waited_s > waiting.limit_s:
            others = self.whereabouts([r for r in range(self.size) if r != self.rank][:FEW])
            self._give_up(
                f"rank {self.rank} has waited {waiting.waited_s:.0f} s for its GPU, which is {waiting.what} ({others}); all ranks must "
                f"call the same steps in the same order. Where one collective takes longer: cf.join(mesh, limit_s={3 * waiting.limit_s:g})"
            )

    def _now(self) -> Waiting | None:
        """What this rank waits for: a point that all come to, its GPU, or the collectives of the step that the host is in."""
        if self._waiting is not None or not self.flight.used:
            return self._waiting or self._inside
        return self.flight.waiting(self.deadline_s)

    def _tell_gpu(self, store: Any) -> None:
        """Write down, where it has changed, which steps have passed on the GPU and what it is at."""
        if not self.flight.used:
            return
        at = self.flight.waiting(self.deadline_s)
        told = self.flight.passed, at.what if at is not None and at.waited_s > self._every_s else ""
        if told != self._told_on_gpu:
            write_on_gpu(store, self.rank, *told)
            self._told_on_gpu = told

    def _give_up(self, text: str) -> None:
        """End the run: the others learn why, this rank says it and ends."""
        _fail(self._thread_store, text)
        self._end(text)

    def _missing(self, waiting: Waiting) -> list[int]:
        """The ranks that this one waits for, a few of many."""
        if waiting.keys:
            return self._presence.missing(waiting.keys)[:FEW]
        # How far a step is cannot be seen: those that are in another one, or in none, are waited for, and those that stand still.
        others = [(self.rank + k) % self.size for k in range(1, self.size)][:FEW]
        elsewhere = [r for r in others if waiting.step and not self._takes_part(r, waiting)]
        return sorted({*elsewhere, *(r for r in others if self._presence.condition(r) in ("stopped", "ended", "silent"))})

    def _takes_part(self, rank: int, waiting: Waiting) -> bool:
        """Whether a rank has come to the step that this one is in: with GPUs, hosts may be ahead of it."""
        place = place_of(self._thread_store, rank)
        return place.begun >= waiting.step if waiting.on_gpu else place.where.startswith(f"in step {waiting.step} (")

    def _lost(self, waiting: Waiting, rank: int, words: str) -> None:
        """A rank that this one waits for has ended."""
        if waiting.keys:
            text = f"rank {rank} will not come here ({words})"
            self._thread_store.set(waiting.keys[rank], json.dumps([GONE, "", text, ""]))
            return
        # It may have done its part, and have come to its end in good order.
        if place_of(self._thread_store, rank).done >= waiting.step if waiting.step else self._presence.left(rank) == "":
            return
        waiting.lost_s = waiting.lost_s or time.monotonic()
        # A collective that fails because of it raises in the main thread, which has the better traceback.
        if time.monotonic() - waiting.lost_s > LOST_AFTER_S:
            self._give_up(f"rank {rank} is lost ({words}) while rank {self.rank} is {waiting.what if waiting.on_gpu else self._here}")

    def _notice(self, waiting: Waiting, missing: Sequence[int], known: Sequence[str]) -> None:
        """On both sides, once and again where a process was stopped since: who waits where, and for whom."""
        text = f"has waited {waiting.waited_s:.0f} s {'at ' if waiting.keys else ''}{waiting.what}"
        say(self.rank, f"{text} for {ranks_text(missing, known)}; it gives up after {waiting.limit_s:g} s")
        self._presence.tell(missing, f"rank {self.rank} {text}")

    def _known(self, rank: int) -> str:
        """Where a rank was last, and what has become of its process."""
        words = self._presence.words(rank)
        return place_of(self._thread_store, rank).words + (f"; {words}" if words else "")

    def _mind(self) -> None:
        """Rank 0 serves the store: where it is stopped, whoever asks it waits for ever. This thread asks nothing."""
        told = False
        while not self._over.wait(self._every_s):
            asked_s, waiting = self._asked_s, self._now()
            silent_s = 0.0 if asked_s is None else time.monotonic() - asked_s
            if silent_s > self.limits.notice_s and not told:
                process = self._presence.known(0)
                words = "" if process is None else f" (process {process.pid} on {process.host}, {process.condition() or 'elsewhere'})"
                here = self._here if waiting is None else waiting.what
                say(self.rank, f"has had no answer from rank 0{words} for {silent_s:.0f} s; this rank is {here}")
            told = silent_s > self.limits.notice_s
            if waiting is not None and told and waiting.waited_s > waiting.limit_s + LOST_AFTER_S:
                self._end(f"rank 0 has not answered for {silent_s:.0f} s ({self._main_text()}) while rank {self.rank} is {waiting.what}")

    def _end(self, reason: str) -> None:
        print(f"[rank {self.rank}] ends because {reason}", file=sys.stderr, flush=True)
        if self.flight.used:
            abort_all()  # kernels that wait for a peer end, so that the process can
        os._exit(EXIT_CODE)


def _fail(store: Any, text: str) -> None:
    """Only the first failure counts."""
    if store.add(FAILED + "/first", 1) == 1:
        store.set(FAILED, text)
