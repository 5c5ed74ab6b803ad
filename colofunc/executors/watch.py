"""Watching peers: a rank that fails ends all within seconds, with its traceback.

Problem: when one rank fails, the others wait in a collective for ever. Idea: a small key-value store beside the process
group. The failing rank writes its traceback there; a thread on every other rank looks once a second, prints it and ends
the process. It ends the process because a thread that waits inside a collective cannot be woken.

The store also holds what ranks compare before a program runs (`agree`), and where each rank is: a rank that comes to a
collective alone ends within a deadline, with an error that names its own line and where the others are.

    meet(watch, "save to 'run/7'", deadline_s=60)      # all ranks must come to this point within 60 s
"""

from __future__ import annotations

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
from colofunc.program.tracing.meta import user_line

DEADLINE_S = 300.0  # for joining, for a collective, and for all ranks to come to the same step
FAILED = "colofunc/failed"
AT = "colofunc/at"  # where each rank is
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
    """This rank's connection to the store, and the thread that looks for failures of others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._server, address = _serve(rank)
        # A client of its own per use: a blocking call on one would hold up the thread.
        self._store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
        self._thread_store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
        self._running = 0
        self._rounds = 0
        self._failed = False
        self.deadline_s = DEADLINE_S
        self._steps = 0
        self._run = 0  # collective programs that this rank has run, and a checksum of which
        self._history = 0
        threading.Thread(target=self._look, name="colofunc-watch", daemon=True).start()

    def __enter__(self) -> Watch:
        self._running += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._running -= 1
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
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
            texts = [text.decode() for text in self._store.multi_get(keys)]
        except Exception as error:
            raise LateError(self._late(_at(what, line), keys, timeout_s)) from error
        said = [json.loads(text) for text in texts]
        # All ranks have come to this round, so all have read what was said in the one before.
        self._store.delete_key(f"colofunc/agree/{self._rounds - 1}/{self.rank}")
        self._leave(prefix, last or len({(state, there, text) for state, there, text, _ in said}) > 1)
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
        with contextlib.suppress(Exception):  # a lost store is the thread's business
            self._store.set(f"{AT}/{self.rank}", _at(what, user_line()))

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
                key = f"{AT}/{r}"
                there = self._store.get(key).decode() if self._store.check([key]) else "not in a step yet"
            except Exception:
                there = "no longer to be reached"
            words.append(f"rank {r}: {there}")
        return "; ".join(words)

    def _leave(self, prefix: str, last: bool) -> None:
        """Rank 0 serves the store: where its process may end right after this, it lets the others read first."""
        read = self._store.add(f"{prefix}/read", 1) if last else 0
        until = time.monotonic() + 5.0
        while last and self.rank == 0 and read < self.size and time.monotonic() < until:
            time.sleep(0.002)
            read = self._store.add(f"{prefix}/read", 0)

    # ---- the thread ----

    def _look(self) -> None:
        lost_since: float | None = None
        while not self._failed:
            time.sleep(1.0)
            try:
                failed = self._thread_store.check([FAILED])
                lost_since = None
                if failed and not self._failed:
                    self._end(self._thread_store.get(FAILED).decode())
            except Exception:
                # The rank that serves the store has ended: fine between steps, a failure inside one.
                lost_since = lost_since or time.monotonic()
                if self._running and time.monotonic() - lost_since > LOST_AFTER_S:
                    self._end("rank 0 is gone")
                if not self._running and time.monotonic() - lost_since > LOST_AFTER_S:
                    return

    def _end(self, reason: str) -> None:
        print(f"[rank {self.rank}] ends because {reason}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


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
