"""Profile: where the time of a step goes, by module, phase, operator and collective.

Problem: a profiler of the framework below shows kernels, not the user's modules, and not which wait was for whom. Idea:
the program knows module, phase and line of every node, so a clock behind each node (see `tap`) is all that is needed;
what a rank spends in a collective or in waiting for one is communication that nothing hid.

    t = clock();  v4 = linear(v2, v0); mark(0);  v5 = handle.wait(); mark(1)

The clocks cost something, so the step is also run without them and the difference is stated. On a simulated mesh all
ranks run in one process: the times are those of the simulation.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist

from colofunc import owned
from colofunc.errors import InputError
from colofunc.executors.source import Writer
from colofunc.program.chrome_trace import TRACE_MARK, trace_of
from colofunc.program.facts import EFFECTS, LOCAL, kind_of
from colofunc.program.ir import Node

LOCAL_MOVES = (LOCAL | EFFECTS) - {"wait"}  # who waits, waits for other ranks


@attrs.frozen
class Timing:
    """One node of the program that ran.

    `starts_s`, `seconds`: per step and visit (a node in a loop is visited often).
    """

    target: str
    path: str
    phase: str
    line: str
    communication: bool
    starts_s: tuple[tuple[float, ...], ...]
    seconds: tuple[tuple[float, ...], ...]

    @property
    def mean_s(self) -> float:
        """Per step."""
        return sum(map(sum, self.seconds)) / max(1, len(self.seconds))


@attrs.frozen(repr=False)
class Profile:
    """What `step.profile` measured. Seconds are per step, means over the timed steps; nodes are those of rank 0.

    `step_s` is of the step without clocks, `clocked_s` of its nodes with them, `overhead` the share of a step that the
    clocks added. `exposed_s`: per rank, in collectives and waiting for them. `utilisation`: seconds that the devices
    would need at their peak / seconds of the step; None where that says nothing.
    """

    simulated: bool
    compiled: bool
    ranks: int
    steps: int
    step_s: float
    clocked_s: float
    overhead: float
    flops: float  # of the whole step on one device
    ideal_s: float  # for these operations on all devices at their peak rates
    peak: str  # where the peak rates are from
    utilisation: float | None
    exposed_s: tuple[float, ...]
    nodes: tuple[Timing, ...]
    wire_bytes: Mapping[tuple[str, str], int]  # (collective, axes) -> bytes a rank receives
    calls: Mapping[tuple[str, str], int]

    def by(self, *keys: str) -> dict[tuple[str, ...], float]:
        """Seconds per step by "path", "phase", "target", "line", the longest first: `by("path", "phase")`."""
        total: dict[tuple[str, ...], float] = defaultdict(float)
        for node in self.nodes:
            total[tuple(str(getattr(node, key)) for key in keys)] += node.mean_s
        return dict(sorted(total.items(), key=lambda item: -item[1]))

    def table(self, most: int = 12) -> str:
        """The figures of the step, then its dearest modules and operators, and its collectives."""
        parts = [self._head(), _rows("module", self.by("path", "phase"), self.clocked_s, most)]
        parts.append(_rows("operator", self.by("target", "phase"), self.clocked_s, most))
        if self.calls:
            lines = [f"{'collective':<28} {'calls':>6} {'bytes per rank':>16}"]
            for (kind, axes), n in sorted(self.calls.items()):
                lines.append(f"{f'{kind}({axes})':<28} {n:>6} {self.wire_bytes[kind, axes]:>16,}")
            parts.append("\n".join(lines))
        return "\n\n".join(parts)

    def _head(self) -> str:
        phases = ", ".join(f"{phase} {_ms(s)}" for (phase,), s in self.by("phase").items())
        where = f"{self.ranks} simulated ranks in this process" if self.simulated else f"{self.ranks} ranks"
        lines = [f"{_ms(self.step_s)} a step on {where} ({phases}); the clocks add {self.overhead:.0%}"]
        if self.simulated and self.ranks > 1:
            lines.append(
                "times are of the simulation, which computes what ranks share once: they say nothing about a cluster"
            )
        if self.compiled:
            lines.append(
                "the step is compiled when it runs, which leaves no operators to time: these figures are of the step "
                "before that"
            )
        if self.utilisation is not None:
            lines.append(
                f"model flops utilisation {self.utilisation:.1%}: {self.flops:.3g} operations a step, peak {self.peak}"
            )
        else:
            lines.append(f"model flops utilisation unknown: {self.flops:.3g} operations a step, {self.peak}")
        if not self.simulated and self.ranks > 1:
            exposed = ", ".join(f"{_ms(s)}" for s in self.exposed_s)
            lines.append(
                f"communication that nothing hides: {max(self.exposed_s) / self.clocked_s:.0%} of the step (per rank "
                f"{exposed})"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    __repr__ = __str__


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def _rows(what: str, times: Mapping[tuple[str, ...], float], whole_s: float, most: int) -> str:
    lines = [f"{what:<40} {'phase':<9} {'time':>10} {'share':>6}"]
    for (name, phase), seconds in list(times.items())[:most]:
        lines.append(f"{name or '(the step itself)':<40} {phase:<9} {_ms(seconds):>10} {seconds / whole_s:>6.1%}")
    if len(times) > most:
        rest = sum(list(times.values())[most:])
        lines.append(f"{f'{len(times) - most} more':<40} {'':<9} {_ms(rest):>10} {rest / whole_s:>6.1%}")
    return "\n".join(lines)


# ---- measuring ----


class Clock:
    """A tap that notes when each node has ended. On a GPU the times are events of its stream."""

    def __init__(self, device: torch.device) -> None:
        self.nodes: list[Node] = []
        self.marks: list[tuple[int, Any]] = []
        self._cuda = device.type == "cuda"

    def __call__(self, writer: Writer, index: int, node: Node) -> None:
        self.nodes.append(node)
        writer.line(f"{writer.bind(self.mark, 'mark')}({len(self.nodes) - 1})")

    def mark(self, site: int) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((site, event))
        else:
            self.marks.append((site, time.perf_counter()))

    def one_step(self, run: Callable[[], Any]) -> list[tuple[int, float, float]]:
        """(node, start, seconds) of every visit while `run()` runs; starts count from its beginning."""
        self.marks.clear()
        self.mark(-1)
        run()
        if self._cuda:
            torch.cuda.synchronize()
        first = self.marks[0][1]
        at = [(site, first.elapsed_time(mark) / 1e3 if self._cuda else mark - first) for site, mark in self.marks]
        return [(site, before, now - before) for (_, before), (site, now) in pairwise(at)]


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Seconds of `run()`, on a GPU until it has done all."""
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def timings(nodes: Sequence[Node], steps: Sequence[Sequence[tuple[int, float, float]]]) -> tuple[Timing, ...]:
    """What the clock saw, per node."""
    # Per node and step, one entry for each time that it ran: a loop runs its body several times.
    starts: list[list[list[float]]] = []
    seconds: list[list[list[float]]] = []
    for _ in nodes:
        starts.append([[] for _ in steps])
        seconds.append([[] for _ in steps])
    for step, visits in enumerate(steps):
        for site, start, took in visits:
            starts[site][step].append(start)
            seconds[site][step].append(took)
    found: list[Timing] = []
    for site, node in enumerate(nodes):
        times = _frozen(starts[site]), _frozen(seconds[site])
        found.append(Timing(node.target, node.path, node.phase, node.line, _communicates(node), *times))
    return tuple(found)


def _communicates(node: Node) -> bool:
    kind = kind_of(node)
    return kind is not None and kind[0] not in LOCAL_MOVES and node.loop is None


def _frozen(lists: Iterable[Iterable[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(one) for one in lists)


def of_all_ranks(mine: tuple[Timing, ...]) -> list[tuple[Timing, ...]]:
    """Every process's timings in rank order; collective where there are several."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return [mine]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    return told


# ---- the file ----


def write_trace(path: Path, ranks: Sequence[Sequence[Timing]], lengths_s: Sequence[float], words: str) -> None:
    """A Chrome trace (chrome://tracing, Perfetto): one process per rank; operators, communication and modules as
    threads.
    """
    events: list[dict[str, Any]] = []
    starts_s = [sum(lengths_s[:n]) for n in range(len(lengths_s))]
    for rank, nodes in enumerate(ranks):
        name = f"rank {rank}" if len(ranks) > 1 else words
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": name}})
        for tid, title in enumerate(("operators", "communication", "modules")):
            events.append({"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": title}})
        visits = sorted(_visits(nodes, starts_s), key=lambda visit: visit[0])
        events += [_event(rank, int(node.communication), node.target, t, took, node) for t, took, node in visits]
        events += _spans(rank, visits)
    owned.write_text(path, json.dumps(trace_of(events, words)), TRACE_MARK, "profile", InputError)


def _visits(nodes: Sequence[Timing], starts_s: Sequence[float]) -> Iterator[tuple[float, float, Timing]]:
    """(start, seconds, node) of every visit in all steps, one step behind the other."""
    for node in nodes:
        for began, starts, seconds in zip(starts_s, node.starts_s, node.seconds, strict=True):
            yield from ((began + t, took, node) for t, took in zip(starts, seconds, strict=True))


def _event(rank: int, thread: int, name: str, start_s: float, took_s: float, node: Timing) -> dict[str, Any]:
    where = {"module": node.path, "phase": node.phase, "line": node.line}
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "name": name,
        "ts": 1e6 * start_s,
        "dur": 1e6 * took_s,
        "cat": node.phase,
        "args": where,
    }


def _spans(rank: int, visits: Sequence[tuple[float, float, Timing]]) -> Iterable[dict[str, Any]]:
    """One event per run of nodes of the same module and phase."""
    begin = 0
    for k in range(1, len(visits) + 1):
        node = visits[begin][2]
        if k < len(visits) and (visits[k][2].path, visits[k][2].phase) == (node.path, node.phase):
            continue
        start, end = visits[begin][0], visits[k - 1][0] + visits[k - 1][1]
        yield _event(rank, 2, node.path or "(the step itself)", start, end - start, node)
        begin = k
