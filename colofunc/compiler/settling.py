"""Settling: a transform that leaves open what the state and the trace depend on is decided with the whole chain, before
its first call.

Problem: which scheme a weight is quantized in decides what the state is, so it has to be known before anything is
traced; which is best is known only of a finished step, with its sharding, what is made again and what is copied. Idea:
such a transform (`Transform.open`) has choices, and a search among them. The search asks for the step with one choice
at a time; the chain is finished with it like any other, and counted. What is taken stands for all later calls, for the
same chain on another executor, and for one that follows its plan: a plan says what was taken, and a step that is given
one searches nothing.

On real ranks rank 0 searches and tells the others which choice is next; all of them trace it.

    step.settled(state, batch)           # the chain with the transform that was taken in its place
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import attrs

from colofunc import progress
from colofunc.compiler.rank_agreement import portable_error, told_by_main
from colofunc.compiler.staged import Staged, in_place_of
from colofunc.compiler.transform import OpenChoices, Transform
from colofunc.errors import CapacityError, PlanError
from colofunc.executors.watch import Watch

Lower = Callable[[Staged], Any]
"""The chain with one choice -> what it is lowered to. Raises PlanError or CapacityError where it fits no budget."""
NEXT, TAKE, FAILED = "next", "take", "failed"
"""What rank 0 says of a choice: that it is to be finished, that it is taken; or of an error, that the search has ended
with it."""


def settled(
    staged: Staged,
    transform: Transform,
    args: tuple[Any, ...],
    lower: Lower,
    watch: Watch | None,
    taken: Mapping[str, str],
) -> Staged:
    """The chain with the best choice of an open transform. Collective on real ranks. Raises what its search raises.

    taken: what a plan, or the same chain on another executor, says was taken; empty: nothing is known.
    """
    assert transform.open is not None, "it leaves something open"
    chain = _Chain(staged, transform, transform.open(args), lower, watch)
    if taken and chain.open.recalled is not None:
        return chain.taken(chain.open.recalled(taken))
    if watch is None or watch.rank == 0:
        return chain.lead()
    return chain.follow()


@attrs.define(eq=False)
class _Chain:
    """One chain, and its search."""

    staged: Staged
    transform: Transform
    open: OpenChoices
    lower: Lower
    watch: Watch | None
    shared: Exception | None = None
    """What finishing the chain raised, on the other ranks too: each raises its own."""
    tried: int = 0

    def lead(self) -> Staged:
        try:
            with progress.line("planning", self.staged.mesh.is_main):
                taken = self.open.search(self._finished)
        except Exception as error:
            if error is not self.shared:
                self._tell(FAILED, portable_error(error))
            raise
        self._tell(TAKE, taken)
        return self.taken(taken)

    def follow(self) -> Staged:
        word, choice = self._hear()
        while word == NEXT:
            with suppress(PlanError, CapacityError):  # rank 0 has it too, and says what comes next
                self.lower(self._sketched(choice))
            word, choice = self._hear()
        if word == FAILED:
            raise choice
        return self.taken(choice)

    def _tell(self, word: str, choice: Any) -> None:
        if self.watch is not None:
            told_by_main(self.watch, (word, choice))

    def _hear(self) -> tuple[str, Any]:
        return told_by_main(self.watch, None)

    def _finished(self, choice: Any) -> Any:
        """What the chain is lowered to, or in a line why it cannot be."""
        self.tried += 1
        progress.at("choice", self.tried)
        self._tell(NEXT, choice)
        try:
            return self.lower(self._sketched(choice))
        except (PlanError, CapacityError) as error:
            return str(error).splitlines()[0]
        except Exception as error:
            self.shared = error
            raise

    def _sketched(self, choice: Any) -> Staged:
        """The chain with a choice that is only counted.

        Nobody keeps it: what all of them take together is more than any of them does.
        """
        sketched = self.open.closed if self.open.sketched is None else self.open.sketched
        return in_place_of(attrs.evolve(self.staged, plan=None), self.transform, sketched(choice))

    def taken(self, choice: Any) -> Staged:
        """The chain as it runs."""
        return in_place_of(self.staged, self.transform, self.open.closed(choice))
