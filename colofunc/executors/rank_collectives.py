"""Collectives and messages of one rank, as lines of its generated source.

The counterpart of `SimulatedWires`: one lane, and each collective is a call of a process group (see `groups`):

    v5 = all_reduce_dp(v4).wait()
    send(v7, 3)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from colofunc.executors.faults import ask
from colofunc.executors.flight import Flight
from colofunc.executors.groups import Ahead, Groups, Start, Started
from colofunc.executors.kernels import HostCount, first_rows, with_zeros
from colofunc.executors.source import Writer, only
from colofunc.program.facts import COPIES, PEERS
from colofunc.program.ir import Node, Program, Ref
from colofunc.spec.layout import At
from colofunc.spec.parts import holds


class RankWires:
    """Collectives of one rank with its peers. flight: where they are done by a GPU."""

    def __init__(self, groups: Groups, flight: Flight | None = None) -> None:
        self.groups = groups
        self.flight = flight
        self.ranks: Sequence[int] = (groups.rank,)
        self._limits: tuple[Program, set[int]] | None = None
        self._ahead: Ahead | None = None  # of the loop in parts that is written, where receives are posted ahead

    def emit(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        if kind in COPIES:
            self._copy(writer, node, kind, asynchronous)
            return
        if kind in PEERS:
            self._peer(writer, node, kind)
            return
        out = only(node)
        name = writer.stem(out)
        writer.where[out] = (name,)
        if kind == "axis_index":
            place = self.groups.of(node.args[0]).place
            number = writer.bind(torch.tensor(place, device=writer.device), f"i{place}")
            writer.line(f"{name} = {number}")
            return
        source = writer.literal(node.args[0], 0)
        if kind == "wait":
            writer.line(f"{name} = {source}.wait()")
            return
        _, axes, _, *rest = node.args
        if kind == "take_shard":
            writer.line(f"{name} = {source}[{self.groups.of(axes).place}]")
        elif kind == "keep_first":
            zeros = rest[0] == "sum" and self.groups.of(axes).place != 0
            writer.line(f"{name} = {writer.bind(torch.zeros_like, 'zeros_like')}({source})" if zeros else f"{name} = {source}")
        else:
            limited = kind == "all_to_all" and rest
            start = _watched(kind, self.groups.start(kind, axes, *(() if limited else rest)), self.groups.rank)
            if self.flight is not None:
                start = _named(_text(writer.program, node, kind), start, self.flight)
            fn = writer.bind(_limited(start) if limited else start, f"{kind}_{'_'.join(a for a in axes if a.isidentifier())}")
            source += f", {count_of(writer, rest[0])}" if limited else ""
            writer.line(f"{name} = {fn}({source})" + ("" if asynchronous else ".wait()"))

    def _peer(self, writer: Writer, node: Node, kind: str) -> None:
        """This rank's half of a send: what it sends may be written over when the line has passed."""
        if kind == "receive":
            axes, _, source, shape, dtype = node.args
            receiver = self.groups.receiver(axes, source, shape, dtype, writer.device)
            if self._ahead is not None and writer.loops and writer.loops[-1][0].cut_by is not None:
                self._ahead.receives(writer.part, receiver, partial(_number, _own_tag(node), writer.loops[-1][0].trips))
            call = f"{writer.bind(receiver, 'receive')}({_tag(writer, node)})"
        else:
            ref, axes, _, _, targets = node.args
            call = f"{writer.bind(self.groups.sender(axes, targets), 'send')}({writer.where[ref.id][0]}, {_tag(writer, node)})"
        if node.results:
            out = only(node)
            writer.where[out] = (writer.stem(out),)
            writer.line(f"{writer.bind(ask, 'ask')}('send', {tuple(self.ranks)!r})")
            writer.line(f"{writer.stem(out)} = {call}")
        else:
            writer.line(f"{writer.bind(ask, 'ask')}('send', {tuple(self.ranks)!r})")
            writer.line(call)

    def here(self, at: At | None) -> tuple[bool, ...]:
        return (holds(at, self.groups.mesh, self.groups.rank),)

    def behind(self, writer: Writer, node: Node) -> None:
        """How many rows will travel is told to the host as soon as it is known, and read by the first exchange."""
        for o in node.outs:
            if o is not None and o in self._limits_in(writer.program):
                stem, count_rows = writer.stem(o), writer.bind(HostCount, "count_rows")
                writer.line(f"{stem}_count = {count_rows}({stem})")
                writer.extra[stem] = (*writer.extra.get(stem, ()), f"{stem}_count")

    def _limits_in(self, program: Program) -> set[int]:
        """Values that say how many rows travel. Asked for each node of one program after another: kept for one."""
        if self._limits is None or self._limits[0] is not program:
            exchanges = [n for n in program.nodes if n.target.startswith("colofunc.all_to_all") and len(n.args) > 3]
            self._limits = program, {n.args[3].id for n in exchanges if isinstance(n.args[3], Ref)}
        return self._limits[1]

    def in_order(self, actions: Sequence[tuple[int, int]], device: torch.device) -> Iterable[tuple[int, int]]:
        """NCCL runs what is given to it one after another: a receive that is posted early would keep back what is sent meanwhile."""
        order = Ahead(actions, self.groups)
        self._ahead = order if self.groups.carriers.get(device.type) == "gloo" else None
        return order

    def place(self, axes: Sequence[str], lane: int) -> int:
        return self.groups.mesh.index(self.groups.rank, axes)

    def _copy(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        start, device = writer.bind(writer.start, "copy_start"), writer.bind(writer.device, "device")
        operands = "".join(f"{writer.where[i][0]}, " for i in node.refs)
        pool = writer.pooled(node.outs[0]) if node.outs else ""
        call = f"{start}({kind!r}, ({operands}), {device}{', ' * bool(pool)}{pool})" + ("" if asynchronous else ".wait()")
        if not node.outs:
            writer.line(call)
            return
        out = only(node)
        writer.where[out] = (writer.stem(out),)
        writer.line(f"{writer.stem(out)} = {call}")


def _tag(writer: Writer, node: Node) -> str:
    """Which message of a pair it is, as an expression: in a loop its own number in each trip."""
    tag = _own_tag(node)
    if not tag or not writer.loops:
        return str(tag)
    loop, counter = writer.loops[-1]
    return f"{tag * loop.trips} + {counter}"


def _own_tag(node: Node) -> int:
    return int(dict(node.kwargs).get("tag", 0))


def _number(tag: int, trips: int, trip: int) -> int:
    """The number that `_tag` writes."""
    return tag * trips + trip if tag else 0


def count_of(writer: Writer, rows: Ref) -> str:
    """The variable with the number of rows that a value says; an input of the program is read where it is needed."""
    (name,) = writer.where[rows.id]
    told = f"{name}_count" in writer.extra.get(name, ())
    return f"{name}_count" if told else f"{writer.bind(HostCount, 'count_rows')}({name})"


def _watched(kind: str, start: Start, rank: int) -> Start:
    ranks = (rank,)

    def run(x: Any) -> Started:
        ask(kind.removesuffix("_flat"), ranks)
        return start(x)

    return run


def _named(name: str, start: Start, flight: Flight) -> Start:
    """The host has gone on when this collective waits: whoever looks then has its name."""

    def run(x: Any) -> Started:
        started = start(x)
        flight.started(name, started.works)
        return started

    return run


def _text(program: Program, node: Node, kind: str) -> str:
    """`all_gather of 0.weight over dp (in net.0 at train.py:12)`."""
    names = [program.values[i].name for i in (*node.refs, *node.results) if program.values[i].name]
    where = " at ".join(word for word in (node.path, node.line) if word)
    return f"{kind}{f' of {names[0]}' if names else ''} over {', '.join(node.args[1])}" + (f" (in {where})" if where else "")


class _Padded:
    """An all-to-all of the first rows in flight: what comes has zeros behind it."""

    def __init__(self, started: Started, like: torch.Tensor) -> None:
        self._started, self._like = started, like

    def wait(self) -> torch.Tensor:
        return with_zeros(self._started.wait(), self._like)


def _limited(start: Start) -> Callable[[torch.Tensor, HostCount], _Padded]:
    """An all-to-all of so many rows of each chunk as all members have agreed on."""
    return lambda x, count: _Padded(start(first_rows(x, count.value())), x)
