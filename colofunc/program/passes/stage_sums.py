"""Stage sums: what a stage tells the others is reduced among its own ranks first, where nobody may wait for the others.

Problem: with ZeRO or tensor parallelism each rank has the squares of its own parts, and it moves fewer bytes to send
these and to add up once behind the messages of all stages. But where the optimizer is validated later
(`post_validation`), whoever reads the messages may do so alone, and would wait in that collective for ranks that read
nothing. Idea: a sum of sums may be taken in any order.

    %1 «+dp @pp=0»  send  %2 «+dp»  sum  all_reduce dp        ->        %1  all_reduce dp @pp=0  send  sum

Only operators that a pending sum passes through lie between (`Rule`), so that what they make of sums is the sum of what
they make. In floating point numbers may differ in the last bit from those of a step that waits.
"""

from __future__ import annotations

import attrs

from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.places import SEND
from colofunc.program.post_validation import behind_schedule, validates_late

ALL_REDUCE = "colofunc.all_reduce"
KEEP_FIRST = "colofunc.keep_first"


def sums_within_stages(program: Program) -> Program:
    """`program` (functional, local) with no sum behind a message where its optimizer is validated later.

    One that cannot be taken before the messages stays where it is, and the plan is refused for it.
    """
    if not validates_late(program):
        return program
    found: Program | None = program
    while found is not None:
        program = found
        found = _with_one_less(program)
    return program


def _with_one_less(program: Program) -> Program | None:
    """The program with one reduction in front of its messages.

    None where there is none behind them that can be taken there.
    """
    start = behind_schedule(program)
    told: set[int] = (
        set()
    )  # what follows from messages: from scalars, while a tied weight's gradient is waited for in any case
    for node in program.nodes[start:]:
        if _is_message(node, program) or not told.isdisjoint(node.refs):
            told.update(node.results)
        if node.target == ALL_REDUCE and node.refs[0] in told:
            found = _Region(program, start, told, node).found()
            if found is not None:
                return found
    return None


def _is_message(node: Node, program: Program) -> bool:
    return node.target == SEND and program.values[node.refs[0]].shape == ()


class _Region:
    """What lies between the messages, or values of before, and one reduction."""

    def __init__(self, program: Program, start: int, told: set[int], reduction: Node) -> None:
        _, self.axes, _, self.how = reduction.args
        self.program, self.start, self.told, self.reduction = program, start, told, reduction
        self.edit = Editor(program)
        self.inside: set[int] = set()  # pending values that follow from messages
        self.sources: set[int] = set()  # pending values of before that are read inside

    def found(self) -> Program | None:
        """The program with the reduction in front of the messages; None where others read what lies between."""
        if not self._all_pending(self.reduction.refs[0]):
            return None
        readers = {index for id in self.inside for index in self.program.readers.get(id, ())}
        within = {self.program.made_at[id] for id in self.inside}
        last = self.program.made_at[self.reduction.results[0]]
        if not readers <= {*within, last} or not self.inside.isdisjoint(self.program.outputs):
            return None
        reduced = {id: self._reduced(id) for id in sorted(self.sources)}
        for id in self.inside:
            value = self.edit.values[id]
            assert value.layout is not None, "it is pending"
            self.edit.values[id] = attrs.evolve(value, layout=value.layout.with_pending(self._others(id)))
        for index in sorted(within):
            self._read_reduced(index, reduced)
        self.edit.drop(last)
        self.edit.rename(self.reduction.results[0], self.reduction.refs[0])
        return self.edit.done()

    def _all_pending(self, result: int) -> bool:
        """Find what the reduced value is computed of; whether its layouts say of all of it what is pending."""
        waiting = [result]
        while waiting:
            id = waiting.pop()
            if id in self.inside or id in self.sources:
                continue
            if not self._is_pending(id):
                return False
            if id not in self.told:
                self.sources.add(id)
                continue
            self.inside.add(id)
            node = self.program.makers[id]
            if node.loop is not None:
                return False
            if node.target == SEND:
                self.sources.update(node.refs)
                continue
            pending = [ref for ref in node.refs if self._is_pending(ref)]
            if not pending and (node.target != KEEP_FIRST or node.args[1] != self.axes):
                return False
            waiting += pending
        return all(self._is_pending(id) for id in self.sources)

    def _is_pending(self, id: int) -> bool:
        layout = self.program.values[id].layout
        return layout is not None and {(axis, self.how) for axis in self.axes} <= set(layout.pending)

    def _others(self, id: int) -> tuple[tuple[str, str], ...]:
        """What stays pending."""
        layout = self.program.values[id].layout
        assert layout is not None, "it is pending"
        return tuple((axis, how) for axis, how in layout.pending if axis not in self.axes)

    def _reduced(self, id: int) -> int:
        """A value of before, reduced among the ranks that have it."""
        value = self.program.values[id]
        assert value.layout is not None, "it is pending"
        out = self.edit.new(value, layout=value.layout.with_pending(self._others(id)))
        args = Ref(id), *self.reduction.args[1:]
        node = attrs.evolve(self.reduction, args=args, outs=(out,), on=value.layout.at, note="before others are told")
        self.edit.insert(max(self.start, self.program.made_at[id] + 1), node)
        return out

    def _read_reduced(self, index: int, reduced: dict[int, int]) -> None:
        node = self.program.nodes[index]
        if node.target == KEEP_FIRST:  # it made of a value that all have one that is pending
            self.edit.drop(index)
            self.edit.rename(node.results[0], node.refs[0])
            return
        args, kwargs = map_refs((node.args, node.kwargs), lambda id: Ref(reduced.get(id, id)))
        self.edit.change(index, args=args, kwargs=kwargs)
