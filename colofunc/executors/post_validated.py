"""Post-validated steps: an update that runs before other stages have said what it has to be, and is put right where
they say otherwise.

    run = PostValidated(program, parts, backend, mesh)       # parts: `program.post_validation.deferred(program)`
    outs = run(inputs)                                       # perhaps speculated: `backend.unsettled` knows

Problem: see `program.post_validation`. Idea: a call runs `main`, sends what others want to know, updates by the scalars
of the last step and returns. What the others have sent is looked at in the next call behind its `main`, or as soon as
anybody reads a tensor. If it is what was guessed, copies of the old state are let go of. If not, they are put back, the
update is done by the right scalars, and a `main` that has run on the wrong state runs once more. A step is speculated
only where the two before it had the same scalars, so that clipping that goes on for many steps costs nothing but the
wait.

Where the ranks of a stage come to the update together (`Deferred.together`: ZeRO gathers parameters at its end), one
that reads a scalar alone only looks at what was sent. To do an update again all ranks meet first (`watch.meet`): in the
next call, or where all of them read what it made. One that reads that alone waits there: its gather would take what the
others, in the next step, send in the same group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from threading import RLock
from typing import TYPE_CHECKING

import torch

from colofunc.errors import InputError
from colofunc.executors.simulated import Shards
from colofunc.executors.watch import meet
from colofunc.mesh import Mesh
from colofunc.program.ir import Program
from colofunc.program.post_validation import Deferred

if TYPE_CHECKING:
    from colofunc.executors.backend import Backend, FinishRun


class PostValidated:
    """A step of which each call may return what is validated later. `redone`: how many updates were done again."""

    def __init__(self, program: Program, parts: Deferred, backend: Backend, mesh: Mesh) -> None:
        self.program, self.parts, self.backend = program, parts, backend
        self._given = [id for id in program.inputs if id not in program.constants]
        self._main = backend.compile(parts.main, mesh)
        self._exchange = backend.deferred_exchange(parts.exchange, mesh)
        self._update = backend.compile(parts.update, mesh) if parts.speculates else None
        self._last: dict[int, Shards] = {}  # what the exchange of the last step gave
        self._steady = False  # whether the two last steps had the same scalars
        self.redone = 0

    def __call__(self, inputs: Sequence[Shards]) -> list[Shards]:
        if self.backend.unsettled is not None and self.backend.unsettled.is_read_by(inputs):
            self.backend.unsettled.settle()
        pending = self.backend.unsettled
        values = self._forward_and_backward(inputs)
        if pending is not None:
            pending.settle()
            # it ran on a state that was put back, if not here then on ranks that had not settled yet
            if pending.redone:
                values = self._forward_and_backward(inputs)
        self.backend.unsettled = None
        with self.backend.watch or nullcontext():
            try:
                return self._told_and_updated(values)
            except BaseException:  # what was sent is not waited for, and nobody may guess by it
                self.forget()
                self.backend.interrupted()
                raise

    def _told_and_updated(self, values: dict[int, Shards]) -> list[Shards]:
        """Tell the other stages, and update by what they said last or, where that is not steady, say now."""
        finish = self._exchange(_of(values, self.parts.exchange))
        if not self._last or (self._update is not None and not self._steady):
            found = self.named(self.parts.exchange, finish())
            self.heard(found)
            values |= found
            return self._outputs(values | self.updated(values))
        late = {}
        for id in self.parts.late:
            late[id] = [torch.empty_like(shard) for shard in self._last[id]]
        written = distinct_tensors(values[id] for id in self.parts.kept)
        kept = [(shard, shard.clone()) for shard in written]
        guess = _cloned({id: self._last[id] for id in self.parts.judged})
        made = self.updated(values | guess)
        again = {id: values[id] for id in self.parts.update.inputs if id in values}
        self.backend.unsettled = UnsettledStep(self, finish, again, kept, made, late)
        return self._outputs(values | late | made)

    def updated(self, values: Mapping[int, Shards]) -> dict[int, Shards]:
        """Parameters and moments, updated in place by the scalars that are among `values`."""
        return (
            {} if self._update is None else self.named(self.parts.update, self._update(_of(values, self.parts.update)))
        )

    def heard(self, found: dict[int, Shards]) -> bool:
        """Take note of what an exchange gave; whether that is what the one before gave."""
        same = bool(self._last) and all(_equal(found[id], self._last[id]) for id in self.parts.judged)
        # The update may write over what it reads.
        self._last = _cloned(found)
        self._steady = same
        return same

    def forget(self) -> None:
        """Guess nothing until two more steps have agreed."""
        self._last = {}
        self._steady = False

    def named(self, program: Program, outs: Sequence[Shards]) -> dict[int, Shards]:
        """What a part gives, by value."""
        return dict(zip(program.outputs, outs, strict=True))

    def _forward_and_backward(self, inputs: Sequence[Shards]) -> dict[int, Shards]:
        return dict(zip(self._given, inputs, strict=True)) | self.named(self.parts.main, self._main(inputs))

    def _outputs(self, values: Mapping[int, Shards]) -> list[Shards]:
        given = set(self._given)
        changed = set(self.parts.update.outputs)
        return [list(values[id]) if id in given and id not in changed else values[id] for id in self.program.outputs]


class UnsettledStep:
    """A step whose update was speculated, until what the other stages said is looked at. late: outputs that are filled
    then.

    `redone`: whether the guess was wrong, once that is known. A rank may settle before others do, since somebody reads
    there. It does not know of them, so that this stays the backend's until a call that all ranks take part in.
    """

    def __init__(
        self,
        run: PostValidated,
        finish: FinishRun,
        values: dict[int, Shards],
        kept: list[tuple[torch.Tensor, torch.Tensor]],
        made: dict[int, Shards],
        late: dict[int, Shards],
    ) -> None:
        """values: what the update reads beside scalars of the exchange.

        They live until it is known whether it is done again.
        """
        self.run = run
        self.lose: Callable[[], None] = _nothing
        """What whoever holds the results does where these are lost."""
        self._finish, self._values, self._kept, self._made, self._late = finish, values, kept, made, late
        self._late_parts = distinct_tensors(late.values())  # those that are filled, and what fills them
        self._late_lists = {id(shards) for shards in late.values()}
        self._lists = self._late_lists | {id(shards) for shards in made.values()}
        self.redone = False
        self._lock = RLock()
        self._done = False
        self._doing = False
        self._found: dict[int, Shards] | None = None  # what the exchange gave, once it is known
        self._error: BaseException | None = None

    def is_read_by(self, inputs: Sequence[Shards]) -> bool:
        """Whether what comes late is among the inputs, also where this rank has looked at it.

        So all ranks say the same.
        """
        late = {id(x) for x in self._late_parts}
        return any(id(x) in late for shards in inputs for x in shards)

    def gives(self, shards: Shards) -> bool:
        """Whether a result is one that is not validated yet: this very list."""
        return id(shards) in self._lists

    def read(self, shards: Shards | None) -> None:
        """Somebody reads this: it is put right, if need be.

        What others said alone is read without waiting for the ranks of the stage.
        """
        if not self.run.parts.together:
            self.settle()
        elif id(shards) in self._late_lists:
            self._do(self._hear)
        elif id(shards) in self._lists:
            self.settle()

    def settle(self) -> None:
        """Wait for what the others sent, and put right what was guessed wrongly.

        Another thread that wants that too waits for it.

        Where that fails, the results of this step are lost (`lose`), and nobody waits for them any more.
        """
        self._do(self._put_right)

    def _do(self, what: Callable[[], None]) -> None:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._done:
                return
            if self._doing:  # a handler of a signal, or a debugger; other threads wait for the lock
                raise InputError(
                    "a result of a step is read while that step is validated. Try: read it when that has ended"
                )
            self._doing = True
            try:
                what()
            except BaseException as error:
                self._error = error
                self._give_up()
                raise
            finally:
                self._doing = False
            if self._done:
                self.lose = _nothing
                if self.run.backend.watch is None:  # all ranks are here
                    self.run.backend.unsettled = None

    def _give_up(self) -> None:
        self.run.forget()
        self.run.backend.unsettled = None
        self._kept.clear()
        self._values.clear()
        self.lose()
        self.lose = _nothing

    def _hear(self) -> None:
        """Wait for what the others sent; whether that is what was guessed."""
        if self._found is not None:
            return
        run = self.run
        self._found = run.named(run.parts.exchange, self._finish())
        self.redone = not run.heard(self._found)
        for id, shards in self._late.items():
            shards[:] = self._found[id]
        self._late_parts += distinct_tensors(self._late.values())

    def _put_right(self) -> None:
        self._hear()
        assert self._found is not None, "it was heard"
        run = self.run
        if self.redone:
            if run.parts.together:
                meet(run.backend.watch, "an update that is done again")
            run.redone += 1
            for x, copy in self._kept:
                x.copy_(copy)
            again = run.updated(self._values | self._found)
            for id, shards in again.items():
                self._made[id][:] = shards  # the lists that the tensors of the call hold
        self._kept.clear()
        self._values.clear()
        self._done = True


def _nothing() -> None:
    pass


def distinct_tensors(some: Iterable[Shards]) -> list[torch.Tensor]:
    """Each tensor once, whichever lanes hold it."""
    found: dict[int, torch.Tensor] = {}
    for shards in some:
        found.update({id(x): x for x in shards})
    return list(found.values())


def _of(values: Mapping[int, Shards], program: Program) -> list[Shards]:
    return [values[id] for id in program.inputs if id not in program.constants]


def _cloned(values: Mapping[int, Shards]) -> dict[int, Shards]:
    clones: dict[int, Shards] = {}
    for id, shards in values.items():
        clones[id] = [shard.clone() for shard in shards]
    return clones


def _equal(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether they are the same bit for bit, so that NaN is NaN."""
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs)
