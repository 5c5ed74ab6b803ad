"""Running a lowered step to look into it: its arguments placed without being consumed, its local program as it was
lowered.

Problem: the program that runs has buckets, fused operators and updates in place, so most values of the step no longer
exist as such. Idea: lower again from the same decisions, stop before those passes, and remember which local value is a
copy of which global one. The same numbers, every value visible.

    %12 linear of h.0.mlp        ->        local %31 «(dp a) b (tp c)», local %35 «(dp a) b c» after its all_gather
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import torch

from colofunc.compiler.passes import passes_of_plugins, run_passes
from colofunc.compiler.rank_agreement import from_main
from colofunc.dtensor.placed import place
from colofunc.dtensor.tensor import DTensor
from colofunc.errors import PlanError
from colofunc.executors.backend import Backend, backend_for
from colofunc.executors.copies import COPIER
from colofunc.executors.disk.tensors import in_memory
from colofunc.executors.distributed import broadcast_object, main_seed
from colofunc.executors.pools import in_tier
from colofunc.executors.simulated import Shards
from colofunc.mesh.device import device_of
from colofunc.ops.seeds import draw_seed, random_state, set_random_state
from colofunc.program.ir import Node, Program, Value
from colofunc.program.lazy import make
from colofunc.program.lower import lower
from colofunc.program.places import has_places
from colofunc.program.placing import placing_of, with_outputs
from colofunc.program.text import target_text
from colofunc.program.tracing.trace import record_local

if TYPE_CHECKING:
    from colofunc.compiler.lowered import Lowered


@attrs.frozen(eq=False)
class PlainProgram:
    """A local program as it was lowered, behind the passes of plugins and before any pass that hides values.

    `owners`: local id -> id of the global value it is a copy of.
    """

    program: Program
    owners: Mapping[int, int]


def plain_program(low: Lowered, backend: Backend) -> PlainProgram:
    """What `low` was before buckets, fusion and updates in place. Collective: rank 0 lowers, all get the result.

    Raises PlanError for a step with stages on real ranks, which do not come to the same values.
    """
    if backend.watch is not None and has_places(low.program):
        raise PlanError(
            f"on real ranks a step whose operators run at some ranks of {low.mesh} only is not looked at value by "
            'value. Try: step.on("simulated") in one process, before compare or check_finite'
        )
    made = from_main(backend.watch, partial(_lowered_again, low))
    if backend.watch is None:
        assert made is not None, "one process lowers for itself"
        return made
    told = None if made is None else attrs.evolve(made, program=attrs.evolve(made.program, constants={}))
    with backend.watch:
        told = broadcast_object(told)
    assert told is not None, "rank 0 has lowered"
    known = low.global_program.constants
    constants = {i: known[told.owners[i]] for i in told.program.inputs if told.owners[i] in known}
    return attrs.evolve(told, program=attrs.evolve(told.program, constants=constants))


def _lowered_again(low: Lowered) -> PlainProgram:
    whole = low.global_program
    ins = dict(zip(whole.inputs, low.input_layouts, strict=True))
    at = {position: layout.at for position, layout in enumerate(low.input_layouts) if layout.at is not None}
    ends = {position: layout.at for position, layout in enumerate(low.output_layouts) if layout.at is not None}
    placing = with_outputs(placing_of(whole, at, low.mesh), whole, ends)
    local = lower(whole, low.choices, ins, low.output_layouts, low.mesh, record_local, placing=placing)
    owners = {id: value.of for id, value in local.values.items() if value.of is not None}
    # No hooks `rewrite_local`: sums that they send narrow would differ from one device, and are no fault.
    passes = passes_of_plugins(low.registry.passes, low.priced)
    local, _ = run_passes(passes, local, low.left_out)
    return PlainProgram(local, owners)


@attrs.frozen(eq=False)
class Arguments:
    """One call's arguments on the mesh; the caller's tensors are never written to."""

    backend: Backend
    leaves: Sequence[torch.Tensor]
    shards: list[Shards]  # per input of the program without its constants: the owned ranks' parts
    device: torch.device  # where steps on the mesh run
    seed: torch.Tensor | None
    hidden: Sequence[torch.Tensor] = ()  # what the step captured
    hidden_dtypes: Sequence[torch.dtype] = ()  # in which it is read

    def copies(self, positions: Sequence[int]) -> list[Shards]:
        """The parts, with those of `positions` in memory of their own; ranks that share a tensor still do."""
        out = [list(shards) for shards in self.shards]
        for k in positions:
            own = {id(x): x.clone() for x in out[k]}
            out[k] = [own[id(x)] for x in out[k]]
        return out

    def computed(self) -> list[Shards]:
        """The parts where the plain program computes, which copies nothing between tiers.

        Ranks that share a tensor still do.
        """
        if self.device.type == "cpu":
            return self.copies(())
        on_device: dict[int, torch.Tensor] = {}
        copied = []
        for shards in self.shards:
            for shard in shards:
                if id(shard) not in on_device:
                    on_device[id(shard)] = in_tier(in_memory(shard), "device", self.device)
            copied.append([on_device[id(shard)] for shard in shards])
        return copied

    def whole(self) -> list[torch.Tensor]:
        """The global values on the CPU, copies. Collective where arguments are DTensors on real ranks."""
        found = [whole_value(x) for x in self.leaves]
        captured = [whole_value(x).to(dtype) for x, dtype in zip(self.hidden, self.hidden_dtypes, strict=True)]
        return [*found, *([] if self.seed is None else [self.seed]), *captured]


def arguments_of(low: Lowered, args: tuple[Any, ...]) -> Arguments:
    """Place `args` as the step wants them. The seed is the one that the next call would draw; it is not used up."""
    leaves = low.traced.pack(args)
    backend = backend_for(low.mesh, low.executor)
    shards = []
    for leaf, layout, name in zip(leaves, low.input_layouts, low.traced.names, strict=False):
        shards.append(place(leaf, layout, low.mesh, backend, name=name))
    seed = None
    if low.traced.uses_seed:
        before = random_state()
        drawn = main_seed(backend.watch, draw_seed(), device_of(low.mesh))
        set_random_state(before)
        shards.append([drawn] * len(backend.ranks(low.mesh)))
        seed = drawn.cpu()
    shards += low.hidden_parts(backend)
    COPIER.arrived(chain.from_iterable(shards))  # they are looked at and copied here
    return Arguments(backend, leaves, shards, device_of(low.mesh), seed, low.hidden, low.hidden_dtypes)


def whole_value(x: torch.Tensor) -> torch.Tensor:
    """The global value on the CPU, a copy. Collective for a DTensor on real ranks."""
    return make(x.full() if isinstance(x, DTensor) else x).detach().cpu().clone()


# ---- words ----


def value_name(value: Value, maker: Node | None) -> str:
    """`loss`, or what made a value that has no name: `%12 (linear of h.0.mlp)`."""
    if value.name:
        return value.name
    if maker is None:
        return f"%{value.id}"
    return f"%{value.id} ({target_text(maker.target)}{f' of {maker.path}' if maker.path else ''})"


def history(plain: PlainProgram, makers: Mapping[int, Node], mine: int, node: Node) -> str:
    """What lies between a local value and the copies of global values that it was made from.

    `makers`: of local values.
    """
    chain: list[Node] = []
    todo = [mine]
    while todo:
        made = makers.get(todo.pop())
        if made is None or made in chain:
            continue
        chain.append(made)
        todo += [r for r in made.refs if r not in plain.owners]
    steps = ", ".join(collective_text(n) for n in reversed(chain))
    source, arrow, target = node.note.partition(" -> ")
    if arrow:
        return (
            f"{steps}, which brings {source!r} to {target!r} for the operator at {node.line or 'the end of the step'}"
        )
    return f"{steps} {node.note}".rstrip()


def collective_text(node: Node) -> str:
    """`all_gather(dp)` of a collective, the operator's name of anything else."""
    if node.target.startswith("colofunc.") and len(node.args) > 1 and isinstance(node.args[1], tuple):
        if all(isinstance(a, str) for a in node.args[1]) and node.args[1]:
            return f"{target_text(node.target)}({', '.join(node.args[1])})"
    return target_text(node.target)
