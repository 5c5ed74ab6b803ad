"""Real ranks: one process per rank, `torch.distributed` between them.

The same straight-line source as on the simulated mesh, with one lane (see `rank_program`) and real collectives (see
`rank_collectives`, `groups`). Before a program runs for the first time all ranks compare a hash of it; a rank that
fails publishes its traceback and all end (see `watch`). Started by `torchrun`, by `launch`, or inside a process group
that the user made.

    torchrun --nproc-per-node 2 train.py          # init_from_env(mesh) joins the group: gloo on CPU, NCCL on CUDA
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from colofunc import compat, env
from colofunc.errors import MeshError, PlanError
from colofunc.executors.gloo import exchange_tensors
from colofunc.executors.gpus import adopt_gpu, own_gpu
from colofunc.executors.groups import ProcessGroups
from colofunc.executors.launch import before_end
from colofunc.executors.messages import Mail
from colofunc.executors.pools import in_tier
from colofunc.executors.post_validated import UnsettledStep
from colofunc.executors.presence import Limits
from colofunc.executors.program_cache import ProgramCache
from colofunc.executors.rank_program import DeferredExchange, RankProgram
from colofunc.executors.rendezvous import Meeting
from colofunc.executors.simulated import Shards
from colofunc.executors.source import Tap
from colofunc.executors.watch import Watch, meet
from colofunc.mesh import Mesh
from colofunc.mesh.device import group_moves_gpu_memory, use_gpu
from colofunc.mesh.transport import MIXED, carriers, make_group
from colofunc.program.ir import Program
from colofunc.program.places import has_places, on_rank, out_of_order


class Distributed:
    """Backend of a process that is one rank of the mesh."""

    name = "distributed"

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self._carriers = carriers()
        self.watch = watch_of_group()
        adopt_gpu(self.watch)
        self.unsettled: UnsettledStep | None = None
        self._groups: dict[Mesh, ProcessGroups] = {}
        self._mail = Mail()
        self._delivers = False  # whether `_deliver` is registered, to be called before this process ends
        self._kept = ProgramCache(self.compile)

    def ranks(self, mesh: Mesh) -> tuple[int, ...]:
        return (self.rank,)

    def compile(
        self,
        program: Program,
        mesh: Mesh,
        bound: Mapping[str, Callable[..., Any]] | None = None,
        whole: Program | None = None,
    ) -> RankProgram:
        """`program`, or this rank's part of it, ready to run in its order.

        `bound`: callables of targets that are no registered operators. `whole`: the program before it was compiled.
        """
        groups = self._groups_of(mesh)
        if not has_places(program):
            return RankProgram(program, groups, self.watch, bound, whole=whole)
        if self._by_nccl(mesh):
            _check_message_order(program, mesh)
        part = on_rank(program, mesh, self.rank)
        return RankProgram(part.program, groups, self.watch, bound, whole=whole, union=program, on_rank=part)

    def deferred_exchange(self, program: Program, mesh: Mesh) -> DeferredExchange:
        if self._by_nccl(mesh):
            raise PlanError(
                'cf.pipeline(validate="next step") posts what it will receive before it sends, which waits for ever '
                f'with NCCL; it has run with gloo only. Try: validate="step", or {mesh!r} with device="cpu"'
            )
        groups = self._groups_of(mesh)
        if not self._delivers:
            # A process that ends takes along what it has not sent yet.
            self._delivers = True
            before_end(self._deliver)
            atexit.register(self._deliver)
        return DeferredExchange(program, on_rank(program, mesh, self.rank), groups, self.watch)

    def interrupted(self) -> None:
        self._mail.under_way = True

    def observe(self, program: Program, mesh: Mesh, tap: Tap) -> RankProgram:
        return RankProgram(program, self._groups_of(mesh), self.watch, tap=tap)

    def _deliver(self) -> None:
        for groups in self._groups.values():
            groups.delivered()

    def _by_nccl(self, mesh: Mesh) -> bool:
        return self._carriers.get("cuda") == "nccl" and mesh.device != "cpu"

    def _groups_of(self, mesh: Mesh) -> ProcessGroups:
        groups = self._groups.get(mesh)
        if groups is None:
            if mesh.device == "cpu" and "cpu" not in self._carriers:
                there = ", ".join(self._carriers.values())
                raise MeshError(
                    f"{mesh!r} is to run on the CPU and the process group carries tensors on GPUs only ({there}). Try: "
                    f"torch.distributed.init_process_group({MIXED!r}), or leave it to cf.join(mesh) to make the group"
                )
            groups = self._groups[mesh] = ProcessGroups(
                mesh, self.rank, self._carriers, sub_limit_s(self.watch), self._mail
            )
        return groups

    def limit(self) -> None:
        """What `cf.join` has said holds for the groups that are there too; a group of all ranks that somebody else made
        keeps its own.
        """
        limit_s = sub_limit_s(self.watch)
        if self.watch is not None and self.watch.made_group:
            compat.set_group_limit(dist.group.WORLD, limit_s)
        for groups in self._groups.values():
            groups.limit(limit_s)

    def run(self, program: Program, mesh: Mesh, inputs: Sequence[Shards]) -> list[Shards]:
        return self._kept.get(program, mesh)(inputs)

    def exchange(self, what: str, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        """Send tensors to other ranks and receive into others', by rank. Collective. `what` it is for, for errors."""
        meet(self.watch, what)
        with self.watch or nullcontext():
            exchange_tensors(sent, received)


def _check_message_order(program: Program, mesh: Mesh) -> None:
    """Raises PlanError where NCCL, which knows messages of a pair by their order, would deliver one for another."""
    message = out_of_order(program, mesh)
    if message:
        raise PlanError(
            f"NCCL delivers messages in the order in which they are sent, and this schedule receives {message} before "
            "one of the same kind that was sent earlier. Try: another schedule, or a group that carries tensors on "
            "GPUs with gloo"
        )


def init_from_env(mesh: Mesh, limits: Limits | None = None) -> bool:
    """Join the process group that a launcher set up; True if this process is one of several ranks now."""
    limits = limits or Limits()
    launch = env.launched()
    if dist.is_initialized():
        return dist.get_world_size() > 1
    if launch is None or launch.world_size == 1:
        return False
    if mesh.size != launch.world_size:
        raise MeshError(
            f"{mesh} has {mesh.size} ranks but {launch.world_size} processes were launched; "
            "start as many processes as the mesh has ranks, or write one axis as -1"
        )
    # The watch comes first: it sees that a rank ends while the process group is made.
    meeting = Meeting.at(launch, limits)
    watch = Watch(launch.rank, launch.world_size, limits, meeting)
    limit, store = timedelta(seconds=limits.limit_s), meeting.group_store(len(_WATCHES))
    gpu = own_gpu(mesh, launch, watch)
    if gpu is not None:
        use_gpu(gpu)
    with watch:
        make_group(gpu, timeout=limit, store=store, rank=launch.rank, world_size=launch.world_size)
    _WATCHES[dist.group.WORLD] = watch
    watch.chosen = watch.made_group = True
    return True


def sub_limit_s(watch: Watch | None) -> float:
    """How long a collective of a group along single axes may take: as long as one of the whole, whoever made that.

    What `cf.join` was told comes first; a group that somebody else made has its own limit.
    """
    if watch is None:
        return Limits().limit_s
    device = "cuda" if group_moves_gpu_memory() else "cpu"
    own_s = None if watch.chosen else compat.group_limit_s(dist.group.WORLD, device)
    return watch.deadline_s if own_s is None else own_s


# Process group -> what ties this rank to the others of it. Kept as long as the process: groups are few.
_WATCHES: dict[Any, Watch] = {}


def watch_of_group(limits: Limits | None = None) -> Watch | None:
    """The tie to the other ranks of the process group, made where the group is not ours; None for a group of one."""
    if dist.get_world_size() == 1:
        return None
    if dist.group.WORLD not in _WATCHES:
        _WATCHES[dist.group.WORLD] = Watch(dist.get_rank(), dist.get_world_size(), limits)
    watch = _WATCHES[dist.group.WORLD]
    if limits is not None:
        watch.limits, watch.chosen = limits, True
    return watch


def broadcast_object(thing: Any) -> Any:
    """Rank 0's object on every rank; the object itself where there is one rank."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return thing
    box = [thing if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def main_seed(watch: Watch | None, seed: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Rank 0's seed, on the device that draws by it.

    Every rank has drawn one on the host, so that their generators stay in step.

    It travels once and is never read back, so that the host does not wait for the device.
    """
    if watch is None:
        return in_tier(seed, "device", device)
    carried = in_tier(seed, "device", device) if group_moves_gpu_memory() else seed
    with watch:
        dist.broadcast(carried, src=0)
    return in_tier(carried, "device", device)
