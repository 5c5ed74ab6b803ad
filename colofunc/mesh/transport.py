"""Transport: which library carries the tensors of which device between processes.

Problem: a process group says "nccl", "gloo", "cpu:gloo,cuda:nccl", or "undefined" where nobody named a backend, and
NCCL takes tensors on a GPU only. Idea: what each means is asked here.

    carriers()                       # {"cpu": "gloo", "cuda": "nccl"}
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

MIXED = "cpu:gloo,cuda:nccl"
"""What our own groups are made with where there are GPUs: objects and meshes on the CPU need no GPU then."""


def carriers() -> dict[str, str]:
    """Device type -> backend that carries its tensors in the default process group; {} where there is no group."""
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    name = str(dist.get_backend())
    if name == "undefined":
        name = str(dist.get_backend_config())
    if ":" in name:
        backends = {}
        for pair in name.split(","):
            device, _, backend = pair.partition(":")
            backends[device] = backend
        return backends
    return {"cuda": name} if "nccl" in name else {"cpu": name, "cuda": name}


def make_group(gpu: int | None, **options: Any) -> None:
    """The default process group: gloo on the CPU, and NCCL beside it where this rank has a GPU of its own.

    Bound to that GPU, NCCL connects now instead of at the first collective, and groups along axes are split from this
    one.
    """
    if gpu is None:
        dist.init_process_group("gloo", **options)
    else:
        dist.init_process_group(MIXED, device_id=torch.device("cuda", gpu), **options)
