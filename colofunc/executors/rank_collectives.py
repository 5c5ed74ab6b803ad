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

from colofunc.executors.collective_starts import Start, Started
from colofunc.executors.faults import ask
from colofunc.executors.flight import Flight
from colofunc.executors.groups import ProcessGroups
from colofunc.executors.kernels import HostCount, first_rows, in_its_memory, with_zeros
from colofunc.executors.messages import Buffers, PostedActions
from colofunc.executors.source import Writer, only
from colofunc.program.facts import COPIES, PEERS, is_peer
from colofunc.program.ir import Node, Program, Ref
from colofunc.program.places import SEND
from colofunc.spec.layout import At
from colofunc.spec.parts import holds


class RankWires:
    """Collectives of one rank with its peers. flight: where they are done by a GPU."""

    def __init__(self, groups: ProcessGroups, flight: Flight | None = None) -> None:
        self.groups = groups
        self.flight = flight
        self.ranks: Sequence[int] = (groups.rank,)
        self._row_counts: tuple[Program, set[int]] | None = None
        self._ahead: PostedActions | None = None  # of the loop in parts that is written
        # of a program, positions of sends that nothing follows at once
        self._begins: tuple[Program, set[int]] | None = None

    def emit(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        if kind in COPIES:
            self._copy(writer, node, kind, asynchronous)
        elif kind in PEERS:
            self._peer(writer, node, kind)
        elif kind == "axis_index":
            place = self.groups.of(node.args[0]).place
            self._define(writer, node, writer.bind(torch.tensor(place, device=writer.device), f"i{place}"))
        elif kind == "wait":
            self._define(writer, node, f"{writer.literal(node.args[0], 0)}.wait()")
        elif kind == "take_shard":
            self._define(writer, node, f"{writer.literal(node.args[0], 0)}[{self.groups.of(node.args[1]).place}]")
        elif kind == "keep_first":
            self._keep_first(writer, node)
        else:
            self._collective(writer, node, kind, asynchronous)

    def _define(self, writer: Writer, node: Node, text: str) -> None:
        """A line that defines the result of a node."""
        out = only(node)
        name = writer.stem(out)
        writer.where[out] = (name,)
        writer.line(f"{name} = {text}")

    def _keep_first(self, writer: Writer, node: Node) -> None:
        """What all members hold, as a pending reduction: of a sum only the first keeps it, of a maximum all do."""
        ref, axes, _, how = node.args
        source = writer.literal(ref, 0)
        if how == "sum":
            is_first = self.groups.of(axes).place == 0
            made = (
                writer.bind(in_its_memory, "in_its_memory") if is_first else writer.bind(torch.zeros_like, "zeros_like")
            )
            source = f"{made}({source})"
        self._define(writer, node, source)

    def _collective(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        ref, axes, _, *options = node.args
        arguments = writer.literal(ref, 0)
        limited = kind == "all_to_all" and options  # to the first rows of each chunk: how many is data
        start = self.groups.start(kind, axes, *(() if limited else options))
        start = _watched(kind, start, self.groups.rank)
        if self.flight is not None:
            start = _named(_text(writer.program, node, kind), start, self.flight)
        names = "_".join(axis for axis in axes if axis.isidentifier())
        function = writer.bind(_limited(start) if limited else start, f"{kind}_{names}")
        if limited:
            arguments += f", {count_of(writer, options[0])}"
        call = f"{function}({arguments})"
        self._define(writer, node, call if asynchronous else f"{call}.wait()")

    def _peer(self, writer: Writer, node: Node, kind: str) -> None:
        """This rank's half of a send: what it sends may be written over when the line has passed."""
        own = own_tag(node)
        if kind == "receive":
            axes, _, source, shape, dtype = node.args
            ahead = self._ahead_of(writer)
            buffers = None if ahead is None else ahead.buffers
            receiver = self.groups.receiver(axes, source, shape, dtype, writer.device, buffers, own)
            if ahead is not None:  # it may be posted one action before the one that waits for it
                ahead.receives(writer.part, receiver, partial(_number, own, writer.loops[-1][0].trips))
            call = f"{writer.bind(receiver, 'receive')}({_tag(writer, node)})"
        else:
            ref, axes, _, _, targets = node.args
            send = writer.bind(self.groups.sender(axes, targets, own), "send")
            last = _is_last_reader(writer, node, ref.id)
            begin = "" if self._begins_at_once(writer, node) else ", begin=False"
            call = f"{send}({writer.where[ref.id][0]}, {_tag(writer, node)}, last={last}{begin})"
        writer.line(f"{writer.bind(ask, 'ask')}('send', {tuple(self.ranks)!r})")
        if node.results:
            self._define(writer, node, call)
        else:
            writer.line(call)

    def _ahead_of(self, writer: Writer) -> PostedActions | None:
        """What goes through the actions around the node that is written; None outside of a loop in parts."""
        in_parts = bool(writer.loops) and writer.loops[-1][0].cut_by is not None
        return self._ahead if in_parts else None

    def _begins_at_once(self, writer: Writer, node: Node) -> bool:
        """Whether a send begins what was added before it: no other message follows at once, and no end of an action,
        which begins it.
        """
        if writer.tap is not None or writer.look is not None:  # whoever looks may wait for others
            return True
        if self._begins is None or self._begins[0] is not writer.program:
            ends: Sequence[int] = ()
            if self._ahead_of(writer) is not None:
                timetable = writer.loops[-1][0].cut_by
                assert timetable is not None, "a loop in parts"
                ends = timetable.ends
            self._begins = writer.program, _sends_alone(writer.program, ends)
        return id(node) in self._begins[1]

    def here(self, at: At | None) -> tuple[bool, ...]:
        return (holds(at, self.groups.mesh, self.groups.rank),)

    def behind(self, writer: Writer, node: Node) -> None:
        """How many rows will travel is told to the host as soon as it is known, and read by the first exchange."""
        for out in node.results:
            if out in self._row_counts_in(writer.program):
                stem, count_rows = writer.stem(out), writer.bind(HostCount, "count_rows")
                writer.line(f"{stem}_count = {count_rows}({stem})")
                writer.extra[stem] = (*writer.extra.get(stem, ()), f"{stem}_count")

    def _row_counts_in(self, program: Program) -> set[int]:
        """Values that say how many rows travel. Asked for each node of one program after another: kept for one."""
        if self._row_counts is None or self._row_counts[0] is not program:
            values = set()
            for node in program.nodes:
                if (
                    node.target.startswith("colofunc.all_to_all")
                    and len(node.args) > 3
                    and isinstance(node.args[3], Ref)
                ):
                    values.add(node.args[3].id)
            self._row_counts = program, values
        return self._row_counts[1]

    def in_order(self, actions: Sequence[tuple[int, int]], device: torch.device) -> Iterable[tuple[int, int]]:
        self._ahead = PostedActions(actions, self.groups.batch, Buffers())
        return self._ahead

    def place(self, axes: Sequence[str], lane: int) -> int:
        return self.groups.mesh.index(self.groups.rank, axes)

    def _copy(self, writer: Writer, node: Node, kind: str, asynchronous: bool) -> None:
        start, device = writer.bind(writer.start, "copy_start"), writer.bind(writer.device, "device")
        operands = "".join(f"{writer.where[id][0]}, " for id in node.refs)
        pool = writer.pooled(node.outs[0]) if node.outs else ""
        into_pool = f", {pool}" if pool else ""
        call = f"{start}({kind!r}, ({operands}), {device}{into_pool})"
        if not asynchronous:
            call += ".wait()"
        if node.outs:
            self._define(writer, node, call)
        else:
            writer.line(call)


def _sends_alone(program: Program, ends: Sequence[int]) -> set[int]:
    """Sends, by `id`, behind which no other message follows at once. ends: of parts, at which somebody begins what is
    there.
    """
    alone = set()
    for position, node in enumerate(program.nodes):
        if node.target != SEND or position + 1 in ends:
            continue
        following = program.nodes[position + 1 : position + 2]
        if not any(is_peer(other) for other in following):
            alone.add(id(node))
    return alone


def _is_last_reader(writer: Writer, node: Node, id: int) -> bool:
    """Whether nobody reads or writes the memory of a value behind the node that sends it, so that it can be sent as it
    is.
    """
    if node.results or writer.look is not None or writer.calls_segments or writer.pooled(id):
        return False
    return writer.sharing.dies(node, id)


def _tag(writer: Writer, node: Node) -> str:
    """Which message of a pair it is, as an expression: in a loop its own number in each trip."""
    tag = own_tag(node)
    if not tag or not writer.loops:
        return str(tag)
    loop, counter = writer.loops[-1]
    return f"{tag * loop.trips} + {counter}"


def own_tag(node: Node) -> int:
    """Which message between two ranks it is; 0 where the program does not say."""
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
    """`start`, where a test may want this rank to fail."""
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
    names = [program.values[id].name for id in (*node.refs, *node.results)]
    name = next((name for name in names if name), "")
    of_what = f" of {name}" if name else ""
    where = " at ".join(word for word in (node.path, node.line) if word)
    in_what = f" (in {where})" if where else ""
    return f"{kind}{of_what} over {', '.join(node.args[1])}{in_what}"


class _Padded:
    """An all-to-all of the first rows in flight: what comes has zeros behind it."""

    def __init__(self, started: Started, like: torch.Tensor) -> None:
        self._started, self._like = started, like

    def wait(self) -> torch.Tensor:
        return with_zeros(self._started.wait(), self._like)


def _limited(start: Start) -> Callable[[torch.Tensor, HostCount], _Padded]:
    """An all-to-all of so many rows of each chunk as all members have agreed on."""

    def run(x: torch.Tensor, count: HostCount) -> _Padded:
        return _Padded(start(first_rows(x, count.value())), x)

    return run
