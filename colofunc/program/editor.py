"""Editor: a program while it is changed.

Problem: every pass needs new values, nodes in other places and readers that read something else, and each way of its
own to do so is one more place for a mistake. Idea: a pass says what becomes of which node; positions are those of the
program as it was.

    edit = Editor(program)
    wide = edit.new(program.values[x], dtype=torch.float64)
    edit.insert(index, Node("aten._to_copy.default", (Ref(x),), (("dtype", torch.float64),), (wide,)))
    edit.replace(index, attrs.evolve(node, args=(Ref(wide),)))
    edit.rename(y, z)                                  # whoever reads y reads z
    program = edit.done()

A pass that writes all nodes anew, in an order of its own (recomputation, copies between tiers), takes new values here
and hands its nodes to `written`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import attrs

from colofunc.program.ir import Node, Program, Ref, Value, made_in_order, map_refs


class Editor:
    """Changes of one program. `ids`: of new values, where several programs share them; none may be in use."""

    def __init__(self, program: Program, ids: Iterator[int] | None = None) -> None:
        self.program = program
        self.values: dict[int, Value] = dict(program.values)
        self._ids = count(program.next_id) if ids is None else ids
        self._before: dict[int, list[Node]] = {}
        self._instead: dict[int, tuple[Node, ...]] = {}
        self._renamed: dict[int, int] = {}

    def new(self, like: Value, **changes: Any) -> int:
        """The id of a new value, as `like` but for `changes`."""
        id = next(self._ids)
        self.values[id] = attrs.evolve(like, id=id, **changes)
        return id

    def insert(self, index: int, *nodes: Node) -> None:
        """Nodes in front of node `index`, behind what was inserted there before; the number of nodes means the end."""
        self._before.setdefault(index, []).extend(nodes)

    def replace(self, index: int, *nodes: Node) -> None:
        """Nodes in place of node `index`."""
        self._instead[index] = nodes

    def change(self, index: int, **changes: Any) -> None:
        """Node `index` with other fields."""
        self.replace(index, attrs.evolve(self.program.nodes[index], **changes))

    def change_body(self, index: int, body: Program) -> None:
        """The loop at node `index` with another body."""
        loop = self.program.nodes[index].loop
        assert loop is not None, "a loop"
        self.change(index, loop=attrs.evolve(loop, body=body))

    def drop(self, index: int) -> None:
        """Node `index` goes away; nobody may read its results any more."""
        self.replace(index)

    def rename(self, old: int, new: int) -> None:
        """Whoever reads `old` reads `new`, the outputs of the program too, and nodes that were inserted."""
        self._renamed[old] = new

    def name_of(self, id: int) -> int:
        """What is read now in place of a value."""
        while id in self._renamed:
            id = self._renamed[id]
        return id

    def with_names(self, node: Node) -> Node:
        """The node reading what is read now in place of its operands."""
        if self._renamed.keys().isdisjoint(node.refs):
            return node
        args, kwargs = map_refs((node.args, node.kwargs), lambda id: Ref(self.name_of(id)))
        return attrs.evolve(node, args=args, kwargs=kwargs)

    def done(self, **changes: Any) -> Program:
        """The changed program, other fields changed, too (see `written`).

        Raises ProgramError where a node reads what none before it has made.
        """
        nodes: list[Node] = []
        for index, node in enumerate(self.program.nodes):
            nodes += self._before.get(index, ())
            nodes += self._instead.get(index, (node,))
        nodes += self._before.get(len(self.program.nodes), ())
        return self.written(nodes, **changes)

    def written(
        self,
        nodes: Iterable[Node],
        outputs: Iterable[int] | None = None,
        inputs: Iterable[int] | None = None,
        **changes: Any,
    ) -> Program:
        """The program with these nodes in place of its own, with other outputs or inputs where some are given, and with
        those of its values that are left."""
        kept = tuple(nodes)
        if self._renamed:
            kept = tuple(self.with_names(node) for node in kept)
        outputs = tuple(self.name_of(id) for id in (self.program.outputs if outputs is None else outputs))
        inputs = self.program.inputs if inputs is None else tuple(inputs)
        there = made_in_order(inputs, kept, outputs)
        values = {id: value for id, value in self.values.items() if id in there}
        return attrs.evolve(self.program, inputs=inputs, nodes=kept, outputs=outputs, values=values, **changes)
