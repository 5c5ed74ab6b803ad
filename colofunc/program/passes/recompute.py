"""Recomputation: a program in which backward makes again what forward did not keep.

Problem: what backward reads is held from forward on, and that is most of the memory of a training step. Idea: the order
of work is all that has to be said. A node that stands in the order twice is run twice, and whoever reads its result
reads the last one; in between nothing holds it.

    order   f0 f1 f2 | b2 . f0' f1' b1 b0       f0 and f1 run again, and backward reads their second results

`Replay` follows such an order; `run` and `back` say it by stages. A value that is asked for and not there is made again
from what is there, so every order is right, and a bad one only slow. Random operators make the same numbers again
(their keys are counters), collectives stand in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs

from colofunc.ops.saved_activations import PACK
from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.places import SEND

AGAIN = "made again"


class Replay:
    """An order of work, found node by node; the program that does it is written at the end, if somebody wants it.

    Values keep their ids where they are made for the first time.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.there = set(program.inputs)
        self.order: list[int] = []  # positions of nodes; one that stands there again is run again
        self.sent: set[int] = set()
        for node in program.nodes:
            if node.target == SEND:
                self.sent.update(node.results)

    def run(self, index: int) -> None:
        """Run a node, and before it whatever made the operands that are not there."""
        if self.there.issuperset(self.program.nodes[index].refs):  # as nearly always
            self._run(index)
            return
        todo = [index]
        while todo:
            k = todo[-1]
            missing = [self.program.made_at[ref] for ref in self.program.nodes[k].refs if ref not in self.there]
            if missing:
                todo += dict.fromkeys(missing)
                continue
            todo.pop()
            if k == index or not self.there.issuperset(self.program.nodes[k].results):  # not on the way
                self._run(k)

    def want(self, ids: Iterable[int]) -> None:
        """Have these values there."""
        for id in ids:
            if id not in self.there:
                self.run(self.program.made_at[id])

    def drop(self, ids: Iterable[int]) -> None:
        """Nobody may read these any more as they are, but for what another stage has sent.

        That one would have to make it again and send it again, and a stage does not go back to a microbatch for another
        one's sake.
        """
        self.there.difference_update(ids if not self.sent else (id for id in ids if id not in self.sent))

    def _run(self, index: int) -> None:
        self.order.append(index)
        self.there.update(self.program.nodes[index].results)

    def steps(self) -> list[tuple[int, bool, bool]]:
        """(position of a node, whether it is run again, whether it is left out: made again for nobody) in order."""
        ran, found = set[int](), list[tuple[int, bool, bool]]()
        for index in self.order:
            found.append((index, index in ran, False))
            ran.add(index)
        read, nodes = set(self.program.outputs), self.program.nodes
        for k in range(len(found) - 1, -1, -1):
            index, again, _ = found[k]
            node = nodes[index]
            # what made something for it alone
            for_backward = again or node.note.startswith(AGAIN) or node.target == PACK
            if for_backward and read.isdisjoint(node.results):
                found[k] = index, again, True
                continue
            read.difference_update(node.results)
            read.update(node.refs)
        return found

    def seconds(self, seconds: Sequence[float]) -> float:
        """Of all that is done, where each node takes so many."""
        return sum(seconds[index] for index, _, left_out in self.steps() if not left_out)

    def finish(self) -> Program:
        """The program; what was made again for nobody is left out."""
        edit, nodes = Editor(self.program), list[Node]()
        names: dict[int, int] = {}  # value -> the id that its last making has, where that is another one
        for index, again, left_out in self.steps():
            node = self.program.nodes[index]
            changes: dict[str, Any] = {}
            if not names.keys().isdisjoint(node.refs):
                changes["args"], changes["kwargs"] = map_refs((node.args, node.kwargs), lambda i: Ref(names.get(i, i)))
            if again:
                fresh = {out: edit.new(self.program.values[out]) for out in node.results}
                names.update(fresh)
                changes["outs"] = tuple(None if out is None else fresh[out] for out in node.outs)
                changes["phase"], changes["note"] = "backward", f"{AGAIN}; {node.note}".rstrip("; ")
            if not left_out:
                nodes.append(attrs.evolve(node, **changes) if changes else node)
        return edit.written(nodes, [names.get(out, out) for out in self.program.outputs])
