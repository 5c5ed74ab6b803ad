"""The simulated mesh: all ranks of a local program in this process, in lock step.

Ranks whose operands are the *same tensors* share one computation: an operator is a pure function, so equal tensors in
means equal results out. Nothing is taken on trust from layouts, hence a wrong rule still shows as a wrong number; yet
eight data-parallel ranks cost about one step, because what is replicated is computed once. Which ranks share what
follows from the inputs, so the whole mesh becomes one straight-line function (see `source`).

    v4_0 = linear(v2_0, v0)              # ranks 0 and 1
    v4_1 = linear(v2_1, v0)              # ranks 2 and 3
    v5 = all_reduce((v4_0, v4_1), 'sum')

An asynchronous start hands out a buffer of NaN that the wait fills, so that a missing wait fails here too. A write in
place to a tensor that ranks share, but with different operands, first gives each its own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from colofunc.errors import InputError
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import OnDisk
from colofunc.executors.pools import accelerator, pool_of, reads_host_only
from colofunc.executors.simulated_collectives import SimulatedWires
from colofunc.executors.source import LoopLine, Partition, Tap, Writer
from colofunc.executors.step_function import StepFunction
from colofunc.mesh import Mesh
from colofunc.mesh.device import device_of
from colofunc.program.facts import written
from colofunc.program.ir import Program

Shards = list[torch.Tensor]


class SimulatedProgram:
    """A program ready to run on every rank of a mesh.

    Call with `inputs[i][r]`: input i on rank r, without constants.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        bound: Mapping[str, Callable[..., Any]] | None = None,
        tap: Tap | None = None,
        whole: Program | None = None,
    ) -> None:
        """`whole`: the program before it was compiled.

        Under a `tap` copies allocate: whoever looks may hold on to them.
        """
        self.program = program
        self.pool = pool_of(program, mesh.size, whole) if tap is None else None
        self._whole = whole
        self._tap = tap
        self.mesh = mesh
        self._bound = bound
        self._host_only = reads_host_only(program)
        self._expected = sum(id not in program.constants for id in program.inputs)
        self._functions: dict[tuple[Partition, torch.device], StepFunction] = {}
        self._written = written_inputs(program)

    def __call__(self, inputs: Sequence[Shards]) -> list[Shards]:
        if len(inputs) != self._expected:
            raise InputError(f"the program takes {self._expected} tensors, {len(inputs)} were given")
        partition, flat = distinct(inputs, self.mesh.size)
        if self._written:
            own_memory(flat, partition, self._written)
        device = device_of(self.mesh) if self._host_only else accelerator(flat)
        if self.pool is not None:
            self.pool.allocate(device.type == "cuda")
        function = self._functions.get((partition, device))
        if function is None:
            function = self._functions[partition, device] = self.write(partition, device).function()
        return function.per_lane(function(flat))

    def write(
        self, partition: Partition, device: torch.device, sparing: bool = True, look: LoopLine | None = None
    ) -> Writer:
        """The source for inputs that are shared as `partition` says."""
        wires = SimulatedWires(self.mesh)
        writer = Writer(
            self.program,
            self.mesh.size,
            device,
            wires,
            partition,
            self._bound,
            sparing,
            self._tap,
            look,
            self.pool,
            self._whole,
        )
        writer.write()
        return writer


def written_inputs(program: Program) -> tuple[int, ...]:
    """Positions of the inputs that a program writes to, constants not counted."""
    changed: set[int] = set()
    for node in program.nodes:
        changed.update(written(node))
    inputs = [id for id in program.inputs if id not in program.constants]
    return tuple(position for position, id in enumerate(inputs) if id in changed)


def distinct(inputs: Sequence[Shards], lanes: int) -> tuple[Partition, list[torch.Tensor]]:
    """Which lanes hold the same memory, and the distinct tensors of all inputs in order."""
    if lanes == 1:
        return ((0,),) * len(inputs), [shards[0] for shards in inputs]
    partition: list[tuple[int, ...]] = []
    flat: list[torch.Tensor] = []
    for shards in inputs:
        first = shards[0]
        if all(shard is first for shard in shards):
            partition.append((0,) * lanes)
            flat.append(first)
            continue
        number_of: dict[Any, int] = {}
        tensor_of_lane: list[int] = []
        for shard in shards:
            # Different objects may be views of the same memory; writing to it once per object would be wrong.
            has_memory = shard.numel() and not isinstance(shard, OnDisk)
            key = (shard.data_ptr(), shard.stride()) if has_memory else id(shard)
            if key not in number_of:
                number_of[key] = len(number_of)
                flat.append(shard)
            tensor_of_lane.append(number_of[key])
        partition.append(tuple(tensor_of_lane))
    return tuple(partition), flat


def own_memory(flat: list[torch.Tensor], partition: Partition, positions: Sequence[int]) -> None:
    """Inputs that will be written to must not share memory with other inputs: such ones are copied, in `flat`.

    positions: of the inputs that will be written to. flat, partition: as `distinct` gives them.
    """
    addresses = [0 if type(x) is OnDisk else x.untyped_storage().data_ptr() for x in flat]
    if len(set(addresses)) == len(addresses):
        return
    input_of: list[int] = []  # tensor of `flat` -> position of the input that it is of
    for position, tensor_of_lane in enumerate(partition):
        input_of += [position] * (max(tensor_of_lane) + 1)
    first_input: dict[int, int] = {}  # address -> the first input that lies there
    shared: set[int] = set()
    for address, position in zip(addresses, input_of, strict=True):
        if address and first_input.setdefault(address, position) != position:
            shared.add(address)
    if not shared:
        return
    suspects = [number for number, address in enumerate(addresses) if address in shared]
    for number in _overlapping(flat, input_of, suspects):
        if input_of[number] in positions:
            COPIER.arrived((flat[number],))
            flat[number] = flat[number].clone()


def _overlapping(flat: Sequence[torch.Tensor], input_of: Sequence[int], suspects: Sequence[int]) -> list[int]:
    """Those suspects that reach into memory that a tensor of another input reaches into, in order.

    Neighbours in a buffer do not.
    """
    overlapping: set[int] = set()
    run: list[int] = []  # tensors whose addresses hang together, and the address behind them all
    end = 0
    spans = sorted((*_span(flat[number]), number) for number in suspects if flat[number].numel())
    for first, behind, number in spans:
        if first >= end:
            overlapping |= _of_several_inputs(run, input_of)
            run = []
        run.append(number)
        end = max(end, behind)
    return sorted(overlapping | _of_several_inputs(run, input_of))


def _of_several_inputs(tensors: Sequence[int], input_of: Sequence[int]) -> set[int]:
    """The tensors, if they are not all of one input."""
    inputs = {input_of[number] for number in tensors}
    return set(tensors) if len(inputs) > 1 else set()


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First address, and the one behind the last, of a tensor's elements."""
    last_element = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = x.data_ptr()
    return first, first + (last_element + 1) * x.itemsize
