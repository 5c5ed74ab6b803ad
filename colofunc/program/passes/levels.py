"""Levels: which node of a program over a time axis runs in which loop.

Note [Loop levels]. What a loop accumulates is known only behind it, so a microbatch's node that needs it runs in a later
loop: the number of labels of the batch, which every microbatch's loss is divided by, is one. The level of a value is
the number of accumulations that have to end one after another before it is known. Accumulations run in the *latest*
loop that is early enough for who reads them, so most steps have one loop that does the work and, before it, one that
counts labels. What two loops need is computed in both: labels and masks cost nothing. Where that would compute a matrix
product twice, an operator mixes the samples of the batch, and the step cannot be split without computing its forward
again: that is an error that names the operator, or an estimate.
"""

from __future__ import annotations

from collections.abc import Iterable

from colofunc.ops.quantized import DEQUANTIZE
from colofunc.program.facts import is_product, is_wire, kind_of
from colofunc.program.ir import Node, Program
from colofunc.program.passes.packed_reads import goes_on
from colofunc.program.passes.time import reduces_over_time

LARGE_BYTES = 1 << 12  # what is made in each trip rather than held all the time
# Roles of inputs that a microbatch's own values may be computed from twice, whatever that costs.
_BATCH = frozenset({"batch", "constant", "seed"})


def kind(node: Node) -> str:
    """The kind of a node that executors emit themselves (`facts.kind_of`); "" of others."""
    found = kind_of(node)
    return "" if found is None else found[0]


def is_over(node: Node, axis: str) -> bool:
    """Whether a node is about the time axis."""
    which = kind(node)
    if which == "axis_index":
        return tuple(node.args[0]) == (axis,)
    return which not in ("", "rearrange", "wait", "loop") and tuple(node.args[1]) == (axis,)


class Levels:
    """Which node runs in which loop; see Note [Loop levels]."""

    def __init__(self, program: Program, axis: str, lean: bool = False) -> None:
        self.program = program
        self.axis = axis
        self.varies: set[int] = set()
        self.level: dict[int, int] = {}
        self._dear: set[int] = set()  # values of a microbatch that are not to be computed twice
        self._of_batch: set[int] = {id for id in program.inputs if program.values[id].role in _BATCH}
        self.reductions: list[int] = []
        for index, node in enumerate(program.nodes):
            self._see(index, node, axis)
        self._take_in(lean)
        levels = [self.level[id] for position in self.reductions for id in program.nodes[position].results]
        self.last = max(levels, default=0) - 1
        self.loop_of: dict[int, int] = {}  # index of a reduction -> its loop
        self.loops: dict[int, set[int]] = {}  # index of another varying node -> the loops that compute it
        self.alive: set[int] = set()  # indices of nodes that run outside
        self._due()

    def _see(self, index: int, node: Node, axis: str) -> None:
        outs = node.results
        level = max((self.level.get(ref, 0) for ref in node.refs), default=0)
        if self._of_batch.issuperset(node.refs):
            self._of_batch.update(outs)
        if reduces_over_time(node, axis):
            self.reductions.append(index)
            self.level.update(dict.fromkeys(outs, level + 1))
            return
        self.level.update(dict.fromkeys(outs, level))
        if self.varies.isdisjoint(node.refs) and not is_over(node, axis):
            return
        self.varies.update(outs)
        itself_dear = (is_product(node.target) or is_wire(node)) and not self._of_batch.issuperset(outs)
        if itself_dear or not self._dear.isdisjoint(node.refs):
            self._dear.update(outs)

    def _take_in(self, lean: bool) -> None:
        """Large tensors that are made from nothing, and read by microbatches only, are made in each trip.

        So are quantized weights widened, of which all would lie beside the loop otherwise, and what only turns or casts
        them.

        lean: so is what is moved over the mesh, from a shard that is there anyway.
        """
        reducing, outside = set(self.reductions), set(self.program.outputs)
        widened = _widened(self.program)
        for index in range(len(self.program.nodes) - 1, -1, -1):
            node = self.program.nodes[index]
            outs = node.results
            if index in reducing:
                outside.update(node.refs)
            elif self.varies.isdisjoint(outs):
                taken_in = not widened.isdisjoint(outs) or self._is_large(node) or (lean and self._is_moved(node))
                if outs and taken_in and outside.isdisjoint(outs):
                    self.varies.update(outs)
                else:
                    outside.update(node.refs)

    def _is_large(self, node: Node) -> bool:
        """Whether a node makes a large tensor from nothing."""
        if node.refs or kind(node):
            return False
        return sum(self.program.values[out].nbytes for out in node.results) > LARGE_BYTES

    def _is_moved(self, node: Node) -> bool:
        """Whether a node moves what is no part of the batch, and is there before any loop, over the mesh."""
        if kind(node) in ("", "axis_index", "loop") or self._of_batch.issuperset(node.refs):
            return False
        return not any(self.level.get(ref, 0) for ref in node.refs)

    def _due(self) -> None:
        """From the outputs back: when each value is needed, and so where each node runs."""
        never = self.last + 1
        due: dict[int, int] = dict.fromkeys(self.program.outputs, never)  # value -> the first loop that reads it
        uses: dict[int, set[int]] = {}  # value of a microbatch -> the loops that read it
        reducing = set(self.reductions)

        def need(ids: Iterable[int], loops: set[int]) -> None:
            for id in ids:
                if id in self.varies:
                    uses.setdefault(id, set()).update(loops)
                else:
                    due[id] = min(due.get(id, never), min(loops))

        for index in range(len(self.program.nodes) - 1, -1, -1):
            node = self.program.nodes[index]
            outs = node.results
            if index in reducing:
                if outs[0] in due:
                    self.loop_of[index] = min(self.last, due[outs[0]] - 1)
                    need(node.refs, {self.loop_of[index]})
            elif not self.varies.isdisjoint(outs):
                loops = {loop for out in outs for loop in uses.get(out, ())}
                if loops:
                    self.loops[index] = loops
                    need(node.refs, loops)
            elif not outs or not due.keys().isdisjoint(outs):  # without results: it has an effect
                self.alive.add(index)
                need(node.refs, {min((due[out] for out in outs if out in due), default=never)})

    def mixers(self) -> list[int]:
        """Reductions that have to end before a later loop computes again what they were computed from."""
        follows: set[int] = set()  # what is computed twice and not to be, and what is computed of that
        for index, loops in self.loops.items():
            if len(loops) > 1:
                follows.update(self._dear.intersection(self.program.nodes[index].results))
        if not follows:
            return []
        for index, node in enumerate(self.program.nodes):
            if index in self.loops and not follows.isdisjoint(node.refs):
                follows.update(node.results)
        last = max(self.loop_of.values())
        found: list[int] = []
        for index in self.reductions:
            in_earlier_loop = self.loop_of.get(index, last) < last
            if in_earlier_loop and not follows.isdisjoint(self.program.nodes[index].refs):
                found.append(index)
        return found


def _widened(program: Program) -> set[int]:
    """Values that are widened weights, in whatever shape and dtype."""
    found: set[int] = set()
    for node in program.nodes:
        if node.target in DEQUANTIZE or (node.refs and node.refs[0] in found and goes_on(program, node)):
            found.update(node.results)
    return found
