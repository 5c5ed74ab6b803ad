"""A step that is prepared for one signature: what it keeps between its calls, and one call of it.

    ready = PreparedStep(lowered, executor, watch, step_fn, disk, leaves, used)
    out = ready.call(given, "step at train.py:12")       # place what is not placed, run, wrap what comes out

Inputs that this step or another has placed as this one wants them (`DTensor.home`) are taken as they are; for all
others `place` finds out what to do. A donated leaf is consumed where it lies, and its memory comes back in the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from itertools import chain
from typing import Any

import torch

from colofunc import compat
from colofunc.compiler.disk_state import Shelves, named, scratch_sizes, shelves_of_hidden
from colofunc.compiler.guard import CallLeaves, Guard
from colofunc.compiler.lowered import Lowered
from colofunc.compiler.rank_agreement import equal_leaves
from colofunc.compiler.replica_check import ReplicaLeaves, state_names
from colofunc.compiler.surroundings import reads_of
from colofunc.compiler.warmup import Warmup
from colofunc.dtensor.placed import SHELF, place, side_by_side
from colofunc.dtensor.roles import LASTING
from colofunc.dtensor.tensor import DTensor, Home, Maker, consume_all, home_of, parts_of
from colofunc.errors import ConsumedError
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import DiskTransaction, Scratch
from colofunc.executors.distributed import main_seed
from colofunc.executors.post_validated import PostValidated
from colofunc.executors.simulated import Shards
from colofunc.executors.watch import Watch
from colofunc.mesh.device import device_of, idle_gpus
from colofunc.ops.seeds import draw_seed
from colofunc.plugins.operators import OPERATORS
from colofunc.program.passes.chunks import buffers_of
from colofunc.program.post_validation import deferred_parts, validates_late
from colofunc.program.tracing.modules_used import UsedModules
from colofunc.spec.layout import Layout


class PreparedStep:
    """A lowered step and, from the first call on, the backend that runs it."""

    def __init__(
        self,
        low: Lowered,
        executor: str | None,
        watch: Watch | None,
        fn: Callable[..., Any],
        disk: str | bool | None,
        leaves: Sequence[torch.Tensor],
        used: UsedModules,
    ) -> None:
        """leaves: of the first call, for their dtypes. used: the modules of its trace, as they have to be.

        disk: the directory of what lies there; True: none is named yet.
        """
        self.low = low
        self.watch = watch
        self.disk = disk
        self.used = used
        self.guard: Guard | None = None  # of the last call that was looked up
        self._executor = executor
        self._dtypes = [leaf.dtype for leaf in leaves]
        self.measure = 0  # of the steps to come so many are to be measured
        self.warmup: Warmup | None = None  # what measures them
        self.after: PreparedStep | None = None  # planned by what was measured; state of this one moves there
        self._compared: set[str] = set()
        self._hidden: tuple[list[int], list[Shards]] | None = None
        values, captured = low.traced.program.values, low.traced.captured
        hidden = {vid for vid in captured if vid in values and values[vid].role == "frozen"}
        self._baked = [tensor for vid, tensor in captured.items() if vid not in hidden]
        self._versions = compat.versions(self._baked)
        self._reads = reads_of(fn, captured.values())
        targets = {node.target for node in low.traced.program.nodes}
        self._operators = {name: OPERATORS[name] for name in targets if name in OPERATORS}
        self._makers: list[Maker] | None = None  # per output, from the first call on

    def compare(self, what: str, leaves: Sequence[torch.Tensor]) -> None:
        """On real ranks, once: plain tensors must be equal on all of them."""
        if self.watch is not None and what not in self._compared:
            self._compared.add(what)
            names = [leaf.name for leaf in self.low.traced.in_tree.leaves()]
            equal_leaves(self.watch, names[: len(leaves)], leaves)

    def stale(self) -> str:
        """What has changed since that is part of the program, in words; empty where nothing has."""
        if compat.versions(self._baked) != self._versions:
            return "a tensor that it captured was written to"
        for name, before in self._operators.items():
            if OPERATORS.get(name) is not before:
                return f"operator {name!r} was defined again"
        for read in self._reads:
            if change := read.change():
                return change
        return ""

    def hidden(self) -> list[Shards]:
        """Parts of the captured tensors that are inputs, placed at the first call and again if they were written to."""
        versions = compat.versions(self.low.hidden)
        if self._hidden is None or self._hidden[0] != versions:
            if self.watch is not None:
                names = (self.low.program.values[i].name for i in self.low.hidden_ids)
                pairs = zip(names, self.low.hidden, strict=True)
                new = {name: tensor for name, tensor in pairs if SHELF.layout(tensor, self.low.mesh) is None}
                equal_leaves(self.watch, tuple(new), tuple(new.values()))
            shelves = shelves_of_hidden(self.low, self.disk, self.backend)
            self._hidden = versions, self.low.hidden_parts(self.backend, shelves.keep)
        return self._hidden[1]

    @cached_property
    def buffers(self) -> tuple[tuple[int, ...], ...]:
        """Positions of inputs whose parts lie one behind the other in one buffer per rank."""
        return buffers_of(self.low.program)

    @cached_property
    def scratch(self) -> Scratch | None:
        """Room on disk for values of the step itself; None where none goes there."""
        sizes = scratch_sizes(self.low.program, self.low.mesh, self.backend.ranks(self.low.mesh))
        return Scratch(named(self.disk), sizes, self.backend.ranks(self.low.mesh)[0]) if sizes else None

    @cached_property
    def backend(self) -> Backend:
        return backend_for(self.low.mesh, self._executor)

    @cached_property
    def homes(self) -> tuple[Home, ...]:
        """Per leaf, what it is where it lies as planned."""
        pairs = zip(self.low.input_layouts, self._dtypes, strict=False)
        return tuple(home_of(layout, dtype, self.low.mesh, self.backend) for layout, dtype in pairs)

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Per leaf, the role that it carries to other steps; "" where it lasts for this step only."""
        traced = self.low.traced
        found = [traced.program.values[id].role for id in traced.program.inputs[: len(traced.names)]]
        return tuple(role if role in LASTING else "" for role in found)

    @cached_property
    def run(self) -> Callable[[Sequence[Shards]], list[Shards]]:
        if validates_late(self.low.program):
            parts = deferred_parts(self.low.program, self.low.priced)
            return PostValidated(self.low.program, parts, self.backend, self.low.mesh)
        return self.backend.compile(self.low.program, self.low.mesh)

    @cached_property
    def _alike(self) -> ReplicaLeaves:
        names = state_names(self.low.traced.out_names, self.low.traced.names)
        return ReplicaLeaves(names, self.low.output_layouts, self.low.mesh)

    @cached_property
    def _captured(self) -> tuple[DTensor, ...]:
        return tuple(x for x in self.low.hidden if type(x) is DTensor)

    @cached_property
    def _donated(self) -> frozenset[int]:
        return frozenset(self.low.donated)

    @cached_property
    def device(self) -> torch.device:
        """Where this step runs; a warning where that leaves GPUs idle."""
        _ = self.backend  # which joins the other ranks, whose process group has a say
        if self.low.mesh.is_main and (idle := idle_gpus(self.low.mesh)):
            warnings.warn(idle, stacklevel=7)
        return device_of(self.low.mesh)

    def explain_full(self, error: torch.OutOfMemoryError) -> None:
        """Torch says how many bytes did not fit on the device; add what the plan holds there, and what to try."""
        planned = self.low.memory()
        error.add_note(f"the plan holds {planned.summary('device')}. {planned.advice('device')}")

    # ---- one call ----

    def call(self, given: CallLeaves, name: str, agree_every: int = 0) -> Any:
        """Place what is not placed, run, wrap what comes out, consume what was donated.

        `name`: of the call, for errors.

        agree_every: after so many steps, which this one ends, the ranks compare their copies; 0: they do not.
        """
        low = self.low
        unsettled = self.backend.unsettled
        if unsettled is not None and (agree_every or self.warmup is not None or unsettled.run is not self.run):
            self._settle()
        inputs = self._placed(given, name)
        lent = [x for x in map(given.leaves.__getitem__, given.away) if type(x) is DTensor and x.lent]
        if low.traced.uses_seed:
            seed = main_seed(self.watch, draw_seed(), self.device)
            inputs.append([seed] * len(self.backend.ranks(low.mesh)))
        inputs += self.hidden()
        if self.buffers:
            inputs = side_by_side(inputs, self.buffers)
        kept = {k for k in given.away if not _is_owned(given.leaves[k])}  # the caller's: they were copied
        donated = [k for k in low.donated if k not in kept]
        state: Any = [given.leaves[k] for k in donated]
        outs = self._ran(inputs, given, state, name)
        # the caller may write there as soon as this returns
        for leaf in (*lent, *(x for x in self._captured if x.lent)):
            COPIER.arrived(leaf.parts_in_flight)
        consume_all(state, name, [low.traced.names[k] for k in donated])
        if agree_every and self.watch is not None:
            self._settle()  # what is late has no numbers yet
            self._alike.check(outs, self.watch, name, agree_every)
        results = self._wrapped(outs)
        unsettled = self.backend.unsettled
        if unsettled is not None:
            guessed = [x for x, parts in zip(results, parts_of(results), strict=True) if unsettled.gives(parts)]
            lost = f"{name}, whose validation failed, so this result is lost (load the last checkpoint)"
            unsettled.lose = partial(consume_all, guessed, lost)
        return low.traced.unpack(results)

    def _settle(self) -> None:
        """Validate what was guessed in the last step; all ranks do so here, so that none has to ask later."""
        if self.backend.unsettled is not None:
            self.backend.unsettled.settle()
            self.backend.unsettled = None

    def _placed(self, given: CallLeaves, name: str) -> list[Shards]:
        """The parts of each leaf."""
        inputs = parts_of(given.leaves)
        for k in given.away:
            inputs[k] = []
        # also of a consumed one, on which there is an error
        missing = [place for place, parts in enumerate(inputs) if not parts]
        if missing:
            self._bring(given.leaves, missing, inputs, name)
        return inputs

    def _bring(self, leaves: Sequence[torch.Tensor], which: Sequence[int], inputs: list[Shards], name: str) -> None:
        """Place those leaves that are not at home."""
        low = self.low
        copied = [not _is_owned(leaves[i]) and i in self._donated for i in which]
        layouts = [low.input_layouts[i] for i in which]
        shelves = None
        if any(layout.tier == "disk" for layout in layouts):
            shelves = Shelves(self.disk, [leaves[i] for i in which], layouts, copied, low.mesh, self.backend)
        for i, layout, copy in zip(which, layouts, copied, strict=True):
            try:
                parts = place(leaves[i], layout, low.mesh, self.backend, copy, low.traced.names[i], device=self.device)
            except (ConsumedError, torch.OutOfMemoryError) as error:
                error.add_note(f"as argument {low.traced.names[i]!r} of {name}")
                raise
            inputs[i] = parts if shelves is None else shelves.keep(parts, layout)
        if shelves is not None:
            shelves.commit()

    def _ran(self, inputs: list[Shards], given: CallLeaves, state: Sequence[DTensor], name: str) -> list[Shards]:
        """The results; where it fails in the middle of an update, the `state` is lost and says so."""
        written = list(chain.from_iterable(parts_of(state)))
        before = compat.versions(written)
        # What is at home lies in memory.
        disk = DiskTransaction(chain(*(inputs[k] for k in given.away), *inputs[len(given.leaves) :]))
        scratch = self.scratch
        run = self.run if self.warmup is None else self.warmup.run
        try:
            with nullcontext() if scratch is None else scratch.used():
                outs = run(inputs)
            disk.commit()
        except BaseException as error:  # an interrupt too: what it left on disk must not be taken for the state
            disk.rollback()
            # The error's traceback may hold what lies there: the next call has room of its own.
            self.__dict__.pop("scratch", None)
            if disk.committed or before != compat.versions(written):
                lost = f"{name}, which failed in the middle of its update, so this state is lost (load the last checkpoint)"
                consume_all(state, lost)
                error.add_note(
                    f"{name} had begun to update its state in place: that state is lost; load the last checkpoint"
                )
            raise
        return outs

    def _wrapped(self, outs: Sequence[Shards]) -> list[DTensor]:
        if self._makers is None:
            self._makers = []
            again = {out: self.roles[into] for out, into in self.low.global_program.aliases}
            for place, (parts, layout) in enumerate(zip(outs, self.low.output_layouts, strict=True)):
                home = home_of(layout, parts[0].dtype, self.low.mesh, self.backend)
                self._makers.append(self._maker(parts, home, again.get(place, "")))
        return [make(parts) for make, parts in zip(self._makers, outs, strict=True)]

    def owned(self, parts: Shards, home: Home, role: str) -> DTensor:
        """A tensor that this step has placed."""
        return self._maker(parts, home, role)(parts)

    def _maker(self, parts: Shards, home: Home, role: str) -> Maker:
        """What makes tensors of parts like these.

        At home is what `place` would leave where it is, whatever it finds out.
        """
        if home.layout.tier == "device" and (parts[0].is_cuda or self.device.type == "cpu"):
            return home.maker(parts[0].device, role)
        return partial(DTensor, layout=home.layout, mesh=home.mesh, backend=home.backend, owned=True, role=role)


def lies_as_planned(leaves: Sequence[torch.Tensor], layouts: Sequence[Layout]) -> bool:
    """Plain and movable tensors can be placed anywhere.

    Another DTensor stays where it is, so the plan must want it there.
    """
    pairs = zip(leaves, layouts, strict=False)
    return all(not isinstance(leaf, DTensor) or leaf.movable or leaf.sharding is layout for leaf, layout in pairs)


def _is_owned(leaf: torch.Tensor) -> bool:
    return isinstance(leaf, DTensor) and leaf.owned
