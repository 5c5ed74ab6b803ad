"""Recomputation: a program in which backward makes again what forward did not keep.

Problem: what backward reads is held from forward on, and that is most of the memory of a training step. Idea: the order
of work is all that has to be said. A node that stands in the order twice is run twice, and whoever reads its result reads
the last one; in between nothing holds it.

    order   f0 f1 f2 | b2 . f0' f1' b1 b0       f0 and f1 run again, and backward reads their second results

`Replay` follows such an order; `run` and `back` say it by stages. A value that is asked for and not there is made again
from what is there, so every order is right, and a bad one only slow. Random operators make the same numbers again
(their keys are counters), collectives stand in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import attrs

from colofunc.program.editor import Editor
from colofunc.program.ir import Node, Program, Ref, map_refs
from colofunc.program.places import SEND

AGAIN = "made again"


class Replay:
    """A program being written down in another order. Values keep their ids where they are made for the first time."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.edit = Editor(program)
        self.there = {i: i for i in program.inputs}  # value -> the id that its last making has
        self.renamed: set[int] = set()  # values for which that is another one
        self.nodes: list[Node] = []
        self.ran: set[int] = set()
        self.sent = {out for node in program.nodes if node.target == SEND for out in node.results}

    def run(self, index: int) -> None:
        """Run a node, and before it whatever made the operands that are not there."""
        if all(map(self.there.__contains__, self.program.nodes[index].refs)):  # as nearly always
            self._write(index)
            return
        todo = [index]
        while todo:
            k = todo[-1]
            missing = [self.program.made_at[r] for r in self.program.nodes[k].refs if r not in self.there]
            if missing:
                todo += dict.fromkeys(missing)
                continue
            todo.pop()
            if k == index or any(o is not None and o not in self.there for o in self.program.nodes[k].outs):  # not on the way
                self._write(k)

    def want(self, ids: Iterable[int]) -> None:
        """Have these values there."""
        for id in ids:
            if id not in self.there:
                self.run(self.program.made_at[id])

    def drop(self, ids: Iterable[int]) -> None:
        """Nobody may read these any more as they are, but for what another stage has sent.

        That one would have to make it again and send it again, and a stage does not go back to a microbatch for another one's sake.
        """
        for id in ids:
            if id not in self.sent:
                self.there.pop(id, None)

    def _write(self, index: int) -> None:
        node = self.program.nodes[index]
        changes: dict[str, Any] = {}
        if not self.renamed.isdisjoint(node.refs):
            changes["args"], changes["kwargs"] = map_refs((node.args, node.kwargs), lambda i: Ref(self.there[i]))
        if index in self.ran:
            fresh = {o: self.edit.new(self.program.values[o]) for o in node.results}
            self.there.update(fresh)
            self.renamed.update(fresh)
            changes["outs"] = tuple(None if o is None else fresh[o] for o in node.outs)
            changes["phase"], changes["note"] = "backward", f"{AGAIN}; {node.note}".rstrip("; ")
        else:
            self.ran.add(index)
            self.there.update(zip(node.results, node.results))
        self.nodes.append(attrs.evolve(node, **changes) if changes else node)

    def finish(self) -> Program:
        """The program; what was made again for nobody is left out."""
        outputs = [self.there[out] for out in self.program.outputs]
        return self.edit.written(_without_dead(self.nodes, outputs), outputs)


def _without_dead(nodes: Sequence[Node], outputs: Iterable[int]) -> list[Node]:
    """`nodes` without those that were made again and whose results nobody reads."""
    read, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if node.note.startswith(AGAIN) and read.isdisjoint(node.results):
            continue
        read.update(node.refs)
        kept.append(node)
    kept.reverse()
    return kept


def made_again(program: Program) -> Collection[int]:
    """Indices of the nodes that run a second time."""
    return [k for k, node in enumerate(program.nodes) if node.note.startswith(AGAIN)]
