"""The kernels of this project, given by the hook that other plugins use."""

from __future__ import annotations

from colofunc.ops import attention, random
from colofunc.ops.kernels import Kernel
from colofunc.plugins.hookspecs import hookimpl


@hookimpl
def colofunc_kernels() -> tuple[Kernel, ...]:
    return (*attention.CUDA_KERNELS, *random.CUDA_KERNELS)
