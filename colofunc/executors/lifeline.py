"""Lifelines: connections by which the kernel tells that a process has ended, on whichever machine it ran.

Problem: of a process on another machine there is no `/proc` to look at, and a heartbeat that stops may be that of a
busy one. Idea: the kernel closes the connections of a process that ends, however it ends. Every rank keeps one open to
rank 0, over which nothing is said but who it is; rank 0 sees those of all others, all others see that of rank 0.

    lines = Lifelines.serve()                        # rank 0
    lines = Lifelines.connect("10.0.0.1", port, token, rank=1)
    lines.ended()                                    # [1] on rank 0, once rank 1 has ended

A machine that loses its power or its network closes nothing: of that one only the heartbeat is known.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
from typing import Any

import torch.distributed as dist

_HELLO = struct.Struct("!16sI")  # token, rank
CONNECT_S = 5.0
PORT = "colofunc/lifeline"


class Lifelines:
    """This rank's connections to those whose end it sees. Used by one thread; nothing here waits."""

    def __init__(self, token: bytes, listener: socket.socket | None = None) -> None:
        self.token = token
        self._listener = listener
        self._unnamed: list[socket.socket] = []  # connected, and have not said who they are
        self._ranks: dict[int, socket.socket] = {}
        self._ended: list[int] = []
        # A forked child (a loader's worker) would hold the connections open beyond the end of this process.
        os.register_at_fork(after_in_child=self.close)

    @staticmethod
    def serve() -> Lifelines:
        """Of rank 0. Listens on all interfaces, as the store beside it does."""
        listener = socket.create_server(("", 0), backlog=1024)
        listener.setblocking(False)
        return Lifelines(secrets.token_bytes(16), listener)

    @staticmethod
    def connect(host: str, port: int, token: bytes, rank: int) -> Lifelines:
        """Of any other rank. Raises OSError where rank 0 cannot be reached."""
        line = socket.create_connection((host, port), timeout=CONNECT_S)
        line.sendall(_HELLO.pack(token, rank))
        line.setblocking(False)
        lines = Lifelines(token)
        lines._ranks[0] = line
        return lines

    @staticmethod
    def meet(store: Any, rank: int, host: str) -> Lifelines | None:
        """This rank's, once rank 0 has written into `store` where it listens; None where it cannot be reached there."""
        if rank == 0:
            lines = Lifelines.serve()
            store.set(PORT, json.dumps([lines.port, lines.token.hex()]))
            return lines
        try:
            port, token = json.loads(store.get(PORT))
            return Lifelines.connect(host, port, bytes.fromhex(token), rank)
        except (OSError, dist.DistError):
            return None

    @property
    def port(self) -> int:
        assert self._listener is not None, "rank 0 listens"
        return int(self._listener.getsockname()[1])

    def ended(self) -> list[int]:
        """Ranks whose connections were closed since they were made."""
        self._accept()
        for rank, line in list(self._ranks.items()):
            if _read(line) == b"":
                self._ended.append(rank)
                self._ranks.pop(rank).close()
        return list(self._ended)

    def close(self) -> None:
        for line in (*self._ranks.values(), *self._unnamed, *([] if self._listener is None else [self._listener])):
            line.close()
        self._ranks, self._unnamed, self._listener = {}, [], None

    def _accept(self) -> None:
        while self._listener is not None:
            try:
                line = self._listener.accept()[0]
            except OSError:  # nobody else
                break
            line.setblocking(False)
            self._unnamed.append(line)
        for line in list(self._unnamed):
            said = _read(line)
            if said is None:
                continue
            self._unnamed.remove(line)
            token, rank = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", 0)
            if secrets.compare_digest(token, self.token):
                self._ranks[rank] = line
            else:
                line.close()


def _read(line: socket.socket) -> bytes | None:
    """What has come; b"" where the other end was closed, None where nothing has come."""
    try:
        return line.recv(_HELLO.size)
    except BlockingIOError:
        return None
    except ConnectionError:
        return b""
    except OSError:  # for example a network that is down: the other process may well live
        with contextlib.suppress(OSError):
            line.setblocking(False)
        return None
