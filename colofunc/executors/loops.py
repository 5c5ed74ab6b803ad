"""Loops in generated source: the body is written once, indented, and what it gathers is gathered in place.

    for t1 in range(4):
        v8_in1 = v7[t1]                                        # take_shard over time
        v9_in1 = linear(v8_in1, v2)
        ...
        v20_all1 = v12_in1 if t1 == 0 else v20_all1.add_(v12_in1)
        del v12_in1

Nothing is unrolled, so source and compile time do not grow with the number of trips. The first trip's result becomes the
accumulator where it is memory of the body's own, so a sum costs no zeros and no copy. A product, or the gradient of an
embedding, that only the sum reads is added to it without being made first:

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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from colofunc.errors import ProgramError
from colofunc.program.actions import linear_order
from colofunc.program.facts import COPIES, PEERS
from colofunc.program.ir import Loop, Node, Part, Timetable
from colofunc.program.passes.loop import gathered_at, last_uses, parts_that_read
from colofunc.program.passes.reuse import added_in_place, own_outputs_of_parts
from colofunc.program.places import SEND

if TYPE_CHECKING:
    from colofunc.executors.source import Writer

SENT = "sent "
"""In front of the names of values that are kept until who they were sent to reads them."""
ABSENT = ""
"""In place of a variable: the value does not exist on this lane."""
_EXTREMES: dict[str, Callable[..., torch.Tensor]] = {"max": torch.maximum, "min": torch.minimum}


def write_loop(writer: Writer, node: Node, loop: Loop) -> None:
    """A Python loop over the trips; what its body gathers is gathered right behind the node that makes it."""
    writer.serial += 1
    counter, program, where = f"t{writer.serial}", writer.program, writer.where
    results = [f"v{o}_all{writer.serial}" for o in node.outs]
    at, last, owned = gathered_at(loop.body), last_uses(loop.body), own_outputs_of_parts(loop)
    dying: dict[int, list[int]] = {}
    for id, end in last.items():
        if id not in loop.body.inputs:
            dying.setdefault(end, []).append(id)
    cut = loop.cut_by is not None
    writer.line(_header(writer, loop, counter) if cut else f"for {counter} in range({loop.trips}):")
    writer.loops.append((loop, counter))
    outer_added, writer.added = writer.added, set()
    writer.choices.enter(node)
    outer = writer.passing
    pools = [writer.pooled(o) for o in node.outs]
    writer.program, writer.passing = loop.body, None if outer is None else outer.inside.get(node.outs)
    writer.where = {into: where[i] for into, i in zip(loop.body.inputs, node.refs, strict=True)}
    gather = partial(_gather, writer, loop, results=results, owned=owned, pools=pools)
    shown = writer.tap is not None and writer.look is None  # a tap that reads values is shown what one microbatch gives
    added = {} if shown else added_in_place(loop)
    gathered = {k: gather(k, f"{counter} == 0") for k in at.get(-1, ())}
    parts = _Kept(writer, loop, last, counter) if cut else None
    for index, inner in enumerate(loop.body.nodes):
        first = f"{counter} == 0" if parts is None else parts.begin(index)
        if index in added and not pools[added[index]]:
            writer.adds_to = results[added[index]], first
        writer.node(inner)
        writer.adds_to = None
        if writer.tap is not None:
            writer.tap(writer, index, inner)
        gathered |= {k: gather(k, first) for k in at.get(index, ())}
        if writer.look is not None:
            writer.line(writer.look(writer))
        writer.free([o for o in inner.results if o not in last] + dying.get(index, []))
        if parts is not None:
            parts.end(index)
    writer.loops.pop()
    writer.choices.leave()
    writer.program, writer.where, writer.passing, writer.added = program, where, outer, outer_added
    where.update({o: gathered[k] for k, o in enumerate(node.outs) if o is not None})


def _header(writer: Writer, loop: Loop, counter: str) -> str:
    """The lines before the parts of a body that is cut: what is run for which microbatch, in an order that all lanes can follow."""
    assert loop.timetable is not None, "a body in parts"
    writer.line(f"kept{writer.serial} = {{}}")
    order = writer.wires.in_order(_order(loop.timetable), writer.device)
    return f"for p{writer.serial}, {counter} in {writer.bind(order, 'order')}:"


def _order(timetable: Timetable) -> list[tuple[int, int]]:
    """(number of a part, microbatch) one after another, as all lanes can follow."""
    numbers = {part: k for k, part in enumerate(timetable.parts)}
    rows = timetable.table.rows
    actions = rows[0] if len(rows) == 1 else tuple(action for _, action in linear_order(timetable.table))
    return [(numbers[action.stage, action.kind], action.microbatch) for action in actions]


class _Kept:
    """What is written around each part of a body: the condition, what is kept of it, and what it reads of what was kept."""

    def __init__(self, writer: Writer, loop: Loop, last: Mapping[int, int], counter: str) -> None:
        timetable = loop.timetable
        assert timetable is not None, "a body in parts"
        self.writer, self.body, self.last, self.counter = writer, loop.body, last, counter
        self.name, self.number = f"kept{writer.serial}", f"p{writer.serial}"
        self.ends = timetable.ends
        self.begins = {first: k for k, (first, end) in enumerate(timetable.spans()) if first < end}
        self.firsts = self._first_microbatches(timetable)
        self.part_of = {out: timetable.part_at(k) for k, node in enumerate(self.body.nodes) for out in node.results}
        self.parts_that_read = parts_that_read(self.body, timetable)
        self.done_at = {action: at for at, action in enumerate(_order(timetable))}
        self.trips = loop.trips
        self.on_the_way = writer.on_the_way = {out for node in self.body.nodes if node.target == SEND for out in node.results}
        self.part = 0
        self.mine: list[int] = []  # values of other parts that come to this one by a send, and are its own from now on
        self.loaded: list[int] = []

    def _first_microbatches(self, timetable: Timetable) -> list[int]:
        """Of each part, the microbatch that it runs for first."""
        found: dict[Part, int] = {}
        for row in timetable.table.rows:
            for action in row:
                found.setdefault((action.stage, action.kind), action.microbatch)
        return [found[part] for part in timetable.parts]

    def begin(self, index: int) -> str:
        """Write what comes before a node. Gives the condition under which its part runs for the first time."""
        if index in self.begins:
            self.part = self.writer.part = self.begins[index]
            self.writer.line(f"{'el' * (index > 0)}if {self.number} == {self.part}:")
            self.writer.inset += 1
            self._load(index, self.ends[self.part])
        return f"{self.counter} == {self.firsts[self.part]}"

    def _load(self, first: int, end: int) -> None:
        read = dict.fromkeys(ref for node in self.body.nodes[first:end] for ref in node.refs)
        others = [id for id in read if self.part_of.get(id, self.part) != self.part]
        self.mine = [id for id in others if id in self.on_the_way]
        self.on_the_way.difference_update(self.mine)
        self.loaded = [id for id in others if id not in self.mine]
        for id in self.mine:
            for name in self._names(id):
                self.writer.line(f"{name} = {self.name}.pop(({SENT + name!r}, {self.counter}))")
        for id in self.loaded:
            for name in self._names(id):
                self.writer.line(f"{name} = {self._taken(id, f'({name!r}, {self.counter})')}")

    def _taken(self, id: int, key: str) -> str:
        """The text that reads what was kept; where this part is the last one of a microbatch that does, it is kept no longer.

        The last part of the body that reads it need not be: weight gradients of a stage may come before or behind what an earlier
        stage of the same rank does, for one microbatch and for another.
        """
        ends = []
        for t in range(self.trips):
            if all(self.done_at[part, t] <= self.done_at[self.part, t] for part in self.parts_that_read[id]):
                ends.append(t)
        if len(ends) == self.trips:
            return f"{self.name}.pop({key})"
        if not ends:
            return f"{self.name}[{key}]"
        return f"{self.name}.pop({key}) if {self.counter} in {tuple(ends)} else {self.name}[{key}]"

    def end(self, index: int) -> None:
        """Write what comes behind the last node of a part."""
        if index + 1 != self.ends[self.part]:
            return
        first = min(at for at, part in self.begins.items() if part == self.part)
        made = [*self.mine, *(out for node in self.body.nodes[first : index + 1] for out in node.results)]
        kept = [id for id in made if self.last.get(id, -1) > index]
        for id in kept:
            prefix = SENT if id in self.on_the_way else ""
            for name in self._names(id):
                self.writer.line(f"{self.name}[{prefix + name!r}, {self.counter}] = {name}")
        self.writer.free([*kept, *(id for id in self.loaded if self.last[id] > index)])
        self.writer.inset -= 1

    def _names(self, id: int) -> list[str]:
        return [name for name in dict.fromkeys(self.writer.where[id]) if name != ABSENT]


def _gather(
    writer: Writer, loop: Loop, k: int, first: str, results: Sequence[str], owned: set[int], pools: Sequence[str]
) -> tuple[str, ...]:
    """Lines that put output k of the body to what the trips before have given; its variables per lane.

    first: the condition under which there is nothing yet. pools: where outputs are to lie.
    """
    stem, pool = results[k], pools[k]
    how, counter, source = loop.gathers[k], writer.loops[-1][1], writer.where[loop.body.outputs[k]]
    classes = {name: f"{stem}_{c}" for c, name in enumerate(dict.fromkeys(name for name in source if name != ABSENT))}
    mine = k in owned and not pool and not writer.pooled(loop.body.outputs[k])
    host = loop.body.values[loop.body.outputs[k]].tier != "device"
    for name, total in classes.items():
        room = f"{pool}.stack" if pool else writer.bind(stack_of, "stack_of")
        if how == "stack":
            writer.line(f"if {first}: {total} = {room}({name}, {loop.trips})")
            writer.settle([name] if host else [], [total] if host else [])
            writer.line(f"{total}[{counter}] = {name}")
            continue
        if pool:
            writer.line(f"if {first}: {total} = {room}({name}, 1)[0]")
        writer.settle([name] if host else [], [total] if pool else [])
        if loop.body.outputs[k] in writer.added:
            writer.line(f"{total} = {name}")
            continue
        if mine:
            begun = name
        else:
            begun = f"{total}.copy_({name})" if pool else f"{name}.clone()"
        more = f"{total}.add_({name})" if how == "sum" else f"{writer.bind(_EXTREMES[how], how)}({total}, {name}, out={total})"
        writer.line(f"{total} = {begun} if {first} else {more}")
    return tuple(classes.get(name, ABSENT) for name in source)


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
        writer.where[out] = tuple(writer.stem(out) if runs else ABSENT for runs in writer.runs)
        writer.line(f"{writer.stem(out)} = {full}((), {counter}, device={device})")
        return True
    source = writer.where[node.refs[0]]
    for name, lane in writer.assign(out, source):
        if kind == "take_shard":
            writer.line(f"{name} = {source[lane]}[{counter}]")
        elif kind == "keep_first":
            zeros = writer.bind(torch.zeros_like, "zeros_like")
            writer.line(f"{name} = {source[lane]} if {counter} == 0 else {zeros}({source[lane]})")
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
