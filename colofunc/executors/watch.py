"""Watching peers: a rank that fails ends all within seconds, with its traceback.

Problem: when one rank fails, the others wait in a collective for ever. Idea: a small key-value store beside the process
group. The failing rank writes its traceback there; a thread on every other rank looks once a second, prints it and ends
the process. It ends the process because a thread that waits inside a collective cannot be woken.

The store also holds what ranks compare before a program runs: see `agree`.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from colofunc import env
from colofunc.errors import CollectiveError

FAILED = "colofunc/failed"
LOST_AFTER_S = 6.0  # how long the store may be gone during a step before the run is given up
EXIT_CODE = 13


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
        threading.Thread(target=self._look, name="colofunc-watch", daemon=True).start()

    def __enter__(self) -> Watch:
        self._running += 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._running -= 1
        if error is not None and not isinstance(error, (KeyboardInterrupt, SystemExit)):
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

    def agree(self, what: str, mine: str, timeout_s: float) -> None:
        """Raise CollectiveError unless all ranks give the same string; the error names the ranks that differ."""
        texts = self.exchange(what, mine, timeout_s)
        if len(set(texts)) > 1:
            common = max(set(texts), key=lambda t: (texts.count(t), -texts.index(t)))
            odd = [r for r, t in enumerate(texts) if t != common]
            raise CollectiveError(
                f"{what} differs between ranks: ranks {odd} have another one than the rest. Ranks must call the same step "
                "with arguments of the same shapes, dtypes and static values, and run the same versions"
            )

    def give_up(self, what: str, error: BaseException, timeout_s: float) -> None:
        """In place of `agree` on a rank that failed before it: the others learn of it, this rank raises its own error."""
        try:
            self._everyone(["failed", what, f"{type(error).__name__}: {error}"], timeout_s)
        except CollectiveError as late:
            error.add_note(str(late))

    def exchange(self, what: str, mine: str, timeout_s: float) -> list[str]:
        """Every rank's string, in rank order. Raises CollectiveError where a rank is late, failed, or elsewhere."""
        said = self._everyone(["", what, mine], timeout_s)
        for r, (state, there, text) in enumerate(said):
            if state == "failed":
                raise CollectiveError(f"{there} failed on rank {r}: {text}")
        elsewhere = {r: there for r, (_, there, _) in enumerate(said) if there != what}
        if elsewhere:
            r, there = next(iter(elsewhere.items()))
            raise CollectiveError(
                f"rank {self.rank} has come to {what}, rank {r} to {there}; all ranks must call the same steps in the same order"
            )
        return [text for _, _, text in said]

    def _everyone(self, mine: list[str], timeout_s: float) -> list[list[str]]:
        self._rounds += 1
        prefix = f"colofunc/agree/{self._rounds}"
        self._store.set(f"{prefix}/{self.rank}", json.dumps(mine))
        keys = [f"{prefix}/{r}" for r in range(self.size)]
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except Exception as error:
            late = [r for r, key in enumerate(keys) if not self._store.check([key])]
            raise CollectiveError(
                f"{mine[1]}: rank {self.rank} waited {timeout_s:g} s for ranks {late}, which did not come to this step; "
                "all ranks must call the same steps in the same order"
            ) from error
        texts = [self._store.get(key).decode() for key in keys]
        self._leave(prefix, any(text.startswith('["failed"') for text in texts))
        return [json.loads(text) for text in texts]

    def _leave(self, prefix: str, failed: bool) -> None:
        """Rank 0 serves the store: where its process may end right after this, it lets the others read first."""
        read = self._store.add(f"{prefix}/read", 1) if failed else 0
        until = time.monotonic() + 5.0
        while failed and self.rank == 0 and read < self.size and time.monotonic() < until:
            time.sleep(0.05)
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
