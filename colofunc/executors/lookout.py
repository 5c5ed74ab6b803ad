"""The lookout: threads of this rank that look for failures of others while the script runs.

Problem: a thread that waits inside a collective cannot be woken, so nobody there can learn that a peer has ended. Idea:
a thread beside it looks at the store once a second. It prints who waits for whom, and ends the process where another
rank has failed or is lost. A second thread asks nothing, and so notices where rank 0, which serves the store, does not
answer.

    lookout = Lookout(activity, address)        # the threads run
    lookout.whereabouts([1])                    # "rank 1: in step 7 (train) at train.py:20; its process 4711 is stopped"
    lookout.close(store)                        # before the interpreter ends

What this rank does stands in `Activity`: the script's thread writes it, these threads read it.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import attrs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from colofunc.executors.flight import Flight, abort_all
from colofunc.executors.lifeline import Lifelines
from colofunc.executors.places import GONE, NOWHERE, Answer, whereabouts, write_on_gpu
from colofunc.executors.presence import WHO, Limits, Presence, Waiting, last_words, ranks_text, say_presence

FAILED = "colofunc/failed"
MAX_PEERS = 32
"""At most this many peers are looked after by one rank: each costs requests to the store, every second."""
LOOK_S = 1.0
"""How often a rank looks for what happened to others."""
LOST_AFTER_S = 6.0
"""How long the store, or a rank that has ended, may be gone during a step before the run is given up."""
EXIT_CODE = 13


@attrs.define(eq=False)
class Activity:
    """What this rank does.

    `waiting`: for ranks that have not come to a point yet. `inside`: in the collectives of a step. `flight`: what the
    GPU has not come past, while the host is ahead of it.
    """

    rank: int
    size: int
    limits: Limits
    here: str = NOWHERE
    waiting: Waiting | None = None
    inside: Waiting | None = None
    running: int = 0  # blocks with collectives that the script is in, one inside another
    failed: bool = False
    flight: Flight = attrs.field(factory=Flight)

    @property
    def limit_s(self) -> float:
        return self.limits.limit_s

    @property
    def every_s(self) -> float:
        """Seconds between two looks."""
        return min(LOOK_S, self.limits.notice_s / 2)

    def now(self) -> Waiting | None:
        """What this rank waits for: a point that all come to, its GPU, or the collectives of the step that the host is
        in.
        """
        if self.waiting is not None:
            return self.waiting
        return self.flight.waiting(self.limit_s) if self.flight.used else self.inside


class Lookout:
    """What this rank knows of the others, and the threads that act on it."""

    def __init__(self, activity: Activity, address: tuple[str, int]) -> None:
        """address: of the store, which rank 0 serves."""
        self._activity = activity
        self._rank = activity.rank
        self._store = connect(address)
        self._store.set_timeout(timedelta(seconds=5))
        lines = Lifelines.meet(self._store, activity.rank, address[0])
        self._presence = Presence(self._store, activity.rank, activity.size, lines)
        self._asked_s: float | None = None  # since when the thread has had no answer
        self._main_at = NOWHERE  # where rank 0 was seen last: it cannot be asked once it has ended
        self._told_on_gpu = 0, ""
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look, name="colofunc-watch", daemon=True)]
        if activity.rank:
            self._threads.append(
                threading.Thread(target=self._look_after_store, name="colofunc-watch-store", daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def close(self, store: Any) -> None:
        """End the threads before the interpreter ends: one that came back from the store after that would abort the
        process.

        What the GPU has not done by then would not be done: it is waited for, and looked after, as during a step.
        store: a client of the caller's own, for the threads still use theirs.
        """
        if not self._activity.failed and not last_words():
            self._activity.flight.wait()
        with contextlib.suppress(Exception):
            self._tell_gpu(store)
        self._over.set()
        for thread in self._threads:
            thread.join(LOOK_S)
        if any(thread.is_alive() for thread in self._threads):
            return  # the store does not answer
        last = last_words()
        with contextlib.suppress(Exception):
            self._presence.leave(last)
        if self._rank == 0 and last:
            time.sleep(2 * self._activity.every_s)  # the store ends with this process: the others read why

    # ---- what is known of the others ----

    def absent(self) -> list[int]:
        """Ranks that have not joined yet."""
        return self._presence.missing([f"{WHO}/{rank}" for rank in range(self._activity.size)])

    def meet_main(self) -> None:
        """Learn who rank 0 is, while it can be asked."""
        self._presence.process(0)

    def peers(self) -> list[int]:
        """The ranks that this one looks after: those behind it in the circle of ranks, so that each of many has
        somebody.
        """
        size = self._activity.size
        return sorted((self._rank + distance) % size for distance in range(1, min(size, MAX_PEERS + 1)))

    def any_ended(self) -> bool:
        return any(self._presence.condition(rank) == "ended" for rank in self.peers())

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Where `ranks` were last, in words."""
        return "; ".join(f"rank {rank}: {self._whereabout(rank)}" for rank in ranks)

    def _whereabout(self, rank: int) -> str:
        if rank == self._rank:
            return self._activity.here
        if self.main_answers:
            with contextlib.suppress(Exception):
                return self._last_seen(rank)
        return self.main_text() if rank == 0 else "no longer to be reached"

    def _last_seen(self, rank: int) -> str:
        """Where a rank was last, and what has become of its process."""
        words = self._presence.words(rank)
        return whereabouts(self._store, rank).words + (f"; {words}" if words else "")

    def fate(self, rank: int) -> tuple[str, str]:
        """What has become of a rank's process, "ended", "stopped" or another word, and where the rank was, in words."""
        if rank == 0 and self._rank != 0:  # it serves the store
            return self._presence.main_condition(), f"rank 0: {self.main_text()}"
        return self._presence.condition(rank), self.whereabouts([rank])

    @property
    def main_answers(self) -> bool:
        """Whether rank 0, whom all ask, may well answer: whoever asks one that is stopped waits for ever."""
        return self._rank == 0 or self._presence.main_condition() not in ("ended", "stopped")

    def main_text(self) -> str:
        """Where rank 0 was seen last, and what has become of its process; its store does not answer."""
        return f"when last heard of {self._main_at}; {self._presence.main_words()}"

    # ---- the thread that asks the store ----

    def _look(self) -> None:
        activity = self._activity
        lost_since: float | None = None
        while not self._over.wait(activity.every_s) and not activity.failed:
            self._asked_s = time.monotonic()
            try:
                if self._store.check([FAILED]) and not activity.failed:
                    self._end(self._store.get(FAILED).decode())
                self._look_around()
                self._asked_s = lost_since = None
            except Exception:
                self._asked_s = None  # an answer of a kind
                # The rank that serves the store has ended: fine between steps, a failure inside one.
                lost_since = lost_since or time.monotonic()
                if time.monotonic() - lost_since <= LOST_AFTER_S:
                    continue
                if not activity.running:
                    return
                self._end(f"rank 0 is lost ({self.main_text()}) while rank {self._rank} is {activity.here}")

    def _look_around(self) -> None:
        """Say that this rank lives, print who waits for it, and look after those that it waits for."""
        activity = self._activity
        self._presence.beat()
        self._main_at = whereabouts(self._store, 0).where
        for text in self._presence.heard():
            say_presence(
                self._rank,
                f"{text} for this rank, which is {activity.here}; all ranks must call the same steps in the same order",
            )
        self._tell_gpu(self._store)
        waiting = activity.now()
        if waiting is None or waiting.waited_s < activity.every_s:
            return
        missing = self._missing(waiting)
        last_seen = [self._last_seen(rank) for rank in missing]
        conditions = tuple(self._presence.condition(rank) for rank in missing)
        news = waiting.told is None or not set(conditions) <= {"", "running", *waiting.told}
        if missing and news and waiting.waited_s > activity.limits.notice_s:
            waiting.told = conditions
            self._notice(waiting, missing, last_seen)
        for rank, words, condition in zip(missing, last_seen, conditions, strict=True):
            if condition == "ended":
                self._peer_ended(waiting, rank, words)
        # Of a collective on a GPU nobody else says that it has taken too long: not in these words.
        if waiting.on_gpu and waiting.waited_s > waiting.limit_s:
            self._give_up(
                f"rank {self._rank} has waited {waiting.waited_s:.0f} s for its GPU, which is {waiting.what} "
                f"({self.whereabouts(self.peers())}); all ranks must call the same steps in the same order. "
                f"Where one collective takes longer: cf.join(mesh, limit_s={3 * waiting.limit_s:g})"
            )

    def _missing(self, waiting: Waiting) -> list[int]:
        """The ranks that this one waits for, a few of many."""
        if waiting.keys:
            return self._presence.missing(waiting.keys)[:MAX_PEERS]
        # How far a step is cannot be seen: those that are in another one, or in none, are waited for, and those that
        # stand still.
        missing = []
        for rank in self.peers():
            elsewhere = waiting.step and not self._takes_part(rank, waiting)
            if elsewhere or self._presence.condition(rank) in ("stopped", "ended", "silent"):
                missing.append(rank)
        return missing

    def _takes_part(self, rank: int, waiting: Waiting) -> bool:
        """Whether a rank has come to the step that this one is in: with GPUs, hosts may be ahead of it."""
        place = whereabouts(self._store, rank)
        return place.begun >= waiting.step if waiting.on_gpu else place.where.startswith(f"in step {waiting.step} (")

    def _notice(self, waiting: Waiting, missing: Sequence[int], last_seen: Sequence[str]) -> None:
        """On both sides, once and again where a process was stopped since: who waits where, and for whom."""
        text = f"has waited {waiting.waited_s:.0f} s {'at ' if waiting.keys else ''}{waiting.what}"
        say_presence(
            self._rank, f"{text} for {ranks_text(missing, last_seen)}; it gives up after {waiting.limit_s:g} s"
        )
        self._presence.tell(missing, f"rank {self._rank} {text}")

    def _peer_ended(self, waiting: Waiting, rank: int, words: str) -> None:
        """A rank that this one waits for has ended."""
        if waiting.keys:
            # The thread of the script waits for this key: it raises there.
            answer = Answer(GONE, "", f"rank {rank} will not come here ({words})", "")
            self._store.set(waiting.keys[rank], answer.packed())
            return
        if self._did_its_part(rank, waiting):
            return
        waiting.lost_s = waiting.lost_s or time.monotonic()
        # A collective that fails because of it raises in the main thread, which has the better traceback.
        if time.monotonic() - waiting.lost_s > LOST_AFTER_S:
            where = waiting.what if waiting.on_gpu else self._activity.here
            self._give_up(f"rank {rank} is lost ({words}) while rank {self._rank} is {where}")

    def _did_its_part(self, rank: int, waiting: Waiting) -> bool:
        """Whether a rank that has ended was through with this step.

        Outside of steps, whether its script came to its end.
        """
        if waiting.step:
            return whereabouts(self._store, rank).done >= waiting.step
        return self._presence.left(rank) == ""

    def _tell_gpu(self, store: Any) -> None:
        """Write down, where it has changed, which steps have passed on the GPU and what it is at."""
        flight = self._activity.flight
        if not flight.used:
            return
        waiting = flight.waiting(self._activity.limit_s)
        takes_long = waiting is not None and waiting.waited_s > self._activity.every_s
        on_gpu = flight.passed, waiting.what if waiting is not None and takes_long else ""
        if on_gpu != self._told_on_gpu:
            write_on_gpu(store, self._rank, *on_gpu)
            self._told_on_gpu = on_gpu

    # ---- the thread that asks nothing ----

    def _look_after_store(self) -> None:
        """Rank 0 serves the store: where it is stopped, whoever asks it waits for ever."""
        activity = self._activity
        told = False
        while not self._over.wait(activity.every_s):
            asked_s, waiting = self._asked_s, activity.now()
            silent_s = 0.0 if asked_s is None else time.monotonic() - asked_s
            silent = silent_s > activity.limits.notice_s
            if silent and not told:
                here = activity.here if waiting is None else waiting.what
                say_presence(
                    self._rank,
                    f"has had no answer from rank 0{self._main_process()} for {silent_s:.0f} s; this rank is {here}",
                )
            told = silent
            if silent and waiting is not None and waiting.waited_s > waiting.limit_s + LOST_AFTER_S:
                text = f"rank 0 has not answered for {silent_s:.0f} s ({self.main_text()})"
                self._end(f"{text} while rank {self._rank} is {waiting.what}")

    def _main_process(self) -> str:
        process = self._presence.known(0)
        if process is None:
            return ""
        return f" (process {process.pid} on {process.host}, {process.condition() or 'elsewhere'})"

    # ---- the end of a run ----

    def _give_up(self, text: str) -> None:
        """End the run: the others learn why, this rank says it and ends."""
        write_failure(self._store, text)
        self._end(text)

    def _end(self, reason: str) -> None:
        print(f"[rank {self._rank}] ends because {reason}", file=sys.stderr, flush=True)
        if self._activity.flight.used:
            abort_all()  # kernels that wait for a peer end, so that the process can
        os._exit(EXIT_CODE)


def connect(address: tuple[str, int]) -> Any:
    """A client of the store.

    One per use: a blocking call on one holds up whoever shares it. A busy machine may take long to connect.
    """
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))


def write_failure(store: Any, text: str) -> None:
    """Only the first failure counts."""
    if store.add(FAILED + "/first", 1) == 1:
        store.set(FAILED, text)
