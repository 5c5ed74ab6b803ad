"""The kernels of this project, given by the hook that other plugins use."""

from __future__ import annotations

from colofunc.ops.built_in import CUDA_KERNELS
from colofunc.ops.kernels import Kernel
from colofunc.plugins.hookspecs import hookimpl


@hookimpl
def colofunc_kernels() -> tuple[Kernel, ...]:
    return CUDA_KERNELS
