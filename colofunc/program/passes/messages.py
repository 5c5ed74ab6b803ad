"""Messages: scalars that one stage sends to the same ranks go in one message, with exactly the same numbers.

Problem: a joint norm is made of one square per parameter, and each is a message of its own to every other stage, which
takes a latency whatever its size. Idea: those of one stage wait for the last of them and travel as one vector.

    send(s0) send(s1) send(s2)        ->        stack(s0, s1, s2)  send  select select select

Inside of loops nothing waits: there a message is what the next stage works on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, Value
from colofunc.program.places import SEND
from colofunc.spec.layout import At


def scalars_in_one_message(program: Program) -> Program:
    """`program` (functional, local) with one message for the scalars that a stage sends to the same ranks.

    A scalar that is read before the next one is sent goes with those before it.
    """
    edit = Editor(program)
    for members in _groups(program):
        for index in members:
            edit.drop(index)
        edit.replace(members[-1], *_together([program.nodes[index] for index in members], edit))
    return edit.done()


def _groups(program: Program) -> list[list[int]]:
    """Positions of the messages that become one, of two at least."""
    groups: list[list[int]] = []
    open_groups: dict[Any, list[int]] = {}
    waits: dict[int, Any] = {}  # what arrives -> the group that it comes with
    for index, node in enumerate(program.nodes):
        for ref in node.refs:
            if ref in waits:  # somebody reads it: what comes behind does not go along
                open_groups.pop(waits[ref], None)
        if node.target != SEND or not node.results or program.values[node.refs[0]].shape != ():
            continue
        value = program.values[node.refs[0]]
        key = (node.args[1:], node.on, value.dtype, value.tier)
        if key not in open_groups:
            open_groups[key] = []
            groups.append(open_groups[key])
        open_groups[key].append(index)
        waits.update(dict.fromkeys(node.results, key))
    return [members for members in groups if len(members) > 1]


def _together(members: Sequence[Node], edit: Editor) -> list[Node]:
    """The nodes that define what the members defined."""
    head = members[0]
    _, (axis,), n, source, targets = head.args
    sender: At = axis, (source,)
    receivers: At | None = None if len(targets) == n else (axis, tuple(targets))
    like = edit.values[head.refs[0]]
    vector = Value(0, (len(members),), like.dtype, role=like.role, place=like.tier)
    note = f"{len(members)} scalars in one message"
    whole, moved = edit.new(vector), edit.new(vector)
    operands = tuple(Ref(node.refs[0]) for node in members)
    nodes = [
        attrs.evolve(
            head, target="aten.stack.default", args=(operands,), kwargs=(), outs=(whole,), note=note, on=sender
        ),
        attrs.evolve(head, args=(Ref(whole), *head.args[1:]), outs=(moved,), note=note),
    ]
    for place, node in enumerate(members):
        nodes.append(
            attrs.evolve(
                node, target="aten.select.int", args=(Ref(moved), 0, place), kwargs=(), note=note, on=receivers
            )
        )
    return nodes
