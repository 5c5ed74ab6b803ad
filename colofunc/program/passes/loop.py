"""Bodies of loops: change them, and say when their outputs are ready and until when their values are needed.

A loop runs its body once per trip (`passes.fold` makes one of the nodes that depend on the microbatch). A body in parts
(`passes.cut`) runs part by part, as a timetable says, so each part is changed alone and nothing moves between parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import attrs

from colofunc.program.aliases import aliases
from colofunc.program.editor import Editor
from colofunc.program.facts import lifetimes, written
from colofunc.program.ir import Loop, Node, Program, Timetable, reading

Owned = Callable[[Loop], Sequence[Collection[int]]]
"""Of a loop in parts, the values from other parts that each part alone reads and may write over."""


def change_bodies(program: Program, change: Callable[..., Program], owned: Owned | None = None) -> Program:
    """`program` with the body of every loop changed. owned: `change` is told as well what a part may write over of what
    it is given.
    """
    if not any(node.loop for node in program.nodes):
        return program

    def at_every_depth(body: Program, *own: Collection[int]) -> Program:
        return change_bodies(change(body, *own), change, owned)

    edit = Editor(program)
    for index, node in enumerate(program.nodes):
        if node.loop is not None:
            edit.change(index, loop=changed(node.loop, at_every_depth, owned))
    return edit.done()


def changed(loop: Loop, change: Callable[..., Program], owned: Owned | None = None) -> Loop:
    """A loop with its body changed, part by part where it is cut (`passes.cut`): nothing moves between parts. owned:
    see `change_bodies`.
    """
    timetable = loop.cut_by
    if timetable is None:
        return attrs.evolve(loop, body=change(loop.body))
    body, nodes, ends = loop.body, list[Node](), list[int]()
    values, names = dict(body.values), dict[int, int]()
    own = owned(loop) if owned is not None else None
    last_uses = body.last_uses
    for number, (first, end) in enumerate(timetable.spans()):
        part_nodes = tuple(reading(node, names) for node in body.nodes[first:end])
        # Dicts in place of sets: they keep the order.
        made = dict.fromkeys(out for node in part_nodes for out in node.results)
        inputs = dict.fromkeys(ref for node in part_nodes for ref in node.refs if ref not in made)
        outputs = tuple(out for out in made if last_uses.get(out, -1) >= end)
        part = Program(tuple(inputs), part_nodes, outputs, values, stage=body.stage, kernels=body.kernels)
        if own is None:
            done = change(part)
        else:
            done = change(part, frozenset(names.get(id, id) for id in own[number]))
        names |= dict(zip(outputs, done.outputs, strict=True))
        values |= done.values
        nodes += done.nodes
        ends.append(len(nodes))
    edit = Editor(body)
    edit.values.update(values)
    body = edit.written(nodes, (names.get(out, out) for out in body.outputs), stage=done.stage)
    return attrs.evolve(loop, body=body, timetable=attrs.evolve(timetable, ends=tuple(ends)))


def gathered_at(body: Program) -> dict[int, list[int]]:
    """Index of a node of a body -> the outputs that are ready right behind it (-1: inputs, before any node)."""
    memory = aliases(body)
    groups = {memory.group(out) for out in body.outputs}
    ready: dict[int, int] = {}  # memory -> the last node that makes or writes a value in it
    for index, node in enumerate(body.nodes):
        for id in written(node):
            if memory.group(id) in groups:
                ready[memory.group(id)] = index
    at: dict[int, list[int]] = {}
    for place, id in enumerate(body.outputs):
        last = max(body.made_at.get(id, -1), ready.get(memory.group(id), -1))
        at.setdefault(last, []).append(place)
    return at


def last_uses(body: Program) -> dict[int, int]:
    """Value of a body -> index of the last node that needs it; see `lifetimes`.

    An output is needed until it is gathered, not until the end of the body.
    """
    last = dict(lifetimes(attrs.evolve(body, outputs=())))
    for index, places in gathered_at(body).items():
        for place in places:
            id = body.outputs[place]
            last[id] = max(last.get(id, 0), index)
    return last


def parts_that_read(body: Program, timetable: Timetable) -> dict[int, set[int]]:
    """Value of a body in parts -> numbers of the parts that read it."""
    found: dict[int, set[int]] = {}
    for index, node in enumerate(body.nodes):
        for ref in node.refs:
            found.setdefault(ref, set()).add(timetable.part_at(index))
    return found
