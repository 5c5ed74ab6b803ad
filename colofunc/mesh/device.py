"""Where a step runs: on one device of this process, which its mesh says.

Problem: a machine has GPUs or none, weights lie here and a batch there. If what a step is given decided where it runs,
two tensors of one step could end on two devices. Idea: one rule, by the mesh and the process, not by the tensors:

| mesh | a step runs on |
|---|---|
| `Mesh(..., device="cuda")` | this process's GPU; a MeshError where none can be used |
| `Mesh(..., device="cpu")` | the host |
| on real ranks | the GPU where the process group is NCCL's, else the host |
| of one rank | the GPU where there is one, else the host |
| of several ranks in one process | the host: they are simulated |

Whatever a step is given, captures, draws, makes or returns lies there, or in host memory where its tier says so. Plain
tensors are brought there from where they are.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from colofunc import env
from colofunc.errors import MeshError
from colofunc.mesh.mesh import Mesh
from colofunc.mesh.transport import carriers

_HOST = torch.device("cpu")


class _Process:
    """What this process has been told. Threads that read files have another current device than the main one."""

    gpu: int | None = None


def use_gpu(index: int) -> None:
    """From now on this process's GPU is that one, in all of its threads."""
    torch.cuda.set_device(index)
    _Process.gpu = index


def device_of(mesh: Mesh) -> torch.device:
    """Where steps on a mesh run in this process. Raises MeshError where that is a GPU and none can be used."""
    if not on_gpu(mesh):
        return _HOST
    if not usable_gpus():
        raise MeshError(
            f"{mesh} wants a GPU, and this process can use none: {_why_none()}. Try: device=None, which takes the host "
            "where there is no "
            'GPU, or device="cpu"'
        )
    return gpu_of_process()


def gpu_of_process() -> torch.device:
    """This process's GPU: what `use_gpu` was told, else the current one of the thread that asks."""
    return torch.device("cuda", torch.cuda.current_device() if _Process.gpu is None else _Process.gpu)


def on_gpu(mesh: Mesh) -> bool:
    """Whether steps on a mesh run on a GPU; also where it is planned for one that is not here."""
    if mesh.device is not None:
        return mesh.device == "cuda"
    if mesh.size == 1:
        return usable_gpus() > 0
    joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() == mesh.size
    return joined and group_moves_gpu_memory()


def group_moves_gpu_memory() -> bool:
    """Whether the process group's collectives take tensors on GPUs.

    One that was made without a named backend has both kinds.
    """
    return "nccl" in carriers().get("cuda", "")


def usable_gpus() -> int:
    """GPUs that this process sees and can use."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def node_devices() -> int:
    """How many GPUs of this machine steps use: one for each process that was launched on it, else all that are here."""
    launch = env.launched()
    return usable_gpus() if launch is None else launch.local_world_size


def _why_none() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built for the CPU only"
    return "torch.cuda.is_available() is False, so there is no driver, or no device is visible"


def idle_gpus(mesh: Mesh) -> str:
    """What to say of GPUs that steps on a mesh leave idle; empty where there are none, or somebody asked for it."""
    there = usable_gpus()
    if not there or mesh.device == "cpu":
        return ""
    launch = env.launched()
    ranks = 1 if launch is None else launch.local_world_size
    if on_gpu(mesh):
        idle = there - ranks
        if idle <= 0 or (launch is None and dist.is_available() and dist.is_initialized()):
            return ""
        way = f"torchrun --nproc-per-node {there} with a mesh of as many ranks a node"
        return f"{mesh} uses {ranks} of {there} GPUs of this machine. Try: {way}, or CUDA_VISIBLE_DEVICES for fewer"
    gpus = "the GPU" if there == 1 else f"all {there} GPUs"
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == mesh.size:
        return (
            f"{mesh} runs on the host and leaves {gpus} of this machine idle: its process group is "
            f"{dist.get_backend()}'s. "
            'Try: one process for each GPU, or device="cpu", which says that it is meant'
        )
    return (
        f"{mesh} is simulated on the host and leaves {gpus} of this machine idle. Try: torchrun, with one process for "
        "each GPU, "
        'device="cuda", which simulates it on one, or device="cpu", which says that it is meant'
    )
