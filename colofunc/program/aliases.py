"""Aliases: which values of a program may share memory, and until when each such group is read.

What operators say about themselves is enough, so it is conservative: a result that may be a view of an operand counts
as one. Where memory is counted, `memory.lies` knows exactly.
"""

from __future__ import annotations

from colofunc.program.facts import aliasing, lifetimes, written
from colofunc.program.ir import Program, computed_once


class Aliases:
    """Groups of values that may share memory."""

    def __init__(self, program: Program) -> None:
        leaders, last = dict[int, int](), dict[int, int]()
        shares = aliasing(program)
        for node in program.nodes:
            if node.target in shares and node.refs:
                first = (written(node) or node.refs)[0]
                leader = leaders.get(first, first)
                for out in node.results:
                    leaders[out] = leader
        # Every value of every program that a plan is made of passes here.
        for id, at in lifetimes(program).items():
            group = leaders.get(id, id)
            if at < len(program.nodes) and at > last.get(group, -1):
                last[group] = at
        self._leader, self._last = leaders, last
        self._outputs = {self.group(out) for out in program.outputs}

    def group(self, id: int) -> int:
        """The first value of the memory that `id` may lie in."""
        return self._leader.get(id, id)

    def last_read(self, group: int) -> int:
        """Position of the last node that reads any value of the group; -1 if none does."""
        return self._last.get(group, -1)

    def is_output(self, group: int) -> bool:
        """Whether a value of the group leaves the program."""
        return group in self._outputs


@computed_once
def aliases(program: Program) -> Aliases:
    """The groups of a program's values that may share memory."""
    return Aliases(program)
