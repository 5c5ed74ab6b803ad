"""Where local programs run: the interface that the simulated mesh, torch.distributed and compiled code share.

A backend owns some ranks of a mesh: the simulated one owns all, a torchrun process exactly one. A value is a list with
one tensor per *owned* rank, in rank order, so code above never asks which backend it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, Protocol

import torch
import torch.distributed as dist

from colofunc import env
from colofunc.errors import InputError, MeshError, near
from colofunc.executors.compiled import compile_segments
from colofunc.executors.distributed import Distributed, init_from_env, watch_of_group
from colofunc.executors.fused import NAME as COMPILED
from colofunc.executors.post_validated import UnsettledStep
from colofunc.executors.presence import Limits
from colofunc.executors.program_cache import ProgramCache
from colofunc.executors.simulated import Shards, SimulatedProgram
from colofunc.executors.source import Tap
from colofunc.executors.unwritten import counted
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.program.ir import Program, kept_with
from colofunc.program.memory import MemoryReport, memory
from colofunc.program.passes.kernels import capability_on
from colofunc.program.passes.one_call import small_updates_in_one_call
from colofunc.program.passes.overlapped import is_overlapped, overlapped
from colofunc.program.places import distinct_ranks, on_rank

RunFn = Callable[[Sequence[Shards]], list[Shards]]
FinishRun = Callable[[], list[Shards]]
Begin = Callable[[Sequence[Shards]], FinishRun]
EXECUTORS = ("simulated", "distributed", "compiled")


class Backend(Protocol):
    """Runs local programs for the ranks it owns."""

    name: str
    watch: Watch | None  # the tie to other processes; None where all ranks are in this one
    unsettled: UnsettledStep | None  # the step whose update is to be validated yet

    def ranks(self, mesh: Mesh) -> tuple[int, ...]:
        """The ranks of `mesh` whose tensors live in this process."""

    def compile(self, program: Program, mesh: Mesh) -> RunFn:
        """`program` as a function of its inputs' shards (constants excluded). Keep it: making one costs time."""

    def deferred_exchange(self, program: Program, mesh: Mesh) -> Begin:
        """`program`, which sends scalars, in two steps: what is known is sent when it is called, results come when that
        is called.
        """

    def interrupted(self) -> None:
        """What `deferred_exchange` has begun will not end: no program begins any more that would take its messages for
        its own.
        """

    def run(self, program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
        """Outputs of `program` per owned rank; compiled programs are kept by identity."""

    def observe(self, program: Program, mesh: Mesh, tap: Tap) -> RunFn:
        """`program` node by node as it stands, with what `tap` writes behind each; not kept."""

    def exchange(self, what: str, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send tensors to ranks of other processes and receive theirs, by rank.

        Collective. `what` it is for, for errors.
        """


class SimulatedBackend:
    """All ranks in this process, in lock step."""

    name = "simulated"

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.unsettled: UnsettledStep | None = None
        self._kept = ProgramCache(self.compile)

    def ranks(self, mesh: Mesh) -> tuple[int, ...]:
        return tuple(range(mesh.size))

    def compile(self, program: Program, mesh: Mesh) -> SimulatedProgram:
        return SimulatedProgram(program, mesh)

    def deferred_exchange(self, program: Program, mesh: Mesh) -> Begin:
        run = self.compile(program, mesh)
        return lambda inputs: partial(run, inputs)

    def interrupted(self) -> None:
        pass  # nothing travels

    def run(self, program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
        return self._kept.get(program, mesh)(inputs)

    def observe(self, program: Program, mesh: Mesh, tap: Tap) -> SimulatedProgram:
        return SimulatedProgram(program, mesh, tap=tap)

    def exchange(self, what: str, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        assert not sent and not received, "there are no ranks of other processes"


class Compiled:
    """The ranks of another backend, with the operators between collectives compiled by `torch.compile`."""

    name = "compiled"

    def __init__(self, inner: SimulatedBackend | Distributed, compiler: str = "inductor") -> None:
        self._inner = inner
        self.watch = inner.watch
        self.unsettled: UnsettledStep | None = None
        self._compiler = compiler
        self._kept = ProgramCache(self.compile)

    def ranks(self, mesh: Mesh) -> tuple[int, ...]:
        return self._inner.ranks(mesh)

    def compile(self, program: Program, mesh: Mesh) -> RunFn:
        segmented, bound = compile_segments(program, self._compiler)
        if isinstance(self._inner, SimulatedBackend):
            return SimulatedProgram(segmented, mesh, bound, whole=program)
        return self._inner.compile(segmented, mesh, bound, program)

    def deferred_exchange(self, program: Program, mesh: Mesh) -> Begin:
        """Not compiled: it is a handful of scalars."""
        return self._inner.deferred_exchange(program, mesh)

    def interrupted(self) -> None:
        self._inner.interrupted()

    def run(self, program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
        return self._kept.get(program, mesh)(inputs)

    def observe(self, program: Program, mesh: Mesh, tap: Tap) -> RunFn:
        """Not compiled: a compiled segment has no nodes to look at."""
        return self._inner.observe(program, mesh, tap)

    def exchange(self, what: str, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        self._inner.exchange(what, sent, received)


def backend_for(mesh: Mesh, name: str | None = None) -> Backend:
    """The backend a step on `mesh` runs on: real ranks where a process group of its size exists, else simulated.

    A process that a launcher started joins its peers here.
    """
    real = init_from_env(mesh) if mesh.size > 1 and name in (None, "distributed", "compiled") else False
    if name is None:
        name = "distributed" if real else "simulated"
    if name == "simulated":
        return _simulated()
    if name == "compiled":
        return _compiled(_process_group(mesh) if real else None)
    if name == "distributed":
        return _distributed(_process_group(mesh))
    raise MeshError(f"unknown executor {name!r}{near(name, EXECUTORS, 'executors')}")


def join(mesh: Mesh, *, limit_s: float = Limits().limit_s, notice_s: float = Limits().notice_s) -> None:
    """Join the launched processes now instead of at the first step, and say how long ranks wait for one another.

    `notice_s`: after so long a line on both sides says which rank waits where, for whom, and what is known of that one:
    where it was last, whether its process is stopped or has ended. `limit_s`: after so long it is an error; for
    joining, for a point that all ranks must come to, and for collectives, also of groups along single axes and of
    groups that are there already. A process group that you made keeps its own timeout. `cf.save` and
    `cf.save_pretrained`, which may write for long, have limits of their own. Nothing to do in one process.
    """
    if notice_s <= 0 or limit_s <= 0:
        raise InputError(
            f"cf.join: limit_s={limit_s!r} and notice_s={notice_s!r} have to be positive. Try: cf.join(mesh, "
            "limit_s=600)"
        )
    limits = Limits(limit_s, notice_s)
    if mesh.size > 1 and init_from_env(mesh, limits):
        watch_of_group(limits)
        backend_for(mesh)  # raises where the mesh and the processes do not fit
        _distributed(dist.group.WORLD).limit()


def on_real_ranks(mesh: Mesh, name: str | None = None) -> bool:
    """Whether a step on `mesh` runs, or is about to run, with one process per rank. Joins nothing."""
    if mesh.size == 1 or name == "simulated":
        return False
    launch = env.launched()
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() == mesh.size
    return (1 if launch is None else launch.world_size) == mesh.size


def planned_on_real_ranks(mesh: Mesh, name: str | None = None) -> bool:
    """Whether a step on `mesh` is planned as real ranks run it: it runs on them, was put on an executor of them before
    there are any, or its mesh names a machine with CUDA cards. A step that was put on "simulated" never is.
    """
    if mesh.size == 1 or name == "simulated":
        return False
    named = not mesh.assumed and capability_on(mesh.topology) is not None
    return named or name in ("distributed", "compiled") or on_real_ranks(mesh, name)


def held(program: Program, mesh: Mesh, name: str | None = None, rank: int | None = None) -> MemoryReport:
    """What a rank holds while the executor runs `program` in this order: on real ranks with what is in flight. Joins
    nothing.

    rank: by default the one that holds most, where ranks do different things.

    A step that was put on "distributed" or "compiled" counts as on real ranks before there are any.
    """
    some = distinct_ranks(program, mesh) if rank is None else (rank,)
    reports = [kept_with(program, (held, mesh, name, one), partial(_held_by, program, mesh, name, one)) for one in some]
    return max(reports, key=lambda report: report.peak_bytes["device"])


def _held_by(program: Program, mesh: Mesh, name: str | None, rank: int) -> MemoryReport:
    uncompiled = mesh.topology.software.uncompiled
    fusion = partial(counted, uncompiled=uncompiled) if name == COMPILED else None
    return memory(on_rank(program, mesh, rank).program, sent=planned_on_real_ranks(mesh, name), fusion=fusion)


def held_in_order(program: Program, mesh: Mesh, name: str | None = None, rank: int | None = None) -> MemoryReport:
    """`held` of a program that was not put in its order yet."""
    return held(ordered(program, mesh, name), mesh, name, rank)


def fullest(program: Program, mesh: Mesh, name: str | None = None) -> int:
    """The rank that holds most on the device."""
    peaks = {rank: held(program, mesh, name, rank) for rank in distinct_ranks(program, mesh)}
    return max(peaks, key=lambda rank: peaks[rank].peak_bytes["device"])


def ordered(program: Program, mesh: Mesh, name: str | None = None, ahead_bytes: float = inf) -> Program:
    """`program` in the order in which plans are searched: that in which the executor runs it, but for small updates.

    Joins nothing. ahead_bytes: what may be gathered ahead of its use.
    """
    if not planned_on_real_ranks(mesh, name):
        return program
    # Of a pipeline every rank is asked for what it holds, and all of them run parts of one order.
    return kept_with(program, (ordered, mesh, name, ahead_bytes), partial(overlapped, program, ahead_bytes))


def as_run(program: Program, mesh: Mesh, name: str | None = None) -> Program:
    """`program` in the very order in which the executor runs it: `ordered`, with small updates side by side as far as
    no peak is higher by that.
    """
    if not planned_on_real_ranks(mesh, name) or is_overlapped(program):
        return program
    return small_updates_in_one_call(ordered(program, mesh, name), partial(held, mesh=mesh, name=name))


def _process_group(mesh: Mesh) -> Any:
    if not dist.is_initialized():
        raise MeshError(
            f'no process group for {mesh}; start with torchrun or cf.launch(fn, {mesh.size}), or use "simulated"'
        )
    if dist.get_world_size() != mesh.size:
        raise MeshError(
            f"{mesh} has {mesh.size} ranks but the process group has {dist.get_world_size()}; "
            f"start as many processes as the mesh has ranks, or write one axis as -1"
        )
    return dist.group.WORLD


# One backend per process group: its groups and its watch thread are the process's own.


@lru_cache(maxsize=1)
def _simulated() -> SimulatedBackend:
    return SimulatedBackend()


@lru_cache(maxsize=4)
def _distributed(world: Any) -> Distributed:
    return Distributed()


@lru_cache(maxsize=4)
def _compiled(world: Any) -> Compiled:
    return Compiled(_simulated() if world is None else _distributed(world))
