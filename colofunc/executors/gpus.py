"""Which GPU a launched process uses, and whether all of them have one of their own.

Problem: `torchrun` shows every process all GPUs of a node, Slurm shows each task one, as number 0 to all. A rank that
decides by what it sees alone may join NCCL where another joins gloo, and both wait. Idea: each rank names the GPU that
it would take, by what no other GPU is called; all ranks see all names, and decide alike: NCCL where every rank has a
GPU of its own, else gloo.

    own_gpu(mesh, launch, watch)      # 0 on each of eight tasks with one GPU each; None on all of four that share one GPU
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from colofunc import compat, env
from colofunc.env import Launch
from colofunc.errors import MeshError
from colofunc.executors.watch import Watch
from colofunc.mesh import Mesh
from colofunc.mesh.device import group_moves_gpu_memory, usable_gpus, use_gpu


def own_gpu(mesh: Mesh, launch: Launch, watch: Watch) -> int | None:
    """This rank's GPU; None on all ranks where some have none of their own. Collective, unless the mesh wants the host.

    Raises MeshError on all ranks where the mesh wants GPUs and some rank has none.
    """
    if mesh.device == "cpu":
        return None
    index = candidate(launch, usable_gpus())
    with watch:
        names = watch.exchange("the GPUs of the ranks", "" if index is None else gpu_name(index), watch.deadline_s)
    trouble = shared_or_missing(names)
    if not trouble:
        return index
    if mesh.device == "cuda":
        raise MeshError(
            f'{mesh} wants a GPU of its own for each rank, and {trouble}. Try: fewer processes a node, or device="cpu"'
        )
    if any(names) and launch.rank == 0:
        warnings.warn(
            f"{mesh} runs on the host and leaves GPUs idle, because {trouble}. Try: as many processes a node as it "
            'has GPUs, or device="cpu", which says that it is meant',
            stacklevel=2,
        )
    return None


def adopt_gpu(watch: Watch | None) -> None:
    """In a process group that somebody else made, this process's GPU in all of its threads.

    Collective where that has NCCL.

    It is the one that the group is bound to (`device_id=`), else the current one. A script that has chosen none is on
    GPU 0, as all ranks of its node are: it gets the one of its LOCAL_RANK. Raises MeshError on all ranks where two are
    on one GPU, which NCCL refuses later.
    """
    if watch is None or not group_moves_gpu_memory():
        return
    bound, launch = compat.bound_device(dist.group.WORLD), env.launched()
    index = torch.cuda.current_device() if bound is None or bound.index is None else bound.index
    if bound is None and index == 0 and launch is not None and launch.local_rank < usable_gpus():
        index = launch.local_rank
    use_gpu(index)
    trouble = shared_or_missing(watch.exchange("the GPUs of the ranks", gpu_name(index), watch.deadline_s))
    if trouble:
        raise MeshError(
            f"NCCL wants a GPU of its own for each rank, and {trouble}. Try: "
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init_process_group, or leave it to '
            "cf.join(mesh) to make the process group"
        )


def candidate(launch: Launch, there: int) -> int | None:
    """The GPU that a rank would take of those that it sees: its own number, where it sees those of other ranks too."""
    return launch.local_rank % there if there else None


def gpu_name(index: int) -> str:
    """What no other GPU of any node is called."""
    return f"{platform.node()} {torch.cuda.get_device_properties(index).uuid}"


def shared_or_missing(names: Sequence[str]) -> str:
    """Why ranks cannot all use a GPU, in words; empty where they can. names: of each rank's, "" where it sees none."""
    without = [rank for rank, name in enumerate(names) if not name]
    if without:
        return f"{_ranks(without)} can use none"
    first: dict[str, int] = {}
    for rank, name in enumerate(names):
        if name in first:
            return f"ranks {first[name]} and {rank} would share one"
        first[name] = rank
    return ""


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:8]))}{' and others' if len(ranks) > 8 else ''}"
