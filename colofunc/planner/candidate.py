"""A finished program and what keeping to a budget costs it: what passes say to one another and to who chooses among
plans.

    done = finish(program)            # completed, copies placed, counted
    near = finish(other, done)        # what `done` chose taken over: an estimate, quickly
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any, Protocol

import attrs

from colofunc.program.ir import Program
from colofunc.spec.layout import At


@attrs.frozen(eq=False)
class FinishedProgram:
    """A finished program, its peak in bytes, the seconds that keeping to a budget costs it (values made again, copies
    that nothing hides), and in words what was done for it. `hint`: what was chosen for its copies; None where there is
    no choice. `peaks`: of a pipeline, by where ranks are on its axis. `byte_s`: seconds that one more byte would save,
    if known. `asked_s`: of its seconds those of what a policy makes again, whatever the budget."""

    program: Program
    peak_bytes: int
    more_s: float
    words: tuple[str, ...] = ()
    short: str = ""  # what another tier lacks
    hint: object = None
    peaks: Mapping[At, int] = attrs.field(factory=dict)
    stages: tuple[Any, ...] = ()  # the programs on the way here, where somebody wants to see them
    byte_s: float | None = None
    asked_s: float = 0.0

    def fits(self, budget_bytes: int) -> bool:
        """Whether it runs within the budget, and all other memory there is."""
        return self.peak_bytes <= budget_bytes and not self.short


class Finish(Protocol):
    """Completes a program and counts its peak. like: another order of the same work that is finished; then an estimate
    is enough. moves: whether copies may be placed."""

    def __call__(
        self, program: Program, like: FinishedProgram | None = None, /, moves: bool = True
    ) -> FinishedProgram: ...


@attrs.frozen(eq=False)
class Finishing:
    """`finish`, and from how many seconds more on (`FinishedProgram.more_s`) an order is of no use: a plan is known that is as
    fast.
    """

    finish: Finish
    below_s: float = inf

    def __call__(self, program: Program, like: FinishedProgram | None = None, /, moves: bool = True) -> FinishedProgram:
        return self.finish(program, like, moves=moves)
