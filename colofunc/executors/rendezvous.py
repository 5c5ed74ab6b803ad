"""Rendezvous: launched processes come together, and what is said of those that have not come.

Problem: torch waits for the other processes in silence, and for as long as its timeout also for one that ended while it
imported. Idea: before there is a process group this rank looks for the others itself, once a second. Of one that has
not come nothing is known but what the machine shows: processes that were started with the launcher's variables
(`/proc/PID/environ`, proc(5)).

    [rank 0] has waited 10 s for rank 1 (its process 4711 has not joined yet) to join at 127.0.0.1:29500; it gives up
    after 300 s

A process that imports for a minute is waited for. One that was seen and is there no more, for as long as until the
first line, will not come: that is an error. So is one that is not there at all where the launcher says that all are on
this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from colofunc import compat, env
from colofunc.env import Launch
from colofunc.errors import CollectiveError
from colofunc.executors.presence import Limits, process_state, ranks_text, say_presence

ADDRESS = "colofunc/address"
LOOK_S = 1.0  # how often it is looked for processes
ANSWER_S = 5.0  # how long a store may take to answer
AGAIN = 3.0  # a line comes again after so many times as long as the last one
_SAME = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # equal for all processes of a run

_MEETINGS = count()  # process groups that this process has joined: all ranks join the same ones in the same order


def _started_with(process: str) -> dict[str, str]:
    """The variables that a process was started with; {} where they cannot be read."""
    try:
        environ = Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in environ.split("\0") if "=" in entry)


def started_here() -> dict[int, list[int]] | None:
    """rank -> processes of this machine that were started as this rank of the same run.

    None where nothing can be concluded: this process has its place from elsewhere than from the variables it was
    started with.
    """
    own = _started_with("self")
    if not own.get("RANK", "").isdecimal():
        return None
    found: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        other = _started_with(folder.name) if folder.name.isdecimal() else {}
        if other.get("RANK", "").isdecimal() and all(other.get(name) == own.get(name) for name in _SAME):
            found.setdefault(int(other["RANK"]), []).append(int(folder.name))
    return found


@attrs.define(eq=False)
class Arrivals:
    """Waiting for ranks that have not come yet.

    all_here: the launcher has said that all ranks are on this machine. pulse: a collective under way in a process group
    that all ranks have joined before; it fails when one of them ends.
    """

    rank: int
    limits: Limits
    where: str = ""
    all_here: bool = False
    pulse: Any = None
    _began_s: float = attrs.field(factory=time.monotonic)
    _seen: dict[int, int] = attrs.field(factory=dict)  # rank -> a process that was started as it
    _gone_s: dict[int, float] = attrs.field(factory=dict)  # since when there is none
    _known: bool = False  # whether looking for processes tells anything

    def wait(self, missing: Callable[[], Sequence[int]]) -> None:
        """Until `missing()` is empty.

        Raises CollectiveError where a rank will not come, or has not within the limit.
        """
        next_line_s, pause_s, looked_s = self.limits.notice_s, 0.002, time.monotonic()
        while ranks := missing():
            now_s = time.monotonic()
            waited_s = now_s - self._began_s
            if now_s - looked_s > min(LOOK_S, self.limits.notice_s / 4):
                looked_s = now_s
                self._look(ranks, now_s)
            ended = [rank for rank in ranks if self._ended(rank, now_s)]
            if self.pulse is not None and self.pulse.is_completed() and not self.pulse.is_success():
                ended = list(ranks)  # which of them the transport does not tell
            if ended:
                raise CollectiveError(f"{self._text(ended)} will not join{self.where}; its own output says why")
            if waited_s > self.limits.limit_s:
                raise CollectiveError(
                    f"rank {self.rank} has waited {waited_s:.0f} s for {self._text(ranks)} to join{self.where}. Where "
                    f"processes take longer to start, try: cf.join(mesh, limit_s={3 * self.limits.limit_s:g})"
                )
            if waited_s > next_line_s:
                next_line_s *= AGAIN
                text = f"has waited {waited_s:.0f} s for {self._text(ranks)} to join{self.where}"
                say_presence(self.rank, f"{text}; it gives up after {self.limits.limit_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.25)

    def _look(self, ranks: Sequence[int], now_s: float) -> None:
        """What the machine shows of `ranks`."""
        here = started_here()
        self._known = here is not None
        if here is None:
            return
        # More processes of this rank than itself and a shell around it: it may have started the others with its own
        # variables.
        unclear = set(here.get(self.rank, ())) - {os.getpid(), os.getppid()}
        for rank in ranks:
            if rank in here:
                # A shell or `timeout` around it was started with the same variables: one that is stopped is the rank's
                # own.
                stopped = [process for process in here[rank] if process_state(process) == "stopped"]
                self._seen[rank] = (stopped or here[rank])[0]
                self._gone_s.pop(rank, None)
            elif rank in self._seen or (self.all_here and not unclear):
                self._gone_s.setdefault(rank, now_s)

    def _ended(self, rank: int, now_s: float) -> bool:
        # A supervisor may start it again: it is given as long as a rank that has said nothing.
        return rank in self._gone_s and now_s - self._gone_s[rank] > self.limits.notice_s

    def _text(self, ranks: Sequence[int]) -> str:
        return ranks_text(ranks, [self._words(rank) for rank in ranks])

    def _words(self, rank: int) -> str:
        process = self._seen.get(rank)
        if process is None:
            return "no process of this machine was started as it" if self._known else ""
        if rank in self._gone_s:
            return f"its process {process} has ended"
        return f"its process {process} {'is stopped' if process_state(process) == 'stopped' else 'has not joined yet'}"


def patient(look: Callable[[], list[int]]) -> Callable[[], list[int]]:
    """`look` through a store that rank 0 serves: where that does not answer it is waited for, where it is gone it is an
    error.
    """

    def missing() -> list[int]:
        began_s = time.monotonic()
        try:
            return look()
        except dist.DistError as error:
            if time.monotonic() - began_s < ANSWER_S / 2:
                raise CollectiveError("rank 0, through which ranks join, has ended; its own output says why") from error
            return [0]

    return missing


@attrs.frozen(eq=False)
class Meeting:
    """Where ranks find one another. `store`: of a process group, or of the launcher; None where torch does not tell.

    host: of rank 0, as the others know it; None: loopback on its own machine, its name for others.
    """

    store: Any
    arrivals: Arrivals
    host: str | None = None

    @staticmethod
    def of_group(rank: int, limits: Limits) -> Meeting:
        """Of the default process group, which somebody else has made."""
        launch = env.launched()
        all_here = launch is not None and launch.local_world_size == launch.world_size
        pulse = dist.barrier(async_op=True) if dist.get_backend() == "gloo" else None
        host = None if launch is None else launch.master_addr
        return Meeting(compat.group_store(ANSWER_S), Arrivals(rank, limits, "", all_here, pulse), host)

    @staticmethod
    def at(launch: Launch, limits: Limits) -> Meeting:
        """At MASTER_ADDR:MASTER_PORT, which the launcher or rank 0 serves.

        Waits for who serves it, and for nobody else.
        """
        where = f" at {launch.master_addr}:{launch.master_port}"
        arrivals = Arrivals(launch.rank, limits, where, launch.local_world_size == launch.world_size)
        made: list[Any] = []

        def missing() -> list[int]:
            try:
                made.append(_reached(launch))
            except (OSError, dist.DistError):
                if launch.rank == 0 and not launch.serves_store:
                    raise
                return [0]
            return []

        arrivals.wait(missing)
        return Meeting(PrefixStore(f"colofunc/{launch.restarts}", made[0]), arrivals, launch.master_addr)

    def group_store(self, number: int) -> Any:
        """What the process group is to be made with."""
        self.store.set_timeout(timedelta(seconds=self.arrivals.limits.limit_s))
        return PrefixStore(f"group/{number}", self.store)


def _reached(launch: Launch) -> Any:
    address = launch.master_addr, launch.master_port
    options: dict[str, Any] = {"timeout": timedelta(seconds=ANSWER_S), "wait_for_workers": False}
    if launch.rank == 0 and not launch.serves_store:
        return TCPStore(*address, launch.world_size, is_master=True, multi_tenant=True, **options)
    socket.create_connection(address, timeout=ANSWER_S).close()  # torch would try again on its own, in silence
    return TCPStore(*address, launch.world_size, is_master=False, **options)


def serve(meeting: Meeting, rank: int) -> tuple[Any, tuple[str, int]]:
    """(server, address) of a store of our own: rank 0 serves it; the others learn where."""
    server, told = None, ""
    if rank == 0:
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told = json.dumps([meeting.host, server.port, network()])
    told = _told(meeting, rank, told)
    host, port, place = json.loads(told)
    if place == network():
        host = host or "127.0.0.1"
    return server, (host or place.split(" ")[0], port)


def _told(meeting: Meeting, rank: int, text: str) -> str:
    """Rank 0's text."""
    store, key = meeting.store, f"{ADDRESS}/{next(_MEETINGS)}"
    if store is None:
        box = [text]
        dist.broadcast_object_list(box, src=0)
        return box[0]
    if rank == 0:
        store.set(key, text)
        return text
    meeting.arrivals.wait(patient(lambda: [] if store.check([key]) else [0]))
    return str(store.get(key).decode())


def network() -> str:
    """Name of this machine, and of the network that its processes share."""
    marks = [socket.gethostname()]
    with contextlib.suppress(OSError):  # not on Linux
        marks += [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/net")]
    return " ".join(marks)
