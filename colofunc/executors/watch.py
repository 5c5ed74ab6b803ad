"""Watching peers: a rank that fails ends all within seconds, with its traceback.

Problem: when one rank fails, the others wait in a collective for ever. Idea: a small key-value store beside the process
group. The failing rank writes its traceback there; a thread on every other rank looks once a second, prints it and ends
the process. It ends the process because a thread that waits inside a collective cannot be woken.

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
import socket
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

from colofunc import env
from colofunc.errors import CollectiveError
from colofunc.executors.presence import Limits, Presence, Waiting, noticed, ranks_text, say
from colofunc.program.tracing.meta import user_line

FAILED = "colofunc/failed"
NOWHERE = "not in a step yet"
AT = "colofunc/at"  # where each rank is
GONE = "gone"  # said in place of a rank that has ended
FEW = 32  # ranks that one rank looks after at a time
LOOK_S = 1.0  # how often a rank looks for what happened to others
LOST_AFTER_S = 6.0  # how long the store may be gone during a step before the run is given up
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

    def __init__(self, rank: int, size: int, limits: Limits | None = None) -> None:
        self.rank = rank
        self.size = size
        self.limits = limits or Limits()
        with noticed(rank, "for the other processes to come to their first step", self.limits):
            self._server, address = _serve(rank)
        # A client of its own per use: a blocking call on one would hold up the thread.
        self._store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._thread_store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        self._presence = Presence(self._thread_store, rank, size)
        self._waiting: Waiting | None = None  # for ranks that have not come to a point yet
        self._inside: Waiting | None = None  # for ranks in the collectives of a step
        self._asked_s: float | None = None  # since when the thread has had no answer
        self._running = 0
        self._rounds = 0
        self._failed = False
        self._steps = 0
        self._here = NOWHERE
        self._run = 0  # collective programs that this rank has run, and a checksum of which
        self._history = 0
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._look, name="colofunc-watch", daemon=True)]
        if rank:
            self._threads.append(threading.Thread(target=self._mind, name="colofunc-watch-store", daemon=True))
        for thread in self._threads:
            thread.start()
        atexit.register(self._leave_off)

    @property
    def deadline_s(self) -> float:
        """How long ranks wait for one another before it is an error."""
        return self.limits.limit_s

    def __enter__(self) -> Watch:
        if not self._running:
            self._inside = Waiting(self._here, self.deadline_s)
        self._running += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._running -= 1
        if not self._running:
            self._inside = None
        if error is None or isinstance(error, (KeyboardInterrupt, SystemExit)):
            return
        if _of_transport(error):
            told = CollectiveError(self._lost_peer())
            self.publish(told)
            raise told from error
        self.publish(error)

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed; only the first failure counts."""
        self._failed = True
        text = "".join(traceback.format_exception(error))
        try:
            if self._store.add(FAILED + "/first", 1) == 1:
                self._store.set(FAILED, f"rank {self.rank} failed:\n{text}")
        except Exception as lost:
            error.add_note(f"the other ranks could not be told: {lost}")

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
        except Exception as error:
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
            return f"{here}: rank {self.rank} waited for rank 0, which has ended; all ranks must call the same steps in the same order"
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
        try:
            yield
        finally:
            self._announce(f"after step {self._steps} ({name})")

    def advance(self, program: str) -> None:
        """This rank runs a collective program with this hash."""
        self._run += 1
        self._history = zlib.crc32(program.encode(), self._history)

    def _announce(self, what: str) -> None:
        self._here = _at(what, user_line())
        with contextlib.suppress(Exception):  # a lost store is the thread's business
            self._store.set(f"{AT}/{self.rank}", self._here)

    def _lost_peer(self) -> str:
        """What to say in place of the transport's own words when a collective fails."""
        with contextlib.suppress(Exception):
            if self._store.check([FAILED]):
                return self._store.get(FAILED).decode()
        others = [r for r in range(self.size) if r != self.rank]
        return (
            f"rank {self.rank}, {self.whereabouts([self.rank])[len(f'rank {self.rank}: '):]}, lost or waited in vain for its peers "
            f"({self.whereabouts(others)}); all ranks must call the same steps in the same order, and as often"
        )

    def whereabouts(self, ranks: Sequence[int]) -> str:
        """Where `ranks` were last, in words."""
        words = []
        for r in ranks:
            try:
                there = _place(self._store, r)
            except Exception:
                there = "no longer to be reached"
            words.append(f"rank {r}: {there}")
        return "; ".join(words)

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
        """End the threads before the interpreter ends: one that came back from the store after that would abort the process."""
        self._over.set()
        for thread in self._threads:
            thread.join(LOOK_S)

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
                    self._end("rank 0 is gone")
                if not self._running and time.monotonic() - lost_since > LOST_AFTER_S:
                    return

    def _look_around(self) -> None:
        """Say that this rank lives, print who waits for it, and look after those that it waits for."""
        self._presence.beat()
        for text in self._presence.heard():
            say(self.rank, f"{text} for this rank, which is {self._here}; all ranks must call the same steps in the same order")
        waiting = self._waiting or self._inside
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
            if waiting.keys and condition == "ended":
                text = f"rank {r} will not come here ({words})"
                self._thread_store.set(waiting.keys[r], json.dumps([GONE, "", text, ""]))

    def _missing(self, waiting: Waiting) -> list[int]:
        """The ranks that this one waits for, a few of many."""
        if waiting.keys:
            return self._presence.missing(waiting.keys)[:FEW]
        # How far a step is cannot be seen: those that are in another one, or in none, are waited for.
        step = waiting.what.partition(" at ")[0]
        others = [r for r in range(self.size) if r != self.rank][:FEW]
        return [r for r in others if _place(self._thread_store, r).partition(" at ")[0] != step]

    def _notice(self, waiting: Waiting, missing: Sequence[int], known: Sequence[str]) -> None:
        """On both sides, once and again where a process was stopped since: who waits where, and for whom."""
        text = f"has waited {waiting.waited_s:.0f} s {'at ' if waiting.keys else ''}{waiting.what}"
        say(self.rank, f"{text} for {ranks_text(missing, known)}; it gives up after {waiting.limit_s:g} s")
        self._presence.tell(missing, f"rank {self.rank} {text}")

    def _known(self, rank: int) -> str:
        """Where a rank was last, and what has become of its process."""
        words = self._presence.words(rank)
        return _place(self._thread_store, rank) + (f"; {words}" if words else "")

    def _mind(self) -> None:
        """Rank 0 serves the store: where it is stopped, whoever asks it waits for ever. This thread asks nothing."""
        told = False
        while not self._over.wait(self._every_s) and not self._failed:
            asked_s, waiting = self._asked_s, self._waiting or self._inside
            silent_s = 0.0 if asked_s is None else time.monotonic() - asked_s
            if silent_s > self.limits.notice_s and not told:
                process = self._presence.known(0)
                words = "" if process is None else f" (process {process.pid} on {process.host}, {process.condition() or 'elsewhere'})"
                here = self._here if waiting is None else waiting.what
                say(self.rank, f"has had no answer from rank 0{words} for {silent_s:.0f} s; this rank is {here}")
            told = silent_s > self.limits.notice_s
            if waiting is not None and told and waiting.waited_s > waiting.limit_s + LOST_AFTER_S:
                self._end(f"rank 0 has not answered for {silent_s:.0f} s")

    def _end(self, reason: str) -> None:
        print(f"[rank {self.rank}] ends because {reason}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _place(store: Any, rank: int) -> str:
    """Where a rank was last."""
    key = f"{AT}/{rank}"
    return str(store.get(key).decode()) if store.check([key]) else NOWHERE


def _serve(rank: int) -> tuple[Any, tuple[str, int]]:
    """Rank 0 serves the store; all learn its address through the process group."""
    where: list[Any] = [None]
    server = None
    if rank == 0:
        launch = env.launched()
        host = launch.master_addr if launch is not None else "127.0.0.1" if _one_host() else socket.gethostname()
        server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        where = [(host, server.port)]
    elif not env.launched():
        _one_host()
    dist.broadcast_object_list(where, src=0)
    return server, where[0]


def _one_host() -> bool:
    """Whether all ranks run on one machine (collective)."""
    names: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(names, socket.gethostname())
    return len(set(names)) == 1
