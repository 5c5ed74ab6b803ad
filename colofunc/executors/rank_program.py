"""One rank's program as a function of this rank's inputs: prepared collectively, then called for every step.

Before a program that communicates runs for the first time all ranks compare its hash: ranks with different programs
would wait for one another for ever. What each node becomes is written by `Writer`, with the collectives of
`rank_collectives`.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from colofunc.errors import InputError
from colofunc.executors.flight import Flight, mark_passed
from colofunc.executors.groups import ProcessGroups
from colofunc.executors.pools import accelerator, pool_of, reads_host_only
from colofunc.executors.rank_collectives import RankWires, own_tag
from colofunc.executors.simulated import Shards, own_memory, written_inputs
from colofunc.executors.source import Partition, Tap, Writer
from colofunc.executors.step_function import StepFunction
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.program.editor import Editor
from colofunc.program.facts import has_wires, is_peer, is_wire
from colofunc.program.ir import Node, Program
from colofunc.program.places import RECEIVE, OnRank, channels


class RankProgram:
    """A program ready to run on this rank. Making one is collective: process groups are made, hashes compared."""

    def __init__(
        self,
        program: Program,
        groups: ProcessGroups,
        watch: Watch | None,
        bound: Mapping[str, Callable[..., Any]] | None = None,
        tap: Tap | None = None,
        whole: Program | None = None,
        union: Program | None = None,
        on_rank: OnRank | None = None,
        begins: bool = False,
    ) -> None:
        """`whole`: the program before it was compiled.

        Under a `tap` copies allocate: whoever looks may hold on to them.

        `union`: what all ranks run, where `program` is only this one's part of it; `on_rank`: which part. begins: its
        results are those of `program`, and nobody waits until what it sends has come.
        """
        self.program = program
        self._begins = begins
        self._union = union or program
        self._on_rank = on_rank
        self._sends_messages = not begins and any(
            is_peer(node) for each in self._union.with_bodies() for node in each.nodes
        )
        self.pool = pool_of(program, 1, whole) if tap is None else None
        self._whole = whole
        self._tap = tap
        self._bound = bound
        self._host_only = reads_host_only(program)
        self._groups = groups
        self._watch = watch
        self._function: StepFunction | None = None
        self._hash = ""  # of a program that communicates, from the first call on
        self._expected = sum(id not in self._union.constants for id in self._union.inputs)
        self._written = written_inputs(program)

    def __call__(self, inputs: Sequence[Shards]) -> list[Shards]:
        with self._watch or nullcontext(), self._groups.messages() if self._sends_messages else nullcontext():
            return self._call(inputs)

    def _call(self, inputs: Sequence[Shards]) -> list[Shards]:
        if len(inputs) != self._expected:
            raise InputError(f"the program takes {self._expected} tensors, {len(inputs)} were given")
        flat = [shards[0] for shards in inputs]
        if self._on_rank is not None:
            flat = [flat[position] for position in self._on_rank.inputs]
        partition = ((0,),) * len(flat)
        if self._written:
            own_memory(flat, partition, self._written)
        device = device_of(self._groups.mesh) if self._host_only else accelerator(flat)
        if self.pool is not None:
            self.pool.allocate(device.type == "cuda")
        if self._function is None:
            self._function = self._prepare(partition, device)
        if self._watch is None or not self._hash:
            outs = self._function(flat)
        else:
            self._watch.advance(self._hash)
            if device.type == "cpu":
                outs = self._function(flat)
            else:
                outs = in_flight(self._watch.launched(), device, self._function, flat)
        return self._outputs(self._function.per_lane(outs), device)

    def _prepare(self, partition: Partition, device: torch.device) -> StepFunction:
        """The compiled program. Collective: hashes are compared and process groups made."""
        if self._watch is not None and has_wires(self._union):
            self._hash = program_hash(self._union, self._groups.mesh)
            self._watch.agree("the lowered program", self._hash, self._watch.deadline_s)
        self._make_groups(device)
        flight = None if self._watch is None or device.type == "cpu" else self._watch.flight
        wires = RankWires(self._groups, flight)
        writer = Writer(
            self.program, 1, device, wires, partition, self._bound, tap=self._tap, pool=self.pool, whole=self._whole
        )
        writer.write()
        return writer.function()

    def _make_groups(self, device: torch.device) -> None:
        """All ranks make all process groups, in the order of what all run, also those that they have no part in."""
        if self._on_rank is None:
            return
        for program in self._union.with_bodies():
            for node in program.nodes:
                if is_wire(node) or is_peer(node):
                    self._groups.of(node.args[1])
        if self._groups.carriers.get(device.type) == "nccl":
            self._groups.open_channels(channels(self._union, self._groups.mesh), device)

    def _outputs(self, here: list[Shards], device: torch.device) -> list[Shards]:
        """The outputs of the whole. here: those of this rank's program."""
        if self._on_rank is None or self._begins:
            return here
        self._groups.delivered()
        return with_absent(self._union, dict(zip(self._on_rank.outputs, here, strict=True)), device)


def with_absent(union: Program, here: Mapping[int, Shards], device: torch.device) -> list[Shards]:
    """The outputs of what all ranks run: an empty tensor where one does not exist on this rank. here: by position."""
    outputs = []
    for position, id in enumerate(union.outputs):
        if position in here:
            outputs.append(here[position])
        else:
            outputs.append([torch.empty(0, dtype=union.values[id].dtype, device=device)])
    return outputs


def in_flight(
    flight: Flight, device: torch.device, step: StepFunction, inputs: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """A step whose collectives a GPU does, when the host has gone on."""
    try:
        outs = step(inputs)
    except BaseException:
        flight.give_up()
        raise
    flight.end(mark_passed(device))
    return outs


class DeferredExchange:
    """An exchange of messages in two steps.

    What this rank knows is sent when it is called; the rest is done when the function that it returns is called.
    """

    def __init__(self, program: Program, on_rank: OnRank, groups: ProcessGroups, watch: Watch | None) -> None:
        """`program`: what all ranks run. `on_rank`: this rank's part of it."""
        self._groups, self._watch = groups, watch
        self._first, self._rest = _around_receives(on_rank.program)
        self._receives = [node for node in on_rank.program.nodes if node.target == RECEIVE]
        self._union, self._on_rank = program, on_rank
        self._sends = RankProgram(self._first, groups, watch, union=program, on_rank=on_rank, begins=True)
        self._ends = RankProgram(self._rest, groups, watch)

    def __call__(self, inputs: Sequence[Shards]) -> Callable[[], list[Shards]]:
        device = device_of(self._groups.mesh)
        waits = []
        with self._watch or nullcontext(), self._groups.messages():
            for node in self._receives:
                axes, _, source, shape, dtype = node.args
                receiver = self._groups.receiver(axes, source, shape, dtype, device)
                receiver.post(own_tag(node))
                waits.append(partial(receiver, own_tag(node)))
            known = self._sends(inputs)
            self._groups.batch.begin()
        own_inputs = [inputs[position] for position in self._on_rank.inputs]

        def finish() -> list[Shards]:
            with self._watch or nullcontext():  # where a peer has ended it says which
                try:
                    received = [[wait()] for wait in waits]
                except BaseException:
                    self._groups.mail.under_way = True
                    raise
            outputs = self._ends([*own_inputs, *known, *received])
            return with_absent(self._union, dict(zip(self._on_rank.outputs, outputs, strict=True)), device)

        return finish


def _around_receives(program: Program) -> tuple[Program, Program]:
    """(What a rank can do before anything has come, the rest).

    Inputs of the rest: the program's, what the first gives, what comes.
    """
    received: list[int] = []
    for node in program.nodes:
        if node.target == RECEIVE:
            received += node.results
    late = set(received)  # what depends on a message
    first: list[Node] = []
    rest: list[Node] = []
    read = set(program.outputs)  # what the rest reads, and what comes out
    for node in program.nodes:
        if node.target == RECEIVE:
            continue
        if any(ref in late for ref in node.refs):
            rest.append(node)
            late.update(node.results)
            read.update(node.refs)
        else:
            first.append(node)
    known: list[int] = []  # what the first gives to the rest
    for node in first:
        known += [out for out in node.results if out in read]
    edit = Editor(program)
    given = [id for id in program.inputs if id not in program.constants]
    constants = [id for id in program.inputs if id in program.constants]
    return edit.written(first, known), edit.written(rest, program.outputs, [*given, *known, *received, *constants])


def program_hash(program: Program, mesh: Mesh) -> str:
    """A hash that is equal exactly on ranks that are about to run the same program."""
    digest = hashlib.sha256(mesh.fingerprint.encode())
    for node in program.nodes:
        digest.update(repr((node.target, node.args, node.kwargs, node.outs, node.on)).encode())
        if node.loop is not None:
            digest.update(repr((node.loop.trips, node.loop.axis, node.loop.gathers)).encode())
            timetable = node.loop.timetable
            if timetable is not None:
                digest.update(repr((timetable.along, timetable.table, timetable.parts, timetable.ends)).encode())
            digest.update(program_hash(node.loop.body, mesh).encode())
    for id, value in program.values.items():
        digest.update(repr((id, value.shape, value.dtype, value.layout)).encode())
    for id, tensor in program.constants.items():
        digest.update(pickle.dumps((id, tuple(tensor.shape), str(tensor.dtype))))
        if tensor.numel() <= 1 << 16:
            digest.update(repr(tensor.tolist()).encode())
    digest.update(repr((program.inputs, program.outputs, program.aliases)).encode())
    return digest.hexdigest()
