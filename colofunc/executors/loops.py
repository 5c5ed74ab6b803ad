"""Loops in generated source: the body is written once, indented, and what it gathers is gathered in place.

    for t1 in range(4):
        v8_in1 = v7[t1]                                        # take_shard over time
        v9_in1 = linear(v8_in1, v2)
        ...
        v20_all1 = v12_in1 if t1 == 0 else v20_all1.add_(v12_in1)
        del v12_in1

Nothing is unrolled, so source and compile time do not grow with the number of trips. The first trip's result becomes
the accumulator where it is memory of the body's own, so a sum costs no zeros and no copy. A product, or the gradient of
an embedding, that only the sum reads is added to it without being made first:

        v12_in1 = mm(v10_in1, v11_in1) if t1 == 0 else mm_added(v20_all1, v10_in1, v11_in1)
        v20_all1 = v12_in1

A body in parts is run by its timetable. What one part makes and another reads is kept by microbatch in between:

    kept1 = {}
    for p1, t1 in order:                                        # (0, 0), (0, 1), (3, 0), ...
        if p1 == 0:
            v9_in1 = linear(v8_in1, v2)
            kept1['v9_in1', t1] = v9_in1
            del v9_in1
        elif p1 == 3:
            v9_in1 = kept1.pop(('v9_in1', t1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from colofunc.errors import ProgramError
from colofunc.executors.kernels import in_its_memory
from colofunc.program.actions import linear_order
from colofunc.program.facts import COPIES, PEERS
from colofunc.program.ir import Loop, Node, Part, Timetable
from colofunc.program.passes.loop import gathered_at, last_uses, parts_that_read
from colofunc.program.passes.reuse import added_in_place, own_outputs_of_parts
from colofunc.program.places import SEND

if TYPE_CHECKING:
    from colofunc.executors.source import Writer

SENT = "sent "
"""In front of the names of values that were sent: they are kept until the receiver reads them."""
ABSENT = ""
"""In place of a variable: the value does not exist on this lane."""
_EXTREMES: dict[str, Callable[..., torch.Tensor]] = {"max": torch.maximum, "min": torch.minimum}


def write_loop(writer: Writer, node: Node, loop: Loop) -> None:
    """A Python loop over the trips; what its body gathers is gathered right behind the node that makes it."""
    writer.serial += 1
    counter = f"t{writer.serial}"
    totals = [f"v{out}_all{writer.serial}" for out in node.outs]
    last = last_uses(loop.body)
    in_parts = loop.cut_by is not None
    writer.line(_header(writer, loop, counter) if in_parts else f"for {counter} in range({loop.trips}):")
    gathering = _Gathering(writer, loop, counter, totals, [writer.pooled(out) for out in node.outs])
    with _in_body(writer, node, loop, counter):
        parts = _Parts(writer, loop, last, counter) if in_parts else None
        _write_body(writer, loop, last, gathering, parts)
    for position, out in enumerate(node.outs):
        if out is not None:
            writer.where[out] = gathering.where[position]


@contextmanager
def _in_body(writer: Writer, node: Node, loop: Loop, counter: str) -> Iterator[None]:
    """The writer writes the nodes of a body, whose values have ids of their own.

    Behind it those around the loop again.
    """
    outer = writer.program, writer.where, writer.passing, writer.added
    writer.loops.append((loop, counter))
    writer.choices.enter(node)
    writer.program, writer.added = loop.body, set()
    writer.where = {inner: writer.where[given] for inner, given in zip(loop.body.inputs, node.refs, strict=True)}
    if writer.passing is not None:
        writer.passing = writer.passing.inside.get(node.outs)
    yield
    writer.loops.pop()
    writer.choices.leave()
    writer.program, writer.where, writer.passing, writer.added = outer


def _write_body(
    writer: Writer, loop: Loop, last: Mapping[int, int], gathering: _Gathering, parts: _Parts | None
) -> None:
    """The lines of one trip. last: value -> the node of the body behind which it is freed."""
    body_inputs = set(loop.body.inputs)
    dying: dict[int, list[int]] = {}
    for id, end in last.items():
        if id not in body_inputs:
            dying.setdefault(end, []).append(id)
    ready = gathered_at(loop.body)
    # A tap that reads values is shown what one microbatch gives: nothing is added to the sum before that.
    shown = writer.tap is not None and writer.look is None
    added = {} if shown else added_in_place(loop)
    first = f"{gathering.counter} == 0"
    for position in ready.get(-1, ()):
        gathering.put(position, first)
    for index, node in enumerate(loop.body.nodes):
        if parts is not None:
            first = parts.begin(index)
        if index in added and not gathering.pools[added[index]]:
            writer.adds_to = gathering.totals[added[index]], first
        writer.node(node)
        writer.adds_to = None
        if writer.tap is not None:
            writer.tap(writer, index, node)
        for position in ready.get(index, ()):
            gathering.put(position, first)
        if writer.look is not None:
            writer.line(writer.look(writer))
        unread = [out for out in node.results if out not in last]
        writer.free(unread + dying.get(index, []))
        if parts is not None:
            parts.end(index)


def _header(writer: Writer, loop: Loop, counter: str) -> str:
    """The lines before the parts of a body: what is run for which microbatch, in an order that all lanes can follow."""
    assert loop.timetable is not None, "a body in parts"
    writer.line(f"kept{writer.serial} = {{}}")
    order = writer.wires.in_order(_order(loop.timetable), writer.device)
    return f"for p{writer.serial}, {counter} in {writer.bind(order, 'order')}:"


def _order(timetable: Timetable) -> list[tuple[int, int]]:
    """(number of a part, microbatch) one after another, as all lanes can follow."""
    number_of = {part: number for number, part in enumerate(timetable.parts)}
    rows = timetable.table.rows
    actions = rows[0] if len(rows) == 1 else [action for _, action in linear_order(timetable.table)]
    return [(number_of[action.stage, action.kind], action.microbatch) for action in actions]


class _Parts:
    """What is written around each part of a body: the condition, what is kept of it, and what it reads of what was
    kept.
    """

    def __init__(self, writer: Writer, loop: Loop, last: Mapping[int, int], counter: str) -> None:
        timetable = loop.timetable
        assert timetable is not None, "a body in parts"
        self.writer, self.body, self.last, self.counter = writer, loop.body, last, counter
        self.name, self.number = f"kept{writer.serial}", f"p{writer.serial}"
        self.ends = timetable.ends
        self.begins = {first: part for part, (first, end) in enumerate(timetable.spans()) if first < end}
        self.first_microbatches = self._first_microbatches(timetable)
        self.part_of: dict[int, int] = {}  # value of the body -> the part that makes it
        self.on_the_way: set[int] = set()
        for index, node in enumerate(self.body.nodes):
            self.part_of.update(dict.fromkeys(node.results, timetable.part_at(index)))
            if node.target == SEND:
                self.on_the_way.update(node.results)
        writer.on_the_way = self.on_the_way
        self.parts_that_read = parts_that_read(self.body, timetable)
        self.done_at = {action: at for at, action in enumerate(_order(timetable))}
        self.trips = loop.trips
        self.part = 0
        self.first = 0  # index of the part's first node
        # values of other parts that come to this one by a send, and are its own from now on
        self.received: list[int] = []
        self.loaded: list[int] = []  # other values of other parts that this one reads

    def _first_microbatches(self, timetable: Timetable) -> list[int]:
        """Of each part, the microbatch that it runs for first."""
        microbatches: dict[Part, int] = {}
        for row in timetable.table.rows:
            for action in row:
                microbatches.setdefault((action.stage, action.kind), action.microbatch)
        return [microbatches[part] for part in timetable.parts]

    def begin(self, index: int) -> str:
        """Write what comes before a node. Returns the condition under which its part runs for the first time."""
        if index in self.begins:
            self.first = index
            self.part = self.writer.part = self.begins[index]
            word = "if" if index == 0 else "elif"
            self.writer.line(f"{word} {self.number} == {self.part}:")
            self.writer.inset += 1
            self._load()
        return f"{self.counter} == {self.first_microbatches[self.part]}"

    def _load(self) -> None:
        """Lines that read what other parts have made."""
        read: dict[int, None] = {}
        for node in self.body.nodes[self.first : self.ends[self.part]]:
            read.update(dict.fromkeys(node.refs))
        others = [id for id in read if self.part_of.get(id, self.part) != self.part]
        self.received = [id for id in others if id in self.on_the_way]
        self.on_the_way.difference_update(self.received)
        self.loaded = [id for id in others if id not in self.received]
        for id in self.received:
            for name in self._names(id):
                self.writer.line(f"{name} = {self.name}.pop(({SENT + name!r}, {self.counter}))")
        for id in self.loaded:
            for name in self._names(id):
                self.writer.line(f"{name} = {self._taken(id, f'({name!r}, {self.counter})')}")

    def _taken(self, id: int, key: str) -> str:
        """The text that reads what was kept.

        Where this part is the last one of a microbatch that does, it is kept no longer.

        The last part of the body that reads it need not be: weight gradients of a stage may come before or behind what
        an earlier stage of the same rank does, for one microbatch and for another.
        """
        last_read_here = []  # microbatches
        for microbatch in range(self.trips):
            here = self.done_at[self.part, microbatch]
            if all(self.done_at[part, microbatch] <= here for part in self.parts_that_read[id]):
                last_read_here.append(microbatch)
        if len(last_read_here) == self.trips:
            return f"{self.name}.pop({key})"
        if not last_read_here:
            return f"{self.name}[{key}]"
        return f"{self.name}.pop({key}) if {self.counter} in {tuple(last_read_here)} else {self.name}[{key}]"

    def end(self, index: int) -> None:
        """Write what comes behind the last node of a part."""
        if index + 1 != self.ends[self.part]:
            return
        own = list(self.received)
        for node in self.body.nodes[self.first : index + 1]:
            own += node.results
        kept = [id for id in own if self.last.get(id, -1) > index]
        for id in kept:
            prefix = SENT if id in self.on_the_way else ""
            for name in self._names(id):
                self.writer.line(f"{self.name}[{prefix + name!r}, {self.counter}] = {name}")
        still_read = [id for id in self.loaded if self.last[id] > index]
        self.writer.free([*kept, *still_read])
        self.writer.inset -= 1

    def _names(self, id: int) -> list[str]:
        return [name for name in dict.fromkeys(self.writer.where[id]) if name != ABSENT]


class _Gathering:
    """What a loop gives, output by output, and the lines that gather it.

    totals: names of what is gathered. pools: where that is to lie, "" for memory of its own.
    """

    def __init__(self, writer: Writer, loop: Loop, counter: str, totals: Sequence[str], pools: Sequence[str]) -> None:
        self.writer, self.loop, self.counter = writer, loop, counter
        self.totals, self.pools = totals, pools
        self.where: dict[int, tuple[str, ...]] = {}  # position of an output -> its variable on each lane
        self._become_totals = own_outputs_of_parts(loop)

    def put(self, position: int, first: str) -> None:
        """Lines that put an output of the body to what the trips before have given.

        first: the condition under which there is nothing yet.
        """
        source = self.writer.where[self.loop.body.outputs[position]]
        total_of: dict[str, str] = {}
        for name in source:
            if name != ABSENT:
                total_of.setdefault(name, f"{self.totals[position]}_{len(total_of)}")
        for name, total in total_of.items():
            if self.loop.gathers[position] == "stack":
                self._stack(position, name, total, first)
            else:
                self._combine(position, name, total, first)
        self.where[position] = tuple(total_of.get(name, ABSENT) for name in source)

    def _stack(self, position: int, name: str, total: str, first: str) -> None:
        writer, pool = self.writer, self.pools[position]
        room = f"{pool}.stack" if pool else writer.bind(stack_of, "stack_of")
        writer.line(f"if {first}: {total} = {room}({name}, {self.loop.trips})")
        if self._on_host(position):
            writer.settle([name], [total])
        writer.line(f"{total}[{self.counter}] = {name}")

    def _combine(self, position: int, name: str, total: str, first: str) -> None:
        """Lines of a sum, or of a maximum or minimum."""
        writer, pool = self.writer, self.pools[position]
        value = self.loop.body.outputs[position]
        if pool:
            writer.line(f"if {first}: {total} = {pool}.stack({name}, 1)[0]")
        writer.settle([name] if self._on_host(position) else [], [total] if pool else [])
        if value in writer.added:
            writer.line(f"{total} = {name}")
            return
        if pool:
            begun = f"{total}.copy_({name})"
        elif position in self._become_totals and not writer.pooled(value):
            begun = name
        else:
            begun = f"{name}.clone()"
        how = self.loop.gathers[position]
        if how == "sum":
            more = f"{total}.add_({name})"
        else:
            more = f"{writer.bind(_EXTREMES[how], how)}({total}, {name}, out={total})"
        writer.line(f"{total} = {begun} if {first} else {more}")

    def _on_host(self, position: int) -> bool:
        body = self.loop.body
        return body.values[body.outputs[position]].tier != "device"


def write_in_loop(writer: Writer, node: Node, kind: str) -> bool:
    """Write a node about the axis of a loop around it; False if it is about another."""
    if kind in ("rearrange", "wait") or kind in COPIES or kind in PEERS:
        return False
    axes = tuple(node.args[0] if kind == "axis_index" else node.args[1])
    counter = next((name for loop, name in writer.loops if (loop.axis,) == axes), None)
    if counter is None:
        return False
    out = only(node)
    if kind == "axis_index":
        # Filled by a kernel, which takes the number along; a tensor of a number is a copy that the host waits for.
        full, device = writer.bind(torch.full, "full"), writer.bind(writer.device, "device")
        name = writer.stem(out)
        writer.where[out] = tuple(name if runs else ABSENT for runs in writer.runs)
        writer.line(f"{name} = {full}((), {counter}, device={device})")
        return True
    source = writer.where[node.refs[0]]
    for name, lane in writer.assign(out, source):
        if kind == "take_shard":
            writer.line(f"{name} = {source[lane]}[{counter}]")
        elif kind == "keep_first":
            own, zeros = writer.bind(in_its_memory, "in_its_memory"), writer.bind(torch.zeros_like, "zeros_like")
            writer.line(f"{name} = {own}({source[lane]}) if {counter} == 0 else {zeros}({source[lane]})")
        else:
            raise ProgramError(f"{node.target} over {axes[0]} stands in the loop over it")
    return True


def stack_of(x: torch.Tensor, n: int) -> torch.Tensor:
    """Room for `n` tensors like x."""
    return torch.empty((n, *x.shape), dtype=x.dtype, device=x.device)


def only(node: Node) -> int:
    """The single value that a node defines."""
    (out,) = node.outs
    if out is None:
        raise ProgramError(f"{node.target} defines no value")
    return out
