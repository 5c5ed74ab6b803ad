"""Of a very small step every set of values that forward made is made again as late as may be.

Problem: orders are proposed stage by stage, and a stage that is made again is counted as made again whole; in a step of
a few operators what is best may be finer. Idea: of few values every set can be tried: they are dropped where backward
begins, and each comes back where it is first read, with what it is made of.

    forward a b c | backward c b a       {a}: a b c | c b a' a       {a, b}: a b c | c a' b' b a
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import combinations

from colofunc.program.aliases import aliases
from colofunc.program.ir import Program
from colofunc.program.passes.recompute import Replay

FEW = 4
"""Searched are steps in which backward reads at most this many pieces of memory that forward made."""
SMALL = 1 << 10
"""Values of fewer bytes are always kept."""


def late(program: Program) -> Iterator[Callable[[], Program]]:
    """Every such order, fewest values first; none where there are more than a few values, or a loop."""
    first = next((k for k, node in enumerate(program.nodes) if node.phase == "backward"), 0)
    if not first or any(node.loop is not None for node in program.nodes):
        return
    droppable = _droppable(program, first)
    if len(droppable) > FEW:
        return
    for count in range(1, len(droppable) + 1):
        for chosen in combinations(droppable, count):
            yield partial(_replayed, program, first, frozenset().union(*chosen))


def _droppable(program: Program, first: int) -> list[set[int]]:
    """The values in each piece of memory that forward makes, backward reads and nobody outside sees.

    first: the node that backward begins with.
    """
    memory = aliases(program)
    made: dict[int, set[int]] = {}
    for node in program.nodes[:first]:
        for out in node.results:
            made.setdefault(memory.group(out), set()).add(out)
    read: set[int] = set()
    for node in program.nodes[first:]:
        read.update(memory.group(ref) for ref in node.refs)
    kept = {memory.group(id) for id in (*program.inputs, *program.outputs)}
    droppable = []
    for group, values in made.items():
        largest = max(program.values[value].nbytes for value in values)
        if group in read and group not in kept and largest >= SMALL:
            droppable.append(values)
    return droppable


def _replayed(program: Program, first: int, dropped: Collection[int]) -> Program:
    again = Replay(program)
    for k in range(len(program.nodes)):
        if k == first:
            again.drop(dropped)
        again.run(k)
    return again.finish()
